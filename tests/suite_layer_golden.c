/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The block fixtures through the experts of one layer: routing as the file gives it, shared experts added by the test.
 * In every activation policy, by sync and async calls, one part and three, LoRA alone and with base weights (hybrid).
 * grad_x is compared where the file has no router, whose path is in it; suite_layer_router has one.
 */
#include "tests/layer_kinks.h"
#include "tests/layer_ways.h"

#include <dirent.h>
#include <limits.h>
#include <math.h>

const char moe_suite_name[] = "layer_golden";

static void compare_output(const struct file *f, const char *key)
{
	double *out = way_output(f);

	compare(f, key, out, (int64_t)f->d.c.T * (f->d.c.H - f->biased), table_tolerance()->out);
	free(out);
}

/* compare of a gradient of gate (up 0), up (1) or neither (-1); which: as exclude_kinks has it */
static void compare_beside_kinks(const struct file *f, const char *key, int up, int which, double *got, int64_t n)
{
	double *want = doubles(f->st, key);

	if (want && up >= 0)
		exclude_kinks(f, up, which, got, want);
	free(want);
	compare(f, key, got, n, table_tolerance()->grad);
}

/* A gradient; of gate's and up's weights with the bias's. */
static void compare_gradient(const struct file *f, int which, double *g)
{
	static const char *const biases[] = { "grad_gate_bias", "grad_up_bias" };
	static const int up[BLOCK_WEIGHTS] = { [MOE_BLOCK_DOWN_PROJ] = -1,   [MOE_BLOCK_UP_PROJ] = 1,
					       [MOE_BLOCK_UP_LORA_A] = 1,    [MOE_BLOCK_UP_LORA_B] = 1,
					       [MOE_BLOCK_DOWN_LORA_A] = -1, [MOE_BLOCK_DOWN_LORA_B] = -1 };
	struct widening w = widening_of(&f->d.c, which, f->d.c.H - 1);
	double *tail = calloc((size_t)(w.blocks * w.more) + 1, sizeof *tail);
	char key[64];

	if (f->biased) {
		narrow(g, w, tail);
		if (which <= MOE_BLOCK_UP_PROJ)
			compare_beside_kinks(f, biases[which], up[which], -1, tail, w.blocks);
	}
	snprintf(key, sizeof key, "grad_%s", names[which]);
	compare_beside_kinks(f, key, up[which], which, g, f->d.n[which] - (f->biased ? w.blocks * w.more : 0));
	free(tail);
}

static struct moe_array slice_of(const struct moe_array *a, int64_t e)
{
	struct moe_array x = { .dtype = a->dtype, .ndim = a->ndim - 1 };
	int64_t n = 1;

	for (int i = 1; i < a->ndim; i++)
		n *= x.shape[i - 1] = a->shape[i];
	x.data = (char *)a->data + (size_t)(e * n) * moe_dtype_size(a->dtype);
	return x;
}

static struct moe_array array_of(const struct file *f, const char *matrix, const char *suffix)
{
	char key[64];
	const struct moe_st_tensor *t;
	struct moe_array a = { 0 };

	snprintf(key, sizeof key, "%s.%s", matrix, suffix);
	t = moe_safetensors_find(f->st, key);
	if (!t)
		return a;
	a = (struct moe_array){ .data = (void *)t->data, .dtype = t->dtype, .ndim = t->ndim };
	memcpy(a.shape, t->shape, sizeof a.shape);
	return a;
}

/* All experts' tensors in one, or each expert's by itself, behind a map that undoes their order. */
static enum moe_status load_quantised(struct moe_expert_layer *l, const struct file *f, bool each)
{
	bool fp8 = !strcmp(f->format, "fp8"), int4 = !strcmp(f->format, "int4");
	struct moe_quantised_arrays a[3], *one[3];
	int64_t map[64], E = f->d.c.E;
	enum moe_status st;

