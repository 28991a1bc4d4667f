/* SPDX-License-Identifier: Apache-2.0 */
/* Gradient GEMMs and SwiGLU epilogues of every table of tiles against plain loops in double. */
#include "codelets/kernels/packed/keep.h"
#include "tests/tile_check.h"

const char moe_suite_name[] = "tile_grads";

/* ---- gradients ---- */

/* Source rows of a pair array and what its elements must hold. */
struct pairs {
	float *x;
	int32_t *token;
	float *scale;
	int64_t ld;
	int cols;
	void *array;
	double *want; /* [m, cols] */
};

static double pair_element(const struct pairs *p, int row, int col)
{
	int64_t at = (int64_t)(row / 2) * p->cols * 2 + 2 * col + row % 2;

	if (T->pair_bytes == 2)
		return (double)moe_bf16_to_f32(((const uint16_t *)p->array)[at]);
	return (double)((const float *)p->array)[(int64_t)row * p->cols + col];
}

static struct pairs random_pairs(int m, int cols, bool bf16)
{
	struct pairs p = { .ld = cols + 3, .cols = cols };
	int rows = m + 2, wrong = 0;
	char *raw = mem((size_t)(rows * p.ld) * sizeof(uint16_t) + 2);

	p.x = randoms(rows * p.ld, 1.0);
	p.token = m % 3 ? random_tokens(m, rows) : NULL;
	p.scale = bf16 || m % 4 == 0 ? NULL : randoms(m, 1.0);
	p.array = mem((size_t)((m + m % 2) * cols) * (size_t)T->pair_bytes);
	p.want = doubles(m * cols);
	if (bf16) {
		for (int64_t i = 0; i < rows * p.ld; i++) {
			uint16_t half = moe_f32_to_bf16(p.x[i]);

			memcpy(raw + 2 + 2 * i, &half, sizeof half);
			p.x[i] = moe_bf16_to_f32(half);
		}
		T->pairs_bf16(m, (const uint16_t *)(const void *)(raw + 2), p.ld, p.token, cols,
			      p.array);
	} else {
		T->pairs(m, p.x, p.ld, p.token, p.scale, cols, p.array);
	}
	for (int i = 0; i < m; i++)
		for (int j = 0; j < cols; j++) {
			float v = p.x[(p.token ? p.token[i] : i) * p.ld + j];

			v *= p.scale ? p.scale[i] : 1;
			p.want[i * cols + j] = operand(v, T->pair_bytes);
			wrong += pair_element(&p, i, j) != p.want[i * cols + j];
		}
	for (int j = 0; j < cols && m % 2 && T->pair_bytes == 2; j++)
		wrong += pair_element(&p, m, j) != 0;
	CU_ASSERT_EQUAL(wrong, 0);
	return p;
}

/* c [na, nb] from columns a0.. of a and b0.. of b */
static void grad_case(int m, int na, int nb, int a0, int b0, int offset, int gap, enum moe_out out)
{
	struct pairs a = random_pairs(m, (int)moe_round_up(a0 + na, 16), false);
	struct pairs b = random_pairs(m, (int)moe_round_up(b0 + nb, 16), true);
	int64_t ldc = nb + gap, count = na * ldc + offset;
	float *base = randoms(count, 1.0), *before = copy(base, count), *c = base + offset;
	double *want = doubles(na * nb);
	float scale = 0.375f;
	int touched = 0;

	noise = 1e-7 * sqrt(m); /* a sum may cancel */

	for (int i = 0; i < na; i++)
		for (int j = 0; j < nb; j++) {
			double sum = 0;

			for (int t = 0; t < m; t++)
				sum += a.want[t * a.cols + a0 + i] * b.want[t * b.cols + b0 + j];
			want[i * nb + j] = (double)scale * sum;
			if (out == MOE_OUT_ADD)
				want[i * nb + j] += (double)before[offset + i * ldc + j];
		}
	/* four bytes per column in either form */
	T->grad(m, (const char *)a.array + 4 * a0, a.cols, na, (const char *)b.array + 4 * b0,
		b.cols, nb, scale, c, ldc, out);
	T->fence();
	check_rows("grad", na, nb, c, ldc, want, gemm_tolerance);
	for (int64_t i = 0; i < count; i++)
		if (i < offset || (i - offset) % ldc >= nb)
			touched += memcmp(base + i, before + i, sizeof *base) != 0;
	CU_ASSERT_EQUAL(touched, 0);
	noise = 0;
	release();
}

