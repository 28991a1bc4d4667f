/* SPDX-License-Identifier: Apache-2.0 */
/* What the expert ops of this folder share: padded widths, scratch, sums over chunks. */
#ifndef MOE_CODELETS_KERNELS_PACKED_EXPERTS_H
#define MOE_CODELETS_KERNELS_PACKED_EXPERTS_H

#include "codelets/kernels/packed/ints.h"
#include "codelets/kernels/packed/packed.h"
#include "codelets/kernels/packed/scratch.h"

#define MOE_RUN_ROWS 24	  /* up to so many rows gate_up takes a chunk of gate, then of up */
#define MOE_GRAD_STRIP 64 /* columns of x or grad_out paired at a time */

/* Widths of one expert's arrays and strides of its panels, elements. */
struct moe_widths {
	int64_t H, I;		    /* padded */
	int64_t r, ra;		    /* padded; ra = r (shared A) or 2 r */
	int64_t thin;		    /* rank as rows of A: padded to whole panels only */
	int64_t stride_h, stride_i; /* of panels with k = H or I: weights and A */
	int64_t stride_r;	    /* with k = r: B */
};

struct moe_expert_scratch {
	float *f0, *f1, *f2, *lanes; /* [m, 16] */
	float *step;	  /* [m, MOE_CHUNK], or [m, I] for up to MOE_LONG_ROWS rows: one call of bwd; gates of a
			   * run of panels */
	float *ups;	  /* [m, 16], or [m, MOE_CHUNK] for up to MOE_RUN_ROWS rows */
	float *thin;	  /* [m, 2 r'] */
	void *thin_panel; /* [m, 2 r'] panel elements */
	void *pair[5];	  /* pair arrays: [m, MOE_CHUNK], [m, MOE_GRAD_STRIP], [m, r'] x 3 */
	uint16_t *weight; /* decoded weights: a panel, or a slice of down, or of gate and up */
	void *ints; /* x or h as integers; nothing where no weight is multiplied so */
	void *bwd;
};

struct moe_widths moe_expert_widths(const struct moe_tiles *t, int64_t H, int64_t I, int r, int ra);
/* Carves the scratch of one op. */
struct moe_expert_scratch moe_expert_carve(const struct moe_tiles *t, struct moe_carver *c, int m,
					   int64_t H, int64_t I, int r, enum moe_compute compute);
static inline struct moe_widths moe_widths_of(const struct moe_tiles *t, const struct moe_expert *e,
					      const struct moe_expert_rows *w)
{
	return moe_expert_widths(t, w->H, w->I, e->r, e->ra);
}
static inline struct moe_expert_scratch moe_expert_scratch_of(const struct moe_tiles *t,
							      const struct moe_expert *e,
							      const struct moe_expert_rows *w,
							      void *scratch)
{
	struct moe_carver c = { .base = scratch };

	return moe_expert_carve(t, &c, w->m, w->H, w->I, e->r, moe_expert_compute(e));
}

static inline int moe_chunk_count(int64_t n)
{
	return (int)((n + MOE_CHUNK - 1) / MOE_CHUNK);
}
/*
 * Columns col..col+16 of gate and up as they are kept: an expert's [m, I'] is stored 16 columns at
 * a time, so that writing and reading them is one run of memory.
 */
static inline struct moe_swiglu_rows moe_kept_rows(const struct moe_expert *e,
						   const struct moe_expert_rows *w, int64_t col)
{
	return (struct moe_swiglu_rows){ .m = w->m,
					 .ld = MOE_PACK_N,
					 .gate = (uint16_t *)w->gate + col * w->m,
					 .up = (uint16_t *)w->up + col * w->m,
					 .weight = w->weight,
					 .glu = e->glu };
}

/* dst[m, n] = sum over chunks of part[c][row][n], in index order */
void moe_sum_chunks(int chunks, size_t rows, int m, int64_t n, const float *part, float *dst);

static inline const uint16_t *moe_at(const void *packed, int64_t elements)
{
	return (const uint16_t *)packed + elements;
}

/* LoRA's products run on in the weights' accumulators; under dropout they are added apart. */
static inline bool moe_lora_fused(const struct moe_expert *e, const struct moe_expert_rows *w)
{
	return e->r && !(w->drop.p > 0);
}

#endif
