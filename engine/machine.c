/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/machine.h"
#include "engine/points.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/utsname.h>
#include <unistd.h>

/* ---- which machine ---- */

/* What /proc/cpuinfo says of the first CPU; "" where it has no such line. */
static struct {
	char vendor[32], family[16], model[16], name[96], mhz[32];
} cpu;
static pthread_once_t cpu_once = PTHREAD_ONCE_INIT;

/* The text behind "key : " where line begins so, else NULL. */
static char *text_behind(char *line, const char *key)
{
	size_t n = strlen(key);

	if (strncmp(line, key, n))
		return NULL;
	line += n;
	line += strspn(line, " \t");
	if (*line++ != ':')
		return NULL;
	line += strspn(line, " \t");
	line[strcspn(line, "\n")] = 0;
	return line;
}

static void read_cpu(void)
{
	const struct {
		const char *key;
		char *to;
		size_t size;
	} fields[] = {
		{ "vendor_id", cpu.vendor, sizeof cpu.vendor }, { "cpu family", cpu.family, sizeof cpu.family },
		{ "model", cpu.model, sizeof cpu.model },	{ "model name", cpu.name, sizeof cpu.name },
		{ "cpu MHz", cpu.mhz, sizeof cpu.mhz },
	};
	FILE *f = fopen("/proc/cpuinfo", "re");
	size_t missing = MOE_COUNT(fields);
	char line[256];

	while (f && missing && fgets(line, sizeof line, f))
		for (size_t i = 0; i < MOE_COUNT(fields); i++) {
			char *text = *fields[i].to ? NULL : text_behind(line, fields[i].key);

			if (!text || !*text)
				continue;
			snprintf(fields[i].to, fields[i].size, "%s", text);
			missing--;
		}
	if (f)
		fclose(f);
}

char *moe_machine_cpu(char *buf, size_t size)
{
	const char *name = cpu.name;
	struct utsname u;

	pthread_once(&cpu_once, read_cpu);
	if (!*name) /* not an x86 */
		name = uname(&u) ? "unknown" : u.machine;
	/* hypervisors shorten the name; these two they leave alone */
	if (*cpu.family && *cpu.model)
		snprintf(buf, size, "%s (family %s, model %s)", name, cpu.family, cpu.model);
	else
		snprintf(buf, size, "%s", name);
	return buf;
}

int moe_machine_cpus(void)
{
	long n = sysconf(_SC_NPROCESSORS_ONLN);

	return n > 0 ? (int)n : 1;
}

