/* SPDX-License-Identifier: Apache-2.0 */
/* Between steps, when everything is drained: evaluation, checkpoints, stopping; and what a run leaves at its end. */
#include "train/run.h"

#include "model/file.h"
#include "model/state.h"
#include "train/card.h"

#include <math.h>

#define DEFAULT_SAVE_LIMIT 2

static enum moe_status measure(struct moe_run *r, double *loss)
{
	int64_t n = r->eval_tokens->n_docs, tokens = 0;
	int64_t *doc_n = moe_calloc((size_t)n, sizeof *doc_n);
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
	*loss = tokens ? sum / (double)tokens : NAN;
	return st;
}

bool moe_run_evaluates(const struct moe_run *r)
{
	return r->eval_tokens && r->p->eval_steps >= 0;
}

bool moe_run_saves_best(const struct moe_run *r)
{
	return moe_run_evaluates(r) && (r->p->load_best || r->p->save_best);
}

/* best: whether there was none as good; at the start nothing is, as there is no checkpoint of it. */
static enum moe_status evaluate(struct moe_run *r, int64_t step, bool *best)
{
	struct moe_train_event e = { .type = MOE_TRAIN_EVAL,
				     .step = step,
				     .total_steps = r->total_steps,
				     .epoch = (double)step / (double)r->steps_per_epoch };
	struct moe_train_progress *p = &r->progress;

	MOE_TRY(measure(r, &e.eval_loss));
	p->eval_loss = e.eval_loss;
	*best = step && isfinite(e.eval_loss) && !(p->best_loss <= e.eval_loss);
	if (*best) {
		p->best_loss = e.eval_loss;
		p->best_step = step;
	}
	MOE_TRY(moe_run_log(r, &e, true));
	moe_run_notify(r, &e);
	return MOE_OK;
}

static char *checkpoint_path(const struct moe_run *r, int64_t step)
{
	return moe_format("%s/checkpoint-%lld", r->p->output_dir, (long long)step);
}

/* trainer_state.json into dir; pending: the step whose checkpoint is being written, or 0. */
static enum moe_status write_log_state(struct moe_run *r, const char *dir, int64_t pending)
{
	struct moe_log_summary s = {
		.total_steps = r->total_steps,
		.logging_steps = r->log_every,
		.eval_steps = moe_run_evaluates(r) ? r->eval_every : 0,
		.save_steps = r->save_every,
		.tokens = r->progress.tokens,
		.epochs = (r->total_steps + r->steps_per_epoch - 1) / MOE_MAX(1, r->steps_per_epoch),
		.batch_size = r->p->batch_size,
		.best_step = r->progress.best_step,
		.best_loss = r->progress.best_loss,
	};
	char *best = s.best_step ? checkpoint_path(r, s.best_step) : NULL;
	enum moe_status st;

	if (s.best_step && !best)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the log");
	if (best && (s.best_step == pending || moe_path_is_dir(best)))
		s.best_checkpoint = best;
	st = moe_train_log_state(&r->log, dir, &s);
	moe_free(best);
	return st;
}

/* An update may overflow although loss and gradient were finite: such values get no final name. */
static enum moe_status check_finite(struct moe_run *r)
{
	char bad[160];

	if (!moe_train_bad_value(r->t->decoder, bad, sizeof bad))
		return MOE_OK;
	return moe_fail(MOE_ERR_DIVERGED,
			"step %lld: not finite after the update: %s. Nothing was saved of it",
			(long long)r->progress.step, bad);
}

int moe_run_save_limit(const struct moe_run *r)
{
	return r->p->save_total_limit ? r->p->save_total_limit : DEFAULT_SAVE_LIMIT;
}

static enum moe_status write_checkpoint(struct moe_run *r, char **final)
{
	int keep = moe_run_save_limit(r);
	struct moe_state_dir dir = { 0 };
	enum moe_status st;

