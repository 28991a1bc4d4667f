/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ops around the experts, every table in one run on one thread: attention by token blocks over
 * one document, dense GEMMs, loss, norms and packing. Prints the median of the thread's CPU time as
 * GFLOP/s or GB/s.
 *
 *	bench_dense [table] [tokens [heads [kv_heads [dim]]]]
 */
#include "bench/measure.h"
#include "codelets/kernels/kernels.h"

#include <cblas.h>
#include <stdio.h>

#define ROUNDS 11

static const struct moe_kernels *K;

static void *memory(size_t bytes)
{
	void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);

	if (!p)
		abort();
	memset(p, 0, bytes);
	return p;
}

static float *values(int64_t n, float scale)
{
	static uint64_t state = 88172645463325252u;
	float *p = memory((size_t)n * sizeof *p);

	for (int64_t i = 0; i < n; i++) {
		state ^= state << 13;
		state ^= state >> 7;
		state ^= state << 17;
		p[i] = scale * (float)((double)(int64_t)state * 0x1p-63);
	}
	return p;
}

/* Median seconds of run(arg), one call more first. */
static double seconds_of(void (*run)(void *), void *arg)
{
	double s[ROUNDS];

	run(arg);
	for (int i = 0; i < ROUNDS; i++) {
		double start = thread_seconds();

		run(arg);
		s[i] = thread_seconds() - start;
	}
	return median(s, ROUNDS);
}

static bool json; /* a line of JSON each */

static void show(const char *what, double amount, double seconds, const char *unit)
{
	if (json) {
		printf("{\"isa\": \"%s\", \"what\": \"%s\", \"rate\": %.1f, \"unit\": \"%s\", \"ms\": %.3f}\n", K->name,
		       what, amount / seconds * 1e-9, unit, 1e3 * seconds);
		return;
	}
	printf("%-13s %-18s %9.1f %s  (%.3f ms)\n", K->name, what, amount / seconds * 1e-9, unit,
	       1e3 * seconds);
}

struct attention {
	struct moe_attention a;
	void *scratch;
};

static void forward(void *arg)
{
	struct attention *t = arg;

	for (int q = 0; q < t->a.T; q += MOE_TOKEN_BLOCK)
		K->attention(&t->a, q, MOE_MIN(q + MOE_TOKEN_BLOCK, t->a.T), 0, t->a.heads,
			     t->scratch);
}

static void backward_q(void *arg)
{
	struct attention *t = arg;

	for (int q = 0; q < t->a.T; q += MOE_TOKEN_BLOCK)
		K->attention_bwd_q(&t->a, q, MOE_MIN(q + MOE_TOKEN_BLOCK, t->a.T), 0, t->a.heads,
				   t->scratch);
}

static void backward_kv(void *arg)
{
	struct attention *t = arg;

	for (int k = 0; k < t->a.T; k += MOE_TOKEN_BLOCK)
		K->attention_bwd_kv(&t->a, k, MOE_MIN(k + MOE_TOKEN_BLOCK, t->a.T), 0,
				    t->a.kv_heads, t->scratch);
}

static void attention(int T, int heads, int kv_heads, int dim)
{
	int64_t q = (int64_t)T * heads * dim, k = (int64_t)T * kv_heads * dim;
	struct attention t = { .a = { .T = T,
				      .heads = heads,
				      .kv_heads = kv_heads,
				      .dim = dim,
				      .scale = 1.0f / 8,
				      .doc_start = memory((size_t)T * sizeof(int32_t)),
				      .q = values(q, 1),
				      .k = values(k, 1),
				      .v = values(k, 1),
				      .o = values(q, 0),
				      .lse = values((int64_t)heads * T, 0),
				      .grad_o = values(q, 1),
				      .centre = values((int64_t)heads * T, 0),
				      .grad_q = values(q, 0),
				      .grad_k = values(k, 0),
				      .grad_v = values(k, 0) },
			       .scratch = memory(K->attention_scratch(dim)) };
	/* of what is seen: T (T + 1) / 2 pairs; one GEMM */
	double flops = (double)T * (T + 1) * heads * dim;

	show("attention", 2 * flops, seconds_of(forward, &t), "GFLOP/s");
	show("attention_bwd_q", 3 * flops, seconds_of(backward_q, &t), "GFLOP/s");
	show("attention_bwd_kv", 4 * flops, seconds_of(backward_kv, &t), "GFLOP/s");
	free((void *)t.a.doc_start);
	free((void *)t.a.q), free((void *)t.a.k), free((void *)t.a.v), free((void *)t.a.grad_o);
	free(t.a.o), free(t.a.lse), free(t.a.centre), free(t.a.grad_q), free(t.a.grad_k),
		free(t.a.grad_v);
	free(t.scratch);
}

struct dense {
	int m;
	int64_t n, k;
	struct moe_weight w;
	uint16_t *source;
	float *x, *y, *norm, *stat[3];
	int32_t *label;
	void *scratch;
};

static void linear(void *arg)
{
	struct dense *d = arg;

	K->linear(d->m, &d->w, 0, d->n, d->x, d->k, NULL, NULL, d->y, d->n, d->scratch);
}

