/* SPDX-License-Identifier: Apache-2.0 */
#include "graphs/decoder_full.h"

#include "graphs/decoder.h"

/* ---- tensors ---- */

static struct moe_trained *layer_array(const struct moe_decoder_layer *l, int array)
{
	if (array < MOE_LAYER_ARRAYS)
		return l->trained ? &l->trained[array] : NULL;
	return l->ffn && l->ffn->trained ? &l->ffn->trained[array - MOE_LAYER_ARRAYS] : NULL;
}

/* The projection whose tensor the readers of an array name. */
static int reader_of(int array)
{
	switch (array) {
	case MOE_ARRAY_ATTN_NORM:
	case MOE_ARRAY_Q_NORM:
		return MOE_ATTN_Q;
	case MOE_ARRAY_K_NORM:
		return MOE_ATTN_K;
	case MOE_ARRAY_FFN_NORM:
		return MOE_ATTN_O;
	default:
		return array % MOE_ATTN_LINEARS;
	}
}

static enum moe_status create_layer(struct moe_engine *e, const struct moe_decoder *d,
				    struct moe_decoder_tensors *t, int layer)
{
	struct moe_trained_tensors *at = t->full.layer + layer * MOE_DENSE_ARRAYS;

	for (int i = 0; i < MOE_DENSE_ARRAYS; i++) {
		struct moe_trained *array = layer_array(&d->layers[layer], i);
		struct moe_tensor *ready = NULL;

		if (i < MOE_LAYER_ARRAYS)
			ready = t->lora[layer * MOE_ATTN_LINEARS + reader_of(i)];
		else if (t->ffn_lora[layer])
			ready = t->ffn_lora[layer][i - MOE_LAYER_ARRAYS];
		MOE_TRY(moe_trained_tensors_create(e, array, ready, &at[i]));
	}
	return MOE_OK;
}

static enum moe_status create_vocab(struct moe_engine *e, const struct moe_vocab *v,
				    const char *name, struct moe_tensor ***ready,
				    struct moe_trained_tensors **out)
{
	*out = moe_calloc((size_t)v->n_chunks, sizeof **out);
	if (!*out)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a decoder's tensors");
	MOE_TRY(moe_tensors_create(e, name, v->n_chunks, true, ready));
	for (int i = 0; i < v->n_chunks; i++)
		MOE_TRY(moe_trained_tensors_create(e, &v->trained[i], (*ready)[i], &(*out)[i]));
	return MOE_OK;
}

static enum moe_status create_ends(struct moe_engine *e, const struct moe_decoder *d,
				   struct moe_full_tensors *f)
{
	f->n_chunks = d->embed.n_chunks;
	f->tied = d->embed.chunk == d->head.chunk;
	MOE_TRY(moe_join_create(e, "embedding", f->n_chunks, &f->embed_all));
	moe_tensor_set_initialised(f->embed_all.out);
	MOE_TRY(create_vocab(e, &d->embed, "embedding", &f->embed_ready, &f->embed));
	if (f->tied) {
		f->head = f->embed;
		f->head_ready = f->embed_ready;
	} else {
		MOE_TRY(create_vocab(e, &d->head, "head", &f->head_ready, &f->head));
	}
	MOE_TRY(moe_tensor_create(e, "final_norm", 0, -1, &f->final_ready));
	moe_tensor_set_initialised(f->final_ready);
	return moe_trained_tensors_create(e, d->final_trained, f->final_ready, &f->final);
}

static int64_t slices_of(const struct moe_trained *a)
{
	return a && a->param.grad ? a->slices : 0;
}

int64_t moe_full_slices(const struct moe_decoder *d)
{
	bool tied = d->embed.chunk == d->head.chunk;
	int64_t n = slices_of(d->final_trained);

	for (int l = 0; l < d->n_layers; l++)
		for (int i = 0; i < MOE_DENSE_ARRAYS; i++)
			n += slices_of(layer_array(&d->layers[l], i));
	for (int i = 0; d->embed.trained && i < d->embed.n_chunks; i++)
		n += slices_of(&d->embed.trained[i]) + (tied ? 0 : slices_of(&d->head.trained[i]));
	return n;
}

enum moe_status moe_full_tensors_create(struct moe_engine *e, const struct moe_decoder *d,
					struct moe_decoder_tensors *t)
{
	struct moe_full_tensors *f = &t->full;

