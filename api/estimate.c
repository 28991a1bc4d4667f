/* SPDX-License-Identifier: Apache-2.0 */
/* Memory, tasks and time of a step, counted by opening and submitting on a dry engine. */
#include "api/estimate_time.h"
#include "api/model.h"
#include "model/arch_reader.h"

#include "tasks/task.h"

#include <stdio.h>

#define HANDLE_BYTES 4096 /* Debian's StarPU */
#define TASK_BYTES 2048
#define WINDOW_TASKS 50000 /* most that are live at once */

/* One micro-batch of documents of n tokens; ids do not matter. */
static enum moe_status make_batch(const struct moe_model *m, int T, int n, struct moe_model_batch *b)
{
	int32_t *ids;

	n = (int)MOE_MIN((int64_t)MOE_MIN(n, T), m->arch.max_positions);
	ids = moe_calloc((size_t)n, sizeof *ids);
	if (!ids)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an estimate");
	MOE_TRY(moe_model_batch_create(T, b));
	for (int at = 0; at < T; at += n)
		moe_model_batch_add(b, ids, NULL, MOE_MIN(n, T - at));
	moe_free(ids);
	return MOE_OK;
}

static enum moe_status submit_step(struct moe_model *m, const struct moe_batch *batch,
				   int micro_batches)
{
	struct moe_context c = { .engine = m->engine, .layer = -1, .step = 1 };
	struct moe_loss_result loss;
	struct moe_grad_norm norm;
	struct moe_decoder_step update = { .max_norm = 1, .norm = &norm };
	enum moe_status st = MOE_OK;

	MOE_TRY(moe_submit_begin(m->engine));
	for (int i = 0; st == MOE_OK && i < micro_batches; i++) {
		struct moe_decoder_pass pass = moe_model_pass(m, i % m->n_slots, batch);

		c.micro = i;
		st = moe_graph_decoder_forward(&c, &pass);
		if (st == MOE_OK)
			st = moe_graph_decoder_loss(&c, &pass, true, 1, &loss);
		if (st == MOE_OK)
			st = moe_graph_decoder_backward(&c, &pass, i == 0);
	}
	if (st == MOE_OK)
		st = moe_graph_decoder_update(&c, &m->decoder, &m->tensors, &update);
	moe_submit_end(m->engine);
	return st;
}

enum moe_status moe_model_count_step(struct moe_model *m, int T, int n, int micro_batches)
{
	struct moe_model_batch batch = { 0 };
	enum moe_status st = make_batch(m, T, n ? n : T, &batch);

	if (st == MOE_OK)
		st = submit_step(m, &batch.batch, micro_batches);
	moe_model_batch_free(&batch);
	return st;
}

static void count_memory(struct moe_engine *e, const struct moe_dry_counts *c, int workers,
			 struct moe_estimate *out)
{
	int64_t live = MOE_MIN(c->tasks, (int64_t)WINDOW_TASKS);

	out->weights = (int64_t)moe_memory_bytes(e, "weights", -1);
	out->lora = (int64_t)moe_memory_bytes(e, "lora", -1);
	out->gradients = (int64_t)moe_memory_bytes(e, "gradients", -1);
	out->moments = (int64_t)moe_memory_bytes(e, "moments", -1);
	out->activations = (int64_t)moe_memory_bytes(e, "activations", -1);
	out->scratch = (int64_t)c->scratch_bytes * workers;
	out->runtime = c->handles * HANDLE_BYTES + live * TASK_BYTES;
	out->total = (int64_t)moe_memory_bytes(e, NULL, -1) + out->scratch + out->runtime;
	out->largest = (int64_t)moe_memory_largest(e);
	for (int p = 0; p < out->parts && p < MOE_ESTIMATE_PARTS; p++)
		out->part[p] = (int64_t)moe_memory_bytes(e, NULL, p);
}

/* Forward and the backward's input gradients, 2 flops a weight and token each; embedding is a look-up. */
static double step_flops(const struct moe_model_info *info, int lowest, int64_t tokens)
{
	double body = (double)(info->active_params - info->embed_params);
	double trained = info->layers ? 1.0 - (double)lowest / info->layers : 1;

	return 2 * body * (double)tokens * (1 + trained);
}

