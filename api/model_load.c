/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of a checkpoint: which tensor goes where. model_pack.c packs them. */
#include "api/model_pack.h"

#include "codelets/kernels/packed/requantise.h"
#include "codelets/rope_table.h"

#include <stdio.h>

struct loader {
	struct moe_model *m;
	const struct moe_safetensors *st; /* NULL: shapes only, for an estimate */
	struct moe_st_tensor shape;	  /* the last tensor, where its data is not in the file */
	struct moe_pack *pack;		  /* NULL: nothing is read, on a dry engine */
};

bool moe_model_has(const struct moe_model *m, const struct moe_safetensors *st, enum moe_role role,
		   int layer, int expert)
{
	char name[MOE_TENSOR_NAME_MAX];

	for (int v = 0; moe_arch_tensor_name(&m->arch, role, layer, expert, v, name); v++)
		if (moe_safetensors_find(st, name))
			return true;
	return false;
}

enum moe_status moe_model_find_quantised(const struct moe_model *m, const struct moe_safetensors *st,
					 enum moe_role role, int layer, int expert,
					 struct moe_st_quantised *out, bool *found)
{
	char name[MOE_TENSOR_NAME_MAX];
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(&m->arch, role, layer, shape);

	*found = false;
	for (int v = 0; moe_arch_tensor_name(&m->arch, role, layer, expert, v, name); v++) {
		const struct moe_st_tensor *plain = moe_safetensors_find(st, name);

		if (plain && plain->dtype <= MOE_F64)
			return MOE_OK;
	}
	for (int v = 0; moe_arch_tensor_name(&m->arch, role, layer, expert, v, name) && !*found; v++)
		MOE_TRY(moe_st_quantised_find(st, name, ndim == 3 ? shape[0] : 0, shape[ndim - 2],
					      shape[ndim - 1], out, found));
	return MOE_OK;
}

enum moe_status moe_model_find(const struct moe_model *m, const struct moe_safetensors *st,
			       enum moe_role role, int layer, int expert,
			       const struct moe_st_tensor **out)
{
	char name[MOE_TENSOR_NAME_MAX];
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(&m->arch, role, layer, shape);

	for (int v = 0; moe_arch_tensor_name(&m->arch, role, layer, expert, v, name); v++)
		if (moe_safetensors_find(st, name))
			break;
		else if (!moe_arch_tensor_name(&m->arch, role, layer, expert, v + 1, name)) {
			/* none: the error names the first variant */
			moe_arch_tensor_name(&m->arch, role, layer, expert, 0, name);
			break;
		}
	MOE_TRY(moe_safetensors_get(st, name, ndim, shape, out));
	if ((*out)->dtype > MOE_F64)
		return moe_fail(MOE_ERR_UNSUPPORTED, "%s has dtype %s; F32, BF16, F16 and F64 can be "
				"loaded", name, (*out)->dtype_text);
	return MOE_OK;
}

/* What a checkpoint in bf16 would have. */
static const struct moe_st_tensor *only_shape(struct loader *l, enum moe_role role, int layer)
{
	struct moe_st_tensor *t = &l->shape;

	memset(t, 0, sizeof *t);
	t->dtype = MOE_BF16;
	t->ndim = moe_arch_tensor_shape(&l->m->arch, role, layer, t->shape);
	return t;
}

