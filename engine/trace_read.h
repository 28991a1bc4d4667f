/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads a trace file: heads first, payloads on demand. Depends on libc alone. Damage costs the
 * chunks it hits: reading goes on at the next good head, and a tail that is cut off is left out.
 */
#ifndef MOE_ENGINE_TRACE_READ_H
#define MOE_ENGINE_TRACE_READ_H

#include "engine/trace_table.h"

struct moe_mxt_place {
	struct moe_mxt_head head;
	int64_t at; /* of the payload */
};

struct moe_mxt_reader {
	int fd;
	int64_t bytes;		     /* of the file */
	char *header;		     /* the header's text; "" where it is damaged */
	struct moe_mxt_place *chunk; /* in file order, without the header */
	size_t n, cap;
	bool ended;	    /* an END chunk is there: the trace ended in order */
	int64_t lost_bytes; /* between good chunks, and cut off at the end */
	char error[300];
};

/* false: r->error; there is nothing to close then. */
bool moe_mxt_open(struct moe_mxt_reader *r, const char *path);
void moe_mxt_close(struct moe_mxt_reader *r);
/*
 * Chunk i into a table that was initialised or loaded before. Checks the checksum, the columns, and
 * that columns that are no lists have a value per row and lists have what their counts say. false:
 * r->error.
 */
bool moe_mxt_load(struct moe_mxt_reader *r, size_t i, struct moe_mxt_table *t);

/* A value of the header into buf, NULL where the key is not there. Truncated to size. */
const char *moe_mxt_value(const struct moe_mxt_reader *r, const char *key, char *buf, size_t size);
int64_t moe_mxt_number(const struct moe_mxt_reader *r, const char *key, int64_t otherwise);

/* Row i of a column; MOE_MXT_NA where it is absent. */
static inline int64_t moe_mxt_at(const struct moe_mxt_table *t, int column, size_t i)
{
	return i < t->column[column].n ? t->column[column].value[i] : MOE_MXT_NA;
}

#endif
