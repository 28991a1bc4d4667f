/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/moesaic/model.h"
#include "tools/moesaic/python.h"
#include "tools/moesaic/start_noise.h"

#include "engine/size.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define HANDLE_BYTES 4096 /* of StarPU, measured */
#define MOST_PARTS 32	  /* of an engine */

int tool_model_parts(const struct settings *s)
{
	const char *text = settings_text(s, "numa");
	char *end;
	long n;

	if (!strcmp(text, "auto"))
		return 0;
	if (!strcmp(text, "off") || !strcmp(text, "false"))
		return 1;
	n = strtol(text, &end, 10);
	return *text && !*end && n >= 1 && n <= MOST_PARTS ? (int)n : -1;
}

static int check_folder(const char *flag, const char *dir, const char *file)
{
	struct stat st;
	char *path;
	int rc = 0;

	if (cli_missing(dir) || (stat(dir, &st) == 0 && !S_ISDIR(st.st_mode)))
		return cli_fail(CLI_USAGE, "--%s %s: no such folder%s", flag, dir,
				strcmp(flag, "model") ? "" : TOOL_NO_DOWNLOAD);
	path = cli_format("%s/%s", dir, file);
	if (cli_missing(path))
		rc = cli_fail(CLI_USAGE, "--%s %s: it has no %s", flag, dir, file);
	else if (access(path, R_OK))
		rc = cli_fail(CLI_USAGE, "--%s %s: %s: %s", flag, dir, file, strerror(errno));
	free(path);
	return rc;
}

/* A folder, or a GGUF file: what is in a file its reader tells. */
static int check_base(const char *model)
{
	struct stat st;

	if (stat(model, &st) == 0 && S_ISREG(st.st_mode))
		return 0;
	return check_folder("model", model, "config.json");
}

int tool_model_cutoff(struct settings *s, int64_t positions)
{
	int64_t asked = settings_int(s, "cutoff-len");
	char *text;

	if (positions <= 0 || asked <= positions)
		return 0;
	if (settings_flagged(s, "cutoff-len"))
		return cli_fail(CLI_USAGE, "--cutoff-len %lld: the model has %lld positions (max_position_embeddings)",
				(long long)asked, (long long)positions);
	if (settings_given(s, "cutoff-len"))
		cli_note("cutoff_len: %lld: the model has %lld positions, which documents are cut to", (long long)asked,
			 (long long)positions);
	text = cli_format("%lld", (long long)positions);
	settings_set(s, "cutoff-len", (const char *const *)&text, 1);
	free(text);
	return 0;
}

static struct moe_engine_params engine_params(const struct settings *s)
{
	return (struct moe_engine_params){
		.struct_size = sizeof(struct moe_engine_params),
		.workers = (int)settings_int(s, "threads"),
		.parts = tool_model_parts(s),
		.policy = settings_text(s, "policy"),
	};
}

/* What config.json and the adapter refuse. */
static int check_model(struct settings *s, bool training)
{
	struct moe_model_info info = { .struct_size = sizeof info };
	struct moe_model_params p = { .inference_only = 1 };
	char *targets = training ? tool_model_params(s, &p) : NULL;
	int rc;

	p.struct_size = sizeof p;
	p.dir = settings_text(s, "model");
	p.adapter = settings_text(s, "adapter");
	rc = cli_status(moe_model_check(&p, &info));
	free(targets);
	if (!rc && settings_option(s, "cutoff-len") && !token_file_given(s, "data"))
		rc = tool_model_cutoff(s, info.max_positions);
	return rc;
}

int tool_model_check(struct settings *s, bool training)
{
	struct moe_engine_params engine;
	int rc = check_base(settings_text(s, "model"));

	if (!rc && settings_has(s, "adapter"))
		rc = check_folder("adapter", settings_text(s, "adapter"), "adapter_config.json");
	if (!rc && tool_model_parts(s) < 0)
		rc = cli_fail(CLI_USAGE, "--numa %s: expected auto, off or a number of parts, at most %d",
			      settings_text(s, "numa"), MOST_PARTS);
	if (rc)
		return rc;
	engine = engine_params(s);
	rc = cli_status(moe_engine_check_params(&engine));
	return rc ? rc : check_model(s, training);
}

