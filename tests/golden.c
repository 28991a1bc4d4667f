/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/golden.h"

#include "engine/base.h"
#include "model/json.h"
#include "tests/fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static bool starts(const char *s, const char *prefix)
{
	return !strncmp(s, prefix, strlen(prefix));
}

bool golden_kind_supported(const char *kind)
{
	return !strcmp(kind, "qwen3_moe") || !strcmp(kind, "qwen2_moe") || !strcmp(kind, "olmoe") ||
	       !strcmp(kind, "mixtral") || !strcmp(kind, "deepseek_v4");
}

/* out [T, H] as doubles; free it. */
static double *forward(struct fixture *g, bool save)
{
	double *out = calloc((size_t)(g->T * g->H) + 1, sizeof *out);
	struct moe_array x, ids = { 0 }, w = { 0 }, o = fixture_matrix(out, MOE_F64, g->T, g->H);

	if (!fixture_load(g, "x", &x)) {
		fixture_fail(g, "input x is missing");
		return out;
	}
	if (g->experts_only &&
	    (!fixture_load(g, "topk_ids", &ids) || !fixture_load(g, "topk_weights", &w)))
		fixture_fail(g, "inputs topk_ids, topk_weights are missing");
	fixture_call(g, (g->o->async ? moe_block_forward_async : moe_block_forward)(
				g->block, &x, g->experts_only ? &ids : NULL,
				g->experts_only ? &w : NULL, save, &o));
	if (g->o->async)
		fixture_call(g, moe_block_wait(g->block));
	free(x.data), free(ids.data), free(w.data);
	return out;
}

static void backward(struct fixture *g, const struct moe_array *grad_out,
		     const struct moe_array *grad_x, const struct moe_array *grad_weights)
{
	fixture_call(g, (g->o->async ? moe_block_backward_async : moe_block_backward)(
				g->block, grad_out, grad_x, grad_weights));
	if (g->o->async)
		fixture_call(g, moe_block_wait(g->block));
}

static void check_lora_free(struct fixture *g)
{
	double *out = forward(g, false);

	fixture_compare(g, "out_nolora", out, g->T * g->H, fixture_tolerance()->out);
	/* what HF itself gives in f32 and bf16: shows what is fair, with its own rounding allowed
	 * for */
	fixture_compare(g, "out_nolora_hf_f32", out, g->T * g->H, fixture_tolerance()->out);
	fixture_compare(g, "out_nolora_hf_bf16", out, g->T * g->H, 2e-2);
	free(out);
}

static double *get(struct fixture *g, enum moe_block_array which, bool gradient, int ndim,
		   const int64_t *shape)
{
	int64_t n = moe_shape_count(ndim, shape);
	double *d = calloc((size_t)n + 1, sizeof *d);
	struct moe_array a = fixture_array(d, MOE_F64, ndim, shape);

	fixture_call(g, gradient ? moe_block_get_gradient(g->block, which, &a)
				 : moe_block_get(g->block, which, &a));
	return d;
}

/* Shape of a LoRA array, kt layout. */
static void lora_shape(const struct fixture *g, int i, int64_t *s)
{
	int64_t in = i == 2 ? g->I : g->H, out = i == 5 ? g->H : g->I;

	s[0] = g->E;
	s[1] = i < 3 ? g->rank : out;
	s[2] = i < 3 ? in : g->rank;
}

static void check_routing(struct fixture *g)
{
	int64_t T = g->T, k = g->k, E = g->E;
	int32_t *ids = calloc((size_t)(T * k) + 1, sizeof *ids);
	struct moe_array a = fixture_matrix(ids, MOE_I32, T, k);
	double *dense = calloc((size_t)(T * E) + 1, sizeof *dense), *w, *logits;

	fixture_call(g, moe_block_get(g->block, MOE_BLOCK_TOPK_IDS, &a));
	w = get(g, MOE_BLOCK_TOPK_WEIGHTS, false, 2, (int64_t[]){ T, k });
	for (int64_t s = 0; s < T * k; s++)
		if (ids[s] >= 0)
			dense[s / k * E + ids[s]] += w[s];
	fixture_compare(g, "dense_weights", dense, T * E, fixture_tolerance()->routing);
	/* the file's slots are in any order: `dense_weights` compares them */
	fixture_find(g, "topk_ids");
	fixture_find(g, "topk_weights");
	if (!g->experts_only) {
		logits = get(g, MOE_BLOCK_ROUTER_LOGITS, false, 2, (int64_t[]){ T, E });
		fixture_compare(g, "router_logits", logits, T * E, fixture_tolerance()->routing);
		free(logits);
	}
	free(ids), free(dense), free(w);
}

