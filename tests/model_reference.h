/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tiny random checkpoints of any known architecture, and a decoder in double with plain loops over
 * them, written from the formulas of transformers, not from our code. Gradients: by differences.
 */
#ifndef MOE_TESTS_MODEL_REFERENCE_H
#define MOE_TESTS_MODEL_REFERENCE_H

#include "tests/model_check.h"
#include "model/readers/safetensors_writer.h"

struct ref_item {
	char name[MOE_TENSOR_NAME_MAX];
	int ndim;
	int64_t shape[MOE_MAX_NDIM];
	float *data;
};

/*
 * LoRA of a layer in double, zero-rank where absent: a and b of dense matrices, attention's and then the MLP's
 * (MOE_FFN_TAG); experts in kt's layout.
 */
struct ref_lora {
	int r[MOE_DENSE_TAGS];
	double scale[MOE_DENSE_TAGS];
	double *a[MOE_DENSE_TAGS], *b[MOE_DENSE_TAGS], *experts[MOE_LORA_ARRAYS];
};

struct ref_model {
	struct moe_arch arch;
	char dir[512];
	struct ref_item *item;
	size_t n_items;
	const float **at; /* data of items, by ref_index; NULL: there is none */
	struct ref_lora *lora; /* [layers] */
	int expert_r;
	double expert_scale;
	/* of the documents since the last ref_aux: per layer and expert */
	double *prob, *count, tokens, z; /* z: sum of (log sum exp of the logits)^2 */
	double gap; /* least difference of logits between a chosen expert and one that is not */
};

static inline float ref_uniform(uint64_t *state)
{
	*state = *state * 6364136223846793005ull + 1442695040888963407ull;
	return (float)((double)(*state >> 11) * 0x1p-53 * 2 - 1);
}

/* Weights and LoRA are representable in bf16: packed tables round none of them. */
static bool ref_bf16;

static inline float ref_value(float v)
{
	uint16_t bits;

	if (!ref_bf16)
		return v;
	moe_from_f32(&bits, MOE_BF16, &v, 1);
	return moe_bf16_to_f32(bits);
}

/* Layer and expert -1: none. */
static inline size_t ref_index(const struct ref_model *m, enum moe_role role, int layer, int expert)
{
	size_t layers = (size_t)m->arch.n_layers + 1, experts = (size_t)m->arch.n_experts + 1;

	return ((size_t)role * layers + (size_t)(layer + 1)) * experts + (size_t)(expert + 1);
}

static inline void ref_add(struct ref_model *m, enum moe_role role, int layer, int expert,
			   uint64_t *seed)
{
	struct ref_item it = { .ndim = 0 };
	int64_t n;
	bool norm = role == MOE_ROLE_FINAL_NORM || role == MOE_ROLE_ATTN_NORM ||
		    role == MOE_ROLE_FFN_NORM || role == MOE_ROLE_Q_NORM || role == MOE_ROLE_K_NORM;

	it.ndim = moe_arch_tensor_shape(&m->arch, role, layer, it.shape);
	if (!it.ndim || !moe_arch_tensor_name(&m->arch, role, layer, expert, 0, it.name))
		return;
	n = moe_shape_count(it.ndim, it.shape);
	it.data = malloc((size_t)n * sizeof *it.data);
	for (int64_t i = 0; i < n; i++) {
		float u = ref_uniform(seed);

		it.data[i] = norm	    ? 1 + 0.3f * u
			     : it.ndim == 1 ? 0.3f * u
			     : role == MOE_ROLE_ROUTER
				     ? u
				     : 2.0f * u / sqrtf((float)it.shape[it.ndim - 1]);
		it.data[i] = ref_value(it.data[i]);
	}
	m->at[ref_index(m, role, layer, expert)] = it.data;
	m->item = realloc(m->item, (m->n_items + 1) * sizeof *m->item);
	m->item[m->n_items++] = it;
}

