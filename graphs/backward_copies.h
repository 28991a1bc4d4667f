/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory of transposed weights (struct moe_transposed), part-local, and the ring that layers of a
 * decoder take turns in: layer i of those with experts (any fixed numbering of neighbours) uses
 * entry i mod n. repack_bwd fills an entry, the layer's down_bwd and gate_up_bwd read it; only the
 * handles say when.
 */
#ifndef MOE_GRAPHS_BACKWARD_COPIES_H
#define MOE_GRAPHS_BACKWARD_COPIES_H

#include "codelets/moe.h"
#include "engine/engine.h"

/* Bytes of one layer's copies in one part. Of l, E, H and the part's I are read. */
size_t moe_transposed_bytes(const struct moe_experts *l, enum moe_dtype dtype, int part);
/* dtype: of the weights' source, as in weight_bytes. */
enum moe_status moe_transposed_alloc(struct moe_engine *e, const struct moe_experts *l,
				     enum moe_dtype dtype, struct moe_transposed *out);
void moe_transposed_free(struct moe_engine *e, struct moe_transposed *t);

struct moe_backward_ring {
	int n, groups;		     /* entries; P G tensors of each */
	struct moe_transposed *copy; /* [n] */
	struct moe_tensor **tensor;  /* [n groups] */
};

/* For layers of l's shape. */
enum moe_status moe_backward_ring_create(struct moe_engine *e, const struct moe_experts *l,
					 enum moe_dtype dtype, int n, struct moe_backward_ring *r);
void moe_backward_ring_destroy(struct moe_engine *e, struct moe_backward_ring *r);

#endif
