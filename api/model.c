/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing a model. */
#include "api/machine.h"
#include "api/model.h"
#include "api/pass.h"
#include "model/arch_reader.h"

#include "codelets/ffn_bwd.h"
#include "codelets/ffn_lora_grad.h"
#include "model/adapters/adapter_form.h"
#include "model/kt_experts.h"
#include "model/readers/gguf.h"

#include <math.h>

enum moe_status moe_model_enter(struct moe_model *m)
{
	if (!m)
		return moe_fail(MOE_ERR_ARG, "model is NULL");
	MOE_TRY(moe_engine_check(m->engine));
	if (atomic_flag_test_and_set(&m->busy))
		return moe_fail(MOE_ERR_BUSY, "another thread is in this model");
	return MOE_OK;
}

void moe_model_leave(struct moe_model *m)
{
	atomic_flag_clear(&m->busy);
}

static enum moe_status take_params(struct moe_model *m, const struct moe_model_params *p)
{
	const struct moe_adapter_form *form;

	if (!p || p->struct_size < sizeof *p)
		return moe_fail(MOE_ERR_ARG, "model params: struct_size is not set");
	if (!p->dir)
		return moe_fail(MOE_ERR_ARG, "model params: dir is NULL");
	if (p->max_tokens < 0 || p->slots < 0 || p->slots > MOE_MODEL_SLOTS || p->lora_rank < 0 ||
	    p->expert_rank < 0 || p->lora_alpha < 0)
		return moe_fail(MOE_ERR_ARG,
				"model params: max_tokens %d, slots %d (at most %d), lora_rank %d, "
				"expert_rank %d, lora_alpha %g; none may be negative", p->max_tokens, p->slots,
				MOE_MODEL_SLOTS, p->lora_rank, p->expert_rank, p->lora_alpha);
	if ((unsigned)p->recompute > MOE_RECOMPUTE_ALWAYS)
		return moe_fail(MOE_ERR_ARG, "recompute is %d; 0 (auto), 1 (never) and 2 (always) are possible",
				(int)p->recompute);
	if (!(p->lora_dropout >= 0 && p->lora_dropout < 1))
		return moe_fail(MOE_ERR_ARG, "lora_dropout is %g; at least 0 and below 1 are possible",
				p->lora_dropout);
	if (!(p->aux_coef >= 0 && p->aux_coef < INFINITY && p->z_coef >= 0 && p->z_coef < INFINITY))
		return moe_fail(MOE_ERR_ARG, "model params: aux_coef %g, z_coef %g; finite numbers from 0 are possible",
				p->aux_coef, p->z_coef);
	if (p->keep_text && (!p->inference_only || p->slots > 1))
		return moe_fail(MOE_ERR_ARG, "model params: keep_text needs inference_only and one slot");
	MOE_TRY(moe_adapter_form_find(p->adapter_format, &form));
	m->params = *p;
	m->params.adapter_format = form->name;
	m->params.dir = moe_strdup(p->dir);
	m->params.adapter = NULL;
	m->params.lora_targets = NULL;
	m->params.kt_weights = NULL;
	if (!m->params.dir)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a model");
	MOE_TRY(moe_model_check_method(m));
	if (p->adapter && p->method == MOE_METHOD_FULL)
		return moe_fail(MOE_ERR_ARG,
				"method full has no adapter, but %s is one: merge it into a checkpoint first",
				p->adapter);
	if (!p->max_tokens)
		m->params.max_tokens = MOE_DEFAULT_TOKENS;
	return MOE_OK;
}

enum moe_status moe_model_reserve_scratch(struct moe_model *m)
{
	const struct moe_decoder *d = &m->decoder;
	size_t scratch = moe_decoder_scratch(d);

	for (int i = 0; i < d->n_layers; i++) {
		const struct moe_decoder_layer *l = &d->layers[i];

		if (l->ffn)
			scratch = MOE_MAX(scratch, MOE_MAX(moe_ffn_scratch(l->ffn),
							   moe_ffn_lora_grad_scratch(l->ffn)));
		if (l->experts)
			scratch = MOE_MAX(scratch,
					  moe_experts_worker_scratch(l->experts,
								     m->params.max_tokens));
	}
	return moe_engine_reserve_scratch(m->engine, scratch);
}

static enum moe_status make_slots(struct moe_model *m)
{
	for (; m->n_slots < m->params.slots; m->n_slots++)
		MOE_TRY(moe_decoder_slot_create(m->engine, &m->decoder, &m->tensors,
						m->params.max_tokens, &m->slot[m->n_slots]));
	return MOE_OK;
}

