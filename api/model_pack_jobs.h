/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs of a pack, private to api/model_pack*.c: collected by model_pack.c, done by
 * model_pack_ways.c on the threads of model_pack_run.c. */
#ifndef MOE_API_MODEL_PACK_JOBS_H
#define MOE_API_MODEL_PACK_JOBS_H

#include "api/model_fetch.h"
#include "api/model_pack.h"

#include <pthread.h>

struct moe_pack_job;
/* One way to make weights from their source. *bad: values that are NaN or Inf. */
typedef enum moe_status moe_pack_way(struct moe_fetch *f, const struct moe_pack *p,
				     const struct moe_pack_job *j, int64_t *bad);

struct moe_pack_job {
	moe_pack_way *way;
	struct moe_pack_source source; /* this part's share; with `all` the whole matrix */
	bool all;		       /* parts */
	enum moe_dtype dtype;
	size_t tensor;
	int part;
	struct moe_experts *experts; /* NULL: a dense weight */
	enum moe_expert_matrix which;
	int expert;
	const void *matrix;		   /* of the expert, all parts */
	const struct moe_quantised *coded; /* or this: rows n0, n0 + step, ... */
	int64_t n0, step;
	const struct moe_trained *trained; /* of a dense weight, or NULL */
};

struct moe_pack_tensor {
	const char *name;
	const struct moe_st_tensor *from;
	int64_t non_finite; /* both under the lock while jobs run */
	int left;	    /* jobs */
};

struct moe_pack {
	struct moe_model *m;
	const struct moe_safetensors *st;
	struct moe_fetch own; /* of moe_pack_read */
	int64_t total;	      /* bytes */
	_Atomic int64_t fetched;
	struct moe_pack_job *job; /* sorted by part before they run */
	size_t n_jobs, room;
	struct moe_pack_tensor *tensor;
	size_t n_tensors, tensor_room;
	size_t *first;		      /* [parts + 1] */
	atomic_size_t *next;	      /* [parts] */
	struct moe_quantised **coded; /* of jobs */
	size_t n_coded, coded_room;
	atomic_bool failed;	/* what is left is not worth reading */
	enum moe_status status; /* of jobs: the first failure, under the lock */
	char error[512];
	pthread_mutex_t lock;
	pthread_cond_t done;
};

/* ---- model_pack_ways.c ---- */

moe_pack_way moe_pack_rows_way;	 /* plain weights that stay as they are, in pieces of rows */
moe_pack_way moe_pack_whole_way; /* plain weights by way of their masters, or for parts that share
				    rows */
moe_pack_way moe_pack_quantise_way; /* a plain matrix becomes codes */
moe_pack_way moe_pack_coded_way;    /* codes as they are stored */
moe_pack_way moe_pack_masters_way;  /* codes by way of masters */
moe_pack_way moe_pack_expand_way;   /* codes become bf16 weights */

/* Elements whose exponent is all ones. */
int64_t moe_pack_count_non_finite(enum moe_dtype dtype, int64_t n, const char *src);

#endif
