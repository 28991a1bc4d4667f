/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensors: StarPU void handles with a name, an "initialised" bit and the shadow of the implicit
 * dependencies. StarPU aborts on reading what was never written; our bit makes it a status.
 */
#include "engine/internal.h"

#include <stdio.h>

enum moe_status moe_tensor_create(struct moe_engine *e, const char *name, size_t bytes, int part,
				  struct moe_tensor **out)
{
	struct moe_tensor *t;

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
	pthread_mutex_lock(&e->lock);
	starpu_void_data_register(&t->handle);
	t->id = ++e->next_tensor;
	e->n_tensors++;
	pthread_mutex_unlock(&e->lock);
	*out = t;
	return MOE_OK;
}

void moe_tensor_destroy(struct moe_tensor *t)
{
	struct moe_engine *e;

	if (!t)
		return;
	e = t->engine;
	if (moe_engine_check(e) == MOE_OK) {
		moe_engine_resume(e); /* unregistering blocks until the handle's tasks have run */
		starpu_data_unregister(t->handle);
		pthread_mutex_lock(&e->lock);
		e->n_tensors--;
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

static enum moe_status push(uint64_t **list, int *n, int *cap, uint64_t id)
{
	uint64_t *grown;

	for (int i = 0; i < *n; i++)
		if ((*list)[i] == id)
			return MOE_OK;
	if (*n == *cap) {
		int want = *cap ? 2 * *cap : 8;

		grown = moe_realloc(*list, (size_t)want, sizeof **list);
		if (!grown)
			return moe_fail(MOE_ERR_NOMEM, "no memory for the dependency tracker");
		*list = grown;
		*cap = want;
	}
	(*list)[(*n)++] = id;
	return MOE_OK;
}

/*
 * What StarPU infers from sequential data access: a reader waits for the last writer; a writer
 * waits for the readers since, or for the last writer if there were none.
 */
enum moe_status moe_tracker_access(struct moe_tensor *t, uint64_t task, enum moe_mode mode,
				   uint64_t **deps, int *n_deps, int *cap_deps)
{
	if (mode == MOE_R) {
		if (t->last_writer)
			MOE_TRY(push(deps, n_deps, cap_deps, t->last_writer));
		return push(&t->readers, &t->n_readers, &t->cap_readers, task);
	}
	for (int i = 0; i < t->n_readers; i++)
		MOE_TRY(push(deps, n_deps, cap_deps, t->readers[i]));
	if (!t->n_readers && t->last_writer)
		MOE_TRY(push(deps, n_deps, cap_deps, t->last_writer));
	t->last_writer = task;
	t->n_readers = 0;
	return MOE_OK;
}
