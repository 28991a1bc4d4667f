/* SPDX-License-Identifier: Apache-2.0 */
#include "model/tokens.h"
#include "model/readers/safetensors.h"

#include <errno.h>
#include <stdlib.h>

/* The 1-D tensor name with its length in n; a copy in *copy if the file does not align it. */
static enum moe_status read_vector(const struct moe_tokens *t, const char *name,
				   enum moe_dtype dtype, void **copy, const void **out, int64_t *n)
{
	const struct moe_st_tensor *v = moe_safetensors_find(t->file, name);
	int64_t length = v && v->ndim == 1 ? v->shape[0] : 0;

	MOE_TRY(moe_safetensors_get_typed(t->file, name, dtype, 1, &length, &v));
	*n = length;
	*out = v->data;
	if ((uintptr_t)v->data % moe_dtype_size(dtype) == 0)
		return MOE_OK;
	*copy = moe_alloc(v->bytes, 1);
	if (!*copy)
		return moe_fail(MOE_ERR_NOMEM, "out of memory for %s", name);
	memcpy(*copy, v->data, v->bytes);
	*out = *copy;
	return MOE_OK;
}

/* offsets[0..n] must run from 0 to end in steps of at least 1. */
static enum moe_status check_offsets(const char *name, const int64_t *offsets, int64_t n,
				     int64_t end)
{
	if (offsets[0] != 0)
		return moe_fail(MOE_ERR_FORMAT, "%s starts at %lld, not 0", name,
				(long long)offsets[0]);
	for (int64_t i = 0; i < n; i++)
		if (offsets[i + 1] <= offsets[i] || offsets[i + 1] > end)
			return moe_fail(MOE_ERR_FORMAT, "%s[%lld] is %lld after %lld (end %lld)",
					name, (long long)i + 1, (long long)offsets[i + 1],
					(long long)offsets[i], (long long)end);
	if (offsets[n] != end)
		return moe_fail(MOE_ERR_FORMAT, "%s ends at %lld, expected %lld", name,
				(long long)offsets[n], (long long)end);
	return MOE_OK;
}

static enum moe_status check_ids(struct moe_tokens *t)
{
	for (int64_t d = 0; d < t->n_docs; d++) {
		int64_t begin = t->doc_offsets[d], end = t->doc_offsets[d + 1];

		t->max_doc_tokens = MOE_MAX(t->max_doc_tokens, end - begin);
		for (int64_t i = begin; i < end; i++) {
			int32_t id = t->input_ids[i], label = t->labels[i];

			if (id < 0 || id >= t->vocab)
				return moe_fail(MOE_ERR_FORMAT,
						"input_ids[%lld] is %d, the vocabulary has %lld: "
						"made with another tokenizer?",
						(long long)i, id, (long long)t->vocab);
			if (label != MOE_LABEL_IGNORE && (label < 0 || label >= t->vocab))
				return moe_fail(MOE_ERR_FORMAT, "labels[%lld] is %d", (long long)i,
						label);
			t->n_trained += label != MOE_LABEL_IGNORE && i > begin;
		}
	}
	if (!t->n_trained)
		return moe_fail(MOE_ERR_FORMAT, "no token is trained: every label is %d",
				MOE_LABEL_IGNORE);
	for (int64_t r = 0; r < t->n_rows; r++)
		t->max_row_tokens =
			MOE_MAX(t->max_row_tokens, t->doc_offsets[t->pack_offsets[r + 1]] -
							   t->doc_offsets[t->pack_offsets[r]]);
	return MOE_OK;
}

/* A metadata number; keeps *out when absent. */
static enum moe_status read_number(const struct moe_tokens *t, const char *key, int64_t *out)
{
	const char *text = moe_safetensors_metadata(t->file, key);
	char *end;
	long long v;

	if (!text || !text[0])
		return MOE_OK;
	errno = 0;
	v = strtoll(text, &end, 10);
	if (errno || *end || v < 0)
		return moe_fail(MOE_ERR_FORMAT, "metadata %s is '%.64s', not a number", key, text);
	*out = v;
	return MOE_OK;
}

static const char *metadata_or_empty(const struct moe_tokens *t, const char *key)
{
	const char *v = moe_safetensors_metadata(t->file, key);

	return v ? v : "";
}

static enum moe_status read_metadata(struct moe_tokens *t, int64_t vocab)
{
	const char *format = moe_safetensors_metadata(t->file, "format");

	if (!format || strcmp(format, MOE_TOKENS_FORMAT) != 0)
		return moe_fail(MOE_ERR_FORMAT,
				"is not a token file: its format is '%.64s', expected '%s'",
				format ? format : "", MOE_TOKENS_FORMAT);
	MOE_TRY(read_number(t, "cutoff_len", &t->cutoff_len));
	MOE_TRY(read_number(t, "tokenizer_vocab_size", &t->vocab));
	if (vocab)
		t->vocab = vocab;
	if (t->vocab < 1)
		return moe_fail(MOE_ERR_FORMAT, "metadata tokenizer_vocab_size is missing");
	t->hash = metadata_or_empty(t, "hash");
	t->source = metadata_or_empty(t, "source");
	t->chat_template = metadata_or_empty(t, "template");
	return MOE_OK;
}

static enum moe_status load(struct moe_tokens *t, int64_t vocab)
{
	int64_t n_labels, n_doc_offsets, n_pack_offsets;
	const void *p;

	MOE_TRY(read_metadata(t, vocab));
	MOE_TRY(read_vector(t, "input_ids", MOE_I32, &t->copies[0], &p, &t->n_tokens));
	t->input_ids = p;
	MOE_TRY(read_vector(t, "labels", MOE_I32, &t->copies[1], &p, &n_labels));
	t->labels = p;
	MOE_TRY(read_vector(t, "doc_offsets", MOE_I64, &t->copies[2], &p, &n_doc_offsets));
	t->doc_offsets = p;
	MOE_TRY(read_vector(t, "pack_offsets", MOE_I64, &t->copies[3], &p, &n_pack_offsets));
	t->pack_offsets = p;
	if (n_labels != t->n_tokens)
		return moe_fail(MOE_ERR_FORMAT, "labels has %lld entries, input_ids %lld",
				(long long)n_labels, (long long)t->n_tokens);
	t->n_docs = n_doc_offsets - 1;
	t->n_rows = n_pack_offsets - 1;
	if (t->n_docs < 1 || t->n_rows < 1)
		return moe_fail(MOE_ERR_FORMAT, "holds no documents");
	MOE_TRY(check_offsets("doc_offsets", t->doc_offsets, t->n_docs, t->n_tokens));
	MOE_TRY(check_offsets("pack_offsets", t->pack_offsets, t->n_rows, t->n_docs));
	return check_ids(t);
}

enum moe_status moe_tokens_open(const char *path, int64_t vocab, struct moe_tokens **out)
{
	struct moe_tokens *t = moe_calloc(1, sizeof *t);
	enum moe_status status;

	if (!t)
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
	status = moe_safetensors_open(path, &t->file);
	if (status == MOE_OK) {
		status = load(t, vocab);
		if (status != MOE_OK)
			moe_fail_in(status, "%s", path);
	}
	if (status != MOE_OK) {
		moe_tokens_close(t);
		return status;
	}
	*out = t;
	return MOE_OK;
}

void moe_tokens_close(struct moe_tokens *t)
{
	if (!t)
		return;
	moe_safetensors_close(t->file);
	for (size_t i = 0; i < MOE_COUNT(t->copies); i++)
		moe_free(t->copies[i]);
	moe_free(t);
}
