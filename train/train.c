/* SPDX-License-Identifier: Apache-2.0 */
#include "train/run.h"

void moe_run_notify(struct moe_run *r, const struct moe_train_event *e)
{
	if (r->fn && r->fn(e, r->user))
		r->stop = true;
}

void moe_run_warn(struct moe_run *r, int64_t step, const char *text)
{
	struct moe_train_event e = {
		.type = MOE_TRAIN_WARNING, .step = step, .total_steps = r->total_steps, .text = text
	};

	moe_run_notify(r, &e);
}

enum moe_status moe_run_log(struct moe_run *r, const struct moe_train_event *e, bool eval)
{
	enum moe_status st = moe_train_log_add(&r->log, e, eval);
	char *text;

	if (st != MOE_ERR_IO || !r->p->continue_on_save_error)
		return st;
	text = moe_format("a line of the log was not written, training goes on: %s",
			  moe_last_error());
	if (!r->log_failed)
		moe_run_warn(r, e->step, text ? text : "a line of the log was not written");
	r->log_failed = true;
	moe_free(text);
	return MOE_OK;
}

static enum moe_status loop(struct moe_run *r)
{
	const int64_t first = r->progress.step + 1;

	r->started = moe_now();
	MOE_TRY(moe_run_begin(r));
	for (int64_t n = first; n <= r->total_steps; n++) {
		struct moe_step *s = &r->step[n % MOE_STEPS_IN_FLIGHT];

		MOE_TRY(moe_run_finish_step(r, s));
		if (n > first && moe_run_must_stop(r))
			return moe_run_stop(r, n - 1);
		MOE_TRY(moe_run_build_step(r, s, n));
		if (s->trained) {
			MOE_TRY(moe_run_submit_step(r, s));
			if (r->p->sequential)
				MOE_TRY(moe_run_finish_step(r, s));
		} else {
			moe_run_warn(r, n, "a step without trained tokens was left out");
		}
		MOE_TRY(moe_run_between(r, n));
	}
	return moe_run_drain(r, r->total_steps + 1);
}

static bool trains_experts(const struct moe_experts *x)
{
	return x->a_gu.grad || x->part[0].base[MOE_GATE].grad;
}

static void fill_result(struct moe_run *r, struct moe_train_result *out)
{
	const struct moe_decoder *d = r->t->decoder;

	out->steps = r->progress.step;
	out->tokens = r->progress.tokens;
	out->trained_tokens = r->progress.trained_tokens;
	out->seconds = r->progress.seconds;
	out->first_loss = r->progress.first_loss;
	out->last_loss = r->progress.last_loss;
	out->eval_loss = r->progress.eval_loss;
	out->best_loss = r->progress.best_loss;
	out->best_step = r->progress.best_step;
	out->skipped = r->progress.skipped;
	out->eval_batch_tokens = moe_run_evaluates(r) ? r->t->T_max : 0;
	out->peak_rss_gib = moe_peak_rss_gib();
	out->adapted_experts = out->experts_without_gradient = 0;
	for (int l = 0; l < r->experts.n_layers; l++) {
		const struct moe_experts *x = d->layers[r->experts.layer[l]].experts;
		const int64_t *rows = r->experts.rows + (int64_t)l * x->E;

		for (int e = 0; trains_experts(x) && e < x->E; e++) {
			out->adapted_experts++;
			out->experts_without_gradient += !rows[e];
		}
	}
	moe_expert_stats_publish(&r->experts, d);
}

enum moe_status moe_train_run(struct moe_trainee *t, const struct moe_trainer_params *p,
			      moe_train_fn fn, void *user, struct moe_train_result *result)
{
	struct moe_run r = { .t = t, .p = p, .fn = fn, .user = user, .lock = -1 };
	enum moe_status st;

	r.log.fd = -1;
	st = moe_run_set_up(&r);
	if (st == MOE_OK)
		st = loop(&r);
	if (st == MOE_OK)
		st = moe_run_finish(&r);
	if (result && r.tokens)
		fill_result(&r, result);
	moe_run_tear_down(&r);
	return st;
}
