/* SPDX-License-Identifier: Apache-2.0 */
/* One run: layers made anew, steps submitted whole (or call by call), a trace of them. */
#include "bench/pipeline/pipeline_bench.h"

#include "engine/base.h"

#include <math.h>
#include <stdlib.h>

struct run {
	const struct pipeline_options *o;
	const struct pipeline_data *d;
	struct pipeline_run *r;
	struct moe_engine *engine;
	struct moe_expert_layer **layer; /* [layers] */
	struct moe_optimizer *optimizer;
	struct moe_rows **rows; /* [micro][2 (layers + 1)] */
	int64_t steps;
};

/* Two micro-batches beside each other; two steps' forwards are kept. */
static struct moe_experts_params params_of(const struct pipeline_options *o, int layer)
{
	return (struct moe_experts_params){
		.struct_size = sizeof(struct moe_experts_params),
		.experts = o->experts,
		.experts_per_token = o->top,
		.hidden = o->hidden,
		.intermediate = o->intermediate,
		.layer = layer,
		.max_cache_depth = 2 * o->micro_batches - 1,
		.micro_batches = 2,
		.train_base = 1,
		.expected_tokens = o->tokens,
		.group_size = o->group_size,
		.backward_weights = o->backward,
	};
}

static enum moe_status keep_order(struct run *x)
{
	int L = x->o->layers + 1;

	for (int m = 0; m < x->o->micro_batches; m++)
		for (int i = 0; i < L; i++) {
			struct moe_rows **at = x->rows + (size_t)(2 * (m * L + i));

			MOE_TRY(moe_rows_create(x->engine, x->d->rows[m][i].data, x->o->tokens,
						at));
			if (i < L - 1)
				MOE_TRY(moe_rows_create(x->engine, x->d->grads[m][i].data,
							x->o->tokens, at + 1));
		}
	return MOE_OK;
}

static enum moe_status set_up(struct run *x)
{
	const struct pipeline_options *o = x->o;
	struct moe_engine_params ep = { .struct_size = sizeof ep,
					.workers = x->r->workers,
					.policy = o->policy };

	x->layer = moe_calloc((size_t)o->layers, sizeof(struct moe_expert_layer *));
	x->rows = moe_calloc((size_t)(2 * o->micro_batches * (o->layers + 1)),
			     sizeof(struct moe_rows *));
	if (!x->layer || !x->rows)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the layers");
	MOE_TRY(moe_engine_open(&ep, &x->engine));
	for (int i = 0; i < o->layers; i++) {
		struct moe_experts_params p = params_of(o, i);

		MOE_TRY(moe_experts_create(x->engine, &p, &x->layer[i]));
		MOE_TRY(moe_experts_load(x->layer[i], &x->d->weights[0], &x->d->weights[1],
					 &x->d->weights[2], NULL, 0));
	}
	MOE_TRY(keep_order(x));
	return moe_optimizer_create(x->engine, x->layer, o->layers, &x->optimizer);
}

static enum moe_status tear_down(struct run *x)
{
	int n = 2 * x->o->micro_batches * (x->o->layers + 1);

	moe_optimizer_destroy(x->optimizer);
	for (int i = 0; x->rows && i < n; i++)
		moe_rows_destroy(x->rows[i]);
	for (int i = 0; x->layer && i < x->o->layers; i++)
		moe_experts_destroy(x->layer[i]);
	moe_free(x->rows);
	moe_free(x->layer);
	return x->engine ? moe_engine_close(x->engine) : MOE_OK;
}

static enum moe_status micro_batch(struct run *x, int m)
{
	const struct pipeline_data *d = x->d;
	bool overlap = x->r->overlap;
	int L = x->o->layers;

	for (int i = 0; i < L; i++)
		MOE_TRY((overlap ? moe_experts_forward_async
				 : moe_experts_forward)(x->layer[i], &d->rows[m][i], &d->ids[m],
							&d->scores[m], 1, &d->rows[m][i + 1]));
	for (int i = L - 1; i >= 0; i--)
		MOE_TRY((overlap ? moe_experts_backward_async : moe_experts_backward)(
			x->layer[i], &d->grads[m][i + 1], 1, &d->grads[m][i], NULL));
	return MOE_OK;
}

/* Submits a step; ends it where steps do not overlap, else the one before. */
static enum moe_status step(struct run *x)
{
	struct moe_adamw_params adamw = { .struct_size = sizeof adamw,
					  .learning_rate = 1e-4,
					  .beta1 = .9,
					  .beta2 = .999,
					  .eps = 1e-8,
					  .weight_decay = .01,
					  .max_grad_norm = x->r->clip };
	int64_t number = ++x->steps, tokens = (int64_t)x->o->tokens * x->o->micro_batches, end;

