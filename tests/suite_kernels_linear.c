/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dense layers of every supported kernel table against plain loops in double: packed weights, both directions, LoRA,
 * gradients, and concurrent callers.
 */
#include "tests/kernel_check.h"

#include <pthread.h>

const char moe_suite_name[] = "kernels_linear";

/* ---- weights ---- */

static void round_bf16(float *v, int64_t n)
{
	for (int64_t i = 0; i < n; i++) {
		uint16_t bits;

		moe_from_f32(&bits, MOE_BF16, &v[i], 1);
		v[i] = moe_bf16_to_f32(bits);
	}
}

/* A packed weight of random values; *held receives those that the table is to hold. */
static struct moe_weight random_weight(enum moe_dtype dtype, int64_t n, int64_t k,
				       enum moe_weight_use use, double **held)
{
	int64_t ld = k + 3;
	size_t size = moe_dtype_size(dtype);
	char *src = mem((size_t)(n * ld) * size + 1);
	float *values = randoms(n * ld, 1.0), *rounded = floats(n * ld);
	struct moe_weight W = { 0 };

	for (int64_t i = 0; i < n * ld; i += 7) /* subnormal halves */
		values[i] *= 0x1p-16f;
	CU_ASSERT(moe_from_f32(src + 1, dtype, values, (size_t)(n * ld))); /* unaligned */
	CU_ASSERT(moe_to_f32(rounded, src + 1, dtype, (size_t)(n * ld)));
	if (table_is_packed() && use == MOE_USE_GEMM)
		round_bf16(rounded, n * ld);
	*held = widen(rounded, n, k, ld);
	W.data = mem(K->weight_bytes(dtype, n, k, use));
	K->weight_pack(&W, src + 1, dtype, n, k, ld, use);
	CU_ASSERT(W.n == n && W.k == k);
	return W;
}

static const enum moe_dtype weight_dtypes[] = { MOE_F32, MOE_BF16, MOE_F16, MOE_F64 };

static void unpack_case(enum moe_dtype dtype, int64_t n, int64_t k, enum moe_weight_use use)
{
	int64_t n0 = n / 3;
	double *held;
	struct moe_weight W = random_weight(dtype, n, k, use, &held);
	float *out = floats((n - n0) * k);

	K->weight_unpack(&W, n0, n, out);
	check("unpack", (n - n0) * k, out, held + n0 * k, 0);
	release();
}

static void weight_cases(void)
{
	static const int64_t shapes[][2] = {
		{ 1, 1 }, { 3, 5 }, { 257, 33 }, { 300, 64 }, { 40, 530 }, { 0, 4 }
	};

	for (size_t d = 0; d < MOE_COUNT(weight_dtypes); d++)
		for (size_t s = 0; s < MOE_COUNT(shapes); s++) {
			unpack_case(weight_dtypes[d], shapes[s][0], shapes[s][1], MOE_USE_GEMM);
			unpack_case(weight_dtypes[d], shapes[s][0], shapes[s][1], MOE_USE_EXACT);
		}
	/* every half, infinities and NaN included; packed as an operand NaN stays some NaN */
	for (int use = 0; use < 2; use++) {
		uint16_t *all = mem(65536 * sizeof *all);
		float *got = floats(65536);
		struct moe_weight W = { .data = mem(K->weight_bytes(MOE_F16, 256, 256, use)) };
		int wrong = 0;

		for (int i = 0; i < 65536; i++)
			all[i] = (uint16_t)i;
		K->weight_pack(&W, all, MOE_F16, 256, 256, 256, use);
		K->weight_unpack(&W, 0, 256, got);
		for (int i = 0; i < 65536; i++) {
			float want = moe_f16_to_f32((uint16_t)i);

			if (table_is_packed() && use == MOE_USE_GEMM)
				round_bf16(&want, 1);
			wrong += memcmp(&want, &got[i], sizeof want) != 0 &&
				 !(use == MOE_USE_GEMM && isnan(want) && isnan(got[i]));
		}
		CU_ASSERT_EQUAL(wrong, 0);
		release();
	}
}

static void test_weights(void)
{
	check_tables(weight_cases);
}

