/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters that are refused: configurations and tensors that do not fit, damaged and missing files. */
#include "tests/adapter_check.h"

const char moe_suite_name[] = "adapter_refusals";

#define CONFIG "{\"peft_type\":\"LORA\",\"r\":2,\"lora_alpha\":4"
#define Q "base_model.model.model.layers.0.self_attn.q_proj.lora_"
#define GATE "base_model.model.model.layers.0.mlp.gate."
#define EXPERT "base_model.model.model.layers.0.mlp.experts."
#define INNER "base_model.model.model.layers.0.mlp.experts.base_layer.lora_"
#define OUTER "base_model.model.model.layers.0.mlp.experts.lora_"

/* One directory per case: a config and up to four matrices of zeros. */
static void test_refusals(void)
{
	static const struct {
		const char *config;
		struct {
			const char *name;
			int64_t rows, columns;
		} t[4];
		enum moe_status status;
		const char *says;
	} cases[] = {
		{ CONFIG "}", { { Q "A.weight", 2, 6 }, { Q "B.weight", 8, 2 } }, MOE_OK, "" },
		{ CONFIG ",\"rank_pattern\":{\"q_proj\":3},\"alpha_pattern\":{\".*q_proj\":9}}",
		  { { Q "A.weight", 3, 6 }, { Q "B.weight", 8, 3 } },
		  MOE_OK,
		  "" },
		{ CONFIG "}",
		  { { INNER "A.weight", 6, 6 },
		    { INNER "B.weight", 10, 6 },
		    { OUTER "A.weight", 6, 5 },
		    { OUTER "B.weight", 6, 6 } },
		  MOE_OK,
		  "" },
		/* the nesting may be the other way round */
		{ CONFIG "}",
		  { { OUTER "A.weight", 6, 6 },
		    { OUTER "B.weight", 10, 6 },
		    { INNER "A.weight", 6, 5 },
		    { INNER "B.weight", 6, 6 } },
		  MOE_OK,
		  "" },
		{ "{}", { { Q "A.weight", 2, 6 } }, MOE_ERR_UNSUPPORTED, "peft_type" },
		{ "{\"peft_type\":\"LORA\",\"r\":0,\"lora_alpha\":4}",
		  { { Q "A.weight", 2, 6 } },
		  MOE_ERR_FORMAT,
		  "r is 0" },
		{ "{\"peft_type\":\"LORA\",\"r\":2}",
		  { { Q "A.weight", 2, 6 } },
		  MOE_ERR_FORMAT,
		  "lora_alpha" },
		{ CONFIG ",\"use_dora\":true}",
		  { { Q "A.weight", 2, 6 } },
		  MOE_ERR_UNSUPPORTED,
		  "use_dora" },
		{ CONFIG ",\"bias\":\"all\"}",
		  { { Q "A.weight", 2, 6 } },
		  MOE_ERR_UNSUPPORTED,
		  "bias" },
		{ CONFIG ",\"modules_to_save\":[\"lm_head\"]}",
		  { { Q "A.weight", 2, 6 } },
		  MOE_ERR_UNSUPPORTED,
		  "modules_to_save names 'lm_head'" },
		{ CONFIG ",\"modules_to_save\":\"gate\"}",
		  { { Q "A.weight", 2, 6 } },
		  MOE_ERR_FORMAT,
		  "modules_to_save is not a list" },
		{ CONFIG ",\"modules_to_save\":[\"layers.0.mlp.gate\"]}",
		  { { Q "A.weight", 2, 6 }, { Q "B.weight", 8, 2 }, { GATE "weight", 3, 6 } },
		  MOE_OK,
		  "" },
		{ CONFIG ",\"modules_to_save\":[\"mlp.gate\"]}",
		  { { GATE "weight", 3, 6 }, { GATE "lora_A.weight", 2, 6 }, { GATE "lora_B.weight", 3, 2 } },
		  MOE_ERR_FORMAT,
		  "are of one router" },
		{ CONFIG ",\"modules_to_save\":[\"gate\"]}",
		  { { "base_model.model.model.layers.0.mlp.shared_expert_gate.weight", 1, 6 } },
		  MOE_ERR_UNSUPPORTED,
		  "shared_expert_gate.weight' cannot be used" },
		{ CONFIG ",\"rank_pattern\":3}", { { Q "A.weight", 2, 6 } }, MOE_ERR_FORMAT, "rank_pattern is not an object" },
		{ CONFIG ",\"alpha_pattern\":{\"q_proj\":\"4\"}}",
		  { { Q "A.weight", 2, 6 }, { Q "B.weight", 8, 2 } },
		  MOE_ERR_FORMAT,
		  "q_proj is not a number" },
		{ CONFIG "}", { { 0 } }, MOE_ERR_FORMAT, "holds no tensors" },
		{ CONFIG ",\"rank_pattern\":{\"((a{1,99}){1,99}){1,99}\":2}}",
		  { { Q "A.weight", 2, 6 } },
		  MOE_ERR_UNSUPPORTED,
		  "rank_pattern" },
		{ CONFIG ",\"alpha_pattern\":{\"(a)\\\\1\":2}}",
		  { { Q "A.weight", 2, 6 } },
		  MOE_ERR_UNSUPPORTED,
		  "alpha_pattern" },
		{ CONFIG "}", { { Q "A.weight", 2, 6 } }, MOE_ERR_FORMAT, "no partner lora_B" },
		{ CONFIG "}", { { Q "B.weight", 2, 6 } }, MOE_ERR_FORMAT, "no partner lora_A" },
		{ CONFIG "}",
		  { { Q "A.weight", 3, 6 }, { Q "B.weight", 8, 2 } },
		  MOE_ERR_FORMAT,
		  "3 rows" },
		{ CONFIG "}",
		  { { Q "A.weight", 3, 6 }, { Q "B.weight", 8, 3 } },
		  MOE_ERR_FORMAT,
		  "rank 3, the configuration 2" },
		{ CONFIG "}",
		  { { Q "A.weight", 0, 6 }, { Q "B.weight", 8, 0 } },
		  MOE_ERR_FORMAT,
		  "not a matrix" },
		{ CONFIG "}",
		  { { "base_model.model.lm_head.lora_A.weight", 2, 6 } },
		  MOE_ERR_UNSUPPORTED,
		  "lm_head" },
		{ CONFIG "}",
		  { { "base_model.model.model.layers.999999999999999999999.x", 2, 6 } },
		  MOE_ERR_UNSUPPORTED,
		  "layers.9999" },
		{ CONFIG "}",
		  { { "base_model.model.model.layers.0.lora_A.weight", 2, 6 } },
		  MOE_ERR_UNSUPPORTED,
		  "cannot be used" },
		{ CONFIG "}",
		  { { Q "A.weight", 2, 6 },
		    { Q "B.weight", 8, 2 },
		    { "base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", 2, 6 } },
		  MOE_ERR_FORMAT,
		  "the same" },
		{ CONFIG "}",
		  { { OUTER "A.weight", 6, 5 }, { OUTER "B.weight", 6, 6 } },
		  MOE_ERR_FORMAT,
		  "name neither" },
		{ CONFIG ",\"target_parameters\":[\"gate_up_proj\",\"down_proj\"]}",
		  { { OUTER "A.weight", 6, 5 }, { OUTER "B.weight", 6, 6 } },
		  MOE_ERR_FORMAT,
		  "name both" },
		{ CONFIG ",\"target_parameters\":[\"mlp.experts.down_proj\"]}",
		  { { OUTER "A.weight", 6, 5 }, { OUTER "B.weight", 6, 6 } },
		  MOE_OK,
		  "" },
		{ CONFIG ",\"target_parameters\":[\"mlp.experts.gate_up_proj\"]}",
		  { { OUTER "A.weight", 6, 5 }, { OUTER "B.weight", 7, 6 } },
		  MOE_ERR_FORMAT,
		  "odd number" },
		{ CONFIG "}",
		  { { INNER "A.weight", 6, 6 },
		    { INNER "B.weight", 9, 6 },
		    { OUTER "A.weight", 6, 5 },
		    { OUTER "B.weight", 6, 6 } },
		  MOE_ERR_FORMAT,
		  "do not fit gate_up and down" },
		{ CONFIG "}",
		  { { INNER "A.weight", 5, 6 },
		    { INNER "B.weight", 10, 5 },
		    { OUTER "A.weight", 6, 5 },
		    { OUTER "B.weight", 6, 6 } },
		  MOE_ERR_FORMAT,
		  "configured rank 2" },
		/* any ranks, any scalings */
		{ CONFIG ",\"rank_pattern\":{\"mlp.experts.gate_up_proj\":3}}",
		  { { INNER "A.weight", 9, 6 },
		    { INNER "B.weight", 10, 9 },
		    { OUTER "A.weight", 6, 5 },
		    { OUTER "B.weight", 6, 6 } },
		  MOE_OK,
		  "" },
		{ CONFIG "}",
		  { { INNER "A.weight", 6, 6 },
		    { INNER "B.weight", 10, 6 },
		    { EXPERT "0.down_proj.lora_A.weight", 2, 5 },
		    { EXPERT "0.down_proj.lora_B.weight", 6, 2 } },
		  MOE_ERR_FORMAT,
		  "forms peft and per-expert" },
		{ CONFIG "}",
		  { { EXPERT "0.down_proj.lora_A.weight", 2, 5 },
		    { EXPERT "0.down_proj.lora_B.weight", 6, 2 } },
		  MOE_OK,
		  "" },
		{ CONFIG "}",
		  { { EXPERT "1.down_proj.lora_A.weight", 2, 5 },
		    { EXPERT "1.down_proj.lora_B.weight", 6, 2 } },
		  MOE_ERR_FORMAT,
		  "down_proj of expert 0 is missing" },
		{ CONFIG "}",
		  { { EXPERT "0.up_proj.lora_A.weight", 2, 6 },
		    { EXPERT "0.up_proj.lora_B.weight", 5, 2 } },
		  MOE_ERR_UNSUPPORTED,
		  "without the other" },
		{ CONFIG "}",
		  { { EXPERT "0.down_proj.lora_A.weight", 2, 5 },
		    { EXPERT "0.down_proj.lora_B.weight", 6, 2 },
		    { EXPERT "1.down_proj.lora_A.weight", 2, 4 },
		    { EXPERT "1.down_proj.lora_B.weight", 6, 2 } },
		  MOE_ERR_FORMAT,
		  "[2, 4]" },
		{ CONFIG "}",
		  { { EXPERT "0.down_proj.lora_A.weight", 3, 5 },
		    { EXPERT "0.down_proj.lora_B.weight", 6, 3 } },
		  MOE_ERR_FORMAT,
		  "rank 2 of the configuration" },
		{ CONFIG ",\"rank_pattern\":{\"up_proj\":3}}",
		  { { EXPERT "0.gate_proj.lora_A.weight", 2, 6 },
		    { EXPERT "0.gate_proj.lora_B.weight", 5, 2 },
		    { EXPERT "0.up_proj.lora_A.weight", 3, 6 },
		    { EXPERT "0.up_proj.lora_B.weight", 5, 3 } },
		  MOE_ERR_UNSUPPORTED,
		  "up_proj rank 3" },
		{ CONFIG "}",
		  { { EXPERT "99999999.down_proj.lora_A.weight", 2, 5 } },
		  MOE_ERR_UNSUPPORTED,
		  "99999999" },
	};
	static float zeros[256];

	for (size_t i = 0; i < MOE_COUNT(cases); i++) {
		const char *dir = folder("case");
		struct moe_st_item items[4];
		struct moe_adapter *a = NULL;
		enum moe_status status;
		char path[4200];
		size_t n = 0;

		CU_ASSERT_EQUAL(moe_dir_make(dir), MOE_OK);
		for (; n < 4 && cases[i].t[n].name; n++)
			items[n] = (struct moe_st_item){ .name = cases[i].t[n].name,
							 .dtype = MOE_F32,
							 .ndim = 2,
							 .data = zeros,
							 .shape = { cases[i].t[n].rows,
								    cases[i].t[n].columns } };
		snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
		CU_ASSERT_EQUAL(moe_safetensors_write(path, items, n, NULL, 0), MOE_OK);
		snprintf(path, sizeof path, "%s/adapter_config.json", dir);
		CU_ASSERT_EQUAL(moe_file_write(path, cases[i].config, strlen(cases[i].config)),
				MOE_OK);
		status = moe_adapter_read(dir, &a);
		CU_ASSERT_EQUAL(status, cases[i].status);
		if (status != MOE_OK && !strstr(moe_last_error(), cases[i].says)) {
			printf("case %zu: expected '%s' in: %s\n", i, cases[i].says,
			       moe_last_error());
			CU_FAIL("another error text");
		}
		if (status == MOE_OK)
			moe_adapter_free(a);
	}
}

