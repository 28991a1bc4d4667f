/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Predicted microseconds of one worker while m->workers of them are busy. Pure: the same numbers go
 * to StarPU's performance models (codelets' cost_us) and to the decisions made before submission.
 */
#ifndef MOE_ENGINE_COST_H
#define MOE_ENGINE_COST_H

#include "engine/machine.h"

/*
 * The same functions count: between moe_work_begin and _end the calling thread's calls add up what they would
 * have predicted the time of, and return 0. So kinds have one model, not two.
 */
struct moe_work {
	double flops;	      /* a multiply-add is two */
	double weights;	      /* bytes of a GEMM's second operand; also gradients that are added to */
	double read, written; /* bytes of everything else that is known to move */
};
void moe_work_begin(struct moe_work *w); /* zeroes it */
void moe_work_end(void);

/* GFLOP/s with that many rows, between the measured points geometrically. */
double moe_cost_rate(const struct moe_machine *m, enum moe_gemm direction, double rows);
/* rows x n x k multiply-adds on a weight that comes from memory: the slower of the two. */
double moe_cost_gemm_us(const struct moe_machine *m, enum moe_gemm direction, double rows, double n,
			double k, double bytes_per_weight);
/* Work that does nothing but move bytes. */
double moe_cost_stream_us(const struct moe_machine *m, double read, double written);
/* Packing that many bytes of source. */
double moe_cost_pack_us(const struct moe_machine *m, double bytes);
/* Scalar code. */
double moe_cost_cycles_us(const struct moe_machine *m, double cycles);
/* What a task takes beside its work. */
double moe_cost_task_us(const struct moe_machine *m);

#endif
