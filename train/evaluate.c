/* SPDX-License-Identifier: Apache-2.0 */
/* Loss without gradients, by document; as many micro-batches in flight as there are slots. */
#include "train/train.h"

struct flight {
	struct moe_ticket *ticket;
	struct moe_batch_buffer batch;
	struct moe_loss_result loss;
};

static enum moe_status submit(struct moe_trainee *t, struct flight *f,
			      struct moe_decoder_slot *slot, int micro)
{
	struct moe_context c = { .engine = t->engine,
				 .ticket = f->ticket,
				 .layer = -1,
				 .micro = micro,
				 .phase = MOE_PHASE_FORWARD };
	struct moe_decoder_pass pass = {
		.decoder = t->decoder, .tensors = t->tensors, .slot = slot, .batch = f->batch.batch
	};
	enum moe_status st;

	MOE_TRY(moe_submit_begin(t->engine));
	st = moe_graph_decoder_forward(&c, &pass);
	if (st == MOE_OK)
		st = moe_graph_decoder_loss(&c, &pass, false, 0, &f->loss);
	moe_submit_end(t->engine);
	return st;
}

static enum moe_status run(struct moe_trainee *t, const struct moe_tokens *tokens,
			   const struct moe_epoch *e, struct flight *flight, double *doc_sum,
			   int64_t *doc_n)
{
	for (int64_t m = 0; m < e->n_micro; m++) {
		struct flight *f = &flight[m % t->n_slots];
		int64_t first = e->micro[m], doc = tokens->pack_offsets[e->pack[first]];

		MOE_TRY(moe_ticket_wait(f->ticket));
		moe_batch_free(&f->batch);
		MOE_TRY(moe_batch_build(tokens, e->pack + first, e->micro[m + 1] - first,
					&f->batch));
		f->loss =
			(struct moe_loss_result){ .doc_sum = doc_sum + doc, .doc_n = doc_n + doc };
		MOE_TRY(submit(t, f, &t->slot[m % t->n_slots], (int)m));
	}
	for (int i = 0; i < t->n_slots; i++)
		MOE_TRY(moe_ticket_wait(flight[i].ticket));
	return MOE_OK;
}

enum moe_status moe_train_evaluate(struct moe_trainee *t, const struct moe_tokens *tokens,
				   int batch_tokens, double *doc_sum, int64_t *doc_n)
{
	/* file order: a micro-batch is a run of documents, so results land where they belong */
	struct moe_order_params order = { .batch_tokens = batch_tokens,
					  .accumulation = 1,
					  .keep_order = true };
	struct moe_epoch epoch;
	struct flight *flight = NULL;
	enum moe_status st;

	MOE_TRY(moe_epoch_create(tokens, &order, 0, &epoch));
	st = t->reserve(t, (int)moe_epoch_max_tokens(tokens, &epoch), t->n_slots);
	if (st == MOE_OK) {
		flight = moe_calloc((size_t)t->n_slots, sizeof *flight);
		if (!flight)
			st = moe_fail(MOE_ERR_NOMEM, "no memory for evaluation");
	}
	for (int i = 0; st == MOE_OK && i < t->n_slots; i++)
		st = moe_ticket_create(t->engine, &flight[i].ticket);
	if (st == MOE_OK)
		st = run(t, tokens, &epoch, flight, doc_sum, doc_n);
	for (int i = 0; flight && i < t->n_slots; i++) {
		if (flight[i].ticket)
			moe_ticket_wait(flight[i].ticket);
		moe_ticket_destroy(flight[i].ticket);
		moe_batch_free(&flight[i].batch);
	}
	moe_free(flight);
	moe_epoch_free(&epoch);
	return st;
}