	if (!f->n_squares)
		return MOE_OK;
	f->layer = moe_calloc((size_t)d->n_layers * MOE_DENSE_ARRAYS, sizeof *f->layer);
	if (!f->layer)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a decoder's tensors");
	f->n_layers = d->n_layers;
	for (int l = 0; l < d->n_layers; l++)
		MOE_TRY(create_layer(e, d, t, l));
	return moe_full_trains_embed(d) ? create_ends(e, d, f) : MOE_OK;
}

static void destroy_vocab(struct moe_trained_tensors *v, struct moe_tensor **ready, int n)
{
	for (int i = 0; v && i < n; i++)
		moe_trained_tensors_destroy(&v[i]);
	moe_free(v);
	moe_tensors_destroy(ready, n);
}

void moe_full_tensors_destroy(struct moe_full_tensors *f)
{
	for (int i = 0; f->layer && i < f->n_layers * MOE_DENSE_ARRAYS; i++)
		moe_trained_tensors_destroy(&f->layer[i]);
	moe_free(f->layer);
	if (!f->tied)
		destroy_vocab(f->head, f->head_ready, f->n_chunks);
	destroy_vocab(f->embed, f->embed_ready, f->n_chunks);
	moe_trained_tensors_destroy(&f->final);
	moe_tensor_destroy(f->final_ready);
	moe_join_destroy(&f->embed_all);
	*f = (struct moe_full_tensors){ 0 };
}

bool moe_full_trains_layer(const struct moe_decoder *d, int layer)
{
	for (int i = 0; i < MOE_DENSE_ARRAYS; i++)
		if (slices_of(layer_array(&d->layers[layer], i)))
			return true;
	return false;
}

bool moe_full_trains_embed(const struct moe_decoder *d)
{
	return d->embed.trained != NULL;
}

struct moe_tensor *moe_full_embed_ready(const struct moe_full_tensors *t)
{
	return t->embed ? t->embed_all.out : NULL;
}

struct moe_tensor *moe_full_head_ready(const struct moe_full_tensors *t, int chunk)
{
	return t->head ? t->head_ready[chunk] : NULL;
}

/* ---- gradients ---- */

/* A layer's arrays with what their gradients read. */
struct layer_pass {
	struct moe_decoder_pass *p;
	const struct moe_decoder_layer *l;
	const struct moe_attn_state *state;
	const struct moe_attn_grad *grad;
	struct moe_trained_tensors *t;
	struct moe_tensor *all, *kept,
		*users; /* users of the ring that projections' gradients are in */
	struct moe_stream *out, *mid;
	bool first;
};

static const float *linear_dy(const struct layer_pass *a, int linear)
{
	const float *const dy[] = { a->grad->grad_q, a->grad->grad_k, a->grad->grad_v,
				    a->mid->data };

	return dy[linear];
}

/* Gradients come late: they hold what was written for them, and the users of the rings they read. */
static enum moe_status submit_vector(const struct moe_context *c, const struct layer_pass *a,
				     int array, const float *row, int rows,
				     struct moe_tensor *users)
{
	struct moe_tensor *in[3] = { a->all, a->kept, users };
	struct moe_tensor_list list = { in, users ? 3 : 2 };
	struct moe_vector_grad_args args = {
		.array = a->t[array].array, .first = a->first, .row = row, .rows = rows
	};

	if (!args.array)
		return MOE_OK;
	return moe_task_vector_grad(c, &args, &list, MOE_PRIORITY_FILL, a->t[array].slice[0]);
}

static enum moe_status submit_linears(const struct moe_context *c, const struct layer_pass *a)
{
	const struct moe_decoder *d = a->p->decoder;

	for (int j = 0; j < MOE_ATTN_LINEARS; j++) {
		struct moe_tensor *users = j == MOE_ATTN_O ? a->mid->users : a->users;
		struct moe_tensor *in[3] = { a->all, a->kept, users };
		struct moe_tensor_list list = { in, 3 };
		struct moe_dense_grad_args args = {
			.first = a->first,
			.T = a->p->batch.T,
			.x = j == MOE_ATTN_O ? a->state->o : a->state->x,
			.dy = linear_dy(a, j),
			.lddy = a->l->linear[j].weight.n,
			.norm = j == MOE_ATTN_O ? NULL : a->l->attn_norm,
			.eps = d->eps
		};

		MOE_TRY(moe_trained_dense_grad(c, &a->t[MOE_ARRAY_LINEAR + j], &args, &list,
					       MOE_PRIORITY_FILL));
		MOE_TRY(submit_vector(c, a, MOE_ARRAY_BIAS + j, args.dy, args.T, users));
	}
	return MOE_OK;
}

