/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Decoders of every architecture against plain loops in double: loss, and gradients of every kind
 * of LoRA by central differences; backwards that end at different layers. Differences are finer than
 * bf16: packed tables are compared with the gradients that the exact table gave.
 */
#include "tests/model_configs.h"

const char moe_suite_name[] = "decoder";

/* Documents of a case; shorter where packed tables run, so that data without near ties can be found. */
static int length_of(int document)
{
	static const int lengths[2][4] = { { 70, 3, 90, 1 }, { 12, 3, 14, 1 } };

	return lengths[ref_bf16][document];
}

struct data {
	int32_t ids[4][96], labels[4][96];
};

static void make_data(struct data *d, int64_t vocab, uint64_t seed)
{
	for (int i = 0; i < 4; i++)
		for (int t = 0; t < 96; t++) {
			d->ids[i][t] =
				(int32_t)((0.5f + 0.49f * ref_uniform(&seed)) * (float)vocab);
			d->labels[i][t] = ref_uniform(&seed) > -0.3f ? d->ids[i][t] : -100;
		}
}

/* Share of the tokens that micro-batch 0 or 1 has: documents 0 and 1, or 2 and 3. */
static double share_of(int micro)
{
	double n[2] = { length_of(0) + length_of(1), length_of(2) + length_of(3) };

	return n[micro] / (n[0] + n[1]);
}

/* The four documents are two micro-batches; w: what the router's losses weigh. */
static double reference(struct ref_model *m, const struct data *d, struct ref_router_loss w)
{
	double sum = 0;

	ref_router(m, w);
	for (int i = 0; i < 4; i++) {
		sum += ref_loss(m, d->ids[i], d->labels[i], length_of(i));
		if (i % 2)
			sum += share_of(i / 2) * ref_router(m, w);
	}
	return sum;
}

static const struct ref_router_loss no_router_loss;

/* Rounding sends no token to another expert: no two logits are nearly the same where it matters. */
static void find_data(struct ref_model *m, struct data *d)
{
	for (uint64_t seed = 11; seed < 500; seed++) {
		make_data(d, m->arch.vocab, seed);
		m->gap = INFINITY;
		reference(m, d, no_router_loss);
		if (!ref_bf16 || m->gap > 0.06)
			return;
	}
	CU_FAIL("no data without near ties");
}

/* d(sum of losses)/d(*p); the routing does not change within the step */
static double difference(struct ref_model *m, const struct data *d, struct ref_router_loss aux, double *p)
{
	double keep = *p, h = m->arch.swiglu_limit != 0 ? 1e-7 : 1e-5, up, down; /* few values pass a limit within h */

	*p = keep + h;
	up = reference(m, d, aux);
	*p = keep - h;
	down = reference(m, d, aux);
	*p = keep;
	return (up - down) / (2 * h);
}

struct worst {
	double dense, experts;
	int n;
};

/* A few elements of each array against differences; n_trained undoes the mean. */
static void check_gradients(struct ref_model *m, const struct moe_model *model,
			    const struct data *d, double n_trained, struct ref_router_loss aux,
			    uint64_t seed,
			    struct worst *w)
{
	for (int l = 0; l < m->arch.n_layers; l++) {
		struct moe_decoder_layer *dl = &model->decoder.layers[l];

		for (int j = 0; j < 2 * MOE_DENSE_TAGS; j++) {
			struct ref_lora *lo = &m->lora[l];
			const struct moe_param *p =
				ref_dense(dl, j / 2, j % 2, &lo->r[j / 2], &lo->scale[j / 2]);
			double *values = j % 2 ? lo->b[j / 2] : lo->a[j / 2], want;
			int64_t at;

			if (!p || !p->grad)
				continue;
			at = (int64_t)((0.5f + 0.49f * ref_uniform(&seed)) * (float)p->piece);
			want = difference(m, d, aux, values + at);
			w->dense = worst_of(w->dense, fabs((double)p->grad[at] * n_trained - want) / (fabs(want) + 0.1));
			w->n++;
		}
		for (int a = 0; dl->experts && dl->experts->r && a < MOE_LORA_ARRAYS; a++) {
			int64_t n = moe_lora_elements(dl->experts, (enum moe_lora_array)a);
			int64_t at = (int64_t)((0.5f + 0.49f * ref_uniform(&seed)) * (float)n);
			int e = (int)((0.5f + 0.49f * ref_uniform(&seed)) * (float)dl->experts->E);
			float grad[4096];
			double want = difference(m, d, aux, m->lora[l].experts[a] + e * n + at);

			moe_experts_get(dl->experts, (enum moe_lora_array)a, MOE_GRAD, e, grad);
			w->experts = worst_of(w->experts, fabs((double)grad[at] * n_trained - want) / (fabs(want) + 0.1));
			w->n++;
		}
	}
}

