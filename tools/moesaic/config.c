/* SPDX-License-Identifier: Apache-2.0 */
/*
 * --config FILE and run.yaml. YAML and JSON both become a cJSON tree whose scalars are texts; keys
 * are the flags' names with underscores, those of LLaMA-Factory through the aliases of the option
 * table and foreign.c.
 */
#include "tools/moesaic/cli.h"
#include "tools/moesaic/foreign.h"
#include "tools/moesaic/option_values.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <yaml.h>

#define MAX_BYTES (1 << 20)
#define MAX_DEPTH 4
#define MAX_ITEMS 4096

static char *read_text(const char *path, size_t *bytes)
{
	FILE *f = fopen(path, "rb");
	char *text;

	if (!f) {
		cli_fail(CLI_USAGE, "%s", strerror(errno));
		return NULL;
	}
	text = cli_alloc(MAX_BYTES + 1);
	*bytes = fread(text, 1, MAX_BYTES + 1, f);
	if (ferror(f) || *bytes > MAX_BYTES) {
		cli_fail(CLI_USAGE, "%s", ferror(f) ? strerror(errno) : "larger than 1 MiB");
		free(text);
		text = NULL;
	}
	fclose(f);
	return text;
}

/* ---- YAML to a tree ---- */

static bool is_null(const yaml_node_t *n)
{
	static const char *const nulls[] = { "", "~", "null", "Null", "NULL" };

	if (n->data.scalar.style != YAML_PLAIN_SCALAR_STYLE)
		return false;
	for (size_t i = 0; i < sizeof nulls / sizeof *nulls; i++)
		if (!strcmp((const char *)n->data.scalar.value, nulls[i]))
			return true;
	return false;
}

/* cJSON leaves valueint of texts, lists and maps alone: the line of the key. */
static bool add_entry(cJSON *to, const yaml_node_t *key, cJSON *value)
{
	if (value)
		value->valueint = (int)key->start_mark.line + 1;
	return cJSON_AddItemToObject(to, (const char *)key->data.scalar.value, value);
}

/* NULL: nested too deep or a key that is no text. */
static cJSON *tree(yaml_document_t *doc, int index, int depth)
{
	yaml_node_t *n = yaml_document_get_node(doc, index);
	cJSON *v;

	if (!n || depth > MAX_DEPTH)
		return NULL;
	if (n->type == YAML_SCALAR_NODE)
		return is_null(n) ? cJSON_CreateNull()
				  : cJSON_CreateString((const char *)n->data.scalar.value);
	v = n->type == YAML_SEQUENCE_NODE ? cJSON_CreateArray() : cJSON_CreateObject();
	if (n->type == YAML_SEQUENCE_NODE) {
		for (yaml_node_item_t *i = n->data.sequence.items.start;
		     i < n->data.sequence.items.top; i++)
			if (!cJSON_AddItemToArray(v, tree(doc, *i, depth + 1)))
				goto fail;
		return v;
	}
	for (yaml_node_pair_t *p = n->data.mapping.pairs.start; p < n->data.mapping.pairs.top;
	     p++) {
		yaml_node_t *key = yaml_document_get_node(doc, p->key);

		if (!key || key->type != YAML_SCALAR_NODE ||
		    !add_entry(v, key, tree(doc, p->value, depth + 1)))
			goto fail;
	}
	return v;
fail:
	cJSON_Delete(v);
	return NULL;
}

/* What follows the first document, which alone would be read: its line, or 0. */
static size_t second_document(yaml_parser_t *parser)
{
	yaml_document_t doc;
	size_t line = 0;

	if (!yaml_parser_load(parser, &doc))
		return parser->problem_mark.line + 1;
	if (yaml_document_get_root_node(&doc))
		line = doc.start_mark.line + 1;
	yaml_document_delete(&doc);
	return line;
}

static cJSON *parse_yaml(const char *text, size_t bytes)
{
	size_t line;
	yaml_parser_t parser;
	yaml_document_t doc;
	cJSON *v = NULL;

	if (!yaml_parser_initialize(&parser))
		return NULL;
	yaml_parser_set_input_string(&parser, (const unsigned char *)text, bytes);
	if (!yaml_parser_load(&parser, &doc)) {
		cli_fail(CLI_USAGE, "line %zu: %s", parser.problem_mark.line + 1,
			 parser.problem ? parser.problem : "not YAML");
	} else {
		if (yaml_document_get_root_node(&doc)) {
			v = tree(&doc, 1, 0);
			if (!v)
				cli_fail(CLI_USAGE, "nested deeper than settings are");
		} else {
			v = cJSON_CreateObject();
		}
		yaml_document_delete(&doc);
		line = v ? second_document(&parser) : 0;
		if (line) {
			cli_fail(CLI_USAGE, "line %zu: another document begins: one is read, put its keys into that", line);
			cJSON_Delete(v);
			v = NULL;
		}
	}
	yaml_parser_delete(&parser);
	return v;
}

