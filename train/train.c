/* SPDX-License-Identifier: Apache-2.0 */
#include "train/run.h"

#include "train/card.h"

#include <math.h>

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

static enum moe_status loop(struct moe_run *r)
{
	r->clock = r->started = moe_now();
	moe_engine_idle(r->t->engine, &r->idle);
	for (int64_t n = r->progress.step + 1; n <= r->total_steps; n++) {
		struct moe_step *s = &r->step[n % MOE_STEPS_IN_FLIGHT];

		MOE_TRY(moe_run_finish_step(r, s));
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

static void fill_result(struct moe_run *r, struct moe_train_result *out)
{
	const struct moe_decoder *d = r->t->decoder;

	out->steps = r->progress.step;
	out->tokens = r->progress.tokens;
	out->trained_tokens = r->progress.trained_tokens;
	out->seconds = r->progress.seconds;
	out->first_loss = r->progress.first_loss;
	out->last_loss = r->last_loss;
	out->eval_loss = r->eval_loss;
	out->eval_batch_tokens = r->eval_tokens ? r->t->T_max : 0;
	out->peak_rss_gib = moe_peak_rss_gib();
	out->adapted_experts = out->experts_without_gradient = 0;
	for (int l = 0; l < d->n_layers; l++) {
		const struct moe_experts *x = d->layers[l].experts;

		for (int e = 0; x && x->tokens_seen && e < x->E; e++) {
			out->adapted_experts++;
			out->experts_without_gradient += !x->tokens_seen[e];
		}
	}
}

static enum moe_status write_card(const struct moe_run *r)
{
	struct moe_train_card card = {
		.base = r->t->base,
		.tokens = r->tokens,
		.steps = r->progress.step,
		.trained_tokens = r->progress.trained_tokens,
		.first_loss = r->progress.first_loss,
		.last_loss = r->last_loss,
		.eval_loss = r->eval_loss,
		.learning_rate = r->learning_rate,
	};

	return moe_train_card_write(r->p->output_dir, &card);
}

enum moe_status moe_train_run(struct moe_trainee *t, const struct moe_trainer_params *p,
			      moe_train_fn fn, void *user, struct moe_train_result *result)
{
	struct moe_run r = { .t = t,
			     .p = p,
			     .fn = fn,
			     .user = user,
			     .last_loss = NAN,
			     .eval_loss = NAN,
			     .lock = -1 };
	enum moe_status st;

	r.log.fd = -1;
	st = moe_run_set_up(&r);
	if (st == MOE_OK)
		st = loop(&r);
	if (st == MOE_OK)
		st = t->save_adapter(t->user, p->output_dir);
	if (st == MOE_OK)
		st = moe_train_log_plot(&r.log, r.total_steps);
	if (st == MOE_OK)
		st = write_card(&r);
	if (result && r.tokens)
		fill_result(&r, result);
	moe_run_tear_down(&r);
	return st;
}
