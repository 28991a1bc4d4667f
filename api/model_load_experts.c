/* SPDX-License-Identifier: Apache-2.0 */
/* Experts of a layer: how they are stored (plain, quantised, fused), and into which form they are loaded. */
#include "api/model_load.h"

/* fused: gate rows, then up rows of each expert in one tensor */
static enum moe_status load_fused(struct moe_loader *l, int layer, struct moe_experts *e)
{
	const struct moe_st_tensor *gu, *down;
	size_t n = (size_t)e->I * (size_t)e->H;

	MOE_TRY(moe_load_next(l, MOE_ROLE_EXPERTS_GATE_UP, layer, -1, &gu));
	MOE_TRY(moe_load_next(l, MOE_ROLE_EXPERTS_DOWN, layer, -1, &down));
	if (gu->dtype != down->dtype)
		return moe_fail(MOE_ERR_UNSUPPORTED, "%s is %s, %s is %s: one dtype is expected",
				gu->name, gu->dtype_text, down->name, down->dtype_text);
	n *= moe_dtype_size(gu->dtype);
	for (int i = 0; i < e->E; i++) {
		const char *at = (const char *)gu->data + 2 * n * (size_t)i;

		MOE_TRY(moe_pack_expert(l->pack, 1, e, MOE_GATE, i, at, gu->dtype));
		MOE_TRY(moe_pack_expert(l->pack, 1, e, MOE_UP, i, at + n, gu->dtype));
		MOE_TRY(moe_pack_expert(l->pack, 0, e, MOE_DOWN, i,
					(const char *)down->data + n * (size_t)i, down->dtype));
	}
	return MOE_OK;
}

static enum moe_status load_single(struct moe_loader *l, int layer, struct moe_experts *e,
				   enum moe_dtype dtype)
{
	static const enum moe_role roles[3] = { MOE_ROLE_EXPERT_GATE, MOE_ROLE_EXPERT_UP,
						MOE_ROLE_EXPERT_DOWN };
	const struct moe_st_tensor *t;

	for (int i = 0; i < e->E; i++)
		for (int j = 0; j < 3; j++) {
			MOE_TRY(moe_load_next(l, roles[j], layer, i, &t));
			if (t->dtype != dtype)
				return moe_fail(MOE_ERR_UNSUPPORTED,
						"%s is %s, the layer's first expert %s: one dtype "
						"is expected",
						t->name, t->dtype_text, moe_dtype_name(dtype));
			MOE_TRY(moe_pack_expert(l->pack, 0, e, (enum moe_expert_matrix)j, i,
						t->data, t->dtype));
		}
	return MOE_OK;
}

static enum moe_status other_coding(const struct moe_loader *l, enum moe_role role, const struct moe_st_quantised *t,
				    const struct moe_coding *first)
{
	const struct moe_coding *c = &t->q.coding;

	if (moe_coding_alike(c, first, moe_model_trains(l->m, role)))
		return MOE_OK;
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"%s is %s with a scale (%s) per %lld columns of %lld rows, the layer's first expert %s with one "
			"(%s) per %lld of %lld: one format is expected",
			t->codes->name, c->format->name, moe_dtype_name(c->scale), (long long)c->group, (long long)c->rows,
			first->format->name, moe_dtype_name(first->scale), (long long)first->group,
			(long long)first->rows);
}

static enum moe_status missing_coded(const struct moe_loader *l, enum moe_role role, int layer,
				     int expert)
{
	char name[MOE_TENSOR_NAME_MAX];

	moe_arch_tensor_name(&l->m->arch, role, layer, MOE_MAX(expert, 0), 0, name);
	return moe_fail(MOE_ERR_FORMAT,
			"%s: the layer's first expert is quantised, this one has no codes", name);
}

static enum moe_status next_coded(struct moe_loader *l, enum moe_role role, int layer, int expert,
				  const struct moe_coding *coding, struct moe_st_quantised *t)
{
	bool found;

	MOE_TRY(moe_model_find_quantised(l->m, l->st, role, layer, expert, t, &found));
	if (!found)
		return missing_coded(l, role, layer, expert);
	MOE_TRY(other_coding(l, role, t, coding));
	return moe_load_begin_coded(l, t);
}

/* Gate rows and up rows of an expert follow each other, or alternate. */
static enum moe_status load_fused_coded(struct moe_loader *l, int layer, struct moe_experts *e,
					const struct moe_coding *coding)
{
	struct moe_st_quantised t;
	bool alternate = l->m->arch.gate_up_alternate;

	MOE_TRY(next_coded(l, MOE_ROLE_EXPERTS_GATE_UP, layer, -1, &coding[MOE_GATE], &t));
	for (int i = 0; i < e->E; i++) {
		struct moe_quantised q = moe_st_quantised_expert(&t, i);

		MOE_TRY(moe_pack_expert_coded(l->pack, e, MOE_GATE, i, &q, 0, alternate ? 2 : 1));
		MOE_TRY(moe_pack_expert_coded(l->pack, e, MOE_UP, i, &q, alternate ? 1 : e->I,
					      alternate ? 2 : 1));
	}
	MOE_TRY(next_coded(l, MOE_ROLE_EXPERTS_DOWN, layer, -1, &coding[MOE_DOWN], &t));
	for (int i = 0; i < e->E; i++) {
		struct moe_quantised q = moe_st_quantised_expert(&t, i);

		MOE_TRY(moe_pack_expert_coded(l->pack, e, MOE_DOWN, i, &q, 0, 1));
	}
	return MOE_OK;
}

