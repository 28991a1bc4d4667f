/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every supported kernel table against plain loops in double: dense layers, norm, rope, SwiGLU,
 * cross-entropy, optimizer. Attention has its own suite. Ops that a table leaves NULL are passed over.
 */
#include "codelets/rope_table.h"
#include "tests/kernel_check.h"

#include <pthread.h>

const char moe_suite_name[] = "kernels";

/* ---- weights and dense layers ---- */

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

/* ---- norm, rope, SwiGLU ---- */

static double norm_loss(int n, const double *x, const float *w, double eps, const float *dy)
{
	double square = 0, loss = 0;

	for (int j = 0; j < n; j++)
		square += x[j] * x[j];
	for (int j = 0; j < n; j++)
		loss += x[j] / sqrt(square / n + eps) * (double)w[j] * (double)dy[j];
	return loss;
}

static void norm_case(int m, int n, double scale)
{
	int64_t ld = n + 3;
	float *x = randoms(m * ld, scale), *w = randoms(n, 1.0), *dy = randoms(m * ld, 1.0);
	float *y = floats(m * ld), *dx = floats(m * ld);
	float *added = randoms(m * ld, 1.0);
	double eps = (double)1e-6f, *want = widen(x, m, n, ld), *grad = doubles(m * n);
	double *sum = widen(added, m, n, ld), step = 1e-6 * scale;

	for (int i = 0; i < m; i++) {
		double *row = want + i * n, square = 0;

		for (int j = 0; j < n; j++) {
			double at = row[j], up;

			row[j] = at + step;
			up = norm_loss(n, row, w, eps, dy + i * ld);
			row[j] = at - step;
			grad[i * n + j] =
				(up - norm_loss(n, row, w, eps, dy + i * ld)) / (2 * step);
			row[j] = at;
			sum[i * n + j] += grad[i * n + j];
			square += at * at;
		}
		for (int j = 0; j < n; j++)
			row[j] = row[j] / sqrt(square / n + eps) * (double)w[j];
	}
	K->rmsnorm(m, n, x, ld, w, 1e-6f, y, ld);
	check_rows("rmsnorm", m, n, y, ld, want, 3e-7);
	K->rmsnorm_bwd(m, n, x, ld, w, 1e-6f, dy, ld, dx, ld, false);
	check_rows("rmsnorm_bwd", m, n, dx, ld, grad, 2e-6);
	K->rmsnorm_bwd(m, n, x, ld, w, 1e-6f, dy, ld, added, ld, true);
	check_rows("rmsnorm_bwd, added", m, n, added, ld, sum, 2e-6);
	release();
}

static void norm_cases(void)
{
	norm_case(0, 8, 1.0);
	norm_case(3, 2, 1.0);
	norm_case(5, 37, 1.0);
	norm_case(2, 128, 30.0);
	norm_case(4, 301, 0.01);
}

static void test_norm(void)
{
	check_tables(norm_cases);
}

static void rope_case(int m, int heads, int dim)
{
	int positions = 50, half = dim / 2;
	int64_t n = (int64_t)heads * dim, ld = n + 4;
	float *cs = mem((size_t)(positions * dim) * sizeof *cs), *x = randoms(m * ld, 1.0);
	float *y = copy(x, m * ld);
	int32_t *position = mem((size_t)m * sizeof *position);
	struct moe_rope_angles cfg = { .theta = 1e4,
				.type = MOE_ANGLES_YARN,
				.factor = 4,
				.original_max_positions = 16,
				.truncate = true };
	double *want = doubles(m * n), *back = doubles(m * n), f = 0.1 * log(4.0) + 1;

	moe_rope_table(&cfg, dim, positions, cs);
	for (int i = 0; i < m; i++) {
		position[i] = (i * 7 + 3) % positions;
		for (int64_t j = 0; j < n; j++) {
			int pair = (int)(j % dim) % half;
			double angle = position[i] * moe_rope_frequency(&cfg, dim, pair);
			double other = j % dim < half ? -(double)x[i * ld + j + half]
						      : (double)x[i * ld + j - half];

			want[i * n + j] =
				f * ((double)x[i * ld + j] * cos(angle) + other * sin(angle));
			back[i * n + j] = f * f * (double)x[i * ld + j];
		}
	}
	K->rope(m, heads, dim, y, ld, position, cs, 1);
	check_rows("rope", m, n, y, ld, want, 3e-7);
	/* the transpose of f times a rotation: together f^2 */
	K->rope(m, heads, dim, y, ld, position, cs, -1);
	check_rows("rope and back", m, n, y, ld, back, 3e-7);
	release();
}

