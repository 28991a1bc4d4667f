/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/copy.h"

static int64_t stride(const struct moe_array *a, int dim)
{
	if (a->strides[0] == 0 && a->strides[1] == 0)
		return dim == 0 ? a->shape[1] : 1;
	return a->strides[dim];
}

void moe_copy_load(const struct moe_copy_args *a)
{
	int64_t s0 = stride(&a->array, 0), s1 = stride(&a->array, 1);
	size_t size = moe_dtype_size(a->array.dtype);

	for (int t = a->t0; t < a->t1; t++) {
		const char *src = (const char *)a->array.data + (size_t)(t * s0) * size;
		float *dst = a->rows + (size_t)t * (size_t)a->n;

		if (s1 == 1)
			moe_to_f32(dst, src, a->array.dtype, (size_t)a->n);
		else
			for (int j = 0; j < a->n; j++)
				moe_to_f32(dst + j, src + (size_t)(j * s1) * size, a->array.dtype, 1);
	}
}

void moe_copy_store(const struct moe_copy_args *a)
{
	int64_t s0 = stride(&a->array, 0), s1 = stride(&a->array, 1);
	size_t size = moe_dtype_size(a->array.dtype);

	for (int t = a->t0; t < a->t1; t++) {
		char *dst = (char *)a->array.data + (size_t)(t * s0) * size;
		const float *src = a->rows + (size_t)t * (size_t)a->n;

		if (s1 == 1)
			moe_from_f32(dst, a->array.dtype, src, (size_t)a->n);
		else
			for (int j = 0; j < a->n; j++)
				moe_from_f32(dst + (size_t)(j * s1) * size, a->array.dtype, src + j, 1);
	}
}
