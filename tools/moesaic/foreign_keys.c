/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keys of LLaMA-Factory's yaml files (its arguments of model, data, training, fine-tuning and
 * generating), of transformers' TrainingArguments and of ktransformers. tests/cli/test_foreign.py
 * holds a row for each. Every key's last rule takes any value, so that none falls through.
 */
#include "tools/moesaic/foreign.h"

#include <stddef.h>

#define ONLY_ADAMW "the optimizer is AdamW: remove the key"
#define ONLY_CROSS_ENTROPY "the loss is cross-entropy: remove the key"
#define NEW_TOKENS "the vocabulary stays the checkpoint's: add the tokens to its tokenizer and embedding first (transformers), then train that"

/* clang-format off */
const struct foreign_rule foreign_rules[] = {
	/* ---- model ---- */
	{ "adapter_folder", NULL, FOREIGN_REFUSE, "give the folder of the adapter itself as adapter_name_or_path", NULL },
	{ "resize_vocab", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "resize_vocab add_tokens add_special_tokens new_special_tokens_config", NULL, FOREIGN_REFUSE, NEW_TOKENS, NULL },
	{ "init_special_tokens freeze_original_embeddings", NULL, FOREIGN_IGNORE, NULL, NULL },
	{ "split_special_tokens", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "split_special_tokens", NULL, FOREIGN_REFUSE,
	  "special tokens are not split: rows with input_ids (docs/data.md) take any tokenisation", NULL },
	{ "model_revision", "main", FOREIGN_ACCEPT, NULL, NULL },
	{ "model_revision", NULL, FOREIGN_IGNORE, NULL, NULL },
	{ "rope_scaling", "none", FOREIGN_ACCEPT, NULL, NULL },
	{ "rope_scaling", NULL, FOREIGN_REFUSE,
	  "positions follow the checkpoint: set rope_parameters in its config.json instead", NULL },
	{ "shift_attn", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "shift_attn", NULL, FOREIGN_REFUSE, "attention covers the whole document: remove the key, or lower cutoff_len", NULL },
	{ "mixture_of_depths", NULL, FOREIGN_REFUSE, "the checkpoint's layers are trained as they are: remove the key", NULL },
	{ "train_from_scratch", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "train_from_scratch", NULL, FOREIGN_REFUSE,
	  "the weights are the checkpoint's: save a randomly initialised one first (transformers), then train with method full", NULL },
	{ "quantization_bit", NULL, FOREIGN_REFUSE,
	  "bitsandbytes is not used: weights: int8 or weights: int4 keeps the experts so (docs/formats.md)", NULL },
	{ "quantization_method quantization_type double_quantization quantization_device_map", NULL, FOREIGN_IGNORE, NULL, NULL },
	{ "model_max_length", NULL, FOREIGN_REFUSE, "cutoff_len says it", NULL },
	{ "cache_dir use_fast_tokenizer low_cpu_mem_usage flash_attn use_unsloth use_unsloth_gc enable_liger_kernel "
	  "disable_gradient_checkpointing use_reentrant_gc upcast_layernorm upcast_lmhead_output infer_backend infer_dtype "
	  "offload_folder use_kv_cache use_v1_kernels hf_hub_token ms_hub_token om_hub_token print_param_status trust_remote_code "
	  "compute_dtype device_map visual_inputs crop_to_patches use_audio_in_video image_* video_* audio_* vllm_* sglang_*",
	  NULL, FOREIGN_IGNORE, NULL, NULL },
	{ "export_size", NULL, FOREIGN_MAP, "max-shard-size", "%sGB" },
	{ "export_quantization_bit", NULL, FOREIGN_REFUSE, "weights: int8 (int4, gptq, awq) says it here", "max-shard-size" },
	{ "export_legacy_format", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "export_legacy_format", NULL, FOREIGN_REFUSE, "safetensors are written: remove the key", "max-shard-size" },
	{ "export_dir export_device export_quantization_dataset export_quantization_nsamples export_quantization_maxlen "
	  "export_hub_model_id", NULL, FOREIGN_IGNORE, NULL, NULL },

	/* ---- data ---- */
	{ "template media_dir buffer_size overwrite_cache preprocessing_batch_size preprocessing_num_workers eval_num_beams "
	  "ignore_pad_token_for_loss eval_on_each_dataset packing_similarity_threshold packing_embedding_model tool_format "
	  "tokenized_path data_shared_file_system reserved_label_len", NULL, FOREIGN_IGNORE, NULL, NULL },
	{ "streaming", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "streaming", NULL, FOREIGN_IGNORE, NULL, NULL },
	{ "mix_strategy", "concat", FOREIGN_ACCEPT, NULL, NULL },
	{ "mix_strategy interleave_probs", NULL, FOREIGN_REFUSE,
	  "all rows of all datasets are used (concat): write the mixture that you want into one file", NULL },
	{ "train_on_prompt", "true", FOREIGN_MAP, "train-on", "all" },
	{ "mask_history", "true", FOREIGN_MAP, "train-on", "last" },
	{ "train_on_prompt mask_history", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "train_on_prompt mask_history", NULL, FOREIGN_REFUSE, "expected true or false", NULL },
	{ "neat_packing", "true", FOREIGN_MAP, "packing", "on" },
	{ "neat_packing", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "neat_packing", NULL, FOREIGN_REFUSE, "expected true or false", NULL },
	{ "packing_strategy", "length", FOREIGN_ACCEPT, NULL, NULL },
	{ "packing_strategy", NULL, FOREIGN_REFUSE, "rows are packed by length, in order: sort the file as you want it packed", NULL },
	{ "default_system", NULL, FOREIGN_REFUSE, "give the rows a system text (docs/data.md), or no_system: true", "cutoff-len" },
	{ "enable_thinking", "true", FOREIGN_ACCEPT, NULL, NULL },
	{ "enable_thinking", NULL, FOREIGN_ADD, "template-vars", "enable_thinking=%s" },
	{ "reasoning_effort", "xhigh", FOREIGN_ACCEPT, NULL, NULL },
	{ "reasoning_effort", NULL, FOREIGN_ADD, "template-vars", "reasoning_effort=%s" },
	{ "preserve_thinking", NULL, FOREIGN_ADD, "template-vars", "preserve_thinking=%s" },

	/* ---- fine-tuning ---- */
	{ "stage", "sft", FOREIGN_ACCEPT, NULL, NULL },
	{ "stage", NULL, FOREIGN_REFUSE, "only supervised fine-tuning (sft) is in this version", NULL },
	{ "additional_target", NULL, FOREIGN_REFUSE,
	  "no other modules are trained beside an adapter: train_router: true for the routers, method: full for all weights", NULL },
	{ "loraplus_lr_ratio", "1", FOREIGN_ACCEPT, NULL, NULL },
	{ "loraplus_lr_ratio", NULL, FOREIGN_REFUSE, "A and B have one learning rate: remove the key", NULL },
	{ "use_dora", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "use_dora", NULL, FOREIGN_REFUSE, "plain LoRA is trained: remove the key; use_rslora and a higher lora_rank are there", NULL },
	{ "pissa_init", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "pissa_init", NULL, FOREIGN_REFUSE,
	  "A begins random, B as zero: remove the key, or give an adapter made elsewhere as adapter_name_or_path", NULL },
	{ "create_new_adapter", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "create_new_adapter", NULL, FOREIGN_REFUSE,
	  "merge the adapter first (moesaic merge) and train from the result, without adapter_name_or_path", NULL },
	{ "use_galore use_apollo use_badam use_adam_mini use_muon", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "use_galore use_apollo use_badam use_adam_mini use_muon", NULL, FOREIGN_REFUSE, ONLY_ADAMW, NULL },
	{ "use_llama_pro freeze_language_model", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "use_llama_pro", NULL, FOREIGN_REFUSE, "no layers are added: remove the key", NULL },
	{ "freeze_language_model", NULL, FOREIGN_REFUSE, "the language model is what is trained here: remove the key", NULL },
	{ "use_dft_loss use_asft_loss use_eaft_loss", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "use_dft_loss use_asft_loss use_eaft_loss", NULL, FOREIGN_REFUSE, ONLY_CROSS_ENTROPY, NULL },
	{ "num_mtp_layers", "0", FOREIGN_ACCEPT, NULL, NULL },
	{ "num_mtp_layers", NULL, FOREIGN_REFUSE, "layers that predict several tokens are not trained: remove the key", NULL },
	{ "disable_shuffling", "true", FOREIGN_MAP, "shuffle", "off" },
	{ "disable_shuffling", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "disable_shuffling", NULL, FOREIGN_REFUSE, "expected true or false", NULL },
	{ "early_stopping_steps", NULL, FOREIGN_REFUSE,
	  "a run does not stop by its evaluations: load_best_model_at_end: true keeps the best, max_steps ends it", NULL },
	{ "plot_loss", "true", FOREIGN_ACCEPT, NULL, NULL },
	{ "plot_loss pure_bf16 loraplus_lr_embedding pissa_iter pissa_convert mtp_loss_weight asft_alpha eaft_alpha "
	  "compute_accuracy include_effective_tokens_per_second freeze_trainable_layers freeze_trainable_modules "
	  "freeze_extra_modules freeze_vision_tower freeze_multi_modal_projector use_swanlab use_mca use_megatron_bridge "
	  "use_hyper_parallel ld_alpha ref_model ref_model_* reward_model reward_model_* module_dropout oft_* pref_* dpo_* kto_* "
	  "simpo_* ppo_* galore_* apollo_* badam_* swanlab_* hyper_parallel_*", NULL, FOREIGN_IGNORE, NULL, NULL },

	/* ---- transformers' TrainingArguments ---- */
	{ "do_train", "true", FOREIGN_ACCEPT, NULL, NULL },
	{ "do_train", NULL, FOREIGN_REFUSE, "moesaic train always trains: use moesaic eval, or remove the key", "save-steps" },
	{ "per_gpu_train_batch_size", NULL, FOREIGN_MAP, "batch-size", NULL },
	{ "optim", "adamw*|paged_adamw*", FOREIGN_IGNORE, NULL, NULL },
	{ "optim", NULL, FOREIGN_REFUSE, ONLY_ADAMW, NULL },
	{ "adafactor", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "adafactor", NULL, FOREIGN_REFUSE, ONLY_ADAMW, NULL },
	{ "optim_args", NULL, FOREIGN_REFUSE, "adam_beta1, adam_beta2, adam_epsilon and weight_decay are keys of their own", NULL },
	{ "label_smoothing_factor", "0", FOREIGN_ACCEPT, NULL, NULL },
	{ "label_smoothing_factor", NULL, FOREIGN_REFUSE, ONLY_CROSS_ENTROPY, NULL },
	{ "neftune_noise_alpha", "0", FOREIGN_ACCEPT, NULL, NULL },
	{ "neftune_noise_alpha", NULL, FOREIGN_REFUSE, "no noise is added to embeddings: remove the key", NULL },
	{ "train_sampling_strategy", "random", FOREIGN_ACCEPT, NULL, NULL },
	{ "train_sampling_strategy", "sequential", FOREIGN_MAP, "shuffle", "off" },
	{ "train_sampling_strategy", NULL, FOREIGN_IGNORE, NULL, NULL },
	{ "metric_for_best_model", "loss|eval_loss", FOREIGN_ACCEPT, NULL, NULL },
	{ "greater_is_better", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "metric_for_best_model greater_is_better", NULL, FOREIGN_REFUSE,
	  "the best checkpoint is that of the least eval_loss", NULL },
	{ "per_device_eval_batch_size per_gpu_eval_batch_size optim_target_modules average_tokens_across_devices bf16 fp16 tf32 "
	  "bf16_full_eval fp16_full_eval fp16_backend fp16_opt_level half_precision_backend gradient_checkpointing "
	  "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs torch_compile "
	  "torch_compile_backend torch_compile_mode torchdynamo use_liger_kernel liger_kernel_config use_cache "
	  "torch_empty_cache_steps auto_find_batch_size use_ipex jit_mode_eval no_cuda use_cpu use_mps_device "
	  "logging_nan_inf_filter logging_dir log_level log_level_replica log_on_each_node disable_tqdm "
	  "report_to run_name project include_num_input_tokens_seen include_tokens_per_second do_eval do_predict "
	  "prediction_loss_only eval_do_concat_batches eval_use_gather_object "
	  "eval_accumulation_steps include_for_metrics include_inputs_for_metrics batch_eval_metrics "
	  "save_only_model save_safetensors save_on_each_node enable_jit_checkpoint push_to_hub push_to_hub_model_id "
	  "push_to_hub_organization push_to_hub_token ignore_data_skip restore_callback_states_from_checkpoint full_determinism "
	  "group_by_length length_column_name accelerator_config parallelism_config deepspeed fsdp local_rank debug "
	  "skip_memory_metrics mp_parameters past_index ray_scope remove_unused_columns label_names sharded_ddp dispatch_batches "
	  "split_batches dataloader_* ddp_* fsdp_* hub_* trackio_* tpu_* torch_distributed_*", NULL, FOREIGN_IGNORE, NULL, NULL },
	{ "enable_torch_profiler profiler_* profile_modules fp8 fp8_* ray_* master_addr master_port placement_strategy "
	  "resources_per_worker", NULL, FOREIGN_IGNORE, NULL, NULL },

	/* ---- generating and evaluating ---- */
	{ "do_sample", "true", FOREIGN_ACCEPT, NULL, NULL },
	{ "do_sample", "false", FOREIGN_MAP, "temperature", "0" },
	{ "top_k", "0|-1", FOREIGN_ACCEPT, NULL, NULL },
	{ "top_k", NULL, FOREIGN_REFUSE, "top_p and temperature say how to sample: remove the key", "temperature" },
	{ "num_beams length_penalty", "1", FOREIGN_ACCEPT, NULL, NULL },
	{ "num_beams length_penalty", NULL, FOREIGN_REFUSE, "one answer is sampled, without beams: remove the key", "temperature" },
	{ "skip_special_tokens", "true", FOREIGN_ACCEPT, NULL, NULL },
	{ "skip_special_tokens do_sample max_length predict_with_generate generation_max_length generation_num_beams "
	  "generation_config sortish_sampler", NULL, FOREIGN_IGNORE, NULL, NULL },
	{ "task", NULL, FOREIGN_REFUSE, "benchmarks are not run: moesaic eval gives the loss on your data", NULL },
	{ "task_dir lang n_shot save_dir download_mode", NULL, FOREIGN_IGNORE, NULL, NULL },

	/* ---- ktransformers ---- */
	{ "kt_cpu_activation", "retain", FOREIGN_MAP, "recompute", "never" },
	{ "kt_cpu_activation", "recompute", FOREIGN_MAP, "recompute", "always" },
	{ "kt_cpu_activation", NULL, FOREIGN_IGNORE, NULL, NULL },
	{ "kt_num_threads cpu_infer", NULL, FOREIGN_THREADS, "threads", NULL },
	{ "kt_lora_alpha", NULL, FOREIGN_MAP, "lora-alpha", NULL },
	{ "kt_lora_dropout", NULL, FOREIGN_MAP, "lora-dropout", NULL },
	{ "kt_train_mode", NULL, FOREIGN_MAP, "method", NULL },
	{ "kt_weight_path", NULL, FOREIGN_MAP, "kt-weights", NULL },
	{ "kt_expert_weight_format", "bf16", FOREIGN_ACCEPT, NULL, NULL },
	{ "kt_expert_weight_format", NULL, FOREIGN_MAP, "weights", NULL },
	{ "kt_full_weight_grad", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "kt_full_weight_grad", NULL, FOREIGN_REFUSE,
	  "kt_train_mode (or --method) says it: full, or hybrid beside an adapter", NULL },
	{ "kt_use_lora_experts", "false", FOREIGN_ACCEPT, NULL, NULL },
	{ "kt_use_lora_experts", NULL, FOREIGN_REFUSE,
	  "no experts are added: the routed ones have LoRA themselves (lora_target: experts)", NULL },
	{ "use_kt kt_optimize_rule chunk_size mode kt_mode kt_maxlen kt_use_cuda_graph kt_force_think kt_backend kt_tp_enabled "
	  "kt_threadpool_count kt_max_cache_depth kt_model_max_length kt_share_backward_bb kt_share_cache_pool "
	  "kt_force_fused_expert_lora kt_num_gpu_experts kt_skip_expert_loading kt_non_expert_weight_path kt_weight_lifecycle "
	  "kt_expert_checkpoint_path kt_activation_policy kt_lora_expert_num kt_non_expert_manifest "
	  "kt_lora_expert_intermediate_size kt_checkpoint_files kt_full_experts kt_adapt_peft_lora kt_config enabled",
	  NULL, FOREIGN_IGNORE, NULL, NULL },
	{ NULL, NULL, FOREIGN_IGNORE, NULL, NULL },
};
/* clang-format on */
