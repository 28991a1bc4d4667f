/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters: every registered form, files of ours and PEFT's own. */
#include "tests/harness.h"
#include "model/adapters/adapter_form.h"
#include "model/adapters/pattern.h"
#include "model/adapters/targets.h"
#include "model/file.h"
#include "model/json.h"
#include "model/readers/safetensors.h"
#include "model/readers/safetensors_writer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

const char moe_suite_name[] = "adapter";

static const char *adapter_dir(const char *name)
{
	static char ring[4][4096];
	static unsigned next;
	char *buf = ring[next++ % 4];

	snprintf(buf, sizeof ring[0], "%s/%s", moe_test_dir(), name);
	return buf;
}

enum { E = 3, H = 6, I = 5, R = 2, LAYERS = 2 };

/* An adapter of LAYERS layers with experts, and q_proj and o_proj of its own rank, random values.
 */
struct sample {
	struct moe_adapter adapter;
	struct moe_adapter_entry entries[3 * LAYERS];
	float values[LAYERS][6 * E * R * H + 200];
};

static float *take(float **p, int64_t n)
{
	float *at = *p;

	*p += n;
	return at;
}

static void make_sample(struct sample *s, bool share_a, bool rslora)
{
	unsigned seed = (unsigned)moe_test_seed();
	struct moe_adapter_entry *e = s->entries;

	*s = (struct sample){ .adapter = { .rank = 3,
					   .alpha = 8,
					   .rslora = rslora,
					   .share_a = share_a,
					   .base_model = (char *)"base/model",
					   .n_entries = MOE_COUNT(s->entries),
					   .entries = s->entries } };
	for (int l = 0; l < LAYERS; l++) {
		float *p = s->values[l];

		for (size_t i = 0; i < MOE_COUNT(s->values[l]); i++)
			p[i] = (float)(rand_r(&seed) % 1999 - 999) / 512 + 1e-3f;
		for (int t = MOE_ADAPTER_Q; t <= MOE_ADAPTER_O; t += MOE_ADAPTER_O) {
			*e = (struct moe_adapter_entry){ .layer = l,
							 .rank = 3,
							 .alpha = 8,
							 .target = (enum moe_adapter_target)t,
							 .in = H,
							 .out = 8 };
			e->a = take(&p, 3 * H);
			e->b = take(&p, 8 * 3);
			e++;
		}
		*e = (struct moe_adapter_entry){ .layer = l,
						 .target = MOE_ADAPTER_EXPERTS,
						 .rank = R,
						 .alpha = 3,
						 .gate_up_rank = R,
						 .gate_up_alpha = 3,
						 .n_experts = E,
						 .hidden = H,
						 .intermediate = I };
		e->gate_a = take(&p, E * R * H);
		e->up_a = share_a ? NULL : take(&p, E * R * H);
		e->down_a = take(&p, E * R * I);
		e->gate_b = take(&p, E * I * R);
		e->up_b = take(&p, E * I * R);
		e->down_b = take(&p, E * H * R);
		e++;
	}
}

#define SAME(field, n) CU_ASSERT(!memcmp(x->field, y->field, (size_t)(n) * sizeof(float)))