static enum moe_status check_dropout(const struct moe_model *m)
{
	if (m->params.inference_only || !(m->params.lora_dropout > 0) || !m->lora.rank[MOE_ADAPTER_ROUTER])
		return MOE_OK;
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"lora_dropout %g with an adapter of %s: its LoRA is part of its weight, which has no masked "
			"input; train without it or without dropout",
			m->params.lora_dropout, moe_adapter_target_name(MOE_ADAPTER_ROUTER));
}

static void set_dropout(struct moe_model *m)
{
	struct moe_decoder *d = &m->decoder;

	d->dropout = m->params.inference_only ? 0 : (float)m->params.lora_dropout;
	for (int i = 0; i < d->n_layers; i++) {
		struct moe_decoder_layer *l = &d->layers[i];

		if (l->experts && l->experts->r)
			l->experts->dropout = d->dropout;
		if (l->ffn)
			l->ffn->dropout = d->dropout;
	}
}

enum moe_status moe_model_make_tensors(struct moe_model *m)
{
	struct moe_decoder *d = &m->decoder;
	struct moe_cut cut = { .slices_i = 1, .slices_h = 1, .combine_blocks = 1, .lora_groups = 1 };
	const struct moe_experts *experts = NULL;

	for (int i = 0; i < d->n_layers; i++)
		if (d->layers[i].experts)
			experts = d->layers[i].experts;
	if (experts)
		cut = moe_cut_choose(experts, m->params.max_tokens, moe_engine_workers(m->engine), 0,
				     0);
	MOE_TRY(moe_decoder_tensors_create(m->engine, d, &cut, &m->tensors));
	if (experts && m->backward.mode == MOE_BACKWARD_SHARED)
		MOE_TRY(moe_backward_ring_create(m->engine, experts,
						 experts->part[0].gate[0].dtype, m->backward.ring,
						 &m->tensors.ring));
	return MOE_OK;
}

/* Tensors, worker scratch, slots. */
static enum moe_status make_runtime(struct moe_model *m)
{
	MOE_TRY(moe_model_make_tensors(m));
	set_dropout(m);
	MOE_TRY(moe_ticket_create(m->engine, &m->ticket));
	MOE_TRY(moe_model_reserve_scratch(m));
	moe_model_apply_plan(m);
	return make_slots(m);
}

enum moe_status moe_model_reserve(struct moe_model *m, int T, int slots)
{
	int positions = (int)MOE_MIN((int64_t)T, m->arch.max_positions);

	if (T < 1 || slots < 1 || slots > MOE_MODEL_SLOTS)
		return moe_fail(MOE_ERR_ARG, "%d slots of %d tokens; at most %d slots", slots, T,
				MOE_MODEL_SLOTS);
	if (T <= m->params.max_tokens && slots <= m->n_slots)
		return MOE_OK;
	MOE_TRY(moe_engine_wait(m->engine));
	MOE_TRY(moe_model_plan_slots(m, MOE_MAX(T, m->params.max_tokens), MOE_MAX(slots, m->n_slots)));
	for (; m->n_slots; m->n_slots--)
		moe_decoder_slot_destroy(&m->slot[m->n_slots - 1]);
	moe_model_apply_plan(m);
	if (T > m->params.max_tokens) {
		m->params.max_tokens = T;
		MOE_TRY(moe_model_reserve_scratch(m));
	}
	if (positions > m->decoder.positions) {
		m->decoder.positions = positions;
		MOE_TRY(moe_model_make_rope(m));
	}
	m->params.slots = m->plan.slots;
	return make_slots(m);
}

/* Everything but values: what an estimate counts. */
static enum moe_status load_shape(struct moe_model *m, const char *targets)
{
	m->params.lora_targets = targets;
	MOE_TRY(moe_arch_load(m->params.dir, &m->arch));
	MOE_TRY(moe_model_plan_lora(m, NULL));
	MOE_TRY(check_dropout(m));
	m->params.lora_targets = NULL;
	MOE_TRY(moe_model_shape(m));
	MOE_TRY(moe_model_plan_memory(m, NULL));
	MOE_TRY(moe_model_load_weights(m, NULL));
	MOE_TRY(moe_model_make_folded(m, NULL));
	MOE_TRY(moe_model_init_lora(m));
	return make_runtime(m);
}

