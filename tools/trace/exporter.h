/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Exporters: other tools' formats. One is a file of tools/trace/exporters/ that defines
 * `const struct trace_exporter trace_exporter_<file>`; CMake makes the list from the file names.
 */
#ifndef MOE_TOOLS_TRACE_EXPORTER_H
#define MOE_TOOLS_TRACE_EXPORTER_H

#include "tools/trace/trace.h"

/* Which dependencies become arrows; tables of dependencies always have all. */
enum trace_arrows {
	TRACE_ARROWS_NONE,
	TRACE_ARROWS_PATH, /* between tasks of the realised critical path */
	TRACE_ARROWS_ALL,
	TRACE_ARROWS_TASKS /* into and out of tasks that were named */
};

struct trace_export {
	const struct trace *trace;
	/* beside trace.pred. needed: a dependency that no other path implies. arrow: to be drawn,
	 * only where needed (between tasks of the path: always). */
	const uint8_t *needed, *arrow;
	uint32_t n_arrows;
};

struct trace_exporter {
	const char *name;	  /* as in --to */
	const char *summary;	  /* what reads it */
	const char *suffix;	  /* of the default output name, ".json"; a folder's has no dot */
	enum trace_arrows arrows; /* unless --dep says otherwise */
	const char *missing;	  /* NULL, or why this build can't do it */
	/* path: the file or folder. 0, or -1 with a text in error. */
	int (*write)(const struct trace_export *x, const char *path, char *error, size_t size);
};
extern const struct trace_exporter *const trace_exporter_list[]; /* generated */

/*
 * [n_preds]: 1 where a dependency is in the transitive reduction, so where the predecessor is no
 * ancestor of another predecessor. free() it; NULL: no memory.
 */
uint8_t *trace_reduce(const struct trace *t);

/*
 * Tasks of one track must not overlap. [n_tasks]: 0, or 1, 2, ... where a task overlaps those of
 * its worker in the tracks before (the trace is damaged then). *tracks: [n_workers] how many each
 * has. Free both; NULL: no memory.
 */
uint8_t *trace_tracks(const struct trace *t, int **tracks);

/* Tasks that are ready and that no worker has, after each change; times ascend. */
struct trace_change {
	int64_t time, value;
	int32_t what; /* trace_memory_changes(): purpose; else 0 */
};
struct trace_change *trace_ready_changes(const struct trace *t, uint32_t *n);
/* Bytes of a purpose, all parts together. */
struct trace_change *trace_memory_changes(const struct trace *t, uint32_t *n);

/*
 * Intervals of threads that are no workers, a track per (what, thread), in order of time; where two
 * of a track overlap, the later one begins later. 0 or -1: no memory.
 */
struct trace_host_tracks {
	struct trace_host_track {
		int32_t what, thread;
	} * track;
	int n_tracks;
	struct trace_host_slice {
		int track;
		int64_t begin, end;
	} * slice;
	uint32_t n;
};
int trace_host_tracks(const struct trace *t, struct trace_host_tracks *h);
void trace_host_tracks_free(struct trace_host_tracks *h);

/* Names of phases and host intervals; those of tomorrow are "unknown". */
static inline const char *trace_named(const char *name)
{
	return name ? name : "unknown";
}

/* ---- tables, for formats that are tables ---- */

struct trace_cell {
	int64_t v;	  /* MOE_MXT_NA: not known */
	const char *text; /* NULL: v counts */
};
#define TRACE_TABLE_COLUMNS 32
struct trace_column {
	const char *name; /* NULL ends the list; units as in docs/trace-format.md */
	bool text, key;	  /* key: of the primary key */
};
struct trace_cursor {
	uint32_t outer, inner; /* 0, 0 before the first row */
};
struct trace_table {
	const char *name;
	struct trace_column column[TRACE_TABLE_COLUMNS];
	/* The row at the cursor, which moves on; texts live until the next call. false: no more. */
	bool (*next)(const struct trace_export *x, struct trace_cursor *at,
		     struct trace_cell *cell);
};
extern const struct trace_table trace_tables[]; /* a NULL name ends it */

#endif
