/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The experts of one layer as a C object: what its calls give, in every mode and policy, and the states, errors
 * and faults of docs/spec-coverage.md.
 */
#include "tests/layer_check.h"
#include "tests/trace_good.h"

#include "model/readers/safetensors_writer.h"

#include <limits.h>
#include <math.h>
#include <pthread.h>

const char moe_suite_name[] = "layer";

static struct block_case small(void)
{
	return (struct block_case){ .E = 6, .k = 2, .H = 80, .I = 100, .T = 21, .r = 5, .routing = 2, .seed = 5 };
}

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
				struct block_case c = small();

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
	struct block_case c = small();
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
	struct block_case c = small();
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
	struct block_case c = small();
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
		CHECK(layer_error(d[i].out, r.out, n) <= table_tolerance()->out);
		CHECK(layer_error(d[i].grad_x, r.grad_x, n) <= table_tolerance()->grad_x);
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
	struct block_case c = small();
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
	struct block_case c = small();
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

/* ---- gradient windows ---- */

struct caller {
	struct moe_gradient g[6];
	void *param[6], *buffer[6];
	int n;
};

static void caller_make(struct caller *u, const struct block_data *d, bool base, enum moe_dtype dtype)
{
	memset(u, 0, sizeof *u);
	u->n = base ? 3 : 6;
	for (int i = 0; i < u->n; i++) {
		enum moe_block_array which = base ? (enum moe_block_array)i : layer_lora[i];
		size_t n = (size_t)d->n[which];

		u->param[i] = malloc(n * 4 + 1);
		u->buffer[i] = malloc(n * 4 + 1);
		memset(u->buffer[i], 0x7f, n * 4);
		moe_from_f32(u->param[i], dtype, d->w[which], n);
		u->g[i] = (struct moe_gradient){ .param = layer_array(&d->c, which, u->param[i], dtype),
						 .buffer = layer_array(&d->c, which, u->buffer[i], dtype) };
	}
}

static void caller_free(struct caller *u)
{
	for (int i = 0; i < u->n; i++)
		free(u->param[i]), free(u->buffer[i]);
}

static enum moe_window window_of(struct moe_expert_layer *l)
{
	enum moe_window w = 99;

	if (!CHECK_OK(moe_experts_get_window(l, &w)))
		printf("  %s\n", moe_last_error());
	return w;
}

/* What the buffers hold is the inner sums, rounded once. */
static void check_published(struct moe_expert_layer *l, const struct block_data *d, const struct caller *u,
			    bool base, enum moe_dtype dtype)
{
	for (int i = 0; i < u->n; i++) {
		enum moe_block_array which = base ? (enum moe_block_array)i : layer_lora[i];
		double *g = layer_get(l, &d->c, which, true);
		bool same = true;

		CHECK(u->g[i].grad == u->buffer[i]);
		for (int64_t j = 0; j < d->n[which]; j++)
			same &= dtype == MOE_F32 ? ((float *)u->buffer[i])[j] == (float)g[j]
						 : ((uint16_t *)u->buffer[i])[j] == moe_f32_to_bf16((float)g[j]);
		CHECK(same);
		free(g);
	}
}

static struct moe_expert_layer *bound_layer(struct moe_engine *e, struct block_data *d, struct caller *lora,
					    struct caller *base)
{
	struct moe_experts_params p = layer_params(&d->c);
	struct moe_expert_layer *l = NULL;

	p.max_cache_depth = 2;
	CHECK_OK(moe_experts_create(e, &p, &l));
	CHECK_OK(layer_load(l, d, NULL, 0));
	if (!CHECK_OK(moe_experts_bind_lora(l, lora->g)))
		printf("  %s\n", moe_last_error());
	if (base && !CHECK_OK(moe_experts_bind_base(l, base->g)))
		printf("  %s\n", moe_last_error());
	return l;
}

