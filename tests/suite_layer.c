/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The experts of one layer as a C object: what its calls give, in every mode and policy, and the states and errors
 * of docs/spec-coverage.md. Gradient windows: suite_layer_windows; several calls at once and the peer's faults:
 * suite_layer_flight.
 */
#include "tests/layer_check.h"

#include "model/readers/safetensors_writer.h"

#include <math.h>

const char moe_suite_name[] = "layer";

/* ---- results ---- */

static void check_case(struct moe_engine *e, struct block_case c, enum moe_activations activations,
		       bool async)
{
	struct block_reference r = { 0 };
	struct moe_experts_params p;
	struct moe_expert_layer *l;
	struct block_data d;
	struct layer_call a;

	block_data_make(&d, &c);
	p = layer_params(&c);
	p.activations = activations;
	l = layer_make(e, &d, &p);
	a = layer_call(&d, c.T);
	for (int i = 0; i < 2; i++) { /* the second adds */
		if (async) {
			CHECK_OK(moe_experts_forward_async(l, &a.x, &a.ids, &a.weights, 1, &a.out));
			CHECK_OK(moe_experts_backward_async(l, &a.grad_out, .5, &a.grad_x,
							    &a.grad_weights));
			CHECK_OK(moe_experts_wait(l));
		} else {
			CHECK_OK(layer_forward(l, &d, true));
			CHECK_OK(layer_backward(l, &d, .5));
		}
		block_reference(&r, &d, d.ids);
	}
	layer_compare(l, &d, &r, .5);
	block_reference_free(&r);
	moe_experts_destroy(l);
	block_data_free(&d);
}

static void results_for(int parts)
{
	struct moe_engine *e = layer_engine(2, parts);
	static const char *const modes[] = { "direct", "shared:2", "resident" };

	for (int i = 0; i < (table()->weight_transpose ? 3 : 1); i++)
		for (int base = 0; base < 2; base++)
			for (int k = 0; k < 2; k++) {
				struct block_case c = layer_small();

				c.backward = modes[i];
				c.base_grads = base;
				c.slices_i = c.slices_h = 1 + k;
				c.group_size = 4 - 2 * k;
				check_case(e, c, k ? MOE_ACTIVATIONS_RECOMPUTE : MOE_ACTIVATIONS_RETAIN,
					   base == k);
				c.r = base && k ? 0 : c.r; /* full without LoRA */
				check_case(e, c, k ? MOE_ACTIVATIONS_RETAIN : MOE_ACTIVATIONS_RECOMPUTE,
					   base != k);
			}
	CHECK_OK(moe_engine_close(e));
}

static void results_one(void)
{
	results_for(1);
	results_for(3);
}

static void results(void)
{
	each_table(results_one);
}

/* F2, F3: sizes that are no multiples of anything, more parts than workers; F14: many slots. */
static void odd_shapes_one(void)
{
	static const struct block_case cases[] = {
		{ .E = 3, .k = 2, .H = 240, .I = 80, .T = 9, .r = 3, .seed = 1 },
		{ .E = 2, .k = 1, .H = 1000, .I = 200, .T = 5, .r = 17, .seed = 2 },
		{ .E = 1, .k = 1, .H = 33, .I = 7, .T = 70, .r = 1, .seed = 3 },
		{ .E = 16, .k = 8, .H = 96, .I = 64, .T = 65, .r = 4, .seed = 4 },
		{ .E = 4, .k = 2, .H = 40, .I = 300, .T = 0, .r = 4, .seed = 6 },
		{ .E = 2, .k = 2, .H = 72, .I = 90, .T = 11, .r = 33, .seed = 7 },
		{ .E = 2, .k = 1, .H = 90, .I = 72, .T = 11, .r = 64, .seed = 8 },
	};

	for (int parts = 1; parts <= 5; parts += 4) {
		struct moe_engine *e = layer_engine(2, parts);

		for (size_t i = 0; i < MOE_COUNT(cases); i++)
			if (table_takes(i, 3))
				check_case(e, cases[i], MOE_ACTIVATIONS_RETAIN, false);
		CHECK_OK(moe_engine_close(e));
	}
}

static void odd_shapes(void)
{
	each_table(odd_shapes_one);
}

