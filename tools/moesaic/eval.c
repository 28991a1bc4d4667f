/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic eval: loss and perplexity of a model, with or without an adapter, on a token file or json. */
#include "tools/moesaic/commands.h"
#include "tools/moesaic/dataset.h"
#include "tools/moesaic/json_line.h"
#include "tools/moesaic/model.h"
#include "tools/moesaic/python.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct option what[] = {
	{ "model", OPTION_TEXT, OPTION_COMMON | OPTION_REQUIRED, "DIR", NULL,
	  "Hugging Face checkpoint folder", 0, 0, "model-name-or-path", NULL },
	{ "adapter", OPTION_TEXT, OPTION_COMMON, "DIR", NULL, "adapter, in any form", 0, 0,
	  "adapter-name-or-path", NULL },
	{ "data", OPTION_LIST, OPTION_COMMON, "FILE...", NULL,
	  "json or jsonl, or one token file", 0, 0, "", NULL },
	{ "eval-data", OPTION_LIST, 0, "FILE...", NULL, "the same; goes before a --data of --config", 0, 0, "", NULL },
	{ "eval-dataset", OPTION_LIST, 0, "NAME...", NULL, "the same by name", 0, 0, "", NULL },
	{ "batch-tokens", OPTION_INT, 0, "N", "4096", "tokens of a micro-batch", 2, 1e9, "", NULL },
	{ .name = NULL },
};

static const struct option_group groups[] = {
	{ "What", what },
	{ "By name", options_dataset },
	{ "Data", options_data },
	{ "Machine", options_machine },
	{ "General", options_general },
	{ NULL, NULL },
};

static void print_json(const struct moe_eval_result *r)
{
	cJSON *o = cJSON_CreateObject(), *docs;

	cJSON_AddNumberToObject(o, "loss", r->loss);
	cJSON_AddNumberToObject(o, "perplexity", exp(r->loss));
	cJSON_AddNumberToObject(o, "tokens", (double)r->tokens);
	docs = cJSON_AddArrayToObject(o, "documents");
	for (int64_t i = 0; i < r->n_docs; i++) {
		cJSON *d = cJSON_CreateObject();

		cJSON_AddNumberToObject(d, "loss", r->doc_loss[i]);
		cJSON_AddNumberToObject(d, "tokens", (double)r->doc_tokens[i]);
		cJSON_AddItemToArray(docs, d);
	}
	json_line(o);
}

static int evaluate(const struct settings *s, const char *tokens)
{
	struct tool_model m = { 0 };
	struct moe_eval_result r = { .struct_size = sizeof r };
	int rc = tool_model_open_inference(&m, s, settings_int(s, "batch-tokens"), false);

	rc = rc ? rc : cli_status(moe_evaluate(m.model, tokens, &r));
	if (!rc && settings_on(s, "json"))
		print_json(&r);
	else if (!rc)
		printf("loss %.4f  perplexity %.2f  %lld documents, %lld tokens\n", r.loss,
		       exp(r.loss), (long long)r.n_docs, (long long)r.tokens);
	if (!rc && !isfinite(r.loss))
		rc = cli_fail(CLI_DIVERGED, "the loss is not finite: the adapter or the weights have NaN or Inf, or overflow");
	moe_eval_result_free(&r);
	tool_model_close(&m);
	return rc;
}

static void unset_both(struct settings *s, const char *files, const char *names)
{
	settings_unset(s, files);
	settings_unset(s, names);
}

/* A training's --config names two: its evaluation data are meant, where it has some and no flag says otherwise. */
static int choose_data(struct settings *s)
{
	bool asked = settings_flagged(s, "data") || settings_flagged(s, "dataset");
	bool eval = !asked && (settings_has(s, "eval-data") || settings_has(s, "eval-dataset"));
	char **files;
	int n, rc;

	unset_both(s, eval ? "data" : "eval-data", eval ? "dataset" : "eval-dataset");
	rc = dataset_resolve(s);
	n = eval && !rc ? settings_list(s, "eval-data", &files) : 0;
	if (n)
		rc = settings_set(s, "data", (const char *const *)files, n);
	if (!rc && !settings_has(s, "data"))
		rc = cli_fail(CLI_USAGE, "--data FILE... is missing");
	return rc;
}

static int run(struct settings *s, int argc, char **argv)
{
	const char *temp = getenv("TMPDIR");
	char *folder = cli_format("%s/moesaic-XXXXXX", temp && *temp ? temp : "/tmp");
	char *tokens = NULL;
	bool made = false;
	int rc = choose_data(s);

	rc = rc ? rc : tool_model_check(s, false);

	(void)argc, (void)argv;
	if (!rc && !mkdtemp(folder))
		rc = cli_fail(CLI_USAGE, "%s: %s", folder, strerror(errno));
	if (!rc) {
		rc = token_file(s, "data", folder, REPORT_NONE, &tokens, &made);
		rc = rc ? rc : evaluate(s, tokens);
		if (made)
			unlink(tokens);
		rmdir(folder);
	}
	free(tokens);
	free(folder);
	return rc;
}

const struct command command_eval = {
	.name = "eval",
	.summary = "loss and perplexity",
	.groups = groups,
	.run = run,
};