/* Seconds that workers need for all tasks of a step. */
static double work_s(const struct moe_estimate_params *p, const struct moe_model *m,
		     const struct moe_model_info *info, int T, int micros, int workers,
		     int64_t tasks)
{
	int n = p->document_tokens ? MOE_MIN(p->document_tokens, T) : T;
	struct moe_step_load l = { .tokens = T,
				   .document_tokens =
					   (int)MOE_MIN((int64_t)n, m->arch.max_positions),
				   .micro_batches = micros,
				   .workers = workers,
				   .lowest_trained_layer = info->lowest_trained_layer,
				   .trainable_params = info->trainable_params,
				   .tasks = tasks };

	if (p->gflops_per_worker > 0)
		return step_flops(info, l.lowest_trained_layer, (int64_t)T * micros) /
		       (p->gflops_per_worker * 1e9 * workers);
	return moe_step_work_us(m, &l) * 1e-6 / workers;
}

/* Weights that the planned shapes have too many or too few of, anywhere. */
static void correct_weights(const struct moe_model *m, struct moe_estimate *out)
{
	int64_t bytes = 2 * (m->arch.attention_params_more + m->arch.expert_params_more);

	out->weights += bytes;
	out->total += bytes;
	out->wanted += bytes;
	for (int p = 0; p < out->parts && p < MOE_ESTIMATE_PARTS; p++)
		out->part[p] += bytes / out->parts;
	out->lacks = m->arch.reader->estimate_only;
}

static enum moe_status count(struct moe_engine *e, const struct moe_estimate_params *p,
			     struct moe_model *m, int workers, struct moe_estimate *out)
{
	struct moe_model_info info = { .struct_size = sizeof info };
	struct moe_dry_counts c;
	int T = p->tokens ? p->tokens : m->params.max_tokens, micros = MOE_MAX(1, p->micro_batches);

	MOE_TRY(moe_model_get_info(m, &info));
	if (info.trainable_params)
		MOE_TRY(moe_model_count_step(m, T, p->document_tokens, micros));
	moe_engine_dry_counts(e, &c);
	out->params = info.params;
	out->active_params = info.active_params;
	out->trainable_params = info.trainable_params;
	count_memory(e, &c, workers, out);
	out->slots = info.slots;
	out->trained_layers = info.trained_layers;
	out->recomputed_layers = info.recomputed_layers;
	out->process = m->plan.process;
	out->staging = MOE_MAX(m->plan.saving, m->plan.loading - out->activations);
	out->total += out->process + out->staging;
	out->wanted = m->plan.wanted - m->plan.total + out->total;
	correct_weights(m, out);
	memcpy(out->backward_weights, m->backward_text, sizeof out->backward_weights);
	out->handles = c.handles;
	out->tasks = c.tasks;
	out->max_task_handles = c.max_task_handles;
	for (int i = 0; i < MOE_ESTIMATE_KINDS; i++)
		out->kind[i] = c.kinds[i];
	out->submission_s = (double)c.tasks * moe_machine()->submit_us * 1e-6;
	out->step_s = MOE_MAX(work_s(p, m, &info, T, micros, workers, c.tasks), out->submission_s);
	out->submission_share = out->submission_s / out->step_s;
	snprintf(out->isa, sizeof out->isa, "%s", moe_machine()->rates.isa);
	out->calibrated = moe_machine()->rates.measured;
	out->tokens_per_s = (double)T * micros / out->step_s;
	return MOE_OK;
}

enum moe_status moe_estimate(const struct moe_estimate_params *p, struct moe_estimate *out)
{
	struct moe_model_params mp;
	struct moe_engine *e;
	struct moe_model *m;
	int parts, workers;
	enum moe_status st;

	if (!p || p->struct_size < sizeof *p || !out || out->struct_size < sizeof *out || !p->model)
		return moe_fail(MOE_ERR_ARG, "estimate: struct_size and a model are needed");
	if (p->parts < 0 || p->workers < 0 || p->tokens < 0 || p->micro_batches < 0 ||
	    p->document_tokens < 0)
		return moe_fail(MOE_ERR_ARG,
				"estimate: parts %d, workers %d, tokens %d, micro_batches %d, document_tokens %d; none may be negative",
				p->parts, p->workers, p->tokens, p->micro_batches, p->document_tokens);
	*out = (struct moe_estimate){ .struct_size = sizeof *out };
	parts = out->parts = p->parts ? p->parts : 1;
	workers = p->workers ? p->workers : parts;
	mp = *p->model;
	if (p->tokens)
		mp.max_tokens = p->tokens;
	MOE_TRY(moe_engine_open_dry(parts, workers, &e));
	st = moe_model_open(e, &mp, &m);
	if (st == MOE_OK) {
		st = count(e, p, m, workers, out);
		moe_model_close(m);
	}
	moe_engine_close(e);
	return st;
}