/* A line that is updated, or one every ten seconds where stderr is no terminal: of long loads only. */
#define LINE_S 10

static void show_loading(const char *what, int64_t done, int64_t total, void *user)
{
	struct tool_model *m = user;
	struct timespec t;
	double now, rate;
	long left;

	(void)what;
	clock_gettime(CLOCK_MONOTONIC, &t);
	now = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
	if (m->load_start <= 0) {
		m->load_start = m->load_shown = now;
		m->load_first = done;
	}
	if (now - m->load_shown < (m->terminal ? .1 : LINE_S))
		return;
	m->load_shown = now;
	rate = (double)(done - m->load_first) / (now - m->load_start);
	left = rate > 0 ? (long)((double)(total - done) / rate + .5) : 0;
	fprintf(stderr, m->terminal ? "\r  loading %s of %s  %.2f GB/s  %ld:%02ld left\033[K"
				    : "loading %s of %s  %.2f GB/s  %ld:%02ld left\n",
		moe_size(done).text, moe_size(total).text, rate * 1e-9, left / 60, left % 60);
	m->loading_shown = m->terminal;
}

static int open_both(struct tool_model *m, const struct settings *s, struct moe_model_params *p)
{
	struct moe_engine_params engine = engine_params(s);
	enum moe_status st;

	start_noise_begin();
	st = moe_engine_open(&engine, &m->engine);
	start_noise_end();
	if (st != MOE_OK)
		return cli_status(st);
	p->struct_size = sizeof *p;
	p->dir = settings_text(s, "model");
	p->adapter = settings_text(s, "adapter");
	p->memory_limit = settings_int(s, "memory-limit");
	m->terminal = isatty(STDERR_FILENO);
	m->load_start = 0;
	if (!settings_on(s, "quiet")) {
		p->progress = show_loading;
		p->user = m;
	}
	st = moe_model_open(m->engine, p, &m->model);
	if (m->loading_shown)
		fprintf(stderr, "\r\033[K");
	m->info.struct_size = sizeof m->info;
	if (st == MOE_OK)
		st = moe_model_get_info(m->model, &m->info);
	return cli_status(st);
}

int tool_model_open_inference(struct tool_model *m, const struct settings *s, int64_t max_tokens, bool text)
{
	struct moe_model_params p = { .inference_only = 1,
				      .keep_text = text,
				      .max_tokens = (int)max_tokens,
				      .weights = settings_text(s, "weights"),
				      .kt_weights = settings_text(s, "kt-weights") };

	return open_both(m, s, &p);
}

/* A rank that was asked for must be the adapter's; afterwards run.yaml names what is used. */
static int settle_rank(struct settings *s, const char *flag, int rank)
{
	const char *item;
	char text[32];

	if (!rank)
		return 0;
	if (settings_given(s, flag) && settings_int(s, flag) != rank)
		return cli_fail(CLI_USAGE, "--%s %lld, but the adapter in %s has rank %d", flag,
				(long long)settings_int(s, flag), settings_text(s, "adapter"),
				rank);
	snprintf(text, sizeof text, "%d", rank);
	item = text;
	return settings_set(s, flag, &item, 1);
}

static enum moe_recompute recompute_of(const struct settings *s)
{
	const char *text = settings_text(s, "recompute");

	return !strcmp(text, "never")	 ? MOE_RECOMPUTE_NEVER
	       : !strcmp(text, "always") ? MOE_RECOMPUTE_ALWAYS
					 : MOE_RECOMPUTE_AUTO;
}

static enum moe_method method_of(const struct settings *s)
{
	const char *text = settings_text(s, "method");

	return !strcmp(text, "full")	 ? MOE_METHOD_FULL
	       : !strcmp(text, "hybrid") ? MOE_METHOD_HYBRID
					 : MOE_METHOD_LORA;
}

