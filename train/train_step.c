/* SPDX-License-Identifier: Apache-2.0 */
/* One step: its micro-batches, what is submitted, what is known when it has ended. */
#include "train/run.h"

#include <math.h>
#include <stdio.h>

/* The step's share of idle time, and what most of it waited for. */
static void fill_idle(struct moe_run *r, double seconds, struct moe_train_event *e)
{
	double all = MOE_MAX(seconds, 1e-9) * moe_engine_workers(r->t->engine), most = 0, sum = 0;
	struct moe_idle now;

	moe_engine_idle(r->t->engine, &now);
	e->idle_share = 1 - (now.busy - r->idle.busy) / all;
	for (int i = 0; i < MOE_IDLE_CAUSES; i++) {
		double waited = now.cause[i] - r->idle.cause[i];

		sum += waited;
		if (waited <= most)
			continue;
		most = waited;
		e->idle_cause = (enum moe_idle_cause)i;
	}
	/* a wait is known when it ends, perhaps in a later step: shares are of what ended */
	if (sum > 0)
		e->idle_cause_share = MOE_MAX(e->idle_share, 0) * most / sum;
	r->idle = now;
}

/* The step's packs; the epoch's order changes where a new epoch begins. */
enum moe_status moe_run_build_step(struct moe_run *r, struct moe_step *s, int64_t number)
{
	int64_t epoch = (number - 1) / r->steps_per_epoch, first;

	if (epoch != r->epoch_number) {
		moe_epoch_free(&r->epoch);
		MOE_TRY(moe_epoch_create(r->tokens, &r->order, epoch, &r->epoch));
		r->epoch_number = epoch;
	}
	first = (number - 1) % r->steps_per_epoch * r->order.accumulation;
	s->number = number;
	s->n_micro = (int)MOE_MAX(
		(int64_t)0, MOE_MIN((int64_t)r->order.accumulation, r->epoch.n_micro - first));
	s->submitted = false;
	s->tokens = s->trained = 0;
	for (int m = 0; m < s->n_micro; m++) {
		const int64_t *at = &r->epoch.micro[first + m];

		moe_batch_free(&s->micro[m]);
		MOE_TRY(moe_batch_build(r->tokens, r->epoch.pack + at[0], at[1] - at[0],
					&s->micro[m]));
		s->tokens += s->micro[m].batch.T;
		s->trained += s->micro[m].batch.n_rows;
		s->loss[m] = (struct moe_loss_result){ 0 };
		moe_expert_stats_bind(&r->experts, s->load, s->router, r->t->decoder->n_layers, m);
	}
	s->epoch = (double)number / (double)r->steps_per_epoch;
	s->lr = r->learning_rate * moe_schedule_factor(&r->schedule, number);
	return MOE_OK;
}

static enum moe_status submit_micro(struct moe_run *r, struct moe_step *s, int m, float scale)
{
	struct moe_trainee *t = r->t;
	struct moe_decoder_slot *slot = &t->slot[r->micros++ % t->n_slots];
	struct moe_context c = { .engine = t->engine,
				 .ticket = s->ticket,
				 .layer = -1,
				 .micro = m,
				 .step = (int)s->number,
				 .phase = MOE_PHASE_FORWARD };
	struct moe_decoder_pass pass = {
		.decoder = t->decoder,
		.tensors = t->tensors,
		.slot = slot,
		.batch = s->micro[m].batch,
		.router = s->router + m * t->decoder->n_layers,
		.share = (double)s->micro[m].batch.T / (double)s->tokens,
		.drop = { .on = true, .seed = r->p->seed, .step = s->number },
	};

	for (int i = 0; i < m; i++)
		pass.drop.position += s->micro[i].batch.T;
	MOE_TRY(moe_graph_decoder_forward(&c, &pass));
	MOE_TRY(moe_graph_decoder_loss(&c, &pass, true, scale, &s->loss[m]));
	c.phase = MOE_PHASE_BACKWARD;
	return moe_graph_decoder_backward(&c, &pass, m == 0);
}

