/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Activations that are computed again while whole weights are trained: as much less memory as the
 * plan says, and the same bits with dropout, over micro-batches that add up, and with steps in
 * flight.
 */
#include "tests/full_check.h"
#include "tests/model_digest.h"
#include "tests/tokens_check.h"

const char moe_suite_name[] = "full_recompute";

enum { STEPS = 3 };

struct way {
	int workers, slots;
	const char *policy;
	enum moe_recompute recompute;
	bool some;   /* AUTO, with a limit that only recomputation in a part of the layers meets */
	bool flight; /* all steps are submitted before the first is waited for */
};

static struct moe_model_params params_of(const char *dir, enum moe_method method,
					 const struct way *w)
{
	return (struct moe_model_params){
		.struct_size = sizeof(struct moe_model_params),
		.dir = dir,
		.max_tokens = 128,
		.slots = w->slots,
		.lora_rank = method == MOE_METHOD_HYBRID ? 4 : 0,
		.lora_dropout = method == MOE_METHOD_HYBRID ? .25 : 0,
		.seed = 1,
		.method = method,
		.backward_weights = "direct",
		.recompute = w->recompute,
	};
}

/* A checkpoint of ten layers: what recomputing layers share is then small beside what they save. */
static void deep_model(struct ref_model *ref, const char *name, const char *config)
{
	static const char three[] = "\"num_hidden_layers\":3", ten[] = "\"num_hidden_layers\":10";
	const char *at = strstr(config, three);
	char text[2048];

	CU_ASSERT_PTR_NOT_NULL_FATAL(at);
	snprintf(text, sizeof text, "%.*s%s%s", (int)(at - config), config, ten,
		 at + strlen(three));
	ref_create(ref, name, text, 7);
}

/* ---- memory ---- */

struct bytes {
	int64_t activations, planned, arrays; /* planned: of the process at its peak; arrays: all
						 but runtime and staging */
	int recomputed, layers;
};

/* Of a model that is opened, and of its estimate. */
static struct bytes open_and_count(struct moe_engine *e, const struct moe_model_params *p)
{
	struct moe_model_info info = { .struct_size = sizeof info };
	struct moe_estimate_params ep = { .struct_size = sizeof ep,
					  .model = p,
					  .parts = 2,
					  .workers = 2,
					  .tokens = p->max_tokens };
	struct moe_estimate estimate = { .struct_size = sizeof estimate };
	struct moe_model *m = NULL;

	if (moe_model_open(e, p, &m) != MOE_OK)
		return (struct bytes){ 0 };
	OK(moe_model_get_info(m, &info));
	OK(moe_estimate(&ep, &estimate));
	if (p->recompute !=
	    MOE_RECOMPUTE_AUTO) /* a choice depends on what the process takes by now */
		CU_ASSERT_EQUAL(estimate.activations, info.activation_bytes);
	moe_model_close(m);
	return (struct bytes){ info.activation_bytes, info.planned_bytes,
			       estimate.weights + estimate.lora + estimate.gradients +
				       estimate.moments + estimate.activations,
			       info.recomputed_layers, info.trained_layers };
}

/* Allocated activations of none, all and some recomputed layers; the plan differs by just as much.
 */
static void check_memory_of(struct moe_engine *e, const char *name, const char *config,
			    enum moe_method method)
{
	struct ref_model ref;
	struct way way = { .slots = 2, .recompute = MOE_RECOMPUTE_NEVER };
	struct moe_model_params p;
	struct bytes never, always, some = { 0 };
	int64_t saved;

	deep_model(&ref, name, config);
	p = params_of(ref.dir, method, &way);
	p.max_tokens = 4000;
	never = open_and_count(e, &p);
	p.recompute = MOE_RECOMPUTE_ALWAYS;
	always = open_and_count(e, &p);
	saved = never.activations - always.activations;
	CU_ASSERT(never.recomputed == 0 && always.recomputed == 10 && always.layers == 10);
	CU_ASSERT(saved > never.activations / 3);
	CU_ASSERT_EQUAL(never.arrays - always.arrays, saved);
	p.recompute = MOE_RECOMPUTE_AUTO;
	for (int i = 9; i > 0 && !(some.recomputed > 0 && some.recomputed < some.layers); i--) {
		p.memory_limit = always.planned + saved * i / 10;
		some = open_and_count(e, &p);
		CU_ASSERT(some.planned <= p.memory_limit);
	}
	CU_ASSERT(some.recomputed > 0 && some.recomputed < some.layers);
	CU_ASSERT(some.activations < never.activations && some.activations > always.activations);
	printf("  %s, %s: activations %.1f MB, %.1f with %d of %d layers computed again, %.1f with "
	       "all\n",
	       name, method == MOE_METHOD_FULL ? "full" : "hybrid", (double)never.activations / 1e6,
	       (double)some.activations / 1e6, some.recomputed, some.layers,
	       (double)always.activations / 1e6);
	ref_free(&ref);
}

