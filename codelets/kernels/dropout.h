/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dropout of LoRA's inputs. A mask is a function of where an element is and of nothing that was drawn before it,
 * so that computing a forward again, or with other parts, gives the same one.
 */
#ifndef MOE_CODELETS_KERNELS_DROPOUT_H
#define MOE_CODELETS_KERNELS_DROPOUT_H

#include "engine/base.h"

enum moe_dropped { MOE_DROP_GATE, MOE_DROP_UP, MOE_DROP_DOWN, MOE_DROPPED };

/* When a pass drops: which of its masks. */
struct moe_drop_pass {
	bool on;
	uint64_t seed;		/* of the layer: moe_drop_seed */
	int64_t step, position; /* of the micro-batch's first token in the global batch */
};

static inline uint64_t moe_drop_seed(uint64_t seed, int layer)
{
	return moe_mix(moe_mix(seed + 0x9e3779b97f4a7c15ull) + (uint64_t)layer);
}

/* projection: enum moe_dropped, or what comes after it (enum moe_attn_linear) */
static inline uint64_t moe_drop_key(const struct moe_drop_pass *d, int projection, int expert)
{
	return moe_mix(moe_mix(moe_mix(d->seed + (uint64_t)d->step) + (uint64_t)projection) + (uint64_t)expert);
}

struct moe_dropout {
	float p;		   /* 0: none */
	uint64_t key[MOE_DROPPED]; /* from seed, layer, step, projection and expert */
	int64_t position;	   /* of the micro-batch's first token in the global batch */
	int64_t i0;		   /* of the part's first column of I */
};

/* n elements of a token's row from column col (of the whole array): 0, or 1 / (1 - p) times. */
static inline void moe_drop(const struct moe_dropout *d, enum moe_dropped which, int64_t token, int64_t col,
			    int64_t n, float *row)
{
	uint64_t key = moe_mix(d->key[which] + (uint64_t)(d->position + token) * 0x9e3779b97f4a7c15ull);

	for (int64_t i = 0; i < n; i++) {
		uint64_t bits = moe_mix(key + (uint64_t)(col + i) * 0xd1342543de82ef95ull);

		row[i] = (float)(bits >> 40) * 0x1p-24f < d->p ? 0 : row[i] / (1 - d->p);
	}
}

/* Masked copies of rows first.. of the micro-batch, [m, n], for the projection of the first key. */
static inline void moe_drop_rows(const struct moe_dropout *d, int64_t first, int m, int64_t n, const float *x,
				 int64_t ldx, float *out)
{
	for (int i = 0; i < m; i++) {
		memcpy(out + i * n, x + i * ldx, (size_t)n * sizeof *out);
		moe_drop(d, (enum moe_dropped)0, first + i, 0, n, out + i * n);
	}
}

#endif
