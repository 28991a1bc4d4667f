/* SPDX-License-Identifier: Apache-2.0 */
/* Full and hybrid fine-tuning: which weights of a model are trained themselves, and their memory. */
#include "api/model.h"

#include "codelets/kernels/packed/requantise.h"
#include "model/file.h"
#include "model/rewrite.h"

#define MOST_SLICES 4000 /* of all dense arrays: each is a handle, and some tasks a step */

/* Of one or of all of them. */
static bool is_of_experts(enum moe_role role)
{
	return role >= MOE_ROLE_EXPERT_GATE && role <= MOE_ROLE_EXPERTS_DOWN;
}

bool moe_model_trains(const struct moe_model *m, enum moe_role role)
{
	if (m->params.inference_only)
		return false;
	if (role == MOE_ROLE_ROUTER && m->lora.router_weights)
		return true;
	return m->params.method == MOE_METHOD_FULL ||
	       (m->params.method == MOE_METHOD_HYBRID && is_of_experts(role));
}

/* Vectors are not decayed: norms and biases, as transformers' Trainer does it. */
static bool is_vector(enum moe_role role)
{
	return (role >= MOE_ROLE_Q_BIAS && role <= MOE_ROLE_FFN_NORM) ||
	       role == MOE_ROLE_ATTN_NORM || role == MOE_ROLE_FINAL_NORM;
}

static bool own(const struct moe_model *m)
{
	return m->params.masters == MOE_MASTERS_BF16;
}

enum moe_dtype moe_model_packed_dtype(const struct moe_model *m, enum moe_role role,
				      enum moe_dtype loaded)
{
	return !moe_model_trains(m, role) ? loaded : own(m) ? MOE_BF16 : MOE_F32;
}

enum moe_status moe_model_check_method(const struct moe_model *m)
{
	static const char *const names[] = { "lora", "full", "hybrid" };
	const struct moe_model_params *p = &m->params;

	if ((unsigned)p->method > MOE_METHOD_HYBRID || (unsigned)p->masters > MOE_MASTERS_BF16)
		return moe_fail(MOE_ERR_ARG, "model params: method %d, masters %d; 0 to 2 and 0 to 1 are possible",
				(int)p->method, (int)p->masters);
	if (p->method == MOE_METHOD_LORA)
		return MOE_OK;
	if (p->inference_only)
		return moe_fail(MOE_ERR_ARG,
				"method %s trains, inference_only does not: choose one",
				names[p->method]);
	return MOE_OK;
}

/* ---- lists ---- */

/* Index among a layer's own arrays, -1: elsewhere. */
static int layer_index(enum moe_role role)
{
	if (role >= MOE_ROLE_Q && role <= MOE_ROLE_O)
		return MOE_ARRAY_LINEAR + (int)(role - MOE_ROLE_Q);
	if (role >= MOE_ROLE_Q_BIAS && role <= MOE_ROLE_O_BIAS)
		return MOE_ARRAY_BIAS + (int)(role - MOE_ROLE_Q_BIAS);
	return role == MOE_ROLE_ATTN_NORM  ? MOE_ARRAY_ATTN_NORM
	       : role == MOE_ROLE_FFN_NORM ? MOE_ARRAY_FFN_NORM
	       : role == MOE_ROLE_Q_NORM   ? MOE_ARRAY_Q_NORM
	       : role == MOE_ROLE_K_NORM   ? MOE_ARRAY_K_NORM
					   : -1;
}

static int ffn_index(enum moe_role role)
{
	if (role >= MOE_ROLE_DENSE_GATE && role <= MOE_ROLE_DENSE_DOWN)
		return MOE_FFN_GATE + (int)(role - MOE_ROLE_DENSE_GATE);
	if (role >= MOE_ROLE_SHARED_GATE && role <= MOE_ROLE_SHARED_ROUTER)
		return MOE_FFN_GATE + (int)(role - MOE_ROLE_SHARED_GATE);
	return -1;
}

struct moe_trained *moe_model_trained(const struct moe_model *m, enum moe_role role, int layer,
				      int chunk)
{
	const struct moe_decoder *d = &m->decoder;
	int i = layer_index(role), f = ffn_index(role);

	if (!moe_model_trains(m, role) || is_of_experts(role) || role == MOE_ROLE_ROUTER)
		return NULL;
	switch (role) {
	case MOE_ROLE_EMBED:
		return &d->embed.trained[chunk];
	case MOE_ROLE_LM_HEAD:
		return &d->head.trained[chunk];
	case MOE_ROLE_FINAL_NORM:
		return d->final_trained;
	default:
		return i >= 0	? &d->layers[layer].trained[i]
		       : f >= 0 ? &d->layers[layer].ffn->trained[f]
				: NULL;
	}
}

