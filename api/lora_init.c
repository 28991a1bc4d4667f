/* SPDX-License-Identifier: Apache-2.0 */
#include "api/lora_init.h"

#include <math.h>

void moe_lora_init_a(uint64_t seed, int layer, int target, int expert, int64_t r, int64_t in, float *a)
{
	uint64_t key = moe_mix(moe_mix(moe_mix(moe_mix(seed + 0x9e3779b97f4a7c15ull) + (uint64_t)layer) +
			       (uint64_t)target) + (uint64_t)expert);
	double bound = 1 / sqrt((double)in);

	for (int64_t i = 0; i < r * in; i++) {
		uint64_t bits = moe_mix(key + (uint64_t)i * 0x9e3779b97f4a7c15ull);

		a[i] = (float)(((double)(bits >> 11) * 0x1p-53 * 2 - 1) * bound);
	}
}
