/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic estimate: memory, tasks and time of a run that is not started; from config.json alone. */
#include "tools/moesaic/commands.h"
#include "tools/moesaic/model.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct option what[] = {
	{ "graph", OPTION_FLAG, OPTION_COMMON, NULL, NULL, "tasks by kind, handles, submission", 0,
	  0, "", NULL },
	{ "gflops", OPTION_REAL, OPTION_COMMON | OPTION_ABOVE_ZERO, "X", "50",
	  "assumed speed of a worker, for the time", 0, 0, "", NULL },
	{ .name = NULL },
};

static const struct option_group groups[] = {
	{ "Estimate", what },
	{ "What", train_what },
	{ "Data", options_data },
	{ "Method", train_method },
	{ "Optimisation", train_optimisation },
	{ "Run", train_course },
	{ "Machine", options_machine },
	{ "Schedule", train_machine_training },
	{ "General", options_general },
	{ NULL, NULL },
};

/* Bytes that a run may take: --memory-limit, or what is free here. */
static int64_t allowed(const struct settings *s)
{
	FILE *f = settings_has(s, "memory-limit") ? NULL : fopen("/proc/meminfo", "re");
	char line[128];
	long long kib = 0;

	if (settings_has(s, "memory-limit"))
		return settings_int(s, "memory-limit");
	while (f && fgets(line, sizeof line, f))
		if (sscanf(line, "MemAvailable: %lld", &kib) == 1)
			break;
	if (f)
		fclose(f);
	return kib * 1024;
}

static void fill(const struct settings *s, struct moe_estimate_params *p)
{
	int64_t rows = settings_int(s, "batch-size"), length = settings_int(s, "cutoff-len");
	int64_t tokens = rows ? rows * length : settings_int(s, "batch-tokens");
	int parts = tool_model_parts(s), cores = (int)sysconf(_SC_NPROCESSORS_ONLN);

	p->struct_size = sizeof *p;
	p->parts = parts;
	p->workers = settings_has(s, "threads") ? (int)settings_int(s, "threads")
						: (cores > parts ? cores : parts);
	p->tokens = tokens > INT32_MAX ? INT32_MAX : (int)tokens;
	p->document_tokens = (int)length;
	p->micro_batches = (int)settings_int(s, "gradient-accumulation-steps");
	p->gflops_per_worker = settings_real(s, "gflops");
}

static void row(const char *name, int64_t bytes)
{
	bool small = bytes < (int64_t)1 << 30;

	printf("  %-12s %10.2f %s\n", name, (double)bytes / (small ? 1 << 20 : 1 << 30),
	       small ? "MiB" : "GiB");
}

static void print_memory(const struct moe_estimate *e, int64_t limit)
{
	char name[24];

	printf("memory         %10.2f GiB of %.2f: %s\n", (double)e->total / (1 << 30),
	       (double)limit / (1 << 30), e->total <= limit ? "fits" : "does not fit");
	row("weights", e->weights);
	if (strcmp(e->backward_weights, "direct"))
		printf("    with copies for the backward: %s\n", e->backward_weights);
	row("adapter", e->lora);
	row("gradients", e->gradients);
	row("moments", e->moments);
	row("activations", e->activations);
	row("scratch", e->scratch);
	row("runtime", e->runtime);
	for (int i = 0; e->parts > 1 && i < e->parts && i < MOE_ESTIMATE_PARTS; i++) {
		snprintf(name, sizeof name, "on part %d", i);
		row(name, e->part[i]);
	}
}

static void print_graph(const struct moe_estimate *e)
{
	printf("graph          %lld tasks a step, %lld handles, at most %d in a task\n",
	       (long long)e->tasks, (long long)e->handles, e->max_task_handles);
	printf("  submission   %10.3f s, %.1f %% of the step\n", e->submission_s,
	       100 * e->submission_share);
	for (int i = 0; i < MOE_ESTIMATE_KINDS && moe_kind_name(i); i++)
		if (e->kind[i])
			printf("  %-18s %lld\n", moe_kind_name(i), (long long)e->kind[i]);
}

