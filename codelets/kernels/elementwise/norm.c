/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/elementwise/vecmath.h"

/* 1 / sqrt(mean(x^2) + eps) */
static double inverse_rms(int n, const float *x, float eps)
{
	return 1.0 / sqrt(ref_dot(n, x, x) / n + (double)eps);
}

void OWN(rmsnorm)(int m, int n, const float *x, int64_t ldx, const float *w, float eps, float *y,
		  int64_t ldy)
{
	for (int64_t i = 0; i < m; i++) {
		const float *row = x + i * ldx;
		float *out = y + i * ldy, inv = (float)inverse_rms(n, row, eps);

		for (int j = 0; j < n; j++)
			out[j] = row[j] * inv * w[j];
	}
}

static double dot3(int n, const float *a, const float *b, const float *c)
{
	double lane[REF_LANES] = { 0 };
	int i = 0;

	for (; i + REF_LANES <= n; i += REF_LANES)
		for (int l = 0; l < REF_LANES; l++)
			lane[l] += (double)(a[i + l] * b[i + l]) * (double)c[i + l];
	for (; i < n; i++)
		lane[i % REF_LANES] += (double)(a[i] * b[i]) * (double)c[i];
	return ref_sum_lanes(lane);
}

/* With s = inverse_rms(x) and g = w dy: dx = s g - x s^3 / n sum(g x) */
void OWN(rmsnorm_bwd)(int m, int n, const float *x, int64_t ldx, const float *w, float eps,
		      const float *dy, int64_t lddy, float *dx, int64_t lddx, bool accumulate)
{
	for (int64_t i = 0; i < m; i++) {
		const float *row = x + i * ldx, *grad = dy + i * lddy;
		float *out = dx + i * lddx;
		double s = inverse_rms(n, row, eps);
		float inv = (float)s, back = (float)(s * s * s / n * dot3(n, w, grad, row));

		if (accumulate)
			for (int j = 0; j < n; j++)
				out[j] += inv * (w[j] * grad[j]) - back * row[j];
		else
			for (int j = 0; j < n; j++)
				out[j] = inv * (w[j] * grad[j]) - back * row[j];
	}
}
