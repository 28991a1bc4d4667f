/* SPDX-License-Identifier: Apache-2.0 */
/* Opening models: errors that name what is wrong, adapters to and from disk, nothing left behind.
 */
#include "tests/model_reference.h"

const char moe_suite_name[] = "model_files";

#define CONFIG                                                                                     \
	"{\"model_type\":\"qwen2_moe\",\"hidden_size\":24,\"num_attention_heads\":4,"              \
	"\"num_hidden_layers\":3,\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\","                   \
	"\"max_position_embeddings\":256,\"rope_theta\":500.0,\"vocab_size\":97,"                  \
	"\"num_key_value_heads\":2,\"intermediate_size\":40,\"moe_intermediate_size\":20,"         \
	"\"shared_expert_intermediate_size\":28,\"num_experts\":6,\"num_experts_per_tok\":3,"      \
	"\"decoder_sparse_step\":1,\"mlp_only_layers\":[1],\"norm_topk_prob\":false,"              \
	"\"tie_word_embeddings\":true,\"qkv_bias\":true}"
#define ALL "experts,q_proj,k_proj,v_proj,o_proj"

static struct moe_model_params params_of(const struct ref_model *ref)
{
	return (struct moe_model_params){ .struct_size = sizeof(struct moe_model_params),
					  .dir = ref->dir,
					  .max_tokens = 128,
					  .lora_rank = 4,
					  .seed = 3 };
}

/* Opening fails with this status and a text that holds `says`; nothing is left. */
static void expect_refused(struct moe_engine *e, const struct moe_model_params *p,
			   enum moe_status status, const char *says)
{
	struct moe_engine_info info = { .struct_size = sizeof info };
	struct moe_model *m = NULL;
	enum moe_status st = moe_model_open(e, p, &m);

	if (st != status || !strstr(moe_last_error(), says))
		printf("got %s: %s; expected \"%s\"\n", moe_status_text(st), moe_last_error(),
		       says);
	CU_ASSERT_EQUAL(st, status);
	CU_ASSERT_PTR_NULL(m);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), says));
	moe_model_close(m);
	OK(moe_engine_get_info(e, &info));
	CU_ASSERT_EQUAL(info.handles, 0);
	CU_ASSERT_EQUAL(moe_memory_bytes(e, NULL, -1), 0);
}

/* Writes the checkpoint again with one item changed. */
static void rewrite(const struct ref_model *m, size_t which, const char *name, int64_t rows)
{
	struct moe_st_item *items = calloc(m->n_items, sizeof *items);
	char path[600];

	for (size_t i = 0; i < m->n_items; i++) {
		items[i] = (struct moe_st_item){ .name = i == which ? name : m->item[i].name,
						 .dtype = MOE_F32,
						 .ndim = m->item[i].ndim,
						 .data = m->item[i].data };
		memcpy(items[i].shape, m->item[i].shape, sizeof items[i].shape);
		if (i == which)
			items[i].shape[0] += rows;
	}
	snprintf(path, sizeof path, "%s/model.safetensors", m->dir);
	OK(moe_safetensors_write(path, items, m->n_items, NULL, 0));
	free(items);
}

static size_t item_named(const struct ref_model *m, const char *name)
{
	for (size_t i = 0; i < m->n_items; i++)
		if (!strcmp(m->item[i].name, name))
			return i;
	CU_FAIL("no such item");
	return 0;
}

