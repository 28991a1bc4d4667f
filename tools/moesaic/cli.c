/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/cli.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/stat.h>

static const char *command_name;
static char *place;
static int quiet;

void cli_set_command(const char *name)
{
	command_name = name;
}

bool cli_missing(const char *path)
{
	return access(path, F_OK) && (errno == ENOENT || errno == ENOTDIR);
}

void cli_set_quiet(int on)
{
	quiet = on;
}

void cli_set_place(const char *fmt, ...)
{
	va_list ap;

	free(place);
	place = NULL;
	if (!fmt)
		return;
	va_start(ap, fmt);
	if (vasprintf(&place, fmt, ap) < 0)
		place = NULL;
	va_end(ap);
}

static void line(const char *fmt, va_list ap)
{
	fprintf(stderr, "moesaic%s%s: %s", command_name ? " " : "", command_name ? command_name : "", place ? place : "");
	vfprintf(stderr, fmt, ap);
	fputc('\n', stderr);
}

int cli_fail(int code, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	line(fmt, ap);
	va_end(ap);
	return code;
}

void cli_note(const char *fmt, ...)
{
	va_list ap;

	if (quiet)
		return;
	va_start(ap, fmt);
	line(fmt, ap);
	va_end(ap);
}

int cli_status(enum moe_status status)
{
	static const int codes[MOE_STATUS_COUNT] = {
		[MOE_OK] = CLI_DONE,
		[MOE_ERR_ARG] = CLI_USAGE,
		[MOE_ERR_IO] = CLI_USAGE,
		[MOE_ERR_FORMAT] = CLI_USAGE,
		[MOE_ERR_UNSUPPORTED] = CLI_USAGE,
		[MOE_ERR_CONFIG] = CLI_USAGE,
		[MOE_ERR_BUSY] = CLI_USAGE, /* another process has the folder */
		[MOE_ERR_NOMEM] = CLI_NOFIT,
		[MOE_ERR_NOFIT] = CLI_NOFIT,
		[MOE_ERR_DIVERGED] = CLI_DIVERGED,
		[MOE_ERR_INTERRUPTED] = CLI_INTERRUPTED,
	};
	int code = status < MOE_STATUS_COUNT && codes[status] ? codes[status] : CLI_FAILED;
	const char *text = moe_last_error();

	if (status == MOE_OK)
		return CLI_DONE;
	return cli_fail(code, "%s", *text ? text : moe_status_text(status));
}

void *cli_alloc(size_t bytes)
{
	void *p = calloc(1, bytes ? bytes : 1);

	if (!p) {
		cli_fail(CLI_NOFIT, "out of memory (%zu bytes)", bytes);
		exit(CLI_NOFIT);
	}
	return p;
}

char *cli_model_folder(const char *model)
{
	const char *slash = strrchr(model, '/');
	struct stat st;

	if (stat(model, &st) || !S_ISREG(st.st_mode))
		return cli_format("%s", model);
	return slash ? cli_format("%.*s", (int)(slash - model) + (slash == model), model) : cli_format(".");
}

char *cli_format(const char *fmt, ...)
{
	char *text = NULL;
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vasprintf(&text, fmt, ap);
	va_end(ap);
	if (n < 0) {
		cli_fail(CLI_NOFIT, "out of memory");
		exit(CLI_NOFIT);
	}
	return text;
}

static size_t min3(size_t a, size_t b, size_t c)
{
	size_t ab = a < b ? a : b;

	return ab < c ? ab : c;
}

#define MAX_NAME 63

/* Insertions, deletions, replacements and swaps of neighbours. */
static size_t distance(const char *a, const char *b)
{
	size_t n = strlen(a), m = strlen(b);
	size_t d[MAX_NAME + 1][MAX_NAME + 1];

	if (n > MAX_NAME || m > MAX_NAME)
		return MAX_NAME;
	for (size_t i = 0; i <= n; i++)
		for (size_t j = 0; j <= m; j++) {
			if (!i || !j) {
				d[i][j] = i + j;
				continue;
			}
			d[i][j] = min3(d[i - 1][j] + 1, d[i][j - 1] + 1,
				       d[i - 1][j - 1] + (a[i - 1] != b[j - 1]));
			if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
			    d[i - 2][j - 2] + 1 < d[i][j])
				d[i][j] = d[i - 2][j - 2] + 1;
		}
	return d[n][m];
}

const char *cli_nearest(const char *name, const char *const *names)
{
	size_t limit = strlen(name) / 2 > 2 ? strlen(name) / 2 : 2, best = limit + 1;
	char dashed[MAX_NAME + 1];
	const char *found = NULL;

	snprintf(dashed, sizeof dashed, "%s", name);
	for (char *c = dashed; *c; c++)
		*c = *c == '_' ? '-' : *c;
	for (; *names; names++) {
		size_t d = distance(dashed, *names);

		/* A name that only misses its end, as --epoch or --max-grad. */
		if (strlen(dashed) > 2 && !strncmp(dashed, *names, strlen(dashed)))
			d = 0;
		if (d < best) {
			best = d;
			found = *names;
		}
	}
	return found;
}
