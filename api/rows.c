/* SPDX-License-Identifier: Apache-2.0 */
/* Rows that calls hand to each other: one tensor per block of tokens, found by the data pointer of an array. */
#include "api/rows.h"

#include "graphs/stream.h"

#include <pthread.h>

struct moe_rows {
	struct moe_rows *next;
	struct moe_engine *engine;
	const void *data;
	int64_t tokens;
	int n_blocks;
	struct moe_tensor **block;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct moe_rows *list;

/* Under the lock. */
static struct moe_rows *find(const void *data)
{
	struct moe_rows *r = list;

	while (r && r->data != data)
		r = r->next;
	return r;
}

static bool take_name(struct moe_rows *r)
{
	bool free_name;

	pthread_mutex_lock(&lock);
	free_name = !find(r->data);
	if (free_name) {
		r->next = list;
		list = r;
	}
	pthread_mutex_unlock(&lock);
	return free_name;
}

enum moe_status moe_rows_create(struct moe_engine *engine, const void *data, int64_t tokens,
				struct moe_rows **out)
{
	struct moe_rows *r;
	enum moe_status st;

	if (!out)
		return moe_fail(MOE_ERR_ARG, "out is NULL");
	*out = NULL;
	MOE_TRY(moe_engine_check(engine));
	if (!data || tokens < 1 || tokens > INT32_MAX / 2)
		return moe_fail(MOE_ERR_ARG,
				"rows: %s, %lld tokens; data and at least one token are needed",
				data ? "data" : "no data", (long long)tokens);
	r = moe_calloc(1, sizeof *r);
	if (!r)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the order of %lld rows",
				(long long)tokens);
	*r = (struct moe_rows){ .engine = engine, .data = data, .tokens = tokens };
	r->n_blocks = moe_token_blocks((int)tokens);
	st = moe_tensors_create(engine, "rows", r->n_blocks, true, &r->block);
	if (st == MOE_OK && !take_name(r)) {
		moe_tensors_destroy(r->block, r->n_blocks);
		st = moe_fail(MOE_ERR_ARG, "rows: the order of this data is kept already");
	}
	if (st != MOE_OK) {
		moe_free(r);
		return st;
	}
	*out = r;
	return MOE_OK;
}

void moe_rows_destroy(struct moe_rows *r)
{
	struct moe_rows **at;

	if (!r)
		return;
	pthread_mutex_lock(&lock);
	for (at = &list; *at && *at != r; at = &(*at)->next)
		;
	if (*at)
		*at = r->next;
	pthread_mutex_unlock(&lock);
	if (moe_engine_check(r->engine) == MOE_OK)
		moe_tensors_destroy(r->block, r->n_blocks);
	moe_free(r);
}

struct moe_tensor *moe_rows_tensor(const struct moe_array *a, int block)
{
	struct moe_tensor *t = NULL;
	struct moe_rows *r;

	pthread_mutex_lock(&lock);
	r = find(a->data);
	if (r && block < r->n_blocks)
		t = r->block[block];
	pthread_mutex_unlock(&lock);
	return t;
}

enum moe_status moe_rows_check(const char *name, const struct moe_array *a)
{
	int64_t tokens = INT64_MAX;
	struct moe_rows *r;

	pthread_mutex_lock(&lock);
	r = find(a->data);
	if (r)
		tokens = r->tokens;
	pthread_mutex_unlock(&lock);
	return a->shape[0] <= tokens ? MOE_OK
				     : moe_fail(MOE_ERR_ARG,
						"%s has %lld rows, moe_rows_create of its data was "
						"told %lld: give it the most "
						"that any call has",
						name, (long long)a->shape[0], (long long)tokens);
}
