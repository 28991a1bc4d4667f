/* SPDX-License-Identifier: Apache-2.0 */
/* Architectures: config.json to struct moe_arch, tensor names and shapes, parameter counts. */
#include "tests/harness.h"
#include "model/arch.h"
#include "model/arch_reader.h"
#include "model/file.h"
#include "model/readers/safetensors.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

const char moe_suite_name[] = "arch";

static struct moe_arch load_fixture(const char *name)
{
	struct moe_arch arch = { 0 };
	char relative[128];

	snprintf(relative, sizeof relative, "tests/fixtures/configs/%s", name);
	CU_ASSERT_EQUAL_FATAL(moe_arch_load(moe_test_path(relative), &arch), MOE_OK);
	return arch;
}

static void test_qwen3_30b(void)
{
	struct moe_arch a = load_fixture("qwen3-30b-a3b");

	CU_ASSERT_STRING_EQUAL(a.name, "qwen3_moe");
	CU_ASSERT(a.vocab == 151936 && a.hidden == 2048 && a.n_layers == 48 && a.n_heads == 32);
	CU_ASSERT(a.n_kv_heads == 4 && a.head_dim == 128 && a.n_experts == 128 && a.top_k == 8);
	CU_ASSERT(a.moe_intermediate == 768 && a.norm_topk_prob && !a.tie_embeddings);
	CU_ASSERT(a.qk_norm == MOE_QK_NORM_HEAD && !a.qkv_bias && !a.o_bias);
	CU_ASSERT(a.rope.theta == 1e6 && a.rope.type == MOE_ROPE_DEFAULT);
	CU_ASSERT(a.max_positions == 40960 && a.rms_eps == 1e-6 && a.shared_intermediate == 0);
	CU_ASSERT(moe_arch_moe_layers(&a) == 48 && !strcmp(a.router, "softmax_topk"));
	CU_ASSERT(a.n_eos == 2 && a.eos_ids[0] == 151645 && a.eos_ids[1] == 151643);
	CU_ASSERT(a.bos_id == 151643 && a.pad_id == -1);
}

/* Totals are those of transformers 5.24 on the meta device. */
static void test_param_counts(void)
{
	static const struct {
		const char *name;
		int64_t total;
	} cases[] = {
		{ "qwen3-30b-a3b", 30532122624 },
		{ "qwen1.5-moe-a2.7b", 14315784192 },
		{ "olmoe-1b-7b", 6919161856 },
		{ "mixtral-8x7b", 46702792704 },
		{ "qwen3-235b-a22b", 235093634560 },
		{ "glm-4.5-air", 106852245504 },
		{ "gpt-oss-120b", 116829156672 },
		{ "deepseek-v3", 671026404352 },
		{ "kimi-k2", 1026408209408 },
	};

	for (size_t i = 0; i < MOE_COUNT(cases); i++) {
		struct moe_arch a = load_fixture(cases[i].name);
		struct moe_param_count n;
		int64_t sum = 0;

		moe_arch_count_params(&a, &n);
		CU_ASSERT_EQUAL(n.total, cases[i].total);
		for (int g = 0; g < MOE_PARAMS_COUNT; g++)
			sum += n.groups[g];
		CU_ASSERT_EQUAL(sum, n.total);
		CU_ASSERT_EQUAL(n.total - n.active, n.groups[MOE_PARAMS_EXPERTS] *
							    (a.n_experts - a.top_k) / a.n_experts);
	}
}

#define BASE_NO_EPS                                                                                \
	"\"vocab_size\":100,\"hidden_size\":64,\"num_hidden_layers\":4,\"num_attention_heads\":4," \
	"\"num_key_value_heads\":2,\"intermediate_size\":96,\"max_position_embeddings\":128,"
#define BASE BASE_NO_EPS "\"rms_norm_eps\":1e-6,"
#define QWEN3                                                                                      \
	"\"model_type\":\"qwen3_moe\",\"num_experts\":8,\"num_experts_per_tok\":2,"                \
	"\"moe_intermediate_size\":32,"