/* ---- packed tables ---- */

/* LoRA gradients of a case: of dense matrices, then of experts; last, the sets of experts that tokens went to. */
struct gradients {
	double *v[3];
	int64_t n[3];
};

#define MAX_CASES 16
static struct gradients exact_gradients[MAX_CASES]; /* by the case's place in its test */
static int next_case;

static void add_gradients(struct gradients *g, int kind, const float *v, int64_t n)
{
	g->v[kind] = realloc(g->v[kind], (size_t)(g->n[kind] + n + 1) * sizeof(double));
	for (int64_t i = 0; i < n; i++)
		g->v[kind][g->n[kind]++] = (double)v[i];
}

static void add_routing(struct gradients *g, const struct moe_plan *plan, int k)
{
	for (int t = 0; t < plan->T; t++) {
		float set = 0;

		for (int j = 0; j < k; j++)
			set += (float)(1 << plan->ids[t * k + j]);
		add_gradients(g, 2, &set, 1);
	}
}

static struct gradients gradients_of(const struct moe_model *model)
{
	struct gradients g = { 0 };

	for (int s = 0; s < model->n_slots; s++)
		for (int l = model->tensors.lowest; l < model->decoder.n_layers; l++)
			if (model->decoder.layers[l].experts)
				add_routing(&g, &model->slot[s].moe[l].plan,
					    model->decoder.layers[l].experts->k);

	for (int l = 0; l < model->decoder.n_layers; l++) {
		struct moe_decoder_layer *dl = &model->decoder.layers[l];

		for (int j = 0; j < 2 * MOE_DENSE_TAGS; j++) {
			double scale;
			int r;
			const struct moe_param *p = ref_dense(dl, j / 2, j % 2, &r, &scale);

			if (p && p->grad)
				add_gradients(&g, 0, p->grad, p->piece);
		}
		for (int a = 0; dl->experts && dl->experts->r && a < MOE_LORA_ARRAYS; a++)
			for (int x = 0; x < dl->experts->E; x++) {
				float grad[4096];

				moe_experts_get(dl->experts, (enum moe_lora_array)a, MOE_GRAD, x, grad);
				add_gradients(&g, 1, grad,
					      moe_lora_elements(dl->experts, (enum moe_lora_array)a));
			}
	}
	return g;
}

static void free_gradients(struct gradients *g)
{
	free(g->v[0]);
	free(g->v[1]);
	free(g->v[2]);
	memset(g, 0, sizeof *g);
}

/* Kept under the exact table. Under the others: relative L2 distance of both kinds from that. */
static void compare_gradients(const struct moe_model *model, int64_t may_differ)
{
	struct gradients g = gradients_of(model), *exact = &exact_gradients[next_case++ % MAX_CASES];
	double far[2] = { 0 };
	int64_t elsewhere = 0;

	if (!table_is_packed()) {
		free_gradients(exact);
		*exact = g;
		return;
	}
	CU_ASSERT(g.n[0] == exact->n[0] && g.n[1] == exact->n[1] && g.n[2] == exact->n[2]);
	for (int64_t i = 0; i < g.n[2]; i++)
		elsewhere += g.v[2][i] != exact->v[2][i];
	for (int k = 0; k < 2; k++) {
		double d = 0, n = 0;

		for (int64_t i = 0; i < MOE_MIN(g.n[k], exact->n[k]); i++) {
			d += (g.v[k][i] - exact->v[k][i]) * (g.v[k][i] - exact->v[k][i]);
			n += exact->v[k][i] * exact->v[k][i];
		}
		far[k] = d == 0 ? 0 : sqrt(d / n);
	}
	printf("  %s: gradients off by %.2e, %.2e; %lld of %lld tokens routed elsewhere\n", table()->name,
	       far[0], far[1], (long long)elsewhere, (long long)g.n[2]);
	CU_ASSERT(far[0] <= 7e-2 && far[1] <= 7e-2 && elsewhere <= may_differ);
	free_gradients(&g);
}

static void (*cases)(void);

static void run_cases(void)
{
	next_case = 0;
	cases();
}

static void run_packed(void)
{
	if (table_is_packed())
		run_cases();
}

static void exact_then_packed(void (*run)(void))
{
	cases = run;
	exact_table(run_cases);
	ref_bf16 = true;
	exact_table(run_cases);
	each_model_table(run_packed);
	ref_bf16 = false;
}

