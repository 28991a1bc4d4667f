/* SPDX-License-Identifier: Apache-2.0 */
/* The machine's rates: from the calibration file or guessed. Private to api/. */
#ifndef MOE_API_MACHINE_H
#define MOE_API_MACHINE_H

#include "engine/engine.h"
#include "model/machine_file.h"

/*
 * Chooses the kernel table that the engine's isa, MOESAIC_ISA or the CPU names, and the rates that
 * go with it. Called wherever something is opened that submits. MOE_ERR_CONFIG: no such table.
 * MOE_ERR_IO, MOE_ERR_FORMAT: the file that MOESAIC_MACHINE names is bad; any other bad file is a
 * warning.
 */
enum moe_status moe_machine_use(const struct moe_engine *e);

/* ---- between api/machine.c and api/calibrate*.c ---- */

/* As moe_machine_describe where path holds f. */
enum moe_status moe_machine_describe_file(const struct moe_machine_rates_file *f, const char *path,
					  struct moe_machine_info *out);

/* Progress of a calibration. */
struct moe_calibration {
	const struct moe_calibrate_params *params;
	struct moe_machine_rates_file file;
	int64_t done, total; /* planned milliseconds */
};
/* What is measured now, and for how many milliseconds of the plan; returns seconds to use. */
double moe_calibration_step(struct moe_calibration *c, const char *what, int ms);

/* Each adds what it measures to c->file; planned milliseconds of all of it. */
enum moe_status moe_calibrate_tasks(struct moe_calibration *c);
int moe_calibrate_tasks_ms(void);
enum moe_status moe_calibrate_tables(struct moe_calibration *c);
int moe_calibrate_tables_ms(void);

#endif
