/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/fixture.h"

#include "codelets/format.h"
#include "engine/base.h"
#include "model/json.h"

#include <stdio.h>
#include <stdlib.h>

static void set_from_file(struct fixture *g, enum moe_block_array which, const char *name)
{
	struct moe_array a;

	if (!fixture_load(g, name, &a)) {
		fixture_fail(g, "input %s is missing", name);
		return;
	}
	fixture_call(g, moe_block_set(g->block, which, &a));
	free(a.data);
}

static const char *format_of(struct fixture *g)
{
	const struct moe_st_tensor *q = fixture_find(g, "gate_proj.q");

	return !q					 ? NULL
	       : q->dtype == MOE_F8_E4M3		 ? "fp8"
	       : fixture_find(g, "gate_proj.packed_i32") ? "int4"
							 : "int8";
}

bool fixture_read_config(struct fixture *g)
{
	const char *text = moe_safetensors_metadata(g->st, "config");
	cJSON *c = NULL;
	const cJSON *adamw;
	const char *kind = "";

	if (!text || !fixture_call(g, moe_json_parse(text, strlen(text), "config", &c)))
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
	moe_json_opt_real(c, "swiglu_limit", &g->swiglu_limit);
	if (!strcmp(g->kind, "deepseek_v4")) {
		g->experts_only = true;
		moe_json_opt_real(c, "routed_scaling_factor", &g->router_scale);
	}
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
	fixture_call(g, moe_json_int(c, "E", 1, 1 << 20, &g->E));
	fixture_call(g, moe_json_int(c, "k", 1, 1 << 20, &g->k));
	fixture_call(g, moe_json_int(c, "H", 1, 1 << 24, &g->H));
	fixture_call(g, moe_json_int(c, "I", 1, 1 << 24, &g->I));
	fixture_call(g, moe_json_int(c, "T", 0, 1 << 24, &g->T));
	moe_json_opt_int(c, "r", 0, 1 << 20, &g->rank);
	cJSON_Delete(c);
	if (!g->shared_I && fixture_find(g, "shared_gate_proj"))
		g->shared_I = fixture_find(g, "shared_gate_proj")->shape[0];
	g->format = format_of(g);
	if (!golden_kind_supported(g->kind))
		fixture_fail(g, "router kind \"%s\" is not in this build", g->kind);
	g->full_ft = g->train && fixture_find(g, "step1.gate_proj");
	return g->ok;
}

bool fixture_create_block(struct fixture *g, struct moe_engine *e, bool lora, bool grads,
			  bool train_base)
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
		.shared_sigmoid = g->shared_I && fixture_find(g, "shared_router_weight"),
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
		.swiglu_limit = (float)g->swiglu_limit,
	};

	g->lora = lora;
	return fixture_call(g, moe_block_create(e, &p, &g->block));
}

/* HF's fused [E, 2I, H] into gate and up. */
static void set_fused(struct fixture *g)
{
	struct moe_array a, half;
	size_t bytes = (size_t)(g->I * g->H) * 2;

	if (!fixture_load(g, "gate_up_proj", &a))
		return;
	half = fixture_array(malloc((size_t)g->E * bytes), a.dtype, 3,
			     (int64_t[]){ g->E, g->I, g->H });
	for (int w = 0; w < 2; w++) {
		for (int64_t e = 0; e < g->E; e++)
			memcpy((char *)half.data + (size_t)e * bytes,
			       (char *)a.data + (size_t)(2 * e + w) * bytes, bytes);
		fixture_call(g, moe_block_set(g->block, w ? MOE_BLOCK_UP_PROJ : MOE_BLOCK_GATE_PROJ,
					      &half));
	}
	free(half.data);
	free(a.data);
}

void fixture_peft_b(const double *file, double *kt, int64_t E, int64_t r, int64_t rows,
		    int64_t out0, bool back)
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

static void set_doubles(struct fixture *g, enum moe_block_array which, double *d, int64_t a,
			int64_t b)
{
	struct moe_array x = fixture_array(d, MOE_F64, 3, (int64_t[]){ g->E, a, b });

	fixture_call(g, moe_block_set(g->block, which, &x));
}

