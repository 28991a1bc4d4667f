/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads tasks.rec, what starpu_fxt_tool writes (StarPU with FxT) and starpu-rec exports, and writes
 * it as .mxt.
 */
#ifndef MOE_TOOLS_TRACE_IMPORT_REC_H
#define MOE_TOOLS_TRACE_IMPORT_REC_H

#include <stddef.h>
#include <stdint.h>

struct trace_import {
	uint32_t tasks, deps; /* written */
	uint32_t contracted;  /* tasks of StarPU's own: their predecessors go to their successors */
	uint32_t incomplete;  /* without times or a worker, likewise */
	uint32_t unknown_deps; /* on tasks that are not in the file */
};

/* 0, or -1 with a text that names the line. */
int trace_import_rec(const char *from, const char *to, struct trace_import *result, char *error,
		     size_t size);

#endif
