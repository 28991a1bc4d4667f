/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whole models: the golden file of a trained Qwen3-MoE, the same bits for every way of running, and
 * a Qwen2-MoE with dense layers, biases and shared experts against plain loops.
 */
#include "tests/model_check.h"

#include <math.h>

const char moe_suite_name[] = "model";

static struct moe_safetensors *golden_file;

/* The exact table's limit, or that of bf16 operands. */
static double limit(double exact, double rounded)
{
	return table_is_packed() ? rounded : exact;
}

static float *golden(const char *name, int64_t *count)
{
	const struct moe_st_tensor *t = moe_safetensors_find(golden_file, name);
	int64_t n = t ? moe_shape_count(t->ndim, t->shape) : 0;
	float *out = calloc((size_t)n + 1, sizeof *out);

	CU_ASSERT_PTR_NOT_NULL(t);
	if (t && t->dtype == MOE_I32)
		for (int64_t i = 0; i < n; i++)
			out[i] = (float)((const int32_t *)t->data)[i];
	else if (t)
		CU_ASSERT(moe_to_f32(out, t->data, t->dtype, (size_t)n));
	if (count)
		*count = n;
	return out;
}

static bool open_golden(void)
{
	const char *path = fixture("golden/model_qwen3moe.safetensors");

	if (!path)
		return false;
	OK(moe_safetensors_open(path, &golden_file));
	return golden_file != NULL;
}

static int32_t *golden_ids(int64_t *n)
{
	float *f = golden("input_ids", n);
	int32_t *ids = malloc((size_t)*n * sizeof *ids);

	for (int64_t i = 0; i < *n; i++)
		ids[i] = (int32_t)f[i];
	free(f);
	return ids;
}

static const char *const lora_names[MOE_LORA_ARRAYS] = {
	"gate_lora_a", "up_lora_a", "down_lora_a", "gate_lora_b", "up_lora_b", "down_lora_b"
};

/*
 * ||got - want|| / ||want - init||: AdamW turns a gradient of rounding size into a step of full
 * size, so parameters are compared against how far they moved.
 */
static void expect_moved(const char *what, int layer, int array, const float *got,
			 const float *want, int64_t n, double most)
{
	char name[128];
	float *init;
	double d = 0, moved = 0;

	snprintf(name, sizeof name, "init.layers.%d.experts.%s", layer, lora_names[array]);
	init = golden(name, NULL);
	for (int64_t i = 0; i < n; i++) {
		d += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
		moved += ((double)want[i] - init[i]) * ((double)want[i] - init[i]);
	}
	printf("  %s: off by %.2g of the way moved\n", what, sqrt(d / moved));
	CU_ASSERT(sqrt(d / moved) <= most);
	free(init);
}

/* Sets every layer's LoRA from the file, or compares a layer's with it. */
static void golden_lora(struct moe_model *m, const char *prefix, int layer, bool set,
			enum moe_param_field field, double most)
{
	struct moe_experts *e = m->decoder.layers[layer].experts;

	for (int a = 0; a < MOE_LORA_ARRAYS; a++) {
		int64_t n = moe_lora_elements(e, (enum moe_lora_array)a), total;
		char name[128];
		float *want, *got = calloc((size_t)(e->E * n), sizeof *got);

		snprintf(name, sizeof name, "%s.layers.%d.experts.%s", prefix, layer,
			 lora_names[a]);
		want = golden(name, &total);
		CU_ASSERT_EQUAL(total, e->E * n);
		for (int x = 0; x < e->E; x++)
			if (set)
				moe_experts_set(e, (enum moe_lora_array)a, field, x, want + x * n);
			else
				moe_experts_get(e, (enum moe_lora_array)a, field, x, got + x * n);
		if (!set && field == MOE_GRAD)
			expect_close(name, got, want, total, most);
		else if (!set)
			expect_moved(name, layer, a, got, want, total, most);
		free(want);
		free(got);
	}
}

static void set_golden_lora(struct moe_model *m)
{
	for (int i = 0; i < m->decoder.n_layers; i++)
		golden_lora(m, "init", i, true, MOE_VALUE, 0);
}

/* ---- golden ---- */

