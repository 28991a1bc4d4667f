/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/available.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define PATH_SIZE 4096

/* The number behind key at the start of a line, or the first number where key is ""; SIZE_MAX: none. */
static size_t number_in(const char *path, const char *key)
{
	FILE *f = fopen(path, "re");
	size_t n = strlen(key), value = SIZE_MAX;
	char line[256], *end;

	while (f && value == SIZE_MAX && fgets(line, sizeof line, f)) {
		unsigned long long v;

		if (strncmp(line, key, n))
			continue;
		v = strtoull(line + n, &end, 10);
		if (end != line + n) /* "max" is no number */
			value = v > SIZE_MAX ? SIZE_MAX : (size_t)v;
	}
	if (f)
		fclose(f);
	return value;
}

/* What one group of version 2 leaves. */
static size_t left_in(const char *folder)
{
	char path[PATH_SIZE + 32];
	size_t limit, used, cache;

	snprintf(path, sizeof path, "%s/memory.max", folder);
	limit = number_in(path, "");
	if (limit == SIZE_MAX)
		return SIZE_MAX;
	snprintf(path, sizeof path, "%s/memory.current", folder);
	used = number_in(path, "");
	snprintf(path, sizeof path, "%s/memory.stat", folder);
	cache = number_in(path, "inactive_file ");
	used = used == SIZE_MAX ? 0 : used;
	used -= cache == SIZE_MAX ? 0 : MOE_MIN(cache, used);
	return limit > used ? limit - used : 0;
}

/* The process's group and all above it; in a container the path leads nowhere and the root is its own. */
static size_t left_in_groups(const char *root)
{
	char path[PATH_SIZE], *end;
	char line[1024] = "";
	size_t least;
	FILE *f;

	snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
	f = fopen(path, "re");
	while (f && fgets(line, sizeof line, f) && strncmp(line, "0::", 3))
		line[0] = 0;
	if (f)
		fclose(f);
	line[strcspn(line, "\n")] = 0;
	snprintf(path, sizeof path, "%s/sys/fs/cgroup%s", root,
		 strncmp(line, "0::/", 4) || !line[4] ? "" : line + 3);
	least = left_in(path);
	while ((end = strrchr(path, '/')) &&
	       strlen(path) > strlen(root) + strlen("/sys/fs/cgroup")) {
		*end = 0;
		least = MOE_MIN(least, left_in(path));
	}
	snprintf(path, sizeof path, "%s/sys/fs/cgroup/memory/memory.limit_in_bytes", root);
	return MOE_MIN(least, number_in(path, "")); /* version 1 */
}

size_t moe_memory_available(const char *root)
{
	char path[PATH_SIZE];
	size_t kib;

	snprintf(path, sizeof path, "%s/proc/meminfo", root);
	kib = number_in(path, "MemAvailable:");
	return MOE_MIN(kib == SIZE_MAX ? SIZE_MAX : kib * 1024, left_in_groups(root));
}

size_t moe_memory_resident(void)
{
	FILE *f = fopen("/proc/self/statm", "re");
	long pages = 0;

	if (f && fscanf(f, "%*s %ld", &pages) != 1)
		pages = 0;
	if (f)
		fclose(f);
	return (size_t)pages * (size_t)sysconf(_SC_PAGESIZE);
}
