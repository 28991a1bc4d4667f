/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised weights in safetensors: which tensors make one, found by the names that formats give
 * them. */
#ifndef MOE_MODEL_QUANTISED_H
#define MOE_MODEL_QUANTISED_H

#include "codelets/format.h"
#include "model/readers/safetensors.h"

/*
 * How a tensor's bytes are a matrix [n, k] (its shape) of codes: coding and reader of q; n, k and codes.data are
 * the tensor's. moe_st_tensor.codes points to one.
 */
struct moe_st_codes {
	struct moe_quantised q;
	bool whole; /* the data are a reader's own object, not rows of bytes */
	/* Columns k0..k0+k of a row as the file means them, where codes only come near; NULL: codes are exact. */
	void (*exact)(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k, float *dst);
};

/* Layouts are known by the ends of their tensors' names. */
static inline bool moe_ends_with(const char *name, const char *end)
{
	size_t n = strlen(name), m = strlen(end);

	return n >= m && !strcmp(name + n - m, end);
}

struct moe_st_quantised {
	/* zero NULL: none. A tensor that has codes of its own is both codes and scale. */
	const struct moe_st_tensor *codes, *scale, *zero;
	struct moe_quantised q;				  /* the matrix, or that of expert 0 */
	int64_t experts;				  /* 0: one matrix */
};

/*
 * What stands for the weight whose plain name is `name`, of shape [n, k], or [experts, n, k] for
 * experts > 0. *found false and MOE_OK: nothing does. MOE_ERR_FORMAT, MOE_ERR_UNSUPPORTED name the
 * tensor that is missing or malformed, and say what it should be. Values are not read.
 */
enum moe_status moe_st_quantised_find(const struct moe_safetensors *st, const char *name,
				      int64_t experts, int64_t n, int64_t k,
				      struct moe_st_quantised *out, bool *found);
/* The matrix of a tensor that has codes of its own. */
struct moe_quantised moe_st_quantised_own(const struct moe_st_tensor *t);
/* Columns k0..k0+k of a row of q, whose codes t holds, as the file means them. */
void moe_st_quantised_row(const struct moe_st_tensor *t, const struct moe_quantised *q, int64_t row, int64_t k0,
			  int64_t k, float *dst);
/* "fp8, int4, ...": what floats can become while they are loaded; convert: what a conversion can make. */
#define MOE_FORMATS_TEXT 160
const char *moe_formats_text(bool convert, char buf[MOE_FORMATS_TEXT]);
/* The matrix of expert e. */
struct moe_quantised moe_st_quantised_expert(const struct moe_st_quantised *t, int64_t e);

#endif