static void expect_equal(const struct moe_adapter *a, const struct moe_adapter *b)
{
	CU_ASSERT(a->rank == b->rank && a->alpha == b->alpha && a->rslora == b->rslora);
	CU_ASSERT(a->share_a == b->share_a);
	CU_ASSERT_STRING_EQUAL(a->base_model, b->base_model);
	CU_ASSERT_EQUAL_FATAL(a->n_entries, b->n_entries);
	CU_ASSERT_EQUAL(moe_adapter_count_params(a), moe_adapter_count_params(b));
	for (size_t i = 0; i < a->n_entries; i++) {
		const struct moe_adapter_entry *x = &a->entries[i], *y;
		int64_t n = x->n_experts * x->rank, N = x->n_experts * x->gate_up_rank;

		y = moe_adapter_find(b, x->layer, x->target);
		CU_ASSERT_PTR_NOT_NULL_FATAL(y);
		CU_ASSERT(x->rank == y->rank && x->gate_up_rank == y->gate_up_rank);
		CU_ASSERT_DOUBLE_EQUAL(x->alpha, y->alpha, 1e-12);
		CU_ASSERT_DOUBLE_EQUAL(x->gate_up_alpha, y->gate_up_alpha, 1e-12);
		CU_ASSERT(x->in == y->in && x->out == y->out && x->n_experts == y->n_experts);
		CU_ASSERT(x->hidden == y->hidden && x->intermediate == y->intermediate);
		if (x->target != MOE_ADAPTER_EXPERTS) {
			SAME(a, x->rank * x->in);
			SAME(b, x->rank * x->out);
			continue;
		}
		SAME(gate_a, N * x->hidden);
		if (!a->share_a)
			SAME(up_a, N * x->hidden);
		SAME(down_a, n * x->intermediate);
		SAME(gate_b, N * x->intermediate);
		SAME(up_b, N * x->intermediate);
		SAME(down_b, n * x->hidden);
	}
}

static void test_round_trip(void)
{
	static struct sample s;

	for (int variant = 0; variant < 4; variant++) {
		struct moe_adapter *read = NULL;
		const char *dir = adapter_dir("round");

		make_sample(&s, variant & 1, variant & 2);
		CU_ASSERT_EQUAL_FATAL(moe_adapter_write(dir, &s.adapter, NULL), MOE_OK);
		if (moe_adapter_read(dir, &read) != MOE_OK)
			printf("%s\n", moe_last_error());
		CU_ASSERT_PTR_NOT_NULL_FATAL(read);
		expect_equal(&s.adapter, read);
		if (variant & 1)
			CU_ASSERT_PTR_EQUAL(read->entries[2].gate_a, read->entries[2].up_a);
		CU_ASSERT_DOUBLE_EQUAL(moe_adapter_scaling(read, &read->entries[2]),
				       variant & 2 ? 3 / sqrt(2) : 1.5, 1e-12);
		moe_adapter_free(read);
	}
}

/* The configuration and the layout that PEFT reads, element by element. */
static void test_unshared_form(void)
{
	static struct sample s;
	const char *dir = adapter_dir("form"),
		   *inner = "base_model.model.model.layers.1.mlp.experts."
			    "base_layer.lora_";
	const struct moe_adapter_entry *e = &s.entries[5];
	struct moe_safetensors *st = NULL;
	char path[4200], name[128];
	float a[E * 2 * R * H], b[2 * I * 2 * R * E];
	cJSON *c = NULL;

	make_sample(&s, false, false);
	CU_ASSERT_EQUAL_FATAL(moe_adapter_write(dir, &s.adapter, NULL), MOE_OK);
	snprintf(path, sizeof path, "%s/adapter_config.json", dir);
	CU_ASSERT_EQUAL_FATAL(moe_json_read(path, &c), MOE_OK);
	CU_ASSERT_EQUAL(moe_json_get(moe_json_get(c, "rank_pattern"), "mlp.experts.gate_up_proj")
				->valuedouble,
			2 * R);
	CU_ASSERT_EQUAL(
		moe_json_get(moe_json_get(c, "rank_pattern"), "mlp.experts.down_proj")->valuedouble,
		R);
	CU_ASSERT_EQUAL(moe_json_get(moe_json_get(c, "alpha_pattern"), "mlp.experts.gate_up_proj")
				->valuedouble,
			6);
	CU_ASSERT_EQUAL(moe_json_get(c, "lora_dropout")->valuedouble, 0);
	CU_ASSERT_EQUAL(cJSON_GetArraySize(moe_json_get(c, "target_modules")), 2);
	cJSON_Delete(c);
	snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(path, &st), MOE_OK);
	snprintf(name, sizeof name, "%sA.weight", inner);
	CU_ASSERT_EQUAL(moe_safetensors_read_f32(st, name, 2, (int64_t[]){ E * 2 * R, H }, a),
			MOE_OK);
	snprintf(name, sizeof name, "%sB.weight", inner);
	CU_ASSERT_EQUAL(moe_safetensors_read_f32(st, name, 2, (int64_t[]){ 2 * I, 2 * R * E }, b),
			MOE_OK);
	for (int x = 0; x < E; x++)
		for (int j = 0; j < 2 * R; j++) {
			const float *own =
				j < R ? e->gate_a + (x * R + j) * H : e->up_a + (x * R + j - R) * H;

			CU_ASSERT(!memcmp(a + (x * 2 * R + j) * H, own, H * sizeof *a));
			for (int row = 0; row < 2 * I; row++) {
				float want = 0;

				if (row < I && j < R)
					want = e->gate_b[(x * I + row) * R + j];
				if (row >= I && j >= R)
					want = e->up_b[(x * I + row - I) * R + j - R];
				CU_ASSERT_EQUAL(b[row * 2 * R * E + j * E + x], want);
			}
		}
	moe_safetensors_close(st);
}

