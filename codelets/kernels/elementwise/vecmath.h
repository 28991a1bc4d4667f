/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inner loops shared by the reference kernels: exp, and sums whose order is fixed by lanes written
 * out in the source, so that the compiler may vectorise them without -ffast-math.
 */
#ifndef MOE_CODELETS_KERNELS_REF_VECMATH_H
#define MOE_CODELETS_KERNELS_REF_VECMATH_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define REF_LANES 8

static inline float ref_bits_float(uint32_t bits)
{
	float f;

	memcpy(&f, &bits, sizeof f);
	return f;
}

/*
 * e^x to 2 ulp, without branches. x = n ln 2 + r; polynomial and split of ln 2 from Cephes' expf.
 * The comparisons are written so that NaN passes; results below 2^-126 are 0 (a subnormal weight is
 * worth nothing in a softmax and slow on some CPUs); 2^n is applied in two halves as n may be 128.
 */
static inline float ref_exp(float x)
{
	const uint32_t magic_bits = 0x4b400000; /* 1.5 * 2^23: adding it rounds to an integer */
	const float magic = 0x1.8p23f;
	float c, t, n, r, p, e;
	int32_t ni, half;

	c = x > 89.0f ? 89.0f : x;
	c = c < -88.0f ? -88.0f : c;
	t = c * 0x1.715476p+0f + magic;
	n = t - magic;
	r = c - n * 0.693359375f + n * 2.12194440e-4f;
	p = 1.9875691500e-4f;
	p = p * r + 1.3981999507e-3f;
	p = p * r + 8.3334519073e-3f;
	p = p * r + 4.1665795894e-2f;
	p = p * r + 1.6666665459e-1f;
	p = p * r + 5.0000001201e-1f;
	p = p * (r * r) + r + 1.0f;
	uint32_t bits;
	memcpy(&bits, &t, sizeof bits);
	ni = (int32_t)(bits - magic_bits);
	half = ni >> 1;
	e = p * ref_bits_float(((uint32_t)half + 127) << 23) *
	    ref_bits_float(((uint32_t)ni - (uint32_t)half + 127) << 23);
	return x < -87.33654f ? 0.0f : e;
}

/* Pairwise, always in the same order. */
static inline double ref_sum_lanes(const double lane[REF_LANES])
{
	return ((lane[0] + lane[4]) + (lane[2] + lane[6])) +
	       ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

static inline double ref_dot(int64_t n, const float *restrict a, const float *restrict b)
{
	double lane[REF_LANES] = { 0 };
	int64_t i = 0;

	for (; i + REF_LANES <= n; i += REF_LANES)
		for (int l = 0; l < REF_LANES; l++)
			lane[l] += (double)a[i + l] * (double)b[i + l];
	for (; i < n; i++)
		lane[i % REF_LANES] += (double)a[i] * (double)b[i];
	return ref_sum_lanes(lane);
}

#define REF_MAX_LANES 64

/*
 * Largest element, -inf for n = 0; NaN elements are passed over (their exp shows them). Unrolled,
 * the loops over lanes would become scalar code.
 */
static inline float ref_max(int64_t n, const float *x)
{
	float lane[REF_MAX_LANES], max = -INFINITY;
	int64_t i = 0;

	for (int l = 0; l < REF_MAX_LANES; l++)
		lane[l] = -INFINITY;
	for (; i + REF_MAX_LANES <= n; i += REF_MAX_LANES)
#pragma GCC unroll 1
		for (int l = 0; l < REF_MAX_LANES; l++)
			lane[l] = x[i + l] > lane[l] ? x[i + l] : lane[l];
	for (; i < n; i++)
		lane[i % REF_MAX_LANES] = x[i] > lane[i % REF_MAX_LANES] ? x[i] : lane[i % REF_MAX_LANES];
	for (int half = REF_MAX_LANES / 2; half > 2; half /= 2)
#pragma GCC unroll 1
		for (int l = 0; l < half; l++)
			lane[l] = lane[l] > lane[l + half] ? lane[l] : lane[l + half];
	for (int l = 0; l < 4; l++)
		max = lane[l] > max ? lane[l] : max;
	return max;
}

/*
 * What to subtract from scores whose maximum is max: 0 where every score is -inf, so that their
 * exponentials are 0 and not the NaN of -inf - -inf.
 */
static inline float ref_softmax_base(float max)
{
	return max == -INFINITY ? 0.0f : max;
}

#endif
