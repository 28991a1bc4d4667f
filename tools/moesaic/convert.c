/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic convert: an adapter in another form. */
#include "tools/moesaic/commands.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <unistd.h>

static const struct option what[] = {
	{ "adapter-format", OPTION_CHOICE, OPTION_COMMON, "peft|per-expert|kt", NULL,
	  "form of the adapter's files", 0, 0, "", NULL },
	{ "model", OPTION_TEXT, OPTION_COMMON, "DIR", NULL,
	  "base model: checks the adapter, gives its names (Mixtral)", 0, 0, "model-name-or-path",
	  NULL },
	{ "weights", OPTION_CHOICE, OPTION_COMMON, "keep|bf16|int8|int4", NULL,
	  "format of a model's weights", 0, 0, "", "" },
	{ .name = NULL },
};

static const struct option_group groups[] = {
	{ "What", what },
	{ "General", options_general },
	{ NULL, NULL },
};

static bool has_file(const char *dir, const char *name)
{
	char *path = cli_format("%s/%s", dir, name);
	bool there = access(path, R_OK) == 0;

	free(path);
	return there;
}

static int check(const struct settings *s)
{
	const char *in = s->operands[0];

	if (s->n_operands != 2)
		return cli_fail(CLI_USAGE, "IN and OUT are expected, %d given", s->n_operands);
	if (access(in, R_OK))
		return cli_fail(CLI_USAGE, "%s: no such folder", in);
	if (!has_file(in, "adapter_config.json"))
		return cli_fail(CLI_USAGE,
				has_file(in, "config.json")
					? "%s is a model: converting weights is not in this version yet"
					: "%s: it has no adapter_config.json, so it is no adapter",
				in);
	if (!settings_has(s, "adapter-format"))
		return cli_fail(CLI_USAGE, "--adapter-format peft|per-expert|kt is missing");
	return 0;
}

static void print(const struct settings *s, const struct moe_convert_result *r)
{
	cJSON *o;
	char *text;

	if (settings_on(s, "json")) {
		o = cJSON_CreateObject();
		cJSON_AddStringToObject(o, "from", r->from);
		cJSON_AddStringToObject(o, "to", r->to);
		cJSON_AddNumberToObject(o, "params", (double)r->params);
		text = cJSON_PrintUnformatted(o);
		puts(text ? text : "{}");
		cJSON_free(text);
		cJSON_Delete(o);
	} else if (!settings_on(s, "quiet")) {
		printf("%s -> %s: %s\n", r->from, r->to, s->operands[1]);
	}
}

static int run(struct settings *s, int argc, char **argv)
{
	struct moe_convert_result r = { .struct_size = sizeof r };
	struct moe_convert_params p = { .struct_size = sizeof p };
	enum moe_status st;
	int rc = check(s);

	(void)argc, (void)argv;
	if (rc)
		return rc;
	p.in = s->operands[0];
	p.out = s->operands[1];
	p.adapter_format = settings_text(s, "adapter-format");
	p.model = settings_text(s, "model");
	st = moe_convert_adapter(&p, &r);
	if (st == MOE_OK)
		print(s, &r);
	return cli_status(st);
}

const struct command command_convert = {
	.name = "convert",
	.summary = "an adapter in another form",
	.operands = "IN OUT",
	.groups = groups,
	.run = run,
};