static void test_refused(void)
{
	static const char up[] = "model.layers.2.mlp.experts.3.up_proj.weight";
	static const char norm[] = "model.layers.1.input_layernorm.weight";
	struct moe_engine *e = open_engine(2, 1, NULL);
	struct ref_model ref;
	struct moe_model_params p;

	ref_create(&ref, "refused", CONFIG, 1);
	p = params_of(&ref);
	p.struct_size = 3;
	expect_refused(e, &p, MOE_ERR_ARG, "struct_size");
	p = params_of(&ref);
	p.lora_targets = "q_proj,mlp";
	expect_refused(e, &p, MOE_ERR_ARG, "\"mlp\"");
	p = params_of(&ref);
	p.memory_limit = 1000;
	expect_refused(e, &p, MOE_ERR_NOFIT, "are allowed. weights int8 or int4, or smaller ranks need less");
	p = params_of(&ref);
	p.slots = 99;
	expect_refused(e, &p, MOE_ERR_ARG, "slots 99");
	p = params_of(&ref);
	p.dir = "/nonexistent";
	expect_refused(e, &p, MOE_ERR_IO, "/nonexistent");
	p = params_of(&ref);
	p.adapter = "/nonexistent";
	expect_refused(e, &p, MOE_ERR_IO, "/nonexistent");
	p = params_of(&ref);
	rewrite(&ref, item_named(&ref, up), "other", 0);
	expect_refused(e, &p, MOE_ERR_FORMAT, up);
	rewrite(&ref, item_named(&ref, norm), "other", 0);
	expect_refused(e, &p, MOE_ERR_FORMAT, norm);
	rewrite(&ref, item_named(&ref, up), up, -1);
	expect_refused(e, &p, MOE_ERR_FORMAT, "[20, 24]");
	OK(moe_engine_close(e));
	ref_free(&ref);
}

static void test_arguments(void)
{
	struct moe_engine *e = open_engine(2, 1, NULL);
	struct ref_model ref;
	struct moe_model *m;
	float out[97 * 2];
	int32_t ids[300] = { 0 }, row[2] = { 1, 1 };
	struct moe_array a = { out, MOE_F32, 2, { 1, 97 }, { 0 } };
	int64_t offsets[2] = { 0, 129 };
	double loss;

	ref_create(&ref, "arguments", CONFIG, 1);
	m = open_model(e, ref.dir, NULL, 128, 1);
	CU_ASSERT_EQUAL(moe_model_logits(m, ids, 129, NULL, 1, &a), MOE_ERR_ARG);
	CU_ASSERT_EQUAL(moe_model_logits(m, ids, 0, NULL, 1, &a), MOE_ERR_ARG);
	CU_ASSERT_EQUAL(moe_model_logits(m, ids, 5, row, 2, &a), MOE_ERR_ARG);
	a.shape[0] = 2;
	CU_ASSERT_EQUAL(moe_model_logits(m, ids, 5, row, 2, &a), MOE_ERR_ARG);
	CU_ASSERT_EQUAL(moe_model_loss(m, ids, NULL, offsets, 1, &loss, NULL), MOE_ERR_ARG);
	ids[4] = 97;
	a.shape[0] = 1;
	CU_ASSERT_EQUAL(moe_model_logits(m, ids, 5, NULL, 1, &a), MOE_ERR_ARG);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "97"));
	CU_ASSERT_EQUAL(moe_model_save_adapter(m, moe_test_dir()), MOE_ERR_STATE);
	moe_model_close(m);
	OK(moe_engine_close(e));
	ref_free(&ref);
}

static int warnings;

static void count_warnings(enum moe_log_level level, const char *text, void *user)
{
	(void)user;
	warnings +=
		level == MOE_LOG_WARNING && strstr(text, "layers.0.self_attn.v_proj.weight has 2");
}

static int64_t progress_last, progress_total;

static void progress(const char *what, int64_t done, int64_t total, void *user)
{
	CU_ASSERT(what && done >= progress_last && done <= total && user == &progress_last);
	progress_last = done;
	progress_total = total;
}

/* Bytes of the experts' LoRA as lora_pack leaves it: 3 A and 3 B of each expert, each 64-byte aligned. */
static int64_t packed_lora(const struct moe_model *m)
{
	const struct moe_kernels *k = moe_kernels();
	int64_t bytes = 0;

	for (int i = 0; k->lora_bytes && i < m->decoder.n_layers; i++) {
		const struct moe_experts *l = m->decoder.layers[i].experts;

		if (l)
			bytes += l->E * (moe_pad((int64_t)k->lora_bytes(MOE_LORA_A, l->r, l->H), 64) * 2 +
					 moe_pad((int64_t)k->lora_bytes(MOE_LORA_A, l->r, l->I), 64) +
					 moe_pad((int64_t)k->lora_bytes(MOE_LORA_B, l->I, l->r), 64) * 2 +
					 moe_pad((int64_t)k->lora_bytes(MOE_LORA_B, l->H, l->r), 64));
	}
	return bytes;
}

