/* SPDX-License-Identifier: Apache-2.0 */
#include "graphs/backward_copies.h"

#include "graphs/moe_state.h"
#include "graphs/stream.h"

size_t moe_transposed_bytes(const struct moe_experts *l, enum moe_dtype dtype, int part)
{
	int64_t I = l->part[part].I;

	return (size_t)l->E * (2 * moe_matrix_bytes(dtype, l->H, I) + moe_matrix_bytes(dtype, I, l->H));
}

enum moe_status moe_transposed_alloc(struct moe_engine *e, const struct moe_experts *l,
				     enum moe_dtype dtype, struct moe_transposed *out)
{
	memset(out, 0, sizeof *out);
	for (int p = 0; p < l->P; p++) {
		int64_t I = l->part[p].I;
		size_t bytes = moe_transposed_bytes(l, dtype, p);

		out->part[p].gate = moe_matrix_bytes(dtype, l->H, I);
		out->part[p].down = moe_matrix_bytes(dtype, I, l->H);
		out->part[p].data = moe_memory_alloc(e, bytes, p, "weights");
		if (!out->part[p].data) {
			moe_transposed_free(e, out);
			return moe_fail(MOE_ERR_NOMEM,
					"no memory for %zu bytes of transposed weights; "
					"backward weights \"direct\" take none",
					bytes);
		}
	}
	return MOE_OK;
}

void moe_transposed_free(struct moe_engine *e, struct moe_transposed *t)
{
	for (int p = 0; p < MOE_MAX_LAYER_PARTS; p++)
		moe_memory_free(e, t->part[p].data);
	memset(t, 0, sizeof *t);
}

enum moe_status moe_backward_ring_create(struct moe_engine *e, const struct moe_experts *l,
					 enum moe_dtype dtype, int n, struct moe_backward_ring *r)
{
	enum moe_status st;

	*r = (struct moe_backward_ring){ .n = n, .groups = l->P * l->G };
	r->copy = moe_calloc((size_t)n, sizeof *r->copy);
	if (!r->copy) {
		st = moe_fail(MOE_ERR_NOMEM, "no memory for a ring of weights");
		goto fail;
	}
	for (int i = 0; i < n; i++)
		MOE_TRY_GOTO(moe_transposed_alloc(e, l, dtype, &r->copy[i]), st, fail);
	MOE_TRY_GOTO(moe_tensors_create(e, "repacked", n * r->groups, false, &r->tensor), st, fail);
	return MOE_OK;
fail:
	moe_backward_ring_destroy(e, r);
	return st;
}

void moe_backward_ring_destroy(struct moe_engine *e, struct moe_backward_ring *r)
{
	moe_tensors_destroy(r->tensor, r->n * r->groups);
	for (int i = 0; r->copy && i < r->n; i++)
		moe_transposed_free(e, &r->copy[i]);
	moe_free(r->copy);
	memset(r, 0, sizeof *r);
}