static enum moe_status submit_norms(const struct moe_context *c, const struct layer_pass *a)
{
	int blocks = moe_token_blocks(a->p->batch.T);

	MOE_TRY(submit_vector(c, a, MOE_ARRAY_ATTN_NORM, a->state->attn_norm_part, blocks, NULL));
	MOE_TRY(submit_vector(c, a, MOE_ARRAY_FFN_NORM, a->state->ffn_norm_part, blocks, NULL));
	MOE_TRY(submit_vector(c, a, MOE_ARRAY_Q_NORM, a->state->q_norm_part, blocks, NULL));
	return submit_vector(c, a, MOE_ARRAY_K_NORM, a->state->k_norm_part, blocks, NULL);
}

enum moe_status moe_full_layer_grads(const struct moe_context *c, struct moe_decoder_pass *p,
				     int layer, bool first)
{
	struct moe_decoder_slot *s = p->slot;
	struct moe_full_tensors *f = &p->tensors->full;
	struct moe_attn_ring *ring = &s->ring[layer & 1];
	struct layer_pass a = { .p = p,
				.l = &p->decoder->layers[layer],
				.state = &s->layer[layer].attn,
				.grad = &ring->grad,
				.all = ring->all.out,
				.kept = s->layer[layer].kept,
				.users = ring->users,
				.out = &s->grad_out[layer & 1],
				.mid = &s->grad_mid[layer & 1],
				.first = first };
	struct moe_tensor *in[3] = { a.all, a.kept, a.out->users };
	struct moe_tensor_list list = { in, 3 };

	if (!f->layer)
		return MOE_OK;
	a.t = f->layer + layer * MOE_DENSE_ARRAYS;
	MOE_TRY(submit_linears(c, &a));
	MOE_TRY(submit_norms(c, &a));
	if (!a.l->ffn || !a.l->ffn->trained)
		return MOE_OK;
	return moe_trained_ffn_grads(c, a.l->ffn, moe_decoder_ffn_state(s, layer), a.out->data,
				     p->batch.T, first, &list, a.t + MOE_LAYER_ARRAYS);
}

enum moe_status moe_full_head_grads(const struct moe_context *c, struct moe_decoder_pass *p,
				    const struct moe_head_args *a, struct moe_tensor *hn,
				    struct moe_tensor *const *chunk, bool first)
{
	const struct moe_decoder *d = p->decoder;
	struct moe_full_tensors *f = &p->tensors->full;
	struct moe_dense_grad_args args = {
		.first = first, .T = a->r1 - a->r0, .x = a->state->hn, .lddy = d->V
	};

	for (int i = 0; f->head && i < d->head.n_chunks; i++) {
		struct moe_tensor *in[2] = { hn, chunk[i] };
		struct moe_tensor_list list = { in, args.T ? 2 : 0 };

		args.dy = a->state->logits + (int64_t)i * MOE_VOCAB_CHUNK;
		MOE_TRY(moe_trained_dense_grad(c, &f->head[i], &args, &list, c->priority + 2));
	}
	return MOE_OK;
}

enum moe_status moe_full_final_grad(const struct moe_context *c, struct moe_decoder_pass *p,
				    struct moe_tensor *in, int n, bool first)
{
	struct moe_full_tensors *f = &p->tensors->full;
	struct moe_decoder_slot *s = p->slot;
	struct moe_tensor *names[2] = { in, moe_decoder_buffers(s, p->decoder->n_layers)->kept };
	struct moe_tensor_list list = { names, n ? 2 : 0 };
	struct moe_vector_grad_args args = {
		.array = f->final.array, .first = first, .row = s->final_part, .rows = n
	};

	if (!args.array)
		return MOE_OK;
	return moe_task_vector_grad(c, &args, &list, MOE_PRIORITY_FILL, f->final.slice[0]);
}

