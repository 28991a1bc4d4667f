/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/base.h"

#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define ERROR_TEXT_SIZE 1024

static _Thread_local char last_error[ERROR_TEXT_SIZE];
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static moe_log_fn log_fn;
static void *log_user;
static atomic_llong alloc_countdown = -1;

static const char *const status_texts[MOE_STATUS_COUNT] = {
	[MOE_OK] = "ok",
	[MOE_ERR_ARG] = "invalid argument",
	[MOE_ERR_NOMEM] = "out of memory",
	[MOE_ERR_NOFIT] = "does not fit in memory",
	[MOE_ERR_IO] = "input/output error",
	[MOE_ERR_FORMAT] = "malformed file",
	[MOE_ERR_UNSUPPORTED] = "not supported",
	[MOE_ERR_CONFIG] = "engine configuration cannot be met",
	[MOE_ERR_BUSY] = "object is busy",
	[MOE_ERR_STATE] = "call not allowed in this state",
	[MOE_ERR_RUNTIME] = "task runtime error",
	[MOE_ERR_FORKED] = "not usable after fork",
	[MOE_ERR_DIVERGED] = "training diverged",
	[MOE_ERR_INTERRUPTED] = "interrupted",
};

const char *moe_status_text(enum moe_status status)
{
	if ((unsigned)status >= MOE_STATUS_COUNT)
		return "unknown status";
	return status_texts[status];
}

const char *moe_last_error(void)
{
	return last_error;
}

const char *moe_version(void)
{
	return MOE_VERSION_STRING;
}

enum moe_status moe_fail(enum moe_status status, const char *fmt, ...)
{
	char text[ERROR_TEXT_SIZE]; /* fmt's arguments may point into last_error */
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof text, fmt, ap);
	va_end(ap);
	memcpy(last_error, text, sizeof text);
	return status;
}

enum moe_status moe_fail_in(enum moe_status status, const char *fmt, ...)
{
	char text[ERROR_TEXT_SIZE];
	va_list ap;
	size_t n;

	va_start(ap, fmt);
	vsnprintf(text, sizeof text, fmt, ap);
	va_end(ap);
	n = strlen(text);
	snprintf(text + n, sizeof text - n, ": %.*s", (int)(sizeof text - n) - 3, last_error);
	memcpy(last_error, text, sizeof text);
	return status;
}

void moe_log_set(moe_log_fn fn, void *user)
{
	pthread_mutex_lock(&log_lock);
	log_fn = fn;
	log_user = user;
	pthread_mutex_unlock(&log_lock);
}

void moe_log(enum moe_log_level level, const char *fmt, ...)
{
	char text[ERROR_TEXT_SIZE];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof text, fmt, ap);
	va_end(ap);
	pthread_mutex_lock(&log_lock);
	if (log_fn)
		log_fn(level, text, log_user);
	pthread_mutex_unlock(&log_lock);
}

void moe_alloc_fail_after(int64_t n)
{
	atomic_store(&alloc_countdown, n);
}

static bool alloc_should_fail(void)
{
	if (atomic_load_explicit(&alloc_countdown, memory_order_relaxed) < 0)
		return false;
	return atomic_fetch_sub(&alloc_countdown, 1) == 0;
}

void *moe_realloc(void *old, size_t count, size_t size)
{
	size_t bytes;

	if (__builtin_mul_overflow(count, size, &bytes) || alloc_should_fail())
		return NULL;
	return realloc(old, bytes ? bytes : 1);
}

void *moe_alloc(size_t count, size_t size)
{
	return moe_realloc(NULL, count, size);
}

void *moe_calloc(size_t count, size_t size)
{
	if (alloc_should_fail())
		return NULL;
	return calloc(count ? count : 1, size ? size : 1);
}

char *moe_strdup(const char *s)
{
	size_t n = strlen(s) + 1;
	char *copy = moe_alloc(n, 1);

	if (copy)
		memcpy(copy, s, n);
	return copy;
}

char *moe_format(const char *fmt, ...)
{
	va_list ap;
	char *text = NULL;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(NULL, 0, fmt, ap);
	va_end(ap);
	if (n < 0)
		return NULL;
	text = moe_alloc((size_t)n + 1, 1);
	if (!text)
		return NULL;
	va_start(ap, fmt);
	vsnprintf(text, (size_t)n + 1, fmt, ap);
	va_end(ap);
	return text;
}

void moe_free(void *p)
{
	free(p);
}

static const struct {
	const char *name;
	size_t size;
} dtypes[MOE_DTYPE_COUNT] = {
	[MOE_F32] = { "F32", 4 },	  [MOE_BF16] = { "BF16", 2 },
	[MOE_F16] = { "F16", 2 },	  [MOE_F64] = { "F64", 8 },
	[MOE_I64] = { "I64", 8 },	  [MOE_I32] = { "I32", 4 },
	[MOE_I16] = { "I16", 2 },	  [MOE_I8] = { "I8", 1 },
	[MOE_U8] = { "U8", 1 },		  [MOE_BOOL] = { "BOOL", 1 },
	[MOE_F8_E4M3] = { "F8_E4M3", 1 }, [MOE_F8_E5M2] = { "F8_E5M2", 1 },
};

