/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A chunk of a trace in memory: columns of integers. Packs and unpacks (engine/trace_format.h).
 * Depends on libc alone; memory comes from malloc. One thread at a time.
 */
#ifndef MOE_ENGINE_TRACE_TABLE_H
#define MOE_ENGINE_TRACE_TABLE_H

#include "engine/trace_format.h"

struct moe_mxt_column {
	int64_t *value; /* [n]; NULL: absent */
	size_t n, cap;
};

struct moe_mxt_table {
	struct moe_mxt_head
		head; /* type is the caller's or the file's; crc and length are set by packing */
	struct moe_mxt_column column[MOE_MXT_MAX_COLUMNS]; /* by id */
	bool failed; /* memory ran out while adding; packing fails then */
};

/* From zeroed memory. */
void moe_mxt_table_init(struct moe_mxt_table *t, enum moe_mxt_chunk type);
/* No rows; memory is kept. */
void moe_mxt_table_clear(struct moe_mxt_table *t);
void moe_mxt_table_free(struct moe_mxt_table *t);

/* One value more at the end of a column. */
void moe_mxt_add(struct moe_mxt_table *t, int column, int64_t value);
/* A text with its zero byte, for columns of bytes. */
void moe_mxt_add_text(struct moe_mxt_table *t, int column, const char *text);
/* A row is complete: counts it and widens the head's ranges. MOE_MXT_NA: it has no id, step; layer
 * < 0: none. */
void moe_mxt_row(struct moe_mxt_table *t, int64_t first, int64_t last, int64_t id, int64_t step,
		 int64_t layer);

/* Columns that have no values are left out. NULL: no memory. *bytes of payload, head complete;
 * free() it. */
uint8_t *moe_mxt_pack(struct moe_mxt_table *t, size_t *bytes);
/* Columns only; the head is the caller's. NULL, or what is wrong with the payload. Accepts
 * anything. */
const char *moe_mxt_unpack(struct moe_mxt_table *t, const uint8_t *payload, size_t bytes);

#endif