/* Of all tensors, as they were written. */
static int64_t bytes_of(const struct ref_model *ref)
{
	int64_t bytes = 0;

	for (size_t i = 0; i < ref->n_items; i++)
		bytes += moe_shape_count(ref->item[i].ndim, ref->item[i].shape) * (int64_t)sizeof(float);
	return bytes;
}

static void check_info(void)
{
	struct moe_engine *e = open_engine(2, 1, NULL);
	struct moe_model_info info = { .struct_size = sizeof info };
	struct ref_model ref;
	struct moe_model_params p;
	struct moe_model *m = NULL;
	float *v;

	ref_create(&ref, "info", CONFIG, 1);
	v = ref.item[item_named(&ref, "model.layers.0.self_attn.v_proj.weight")].data;
	v[3] = NAN;
	v[7] = -INFINITY;
	rewrite(&ref, ref.n_items, "", 0);
	p = params_of(&ref);
	warnings = 0;
	progress_last = 0;
	p.progress = progress;
	p.user = &progress_last;
	moe_log_set(count_warnings, NULL);
	OK(moe_model_open(e, &p, &m));
	moe_log_set(show_log, NULL);
	CU_ASSERT_EQUAL(warnings, 1);
	CU_ASSERT_EQUAL(progress_last, progress_total);
	CU_ASSERT_EQUAL(progress_total, bytes_of(&ref));
	OK(moe_model_get_info(m, &info));
	CU_ASSERT_EQUAL(info.non_finite, 2);
	/* per layer 4 rank (in + out); per expert 3 rank (H + I) */
	CU_ASSERT_EQUAL(info.attention_lora_params, 3 * 4 * (2 * (24 + 24) + 2 * (24 + 12)));
	CU_ASSERT_EQUAL(info.expert_lora_params, 2 * 6 * 3 * 4 * (24 + 20));
	CU_ASSERT_EQUAL(info.trainable_params,
			info.attention_lora_params + info.expert_lora_params);
	/* master, gradient and moments in f32, and what the kernels multiply by */
	CU_ASSERT_EQUAL(info.lora_bytes, info.trainable_params * 16 + packed_lora(m));
	CU_ASSERT_EQUAL(info.lowest_trained_layer, 0);
	CU_ASSERT_EQUAL(info.layers, 3);
	CU_ASSERT_EQUAL(info.moe_layers, 2);
	CU_ASSERT_EQUAL(info.slots, 2);
	CU_ASSERT(info.handles > 0 && info.weight_bytes > 0 && info.activation_bytes > 0);
	/* the plan is what was allocated */
	CU_ASSERT_EQUAL((size_t)info.activation_bytes,
			2 * moe_decoder_slot_bytes(&m->decoder, 0, 128));
	printf("  %lld handles, %lld planned per slot\n", (long long)info.handles,
	       (long long)moe_decoder_slot_handles(&m->decoder, 0, &m->tensors.cut, 128));
	moe_model_close(m);
	OK(moe_engine_close(e));
	ref_free(&ref);
}

static void test_info(void)
{
	each_table(check_info);
}

static double loss_of(struct moe_model *m)
{
	int32_t ids[80];
	int64_t offsets[2] = { 0, 80 };
	double loss = 0;

	for (int t = 0; t < 80; t++)
		ids[t] = t * 31 % 97;
	OK(moe_model_loss(m, ids, NULL, offsets, 1, &loss, NULL));
	return loss;
}

/* Saved and opened again, by a training and an inference model, with other parts: the same losses.
 */