static int64_t count_role(const struct moe_model *m, enum moe_role role)
{
	int layers = role <= MOE_ROLE_LM_HEAD ? 1 : m->arch.n_layers;
	int64_t shape[MOE_MAX_NDIM], n = 0;

	if (!moe_model_trains(m, role) || moe_role_is_expert(role))
		return 0; /* the fused roles stand for these */
	if (role == MOE_ROLE_ROUTER && m->lora.router_weights)
		return 0; /* the adapter's */
	for (int l = 0; l < layers; l++) {
		int ndim = moe_arch_tensor_shape(&m->arch, role, l, shape);

		n += ndim ? moe_shape_count(ndim, shape) : 0;
	}
	return n;
}

int64_t moe_model_whole_params(const struct moe_model *m)
{
	int64_t n = 0;

	for (int role = 0; role < MOE_ROLE_COUNT; role++)
		n += count_role(m, (enum moe_role)role);
	return n;
}

/* Without routed experts. */
static int64_t dense_params(const struct moe_model *m)
{
	return moe_model_whole_params(m) - count_role(m, MOE_ROLE_EXPERTS_GATE_UP) -
	       count_role(m, MOE_ROLE_EXPERTS_DOWN);
}

enum moe_status moe_model_shape_trained(struct moe_model *m)
{
	struct moe_decoder *d = &m->decoder;
	bool tied = m->arch.tie_embeddings;
	size_t chunks = (size_t)d->head.n_chunks;

	m->slice_elements = MOE_MAX(MOE_SLICE_ELEMENTS, dense_params(m) / MOST_SLICES);
	if (!moe_model_trains(m, MOE_ROLE_EMBED))
		return MOE_OK;
	d->embed.trained = moe_calloc(chunks, sizeof *d->embed.trained);
	d->head.trained = tied ? d->embed.trained : moe_calloc(chunks, sizeof *d->head.trained);
	d->final_trained = moe_calloc(1, sizeof *d->final_trained);
	if (!d->embed.trained || !d->head.trained || !d->final_trained)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a decoder");
	for (int i = 0; i < d->n_layers; i++) {
		struct moe_decoder_layer *l = &d->layers[i];

		l->trained = moe_calloc(MOE_LAYER_ARRAYS, sizeof *l->trained);
		if (l->ffn)
			l->ffn->trained = moe_calloc(MOE_FFN_MATRICES, sizeof *l->ffn->trained);
		if (!l->trained || (l->ffn && !l->ffn->trained))
			return moe_fail(MOE_ERR_NOMEM, "no memory for a decoder");
	}
	return MOE_OK;
}

uint64_t moe_model_rounding_key(const struct moe_model *m, enum moe_role role, int layer)
{
	uint64_t array = (uint64_t)role * MOE_ARCH_MAX_LAYERS + (uint64_t)MOE_MAX(layer, 0);

	return moe_mix(moe_mix(m->params.seed + 0x9e3779b97f4a7c15ull) +
		       array * 0xd1342543de82ef95ull);
}

enum moe_status moe_model_alloc_trained(struct moe_model *m, enum moe_role role, int layer,
					int chunk, struct moe_weight *weight, float *vector,
					int64_t rows, int64_t cols, int part, bool coded)
{
	struct moe_trained *a = moe_model_trained(m, role, layer, chunk);
	struct moe_trained_shape s = { .rows = rows,
				       .cols = cols,
				       .weight = weight,
				       .vector = vector,
				       .decay = !is_vector(role),
				       .update = true,
				       .own = own(m),
				       .coded = coded,
				       .key = moe_model_rounding_key(m, role, layer),
				       .at = (int64_t)chunk * MOE_VOCAB_CHUNK * cols,
				       .slice_elements = weight ? m->slice_elements : 0,
				       .part = part };

	return a ? moe_trained_alloc(m->engine, &s, a) : MOE_OK;
}

static void free_list(struct moe_engine *e, struct moe_trained *a, int n)
{
	for (int i = 0; a && i < n; i++)
		moe_trained_free(e, &a[i]);
	moe_free(a);
}

/* MLPs free their own. */
void moe_model_free_trained(struct moe_model *m)
{
	struct moe_decoder *d = &m->decoder;

	for (int i = 0; d->layers && i < d->n_layers; i++)
		free_list(m->engine, d->layers[i].trained, MOE_LAYER_ARRAYS);
	if (d->head.trained != d->embed.trained)
		free_list(m->engine, d->head.trained, d->head.n_chunks);
	free_list(m->engine, d->embed.trained, d->embed.n_chunks);
	free_list(m->engine, d->final_trained, 1);
}

