/* SPDX-License-Identifier: Apache-2.0 */
/* A run's parameters, data, output directory and buffers, and the checkpoint that it goes on from. */
#include "train/run.h"

#include "model/file.h"
#include "model/state.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEFAULT_RATE 1e-4
#define DEFAULT_EPOCHS 3
#define DEFAULT_BATCH_TOKENS 8192
#define ANY_STEPS (INT64_C(1) << 40) /* where data would say how many: no warmup or argument is too long */

static enum moe_status make_schedule(const struct moe_trainer_params *p, int64_t total,
				     struct moe_schedule *out)
{
	double peak = p->learning_rate > 0 ? p->learning_rate : DEFAULT_RATE;

	return moe_schedule_create(p->schedule, p->schedule_args, peak, total,
				   moe_schedule_warmup(p->warmup_ratio, p->warmup_steps, total),
				   out);
}

/* A number of steps, or a share of them all; negative: what `lowest` and the numbers up to 0 stand for. */
static enum moe_status check_every(const char *name, double steps, double lowest)
{
	bool whole = steps == floor(steps) && steps >= lowest && steps <= INT32_MAX;

	if (whole || (steps > 0 && steps < 1))
		return MOE_OK;
	return moe_fail(MOE_ERR_ARG, "%s is %g; a whole number of steps, or a share of all steps below 1, are possible", name, steps);
}

static int64_t every(const struct moe_run *r, double steps)
{
	return steps > 0 && steps < 1 ? (int64_t)ceil(steps * (double)r->total_steps) : (int64_t)steps;
}

/* What is done how often, when the number of steps is known. */
static void set_intervals(struct moe_run *r)
{
	const struct moe_trainer_params *p = r->p;

	r->log_every = p->logging_steps == -2 ? 0 : p->logging_steps < 0 ? r->steps_per_epoch : MOE_MAX(1, every(r, p->logging_steps));
	r->eval_every = p->eval_steps > 0 ? every(r, p->eval_steps) : r->steps_per_epoch;
	r->save_every = p->save_steps < 0 ? r->steps_per_epoch : every(r, p->save_steps);
}

static enum moe_status check_not_negative(const struct moe_trainer_params *p)
{
	const struct {
		const char *name;
		double value;
	} all[] = {
		{ "batch_size", p->batch_size },
		{ "batch_tokens", p->batch_tokens },
		{ "accumulation", p->accumulation },
		{ "epochs", p->epochs },
		{ "max_steps", (double)p->max_steps },
		{ "warmup_steps", (double)p->warmup_steps },
		{ "max_grad_norm", p->max_grad_norm },
		{ "weight_decay", p->weight_decay },
		{ "save_total_limit", p->save_total_limit },
		{ "eval_delay", p->eval_delay },
	};

	for (size_t i = 0; i < MOE_COUNT(all); i++)
		if (!(all[i].value >= 0))
			return moe_fail(MOE_ERR_ARG, "%s is %g; 0 or more is possible", all[i].name, all[i].value);
	return MOE_OK;
}

enum moe_status moe_train_check_params(const struct moe_trainer_params *p)
{
	struct moe_schedule schedule;

	if (!p || p->struct_size < sizeof *p)
		return moe_fail(MOE_ERR_ARG, "trainer params: struct_size is not set");
	if (!p->data || !p->output_dir)
		return moe_fail(MOE_ERR_ARG, "training needs data and an output directory");
	if (p->learning_rate < 0 || !isfinite(p->learning_rate))
		return moe_fail(MOE_ERR_ARG, "learning_rate is %g; 0 (1e-4) or more is possible", p->learning_rate);
	if (p->warmup_ratio < 0 || p->warmup_ratio > 1)
		return moe_fail(MOE_ERR_ARG, "warmup_ratio is %g; 0 to 1 are possible",
				p->warmup_ratio);
	if (!(p->eval_split >= 0 && p->eval_split < INT32_MAX) ||
	    (p->eval_split > 1 && p->eval_split != floor(p->eval_split)))
		return moe_fail(MOE_ERR_ARG, "eval_split is %g; a share below 1 or a whole number of documents are possible",
				p->eval_split);
	MOE_TRY(check_not_negative(p));
	MOE_TRY(check_every("logging_steps", p->logging_steps, -2));
	MOE_TRY(check_every("eval_steps", p->eval_steps, -1));
	MOE_TRY(check_every("save_steps", p->save_steps, -1));
	if (p->drop_last && !p->batch_size)
		return moe_fail(MOE_ERR_ARG, "drop_last goes with batch_size: micro-batches by tokens have no number of "
					     "rows to fall short of");
	if ((p->load_best || p->save_best) && (p->eval_steps < 0 || (!p->eval_data && !(p->eval_split > 0))))
		return moe_fail(MOE_ERR_ARG, "the best checkpoint is found by evaluation: give "
					     "evaluation data or eval_split%s",
				p->eval_steps < 0 ? ", and an eval_strategy other than no" : "");
	return make_schedule(p, p->max_steps ? p->max_steps : ANY_STEPS, &schedule);
}