/* ---- forms of the arrays ---- */

/* bf16 and f64, ids of 64 bits, strides: the same as f32 with the same values. */
static void forms(void)
{
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = layer_small();
	struct block_data d;
	struct moe_expert_layer *l;
	struct layer_call a;
	uint16_t *x16;
	int64_t *ids;
	float *out, *wide;

	block_data_make(&d, &c);
	block_data_round(&d); /* x fits bf16 */
	l = layer_make(e, &d, NULL);
	CHECK_OK(layer_forward(l, &d, false));
	a = layer_call(&d, c.T);
	x16 = malloc(sizeof *x16 * (size_t)(c.T * c.H));
	ids = malloc(sizeof *ids * (size_t)(c.T * c.k));
	out = calloc((size_t)(c.T * c.H), sizeof *out);
	wide = calloc((size_t)(c.T * c.H * 2), sizeof *wide);
	moe_from_f32(x16, MOE_BF16, d.x, (size_t)(c.T * c.H));
	for (int i = 0; i < c.T * c.k; i++)
		ids[i] = d.ids[i];
	a.x = matrix_of(x16, MOE_BF16, c.T, c.H);
	a.ids = matrix_of(ids, MOE_I64, c.T, c.k);
	a.out = matrix_of(out, MOE_F32, c.T, c.H);
	CHECK_OK(moe_experts_forward(l, &a.x, &a.ids, &a.weights, 0, &a.out));
	CHECK(!memcmp(out, d.out, sizeof *out * (size_t)(c.T * c.H)));
	a.out = matrix_of(wide, MOE_F32, c.T, c.H);
	a.out.strides[0] = 2 * c.H;
	a.out.strides[1] = 2;
	CHECK_OK(moe_experts_forward(l, &a.x, &a.ids, &a.weights, 0, &a.out));
	for (int i = 0; i < c.T * c.H; i++)
		CHECK(wide[i / c.H * 2 * c.H + i % c.H * 2] == d.out[i]);
	a.out = matrix_of(x16, MOE_BF16, c.T, c.H); /* in place of x, one rounding */
	CHECK_OK(moe_experts_forward(l, &a.x, &a.ids, &a.weights, 0, &a.out));
	for (int i = 0; i < c.T * c.H; i++)
		CHECK(x16[i] == moe_f32_to_bf16(d.out[i]));
	moe_experts_destroy(l);
	free(x16), free(ids), free(out), free(wide);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* ---- errors ---- */

static void create_errors(void)
{
	static const struct {
		struct moe_experts_params p;
		enum moe_status st;
		const char *text;
	} bad[] = {
		{ { .hidden = 8, .intermediate = 8, .experts = 0, .experts_per_token = 1 }, MOE_ERR_ARG, "0 experts" },
		{ { .hidden = -8, .intermediate = 8, .experts = 2, .experts_per_token = 1 }, MOE_ERR_ARG, "-8" },
		{ { .hidden = 8, .intermediate = 8, .experts = 2 }, MOE_ERR_ARG, "experts_per_token" },
		{ { .hidden = 8, .intermediate = 8, .experts = 2, .experts_per_token = 1, .lora_rank = 2 },
		  MOE_ERR_ARG, "lora_alpha" },
		{ { .hidden = 8, .intermediate = 8, .experts = 2, .experts_per_token = 1, .lora_rank = 2,
		    .lora_alpha = -1 }, MOE_ERR_ARG, "lora_alpha" },
		{ { .hidden = 8, .intermediate = 8, .experts = 2, .experts_per_token = 1, .swiglu_limit = NAN },
		  MOE_ERR_ARG, "swiglu_limit" },
		{ { .hidden = 8, .intermediate = 8, .experts = 2, .experts_per_token = 1, .swiglu_alpha = -1 },
		  MOE_ERR_ARG, "swiglu_alpha is -1" },
		{ { .hidden = 8, .intermediate = 8, .experts = 2, .experts_per_token = 1, .lora_dropout = 1 },
		  MOE_ERR_ARG, "lora_dropout" },
		{ { .hidden = 8, .intermediate = 8, .experts = 2, .experts_per_token = 1, .lora_dropout = -.1f },
		  MOE_ERR_ARG, "lora_dropout" },
		{ { .hidden = 8, .intermediate = 8, .experts = 2, .experts_per_token = 1, .lora_rank = -3 },
		  MOE_ERR_ARG, "-3" },
		{ { .hidden = 8, .intermediate = 8, .experts = 2, .experts_per_token = 1, .max_cache_depth = -1 },
		  MOE_ERR_ARG, "max_cache_depth" },
		{ { .hidden = 8, .intermediate = 8, .experts = 2, .experts_per_token = 1, .activations = 7 },
		  MOE_ERR_ARG, "activations" },
		{ { .hidden = 8, .intermediate = 8, .experts = 2, .experts_per_token = 1,
		    .weight_dtype = MOE_I8 }, MOE_ERR_ARG, "weight_dtype" },
		{ { .hidden = 1 << 30, .intermediate = 1 << 30, .experts = 2, .experts_per_token = 1 },
		  MOE_ERR_NOFIT, "too large" },
		{ { .hidden = 8, .intermediate = 8, .experts = 2, .experts_per_token = 1,
		    .backward_weights = "often" }, MOE_ERR_CONFIG, "often" },
	};
	struct moe_engine *e = layer_engine(1, 1);
	struct moe_experts_params none = { 0 };
	struct moe_expert_layer *l;

	for (size_t i = 0; i < MOE_COUNT(bad); i++) {
		struct moe_experts_params p = bad[i].p;

		p.struct_size = sizeof p;
		CHECK_ERROR(moe_experts_create(e, &p, &l), bad[i].st, bad[i].text);
		CHECK(l == NULL);
	}
	CHECK_ERROR(moe_experts_create(e, &none, &l), MOE_ERR_ARG, "struct_size");
	CHECK_ERROR(moe_experts_create(e, NULL, &l), MOE_ERR_ARG, "struct_size");
	CHECK_ERROR(moe_experts_create(NULL, &none, &l), MOE_ERR_ARG, "engine");
	CHECK_ERROR(moe_experts_forward(NULL, NULL, NULL, NULL, 0, NULL), MOE_ERR_ARG, "NULL");
	moe_experts_destroy(NULL);
	CHECK_OK(moe_engine_close(e));
}

/* Order of calls, shapes, limits (F1), depth (F8). */
static void call_errors(void)
{
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = layer_small();
	struct moe_experts_params p = layer_params(&c);
	struct moe_adamw_params adamw = adamw_default();
	struct moe_experts_info info = { .struct_size = sizeof info };
	struct moe_expert_layer *l;
	struct block_data d;
	struct layer_call a, b;

	block_data_make(&d, &c);
	p.max_tokens = c.T;
	p.max_cache_depth = 2;
	CHECK_OK(moe_experts_create(e, &p, &l));
	CHECK_ERROR(layer_forward(l, &d, true), MOE_ERR_STATE, "moe_experts_load");
	CHECK_OK(layer_load(l, &d, NULL, 0));
	CHECK_ERROR(layer_forward(l, &d, true), MOE_ERR_STATE, "moe_experts_init_lora");
	layer_set_lora(l, &d);
	CHECK_ERROR(layer_backward(l, &d, 1), MOE_ERR_STATE, "no forward is kept");
	CHECK_ERROR(moe_experts_update(l, &adamw), MOE_ERR_STATE, "backward");
	CHECK_ERROR(moe_experts_drop(l), MOE_ERR_STATE, "no forward");
	CHECK_ERROR(moe_experts_update_lora(l), MOE_ERR_STATE, "moe_experts_bind_lora");
	CHECK_OK(moe_experts_update_base(l)); /* frozen: nothing to do */

	a = b = layer_call(&d, c.T);
	a.x.shape[0] = a.out.shape[0] = c.T + 1;
	CHECK_ERROR(moe_experts_forward(l, &a.x, &a.ids, &a.weights, 1, &a.out), MOE_ERR_ARG,
		    "max_tokens is 21");
	CHECK(strstr(moe_last_error(), "22 tokens") != NULL);
	a = b;
	a.ids.shape[1] = 3;
	CHECK_ERROR(moe_experts_forward(l, &a.x, &a.ids, &a.weights, 1, &a.out), MOE_ERR_ARG, "ids");
	a = b;
	a.weights.shape[0] = 3;
	CHECK_ERROR(moe_experts_forward(l, &a.x, &a.ids, &a.weights, 1, &a.out), MOE_ERR_ARG, "weights");
	a = b;
	a.ids.dtype = MOE_F32;
	CHECK_ERROR(moe_experts_forward(l, &a.x, &a.ids, &a.weights, 1, &a.out), MOE_ERR_ARG, "I32 or I64");
	d.ids[3] += 6 * 7;
	CHECK_ERROR(layer_forward(l, &d, true), MOE_ERR_ARG, "there are 6 experts");
	d.ids[3] -= 6 * 7;

	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_forward(l, &d, false));
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_ERROR(layer_forward(l, &d, true), MOE_ERR_STATE, "max_cache_depth is 2");
	CHECK_OK(moe_experts_get_info(l, &info));
	CHECK(info.kept == 2 && info.loaded && info.lora_ready && !info.pending && info.scale == 1.5f);
	CHECK_ERROR(moe_experts_release_memory(l), MOE_ERR_STATE, "2 forwards are kept");
	a = b;
	a.grad_out.shape[0] = 5;
	CHECK_ERROR(moe_experts_backward(l, &a.grad_out, 1, &a.grad_x, NULL), MOE_ERR_ARG,
		    "grad_out has 5 rows, its forward had 21");
	CHECK_ERROR(layer_backward(l, &d, 0), MOE_ERR_ARG, "scale");
	CHECK_ERROR(layer_backward(l, &d, NAN), MOE_ERR_ARG, "scale");
	CHECK_ERROR(layer_backward(l, &d, INFINITY), MOE_ERR_ARG, "scale");
	CHECK_OK(layer_backward(l, &d, 1)); /* refused arguments have used nothing up */
	CHECK_OK(moe_experts_drop(l));
	CHECK_OK(moe_experts_release_memory(l));
	CHECK_OK(moe_experts_get_info(l, &info));
	CHECK(info.kept == 0 && info.capacity == 0);
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, 1));
	moe_experts_destroy(l);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* Two forwards of different inputs, backwards in reverse: each with its own (F8). */
