/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is saved of quantised weights that are trained: the checkpoint has the base's tensors, a state goes on with
 * the same bits. And which weights are not trained.
 */
#include "tests/requantise_check.h"

#include "train/params.h"

const char moe_suite_name[] = "requantise_saved";

/* ---- checkpoints ---- */

/* The base's tensors with new codes: a model that is loaded from it computes what the trained one
 * does. */
static void check_saved(struct moe_engine *e, const char *dir, enum moe_method method,
			enum moe_masters masters)
{
	struct moe_model *m = open_trained(e, dir, NULL, method, masters), *back;
	struct moe_safetensors *base, *out;
	struct run r;
	size_t changed = 0;

	begin(&r, m);
	for (int i = 0; i < 2; i++)
		step(&r, true);
	moe_tree_remove(out_dir);
	OK(moe_model_save(m, out_dir));
	OK(moe_safetensors_open(dir, &base));
	OK(moe_safetensors_open(out_dir, &out));
	CHECK(moe_safetensors_count(base) == moe_safetensors_count(out));
	for (size_t i = 0; i < moe_safetensors_count(base); i++) {
		const struct moe_st_tensor *x = moe_safetensors_at(base, i),
					   *y = moe_safetensors_find(out, x->name);

		if (!CHECK(y && y->dtype == x->dtype && y->bytes == x->bytes && y->ndim == x->ndim))
			continue;
		changed += memcmp(x->data, y->data, x->bytes) != 0;
	}
	CHECK(changed > (method == MOE_METHOD_FULL ? moe_safetensors_count(base) / 3 : 4));
	moe_safetensors_close(base);
	moe_safetensors_close(out);
	/* codes, bit by bit; hybrid has an adapter beside them, and norms and routers are f32 in
	 * one and bf16 in the other */
	back = open_trained(e, out_dir, NULL, MOE_METHOD_LORA, MOE_MASTERS_F32);
	for (int l = 0; l < m->decoder.n_layers; l++) {
		const struct moe_experts *x = m->decoder.layers[l].experts,
					 *y = back->decoder.layers[l].experts;

		for (int i = 0; x && i < x->E; i++)
			for (int p = 0; p < x->P; p++) {
				const struct moe_weight *w = &x->part[p].down[i],
							*v = &y->part[p].down[i];

				CHECK(!memcmp(w->data, v->data,
					      moe_coded_bytes(&w->coding, w->n, w->k)));
				w = &x->part[p].up[i], v = &y->part[p].up[i];
				CHECK(!memcmp(w->data, v->data,
					      moe_coded_bytes(&w->coding, w->n, w->k)));
			}
	}
	moe_model_close(back);
	free_run(&r);
	moe_model_close(m);
}

static void test_saved(void)
{
	const char *from = fixture("ckpt/qwen3moe");

	if (!from)
		return;
	dirs();
	for (int parts = 1; parts <= 3; parts += 2) {
		struct moe_engine *e = open_engine(2, parts, NULL);

		for (size_t i = 0; i < MOE_COUNT(quantised_kinds); i++) {
			make_quantised(from, EXPERTS, &quantised_kinds[i], coded_dir, NULL, NULL);
			check_saved(e, coded_dir, MOE_METHOD_FULL,
				    i % 2 ? MOE_MASTERS_BF16 : MOE_MASTERS_F32);
			check_saved(e, coded_dir, MOE_METHOD_HYBRID,
				    i % 2 ? MOE_MASTERS_F32 : MOE_MASTERS_BF16);
		}
		OK(moe_engine_close(e));
	}
}

/* --weights on a plain checkpoint: what is saved are the masters, in its dtype. */
static void test_saved_plain(void)
{
	const char *from = fixture("ckpt/qwen3moe");
	struct moe_safetensors *base, *out;
	struct moe_engine *e;
	struct moe_model *m;
	size_t same = 0;

	if (!from)
		return;
	dirs();
	e = open_engine(2, 3, NULL);
	m = open_trained(e, from, "int4", MOE_METHOD_FULL, MOE_MASTERS_F32);
	moe_tree_remove(out_dir);
	OK(moe_model_save(m, out_dir));
	OK(moe_safetensors_open(from, &base));
	OK(moe_safetensors_open(out_dir, &out));
	for (size_t i = 0; i < moe_safetensors_count(base); i++) {
		const struct moe_st_tensor *x = moe_safetensors_at(base, i),
					   *y = moe_safetensors_find(out, x->name);

		same += y && y->bytes == x->bytes && !memcmp(x->data, y->data, x->bytes);
	}
	CHECK(same ==
	      moe_safetensors_count(base)); /* before a step: nothing was lost to the codes */
	moe_safetensors_close(base);
	moe_safetensors_close(out);
	moe_model_close(m);
	OK(moe_engine_close(e));
}

/* ---- the same bits ---- */

static float *logits_of(struct moe_model *m)
{
	int32_t ids[IDS], rows[2] = { 3, IDS - 1 };
	float *out = calloc(2 * 2048, sizeof *out);
	struct moe_array a = { .data = out, .dtype = MOE_F32, .ndim = 2, .shape = { 2, 2048 } };

	ids_of(ids);
	OK(moe_model_logits(m, ids, IDS, rows, 2, &a));
	return out;
}

