/* SPDX-License-Identifier: Apache-2.0 */
/* The training loop on the shipped checkpoint, with documents that are made up. */
#ifndef MOE_TESTS_TRAIN_CHECK_H
#define MOE_TESTS_TRAIN_CHECK_H

#include "tests/tokens_check.h"

#include "engine/base.h"
#include "model/file.h"
#include "model/readers/safetensors.h"

#include <stdio.h>
#include <stdlib.h>

#define DOCS 24
#define VOCAB 2048

/* A token file of random documents, two to a pack, trained from their third token on. */
static inline const char *token_file(const char *name)
{
	int32_t ids[DOCS * 40], labels[DOCS * 40];
	int64_t docs[DOCS + 1] = { 0 }, packs[DOCS / 2 + 1], n = 0;
	unsigned long seed = moe_test_seed();

	for (int d = 0; d < DOCS; d++) {
		int len = 5 + (int)((seed = seed * 6364136223846793005ul + 1442695040888963407ul) >>
				    33) %
				      30;

		for (int i = 0; i < len; i++, n++) {
			ids[n] = (int32_t)((seed = seed * 6364136223846793005ul + 1) >> 33) % VOCAB;
			labels[n] = i < 2 ? MOE_LABEL_IGNORE : ids[n];
		}
		docs[d + 1] = n;
	}
	for (int p = 0; p <= DOCS / 2; p++)
		packs[p] = 2 * p;
	return write_token_file(name, ids, labels, docs, DOCS, packs, DOCS / 2);
}

static inline const char *out_dir(const char *name)
{
	static char ring[4][4096];
	static int next;
	char *buf = ring[next++ % 4];

	snprintf(buf, 4096, "%s/%s", moe_test_dir(), name);
	return buf;
}

struct stop {
	int64_t at;
	double losses[64];
	int64_t seen, warnings;
};

static inline int on_event(const struct moe_train_event *e, void *user)
{
	struct stop *s = user;

	s->warnings += e->type == MOE_TRAIN_WARNING;
	if (e->type == MOE_TRAIN_STEP) {
		if (e->step <= 64)
			s->losses[e->step - 1] = e->loss;
		s->seen = e->step;
	}
	return s->at && e->type == MOE_TRAIN_STEP && e->step >= s->at;
}

static double lora_dropout; /* of the models that train() opens */

static inline enum moe_status train(struct moe_trainer_params *p, int workers, const char *policy,
				    struct stop *s, struct moe_train_result *r)
{
	struct moe_engine_params ep = { .struct_size = sizeof ep,
					.workers = workers,
					.policy = policy };
	struct moe_model_params mp = { .struct_size = sizeof mp,
				       .lora_rank = 4,
				       .seed = 7,
				       .lora_dropout = lora_dropout,
				       .dir = moe_test_path("tests/fixtures/ckpt/qwen3moe"),
				       .max_tokens = 64 };
	struct moe_engine *engine;
	struct moe_model *model;
	enum moe_status st = moe_engine_open(&ep, &engine);

	if (st != MOE_OK)
		return st;
	st = moe_model_open(engine, &mp, &model);
	if (st == MOE_OK) {
		st = moe_train(model, p, on_event, s, r);
		moe_model_close(model);
	}
	CU_ASSERT_EQUAL(moe_engine_close(engine), MOE_OK);
	return st;
}

static inline struct moe_trainer_params params(const char *data, const char *out)
{
	return (struct moe_trainer_params){ .struct_size = sizeof(struct moe_trainer_params),
					    .data = data,
					    .output_dir = out,
					    .learning_rate = 2e-3,
					    .max_grad_norm = 1,
					    .batch_size = 1,
					    .accumulation = 2,
					    .seed = 3,
					    .warmup_ratio = 0.1,
					    .weight_decay = 0.01 };
}

#endif
