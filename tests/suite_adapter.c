/* SPDX-License-Identifier: Apache-2.0 */
/* Files of adapters: ours come back, PEFT's own are read and written, and a lack of memory leaves what was there. */
#include "tests/adapter_check.h"

const char moe_suite_name[] = "adapter";

enum { R = 2 }; /* of experts in make_two_layers */

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
		const char *dir = folder("round");

		make_two_layers(&s, variant & 1, variant & 2);
		CU_ASSERT_EQUAL_FATAL(moe_adapter_write(dir, &s.adapter, NULL), MOE_OK);
		if (moe_adapter_read(dir, &read) != MOE_OK)
			printf("%s\n", moe_last_error());
		CU_ASSERT_PTR_NOT_NULL_FATAL(read);
		expect_equal(&s.adapter, read);
		if (variant & 1)
			CU_ASSERT_PTR_EQUAL(read->entries[2].gate_a, read->entries[2].up_a);
		CU_ASSERT_DOUBLE_EQUAL(moe_adapter_scaling(read, &read->entries[2]),
				       1.5, 1e-12);
		moe_adapter_free(read);
	}
}

/* The configuration and the layout that PEFT reads, element by element. */
static void test_unshared_form(void)
{
	static struct sample s;
	const char *dir = folder("form"),
		   *inner = "base_model.model.model.layers.1.mlp.experts."
			    "base_layer.lora_";
	const struct moe_adapter_entry *e = &s.entries[5];
	struct moe_safetensors *st = NULL;
	char path[4200], name[128];
	float a[E * 2 * R * H], b[2 * I * 2 * R * E];
	cJSON *c = NULL;

	make_two_layers(&s, false, false);
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
	const char *peft = moe_test_shared(relative), *dir = folder("rewrite");
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

static void *hook_alloc(size_t n)
{
	return moe_alloc(n, 1);
}

static void test_failing_allocations(void)
{
	static struct sample s;
	cJSON_Hooks hooks = { hook_alloc, moe_free };
	const char *dir = folder("injected");
	struct moe_adapter *a = NULL;
	enum moe_status status = MOE_ERR_NOMEM;

	make_two_layers(&s, false, false);
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
	{ "failing allocations", test_failing_allocations },
	{ NULL, NULL },
};
