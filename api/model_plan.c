/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory plan. Everything but slots is counted by opening the model on a dry engine; slots by the code that makes
 * them. Then what fits: two slots before one, activations kept before computed again.
 */
#include "api/model.h"
#include "api/model_fetch.h"

#include "engine/available.h"
#include "engine/size.h"

#include <stdio.h>

#define HANDLE_BYTES 4096 /* Debian's StarPU, measured */
#define TASK_BYTES 2048
#define WINDOW_TASKS 50000		 /* most that are live at once */
#define PROCESS_BYTES ((int64_t)64 << 20) /* before a model is opened; where it is not this process */

/* A model of the same shape on a dry engine. */
static enum moe_status open_shadow(const struct moe_model *m, const struct moe_safetensors *st, struct moe_model **out)
{
	struct moe_model *s = moe_calloc(1, sizeof *s);
	enum moe_status status;

	*out = s;
	if (!s)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a plan");
	s->params = m->params;
	s->arch = m->arch;
	s->lora = m->lora;
	s->convert = m->convert;
	s->expand = m->expand;
	s->format = m->format;
	s->backward = m->backward;
	status = moe_engine_open_dry(moe_engine_parts(m->engine), moe_engine_workers(m->engine), &s->engine);
	if (status != MOE_OK) {
		s->engine = NULL;
		return status;
	}
	MOE_TRY(moe_model_shape(s));
	MOE_TRY(moe_model_load_weights(s, st));
	MOE_TRY(moe_model_make_folded(s, NULL));
	MOE_TRY(moe_model_init_lora(s));
	MOE_TRY(moe_model_make_tensors(s));
	return moe_model_reserve_scratch(s);
}

static void close_shadow(struct moe_model *s)
{
	if (s && s->engine) {
		moe_decoder_slot_destroy(&s->slot[0]);
		moe_decoder_tensors_destroy(s->engine, &s->tensors);
		moe_model_free_decoder(s);
		moe_model_free_folded(s);
		moe_engine_close(s->engine);
	}
	moe_free(s);
}

static void set_policy(struct moe_decoder *d, int lowest, int recomputed)
{
	for (int i = 0; i < d->n_layers; i++)
		moe_decoder_set_recompute(&d->layers[i], i >= lowest && i < lowest + recomputed);
}

void moe_model_apply_plan(struct moe_model *m)
{
	set_policy(&m->decoder, m->plan.lowest, m->plan.recomputed);
}

static int64_t slot_bytes(const struct moe_model *m, struct moe_model *s, int recomputed, int T)
{
	int lowest = m->plan.lowest;
	int64_t bytes;

	set_policy(&s->decoder, lowest, recomputed);
	bytes = (int64_t)moe_decoder_slot_bytes(&s->decoder, lowest, T);
	if (m->params.keep_text)
		bytes += (int64_t)moe_decoder_text_bytes(&s->decoder, s->decoder.positions);
	return bytes + HANDLE_BYTES * moe_decoder_slot_handles(&s->decoder, lowest, &s->tensors.cut, T);
}

/* Tasks of two steps of a micro-batch each, at most as many as may be outstanding. */
static enum moe_status count_tasks(struct moe_model *s, int T, int64_t *bytes)
{
	struct moe_dry_counts c;

	*bytes = 0;
	if (s->params.inference_only || s->tensors.lowest >= s->decoder.n_layers)
		return MOE_OK;
	MOE_TRY(moe_decoder_slot_create(s->engine, &s->decoder, &s->tensors, T, &s->slot[0]));
	s->n_slots = 1;
	MOE_TRY(moe_model_count_step(s, T, T, 1));
	moe_engine_dry_counts(s->engine, &c);
	*bytes = TASK_BYTES * MOE_MIN(2 * c.tasks, (int64_t)WINDOW_TASKS);
	moe_decoder_slot_destroy(&s->slot[0]);
	return MOE_OK;
}

/*
 * A piece of rows per loading thread is there at a time; of what is trained, quantised or becomes codes a matrix, and what
 * is made of it.
 */