static void depth(void)
{
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = layer_small();
	struct block_reference r = { 0 };
	struct moe_experts_params p = layer_params(&c);
	struct moe_expert_layer *l;
	struct block_data d[2];

	p.max_cache_depth = 2;
	for (int i = 0; i < 2; i++) {
		struct block_case own = c;

		own.T = i ? 70 : c.T; /* the second makes the buffers grow */
		block_data_make(&d[i], &own);
	}
	for (int64_t i = 0; i < (int64_t)c.T * c.H; i++)
		d[1].x[i] *= -.5f;
	l = layer_make(e, &d[0], &p);
	for (int i = 0; i < 2; i++)
		CHECK_OK(layer_forward(l, &d[i], true));
	for (int i = 1; i >= 0; i--)
		CHECK_OK(layer_backward(l, &d[i], 1));
	for (int i = 1; i >= 0; i--) {
		int64_t n = (int64_t)d[i].c.T * c.H;

		block_reference(&r, &d[i], d[i].ids); /* gradients add up */
		CHECK(relative_error_of_floats(d[i].out, r.out, n) <= table_tolerance_held()->out);
		CHECK(relative_error_of_floats(d[i].grad_x, r.grad_x, n) <= table_tolerance_held()->grad_x);
	}
	layer_compare(l, &d[0], &r, 1);
	block_reference_free(&r);
	moe_experts_destroy(l);
	block_data_free(&d[0]), block_data_free(&d[1]);
	CHECK_OK(moe_engine_close(e));
}