/* Finds a tensor. */
static enum moe_status next(struct loader *l, enum moe_role role, int layer, int expert,
			    const struct moe_st_tensor **out)
{
	if (!l->st) {
		*out = only_shape(l, role, layer);
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

/* The same for one that the caller reads itself. */
static enum moe_status next_read(struct loader *l, enum moe_role role, int layer,
				 const struct moe_st_tensor **out)
{
	MOE_TRY(next(l, role, layer, -1, out));
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

/* Plain weights that are their own masters are BF16. */
static enum moe_status check_trained(const struct loader *l, enum moe_role role, const struct moe_st_tensor *t)
{
	if (!moe_model_trains(l->m, role))
		return MOE_OK;
	if (l->st && l->m->params.masters == MOE_MASTERS_BF16 && t->dtype != MOE_BF16)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s is %s: masters bf16 needs a checkpoint in BF16; masters f32 takes any", t->name,
				t->dtype_text);
	return MOE_OK;
}

/* Quantised weights [n, k] that are trained can be quantised again. */
static enum moe_status check_requantise(const struct loader *l, enum moe_role role, int layer,
					const struct moe_coding *c, int64_t n, int64_t k)
{
	char name[MOE_TENSOR_NAME_MAX];
	enum moe_status st;

	if (!moe_model_trains(l->m, role))
		return MOE_OK;
	st = moe_requantise_check(c, n, k);
	if (st == MOE_OK)
		return MOE_OK;
	moe_arch_tensor_name(&l->m->arch, role, layer, 0, 0, name);
	return moe_fail_in(st, "%s: method lora trains an adapter on it", name);
}

/* A vector in f32; NULL where the model has none. */
static enum moe_status load_vector(struct loader *l, enum moe_role role, int layer, float **out)
{
	const struct moe_trained *trained;
	const struct moe_st_tensor *t;
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(&l->m->arch, role, layer, shape);
	int64_t n = ndim ? moe_shape_count(ndim, shape) : 0;

	if (!ndim)
		return MOE_OK;
	MOE_TRY(next_read(l, role, layer, &t));
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
static enum moe_status pack(struct loader *l, enum moe_role role, int layer, int chunk, const void *src,
			    enum moe_dtype dtype, int64_t n, int64_t k, int part, struct moe_weight *w)
{
	enum moe_dtype as = moe_model_packed_dtype(l->m, role, dtype);

	if (!w->data)
		w->data = take(l->m, moe_kernels()->weight_bytes(as, n, k, MOE_USE_GEMM), part,
			       "weights");
	if (!w->data)
		return MOE_ERR_NOMEM;
	MOE_TRY(moe_model_alloc_trained(l->m, role, layer, chunk, w, NULL, n, k, part, false));
	if (l->pack)
		return moe_pack_weight(l->pack, part, w, moe_model_trained(l->m, role, layer, chunk), src,
				       dtype, n, k);
	moe_kernels()->weight_pack(w, NULL, as, n, k, k, MOE_USE_GEMM);
	return MOE_OK;
}

/* The tensors of a quantised weight are done when its codes are. */
static enum moe_status begin_coded(struct loader *l, const struct moe_st_quantised *t)
{
	if (!l->pack)
		return MOE_OK;
	if (t->scale != t->codes)
		MOE_TRY(moe_pack_tensor(l->pack, t->scale));
	if (t->zero)
		MOE_TRY(moe_pack_tensor(l->pack, t->zero));
	return moe_pack_tensor(l->pack, t->codes);
}

static enum moe_status load_coded(struct loader *l, enum moe_role role, int layer, const struct moe_st_quantised *t,
				  int part, struct moe_weight *w)
{
	struct moe_coding c = t->q.coding;

	c.rows = t->q.rows;
	MOE_TRY(check_requantise(l, role, layer, &c, t->q.n, t->q.k));
	if (!w->data)
		w->data = take(l->m, moe_coded_bytes(&t->q.coding, t->q.n, t->q.k), part, "weights");
	if (!w->data)
		return MOE_ERR_NOMEM;
	MOE_TRY(moe_model_alloc_trained(l->m, role, layer, 0, w, NULL, t->q.n, t->q.k, part, true));
	MOE_TRY(begin_coded(l, t));
	return l->pack ? moe_pack_coded(l->pack, part, w, moe_model_trained(l->m, role, layer, 0), &t->q) : MOE_OK;
}

static enum moe_status load_weight(struct loader *l, enum moe_role role, int layer,
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
	MOE_TRY(next(l, role, layer, -1, &t));
	MOE_TRY(check_trained(l, role, t));
	return pack(l, role, layer, 0, t->data, t->dtype, t->shape[0], t->shape[1], part, w);
}

/* Embedding and head are multiplied plain. */
static enum moe_status load_vocab_coded(struct loader *l, enum moe_role role, const struct moe_st_quantised *t,
					struct moe_vocab *v)
{
	if (moe_model_trains(l->m, role))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s is %s: a quantised embedding or head is not trained; method lora or hybrid leaves it, or "
				"moesaic convert --weights bf16 makes it plain",
				t->codes->name, t->q.coding.format->name);
	MOE_TRY(begin_coded(l, t));
	for (int c = 0; c < v->n_chunks; c++) {
		int64_t n0 = (int64_t)c * MOE_VOCAB_CHUNK, n = MOE_MIN((int64_t)MOE_VOCAB_CHUNK, t->q.n - n0);
		int part = c % moe_engine_parts(l->m->engine);
		struct moe_weight *w = &v->chunk[c];

		if (!w->data)
			w->data = take(l->m, moe_kernels()->weight_bytes(MOE_BF16, n, t->q.k, MOE_USE_GEMM), part, "weights");
		if (!w->data)
			return MOE_ERR_NOMEM;
		if (l->pack)
			MOE_TRY(moe_pack_decoded(l->pack, part, w, t->codes, &t->q, n0, n));
		else
			moe_kernels()->weight_pack(w, NULL, MOE_BF16, n, t->q.k, t->q.k, MOE_USE_GEMM);
	}
	return MOE_OK;
}

static enum moe_status load_vocab(struct loader *l, enum moe_role role, struct moe_vocab *v)
{
	const struct moe_st_tensor *t;
	struct moe_st_quantised coded;
	bool found = false;
	size_t row;

	if (l->st)
		MOE_TRY(moe_model_find_quantised(l->m, l->st, role, -1, -1, &coded, &found));
	if (found)
		return load_vocab_coded(l, role, &coded, v);
	MOE_TRY(next(l, role, -1, -1, &t));
	MOE_TRY(check_trained(l, role, t));
	row = (size_t)t->shape[1] * moe_dtype_size(t->dtype);
	for (int c = 0; c < v->n_chunks; c++) {
		int64_t v0 = (int64_t)c * MOE_VOCAB_CHUNK;

		MOE_TRY(pack(l, role, -1, c, t->data ? (const char *)t->data + (size_t)v0 * row : NULL, t->dtype,
			     MOE_MIN((int64_t)MOE_VOCAB_CHUNK, t->shape[0] - v0), t->shape[1],
			     c % moe_engine_parts(l->m->engine), &v->chunk[c]));
	}
	return MOE_OK;
}

static enum moe_status load_ffn(struct loader *l, const enum moe_role role[3], int layer,
				struct moe_ffn *f)
{
	MOE_TRY(load_weight(l, role[0], layer, &f->gate));
	MOE_TRY(load_weight(l, role[1], layer, &f->up));
	return load_weight(l, role[2], layer, &f->down);
}

/* One expert's matrix from the last tensor, or the one before it (back 1). */
static enum moe_status pack_expert(struct loader *l, struct moe_experts *e, int back,
				   enum moe_expert_matrix which, int expert, const void *src,
				   enum moe_dtype dtype)
{
	if (l->pack && l->m->convert)
		return moe_pack_expert_as(l->pack, back, e, which, expert, src, dtype, l->m->convert);
	if (l->pack)
		return moe_pack_expert(l->pack, back, e, which, expert, src, dtype);
	if (l->m->convert) { /* the description */
		struct moe_quantised q = { .n = which == MOE_DOWN ? e->H : e->I,
					   .k = which == MOE_DOWN ? e->I : e->H };

		q.coding = moe_format_coding(l->m->convert, q.k);
		q.rows = q.coding.rows;
		for (int p = 0; p < e->P; p++)
			moe_experts_pack_coded(e, which, expert, p, &q, 0, 1);
		return MOE_OK;
	}
	moe_experts_pack(e, which, expert, src,
			 moe_model_packed_dtype(l->m, MOE_ROLE_EXPERT_GATE, dtype));
	return MOE_OK;
}

/* fused: gate rows, then up rows of each expert in one tensor */
static enum moe_status load_fused(struct loader *l, int layer, struct moe_experts *e)
{
	const struct moe_st_tensor *gu, *down;
	size_t n = (size_t)e->I * (size_t)e->H;

	MOE_TRY(next(l, MOE_ROLE_EXPERTS_GATE_UP, layer, -1, &gu));
	MOE_TRY(next(l, MOE_ROLE_EXPERTS_DOWN, layer, -1, &down));
	if (gu->dtype != down->dtype)
		return moe_fail(MOE_ERR_UNSUPPORTED, "%s is %s, %s is %s: one dtype is expected",
				gu->name, gu->dtype_text, down->name, down->dtype_text);
	n *= moe_dtype_size(gu->dtype);
	for (int i = 0; i < e->E; i++) {
		const char *at = (const char *)gu->data + 2 * n * (size_t)i;

		MOE_TRY(pack_expert(l, e, 1, MOE_GATE, i, at, gu->dtype));
		MOE_TRY(pack_expert(l, e, 1, MOE_UP, i, at + n, gu->dtype));
		MOE_TRY(pack_expert(l, e, 0, MOE_DOWN, i, (const char *)down->data + n * (size_t)i,
				    down->dtype));
	}
	return MOE_OK;
}

static enum moe_status load_single(struct loader *l, int layer, struct moe_experts *e,
				   enum moe_dtype dtype)
{
	static const enum moe_role roles[3] = { MOE_ROLE_EXPERT_GATE, MOE_ROLE_EXPERT_UP,
						MOE_ROLE_EXPERT_DOWN };
	const struct moe_st_tensor *t;

	for (int i = 0; i < e->E; i++)
		for (int j = 0; j < 3; j++) {
			MOE_TRY(next(l, roles[j], layer, i, &t));
			if (t->dtype != dtype)
				return moe_fail(MOE_ERR_UNSUPPORTED,
						"%s is %s, the layer's first expert %s: one dtype "
						"is expected", t->name, t->dtype_text,
						moe_dtype_name(dtype));
			MOE_TRY(pack_expert(l, e, 0, (enum moe_expert_matrix)j, i, t->data,
					    t->dtype));
		}
	return MOE_OK;
}

static enum moe_status other_coding(const struct moe_st_quantised *t, const struct moe_coding *first)
{
	if (t->q.coding.format == first->format && t->q.coding.group == first->group &&
	    t->q.coding.scale == first->scale && t->q.coding.zero == first->zero)
		return MOE_OK;
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"%s is %s with a scale (%s) per %lld columns, the layer's first expert %s with one (%s) per "
			"%lld: one format is expected", t->codes->name, t->q.coding.format->name,
			moe_dtype_name(t->q.coding.scale), (long long)t->q.coding.group, first->format->name,
			moe_dtype_name(first->scale), (long long)first->group);
}

static enum moe_status missing_coded(const struct loader *l, enum moe_role role, int layer, int expert)
{
	char name[MOE_TENSOR_NAME_MAX];

	moe_arch_tensor_name(&l->m->arch, role, layer, MOE_MAX(expert, 0), 0, name);
	return moe_fail(MOE_ERR_FORMAT, "%s: the layer's first expert is quantised, this one has no codes", name);
}

static enum moe_status next_coded(struct loader *l, enum moe_role role, int layer, int expert,
				  const struct moe_coding *coding, struct moe_st_quantised *t)
{
	bool found;

	MOE_TRY(moe_model_find_quantised(l->m, l->st, role, layer, expert, t, &found));
	if (!found)
		return missing_coded(l, role, layer, expert);
	MOE_TRY(other_coding(t, coding));
	return begin_coded(l, t);
}

/* Where gate and up are trained, they have blocks of their own, one after the other. */
static enum moe_status check_fused(const struct loader *l, const struct moe_st_quantised *t, int64_t I, bool alternate)
{
	int64_t rows = t->q.rows;

	if (!moe_model_trains(l->m, MOE_ROLE_EXPERT_GATE) || (!alternate && (rows <= 1 || I % rows == 0)))
		return MOE_OK;
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"%s has rows of gate and up in turn, or scales (one for %lld rows) that both share: method lora trains "
			"an adapter on it, or moesaic convert makes tensors of single experts",
			t->codes->name, (long long)rows);
}

