/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic estimate: memory, tasks and time of a run that is not started; from config.json alone. */
#include "engine/size.h"
#include "tools/moesaic/commands.h"
#include "tools/moesaic/dataset.h"
#include "tools/moesaic/doctor.h"
#include "tools/moesaic/estimate.h"
#include "tools/moesaic/model.h"
#include "tools/moesaic/python.h"

#include <stdlib.h>
#include <string.h>

static const struct option what[] = {
	{ "graph", OPTION_FLAG, OPTION_COMMON, NULL, NULL, "tasks by kind, handles, submission", 0,
	  0, "", NULL },
	{ "gflops", OPTION_REAL, OPTION_ABOVE_ZERO, "X", NULL,
	  "speed of a worker, in place of this machine's rates", 0, 0, "", NULL },
	{ .name = NULL },
};

static const struct option_group groups[] = {
	{ "Estimate", what },
	TRAIN_GROUPS,
	{ NULL, NULL },
};

/* Bytes that a run may take: --memory-limit, or what is free here. */
static int64_t allowed(const struct settings *s)
{
	struct doctor_system system;

	if (settings_has(s, "memory-limit"))
		return settings_int(s, "memory-limit");
	doctor_look(&system);
	return system.memory_limit >= 0 && system.memory_limit < system.available
		       ? system.memory_limit
		       : system.available;
}

static int fill(const struct settings *s, struct estimate_result *r)
{
	struct moe_machine_info machine = { .struct_size = sizeof machine };
	struct moe_estimate_params *p = &r->params;
	int64_t rows = settings_int(s, "batch-size"), length = settings_int(s, "cutoff-len");
	int64_t tokens = rows ? rows * length : settings_int(s, "batch-tokens");
	int parts = tool_model_parts(s), rc = cli_status(moe_machine_describe(&machine));

	if (rc)
		return rc;
	parts = parts ? parts : machine.nodes > 0 ? machine.nodes : 1;
	r->cpus = machine.cpus;
	p->struct_size = sizeof *p;
	p->parts = parts;
	p->workers = settings_has(s, "threads")
			     ? (int)settings_int(s, "threads")
			     : (machine.workers > parts ? machine.workers : parts);
	p->tokens = tokens > INT32_MAX ? INT32_MAX : (int)tokens;
	p->document_tokens = (int)(length < p->tokens ? length : p->tokens);
	p->micro_batches = (int)settings_int(s, "gradient-accumulation-steps");
	p->gflops_per_worker = settings_real(s, "gflops");
	return 0;
}

/* The same run with other numbers: true, and its bytes, if it fits; else *least is what it needs, where that is less. */
static bool try_plan(struct estimate_result *r, const struct moe_estimate_params *p, int64_t *least)
{
	struct moe_estimate e = { .struct_size = sizeof e };

	if (moe_estimate(p, &e) != MOE_OK)
		return false;
	if (e.total < *least)
		*least = e.total;
	if (e.total > r->limit)
		return false;
	r->change_total = e.total;
	return true;
}

/* The same documents in micro-batches of n tokens. m: what p->model is. */
static void set_tokens(struct moe_estimate_params *p, struct moe_model_params *m, int n)
{
	p->tokens = m->max_tokens = n;
	if (p->document_tokens > n)
		p->document_tokens = n;
}

/*
 * Ever smaller micro-batches, with flags that p has already. The smallest comes first: where it does not fit, no other
 * would, and each is a whole estimate.
 */
static bool try_tokens(struct estimate_result *r, const struct moe_estimate_params *from, const char *flags, int64_t *least)
{
	struct moe_estimate_params p = *from, smallest;
	struct moe_model_params m = *p.model;

	p.model = &m;
	if (p.tokens <= ESTIMATE_LEAST_TOKENS)
		return false;
	smallest = p;
	set_tokens(&smallest, &m, ESTIMATE_LEAST_TOKENS);
	if (!try_plan(r, &smallest, least))
		return false;
	do
		set_tokens(&p, &m, p.tokens / 2 > ESTIMATE_LEAST_TOKENS ? p.tokens / 2 : ESTIMATE_LEAST_TOKENS);
	while (p.tokens > ESTIMATE_LEAST_TOKENS && !try_plan(r, &p, least));
	snprintf(r->change, sizeof r->change, "%s--batch-tokens %d%s", flags, p.tokens,
		 p.document_tokens < r->params.document_tokens ? " and as short a --cutoff-len" : "");
	return true;
}

