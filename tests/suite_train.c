/* SPDX-License-Identifier: Apache-2.0 */
/* The training loop on the shipped checkpoint: resuming, being killed, diverging, order. */
#include "tests/train_check.h"

#include "train/batches.h"

#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

const char moe_suite_name[] = "train";

#define CUT_BOUND 1e-4

static bool same_adapter(const char *a, const char *b)
{
	char pa[4200], pb[4200], *ta = NULL, *tb = NULL;
	size_t na = 0, nb = 0;
	bool same;

	snprintf(pa, sizeof pa, "%s/adapter_model.safetensors", a);
	snprintf(pb, sizeof pb, "%s/adapter_model.safetensors", b);
	same = moe_file_read(pa, 1 << 28, &ta, &na) == MOE_OK &&
	       moe_file_read(pb, 1 << 28, &tb, &nb) == MOE_OK && na == nb && !memcmp(ta, tb, na);
	moe_free(ta);
	moe_free(tb);
	return same;
}

/* 40 steps, and 20 + resume + 20 in another engine with another worker count and policy: same bits.
 */
static void resume_same_bits(void)
{
	const char *data = token_file("resume.safetensors");
	struct moe_trainer_params p = params(data, out_dir("straight"));
	struct stop a = { 0 }, b = { .at = 20 }, c = { 0 };
	struct moe_train_result r = { .struct_size = sizeof r };
	int64_t total = moe_test_full() ? 40 : 24;

	p.max_steps = total;
	b.at = total / 2;
	CU_ASSERT_EQUAL_FATAL(train(&p, 2, NULL, &a, &r), MOE_OK);
	CU_ASSERT_EQUAL(r.steps, total);
	CU_ASSERT_TRUE(r.last_loss < r.first_loss);
	p.output_dir = out_dir("resumed");
	CU_ASSERT_EQUAL(train(&p, 1, "eager", &b, NULL), MOE_ERR_INTERRUPTED);
	p.resume = "";
	CU_ASSERT_EQUAL_FATAL(train(&p, 3, "dmdas", &c, &r), MOE_OK);
	CU_ASSERT_EQUAL(r.steps, total);
	for (int64_t i = 0; i < total; i++)
		CU_ASSERT_EQUAL(a.losses[i], i < b.seen ? b.losses[i] : c.losses[i]);
	CU_ASSERT_TRUE(same_adapter(out_dir("straight"), out_dir("resumed")));
	p.accumulation = 1; /* other order of the data: refused */
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &c, NULL), MOE_ERR_ARG);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "accumulation"));
}

/* Sequential submission, and one or two steps in flight, give the same bits. */
static void pipelining_same_bits(void)
{
	const char *data = token_file("pipeline.safetensors");
	struct moe_trainer_params p = params(data, out_dir("overlap"));
	struct stop s = { 0 };

	p.max_steps = 8;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_OK);
	p.output_dir = out_dir("sequential");
	p.sequential = 1;
	CU_ASSERT_EQUAL(train(&p, 4, "prio", &s, NULL), MOE_OK);
	CU_ASSERT_TRUE(same_adapter(out_dir("overlap"), out_dir("sequential")));
}

/* kill -9 at random instants while a checkpoint is written every step; the run is then finished. */
static void killed(void)
{
	const char *data = token_file("kill.safetensors");
	struct moe_trainer_params p = params(data, out_dir("whole"));
	struct stop s = { 0 };
	unsigned long seed = moe_test_seed();
	int kills = moe_test_full() ? 20 : 4, done = 0;

	p.max_steps = 10;
	CU_ASSERT_EQUAL_FATAL(train(&p, 2, NULL, &s, NULL), MOE_OK);
	p.output_dir = out_dir("killed");
	p.save_steps = 1;
	p.resume = NULL;
	p.overwrite = 1;
	for (int i = 0; i < kills + 1 && !done; i++) {
		pid_t child;
		int status;

		fflush(stdout);
		child = fork();
		if (child == 0) {
			char latest[4200];

			snprintf(latest, sizeof latest, "%s", p.output_dir);
			p.resume = i ? "" : NULL;
			s = (struct stop){ 0 };
			if (train(&p, 2, NULL, &s, NULL) == MOE_OK)
				_exit(0);
			if (!strstr(moe_last_error(), "no complete checkpoint"))
				_exit(3);
			p.resume = NULL; /* killed before the first one: begin again */
			_exit(train(&p, 2, NULL, &s, NULL) == MOE_OK ? 0 : 3);
		}
		if (i < kills) {
			seed = seed * 6364136223846793005ul + 1;
			usleep(100000 + (useconds_t)(seed >> 33) % 400000);
			kill(child, SIGKILL);
		}
		waitpid(child, &status, 0);
		done = WIFEXITED(status) && WEXITSTATUS(status) == 0;
		CU_ASSERT_TRUE(done || WIFSIGNALED(status));
	}
	CU_ASSERT_TRUE(done);
	CU_ASSERT_TRUE(same_adapter(out_dir("whole"), out_dir("killed")));
}

