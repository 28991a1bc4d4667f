/* SPDX-License-Identifier: Apache-2.0 */
/* What a codelet is to the engine. Included by codelets/<op>.c and tasks/ only (needs starpu.h). */
#ifndef MOE_ENGINE_CODELET_H
#define MOE_ENGINE_CODELET_H

#include "engine/engine.h"
#include "engine/starpu_compat.h"

/* Where the memory is that a kind works on: for the trace's estimate of local and remote bytes. */
enum moe_home {
	MOE_HOME_NONE = 0, /* anywhere, or not known */
	MOE_HOME_PART,	   /* all of it with the task's part */
	MOE_HOME_LAYER,	   /* the weights with part (layer mod parts), the rest anywhere */
};

struct moe_codelet {
	struct starpu_codelet cl;
	struct starpu_perfmodel model;
	/* the arithmetic; args as given at submission */
	void (*run)(const void *args, struct moe_worker *worker);
	/*
	 * Predicted microseconds; called when the task is ready, so late token counts are final.
	 * Made of engine/cost.h's functions by sums only: they also count flops and bytes (struct
	 * moe_work).
	 */
	double (*cost_us)(const void *args);
	enum moe_home home;
};

void moe_codelet_body(void *buffers[], void *arg);
double moe_codelet_predict(struct starpu_task *task, struct starpu_perfmodel_arch *arch,
			   unsigned n);

/* Defines `struct moe_codelet moe_cl_<op>`. */
#define MOE_CODELET(op, run_fn, cost_fn) MOE_CODELET_AT(op, run_fn, cost_fn, MOE_HOME_NONE)
/* The same with an enum moe_home. */
#define MOE_CODELET_AT(op, run_fn, cost_fn, where_is)                                              \
	struct moe_codelet moe_cl_##op = {                                                         \
		.cl = { .where = STARPU_CPU,                                                       \
			.cpu_funcs = { moe_codelet_body },                                         \
			.cpu_funcs_name = { "moe_codelet_body" },                                  \
			.nbuffers = STARPU_VARIABLE_NBUFFERS,                                      \
			.name = #op,                                                               \
			.model = &moe_cl_##op.model },                                             \
		.model = { .type = STARPU_PER_ARCH,                                                \
			   .symbol = "moe_" #op,                                                   \
			   .arch_cost_function = moe_codelet_predict },                            \
		.run = run_fn,                                                                     \
		.cost_us = cost_fn,                                                                \
		.home = where_is,                                                                  \
	}

#endif
