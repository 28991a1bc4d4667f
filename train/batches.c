/* SPDX-License-Identifier: Apache-2.0 */
#include "train/batches.h"

/* splitmix64: the same order on every machine. */
static uint64_t next_random(uint64_t *state)
{
	return moe_mix(*state += 0x9e3779b97f4a7c15ull);
}

static int64_t pack_tokens(const struct moe_tokens *t, int64_t pack)
{
	return t->doc_offsets[t->pack_offsets[pack + 1]] - t->doc_offsets[t->pack_offsets[pack]];
}

static void shuffle(int64_t *list, int64_t n, uint64_t seed)
{
	for (int64_t i = n - 1; i > 0; i--) {
		int64_t j = (int64_t)(next_random(&seed) % (uint64_t)(i + 1)), swap = list[i];

		list[i] = list[j];
		list[j] = swap;
	}
}

enum moe_status moe_epoch_create(const struct moe_tokens *t, const struct moe_order_params *p,
				 int64_t epoch, struct moe_epoch *out)
{
	int64_t tokens = 0;

	memset(out, 0, sizeof *out);
	out->pack = moe_alloc((size_t)t->n_rows, sizeof *out->pack);
	out->micro = moe_alloc((size_t)t->n_rows + 1, sizeof *out->micro);
	if (!out->pack || !out->micro) {
		moe_epoch_free(out);
		return moe_fail(MOE_ERR_NOMEM, "no memory for the order of %lld packs",
				(long long)t->n_rows);
	}
	for (int64_t i = 0; i < t->n_rows; i++)
		out->pack[i] = i;
	if (!p->keep_order)
		shuffle(out->pack, t->n_rows, p->seed ^ (uint64_t)epoch * 0xd1342543de82ef95ull);
	for (int64_t i = 0; i < t->n_rows; i++) {
		int64_t n = pack_tokens(t, out->pack[i]);
		int64_t in_micro = out->n_micro ? i - out->micro[out->n_micro - 1] : 0;
		bool full =
			p->batch_size ? in_micro == p->batch_size : tokens + n > p->batch_tokens;

		if (!out->n_micro || full) {
			out->micro[out->n_micro++] = i;
			tokens = 0;
		}
		tokens += n;
	}
	out->micro[out->n_micro] = t->n_rows;
	if (p->drop_last && t->n_rows - out->micro[out->n_micro - 1] < p->batch_size)
		out->n_micro--;
	out->n_steps = (out->n_micro + p->accumulation - 1) / p->accumulation;
	return MOE_OK;
}

void moe_epoch_free(struct moe_epoch *e)
{
	moe_free(e->pack);
	moe_free(e->micro);
	memset(e, 0, sizeof *e);
}

int64_t moe_epoch_max_tokens(const struct moe_tokens *t, const struct moe_epoch *e)
{
	int64_t max = 0;

	for (int64_t m = 0; m < e->n_micro; m++) {
		int64_t n = 0;

		for (int64_t i = e->micro[m]; i < e->micro[m + 1]; i++)
			n += pack_tokens(t, e->pack[i]);
		max = MOE_MAX(max, n);
	}
	return max;
}

/* One document at token `at` of the micro-batch. */
static void add_document(const struct moe_tokens *t, int64_t doc, struct moe_batch *b, int32_t *ids,
			 int32_t *position, int32_t *doc_start, int32_t *label, int32_t *row)
{
	int64_t begin = t->doc_offsets[doc];
	int n = (int)(t->doc_offsets[doc + 1] - begin), at = b->T;

	for (int i = 0; i < n; i++) {
		bool trained = i + 1 < n && t->labels[begin + i + 1] != MOE_LABEL_IGNORE;

		ids[at + i] = t->input_ids[begin + i];
		position[at + i] = i;
		doc_start[at + i] = at;
		label[at + i] = trained ? t->labels[begin + i + 1] : -1;
		if (trained)
			row[b->n_rows++] = at + i;
	}
	b->T += n;
}

enum moe_status moe_batch_build(const struct moe_tokens *t, const int64_t *list, int64_t n,
				struct moe_batch_buffer *out)
{
	struct moe_batch *b = &out->batch;
	int64_t tokens = 0, docs = 0;
	int32_t *a, *doc_first;

	memset(out, 0, sizeof *out);
	for (int64_t i = 0; i < n; i++) {
		tokens += pack_tokens(t, list[i]);
		docs += t->pack_offsets[list[i] + 1] - t->pack_offsets[list[i]];
	}
	if (tokens > INT32_MAX / 8)
		return moe_fail(MOE_ERR_ARG, "a micro-batch of %lld tokens", (long long)tokens);
	a = moe_alloc((size_t)(5 * tokens + docs + 1), sizeof *a);
	if (!a)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a micro-batch of %lld tokens",
				(long long)tokens);
	out->arrays = a;
	doc_first = a + 5 * tokens;
	*b = (struct moe_batch){ .ids = a,
				 .position = a + tokens,
				 .doc_start = a + 2 * tokens,
				 .label = a + 3 * tokens,
				 .row = a + 4 * tokens,
				 .doc_first = doc_first };
	for (int64_t i = 0; i < n; i++)
		for (int64_t d = t->pack_offsets[list[i]]; d < t->pack_offsets[list[i] + 1]; d++) {
			doc_first[b->n_docs++] = b->T;
			add_document(t, d, b, a, a + tokens, a + 2 * tokens, a + 3 * tokens,
				     a + 4 * tokens);
		}
	doc_first[b->n_docs] = b->T;
	return MOE_OK;
}

void moe_batch_free(struct moe_batch_buffer *b)
{
	moe_free(b->arrays);
	memset(b, 0, sizeof *b);
}
