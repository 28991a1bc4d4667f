/* SPDX-License-Identifier: Apache-2.0 */
/* What bench_layer prints: a table, JSON lines, and what the library decided. */
#include "bench/layer/layer_bench.h"
#include "bench/measure.h"

#include "codelets/kernels/kernels.h"
#include "engine/engine.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <sys/resource.h>

#define STEP_FLOPS 2.0 /* forward and backward (with respect to the input) do the same products */

static const struct {
	const char *key;
	double scale; /* to the printed unit */
} metrics[LAYER_METRICS] = {
	[LAYER_FORWARD] = { "forward_ms", 1e3 },
	[LAYER_BACKWARD] = { "backward_ms", 1e3 },
	[LAYER_STEP] = { "step_ms", 1e3 },
	[LAYER_UPDATE] = { "update_ms", 1e3 },
	[LAYER_BARE_FORWARD] = { "bare_forward_ms", 1e3 },
	[LAYER_BARE_BACKWARD] = { "bare_backward_ms", 1e3 },
	[LAYER_BARE] = { "bare_ms", 1e3 },
	[LAYER_STEP_OVER_BARE] = { "step_over_bare", 1 },
	[LAYER_FORWARD_CPU] = { "forward_cpu_ms", 1e3 },
	[LAYER_BACKWARD_CPU] = { "backward_cpu_ms", 1e3 },
	[LAYER_BARE_CPU] = { "bare_cpu_ms", 1e3 },
	[LAYER_STEP_OVER_BARE_CPU] = { "step_over_bare_cpu", 1 },
	[LAYER_SUBMIT_CPU] = { "submit_cpu_ms", 1e3 },
	[LAYER_IDLE_SHARE] = { "idle_share", 1 },
};

/* Of the engine's counters; what has another purpose is "other". */
static const char *const purposes[] = { "weights", "lora", "gradients", "moments", "activations" };

static bool is_bare(int metric)
{
	return (metric >= LAYER_BARE_FORWARD && metric <= LAYER_STEP_OVER_BARE) ||
	       metric == LAYER_BARE_CPU || metric == LAYER_STEP_OVER_BARE_CPU;
}

/* Sorted values of one metric in its unit; released by the caller. */
static double *sorted(const struct layer_result *r, int metric)
{
	double *v = moe_alloc((size_t)r->n, sizeof *v);

	for (int i = 0; v && i < r->n; i++)
		v[i] = r->samples[i].value[metric] * metrics[metric].scale;
	if (v)
		sort_values(v, r->n);
	return v;
}

/* Linear between neighbours, as numpy does it. */
static double quantile(const double *v, int n, double q)
{
	double at = q * (n - 1);
	int low = (int)at;

	return low + 1 < n ? v[low] + (at - low) * (v[low + 1] - v[low]) : v[n - 1];
}

static void cpu_model(char *text, size_t size)
{
	FILE *f = fopen("/proc/cpuinfo", "r");
	char line[256];

	snprintf(text, size, "unknown");
	while (f && fgets(line, sizeof line, f))
		if (!strncmp(line, "model name", 10) && strchr(line, ':')) {
			snprintf(text, size, "%s", strchr(line, ':') + 2);
			text[strcspn(text, "\n")] = 0;
			break;
		}
	if (f)
		fclose(f);
}

/* Six decimals: more would be noise. */
static cJSON *rounded(double v)
{
	return cJSON_CreateNumber(round(v * 1e6) / 1e6);
}

static void add(cJSON *json, const char *key, double v)
{
	cJSON_AddItemToObject(json, key, rounded(v));
}

static double flops(const struct layer_options *o)
{
	const struct layer_shape *s = &o->shape;

	return 6.0 * o->tokens * s->k * s->H * s->I; /* of the forward */
}

static void add_memory(cJSON *json, const struct layer_options *o, struct moe_engine *e)
{
	const struct layer_shape *s = &o->shape;
	cJSON *memory = cJSON_AddObjectToObject(json, "memory");
	size_t total = moe_memory_bytes(e, NULL, -1) - moe_memory_bytes(e, "bench", -1);
	size_t other = total;
	double plain = 3.0 * s->E * s->H * s->I * (double)moe_dtype_size(o->dtype);

	for (size_t i = 0; i < MOE_COUNT(purposes); i++) {
		size_t bytes = moe_memory_bytes(e, purposes[i], -1);

		add(memory, purposes[i], (double)bytes);
		other -= bytes;
	}
	add(memory, "other", (double)other);
	add(memory, "total", (double)total);
	add(json, "weight_bytes_over_plain", (double)moe_memory_bytes(e, "weights", -1) / plain);
	add(json, "activation_bytes_per_token",
	    (double)moe_memory_bytes(e, "activations", -1) / o->tokens);
}

