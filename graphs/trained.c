/* SPDX-License-Identifier: Apache-2.0 */
#include "graphs/trained.h"

static float *take(struct moe_engine *e, const struct moe_trained_shape *s, const char *purpose,
		   enum moe_status *st)
{
	return moe_memory_take(e, (size_t)(s->rows * s->cols) * sizeof(float), s->part, purpose, st);
}

static float *moved(float *p, int64_t n)
{
	return p ? p + n : NULL;
}

#define MAX_SLICES 56 /* a repack names them all */

/* Rows that begin at a chunk, about slice_elements of them; how many slices that gives. */
static void cut(const struct moe_trained_shape *s, struct moe_trained *a)
{
	int64_t want = s->slice_elements ? s->slice_elements / MOE_MAX(s->cols, 1) : s->rows;

	want = MOE_MAX(want, (s->rows + MAX_SLICES - 1) / MAX_SLICES);
	a->slice_rows = MOE_MAX((want + MOE_CHUNK - 1) / MOE_CHUNK, 1) * MOE_CHUNK;
	if (a->slice_rows >= s->rows)
		a->slice_rows = (s->rows + MOE_CHUNK - 1) / MOE_CHUNK * MOE_CHUNK;
	a->slices = (int)((s->rows + a->slice_rows - 1) / a->slice_rows);
}

static void make_slices(struct moe_trained *a)
{
	for (int i = 0; i < a->slices; i++) {
		int64_t n0 = i * a->slice_rows, at = n0 * a->param.cols;
		struct moe_param *p = &a->slice[i];

		*p = a->param;
		p->rows = MOE_MIN(a->slice_rows, a->param.rows - n0);
		p->piece = p->rows * p->cols;
		p->value = moved(p->value, at);
		p->grad = moved(p->grad, at);
		p->m = moved(p->m, at);
		p->v = moved(p->v, at);
		p->own_row = n0;
	}
}

/* bf16 masters beside quantised weights. */
static void take_master(struct moe_engine *e, const struct moe_trained_shape *s, struct moe_trained *a,
			enum moe_status *st)
{
	a->master.data = moe_memory_take(e, moe_kernels()->weight_bytes(MOE_BF16, s->rows, s->cols, MOE_USE_GEMM),
					 s->part, "weights", st);
	if (*st == MOE_OK)
		moe_kernels()->weight_pack(&a->master, NULL, MOE_BF16, s->rows, s->cols, s->cols, MOE_USE_GEMM);
}

enum moe_status moe_trained_alloc(struct moe_engine *e, const struct moe_trained_shape *s,
				  struct moe_trained *a)
{
	bool own = s->own && s->weight;
	enum moe_status st = MOE_OK;

	*a = (struct moe_trained){ .param = { .piece = s->rows * s->cols,
					      .stack = 1,
					      .rows = s->rows,
					      .cols = s->cols },
				   .weight = s->weight,
				   .vector = s->vector,
				   .decay = s->decay };
	cut(s, a);
	a->slice = moe_calloc((size_t)a->slices, sizeof *a->slice);
	if (!a->slice)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a trained array");
	a->param.grad = take(e, s, "gradients", &st);
	if (s->update) {
		if (!own)
			a->param.value = take(e, s, "weights", &st);
		a->param.m = take(e, s, "moments", &st);
		a->param.v = take(e, s, "moments", &st);
	}
	if (own && s->update && s->coded)
		take_master(e, s, a, &st);
	if (own && s->update) {
		a->param.own = s->coded ? &a->master : s->weight;
		a->param.own_at = s->at;
		a->param.own_ld = s->cols;
		a->param.own_key = s->key;
	}
	if (st != MOE_OK) {
		moe_trained_free(e, a);
		return st;
	}
	make_slices(a);
	return MOE_OK;
}

