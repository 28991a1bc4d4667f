/* SPDX-License-Identifier: Apache-2.0 */
/* What the workers did: counted by the engine's observer, each worker in its own cache lines. */
#include "bench/layer/layer_bench.h"

#include "engine/base.h"

#include <pthread.h>
#include <time.h>

#define MAX_WORKERS 256

static struct watched {
	_Alignas(64) bool known;
	clockid_t clock; /* CPU time of the worker's thread */
	cpu_set_t cpus;
	struct layer_kind kind[LAYER_MAX_KINDS];
} workers[MAX_WORKERS];

static void executed(const struct moe_task_event *e, void *user)
{
	struct watched *w = &workers[e->worker];
	struct layer_kind *k = &w->kind[e->tag.kind];
	double wall = e->end - e->start;

	(void)user;
	if (!w->known) {
		w->known = !pthread_getcpuclockid(pthread_self(), &w->clock) &&
			   !pthread_getaffinity_np(pthread_self(), sizeof w->cpus, &w->cpus);
	}
	k->tasks++;
	k->empty += !e->tag.rows;
	k->wall += wall;
	k->cpu += e->cpu;
	if (wall > k->longest)
		k->longest = wall;
	if (e->tag.group >= k->groups)
		k->groups = e->tag.group + 1;
	if (e->tag.slice >= k->slices)
		k->slices = e->tag.slice + 1;
	k->rows += e->tag.rows;
	if (e->tag.rows > k->rows_max)
		k->rows_max = e->tag.rows;
}

enum moe_status layer_watch_start(struct moe_engine *engine)
{
	static const struct moe_observer observer = { .executed = executed };
	struct moe_engine_info info = { .struct_size = sizeof info };
	enum moe_status st = moe_engine_get_info(engine, &info);

	if (st == MOE_OK && info.workers > MAX_WORKERS)
		return moe_fail(MOE_ERR_UNSUPPORTED, "%d workers; at most %d are watched",
				info.workers, MAX_WORKERS);
	return st == MOE_OK ? moe_engine_observe(engine, &observer) : st;
}

void layer_watch_reset(void)
{
	for (int i = 0; i < MAX_WORKERS; i++)
		if (workers[i].known)
			memset(workers[i].kind, 0, sizeof workers[i].kind);
}

double layer_watch_busy(void)
{
	double sum = 0;

	for (int i = 0; i < MAX_WORKERS; i++)
		for (int k = 0; workers[i].known && k < LAYER_MAX_KINDS; k++)
			sum += workers[i].kind[k].wall;
	return sum;
}

double layer_watch_cpu(void)
{
	double sum = 0;

	for (int i = 0; i < MAX_WORKERS; i++) {
		struct timespec ts;

		if (workers[i].known && !clock_gettime(workers[i].clock, &ts))
			sum += (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
	}
	return sum;
}

void layer_watch_kinds(struct layer_kind kinds[LAYER_MAX_KINDS])
{
	memset(kinds, 0, LAYER_MAX_KINDS * sizeof *kinds);
	for (int i = 0; i < MAX_WORKERS; i++)
		for (int k = 0; workers[i].known && k < LAYER_MAX_KINDS; k++) {
			const struct layer_kind *from = &workers[i].kind[k];
			struct layer_kind *to = &kinds[k];

			to->tasks += from->tasks;
			to->empty += from->empty;
			to->wall += from->wall;
			to->cpu += from->cpu;
			to->rows += from->rows;
			if (from->longest > to->longest)
				to->longest = from->longest;
			if (from->groups > to->groups)
				to->groups = from->groups;
			if (from->slices > to->slices)
				to->slices = from->slices;
			if (from->rows_max > to->rows_max)
				to->rows_max = from->rows_max;
		}
}

bool layer_watch_cpus(int worker, cpu_set_t *out)
{
	if (worker < 0 || worker >= MAX_WORKERS || !workers[worker].known)
		return false;
	*out = workers[worker].cpus;
	return true;
}
