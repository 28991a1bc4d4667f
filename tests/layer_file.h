/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A block fixture for the experts of one layer: routing as the file gives it. What these experts lack is added by the
 * tests: shared experts; gpt-oss's biases, of which those of gate and up are a column of weights beside a column of
 * ones in x; Llama-4's scores, which scale x.
 */
#ifndef MOE_TESTS_LAYER_FILE_H
#define MOE_TESTS_LAYER_FILE_H

#include "tests/layer_check.h"

#include "model/json.h"
#include "model/readers/safetensors.h"

#include <math.h>

struct file {
	struct moe_safetensors *st;
	struct block_data d; /* c; weights, x, grad_out, ids, routing weights as f32 */
	double alpha, lr, beta1, beta2, eps, decay;
	bool routed, train, biased; /* biased: c.H is the file's and a column of ones */
	bool normalise, scores_scale_x;
	double *more_out, *more_weights; /* [T, file's H], [T, k]: of shared experts or biases of down, or NULL */
	const char *format; /* of quantised weights, or NULL */
	const char *name;
};

static const char *const names[BLOCK_WEIGHTS] = {
	[MOE_BLOCK_GATE_PROJ] = "gate_proj",	 [MOE_BLOCK_UP_PROJ] = "up_proj",
	[MOE_BLOCK_DOWN_PROJ] = "down_proj",	 [MOE_BLOCK_GATE_LORA_A] = "gate_lora_a",
	[MOE_BLOCK_UP_LORA_A] = "up_lora_a",	 [MOE_BLOCK_DOWN_LORA_A] = "down_lora_a",
	[MOE_BLOCK_GATE_LORA_B] = "gate_lora_b", [MOE_BLOCK_UP_LORA_B] = "up_lora_b",
	[MOE_BLOCK_DOWN_LORA_B] = "down_lora_b"
};

static double *doubles(const struct moe_safetensors *st, const char *name)
{
	const struct moe_st_tensor *t = moe_safetensors_find(st, name);
	int64_t n = t ? moe_shape_count(t->ndim, t->shape) : 0;
	double *d = t ? malloc((size_t)(n + 1) * sizeof *d) : NULL;

	for (int64_t i = 0; i < n; i++) {
		const char *p = (const char *)t->data + (size_t)i * moe_dtype_size(t->dtype);
		int32_t whole;
		float f;

		if (t->dtype == MOE_F64)
			memcpy(&d[i], p, sizeof d[i]);
		else if (t->dtype == MOE_I32) {
			memcpy(&whole, p, sizeof whole);
			d[i] = whole;
		} else {
			moe_to_f32(&f, p, t->dtype, 1);
			d[i] = f;
		}
	}
	return d;
}

static float *floats(const struct moe_safetensors *st, const char *name, int64_t n)
{
	double *d = doubles(st, name);
	float *f = calloc((size_t)n + 1, sizeof *f);

	CHECK(d != NULL);
	for (int64_t i = 0; d && i < n; i++)
		f[i] = (float)d[i];
	free(d);
	return f;
}

/* false: not a file for this suite */
static bool read_config(struct file *f)
{
	const char *text = moe_safetensors_metadata(f->st, "config"), *kind = "";
	struct block_case *c = &f->d.c;
	int64_t E = 0, k = 0, H = 0, I = 0, T = 0, r = 0;
	double limit = 0;
	bool experts_only = false, full_ft = false;
	const cJSON *adamw;
	cJSON *j = NULL;

	if (!text || moe_json_parse(text, strlen(text), "config", &j) != MOE_OK)
		return false;
	moe_json_opt_text(j, "kind", &kind);
	f->biased = !strcmp(kind, "gpt_oss");
	f->scores_scale_x = !strcmp(kind, "llama4");
	moe_json_opt_int(j, "E", 0, 1 << 20, &E), moe_json_opt_int(j, "k", 0, 1 << 20, &k);
	moe_json_opt_int(j, "H", 0, 1 << 20, &H), moe_json_opt_int(j, "I", 0, 1 << 20, &I);
	moe_json_opt_int(j, "T", 0, 1 << 20, &T), moe_json_opt_int(j, "r", 0, 1 << 20, &r);
	moe_json_opt_real(j, "alpha", &f->alpha);
	moe_json_opt_real(j, "swiglu_limit", &limit);
	moe_json_opt_bool(j, "experts_only", &experts_only);
	moe_json_opt_bool(j, "full_ft", &full_ft);
	adamw = moe_json_get(j, "adamw");
	f->normalise = true;
	moe_json_opt_bool(j, "norm_topk_prob", &f->normalise);
	f->train = adamw && !full_ft; /* there the router moves: suite_layer_router */
	if (adamw) {
		moe_json_opt_real(adamw, "lr", &f->lr), moe_json_opt_real(adamw, "eps", &f->eps);
		moe_json_opt_real(adamw, "beta1", &f->beta1), moe_json_opt_real(adamw, "beta2", &f->beta2);
		moe_json_opt_real(adamw, "weight_decay", &f->decay);
	}
	cJSON_Delete(j);
	*c = (struct block_case){ .E = (int)E, .k = (int)k, .H = (int)H, .I = (int)I, .T = (int)T, .r = (int)r,
				  .limit = (float)limit, .alpha = f->biased ? 1.702f : 0, .shift = f->biased };
	f->routed = !experts_only;
	return moe_safetensors_find(f->st, "gate_proj") && moe_safetensors_find(f->st, "out");
}