static void check_adapter(void)
{
	for (int variant = 0; variant < 4; variant++) {
		if (!table_takes((size_t)variant, 3))
			continue;
		struct moe_engine *e = open_engine(2, 2, NULL);
		struct ref_model ref;
		struct moe_model_params p;
		struct moe_model *m = NULL, *other = NULL;
		char dir[600];
		double want;

		ref_create(&ref, "adapter", CONFIG, 1);
		snprintf(dir, sizeof dir, "%s/saved-%d", moe_test_dir(), variant);
		p = params_of(&ref);
		p.share_a = variant & 1;
		p.rslora = variant / 2;
		p.expert_rank = 2;
		OK(moe_model_open(e, &p, &m));
		want = loss_of(m); /* B is 0 */
		ref_take_lora(&ref, m, 17);
		CU_ASSERT(fabs(loss_of(m) - want) > 1e-3);
		want = loss_of(m);
		OK(moe_model_save_adapter(m, dir));
		p.seed++;
		OK(moe_model_open(e, &p, &other));
		CU_ASSERT(fabs(loss_of(other) - want) > 1e-3);
		OK(moe_model_load_adapter(other, dir));
		CU_ASSERT_EQUAL(loss_of(other), want);
		moe_model_close(other);
		p = params_of(&ref);
		p.adapter = dir;
		p.inference_only = 1;
		OK(moe_model_open(e, &p, &other));
		CU_ASSERT_DOUBLE_EQUAL(loss_of(other), want, 1e-6 * want);
		CU_ASSERT_EQUAL(other->tensors.lowest, 3);
		moe_model_close(other);
		p.adapter = NULL;
		p.inference_only = 0;
		OK(moe_model_open(e, &p, &other));
		CU_ASSERT_EQUAL(moe_model_load_adapter(other, dir), MOE_ERR_ARG);
		moe_model_close(other);
		moe_model_close(m);
		OK(moe_engine_close(e));
		ref_free(&ref);
	}
}

/* An adapter of fewer targets than the model: the others change nothing any more. */
static void check_smaller_adapter(void)
{
	struct moe_engine *e = open_engine(2, 1, NULL);
	struct ref_model ref, other;
	struct moe_model *m, *attention;
	char dir[600];
	double want;

	ref_create(&ref, "smaller", CONFIG, 1);
	memset(&other, 0, sizeof other);
	other.arch = ref.arch;
	snprintf(dir, sizeof dir, "%s/attention", moe_test_dir());
	attention = open_model(e, ref.dir, "q_proj,v_proj", 128, 1);
	ref_take_lora(&other, attention, 3);
	want = loss_of(attention);
	OK(moe_model_save_adapter(attention, dir));
	moe_model_close(attention);
	m = open_model(e, ref.dir, ALL, 128, 1);
	ref_take_lora(&ref, m, 5);
	CU_ASSERT(fabs(loss_of(m) - want) > 1e-3);
	OK(moe_model_load_adapter(m, dir));
	CU_ASSERT_DOUBLE_EQUAL(loss_of(m), want, 1e-6 * want);
	moe_model_close(m);
	OK(moe_engine_close(e));
	ref_free(&ref);
	ref_free(&other);
}

/* PEFT's own file: its numbers are checked where it is read; here it must take effect. */
static void test_peft_adapter(void)
{
	const char *dir = moe_test_shared("oracle/ckpt/qwen3moe");
	const char *adapter = moe_test_shared("oracle/ckpt/adapter_peft");
	struct moe_engine *e;
	struct moe_model_params p = { .struct_size = sizeof p, .max_tokens = 128 };
	struct moe_model *m = NULL;
	double plain, adapted;

	if (!dir || !adapter) {
		moe_test_skip("the oracle's checkpoint or adapter is absent");
		return;
	}
	e = open_engine(2, 1, NULL);
	p.dir = dir;
	p.inference_only = 1;
	OK(moe_model_open(e, &p, &m));
	plain = loss_of(m);
	moe_model_close(m);
	p.adapter = adapter;
	OK(moe_model_open(e, &p, &m));
	adapted = loss_of(m);
	moe_model_close(m);
	printf("  loss %.6f, with the adapter %.6f\n", plain, adapted);
	CU_ASSERT(fabs(plain - adapted) > 1e-4);
	OK(moe_engine_close(e));
}