static cJSON *parse_json(const char *text, size_t bytes)
{
	cJSON *v = cJSON_ParseWithLength(text, bytes);

	if (!v) {
		const char *at = cJSON_GetErrorPtr();
		int line = 1;

		for (const char *c = text; at && c < at && c < text + bytes; c++)
			line += *c == '\n';
		cli_fail(CLI_USAGE, "line %d: not JSON", line);
	}
	return v;
}

/* ---- the tree into settings ---- */

struct source {
	const char *path;
	bool yaml; /* its values know their lines */
};

/* Errors of one key name the file and the line, and the key where the flag is called otherwise. */
static void set_place(const struct source *from, const cJSON *v, const struct option *o)
{
	char line[16] = "";

	if (from->yaml && v->valueint > 0)
		snprintf(line, sizeof line, ":%d", v->valueint);
	if (o && !option_word_among(v->string, o->name, ' '))
		cli_set_place("--config %s%s: %s: ", from->path, line, v->string);
	else
		cli_set_place("--config %s%s: ", from->path, line);
}

/* A scalar as text; free it. NULL: not a scalar. */
static char *scalar(const cJSON *v)
{
	if (cJSON_IsString(v))
		return cli_format("%s", v->valuestring);
	if (cJSON_IsBool(v))
		return cli_format("%s", cJSON_IsTrue(v) ? "true" : "false");
	if (cJSON_IsNumber(v)) {
		char *text = cli_format("%.15g", v->valuedouble);

		if (strtod(text, NULL) == v->valuedouble)
			return text;
		free(text);
		return cli_format("%.17g", v->valuedouble);
	}
	return NULL;
}

/* One file serves train, estimate, eval, data and generate: what is another command's is left out, without a note. */
static bool known_elsewhere(const char *key)
{
	for (int i = 0; cli_commands[i]; i++) {
		struct settings other = { .command = cli_commands[i] };

		if (other.command->groups && settings_option(&other, key))
			return true;
	}
	return false;
}

#define MAX_NAMES 1024

static int unknown_key(const struct settings *s, const char *key)
{
	static char foreign[MAX_NAMES][64];
	const char *names[2 * MAX_NAMES + 1], *near;
	char spelled[64];
	int n = 0;

	for (const struct option_group *g = s->command->groups; g && g->title; g++)
		for (const struct option *o = g->options; o->name && n < MAX_NAMES; o++)
			names[n++] = o->name;
	for (int i = 0; i < MAX_NAMES && foreign_name(i, foreign[i], sizeof foreign[i]); i++)
		names[n++] = foreign[i];
	names[n] = NULL;
	near = cli_nearest(key, names);
	if (!near)
		return cli_fail(CLI_USAGE, "unknown key '%s'", key);
	snprintf(spelled, sizeof spelled, "%s", near);
	for (char *c = spelled; *c; c++)
		*c = *c == '-' ? '_' : *c;
	return cli_fail(CLI_USAGE, "unknown key '%s'; did you mean '%s'?", key, spelled);
}

/* A list, or a map as entries "key=value". */
static int set_list(struct settings *s, const cJSON *v)
{
	char **items = cli_alloc((MAX_ITEMS + 1) * sizeof *items);
	const cJSON *e;
	int n = 0, rc = 0;

	cJSON_ArrayForEach(e, v)
	{
		char *text = n < MAX_ITEMS ? scalar(e) : NULL;

		if (!text) {
			rc = cli_fail(CLI_USAGE, "%s: a list of texts is expected", v->string);
			break;
		}
		if (cJSON_IsObject(v)) {
			items[n] = cli_format("%s=%s", e->string, text);
			free(text);
		} else {
			items[n] = text;
		}
		n++;
	}
	rc = rc ? rc : settings_set(s, v->string, (const char *const *)items, n);
	for (int i = 0; i < n; i++)
		free(items[i]);
	free(items);
	return rc;
}

static int set_own(struct settings *s, const struct option *o, const cJSON *v)
{
	char *text;
	int rc = 0;

	if (cJSON_IsArray(v) || cJSON_IsObject(v))
		return set_list(s, v);
	text = scalar(v);
	if (o->traits & OPTION_VALUE_OPTIONAL && text && !strcmp(text, "true"))
		rc = settings_set(s, v->string, &(const char *){ "" }, 1);
	else if (!(o->traits & OPTION_VALUE_OPTIONAL && text && !strcmp(text, "false")))
		rc = settings_set(s, v->string, (const char *const *)&text, 1);
	free(text);
	return rc;
}

