/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A made-up training run: the graph of a model's steps, dependencies as a tracker finds them, and
 * an execution by a list scheduler. Good traces by construction, of any size, with known cost
 * rules.
 */
#ifndef MOE_BENCH_TRACE_MAKE_H
#define MOE_BENCH_TRACE_MAKE_H

#include <stdbool.h>
#include <stdint.h>

enum { BLOCKS = 4, TOP_K = 8 };

struct shape {
	int layers, groups, experts, parts, workers, steps, micros, tokens;
	double skew; /* how uneven experts are: load of the i-th most popular one is ~ i^-skew */
	bool repack;
	uint64_t seed;
};

struct job {
	int32_t kind, layer, group, part, micro, step;
	uint8_t phase;
	int32_t rows, worker;
	uint32_t first_dep, n_deps, left;
	int64_t submit, ready, pop, start, stop;
	double flops, bytes; /* bytes: read */
};

struct run {
	struct shape shape;
	struct job *job;
	uint32_t *dep; /* indices, ascending in a job */
	uint32_t n, n_deps, cap, dep_cap;
	int32_t *load;					 /* [steps][layers][micros][experts] */
	int64_t *step_begin, *step_submitted, *step_end; /* [steps] */
	int64_t *wait_begin; /* [steps] when the submitting thread began to wait before it */
	uint64_t random;
};

extern const char *const make_kind[]; /* NULL ends */

void make_graph(struct run *r);
void make_execute(struct run *r);
/* false: a text was printed. */
bool make_write(const struct run *r, const char *path);
void make_free(struct run *r);

uint64_t make_random(struct run *r);
static inline int32_t *make_loads(const struct run *r, int step, int layer, int micro)
{
	const struct shape *s = &r->shape;

	return r->load + (((int64_t)step * s->layers + layer) * s->micros + micro) * s->experts;
}

#endif
