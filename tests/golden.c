/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/golden.h"

#include "codelets/format.h"
#include "codelets/kernels/kernels.h"
#include "engine/base.h"
#include "model/json.h"
#include "model/readers/safetensors.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define MAX_KEYS 256

/* Relative L2 errors allowed: f32, and tables that round operands or kept activations to bf16. */
struct tolerance {
	double routing; /* what comes of the router, always in f32 */
	double out, grad_x, grad_weights, grad, loss;
	double first_step, step; /* of the parameters */
};
static const struct tolerance exact = { 2e-6, 2e-6, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5, 1e-5 };
/*
 * AdamW's first step is the sign of a gradient: of an error of .004 one element in 700 flips, which alone
 * makes .08; the fifth step has the bound of design.md 5.
 */
static const struct tolerance rounded = { 2e-6, 4e-3, 5e-3, 3e-3, 5e-3, 1e-3, 1.5e-1, 5e-2 };

static const struct tolerance *tolerance(void)
{
	return moe_kernels()->tiles ? &rounded : &exact;
}

/* One fixture being run. */
struct run {
	const struct golden_options *o;
	struct golden_result *r;
	struct moe_safetensors *st;
	const char *path;
	bool used[MAX_KEYS];
	/* config */
	char kind[64];
	int64_t E, k, H, I, T, rank, shared_I;
	double scaling, alpha, lr, beta1, beta2, eps, weight_decay;
	const char *format; /* of quantised weights, or NULL */
	bool normalise, experts_only, tie, base_grads, train, peft, lora;
	bool full_ft; /* training moves base and router weights, without LoRA */
	double largest_grad; /* norm, for references that are zero */
	struct moe_block *block;
	bool ok;
};

static const char *const lora_names[6] = { "gate_lora_a", "up_lora_a", "down_lora_a",
					   "gate_lora_b", "up_lora_b", "down_lora_b" };

static bool starts(const char *s, const char *prefix)
{
	return !strncmp(s, prefix, strlen(prefix));
}

bool golden_kind_supported(const char *kind)
{
	return !strcmp(kind, "qwen3_moe") || !strcmp(kind, "qwen2_moe") || !strcmp(kind, "olmoe") ||
	       !strcmp(kind, "mixtral");
}

static void fail(struct run *g, const char *fmt, ...)
{
	va_list ap;

	g->ok = false;
	g->r->failed++;
	fprintf(stderr, "%s: ", g->path);
	va_start(ap, fmt);
	vfprintf(stderr, fmt, ap);
	va_end(ap);
	fprintf(stderr, "\n");
}

static bool call(struct run *g, enum moe_status st)
{
	if (st != MOE_OK)
		fail(g, "%s (%s)", moe_last_error(), moe_status_text(st));
	return st == MOE_OK;
}

static const struct moe_st_tensor *find(struct run *g, const char *name)
{
	for (size_t i = 0; i < moe_safetensors_count(g->st); i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(g->st, i);

		if (strcmp(t->name, name))
			continue;
		if (i < MAX_KEYS)
			g->used[i] = true;
		return t;
	}
	return NULL;
}

static int64_t count_of(const struct moe_st_tensor *t)
{
	return moe_shape_count(t->ndim, t->shape);
}

/* A tensor as doubles; NULL if absent. Free it. */
static double *doubles(struct run *g, const char *name, int64_t *n)
{
	const struct moe_st_tensor *t = find(g, name);
	double *d;

	if (!t)
		return NULL;
	*n = count_of(t);
	d = malloc((size_t)(*n + 1) * sizeof *d);
	for (int64_t i = 0; i < *n; i++) {
		const char *p = (const char *)t->data + (size_t)i * moe_dtype_size(t->dtype);
		int32_t i32;
		int64_t i64;
		float f;

		if (t->dtype == MOE_F64)
			memcpy(&d[i], p, sizeof d[i]);
		else if (t->dtype == MOE_I32) {
			memcpy(&i32, p, sizeof i32);
			d[i] = i32;
		} else if (t->dtype == MOE_I64) {
			memcpy(&i64, p, sizeof i64);
			d[i] = (double)i64;
		} else {
			moe_to_f32(&f, p, t->dtype, 1);
			d[i] = f;
		}
	}
	return d;
}

static double norm(const double *a, int64_t n)
{
	double s = 0;

	for (int64_t i = 0; i < n; i++)
		s += a[i] * a[i];
	return sqrt(s);
}

static void remember(struct run *g, const double *a, int64_t n)
{
	struct golden_result *r = g->r;

	r->values = realloc(r->values, (size_t)(r->n_values + n + 1) * sizeof *r->values);
	memcpy(r->values + r->n_values, a, (size_t)n * sizeof *a);
	r->n_values += n;
	for (int64_t i = 0; i < n; i++) {
		uint64_t bits;

		memcpy(&bits, &a[i], sizeof bits);
		r->bits = (r->bits ^ bits) * 0x100000001b3ull;
	}
}

