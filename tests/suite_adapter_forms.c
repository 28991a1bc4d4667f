/* SPDX-License-Identifier: Apache-2.0 */
/* All registered forms of adapters: round trips, conversions, and what the files say. */
#include "tests/adapter_check.h"

const char moe_suite_name[] = "adapter_forms";

enum { DELTA = E * 2 * I * H };

static const struct kind kinds[] = {
	{ "own A", false, false, false, 2, 2, false, true, false },
	{ "shared A", true, false, false, 2, 2, false, true, false },
	{ "as all-linear of PEFT", true, false, false, 4, 2, true, true, false },
	{ "rslora", false, true, false, 2, 2, false, true, false },
	{ "rslora, own ranks", false, true, false, 3, 2, true, true, false },
	{ "scalings differ", true, false, true, 4, 2, false, true, false },
	{ "gate and up alone", true, false, false, 2, 0, false, true, false },
	{ "down alone", false, false, false, 0, 2, false, true, false },
	{ "experts alone", false, false, false, 2, 2, false, false, false },
	{ "some layers", false, false, false, 2, 2, true, true, true },
	{ "routers' weights", false, true, false, 2, 2, 2, true, false },
	{ "some routers' weights", true, false, true, 4, 2, 2, true, true },
};

/* ---- what an adapter adds to the weights ---- */

static void add_product(double *to, double scale, const float *b, const float *a, int64_t out,
			int64_t r, int64_t in)
{
	for (int64_t i = 0; i < out; i++)
		for (int64_t j = 0; j < r; j++)
			for (int64_t c = 0; c < in; c++)
				to[i * in + c] += scale * b[i * r + j] * a[j * in + c];
}

/* All of scale * B A of a layer's target: gate, up and down of the experts one after the other. */
static bool delta(const struct moe_adapter *a, int layer, enum moe_adapter_target t, double *to)
{
	const struct moe_adapter_entry *e = moe_adapter_find(a, layer, t);

	memset(to, 0, 3 * DELTA * sizeof *to);
	if (!e)
		return false;
	for (int64_t i = 0; e->weight && i < e->in * e->out; i++)
		to[i] = (double)e->weight[i];
	if (e->weight)
		return true;
	if (t != MOE_ADAPTER_EXPERTS) {
		add_product(to, moe_adapter_scaling(a, e), e->b, e->a, e->out, e->rank, e->in);
		return true;
	}
	for (int x = 0; x < E; x++) {
		int64_t R = e->gate_up_rank, r = e->rank;
		const float *up_a = e->up_a ? e->up_a : e->gate_a;

		if (R) {
			double s = moe_adapter_gate_up_scaling(a, e);

			add_product(to + x * I * H, s, e->gate_b + x * I * R, e->gate_a + x * R * H,
				    I, R, H);
			add_product(to + DELTA + x * I * H, s, e->up_b + x * I * R,
				    up_a + x * R * H, I, R, H);
		}
		if (r)
			add_product(to + 2 * DELTA + x * H * I, moe_adapter_scaling(a, e),
				    e->down_b + x * H * r, e->down_a + x * r * I, H, r, I);
	}
	return true;
}

static void expect_same_function(const char *what, const struct moe_adapter *a,
				 const struct moe_adapter *b)
{
	static double x[3 * DELTA], y[3 * DELTA];
	double worst = 0;

	for (int l = 0; l < LAYERS + 1; l++)
		for (int t = 0; t < MOE_ADAPTER_TARGETS; t++) {
			CU_ASSERT_EQUAL(delta(a, l, (enum moe_adapter_target)t, x),
					delta(b, l, (enum moe_adapter_target)t, y));
			for (int i = 0; i < 3 * DELTA; i++)
				worst = worst_of(worst, fabs(x[i] - y[i]));
		}
	CU_ASSERT(worst <= 1e-5); /* of values up to 60 */
	if (!(worst <= 1e-5))
		printf("%s: differs by %g\n", what, worst);
}

static struct moe_adapter *read_back(const char *what, const char *dir, const char *form)
{
	struct moe_adapter *a = NULL;

	if (moe_adapter_read(dir, &a) != MOE_OK)
		printf("%s: %s\n", what, moe_last_error());
	CU_ASSERT_PTR_NOT_NULL_FATAL(a);
	CU_ASSERT_STRING_EQUAL(a->form, form);
	CU_ASSERT_STRING_EQUAL(a->base_model, "base/model");
	return a;
}

