/* SPDX-License-Identifier: Apache-2.0 */
/* A folder of comma-separated files, one a table; what is not known is an empty cell. */
#include "tools/trace/exporter.h"
#include "tools/trace/output.h"

#include <stdlib.h>
#include <string.h>

/* Quoted where it must be (RFC 4180). */
static void put_text(FILE *out, const char *s)
{
	if (!s[strcspn(s, ",\"\r\n")]) {
		fputs(s, out);
		return;
	}
	putc('"', out);
	for (; *s; s++) {
		if (*s == '"')
			putc('"', out);
		putc(*s, out);
	}
	putc('"', out);
}

/* printf takes three times as long, and a million tasks have 26 million cells. */
static void put_integer(FILE *out, int64_t v)
{
	char digits[24];
	int at = sizeof digits;
	uint64_t u = v < 0 ? 0 - (uint64_t)v : (uint64_t)v;

	do
		digits[--at] = (char)('0' + u % 10);
	while (u /= 10);
	if (v < 0)
		digits[--at] = '-';
	fwrite(digits + at, 1, sizeof digits - (size_t)at, out);
}

static int write_table(const struct trace_export *x, const struct trace_table *table,
		       const char *folder, char *error, size_t size)
{
	struct trace_cell cell[TRACE_TABLE_COLUMNS];
	struct trace_cursor at = { 0, 0 };
	struct trace_output o;
	char name[80];

	snprintf(name, sizeof name, "%s.csv", table->name);
	if (trace_output_open_in(&o, folder, name, error, size))
		return -1;
	for (int i = 0; table->column[i].name; i++)
		fprintf(o.file, "%s%s", i ? "," : "", table->column[i].name);
	putc('\n', o.file);
	while (table->next(x, &at, cell)) {
		for (int i = 0; table->column[i].name; i++) {
			if (i)
				putc(',', o.file);
			if (cell[i].text)
				put_text(o.file, cell[i].text);
			else if (cell[i].v != MOE_MXT_NA)
				put_integer(o.file, cell[i].v);
		}
		putc('\n', o.file);
	}
	return trace_output_close(&o, true, error, size);
}

static int write_csv(const struct trace_export *x, const char *path, char *error, size_t size)
{
	if (trace_output_folder(path, error, size))
		return -1;
	for (const struct trace_table *t = trace_tables; t->name; t++)
		if (write_table(x, t, path, error, size))
			return -1;
	return 0;
}

const struct trace_exporter trace_exporter_csv = {
	.name = "csv",
	.summary = "a folder of tables for spreadsheets, pandas, R; all dependencies",
	.suffix = "-csv",
	.write = write_csv,
};
