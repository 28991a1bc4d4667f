/* SPDX-License-Identifier: Apache-2.0 */
/* Models whose own weights are trained: documents for them, and every weight's value or gradient.
 */
#ifndef MOE_TESTS_FULL_CHECK_H
#define MOE_TESTS_FULL_CHECK_H

#include "tests/model_configs.h"

#define DOCS 4
static const int doc_lengths[DOCS] = { 62, 3, 20, 1 };

struct data {
	int32_t ids[DOCS][96], labels[DOCS][96];
};

static inline void make_data(struct data *d, int64_t vocab, uint64_t seed)
{
	for (int i = 0; i < DOCS; i++)
		for (int t = 0; t < 96; t++) {
			d->ids[i][t] =
				(int32_t)((0.5f + 0.49f * ref_uniform(&seed)) * (float)vocab);
			d->labels[i][t] = ref_uniform(&seed) > -0.3f ? d->ids[i][t] : -100;
		}
}

/* Two micro-batches, the second one without a trained token in its last block. */
static inline void add_data(struct run *r, const struct data *d)
{
	add_batch(r, 100);
	add_batch(r, 100);
	for (int i = 0; i < DOCS; i++)
		moe_model_batch_add(&r->batch[i / 2], d->ids[i], d->labels[i], doc_lengths[i]);
}

static inline struct moe_model_params whole_params(const char *dir, enum moe_method method, enum moe_masters masters)
{
	return (struct moe_model_params){ .struct_size = sizeof(struct moe_model_params),
					  .dir = dir,
					  .max_tokens = 100,
					  .slots = 2,
					  .lora_rank = 4,
					  .seed = 1,
					  .method = method,
					  .masters = masters };
}

/* A field of a role's tensor, whole, in the checkpoint's layout; NULL: not trained. Freed by the
 * caller. */
static inline float *get_tensor(const struct moe_model *m, int role, int layer, int expert,
				enum moe_param_field f, int64_t *n)
{
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(&m->arch, (enum moe_role)role, layer, shape);
	const struct moe_experts *x = layer >= 0 ? m->decoder.layers[layer].experts : NULL;
	int chunks =
		role == MOE_ROLE_EMBED || role == MOE_ROLE_LM_HEAD ? m->decoder.head.n_chunks : 1;
	float *out;

	if (!ndim || !moe_model_trains(m, (enum moe_role)role))
		return NULL;
	*n = moe_shape_count(ndim, shape);
	out = calloc((size_t)*n, sizeof *out);
	if (moe_role_is_expert((enum moe_role)role)) {
		moe_experts_get_base(x, (enum moe_expert_matrix)(role - MOE_ROLE_EXPERT_GATE), f,
				     expert, out);
		return out;
	}
	if (role == MOE_ROLE_ROUTER) {
		memcpy(out, f == MOE_GRAD ? x->router_param.grad : x->router_param.value,
		       (size_t)*n * sizeof *out);
		return out;
	}
	for (int c = 0; c < chunks; c++) {
		const struct moe_trained *a = moe_model_trained(m, (enum moe_role)role, layer, c);
		float *at = out + (int64_t)c * MOE_VOCAB_CHUNK * shape[ndim - 1];

		if (f == MOE_GRAD)
			memcpy(at, a->param.grad, (size_t)a->param.piece * sizeof *at);
		else
			moe_trained_get(a, 0, a->param.rows, at);
	}
	return out;
}

/* fn for every tensor that the checkpoint has and the model trains. */
static inline void each_tensor(const struct moe_model *m,
			       void (*fn)(const struct moe_model *m, int role, int layer,
					  int expert, void *user),
			       void *user)
{
	for (int role = 0; role < MOE_ROLE_COUNT; role++) {
		bool model = role <= MOE_ROLE_LM_HEAD;

		if (role == MOE_ROLE_EXPERTS_GATE_UP || role == MOE_ROLE_EXPERTS_DOWN)
			continue;
		for (int l = model ? -1 : 0; l < (model ? 0 : m->arch.n_layers); l++)
			for (int e = moe_role_is_expert((enum moe_role)role) ? 0 : -1;
			     e < (moe_role_is_expert((enum moe_role)role) ? m->arch.n_experts : 0); e++)
				fn(m, role, l, e, user);
	}
}

/* All values that a model trains, one after the other. */
struct copy {
	float *v;
	int64_t n, room;
};

static inline void add_copy(const struct moe_model *m, int role, int layer, int expert, void *user)
{
	struct copy *c = user;
	int64_t n = 0;
	float *v = get_tensor(m, role, layer, expert, MOE_VALUE, &n);

	if (!v)
		return;
	c->v = realloc(c->v, (size_t)(c->n + n) * sizeof *c->v);
	memcpy(c->v + c->n, v, (size_t)n * sizeof *v);
	c->n += n;
	free(v);
}

#endif
