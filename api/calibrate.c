/* SPDX-License-Identifier: Apache-2.0 */
/* The course of a calibration: task overhead, memory, kernel tables; then the file. */
#include "api/machine.h"

#include "engine/roof.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

#define CLOCK_MS 300
#define READ_MS 2500
#define COPY_MS 700

double moe_calibration_step(struct moe_calibration *c, const char *what, int ms)
{
	if (c->params->progress)
		c->params->progress(what, c->done, c->total, c->params->user);
	if (c->params->quick)
		ms = MOE_MAX(ms / 10, 1);
	c->done += ms;
	return ms * 1e-3;
}

static enum moe_status measure_memory(struct moe_calibration *c)
{
	struct moe_machine *m = &c->file.machine;

	m->clock_ghz = moe_roof_clock_ghz(moe_calibration_step(c, "clock", CLOCK_MS));
	MOE_TRY(moe_roof_read(1, moe_calibration_step(c, "memory, one core", READ_MS),
			      &m->read_gbps));
	MOE_TRY(moe_roof_read(0, moe_calibration_step(c, "memory, all cores", READ_MS),
			      &m->read_all_gbps));
	/* with one core both are the same thing, measured twice */
	m->read_all_gbps = MOE_MAX(m->read_all_gbps, m->read_gbps);
	return moe_roof_copy(moe_calibration_step(c, "copying", COPY_MS), &m->copy_gbps);
}

static void identify(struct moe_machine *m)
{
	time_t now = time(NULL);
	struct tm utc;

	moe_machine_cpu(m->cpu, sizeof m->cpu);
	m->cpus = m->workers = moe_machine_cpus();
	gmtime_r(&now, &utc);
	strftime(m->date, sizeof m->date, "%Y-%m-%d %H:%M:%S UTC", &utc);
	if (getloadavg(&m->load, 1) != 1)
		m->load = 0;
}

static enum moe_status check_rates(const struct moe_machine_rates_file *f)
{
	const struct moe_machine *m = &f->machine;
	double least = fmin(fmin(m->clock_ghz, m->read_gbps), fmin(m->copy_gbps, m->submit_us));

	least = fmin(least, fmin(m->task_us, m->task_all_us));
	for (int i = 0; i < f->n_isas; i++)
		for (int j = 0; j < MOE_RATE_POINTS; j++)
			least = fmin(least, fmin(f->isa[i].gemm_gflops[MOE_GEMM_FORWARD][j],
						 f->isa[i].gemm_gflops[MOE_GEMM_BACKWARD][j]));
	if (least > 0 && isfinite(least))
		return MOE_OK;
	return moe_fail(MOE_ERR_RUNTIME,
			"a measurement gave %g: the clocks of this machine do "
			"not work",
			least);
}

/* *path (moe_free) is where the file will be; NULL: there is to be none. */
static enum moe_status find_place(const struct moe_calibrate_params *p, char **path)
{
	bool named;

	*path = NULL;
	if (p->no_file)
		return MOE_OK;
	if (p->file) {
		*path = moe_strdup(p->file);
		if (!*path)
			return moe_fail(MOE_ERR_NOMEM, "no memory for a path");
	} else {
		MOE_TRY(moe_machine_file_path(path, &named));
	}
	if (!*path)
		return moe_fail(MOE_ERR_IO, "no place for the file: set HOME, XDG_CACHE_HOME or "
					    "MOESAIC_MACHINE");
	return moe_machine_file_try(*path);
}

enum moe_status moe_machine_calibrate(const struct moe_calibrate_params *params,
				      struct moe_machine_info *out)
{
	struct moe_calibration *c;
	enum moe_status st;
	char *path = NULL;

	if (!params || params->struct_size < sizeof *params)
		return moe_fail(MOE_ERR_ARG, "calibrate params: struct_size is not set");
	c = moe_calloc(1, sizeof *c);
	if (!c)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a calibration");
	c->params = params;
	c->total = CLOCK_MS + 2 * READ_MS + COPY_MS + moe_calibrate_tasks_ms() +
		   moe_calibrate_tables_ms();
	c->total = params->quick ? MOE_MAX(c->total / 10, (int64_t)1) : c->total;
	identify(&c->file.machine);
	MOE_TRY_GOTO(find_place(params, &path), st, out);
	MOE_TRY_GOTO(moe_calibrate_tasks(c), st, out); /* first: it fails where an engine is open */
	MOE_TRY_GOTO(measure_memory(c), st, out);
	MOE_TRY_GOTO(moe_calibrate_tables(c), st, out);
	MOE_TRY_GOTO(check_rates(&c->file), st, out);
	if (params->progress)
		params->progress("done", c->total, c->total, params->user);
	if (path)
		MOE_TRY_GOTO(moe_machine_file_write(path, &c->file), st, out);
	if (out)
		st = moe_machine_describe_file(&c->file, path, out);
out:
	moe_free(path);
	moe_free(c);
	return st;
}

enum moe_status moe_machine_read_roof(int threads, double *gbps)
{
	if (!gbps || threads < 0 || threads > 4096)
		return moe_fail(MOE_ERR_ARG, "read roof: %d threads, or no place for the result",
				threads);
	return moe_roof_read(threads, 1.5, gbps);
}