/* Gate rows and up rows of an expert follow each other, or alternate. */
static enum moe_status load_fused_coded(struct loader *l, int layer, struct moe_experts *e,
					const struct moe_coding *coding)
{
	struct moe_st_quantised t;
	bool alternate = l->m->arch.gate_up_alternate;

	MOE_TRY(next_coded(l, MOE_ROLE_EXPERTS_GATE_UP, layer, -1, &coding[MOE_GATE], &t));
	MOE_TRY(check_fused(l, &t, e->I, alternate));
	for (int i = 0; i < e->E; i++) {
		struct moe_quantised q = moe_st_quantised_expert(&t, i);

		MOE_TRY(moe_pack_expert_coded(l->pack, 0, e, MOE_GATE, i, &q, 0, alternate ? 2 : 1));
		MOE_TRY(moe_pack_expert_coded(l->pack, 0, e, MOE_UP, i, &q, alternate ? 1 : e->I,
					      alternate ? 2 : 1));
	}
	MOE_TRY(next_coded(l, MOE_ROLE_EXPERTS_DOWN, layer, -1, &coding[MOE_DOWN], &t));
	for (int i = 0; i < e->E; i++) {
		struct moe_quantised q = moe_st_quantised_expert(&t, i);

		MOE_TRY(moe_pack_expert_coded(l->pack, 0, e, MOE_DOWN, i, &q, 0, 1));
	}
	return MOE_OK;
}