static void add_setting(cJSON *json, const struct layer_options *o, struct moe_engine *e,
			const struct layer_data *d, const struct layer_result *r)
{
	struct moe_engine_info info = { .struct_size = sizeof info };
	struct rusage usage;
	char text[256];

	moe_engine_get_info(e, &info);
	getrusage(RUSAGE_SELF, &usage);
	cJSON_AddStringToObject(json, "shape", o->shape.name);
	add(json, "tokens", o->tokens);
	add(json, "workers", info.workers);
	add(json, "rank", o->rank);
	cJSON_AddStringToObject(json, "weights", o->weights);
	cJSON_AddStringToObject(json, "policy", info.policy);
	cJSON_AddStringToObject(json, "isa", moe_kernels()->name);
	cJSON_AddStringToObject(json, "backward_weights", o->backward_used);
	add(json, "parts", info.parts);
	add(json, "skew", o->skew);
	add(json, "ids_hash", d->ids_hash);
	add(json, "gflop", STEP_FLOPS * flops(o) * 1e-9);
	add(json, "first_step_ms", r->first_step * 1e3);
	add(json, "setup_s", r->setup);
	add(json, "load_at_start", r->load_at_start);
	add(json, "peak_rss_bytes", (double)usage.ru_maxrss * 1024);
	cpu_model(text, sizeof text);
	cJSON_AddStringToObject(json, "cpu", text);
	cJSON_AddStringToObject(json, "version", moe_version());
	snprintf(text, sizeof text, "%d.%d.%d", info.starpu_version[0], info.starpu_version[1],
		 info.starpu_version[2]);
	cJSON_AddStringToObject(json, "starpu", text);
	add_memory(json, o, e);
}

static void print_line(cJSON *json)
{
	char *text = cJSON_PrintUnformatted(json);

	puts(text ? text : "{}");
	fflush(stdout);
	cJSON_free(text);
	cJSON_Delete(json);
}

void layer_print_sample(const struct layer_sample *s, bool with_bare)
{
	cJSON *json = cJSON_CreateObject();

	for (int i = 0; i < LAYER_METRICS; i++)
		if (with_bare || !is_bare(i))
			add(json, metrics[i].key, s->value[i] * metrics[i].scale);
	print_line(json);
}

void layer_print_ready(const struct layer_options *o, struct moe_engine *e,
		       const struct layer_data *d, const struct layer_result *r)
{
	cJSON *json = cJSON_CreateObject();

	cJSON_AddTrueToObject(json, "ready");
	add_setting(json, o, e, d, r);
	print_line(json);
}

void layer_print_json(const struct layer_options *o, struct moe_engine *e,
		      const struct layer_data *d, const struct layer_result *r)
{
	cJSON *json = cJSON_CreateObject(), *intervals = cJSON_CreateObject();

	for (int i = 0; i < LAYER_METRICS; i++) {
		double *v = sorted(r, i);

		if (v) {
			cJSON *ends = cJSON_AddArrayToObject(intervals, metrics[i].key);

			add(json, metrics[i].key, quantile(v, r->n, .5));
			for (int end = 1; end < 10; end += 8)
				cJSON_AddItemToArray(ends, rounded(quantile(v, r->n, end * .1)));
		}
		moe_free(v);
	}
	cJSON_AddItemToObject(json, "interval_10_90", intervals);
	add(json, "repeat", r->n);
	add_setting(json, o, e, d, r);
	print_line(json);
}

void layer_print_table(const struct layer_options *o, struct moe_engine *e,
		       const struct layer_result *r)
{
	struct moe_engine_info info = { .struct_size = sizeof info };
	double gflop = STEP_FLOPS * flops(o) * 1e-9, medians[LAYER_METRICS] = { 0 };

	moe_engine_get_info(e, &info);
	printf("%s: %d tokens, rank %d, %s weights, backward %s, %s kernels, %d workers, %s; load %.2f\n",
	       o->shape.name, o->tokens, o->rank, o->weights, o->backward_used,
	       moe_kernels()->name, info.workers, info.policy, r->load_at_start);
	printf("%-20s %10s %10s %10s   (%d repetitions)\n", "", "median", "10 %", "90 %", r->n);
	for (int i = 0; i < LAYER_METRICS; i++) {
		double *v = sorted(r, i);

		if (v) {
			medians[i] = quantile(v, r->n, .5);
			printf("%-20s %10.3f %10.3f %10.3f\n", metrics[i].key, medians[i],
			       quantile(v, r->n, .1), quantile(v, r->n, .9));
		}
		moe_free(v);
	}
	printf("first step %.1f ms; GFLOP/s: step %.1f, bare %.1f\n", r->first_step * 1e3,
	       gflop / medians[LAYER_STEP] * 1e3, gflop / medians[LAYER_BARE] * 1e3);
}

