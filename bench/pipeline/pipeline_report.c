/* SPDX-License-Identifier: Apache-2.0 */
/* What moesaic-trace says of a run's trace, the bars, the table. */
#include "bench/pipeline/pipeline_bench.h"

#include "engine/base.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

const char *const pipeline_cause[5] = { "submission", "dependency", "placement", "data",
					"runtime" };

#define BAR_IDLE .05	     /* submission, dependency and placement */
#define BAR_STEP 1.05	     /* of task times / workers */
#define BAR_SUM .03	     /* task times against one worker's */
#define BAR_EXPOSED .03	     /* without clipping */
#define BAR_EXPOSED_CLIP .08 /* with */

/* ---- moesaic-trace ---- */

/* $MOESAIC_TRACE_TOOL, or the one beside this program. */
static char *trace_tool(void)
{
	const char *named = getenv("MOESAIC_TRACE_TOOL");
	char path[4096];
	ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);

	if (named || n < 0)
		return moe_strdup(named ? named : "moesaic-trace");
	path[n] = 0;
	if (strrchr(path, '/'))
		*strrchr(path, '/') = 0;
	return moe_format("%s/moesaic-trace", path);
}

/* The command's output, and whether it ended well. */
static char *output_of(const char *command, bool *good)
{
	FILE *f = popen(command, "r");
	size_t n = 0, capacity = 1 << 16;
	char *text = f ? malloc(capacity) : NULL;

	while (text) {
		size_t got = fread(text + n, 1, capacity - n - 1, f);

		n += got;
		text[n] = 0;
		if (!got)
			break;
		if (capacity - n < 4096) {
			char *more = realloc(text, capacity *= 2);

			if (!more)
				free(text);
			text = more;
		}
	}
	*good = f && pclose(f) == 0 && text;
	return text;
}

static double number(const cJSON *json, const char *a, const char *b, const char *c)
{
	const cJSON *at = cJSON_GetObjectItem(json, a);

	at = b ? cJSON_GetObjectItem(at, b) : at;
	at = c ? cJSON_GetObjectItem(at, c) : at;
	return cJSON_IsNumber(at) ? at->valuedouble : 0;
}

/*
 * Task times of a step: mean of each kind in the counted steps, times its tasks per step of the
 * whole trace. Steps overlap, so a window holds a part of the next one and lacks what ran before
 * it.
 */
static double task_sum(const cJSON *json, const cJSON *all, int steps)
{
	const cJSON *kinds = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "times"), "kinds"),
		    *kind;
	double sum = 0;

	cJSON_ArrayForEach(kind, kinds)
	{
		const cJSON *whole =
			cJSON_GetObjectItem(cJSON_GetObjectItem(all, "times"), "kinds");

		sum += number(kind, "time_ns", NULL, NULL) / number(kind, "tasks", NULL, NULL) *
		       number(whole, kind->string, "tasks", NULL) / steps;
	}
	return 1e-9 * sum;
}

static void take(struct pipeline_run *r, const cJSON *json, const cJSON *all)
{
	double time = number(json, "rates", "makespan_ns", NULL),
	       whole = number(json, "idle", "worker_ns", NULL);

	r->step = 1e-9 * time / r->steps;
	r->task_sum = task_sum(json, all, r->steps + 2);
	r->busy = number(json, "idle", "busy_ns", NULL) / whole;
	for (int i = 0; i < 5; i++) {
		char key[32];

		snprintf(key, sizeof key, "%s_ns", pipeline_cause[i]);
		r->idle[i] = number(json, "idle", key, NULL) / whole;
	}
	r->update_time = number(json, "overlap", "update", "time_ns") / time;
	r->repack_time = number(json, "overlap", "repack", "time_ns") / time;
	r->update_exposed = number(json, "overlap", "update", "exposed_ns") / time;
	r->repack_exposed = number(json, "overlap", "repack", "exposed_ns") / time;
	r->blocked = (number(json, "overlap", "update", "blocked_ns") +
		      number(json, "overlap", "repack", "blocked_ns")) /
		     time;
	r->on_path = (number(json, "overlap", "update", "on_path_ns") +
		      number(json, "overlap", "repack", "on_path_ns")) /
		     time;
	r->gain = (number(json, "overlap", "update", "replay_gain_ns") +
		   number(json, "overlap", "repack", "replay_gain_ns")) /
		  time;
	r->done = time > 0 && whole > 0;
}

static enum moe_status check_trace(const char *tool, const char *trace)
{
	char *command = moe_format("'%s' check '%s'", tool, trace), *text;
	enum moe_status st = MOE_OK;
	bool good;

