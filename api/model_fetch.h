/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sources of weights, read from their files into memory of a loading thread: mapped pages would
 * count as the process's, and a failing disk would be a signal. Each object belongs to one thread.
 */
#ifndef MOE_API_MODEL_FETCH_H
#define MOE_API_MODEL_FETCH_H

#include "model/quantised.h"
#include "model/readers/safetensors.h"

#include <stdatomic.h>

/* Rows are read in pieces of about this size where they can be packed so: what a thread needs stays
 * small. */
#define MOE_FETCH_BYTES ((size_t)4 << 20)

struct moe_fetch {
	const struct moe_safetensors *st;
	_Atomic int64_t *done; /* bytes so far, of all threads */
	char *data;
	size_t room;
};

/* Bytes of a tensor; *out is good until the next call. MOE_ERR_IO names file and place,
 * MOE_ERR_NOMEM. */
enum moe_status moe_fetch_bytes(struct moe_fetch *f, const void *from, size_t bytes,
				const void **out);
/* Codes and scales lie row by row, so that rows can be read alone. */
bool moe_fetch_has_rows(const struct moe_quantised *q);
/*
 * A copy of q with its data in memory: of at least the rows row0..row0+rows where it has rows, else
 * of all. *first: the row of q that is the copy's row 0.
 */
enum moe_status moe_fetch_coded(struct moe_fetch *f, const struct moe_quantised *q, int64_t row0,
				int64_t rows, struct moe_quantised *out, int64_t *first);
void moe_fetch_free(struct moe_fetch *f);

#endif
