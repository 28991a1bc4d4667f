/* SPDX-License-Identifier: Apache-2.0 */
/* Settings of train that depend on others, or have no meaning beside them. */
#include "tools/moesaic/commands.h"

#include <stdlib.h>
#include <string.h>

/* ---- method ---- */

static void set_number(struct settings *s, const char *name, int64_t value)
{
	char *text = cli_format("%lld", (long long)value);

	settings_set(s, name, (const char *const *)&text, 1);
	free(text);
}

/* Is it set, to something else than its default? */
static bool differs(const struct settings *s, const char *name)
{
	const char *preset = settings_option(s, name)->preset;
	char *text = settings_joined(s, name);
	bool same = !*text || (preset && !strcmp(text, preset));

	free(text);
	return !same;
}

/*
 * Settings that the method does not have. On the command line they are a mistake; in a file, which may serve
 * several methods, they are named and left out.
 */
static int drop_lora(struct settings *s)
{
	static const char *const names[] = { "lora-rank", "expert-lora-rank", "lora-alpha",   "lora-dropout",	"lora-target",
					     "share-a",	  "rslora",	      "train-router", "adapter-format", NULL };
	char *left = cli_format("%s", "");

	for (const char *const *n = names; *n; n++) {
		char *longer;

		if (settings_flagged(s, *n)) {
			free(left);
			return cli_fail(CLI_USAGE, "--%s has no meaning with --method full, which trains all weights, without "
						   "an adapter: leave it out, or --method hybrid", *n);
		}
		if (settings_given(s, *n) && differs(s, *n)) {
			longer = cli_format("%s%s%s", left, *left ? ", " : "", *n);
			free(left);
			left = longer;
		}
		settings_unset(s, *n);
	}
	if (*left)
		cli_note("method full has no adapter: ignored from --config: %s", left);
	free(left);
	return 0;
}

static int drop_other_methods(struct settings *s)
{
	const char *method = settings_text(s, "method"), *f32 = "f32";

	if (!strcmp(method, "full"))
		return drop_lora(s);
	if (strcmp(method, "lora") || !differs(s, "masters"))
		return 0;
	if (settings_flagged(s, "masters"))
		return cli_fail(CLI_USAGE, "--masters %s has no meaning with --method lora, whose adapter is f32: it is for "
					   "full and hybrid", settings_text(s, "masters"));
	cli_note("method lora trains no weights: ignored from --config: masters");
	return settings_set(s, "masters", &f32, 1);
}

/* Defaults that depend on other settings; alpha stays open where ranks differ: it follows each. */
int train_resolve_method(struct settings *s)
{
	int64_t rank = settings_int(s, "lora-rank");
	int rc = drop_other_methods(s);

	if (rc || !strcmp(settings_text(s, "method"), "full"))
		return rc ? rc : settings_exclusive(s, "batch-size", "batch-tokens");

	if (!settings_has(s, "adapter")) {
		if (!settings_has(s, "expert-lora-rank"))
			set_number(s, "expert-lora-rank", rank);
		if (!settings_has(s, "lora-alpha") && settings_int(s, "expert-lora-rank") == rank)
			set_number(s, "lora-alpha", 2 * rank);
	}
	return settings_exclusive(s, "batch-size", "batch-tokens");
}

/* ---- course ---- */

/* Of names that have no meaning with `name` value: the first that is a flag, else those given are unset and listed. */
static const char *drop_useless(struct settings *s, const char *const *useless, char **left)
{
	*left = cli_format("%s", "");
	for (const char *const *n = useless; *n; n++)
		if (settings_flagged(s, *n))
			return *n;
	for (const char *const *n = useless; *n; n++) {
		char *longer;

		if (!settings_given(s, *n))
			continue;
		longer = cli_format("%s%s%s", *left, **left ? ", " : "", *n);
		free(*left);
		*left = longer;
		settings_unset(s, *n);
	}
	return NULL;
}

/*
 * A strategy against what has no meaning with it: flags win over --config, two flags are a mistake, and of two keys of a file
 * the strategy holds, as in transformers.
 */
static int settle(struct settings *s, const char *strategy, const char *const *useless, const char *instead)
{
	const char *value = settings_text(s, strategy), *flag;
	char *left;
	int rc = 0;

	flag = drop_useless(s, useless, &left);
	if (flag && settings_flagged(s, strategy))
		rc = cli_fail(CLI_USAGE, "--%s has no meaning with --%s %s: leave one out", flag, strategy, value);
	else if (flag && instead)
		rc = settings_set(s, strategy, &instead, 1);
	else if (flag)
		settings_unset(s, strategy);
	else if (*left)
		cli_note("%s %s: ignored from --config: %s", strategy, value, left);
	free(left);
	return rc;
}

static int copy_text(struct settings *s, const char *from, const char *to)
{
	const char *text = settings_text(s, from);

	return settings_set(s, to, &text, 1);
}

static int resolve_eval(struct settings *s)
{
	static const char *const by_steps[] = { "eval-steps", NULL },
				 *const any[] = { "eval-data", "eval-dataset", "eval-steps", "eval-delay", "eval-on-start", NULL };
	const char *strategy = settings_text(s, "eval-strategy");

	if (!strategy)
		return 0;
	if (!strcmp(strategy, "no"))
		return settle(s, "eval-strategy", any, NULL);
	if (!strcmp(strategy, "epoch"))
		return settle(s, "eval-strategy", by_steps, "steps");
	if (!settings_has(s, "eval-steps")) /* transformers' rule */
		return copy_text(s, "logging-steps", "eval-steps");
	return 0;
}

static int resolve_logging(struct settings *s)
{
	static const char *const by_steps[] = { "logging-steps", NULL };

	if (!strcmp(settings_text(s, "logging-strategy"), "steps"))
		return 0;
	return settle(s, "logging-strategy", by_steps, "steps");
}

/* Micro-batches by tokens have no number of rows to fall short of. */
static int resolve_drop_last(struct settings *s)
{
	if (!settings_on(s, "drop-last") || settings_has(s, "batch-size"))
		return 0;
	if (settings_flagged(s, "drop-last"))
		return cli_fail(CLI_USAGE, "--drop-last goes with --batch-size: micro-batches by tokens (--batch-tokens) are as full as fits");
	cli_note("micro-batches by tokens are as full as fits: ignored from --config: drop_last");
	settings_unset(s, "drop-last");
	return 0;
}

static int resolve_save(struct settings *s)
{
	static const char *const by_steps[] = { "save-steps", NULL };
	int rc;

	if (!strcmp(settings_text(s, "save-strategy"), "steps"))
		return 0;
	rc = settle(s, "save-strategy", by_steps, "steps");
	if (!rc && strcmp(settings_text(s, "save-strategy"), "steps"))
		settings_unset(s, "save-steps");
	return rc;
}

int train_resolve_course(struct settings *s)
{
	int rc = resolve_eval(s);

	rc = rc ? rc : resolve_logging(s);
	rc = rc ? rc : resolve_drop_last(s);
	return rc ? rc : resolve_save(s);
}
