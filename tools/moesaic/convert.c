/* SPDX-License-Identifier: Apache-2.0 */
/* moesaic convert: the weights of a model in another format, or an adapter in another form. */
#include "engine/size.h"
#include "tools/moesaic/commands.h"
#include "tools/moesaic/json_line.h"
#include "tools/moesaic/work.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct option what[] = {
	{ "weights", OPTION_CHOICE, OPTION_COMMON, "nearest|int8|int4|fp8|mxfp4|gptq|awq|bf16|f16|f32|kt-int8|kt-int4",
	  NULL, "format of a model's weights (of GGUF and kt's files: nearest)", 0, 0, "", NULL },
	{ "kt-weights", OPTION_TEXT, OPTION_COMMON, "DIR", NULL,
	  "folder of kt-kernel's INT8 or INT4 files: its experts, not IN's", 0, 0, "kt-weight-path", NULL },
	{ "kt-parts", OPTION_INT, OPTION_COMMON, "N", NULL,
	  "NUMA parts of kt-int8 and kt-int4: the threadpool count of kt-kernel (1)", 1, 64, "", NULL },
	{ "kt-backward", OPTION_FLAG, OPTION_COMMON, NULL, NULL,
	  "kt-int8, kt-int4: prepared backward weights too (twice the bytes)", 0, 0, "", NULL },
	{ "layers", OPTION_CHOICE, OPTION_COMMON, "experts|linear", NULL,
	  "what becomes so: experts, or all projections (fp8: linear, other formats: experts)", 0,
	  0, "", NULL },
	{ "max-shard-size", OPTION_SIZE, OPTION_COMMON, "SIZE", "5GB",
	  "split files that are larger", 1, 0, "", NULL },
	{ "threads", OPTION_INT, OPTION_COMMON, "N", NULL, "how many (all CPUs)", 1, 4096,
	  "workers", NULL },
	{ "adapter-format", OPTION_CHOICE, OPTION_COMMON, "peft|per-expert|kt", NULL,
	  "form of an adapter's files", 0, 0, "", NULL },
	{ "model", OPTION_TEXT, OPTION_COMMON, "DIR", NULL,
	  "base model of an adapter: checks it, gives its names (Mixtral)", 0, 0,
	  "model-name-or-path", NULL },
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
	bool there = !cli_missing(path);

	free(path);
	return there;
}

/* A GGUF file, or what the reader refuses. */
static bool is_file(const char *path)
{
	struct stat st;

	return stat(path, &st) == 0 && S_ISREG(st.st_mode);
}

static const char *weights_of(const struct settings *s)
{
	return settings_has(s, "weights") ? settings_text(s, "weights") : "nearest";
}

/* What IN is: *model. An exit code after an error line. */
static int check(const struct settings *s, bool *model)
{
	const char *in = s->operands[0];

	if (s->n_operands != 2)
		return cli_fail(CLI_USAGE, "IN and OUT are expected, %d given", s->n_operands);
	if (cli_missing(in))
		return cli_fail(CLI_USAGE, "%s: no such folder", in);
	if (access(in, is_file(in) ? R_OK : R_OK | X_OK))
		return cli_fail(CLI_USAGE, "%s: %s", in, strerror(errno));
	*model = !has_file(in, "adapter_config.json");
	if (*model && !is_file(in) && !has_file(in, "config.json"))
		return cli_fail(CLI_USAGE,
				"%s: it has no adapter_config.json and no config.json, so it "
				"is neither an adapter nor a model (a folder of kt-kernel's files is named by "
				"--kt-weights, its model is IN)",
				in);
	if (*model && settings_has(s, "adapter-format"))
		return cli_fail(CLI_USAGE,
				"%s is a model: --adapter-format is for adapters, --weights F "
				"for models",
				in);
	if (!*model && settings_has(s, "weights"))
		return cli_fail(CLI_USAGE,
				"%s is an adapter: --weights is for models, --adapter-format F "
				"for adapters",
				in);
	if (!*model && !settings_has(s, "adapter-format"))
		return cli_fail(CLI_USAGE, "--adapter-format peft|per-expert|kt is missing");
	if (!*model && settings_has(s, "kt-weights"))
		return cli_fail(CLI_USAGE, "%s is an adapter: --kt-weights is for models", in);
	if (*model && !is_file(in) && !settings_has(s, "kt-weights") && !settings_has(s, "weights"))
		return cli_fail(CLI_USAGE,
				"--weights int8|int4|fp8|mxfp4|gptq|awq|bf16|f16|f32|kt-int8|kt-int4 is missing");
	return 0;
}

/* ---- adapters ---- */