/* Rows of x in 8 bits: the issue of weight formats allows 2.5 times the tolerance. */
static bool int8_compute(const struct run *g)
{
	const struct moe_format *f = g->format ? moe_format_find(g->format) : NULL;

	return f && moe_format_compute(f) == MOE_COMPUTE_INT8;
}

/* Relative L2 error of got against ref, reported under name. */
static void compare_values(struct run *g, const char *name, const double *got, const double *ref,
			   int64_t n, double tol)
{
	double diff = 0, base = norm(ref, n), err;
	bool good;

	for (int64_t i = 0; i < n; i++)
		diff += (got[i] - ref[i]) * (got[i] - ref[i]);
	diff = sqrt(diff);
	if (base <= 1e-13 * g->largest_grad)
		base = 0; /* what f64 rounding leaves of an exact zero */
	err = base > 0 ? diff / base : diff;
	if (int8_compute(g))
		tol *= 2.5;
	good = base > 0 ? err <= tol : diff <= 1e-6 * g->largest_grad || diff == 0;
	remember(g, got, n);
	g->r->compared++;
	if (g->o->print)
		printf("  %-28s %s %.2e%s  %s\n", name, base > 0 ? "relative L2" : "norm       ",
		       err, base > 0 ? "" : " (reference is 0)", good ? "ok" : "FAILED");
	if (!good)
		fail(g, "%s: %s error %.3e, %.0e allowed", name,
		     base > 0 ? "relative L2" : "absolute", err,
		     base > 0 ? tol : 1e-6 * g->largest_grad);
}

static void compare(struct run *g, const char *name, const double *got, int64_t n, double tol)
{
	int64_t m = 0;
	double *ref = doubles(g, name, &m);

	if (!ref)
		return;
	if (m != n)
		fail(g, "%s has %lld elements, %lld computed", name, (long long)m, (long long)n);
	else
		compare_values(g, name, got, ref, n, tol);
	free(ref);
}

static struct moe_array array(void *data, enum moe_dtype dtype, int ndim, const int64_t *shape)
{
	struct moe_array a = { .data = data, .dtype = dtype, .ndim = ndim };

	memcpy(a.shape, shape, (size_t)ndim * sizeof *shape);
	return a;
}

static struct moe_array matrix(void *data, enum moe_dtype dtype, int64_t rows, int64_t cols)
{
	return array(data, dtype, 2, (int64_t[]){ rows, cols });
}

/* A file tensor as an aligned array; free a.data. */
static bool load(struct run *g, const char *name, struct moe_array *a)
{
	const struct moe_st_tensor *t = find(g, name);

	if (!t)
		return false;
	*a = array(malloc(t->bytes + 1), t->dtype, t->ndim, t->shape);
	memcpy(a->data, t->data, t->bytes);
	return true;
}

static void set_from_file(struct run *g, enum moe_block_array which, const char *name)
{
	struct moe_array a;

	if (!load(g, name, &a)) {
		fail(g, "input %s is missing", name);
		return;
	}
	call(g, moe_block_set(g->block, which, &a));
	free(a.data);
}

static const char *format_of(struct run *g)
{
	const struct moe_st_tensor *q = find(g, "gate_proj.q");

	return !q				 ? NULL
	       : q->dtype == MOE_F8_E4M3	 ? "fp8"
	       : find(g, "gate_proj.packed_i32") ? "int4"
						 : "int8";
}

static bool read_config(struct run *g)
{
	const char *text = moe_safetensors_metadata(g->st, "config");
	cJSON *c = NULL;
	const cJSON *adamw;
	const char *kind = "";
	double limit = 0;

	if (!text || !call(g, moe_json_parse(text, strlen(text), "config", &c)))
		return false;
	moe_json_opt_text(c, "kind", &kind);
	snprintf(g->kind, sizeof g->kind, "%s", kind);
	g->normalise = true;
	moe_json_opt_bool(c, "norm_topk_prob", &g->normalise);
	if (!strcmp(g->kind, "mixtral"))
		g->normalise = true;
	moe_json_opt_bool(c, "experts_only", &g->experts_only);
	moe_json_opt_bool(c, "base_grads", &g->base_grads);
	moe_json_opt_int(c, "shared_I", 0, 1 << 20, &g->shared_I);
	moe_json_opt_real(c, "scaling", &g->scaling);
	moe_json_opt_real(c, "alpha", &g->alpha);
	moe_json_opt_real(c, "swiglu_limit", &limit);
	g->tie = moe_json_get(c, "tie") && !cJSON_IsFalse(moe_json_get(c, "tie"));
	adamw = moe_json_get(c, "adamw");
	g->train = adamw != NULL;
	if (adamw) {
		moe_json_opt_real(adamw, "lr", &g->lr);
		moe_json_opt_real(adamw, "beta1", &g->beta1);
		moe_json_opt_real(adamw, "beta2", &g->beta2);
		moe_json_opt_real(adamw, "eps", &g->eps);
		moe_json_opt_real(adamw, "weight_decay", &g->weight_decay);
	}
	call(g, moe_json_int(c, "E", 1, 1 << 20, &g->E));
	call(g, moe_json_int(c, "k", 1, 1 << 20, &g->k));
	call(g, moe_json_int(c, "H", 1, 1 << 24, &g->H));
	call(g, moe_json_int(c, "I", 1, 1 << 24, &g->I));
	call(g, moe_json_int(c, "T", 0, 1 << 24, &g->T));
	moe_json_opt_int(c, "r", 0, 1 << 20, &g->rank);
	cJSON_Delete(c);
	g->format = format_of(g);
	if (!golden_kind_supported(g->kind))
		fail(g, "router kind \"%s\" is not in this build", g->kind);
	g->full_ft = g->train && find(g, "step1.gate_proj");
	if (limit != 0)
		fail(g, "swiglu_limit %g is not in this build", limit);
	return g->ok;
}

