/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every supported kernel table against plain loops in double: norm, SwiGLU, cross-entropy, optimizer. Dense layers, rope
 * and attention have their own suites. Ops that a table leaves NULL are passed over.
 */
#include "tests/kernel_check.h"

const char moe_suite_name[] = "kernels";

/* ---- norm, SwiGLU ---- */

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

			worst = worst_of(worst, fabs((double)y[i] - want) / ldexp(1, ilogb(want) - 23));
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
	{ "rmsnorm and its backward", test_norm },
	{ "swiglu and its backward", test_swiglu },
	{ "clamped swiglu and its backward", test_glu },
	{ "cross-entropy by vocabulary chunks", test_loss },
	{ "exp", test_exp },
	{ "adamw", test_adamw },
	{ "sum of squares", test_sum_squares },
	{ NULL, NULL },
};
