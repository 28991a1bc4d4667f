/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/fixture.h"

#include "codelets/format.h"
#include "codelets/kernels/kernels.h"
#include "engine/base.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

const struct tolerance fixture_exact = { 2e-6, 2e-6, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5 };
/*
 * AdamW's first step is the sign of a gradient: of an error of .004 one element in 700 flips, which
 * alone makes .08; the fifth step has the bound of training.
 */
const struct tolerance fixture_rounded = { 2e-6, 4e-3, 5e-3, 3e-3, 5e-3, 1e-3, 1.5e-1, 5e-2 };

const struct tolerance *fixture_tolerance(void)
{
	return moe_kernels()->tiles ? &fixture_rounded : &fixture_exact;
}
const char *const fixture_lora_names[6] = { "gate_lora_a", "up_lora_a", "down_lora_a",
					    "gate_lora_b", "up_lora_b", "down_lora_b" };

void fixture_fail(struct fixture *g, const char *fmt, ...)
{
	va_list ap;

	g->ok = false;
	g->r->failed++;
	fprintf(stderr, "%s: ", g->path);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fprintf(stderr, "\n");
}

bool fixture_call(struct fixture *g, enum moe_status st)
{
	if (st != MOE_OK)
		fixture_fail(g, "%s (%s)", moe_last_error(), moe_status_text(st));
	return st == MOE_OK;
}

const struct moe_st_tensor *fixture_find(struct fixture *g, const char *name)
{
	for (size_t i = 0; i < moe_safetensors_count(g->st); i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(g->st, i);

		if (strcmp(t->name, name))
			continue;
		if (i < FIXTURE_MAX_KEYS)
			g->used[i] = true;
		return t;
	}
	return NULL;
}

int64_t fixture_count(const struct moe_st_tensor *t)
{
	return moe_shape_count(t->ndim, t->shape);
}

double *fixture_doubles(struct fixture *g, const char *name, int64_t *n)
{
	const struct moe_st_tensor *t = fixture_find(g, name);
	double *d;

	if (!t)
		return NULL;
	*n = fixture_count(t);
	d = malloc((size_t)(*n + 1) * sizeof *d);
	for (int64_t i = 0; i < *n; i++) {
		const char *p = (const char *)t->data + (size_t)i * moe_dtype_size(t->dtype);
		int32_t i32;
		int64_t i64;
		float f;

		if (t->dtype == MOE_F64)
			memcpy(&d[i], p, sizeof d[i]);
		else if (t->dtype == MOE_I32) {
			memcpy(&i32, p, sizeof i32);
			d[i] = i32;
		} else if (t->dtype == MOE_I64) {
			memcpy(&i64, p, sizeof i64);
			d[i] = (double)i64;
		} else {
			moe_to_f32(&f, p, t->dtype, 1);
			d[i] = f;
		}
	}
	return d;
}

double fixture_norm(const double *a, int64_t n)
{
	double s = 0;

	for (int64_t i = 0; i < n; i++)
		s += a[i] * a[i];
	return sqrt(s);
}

static void remember(struct fixture *g, const double *a, int64_t n)
{
	struct golden_result *r = g->r;

	r->values = realloc(r->values, (size_t)(r->n_values + n + 1) * sizeof *r->values);
	memcpy(r->values + r->n_values, a, (size_t)n * sizeof *a);
	r->n_values += n;
	for (int64_t i = 0; i < n; i++) {
		uint64_t bits;

		memcpy(&bits, &a[i], sizeof bits);
		r->bits = (r->bits ^ bits) * 0x100000001b3ull;
	}
}

/* Rows of x in 8 bits: 2.5 times the tolerance is allowed. */
static bool int8_compute(const struct fixture *g)
{
	const struct moe_format *f = g->format ? moe_format_find(g->format) : NULL;

	return f && moe_format_compute(f) == MOE_COMPUTE_INT8;
}

void fixture_compare_values(struct fixture *g, const char *name, const double *got,
			    const double *ref, int64_t n, double tol)
{
	double diff = 0, base = fixture_norm(ref, n), err;
	bool good;

	for (int64_t i = 0; i < n; i++)
		diff += (got[i] - ref[i]) * (got[i] - ref[i]);
	diff = sqrt(diff);
	if (base <= 1e-13 * g->largest_grad)
		base = 0; /* what f64 rounding leaves of an exact zero */
	err = base > 0 ? diff / base : diff;
	if (int8_compute(g))
		tol *= 2.5;
	good = base > 0 ? err <= tol : diff <= 1e-6 * g->largest_grad || diff == 0;
	remember(g, got, n);
	g->r->compared++;
	if (g->o->print)
		printf("  %-28s %s %.2e%s  %s\n", name, base > 0 ? "relative L2" : "norm       ",
		       err, base > 0 ? "" : " (reference is 0)", good ? "ok" : "FAILED");
	if (!good)
		fixture_fail(g, "%s: %s error %.3e, %.0e allowed", name,
			     base > 0 ? "relative L2" : "absolute", err,
			     base > 0 ? tol : 1e-6 * g->largest_grad);
}

void fixture_compare(struct fixture *g, const char *name, const double *got, int64_t n, double tol)
{
	int64_t m = 0;
	double *ref = fixture_doubles(g, name, &m);

	if (!ref)
		return;
	if (m != n)
		fixture_fail(g, "%s has %lld elements, %lld computed", name, (long long)m,
			     (long long)n);
	else
		fixture_compare_values(g, name, got, ref, n, tol);
	free(ref);
}

struct moe_array fixture_array(void *data, enum moe_dtype dtype, int ndim, const int64_t *shape)
{
	struct moe_array a = { .data = data, .dtype = dtype, .ndim = ndim };

	memcpy(a.shape, shape, (size_t)ndim * sizeof *shape);
	return a;
}

struct moe_array fixture_matrix(void *data, enum moe_dtype dtype, int64_t rows, int64_t cols)
{
	return fixture_array(data, dtype, 2, (int64_t[]){ rows, cols });
}

bool fixture_load(struct fixture *g, const char *name, struct moe_array *a)
{
	const struct moe_st_tensor *t = fixture_find(g, name);

	if (!t)
		return false;
	*a = fixture_array(malloc(t->bytes + 1), t->dtype, t->ndim, t->shape);
	memcpy(a->data, t->data, t->bytes);
	return true;
}
