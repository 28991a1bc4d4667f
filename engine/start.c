/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The first tasks of a graph. With a worker on every core, the submitting thread takes one worker's core. A
 * task that StarPU queues there waits until all is submitted, and lws lets nobody steal from a worker that is
 * not busy: all workers would wait (0.65 ms for one layer of 128 experts). So the first tasks that an idle
 * engine gets may run on all workers but that one.
 */
#include "engine/internal.h"

#include <sched.h>

static void clear_bit(uint32_t *mask, int w)
{
	mask[w / 32] &= ~(1u << (w % 32));
}

enum moe_status moe_start_make(struct moe_engine *e)
{
	struct moe_start_worker *s;

	if (e->n_workers < 2 || !e->policy_masks)
		return MOE_OK;
	s = e->start.worker = moe_calloc((size_t)e->n_workers, sizeof *s);
	if (!s)
		return moe_fail(MOE_ERR_NOMEM, "no memory for masks of %d workers", e->n_workers);
	for (int w = 0; w < e->n_workers; w++, s++) {
		s->cpu = moe_engine_worker_cpu(e, w);
		s->part = moe_engine_part_of_worker(e, w);
		for (int i = 0; i < e->n_workers; i++)
			s->any[i / 32] |= 1u << (i % 32);
		memcpy(s->same, e->parts[s->part].mask, sizeof s->same);
		clear_bit(s->any, w);
		clear_bit(s->same, w);
	}
	return MOE_OK;
}

void moe_start_free(struct moe_engine *e)
{
	moe_free(e->start.worker);
}

void moe_start_begin(struct moe_engine *e)
{
	struct moe_start *s = &e->start;
	int cpu = sched_getcpu();

	s->left = 0;
	if (!s->worker || cpu < 0 || atomic_load(&e->outstanding))
		return;
	for (int w = 0; w < e->n_workers; w++)
		if (s->worker[w].cpu == cpu) {
			s->here = &s->worker[w];
			s->left = MOE_FIRST_TASKS;
		}
}

uint32_t *moe_start_mask(struct moe_engine *e, int part)
{
	struct moe_start *s = &e->start;

	if (s->left <= 0)
		return NULL;
	s->left--;
	if (part < 0)
		return s->here->any;
	return part == s->here->part && e->parts[part].n_workers > 1 ? s->here->same : NULL;
}
