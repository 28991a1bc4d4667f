/* SPDX-License-Identifier: Apache-2.0 */
#include "api/model_fetch.h"

#define ALIGN ((size_t)64)

static enum moe_status grow(struct moe_fetch *f, size_t bytes)
{
	if (bytes <= f->room)
		return MOE_OK;
	moe_free(f->data);
	f->room = 0;
	f->data = moe_alloc(bytes, 1);
	if (!f->data)
		return moe_fail(MOE_ERR_NOMEM, "no memory to read %zu bytes of weights", bytes);
	f->room = bytes;
	return MOE_OK;
}

static enum moe_status read_to(struct moe_fetch *f, const void *from, size_t bytes, void *to)
{
	MOE_TRY(moe_safetensors_fetch(f->st, from, bytes, to));
	*f->done += (int64_t)bytes;
	return MOE_OK;
}

enum moe_status moe_fetch_bytes(struct moe_fetch *f, const void *from, size_t bytes,
				const void **out)
{
	MOE_TRY(grow(f, MOE_MAX(bytes, 1)));
	*out = f->data;
	return read_to(f, from, bytes, f->data);
}

bool moe_fetch_has_rows(const struct moe_quantised *q)
{
	int64_t blocks = (q->n + q->coding.rows - 1) / q->coding.rows;

	/* transposed layouts have columns / 8 or groups first: no format has groups of 8 columns */
	return q->codes.shape[0] == q->n && q->scale.shape[0] == blocks &&
	       (!q->zero.data || q->zero.shape[0] == blocks);
}

/* Rows from..from+n of the first dimension. */
static size_t cut(struct moe_array *a, int64_t from, int64_t n)
{
	size_t row = a->data && a->shape[0]
			     ? (size_t)(moe_shape_count(a->ndim, a->shape) / a->shape[0]) *
				       moe_dtype_size(a->dtype)
			     : 0;

	if (!a->data)
		return 0;
	a->data = (char *)a->data + (size_t)from * row;
	a->shape[0] = n;
	return (size_t)n * row;
}

enum moe_status moe_fetch_coded(struct moe_fetch *f, const struct moe_quantised *q, int64_t row0,
				int64_t rows, struct moe_quantised *out, int64_t *first)
{
	struct moe_array *arrays[] = { &out->codes, &out->scale, &out->zero };
	size_t bytes[MOE_COUNT(arrays)], all = 0, at = 0;
	bool part = moe_fetch_has_rows(q);
	int64_t from = part ? row0 / q->coding.rows * q->coding.rows : 0, n = part ? row0 + rows - from : q->n,
		blocks = (n + q->coding.rows - 1) / q->coding.rows;

	*out = *q;
	*first = from;
	if (part)
		out->n = n;
	for (size_t i = 0; i < MOE_COUNT(arrays); i++) {
		int64_t lines = arrays[i]->shape[0];

		bytes[i] = cut(arrays[i],
			       !part ? 0
			       : i   ? from / q->coding.rows
				     : from,
			       !part ? lines
			       : i   ? blocks
				     : n);
		all += (bytes[i] + ALIGN - 1) & ~(ALIGN - 1);
	}
	MOE_TRY(grow(f, MOE_MAX(all, 1)));
	for (size_t i = 0; i < MOE_COUNT(arrays); i++) {
		if (!bytes[i])
			continue;
		MOE_TRY(read_to(f, arrays[i]->data, bytes[i], f->data + at));
		arrays[i]->data = f->data + at;
		at += (bytes[i] + ALIGN - 1) & ~(ALIGN - 1);
	}
	return MOE_OK;
}

void moe_fetch_free(struct moe_fetch *f)
{
	moe_free(f->data);
	f->data = NULL;
	f->room = 0;
}