double moe_machine_clock_guess(void)
{
	FILE *f = fopen("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "re");
	double khz = 0, ghz = 0;

	if (f) { /* whole kHz, the same in every locale */
		if (fscanf(f, "%lf", &khz) == 1)
			ghz = khz * 1e-6;
		fclose(f);
	}
	pthread_once(&cpu_once, read_cpu);
	if (!(ghz > 0.2))
		ghz = moe_strtod(cpu.mhz, NULL) * 1e-3;
	return ghz > 0.2 && ghz < 20 ? ghz : 2.5;
}

/* ---- guesses ---- */

/*
 * Share of the peak by rows, measured on a Zen 4 core with weights in cache: the least of four shapes. sgemm: OpenBLAS
 * with bf16 expanded in each call, against 32 flop per cycle.
 */
static const double packed_share[MOE_GEMM_DIRECTIONS][MOE_RATE_POINTS] = {
	{ .30, .60, .90, .96, .97, .97, .97, .96, .96 },
	{ .30, .60, .78, .92, .92, .93, .90, .93, .93 },
};
static const double sgemm_share[MOE_RATE_POINTS] = { .03, .06, .11, .19, .33, .48, .62, .74, .82 };
/* c, on a Zen core: what widens the weights is plain C too, and weighs more where few rows share it. */
static const double c_share[MOE_GEMM_DIRECTIONS][MOE_RATE_POINTS] = {
	{ .19, .34, .47, .64, .84, .88, .90, .90, .90 },
	{ .33, .50, .55, .80, .93, .93, .95, .95, .95 },
};
/* A tile has 16 rows, used or not; loads bound it at half its peak. */
static const double tile_share[MOE_RATE_POINTS] = { .03, .06, .12, .25, .5, .5, .5, .5, .5 };

/* Flops per cycle of one core; vendors' optimisation manuals, the narrower where models differ. */
static const struct {
	const char *isa;
	double flops_per_cycle;
	const double *share[MOE_GEMM_DIRECTIONS];
} tables[] = {
	{ "ref", 32, { sgemm_share, sgemm_share } },	  /* two 8-wide FMA */
	{ "c", 8, { c_share[0], c_share[1] } },		  /* one 4-wide mul and add */
	{ "avx2", 32, { packed_share[0], packed_share[1] } },
	{ "avx512f", 32, { packed_share[0], packed_share[1] } }, /* Zen 4; 64 with two units */
	{ "avx512_bf16", 64, { packed_share[0], packed_share[1] } },
	{ "amx", 1024, { tile_share, tile_share } },
};

/*
 * Zen and Zen+ (family 17h up to model 2fh; Hygon's are family 18h) split 256-bit FMA into two halves: 16 flop per
 * cycle where others that have AVX2 do 32.
 */
static bool has_half_fma(void)
{
	pthread_once(&cpu_once, read_cpu);
	return !strcmp(cpu.vendor, "HygonGenuine") ||
	       (!strcmp(cpu.vendor, "AuthenticAMD") && atoi(cpu.family) == 0x17 && atoi(cpu.model) < 0x30);
}

void moe_rates_defaults(const char *isa, double clock_ghz, struct moe_rates *out)
{
	size_t at = 1; /* an unknown table is taken for portable C */
	double per_cycle;

	for (size_t i = 0; i < MOE_COUNT(tables); i++)
		if (!strcmp(tables[i].isa, isa))
			at = i;
	per_cycle = tables[at].flops_per_cycle;
	if (per_cycle == 32 && has_half_fma())
		per_cycle /= 2;
	memset(out, 0, sizeof *out);
	snprintf(out->isa, sizeof out->isa, "%s", isa);
	for (int d = 0; d < MOE_GEMM_DIRECTIONS; d++)
		for (int i = 0; i < MOE_RATE_POINTS; i++)
			out->gemm_gflops[d][i] =
				per_cycle * clock_ghz * tables[at].share[d][i];
	out->pack_gbps = 10; /* measured: just below memcpy */
}

void moe_machine_defaults(const char *isa, double clock_ghz, int cpus, struct moe_machine *out)
{
	memset(out, 0, sizeof *out);
	moe_machine_cpu(out->cpu, sizeof out->cpu);
	out->cpus = out->workers = MOE_MAX(cpus, 1);
	out->clock_ghz = clock_ghz;
	/* measured: 29-32 for one Zen 4 core, 47-57 for two; 460 for 96 cores of a server */
	out->read_gbps = 25;
	out->read_all_gbps = cpus > 1 ? MOE_MAX(1.6 * out->read_gbps, 4.8 * cpus) : out->read_gbps;
	out->copy_gbps = 12.5;
	/* measured in a graph whose tasks stream megabytes, on one and on two workers */
	out->task_us = 6;
	out->task_all_us = cpus > 1 ? 11 : 6;
	out->submit_us = 6;
	moe_rates_defaults(isa, clock_ghz, &out->rates);
}

/* ---- the process's ---- */

/* Readers hold plain pointers: what was selected once stays. Few differ, so equal ones are shared. */
struct kept {
	struct moe_machine machine;
	struct kept *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kept *all;
static const struct moe_machine *_Atomic selected;
static struct moe_machine guessed;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void guess(void)
{
	moe_machine_defaults("ref", moe_machine_clock_guess(), moe_machine_cpus(), &guessed);
}

const struct moe_machine *moe_machine(void)
{
	const struct moe_machine *m = selected;

	if (m)
		return m;
	pthread_once(&once, guess);
	return &guessed;
}

enum moe_status moe_machine_set(const struct moe_machine *m)
{
	struct kept *k;

	pthread_mutex_lock(&lock);
	for (k = all; k && memcmp(&k->machine, m, sizeof *m); k = k->next)
		;
	if (!k) {
		k = moe_alloc(1, sizeof *k);
		if (k) {
			memcpy(&k->machine, m, sizeof *m);
			k->next = all;
			all = k;
		}
	}
	if (k)
		selected = &k->machine;
	pthread_mutex_unlock(&lock);
	return k ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "no memory for the machine's rates");
}
