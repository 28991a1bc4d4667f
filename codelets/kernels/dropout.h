/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dropout of LoRA's inputs. A mask is a function of where an element is and of nothing that was drawn before it,
 * so that computing a forward again, or with other parts, gives the same one.
 */
#ifndef MOE_CODELETS_KERNELS_DROPOUT_H
#define MOE_CODELETS_KERNELS_DROPOUT_H

#include "engine/base.h"

enum moe_dropped { MOE_DROP_GATE, MOE_DROP_UP, MOE_DROP_DOWN, MOE_DROPPED };

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

#endif
