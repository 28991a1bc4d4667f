/* SPDX-License-Identifier: Apache-2.0 */
/* The experts of one layer from the data of a block_case (which has neither router nor shared expert). */
#ifndef MOE_TESTS_LAYER_CHECK_H
#define MOE_TESTS_LAYER_CHECK_H

#include "tests/block_check.h"
#include "tests/tables.h"

#include <math.h>

#define LAYER_LORA 6

static const enum moe_block_array layer_lora[LAYER_LORA] = {
	MOE_BLOCK_GATE_LORA_A, MOE_BLOCK_UP_LORA_A, MOE_BLOCK_DOWN_LORA_A,
	MOE_BLOCK_GATE_LORA_B, MOE_BLOCK_UP_LORA_B, MOE_BLOCK_DOWN_LORA_B
};

static inline struct moe_engine *layer_engine(int workers, int parts)
{
	return open_with(workers, parts, NULL);
}

static inline struct moe_experts_params layer_params(const struct block_case *c)
{
	return (struct moe_experts_params){
		.struct_size = sizeof(struct moe_experts_params),
		.experts = c->E,
		.experts_per_token = c->k,
		.hidden = c->H,
		.intermediate = c->I,
		.lora_rank = c->r,
		.lora_alpha = 1.5f * (float)c->r, /* scale 1.5, as block_check's */
		.train_base = c->base_grads,
		.weight_dtype = MOE_F32,
		.expected_tokens = c->T,
		.group_size = c->group_size,
		.slices_i = c->slices_i,
		.slices_h = c->slices_h,
		.backward_weights = c->backward,
		.swiglu_limit = c->limit,
		.swiglu_alpha = c->alpha,
		.swiglu_shift = c->shift,
	};
}

/* An array of the case in another type or from another place. */
static inline struct moe_array layer_array(const struct block_case *c, enum moe_block_array which,
					   void *data, enum moe_dtype dtype)
{
	struct moe_array a = { .data = data, .dtype = dtype };

	a.ndim = block_shape(c, which, a.shape);
	return a;
}

static inline enum moe_status layer_load(struct moe_expert_layer *l, const struct block_data *d,
					 const int64_t *map, int64_t n_map)
{
	struct moe_array w[3];

	for (int i = 0; i < 3; i++)
		w[i] = layer_array(&d->c, (enum moe_block_array)i, d->w[i], MOE_F32);
	return moe_experts_load(l, &w[0], &w[1], &w[2], map, n_map);
}

static inline void layer_set_lora(struct moe_expert_layer *l, const struct block_data *d)
{
	CHECK_OK(moe_experts_init_lora(l, 1));
	for (int i = 0; i < LAYER_LORA; i++) {
		struct moe_array a =
			layer_array(&d->c, layer_lora[i], d->w[layer_lora[i]], MOE_F32);

		CHECK_OK(moe_experts_set_array(l, layer_lora[i], &a));
	}
}

/* Loaded, with the case's LoRA; p NULL: layer_params. */
static inline struct moe_expert_layer *layer_make(struct moe_engine *e, const struct block_data *d,
						  const struct moe_experts_params *p)
{
	struct moe_experts_params own = layer_params(&d->c);
	struct moe_expert_layer *l = NULL;

	if (!CHECK_OK(moe_experts_create(e, p ? p : &own, &l)))
		printf("  %s\n", moe_last_error());
	if (!l)
		return NULL;
	CHECK_OK(layer_load(l, d, NULL, 0));
	if (d->c.r)
		layer_set_lora(l, d);
	return l;
}

struct layer_call {
	struct moe_array x, ids, weights, out, grad_out, grad_x, grad_weights;
};

/* Arrays of T tokens of the case, in f32. */
static inline struct layer_call layer_call(struct block_data *d, int T)
{
	const struct block_case *c = &d->c;

	return (struct layer_call){
		.x = matrix_of(d->x, MOE_F32, T, c->H),
		.ids = matrix_of(d->ids, MOE_I32, T, c->k),
		.weights = matrix_of(d->weights, MOE_F32, T, c->k),
		.out = matrix_of(d->out, MOE_F32, T, c->H),
		.grad_out = matrix_of(d->grad_out, MOE_F32, T, c->H),
		.grad_x = matrix_of(d->grad_x, MOE_F32, T, c->H),
		.grad_weights = matrix_of(d->grad_weights, MOE_F32, T, c->k),
	};
}