/* ---- cases ---- */

/* Means over the MoE layers and, by tokens, over both micro-batches. */
static struct ref_router_loss losses_of(const struct run *r)
{
	struct ref_router_loss sum = { 0 };
	int n = moe_arch_moe_layers(&r->m->arch);

	for (int i = 0; i < 2; i++)
		for (int l = 0; l < r->m->decoder.n_layers; l++)
			if (r->m->decoder.layers[l].experts) {
				sum.aux += share_of(i) * r->router[i][l].aux / n;
				sum.z += share_of(i) * r->router[i][l].z / n;
			}
	return sum;
}

static void check_router_losses(const struct run *r, struct ref_model *ref, const struct data *d,
				double plain)
{
	double tol = table_is_packed() ? 5e-2 : 1e-4, want;
	struct ref_router_loss got = losses_of(r);

	want = reference(ref, d, (struct ref_router_loss){ .aux = 1 }) - plain;
	CU_ASSERT_DOUBLE_EQUAL(got.aux, want, tol);
	want = reference(ref, d, (struct ref_router_loss){ .z = 1 }) - plain;
	if (got.z != 0)
		CU_ASSERT_DOUBLE_EQUAL(got.z, want, tol * MOE_MAX(want, 1));
}

/* A limit cuts so much that the loss shows it. */
static void check_limit(struct ref_model *ref, const struct data *d, double loss)
{
	double limit = ref->arch.swiglu_limit;

	if (limit == 0)
		return;
	ref->arch.swiglu_limit = 0;
	CU_ASSERT(fabs(reference(ref, d, no_router_loss) - loss) > 1e-4 * loss);
	ref->arch.swiglu_limit = limit;
}

static void check_losses(struct moe_engine *e, const char *name, const char *config,
			 const char *targets, int lowest, struct ref_router_loss coef)
{
	struct ref_model ref;
	struct run r = { .lr = 1e-3 };
	struct worst w = { 0 };
	struct data d;
	double want, got;

	ref_create(&ref, name, config, 7);
	r.m = open_model_aux(e, ref.dir, targets, 200, 2, coef.aux, coef.z);
	if (!r.m) {
		ref_free(&ref);
		return;
	}
	CU_ASSERT_EQUAL(r.m->tensors.lowest, lowest);
	ref_take_lora(&ref, r.m, 5);
	find_data(&ref, &d);
	/* two micro-batches, the second one accumulating into the gradients of the first */
	add_batch(&r, 200);
	add_batch(&r, 200);
	for (int i = 0; i < 4; i++)
		moe_model_batch_add(&r.batch[i / 2], d.ids[i], d.labels[i], length_of(i));
	want = reference(&ref, &d, no_router_loss);
	check_limit(&ref, &d, want);
	got = step(&r, false) * trained(&r);
	/* again: slots, rings and gradients are used a second time */
	CU_ASSERT_EQUAL(step(&r, false) * trained(&r), got);
	if (coef.aux != 0 || coef.z != 0)
		check_router_losses(&r, &ref, &d, want);
	CU_ASSERT_EQUAL(coef.z != 0, losses_of(&r).z != 0);
	compare_gradients(r.m, 0);
	/* the coefficients are not divided by the trained tokens */
	if (!table_is_packed()) {
		coef.aux *= trained(&r);
		coef.z *= trained(&r);
		check_gradients(&ref, r.m, &d, trained(&r), coef, 3, &w);
	}
	printf("  %s, %s, %s: loss %.6f of %.6f; %d gradients, dense %.1e, experts %.1e\n",
	       table()->name, name, targets, got, want, w.n, w.dense, w.experts);
	CU_ASSERT_DOUBLE_EQUAL(got, want, (table_is_packed() ? 5e-3 : 2e-6) * want);
	if (!table_is_packed())
		CU_ASSERT(w.n > 0 && w.dense < 1e-3 && w.experts < 1e-3);
	free_run(&r);
	moe_model_close(r.m);
	ref_free(&ref);
}

static void check(struct moe_engine *e, const char *name, const char *config, const char *targets,
		  int lowest)
{
	check_losses(e, name, config, targets, lowest, no_router_loss);
}

#define ALL "experts,q_proj,k_proj,v_proj,o_proj"

static void check_architectures(void)
{
	struct moe_engine *e = open_engine(2, 2, NULL);

	check(e, "qwen2_moe", qwen2_moe, ALL, 0);
	check(e, "qwen3_moe", qwen3_moe, ALL, 0);
	check(e, "olmoe", olmoe, ALL, 0);
	check(e, "mixtral", mixtral, ALL, 0);
	OK(moe_engine_close(e));
}

