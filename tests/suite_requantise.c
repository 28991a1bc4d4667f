/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Full and hybrid fine-tuning of quantised weights. What computes is, at any time and however parts
 * cut blocks, what moe_quantise makes of the masters; gradients are those of the dequantised
 * weights; masters go AdamW's way; the checkpoint has the base's tensors, and a state goes on with
 * the same bits.
 */
#include "tests/model_check.h"
#include "tests/quantised_check.h"

#include "api/machine.h"
#include "codelets/kernels/packed/requantise.h"
#include "codelets/rounding.h"
#include "train/params.h"

const char moe_suite_name[] = "requantise";

/* The plain model that gradients are compared with computes in bf16. */
static __attribute__((constructor)) void multiply_in_bf16(void)
{
	setenv("MOESAIC_COMPUTE", "bf16", 1);
}

static double uniform(uint64_t *seed)
{
	*seed = *seed * 6364136223846793005ull + 1442695040888963407ull;
	return (double)(*seed >> 40) / (1 << 24) - .5;
}

/* ---- one layer's experts ---- */

struct shape {
	int E, H, I, group; /* group 0: the format's */
	bool zero;
	enum moe_dtype scale; /* MOE_DTYPE_COUNT: the format's */
};

static void codings(const struct moe_format *f, const struct shape *s, struct moe_coding *c)
{
	for (int i = 0; i < MOE_EXPERT_MATRICES; i++) {
		c[i] = moe_format_coding(f, i == MOE_DOWN ? s->I : s->H);
		c[i].group = s->group ? s->group : c[i].group;
		c[i].zero = c[i].zero || s->zero;
		c[i].scale = s->scale == MOE_DTYPE_COUNT ? c[i].scale : s->scale;
	}
}

/* What is packed against what moe_quantise_as makes of x. */
static void compare_codes(const struct moe_coded_matrix *m, const struct moe_coding *coding,
			  const float *x, const char *what)
{
	struct moe_quantised got = moe_coded_read(m), want = {
		.coding = *coding, .n = m->n, .k = m->k, .rows = MOE_MAX(coding->rows, 1)
	};
	int64_t groups = moe_groups(coding, m->k), wrong = 0;
	uint8_t *a = malloc((size_t)m->k), *b = malloc((size_t)m->k);
	float *row = malloc((size_t)m->k * sizeof *row),
	      *packed = malloc((size_t)m->k * sizeof *row);
	void *memory;

	OK(moe_quantise_as(x, MOE_F32, m->k, &want, &memory));
	for (int64_t n = 0; n < m->n; n++) {
		got.reader->codes(&got, n, 0, m->k, a);
		want.reader->codes(&want, n, 0, m->k, b);
		wrong += memcmp(a, b, (size_t)m->k) != 0;
		for (int64_t g = 0; g < groups; g++) {
			wrong += got.reader->scale(&got, n, g) != want.reader->scale(&want, n, g);
			if (coding->zero)
				wrong += got.reader->zero(&got, n, g) !=
					 want.reader->zero(&want, n, g);
		}
		moe_dequantise_row(&want, n, 0, m->k, row);
		for (int i = 0; i < m->windows; i++) {
			const struct moe_coded_part *w = &m->window[i];

			if (n < w->n0 || n >= w->n0 + w->weight->n)
				continue;
			moe_kernels()->weight_unpack(w->weight, n - w->n0, n - w->n0 + 1, packed);
			wrong += memcmp(packed, row + w->k0, (size_t)w->weight->k * sizeof *row) !=
				 0;
		}
	}
	if (!CHECK(wrong == 0))
		printf("  %s [%lld, %lld]: %lld rows differ\n", what, (long long)m->n,
		       (long long)m->k, (long long)wrong);
	moe_free(memory);
	free(a), free(b), free(row), free(packed);
}

/* Masters as they are read back are what codes are made of; twice, so that old codes are
 * overwritten. */
