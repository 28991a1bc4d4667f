/* SPDX-License-Identifier: Apache-2.0 */
#include "graphs/stream.h"

#define FAN_IN 60 /* leaves room for `also` and the output below MOE_MAX_TASK_HANDLES */

enum moe_status moe_tensors_create(struct moe_engine *e, const char *name, int n, bool initialised,
				   struct moe_tensor ***out)
{
	struct moe_tensor **t = moe_calloc((size_t)MOE_MAX(n, 1), sizeof(struct moe_tensor *));

	*out = NULL;
	if (!t)
		return moe_fail(MOE_ERR_NOMEM, "no memory for %d tensors %s", n, name);
	for (int i = 0; i < n; i++) {
		enum moe_status st = moe_tensor_create(e, name, 0, -1, &t[i]);

		if (st != MOE_OK) {
			moe_tensors_destroy(t, i);
			return st;
		}
		if (initialised)
			moe_tensor_set_initialised(t[i]);
	}
	*out = t;
	return MOE_OK;
}

void moe_tensors_destroy(struct moe_tensor **t, int n)
{
	for (int i = 0; t && i < n; i++)
		moe_tensor_destroy(t[i]);
	moe_free(t);
}

enum moe_status moe_stream_create_order(struct moe_engine *e, const char *name, int T_max, int n,
					struct moe_stream *s)
{
	enum moe_status st;

	memset(s, 0, sizeof *s);
	s->T_max = T_max;
	s->n = n;
	s->max_blocks = moe_token_blocks(T_max);
	MOE_TRY_GOTO(moe_tensors_create(e, name, s->max_blocks, false, &s->block), st, fail);
	MOE_TRY_GOTO(moe_tensor_create(e, name, 0, -1, &s->users), st, fail);
	moe_tensor_set_initialised(s->users);
	s->owned = true;
	moe_stream_resize(s, T_max);
	return MOE_OK;
fail:
	moe_stream_destroy(e, s);
	return st;
}

enum moe_status moe_stream_create(struct moe_engine *e, const char *name, int T_max, int n,
				  struct moe_stream *s)
{
	MOE_TRY(moe_stream_create_order(e, name, T_max, n, s));
	s->data = moe_memory_alloc(e, (size_t)T_max * (size_t)n * sizeof(float), -1, "activations");
	if (s->data)
		return MOE_OK;
	moe_stream_destroy(e, s);
	return moe_fail(MOE_ERR_NOMEM, "no memory for activations [%d, %d] (%s)", T_max, n, name);
}

void moe_stream_destroy(struct moe_engine *e, struct moe_stream *s)
{
	moe_tensors_destroy(s->block, s->max_blocks);
	moe_tensor_destroy(s->users);
	moe_memory_free(e, s->data);
	memset(s, 0, sizeof *s);
}

void moe_stream_resize(struct moe_stream *s, int T)
{
	MOE_ASSERT(T <= s->T_max);
	s->T = T;
	s->n_blocks = moe_token_blocks(T);
}

enum moe_status moe_stream_begin(const struct moe_context *c, struct moe_stream *s)
{
	return moe_task_join(c, NULL, 0, s->users, NULL);
}

enum moe_status moe_join_create(struct moe_engine *e, const char *name, int max_inputs,
				struct moe_join *j)
{
	int n = max_inputs;

	memset(j, 0, sizeof *j);
	while (n > FAN_IN) {
		n = (n + FAN_IN - 1) / FAN_IN;
		j->n_mid += n;
	}
	MOE_TRY(moe_tensors_create(e, name, j->n_mid, false, &j->mid));
	return moe_tensor_create(e, name, 0, -1, &j->out);
}

void moe_join_destroy(struct moe_join *j)
{
	moe_tensors_destroy(j->mid, j->n_mid);
	moe_tensor_destroy(j->out);
	memset(j, 0, sizeof *j);
}

enum moe_status moe_join_submit(const struct moe_context *c, struct moe_join *j,
				struct moe_tensor *const *in, int n, struct moe_tensor *also)
{
	int used = 0;

	while (n > FAN_IN) {
		int groups = (n + FAN_IN - 1) / FAN_IN;

		MOE_ASSERT(used + groups <= j->n_mid);
		for (int g = 0; g < groups; g++)
			MOE_TRY(moe_task_join(c, in + g * FAN_IN, MOE_MIN(FAN_IN, n - g * FAN_IN),
					      NULL, j->mid[used + g]));
		in = j->mid + used;
		used += groups;
		n = groups;
	}
	return moe_task_join(c, in, n, also, j->out);
}