	for (int i = 0; i < 3; i++) {
		a[i] = (struct moe_quantised_arrays){ .struct_size = sizeof a[i] };
		a[i].codes = array_of(f, names[i], int4 ? "packed_i32" : "q");
		a[i].scale = array_of(f, names[i], fp8 ? "scale_inv" : "scale");
		one[i] = calloc((size_t)E, sizeof *one[i]);
		for (int64_t e = 0; e < E; e++) {
			one[i][e] = a[i];
			one[i][e].codes = slice_of(&a[i].codes, E - 1 - e);
			one[i][e].scale = slice_of(&a[i].scale, E - 1 - e);
		}
	}
	for (int64_t e = 0; e < 64; e++)
		map[e] = E - 1 - e;
	st = each ? moe_experts_load_quantised(l, one[0], one[1], one[2], E, map, 64)
		  : moe_experts_load_quantised(l, &a[0], &a[1], &a[2], 0, NULL, 0);
	for (int i = 0; i < 3; i++)
		free(one[i]);
	return st;
}

static struct moe_expert_layer *make(struct moe_engine *e, struct file *f, struct way w, bool lora,
				     bool train_base)
{
	struct moe_expert_layer *l = way_create(e, f, w, lora, train_base);

	if (l && CHECK_OK(f->format ? load_quantised(l, f, w.async) : layer_load(l, &f->d, NULL, 0)) && lora &&
	    f->d.c.r)
		layer_set_lora(l, &f->d);
	return l;
}

static void check_gradients(struct moe_engine *e, struct file *f, struct way w)
{
	const struct table_tolerance *t = table_tolerance();
	const struct block_case *c = &f->d.c;
	struct moe_expert_layer *l = make(e, f, w, true, c->base_grads);
	int64_t n = (int64_t)c->T * c->H;

	if (l && way_forward(l, f, w, true)) {
		compare_output(f, "out");
		way_backward(l, f, w);
		if (!f->routed)
			compare_floats(f, "grad_x", f->d.grad_x, NULL, n, t->grad_x);
		/* few slots: as suite_golden has it */
		compare_floats(f, "grad_topk_weights", f->d.grad_weights, f->more_weights, (int64_t)c->T * c->k,
			       (f->format ? 1.15 : 1) * t->grad_weights);
		for (int i = 0; i < BLOCK_WEIGHTS; i++) {
			double *g;

			if (!f->d.w[i] || (i <= MOE_BLOCK_DOWN_PROJ && !c->base_grads))
				continue;
			g = layer_get(l, c, (enum moe_block_array)i, true);
			compare_gradient(f, i, g);
			free(g);
		}
	}
	moe_experts_destroy(l);
}

static void check_parameters(const struct file *f, struct moe_expert_layer *l)
{
	double bound = !table_is_packed() ? 1e-4 : f->d.c.limit != 0 ? .15 : .05; /* clamped: see golden.c */

	for (int i = 0; i < LAYER_LORA; i++) {
		enum moe_block_array which = layer_lora[i];
		double *got = layer_get(l, &f->d.c, which, false);

		compare_way(f, names[which], got, f->d.w[which], f->d.n[which],
			    widening_of(&f->d.c, (int)which, f->d.c.H - 1), bound);
		free(got);
	}
}

/* Biases are a column of base weights, where A has none: what a step made there is taken back. */
static void clear_columns(struct file *f, struct moe_expert_layer *l)
{
	for (int i = 0; f->biased && i < 2; i++) {
		const struct block_case *c = &f->d.c;
		enum moe_block_array which = layer_lora[i];
		double *a = layer_get(l, c, which, false);
		struct moe_array array = layer_array(c, which, a, MOE_F64);

		for (int64_t row = 0; row < c->E * c->r; row++)
			a[row * c->H + c->H - 1] = 0;
		CHECK_OK(moe_experts_set_array(l, which, &array));
		free(a);
	}
}

/*
 * Five steps of files that lose more than .4 of their loss leave PyTorch's bf16 autograd .8e-3 to 2.6e-3 off (2026-11-30:
 * phimoe_eval, deepseek_v2_group, deepseek_v3_nonorm, gpt_oss_limit).
 */
static double loss_bound(const double losses[6])
{
	if (!table_is_packed())
		return 1e-5;
	return losses[5] < .6 * losses[0] ? 2.5e-3 : 1e-3;
}

