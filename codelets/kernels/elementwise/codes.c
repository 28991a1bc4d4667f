/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What quantisers do for every weight (moe_coders, codelets/format.h), without branches and without calls, so that the
 * compiler has vectors for it. Numbers are rounded by adding 1.5 x 2^23: to the nearest integer, ties to even.
 */
#include "codelets/kernels/elementwise/elementwise.h"
#include "codelets/kernels/elementwise/vecmath.h"

#define LANES 16
#define MAGIC 0x1.8p23f
#define MAGIC_BITS 0x4b400000
#define MAGNITUDE 0x7fffffffu

static inline uint32_t bits_of(float x)
{
	uint32_t bits;

	memcpy(&bits, &x, sizeof bits);
	return bits;
}

/* x: at most 2^22 in magnitude */
static inline int32_t rounded(float x)
{
	return (int32_t)(bits_of(x + MAGIC) - MAGIC_BITS);
}

uint32_t OWN(largest)(int64_t n, int64_t k, const float *x, int64_t ld)
{
	uint32_t most = 0;

	for (int64_t i = 0; i < n; i++, x += ld)
		for (int64_t j = 0; j < k; j++) {
			uint32_t bits = bits_of(x[j]) & MAGNITUDE;

			most = bits > most ? bits : most;
		}
	return most;
}

void OWN(range)(int64_t k, const float *x, float *least, float *largest)
{
	float low[LANES] = { 0 }, high[LANES] = { 0 };
	int64_t at = 0;

	for (; at + LANES <= k; at += LANES)
		for (int l = 0; l < LANES; l++) {
			low[l] = x[at + l] < low[l] ? x[at + l] : low[l];
			high[l] = x[at + l] > high[l] ? x[at + l] : high[l];
		}
	for (int l = 0; at < k; at++, l++) {
		low[l] = x[at] < low[l] ? x[at] : low[l];
		high[l] = x[at] > high[l] ? x[at] : high[l];
	}
	*least = *largest = 0;
	for (int l = 0; l < LANES; l++) {
		*least = low[l] < *least ? low[l] : *least;
		*largest = high[l] > *largest ? high[l] : *largest;
	}
}

void OWN(integers)(int64_t k, const float *restrict x, float scale, int least, int most, int add, uint8_t *restrict codes)
{
	float low = (float)least, high = (float)most;

	for (int64_t j = 0; j < k; j++) {
		float v = x[j] / scale;

		v = v < low ? low : v;
		v = v > high ? high : v;
		codes[j] = (uint8_t)(rounded(v) + add);
	}
}

/* Normal numbers: three bits of mantissa stay of 23, a carry moves on to the exponent. Below 2^-6: steps of 2^-9. */
void OWN(e4m3)(int64_t k, const float *restrict x, float scale, uint8_t *restrict codes)
{
	for (int64_t j = 0; j < k; j++) {
		float v = x[j] / scale;
		uint32_t sign = bits_of(v) >> 24 & 0x80, a = bits_of(v) & MAGNITUDE, normal, small;
		float low;

		a = a > 0x43e00000u ? 0x43e00000u : a; /* 448 */
		normal = ((a + 0x7ffff + (a >> 20 & 1)) >> 20) - 960;
		low = ref_bits_float(a > 0x3c800000u ? 0x3c800000u : a);
		small = (uint32_t)rounded(low * 512);
		codes[j] = (uint8_t)(sign | (a < 0x3c800000u ? small : normal));
	}
}

/* Steps of .5 up to 2, of 1 up to 4, of 2 up to 6. */
void OWN(e2m1)(int64_t k, const float *restrict x, float scale, uint8_t *restrict codes)
{
	for (int64_t j = 0; j < k; j++) {
		float v = x[j] / scale;
		uint32_t sign = bits_of(v) >> 28 & 8, bits = bits_of(v) & MAGNITUDE;
		float a = ref_bits_float(bits > 0x40c00000u ? 0x40c00000u : bits);
		float steps = a <= 2 ? 2.0f : a <= 4 ? 1.0f : .5f;
		int32_t before = a <= 2 ? 0 : a <= 4 ? 2 : 4;

		codes[j] = (uint8_t)(sign | (uint32_t)(rounded(a * steps) + before));
	}
}