/* Until what was submitted of the step has run. */
static enum moe_status wait_between(struct moe_run *r, struct moe_step *s)
{
	enum moe_status st, waited;

	moe_submit_end(r->t->engine);
	waited = moe_ticket_wait(s->ticket);
	st = moe_submit_begin(r->t->engine);
	return waited != MOE_OK ? waited : st;
}

/* Forward, loss and backward of all micro-batches; one after the other where nothing is to overlap. */
static enum moe_status submit_micros(struct moe_run *r, struct moe_step *s)
{
	enum moe_status st = MOE_OK;

	for (int m = 0; st == MOE_OK && m < s->n_micro; m++) {
		st = submit_micro(r, s, m, 1.0f / (float)s->trained);
		if (st == MOE_OK && r->p->sequential)
			st = wait_between(r, s);
	}
	return st;
}

enum moe_status moe_run_submit_step(struct moe_run *r, struct moe_step *s)
{
	const struct moe_trainer_params *p = r->p;
	const struct moe_step *previous = &r->step[(s->number - 1) % MOE_STEPS_IN_FLIGHT];
	struct moe_context c = { .engine = r->t->engine,
				 .ticket = s->ticket,
				 .layer = -1,
				 .step = (int)s->number,
				 .phase = MOE_PHASE_UPDATE };
	struct moe_decoder_step update = {
		.adamw = { .lr = s->lr,
			   .beta1 = p->beta1 > 0 ? p->beta1 : 0.9,
			   .beta2 = p->beta2 > 0 ? p->beta2 : 0.999,
			   .eps = p->eps > 0 ? p->eps : 1e-8,
			   .weight_decay = p->weight_decay,
			   .step = s->number },
		.max_norm = (float)p->max_grad_norm,
		.norm = &s->norm,
	};
	enum moe_status st;

	/* after a step that is not applied none is: the state stays that of the step before */
	if (!p->skip_non_finite && previous->submitted && previous->number == s->number - 1)
		update.after = &previous->norm;
	MOE_TRY(moe_submit_begin(r->t->engine));
	moe_recorder_mark(c.engine, MOE_TRACE_STEP_BEGIN, s->number, s->tokens, s->trained);
	st = submit_micros(r, s);
	if (st == MOE_OK)
		st = moe_graph_decoder_update(&c, r->t->decoder, r->t->tensors, &update);
	moe_submit_end(r->t->engine);
	moe_recorder_mark(c.engine, MOE_TRACE_STEP_SUBMITTED, s->number, s->tokens, s->trained);
	s->pending = s->submitted = st == MOE_OK;
	return st;
}

/* Means over the step: the loss by trained tokens, the router's losses by all. */
static void fill_losses(const struct moe_run *r, const struct moe_step *s,
			struct moe_train_event *e)
{
	const struct moe_expert_stats *x = &r->experts;

	for (int m = 0; m < s->n_micro; m++) {
		double share = (double)s->micro[m].batch.T / (double)s->tokens;

		e->loss += s->loss[m].sum;
		for (int l = 0; l < x->n_layers; l++) {
			const struct moe_router_result *router =
				&s->router[m * r->t->decoder->n_layers + x->layer[l]];

			e->aux_loss += share * router->aux / x->n_layers;
			e->z_loss += share * router->z / x->n_layers;
		}
	}
	e->loss /= (double)s->trained;
}

/*
 * The first bad array of a step that was not applied. The step after it may have run already, with
 * the same parameters and without an update: this one's gradients are made again.
 */
static enum moe_status name_bad(struct moe_run *r, struct moe_step *s, char *buf, size_t size)
{
	enum moe_status st;

	snprintf(buf, size, "the loss");
	moe_engine_wait(r->t->engine);
	MOE_TRY(moe_submit_begin(r->t->engine));
	st = submit_micros(r, s);
	moe_submit_end(r->t->engine);
	MOE_TRY(st);
	MOE_TRY(moe_ticket_wait(s->ticket));
	moe_train_first_bad(r->t->decoder, buf, size);
	return MOE_OK;
}

