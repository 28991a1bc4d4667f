/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of every supported kernel table against plain loops in double. */
#include "tests/kernel_check.h"

#include <pthread.h>

const char moe_suite_name[] = "attention";

struct attention {
	struct moe_attention a;
	int64_t nq, nk; /* elements of q and of k */
	double *o, *lse, *gq, *gk, *gv;
};

static void attention_outputs(struct moe_attention *a)
{
	size_t k = (size_t)a->T * (size_t)(a->kv_heads * a->dim) * sizeof(float);
	size_t q = (size_t)a->T * (size_t)(a->heads * a->dim) * sizeof(float);

	a->o = mem(q), a->lse = mem((size_t)(a->heads * a->T) * sizeof(float));
	a->centre = mem((size_t)(a->heads * a->T) * sizeof(float));
	a->grad_q = mem(q), a->grad_k = mem(k), a->grad_v = mem(k);
}

static double dot(int n, const float *a, const float *b)
{
	double sum = 0;

	for (int i = 0; i < n; i++)
		sum += (double)a[i] * (double)b[i];
	return sum;
}

/* One query row: o, lse and its share of the gradients (dq of this row, dk, dv added). */
static void attention_row(struct attention *c, int h, int i)
{
	struct moe_attention *a = &c->a;
	int d = a->dim, g = h / (a->heads / a->kv_heads), first = a->doc_start[i];
	int64_t at = ((int64_t)i * a->heads + h) * d;
	double max = -INFINITY, sum = 0, centre = 0;
	double p[1024];

	for (int j = first; j <= i; j++) {
		p[j] = (double)a->scale *
		       dot(d, a->q + at, a->k + ((int64_t)j * a->kv_heads + g) * d);
		max = fmax(max, p[j]);
	}
	for (int j = first; j <= i; j++)
		sum += p[j] = exp(p[j] - max);
	c->lse[h * a->T + i] = max + log(sum);
	for (int j = first; j <= i; j++) {
		const float *v = a->v + ((int64_t)j * a->kv_heads + g) * d;

		p[j] /= sum;
		centre += p[j] * dot(d, a->grad_o + at, v);
		for (int e = 0; e < d; e++)
			c->o[at + e] += p[j] * (double)v[e];
	}
	for (int j = first; j <= i; j++) {
		int64_t key = ((int64_t)j * a->kv_heads + g) * d;
		double ds = (double)a->scale * p[j] * (dot(d, a->grad_o + at, a->v + key) - centre);

		for (int e = 0; e < d; e++) {
			c->gq[at + e] += ds * (double)a->k[key + e];
			c->gk[key + e] += ds * (double)a->q[at + e];
			c->gv[key + e] += p[j] * (double)a->grad_o[at + e];
		}
	}
}

static void reference(struct attention *c)
{
	const struct moe_attention *a = &c->a;

	c->o = doubles(c->nq), c->lse = doubles((int64_t)a->heads * a->T);
	c->gq = doubles(c->nq), c->gk = doubles(c->nk), c->gv = doubles(c->nk);
	for (int h = 0; h < a->heads; h++)
		for (int i = 0; i < a->T; i++)
			attention_row(c, h, i);
}

/* Documents start at the multiples of every; 0: one document. */
static struct attention attention_case(int T, int heads, int kv_heads, int dim, int every)
{
	struct attention c = { .nq = (int64_t)T * heads * dim, .nk = (int64_t)T * kv_heads * dim };
	int32_t *doc = mem((size_t)T * sizeof *doc);

	for (int i = 0; i < T; i++)
		doc[i] = every ? i - i % every : 0;
	c.a = (struct moe_attention){ .T = T, .heads = heads, .kv_heads = kv_heads, .dim = dim };
	c.a.scale = 1.5f / sqrtf((float)dim);
	c.a.doc_start = doc;
	c.a.q = randoms(c.nq, 3), c.a.k = randoms(c.nk, 3), c.a.v = randoms(c.nk, 1);
	c.a.grad_o = randoms(c.nq, 1);
	attention_outputs(&c.a);
	reference(&c);
	return c;
}

