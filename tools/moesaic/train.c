/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moesaic train. Order: flags, output folder, tokens (Python ends before StarPU starts), model,
 * training. Until the first step has been done nothing of ours stays in the output folder.
 */
#include "tools/moesaic/commands.h"
#include "tools/moesaic/dataset.h"
#include "tools/moesaic/model.h"
#include "tools/moesaic/progress.h"
#include "tools/moesaic/python.h"
#include "tools/moesaic/train_result.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

struct training {
	struct settings *s;
	int argc;
	char **argv;
	const char *output;
	bool folder_made, data_made, eval_made;
	char *data, *eval; /* token files */
	char *schedule_args;
	bool begun; /* a step was done: files stay */
	bool trace_made;
	int lock; /* of the output folder until the library takes it, -1: none */
	bool tracing;
	struct tool_model model;
	struct progress progress;
};

/* ---- output folder ---- */

/* OUTPUT/checkpoint-N, however it is spelled. */
static bool is_checkpoint_of(const char *dir, const char *output)
{
	char *full = realpath(dir, NULL), *parent = realpath(output, NULL), *slash = full ? strrchr(full, '/') : NULL;
	bool is = false;

	if (slash && parent) {
		*slash = 0;
		is = !strcmp(full, parent) && !strncmp(slash + 1, "checkpoint-", strlen("checkpoint-"));
	}
	free(full);
	free(parent);
	return is;
}

static int check_output(struct training *t)
{
	static const char *const results[] = { "adapter_config.json", "trainer_log.jsonl" };
	struct stat st, base;

	t->output = settings_text(t->s, "output-dir");
	if (!t->output)
		return cli_fail(CLI_USAGE, "--output-dir DIR is missing");
	if (stat(t->output, &st) == 0 && !S_ISDIR(st.st_mode))
		return cli_fail(CLI_USAGE, "--output-dir %s is not a folder", t->output);
	if (stat(t->output, &st) == 0 && stat(settings_text(t->s, "model"), &base) == 0 && st.st_dev == base.st_dev &&
	    st.st_ino == base.st_ino)
		return cli_fail(CLI_USAGE, "--output-dir %s is the base model's folder: name another", t->output);
	if (settings_on(t->s, "overwrite") && settings_has(t->s, "adapter") && is_checkpoint_of(settings_text(t->s, "adapter"), t->output))
		return cli_fail(CLI_USAGE, "--adapter %s is a checkpoint that --overwrite removes: copy it elsewhere, or name another --output-dir",
				settings_text(t->s, "adapter"));
	for (size_t i = 0; i < sizeof results / sizeof *results; i++) {
		char *path = cli_format("%s/%s", t->output, results[i]);
		bool there = access(path, F_OK) == 0;

		free(path);
		if (there && !settings_on(t->s, "overwrite") && !settings_has(t->s, "resume"))
			return cli_fail(CLI_USAGE,
					"%s has results of a run (%s); --resume continues it, "
					"--overwrite starts anew",
					t->output, results[i]);
	}
	return 0;
}

static bool is_checkpoint(const char *dir)
{
	char *state = cli_format("%s/state.json", dir);
	bool there = !cli_missing(state);

	free(state);
	return there;
}

/* Is there anything to go on from? Whether it is whole, reading it says. */
static int check_resume(const struct training *t)
{
	const char *from = settings_text(t->s, "resume");
	glob_t found;
	bool there = false;
	char *pattern;

	if (!from)
		return 0;
	if (*from)
		return is_checkpoint(from) ? 0
					   : cli_fail(CLI_USAGE, "--resume %s: it has no state.json: no checkpoint", from);
	pattern = cli_format("%s/checkpoint-*", t->output);
	if (glob(pattern, 0, NULL, &found) == 0)
		for (size_t i = 0; i < found.gl_pathc && !there; i++)
			there = is_checkpoint(found.gl_pathv[i]);
	globfree(&found);
	free(pattern);
	return there ? 0
		     : cli_fail(CLI_USAGE, "--resume: %s has no checkpoint to go on from; without --resume a run starts anew",
				t->output);
}