char *tool_model_params(const struct settings *s, struct moe_model_params *p)
{
	char *targets = settings_joined(s, "lora-target");
	bool by_rows = settings_has(s, "batch-size");

	*p = (struct moe_model_params){
		.struct_size = sizeof *p,
		.dir = settings_text(s, "model"),
		.adapter = settings_text(s, "adapter"),
		.lora_rank = (int)settings_int(s, "lora-rank"),
		.expert_rank = (int)settings_int(s, "expert-lora-rank"),
		.lora_alpha = settings_real(s, "lora-alpha"),
		.lora_targets = targets,
		.adapter_format = settings_option(s, "adapter-format")
					  ? settings_text(s, "adapter-format")
					  : NULL,
		.share_a = settings_on(s, "share-a"),
		.rslora = settings_on(s, "rslora"),
		.train_router = settings_on(s, "train-router"),
		.seed = (uint64_t)settings_int(s, "seed"),
		.aux_coef = settings_real(s, "aux-loss"),
		.z_coef = settings_real(s, "z-loss"),
		.max_tokens = by_rows ? 0 : (int)settings_int(s, "batch-tokens"),
		.backward_weights = settings_text(s, "backward-weights"),
		.weights = settings_text(s, "weights"),
		.kt_weights = settings_text(s, "kt-weights"),
		.recompute = recompute_of(s),
		.lora_dropout = settings_real(s, "lora-dropout"),
		.method = method_of(s),
		.masters = strcmp(settings_text(s, "masters"), "bf16") ? MOE_MASTERS_F32 : MOE_MASTERS_BF16,
	};
	return targets;
}

/* Tokens of the largest micro-batch that the file gives: activations are sized by it. */
static int largest_micro_batch(const struct settings *s, const char *token_file, int *tokens)
{
	struct moe_token_file_info info = { .struct_size = sizeof info };
	int64_t n;
	int rc = cli_status(moe_token_file_info(token_file, &info));

	if (rc)
		return rc;
	if (settings_has(s, "batch-size"))
		n = settings_int(s, "batch-size") * info.longest_pack;
	else
		n = settings_int(s, "batch-tokens");
	if (n > info.tokens)
		n = info.tokens;
	if (n < info.longest_pack)
		n = info.longest_pack;
	*tokens = n > INT32_MAX / 64 ? INT32_MAX / 64 : (int)n;
	return 0;
}

int tool_model_open_training(struct tool_model *m, struct settings *s, const char *token_file)
{
	struct moe_model_params p;
	char *targets = tool_model_params(s, &p);
	int rc = largest_micro_batch(s, token_file, &p.max_tokens);

	if (!rc)
		rc = open_both(m, s, &p);

	free(targets);
	if (!rc && settings_has(s, "adapter")) {
		bool attention = m->info.lora_rank > 0;

		rc = settle_rank(s, "lora-rank",
				 attention ? m->info.lora_rank : m->info.expert_rank);
		rc = rc ? rc : settle_rank(s, "expert-lora-rank", m->info.expert_rank);
	}
	return rc;
}

void tool_model_close(struct tool_model *m)
{
	moe_model_close(m->model);
	if (m->engine)
		moe_engine_close(m->engine);
	*m = (struct tool_model){ 0 };
}

int64_t tool_model_planned(const struct tool_model *m)
{
	return m->info.planned_bytes;
}

/* 1,234,567 in one of four buffers */
static const char *grouped(int64_t value)
{
	static char ring[4][32];
	static unsigned next;
	char digits[24], *out = ring[next++ % 4], *to = out;
	int n = snprintf(digits, sizeof digits, "%lld", (long long)value);

	for (int i = 0; i < n; i++) {
		if (i && (n - i) % 3 == 0)
			*to++ = ',';
		*to++ = digits[i];
	}
	*to = 0;
	return out;
}

/* Weights that are trained themselves. */
static void describe_whole(const struct moe_model_info *i, FILE *to)
{
	const struct {
		const char *name;
		int64_t params;
	} groups[] = {
		{ "embedding", i->embed_params },  { "norms", i->norm_params },
		{ "attention", i->attention_params }, { "dense MLPs", i->dense_params },
		{ "router", i->router_params },	   { "shared", i->shared_params },
		{ "experts", i->expert_params },
	};

	for (size_t g = 0; g < sizeof groups / sizeof *groups; g++)
		if (groups[g].params && (i->method == MOE_METHOD_FULL || groups[g].params == i->expert_params))
			fprintf(to, "%-12s %s trained themselves\n", groups[g].name, grouped(groups[g].params));
	fprintf(to, "masters      %s\n",
		i->masters == MOE_MASTERS_BF16 ? "the bf16 weights, rounded stochastically" : "f32");
}

