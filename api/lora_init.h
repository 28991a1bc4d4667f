/* SPDX-License-Identifier: Apache-2.0 */
/* Initial values of LoRA. */
#ifndef MOE_API_LORA_INIT_H
#define MOE_API_LORA_INIT_H

#include "engine/base.h"

/*
 * A [r, in], uniform in +-1/sqrt(in), which is what PEFT's kaiming_uniform_(a = sqrt(5)) gives. Each element
 * depends on its own coordinates only, not on parts or order.
 */
void moe_lora_init_a(uint64_t seed, int layer, int target, int expert, int64_t r, int64_t in, float *a);

#endif