/* ---- dense layers ---- */

struct dense {
	int m, r;
	int64_t n, k, ldx, ldy;
	double *w, *a, *b; /* [n, k], [r, k], [n, r] as the table holds them */
	double tolerance;
	struct moe_weight W;
	struct moe_lora lora;
	float *x, *dy, *bias;
};

static const struct moe_lora *pair(const struct dense *c)
{
	return c->r ? &c->lora : NULL;
}

/*
 * A and scale B are operands too: rounded where weights are. x and dy are representable, so that a table of
 * bf16 operands rounds nothing but u = x A^T and z = dy B on the way, or (plain) are not.
 */
static struct dense dense_case(enum moe_dtype dtype, int m, int64_t n, int64_t k, int r,
			       enum moe_weight_use use, bool plain)
{
	struct dense c = { .m = m, .r = r, .n = n, .k = k, .ldx = k + 5, .ldy = n + 2 };
	bool exact = !operands_rounded || use == MOE_USE_EXACT;
	float *a, *b;

	c.W = random_weight(dtype, n, k, use, &c.w);
	c.lora = (struct moe_lora){ .a = randoms(r * k, 1.0), .b = randoms(n * r, 1.0), .r = r, .scale = 0.75f };
	c.x = randoms(m * c.ldx, 1.0);
	c.dy = randoms(m * c.ldy, 1.0);
	c.bias = randoms(n, 1.0);
	a = copy(c.lora.a, r * k);
	b = copy(c.lora.b, n * r);
	for (int64_t i = 0; i < n * r; i++)
		b[i] *= c.lora.scale;
	if (table_is_packed() && use == MOE_USE_GEMM) {
		round_bf16(a, r * k);
		round_bf16(b, n * r);
	}
	if (!plain) {
		round_bf16(c.x, m * c.ldx);
		round_bf16(c.dy, m * c.ldy);
	}
	c.a = widen(a, r, k, k);
	c.b = widen(b, n, r, r);
	for (int64_t i = 0; i < n * r; i++)
		c.b[i] /= (double)c.lora.scale;
	c.tolerance = exact || (!plain && !r) ? F32_TOLERANCE : BF16_TOLERANCE;
	return c;
}

/* W + scale B A, what the layer multiplies by */
static double *effective_weight(const struct dense *c)
{
	double *w = doubles(c->n * c->k);

	for (int64_t i = 0; i < c->n; i++)
		for (int64_t j = 0; j < c->k; j++) {
			double sum = 0;

			for (int s = 0; s < c->r; s++)
				sum += c->b[i * c->r + s] * c->a[s * c->k + j];
			w[i * c->k + j] = c->w[i * c->k + j] + (double)c->lora.scale * sum;
		}
	return w;
}

/* out[m, n] += scale * sum over k of a(i, l) b(l, j), by row and column strides */
static void multiply(int64_t m, int64_t n, int64_t k, double scale, const float *a, int64_t ar,
		     int64_t ac, const double *b, int64_t br, int64_t bc, double *out)
{
	for (int64_t i = 0; i < m; i++)
		for (int64_t j = 0; j < n; j++) {
			double sum = 0;

			for (int64_t l = 0; l < k; l++)
				sum += (double)a[i * ar + l * ac] * b[l * br + j * bc];
			out[i * n + j] += scale * sum;
		}
}

