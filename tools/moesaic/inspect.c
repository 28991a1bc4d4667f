/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic inspect: what is in a model, adapter, token file, training state or trace. */
#include "engine/size.h"
#include "tools/moesaic/commands.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <string.h>

#define MOST_ROWS 40 /* of a list; --json has all */

static const struct option what[] = {
	{ "values", OPTION_FLAG, OPTION_COMMON, NULL, NULL,
	  "of quantised weights: ranges of values and scales (reads them all)", 0, 0, "", NULL },
	{ "base", OPTION_TEXT, OPTION_COMMON, "DIR", NULL,
	  "plain checkpoint that quantised weights are compared with", 0, 0, "", NULL },
	{ .name = NULL },
};

static const struct option_group groups[] = {
	{ "What", what },
	{ "General", options_general },
	{ NULL, NULL },
};

/* 1,234,567 of a whole number */
static void print_whole(double value)
{
	char digits[32];
	int n = snprintf(digits, sizeof digits, "%.0f", fabs(value));

	if (value < 0)
		putchar('-');
	for (int i = 0; i < n; i++) {
		if (i && (n - i) % 3 == 0)
			putchar(',');
		putchar(digits[i]);
	}
}

static void print_scalar(const char *key, const cJSON *v)
{
	if (cJSON_IsString(v)) {
		printf("%s", *v->valuestring ? v->valuestring : "-");
	} else if (cJSON_IsBool(v)) {
		printf("%s", cJSON_IsTrue(v) ? "yes" : "no");
	} else if (cJSON_IsNumber(v) && v->valuedouble == floor(v->valuedouble)) {
		print_whole(v->valuedouble);
		if (strstr(key, "bytes") && v->valuedouble >= 1 << 20)
			printf(" (%s)", moe_size((int64_t)v->valuedouble).text);
	} else if (cJSON_IsNumber(v)) {
		printf("%.6g", v->valuedouble);
	} else {
		printf("-");
	}
}

/* An object of a list on one line. */
static void print_row(const cJSON *o)
{
	const cJSON *c;

	cJSON_ArrayForEach(c, o)
	{
		printf("%s%s ", c == o->child ? "" : "  ", c == o->child ? "" : c->string);
		print_scalar(c->string, c);
	}
	putchar('\n');
}

static void print_object(const cJSON *o, int indent);

static void print_list(const cJSON *list, int indent)
{
	int rows = 0;
	const cJSON *c;

	if (!cJSON_IsObject(list->child)) {
		cJSON_ArrayForEach(c, list)
		{
			printf("%s", c == list->child ? "" : ", ");
			print_scalar("", c);
		}
		putchar('\n');
		return;
	}
	putchar('\n');
	cJSON_ArrayForEach(c, list)
	{
		if (rows++ == MOST_ROWS) {
			printf("%*s... %d in all (--json)\n", indent + 2, "",
			       cJSON_GetArraySize(list));
			break;
		}
		printf("%*s", indent + 2, "");
		print_row(c);
	}
}

static void print_object(const cJSON *o, int indent)
{
	const cJSON *c;

	cJSON_ArrayForEach(c, o)
	{
		char key[64];

		snprintf(key, sizeof key, "%s", c->string);
		for (char *k = key; *k; k++)
			*k = *k == '_' ? ' ' : *k;
		if ((cJSON_IsObject(c) || cJSON_IsArray(c)) && !c->child)
			continue;
		printf("%*s%-*s ", indent, "", 22 - indent, key);
		if (cJSON_IsObject(c)) {
			putchar('\n');
			print_object(c, indent + 2);
		} else if (cJSON_IsArray(c)) {
			print_list(c, indent);
		} else {
			print_scalar(c->string, c);
			putchar('\n');
		}
	}
}

static int run(struct settings *s, int argc, char **argv)
{
	struct moe_inspect_params p = { .struct_size = sizeof p };
	char *text = NULL;
	cJSON *o;
	int rc;

	(void)argc, (void)argv;
	if (s->n_operands != 1)
		return cli_fail(CLI_USAGE, "one FILE or DIR is expected, %d given", s->n_operands);
	p.values = settings_on(s, "values");
	p.base = settings_text(s, "base");
	rc = cli_status(moe_inspect_with(s->operands[0], &p, &text));
	if (!rc && settings_on(s, "json")) {
		puts(text);
	} else if (!rc) {
		o = cJSON_Parse(text);
		if (o)
			print_object(o, 0);
		cJSON_Delete(o);
	}
	moe_text_free(text);
	return rc;
}

const struct command command_inspect = {
	.name = "inspect",
	.summary = "what is in a file or folder",
	.operands = "FILE|DIR",
	.groups = groups,
	.run = run,
};
