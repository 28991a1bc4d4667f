/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic generate: answers a prompt, or a prompt a line from stdin; each is a conversation of its own. */
#include "tools/moesaic/commands.h"
#include "tools/moesaic/json_line.h"
#include "tools/moesaic/model.h"
#include "tools/moesaic/sample.h"
#include "tools/moesaic/tokenizer.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STDIN_TOKENS 4096 /* prompt and answer, where prompts come line by line */

static const struct option what[] = {
	{ "model", OPTION_TEXT, OPTION_COMMON | OPTION_REQUIRED, "DIR", NULL,
	  "Hugging Face checkpoint folder", 0, 0, "model-name-or-path", NULL },
	{ "adapter", OPTION_TEXT, OPTION_COMMON, "DIR", NULL, "adapter, in any form", 0, 0,
	  "adapter-name-or-path", NULL },
	{ "system", OPTION_TEXT, OPTION_COMMON, "TEXT", NULL, "system message", 0, 0,
	  "default-system", NULL },
	{ "no-system", OPTION_FLAG, OPTION_COMMON, NULL, NULL, "not even the template's own", 0, 0,
	  "", NULL },
	{ "raw", OPTION_FLAG, OPTION_COMMON, NULL, NULL, "no chat template", 0, 0, "", NULL },
	{ "chat-template", OPTION_TEXT, 0, "FILE", NULL, "in place of the checkpoint's template", 0,
	  0, "", NULL },
	{ "template-vars", OPTION_LIST, 0, "K=V...", NULL, "such as enable_thinking=false", 0, 0,
	  "", NULL },
	{ "max-new-tokens", OPTION_INT, OPTION_COMMON, "N", "256", "longest answer", 1, 1e9, "",
	  NULL },
	{ "temperature", OPTION_REAL, OPTION_COMMON, "X", "0", "0: always the likeliest token", 0,
	  1e3, "", NULL },
	{ "top-p", OPTION_REAL, OPTION_COMMON | OPTION_ABOVE_ZERO, "X", "1",
	  "sample from the likeliest tokens of this share", 0, 1, "", NULL },
	{ "repetition-penalty", OPTION_REAL, OPTION_ABOVE_ZERO, "X", "1",
	  "above 1: fewer repetitions", 0, 0, "", NULL },
	{ "seed", OPTION_INT, 0, "N", "42", "of sampling", 0, 9e15, "", NULL },
	{ .name = NULL },
};

static const struct option_group groups[] = {
	{ "What", what },
	{ "Machine", options_machine },
	{ "General", options_general },
	{ NULL, NULL },
};

struct generator {
	const struct settings *s;
	struct tokenizer tokenizer;
	struct tool_model model;
	struct sampler sampler;
	float *logits; /* [vocab] */
	int64_t max_new;
	bool json;
};

static bool is_end(const struct generator *g, int32_t id)
{
	for (int i = 0; i < g->model.info.n_eos; i++)
		if (g->model.info.eos_ids[i] == id)
			return true;
	for (int i = 0; i < g->tokenizer.n_eos; i++)
		if (g->tokenizer.eos_ids[i] == id)
			return true;
	return false;
}

/* Appends text to *all, and shows it at once unless the answer is printed as JSON. */
static void show(const struct generator *g, char *text, char **all)
{
	char *longer = cli_format("%s%s", *all, text);

	if (!g->json) {
		fputs(text, stdout);
		fflush(stdout);
	}
	free(*all);
	free(text);
	*all = longer;
}

/* The token after ids[0..n), of which the model has seen the first `past`. */
static int next_token(struct generator *g, const int32_t *ids, int64_t n, int64_t past, int32_t *next)
{
	struct moe_array out = {
		.data = g->logits, .dtype = MOE_F32, .ndim = 2, .shape = { 1, g->model.info.vocab }
	};
	enum moe_status st = moe_model_next(g->model.model, ids + past, n - past, past, &out);

	if (st != MOE_OK)
		return cli_status(st);
	*next = sample_token(&g->sampler, g->logits, g->model.info.vocab, ids, n);
	return 0;
}

/* The loop over tokens. ids has room for n + max_new. *made: new tokens. */
static int continue_text(struct generator *g, int32_t *ids, int64_t n, int64_t *made, char **all)
{
	int64_t limit = g->model.info.max_tokens < g->model.info.max_positions
				? g->model.info.max_tokens
				: g->model.info.max_positions;
	char *text;
	int rc = tokenizer_start(&g->tokenizer);

	if (!rc && n > limit)
		return cli_fail(CLI_USAGE, "the prompt has %lld tokens, more than %lld",
				(long long)n, (long long)limit);
	/* the last token needs no position of its own */
	for (*made = 0; !rc && *made < g->max_new && n + *made <= limit && !ferror(stdout);
	     ++*made) {
		int32_t id = 0;

		rc = next_token(g, ids, n + *made, *made ? n + *made - 1 : 0, &id);
		if (rc || is_end(g, id))
			break;
		ids[n + *made] = id;
		if (id >= g->tokenizer.vocab_size) /* a row of padding of the embedding */
			continue;
		rc = tokenizer_token(&g->tokenizer, id, &text);
		if (!rc)
			show(g, text, all);
	}
	if (!rc)
		rc = tokenizer_finish(&g->tokenizer, &text);
	if (!rc)
		show(g, text, all);
	return rc;
}