static void set_peft_lora(struct fixture *g)
{
	int64_t n, E = g->E, H = g->H, I = g->I, r = g->rank;
	double *a = fixture_doubles(g, "peft.gate_up_proj.lora_A", &n),
	       *da = fixture_doubles(g, "peft.down_proj.lora_A", &n);
	double *b = fixture_doubles(g, "peft.gate_up_proj.lora_B", &n),
	       *db = fixture_doubles(g, "peft.down_proj.lora_B", &n);
	double *t = malloc((size_t)(E * MOE_MAX(H, I) * r) * sizeof *t);

	if (a && b && da && db) {
		set_doubles(g, MOE_BLOCK_GATE_LORA_A, a, r, H);
		set_doubles(g, MOE_BLOCK_DOWN_LORA_A, da, r, I);
		fixture_peft_b(b, t, E, r, I, 0, false);
		set_doubles(g, MOE_BLOCK_GATE_LORA_B, t, I, r);
		fixture_peft_b(b, t, E, r, I, I, false);
		set_doubles(g, MOE_BLOCK_UP_LORA_B, t, I, r);
		fixture_peft_b(db, t, E, r, H, 0, false);
		set_doubles(g, MOE_BLOCK_DOWN_LORA_B, t, H, r);
	} else {
		fixture_fail(g, "a peft.*.lora_* input is missing");
	}
	free(a), free(b), free(da), free(db), free(t);
}

/* What the first expert's codes stand for, against the file: exact. */
static void check_dequantised(struct fixture *g, const char *name, const struct moe_quantised *q)
{
	char key[64];
	int64_t n = 0, wrong = 0;
	double *want;
	float *row = malloc((size_t)q->k * sizeof *row);

	snprintf(key, sizeof key, "%s.dequant_expert0", name);
	want = fixture_doubles(g, key, &n);
	if (!want || n != q->n * q->k)
		fixture_fail(g, "%s is missing", key);
	for (int64_t i = 0; want && n == q->n * q->k && i < q->n; i++) {
		moe_dequantise_row(q, i, 0, q->k, row);
		for (int64_t j = 0; j < q->k; j++)
			wrong += (double)row[j] != want[i * q->k + j];
	}
	if (wrong)
		fixture_fail(g, "%s: %lld of %lld values differ", key, (long long)wrong,
			     (long long)n);
	free(want), free(row);
}

static struct moe_array without_experts(struct moe_array a)
{
	for (int i = 1; i < a.ndim; i++)
		a.shape[i - 1] = a.shape[i];
	a.ndim--;
	return a;
}

static void set_quantised(struct fixture *g, enum moe_block_array which, const char *name)
{
	const struct moe_format *f = moe_format_find(g->format);
	bool down = which == MOE_BLOCK_DOWN_PROJ;
	struct moe_quantised_arrays a = { .struct_size = sizeof a };
	struct moe_quantised q = { .coding = { .format = f } };
	struct moe_stored s = { .codes_name = "codes", .scale_name = "scale", .zero_name = "zero" };
	char key[64];

	snprintf(key, sizeof key, "%s.q", name);
	fixture_find(g, key); /* int4: the same as packed_i32 */
	if (!strcmp(g->format, "int4"))
		snprintf(key, sizeof key, "%s.packed_i32", name);
	if (!fixture_load(g, key, &a.codes))
		fixture_fail(g, "%s is missing", key);
	snprintf(key, sizeof key, "%s.%s", name, strcmp(g->format, "fp8") ? "scale" : "scale_inv");
	if (!fixture_load(g, key, &a.scale))
		fixture_fail(g, "%s is missing", key);
	fixture_find(g, name); /* before quantising */
	fixture_call(g, moe_block_set_quantised(g->block, which, &a));
	q.n = s.n = down ? g->H : g->I;
	q.k = s.k = down ? g->I : g->H;
	q.codes = s.codes = without_experts(a.codes);
	q.scale = s.scale = without_experts(a.scale);
	if (fixture_call(g, f->layout[0].open(&s, &q)))
		check_dequantised(g, name, &q);
	free(a.codes.data), free(a.scale.data);
}

void fixture_set_weights(struct fixture *g)
{
	if (g->format) {
		set_quantised(g, MOE_BLOCK_GATE_PROJ, "gate_proj");
		set_quantised(g, MOE_BLOCK_UP_PROJ, "up_proj");
		set_quantised(g, MOE_BLOCK_DOWN_PROJ, "down_proj");
		fixture_find(g, "out_nolora_unquantised"); /* how much quantising lost */
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
		if (fixture_find(g, "shared_router_weight"))
			set_from_file(g, MOE_BLOCK_SHARED_ROUTER, "shared_router_weight");
	}
	if (g->lora && g->peft)
		set_peft_lora(g);
	for (int i = 0; g->lora && !g->peft && i < 6; i++)
		set_from_file(g, (enum moe_block_array)(MOE_BLOCK_GATE_LORA_A + i),
			      fixture_lora_names[i]);
}