/* Every kind through every form, and from there through every other. */
static void test_conversions(void)
{
	static struct sample s;
	char what[128];

	for (size_t k = 0; k < MOE_COUNT(kinds); k++)
		for (int i = 0; moe_adapter_form_list[i]; i++) {
			const char *first = moe_adapter_form_list[i]->name;
			struct moe_adapter *one, *two;

			make_sample(&s, &kinds[k], LAYERS);
			snprintf(what, sizeof what, "%s in %s", kinds[k].name, first);
			CU_ASSERT_EQUAL_FATAL(moe_adapter_write(folder("one"), &s.adapter, first),
					      MOE_OK);
			one = read_back(what, folder("one"), first);
			expect_same_function(what, &s.adapter, one);
			CU_ASSERT_EQUAL(one->partial[MOE_ADAPTER_EXPERTS], kinds[k].partial);
			for (int j = 0; moe_adapter_form_list[j]; j++) {
				const char *then = moe_adapter_form_list[j]->name;

				snprintf(what, sizeof what, "%s from %s to %s", kinds[k].name,
					 first, then);
				CU_ASSERT_EQUAL(moe_adapter_write(folder("two"), one, then),
						MOE_OK);
				two = read_back(what, folder("two"), then);
				expect_same_function(what, &s.adapter, two);
				moe_adapter_free(two);
			}
			moe_adapter_free(one);
		}
}

/* A form loses nothing that it can hold: bits and counts come back. */
static void test_exact(void)
{
	static struct sample s;
	struct moe_adapter *a;

	for (int i = 0; moe_adapter_form_list[i]; i++) {
		const char *form = moe_adapter_form_list[i]->name;
		const struct moe_adapter_entry *x, *y;

		make_sample(&s, &kinds[0], LAYERS);
		CU_ASSERT_EQUAL_FATAL(moe_adapter_write(folder("exact"), &s.adapter, form), MOE_OK);
		a = read_back(form, folder("exact"), form);
		CU_ASSERT_EQUAL(moe_adapter_count_params(a), moe_adapter_count_params(&s.adapter));
		x = moe_adapter_find(&s.adapter, 1, MOE_ADAPTER_EXPERTS);
		y = moe_adapter_find(a, 1, MOE_ADAPTER_EXPERTS);
		CU_ASSERT(!memcmp(x->gate_a, y->gate_a, sizeof(float) * E * 2 * H));
		CU_ASSERT(!memcmp(x->up_a, y->up_a, sizeof(float) * E * 2 * H));
		CU_ASSERT(!memcmp(x->down_a, y->down_a, sizeof(float) * E * 2 * I));
		CU_ASSERT(!memcmp(x->gate_b, y->gate_b, sizeof(float) * E * 2 * I));
		CU_ASSERT(!memcmp(x->up_b, y->up_b, sizeof(float) * E * 2 * I));
		CU_ASSERT(!memcmp(x->down_b, y->down_b, sizeof(float) * E * 2 * H));
		moe_adapter_free(a);
	}
}

/* ---- what the files say ---- */

static cJSON *config_of(const char *dir)
{
	char path[4200];
	cJSON *c = NULL;

	snprintf(path, sizeof path, "%s/adapter_config.json", dir);
	CU_ASSERT_EQUAL_FATAL(moe_json_read(path, &c), MOE_OK);
	return c;
}

static void expect_list(const cJSON *c, const char *key, const char *want)
{
	char *text = cJSON_PrintUnformatted(cJSON_GetObjectItem(c, key));

	CU_ASSERT_STRING_EQUAL(text, want);
	cJSON_free(text);
}

static void write_kind(const struct kind *k, const char *form, bool mixtral)
{
	static struct sample s;

	make_sample(&s, k, LAYERS);
	s.adapter.mixtral = mixtral;
	CU_ASSERT_EQUAL_FATAL(moe_adapter_write(folder("said"), &s.adapter, form), MOE_OK);
}

static bool has_tensor(const char *file, const char *name)
{
	struct moe_safetensors *st = NULL;
	char path[4200];
	bool found;

	snprintf(path, sizeof path, "%s/%s", folder("said"), file);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(path, &st), MOE_OK);
	found = moe_safetensors_find(st, name) != NULL;
	moe_safetensors_close(st);
	return found;
}

