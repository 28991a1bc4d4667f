/* SPDX-License-Identifier: Apache-2.0 */
/* Random MoE blocks through the public API, and the same arithmetic in plain loops of doubles. */
#ifndef MOE_TESTS_BLOCK_CHECK_H
#define MOE_TESTS_BLOCK_CHECK_H

#include "engine/base.h"
#include "tests/child.h"

struct block_case {
	int E, k, H, I, T, r, shared; /* shared: intermediate of the shared expert */
	bool share_a, sigmoid, router, normalise, base_grads;
	float aux, z;
	float limit, alpha, shift; /* of SwiGLU: see struct moe_block_params */
	int group_size, slices_i, slices_h;
	const char *backward; /* weights of the backward; NULL: the block's choice */
	int routing; /* caller's ids: 0 distinct, 1 all to one expert, 2 with -1 and duplicates, and
			odd weights */
	int seed;
};

#define BLOCK_WEIGHTS (MOE_BLOCK_DOWN_LORA_B + 1)

/* Inputs and outputs of one block. Weights by enum moe_block_array. */
struct block_data {
	struct block_case c;
	float *w[BLOCK_WEIGHTS]; /* NULL: the block has none */
	int64_t n[BLOCK_WEIGHTS];
	float *x, *grad_out, *weights, *out, *grad_x, *grad_weights;
	int32_t *ids;
};

void block_data_make(struct block_data *d, const struct block_case *c);
/*
 * Inputs that packed tables don't round: weights, x, grad_out and LoRA (B with its scale) of bf16. Their errors are
 * then what they add themselves. Done by block_data_make under packed tables.
 */
void block_data_round(struct block_data *d);
void block_data_free(struct block_data *d);
/* Shape of a weight; ndim, 0 if the block has none. */
int block_shape(const struct block_case *c, enum moe_block_array which, int64_t *shape);

struct moe_array matrix_of(void *data, enum moe_dtype dtype, int64_t rows, int64_t cols);
struct moe_adamw_params adamw_default(void);
struct moe_block_params block_params_of(const struct block_case *c);
enum moe_status block_fill(struct moe_block *b, const struct block_data *d);
/* A filled block; failures are checks. p: instead of block_params_of(c), or NULL. */
struct moe_block *block_make(struct moe_engine *e, const struct block_case *c,
			     const struct block_data *d, const struct moe_block_params *p);
/* The first d->c.T tokens; out [T, H], gradients to d->grad_x, d->grad_weights. */
enum moe_status block_forward(struct moe_block *b, struct block_data *d, bool save, float *out);
enum moe_status block_backward(struct moe_block *b, struct block_data *d);
uint64_t hash_of(uint64_t h, const void *data, size_t bytes);
/* forward, backward, gradients, update, parameters: a hash of all of it, after h. */
uint64_t block_step(struct moe_block *b, struct block_data *d, uint64_t h);
/* Gradient (or value) of a weight as doubles; free it. */
double *block_get(struct moe_block *b, const struct block_case *c, enum moe_block_array which,
		  bool gradient);

/* What a pass must give, in double. */
struct block_reference {
	double *out, *grad_x, *grad_weights, *grad_logits; /* [T, H], [T, H], [T, k], [T, E] */
	double *grad[BLOCK_WEIGHTS];
	double aux, z;
	double nearest; /* of the last call: least distance of a value from where SwiGLU cuts it */
};
/* ids: those that the block chose, or the caller's; NULL fields of *r are allocated. Gradients are
 * added to those of earlier calls. */
void block_reference(struct block_reference *r, const struct block_data *d, const int32_t *ids);
/*
 * The limit, which it moves up a little where a value is so near to it that rounding decides about its gradient: in
 * the first call and after block_second. Only with the caller's ids, before the block is made.
 */
void block_settle_limit(struct block_data *d);
/* Other inputs for a second call, which need no more rounding. */
void block_second(struct block_data *d);
void block_reference_free(struct block_reference *r);

double *doubles_of(const float *v, int64_t n); /* free it */
/* ||got - want|| / ||want||; the plain difference where want is 0. */
double relative_error(const double *got, const double *want, int64_t n);
double relative_error_of_floats(const float *got, const double *want, int64_t n);

#endif
