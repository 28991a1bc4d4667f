/* SPDX-License-Identifier: Apache-2.0 */
/* Texts in pieces, as generation reads them: logits as of the text at once, whatever the pieces. */
#include "tests/model_reference.h"

const char moe_suite_name[] = "text";

#define LENGTH 150 /* three blocks of keys */
#define VOCAB 97
#define COMMON                                                                                     \
	"\"hidden_size\":24,\"num_attention_heads\":4,\"num_hidden_layers\":3,\"rms_norm_eps\":1e-5,"  \
	"\"hidden_act\":\"silu\",\"max_position_embeddings\":256,\"rope_theta\":500.0,\"vocab_size\":97,"

/* Shared experts and a dense layer; norms of heads; norms of whole projections. */
static const char *const configs[] = {
	"{\"model_type\":\"qwen2_moe\"," COMMON
	"\"num_key_value_heads\":2,\"intermediate_size\":40,\"moe_intermediate_size\":20,"
	"\"shared_expert_intermediate_size\":28,\"num_experts\":6,\"num_experts_per_tok\":3,"
	"\"decoder_sparse_step\":1,\"mlp_only_layers\":[1],\"norm_topk_prob\":false,"
	"\"tie_word_embeddings\":true,\"qkv_bias\":true}",
	"{\"model_type\":\"qwen3_moe\"," COMMON
	"\"num_key_value_heads\":1,\"head_dim\":8,\"intermediate_size\":31,\"moe_intermediate_size\":20,"
	"\"num_experts\":5,\"num_experts_per_tok\":2,\"decoder_sparse_step\":1,\"mlp_only_layers\":[],"
	"\"norm_topk_prob\":true,\"tie_word_embeddings\":false}",
	"{\"model_type\":\"olmoe\"," COMMON
	"\"num_key_value_heads\":2,\"intermediate_size\":20,\"num_experts\":4,\"num_experts_per_tok\":2,"
	"\"norm_topk_prob\":false,\"tie_word_embeddings\":false}",
};

static float whole[LENGTH * VOCAB], next[VOCAB];
static int32_t ids[LENGTH];

static struct moe_model *open_text(struct moe_engine *e, const char *dir)
{
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = dir,
				      .max_tokens = LENGTH,
				      .inference_only = 1,
				      .keep_text = 1 };
	struct moe_model *m = NULL;

	OK(moe_model_open(e, &p, &m));
	return m;
}

/* ids[past..past + n) after what the model has. */
static void read_piece(struct moe_model *m, int past, int n)
{
	struct moe_array out = { next, MOE_F32, 2, { 1, VOCAB }, { 0 } };
	char what[64];

	OK(moe_model_next(m, ids + past, n, past, &out));
	snprintf(what, sizeof what, "tokens %d to %d", past, past + n);
	expect_close(what, next, whole + (past + n - 1) * VOCAB, VOCAB, table_is_packed() ? 2e-2 : 1e-5);
}

static void read_whole(struct moe_model *m, uint64_t seed)
{
	struct moe_array all = { whole, MOE_F32, 2, { LENGTH, VOCAB }, { 0 } };
	int32_t row[LENGTH];

	for (int i = 0; i < LENGTH; i++) {
		ids[i] = (int32_t)((0.5f + 0.49f * ref_uniform(&seed)) * VOCAB);
		row[i] = i;
	}
	OK(moe_model_logits(m, ids, LENGTH, row, LENGTH, &all));
}

static void check_pieces(struct moe_model *m)
{
	static const int pieces[] = { 1, 1, 5, 57, 1, 1, 1, 70, 13 };
	int past = 0;

	for (size_t i = 0; i < MOE_COUNT(pieces); past += pieces[i++])
		read_piece(m, past, pieces[i]);
	CU_ASSERT_EQUAL(past, LENGTH);
	read_piece(m, 60, 3); /* back in the same text */
	read_whole(m, 7);     /* passes on their own leave it alone, but ids are others now */
	read_piece(m, 0, LENGTH);
	for (int t = 120; t < LENGTH; t++)
		read_piece(m, t, 1);
}

static void check_texts(void)
{
	for (size_t i = 0; i < MOE_COUNT(configs); i++) {
		struct moe_engine *e = open_engine(2, 1, NULL);
		struct ref_model ref;
		struct moe_model *m;

		ref_create(&ref, "text", configs[i], 11);
		m = open_text(e, ref.dir);
		read_whole(m, 5);
		check_pieces(m);
		moe_model_close(m);
		OK(moe_engine_close(e));
		ref_free(&ref);
	}
}

static void test_texts(void)
{
	each_table(check_texts);
}

static void test_errors(void)
{
	struct moe_engine *e = open_engine(1, 1, NULL);
	struct moe_array out = { next, MOE_F32, 2, { 1, VOCAB }, { 0 } };
	struct moe_model_params p = { .struct_size = sizeof p, .inference_only = 1, .slots = 2, .keep_text = 1 };
	struct moe_model *m;
	struct ref_model ref;

	ref_create(&ref, "errors", configs[0], 11);
	p.dir = ref.dir;
	CU_ASSERT_EQUAL(moe_model_open(e, &p, &m), MOE_ERR_ARG);
	m = open_model(e, ref.dir, NULL, LENGTH, 1);
	CU_ASSERT_EQUAL(moe_model_next(m, ids, 1, 0, &out), MOE_ERR_STATE);
	moe_model_close(m);
	m = open_text(e, ref.dir);
	CU_ASSERT_EQUAL(moe_model_next(m, ids, 1, 1, &out), MOE_ERR_STATE); /* nothing read yet */
	CU_ASSERT_EQUAL(moe_model_next(m, ids, 0, 0, &out), MOE_ERR_ARG);
	CU_ASSERT_EQUAL(moe_model_next(m, NULL, 1, 0, &out), MOE_ERR_ARG);
	CU_ASSERT_EQUAL(moe_model_next(m, ids, LENGTH + 1, 0, &out), MOE_ERR_ARG);
	OK(moe_model_next(m, ids, 100, 0, &out));
	CU_ASSERT_EQUAL(moe_model_next(m, ids, 51, 100, &out), MOE_ERR_ARG); /* too long together */
	CU_ASSERT_EQUAL(moe_model_next(m, ids, 1, 1, &out), MOE_ERR_STATE);  /* forgotten */
	out.shape[0] = 2;
	CU_ASSERT_EQUAL(moe_model_next(m, ids, 2, 0, &out), MOE_ERR_ARG);
	moe_model_close(m);
	OK(moe_engine_close(e));
	ref_free(&ref);
}

const struct moe_test moe_suite_tests[] = {
	{ "texts in pieces", test_texts },
	{ "errors", test_errors },
	{ NULL, NULL },
};
