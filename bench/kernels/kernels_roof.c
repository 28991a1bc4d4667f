/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/kernels/kernels_bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define HUGE_PAGE ((size_t)2 << 20)

struct huge huge_open(size_t bytes)
{
	struct huge h = { .mapped = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE + HUGE_PAGE };
	size_t used = h.mapped - HUGE_PAGE;

	h.mapping =
		mmap(NULL, h.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (h.mapping == MAP_FAILED) {
		perror("bench_kernels: mmap");
		exit(1);
	}
	h.data = (void *)(((uintptr_t)h.mapping + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
	madvise(h.data, used, MADV_HUGEPAGE);
	memset(h.data, 0, used);
	return h;
}

void huge_close(struct huge *h)
{
	munmap(h->mapping, h->mapped);
	*h = (struct huge){ 0 };
}

double measure_clock(void)
{
	enum { STEPS = 2000000, PER_STEP = 8 };
	uint64_t sum = 0, one = 1;
	double start;

	__asm__ volatile("" : "+r"(one)); /* a constant could be folded or renamed away */
	start = thread_seconds();
	for (int i = 0; i < STEPS; i++)
		for (int j = 0; j < PER_STEP; j++) {
			sum += one;
			__asm__ volatile("" : "+r"(sum));
		}
	return (double)STEPS * PER_STEP / (thread_seconds() - start);
}

double measure_peak(const struct moe_tiles *t)
{
	static int64_t iterations = 1000;
	double start, flops, seconds;

	for (;;) {
		start = thread_seconds();
		flops = t->peak(iterations);
		seconds = thread_seconds() - start;
		if (seconds > 1e-3)
			break;
		iterations *= 2;
	}
	if (seconds > 8e-3) /* the next table is slower */
		iterations = iterations / 4 + 1;
	return flops / seconds;
}

typedef uint64_t vector __attribute__((vector_size(16)));

double measure_read(void)
{
	enum { BYTES = 128 << 20, AHEAD = 4096, LINE = 64 };
	static struct huge memory;
	static int part;
	vector sum[4] = { 0 };
	const char *p, *end;
	double start;

	if (!memory.data)
		memory = huge_open((size_t)3 * BYTES);
	p = (const char *)memory.data +
	    (size_t)(part++ % 3) * BYTES; /* nothing of it is left in a cache */
	end = p + BYTES;
	start = thread_seconds();
	for (; p < end; p += LINE) {
		const vector *v = (const vector *)(const void *)p;

		__builtin_prefetch(p + AHEAD);
		for (int i = 0; i < 4; i++)
			sum[i] |= v[i];
	}
	sum[0] |= sum[1] | sum[2] | sum[3];
	__asm__ volatile("" : : "x"(sum[0]));
	return BYTES / (thread_seconds() - start);
}
