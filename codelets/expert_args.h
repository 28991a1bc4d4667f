/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments that all codelets over one expert group share. */
#ifndef MOE_CODELETS_EXPERT_ARGS_H
#define MOE_CODELETS_EXPERT_ARGS_H

#include "codelets/cost.h"
#include "codelets/moe.h"

struct moe_codelet;
struct moe_worker;

struct moe_expert_args {
	const struct moe_experts *layer;
	const struct moe_experts_state *state;
	int part, group;
	int c0, c1; /* chunks of I or H */
	bool head;  /* gather or scatter first: this is the group's only slice */
	bool first; /* first micro-batch of the window: clear the gradients */
	enum moe_expert_matrix matrix; /* weight_grad's */
	int groups; /* lora_grad's: this one and the next of the same owner */
	bool last;  /* down's: among the last groups of its layer (graphs/cut.h) */
	const struct moe_transposed *copy; /* what a backward multiplies by; NULL: the weights */
};

/* What a codelet does with one expert of the group; rows->m may be 0 where empty ones are wanted.
 */
typedef void (*moe_expert_op)(const struct moe_expert_args *a, int index,
			      const struct moe_expert *e, struct moe_expert_rows *rows,
			      struct moe_worker *worker);
/* Runs op on the group's experts in order; without `empty` only on those that have rows. */
void moe_group_run(const struct moe_expert_args *a, bool empty, moe_expert_op op,
		   struct moe_worker *worker);
/* Rows of the group in this micro-batch. */
int64_t moe_group_rows(const struct moe_expert_args *a);
/* A backward's GEMMs are the forward's where they have transposed copies. */
static inline enum moe_gemm moe_backward_direction(const struct moe_expert_args *a)
{
	return a->copy ? MOE_GEMM_FORWARD : MOE_GEMM_BACKWARD;
}
/* Bytes of one packed expert weight in the group's part. */
double moe_group_weight_bytes(const struct moe_expert_args *a);
/* Predicted microseconds of a task that does a GEMM of n columns and depth k with each expert's rows. */
double moe_group_gemm_us(const struct moe_expert_args *a, enum moe_gemm direction, double n, double k,
			 double bytes_per_weight);
/* Of copying the group's rows of H and multiplying them with `thin` f32 rows. */
double moe_group_rows_us(const struct moe_expert_args *a, int thin);

#endif
