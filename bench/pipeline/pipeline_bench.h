/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parts of bench_pipeline: what is trained (pipeline_data.c), one run of it (pipeline_run.c), what
 * its trace says and what is printed (pipeline_report.c). Times are seconds unless named otherwise.
 */
#ifndef MOE_BENCH_PIPELINE_BENCH_H
#define MOE_BENCH_PIPELINE_BENCH_H

#include "moesaic.h"

#include <stdbool.h>
#include <stdio.h>

struct pipeline_options {
	int layers, experts, top, hidden, intermediate; /* top: experts per token */
	int tokens, micro_batches;			/* tokens of each */
	int workers, steps, warm_up;
	int group_size;
	const char *policy, *backward, *trace_dir, *only,
		*read_dir; /* only: names of runs, by commas; NULL: all */
	double clip;	   /* of the runs with clipping */
	bool json;
};

/* One of the runs that are compared. */
struct pipeline_run {
	const char *name;
	int workers;
	bool overlap;	/* else every call is waited for */
	double clip;	/* 0: none */
	int first_step; /* whose trace counts, of `steps` */
	int steps;
	double step, task_sum, setup; /* per step */
	double busy;		      /* share of the workers' time in tasks */
	double idle[5]; /* share of the workers' time by cause: names in pipeline_cause */
	double update_time, repack_time, update_exposed, repack_exposed, blocked,
		on_path, gain; /* shares of the time; gain: of a replay without updates and repacks */
	double load;	       /* average, at its start */
	uint64_t weights_hash; /* at its end: the same for all runs with the same clipping */
	double norm;	       /* of the last step's gradient; NaN: not computed */
	bool done;
};
extern const char *const pipeline_cause[5];

/* What a step reads and writes; the same for every run. */
struct pipeline_data {
	struct moe_array weights[3];	  /* gate, up, down of every layer: [E, ...] */
	struct moe_array **rows, **grads; /* [micro][layers + 1] between layers: [T, H] */
	struct moe_array *ids, *scores;	  /* [micro] */
	struct moe_array grad_out;
};
enum moe_status pipeline_data_make(const struct pipeline_options *o, struct pipeline_data *d);
void pipeline_data_free(const struct pipeline_options *o, struct pipeline_data *d);

/* Trains; leaves a trace at `trace`. */
enum moe_status pipeline_run(const struct pipeline_options *o, const struct pipeline_data *d,
			     struct pipeline_run *r, const char *trace);
/* Fills r from moesaic-trace's summary of the file, after its check. */
enum moe_status pipeline_read(struct pipeline_run *r, const char *trace);
/* Whether every bar holds that the runs decide. */
bool pipeline_print(const struct pipeline_options *o, const struct pipeline_run *runs, int n);

#endif