static bool create_block(struct run *g, struct moe_engine *e, bool lora, bool grads, bool train_base)
{
	struct moe_block_params p = {
		.struct_size = sizeof p,
		.hidden = (int)g->H,
		.intermediate = (int)g->I,
		.experts = (int)g->E,
		.experts_per_token = (int)g->k,
		.router = g->experts_only ? NULL : "softmax_topk",
		.router_normalise = g->normalise,
		.shared_intermediate = (int)g->shared_I,
		.shared_sigmoid = g->shared_I && find(g, "shared_router_weight"),
		.lora_rank = lora ? (int)g->rank : 0,
		.lora_alpha = (float)(g->scaling * (double)g->rank),
		.lora_share_a = g->peft,
		.base_gradients = grads && !g->peft && !g->format,
		.weight_dtype = MOE_F32,
		.expected_tokens = (int)g->T,
		.group_size = g->o->group_size,
		.slices_i = g->o->slices_i,
		.slices_h = g->o->slices_h,
		.backward_weights = g->format ? NULL : g->o->backward, /* direct only */
		.weight_format = g->format,
		.train_base = train_base,
		.activations = g->o->activations,
	};

	g->lora = lora;
	return call(g, moe_block_create(e, &p, &g->block));
}

/* HF's fused [E, 2I, H] into gate and up. */
static void set_fused(struct run *g)
{
	struct moe_array a, half;
	size_t bytes = (size_t)(g->I * g->H) * 2;

	if (!load(g, "gate_up_proj", &a))
		return;
	half = array(malloc((size_t)g->E * bytes), a.dtype, 3, (int64_t[]){ g->E, g->I, g->H });
	for (int w = 0; w < 2; w++) {
		for (int64_t e = 0; e < g->E; e++)
			memcpy((char *)half.data + (size_t)e * bytes,
			       (char *)a.data + (size_t)(2 * e + w) * bytes, bytes);
		call(g,
		     moe_block_set(g->block, w ? MOE_BLOCK_UP_PROJ : MOE_BLOCK_GATE_PROJ, &half));
	}
	free(half.data);
	free(a.data);
}

/* PEFT's B [out, r E], expert fastest, rows out0.. -> [E, rows, r] and back. */
static void peft_b(const double *file, double *kt, int64_t E, int64_t r, int64_t rows, int64_t out0,
		   bool back)
{
	for (int64_t e = 0; e < E; e++)
		for (int64_t o = 0; o < rows; o++)
			for (int64_t j = 0; j < r; j++) {
				double *f = (double *)file + (out0 + o) * r * E + j * E + e;
				double *t = kt + (e * rows + o) * r + j;

				if (back)
					*f = *t;
				else
					*t = *f;
			}
}

static void set_doubles(struct run *g, enum moe_block_array which, double *d, int64_t a, int64_t b)
{
	struct moe_array x = array(d, MOE_F64, 3, (int64_t[]){ g->E, a, b });

	call(g, moe_block_set(g->block, which, &x));
}

static void set_peft_lora(struct run *g)
{
	int64_t n, E = g->E, H = g->H, I = g->I, r = g->rank;
	double *a = doubles(g, "peft.gate_up_proj.lora_A", &n),
	       *da = doubles(g, "peft.down_proj.lora_A", &n);
	double *b = doubles(g, "peft.gate_up_proj.lora_B", &n),
	       *db = doubles(g, "peft.down_proj.lora_B", &n);
	double *t = malloc((size_t)(E * MOE_MAX(H, I) * r) * sizeof *t);

	if (a && b && da && db) {
		set_doubles(g, MOE_BLOCK_GATE_LORA_A, a, r, H);
		set_doubles(g, MOE_BLOCK_DOWN_LORA_A, da, r, I);
		peft_b(b, t, E, r, I, 0, false);
		set_doubles(g, MOE_BLOCK_GATE_LORA_B, t, I, r);
		peft_b(b, t, E, r, I, I, false);
		set_doubles(g, MOE_BLOCK_UP_LORA_B, t, I, r);
		peft_b(db, t, E, r, H, 0, false);
		set_doubles(g, MOE_BLOCK_DOWN_LORA_B, t, H, r);
	} else {
		fail(g, "a peft.*.lora_* input is missing");
	}
	free(a), free(b), free(da), free(db), free(t);
}