/* Gradients of the routing weights, slots matched by expert id where the router is ours. */
static void check_weight_grads(struct fixture *g, double *got)
{
	int64_t n = 0, T = g->T, k = g->k;
	double *ref_ids = fixture_doubles(g, "topk_ids", &n),
	       *matched = malloc((size_t)(T * k + 1) * sizeof *matched);
	int32_t *ids = calloc((size_t)(T * k) + 1, sizeof *ids);
	struct moe_array a = fixture_matrix(ids, MOE_I32, T, k);

	fixture_call(g, moe_block_get(g->block, MOE_BLOCK_TOPK_IDS, &a));
	for (int64_t s = 0; ref_ids && s < T * k; s++) {
		matched[s] = g->experts_only ? got[s] : 1e30;
		for (int64_t j = 0; !g->experts_only && j < k; j++)
			if (ids[s / k * k + j] == (int32_t)ref_ids[s])
				matched[s] = got[s / k * k + j];
	}
	/* a scale times a code is rounded to bf16: what may cancel has an error more
	 * (docs/decisions.md) */
	fixture_compare(g, "grad_topk_weights", ref_ids ? matched : got, T * k,
			(g->format ? 1.15 : 1) * fixture_tolerance()->grad_weights);
	free(ref_ids), free(matched), free(ids);
}

static void check_base_grads(struct fixture *g)
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
		const struct moe_st_tensor *t = fixture_find(g, list[i].key);
		double *d;

		if (!t || (g->experts_only && list[i].which == MOE_BLOCK_ROUTER)) /* fixture_router_path */
			continue;
		/* one token: softmax leaves the small difference of k nearly equal terms */
		bool cancels = g->T == 1 && list[i].which == MOE_BLOCK_ROUTER;

		d = get(g, list[i].which, true, t->ndim, t->shape);
		fixture_compare(g, list[i].key, d, fixture_count(t),
				(cancels ? 4 : 1) * fixture_tolerance()->grad);
		free(d);
	}
}

static void check_peft_grads(struct fixture *g)
{
	int64_t E = g->E, H = g->H, I = g->I, r = g->rank, s[3];
	double *b = malloc((size_t)(2 * I * r * E) * sizeof *b),
	       *db = malloc((size_t)(H * r * E) * sizeof *db);
	double *d[6];

	for (int i = 0; i < 6; i++) {
		lora_shape(g, i, s);
		d[i] = get(g, (enum moe_block_array)(MOE_BLOCK_GATE_LORA_A + i), true, 3, s);
	}
	fixture_peft_b(b, d[3], E, r, I, 0, true);
	fixture_peft_b(b, d[4], E, r, I, I, true);
	fixture_peft_b(db, d[5], E, r, H, 0, true);
	fixture_compare(g, "peft.gate_up_proj.grad_lora_A", d[0], E * r * H,
			fixture_tolerance()->grad);
	fixture_compare(g, "peft.down_proj.grad_lora_A", d[2], E * r * I,
			fixture_tolerance()->grad);
	fixture_compare(g, "peft.gate_up_proj.grad_lora_B", b, 2 * I * r * E,
			fixture_tolerance()->grad);
	fixture_compare(g, "peft.down_proj.grad_lora_B", db, H * r * E, fixture_tolerance()->grad);
	/* the same adapter in another layout: an input that is not needed */
	fixture_find(g, "per_expert.gate_up_proj.a"), fixture_find(g, "per_expert.gate_up_proj.b");
	fixture_find(g, "per_expert.down_proj.a"), fixture_find(g, "per_expert.down_proj.b");
	for (int i = 0; i < 6; i++)
		free(d[i]);
	free(b), free(db);
}

static void check_lora_grads(struct fixture *g)
{
	char name[64];
	int64_t s[3];

	for (int i = 0; i < 6; i++) {
		double *d;

		snprintf(name, sizeof name, "grad_%s", fixture_lora_names[i]);
		if (!fixture_find(g, name))
			continue;
		lora_shape(g, i, s);
		d = get(g, (enum moe_block_array)(MOE_BLOCK_GATE_LORA_A + i), true, 3, s);
		fixture_compare(g, name, d, moe_shape_count(3, s), fixture_tolerance()->grad);
		free(d);
	}
}

static void find_largest_grad(struct fixture *g)
{
	for (size_t i = 0; i < moe_safetensors_count(g->st); i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(g->st, i);
		bool was = i < FIXTURE_MAX_KEYS && g->used[i];
		int64_t n;
		double *d;

		if (!strstr(t->name, "grad") || !strcmp(t->name, "grad_out"))
			continue;
		d = fixture_doubles(g, t->name, &n);
		g->largest_grad = MOE_MAX(g->largest_grad, fixture_norm(d, n));
		free(d);
		if (i < FIXTURE_MAX_KEYS)
			g->used[i] = was;
	}
}

