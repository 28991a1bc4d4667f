/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lora_grad: LoRA gradients of the H side (A of gate and up, B of down) of one group, from the thin
 * projections of all parts. Off the critical path.
 */
#ifndef MOE_CODELETS_LORA_GRAD_H
#define MOE_CODELETS_LORA_GRAD_H

#include "codelets/expert_args.h"

extern struct moe_codelet moe_cl_lora_grad;
/* Bytes of scratch for at most m rows in an expert. */
size_t moe_lora_grad_scratch(const struct moe_experts *l, int m);

#endif