/* What the first expert's codes stand for, against the file: exact. */
static void check_dequantised(struct run *g, const char *name, const struct moe_quantised *q)
{
	char key[64];
	int64_t n = 0, wrong = 0;
	double *want;
	float *row = malloc((size_t)q->k * sizeof *row);

	snprintf(key, sizeof key, "%s.dequant_expert0", name);
	want = doubles(g, key, &n);
	if (!want || n != q->n * q->k)
		fail(g, "%s is missing", key);
	for (int64_t i = 0; want && n == q->n * q->k && i < q->n; i++) {
		moe_dequantise_row(q, i, 0, q->k, row);
		for (int64_t j = 0; j < q->k; j++)
			wrong += (double)row[j] != want[i * q->k + j];
	}
	if (wrong)
		fail(g, "%s: %lld of %lld values differ", key, (long long)wrong, (long long)n);
	free(want), free(row);
}

static struct moe_array without_experts(struct moe_array a)
{
	for (int i = 1; i < a.ndim; i++)
		a.shape[i - 1] = a.shape[i];
	a.ndim--;
	return a;
}

static void set_quantised(struct run *g, enum moe_block_array which, const char *name)
{
	const struct moe_format *f = moe_format_find(g->format);
	bool down = which == MOE_BLOCK_DOWN_PROJ;
	struct moe_quantised_arrays a = { .struct_size = sizeof a };
	struct moe_quantised q = { .coding = { .format = f } };
	struct moe_stored s = { .codes_name = "codes", .scale_name = "scale", .zero_name = "zero" };
	char key[64];

	snprintf(key, sizeof key, "%s.q", name);
	find(g, key); /* int4: the same as packed_i32 */
	if (!strcmp(g->format, "int4"))
		snprintf(key, sizeof key, "%s.packed_i32", name);
	if (!load(g, key, &a.codes))
		fail(g, "%s is missing", key);
	snprintf(key, sizeof key, "%s.%s", name, strcmp(g->format, "fp8") ? "scale" : "scale_inv");
	if (!load(g, key, &a.scale))
		fail(g, "%s is missing", key);
	find(g, name); /* before quantising */
	call(g, moe_block_set_quantised(g->block, which, &a));
	q.n = s.n = down ? g->H : g->I;
	q.k = s.k = down ? g->I : g->H;
	q.codes = s.codes = without_experts(a.codes);
	q.scale = s.scale = without_experts(a.scale);
	if (call(g, f->layout[0].open(&s, &q)))
		check_dequantised(g, name, &q);
	free(a.codes.data), free(a.scale.data);
}

static void set_weights(struct run *g)
{
	if (g->format) {
		set_quantised(g, MOE_BLOCK_GATE_PROJ, "gate_proj");
		set_quantised(g, MOE_BLOCK_UP_PROJ, "up_proj");
		set_quantised(g, MOE_BLOCK_DOWN_PROJ, "down_proj");
		find(g, "out_nolora_unquantised"); /* how much quantising lost */
	} else if (g->peft) {
		set_fused(g);
	} else {
		set_from_file(g, MOE_BLOCK_GATE_PROJ, "gate_proj");
		set_from_file(g, MOE_BLOCK_UP_PROJ, "up_proj");
	}
	if (!g->format)
		set_from_file(g, MOE_BLOCK_DOWN_PROJ, "down_proj");
	if (!g->experts_only)
		set_from_file(g, MOE_BLOCK_ROUTER, "router_weight");
	if (g->shared_I) {
		set_from_file(g, MOE_BLOCK_SHARED_GATE, "shared_gate_proj");
		set_from_file(g, MOE_BLOCK_SHARED_UP, "shared_up_proj");
		set_from_file(g, MOE_BLOCK_SHARED_DOWN, "shared_down_proj");
		if (find(g, "shared_router_weight"))
			set_from_file(g, MOE_BLOCK_SHARED_ROUTER, "shared_router_weight");
	}
	if (g->lora && g->peft)
		set_peft_lora(g);
	for (int i = 0; g->lora && !g->peft && i < 6; i++)
		set_from_file(g, (enum moe_block_array)(MOE_BLOCK_GATE_LORA_A + i), lora_names[i]);
}