/* adapter_peft (made by PEFT) and adapter_kt hold the same function. */
static void test_peft_equals_kt(void)
{
	static const struct {
		const char *name;
		size_t offset;
		int kind; /* 0: [E,r,H], 1: [E,r,I], 2: [E,I,r], 3: [E,H,r] */
	} arrays[] = {
#define ARRAY(name, field, kind) { name, offsetof(struct moe_adapter_entry, field), kind }
		ARRAY("gate_lora_a", gate_a, 0), ARRAY("up_lora_a", up_a, 0),
		ARRAY("down_lora_a", down_a, 1), ARRAY("gate_lora_b", gate_b, 2),
		ARRAY("up_lora_b", up_b, 2),	 ARRAY("down_lora_b", down_b, 3),
	};
	const char *peft = moe_test_shared("oracle/ckpt/adapter_peft");
	const char *kt = moe_test_shared("oracle/ckpt/adapter_kt/fused_expert_lora.safetensors");
	const char *base = moe_test_shared("oracle/ckpt/qwen3moe");
	struct moe_safetensors *st = NULL;
	struct moe_adapter *a = NULL;
	struct moe_arch arch;

	if (!peft || !kt || !base) {
		moe_test_skip("../shared/oracle/ckpt is absent");
		return;
	}
	CU_ASSERT_EQUAL_FATAL(moe_adapter_read(peft, &a), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_arch_load(base, &arch), MOE_OK);
	CU_ASSERT_EQUAL(moe_adapter_check(a, &arch), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(kt, &st), MOE_OK);
	CU_ASSERT(a->share_a && a->rank == 4 && a->alpha == 8 && a->n_entries == 12);
	for (int l = 0; l < 4; l++) {
		const struct moe_adapter_entry *e = moe_adapter_find(a, l, MOE_ADAPTER_EXPERTS);

		CU_ASSERT_PTR_NOT_NULL_FATAL(e);
		for (size_t i = 0; i < MOE_COUNT(arrays); i++) {
			const int64_t shapes[4][3] = {
				{ 8, 4, 128 }, { 8, 4, 128 }, { 8, 128, 4 }, { 8, 128, 4 }
			};
			float *got, want[8 * 4 * 128];
			char name[128];

			snprintf(name, sizeof name, "layers.%d.experts.%s", l, arrays[i].name);
			CU_ASSERT_EQUAL(
				moe_safetensors_read_f32(st, name, 3, shapes[arrays[i].kind], want),
				MOE_OK);
			memcpy(&got, (const char *)e + arrays[i].offset, sizeof got);
			CU_ASSERT(!memcmp(got, want, sizeof want));
		}
	}
	arch.hidden = 64;
	CU_ASSERT_EQUAL(moe_adapter_check(a, &arch), MOE_ERR_FORMAT);
	arch.hidden = 128;
	arch.n_layers = 3;
	CU_ASSERT_EQUAL(moe_adapter_check(a, &arch), MOE_ERR_FORMAT);
	moe_safetensors_close(st);
	moe_adapter_free(a);
}

