/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench step: trains a few steps and says where the time of the tasks goes: per kind count, total and longest task (by the
 * clock, and by CPU time: the submitting thread is one more than the cores), idle share, and how much of the time with two
 * busy workers is spent on two different layers or micro-batches.
 * usage: bench_step MODEL TOKENS OUTPUT-DIR [--adapter DIR] [--accumulation N] [--steps N] [--workers N]
 *                   [--policy S] [--sequential] [--json]
 */
#include "moesaic.h"

#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_WORKERS 256
#define MAX_KINDS 128

struct record {
	double start, end, cpu;
	struct moe_tag tag;
};

static struct {
	struct record *item;
	size_t n, capacity;
} rings[MAX_WORKERS];

static void executed(const struct moe_task_event *e, void *user)
{
	(void)user;
	if (e->worker < 0 || e->worker >= MAX_WORKERS)
		return;
	if (rings[e->worker].n == rings[e->worker].capacity) {
		size_t want = rings[e->worker].capacity ? 2 * rings[e->worker].capacity : 4096;

		rings[e->worker].item =
			realloc(rings[e->worker].item, want * sizeof(struct record));
		if (!rings[e->worker].item)
			abort();
		rings[e->worker].capacity = want;
	}
	rings[e->worker].item[rings[e->worker].n++] =
		(struct record){ e->start, e->end, e->cpu, e->tag };
}

static void print_kinds(int workers)
{
	struct {
		long n;
		double total, longest, cpu;
		int step; /* of the longest */
	} kind[MAX_KINDS] = { 0 };

	for (int w = 0; w < workers; w++)
		for (size_t i = 0; i < rings[w].n; i++) {
			const struct record *r = &rings[w].item[i];
			double t = r->end - r->start;

			kind[r->tag.kind].n++;
			kind[r->tag.kind].total += t;
			if (r->cpu > kind[r->tag.kind].cpu)
				kind[r->tag.kind].cpu = r->cpu;
			if (t > kind[r->tag.kind].longest) {
				kind[r->tag.kind].longest = t;
				kind[r->tag.kind].step = r->tag.step;
			}
		}
	printf("%-18s %8s %10s %10s %10s %8s %12s\n", "kind", "tasks", "total ms", "mean us",
	       "longest ms", "in step", "longest CPU");
	for (int k = 0; k < MAX_KINDS; k++)
		if (kind[k].n)
			printf("%-18s %8ld %10.1f %10.1f %10.2f %8d %12.2f\n", moe_kind_name(k),
			       kind[k].n, kind[k].total * 1e3,
			       kind[k].total / (double)kind[k].n * 1e6, kind[k].longest * 1e3,
			       kind[k].step, kind[k].cpu * 1e3);
}

/* Two sorted task lists (one worker each, so no overlap inside): time with both busy, and of it on
 * two different (layer, micro-batch, step). */
static void overlap(int a, int b, double *both, double *different)
{
	size_t j = 0;

	for (size_t i = 0; i < rings[a].n; i++) {
		const struct record *x = &rings[a].item[i];

		while (j < rings[b].n && rings[b].item[j].end <= x->start)
			j++;
		for (size_t k = j; k < rings[b].n && rings[b].item[k].start < x->end; k++) {
			const struct record *y = &rings[b].item[k];
			double from = x->start > y->start ? x->start : y->start;
			double to = x->end < y->end ? x->end : y->end;

			if (to <= from)
				continue;
			*both += to - from;
			if (x->tag.layer != y->tag.layer || x->tag.micro != y->tag.micro ||
			    x->tag.step != y->tag.step)
				*different += to - from;
		}
	}
}

static int fail(const char *what)
{
	fprintf(stderr, "bench_step: %s: %s\n", what, moe_last_error());
	return 1;
}

struct setup {
	struct moe_engine_params engine;
	struct moe_model_params model;
	struct moe_trainer_params trainer;
	bool json;
};

