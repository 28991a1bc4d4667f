/* SPDX-License-Identifier: Apache-2.0 */
/* The experts of one layer: making and ending them, their arrays. */
#include "api/experts.h"

#include "api/lora_init.h"
#include "api/machine.h"
#include "engine/available.h"

#include <math.h>

static enum moe_status check_sizes(const struct moe_experts_params *p)
{
	double matrix = 24.0 * p->experts * p->intermediate * p->hidden;
	double thin = 24.0 * p->experts * MOE_MAX(p->intermediate, p->hidden) * p->lora_rank;

	if (p->hidden < 1 || p->intermediate < 1 || p->experts < 1 || p->experts > MOE_MAX_EXPERTS)
		return moe_fail(MOE_ERR_ARG,
				"experts: hidden %d, intermediate %d, %d experts; positive sizes and at "
				"most %d experts are possible",
				p->hidden, p->intermediate, p->experts, MOE_MAX_EXPERTS);
	if (p->experts_per_token < 1 || p->experts_per_token > MOE_MAX_EXPERTS)
		return moe_fail(MOE_ERR_ARG, "experts_per_token is %d; 1 to %d are possible",
				p->experts_per_token, MOE_MAX_EXPERTS);
	if (p->max_tokens < 0 || p->max_cache_depth < 0 || p->micro_batches < 0 || p->layer < 0 || p->layer > INT16_MAX ||
	    p->expected_tokens < 0 || p->group_size < 0 || p->slices_i < 0 || p->slices_h < 0 ||
	    p->lora_rank < 0)
		return moe_fail(MOE_ERR_ARG,
				"experts: max_tokens %d, max_cache_depth %d, micro_batches %d, layer %d, lora_rank %d, "
				"expected_tokens %d, group_size %d, slices %d and %d; none may be negative",
				p->max_tokens, p->max_cache_depth, p->micro_batches, p->layer, p->lora_rank,
				p->expected_tokens, p->group_size, p->slices_i, p->slices_h);
	if (p->micro_batches > MOE_MAX(p->max_cache_depth, 1) + 1)
		return moe_fail(MOE_ERR_ARG,
				"experts: %d micro_batches beside each other need a max_cache_depth of %d at least, "
				"it is %d",
				p->micro_batches, p->micro_batches - 1, p->max_cache_depth);
	if (matrix > MOE_MAX_BYTES || thin > MOE_MAX_BYTES)
		return moe_fail(MOE_ERR_NOFIT,
				"experts: %d experts, hidden %d, intermediate %d, rank %d are too large",
				p->experts, p->hidden, p->intermediate, p->lora_rank);
	return MOE_OK;
}

static enum moe_status check_params(const struct moe_experts_params *p)
{
	if (!p || p->struct_size < sizeof *p)
		return moe_fail(MOE_ERR_ARG, "experts params: struct_size is not set");
	MOE_TRY(check_sizes(p));
	if (p->lora_rank && !(p->lora_alpha > 0 && p->lora_alpha < 1e30f))
		return moe_fail(MOE_ERR_ARG, "lora_alpha is %g; with a rank it must be positive",
				(double)p->lora_alpha);
	if (!(p->lora_dropout >= 0 && p->lora_dropout < 1))
		return moe_fail(MOE_ERR_ARG, "lora_dropout is %g; at least 0 and below 1 are possible",
				(double)p->lora_dropout);
	if ((unsigned)p->activations > MOE_ACTIVATIONS_RECOMPUTE)
		return moe_fail(MOE_ERR_ARG,
				"activations is %d; 0 (retain) and 1 (recompute) are possible",
				(int)p->activations);
	if (p->weight_format && !moe_format_find(p->weight_format))
		return moe_fail(MOE_ERR_ARG, "unknown weight_format \"%s\"", p->weight_format);
	if (p->weight_format && p->backward_weights && strcmp(p->backward_weights, "auto") &&
	    strcmp(p->backward_weights, "direct"))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"backward_weights is \"%s\"; \"direct\" is possible with format %s", p->backward_weights,
				p->weight_format);
	if (moe_dtype_size(p->weight_dtype) < 2 || p->weight_dtype > MOE_F64)
		return moe_fail(MOE_ERR_ARG, "weight_dtype %s is not a float type",
				moe_dtype_name(p->weight_dtype));
	return moe_check_glu(p->swiglu_limit, p->swiglu_alpha, p->swiglu_shift);
}

