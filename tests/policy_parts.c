/* SPDX-License-Identifier: Apache-2.0 */
/* Shared objects that are no policy: without one, or (PARTS) with half of one. */
#include <starpu.h>
#include <starpu_scheduler.h>

#ifdef PARTS
struct starpu_sched_policy moesaic_policy = { .policy_name = "half" };
#else
const int no_policy = 1;
#endif