/* The document's states, with a caller's optimizer: closed, open, adding, closed by either side; F12. */
static void windows_for(enum moe_dtype dtype)
{
	struct moe_engine *e = layer_engine(2, 3);
	struct block_case c = small();
	struct block_reference r = { 0 };
	struct moe_expert_layer *l;
	struct caller lora, base;
	struct block_data d;

	c.base_grads = true;
	block_data_make(&d, &c);
	block_data_round(&d);
	caller_make(&lora, &d, false, dtype);
	caller_make(&base, &d, true, dtype);
	l = bound_layer(e, &d, &lora, &base);
	CHECK(window_of(l) == MOE_WINDOW_CLOSED);
	for (int i = 0; i < 3; i++) {
		CHECK_OK(layer_forward(l, &d, true));
		CHECK_OK(layer_backward(l, &d, 1));
		CHECK(window_of(l) == MOE_WINDOW_OPEN);
		block_reference(&r, &d, d.ids);
		if (dtype == MOE_F32) /* LoRA of bf16 params is rounded */
			layer_compare(l, &d, &r, 1);
		check_published(l, &d, &lora, false, dtype);
		check_published(l, &d, &base, true, dtype);
	}
	for (int i = 0; i < 6; i++) /* as zero_grad(set_to_none) does */
		lora.g[i].grad = NULL;
	for (int i = 0; i < 3; i++)
		base.g[i].grad = NULL;
	CHECK(window_of(l) == MOE_WINDOW_CLOSED);
	block_reference_free(&r);
	memset(&r, 0, sizeof r);
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, .25)); /* overwrites */
	block_reference(&r, &d, d.ids);
	if (dtype == MOE_F32)
		layer_compare(l, &d, &r, .25);
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, 3)); /* adds, at another scale: .25 + 3 times the same */
	if (dtype == MOE_F32) {
		for (int i = 0; i < BLOCK_WEIGHTS; i++)
			for (int64_t j = 0; r.grad[i] && j < d.n[i]; j++)
				r.grad[i][j] *= 3.25;
		layer_compare(l, &d, &r, 1);
	}
	check_published(l, &d, &base, true, dtype);
	CHECK_OK(moe_experts_release_gradients(l));
	CHECK(window_of(l) == MOE_WINDOW_CLOSED && !lora.g[0].grad && !base.g[2].grad);
	block_reference_free(&r);
	moe_experts_destroy(l);
	caller_free(&lora), caller_free(&base);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

static void windows_each(void)
{
	windows_for(MOE_F32);
	windows_for(MOE_BF16);
}

static void windows(void)
{
	each_table(windows_each);
}

