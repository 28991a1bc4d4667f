/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench kernels: expert GEMMs of every instruction set against the roofs of one core, measured in
 * the same run. warm: the same weights again; cold: a rotation over 320 MB of weights in 2 MiB
 * pages. Times are CPU time of the thread and include packing the activations. Every repetition
 * visits all points once, so that a slow minute of the machine touches all of them.
 * usage: bench_kernels [--isa NAME] [--shape NxK] [--m M] [--repetitions N] [--json]
 * Exit code 1: a bar is missed (but see "void").
 */
#include "bench/kernels/kernels_bench.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>

static const struct shape shapes[] = {
	{ "qwen3", 1536, 2048 }, /* gate and up of an expert of Qwen3-30B-A3B */
	{ "qwen3", 2048, 768 },	 /* its down */
	{ "deepseek", 4096, 7168 },
	{ "deepseek", 7168, 2048 },
};
static const int row_counts[] = { 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 };

#define MAX_POINTS (2 * MOE_COUNT(row_counts))
#define SAMPLE_SECONDS 1.5e-3 /* small GEMMs are repeated until one sample takes so long */

struct options {
	const char *isa;
	int n, k, m, repetitions;
	bool json;
};

static void add(struct samples *s, double value)
{
	if (s->n < MAX_SAMPLES)
		s->value[s->n++] = value;
}

/* Flop/s of `count` GEMMs, warm on expert 0, cold on experts from *next on */
static double sample(const struct work *w, const struct point *p, int count, int *next)
{
	double start;

	if (!next)
		work_run(w, p->direction, p->m, 0, 0);
	start = thread_seconds();
	for (int i = 0; i < count; i++) {
		int expert = next ? (*next)++ : 0;

		work_run(w, p->direction, p->m, expert, next ? *next : 0);
	}
	return p->flops * count / (thread_seconds() - start);
}

static void sample_roofs(const struct moe_tiles *t, struct roofs *r)
{
	if (t->peak)
		add(&r->peak, measure_peak(t));
	add(&r->clock, measure_clock());
	if (r->read.n < 5)
		add(&r->read, measure_read());
}

static int list_points(const struct options *o, const char *isa, struct shape shape,
		       struct point *point)
{
	int count = 0;

	for (int d = FORWARD; d <= BACKWARD; d++)
		for (size_t i = 0; i < MOE_COUNT(row_counts); i++) {
			int m = o->m ? o->m : row_counts[i];

			if (o->m && i)
				break;
			point[count++] = (struct point){ .isa = isa,
							 .shape = shape,
							 .direction = (enum direction)d,
							 .m = m,
							 .flops = 2.0 * m * shape.n * shape.k,
							 .bytes = 2.0 * shape.n * shape.k };
		}
	return count;
}

/* Returns how many bars are missed. */
static int run_shape(const struct options *o, const struct moe_kernels *table, struct shape shape)
{
	static struct point point[MAX_POINTS];
	int count = list_points(o, table->name, shape, point), next = 1, missed = 0;
	int repeat[MAX_POINTS];
	struct roofs roofs = { 0 };
	struct work w = work_open(table->tiles, shape, MOE_MAX(o->m, 512));

	for (int i = 0; i < count; i++) {
		double seconds = point[i].flops / sample(&w, &point[i], 1, &next);

		repeat[i] = (int)(SAMPLE_SECONDS / seconds) + 1;
	}
	for (int r = 0; r < o->repetitions; r++) {
		sample_roofs(table->tiles, &roofs);
		for (int i = 0; i < count; i++) {
			add(&point[i].warm, sample(&w, &point[i], repeat[i], NULL));
			add(&point[i].cold, sample(&w, &point[i], repeat[i], &next));
		}
	}
	report_header(&roofs, table->tiles, o->json);
	for (int i = 0; i < count; i++)
		missed += !report_point(&point[i], &roofs, o->json);
	work_close(&w);
	return missed;
}

static int usage(void)
{
	fprintf(stderr, "usage: bench_kernels [--isa NAME] [--shape NxK] [--m M] [--repetitions N] "
			"[--json]\n");
	return 2;
}

static bool parse(int argc, char **argv, struct options *o)
{
	static const struct option options[] = {
		{ "isa", required_argument, NULL, 'i' },
		{ "shape", required_argument, NULL, 's' },
		{ "m", required_argument, NULL, 'm' },
		{ "repetitions", required_argument, NULL, 'r' },
		{ "json", no_argument, NULL, 'j' },
		{ NULL, 0, NULL, 0 },
	};
	int c;

	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (c == 'i')
			o->isa = optarg;
		else if (c == 's' && sscanf(optarg, "%dx%d", &o->n, &o->k) != 2)
			return false;
		else if (c == 'm')
			o->m = atoi(optarg);
		else if (c == 'r')
			o->repetitions = atoi(optarg);
		else if (c == 'j')
			o->json = true;
		else if (c == '?')
			return false;
	}
	return optind == argc && o->m >= 0 && o->repetitions > 0 && o->repetitions <= MAX_SAMPLES;
}

int main(int argc, char **argv)
{
	struct options o = { .repetitions = 15 };
	int missed = 0, tables = 0;

	if (!parse(argc, argv, &o))
		return usage();
	for (const struct moe_kernels *const *t = moe_kernels_list; *t; t++) {
		const struct moe_kernels *k = *t;

		if (!k->supported() || !k->tiles || !k->tiles->peak)
			continue;
		if ((o.isa && strcmp(o.isa, k->name)) || (k->enable && !k->enable()))
			continue;
		tables++;
		for (size_t s = 0; s < MOE_COUNT(shapes); s++)
			if (!o.n || (shapes[s].n == o.n && shapes[s].k == o.k))
				missed += run_shape(&o, k, shapes[s]);
	}
	if (!tables)
		fprintf(stderr, "bench_kernels: no such table on this CPU\n");
	return tables ? missed != 0 : 2;
}
