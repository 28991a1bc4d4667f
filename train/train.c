/* SPDX-License-Identifier: Apache-2.0 */
#include "train/train.h"

#include "model/file.h"
#include "model/state.h"
#include "train/card.h"
#include "train/log.h"
#include "train/params.h"
#include "train/schedule.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define IN_FLIGHT 2 /* steps submitted and not yet accounted for */
#define DEFAULT_SAVE_LIMIT 2

/* One submitted step: what its tasks read and write. */
struct step {
	int64_t number;
	struct moe_ticket *ticket;
	struct moe_batch_buffer *micro; /* [accumulation] */
	struct moe_loss_result *loss;	/* [accumulation] */
	int n_micro;
	struct moe_grad_norm norm;
	int64_t tokens, trained;
	double epoch, lr;
	bool pending;
};

struct run {
	struct moe_trainee *t;
	const struct moe_trainer_params *p;
	moe_train_fn fn;
	void *user;
	struct moe_tokens *tokens, *eval_tokens;
	struct moe_order_params order;
	struct moe_epoch epoch;
	int64_t epoch_number, total_steps, steps_per_epoch, warmup;
	enum moe_schedule schedule;
	struct step step[IN_FLIGHT];
	struct moe_train_log log;
	struct moe_train_progress progress;
	double last_loss, eval_loss;
	double clock, started; /* end of the last accounted step */
	struct moe_idle idle; /* then */
	int64_t micros; /* submitted so far: deals out the slots */
	bool stop;
	int lock; /* of the output directory */
};

/* The step's share of idle time, and what most of it waited for. */
static void fill_idle(struct run *r, double seconds, struct moe_train_event *e)
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

static enum moe_status notify(struct run *r, const struct moe_train_event *e)
{
	if (r->fn && r->fn(e, r->user))
		r->stop = true;
	return MOE_OK;
}

static void warn(struct run *r, int64_t step, const char *text)
{
	struct moe_train_event e = {
		.type = MOE_TRAIN_WARNING, .step = step, .total_steps = r->total_steps, .text = text
	};

	notify(r, &e);
}

/* ---- setting up ---- */

static enum moe_status check_params(const struct moe_trainer_params *p)
{
	if (!p || p->struct_size < sizeof *p)
		return moe_fail(MOE_ERR_ARG, "trainer params: struct_size is not set");
	if (!p->data || !p->output_dir)
		return moe_fail(MOE_ERR_ARG, "training needs data and an output directory");
	if (p->learning_rate < 0 || !isfinite(p->learning_rate))
		return moe_fail(MOE_ERR_ARG, "learning_rate is %g", p->learning_rate);
	if (p->warmup_ratio < 0 || p->warmup_ratio > 1)
		return moe_fail(MOE_ERR_ARG, "warmup_ratio is %g; 0 to 1 are possible",
				p->warmup_ratio);
	if (!(p->eval_split >= 0 && p->eval_split < 1))
		return moe_fail(MOE_ERR_ARG, "eval_split is %g; 0 to below 1 are possible",
				p->eval_split);
	if (p->batch_size < 0 || p->batch_tokens < 0 || p->accumulation < 0 || p->epochs < 0 ||
	    p->max_steps < 0 || p->max_grad_norm < 0 || p->weight_decay < 0)
		return moe_fail(MOE_ERR_ARG, "a trainer parameter is negative");
	return MOE_OK;
}

/* One training at a time: the kernel gives the lock back however the process ends. */
static enum moe_status lock_output(struct run *r)
{
	const char *dir = r->p->output_dir;
	struct stat out, base;

