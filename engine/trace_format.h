/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The native trace file, .mxt (docs/trace-format.md): constants, units, packing. Depends on libc
 * alone, so that tools/trace reads traces without the library. Everything is little-endian.
 *
 * A file is a mark, then chunks. A chunk is a head of MOE_MXT_HEAD_BYTES and a payload. All chunks
 * but HEADER are tables: columns of integers, each with its own id, so that a reader skips what it
 * does not know and finds out what is absent. Absent means not known; it never means 0.
 *
 * Times are nanoseconds since the trace's origin (header: origin.monotonic_ns, origin.realtime_ns).
 */
#ifndef MOE_ENGINE_TRACE_FORMAT_H
#define MOE_ENGINE_TRACE_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MOE_MXT_MARK "\x89MXT\r\n\x1a\n" /* the file's first 8 bytes */
#define MOE_MXT_VERSION 1		 /* the next 4; readers refuse others */
#define MOE_MXT_FILE_BYTES 16		 /* mark, version, 4 bytes of 0 */
#define MOE_MXT_CHUNK_MARK 0x4354584du	 /* "MXTC" */
#define MOE_MXT_HEAD_BYTES 88
#define MOE_MXT_MAX_PAYLOAD (1u << 28)
#define MOE_MXT_MAX_ROWS (1u << 22) /* of a chunk */
#define MOE_MXT_MAX_COLUMNS 64

/* "Not known" in one row of a column that other rows have. */
#define MOE_MXT_NA INT64_MIN

enum moe_mxt_chunk {
	MOE_MXT_HEADER = 1, /* text, the first chunk: lines "key=value" (docs/trace-format.md lists
			       the keys) */
	MOE_MXT_TASKS,	    /* a row per task that has run, in no order */
	MOE_MXT_DEPS,	    /* a row per submitted task, by ascending id */
	MOE_MXT_ROUTING,    /* a row per plan: tokens of each expert */
	MOE_MXT_MEMORY,	    /* a row per (time, purpose, part) */
	MOE_MXT_COUNTERS,   /* a row per (time, counter) */
	MOE_MXT_MARKS,	    /* steps */
	MOE_MXT_HOST,	    /* intervals of threads that are no workers, and of the engine */
	MOE_MXT_END,	    /* as COUNTERS, the last values: only where the trace ended in order */
	MOE_MXT_CHUNK_TYPES
};

/* ---- columns; "list": not one value per row, see the column that counts them ---- */

enum moe_mxt_tasks_column {
	MOE_MXT_TASK_ID = 1, /* 1, 2, ... in submission order, since the engine was opened */
	MOE_MXT_TASK_KIND,   /* index into the header's kind.N */
	MOE_MXT_TASK_PHASE,  /* enum moe_mxt_phase */
	MOE_MXT_TASK_LAYER,  /* -1: none */
	MOE_MXT_TASK_GROUP,  /* expert group or token block; -1: none */
	MOE_MXT_TASK_SLICE,  /* -1: none */
	MOE_MXT_TASK_PART,   /* -1: any */
	MOE_MXT_TASK_MICRO,  /* micro-batch of the step */
	MOE_MXT_TASK_STEP,   /* 1, 2, ...; 0: of no step */
	MOE_MXT_TASK_WORKER, /* 0, 1, ...: the header's worker.N */
	MOE_MXT_TASK_SUBMIT, /* ns: handed to StarPU */
	MOE_MXT_TASK_READY,  /* ns: its last dependency had ended and StarPU pushed it to the
				scheduler */
	MOE_MXT_TASK_POP,    /* ns: its worker took it from the scheduler */
	MOE_MXT_TASK_START,  /* ns: the codelet begins; data acquired (handles carry no data) */
	MOE_MXT_TASK_STOP,   /* ns: the codelet returned */
	MOE_MXT_TASK_CPU,  /* ns of the worker's CPU in it: less than stop - start where others took
			      the core */
	MOE_MXT_TASK_CORE, /* logical CPU (operating system's number) at the end */
	MOE_MXT_TASK_ROWS, /* tokens, or (token, slot) pairs */
	MOE_MXT_TASK_FLOPS, /* a multiply-add is two; by the codelet's arguments; NA: the kind has
			       no model */
	MOE_MXT_TASK_READ,  /* bytes, once each: what it must read if caches were empty; NA as above
			     */
	MOE_MXT_TASK_WRITTEN, /* bytes */
	MOE_MXT_TASK_LOCAL,   /* of read + written: bytes whose home is the worker's NUMA node
				 (estimate) */
	MOE_MXT_TASK_REMOTE,  /* bytes whose home is another; the rest has no home. Mostly of the
				 part's node */
	MOE_MXT_TASK_CYCLES,  /* perf_event: CPU cycles, user mode; absent: not permitted */
	MOE_MXT_TASK_INSTRUCTIONS, /* perf_event */
	MOE_MXT_TASK_LLC_MISSES,   /* perf_event: last-level cache misses */
};