static void check_forward_backward(struct fixture *g)
{
	int64_t n = g->T * g->H;
	double *out = forward(g, true), *gx = calloc((size_t)n + 1, sizeof *gx), dot = 0, terms = 0;
	double *gw = calloc((size_t)(g->T * g->k) + 1, sizeof *gw);
	struct moe_array go, gxa = fixture_matrix(gx, MOE_F64, g->T, g->H),
			     gwa = fixture_matrix(gw, MOE_F64, g->T, g->k);
	int64_t m;
	double *god;

	fixture_compare(g, "out", out, n, fixture_tolerance()->out);
	fixture_compare(g, "out_f64", out, n, fixture_tolerance()->out);
	check_routing(g);
	if (fixture_load(g, "grad_out", &go)) {
		backward(g, &go, &gxa, &gwa);
		god = fixture_doubles(g, "grad_out", &m);
		for (int64_t i = 0; i < n; i++) {
			dot += god[i] * out[i];
			terms += god[i] * god[i] * out[i] * out[i];
		}
		/* the sum may cancel: errors are in proportion to its terms */
		fixture_compare(g, "loss_dot", &dot, 1,
				3 * fixture_tolerance()->out * MOE_MAX(1, sqrt(terms) / fabs(dot)));
		if (g->router_scale != 0)
			fixture_router_path(g, gw, gx);
		fixture_compare(g, "grad_x", gx, n, fixture_tolerance()->grad_x);
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
static void check_aux(struct fixture *g, struct moe_engine *e)
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

	if (!fixture_find(g, "aux_loss") || !fixture_call(g, moe_block_create(e, &p, &g->block)))
		return;
	g->lora = false;
	int64_t shared = g->shared_I;
	g->shared_I = 0;
	fixture_set_weights(g);
	g->shared_I = shared;
	out = forward(g, true);
	zero = calloc((size_t)n + 1, sizeof *zero);
	gx = calloc((size_t)n + 1, sizeof *gx);
	a = fixture_matrix(zero, MOE_F64, g->T, g->H);
	b = fixture_matrix(gx, MOE_F64, g->T, g->H);
	backward(g, &a, &b, NULL);
	b = fixture_array(&aux, MOE_F64, 1, (int64_t[]){ 1 });
	fixture_call(g, moe_block_get(g->block, MOE_BLOCK_AUX_LOSS, &b));
	fixture_compare(g, "aux_loss", &aux, 1, fixture_tolerance()->routing);
	d = get(g, MOE_BLOCK_GRAD_ROUTER_LOGITS, false, 2, (int64_t[]){ g->T, g->E });
	fixture_compare(g, "grad_aux_router_logits", d, g->T * g->E, fixture_exact.grad);
	free(d), free(zero), free(gx), free(out);
	moe_block_destroy(g->block);
	g->block = NULL;
}

/*
 * Parameters after a step. With rounded gradients the error is measured against how far the
 * parameters have come, since AdamW's first steps are of one size whatever the gradient's.
 */
static void compare_step(struct fixture *g, const char *name, const char *start, double *got,
			 int64_t n, double tol)
{
	int64_t m = 0, m0 = 0;
	double *ref = fixture_doubles(g, name, &m), *p0 = fixture_doubles(g, start, &m0);

	if (!ref) {
		free(p0);
		return;
	}
	if (fixture_tolerance() == &fixture_rounded && p0 && m == n && m0 == n)
		for (int64_t i = 0; i < n; i++) {
			got[i] -= p0[i];
			ref[i] -= p0[i];
		}
	if (m != n)
		fixture_fail(g, "%s has %lld elements, %lld computed", name, (long long)m,
			     (long long)n);
	else
		fixture_compare_values(g, name, got, ref, n, tol);
	free(ref), free(p0);
}

/*
 * Of clamped files, rounding decides on which side of the limit an element within .01 of it lies: in exact arithmetic
 * their gradients alone move the parameters of five steps by .09 to .13 of their way (a backward that does not clamp:
 * by 1.3).
 */
static double step_tolerance(const struct fixture *g, int step)
{
	const struct tolerance *t = fixture_tolerance();

	return step == 1 || (g->swiglu_limit != 0 && t == &fixture_rounded) ? t->first_step : t->step;
}

static void check_base_params(struct fixture *g, int step)
{
	static const char *const names[] = { "gate_proj", "up_proj", "down_proj", "router_weight" };

	for (int i = 0; i < 4; i++) {
		const struct moe_st_tensor *t;
		char name[64];
		double *d;

		snprintf(name, sizeof name, "step%d.%s", step, names[i]);
		t = fixture_find(g, name);
		if (!t)
			continue;
		d = get(g, (enum moe_block_array)(MOE_BLOCK_GATE_PROJ + i), false, t->ndim,
			t->shape);
		compare_step(g, name, names[i], d, fixture_count(t), step_tolerance(g, step));
		free(d);
	}
}

static void check_params(struct fixture *g, int step)
{
	char name[64];
	int64_t s[3];

	for (int i = 0; i < 6; i++) {
		double *d;

		snprintf(name, sizeof name, "step%d.%s", step, fixture_lora_names[i]);
		lora_shape(g, i, s);
		d = get(g, (enum moe_block_array)(MOE_BLOCK_GATE_LORA_A + i), false, 3, s);
		compare_step(g, name, fixture_lora_names[i], d, moe_shape_count(3, s),
			     step_tolerance(g, step));
		free(d);
	}
}

static void check_training(struct fixture *g)
{
	struct moe_adamw_params p = { .struct_size = sizeof p,
				      .learning_rate = g->lr,
				      .beta1 = g->beta1,
				      .beta2 = g->beta2,
				      .eps = g->eps,
				      .weight_decay = g->weight_decay };
	int64_t n = g->T * g->H, m;
	double losses[6] = { 0 }, *target = fixture_doubles(g, "target", &m);
	double *gx = calloc((size_t)n + 1, sizeof *gx);
	struct moe_array gxa = fixture_matrix(gx, MOE_F64, g->T, g->H);

	moe_block_zero_gradients(g->block);
	for (int step = 0; target && step < 6 && g->ok; step++) {
		double *out = forward(g, step < 5);
		struct moe_array d = fixture_matrix(out, MOE_F64, g->T, g->H);

		for (int64_t i = 0; i < n; i++) {
			out[i] -= target[i];
			losses[step] += out[i] * out[i] / (double)n;
			out[i] *= 2.0 / (double)n;
		}
		if (step < 5) {
			backward(g, &d, &gxa, NULL);
			fixture_call(g, moe_block_update(g->block, &p));
			fixture_call(g, moe_block_wait(g->block));
			(g->full_ft ? check_base_params : check_params)(g, step + 1);
		}
		free(out);
	}
	/* AdamW's first step is the gradient's sign: with one token no mean hides a flipped one */
	fixture_compare(g, "train_losses", losses, 6,
			(g->T == 1 ? 2 : 1) * fixture_tolerance()->loss);
	free(target), free(gx);
}

static void check_all_used(struct fixture *g)
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

		if (i < FIXTURE_MAX_KEYS && g->used[i])
			continue;
		for (size_t j = 0; j < MOE_COUNT(never_needed); j++)
			input |= !strcmp(name, never_needed[j]);
		/* tied experts: ids are any legal choice, so nothing that depends on LoRA is
		 * comparable */
		for (size_t j = 0; g->tie && j < MOE_COUNT(lora_dependent); j++)
			input |= starts(name, lora_dependent[j]);
		if (!input)
			fixture_fail(g, "key %s was neither compared nor is it an input", name);
	}
}

