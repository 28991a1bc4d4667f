/* SPDX-License-Identifier: Apache-2.0 */
/* What the suites of whole models share: engine, model, steps as the trainer submits them. */
#ifndef MOE_TESTS_MODEL_CHECK_H
#define MOE_TESTS_MODEL_CHECK_H

#include "tests/tables.h"
#include "api/model.h"
#include "model/file.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define OK(call)                                                                                   \
	do {                                                                                       \
		enum moe_status ok_ = (call);                                                      \
		CU_ASSERT_EQUAL(ok_, MOE_OK);                                                      \
		if (ok_ != MOE_OK)                                                                 \
			printf("%s: %s\n", #call, moe_last_error());                               \
	} while (0)

static inline void show_log(enum moe_log_level level, const char *text, void *user)
{
	(void)user;
	if (level >= MOE_LOG_WARNING)
		printf("log: %s\n", text);
}

/* A path of the project's fixtures, else of the shared oracle; NULL: skipped. */
static inline const char *fixture(const char *relative)
{
	char path[256];
	const char *shared;

	snprintf(path, sizeof path, "tests/fixtures/%s", relative);
	if (moe_path_exists(moe_test_path(path)))
		return moe_test_path(path);
	snprintf(path, sizeof path, "oracle/%s", relative);
	shared = moe_test_shared(path);
	if (!shared)
		moe_test_skip("%s is absent", relative);
	return shared;
}

static inline struct moe_engine *open_engine(int workers, int parts, const char *policy)
{
	struct moe_engine_params p = { .struct_size = sizeof p,
				       .workers = workers,
				       .parts = parts,
				       .policy = policy,
				       .placement = MOE_PLACEMENT_SOFT,
				       .isa = table_isa() };
	struct moe_engine *e = NULL;

	moe_log_set(show_log, NULL);
	OK(moe_engine_open(&p, &e));
	return e;
}

static inline struct moe_model *open_model_aux(struct moe_engine *e, const char *dir,
					       const char *targets, int max_tokens, int slots,
					       double aux_coef, double z_coef)
{
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = dir,
				      .max_tokens = max_tokens,
				      .slots = slots,
				      .inference_only = targets == NULL,
				      .lora_targets = targets,
				      .lora_rank = targets ? 4 : 0,
				      .lora_alpha = 8,
				      .aux_coef = aux_coef,
				      .z_coef = z_coef,
				      .seed = 1 };
	struct moe_model *m = NULL;

	OK(moe_model_open(e, &p, &m));
	return m;
}

static inline struct moe_model *open_model(struct moe_engine *e, const char *dir,
					   const char *targets, int max_tokens, int slots)
{
	return open_model_aux(e, dir, targets, max_tokens, slots, 0, 0);
}

/* ||a - b|| / ||b|| */
static inline double distance(const float *a, const float *b, int64_t n)
{
	double d = 0, norm = 0;

	for (int64_t i = 0; i < n; i++) {
		d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
		norm += (double)b[i] * b[i];
	}
	return sqrt(d / (norm > 0 ? norm : 1));
}

static inline void expect_close(const char *what, const float *a, const float *b, int64_t n,
				double limit)
{
	double d = distance(a, b, n);

	if (!(d <= limit))
		printf("%s: relative distance %.3g, at most %.3g expected\n", what, d, limit);
	else
		printf("  %s %.2g\n", what, d);
	CU_ASSERT(d <= limit);
}

/* ---- steps, submitted as the trainer does ---- */

struct run {
	struct moe_model *m;
	struct moe_model_batch batch[4];
	int n_micro;
	double lr, weight_decay;
	float max_norm;
	int64_t step;
	struct moe_loss_result loss[4];
	struct moe_router_result router[4][8]; /* of the first layers */
	struct moe_grad_norm norm;
	struct moe_drop_pass drop; /* on and seed */
};

static inline int trained(const struct run *r)
{
	int n = 0;

	for (int i = 0; i < r->n_micro; i++)
		n += r->batch[i].batch.n_rows;
	return n;
}

static inline enum moe_status submit(struct run *r, struct moe_ticket *ticket, bool update)
{
	struct moe_context c = { .engine = r->m->engine, .ticket = ticket, .layer = -1 };
	struct moe_decoder_step step = { .adamw = { .lr = r->lr,
						    .beta1 = 0.9,
						    .beta2 = 0.999,
						    .eps = 1e-8,
						    .weight_decay = r->weight_decay,
						    .step = r->step + 1 },
					 .max_norm = r->max_norm,
					 .norm = &r->norm };
	double tokens = 0;

	for (int i = 0; i < r->n_micro; i++)
		tokens += r->batch[i].batch.T;
	for (int i = 0; i < r->n_micro; i++) {
		struct moe_decoder_pass pass =
			moe_model_pass(r->m, i % r->m->n_slots, &r->batch[i].batch);

		c.micro = i;
		if (r->m->decoder.n_layers <= 8)
			pass.router = r->router[i];
		pass.drop = r->drop;
		pass.drop.step = r->step + 1;
		for (int j = 0; j < i; j++)
			pass.drop.position += r->batch[j].batch.T;
		pass.share = r->batch[i].batch.T / tokens;
		MOE_TRY(moe_graph_decoder_forward(&c, &pass));
		MOE_TRY(moe_graph_decoder_loss(&c, &pass, true, 1.0f / (float)trained(r),
					       &r->loss[i]));
		MOE_TRY(moe_graph_decoder_backward(&c, &pass, i == 0));
	}
	return update ? moe_graph_decoder_update(&c, &r->m->decoder, &r->m->tensors, &step)
		      : MOE_OK;
}

/* One step; the mean loss. */
static inline double step(struct run *r, bool update)
{
	struct moe_ticket *ticket = NULL;
	double sum = 0;

	OK(moe_ticket_create(r->m->engine, &ticket));
	OK(moe_submit_begin(r->m->engine));
	OK(submit(r, ticket, update));
	moe_submit_end(r->m->engine);
	OK(moe_ticket_wait(ticket));
	moe_ticket_destroy(ticket);
	r->step += update;
	for (int i = 0; i < r->n_micro; i++)
		sum += r->loss[i].sum;
	return sum / trained(r);
}

static inline void add_batch(struct run *r, int capacity)
{
	OK(moe_model_batch_create(capacity, &r->batch[r->n_micro++]));
}

static inline void free_run(struct run *r)
{
	for (int i = 0; i < r->n_micro; i++)
		moe_model_batch_free(&r->batch[i]);
}

#endif