/* ---- saving ---- */

static bool replaces(void *user, enum moe_role role)
{
	return moe_model_trains(user, role);
}

static void rows(void *user, enum moe_role role, int layer, int expert, int64_t first, int64_t n,
		 float *out)
{
	const struct moe_model *m = user;
	const struct moe_experts *x = layer >= 0 ? m->decoder.layers[layer].experts : NULL;
	bool vocab = role == MOE_ROLE_EMBED || role == MOE_ROLE_LM_HEAD;

	if (is_of_experts(role)) {
		moe_experts_get_base(x, (enum moe_expert_matrix)(role - MOE_ROLE_EXPERT_GATE),
				     MOE_VALUE, expert, out);
		return;
	}
	if (role == MOE_ROLE_ROUTER) {
		memcpy(out, x->router_param.value + first * x->H, (size_t)(n * x->H) * sizeof *out);
		return;
	}
	while (n > 0) {
		int chunk = vocab ? (int)(first / MOE_VOCAB_CHUNK) : 0;
		const struct moe_trained *a = moe_model_trained(m, role, layer, chunk);
		int64_t at = first - (int64_t)chunk * MOE_VOCAB_CHUNK,
			here = MOE_MIN(n, a->param.rows - at);

		moe_trained_get(a, at, at + here, out);
		out += here * a->param.cols;
		first += here;
		n -= here;
	}
}

/* Parts of gate, then those of up: a fused tensor. */
static void coded_gate_up(const struct moe_experts *x, int expert, struct moe_coded_matrix *out)
{
	struct moe_coded_matrix up;

	moe_experts_coded(x, MOE_GATE, expert, out);
	moe_experts_coded(x, MOE_UP, expert, &up);
	for (int i = 0; i < up.windows; i++) {
		up.window[i].n0 += out->n;
		out->window[out->windows++] = up.window[i];
	}
	out->n += up.n;
}

static enum moe_status coded(void *user, enum moe_role role, int layer, int expert, moe_coded_fn *fn, void *arg)
{
	const struct moe_model *m = user;
	const struct moe_experts *x = layer >= 0 ? m->decoder.layers[layer].experts : NULL;
	const struct moe_trained *a = moe_model_trained(m, role, layer, 0);
	struct moe_coded_matrix matrix;
	struct moe_quantised q;

	if (role == MOE_ROLE_EXPERTS_GATE_UP)
		coded_gate_up(x, expert, &matrix);
	else if (role == MOE_ROLE_EXPERTS_DOWN)
		moe_experts_coded(x, MOE_DOWN, expert, &matrix);
	else if (is_of_experts(role))
		moe_experts_coded(x, (enum moe_expert_matrix)(role - MOE_ROLE_EXPERT_GATE), expert, &matrix);
	else
		matrix = (struct moe_coded_matrix){ .n = a->param.rows,
						    .k = a->param.cols,
						    .windows = 1,
						    .window = { { a->weight, 0, 0 } } };
	q = moe_coded_read(&matrix);
	return fn(&q, arg);
}

enum moe_status moe_model_write_checkpoint(struct moe_model *m, const char *dir)
{
	struct moe_rewrite r = {
		.base = m->params.dir, .dir = dir, .replaces = replaces, .rows = rows, .coded = coded, .user = m
	};

	if (m->params.method == MOE_METHOD_LORA || m->params.inference_only)
		return moe_fail(MOE_ERR_STATE, "the weights are the checkpoint's: nothing trains "
					       "them. moe_merge folds an adapter in");
	MOE_TRY(moe_engine_wait(m->engine));
	MOE_TRY(moe_rewrite_checkpoint(&r));
	moe_free(m->written);
	m->written = moe_strdup(dir);
	return m->written ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "%s: out of memory", dir);
}

enum moe_status moe_model_save(struct moe_model *m, const char *dir)
{
	enum moe_status st;

	if (!dir)
		return moe_fail(MOE_ERR_ARG, "dir is NULL");
	MOE_TRY(moe_model_enter(m));
	if (moe_path_inside(dir, m->params.dir))
		st = moe_fail(MOE_ERR_ARG,
			      "%s: lies in the base model's folder, which is only read", dir);
	else
		st = moe_model_write_checkpoint(m, dir);
	moe_model_leave(m);
	return st;
}