static void grad_cases(void)
{
	static const struct {
		int na, nb, gap;
	} shapes[] = { { 16, 64, 0 },  { 64, 64, 0 }, { 1, 1, 3 },   { 5, 33, 0 },
		       { 16, 16, 16 }, { 64, 8, 1 },  { 17, 31, 2 }, { 40, 96, 32 },
		       { 33, 80, 16 }, { 8, 8, 0 },   { 70, 49, 0 }, { 32, 160, 0 } };

	for (int i = 0; i < m_count(); i++)
		for (size_t s = 0; s < MOE_COUNT(shapes); s++)
			grad_case(m_at(i), shapes[s].na, shapes[s].nb, (i + (int)s) % 2 * 16,
				  (i + (int)s) % 3 * 16, i % 2 * (i % 5), shapes[s].gap,
				  (enum moe_out)((i + (int)s) % 3));
}

static void test_grad(void)
{
	each_tiles(grad_cases);
}

/* ---- SwiGLU ---- */

#define LANES 16

struct rows {
	struct moe_swiglu_rows r;
	float *gate, *up, *dh; /* [m, 16] */
	int64_t ld_dh;
};

static struct rows random_rows(int m, double scale)
{
	struct rows s = { .r = { .m = m, .ld = 32 }, .ld_dh = 48 };

	s.gate = aligned_copy(randoms(m * LANES, scale), m * LANES);
	s.up = aligned_copy(randoms(m * LANES, 2.0), m * LANES);
	s.dh = randoms(m * s.ld_dh, 1.0);
	s.r.gate = mem((size_t)(m * s.r.ld) * sizeof *s.r.gate);
	s.r.up = mem((size_t)(m * s.r.ld) * sizeof *s.r.up);
	s.r.weight = randoms(m, 1.0);
	return s;
}

/*
 * Equal to 1e-6 of `size`, or both NaN, or the same infinity. A sigmoid below the smallest normal
 * float may be zero, so what is multiplied by `up` is off by up to 1e-36 times that.
 */
static bool close_to(float got, double want, double size, double up)
{
	if (isnan(want))
		return isnan(got);
	if (isinf(want) && isinf(up))
		return !isfinite(got);
	if (isinf((float)want) || isinf(got))
		return got == (float)want;
	return fabs((double)got - want) <= 1e-6 * fabs(size) + 2e-36 * (1 + fabs(up));
}

static double silu(double x)
{
	return x / (1 + exp(-x));
}

/* Returns how many of h are another bf16 than the exact value. */
static int swiglu_forward(struct rows *s)
{
	int m = s->r.m, wrong = 0, other = 0;
	float *g = aligned_copy(s->gate, m * LANES);

	T->swiglu(&s->r, g, s->up);
	for (int i = 0; i < m * LANES; i++) {
		double want = silu((double)s->gate[i]) * (double)s->up[i];
		int64_t at = i / LANES * s->r.ld + i % LANES;

		wrong += !close_to(g[i], want, want, (double)s->up[i]);
		other += moe_f32_to_bf16(g[i]) != moe_f32_to_bf16((float)want) && !isnan(want);
		for (int b = 0; b < 2; b++) {
			wrong += (b ? s->r.up : s->r.gate)[at] !=
				 moe_keep(b ? s->up[i] : s->gate[i]);
		}
	}
	CU_ASSERT_EQUAL(wrong, 0);
	return other;
}

static void swiglu_backward(struct rows *s)
{
	int m = s->r.m, n = m * LANES, wrong = 0;
	float *dgate = mem((size_t)n * 4), *dup = mem((size_t)n * 4), *h = mem((size_t)n * 4);
	float *dgw = aligned_copy(randoms(n, 1), n), *before = copy(dgw, n);

	for (int i = 0; i < n; i++) {
		int64_t at = i / LANES * s->r.ld + i % LANES;

		s->r.gate[at] = moe_keep(s->gate[i]);
		s->r.up[at] = moe_keep(s->up[i]);
	}
	T->swiglu_bwd(&s->r, s->dh, s->ld_dh, dgate, dup, h, dgw);
	for (int i = 0; i < n; i++) {
		double x = (double)moe_kept(moe_keep(s->gate[i]));
		double u = (double)moe_kept(moe_keep(s->up[i]));
		double d = (double)s->dh[i / LANES * s->ld_dh + i % LANES];
		double w = d * (double)s->r.weight[i / LANES];
		double sig = 1 / (1 + exp(-x)), rest = 1 / (1 + exp(x));
		double hidden = x * sig * u;

		wrong += !close_to(h[i], hidden, hidden, u);
		wrong += !close_to(dup[i], w * (x * sig), w * (x * sig), 1);
		/* 1 + x (1 - sigmoid) may cancel */
		wrong += !close_to(dgate[i], w * u * (sig * (1 + x * rest)),
				   w * u * sig * (1 + fabs(x) * rest), u);
		wrong += !close_to(dgw[i], (double)before[i] + d * hidden,
				   fabs((double)before[i]) + fabs(d * hidden), u);
	}
	CU_ASSERT_EQUAL(wrong, 0);
}

