/* SPDX-License-Identifier: Apache-2.0 */
/* A training step of several layers, submitted whole: rows whose order the engine keeps, one
 * optimizer. */
#include "tests/layer_check.h"
#include "tests/trace_good.h"

#include <limits.h>
#include <math.h>

const char moe_suite_name[] = "layer_step";

enum { LAYERS = 3, MICRO = 3, STEPS = 2, TOKENS = 70 };

/* How a chain is trained. */
struct way {
	bool whole; /* all steps are submitted before any task runs */
	int workers;
	int lora_rank;
	bool base;
	double clip;
	const char *backward;
};

struct chain {
	struct moe_engine *e;
	struct moe_expert_layer *l[LAYERS];
	struct block_data d[LAYERS];	/* weights */
	struct block_data micro[MICRO]; /* tokens and routing */
	float *rows[MICRO][LAYERS + 1], *grads[MICRO][LAYERS + 1];
	struct moe_rows *order[2 * MICRO * (LAYERS + 1)];
	struct moe_optimizer *optimizer;
};

static struct block_case chain_case(const struct way *w, int seed)
{
	return (struct block_case){ .E = 5,
				    .k = 2,
				    .H = 40,
				    .I = 36,
				    .T = TOKENS,
				    .r = w->lora_rank,
				    .seed = (uint64_t)seed,
				    .group_size = 2,
				    .base_grads = w->base,
				    .backward = w->backward };
}

static void chain_make(struct chain *c, const struct way *w)
{
	int n = 0;

	memset(c, 0, sizeof *c);
	c->e = layer_engine(w->workers, 1);
	for (int i = 0; i < LAYERS; i++) {
		struct block_case bc = chain_case(w, 3 + i);
		struct moe_experts_params p;

		block_data_make(&c->d[i], &bc);
		p = layer_params(&c->d[i].c);
		p.layer = i;
		p.micro_batches = 2;
		p.max_cache_depth = MICRO * STEPS;
		c->l[i] = layer_make(c->e, &c->d[i], &p);
	}
	for (int m = 0; m < MICRO; m++) {
		struct block_case bc = chain_case(w, 50 + m);

		block_data_make(&c->micro[m], &bc);
		for (int i = 0; i <= LAYERS; i++) {
			c->rows[m][i] = i ? calloc(TOKENS * 40, sizeof(float)) : c->micro[m].x;
			c->grads[m][i] = i < LAYERS ? calloc(TOKENS * 40, sizeof(float))
						    : c->micro[m].grad_out;
			CHECK_OK(moe_rows_create(c->e, c->rows[m][i], TOKENS, &c->order[n++]));
			CHECK_OK(moe_rows_create(c->e, c->grads[m][i], TOKENS, &c->order[n++]));
		}
	}
	CHECK_OK(moe_optimizer_create(c->e, c->l, LAYERS, &c->optimizer));
}

static void chain_free(struct chain *c)
{
	moe_optimizer_destroy(c->optimizer);
	for (size_t i = 0; i < MOE_COUNT(c->order); i++)
		moe_rows_destroy(c->order[i]);
	for (int i = 0; i < LAYERS; i++) {
		moe_experts_destroy(c->l[i]);
		block_data_free(&c->d[i]);
	}
	for (int m = 0; m < MICRO; m++) {
		for (int i = 0; i < LAYERS; i++)
			free(c->rows[m][i + 1]), free(c->grads[m][i]);
		block_data_free(&c->micro[m]);
	}
	CHECK_OK(moe_engine_close(c->e));
}

static void chain_micro(struct chain *c, int m, bool whole)
{
	struct layer_call a = layer_call(&c->micro[m], TOKENS);

	for (int i = 0; i < LAYERS; i++) {
		struct moe_array x = matrix_of(c->rows[m][i], MOE_F32, TOKENS, 40);
		struct moe_array out = matrix_of(c->rows[m][i + 1], MOE_F32, TOKENS, 40);

		CHECK_OK((whole ? moe_experts_forward_async
				: moe_experts_forward)(c->l[i], &x, &a.ids, &a.weights, 1, &out));
	}
	for (int i = LAYERS - 1; i >= 0; i--) {
		struct moe_array out = matrix_of(c->grads[m][i + 1], MOE_F32, TOKENS, 40);
		struct moe_array x = matrix_of(c->grads[m][i], MOE_F32, TOKENS, 40);

		CHECK_OK((whole ? moe_experts_backward_async : moe_experts_backward)(c->l[i], &out,
										     1, &x, NULL));
	}
}

