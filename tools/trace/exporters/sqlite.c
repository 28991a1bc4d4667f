/* SPDX-License-Identifier: Apache-2.0 */
/* One SQLite file with the same tables as csv, for questions in SQL. */
#include "tools/trace/exporter.h"

#ifdef MOE_TRACE_SQLITE
#include <errno.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int failed(sqlite3 *db, const char *path, char *error, size_t size)
{
	int system = db ? sqlite3_system_errno(db) : 0; /* of its last call that failed for a reason of the system's */

	snprintf(error, size, "%s: %s%s%s", path, db ? sqlite3_errmsg(db) : "out of memory", system ? ": " : "",
		 system ? strerror(system) : "");
	return -1;
}

/* Rows that a damaged trace has twice are there once. "create table" and "insert" for a table, into two texts. */
static void statements(const struct trace_table *t, char *create, char *insert, size_t size)
{
	size_t c = (size_t)snprintf(create, size, "create table %s (", t->name);
	size_t i = (size_t)snprintf(insert, size, "insert or ignore into %s values (", t->name);
	char key[200] = "";
	size_t k = 0;

	for (int n = 0; t->column[n].name; n++) {
		c += (size_t)snprintf(create + c, size - c, "%s\"%s\" %s", n ? ", " : "",
				      t->column[n].name, t->column[n].text ? "text" : "integer");
		i += (size_t)snprintf(insert + i, size - i, n ? ",?" : "?");
		if (t->column[n].key)
			k += (size_t)snprintf(key + k, sizeof key - k, "%s\"%s\"", k ? ", " : "",
					      t->column[n].name);
	}
	if (k)
		snprintf(create + c, size - c, ", primary key (%s)) without rowid", key);
	else
		snprintf(create + c, size - c, ")");
	snprintf(insert + i, size - i, ")");
}

static int insert_rows(sqlite3_stmt *s, const struct trace_export *x, const struct trace_table *t)
{
	struct trace_cell cell[TRACE_TABLE_COLUMNS];
	struct trace_cursor at = { 0, 0 };

	while (t->next(x, &at, cell)) {
		for (int i = 0; t->column[i].name; i++) {
			if (cell[i].text)
				sqlite3_bind_text(s, i + 1, cell[i].text, -1, SQLITE_STATIC);
			else if (cell[i].v != MOE_MXT_NA)
				sqlite3_bind_int64(s, i + 1, cell[i].v);
			else
				sqlite3_bind_null(s, i + 1);
		}
		if (sqlite3_step(s) != SQLITE_DONE || sqlite3_reset(s) != SQLITE_OK)
			return -1;
	}
	return 0;
}

static int write_table(sqlite3 *db, const struct trace_export *x, const struct trace_table *t)
{
	char create[2000], insert[2000];
	sqlite3_stmt *s = NULL;
	int rc;

	statements(t, create, insert, sizeof create);
	if (sqlite3_exec(db, create, NULL, NULL, NULL) != SQLITE_OK ||
	    sqlite3_prepare_v2(db, insert, -1, &s, NULL) != SQLITE_OK)
		return -1;
	rc = insert_rows(s, x, t);
	sqlite3_finalize(s);
	return rc;
}

static int fill(sqlite3 *db, const struct trace_export *x)
{
	if (sqlite3_exec(db, "pragma journal_mode=off; pragma synchronous=off; begin", NULL, NULL,
			 NULL) != SQLITE_OK)
		return -1;
	for (const struct trace_table *t = trace_tables; t->name; t++)
		if (write_table(db, x, t))
			return -1;
	return sqlite3_exec(db, "commit; pragma synchronous=full", NULL, NULL, NULL) == SQLITE_OK
		       ? 0
		       : -1;
}

static int write_sqlite(const struct trace_export *x, const char *path, char *error, size_t size)
{
	size_t n = strlen(path) + 32;
	char *part = malloc(n);
	sqlite3 *db = NULL;
	int rc = -1;

	if (!part)
		return failed(NULL, path, error, size);
	snprintf(part, n, "%s.part-%ld", path, (long)getpid());
	remove(part);
	if (sqlite3_open(part, &db) == SQLITE_OK)
		rc = fill(db, x);
	if (rc)
		failed(db, path, error, size);
	if (sqlite3_close(db) != SQLITE_OK && rc == 0)
		rc = failed(db, path, error, size);
	if (rc == 0 && rename(part, path)) {
		snprintf(error, size, "%s: %s", path, strerror(errno));
		rc = -1;
	}
	if (rc)
		remove(part);
	free(part);
	return rc;
}
#else
#define write_sqlite NULL
#endif

const struct trace_exporter trace_exporter_sqlite = {
	.name = "sqlite",
	.summary = "one database of tables for SQL; all dependencies",
	.suffix = ".sqlite",
#ifndef MOE_TRACE_SQLITE
	.missing = "moesaic-trace was built without SQLite; install libsqlite3-dev and build again",
#endif
	.write = write_sqlite,
};
