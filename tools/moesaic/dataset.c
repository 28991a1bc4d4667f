/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/dataset.h"
#include "tools/moesaic/option_values.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BYTES (16 << 20)
#define MAX_NAMES 64

/* LLaMA-Factory's names of columns, and ours. */
static const char *const column_names[][2] = {
	{ "prompt", "instruction" }, { "query", "input" },   { "response", "output" },
	{ "history", "history" },    { "system", "system" }, { "messages", "conversations" },
	{ "tools", "tools" },
};

#define COLUMN_NAMES (int)(sizeof column_names / sizeof *column_names)

struct chosen {
	char *files[MAX_NAMES], *columns[MAX_NAMES * COLUMN_NAMES];
	int n_files, n_columns;
};

static cJSON *read_info(const char *path)
{
	FILE *f = fopen(path, "rb");
	char *text;
	size_t n;
	cJSON *v;

	if (!f) {
		cli_fail(CLI_USAGE, "%s: %s", path, strerror(errno));
		return NULL;
	}
	text = cli_alloc(MAX_BYTES);
	n = fread(text, 1, MAX_BYTES, f);
	if (ferror(f)) {
		cli_fail(CLI_USAGE, "%s: %s", path, strerror(errno));
		fclose(f);
		free(text);
		return NULL;
	}
	fclose(f);
	v = cJSON_ParseWithLength(text, n);
	free(text);
	if (!cJSON_IsObject(v)) {
		cJSON_Delete(v);
		cli_fail(CLI_USAGE, "%s: not a JSON object", path);
		return NULL;
	}
	return v;
}

static int unknown_name(const cJSON *info, const char *path, const char *name)
{
	const char *names[1025], *near;
	const cJSON *e;
	int n = 0;

	cJSON_ArrayForEach(e, info) if (n < 1024) names[n++] = e->string;
	names[n] = NULL;
	near = cli_nearest(name, names);
	return cli_fail(CLI_USAGE, "%s has no dataset '%s'%s%s%s", path, name,
			near ? "; did you mean '" : "", near ? near : "", near ? "'?" : "");
}

/* Of that file: datasets may call their columns differently. */
static void add_column(struct chosen *c, const char *ours, const char *theirs, const char *file)
{
	char *item;

	/* "messages" is recognised as it is */
	if (!strcmp(ours, theirs) || !strcmp(theirs, "messages") || !*theirs)
		return;
	item = cli_format("%s=%s@%s", ours, theirs, file);
	for (int i = 0; i < c->n_columns; i++)
		if (!strcmp(c->columns[i], item)) {
			free(item);
			return;
		}
	c->columns[c->n_columns++] = item;
}

/* Names of roles and keys that rows may have (rows.py); LLaMA-Factory's tags may call them otherwise. */
static int check_tags(const cJSON *entry, const char *path, const char *name)
{
	static const char *const known[][2] = {
		{ "role_tag", "from role" },	 { "content_tag", "value content" },
		{ "user_tag", "human user" },	 { "assistant_tag", "gpt assistant model chatgpt" },
		{ "system_tag", "system" },	 { "observation_tag", "observation tool function" },
		{ "function_tag", "function_call tool_call" },
	};
	const cJSON *tags = cJSON_GetObjectItemCaseSensitive(entry, "tags");

	for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
		const cJSON *tag = cJSON_GetObjectItemCaseSensitive(tags, known[i][0]);

		if (cJSON_IsString(tag) && !option_word_among(tag->valuestring, known[i][1], ' '))
			return cli_fail(CLI_USAGE, "%s: '%s' has %s '%s'; rows are read with: %s", path, name,
					known[i][0], tag->valuestring, known[i][1]);
	}
	return 0;
}

static int choose(const cJSON *info, const char *folder, const char *path, const char *name,
		  struct chosen *c)
{
	const cJSON *entry = cJSON_GetObjectItemCaseSensitive(info, name);
	const cJSON *file = cJSON_GetObjectItemCaseSensitive(entry, "file_name");
	const cJSON *columns = cJSON_GetObjectItemCaseSensitive(entry, "columns");
	const cJSON *ranking = cJSON_GetObjectItemCaseSensitive(entry, "ranking");
	const cJSON *column;

	if (!entry)
		return unknown_name(info, path, name);
	if (!cJSON_IsString(file))
		return cli_fail(CLI_USAGE, "%s: '%s' has no file_name; only local files are read",
				path, name);
	if (cJSON_IsTrue(ranking))
		return cli_fail(CLI_USAGE,
				"%s: '%s' is a preference dataset: not in this version yet", path,
				name);
	if (cJSON_GetObjectItemCaseSensitive(entry, "num_samples"))
		return cli_fail(CLI_USAGE, "%s: '%s' has num_samples: remove it and give --max-samples, of each file", path,
				name);
	if (check_tags(entry, path, name))
		return CLI_USAGE;
	if (c->n_files == MAX_NAMES)
		return cli_fail(CLI_USAGE, "more than %d datasets", MAX_NAMES);
	c->files[c->n_files++] = cli_format("%s/%s", folder, file->valuestring);
	cJSON_ArrayForEach(column, columns)
	{
		if (!cJSON_IsString(column))
			continue;
		for (int i = 0; i < COLUMN_NAMES; i++)
			if (!strcmp(column->string, column_names[i][0]))
				add_column(c, column_names[i][1], column->valuestring, c->files[c->n_files - 1]);
	}
	return 0;
}

/* add: also the columns, where no --columns says them. */
static int resolve(struct settings *s, const char *names_flag, const char *files_flag, bool add)
{
	const char *folder = settings_text(s, "dataset-dir");
	struct chosen c = { .n_files = 0 };
	char *path, *names, *save = NULL;
	cJSON *info;
	int rc = 0;

	if (!settings_option(s, names_flag) || !settings_has(s, names_flag))
		return 0;
	rc = settings_exclusive(s, names_flag, files_flag);
	if (rc || !settings_has(s, names_flag))
		return rc;
	path = cli_format("%s/dataset_info.json", folder);
	names = settings_joined(s, names_flag);
	info = read_info(path);
	if (!info)
		rc = CLI_USAGE;
	for (char *n = strtok_r(names, ", ", &save); n && !rc; n = strtok_r(NULL, ", ", &save))
		rc = choose(info, folder, path, n, &c);
	if (!rc)
		rc = settings_set(s, files_flag, (const char *const *)c.files, c.n_files);
	settings_unset(s, names_flag); /* run.yaml names the files */
	for (int i = 0; i < c.n_columns && !rc && add; i++)
		rc = settings_add(s, "columns", c.columns[i]);
	for (int i = 0; i < c.n_files; i++)
		free(c.files[i]);
	for (int i = 0; i < c.n_columns; i++)
		free(c.columns[i]);
	cJSON_Delete(info);
	free(names);
	free(path);
	return rc;
}

int dataset_resolve(struct settings *s)
{
	bool add = !settings_has(s, "columns");
	int rc = resolve(s, "dataset", "data", add);

	return rc ? rc : resolve(s, "eval-dataset", "eval-data", add);
}