/* Output of the last forward, gradient of its x, all that was trained. */
static uint64_t chain_hash(struct chain *c, const struct way *w)
{
	uint64_t h = hash_of(1, c->rows[MICRO - 1][LAYERS], sizeof(float) * TOKENS * 40);

	h = hash_of(h, c->grads[0][0], sizeof(float) * TOKENS * 40);
	for (int i = 0; i < LAYERS; i++)
		for (int j = 0; j < BLOCK_WEIGHTS; j++) {
			bool base = j <= (int)MOE_BLOCK_DOWN_PROJ;
			double *v;

			if (base ? !w->base
				 : !w->lora_rank || j < (int)MOE_BLOCK_GATE_LORA_A ||
					    j > (int)MOE_BLOCK_DOWN_LORA_B)
				continue;
			v = layer_get(c->l[i], &c->d[i].c, (enum moe_block_array)j, false);
			h = hash_of(h, v, sizeof *v * (size_t)c->d[i].n[j]);
			free(v);
		}
	return h;
}

static uint64_t train(const struct way *w)
{
	struct moe_adamw_params adamw = adamw_default();
	struct moe_trace_params trace = { .struct_size = sizeof trace };
	char file[PATH_MAX];
	struct chain c;
	double norm = 0;
	uint64_t h;

	chain_make(&c, w);
	for (int m = 0; m < 2; m++) /* buffers of both micro-batches, outside the trace */
		chain_micro(&c, m, false);
	for (int i = 0; i < LAYERS; i++)
		CHECK_OK(moe_experts_release_gradients(c.l[i]));
	snprintf(file, sizeof file, "%s/step.mxt", moe_test_dir());
	trace.file = file;
	adamw.max_grad_norm = w->clip;
	CHECK_OK(moe_trace_start(c.e, &trace));
	if (w->whole)
		CHECK_OK(moe_engine_hold(c.e));
	for (int s = 0; s < STEPS; s++) {
		for (int m = 0; m < MICRO; m++)
			chain_micro(&c, m, w->whole);
		CHECK_OK(moe_optimizer_step(c.optimizer, &adamw));
		if (!w->whole)
			CHECK_OK(moe_optimizer_wait(c.optimizer, s + 1, NULL));
	}
	if (w->whole) {
		CHECK_ERROR(moe_optimizer_wait(c.optimizer, 1, NULL), MOE_ERR_STATE, "held");
		CHECK_OK(moe_engine_release(c.e));
	}
	CHECK_OK(moe_optimizer_wait(c.optimizer, 0, &norm));
	CHECK(w->clip > 0 ? norm > w->clip : isnan(norm));
	for (int i = 0; i < LAYERS; i++) {
		CHECK_OK(moe_experts_wait(c.l[i]));
		CHECK(layer_window(c.l[i]) == MOE_WINDOW_CLOSED);
	}
	h = chain_hash(&c, w);
	CHECK_OK(moe_trace_stop(c.e, NULL));
	CHECK(trace_is_good(file, false, true));
	chain_free(&c);
	return h;
}

/* Two steps that are submitted whole while nothing runs give the bits of call after call on one
 * worker. */
static void whole_one(void)
{
	const char *const modes[] = { "direct", table()->weight_transpose ? "shared:2" : "direct",
				      table()->weight_transpose ? "resident" : "direct" };

	for (int i = 0; i < 4; i++) {
		struct way w = { .workers = 1,
				 .lora_rank = i ? 0 : 3,
				 .base = i > 0,
				 .clip = i & 1 ? 0 : 1e-3,
				 .backward = modes[i % 3] };
		uint64_t alone = train(&w);

		w.workers = 2;
		CHECK(train(&w) == alone);
		w.whole = true;
		CHECK(train(&w) == alone);
	}
}

static void whole(void)
{
	each_table(whole_one);
}

/* ---- clipping ---- */

enum { PAIR = 2 };

