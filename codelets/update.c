/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/update.h"
#include "codelets/cost.h"
#include "codelets/kernels/packed/requantise.h"
#include "codelets/rounding.h"
#include "engine/codelet.h"

/* of one call: what is updated is still in L1 (LoRA) or L2 when it is packed */
#define UPDATE_ELEMENTS 8192
#define UPDATE_BASE_ELEMENTS 32768

/* About `elements` of rows of `cols`: whole panels, and whole blocks of weights that are quantised again (or NULL). */
static int64_t run_rows(int64_t elements, int64_t cols, const struct moe_weight *coded)
{
	int64_t rows = coded && moe_is_coded(coded) ? coded->coding.rows : 1;

	while (rows % 16)
		rows *= 2;
	return MOE_MAX(elements / MOE_MAX(cols, 1) / rows, 1) * rows;
}

/* One piece by runs of rows that begin at a panel of their matrix. */
static void update_piece(const struct moe_param *p, int e, const struct moe_adamw *adamw)
{
	int64_t rows = p->stack * p->rows;
	int64_t most = p->weight ? UPDATE_BASE_ELEMENTS : UPDATE_ELEMENTS;
	int64_t run = run_rows(most, p->cols, p->weight ? &p->weight[e] : NULL);

	for (int64_t n0 = 0; n0 < rows;) {
		int64_t matrix_end = (n0 / p->rows + 1) * p->rows;
		int64_t n1 = MOE_MIN(n0 + run, matrix_end), at = e * p->piece + n0 * p->cols;

		moe_kernels()->adamw((n1 - n0) * p->cols, p->value + at, p->grad + at, p->m + at,
				     p->v + at, adamw);
		moe_param_pack(p, e, n0, n1 - n0);
		n0 = n1;
	}
}

size_t moe_update_scratch(int64_t cols, const struct moe_weight *coded)
{
	return (size_t)(run_rows(UPDATE_ELEMENTS, cols, coded) * cols) * (sizeof(float) + sizeof(uint16_t));
}

/* The packed masters to f32, AdamW, rounded back: a run of panels after the other. */
static void update_own(const struct moe_param *p, int e, const struct moe_adamw *adamw, float *wide)
{
	const struct moe_kernels *k = moe_kernels();
	struct moe_weight *w = &p->own[e];
	int64_t run = run_rows(UPDATE_ELEMENTS, p->cols, p->weight ? &p->weight[e] : NULL), whole = e * p->own_piece + p->own_at;
	uint16_t *narrow = (uint16_t *)(wide + run * p->cols);
	uint64_t key = moe_rounding_key(p->own_key, adamw->step);

	for (int64_t n0 = 0; n0 < p->rows; n0 += run) {
		int64_t n = MOE_MIN(run, p->rows - n0), at = e * p->piece + n0 * p->cols;
		int64_t first = p->own_row + n0;
		struct moe_weight part = *w;

		k->weight_unpack(w, first, first + n, wide);
		k->adamw(n * p->cols, wide, p->grad + at, p->m + at, p->v + at, adamw);
		for (int64_t i = 0; i < n; i++)
			moe_round_bf16(key, whole + (first + i) * p->own_ld, p->cols, wide + i * p->cols,
				       narrow + i * p->cols);
		part.data = (char *)w->data + k->weight_bytes(MOE_BF16, first, p->cols, MOE_USE_GEMM);
		k->weight_pack(&part, narrow, MOE_BF16, n, p->cols, p->cols, MOE_USE_GEMM);
		if (!p->weight)
			continue;
		moe_to_f32(wide, narrow, MOE_BF16, (size_t)(n * p->cols));
		moe_requantise_rows(&p->weight[e], n0, n0 + n, wide, p->cols);
	}
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_update_args *a = args;
	struct moe_adamw adamw = a->adamw;

	if (adamw.grad_scale == 0)
		adamw.grad_scale = 1;
	if (a->norm) {
		if (!a->norm->finite)
			return; /* a non-finite gradient never reaches a parameter */
		adamw.grad_scale *= a->norm->factor;
	}
	for (int i = 0; i < a->n; i++) {
		const struct moe_range *r = &a->range[i];
		int64_t at = r->e0 * r->param->piece;

		bool packs = r->param->packed || r->param->weight;

		for (int e = r->e0; r->param->own && e < r->e1; e++)
			update_own(r->param, e, &adamw, worker->scratch);
		if (r->param->own)
			continue;
		if (!packs)
			moe_kernels()->adamw((r->e1 - r->e0) * r->param->piece, r->param->value + at,
					     r->param->grad + at, r->param->m + at, r->param->v + at,
					     &adamw);
		for (int e = r->e0; packs && e < r->e1; e++)
			update_piece(r->param, e, &adamw);
	}
}

static double cost_us(const void *args)
{
	const struct moe_update_args *a = args;
	double n = 0, packed = 0;

	for (int i = 0; i < a->n; i++) {
		const struct moe_param *p = a->range[i].param;
		double elements = (double)((a->range[i].e1 - a->range[i].e0) * p->piece);

		n += elements;
		packed += p->weight ? elements * moe_weight_bytes_each(p->weight) : 0;
	}
	/* value, gradient and both moments come, all but the gradient go back */
	return moe_task_us() + moe_stream_us(4 * n * sizeof(float), 3 * n * sizeof(float) + packed);
}

MOE_CODELET_AT(update, run, cost_us, MOE_HOME_PART);