enum moe_mxt_deps_column {
	MOE_MXT_DEP_ID = 1,
	MOE_MXT_DEP_KIND,
	MOE_MXT_DEP_LAYER,
	MOE_MXT_DEP_MICRO,
	MOE_MXT_DEP_STEP,
	MOE_MXT_DEP_SUBMIT, /* ns */
	MOE_MXT_DEP_COUNT,  /* predecessors of the row */
	MOE_MXT_DEP_BACK,   /* list: id - predecessor's id, > 0, descending in a row */
};

enum moe_mxt_routing_column {
	MOE_MXT_ROUTING_TASK = 1, /* id of the plan task */
	MOE_MXT_ROUTING_STEP,
	MOE_MXT_ROUTING_LAYER,
	MOE_MXT_ROUTING_MICRO,
	MOE_MXT_ROUTING_TIME,	 /* ns */
	MOE_MXT_ROUTING_TOKENS,	 /* of the micro-batch */
	MOE_MXT_ROUTING_SLOTS,	 /* tokens x experts per token; the sum of LOADS where no slot was
				    skipped */
	MOE_MXT_ROUTING_EXPERTS, /* how many LOADS the row has */
	MOE_MXT_ROUTING_LOADS,	 /* list: (token, slot) pairs of expert 0, 1, ... */
};

/* MEMORY. NAMES: texts, each ended by a zero byte; indices below are into it. */
enum moe_mxt_memory_column {
	MOE_MXT_MEMORY_NAMES = 1, /* bytes */
	MOE_MXT_MEMORY_TIME,	  /* ns */
	MOE_MXT_MEMORY_PURPOSE, /* index into NAMES; "rss": the whole process, as the system sees it
				 */
	MOE_MXT_MEMORY_PART,	/* -1: placed nowhere */
	MOE_MXT_MEMORY_BYTES,
};

/* COUNTERS and END. Values count up from 0 at the trace's start. */
enum moe_mxt_counters_column {
	MOE_MXT_COUNTER_NAMES = 1, /* bytes */
	MOE_MXT_COUNTER_TIME,	   /* ns */
	MOE_MXT_COUNTER_NAME,	   /* index into NAMES */
	MOE_MXT_COUNTER_VALUE,
};

enum moe_mxt_marks_column {
	MOE_MXT_MARK_TIME = 1, /* ns */
	MOE_MXT_MARK_WHAT,     /* enum moe_mxt_mark */
	MOE_MXT_MARK_STEP,
	MOE_MXT_MARK_TOKENS,  /* of the step; NA: not known */
	MOE_MXT_MARK_TRAINED, /* tokens with a loss; NA: not known */
};

enum moe_mxt_host_column {
	MOE_MXT_HOST_WHAT = 1, /* enum moe_mxt_host */
	MOE_MXT_HOST_THREAD,   /* the operating system's id */
	MOE_MXT_HOST_BEGIN,    /* ns */
	MOE_MXT_HOST_END,      /* ns */
};

