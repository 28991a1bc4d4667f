/* SPDX-License-Identifier: Apache-2.0 */
/* The machine's rates: guesses, the calibration file and what is wrong with it, calibration. */
#include "tests/machine_check.h"

#include "api/block.h"
#include "codelets/kernels/packed/tiles.h"
#include "engine/roof.h"
#include "model/file.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>

const char moe_suite_name[] = "machine";

static bool positive(double v)
{
	return isfinite(v) && v > 0;
}

static void guesses(void)
{
	static const char *const isas[] = {
		"ref", "c", "avx2", "avx512f", "avx512_bf16", "amx", "of a later version"
	};
	struct moe_machine m;

	for (size_t i = 0; i < MOE_COUNT(isas); i++) {
		moe_machine_defaults(isas[i], 2.5, 96, &m);
		CHECK(!strcmp(m.rates.isa, isas[i]));
		CHECK(!m.rates.measured && !*m.date && *m.cpu);
		CHECK(positive(m.read_gbps) && positive(m.read_all_gbps) && positive(m.copy_gbps));
		CHECK(m.read_all_gbps >= m.read_gbps && m.read_all_gbps / 96 < m.read_gbps);
		CHECK(positive(m.task_us) && positive(m.task_all_us) && positive(m.submit_us));
		CHECK(positive(m.rates.pack_gbps));
		for (int d = 0; d < MOE_GEMM_DIRECTIONS; d++)
			for (int j = 0; j < MOE_RATE_POINTS; j++)
				CHECK(positive(m.rates.gemm_gflops[d][j]));
	}
	moe_machine_defaults("ref", 2.5, 1, &m);
	CHECK(m.read_all_gbps == m.read_gbps);
	CHECK(moe_machine()->workers >= 1);
	CHECK(moe_machine_clock_guess() > 0.2 && moe_machine_cpus() >= 1);
}

static void same_rates(const struct moe_rates *a, const struct moe_rates *b)
{
	CHECK(!strcmp(a->isa, b->isa) && b->measured);
	CHECK(fabs(a->pack_gbps / b->pack_gbps - 1) < 1e-4);
	CHECK(fabs(a->peak_gflops - b->peak_gflops) < 1e-2);
	for (int d = 0; d < MOE_GEMM_DIRECTIONS; d++)
		for (int i = 0; i < MOE_RATE_POINTS; i++)
			CHECK(fabs(a->gemm_gflops[d][i] / b->gemm_gflops[d][i] - 1) < 1e-4);
}

static int entries(const char *dir)
{
	DIR *d = opendir(dir);
	int n = 0;

	while (d && readdir(d))
		n++;
	if (d)
		closedir(d);
	return n - 2;
}

static void written_and_read(void)
{
	struct moe_machine_rates_file f = claimed("ref", 2), got;
	const char *path = machine_path("deep/er/machine.json");
	char *why;

	f.n_isas = 2;
	moe_rates_defaults("avx2", 3, &f.isa[1]);
	f.isa[1].peak_gflops = 96;
	CHECK_OK(moe_machine_file_write(path, &f));
	CHECK_OK(moe_machine_file_write(path, &f)); /* over the old one */
	CHECK(entries(machine_path("deep/er")) == 1);
	CHECK_OK(moe_machine_file_read(machine_path("deep/er/machine.json"), &got));
	CHECK(got.n_isas == 2 && !strcmp(got.machine.date, f.machine.date));
	CHECK(!strcmp(got.machine.cpu, f.machine.cpu) && got.machine.cpus == f.machine.cpus);
	CHECK(got.machine.read_gbps == f.machine.read_gbps && got.machine.load == 0.25);
	CHECK(got.machine.task_all_us == f.machine.task_all_us);
	same_rates(&f.isa[0], &got.isa[0]);
	same_rates(&f.isa[1], moe_machine_file_rates(&got, "avx2"));
	CHECK(moe_machine_file_rates(&got, "amx") == NULL);
	CHECK(moe_machine_file_fits(&got, &why) && !why);
	got.machine.cpus++;
	CHECK(!moe_machine_file_fits(&got, &why) && strstr(why, got.machine.cpu));
	moe_free(why);
	CHECK_ERROR(moe_machine_file_write(machine_path("deep/er/machine.json/under/a.json"), &f),
		    MOE_ERR_IO, "machine.json");
	CHECK_OK(moe_machine_file_read(machine_path("deep/er/machine.json"), &got));
}