static enum moe_status load_single_coded(struct loader *l, int layer, struct moe_experts *e,
					 const struct moe_coding *coding)
{
	static const enum moe_role roles[3] = { MOE_ROLE_EXPERT_GATE, MOE_ROLE_EXPERT_UP,
						MOE_ROLE_EXPERT_DOWN };
	struct moe_st_quantised t;

	for (int i = 0; i < e->E; i++)
		for (int j = 0; j < 3; j++) {
			MOE_TRY(next_coded(l, roles[j], layer, i, &coding[j], &t));
			MOE_TRY(moe_pack_expert_coded(l->pack, 0, e, (enum moe_expert_matrix)j, i, &t.q,
						      0, 1));
		}
	return MOE_OK;
}

/* How the layer's experts are quantised: as stored, or as asked for. */
struct expert_coding {
	bool coded, fused;
	struct moe_coding coding[MOE_EXPERT_MATRICES];
};

static enum moe_status stored_coding(struct loader *l, int layer, struct expert_coding *c)
{
	static const enum moe_role single[3] = { MOE_ROLE_EXPERT_GATE, MOE_ROLE_EXPERT_UP,
						 MOE_ROLE_EXPERT_DOWN };
	static const enum moe_role fused[3] = { MOE_ROLE_EXPERTS_GATE_UP, MOE_ROLE_EXPERTS_GATE_UP,
						MOE_ROLE_EXPERTS_DOWN };
	struct moe_st_quantised t;