/* ---- loading ---- */

/* A map, a second load, what is refused. */
static void loading(void)
{
	static const int64_t map[7] = { 3, 0, 5, 1, 4, 2, 99 }, twice[6] = { 3, 0, 3, 1, 4, 2 },
			     outside[6] = { 3, 0, 6, 1, 4, 2 };
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = layer_small();
	struct moe_experts_params p;
	struct moe_expert_layer *l, *m;
	struct block_data d, moved;
	struct moe_array w[3];
	float *out;
	double *v;

	c.base_grads = true;
	block_data_make(&d, &c);
	block_data_make(&moved, &c);
	for (int i = 0; i < 3; i++) /* expert x computes with row map[x] */
		for (int x = 0; x < c.E; x++)
			memcpy(moved.w[i] + map[x] * (d.n[i] / c.E), d.w[i] + x * (d.n[i] / c.E),
			       sizeof(float) * (size_t)(d.n[i] / c.E));
	p = layer_params(&c);
	CHECK_OK(moe_experts_create(e, &p, &m));
	CHECK_ERROR(layer_load(m, &moved, map, 5), MOE_ERR_ARG, "5 entries; at least 6");
	CHECK_ERROR(layer_load(m, &moved, outside, 6), MOE_ERR_ARG, "map[2] is 6");
	CHECK_ERROR(layer_load(m, &moved, twice, 6), MOE_ERR_ARG, "map[2] is 3 again");
	for (int i = 0; i < 3; i++)
		w[i] = layer_array(&c, (enum moe_block_array)i, d.w[i], MOE_F32);
	w[1].shape[1]++;
	CHECK_ERROR(moe_experts_load(m, &w[0], &w[1], &w[2], NULL, 0), MOE_ERR_ARG, "up_proj has shape");
	w[1].shape[1]--;
	w[2].dtype = MOE_I8;
	CHECK_ERROR(moe_experts_load(m, &w[0], &w[1], &w[2], NULL, 0), MOE_ERR_ARG, "down_proj");
	CHECK_OK(layer_load(m, &moved, map, 7));
	CHECK_OK(layer_load(m, &d, NULL, 0)); /* loaded: nothing happens */
	layer_set_lora(m, &d);
	l = layer_make(e, &d, NULL);
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, 1));
	out = d.out;
	d.out = calloc((size_t)(c.T * c.H), sizeof(float));
	CHECK_OK(layer_forward(m, &d, true));
	CHECK_OK(layer_backward(m, &d, 1));
	CHECK(!memcmp(out, d.out, sizeof(float) * (size_t)(c.T * c.H)));
	v = layer_get(m, &c, MOE_BLOCK_UP_PROJ, false); /* rows as they were given */
	for (int64_t i = 0; i < d.n[1]; i++)
		CHECK(v[i] == moved.w[1][i]);
	free(v);
	for (int i = 0; i < 3; i++) {
		double *g = layer_get(l, &c, (enum moe_block_array)i, true);
		double *h = layer_get(m, &c, (enum moe_block_array)i, true);
		int64_t n = d.n[i] / c.E;

		for (int x = 0; x < c.E; x++)
			CHECK(!memcmp(g + x * n, h + map[x] * n, sizeof *g * (size_t)n));
		free(g), free(h);
	}
	moe_experts_destroy(l), moe_experts_destroy(m);
	free(out);
	block_data_free(&d), block_data_free(&moved);
	CHECK_OK(moe_engine_close(e));
}

