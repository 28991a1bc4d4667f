/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench requantise: what quantising trained weights again costs beside the update that changed
 * them. One matrix of f32 masters with gradients and moments, AdamW run by run as the update's task
 * has it, alone and followed by what makes the packed weights of a run: bf16, or codes. CPU time of
 * the thread, interleaved; medians and quartiles of (with - alone) / alone. usage: bench_requantise
 * [--shape NxK] [--repetitions N] [--isa NAME]
 */
#include "bench/measure.h"
#include "codelets/kernels/packed/requantise.h"

#include <getopt.h>
#include <stdio.h>

#define MAX_REPETITIONS 101
#define RUN_ELEMENTS 65536 /* codelets/update.c */

struct bench {
	const struct moe_kernels *kernels;
	int64_t n, k;
	float *p, *g, *m, *v;
};

static float *numbers(int64_t count, float scale)
{
	float *x = malloc((size_t)count * sizeof *x);
	uint64_t state = 88172645463325252u;

	if (!x) {
		fprintf(stderr, "bench_requantise: no memory for %lld numbers\n", (long long)count);
		exit(2);
	}
	for (int64_t i = 0; i < count; i++) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		x[i] = scale * ((float)(state >> 40) * 0x1p-23f - 1);
	}
	return x;
}

/* One update; w: made anew run by run, or NULL. */
static double sample(const struct bench *b, const struct moe_weight *w)
{
	const struct moe_adamw o = { 1e-6, .9, .999, 1e-8, 0, 10, 1 };
	int64_t run = MOE_MAX(RUN_ELEMENTS / b->k / 128, 1) * 128;
	double start = thread_seconds();

	for (int64_t n0 = 0; n0 < b->n; n0 += run) {
		int64_t n = MOE_MIN(run, b->n - n0), at = n0 * b->k;

		b->kernels->adamw(n * b->k, b->p + at, b->g + at, b->m + at, b->v + at, &o);
		if (w && moe_is_coded(w)) {
			moe_requantise_rows(w, n0, n0 + n, b->p + at, b->k);
		} else if (w) {
			struct moe_weight part = *w;

			part.data = (char *)w->data +
				    b->kernels->weight_bytes(MOE_BF16, n0, b->k, MOE_USE_GEMM);
			b->kernels->weight_pack(&part, b->p + at, MOE_F32, n, b->k, b->k,
						MOE_USE_GEMM);
		}
	}
	return thread_seconds() - start;
}

static struct moe_weight make(const struct bench *b, const struct moe_format *f)
{
	const struct moe_coded_window all = { 0, b->n, 0, b->k, 1 };
	struct moe_weight w = { .n = b->n, .k = b->k };
	struct moe_quantised q;
	void *memory = NULL;

	if (!f) {
		w.data = calloc(b->kernels->weight_bytes(MOE_BF16, b->n, b->k, MOE_USE_GEMM), 1);
		b->kernels->weight_pack(&w, b->p, MOE_F32, b->n, b->k, b->k, MOE_USE_GEMM);
		return w;
	}
	if (moe_quantise(f, b->p, MOE_F32, b->n, b->k, b->k, &q, &memory) != MOE_OK) {
		fprintf(stderr, "bench_requantise: %s\n", moe_last_error());
		exit(2);
	}
	w.data = calloc(moe_coded_bytes(&q.coding, b->n, b->k), 1);
	moe_coded_pack(moe_coded_order(b->kernels), &w, &q, &all);
	moe_free(memory);
	return w;
}

static void measure(const struct bench *b, const char *name, const struct moe_format *f,
		    int repetitions)
{
	double alone[MAX_REPETITIONS], ratio[MAX_REPETITIONS];
	struct moe_weight w = make(b, f);

	for (int i = -1; i < repetitions; i++) {
		double a = sample(b, NULL), with = sample(b, &w);

		if (i >= 0) {
			alone[i] = a;
			ratio[i] = (with - a) / a;
		}
	}
	sort_values(alone, repetitions);
	sort_values(ratio, repetitions);
	printf("%-6s adamw %.3f ns a weight, then %.2f of it (%.2f to %.2f)\n", name,
	       1e9 * alone[repetitions / 2] / (double)(b->n * b->k), ratio[repetitions / 2],
	       ratio[repetitions / 4], ratio[repetitions * 3 / 4]);
	fflush(stdout);
	free(w.data);
}

int main(int argc, char **argv)
{
	static const struct option options[] = { { "shape", 1, NULL, 's' },
						 { "repetitions", 1, NULL, 'r' },
						 { "isa", 1, NULL, 'i' },
						 { NULL, 0, NULL, 0 } };
	struct bench b = { .n = 1536, .k = 2048 };
	int repetitions = 15, c;
	const char *isa = NULL;

	while ((c = getopt_long(argc, argv, "", options, NULL)) >= 0)
		if (c == 's' && sscanf(optarg, "%ldx%ld", &b.n, &b.k) == 2)
			continue;
		else if (c == 'r')
			repetitions = atoi(optarg);
		else if (c == 'i')
			isa = optarg;
		else
			b.n = 0;
	if (b.n < 1 || b.k < 1 || b.k % 128 || repetitions < 1 || repetitions > MAX_REPETITIONS) {
		fprintf(stderr,
			"usage: bench_requantise [--shape NxK] [--repetitions N] [--isa NAME]\n");
		return 2;
	}
	if (moe_kernels_choose(isa, &b.kernels) != MOE_OK || !b.kernels->tiles) {
		fprintf(stderr, "bench_requantise: %s\n",
			b.kernels ? "the table has no tiles" : moe_last_error());
		return 2;
	}
	moe_coders_use(b.kernels->coders);
	b.p = numbers(b.n * b.k, .05f);
	b.g = numbers(b.n * b.k, 1e-3f);
	b.m = numbers(b.n * b.k, 1e-3f);
	b.v = numbers(b.n * b.k, 0);
	printf("[%ld, %ld], %s, %d repetitions\n", (long)b.n, (long)b.k, b.kernels->name,
	       repetitions);
	measure(&b, "bf16", NULL, repetitions);
	for (int i = 0; moe_format_list[i]; i++)
		if (moe_format_list[i]->quantise || moe_format_list[i]->quantise_zero)
			measure(&b, moe_format_list[i]->name, moe_format_list[i], repetitions);
	free(b.p), free(b.g), free(b.m), free(b.v);
	return 0;
}
