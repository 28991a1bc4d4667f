/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/cost.h"
#include "codelets/kernels/packed/requantise.h"
#include "codelets/trained.h"
#include "engine/codelet.h"

static const float *own_source(const void *user, int64_t n0, int64_t n, int64_t k0, int64_t k, float *buffer,
			       int64_t *ld)
{
	*ld = k;
	moe_plain_values(user, n0, n, k0, k, buffer, k);
	return buffer;
}

/* Quantised weights from their masters. */
static void requantise(const struct moe_trained *a)
{
	const struct moe_param *p = &a->param;
	struct moe_coded_matrix m = {
		.n = p->rows, .k = p->cols, .windows = 1, .window = { { a->weight, 0, 0 } }
	};

	if (p->value)
		moe_requantise_rows(a->weight, 0, p->rows, p->value, p->cols);
	else
		moe_requantise_matrix(&m, 0, p->rows, own_source, p->own);
}

void moe_trained_renew(const struct moe_trained *a)
{
	const struct moe_param *p = &a->param;

	if (a->weight && moe_is_coded(a->weight)) {
		requantise(a);
		return;
	}
	if (!p->value)
		return;
	if (a->weight)
		moe_weight_pack(a->weight, p->value, MOE_F32, p->rows, p->cols, p->cols);
	if (a->vector && a->vector != p->value)
		memcpy(a->vector, p->value, (size_t)p->piece * sizeof *p->value);
}

void moe_trained_set(const struct moe_trained *a, const void *src, enum moe_dtype dtype)
{
	const struct moe_param *p = &a->param;

	if (p->own)
		moe_weight_store(p->own, p->rows, p->cols, src, dtype, p->cols);
	else
		moe_to_f32(p->value, src, dtype, (size_t)p->piece);
	moe_trained_renew(a);
}

void moe_trained_get(const struct moe_trained *a, int64_t n0, int64_t n1, float *dst)
{
	const struct moe_param *p = &a->param;

	if (p->value)
		memcpy(dst, p->value + n0 * p->cols, (size_t)((n1 - n0) * p->cols) * sizeof *dst);
	else
		moe_kernels()->weight_unpack(p->own, n0, n1, dst);
}

static void run(const void *args, struct moe_worker *worker)
{
	const struct moe_renew_args *a = args;

	(void)worker;
	moe_trained_renew(a->array);
}

static double cost_us(const void *args)
{
	const struct moe_renew_args *a = args;

	return moe_task_us() + moe_cost_pack_us(moe_machine(), (double)a->array->param.piece *
								       (double)sizeof(float));
}

MOE_CODELET_AT(renew, run, cost_us, MOE_HOME_LAYER);