enum moe_status moe_full_embed_grads(const struct moe_context *c, struct moe_decoder_pass *p,
				     bool first)
{
	struct moe_full_tensors *f = &p->tensors->full;
	struct moe_decoder_slot *s = p->slot;
	struct moe_stream *x = &s->grad_out[1]; /* layer 0 left its input's gradient there */
	struct moe_tensor *in[2] = { s->ring[0].all.out, x->users };
	struct moe_tensor_list list = { in, 2 };
	struct moe_embed_grad_args a = {
		.first = first && !f->tied, .ids = p->batch.ids, .grad_x = x->data, .T = p->batch.T
	};

	for (int i = 0; f->embed && i < f->n_chunks; i++) {
		a.array = f->embed[i].array;
		a.v0 = (int64_t)i * MOE_VOCAB_CHUNK;
		for (a.slice = 0; a.slice < a.array->slices; a.slice++)
			MOE_TRY(moe_task_embed_grad(c, &a, &list, f->embed[i].slice[a.slice]));
	}
	return MOE_OK;
}

/* ---- norm and update ---- */

/* Handles are few and short-lived: slices take them in turn. */
struct norms {
	struct moe_tensor *const *handle;
	double *squares;
	int64_t n;
};

static enum moe_status norm_of(const struct moe_context *c, const struct moe_trained_tensors *t,
			       struct norms *at)
{
	for (int i = 0; t->array && i < t->array->slices; i++, at->n++) {
		struct moe_update_args a = { .n = 1 };

		a.range[0] = (struct moe_range){ &t->array->slice[i], 0, 1 };
		a.squares[0] = at->squares + at->n;
		MOE_TRY(moe_task_grad_norm(c, &a, -1, -1, &t->slice[i], 1,
					   at->handle[at->n % MOE_FULL_NORMS]));
	}
	return MOE_OK;
}

enum moe_status moe_full_grad_norm(const struct moe_context *c, struct moe_full_tensors *f,
				   struct moe_tensor *const *norm, double *squares)
{
	struct norms at = { .handle = norm + f->first_norm, .squares = squares };

	if (!f->n_squares)
		return MOE_OK;
	for (int i = 0; f->layer && i < f->n_layers * MOE_DENSE_ARRAYS; i++) {
		struct moe_context lc = *c;

		lc.layer = i / MOE_DENSE_ARRAYS;
		MOE_TRY(norm_of(&lc, &f->layer[i], &at));
	}
	for (int i = 0; f->embed && i < f->n_chunks; i++)
		MOE_TRY(norm_of(c, &f->embed[i], &at));
	for (int i = 0; f->head && !f->tied && i < f->n_chunks; i++)
		MOE_TRY(norm_of(c, &f->head[i], &at));
	MOE_TRY(norm_of(c, &f->final, &at));
	MOE_ASSERT(at.n == f->n_squares);
	return MOE_OK;
}

enum moe_status moe_full_update_embed(const struct moe_context *c, struct moe_full_tensors *f,
				      const struct moe_decoder_step *o,
				      struct moe_tensor *norm_ready)
{
	struct moe_context lc = *c;

	if (!f->embed)
		return MOE_OK;
	lc.layer = -1; /* in front of layer 0 */
	for (int i = 0; i < f->n_chunks; i++)
		MOE_TRY(moe_trained_update(&lc, &f->embed[i], &o->adamw, o->norm, norm_ready));
	return moe_join_submit(&lc, &f->embed_all, f->embed_ready, f->n_chunks, NULL);
}

enum moe_status moe_full_update_layer(const struct moe_context *c, struct moe_full_tensors *f,
				      int layer, const struct moe_decoder_step *o,
				      struct moe_tensor *norm_ready)
{
	for (int i = 0; f->layer && i < MOE_DENSE_ARRAYS; i++)
		MOE_TRY(moe_trained_update(c, &f->layer[layer * MOE_DENSE_ARRAYS + i], &o->adamw,
					   o->norm, norm_ready));
	return MOE_OK;
}

enum moe_status moe_full_update_head(const struct moe_context *c, struct moe_full_tensors *f,
				     const struct moe_decoder_step *o,
				     struct moe_tensor *norm_ready)
{
	struct moe_context lc = *c;

	lc.layer = f->n_layers - 1; /* needed as late as the last layer */
	MOE_TRY(moe_trained_update(&lc, &f->final, &o->adamw, o->norm, norm_ready));
	for (int i = 0; f->head && !f->tied && i < f->n_chunks; i++)
		MOE_TRY(moe_trained_update(&lc, &f->head[i], &o->adamw, o->norm, norm_ready));
	return MOE_OK;
}