static void swiglu_cases(void)
{
	struct rows s;
	int other = 0;

	for (int m = 1; m <= 40; m++) {
		s = random_rows(m, m % 4 ? 8.0 : 60.0);
		other += swiglu_forward(&s);
		swiglu_backward(&s);
		release();
	}
	CU_ASSERT(other <= 3); /* of 13120 values */
	s = random_rows(100, 300.0);
	swiglu_forward(&s);
	swiglu_backward(&s);
	release();
}

/* Every pair of these as gate and up */
static void swiglu_special(void)
{
	const float special[] = { INFINITY, -INFINITY, NAN,    300.0f, -300.0f, 0.0f,
				  -0.0f,    1e-39f,    -88.0f, 88.0f,  -90.5f,	-103.f,
				  -104.5f,  1e20f,     -1e20f, 1.0f };
	struct rows s = random_rows(LANES, 1.0);

	for (int i = 0; i < LANES; i++)
		for (int j = 0; j < LANES; j++) {
			s.gate[i * LANES + j] = special[i];
			s.up[i * LANES + j] = special[j];
		}
	swiglu_forward(&s);
	swiglu_backward(&s);
	for (int i = 0; i < LANES; i++) /* NaN from above */
		s.dh[i * s.ld_dh + i] = NAN;
	swiglu_backward(&s);
}

/* ---- the same with clamps, a slope and a shift (struct moe_glu) ---- */

static const struct moe_glu glus[] = { { 10, 1, 0 },	   { 1, 1, 0 },	       { 7, 1.702f, 1 },
				       { INFINITY, 0.5f, -2 }, { 0.3f, 1, 0 } };

static bool cut_gate(const struct rows *s, int i)
{
	return s->gate[i] > s->r.glu.limit;
}

static bool cut_up(const struct rows *s, int i)
{
	return fabsf(s->up[i]) > s->r.glu.limit;
}

/* Some values are the limit, and its neighbours on both sides. */
static struct rows random_glu(int m, double scale, const struct moe_glu *f)
{
	struct rows s = random_rows(m, scale);
	float at[3] = { f->limit, nextafterf(f->limit, 0), nextafterf(f->limit, INFINITY) };

	s.r.glu = *f;
	for (int i = 0; i < 3 && isfinite(f->limit); i++) {
		s.gate[i] = s.up[3 + i] = at[i];
		s.up[6 + i] = -at[i];
	}
	return s;
}

/* alpha x is rounded before e^(alpha x) is taken. */
static double glu_size(const struct rows *s, double value, double x)
{
	return value * (1 + .1 * fabs((double)s->r.glu.alpha * x));
}

/* What is multiplied: values as given, or as they are kept, within the limit. */
static double glu_gate(const struct rows *s, int i, bool kept)
{
	float x = kept ? moe_kept(moe_keep(s->gate[i])) : s->gate[i];

	return cut_gate(s, i) ? (double)s->r.glu.limit : fmin((double)x, (double)s->r.glu.limit);
}

static double glu_up(const struct rows *s, int i, bool kept)
{
	float x = kept ? moe_kept(moe_keep(s->up[i])) : s->up[i];

	x = cut_up(s, i) ? s->r.glu.limit : fminf(fabsf(x), s->r.glu.limit);
	return (double)copysignf(x, s->up[i]) + (double)s->r.glu.shift;
}

static void glu_forward(struct rows *s)
{
	int m = s->r.m, wrong = 0;
	float *g = aligned_copy(s->gate, m * LANES);

	T->glu(&s->r, g, s->up);
	for (int i = 0; i < m * LANES; i++) {
		double x = glu_gate(s, i, false), y = glu_up(s, i, false);
		double want = x / (1 + exp((double)-s->r.glu.alpha * x)) * y;
		int64_t at = i / LANES * s->r.ld + i % LANES;

		wrong += !close_to(g[i], want, glu_size(s, want, x), y);
		wrong += s->r.gate[at] != moe_keep(cut_gate(s, i) ? INFINITY : s->gate[i]);
		wrong += s->r.up[at] != moe_keep(cut_up(s, i) ? copysignf(INFINITY, s->up[i]) : s->up[i]);
	}
	CU_ASSERT_EQUAL(wrong, 0);
}