/* The text of a good file with the first `from` replaced; reading it must name `field`. */
static void damage(const char *good, const char *from, const char *to, const char *field)
{
	const char *at = strstr(good, from), *path = machine_path("damaged.json");
	char text[8192];
	struct moe_machine_rates_file got;

	if (!CHECK(at != NULL))
		return;
	snprintf(text, sizeof text, "%.*s%s%s", (int)(at - good), good, to, at + strlen(from));
	write_text(path, text);
	CHECK_ERROR(moe_machine_file_read(path, &got), MOE_ERR_FORMAT, field);
	CHECK(strstr(moe_last_error(), "damaged.json") != NULL);
}

static void damaged_fields(void)
{
	static const char *const keys[] = {
		"clock_ghz",   "read_gbps", "read_all_gbps", "copy_gbps",      "task_us",
		"task_all_us", "submit_us", "pack_gbps",     "forward_gflops", "backward_gflops",
		"cpu",	       "cpus",	    "date",	     "format",	       "isa"
	};
	static const char *const bad[] = { "0", "-1", "\"3\"", "null", "1e999", "{}" };
	struct moe_machine_rates_file f = claimed("ref", 1);
	const char *path = machine_path("good.json");
	char *good, from[64], to[128];
	size_t bytes;

	CHECK_OK(moe_machine_file_write(path, &f));
	CHECK_OK(moe_file_read(path, 1 << 20, &good, &bytes));
	for (size_t i = 0; i < MOE_COUNT(keys); i++) {
		snprintf(from, sizeof from, "\"%s\"", keys[i]);
		snprintf(to, sizeof to, "\"%s_\"", keys[i]);
		damage(good, from, to, keys[i]);
		for (size_t j = 0; j < MOE_COUNT(bad); j++) {
			/* the value goes to a key that comes first and wins */
			snprintf(to, sizeof to, "\"%s\": %s, \"other\"", keys[i], bad[j]);
			if ((!strcmp(keys[i], "isa") && !strcmp(bad[j], "{}")) ||
			    ((!strcmp(keys[i], "cpu") || !strcmp(keys[i], "date")) &&
			     bad[j][0] == '"'))
				continue; /* no table is fine, and any text */
			damage(good, from, to, keys[i]);
		}
	}
	damage(good, "moesaic-machine-1", "moesaic-machine-2", "moesaic-machine-2");
	damage(good, "\"forward_gflops\":\t[", "\"forward_gflops\":\t[1, ", "forward_gflops");
	damage(good, "\"ref\":\t{", "\"ref\":\t3, \"x\":\t{", "isa.ref is not an object");
	damage(good, "\"ref\":", "\"a name of a table that no table of kernels will ever have, for it is far too long\":",
	       "isa has too many or too long names");
	damage(good, "\"forward_gflops\":\t[",
	       "\"forward_gflops\":\t[0, 1, 1, 1, 1, 1, 1, 1, 1], \"x\": [",
	       "isa.ref.forward_gflops[0]");
	for (size_t n = 0; n + 3 < bytes; n += bytes / 7) { /* cut short */
		struct moe_machine_rates_file got;

		good[n] = 0;
		write_text(machine_path("damaged.json"), good);
		CHECK_ERROR(moe_machine_file_read(machine_path("damaged.json"), &got),
			    MOE_ERR_FORMAT, "damaged.json");
		good[n] = ' ';
	}
	moe_free(good);
}

/* ---- where it is, and who uses it ---- */

static void check_path(const char *want, bool want_named)
{
	bool named;
	char *path;

	CHECK_OK(moe_machine_file_path(&path, &named));
	CHECK(named == want_named);
	CHECK(want ? path && !strcmp(path, want) : !path);
	moe_free(path);
}

static void path_child(const void *arg)
{
	(void)arg;
	setenv("MOESAIC_MACHINE", "/x/y.json", 1);
	setenv("XDG_CACHE_HOME", "/cache", 1);
	setenv("HOME", "/home/me", 1);
	check_path("/x/y.json", true);
	setenv("MOESAIC_MACHINE", "", 1);
	check_path(NULL, false);
	unsetenv("MOESAIC_MACHINE");
	check_path("/cache/moesaic/machine.json", false);
	setenv("XDG_CACHE_HOME", "relative", 1);
	check_path("/home/me/.cache/moesaic/machine.json", false);
	unsetenv("XDG_CACHE_HOME");
	unsetenv("HOME");
	check_path(NULL, false);
}

static void paths(void)
{
	in_child("where the file is", path_child, NULL);
}

static char logged[2048];
static int n_logged;

