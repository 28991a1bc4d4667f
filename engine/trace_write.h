/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes a trace file chunk by chunk. Depends on libc alone. The recorder and the tests that make
 * synthetic traces use it. After a failure everything that follows is dropped: what is in the file
 * ends with a whole chunk.
 */
#ifndef MOE_ENGINE_TRACE_WRITE_H
#define MOE_ENGINE_TRACE_WRITE_H

#include "engine/trace_table.h"

struct moe_mxt_writer {
	int fd;
	int64_t bytes;	 /* written, whole chunks */
	char error[200]; /* the first failure, "": none */
};

/* Truncates or makes the file and writes its mark. false: w->error says why. */
bool moe_mxt_create(struct moe_mxt_writer *w, const char *path);
/* The header: lines "key=value". To be written first. */
bool moe_mxt_write_header(struct moe_mxt_writer *w, const char *text);
/* Packs and writes a table and clears it; nothing where it has no rows. */
bool moe_mxt_write(struct moe_mxt_writer *w, struct moe_mxt_table *t);
/* false: a failure, now or earlier. */
bool moe_mxt_finish(struct moe_mxt_writer *w);

/* ---- header text ---- */

struct moe_mxt_text {
	char *text; /* free() it */
	size_t n, cap;
	bool failed;
};

/* Appends a line "key=value"; line breaks in it become spaces. */
void moe_mxt_put_line(struct moe_mxt_text *t, const char *line);
void moe_mxt_put_text(struct moe_mxt_text *t, const char *key, const char *value);
void moe_mxt_put_format(struct moe_mxt_text *t, const char *key, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

#endif
