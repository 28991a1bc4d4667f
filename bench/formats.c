/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench formats: expert GEMMs on quantised weights against BF16's in the same run, one core,
 * weights in a rotation that no cache holds. CPU time of the thread, packing of the activations
 * included. A ratio is the median over repetitions of BF16's time over the format's, one beside the
 * other. usage: bench_formats [--shape NxK] [--m M] [--repetitions N] [--format NAME] [--isa NAME] [--rotation MB]
 */
#include "bench/measure.h"
#include "codelets/kernels/packed/ints.h"

#include <getopt.h>
#include <stdio.h>
#include <sys/mman.h>

static size_t rotation = (size_t)200 << 20; /* bytes of weights of each format */
#define MAX_FORMATS 24
#define MAX_REPETITIONS 51
#define SAMPLE_SECONDS 2e-3

static const int row_counts[] = { 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 };
#define MOST_ROWS 512
#define POINTS (int)(2 * MOE_COUNT(row_counts))

struct bank {
	const char *name;
	enum moe_compute compute; /* of the forward */
	struct moe_weight first;
	size_t bytes;
	int experts, next;
	char *data;
	double seconds[POINTS][MAX_REPETITIONS];
};

struct bench {
	const struct moe_tiles *t;
	int n, k;
	uint16_t *x16, *buffer;
	float *dy, *y;
	void *panel, *scratch, *ints;
};

static void *pages(size_t bytes)
{
	void *p = mmap(NULL, bytes + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
		       0);

	if (p == MAP_FAILED) {
		fprintf(stderr, "bench_formats: no memory for %zu bytes\n", bytes);
		exit(2);
	}
	madvise(p, bytes, MADV_HUGEPAGE);
	return p;
}

static uint64_t state = 88172645463325252u;

static uint64_t next_random(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state >> 16;
}

static void random_codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
			 uint8_t *codes)
{
	const struct moe_format *f = q->coding.format;

	(void)row, (void)k0;
	for (int64_t i = 0; i < k; i++)
		do
			codes[i] = (uint8_t)(next_random() & ((1u << f->bits) - 1));
		while (f->values[codes[i]] != f->values[codes[i]]);
}

/* The same for a block of rows: what a format with blocks can rely on. */
static float scale_of(const struct moe_quantised *q, int64_t row, int64_t group)
{
	return 0x1p-10f * (float)(1 + (row / q->coding.rows * 7 + group * 3) % 5);
}

static int zero_of(const struct moe_quantised *q, int64_t row, int64_t group)
{
	return (int)((row / q->coding.rows + group) % 8) - 4;
}

static const struct moe_code_reader reader = { random_codes, scale_of, zero_of };

static void fill(struct bank *b, const struct bench *w, const struct moe_format *f, int64_t group,
		 bool zero, enum moe_compute compute)
{
	struct moe_quantised q = { .reader = &reader, .n = w->n, .k = w->k };
	struct moe_coded_window all = { 0, w->n, 0, w->k, 1 };

	if (f) {
		q.coding = moe_format_coding(f, w->k);
		q.coding.group = group ? group : q.coding.group;
		q.coding.zero = zero;
		q.coding.compute = compute;
		q.codes.data = &q;
		b->bytes = moe_coded_bytes(&q.coding, w->n, w->k);
	} else {
		b->bytes = moe_packed_bytes(w->n, w->k);
	}
	b->compute = compute;
	b->experts = (int)(rotation / b->bytes) + 1;
	b->data = pages(b->bytes * (size_t)b->experts);
	b->first = (struct moe_weight){
		.data = b->data, .layout = w->t->layout, .dtype = MOE_BF16, .n = w->n, .k = w->k
	};
	if (f)
		moe_coded_pack(w->t->layout, &b->first, &q, &all);
	for (size_t i = 0; !f && i < b->bytes / 2; i++)
		((uint16_t *)(void *)b->data)[i] =
			moe_f32_to_bf16((float)(next_random() % 1000) * 1e-4f);
	for (int e = 1; e < b->experts; e++)
		memcpy(b->data + (size_t)e * b->bytes, b->data, b->bytes);
}

