/* SPDX-License-Identifier: Apache-2.0 */
/* Public training and evaluation: the model object seen as a trainee. */
#include "api/model.h"

#include "model/rewrite.h"
#include "train/train.h"

static void view(struct moe_model *m, struct moe_trainee *t)
{
	t->slot = m->slot;
	t->n_slots = m->n_slots;
	t->T_max = m->params.max_tokens;
}

static enum moe_status reserve(struct moe_trainee *t, int T, int slots)
{
	struct moe_model *m = t->user;

	MOE_TRY(moe_model_reserve(m, T, slots));
	view(m, t);
	return MOE_OK;
}

/* Checkpoints hold the training state, which has weights that are trained themselves; the output folder gets
 * them as a model. */
static enum moe_status save_adapter(void *user, const char *dir)
{
	struct moe_model *m = user;

	if (m->params.method == MOE_METHOD_LORA)
		return moe_model_write_adapter(m, dir);
	if (dir != m->output_dir) /* an adapter alone would belong to weights that only the state has */
		return MOE_OK;
	MOE_TRY(moe_model_write_checkpoint(m, dir));
	return m->params.method == MOE_METHOD_FULL ? MOE_OK : moe_model_write_adapter(m, dir);
}

static enum moe_status model_bytes(void *user, int64_t *bytes)
{
	const struct moe_model *m = user;

	return moe_rewrite_bytes(m->params.dir, bytes);
}

static int64_t adapter_bytes(const struct moe_model *m)
{
	struct moe_lora_count n = moe_model_count_lora(m);

	return m->params.method == MOE_METHOD_FULL
		       ? 0
		       : (int64_t)sizeof(float) * (n.attention + n.router + n.shared + n.dense + n.experts);
}

static struct moe_trainee trainee_of(struct moe_model *m)
{
	struct moe_trainee t = { .engine = m->engine,
				 .decoder = &m->decoder,
				 .tensors = &m->tensors,
				 .max_positions = m->arch.max_positions,
				 .base = m->params.dir,
				 .whole = m->params.method != MOE_METHOD_LORA,
				 .adapter = m->params.method != MOE_METHOD_FULL,
				 .adapter_bytes = adapter_bytes(m),
				 .user = m,
				 .model_bytes = model_bytes,
				 .reserve = reserve,
				 .save_adapter = save_adapter };

	view(m, &t);
	return t;
}

/* Counters of the rows that each expert saw; zeroed. */
static enum moe_status reset_counters(struct moe_model *m)
{
	for (int i = 0; i < m->decoder.n_layers; i++) {
		struct moe_experts *e = m->decoder.layers[i].experts;

		if (!e)
			continue;
		if (!e->tokens_seen)
			e->tokens_seen = moe_calloc((size_t)e->E, sizeof *e->tokens_seen);
		if (!e->tokens_seen)
			return moe_fail(MOE_ERR_NOMEM, "no memory for counters");
		memset(e->tokens_seen, 0, (size_t)e->E * sizeof *e->tokens_seen);
	}
	return MOE_OK;
}

enum moe_status moe_train_check(const struct moe_trainer_params *params)
{
	return moe_train_check_params(params);
}

enum moe_status moe_train(struct moe_model *m, const struct moe_trainer_params *params,
			  moe_train_fn fn, void *user, struct moe_train_result *result)
{
	struct moe_trainee t;
	struct moe_train_result filled = { .struct_size = sizeof filled };
	enum moe_status st;

	if (result && result->struct_size < sizeof *result)
		return moe_fail(MOE_ERR_ARG, "train result: struct_size is not set");
	MOE_TRY(moe_model_enter(m));
	t = trainee_of(m);
	m->output_dir = params ? params->output_dir : NULL;
	if (m->params.inference_only || m->tensors.lowest >= m->decoder.n_layers)
		st = moe_fail(MOE_ERR_ARG,
			      "nothing is trained in this model: it was opened without LoRA or "
			      "for inference");
	else
		st = reset_counters(m);
	if (st == MOE_OK)
		st = moe_train_run(&t, params, fn, user, &filled);
	if (result)
		*result = filled;
	moe_model_leave(m);
	return st;
}