/* The adapter, by what it is on. */
static void describe_adapter(const struct moe_model_info *i, FILE *to)
{
	fprintf(to, "attention    %s trainable", grouped(i->attention_lora_params));
	if (i->attention_lora_params)
		fprintf(to, " (rank %d)", i->lora_rank);
	fprintf(to, "\nexperts      %s trainable", grouped(i->expert_lora_params));
	if (i->expert_lora_params && i->experts && i->moe_layers)
		fprintf(to, " (rank %d; %d experts x %d layers x %s)", i->expert_rank, i->experts,
			i->moe_layers,
			grouped(i->expert_lora_params / ((int64_t)i->experts * i->moe_layers)));
	if (i->shared_params)
		fprintf(to, "\nshared       %s trainable", grouped(i->shared_lora_params));
	if (i->shared_lora_params)
		fprintf(to, " (rank %d)", i->lora_rank);
	if (i->dense_params)
		fprintf(to, "\ndense MLPs   %s trainable", grouped(i->dense_lora_params));
	if (i->dense_lora_params)
		fprintf(to, " (rank %d)", i->lora_rank);
	if (i->router_weights)
		fprintf(to, "\nrouter       %s trainable (its weights)\n", grouped(i->router_lora_params));
	else if (i->router_lora_params)
		fprintf(to, "\nrouter       %s trainable (rank %d)\n", grouped(i->router_lora_params),
			i->lora_rank);
	else
		fprintf(to, "\nrouter       frozen\n");
}

void tool_model_describe(const struct tool_model *m, const struct settings *s, FILE *to)
{
	const struct moe_model_info *i = &m->info;
	int64_t all = i->params + i->trainable_params - i->whole_params;

	fprintf(to,
		"model        %s, %d layers, %d of %d experts per token, %.1f M parameters, "
		"%.1f M active\n",
		i->arch, i->layers, i->experts_per_token, i->experts, (double)i->params / 1e6,
		(double)i->active_params / 1e6);
	if (i->method != MOE_METHOD_FULL)
		describe_adapter(i, to);
	if (i->whole_params)
		describe_whole(i, to);
	fprintf(to, "auxiliary loss coefficient %g (%s), z-loss %g (%s)\n",
		settings_real(s, "aux-loss"),
		settings_given(s, "aux-loss") ? "--aux-loss" : "default",
		settings_real(s, "z-loss"), settings_given(s, "z-loss") ? "--z-loss" : "default");
	fprintf(to, "trainable params: %s || all params: %s || trainable%%: %.4f\n",
		grouped(i->trainable_params), grouped(all),
		100 * (double)i->trainable_params / (double)all);
	if (i->expert_format)
		fprintf(to, "weights      experts in %s, frozen\n", i->expert_format);
	fprintf(to, "memory       weights %s, %s %s, activations %s, runtime %s\n",
		moe_size(i->weight_bytes).text, i->whole_params ? "gradients and moments" : "adapter",
		moe_size(i->lora_bytes).text, moe_size(i->activation_bytes).text,
		moe_size(i->handles * HANDLE_BYTES).text);
	fprintf(to, "planned      %s of %s %s", moe_size(i->planned_bytes).text, moe_size(i->allowed_bytes).text,
		settings_has(s, "memory-limit") ? "(--memory-limit)" : "there is");
	if (i->trained_layers)
		fprintf(to, "; %d micro-batch%s in flight, activations of %d of %d layers computed again", i->slots,
			i->slots == 1 ? "" : "es", i->recomputed_layers, i->trained_layers);
	if (i->wanted_bytes > i->planned_bytes)
		fprintf(to, "; with 2 and all kept %s", moe_size(i->wanted_bytes).text);
	fputc('\n', to);
	if (i->touched_bytes)
		fprintf(to, "             gradients and moments: first touch of %s took %.2f s\n",
			moe_size(i->touched_bytes).text, i->touch_seconds);
}
