/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Formulas: transformers 5.24, modeling_rope_utils.py (_compute_linear_scaling_rope_parameters,
 * _compute_yarn_parameters); YaRN is arXiv 2309.00071.
 */
#include "codelets/rope_table.h"

#include <math.h>

static double yarn_mscale(double factor, double mscale)
{
	return factor <= 1.0 ? 1.0 : 0.1 * mscale * log(factor) + 1.0;
}

double moe_rope_attention_factor(const struct moe_rope_angles *cfg)
{
	if (cfg->type != MOE_ANGLES_YARN)
		return 1.0;
	if (cfg->attention_factor != 0.0)
		return cfg->attention_factor;
	if (cfg->mscale != 0.0 && cfg->mscale_all_dim != 0.0)
		return yarn_mscale(cfg->factor, cfg->mscale) /
		       yarn_mscale(cfg->factor, cfg->mscale_all_dim);
	return yarn_mscale(cfg->factor, 1.0);
}

/* The (fractional) pair that turns `rotations` times within the original context. */
static double correction_dim(const struct moe_rope_angles *cfg, int dim, double rotations)
{
	return dim * log(cfg->original_max_positions / (rotations * 2.0 * M_PI)) /
	       (2.0 * log(cfg->theta));
}

/* 0: the frequency is kept (fast pairs); 1: it is divided by factor (slow pairs). */
static double yarn_ramp(const struct moe_rope_angles *cfg, int dim, int i)
{
	double low = correction_dim(cfg, dim, cfg->beta_fast != 0.0 ? cfg->beta_fast : 32.0);
	double high = correction_dim(cfg, dim, cfg->beta_slow != 0.0 ? cfg->beta_slow : 1.0);

	if (cfg->truncate) {
		low = floor(low);
		high = ceil(high);
	}
	low = fmax(low, 0.0);
	high = fmin(high, dim - 1);
	if (low == high)
		high += 0.001; /* a step instead of a division by 0, as in the source */
	return fmin(fmax((i - low) / (high - low), 0.0), 1.0);
}

double moe_rope_frequency(const struct moe_rope_angles *cfg, int dim, int i)
{
	double frequency = pow(cfg->theta, -2.0 * i / dim), ramp;

	switch (cfg->type) {
	case MOE_ANGLES_LINEAR:
		return frequency / cfg->factor;
	case MOE_ANGLES_YARN:
		ramp = yarn_ramp(cfg, dim, i);
		return frequency / cfg->factor * ramp + frequency * (1.0 - ramp);
	case MOE_ANGLES_DEFAULT:
		break;
	}
	return frequency;
}

void moe_rope_table(const struct moe_rope_angles *cfg, int dim, int positions, float *cs)
{
	double scale = moe_rope_attention_factor(cfg);
	int half = dim / 2;

	for (int i = 0; i < half; i++) {
		double frequency = moe_rope_frequency(cfg, dim, i);

		for (int p = 0; p < positions; p++) {
			float *row = cs + (size_t)p * (size_t)dim;

			row[i] = (float)(cos(p * frequency) * scale);
			row[half + i] = (float)(sin(p * frequency) * scale);
		}
	}
}