	r->lock = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (r->lock < 0 || fstat(r->lock, &out))
		return moe_fail(MOE_ERR_IO, "%s: %s", dir, strerror(errno));
	if (stat(r->t->base, &base) == 0 && base.st_dev == out.st_dev && base.st_ino == out.st_ino)
		return moe_fail(MOE_ERR_ARG, "the output directory %s is the base model's", dir);
	if (flock(r->lock, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
		return moe_fail(MOE_ERR_ARG, "another process is training into %s", dir);
	return MOE_OK;
}

static enum moe_status check_output(struct run *r)
{
	static const char *const results[] = { "adapter_config.json", "trainer_log.jsonl" };
	const struct moe_trainer_params *p = r->p;

	MOE_TRY(moe_dir_make(p->output_dir));
	if (access(p->output_dir, W_OK | X_OK))
		return moe_fail(MOE_ERR_IO, "the output directory %s is not writable",
				p->output_dir);
	MOE_TRY(lock_output(r));
	for (size_t i = 0; !p->overwrite && !p->resume && i < MOE_COUNT(results); i++) {
		char *path = moe_path_join(p->output_dir, results[i]);
		bool exists = path && moe_path_exists(path);

		moe_free(path);
		if (exists)
			return moe_fail(MOE_ERR_ARG,
					"%s holds the results of an earlier run (%s); continue it "
					"with resume, or allow overwriting",
					p->output_dir, results[i]);
	}
	return moe_state_clean(p->output_dir);
}

/* The last packs become evaluation data: two views of one file. */
static enum moe_status split_data(struct run *r)
{
	int64_t n = r->tokens->n_rows, kept = (int64_t)ceil(r->p->eval_split * (double)n);

	if (kept >= n)
		return moe_fail(MOE_ERR_ARG,
				"eval_split %g of %lld packs leaves nothing to train on",
				r->p->eval_split, (long long)n);
	MOE_TRY(moe_tokens_open(r->p->data, r->t->decoder->V, &r->eval_tokens));
	r->eval_tokens->pack_offsets += n - kept;
	r->eval_tokens->n_rows = kept;
	r->tokens->n_rows = n - kept;
	return MOE_OK;
}

static enum moe_status open_data(struct run *r)
{
	const struct moe_trainer_params *p = r->p;
	double epochs = p->epochs > 0 ? p->epochs : 3;

	MOE_TRY(moe_tokens_open(p->data, r->t->decoder->V, &r->tokens));
	if (p->eval_data)
		MOE_TRY(moe_tokens_open(p->eval_data, r->t->decoder->V, &r->eval_tokens));
	else if (p->eval_split > 0)
		MOE_TRY(split_data(r));
	r->order =
		(struct moe_order_params){ .batch_size = p->batch_size,
					   .batch_tokens = p->batch_tokens ? p->batch_tokens : 8192,
					   .accumulation = MOE_MAX(1, p->accumulation),
					   .keep_order = p->keep_order,
					   .seed = p->seed };
	MOE_TRY(moe_epoch_create(r->tokens, &r->order, 0, &r->epoch));
	r->steps_per_epoch = r->epoch.n_steps;
	r->total_steps =
		p->max_steps ? p->max_steps : (int64_t)ceil(epochs * (double)r->steps_per_epoch);
	r->warmup = (int64_t)ceil(p->warmup_ratio * (double)r->total_steps);
	return moe_schedule_parse(p->schedule, &r->schedule);
}

static enum moe_status reserve(struct run *r)
{
	int64_t T = moe_epoch_max_tokens(r->tokens, &r->epoch), longest = r->tokens->max_row_tokens;
	int limit = r->order.batch_tokens;

	/* another epoch's order may pack differently, but never beyond these */
	if (!r->order.keep_order)
		T = MOE_MAX(T, r->order.batch_size
				       ? longest * r->order.batch_size
				       : MOE_MAX(longest,
						 MOE_MIN((int64_t)limit, r->tokens->n_tokens)));
	if (r->eval_tokens)
		T = MOE_MAX(T, r->eval_tokens->max_row_tokens);
	if (r->tokens->max_doc_tokens > r->t->max_positions)
		return moe_fail(MOE_ERR_ARG,
				"a document has %lld tokens, the model has %lld positions; cut the "
				"data with "
				"--cutoff-len",
				(long long)r->tokens->max_doc_tokens,
				(long long)r->t->max_positions);
	if (T > INT32_MAX / 64)
		return moe_fail(MOE_ERR_ARG, "micro-batches of %lld tokens are too large",
				(long long)T);
	return r->t->reserve(r->t, (int)T, MOE_MAX(2, r->t->n_slots));
}

static enum moe_status resume(struct run *r)
{
	struct moe_train_progress *p = &r->progress;
	char *latest = NULL;
	const char *dir = r->p->resume;
	int64_t step;
	enum moe_status st;

	p->data_hash = r->tokens->hash;
	p->seed = r->order.seed;
	p->batch_size = r->order.batch_size;
	p->batch_tokens = r->order.batch_tokens;
	p->accumulation = r->order.accumulation;
	p->keep_order = r->order.keep_order;
	p->packs = r->tokens->n_rows;
	if (!dir)
		return MOE_OK;
	if (!*dir) {
		MOE_TRY(moe_state_latest(r->p->output_dir, &step, &latest));
		if (!latest)
			return moe_fail(MOE_ERR_ARG, "%s has no complete checkpoint to resume from",
					r->p->output_dir);
		dir = latest;
	}
	st = moe_train_state_load(r->t->decoder, dir, p);
	moe_free(latest);
	if (st == MOE_OK && p->step > r->total_steps)
		st = moe_fail(MOE_ERR_ARG,
			      "the checkpoint is of step %lld, this run ends at step %lld",
			      (long long)p->step, (long long)r->total_steps);
	return st;
}

static enum moe_status create_steps(struct run *r)
{
	for (int i = 0; i < IN_FLIGHT; i++) {
		struct step *s = &r->step[i];

		s->micro = moe_calloc((size_t)r->order.accumulation, sizeof *s->micro);
		s->loss = moe_calloc((size_t)r->order.accumulation, sizeof *s->loss);
		if (!s->micro || !s->loss)
			return moe_fail(MOE_ERR_NOMEM, "no memory for a step");
		MOE_TRY(moe_ticket_create(r->t->engine, &s->ticket));
	}
	return MOE_OK;
}

static enum moe_status set_up(struct run *r)
{
	MOE_TRY(check_params(r->p));
	MOE_TRY(open_data(r));
	MOE_TRY(check_output(r));
	MOE_TRY(reserve(r));
	MOE_TRY(create_steps(r));
	MOE_TRY(resume(r));
	return moe_train_log_open(r->p->output_dir, r->progress.step, &r->log);
}

static void tear_down(struct run *r)
{
	for (int i = 0; i < IN_FLIGHT; i++) {
		struct step *s = &r->step[i];

		if (s->ticket)
			moe_ticket_wait(s->ticket);
		for (int m = 0; s->micro && m < r->order.accumulation; m++)
			moe_batch_free(&s->micro[m]);
		moe_ticket_destroy(s->ticket);
		moe_free(s->micro);
		moe_free(s->loss);
	}
	moe_epoch_free(&r->epoch);
	moe_tokens_close(r->tokens);
	moe_tokens_close(r->eval_tokens);
	moe_train_log_close(&r->log);
	if (r->lock >= 0)
		close(r->lock);
}

/* ---- one step ---- */

/* The step's packs; the epoch's order changes where a new epoch begins. */
static enum moe_status build_step(struct run *r, struct step *s, int64_t number)
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
	s->tokens = s->trained = 0;
	for (int m = 0; m < s->n_micro; m++) {
		const int64_t *at = &r->epoch.micro[first + m];

		moe_batch_free(&s->micro[m]);
		MOE_TRY(moe_batch_build(r->tokens, r->epoch.pack + at[0], at[1] - at[0],
					&s->micro[m]));
		s->tokens += s->micro[m].batch.T;
		s->trained += s->micro[m].batch.n_rows;
		s->loss[m] = (struct moe_loss_result){ 0 };
	}
	s->epoch = (double)number / (double)r->steps_per_epoch;
	s->lr = (r->p->learning_rate > 0 ? r->p->learning_rate : 1e-4) *
		moe_schedule_factor(r->schedule, number, r->total_steps, r->warmup);
	return MOE_OK;
}

static enum moe_status submit_micro(struct run *r, struct step *s, int m, float scale)
{
	struct moe_trainee *t = r->t;
	struct moe_decoder_slot *slot = &t->slot[r->micros++ % t->n_slots];
	struct moe_context c = { .engine = t->engine,
				 .ticket = s->ticket,
				 .layer = -1,
				 .micro = m,
				 .step = (int)s->number,
				 .phase = MOE_PHASE_FORWARD };
	struct moe_decoder_pass pass = { .decoder = t->decoder,
					 .tensors = t->tensors,
					 .slot = slot,
					 .batch = s->micro[m].batch,
					 .drop = { .on = true, .seed = r->order.seed, .step = s->number } };

