/* SPDX-License-Identifier: Apache-2.0 */
/* Micro-batches from documents in memory; logits and losses of them. */
#include "api/model.h"

static void clear(struct moe_model_batch *b)
{
	b->batch = (struct moe_batch){ .ids = b->ids,
				       .position = b->position,
				       .doc_start = b->doc_start,
				       .label = b->label,
				       .row = b->row,
				       .doc_first = b->doc_first };
	b->doc_first[0] = 0;
}

enum moe_status moe_model_batch_create(int capacity, struct moe_model_batch *b)
{
	size_t n = (size_t)capacity;

	memset(b, 0, sizeof *b);
	b->capacity = capacity;
	b->ids = moe_alloc(6 * n + 1, sizeof *b->ids);
	if (!b->ids)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a micro-batch of %d tokens", capacity);
	b->position = b->ids + n;
	b->doc_start = b->ids + 2 * n;
	b->label = b->ids + 3 * n;
	b->row = b->ids + 4 * n;
	b->doc_first = b->ids + 5 * n;
	clear(b);
	return MOE_OK;
}

void moe_model_batch_free(struct moe_model_batch *b)
{
	moe_free(b->ids);
	memset(b, 0, sizeof *b);
}

void moe_model_batch_add(struct moe_model_batch *b, const int32_t *ids, const int32_t *labels, int n)
{
	int first = b->batch.T;

	MOE_ASSERT(first + n <= b->capacity && b->batch.n_docs < b->capacity);
	for (int i = 0; i < n; i++) {
		int t = first + i;

		b->ids[t] = ids[i];
		b->position[t] = i;
		b->doc_start[t] = first;
		b->label[t] = i + 1 == n ? -1 : labels ? labels[i + 1] : ids[i + 1];
		if (b->label[t] < 0)
			b->label[t] = -1;
		else
			b->row[b->batch.n_rows++] = t;
	}
	b->batch.T += n;
	b->doc_first[++b->batch.n_docs] = b->batch.T;
}

static enum moe_status check_ids(const struct moe_model *m, const int32_t *ids, const int32_t *labels,
				 int64_t n)
{
	for (int64_t i = 0; i < n; i++)
		if (ids[i] < 0 || ids[i] >= m->decoder.V || (labels && labels[i] >= m->decoder.V))
			return moe_fail(MOE_ERR_ARG, "token %lld is %d; the vocabulary has %lld",
					(long long)i, ids[i] < 0 || ids[i] >= m->decoder.V ? ids[i]
											   : labels[i],
					(long long)m->decoder.V);
	return MOE_OK;
}

static enum moe_status check_length(const struct moe_model *m, int64_t n)
{
	if (n < 1 || n > m->decoder.positions)
		return moe_fail(MOE_ERR_ARG,
				"a document of %lld tokens; 1 to %d are possible (max_tokens %d, the "
				"model's positions %lld)", (long long)n, m->decoder.positions,
				m->params.max_tokens, (long long)m->arch.max_positions);
	return MOE_OK;
}

struct moe_decoder_pass moe_model_pass(struct moe_model *m, int slot, const struct moe_batch *batch)
{
	return (struct moe_decoder_pass){ .decoder = &m->decoder,
					  .tensors = &m->tensors,
					  .slot = &m->slot[slot],
					  .batch = *batch };
}

static struct moe_context context_of(struct moe_model *m, int micro)
{
	return (struct moe_context){ .engine = m->engine,
				     .phase = MOE_PHASE_FORWARD,
				     .ticket = m->ticket,
				     .layer = -1,
				     .micro = micro };
}

