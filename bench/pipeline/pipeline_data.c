/* SPDX-License-Identifier: Apache-2.0 */
/* Weights, tokens and routing: functions of an index, so every run and machine has the same. */
#include "bench/drawn.h"
#include "bench/pipeline/pipeline_bench.h"

#include <math.h>
#include <stdlib.h>

#define ROUTING_SEED 77

static struct moe_array matrix(enum moe_dtype dtype, int64_t rows, int64_t cols)
{
	size_t bytes = (size_t)(rows * cols) * moe_dtype_size(dtype);
	struct moe_array a = { .dtype = dtype, .ndim = 2, .shape = { rows, cols } };

	a.data = aligned_alloc(64, (bytes + 64) / 64 * 64);
	if (a.data)
		memset(a.data, 0, bytes);
	return a;
}

static enum moe_status make_weights(const struct pipeline_options *o, struct pipeline_data *d)
{
	int64_t E = o->experts, H = o->hidden, I = o->intermediate;

	for (int i = 0; i < 3; i++) {
		bool down = i == 2;

		d->weights[i] =
			(struct moe_array){ .ndim = 3, .shape = { E, down ? H : I, down ? I : H } };
		d->weights[i].data = moe_alloc((size_t)(E * H * I), sizeof(float));
		if (!d->weights[i].data)
			return moe_fail(MOE_ERR_NOMEM, "no memory for the weights");
		drawn_fill(d->weights[i].data, MOE_F32, E * H * I, 10 + (uint64_t)i,
		     (down ? 8 : 1.5) / sqrt((double)(down ? I : H)));
	}
	return MOE_OK;
}

static enum moe_status make_micro(const struct pipeline_options *o, struct pipeline_data *d, int m)
{
	int64_t T = o->tokens, H = o->hidden, k = o->top;
	int n = o->layers + 1;

	d->rows[m] = moe_calloc((size_t)n, sizeof **d->rows);
	d->grads[m] = moe_calloc((size_t)n, sizeof **d->grads);
	d->ids[m] = matrix(MOE_I32, T, k);
	d->scores[m] = matrix(MOE_F32, T, k);
	if (!d->rows[m] || !d->grads[m] || !d->ids[m].data || !d->scores[m].data)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the activations");
	for (int i = 0; i < n; i++) {
		d->rows[m][i] = matrix(MOE_F32, T, H);
		d->grads[m][i] = i < o->layers ? matrix(MOE_F32, T, H) : d->grad_out;
		if (!d->rows[m][i].data || !d->grads[m][i].data)
			return moe_fail(MOE_ERR_NOMEM, "no memory for the activations");
	}
	drawn_fill(d->rows[m][0].data, MOE_F32, T * H, 2 + (uint64_t)m, 1);
	for (int64_t t = 0; t < T; t++)
		drawn_route(o->experts, o->top, 0, ROUTING_SEED, m * T + t, (int32_t *)d->ids[m].data + t * k,
			    (float *)d->scores[m].data + t * k);
	return MOE_OK;
}

enum moe_status pipeline_data_make(const struct pipeline_options *o, struct pipeline_data *d)
{
	size_t M = (size_t)o->micro_batches;

	memset(d, 0, sizeof *d);
	MOE_TRY(make_weights(o, d));
	d->grad_out = matrix(MOE_F32, o->tokens, o->hidden);
	d->rows = moe_calloc(M, sizeof *d->rows);
	d->grads = moe_calloc(M, sizeof *d->grads);
	d->ids = moe_calloc(M, sizeof *d->ids);
	d->scores = moe_calloc(M, sizeof *d->scores);
	if (!d->grad_out.data || !d->rows || !d->grads || !d->ids || !d->scores)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the activations");
	drawn_fill(d->grad_out.data, MOE_F32, (int64_t)o->tokens * o->hidden, 3, 1e-2);
	for (int m = 0; m < o->micro_batches; m++)
		MOE_TRY(make_micro(o, d, m));
	return MOE_OK;
}

void pipeline_data_free(const struct pipeline_options *o, struct pipeline_data *d)
{
	for (int i = 0; i < 3; i++)
		moe_free(d->weights[i].data);
	for (int m = 0; d->scores && m < o->micro_batches; m++) {
		for (int i = 0; d->rows[m] && i <= o->layers; i++)
			free(d->rows[m][i].data);
		for (int i = 0; d->grads[m] && i < o->layers; i++)
			free(d->grads[m][i].data);
		moe_free(d->rows[m]);
		moe_free(d->grads[m]);
		free(d->ids[m].data);
		free(d->scores[m].data);
	}
	moe_free(d->rows);
	moe_free(d->grads);
	moe_free(d->ids);
	moe_free(d->scores);
	free(d->grad_out.data);
}
