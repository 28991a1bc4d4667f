/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dropout of LoRA's inputs in whole models: the same masks in recomputation, with other workers,
 * slots, parts and micro-batches, and after resuming; gradients by differences; none in evaluation.
 */
#include "tests/model_digest.h"
#include "tests/tokens_check.h"

const char moe_suite_name[] = "model_dropout";

#define PLAIN "experts,q_proj,k_proj,v_proj,o_proj"
static const char *targets = PLAIN;
/* of the first configuration: dense MLPs, shared experts and their gate too */
static const char all_targets[] = PLAIN ",gate_proj,up_proj,down_proj,shared_expert_gate";
#define P .25f

struct setting {
	int workers, parts, slots;
	enum moe_recompute recompute;
	uint64_t seed;
	float p;
};

static struct moe_model *open_dropping(struct moe_engine *e, const char *dir,
				       const struct setting *s)
{
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = dir,
				      .max_tokens = 256,
				      .slots = s->slots,
				      .lora_targets = targets,
				      .lora_rank = 4,
				      .seed = 3,
				      .recompute = s->recompute,
				      .lora_dropout = s->p };
	struct moe_model *m = NULL;

	OK(moe_model_open(e, &p, &m));
	return m;
}

/* B is not 0, so that masks change something from the first step on. */
static void fill_b(struct moe_model *m)
{
	uint64_t seed = 23;

	for (int i = 0; i < m->decoder.n_layers; i++) {
		struct moe_decoder_layer *l = &m->decoder.layers[i];

		for (int j = 0; j < MOE_ATTN_LINEARS; j++)
			for (int64_t n = 0; n < l->linear[j].lora_b.piece; n++)
				l->linear[j].lora_b.value[n] = .1f * ref_uniform(&seed);
		for (int j = 0; l->ffn && j < MOE_FFN_MATRICES; j++)
			for (int64_t n = 0; n < l->ffn->lora[j].b.piece; n++)
				l->ffn->lora[j].b.value[n] = .1f * ref_uniform(&seed);
		for (int a = MOE_GATE_B; l->experts && a <= MOE_DOWN_B; a++)
			for (int x = 0; x < l->experts->E; x++) {
				float piece[4096];

				for (int64_t n = 0;
				     n < moe_lora_elements(l->experts, (enum moe_lora_array)a); n++)
					piece[n] = .1f * ref_uniform(&seed);
				moe_experts_set(l->experts, (enum moe_lora_array)a, MOE_VALUE, x,
						piece);
			}
	}
}

struct outcome {
	double loss[2];
	uint64_t digest;
};

static struct outcome two_steps(const char *dir, const struct setting *s)
{
	struct moe_engine *e = open_engine(s->workers, s->parts, NULL);
	struct run r = { .lr = 1e-3, .max_norm = 1, .drop = { .on = true, .seed = s->seed } };
	struct outcome o = { .digest = 0 };

	r.m = open_dropping(e, dir, s);
	fill_b(r.m);
	fill_run(&r, r.m->decoder.V);
	o.loss[0] = step(&r, true);
	o.loss[1] = step(&r, true);
	o.digest = digest_model(r.m);
	free_run(&r);
	moe_model_close(r.m);
	OK(moe_engine_close(e));
	return o;
}

static bool same_bits(const struct outcome *a, const struct outcome *b)
{
	return a->digest == b->digest && a->loss[0] == b->loss[0] && a->loss[1] == b->loss[1];
}

static void check_masks_of(const char *name, const char *dir)
{
	static const struct setting base = { 2, 1, 2, MOE_RECOMPUTE_NEVER, 5, P };
	static const struct setting same[] = {
		{ 2, 1, 2, MOE_RECOMPUTE_ALWAYS, 5, P },
		{ 1, 1, 1, MOE_RECOMPUTE_ALWAYS, 5, P },
		{ 3, 1, 1, MOE_RECOMPUTE_NEVER, 5, P },
	};
	static const struct setting other[] = {
		{ 2, 1, 2, MOE_RECOMPUTE_NEVER, 6, P },	 /* seed */
		{ 2, 1, 2, MOE_RECOMPUTE_NEVER, 5, 0 },	 /* none */
		{ 2, 1, 2, MOE_RECOMPUTE_NEVER, 5, .5f } /* rate */
	};
	static const struct setting parts = { 2, 3, 2, MOE_RECOMPUTE_ALWAYS, 5, P };
	struct outcome want = two_steps(dir, &base), got;

	for (size_t i = 0; i < MOE_COUNT(same); i++) {
		got = two_steps(dir, &same[i]);
		CU_ASSERT(same_bits(&got, &want));
	}
	for (size_t i = 0; i < MOE_COUNT(other); i++) {
		got = two_steps(dir, &other[i]);
		CU_ASSERT(fabs(got.loss[0] - want.loss[0]) > 1e-4);
	}
	got = two_steps(dir, &parts); /* other bits, the same masks */
	if (!table_is_packed())
		CU_ASSERT(fabs(got.loss[0] - want.loss[0]) < 2e-6 * want.loss[0]);
	printf("  %s, %s: loss %.6f, %.6f with 3 parts\n", table()->name, name, want.loss[0],
	       got.loss[0]);
}