static void forward_case(const struct dense *c, const double *w, bool bias)
{
	void *scratch = mem(K->linear_scratch(c->m, c->n, c->k, c->r));
	float *y = floats(c->m * c->ldy), *before = copy(y, c->m * c->ldy);
	float *sliced = copy(y, c->m * c->ldy), *b = bias ? c->bias : NULL;
	double *want = doubles(c->m * c->n);

	K->linear(c->m, &c->W, 0, c->n, c->x, c->ldx, b, pair(c), y, c->ldy, scratch);
	multiply(c->m, c->n, c->k, 1, c->x, c->ldx, 1, w, 1, c->k, want);
	for (int64_t i = 0; i < c->m * c->n; i++)
		want[i] += bias ? (double)c->bias[i % c->n] : 0;
	check_rows("linear", c->m, c->n, y, c->ldy, want, c->tolerance);
	for (int64_t i = 0; i < c->m; i++) /* beyond the row's end */
		check_same("linear's padding", y + i * c->ldy + c->n, before + i * c->ldy + c->n,
			   (size_t)(c->ldy - c->n) * sizeof *y);
	for (int64_t n0 = 0; n0 < c->n; n0 += MOE_CHUNK) {
		int64_t n1 = MOE_MIN(n0 + MOE_CHUNK, c->n);

		K->linear(c->m, &c->W, n0, n1, c->x, c->ldx, b, pair(c), sliced + n0, c->ldy,
			  scratch);
	}
	check_same("sliced linear", y, sliced, (size_t)(c->m * c->ldy) * sizeof *y);
}

static void backward_case(const struct dense *c, const double *w, bool accumulate)
{
	void *scratch = mem(K->linear_scratch(c->m, c->n, c->k, c->r));
	float *dx = randoms(c->m * c->ldx, 1.0);
	double *want = widen(dx, c->m, c->k, c->ldx);

	if (!accumulate) {
		memset(want, 0, (size_t)(c->m * c->k) * sizeof *want);
		memset(dx, 0xff, (size_t)(c->m * c->ldx) * sizeof *dx);
	}
	multiply(c->m, c->k, c->n, 1, c->dy, c->ldy, 1, w, c->k, 1, want);
	K->linear_bwd(c->m, &c->W, c->dy, c->ldy, pair(c), dx, c->ldx, accumulate, scratch);
	check_rows("linear_bwd", c->m, c->k, dx, c->ldx, want, c->tolerance);
}

/* With y = x (W + s B A)^T and loss sum(dy y): dW = dy^T x, dA = s B^T dW, dB = s dW A^T */
static void gradient_case(const struct dense *c)
{
	void *scratch = mem(K->linear_scratch(c->m, c->n, c->k, c->r));
	float *g = randoms(c->n * c->k, 1.0), *ga = randoms(c->r * c->k, 1.0);
	float *gb = randoms(c->n * c->r, 1.0), *exact;
	double *dw = doubles(c->n * c->k), *x = widen(c->x, c->m, c->k, c->ldx);
	double *want = widen(g, c->n, c->k, c->k), *wa, *wb;

	multiply(c->n, c->k, c->m, 1, c->dy, 1, c->ldy, x, c->k, 1, dw);
	for (int64_t i = 0; i < c->n * c->k; i++)
		want[i] += dw[i];
	exact = memcpy(mem((size_t)(c->n * c->k) * sizeof *exact), g, (size_t)(c->n * c->k) * sizeof *exact);
	K->linear_weight_grad(c->m, c->n, c->k, c->x, c->ldx, c->dy, c->ldy, exact, MOE_USE_EXACT, NULL);
	check("exact linear_weight_grad", c->n * c->k, exact, want, F32_TOLERANCE);
	K->linear_weight_grad(c->m, c->n, c->k, c->x, c->ldx, c->dy, c->ldy, g, MOE_USE_GEMM,
			      mem(K->linear_grad_scratch(c->m, c->n, c->k)));
	check("linear_weight_grad", c->n * c->k, g, want, operands_rounded ? BF16_TOLERANCE : F32_TOLERANCE);
	if (!c->r)
		return;
	wa = widen(ga, c->r, c->k, c->k), wb = widen(gb, c->n, c->r, c->r);
	for (int s = 0; s < c->r; s++)
		for (int64_t i = 0; i < c->n; i++)
			for (int64_t j = 0; j < c->k; j++) {
				double d = (double)c->lora.scale * dw[i * c->k + j];

				wa[s * c->k + j] += d * c->b[i * c->r + s];
				wb[i * c->r + s] += d * c->a[s * c->k + j];
			}
	K->linear_lora_grad(c->m, c->n, c->k, c->x, c->ldx, c->dy, c->ldy, &c->lora, ga, gb,
			    scratch);
	check("lora_grad A", c->r * c->k, ga, wa, c->tolerance);
	check("lora_grad B", c->n * c->r, gb, wb, c->tolerance);
}

