/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/tokenizer.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

/* Takes the request; the answer, an object without "error", is the caller's. */
static int ask(struct tokenizer *t, cJSON *request, cJSON **answer)
{
	char *line = request ? cJSON_PrintUnformatted(request) : NULL;
	const cJSON *error;
	size_t size = 0;
	bool sent = true; /* without a request the child speaks first */
	ssize_t n;

	cJSON_Delete(request);
	*answer = NULL;
	if (line) {
		sent = fprintf(t->child.to, "%s\n", line) > 0 && fflush(t->child.to) == 0;
		cJSON_free(line);
	}
	line = NULL;
	n = sent ? getline(&line, &size, t->child.from) : -1;
	if (n > 0)
		*answer = cJSON_Parse(line);
	free(line);
	if (!cJSON_IsObject(*answer)) {
		/* its own line on stderr says why */
		int rc = python_stop("tokenizer", &t->child);

		cJSON_Delete(*answer);
		*answer = NULL;
		return rc ? rc : cli_fail(CLI_USAGE, "the tokenizer process ended");
	}
	error = cJSON_GetObjectItemCaseSensitive(*answer, "error");
	if (error) {
		int rc = cli_fail(CLI_USAGE, "%s",
				  cJSON_IsString(error) ? error->valuestring : "tokenizer");

		cJSON_Delete(*answer);
		*answer = NULL;
		return rc;
	}
	return 0;
}

static cJSON *operation(const char *op)
{
	cJSON *o = cJSON_CreateObject();

	cJSON_AddStringToObject(o, "op", op);
	return o;
}

int tokenizer_open(struct tokenizer *t, const struct settings *s)
{
	struct arguments a = { 0 };
	const cJSON *id;
	cJSON *answer;
	int rc;

	*t = (struct tokenizer){ .child.pid = -1 };
	arguments_add(&a, "serve");
	arguments_add(&a, "--model");
	arguments_add(&a, settings_text(s, "model"));
	if (settings_on(s, "no-system"))
		arguments_add(&a, "--no-system");
	if (settings_has(s, "chat-template")) {
		arguments_add(&a, "--chat-template");
		arguments_add(&a, settings_text(s, "chat-template"));
	}
	if (settings_has(s, "template-vars")) {
		char **items;
		int n = settings_list(s, "template-vars", &items);

		arguments_add(&a, "--template-vars");
		for (int i = 0; i < n; i++)
			arguments_add(&a, items[i]);
	}
	rc = python_start("tokenizer", &a, &t->child);
	arguments_free(&a);
	rc = rc ? rc : ask(t, NULL, &answer);
	if (rc)
		return rc;
	t->chat = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(answer, "chat"));
	id = cJSON_GetObjectItemCaseSensitive(answer, "vocab_size");
	t->vocab_size = cJSON_IsNumber(id) ? (int64_t)id->valuedouble : 0;
	cJSON_ArrayForEach(id, cJSON_GetObjectItemCaseSensitive(answer, "eos_ids"))
	{
		if (cJSON_IsNumber(id) && t->n_eos < TOKENIZER_MAX_EOS)
			t->eos_ids[t->n_eos++] = (int64_t)id->valuedouble;
	}
	cJSON_Delete(answer);
	return 0;
}

int tokenizer_encode(struct tokenizer *t, const char *text, bool chat, const char *system,
		     int32_t **ids, int64_t *n)
{
	cJSON *request = operation("encode"), *answer;
	const cJSON *list, *id;
	int rc;

	*ids = NULL;
	*n = 0;
	cJSON_AddStringToObject(request, "text", text);
	cJSON_AddBoolToObject(request, "chat", chat);
	if (system)
		cJSON_AddStringToObject(request, "system", system);
	rc = ask(t, request, &answer);
	if (rc)
		return rc;
	list = cJSON_GetObjectItemCaseSensitive(answer, "ids");
	*ids = cli_alloc((size_t)(cJSON_GetArraySize(list) + 1) * sizeof **ids);
	cJSON_ArrayForEach(id, list)(*ids)[(*n)++] = (int32_t)id->valuedouble;
	cJSON_Delete(answer);
	return 0;
}

static int text_answer(struct tokenizer *t, cJSON *request, char **text)
{
	const cJSON *value;
	cJSON *answer;
	int rc = ask(t, request, &answer);

	*text = NULL;
	if (rc)
		return rc;
	value = cJSON_GetObjectItemCaseSensitive(answer, "text");
	*text = cli_format("%s", cJSON_IsString(value) ? value->valuestring : "");
	cJSON_Delete(answer);
	return 0;
}

int tokenizer_start(struct tokenizer *t)
{
	char *text;
	int rc = text_answer(t, operation("start"), &text);

	free(text);
	return rc;
}

int tokenizer_token(struct tokenizer *t, int32_t id, char **text)
{
	cJSON *request = operation("token");

	cJSON_AddNumberToObject(request, "id", id);
	return text_answer(t, request, text);
}

int tokenizer_finish(struct tokenizer *t, char **text)
{
	return text_answer(t, operation("finish"), text);
}

void tokenizer_close(struct tokenizer *t)
{
	if (t->child.pid > 0)
		python_stop("tokenizer", &t->child);
}