/* Values and moments of checkpoint-1..steps, those that exist: at least one. */
static void check_states_finite(const char *out, int steps)
{
	int found = 0;

	for (int step = 1; step <= steps; step++) {
		struct moe_safetensors *st;
		char path[4200];

		snprintf(path, sizeof path, "%s/checkpoint-%d/state.safetensors", out, step);
		if (!moe_path_exists(path))
			continue;
		found++;
		CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(path, &st), MOE_OK);
		for (size_t i = 0; i < moe_safetensors_count(st); i++) {
			const struct moe_st_tensor *t = moe_safetensors_at(st, i);
			const float *v = t->data;

			for (size_t j = 0; t->dtype == MOE_F32 && j < t->bytes / sizeof *v; j++)
				CU_ASSERT_TRUE_FATAL(isfinite(v[j]));
		}
		moe_safetensors_close(st);
	}
	CU_ASSERT_TRUE(found > 0);
}

static void refusals(void)
{
	const char *data = token_file("refuse.safetensors");
	struct moe_trainer_params p = params(data, out_dir("refuse"));
	struct stop s = { 0 };
	int lock;

	p.max_steps = 1;
	p.resume = "";
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_ERR_ARG); /* nothing to resume */
	p.resume = NULL;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_OK);
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_ERR_ARG); /* would overwrite */
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "earlier run"));
	p.overwrite = 1;
	p.output_dir = moe_test_path("tests/fixtures/ckpt/qwen3moe");
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_ERR_ARG);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "base model"));
	p.output_dir = out_dir("refuse");
	lock = open(p.output_dir, O_RDONLY | O_DIRECTORY);
	CU_ASSERT_EQUAL(flock(lock, LOCK_EX), 0);
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_ERR_ARG);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "another process"));
	close(lock);
	p.schedule = "zigzag";
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_ERR_ARG);
	p.schedule = NULL;
	p.max_steps = 0;
	p.epochs = 1e12;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_ERR_ARG);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "1e+12 epochs of"));
	p.max_steps = 1;
	p.data = "/nowhere";
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_ERR_IO);
	p.data = data;
	p.output_dir = "/proc/nowhere";
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_ERR_IO);
}

/* An absurd learning rate: the run stops, names the step and an array, and what was saved before is
 * finite. */
static void diverges(void)
{
	const char *data = token_file("diverge.safetensors");
	struct moe_trainer_params p = params(data, out_dir("diverge"));
	struct stop s = { 0 };

	p.max_steps = 30;
	p.learning_rate = 1e38;
	p.max_grad_norm = 0;
	p.warmup_ratio = 0;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_ERR_DIVERGED);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "step"));
	CU_ASSERT_FALSE(moe_path_exists(out_dir("diverge/adapter_model.safetensors")));
	/* the first update overflows, with a finite loss and gradient: no state of it */
	p.save_steps = 1;
	p.output_dir = out_dir("diverge-update");
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_ERR_DIVERGED);
	CU_ASSERT_PTR_NOT_NULL(
		strstr(moe_last_error(), "not finite after the update: value of layers."));
	CU_ASSERT_FALSE(moe_path_exists(out_dir("diverge-update/checkpoint-1")));
	/* the second step's gradient does */
	p.learning_rate = 1e30;
	p.output_dir = out_dir("diverge-states");
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, NULL), MOE_ERR_DIVERGED);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "gradient of layers."));
	check_states_finite(p.output_dir, 30);
}

/* The same with skipping: counted, and the same bits in one and two steps in flight and after
 * resuming. */
static void skips(void)
{
	const char *data = token_file("skip.safetensors");
	struct moe_trainer_params p = params(data, out_dir("skip"));
	struct moe_train_result r = { .struct_size = sizeof r }, again = r;
	struct stop s = { 0 }, half = { .at = 4 };

	p.max_steps = 8;
	p.learning_rate = 1e18; /* finite values, and gradients that are not */
	p.max_grad_norm = 0;
	p.warmup_ratio = 0;
	p.skip_non_finite = 1;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_OK);
	CU_ASSERT_EQUAL(r.steps, 8);
	CU_ASSERT_TRUE(r.skipped > 0 && r.skipped < 8);
	CU_ASSERT_EQUAL(s.warnings, r.skipped);
	p.output_dir = out_dir("skip-half");
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &half, NULL), MOE_ERR_INTERRUPTED);
	p.resume = "";
	p.sequential = 1;
	CU_ASSERT_EQUAL(train(&p, 1, NULL, &s, &again), MOE_OK);
	CU_ASSERT_EQUAL(again.skipped, r.skipped);
	CU_ASSERT_TRUE(same_adapter(out_dir("skip"), out_dir("skip-half")));
}

