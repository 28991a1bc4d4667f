/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files that are complete or absent: written under a temporary name, synced, renamed. A failed
 * write is found at the end, at the latest.
 */
#ifndef MOE_TOOLS_TRACE_OUTPUT_H
#define MOE_TOOLS_TRACE_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct trace_output {
	FILE *file; /* to be written to */
	char *path, *temporary;
};

/* 0, or -1 with "PATH: why" in error; there is nothing to close then. */
int trace_output_open(struct trace_output *o, const char *path, char *error, size_t size);
/* FOLDER/NAME */
int trace_output_open_in(struct trace_output *o, const char *folder, const char *name, char *error, size_t size);
/* keep: renames, unless a write failed: -1 and a text. Else removes what was written, and 0. */
int trace_output_close(struct trace_output *o, bool keep, char *error, size_t size);
/* A folder and those above it, where they are missing. 0 or -1 and a text. */
int trace_output_folder(const char *path, char *error, size_t size);
/* "FOLDER/NAME" that the caller frees; NULL: no memory. */
char *trace_output_join(const char *folder, const char *name);

/* n bytes as base64, whole groups: what follows in the same text must begin with a multiple of 3.
 */
void trace_output_base64(FILE *out, const uint8_t *data, size_t n);

#endif