#define QWEN2                                                                                      \
	"\"model_type\":\"qwen2_moe\",\"num_experts\":8,\"num_experts_per_tok\":2,"                \
	"\"moe_intermediate_size\":32,\"shared_expert_intermediate_size\":48,"
#define MIXTRAL "\"model_type\":\"mixtral\",\"num_local_experts\":8,\"num_experts_per_tok\":2,"
#define OLMOE "\"model_type\":\"olmoe\",\"num_experts\":8,\"num_experts_per_tok\":2,"
#define END "\"x\":null}"

static struct moe_arch parse(const char *text)
{
	struct moe_arch a = { 0 };

	if (moe_arch_parse(text, NULL, &a) != MOE_OK) {
		printf("%s\n", moe_last_error());
		CU_FAIL_FATAL("a valid config is refused");
	}
	return a;
}

static void test_defaults(void)
{
	struct moe_arch a = parse("{" BASE QWEN3 END);

	CU_ASSERT(a.head_dim == 16 && !a.norm_topk_prob && !a.qkv_bias && a.rope.theta == 10000);
	CU_ASSERT(a.n_eos == 0 && a.bos_id == -1 && a.aux_loss_coef == 0.001);
	a = parse("{" BASE QWEN3 "\"attention_bias\":true," END);
	CU_ASSERT(a.qkv_bias && a.o_bias);
	a = parse("{" BASE QWEN2 END);
	CU_ASSERT(a.qkv_bias && !a.o_bias && !a.norm_topk_prob && a.shared_intermediate == 48);
	CU_ASSERT(a.qk_norm == MOE_QK_NORM_NONE);
	a = parse("{" BASE QWEN2 "\"qkv_bias\":false," END);
	CU_ASSERT(!a.qkv_bias);
	a = parse("{" BASE MIXTRAL END);
	CU_ASSERT(a.norm_topk_prob && a.moe_intermediate == 96 && a.rope.theta == 1e6);
	a = parse("{" BASE OLMOE END);
	CU_ASSERT(!a.norm_topk_prob && a.qk_norm == MOE_QK_NORM_FULL && a.aux_loss_coef == 0.01);
	a = parse("{" BASE OLMOE "\"norm_topk_prob\":true,\"tie_word_embeddings\":true," END);
	CU_ASSERT(a.norm_topk_prob && a.tie_embeddings);
}

static void test_layers_and_rope(void)
{
	struct moe_arch a = parse("{" BASE QWEN3 "\"decoder_sparse_step\":2,"
				  "\"mlp_only_layers\":[3]," END);

	CU_ASSERT(!a.layer_is_moe[0] && a.layer_is_moe[1] && !a.layer_is_moe[2]);
	CU_ASSERT(!a.layer_is_moe[3] && a.intermediate == 96 && moe_arch_moe_layers(&a) == 1);
	a = parse("{" BASE "\"model_type\":\"qwen3_moe\",\"num_experts\":0," END);
	CU_ASSERT(moe_arch_moe_layers(&a) == 0 && a.n_experts == 0);
	a = parse("{" BASE QWEN3 "\"rope_theta\":5e5,\"rope_scaling\":{\"type\":\"linear\","
		  "\"factor\":4}," END);
	CU_ASSERT(a.rope.type == MOE_ROPE_LINEAR && a.rope.factor == 4 && a.rope.theta == 5e5);
	a = parse("{" BASE QWEN3 "\"rope_parameters\":{\"rope_type\":\"yarn\",\"rope_theta\":1e6,"
		  "\"factor\":4,\"original_max_position_embeddings\":32,\"truncate\":false}," END);
	CU_ASSERT(a.rope.type == MOE_ROPE_YARN && a.rope.theta == 1e6 && a.rope.factor == 4);
	CU_ASSERT(a.rope.beta_fast == 32 && a.rope.beta_slow == 1 && !a.rope.truncate);
	CU_ASSERT(a.rope.original_max_positions == 32 && a.rope.attention_factor == 0);
	a = parse("{" BASE QWEN3 "\"rope_scaling\":{\"rope_type\":\"yarn\","
		  "\"original_max_position_embeddings\":32}," END);
	CU_ASSERT(a.rope.factor == 4); /* transformers: max / original */
	a = parse("{" BASE QWEN3 "\"use_sliding_window\":false,\"sliding_window\":16," END);
	CU_ASSERT(a.max_positions == 128);
	a = parse("{" BASE MIXTRAL "\"sliding_window\":128,\"eos_token_id\":[1,2,1]," END);
	CU_ASSERT(a.n_eos == 2);
}