static inline void ref_create(struct ref_model *m, const char *name, const char *config,
			      uint64_t seed)
{
	struct moe_st_item *items;
	char path[600];

	memset(m, 0, sizeof *m);
	snprintf(m->dir, sizeof m->dir, "%s/%s", moe_test_dir(), name);
	OK(moe_dir_make(m->dir));
	snprintf(path, sizeof path, "%s/config.json", m->dir);
	OK(moe_file_write(path, config, strlen(config)));
	OK(moe_arch_load(m->dir, &m->arch));
	m->at = calloc(ref_index(m, MOE_ROLE_COUNT, 0, 0), sizeof *m->at);
	for (int role = 0; role < MOE_ROLE_COUNT; role++) {
		bool model = role <= MOE_ROLE_LM_HEAD;
		bool expert = role >= MOE_ROLE_EXPERT_GATE && role <= MOE_ROLE_EXPERT_DOWN;

		if (role == MOE_ROLE_EXPERTS_GATE_UP || role == MOE_ROLE_EXPERTS_DOWN)
			continue;
		for (int l = model ? -1 : 0; l < (model ? 0 : m->arch.n_layers); l++)
			for (int e = expert ? 0 : -1; e < (expert ? m->arch.n_experts : 0); e++)
				ref_add(m, (enum moe_role)role, l, e, &seed);
	}
	items = calloc(m->n_items, sizeof *items);
	for (size_t i = 0; i < m->n_items; i++) {
		items[i] = (struct moe_st_item){ .name = m->item[i].name,
						 .dtype = MOE_F32,
						 .ndim = m->item[i].ndim,
						 .data = m->item[i].data };
		memcpy(items[i].shape, m->item[i].shape, sizeof items[i].shape);
	}
	snprintf(path, sizeof path, "%s/model.safetensors", m->dir);
	OK(moe_safetensors_write(path, items, m->n_items, NULL, 0));
	free(items);
}

static inline const float *ref_get(const struct ref_model *m, enum moe_role role, int layer,
				   int expert)
{
	return m->at[ref_index(m, role, layer, expert)];
}

/* A (or B) of a layer's dense matrix and its rank and scale; NULL: it has no LoRA. */
static inline struct moe_param *ref_dense(struct moe_decoder_layer *d, int matrix, bool b, int *r,
					  double *scale)
{
	struct moe_linear *l = matrix < MOE_FFN_TAG ? &d->linear[matrix] : NULL;
	struct moe_matrix_lora *f = l || !d->ffn ? NULL : &d->ffn->lora[matrix - MOE_FFN_TAG];

	if (!l && !f)
		return NULL;
	*r = l ? l->r : f->r;
	*scale = (double)(l ? l->scale : f->scale);
	if (!*r)
		return NULL;
	return l ? (b ? &l->lora_b : &l->lora_a) : b ? &f->b : &f->a;
}

/* Random LoRA in the model, and the same in the reference. */
static inline void ref_take_lora(struct ref_model *m, struct moe_model *model, uint64_t seed)
{
	float piece[4096];

	m->lora = calloc((size_t)m->arch.n_layers, sizeof *m->lora);
	m->prob = calloc((size_t)m->arch.n_layers * 128, sizeof *m->prob);
	m->count = m->prob + m->arch.n_layers * 64;
	m->expert_r = model->lora.rank[MOE_ADAPTER_EXPERTS];
	for (int l = 0; l < m->arch.n_layers; l++) {
		struct moe_decoder_layer *d = &model->decoder.layers[l];

		for (int j = 0; j < 2 * MOE_DENSE_TAGS; j++) {
			struct ref_lora *lo = &m->lora[l];
			struct moe_param *p =
				ref_dense(d, j / 2, j % 2, &lo->r[j / 2], &lo->scale[j / 2]);
			double *copy = p ? calloc((size_t)p->piece, sizeof *copy) : NULL;

			for (int64_t i = 0; p && i < p->piece; i++)
				copy[i] = p->value[i] = ref_value(0.3f * ref_uniform(&seed));
			*(j % 2 ? &lo->b[j / 2] : &lo->a[j / 2]) = copy;
		}
		for (int a = 0; d->experts && d->experts->r && a < MOE_LORA_ARRAYS; a++) {
			int64_t n = moe_lora_elements(d->experts, (enum moe_lora_array)a);
			double *copy = calloc((size_t)(n * d->experts->E), sizeof *copy);

			m->expert_scale = (double)d->experts->scale;
			for (int e = 0; e < d->experts->E; e++) {
				for (int64_t i = 0; i < n; i++)
					copy[e * n + i] = piece[i] =
						ref_value(0.3f * ref_uniform(&seed));
				moe_experts_set(d->experts, (enum moe_lora_array)a, MOE_VALUE, e,
						piece);
			}
			m->lora[l].experts[a] = copy;
		}
	}
}

static inline void ref_free(struct ref_model *m)
{
	for (size_t i = 0; i < m->n_items; i++)
		free(m->item[i].data);
	free(m->item);
	free(m->at);
	for (int l = 0; m->lora && l < m->arch.n_layers; l++) {
		for (int j = 0; j < MOE_DENSE_TAGS; j++) {
			free(m->lora[l].a[j]);
			free(m->lora[l].b[j]);
		}
		for (int a = 0; a < MOE_LORA_ARRAYS; a++)
			free(m->lora[l].experts[a]);
	}
	free(m->lora);
	free(m->prob);
}

