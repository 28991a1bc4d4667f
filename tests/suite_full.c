/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Full and hybrid fine-tuning of whole models: gradients of every kind of weight by central
 * differences of a decoder in double, the same bits for every worker count, part and policy,
 * weights in bf16 that are their own masters.
 */
#include "tests/model_reference.h"

const char moe_suite_name[] = "full";

#define COMMON                                                                                     \
	"\"hidden_size\":24,\"num_attention_heads\":4,\"num_hidden_layers\":3,"                    \
	"\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\",\"max_position_embeddings\":256,"           \
	"\"rope_theta\":500.0,"

/* layer 1 dense, q, k, v biases, shared experts, tied embeddings */
static const char qwen2_moe[] =
	"{\"model_type\":\"qwen2_moe\"," COMMON
	"\"vocab_size\":97,\"num_key_value_heads\":2,\"intermediate_size\":40,"
	"\"moe_intermediate_size\":20,\"shared_expert_intermediate_size\":28,\"num_experts\":6,"
	"\"num_experts_per_tok\":3,\"decoder_sparse_step\":1,\"mlp_only_layers\":[1],"
	"\"norm_topk_prob\":false,\"tie_word_embeddings\":true,\"qkv_bias\":true}";
/* head norms, biases, two chunks of vocabulary; layer 0 dense, its MLP in two slices */
static const char qwen3_moe[] =
	"{\"model_type\":\"qwen3_moe\"," COMMON
	"\"vocab_size\":4103,\"num_key_value_heads\":1,\"head_dim\":8,\"intermediate_size\":31,"
	"\"moe_intermediate_size\":20,\"num_experts\":5,\"num_experts_per_tok\":2,"
	"\"decoder_sparse_step\":1,\"mlp_only_layers\":[0],\"norm_topk_prob\":true,"
	"\"attention_bias\":true,\"tie_word_embeddings\":false}";
static const char olmoe[] = "{\"model_type\":\"olmoe\"," COMMON
			    "\"vocab_size\":61,\"num_key_value_heads\":2,\"intermediate_size\":20,"
			    "\"num_experts\":4,\"num_experts_per_tok\":2,\"norm_topk_prob\":false,"
			    "\"tie_word_embeddings\":false}";
static const char mixtral[] =
	"{\"model_type\":\"mixtral\"," COMMON
	"\"vocab_size\":61,\"num_key_value_heads\":4,\"intermediate_size\":20,"
	"\"num_local_experts\":4,\"num_experts_per_tok\":2,\"tie_word_embeddings\":false}";

#define DOCS 4
static const int lengths[DOCS] = { 70, 3, 20, 1 };

struct data {
	int32_t ids[DOCS][96], labels[DOCS][96];
};

static void make_data(struct data *d, int64_t vocab, uint64_t seed)
{
	for (int i = 0; i < DOCS; i++)
		for (int t = 0; t < 96; t++) {
			d->ids[i][t] = (int32_t)((0.5f + 0.49f * ref_uniform(&seed)) * (float)vocab);
			d->labels[i][t] = ref_uniform(&seed) > -0.3f ? d->ids[i][t] : -100;
		}
}

/* Two micro-batches, the second one without a trained token in its last block. */
static void add_data(struct run *r, const struct data *d)
{
	add_batch(r, 100);
	add_batch(r, 100);
	for (int i = 0; i < DOCS; i++)
		moe_model_batch_add(&r->batch[i / 2], d->ids[i], d->labels[i], lengths[i]);
}

static double reference(struct ref_model *m, const struct data *d)
{
	double sum = 0;

	for (int i = 0; i < DOCS; i++)
		sum += ref_loss(m, d->ids[i], d->labels[i], lengths[i]);
	return sum;
}

static struct moe_model *open_whole(struct moe_engine *e, const char *dir, enum moe_method method,
				    enum moe_masters masters)
{
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = dir,
				      .max_tokens = 100,
				      .slots = 2,
				      .lora_rank = 4,
				      .seed = 1,
				      .method = method,
				      .masters = masters };
	struct moe_model *m = NULL;

	OK(moe_model_open(e, &p, &m));
	return m;
}

