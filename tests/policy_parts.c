/* SPDX-License-Identifier: Apache-2.0 */
/* Shared objects that are no policy: without one, or (PARTS) with half of one. */
#include "engine/starpu_compat.h"

#ifdef PARTS
struct starpu_sched_policy moesaic_policy = { .policy_name = "half" };
#else
const int no_policy = 1;
#endif