void moe_trained_free(struct moe_engine *e, struct moe_trained *a)
{
	moe_memory_free(e, a->param.value);
	moe_memory_free(e, a->param.grad);
	moe_memory_free(e, a->param.m);
	moe_memory_free(e, a->param.v);
	moe_memory_free(e, a->master.data);
	moe_free(a->slice);
	*a = (struct moe_trained){ 0 };
}

enum moe_status moe_trained_tensors_create(struct moe_engine *e, struct moe_trained *array,
					   struct moe_tensor *ready, struct moe_trained_tensors *t)
{
	*t = (struct moe_trained_tensors){ 0 };
	if (!array || !array->param.grad)
		return MOE_OK;
	t->array = array;
	t->ready = ready;
	return moe_tensors_create(e, "trained", array->slices, false, &t->slice);
}

void moe_trained_tensors_destroy(struct moe_trained_tensors *t)
{
	if (t->array)
		moe_tensors_destroy(t->slice, t->array->slices);
	*t = (struct moe_trained_tensors){ 0 };
}

enum moe_status moe_trained_dense_grad(const struct moe_context *c,
				       const struct moe_trained_tensors *t,
				       const struct moe_dense_grad_args *args,
				       const struct moe_tensor_list *in, int priority)
{
	struct moe_dense_grad_args a = *args;

	a.array = t->array;
	for (a.slice = 0; t->array && a.slice < t->array->slices; a.slice++)
		MOE_TRY(moe_task_dense_grad(c, &a, in, priority, t->slice[a.slice]));
	return MOE_OK;
}

enum moe_status moe_trained_ffn_grads(const struct moe_context *c, const struct moe_ffn *f,
				      const struct moe_ffn_state *s, const float *grad_out, int T,
				      bool first, const struct moe_tensor_list *in,
				      const struct moe_trained_tensors *t)
{
	struct moe_dense_grad_args args = { .first = first, .T = T, .x = s->x, .lddy = f->I };

	args.dy = s->dgate;
	MOE_TRY(moe_trained_dense_grad(c, &t[MOE_FFN_GATE], &args, in, MOE_PRIORITY_FILL));
	args.dy = s->dup;
	MOE_TRY(moe_trained_dense_grad(c, &t[MOE_FFN_UP], &args, in, MOE_PRIORITY_FILL));
	args.dy = s->dsigmoid;
	args.lddy = 1;
	MOE_TRY(moe_trained_dense_grad(c, &t[MOE_FFN_SIGMOID], &args, in, MOE_PRIORITY_FILL));
	args.x = s->h;
	args.dy = grad_out;
	args.lddy = f->H;
	args.scale = f->sigmoid_weight ? s->sigmoid : NULL;
	return moe_trained_dense_grad(c, &t[MOE_FFN_DOWN], &args, in, MOE_PRIORITY_FILL);
}

enum moe_status moe_trained_update(const struct moe_context *c, const struct moe_trained_tensors *t,
				   const struct moe_adamw *adamw, const struct moe_grad_norm *norm,
				   struct moe_tensor *norm_ready)
{
	struct moe_renew_args renew = { .array = t->array };

	if (!t->array || !moe_trained_updates(t->array))
		return MOE_OK;
	for (int i = 0; i < t->array->slices; i++) {
		struct moe_update_args a = { .adamw = *adamw, .norm = norm, .n = 1 };
		/* bf16 weights change in place: whoever computes with them must be done */
		struct moe_tensor *params[2] = { t->slice[i], t->ready };
		int n = moe_trained_renews(t->array) ? 1 : 2;

		a.range[0] = (struct moe_range){ &t->array->slice[i], 0, 1 };
		if (!t->array->decay)
			a.adamw.weight_decay = 0;
		MOE_TRY(moe_task_update(c, &a, -1, -1, NULL, 0, norm ? norm_ready : NULL, params, n));
	}
	if (!moe_trained_renews(t->array))
		return MOE_OK;
	return moe_task_renew(c, &renew, (struct moe_tensor_list){ t->slice, t->array->slices },
			      t->ready);
}
