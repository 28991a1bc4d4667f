/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensors: StarPU void handles with a name, an "initialised" bit and the shadow of the implicit
 * dependencies. StarPU aborts on reading what was never written; our bit makes it a status.
 */
#include "engine/internal.h"

#include <stdlib.h>

enum moe_status moe_tensor_create(struct moe_engine *e, const char *name, size_t bytes, int part,
				  struct moe_tensor **out)
{
	struct moe_tensor *t;
	enum moe_status st;

	*out = NULL;
	MOE_TRY(moe_engine_check(e));
	if (part >= e->n_parts)
		return moe_fail(MOE_ERR_ARG, "tensor %s: part %d of %d", name, part, e->n_parts);
	t = moe_calloc(1, sizeof *t);
	if (t)
		t->name = moe_strdup(name);
	if (!t || !t->name) {
		moe_free(t);
		return moe_fail(MOE_ERR_NOMEM, "no memory for tensor %s", name);
	}
	t->engine = e;
	t->bytes = bytes;
	t->part = part;
	MOE_TRY_GOTO(moe_engine_lock(e), st, fail);
	if (!e->dry)
		starpu_void_data_register(&t->handle);
	t->id = ++e->next_tensor;
	e->n_tensors++;
	pthread_mutex_unlock(&e->lock);
	*out = t;
	return MOE_OK;
fail:
	moe_free(t->name);
	moe_free(t);
	return st;
}

void moe_tensor_destroy(struct moe_tensor *t)
{
	struct moe_engine *e;
	bool locked;

	if (!t)
		return;
	e = t->engine;
	if (e->dry) {
		e->n_tensors--;
	} else if (moe_engine_check(e) == MOE_OK) {
		if (moe_engine_check_not_task("destroying a tensor") != MOE_OK)
			return; /* StarPU would abort */
		moe_engine_drain_begin(e); /* unregistering waits for the handle's tasks */
		starpu_data_unregister(t->handle);
		moe_engine_drain_end(e);
		locked = moe_engine_lock(e) == MOE_OK; /* or this thread has it already */
		e->n_tensors--;
		if (locked)
			pthread_mutex_unlock(&e->lock);
	}
	moe_free(t->readers);
	moe_free(t->name);
	moe_free(t);
}

void moe_tensor_set_initialised(struct moe_tensor *t)
{
	t->initialised = true;
}

static int by_id(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

/* Ascending, each once; how many are left. Lists come as runs that ascend, mostly short. */
static int unique(uint64_t *ids, int n)
{
	int kept = 0;

	if (n > 32) {
		qsort(ids, (size_t)n, sizeof *ids, by_id);
	} else {
		for (int i = 1; i < n; i++) {
			uint64_t id = ids[i];
			int j = i;

			for (; j && ids[j - 1] > id; j--)
				ids[j] = ids[j - 1];
			ids[j] = id;
		}
	}
	for (int i = 0; i < n; i++)
		if (!kept || ids[kept - 1] != ids[i])
			ids[kept++] = ids[i];
	return kept;
}

/* Forgets what an earlier observer's tasks did: they are over, and others may have run unseen. */
static void renew(struct moe_tensor *t)
{
	if (t->observed == t->engine->observed)
		return;
	t->observed = t->engine->observed;
	t->last_writer = 0;
	t->n_readers = 0;
}

static enum moe_status reserve_reader(struct moe_tensor *t)
{
	int want = t->cap_readers ? 2 * t->cap_readers : 8;
	uint64_t *grown;

	if (t->n_readers < t->cap_readers)
		return MOE_OK;
	grown = moe_realloc(t->readers, (size_t)want, sizeof *grown);
	if (!grown)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the dependency tracker");
	t->readers = grown;
	t->cap_readers = want;
	return MOE_OK;
}

/*
 * What StarPU infers from sequential data access: a reader waits for the last writer; a writer
 * waits for the readers since, or for the last writer if there were none.
 */
static int tensor_deps(const struct moe_tensor *t, enum moe_mode mode, uint64_t *deps)
{
	if (mode != MOE_R && t->n_readers) {
		memcpy(deps, t->readers, (size_t)t->n_readers * sizeof *deps);
		return t->n_readers;
	}
	if (!t->last_writer)
		return 0;
	*deps = t->last_writer;
	return 1;
}

static enum moe_status reserve_deps(struct moe_dep_buffer *d, size_t most)
{
	size_t cap = (size_t)MOE_MAX(d->cap, 64);
	uint64_t *grown;

	if (most <= (size_t)d->cap)
		return MOE_OK;
	while (cap < most)
		cap *= 2;
	grown = moe_realloc(d->id, cap, sizeof *grown);
	if (!grown)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the dependency tracker");
	d->id = grown;
	d->cap = (int)cap;
	return MOE_OK;
}

enum moe_status moe_tracker_deps(const struct moe_access *access, int n,
				 struct moe_dep_buffer *deps)
{
	size_t most = 0;
	int count = 0;

	deps->n = 0;
	for (int i = 0; i < n; i++) {
		renew(access[i].tensor);
		most += (size_t)MOE_MAX(access[i].tensor->n_readers, 1);
		MOE_TRY(reserve_reader(access[i].tensor));
	}
	MOE_TRY(reserve_deps(deps, most));
	for (int i = 0; i < n; i++)
		count += tensor_deps(access[i].tensor, access[i].mode, deps->id + count);
	deps->n = unique(deps->id, count);
	return MOE_OK;
}

void moe_tracker_commit(const struct moe_access *access, int n, uint64_t task)
{
	for (int i = 0; i < n; i++) {
		struct moe_tensor *t = access[i].tensor;

		if (access[i].mode == MOE_R) {
			t->readers[t->n_readers++] = task;
			continue;
		}
		t->last_writer = task;
		t->n_readers = 0;
	}
}