static void item(struct moe_st_item *it, char (*name)[64], const char *form, int expert, int ndim,
		 int64_t a, int64_t b, int64_t k, const void *data)
{
	snprintf(*name, sizeof *name, form, expert);
	*it = (struct moe_st_item){ .name = *name, .dtype = MOE_F32, .ndim = ndim, .shape = { a, b, k },
				    .data = data };
}

static void load_and_compare(struct moe_engine *e, struct block_data *d, const char *path,
			     const char *prefix)
{
	struct moe_experts_params p = layer_params(&d->c);
	struct moe_expert_layer *l;

	p.layer = 3;
	CHECK_OK(moe_experts_create(e, &p, &l));
	if (!CHECK_OK(moe_experts_load_file(l, path, prefix, NULL, 0)))
		printf("  %s\n", moe_last_error());
	layer_set_lora(l, d);
	memset(d->grad_x, 0, sizeof(float) * (size_t)(d->c.T * d->c.H));
	struct layer_call a = layer_call(d, d->c.T);
	a.out.data = d->grad_x;
	CHECK_OK(moe_experts_forward(l, &a.x, &a.ids, &a.weights, 0, &a.out));
	CHECK(!memcmp(d->grad_x, d->out, sizeof(float) * (size_t)(d->c.T * d->c.H)));
	moe_experts_destroy(l);
}