static void check_masks(void)
{
	for (size_t i = 0; i < MOE_COUNT(model_configs); i++) {
		struct ref_model ref;

		if (!table_takes(i, MOE_COUNT(model_configs)))
			continue;
		ref_create(&ref, model_configs[i].name, model_configs[i].config, 7);
		targets = i ? PLAIN : all_targets;
		check_masks_of(model_configs[i].name, ref.dir);
		ref_free(&ref);
	}
}

/* The step's documents in one micro-batch or in two: their places in the step's batch are the same.
 */
static void check_split(void)
{
	static const struct setting s = { 2, 1, 2, MOE_RECOMPUTE_AUTO, 5, P };
	struct moe_engine *e = open_engine(2, 1, NULL);
	struct ref_model ref;
	double loss[2];

	ref_create(&ref, "split", model_configs[0].config, 7);
	targets = all_targets;
	for (int n = 1; n <= 2; n++) {
		struct run r = { .drop = { .on = true, .seed = 9 } };
		uint64_t seed = 31;
		int32_t ids[64];

		r.m = open_dropping(e, ref.dir, &s);
		fill_b(r.m);
		for (int i = 0; i < n; i++)
			add_batch(&r, 256);
		for (int d = 0; d < 4; d++) {
			for (int t = 0; t < 40 + d; t++)
				ids[t] = (int32_t)((.5f + .49f * ref_uniform(&seed)) *
						   (float)r.m->decoder.V);
			moe_model_batch_add(&r.batch[d / 2 * (n - 1)], ids, NULL, 40 + d);
		}
		loss[n - 1] = step(&r, false);
		free_run(&r);
		moe_model_close(r.m);
	}
	CU_ASSERT(fabs(loss[0] - loss[1]) < 2e-6 * loss[0]);
	ref_free(&ref);
	OK(moe_engine_close(e));
}

/* Which experts the tokens of all micro-batches went to: one is in each slot. */
static uint64_t routing(const struct run *r)
{
	uint64_t h = 1;

	for (int i = 0; i < r->n_micro; i++)
		for (int l = 0; l < r->m->decoder.n_layers; l++)
			if (r->m->decoder.layers[l].experts)
				h = digest_bytes(h, r->m->slot[i].moe[l].plan.ids,
						 sizeof(int32_t) * (size_t)r->batch[i].batch.T *
							 (size_t)r->m->decoder.layers[l].experts->k);
	return h;
}

/* By differences of our own forward, whose masks stay as they are; where no token changes its experts. */
static void check_gradient(struct run *r, const struct moe_param *q, double *worst, int *n)
{
	float *v, keep, h = 5e-4f;
	double want, got, up;
	uint64_t way;

	if (!q->grad)
		return;
	v = &q->value[q->piece / 3];
	keep = *v;
	step(r, false);
	got = (double)q->grad[q->piece / 3];
	way = routing(r);
	*v = keep + h;
	up = step(r, false);
	if (routing(r) != way)
		up = NAN;
	*v = keep - h;
	want = (up - step(r, false)) / (2 * (double)h);
	*v = keep;
	if (isnan(up) || routing(r) != way)
		return;
	*worst = worst_of(*worst, fabs(got - want) / (fabs(want) + 1e-3));
	++*n;
}

static void check_gradients(void)
{
	static const struct setting s = { 2, 1, 3, MOE_RECOMPUTE_ALWAYS, 5, P };
	struct moe_engine *e = open_engine(2, 1, NULL);
	struct ref_model ref;
	struct run r = { .drop = { .on = true, .seed = 9 } };
	double worst = 0;
	int n = 0;

	ref_create(&ref, "gradients", model_configs[0].config, 7);
	targets = all_targets;
	r.m = open_dropping(e, ref.dir, &s);
	fill_b(r.m);
	fill_run(&r, r.m->decoder.V);
	for (int l = 0; l < r.m->decoder.n_layers; l++) {
		const struct moe_decoder_layer *dl = &r.m->decoder.layers[l];

		for (int j = 0; j < MOE_ATTN_LINEARS; j++) {
			check_gradient(&r, &dl->linear[j].lora_a, &worst, &n);
			check_gradient(&r, &dl->linear[j].lora_b, &worst, &n);
		}
		for (int j = 0; dl->ffn && j < MOE_FFN_MATRICES; j++) {
			check_gradient(&r, &dl->ffn->lora[j].a, &worst, &n);
			check_gradient(&r, &dl->ffn->lora[j].b, &worst, &n);
		}
	}
	printf("  %d gradients, off by at most %.1e\n", n, worst);
	CU_ASSERT(n > 35 && worst < .06); /* of 46 */
	free_run(&r);
	moe_model_close(r.m);
	ref_free(&ref);
	OK(moe_engine_close(e));
}

/* ---- training ---- */

