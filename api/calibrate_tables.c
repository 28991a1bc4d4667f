/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel tables' rates on one core: bf16 weights that stay in the cache, f32 activations. */
#include "api/machine.h"

#include "codelets/kernels/packed/tiles.h"
#include "engine/roof.h"

#include <stdio.h>

#define POINT_MS 160 /* each direction and number of rows */
#define PACK_MS 500
#define PEAK_MS 200
#define REPEATS_MAX 64
#define N 1024
#define K 2048
#define PACK_N 8192
#define PACK_K 4096
#define MAX_ROWS (1 << (MOE_RATE_POINTS - 1))

struct table {
	const struct moe_kernels *k;
	struct moe_huge memory;
	struct moe_weight weight; /* [N, K] */
	float *x, *dy, *out;	  /* [MAX_ROWS, K], [MAX_ROWS, N], results of either */
	void *scratch;
	int rows;
	enum moe_gemm direction;
};

static bool has_peak(const struct moe_kernels *k)
{
	return k->tiles && k->tiles->peak;
}

static int table_ms(const struct moe_kernels *k)
{
	return PACK_MS + MOE_GEMM_DIRECTIONS * MOE_RATE_POINTS * POINT_MS + (has_peak(k) ? PEAK_MS : 0);
}

/* Tables of negative rank are for tests: emulations, which take forever. */
static bool wanted(const struct moe_kernels *k)
{
	return k->rank >= 0 && k->supported();
}

int moe_calibrate_tables_ms(void)
{
	int ms = 0, n = 0;

	for (int i = 0; moe_kernels_list[i] && n < MOE_MACHINE_ISAS; i++)
		if (wanted(moe_kernels_list[i])) {
			ms += table_ms(moe_kernels_list[i]);
			n++;
		}
	return ms;
}

/* Median CPU seconds of a call, of calls that are timed in bunches of at least 0.2 ms. */
static double time_calls(void (*call)(void *), void *arg, double seconds)
{
	double value[REPEATS_MAX], start, end;
	int n = 0, bunch = 1;

	call(arg);
	start = moe_thread_seconds();
	call(arg);
	start = moe_thread_seconds() - start;
	while (bunch * start < 2e-4 && bunch < 1 << 16)
		bunch *= 2;
	end = moe_now() + seconds;
	while (n < 5 || (n < REPEATS_MAX && moe_now() < end)) {
		start = moe_thread_seconds();
		for (int i = 0; i < bunch; i++)
			call(arg);
		value[n++] = (moe_thread_seconds() - start) / bunch;
	}
	return moe_median(value, n);
}

static void call_gemm(void *arg)
{
	struct table *t = arg;

	if (t->direction == MOE_GEMM_FORWARD)
		t->k->linear(t->rows, &t->weight, 0, N, t->x, K, NULL, NULL, t->out, N, t->scratch);
	else
		t->k->linear_bwd(t->rows, &t->weight, t->dy, N, NULL, t->out, K, false, t->scratch);
}

/* bf16 values around 1; products and sums stay far from overflow. */
static void fill_source(uint16_t *src, size_t n)
{
	for (size_t i = 0; i < n; i++)
		src[i] = (uint16_t)(0x3f00 | (i * 2654435761u >> 24 & 0xff));
}

static void fill_rows(float *x, size_t n)
{
	for (size_t i = 0; i < n; i++)
		x[i] = 1e-3f * (float)(i % 1000) - 0.5f;
}

static enum moe_status make(struct table *t)
{
	size_t weight = t->k->weight_bytes(MOE_BF16, N, K, MOE_USE_GEMM), rows = MAX_ROWS * sizeof(float);
	size_t scratch = t->k->linear_scratch(MAX_ROWS, N, K, 0), gap = 4096;
	size_t total =
		weight + rows * (N + K + MOE_MAX(N, K)) + scratch + (size_t)N * K * 2 + 6 * gap;
	char *at;

	if (!moe_huge_map(&t->memory, total, 0))
		return moe_fail(MOE_ERR_NOMEM, "no memory for a calibration");
	at = t->memory.data;
	t->weight.data = at;
	at += (weight + gap - 1) & ~(gap - 1);
	t->x = (float *)at;
	at += rows * K + 128; /* rows of different matrices on different sets */
	t->dy = (float *)at;
	at += rows * N + 128;
	t->out = (float *)at;
	at += rows * MOE_MAX(N, K) + 128;
	t->scratch = (void *)(((uintptr_t)at + 63) & ~(uintptr_t)63);
	at = (char *)t->scratch + ((scratch + gap - 1) & ~(gap - 1));
	fill_source((uint16_t *)at, (size_t)N * K);
	t->k->weight_pack(&t->weight, at, MOE_BF16, N, K, K, MOE_USE_GEMM);
	fill_rows(t->x, (size_t)MAX_ROWS * K);
	fill_rows(t->dy, (size_t)MAX_ROWS * N);
	return MOE_OK;
}