static void dropped_case(const struct dense *c)
{
	struct moe_dropout drop = { .p = .4f, .key = { 5 }, .position = 1000 };
	struct moe_lora lora = c->lora;
	void *scratch = mem(K->linear_scratch(c->m, c->n, c->k, c->r));
	float *y = floats(c->m * c->ldy), *dx = floats(c->m * c->ldx), *ones = floats(c->m * c->k);
	float *xm = floats(c->m * c->k), *ga = floats(c->r * c->k), *gb = floats(c->n * c->r);
	double *ba = effective_weight(c), *y_want = doubles(c->m * c->n), *dx_want = doubles(c->m * c->k);
	double *lora_dx = doubles(c->m * c->k), *xd, *dw = doubles(c->n * c->k);
	double *wa = doubles(c->r * c->k), *wb = doubles(c->n * c->r);

	memset(ga, 0, (size_t)(c->r * c->k) * sizeof *ga);
	memset(gb, 0, (size_t)(c->n * c->r) * sizeof *gb);
	lora.drop = &drop;
	lora.token = 7;
	for (int64_t i = 0; i < c->m * c->k; i++)
		ones[i] = 1;
	for (int64_t i = 0; i < c->n * c->k; i++)
		ba[i] -= c->w[i]; /* scale B A */
	for (int i = 0; i < c->m; i++) {
		moe_drop(&drop, MOE_DROP_GATE, 7 + i, 0, c->k, ones + i * c->k);
		for (int64_t j = 0; j < c->k; j++)
			xm[i * c->k + j] = ones[i * c->k + j] * c->x[i * c->ldx + j];
	}
	multiply(c->m, c->n, c->k, 1, c->x, c->ldx, 1, c->w, 1, c->k, y_want);
	multiply(c->m, c->n, c->k, 1, xm, c->k, 1, ba, 1, c->k, y_want);
	K->linear(c->m, &c->W, 0, c->n, c->x, c->ldx, NULL, &lora, y, c->ldy, scratch);
	check_rows("dropped linear", c->m, c->n, y, c->ldy, y_want, 1.5 * BF16_TOLERANCE);
	multiply(c->m, c->k, c->n, 1, c->dy, c->ldy, 1, c->w, c->k, 1, dx_want);
	multiply(c->m, c->k, c->n, 1, c->dy, c->ldy, 1, ba, c->k, 1, lora_dx);
	for (int64_t i = 0; i < c->m * c->k; i++)
		dx_want[i] += (double)ones[i] * lora_dx[i];
	K->linear_bwd(c->m, &c->W, c->dy, c->ldy, &lora, dx, c->ldx, false, scratch);
	check_rows("dropped linear_bwd", c->m, c->k, dx, c->ldx, dx_want, 1.5 * BF16_TOLERANCE);
	xd = widen(xm, c->m, c->k, c->k);
	multiply(c->n, c->k, c->m, (double)lora.scale, c->dy, 1, c->ldy, xd, c->k, 1, dw);
	for (int s = 0; s < c->r; s++)
		for (int64_t i = 0; i < c->n; i++)
			for (int64_t j = 0; j < c->k; j++) {
				wa[s * c->k + j] += dw[i * c->k + j] * c->b[i * c->r + s];
				wb[i * c->r + s] += dw[i * c->k + j] * c->a[s * c->k + j];
			}
	K->linear_lora_grad(c->m, c->n, c->k, c->x, c->ldx, c->dy, c->ldy, &lora, ga, gb, scratch);
	check("dropped gradient of A", c->r * c->k, ga, wa, 1.5 * BF16_TOLERANCE);
	check("dropped gradient of B", c->n * c->r, gb, wb, 1.5 * BF16_TOLERANCE);
}

static void linear_case(enum moe_dtype dtype, int m, int64_t n, int64_t k, int r,
			enum moe_weight_use use, bool plain)
{
	struct dense c = dense_case(dtype, m, n, k, r, use, plain);
	double *w = effective_weight(&c);