/* next: the weight that is read then, as of the next expert */
static void forward(const struct bench *w, int m, const struct moe_weight *W, const struct moe_weight *next)
{
	const struct moe_tiles *t = w->t;
	const struct moe_int_rows *ints;
	int k = w->k;
	struct moe_fwd_seg seg = { w->panel, k, 0, k, NULL };

	t->pack_fwd_bf16(m, w->x16, k, NULL, k, k, w->panel, k, 0);
	ints = moe_int_operand(t, m, W, w->panel, k, w->ints);
	moe_forward_panels(t, m, W, 0, w->n / MOE_PACK_N, ints, &seg, 1, 0, moe_panel_address(next, 0), w->y, MOE_PACK_N, w->n, moe_rows_out(m),
			   w->buffer);
}

static void backward(const struct bench *w, int m, const struct moe_weight *W)
{
	const struct moe_tiles *t = w->t;
	int n = w->n, step = moe_backward_columns(t, m, W, n);

	t->pack_bwd(m, w->dy, n, NULL, n, n, w->panel, n, 0);
	for (int k = 0; k < w->k; k += step) {
		struct moe_bwd_seg seg = { .g = w->panel, .width = n, .n = n };
		int width = MOE_MIN(step, w->k - k);
		struct moe_coded_slice slice;

		moe_backward_slice(t, m, W, 0, n, k, width, w->buffer, &slice, &seg);
		t->bwd(m, &seg, 1, width, w->y + k, w->k, moe_rows_out(m), w->scratch);
	}
}

/* Seconds of one GEMM of point i. */
static double sample(const struct bench *w, struct bank *b, int i, int count)
{
	int m = row_counts[i / 2];
	double start = thread_seconds();

	for (int c = 0; c < count; c++) {
		struct moe_weight W = b->first, next = W;

		W.data = b->data + (size_t)(b->next++ % b->experts) * b->bytes;
		next.data = b->data + (size_t)(b->next % b->experts) * b->bytes;
		if (i % 2)
			backward(w, m, &W);
		else
			forward(w, m, &W, &next);
	}
	w->t->fence();
	return (thread_seconds() - start) / count;
}

static void open_bench(struct bench *w)
{
	size_t rows = MOST_ROWS * (size_t)MOE_MAX(w->n, w->k), scratch = 0;

	for (size_t i = 0; i < MOE_COUNT(row_counts); i++)
		scratch = MOE_MAX(scratch, w->t->bwd_scratch(row_counts[i], w->n, w->k));
	w->x16 = pages(rows * 2);
	w->dy = pages(rows * 4);
	w->y = pages(rows * 4);
	w->panel = pages(rows * 4);
	w->scratch = pages(scratch);
	w->ints = pages(moe_int_bytes(w->t, MOE_COMPUTE_INT8, MOST_ROWS, w->k));
	w->buffer = pages(MOE_MAX(32 * (size_t)w->k, moe_coded_slice_bytes(w->n)));
	for (size_t i = 0; i < rows; i++) {
		w->dy[i] = (float)(next_random() % 2000) * 1e-3f - 1;
		w->x16[i] = moe_f32_to_bf16(w->dy[i]);
	}
}

/* What a format should reach, as ratios; compute: 0 for the best of bf16 and int16. */
struct bar {
	const char *format;
	bool backward;
	enum moe_compute compute;
	int from, to; /* rows */
	double least;
};
static const struct bar bars[] = {
	{ "int8", false, 0, 1, 1, 1.6 },   { "int8", false, 0, 32, 512, .93 },
	{ "int8", false, MOE_COMPUTE_INT8, 32, 512, 1.6 },
	{ "int4", false, 0, 1, 1, 3 },	   { "int4", false, 0, 32, 512, .9 },
	{ "int4", false, MOE_COMPUTE_INT8, 32, 512, 1.4 },
	{ "fp8", false, 0, 1, 1, 1.8 },	   { "fp8", false, 0, 32, 512, .93 },
	{ "mxfp4", false, 0, 1, 1, 2.2 },  { "mxfp4", false, MOE_COMPUTE_INT8, 1, 1, 3 },
	{ "mxfp4", false, 0, 32, 512, .9 },
	{ "int8", true, 0, 32, 32, .8 },   { "int8", true, 0, 64, 512, .9 },
	{ "int4", true, 0, 32, 32, .8 },   { "int4", true, 0, 64, 512, .9 },
	{ "fp8", true, 0, 32, 32, .8 },	   { "fp8", true, 0, 64, 512, .9 },
	{ "mxfp4", true, 0, 32, 32, .8 },  { "mxfp4", true, 0, 64, 512, .9 },
};

