/* SPDX-License-Identifier: Apache-2.0 */
#include "train/log.h"

#include "model/file.h"
#include "model/json.h"
#include "train/plot.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <unistd.h>

#define MAX_LOG ((size_t)1 << 31)

static enum moe_status remember(struct moe_train_log *log, const struct moe_train_event *event,
				bool eval)
{
	if (log->n == log->capacity) {
		int64_t want = log->capacity ? 2 * log->capacity : 256;
		struct moe_log_entry *grown = moe_realloc(log->entry, (size_t)want, sizeof *grown);

		if (!grown)
			return moe_fail(MOE_ERR_NOMEM, "no memory for the training log");
		log->entry = grown;
		log->capacity = want;
	}
	log->entry[log->n] = (struct moe_log_entry){ *event, eval };
	log->entry[log->n].event.text = NULL;
	log->entry[log->n].event.expert_load = NULL;
	log->entry[log->n++].event.unused_experts = NULL;
	return MOE_OK;
}

static void add_number(cJSON *o, const char *key, double v)
{
	/* JSON has no NaN: null says that there is no number */
	if (isfinite(v))
		cJSON_AddNumberToObject(o, key, v);
	else
		cJSON_AddNullToObject(o, key);
}

static void add_experts(cJSON *o, const struct moe_train_event *e)
{
	cJSON *load = e->moe_layers ? cJSON_AddArrayToObject(o, "expert_load") : NULL;
	cJSON *unused = e->moe_layers ? cJSON_AddArrayToObject(o, "unused_experts") : NULL;

	for (int l = 0; load && unused && l < e->moe_layers; l++) {
		cJSON_AddItemToArray(load,
				     cJSON_CreateNumber(round(1e3 * e->expert_load[l]) / 1e3));
		cJSON_AddItemToArray(unused, cJSON_CreateNumber(e->unused_experts[l]));
	}
}

static cJSON *to_json(const struct moe_train_event *e, bool eval)
{
	cJSON *o = cJSON_CreateObject();

	add_number(o, "step", (double)e->step);
	add_number(o, "total_steps", (double)e->total_steps);
	add_number(o, "epoch", e->epoch);
	if (eval) {
		add_number(o, "eval_loss", e->eval_loss);
		return o;
	}
	add_number(o, "loss", e->loss);
	add_number(o, "lr", e->learning_rate);
	add_number(o, "grad_norm", e->grad_norm);
	add_number(o, "grad_norm_experts", e->grad_norm_experts);
	if (e->aux_loss != 0)
		add_number(o, "aux_loss", e->aux_loss);
	if (e->z_loss != 0)
		add_number(o, "z_loss", e->z_loss);
	add_number(o, "tokens", (double)e->tokens);
	add_number(o, "trained_tokens", (double)e->trained_tokens);
	add_number(o, "tokens_per_s", e->tokens_per_s);
	add_number(o, "rss_gib", e->rss_gib);
	add_number(o, "eta_s", e->eta_s);
	add_number(o, "idle_share", e->idle_share);
	cJSON_AddStringToObject(o, "idle_cause", moe_idle_cause_name(e->idle_cause));
	add_number(o, "idle_cause_share", e->idle_cause_share);
	add_experts(o, e);
	if (e->skipped)
		add_number(o, "skipped_steps", (double)e->skipped);
	return o;
}

static double number(const cJSON *o, const char *key)
{
	double v = NAN;

	moe_json_opt_real(o, key, &v);
	return v;
}

/* Remembers the lines of a run that is continued, up to its checkpoint; text is cut into lines. */
static enum moe_status reload(struct moe_train_log *log, char *text, int64_t keep_step,
			      size_t *keep_bytes)
{
	char *line = text, *end;

	*keep_bytes = 0;
	while ((end = strchr(line, '\n'))) {
		struct moe_train_event e = { 0 };
		cJSON *o = NULL;
		bool eval;

		if (moe_json_parse(line, (size_t)(end - line), "log line", &o) != MOE_OK)
			return MOE_OK; /* a line cut off by a crash: what follows is not kept */
		e.step = (int64_t)number(o, "step");
		e.epoch = number(o, "epoch");
		e.loss = number(o, "loss");
		e.learning_rate = number(o, "lr");
		e.grad_norm = number(o, "grad_norm");
		e.eval_loss = number(o, "eval_loss");
		eval = moe_json_get(o, "eval_loss") != NULL;
		cJSON_Delete(o);
		if (e.step > keep_step)
			return MOE_OK;
		MOE_TRY(remember(log, &e, eval));
		line = end + 1;
		*keep_bytes = (size_t)(line - text);
	}
	return MOE_OK;
}

enum moe_status moe_train_log_open(const char *dir, int64_t keep_step, struct moe_train_log *log)
{
	char *path, *text = NULL;
	size_t bytes = 0, keep = 0;
	enum moe_status st = MOE_OK;