static int64_t loading_bytes(const struct moe_model *m)
{
	const struct moe_arch *a = &m->arch;
	bool whole = m->convert || m->expand || m->format || m->params.method != MOE_METHOD_LORA;
	int64_t most = MOE_MAX((int64_t)a->n_heads * a->head_dim, MOE_MAX((int64_t)MOE_VOCAB_CHUNK, a->moe_intermediate));

	most = MOE_MAX(most, MOE_MAX(a->intermediate, a->shared_intermediate));
	most *= 4 * a->hidden;
	return (whole ? most : MOE_MIN(most, (int64_t)MOE_FETCH_BYTES)) * moe_engine_workers(m->engine);
}

/* A copy of the experts' adapter is written. */
static int64_t saving_bytes(const struct moe_model *m)
{
	return m->params.inference_only ? 0 : (int64_t)sizeof(float) * moe_model_count_lora(m).experts;
}

static enum moe_status count_fixed(struct moe_model *m, struct moe_model *s)
{
	struct moe_memory_plan *p = &m->plan;
	struct moe_dry_counts c;
	int64_t tasks;

	p->lowest = m->params.inference_only ? s->decoder.n_layers : moe_decoder_lowest(&s->decoder);
	p->weights = (int64_t)moe_memory_bytes(s->engine, "weights", -1);
	p->trained = (int64_t)moe_memory_bytes(s->engine, NULL, -1) - p->weights;
	moe_engine_dry_counts(s->engine, &c);
	p->scratch = (int64_t)c.scratch_bytes * moe_engine_workers(m->engine);
	MOE_TRY(count_tasks(s, m->params.max_tokens, &tasks));
	p->runtime = c.handles * HANDLE_BYTES + tasks;
	p->process = moe_engine_is_dry(m->engine) ? PROCESS_BYTES : (int64_t)moe_memory_resident();
	p->loading = loading_bytes(m);
	p->saving = saving_bytes(m);
	return MOE_OK;
}

static int64_t total_of(const struct moe_memory_plan *p, int slots, int64_t slot)
{
	return p->process + p->weights + p->trained + p->scratch + p->runtime +
	       MOE_MAX(slots * slot + p->saving, p->loading);
}

struct choice {
	int slots, recomputed;
	int64_t slot, total;
};

static struct choice choice_of(const struct moe_model *m, struct moe_model *s, int T, int slots, int recomputed)
{
	struct choice c = { slots, recomputed, slot_bytes(m, s, recomputed, T), 0 };

	c.total = total_of(&m->plan, slots, c.slot);
	return c;
}

/* The fewest layers that make it fit, between least and most of them; most where none does. */
static struct choice fewest(const struct moe_model *m, struct moe_model *s, int T, int slots, int least, int most)
{
	struct choice c = choice_of(m, s, T, slots, least);

	/* a set that the layers share costs more than the first layers save */
	for (int n = least + 1; n <= most && c.total > m->plan.allowed; n++)
		c = choice_of(m, s, T, slots, n);
	return c;
}

/* Into the plan; false: not even the least fits, which is then in it. */
static bool choose(struct moe_model *m, struct moe_model *s, int T, int most_slots, int least_slots)
{
	struct moe_memory_plan *p = &m->plan;
	int layers = s->decoder.n_layers - p->lowest;
	int least = m->params.recompute == MOE_RECOMPUTE_ALWAYS ? layers : 0;
	int most = m->params.recompute == MOE_RECOMPUTE_NEVER ? 0 : layers;
	struct choice c = choice_of(m, s, T, most_slots, least);

	p->wanted = choice_of(m, s, T, most_slots, 0).total;
	for (int slots = most_slots - 1; slots >= least_slots && c.total > p->allowed; slots--)
		c = choice_of(m, s, T, slots, least);
	if (c.total > p->allowed)
		c = fewest(m, s, T, least_slots, least, most);
	p->slots = c.slots;
	p->recomputed = c.recomputed;
	p->slot = c.slot;
	p->total = c.total;
	return c.total <= p->allowed;
}

/* The longest micro-batch that would fit with the least of everything else; 0: none. */
static int64_t tokens_that_fit(struct moe_model *m, struct moe_model *s, int T, int slots)
{
	struct moe_memory_plan p = m->plan;
	int layers = s->decoder.n_layers - p.lowest, recomputed = m->params.recompute == MOE_RECOMPUTE_NEVER ? 0 : layers;

	for (T /= 2; T >= 64; T /= 2)
		if (total_of(&p, slots, slot_bytes(m, s, recomputed, T)) <= p.allowed)
			return T;
	return 0;
}