static void ratios(const struct bank *bank, int b, int p, int repetitions, double *v)
{
	for (int r = 0; r < repetitions; r++)
		v[r] = bank[0].seconds[p][r] / bank[b].seconds[p][r];
	sort_values(v, repetitions);
}

/* Medians with their quartiles, at the bar's worst number of rows */
static void report_bar(const struct bank *bank, int banks, int repetitions, int only, const struct bar *bar)
{
	double v[MAX_REPETITIONS], worst = 1e9, low = 0, high = 0;
	int rows = 0;

	for (size_t i = 0; i < MOE_COUNT(row_counts); i++) {
		double best[3] = { 0 };
		int m = row_counts[i];

		if (m < bar->from || m > bar->to || (only && only != m))
			continue;
		for (int b = 1; b < banks; b++) {
			bool fits = bar->compute ? bank[b].compute == bar->compute
						 : bank[b].compute != MOE_COMPUTE_INT8;

			if (strcmp(bank[b].name, bar->format) || !fits ||
			    (bar->backward && bank[b].compute != MOE_COMPUTE_BF16))
				continue;
			ratios(bank, b, 2 * (int)i + bar->backward, repetitions, v);
			if (v[repetitions / 2] <= best[0])
				continue;
			best[0] = v[repetitions / 2];
			best[1] = v[repetitions / 4];
			best[2] = v[repetitions - 1 - repetitions / 4];
		}
		if (best[0] > 0 && best[0] < worst) {
			worst = best[0], low = best[1], high = best[2];
			rows = m;
		}
	}
	if (rows)
		printf("%-4s %-6s %-8s %-10s m=%d..%d >= %.2f: %.2f (quartiles %.2f to %.2f) at m=%d\n",
		       worst >= bar->least ? "PASS" : "NOT", bar->format, bar->backward ? "backward" : "forward",
		       bar->compute ? "int8" : "bf16/int16", bar->from, bar->to, bar->least, worst, low,
		       high, rows);
}

static void report(struct bank *bank, int banks, int repetitions, int only)
{
	for (int d = 0; d < 2; d++) {
		printf("%-11s", d ? "backward" : "forward");
		for (size_t i = 0; i < MOE_COUNT(row_counts); i++)
			printf(" m=%-5d", row_counts[i]);
		printf("\n");
		for (int b = 0; b < banks; b++) {
			static const char *const compute[] = { "", "", " int16", " int8" };

			if (d && bank[b].compute > MOE_COMPUTE_BF16)
				continue;
			printf("%-5s%-6s", bank[b].name, compute[bank[b].compute]);
			for (size_t i = 0; i < MOE_COUNT(row_counts); i++) {
				double v[MAX_REPETITIONS];
				int p = 2 * (int)i + d;

				for (int r = 0; r < repetitions; r++)
					v[r] = b ? bank[0].seconds[p][r] / bank[b].seconds[p][r]
						 : 1e6 * bank[0].seconds[p][r];
				if (only && only != row_counts[i])
					printf("      - ");
				else
					printf(b ? " %6.2f " : " %6.0f ", median(v, repetitions));
			}
			printf(b ? "\n" : " us\n");
		}
	}
}

struct options {
	const char *only, *isa; /* NULL: every format, the best table */
	int repetitions, m;	/* m 0: all numbers of rows */
};