static enum moe_status diverged(struct moe_run *r, struct moe_step *s, double loss)
{
	char bad[160];

	MOE_TRY(name_bad(r, s, bad, sizeof bad));
	return moe_fail(MOE_ERR_DIVERGED,
			"step %lld: loss %g, gradient norm %g; first bad tensor: %s. Nothing was "
			"updated from it",
			(long long)s->number, isnan(loss) ? NAN : loss,
			isnan(s->norm.norm) ? NAN : s->norm.norm, bad); /* no "-nan" */
}

/* The loss of a line is the mean of the steps since the last one, those that are finite, as in transformers. */
static enum moe_status log_step(struct moe_run *r, struct moe_train_event *e)
{
	struct moe_train_event line = *e;

	if (isfinite(e->loss)) {
		r->loss_sum += e->loss;
		r->loss_steps++;
	}
	e->logged = (e->step == 1 && r->p->log_first) ||
		    (r->log_every && (e->step % r->log_every == 0 || e->step == r->total_steps));
	if (!e->logged)
		return MOE_OK;
	if (r->loss_steps)
		line.loss = r->loss_sum / (double)r->loss_steps;
	r->loss_sum = 0;
	r->loss_steps = 0;
	return moe_run_log(r, &line, false);
}

/* Waits for a step and accounts for it. */
enum moe_status moe_run_finish_step(struct moe_run *r, struct moe_step *s)
{
	struct moe_train_event e = { .type = MOE_TRAIN_STEP,
				     .step = s->number,
				     .total_steps = r->total_steps,
				     .epoch = s->epoch,
				     .learning_rate = s->lr,
				     .tokens = s->tokens,
				     .trained_tokens = s->trained };
	double now;
	bool good;

	if (!s->pending)
		return MOE_OK;
	s->pending = false;
	MOE_TRY(moe_ticket_wait(s->ticket));
	moe_recorder_mark(r->t->engine, MOE_TRACE_STEP_END, s->number, s->tokens, s->trained);
	now = moe_now();
	fill_losses(r, s, &e);
	good = isfinite(e.loss) && s->norm.finite;
	fill_idle(r, now - r->clock, &e);
	e.grad_norm = s->norm.norm;
	e.grad_norm_experts = s->norm.norm_experts;
	e.tokens_per_s = (double)s->tokens / MOE_MAX(now - r->clock, 1e-9);
	r->progress.seconds += now - r->clock;
	r->progress.step = s->number;
	r->progress.tokens += s->tokens;
	r->progress.trained_tokens += s->trained;
	e.eta_s = r->progress.seconds / (double)s->number * (double)(r->total_steps - s->number);
	e.rss_gib = moe_rss_gib();
	r->clock = now;
	if (s->number == 1)
		r->progress.first_loss = e.loss;
	r->progress.last_loss = e.loss;
	moe_expert_stats_add(&r->experts, s->load, s->n_micro);
	e.moe_layers = r->experts.n_layers;
	e.expert_load = r->experts.load;
	e.unused_experts = r->experts.unused;
	r->progress.skipped += !good;
	e.skipped = r->progress.skipped;
	MOE_TRY(log_step(r, &e));
	moe_run_notify(r, &e);
	if (!good && !r->p->skip_non_finite)
		return diverged(r, s, e.loss);
	if (!good)
		moe_run_warn(r, s->number,
			     "non-finite loss or gradient: this step's update was skipped");
	return MOE_OK;
}

enum moe_status moe_run_drain(struct moe_run *r, int64_t next)
{
	for (int64_t n = MOE_MAX((int64_t)1, next - MOE_STEPS_IN_FLIGHT); n < next; n++)
		MOE_TRY(moe_run_finish_step(r, &r->step[n % MOE_STEPS_IN_FLIGHT]));
	return MOE_OK;
}
