/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the files of a folder through a harness, each also cut short and with bytes changed. */
#include "tests/fuzz/fuzz.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT (1 << 20)
#define CHANGES 64

static uint64_t state = 42;

static uint32_t random_below(uint32_t n)
{
	state = state * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(state >> 33) % n;
}

static void vary(uint8_t *data, size_t size)
{
	uint8_t *copy = malloc(size + 1);

	for (int i = 0; copy && i < CHANGES; i++) {
		size_t n = size ? random_below((uint32_t)size + 1) : 0;

		memcpy(copy, data, size);
		LLVMFuzzerTestOneInput(copy, n);
		for (int j = 0; size && j < 1 + i % 4; j++)
			copy[random_below((uint32_t)size)] = (uint8_t)random_below(256);
		LLVMFuzzerTestOneInput(copy, size);
	}
	free(copy);
}

static int run_file(const char *folder, const char *name)
{
	char path[512];
	uint8_t *data = malloc(LIMIT);
	size_t size;
	FILE *f;

	snprintf(path, sizeof path, "%s/%s", folder, name);
	f = fopen(path, "rb");
	if (!f || !data)
		return -1;
	size = fread(data, 1, LIMIT, f);
	fclose(f);
	LLVMFuzzerTestOneInput(data, size);
	vary(data, size);
	free(data);
	return 0;
}

int main(int argc, char **argv)
{
	DIR *d = argc == 2 ? opendir(argv[1]) : NULL;
	struct dirent *e;
	int n = 0;

	if (!d) {
		fprintf(stderr, "usage: %s FOLDER-OF-SEEDS\n", argv[0]);
		return 2;
	}
	while ((e = readdir(d)))
		if (e->d_name[0] != '.' && run_file(argv[1], e->d_name) == 0)
			n++;
	closedir(d);
	printf("%d seeds, %d variants\n", n, n * 2 * CHANGES);
	return n ? 0 : 1;
}
