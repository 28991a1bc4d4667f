/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of a checkpoint in their order: vocabulary, vectors, dense weights. */
#include "api/model_load.h"

#include "codelets/kernels/packed/requantise.h"
#include "codelets/rope_table.h"

const struct moe_st_tensor *moe_load_only_shape(struct moe_loader *l, enum moe_role role, int layer)
{
	struct moe_st_tensor *t = &l->shape;

	memset(t, 0, sizeof *t);
	t->dtype = MOE_BF16;
	t->ndim = moe_arch_tensor_shape(&l->m->arch, role, layer, t->shape);
	return t;
}

enum moe_status moe_load_next(struct moe_loader *l, enum moe_role role, int layer, int expert,
			      const struct moe_st_tensor **out)
{
	if (!l->st) {
		*out = moe_load_only_shape(l, role, layer);
		return MOE_OK;
	}
	MOE_TRY(moe_model_find(l->m, l->st, role, layer, expert, out));
	if (l->pack)
		return moe_pack_tensor(l->pack, *out);
	l->shape = **out;
	l->shape.data = NULL;
	*out = &l->shape;
	return MOE_OK;
}

enum moe_status moe_load_next_read(struct moe_loader *l, enum moe_role role, int layer,
				   const struct moe_st_tensor **out)
{
	MOE_TRY(moe_load_next(l, role, layer, -1, out));
	if (!l->pack)
		return MOE_OK;
	l->shape = **out;
	MOE_TRY(moe_pack_read(l->pack, *out, &l->shape.data));
	*out = &l->shape;
	return MOE_OK;
}

static void *take(struct moe_model *m, size_t bytes, int part, const char *purpose)
{
	void *p = moe_memory_alloc(m->engine, bytes, part, purpose);

	if (!p)
		moe_fail(MOE_ERR_NOMEM, "no memory for %zu bytes of %s", bytes, purpose);
	return p;
}

enum moe_status moe_load_check_trained(const struct moe_loader *l, enum moe_role role,
				       const struct moe_st_tensor *t)
{
	if (!moe_model_trains(l->m, role))
		return MOE_OK;
	if (l->st && l->m->params.masters == MOE_MASTERS_BF16 && t->dtype != MOE_BF16)
		return moe_fail(
			MOE_ERR_UNSUPPORTED,
			"%s is %s: masters bf16 needs a checkpoint in BF16; masters f32 takes any",
			t->name, t->dtype_text);
	return MOE_OK;
}

const char *moe_load_file(const struct moe_loader *l, const struct moe_st_tensor *t)
{
	return moe_safetensors_file_path(l->st, t->file);
}

enum moe_status moe_load_check_requantise(const struct moe_loader *l, enum moe_role role, int layer,
					  const struct moe_st_tensor *codes, const struct moe_coding *c,
					  int64_t n, int64_t k)
{
	char name[MOE_TENSOR_NAME_MAX];
	enum moe_status st;

	if (!moe_model_trains(l->m, role))
		return MOE_OK;
	st = moe_requantise_check(c, n, k);
	if (st == MOE_OK)
		return MOE_OK;
	moe_arch_tensor_name(&l->m->arch, role, layer, 0, 0, name);
	return moe_fail_in(st, "%s: %s", codes ? moe_load_file(l, codes) : l->m->params.dir,
			   codes ? codes->name : name);
}

/* A vector in f32; NULL where the model has none. */
static enum moe_status load_vector(struct moe_loader *l, enum moe_role role, int layer, float **out)
{
	const struct moe_trained *trained;
	const struct moe_st_tensor *t;
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(&l->m->arch, role, layer, shape);
	int64_t n = ndim ? moe_shape_count(ndim, shape) : 0;

	if (!ndim)
		return MOE_OK;
	MOE_TRY(moe_load_next_read(l, role, layer, &t));
	if (!*out)
		*out = take(l->m, (size_t)n * sizeof **out, -1, "weights");
	if (!*out)
		return MOE_ERR_NOMEM;
	if (t->data)
		moe_to_f32(*out, t->data, t->dtype, (size_t)n);
	MOE_TRY(moe_model_alloc_trained(l->m, role, layer, 0, NULL, *out, ndim == 2 ? shape[0] : 1,
					shape[ndim - 1], -1, false));
	trained = moe_model_trained(l->m, role, layer, 0);
	if (t->data && trained)
		moe_trained_set(trained, t->data, t->dtype);
	return MOE_OK;
}

/* Rows of a [*, k] tensor (a chunk of it), to be packed on a part. */
static enum moe_status pack(struct moe_loader *l, enum moe_role role, int layer, int chunk,
			    const void *src, enum moe_dtype dtype, int64_t n, int64_t k, int part,
			    struct moe_weight *w)
{
	enum moe_dtype as = moe_model_packed_dtype(l->m, role, dtype);