/* y += q W_down (silu(gate) up) of one token, clamped as the file's experts are. */
static void shared_token(const struct file *f, double *const w[4], int64_t S, const float *x, double *y)
{
	double limit = f->d.c.limit != 0 ? (double)f->d.c.limit : INFINITY, q = 0;
	int64_t H = f->d.c.H;

	for (int64_t i = 0; w[3] && i < H; i++)
		q += w[3][i] * (double)x[i];
	q = w[3] ? 1 / (1 + exp(-q)) : 1;
	for (int64_t s = 0; s < S; s++) {
		double g = 0, u = 0;

		for (int64_t i = 0; i < H; i++) {
			g += w[0][s * H + i] * (double)x[i];
			u += w[1][s * H + i] * (double)x[i];
		}
		g = fmin(g, limit);
		u = q * g / (1 + exp(-g)) * fmax(fmin(u, limit), -limit);
		for (int64_t i = 0; i < H; i++)
			y[i] += w[2][i * S + s] * u;
	}
}

/* Shared experts: [S, H], [S, H], [H, S], and Qwen2's gate [1, H]. */
static double *shared_output(const struct file *f)
{
	const struct block_case *c = &f->d.c;
	double *w[4] = { doubles(f->st, "shared_gate_proj"), doubles(f->st, "shared_up_proj"),
			 doubles(f->st, "shared_down_proj"), doubles(f->st, "shared_router_weight") };
	int64_t S = moe_safetensors_find(f->st, "shared_gate_proj")->shape[0], H = c->H;
	double *out = calloc((size_t)(c->T * H) + 1, sizeof *out);

	for (int64_t t = 0; t < c->T; t++)
		shared_token(f, w, S, f->d.x + t * H, out + t * H);
	free(w[0]), free(w[1]), free(w[2]), free(w[3]);
	return out;
}

/* Llama-4: the sigmoid of the largest logit scales the expert's input, and the weights are 1. */
static void scale_inputs(struct file *f)
{
	const struct block_case *c = &f->d.c;
	double *logits = doubles(f->st, "router_logits");

	for (int t = 0; t < c->T; t++) {
		const double *l = logits + (int64_t)t * c->E;
		int best = 0;

		for (int e = 1; e < c->E; e++)
			best = l[e] > l[best] ? e : best;
		f->d.ids[t] = best;
		f->d.weights[t] = 1;
		for (int i = 0; i < c->H; i++)
			f->d.x[(int64_t)t * c->H + i] *= (float)(1 / (1 + exp(-l[best])));
	}
	free(logits);
}

/* The biases of down: sum of weight times bias; and grad_out times bias for the weights' gradients. */
static void down_biases(struct file *f)
{
	const struct block_case *c = &f->d.c;
	double *bias = doubles(f->st, "down_bias");
	int64_t H = c->H;

	f->more_out = calloc((size_t)(c->T * H) + 1, sizeof(double));
	f->more_weights = calloc((size_t)(c->T * c->k) + 1, sizeof(double));
	for (int64_t s = 0; s < c->T * c->k; s++)
		for (int64_t i = 0; i < H; i++) {
			int64_t t = s / c->k;
			double b = bias[f->d.ids[s] * H + i];

			f->more_out[t * H + i] += (double)f->d.weights[s] * b;
			f->more_weights[s] += (double)f->d.grad_out[t * H + i] * b;
		}
	free(bias);
}

/* An array with H columns (or rows, of down) is so many blocks, of which each gets so many elements more. */
struct widening {
	int64_t blocks, block, more;
};

