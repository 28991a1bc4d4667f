/* SPDX-License-Identifier: Apache-2.0 */
/* Trace files as bytes: paths, contents, and random numbers to damage them with. */
#ifndef MOE_TESTS_TRACE_BYTES_H
#define MOE_TESTS_TRACE_BYTES_H

#include "tests/child.h"

#include <fcntl.h>
#include <sys/stat.h>

/* In the test's folder; four at a time. */
static inline const char *trace_file(const char *name)
{
	static char ring[4][4200];
	static int next;
	char *path = ring[next++ % 4];

	snprintf(path, sizeof *ring, "%s/%s", moe_test_dir(), name);
	return path;
}

/* With room for 64 bytes more; free() it. */
static inline uint8_t *trace_contents(const char *path, size_t *n)
{
	int fd = open(path, O_RDONLY);
	struct stat st;
	uint8_t *data;

	CHECK(fd >= 0 && fstat(fd, &st) == 0);
	data = malloc((size_t)st.st_size + 64);
	CHECK(read(fd, data, (size_t)st.st_size) == st.st_size);
	close(fd);
	*n = (size_t)st.st_size;
	return data;
}

static inline void trace_put(const char *path, const uint8_t *data, size_t n)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);

	CHECK(fd >= 0 && write(fd, data, n) == (ssize_t)n);
	close(fd);
}

static inline uint64_t trace_random(uint64_t *state)
{
	*state += 0x9e3779b97f4a7c15ull;
	*state ^= *state >> 29;
	return *state * 0xbf58476d1ce4e5b9ull ^ *state >> 31;
}

#endif
