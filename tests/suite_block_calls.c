/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of the block object: their order, what is refused and changes nothing, asynchronous chains, a held engine. */
#include "engine/engine.h"
#include "tests/block_check.h"
#include "tests/tables.h"

#include <math.h>

const char moe_suite_name[] = "block_calls";

static void order(void)
{
	struct block_case c = {
		.E = 4, .k = 2, .H = 20, .I = 12, .T = 30, .r = 2, .base_grads = true
	};
	struct moe_adamw_params adamw = adamw_default();
	struct moe_engine *e = open_with(2, 2, NULL);
	struct block_data d;
	struct moe_block *b, *fresh;
	double *once, *twice;
	struct moe_block_params p = block_params_of(&c);

	block_data_make(&d, &c);
	CHECK_OK(moe_block_create(e, &p, &b));
	CHECK_ERROR(block_forward(b, &d, true, d.out), MOE_ERR_STATE, "gate_proj was never set");
	CHECK_OK(block_fill(b, &d));
	CHECK_ERROR(block_backward(b, &d), MOE_ERR_STATE, "backward needs a forward");
	CHECK_ERROR(moe_block_update(b, &adamw), MOE_ERR_STATE, "update needs a backward");
	CHECK_OK(block_forward(b, &d, false, d.out));
	CHECK_ERROR(block_backward(b, &d), MOE_ERR_STATE, "forward with save");
	CHECK_ERROR(moe_block_get_gradient(b, MOE_BLOCK_GATE_LORA_A,
					   &(struct moe_array){ .data = d.w[MOE_BLOCK_GATE_LORA_A],
								.ndim = 3,
								.shape = { c.E, c.r, c.H } }),
		    MOE_ERR_STATE, "no gradients");
	/* the second of two forwards counts */
	d.x[0] += 1;
	CHECK_OK(block_forward(b, &d, true, d.out));
	d.x[0] -= 1;
	CHECK_OK(block_forward(b, &d, true, d.out));
	CHECK_OK(block_backward(b, &d));
	CHECK_ERROR(block_backward(b, &d), MOE_ERR_STATE, "backward needs a forward");
	once = block_get(b, &c, MOE_BLOCK_DOWN_LORA_A, true);
	CHECK_OK(block_forward(b, &d, true, d.out));
	CHECK_OK(block_backward(b, &d));
	twice = block_get(b, &c, MOE_BLOCK_DOWN_LORA_A, true);
	for (int64_t i = 0; i < d.n[MOE_BLOCK_DOWN_LORA_A]; i++)
		once[i] *= 2;
	CHECK(relative_error(twice, once, d.n[MOE_BLOCK_DOWN_LORA_A]) <= 1e-6);
	/* zeroed gradients start again */
	CHECK_OK(moe_block_zero_gradients(b));
	CHECK_ERROR(moe_block_update(b, &adamw), MOE_ERR_STATE, "update needs a backward");
	fresh = block_make(e, &c, &d, NULL);
	CHECK(block_step(b, &d, 1) == block_step(fresh, &d, 1));
	CHECK_ERROR(moe_block_update(b, &adamw), MOE_ERR_STATE, "update needs a backward");
	free(once), free(twice);
	moe_block_destroy(b);
	moe_block_destroy(fresh);
	moe_block_destroy(NULL);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* ---- what is refused, and that it changes nothing ---- */

struct refusal {
	struct moe_block *b;
	struct moe_array x, ids, w, out;
};

static enum moe_status try_forward(struct refusal r)
{
	return moe_block_forward(r.b, &r.x, &r.ids, &r.w, 1, &r.out);
}

static void refused_forwards(struct moe_block *b, struct block_data *d)
{
	const struct block_case *c = &d->c;
	int32_t *bad = malloc((size_t)(c->T * c->k) * sizeof *bad);
	struct refusal good = { b, matrix_of(d->x, MOE_F32, c->T, c->H),
				matrix_of(d->ids, MOE_I32, c->T, c->k),
				matrix_of(d->weights, MOE_F32, c->T, c->k),
				matrix_of(d->out, MOE_F32, c->T, c->H) },
		       r;

#define REFUSED(change, text)                                                                      \
	r = good;                                                                                  \
	change;                                                                                    \
	CHECK_ERROR(try_forward(r), MOE_ERR_ARG, text)
	REFUSED(r.x.shape[1]++, "x has shape [30, 21]; [30, 20]");
	REFUSED(r.x.ndim = 1, "x has shape");
	REFUSED(r.x.ndim = 9, "9 dimensions");
	REFUSED(r.x.ndim = -1, "-1 dimensions");
	REFUSED(r.x.shape[0] = -1, "x has shape [-1");
	REFUSED(r.x.data = NULL, "x has no data");
	REFUSED(r.x.dtype = MOE_I32, "x has dtype I32");
	REFUSED(r.x.dtype = (enum moe_dtype)99, "x has dtype ?");
	REFUSED(r.x.dtype = (enum moe_dtype) - 1, "x has dtype ?");
	REFUSED(r.out.shape[0]--, "out has shape");
	REFUSED(r.out.dtype = MOE_F8_E4M3, "out has dtype");
	REFUSED(r.out.data = NULL, "out has no data");
	REFUSED(r.ids.shape[1]++, "ids has shape");
	REFUSED(r.ids.dtype = MOE_F32, "ids have dtype F32");
	REFUSED(r.w.dtype = MOE_I64, "weights has dtype I64");
	REFUSED(r.w.shape[0]++, "weights has shape");
	for (int at = 0; at < c->T * c->k; at += 7) {
		memcpy(bad, d->ids, (size_t)(c->T * c->k) * sizeof *bad);
		bad[at] = at % 2 ? c->E : -2;
		REFUSED(r.ids.data = bad, "there are 4 experts");
	}
#undef REFUSED
	CHECK_ERROR(moe_block_forward(b, NULL, &good.ids, &good.w, 1, &good.out), MOE_ERR_ARG,
		    "x is NULL");
	CHECK_ERROR(moe_block_forward(b, &good.x, NULL, &good.w, 1, &good.out), MOE_ERR_ARG,
		    "ids is NULL");
	CHECK_ERROR(moe_block_forward(b, &good.x, &good.ids, NULL, 1, &good.out), MOE_ERR_ARG,
		    "weights is NULL");
	CHECK_ERROR(moe_block_forward(b, &good.x, &good.ids, &good.w, 1, NULL), MOE_ERR_ARG,
		    "out is NULL");
	CHECK_ERROR(moe_block_forward(NULL, &good.x, &good.ids, &good.w, 1, &good.out), MOE_ERR_ARG,
		    "block is NULL");
	r = good; /* sizes that cannot be */
	r.x.shape[0] = r.out.shape[0] = r.ids.shape[0] = r.w.shape[0] = INT64_MAX / 64;
	CHECK_ERROR(try_forward(r), MOE_ERR_ARG, "at most");
	free(bad);
}

static void refused_backwards(struct moe_block *b, struct block_data *d)
{
	const struct block_case *c = &d->c;
	struct moe_array go = matrix_of(d->grad_out, MOE_F32, c->T, c->H), gx = go;
	struct moe_array gw = matrix_of(d->grad_weights, MOE_F32, c->T, c->k), a;

	gx.data = d->grad_x;
	a = go, a.shape[0]++;
	CHECK_ERROR(moe_block_backward(b, &a, &gx, &gw), MOE_ERR_ARG, "grad_out has shape");
	a = go, a.dtype = MOE_U8;
	CHECK_ERROR(moe_block_backward(b, &a, &gx, &gw), MOE_ERR_ARG, "grad_out has dtype");
	CHECK_ERROR(moe_block_backward(b, NULL, &gx, &gw), MOE_ERR_ARG, "grad_out is NULL");
	a = gx, a.shape[1]--;
	CHECK_ERROR(moe_block_backward(b, &go, &a, &gw), MOE_ERR_ARG, "grad_x has shape");
	CHECK_ERROR(moe_block_backward(b, &go, NULL, &gw), MOE_ERR_ARG, "grad_x is NULL");
	a = gw, a.ndim = 3;
	CHECK_ERROR(moe_block_backward(b, &go, &gx, &a), MOE_ERR_ARG, "grad_weights has shape");
}

static void refused_arrays(struct moe_block *b, const struct block_case *c)
{
	float data[4] = { 0 };
	struct moe_array a = { .data = data, .ndim = 3, .shape = { c->E, c->I, c->H } }, s;

	s = a, s.shape[0]++;
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &s), MOE_ERR_ARG,
		    "gate_proj has shape [5, 12, 20]");
	s = a, s.ndim = 2;
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &s), MOE_ERR_ARG,
		    "[4, 12, 20] is expected");
	s = a, s.ndim = 77;
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &s), MOE_ERR_ARG, "has shape");
	s = a, s.data = NULL;
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &s), MOE_ERR_ARG, "no data");
	s = a, s.dtype = MOE_I8;
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &s), MOE_ERR_ARG, "dtype I8");
	s = a, s.strides[2] = 2, s.strides[1] = 40, s.strides[0] = 480;
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &s), MOE_ERR_ARG, "contiguous");
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, NULL), MOE_ERR_ARG, "NULL");
	CHECK_ERROR(moe_block_set(NULL, MOE_BLOCK_GATE_PROJ, &a), MOE_ERR_ARG, "NULL");
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_ARRAYS, &a), MOE_ERR_ARG, "unknown");
	CHECK_ERROR(moe_block_set(b, (enum moe_block_array) - 1, &a), MOE_ERR_ARG, "unknown");
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_ROUTER, &a), MOE_ERR_ARG, "no router");
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_SHARED_UP, &a), MOE_ERR_ARG, "no shared_up");
	CHECK_ERROR(moe_block_get(b, MOE_BLOCK_ROUTER_LOGITS, &a), MOE_ERR_ARG, "no router_logits");
	CHECK_ERROR(moe_block_get(b, MOE_BLOCK_GATE_PROJ, &a), MOE_ERR_UNSUPPORTED, "read back");
	s = matrix_of(data, MOE_F32, 30, c->k);
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_TOPK_WEIGHTS, &s), MOE_ERR_ARG, "only be read");
	s.dtype = MOE_BF16;
	CHECK_ERROR(moe_block_get(b, MOE_BLOCK_TOPK_WEIGHTS, &s), MOE_ERR_ARG, "dtype BF16");
}

