/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/json.h"

#include "engine/trace_format.h"

#include <math.h>
#include <string.h>

/* Comma, line break, name. */
static void begin(struct trace_json *j, const char *name)
{
	if (j->started)
		putc(',', j->out);
	if (j->lines && j->depth == 1)
		putc('\n', j->out);
	if (name) {
		trace_json_quote(j->out, name);
		putc(':', j->out);
	}
	j->started = true;
}

void trace_json_object(struct trace_json *j, const char *name)
{
	begin(j, name);
	putc('{', j->out);
	j->depth++;
	j->started = false;
}

void trace_json_array(struct trace_json *j, const char *name)
{
	begin(j, name);
	putc('[', j->out);
	j->depth++;
	j->started = false;
}

void trace_json_end(struct trace_json *j, char bracket)
{
	j->depth--;
	if (j->lines && j->depth == 0)
		putc('\n', j->out);
	putc(bracket, j->out);
	j->started = true;
}

/* Length of a character of UTF-8, 0: it is none. No surrogates, nothing longer than needed. */
static int character(const unsigned char *s)
{
	int n = s[0] < 0x80   ? 1
		: s[0] < 0xc2 ? 0
		: s[0] < 0xe0 ? 2
		: s[0] < 0xf0 ? 3
		: s[0] < 0xf5 ? 4
			      : 0;

	for (int i = 1; i < n; i++)
		if ((s[i] & 0xc0) != 0x80)
			return 0;
	if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) ||
	    (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f))
		return 0;
	return n;
}

void trace_json_quote(FILE *out, const char *text)
{
	const unsigned char *s = (const unsigned char *)text;

	putc('"', out);
	while (*s) {
		int n = character(s);

		if (!n)
			fputs("\\ufffd", out);
		else if (*s == '"' || *s == '\\')
			fprintf(out, "\\%c", *s);
		else if (*s < 0x20 || *s == 0x7f || *s == '<') /* '<': it may stand in HTML */
			fprintf(out, "\\u%04x", *s);
		else
			fwrite(s, 1, (size_t)n, out);
		s += n ? n : 1;
	}
	putc('"', out);
}

void trace_json_text(struct trace_json *j, const char *name, const char *text)
{
	begin(j, name);
	if (text)
		trace_json_quote(j->out, text);
	else
		fputs("null", j->out);
}

void trace_json_integer(struct trace_json *j, const char *name, int64_t v)
{
	begin(j, name);
	if (v == MOE_MXT_NA)
		fputs("null", j->out);
	else
		fprintf(j->out, "%lld", (long long)v);
}

void trace_json_number(struct trace_json *j, const char *name, double v)
{
	begin(j, name);
	if (isfinite(v))
		fprintf(j->out, "%.9g", v);
	else
		fputs("null", j->out);
}

void trace_json_bool(struct trace_json *j, const char *name, bool v)
{
	begin(j, name);
	fputs(v ? "true" : "false", j->out);
}