/* H: without the column of ones */
static struct widening widening_of(const struct block_case *c, int which, int64_t H)
{
	switch (which) {
	case MOE_BLOCK_GATE_PROJ:
	case MOE_BLOCK_UP_PROJ:
		return (struct widening){ c->E * c->I, H, 1 };
	case MOE_BLOCK_GATE_LORA_A:
	case MOE_BLOCK_UP_LORA_A:
		return (struct widening){ c->E * c->r, H, 1 };
	case MOE_BLOCK_DOWN_PROJ:
		return (struct widening){ c->E, H * c->I, c->I };
	case MOE_BLOCK_DOWN_LORA_B:
		return (struct widening){ c->E, H * c->r, c->r };
	default:
		return (struct widening){ 0 };
	}
}

/* a, freed, with `tail` [blocks, more] (NULL: zeros) behind the blocks */
static float *widen(float *a, struct widening w, const float *tail)
{
	float *wide = calloc((size_t)(w.blocks * (w.block + w.more)) + 1, sizeof *wide);

	for (int64_t i = 0; i < w.blocks; i++) {
		float *to = wide + i * (w.block + w.more);

		memcpy(to, a + i * w.block, (size_t)w.block * sizeof *to);
		if (tail)
			memcpy(to + w.block, tail + i * w.more, (size_t)w.more * sizeof *to);
	}
	free(a);
	return wide;
}

/* The other way round, in place; tail may be NULL. */
static void narrow(double *a, struct widening w, double *tail)
{
	for (int64_t i = 0; i < w.blocks; i++) {
		const double *from = a + i * (w.block + w.more);

		for (int64_t j = 0; tail && j < w.more; j++)
			tail[i * w.more + j] = from[w.block + j];
		memmove(a + i * w.block, from, (size_t)w.block * sizeof *a);
	}
}

/* Biases of gate and up as a column: x's is one. */
static void widen_all(struct file *f)
{
	static const char *const biases[] = { "gate_bias", "up_bias" };
	struct block_data *d = &f->d;
	struct block_case *c = &d->c;
	struct widening rows = { c->T, c->H, 1 };
	float *ones = malloc((size_t)(c->T + 1) * sizeof *ones);

	for (int t = 0; t < c->T; t++)
		ones[t] = 1;
	d->x = widen(d->x, rows, ones);
	d->grad_out = widen(d->grad_out, rows, NULL);
	for (int i = 0; i < BLOCK_WEIGHTS; i++) {
		struct widening w = widening_of(c, i, c->H);
		float *tail = i <= MOE_BLOCK_UP_PROJ ? floats(f->st, biases[i], w.blocks) : NULL;

		if (d->w[i] && w.blocks)
			d->w[i] = widen(d->w[i], w, tail);
		d->n[i] += w.blocks * w.more;
		free(tail);
	}
	free(ones);
	c->H++;
}

static inline bool file_open(struct file *f, const char *path)
{
	struct block_data *d = &f->d;
	double *ids;
	int64_t n, s[3];

	memset(f, 0, sizeof *f);
	f->name = strrchr(path, '/') + 1;
	if (!CHECK_OK(moe_safetensors_open(path, &f->st)) || !read_config(f)) {
		moe_safetensors_close(f->st);
		return false;
	}
	n = (int64_t)d->c.T * d->c.H;
	d->c.base_grads = moe_safetensors_find(f->st, "grad_gate_proj") != NULL;
	for (int i = 0; i < BLOCK_WEIGHTS; i++)
		if (block_shape(&d->c, (enum moe_block_array)i, s)) {
			d->n[i] = moe_shape_count(3, s);
			d->w[i] = floats(f->st, names[i], d->n[i]);
		}
	d->x = floats(f->st, "x", n);
	d->grad_out = floats(f->st, "grad_out", n);
	d->weights = f->scores_scale_x ? calloc((size_t)d->c.T + 1, sizeof(float))
				       : floats(f->st, "topk_weights", (int64_t)d->c.T * d->c.k);
	d->ids = calloc((size_t)(d->c.T * d->c.k) + 1, sizeof *d->ids);
	ids = doubles(f->st, "topk_ids");
	for (int i = 0; ids && i < d->c.T * d->c.k; i++)
		d->ids[i] = (int32_t)ids[i];
	free(ids);
	if (f->biased) {
		down_biases(f);
		widen_all(f);
		n = (int64_t)d->c.T * d->c.H;
	} else if (moe_safetensors_find(f->st, "shared_gate_proj")) {
		f->more_out = shared_output(f);
	}
	if (f->scores_scale_x)
		scale_inputs(f);
	d->out = calloc((size_t)n + 1, sizeof(float));
	d->grad_x = calloc((size_t)n + 1, sizeof(float));
	d->grad_weights = calloc((size_t)(d->c.T * d->c.k) + 1, sizeof(float));
	return true;
}

static inline void file_close(struct file *f)
{
	moe_safetensors_close(f->st);
	block_data_free(&f->d);
	free(f->more_out), free(f->more_weights);
}

#endif