static enum moe_status load_single_coded(struct moe_loader *l, int layer, struct moe_experts *e,
					 const struct moe_coding *coding)
{
	static const enum moe_role roles[3] = { MOE_ROLE_EXPERT_GATE, MOE_ROLE_EXPERT_UP,
						MOE_ROLE_EXPERT_DOWN };
	struct moe_st_quantised t;

	for (int i = 0; i < e->E; i++)
		for (int j = 0; j < 3; j++) {
			MOE_TRY(next_coded(l, roles[j], layer, i, &coding[j], &t));
			MOE_TRY(moe_pack_expert_coded(l->pack, e, (enum moe_expert_matrix)j, i,
						      &t.q, 0, 1));
		}
	return MOE_OK;
}

/* How the layer's experts are quantised: as stored, or as asked for. */
struct expert_coding {
	bool coded, fused;
	struct moe_coding coding[MOE_EXPERT_MATRICES];
	const struct moe_st_tensor *codes[MOE_EXPERT_MATRICES]; /* stored: of the first expert, or of all */
};

static enum moe_status stored_coding(struct moe_loader *l, int layer, struct expert_coding *c)
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

		MOE_TRY(moe_model_find_quantised(l->m, l->st, role, layer, c->fused ? -1 : 0, &t,
						 &found));
		if (!found)
			return missing_coded(l, role, layer, 0);
		c->coding[j] = t.q.coding;
		c->codes[j] = t.codes;
	}
	return MOE_OK;
}

enum moe_status moe_model_choose_format(struct moe_model *m, const struct moe_safetensors *st)
{
	struct moe_loader l = { .m = m, .st = st };
	struct expert_coding c = { 0 };
	const char *name = m->params.weights;
	char made[MOE_FORMATS_TEXT];
	int layer = 0;

	m->convert = m->format = NULL;
	m->params.weights = NULL; /* the caller's */
	m->expand = name && !strcmp(name, "bf16");
	if (name && strcmp(name, "keep") && !m->expand) {
		m->convert = moe_format_find(name);
		if (!m->convert || !m->convert->quantise)
			return moe_fail(MOE_ERR_ARG,
					"weights \"%s\": keep, bf16 and %s are possible", name,
					moe_formats_text(false, made));
	}
	while (layer < m->arch.n_layers && !m->arch.layer_is_moe[layer])
		layer++;
	if (layer < m->arch.n_layers && st)
		MOE_TRY(stored_coding(&l, layer, &c));
	m->format = c.coded && !m->expand ? c.coding[0].format : m->convert;
	if (c.coded && m->convert && m->convert != m->format)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"the checkpoint's experts are %s: weights \"%s\" would quantise "
				"them twice; "
				"\"keep\" loads them as they are, \"bf16\" expands them",
				m->format->name, name);
	return MOE_OK;
}

/* Without reading any; coding: of quantised ones, or NULL. */
static void describe_experts(struct moe_loader *l, struct moe_experts *e, enum moe_dtype dtype,
			     const struct moe_coding *coding)
{
	enum moe_dtype as = moe_model_packed_dtype(l->m, MOE_ROLE_EXPERT_GATE, dtype);

	for (int i = 0; i < e->E; i++)
		for (int j = 0; j < MOE_EXPERT_MATRICES; j++) {
			enum moe_expert_matrix which = (enum moe_expert_matrix)j;
			struct moe_quantised q = { .n = which == MOE_DOWN ? e->H : e->I,
						   .k = which == MOE_DOWN ? e->I : e->H };

			if (!coding) {
				moe_experts_pack(e, which, i, NULL, as);
				continue;
			}
			q.coding = coding[j];
			for (int p = 0; p < e->P; p++)
				moe_experts_pack_coded(e, which, i, p, &q, 0, 1);
		}
}

/* Where gate and up are trained, they have blocks of their own, one after the other. */
static enum moe_status check_fused(const struct moe_loader *l, const struct expert_coding *c, int64_t I)
{
	int64_t rows = c->coding[MOE_GATE].rows;
	bool alternate = l->m->arch.gate_up_alternate;

	if (!c->fused || !moe_model_trains(l->m, MOE_ROLE_EXPERT_GATE) ||
	    (!alternate && (rows <= 1 || I % rows == 0)))
		return MOE_OK;
	if (alternate)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: %s has rows of gate and up in turn, which are not quantised again after an "
				"update: method lora trains an adapter on it",
				moe_load_file(l, c->codes[MOE_GATE]), c->codes[MOE_GATE]->name);
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"%s: %s has scales (one for %lld rows) that gate and up share (%lld rows each), which are "
			"not quantised again after an update: method lora trains an adapter on it, or moesaic "
			"convert makes tensors of single experts",
			moe_load_file(l, c->codes[MOE_GATE]), c->codes[MOE_GATE]->name, (long long)rows,
			(long long)I);
}

