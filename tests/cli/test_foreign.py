# SPDX-License-Identifier: Apache-2.0
"""Every key of LLaMA-Factory's argument classes (2026-11), of transformers' Seq2SeqTrainingArguments and of kt: what a yaml with it does."""

import json
import os
import unittest

from support import MODEL, Case

# Values that say what is done here anyway: nothing is said about them.
ACCEPTED = """
resize_vocab: false
split_special_tokens: false
model_revision: main
shift_attn: false
train_from_scratch: false
export_legacy_format: false
streaming: False
mix_strategy: concat
train_on_prompt: false
mask_history: no
neat_packing: false
packing_strategy: length
enable_thinking: true
reasoning_effort: xhigh
stage: sft
loraplus_lr_ratio: 1.0
use_dora: false
pissa_init: false
create_new_adapter: false
use_galore: false
use_apollo: false
use_badam: false
use_adam_mini: false
use_muon: false
use_llama_pro: false
freeze_language_model: false
use_dft_loss: false
use_asft_loss: false
use_eaft_loss: false
num_mtp_layers: 0
disable_shuffling: false
plot_loss: true
do_train: True
adafactor: false
label_smoothing_factor: 0.0
neftune_noise_alpha: 0
train_sampling_strategy: random
metric_for_best_model: eval_loss
greater_is_better: false
do_sample: true
top_k: 0
num_beams: 1
length_penalty: 1.0
skip_special_tokens: true
kt_expert_weight_format: bf16
kt_full_weight_grad: false
kt_use_lora_experts: false
"""

# Values that change what is trained, and what the line must say to do. A null of the same key is accepted.
REFUSED = {
    "adapter_folder": ("a", "adapter_name_or_path"),
    "resize_vocab": (True, "tokenizer"),
    "add_tokens": ("<a>,<b>", "tokenizer"),
    "add_special_tokens": ("<a>", "tokenizer"),
    "new_special_tokens_config": ("a.yaml", "tokenizer"),
    "split_special_tokens": (True, "input_ids"),
    "rope_scaling": ("yarn", "config.json"),
    "shift_attn": (True, "remove the key"),
    "mixture_of_depths": ("convert", "remove the key"),
    "train_from_scratch": (True, "method full"),
    "quantization_bit": (4, "weights: int4"),
    "model_max_length": (2048, "cutoff_len"),
    "mix_strategy": ("interleave_under", "one file"),
    "interleave_probs": ("0.3,0.7", "one file"),
    "train_on_prompt": ("perhaps", "true or false"),
    "mask_history": ("perhaps", "true or false"),
    "neat_packing": ("perhaps", "true or false"),
    "packing_strategy": ("semantic_aware", "sort the file"),
    "default_system": ("You are a pirate.", "system text"),
    "stage": ("dpo", "supervised"),
    "additional_target": (["embed_tokens", "lm_head"], "method: full"),
    "loraplus_lr_ratio": (16.0, "remove the key"),
    "use_dora": (True, "use_rslora"),
    "pissa_init": (True, "adapter_name_or_path"),
    "create_new_adapter": (True, "moesaic merge"),
    "use_galore": (True, "AdamW"),
    "use_apollo": (True, "AdamW"),
    "use_badam": (True, "AdamW"),
    "use_adam_mini": (True, "AdamW"),
    "use_muon": (True, "AdamW"),
    "use_llama_pro": (True, "remove the key"),
    "freeze_language_model": (True, "remove the key"),
    "use_dft_loss": (True, "cross-entropy"),
    "use_asft_loss": (True, "cross-entropy"),
    "use_eaft_loss": (True, "cross-entropy"),
    "num_mtp_layers": (1, "remove the key"),
    "disable_shuffling": ("perhaps", "true or false"),
    "early_stopping_steps": (3, "load_best_model_at_end"),
    "do_train": (False, "moesaic eval"),
    "optim": ("adafactor", "AdamW"),
    "adafactor": (True, "AdamW"),
    "optim_args": ("beta1=0.8", "adam_beta1"),
    "label_smoothing_factor": (0.1, "cross-entropy"),
    "neftune_noise_alpha": (5, "remove the key"),
    "metric_for_best_model": ("accuracy", "eval_loss"),
    "greater_is_better": (True, "eval_loss"),
    "task": ("mmlu_test", "moesaic eval"),
    "kt_full_weight_grad": (True, "kt_train_mode"),
    "kt_use_lora_experts": (True, "lora_target: experts"),
    # of flags that are here, by LLaMA-Factory's values
    "finetuning_type": ("freeze", "not in this version yet"),
    "lr_scheduler_type": ("reduce_lr_on_plateau", "expected cosine|"),
    "lora_dropout": (2, "at most 1"),
}