/* The router is frozen, so its choice and weights are the file's throughout. */
static void check_training(struct moe_engine *e, struct file *f, struct way w)
{
	const struct block_case *c = &f->d.c;
	struct moe_adamw_params p = way_adamw(f);
	double losses[6] = { 0 }, *target = doubles(f->st, "target");
	struct moe_expert_layer *l = make(e, f, w, true, false);

	for (int step = 0; target && l && step < 6; step++) {
		way_forward(l, f, w, step < 5);
		losses[step] = way_loss(f, target);
		if (step == 5)
			break;
		way_backward(l, f, w);
		CHECK_OK(moe_experts_update(l, &p));
		clear_columns(f, l);
	}
	compare(f, "train_losses", losses, 6, (c->T == 1 ? 2 : 1) * loss_bound(losses));
	check_parameters(f, l);
	moe_experts_destroy(l);
	free(target);
}

static void check_file(struct moe_engine *e, const char *path, struct way w, int *ran)
{
	struct moe_expert_layer *l;
	struct file f;

	if (!file_open(&f, path))
		return;
	l = make(e, &f, w, false, false);
	if (l && way_forward(l, &f, w, false))
		compare_output(&f, "out_nolora");
	moe_experts_destroy(l);
	check_gradients(e, &f, w);
	if (f.train && moe_safetensors_find(f.st, "train_losses"))
		check_training(e, &f, w);
	file_close(&f);
	++*ran;
}

static int run_folder(struct moe_engine *e, const char *folder, struct way w)
{
	DIR *dir = opendir(folder);
	struct dirent *entry;
	int ran = 0;

	while (dir && (entry = readdir(dir))) {
		char path[PATH_MAX];

		if (!strstr(entry->d_name, ".safetensors") || !strncmp(entry->d_name, "quant_", 6) ||
		    !strncmp(entry->d_name, "model_", 6) || !strncmp(entry->d_name, "peft_", 5))
			continue;
		snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
		check_file(e, path, w, &ran);
	}
	if (dir)
		closedir(dir);
	return ran;
}

static void ways(int parts)
{
	const char *shared = moe_test_shared("oracle/golden");
	struct moe_engine *e = layer_engine(2, parts);

	for (int i = 0; i < 4; i++) {
		struct way w = way_at(i);

		if (!table_takes((size_t)i + (parts > 1 ? 1 : 0), 4))
			continue;

		CHECK(run_folder(e, moe_test_path("tests/fixtures/golden"), w) >= 15);
		if (shared)
			CHECK(run_folder(e, shared, w) >= 27);
		else
			moe_test_skip("the larger fixtures of ../shared/oracle/golden are not here");
	}
	CHECK_OK(moe_engine_close(e));
}

static void quantised(int parts)
{
	static const char *const files[][2] = { { "quant_int8_row", "int8" },
						{ "quant_int4_g32", "int4" },
						{ "quant_fp8_block128", "fp8" } };
	struct moe_engine *e = layer_engine(2, parts);

	for (size_t i = 0; i < 4 * MOE_COUNT(files); i++) {
		struct way w = way_at((int)i);
		char path[128];
		const char *at;
		struct file f;

		snprintf(path, sizeof path, "oracle/golden/%s.safetensors", files[i / 4][0]);
		at = moe_test_shared(path);
		if (!at) {
			moe_test_skip("%s is not here", path);
			continue;
		}
		if (!CHECK(file_open(&f, at)))
			continue;
		f.format = files[i / 4][1];
		check_gradients(e, &f, w);
		file_close(&f);
	}
	CHECK_OK(moe_engine_close(e));
}

static void quantised_one(void)
{
	quantised(1);
}

static void quantised_three(void)
{
	quantised(3);
}

static void quantised_files(void)
{
	setenv("MOESAIC_COMPUTE", "bf16", 1);
	each_table(quantised_one);
	each_table(quantised_three);
	unsetenv("MOESAIC_COMPUTE");
}

static void one(void)
{
	ways(1);
}

static void three(void)
{
	ways(3);
}

static void one_part(void)
{
	each_table(one);
}

static void three_parts(void)
{
	each_table(three);
}

const struct moe_test moe_suite_tests[] = {
	{ "every policy and form of call, one part", one_part },
	{ "every policy and form of call, three parts", three_parts },
	{ "quantised weights, every policy and form of call, one part and three", quantised_files },
	{ NULL, NULL },
};