static inline enum moe_status layer_forward(struct moe_expert_layer *l, struct block_data *d, bool save)
{
	struct layer_call a = layer_call(d, d->c.T);

	return moe_experts_forward(l, &a.x, &a.ids, &a.weights, save, &a.out);
}

static inline enum moe_status layer_backward(struct moe_expert_layer *l, struct block_data *d, double scale)
{
	struct layer_call a = layer_call(d, d->c.T);

	return moe_experts_backward(l, &a.grad_out, scale, &a.grad_x, &a.grad_weights);
}

/* out, grad_x and grad_weights of both, bit by bit. */
static inline void layer_same_bits(struct moe_expert_layer *a, struct moe_expert_layer *b, struct block_data *d)
{
	size_t n = (size_t)(d->c.T * d->c.H), w = (size_t)(d->c.T * d->c.k);
	float *kept = malloc((2 * n + w) * sizeof *kept);

	CHECK_OK(layer_forward(a, d, true));
	CHECK_OK(layer_backward(a, d, 1));
	memcpy(kept, d->out, n * sizeof *kept);
	memcpy(kept + n, d->grad_x, n * sizeof *kept);
	memcpy(kept + 2 * n, d->grad_weights, w * sizeof *kept);
	CHECK_OK(layer_forward(b, d, true));
	CHECK_OK(layer_backward(b, d, 1));
	CHECK(fabsf(kept[3]) > 0 && fabsf(kept[3]) < 1e30f);
	CHECK(!memcmp(kept, d->out, n * sizeof *kept));
	CHECK(!memcmp(kept + n, d->grad_x, n * sizeof *kept));
	CHECK(!memcmp(kept + 2 * n, d->grad_weights, w * sizeof *kept));
	free(kept);
}

/* A gradient or value as doubles; free it. */
static inline double *layer_get(struct moe_expert_layer *l, const struct block_case *c,
				enum moe_block_array which, bool gradient)
{
	int64_t s[3];
	int64_t n = moe_shape_count(block_shape(c, which, s), s);
	double *v = calloc((size_t)n + 1, sizeof *v);
	struct moe_array a = layer_array(c, which, v, MOE_F64);

	if (!CHECK_OK((gradient ? moe_experts_get_gradient : moe_experts_get_array)(l, which, &a)))
		printf("  %s\n", moe_last_error());
	return v;
}

static inline void layer_within(const char *what, const float *got, const double *want, int64_t n,
				double bound)
{
	double error = relative_error_of_floats(got, want, n);

	if (!CHECK(error <= bound))
		printf("  %s: %.2e, %.2e allowed\n", what, error, bound);
}

/* out, grad_x, grad_weights of the last calls, and gradients times scale, against the reference's sums. */
static inline void layer_compare(struct moe_expert_layer *l, const struct block_data *d,
				 const struct block_reference *r, double scale)
{
	const struct table_tolerance *t = table_tolerance();
	const struct block_case *c = &d->c;
	int64_t n = (int64_t)c->T * c->H, slots = (int64_t)c->T * c->k, s[3];
	double few = table_is_packed() && slots < 200 ? 1.5 : 1; /* no mean over many dot products */

	layer_within("out", d->out, r->out, n, t->out);
	layer_within("grad_x", d->grad_x, r->grad_x, n, t->grad_x);
	layer_within("grad_weights", d->grad_weights, r->grad_weights, slots, few * t->grad_weights);
	for (int i = 0; i < BLOCK_WEIGHTS; i++) {
		enum moe_block_array which = (enum moe_block_array)i;
		int ndim = block_shape(c, which, s);
		int64_t m = moe_shape_count(ndim, s);
		double *got, error;

		if (!ndim || (i <= MOE_BLOCK_DOWN_PROJ && !c->base_grads))
			continue;
		got = layer_get(l, c, which, true);
		for (int64_t j = 0; j < m; j++)
			got[j] /= scale;
		error = relative_error(got, r->grad[i], m);
		if (!CHECK(error <= t->grad))
			printf("  gradient %d: %.2e\n", i, error);
		free(got);
	}
}

static inline struct block_case layer_small(void)
{
	return (struct block_case){ .E = 6, .k = 2, .H = 80, .I = 100, .T = 21, .r = 5, .routing = 2, .seed = 5 };
}

static inline enum moe_window layer_window(struct moe_expert_layer *l)
{
	enum moe_window w = 99;

	if (!CHECK_OK(moe_experts_get_window(l, &w)))
		printf("  %s\n", moe_last_error());
	return w;
}

#endif
