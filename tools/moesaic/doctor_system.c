/* SPDX-License-Identifier: Apache-2.0 */
/* What the operating system says, and what of it is a problem. */
#include "tools/moesaic/doctor.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define GIB ((double)(1 << 30))
#define LITTLE_MEMORY ((int64_t)2 << 30)

/* ---- looking ---- */

static int read_line(const char *path, char *buf, int size)
{
	FILE *f = fopen(path, "re");
	char *line = f ? fgets(buf, size, f) : NULL;

	if (f)
		fclose(f);
	if (!line)
		return 0;
	buf[strcspn(buf, "\n")] = 0;
	return 1;
}

static void look_at_memory(struct doctor_system *s)
{
	FILE *f = fopen("/proc/meminfo", "re");
	char line[128], limit[64];
	long long kib;

	while (f && fgets(line, sizeof line, f)) {
		if (sscanf(line, "MemTotal: %lld", &kib) == 1)
			s->memory = kib * 1024;
		if (sscanf(line, "MemAvailable: %lld", &kib) == 1)
			s->available = kib * 1024;
	}
	if (f)
		fclose(f);
	if (read_line("/sys/fs/cgroup/memory.max", limit, sizeof limit) && strcmp(limit, "max"))
		s->memory_limit = strtoll(limit, NULL, 10);
}

static void look_at_cpus(struct doctor_system *s)
{
	double quota, period;
	cpu_set_t set;
	char line[64];

	if (!sched_getaffinity(0, sizeof set, &set))
		s->allowed_cpus = CPU_COUNT(&set);
	if (read_line("/sys/fs/cgroup/cpu.max", line, sizeof line) &&
	    sscanf(line, "%lf %lf", &quota, &period) == 2 && period > 0)
		s->cpu_limit = quota / period;
	read_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", s->governor,
		  sizeof s->governor);
	if (getloadavg(&s->load, 1) != 1)
		s->load = -1;
}

/* The word in brackets. */
static void look_at_huge_pages(struct doctor_system *s)
{
	char line[64], *from, *to;

	if (!read_line("/sys/kernel/mm/transparent_hugepage/enabled", line, sizeof line))
		return;
	from = strchr(line, '[');
	to = from ? strchr(from, ']') : NULL;
	if (to)
		snprintf(s->huge_pages, sizeof s->huge_pages, "%.*s", (int)(to - from - 1),
			 from + 1);
}

/* A value in kB of a node's meminfo, in bytes; 0: none. */
static int64_t node_value(int node, const char *key)
{
	char path[80], line[128];
	int64_t bytes = 0;
	FILE *f;

	snprintf(path, sizeof path, "/sys/devices/system/node/node%d/meminfo", node);
	f = fopen(path, "re");
	while (f && fgets(line, sizeof line, f)) {
		char *at = strstr(line, key);

		if (at)
			bytes = strtoll(at + strlen(key), NULL, 10) * 1024;
	}
	if (f)
		fclose(f);
	return bytes;
}

static void look_at_nodes(struct doctor_system *s)
{
	char line[32];

	if (read_line("/proc/sys/kernel/numa_balancing", line, sizeof line))
		s->numa_balancing = atoi(line);
	for (int i = 0; i < 1024 && s->n_nodes < DOCTOR_NODES; i++) {
		int64_t total = node_value(i, "MemTotal:");

		if (!total)
			continue;
		s->node_memory[s->n_nodes] = total;
		s->node_free[s->n_nodes++] = node_value(i, "MemFree:");
	}
}

static int64_t limit_of(int resource)
{
	struct rlimit r;

	if (getrlimit((__rlimit_resource_t)resource, &r) || r.rlim_cur == RLIM_INFINITY)
		return -1;
	return (int64_t)r.rlim_cur;
}

void doctor_look(struct doctor_system *s)
{
	*s = (struct doctor_system){ .memory = -1,
				     .available = -1,
				     .memory_limit = -1,
				     .cpu_limit = -1,
				     .allowed_cpus = -1,
				     .numa_balancing = -1 };
	look_at_memory(s);
	look_at_cpus(s);
	look_at_huge_pages(s);
	look_at_nodes(s);
	s->open_files = limit_of(RLIMIT_NOFILE);
	s->address_space = limit_of(RLIMIT_AS);
	s->locked = limit_of(RLIMIT_MEMLOCK);
}

/* ---- judging ---- */

#define TEXT(...) cli_format(__VA_ARGS__)

static void judge_file(struct doctor *d)
{
	const struct moe_machine_info *m = &d->machine;

	switch (m->file_state) {
	case MOE_MACHINE_FILE_NONE:
		doctor_add(d, DOCTOR_NOTE, TEXT("rates are guessed, not measured"),
			   TEXT("moesaic doctor --calibrate"));
		break;
	case MOE_MACHINE_FILE_OTHER:
		doctor_add(d, DOCTOR_WARNING, TEXT("%s is not used: %s", m->file, m->file_error),
			   TEXT("moesaic doctor --calibrate"));
		break;
	case MOE_MACHINE_FILE_BAD:
		doctor_add(d, m->file_named ? DOCTOR_ERROR : DOCTOR_WARNING,
			   TEXT("%s", m->file_error),
			   m->file_named ? TEXT("unset MOESAIC_MACHINE")
					 : TEXT("moesaic doctor --calibrate"));
		break;
	case MOE_MACHINE_FILE_USED:
		if (m->load > 1)
			doctor_add(d, DOCTOR_NOTE,
				   TEXT("the machine was busy when it was calibrated (load %.1f)",
					m->load),
				   TEXT("moesaic doctor --calibrate"));
	}
}

