/* SPDX-License-Identifier: Apache-2.0 */
#include "graphs/cut.h"
#include "codelets/cost.h"
#include "engine/engine.h"

#include <math.h>

double moe_load_active(const struct moe_load *l)
{
	double missed = 1 - (double)MOE_MIN(l->k, l->E) / l->E;

	return l->E * (1 - pow(missed, MOE_MAX(l->T, 1)));
}

double moe_load_rows(const struct moe_load *l)
{
	return (double)MOE_MAX(l->T, 1) * l->k / moe_load_active(l);
}

/* Predictions are for the workers that the load has, whatever else m serves. */
static struct moe_machine with_workers(const struct moe_load *l, const struct moe_machine *m)
{
	struct moe_machine own = *m;

	own.workers = MOE_MAX(l->workers, 1);
	return own;
}

double moe_load_expert_us(const struct moe_load *l, const struct moe_machine *m)
{
	struct moe_machine own = with_workers(l, m);
	double bytes = l->weight_bytes > 0 ? l->weight_bytes : 2;
	double rows = moe_load_rows(l), I = (double)l->I / l->P, us = 0;

	for (int d = 0; d < MOE_GEMM_DIRECTIONS; d++)
		us += moe_cost_gemm_us(&own, (enum moe_gemm)d, rows, 2 * I, l->H, bytes) +
		      moe_cost_gemm_us(&own, (enum moe_gemm)d, rows, l->H, I, bytes);
	return us / 4 * moe_load_active(l) / l->E;
}

/* With fewer, workers would go without. */
static int least_groups(const struct moe_load *l)
{
	return MOE_TASKS_PER_WORKER / 2 * MOE_MAX(l->workers, 1);
}

int moe_group_size_choose(const struct moe_load *l, const struct moe_machine *m)
{
	double middle = 0.5 * (MOE_TASK_LEAST_US + MOE_TASK_BETTER_US);
	double us = moe_load_expert_us(l, m), size = us > 0 ? round(middle / us) : l->E;
	int most = MOE_MAX(1, (int)((int64_t)l->E * l->P / least_groups(l)));

	return (int)MOE_MIN(MOE_MAX(size, 1.0), (double)MOE_MIN(most, l->E));
}

/*
 * Slicing pays only where groups with work are fewer than about 8 per worker (measured: 2 slices of each of 128 experts
 * made a layer 2 % slower), and each slice of a group without rows costs a task.
 */
static int choose_slices(const struct moe_load *l, const struct moe_machine *m, int G)
{
	double group_us = moe_load_expert_us(l, m) * l->E / MOE_MAX(G, 1);
	double groups = MOE_MAX(1.0, MOE_MIN((double)G, moe_load_active(l))) * l->P;
	int tasks = MOE_TASKS_PER_WORKER * MOE_MAX(l->workers, 1);
	int want = groups >= tasks ? 1 : (int)ceil(tasks / groups);

	return MOE_MAX(1, MOE_MIN(want, (int)(group_us / MOE_TASK_LEAST_US)));
}

/* A group's lora_grad is short, and only the update waits for it: one serves several groups, if it can name their tensors. */
static int choose_lora_groups(const struct moe_load *l, const struct moe_machine *own, int G, int slices_i)
{
	double us = moe_cost_gemm_us(own, MOE_GEMM_FORWARD, moe_load_rows(l), l->lora_rows, l->H, 2 * sizeof(float)) *
		    moe_load_active(l) / MOE_MAX(G, 1);
	int want = us > 0 ? (int)MOE_MIN(MOE_FILL_US / us, (double)G) : 1;
	int named = (MOE_MAX_TASK_HANDLES - 3) / (l->P * slices_i + 1);

	return MOE_MAX(1, MOE_MIN(MOE_MIN(want, named), G / least_groups(l)));
}

struct moe_cut moe_cut_for(const struct moe_load *l, const struct moe_machine *m, int G,
			   int slices_i, int slices_h)
{
	struct moe_machine own = with_workers(l, m);
	int chunks_i = MOE_MAX(1, moe_chunks((l->I - 1) / l->P + 1));
	int chunks_h = MOE_MAX(1, moe_chunks(l->H)), want = choose_slices(l, m, G);
	double n = (double)l->H * sizeof(float), T = MOE_MAX(l->T, 1);
	double combine_us = moe_cost_stream_us(&own, T * l->k * n, T * n);

	/* lora_grad and update name all slices of a group, next to a few other tensors */
	chunks_i = MOE_MIN(chunks_i, MOE_MAX(1, (MOE_MAX_TASK_HANDLES - 8) / l->P));
	slices_i = MOE_MIN(slices_i ? slices_i : want, chunks_i);
	return (struct moe_cut){
		.slices_i = slices_i,
		.slices_h = MOE_MIN(slices_h ? slices_h : want, chunks_h),
		.combine_blocks = (int)MOE_MIN(MOE_MAX(combine_us / MOE_TASK_LEAST_US, 1.0),
					       (double)chunks_h),
		.lora_groups = choose_lora_groups(l, &own, G, slices_i),
		.last_groups = MOE_MIN(G, 1 + 2 * own.workers / l->P),
	};
}

static struct moe_load load_of(const struct moe_experts *l, int T, int W)
{
	const struct moe_weight *gate = l->part[0].gate;

	return (struct moe_load){
		.E = l->E,
		.k = l->k,
		.H = l->H,
		.P = l->P,
		.I = l->I,
		.T = T,
		.workers = W,
		.weight_bytes = gate ? moe_weight_bytes_each(gate) : 0,
		.lora_rows = l->r ? l->ra + l->r : 0,
	};
}

struct moe_cut moe_cut_choose(const struct moe_experts *l, int T, int W, int slices_i, int slices_h)
{
	struct moe_load load = load_of(l, T, W);

	return moe_cut_for(&load, moe_machine(), l->G, slices_i, slices_h);
}
