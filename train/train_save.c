/* SPDX-License-Identifier: Apache-2.0 */
/* Between steps, when everything is drained: evaluation, checkpoints, stopping. */
#include "train/run.h"

#include "model/state.h"

#include <math.h>

#define DEFAULT_SAVE_LIMIT 2

static enum moe_status evaluate(struct moe_run *r, int64_t step)
{
	struct moe_train_event e = { .type = MOE_TRAIN_EVAL,
				     .step = step,
				     .total_steps = r->total_steps,
				     .epoch = (double)step / (double)r->steps_per_epoch };
	int64_t n = r->eval_tokens->n_docs, *doc_n = moe_calloc((size_t)n, sizeof *doc_n),
		tokens = 0;
	double *doc_sum = moe_calloc((size_t)n, sizeof *doc_sum), sum = 0;
	enum moe_status st = MOE_ERR_NOMEM;

	if (!doc_n || !doc_sum)
		moe_fail(st, "no memory for evaluation");
	else
		st = moe_train_evaluate(r->t, r->eval_tokens, r->t->T_max, doc_sum, doc_n);
	for (int64_t i = 0; st == MOE_OK && i < n; i++) {
		sum += doc_sum[i];
		tokens += doc_n[i];
	}
	moe_free(doc_n);
	moe_free(doc_sum);
	MOE_TRY(st);
	r->eval_loss = e.eval_loss = tokens ? sum / (double)tokens : NAN;
	MOE_TRY(moe_train_log_add(&r->log, &e, true));
	moe_run_notify(r, &e);
	return MOE_OK;
}

static enum moe_status save(struct moe_run *r)
{
	struct moe_state_dir dir = { 0 };
	struct moe_train_event e = { .type = MOE_TRAIN_SAVED,
				     .step = r->progress.step,
				     .total_steps = r->total_steps };
	enum moe_status st;
	char *final = NULL;

	MOE_TRY(moe_state_begin(r->p->output_dir, r->progress.step, &dir));
	MOE_TRY_GOTO(moe_train_state_save(r->t->decoder, dir.path, &r->progress), st, fail);
	MOE_TRY_GOTO(r->t->save_adapter(r->t->user, dir.path), st, fail);
	final = moe_strdup(dir.final);
	MOE_TRY_GOTO(moe_state_commit(&dir), st, fail);
	MOE_TRY_GOTO(moe_state_prune(r->p->output_dir, r->p->save_total_limit
							       ? r->p->save_total_limit
							       : DEFAULT_SAVE_LIMIT),
		     st, fail);
	st = moe_train_log_plot(&r->log, r->total_steps);
	e.text = final;
	if (st == MOE_OK)
		moe_run_notify(r, &e);
fail:
	moe_state_abort(&dir);
	moe_free(final);
	return st;
}

static bool due(int every, int64_t step)
{
	return every > 0 && step % every == 0;
}

static bool eval_due(const struct moe_run *r, int64_t step)
{
	if (!r->eval_tokens)
		return false;
	if (step == r->total_steps)
		return true;
	return r->p->eval_steps ? due(r->p->eval_steps, step) : step % r->steps_per_epoch == 0;
}

enum moe_status moe_run_between(struct moe_run *r, int64_t step)
{
	bool out_of_time = r->p->max_hours > 0 && moe_now() - r->started > r->p->max_hours * 3600;
	bool eval = eval_due(r, step), saving = due(r->p->save_steps, step);

	if (!eval && !saving && !r->stop && !out_of_time)
		return MOE_OK;
	MOE_TRY(moe_run_drain(r, step + 1));
	if (eval)
		MOE_TRY(evaluate(r, step));
	if (saving || r->stop || out_of_time)
		MOE_TRY(save(r));
	r->clock = moe_now(); /* evaluation and saving are not training time */
	moe_engine_idle(r->t->engine, &r->idle);
	if (r->stop || out_of_time)
		return moe_fail(MOE_ERR_INTERRUPTED,
				"stopped after step %lld of %lld; the state is in "
				"%s/checkpoint-%lld",
				(long long)step, (long long)r->total_steps, r->p->output_dir,
				(long long)step);
	return MOE_OK;
}