static void test_configurations(void)
{
	cJSON *c;
	char *left;

	write_kind(&kinds[2], "peft", false); /* ranks 4 and 2, attention 3 */
	c = config_of(folder("said"));
	expect_list(c, "r", "3");
	expect_list(c, "rank_pattern",
		    "{\"mlp.experts.gate_up_proj\":4,\"mlp.experts.down_proj\":2}");
	expect_list(c, "alpha_pattern",
		    "{\"mlp.experts.gate_up_proj\":6,\"mlp.experts.down_proj\":3}");
	expect_list(c, "target_modules", "[\"q_proj\",\"o_proj\"]");
	expect_list(c, "target_parameters",
		    "[\"mlp.experts.gate_up_proj\",\"mlp.experts.down_proj\",\"mlp.gate.weight\"]");
	cJSON_Delete(c);

	write_kind(&kinds[3], "per-expert", false); /* rslora becomes an alpha */
	c = config_of(folder("said"));
	expect_list(c, "use_rslora", "false");
	expect_list(c, "r", "2");
	expect_list(c, "lora_alpha", "3");
	expect_list(c, "rank_pattern", "{\"q_proj\":3,\"o_proj\":3}");
	expect_list(c, "alpha_pattern", "{\"q_proj\":4.5,\"o_proj\":4.5}");
	expect_list(c, "target_modules",
		    "[\"gate_proj\",\"up_proj\",\"down_proj\",\"q_proj\",\"o_proj\"]");
	cJSON_Delete(c);
	CU_ASSERT(
		has_tensor("adapter_model.safetensors",
			   "base_model.model.model.layers.2.mlp.experts.1.up_proj.lora_B.weight"));

	write_kind(&kinds[0], "per-expert", true);
	c = config_of(folder("said"));
	expect_list(c, "target_modules", "[\"w1\",\"w3\",\"w2\",\"q_proj\",\"o_proj\"]");
	cJSON_Delete(c);
	CU_ASSERT(has_tensor(
		"adapter_model.safetensors",
		"base_model.model.model.layers.0.block_sparse_moe.experts.2.w2.lora_A.weight"));

	write_kind(&kinds[0], "kt", false);
	c = config_of(folder("said"));
	expect_list(c, "r", "2");
	expect_list(c, "target_modules", "[\"q_proj\",\"o_proj\"]");
	expect_list(c, "target_parameters", "[]");
	cJSON_Delete(c);
	CU_ASSERT(has_tensor("fused_expert_lora.safetensors", "layers.2.experts.down_lora_a"));

	write_kind(&kinds[9], "peft", false); /* and no kt file stays behind */
	c = config_of(folder("said"));
	expect_list(c, "target_modules",
		    "[\"layers.0.self_attn.q_proj\",\"layers.2.self_attn.q_proj\","
		    "\"layers.0.self_attn.o_proj\",\"layers.2.self_attn.o_proj\"]");
	cJSON_Delete(c);
	left = moe_path_join(folder("said"), "fused_expert_lora.safetensors");
	CU_ASSERT_FALSE(moe_path_exists(left));
	moe_free(left);
}

/* Only files of ours that say so, and bear it out, have an A each for gate and up. */
static void test_trained_by_peft(void)
{
	static struct sample s;
	struct moe_adapter *a;

	make_sample(&s, &kinds[2], LAYERS);
	memset(s.values, 0, sizeof s.values); /* B of 0, as PEFT starts: block-diagonal by chance */
	CU_ASSERT_EQUAL_FATAL(moe_adapter_write(folder("zero"), &s.adapter, NULL), MOE_OK);
	a = read_back("zeros", folder("zero"), "peft");
	CU_ASSERT(a->share_a);
	CU_ASSERT_EQUAL(moe_adapter_count_params(a), moe_adapter_count_params(&s.adapter));
	moe_adapter_free(a);
}

static const char *hostile[] = { "layers.0.experts.gate_lora_c", "layers.0.experts.gate_lora_a ",
				 "layers.700.experts.gate_lora_a", "x" };

