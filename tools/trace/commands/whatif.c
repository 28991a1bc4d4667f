/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/command.h"
#include "tools/trace/print.h"
#include "tools/trace/replay.h"

#include <string.h>

#define MAX_SCALES 64

static int run(int argc, char **argv);

const struct trace_command trace_command_whatif = {
	.name = "whatif",
	.usage = "whatif FILE [CHANGE...]",
	.summary = "replays the graph with a change",
	.help = "  --scale KIND=F       tasks of a kind take F times as long (again for others)\n"
		"  --equalise-experts   expert groups of a layer all take their mean\n"
		"  --workers N          another number of workers; parts are dealt to them anew\n"
		"  --step A[:B]         these steps; else all steady ones (without the first)\n"
		"  --json               numbers for programs, times in ns\n"
		"Durations are the recorded ones: what more workers do to memory bandwidth is not\n"
		"in them. The error is how far a replay of the unchanged graph is from what was\n"
		"recorded; an answer is worth as much.\n",
	.run = run,
};

struct scale {
	char kind[64];
	double factor;
};

struct change {
	struct scale scale[MAX_SCALES];
	int n_scales, workers;
	bool equalise;
};

struct answer {
	int64_t recorded, base, changed;
	double base_busy, changed_busy; /* share of the workers' time */
	int workers, changed_workers;
};

static int add_scale(const char *value, void *user)
{
	struct change *c = user;
	const char *equals = strchr(value, '=');
	struct scale *s = &c->scale[c->n_scales];

	if (!equals || equals == value || (size_t)(equals - value) >= sizeof s->kind) {
		trace_fail("--scale: '%s' is not KIND=FACTOR", value);
		return -1;
	}
	if (c->n_scales == MAX_SCALES) {
		trace_fail("--scale: at most %d", MAX_SCALES);
		return -1;
	}
	snprintf(s->kind, sizeof s->kind, "%.*s", (int)(equals - value), value);
	if (trace_flag_number("--scale", equals + 1, &s->factor))
		return -1;
	if (s->factor < 0) {
		trace_fail("--scale: %s: a factor is not negative", value);
		return -1;
	}
	c->n_scales++;
	return 0;
}

static int apply(struct replay *r, const struct change *c)
{
	for (int i = 0; i < c->n_scales; i++) {
		int kind = trace_kind(r->trace, c->scale[i].kind);

		if (kind < 0)
			return trace_fail(
				"--scale: no kind '%s' in this trace (moesaic trace summary "
				"lists them)",
				c->scale[i].kind);
		replay_scale(r, kind, c->scale[i].factor);
	}
	if (c->equalise && replay_equalise_experts(r))
		return trace_fail("no memory");
	return 0;
}

static int simulate(const struct replay *r, int workers, int64_t *makespan, double *busy)
{
	struct replay_machine m = replay_machine_of(r, workers);
	struct replay_result out;

	if (replay_run(r, &m, &replay_list, false, &out))
		return trace_fail("no memory");
	if (out.done < r->n)
		return trace_fail("%u tasks can run on no worker", r->n - out.done);
	*makespan = out.makespan;
	*busy = out.makespan > 0 ? (double)out.busy / ((double)out.makespan * m.workers) : 0;
	replay_result_free(&out);
	return 0;
}

static int ask(const struct trace_window *w, const struct change *c, struct answer *a)
{
	struct replay r;
	int rc;

	if (replay_open(w, &r))
		return trace_fail("no memory");
	a->recorded = r.recorded;
	a->workers = w->trace->n_workers;
	a->changed_workers = c->workers > 0 ? c->workers : a->workers;
	rc = simulate(&r, 0, &a->base, &a->base_busy);
	if (!rc)
		rc = apply(&r, c);
	if (!rc)
		rc = simulate(&r, c->workers, &a->changed, &a->changed_busy);
	replay_close(&r);
	return rc;
}

