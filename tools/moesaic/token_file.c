/* SPDX-License-Identifier: Apache-2.0 */
/* Where a command's token file comes from. */
#include "tools/moesaic/commands.h"
#include "tools/moesaic/python.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static bool ends_with(const char *text, const char *end)
{
	size_t n = strlen(text), m = strlen(end);

	return n >= m && !strcmp(text + n - m, end);
}

static uint64_t mix(uint64_t hash, const void *data, size_t bytes)
{
	for (size_t i = 0; i < bytes; i++)
		hash = (hash ^ ((const unsigned char *)data)[i]) * 1099511628211u; /* FNV-1a */
	return hash;
}

/* Of the arguments and of when and how large the files are. */
static uint64_t fingerprint(const struct arguments *a, char **files, int n, const char *model)
{
	uint64_t hash = 14695981039346656037u;
	char *folder = cli_model_folder(model);
	struct stat st;

	for (int i = 0; i < a->count; i++)
		hash = mix(hash, a->items[i], strlen(a->items[i]) + 1);
	for (int i = -2; i < n; i++) {
		char *path =
			i < 0 ? cli_format("%s/%s", folder,
					   i == -2 ? "tokenizer.json" : "tokenizer_config.json")
			      : cli_format("%s", files[i]);

		if (stat(path, &st) == 0) {
			hash = mix(hash, &st.st_size, sizeof st.st_size);
			hash = mix(hash, &st.st_mtim, sizeof st.st_mtim);
		}
		free(path);
	}
	free(folder);
	return hash;
}

/* The model, the files and how rows become tokens, as moesaic.data takes them. */
static void add_data(struct arguments *a, const struct settings *s, char **files, int n)
{
	arguments_add(a, "--model");
	arguments_add(a, settings_text(s, "model"));
	arguments_add(a, "--data");
	for (int i = 0; i < n; i++)
		arguments_add(a, files[i]);
	arguments_options(a, s, options_data);
}

static int make(const struct settings *s, char **files, int n, const char *folder,
		enum token_report report, char **path, bool *made)
{
	struct arguments a = { 0 };
	int rc = 0;

	add_data(&a, s, files, n);
	*path = cli_format(
		"%s/tokens-%016llx.safetensors", folder,
		(unsigned long long)fingerprint(&a, files, n, settings_text(s, "model")));
	*made = access(*path, R_OK) != 0;
	if (*made) {
		arguments_add(&a, "--output");
		arguments_add(&a, *path);
		if (report == REPORT_NONE || settings_on(s, "quiet"))
			arguments_add(&a, "--quiet");
		rc = python_run("data", &a, report != REPORT_STDOUT);
	}
	arguments_free(&a);
	return rc;
}

/* Flags that say how rows become tokens come too late for a token file. */
static int refuse_data_flags(const struct settings *s, const char *flag, const char *path)
{
	for (const struct option *o = options_data; o->name; o++)
		if (settings_flagged(s, o->name))
			return cli_fail(CLI_USAGE,
					"--%s has no effect on --%s %s: it holds tokens already",
					o->name, flag, path);
	return 0;
}

int token_file(const struct settings *s, const char *flag, const char *folder,
	       enum token_report report, char **path, bool *made)
{
	char **files;
	int n = settings_list(s, flag, &files), tokens = 0, rc;

	*path = NULL;
	*made = false;
	for (int i = 0; i < n; i++) {
		if (access(files[i], R_OK))
			return cli_fail(CLI_USAGE, "--%s %s: %s", flag, files[i], strerror(errno));
		tokens += ends_with(files[i], ".safetensors");
	}
	if (tokens && n > 1)
		return cli_fail(CLI_USAGE, "--%s: one token file, or any number of json files",
				flag);
	if (!tokens)
		return make(s, files, n, folder, report, path, made);
	*path = cli_format("%s", files[0]);
	rc = refuse_data_flags(s, flag, *path);
	return rc ? rc : token_check(s, flag, *path);
}

/* ---- counting ---- */

/* The length of a token file's input_ids, -1 if it has none. */
static int64_t tokens_in_header(const char *path)
{
	cJSON *header = token_header(path);
	const cJSON *v = cJSON_GetObjectItemCaseSensitive(header, "input_ids");
	int64_t count = -1;

	v = cJSON_GetArrayItem(cJSON_GetObjectItemCaseSensitive(v, "shape"), 0);
	if (cJSON_IsNumber(v) && v->valuedouble < 9e15)
		count = (int64_t)v->valuedouble;
	cJSON_Delete(header);
	return count;
}

/* What moesaic.data counts in json files. */
static int tokens_in_rows(const struct settings *s, char **files, int n, int64_t *count)
{
	struct arguments a = { 0 };
	struct python_child child;
	char *line = NULL;
	size_t size = 0;
	cJSON *answer = NULL;
	const cJSON *v;
	int rc;

	add_data(&a, s, files, n);
	arguments_add(&a, "--json");
	rc = python_start("data", &a, &child);
	arguments_free(&a);
	if (rc)
		return rc;
	if (getline(&line, &size, child.from) > 0)
		answer = cJSON_Parse(line);
	free(line);
	rc = python_stop("data", &child);
	v = cJSON_GetObjectItemCaseSensitive(answer, "tokens");
	*count = cJSON_IsNumber(v) ? (int64_t)v->valuedouble : 0;
	cJSON_Delete(answer);
	return rc ? rc : *count ? 0 : cli_fail(CLI_USAGE, "--data: it could not be counted");
}

int token_count(const struct settings *s, const char *flag, int64_t *count)
{
	char **files;
	int n = settings_list(s, flag, &files);

	*count = 0;
	for (int i = 0; i < n; i++)
		if (access(files[i], R_OK))
			return cli_fail(CLI_USAGE, "--%s %s: %s", flag, files[i], strerror(errno));
	if (n != 1 || !ends_with(files[0], ".safetensors"))
		return tokens_in_rows(s, files, n, count);
	*count = tokens_in_header(files[0]);
	if (*count <= 0)
		return cli_fail(CLI_USAGE, "--%s %s: no token file: it has no input_ids", flag,
				files[0]);
	return 0;
}