static void print_adapter(const struct settings *s, const struct moe_convert_result *r)
{
	cJSON *o;

	if (settings_on(s, "json")) {
		o = cJSON_CreateObject();
		cJSON_AddStringToObject(o, "from", r->from);
		cJSON_AddStringToObject(o, "to", r->to);
		cJSON_AddNumberToObject(o, "params", (double)r->params);
		json_line(o);
	} else if (!settings_on(s, "quiet")) {
		printf("%s -> %s: %s\n", r->from, r->to, s->operands[1]);
	}
}

static int run_adapter(const struct settings *s)
{
	struct moe_convert_result r = { .struct_size = sizeof r };
	struct moe_convert_params p = { .struct_size = sizeof p };
	enum moe_status st;

	p.in = s->operands[0];
	p.out = s->operands[1];
	p.adapter_format = settings_text(s, "adapter-format");
	p.model = settings_text(s, "model");
	st = moe_convert_adapter(&p, &r);
	if (st == MOE_OK)
		print_adapter(s, &r);
	return cli_status(st);
}

/* ---- weights ---- */

static void print_json(const struct settings *s, const struct moe_convert_model_result *r)
{
	cJSON *o = cJSON_CreateObject();

	cJSON_AddStringToObject(o, "output_dir", s->operands[1]);
	cJSON_AddStringToObject(o, "weights", weights_of(s));
	cJSON_AddNumberToObject(o, "tensors", (double)r->tensors);
	cJSON_AddNumberToObject(o, "converted", (double)r->converted);
	cJSON_AddNumberToObject(o, "kept", (double)r->kept);
	cJSON_AddNumberToObject(o, "files", (double)r->shards);
	cJSON_AddNumberToObject(o, "resumed", (double)r->resumed);
	cJSON_AddNumberToObject(o, "bytes_in", (double)r->bytes_in);
	cJSON_AddNumberToObject(o, "bytes", (double)r->bytes);
	cJSON_AddNumberToObject(o, "error", r->error);
	cJSON_AddNumberToObject(o, "worst_error", r->worst_error);
	cJSON_AddStringToObject(o, "worst", r->worst);
	cJSON_AddNumberToObject(o, "largest_error", r->largest_error);
	cJSON_AddNumberToObject(o, "seconds", r->seconds);
	json_line(o);
}

static void print_model(const struct settings *s, const struct moe_convert_model_result *r)
{
	const char *unit = strncmp(weights_of(s), "kt-", 3) ? "file" : "layer";

	if (settings_on(s, "json")) {
		print_json(s, r);
		return;
	}
	if (settings_on(s, "quiet"))
		return;
	printf("%lld matrices to %s, %s to %s in %lld %s%s, %.1f s: %s\n",
	       (long long)r->converted, weights_of(s), moe_size(r->bytes_in).text,
	       moe_size(r->bytes).text, (long long)r->shards, unit, r->shards == 1 ? "" : "s",
	       r->seconds, s->operands[1]);
	if (r->resumed)
		printf("%lld %s%s from an earlier run, checksums verified\n", (long long)r->resumed, unit,
		       r->resumed == 1 ? " is" : "s are");
	if (r->kept)
		printf("%lld matrices: the codes they had, exactly\n", (long long)r->kept);
	if (r->worst_error > 0)
		printf("relative error (L2) %.3g, at most %.3g in %s; of a weight at most %.3g\n", r->error,
		       r->worst_error, r->worst, r->largest_error);
}

static int run_model(const struct settings *s)
{
	struct moe_convert_model_result r = { .struct_size = sizeof r };
	struct moe_convert_model_params p = {
		.struct_size = sizeof p,
		.in = s->operands[0],
		.out = s->operands[1],
		.weights = weights_of(s),
		.layers = settings_text(s, "layers"),
		.max_shard_bytes = settings_int(s, "max-shard-size"),
		.threads = (int)settings_int(s, "threads"),
		.kt_weights = settings_text(s, "kt-weights"),
		.kt_parts = (int)settings_int(s, "kt-parts"),
		.kt_backward = settings_on(s, "kt-backward"),
		.progress = work_progress,
	};
	struct work w;
	enum moe_status st;

	work_begin(&w, s, "converting");
	p.user = &w;
	st = moe_convert_model(&p, &r);
	work_end(&w);
	if (st == MOE_OK)
		print_model(s, &r);
	return cli_status(st);
}

static int run(struct settings *s, int argc, char **argv)
{
	bool model = false;
	int rc = check(s, &model);

	(void)argc, (void)argv;
	if (rc)
		return rc;
	return model ? run_model(s) : run_adapter(s);
}

const struct command command_convert = {
	.name = "convert",
	.summary = "weights in another format, an adapter in another form",
	.operands = "IN OUT",
	.groups = groups,
	.run = run,
};