static void keep_log(enum moe_log_level level, const char *text, void *user)
{
	(void)user;
	if (level < MOE_LOG_WARNING)
		return;
	n_logged++;
	snprintf(logged, sizeof logged, "%s", text);
}

/* Opens a block, which reads the file. */
static enum moe_status open_block(struct moe_engine *e, int *groups)
{
	struct moe_block_params p = { .struct_size = sizeof p,
				      .hidden = 64,
				      .intermediate = 64,
				      .experts = 64,
				      .experts_per_token = 4,
				      .expected_tokens = 512 };
	struct moe_block *b;

	MOE_TRY(moe_block_create(e, &p, &b));
	*groups = b->layer.G;
	moe_block_destroy(b);
	return MOE_OK;
}

static enum moe_machine_file described(void)
{
	struct moe_machine_info info = { .struct_size = sizeof info };

	CHECK_OK(moe_machine_describe(&info));
	CHECK(info.n_isas > 0 && info.cores > 0 && info.starpu_max_workers > 0);
	if (info.file_state == MOE_MACHINE_FILE_USED)
		CHECK(!strcmp(info.date, "2026-01-02 03:04:05 UTC"));
	else
		CHECK(!*info.date);
	return info.file_state;
}

static void check_bad_files(struct moe_engine *e)
{
	struct moe_machine_rates_file f = claimed("ref", 1);
	int groups;

	/* damaged: named, it is an error; else a warning, once */
	write_text(machine_path("moesaic/machine.json"), "{\"format\": 1}");
	setenv("MOESAIC_MACHINE", machine_path("moesaic/machine.json"), 1);
	CHECK_ERROR(open_block(e, &groups), MOE_ERR_FORMAT, "format");
	CHECK(strstr(moe_last_error(), "machine.json") != NULL);
	CHECK(described() == MOE_MACHINE_FILE_BAD);
	unsetenv("MOESAIC_MACHINE");
	n_logged = 0;
	CHECK_OK(open_block(e, &groups));
	CHECK_OK(open_block(e, &groups));
	CHECK(n_logged == 1 && strstr(logged, "machine.json") && strstr(logged, "format"));
	setenv("MOESAIC_MACHINE", machine_path("absent.json"), 1);
	CHECK_ERROR(open_block(e, &groups), MOE_ERR_IO, "absent.json");
	unsetenv("MOESAIC_MACHINE");
	/* of another CPU: never used */
	strcpy(f.machine.cpu, "Z80");
	CHECK_OK(moe_machine_file_write(machine_path("moesaic/machine.json"), &f));
	CHECK_OK(open_block(e, &groups));
	CHECK(n_logged == 2 && strstr(logged, "Z80") && !moe_machine()->rates.measured);
	CHECK(described() == MOE_MACHINE_FILE_OTHER);
}

static void use_child(const void *arg)
{
	struct moe_machine_rates_file f = claimed("ref", 1e-3);
	struct moe_engine *e;
	int slow = 0, fast = 0, guessed;

	(void)arg;
	unsetenv("MOESAIC_MACHINE");
	setenv("MOESAIC_ISA", "ref", 1);
	setenv("XDG_CACHE_HOME", moe_test_dir(), 1);
	moe_log_set(keep_log, NULL);
	e = open_with(2, 1, NULL);
	CHECK(described() == MOE_MACHINE_FILE_NONE);
	CHECK_OK(open_block(e, &guessed));
	CHECK(!moe_machine()->rates.measured && moe_machine()->workers == 2);
	/* a slow machine's tasks are long enough with one expert, a fast one's with no number */
	CHECK_OK(moe_machine_file_write(machine_path("moesaic/machine.json"), &f));
	CHECK_OK(open_block(e, &slow));
	CHECK(described() == MOE_MACHINE_FILE_USED);
	CHECK(moe_machine()->rates.measured && n_logged == 0);
	f = claimed("ref", 1e6);
	CHECK_OK(moe_machine_file_write(machine_path("moesaic/machine.json"), &f));
	CHECK_OK(open_block(e, &fast));
	CHECK(slow == 64 && fast == 8);
	/* no rates of this table: guessed at the file's clock, the rest from the file */
	strcpy(f.isa[0].isa, "other");
	CHECK_OK(moe_machine_file_write(machine_path("moesaic/machine.json"), &f));
	CHECK_OK(open_block(e, &fast));
	CHECK(!moe_machine()->rates.measured && moe_machine()->read_gbps == f.machine.read_gbps);
	check_bad_files(e);
	CHECK_OK(moe_engine_close(e));
}

static void use(void)
{
	in_child("which file is used", use_child, NULL);
}