/* One training at a time: the kernel gives the lock back however the process ends. */
static enum moe_status lock_output(struct moe_run *r)
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

static enum moe_status check_output(struct moe_run *r)
{
	static const char *const results[] = { "adapter_config.json", "trainer_log.jsonl" };
	const struct moe_trainer_params *p = r->p;

	MOE_TRY(moe_dir_make(p->output_dir));
	if (access(p->output_dir, W_OK | X_OK))
		return moe_fail(MOE_ERR_IO, "the output directory %s is not writable: %s",
				p->output_dir, strerror(errno));
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

/* A share of the packs, or as many as hold that many documents. */
static int64_t packs_to_keep(const struct moe_tokens *t, double split)
{
	int64_t n = t->n_rows, kept = 0;

	if (split < 1)
		return (int64_t)ceil(split * (double)n);
	while (kept < n && (double)(t->pack_offsets[n] - t->pack_offsets[n - kept]) < split)
		kept++;
	return kept;
}

/* The last packs become evaluation data: two views of one file. */
static enum moe_status split_data(struct moe_run *r)
{
	int64_t n = r->tokens->n_rows, kept = packs_to_keep(r->tokens, r->p->eval_split);

	if (kept >= n)
		return moe_fail(MOE_ERR_ARG,
				"eval_split %g takes all %lld packs (%lld documents) and leaves nothing to train on; a smaller "
				"one, or more packs: packing off, a shorter cutoff_len",
				r->p->eval_split, (long long)n, (long long)r->tokens->n_docs);
	MOE_TRY(moe_tokens_open(r->p->data, r->t->decoder->V, &r->eval_tokens));
	r->eval_tokens->pack_offsets += n - kept;
	r->eval_tokens->n_rows = kept;
	r->tokens->n_rows = n - kept;
	return MOE_OK;
}

static enum moe_status open_data(struct moe_run *r)
{
	const struct moe_trainer_params *p = r->p;
	double epochs = p->epochs > 0 ? p->epochs : DEFAULT_EPOCHS;

	MOE_TRY(moe_tokens_open(p->data, r->t->decoder->V, &r->tokens));
	if (p->eval_data)
		MOE_TRY(moe_tokens_open(p->eval_data, r->t->decoder->V, &r->eval_tokens));
	else if (p->eval_split > 0)
		MOE_TRY(split_data(r));
	r->order =
		(struct moe_order_params){ .batch_size = p->batch_size,
					   .batch_tokens = p->batch_tokens ? p->batch_tokens : DEFAULT_BATCH_TOKENS,
					   .accumulation = MOE_MAX(1, p->accumulation),
					   .keep_order = p->keep_order,
					   .drop_last = p->drop_last,
					   .seed = p->order_seeded ? p->order_seed : p->seed };
	MOE_TRY(moe_epoch_create(r->tokens, &r->order, 0, &r->epoch));
	if (!r->epoch.n_steps)
		return moe_fail(MOE_ERR_ARG,
				"%s has %lld rows, fewer than batch_size %d, and drop_last leaves them out: a smaller "
				"batch_size, or without drop_last",
				p->data, (long long)r->tokens->n_rows, p->batch_size);
	r->steps_per_epoch = r->epoch.n_steps;
	if (!p->max_steps && !(epochs * (double)r->steps_per_epoch < (double)INT32_MAX))
		return moe_fail(MOE_ERR_ARG, "%g epochs of %lld steps; at most %d steps are possible", epochs,
				(long long)r->steps_per_epoch, INT32_MAX);
	r->total_steps =
		p->max_steps ? p->max_steps : (int64_t)ceil(epochs * (double)r->steps_per_epoch);
	r->learning_rate = p->learning_rate > 0 ? p->learning_rate : DEFAULT_RATE;
	set_intervals(r);
	return make_schedule(p, r->total_steps, &r->schedule);
}

static enum moe_status reserve(struct moe_run *r)
{
	int64_t T = moe_epoch_max_tokens(r->tokens, &r->epoch), longest = r->tokens->max_row_tokens;
	int limit = r->order.batch_tokens;

