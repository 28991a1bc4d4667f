/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/elementwise/vecmath.h"

double OWN(sum_squares)(int64_t n, const float *g)
{
	return ref_dot(n, g, g);
}

/*
 * torch.optim.AdamW (_single_tensor_adamw). The coefficients are computed in double.
 */
void OWN(adamw)(int64_t n, float *restrict p, const float *restrict g, float *restrict m,
		float *restrict v, const struct moe_adamw *o)
{
	double b1 = o->beta1;
	double b2 = o->beta2;
	double lr = (double)o->lr, t = (double)o->step;
	float decay = (float)(1.0 - lr * o->weight_decay);
	float step = (float)(lr / (1.0 - pow(b1, t)));
	float inv_root = (float)(1.0 / sqrt(1.0 - pow(b2, t)));
	float keep2 = (float)b2, new1 = (float)(1.0 - b1), new2 = (float)(1.0 - b2);
	float scale = o->grad_scale, eps = (float)o->eps;

	for (int64_t i = 0; i < n; i++) {
		float grad = g[i] * scale;

		m[i] += (grad - m[i]) * new1;
		v[i] = v[i] * keep2 + grad * grad * new2;
		p[i] = p[i] * decay - step * m[i] / (sqrtf(v[i]) * inv_root + eps);
	}
}
