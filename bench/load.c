/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_load DIR [THREADS [REPEATS [cold]]]: opens a checkpoint again and again and prints what
 * loading took; cold: its files are dropped from the page cache before (as far as the kernel does
 * so).
 */
#include "moesaic.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Bytes of the tensor files; drop: out of the cache. */
static double files(const char *dir, int drop)
{
	DIR *d = opendir(dir);
	struct dirent *e;
	double bytes = 0;

	while (d && (e = readdir(d))) {
		char path[4096];
		struct stat st;
		int fd;

		if (!strstr(e->d_name, ".safetensors") || strstr(e->d_name, ".json"))
			continue;
		snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		if (fd < 0)
			continue;
		if (fstat(fd, &st) == 0)
			bytes += (double)st.st_size;
		if (drop && fdatasync(fd) == 0)
			posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
		close(fd);
	}
	if (d)
		closedir(d);
	return bytes;
}

static int load(const char *dir, int threads, int cold)
{
	struct moe_engine_params ep = { .struct_size = sizeof ep, .workers = threads, .parts = 1 };
	struct moe_model_params mp = {
		.struct_size = sizeof mp, .dir = dir, .max_tokens = 16, .inference_only = 1
	};
	struct moe_model_info info = { .struct_size = sizeof info };
	struct moe_engine *engine = NULL;
	struct moe_model *model = NULL;
	double bytes = files(dir, cold);
	int good = moe_engine_open(&ep, &engine) == MOE_OK &&
		   moe_model_open(engine, &mp, &model) == MOE_OK &&
		   moe_model_get_info(model, &info) == MOE_OK;

	if (good)
		printf("%s  %.2f GB in %.2f s: %.2f GB/s\n", cold ? "cold" : "warm", bytes * 1e-9,
		       info.load_seconds, bytes * 1e-9 / info.load_seconds);
	else
		fprintf(stderr, "bench_load: %s\n", moe_last_error());
	fflush(stdout);
	moe_model_close(model);
	if (engine)
		moe_engine_close(engine);
	return good;
}

int main(int argc, char **argv)
{
	int threads = argc > 2 ? atoi(argv[2]) : 0, repeats = argc > 3 ? atoi(argv[3]) : 3,
	    cold = argc > 4;
	int good = argc > 1;

	if (!good)
		fprintf(stderr, "bench_load DIR [THREADS [REPEATS [cold]]]\n");
	for (int i = 0; good && i < repeats; i++)
		good = load(argv[1], threads, cold);
	return good ? 0 : 2;
}
