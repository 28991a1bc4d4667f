/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic bench NAME [flags]: hands over to a program of bench/ that was built beside this one. */
#include "tools/moesaic/cli.h"
#include "tools/moesaic/python.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct {
	const char *name, *program, *what;
	int levels; /* folders between moesaic and the program */
} benches[] = {
	{ "layer", "bench_layer", "one MoE layer, forward and backward, beside its bare GEMMs", 0 },
	{ "kernels", "bench_kernels", "GEMM kernels against the roofs of this machine", 0 },
	{ "dense", "bench_dense", "attention, dense layers and head", 0 },
	{ "step", "bench_step", "whole training steps", 0 },
	{ "peers", "bench/peers",
	  "a layer beside kt-kernel and PyTorch (a checkout; downloads them)", 2 },
};
#define BENCHES (sizeof benches / sizeof *benches)

static void usage(void)
{
	printf("usage: moesaic bench NAME [flags of that program]\ntimes this machine\n\n");
	for (size_t i = 0; i < BENCHES; i++)
		printf("  %-10s %s\n", benches[i].name, benches[i].what);
	printf("\nmoesaic bench NAME --help lists the flags. Benches are built in a checkout:\n"
	       "cmake --build build/release --target bench_NAME.\n");
}

int bench_exec(char **argv)
{
	const char *names[BENCHES + 1] = { NULL }, *near;

	if (!argv[2] || !strcmp(argv[2], "--help") || !strcmp(argv[2], "-h") ||
	    !strcmp(argv[2], "--help-all")) {
		usage();
		return argv[2] ? CLI_DONE : CLI_USAGE;
	}
	for (size_t i = 0; i < BENCHES; i++) {
		char *path;

		names[i] = benches[i].name;
		if (strcmp(argv[2], benches[i].name))
			continue;
		path = above_program(benches[i].levels, benches[i].program);
		if (path)
			execv(path, argv + 2);
		free(path);
		if (benches[i].levels)
			return cli_fail(CLI_USAGE,
					"bench %s needs a checkout of moesaic with its Python",
					argv[2]);
		return cli_fail(
			CLI_USAGE,
			"%s is not beside moesaic: in a checkout, cmake --build build/release "
			"--target %s",
			benches[i].program, benches[i].program);
	}
	near = cli_nearest(argv[2], names);
	return cli_fail(CLI_USAGE, "unknown bench '%s'%s%s%s (moesaic bench --help)", argv[2],
			near ? "; did you mean '" : "", near ? near : "", near ? "'?" : "");
}