/* Weights of the load-balancing and the z-loss. */
struct ref_router_loss {
	double aux, z;
};

/*
 * Of the documents since the last call: E sum_e count_e / T mean p_e (Switch Transformer) and mean (log sum exp)^2
 * (ST-MoE), means over the MoE layers, weighed. Starts anew.
 */
static inline double ref_router(struct ref_model *m, struct ref_router_loss w)
{
	double sum = 0, z = m->z / MOE_MAX(m->tokens, 1.0);
	int layers = 0;

	for (int i = 0; i < m->arch.n_layers * 64; i++)
		sum += m->arch.n_experts * m->count[i] * m->prob[i] / (m->tokens * m->tokens);
	for (int l = 0; l < m->arch.n_layers; l++)
		layers += m->arch.layer_is_moe[l];
	memset(m->prob, 0, (size_t)m->arch.n_layers * 128 * sizeof *m->prob);
	m->tokens = m->z = 0;
	return (w.aux != 0 ? w.aux * sum / layers : 0) + (w.z != 0 ? w.z * z / layers : 0);
}

/* x W^T of a row of W; four sums, so that none waits for itself. */
static inline double ref_dot(int64_t k, const double *x, const float *w)
{
	double sum[4] = { 0 };
	int64_t i = 0;

	for (; i + 4 <= k; i += 4)
		for (int j = 0; j < 4; j++)
			sum[j] += x[i + j] * (double)w[i + j];
	for (; i < k; i++)
		sum[0] += x[i] * (double)w[i];
	return sum[0] + sum[1] + (sum[2] + sum[3]);
}

/* y[n] = x[k] W^T + bias + s (x A^T) B^T */
static inline void ref_linear_one(int64_t n, int64_t k, const double *x, const float *w,
				  const float *bias, int r, double s, const double *a,
				  const double *b, double *y)
{
	double u[16] = { 0 };

	for (int j = 0; j < r; j++)
		for (int64_t i = 0; i < k; i++)
			u[j] += x[i] * a[j * k + i];
	for (int64_t o = 0; o < n; o++) {
		y[o] = (bias ? (double)bias[o] : 0) + ref_dot(k, x, w + o * k);
		for (int j = 0; j < r; j++)
			y[o] += s * u[j] * b[o * r + j];
	}
}

static inline void ref_norm(int64_t n, const double *x, const float *w, double eps, double *y)
{
	double sum = 0;

	for (int64_t i = 0; i < n; i++)
		sum += x[i] * x[i];
	sum = sqrt(sum / (double)n + eps);
	for (int64_t i = 0; i < n; i++)
		y[i] = x[i] / sum * (double)w[i];
}

static inline void ref_rotate(int heads, int dim, int position, double theta, double *x)
{
	for (int i = 0; i < dim / 2; i++) {
		double angle = position * pow(theta, -2.0 * i / dim), c = cos(angle), s = sin(angle);

		for (int h = 0; h < heads; h++) {
			double *a = x + h * dim + i, *b = a + dim / 2, x0 = *a, x1 = *b;

			*a = x0 * c - x1 * s;
			*b = x1 * c + x0 * s;
		}
	}
}

static inline void ref_qk(const struct ref_model *m, const float *w, int heads, double *x)
{
	int dim = m->arch.head_dim;

	if (m->arch.qk_norm == MOE_QK_NORM_FULL)
		ref_norm(heads * dim, x, w, m->arch.rms_eps, x);
	else if (m->arch.qk_norm == MOE_QK_NORM_HEAD)
		for (int h = 0; h < heads; h++)
			ref_norm(dim, x + h * dim, w, m->arch.rms_eps, x + h * dim);
}

