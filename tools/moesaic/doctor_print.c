/* SPDX-License-Identifier: Apache-2.0 */
/* The doctor's report, for people and as JSON. */
#include "tools/moesaic/doctor.h"
#include "tools/moesaic/json_line.h"

#include <string.h>

#define GIB ((double)(1 << 30))

static const char *plural(int n)
{
	return n == 1 ? "" : "s";
}

static void print_limit(const char *name, int64_t bytes)
{
	if (bytes < 0)
		printf("%s unlimited", name);
	else
		printf("%s %lld KiB", name, (long long)(bytes / 1024));
}

static void print_tables(const struct moe_machine_info *m)
{
	for (int i = 0; i < m->n_isas; i++) {
		const struct moe_machine_isa *t = &m->isa[i];

		printf("%-14s %-12s %s\n", i ? "" : "kernels", t->name,
		       t->chosen      ? "chosen; MOESAIC_ISA=NAME chooses another"
		       : t->supported ? "possible here"
				      : "not on this CPU");
	}
}

static void print_machine(const struct doctor *d)
{
	const struct moe_machine_info *m = &d->machine;
	const struct doctor_system *s = &d->system;

	printf("CPU            %s, %d online\n", m->cpu, m->cpus);
	printf("topology       %d socket%s, %d NUMA node%s, %d core%s%s\n", m->sockets,
	       plural(m->sockets), m->nodes, plural(m->nodes), m->cores, plural(m->cores),
	       m->fake_topology ? " (not this machine's)" : "");
	printf("StarPU         %d.%d.%d, built for %d workers, %d NUMA nodes, %d buffers",
	       m->starpu_version[0], m->starpu_version[1], m->starpu_version[2],
	       m->starpu_max_workers, m->starpu_max_nodes, m->starpu_max_buffers);
	if (d->workers)
		printf("; starts %d in %d part%s", d->workers, d->parts, plural(d->parts));
	putchar('\n');
	print_tables(m);
	printf("memory         %.1f GiB available of %.1f; huge pages: %s\n",
	       (double)s->available / GIB, (double)s->memory / GIB,
	       *s->huge_pages ? s->huge_pages : "unknown");
	for (int i = 0; s->n_nodes > 1 && i < s->n_nodes; i++)
		printf("  node %-7d %.1f GiB free of %.1f\n", i, (double)s->node_free[i] / GIB,
		       (double)s->node_memory[i] / GIB);
	printf("load           %.2f; cpufreq governor: %s\n", s->load,
	       *s->governor ? s->governor : "unknown");
	printf("limits         ");
	print_limit("ulimit -v", s->address_space);
	print_limit(", -l", s->locked);
	if (s->open_files >= 0)
		printf(", -n %lld", (long long)s->open_files);
	putchar('\n');
	printf("Python         %s: %s\n", d->python,
	       d->python_ready ? "reads text and chats" : "its packages are missing");
}

static void print_rates(const struct moe_machine_info *m)
{
	printf("\n%-28s", "GFLOP/s of one core, rows");
	for (int i = 0; i < MOE_MACHINE_POINTS; i++)
		printf(" %6d", 1 << i);
	putchar('\n');
	for (int i = 0; i < m->n_isas; i++) {
		const struct moe_machine_isa *t = &m->isa[i];

		if (!t->supported)
			continue;
		for (int d = 0; d < 2; d++) {
			const double *rate = d ? t->backward_gflops : t->forward_gflops;
			char name[48];

			snprintf(name, sizeof name, "%s %s%s", t->name, d ? "backward" : "forward",
				 t->measured ? "" : " (guess)");
			printf("  %-26s", name);
			for (int j = 0; j < MOE_MACHINE_POINTS; j++)
				printf(" %6.1f", rate[j]);
			putchar('\n');
		}
		printf("  %-26s packing %.1f GB/s", "", t->pack_gbps);
		if (t->peak_gflops > 0)
			printf(", peak %.1f GFLOP/s, %.1f flop per cycle", t->peak_gflops,
			       t->peak_gflops / m->clock_ghz);
		putchar('\n');
	}
	putchar('\n');
}

static void print_costs(const struct moe_machine_info *m)
{
	if (m->file_state == MOE_MACHINE_FILE_USED)
		printf("rates          calibrated %s: %s\n", m->date, m->file);
	else
		printf("rates          guessed%s%s\n", *m->file ? "; --calibrate writes " : "",
		       m->file);
	printf("  clock        %.2f GHz\n", m->clock_ghz);
	printf("  DRAM         one core reads %.1f GB/s, all together %.1f; copies %.1f\n",
	       m->read_gbps, m->read_all_gbps, m->copy_gbps);
	printf("  a task       %.1f us on one worker, %.1f on each of all; submission %.1f us\n",
	       m->task_us, m->task_all_us, m->submit_us);
}