static void memory(void)
{
	struct moe_engine *e = open_engine(2, 2, NULL);

	check_memory_of(e, "qwen2_moe", qwen2_moe, MOE_METHOD_FULL);
	check_memory_of(e, "qwen3_moe", qwen3_moe, MOE_METHOD_FULL);
	check_memory_of(e, "mixtral", mixtral, MOE_METHOD_HYBRID);
	OK(moe_engine_close(e));
}

/* ---- the same bits ---- */

struct outcome {
	double loss[STEPS];
	uint64_t digest;
	int recomputed;
};

/* Steps of three micro-batches, of which there are more than slots. */
static void train(struct run *r, bool flight, double *loss)
{
	struct moe_ticket *ticket = NULL;
	struct run at[STEPS];

	OK(moe_ticket_create(r->m->engine, &ticket));
	for (int s = 0; s < STEPS; s++) {
		at[s] = *r;
		at[s].step = s;
		OK(moe_submit_begin(r->m->engine));
		OK(submit(&at[s], ticket, true));
		moe_submit_end(r->m->engine);
		if (!flight)
			OK(moe_ticket_wait(ticket));
	}
	OK(moe_ticket_wait(ticket));
	moe_ticket_destroy(ticket);
	for (int s = 0; s < STEPS; s++) {
		loss[s] = 0;
		for (int i = 0; i < r->n_micro; i++)
			loss[s] += at[s].loss[i].sum / trained(r);
	}
}

/* With activations of a part of the layers, by the limit that takes. */
static struct moe_model *open_some(struct moe_engine *e, struct moe_model_params p)
{
	struct moe_model_info info = { .struct_size = sizeof info };
	int64_t planned[2];
	struct moe_model *m = NULL;

	p.max_tokens = 4000;
	for (int i = 0; i < 2; i++) {
		p.recompute = i ? MOE_RECOMPUTE_ALWAYS : MOE_RECOMPUTE_NEVER;
		OK(moe_model_open(e, &p, &m));
		OK(moe_model_get_info(m, &info));
		planned[i] = info.planned_bytes;
		moe_model_close(m);
	}
	p.recompute = MOE_RECOMPUTE_AUTO;
	p.memory_limit = planned[1];
	/* what the process takes changes too, under sanitizers by more than the layers' memory */
	for (int i = 0; i < 64; i++) {
		bool less = false;

		if (moe_model_open(e, &p, &m) == MOE_OK) {
			OK(moe_model_get_info(m, &info));
			if (info.recomputed_layers > 0 && info.recomputed_layers < info.trained_layers)
				return m;
			less = !info.recomputed_layers;
			moe_model_close(m);
		}
		p.memory_limit += (planned[0] - planned[1]) / (less ? -16 : 8);
	}
	return NULL;
}

static struct outcome outcome_of(const char *dir, enum moe_method method, const struct way *w)
{
	struct moe_engine *e = open_engine(w->workers, 2, w->policy);
	struct moe_model_params p = params_of(dir, method, w);
	struct moe_model_info info = { .struct_size = sizeof info };
	struct run r = { .lr = 1e-2,
			 .weight_decay = .1,
			 .max_norm = 1,
			 .drop = { .on = method == MOE_METHOD_HYBRID, .seed = 7 } };
	struct copy c = { 0 };
	struct outcome o = { 0 };

	if (w->some)
		r.m = open_some(e, p);
	else
		OK(moe_model_open(e, &p, &r.m));
	CU_ASSERT_PTR_NOT_NULL_FATAL(r.m);
	OK(moe_model_get_info(r.m, &info));
	o.recomputed = info.recomputed_layers;
	fill_run(&r, r.m->decoder.V);
	train(&r, w->flight, o.loss);
	each_tensor(r.m, add_copy, &c);
	o.digest = digest_bytes(digest_model(r.m), c.v, (size_t)c.n * sizeof *c.v);
	CU_ASSERT(c.n > 0);
	free(c.v);
	free_run(&r);
	moe_model_close(r.m);
	OK(moe_engine_close(e));
	return o;
}