static int set_foreign(struct settings *s, const cJSON *v)
{
	char *text = scalar(v);
	int rc = foreign_set(s, v->string, text ? text : "");

	free(text);
	if (rc != -1)
		return rc;
	return known_elsewhere(v->string) ? 0 : unknown_key(s, v->string);
}

static int set_key(struct settings *s, const struct source *from, const cJSON *v)
{
	const struct option *o = settings_option(s, v->string);
	const cJSON *e;
	int rc = 0;

	set_place(from, v, o);
	if (cJSON_IsNull(v) && (o || foreign_known(v->string) || known_elsewhere(v->string)))
		return 0;
	if (!strcmp(v->string, "kt_config") && cJSON_IsObject(v)) { /* its keys are ours to know */
		for (e = v->child; e && !rc; e = e->next)
			rc = set_key(s, from, e);
		return rc;
	}
	return o ? set_own(s, o, v) : set_foreign(s, v);
}

static int check_duplicates(const struct source *from, const cJSON *root)
{
	for (const cJSON *a = root->child; a; a = a->next)
		for (const cJSON *b = a->next; b; b = b->next)
			if (!strcmp(a->string, b->string)) {
				set_place(from, b, NULL);
				return cli_fail(CLI_USAGE, "key '%s' appears twice", a->string);
			}
	return 0;
}

static int load(struct settings *s, struct source *from)
{
	size_t bytes = 0, length = strlen(from->path);
	char *text = read_text(from->path, &bytes);
	cJSON *root;
	int rc;

	if (!text)
		return CLI_USAGE;
	from->yaml = length <= 5 || strcmp(from->path + length - 5, ".json");
	root = from->yaml ? parse_yaml(text, bytes) : parse_json(text, bytes);
	free(text);
	if (!root)
		return CLI_USAGE;
	if (cJSON_IsObject(root))
		rc = check_duplicates(from, root);
	else
		rc = cli_fail(CLI_USAGE, "not a list of 'key: value' lines");
	for (const cJSON *v = root->child; v && !rc; v = v->next)
		rc = set_key(s, from, v);
	cJSON_Delete(root);
	return rc;
}

int settings_load(struct settings *s, const char *path)
{
	struct source from = { .path = path };
	int rc;

	cli_set_place("--config %s: ", path);
	rc = load(s, &from);
	cli_set_place(NULL);
	if (!rc)
		foreign_finish(path);
	return rc;
}

/* ---- run.yaml ---- */

static void write_scalar(const struct option *o, const char *text, FILE *to)
{
	if (o->type == OPTION_INT || o->type == OPTION_REAL || o->type == OPTION_FLAG) {
		fputs(text, to);
		return;
	}
	putc('"', to);
	for (const unsigned char *c = (const unsigned char *)text; *c; c++)
		if (*c == '"' || *c == '\\')
			fprintf(to, "\\%c", *c);
		else if (*c < ' ' || *c == 0x7f)
			fprintf(to, "\\x%02x", *c);
		else
			putc(*c, to);
	putc('"', to);
}

static void write_value(const struct option *o, const struct option_value *v, FILE *to)
{
	for (const char *c = o->name; *c; c++)
		putc(*c == '-' ? '_' : *c, to);
	fputs(o->type == OPTION_LIST ? ": [" : ": ", to);
	for (int i = 0; i < v->count; i++) {
		fputs(i ? ", " : "", to);
		write_scalar(o, v->items[i], to);
	}
	fputs(o->type == OPTION_LIST ? "]\n" : "\n", to);
}

void settings_write(const struct settings *s, int argc, char **argv, FILE *to)
{
	time_t now = time(NULL);
	struct tm utc;
	char date[32];
	int i = 0;

	gmtime_r(&now, &utc);
	strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
	fprintf(to, "# moesaic %s, %s; usable as --config\n# command line:", moe_version(), date);
	for (int a = 0; a < argc; a++) {
		putc(' ', to);
		for (const char *c = argv[a]; *c; c++)
			putc(*c == '\n' || *c == '\r' ? ' ' : *c, to);
	}
	putc('\n', to);
	for (const struct option_group *g = s->command->groups; g && g->title; g++)
		for (const struct option *o = g->options; o->name; o++, i++)
			if (s->values[i].count && !(o->traits & OPTION_TRANSIENT))
				write_value(o, &s->values[i], to);
}