/* Everything that is refused, and what it leaves behind. */
static void window_errors(void)
{
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = small();
	struct moe_experts_params p;
	struct moe_adamw_params adamw = adamw_default();
	struct moe_expert_layer *l, *other;
	struct caller lora, base;
	struct block_data d;
	struct layer_call a;
	enum moe_window w;
	void *was;

	c.base_grads = true;
	block_data_make(&d, &c);
	caller_make(&lora, &d, false, MOE_F32);
	caller_make(&base, &d, true, MOE_BF16);
	p = layer_params(&c);
	p.max_cache_depth = 2;
	CHECK_OK(moe_experts_create(e, &p, &l));
	CHECK_ERROR(moe_experts_bind_base(l, base.g), MOE_ERR_STATE, "load the weights");
	CHECK_OK(layer_load(l, &d, NULL, 0));
	CHECK_ERROR(moe_experts_update_base(l), MOE_ERR_STATE, "moe_experts_bind_base");
	lora.g[2].param.shape[1]++;
	CHECK_ERROR(moe_experts_bind_lora(l, lora.g), MOE_ERR_ARG, "down_lora_a has shape");
	lora.g[2].param.shape[1]--;
	lora.g[3].param.dtype = MOE_F16;
	CHECK_ERROR(moe_experts_bind_lora(l, lora.g), MOE_ERR_ARG, "F32 or BF16");
	lora.g[3].param.dtype = MOE_F32;
	lora.g[4].buffer.dtype = MOE_BF16;
	CHECK_ERROR(moe_experts_bind_lora(l, lora.g), MOE_ERR_ARG, "must be alike");
	lora.g[4].buffer.dtype = MOE_F32;
	lora.g[5].param.strides[2] = 2;
	CHECK_ERROR(moe_experts_bind_lora(l, lora.g), MOE_ERR_ARG, "contiguous");
	lora.g[5].param.strides[2] = 0;
	was = lora.g[1].buffer.data;
	lora.g[1].buffer.data = NULL;
	CHECK_ERROR(moe_experts_bind_lora(l, lora.g), MOE_ERR_ARG, "all parameters have gradient buffers or none");
	lora.g[1].buffer.data = lora.g[0].buffer.data;
	CHECK_ERROR(moe_experts_bind_lora(l, lora.g), MOE_ERR_ARG, "bound already");
	lora.g[1].buffer.data = was;
	CHECK_OK(moe_experts_bind_lora(l, lora.g));
	CHECK_ERROR(moe_experts_bind_lora(l, lora.g), MOE_ERR_STATE, "bound already");
	CHECK_OK(moe_experts_bind_base(l, base.g));

	/* mixed, replaced, resized */
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, 1));
	lora.g[2].grad = NULL;
	CHECK_ERROR(moe_experts_get_window(l, &w), MOE_ERR_STATE, "mixed");
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_ERROR(layer_backward(l, &d, 1), MOE_ERR_STATE, "mixed");
	CHECK_OK(moe_experts_release_gradients(l));
	lora.g[2].grad = &w;
	CHECK_ERROR(layer_backward(l, &d, 1), MOE_ERR_STATE, "down_lora_a: grad was replaced");
	for (int i = 0; i < 6; i++)
		lora.g[i].grad = lora.buffer[i];
	for (int i = 0; i < 3; i++)
		base.g[i].grad = base.buffer[i];
	CHECK_ERROR(layer_backward(l, &d, 1), MOE_ERR_STATE, "no gradient was published");
	CHECK_OK(moe_experts_release_gradients(l));
	base.g[1].buffer.data = lora.param[0];
	CHECK_ERROR(layer_backward(l, &d, 1), MOE_ERR_STATE, "up_proj: the gradient buffer was replaced");
	base.g[1].buffer.data = base.buffer[1];
	base.g[1].buffer.shape[0]--;
	CHECK_ERROR(layer_backward(l, &d, 1), MOE_ERR_STATE, "replaced or resized");
	base.g[1].buffer.shape[0]++;
	CHECK_OK(layer_backward(l, &d, 1)); /* the forward was kept all the while */

	/* pending */
	a = layer_call(&d, c.T);
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(moe_experts_backward_async(l, &a.grad_out, 1, &a.grad_x, NULL));
	CHECK_ERROR(moe_experts_backward_async(l, &a.grad_out, 1, &a.grad_x, NULL), MOE_ERR_STATE, "pending");
	CHECK_ERROR(moe_experts_release_gradients(l), MOE_ERR_STATE, "pending");
	CHECK_ERROR(moe_experts_update(l, &adamw), MOE_ERR_STATE, "pending");
	lora.g[0].grad = NULL; /* changed during the backward: not published, closed */
	CHECK_ERROR(moe_experts_wait(l), MOE_ERR_STATE, "not published");
	CHECK(window_of(l) == MOE_WINDOW_CLOSED && !base.g[0].grad);
	CHECK_OK(moe_experts_wait(l));
	CHECK_ERROR(moe_experts_update(l, &adamw), MOE_ERR_STATE, "backward");
	CHECK_OK(layer_backward(l, &d, 1)); /* the other forward */
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(moe_experts_backward_async(l, &a.grad_out, 1, &a.grad_x, NULL));
	for (int i = 0; i < 6; i++)
		lora.g[i].grad = NULL;
	for (int i = 0; i < 3; i++)
		base.g[i].grad = NULL;
	CHECK_ERROR(moe_experts_wait(l), MOE_ERR_STATE, "closed during the backward");

	/* frozen: no window */
	c.r = 0;
	c.base_grads = false;
	p = layer_params(&c);
	CHECK_OK(moe_experts_create(e, &p, &other));
	CHECK_OK(layer_load(other, &d, NULL, 0));
	CHECK(window_of(other) == MOE_WINDOW_EMPTY);
	CHECK_OK(layer_forward(other, &d, true));
	CHECK_OK(layer_backward(other, &d, 1));
	CHECK(window_of(other) == MOE_WINDOW_EMPTY);
	CHECK_ERROR(moe_experts_bind_lora(other, lora.g), MOE_ERR_STATE, "lora_rank is 0");
	CHECK_ERROR(moe_experts_bind_base(other, base.g), MOE_ERR_STATE, "frozen");
	CHECK_ERROR(moe_experts_update(other, &adamw), MOE_ERR_STATE, "nothing is trained");
	CHECK_OK(moe_experts_update_lora(other));
	moe_experts_destroy(other);
	moe_experts_destroy(l);
	caller_free(&lora), caller_free(&base);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* AdamW in plain loops, as a caller's optimizer. */
