/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tables of rotary angles for the kernels' rope op. Computed in double and rounded once;
 * transformers computes angles in float, so that its own tables are off by about position * 1e-7
 * radians in the fastest pairs.
 */
#ifndef MOE_CODELETS_ROPE_TABLE_H
#define MOE_CODELETS_ROPE_TABLE_H

#include "engine/base.h"

enum moe_rope_scaling { MOE_ANGLES_DEFAULT = 0, MOE_ANGLES_LINEAR, MOE_ANGLES_YARN };

struct moe_rope_angles {
	double theta;
	enum moe_rope_scaling type;
	double factor; /* linear and yarn */
	/* yarn only; in each, 0 means the default of the model's config key */
	double original_max_positions; /* required */
	double beta_fast, beta_slow;   /* 32, 1 */
	double attention_factor;       /* derived from factor and the two below */
	double mscale, mscale_all_dim; /* used only if both are given */
	bool truncate; /* round the ramp's ends outwards; config.json's default is true */
};

/* Radians per position of pair i (dimensions i and i + dim/2). */
double moe_rope_frequency(const struct moe_rope_angles *cfg, int dim, int i);
/* What cos and sin are multiplied by: 1 except for yarn. */
double moe_rope_attention_factor(const struct moe_rope_angles *cfg);
/* cs[positions, dim]: the cosines, then the sines of dim/2 pairs. dim is even. */
void moe_rope_table(const struct moe_rope_angles *cfg, int dim, int positions, float *cs);

#endif