	MOE_TRY(moe_model_find_quantised(l->m, l->st, fused[0], layer, -1, &t, &c->fused));
	c->coded = c->fused;
	if (!c->fused)
		MOE_TRY(moe_model_find_quantised(l->m, l->st, single[0], layer, 0, &t, &c->coded));
	for (int j = 0; c->coded && j < 3; j++) {
		enum moe_role role = c->fused ? fused[j] : single[j];
		bool found;

		MOE_TRY(moe_model_find_quantised(l->m, l->st, role, layer, c->fused ? -1 : 0, &t, &found));
		if (!found)
			return missing_coded(l, role, layer, 0);
		c->coding[j] = t.q.coding;
		c->coding[j].rows = t.q.rows;
	}
	return MOE_OK;
}

enum moe_status moe_model_choose_format(struct moe_model *m, const struct moe_safetensors *st)
{
	struct loader l = { .m = m, .st = st };
	struct expert_coding c = { 0 };
	const char *name = m->params.weights;
	int layer = 0;

	m->convert = m->format = NULL;
	m->params.weights = NULL; /* the caller's */
	m->expand = name && !strcmp(name, "bf16");
	if (name && strcmp(name, "keep") && !m->expand) {
		m->convert = moe_format_find(name);
		if (!m->convert || !m->convert->quantise)
			return moe_fail(MOE_ERR_ARG, "weights \"%s\": keep, bf16, int8, int4, fp8 and mxfp4 are possible",
					name);
	}
	while (layer < m->arch.n_layers && !m->arch.layer_is_moe[layer])
		layer++;
	if (layer < m->arch.n_layers && st)
		MOE_TRY(stored_coding(&l, layer, &c));
	m->format = c.coded && !m->expand ? c.coding[0].format : m->convert;
	if (c.coded && m->convert && m->convert != m->format)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"the checkpoint's experts are %s: weights \"%s\" would quantise them twice; "
				"\"keep\" loads them as they are, \"bf16\" expands them", m->format->name, name);
	return MOE_OK;
}

