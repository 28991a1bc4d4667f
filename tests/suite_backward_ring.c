/* SPDX-License-Identifier: Apache-2.0 */
/* Models whose layers share transposed copies, or have their own: same bits, memory, errors. */
#include "tests/tables.h"
#include "tests/block_check.h"
#include "tests/model_reference.h"

#include <math.h>

const char moe_suite_name[] = "backward_ring";

static bool has_copies(const struct moe_kernels *k)
{
	return k->supported() && k->weight_transpose && moe_kernels_enable(k) == MOE_OK;
}

#define CONFIG                                                                                     \
	"{\"model_type\":\"qwen3_moe\",\"head_dim\":4,\"hidden_size\":40,"                         \
	"\"num_attention_heads\":2,\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\","                 \
	"\"max_position_embeddings\":512,\"rope_theta\":500.0,\"vocab_size\":50,"                  \
	"\"num_key_value_heads\":1,\"intermediate_size\":12,\"moe_intermediate_size\":24,"         \
	"\"num_experts\":4,\"num_experts_per_tok\":2,\"decoder_sparse_step\":1,"                   \
	"\"norm_topk_prob\":true,\"tie_word_embeddings\":false,\"num_hidden_layers\":6,"           \
	"\"mlp_only_layers\":[2]}"

static struct moe_model *open_mode(struct moe_engine *e, const char *dir, const char *mode,
				   bool train)
{
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = dir,
				      .max_tokens = 200,
				      .slots = 2,
				      .lora_rank = 4,
				      .inference_only = !train,
				      .backward_weights = mode };
	struct moe_model *m = NULL;

	OK(moe_model_open(e, &p, &m));
	return m;
}

/* Losses and parameters of steps of three micro-batches on two slots. */
static uint64_t train_model(const char *isa, const char *dir, const char *mode, const char *used,
			    size_t *weights)
{
	struct moe_engine *e = open_isa(isa, 2, 2);
	struct moe_model_info info = { .struct_size = sizeof info };
	struct run r = { .lr = 1e-2, .max_norm = 1 };
	int32_t ids[200];
	uint64_t h = 1;

	for (int i = 0; i < 200; i++)
		ids[i] = i * 7 % 50;
	r.m = open_mode(e, dir, mode, true);
	OK(moe_model_get_info(r.m, &info));
	CHECK(!strcmp(info.backward_weights, used));
	*weights = (size_t)info.weight_bytes;
	for (int i = 0; i < 3; i++) {
		add_batch(&r, 200);
		moe_model_batch_add(&r.batch[i], ids + i, NULL, 150 - 30 * i);
	}
	for (int i = 0; i < 4; i++) {
		double loss = step(&r, true);

		CHECK(isfinite(loss));
		h = hash_of(h, &loss, sizeof loss);
		h = hash_of(h, &r.norm.norm, sizeof r.norm.norm);
	}
	free_run(&r);
	moe_model_close(r.m);
	CHECK_OK(moe_engine_close(e));
	return h;
}

static void models(void)
{
	static const char *const rings[] = { "resident", "shared:1", "shared:2", "shared:3",
					     "shared:9" };
	struct ref_model ref;

	ref_create(&ref, "repack", CONFIG, 7);
	for (int i = 0; moe_kernels_list[i]; i++) {
		const struct moe_kernels *k = moe_kernels_list[i];
		size_t weights[MOE_COUNT(rings)], direct, copies;
		uint64_t want = 0;

		if (!has_copies(k) || !is_model_table(k))
			continue;
		train_model(k->name, ref.dir, "direct", "direct", &direct);
		for (size_t j = 0; j < MOE_COUNT(rings); j++) {
			uint64_t h = train_model(k->name, ref.dir, rings[j],
						 j == 4 ? "resident" : rings[j], &weights[j]);

			if (!j)
				want = h;
			if (!CHECK(h == want))
				printf("  %s: other bits with %s\n", k->name, rings[j]);
		}
		copies = weights[0] - direct; /* of five layers */
		CHECK(copies > 5 * 2 * 3 * 4 * 24 * 40 && copies % 5 == 0);
		for (size_t j = 1; j < 4; j++)
			CHECK(weights[j] == direct + copies / 5 * j);
		CHECK(weights[4] == weights[0]);
	}
	ref_free(&ref);
}

static void model_errors(void)
{
	struct moe_engine *e = open_isa("c", 1, 1);
	struct ref_model ref;
	struct moe_model_params p = { .struct_size = sizeof p, .max_tokens = 200 };
	struct moe_model_info info = { .struct_size = sizeof info };
	struct moe_model *m = NULL;

	ref_create(&ref, "repack", CONFIG, 7);
	p.dir = ref.dir;
	p.backward_weights = "sharing";
	CHECK_ERROR(moe_model_open(e, &p, &m), MOE_ERR_CONFIG, "sharing");
	p.inference_only = 1;
	CHECK_ERROR(moe_model_open(e, &p, &m), MOE_ERR_CONFIG, "sharing");
	p.backward_weights = "resident"; /* without a backward, no copies */
	CHECK_OK(moe_model_open(e, &p, &m));
	CHECK_OK(moe_model_get_info(m, &info));
	CHECK(!strcmp(info.backward_weights, "direct"));
	moe_model_close(m);
	/* the most that holds the model but not its copies */
	p.inference_only = 0;
	p.backward_weights = "auto";
	for (p.memory_limit = 1 << 16; moe_model_open(e, &p, &m) == MOE_ERR_NOFIT;)
		p.memory_limit += 1 << 14;
	CHECK_OK(moe_model_get_info(m, &info));
	CHECK(!strcmp(info.backward_weights, "direct"));
	moe_model_close(m);
	p.backward_weights = "resident";
	CHECK_ERROR(moe_model_open(e, &p, &m), MOE_ERR_NOFIT, "resident");
	ref_free(&ref);
	CHECK_OK(moe_engine_close(e));
}

const struct moe_test moe_suite_tests[] = {
	{ "rings and two micro-batches in flight", models },
	{ "errors and no backward", model_errors },
	{ NULL, NULL },
};