/* What the backward multiplies by; shared:N is a ring for N layers. */
static enum moe_status choose_backward(struct moe_expert_layer *l, const struct moe_load *load)
{
	struct moe_backward_params p = {
		.load = *load, .layers = 1, .ring = 1, .refilled = true, .memory = -1
	};
	const char *text = l->params.weight_format ? "direct" : l->params.backward_weights;
	enum moe_backward_mode mode;

	if (text && strcmp(text, "auto")) {
		MOE_TRY(moe_backward_mode_parse(text, &mode, &p.ring));
		if (mode == MOE_BACKWARD_SHARED)
			p.layers = p.ring;
	}
	MOE_TRY(moe_backward_select(text, &p, moe_machine(), &l->backward));
	l->params.backward_weights =
		moe_backward_text(&l->backward, l->backward_text, sizeof l->backward_text);
	return MOE_OK;
}

static enum moe_status alloc_layer(struct moe_expert_layer *l)
{
	const struct moe_experts_params *p = &l->params;
	int tokens = p->expected_tokens ? p->expected_tokens : MOE_DEFAULT_TOKENS;
	struct moe_load load = {
		.E = p->experts,
		.k = p->experts_per_token,
		.H = p->hidden,
		.P = moe_engine_parts(l->engine),
		.I = p->intermediate,
		.T = tokens,
		.workers = moe_engine_workers(l->engine),
		.weight_bytes = moe_kernels()->tiles ? 0 : (double)moe_dtype_size(p->weight_dtype),
	};
	struct moe_experts_shape s = {
		.E = p->experts,
		.k = p->experts_per_token,
		.H = p->hidden,
		.I = p->intermediate,
		.r = p->lora_rank,
		.group_size = p->group_size ? p->group_size : moe_group_size_choose(&load, moe_machine()),
		.scale = p->lora_rank ? p->lora_alpha / (float)p->lora_rank : 0,
		.glu = moe_glu_of(p->swiglu_limit, p->swiglu_alpha, p->swiglu_shift),
		.trainable = p->lora_rank > 0,
		.base_grads = p->train_base,
		.train_base = p->train_base,
		.recompute = p->activations == MOE_ACTIVATIONS_RECOMPUTE,
		.coded_later = p->weight_format != NULL,
	};

	MOE_TRY(choose_backward(l, &load));
	s.backward = l->backward.mode;
	MOE_TRY(moe_experts_alloc(l->engine, &s, p->weight_dtype, &l->layer));
	l->layer.dropout = p->lora_rank ? p->lora_dropout : 0;
	l->layer.dropout_seed = moe_drop_seed(p->seed, p->layer);
	l->cut = moe_cut_choose(&l->layer, tokens, load.workers, p->slices_i, p->slices_h);
	return moe_layer_tensors_create(l->engine, &l->layer, l->cut.slices_i, p->train_base,
					&l->tensors);
}

/* One pass more than may be kept: a forward that is not, or the next one while the last backward runs. */
static enum moe_status alloc_passes(struct moe_expert_layer *l)
{
	l->n_passes = l->params.max_cache_depth + 1;
	l->pass = moe_calloc((size_t)l->n_passes, sizeof *l->pass);
	if (!l->pass) {
		l->n_passes = 0;
		return moe_fail(MOE_ERR_NOMEM, "no memory for %d passes of a layer's experts",
				l->params.max_cache_depth + 1);
	}
	for (int i = 0; i < l->n_passes; i++) {
		l->pass[i].capacity = l->pass[i].T = -1;
		l->pass[i].generation = -1;
		MOE_TRY(moe_ticket_create(l->engine, &l->pass[i].ticket));
	}
	return MOE_OK;
}

void moe_experts_touch_moments(struct moe_expert_layer *l)
{
	if (!l->moments_touched)
		moe_experts_touch(l->engine, &l->layer, NULL, true, &l->touched);
	l->moments_touched = true;
}

enum moe_status moe_experts_create(struct moe_engine *engine, const struct moe_experts_params *params,
				   struct moe_expert_layer **out)
{
	struct moe_expert_layer *l;
	enum moe_status st;