size_t moe_dtype_size(enum moe_dtype dtype)
{
	return (unsigned)dtype < MOE_DTYPE_COUNT ? dtypes[dtype].size : 0;
}

const char *moe_dtype_name(enum moe_dtype dtype)
{
	return (unsigned)dtype < MOE_DTYPE_COUNT ? dtypes[dtype].name : "?";
}

int64_t moe_shape_count(int ndim, const int64_t *shape)
{
	int64_t n = 1;

	for (int i = 0; i < ndim; i++)
		if (shape[i] < 0 || __builtin_mul_overflow(n, shape[i], &n))
			return -1;
	return n;
}

char *moe_shape_text(int ndim, const int64_t *shape, char *buf, size_t size)
{
	size_t at = 0;

	if (!size)
		return buf;
	buf[0] = 0;
	for (int i = 0; i < ndim && at < size; i++)
		at += (size_t)snprintf(buf + at, size - at, "%s%lld", i ? ", " : "[",
				       (long long)shape[i]);
	if (at < size)
		snprintf(buf + at, size - at, ndim ? "]" : "[]");
	return buf;
}

double moe_now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

float moe_f16_to_f32(uint16_t v)
{
	uint32_t sign = (uint32_t)(v & 0x8000) << 16, exp = v >> 10 & 31, man = v & 1023, bits;
	float f;

	if (exp == 0) { /* zero or subnormal: man * 2^-24 is exact in f32 */
		f = (float)man * 0x1p-24f;
		memcpy(&bits, &f, sizeof bits);
		bits |= sign;
	} else if (exp == 31) {
		bits = sign | 0x7f800000u | man << 13;
	} else {
		bits = sign | (exp + 112) << 23 | man << 13;
	}
	memcpy(&f, &bits, sizeof f);
	return f;
}

uint16_t moe_f32_to_f16(float f)
{
	uint32_t bits, sign, abs;

	memcpy(&bits, &f, sizeof bits);
	sign = bits >> 16 & 0x8000;
	abs = bits & 0x7fffffffu;
	if (abs > 0x7f800000u)
		return (uint16_t)(sign | 0x7e00);
	if (abs >= 0x477ff000u) /* 65520 and above round to infinity */
		return (uint16_t)(sign | 0x7c00);
	if (abs < 0x38800000u) { /* below 2^-14: adding 0.5 leaves the rounded subnormal below */
		float magic = 0.5f, a;
		uint32_t r;

		memcpy(&a, &abs, sizeof a);
		a += magic;
		memcpy(&r, &a, sizeof r);
		return (uint16_t)(sign | (r - 0x3f000000u));
	}
	abs += 0xfff + (abs >> 13 & 1);
	return (uint16_t)(sign | (abs - 0x38000000u) >> 13);
}

bool moe_to_f32(float *dst, const void *src, enum moe_dtype dtype, size_t n)
{
	/* memcpy per element: sources may be unaligned (safetensors promises no alignment) */
	const unsigned char *p = src;

	switch (dtype) {
	case MOE_F32:
		memcpy(dst, src, n * sizeof *dst);
		return true;
	case MOE_BF16:
		for (size_t i = 0; i < n; i++) {
			uint16_t v;
			memcpy(&v, p + 2 * i, 2);
			dst[i] = moe_bf16_to_f32(v);
		}
		return true;
	case MOE_F16:
		for (size_t i = 0; i < n; i++) {
			uint16_t v;
			memcpy(&v, p + 2 * i, 2);
			dst[i] = moe_f16_to_f32(v);
		}
		return true;
	case MOE_F64:
		for (size_t i = 0; i < n; i++) {
			double v;
			memcpy(&v, p + 8 * i, 8);
			dst[i] = (float)v;
		}
		return true;
	default:
		return false;
	}
}

bool moe_from_f32(void *dst, enum moe_dtype dtype, const float *src, size_t n)
{
	unsigned char *p = dst;

	switch (dtype) {
	case MOE_F32:
		memcpy(dst, src, n * sizeof *src);
		return true;
	case MOE_BF16:
		for (size_t i = 0; i < n; i++) {
			uint16_t v = moe_f32_to_bf16(src[i]);
			memcpy(p + 2 * i, &v, 2);
		}
		return true;
	case MOE_F16:
		for (size_t i = 0; i < n; i++) {
			uint16_t v = moe_f32_to_f16(src[i]);
			memcpy(p + 2 * i, &v, 2);
		}
		return true;
	case MOE_F64:
		for (size_t i = 0; i < n; i++) {
			double v = src[i];
			memcpy(p + 8 * i, &v, 8);
		}
		return true;
	default:
		return false;
	}
}

int64_t moe_first_beyond(enum moe_dtype dtype, const float *x, size_t n)
{
	/* half a step above the largest number, which goes to the even one: infinity */
	float limit = dtype == MOE_F16 ? 65520.0f : dtype == MOE_BF16 ? 0x1.ffp127f : INFINITY;

	for (size_t i = 0; i < n && limit < INFINITY; i++)
		if (fabsf(x[i]) >= limit && isfinite(x[i]))
			return (int64_t)i;
	return -1;
}