static void check_logits(struct moe_engine *e, const char *dir)
{
	struct moe_model *m = open_model(e, dir, NULL, 64, 0);
	int64_t n, offsets[2] = { 0, 0 }, count = 0;
	int32_t *ids = golden_ids(&n), row[48];
	float *want = golden("logits", NULL), *loss = golden("loss", NULL);
	float *got = calloc((size_t)n * 2048, sizeof *got), *last = calloc(2048, sizeof *last);
	struct moe_array out = { got, MOE_F32, 2, { n, 2048 }, { 0 } };
	double sum = 0;

	for (int i = 0; i < n; i++)
		row[i] = i;
	if (m) {
		OK(moe_model_logits(m, ids, n, row, n, &out));
		expect_close("logits", got, want, n * 2048, limit(1e-5, 4e-3));
		out = (struct moe_array){ last, MOE_F32, 2, { 1, 2048 }, { 0 } };
		OK(moe_model_logits(m, ids, n, NULL, 1, &out));
		expect_close("last row", last, got + (n - 1) * 2048, 2048, 1e-6);
		offsets[1] = n;
		OK(moe_model_loss(m, ids, NULL, offsets, 1, &sum, &count));
		CU_ASSERT_EQUAL(count, n - 1);
		printf("  loss %.7f, golden %.7f\n", sum / (double)count, (double)loss[0]);
		CU_ASSERT_DOUBLE_EQUAL(sum / (double)count, (double)loss[0], limit(1e-5, 1e-3));
		moe_model_close(m);
	}
	free(ids);
	free(want);
	free(loss);
	free(got);
	free(last);
}

static void check_golden_logits(void)
{
	const char *dir = fixture("ckpt/qwen3moe"), *fused;
	struct moe_engine *e;

	if (!dir || !open_golden())
		return;
	e = open_engine(2, 0, NULL);
	check_logits(e, dir);
	fused = fixture("ckpt/qwen3moe_fused");
	if (fused)
		check_logits(e, fused);
	OK(moe_engine_close(e));
	moe_safetensors_close(golden_file);
}

/* Input and output of each layer's experts, from the slot's buffers. */
static void check_mlp(struct moe_model *m, int64_t n)
{
	int H = m->decoder.H;
	float *out = calloc((size_t)(n * H), sizeof *out);

	for (int l = 0; l < m->decoder.n_layers; l++) {
		struct moe_attn_state *a = &m->slot[0].layer[l].attn;
		const float *next = m->slot[0].layer[l + 1].attn.x;
		char name[64];
		float *want;

		snprintf(name, sizeof name, "layers.%d.mlp_in", l);
		want = golden(name, NULL);
		expect_close(name, a->xn, want, n * H, limit(1e-5, 4e-3));
		free(want);
		snprintf(name, sizeof name, "layers.%d.mlp_out", l);
		want = golden(name, NULL);
		for (int64_t i = 0; i < n * H; i++)
			out[i] = next[i] - a->x_mid[i];
		expect_close(name, out, want, n * H, limit(1e-4, 4e-3));
		free(want);
	}
	free(out);
}

static void check_golden_training(void)
{
	const char *dir = fixture("ckpt/qwen3moe");
	struct moe_engine *e;
	struct run r = { .lr = 2e-3, .weight_decay = 0.01 };
	int64_t n, steps;
	int32_t *ids;
	float *losses;

	if (!dir || !open_golden())
		return;
	ids = golden_ids(&n);
	losses = golden("train_losses", &steps);
	e = open_engine(2, 0, NULL);
	r.m = open_model(e, dir, "experts", 64, 2);
	add_batch(&r, 64);
	moe_model_batch_add(&r.batch[0], ids, NULL, (int)n);
	step(&r, false); /* B is 0: the base model */
	check_mlp(r.m, n);
	set_golden_lora(r.m);
	for (int64_t i = 0; i < steps; i++) {
		double loss = step(&r, i < steps - 1);

		printf("  step %d loss %.6f, golden %.6f, gradient norm %.5f\n", (int)i, loss,
		       (double)losses[i], r.norm.norm);
		/* A block's bar is 1e-3; here choices of experts may differ too */
		CU_ASSERT_DOUBLE_EQUAL(loss, (double)losses[i],
				       limit(1e-4, 2e-3 * (double)losses[i]));
		if (i == 0)
			/* to a block's .005 comes what reaches it from the head */
			golden_lora(r.m, "grad0", 3, false, MOE_GRAD, limit(1e-4, 1e-2));
	}
	golden_lora(r.m, "step5", 3, false, MOE_VALUE, limit(0.03, 0.08));
	free_run(&r);
	moe_model_close(r.m);
	OK(moe_engine_close(e));
	free(ids);
	free(losses);
	moe_safetensors_close(golden_file);
}

