/* SPDX-License-Identifier: Apache-2.0 */
/* Names of LoRA targets: what their patterns match, and which modules of an architecture they are. */
#include "tests/harness.h"
#include "model/adapters/pattern.h"
#include "model/adapters/targets.h"

#include <stdio.h>
#include <string.h>

const char moe_suite_name[] = "adapter_targets";

static void test_patterns(void)
{
	static const struct {
		const char *text, *name;
		bool suffix, matches;
	} good[] = {
		{ ".*\\.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj", true, true },
		{ "gate_up_proj", "mlp.experts.gate_up_proj", true, true },
		{ "up_proj", "mlp.experts.gate_up_proj", true, false },
		{ "q_proj", "self_attn.q_proj", false, false },
		{ ".*layers\\.\\d+\\.self_attn\\.(q|v)_proj", "model.layers.12.self_attn.v_proj",
		  false, true },
		{ ".*layers\\.(?:1|2)\\..*_proj", "model.layers.12.self_attn.v_proj", false,
		  false },
		{ ".*layers\\.[0-9]\\.\\w+\\.q_proj", "model.layers.7.self_attn.q_proj", false,
		  true },
		{ ".*\\.\\d{1,2}\\.x", "a.123.x", false, false },
		{ "a[^.\\d]b", "acb", false, true },
		{ "a[^.\\d]b", "a4b", false, false },
	};
	static const char *const bad[] = { "(?=a)b", "(a)\\1",	   "a*?", "a{1,999}",
					   "a{2,}",  "(a",	   "[a",  "a{1}{2}{3}",
					   "\\bq",   "[[:alpha:]]" };
	char long_text[514] = "";
	regex_t re;

	for (size_t i = 0; i < MOE_COUNT(good); i++) {
		CU_ASSERT_EQUAL_FATAL(moe_pattern_compile(good[i].text, good[i].suffix, "x", &re),
				      MOE_OK);
		if (moe_pattern_matches(&re, good[i].name) != good[i].matches) {
			printf("'%s' on '%s'\n", good[i].text, good[i].name);
			CU_FAIL("another match");
		}
		regfree(&re);
	}
	memset(long_text, 'a', sizeof long_text - 1);
	CU_ASSERT_EQUAL(moe_pattern_compile(long_text, false, "lora_targets", &re), MOE_ERR_UNSUPPORTED);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "has more than 512 characters"));
	for (size_t i = 0; i < MOE_COUNT(bad); i++) {
		enum moe_status st = moe_pattern_compile(bad[i], false, "lora_targets", &re);

		if (st == MOE_OK)
			printf("'%s' compiled\n", bad[i]);
		CU_ASSERT(st == MOE_ERR_UNSUPPORTED || st == MOE_ERR_FORMAT);
		CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "lora_targets"));
	}
}

/* "q k v o experts gate shared": layers of each as bits. */
static void expect_targets(const struct moe_arch *arch, const char *text, const char *want,
			   const char *how)
{
	static struct moe_targets t;
	char got[256] = "", is[64];

	if (moe_targets_resolve(text, arch, &t) != MOE_OK)
		snprintf(got, sizeof got, "%s", moe_last_error());
	for (int i = 0; !*got || got[strlen(got) - 1] == ' '; i++) {
		unsigned bits = 0;

		if (i == (t.any[MOE_ADAPTER_SHARED_FFN + 2] ? MOE_ADAPTER_DENSE_FFN
							    : MOE_ADAPTER_SHARED_FFN))
			break;
		for (int l = 0; l < arch->n_layers; l++)
			bits |= (unsigned)t.on[i][l] << l;
		snprintf(got + strlen(got), sizeof got - strlen(got), "%x ", bits);
	}
	snprintf(is, sizeof is, "%s%s%s%s", t.gate_up ? "gate_up " : "", t.down ? "down " : "",
		 t.fused ? "fused " : "", t.fused_twice ? "twice " : "");
	if (strcmp(got, want) || strcmp(is, how))
		printf("%s: %s(%s), expected %s(%s)\n", text, got, is, want, how);
	CU_ASSERT_STRING_EQUAL(got, want);
	CU_ASSERT_STRING_EQUAL(is, how);
}