struct bits {
	float *value;
	float *logits;
	int64_t n;
};

/* Three steps; `resumed` of them in a second model that begins with the first one's state. */
static struct bits bits_of(const char *dir, const char *weights, enum moe_method method,
			   enum moe_masters masters, int workers, int parts, const char *policy,
			   int resumed)
{
	struct moe_engine *e = open_engine(workers, parts, policy);
	struct moe_model *m = open_trained(e, dir, weights, method, masters);
	struct moe_train_progress p = { .step = 1 };
	struct bits b;
	struct run r;

	begin(&r, m);
	for (int i = 0; i < 3 - resumed; i++)
		step(&r, true);
	if (resumed) {
		mkdir(state_dir, 0777);
		OK(moe_train_state_save(&m->decoder, state_dir, &p));
		moe_model_close(m);
		r.m = m = open_trained(e, dir, weights, method, masters);
		OK(moe_train_state_load(&m->decoder, state_dir, &p));
	}
	for (int i = 0; i < resumed; i++)
		step(&r, true);
	CHECK(check_codes(m) > 4);
	b.value = fields(m, MOE_VALUE, &b.n);
	b.logits = logits_of(m);
	free_run(&r);
	moe_model_close(m);
	OK(moe_engine_close(e));
	return b;
}

static void same_bits(const char *dir, const char *weights, enum moe_method method,
		      enum moe_masters masters, int parts)
{
	struct bits b[4] = { bits_of(dir, weights, method, masters, 2, parts, NULL, 0),
			     bits_of(dir, weights, method, masters, 1, parts, "eager", 0),
			     bits_of(dir, weights, method, masters, 3, parts, "dmdas", 0),
			     bits_of(dir, weights, method, masters, 2, parts, NULL, 2) };

	for (int i = 1; i < 4; i++) {
		CHECK(b[i].n == b[0].n &&
		      !memcmp(b[i].value, b[0].value, (size_t)b[0].n * sizeof(float)));
		CHECK(!memcmp(b[i].logits, b[0].logits, 2 * 2048 * sizeof(float)));
	}
	for (int i = 0; i < 4; i++)
		free(b[i].value), free(b[i].logits);
}

static void test_bits(void)
{
	const char *from = fixture("ckpt/qwen3moe");
	static const int kinds[] = { 0, 2, 5 };

	if (!from)
		return;
	dirs();
	for (size_t i = 0; i < MOE_COUNT(kinds); i++) {
		make_quantised(from, EXPERTS, &quantised_kinds[kinds[i]], coded_dir, NULL, NULL);
		same_bits(coded_dir, NULL, i == 1 ? MOE_METHOD_HYBRID : MOE_METHOD_FULL,
			  i % 2 ? MOE_MASTERS_F32 : MOE_MASTERS_BF16, i == 2 ? 3 : 1);
	}
	same_bits(from, "int8", MOE_METHOD_FULL, MOE_MASTERS_F32, 3);
}

/* ---- refused; what checkpoints of this version can have: tests/cli/test_refused_formats.py ---- */

/* No architecture that trains has such tensors yet: linked with --wrap=moe_arch_load. */
static bool alternate;

enum moe_status __real_moe_arch_load(const char *path, struct moe_arch *arch);
enum moe_status __wrap_moe_arch_load(const char *path, struct moe_arch *arch);
enum moe_status __wrap_moe_arch_load(const char *path, struct moe_arch *arch)
{
	enum moe_status st = __real_moe_arch_load(path, arch);

	arch->gate_up_alternate = alternate;
	return st;
}

/* Rows of gate and up in turn train an adapter only. */
static void test_alternate(void)
{
	struct moe_model_params p = { .struct_size = sizeof p, .dir = coded_dir, .max_tokens = 64, .lora_rank = 4 };
	const char *from = fixture("ckpt/qwen3moe");
	struct moe_model *m = NULL;
	struct moe_engine *e;
	char text[512];

	if (!from)
		return;
	dirs();
	e = open_engine(2, 1, NULL);
	make_quantised(from, EXPERTS, &quantised_kinds[1], coded_dir, NULL, NULL);
	snprintf(text, sizeof text,
		 "%s/model.safetensors: model.layers.0.mlp.experts.gate_up_proj has rows of gate and up in turn", coded_dir);
	alternate = true;
	OK(moe_model_open(e, &p, &m));
	moe_model_close(m);
	for (int method = MOE_METHOD_FULL; method <= MOE_METHOD_HYBRID; method++) {
		p.method = (enum moe_method)method;
		CHECK_ERROR(moe_model_open(e, &p, &m), MOE_ERR_UNSUPPORTED, text);
		CHECK(strstr(moe_last_error(), "method lora") != NULL);
	}
	alternate = false;
	OK(moe_model_open(e, &p, &m));
	moe_model_close(m);
	OK(moe_engine_close(e));
}

const struct moe_test moe_suite_tests[] = {
	{ "the saved checkpoint is the base's, with what was computed with", test_saved },
	{ "a plain base quantised at load keeps its masters", test_saved_plain },
	{ "the same bits for workers, policies and a state", test_bits },
	{ "rows of gate and up in turn are not trained", test_alternate },
	{ NULL, NULL },
};