static void test_kt_refusals(void)
{
	static const float zeros[E * H * 8];
	struct moe_st_item items[7] = {
		{ "layers.0.experts.gate_lora_a", MOE_F32, 3, { E, 2, H }, zeros, NULL, NULL },
		{ "layers.0.experts.up_lora_a", MOE_F32, 3, { E, 2, H }, zeros, NULL, NULL },
		{ "layers.0.experts.down_lora_a", MOE_F32, 3, { E, 2, I }, zeros, NULL, NULL },
		{ "layers.0.experts.gate_lora_b", MOE_F32, 3, { E, I, 2 }, zeros, NULL, NULL },
		{ "layers.0.experts.up_lora_b", MOE_F32, 3, { E, I, 2 }, zeros, NULL, NULL },
		{ "layers.0.experts.down_lora_b", MOE_F32, 3, { E, H, 2 }, zeros, NULL, NULL },
	};
	struct moe_adapter *a = NULL;
	char path[4200];

	write_kind(&kinds[8], "kt", false);
	snprintf(path, sizeof path, "%s/fused_expert_lora.safetensors", folder("said"));
	CU_ASSERT_EQUAL(moe_safetensors_write(path, items, 6, NULL, 0), MOE_OK);
	CU_ASSERT_EQUAL(moe_adapter_read(folder("said"), &a), MOE_OK);
	moe_adapter_free(a);
	for (size_t i = 0; i < MOE_COUNT(hostile); i++) {
		items[6] = (struct moe_st_item){ hostile[i], MOE_F32, 3,   { E, 2, H },
						 zeros,	     NULL,    NULL };
		CU_ASSERT_EQUAL(moe_safetensors_write(path, items, 7, NULL, 0), MOE_OK);
		CU_ASSERT_EQUAL(moe_adapter_read(folder("said"), &a), MOE_ERR_UNSUPPORTED);
		CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), hostile[i]));
	}
	CU_ASSERT_EQUAL(moe_safetensors_write(path, items, 5, NULL, 0), MOE_OK);
	CU_ASSERT_EQUAL(moe_adapter_read(folder("said"), &a), MOE_ERR_FORMAT);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "down_lora_b"));
	items[6] = (struct moe_st_item){ "layers.1.experts.up_lora_a", MOE_F32, 3, { E, 2, H }, zeros, NULL, NULL };
	CU_ASSERT_EQUAL(moe_safetensors_write(path, items, 7, NULL, 0), MOE_OK);
	CU_ASSERT_EQUAL(moe_adapter_read(folder("said"), &a), MOE_ERR_FORMAT);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "layers.1.experts: gate_lora_a and down_lora_a of three dimensions"));
	items[0].shape[1] = 3;
	CU_ASSERT_EQUAL(moe_safetensors_write(path, items, 6, NULL, 0), MOE_OK);
	CU_ASSERT_EQUAL(moe_adapter_read(folder("said"), &a), MOE_ERR_FORMAT);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "rank 3"));
}

/* alpha 0 adds nothing, and B, which such forms fold the scaling into, cannot say so. */
static void test_alpha_zero(void)
{
	static const char *const forms[] = { "kt", "per-expert" };
	static struct sample s;

	make_sample(&s, &kinds[8], LAYERS);
	for (size_t i = 0; i < s.adapter.n_entries; i++)
		if (s.entries[i].target == MOE_ADAPTER_EXPERTS)
			s.entries[i].alpha = s.entries[i].gate_up_alpha = 0;
	for (size_t i = 0; i < MOE_COUNT(forms); i++) {
		CU_ASSERT_EQUAL(moe_adapter_write(folder("zero"), &s.adapter, forms[i]), MOE_ERR_UNSUPPORTED);
		CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "alpha 0 and add nothing"));
	}
}

/* The text of a refusal names module, shapes and the base model. */
static void test_other_base(void)
{
	static struct moe_arch arch;
	static struct sample s;
	static const char *const said[] = { "model.layers.0.self_attn.q_proj", "[3, 6]", "[8, 3]",
					    "[128, 128]", "base/model" };

	CU_ASSERT_EQUAL_FATAL(moe_arch_load(moe_test_path("tests/fixtures/ckpt/qwen3moe"), &arch),
			      MOE_OK);
	make_sample(&s, &kinds[0], LAYERS);
	CU_ASSERT_EQUAL(moe_adapter_check(&s.adapter, &arch), MOE_ERR_FORMAT);
	for (size_t i = 0; i < MOE_COUNT(said); i++)
		CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), said[i]));
	make_sample(&s, &kinds[8], LAYERS);
	CU_ASSERT_EQUAL(moe_adapter_check(&s.adapter, &arch), MOE_ERR_FORMAT);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "3 experts of gate and up [5, 6]"));
	s.entries[0].layer = 77;
	CU_ASSERT_EQUAL(moe_adapter_check(&s.adapter, &arch), MOE_ERR_FORMAT);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "4 layers"));
}

const struct moe_test moe_suite_tests[] = {
	{ "conversions", test_conversions },
	{ "exact round trips", test_exact },
	{ "configurations", test_configurations },
	{ "B of zeros", test_trained_by_peft },
	{ "kt refusals", test_kt_refusals },
	{ "alpha 0", test_alpha_zero },
	{ "another base model", test_other_base },
	{ NULL, NULL },
};