static void adamw_step(struct caller *u, const struct block_data *d, bool base, float *m[6], float *v[6],
		       const struct moe_adamw_params *p, int step)
{
	for (int i = 0; i < u->n; i++) {
		enum moe_block_array which = base ? (enum moe_block_array)i : layer_lora[i];
		float *w = u->param[i], *g = u->buffer[i];

		for (int64_t j = 0; j < d->n[which]; j++) {
			double gj = g[j], mj, vj;

			m[i][j] = (float)(mj = p->beta1 * m[i][j] + (1 - p->beta1) * gj);
			v[i][j] = (float)(vj = p->beta2 * v[i][j] + (1 - p->beta2) * gj * gj);
			w[j] = (float)(w[j] * (1 - p->learning_rate * p->weight_decay) -
				       p->learning_rate * (mj / (1 - pow(p->beta1, step))) /
					       (sqrt(vj / (1 - pow(p->beta2, step))) + p->eps));
		}
	}
}

/*
 * moesaic's AdamW and a caller's see the same gradients: after three steps the same parameters, base weights
 * packed anew in every mode (F5: no stale copy), the map kept.
 */
static void optimizers_one(void)
{
	static const char *const modes[] = { "direct", "shared:1", "resident" };
	static const int64_t map[6] = { 2, 0, 1, 5, 4, 3 };
	struct moe_adamw_params adamw = adamw_default();
	struct moe_engine *e = layer_engine(2, 2);

	for (int mode = 0; mode < (table()->weight_transpose ? 3 : 1); mode++) {
		struct block_case c = small();
		struct caller lora[2], base[2];
		struct moe_expert_layer *l[2];
		float *m[2][6] = { 0 }, *v[2][6] = { 0 };
		struct block_data d;

		c.base_grads = true;
		c.backward = modes[mode];
		block_data_make(&d, &c);
		for (int i = 0; i < 2; i++) { /* 0: moesaic's, 1: the caller's */
			struct moe_experts_params p = layer_params(&c);

			caller_make(&lora[i], &d, false, MOE_F32);
			caller_make(&base[i], &d, true, MOE_F32);
			CHECK_OK(moe_experts_create(e, &p, &l[i]));
			CHECK_OK(layer_load(l[i], &d, map, 6));
			CHECK_OK(moe_experts_bind_lora(l[i], lora[i].g));
			CHECK_OK(moe_experts_bind_base(l[i], base[i].g));
		}
		for (int i = 0; i < 6; i++) {
			m[0][i] = calloc((size_t)d.n[layer_lora[i]], 4), v[0][i] = calloc((size_t)d.n[layer_lora[i]], 4);
			m[1][i] = i < 3 ? calloc((size_t)d.n[i], 4) : NULL;
			v[1][i] = i < 3 ? calloc((size_t)d.n[i], 4) : NULL;
		}
		for (int step = 1; step <= 3; step++)
			for (int i = 0; i < 2; i++) {
				for (int micro = 0; micro < 2; micro++) {
					CHECK_OK(moe_experts_repack_async(l[i]));
					CHECK_OK(layer_forward(l[i], &d, true));
					CHECK_OK(layer_backward(l[i], &d, .5));
				}
				if (!i) {
					CHECK_OK(moe_experts_update(l[0], &adamw));
					CHECK(window_of(l[0]) == MOE_WINDOW_CLOSED);
					continue;
				}
				adamw_step(&lora[1], &d, false, m[0], v[0], &adamw, step);
				adamw_step(&base[1], &d, true, m[1], v[1], &adamw, step);
				CHECK_OK(moe_experts_update_lora_async(l[1]));
				CHECK_OK(moe_experts_update_base_async(l[1]));
				CHECK_OK(moe_experts_wait(l[1]));
				CHECK_OK(moe_experts_release_gradients(l[1]));
			}
		CHECK_OK(moe_experts_wait(l[0]));
		for (int i = 0; i < 9; i++) {
			const struct caller *u = i < 6 ? lora : base;
			int64_t n = d.n[i < 6 ? layer_lora[i] : (enum moe_block_array)(i - 6)];
			double *own = layer_get(l[0], &c, i < 6 ? layer_lora[i] : (enum moe_block_array)(i - 6),
						false);
			int at = i < 6 ? i : i - 6;

			/* bound params have what the object computes with */
			CHECK(layer_error(u[0].param[at], own, n) == 0);
			/* first steps are signs of gradients: tiny ones may flip under packed kernels */
			if (!CHECK(layer_error(u[1].param[at], own, n) <= (table_is_packed() ? 3e-3 : 3e-5)))
				printf("  %s, array %d: %.2e\n", modes[mode], i,
				       layer_error(u[1].param[at], own, n));
			free(own);
		}
		for (int i = 0; i < 2; i++) {
			moe_experts_destroy(l[i]);
			caller_free(&lora[i]), caller_free(&base[i]);
			for (int j = 0; j < 6; j++)
				free(m[i][j]), free(v[i][j]);
		}
		block_data_free(&d);
	}
	CHECK_OK(moe_engine_close(e));
}