static void rope_cases(void)
{
	rope_case(0, 2, 4);
	rope_case(1, 1, 2);
	rope_case(9, 3, 64);
	rope_case(5, 2, 22);
}

static void test_rope(void)
{
	check_tables(rope_cases);
}

/* Expected: transformers 5.24's functions run in double (numpy in torch's place). */
static void test_rope_table(void)
{
	static const struct {
		struct moe_rope_angles cfg;
		int dim, pair[8];
		double attention, frequency[8];
	} cases[] = {
		{ { .theta = 1e6,
		    .type = MOE_ANGLES_YARN,
		    .factor = 4,
		    .original_max_positions = 32768,
		    .truncate = true },
		  128,
		  { 0, 9, 18, 27, 36, 45, 54, 63 },
		  1.138629436111989,
		  { 1, 0.143301257023696, 0.0205352502645715, 0.00242342238040764,
		    0.000179841155873954, 1.51074097559533e-05, 2.16491080840016e-06,
		    3.1023444018793e-07 } },
		{ { .theta = 1e4,
		    .type = MOE_ANGLES_YARN,
		    .factor = 40,
		    .original_max_positions = 4096,
		    .beta_fast = 32,
		    .beta_slow = 1,
		    .mscale = 1,
		    .mscale_all_dim = 0.707,
		    .truncate = true },
		  64,
		  { 0, 4, 9, 13, 18, 22, 27, 31 },
		  1.0857263992561355,
		  { 1, 0.316227766016838, 0.0749894209332456, 0.0183781462188778,
		    0.0022493653007614, 0.000177827941003892, 1.05424125857146e-05,
		    3.33380358040831e-06 } },
		{ { .theta = 150000,
		    .type = MOE_ANGLES_YARN,
		    .factor = 32,
		    .original_max_positions = 4096,
		    .beta_fast = 32,
		    .beta_slow = 1 },
		  64,
		  { 0, 4, 9, 13, 18, 22, 27, 31 },
		  1.3465735902799727,
		  { 1, 0.225418000202871, 0.0317056961846638, 0.00386035931719207,
		    3.83088123737534e-05, 8.63549587543848e-06, 1.34129103505404e-06,
		    3.02351142811921e-07 } },
		{ { .theta = 1e4, .type = MOE_ANGLES_LINEAR, .factor = 8 },
		  64,
		  { 0, 4, 9, 13, 18, 22, 27, 31 },
		  1,
		  { 0.125, 0.0395284707521047, 0.0093736776166557, 0.00296421713207707,
		    0.000702926656487936, 0.000222284926254865, 5.27120629285728e-05,
		    1.66690179020415e-05 } },
		{ { .theta = 1e4 },
		  64,
		  { 0, 8, 16, 24, 0, 0, 0, 0 },
		  1,
		  { 1, 0.1, 0.01, 0.001, 1, 1, 1, 1 } },
	};

	for (size_t c = 0; c < MOE_COUNT(cases); c++) {
		const struct moe_rope_angles *cfg = &cases[c].cfg;
		int dim = cases[c].dim, p = 777;
		float *cs = mem((size_t)((p + 1) * dim) * sizeof *cs), *row = cs + p * dim;

		CU_ASSERT_DOUBLE_EQUAL(moe_rope_attention_factor(cfg), cases[c].attention, 1e-14);
		moe_rope_table(cfg, dim, p + 1, cs);
		for (int i = 0; i < 8; i++) {
			double f = cases[c].frequency[i], a = cases[c].attention;
			int pair = cases[c].pair[i];

			CU_ASSERT_DOUBLE_EQUAL(moe_rope_frequency(cfg, dim, pair) / f, 1, 1e-13);
			CU_ASSERT_DOUBLE_EQUAL((double)row[pair], a * cos(p * f), 1e-7);
			CU_ASSERT_DOUBLE_EQUAL((double)row[dim / 2 + pair], a * sin(p * f), 1e-7);
		}
		release();
	}
	struct moe_rope_angles given = { .type = MOE_ANGLES_YARN, .factor = 8, .attention_factor = 1.5 };

	CU_ASSERT_EQUAL(moe_rope_attention_factor(&given), 1.5);
	given.attention_factor = 0;
	given.factor = 0.5; /* no extension: no correction */
	CU_ASSERT_EQUAL(moe_rope_attention_factor(&given), 1.0);
}