	if (!command)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a command");
	text = output_of(command, &good);
	if (!good)
		st = moe_fail(MOE_ERR_RUNTIME, "%s: the trace is not right:\n%s", command,
			      text ? text : "");
	free(text);
	moe_free(command);
	return st;
}

/* Summary of the steps first..last, or NULL and an error. */
static cJSON *summary_of(const char *tool, const char *trace, int first, int last)
{
	char *command =
		     moe_format("'%s' summary --json --step %d:%d '%s'", tool, first, last, trace),
	     *text;
	cJSON *json;
	bool good;

	if (!command) {
		moe_fail(MOE_ERR_NOMEM, "no memory for a command");
		return NULL;
	}
	text = output_of(command, &good);
	json = good ? cJSON_Parse(text) : NULL;
	if (!json)
		moe_fail(MOE_ERR_RUNTIME, "%s: no summary that can be read", command);
	free(text);
	moe_free(command);
	return json;
}

enum moe_status pipeline_read(struct pipeline_run *r, const char *trace)
{
	char *tool = trace_tool();
	cJSON *json = NULL, *all = NULL;
	enum moe_status st = tool ? check_trace(tool, trace)
				  : moe_fail(MOE_ERR_NOMEM, "no memory for a command");

	if (st == MOE_OK) {
		json = summary_of(tool, trace, r->first_step, r->first_step + r->steps - 1);
		all = json ? summary_of(tool, trace, r->first_step - 1, r->first_step + r->steps)
			   : NULL;
		st = all ? MOE_OK : MOE_ERR_RUNTIME;
	}
	if (st == MOE_OK)
		take(r, json, all);
	if (st == MOE_OK && !r->done)
		st = moe_fail(MOE_ERR_RUNTIME, "%s: nothing was counted", trace);
	cJSON_Delete(json);
	cJSON_Delete(all);
	moe_free(tool);
	return st;
}

/* ---- bars ---- */

struct bar {
	char what[96];
	double value, limit;
};

static double waiting(const struct pipeline_run *r)
{
	return r->idle[0] + r->idle[1] + r->idle[2];
}

/* The one-worker run with the same clipping. */
static const struct pipeline_run *alone(const struct pipeline_run *runs, int n, double clip)
{
	for (int i = 0; i < n; i++)
		if (runs[i].done && runs[i].workers == 1 && runs[i].overlap && runs[i].clip == clip)
			return &runs[i];
	return NULL;
}

static int bars_of(const struct pipeline_run *r, const struct pipeline_run *one, struct bar bars[4])
{
	int n = 0;

	bars[n] = (struct bar){ .value = waiting(r), .limit = BAR_IDLE };
	snprintf(bars[n++].what, sizeof bars->what, "%s: idle by submission, dependency, placement",
		 r->name);
	bars[n] = (struct bar){ .value = 1 / r->busy, .limit = BAR_STEP };
	snprintf(bars[n++].what, sizeof bars->what, "%s: step / (task times / workers)", r->name);
	if (one) {
		bars[n] =
			(struct bar){ .value = r->task_sum / one->task_sum - 1, .limit = BAR_SUM };
		snprintf(bars[n++].what, sizeof bars->what, "%s: task times beyond one worker's",
			 r->name);
	}
	bars[n] = (struct bar){ .value = r->update_exposed + r->repack_exposed,
				.limit = r->clip > 0 ? BAR_EXPOSED_CLIP : BAR_EXPOSED };
	snprintf(bars[n++].what, sizeof bars->what, "%s: exposed update and repack", r->name);
	return n;
}

/* ---- output ---- */