	/* another epoch's order may pack differently, but never beyond these */
	if (!r->order.keep_order)
		T = MOE_MAX(T, r->order.batch_size
				       ? longest * r->order.batch_size
				       : MOE_MAX(longest,
						 MOE_MIN((int64_t)limit, r->tokens->n_tokens)));
	if (moe_run_evaluates(r))
		T = MOE_MAX(T, r->eval_tokens->max_row_tokens);
	if (r->tokens->max_doc_tokens > r->t->max_positions)
		return moe_fail(MOE_ERR_ARG,
				"a document has %lld tokens, the model has %lld positions; cut the data with --cutoff-len",
				(long long)r->tokens->max_doc_tokens,
				(long long)r->t->max_positions);
	if (T > INT32_MAX / 64)
		return moe_fail(MOE_ERR_ARG,
				"micro-batches of %lld tokens are too large, at most %d; a smaller batch_size or batch_tokens",
				(long long)T, INT32_MAX / 64);
	return r->t->reserve(r->t, (int)T, r->t->n_slots);
}

static enum moe_status resume(struct moe_run *r)
{
	struct moe_train_progress *p = &r->progress;
	char *latest = NULL;
	const char *dir = r->p->resume;
	int64_t step;
	enum moe_status st;

	p->data_hash = r->tokens->hash;
	p->seed = r->p->seed;
	p->order_seed = (int64_t)r->order.seed;
	p->batch_size = r->order.batch_size;
	p->batch_tokens = r->order.batch_tokens;
	p->accumulation = r->order.accumulation;
	p->keep_order = r->order.keep_order;
	p->drop_last = r->order.drop_last;
	p->packs = r->tokens->n_rows;
	p->last_loss = p->eval_loss = p->best_loss = NAN;
	p->expert_rows = r->experts.rows;
	p->n_expert_rows = moe_expert_stats_size(&r->experts);
	if (!dir)
		return MOE_OK;
	if (!*dir) {
		MOE_TRY(moe_state_latest(r->p->output_dir, &step, &latest));
		if (!latest)
			return moe_fail(MOE_ERR_ARG, "%s has no complete checkpoint to resume from",
					r->p->output_dir);
		dir = latest;
	} else {
		st = moe_state_check(dir, -1);
		if (st != MOE_OK)
			return moe_fail(st, "%s; without a folder, resume takes the newest checkpoint that is whole",
					moe_last_error());
	}
	st = moe_train_state_load(r->t->decoder, dir, p);
	moe_free(latest);
	if (st == MOE_OK && p->step > r->total_steps)
		st = moe_fail(MOE_ERR_ARG,
			      "the checkpoint is of step %lld, this run ends at step %lld: give it more epochs or max_steps",
			      (long long)p->step, (long long)r->total_steps);
	return st;
}

static enum moe_status create_steps(struct moe_run *r)
{
	for (int i = 0; i < MOE_STEPS_IN_FLIGHT; i++) {
		struct moe_step *s = &r->step[i];

		s->micro = moe_calloc((size_t)r->order.accumulation, sizeof *s->micro);
		s->loss = moe_calloc((size_t)r->order.accumulation, sizeof *s->loss);
		s->load = moe_calloc((size_t)(r->order.accumulation *
					      MOE_MAX(moe_expert_stats_size(&r->experts), 1)),
				     sizeof *s->load);
		s->router = moe_calloc((size_t)(r->order.accumulation * r->t->decoder->n_layers),
				       sizeof *s->router);
		if (!s->micro || !s->loss || !s->load || !s->router)
			return moe_fail(MOE_ERR_NOMEM, "no memory for a step");
		MOE_TRY(moe_ticket_create(r->t->engine, &s->ticket));
	}
	return MOE_OK;
}

enum moe_status moe_run_set_up(struct moe_run *r)
{
	MOE_TRY(moe_train_check_params(r->p));
	MOE_TRY(open_data(r));
	MOE_TRY(check_output(r));
	MOE_TRY(reserve(r));
	MOE_TRY(moe_expert_stats_create(r->t->decoder, &r->experts));
	MOE_TRY(create_steps(r));
	MOE_TRY(resume(r));
	r->saved = r->p->resume ? r->progress.step : 0;
	MOE_TRY(moe_run_check_room(r));
	MOE_TRY(moe_state_drop_after(r->p->output_dir, r->progress.step));
	return moe_train_log_open(r->p->output_dir, r->progress.step, &r->log);
}

void moe_run_tear_down(struct moe_run *r)
{
	for (int i = 0; i < MOE_STEPS_IN_FLIGHT; i++) {
		struct moe_step *s = &r->step[i];

		if (s->ticket)
			moe_ticket_wait(s->ticket);
		for (int m = 0; s->micro && m < r->order.accumulation; m++)
			moe_batch_free(&s->micro[m]);
		moe_ticket_destroy(s->ticket);
		moe_free(s->micro);
		moe_free(s->loss);
		moe_free(s->load);
		moe_free(s->router);
	}
	moe_expert_stats_free(&r->experts);
	moe_epoch_free(&r->epoch);
	moe_tokens_close(r->tokens);
	moe_tokens_close(r->eval_tokens);
	moe_train_log_close(&r->log);
	if (r->lock >= 0)
		close(r->lock);
}