static void swiglu_cases(void)
{
	int64_t n = 1003;
	float *gate, *up, *dh, *h, *dgate, *dup;
	double *wh, *wg, *wu;

	gate = randoms(n, 20), up = randoms(n, 2), dh = randoms(n, 1);
	h = mem((size_t)n * 4), dgate = mem((size_t)n * 4), dup = mem((size_t)n * 4);
	wh = doubles(n), wg = doubles(n), wu = doubles(n);
	gate[0] = -200, gate[1] = 200, gate[2] = -88.5f, gate[3] = 0, gate[4] = -1e30f;
	for (int64_t i = 0; i < n; i++) {
		double x = (double)gate[i], s = 1 / (1 + exp(-x));

		wh[i] = x * s * (double)up[i];
		wg[i] = (double)dh[i] * (double)up[i] * s * (1 + x * (1 - s));
		wu[i] = (double)dh[i] * x * s;
	}
	K->swiglu(n, gate, up, h);
	K->swiglu_bwd(n, gate, up, dh, dgate, dup);
	check("swiglu", n, h, wh, 3e-7);
	check("swiglu_bwd gate", n, dgate, wg, 3e-7);
	check("swiglu_bwd up", n, dup, wu, 3e-7);
	for (int alias = 0; alias < 2; alias++) {
		float *in = copy(dh, n), *other = randoms(n, 1);

		K->swiglu_bwd(n, gate, up, in, alias ? in : other, alias ? other : in);
		check_same("swiglu_bwd in place", alias ? in : other, dgate, (size_t)n * 4);
		check_same("swiglu_bwd in place", alias ? other : in, dup, (size_t)n * 4);
	}
	gate[3] = NAN, up[9] = INFINITY;
	K->swiglu(n, gate, up, h);
	K->swiglu_bwd(n, gate, up, dh, dgate, dup);
	CU_ASSERT(isnan(h[3]) && isnan(dgate[3]) && isnan(dup[3]) && isinf(h[9]));
	K->swiglu(0, gate, up, h);
}

static void test_swiglu(void)
{
	check_tables(swiglu_cases);
}

/* Clamps both ways, gradient 0 where a value was cut, the limit itself passes. */
static void glu_cases(void)
{
	const struct moe_glu forms[] = { { 1, 1, 0 }, { 7, 1.702f, 1 }, { INFINITY, 0.5f, -2 } };
	int64_t n = 1003;

	for (size_t f = 0; f < MOE_COUNT(forms); f++) {
		float *gate = randoms(n, 20), *up = randoms(n, 10), *dh = randoms(n, 1), L = forms[f].limit;
		float *h = mem((size_t)n * 4), *dgate = mem((size_t)n * 4), *dup = mem((size_t)n * 4);
		double *wh = doubles(n), *wg = doubles(n), *wu = doubles(n), a = (double)forms[f].alpha;
		int wrong = 0;

		gate[0] = -200, gate[1] = -1e30f;
		if (isfinite(L)) {
			gate[2] = up[3] = 1e30f, up[4] = -1e30f;
			gate[5] = up[6] = L, up[7] = -L;
		}
		for (int64_t i = 0; i < n; i++) {
			double x = (double)fminf(gate[i], L), y = (double)fmaxf(fminf(up[i], L), -L);
			double s = 1 / (1 + exp(-a * x)), rest = 1 / (1 + exp(a * x));

			y += (double)forms[f].shift;
			wh[i] = x * s * y;
			wg[i] = gate[i] > L ? 0 : (double)dh[i] * y * s * (1 + a * x * rest);
			wu[i] = fabsf(up[i]) > L ? 0 : (double)dh[i] * x * s;
		}
		K->glu(&forms[f], n, gate, up, h);
		K->glu_bwd(&forms[f], n, gate, up, dh, dgate, dup);
		for (int64_t i = 0; i < n; i++)
			wrong += (gate[i] > L && dgate[i] != 0) || (fabsf(up[i]) > L && dup[i] != 0);
		CU_ASSERT_EQUAL(wrong, 0);
		check("glu", n, h, wh, 4e-7);
		check("glu_bwd gate", n, dgate, wg, 4e-7);
		check("glu_bwd up", n, dup, wu, 4e-7);
		for (int alias = 0; alias < 2; alias++) {
			float *in = copy(dh, n), *other = randoms(n, 1);

			K->glu_bwd(&forms[f], n, gate, up, in, alias ? in : other, alias ? other : in);
			check_same("glu_bwd in place", alias ? in : other, dgate, (size_t)n * 4);
			check_same("glu_bwd in place", alias ? other : in, dup, (size_t)n * 4);
		}
		release();
	}
}

