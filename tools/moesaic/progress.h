/* SPDX-License-Identifier: Apache-2.0 */
/* What training shows while it runs, and how it is interrupted. */
#ifndef MOESAIC_TOOL_PROGRESS_H
#define MOESAIC_TOOL_PROGRESS_H

#include "tools/moesaic/cli.h"

struct progress {
	FILE *to; /* NULL: --quiet */
	bool terminal, line_open;
	int in_flight; /* steps that are submitted at a time */
	double step_s; /* of the last steps */
	char saved[64]; /* name of the last checkpoint, or "" */
};

void progress_open(struct progress *p, const struct settings *s);
void progress_event(struct progress *p, const struct moe_train_event *e);
/* Ends the line that is updated in place. */
void progress_close(struct progress *p);

/*
 * The first SIGINT, SIGTERM or SIGHUP sets a flag and prints `notice`, the second one kills. Ignored signals stay
 * ignored. To be called when the engine is open: StarPU installs handlers of its own.
 */
void interrupt_watch(const char *notice);
/* Another notice from now on: what the first signal would wait for. */
void interrupt_notice(const char *text);
bool interrupt_pending(void);
/* Before the engine is opened: remembers what the caller of this program ignores. */
void interrupt_remember(void);

#endif