/* Allocations that fail anywhere in a run: a clean error, and the model trains afterwards. */
static void allocation_failures(void)
{
	const char *data = token_file("alloc.safetensors");
	struct moe_trainer_params p = params(data, out_dir("alloc"));
	struct moe_engine_params ep = { .struct_size = sizeof ep, .workers = 2 };
	struct moe_model_params mp = { .struct_size = sizeof mp,
				       .lora_rank = 2,
				       .max_tokens = 64,
				       .dir = moe_test_path("tests/fixtures/ckpt/qwen3moe") };
	struct stop s = { 0 };
	struct moe_engine *engine;
	struct moe_model *model;
	unsigned long seed = moe_test_seed();
	int rounds = moe_test_full() ? 300 : 40, failed = 0;

	p.max_steps = 2;
	p.save_steps = 1;
	p.overwrite = 1;
	CU_ASSERT_EQUAL_FATAL(moe_engine_open(&ep, &engine), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_model_open(engine, &mp, &model), MOE_OK);
	for (int i = 0; i < rounds; i++) {
		enum moe_status st;

		seed = seed * 6364136223846793005ul + 1;
		/* the first hundred one by one, then anywhere in the two steps */
		moe_alloc_fail_after(i < rounds / 2 ? i : (int64_t)((seed >> 33) % 6000));
		st = moe_train(model, &p, on_event, &s, NULL);
		moe_alloc_fail_after(-1);
		CU_ASSERT_TRUE(st == MOE_OK || st == MOE_ERR_NOMEM || st == MOE_ERR_FORMAT);
		failed += st != MOE_OK;
	}
	CU_ASSERT_TRUE(failed > rounds / 2);
	CU_ASSERT_EQUAL(moe_train(model, &p, on_event, &s, NULL), MOE_OK);
	moe_model_close(model);
	CU_ASSERT_EQUAL(moe_engine_close(engine), MOE_OK);
}

/* A full disk (a limit on file sizes): an error, and nothing under a final name. */
static void full_disk(void)
{
	const char *data = token_file("full.safetensors");
	struct moe_trainer_params p = params(data, out_dir("full"));
	struct stop s = { 0 };
	int status;
	pid_t child;

	p.max_steps = 2;
	fflush(stdout);
	child = fork();
	if (child == 0) {
		struct rlimit limit = { 50000, 50000 };
		enum moe_status st;

		signal(SIGXFSZ, SIG_IGN);
		setrlimit(RLIMIT_FSIZE, &limit);
		st = train(&p, 2, NULL, &s, NULL);
		_exit(st == MOE_ERR_IO ? 0 : 1);
	}
	waitpid(child, &status, 0);
	CU_ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CU_ASSERT_FALSE(moe_path_exists(out_dir("full/adapter_model.safetensors")));
}

/* The last share of the packs is evaluated and never trained on. */
static void eval_split(void)
{
	const char *data = token_file("split.safetensors");
	struct moe_trainer_params p = params(data, out_dir("split"));
	struct moe_train_result r = { .struct_size = sizeof r };
	struct stop s = { 0 };

	p.max_steps = 4;
	p.accumulation = 1;
	p.eval_split = 0.25; /* 3 of 12 packs: an epoch is 9 steps */
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_OK);
	CU_ASSERT_TRUE(isfinite(r.eval_loss));
	p.max_steps = 0;
	p.epochs = 1;
	p.overwrite = 1;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_OK);
	CU_ASSERT_EQUAL(r.steps, 9);
	p.eval_split = 3; /* documents, of packs of two: 2 packs */
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_OK);
	CU_ASSERT_TRUE(isfinite(r.eval_loss));
	CU_ASSERT_EQUAL(r.steps, 10);
	p.eval_split = 1e6;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_ERR_ARG);
	p.eval_split = 2.5;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_ERR_ARG);
	p.eval_split = 0.99;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_ERR_ARG);
	p.eval_split = NAN;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_ERR_ARG);
}