static void test_glu(void)
{
	check_tables(glu_cases);
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

/* ---- loss ---- */

static void loss_cases(void)
{
	enum { M = 5, V = 4500, CUT = 4096, LD = V + 9 };
	float *logits, max[2][M], sum[2][M], tgt[M], lse[M];
	int32_t label[M] = { 0, CUT - 1, CUT, V - 1, 17 };
	double *want;

	logits = randoms(M * LD, 12), want = doubles(M * V);
	K->ce_partial(M, 0, CUT, logits, LD, label, max[0], sum[0], tgt);
	K->ce_partial(M, CUT, V, logits + CUT, LD, label, max[1], sum[1], tgt);
	for (int i = 0; i < M; i++) {
		const float *row = logits + i * LD;
		double exact = 0, top = fmax((double)max[0][i], (double)max[1][i]), got;

		for (int j = 0; j < V; j++)
			exact += exp((double)row[j]);
		got = top + log((double)sum[0][i] * exp((double)max[0][i] - top) +
				(double)sum[1][i] * exp((double)max[1][i] - top));
		CU_ASSERT_DOUBLE_EQUAL(got, log(exact), 1e-6);
		CU_ASSERT_EQUAL(tgt[i], row[label[i]]);
		lse[i] = (float)got;
		for (int j = 0; j < V; j++)
			want[i * V + j] = 0.125 * (exp((double)row[j]) / exact - (j == label[i]));
	}
	K->ce_bwd(M, 0, CUT, logits, LD, label, lse, 0.125f);
	K->ce_bwd(M, CUT, V, logits + CUT, LD, label, lse, 0.125f);
	check_rows("ce_bwd", M, V, logits, LD, want, 2e-6);
	for (int j = 0; j < 40; j++)
		logits[j] = -INFINITY;
	K->ce_partial(1, 0, 40, logits, LD, label, max[0], sum[0], tgt);
	CU_ASSERT(max[0][0] == -INFINITY && sum[0][0] == 0.0f);
	K->ce_partial(1, 5, 5, logits, LD, label, max[0], sum[0], tgt);
	CU_ASSERT(max[0][0] == -INFINITY && sum[0][0] == 0.0f);
	logits[33] = NAN;
	K->ce_partial(1, 0, 40, logits, LD, label, max[0], sum[0], tgt);
	CU_ASSERT(isnan(sum[0][0]));
	logits[33] = INFINITY;
	K->ce_partial(1, 0, 40, logits, LD, label, max[0], sum[0], tgt);
	CU_ASSERT(max[0][0] == INFINITY && isnan(sum[0][0]));
}

/* ce_bwd with lse 0 and scale 1 is the table's exp. */
static void exp_cases(void)
{
	enum { N = 4096 };
	static float x[N], y[N];
	static const float special[] = { -INFINITY, INFINITY, NAN,   0.0f,
					 89.0f,	    -104.0f,  1e30f, -1e30f };
	float zero = 0;
	int32_t none = -1;
	double worst = 0;

	for (uint32_t at = 0; at < (moe_test_full() ? 1u << 18 : 1u << 10); at++) {
		for (int i = 0; i < N; i++) {
			x[i] = (float)(uniform() * 87.3);
			if (i & 1)
				x[i] = ldexpf((float)uniform(), -(i & 31));
			y[i] = x[i];
		}
		K->ce_bwd(1, 0, N, y, N, &none, &zero, 1.0f);
		for (int i = 0; i < N; i++) {
			double want = exp((double)x[i]);

			worst = fmax(worst, fabs((double)y[i] - want) / ldexp(1, ilogb(want) - 23));
		}
	}
	printf("\n  %s: exp within %.2f ulp\n", K->name, worst);
	CU_ASSERT(worst <= 2.0);
	memcpy(x, special, sizeof special);
	K->ce_bwd(1, 0, MOE_COUNT(special), x, N, &none, &zero, 1.0f);
	CU_ASSERT(x[0] == 0 && x[1] == INFINITY && isnan(x[2]) && x[3] == 1);
	CU_ASSERT(x[4] == INFINITY && x[5] == 0 && x[6] == INFINITY && x[7] == 0);
}

static void test_loss(void)
{
	check_tables(loss_cases);
}

static void test_exp(void)
{
	check_tables(exp_cases);
}

/* ---- optimizer ---- */

/* torch.optim.AdamW, in double, as its documentation's algorithm has it */
static void adamw_reference(int n, double *p, const float *g, double *m, double *v, double lr,
			    double decay, double eps, double grad_scale, int t)
{
	for (int i = 0; i < n; i++) {
		double grad = (double)g[i] * grad_scale;

		p[i] -= lr * decay * p[i];
		m[i] = 0.9 * m[i] + 0.1 * grad;
		v[i] = 0.999 * v[i] + 0.001 * grad * grad;
		p[i] -= lr * (m[i] / (1 - pow(0.9, t))) / (sqrt(v[i] / (1 - pow(0.999, t))) + eps);
	}
}

/*
 * Each update from the same state, then the way of all of them: there torch too is a little off, as
 * it multiplies by 1 - lr decay rounded to float.
 */
static void adamw_cases(void)
{
	enum { N = 259 };
	struct moe_adamw o = { .lr = 0.01,
			       .beta1 = 0.9,
			       .beta2 = 0.999,
			       .eps = 1e-8,
			       .weight_decay = 0.1,
			       .grad_scale = 0.25f };
	float *p, *m, *v, *before;
	double *way[3];

	p = randoms(N, 1), m = randoms(N, 0), v = randoms(N, 0), before = copy(p, N);
	way[0] = widen(p, 1, N, N), way[1] = doubles(N), way[2] = doubles(N);
	for (o.step = 1; o.step <= 100; o.step++) {
		int kept = block_count;
		float *g = randoms(N, o.step % 10 ? 1e-3 : 10.0), *same = copy(g, N);
		double *wp = widen(p, 1, N, N), *wm = widen(m, 1, N, N), *wv = widen(v, 1, N, N);

		adamw_reference(N, wp, g, wm, wv, (double)o.lr, (double)o.weight_decay,
				(double)o.eps, 0.25, (int)o.step);
		adamw_reference(N, way[0], g, way[1], way[2], (double)o.lr, (double)o.weight_decay,
				(double)o.eps, 0.25, (int)o.step);
		K->adamw(N, p, g, m, v, &o);
		check_same("adamw's gradient", g, same, N * sizeof *g);
		check("adamw", N, p, wp, 1e-7);
		check("adamw m", N, m, wm, 2e-7);
		check("adamw v", N, v, wv, 2e-7);
		release_to(kept);
	}
	check("adamw's way", N, p, way[0], 3e-6);
	check("adamw's way, m", N, m, way[1], 1e-6);
	check("adamw's way, v", N, v, way[2], 1e-6);
	K->adamw(0, p, p, m, v, &o);
	m[7] = NAN;
	K->adamw(N, p, before, m, v, &o);
	CU_ASSERT(isnan(p[7]) && !isnan(p[8]));
}

static void sum_squares_cases(void)
{
	int64_t n = 100003;
	float *g;
	double want = 0;

	g = randoms(n, 1e-3);
	g[5] = 1e25f; /* its square is no float */
	for (int64_t i = 0; i < n; i++)
		want += (double)g[i] * (double)g[i];
	CU_ASSERT_DOUBLE_EQUAL(K->sum_squares(n, g) / want, 1, 1e-12);
	g[5] = 1.0f;
	want = 0;
	for (int64_t i = 0; i < n; i++)
		want += (double)g[i] * (double)g[i];
	CU_ASSERT_DOUBLE_EQUAL(K->sum_squares(n, g) / want, 1, 1e-12);
	CU_ASSERT_EQUAL(K->sum_squares(0, g), 0);
	g[n - 1] = NAN;
	CU_ASSERT(isnan(K->sum_squares(n, g)));
}

static void test_adamw(void)
{
	check_tables(adamw_cases);
}

static void test_sum_squares(void)
{
	check_tables(sum_squares_cases);
}

const struct moe_test moe_suite_tests[] = {
	{ "weights are packed and unpacked exactly", test_weights },
	{ "linear, its backward and gradients", test_linear },
	{ "rmsnorm and its backward", test_norm },
	{ "rope and its transpose", test_rope },
	{ "rope tables: default, linear, yarn", test_rope_table },
	{ "swiglu and its backward", test_swiglu },
	{ "clamped swiglu and its backward", test_glu },
	{ "linear in concurrent threads", test_threads },
	{ "cross-entropy by vocabulary chunks", test_loss },
	{ "exp", test_exp },
	{ "adamw", test_adamw },
	{ "sum of squares", test_sum_squares },
	{ NULL, NULL },
};
