/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What training leaves to read in the output directory: trainer_log.jsonl (a line per step and per
 * evaluation), trainer_state.json in the schema of transformers' Trainer, training_loss.svg.
 */
#ifndef MOE_TRAIN_LOG_H
#define MOE_TRAIN_LOG_H

#include "engine/base.h"

struct moe_log_entry {
	struct moe_train_event event;
	bool eval;
};

struct moe_train_log {
	char *dir;
	struct moe_log_entry *entry;
	int64_t n, capacity;
	int fd;	       /* of trainer_log.jsonl */
	int64_t bytes; /* of whole lines in it */
};

/* Creates the directory; on resume the lines after `keep_step` are dropped, else the file is new.
 */
enum moe_status moe_train_log_open(const char *dir, int64_t keep_step, struct moe_train_log *log);
/* Appends a line; a full disk is an error. */
enum moe_status moe_train_log_add(struct moe_train_log *log, const struct moe_train_event *event,
				  bool eval);
struct moe_log_summary {
	int64_t total_steps, logging_steps, eval_steps, save_steps, tokens;
	int64_t epochs;	    /* begun ones count */
	int64_t batch_size; /* packs of a micro-batch; 0: as many as fit */
	int64_t best_step; /* 0: no evaluation yet */
	double best_loss;
	const char *best_checkpoint; /* NULL: not saved */
};
/* Writes dir/trainer_state.json. */
enum moe_status moe_train_log_state(const struct moe_train_log *log, const char *dir,
				    const struct moe_log_summary *s);
/* Writes training_loss.svg. */
enum moe_status moe_train_log_plot(const struct moe_train_log *log);
void moe_train_log_close(struct moe_train_log *log);

#endif
