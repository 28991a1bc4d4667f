/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/print.h"

#include <math.h>
#include <string.h>

static const char *scaled(double v, const char *unit, char *buf)
{
	double size = fabs(v);

	snprintf(buf, PRINT_BYTES, "%.*f %s", size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2, v, unit);
	return buf;
}

const char *print_time(double ns, char *buf)
{
	double size = fabs(ns);

	if (!isfinite(ns)) {
		snprintf(buf, PRINT_BYTES, "n/a");
		return buf;
	}
	return size >= 9.995e8	 ? scaled(ns / 1e9, "s", buf)
	       : size >= 9.995e5 ? scaled(ns / 1e6, "ms", buf)
				 : scaled(ns / 1e3, "us", buf);
}

const char *print_share(double part, double whole, char *buf)
{
	if (!(whole > 0) || !isfinite(part))
		snprintf(buf, PRINT_BYTES, "n/a");
	else
		snprintf(buf, PRINT_BYTES, "%.1f %%", 100 * part / whole);
	return buf;
}

const char *print_count(double v, char *buf)
{
	static const char *const prefix[] = { "", "k", "M", "G", "T", "P" };
	int i = 0;

	if (!isfinite(v)) {
		snprintf(buf, PRINT_BYTES, "n/a");
		return buf;
	}
	for (; fabs(v) >= 999.5 && i < 5; i++)
		v /= 1000;
	snprintf(buf, PRINT_BYTES, "%.*f%s%s",
		 fabs(v) >= 99.95 || (i == 0 && v == floor(v)) ? 0
		 : fabs(v) >= 9.995			       ? 1
							       : 2,
		 v, i ? " " : "", prefix[i]);
	return buf;
}

void print_cell(FILE *out, const char *text, int width)
{
	int used = 0;

	for (; *text && used < width; text++, used++)
		putc((unsigned char)*text < 0x20 || *text == 0x7f ? '?' : *text, out);
	for (; used < width; used++)
		putc(' ', out);
}

/* How much of a line of n bytes goes into one of `width`: up to its last space. */
static int fits(const char *line, int n, int width)
{
	int at = width;

	if (n <= width)
		return n;
	while (at > width / 2 && line[at] != ' ')
		at--;
	return line[at] == ' ' ? at : width;
}

void print_wrapped(FILE *out, const char *text, int width)
{
	while (*text) {
		int n = (int)strcspn(text, "\n"), taken = fits(text, n, width);

		fprintf(out, "%.*s\n", taken, text);
		text += taken;
		n -= taken;
		while (n > 0) {
			n -= *text == ' ';
			text += *text == ' ';
			taken = fits(text, n, width - 4);
			fprintf(out, "    %.*s\n", taken, text);
			text += taken;
			n -= taken;
		}
		text += *text == '\n';
	}
}