/* h[n, H] += attention of layer l */
static inline void ref_attend(const struct ref_model *m, int l, int n, double *h)
{
	const struct moe_arch *a = &m->arch;
	int H = (int)a->hidden, D = a->head_dim, nq = a->n_heads * D, nk = a->n_kv_heads * D;
	int group = a->n_heads / a->n_kv_heads;
	double *q = calloc((size_t)(n * (2 * nq + 2 * nk + H) + n), sizeof *q), *k = q + n * nq;
	double *v = k + n * nk, *o = v + n * nk, *x = o + n * nq, *p = x + n * H;
	const struct ref_lora *lo = &m->lora[l];
	double *out[3] = { q, k, v };
	int width[3] = { nq, nk, nk };

	for (int t = 0; t < n; t++) {
		ref_norm(H, h + t * H, ref_get(m, MOE_ROLE_ATTN_NORM, l, -1), a->rms_eps, x);
		for (int j = 0; j < 3; j++)
			ref_linear_one(
				width[j], H, x, ref_get(m, (enum moe_role)(MOE_ROLE_Q + j), l, -1),
				ref_get(m, (enum moe_role)(MOE_ROLE_Q_BIAS + j), l, -1), lo->r[j],
				lo->scale[j], lo->a[j], lo->b[j], out[j] + t * width[j]);
		ref_qk(m, ref_get(m, MOE_ROLE_Q_NORM, l, -1), a->n_heads, q + t * nq);
		ref_qk(m, ref_get(m, MOE_ROLE_K_NORM, l, -1), a->n_kv_heads, k + t * nk);
		ref_rotate(a->n_heads, D, t, a->rope.theta, q + t * nq);
		ref_rotate(a->n_kv_heads, D, t, a->rope.theta, k + t * nk);
	}
	for (int t = 0; t < n; t++)
		for (int g = 0; g < a->n_heads; g++) {
			double sum = 0, max = -INFINITY;
			const double *qt = q + t * nq + g * D;

			for (int s = 0; s <= t; s++) {
				p[s] = 0;
				for (int i = 0; i < D; i++)
					p[s] += qt[i] * k[s * nk + g / group * D + i];
				p[s] /= sqrt(D);
				max = fmax(max, p[s]);
			}
			for (int s = 0; s <= t; s++)
				sum += p[s] = exp(p[s] - max);
			for (int s = 0; s <= t; s++)
				for (int i = 0; i < D; i++)
					o[t * nq + g * D + i] +=
						p[s] * v[s * nk + g / group * D + i];
			for (int i = 0; i < D; i++)
				o[t * nq + g * D + i] /= sum;
		}
	for (int t = 0; t < n; t++) {
		ref_linear_one(H, nq, o + t * nq, ref_get(m, MOE_ROLE_O, l, -1),
			       ref_get(m, MOE_ROLE_O_BIAS, l, -1), lo->r[3], lo->scale[3],
			       lo->a[3], lo->b[3], x);
		for (int i = 0; i < H; i++)
			h[t * H + i] += x[i];
	}
	free(q);
}

/* y += weight * W_down (silu(W_gate x) * (W_up x)), with LoRA of expert e, of the layer's MLP where e < 0 */
static inline void ref_ffn(const struct ref_model *m, int l, const enum moe_role *role, int e,
			   int64_t I, const double *x, double weight, double *y)
{
	int64_t H = m->arch.hidden;
	double *g = calloc((size_t)(2 * I + H), sizeof *g), *u = g + I, *out = u + I;
	double *to[3] = { g, u, out }, *from[3] = { NULL, NULL, g };
	const struct ref_lora *lo = &m->lora[l];

	for (int j = 0; j < 3; j++) {
		int dense = MOE_FFN_TAG + j, r = e < 0 ? lo->r[dense] : m->expert_r;
		int64_t n = j == 2 ? H : I, k = j == 2 ? I : H;
		const double *a = e < 0 ? lo->a[dense] : r ? lo->experts[MOE_GATE_A + j] + e * r * k : NULL;
		const double *b = e < 0 ? lo->b[dense] : r ? lo->experts[MOE_GATE_B + j] + e * r * n : NULL;

		ref_linear_one(n, k, from[j] ? from[j] : x, ref_get(m, role[j], l, e), NULL, r,
			       e < 0 ? lo->scale[dense] : m->expert_scale, a, b, to[j]);
		for (int64_t i = 0; j == 1 && i < I; i++) {
			double limit = m->arch.swiglu_limit != 0 ? m->arch.swiglu_limit : INFINITY;

			g[i] = fmin(g[i], limit);
			g[i] = g[i] / (1 + exp(-g[i])) * fmax(fmin(u[i], limit), -limit);
		}
	}
	for (int64_t i = 0; i < H; i++)
		y[i] += weight * out[i];
	free(g);
}

