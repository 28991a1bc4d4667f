/* SPDX-License-Identifier: Apache-2.0 */
/* A tasks.rec in memory, between reading it (rec_read.c), ordering it (rec_order.c) and writing it
 * (import_rec.c). */
#ifndef MOE_TOOLS_TRACE_REC_H
#define MOE_TOOLS_TRACE_REC_H

#include "tools/trace/import_rec.h"
#include "tools/trace/trace.h"

#include <stdio.h>

struct record {
	int64_t job, order; /* StarPU's ids */
	int64_t submit, start, stop, flops;
	int32_t kind, worker, step;
	uint32_t first_dep, n_deps; /* jobs, in rec.dep */
	bool internal, timed;
	int64_t id; /* in the result, 0: contracted */
};

struct rec {
	struct record *record;
	int64_t *dep; /* jobs; records' indices after rec_order() */
	char **kind;
	size_t n, cap, n_deps, dep_cap;
	int n_kinds;
	size_t kind_cap;
	const char *path;
	size_t line;
	char *error;
	size_t size;
};

/* "PATH:LINE: what" into error; -1. */
int rec_fail(struct rec *r, const char *what);
/* Makes room for n elements of a list. 0 or -1. */
int rec_grow(struct rec *r, void *list, size_t *cap, size_t n, size_t size);

int rec_read(struct rec *r, FILE *file);
/*
 * Into order, [r->n]: records so that all that a task waits for comes before it; submission's order
 * where it can be. -1: a job that is there twice, a cycle.
 */
int rec_order(struct rec *r, uint32_t *order, struct trace_import *result);

#endif