# Without meaning on this machine: one line names them all.
IGNORED = """
cache_dir use_fast_tokenizer low_cpu_mem_usage flash_attn use_unsloth use_unsloth_gc enable_liger_kernel disable_gradient_checkpointing
use_reentrant_gc upcast_layernorm upcast_lmhead_output infer_backend infer_dtype offload_folder use_kv_cache use_v1_kernels hf_hub_token
ms_hub_token om_hub_token print_param_status trust_remote_code init_special_tokens freeze_original_embeddings quantization_method
quantization_type double_quantization quantization_device_map compute_dtype device_map image_max_pixels image_min_pixels
image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video audio_sampling_rate
export_dir export_device export_quantization_dataset export_quantization_nsamples
export_quantization_maxlen export_hub_model_id vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen
sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend template media_dir buffer_size overwrite_cache
preprocessing_batch_size preprocessing_num_workers eval_num_beams ignore_pad_token_for_loss eval_on_each_dataset
packing_similarity_threshold packing_embedding_model tool_format tokenized_path data_shared_file_system freeze_trainable_layers
freeze_trainable_modules freeze_extra_modules loraplus_lr_embedding pissa_iter pissa_convert module_dropout oft_rank oft_block_size
oft_target pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma
ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit
reward_model reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha galore_target galore_rank
galore_update_interval galore_scale galore_proj_type galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale
apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block badam_switch_mode
badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose use_swanlab swanlab_project swanlab_workspace swanlab_run_name
swanlab_mode swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret pure_bf16 use_mca use_megatron_bridge
use_hyper_parallel hyper_parallel_args hyper_parallel_cp_size asft_alpha eaft_alpha freeze_vision_tower freeze_multi_modal_projector
mtp_loss_weight compute_accuracy include_effective_tokens_per_second optim_target_modules average_tokens_across_devices bf16 fp16
bf16_full_eval fp16_full_eval tf32 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
torch_empty_cache_steps auto_find_batch_size log_on_each_node logging_nan_inf_filter
include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id
trackio_static_space_id per_device_eval_batch_size prediction_loss_only eval_do_concat_batches
eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_on_each_node
enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision ignore_data_skip
restore_callback_states_from_checkpoint full_determinism use_cpu accelerator_config parallelism_config
dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
dataloader_in_order remove_unused_columns label_names length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb
ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_eval do_predict
local_rank sortish_sampler predict_with_generate generation_max_length generation_num_beams generation_config enable_torch_profiler
profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat profiler_record_shapes
profiler_profile_memory profiler_with_stack profile_modules fp8 fp8_backend fp8_enable_fsdp_float8_all_gather ray_num_workers
ray_num_cpus_per_worker ray_init_kwargs master_addr master_port max_length task_dir
lang n_shot save_dir download_mode use_kt kt_optimize_rule chunk_size mode kt_maxlen kt_use_cuda_graph kt_mode kt_force_think
kt_non_expert_weight_path kt_expert_checkpoint_path kt_lora_expert_num kt_lora_expert_intermediate_size kt_backend kt_tp_enabled
kt_threadpool_count kt_weight_lifecycle kt_num_gpu_experts kt_skip_expert_loading kt_share_backward_bb kt_share_cache_pool
kt_force_fused_expert_lora kt_max_cache_depth kt_model_max_length kt_activation_policy kt_checkpoint_files group_by_length
save_safetensors logging_dir no_cuda torchdynamo
""".split()
# Where "x" is no value of the key
VALUES = {"streaming": True, "fsdp_config": {"a": {"b": 1}}, "report_to": ["wandb", "tensorboard"], "gradient_checkpointing_kwargs": {"a": 1},
          "kt_activation_policy": {"cpu": "retain", "gpu": "recompute"}, "optim": "adamw_8bit", "do_train": True}  # fmt: skip

# Flags of ours by LLaMA-Factory's and kt's names, and what run.yaml has then.
MAPPED = {
    "train_on_prompt": (True, "train_on: \"all\""),
    "neat_packing": (True, 'packing: "on"'),
    "enable_thinking": (False, 'template_vars: ["enable_thinking=false", "reasoning_effort=low", "preserve_thinking=true"]'),
    "reasoning_effort": ("low", "reasoning_effort=low"),
    "preserve_thinking": (True, "preserve_thinking=true"),
    "disable_shuffling": (True, 'shuffle: "off"'),
    "per_gpu_train_batch_size": (2, "batch_size: 2"),
    "kt_cpu_activation": ("recompute", 'recompute: "always"'),
    "cpu_infer": (2, "threads: 2"),
    "kt_lora_alpha": (7, "lora_alpha: 7"),
    "kt_lora_dropout": (0.0, "lora_dropout: 0"),
    "kt_lora_rank": (4, "lora_rank: 4"),
    "kt_train_mode": ("lora", 'method: "lora"'),
    "lr_scheduler_type": ("linear", 'lr_scheduler_type: "linear"'),
    "num_train_epochs": (1.0, "epochs: 1"),
    "val_size": (0.25, "eval_split: 0.25"),
    "moe_aux_loss_coef": (0.001, "aux_loss: 0.001"),
    "use_rslora": (True, "rslora: true"),
    "lora_target": ("q_proj,experts", "q_proj,experts"),
    "warmup_ratio": (0.1, "warmup_ratio: 0.1"),
    "adam_beta2": (0.95, "adam_beta2: 0.95"),
    "load_best_model_at_end": (True, "load_best: true"),
    "kt_expert_weight_format": ("int8", 'weights: "int8"'),
    "save_strategy": ("epoch", 'save_strategy: "epoch"'),
    "evaluation_strategy": ("steps", 'eval_strategy: "steps"'),
    "logging_first_step": (True, "logging_first_step: true"),
    "eval_delay": (2, "eval_delay: 2"),
    "eval_on_start": (True, "eval_on_start: true"),
    "data_seed": (7, "data_seed: 7"),
    "dataloader_drop_last": (True, "drop_last: true"),
    "logging_strategy": ("steps", 'logging_strategy: "steps"'),
    "logging_steps": (0.5, "logging_steps: 0.5"),
}


