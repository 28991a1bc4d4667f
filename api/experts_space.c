/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that the passes of equally shaped layers share. */
#include "api/experts.h"

#include "codelets/exchange.h"
#include "engine/available.h"

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static struct moe_space *list;

static struct moe_space_key key_of(const struct moe_expert_layer *l)
{
	struct moe_space_key k;

	memset(&k, 0, sizeof k); /* compared as bytes */
	k.engine = l->engine;
	k.E = l->layer.E;
	k.k = l->layer.k;
	k.H = l->layer.H;
	k.I = l->layer.I;
	k.r = l->layer.r;
	k.P = l->layer.P;
	k.G = l->layer.G;
	k.slices_i = l->cut.slices_i;
	k.slices_h = l->cut.slices_h;
	k.ring = l->backward.mode == MOE_BACKWARD_SHARED ? l->backward.ring : 0;
	k.slots = l->params.micro_batches;
	k.dtype = l->params.weight_dtype;
	k.recompute = l->layer.recompute;
	k.base = l->params.train_base;
	return k;
}

static void space_free(struct moe_space *s)
{
	moe_space_release(s);
	moe_backward_ring_destroy(s->key.engine, &s->ring);
	moe_free(s->owner);
	moe_free(s->slot);
	pthread_mutex_destroy(&s->lock);
	moe_free(s);
}

static enum moe_status space_create(const struct moe_expert_layer *l, const struct moe_space_key *key,
				    struct moe_space **out)
{
	struct moe_space *s = moe_calloc(1, sizeof *s);
	enum moe_status st = MOE_OK;

	if (!s)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a layer's experts");
	s->key = *key;
	s->capacity = -1;
	pthread_mutex_init(&s->lock, NULL);
	s->slot = moe_calloc((size_t)key->slots, sizeof *s->slot);
	if (!s->slot)
		st = moe_fail(MOE_ERR_NOMEM, "no memory for a layer's experts");
	if (st == MOE_OK && key->ring) {
		s->owner = moe_calloc((size_t)key->ring, sizeof *s->owner);
		st = s->owner ? moe_backward_ring_create(key->engine, &l->layer, key->dtype, key->ring,
							 &s->ring)
			      : moe_fail(MOE_ERR_NOMEM, "no memory for a ring of weights");
	}
	if (st != MOE_OK)
		space_free(s);
	else
		*out = s;
	return st;
}

enum moe_status moe_space_attach(struct moe_expert_layer *l)
{
	struct moe_space_key key = key_of(l);
	enum moe_status st = MOE_OK;
	struct moe_space *s;

	pthread_mutex_lock(&list_lock);
	for (s = list; s && memcmp(&s->key, &key, sizeof key); s = s->next)
		;
	if (!s) {
		st = space_create(l, &key, &s);
		if (st == MOE_OK) {
			s->next = list;
			list = s;
		}
	}
	if (st == MOE_OK) {
		pthread_mutex_lock(&s->lock);
		l->space = s;
		l->next = s->layers;
		s->layers = l;
		s->n_layers++;
		l->number = s->numbers++;
		pthread_mutex_unlock(&s->lock);
	}
	pthread_mutex_unlock(&list_lock);
	return st;
}

void moe_space_detach(struct moe_expert_layer *l)
{
	struct moe_space *s = l->space;
	struct moe_expert_layer **at;
	struct moe_space **in;
	bool last;

	if (!s)
		return;
	pthread_mutex_lock(&list_lock);
	pthread_mutex_lock(&s->lock);
	for (at = &s->layers; *at != l; at = &(*at)->next)
		;
	*at = l->next;
	last = --s->n_layers == 0;
	for (int i = 0; i < s->ring.n; i++)
		if (s->owner[i].layer == l)
			s->owner[i].layer = NULL; /* another layer may get this address */
	pthread_mutex_unlock(&s->lock);
	if (last) {
		for (in = &list; *in != s; in = &(*in)->next)
			;
		*in = s->next;
		space_free(s);
	}
	pthread_mutex_unlock(&list_lock);
	l->space = NULL;
}

void moe_space_release(struct moe_space *s)
{
	struct moe_engine *e = s->key.engine;

	if (s->capacity < 0)
		return;
	for (int i = 0; i < s->key.slots; i++) {
		struct moe_space_slot *b = &s->slot[i];

		moe_slot_tensors_destroy(e, &b->tensors);
		moe_stream_destroy(e, &b->out);
		moe_stream_destroy(e, &b->grad_x);
		for (int j = 0; j < 2; j++)
			moe_stream_destroy(e, &b->grad_out[j]);
		moe_experts_scratch_free(e, &b->scratch, s->key.P);
	}
	s->capacity = -1;
	s->generation++;
}

static enum moe_status slot_alloc(struct moe_space *s, const struct moe_expert_layer *l, int T,
				  struct moe_space_slot *b)
{
	struct moe_engine *e = s->key.engine;

	MOE_TRY(moe_stream_create(e, "out", T, s->key.H, &b->out));
	MOE_TRY(moe_stream_create(e, "grad_x", T, s->key.H, &b->grad_x));
	for (int i = 0; i < 2; i++)
		MOE_TRY(moe_stream_create(e, "grad_out", T, s->key.H, &b->grad_out[i]));
	MOE_TRY(moe_experts_scratch_alloc(e, &l->layer, T, true, &b->scratch));
	return moe_slot_tensors_create(e, s->key.P, s->key.G, T, s->key.H, &l->cut, false, &b->tensors);
}

static enum moe_status space_alloc(struct moe_space *s, const struct moe_expert_layer *l, int T)
{
	s->capacity = T;
	for (int i = 0; i < s->key.slots; i++)
		MOE_TRY(slot_alloc(s, l, T, &s->slot[i]));
	return moe_memory_check(s->key.engine, "buffers of a pass");
}

/* Layers of one shape may have weights of different formats. */
static enum moe_status reserve_scratch(const struct moe_expert_layer *l, int T)
{
	size_t scratch = moe_experts_worker_scratch(&l->layer, T);

	return moe_engine_reserve_scratch(l->engine, MOE_MAX(scratch, moe_exchange_scratch(&l->layer)));
}

/* Tasks of all its layers. */
static enum moe_status wait_all(struct moe_space *s)
{
	for (struct moe_expert_layer *l = s->layers; l; l = l->next) {
		for (int i = 0; i < l->n_passes; i++)
			MOE_TRY(moe_ticket_wait(l->pass[i].ticket));
		MOE_TRY(moe_ticket_wait(l->ticket));
	}
	return MOE_OK;
}

enum moe_status moe_space_reserve(struct moe_space *s, const struct moe_expert_layer *l, int T)
{
	enum moe_status st;

	if (T <= s->capacity)
		return reserve_scratch(l, T);
	MOE_TRY(wait_all(s));
	moe_space_release(s);
	s->generation++;
	st = space_alloc(s, l, T);
	if (st == MOE_OK)
		st = reserve_scratch(l, T);
	if (st != MOE_OK)
		moe_space_release(s);
	return st;
}