static void print_text(const struct settings *s, const struct moe_estimate_params *p,
		       const struct moe_estimate *e, int64_t limit)
{
	printf("model          %s: %.1f M parameters, %.1f M active per token, %.1f M trainable\n",
	       settings_text(s, "model"), (double)e->params / 1e6, (double)e->active_params / 1e6,
	       (double)e->trainable_params / 1e6);
	print_memory(e, limit);
	printf("step           %10.2f s for %d x %d tokens, %.0f tokens/s: computed for %d workers "
	       "of "
	       "%g GFLOP/s, not measured\n",
	       e->step_s, p->micro_batches, p->tokens, e->tokens_per_s, p->workers,
	       p->gflops_per_worker);
	if (settings_on(s, "graph"))
		print_graph(e);
}

static void add_graph(cJSON *o, const struct moe_estimate *e)
{
	cJSON *kinds = cJSON_AddObjectToObject(o, "kinds");

	for (int i = 0; i < MOE_ESTIMATE_KINDS && moe_kind_name(i); i++)
		if (e->kind[i])
			cJSON_AddNumberToObject(kinds, moe_kind_name(i), (double)e->kind[i]);
}

static void print_json(const struct moe_estimate *e, int64_t limit)
{
	const struct {
		const char *name;
		double value;
	} numbers[] = {
		{ "parameters", (double)e->params },
		{ "active", (double)e->active_params },
		{ "trainable", (double)e->trainable_params },
		{ "weights", (double)e->weights },
		{ "adapter", (double)e->lora },
		{ "gradients", (double)e->gradients },
		{ "moments", (double)e->moments },
		{ "activations", (double)e->activations },
		{ "scratch", (double)e->scratch },
		{ "runtime", (double)e->runtime },
		{ "total", (double)e->total },
		{ "largest", (double)e->largest },
		{ "limit", (double)limit },
		{ "handles", (double)e->handles },
		{ "tasks", (double)e->tasks },
		{ "max_task_handles", e->max_task_handles },
		{ "submission_s", e->submission_s },
		{ "step_s", e->step_s },
		{ "submission_share", e->submission_share },
		{ "tokens_per_s", e->tokens_per_s },
	};
	cJSON *o = cJSON_CreateObject(), *parts;
	char *text;

	for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
		cJSON_AddNumberToObject(o, numbers[i].name, numbers[i].value);
	cJSON_AddBoolToObject(o, "fits", e->total <= limit);
	cJSON_AddStringToObject(o, "backward_weights", e->backward_weights);
	parts = cJSON_AddArrayToObject(o, "part");
	for (int i = 0; i < e->parts && i < MOE_ESTIMATE_PARTS; i++)
		cJSON_AddItemToArray(parts, cJSON_CreateNumber((double)e->part[i]));
	add_graph(o, e);
	text = cJSON_PrintUnformatted(o);
	puts(text ? text : "{}");
	cJSON_free(text);
	cJSON_Delete(o);
}

static int run(struct settings *s, int argc, char **argv)
{
	struct moe_model_params model;
	struct moe_estimate_params p = { .model = &model };
	struct moe_estimate e = { .struct_size = sizeof e };
	int64_t limit = allowed(s);
	int rc = train_resolve_method(s);
	char *targets;

	(void)argc, (void)argv;
	if (!rc && tool_model_parts(s) < 0)
		rc = cli_fail(CLI_USAGE, "--numa %s: expected auto, off or a number of parts",
			      settings_text(s, "numa"));
	if (rc)
		return rc;
	targets = tool_model_params(s, &model);
	fill(s, &p);
	rc = cli_status(moe_estimate(&p, &e));
	free(targets);
	if (rc)
		return rc;
	if (settings_on(s, "json"))
		print_json(&e, limit);
	else
		print_text(s, &p, &e, limit);
	if (settings_has(s, "memory-limit") && e.total > limit)
		return cli_fail(CLI_NOFIT, "%.2f GiB are needed, --memory-limit %s",
				(double)e.total / (1 << 30), settings_text(s, "memory-limit"));
	return 0;
}

const struct command command_estimate = {
	.name = "estimate",
	.summary = "memory and time of a run, without loading",
	.groups = groups,
	.run = run,
};