	moe_trace_mark(x->engine, MOE_TRACE_STEP_BEGIN, number, tokens, tokens);
	for (int m = 0; m < x->o->micro_batches; m++)
		MOE_TRY(micro_batch(x, m));
	MOE_TRY(moe_optimizer_step(x->optimizer, &adamw));
	moe_trace_mark(x->engine, MOE_TRACE_STEP_SUBMITTED, number, tokens, tokens);
	end = x->r->overlap ? number - 1 : number;
	if (!end)
		return MOE_OK;
	MOE_TRY(moe_optimizer_wait(x->optimizer, end, NULL));
	moe_trace_mark(x->engine, MOE_TRACE_STEP_END, end, tokens, tokens);
	return MOE_OK;
}

/* The steps that are still in flight. */
static enum moe_status finish(struct run *x)
{
	int64_t tokens = (int64_t)x->o->tokens * x->o->micro_batches;

	MOE_TRY(moe_optimizer_wait(x->optimizer, 0, &x->r->norm));
	if (x->r->overlap)
		moe_trace_mark(x->engine, MOE_TRACE_STEP_END, x->steps, tokens, tokens);
	for (int i = 0; i < x->o->layers; i++)
		MOE_TRY(moe_experts_wait(x->layer[i]));
	return MOE_OK;
}

/* FNV-1a over the words of all masters. */
static enum moe_status hash_weights(struct run *x)
{
	const struct pipeline_options *o = x->o;
	int64_t n = (int64_t)o->experts * o->hidden * o->intermediate;
	struct moe_array a = { .data = moe_alloc((size_t)n, sizeof(float)), .ndim = 3 };
	uint64_t h = UINT64_C(14695981039346656037);

	if (!a.data)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the weights");
	for (int i = 0; i < 3 * o->layers; i++) {
		enum moe_status st;

		memcpy(a.shape, x->d->weights[i % 3].shape, sizeof a.shape);
		st = moe_experts_get_array(x->layer[i / 3], (enum moe_block_array)(i % 3), &a);
		if (st != MOE_OK) {
			moe_free(a.data);
			return st;
		}
		for (int64_t j = 0; j < n; j++)
			h = (h ^ ((const uint32_t *)a.data)[j]) * UINT64_C(1099511628211);
	}
	moe_free(a.data);
	x->r->weights_hash = h;
	return MOE_OK;
}

static enum moe_status train(struct run *x, const char *trace)
{
	const struct pipeline_options *o = x->o;
	char *shape = moe_format("layers=%d E=%d k=%d H=%d I=%d T=%dx%d", o->layers, o->experts,
				 o->top, o->hidden, o->intermediate, o->tokens, o->micro_batches);
	char *run = moe_format("run=%s clip=%g", x->r->name, x->r->clip);
	const char *config[] = { "command=bench_pipeline", shape, run };
	struct moe_trace_params p = { .struct_size = sizeof p,
				      .file = trace,
				      .config = config,
				      .n_config = MOE_COUNT(config) };
	enum moe_status st =
		shape && run ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "no memory for a trace");

	for (int i = 0; i < o->warm_up && st == MOE_OK; i++)
		st = step(x);
	if (st == MOE_OK)
		st = finish(x);
	if (st == MOE_OK)
		st = moe_trace_start(x->engine, &p);
	/* the first and the last are not counted: no step before one, none after the other */
	for (int i = 0; i < o->steps + 2 && st == MOE_OK; i++)
		st = step(x);
	if (st == MOE_OK)
		st = finish(x);
	if (st == MOE_OK)
		st = moe_trace_stop(x->engine, NULL);
	moe_free(shape);
	moe_free(run);
	return st;
}

enum moe_status pipeline_run(const struct pipeline_options *o, const struct pipeline_data *d,
			     struct pipeline_run *r, const char *trace)
{
	struct run x = { .o = o, .d = d, .r = r };
	double start = moe_now();
	enum moe_status st;

	if (getloadavg(&r->load, 1) != 1)
		r->load = NAN;
	st = set_up(&x);
	r->setup = moe_now() - start;
	if (st == MOE_OK)
		st = train(&x, trace);
	if (st == MOE_OK)
		st = hash_weights(&x);
	if (st != MOE_OK) {
		char *text = moe_strdup(moe_last_error());

		tear_down(&x);
		moe_fail(st, "%s", text ? text : "");
		moe_free(text);
		return st;
	}
	return tear_down(&x);
}
