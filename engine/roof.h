/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory and the clock of this machine, measured. Each function pins its threads and gives the
 * calling thread's affinity back. seconds: about as long as it may take.
 */
#ifndef MOE_ENGINE_ROOF_H
#define MOE_ENGINE_ROOF_H

#include "engine/base.h"

#include <sched.h>

/* Pins the calling thread to one of its CPUs, the last (the first has most interrupts). */
struct moe_pin {
	cpu_set_t before;
	bool pinned;
};
void moe_pin_thread(struct moe_pin *p);
void moe_unpin_thread(struct moe_pin *p);

/* Memory in 2 MiB pages where there are some, filled with a byte by the caller's thread. */
struct moe_huge {
	void *map;
	size_t mapped;
	char *data; /* 2 MiB aligned */
};
bool moe_huge_map(struct moe_huge *h, size_t bytes, int fill);
void moe_huge_unmap(struct moe_huge *h);

/* CPU time of the calling thread: other processes' time slices do not count. Seconds. */
double moe_thread_seconds(void);
/* Of n values, which are sorted. quarter 1 or 3: where others can only take, or only add. */
double moe_median(double *value, int n);
double moe_quartile(double *value, int n, int quarter);

/* GB/s that n threads (0: one per CPU) read from DRAM together: the best of five loops. */
enum moe_status moe_roof_read(int threads, double seconds, double *gbps);
/* GB/s that one thread copies with memcpy between buffers larger than the caches. */
enum moe_status moe_roof_copy(double seconds, double *gbps);
/* Of one busy core: a chain of additions, one a cycle. */
double moe_roof_clock_ghz(double seconds);

#endif
