/* SPDX-License-Identifier: Apache-2.0 */
/* The experts of one layer: gradient windows that a caller binds, their states and errors, two optimizers. */
#include "tests/layer_check.h"

#include <math.h>

const char moe_suite_name[] = "layer_windows";

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
	struct block_case c = layer_small();
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
	CHECK(layer_window(l) == MOE_WINDOW_CLOSED);
	for (int i = 0; i < 3; i++) {
		CHECK_OK(layer_forward(l, &d, true));
		CHECK_OK(layer_backward(l, &d, 1));
		CHECK(layer_window(l) == MOE_WINDOW_OPEN);
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
	CHECK(layer_window(l) == MOE_WINDOW_CLOSED);
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
	CHECK(layer_window(l) == MOE_WINDOW_CLOSED && !lora.g[0].grad && !base.g[2].grad);
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
	struct block_case c = layer_small();
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
	CHECK(layer_window(l) == MOE_WINDOW_CLOSED && !base.g[0].grad);
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
	CHECK(layer_window(other) == MOE_WINDOW_EMPTY);
	CHECK_OK(layer_forward(other, &d, true));
	CHECK_OK(layer_backward(other, &d, 1));
	CHECK(layer_window(other) == MOE_WINDOW_EMPTY);
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
		struct block_case c = layer_small();
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
					CHECK(layer_window(l[0]) == MOE_WINDOW_CLOSED);
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
			CHECK(relative_error_of_floats(u[0].param[at], own, n) == 0);
			/* first steps are signs of gradients: tiny ones may flip under packed kernels */
			if (!CHECK(relative_error_of_floats(u[1].param[at], own, n) <= (table_is_packed() ? 3e-3 : 3e-5)))
				printf("  %s, array %d: %.2e\n", modes[mode], i,
				       relative_error_of_floats(u[1].param[at], own, n));
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

/* A pass with what the layer has now (packed tables: rounded) gives the reference's results. */
static void check_current(struct moe_expert_layer *l, struct block_data *d, const struct caller *base)
{
	struct block_reference r = { 0 };

	for (int i = 0; i < BLOCK_WEIGHTS; i++) {
		double *v;

		if (!d->w[i])
			continue;
		if (i <= (int)MOE_BLOCK_DOWN_PROJ) {
			memcpy(d->w[i], base->param[i], (size_t)d->n[i] * sizeof(float));
			continue;
		}
		v = layer_get(l, &d->c, (enum moe_block_array)i, false);
		for (int64_t j = 0; j < d->n[i]; j++)
			d->w[i][j] = (float)v[j];
		free(v);
	}
	if (table_is_packed())
		block_data_round(d);
	CHECK_OK(moe_experts_release_gradients(l));
	CHECK_OK(layer_forward(l, d, true));
	CHECK_OK(layer_backward(l, d, 1));
	block_reference(&r, d, d->ids);
	layer_compare(l, d, &r, 1);
	block_reference_free(&r);
}

/* F5: a layer alone, whose copies for the backward nobody else replaces, after either optimizer changed its weights. */
static void no_stale_copies_one(void)
{
	static const char *const modes[] = { "direct", "shared:1", "resident" };
	struct moe_adamw_params adamw = adamw_default();
	struct moe_engine *e = layer_engine(2, 2);

	adamw.learning_rate = .1;
	for (int mode = 0; mode < (table()->weight_transpose ? 3 : 1); mode++) {
		struct block_case c = layer_small();
		struct moe_expert_layer *l;
		struct caller base;
		struct block_data d;

		c.base_grads = true;
		c.backward = modes[mode];
		block_data_make(&d, &c);
		caller_make(&base, &d, true, MOE_F32);
		l = layer_make(e, &d, NULL);
		CHECK_OK(moe_experts_bind_base(l, base.g));
		check_current(l, &d, &base);
		for (int step = 0; step < 2; step++) {
			CHECK_OK(moe_experts_update(l, &adamw));
			CHECK_OK(moe_experts_wait(l));
			check_current(l, &d, &base);
			for (int i = 0; i < 3; i++) /* the caller's optimizer */
				for (int64_t j = 0; j < d.n[i]; j++)
					((float *)base.param[i])[j] *= j % 2 ? -1 : .5f;
			CHECK_OK(moe_experts_update_base(l));
			check_current(l, &d, &base);
		}
		moe_experts_destroy(l);
		caller_free(&base);
		block_data_free(&d);
	}
	CHECK_OK(moe_engine_close(e));
}

static void no_stale_copies(void)
{
	each_table(no_stale_copies_one);
}

const struct moe_test moe_suite_tests[] = {
	{ "gradient windows", windows },
	{ "gradient windows, errors", window_errors },
	{ "two optimizers", optimizers },
	{ "no stale copies", no_stale_copies },
	{ NULL, NULL },
};