static enum moe_status refuse(struct moe_model *m, struct moe_model *s, int T, int slots)
{
	const struct moe_memory_plan *p = &m->plan;
	int64_t fits = tokens_that_fit(m, s, T, slots);
	char help[64] = "fewer targets or smaller ranks";

	if (fits)
		snprintf(help, sizeof help, "micro-batches of %lld tokens would fit; they", (long long)fits);
	else if (m->params.method != MOE_METHOD_LORA)
		snprintf(help, sizeof help, "%s",
			 m->params.masters == MOE_MASTERS_BF16 ? "adapters (method lora)" : "method lora, or masters bf16");
	else if (!m->format)
		snprintf(help, sizeof help, "weights int8 or int4, or smaller ranks");
	return moe_fail(MOE_ERR_NOFIT,
			"the model needs %s at least: weights %s, adapter, gradients, moments and masters %s, "
			"activations %d x %s (%d of %d layers computed again), workers and runtime %s, saving %s, "
			"process %s; %s %s. %s need less",
			moe_size(p->total).text, moe_size(p->weights).text, moe_size(p->trained).text, p->slots,
			moe_size(p->slot).text, p->recomputed, s->decoder.n_layers - p->lowest,
			moe_size(p->scratch + p->runtime).text, moe_size(p->saving).text, moe_size(p->process).text,
			moe_size(p->allowed).text, p->limited ? "are allowed" : "are available", help);
}

/* Copies for the backward come out of what is left, after two slots and all activations. */
static enum moe_status choose_backward(struct moe_model *m, int64_t left)
{
	const char *text = m->params.backward_weights;
	bool given = text && strcmp(text, "auto");

	if (moe_engine_is_dry(m->engine) && given) /* an estimate says how much is missing */
		left = -1;
	else if (left < 0)
		left = 0;
	return moe_model_choose_backward(m, left);
}

static enum moe_status plan(struct moe_model *m, const struct moe_safetensors *st, struct moe_model **s, int slots)
{
	int T = m->params.max_tokens;

	MOE_TRY(open_shadow(m, st, s));
	MOE_TRY(count_fixed(m, *s));
	m->plan.allowed = m->plan.limited ? m->params.memory_limit
					  : (int64_t)MOE_MIN(moe_memory_available(""), (size_t)INT64_MAX / 2) +
						    m->plan.process;
	MOE_TRY(choose_backward(m, m->plan.allowed - choice_of(m, *s, T, slots, 0).total));
	if (m->backward.mode == MOE_BACKWARD_DIRECT)
		return MOE_OK;
	close_shadow(*s);
	MOE_TRY(open_shadow(m, st, s));
	return count_fixed(m, *s);
}

enum moe_status moe_model_plan_memory(struct moe_model *m, const struct moe_safetensors *st)
{
	int given = m->params.slots, most = given ? given : m->params.inference_only ? 1 : 2;
	struct moe_model *s = NULL;
	enum moe_status status;

	MOE_TRY(moe_model_choose_format(m, st));
	m->plan.limited = m->params.memory_limit > 0;
	m->backward = (struct moe_backward_choice){ .mode = MOE_BACKWARD_DIRECT };
	status = plan(m, st, &s, most);
	if (status == MOE_OK && !choose(m, s, m->params.max_tokens, most, given ? given : 1) &&
	    !moe_engine_is_dry(m->engine))
		status = refuse(m, s, m->params.max_tokens, given ? given : 1);
	m->params.slots = m->plan.slots;
	close_shadow(s);
	return status;
}

enum moe_status moe_model_plan_slots(struct moe_model *m, int T, int slots)
{
	struct moe_memory_plan before = m->plan;
	enum moe_status st = MOE_OK;

	if (!choose(m, m, T, slots, slots) && !moe_engine_is_dry(m->engine))
		st = refuse(m, m, T, slots);
	set_policy(&m->decoder, before.lowest, before.recomputed); /* of the slots that there are */
	if (st != MOE_OK)
		m->plan = before;
	return st;
}