/* Experts, shared experts and a dense MLP, of a config that names swiglu_limit; packed tables: suite_golden */
static void check_clamped(void)
{
	static const char clamped[] =
		"{\"model_type\":\"qwen2_moe\",\"swiglu_limit\":0.25," COMMON
		"\"vocab_size\":97,\"num_key_value_heads\":2,\"intermediate_size\":40,"
		"\"moe_intermediate_size\":20,\"shared_expert_intermediate_size\":28,\"num_experts\":6,"
		"\"num_experts_per_tok\":3,\"decoder_sparse_step\":1,\"mlp_only_layers\":[1],"
		"\"norm_topk_prob\":false,\"tie_word_embeddings\":true,\"qkv_bias\":true}";
	struct moe_engine *e = open_engine(2, 2, NULL);

	check(e, "clamped", clamped, ALL, 0);
	check(e, "clamped, all-linear", clamped, "all-linear", 0);
	OK(moe_engine_close(e));
}

static void check_partly_trained(void)
{
	struct moe_engine *e = open_engine(2, 1, "eager");

	check(e, "experts above a dense layer", qwen3_moe, "experts", 1);
	check(e, "experts only", qwen2_moe, "experts", 0);
	check(e, "o only", qwen3_moe, "o_proj", 0);
	check(e, "q only", qwen2_moe, "q_proj", 0);
	check(e, "v only", olmoe, "v_proj,k_proj", 0);
	OK(moe_engine_close(e));
}

/* LoRA of dense MLPs, of shared experts and their gates */
static void check_mlps(void)
{
	struct moe_engine *e = open_engine(2, 2, NULL);

	check(e, "all-linear", qwen2_moe, "all-linear", 0);
	check(e, "with experts", qwen2_moe, "experts,gate_proj,up_proj,down_proj,shared_expert_gate,q_proj", 0);
	check(e, "a dense MLP only", qwen2_moe, "layers.1.mlp.gate_proj,layers.1.mlp.down_proj", 1);
	check(e, "shared gate of the last layer", qwen2_moe, "layers.2.mlp.shared_expert_gate", 2);
	check(e, "up of the shared experts", qwen2_moe, "mlp.shared_expert.up_proj", 0);
	OK(moe_engine_close(e));
}

static void check_router_loss(void)
{
	struct moe_engine *e = open_engine(2, 1, NULL);

	check_losses(e, "auxiliary loss", qwen2_moe, ALL, 0, (struct ref_router_loss){ 1, 0 });
	check_losses(e, "auxiliary loss", qwen3_moe, "experts", 1, (struct ref_router_loss){ 1, 0 });
	check_losses(e, "z-loss", qwen2_moe, ALL, 0, (struct ref_router_loss){ 0, .3 });
	check_losses(e, "both", olmoe, ALL, 0, (struct ref_router_loss){ .5, .2 });
	OK(moe_engine_close(e));
}

/* More blocks than a task may name: joins stand for runs of them. */
static void check_long_document(void)
{
	static const char config[] =
		"{\"model_type\":\"qwen3_moe\",\"hidden_size\":8,\"num_attention_heads\":2,"
		"\"num_hidden_layers\":2,\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\","
		"\"max_position_embeddings\":8192,\"rope_theta\":500.0,\"vocab_size\":50,"
		"\"num_key_value_heads\":1,\"head_dim\":4,\"intermediate_size\":12,"
		"\"moe_intermediate_size\":8,\"num_experts\":4,\"num_experts_per_tok\":2,"
		"\"decoder_sparse_step\":1,\"mlp_only_layers\":[0],\"norm_topk_prob\":true,"
		"\"tie_word_embeddings\":false}";
	enum { T = 58 * 64 + 9 };
	struct moe_engine *e = open_engine(2, 1, NULL);
	struct run r = { .lr = 1e-3 };
	struct ref_model ref;
	int32_t *ids = malloc(T * sizeof *ids);
	uint64_t seed = 9;
	int64_t counts[4];
	double want, got, up, *p, grad;

	ref_create(&ref, "long", config, 7);
	for (int t = 0; t < T; t++)
		ids[t] = (int32_t)((0.5f + 0.49f * ref_uniform(&seed)) * 50);
	r.m = open_model(e, ref.dir, ALL, T, 1);
	CU_ASSERT(moe_train_expert_tokens(r.m, 0, counts, 4) == MOE_ERR_ARG);
	CU_ASSERT(strstr(moe_last_error(), "layer 0 has no experts") != NULL);
	ref_take_lora(&ref, r.m, 5);
	add_batch(&r, T);
	moe_model_batch_add(&r.batch[0], ids, NULL, T);
	got = step(&r, false) * trained(&r);
	want = ref_loss(&ref, ids, ids, T);
	compare_gradients(r.m, T / 100);
	printf("  %s: loss %.6f of %.6f\n", table()->name, got, want);
	CU_ASSERT_DOUBLE_EQUAL(got, want, table_tolerance()->loss * want);
	if (!table_is_packed()) {
		p = ref.lora[0].a[MOE_ATTN_K] + 3;
		grad = (double)r.m->decoder.layers[0].linear[MOE_ATTN_K].lora_a.grad[3] * trained(&r);
		*p += 1e-5;
		up = ref_loss(&ref, ids, ids, T);
		*p -= 2e-5;
		up = (up - ref_loss(&ref, ids, ids, T)) / 2e-5;
		printf("  gradient %.6f of %.6f\n", grad, up);
		CU_ASSERT_DOUBLE_EQUAL(grad, up, 1e-3 * (fabs(up) + 0.1));
	}
	free_run(&r);
	moe_model_close(r.m);
	OK(moe_engine_close(e));
	ref_free(&ref);
	free(ids);
}