static void test_refusals(void)
{
	static const struct {
		const char *text;
		enum moe_status status;
		const char *says;
	} cases[] = {
		{ "{}", MOE_ERR_FORMAT, "model_type is missing" },
		{ "[]", MOE_ERR_FORMAT, "object" },
		{ "{", MOE_ERR_FORMAT, "JSON" },
		{ "{\"model_type\":3}", MOE_ERR_FORMAT, "model_type" },
		{ "{\"model_type\":\"llama\"}", MOE_ERR_UNSUPPORTED,
		  "mixtral, olmoe, qwen2_moe, qwen3_moe" },
		{ "{\"model_type\":\"qwen3_moe\"}", MOE_ERR_FORMAT, "vocab_size is missing" },
		{ "{\"vocab_size\":0," BASE QWEN3 END, MOE_ERR_FORMAT, "vocab_size" },
		{ "{\"hidden_size\":\"64\"," BASE QWEN3 END, MOE_ERR_FORMAT, "hidden_size" },
		{ "{\"hidden_size\":64.5," BASE QWEN3 END, MOE_ERR_FORMAT, "hidden_size" },
		{ "{\"hidden_size\":-64," BASE QWEN3 END, MOE_ERR_FORMAT, "hidden_size is -64" },
		{ "{\"num_hidden_layers\":100000," BASE QWEN3 END, MOE_ERR_FORMAT,
		  "num_hidden_layers" },
		{ "{\"num_key_value_heads\":3," BASE QWEN3 END, MOE_ERR_FORMAT, "not a multiple" },
		{ "{\"num_attention_heads\":6," BASE QWEN3 END, MOE_ERR_FORMAT, "head_dim" },
		{ "{\"head_dim\":7," BASE QWEN3 END, MOE_ERR_FORMAT, "odd" },
		{ "{\"rms_norm_eps\":0," BASE QWEN3 END, MOE_ERR_FORMAT, "rms_norm_eps" },
		{ "{\"rms_norm_eps\":\"a\"," BASE QWEN3 END, MOE_ERR_FORMAT, "rms_norm_eps" },
		{ "{" BASE_NO_EPS QWEN3 END, MOE_ERR_FORMAT, "rms_norm_eps is missing" },
		{ "{\"router_aux_loss_coef\":-1," BASE QWEN3 END, MOE_ERR_FORMAT, "router_aux_loss_coef is -1; 0 or more" },
		{ "{\"num_experts_per_tok\":9," BASE QWEN3 END, MOE_ERR_FORMAT,
		  "num_experts_per_tok 9 exceeds num_experts 8" },
		{ "{\"num_experts_per_tok\":0," BASE QWEN3 END, MOE_ERR_FORMAT,
		  "num_experts_per_tok" },
		{ "{\"moe_intermediate_size\":0," BASE QWEN3 END, MOE_ERR_FORMAT,
		  "moe_intermediate_size" },
		{ "{\"decoder_sparse_step\":0," BASE QWEN3 END, MOE_ERR_FORMAT,
		  "decoder_sparse_step" },
		{ "{\"mlp_only_layers\":3," BASE QWEN3 END, MOE_ERR_FORMAT, "mlp_only_layers" },
		{ "{\"norm_topk_prob\":1," BASE QWEN3 END, MOE_ERR_FORMAT, "norm_topk_prob" },
		{ "{\"hidden_act\":\"gelu\"," BASE QWEN3 END, MOE_ERR_UNSUPPORTED, "hidden_act" },
		{ "{\"swiglu_limit\":-1," BASE QWEN3 END, MOE_ERR_FORMAT, "swiglu_limit is -1" },
		{ "{\"swiglu_limit\":\"7\"," BASE QWEN3 END, MOE_ERR_FORMAT, "swiglu_limit" },
		{ "{\"eos_token_id\":100," BASE QWEN3 END, MOE_ERR_FORMAT, "eos_token_id" },
		{ "{\"eos_token_id\":[0,1,2,3,4,5,6,7,8]," BASE QWEN3 END, MOE_ERR_UNSUPPORTED,
		  "eos_token_id" },
		{ "{\"rope_theta\":0," BASE QWEN3 END, MOE_ERR_FORMAT, "rope_theta" },
		{ "{\"rope_scaling\":{\"type\":\"longrope\"}," BASE QWEN3 END, MOE_ERR_UNSUPPORTED,
		  "longrope" },
		{ "{\"rope_scaling\":{\"type\":\"linear\"}," BASE QWEN3 END, MOE_ERR_FORMAT,
		  "factor" },
		{ "{\"rope_scaling\":3," BASE QWEN3 END, MOE_ERR_FORMAT, "rope_" },
		{ "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":-2}," BASE QWEN3 END, MOE_ERR_FORMAT,
		  "rope factor -2 must be positive" },
		{ "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2,\"beta_fast\":-1}," BASE QWEN3 END, MOE_ERR_FORMAT,
		  "rope beta_fast -1, beta_slow 1 and attention_factor 0" },
		{ "{\"partial_rotary_factor\":0.5," BASE QWEN3 END, MOE_ERR_UNSUPPORTED,
		  "partial" },
		{ "{\"use_sliding_window\":true,\"sliding_window\":64," BASE QWEN3 END,
		  MOE_ERR_UNSUPPORTED, "sliding_window 64" },
		{ "{\"sliding_window\":64," BASE MIXTRAL END, MOE_ERR_UNSUPPORTED,
		  "sliding_window" },
		{ "{\"clip_qkv\":8.0," BASE OLMOE END, MOE_ERR_UNSUPPORTED, "clip_qkv" },
		{ "{\"head_dim\":32," BASE OLMOE END, MOE_ERR_FORMAT, "hidden_size" },
		{ "{\"quantization_config\":{}," BASE QWEN3 END, MOE_ERR_UNSUPPORTED, "quant_method 'none'" },
		{ "{\"quantization_config\":{\"quant_method\":\"bitsandbytes\"}," BASE QWEN3 END,
		  MOE_ERR_UNSUPPORTED, "quant_method 'bitsandbytes' cannot be read (known: fp8," },
		{ "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"marlin-24\"}," BASE
		  QWEN3 END, MOE_ERR_UNSUPPORTED, "format 'marlin-24' cannot be read" },
		{ "{\"quantization_config\":{\"quant_method\":\"gptq\",\"bits\":8}," BASE QWEN3 END,
		  MOE_ERR_UNSUPPORTED, "gptq of 8 bits cannot be read" },
		{ "{\"quantization_config\":{\"quant_method\":\"gptq\",\"bits\":4,\"checkpoint_format\":\"gptq_v2\"}," BASE QWEN3 END,
		  MOE_ERR_UNSUPPORTED, "checkpoint_format 'gptq_v2' of gptq cannot be read (known: gptq)" },
		{ "{\"quantization_config\":{\"quant_method\":\"awq\",\"bits\":4,\"version\":\"gemv\"}," BASE QWEN3 END,
		  MOE_ERR_UNSUPPORTED, "version 'gemv' of awq cannot be read (known: gemm)" },
	};
	struct moe_arch a;

	for (size_t i = 0; i < MOE_COUNT(cases); i++) {
		CU_ASSERT_EQUAL(moe_arch_parse(cases[i].text, NULL, &a), cases[i].status);
		if (!strstr(moe_last_error(), cases[i].says)) {
			printf("expected '%s' in: %s\n", cases[i].says, moe_last_error());
			CU_FAIL("another error text");
		}
	}
	CU_ASSERT_EQUAL(moe_arch_load("/nonexistent", &a), MOE_ERR_IO);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "/nonexistent/config.json"));
}

