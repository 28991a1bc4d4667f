/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/train_result.h"

#include "engine/size.h"
#include "tools/moesaic/json_line.h"

#include <math.h>
#include <stdlib.h>

static void add_expert_tokens(cJSON *to, const struct tool_model *m)
{
	cJSON *layers = cJSON_AddObjectToObject(to, "expert_tokens");
	int n = m->info.experts;
	int64_t *counts = cli_alloc((size_t)(n > 0 ? n : 1) * sizeof *counts);
	char name[16];

	for (int l = 0; l < m->info.layers; l++) {
		cJSON *list;

		if (moe_train_expert_tokens(m->model, l, counts, n) != MOE_OK)
			continue;
		snprintf(name, sizeof name, "%d", l);
		list = cJSON_AddArrayToObject(layers, name);
		for (int e = 0; e < n; e++)
			cJSON_AddItemToArray(list, cJSON_CreateNumber((double)counts[e]));
	}
	free(counts);
}

static void add_loss(cJSON *to, const char *name, double loss)
{
	if (isfinite(loss))
		cJSON_AddNumberToObject(to, name, loss);
}

static void add_kernels(cJSON *to)
{
	struct moe_machine_info machine = { .struct_size = sizeof machine };

	if (moe_machine_describe(&machine) != MOE_OK)
		return;
	for (int i = 0; i < machine.n_isas; i++)
		if (machine.isa[i].chosen)
			cJSON_AddStringToObject(to, "kernels", machine.isa[i].name);
}

void train_result_json(const struct tool_model *m, const struct moe_train_result *r)
{
	cJSON *o = cJSON_CreateObject();

	cJSON_AddNumberToObject(o, "steps", (double)r->steps);
	cJSON_AddNumberToObject(o, "seconds", r->seconds);
	cJSON_AddNumberToObject(o, "tokens", (double)r->tokens);
	cJSON_AddNumberToObject(o, "trained_tokens", (double)r->trained_tokens);
	cJSON_AddNumberToObject(o, "tokens_per_s", (double)r->tokens / fmax(r->seconds, 1e-9));
	cJSON_AddNumberToObject(o, "peak_gib", r->peak_rss_gib);
	cJSON_AddNumberToObject(o, "planned_gib", (double)tool_model_planned(m) / (1 << 30));
	cJSON_AddNumberToObject(o, "micro_batches_in_flight", m->info.slots);
	cJSON_AddNumberToObject(o, "recomputed_layers", m->info.recomputed_layers);
	cJSON_AddNumberToObject(o, "parameters", (double)m->info.params);
	cJSON_AddNumberToObject(o, "trainable", (double)m->info.trainable_params);
	cJSON_AddNumberToObject(o, "lora_rank",
				m->info.expert_rank ? m->info.expert_rank : m->info.lora_rank);
	cJSON_AddNumberToObject(o, "experts", (double)r->adapted_experts);
	cJSON_AddNumberToObject(o, "experts_without_gradient", (double)r->experts_without_gradient);
	add_loss(o, "first_loss", r->first_loss);
	add_loss(o, "last_loss", r->last_loss);
	add_loss(o, "eval_loss", r->eval_loss);
	add_loss(o, "best_loss", r->best_loss);
	if (r->best_step)
		cJSON_AddNumberToObject(o, "best_step", (double)r->best_step);
	cJSON_AddNumberToObject(o, "skipped_steps", (double)r->skipped);
	if (r->eval_batch_tokens)
		cJSON_AddNumberToObject(o, "eval_batch_tokens", r->eval_batch_tokens);
	add_kernels(o);
	add_expert_tokens(o, m);
	json_line(o);
}

/* Which experts of which layer had most and none of the tokens. */
static void print_experts(const struct tool_model *m, FILE *to)
{
	int n = m->info.experts, busiest = -1, expert = 0, unused = 0, total = 0;
	int64_t *counts = cli_alloc((size_t)(n > 0 ? n : 1) * sizeof *counts);
	double load = 0;

	for (int l = 0; l < m->info.layers; l++) {
		double sum = 0;

		if (moe_train_expert_tokens(m->model, l, counts, n) != MOE_OK)
			continue;
		for (int e = 0; e < n; e++)
			sum += (double)counts[e], unused += !counts[e], total++;
		for (int e = 0; e < n; e++)
			if (sum > 0 && (double)counts[e] * n / sum > load) {
				load = (double)counts[e] * n / sum;
				busiest = l, expert = e;
			}
	}
	free(counts);
	if (busiest >= 0)
		fprintf(to,
			"experts: %d of %d had no token; busiest: layer %d expert %d, %.1f x the "
			"mean\n",
			unused, total, busiest, expert, load);
}

void train_result_print(const struct tool_model *m, const struct moe_train_result *r, bool best, const char *output,
			FILE *to)
{
	fprintf(to, "done: %lld steps in %.1f s (%.0f tokens/s), loss %.4f -> %.4f",
		(long long)r->steps, r->seconds, (double)r->tokens / fmax(r->seconds, 1e-9),
		r->first_loss, r->last_loss);
	if (isfinite(r->eval_loss))
		fprintf(to, ", evaluation %.4f (best %.4f, step %lld)", r->eval_loss, r->best_loss,
			(long long)r->best_step);
	fprintf(to, ", peak %s\n", moe_size((int64_t)(r->peak_rss_gib * 0x1p30)).text);
	if (r->skipped)
		fprintf(to, "%lld steps without an update: loss or gradient was not finite\n",
			(long long)r->skipped);
	print_experts(m, to);
	fprintf(to, "%s%s in %s\n",
		m->info.method == MOE_METHOD_FULL     ? "model"
		: m->info.method == MOE_METHOD_HYBRID ? "model and adapter"
						      : "adapter",
		best ? " of the best evaluation" : "", output);
}