static inline void ref_moe(struct ref_model *m, int l, const double *x, double *y)
{
	static const enum moe_role expert[3] = { MOE_ROLE_EXPERT_GATE, MOE_ROLE_EXPERT_UP,
						 MOE_ROLE_EXPERT_DOWN };
	static const enum moe_role shared[3] = { MOE_ROLE_SHARED_GATE, MOE_ROLE_SHARED_UP,
						 MOE_ROLE_SHARED_DOWN };
	const struct moe_arch *a = &m->arch;
	const int sigmoid = MOE_FFN_TAG + MOE_FFN_SIGMOID;
	double p[64], sum = 0, max = -INFINITY, gate;
	int chosen[64], E = a->n_experts;

	ref_linear_one(E, a->hidden, x, ref_get(m, MOE_ROLE_ROUTER, l, -1), NULL, 0, 0, NULL, NULL,
		       p);
	for (int e = 0; e < E; e++)
		max = fmax(max, p[e]);
	for (int e = 0; e < E; e++)
		sum += p[e] = exp(p[e] - max);
	m->z += (max + log(sum)) * (max + log(sum));
	for (int e = 0; e < E; e++)
		m->prob[l * 64 + e] += p[e] /= sum;
	sum = 0;
	for (int j = 0; j < a->top_k; j++) {
		chosen[j] = -1;
		for (int e = 0; e < E; e++) {
			bool taken = false;

			for (int i = 0; i < j; i++)
				taken |= chosen[i] == e;
			if (!taken && (chosen[j] < 0 || p[e] > p[chosen[j]]))
				chosen[j] = e;
		}
		sum += p[chosen[j]];
		m->count[l * 64 + chosen[j]]++;
	}
	for (int e = 0; e < E; e++) {
		bool taken = false;

		for (int j = 0; j < a->top_k; j++)
			taken |= chosen[j] == e;
		if (!taken)
			m->gap = fmin(m->gap, log(p[chosen[a->top_k - 1]] / p[e]));
	}
	for (int j = 0; j < a->top_k; j++)
		ref_ffn(m, l, expert, chosen[j], a->moe_intermediate, x,
			p[chosen[j]] / (a->norm_topk_prob ? sum : 1), y);
	if (!a->shared_intermediate)
		return;
	ref_linear_one(1, a->hidden, x, ref_get(m, MOE_ROLE_SHARED_ROUTER, l, -1), NULL,
		       m->lora[l].r[sigmoid], m->lora[l].scale[sigmoid], m->lora[l].a[sigmoid],
		       m->lora[l].b[sigmoid], &gate);
	ref_ffn(m, l, shared, -1, a->shared_intermediate, x, 1 / (1 + exp(-gate)), y);
}

/* Sum of -log p over labels of one document (label of token i at i, negative: not trained). */
static inline double ref_loss(struct ref_model *m, const int32_t *ids, const int32_t *labels, int n)
{
	static const enum moe_role dense[3] = { MOE_ROLE_DENSE_GATE, MOE_ROLE_DENSE_UP,
						MOE_ROLE_DENSE_DOWN };
	const struct moe_arch *a = &m->arch;
	int H = (int)a->hidden;
	double *h = calloc((size_t)(n * H + H + a->vocab), sizeof *h), *x = h + n * H, *z = x + H;
	const float *embed = ref_get(m, MOE_ROLE_EMBED, -1, -1);
	const float *head = a->tie_embeddings ? embed : ref_get(m, MOE_ROLE_LM_HEAD, -1, -1);
	double loss = 0;

	m->tokens += n;
	for (int i = 0; i < n * H; i++)
		h[i] = (double)embed[ids[i / H] * H + i % H];
	for (int l = 0; l < a->n_layers; l++) {
		ref_attend(m, l, n, h);
		for (int t = 0; t < n; t++) {
			ref_norm(H, h + t * H, ref_get(m, MOE_ROLE_FFN_NORM, l, -1), a->rms_eps, x);
			if (a->layer_is_moe[l])
				ref_moe(m, l, x, h + t * H);
			else
				ref_ffn(m, l, dense, -1, a->intermediate, x, 1, h + t * H);
		}
	}
	for (int t = 0; t + 1 < n; t++) {
		double sum = 0, max = -INFINITY;

		if (labels[t + 1] < 0)
			continue;
		ref_norm(H, h + t * H, ref_get(m, MOE_ROLE_FINAL_NORM, -1, -1), a->rms_eps, x);
		ref_linear_one(a->vocab, H, x, head, NULL, 0, 0, NULL, NULL, z);
		for (int64_t v = 0; v < a->vocab; v++)
			max = fmax(max, z[v]);
		for (int64_t v = 0; v < a->vocab; v++)
			sum += exp(z[v] - max);
		loss += max + log(sum) - z[labels[t + 1]];
	}
	free(h);
	return loss;
}

#endif