	if (!w->data)
		w->data = take(l->m, moe_kernels()->weight_bytes(as, n, k, MOE_USE_GEMM), part,
			       "weights");
	if (!w->data)
		return MOE_ERR_NOMEM;
	MOE_TRY(moe_model_alloc_trained(l->m, role, layer, chunk, w, NULL, n, k, part, false));
	if (l->pack)
		return moe_pack_weight(l->pack, part, w,
				       moe_model_trained(l->m, role, layer, chunk), src, dtype, n,
				       k);
	moe_kernels()->weight_pack(w, NULL, as, n, k, k, MOE_USE_GEMM);
	return MOE_OK;
}

enum moe_status moe_load_begin_coded(struct moe_loader *l, const struct moe_st_quantised *t)
{
	if (!l->pack)
		return MOE_OK;
	if (t->scale != t->codes)
		MOE_TRY(moe_pack_tensor(l->pack, t->scale));
	if (t->zero)
		MOE_TRY(moe_pack_tensor(l->pack, t->zero));
	return moe_pack_tensor(l->pack, t->codes);
}

static enum moe_status load_coded(struct moe_loader *l, enum moe_role role, int layer,
				  const struct moe_st_quantised *t, int part, struct moe_weight *w)
{
	MOE_TRY(moe_load_check_requantise(l, role, layer, t->codes, &t->q.coding, t->q.n, t->q.k));
	if (!w->data)
		w->data =
			take(l->m, moe_coded_bytes(&t->q.coding, t->q.n, t->q.k), part, "weights");
	if (!w->data)
		return MOE_ERR_NOMEM;
	MOE_TRY(moe_model_alloc_trained(l->m, role, layer, 0, w, NULL, t->q.n, t->q.k, part, true));
	MOE_TRY(moe_load_begin_coded(l, t));
	return l->pack ? moe_pack_coded(l->pack, part, w, moe_model_trained(l->m, role, layer, 0),
					&t->q)
		       : MOE_OK;
}

static enum moe_status load_weight(struct moe_loader *l, enum moe_role role, int layer,
				   struct moe_weight *w)
{
	/* whole layers are dealt out to the parts: a token block reads all of a layer's weights */
	int part = MOE_MAX(layer, 0) % moe_engine_parts(l->m->engine);
	const struct moe_st_tensor *t;
	struct moe_st_quantised coded;
	bool found = false;

	if (l->st)
		MOE_TRY(moe_model_find_quantised(l->m, l->st, role, layer, -1, &coded, &found));
	if (found)
		return load_coded(l, role, layer, &coded, part, w);
	MOE_TRY(moe_load_next(l, role, layer, -1, &t));
	MOE_TRY(moe_load_check_trained(l, role, t));
	return pack(l, role, layer, 0, t->data, t->dtype, t->shape[0], t->shape[1], part, w);
}

/* Embedding and head are multiplied plain. */
static enum moe_status load_vocab_coded(struct moe_loader *l, enum moe_role role,
					const struct moe_st_quantised *t, struct moe_vocab *v)
{
	if (moe_model_trains(l->m, role))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: %s is %s: a quantised embedding or head is not trained; method "
				"lora or hybrid leaves it, or "
				"moesaic convert --weights bf16 makes it plain",
				moe_load_file(l, t->codes), t->codes->name,
				t->q.coding.format->name);
	MOE_TRY(moe_load_begin_coded(l, t));
	for (int c = 0; c < v->n_chunks; c++) {
		int64_t n0 = (int64_t)c * MOE_VOCAB_CHUNK,
			n = MOE_MIN((int64_t)MOE_VOCAB_CHUNK, t->q.n - n0);
		int part = c % moe_engine_parts(l->m->engine);
		struct moe_weight *w = &v->chunk[c];

		if (!w->data)
			w->data =
				take(l->m,
				     moe_kernels()->weight_bytes(MOE_BF16, n, t->q.k, MOE_USE_GEMM),
				     part, "weights");
		if (!w->data)
			return MOE_ERR_NOMEM;
		if (l->pack)
			MOE_TRY(moe_pack_decoded(l->pack, part, w, &t->q, n0, n));
		else
			moe_kernels()->weight_pack(w, NULL, MOE_BF16, n, t->q.k, t->q.k,
						   MOE_USE_GEMM);
	}
	return MOE_OK;
}

static enum moe_status load_vocab(struct moe_loader *l, enum moe_role role, struct moe_vocab *v)
{
	const struct moe_st_tensor *t;
	struct moe_st_quantised coded;
	bool found = false;
	size_t row;

	if (l->st)
		MOE_TRY(moe_model_find_quantised(l->m, l->st, role, -1, -1, &coded, &found));
	if (found)
		return load_vocab_coded(l, role, &coded, v);
	MOE_TRY(moe_load_next(l, role, -1, -1, &t));
	MOE_TRY(moe_load_check_trained(l, role, t));
	row = (size_t)t->shape[1] * moe_dtype_size(t->dtype);
	for (int c = 0; c < v->n_chunks; c++) {
		int64_t v0 = (int64_t)c * MOE_VOCAB_CHUNK;

		MOE_TRY(pack(l, role, -1, c,
			     t->data ? (const char *)t->data + (size_t)v0 * row : NULL, t->dtype,
			     MOE_MIN((int64_t)MOE_VOCAB_CHUNK, t->shape[0] - v0), t->shape[1],
			     c % moe_engine_parts(l->m->engine), &v->chunk[c]));
	}
	return MOE_OK;
}