struct pair {
	struct moe_engine *e;
	struct moe_expert_layer *l[PAIR];
	struct block_data d[PAIR];
};

/* Two layers of different shapes, one with LoRA and base weights, one with base weights only. */
static void pair_make(struct pair *p)
{
	p->e = layer_engine(2, 1);
	for (int i = 0; i < PAIR; i++) {
		struct block_case c = { .E = 3 + i,
					.k = 2,
					.H = 24,
					.I = 20 + 8 * i,
					.T = 9,
					.r = i ? 0 : 3,
					.seed = 20 + (uint64_t)i,
					.group_size = 2,
					.base_grads = true,
					.backward = "direct" };

		block_data_make(&p->d[i], &c);
		p->l[i] = layer_make(p->e, &p->d[i], NULL);
	}
}

static void pair_free(struct pair *p)
{
	for (int i = 0; i < PAIR; i++) {
		moe_experts_destroy(p->l[i]);
		block_data_free(&p->d[i]);
	}
	CHECK_OK(moe_engine_close(p->e));
}

static void pair_passes(struct pair *p, double scale)
{
	for (int i = 0; i < PAIR; i++) {
		CHECK_OK(layer_forward(p->l[i], &p->d[i], true));
		CHECK_OK(layer_backward(p->l[i], &p->d[i], scale));
	}
}

static bool pair_trains(const struct pair *p, int i, int which)
{
	return which <= (int)MOE_BLOCK_DOWN_PROJ ||
	       (p->d[i].c.r && which >= (int)MOE_BLOCK_GATE_LORA_A &&
		which <= (int)MOE_BLOCK_DOWN_LORA_B);
}

/* All that is trained, or its gradients, in one array of `count` values; free it. */
static double *pair_values(struct pair *p, bool gradient, int64_t *count)
{
	double *all = NULL;

	*count = 0;
	for (int i = 0; i < PAIR; i++)
		for (int j = 0; j < BLOCK_WEIGHTS; j++) {
			double *v;

			if (!pair_trains(p, i, j))
				continue;
			v = layer_get(p->l[i], &p->d[i].c, (enum moe_block_array)j, gradient);
			all = realloc(all, (size_t)(*count + p->d[i].n[j]) * sizeof *all);
			memcpy(all + *count, v, (size_t)p->d[i].n[j] * sizeof *v);
			*count += p->d[i].n[j];
			free(v);
		}
	return all;
}

/* A large eps: updates are nearly proportional to the gradient, so that its scale shows. */
static struct moe_adamw_params proportional(void)
{
	struct moe_adamw_params a = adamw_default();

	a.eps = 1;
	a.learning_rate = .1;
	return a;
}

/* The norm is of all layers' gradients; clipped ones are those of a smaller scale. */
static void clipping_one(void)
{
	struct moe_adamw_params adamw = proportional();
	struct moe_optimizer *o;
	struct pair p;
	double norm, sum = 0, factor, *g, *clipped, *scaled;
	int64_t n;

	pair_make(&p);
	CHECK_OK(moe_optimizer_create(p.e, p.l, PAIR, &o));
	pair_passes(&p, 1);
	pair_passes(&p, .5); /* another scale in the open window */
	g = pair_values(&p, true, &n);
	for (int64_t i = 0; i < n; i++)
		sum += g[i] * g[i];
	adamw.max_grad_norm = sqrt(sum) / 4;
	CHECK_OK(moe_optimizer_step(o, &adamw));
	CHECK_OK(moe_optimizer_wait(o, 1, &norm));
	CHECK(fabs(norm - sqrt(sum)) <= 1e-5 * norm);
	factor = adamw.max_grad_norm / (norm + 1e-6);
	free(g);
	clipped = pair_values(&p, false, &n);
	moe_optimizer_destroy(o);
	pair_free(&p);

	pair_make(&p);
	pair_passes(&p, factor);
	pair_passes(&p, .5 * factor);
	adamw.max_grad_norm = 0;
	for (int i = 0; i < PAIR; i++)
		CHECK_OK(moe_experts_update(p.l[i], &adamw));
	scaled = pair_values(&p, false, &n);
	CHECK(relative_error(clipped, scaled, n) <= 1e-6);
	free(scaled), free(clipped);
	pair_free(&p);
}