static void judge_cpus(struct doctor *d)
{
	const struct moe_machine_info *m = &d->machine;
	const struct doctor_system *s = &d->system;

	if (*m->isa_error)
		doctor_add(d, DOCTOR_ERROR, TEXT("%s", m->isa_error), TEXT("unset MOESAIC_ISA"));
	if (m->fake_topology)
		doctor_add(d, DOCTOR_WARNING, TEXT("the topology is not this machine's"),
			   TEXT("unset HWLOC_SYNTHETIC HWLOC_XMLFILE"));
	if (m->cores > m->starpu_max_workers)
		doctor_add(d, DOCTOR_WARNING,
			   TEXT("StarPU was built for %d workers: %d of %d cores stay idle",
				m->starpu_max_workers, m->cores - m->starpu_max_workers, m->cores),
			   TEXT("scripts/build-starpu   (in moesaic's source: it raises StarPU's "
				"limits)"));
	if (s->allowed_cpus > 0 && s->allowed_cpus < m->cores)
		doctor_add(d, DOCTOR_WARNING,
			   TEXT("this process may use %d of %d cores", s->allowed_cpus, m->cores),
			   TEXT("moesaic train --threads %d, or start it without taskset",
				s->allowed_cpus));
	if (s->cpu_limit > 0 && s->cpu_limit < m->workers)
		doctor_add(d, DOCTOR_WARNING,
			   TEXT("the control group may use %.1f CPUs, %d workers would share them",
				s->cpu_limit, m->workers),
			   TEXT("moesaic train --threads %d",
				s->cpu_limit < 1 ? 1 : (int)s->cpu_limit));
	if (!strcmp(s->governor, "powersave") || !strcmp(s->governor, "conservative"))
		doctor_add(d, DOCTOR_NOTE, TEXT("the cpufreq governor is %s", s->governor),
			   TEXT("sudo cpupower frequency-set -g performance"));
	if (s->load > 1)
		doctor_add(d, DOCTOR_WARNING,
			   TEXT("other processes are running (load %.1f)", s->load), TEXT("top"));
}

/* Memory is placed part by part: nodes that differ much let one of them run out first. */
static void judge_nodes(struct doctor *d)
{
	const struct doctor_system *s = &d->system;
	int64_t least = INT64_MAX, most = 0;

	for (int i = 0; i < s->n_nodes; i++) {
		least = s->node_memory[i] < least ? s->node_memory[i] : least;
		most = s->node_memory[i] > most ? s->node_memory[i] : most;
	}
	if (s->n_nodes > 1 && least < most / 2)
		doctor_add(d, DOCTOR_WARNING,
			   TEXT("NUMA nodes have between %.1f and %.1f GiB", (double)least / GIB,
				(double)most / GIB),
			   TEXT("moesaic train --numa off, or populate the memory channels alike"));
	if (s->n_nodes > 1 && s->numa_balancing > 0)
		doctor_add(d, DOCTOR_NOTE,
			   TEXT("the kernel moves pages between NUMA nodes by itself: moesaic "
				"places them"),
			   TEXT("echo 0 | sudo tee /proc/sys/kernel/numa_balancing"));
}

static void judge_python(struct doctor *d)
{
	if (!d->python_ready)
		doctor_add(
			d, DOCTOR_WARNING,
			TEXT("%s cannot read text and chats: numpy, tokenizers or jinja2 is "
			     "missing; "
			     "token files need none",
			     d->python),
			TEXT("moesaic data --model DIR --data FILE   (it says what to install)"));
}

static void judge_memory(struct doctor *d)
{
	const struct doctor_system *s = &d->system;

	if (!strcmp(s->huge_pages, "never"))
		doctor_add(d, DOCTOR_WARNING, TEXT("huge pages are off: weights are read slower"),
			   TEXT("echo madvise | sudo tee "
				"/sys/kernel/mm/transparent_hugepage/enabled"));
	if (s->available >= 0 && s->available < LITTLE_MEMORY)
		doctor_add(
			d, DOCTOR_WARNING,
			TEXT("only %.1f GiB of memory are available", (double)s->available / GIB),
			TEXT("free -h"));
	if (s->memory_limit >= 0 && s->memory_limit < s->memory)
		doctor_add(d, DOCTOR_NOTE,
			   TEXT("the control group may use %.1f GiB of memory",
				(double)s->memory_limit / GIB),
			   TEXT("moesaic train --memory-limit %lldMB",
				(long long)(s->memory_limit / 1000000)));
	if (s->address_space >= 0 && s->address_space < s->memory)
		doctor_add(d, DOCTOR_WARNING,
			   TEXT("ulimit -v allows %.1f GiB of addresses",
				(double)s->address_space / GIB),
			   TEXT("ulimit -v unlimited"));
}

void doctor_diagnose(struct doctor *d)
{
	judge_cpus(d);
	judge_memory(d);
	judge_nodes(d);
	judge_python(d);
	judge_file(d);
}