static enum moe_status load_ffn(struct moe_loader *l, const enum moe_role role[3], int layer,
				struct moe_ffn *f)
{
	MOE_TRY(load_weight(l, role[0], layer, &f->gate));
	MOE_TRY(load_weight(l, role[1], layer, &f->up));
	return load_weight(l, role[2], layer, &f->down);
}

static enum moe_status load_attention(struct moe_loader *l, int layer, struct moe_decoder_layer *d)
{
	MOE_TRY(load_vector(l, MOE_ROLE_ATTN_NORM, layer, &d->attn_norm));
	MOE_TRY(load_vector(l, MOE_ROLE_FFN_NORM, layer, &d->ffn_norm));
	MOE_TRY(load_vector(l, MOE_ROLE_Q_NORM, layer, &d->q_norm));
	MOE_TRY(load_vector(l, MOE_ROLE_K_NORM, layer, &d->k_norm));
	for (int j = 0; j < MOE_ATTN_LINEARS; j++) {
		struct moe_linear *p = &d->linear[j];

		MOE_TRY(load_weight(l, (enum moe_role)(MOE_ROLE_Q + j), layer, &p->weight));
		MOE_TRY(load_vector(l, (enum moe_role)(MOE_ROLE_Q_BIAS + j), layer, &p->bias));
	}
	return MOE_OK;
}

static enum moe_status load_layer(struct moe_loader *l, int i)
{
	static const enum moe_role dense[3] = { MOE_ROLE_DENSE_GATE, MOE_ROLE_DENSE_UP,
						MOE_ROLE_DENSE_DOWN };
	static const enum moe_role shared[3] = { MOE_ROLE_SHARED_GATE, MOE_ROLE_SHARED_UP,
						 MOE_ROLE_SHARED_DOWN };
	struct moe_decoder_layer *d = &l->m->decoder.layers[i];

	MOE_TRY(load_attention(l, i, d));
	if (!d->experts)
		return load_ffn(l, dense, i, d->ffn);
	MOE_TRY(moe_load_experts(l, i, d->experts));
	if (!d->ffn)
		return MOE_OK;
	MOE_TRY(load_ffn(l, shared, i, d->ffn));
	return load_vector(l, MOE_ROLE_SHARED_ROUTER, i, &d->ffn->sigmoid_weight);
}

enum moe_status moe_model_make_rope(struct moe_model *m)
{
	const struct moe_rope *r = &m->arch.rope;
	struct moe_decoder *d = &m->decoder;
	struct moe_rope_angles angles = {
		.theta = r->theta,
		.type = r->type == MOE_ROPE_LINEAR ? MOE_ANGLES_LINEAR
			: r->type == MOE_ROPE_YARN ? MOE_ANGLES_YARN
						   : MOE_ANGLES_DEFAULT,
		.factor = r->factor,
		.original_max_positions = (double)r->original_max_positions,
		.beta_fast = r->beta_fast,
		.beta_slow = r->beta_slow,
		.attention_factor = r->attention_factor,
		.mscale = r->mscale,
		.mscale_all_dim = r->mscale_all_dim,
		.truncate = r->truncate,
	};

	moe_memory_free(m->engine, d->rope);
	d->rope = take(m, (size_t)d->positions * (size_t)d->dim * sizeof *d->rope, -1, "weights");
	if (!d->rope)
		return MOE_ERR_NOMEM;
	if (!moe_engine_is_dry(m->engine))
		moe_rope_table(&angles, d->dim, d->positions, d->rope);
	return MOE_OK;
}

static enum moe_status load_all(struct moe_loader *l)
{
	struct moe_model *m = l->m;
	struct moe_decoder *d = &m->decoder;

	MOE_TRY(load_vocab(l, MOE_ROLE_EMBED, &d->embed));
	if (!m->arch.tie_embeddings)
		MOE_TRY(load_vocab(l, MOE_ROLE_LM_HEAD, &d->head));
	MOE_TRY(load_vector(l, MOE_ROLE_FINAL_NORM, -1, &d->final_norm));
	MOE_TRY(moe_model_make_rope(m));
	for (int i = 0; i < d->n_layers; i++)
		MOE_TRY(load_layer(l, i));
	return MOE_OK;
}

enum moe_status moe_model_load_weights(struct moe_model *m, const struct moe_safetensors *st)
{
	struct moe_loader l = { .m = m, .st = st };
	enum moe_status status;

	if (st && !moe_engine_is_dry(m->engine))
		MOE_TRY(moe_pack_create(m, st, &l.pack));
	status = load_all(&l);
	if (status == MOE_OK && l.pack)
		status = moe_pack_run(l.pack);
	moe_pack_destroy(l.pack);
	return status;
}