static enum moe_status check_logits(struct moe_model *m, const int32_t *row, int64_t n,
				    int64_t n_rows, const struct moe_array *out)
{
	char shape[64];

	if (!out || out->ndim != 2 || out->dtype != MOE_F32 || out->shape[0] != n_rows ||
	    out->shape[1] != m->decoder.V || !out->data)
		return moe_fail(MOE_ERR_ARG, "out is %s %s; F32 [%lld, %lld] is expected",
				out ? moe_dtype_name(out->dtype) : "NULL",
				out ? moe_shape_text(MOE_MIN(out->ndim, MOE_MAX_NDIM), out->shape,
						     shape, sizeof shape)
				    : "",
				(long long)n_rows, (long long)m->decoder.V);
	if (out->strides[0] && (out->strides[0] != out->shape[1] || out->strides[1] != 1))
		return moe_fail(MOE_ERR_ARG, "out must be contiguous");
	for (int64_t i = 0; row && i < n_rows; i++)
		if (row[i] < 0 || row[i] >= n || (i && row[i] <= row[i - 1]))
			return moe_fail(MOE_ERR_ARG, "row[%lld] is %d: rows ascend within %lld tokens",
					(long long)i, row[i], (long long)n);
	return MOE_OK;
}

/* Submits the batch's forward and logits in slot 0, and waits. */
static enum moe_status run_logits(struct moe_model *m, const struct moe_batch *batch, float *out)
{
	struct moe_context c = context_of(m, 0);
	struct moe_decoder_pass pass = moe_model_pass(m, 0, batch);
	enum moe_status st = moe_submit_begin(m->engine), waited;

	if (st == MOE_OK) {
		st = moe_graph_decoder_forward(&c, &pass);
		if (st == MOE_OK)
			st = moe_graph_decoder_logits(&c, &pass, out);
		moe_submit_end(m->engine);
	}
	waited = moe_ticket_wait(m->ticket);
	return st == MOE_OK ? waited : st;
}

static enum moe_status logits(struct moe_model *m, const int32_t *ids, int n, const int32_t *row, int n_rows,
			      float *out)
{
	struct moe_model_batch b;
	int32_t last = n - 1;
	enum moe_status st;

	MOE_TRY(moe_model_batch_create(n, &b));
	moe_model_batch_add(&b, ids, NULL, n);
	b.batch.row = row ? row : &last;
	b.batch.n_rows = n_rows;
	st = run_logits(m, &b.batch, out);
	moe_model_batch_free(&b);
	return st;
}

enum moe_status moe_model_logits(struct moe_model *m, const int32_t *ids, int64_t n,
				 const int32_t *row, int64_t n_rows, const struct moe_array *out)
{
	enum moe_status st;

	if (!ids || n_rows < 1 || n_rows > n || (!row && n_rows != 1))
		return moe_fail(MOE_ERR_ARG, "%lld rows of %lld ids; ids, and 1 to all of them in row, are needed", (long long)n_rows,
				(long long)n);
	MOE_TRY(moe_model_enter(m));
	st = check_length(m, n);
	if (st == MOE_OK)
		st = check_ids(m, ids, NULL, n);
	if (st == MOE_OK)
		st = check_logits(m, row, n, n_rows, out);
	if (st == MOE_OK)
		st = logits(m, ids, (int)n, row, (int)n_rows, out->data);
	moe_model_leave(m);
	return st;
}

/* ids after the first `past` tokens of the text: their last one's logits. */
static enum moe_status next_logits(struct moe_model *m, const int32_t *ids, int n, int past, float *out)
{
	struct moe_model_batch b;
	int32_t last = n - 1;
	enum moe_status st = MOE_OK;

	if (!m->slot[0].text)
		MOE_TRY(moe_decoder_slot_keep_text(&m->slot[0]));
	MOE_TRY(moe_model_batch_create(n, &b));
	moe_model_batch_add(&b, ids, NULL, n);
	b.batch.text = true;
	b.batch.past = past;
	for (int i = 0; i < n; i++)
		b.position[i] += past;
	b.batch.row = &last;
	b.batch.n_rows = 1;
	st = run_logits(m, &b.batch, out);
	moe_model_batch_free(&b);
	return st;
}

static enum moe_status check_next(const struct moe_model *m, int64_t n, int64_t past)
{
	if (!m->params.keep_text)
		return moe_fail(MOE_ERR_STATE, "the model was opened without keep_text");
	if (past < 0 || past > m->text)
		return moe_fail(MOE_ERR_STATE, "%lld tokens of the text are kept, not %lld", (long long)m->text,
				(long long)past);
	return check_length(m, past + n);
}

