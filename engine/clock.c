/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the workers' time goes, cheap enough to be always counted. The gap before a task is split
 * by that task's history: until it was submitted the worker lacked submissions, until it was ready
 * it lacked dependencies, the rest is the runtime's (queues, waking up, callbacks). moesaic-trace
 * has the exact form.
 */
#include "engine/internal.h"

#include <time.h>

static int64_t read_clock(clockid_t id)
{
	struct timespec ts;

	clock_gettime(id, &ts);
	return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

int64_t moe_now_ns(void)
{
	return read_clock(CLOCK_MONOTONIC);
}

int64_t moe_thread_cpu_ns(void)
{
	return read_clock(CLOCK_THREAD_CPUTIME_ID);
}

/* One writer. */
static void add(atomic_llong *sum, int64_t ns)
{
	if (ns > 0)
		atomic_store_explicit(sum, atomic_load_explicit(sum, memory_order_relaxed) + ns,
				      memory_order_relaxed);
}

void moe_clock_start(struct moe_worker_clock *c, const struct moe_record *r, int64_t now)
{
	int64_t at = c->last_end;

	if (!at)
		return;
	add(&c->idle[MOE_IDLE_SUBMISSION], MOE_MIN(r->submit, now) - at);
	at = MOE_MAX(at, MOE_MIN(r->submit, now));
	add(&c->idle[MOE_IDLE_DEPENDENCY], MOE_MIN(r->ready, now) - at);
	at = MOE_MAX(at, MOE_MIN(r->ready, now));
	add(&c->idle[MOE_IDLE_RUNTIME], now - at);
}

void moe_clock_end(struct moe_worker_clock *c, int64_t start, int64_t end)
{
	add(&c->busy, end - start);
	c->last_end = end;
}

void moe_engine_idle(const struct moe_engine *e, struct moe_idle *out)
{
	struct moe_engine *engine = (struct moe_engine *)e;

	*out = (struct moe_idle){ 0 };
	for (int w = 0; w < e->n_workers; w++) {
		struct moe_worker_clock *c = &engine->clock[w];

		out->busy += 1e-9 * (double)atomic_load_explicit(&c->busy, memory_order_relaxed);
		for (int i = 0; i < MOE_IDLE_CAUSES; i++)
			out->cause[i] += 1e-9 * (double)atomic_load_explicit(&c->idle[i],
									     memory_order_relaxed);
	}
}

const char *moe_idle_cause_name(int cause)
{
	static const char *const names[MOE_IDLE_CAUSES] = { "submission", "dependency", "runtime" };

	return cause >= 0 && cause < MOE_IDLE_CAUSES ? names[cause] : NULL;
}