class Foreign(Case):
    def config(self, values, name="lf.json"):
        return self.write(name, json.dumps(values))

    def train(self, config):
        """Reads the configuration, then ends for want of a model: its lines on stderr but that one."""
        result = self.run_tool("train", "--config", config)
        self.assertEqual(result.returncode, 2)
        lines = result.stderr.strip().split("\n")
        self.assertIn("--model DIR is missing", lines[-1])
        return lines[:-1]

    def test_accepted(self):
        self.assertEqual(self.train(self.write("lf.yaml", ACCEPTED)), [])

    def test_keys_of_other_commands_are_left_out_without_a_note(self):
        keys = "export_size export_quantization_bit temperature top_p max_new_tokens repetition_penalty"  # of merge and generate
        self.assertEqual(self.train(self.config({key: VALUES.get(key, 1) for key in keys.split()})), [])

    def test_ignored(self):
        (line,) = self.train(self.config({key: VALUES.get(key, "x") for key in [*IGNORED, "streaming", "optim"]}))
        self.assertEqual(sorted(line.partition("here: ")[2].split(", ")), sorted([*IGNORED, "streaming", "optim"]))
        self.assertEqual(len(set(IGNORED)), len(IGNORED))

    def test_refused(self):
        for key, (value, remedy) in REFUSED.items():
            with self.subTest(key):
                line = self.bad(2, "train", "--config", self.config({"logging_steps": 1, key: value}))
                self.assertTrue(line.startswith(f"moesaic train: --config {self.path('lf.json')}: "), line)
                self.assertTrue(key in line or "--" + key.replace("_", "-") in line, line)
                self.assertIn(remedy, line)
                self.assertEqual(self.train(self.config({key: None})), [])

    def test_lines_are_named(self):
        for text, place in (("# a\nlora_rank: 4\nuse_dora: true\n", ":3: use_dora: true: "), ("\nval_size: -1\n", ":2: val_size: --eval-split -1: "),
                            ("a: 1\n", ":1: unknown key"), ("lora_rank: 0", ":1: --lora-rank 0: "),
                            ("use_kt: true\nkt_config:\n  kt_backend: x\n  kt_lora_alpha: 0\n", ":4: --lora-alpha 0: ")):  # fmt: skip
            with self.subTest(text):
                path = self.write("lf.yaml", text)
                self.assertIn(f"--config {path}{place}", self.bad(2, "train", "--config", path))

    def test_mapped(self):
        values = {key: value for key, (value, _) in MAPPED.items()}
        self.good("train", "--config", self.config(values), "--model", MODEL, "--data", self.tokens(), "--output-dir", self.out,
                  "--max-steps", 1, "--quiet")  # fmt: skip
        text = self.read("out", "run.yaml").decode()
        for key, (_, line) in MAPPED.items():
            self.assertIn(line, text, key)

    def test_sampling_and_exporting(self):
        """Keys of other commands, where those read them."""
        for values, part in (({"top_k": 50}, "top_k: 50: top_p"), ({"num_beams": 4}, "without beams"), ({"do_sample": "x"}, "")):
            line = self.run_tool("generate", "--config", self.config(values), "x").stderr
            self.assertIn(part or "ignored, without meaning here: do_sample", line)
        line = self.bad(2, "merge", "--config", self.config({"export_size": "five"}))
        self.assertIn("five", line)
        self.assertIn("weights: int8", self.bad(2, "merge", "--config", self.config({"export_quantization_bit": 8})))
        self.assertIn("safetensors are written", self.bad(2, "merge", "--config", self.config({"export_legacy_format": True})))

    def test_all_of_transformers(self):
        """The installed version's arguments, where there is one."""
        python = os.path.join(os.path.dirname(MODEL), "..", "..", "..", "build", "check-venv", "bin", "python")
        if not os.path.exists(python):
            self.skipTest("no build/check-venv")
        import subprocess  # noqa: PLC0415

        code = "import dataclasses, transformers; print(*[f.name for f in dataclasses.fields(transformers.Seq2SeqTrainingArguments)])"
        names = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        self.assertGreater(len(names), 100)
        self.assertEqual(self.train(self.config({name: None for name in names})), [])


if __name__ == "__main__":
    unittest.main()
