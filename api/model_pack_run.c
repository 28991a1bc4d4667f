/* SPDX-License-Identifier: Apache-2.0 */
/* Does the jobs of a pack on all workers' cores; progress and warnings in the order of the tensors. */
#include "api/model_pack_jobs.h"

#include "engine/deadline.h"

#include <stdio.h>

static void run_job(struct moe_fetch *f, struct moe_pack *p, const struct moe_pack_job *j)
{
	struct moe_pack_tensor *t = &p->tensor[j->tensor];
	enum moe_status st = MOE_OK;
	int64_t bad = 0;

	if (!p->failed) {
		st = j->way(f, p, j, &bad);
		if (st != MOE_OK && !strstr(moe_last_error(), t->name))
			st = moe_fail_in(st, "%s", t->name);
	}
	pthread_mutex_lock(&p->lock);
	if (st != MOE_OK && p->status == MOE_OK) {
		p->status = st;
		snprintf(p->error, sizeof p->error, "%s", moe_last_error());
		p->failed = true;
	}
	t->non_finite += bad;
	if (--t->left == 0)
		pthread_cond_signal(&p->done);
	pthread_mutex_unlock(&p->lock);
}

/* The part's own jobs, then what is left of others. */
static void work(void *arg, int part)
{
	struct moe_pack *p = arg;
	struct moe_fetch f = { .st = p->st, .done = &p->fetched };
	int parts = moe_engine_parts(p->m->engine);

	for (int i = 0; i < parts; i++) {
		int of = (part + i) % parts;
		size_t at;

		while ((at = p->next[of]++) < p->first[of + 1])
			run_job(&f, p, &p->job[at]);
	}
	moe_fetch_free(&f);
}

static void show(const struct moe_pack *p, const char *name)
{
	const struct moe_model_params *m = &p->m->params;

	if (m->progress)
		m->progress(name, p->fetched, p->total, m->user);
}

/* Until the tensor is done; progress meanwhile. */
static void wait_for(struct moe_pack *p, struct moe_pack_tensor *t)
{
	pthread_mutex_lock(&p->lock);
	while (t->left) {
		struct timespec until = moe_deadline(MOE_PROGRESS_NS);

		pthread_cond_timedwait(&p->done, &p->lock, &until);
		pthread_mutex_unlock(&p->lock);
		show(p, t->name);
		pthread_mutex_lock(&p->lock);
	}
	pthread_mutex_unlock(&p->lock);
}

/* Tensors in their order, as soon as they are done. */
static void report(void *arg)
{
	struct moe_pack *p = arg;
	struct moe_model *m = p->m;

	for (size_t i = 0; i < p->n_tensors; i++) {
		struct moe_pack_tensor *t = &p->tensor[i];

		wait_for(p, t);
		m->non_finite += t->non_finite;
		if (t->non_finite)
			moe_log(MOE_LOG_WARNING, "%s has %lld values that are NaN or Inf", t->name,
				(long long)t->non_finite);
		show(p, t->name);
	}
}

/* Stable: within a part in the order of the file. False: no memory, all stays with part 0. */
static bool sort_by_part(struct moe_pack *p)
{
	int parts = moe_engine_parts(p->m->engine);
	struct moe_pack_job *sorted = moe_calloc(MOE_MAX(p->n_jobs, (size_t)1), sizeof *sorted);

	if (!sorted)
		return false;
	for (size_t i = 0; i < p->n_jobs; i++)
		p->first[p->job[i].part + 1]++;
	for (int i = 0; i < parts; i++) {
		p->first[i + 1] += p->first[i];
		p->next[i] = p->first[i];
	}
	for (size_t i = 0; i < p->n_jobs; i++)
		sorted[p->next[p->job[i].part]++] = p->job[i];
	for (int i = 0; i < parts; i++)
		p->next[i] = p->first[i];
	moe_free(p->job);
	p->job = sorted;
	return true;
}

enum moe_status moe_pack_run(struct moe_pack *p)
{
	int parts = moe_engine_parts(p->m->engine), threads;
	double start = moe_now(), seconds;
	int64_t before = p->fetched;

	if (!sort_by_part(p))
		for (int i = 1; i <= parts; i++)
			p->first[i] = p->n_jobs;
	threads = moe_engine_parallel(p->m->engine, work, report, p);
	seconds = moe_now() - start;
	before = p->fetched - before;
	moe_log(MOE_LOG_INFO,
		"read and packed %.2f GB of weights in %.2f s (%.1f GB/s, %d threads)",
		(double)before * 1e-9, seconds, (double)before * 1e-9 / MOE_MAX(seconds, 1e-9),
		threads);
	return p->status == MOE_OK ? MOE_OK : moe_fail(p->status, "%s", p->error);
}