/* ---- the same bits ---- */

static uint64_t hash_bytes(uint64_t h, const void *data, size_t n)
{
	const unsigned char *p = data;

	for (size_t i = 0; i < n; i++)
		h = (h ^ p[i]) * 0x100000001b3ull;
	return h;
}

static uint64_t hash_param(uint64_t h, const struct moe_param *p, int E)
{
	size_t n = (size_t)E * (size_t)p->piece * sizeof(float);

	h = hash_bytes(h, p->value, n);
	return hash_bytes(h, p->grad, n);
}

/* LoRA and gradients of all layers. */
static uint64_t hash_model(uint64_t h, const struct moe_model *m)
{
	for (int i = 0; i < m->decoder.n_layers; i++) {
		const struct moe_decoder_layer *l = &m->decoder.layers[i];

		for (int j = 0; j < MOE_ATTN_LINEARS; j++) {
			if (!l->linear[j].r)
				continue;
			h = hash_param(h, &l->linear[j].lora_a, 1);
			h = hash_param(h, &l->linear[j].lora_b, 1);
		}
		if (!l->experts || !l->experts->r)
			continue;
		h = hash_param(h, &l->experts->a_gu, l->experts->E);
		h = hash_param(h, &l->experts->down_b, l->experts->E);
		for (int p = 0; p < l->experts->P; p++)
			h = hash_param(h, &l->experts->part[p].down_a, l->experts->E);
	}
	return h;
}

/* Documents of many lengths in micro-batches: the file's ids, over and over. */
static void fill(struct run *r, int n_micro)
{
	static const int lengths[] = { 90, 1, 47, 200, 2, 64, 33 };
	int64_t n;
	int32_t *ids = golden_ids(&n), doc[256], labels[256];

	for (int i = 0; i < n_micro; i++) {
		add_batch(r, 512);
		for (size_t d = 0; d < MOE_COUNT(lengths) - (size_t)i; d++) {
			for (int t = 0; t < lengths[d]; t++) {
				doc[t] = ids[(t * 7 + (int)d + i) % n];
				labels[t] = (t + (int)d) % 3 ? doc[t] : -100;
			}
			moe_model_batch_add(&r->batch[r->n_micro - 1], doc, labels, lengths[d]);
		}
	}
	free(ids);
}

static uint64_t two_steps(int workers, int parts, const char *policy, bool held, double *losses)
{
	const char *dir = fixture("ckpt/qwen3moe");
	struct moe_engine *e = open_engine(workers, parts, policy);
	struct run r = { .lr = 1e-2, .max_norm = 0.1f };
	struct moe_ticket *ticket = NULL;
	uint64_t h = 0xcbf29ce484222325ull;

	r.m = open_model(e, dir, "experts,q_proj,k_proj,v_proj,o_proj", 512, 2);
	fill(&r, 3);
	for (int i = 0; i < 2; i++) {
		if (held && i) { /* a whole step is submitted while no worker runs */
			OK(moe_ticket_create(e, &ticket));
			OK(moe_engine_hold(e));
			OK(moe_submit_begin(e));
			OK(submit(&r, ticket, true));
			moe_submit_end(e);
			CU_ASSERT_FALSE(moe_ticket_done(ticket));
			OK(moe_engine_release(e));
			OK(moe_ticket_wait(ticket));
			moe_ticket_destroy(ticket);
			losses[i] = (r.loss[0].sum + r.loss[1].sum + r.loss[2].sum) / trained(&r);
		} else {
			losses[i] = step(&r, true);
		}
		h = hash_bytes(h, losses + i, sizeof *losses);
	}
	CU_ASSERT(r.norm.finite && r.norm.norm > 0 && r.norm.norm_experts < r.norm.norm);
	h = hash_model(h, r.m);
	free_run(&r);
	moe_model_close(r.m);
	OK(moe_engine_close(e));
	return h;
}