/* The initial A does not depend on the parts, and larger passes get larger slots. */
static void check_reserve(void)
{
	struct ref_model ref;
	float a[2][24 * 4];
	double loss[2];

	ref_create(&ref, "reserve", CONFIG, 1);
	for (int parts = 1; parts <= 2; parts++) {
		struct moe_engine *e = open_engine(2, parts, NULL);
		struct moe_model *m = open_model(e, ref.dir, ALL, 64, 1);

		moe_experts_get(m->decoder.layers[2].experts, MOE_DOWN_A, MOE_VALUE, 5,
				a[parts - 1]);
		CU_ASSERT(fabsf(a[parts - 1][0]) > 0 && fabsf(a[parts - 1][0]) <= 1 / sqrtf(20));
		OK(moe_model_reserve(m, 80, 3));
		CU_ASSERT(m->n_slots == 3 && m->slot[2].T_max == 80);
		loss[parts - 1] = loss_of(m);
		OK(moe_model_reserve(m, 64, 2));
		CU_ASSERT(m->n_slots == 3 && m->slot[2].T_max == 80);
		moe_model_close(m);
		OK(moe_engine_close(e));
	}
	CU_ASSERT_EQUAL(memcmp(a[0], a[1], 4 * 20 * sizeof(float)), 0);
	CU_ASSERT_DOUBLE_EQUAL(loss[0], loss[1],
			       (table_is_packed() ? table_tolerance()->loss : 1e-6) * loss[0]);
	ref_free(&ref);
}

/* Every allocation fails once: an error, and nothing left behind. */
static void test_out_of_memory(void)
{
	struct moe_engine *e = open_engine(2, 1, NULL);
	struct ref_model ref;
	struct moe_model_params p;
	int64_t n = 1, tries = 0;
	enum moe_status st;

	ref_create(&ref, "memory", CONFIG, 1);
	p = params_of(&ref);
	do {
		struct moe_engine_info info = { .struct_size = sizeof info };
		struct moe_model *m = NULL;

		moe_alloc_fail_after(n);
		st = moe_model_open(e, &p, &m);
		moe_alloc_fail_after(-1);
		CU_ASSERT(st == MOE_OK || st == MOE_ERR_NOMEM);
		if (st != MOE_OK && st != MOE_ERR_NOMEM)
			printf("allocation %lld: %s: %s\n", (long long)n, moe_status_text(st),
			       moe_last_error());
		moe_model_close(m);
		OK(moe_engine_get_info(e, &info));
		CU_ASSERT_EQUAL(info.handles, 0);
		CU_ASSERT_EQUAL(moe_memory_bytes(e, NULL, -1), 0);
		n += moe_test_full() ? 1 : 1 + n / 20;
		tries++;
	} while (st != MOE_OK && tries < 20000);
	printf("  %lld of %lld allocations failed in turn\n", (long long)tries, (long long)n);
	CU_ASSERT_EQUAL(st, MOE_OK);
	OK(moe_engine_close(e));
	ref_free(&ref);
}

static void test_adapter(void)
{
	each_table(check_adapter);
}

static void test_smaller_adapter(void)
{
	each_table(check_smaller_adapter);
}

static void test_reserve(void)
{
	each_table(check_reserve);
}

const struct moe_test moe_suite_tests[] = {
	{ "refused at opening", test_refused },
	{ "refused arguments", test_arguments },
	{ "info, progress, values that are not finite", test_info },
	{ "adapters to and from disk", test_adapter },
	{ "an adapter of fewer targets", test_smaller_adapter },
	{ "an adapter that PEFT wrote", test_peft_adapter },
	{ "initial LoRA and reserve", test_reserve },
	{ "out of memory", test_out_of_memory },
	{ NULL, NULL },
};