static void linear_bwd(void *arg)
{
	struct dense *d = arg;

	K->linear_bwd(d->m, &d->w, d->y, d->n, NULL, d->x, d->k, false, d->scratch);
}

static void loss(void *arg)
{
	struct dense *d = arg;

	K->ce_partial(d->m, 0, d->n, d->y, d->n, d->label, d->stat[0], d->stat[1], d->stat[2]);
}

static void loss_bwd(void *arg)
{
	struct dense *d = arg;

	K->ce_bwd(d->m, 0, d->n, d->y, d->n, d->label, d->stat[0], 0);
}

static void norm(void *arg)
{
	struct dense *d = arg;

	K->rmsnorm(d->m, (int)d->k, d->x, d->k, d->norm, 1e-6f, d->y, d->k);
}

static void norm_bwd(void *arg)
{
	struct dense *d = arg;

	K->rmsnorm_bwd(d->m, (int)d->k, d->x, d->k, d->norm, 1e-6f, d->x, d->k, d->y, d->k, false);
}

/* Matrices that take turns, so that none is in a cache when its turn comes. */
#define TURNS 8

struct cold {
	int64_t n, k;
	uint16_t *source[TURNS];
	struct moe_weight w[TURNS];
	int turn;
};

static void pack(void *arg)
{
	struct cold *c = arg;
	int i = c->turn++ % TURNS;

	K->weight_pack(&c->w[i], c->source[i], MOE_BF16, c->n, c->k, c->k, MOE_USE_GEMM);
}

static void copy(void *arg)
{
	struct cold *c = arg;
	int i = c->turn++ % TURNS;

	memcpy(c->w[i].data, c->source[i], (size_t)(c->n * c->k) * sizeof *c->source[i]);
}

static void packing(int64_t n, int64_t k)
{
	size_t bytes = (size_t)(n * k) * sizeof(uint16_t);
	struct cold c = { .n = n, .k = k };

	for (int i = 0; i < TURNS; i++) {
		c.source[i] = memory(bytes);
		c.w[i].data = memory(MOE_MAX(bytes, K->weight_bytes(MOE_BF16, n, k, MOE_USE_GEMM)));
	}
	show("pack", (double)bytes, seconds_of(pack, &c), "GB/s");
	show("memcpy", (double)bytes, seconds_of(copy, &c), "GB/s");
	for (int i = 0; i < TURNS; i++) {
		free(c.source[i]);
		free(c.w[i].data);
	}
}

static void dense(int m, int64_t n, int64_t k)
{
	size_t bytes = (size_t)(n * k) * sizeof(uint16_t);
	double flops = 2.0 * m * (double)n * (double)k, y = 4.0 * m * (double)n,
	       x = 4.0 * m * (double)k;
	struct dense d = { .m = m, .n = n, .k = k, .source = memory(bytes) };

	d.w.data = memory(K->weight_bytes(MOE_BF16, n, k, MOE_USE_GEMM));
	d.x = values(m * k, 1), d.y = values(m * MOE_MAX(n, k), 0), d.norm = values(k, 1);
	d.label = memory((size_t)m * sizeof *d.label);
	for (int i = 0; i < 3; i++)
		d.stat[i] = values(m, 0);
	d.scratch = memory(K->linear_scratch(m, n, k, 0));
	if (!json)
		printf("n %lld, k %lld, %d rows\n", (long long)n, (long long)k, m);
	packing(n, k);
	K->weight_pack(&d.w, d.source, MOE_BF16, n, k, k, MOE_USE_GEMM);
	show("linear", flops, seconds_of(linear, &d), "GFLOP/s");
	show("linear_bwd", flops, seconds_of(linear_bwd, &d), "GFLOP/s");
	show("ce_partial", y, seconds_of(loss, &d), "GB/s read");
	show("ce_bwd", y, seconds_of(loss_bwd, &d), "GB/s read");
	show("rmsnorm", x, seconds_of(norm, &d), "GB/s read");
	show("rmsnorm_bwd", x, seconds_of(norm_bwd, &d), "GB/s read");
	for (int i = 0; i < 3; i++)
		free(d.stat[i]);
	free(d.source), free(d.w.data), free(d.x), free(d.y), free(d.norm);
	free(d.label), free(d.scratch);
}

int main(int argc, char **argv)
{
	const char *name = argc > 1 && strcmp(argv[1], "all") ? argv[1] : NULL;
	int shape[4] = { 1024, 8, 2, 128 };

	if (argc > 1 && !strcmp(argv[argc - 1], "--json")) {
		json = true;
		argc--;
		name = argc > 1 ? name : NULL;
	}
	for (int i = 2; i < argc && i < 6; i++)
		shape[i - 2] = atoi(argv[i]);
	openblas_set_num_threads(1);
	for (int i = 0; moe_kernels_list[i]; i++) {
		K = moe_kernels_list[i];
		if ((name && strcmp(name, K->name)) || !K->supported() ||
		    (K->enable && !K->enable()))
			continue;
		attention(shape[0], shape[1], shape[2], shape[3]);
		dense(MOE_TOKEN_BLOCK, MOE_VOCAB_CHUNK, 2048);
	}
	return 0;
}