/* From what the forward has kept: what it cut has no gradient, and nothing else. */
static void glu_backward(struct rows *s)
{
	int m = s->r.m, n = m * LANES, wrong = 0;
	float *dgate = mem((size_t)n * 4), *dup = mem((size_t)n * 4), *h = mem((size_t)n * 4);
	float *dgw = aligned_copy(randoms(n, 1), n), *before = copy(dgw, n);

	T->glu_bwd(&s->r, s->dh, s->ld_dh, dgate, dup, h, dgw);
	for (int i = 0; i < n; i++) {
		double x = glu_gate(s, i, true), y = glu_up(s, i, true), a = (double)s->r.glu.alpha;
		double d = (double)s->dh[i / LANES * s->ld_dh + i % LANES];
		double w = d * (double)s->r.weight[i / LANES], sig = 1 / (1 + exp(-a * x));
		double rest = 1 / (1 + exp(a * x)), hidden = x * sig * y, slope = w * y * sig;

		wrong += !close_to(h[i], hidden, glu_size(s, hidden, x), y);
		wrong += cut_up(s, i) ? dup[i] != 0
				      : !close_to(dup[i], w * x * sig, glu_size(s, w * x * sig, x), 1);
		wrong += cut_gate(s, i) ? dgate[i] != 0
					: !close_to(dgate[i], slope * (1 + a * x * rest),
						    glu_size(s, slope * (1 + fabs(a * x) * rest), x), y);
		wrong += !close_to(dgw[i], (double)before[i] + d * hidden,
				   fabs((double)before[i]) + glu_size(s, fabs(d * hidden), x), y);
	}
	CU_ASSERT_EQUAL(wrong, 0);
}

static void glu_cases(void)
{
	for (size_t f = 0; f < MOE_COUNT(glus); f++)
		for (int m = 1; m <= 40; m += m < 20 ? 1 : 7) {
			struct rows s = random_glu(m, m % 4 ? 8.0 : 60.0, &glus[f]);

			glu_forward(&s);
			glu_backward(&s);
			release();
		}
}

/* NaN passes; what is cut has no gradient, whatever comes from above; infinities are cut. */
static void glu_special(void)
{
	struct rows s = random_glu(4, 1.0, &glus[0]);
	float *h, *dgate = mem(256), *dup = mem(256), *again = mem(256), *dgw = mem(256);

	memset(dgw, 0, 256);
	s.gate[20] = NAN, s.up[21] = NAN, s.gate[22] = INFINITY, s.up[23] = -INFINITY;
	s.dh[s.ld_dh + 6] = NAN;
	h = aligned_copy(s.gate, 64);
	T->glu(&s.r, h, s.up);
	T->glu_bwd(&s.r, s.dh, s.ld_dh, dgate, dup, again, dgw);
	CU_ASSERT(isnan(h[20]) && isnan(h[21]) && isnan(again[20]) && isnan(again[21]));
	CU_ASSERT(isnan(dgate[20]) && isnan(dup[20]) && isnan(dgate[21]));
	CU_ASSERT(isfinite(h[22]) && isfinite(h[23]) && isfinite(again[22]) && isfinite(again[23]));
	CU_ASSERT(dgate[22] == 0 && isnan(dup[22]) && dup[23] == 0 && isfinite(dgate[23]));
}

/* The 16-bit form of gate and up: every code comes back, and what lies between is rounded to nearest. */
static void test_keep(void)
{
	int wrong = 0;

	for (uint32_t code = 0; code < 0x10000; code++) {
		float v = moe_kept((uint16_t)code);

		if ((code & 0x7fff) < 0x200)
			wrong += v != 0 || (moe_keep(v) & 0x7fff) != 0;
		else if ((code & 0x7fff) > MOE_KEEP_INF)
			wrong += !isnan(v) || !isnan(moe_kept(moe_keep(v)));
		else
			wrong += moe_keep(v) != code;
	}
	for (int i = 0; i < 100000; i++) {
		float v = (float)ldexp(uniform(), (int)(uniform() * 28));

		if (fabsf(v) >= 0x1p-30f)
			wrong += fabs((double)moe_kept(moe_keep(v)) / (double)v - 1) > 0x1p-10;
	}
	wrong += moe_kept(moe_keep(0x1.fffp31f)) != INFINITY || moe_kept(moe_keep(-0x1p40f)) != -INFINITY;
	wrong += moe_kept(moe_keep(0x1p-40f)) != 0 || !isnan(moe_kept(moe_keep(NAN)));
	CU_ASSERT_EQUAL(wrong, 0);
}

static void test_swiglu(void)
{
	each_tiles(swiglu_cases);
}

static void test_swiglu_special(void)
{
	each_tiles(swiglu_special);
}

static void test_glu(void)
{
	each_tiles(glu_cases);
}

static void test_glu_special(void)
{
	each_tiles(glu_special);
}

const struct moe_test moe_suite_tests[] = {
	{ "pair arrays and gradients: all row counts, edges", test_grad },
	{ "gate and up as they are kept", test_keep },
	{ "SwiGLU and its backward", test_swiglu },
	{ "SwiGLU of infinities, NaN, large and tiny values", test_swiglu_special },
	{ "clamped SwiGLU and its backward", test_glu },
	{ "clamped SwiGLU of infinities and NaN", test_glu_special },
	{ NULL, NULL },
};
