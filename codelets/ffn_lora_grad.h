/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ffn_lora_grad: LoRA gradients of one matrix of a dense SwiGLU over tokens 0..t1, after ffn_bwd; residual is
 * grad_out. Off the critical path.
 */
#ifndef MOE_CODELETS_FFN_LORA_GRAD_H
#define MOE_CODELETS_FFN_LORA_GRAD_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_ffn_lora_grad;
/* Bytes of its scratch: a token block of H, and the widest matrix's or the sigmoid gate's. */
size_t moe_ffn_lora_grad_scratch(const struct moe_ffn *f);

#endif