	if (!out)
		return moe_fail(MOE_ERR_ARG, "out is NULL");
	*out = NULL;
	MOE_TRY(moe_engine_check(engine));
	MOE_TRY(check_params(params));
	MOE_TRY(moe_machine_use(engine));
	l = moe_calloc(1, sizeof *l);
	if (!l)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a layer's experts");
	l->engine = engine;
	l->params = *params;
	if (params->weight_format)
		l->params.weight_format = moe_format_find(params->weight_format)->name;
	l->window_scale = 1;
	l->dropout_step = -1;
	if (!params->max_cache_depth)
		l->params.max_cache_depth = 1;
	if (!params->micro_batches)
		l->params.micro_batches = 1;
	if (params->train_base) /* masters are F32, and so is what is packed from them */
		l->params.weight_dtype = MOE_F32;
	MOE_TRY_GOTO(moe_ticket_create(engine, &l->ticket), st, fail);
	MOE_TRY_GOTO(alloc_layer(l), st, fail);
	MOE_TRY_GOTO(alloc_passes(l), st, fail);
	MOE_TRY_GOTO(moe_space_attach(l), st, fail);
	MOE_TRY_GOTO(moe_memory_check(engine, "experts"), st, fail);
	moe_experts_touch(engine, &l->layer, NULL, false, &l->touched);
	for (int i = 0; i < l->n_passes; i++) {
		l->pass[i].slot = i % l->params.micro_batches;
		/* neighbours take turns in the ring of two */
		l->pass[i].ring = (l->number + i / l->params.micro_batches) & 1;
	}
	*out = l;
	return MOE_OK;
fail:
	moe_experts_destroy(l);
	return st;
}

/* Waits for everything, even while the engine is held. */
static void drain(struct moe_expert_layer *l)
{
	for (int i = 0; i < l->n_passes; i++)
		if (l->pass[i].ticket)
			moe_ticket_drain(l->pass[i].ticket);
	moe_ticket_drain(l->ticket);
}

static void free_pass(struct moe_expert_layer *l, struct moe_experts_pass *p)
{
	if (p->capacity < 0)
		return;
	moe_experts_state_free(l->engine, &p->state, l->layer.P);
	moe_stream_destroy(l->engine, &p->x);
	moe_tensor_destroy(p->plan);
	p->plan = NULL;
	p->capacity = p->T = -1;
}

void moe_experts_destroy(struct moe_expert_layer *l)
{
	if (!l)
		return;
	if (l->ticket && moe_engine_check(l->engine) == MOE_OK) {
		if (moe_engine_check_not_task("destroying a layer's experts") != MOE_OK)
			return; /* it would wait for itself */
		drain(l);
		moe_space_detach(l);
		for (int i = 0; i < l->n_passes; i++) {
			free_pass(l, &l->pass[i]);
			moe_ticket_destroy(l->pass[i].ticket);
		}
		moe_layer_tensors_destroy(&l->tensors);
		moe_experts_free(l->engine, &l->layer);
		moe_ticket_destroy(l->ticket);
	}
	moe_free(l->pass);
	moe_free(l->map);
	moe_free(l->source);
	moe_free(l->checkpoint_out);
	moe_free(l);
}

enum moe_status moe_experts_enter(struct moe_expert_layer *l)
{
	if (!l)
		return moe_fail(MOE_ERR_ARG, "layer is NULL");
	MOE_TRY(moe_engine_check(l->engine));
	if (atomic_flag_test_and_set(&l->busy))
		return moe_fail(MOE_ERR_BUSY, "another thread is in these experts");
	return MOE_OK;
}

void moe_experts_leave(struct moe_expert_layer *l)
{
	atomic_flag_clear(&l->busy);
}

struct moe_context moe_experts_context(struct moe_expert_layer *l, struct moe_ticket *ticket,
				       enum moe_phase phase, int priority)
{
	return (struct moe_context){ .engine = l->engine,
				     .ticket = ticket,
				     .layer = l->params.layer,
				     .step = (int)l->steps + 1,
				     .phase = phase,
				     .priority = priority };
}

enum moe_status moe_experts_get_info(struct moe_expert_layer *l, struct moe_experts_info *info)
{
	if (!info || info->struct_size < sizeof *info)
		return moe_fail(MOE_ERR_ARG, "experts info: struct_size is not set");
	MOE_TRY(moe_experts_enter(l));
	pthread_mutex_lock(&l->space->lock);
	*info = (struct moe_experts_info){
		.struct_size = sizeof *info,
		.backward_weights = l->backward_text,
		.groups = l->layer.G,
		.slices_i = l->cut.slices_i,
		.slices_h = l->cut.slices_h,
		.loaded = l->loaded,
		.lora_ready = l->lora_ready,
		.kept = l->kept,
		.capacity = MOE_MAX(l->space->capacity, 0),
		.pending = l->pending.pass != NULL,
		.scale = l->layer.scale,
		.touched_bytes = l->touched.bytes,
		.touch_seconds = l->touched.seconds,
		.load_error = l->load_error.all > 0 ? sqrt(l->load_error.wrong / l->load_error.all) : 0,
	};
	pthread_mutex_unlock(&l->space->lock);
	moe_experts_leave(l);
	return MOE_OK;
}

