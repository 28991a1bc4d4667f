/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One training run, shared by the files of train/: train_setup.c makes it, train_step.c submits and
 * accounts for steps, train_save.c does what happens between them, train.c is the loop. All in the
 * caller's thread.
 */
#ifndef MOE_TRAIN_RUN_H
#define MOE_TRAIN_RUN_H

#include "train/expert_stats.h"
#include "train/log.h"
#include "train/params.h"
#include "train/schedule.h"
#include "train/train.h"

#define MOE_STEPS_IN_FLIGHT 2 /* submitted and not yet accounted for */

/* One submitted step: what its tasks read and write. */
struct moe_step {
	int64_t number;
	struct moe_ticket *ticket;
	struct moe_batch_buffer *micro;	  /* [accumulation] */
	struct moe_loss_result *loss;	  /* [accumulation] */
	int64_t *load;			  /* [accumulation][MoE layers][E] */
	struct moe_router_result *router; /* [accumulation][layers of the decoder] */
	int n_micro;
	struct moe_grad_norm norm;
	int64_t tokens, trained;
	double epoch, lr;
	bool pending, submitted;
};

struct moe_run {
	struct moe_trainee *t;
	const struct moe_trainer_params *p;
	moe_train_fn fn;
	void *user;
	struct moe_tokens *tokens, *eval_tokens;
	struct moe_order_params order;
	struct moe_epoch epoch;
	int64_t epoch_number, total_steps, steps_per_epoch;
	int64_t log_every, eval_every, save_every; /* steps; save_every 0: never, log_every 0: no step */
	double learning_rate; /* highest */
	struct moe_schedule schedule;
	struct moe_step step[MOE_STEPS_IN_FLIGHT];
	struct moe_train_log log;
	struct moe_train_progress progress;
	double loss_sum; /* of the steps since the last line of the log */
	int64_t loss_steps;
	struct moe_expert_stats experts;
	double clock, started; /* end of the last accounted step */
	struct moe_idle idle;  /* then */
	int64_t micros;	       /* submitted so far: deals out the slots */
	int64_t saved;	       /* step of the newest checkpoint of this run, or that it began with; 0: none */
	bool stop, log_failed;
	int lock; /* of the output directory */
};

/* Errors leave nothing outstanding; tear_down always follows. */
enum moe_status moe_run_set_up(struct moe_run *r);
void moe_run_tear_down(struct moe_run *r);

/* The step's micro-batches in the order of its epoch; no trained token: s->trained is 0. */
enum moe_status moe_run_build_step(struct moe_run *r, struct moe_step *s, int64_t number);
enum moe_status moe_run_submit_step(struct moe_run *r, struct moe_step *s);
/* Waits for a step that is pending and accounts for it. */
enum moe_status moe_run_finish_step(struct moe_run *r, struct moe_step *s);
/* All steps before `next`. */
enum moe_status moe_run_drain(struct moe_run *r, int64_t next);

/* There are evaluations. */
bool moe_run_evaluates(const struct moe_run *r);
bool moe_run_saves_best(const struct moe_run *r);
/* The evaluation before the first step, where it is asked for. */
enum moe_status moe_run_begin(struct moe_run *r);
/* Evaluation and saving that are due after a step; drains only where something is. */
enum moe_status moe_run_between(struct moe_run *r, int64_t step);
/* Asked for, or out of time. */
bool moe_run_must_stop(const struct moe_run *r);
/* Finishes the steps up to `step`, the last submitted one, and saves: MOE_ERR_INTERRUPTED, or why it could not. */
enum moe_status moe_run_stop(struct moe_run *r, int64_t step);
/*
 * train_room.c. Whether the file system has room for what this run will write, before it begins, and for one more
 * checkpoint: MOE_ERR_NOFIT with the numbers.
 */
int moe_run_save_limit(const struct moe_run *r);
enum moe_status moe_run_check_room(struct moe_run *r);
enum moe_status moe_run_check_state_room(struct moe_run *r);
enum moe_status moe_run_check_result_room(struct moe_run *r);

/* A line of the log. Where saving may fail, so may this: one warning. */
enum moe_status moe_run_log(struct moe_run *r, const struct moe_train_event *e, bool eval);
/* The adapter, the log's files and the model card in the output directory; of the best checkpoint
 * if asked to. */
enum moe_status moe_run_finish(struct moe_run *r);
void moe_run_notify(struct moe_run *r, const struct moe_train_event *e);
void moe_run_warn(struct moe_run *r, int64_t step, const char *text);

#endif
