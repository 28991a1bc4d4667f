/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic-trace SUBCOMMAND: reads and analyses traces. `moesaic trace` runs it. */
#include "tools/standard_files.h"
#include "tools/trace/command.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static void usage(FILE *out)
{
	fprintf(out, "usage: moesaic trace SUBCOMMAND ...\n\n");
	for (int i = 0; trace_command_list[i]; i++)
		fprintf(out, "  %-8s %s\n", trace_command_list[i]->name, trace_command_list[i]->summary);
	fprintf(out, "\nmoesaic trace SUBCOMMAND --help lists its flags; --quiet prints errors only.\n"
		     "Traces come from `moesaic train --trace FILE`.\n");
}

/* What was printed must have arrived: a full disk is an error, a closed pipe is not. */
static int finish(int rc)
{
	if ((fflush(stdout) == 0 && !ferror(stdout)) || rc == TRACE_EXIT_BAD || errno == EPIPE)
		return rc;
	return trace_fail("standard output cannot be written: %s", strerror(errno));
}

int main(int argc, char **argv)
{
	standard_files_take();
	if (argc < 2) {
		usage(stderr);
		return TRACE_EXIT_BAD;
	}
	if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
		usage(stdout);
		return finish(TRACE_EXIT_DONE);
	}
	for (int i = 0; trace_command_list[i]; i++) {
		if (strcmp(argv[1], trace_command_list[i]->name))
			continue;
		trace_set_command(argv[1]);
		return finish(trace_command_list[i]->run(argc - 1, argv + 1));
	}
	return trace_fail("unknown subcommand '%s' (moesaic trace --help lists them)", argv[1]);
}