static void print_json(const struct pipeline_options *o, const struct pipeline_run *runs, int n)
{
	cJSON *json = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(json, "runs");
	char *text;

	cJSON_AddNumberToObject(json, "layers", o->layers);
	cJSON_AddNumberToObject(json, "tokens", o->tokens * o->micro_batches);
	for (int i = 0; i < n; i++) {
		const struct pipeline_run *r = &runs[i];
		cJSON *one, *bars;
		struct bar bar[4];
		char hash[24];
		int count;

		if (!r->done)
			continue;
		one = cJSON_CreateObject();
		cJSON_AddItemToArray(list, one);
		cJSON_AddStringToObject(one, "name", r->name);
		cJSON_AddNumberToObject(one, "workers", r->workers);
		cJSON_AddBoolToObject(one, "overlap", r->overlap);
		cJSON_AddNumberToObject(one, "max_grad_norm", r->clip);
		cJSON_AddNumberToObject(one, "steps", r->steps);
		cJSON_AddNumberToObject(one, "step_ms", r->step * 1e3);
		cJSON_AddNumberToObject(one, "task_ms", r->task_sum * 1e3);
		cJSON_AddNumberToObject(one, "busy", r->busy);
		for (int c = 0; c < 5; c++) {
			char key[32];

			snprintf(key, sizeof key, "idle_%s", pipeline_cause[c]);
			cJSON_AddNumberToObject(one, key, r->idle[c]);
		}
		cJSON_AddNumberToObject(one, "update_share", r->update_time);
		cJSON_AddNumberToObject(one, "repack_share", r->repack_time);
		cJSON_AddNumberToObject(one, "update_exposed", r->update_exposed);
		cJSON_AddNumberToObject(one, "repack_exposed", r->repack_exposed);
		cJSON_AddNumberToObject(one, "blocked", r->blocked);
		cJSON_AddNumberToObject(one, "on_path", r->on_path);
		cJSON_AddNumberToObject(one, "replay_gain", r->gain);
		if (isfinite(r->load))
			cJSON_AddNumberToObject(one, "load", r->load);
		cJSON_AddNumberToObject(one, "setup_s", r->setup);
		snprintf(hash, sizeof hash, "%016llx", (unsigned long long)r->weights_hash);
		cJSON_AddStringToObject(one, "weights_hash", hash);
		if (isfinite(r->norm))
			cJSON_AddNumberToObject(one, "grad_norm", r->norm);
		bars = cJSON_AddArrayToObject(one, "bars");
		count = r->overlap && r->workers > 1 ? bars_of(r, alone(runs, n, r->clip), bar) : 0;
		for (int b = 0; b < count; b++) {
			cJSON *item = cJSON_CreateObject();

			cJSON_AddItemToArray(bars, item);
			cJSON_AddStringToObject(item, "what", bar[b].what);
			cJSON_AddNumberToObject(item, "value", bar[b].value);
			cJSON_AddNumberToObject(item, "limit", bar[b].limit);
		}
	}
	text = cJSON_PrintUnformatted(json);
	puts(text ? text : "{}");
	cJSON_free(text);
	cJSON_Delete(json);
}

static void print_table(const struct pipeline_options *o, const struct pipeline_run *runs, int n)
{
	printf("%d layers of %d experts, %d per token, hidden %d, intermediate %d; %d x %d tokens; "
	       "full fine-tuning\n",
	       o->layers, o->experts, o->top, o->hidden, o->intermediate, o->micro_batches,
	       o->tokens);
	printf("%-18s %7s %9s %9s %6s  %s\n", "", "workers", "step ms", "tasks ms", "load",
	       "% of the workers' time idle: submission dependency placement runtime; % of the "
	       "time: update repack, exposed "
	       "(blocked, on path; replay without them)");
	for (int i = 0; i < n; i++) {
		const struct pipeline_run *r = &runs[i];

		if (!r->done)
			continue;
		printf("%-18s %7d %9.1f %9.1f %6.2f  %5.2f %5.2f %5.2f %5.2f; %5.2f %5.2f, %5.2f "
		       "(%.2f, %.2f; %.2f)\n",
		       r->name, r->workers, 1e3 * r->step, 1e3 * r->task_sum, r->load,
		       100 * r->idle[0], 100 * r->idle[1], 100 * r->idle[2], 100 * r->idle[4],
		       100 * r->update_time, 100 * r->repack_time,
		       100 * (r->update_exposed + r->repack_exposed), 100 * r->blocked,
		       100 * r->on_path, 100 * r->gain);
	}
}

bool pipeline_print(const struct pipeline_options *o, const struct pipeline_run *runs, int n)
{
	bool all = true;

	if (o->json)
		print_json(o, runs, n);
	else
		print_table(o, runs, n);
	for (int i = 0; i < n; i++) {
		const struct pipeline_run *r = &runs[i];
		struct bar bars[4];
		int count = r->done && r->overlap && r->workers > 1
				    ? bars_of(r, alone(runs, n, r->clip), bars)
				    : 0;

		for (int b = 0; b < count; b++) {
			bool good = bars[b].value <= bars[b].limit;

			all &= good;
			if (!o->json)
				printf("%s %-62s %7.4f, at most %.2f\n", good ? "PASS" : "NOT ",
				       bars[b].what, bars[b].value, bars[b].limit);
		}
	}
	for (int i = 0; i < n; i++)
		for (int j = 0; j < i; j++)
			if (!o->read_dir && runs[i].done && runs[j].done &&
			    runs[i].clip == runs[j].clip &&
			    runs[i].weights_hash != runs[j].weights_hash) {
				all = false;
				fprintf(stderr,
					"bench_pipeline: %s and %s end with other weights\n",
					runs[j].name, runs[i].name);
			}
	return all;
}