static enum moe_status check_codings(const struct moe_loader *l, int layer,
				     const struct moe_experts *e, const struct expert_coding *c)
{
	for (int j = 0; j < MOE_EXPERT_MATRICES; j++)
		MOE_TRY(moe_load_check_requantise(l, (enum moe_role)(MOE_ROLE_EXPERT_GATE + j),
						  layer, c->codes[j], &c->coding[j],
						  j == MOE_DOWN ? e->H : e->I,
						  j == MOE_DOWN ? e->I : e->H));
	return check_fused(l, c, e->I);
}

static struct moe_experts_shape shape_of(const struct moe_model *m, int layer,
					 const struct moe_experts *e)
{
	const struct moe_lora_plan *lora = &m->lora;
	int r = moe_lora_rank(lora, MOE_ADAPTER_EXPERTS, layer);
	bool whole = moe_model_trains(m, MOE_ROLE_EXPERT_GATE),
	     router = moe_model_trains(m, MOE_ROLE_ROUTER);

	return (struct moe_experts_shape){
		.E = e->E,
		.k = e->k,
		.H = e->H,
		.I = e->I,
		.r = r,
		.group_size = m->group_size,
		.scale = r > 0 ? (float)moe_lora_scaling(lora->rslora, r,
							 lora->alpha[MOE_ADAPTER_EXPERTS])
			       : 0,
		.glu = e->glu,
		.share_a = lora->share_a,
		.trainable = r > 0 && !m->params.inference_only,
		.backward = m->backward.mode,
		.base_grads = whole,
		.train_base = whole,
		.frozen_router = !router,
		.train_router = router,
		.own_masters = whole && m->params.masters == MOE_MASTERS_BF16,
		.key = moe_model_rounding_key(m, MOE_ROLE_EXPERT_GATE, layer),
	};
}

static enum moe_status load_router(struct moe_loader *l, int layer, struct moe_experts *e)
{
	const struct moe_st_tensor *t;
	const void *packed;
	enum moe_dtype dtype;

	MOE_TRY(moe_load_next_read(l, MOE_ROLE_ROUTER, layer, &t));
	packed = t->data;
	dtype = t->dtype;
	if (e->router_param.value) { /* its master is its packed form */
		if (t->data)
			moe_to_f32(e->router_param.value, t->data, t->dtype, (size_t)(e->E * e->H));
		packed = NULL;
		dtype = MOE_F32;
	}
	moe_kernels()->weight_pack(&e->router_weight, packed, dtype, e->E, e->H, e->H,
				   MOE_USE_EXACT);
	return MOE_OK;
}

/* Of stored tensors, coded or plain; without st those of a plain checkpoint. */
static enum moe_status plain_dtype(struct moe_loader *l, int layer, bool fused, bool coded,
				   const struct moe_st_tensor **out)
{
	if (!l->st || coded) {
		*out = moe_load_only_shape(l, MOE_ROLE_EXPERT_GATE, layer);
		return MOE_OK;
	}
	return moe_model_find(l->m, l->st, fused ? MOE_ROLE_EXPERTS_GATE_UP : MOE_ROLE_EXPERT_GATE,
			      layer, 0, out);
}

enum moe_status moe_load_experts(struct moe_loader *l, int layer, struct moe_experts *e)
{
	bool fused = l->st && moe_model_has(l->m, l->st, MOE_ROLE_EXPERTS_GATE_UP, layer, -1);
	struct moe_experts_shape s = shape_of(l->m, layer, e);
	struct expert_coding c = { .coded = false };
	const struct moe_st_tensor *t;
	enum moe_dtype dtype;

	if (l->st)
		MOE_TRY(stored_coding(l, layer, &c));
	for (int j = 0; !c.coded && l->m->convert && j < MOE_EXPERT_MATRICES; j++)
		c.coding[j] = moe_format_coding(l->m->convert, j == MOE_DOWN ? e->I : e->H);
	if (c.coded ? !l->m->expand : l->m->convert != NULL)
		s.coding = c.coding;
	MOE_TRY(plain_dtype(l, layer, fused, c.coded, &t));
	dtype = t->dtype;
	if (!c.coded || l->m->expand)
		MOE_TRY(moe_load_check_trained(l, MOE_ROLE_EXPERT_GATE, t));
	if (s.coding)
		MOE_TRY(check_codings(l, layer, e, &c));
	MOE_TRY(moe_experts_alloc(l->m->engine, &s,
				  moe_model_packed_dtype(l->m, MOE_ROLE_EXPERT_GATE, dtype), e));
	if (!l->pack)
		describe_experts(l, e, dtype, s.coding);
	else if (c.coded)
		MOE_TRY(c.fused ? load_fused_coded(l, layer, e, c.coding)
				: load_single_coded(l, layer, e, c.coding));
	else
		MOE_TRY(fused ? load_fused(l, layer, e) : load_single(l, layer, e, dtype));
	return load_router(l, layer, e);
}