static bool take_options(int argc, char **argv, struct setup *s)
{
	static const struct option options[] = {
		{ "adapter", required_argument, NULL, 'a' },
		{ "accumulation", required_argument, NULL, 'm' },
		{ "steps", required_argument, NULL, 's' },
		{ "workers", required_argument, NULL, 'w' },
		{ "policy", required_argument, NULL, 'p' },
		{ "sequential", no_argument, NULL, 'q' },
		{ "json", no_argument, NULL, 'j' },
		{ NULL, 0, NULL, 0 },
	};
	int c;

	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (c) {
		case 'a':
			s->model.adapter = optarg;
			break;
		case 'm':
			s->trainer.accumulation = atoi(optarg);
			break;
		case 's':
			s->trainer.max_steps = atoi(optarg);
			break;
		case 'w':
			s->engine.workers = atoi(optarg);
			break;
		case 'p':
			s->engine.policy = optarg;
			break;
		case 'q':
			s->trainer.sequential = 1;
			break;
		case 'j':
			s->json = true;
			break;
		default:
			return false;
		}
	}
	if (argc - optind != 3) {
		fprintf(stderr, "usage: bench_step [options] MODEL TOKENS OUTPUT-DIR\n");
		return false;
	}
	s->model.dir = argv[optind];
	s->trainer.data = argv[optind + 1];
	s->trainer.output_dir = argv[optind + 2];
	return true;
}

static void report(const struct moe_engine_info *info, const struct moe_train_result *r, bool json)
{
	double both = 0, different = 0, share, steps = (double)r->steps;
	double idle = 1 - info->busy_seconds / (r->seconds * info->workers), rate = (double)r->tokens / r->seconds;

	if (!json)
		print_kinds(info->workers);
	for (int a = 0; a < info->workers; a++)
		for (int b = a + 1; b < info->workers; b++)
			overlap(a, b, &both, &different);
	share = different / (both > 0 ? both : 1);
	if (json)
		printf("{\"steps\": %lld, \"tokens_per_s\": %.1f, \"step_s\": %.4f, \"idle_share\": %.4f, \"workers\": %d, "
		       "\"two_busy_s\": %.4f, \"of_it_different\": %.4f}\n",
		       (long long)r->steps, rate, r->seconds / steps, idle, info->workers, both, share);
	else
		printf("%lld steps, %.1f tokens/s, %.3f s/step, idle %.1f %%\n"
		       "two workers busy %.3f s, of it on different layers or micro-batches %.1f %%\n",
		       (long long)r->steps, rate, r->seconds / steps, 100 * idle, both, 100 * share);
}

int main(int argc, char **argv)
{
	struct setup s = { .engine.struct_size = sizeof s.engine,
			   .model.struct_size = sizeof s.model,
			   .trainer = { .struct_size = sizeof s.trainer,
					.overwrite = 1,
					.keep_order = 1,
					.batch_size = 1,
					.learning_rate = 1e-3,
					.schedule = "constant",
					.max_steps = 5 } };
	struct moe_observer observer = { .executed = executed };
	struct moe_train_result result = { .struct_size = sizeof result };
	struct moe_engine_info info = { .struct_size = sizeof info };
	struct moe_token_file_info file = { .struct_size = sizeof file };
	struct moe_engine *engine;
	struct moe_model *model;

	if (!take_options(argc, argv, &s))
		return 2;
	if (moe_token_file_info(s.trainer.data, &file))
		return fail(s.trainer.data);
	s.model.max_tokens = (int)file.longest_pack;
	if (moe_engine_open(&s.engine, &engine) || moe_engine_observe(engine, &observer))
		return fail("engine");
	if (moe_model_open(engine, &s.model, &model))
		return fail("model");
	if (moe_train(model, &s.trainer, NULL, NULL, &result))
		return fail("training");
	moe_engine_get_info(engine, &info);
	report(&info, &result, s.json);
	moe_model_close(model);
	return moe_engine_close(engine) != MOE_OK;
}
