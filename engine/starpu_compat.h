/* SPDX-License-Identifier: Apache-2.0 */
/* The only place that knows the differences between StarPU 1.3 and 1.4. */
#ifndef MOE_ENGINE_STARPU_COMPAT_H
#define MOE_ENGINE_STARPU_COMPAT_H

#include <starpu.h>

#if STARPU_MAJOR_VERSION != 1 || STARPU_MINOR_VERSION < 3
#error "StarPU 1.3 or 1.4 is needed"
#endif

/* 1.4 binds workers by the affinity of the process unless told not to; 1.3 has no such setting. */
#define MOE_STARPU_HAS_GETBIND (STARPU_MINOR_VERSION >= 4)

/* CPU workers that this build can have. */
#define MOE_STARPU_MAX_CPUS STARPU_MAXCPUS

#endif