void doctor_print_text(const struct doctor *d, bool rates)
{
	print_machine(d);
	print_costs(&d->machine);
	if (rates)
		print_rates(&d->machine);
	for (int i = 0; i < d->n_problems; i++)
		printf("%-14s %s\n%-14s type: %s\n", doctor_level_name(d->problem[i].level),
		       d->problem[i].text, "", d->problem[i].type);
	if (!d->n_problems)
		printf("no problems\n");
}

/* ---- JSON ---- */

static void add_list(cJSON *to, const char *name, const double *v)
{
	cJSON_AddItemToObject(to, name, cJSON_CreateDoubleArray(v, MOE_MACHINE_POINTS));
}

static void add_tables(cJSON *o, const struct moe_machine_info *m)
{
	cJSON *tables = cJSON_AddObjectToObject(o, "isa");

	for (int i = 0; i < m->n_isas; i++) {
		const struct moe_machine_isa *t = &m->isa[i];
		cJSON *v = cJSON_AddObjectToObject(tables, t->name);

		cJSON_AddBoolToObject(v, "supported", t->supported);
		cJSON_AddBoolToObject(v, "chosen", t->chosen);
		cJSON_AddBoolToObject(v, "measured", t->measured);
		add_list(v, "forward_gflops", t->forward_gflops);
		add_list(v, "backward_gflops", t->backward_gflops);
		cJSON_AddNumberToObject(v, "pack_gbps", t->pack_gbps);
		if (t->peak_gflops > 0)
			cJSON_AddNumberToObject(v, "peak_gflops", t->peak_gflops);
	}
}

static void add_numbers(cJSON *o, const struct doctor *d)
{
	const struct moe_machine_info *m = &d->machine;
	const struct doctor_system *s = &d->system;
	const struct {
		const char *name;
		double value;
	} numbers[] = {
		{ "cpus", m->cpus },
		{ "cores", m->cores },
		{ "sockets", m->sockets },
		{ "numa_nodes", m->nodes },
		{ "allowed_cpus", s->allowed_cpus },
		{ "starpu_max_workers", m->starpu_max_workers },
		{ "starpu_max_nodes", m->starpu_max_nodes },
		{ "starpu_max_buffers", m->starpu_max_buffers },
		{ "workers", d->workers },
		{ "parts", d->parts },
		{ "memory", (double)s->memory },
		{ "memory_available", (double)s->available },
		{ "load", s->load },
		{ "ulimit_v", (double)s->address_space },
		{ "ulimit_l", (double)s->locked },
		{ "ulimit_n", (double)s->open_files },
		{ "numa_balancing", s->numa_balancing },
		{ "clock_ghz", m->clock_ghz },
		{ "read_gbps", m->read_gbps },
		{ "read_all_gbps", m->read_all_gbps },
		{ "copy_gbps", m->copy_gbps },
		{ "task_us", m->task_us },
		{ "task_all_us", m->task_all_us },
		{ "submit_us", m->submit_us },
	};

	for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
		cJSON_AddNumberToObject(o, numbers[i].name, numbers[i].value);
}

static void add_problems(cJSON *o, const struct doctor *d)
{
	cJSON *list = cJSON_AddArrayToObject(o, "problems");

	for (int i = 0; i < d->n_problems; i++) {
		cJSON *p = cJSON_CreateObject();

		cJSON_AddStringToObject(p, "level", doctor_level_name(d->problem[i].level));
		cJSON_AddStringToObject(p, "text", d->problem[i].text);
		cJSON_AddStringToObject(p, "type", d->problem[i].type);
		cJSON_AddItemToArray(list, p);
	}
}

void doctor_print_json(const struct doctor *d)
{
	static const char *const states[] = {
		[MOE_MACHINE_FILE_NONE] = "none",
		[MOE_MACHINE_FILE_USED] = "used",
		[MOE_MACHINE_FILE_OTHER] = "other",
		[MOE_MACHINE_FILE_BAD] = "bad",
	};
	const struct moe_machine_info *m = &d->machine;
	cJSON *o = cJSON_CreateObject();
	char version[48];

	snprintf(version, sizeof version, "%d.%d.%d", m->starpu_version[0], m->starpu_version[1],
		 m->starpu_version[2]);
	cJSON_AddStringToObject(o, "cpu", m->cpu);
	cJSON_AddStringToObject(o, "starpu_version", version);
	cJSON_AddStringToObject(o, "huge_pages", d->system.huge_pages);
	cJSON_AddStringToObject(o, "governor", d->system.governor);
	cJSON_AddStringToObject(o, "machine_file", m->file);
	cJSON_AddStringToObject(o, "machine_file_state", states[m->file_state]);
	cJSON_AddStringToObject(o, "calibrated", m->date);
	cJSON_AddStringToObject(o, "python", d->python);
	cJSON_AddBoolToObject(o, "python_ready", d->python_ready);
	add_numbers(o, d);
	add_tables(o, m);
	add_problems(o, d);
	json_line(o);
}
