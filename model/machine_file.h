/* SPDX-License-Identifier: Apache-2.0 */
/* The file of a calibration: JSON, several kernel tables of one machine. */
#ifndef MOE_MODEL_MACHINE_FILE_H
#define MOE_MODEL_MACHINE_FILE_H

#include "engine/machine.h"

/* machine.rates is unused: the tables are isa[0..n_isas). */
struct moe_machine_rates_file {
	struct moe_machine machine;
	struct moe_rates isa[MOE_MACHINE_ISAS];
	int n_isas;
};

/*
 * Where the file is: MOESAIC_MACHINE, else moesaic/machine.json below XDG_CACHE_HOME or ~/.cache.
 * *path NULL: MOESAIC_MACHINE is empty, or there is no home. moe_free *path; named: by
 * MOESAIC_MACHINE. MOE_ERR_NOMEM.
 */
enum moe_status moe_machine_file_path(char **path, bool *named);

/* MOE_ERR_IO, or MOE_ERR_FORMAT naming file and field: every rate is finite and above 0. */
enum moe_status moe_machine_file_read(const char *path, struct moe_machine_rates_file *out);
/* Makes the folder; the old file stays until the new one is complete. */
enum moe_status moe_machine_file_write(const char *path, const struct moe_machine_rates_file *f);

/* Makes the folder and a file in it, which is gone again: before a long measurement. */
enum moe_status moe_machine_file_try(const char *path);

/* Whether the file is of this CPU; else *why (moe_free) says of which. */
bool moe_machine_file_fits(const struct moe_machine_rates_file *f, char **why);
/* The table's rates, NULL: it was not calibrated. */
const struct moe_rates *moe_machine_file_rates(const struct moe_machine_rates_file *f,
					       const char *isa);

#endif
