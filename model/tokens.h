/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The token file that `python -m moesaic.data` writes: documents, their trained tokens and how they
 * are packed into rows. A safetensors file, mapped; everything is checked at open, so that users
 * may index without checks. Immutable after open; any number of threads may read it.
 */
#ifndef MOE_MODEL_TOKENS_H
#define MOE_MODEL_TOKENS_H

#include "engine/base.h"

#define MOE_TOKENS_FORMAT "moesaic-tokens-1"
#define MOE_LABEL_IGNORE (-100)

struct moe_safetensors;

struct moe_tokens {
	int64_t n_tokens, n_docs, n_rows;
	int64_t n_trained; /* predictions that enter the loss: labels past a document's first token
			    */
	int64_t max_doc_tokens, max_row_tokens;
	int64_t vocab;		     /* ids are in [0, vocab) */
	int64_t cutoff_len;	     /* 0: the file does not say */
	const int32_t *input_ids;    /* [n_tokens] */
	const int32_t *labels;	     /* [n_tokens]: an id where trained, else MOE_LABEL_IGNORE; the
					label of position i is for the token AT i, not the next */
	const int64_t *doc_offsets;  /* [n_docs + 1] into input_ids, strictly increasing from 0 */
	const int64_t *pack_offsets; /* [n_rows + 1] into documents, strictly increasing from 0 */
	const char *hash, *source, *chat_template; /* metadata; "" if absent */
	struct moe_safetensors *file;		   /* private */
	void *copies[4];			   /* private */
};

/*
 * Opens path. vocab: the model's vocabulary, or 0 for what the file's tokenizer_vocab_size says.
 * MOE_ERR_IO; MOE_ERR_FORMAT: not a token file of this version, ids outside the vocabulary, offsets
 * out of order, no documents, no trained token.
 */
enum moe_status moe_tokens_open(const char *path, int64_t vocab, struct moe_tokens **out);
void moe_tokens_close(struct moe_tokens *t);

#endif
