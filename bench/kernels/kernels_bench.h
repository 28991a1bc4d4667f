/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of bench_kernels: roofs of this core, one GEMM at work, statistics and verdicts. */
#ifndef MOE_BENCH_KERNELS_KERNELS_BENCH_H
#define MOE_BENCH_KERNELS_KERNELS_BENCH_H

#include "bench/measure.h"
#include "codelets/kernels/packed/layout.h"

/* ---- kernels_roof.c ---- */

/* `bytes` of zeroed memory in 2 MiB pages where the system has them; exits without memory */
struct huge {
	void *data, *mapping;
	size_t mapped;
};
struct huge huge_open(size_t bytes);
void huge_close(struct huge *h);
/* Clock in Hz, from a chain of dependent additions. */
double measure_clock(void);
/* flop/s of the tiles' register loop over about 2 ms. */
double measure_peak(const struct moe_tiles *t);
/* Bytes/s of reading memory that no cache holds; one pass over 128 MiB. */
double measure_read(void);

/* ---- kernels_work.c ---- */

struct shape {
	const char *model;
	int n, k;
};

enum direction { FORWARD, BACKWARD };

/* Weights of one shape, as many copies as it takes to outgrow every cache, and the activations. */
struct work {
	const struct moe_tiles *t;
	struct shape shape;
	int experts;
	size_t expert_bytes;
	struct huge weights, x16, dy, y, panel, scratch;
};

struct work work_open(const struct moe_tiles *t, struct shape shape, int max_m);
void work_close(struct work *w);
/* Packing of the activations and the whole GEMM on one expert. */
void work_run(const struct work *w, enum direction d, int m, int expert, int next);

/* ---- kernels_report.c ---- */

#define MAX_SAMPLES 101

struct samples {
	double value[MAX_SAMPLES];
	int n;
};

double quantile(const struct samples *s, double q);

struct roofs {
	struct samples peak, read, clock;
};

/* One line of the table: flop/s of a shape, direction and row count. */
struct point {
	const char *isa;
	struct shape shape;
	enum direction direction;
	int m;
	double flops, bytes; /* of one GEMM */
	struct samples warm, cold;
};

void report_header(const struct roofs *r, const struct moe_tiles *t, bool json);
/* Prints the point beside its bar; false where it misses it. */
bool report_point(const struct point *p, const struct roofs *r, bool json);

#endif
