/* SPDX-License-Identifier: Apache-2.0 */
/* ffn_grad: base weight gradients of a dense SwiGLU over all tokens; residual is grad_out. */
#ifndef MOE_CODELETS_FFN_GRAD_H
#define MOE_CODELETS_FFN_GRAD_H

#include "codelets/token_args.h"

extern struct moe_codelet moe_cl_ffn_grad;

#endif