/* What config.json and the adapter say: the architecture, and what LoRA is on. *adapter: the caller frees it. */
static enum moe_status plan(struct moe_model *m, const char *adapter_dir, const char *targets,
			    struct moe_adapter **adapter)
{
	m->params.lora_targets = targets;
	MOE_TRY(moe_arch_load(m->params.dir, &m->arch));
	if (m->arch.reader->estimate_only)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: model_type '%s' can be estimated, not opened: %s are not in this "
				"version yet",
				m->params.dir, m->arch.name, m->arch.reader->estimate_only);
	if (m->params.method != MOE_METHOD_LORA && moe_gguf_is(m->params.dir))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: a GGUF file's weights stay as they are: method lora trains an adapter on them; for others "
				"convert it first (moesaic convert %s DIR --weights bf16)",
				m->params.dir, m->params.dir);
	if (adapter_dir)
		MOE_TRY(moe_adapter_read(adapter_dir, adapter));
	MOE_TRY(moe_model_plan_lora(m, *adapter));
	m->params.lora_targets = NULL;
	return check_dropout(m);
}

static enum moe_status load(struct moe_model *m, const char *adapter_dir, const char *targets,
			    const char *kt_weights)
{
	struct moe_safetensors *st = NULL;
	struct moe_adapter *adapter = NULL;
	enum moe_status status = MOE_OK;

	MOE_TRY_GOTO(plan(m, adapter_dir, targets, &adapter), status, out);
	MOE_TRY_GOTO(moe_safetensors_open(m->params.dir, &st), status, out);
	if (kt_weights)
		MOE_TRY_GOTO(moe_kt_put_experts(st, kt_weights, &m->arch, NULL), status, out);
	MOE_TRY_GOTO(moe_model_shape(m), status, out);
	MOE_TRY_GOTO(moe_model_plan_memory(m, st), status, out);
	MOE_TRY_GOTO(moe_model_load_weights(m, st), status, out);
	MOE_TRY_GOTO(moe_model_make_folded(m, st), status, out);
	MOE_TRY_GOTO(moe_model_init_lora(m), status, out);
	if (adapter)
		MOE_TRY_GOTO(moe_model_set_adapter(m, adapter), status, out);
	else
		MOE_TRY_GOTO(moe_model_fold(m), status, out);
	status = make_runtime(m);
out:
	moe_adapter_free(adapter);
	moe_safetensors_close(st);
	return status;
}

/* Gradients and moments are written first in the first step; masters were, when they were loaded. */
static void touch(struct moe_model *m)
{
	double start = moe_now();

	if (m->params.inference_only)
		return;
	m->touched_bytes = (int64_t)(moe_memory_touch(m->engine, "gradients") +
				     moe_memory_touch(m->engine, "moments"));
	m->touch_seconds = moe_now() - start;
	if (m->touched_bytes)
		moe_log(MOE_LOG_INFO, "touched %.2f GB of gradients and moments in %.2f s",
			(double)m->touched_bytes * 1e-9, m->touch_seconds);
}

enum moe_status moe_model_open(struct moe_engine *engine, const struct moe_model_params *params,
			       struct moe_model **out)
{
	struct moe_model *m;
	enum moe_status st;
	double start = moe_now();

	if (!out)
		return moe_fail(MOE_ERR_ARG, "out is NULL");
	*out = NULL;
	MOE_TRY(moe_engine_check(engine));
	MOE_TRY(moe_machine_use(engine));
	m = moe_calloc(1, sizeof *m);
	if (!m)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a model");
	m->engine = engine;
	MOE_TRY_GOTO(take_params(m, params), st, fail);
	if (moe_engine_is_dry(engine))
		st = load_shape(m, params->lora_targets);
	else
		st = load(m, params->adapter, params->lora_targets, params->kt_weights);
	if (st != MOE_OK)
		goto fail;
	touch(m);
	m->load_seconds = moe_now() - start;
	*out = m;
	return MOE_OK;
fail:
	moe_model_close(m);
	return st;
}

/* What config.json tells; the rest is zero. */
static void fill_shape(const struct moe_arch *a, struct moe_model_info *info)
{
	*info = (struct moe_model_info){ .struct_size = sizeof *info,
					 .arch = a->name,
					 .vocab = a->vocab,
					 .hidden = a->hidden,
					 .max_positions = a->max_positions,
					 .layers = a->n_layers,
					 .moe_layers = moe_arch_moe_layers(a),
					 .experts = a->n_experts,
					 .experts_per_token = a->top_k,
					 .moe_intermediate = (int)a->moe_intermediate };
}

enum moe_status moe_model_check(const struct moe_model_params *params, struct moe_model_info *info)
{
	struct moe_model *m = moe_calloc(1, sizeof *m);
	struct moe_adapter *adapter = NULL;
	enum moe_status st = MOE_OK;

