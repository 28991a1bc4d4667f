/* SPDX-License-Identifier: Apache-2.0 */
/* Steps per second and what they carry, with intervals over steps. */
#include "tools/trace/metrics.h"
#include "tools/trace/print.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Work of a step's own tasks, whenever they ran. */
static void work(const struct trace *t, const struct trace_step *s, double *flops, double *bytes)
{
	bool known = false;

	*flops = *bytes = 0;
	for (uint32_t i = s->first; i < s->first + s->n; i++) {
		const struct trace_task *k = &t->task[t->by_step[i]];

		if (k->flops != MOE_MXT_NA) {
			*flops += (double)k->flops;
			known = true;
		}
		if (k->read != MOE_MXT_NA)
			*bytes += (double)k->read;
		if (k->written != MOE_MXT_NA)
			*bytes += (double)k->written;
	}
	if (!known)
		*flops = *bytes = NAN;
}

static struct trace_rate rate_of(const struct trace *t, int i)
{
	const struct trace_step *s = &t->step[i];
	struct trace_rate r = { .step = s->step };
	double flops, bytes, seconds;
	int64_t begin, end;

	trace_step_time(t, i, &begin, &end);
	r.time = end - begin;
	seconds = r.time > 0 ? 1e-9 * (double)r.time : NAN;
	work(t, s, &flops, &bytes);
	r.tokens = s->tokens == MOE_MXT_NA ? NAN : (double)s->tokens / seconds;
	r.trained = s->trained == MOE_MXT_NA ? NAN : (double)s->trained / seconds;
	r.gflops = 1e-9 * flops / seconds;
	r.gbps = 1e-9 * bytes / seconds;
	return r;
}

static struct trace_interval interval(const struct trace_rates *r, double *values,
				      double (*get)(const struct trace_rate *))
{
	for (int i = 0; i < r->n; i++)
		values[i] = get(&r->step[i]);
	return trace_bootstrap(values, r->n);
}

static double seconds_of(const struct trace_rate *r)
{
	return 1e-9 * (double)r->time;
}
static double tokens_of(const struct trace_rate *r)
{
	return r->tokens;
}
static double trained_of(const struct trace_rate *r)
{
	return r->trained;
}
static double gflops_of(const struct trace_rate *r)
{
	return r->gflops;
}
static double gbps_of(const struct trace_rate *r)
{
	return r->gbps;
}

int trace_rates(const struct trace *t, struct trace_rates *r)
{
	int first = trace_steady(t);
	double *values;

	memset(r, 0, sizeof *r);
	r->n = first < 0 ? 0 : t->n_steps - first;
	r->step = malloc(((size_t)r->n + 1) * sizeof *r->step);
	values = malloc(((size_t)r->n + 1) * sizeof *values);
	if (!r->step || !values) {
		free(values);
		trace_rates_free(r);
		return -1;
	}
	for (int i = 0; i < r->n; i++)
		r->step[i] = rate_of(t, first + i);
	r->seconds = interval(r, values, seconds_of);
	r->tokens = interval(r, values, tokens_of);
	r->trained = interval(r, values, trained_of);
	r->gflops = interval(r, values, gflops_of);
	r->gbps = interval(r, values, gbps_of);
	free(values);
	return 0;
}

void trace_rates_free(struct trace_rates *r)
{
	free(r->step);
	memset(r, 0, sizeof *r);
}

/* ---- the section ---- */

static const char *value(double v, bool seconds, char *buf)
{
	return seconds ? print_time(1e9 * v, buf) : print_count(v, buf);
}

static void line(FILE *out, const char *what, const struct trace_interval *i, bool seconds)
{
	char a[PRINT_BYTES], b[PRINT_BYTES], c[PRINT_BYTES];

	if (!isfinite(i->median))
		return;
	fprintf(out, "  %-10s %10s", what, value(i->median, seconds, a));
	if (isfinite(i->low))
		fprintf(out, "   [%s, %s]", value(i->low, seconds, b), value(i->high, seconds, c));
	fprintf(out, "\n");
}

static int text(const struct trace_view *v, FILE *out)
{
	struct trace_rates r;
	char a[PRINT_BYTES];

	fprintf(out, "\nmakespan %s", print_time((double)(v->window.end - v->window.begin), a));
	if (trace_rates(v->trace, &r))
		return -1;
	if (r.n)
		fprintf(out, "; %d steady steps, median [95 %% interval over steps]", r.n);
	fprintf(out, "\n");
	line(out, "step", &r.seconds, true);
	line(out, "tokens/s", &r.tokens, false);
	line(out, "trained/s", &r.trained, false);
	line(out, "GFLOP/s", &r.gflops, false);
	line(out, "GB/s", &r.gbps, false);
	trace_rates_free(&r);
	return 0;
}

static void member(struct trace_json *out, const char *name, const struct trace_interval *i)
{
	trace_json_object(out, name);
	trace_json_number(out, "median", i->median);
	trace_json_number(out, "low", i->low);
	trace_json_number(out, "high", i->high);
	trace_json_integer(out, "n", i->n);
	trace_json_end(out, '}');
}

static int json(const struct trace_view *v, struct trace_json *out)
{
	struct trace_rates r;

	if (trace_rates(v->trace, &r))
		return -1;
	trace_json_integer(out, "makespan_ns", v->window.end - v->window.begin);
	trace_json_integer(out, "tokens", v->window.tokens);
	member(out, "seconds", &r.seconds);
	member(out, "tokens_per_s", &r.tokens);
	member(out, "trained_per_s", &r.trained);
	member(out, "gflops", &r.gflops);
	member(out, "gbps", &r.gbps);
	trace_json_array(out, "steps");
	for (int i = 0; i < r.n; i++) {
		trace_json_object(out, NULL);
		trace_json_integer(out, "step", r.step[i].step);
		trace_json_integer(out, "time_ns", r.step[i].time);
		trace_json_number(out, "tokens_per_s", r.step[i].tokens);
		trace_json_number(out, "gflops", r.step[i].gflops);
		trace_json_number(out, "gbps", r.step[i].gbps);
		trace_json_end(out, '}');
	}
	trace_json_end(out, ']');
	trace_rates_free(&r);
	return 0;
}

const struct trace_metric trace_metric_rates = {
	.name = "rates", .order = 20, .text = text, .json = json
};
