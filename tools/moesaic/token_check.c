/* SPDX-License-Identifier: Apache-2.0 */
/* Does a token file belong to this model and these settings? */
#include "tools/moesaic/commands.h"
#include "tools/moesaic/python.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#define MAX_HEADER (1 << 20)
#define MAX_TEMPLATE (4 << 20)

cJSON *token_header(const char *path)
{
	FILE *f = fopen(path, "rb");
	uint64_t bytes = 0;
	char *text = NULL;
	cJSON *header = NULL;

	if (f && fread(&bytes, 1, sizeof bytes, f) == sizeof bytes && bytes <= MAX_HEADER) {
		text = cli_alloc(bytes + 1);
		if (fread(text, 1, bytes, f) == bytes)
			header = cJSON_ParseWithLength(text, bytes);
	}
	free(text);
	if (f)
		fclose(f);
	return header;
}

static const char *text_of(const cJSON *object, const char *key)
{
	const cJSON *v = cJSON_GetObjectItemCaseSensitive(object, key);

	return cJSON_IsString(v) ? v->valuestring : "";
}

static char *read_all(const char *path)
{
	FILE *f = fopen(path, "rb");
	char *text;
	size_t n;

	if (!f)
		return NULL;
	text = cli_alloc(MAX_TEMPLATE + 1);
	n = fread(text, 1, MAX_TEMPLATE, f);
	fclose(f);
	text[n] = 0;
	return text;
}

/* The model's own template; NULL: it has none that is found without Python. */
static char *model_template(const char *model)
{
	char *folder = cli_model_folder(model);
	char *path = cli_format("%s/chat_template.jinja", folder), *text = read_all(path);
	cJSON *config;

	free(path);
	path = cli_format("%s/tokenizer_config.json", folder);
	free(folder);
	if (text) {
		free(path);
		return text;
	}
	text = read_all(path);
	free(path);
	config = text ? cJSON_Parse(text) : NULL;
	free(text);
	text = *text_of(config, "chat_template")
		       ? cli_format("%s", text_of(config, "chat_template"))
		       : NULL;
	cJSON_Delete(config);
	return text;
}

static int other(const char *flag, const char *path, const char *what, const char *model)
{
	return cli_fail(CLI_USAGE,
			"--%s %s was made with another %s than that of %s: run moesaic data "
			"--model %s again",
			flag, path, what, model, model);
}

/* Python reads templates with line ends translated: what has \r is not compared. */
static int check_model(const struct settings *s, const char *flag, const char *path,
		       const cJSON *metadata)
{
	const char *model = settings_text(s, "model"), *wanted = text_of(metadata, "tokenizer");
	char *file = cli_format("%s/tokenizer.json", model), *template, found[MOE_SHA256_TEXT];
	int rc = 0;

	if (*wanted && !cli_missing(file)) {
		rc = cli_status(moe_file_sha256(file, found));
		if (!rc && strcmp(wanted, found))
			rc = other(flag, path, "tokenizer.json", model);
	}
	free(file);
	wanted = text_of(metadata, "template");
	if (rc || !*wanted || strcmp(text_of(metadata, "template_from"), "model"))
		return rc;
	template = model_template(model);
	if (template && !strchr(template, '\r')) {
		moe_sha256(template, strlen(template), found);
		if (strcmp(wanted, found))
			rc = other(flag, path, "chat template", model);
	}
	free(template);
	return rc;
}

/* What --config asks for and the file was not made with. */
static int check_settings(const struct settings *s, const char *flag, const char *path,
			  const cJSON *metadata)
{
	static const char *const keys[][2] = {
		{ "cutoff_len", "cutoff-len" },
		{ "packing", "packing" },
		{ "train_on", "train-on" },
	};

	for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
		const char *made = text_of(metadata, keys[i][0]), *asked;

		if (!*made || !settings_given(s, keys[i][1]))
			continue;
		asked = settings_text(s, keys[i][1]);
		/* a shorter limit than asked for is within it */
		if (i == 0 ? strtoll(made, NULL, 10) <= settings_int(s, keys[i][1])
			   : !strcmp(made, asked))
			continue;
		return cli_fail(
			CLI_USAGE,
			"--%s %s was made with %s %s, %s is asked for: run moesaic data again",
			flag, path, keys[i][0], made, asked);
	}
	return 0;
}

int token_check(const struct settings *s, const char *flag, const char *path)
{
	cJSON *header = token_header(path);
	const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(header, "__metadata__");
	int rc = check_settings(s, flag, path, metadata);

	rc = rc ? rc : check_model(s, flag, path, metadata);
	cJSON_Delete(header); /* what is no token file at all, opening says */
	return rc;
}
