/* SPDX-License-Identifier: Apache-2.0 */
/* Machines for tests of cost models: a Zen 4 as measured, and files that claim something else. */
#ifndef MOE_TESTS_MACHINE_CHECK_H
#define MOE_TESTS_MACHINE_CHECK_H

#include "engine/machine.h"
#include "model/machine_file.h"
#include "tests/child.h"

#include <sys/stat.h>

/* Measured with the bf16 kernels of one Zen 4 core. */
static inline struct moe_machine zen4(void)
{
	struct moe_machine m;

	moe_machine_defaults("avx512_bf16", 3.66, 2, &m);
	m.read_gbps = 30;
	m.read_all_gbps = 50;
	m.copy_gbps = 15;
	m.workers = 2;
	return m;
}

static inline struct moe_machine with_backward(struct moe_machine m, double factor)
{
	for (int i = 0; i < MOE_RATE_POINTS; i++)
		m.rates.gemm_gflops[MOE_GEMM_BACKWARD][i] =
			factor * m.rates.gemm_gflops[MOE_GEMM_FORWARD][i];
	return m;
}

/* All rates of this machine's guess for one table, times a factor. */
static inline struct moe_machine_rates_file claimed(const char *isa, double factor)
{
	struct moe_machine_rates_file f = { .n_isas = 1 };
	struct moe_machine *m = &f.machine;

	moe_machine_defaults(isa, 3.0, moe_machine_cpus(), m);
	strcpy(m->date, "2026-01-02 03:04:05 UTC");
	m->load = 0.25;
	m->read_gbps *= factor;
	m->read_all_gbps *= factor;
	m->copy_gbps *= factor;
	f.isa[0] = m->rates;
	for (int d = 0; d < MOE_GEMM_DIRECTIONS; d++)
		for (int i = 0; i < MOE_RATE_POINTS; i++)
			f.isa[0].gemm_gflops[d][i] *= factor;
	return f;
}

/* The path of a file below the test's folder, in a static buffer. */
static inline const char *machine_path(const char *name)
{
	static char path[4096];

	snprintf(path, sizeof path, "%s/%s", moe_test_dir(), name);
	return path;
}

static inline void write_text(const char *path, const char *text)
{
	FILE *f = fopen(path, "w");

	CHECK(f && fputs(text, f) >= 0 && fclose(f) == 0);
}

#endif
