/* SPDX-License-Identifier: Apache-2.0 */
/* bench trace_make: writes a made-up trace of a size that is asked for (bench/trace_make/make.h). */
#include "bench/trace_make/make.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int usage(void)
{
	fprintf(stderr, "usage: bench_trace_make FILE [--tasks N] [--layers N] [--groups N] "
			"[--experts N] [--parts N] [--workers N]\n"
			"       [--steps N] [--micros N] [--tokens N] [--skew X] [--no-repack] "
			"[--seed N]\n"
			"--tasks chooses the number of steps: the fewest with at least as many\n");
	return 2;
}

/* The fewest steps with at least as many tasks. */
static int steps_for(const struct shape *s, long tasks)
{
	long group_tasks = (long)s->groups * s->parts, per_layer = 8 * BLOCKS - 4 + 3;
	long per_step =
		(long)s->micros * s->layers * (per_layer + group_tasks * (s->repack ? 6 : 5)) +
		(long)s->layers * group_tasks;

	return (int)((tasks + per_step - 1) / per_step);
}

static bool flags(struct shape *s, long *tasks, int argc, char **argv)
{
	struct {
		const char *name;
		int *value;
	} numbers[] = { { "--layers", &s->layers },   { "--groups", &s->groups },
			{ "--experts", &s->experts }, { "--parts", &s->parts },
			{ "--workers", &s->workers }, { "--steps", &s->steps },
			{ "--micros", &s->micros },   { "--tokens", &s->tokens } };

	for (int i = 2; i < argc; i++) {
		size_t k = 0;

		if (!strcmp(argv[i], "--no-repack")) {
			s->repack = false;
			continue;
		}
		if (i + 1 == argc)
			return false;
		while (k < sizeof numbers / sizeof *numbers && strcmp(argv[i], numbers[k].name))
			k++;
		if (k < sizeof numbers / sizeof *numbers)
			*numbers[k].value = atoi(argv[++i]);
		else if (!strcmp(argv[i], "--tasks"))
			*tasks = atol(argv[++i]);
		else if (!strcmp(argv[i], "--skew"))
			s->skew = atof(argv[++i]);
		else if (!strcmp(argv[i], "--seed"))
			s->seed = strtoull(argv[++i], NULL, 10);
		else
			return false;
	}
	for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++)
		if (*numbers[k].value < 1 || *numbers[k].value > 1 << 20)
			return false;
	return s->experts >= s->groups && s->tokens >= BLOCKS;
}

int main(int argc, char **argv)
{
	struct run r = { .shape = { .layers = 8,
				    .groups = 16,
				    .experts = 64,
				    .parts = 2,
				    .workers = 8,
				    .steps = 4,
				    .micros = 1,
				    .tokens = 512,
				    .skew = .5,
				    .repack = true,
				    .seed = 1 } };
	long tasks = 0;
	bool good;

	if (argc < 2 || argv[1][0] == '-' || !flags(&r.shape, &tasks, argc, argv))
		return usage();
	if (tasks > 0)
		r.shape.steps = steps_for(&r.shape, tasks);
	make_graph(&r);
	make_execute(&r);
	good = make_write(&r, argv[1]);
	printf("%u tasks, %u dependencies, %d steps, %.3f s\n", r.n, r.n_deps, r.shape.steps,
	       1e-9 * (double)r.step_end[r.shape.steps - 1]);
	make_free(&r);
	return good ? 0 : 1;
}
