/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/fuzz/fuzz.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[64];

static void clean(void)
{
	char command[128];

	snprintf(command, sizeof command, "rm -rf %s", folder);
	if (*folder && system(command))
		fprintf(stderr, "%s is left\n", folder);
}

const char *fuzz_file(const uint8_t *data, size_t size, const char *suffix)
{
	static char path[160];
	int fd;

	if (!*folder) {
		snprintf(folder, sizeof folder, "%s/moesaic-fuzz-XXXXXX",
			 access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm");
		if (!mkdtemp(folder))
			abort();
		atexit(clean);
	}
	snprintf(path, sizeof path, "%s/%s", folder, suffix);
	fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	if (fd < 0 || write(fd, data, size) != (ssize_t)size)
		abort();
	close(fd);
	return path;
}
