/* SPDX-License-Identifier: Apache-2.0 */
/* Progress of work on files: a line with share, rate and time left where stderr is a terminal. */
#ifndef MOESAIC_TOOL_WORK_H
#define MOESAIC_TOOL_WORK_H

#include "tools/moesaic/cli.h"

struct work {
	const char *doing; /* "merging" */
	bool shown, terminal;
	double start, last;
};

void work_begin(struct work *w, const struct settings *s, const char *doing);
/* A moe_work_fn with the struct work as user: nonzero after SIGINT, SIGTERM or SIGHUP. */
int work_progress(const char *what, int64_t done, int64_t total, void *user);
void work_end(struct work *w);

#endif