static void print_json(const char *prompt, const char *text, int64_t n_prompt, int64_t n)
{
	cJSON *o = cJSON_CreateObject();

	cJSON_AddStringToObject(o, "prompt", prompt);
	cJSON_AddStringToObject(o, "text", text);
	cJSON_AddNumberToObject(o, "prompt_tokens", (double)n_prompt);
	cJSON_AddNumberToObject(o, "tokens", (double)n);
	json_line(o);
}

static int open_model(struct generator *g, int64_t tokens)
{
	int rc = tool_model_open_inference(&g->model, g->s, tokens, true);
	size_t vocab = (size_t)g->model.info.vocab;

	if (rc)
		return rc;
	g->logits = cli_alloc(vocab * sizeof *g->logits);
	if (g->sampler.temperature > 0)
		g->sampler.candidates = cli_alloc(vocab * sizeof *g->sampler.candidates);
	return 0;
}

/* capacity 0: a model for just this prompt. */
static int answer(struct generator *g, const char *prompt, int64_t capacity)
{
	const char *system = settings_text(g->s, "system");
	bool chat = !settings_on(g->s, "raw");
	char *all = cli_format("%s", "");
	int64_t n, made = 0;
	int32_t *ids, *room;
	int rc = tokenizer_encode(&g->tokenizer, prompt, chat, system, &ids, &n);

	if (!rc && n < 1)
		rc = cli_fail(CLI_USAGE, "the prompt is empty");
	if (!rc && !g->model.model)
		rc = open_model(g, capacity ? capacity : n + g->max_new);
	room = cli_alloc((size_t)(n + g->max_new) * sizeof *room);
	if (!rc) {
		memcpy(room, ids, (size_t)n * sizeof *room);
		rc = continue_text(g, room, n, &made, &all);
	}
	if (!rc && g->json)
		print_json(prompt, all, n, made);
	else if (!rc)
		putchar('\n');
	free(room);
	free(ids);
	free(all);
	return rc;
}

static int answer_lines(struct generator *g)
{
	bool terminal = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO) && !g->json;
	char *line = NULL;
	size_t size = 0;
	ssize_t n;
	int rc = 0;

	for (;;) {
		if (terminal)
			fputs("> ", stdout), fflush(stdout);
		n = getline(&line, &size, stdin);
		if (n < 0 || rc)
			break;
		while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r'))
			line[--n] = 0;
		if (n > 0)
			rc = answer(g, line, STDIN_TOKENS);
		if (rc)
			break;
	}
	free(line);
	return rc;
}

static int check(struct settings *s)
{
	if (settings_on(s, "raw") && settings_has(s, "system"))
		return cli_fail(CLI_USAGE, "--raw and --system exclude each other");
	if (settings_on(s, "no-system") && settings_has(s, "system"))
		return cli_fail(CLI_USAGE, "--no-system and --system exclude each other");
	if (s->n_operands > 1)
		return cli_fail(CLI_USAGE, "one prompt, in quotes; %d arguments were given",
				s->n_operands);
	return tool_model_check(s, false);
}

static int run(struct settings *s, int argc, char **argv)
{
	struct generator g = {
		.s = s,
		.tokenizer.child.pid = -1,
		.max_new = settings_int(s, "max-new-tokens"),
		.json = settings_on(s, "json"),
		.sampler = { .temperature = settings_real(s, "temperature"),
			     .top_p = settings_real(s, "top-p"),
			     .repetition_penalty = settings_real(s, "repetition-penalty"),
			     .state = (uint64_t)settings_int(s, "seed") },
	};
	int rc = check(s);

	(void)argc, (void)argv;
	rc = rc ? rc : tokenizer_open(&g.tokenizer, s);
	if (!rc && !g.tokenizer.chat && !settings_on(s, "raw"))
		rc = cli_fail(CLI_USAGE, "%s has no chat template: --raw, or --chat-template FILE",
			      settings_text(s, "model"));
	if (!rc && s->n_operands)
		rc = answer(&g, s->operands[0], 0);
	else if (!rc)
		rc = answer_lines(&g);
	tokenizer_close(&g.tokenizer);
	tool_model_close(&g.model);
	free(g.logits);
	free(g.sampler.candidates);
	return rc;
}

const struct command command_generate = {
	.name = "generate",
	.summary = "answer prompts",
	.operands = "[PROMPT]",
	.groups = groups,
	.run = run,
};