/* ---- every weight's value or gradient ---- */

static bool is_expert(int role)
{
	return role >= MOE_ROLE_EXPERT_GATE && role <= MOE_ROLE_EXPERT_DOWN;
}

/* A field of a role's tensor, whole, in the checkpoint's layout; NULL: not trained. Freed by the caller. */
static float *get_tensor(const struct moe_model *m, int role, int layer, int expert, enum moe_param_field f,
			 int64_t *n)
{
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(&m->arch, (enum moe_role)role, layer, shape);
	const struct moe_experts *x = layer >= 0 ? m->decoder.layers[layer].experts : NULL;
	int chunks = role == MOE_ROLE_EMBED || role == MOE_ROLE_LM_HEAD ? m->decoder.head.n_chunks : 1;
	float *out;

	if (!ndim || !moe_model_trains(m, (enum moe_role)role))
		return NULL;
	*n = moe_shape_count(ndim, shape);
	out = calloc((size_t)*n, sizeof *out);
	if (is_expert(role)) {
		moe_experts_get_base(x, (enum moe_expert_matrix)(role - MOE_ROLE_EXPERT_GATE), f, expert,
				     out);
		return out;
	}
	if (role == MOE_ROLE_ROUTER) {
		memcpy(out, f == MOE_GRAD ? x->router_param.grad : x->router_param.value,
		       (size_t)*n * sizeof *out);
		return out;
	}
	for (int c = 0; c < chunks; c++) {
		const struct moe_trained *a = moe_model_trained(m, (enum moe_role)role, layer, c);
		float *at = out + (int64_t)c * MOE_VOCAB_CHUNK * shape[ndim - 1];

		if (f == MOE_GRAD)
			memcpy(at, a->param.grad, (size_t)a->param.piece * sizeof *at);
		else
			moe_trained_get(a, 0, a->param.rows, at);
	}
	return out;
}

/* fn for every tensor that the checkpoint has and the model trains. */
static void each_tensor(const struct moe_model *m, void (*fn)(const struct moe_model *m, int role, int layer,
							      int expert, void *user),
			void *user)
{
	for (int role = 0; role < MOE_ROLE_COUNT; role++) {
		bool model = role <= MOE_ROLE_LM_HEAD;

		if (role == MOE_ROLE_EXPERTS_GATE_UP || role == MOE_ROLE_EXPERTS_DOWN)
			continue;
		for (int l = model ? -1 : 0; l < (model ? 0 : m->arch.n_layers); l++)
			for (int e = is_expert(role) ? 0 : -1; e < (is_expert(role) ? m->arch.n_experts : 0);
			     e++)
				fn(m, role, l, e, user);
	}
}

/* ---- against differences ---- */

struct differences {
	struct ref_model *ref;
	const struct data *data;
	double n_trained, worst;
	uint64_t seed;
	int n, zero;
	unsigned roles; /* that were compared */
};

static double difference(struct ref_model *m, const struct data *d, float *w)
{
	float keep = *w, high = keep + 1e-5f, low = keep - 1e-5f; /* the routing does not change */
	double up, down;

	*w = high;
	up = reference(m, d);
	*w = low;
	down = reference(m, d);
	*w = keep;
	return (up - down) / ((double)high - (double)low);
}

/* The largest element of the gradient, and one anywhere. */
static void compare(const struct moe_model *m, int role, int layer, int expert, void *user)
{
	struct differences *d = user;
	float *w = (float *)ref_get(d->ref, (enum moe_role)role, layer, expert);
	int64_t n = 0, at[2] = { 0, 0 };
	float *grad = get_tensor(m, role, layer, expert, MOE_GRAD, &n);

	if (!grad || (expert > 0 && expert != 2))
		goto out;
	CU_ASSERT_PTR_NOT_NULL_FATAL(w);
	for (int64_t i = 0; i < n; i++)
		if (fabsf(grad[i]) > fabsf(grad[at[0]]))
			at[0] = i;
	at[1] = (int64_t)((0.5f + 0.49f * ref_uniform(&d->seed)) * (float)n);
	for (int i = 0; i < 2; i++) {
		double want = difference(d->ref, d->data, w + at[i]);
		double got = (double)grad[at[i]] * d->n_trained;
		double off = fabs(got - want) / (fabs(want) + 0.1);

		if (off > 1e-3)
			printf("%s of layer %d, expert %d: %.6g of %.6g\n",
			       moe_role_name((enum moe_role)role), layer, expert, got, want);
		d->worst = fmax(d->worst, off);
		d->zero += got == 0;
		d->n++;
	}
	d->roles |= 1u << role;
out:
	free(grad);
}