/* out [T, H] as doubles; free it. */
static double *forward(struct run *g, bool save)
{
	double *out = calloc((size_t)(g->T * g->H) + 1, sizeof *out);
	struct moe_array x, ids = { 0 }, w = { 0 }, o = matrix(out, MOE_F64, g->T, g->H);

	if (!load(g, "x", &x)) {
		fail(g, "input x is missing");
		return out;
	}
	if (g->experts_only && (!load(g, "topk_ids", &ids) || !load(g, "topk_weights", &w)))
		fail(g, "inputs topk_ids, topk_weights are missing");
	call(g, (g->o->async ? moe_block_forward_async : moe_block_forward)(
			g->block, &x, g->experts_only ? &ids : NULL, g->experts_only ? &w : NULL,
			save, &o));
	if (g->o->async)
		call(g, moe_block_wait(g->block));
	free(x.data), free(ids.data), free(w.data);
	return out;
}

static void backward(struct run *g, const struct moe_array *grad_out, const struct moe_array *grad_x,
		     const struct moe_array *grad_weights)
{
	call(g, (g->o->async ? moe_block_backward_async : moe_block_backward)(g->block, grad_out, grad_x,
									      grad_weights));
	if (g->o->async)
		call(g, moe_block_wait(g->block));
}

static void check_lora_free(struct run *g)
{
	double *out = forward(g, false);

	compare(g, "out_nolora", out, g->T * g->H, tolerance()->out);
	/* what HF itself gives in f32 and bf16: shows what is fair, with its own rounding allowed
	 * for */
	compare(g, "out_nolora_hf_f32", out, g->T * g->H, tolerance()->out);
	compare(g, "out_nolora_hf_bf16", out, g->T * g->H, 2e-2);
	free(out);
}

static double *get(struct run *g, enum moe_block_array which, bool gradient, int ndim,
		   const int64_t *shape)
{
	int64_t n = moe_shape_count(ndim, shape);
	double *d = calloc((size_t)n + 1, sizeof *d);
	struct moe_array a = array(d, MOE_F64, ndim, shape);

	call(g, gradient ? moe_block_get_gradient(g->block, which, &a)
			 : moe_block_get(g->block, which, &a));
	return d;
}

/* Shape of a LoRA array, kt layout. */
static void lora_shape(const struct run *g, int i, int64_t *s)
{
	int64_t in = i == 2 ? g->I : g->H, out = i == 5 ? g->H : g->I;

	s[0] = g->E;
	s[1] = i < 3 ? g->rank : out;
	s[2] = i < 3 ? in : g->rank;
}

static void check_routing(struct run *g)
{
	int64_t T = g->T, k = g->k, E = g->E;
	int32_t *ids = calloc((size_t)(T * k) + 1, sizeof *ids);
	struct moe_array a = matrix(ids, MOE_I32, T, k);
	double *dense = calloc((size_t)(T * E) + 1, sizeof *dense), *w, *logits;

	call(g, moe_block_get(g->block, MOE_BLOCK_TOPK_IDS, &a));
	w = get(g, MOE_BLOCK_TOPK_WEIGHTS, false, 2, (int64_t[]){ T, k });
	for (int64_t s = 0; s < T * k; s++)
		if (ids[s] >= 0)
			dense[s / k * E + ids[s]] += w[s];
	compare(g, "dense_weights", dense, T * E, tolerance()->routing);
	/* the file's slots are in any order: `dense_weights` compares them */
	find(g, "topk_ids");
	find(g, "topk_weights");
	if (!g->experts_only) {
		logits = get(g, MOE_BLOCK_ROUTER_LOGITS, false, 2, (int64_t[]){ T, E });
		compare(g, "router_logits", logits, T * E, tolerance()->routing);
		free(logits);
	}
	free(ids), free(dense), free(w);
}

/* Gradients of the routing weights, slots matched by expert id where the router is ours. */
static void check_weight_grads(struct run *g, double *got)
{
	int64_t n = 0, T = g->T, k = g->k;
	double *ref_ids = doubles(g, "topk_ids", &n),
	       *matched = malloc((size_t)(T * k + 1) * sizeof *matched);
	int32_t *ids = calloc((size_t)(T * k) + 1, sizeof *ids);
	struct moe_array a = matrix(ids, MOE_I32, T, k);

	call(g, moe_block_get(g->block, MOE_BLOCK_TOPK_IDS, &a));
	for (int64_t s = 0; ref_ids && s < T * k; s++) {
		matched[s] = g->experts_only ? got[s] : 1e30;
		for (int64_t j = 0; !g->experts_only && j < k; j++)
			if (ids[s / k * k + j] == (int32_t)ref_ids[s])
				matched[s] = got[s / k * k + j];
	}
	/* a scale times a code is rounded to bf16: what may cancel has an error more (docs/decisions.md) */
	compare(g, "grad_topk_weights", ref_ids ? matched : got, T * k,
		(g->format ? 1.15 : 1) * tolerance()->grad_weights);
	free(ref_ids), free(matched), free(ids);
}