/* Every pack once per epoch, in another order each epoch, the same for the same seed. */
static void order(void)
{
	const char *path = token_file("order.safetensors");
	struct moe_order_params p = { .batch_tokens = 64, .accumulation = 2, .seed = 5 };
	struct moe_tokens *t;
	struct moe_epoch a, b, c;
	int seen[DOCS / 2] = { 0 };

	CU_ASSERT_EQUAL_FATAL(moe_tokens_open(path, VOCAB, &t), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_epoch_create(t, &p, 0, &a), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_epoch_create(t, &p, 0, &b), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_epoch_create(t, &p, 1, &c), MOE_OK);
	CU_ASSERT_EQUAL(memcmp(a.pack, b.pack, sizeof(int64_t) * DOCS / 2), 0);
	CU_ASSERT_NOT_EQUAL(memcmp(a.pack, c.pack, sizeof(int64_t) * DOCS / 2), 0);
	for (int i = 0; i < DOCS / 2; i++)
		seen[a.pack[i]]++;
	for (int i = 0; i < DOCS / 2; i++)
		CU_ASSERT_EQUAL(seen[i], 1);
	CU_ASSERT_TRUE(moe_epoch_max_tokens(t, &a) <= MOE_MAX(64, t->max_row_tokens));
	CU_ASSERT_EQUAL(a.n_steps, (a.n_micro + 1) / 2);
	moe_epoch_free(&a), moe_epoch_free(&b), moe_epoch_free(&c);
	moe_tokens_close(t);
}

/* ---- what the loop tells the graph ---- */

/* Losses of the first two steps with dropout, a step being `accumulation` micro-batches of 2 /
 * accumulation packs. */
static void losses_cut(int accumulation, struct stop *s)
{
	struct moe_trainer_params p = params(token_file("cut.safetensors"), out_dir("cut"));
	struct moe_train_result r = { .struct_size = sizeof r };

	p.batch_size = 2 / accumulation;
	p.accumulation = accumulation;
	p.keep_order = 1;
	p.learning_rate = 2e-2;
	p.warmup_ratio = 0;
	p.max_steps = 2;
	p.overwrite = 1;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, s, &r), MOE_OK);
}

/* A mask is of a token's position in the step, in whatever micro-batch it comes. The second step's loss
 * shows the first one's gradients; rounding grows tenfold with each step. */
static void dropout_of_cuts(void)
{
	struct stop whole = { 0 }, cut = { 0 };

	lora_dropout = .4;
	losses_cut(1, &whole);
	losses_cut(2, &cut);
	lora_dropout = 0;
	for (int i = 0; i < 2; i++) {
		double off = fabs(whole.losses[i] - cut.losses[i]) / whole.losses[i];

		CU_ASSERT(off < CUT_BOUND);
		printf("  step %d: %.6f, %.1e apart\n", i + 1, whole.losses[i], off);
	}
}

/* AdamW's first step moves every number by the learning rate, whatever its gradient: B starts at 0.
 */
static void first_step(void)
{
	const char *out = out_dir("first");
	struct moe_trainer_params p = params(token_file("first.safetensors"), out);
	struct moe_train_result r = { .struct_size = sizeof r };
	struct moe_safetensors *st;
	struct stop s = { 0 };
	char path[4200];
	double most = 0;

	p.warmup_ratio = 0;
	p.schedule = "constant";
	p.max_steps = 1;
	CU_ASSERT_EQUAL(train(&p, 2, NULL, &s, &r), MOE_OK);
	snprintf(path, sizeof path, "%s/adapter_model.safetensors", out);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(path, &st), MOE_OK);
	for (size_t i = 0; i < moe_safetensors_count(st); i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(st, i);
		int64_t n = moe_shape_count(t->ndim, t->shape);
		float v;

		for (int64_t j = 0; strstr(t->name, "lora_B") && j < n; j++) {
			moe_to_f32(&v, (const char *)t->data + (size_t)j * moe_dtype_size(t->dtype),
				   t->dtype, 1);
			most = worst_of(most, fabs((double)v));
		}
	}
	moe_safetensors_close(st);
	CU_ASSERT_DOUBLE_EQUAL(most, p.learning_rate, 1e-2 * p.learning_rate);
}

const struct moe_test moe_suite_tests[] = {
	{ "killed at random instants, then finished",
	  killed }, /* first: forks before StarPU runs here */
	{ "full disk", full_disk },
	{ "allocation failures", allocation_failures },
	{ "order of the data", order },
	{ "resume gives the same bits", resume_same_bits },
	{ "steps in flight give the same bits", pipelining_same_bits },
	{ "evaluation split", eval_split },
	{ "refusals", refusals },
	{ "diverging", diverges },
	{ "steps left out", skips },
	{ "dropout however a step is cut", dropout_of_cuts },
	{ "the first step's size", first_step },
	{ NULL, NULL },
};
