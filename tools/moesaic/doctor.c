/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic doctor: this machine, what the library makes of it, and what to type about problems. */
#include "tools/moesaic/commands.h"
#include "tools/moesaic/doctor.h"
#include "tools/moesaic/python.h"
#include "tools/moesaic/start_noise.h"

#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static const struct option what[] = {
	{ "calibrate", OPTION_FLAG, OPTION_COMMON | OPTION_TRANSIENT, NULL, NULL,
	  "measure the rates that cost models use, about 20 s, and keep them", 0, 0, "", NULL },
	{ "quick", OPTION_FLAG, OPTION_COMMON | OPTION_TRANSIENT, NULL, NULL,
	  "calibrate in a tenth of the time", 0, 0, "", NULL },
	{ .name = NULL },
};

static const struct option_group groups[] = {
	{ "Doctor", what },
	{ "General", options_general },
	{ NULL, NULL },
};

const char *doctor_level_name(enum doctor_level level)
{
	static const char *const names[] = { "note", "warning", "error" };

	return names[level];
}

void doctor_add(struct doctor *d, enum doctor_level level, char *text, char *type)
{
	if (d->n_problems == DOCTOR_PROBLEMS) {
		free(text);
		free(type);
		return;
	}
	d->problem[d->n_problems++] = (struct doctor_problem){ level, text, type };
}

static int count(const struct doctor *d, enum doctor_level level)
{
	int n = 0;

	for (int i = 0; i < d->n_problems; i++)
		n += d->problem[i].level == level;
	return n;
}

static void free_problems(struct doctor *d)
{
	for (int i = 0; i < d->n_problems; i++) {
		free(d->problem[i].text);
		free(d->problem[i].type);
	}
}

/* ---- calibration ---- */

struct course {
	bool terminal;
	double start, last; /* seconds; last: when something was shown */
};

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

/* A line in place on a terminal, else one every 5 seconds. */
static void show_course(const char *step, int64_t done, int64_t total, void *user)
{
	struct course *c = user;
	double t = now(), elapsed = t - c->start, left = (double)(total - done) * 1e-3;

	if (done > 0 && elapsed > 1)
		left = elapsed / (double)done * (double)(total - done);
	if (!c->terminal && c->last > 0 && t - c->last < 5)
		return;
	c->last = t;
	fprintf(stderr, "%smoesaic doctor: %3.0f %%, %2.0f s left: %s%s", c->terminal ? "\r" : "",
		total ? 100.0 * (double)done / (double)total : 100.0, left, step,
		c->terminal ? "\033[K" : "\n");
}

static int calibrate(const struct settings *s)
{
	struct course course = { .terminal = isatty(STDERR_FILENO), .start = now() };
	struct moe_calibrate_params p = { .struct_size = sizeof p,
					  .quick = settings_on(s, "quick"),
					  .user = &course };
	double load;
	enum moe_status st;

	if (getloadavg(&load, 1) == 1 && load > 1)
		cli_note("warning: other processes are running (load %.1f): rates will be too low",
			 load);
	if (!settings_on(s, "quiet"))
		p.progress = show_course;
	st = moe_machine_calibrate(&p, NULL);
	if (p.progress && course.terminal)
		fputs("\r\033[K", stderr);
	return cli_status(st);
}

/* ---- the report ---- */

/* The proof that it runs: an engine as train would open it. */
static void try_engine(struct doctor *d)
{
	struct moe_engine_params p = { .struct_size = sizeof p };
	struct moe_engine_info info = { .struct_size = sizeof info };
	struct moe_engine *e = NULL;
	enum moe_status st;

	start_noise_begin();
	st = moe_engine_open(&p, &e);
	start_noise_end();
	if (st == MOE_OK && moe_engine_get_info(e, &info) == MOE_OK) {
		d->workers = info.workers;
		d->parts = info.parts;
	} else {
		doctor_add(d, DOCTOR_ERROR, cli_format("%s", moe_last_error()),
			   cli_format("env | grep -E 'STARPU|HWLOC|MOESAIC'"));
	}
	moe_engine_close(e);
}

static int run(struct settings *s, int argc, char **argv)
{
	struct doctor d = { .machine = { .struct_size = sizeof d.machine } };
	int rc = 0, errors;

	(void)argc, (void)argv;
	if (settings_on(s, "quick") && !settings_on(s, "calibrate"))
		return cli_fail(CLI_USAGE, "--quick goes with --calibrate");
	doctor_look(&d.system); /* before there is a load of our own */
	if (settings_on(s, "calibrate"))
		rc = calibrate(s);
	if (!rc)
		rc = cli_status(moe_machine_describe(&d.machine));
	if (rc)
		return rc;
	moe_log_set(NULL, NULL); /* what it would say is in the report */
	try_engine(&d);
	d.python_ready = python_ready(&d.python);
	doctor_diagnose(&d);
	if (settings_on(s, "json"))
		doctor_print_json(&d);
	else
		doctor_print_text(&d, settings_on(s, "calibrate"));
	errors = count(&d, DOCTOR_ERROR);
	free_problems(&d);
	free(d.python);
	if (errors)
		return cli_fail(CLI_FAILED, "%d problem%s of this machine must be solved first",
				errors, errors == 1 ? "" : "s");
	return 0;
}

const struct command command_doctor = {
	.name = "doctor",
	.summary = "checks this machine, and what to do about it",
	.groups = groups,
	.run = run,
};