static void test_names(void)
{
	struct moe_arch q = load_fixture("qwen3-30b-a3b"), m = load_fixture("mixtral-8x7b");
	char name[MOE_TENSOR_NAME_MAX];

	CU_ASSERT(moe_arch_tensor_name(&q, MOE_ROLE_EXPERT_UP, 47, 127, 0, name));
	CU_ASSERT_STRING_EQUAL(name, "model.layers.47.mlp.experts.127.up_proj.weight");
	CU_ASSERT(!moe_arch_tensor_name(&q, MOE_ROLE_EXPERT_UP, 47, 128, 0, name));
	CU_ASSERT(!moe_arch_tensor_name(&q, MOE_ROLE_EXPERT_UP, 48, 0, 0, name));
	CU_ASSERT(!moe_arch_tensor_name(&q, MOE_ROLE_EXPERT_UP, -1, 0, 0, name));
	CU_ASSERT(moe_arch_tensor_name(&q, MOE_ROLE_EXPERTS_GATE_UP, 3, 0, 0, name));
	CU_ASSERT_STRING_EQUAL(name, "model.layers.3.mlp.experts.gate_up_proj");
	CU_ASSERT(moe_arch_tensor_name(&q, MOE_ROLE_EXPERTS_GATE_UP, 3, 0, 1, name));
	CU_ASSERT_STRING_EQUAL(name, "model.layers.3.mlp.experts.gate_up_proj.weight");
	CU_ASSERT(!moe_arch_tensor_name(&q, MOE_ROLE_EXPERTS_GATE_UP, 3, 0, 2, name));
	CU_ASSERT(!moe_arch_tensor_name(&q, MOE_ROLE_DENSE_UP, 3, 0, 0, name));
	CU_ASSERT(!moe_arch_tensor_name(&q, MOE_ROLE_Q_BIAS, 3, 0, 0, name));
	CU_ASSERT(moe_arch_tensor_name(&m, MOE_ROLE_EXPERT_DOWN, 1, 7, 0, name));
	CU_ASSERT_STRING_EQUAL(name, "model.layers.1.block_sparse_moe.experts.7.w2.weight");
	CU_ASSERT(!moe_arch_tensor_name(&m, MOE_ROLE_Q_NORM, 1, 0, 0, name));
	q.tie_embeddings = true;
	CU_ASSERT(!moe_arch_tensor_name(&q, MOE_ROLE_LM_HEAD, 0, 0, 0, name));
	for (int r = 0; r < MOE_ROLE_COUNT; r++)
		CU_ASSERT_PTR_NOT_NULL(moe_role_name((enum moe_role)r));
}