static void clipping(void)
{
	each_table(clipping_one);
}

/* A gradient that is not finite: the norm says so, and nothing is updated. */
static void not_finite(void)
{
	struct moe_adamw_params adamw = proportional();
	struct moe_optimizer *o;
	struct pair p;
	double norm, *before, *after;
	int64_t n;

	pair_make(&p);
	CHECK_OK(moe_optimizer_create(p.e, p.l, PAIR, &o));
	before = pair_values(&p, false, &n);
	p.d[1].grad_out[5] = NAN;
	pair_passes(&p, 1);
	adamw.max_grad_norm = 1;
	CHECK_OK(moe_optimizer_step(o, &adamw));
	CHECK_OK(moe_optimizer_wait(o, 0, &norm));
	CHECK(isnan(norm));
	after = pair_values(&p, false, &n);
	CHECK(!memcmp(before, after, (size_t)n * sizeof *after));
	free(before), free(after);
	moe_optimizer_destroy(o);
	pair_free(&p);
}

/* ---- errors ---- */

static void errors(void)
{
	struct moe_adamw_params adamw = adamw_default();
	struct moe_expert_layer *twice[2];
	struct moe_experts_params params;
	struct moe_expert_layer *none;
	struct moe_rows *rows, *again;
	struct moe_optimizer *o;
	struct layer_call a;
	struct pair p;

	pair_make(&p);
	CHECK_ERROR(moe_optimizer_create(p.e, p.l, 0, &o), MOE_ERR_ARG, "0 layers");
	twice[0] = twice[1] = p.l[0];
	CHECK_ERROR(moe_optimizer_create(p.e, twice, 2, &o), MOE_ERR_ARG, "0 and 1 are the same");
	twice[1] = NULL;
	CHECK_ERROR(moe_optimizer_create(p.e, twice, 2, &o), MOE_ERR_ARG, "layer 1 of 2 is NULL");
	CHECK_OK(moe_optimizer_create(p.e, p.l, PAIR, &o));
	CHECK_ERROR(moe_optimizer_step(o, &adamw), MOE_ERR_STATE, "needs a backward");
	CHECK_OK(layer_forward(p.l[0], &p.d[0], true));
	CHECK_OK(layer_backward(p.l[0], &p.d[0], 1));
	CHECK_ERROR(moe_optimizer_step(o, &adamw), MOE_ERR_STATE,
		    "needs a backward"); /* of the other layer */
	CHECK(layer_window(p.l[0]) == MOE_WINDOW_OPEN);
	adamw.max_grad_norm = NAN;
	CHECK_ERROR(moe_optimizer_step(o, &adamw), MOE_ERR_ARG, "max_grad_norm");
	adamw.max_grad_norm = 0;
	adamw.beta1 = 2;
	CHECK_ERROR(moe_optimizer_step(o, &adamw), MOE_ERR_ARG, "beta1 2");
	CHECK_ERROR(moe_optimizer_wait(o, 1, NULL), MOE_ERR_ARG, "step 1; 0 (the last one) to 0");
	CHECK_OK(moe_optimizer_wait(o, 0, NULL));
	CHECK_ERROR(moe_rows_create(p.e, NULL, 9, &rows), MOE_ERR_ARG, "no data");
	CHECK_ERROR(moe_rows_create(p.e, p.d[0].x, 0, &rows), MOE_ERR_ARG, "0 tokens");
	CHECK_OK(moe_rows_create(p.e, p.d[0].x, 8, &rows));
	CHECK_ERROR(moe_rows_create(p.e, p.d[0].x, 9, &again), MOE_ERR_ARG, "kept already");
	CHECK_ERROR(layer_forward(p.l[0], &p.d[0], true), MOE_ERR_ARG, "x has 9 rows");
	moe_rows_destroy(rows);
	CHECK_OK(layer_forward(p.l[0], &p.d[0], true));
	/* one micro-batch at a time: a second backward has to wait */
	a = layer_call(&p.d[0], 9);
	CHECK_OK(moe_experts_backward_async(p.l[0], &a.grad_out, 1, &a.grad_x, NULL));
	CHECK_OK(moe_experts_forward_async(p.l[0], &a.x, &a.ids, &a.weights, 1, &a.out));
	CHECK_ERROR(moe_experts_backward_async(p.l[0], &a.grad_out, 1, &a.grad_x, NULL),
		    MOE_ERR_STATE, "pending");
	params = layer_params(&p.d[0].c);
	params.micro_batches = 3;
	CHECK_ERROR(moe_experts_create(p.e, &params, &none), MOE_ERR_ARG, "3 micro_batches");
	moe_optimizer_destroy(o);
	pair_free(&p);
}

