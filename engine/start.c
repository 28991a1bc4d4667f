/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The first tasks of a graph. With a worker on every core, the submitting thread takes one worker's core. A
 * task that StarPU queues there waits until all is submitted, and lws lets nobody steal from a worker that is
 * not busy: all workers would wait (0.65 ms for one layer of 128 experts). So the first tasks that an idle
 * engine gets may run on all workers but that one.
 */
#include "engine/internal.h"

#include <sched.h>

/* join, a few blocks of tokens, plan: what the others wait for. Larger starts have tasks for every worker. */
#define FIRST_TASKS 8

static void clear_bit(uint32_t *mask, int w)
{
	mask[w / 32] &= ~(1u << (w % 32));
}

enum moe_status moe_start_make(struct moe_engine *e)
{
	struct moe_start *s = &e->start;

	if (e->n_workers < 2 || !moe_engine_policy_obeys_masks(e->policy))
		return MOE_OK;
	s->cpu = moe_calloc((size_t)e->n_workers, sizeof *s->cpu);
	s->others = moe_calloc((size_t)e->n_workers, sizeof *s->others);
	s->part = moe_calloc((size_t)e->n_workers, sizeof *s->part);
	if (!s->cpu || !s->others || !s->part)
		return moe_fail(MOE_ERR_NOMEM, "no memory for masks of %d workers", e->n_workers);
	for (int w = 0; w < e->n_workers; w++) {
		s->cpu[w] = moe_engine_worker_cpu(e, w);
		for (int i = 0; i < e->n_workers; i++)
			s->others[w][0][i / 32] |= 1u << (i % 32);
		for (int p = 0; p < e->n_parts; p++)
			if (moe_engine_part_has_worker(e, p, w)) {
				s->part[w] = p;
				memcpy(s->others[w][1], e->parts[p].mask, sizeof e->parts[p].mask);
			}
		clear_bit(s->others[w][0], w);
		clear_bit(s->others[w][1], w);
	}
	return MOE_OK;
}

void moe_start_free(struct moe_engine *e)
{
	moe_free(e->start.cpu);
	moe_free(e->start.part);
	moe_free(e->start.others);
}

void moe_start_begin(struct moe_engine *e)
{
	struct moe_start *s = &e->start;
	int cpu = sched_getcpu();

	s->left = 0;
	for (int w = 0; s->cpu && cpu >= 0 && w < e->n_workers; w++)
		if (s->cpu[w] == cpu && !atomic_load(&e->outstanding)) {
			s->worker = w;
			s->left = FIRST_TASKS;
		}
}

uint32_t *moe_start_mask(struct moe_engine *e, int part)
{
	struct moe_start *s = &e->start;
	bool bound = part >= 0 && e->n_parts > 1 && e->params.placement == MOE_PLACEMENT_STRICT;

	if (s->left <= 0)
		return NULL;
	s->left--;
	if (!bound)
		return s->others[s->worker][0];
	return part == s->part[s->worker] && e->parts[part].n_workers > 1 ? s->others[s->worker][1] : NULL;
}
