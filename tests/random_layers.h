/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random calls on layers, for suite_layer_random: a plain single-threaded model of each layer says
 * what a call must give, and functions that make one call (or a few that belong together) on a
 * layer and its model.
 */
#ifndef MOE_TESTS_RANDOM_LAYERS_H
#define MOE_TESTS_RANDOM_LAYERS_H

#include "codelets/format.h"
#include "tests/layer_check.h"

enum { LAYERS = 2, DEPTH = 2, T_MAX = 9, PENDING = 64, N_EXPERTS = 4 };

/* A result that is checked when the layer has been waited for. */
struct pending {
	float *got;
	double *want, bound, slack;
	int64_t n;
	struct block_data d; /* arrays of the call, freed with it */
	bool owner;
};

/* Norms of how far values near the limit of a clamped SwiGLU, which rounding cuts or not, may move
 * results. */
struct slack {
	double grad_x, grad_weights, out, grad[9];
};

/*
 * A layer as the header describes it. Its nine arrays: LoRA in the order of layer_lora, then gate,
 * up, down. What the caller holds of base weights is in the order of the arrays that were loaded,
 * the rest is by expert.
 */
struct layer_model {
	struct moe_expert_layer *l;
	struct moe_experts_params p;
	struct block_data d; /* weights: what the layer computes with; c.T is not used */
	const struct moe_format *format; /* of frozen weights, or NULL */
	int64_t map[N_EXPERTS];
	struct moe_gradient g[9];
	enum moe_dtype dtype; /* of bound arrays */
	void *param[9], *buffer[9];
	bool bound, bound_base, with_buffers;
	struct kept {
		struct block_data d;
		bool stale;
	} kept[DEPTH];
	int n_kept;
	bool open, pending,
		taken; /* window; a backward not waited for; its gradients used by an update */
	double *sum[9];
	struct slack slack; /* of the sums, and of the moments */
	double moments_slack;
	double *m[9], *v[9];
	int steps;
	struct pending list[PENDING];
	int n_list;
	double loose; /* factor of bounds: results of several layers */
	double drift; /* of the values, since they were compared */
	enum moe_checkpoint checkpoint;
	float *output; /* that is cached */
	int output_rows;
};

/* ---- random_model.c ---- */

void random_seed(uint64_t seed, unsigned long sequence);
int any(int n); /* 0..n-1 */
float unit(void);
/* Whether a call of this sequence went wrong; say: what is printed of the first one. */
bool random_failed(void);
void say(const char *what, double error);
void expect(bool good, const char *what);
void expect_status(enum moe_status got, enum moe_status want, const char *what);

void model_make(struct layer_model *m, struct moe_engine *e);
void model_free(struct layer_model *m); /* with whatever is in flight */
bool trained(const struct layer_model *m, int i);
bool trains(const struct layer_model *m);
bool has_buffers(const struct layer_model *m);
bool is_bound(const struct layer_model *m, int i);
/* Backwards may follow each other without a wait. */
bool several(const struct layer_model *m);
enum moe_block_array array_of(int i);
/* Element j of expert e in an array of the caller. */
int64_t caller_index(const struct layer_model *m, int i, int64_t j);
/* Caller's bound array i from, and to, values by expert. */
void caller_put(struct layer_model *m, int i, const float *by_expert);
void caller_take(const struct layer_model *m, int i, const void *array, float *by_expert);
struct moe_array array_like(const struct layer_model *m, int i, void *data, enum moe_dtype dtype);

/* Arrays of a call of T tokens, with the model's weights. */
struct block_data call_of(const struct layer_model *m, int T);
void call_free(struct block_data *d);
void remember(struct layer_model *m, const struct block_data *d, float *got, const double *want,
	      int64_t n, double slack, bool owner);
void flush(struct layer_model *m);
/* The gradients of a pass, times scale, into the window's sums. */
void add_gradients(struct layer_model *m, const struct block_reference *r,
		   const struct slack *slack, double scale);
void close_window(struct layer_model *m);
/* After a call that waited: the pending backward is published. */
void published(struct layer_model *m);
void stale(struct layer_model *m);
/* Sum of squares of the window's gradients. */
double squares(const struct layer_model *m);
/* AdamW with the window's gradients times factor; the window closes. */
void model_update(struct layer_model *m, const struct moe_adamw_params *p, double factor);
/* Waits, and compares the layer's values with the model's, which then are the layer's. */
void check_update(struct layer_model *m);

/* ---- random_reference.c ---- */

double random_bound(void);
/* ||got - want|| above slack, over ||want||, where a few small numbers may all be rounded far. */
double error_of_doubles(const double *got, const double *want, int64_t n, double slack);
double error_of_floats(const float *got, const double *want, int64_t n, double slack);
/* What a pass of the layer gives with d's weights. */
void pass_reference(const struct layer_model *m, const struct block_data *d,
		    struct block_reference *r, struct slack *s);
/* The layer's limit lowered (sign -1) or raised (1) by what rounding and the model's drift may do.
 */
float moved_limit(const struct layer_model *m, int sign);
/* The differences of what the two gave. */
void slack_between(const struct layer_model *m, const struct block_data *d,
		   const struct block_reference *low, const struct block_reference *high,
		   struct slack *s);

/* ---- random_load.c ---- */

/* Loads by one of the ways in; the model's weights are then what the layer computes with, by
 * expert. */
void model_load(struct layer_model *m);
void misuse_quantised(struct layer_model *m); /* before it has weights */

/* ---- random_calls.c: on one layer ---- */

void settle(struct layer_model *m);  /* waits */
void do_wait(struct layer_model *m); /* waits and checks results */
void do_forward(struct layer_model *m);
void do_backward(struct layer_model *m);
void do_update(struct layer_model *m, struct moe_engine *e);
void do_external(struct layer_model *m);
void do_window(struct layer_model *m);
void do_gradient(struct layer_model *m);
void do_memory(struct layer_model *m);
void do_drop(struct layer_model *m);
void do_repack(struct layer_model *m);

/* ---- random_more.c: what is called now and then, and misuse ---- */

void do_checkpoint(struct layer_model *m);
void do_arrays(struct layer_model *m);
void do_load_again(struct layer_model *m);
void do_dropout(struct layer_model *m);
void do_misuse(struct layer_model *m);
void do_held(struct layer_model m[LAYERS], struct moe_engine *e);
/* While it is made: before it has weights, and before it has LoRA values. */
void misuse_create(struct moe_engine *e, const struct moe_experts_params *good);
void misuse_unloaded(struct layer_model *m);
void misuse_without_lora(struct layer_model *m);

/* ---- random_rows.c ---- */

/* A token of NaN or infinite numbers: it reaches its own results and no others, and nothing of it
 * stays. */
void do_bad_token(struct layer_model *m, struct moe_engine *e);

/* ---- random_steps.c: on both layers ---- */

void do_optimizer(struct layer_model m[LAYERS], struct moe_engine *e);
/* Training steps of the two layers behind each other, with or without waits between. */
void do_steps(struct layer_model m[LAYERS], struct moe_engine *e);

#endif