static void check_base_grads(struct run *g)
{
	static const struct {
		const char *key;
		enum moe_block_array which;
	} list[] = {
		{ "grad_gate_proj", MOE_BLOCK_GATE_PROJ },
		{ "grad_up_proj", MOE_BLOCK_UP_PROJ },
		{ "grad_down_proj", MOE_BLOCK_DOWN_PROJ },
		{ "grad_router_weight", MOE_BLOCK_ROUTER },
		{ "grad_shared_gate_proj", MOE_BLOCK_SHARED_GATE },
		{ "grad_shared_up_proj", MOE_BLOCK_SHARED_UP },
		{ "grad_shared_down_proj", MOE_BLOCK_SHARED_DOWN },
		{ "grad_shared_router_weight", MOE_BLOCK_SHARED_ROUTER },
	};

	for (size_t i = 0; i < MOE_COUNT(list); i++) {
		const struct moe_st_tensor *t = find(g, list[i].key);
		double *d;

		if (!t)
			continue;
		/* one token: softmax leaves the small difference of k nearly equal terms */
		bool cancels = g->T == 1 && list[i].which == MOE_BLOCK_ROUTER;

		d = get(g, list[i].which, true, t->ndim, t->shape);
		compare(g, list[i].key, d, count_of(t), (cancels ? 4 : 1) * tolerance()->grad);
		free(d);
	}
}

static void check_peft_grads(struct run *g)
{
	int64_t E = g->E, H = g->H, I = g->I, r = g->rank, s[3];
	double *b = malloc((size_t)(2 * I * r * E) * sizeof *b),
	       *db = malloc((size_t)(H * r * E) * sizeof *db);
	double *d[6];

	for (int i = 0; i < 6; i++) {
		lora_shape(g, i, s);
		d[i] = get(g, (enum moe_block_array)(MOE_BLOCK_GATE_LORA_A + i), true, 3, s);
	}
	peft_b(b, d[3], E, r, I, 0, true);
	peft_b(b, d[4], E, r, I, I, true);
	peft_b(db, d[5], E, r, H, 0, true);
	compare(g, "peft.gate_up_proj.grad_lora_A", d[0], E * r * H, tolerance()->grad);
	compare(g, "peft.down_proj.grad_lora_A", d[2], E * r * I, tolerance()->grad);
	compare(g, "peft.gate_up_proj.grad_lora_B", b, 2 * I * r * E, tolerance()->grad);
	compare(g, "peft.down_proj.grad_lora_B", db, H * r * E, tolerance()->grad);
	/* the same adapter in another layout: an input that is not needed */
	find(g, "per_expert.gate_up_proj.a"), find(g, "per_expert.gate_up_proj.b");
	find(g, "per_expert.down_proj.a"), find(g, "per_expert.down_proj.b");
	for (int i = 0; i < 6; i++)
		free(d[i]);
	free(b), free(db);
}

static void check_lora_grads(struct run *g)
{
	char name[64];
	int64_t s[3];

	for (int i = 0; i < 6; i++) {
		double *d;

		snprintf(name, sizeof name, "grad_%s", lora_names[i]);
		if (!find(g, name))
			continue;
		lora_shape(g, i, s);
		d = get(g, (enum moe_block_array)(MOE_BLOCK_GATE_LORA_A + i), true, 3, s);
		compare(g, name, d, moe_shape_count(3, s), tolerance()->grad);
		free(d);
	}
}

static void find_largest_grad(struct run *g)
{
	for (size_t i = 0; i < moe_safetensors_count(g->st); i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(g->st, i);
		bool was = i < MAX_KEYS && g->used[i];
		int64_t n;
		double *d;

		if (!strstr(t->name, "grad") || !strcmp(t->name, "grad_out"))
			continue;
		d = doubles(g, t->name, &n);
		g->largest_grad = MOE_MAX(g->largest_grad, norm(d, n));
		free(d);
		if (i < MAX_KEYS)
			g->used[i] = was;
	}
}

static void check_forward_backward(struct run *g)
{
	int64_t n = g->T * g->H;
	double *out = forward(g, true), *gx = calloc((size_t)n + 1, sizeof *gx), dot = 0, terms = 0;
	double *gw = calloc((size_t)(g->T * g->k) + 1, sizeof *gw);
	struct moe_array go, gxa = matrix(gx, MOE_F64, g->T, g->H),
			     gwa = matrix(gw, MOE_F64, g->T, g->k);
	int64_t m;
	double *god;

	compare(g, "out", out, n, tolerance()->out);
	compare(g, "out_f64", out, n, tolerance()->out);
	check_routing(g);
	if (load(g, "grad_out", &go)) {
		backward(g, &go, &gxa, &gwa);
		god = doubles(g, "grad_out", &m);
		for (int64_t i = 0; i < n; i++) {
			dot += god[i] * out[i];
			terms += god[i] * god[i] * out[i] * out[i];
		}
		/* the sum may cancel: errors are in proportion to its terms */
		compare(g, "loss_dot", &dot, 1,
			3 * tolerance()->out * MOE_MAX(1, sqrt(terms) / fabs(dot)));
		compare(g, "grad_x", gx, n, tolerance()->grad_x);
		if (g->peft)
			check_peft_grads(g);
		else {
			check_weight_grads(g, gw);
			check_lora_grads(g);
			check_base_grads(g);
		}
		free(god), free(go.data);
	}
	free(out), free(gx), free(gw);
}