static void optimizers(void)
{
	each_table(optimizers_one);
}

/* ---- several layers and calls in flight ---- */

enum { LAYERS = 3 };

/* A step of three layers submitted whole while the engine is held, against the same step call by call. */
static void in_flight_for(bool async, uint64_t *hash)
{
	struct moe_adamw_params adamw = adamw_default();
	struct moe_engine *e = layer_engine(2, 1);
	struct moe_expert_layer *l[LAYERS];
	struct block_data d[LAYERS];
	struct moe_trace_params trace = { .struct_size = sizeof trace };
	struct moe_trace_info traced = { .struct_size = sizeof traced };
	char file[PATH_MAX];
	uint64_t h = 1;

	snprintf(file, sizeof file, "%s/in_flight.mxt", moe_test_dir());
	trace.file = file;
	for (int i = 0; i < LAYERS; i++) {
		struct block_case c = small();
		struct moe_experts_params p;

		c.seed += i;
		c.base_grads = true;
		c.backward = table()->weight_transpose ? "shared:2" : "direct";
		block_data_make(&d[i], &c);
		p = layer_params(&d[i].c);
		p.layer = i; /* the trace tells them apart */
		l[i] = layer_make(e, &d[i], &p);
		CHECK_OK(layer_forward(l[i], &d[i], false)); /* buffers */
	}
	CHECK_OK(moe_trace_start(e, &trace)); /* of whole steps */
	for (int step = 0; step < 2; step++) {
		if (async)
			CHECK_OK(moe_engine_hold(e));
		for (int i = 0; i < LAYERS; i++) {
			struct layer_call a = layer_call(&d[i], d[i].c.T);

			if (i) /* the layer below's output */
				a.x = matrix_of(d[i - 1].out, MOE_F32, d[i].c.T, d[i].c.H);
			CHECK_OK((async ? moe_experts_forward_async : moe_experts_forward)(
				l[i], &a.x, &a.ids, &a.weights, 1, &a.out));
			if (async && i == LAYERS - 1)
				CHECK_ERROR(layer_forward(l[i], &d[i], true), MOE_ERR_STATE, "held");
			if (async && i < LAYERS - 1) { /* x is the caller's memory: data the engine cannot order */
				CHECK_OK(moe_engine_release(e));
				CHECK_OK(moe_experts_wait(l[i]));
				CHECK_OK(moe_engine_hold(e));
			}
		}
		for (int i = LAYERS - 1; i >= 0; i--) {
			struct layer_call a = layer_call(&d[i], d[i].c.T);

			CHECK_OK((async ? moe_experts_backward_async : moe_experts_backward)(
				l[i], &a.grad_out, 1, &a.grad_x, &a.grad_weights));
			if (async)
				CHECK_ERROR(moe_experts_wait(l[i]), MOE_ERR_STATE, "held");
			CHECK_OK(moe_experts_update(l[i], &adamw)); /* ordered after it by its data */
		}
		if (async)
			CHECK_OK(moe_engine_release(e));
		for (int i = 0; i < LAYERS; i++) {
			CHECK_OK(moe_experts_wait(l[i]));
			CHECK(window_of(l[i]) == MOE_WINDOW_CLOSED);
			h = hash_of(h, d[i].out, sizeof(float) * (size_t)(d[i].c.T * d[i].c.H));
			h = hash_of(h, d[i].grad_x, sizeof(float) * (size_t)(d[i].c.T * d[i].c.H));
		}
	}
	for (int i = 0; i < LAYERS; i++) {
		double *v = layer_get(l[i], &d[i].c, MOE_BLOCK_DOWN_PROJ, false);

		h = hash_of(h, v, sizeof *v * (size_t)d[i].n[MOE_BLOCK_DOWN_PROJ]);
		free(v);
		moe_experts_destroy(l[i]);
		block_data_free(&d[i]);
	}
	CHECK_OK(moe_trace_stop(e, &traced));
	CHECK(trace_is_good(file, false, true)); /* dependencies, order, repacks before their readers */
	CHECK_OK(moe_engine_close(e));
	*hash = h;
}

static void in_flight_one(void)
{
	uint64_t sync, async;

	in_flight_for(false, &sync);
	in_flight_for(true, &async);
	CHECK(sync == async);
}

static void in_flight(void)
{
	each_table(in_flight_one);
}