/* Reads role of (layer, expert) under whichever name the checkpoint has; false: none. */
static bool read_role(const struct moe_arch *a, const struct moe_safetensors *st,
		      enum moe_role role, int layer, int expert, float **out, size_t *n)
{
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(a, role, layer, shape);
	char name[MOE_TENSOR_NAME_MAX];

	for (int v = 0; moe_arch_tensor_name(a, role, layer, expert, v, name); v++) {
		if (!moe_safetensors_find(st, name))
			continue;
		*n = (size_t)moe_shape_count(ndim, shape);
		*out = malloc(*n * sizeof **out);
		CU_ASSERT_EQUAL(moe_safetensors_read_f32(st, name, ndim, shape, *out), MOE_OK);
		return true;
	}
	return false;
}

/* Every tensor of the checkpoint belongs to exactly one role, and every role is found. */
static void check_checkpoint(const char *relative)
{
	const char *dir = moe_test_shared(relative);
	struct moe_safetensors *st = NULL;
	struct moe_param_count count;
	struct moe_arch a;
	size_t tensors = 0;
	int64_t elements = 0;

	if (!dir) {
		moe_test_skip("../shared/%s is absent", relative);
		return;
	}
	CU_ASSERT_EQUAL_FATAL(moe_arch_load(dir, &a), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(dir, &st), MOE_OK);
	for (int role = 0; role < MOE_ROLE_COUNT; role++)
		for (int layer = 0; layer < (role <= MOE_ROLE_LM_HEAD ? 1 : a.n_layers); layer++)
			for (int e = 0;
			     e < (role >= MOE_ROLE_EXPERT_GATE && role <= MOE_ROLE_EXPERT_DOWN
					  ? a.n_experts
					  : 1);
			     e++) {
				float *f;
				size_t n;

				if (!read_role(&a, st, (enum moe_role)role, layer, e, &f, &n))
					continue;
				free(f);
				tensors++;
				elements += (int64_t)n;
			}
	CU_ASSERT_EQUAL(tensors, moe_safetensors_count(st));
	moe_arch_count_params(&a, &count);
	CU_ASSERT_EQUAL(elements, count.total);
	moe_safetensors_close(st);
}