/* mkdir -p, and remembers whether the last folder is new. */
static int make_output(struct training *t)
{
	char *path = cli_format("%s", t->output);
	int rc = 0;

	for (char *c = path + 1; !rc; c++) {
		char kept = *c;

		if (kept && kept != '/')
			continue;
		*c = 0;
		if (mkdir(path, 0777) == 0)
			t->folder_made = !kept;
		else if (errno != EEXIST)
			rc = cli_fail(CLI_USAGE, "--output-dir %s: %s", path, strerror(errno));
		*c = kept;
		if (!kept)
			break;
	}
	free(path);
	if (!rc && access(t->output, W_OK | X_OK))
		rc = cli_fail(CLI_USAGE, "--output-dir %s: %s", t->output, strerror(errno));
	return rc;
}

static void undo_output(struct training *t)
{
	if (t->begun)
		return;
	if (t->data_made)
		unlink(t->data);
	if (t->eval_made)
		unlink(t->eval);
	if (t->trace_made)
		unlink(settings_text(t->s, "trace"));
	if (t->folder_made)
		rmdir(t->output);
}

static void unlock_output(struct training *t)
{
	if (t->lock >= 0)
		close(t->lock);
	t->lock = -1;
}

/* Two runs that start together must not take each other's token file; where it cannot be locked, the library says why. */
static int lock_output(struct training *t)
{
	t->lock = open(t->output, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (t->lock < 0 || flock(t->lock, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK)
		return 0;
	t->folder_made = false;
	return cli_fail(CLI_USAGE, "--output-dir %s: another process is training into it", t->output);
}

static int write_run(struct training *t)
{
	char *path = cli_format("%s/run.yaml", t->output), *temp = cli_format("%s.tmp", path);
	FILE *f = fopen(temp, "w");
	bool good = f != NULL;

	if (f) {
		settings_write(t->s, t->argc, t->argv, f);
		good = fflush(f) == 0 && fsync(fileno(f)) == 0;
		good = fclose(f) == 0 && good;
		good = good && rename(temp, path) == 0;
	}
	if (!good) {
		cli_note("warning: %s: %s", path, strerror(errno));
		unlink(temp);
	}
	free(path);
	free(temp);
	return good ? 0 : CLI_USAGE;
}

/* ---- settings ---- */

/* transformers' rules: steps win over the ratio; below 1 they are a ratio themselves. */
static void fill_warmup(const struct settings *s, struct moe_trainer_params *p)
{
	double steps = settings_real(s, "warmup-steps");

	p->warmup_ratio = settings_real(s, "warmup-ratio");
	if (steps >= 1)
		p->warmup_steps = (int64_t)steps;
	else if (steps > 0 ||
		 (settings_has(s, "warmup-steps") && !settings_given(s, "warmup-ratio")))
		p->warmup_ratio = steps;
}

static bool is(const struct settings *s, const char *name, const char *value)
{
	const char *text = settings_text(s, name);

	return text && !strcmp(text, value);
}

static void fill_params(const struct training *t, struct moe_trainer_params *p)
{
	const struct settings *s = t->s;
	bool by_size = settings_has(s, "batch-size");

	*p = (struct moe_trainer_params){
		.struct_size = sizeof *p,
		.data = t->data,
		.eval_data = t->eval,
		.eval_split = settings_real(s, "eval-split"),
		.output_dir = t->output,
		.resume = settings_text(s, "resume"),
		.overwrite = settings_on(s, "overwrite"),
		.learning_rate = settings_real(s, "learning-rate"),
		.schedule = settings_text(s, "lr-scheduler-type"),
		.schedule_args = t->schedule_args,
		.weight_decay = settings_real(s, "weight-decay"),
		.beta1 = settings_real(s, "adam-beta1"),
		.beta2 = settings_real(s, "adam-beta2"),
		.eps = settings_real(s, "adam-epsilon"),
		.max_grad_norm = settings_real(s, "max-grad-norm"),
		.batch_size = (int)settings_int(s, "batch-size"),
		.batch_tokens = by_size ? 0 : (int)settings_int(s, "batch-tokens"),
		.accumulation = (int)settings_int(s, "gradient-accumulation-steps"),
		.epochs = settings_real(s, "epochs"),
		.max_steps = settings_int(s, "max-steps") > 0 ? settings_int(s, "max-steps") : 0,
		.keep_order = !settings_on(s, "shuffle"),
		.seed = (uint64_t)settings_int(s, "seed"),
		.order_seeded = settings_has(s, "data-seed"),
		.order_seed = (uint64_t)settings_int(s, "data-seed"),
		.drop_last = by_size && settings_on(s, "drop-last"),
		.logging_steps = is(s, "logging-strategy", "no")      ? -2
				 : is(s, "logging-strategy", "epoch") ? -1
								      : settings_real(s, "logging-steps"),
		.eval_steps = is(s, "eval-strategy", "no") ? -1 : settings_real(s, "eval-steps"),
		.save_steps = is(s, "save-strategy", "epoch") ? -1 : settings_real(s, "save-steps"),
		.save_best = is(s, "save-strategy", "best"),
		.log_first = settings_on(s, "logging-first-step"),
		.eval_at_start = settings_on(s, "eval-on-start"),
		.eval_delay = settings_real(s, "eval-delay"),
		.save_total_limit = (int)settings_int(s, "save-total-limit"),
		.max_hours = settings_real(s, "max-hours"),
		.skip_non_finite = !strcmp(settings_text(s, "on-nan"), "skip"),
		.continue_on_save_error = !strcmp(settings_text(s, "on-save-error"), "continue"),
		.load_best = settings_on(s, "load-best"),
		.sequential = !strcmp(settings_text(s, "pipeline"), "sequential"),
	};
	fill_warmup(s, p);
}

/* What needs neither model nor data is refused before either is read. */
static int check_params(struct training *t)
{
	struct moe_trainer_params p;

	t->schedule_args = settings_joined(t->s, "lr-scheduler-kwargs");
	fill_params(t, &p);
	p.data = p.output_dir = ".";
	p.eval_data = settings_has(t->s, "eval-data") ? "." : NULL;
	return cli_status(moe_train_check(&p));
}

/* ---- running ---- */

static int on_event(const struct moe_train_event *e, void *user)
{
	struct training *t = user;

	if (!t->begun)
		write_run(t);
	t->begun = true;
	progress_event(&t->progress, e);
	return interrupt_pending();
}

/* ---- trace ---- */

#define MAX_CONFIG 16

/* Before hours of loading: can the file be written? */
static int check_trace(struct training *t)
{
	const char *path = settings_text(t->s, "trace");
	bool there = path && access(path, F_OK) == 0;
	int fd;

	if (!path)
		return 0;
	fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
	if (fd < 0)
		return cli_fail(CLI_USAGE, "--trace %s: %s", path, strerror(errno));
	close(fd);
	t->trace_made = !there;
	return 0;
}

/* What a reader of the trace wants to know about the run; run.yaml has the rest. */
static int start_trace(struct training *t)
{
	static const char *const told[] = { "model",	  "data",
					    "adapter",	  "batch-tokens",
					    "batch-size", "gradient-accumulation-steps",
					    "lora-rank",  "lora-target",
					    "pipeline",	  "weights",
					    "seed" };
	struct moe_trace_params p = { .struct_size = sizeof p,
				      .file = settings_text(t->s, "trace") };
	char *config[MAX_CONFIG];
	enum moe_status st;

	if (!p.file)
		return 0;
	config[p.n_config++] = cli_format("command=train");
	for (size_t i = 0; i < sizeof told / sizeof *told; i++) {
		char *value = settings_has(t->s, told[i]) ? settings_joined(t->s, told[i]) : NULL;

		if (value)
			config[p.n_config++] = cli_format("%s=%s", told[i], value);
		free(value);
	}
	p.config = (const char *const *)config;
	st = moe_trace_start(t->model.engine, &p);
	for (int i = 0; i < p.n_config; i++)
		free(config[i]);
	t->tracing = st == MOE_OK;
	return cli_status(st);
}

/* A trace that is cut off is no failure of the training; the library has warned. */
static void stop_trace(struct training *t)
{
	struct moe_trace_info info = { .struct_size = sizeof info };

	if (!t->tracing)
		return;
	t->tracing = false;
	if (moe_trace_stop(t->model.engine, &info) != MOE_OK && !info.error[0])
		cli_note("warning: trace: %s", moe_last_error());
	if (info.lost)
		cli_note("warning: the trace lacks %lld records: its buffers were full",
			 (long long)info.lost);
	if (t->progress.to && !info.error[0])
		fprintf(t->progress.to,
			"trace of %lld tasks in %s (%.1f MB); moesaic trace summary %s\n",
			(long long)info.tasks, settings_text(t->s, "trace"),
			1e-6 * (double)info.bytes, settings_text(t->s, "trace"));
}

static int train(struct training *t)
{
	struct moe_trainer_params params;
	struct moe_train_result result = { .struct_size = sizeof result };
	enum moe_status st;
	int rc;

	interrupt_remember();
	rc = tool_model_open_training(&t->model, t->s, t->data);
	if (rc)
		return rc;
	progress_open(&t->progress, t->s);
	if (t->progress.to)
		tool_model_describe(&t->model, t->s, t->progress.to);
	fill_params(t, &params);
	rc = start_trace(t);
	if (rc)
		return rc;
	interrupt_watch("\nstopping: finishing the first steps, then saving. Once more ends at once\n");
	unlock_output(t);
	st = moe_train(t->model.model, &params, on_event, t, &result);
	progress_close(&t->progress);
	stop_trace(t);
	rc = cli_status(st);
	if (st != MOE_OK)
		return rc;
	if (!t->begun)
		write_run(t);
	t->begun = true;
	if (t->progress.to)
		train_result_print(&t->model, &result, settings_on(t->s, "load-best"), t->output, t->progress.to);
	if (settings_on(t->s, "json"))
		train_result_json(&t->model, &result);
	return 0;
}

static int prepare(struct training *t)
{
	enum token_report report = settings_on(t->s, "json") ? REPORT_STDERR : REPORT_STDOUT;
	int rc = train_resolve_method(t->s);

	rc = rc ? rc : train_resolve_course(t->s);
	rc = rc ? rc : dataset_resolve(t->s);
	if (!rc && !settings_has(t->s, "data"))
		rc = cli_fail(CLI_USAGE, "--data FILE... is missing");
	rc = rc ? rc : check_params(t);
	rc = rc ? rc : tool_model_check(t->s, true);
	rc = rc ? rc : check_output(t);
	rc = rc ? rc : check_resume(t);
	rc = rc ? rc : make_output(t);
	rc = rc ? rc : lock_output(t);
	rc = rc ? rc : check_trace(t);
	rc = rc ? rc : token_file(t->s, "data", t->output, report, &t->data, &t->data_made);
	if (!rc && settings_has(t->s, "eval-data"))
		rc = token_file(t->s, "eval-data", t->output, report, &t->eval, &t->eval_made);
	return rc;
}

static int run(struct settings *s, int argc, char **argv)
{
	struct training t = { .s = s, .argc = argc, .argv = argv, .lock = -1 };
	int rc = prepare(&t);

	if (!rc)
		rc = train(&t);
	tool_model_close(&t.model);
	undo_output(&t);
	unlock_output(&t);
	free(t.data);
	free(t.eval);
	free(t.schedule_args);
	return rc;
}

static const struct option_group groups[] = {
	TRAIN_GROUPS,
	{ NULL, NULL },
};

const struct command command_train = {
	.name = "train",
	.summary = "fine-tune a mixture-of-experts model",
	.groups = groups,
	.run = run,
};