/* The auxiliary loss and its gradient alone: a block with coefficient 1 and no upstream gradient.
 */
static void check_aux(struct run *g, struct moe_engine *e)
{
	struct moe_block_params p = { .struct_size = sizeof p,
				      .hidden = (int)g->H,
				      .intermediate = (int)g->I,
				      .experts = (int)g->E,
				      .experts_per_token = (int)g->k,
				      .router = "softmax_topk",
				      .router_normalise = g->normalise,
				      .aux_loss_coef = 1 };
	double *zero, *gx, *d, aux = 0, *out;
	struct moe_array a, b;
	int64_t n = g->T * g->H;

	if (!find(g, "aux_loss") || !call(g, moe_block_create(e, &p, &g->block)))
		return;
	g->lora = false;
	int64_t shared = g->shared_I;
	g->shared_I = 0;
	set_weights(g);
	g->shared_I = shared;
	out = forward(g, true);
	zero = calloc((size_t)n + 1, sizeof *zero);
	gx = calloc((size_t)n + 1, sizeof *gx);
	a = matrix(zero, MOE_F64, g->T, g->H);
	b = matrix(gx, MOE_F64, g->T, g->H);
	backward(g, &a, &b, NULL);
	b = array(&aux, MOE_F64, 1, (int64_t[]){ 1 });
	call(g, moe_block_get(g->block, MOE_BLOCK_AUX_LOSS, &b));
	compare(g, "aux_loss", &aux, 1, tolerance()->routing);
	d = get(g, MOE_BLOCK_GRAD_ROUTER_LOGITS, false, 2, (int64_t[]){ g->T, g->E });
	compare(g, "grad_aux_router_logits", d, g->T * g->E, exact.grad);
	free(d), free(zero), free(gx), free(out);
	moe_block_destroy(g->block);
	g->block = NULL;
}

/*
 * Parameters after a step. With rounded gradients the error is measured against how far the parameters have come, since
 * AdamW's first steps are of one size whatever the gradient's.
 */
static void compare_step(struct run *g, const char *name, const char *start, double *got, int64_t n,
			 double tol)
{
	int64_t m = 0, m0 = 0;
	double *ref = doubles(g, name, &m), *p0 = doubles(g, start, &m0);

	if (!ref) {
		free(p0);
		return;
	}
	if (tolerance() == &rounded && p0 && m == n && m0 == n)
		for (int64_t i = 0; i < n; i++) {
			got[i] -= p0[i];
			ref[i] -= p0[i];
		}
	if (m != n)
		fail(g, "%s has %lld elements, %lld computed", name, (long long)m, (long long)n);
	else
		compare_values(g, name, got, ref, n, tol);
	free(ref), free(p0);
}

static void check_base_params(struct run *g, int step)
{
	static const char *const names[] = { "gate_proj", "up_proj", "down_proj", "router_weight" };

	for (int i = 0; i < 4; i++) {
		const struct moe_st_tensor *t;
		char name[64];
		double *d;

		snprintf(name, sizeof name, "step%d.%s", step, names[i]);
		t = find(g, name);
		if (!t)
			continue;
		d = get(g, (enum moe_block_array)(MOE_BLOCK_GATE_PROJ + i), false, t->ndim, t->shape);
		compare_step(g, name, names[i], d, count_of(t),
			     step == 1 ? tolerance()->first_step : tolerance()->step);
		free(d);
	}
}

static void check_params(struct run *g, int step)
{
	char name[64];
	int64_t s[3];

	for (int i = 0; i < 6; i++) {
		double *d;

		snprintf(name, sizeof name, "step%d.%s", step, lora_names[i]);
		lora_shape(g, i, s);
		d = get(g, (enum moe_block_array)(MOE_BLOCK_GATE_LORA_A + i), false, 3, s);
		compare_step(g, name, lora_names[i], d, moe_shape_count(3, s),
			     step == 1 ? tolerance()->first_step : tolerance()->step);
		free(d);
	}
}