static void check(struct moe_engine *e, const char *name, const char *config, unsigned roles)
{
	struct ref_model ref;
	struct run r = { .lr = 1e-3 };
	struct data d;
	struct differences at = { .ref = &ref, .data = &d, .seed = 3 };
	double want, got;

	ref_create(&ref, name, config, 7);
	r.m = open_whole(e, ref.dir, MOE_METHOD_FULL, MOE_MASTERS_F32);
	if (!r.m) {
		ref_free(&ref);
		return;
	}
	ref_take_lora(&ref, r.m, 5);
	make_data(&d, ref.arch.vocab, 11);
	add_data(&r, &d);
	want = reference(&ref, &d);
	got = step(&r, false) * trained(&r);
	/* again: slots, rings and gradients are used a second time */
	CU_ASSERT_EQUAL(step(&r, false) * trained(&r), got);
	CU_ASSERT_DOUBLE_EQUAL(got, want, 2e-6 * want);
	at.n_trained = trained(&r);
	each_tensor(r.m, compare, &at);
	printf("  %s: loss %.6f of %.6f; %d gradients of %d kinds, worst %.1e\n", name, got, want, at.n,
	       __builtin_popcount(at.roles), at.worst);
	CU_ASSERT(at.worst < 1e-3 && at.zero * 3 < at.n);
	CU_ASSERT_EQUAL(at.roles, roles);
	free_run(&r);
	moe_model_close(r.m);
	ref_free(&ref);
}

#define ROLE(x) (1u << MOE_ROLE_##x)
#define QKVO (ROLE(Q) | ROLE(K) | ROLE(V) | ROLE(O))
#define BASE                                                                                       \
	(ROLE(EMBED) | ROLE(FINAL_NORM) | ROLE(ATTN_NORM) | ROLE(FFN_NORM) | QKVO | ROLE(ROUTER) | \
	 ROLE(EXPERT_GATE) | ROLE(EXPERT_UP) | ROLE(EXPERT_DOWN))
#define DENSE (ROLE(DENSE_GATE) | ROLE(DENSE_UP) | ROLE(DENSE_DOWN))
#define SHARED (ROLE(SHARED_GATE) | ROLE(SHARED_UP) | ROLE(SHARED_DOWN) | ROLE(SHARED_ROUTER))
#define QKV_BIAS (ROLE(Q_BIAS) | ROLE(K_BIAS) | ROLE(V_BIAS))
#define QK_NORM (ROLE(Q_NORM) | ROLE(K_NORM))

static void check_gradients(void)
{
	struct moe_engine *e = open_engine(2, 2, NULL);

	check(e, "qwen2_moe", qwen2_moe, BASE | DENSE | SHARED | QKV_BIAS);
	check(e, "qwen3_moe", qwen3_moe,
	      BASE | ROLE(LM_HEAD) | DENSE | QKV_BIAS | ROLE(O_BIAS) | QK_NORM);
	check(e, "olmoe", olmoe, BASE | ROLE(LM_HEAD) | QK_NORM);
	check(e, "mixtral", mixtral, BASE | ROLE(LM_HEAD));
	OK(moe_engine_close(e));
}

static void test_gradients(void)
{
	exact_table(check_gradients);
}

const struct moe_test moe_suite_tests[] = {
	{ "gradients of every weight against differences", test_gradients },
	{ NULL, NULL },
};
