/* SPDX-License-Identifier: Apache-2.0 */
/* The tokenizer process (python -m moesaic.tokenizer serve), a request and an answer a line. */
#ifndef MOESAIC_TOOL_TOKENIZER_H
#define MOESAIC_TOOL_TOKENIZER_H

#include "tools/moesaic/python.h"

#define TOKENIZER_MAX_EOS 16

struct tokenizer {
	struct python_child child;
	bool chat; /* it has a chat template */
	int64_t vocab_size, eos_ids[TOKENIZER_MAX_EOS];
	int n_eos;
};

/* All print their own errors and return an exit code. */
int tokenizer_open(struct tokenizer *t, const struct settings *s);
/* ids: free them. system may be NULL. */
int tokenizer_encode(struct tokenizer *t, const char *text, bool chat, const char *system,
		     int32_t **ids, int64_t *n);
/* A new answer; then each token gives the text that it made certain (free it), and finish the rest.
 */
int tokenizer_start(struct tokenizer *t);
int tokenizer_token(struct tokenizer *t, int32_t id, char **text);
int tokenizer_finish(struct tokenizer *t, char **text);
void tokenizer_close(struct tokenizer *t);

#endif
