/* SPDX-License-Identifier: Apache-2.0 */
/* Weights, tokens and routing: functions of an index, so every run and machine has the same. */
#include "bench/pipeline/pipeline_bench.h"

#include "engine/base.h"

#include <math.h>
#include <stdlib.h>

/* splitmix64's finaliser over a counter */
static uint64_t random_bits(uint64_t i)
{
	uint64_t z = i * UINT64_C(0x9e3779b97f4a7c15) + UINT64_C(0x632be59bd9b4e019);

	z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
	return z ^ z >> 31;
}

/* Uniform of variance scale^2. */
static void fill(float *dst, int64_t n, uint64_t seed, double scale)
{
	float unit = (float)(scale * sqrt(3) * 0x1p-31);

	for (int64_t i = 0; i < n; i++) {
		uint64_t bits = random_bits(seed << 40 | (uint64_t)i >> 1);

		dst[i] = unit * (float)(int32_t)(i & 1 ? bits >> 32 : bits);
	}
}

static struct moe_array matrix(enum moe_dtype dtype, int64_t rows, int64_t cols)
{
	size_t bytes = (size_t)(rows * cols) * moe_dtype_size(dtype);
	struct moe_array a = { .dtype = dtype, .ndim = 2, .shape = { rows, cols } };

	a.data = aligned_alloc(64, (bytes + 64) / 64 * 64);
	if (a.data)
		memset(a.data, 0, bytes);
	return a;
}

/* The k highest of E scores of a token, and their softmax. */
static void route(const struct pipeline_options *o, uint64_t token, int32_t *ids, float *scores)
{
	double score[PIPELINE_MAX_TOP], sum = 0;

	for (int j = 0; j < o->top; j++)
		score[j] = -1;
	for (int e = 0; e < o->experts; e++) {
		double s = (double)(random_bits(UINT64_C(77) << 40 |
						(token * (uint64_t)o->experts + (uint64_t)e)) >>
				    40) *
			   0x1p-24;
		int j = o->top - 1;

		if (s <= score[j])
			continue;
		for (; j > 0 && s > score[j - 1]; j--) {
			score[j] = score[j - 1];
			ids[j] = ids[j - 1];
		}
		score[j] = s;
		ids[j] = e;
	}
	for (int j = 0; j < o->top; j++)
		sum += exp(score[j]);
	for (int j = 0; j < o->top; j++)
		scores[j] = (float)(exp(score[j]) / sum);
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
		fill(d->weights[i].data, E * H * I, 10 + (uint64_t)i,
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
	fill(d->rows[m][0].data, T * H, 2 + (uint64_t)m, 1);
	for (int64_t t = 0; t < T; t++)
		route(o, (uint64_t)(m * T + t), (int32_t *)d->ids[m].data + t * k,
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
	fill(d->grad_out.data, (int64_t)o->tokens * o->hidden, 3, 1e-2);
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