/* Without reading any; coding: of quantised ones, or NULL. */
static enum moe_status describe_experts(struct loader *l, struct moe_experts *e, enum moe_dtype dtype,
					const struct moe_coding *coding)
{
	for (int i = 0; i < e->E; i++)
		for (int j = 0; j < MOE_EXPERT_MATRICES; j++) {
			enum moe_expert_matrix which = (enum moe_expert_matrix)j;
			struct moe_quantised q = { .n = which == MOE_DOWN ? e->H : e->I,
						   .k = which == MOE_DOWN ? e->I : e->H };

			if (!coding) {
				MOE_TRY(pack_expert(l, e, 0, which, i, NULL, dtype));
				continue;
			}
			q.coding = coding[j];
			q.rows = coding[j].rows;
			for (int p = 0; p < e->P; p++)
				moe_experts_pack_coded(e, which, i, p, &q, 0, 1);
		}
	return MOE_OK;
}

static enum moe_status check_codings(const struct loader *l, int layer, const struct moe_experts *e,
				     const struct moe_coding *coding)
{
	for (int j = 0; j < MOE_EXPERT_MATRICES; j++)
		MOE_TRY(check_requantise(l, (enum moe_role)(MOE_ROLE_EXPERT_GATE + j), layer, &coding[j],
					 j == MOE_DOWN ? e->H : e->I, j == MOE_DOWN ? e->I : e->H));
	return MOE_OK;
}

static enum moe_status load_experts(struct loader *l, int layer, struct moe_experts *e)
{
	const struct moe_lora_plan *lora = &l->m->lora;
	int r = moe_lora_rank(lora, MOE_ADAPTER_EXPERTS, layer);
	bool fused = l->st && moe_model_has(l->m, l->st, MOE_ROLE_EXPERTS_GATE_UP, layer, -1);
	struct expert_coding c = { .coded = false };
	const struct moe_st_tensor *t;
	bool coded, whole = moe_model_trains(l->m, MOE_ROLE_EXPERT_GATE);
	struct moe_experts_shape s = {
		.E = e->E,
		.k = e->k,
		.H = e->H,
		.I = e->I,
		.r = r,
		.group_size = l->m->group_size,
		.scale = r > 0 ? (float)moe_lora_scaling(lora->rslora, r,
							 lora->alpha[MOE_ADAPTER_EXPERTS])
			       : 0,
		.share_a = lora->share_a,
		.trainable = r > 0 && !l->m->params.inference_only,
		.backward = l->m->backward.mode,
		.base_grads = whole,
		.train_base = whole,
		.frozen_router = !moe_model_trains(l->m, MOE_ROLE_ROUTER),
		.train_router = moe_model_trains(l->m, MOE_ROLE_ROUTER),
		.own_masters = whole && l->m->params.masters == MOE_MASTERS_BF16,
		.key = moe_model_rounding_key(l->m, MOE_ROLE_EXPERT_GATE, layer),
	};