static void check_layer(struct moe_engine *e, const struct moe_format *f, const struct shape *s,
			bool bf16)
{
	struct moe_coding coding[MOE_EXPERT_MATRICES];
	struct moe_experts_shape shape = { .E = s->E,
					   .k = 1,
					   .H = s->H,
					   .I = s->I,
					   .group_size = 2,
					   .base_grads = true,
					   .train_base = true,
					   .own_masters = bf16,
					   .coding = coding };
	struct moe_experts l = { 0 };
	int64_t n = (int64_t)s->H * s->I;
	float *x = malloc((size_t)n * sizeof *x);
	uint64_t seed = 7;

	codings(f, s, coding);
	OK(moe_machine_use(e));
	CU_ASSERT_EQUAL_FATAL(moe_experts_alloc(e, &shape, MOE_F32, &l), MOE_OK);
	for (int round = 0; round < 2; round++)
		for (int i = 0; i < MOE_EXPERT_MATRICES * s->E; i++) {
			enum moe_expert_matrix which =
				(enum moe_expert_matrix)(i % MOE_EXPERT_MATRICES);
			int expert = i / MOE_EXPERT_MATRICES;
			struct moe_quantised q = { .coding = coding[which],
						   .rows = coding[which].rows };
			struct moe_coded_matrix m;

			q.n = which == MOE_DOWN ? s->H : s->I;
			q.k = which == MOE_DOWN ? s->I : s->H;
			for (int p = 0; !round && p < l.P; p++)
				moe_experts_pack_coded(&l, which, expert, p, &q, 0, 1);
			for (int64_t j = 0; j < n; j++)
				x[j] = (float)(uniform(&seed) * (j % 3 ? .1 : .3));
			if (bf16)
				for (int64_t j = 0; j < n; j++)
					x[j] = moe_bf16_to_f32(moe_f32_to_bf16(x[j]));
			moe_experts_set_base(&l, which, MOE_VALUE, expert, x);
			moe_experts_coded(&l, which, expert, &m);
			compare_codes(&m, &coding[which], x, f->name);
		}
	moe_experts_free(e, &l);
	free(x);
}

static void layers_of(int parts)
{
	static const struct shape shapes[] = {
		{ 2, 256, 384, 0, false, MOE_DTYPE_COUNT }, /* whole blocks in three parts */
		{ 2, 160, 224, 0, false, MOE_DTYPE_COUNT }, /* cut ones, ragged */
		{ 1, 96, 64, 32, true, MOE_F16 },
		{ 1, 48, 100, 4, false, MOE_F32 },
	};
	struct moe_engine *e = open_engine(2, parts, NULL);

	for (int i = 0; moe_format_list[i]; i++)
		for (size_t j = 0; j < MOE_COUNT(shapes); j++) {
			const struct moe_format *f = moe_format_list[i];
			const struct shape *s = &shapes[j];

			/* MXFP4 has its group, other formats zeros only where they know them */
			if ((s->zero && !f->quantise_zero) ||
			    (s->scale != MOE_DTYPE_COUNT && f->scale == MOE_SCALE_UE8M0))
				continue;
			if (!f->quantise && !s->zero && j > 1)
				continue;
			if (table_takes(i + j, 2)) {
				check_layer(e, f, s, false);
				check_layer(e, f, s, true);
			}
		}
	OK(moe_engine_close(e));
}

static void one_part_layers(void)
{
	layers_of(1);
	layers_of(3);
	layers_of(5);
}

static void test_layers(void)
{
	each_table(one_part_layers);
}

/* Not finite: the scale says so, and no code is what a conversion of NaN left. */
static void test_not_finite(void)
{
	struct moe_coding c = moe_format_coding(moe_format_find("int8"), 4);
	const float bad[2][4] = { { 1, NAN, 2, 3 }, { 1, 2, -INFINITY, 3 } };
	uint8_t codes[4];
	int8_t zero;

	for (int i = 0; i < 2; i++)
		CHECK(isnan(moe_quantise_block(&c, 1, 4, bad[i], 4, codes, 4, &zero)));
	c = moe_format_coding(moe_format_find("mxfp4"), 4);
	CHECK(isnan(moe_quantise_block(&c, 1, 4, bad[0], 4, codes, 4, &zero)));
}

/* ---- whole models ---- */

static char coded_dir[300], plain_dir[300], out_dir[300], state_dir[300];

static void dirs(void)
{
	snprintf(coded_dir, sizeof coded_dir, "%s/coded", moe_test_dir());
	snprintf(plain_dir, sizeof plain_dir, "%s/plain", moe_test_dir());
	snprintf(out_dir, sizeof out_dir, "%s/out", moe_test_dir());
	snprintf(state_dir, sizeof state_dir, "%s/state", moe_test_dir());
}

static struct moe_model *open_trained(struct moe_engine *e, const char *dir, const char *weights,
				      enum moe_method method, enum moe_masters masters)
{
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = dir,
				      .max_tokens = 64,
				      .lora_rank = 4,
				      .seed = 3,
				      .weights = weights,
				      .method = method,
				      .masters = masters,
				      .inference_only = method == MOE_METHOD_LORA,
				      .backward_weights = "direct" };
	struct moe_model *m = NULL;

	OK(moe_model_open(e, &p, &m));
	CU_ASSERT_PTR_NOT_NULL_FATAL(m);
	return m;
}