static void check_same_bits(void)
{
	static const char *const policies[] = { "eager", "prio", "lws", "ws", "dmda", "dmdas" };
	double first[2], losses[2];
	uint64_t want;

	if (!fixture("ckpt/qwen3moe") || !open_golden())
		return;
	want = two_steps(1, 1, "eager", false, first);
	printf("  losses %.6f %.6f\n", first[0], first[1]);
	CU_ASSERT(first[1] < first[0]);
	for (int w = 1; w <= 4; w++)
		for (size_t i = 0; i < MOE_COUNT(policies); i++) {
			uint64_t h;

			if (w != 3 && i % 3 != (size_t)w % 3 && !moe_test_full())
				continue;
			if (!best_table_takes(i + (size_t)w, 9))
				continue;
			h = two_steps(w, 1, policies[i], w == 3, losses);
			if (h != want)
				printf("%d workers, %s: other bits, losses %.9f %.9f\n", w,
				       policies[i], losses[0], losses[1]);
			CU_ASSERT_EQUAL(h, want);
		}
	moe_safetensors_close(golden_file);
}

static void check_parts(void)
{
	double first[2], losses[2];

	if (!fixture("ckpt/qwen3moe") || !open_golden())
		return;
	two_steps(2, 1, NULL, false, first);
	for (int parts = 2; parts <= 3; parts++) {
		if (!table_takes((size_t)parts, 2))
			continue;
		two_steps(2, parts, NULL, parts == 3, losses);
		printf("  %d parts: losses %.8f %.8f, one part %.8f %.8f\n", parts, losses[0],
		       losses[1], first[0], first[1]);
		CU_ASSERT_DOUBLE_EQUAL(losses[0], first[0], limit(1e-6, 1e-3) * first[0]);
		CU_ASSERT_DOUBLE_EQUAL(losses[1], first[1], limit(1e-6, 1e-3) * first[1]);
	}
	moe_safetensors_close(golden_file);
}

/* Documents in one micro-batch do not see each other. */
static void check_packed_documents(void)
{
	enum { DOCS = 40 };
	const char *dir = fixture("ckpt/qwen3moe");
	int64_t n, offsets[DOCS + 1] = { 0 }, count[DOCS], one_count, ends[2] = { 0, 0 };
	double packed[DOCS], alone, worst = 0;
	struct moe_engine *e;
	struct moe_model *m;
	int32_t *ids, all[DOCS * 128];

	if (!dir || !open_golden())
		return;
	ids = golden_ids(&n);
	e = open_engine(2, 0, NULL);
	m = open_model(e, dir, NULL, 300, 2);
	for (int d = 0; d < DOCS; d++) {
		int length = 1 + d * 37 % 127;

		offsets[d + 1] = offsets[d] + length;
		for (int t = 0; t < length; t++)
			all[offsets[d] + t] = ids[(t * 5 + d) % n];
	}
	OK(moe_model_loss(m, all, NULL, offsets, DOCS, packed, count));
	for (int d = 0; d < DOCS; d++) {
		ends[1] = offsets[d + 1] - offsets[d];
		OK(moe_model_loss(m, all + offsets[d], NULL, ends, 1, &alone, &one_count));
		CU_ASSERT_EQUAL(count[d], one_count);
		worst = worst_of(worst, fabs(alone - packed[d]) / fmax(alone, 1));
	}
	printf("  packed and apart differ by %.2g\n", worst);
	CU_ASSERT(worst < limit(1e-6, 1e-3));
	moe_model_close(m);
	OK(moe_engine_close(e));
	free(ids);
	moe_safetensors_close(golden_file);
}

static void test_golden_logits(void)
{
	each_model_table(check_golden_logits);
}

static void test_golden_training(void)
{
	each_model_table(check_golden_training);
}

static void test_same_bits(void)
{
	each_model_table(check_same_bits);
}

static void test_parts(void)
{
	each_model_table(check_parts);
}

static void test_packed_documents(void)
{
	each_model_table(check_packed_documents);
}

const struct moe_test moe_suite_tests[] = {
	{ "golden logits and loss", test_golden_logits },
	{ "golden training", test_golden_training },
	{ "the same bits for workers and policies", test_same_bits },
	{ "parts", test_parts },
	{ "documents packed and apart", test_packed_documents },
	{ NULL, NULL },
};