/* ---- what their values mean ---- */

enum moe_mxt_phase {
	MOE_MXT_PHASE_OTHER = 0,
	MOE_MXT_PHASE_FORWARD,
	MOE_MXT_PHASE_BACKWARD,
	MOE_MXT_PHASE_UPDATE,
	MOE_MXT_PHASES
};

enum moe_mxt_mark {
	MOE_MXT_STEP_BEGIN = 0, /* before its first task is submitted */
	MOE_MXT_STEP_SUBMITTED, /* all its tasks are */
	MOE_MXT_STEP_END,	/* all its tasks have run, as seen by the thread that waits */
	MOE_MXT_STEP_MARKS
};

enum moe_mxt_host {
	MOE_MXT_HOST_SUBMIT = 0, /* a graph is being submitted, under the engine's lock */
	MOE_MXT_HOST_WAIT,	 /* a thread waits for tasks */
	MOE_MXT_HOST_SLEEP,	 /* the engine: idle workers were put to sleep */
	MOE_MXT_HOST_HOLD,	 /* the engine: workers held by the caller */
	MOE_MXT_HOST_KINDS
};

/* Texts for reports; NULL past the last. */
const char *moe_mxt_chunk_name(int type);
const char *moe_mxt_phase_name(int phase);
const char *moe_mxt_mark_name(int mark);
const char *moe_mxt_host_name(int host);

/* ---- chunks ---- */

/*
 * What a reader needs in order to skip a chunk. Ranges are inclusive and span the rows; where no
 * row has one (tasks of no layer count) the first is above the last.
 */
struct moe_mxt_head {
	uint32_t type;
	uint32_t rows;
	uint32_t length; /* of the payload, bytes */
	uint32_t crc;	 /* CRC32C of the payload */
	int64_t time[2]; /* ns; TASKS: first start to last stop; DEPS: submissions */
	int64_t id[2];	 /* tasks */
	int64_t step[2];
	int64_t layer[2];
};

/*
 * Bytes of a head: mark, type, rows, length, crc (u32 each), time, id, step, layer (two i64 each),
 * CRC32C of all that (u32). Decoding fails where the mark, the checksum or the length are
 * impossible.
 */
void moe_mxt_head_encode(const struct moe_mxt_head *h, uint8_t out[MOE_MXT_HEAD_BYTES]);
bool moe_mxt_head_decode(const uint8_t in[MOE_MXT_HEAD_BYTES], struct moe_mxt_head *h);

uint32_t moe_mxt_crc(uint32_t crc, const void *data, size_t bytes); /* CRC32C; start with 0 */

/* ---- packing ---- */

/*
 * A table's payload: for every column, in ascending order of id, varint id, one byte of encoding,
 * varint count of values, varint bytes of data, data. A varint has 7 bits per byte, lowest first,
 * the top bit set in all but its last; a signed value v is (v << 1) ^ (v >> 63). Differences wrap
 * around.
 */
enum moe_mxt_encoding {
	MOE_MXT_CONSTANT = 1, /* one signed varint, all values */
	MOE_MXT_PLAIN,	      /* signed varints */
	MOE_MXT_DELTA,	      /* signed varints: differences to the value before, the first to 0 */
	MOE_MXT_BYTES,	      /* values 0..255, a byte each */
};

#define MOE_MXT_VARINT_BYTES 10
size_t moe_mxt_put(uint8_t *out, uint64_t v); /* bytes written, at most MOE_MXT_VARINT_BYTES */
/* Bytes read; 0: cut off or too large. */
size_t moe_mxt_get(const uint8_t *in, size_t available, uint64_t *v);

static inline uint64_t moe_mxt_zigzag(int64_t v)
{
	return ((uint64_t)v << 1) ^ (uint64_t)(v >> 63);
}
static inline int64_t moe_mxt_unzigzag(uint64_t v)
{
	return (int64_t)(v >> 1 ^ (~(v & 1) + 1));
}

#endif