/* Random corruption of either file: any result but a crash. */
static void test_corruptions(void)
{
	static const char *const names[] = { "adapter_config.json", "adapter_model.safetensors" };
	static struct sample s;
	const char *dir = folder("corrupt");
	int rounds = moe_test_full() ? 50000 : 1500, opened = 0;
	unsigned seed = (unsigned)moe_test_seed();

	make_two_layers(&s, false, false);
	CU_ASSERT_EQUAL_FATAL(moe_adapter_write(dir, &s.adapter, NULL), MOE_OK);
	for (int which = 0; which < 2; which++) {
		char path[4200], *text, *copy;
		size_t n;

		snprintf(path, sizeof path, "%s/%s", dir, names[which]);
		CU_ASSERT_EQUAL_FATAL(moe_file_read(path, 1 << 20, &text, &n), MOE_OK);
		copy = malloc(n);
		for (int i = 0; i < rounds; i++) {
			struct moe_adapter *a = NULL;
			FILE *f = fopen(path, "wb");

			memcpy(copy, text, n);
			for (int k = 0; k <= i % 3; k++)
				copy[(size_t)rand_r(&seed) % MOE_MIN(n, (size_t)2000)] =
					"0123456789,:[]{}\"ABFIU.null"[rand_r(&seed) % 27];
			fwrite(copy, 1, n, f);
			fclose(f);
			opened += moe_adapter_read(dir, &a) == MOE_OK;
			moe_adapter_free(a);
		}
		CU_ASSERT_EQUAL(moe_file_write(path, text, n), MOE_OK);
		free(copy);
		moe_free(text);
	}
	printf("%d of %d still read ", opened, 2 * rounds);
}