static bool take_options(int argc, char **argv, struct bench *w, struct options *o)
{
	static const struct option options[] = {
		{ "shape", 1, NULL, 's' },	 { "m", 1, NULL, 'm' },
		{ "repetitions", 1, NULL, 'r' }, { "format", 1, NULL, 'f' },
		{ "isa", 1, NULL, 'i' },	 { "rotation", 1, NULL, 'R' },	 { NULL, 0, NULL, 0 }
	};
	int c;

	while ((c = getopt_long(argc, argv, "", options, NULL)) != -1)
		if (c == 's' && sscanf(optarg, "%dx%d", &w->n, &w->k) == 2)
			continue;
		else if (c == 'm')
			o->m = atoi(optarg);
		else if (c == 'r')
			o->repetitions = MOE_MAX(1, MOE_MIN(atoi(optarg), MAX_REPETITIONS));
		else if (c == 'f')
			o->only = optarg;
		else if (c == 'i')
			o->isa = optarg;
		else if (c == 'R')
			rotation = (size_t)MOE_MAX(atoi(optarg), 0) << 20;
		else
			return false;
	return true;
}

/* bf16, then every format in each way that it can be computed with; how many. */
static int open_banks(const struct bench *w, const char *only, struct bank *bank)
{
	int banks = 1;

	bank[0].name = "bf16";
	fill(&bank[0], w, NULL, 0, false, MOE_COMPUTE_BF16);
	for (int i = 0; moe_format_list[i] && banks < MAX_FORMATS; i++) {
		const struct moe_format *f = moe_format_list[i];

		if (only && strcmp(only, f->name))
			continue;
		for (enum moe_compute how = MOE_COMPUTE_BF16; how <= MOE_COMPUTE_INT8 && banks < MAX_FORMATS; how++) {
			struct bank *b = &bank[banks];

			b->name = f->name;
			fill(b, w, f, f->quantise ? 0 : 128, !f->quantise, how);
			if (moe_coded_compute(w->t, &b->first, 1) == how)
				banks++;
			else
				munmap(b->data, b->bytes * (size_t)b->experts + 4096);
		}
	}
	return banks;
}

/* Banks in turn, so that all see the same state of the machine; the first round says how many calls make a sample. */
static void measure(const struct bench *w, struct bank *bank, int banks, const struct options *o)
{
	for (int r = 0; r < o->repetitions; r++)
		for (int i = 0; i < POINTS; i++)
			for (int b = 0; b < banks && (!o->m || o->m == row_counts[i / 2]); b++) {
				double one;

				if (i % 2 && bank[b].compute > MOE_COMPUTE_BF16) /* in bf16, as another bank */
					continue;
				one = r ? bank[b].seconds[i][0] : sample(w, &bank[b], i, 1);
				bank[b].seconds[i][r] = sample(w, &bank[b], i, (int)(SAMPLE_SECONDS / one) + 1);
			}
}

int main(int argc, char **argv)
{
	static struct bank bank[MAX_FORMATS];
	struct bench w = { .n = 1536, .k = 2048 };
	struct options o = { .repetitions = 9 };
	const struct moe_kernels *table = NULL;
	int banks;

	if (!take_options(argc, argv, &w, &o)) {
		fprintf(stderr, "usage: bench_formats [--shape NxK] [--m M] [--repetitions N] [--format NAME] "
				"[--isa NAME] [--rotation MB of weights]\n");
		return 2;
	}
	if (moe_kernels_choose(o.isa, &table) != MOE_OK || !table->tiles || w.n % 32 || w.k % 32) {
		fprintf(stderr, "bench_formats: no such table with panels on this CPU, or a shape "
				"that is not of 32s\n");
		return 2;
	}
	w.t = table->tiles;
	open_bench(&w);
	banks = open_banks(&w, o.only, bank);
	measure(&w, bank, banks, &o);
	printf("%s, %d x %d, weights from memory; ratios of speed to bf16 in the same run\n",
	       table->name, w.n, w.k);
	report(bank, banks, o.repetitions, o.m);
	for (size_t i = 0; i < MOE_COUNT(bars); i++)
		report_bar(bank, banks, o.repetitions, o.m, &bars[i]);
	return 0;
}
