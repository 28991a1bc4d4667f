/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of the loader; for load*.c alone. */
#ifndef MOE_TOOLS_TRACE_LOAD_H
#define MOE_TOOLS_TRACE_LOAD_H

#include "tools/trace/trace.h"

/* What a file may claim. */
#define MAX_PARTS 1024 /* and nodes */
#define MAX_STEP (1 << 30)
#define MAX_LAYER 4096
#define MAX_ITEMS (1u << 28) /* of a list: constant columns cost a hostile file nothing */

struct load {
	struct trace *t;
	const struct trace_slice *slice;
	struct moe_mxt_reader r;
	struct moe_mxt_table table; /* the chunk at hand */
	size_t task_cap, pred_cap, routing_cap, load_cap, memory_cap, counter_cap, mark_cap,
		host_cap;
	uint32_t *index; /* of task id - low_id; TRACE_NO_TASK: not there */
	uint32_t *waiter; /* by task: the last one that was found to wait for it, plus 1 */
	int64_t low_id;
	uint64_t ids;
	bool too_many;
};

/* A row is left out, and why. */
void load_bad(struct load *l, const char *what, int64_t which);
/* Room for n items of an array; false: no memory, or too many. */
bool load_grow(struct load *l, void *array, size_t *cap, size_t n, size_t size);

/* load_header.c: kinds, workers and parts, after the tasks. false: no memory. A damaged header
 * costs names, not tasks: there are as many kinds and workers as the tasks need. */
bool load_header(struct load *l);

/* load_rest.c: the rows of the chunk at hand. false: no memory, or too many. */
bool load_routing(struct load *l);
bool load_memory(struct load *l);
bool load_counters(struct load *l);
bool load_marks(struct load *l);
bool load_host(struct load *l);

static inline int64_t load_at(const struct load *l, int column, size_t row)
{
	return moe_mxt_at(&l->table, column, row);
}

/* A value for an int32; otherwise where it is absent or has no room. */
static inline int32_t load_small(int64_t v, int32_t otherwise)
{
	return v == MOE_MXT_NA || v < INT32_MIN || v > INT32_MAX ? otherwise : (int32_t)v;
}

static inline bool load_is_time(int64_t v)
{
	return v == MOE_MXT_NA || (v > -TRACE_MAX_TIME && v < TRACE_MAX_TIME);
}

static inline bool load_inside(bool wanted, const int64_t range[2], int64_t first, int64_t last)
{
	return !wanted || (first <= range[1] && last >= range[0]);
}

#endif
