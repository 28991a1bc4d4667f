/* SPDX-License-Identifier: Apache-2.0 */
/* The estimate for people and as JSON. */
#include "engine/size.h"
#include "tools/moesaic/estimate.h"
#include "tools/moesaic/json_line.h"

#include <string.h>

bool estimate_fits(const struct estimate_result *r)
{
	return r->found.total <= r->limit;
}

static void row(const char *name, int64_t bytes)
{
	printf("  %-12s %14s\n", name, moe_size(bytes).text);
}

static void print_memory(const struct estimate_result *r)
{
	const struct moe_estimate *e = &r->found;
	char name[24];

	printf("memory         %14s of %s: %s\n", moe_size(e->total).text, moe_size(r->limit).text,
	       estimate_fits(r) ? "fits" : "does not fit");
	row("weights", e->weights);
	if (strcmp(e->backward_weights, "direct"))
		printf("    with copies for the backward: %s\n", e->backward_weights);
	row("adapter", e->lora);
	row("gradients", e->gradients);
	row("moments", e->moments);
	row("activations", e->activations);
	row("scratch", e->scratch);
	row("runtime", e->runtime);
	row("process", e->process);
	row("staging", e->staging);
	row("largest", e->largest);
	if (e->trained_layers)
		printf("  %d micro-batch%s in flight, activations of %d of %d layers computed again", e->slots,
		       e->slots == 1 ? "" : "es", e->recomputed_layers, e->trained_layers);
	if (e->wanted > e->total)
		printf("; with 2 and all kept %s", moe_size(e->wanted).text);
	if (e->trained_layers)
		putchar('\n');
	for (int i = 0; e->parts > 1 && i < e->parts && i < MOE_ESTIMATE_PARTS; i++) {
		snprintf(name, sizeof name, "on node %d", i);
		row(name, e->part[i]);
	}
	if (*r->change)
		printf("would fit      %s: %s\n", r->change, moe_size(r->change_total).text);
	else if (!estimate_fits(r))
		printf("would fit      only with more memory: %s with %s--batch-tokens %d, the least\n",
		       moe_size(r->change_total).text, r->least_with, ESTIMATE_LEAST_TOKENS);
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

static void print_time(const struct estimate_result *r)
{
	const struct moe_estimate_params *p = &r->params;
	const struct moe_estimate *e = &r->found;

	printf("step           %10.2f s for %d x %d tokens: %.0f tokens/s (predicted)\n", e->step_s,
	       p->micro_batches, p->tokens, e->tokens_per_s);
	if (p->gflops_per_worker > 0)
		printf("  rates        %d workers of %g GFLOP/s each, as given\n", p->workers,
		       p->gflops_per_worker);
	else
		printf("  rates        %d workers, kernels %s: %s\n", p->workers, e->isa,
		       e->calibrated ? "measured here (moesaic doctor)"
				     : "guessed (moesaic doctor --calibrate measures)");
	if (p->workers > r->cpus && !(p->gflops_per_worker > 0))
		printf("               this machine has %d: memory bandwidth is taken to grow with "
		       "them\n",
		       r->cpus);
	if (r->data_tokens)
		printf("data           %lld tokens, %g epoch%s: %.2f hours\n",
		       (long long)r->data_tokens, r->epochs, r->epochs == 1 ? "" : "s", r->hours);
}

void estimate_print_text(const struct settings *s, const struct estimate_result *r)
{
	const struct moe_estimate *e = &r->found;

	printf("model          %s: %.1f M parameters, %.1f M active per token, %.1f M trainable\n",
	       settings_text(s, "model"), (double)e->params / 1e6, (double)e->active_params / 1e6,
	       (double)e->trainable_params / 1e6);
	if (e->lacks)
		printf("not trained yet: %s are not in this version\n", e->lacks);
	print_memory(r);
	print_time(r);
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

static void add_choices(cJSON *o, const struct estimate_result *r)
{
	const struct moe_estimate *e = &r->found;
	cJSON *parts;

	cJSON_AddBoolToObject(o, "fits", estimate_fits(r));
	cJSON_AddBoolToObject(o, "trainable_here", !e->lacks);
	cJSON_AddBoolToObject(o, "calibrated", e->calibrated);
	cJSON_AddStringToObject(o, "isa", e->isa);
	cJSON_AddStringToObject(o, "backward_weights", e->backward_weights);
	if (!estimate_fits(r)) {
		cJSON_AddStringToObject(o, "would_fit", r->change);
		cJSON_AddNumberToObject(o, "would_fit_bytes", (double)r->change_total);
	}
	parts = cJSON_AddArrayToObject(o, "part");
	for (int i = 0; i < e->parts && i < MOE_ESTIMATE_PARTS; i++)
		cJSON_AddItemToArray(parts, cJSON_CreateNumber((double)e->part[i]));
}

void estimate_print_json(const struct estimate_result *r)
{
	const struct moe_estimate *e = &r->found;
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
		{ "process", (double)e->process },
		{ "staging", (double)e->staging },
		{ "slots", e->slots },
		{ "trained_layers", e->trained_layers },
		{ "recomputed_layers", e->recomputed_layers },
		{ "wanted", (double)e->wanted },
		{ "total", (double)e->total },
		{ "largest", (double)e->largest },
		{ "limit", (double)r->limit },
		{ "workers", r->params.workers },
		{ "handles", (double)e->handles },
		{ "tasks", (double)e->tasks },
		{ "max_task_handles", e->max_task_handles },
		{ "submission_s", e->submission_s },
		{ "step_s", e->step_s },
		{ "submission_share", e->submission_share },
		{ "tokens_per_s", e->tokens_per_s },
		{ "data_tokens", (double)r->data_tokens },
		{ "epochs", r->epochs },
		{ "hours", r->hours },
	};
	cJSON *o = cJSON_CreateObject();

	for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
		if (r->data_tokens ||
		    (strcmp(numbers[i].name, "epochs") && strcmp(numbers[i].name, "hours") &&
		     strcmp(numbers[i].name, "data_tokens")))
			cJSON_AddNumberToObject(o, numbers[i].name, numbers[i].value);
	add_choices(o, r);
	add_graph(o, e);
	json_line(o);
}
