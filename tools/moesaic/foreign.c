/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/foreign.h"
#include "tools/moesaic/cli.h"
#include "tools/moesaic/option_values.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum action { IGNORE, MAP, THREADS, REFUSE };

struct rule {
	const char *key, *value; /* value NULL: any */
	enum action action;
	const char *ours; /* MAP, THREADS: the flag; REFUSE: why */
	const char *as;	  /* MAP: its value; NULL: the same text */
};

/* The first rule whose key and value fit holds. */
static const struct rule rules[] = {
	{ "stage", "sft", IGNORE, NULL, NULL },
	{ "stage", NULL, REFUSE, "only supervised fine-tuning (sft) is in this version", NULL },
	{ "do_train", "true", IGNORE, NULL, NULL },
	{ "do_train", NULL, REFUSE, "moesaic train always trains; use moesaic eval", NULL },
	{ "train_on_prompt", "true", MAP, "train-on", "all" },
	{ "train_on_prompt", "false", IGNORE, NULL, NULL },
	{ "mask_history", "true", MAP, "train-on", "last" },
	{ "mask_history", "false", IGNORE, NULL, NULL },
	{ "metric_for_best_model", "loss", IGNORE, NULL, NULL },
	{ "metric_for_best_model", "eval_loss", IGNORE, NULL, NULL },
	{ "metric_for_best_model", NULL, REFUSE,
	  "the best checkpoint is that of the least eval_loss", NULL },
	{ "greater_is_better", "false", IGNORE, NULL, NULL },
	{ "greater_is_better", NULL, REFUSE, "the best checkpoint is that of the least eval_loss",
	  NULL },
	{ "packing", NULL, MAP, "packing", NULL },
	{ "kt_cpu_activation", "retain", MAP, "recompute", "never" },
	{ "kt_cpu_activation", "recompute", MAP, "recompute", "always" },
	{ "kt_cpu_activation", NULL, IGNORE, NULL, NULL },
	{ "kt_num_threads", NULL, THREADS, "threads", NULL },
	{ "cpu_infer", NULL, THREADS, "threads", NULL },
	{ "kt_lora_alpha", NULL, MAP, "lora-alpha", NULL },
	{ "kt_lora_dropout", NULL, MAP, "lora-dropout", NULL },
	{ "kt_train_mode", NULL, MAP, "method", NULL },
	{ "kt_weight_path", NULL, MAP, "kt-weights", NULL },
	{ "kt_expert_weight_format", "bf16", IGNORE, NULL, NULL },
	{ "kt_expert_weight_format", NULL, MAP, "weights", NULL },
	{ "kt_full_weight_grad", "false", IGNORE, NULL, NULL },
	{ "kt_full_weight_grad", "true", REFUSE,
	  "kt_train_mode (or --method) says it: full, or hybrid beside an adapter", NULL },
};

/* Have no meaning here, whatever their value. */
static const char *const ignored[] = {
	"template",
	"trust_remote_code",
	"bf16",
	"fp16",
	"pure_bf16",
	"plot_loss",
	"report_to",
	"overwrite_cache",
	"preprocessing_num_workers",
	"dataloader_num_workers",
	"ddp_timeout",
	"save_only_model",
	"flash_attn",
	"enable_liger_kernel",
	"use_unsloth",
	"include_num_input_tokens_seen",
	"optim",
	"deepspeed",
	"disable_gradient_checkpointing",
	"gradient_checkpointing",
	"save_strategy",
	"per_device_eval_batch_size",
	"eval_strategy",
	"evaluation_strategy",
	"logging_strategy",
	"run_name",
	"remove_unused_columns",
	"use_fast_tokenizer",
	"low_cpu_mem_usage",
	"cache_dir",
	"tokenized_path",
	"use_kt",
	"kt_config",
	"kt_optimize_rule",
	"chunk_size",
	"mode",
	"kt_backend",
	"kt_tp_enabled",
	"kt_threadpool_count",
	"kt_max_cache_depth",
	"kt_model_max_length",
	"kt_share_backward_bb",
	"kt_share_cache_pool",
	"kt_force_fused_expert_lora",
	"kt_num_gpu_experts",
	"kt_skip_expert_loading",
	"kt_non_expert_weight_path",
	"kt_weight_lifecycle",
	"kt_expert_checkpoint_path",
	"kt_activation_policy",
	"kt_use_lora_experts",
	"kt_lora_expert_num",
	"kt_non_expert_manifest",
	"kt_lora_expert_intermediate_size",
	"kt_checkpoint_files",
	"kt_full_experts",
	"kt_adapt_peft_lora",
	"cpu",
	"gpu",
	NULL,
};

#define RULES (int)(sizeof rules / sizeof *rules)

static char *left_out; /* names ignored so far, for the note */

const char *foreign_name(int index)
{
	if (index < RULES)
		return rules[index].key;
	for (int i = 0; ignored[i]; i++)
		if (i == index - RULES)
			return ignored[i];
	return NULL;
}

bool foreign_known(const char *key)
{
	for (int i = 0; foreign_name(i); i++)
		if (!strcmp(key, foreign_name(i)))
			return true;
	return false;
}

static int ignore(const char *key)
{
	char *longer = cli_format("%s%s%s", left_out ? left_out : "", left_out ? ", " : "", key);

	free(left_out);
	left_out = longer;
	return 0;
}

/* Such files are carried from machine to machine: more threads than CPUs are as many as there are.
 */
static int set_threads(struct settings *s, const struct rule *r, const char *text)
{
	long cpus = sysconf(_SC_NPROCESSORS_ONLN);
	char *most = cli_format("%ld", cpus);
	int64_t n;
	int rc;

	if (option_int(text, &n) && cpus > 0 && n > cpus) {
		cli_note("%s: %s: this machine has %s CPUs, which are used", r->key, text, most);
		text = most;
	}
	rc = settings_set(s, r->ours, &text, 1);
	free(most);
	return rc;
}

int foreign_set(struct settings *s, const char *key, const char *text)
{
	for (const struct rule *r = rules; r < rules + RULES; r++) {
		if (strcmp(key, r->key) || (r->value && strcmp(text, r->value)))
			continue;
		if (r->action == REFUSE)
			return cli_fail(CLI_USAGE, "%s: %s: %s", key, text, r->ours);
		if (r->action == IGNORE || !settings_option(s, r->ours))
			return ignore(key);
		if (r->action == THREADS)
			return set_threads(s, r, text);
		return settings_set(s, r->ours, r->as ? &r->as : &text, 1);
	}
	return foreign_known(key) ? ignore(key) : -1;
}

void foreign_ignore(const char *key)
{
	ignore(key);
}

int foreign_finish(struct settings *s, const char *path)
{
	(void)s;
	if (left_out)
		cli_note("--config %s: ignored, without meaning here: %s", path, left_out);
	free(left_out);
	left_out = NULL;
	return 0;
}