static void explain_rows(FILE *f, const struct layer_options *o, const struct layer_data *d)
{
	int E = o->shape.E, active = 0, least = INT32_MAX, most = 0;

	for (int e = 0; e < E; e++) {
		active += d->rows[e] > 0;
		most = MOE_MAX(most, d->rows[e]);
		if (d->rows[e])
			least = MOE_MIN(least, d->rows[e]);
	}
	fprintf(f, "rows: %d token-slot pairs; %d of %d experts have work, %d to %d rows each\n",
		o->tokens * o->shape.k, active, E, least, most);
}

static void explain_cut(FILE *f, const struct layer_options *o,
			const struct layer_kind kinds[LAYER_MAX_KINDS])
{
	int E = o->shape.E, groups = 1, slices_i = 1, slices_h = 1;

	for (int i = 0; moe_kind_name(i) && i < LAYER_MAX_KINDS; i++) {
		if (!strcmp(moe_kind_name(i), "gate_up")) {
			groups = MOE_MAX(kinds[i].groups, 1);
			slices_i = kinds[i].slices;
		} else if (!strcmp(moe_kind_name(i), "down")) {
			slices_h = kinds[i].slices;
		}
	}
	fprintf(f, "cut: %d groups of %d experts; slices: %d over intermediate, %d over hidden\n",
		groups, (E + groups - 1) / groups, slices_i, slices_h);
}

static void explain_tasks(FILE *f, const struct layer_kind kinds[LAYER_MAX_KINDS])
{
	long n = 0;

	fprintf(f, "%-18s %7s %7s %10s %10s %10s %10s %10s\n", "tasks of one step", "tasks",
		"no rows", "mean us", "longest us", "total ms", "CPU ms", "most rows");
	for (int i = 0; moe_kind_name(i) && i < LAYER_MAX_KINDS; i++) {
		const struct layer_kind *k = &kinds[i];

		n += k->tasks;
		if (k->tasks)
			fprintf(f, "%-18s %7ld %7ld %10.1f %10.1f %10.3f %10.3f %10lld\n",
				moe_kind_name(i), k->tasks, k->empty,
				k->wall / (double)k->tasks * 1e6, k->longest * 1e6, k->wall * 1e3,
				k->cpu * 1e3, (long long)k->rows_max);
	}
	fprintf(f, "%-18s %7ld\n", "all", n);
}

void layer_explain(FILE *f, const struct layer_options *o, struct moe_engine *e,
		   struct moe_block *block, const struct layer_data *d)
{
	struct moe_engine_info info = { .struct_size = sizeof info };
	struct moe_block_info b = { .struct_size = sizeof b };
	struct layer_kind kinds[LAYER_MAX_KINDS];

	moe_engine_get_info(e, &info);
	layer_watch_kinds(kinds);
	fprintf(f, "kernels: %s; policy %s; %d workers in %d parts\n", moe_kernels()->name,
		info.policy, info.workers, info.parts);
	fprintf(f, "shape %s: %d experts, %d per token, hidden %d, intermediate %d, LoRA rank %d\n",
		o->shape.name, o->shape.E, o->shape.k, o->shape.H, o->shape.I, o->rank);
	explain_rows(f, o, d);
	explain_cut(f, o, kinds);
	if (moe_block_get_info(block, &b) == MOE_OK)
		fprintf(f, "weights of the backward, predicted%s:\n%s", o->backward ? " (--backward)" : "",
			b.backward_costs);
	explain_tasks(f, kinds);
	fprintf(f, "work: %.3f GFLOP forward, as much backward, without LoRA\n", flops(o) * 1e-9);
	for (size_t i = 0; i < MOE_COUNT(purposes); i++)
		fprintf(f, "memory: %-12s %10.1f MiB\n", purposes[i],
			(double)moe_memory_bytes(e, purposes[i], -1) / (1 << 20));
}