static void files(void)
{
	static const char *const each[] = { "model.layers.3.mlp.experts.%d.gate_proj.weight",
					    "model.layers.3.mlp.experts.%d.up_proj.weight",
					    "model.layers.3.mlp.experts.%d.down_proj.weight" };
	static const char *const mixtral[] = { "m.block_sparse_moe.experts.%d.w1.weight",
					       "m.block_sparse_moe.experts.%d.w3.weight",
					       "m.block_sparse_moe.experts.%d.w2.weight" };
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = layer_small();
	struct moe_st_item items[32];
	char names[32][64], path[512];
	struct moe_expert_layer *l;
	struct block_data d;
	float *fused;
	int n = 0;
	int64_t half = (int64_t)c.I * c.H;

	block_data_make(&d, &c);
	l = layer_make(e, &d, NULL);
	CHECK_OK(layer_forward(l, &d, false));
	moe_experts_destroy(l);
	for (int form = 0; form < 2; form++, n = 0) {
		for (int x = 0; x < c.E; x++)
			for (int i = 0; i < 3; i++, n++)
				item(&items[n], &names[n], form ? mixtral[i] : each[i], x, 2, i == 2 ? c.H : c.I,
				     i == 2 ? c.I : c.H, 0, d.w[i] + x * half);
		snprintf(path, sizeof path, "%s/each.safetensors", moe_test_dir());
		CHECK_OK(moe_safetensors_write(path, items, (size_t)n, NULL, 0));
		load_and_compare(e, &d, path, form ? "m" : NULL);
	}
	fused = malloc(sizeof *fused * (size_t)(2 * c.E * half));
	for (int x = 0; x < c.E; x++)
		for (int i = 0; i < 2; i++)
			memcpy(fused + (2 * x + i) * half, d.w[i] + x * half, sizeof *fused * (size_t)half);
	item(&items[0], &names[0], "model.layers.3.mlp.experts.gate_up_proj", 0, 3, c.E, 2 * c.I, c.H, fused);
	item(&items[1], &names[1], "model.layers.3.mlp.experts.down_proj", 0, 3, c.E, c.H, c.I, d.w[2]);
	CHECK_OK(moe_safetensors_write(path, items, 2, NULL, 0));
	load_and_compare(e, &d, path, NULL);

	struct moe_experts_params p = layer_params(&c);
	CHECK_OK(moe_experts_create(e, &p, &l)); /* layer 0 */
	CHECK_ERROR(moe_experts_load_file(l, path, NULL, NULL, 0), MOE_ERR_FORMAT,
		    "model.layers.0.mlp.experts.0.gate_proj.weight");
	CHECK_ERROR(moe_experts_load_file(l, "/nowhere", NULL, NULL, 0), MOE_ERR_IO, "/nowhere");
	CHECK_ERROR(moe_experts_load_file(l, NULL, NULL, NULL, 0), MOE_ERR_ARG, "path");
	item(&items[0], &names[0], "model.layers.0.mlp.experts.gate_up_proj", 0, 3, c.E, 2 * c.I - 1, c.H,
	     fused);
	CHECK_OK(moe_safetensors_write(path, items, 1, NULL, 0));
	CHECK_ERROR(moe_experts_load_file(l, path, NULL, NULL, 0), MOE_ERR_FORMAT, "gate_up_proj");
	CHECK_ERROR(layer_forward(l, &d, false), MOE_ERR_STATE, "no weights");
	CHECK_OK(layer_load(l, &d, NULL, 0)); /* after failures, from memory */
	moe_experts_destroy(l);
	free(fused);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* ---- checkpoint cache ---- */

static void checkpoint(void)
{
	struct moe_engine *e = layer_engine(1, 1);
	struct block_case c = layer_small();
	struct moe_experts_params p = layer_params(&c);
	float in[6 * 80], back[6 * 80];
	struct moe_array a = matrix_of(in, MOE_F32, 6, 80), b = matrix_of(back, MOE_F32, 6, 80);
	struct moe_expert_layer *l;

	for (int i = 0; i < 6 * 80; i++)
		in[i] = (float)i / 7;
	CHECK_OK(moe_experts_create(e, &p, &l));
	CHECK(moe_experts_checkpoint_state(l) == MOE_CHECKPOINT_EMPTY);
	CHECK_OK(moe_experts_checkpoint_begin(l));
	CHECK_ERROR(moe_experts_checkpoint_get(l, &b), MOE_ERR_STATE, "no checkpoint");
	CHECK_OK(moe_experts_checkpoint_put(l, &a));
	CHECK(moe_experts_checkpoint_state(l) == MOE_CHECKPOINT_READY);
	memset(in, 0, 80);
	CHECK_OK(moe_experts_checkpoint_get(l, &b));
	CHECK_OK(moe_experts_checkpoint_get(l, &b)); /* it stays */
	CHECK(back[0] == 0 && back[479] == 479 / 7.f && back[5] == 5 / 7.f);
	moe_experts_checkpoint_clear(l);
	CHECK(moe_experts_checkpoint_state(l) == MOE_CHECKPOINT_EMPTY);
	CHECK_OK(moe_experts_checkpoint_put(l, &a));
	b.shape[0] = 5;
	CHECK_ERROR(moe_experts_checkpoint_get(l, &b), MOE_ERR_ARG, "6 rows, 5");
	CHECK(moe_experts_checkpoint_state(l) == MOE_CHECKPOINT_POISONED);
	moe_experts_checkpoint_clear(l);
	CHECK(moe_experts_checkpoint_state(l) == MOE_CHECKPOINT_POISONED);
	b.shape[0] = 6;
	CHECK_ERROR(moe_experts_checkpoint_get(l, &b), MOE_ERR_STATE, "6 rows, 5"); /* why */
	CHECK_ERROR(moe_experts_checkpoint_put(l, &a), MOE_ERR_STATE, "poisoned");
	CHECK_ERROR(moe_experts_checkpoint_begin(l), MOE_ERR_STATE, "poisoned");
	moe_experts_destroy(l);
	CHECK_OK(moe_experts_create(e, &p, &l));
	CHECK_OK(moe_experts_checkpoint_put(l, &a));
	CHECK_ERROR(moe_experts_checkpoint_begin(l), MOE_ERR_STATE, "cached still");
	CHECK(moe_experts_checkpoint_state(l) == MOE_CHECKPOINT_POISONED);
	moe_experts_destroy(l);
	CHECK_OK(moe_experts_create(e, &p, &l));
	CHECK_OK(moe_experts_checkpoint_put(l, &a));
	CHECK_ERROR(moe_experts_checkpoint_put(l, &a), MOE_ERR_STATE, "cached still");
	CHECK(moe_experts_checkpoint_state(l) == MOE_CHECKPOINT_POISONED);
	moe_experts_destroy(l);
	CHECK_OK(moe_experts_create(e, &p, &l));
	CHECK_OK(moe_experts_checkpoint_put(l, &a));
	b.shape[1] = 79;
	CHECK_ERROR(moe_experts_checkpoint_get(l, &b), MOE_ERR_ARG, "out");
	CHECK(moe_experts_checkpoint_state(l) == MOE_CHECKPOINT_POISONED);
	moe_experts_destroy(l);
	CHECK_OK(moe_experts_create(e, &p, &l));
	a.shape[1] = 79;
	CHECK_ERROR(moe_experts_checkpoint_put(l, &a), MOE_ERR_ARG, "out");
	CHECK(moe_experts_checkpoint_state(l) == MOE_CHECKPOINT_POISONED);
	moe_experts_destroy(l);
	CHECK_OK(moe_experts_create(e, &p, &l));
	CHECK_OK(moe_experts_checkpoint_poison(l, "the recomputation failed"));
	CHECK_ERROR(moe_experts_checkpoint_begin(l), MOE_ERR_STATE, "the recomputation failed");
	moe_experts_destroy(l);
	CHECK_OK(moe_engine_close(e));
}

const struct moe_test moe_suite_tests[] = {
	{ "results in every mode and policy", results },
	{ "odd shapes, many parts", odd_shapes },
	{ "forms of the arrays", forms },
	{ "errors of creation", create_errors },
	{ "errors of calls", call_errors },
	{ "forwards kept", depth },
	{ "loading, maps", loading },
	{ "loading from files", files },
	{ "checkpoint cache", checkpoint },
	{ NULL, NULL },
};