	for (int i = 0; i < m; i++)
		pass.drop.position += s->micro[i].batch.T;
	MOE_TRY(moe_graph_decoder_forward(&c, &pass));
	MOE_TRY(moe_graph_decoder_loss(&c, &pass, true, scale, &s->loss[m]));
	c.phase = MOE_PHASE_BACKWARD;
	return moe_graph_decoder_backward(&c, &pass, m == 0);
}

static enum moe_status submit_step(struct run *r, struct step *s)
{
	const struct moe_trainer_params *p = r->p;
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
	enum moe_status st = MOE_OK;

	MOE_TRY(moe_submit_begin(r->t->engine));
	moe_recorder_mark(c.engine, MOE_TRACE_STEP_BEGIN, s->number, s->tokens, s->trained);
	for (int m = 0; st == MOE_OK && m < s->n_micro; m++)
		st = submit_micro(r, s, m, 1.0f / (float)s->trained);
	if (st == MOE_OK)
		st = moe_graph_decoder_update(&c, r->t->decoder, r->t->tensors, &update);
	moe_submit_end(r->t->engine);
	moe_recorder_mark(c.engine, MOE_TRACE_STEP_SUBMITTED, s->number, s->tokens, s->trained);
	s->pending = st == MOE_OK;
	return st;
}

/* Waits for a step and accounts for it. */
static enum moe_status finish_step(struct run *r, struct step *s)
{
	struct moe_train_event e = { .type = MOE_TRAIN_STEP,
				     .step = s->number,
				     .total_steps = r->total_steps,
				     .epoch = s->epoch,
				     .learning_rate = s->lr,
				     .tokens = s->tokens,
				     .trained_tokens = s->trained };
	double sum = 0, now;
	char bad[160];

