/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/kernels/kernels_bench.h"

#define ROTATION ((size_t)320 << 20) /* bytes of weights */

static uint64_t state = 88172645463325252u;

static float uniform(void) /* [-1, 1) */
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (float)(int32_t)(state >> 32) * 0x1p-31f;
}

static size_t scratch_bytes(const struct moe_tiles *t, int64_t n, int columns, int max_m)
{
	size_t most = 0;

	for (int m = 1; m <= max_m; m++)
		most = MOE_MAX(most, t->bwd_scratch(m, n, columns));
	return most;
}

struct work work_open(const struct moe_tiles *t, struct shape shape, int max_m)
{
	struct work w = { .t = t, .shape = shape };
	size_t rows = (size_t)max_m * (size_t)MOE_MAX(shape.n, shape.k);
	int64_t elements = moe_packed_panels(shape.n) * moe_packed_stride(shape.k);
	uint16_t *first, *x16;
	float *dy;

	w.expert_bytes = moe_packed_bytes(shape.n, shape.k);
	w.experts = (int)(ROTATION / w.expert_bytes) + 1;
	w.weights = huge_open(w.expert_bytes * (size_t)w.experts);
	w.x16 = huge_open(rows * sizeof *x16);
	w.dy = huge_open(rows * sizeof *dy);
	w.y = huge_open(rows * sizeof *dy);
	w.panel = huge_open(rows * sizeof *dy);
	w.scratch = huge_open(scratch_bytes(t, shape.n, shape.k, max_m));
	first = w.weights.data;
	x16 = w.x16.data;
	dy = w.dy.data;
	for (int64_t i = 0; i < elements; i++)
		first[i] = moe_f32_to_bf16(uniform());
	for (int e = 1; e < w.experts; e++)
		memcpy((char *)first + (size_t)e * w.expert_bytes, first, w.expert_bytes);
	for (size_t i = 0; i < rows; i++) {
		dy[i] = uniform();
		x16[i] = moe_f32_to_bf16(dy[i]);
	}
	return w;
}

void work_close(struct work *w)
{
	huge_close(&w->weights);
	huge_close(&w->x16);
	huge_close(&w->dy);
	huge_close(&w->y);
	huge_close(&w->panel);
	huge_close(&w->scratch);
}

/* `next`: the weights that a walk over experts would read then */
static void forward(const struct work *w, int m, const uint16_t *weights, const uint16_t *next)
{
	const struct moe_tiles *t = w->t;
	int64_t k = w->shape.k, stride = moe_packed_stride(k);

	t->pack_fwd_bf16(m, w->x16.data, k, NULL, k, k, w->panel.data, k, 0);
	for (int n = 0; n < w->shape.n; n += MOE_PACK_N, weights += stride) {
		struct moe_fwd_seg seg = { w->panel.data, k, 0, (int)k, weights };

		t->fwd(m, &seg, 1, n + MOE_PACK_N < w->shape.n ? weights + stride : next,
		       (float *)w->y.data + n, w->shape.n, moe_rows_out(m));
	}
}

static void backward(const struct work *w, int m, const uint16_t *weights, const uint16_t *next)
{
	const struct moe_tiles *t = w->t;
	int64_t n = w->shape.n, stride = moe_packed_stride(w->shape.k);
	int step = t->bwd_columns(m);

	t->pack_bwd(m, w->dy.data, n, NULL, n, n, w->panel.data, n, 0);
	for (int k = 0; k < w->shape.k; k += step) {
		struct moe_bwd_seg seg = { w->panel.data,
					   n,
					   0,
					   (int)n,
					   weights + MOE_PACK_N * k,
					   stride,
					   k + step < w->shape.k ? NULL : next,
					   NULL };

		t->bwd(m, &seg, 1, MOE_MIN(step, w->shape.k - k), (float *)w->y.data + k,
		       w->shape.k, moe_rows_out(m), w->scratch.data);
	}
}

static const uint16_t *weights_of(const struct work *w, int expert)
{
	return (const uint16_t *)w->weights.data +
	       (size_t)(expert % w->experts) * w->expert_bytes / sizeof(uint16_t);
}

void work_run(const struct work *w, enum direction d, int m, int expert, int next)
{
	(d == FORWARD ? forward : backward)(w, m, weights_of(w, expert), weights_of(w, next));
	w->t->fence();
}