/* ---- faults of the peer that apply ---- */

/* F4: two layers of the same number share one buffer of backward weights, in turns. */
static void same_number_one(void)
{
	struct moe_engine *e = layer_engine(2, 1);
	struct moe_expert_layer *l[2];
	struct block_data d[2];

	if (table()->weight_transpose) {
		for (int i = 0; i < 2; i++) {
			struct block_case c = small();

			c.seed += 10 * i;
			c.backward = "shared:1";
			block_data_make(&d[i], &c);
			l[i] = layer_make(e, &d[i], NULL);
		}
		for (int turn = 0; turn < 4; turn++) {
			int i = turn % 2;

			CHECK_OK(layer_forward(l[i], &d[i], true));
			if (turn < 2)
				CHECK_OK(moe_experts_repack_async(l[1 - i])); /* the other's, in between */
			CHECK_OK(layer_backward(l[i], &d[i], 1));
			if (turn < 2) {
				struct block_reference r = { 0 };

				block_reference(&r, &d[i], d[i].ids);
				layer_compare(l[i], &d[i], &r, 1);
				block_reference_free(&r);
			}
		}
		moe_experts_destroy(l[0]), moe_experts_destroy(l[1]);
		block_data_free(&d[0]), block_data_free(&d[1]);
	}
	CHECK_OK(moe_engine_close(e));
}

static void same_number(void)
{
	each_table(same_number_one);
}

static bool all_finite(const double *v, int64_t n)
{
	bool good = true;

	for (int64_t i = 0; i < n; i++)
		good &= isfinite(v[i]);
	return good;
}

static bool any_nan(const double *v, int64_t n)
{
	bool found = false;

	for (int64_t i = 0; i < n; i++)
		found |= isnan(v[i]);
	return found;
}

/* F9: gates of +-300 have finite gradients; F10: a NaN token reaches all six LoRA gradients. */
static void extremes_one(void)
{
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = small();
	struct block_reference r = { 0 };
	struct moe_expert_layer *l;
	struct block_data d;

	c.routing = 0;
	block_data_make(&d, &c);
	for (int64_t i = 0; i < (int64_t)c.T * c.H; i++)
		d.x[i] *= 256;
	l = layer_make(e, &d, NULL);
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, 1));
	block_reference(&r, &d, d.ids);
	CHECK(layer_error(d.out, r.out, (int64_t)c.T * c.H) <= table_tolerance()->out);
	/* u = x A^T as an operand of bf16 moves a gate of 300 by .5 */
	layer_within("grad_x", d.grad_x, r.grad_x, (int64_t)c.T * c.H, table_is_packed() ? 3e-2 : 1e-5);
	for (int i = 0; i < LAYER_LORA; i++) {
		double *g = layer_get(l, &c, layer_lora[i], true);

		CHECK(all_finite(g, d.n[layer_lora[i]]));
		free(g);
	}
	d.x[3 * c.H + 1] = NAN;
	CHECK_OK(moe_experts_release_gradients(l));
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, 1));
	for (int i = 0; i < LAYER_LORA; i++) {
		double *g = layer_get(l, &c, layer_lora[i], true);

		CHECK(any_nan(g, d.n[layer_lora[i]]));
		free(g);
	}
	CHECK(isnan(d.out[3 * c.H]) && isnan(d.grad_weights[3 * c.k]) && !isnan(d.out[0]));
	block_reference_free(&r);
	moe_experts_destroy(l);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

static void extremes(void)
{
	each_table(extremes_one);
}

/* F13: the same bits in every run, for many rows of one expert, with any number of workers. */
static void determinism_one(void)
{
	uint64_t hash[4];

	for (int i = 0; i < 4; i++) {
		struct moe_engine *e = layer_engine(1 + i % 2, 1);
		struct block_case c = { .E = 3, .k = 2, .H = 64, .I = 300, .T = 150, .r = 4, .seed = 9,
					.group_size = 1 + i / 2, .slices_i = 1 + i % 2,
					.backward = "direct" };
		struct moe_expert_layer *l;
		struct block_data d;
		uint64_t h = 1;

		block_data_make(&d, &c);
		l = layer_make(e, &d, NULL);
		CHECK_OK(layer_forward(l, &d, true));
		CHECK_OK(layer_backward(l, &d, 1));
		for (int j = 0; j < LAYER_LORA; j++) {
			double *g = layer_get(l, &c, layer_lora[j], true);

			h = hash_of(h, g, sizeof *g * (size_t)d.n[layer_lora[j]]);
			free(g);
		}
		hash[i] = hash_of(h, d.grad_x, sizeof(float) * (size_t)(c.T * c.H));
		CHECK(hash[i] == hash[0]);
		moe_experts_destroy(l);
		block_data_free(&d);
		CHECK_OK(moe_engine_close(e));
	}
}