static void check_training(struct run *g)
{
	struct moe_adamw_params p = { .struct_size = sizeof p,
				      .learning_rate = g->lr,
				      .beta1 = g->beta1,
				      .beta2 = g->beta2,
				      .eps = g->eps,
				      .weight_decay = g->weight_decay };
	int64_t n = g->T * g->H, m;
	double losses[6] = { 0 }, *target = doubles(g, "target", &m);
	double *gx = calloc((size_t)n + 1, sizeof *gx);
	struct moe_array gxa = matrix(gx, MOE_F64, g->T, g->H);

	moe_block_zero_gradients(g->block);
	for (int step = 0; target && step < 6 && g->ok; step++) {
		double *out = forward(g, step < 5);
		struct moe_array d = matrix(out, MOE_F64, g->T, g->H);

		for (int64_t i = 0; i < n; i++) {
			out[i] -= target[i];
			losses[step] += out[i] * out[i] / (double)n;
			out[i] *= 2.0 / (double)n;
		}
		if (step < 5) {
			backward(g, &d, &gxa, NULL);
			call(g, moe_block_update(g->block, &p));
			call(g, moe_block_wait(g->block));
			(g->full_ft ? check_base_params : check_params)(g, step + 1);
		}
		free(out);
	}
	/* AdamW's first step is the gradient's sign: with one token no mean hides a flipped one */
	compare(g, "train_losses", losses, 6, (g->T == 1 ? 2 : 1) * tolerance()->loss);
	free(target), free(gx);
}

static void check_all_used(struct run *g)
{
	static const char *const never_needed[] = { "grad_out",	 "target",	"gate_lora_a",
						    "up_lora_a", "down_lora_a", "gate_lora_b",
						    "up_lora_b", "down_lora_b", "x" };
	static const char *const lora_dependent[] = {
		"out",	 "router_logits", "dense_weights", "topk_",   "loss_dot",
		"grad_", "train_losses",  "step",	   "aux_loss"
	};

	for (size_t i = 0; i < moe_safetensors_count(g->st); i++) {
		const char *name = moe_safetensors_at(g->st, i)->name;
		bool input = false;

		if (i < MAX_KEYS && g->used[i])
			continue;
		for (size_t j = 0; j < MOE_COUNT(never_needed); j++)
			input |= !strcmp(name, never_needed[j]);
		/* tied experts: ids are any legal choice, so nothing that depends on LoRA is
		 * comparable */
		for (size_t j = 0; g->tie && j < MOE_COUNT(lora_dependent); j++)
			input |= starts(name, lora_dependent[j]);
		if (!input)
			fail(g, "key %s was neither compared nor is it an input", name);
	}
}

static void train(struct run *g, struct moe_engine *e)
{
	if (g->full_ft) {
		moe_block_destroy(g->block);
		g->block = NULL;
		if (!create_block(g, e, false, true, true))
			return;
		set_weights(g);
	}
	check_training(g);
}

static void run_all(struct run *g, struct moe_engine *e)
{
	if (!create_block(g, e, false, false, false))
		return;
	set_weights(g);
	check_lora_free(g);
	moe_block_destroy(g->block);
	g->block = NULL;
	if (!g->tie && g->ok && create_block(g, e, g->rank > 0, true, false)) {
		set_weights(g);
		check_forward_backward(g);
		if (g->train && find(g, "train_losses"))
			train(g, e);
		moe_block_destroy(g->block);
		g->block = NULL;
	}
	if (!g->tie && !g->experts_only && g->ok)
		check_aux(g, e);
	check_all_used(g);
}

const char *golden_kind(const char *path, char *buf, size_t size)
{
	struct moe_safetensors *st;
	const char *text, *kind = "";
	cJSON *c = NULL;

	snprintf(buf, size, "%s", "");
	if (moe_safetensors_open(path, &st) != MOE_OK)
		return buf;
	text = moe_safetensors_metadata(st, "config");
	if (text && moe_json_parse(text, strlen(text), "config", &c) == MOE_OK) {
		moe_json_opt_text(c, "kind", &kind);
		snprintf(buf, size, "%s", kind);
		cJSON_Delete(c);
	}
	moe_safetensors_close(st);
	return buf;
}

bool golden_run(struct moe_engine *engine, const char *path, const struct golden_options *o,
		struct golden_result *result)
{
	struct golden_result local;
	struct run g = {
		.o = o, .r = result ? result : &local, .path = path, .ok = true, .scaling = 1
	};

	memset(g.r, 0, sizeof *g.r);
	g.r->bits = 0xcbf29ce484222325ull;
	if (!call(&g, moe_safetensors_open(path, &g.st)))
		return false;
	g.peft = find(&g, "gate_up_proj") != NULL;
	if (read_config(&g)) {
		find_largest_grad(&g);
		run_all(&g, engine);
	}
	moe_block_destroy(g.block);
	moe_safetensors_close(g.st);
	if (g.ok && !g.r->compared)
		fail(&g, "nothing to compare: this is not a block fixture");
	if (!result)
		golden_free(&local);
	return g.ok && g.r->failed == 0;
}

void golden_free(struct golden_result *r)
{
	free(r->values);
	r->values = NULL;
}