	MOE_TRY(check_finite(r));
	MOE_TRY(moe_run_check_state_room(r));
	MOE_TRY(moe_state_begin(r->p->output_dir, r->progress.step, &dir));
	MOE_TRY_GOTO(moe_train_state_save(r->t->decoder, dir.path, &r->progress), st, fail);
	MOE_TRY_GOTO(r->t->save_adapter(r->t->user, dir.path), st, fail);
	MOE_TRY_GOTO(write_log_state(r, dir.path, r->progress.step), st, fail);
	*final = moe_strdup(dir.final);
	MOE_TRY_GOTO(moe_state_commit(&dir), st, fail);
	r->saved = r->progress.step;
	MOE_TRY_GOTO(moe_state_prune(r->p->output_dir, keep,
				     r->progress.best_step ? r->progress.best_step : -1),
		     st, fail);
	MOE_TRY_GOTO(write_log_state(r, r->p->output_dir, 0), st, fail);
	st = moe_train_log_plot(&r->log);
fail:
	moe_state_abort(&dir);
	return st;
}

/* A failure leaves the checkpoints before it whole. */
static enum moe_status save(struct moe_run *r, bool stopping)
{
	struct moe_train_event e = { .type = MOE_TRAIN_SAVED,
				     .step = r->progress.step,
				     .total_steps = r->total_steps };
	char *final = NULL, *text;
	enum moe_status st = write_checkpoint(r, &final);

	e.text = final;
	if (st == MOE_OK)
		moe_run_notify(r, &e);
	moe_free(final);
	if ((st != MOE_ERR_IO && st != MOE_ERR_NOFIT) || stopping || !r->p->continue_on_save_error)
		return st;
	text = moe_format("the checkpoint was not saved, training goes on: %s", moe_last_error());
	moe_run_warn(r, r->progress.step, text ? text : "the checkpoint was not saved");
	moe_free(text);
	return MOE_OK;
}

static bool eval_due(const struct moe_run *r, int64_t step)
{
	double passed = r->p->eval_steps ? (double)step : (double)step / (double)r->steps_per_epoch;

	if (!moe_run_evaluates(r))
		return false;
	if (step == r->total_steps)
		return true;
	return step % r->eval_every == 0 && passed >= r->p->eval_delay;
}

/* By epochs an epoch that max_steps cuts short counts too. */
static bool save_due(const struct moe_run *r, int64_t step)
{
	return (r->save_every > 0 && step % r->save_every == 0) || (r->p->save_steps < 0 && step == r->total_steps);
}

/* Evaluation is not training time. */
static void set_clock(struct moe_run *r)
{
	r->clock = moe_now();
	moe_engine_idle(r->t->engine, &r->idle);
}

enum moe_status moe_run_begin(struct moe_run *r)
{
	bool best;

	if (r->p->eval_at_start && moe_run_evaluates(r) && !r->progress.step)
		MOE_TRY(evaluate(r, 0, &best));
	set_clock(r);
	return MOE_OK;
}

enum moe_status moe_run_between(struct moe_run *r, int64_t step)
{
	bool eval = eval_due(r, step), saving = save_due(r, step), best = false;

	if (!eval && !saving)
		return MOE_OK;
	MOE_TRY(moe_run_drain(r, step + 1));
	r->progress.step = step; /* it may have been left out */
	if (eval)
		MOE_TRY(evaluate(r, step, &best));
	if (saving || (best && moe_run_saves_best(r)))
		MOE_TRY(save(r, false));
	set_clock(r);
	return MOE_OK;
}

static bool out_of_time(const struct moe_run *r)
{
	return r->p->max_hours > 0 && moe_now() - r->started > r->p->max_hours * 3600;
}

bool moe_run_must_stop(const struct moe_run *r)
{
	return r->stop || out_of_time(r);
}

enum moe_status moe_run_stop(struct moe_run *r, int64_t step)
{
	MOE_TRY(moe_run_drain(r, step + 1));
	r->progress.step = step;
	if (r->saved != step)
		MOE_TRY(save(r, true));
	return moe_fail(MOE_ERR_INTERRUPTED,
			"stopped after step %lld of %lld%s; the state is in %s/checkpoint-%lld: --resume goes on",
			(long long)step, (long long)r->total_steps, r->stop ? "" : ", out of time", r->p->output_dir,
			(long long)step);
}