static void test_targets(void)
{
	static struct moe_arch arch, other;
	static struct moe_targets t;
	static const struct {
		const char *text;
		const char *says;
	} bad[] = {
		{ "w_proj", "\"w_proj\"" },
		{ "q_proj,lm_head", "\"lm_head\"" },
		{ "up_proj", "name both" },
		{ "q_proj,gate_proj", "name both" },
		{ ".*nothing.*", "\".*nothing.*\"" },
		{ ".*(", "lora_targets" },
		{ "shared_expert_gate", "\"shared_expert_gate\"" },
		{ "layers.4.self_attn.q_proj", "layers.4" },
		{ "", "names nothing" },
		{ " , ", "names nothing" },
	};

	CU_ASSERT_EQUAL_FATAL(moe_arch_load(moe_test_path("tests/fixtures/ckpt/qwen3moe"), &arch),
			      MOE_OK);
	arch.layer_is_moe[0] = false;
	expect_targets(&arch, "experts,q_proj", "f 0 0 0 e 0 0 ", "gate_up down ");
	expect_targets(&arch, "all", "f f f f e 0 0 ", "gate_up down ");
	expect_targets(&arch, "All-Linear", "f f f f e e 0 ", "gate_up down twice ");
	expect_targets(&arch, "self_attn.v_proj, gate", "0 0 f 0 0 e 0 ", "");
	expect_targets(&arch, "gate_proj,up_proj", "0 0 0 0 e 0 0 ", "gate_up twice ");
	expect_targets(&arch, "down_proj", "0 0 0 0 e 0 0 ", "down ");
	expect_targets(&arch, "mlp.experts.gate_up_proj,mlp.experts.down_proj", "0 0 0 0 e 0 0 ",
		       "gate_up down fused ");
	expect_targets(&arch, "layers.2.self_attn.q_proj", "4 0 0 0 0 0 0 ", "");
	expect_targets(&arch, ".*\\.(q|v)_proj", "f 0 f 0 0 0 0 ", "");
	expect_targets(&arch, ".*layers\\.[13]\\.mlp\\.experts\\..*", "0 0 0 0 a 0 0 ",
		       "gate_up down twice ");
	for (size_t i = 0; i < MOE_COUNT(bad); i++) {
		CU_ASSERT(moe_targets_resolve(bad[i].text, &arch, &t) != MOE_OK);
		if (!strstr(moe_last_error(), bad[i].says)) {
			printf("'%s': %s\n", bad[i].text, moe_last_error());
			CU_FAIL("another error text");
		}
	}
	CU_ASSERT_EQUAL_FATAL(
		moe_arch_load(moe_test_path("tests/fixtures/configs/qwen1.5-moe-a2.7b"), &other),
		MOE_OK);
	other.n_layers = 4;
	/* PEFT leaves Qwen2-MoE's experts out, and adapts the shared one */
	expect_targets(&other, "all-linear", "f f f f 0 0 f f f f ", "");
	expect_targets(&other, "all", "f f f f f 0 f f f f ", "gate_up down ");
	expect_targets(&other, "down_proj", "0 0 0 0 0 0 0 0 0 f ", "");
	expect_targets(&other, "experts", "0 0 0 0 f 0 0 ", "gate_up down ");
	expect_targets(&other, "mlp.experts.down_proj", "0 0 0 0 f 0 0 ", "down ");
	CU_ASSERT_EQUAL_FATAL(
		moe_arch_load(moe_test_path("tests/fixtures/configs/mixtral-8x7b"), &other),
		MOE_OK);
	other.n_layers = 4;
	expect_targets(&other, "w1,w2,w3", "0 0 0 0 f 0 0 ", "gate_up down twice ");
	expect_targets(&other, ".*block_sparse_moe\\.experts\\.\\d\\.w2", "0 0 0 0 f 0 0 ",
		       "down ");
}

const struct moe_test moe_suite_tests[] = {
	{ "patterns", test_patterns },
	{ "targets", test_targets },
	{ NULL, NULL },
};
