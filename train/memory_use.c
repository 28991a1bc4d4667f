/* SPDX-License-Identifier: Apache-2.0 */
/* What the process has resident, from /proc; 0 where that cannot be read. */
#include "train/train.h"

#include "engine/available.h"

#include <stdio.h>

double moe_rss_gib(void)
{
	return (double)moe_memory_resident() / (1 << 30);
}

double moe_peak_rss_gib(void)
{
	FILE *f = fopen("/proc/self/status", "re");
	char line[256];
	long kib = 0;

	while (f && fgets(line, sizeof line, f))
		if (sscanf(line, "VmHWM: %ld", &kib) == 1)
			break;
	if (f)
		fclose(f);
	return (double)kib / (1 << 20);
}
