/* SPDX-License-Identifier: Apache-2.0 */
#include "api/pass.h"
#include "api/rows.h"

#include <math.h>

static uint64_t distance(int64_t stride)
{
	return stride < 0 ? 0 - (uint64_t)stride : (uint64_t)stride;
}

/* Strides that leave the address space would wrap around, and read some other element in silence. */
static enum moe_status check_strides(const char *name, const struct moe_array *a)
{
	double reach = 0;

	for (int d = 0; d < 2; d++)
		reach += (double)(MOE_MAX(a->shape[d], 1) - 1) * (double)distance(a->strides[d]);
	return reach * (double)moe_dtype_size(a->dtype) < 0x1p62
		       ? MOE_OK
		       : moe_fail(MOE_ERR_ARG, "%s has strides %lld and %lld (in elements): it ends beyond any memory", name,
				  (long long)a->strides[0], (long long)a->strides[1]);
}

/* rows < 0: any */
static enum moe_status check_matrix(const char *name, const struct moe_array *a, int64_t rows, int64_t cols)
{
	char shape[64];

	if (!a)
		return moe_fail(MOE_ERR_ARG, "%s is NULL", name);
	if (a->ndim < 0 || a->ndim > MOE_MAX_NDIM)
		return moe_fail(MOE_ERR_ARG, "%s has %d dimensions", name, a->ndim);
	if (a->ndim == 2 && a->shape[0] < 0)
		return moe_fail(MOE_ERR_ARG, "%s has shape [%lld, %lld]: negative", name, (long long)a->shape[0],
				(long long)a->shape[1]);
	if (a->ndim != 2 || (rows >= 0 && a->shape[0] != rows) || a->shape[1] != cols)
		return moe_fail(MOE_ERR_ARG, "%s has shape %s; [%lld, %lld] is expected", name,
				moe_shape_text(a->ndim, a->shape, shape, sizeof shape),
				(long long)(rows < 0 ? a->shape[0] : rows), (long long)cols);
	if (!a->data && a->shape[0] && a->shape[1])
		return moe_fail(MOE_ERR_ARG, "%s has no data", name);
	return check_strides(name, a);
}

enum moe_status moe_check_float_matrix(const char *name, const struct moe_array *a, int64_t rows,
					  int64_t cols)
{
	MOE_TRY(check_matrix(name, a, rows, cols));
	if (a->dtype > MOE_F64)
		return moe_fail(MOE_ERR_ARG, "%s has dtype %s; a float type is expected", name,
				moe_dtype_name(a->dtype));
	return moe_rows_check(name, a);
}

/* Element (i, j) is also (i + u, j - v) where u s0 = v s1: the least such u and v are the strides by their divisor. */
static bool elements_meet(const struct moe_array *a)
{
	uint64_t s0 = distance(a->strides[0]), s1 = distance(a->strides[1]), g = s0, r = s1;

	if (!s0 && !s1) /* contiguous */
		return false;
	while (r) {
		uint64_t next = g % r;

		g = r;
		r = next;
	}
	return s1 / g < (uint64_t)a->shape[0] && s0 / g < (uint64_t)a->shape[1];
}

enum moe_status moe_check_written_matrix(const char *name, const struct moe_array *a, int64_t rows, int64_t cols)
{
	MOE_TRY(moe_check_float_matrix(name, a, rows, cols));
	return elements_meet(a) ? moe_fail(MOE_ERR_ARG,
					   "%s has strides %lld and %lld: elements of shape [%lld, %lld] would be written to one place",
					   name, (long long)a->strides[0], (long long)a->strides[1], (long long)a->shape[0],
					   (long long)a->shape[1])
				: MOE_OK;
}

static int64_t element(const struct moe_array *a, int64_t i, int64_t j)
{
	bool contiguous = !a->strides[0] && !a->strides[1];

	return contiguous ? i * a->shape[1] + j : i * a->strides[0] + j * a->strides[1];
}

static int64_t id_at(const struct moe_array *ids, int64_t t, int64_t j)
{
	int64_t at = element(ids, t, j);

	return ids->dtype == MOE_I64 ? ((const int64_t *)ids->data)[at]
				     : ((const int32_t *)ids->data)[at];
}

static enum moe_status check_ids(const struct moe_array *ids, int E)
{
	for (int64_t t = 0; t < ids->shape[0]; t++)
		for (int64_t j = 0; j < ids->shape[1]; j++) {
			int64_t id = id_at(ids, t, j);

			if (id < -1 || id >= E)
				return moe_fail(MOE_ERR_ARG,
						"ids[%lld, %lld] is %lld; there are %d experts",
						(long long)t, (long long)j, (long long)id, E);
		}
	return MOE_OK;
}