static float *logits_of(struct moe_model *m)
{
	int32_t ids[IDS], rows[2] = { 3, IDS - 1 };
	float *out = calloc(2 * 2048, sizeof *out);
	struct moe_array a = { .data = out, .dtype = MOE_F32, .ndim = 2, .shape = { 2, 2048 } };

	ids_of(ids);
	OK(moe_model_logits(m, ids, IDS, rows, 2, &a));
	return out;
}

static void begin(struct run *r, struct moe_model *m)
{
	int32_t ids[IDS];

	*r = (struct run){ .m = m, .lr = 1e-2, .weight_decay = .1, .max_norm = 1 };
	ids_of(ids);
	add_batch(r, 64);
	moe_model_batch_add(&r->batch[0], ids, NULL, IDS);
}

/* A field of every expert's matrix, one after the other. */
static float *fields(const struct moe_model *m, enum moe_param_field f, int64_t *count)
{
	const struct moe_decoder *d = &m->decoder;
	int64_t n = 0, each;
	float *out = NULL;

	for (int l = 0; l < d->n_layers; l++) {
		const struct moe_experts *x = d->layers[l].experts;

		if (!x)
			continue;
		each = (int64_t)x->I * x->H;
		out = realloc(out, (size_t)(n + 3 * x->E * each) * sizeof *out);
		for (int i = 0; i < 3 * x->E; i++, n += each)
			moe_experts_get_base(x, (enum moe_expert_matrix)(i % 3), f, i / 3, out + n);
	}
	*count = n;
	return out;
}

/* All that is quantised and trained is what its masters make. */
static int check_codes(const struct moe_model *m)
{
	const struct moe_decoder *d = &m->decoder;
	int n = 0;

	for (int l = 0; l < d->n_layers; l++) {
		const struct moe_experts *x = d->layers[l].experts;
		const struct moe_decoder_layer *layer = &d->layers[l];
		struct moe_coded_matrix c;
		float *v;

		for (int i = 0; x && x->requantise && i < 3 * x->E; i += 5) {
			enum moe_expert_matrix which = (enum moe_expert_matrix)(i % 3);
			struct moe_coding coding;

			v = malloc((size_t)x->I * (size_t)x->H * sizeof *v);
			moe_experts_get_base(x, which, MOE_VALUE, i / 3, v);
			moe_experts_coded(x, which, i / 3, &c);
			coding = c.window[0].weight->coding;
			coding.phase = 0;
			compare_codes(&c, &coding, v, "expert");
			free(v);
			n++;
		}
		for (int i = 0; layer->trained && i < MOE_ATTN_LINEARS; i++) {
			const struct moe_trained *t = &layer->trained[MOE_ARRAY_LINEAR + i];

			if (!t->weight || !moe_is_coded(t->weight))
				continue;
			v = malloc((size_t)t->param.piece * sizeof *v);
			moe_trained_get(t, 0, t->param.rows, v);
			c = (struct moe_coded_matrix){ .n = t->param.rows,
						       .k = t->param.cols,
						       .windows = 1,
						       .window = { { t->weight, 0, 0 } } };
			compare_codes(&c, &t->weight->coding, v, "projection");
			free(v);
			n++;
		}
	}
	return n;
}

/* AdamW in double on what it was, from the model's own gradients. */
struct adam {
	float *before;
	double *m, *v;
	int64_t n;
};

static double adam_step(struct adam *a, const float *grad, const float *after, const struct run *r,
			double factor)
{
	double t = (double)r->step, worst = 0;

	for (int64_t i = 0; i < a->n; i++) {
		double g = (double)grad[i] * factor, p;

		a->m[i] = .9 * a->m[i] + .1 * g;
		a->v[i] = .999 * a->v[i] + .001 * g * g;
		p = a->before[i] * (1 - r->lr * r->weight_decay) -
		    r->lr * (a->m[i] / (1 - pow(.9, t))) /
			    (sqrt(a->v[i] / (1 - pow(.999, t))) + 1e-8);
		worst = fmax(worst, fabs(p - (double)after[i]));
		a->before[i] = after[i];
	}
	return worst;
}

static void check_steps(struct moe_engine *e, const char *dir, const char *weights,
			enum moe_masters masters)
{
	struct moe_model *m = open_trained(e, dir, weights, MOE_METHOD_FULL, masters);
	struct adam a = { 0 };
	double first = 0, loss = 0;
	struct run r;

