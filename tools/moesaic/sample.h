/* SPDX-License-Identifier: Apache-2.0 */
/* The next token from a row of logits. */
#ifndef MOESAIC_TOOL_SAMPLE_H
#define MOESAIC_TOOL_SAMPLE_H

#include <stdint.h>

struct sampler {
	double temperature;	   /* 0: the most likely token, ties to the lowest id */
	double top_p;		   /* of the smallest set of tokens with this probability; 1: all */
	double repetition_penalty; /* logits of tokens already in the text: / if positive, * if
				      negative */
	uint64_t state;		   /* of the random numbers: the seed, at first */
	struct candidate {
		double p;
		int32_t id;
	} * candidates; /* [vocab]; the caller's, needed with temperature > 0 */
};

/* Changes logits. */
int32_t sample_token(struct sampler *s, float *logits, int64_t vocab, const int32_t *seen,
		     int64_t n_seen);

#endif
