/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic merge: an adapter into the weights of its base model. */
#include "engine/size.h"
#include "tools/moesaic/commands.h"
#include "tools/moesaic/json_line.h"
#include "tools/moesaic/work.h"

static const struct option what[] = {
	{ "model", OPTION_TEXT, OPTION_COMMON | OPTION_REQUIRED, "DIR", NULL,
	  "Hugging Face checkpoint folder, the adapter's base", 0, 0, "model-name-or-path", NULL },
	{ "adapter", OPTION_TEXT, OPTION_COMMON | OPTION_REQUIRED, "DIR", NULL,
	  "adapter, in any form", 0, 0, "adapter-name-or-path", NULL },
	{ "output-dir", OPTION_TEXT, OPTION_COMMON | OPTION_REQUIRED, "DIR", NULL,
	  "where the merged model goes: a new folder", 0, 0, "export-dir", NULL },
	{ "weights", OPTION_CHOICE, OPTION_COMMON, "keep|bf16|int8|int4|fp8|mxfp4|gptq|awq|f16|f32",
	  "keep", "format of the weights; keep: what is quantised is quantised again", 0, 0, "",
	  NULL },
	{ "max-shard-size", OPTION_SIZE, OPTION_COMMON, "SIZE", "5GB",
	  "split files that are larger; others stay as they are", 1, 0, "", NULL },
	{ .name = NULL },
};

static const struct option_group groups[] = {
	{ "What", what },
	{ "General", options_general },
	{ NULL, NULL },
};

static void print(const struct settings *s, const struct moe_merge_result *r)
{
	cJSON *o;

	if (settings_on(s, "json")) {
		o = cJSON_CreateObject();
		cJSON_AddStringToObject(o, "output_dir", settings_text(s, "output-dir"));
		cJSON_AddNumberToObject(o, "tensors", (double)r->tensors);
		cJSON_AddNumberToObject(o, "merged", (double)r->merged);
		cJSON_AddNumberToObject(o, "shards", (double)r->shards);
		cJSON_AddNumberToObject(o, "bytes", (double)r->bytes);
		cJSON_AddNumberToObject(o, "error", r->error);
		cJSON_AddNumberToObject(o, "worst_error", r->worst_error);
		cJSON_AddNumberToObject(o, "seconds", r->seconds);
		json_line(o);
	} else if (!settings_on(s, "quiet")) {
		printf("merged %lld of %lld tensors, %s in %lld %s, %.1f s: %s\n",
		       (long long)r->merged, (long long)r->tensors, moe_size(r->bytes).text,
		       (long long)r->shards, r->shards == 1 ? "file" : "files", r->seconds,
		       settings_text(s, "output-dir"));
		if (r->worst_error > 0)
			printf("relative error (L2) of what was quantised: %.3g, at most %.3g\n",
			       r->error, r->worst_error);
	}
}

static int run(struct settings *s, int argc, char **argv)
{
	struct moe_merge_result r = { .struct_size = sizeof r };
	struct moe_merge_params p = {
		.struct_size = sizeof p,
		.model = settings_text(s, "model"),
		.adapter = settings_text(s, "adapter"),
		.output_dir = settings_text(s, "output-dir"),
		.weights = settings_text(s, "weights"),
		.max_shard_bytes = settings_int(s, "max-shard-size"),
		.progress = work_progress,
	};
	struct work w;
	enum moe_status st;

	(void)argc, (void)argv;
	work_begin(&w, s, "merging");
	p.user = &w;
	st = moe_merge(&p, &r);
	work_end(&w);
	if (st == MOE_OK)
		print(s, &r);
	return cli_status(st);
}

const struct command command_merge = {
	.name = "merge",
	.summary = "adapter into weights",
	.groups = groups,
	.run = run,
};