/* Allocations that fail leave an error and an object that can be destroyed. */
static void allocations(void)
{
	struct moe_adamw_params adamw = adamw_default();
	struct moe_optimizer *o = NULL;
	struct moe_rows *rows = NULL;
	struct pair p;
	int n;

	pair_make(&p);
	for (n = 1; n < 2000 && !o; n++) {
		moe_alloc_fail_after(n);
		if (moe_optimizer_create(p.e, p.l, PAIR, &o) != MOE_OK)
			CHECK(o == NULL);
		moe_alloc_fail_after(-1);
	}
	CHECK(n > 5 && o);
	for (n = 1; n < 100 && !rows; n++) {
		moe_alloc_fail_after(n);
		if (moe_rows_create(p.e, p.d[0].x, 9, &rows) != MOE_OK)
			CHECK(rows == NULL);
		moe_alloc_fail_after(-1);
	}
	CHECK(n > 2 && rows);
	adamw.max_grad_norm = 1;
	for (n = 1; n < 2000; n += 3) {
		enum moe_status st;

		pair_passes(&p, 1);
		moe_alloc_fail_after(n);
		st = moe_optimizer_step(o, &adamw);
		moe_alloc_fail_after(-1);
		if (st == MOE_OK)
			break;
		CHECK_ERROR(st, MOE_ERR_NOMEM, "applied in part");
	}
	CHECK(n > 5 && n < 2000);
	CHECK_OK(moe_optimizer_wait(o, 0, NULL));
	moe_rows_destroy(rows);
	moe_optimizer_destroy(o);
	pair_free(&p);
}

/* ---- pages ---- */

static int64_t touched(struct moe_expert_layer *l)
{
	struct moe_experts_info info = { .struct_size = sizeof info };

	CHECK_OK(moe_experts_get_info(l, &info));
	CHECK((info.touched_bytes > 0) == (info.touch_seconds > 0));
	return info.touched_bytes;
}

/* Whose moments pages are mapped ahead, and that nobody's are who does not use them. */
static void pages(void)
{
	struct moe_engine *e = layer_engine(2, 2);
	/* a part's matrix takes 2 MiB of f32; smaller arrays lie in the heap */
	struct moe_experts_params p = { .struct_size = sizeof p,
					.experts = 2,
					.experts_per_token = 1,
					.hidden = 1024,
					.intermediate = 512,
					.train_base = 1 };
	const int64_t matrices = (int64_t)3 * 2 * 1024 * 512 * 4;
	struct moe_expert_layer *trained = NULL, *frozen = NULL;
	struct moe_optimizer *o = NULL;

	CHECK_OK(moe_experts_create(e, &p, &trained));
	CHECK(touched(trained) == matrices);
	CHECK_OK(moe_optimizer_create(e, &trained, 1, &o));
	CHECK(touched(trained) == 3 * matrices);
	moe_optimizer_destroy(o);
	CHECK_OK(moe_optimizer_create(e, &trained, 1, &o));
	CHECK(touched(trained) == 3 * matrices);
	moe_optimizer_destroy(o);
	p.train_base = 0;
	CHECK_OK(moe_experts_create(e, &p, &frozen));
	CHECK(touched(frozen) == 0);
	moe_experts_destroy(frozen);
	moe_experts_destroy(trained);
	CHECK_OK(moe_engine_close(e));
}

const struct moe_test moe_suite_tests[] = {
	{ "steps submitted whole", whole },
	{ "clipping over layers", clipping },
	{ "gradients that are not finite", not_finite },
	{ "errors", errors },
	{ "failing allocations", allocations },
	{ "pages mapped ahead", pages },
	{ NULL, NULL },
};
