/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every folder may use: status helpers, checked allocation, logging, dtype sizes, bfloat16.
 * Depends on nothing but the public header and libc.
 */
#ifndef MOE_ENGINE_BASE_H
#define MOE_ENGINE_BASE_H

#include "moesaic.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOE_TRY(expr)                                                                              \
	do {                                                                                       \
		enum moe_status moe_try_ = (expr);                                                 \
		if (moe_try_ != MOE_OK)                                                            \
			return moe_try_;                                                           \
	} while (0)
#define MOE_TRY_GOTO(expr, status, label)                                                          \
	do {                                                                                       \
		(status) = (expr);                                                                 \
		if ((status) != MOE_OK)                                                            \
			goto label;                                                                \
	} while (0)

#define MOE_ASSERT(cond) assert(cond)
#define MOE_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))
#define MOE_MIN(a, b) ((a) < (b) ? (a) : (b))
#define MOE_MAX(a, b) ((a) > (b) ? (a) : (b))
#define MOE_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Records the thread's error text (offending value, what to do) and returns status. */
enum moe_status moe_fail(enum moe_status status, const char *fmt, ...) MOE_PRINTF(2, 3);
/* Prefixes the thread's error text, e.g. with a file name; returns status. */
enum moe_status moe_fail_in(enum moe_status status, const char *fmt, ...) MOE_PRINTF(2, 3);
void moe_log(enum moe_log_level level, const char *fmt, ...) MOE_PRINTF(2, 3);

/*
 * Heap. moe_alloc/moe_calloc return NULL on failure or for a product that overflows, moe_calloc
 * zeroes; count 0 gives a unique non-NULL pointer. Release with moe_free (NULL accepted).
 * moe_alloc_fail_after(n) makes the n-th following allocation of the process fail (tests; -1 = off)
 * and every later one succeed again.
 */
void *moe_alloc(size_t count, size_t size);
void *moe_calloc(size_t count, size_t size);
void *moe_realloc(void *old, size_t count, size_t size);
char *moe_strdup(const char *s);
/* A freshly allocated formatted string, NULL without memory. */
char *moe_format(const char *fmt, ...) MOE_PRINTF(1, 2);
void moe_free(void *p);
void moe_alloc_fail_after(int64_t n);

size_t moe_dtype_size(enum moe_dtype dtype);
const char *moe_dtype_name(enum moe_dtype dtype);
/* Elements of a shape; -1 if a dimension is negative or the product overflows int64. */
int64_t moe_shape_count(int ndim, const int64_t *shape);
/* "[2, 3]" into buf, truncated to size; returns buf. */
char *moe_shape_text(int ndim, const int64_t *shape, char *buf, size_t size);

double moe_now(void); /* CLOCK_MONOTONIC, seconds */

/* splitmix64's finaliser (Steele, Lea, Flood 2014): neighbouring numbers become unlike ones, the same everywhere. */
static inline uint64_t moe_mix(uint64_t z)
{
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ z >> 27) * 0x94d049bb133111ebull;
	return z ^ z >> 31;
}

static inline float moe_bf16_to_f32(uint16_t v)
{
	uint32_t bits = (uint32_t)v << 16;
	float f;
	memcpy(&f, &bits, sizeof f);
	return f;
}

/* Round to nearest even; NaN stays NaN. */
static inline uint16_t moe_f32_to_bf16(float f)
{
	uint32_t bits;
	memcpy(&bits, &f, sizeof bits);
	if ((bits & 0x7fffffffu) > 0x7f800000u)
		return (uint16_t)(bits >> 16 | 0x40);
	return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float moe_f16_to_f32(uint16_t v);
uint16_t moe_f32_to_f16(float f);

/* dst[i] = src[i] for n contiguous elements; src F32, BF16, F16 or F64. false: another dtype. */
bool moe_to_f32(float *dst, const void *src, enum moe_dtype dtype, size_t n);
/* The reverse, rounding to nearest even. */
bool moe_from_f32(void *dst, enum moe_dtype dtype, const float *src, size_t n);
/* The first of n values that is finite and rounds to infinity in a dtype of moe_from_f32; -1: none does. */
int64_t moe_first_beyond(enum moe_dtype dtype, const float *x, size_t n);

#endif
