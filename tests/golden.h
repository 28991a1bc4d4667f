/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs one block fixture (shared/oracle/README.md) through the public block object and compares every
 * key of the file. Used by the golden_check program and by suite_block.
 */
#ifndef MOE_TESTS_GOLDEN_H
#define MOE_TESTS_GOLDEN_H

#include "moesaic.h"

#include <stdbool.h>

struct golden_options {
	int group_size, slices_i, slices_h; /* 0: the block's choice */
	const char *backward;		    /* weights of the backward; NULL: the block's choice */
	enum moe_activations activations;
	bool async;			    /* forward and backward by their _async forms */
	bool print;			    /* a line per quantity */
};

struct golden_result {
	int compared, failed;
	uint64_t bits;	 /* hash of every output, gradient and parameter */
	double *values;	 /* all of them, for comparisons that allow rounding */
	int64_t n_values;
};

/* false: a quantity is off, a key of the file was neither compared nor an input, or a call failed
 * (printed to stderr). result may be NULL; release with golden_free. */
bool golden_run(struct moe_engine *engine, const char *path, const struct golden_options *o,
		struct golden_result *result);
void golden_free(struct golden_result *r);
/* The kinds of config.kind that this build can run. */
bool golden_kind_supported(const char *kind);
/* config.kind of a file ("" for whole-model files and on errors); buf receives it. */
const char *golden_kind(const char *path, char *buf, size_t size);

#endif