static void determinism(void)
{
	each_table(determinism_one);
}

static int64_t tasks_seen;

static void count_task(const struct moe_task_event *event, void *user)
{
	(void)event, (void)user;
	tasks_seen++;
}

/* F17: a backward after an update does what any other does; F15: experts elsewhere are ids of -1. */
static void no_hidden_work(void)
{
	struct moe_observer observer = { .submitted = count_task };
	struct moe_adamw_params adamw = adamw_default();
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = small();
	struct moe_expert_layer *l;
	struct block_data d;
	int64_t usual;

	block_data_make(&d, &c);
	l = layer_make(e, &d, NULL);
	CHECK_OK(moe_engine_observe(e, &observer));
	CHECK_OK(layer_forward(l, &d, true));
	tasks_seen = 0;
	CHECK_OK(layer_backward(l, &d, 1));
	usual = tasks_seen;
	CHECK_OK(moe_experts_update(l, &adamw));
	CHECK_OK(layer_forward(l, &d, true));
	tasks_seen = 0;
	CHECK_OK(layer_backward(l, &d, 1));
	CHECK(usual > 0 && tasks_seen == usual);
	for (int i = 0; i < c.T * c.k; i++) /* experts 0..2 run elsewhere */
		d.ids[i] = d.ids[i] < 3 ? -1 : d.ids[i];
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, 1));
	for (int i = 0; i < LAYER_LORA; i++) {
		double *g;

		CHECK_OK(moe_experts_release_gradients(l));
		CHECK_OK(layer_forward(l, &d, true));
		CHECK_OK(layer_backward(l, &d, 1));
		g = layer_get(l, &c, layer_lora[i], true);
		for (int64_t j = 0; j < 3 * d.n[layer_lora[i]] / c.E; j++)
			CHECK(g[j] == 0);
		free(g);
	}
	moe_experts_destroy(l);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* F16: every allocation that fails is an error that leaves the object usable. */