/* All rows in blocks, step heads (of q, or of k and v in the last op) at a time. */
static void run_attention(const struct moe_attention *a, int step, void *scratch)
{
	for (int t = 0; t < a->T; t += MOE_TOKEN_BLOCK)
		for (int h = 0; h < a->heads; h += step)
			K->attention(a, t, MOE_MIN(t + MOE_TOKEN_BLOCK, a->T), h,
				     MOE_MIN(h + step, a->heads), scratch);
	for (int t = 0; t < a->T; t += MOE_TOKEN_BLOCK)
		K->attention_centre(a, t, MOE_MIN(t + MOE_TOKEN_BLOCK, a->T));
	for (int t = 0; t < a->T; t += MOE_TOKEN_BLOCK) {
		int end = MOE_MIN(t + MOE_TOKEN_BLOCK, a->T);

		for (int h = 0; h < a->heads; h += step)
			K->attention_bwd_q(a, t, end, h, MOE_MIN(h + step, a->heads), scratch);
		for (int g = 0; g < a->kv_heads; g += step)
			K->attention_bwd_kv(a, t, end, g, MOE_MIN(g + step, a->kv_heads), scratch);
	}
}

/* Tables of tiles round what they multiply to bfloat16. */
static double attention_tolerance(void)
{
	return K->tiles ? 8e-3 : 3e-6;
}

static void check_attention(const struct attention *c)
{
	struct moe_attention b = c->a;
	void *scratch = mem(K->attention_scratch(b.dim));
	double tolerance = attention_tolerance();
	size_t q = (size_t)c->nq * 4, k = (size_t)c->nk * 4;

	run_attention(&c->a, b.heads, scratch);
	check("attention", c->nq, c->a.o, c->o, tolerance);
	check("attention lse", (int64_t)b.T * b.heads, c->a.lse, c->lse, tolerance);
	noise = tolerance; /* a row that sees one key only has no gradient */
	check("attention grad_q", c->nq, c->a.grad_q, c->gq, tolerance);
	check("attention grad_k", c->nk, c->a.grad_k, c->gk, tolerance);
	noise = 0;
	check("attention grad_v", c->nk, c->a.grad_v, c->gv, tolerance);
	attention_outputs(&b);
	run_attention(&b, 1, scratch);
	check_same("attention by head", b.o, c->a.o, q);
	check_same("attention grad_q by head", b.grad_q, c->a.grad_q, q);
	check_same("attention grad_k by head", b.grad_k, c->a.grad_k, k);
	check_same("attention grad_v by head", b.grad_v, c->a.grad_v, k);
}

/* The rows from `past` on, with keys and values of those before. */
static void check_past(const struct attention *c, int past)
{
	struct moe_attention b = c->a;
	size_t rows = (size_t)past * (size_t)(b.heads * b.dim);
	void *scratch = mem(K->attention_scratch(b.dim));

	b.past = past;
	b.T -= past;
	b.q += rows;
	attention_outputs(&b);
	for (int t = 0; t < b.T; t += MOE_TOKEN_BLOCK)
		K->attention(&b, t, MOE_MIN(t + MOE_TOKEN_BLOCK, b.T), 0, b.heads, scratch);
	check("attention after others", c->nq - (int64_t)rows, b.o, c->o + rows, attention_tolerance());
	for (int h = 0; h < b.heads; h++)
		check("attention lse after others", b.T, b.lse + h * b.T, c->lse + h * c->a.T + past,
		      attention_tolerance());
}

static void attention_cases(void)
{
	static const int cases[][5] = { /* T, heads, kv_heads, dim, document length */
					{ 0, 2, 1, 8, 0 },     { 1, 1, 1, 4, 0 },
					{ 7, 4, 2, 6, 3 },     { 64, 2, 2, 16, 0 },
					{ 65, 3, 1, 5, 0 },    { 130, 8, 2, 32, 0 },
					{ 200, 4, 4, 16, 64 }, { 333, 4, 1, 8, 70 },
					{ 257, 2, 1, 64, 1 },  { 300, 6, 3, 10, 150 }
	};

	for (size_t i = 0; i < MOE_COUNT(cases); i++) {
		const int *s = cases[i];
		struct attention c = attention_case(s[0], s[1], s[2], s[3], s[4]);

		check_attention(&c);
		for (int past = 1; !s[4] && past < s[0]; past += 21)
			check_past(&c, past);
		release();
	}
}