	if (!m)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a model");
	if (info && info->struct_size < sizeof *info)
		MOE_TRY_GOTO(moe_fail(MOE_ERR_ARG, "model info: struct_size is not set"), st, out);
	MOE_TRY_GOTO(take_params(m, params), st, out);
	MOE_TRY_GOTO(plan(m, params->adapter, params->lora_targets, &adapter), st, out);
	if (info)
		fill_shape(&m->arch, info);
out:
	moe_adapter_free(adapter);
	moe_free((void *)m->params.dir);
	moe_free(m);
	return st;
}

void moe_model_close(struct moe_model *m)
{
	if (!m)
		return;
	if (moe_engine_check(m->engine) == MOE_OK) {
		/* whoever submitted: no task may be left that uses the buffers */
		moe_engine_wait(m->engine);
		for (int i = 0; i < MOE_MODEL_SLOTS; i++)
			moe_decoder_slot_destroy(&m->slot[i]);
		moe_decoder_tensors_destroy(m->engine, &m->tensors);
		moe_model_free_decoder(m);
		moe_model_free_folded(m);
		moe_ticket_destroy(m->ticket);
	}
	moe_free((void *)m->params.dir);
	moe_free(m->written);
	moe_free(m);
}

enum moe_status moe_model_get_info(struct moe_model *m, struct moe_model_info *info)
{
	const struct moe_arch *a;
	struct moe_param_count count;
	struct moe_lora_count lora;
	struct moe_engine_info engine = { .struct_size = sizeof engine };

	if (!m || !info || info->struct_size < sizeof *info)
		return moe_fail(MOE_ERR_ARG, "model info: struct_size is not set");
	MOE_TRY(moe_engine_get_info(m->engine, &engine));
	a = &m->arch;
	moe_arch_count_params(a, &count);
	fill_shape(a, info);
	info->max_tokens = m->params.max_tokens;
	info->slots = m->n_slots;
	info->lowest_trained_layer = m->tensors.lowest;
	info->params = count.total;
	info->active_params = count.active;
	info->embed_params = count.groups[MOE_PARAMS_EMBED];
	info->norm_params = count.groups[MOE_PARAMS_NORM];
	info->attention_params = count.groups[MOE_PARAMS_ATTENTION];
	info->dense_params = count.groups[MOE_PARAMS_DENSE];
	info->router_params = count.groups[MOE_PARAMS_ROUTER];
	info->shared_params = count.groups[MOE_PARAMS_SHARED];
	info->expert_params = count.groups[MOE_PARAMS_EXPERTS];
	info->expert_rank = m->lora.down_rank ? m->lora.down_rank : m->lora.gate_up_rank;
	info->n_eos = a->n_eos;
	info->non_finite = m->non_finite;
	info->weight_bytes = (int64_t)moe_memory_bytes(m->engine, "weights", -1);
	info->lora_bytes = (int64_t)(moe_memory_bytes(m->engine, "lora", -1) +
					moe_memory_bytes(m->engine, "gradients", -1) +
					moe_memory_bytes(m->engine, "moments", -1));
	info->activation_bytes = (int64_t)moe_memory_bytes(m->engine, "activations", -1);
	info->handles = engine.handles;
	info->load_seconds = m->load_seconds;
	info->backward_weights = m->backward_text;
	info->expert_format = m->format ? m->format->name : NULL;
	info->method = m->params.method;
	info->masters = m->params.masters;
	info->whole_params = moe_model_whole_params(m);
	info->touched_bytes = m->touched_bytes;
	info->touch_seconds = m->touch_seconds;
	info->planned_bytes = m->plan.total;
	info->wanted_bytes = m->plan.wanted;
	info->allowed_bytes = m->plan.allowed;
	info->trained_layers = a->n_layers - m->plan.lowest;
	info->recomputed_layers = m->plan.recomputed;
	for (int j = 0; j < MOE_ADAPTER_TARGETS; j++)
		if (j != MOE_ADAPTER_EXPERTS)
			info->lora_rank = MOE_MAX(info->lora_rank, m->lora.rank[j]);
	for (int i = 0; i < a->n_eos && i < 8; i++)
		info->eos_ids[i] = a->eos_ids[i];
	lora = moe_model_count_lora(m);
	info->attention_lora_params = lora.attention;
	info->router_lora_params = lora.router;
	info->router_weights = m->lora.router_weights;
	info->shared_lora_params = lora.shared;
	info->dense_lora_params = lora.dense;
	info->expert_lora_params = lora.experts;
	if (!m->params.inference_only)
		info->trainable_params = lora.attention + lora.router + lora.shared + lora.dense +
					 lora.experts + info->whole_params;
	return MOE_OK;
}