static void test_checkpoints(void)
{
	check_checkpoint("oracle/ckpt/qwen3moe");
	check_checkpoint("oracle/ckpt/qwen3moe_fused");
	check_checkpoint("oracle/ckpt/mixtral_random");
}

/* qwen3moe_fused holds the weights of qwen3moe. */
static void test_fused_equals_split(void)
{
	const char *split_dir = moe_test_shared("oracle/ckpt/qwen3moe");
	const char *fused_dir = moe_test_shared("oracle/ckpt/qwen3moe_fused");
	struct moe_safetensors *split = NULL, *fused = NULL;
	struct moe_arch a, b;

	if (!split_dir || !fused_dir) {
		moe_test_skip("../shared/oracle/ckpt/qwen3moe is absent");
		return;
	}
	CU_ASSERT_EQUAL_FATAL(moe_arch_load(split_dir, &a), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_arch_load(fused_dir, &b), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(split_dir, &split), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(fused_dir, &fused), MOE_OK);
	for (int layer = 0; layer < a.n_layers; layer++) {
		float *gate_up, *down, *w;
		size_t n_gate_up, n_down, n;

		CU_ASSERT_FATAL(read_role(&b, fused, MOE_ROLE_EXPERTS_GATE_UP, layer, 0, &gate_up,
					  &n_gate_up));
		CU_ASSERT_FATAL(
			read_role(&b, fused, MOE_ROLE_EXPERTS_DOWN, layer, 0, &down, &n_down));
		for (int e = 0; e < a.n_experts; e++)
			for (int r = 0; r < 3; r++) {
				enum moe_role role = (enum moe_role)(MOE_ROLE_EXPERT_GATE + r);

				CU_ASSERT_FATAL(read_role(&a, split, role, layer, e, &w, &n));
				CU_ASSERT_EQUAL(
					memcmp(w,
					       r == 2 ? down + (size_t)e * n
						      : gate_up + (2 * (size_t)e + (size_t)r) * n,
					       n * sizeof *w),
					0);
				free(w);
			}
		free(gate_up);
		free(down);
	}
	moe_safetensors_close(split);
	moe_safetensors_close(fused);
}

const struct moe_test moe_suite_tests[] = {
	{ "Qwen3-30B-A3B", test_qwen3_30b },
	{ "parameter counts", test_param_counts },
	{ "defaults", test_defaults },
	{ "layers and rope", test_layers_and_rope },
	{ "refusals", test_refusals },
	{ "names", test_names },
	{ "shared checkpoints", test_checkpoints },
	{ "fused equals per expert", test_fused_equals_split },
	{ NULL, NULL },
};
