/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/token_args.h"
#include "codelets/vector_grad.h"

void moe_norm_bwd_apply(const struct moe_norm_bwd *n, int t0, int t1, int H, const float *dx, float *out)
{
	size_t at = (size_t)t0 * (size_t)H, count = (size_t)(t1 - t0) * (size_t)H;

	if (n->part)
		moe_norm_part(t1 - t0, H, n->x + at, H, n->eps, dx, H, false,
			      n->part + (size_t)(t0 / MOE_TOKEN_BLOCK) * (size_t)H);
	if (n->residual && out != n->residual)
		memcpy(out + at, n->residual + at, count * sizeof *out);
	if (n->w)
		moe_kernels()->rmsnorm_bwd(t1 - t0, H, n->x + at, H, n->w, n->eps, dx, H, out + at, H,
					   n->residual != NULL);
	else if (n->residual)
		for (size_t i = 0; i < count; i++)
			out[at + i] += dx[i];
	else
		memcpy(out + at, dx, count * sizeof *out);
}