static void refusals(void)
{
	struct block_case c = { .E = 4, .k = 2, .H = 20, .I = 12, .T = 30, .r = 2 };
	struct moe_engine *e = open_with(2, 2, NULL);
	struct moe_adamw_params adamw = adamw_default(), bad;
	struct block_data d;
	struct moe_block *b, *other;
	uint64_t want;

	block_data_make(&d, &c);
	other = block_make(e, &c, &d, NULL);
	want = block_step(other, &d, 1);
	want = block_step(other, &d, want);
	b = block_make(e, &c, &d, NULL);
	CHECK(block_step(b, &d, 1) != 0);
	CHECK_OK(block_forward(b, &d, true, d.out));
	/* all of these in between change neither the saved forward nor the weights */
	refused_forwards(b, &d);
	refused_backwards(b, &d);
	refused_arrays(b, &c);
#define BAD(change, text)                                                                          \
	bad = adamw;                                                                               \
	change;                                                                                    \
	CHECK_ERROR(moe_block_update(b, &bad), MOE_ERR_ARG, text)
	BAD(bad.struct_size = 8, "struct_size");
	BAD(bad.learning_rate = NAN, "learning_rate nan");
	BAD(bad.learning_rate = -1, "learning_rate -1");
	BAD(bad.beta1 = 1, "beta1 1");
	BAD(bad.beta2 = -.1, "beta2 -0.1");
	BAD(bad.eps = INFINITY, "eps inf");
	BAD(bad.step = -3, "step -3");
#undef BAD
	CHECK_ERROR(moe_block_update(b, NULL), MOE_ERR_ARG, "struct_size");
	CHECK_OK(block_backward(b, &d));
	moe_block_destroy(b);
	b = block_make(e, &c, &d, NULL);
	CHECK(block_step(b, &d, block_step(b, &d, 1)) == want);
	moe_block_destroy(b);
	moe_block_destroy(other);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

static void bad_params(void)
{
	struct block_case c = { .E = 4, .k = 2, .H = 20, .I = 12, .r = 2, .router = true };
	struct moe_engine *e = open_with(1, 1, NULL);
	struct moe_block_params good = block_params_of(&c), p;
	struct moe_block *b;

#define BAD(change, status, text)                                                                  \
	p = good;                                                                                  \
	change;                                                                                    \
	CHECK_ERROR(moe_block_create(e, &p, &b), status, text);                                    \
	CHECK(b == NULL)
	BAD(p.struct_size = 8, MOE_ERR_ARG, "struct_size");
	BAD(p.hidden = 0, MOE_ERR_ARG, "hidden 0");
	BAD(p.intermediate = -4, MOE_ERR_ARG, "intermediate -4");
	BAD(p.experts = 0, MOE_ERR_ARG, "0 experts");
	BAD(p.experts = 100000, MOE_ERR_ARG, "at most");
	BAD(p.experts_per_token = 0, MOE_ERR_ARG, "experts_per_token is 0");
	BAD(p.experts_per_token = 5, MOE_ERR_ARG, "5 experts per token of 4");
	BAD(p.router = "oracle", MOE_ERR_ARG, "unknown router \"oracle\"");
	BAD(p.lora_rank = -1, MOE_ERR_ARG, "negative");
	BAD(p.shared_intermediate = -1, MOE_ERR_ARG, "negative");
	BAD(p.slices_i = -1, MOE_ERR_ARG, "negative");
	BAD(p.swiglu_limit = -1, MOE_ERR_ARG, "swiglu_limit is -1");
	BAD(p.swiglu_limit = INFINITY, MOE_ERR_ARG, "swiglu_limit is inf");
	BAD(p.swiglu_alpha = NAN, MOE_ERR_ARG, "swiglu_alpha");
	BAD(p.swiglu_shift = 1e9f, MOE_ERR_ARG, "swiglu_shift");
	BAD(p.weight_dtype = MOE_I8, MOE_ERR_ARG, "weight_dtype I8");
	BAD(p.weight_dtype = (enum moe_dtype)77, MOE_ERR_ARG, "weight_dtype");
	BAD((p.hidden = INT32_MAX, p.intermediate = INT32_MAX), MOE_ERR_NOFIT, "too large");
	BAD((p.lora_rank = INT32_MAX, p.hidden = 1 << 24), MOE_ERR_NOFIT, "too large");
	BAD((p.shared_intermediate = INT32_MAX, p.hidden = 1 << 20), MOE_ERR_NOFIT, "too large");
#undef BAD
	CHECK_ERROR(moe_block_create(e, NULL, &b), MOE_ERR_ARG, "struct_size");
	CHECK_ERROR(moe_block_create(e, &good, NULL), MOE_ERR_ARG, "out");
	CHECK(info_of(e).handles == 0 && moe_memory_bytes(e, NULL, -1) == 0);
	CHECK_OK(moe_engine_close(e));
}

/* ---- asynchronous chains ---- */

enum { STEPS = 4 };

struct chain {
	struct block_data d[STEPS]; /* inputs and outputs of each step */
	uint64_t bits;
};

static void chain_make(struct chain *h, const struct block_case *c)
{
	for (int i = 0; i < STEPS; i++) {
		struct block_case own = *c;

		own.seed = i ? 100 + i : 0;
		block_data_make(&h->d[i], &own);
	}
}

static void chain_free(struct chain *h)
{
	for (int i = 0; i < STEPS; i++)
		block_data_free(&h->d[i]);
}

/* forward, backward, update of every step (a forward alone first); submitted at once or waited for
 */
static void chain_run(struct chain *h, struct moe_engine *e, bool wait, bool hold)
{
	const struct block_case *c = &h->d[0].c;
	struct moe_adamw_params adamw = adamw_default();
	struct moe_block *b = block_make(e, c, &h->d[0], NULL);

	if (hold)
		CHECK_OK(moe_engine_hold(e));
	for (int i = 0; i < STEPS; i++) {
		struct block_data *d = &h->d[i];
		struct moe_array x = matrix_of(d->x, MOE_F32, c->T, c->H), out = x, go = x, gx = x;
		struct moe_array gw = matrix_of(d->grad_weights, MOE_F32, c->T, c->k);
		struct moe_array ids = matrix_of(d->ids, MOE_I32, c->T, c->k), w = gw;

		out.data = d->out;
		go.data = d->grad_out;
		gx.data = d->grad_x;
		w.data = d->weights;
		memset(d->out, 0, (size_t)(c->T * c->H) * sizeof(float));
		CHECK_OK(moe_block_forward_async(b, &x, c->router ? NULL : &ids,
						 c->router ? NULL : &w, 1, &out));
		if (wait)
			CHECK_OK(moe_block_wait(b));
		CHECK_OK(moe_block_backward_async(b, &go, &gx, &gw));
		if (wait)
			CHECK_OK(moe_block_wait(b));
		if (i % 2 && c->r) /* two micro-batches each */
			CHECK_OK(moe_block_update(b, &adamw));
		if (wait)
			CHECK_OK(moe_block_wait(b));
	}
	if (hold)
		CHECK_OK(moe_engine_release(e));
	CHECK_OK(moe_block_wait(b));
	h->bits = 1;
	for (int i = 0; i < STEPS; i++) {
		struct block_data *d = &h->d[i];
		size_t n = (size_t)(c->T * c->H) * sizeof(float);

		h->bits = hash_of(h->bits, d->out, n);
		h->bits = hash_of(h->bits, d->grad_x, n);
		h->bits = hash_of(h->bits, d->grad_weights, (size_t)(c->T * c->k) * sizeof(float));
	}
	h->bits = block_step(b, &h->d[0], h->bits);
	moe_block_destroy(b);
}

static void asynchronous(void)
{
	static const struct block_case list[] = {
		{ .E = 8,
		  .k = 2,
		  .H = 64,
		  .I = 300,
		  .T = 150,
		  .r = 3,
		  .router = true,
		  .normalise = true,
		  .shared = 64,
		  .sigmoid = true,
		  .base_grads = true },
		{ .E = 8,
		  .k = 2,
		  .H = 64,
		  .I = 300,
		  .T = 150,
		  .r = 3,
		  .router = true,
		  .slices_i = 2 },
		{ .E = 8, .k = 2, .H = 64, .I = 100, .T = 150, .r = 3 },
		{ .E = 8,
		  .k = 2,
		  .H = 64,
		  .I = 100,
		  .T = 150,
		  .router = true,
		  .shared = 200,
		  .base_grads = true },
	};
	static const char *const policies[] = { "lws", "prio", "eager" };

	for (size_t i = 0; i < MOE_COUNT(list); i++)
		for (size_t p = 0; p < MOE_COUNT(policies); p++) {
			if (!best_table_takes(i + p, 6))
				continue;
			struct moe_engine *e = open_with(2, 2, policies[p]);
			struct chain h;
			uint64_t want;

			chain_make(&h, &list[i]);
			chain_run(&h, e, true, false);
			want = h.bits;
			for (int round = 0; round < (moe_test_full() ? 20 : 3); round++) {
				chain_run(&h, e, false, false);
				CHECK(h.bits == want);
				if (!list[i].router)
					continue; /* the caller's ids wait for the pass before */
				chain_run(&h, e, false, true);
				CHECK(h.bits == want);
			}
			chain_free(&h);
			CHECK_OK(moe_engine_close(e));
		}
}

/* Many forwards without a backward, each with its own input. */
static void forwards(void)
{
	struct block_case c = {
		.E = 8, .k = 4, .H = 64, .I = 300, .T = 150, .r = 3, .router = true, .shared = 32
	};
	struct moe_engine *e = open_with(2, 2, NULL);
	struct chain h;
	struct moe_block *b;
	float *want[STEPS];
	size_t n = (size_t)(c.T * c.H) * sizeof(float);

	chain_make(&h, &c);
	b = block_make(e, &c, &h.d[0], NULL);
	for (int i = 0; i < STEPS; i++) {
		want[i] = malloc(n);
		CHECK_OK(block_forward(b, &h.d[i], false, want[i]));
	}
	for (int round = 0; round < (moe_test_full() ? 100 : 10); round++) {
		if (round % 2)
			CHECK_OK(moe_engine_hold(e));
		for (int i = 0; i < STEPS; i++) {
			struct moe_array x = matrix_of(h.d[i].x, MOE_F32, c.T, c.H), out = x;

			out.data = memset(h.d[i].out, 0, n);
			CHECK_OK(moe_block_forward_async(b, &x, NULL, NULL, 0, &out));
		}
		if (round % 2)
			CHECK_OK(moe_engine_release(e));
		CHECK_OK(moe_block_wait(b));
		for (int i = 0; i < STEPS; i++)
			CHECK(!memcmp(want[i], h.d[i].out, n));
	}
	moe_block_destroy(b);
	for (int i = 0; i < STEPS; i++)
		free(want[i]);
	chain_free(&h);
	CHECK_OK(moe_engine_close(e));
}

/* One step with the caller's ids, submitted whole while held; a second forward says why it cannot
 * be. */
static void held_step(void)
{
	struct block_case c = { .E = 8, .k = 2, .H = 24, .I = 20, .T = 70, .r = 3 };
	struct moe_engine *e = open_with(2, 1, NULL);
	struct moe_adamw_params adamw = adamw_default();
	struct block_data d;
	struct moe_block *b, *sync;
	struct moe_array x, out, go, gx, ids, w;
	float *want;

	block_data_make(&d, &c);
	sync = block_make(e, &c, &d, NULL);
	b = block_make(e, &c, &d, NULL);
	CHECK(block_step(sync, &d, 1) != 0);
	want = malloc((size_t)(c.T * c.H) * sizeof *want);
	memcpy(want, d.grad_x, (size_t)(c.T * c.H) * sizeof *want);
	x = matrix_of(d.x, MOE_F32, c.T, c.H), out = x, go = x, gx = x;
	out.data = d.out, go.data = d.grad_out, gx.data = d.grad_x;
	ids = matrix_of(d.ids, MOE_I32, c.T, c.k);
	w = matrix_of(d.weights, MOE_F32, c.T, c.k);
	CHECK_OK(moe_engine_hold(e));
	CHECK_OK(moe_block_forward_async(b, &x, &ids, &w, 1, &out));
	CHECK_OK(moe_block_backward_async(b, &go, &gx, NULL));
	CHECK_OK(moe_block_update(b, &adamw));
	CHECK(moe_engine_outstanding(e) > 20);
	CHECK_ERROR(moe_block_forward_async(b, &x, &ids, &w, 1, &out), MOE_ERR_STATE, "held");
	CHECK_OK(moe_engine_release(e));
	CHECK_OK(moe_block_wait(b));
	CHECK(!memcmp(want, d.grad_x, (size_t)(c.T * c.H) * sizeof *want));
	CHECK(block_step(b, &d, 1) == block_step(sync, &d, 1));
	free(want);
	moe_block_destroy(b);
	moe_block_destroy(sync);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

static void asynchronous_chains(void)
{
	each_table(asynchronous);
}

const struct moe_test moe_suite_tests[] = {
	{ "order of calls", order },
	{ "refused calls change nothing", refusals },
	{ "bad parameters", bad_params },
	{ "asynchronous chains", asynchronous_chains },
	{ "forwards in a row", forwards },
	{ "a step while held", held_step },
	{ NULL, NULL },
};
