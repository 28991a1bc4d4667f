/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/trace_good.h"

#include "tools/trace/verify.h"

bool trace_is_good(const char *path, bool partial, bool skipped_slots)
{
	struct trace_verify v = {
		.partial = partial, .skipped_slots = skipped_slots, .out = stdout, .most = 5
	};
	struct trace t;
	char error[300];
	int64_t found;

	if (trace_read(&t, path, NULL, error, sizeof error)) {
		printf("%s\n", error);
		return false;
	}
	found = trace_verify(&t, &v);
	trace_free(&t);
	return found == 0;
}