static enum moe_status measure_gemm(struct moe_calibration *c, struct table *t, struct moe_rates *r)
{
	char what[64];

	MOE_TRY(make(t));
	for (int i = 0; i < MOE_RATE_POINTS; i++)
		for (int d = 0; d < MOE_GEMM_DIRECTIONS; d++) {
			double seconds;

			t->rows = moe_rate_rows(i);
			t->direction = (enum moe_gemm)d;
			snprintf(what, sizeof what, "%s, %s, %d rows", t->k->name,
				 d ? "backward" : "forward", t->rows);
			seconds = time_calls(call_gemm, t, moe_calibration_step(c, what, POINT_MS));
			r->gemm_gflops[d][i] = 2.0 * t->rows * N * K / seconds * 1e-9;
		}
	moe_huge_unmap(&t->memory);
	return MOE_OK;
}

struct packing {
	const struct moe_kernels *k;
	struct moe_weight weight;
	const void *src;
};

static void call_pack(void *arg)
{
	struct packing *p = arg;

	p->k->weight_pack(&p->weight, p->src, MOE_BF16, PACK_N, PACK_K, PACK_K, MOE_USE_GEMM);
}

static enum moe_status measure_packing(struct moe_calibration *c, const struct moe_kernels *k,
				       struct moe_rates *r)
{
	size_t source = (size_t)PACK_N * PACK_K * 2,
	       packed = k->weight_bytes(MOE_BF16, PACK_N, PACK_K, MOE_USE_GEMM);
	struct packing p = { .k = k };
	struct moe_huge from = { .map = NULL }, to = { .map = NULL };
	char what[64];
	double seconds;

	snprintf(what, sizeof what, "%s, packing", k->name);
	seconds = moe_calibration_step(c, what, PACK_MS);
	if (!moe_huge_map(&from, source, 0) || !moe_huge_map(&to, packed, 0)) {
		moe_huge_unmap(&from);
		return moe_fail(MOE_ERR_NOMEM, "no memory for a calibration");
	}
	fill_source((uint16_t *)(void *)from.data, source / 2);
	p.src = from.data;
	p.weight.data = to.data;
	seconds = time_calls(call_pack, &p, seconds);
	r->pack_gbps = (double)source / seconds * 1e-9;
	moe_huge_unmap(&from);
	moe_huge_unmap(&to);
	return MOE_OK;
}

static void measure_peak(struct moe_calibration *c, const struct moe_kernels *k,
			 struct moe_rates *r)
{
	char what[64];
	double end, start, flops;
	int64_t iterations = 1 << 16;

	snprintf(what, sizeof what, "%s, peak", k->name);
	end = moe_now() + moe_calibration_step(c, what, PEAK_MS);
	do {
		start = moe_thread_seconds();
		flops = k->tiles->peak(iterations);
		start = moe_thread_seconds() - start;
		if (start > 0)
			r->peak_gflops = MOE_MAX(r->peak_gflops, flops / start * 1e-9);
		if (start < 5e-3 && iterations < (int64_t)1 << 40)
			iterations *= 2;
	} while (moe_now() < end || (start < 5e-3 && iterations < (int64_t)1 << 40));
}

static enum moe_status measure_table(struct moe_calibration *c, const struct moe_kernels *k,
				     struct moe_rates *r)
{
	struct table t = { .k = k };

	snprintf(r->isa, sizeof r->isa, "%s", k->name);
	r->measured = true;
	if (has_peak(k))
		measure_peak(c, k, r);
	MOE_TRY(measure_packing(c, k, r));
	return measure_gemm(c, &t, r);
}

enum moe_status moe_calibrate_tables(struct moe_calibration *c)
{
	struct moe_machine_rates_file *f = &c->file;
	enum moe_status st = MOE_OK;
	struct moe_pin pin;

	moe_pin_thread(&pin);
	for (int i = 0; st == MOE_OK && moe_kernels_list[i] && f->n_isas < MOE_MACHINE_ISAS; i++) {
		const struct moe_kernels *k = moe_kernels_list[i];

		if (!wanted(k))
			continue;
		if (moe_kernels_enable(k) == MOE_OK)
			st = measure_table(c, k, &f->isa[f->n_isas++]);
		else
			moe_log(MOE_LOG_WARNING, "not measured: %s", moe_last_error());
	}
	moe_unpin_thread(&pin);
	return st;
}