static void test_missing_files(void)
{
	static struct sample s;
	const char *dir = folder("missing");
	struct moe_adapter *a = NULL;
	char path[4200];

	make_two_layers(&s, true, false);
	CU_ASSERT_EQUAL(moe_adapter_read(dir, &a), MOE_ERR_IO);
	CU_ASSERT_EQUAL_FATAL(moe_adapter_write(dir, &s.adapter, NULL), MOE_OK);
	snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
	CU_ASSERT_EQUAL(remove(path), 0);
	CU_ASSERT_EQUAL(moe_adapter_read(dir, &a), MOE_ERR_IO);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "adapter_model.safetensors"));
	CU_ASSERT_EQUAL(moe_adapter_write("/proc/none", &s.adapter, NULL), MOE_ERR_IO);
	s.adapter.rank = 0;
	CU_ASSERT_EQUAL(moe_adapter_write(dir, &s.adapter, NULL), MOE_ERR_ARG);
	s.adapter.rank = 3;
	s.entries[0].rank = 0;
	CU_ASSERT_EQUAL(moe_adapter_write(dir, &s.adapter, NULL), MOE_ERR_ARG);
	CU_ASSERT_EQUAL(moe_adapter_write(dir, &s.adapter, "vllm"), MOE_ERR_ARG);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "kt, peft, per-expert"));
	s.entries[0].rank = 3;
	s.entries[0].target = MOE_ADAPTER_TARGETS;
	CU_ASSERT_EQUAL(moe_adapter_write(dir, &s.adapter, NULL), MOE_ERR_ARG);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "adapter entry of layer 0 has target"));
	s.entries[0].target = MOE_ADAPTER_Q;
	s.entries[0].weight = s.entries[0].a;
	CU_ASSERT_EQUAL(moe_adapter_write(dir, &s.adapter, NULL), MOE_ERR_ARG);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "q_proj of layer 0 has a weight"));
	s.entries[0].weight = NULL;
	snprintf(path, sizeof path, "%s/fused_expert_lora.safetensors", dir);
	CU_ASSERT_EQUAL(moe_dir_make(path), MOE_OK);
	CU_ASSERT_EQUAL(moe_adapter_write(dir, &s.adapter, "peft"), MOE_ERR_IO);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "fused_expert_lora.safetensors: cannot remove"));
	CU_ASSERT_EQUAL(remove(path), 0);
	s.entries[2].down_b = NULL;
	CU_ASSERT_EQUAL(moe_adapter_write(dir, &s.adapter, NULL), MOE_ERR_ARG);
}

const struct moe_test moe_suite_tests[] = {
	{ "refusals", test_refusals },
	{ "random corruption", test_corruptions },
	{ "missing files", test_missing_files },
	{ NULL, NULL },
};