	if (l->st)
		MOE_TRY(stored_coding(l, layer, &c));
	coded = c.coded && !l->m->expand;
	if (coded)
		s.coding = c.coding;
	for (int j = 0; !c.coded && l->m->convert && j < MOE_EXPERT_MATRICES; j++) {
		c.coding[j] = moe_format_coding(l->m->convert, j == MOE_DOWN ? e->I : e->H);
		s.coding = c.coding;
	}
	if (c.coded)
		t = only_shape(l, MOE_ROLE_EXPERT_GATE, layer);
	else if (l->st)
		MOE_TRY(moe_model_find(l->m, l->st,
				       fused ? MOE_ROLE_EXPERTS_GATE_UP : MOE_ROLE_EXPERT_GATE, layer, 0,
				       &t));
	else
		t = only_shape(l, MOE_ROLE_EXPERT_GATE, layer);
	if (!coded)
		MOE_TRY(check_trained(l, MOE_ROLE_EXPERT_GATE, t));
	if (s.coding)
		MOE_TRY(check_codings(l, layer, e, s.coding));
	MOE_TRY(moe_experts_alloc(l->m->engine, &s,
				  moe_model_packed_dtype(l->m, MOE_ROLE_EXPERT_GATE, t->dtype), e));
	if (l->st && !l->pack)
		MOE_TRY(describe_experts(l, e, t->dtype, coded ? c.coding : NULL));
	else if (c.coded)
		MOE_TRY(c.fused ? load_fused_coded(l, layer, e, c.coding)
				: load_single_coded(l, layer, e, c.coding));
	else
		MOE_TRY(fused ? load_fused(l, layer, e) : load_single(l, layer, e, t->dtype));
	MOE_TRY(next_read(l, MOE_ROLE_ROUTER, layer, &t));
	if (e->router_param.value) { /* its master is its packed form */
		if (t->data)
			moe_to_f32(e->router_param.value, t->data, t->dtype, (size_t)(e->E * e->H));
		moe_kernels()->weight_pack(&e->router_weight, NULL, MOE_F32, e->E, e->H, e->H,
					   MOE_USE_EXACT);
		return MOE_OK;
	}
	moe_kernels()->weight_pack(&e->router_weight, t->data, t->dtype, e->E, e->H, e->H,
				   MOE_USE_EXACT);
	return MOE_OK;
}

static enum moe_status load_attention(struct loader *l, int layer, struct moe_decoder_layer *d)
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

static enum moe_status load_layer(struct loader *l, int i)
{
	static const enum moe_role dense[3] = { MOE_ROLE_DENSE_GATE, MOE_ROLE_DENSE_UP,
						MOE_ROLE_DENSE_DOWN };
	static const enum moe_role shared[3] = { MOE_ROLE_SHARED_GATE, MOE_ROLE_SHARED_UP,
						 MOE_ROLE_SHARED_DOWN };
	struct moe_decoder_layer *d = &l->m->decoder.layers[i];

	MOE_TRY(load_attention(l, i, d));
	if (!d->experts)
		return load_ffn(l, dense, i, d->ffn);
	MOE_TRY(load_experts(l, i, d->experts));
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

static enum moe_status load_all(struct loader *l)
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
	struct loader l = { .m = m, .st = st };
	enum moe_status status;

	if (st && !moe_engine_is_dry(m->engine))
		MOE_TRY(moe_pack_create(m, st, &l.pack));
	status = load_all(&l);
	if (status == MOE_OK && l.pack)
		status = moe_pack_run(l.pack);
	moe_pack_destroy(l.pack);
	return status;
}