static void test_attention(void)
{
	check_tables(attention_cases);
}

/* The reference's gradients against differences of its own forward. */
static void test_reference(void)
{
	struct attention c, d;
	float *x[3];

	random_state = moe_test_seed() | 1;
	c = attention_case(9, 4, 2, 3, 5);
	x[0] = (float *)c.a.q, x[1] = (float *)c.a.k, x[2] = (float *)c.a.v;
	for (int n = 0; n < 3; n++)
		for (int64_t i = 0; i < (n ? c.nk : c.nq); i += 2) {
			float at = x[n][i], step = 0x1p-9f;
			int kept = block_count;
			double loss = 0, *g = n == 0 ? c.gq : n == 1 ? c.gk : c.gv;

			for (int sign = 1; sign >= -1; sign -= 2) {
				d = c;
				x[n][i] = at + (float)sign * step;
				reference(&d);
				for (int64_t e = 0; e < c.nq; e++)
					loss += sign * d.o[e] * (double)c.a.grad_o[e];
				release_to(kept);
			}
			x[n][i] = at;
			CU_ASSERT_DOUBLE_EQUAL(loss / (2 * (double)step), g[i], 1e-4);
		}
	release();
}

/* Scores beyond exp's range; a NaN stays in its document. */
static void extreme_cases(void)
{
	struct attention c;
	float *q, *v;
	void *scratch;

	c = attention_case(128, 1, 1, 4, 64);
	scratch = mem(K->attention_scratch(4));
	q = (float *)c.a.q, v = (float *)c.a.v;
	for (int64_t i = 0; i < c.nq; i++)
		q[i] *= 1e4f;
	run_attention(&c.a, 1, scratch);
	for (int64_t i = 0; i < c.nq; i++)
		CU_ASSERT(fabsf(c.a.o[i]) <= 1.0001f + (float)attention_tolerance() &&
			  isfinite(c.a.grad_q[i]));
	v[3] = NAN; /* first token */
	run_attention(&c.a, 1, scratch);
	CU_ASSERT(isnan(c.a.o[3]) && !isnan(c.a.o[64 * 4 + 3]));
}

static void test_extremes(void)
{
	check_tables(extreme_cases);
}

struct caller {
	struct moe_attention a;
	void *scratch;
};

static void *call_attention(void *arg)
{
	struct caller *t = arg;

	for (int repeat = 0; repeat < 3; repeat++)
		run_attention(&t->a, 1, t->scratch);
	return NULL;
}

static void thread_cases(void)
{
	enum { THREADS = 4 };
	pthread_t id[THREADS];
	struct caller caller[THREADS + 1], *lone = &caller[THREADS];
	struct attention c;

	c = attention_case(200, 4, 2, 16, 80);
	for (int i = 0; i <= THREADS; i++) {
		caller[i].a = c.a;
		attention_outputs(&caller[i].a);
		caller[i].scratch = mem(K->attention_scratch(16));
	}
	call_attention(lone);
	for (int i = 0; i < THREADS; i++)
		CU_ASSERT_EQUAL_FATAL(pthread_create(&id[i], NULL, call_attention, &caller[i]), 0);
	for (int i = 0; i < THREADS; i++) {
		const struct moe_attention *a = &caller[i].a, *b = &lone->a;

		pthread_join(id[i], NULL);
		check_same("attention", a->o, b->o, (size_t)c.nq * sizeof(float));
		check_same("attention grad_q", a->grad_q, b->grad_q, (size_t)c.nq * sizeof(float));
		check_same("attention grad_k", a->grad_k, b->grad_k, (size_t)c.nk * sizeof(float));
		check_same("attention grad_v", a->grad_v, b->grad_v, (size_t)c.nk * sizeof(float));
	}
}

static void test_threads(void)
{
	check_tables(thread_cases);
}

const struct moe_test moe_suite_tests[] = {
	{ "the reference's gradients by differences", test_reference },
	{ "forward and backward; the same bits by head", test_attention },
	{ "scores beyond exp, NaN", test_extremes },
	{ "concurrent threads", test_threads },
	{ NULL, NULL },
};