static void check_ways(const char *dir, enum moe_method method)
{
	static const struct way ways[] = {
		{ 2, 2, NULL, MOE_RECOMPUTE_ALWAYS, .flight = false },
		{ 2, 2, NULL, MOE_RECOMPUTE_ALWAYS, .flight = true },
		{ 2, 1, "dmdas", MOE_RECOMPUTE_ALWAYS, .flight = true },
		{ 2, 2, NULL, MOE_RECOMPUTE_AUTO, .some = true, .flight = true },
		{ 1, 2, "eager", MOE_RECOMPUTE_NEVER, .flight = true },
	};
	static const struct way kept = { 2, 2, NULL, MOE_RECOMPUTE_NEVER, .flight = false };
	struct outcome want = outcome_of(dir, method, &kept);

	CU_ASSERT(want.recomputed == 0 && want.loss[STEPS - 1] != want.loss[0]);
	for (size_t i = 0; i < MOE_COUNT(ways); i++) {
		struct outcome got = outcome_of(dir, method, &ways[i]);
		bool same =
			got.digest == want.digest && !memcmp(got.loss, want.loss, sizeof got.loss);

		CU_ASSERT(same);
		if (!same)
			printf("  %s, %s: way %zu gives other bits\n", table()->name, dir, i);
		if (ways[i].recompute != MOE_RECOMPUTE_NEVER)
			CU_ASSERT(got.recomputed > 0);
	}
}

static void check_bits(size_t first)
{
	for (size_t i = 0; i < MOE_COUNT(model_configs); i++) {
		struct ref_model ref;

		if (!moe_test_full() && i != first && i != first + 1)
			continue;
		deep_model(&ref, model_configs[i].name, model_configs[i].config);
		check_ways(ref.dir, i % 2 ? MOE_METHOD_HYBRID : MOE_METHOD_FULL);
		ref_free(&ref);
	}
}

static void check_all(void)
{
	check_bits(0);
}

/* The order of passes is the same for all tables but for the form of what they keep: f32 or bf16.
 */
static void bits(void)
{
	if (moe_test_full()) {
		each_table(check_all);
		return;
	}
	exact_table(check_all);
	check_bits(2);
}

/* ---- the trainer ---- */

/* Loss on the data after training, with accumulated micro-batches. */
static double trainer_loss(const char *data, enum moe_method method, const struct way *w,
			   const char *name)
{
	struct moe_engine *e = open_engine(w->workers, 1, w->policy);
	const char *dir = moe_test_path("tests/fixtures/ckpt/qwen3moe");
	struct moe_model_params p = params_of(dir, method, w);
	struct moe_eval_result result = { .struct_size = sizeof result };
	struct moe_trainer_params t = { .struct_size = sizeof t,
					.data = data,
					.learning_rate = 2e-3,
					.max_steps = 4,
					.batch_size = 2,
					.accumulation = 3,
					.seed = 12,
					.sequential = !w->flight };
	struct moe_model *m = NULL;
	char out[600];

	snprintf(out, sizeof out, "%s/%s", moe_test_dir(), name);
	t.output_dir = out;
	p.max_tokens = 256;
	OK(moe_model_open(e, &p, &m));
	if (!m || moe_train(m, &t, NULL, NULL, NULL) != MOE_OK ||
	    moe_evaluate(m, data, &result) != MOE_OK) {
		CU_FAIL("training");
		printf("  %s\n", moe_last_error());
	}
	moe_eval_result_free(&result);
	moe_model_close(m);
	OK(moe_engine_close(e));
	return result.loss;
}

static void trainer(void)
{
	static const struct way kept = { 2, 2, NULL, MOE_RECOMPUTE_NEVER, .flight = false };
	static const struct way ways[] = { { 2, 2, NULL, MOE_RECOMPUTE_ALWAYS, .flight = true },
					   { 1, 1, "eager", MOE_RECOMPUTE_ALWAYS,
					     .flight = true } };
	const char *data = random_token_file("recompute.safetensors", 24, 2048);

	for (int method = MOE_METHOD_FULL; method <= MOE_METHOD_HYBRID; method++) {
		char name[64];
		double want;

		snprintf(name, sizeof name, "kept%d", method);
		want = trainer_loss(data, (enum moe_method)method, &kept, name);
		CU_ASSERT(want > 0);
		for (size_t i = 0; i < MOE_COUNT(ways); i++) {
			snprintf(name, sizeof name, "again%d%zu", method, i);
			CU_ASSERT_EQUAL(trainer_loss(data, (enum moe_method)method, &ways[i], name),
					want);
		}
	}
}

const struct moe_test moe_suite_tests[] = {
	{ "memory is less by what the plan says", memory },
	{ "the same bits with dropout, accumulation and steps in flight", bits },
	{ "the trainer's", trainer },
	{ NULL, NULL },
};