static void train(struct fixture *g, struct moe_engine *e)
{
	if (g->full_ft) {
		moe_block_destroy(g->block);
		g->block = NULL;
		if (!fixture_create_block(g, e, false, true, true))
			return;
		fixture_set_weights(g);
	}
	check_training(g);
}

static void run_all(struct fixture *g, struct moe_engine *e)
{
	if (!fixture_create_block(g, e, false, false, false))
		return;
	fixture_set_weights(g);
	check_lora_free(g);
	moe_block_destroy(g->block);
	g->block = NULL;
	if (!g->tie && g->ok && fixture_create_block(g, e, g->rank > 0, true, false)) {
		fixture_set_weights(g);
		check_forward_backward(g);
		if (g->train && fixture_find(g, "train_losses"))
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
	struct fixture g = {
		.o = o, .r = result ? result : &local, .path = path, .ok = true, .scaling = 1
	};

	memset(g.r, 0, sizeof *g.r);
	g.r->bits = 0xcbf29ce484222325ull;
	if (!fixture_call(&g, moe_safetensors_open(path, &g.st)))
		return false;
	g.peft = fixture_find(&g, "gate_up_proj") != NULL;
	if (fixture_read_config(&g)) {
		find_largest_grad(&g);
		run_all(&g, engine);
	}
	moe_block_destroy(g.block);
	moe_safetensors_close(g.st);
	if (g.ok && !g.r->compared)
		fixture_fail(&g, "nothing to compare: this is not a block fixture");
	if (!result)
		golden_free(&local);
	return g.ok && g.r->failed == 0;
}

void golden_free(struct golden_result *r)
{
	free(r->values);
	r->values = NULL;
}
