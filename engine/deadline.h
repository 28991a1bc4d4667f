/* SPDX-License-Identifier: Apache-2.0 */
/* When a wait on a condition ends at the latest. */
#ifndef MOE_ENGINE_DEADLINE_H
#define MOE_ENGINE_DEADLINE_H

#include <stdint.h>
#include <time.h>

/* ns (>= 0) from now, for pthread_cond_timedwait on a condition of the default clock. */
static inline struct timespec moe_deadline(int64_t ns)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	ns += until.tv_nsec;
	until.tv_sec += (time_t)(ns / 1000000000);
	until.tv_nsec = (long)(ns % 1000000000);
	return until;
}

/* Between two reports of progress while something is waited for. */
#define MOE_PROGRESS_NS 100000000

#endif
