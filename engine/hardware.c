/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/hardware.h"

#include <errno.h>
#include <linux/perf_event.h>
#include <sys/syscall.h>
#include <unistd.h>

static const struct {
	const char *name;
	uint64_t config;
} counters[MOE_HARDWARE_COUNTERS] = {
	{ "cycles", PERF_COUNT_HW_CPU_CYCLES },
	{ "instructions", PERF_COUNT_HW_INSTRUCTIONS },
	{ "llc_misses", PERF_COUNT_HW_CACHE_MISSES },
};

const char *moe_hardware_name(int counter)
{
	return counter >= 0 && counter < MOE_HARDWARE_COUNTERS ? counters[counter].name : NULL;
}

static const uint64_t software_counters[MOE_HARDWARE_COUNTERS] = { PERF_COUNT_SW_TASK_CLOCK,
								   PERF_COUNT_SW_PAGE_FAULTS,
								   PERF_COUNT_SW_CONTEXT_SWITCHES };

static int open_counter(uint32_t type, uint64_t config, int group)
{
	struct perf_event_attr attr = {
		.type = type,
		.size = sizeof attr,
		.config = config,
		.exclude_kernel = 1,
		.exclude_hv = 1,
		.read_format = PERF_FORMAT_GROUP | PERF_FORMAT_TOTAL_TIME_ENABLED |
			       PERF_FORMAT_TOTAL_TIME_RUNNING,
	};

	return (int)syscall(SYS_perf_event_open, &attr, 0, -1, group, PERF_FLAG_FD_CLOEXEC);
}

const char *moe_hardware_open(struct moe_hardware *h, bool software)
{
	int leader = -1, error = 0;

	h->tried = true;
	h->n = 0;
	for (int i = 0; i < MOE_HARDWARE_COUNTERS; i++) {
		h->fd[i] = software ? open_counter(PERF_TYPE_SOFTWARE, software_counters[i], leader)
				    : open_counter(PERF_TYPE_HARDWARE, counters[i].config, leader);
		if (h->fd[i] < 0) {
			error = error ? error : errno;
			continue;
		}
		leader = leader < 0 ? h->fd[i] : leader;
		h->place[i] = h->n++;
	}
	return h->n ? NULL : strerror(error);
}

void moe_hardware_close(struct moe_hardware *h)
{
	for (int i = 0; h->tried && i < MOE_HARDWARE_COUNTERS; i++)
		if (h->fd[i] >= 0)
			close(h->fd[i]);
	h->tried = false;
	h->n = 0;
}

void moe_hardware_read(const struct moe_hardware *h, int64_t value[MOE_HARDWARE_COUNTERS])
{
	uint64_t got[3 + MOE_HARDWARE_COUNTERS]; /* how many, time enabled, time running, values */
	size_t bytes = (size_t)(3 + h->n) * sizeof *got;
	int leader = -1;

	for (int i = 0; i < MOE_HARDWARE_COUNTERS; i++) {
		value[i] = INT64_MIN;
		if (leader < 0 && h->n && h->fd[i] >= 0)
			leader = h->fd[i];
	}
	if (leader < 0 || read(leader, got, bytes) != (ssize_t)bytes || got[1] != got[2])
		return;
	for (int i = 0; i < MOE_HARDWARE_COUNTERS; i++)
		if (h->fd[i] >= 0)
			value[i] = (int64_t)got[3 + h->place[i]];
}

void moe_hardware_since(const struct moe_hardware *h, int64_t value[MOE_HARDWARE_COUNTERS])
{
	moe_hardware_read(h, value);
	for (int i = 0; i < MOE_HARDWARE_COUNTERS; i++)
		value[i] = value[i] == INT64_MIN || h->begin[i] == INT64_MIN
				   ? INT64_MIN
				   : value[i] - h->begin[i];
}