	memset(log, 0, sizeof *log);
	log->fd = -1;
	MOE_TRY(moe_dir_make(dir));
	log->dir = moe_strdup(dir);
	path = moe_path_join(dir, "trainer_log.jsonl");
	if (!log->dir || !path)
		st = moe_fail(MOE_ERR_NOMEM, "no memory for the training log");
	if (st == MOE_OK && keep_step > 0 && moe_path_exists(path)) {
		st = moe_file_read(path, MAX_LOG, &text, &bytes);
		if (st == MOE_OK)
			st = reload(log, text, keep_step, &keep);
	}
	if (st == MOE_OK) {
		log->fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
		if (log->fd < 0 || ftruncate(log->fd, (off_t)keep) ||
		    lseek(log->fd, 0, SEEK_END) < 0)
			st = moe_fail(MOE_ERR_IO, "%s: %s", path, strerror(errno));
		log->bytes = (int64_t)keep;
	}
	moe_free(text);
	moe_free(path);
	if (st != MOE_OK)
		moe_train_log_close(log);
	return st;
}

/* A full disk may take a part first: the rest then says what is wrong. */
static bool write_all(int fd, const char *data, size_t bytes)
{
	while (bytes) {
		ssize_t n = write(fd, data, bytes);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return false;
		data += n;
		bytes -= (size_t)n;
	}
	return true;
}

enum moe_status moe_train_log_add(struct moe_train_log *log, const struct moe_train_event *event,
				  bool eval)
{
	cJSON *o = to_json(event, eval);
	char *text = o ? cJSON_PrintUnformatted(o) : NULL;
	enum moe_status st = MOE_OK;
	size_t n;

	cJSON_Delete(o);
	if (!text)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the training log");
	n = strlen(text);
	text[n] = '\n'; /* one write: a crash leaves whole lines */
	if (write_all(log->fd, text, n + 1)) {
		log->bytes += (int64_t)n + 1;
	} else {
		st = moe_fail(MOE_ERR_IO, "%s/trainer_log.jsonl: %s", log->dir, strerror(errno));
		if (ftruncate(log->fd, (off_t)log->bytes) == 0) /* what there was room for */
			lseek(log->fd, 0, SEEK_END);
	}
	text[n] = 0;
	cJSON_free(text);
	if (st == MOE_OK || st == MOE_ERR_IO) /* trainer_state.json has the line in any case */
		MOE_TRY(remember(log, event, eval));
	return st;
}

/* The keys that tools for transformers' Trainer look for. */
static void add_summary(cJSON *o, const struct moe_log_summary *s)
{
	if (s->best_step) {
		add_number(o, "best_metric", s->best_loss);
		add_number(o, "best_global_step", (double)s->best_step);
	} else {
		cJSON_AddNullToObject(o, "best_metric");
		cJSON_AddNullToObject(o, "best_global_step");
	}
	if (s->best_checkpoint)
		cJSON_AddStringToObject(o, "best_model_checkpoint", s->best_checkpoint);
	else
		cJSON_AddNullToObject(o, "best_model_checkpoint");
	add_number(o, "max_steps", (double)s->total_steps);
	add_number(o, "num_train_epochs", (double)s->epochs);
	if (s->batch_size)
		add_number(o, "train_batch_size", (double)s->batch_size);
	else
		cJSON_AddNullToObject(o, "train_batch_size");
	add_number(o, "logging_steps", (double)s->logging_steps);
	add_number(o, "eval_steps", (double)s->eval_steps);
	add_number(o, "save_steps", (double)s->save_steps);
	add_number(o, "num_input_tokens_seen", (double)s->tokens);
	cJSON_AddTrueToObject(o, "is_local_process_zero");
	cJSON_AddTrueToObject(o, "is_world_process_zero");
	cJSON_AddFalseToObject(o, "is_hyper_param_search");
	cJSON_AddNullToObject(o, "trial_name");
	cJSON_AddNullToObject(o, "trial_params");
	cJSON_AddObjectToObject(o, "stateful_callbacks");
	add_number(o, "total_flos", 0); /* not counted; the Trainer writes 0 too where its model does not */
}

enum moe_status moe_train_log_state(const struct moe_train_log *log, const char *dir,
				    const struct moe_log_summary *s)
{
	cJSON *o = cJSON_CreateObject(), *history = cJSON_AddArrayToObject(o, "log_history");
	char *path = moe_path_join(dir, "trainer_state.json");
	enum moe_status st;
	double epoch = 0;
	int64_t step = 0;

	for (int64_t i = 0; i < log->n; i++) {
		const struct moe_train_event *e = &log->entry[i].event;
		cJSON *line = cJSON_CreateObject();

		add_number(line, "epoch", e->epoch);
		add_number(line, "step", (double)e->step);
		if (log->entry[i].eval) {
			add_number(line, "eval_loss", e->eval_loss);
		} else {
			add_number(line, "loss", e->loss);
			add_number(line, "learning_rate", e->learning_rate);
			add_number(line, "grad_norm", e->grad_norm);
		}
		cJSON_AddItemToArray(history, line);
		epoch = e->epoch;
		step = e->step;
	}
	add_number(o, "epoch", epoch);
	add_number(o, "global_step", (double)step);
	add_summary(o, s);
	st = path && history ? moe_json_write(path, o)
			     : moe_fail(MOE_ERR_NOMEM, "no memory for the log");
	cJSON_Delete(o);
	moe_free(path);
	return st;
}

enum moe_status moe_train_log_plot(const struct moe_train_log *log)
{
	return moe_train_plot(log);
}

void moe_train_log_close(struct moe_train_log *log)
{
	if (log->fd >= 0)
		close(log->fd);
	moe_free(log->entry);
	moe_free(log->dir);
	memset(log, 0, sizeof *log);
	log->fd = -1;
}