static void allocations(void)
{
	struct moe_adamw_params adamw = adamw_default();
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = small();
	struct moe_experts_params p;
	struct moe_expert_layer *l;
	struct block_data d;
	int n, used_up = 0;

	c.base_grads = true;
	c.backward = table()->weight_transpose ? "shared:1" : "direct";
	block_data_make(&d, &c);
	p = layer_params(&c);
	for (n = 1; n < 20000; n++) {
		enum moe_status st;

		moe_alloc_fail_after(n);
		st = moe_experts_create(e, &p, &l);
		moe_alloc_fail_after(-1);
		if (st == MOE_OK)
			break;
		CHECK(st == MOE_ERR_NOMEM && l == NULL);
	}
	CHECK(n > 10 && n < 20000);
	CHECK_OK(layer_load(l, &d, NULL, 0));
	layer_set_lora(l, &d);
	for (n = 1; n < 20000; n += n < 40 ? 1 : 7) {
		enum moe_status st;

		moe_alloc_fail_after(n);
		st = layer_forward(l, &d, true);
		moe_alloc_fail_after(-1);
		if (st == MOE_OK)
			break;
		CHECK(st == MOE_ERR_NOMEM);
	}
	CHECK(n > 10 && n < 20000);
	for (n = 1; n < 20000; n += n < 40 ? 1 : 7) {
		enum moe_status st;

		moe_alloc_fail_after(n);
		st = layer_backward(l, &d, 1);
		moe_alloc_fail_after(-1);
		if (st == MOE_OK)
			break;
		CHECK(st == MOE_ERR_NOMEM);
		CHECK(strstr(moe_last_error(), "its forward is used up") != NULL);
		CHECK_ERROR(layer_backward(l, &d, 1), MOE_ERR_STATE, "no forward is kept");
		CHECK(window_of(l) == MOE_WINDOW_CLOSED);
		CHECK_OK(layer_forward(l, &d, true));
		used_up++;
	}
	CHECK(used_up > 10);
	for (n = 1; n < 2000; n += 3) {
		enum moe_status st;

		moe_alloc_fail_after(n);
		st = moe_experts_update(l, &adamw);
		moe_alloc_fail_after(-1);
		if (st == MOE_OK)
			break;
		CHECK_ERROR(st, MOE_ERR_NOMEM, "applied in part");
		CHECK_OK(layer_forward(l, &d, true));
		CHECK_OK(layer_backward(l, &d, 1));
	}
	moe_experts_destroy(l);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* ---- threads ---- */

struct thread {
	pthread_t id;
	struct moe_expert_layer *l;
	struct block_data *d;
	int steps, busy;
	uint64_t hash;
};

static void *work(void *arg)
{
	struct thread *t = arg;
	struct moe_adamw_params adamw = adamw_default();

	for (int i = 0; i < t->steps; i++) {
		struct layer_call a = layer_call(t->d, 1 + (i * 13) % t->d->c.T);

		CHECK_OK(moe_experts_forward_async(t->l, &a.x, &a.ids, &a.weights, 1, &a.out));
		CHECK_OK(moe_experts_backward_async(t->l, &a.grad_out, 1, &a.grad_x, &a.grad_weights));
		CHECK_OK(moe_experts_update(t->l, &adamw));
		CHECK_OK(moe_experts_wait(t->l));
		t->hash = hash_of(t->hash, t->d->grad_x, sizeof(float) * (size_t)(a.grad_x.shape[0] * t->d->c.H));
	}
	return NULL;
}

/* Layers that share buffers, each in a thread of its own, give what they give alone; then they close together. */
static void threads(void)
{
	enum { N = 3 };
	struct moe_engine *e = layer_engine(2, 1);
	struct block_data d[N];
	uint64_t alone[N] = { 0 };

	for (int round = 0; round < 2; round++) {
		struct thread t[N];

		for (int i = 0; i < N; i++) {
			struct block_case c = small();

			c.seed += i;
			c.T = 80;
			c.base_grads = i == 0;
			c.backward = table()->weight_transpose ? "shared:2" : "direct";
			if (!round)
				block_data_make(&d[i], &c);
			t[i] = (struct thread){ .l = layer_make(e, &d[i], NULL), .d = &d[i], .steps = 8, .hash = 1 };
			if (round)
				CHECK(!pthread_create(&t[i].id, NULL, work, &t[i]));
			else
				work(&t[i]);
		}
		for (int i = 0; i < N; i++) {
			if (round)
				pthread_join(t[i].id, NULL);
			else
				alone[i] = t[i].hash;
			CHECK(t[i].hash == alone[i]);
			moe_experts_destroy(t[i].l);
		}
	}
	for (int i = 0; i < N; i++)
		block_data_free(&d[i]);
	CHECK_OK(moe_engine_close(e));
}

static void *intrude(void *arg)
{
	struct thread *t = arg;

	for (int i = 0; i < 20000 && !t->busy; i++) {
		struct moe_experts_info info = { .struct_size = sizeof info };
		enum moe_status st = moe_experts_get_info(t->l, &info);

		t->busy += st == MOE_ERR_BUSY;
		CHECK(st == MOE_OK || st == MOE_ERR_BUSY);
		usleep(50);
	}
	return NULL;
}

/* Two threads in one object: an error for one of them, results for the other. */
static void busy(void)
{
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = small();
	struct block_data d;
	struct thread t;
	int tries = 0;

	c.T = 200;
	block_data_make(&d, &c);
	t = (struct thread){ .l = layer_make(e, &d, NULL), .d = &d };
	while (!t.busy && tries++ < 50) {
		CHECK(!pthread_create(&t.id, NULL, intrude, &t));
		for (int i = 0; i < 20; i++) {
			enum moe_status st = layer_forward(t.l, &d, false);

			CHECK(st == MOE_OK || st == MOE_ERR_BUSY);
		}
		pthread_join(t.id, NULL);
		t.busy += tries == 50; /* a machine where they never met */
	}
	moe_experts_destroy(t.l);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* ---- checkpoint cache ---- */

static void checkpoint(void)
{
	struct moe_engine *e = layer_engine(1, 1);
	struct block_case c = small();
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
	{ "gradient windows", windows },
	{ "gradient windows, errors", window_errors },
	{ "two optimizers", optimizers },
	{ "layers in flight", in_flight },
	{ "layers of one number", same_number },
	{ "large and NaN inputs", extremes },
	{ "determinism", determinism },
	{ "no hidden work", no_hidden_work },
	{ "failing allocations", allocations },
	{ "layers in threads", threads },
	{ "two threads in one layer", busy },
	{ "checkpoint cache", checkpoint },
	{ NULL, NULL },
};
