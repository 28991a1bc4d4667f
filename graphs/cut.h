/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the work of a MoE layer is cut into tasks, from predicted times (engine/cost.h). Changes no
 * bit of any result. Rules: docs/cost-model.md.
 */
#ifndef MOE_GRAPHS_CUT_H
#define MOE_GRAPHS_CUT_H

#include "codelets/moe.h"
#include "engine/cost.h"

#define MOE_TASK_LEAST_US 500.0 /* a task below costs more than 1-2 % in overhead */
#define MOE_TASK_BETTER_US 1000.0
#define MOE_TASKS_PER_WORKER 8 /* from here on slices gain nothing */
#define MOE_FILL_US 250.0 /* a task that fills gaps: larger ones stick out at the end */

struct moe_cut {
	int slices_i,
		slices_h;   /* tasks per group over I (gate_up, down_bwd) and over H (down, ...) */
	int combine_blocks; /* tasks per part over H */
	int lora_groups;    /* groups of one owner that a lora_grad serves */
	int last_groups;    /* of each part: their down gives way to every gate_up */
};

/* A layer's experts and the micro-batch that is expected. */
struct moe_load {
	int E, k, H, P;
	int64_t I; /* of all parts */
	int T, workers;
	double weight_bytes; /* of one packed weight; 0: 2 */
	int lora_rows;	     /* of H: A of gate and up, B of down; 0: no LoRA */
};

/* Experts that T tokens reach, if every choice is equally likely. */
double moe_load_active(const struct moe_load *l);
/* Rows of one that is reached: T k over those. */
double moe_load_rows(const struct moe_load *l);
/* The mean over the four GEMM tasks (gate_up, down and their backwards) of one expert in one part,
 * reached or not. */
double moe_load_expert_us(const struct moe_load *l, const struct moe_machine *m);

/*
 * Experts per group: the number that brings a group's mean task next to the middle of least and
 * better, but never fewer groups than half of MOE_TASKS_PER_WORKER for each worker, where there are
 * that many experts.
 */
int moe_group_size_choose(const struct moe_load *l, const struct moe_machine *m);
/* slices 0: chosen. */
struct moe_cut moe_cut_for(const struct moe_load *l, const struct moe_machine *m, int G,
			   int slices_i, int slices_h);
/* The same for a layer, T tokens and W workers, with the process's machine. */
struct moe_cut moe_cut_choose(const struct moe_experts *l, int T, int W, int slices_i,
			      int slices_h);

#endif