/* ---- at the end ---- */

/* The parameters of the best evaluation in place of the last ones. */
static enum moe_status take_best(struct moe_run *r)
{
	struct moe_train_progress scratch = r->progress;
	char *dir, *text;
	enum moe_status st;

	if (!r->p->load_best || !r->progress.best_step || r->progress.best_step == r->progress.step)
		return MOE_OK;
	dir = checkpoint_path(r, r->progress.best_step);
	if (!dir)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a path");
	scratch.expert_rows = NULL;
	st = moe_state_check(dir, r->progress.best_step);
	if (st == MOE_OK)
		st = moe_train_state_load(r->t->decoder, dir, &scratch);
	moe_free(dir);
	if (st != MOE_ERR_IO || !r->p->continue_on_save_error)
		return st;
	/* its saving failed, which was a warning */
	text = moe_format("the adapter is that of the last step, not of the best: %s",
			  moe_last_error());
	moe_run_warn(r, r->progress.step, text ? text : "the adapter is that of the last step");
	moe_free(text);
	return MOE_OK;
}

static enum moe_status write_card(const struct moe_run *r)
{
	struct moe_train_card card = {
		.base = r->t->base,
		.output = r->p->output_dir,
		.whole = r->t->whole,
		.adapter = r->t->adapter,
		.tokens = r->tokens,
		.steps = r->progress.step,
		.trained_tokens = r->progress.trained_tokens,
		.first_loss = r->progress.first_loss,
		.last_loss = r->progress.last_loss,
		.eval_loss = r->progress.eval_loss,
		.learning_rate = r->learning_rate,
	};

	if (r->p->load_best && r->progress.best_step)
		card.best_step = r->progress.best_step, card.eval_loss = r->progress.best_loss;
	return moe_train_card_write(r->p->output_dir, &card);
}

static enum moe_status write_results(struct moe_run *r)
{
	MOE_TRY(moe_run_check_result_room(r));
	MOE_TRY(take_best(r));
	MOE_TRY(check_finite(r));
	MOE_TRY(r->t->save_adapter(r->t->user, r->p->output_dir));
	MOE_TRY(write_log_state(r, r->p->output_dir, 0));
	MOE_TRY(moe_train_log_plot(&r->log));
	return write_card(r);
}

/*
 * The results could not be written: the state of the last step lets --resume write them without training. best: the
 * parameters are those of another step by now.
 */
static enum moe_status keep_last(struct moe_run *r, enum moe_status st, bool best)
{
	const struct moe_train_progress *p = &r->progress;
	char *why = moe_strdup(moe_last_error()), *dir = NULL, *final = NULL;
	int64_t step = 0;

	if (r->saved != p->step && !best)
		write_checkpoint(r, &final);
	moe_free(final);
	if (r->saved == p->step)
		moe_fail(st, "%s. The state of the last step is in %s/checkpoint-%lld: make room, then the same command with "
			     "--resume writes the results without training again",
			 why ? why : "", r->p->output_dir, (long long)p->step);
	else if (moe_state_latest(r->p->output_dir, &step, &dir) == MOE_OK && dir)
		moe_fail(st, "%s. Its state had no room either: make room, then --resume trains the %lld steps after %s again",
			 why ? why : "", (long long)(p->step - step), dir);
	else
		moe_fail(st, "%s. Nor was there room for a checkpoint: the training is lost", why ? why : "");
	moe_free(dir);
	moe_free(why);
	return st;
}

enum moe_status moe_run_finish(struct moe_run *r)
{
	bool best = r->p->load_best && r->progress.best_step && r->progress.best_step != r->progress.step;
	enum moe_status st = write_results(r);

	return st == MOE_ERR_IO || st == MOE_ERR_NOFIT ? keep_last(r, st, best) : st;
}
