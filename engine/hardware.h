/* SPDX-License-Identifier: Apache-2.0 */
/* Counters of the calling thread through perf_event: user mode only, where the system permits them.
 */
#ifndef MOE_ENGINE_HARDWARE_H
#define MOE_ENGINE_HARDWARE_H

#include "engine/base.h"

#define MOE_HARDWARE_COUNTERS 3 /* cycles, instructions, last-level cache misses */

struct moe_hardware {
	bool tried;
	int fd[MOE_HARDWARE_COUNTERS];	  /* -1: not there; the first one leads the group */
	int place[MOE_HARDWARE_COUNTERS]; /* in what a read of the group gives */
	int n;
	int64_t begin[MOE_HARDWARE_COUNTERS]; /* the owner's: values when its task began */
};

const char *moe_hardware_name(int counter);
/* Opens what there is, for the calling thread. The text of errno where there is nothing, else NULL.
 * software: events that every kernel counts, in place of these (tests). */
const char *moe_hardware_open(struct moe_hardware *h, bool software);
void moe_hardware_close(struct moe_hardware *h);
/* Values since opening; INT64_MIN: not known, also where the system had to share the counters out.
 */
void moe_hardware_read(const struct moe_hardware *h, int64_t value[MOE_HARDWARE_COUNTERS]);
/* The same less h->begin. */
void moe_hardware_since(const struct moe_hardware *h, int64_t value[MOE_HARDWARE_COUNTERS]);

#endif
