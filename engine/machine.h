/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this machine can do: rates that cost models read. Guessed by rule (moe_machine_defaults) or
 * measured (moe_machine_calibrate, file: model/machine_file.h). Knows nothing of MoE.
 *
 * GB/s are 1e9 bytes, GFLOP/s count a multiply-add as two. Rates are of one core where nothing else
 * is said. moe_machine() is what the process uses; it is never NULL and never changes under a
 * reader: selecting another one leaves the old one alive.
 */
#ifndef MOE_ENGINE_MACHINE_H
#define MOE_ENGINE_MACHINE_H

#include "engine/base.h"

#define MOE_RATE_POINTS MOE_MACHINE_POINTS /* rows 1, 2, 4, ... 256 */

/* y = x W^T, or dx = dy W, both from one packed W. */
enum moe_gemm { MOE_GEMM_FORWARD = 0, MOE_GEMM_BACKWARD, MOE_GEMM_DIRECTIONS };

/* Of one kernel table. */
struct moe_rates {
	char isa[MOE_MACHINE_NAME];
	bool measured;
	double peak_gflops; /* of its best multiply-add loop; 0: the table has none */
	double gemm_gflops[MOE_GEMM_DIRECTIONS][MOE_RATE_POINTS]; /* weights in cache */
	double pack_gbps; /* bytes of source that are packed */
};

struct moe_machine {
	char cpu[MOE_MACHINE_TEXT];  /* moe_machine_cpu() */
	int cpus;		     /* moe_machine_cpus() */
	char date[MOE_MACHINE_NAME]; /* of calibration; "": guessed */
	double load;		     /* of the machine while it was calibrated */
	double clock_ghz;
	double read_gbps, read_all_gbps; /* DRAM, one core and all together */
	double copy_gbps;		 /* bytes copied, so twice as many move */
	double task_us, task_all_us;	 /* overhead of a task: one worker, each of all workers */
	double submit_us;		 /* of the submitting thread */
	struct moe_rates rates;		 /* of the table in use */
	int workers;			 /* that share read_all_gbps */
};

/* Rows of point i: 1 << i. */
static inline int moe_rate_rows(int i)
{
	return 1 << i;
}

/* "AMD EPYC (family 25, model 17)", into buf; the key of calibrations with the number of CPUs. */
char *moe_machine_cpu(char *buf, size_t size);
int moe_machine_cpus(void);
/* From cpufreq or /proc/cpuinfo; 2.5 where neither says. */
double moe_machine_clock_guess(void);

/* Guesses for a table on a CPU of this clock: docs/cost-model.md has the rules. */
void moe_machine_defaults(const char *isa, double clock_ghz, int cpus, struct moe_machine *out);
void moe_rates_defaults(const char *isa, double clock_ghz, struct moe_rates *out);

const struct moe_machine *moe_machine(void);
/* Makes a copy of m the process's machine. MOE_ERR_NOMEM. */
enum moe_status moe_machine_set(const struct moe_machine *m);

#endif