	forward_case(&c, w, false);
	forward_case(&c, w, true);
	backward_case(&c, w, false);
	backward_case(&c, w, true);
	if (dtype == MOE_F32 && use == MOE_USE_GEMM)
		gradient_case(&c);
	if (r && n && m >= 9 && plain) /* thin products of few rows may all be rounded far */
		dropped_case(&c);
	release();
}

static void linear_cases(void)
{
	static const struct {
		int m, r;
		int64_t n, k;
	} shapes[] = { { 0, 2, 5, 7 },	     { 1, 0, 1, 1 },	 { 1, 3, 300, 65 },
		       { 2, 8, 256, 64 },    { 7, 0, 513, 31 },	 { 33, 5, 37, 129 },
		       { 64, 4, 600, 96 },   { 5, 1, 512, 300 }, { 3, 2, 0, 9 },
		       { 17, 0, 0, 9 },	     { 3, 17, 40, 48 },	 { 9, 33, 70, 33 },
		       { 200, 16, 100, 70 }, { 13, 7, 16, 16 },	 { 12, 0, 272, 560 } };

	for (size_t s = 0; s < MOE_COUNT(shapes); s++)
		for (size_t d = 0; d < MOE_COUNT(weight_dtypes); d++) {
			int m = shapes[s].m, r = shapes[s].r;
			int64_t n = shapes[s].n, k = shapes[s].k;

			linear_case(weight_dtypes[d], m, n, k, r, MOE_USE_GEMM, false);
			if (n * m > 30) /* few values may all be rounded far */
				linear_case(weight_dtypes[d], m, n, k, r, MOE_USE_GEMM, true);
			linear_case(weight_dtypes[d], m, n, k, r, MOE_USE_EXACT, true);
		}
}

static void test_linear(void)
{
	check_tables(linear_cases);
}

/* ---- threads ---- */

struct caller {
	const struct dense *c;
	float *y, *dx;
	void *scratch;
};

static void *call_linear(void *arg)
{
	struct caller *t = arg;
	const struct dense *c = t->c;

	for (int repeat = 0; repeat < 5; repeat++) {
		K->linear(c->m, &c->W, 0, c->n, c->x, c->ldx, NULL, pair(c), t->y, c->n,
			  t->scratch);
		K->linear_bwd(c->m, &c->W, c->dy, c->ldy, pair(c), t->dx, c->k, false, t->scratch);
	}
	return NULL;
}

/* Concurrent callers get the bits that a lone one gets, at whatever address their memory lies. */
static void thread_cases(void)
{
	enum { THREADS = 6 };
	pthread_t id[THREADS];
	struct caller caller[THREADS + 1], *lone = &caller[THREADS];
	struct dense c;

	c = dense_case(MOE_BF16, 61, 700, 130, 3, MOE_USE_GEMM, true);
	for (int i = 0; i <= THREADS; i++) {
		size_t y = (size_t)(c.m * c.n), dx = (size_t)(c.m * c.k), odd = (size_t)i % 3;

		caller[i].c = &c;
		caller[i].scratch = mem(K->linear_scratch(c.m, c.n, c.k, c.r));
		caller[i].y = (float *)mem((y + odd) * sizeof(float)) + odd;
		caller[i].dx = (float *)mem((dx + odd) * sizeof(float)) + odd;
	}
	call_linear(lone);
	for (int i = 0; i < THREADS; i++)
		CU_ASSERT_EQUAL_FATAL(pthread_create(&id[i], NULL, call_linear, &caller[i]), 0);
	for (int i = 0; i < THREADS; i++) {
		pthread_join(id[i], NULL);
		check_same("linear", caller[i].y, lone->y, (size_t)(c.m * c.n) * sizeof(float));
		check_same("linear_bwd", caller[i].dx, lone->dx,
			   (size_t)(c.m * c.k) * sizeof(float));
	}
}

static void test_threads(void)
{
	check_tables(thread_cases);
}

const struct moe_test moe_suite_tests[] = {
	{ "weights are packed and unpacked exactly", test_weights },
	{ "linear, its backward and gradients", test_linear },
	{ "linear in concurrent threads", test_threads },
	{ NULL, NULL },
};
