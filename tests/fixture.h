/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One block fixture (shared/oracle/README.md) being run: its tensors, what was compared, and the
 * block set up from it. golden.c does the checks.
 */
#ifndef MOE_TESTS_FIXTURE_H
#define MOE_TESTS_FIXTURE_H

#include "model/readers/safetensors.h"
#include "tests/golden.h"

#define FIXTURE_MAX_KEYS 256

/* Relative L2 errors allowed: f32, and tables that round operands or kept activations to bf16. */
struct tolerance {
	double routing; /* what comes of the router, always in f32 */
	double out, grad_x, grad_weights, grad, loss;
	double first_step, step; /* of the parameters */
};

extern const struct tolerance fixture_exact, fixture_rounded;
/* The one of the kernels in use. */
const struct tolerance *fixture_tolerance(void);

/* One fixture being run. */
struct fixture {
	const struct golden_options *o;
	struct golden_result *r;
	struct moe_safetensors *st;
	const char *path;
	bool used[FIXTURE_MAX_KEYS];
	/* config */
	char kind[64];
	int64_t E, k, H, I, T, rank, shared_I;
	double scaling, alpha, lr, beta1, beta2, eps, weight_decay;
	const char *format; /* of quantised weights, or NULL */
	bool normalise, experts_only, tie, base_grads, train, peft, lora;
	double swiglu_limit;
	double router_scale; /* of a router that is not in this build: the file's ids and weights are given; else 0 */
	bool full_ft;	     /* training moves base and router weights, without LoRA */
	double largest_grad; /* norm, for references that are zero */
	struct moe_block *block;
	bool ok;
};

extern const char *const fixture_lora_names[6];

/* A fault: printed, and counted in the result. */
void fixture_fail(struct fixture *g, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Whether a call of the library went well; else a fault. */
bool fixture_call(struct fixture *g, enum moe_status st);

/* A tensor of the file, which counts as used from now on; NULL if absent. The file owns it. */
const struct moe_st_tensor *fixture_find(struct fixture *g, const char *name);
int64_t fixture_count(const struct moe_st_tensor *t);
/* The same as n doubles; free them. */
double *fixture_doubles(struct fixture *g, const char *name, int64_t *n);
/* The same as an aligned array; free a->data. */
bool fixture_load(struct fixture *g, const char *name, struct moe_array *a);

struct moe_array fixture_array(void *data, enum moe_dtype dtype, int ndim, const int64_t *shape);
struct moe_array fixture_matrix(void *data, enum moe_dtype dtype, int64_t rows, int64_t cols);

double fixture_norm(const double *a, int64_t n); /* L2 */
/* Relative L2 error of n values got against ref, or against the file's name if it has that; above
 * tol it is a fault. */
void fixture_compare_values(struct fixture *g, const char *name, const double *got,
			    const double *ref, int64_t n, double tol);
void fixture_compare(struct fixture *g, const char *name, const double *got, int64_t n, double tol);

/* fixture_inputs.c. Errors are faults of g. */
bool fixture_read_config(struct fixture *g);
/* g->block for the fixture's shapes. grads: of base weights too; train_base: full fine-tuning. */
bool fixture_create_block(struct fixture *g, struct moe_engine *e, bool lora, bool grads,
			  bool train_base);
/* All weights (and LoRA, where the block has it) of the file into g->block. */
void fixture_set_weights(struct fixture *g);
/* PEFT's B [out, r E], expert fastest, rows out0.. -> kt's [E, rows, r]; back: the other way. */
void fixture_peft_b(const double *file, double *kt, int64_t E, int64_t r, int64_t rows,
		    int64_t out0, bool back);

/* fixture_router.c, where router_scale is set: adds what grad_x has by way of the router. grad_weights [T, k] */
void fixture_router_path(struct fixture *g, const double *grad_weights, double *grad_x);

#endif