/* What PEFT wrote comes back from us tensor for tensor. */
static void rewrite(const char *relative)
{
	const char *peft = moe_test_shared(relative), *dir = adapter_dir("rewrite");
	struct moe_safetensors *x = NULL, *y = NULL;
	struct moe_adapter *a = NULL;
	char path[4200];

	if (!peft) {
		moe_test_skip("../shared/%s is absent", relative);
		return;
	}
	CU_ASSERT_EQUAL_FATAL(moe_adapter_read(peft, &a), MOE_OK);
	CU_ASSERT(a->share_a);
	CU_ASSERT_EQUAL_FATAL(moe_adapter_write(dir, a, NULL), MOE_OK);
	snprintf(path, sizeof path, "%s/adapter_model.safetensors", peft);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(path, &x), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(dir, &y), MOE_OK);
	CU_ASSERT_EQUAL(moe_safetensors_count(x), moe_safetensors_count(y));
	for (size_t i = 0; i < moe_safetensors_count(x); i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(x, i), *u;

		CU_ASSERT_EQUAL_FATAL(
			moe_safetensors_get_typed(y, t->name, t->dtype, t->ndim, t->shape, &u),
			MOE_OK);
		CU_ASSERT(!memcmp(t->data, u->data, t->bytes));
	}
	moe_safetensors_close(x);
	moe_safetensors_close(y);
	moe_adapter_free(a);
}

static void test_rewrite(void)
{
	rewrite("oracle/ckpt/adapter_peft");
	rewrite("oracle/demo_init");
}

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
		const char *dir = adapter_dir("case");
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
	const char *dir = adapter_dir("corrupt");
	int rounds = moe_test_full() ? 50000 : 1500, opened = 0;
	unsigned seed = (unsigned)moe_test_seed();

	make_sample(&s, false, false);
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
	const char *dir = adapter_dir("missing");
	struct moe_adapter *a = NULL;
	char path[4200];

	make_sample(&s, true, false);
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

static void *hook_alloc(size_t n)
{
	return moe_alloc(n, 1);
}

static void test_failing_allocations(void)
{
	static struct sample s;
	cJSON_Hooks hooks = { hook_alloc, moe_free };
	const char *dir = adapter_dir("injected");
	struct moe_adapter *a = NULL;
	enum moe_status status = MOE_ERR_NOMEM;

	make_sample(&s, false, false);
	CU_ASSERT_EQUAL_FATAL(moe_adapter_write(dir, &s.adapter, NULL), MOE_OK);
	cJSON_InitHooks(&hooks);
	for (int n = 0; status != MOE_OK && n < 10000; n++) {
		struct moe_adapter *partial = NULL;

		moe_alloc_fail_after(n);
		status = moe_adapter_write(dir, &s.adapter, NULL);
		moe_alloc_fail_after(-1);
		CU_ASSERT(status == MOE_OK || status == MOE_ERR_NOMEM);
		/* what was there stays readable */
		CU_ASSERT_EQUAL_FATAL(moe_adapter_read(dir, &partial), MOE_OK);
		moe_adapter_free(partial);
	}
	CU_ASSERT_EQUAL(status, MOE_OK);
	status = MOE_ERR_NOMEM;
	for (int n = 0; status != MOE_OK && n < 10000; n++) {
		moe_alloc_fail_after(n);
		status = moe_adapter_read(dir, &a);
		moe_alloc_fail_after(-1);
	}
	cJSON_InitHooks(NULL);
	CU_ASSERT_EQUAL_FATAL(status, MOE_OK);
	expect_equal(&s.adapter, a);
	moe_adapter_free(a);
}

const struct moe_test moe_suite_tests[] = {
	{ "round trip", test_round_trip },
	{ "unshared form", test_unshared_form },
	{ "PEFT equals kt", test_peft_equals_kt },
	{ "rewriting PEFT's files", test_rewrite },
	{ "refusals", test_refusals },
	{ "random corruption", test_corruptions },
	{ "missing files", test_missing_files },
	{ "failing allocations", test_failing_allocations },
	{ NULL, NULL },
};