enum moe_status moe_experts_set_dropout(struct moe_expert_layer *l, enum moe_dropout_mode mode, int64_t step,
					int64_t position)
{
	if ((unsigned)mode > MOE_DROPOUT_OFF || position < 0)
		return moe_fail(MOE_ERR_ARG, "dropout mode %d, position %lld; 0 to 2 and positions from 0 are "
				"possible", (int)mode, (long long)position);
	MOE_TRY(moe_experts_enter(l));
	l->dropout = mode;
	l->dropout_step = step;
	l->dropout_position = position;
	moe_experts_leave(l);
	return MOE_OK;
}

static enum moe_status release_memory(struct moe_expert_layer *l)
{
	struct moe_space *s = l->space;
	bool others = false;

	if (l->kept)
		return moe_fail(MOE_ERR_STATE,
				"%d forwards are kept: run their backwards (or moe_experts_drop) first",
				l->kept);
	if (l->pending.pass)
		return moe_fail(MOE_ERR_STATE, "a backward is pending: call moe_experts_wait first");
	MOE_TRY(moe_engine_check_running(l->engine));
	drain(l);
	pthread_mutex_lock(&s->lock);
	for (int i = 0; i < l->n_passes; i++)
		free_pass(l, &l->pass[i]);
	for (const struct moe_expert_layer *o = s->layers; o; o = o->next)
		for (int i = 0; o != l && i < o->n_passes; i++)
			others |= o->pass[i].capacity >= 0;
	if (!others)
		moe_space_release(s);
	pthread_mutex_unlock(&s->lock);
	return MOE_OK;
}

enum moe_status moe_experts_release_memory(struct moe_expert_layer *l)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = release_memory(l);
	moe_experts_leave(l);
	return st;
}

/* ---- arrays ---- */

const char *moe_experts_array_name(enum moe_block_array which)
{
	static const char *const names[] = { "gate_proj",   "up_proj",	   "down_proj",
					     "gate_lora_a", "up_lora_a",   "down_lora_a",
					     "gate_lora_b", "up_lora_b",   "down_lora_b" };
	int i = which <= MOE_BLOCK_DOWN_PROJ ? (int)which : (int)which - MOE_BLOCK_GATE_LORA_A + 3;

	return i >= 0 && i < (int)MOE_COUNT(names) ? names[i] : "?";
}

int moe_experts_shape(const struct moe_expert_layer *l, enum moe_block_array which, int64_t *s)
{
	bool base = which <= MOE_BLOCK_DOWN_PROJ;
	int i = (int)which - (base ? 0 : (int)MOE_BLOCK_GATE_LORA_A);
	int64_t H = l->layer.H, I = l->layer.I, r = l->layer.r;
	const int64_t shapes[2][6][2] = {
		{ { r, H }, { r, H }, { r, I }, { I, r }, { I, r }, { H, r } },
		{ { I, H }, { I, H }, { H, I } },
	};

	if (!base && (which < MOE_BLOCK_GATE_LORA_A || which > MOE_BLOCK_DOWN_LORA_B || !r))
		return 0;
	s[0] = l->layer.E;
	s[1] = shapes[base][i][0];
	s[2] = shapes[base][i][1];
	return 3;
}

static enum moe_status check_array(struct moe_expert_layer *l, enum moe_block_array which,
				   const struct moe_array *a)
{
	int64_t shape[3];

	if ((unsigned)which >= MOE_BLOCK_ARRAYS || !moe_experts_shape(l, which, shape))
		return moe_fail(MOE_ERR_ARG, "these experts have no array %d%s", (int)which,
				l->layer.r ? "" : " (lora_rank is 0)");
	return moe_check_shape(moe_experts_array_name(which), a, 3, shape);
}