static void no_memory_child(const void *arg)
{
	struct moe_machine_rates_file f = claimed("ref", 1);
	struct moe_engine *e;
	enum moe_status st = MOE_ERR_NOMEM;
	int groups, n = 0;

	(void)arg;
	CHECK_OK(moe_machine_file_write(machine_path("m.json"), &f));
	setenv("MOESAIC_MACHINE", machine_path("m.json"), 1);
	setenv("MOESAIC_ISA", "ref", 1);
	e = open_with(1, 1, NULL);
	for (; n < 60 && st != MOE_OK; n++) {
		moe_alloc_fail_after(n);
		st = open_block(e, &groups);
		moe_alloc_fail_after(-1);
		if (st != MOE_OK && st != MOE_ERR_NOMEM)
			CHECK_OK(st);
		if (n < 3)
			CHECK(st == MOE_ERR_NOMEM);
	}
	CHECK_OK(moe_engine_close(e));
}

static void no_memory(void)
{
	in_child("no memory while the file is read", no_memory_child, NULL);
}

/* ---- measuring ---- */

static void calibrate_child(const void *arg)
{
	struct moe_calibrate_params p = { .struct_size = sizeof p, .quick = 1 };
	struct moe_machine_info info = { .struct_size = sizeof info };
	struct moe_machine_rates_file f;
	struct moe_engine *e;

	(void)arg;
	alarm(200 * SLOW); /* a busy machine takes its time */
	use_starpu_home("calibrate");
	setenv("MOESAIC_MACHINE", machine_path("calibrated/machine.json"), 1);
	CHECK_OK(moe_machine_calibrate(&p, &info));
	CHECK(info.file_state == MOE_MACHINE_FILE_USED && *info.date);
	CHECK(!strcmp(info.file, machine_path("calibrated/machine.json")));
	CHECK_OK(moe_machine_file_read(machine_path("calibrated/machine.json"), &f));
	CHECK(f.n_isas >= 1 && f.machine.clock_ghz > 0.3 && f.machine.clock_ghz < 10);
	CHECK(moe_machine_file_rates(&f, "ref") != NULL);
	e = open_with(2, 1, NULL);
	CHECK_ERROR(moe_machine_calibrate(&p, NULL), MOE_ERR_STATE, "for itself");
	CHECK_OK(moe_engine_close(e));
	p.struct_size = 0;
	CHECK_ERROR(moe_machine_calibrate(&p, NULL), MOE_ERR_ARG, "struct_size");
	info.struct_size = 0;
	CHECK_ERROR(moe_machine_describe(&info), MOE_ERR_ARG, "struct_size");
}

static void calibration(void)
{
	in_child("calibration", calibrate_child, NULL);
}

/* Twice the iterations are twice the flops. */
static void peaks(void)
{
	for (int i = 0; moe_kernels_list[i]; i++) {
		const struct moe_kernels *k = moe_kernels_list[i];
		double flops;

		if (!k->supported() || !k->tiles || !k->tiles->peak)
			continue;
		flops = k->tiles->peak(1 << 12);
		CHECK(flops > 0 && k->tiles->peak(1 << 13) == 2 * flops);
	}
}

static void roofs(void)
{
	cpu_set_t before, after;
	double gbps = 0, value[] = { 5, 1, 4, 2, 3 };

	CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
	CHECK_OK(moe_roof_read(2, 0.1, &gbps));
	CHECK(gbps > 0.1 && gbps < 10000);
	CHECK_OK(moe_roof_copy(0.05, &gbps));
	CHECK(gbps > 0.1);
	CHECK(sched_getaffinity(0, sizeof after, &after) == 0 && CPU_EQUAL(&before, &after));
	CHECK(moe_median(value, 5) == 3 && moe_median(value, 4) == 2.5);
	CHECK(moe_quartile(value, 5, 1) == 2 && moe_quartile(value, 5, 3) == 4);
	CHECK_ERROR(moe_machine_read_roof(-1, &gbps), MOE_ERR_ARG, "-1");
	CHECK_ERROR(moe_machine_read_roof(1, NULL), MOE_ERR_ARG, "roof");
}

const struct moe_test moe_suite_tests[] = {
	{ "guesses", guesses },
	{ "the file, written and read", written_and_read },
	{ "damaged files", damaged_fields },
	{ "where the file is", paths },
	{ "which file is used", use },
	{ "no memory while it is read", no_memory },
	{ "calibration", calibration },
	{ "peaks", peaks },
	{ "roofs", roofs },
	{ NULL, NULL },
};
