/* SPDX-License-Identifier: Apache-2.0 */
/* Flags of subcommands, and errors as one line. */
#include "tools/trace/command.h"
#include "tools/trace/json.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *command = "";

void trace_set_command(const char *name)
{
	command = name;
}

void trace_written(const char *path, const struct trace_count *counts)
{
	struct trace_json j = { .out = stdout };

	trace_json_object(&j, NULL);
	trace_json_text(&j, "file", path);
	for (; counts->name; counts++)
		trace_json_integer(&j, counts->name, counts->count);
	trace_json_end(&j, '}');
	putchar('\n');
}

int trace_fail(const char *format, ...)
{
	va_list ap;

	fflush(stdout);
	fprintf(stderr, "moesaic-trace%s%s: ", *command ? " " : "", command);
	va_start(ap, format);
	vfprintf(stderr, format, ap);
	va_end(ap);
	putc('\n', stderr);
	return TRACE_EXIT_BAD;
}

static void help(const struct trace_command *c)
{
	printf("usage: moesaic trace %s\n%s\n%s%s", c->usage, c->summary, c->help ? "\n" : "",
	       c->help ? c->help : "");
}

/* The flag that argument names; its value, if it came with one. */
static const struct trace_flag *find(const struct trace_flag *flags, const char *argument,
				     const char **value)
{
	for (const struct trace_flag *f = flags; f->name; f++) {
		size_t n = strlen(f->name);

		if (strncmp(argument, f->name, n))
			continue;
		*value = argument[n] == '=' ? argument + n + 1 : NULL;
		if (!argument[n] || argument[n] == '=')
			return f;
	}
	return NULL;
}

static int apply(const struct trace_flag *f, const char *value, int *i, int argc, char **argv)
{
	if (f->set) {
		if (value)
			return trace_fail("%s takes no value", f->name);
		*f->set = true;
		return 0;
	}
	if (!value && ++*i >= argc)
		return trace_fail("%s needs a value", f->name);
	value = value ? value : argv[*i];
	if (f->each)
		return f->each(value, f->user) ? TRACE_EXIT_BAD : 0;
	*f->text = value;
	return 0;
}

int trace_flags(const struct trace_command *c, int argc, char **argv,
		const struct trace_flag *flags, const char **files, int min_files, int max_files)
{
	bool only_files = false, quiet = false, json = false;
	int n = 0;

	trace_set_command(c->name);
	for (int i = 1; i < argc; i++) {
		const char *a = argv[i], *value = NULL;
		const struct trace_flag *f;

		if (!only_files && (!strcmp(a, "--help") || !strcmp(a, "-h"))) {
			help(c);
			return -1;
		}
		if (!only_files && !strcmp(a, "--quiet")) {
			quiet = true;
			continue;
		}
		if (!only_files && !strcmp(a, "--")) {
			only_files = true;
			continue;
		}
		if (only_files || a[0] != '-' || !a[1]) {
			if (n == max_files)
				return trace_fail("'%s' is one argument too many; usage: %s", a,
						  c->usage);
			files[n++] = a;
			continue;
		}
		f = find(flags, a, &value);
		if (!f)
			return trace_fail("unknown flag %s (moesaic trace %s --help)", a, c->name);
		if (apply(f, value, &i, argc, argv))
			return TRACE_EXIT_BAD;
		json = json || !strcmp(f->name, "--json");
	}
	if (quiet && !json && !freopen("/dev/null", "w", stdout))
		return trace_fail("--quiet: /dev/null: %s", strerror(errno));
	return n < min_files ? trace_fail("a trace file is missing; usage: %s", c->usage) : 0;
}

int trace_flag_range(const char *flag, const char *text, int64_t range[2])
{
	char *end;

	errno = 0;
	range[0] = range[1] = strtoll(text, &end, 10);
	if (end != text && *end == ':') {
		text = end + 1;
		range[1] = strtoll(text, &end, 10);
	}
	if (end == text || *end || errno || range[0] > range[1]) {
		trace_fail("%s: '%s' is no number and no range a:b", flag, text);
		return -1;
	}
	return 0;
}

int trace_flag_steps(const int64_t range[2])
{
	if (range[0] >= 1 && range[1] < INT32_MAX)
		return 0;
	trace_fail("--step: steps are numbered from 1");
	return -1;
}

int trace_flag_number(const char *flag, const char *text, double *v)
{
	char *end;

	*v = strtod(text, &end);
	if (end != text && *end == '%') {
		*v /= 100;
		end++;
	}
	if (end != text && !*end && isfinite(*v))
		return 0;
	trace_fail("%s: '%s' is no number", flag, text);
	return -1;
}

int trace_load(struct trace *t, const char *path, const struct trace_slice *slice)
{
	char error[500];

	if (trace_read(t, path, slice, error, sizeof error) == 0)
		return 0;
	return trace_fail("%s", error);
}
