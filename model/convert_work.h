/* SPDX-License-Identifier: Apache-2.0 */
/* The matrices of a conversion, made by threads of its own. Private to model/convert*.c. */
#ifndef MOE_MODEL_CONVERT_WORK_H
#define MOE_MODEL_CONVERT_WORK_H

#include "model/convert_plan.h"
#include "model/file.h"

struct moe_convert_count {
	int64_t matrices, kept;
	double wrong, all; /* squares: of the differences, of what there was */
	double worst, largest; /* relative of a matrix; |new - old| of a weight */
	char worst_name[MOE_CONVERT_NAME];
};

struct moe_convert_run {
	const struct moe_convert_plan *plan;
	int threads;
	moe_work_fn progress;
	void *user;
	int64_t done, total; /* bytes of the output */
	struct moe_convert_count count;
};

/* One shard into a file that was begun. MOE_ERR_INTERRUPTED: progress said so. */
enum moe_status moe_convert_write(struct moe_convert_run *r, int shard, struct moe_file_writer *w);

/* ---- for other outputs ---- */

/* Rows c->row0.. of a matrix of its source (expert: of fused ones) as they are. MOE_ERR_FORMAT: a scale is not finite. */
enum moe_status moe_convert_read(const struct moe_convert_plan *p, const struct moe_convert_piece *c, int64_t expert,
				 float *x);
/* What was read of the files need not stay in memory. */
void moe_convert_forget(const struct moe_convert_plan *p, const struct moe_convert_piece *c, int64_t expert);
/* A matrix is made; under a lock. wrong, all: squares; largest: |new - old|; kept: codes were taken over. */
void moe_convert_counted(struct moe_convert_run *r, const struct moe_convert_piece *c, int64_t expert, double wrong,
			 double all, double largest, bool kept);

#endif