enum moe_status moe_check_tokens(const struct moe_experts *l, const struct moe_array *x,
				 const struct moe_array *out)
{
	MOE_TRY(moe_check_float_matrix("x", x, -1, l->H));
	if (x->shape[0] > INT32_MAX / MOE_MAX(l->k, 1))
		return moe_fail(MOE_ERR_ARG, "x has %lld tokens; at most %d fit",
				(long long)x->shape[0], INT32_MAX / l->k);
	if (4.0 * (double)x->shape[0] * l->k * MOE_MAX(l->H, l->I) > MOE_MAX_BYTES)
		return moe_fail(MOE_ERR_NOFIT, "x has %lld tokens: their activations are too large",
				(long long)x->shape[0]);
	return moe_check_written_matrix("out", out, x->shape[0], l->H);
}

enum moe_status moe_check_routing(const struct moe_experts *l, int64_t T, const struct moe_array *ids,
				  const struct moe_array *weights)
{
	MOE_TRY(check_matrix("ids", ids, T, l->k));
	if (ids->dtype != MOE_I32 && ids->dtype != MOE_I64)
		return moe_fail(MOE_ERR_ARG, "ids have dtype %s; I32 or I64 is expected",
				moe_dtype_name(ids->dtype));
	MOE_TRY(moe_check_float_matrix("weights", weights, T, l->k));
	return check_ids(ids, l->E);
}

void moe_take_routing(const struct moe_experts *l, struct moe_plan *plan, const struct moe_array *ids,
		      const struct moe_array *weights, int T)
{
	int k = l->k;

	for (int64_t t = 0; t < T; t++)
		for (int64_t j = 0; j < k; j++) {
			size_t at = (size_t)element(weights, t, j) * moe_dtype_size(weights->dtype);

			plan->ids[t * k + j] = (int32_t)id_at(ids, t, j);
			moe_to_f32(&plan->weights[t * k + j], (const char *)weights->data + at,
				   weights->dtype, 1);
		}
}

enum moe_status moe_submit_copy(const struct moe_context *c, struct moe_stream *s,
				const struct moe_array *a, bool load, uint16_t *rows16)
{
	for (int i = 0; i < s->n_blocks; i++) {
		struct moe_copy_args args = { .array = *a,
					      .rows = s->data,
					      .n = s->n,
					      .t0 = moe_block_begin(i),
					      .t1 = moe_block_end(i, s->T),
					      .rows16 = rows16,
					      .ld16 = moe_width(s->n) };

		struct moe_tensor *rows = moe_rows_tensor(a, i);

		MOE_TRY(load ? moe_task_load(c, &args, i, rows, s->users, s->block[i])
			     : moe_task_store(c, &args, i, s->block[i], rows));
	}
	return MOE_OK;
}

enum moe_status moe_submit_grad_weights(const struct moe_context *c, const struct moe_experts *l,
					const struct moe_plan *plan, struct moe_slot_tensors *slot, int T,
					const struct moe_array *a)
{
	for (int i = 0; i < moe_token_blocks(T); i++) {
		struct moe_copy_args args = { .array = *a,
					      .rows = plan->grad_weights,
					      .n = l->k,
					      .t0 = moe_block_begin(i),
					      .t1 = moe_block_end(i, T) };

		MOE_TRY(moe_task_store(c, &args, i, slot->route_bwd[i], moe_rows_tensor(a, i)));
	}
	return MOE_OK;
}

bool moe_packed_wider(enum moe_dtype from, enum moe_dtype room)
{
	const struct moe_kernels *k = moe_kernels();
	int64_t columns = 1024; /* whole blocks of any table */

	return k->weight_bytes(from, 1, columns, MOE_USE_GEMM) > k->weight_bytes(room, 1, columns, MOE_USE_GEMM);
}

enum moe_status moe_check_shape(const char *name, const struct moe_array *a, int ndim,
				const int64_t *shape)
{
	int64_t contiguous = 1;
	char want[64], got[64];

	if (!a)
		return moe_fail(MOE_ERR_ARG, "%s is NULL", name);
	if (a->ndim != ndim || memcmp(a->shape, shape, (size_t)ndim * sizeof *shape))
		return moe_fail(MOE_ERR_ARG, "%s has shape %s; %s is expected", name,
				moe_shape_text(MOE_MIN(MOE_MAX(a->ndim, 0), MOE_MAX_NDIM), a->shape,
					       got, sizeof got),
				moe_shape_text(ndim, shape, want, sizeof want));
	for (int i = ndim - 1; i >= 0; contiguous *= shape[i--])
		if (a->strides[i] && a->strides[i] != contiguous && shape[i] > 1)
			return moe_fail(MOE_ERR_ARG, "%s must be contiguous", name);
	if (!a->data && moe_shape_count(ndim, shape))
		return moe_fail(MOE_ERR_ARG, "%s has no data", name);
	return MOE_OK;
}

