/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parts of bench_layer: what is run (layer_data.c, layer_coded.c), what the workers did (layer_watch.c), the bare
 * GEMMs (layer_bare.c), what is printed (layer_report.c). Times are seconds unless named otherwise.
 */
#ifndef MOE_BENCH_LAYER_BENCH_H
#define MOE_BENCH_LAYER_BENCH_H

#include "moesaic.h"

#include <sched.h>
#include <stdbool.h>
#include <stdio.h>

struct moe_format;

struct layer_shape {
	const char *name;
	int E, k, H, I; /* experts, experts per token, hidden, intermediate */
};

struct layer_options {
	struct layer_shape shape;
	int tokens, workers, rank, repeat, warm_up;
	const char *weights;  /* to be printed */
	enum moe_dtype dtype; /* of weights and activations: MOE_BF16 or MOE_F32 */
	const struct moe_format *format; /* of the experts, made from BF16; NULL: plain */
	bool per_row;			 /* one scale per row, whatever is usual for the format */
	double skew;	      /* 0: every expert is as likely */
	const char *policy;   /* NULL: the engine's default */
	const char *backward; /* NULL: the block's choice */
	const char *backward_used;
	bool json, explain, serve;
	const char *trace; /* NULL: none */
	bool trace_cost;
};

/* ---- layer_data.c ---- */

struct layer_data {
	int32_t *ids;	   /* [T, k] */
	float *weights;	   /* [T, k], sum 1 per token */
	int *rows;	   /* [E] token-slot pairs of each expert */
	uint32_t ids_hash; /* FNV-1a over ids: equal routing in other programs */
	struct moe_array x, out, grad_out, grad_x; /* [T, H] */
	struct moe_array ids_array, weights_array, grad_weights;
};

struct layer_bare;

/* Everything that the caller of a block owns. false: no memory. */
bool layer_data_make(const struct layer_options *o, struct layer_data *d);
void layer_data_free(struct layer_data *d);
/*
 * Random weights and LoRA into the block and into the bare GEMMs. Large shapes have four random
 * experts, the others are those four rotated: every expert has bytes of its own.
 */
enum moe_status layer_load(const struct layer_options *o, struct moe_block *block,
			   struct layer_bare *bare);

/* ---- layer_coded.c ---- */

/* "int8", "int4_row" ...: a format that can be made from floats; false: not one. */
bool layer_take_format(const char *name, struct layer_options *o);
/* Quantises src, BF16 [E, n, k], and sets it. */
enum moe_status layer_set_coded(const struct layer_options *o, struct moe_block *block,
				enum moe_block_array which, const uint16_t *src);

/* ---- layer_watch.c: the engine's observer ---- */

#define LAYER_MAX_KINDS 128

struct layer_kind {
	long tasks, empty;	/* empty: worked on no row */
	double wall, cpu;	/* of all tasks together */
	double longest;		/* wall */
	int groups, slices;	/* highest tag + 1 */
	int64_t rows, rows_max; /* rows of all tasks, of the largest */
};

enum moe_status layer_watch_start(struct moe_engine *engine);
/* The rest only while no task is outstanding. */
void layer_watch_reset(void);
double layer_watch_busy(void); /* wall in task bodies since reset, all workers */
/* CPU time of the worker threads that have run a task, since they started. */
double layer_watch_cpu(void);
void layer_watch_kinds(struct layer_kind kinds[LAYER_MAX_KINDS]);
/* Where the worker may run; false: it has not run a task yet. */
bool layer_watch_cpus(int worker, cpu_set_t *out);

/* ---- layer_bare.c: the GEMMs alone, no LoRA, no StarPU ---- */

struct layer_bare_times {
	double forward, backward;
	double cpu; /* of all threads, both directions */
};

/* rows: [E]; kept. The engine must have a kernel table (a block was created). */
enum moe_status layer_bare_create(struct moe_engine *engine, const struct layer_options *o,
				  const int *rows, struct layer_bare **out);
/* Packs one expert's matrix: MOE_BLOCK_GATE_PROJ, _UP_PROJ or _DOWN_PROJ. */
void layer_bare_set(struct layer_bare *b, enum moe_block_array which, int expert, const void *src,
		    enum moe_dtype dtype);
/* One forward and one backward over all experts, one thread per worker, on the workers' cores. */
enum moe_status bare_gemms(struct layer_bare *b, struct layer_bare_times *out);
void layer_bare_destroy(struct layer_bare *b);

/* ---- layer_report.c ---- */

enum layer_metric {
	LAYER_FORWARD,
	LAYER_BACKWARD,
	LAYER_STEP, /* forward + backward */
	LAYER_UPDATE,
	LAYER_BARE_FORWARD,
	LAYER_BARE_BACKWARD,
	LAYER_BARE,
	LAYER_STEP_OVER_BARE,
	LAYER_FORWARD_CPU, /* of the workers */
	LAYER_BACKWARD_CPU,
	LAYER_BARE_CPU,
	LAYER_STEP_OVER_BARE_CPU, /* what other programs on the machine cannot inflate */
	LAYER_SUBMIT_CPU,	  /* of the calling thread, forward + backward */
	LAYER_IDLE_SHARE,	  /* of workers x (forward + backward), not in task bodies */
	LAYER_METRICS
};

struct layer_sample {
	double value[LAYER_METRICS];
};

struct layer_result {
	const struct layer_sample *samples;
	int n;
	double first_step; /* pays the page faults */
	double load_at_start;
	double setup;
};

/* The measured metrics of one step; without the bare ones where bare was not run. */
void layer_print_sample(const struct layer_sample *s, bool with_bare);
void layer_print_ready(const struct layer_options *o, struct moe_engine *e,
		       const struct layer_data *d, const struct layer_result *r);
void layer_print_json(const struct layer_options *o, struct moe_engine *e,
		      const struct layer_data *d, const struct layer_result *r);
void layer_print_table(const struct layer_options *o, struct moe_engine *e,
		       const struct layer_result *r);
/* What was decided, as the tasks of one observed step show it. */
void layer_explain(FILE *f, const struct layer_options *o, struct moe_engine *e,
		   struct moe_block *block, const struct layer_data *d);

#endif