struct plan {
	int workers;
	const char *policy;
	enum moe_recompute recompute;
	float p;
};

static int stop_at;

static int on_event(const struct moe_train_event *e, void *user)
{
	(void)user;
	return stop_at && e->type == MOE_TRAIN_STEP && e->step >= stop_at;
}

/* Trains to out; the loss of the same documents afterwards into *loss. */
static enum moe_status train(const char *out, const char *data, const char *resume,
			     const struct plan *how, double *loss)
{
	struct moe_engine *e = open_engine(how->workers, 1, how->policy);
	struct setting s = { how->workers, 1, 2, how->recompute, 0, how->p };
	struct moe_trainer_params p = { .struct_size = sizeof p,
					.data = data,
					.output_dir = out,
					.resume = resume,
					.learning_rate = 5e-3,
					.max_steps = 8,
					.batch_size = 2,
					.accumulation = 2,
					.seed = 12 };
	const char *dir = moe_test_path("tests/fixtures/ckpt/qwen3moe");
	struct moe_model *m;
	struct moe_eval_result r = { .struct_size = sizeof r };
	enum moe_status st;

	targets = PLAIN;
	m = open_dropping(e, dir, &s);
	st = moe_train(m, &p, on_event, NULL, NULL);
	if (st == MOE_OK) {
		OK(moe_evaluate(m, data, &r));
		*loss = r.loss;
		moe_eval_result_free(&r);
	}
	moe_model_close(m);
	OK(moe_engine_close(e));
	return st;
}

static void check_training(void)
{
	static const struct plan first = { 2, NULL, MOE_RECOMPUTE_NEVER, P },
				 second = { 1, "eager", MOE_RECOMPUTE_ALWAYS, P },
				 without = { 2, NULL, 0, 0 };
	const char *data = random_token_file("dropout.safetensors", 20, 2048);
	char whole[600], cut[600], none[600];
	double loss, resumed, other;

	snprintf(whole, sizeof whole, "%s/whole", moe_test_dir());
	snprintf(cut, sizeof cut, "%s/cut", moe_test_dir());
	snprintf(none, sizeof none, "%s/none", moe_test_dir());
	stop_at = 0;
	OK(train(whole, data, NULL, &first, &loss));
	OK(train(none, data, NULL, &without, &other));
	CU_ASSERT(loss != other);
	stop_at = 4;
	CU_ASSERT_EQUAL(train(cut, data, NULL, &first, &resumed), MOE_ERR_INTERRUPTED);
	stop_at = 0;
	OK(train(cut, data, "", &second, &resumed));
	CU_ASSERT_EQUAL(loss, resumed);
}

/* What an adapter says in training it says anywhere: evaluation drops nothing. */
static void check_evaluation(void)
{
	static const struct setting dropping = { 2, 1, 2, MOE_RECOMPUTE_AUTO, 0, .5f },
				    plain = { 2, 1, 2, MOE_RECOMPUTE_AUTO, 0, 0 };
	struct moe_engine *e = open_engine(2, 1, NULL);
	const char *dir = moe_test_path("tests/fixtures/ckpt/qwen3moe");
	const struct setting *both[] = { &dropping, &plain };
	int64_t offsets[] = { 0, 50 }, count;
	int32_t ids[50];
	double loss[2];

	for (int i = 0; i < 50; i++)
		ids[i] = 7 * i % 2048;
	for (int i = 0; i < 2; i++) {
		struct moe_model *m = open_dropping(e, dir, both[i]);

		fill_b(m);
		OK(moe_model_loss(m, ids, NULL, offsets, 1, &loss[i], &count));
		moe_model_close(m);
	}
	CU_ASSERT_EQUAL(loss[0], loss[1]);
	OK(moe_engine_close(e));
}

static void check_refused(void)
{
	struct moe_engine *e = open_engine(1, 1, NULL);
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = moe_test_path("tests/fixtures/ckpt/qwen3moe"),
				      .lora_dropout = 1 };
	struct moe_model *m;

	CU_ASSERT_EQUAL(moe_model_open(e, &p, &m), MOE_ERR_ARG);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "lora_dropout is 1"));
	p.lora_dropout = .1f;
	p.lora_targets = "experts,gate";
	CU_ASSERT_EQUAL(moe_model_open(e, &p, &m), MOE_ERR_UNSUPPORTED);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "gate"));
	p.lora_targets = NULL;
	p.lora_dropout = 0;
	p.recompute = 3;
	CU_ASSERT_EQUAL(moe_model_open(e, &p, &m), MOE_ERR_ARG);
	OK(moe_engine_close(e));
}

static void masks(void)
{
	each_model_table(check_masks);
}

static void gradients(void)
{
	exact_table(check_gradients);
	exact_table(check_split);
}

const struct moe_test moe_suite_tests[] = {
	{ "the same masks whatever else changes", masks },
	{ "gradients, and the split into micro-batches", gradients },
	{ "training and resuming", check_training },
	{ "evaluation drops nothing", check_evaluation },
	{ "what is refused", check_refused },
	{ NULL, NULL },
};