static void scale_row(float *row, int64_t n, float scale)
{
	for (int64_t i = 0; scale != 1 && i < n; i++)
		row[i] *= scale;
}

enum moe_status moe_copy_lora(struct moe_experts *l, enum moe_lora_array which, enum moe_param_field f,
			      const struct moe_array *a, bool set, float scale)
{
	int64_t n = moe_lora_elements(l, which);
	size_t bytes = (size_t)n * moe_dtype_size(a->dtype);
	float *row = moe_alloc((size_t)n, sizeof *row);

	if (!row)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a row of LoRA");
	for (int e = 0; e < l->E; e++) {
		char *p = (char *)a->data + (size_t)e * bytes;

		if (set) {
			moe_to_f32(row, p, a->dtype, (size_t)n);
			moe_experts_set(l, which, f, e, row);
			continue;
		}
		moe_experts_get(l, which, f, e, row);
		scale_row(row, n, scale);
		moe_from_f32(p, a->dtype, row, (size_t)n);
	}
	moe_free(row);
	return MOE_OK;
}

enum moe_status moe_copy_base(const struct moe_experts *l, enum moe_expert_matrix which,
			      enum moe_param_field f, const int64_t *map, const struct moe_array *dst,
			      float scale)
{
	int64_t n = (int64_t)l->I * l->H;
	size_t bytes = (size_t)n * moe_dtype_size(dst->dtype);
	float *row = moe_alloc((size_t)n, sizeof *row);

	if (!row)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a matrix of an expert");
	for (int e = 0; e < l->E; e++) {
		moe_experts_get_base(l, which, f, e, row);
		scale_row(row, n, scale);
		moe_from_f32((char *)dst->data + (size_t)(map ? map[e] : e) * bytes, dst->dtype, row,
			     (size_t)n);
	}
	moe_free(row);
	return MOE_OK;
}

static bool in_range(double v, double low, double high)
{
	return v >= low && v < high; /* false for NaN */
}

enum moe_status moe_check_glu(float limit, float alpha, float shift)
{
	if (limit != 0 && !(limit >= 1e-6f && limit <= 1e6f))
		return moe_fail(MOE_ERR_ARG, "swiglu_limit is %g; 0 (off) and 1e-6 to 1e6 are possible", (double)limit);
	if (!(alpha >= 0 && alpha <= 1000))
		return moe_fail(MOE_ERR_ARG, "swiglu_alpha is %g; 0 (1) to 1000 are possible", (double)alpha);
	if (!(shift >= -1000 && shift <= 1000))
		return moe_fail(MOE_ERR_ARG, "swiglu_shift is %g; -1000 to 1000 are possible", (double)shift);
	return MOE_OK;
}

struct moe_glu moe_glu_of(float limit, float alpha, float shift)
{
	if (limit == 0 && (alpha == 0 || alpha == 1) && shift == 0)
		return (struct moe_glu){ 0 };
	return (struct moe_glu){ limit != 0 ? limit : INFINITY, alpha != 0 ? alpha : 1, shift };
}

enum moe_status moe_check_adamw(const struct moe_adamw_params *p)
{
	if (!p || p->struct_size < sizeof *p)
		return moe_fail(MOE_ERR_ARG, "adamw params: struct_size is not set");
	if (!in_range(p->learning_rate, 0, INFINITY) || !in_range(p->beta1, 0, 1) ||
	    !in_range(p->beta2, 0, 1) || !in_range(p->eps, 0, INFINITY) ||
	    !in_range(p->weight_decay, 0, INFINITY) || p->step < 0)
		return moe_fail(MOE_ERR_ARG,
				"adamw params: learning_rate %g, beta1 %g, beta2 %g, eps %g, "
				"weight_decay %g, step %lld",
				p->learning_rate, p->beta1, p->beta2, p->eps, p->weight_decay,
				(long long)p->step);
	if (p->max_grad_norm != 0)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"max_grad_norm is a matter of the trainer: one layer does "
				"not know the others' gradients");
	return MOE_OK;
}

struct moe_adamw moe_adamw_of(const struct moe_adamw_params *p, int64_t steps)
{
	return (struct moe_adamw){ .lr = p->learning_rate,
				   .beta1 = p->beta1,
				   .beta2 = p->beta2,
				   .eps = p->eps,
				   .weight_decay = p->weight_decay,
				   .step = p->step ? p->step : steps + 1 };
}