	if (!s->pending)
		return MOE_OK;
	s->pending = false;
	MOE_TRY(moe_ticket_wait(s->ticket));
	moe_recorder_mark(r->t->engine, MOE_TRACE_STEP_END, s->number, s->tokens, s->trained);
	for (int m = 0; m < s->n_micro; m++)
		sum += s->loss[m].sum;
	now = moe_now();
	fill_idle(r, now - r->clock, &e);
	e.loss = sum / (double)s->trained;
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
	r->last_loss = e.loss;
	if (s->number % MOE_MAX(1, r->p->logging_steps) == 0 || s->number == r->total_steps)
		MOE_TRY(moe_train_log_add(&r->log, &e, false));
	notify(r, &e);
	if (isfinite(e.loss) && s->norm.finite)
		return MOE_OK;
	if (r->p->skip_non_finite) {
		warn(r, s->number, "non-finite loss or gradient: this step's update was skipped");
		return MOE_OK;
	}
	moe_engine_wait(r->t->engine);
	if (!moe_train_first_bad(r->t->decoder, bad, sizeof bad))
		snprintf(bad, sizeof bad, "the loss");
	return moe_fail(MOE_ERR_DIVERGED,
			"step %lld: loss %g, gradient norm %g; first bad tensor: %s. Nothing was "
			"updated from it",
			(long long)s->number, e.loss, s->norm.norm, bad);
}

static enum moe_status drain(struct run *r, int64_t next)
{
	for (int64_t n = MOE_MAX((int64_t)1, next - IN_FLIGHT); n < next; n++)
		MOE_TRY(finish_step(r, &r->step[n % IN_FLIGHT]));
	return MOE_OK;
}

/* ---- between steps; everything is drained ---- */

static enum moe_status evaluate(struct run *r, int64_t step)
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
	return notify(r, &e);
}

static enum moe_status save(struct run *r)
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
		notify(r, &e);
fail:
	moe_state_abort(&dir);
	moe_free(final);
	return st;
}

static bool due(int every, int64_t step)
{
	return every > 0 && step % every == 0;
}

static bool eval_due(const struct run *r, int64_t step)
{
	if (!r->eval_tokens)
		return false;
	if (step == r->total_steps)
		return true;
	return r->p->eval_steps ? due(r->p->eval_steps, step) : step % r->steps_per_epoch == 0;
}

static enum moe_status between(struct run *r, int64_t step)
{
	bool out_of_time = r->p->max_hours > 0 && moe_now() - r->started > r->p->max_hours * 3600;
	bool eval = eval_due(r, step), saving = due(r->p->save_steps, step);

	if (!eval && !saving && !r->stop && !out_of_time)
		return MOE_OK;
	MOE_TRY(drain(r, step + 1));
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

static enum moe_status loop(struct run *r)
{
	r->clock = r->started = moe_now();
	moe_engine_idle(r->t->engine, &r->idle);
	for (int64_t n = r->progress.step + 1; n <= r->total_steps; n++) {
		struct step *s = &r->step[n % IN_FLIGHT];

		MOE_TRY(finish_step(r, s));
		MOE_TRY(build_step(r, s, n));
		if (s->trained) {
			MOE_TRY(submit_step(r, s));
			if (r->p->sequential)
				MOE_TRY(finish_step(r, s));
		} else {
			warn(r, n, "a step without trained tokens was left out");
		}
		MOE_TRY(between(r, n));
	}
	return drain(r, r->total_steps + 1);
}

static void fill_result(struct run *r, struct moe_train_result *out)
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

static enum moe_status write_card(const struct run *r)
{
	struct moe_train_card card = {
		.base = r->t->base,
		.tokens = r->tokens,
		.steps = r->progress.step,
		.trained_tokens = r->progress.trained_tokens,
		.first_loss = r->progress.first_loss,
		.last_loss = r->last_loss,
		.eval_loss = r->eval_loss,
		.learning_rate = r->p->learning_rate > 0 ? r->p->learning_rate : 1e-4,
	};

	return moe_train_card_write(r->p->output_dir, &card);
}

enum moe_status moe_train_run(struct moe_trainee *t, const struct moe_trainer_params *p,
			      moe_train_fn fn, void *user, struct moe_train_result *result)
{
	struct run r = { .t = t,
			 .p = p,
			 .fn = fn,
			 .user = user,
			 .last_loss = NAN,
			 .eval_loss = NAN,
			 .lock = -1 };
	enum moe_status st;

	r.log.fd = -1;
	st = set_up(&r);
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
	tear_down(&r);
	return st;
}