enum moe_status moe_train_expert_tokens(struct moe_model *m, int layer, int64_t *counts, int n)
{
	const struct moe_experts *e;

	if (!m || !counts)
		return moe_fail(MOE_ERR_ARG, "expert tokens: model or counts is NULL");
	if (layer < 0 || layer >= m->decoder.n_layers)
		return moe_fail(MOE_ERR_ARG, "expert tokens: layer %d; 0 to %d are possible", layer, m->decoder.n_layers - 1);
	e = m->decoder.layers[layer].experts;
	if (!e)
		return moe_fail(MOE_ERR_ARG, "layer %d has no experts", layer);
	if (n != e->E)
		return moe_fail(MOE_ERR_ARG, "layer %d has %d experts, not %d", layer, e->E, n);
	if (!e->tokens_seen)
		return moe_fail(MOE_ERR_ARG, "layer %d was not trained yet: moe_train counts its tokens", layer);
	memcpy(counts, e->tokens_seen, (size_t)n * sizeof *counts);
	return MOE_OK;
}

/* Fills doc_loss with sums; tokens and loss are totals. */
static enum moe_status evaluate(struct moe_model *m, const struct moe_tokens *tokens,
				struct moe_eval_result *r)
{
	struct moe_trainee t = trainee_of(m);
	size_t n = (size_t)tokens->n_docs;
	double sum = 0;

	r->n_docs = tokens->n_docs;
	r->doc_loss = moe_calloc(n, sizeof *r->doc_loss);
	r->doc_tokens = moe_calloc(n, sizeof *r->doc_tokens);
	if (!r->doc_loss || !r->doc_tokens)
		return moe_fail(MOE_ERR_NOMEM, "no memory for %zu documents", n);
	MOE_TRY(moe_train_evaluate(&t, tokens, t.T_max, r->doc_loss, r->doc_tokens));
	r->tokens = 0;
	for (size_t i = 0; i < n; i++) {
		sum += r->doc_loss[i];
		r->tokens += r->doc_tokens[i];
		if (r->doc_tokens[i])
			r->doc_loss[i] /= (double)r->doc_tokens[i];
	}
	r->loss = sum / (double)r->tokens;
	return MOE_OK;
}

enum moe_status moe_evaluate(struct moe_model *m, const char *token_file,
			     struct moe_eval_result *result)
{
	struct moe_tokens *tokens;
	enum moe_status st;

	if (!result || result->struct_size < sizeof *result || !token_file)
		return moe_fail(MOE_ERR_ARG, "evaluation: a token file and struct_size are needed");
	*result = (struct moe_eval_result){ .struct_size = sizeof *result };
	MOE_TRY(moe_model_enter(m));
	st = moe_tokens_open(token_file, m->arch.vocab, &tokens);
	if (st == MOE_OK) {
		st = evaluate(m, tokens, result);
		moe_tokens_close(tokens);
	}
	moe_model_leave(m);
	if (st != MOE_OK)
		moe_eval_result_free(result);
	return st;
}

void moe_eval_result_free(struct moe_eval_result *r)
{
	if (!r)
		return;
	moe_free(r->doc_loss);
	moe_free(r->doc_tokens);
	r->doc_loss = NULL;
	r->doc_tokens = NULL;
}

enum moe_status moe_token_file_info(const char *token_file, struct moe_token_file_info *info)
{
	struct moe_tokens *t;

	if (!token_file || !info || info->struct_size < sizeof *info)
		return moe_fail(MOE_ERR_ARG, "token file info: a path and struct_size are needed");
	MOE_TRY(moe_tokens_open(token_file, INT32_MAX, &t)); /* no model here: any id */
	*info = (struct moe_token_file_info){ .struct_size = sizeof *info,
					      .tokens = t->n_tokens,
					      .trained_tokens = t->n_trained,
					      .documents = t->n_docs,
					      .packs = t->n_rows,
					      .longest_document = t->max_doc_tokens,
					      .longest_pack = t->max_row_tokens };
	moe_tokens_close(t);
	return MOE_OK;
}