static double error_of(const struct answer *a)
{
	return a->recorded > 0 ? (double)(a->base - a->recorded) / (double)a->recorded : 0;
}

static void print(const struct answer *a, const struct trace_window *w)
{
	char x[PRINT_BYTES], y[PRINT_BYTES];

	if (w->first_step)
		printf("steps %d to %d\n", w->first_step, w->last_step);
	printf("recorded   %10s\n", print_time((double)a->recorded, x));
	printf("replayed   %10s   error %+.1f %%, %d workers busy %s\n",
	       print_time((double)a->base, x), 100 * error_of(a), a->workers,
	       print_share(a->base_busy, 1, y));
	printf("changed    %10s   %d workers busy %s\n", print_time((double)a->changed, x),
	       a->changed_workers, print_share(a->changed_busy, 1, y));
	printf("gain       %10s   %s of the replay\n",
	       print_time((double)(a->base - a->changed), x),
	       print_share((double)(a->base - a->changed), (double)a->base, y));
	if (a->changed_workers != a->workers)
		printf("note: tasks take as long as with %d workers; memory bandwidth may not "
		       "allow "
		       "that\n",
		       a->workers);
}

static void print_json(const struct answer *a)
{
	struct trace_json j = { .out = stdout, .lines = true };

	trace_json_object(&j, NULL);
	trace_json_integer(&j, "recorded_ns", a->recorded);
	trace_json_integer(&j, "replay_ns", a->base);
	trace_json_number(&j, "replay_error", error_of(a));
	trace_json_integer(&j, "workers", a->workers);
	trace_json_integer(&j, "changed_ns", a->changed);
	trace_json_integer(&j, "changed_workers", a->changed_workers);
	trace_json_integer(&j, "gain_ns", a->base - a->changed);
	trace_json_number(&j, "busy", a->base_busy);
	trace_json_number(&j, "changed_busy", a->changed_busy);
	trace_json_end(&j, '}');
	putchar('\n');
}

static int answer(const struct trace *t, const struct change *c, const int64_t step[2], bool json)
{
	struct trace_window w;
	struct answer a;
	char error[200];
	int rc;

	if (trace_choose(t, (int)step[0], (int)step[1], &w, error, sizeof error))
		return trace_fail("%s", error);
	rc = ask(&w, c, &a);
	if (!rc && json)
		print_json(&a);
	else if (!rc)
		print(&a, &w);
	trace_window_free(&w);
	return rc;
}

static int run(int argc, char **argv)
{
	struct change c = { .n_scales = 0 };
	bool json = false;
	const char *file, *steps = NULL, *workers = NULL;
	const struct trace_flag flags[] = { { .name = "--scale", .each = add_scale, .user = &c },
					    { .name = "--equalise-experts", .set = &c.equalise },
					    { .name = "--workers", .text = &workers },
					    { .name = "--step", .text = &steps },
					    { .name = "--json", .set = &json },
					    { 0 } };
	int64_t step[2] = { 0, 0 }, n[2] = { 0, 0 };
	struct trace t;
	int rc = trace_flags(&trace_command_whatif, argc, argv, flags, &file, 1, 1);

	if (rc)
		return rc < 0 ? TRACE_EXIT_DONE : rc;
	if (steps && (trace_flag_range("--step", steps, step) || trace_flag_steps(step)))
		return TRACE_EXIT_BAD;
	if (workers && trace_flag_range("--workers", workers, n))
		return TRACE_EXIT_BAD;
	if (workers && (n[0] != n[1] || n[0] < 1 || n[0] > 65536))
		return trace_fail("--workers: '%s' is not from 1 to 65536", workers);
	c.workers = (int)n[0];
	if (trace_load(&t, file, NULL))
		return TRACE_EXIT_BAD;
	rc = t.n_tasks ? answer(&t, &c, step, json) : trace_fail("%s: no task has run", file);
	trace_free(&t);
	return rc;
}