/* Frozen experts of floats in a format of fewer bits; then with smaller micro-batches too. */
static bool try_weights(struct estimate_result *r, const char *direct, int64_t *least)
{
	static const char *const formats[] = { "int8", "int4" };
	struct moe_estimate_params p = r->params;
	struct moe_model_params m = *p.model;
	int64_t before = *least;
	char flags[64];

	if (m.method != MOE_METHOD_LORA || (m.weights && strcmp(m.weights, "keep")))
		return false;
	p.model = &m;
	m.backward_weights = "direct";
	for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
		m.weights = formats[i];
		if (!try_plan(r, &p, least))
			continue;
		snprintf(r->change, sizeof r->change, "%s--weights %s", direct, formats[i]);
		return true;
	}
	for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
		m.weights = formats[i];
		snprintf(flags, sizeof flags, "%s--weights %s ", direct, formats[i]);
		if (try_tokens(r, &p, flags, least))
			return true;
		if (*least < before)
			snprintf(r->least_with, sizeof r->least_with, "--weights %s ", formats[i]);
		before = *least;
	}
	return false;
}

/* The first change that makes it fit: no copies of weights, smaller micro-batches, fewer bits, both. */
static void find_what_fits(struct estimate_result *r)
{
	struct moe_estimate_params p = r->params;
	struct moe_model_params m = *p.model;
	const char *direct =
		strcmp(r->found.backward_weights, "direct") ? "--backward-weights direct " : "";
	int64_t least = r->found.total;

	p.model = &m;
	m.backward_weights = "direct";
	if (*direct && try_plan(r, &p, &least)) {
		snprintf(r->change, sizeof r->change, "--backward-weights direct");
		return;
	}
	if (!try_tokens(r, &p, direct, &least) && !try_weights(r, direct, &least))
		r->change_total = least;
}

static int count_data(const struct settings *s, struct estimate_result *r)
{
	double steps, step_tokens = (double)r->params.tokens * r->params.micro_batches;
	int rc;

	if (!settings_has(s, "data"))
		return 0;
	rc = token_count(s, "data", &r->data_tokens);
	if (rc)
		return rc;
	r->epochs = settings_real(s, "epochs");
	steps = (double)r->data_tokens * r->epochs / step_tokens;
	if (settings_int(s, "max-steps") > 0 && steps > (double)settings_int(s, "max-steps")) {
		steps = (double)settings_int(s, "max-steps");
		r->epochs = steps * step_tokens / (double)r->data_tokens;
	}
	r->hours = steps * step_tokens / r->found.tokens_per_s / 3600;
	return 0;
}

static int estimate(struct settings *s, struct estimate_result *r)
{
	struct moe_model_params model;
	char *targets = tool_model_params(s, &model);
	int rc;

	r->params.model = &model;
	model.memory_limit = r->limit;
	rc = fill(s, r);
	rc = rc ? rc : cli_status(moe_estimate(&r->params, &r->found));
	rc = rc ? rc : count_data(s, r);
	if (!rc && !estimate_fits(r))
		find_what_fits(r);
	free(targets);
	return rc;
}

static int run(struct settings *s, int argc, char **argv)
{
	struct estimate_result r = { .found = { .struct_size = sizeof r.found },
				     .limit = allowed(s) };
	int rc = train_resolve_course(s);

	(void)argc, (void)argv;
	rc = rc ? rc : dataset_resolve(s);
	rc = rc ? rc : train_resolve_method(s);
	if (!rc && cli_missing(settings_text(s, "model")))
		rc = cli_fail(CLI_USAGE, "--model %s: no such folder or config.json%s", settings_text(s, "model"),
			      "; nothing is downloaded: its config.json is enough (hf download NAME config.json --local-dir DIR)");
	if (!rc && tool_model_parts(s) < 0)
		rc = cli_fail(CLI_USAGE, "--numa %s: expected auto, off or a number of parts",
			      settings_text(s, "numa"));
	rc = rc ? rc : estimate(s, &r);
	if (rc)
		return rc;
	if (settings_on(s, "json"))
		estimate_print_json(&r);
	else
		estimate_print_text(s, &r);
	if (settings_has(s, "memory-limit") && !estimate_fits(&r))
		return cli_fail(CLI_NOFIT, "%s are needed, --memory-limit %s%s%s",
				moe_size(r.found.total).text, settings_text(s, "memory-limit"),
				*r.change ? "; it would fit with " : "", r.change);
	return 0;
}

const struct command command_estimate = {
	.name = "estimate",
	.summary = "memory and time of a run, without loading",
	.groups = groups,
	.run = run,
};