static enum moe_status set_lora(struct moe_expert_layer *l, enum moe_block_array which,
				const struct moe_array *src)
{
	MOE_TRY(check_array(l, which, src));
	if (which <= MOE_BLOCK_DOWN_PROJ)
		return moe_fail(MOE_ERR_ARG, "%s is set by moe_experts_load or moe_experts_update_base",
				moe_experts_array_name(which));
	if (src->dtype > MOE_F64)
		return moe_fail(MOE_ERR_ARG, "%s has dtype %s; a float type is expected",
				moe_experts_array_name(which), moe_dtype_name(src->dtype));
	MOE_TRY(moe_engine_check_running(l->engine));
	drain(l);
	l->values++;
	MOE_TRY(moe_copy_lora(&l->layer, (enum moe_lora_array)(which - MOE_BLOCK_GATE_LORA_A), MOE_VALUE,
			      src, true, 1));
	return MOE_OK;
}

enum moe_status moe_experts_set_array(struct moe_expert_layer *l, enum moe_block_array which,
				      const struct moe_array *src)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = set_lora(l, which, src);
	moe_experts_leave(l);
	return st;
}

static enum moe_status get_array(struct moe_expert_layer *l, enum moe_block_array which,
				 enum moe_param_field f, const struct moe_array *dst)
{
	bool base = which <= MOE_BLOCK_DOWN_PROJ;
	float scale = f == MOE_GRAD ? l->window_scale : 1;
	enum moe_window window;

	MOE_TRY(check_array(l, which, dst));
	if (dst->dtype != MOE_F32 && dst->dtype != MOE_F64)
		return moe_fail(MOE_ERR_ARG, "%s: dtype %s is not possible here; F32 and F64 are",
				moe_experts_array_name(which), moe_dtype_name(dst->dtype));
	if (base && !l->params.train_base)
		return moe_fail(MOE_ERR_STATE, "%s cannot be read: train_base is not set",
				moe_experts_array_name(which));
	if (f == MOE_GRAD) {
		MOE_TRY(moe_window_state(l, &window));
		if (window != MOE_WINDOW_OPEN || l->pending.pass)
			return moe_fail(MOE_ERR_STATE, "there are no gradients: %s",
					l->pending.pass ? "the backward is pending, call moe_experts_wait"
							: "the window is closed");
	}
	MOE_TRY(moe_engine_check_running(l->engine));
	drain(l);
	if (base)
		return moe_copy_base(&l->layer, (enum moe_expert_matrix)which, f, l->map, dst, scale);
	return moe_copy_lora(&l->layer, (enum moe_lora_array)(which - MOE_BLOCK_GATE_LORA_A), f, dst,
			     false, scale);
}

enum moe_status moe_experts_get_array(struct moe_expert_layer *l, enum moe_block_array which,
				      const struct moe_array *dst)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = get_array(l, which, MOE_VALUE, dst);
	moe_experts_leave(l);
	return st;
}

enum moe_status moe_experts_get_gradient(struct moe_expert_layer *l, enum moe_block_array which,
					 const struct moe_array *dst)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = get_array(l, which, MOE_GRAD, dst);
	moe_experts_leave(l);
	return st;
}

static enum moe_status init_lora(struct moe_expert_layer *l, uint64_t seed)
{
	struct moe_experts *x = &l->layer;
	float *a;

	if (!x->r)
		return moe_fail(MOE_ERR_STATE, "lora_rank is 0: there is no LoRA to initialise");
	MOE_TRY(moe_engine_check_running(l->engine));
	drain(l);
	a = moe_alloc((size_t)x->r * (size_t)MOE_MAX(x->H, x->I), sizeof *a);
	if (!a)
		return moe_fail(MOE_ERR_NOMEM, "no memory for initial LoRA values");
	for (int e = 0; e < x->E; e++)
		for (int i = 0; i < MOE_LORA_ARRAYS; i++) {
			enum moe_lora_array which = (enum moe_lora_array)i;
			int64_t in = which == MOE_DOWN_A ? x->I : x->H;

			if (which <= MOE_DOWN_A)
				moe_lora_init_a(seed, l->params.layer, i, e, x->r, in, a);
			else
				memset(a, 0, (size_t)moe_lora_elements(x, which) * sizeof *a);
			moe_experts_set(x, which, MOE_VALUE, e, a);
		}
	moe_free(a);
	l->values++;
	l->lora_ready = true;
	return MOE_OK;
}

enum moe_status moe_experts_init_lora(struct moe_expert_layer *l, uint64_t seed)
{
	enum moe_status st;

	MOE_TRY(moe_experts_enter(l));
	st = init_lora(l, seed);
	moe_experts_leave(l);
	return st;
}