	begin(&r, m);
	CHECK(check_codes(m) > 8);
	a.before = fields(m, MOE_VALUE, &a.n);
	a.m = calloc((size_t)a.n, sizeof *a.m);
	a.v = calloc((size_t)a.n, sizeof *a.v);
	for (int i = 0; i < 5; i++) {
		int64_t n;
		float *grad, *after;
		double off;

		loss = step(&r, true);
		first = i ? first : loss;
		grad = fields(m, MOE_GRAD, &n);
		after = fields(m, MOE_VALUE, &n);
		off = adam_step(&a, grad, after, &r, r.norm.factor);
		/* one unit of bf16 of the largest master where it was rounded */
		CHECK(off <= (masters == MOE_MASTERS_BF16 ? 4e-3 : 2e-6));
		CHECK(check_codes(m) > 8);
		free(grad), free(after);
	}
	printf("  %s: loss %.4f to %.4f\n", weights ? weights : "stored", first, loss);
	CHECK(loss < first && isfinite(loss));
	free(a.before), free(a.m), free(a.v);
	free_run(&r);
	moe_model_close(m);
}

static void steps_of(int parts)
{
	const char *from = fixture("ckpt/qwen3moe");
	static const char *const weights[] = { "int8", "fp8", "int4", "mxfp4" };
	struct moe_engine *e;

	if (!from)
		return;
	dirs();
	e = open_engine(2, parts, NULL);
	for (size_t i = 0; i < MOE_COUNT(quantised_kinds); i++) {
		if (!best_table_takes(i + (size_t)parts, 6))
			continue;
		make_quantised(from, EXPERTS, &quantised_kinds[i], coded_dir, NULL, NULL);
		check_steps(e, coded_dir, NULL, i % 2 ? MOE_MASTERS_F32 : MOE_MASTERS_BF16);
	}
	for (size_t i = 0; i < MOE_COUNT(weights); i++)
		if (best_table_takes(i, 4))
			check_steps(e, from, weights[i],
				    i % 2 ? MOE_MASTERS_BF16 : MOE_MASTERS_F32);
	OK(moe_engine_close(e));
}

static void steps_one(void)
{
	steps_of(1);
}

static void steps_three(void)
{
	steps_of(3);
}

static void test_steps(void)
{
	each_model_table(steps_one);
	each_model_table(steps_three);
}

static void dequantise(const char *from, const char *to)
{
	struct moe_convert_model_params p = {
		.struct_size = sizeof p, .in = from, .out = to, .weights = "f32", .threads = 1
	};
	struct moe_convert_model_result r = { .struct_size = sizeof r };

	moe_tree_remove(to);
	OK(moe_convert_model(&p, &r));
}

/* Loss and gradients are those of the plain model with the values that the codes stand for. */
static void test_gradients(void)
{
	const char *from = fixture("ckpt/qwen3moe");
	struct moe_engine *e;

	if (!from)
		return;
	dirs();
	e = open_engine(2, 1, NULL);
	for (size_t i = 0; i < MOE_COUNT(quantised_kinds); i++) {
		struct moe_model *a, *b;
		struct run r[2];
		int64_t n;
		float *g[2];

		make_quantised(from, EXPERTS, &quantised_kinds[i], coded_dir, NULL, NULL);
		a = open_trained(e, coded_dir, NULL, MOE_METHOD_FULL, MOE_MASTERS_F32);
		OK(moe_model_save(a, out_dir)); /* codes of masters: another scale than the base's
						   where it may be */
		dequantise(out_dir, plain_dir);
		b = open_trained(e, plain_dir, NULL, MOE_METHOD_FULL, MOE_MASTERS_F32);
		begin(&r[0], a), begin(&r[1], b);
		CHECK(step(&r[0], false) == step(&r[1], false));
		g[0] = fields(a, MOE_GRAD, &n), g[1] = fields(b, MOE_GRAD, &n);
		CHECK(!memcmp(g[0], g[1], (size_t)n * sizeof *g[0]) && g[0][5] != 0);
		free(g[0]), free(g[1]);
		free_run(&r[0]), free_run(&r[1]);
		moe_model_close(a), moe_model_close(b);
	}
	OK(moe_engine_close(e));
}

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
	{ "codes from masters, in parts that cut blocks", test_layers },
	{ "values that are not finite", test_not_finite },
	{ "five steps of every format", test_steps },
	{ "gradients of the dequantised weights", test_gradients },
	{ "the saved checkpoint is the base's, with what was computed with", test_saved },
	{ "a plain base quantised at load keeps its masters", test_saved_plain },
	{ "the same bits for workers, policies and a state", test_bits },
	{ "rows of gate and up in turn are not trained", test_alternate },
	{ NULL, NULL },
};
