/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic data: checks the flags and hands over to python -m moesaic.data. */
#include "tools/moesaic/commands.h"
#include "tools/moesaic/dataset.h"
#include "tools/moesaic/model.h"
#include "tools/moesaic/python.h"

static const struct option what[] = {
	{ "model", OPTION_TEXT, OPTION_COMMON | OPTION_REQUIRED, "DIR", NULL,
	  "its tokenizer and chat template are used", 0, 0, "model-name-or-path", NULL },
	{ "data", OPTION_LIST, OPTION_COMMON, "FILE...", NULL,
	  "json or jsonl: alpaca, sharegpt, messages, text, or input_ids and labels", 0, 0, "",
	  NULL },
	{ "output", OPTION_TEXT, OPTION_COMMON, "FILE", NULL, "token file to write (safetensors)",
	  0, 0, "", NULL },
	{ "show", OPTION_INT, OPTION_COMMON, "N", "1", "examples, trained tokens marked", 0, 1e6,
	  "", NULL },
	{ "seed", OPTION_INT, 0, "N", NULL, "shuffle the rows first", 0, 9e15, "", NULL },
	{ .name = NULL },
};

static const struct option_group groups[] = {
	{ "What", what },
	{ "By name", options_dataset },
	{ "Data", options_data },
	{ "General", options_general },
	{ NULL, NULL },
};

/* Where the model can be read: what it is trained on later must fit its positions. */
static int cut_to_model(struct settings *s)
{
	struct moe_model_params p = { .struct_size = sizeof p, .dir = settings_text(s, "model"), .inference_only = 1 };
	struct moe_model_info info = { .struct_size = sizeof info };

	return moe_model_check(&p, &info) == MOE_OK ? tool_model_cutoff(s, info.max_positions) : 0;
}

static int run(struct settings *s, int argc, char **argv)
{
	struct arguments a = { 0 };
	int rc = dataset_resolve(s);

	(void)argc, (void)argv;
	if (!rc && !settings_has(s, "data"))
		rc = cli_fail(CLI_USAGE, "--data FILE... is missing");
	rc = rc ? rc : cut_to_model(s);
	if (rc)
		return rc;
	arguments_options(&a, s, what);
	arguments_options(&a, s, options_data);
	if (settings_on(s, "quiet"))
		arguments_add(&a, "--quiet");
	if (settings_on(s, "json"))
		arguments_add(&a, "--json");
	rc = python_exec("data", &a);
	arguments_free(&a);
	return rc;
}

const struct command command_data = {
	.name = "data",
	.summary = "tokenise, preview, statistics",
	.groups = groups,
	.run = run,
};
