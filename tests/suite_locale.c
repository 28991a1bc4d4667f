/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library in a program whose locale has a decimal comma: what it writes and reads has points. The locale is made
 * here by localedef, since machines of tests seldom have one.
 */
#include "tests/machine_check.h"
#include "tests/train_check.h"

#include <locale.h>

const char moe_suite_name[] = "locale";

/* Sets it, or skips. */
static bool comma_locale(void)
{
	char command[9000];
	const char *dir = moe_test_dir();
	char text[16];

	snprintf(command, sizeof command, "localedef -i de_DE -f UTF-8 '%s/de_DE.UTF-8' >/dev/null 2>&1", dir);
	if (access("/usr/share/i18n/locales/de_DE", R_OK) || system(command) || setenv("LOCPATH", dir, 1) ||
	    !setlocale(LC_ALL, "de_DE.UTF-8")) {
		moe_test_skip("localedef cannot make de_DE.UTF-8 here");
		return false;
	}
	snprintf(text, sizeof text, "%.1f", .5);
	CU_ASSERT_STRING_EQUAL_FATAL(text, "0,5");
	return true;
}

static char *contents(const char *dir, const char *name)
{
	char path[4300], *text = NULL;
	size_t n;

	snprintf(path, sizeof path, "%s/%s", dir, name);
	CU_ASSERT_EQUAL_FATAL(moe_file_read(path, 1 << 24, &text, &n), MOE_OK);
	return text;
}

/* Steps 1 to 4 in a locale with a comma, 5 and 6 without: the adapter of six steps without. */
static void training(void)
{
	const char *data = token_file("locale.safetensors"), *mixed = out_dir("mixed"), *plain = out_dir("plain");
	struct moe_trainer_params p = params(data, mixed);
	struct moe_train_result r = { .struct_size = sizeof r };
	struct stop s = { .at = 4 };
	char *text, *other, path[4300];
	unsigned char *a, *b;
	size_t n, m;

	if (!comma_locale())
		return;
	p.schedule = "cosine_with_min_lr";
	p.schedule_args = "min_lr_rate=0.25";
	p.max_steps = 6;
	p.save_steps = 2;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_ERR_INTERRUPTED);
	text = contents(mixed, "training_loss.svg");
	CU_ASSERT_PTR_NOT_NULL(strstr(text, "y1=\""));
	for (const char *at = text; (at = strstr(at, "y1=\"")); at++)
		CU_ASSERT_EQUAL(at[4 + strcspn(at + 4, ",\"")], '"');
	moe_free(text);

	setlocale(LC_ALL, "C");
	s.at = 0;
	p.resume = "";
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_OK);
	p.resume = NULL;
	p.output_dir = plain;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_OK);
	for (int i = 0; i < 2; i++) {
		snprintf(path, sizeof path, "%s/adapter_model.safetensors", i ? plain : mixed);
		CU_ASSERT_EQUAL_FATAL(moe_file_read(path, 1 << 24, i ? (char **)&b : (char **)&a, i ? &m : &n), MOE_OK);
	}
	CU_ASSERT(n == m && !memcmp(a, b, n));
	moe_free(a);
	moe_free(b);

	/* the model card, from the whole run in the other locale */
	setlocale(LC_ALL, "de_DE.UTF-8");
	p.overwrite = 1;
	p.output_dir = mixed;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_OK);
	text = contents(mixed, "README.md");
	other = contents(plain, "README.md");
	CU_ASSERT_STRING_EQUAL(text, other);
	moe_free(text);
	moe_free(other);
	setlocale(LC_ALL, "C");
}

static void machine(void)
{
	struct moe_machine_rates_file f = claimed("c", 1.25), back;
	const char *path = machine_path("machine.json");

	if (!comma_locale())
		return;
	CU_ASSERT_EQUAL(moe_machine_file_write(path, &f), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_machine_file_read(path, &back), MOE_OK);
	CU_ASSERT_DOUBLE_EQUAL(back.machine.read_gbps, f.machine.read_gbps, 1e-4 * f.machine.read_gbps);
	setlocale(LC_ALL, "C");
	CU_ASSERT_EQUAL_FATAL(moe_machine_file_read(path, &back), MOE_OK);
	CU_ASSERT_DOUBLE_EQUAL(back.machine.load, 0.25, 1e-9);
}

/* Rates stand as text in a trace's header. */
static void trace(void)
{
	char path[4300], *text;
	struct moe_engine_params ep = { .struct_size = sizeof ep, .workers = 1 };
	struct moe_trace_params tp = { .struct_size = sizeof tp, .file = path };
	struct moe_engine *e;
	size_t n, found = 0;

	if (!comma_locale())
		return;
	snprintf(path, sizeof path, "%s/locale.mxt", moe_test_dir());
	CU_ASSERT_EQUAL_FATAL(moe_engine_open(&ep, &e), MOE_OK);
	CU_ASSERT_EQUAL(moe_trace_start(e, &tp), MOE_OK);
	CU_ASSERT_EQUAL(moe_trace_stop(e, NULL), MOE_OK);
	CU_ASSERT_EQUAL(moe_engine_close(e), MOE_OK);
	setlocale(LC_ALL, "C");
	CU_ASSERT_EQUAL_FATAL(moe_file_read(path, 1 << 24, &text, &n), MOE_OK);
	for (size_t i = 0; i + 40 < n; i++)
		if (!memcmp(text + i, "rates.", 6) || !memcmp(text + i, "host.load=", 10)) {
			found++;
			CU_ASSERT_PTR_NULL(memchr(text + i, ',', strcspn(text + i, "\n")));
		}
	CU_ASSERT(found >= 5);
	moe_free(text);
}

const struct moe_test moe_suite_tests[] = {
	{ "training goes on in another locale", training },
	{ "the file of a calibration", machine },
	{ "a trace's header", trace },
	{ NULL, NULL },
};
