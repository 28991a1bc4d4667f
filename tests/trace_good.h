/* SPDX-License-Identifier: Apache-2.0 */
/* What `moesaic trace check` says about a file, for suites that record one. */
#ifndef MOE_TESTS_TRACE_GOOD_H
#define MOE_TESTS_TRACE_GOOD_H

#include <stdbool.h>

/* Prints the findings. partial: the trace may be cut off and tasks be lost. skipped_slots: ids of -1. */
bool trace_is_good(const char *path, bool partial, bool skipped_slots);

#endif