enum moe_status moe_model_next(struct moe_model *m, const int32_t *ids, int64_t n, int64_t past,
			       const struct moe_array *out)
{
	enum moe_status st;

	if (!ids || n < 1)
		return moe_fail(MOE_ERR_ARG, "%lld ids; at least one is needed", (long long)n);
	MOE_TRY(moe_model_enter(m));
	st = check_next(m, n, past);
	if (st == MOE_OK)
		st = check_ids(m, ids, NULL, n);
	if (st == MOE_OK)
		st = check_logits(m, NULL, n, 1, out);
	if (st == MOE_OK)
		st = next_logits(m, ids, (int)n, (int)past, out->data);
	m->text = st == MOE_OK ? past + n : 0;
	moe_model_leave(m);
	return st;
}

/* One micro-batch of an evaluation in its slot. */
struct eval {
	struct moe_model_batch batch;
	struct moe_loss_result result;
};

/* Packs documents from `doc` on and submits them; returns the next one in *next. */
static enum moe_status submit_loss(struct moe_model *m, int micro, struct eval *v,
				   const int32_t *ids, const int32_t *labels,
				   const int64_t *offsets, int64_t doc, int64_t n_docs,
				   double *loss, int64_t *count, int64_t *next)
{
	struct moe_context c = context_of(m, micro);
	struct moe_decoder_pass pass;
	enum moe_status st;

	clear(&v->batch);
	v->result = (struct moe_loss_result){ .doc_sum = loss + doc,
					      .doc_n = count ? count + doc : NULL };
	for (; doc < n_docs; doc++) {
		int64_t n = offsets[doc + 1] - offsets[doc];

		if (v->batch.batch.T + n > v->batch.capacity)
			break;
		moe_model_batch_add(&v->batch, ids + offsets[doc],
				    labels ? labels + offsets[doc] : NULL, (int)n);
	}
	*next = doc;
	pass = moe_model_pass(m, micro % m->n_slots, &v->batch.batch);
	MOE_TRY(moe_submit_begin(m->engine));
	st = moe_graph_decoder_forward(&c, &pass);
	if (st == MOE_OK)
		st = moe_graph_decoder_loss(&c, &pass, false, 0, &v->result);
	moe_submit_end(m->engine);
	return st;
}

static enum moe_status run_loss(struct moe_model *m, const int32_t *ids, const int32_t *labels,
				const int64_t *offsets, int64_t n_docs, double *loss, int64_t *count)
{
	struct eval slot[MOE_MODEL_SLOTS] = { 0 };
	enum moe_status st = MOE_OK, waited;
	int64_t doc = 0;

	for (int i = 0; st == MOE_OK && i < m->n_slots; i++)
		st = moe_model_batch_create(m->params.max_tokens, &slot[i].batch);
	for (int micro = 0; st == MOE_OK && doc < n_docs; micro++) {
		/* the arrays of a slot are free again when its round is over */
		if (micro && micro % m->n_slots == 0)
			st = moe_ticket_wait(m->ticket);
		if (st == MOE_OK)
			st = submit_loss(m, micro, &slot[micro % m->n_slots], ids, labels, offsets,
					 doc, n_docs, loss, count, &doc);
	}
	waited = moe_ticket_wait(m->ticket);
	for (int i = 0; i < m->n_slots; i++)
		moe_model_batch_free(&slot[i].batch);
	return st == MOE_OK ? waited : st;
}

enum moe_status moe_model_loss(struct moe_model *m, const int32_t *ids, const int32_t *labels,
			       const int64_t *offsets, int64_t n_docs, double *loss, int64_t *count)
{
	enum moe_status st = MOE_OK;

	if (!ids || !offsets || !loss || n_docs < 1)
		return moe_fail(MOE_ERR_ARG, "losses of %lld documents: there is none, or an array is NULL",
				(long long)n_docs);
	MOE_TRY(moe_model_enter(m));
	for (int64_t d = 0; st == MOE_OK && d < n_docs; d++)
		st = check_length(m, offsets[d + 1] - offsets[d]);
	if (st == MOE_OK)
		st = check_ids(m, ids + offsets[0], labels ? labels + offsets[0] : NULL,
			       offsets[n_docs] - offsets[0]);
	if (st == MOE_OK)
		st = run_loss(m, ids, labels, offsets, n_docs, loss, count);
	moe_model_leave(m);
	return st;
}