static void test_architectures(void)
{
	exact_then_packed(check_architectures);
}

static void test_clamped(void)
{
	cases = check_clamped;
	exact_table(run_cases);
}

static void test_partly_trained(void)
{
	exact_then_packed(check_partly_trained);
}

/* Values of all LoRA of dense matrices after three steps; the caller's. */
static float *after_steps(const char *dir, int workers, const char *policy, size_t *n)
{
	struct moe_engine *e = open_engine(workers, 1, policy);
	struct run r = { .lr = 1e-2, .max_norm = 0.5f };
	float *all = NULL, unused;
	struct data d;

	*n = 0;
	r.m = open_model(e, dir, "all-linear", 200, 2);
	make_data(&d, r.m->arch.vocab, 21);
	add_batch(&r, 200);
	add_batch(&r, 200);
	for (int i = 0; i < 4; i++)
		moe_model_batch_add(&r.batch[i / 2], d.ids[i], d.labels[i], length_of(i));
	for (int i = 0; i < 3; i++)
		step(&r, true);
	CU_ASSERT(r.norm.finite && r.norm.norm > 0);
	for (int l = 0; l < r.m->decoder.n_layers; l++)
		for (int j = 0; j < 2 * MOE_DENSE_TAGS; j++) {
			int rank;
			double scale;
			struct moe_param *p = ref_dense(&r.m->decoder.layers[l], j / 2, j % 2, &rank, &scale);

			if (!p)
				continue;
			all = realloc(all, (*n + (size_t)p->piece) * sizeof unused);
			memcpy(all + *n, p->value, (size_t)p->piece * sizeof unused);
			*n += (size_t)p->piece;
		}
	free_run(&r);
	moe_model_close(r.m);
	OK(moe_engine_close(e));
	return all;
}

static void check_bits(void)
{
	static const struct {
		int workers;
		const char *policy;
	} settings[] = { { 2, NULL }, { 3, "eager" }, { 4, "lws" }, { 2, "prio" }, { 3, "dmdas" }, { 2, NULL } };
	struct ref_model ref;
	size_t n, n_want;
	float *want;

	ref_create(&ref, "bits", qwen2_moe, 7);
	want = after_steps(ref.dir, 1, "eager", &n_want);
	CU_ASSERT(n_want > 1000);
	for (size_t i = 0; i < MOE_COUNT(settings); i++) {
		float *got = after_steps(ref.dir, settings[i].workers, settings[i].policy, &n);

		CU_ASSERT(n == n_want && !memcmp(got, want, n * sizeof *got));
		free(got);
	}
	free(want);
	ref_free(&ref);
}

static void test_bits(void)
{
	exact_table(check_bits);
	check_bits(); /* the best table */
}

static void test_mlps(void)
{
	exact_then_packed(check_mlps);
}

static void test_router_loss(void)
{
	exact_then_packed(check_router_loss);
}

static void test_long_document(void)
{
	exact_then_packed(check_long_document);
}

const struct moe_test moe_suite_tests[] = {
	{ "every architecture against plain loops", test_architectures },
	{ "a clamped SwiGLU", test_clamped },
	{ "backwards that end at other layers", test_partly_trained },
	{ "LoRA of MLPs and shared experts", test_mlps },
	{ "LoRA of MLPs, same bits", test_bits },
	{ "losses of the router", test_router_loss },
	{ "a document of more blocks than handles", test_long_document },
	{ NULL, NULL },
};
