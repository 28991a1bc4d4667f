/* SPDX-License-Identifier: Apache-2.0 */
/* Routing, activations and weights of bench_layer. */
#include "bench/drawn.h"
#include "bench/layer/layer_bench.h"

#include <math.h>
#include <stdlib.h>

#define ROUTING_SEED 1
#define DISTINCT_EXPERTS 4
#define ALL_DISTINCT_BELOW ((int64_t)1 << 24) /* elements of a matrix of all experts */

static struct moe_array matrix(enum moe_dtype dtype, int64_t rows, int64_t cols)
{
	size_t bytes = (size_t)(rows * cols) * moe_dtype_size(dtype);
	struct moe_array a = { .dtype = dtype, .ndim = 2, .shape = { rows, cols } };

	a.data = aligned_alloc(64, (bytes + 64) / 64 * 64);
	return a;
}

bool layer_data_make(const struct layer_options *o, struct layer_data *d)
{
	int64_t T = o->tokens, H = o->shape.H, k = o->shape.k;
	uint32_t hash = 2166136261u;

	memset(d, 0, sizeof *d);
	d->x = matrix(o->dtype, T, H);
	d->out = matrix(o->dtype, T, H);
	d->grad_out = matrix(o->dtype, T, H);
	d->grad_x = matrix(o->dtype, T, H);
	d->ids_array = matrix(MOE_I32, T, k);
	d->weights_array = matrix(MOE_F32, T, k);
	d->grad_weights = matrix(MOE_F32, T, k);
	d->rows = calloc((size_t)o->shape.E, sizeof *d->rows);
	d->ids = d->ids_array.data;
	d->weights = d->weights_array.data;
	if (!d->x.data || !d->out.data || !d->grad_out.data || !d->grad_x.data || !d->ids ||
	    !d->weights || !d->grad_weights.data || !d->rows)
		return false;
	drawn_fill(d->x.data, o->dtype, T * H, 2, 1);
	drawn_fill(d->grad_out.data, o->dtype, T * H, 3, 1);
	for (int64_t t = 0; t < T; t++)
		drawn_route(o->shape.E, (int)k, o->skew, ROUTING_SEED, t, d->ids + t * k, d->weights + t * k);
	for (int64_t i = 0; i < T * k; i++) {
		d->rows[d->ids[i]]++;
		hash = (hash ^ (uint32_t)d->ids[i]) * 16777619u;
	}
	d->ids_hash = hash;
	return true;
}

void layer_data_free(struct layer_data *d)
{
	free(d->x.data);
	free(d->out.data);
	free(d->grad_out.data);
	free(d->grad_x.data);
	free(d->ids);
	free(d->weights);
	free(d->grad_weights.data);
	free(d->rows);
}

/* dst = src rotated by `by` bytes. */
static void rotate(char *dst, const char *src, size_t n, size_t by)
{
	by %= n;
	memcpy(dst + by, src, n - by);
	memcpy(dst, src + n - by, by);
}

static enum moe_status load_matrix(const struct layer_options *o, struct moe_block *block,
				   struct layer_bare *bare, enum moe_block_array which)
{
	int64_t E = o->shape.E, in = which == MOE_BLOCK_DOWN_PROJ ? o->shape.I : o->shape.H;
	int64_t n = (int64_t)o->shape.H * o->shape.I;
	int64_t distinct = E * n < ALL_DISTINCT_BELOW ? E : MOE_MIN(E, DISTINCT_EXPERTS);
	size_t size = moe_dtype_size(o->dtype), bytes = (size_t)n * size;
	struct moe_array a = { .dtype = o->dtype, .ndim = 3, .shape = { E, n / in, in } };
	enum moe_status st;
	char *p = moe_alloc((size_t)E, bytes);

	if (!p)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the weights");
	a.data = p;
	drawn_fill(p, o->dtype, distinct * n, 10 + (uint64_t)which, 1 / sqrt((double)in));
	for (int64_t e = distinct; e < E; e++)
		rotate(p + (size_t)e * bytes, p + (size_t)(e % distinct) * bytes, bytes,
		       (size_t)(e / distinct) * size);
	st = o->format ? layer_set_coded(o, block, which, a.data) : moe_block_set(block, which, &a);
	for (int e = 0; st == MOE_OK && e < E; e++)
		layer_bare_set(bare, which, e, p + (size_t)e * bytes, o->dtype);
	moe_free(p);
	return st;
}

static enum moe_status load_lora(const struct layer_options *o, struct moe_block *block,
				 enum moe_block_array which)
{
	bool is_b = which >= MOE_BLOCK_GATE_LORA_B;
	bool down = which == MOE_BLOCK_DOWN_LORA_A || which == MOE_BLOCK_DOWN_LORA_B;
	int64_t E = o->shape.E, r = o->rank, wide = is_b == down ? o->shape.H : o->shape.I;
	struct moe_array a = { .dtype = MOE_F32, .ndim = 3 };
	enum moe_status st;

	a.shape[0] = E;
	a.shape[1] = is_b ? wide : r;
	a.shape[2] = is_b ? r : wide;
	a.data = moe_alloc((size_t)(E * r * wide), sizeof(float));
	if (!a.data)
		return moe_fail(MOE_ERR_NOMEM, "no memory for LoRA");
	drawn_fill(a.data, MOE_F32, E * r * wide, 10 + (uint64_t)which,
	     is_b ? .1 / sqrt((double)r) : 1 / sqrt((double)wide));
	st = moe_block_set(block, which, &a);
	moe_free(a.data);
	return st;
}

enum moe_status layer_load(const struct layer_options *o, struct moe_block *block,
			   struct layer_bare *bare)
{
	for (int i = MOE_BLOCK_GATE_PROJ; i <= MOE_BLOCK_DOWN_PROJ; i++)
		MOE_TRY(load_matrix(o, block, bare, (enum moe_block_array)i));
	for (int i = MOE_BLOCK_GATE_LORA_A; o->rank && i <= MOE_BLOCK_DOWN_LORA_B; i++)
		MOE_TRY(load_lora(o, block, (enum moe_block_array)i));
	return MOE_OK;
}
