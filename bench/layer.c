/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench layer: one MoE layer (experts, ids and weights given) in training through the block API:
 * forward, backward and AdamW on LoRA, beside the bare GEMMs of the same shapes in the same
 * process. Medians of --repeat repetitions; each runs a step, then the bare GEMMs, so that both see
 * the same state of the machine. bench_layer --help lists the options.
 *
 * --serve: sets up once, prints a line {"ready": true, ...}, then obeys lines on stdin:
 *   go [N]   N steps that are not timed (default 0), then one that is; prints its times
 *   bare     the bare GEMMs once, with the last step's ratio to them
 *   quit
 *
 * --trace FILE records the timed steps. --trace-cost instead times pairs of steps, one recorded and
 * one not, in alternating order, and prints what recording costs.
 */
#include "bench/layer/layer_bench.h"
#include "bench/measure.h"

#include "codelets/kernels/kernels.h"

#include <getopt.h>

static const struct layer_shape shapes[] = {
	{ "small", 8, 2, 512, 256 },
	{ "qwen3", 128, 8, 2048, 768 },
	{ "qwen3e16", 16, 8, 2048, 768 },
	{ "dsv3", 16, 4, 7168, 2048 },
};

struct bench {
	struct layer_options o;
	struct moe_engine *engine;
	struct moe_block *block;
	struct layer_data data;
	struct layer_bare *bare;
	struct layer_sample last;
};

/* Forward, backward and update, each to its end. */
static enum moe_status run_step(struct bench *b, struct layer_sample *s)
{
	static const struct moe_adamw_params adamw = { .struct_size = sizeof adamw,
						       .learning_rate = 1e-5,
						       .beta1 = .9,
						       .beta2 = .999,
						       .eps = 1e-8 };
	struct moe_engine_info info = { .struct_size = sizeof info };
	struct layer_data *d = &b->data;
	double wall[4], cpu[3], mine, *v = s->value;

	MOE_TRY(moe_engine_get_info(b->engine, &info));
	layer_watch_reset();
	mine = thread_seconds();
	cpu[0] = layer_watch_cpu();
	wall[0] = moe_now();
	MOE_TRY(moe_block_forward(b->block, &d->x, &d->ids_array, &d->weights_array, 1, &d->out));
	wall[1] = moe_now();
	cpu[1] = layer_watch_cpu();
	MOE_TRY(moe_block_backward(b->block, &d->grad_out, &d->grad_x, &d->grad_weights));
	MOE_TRY(moe_block_wait(b->block));
	wall[2] = moe_now();
	cpu[2] = layer_watch_cpu();
	v[LAYER_SUBMIT_CPU] = thread_seconds() - mine;
	v[LAYER_FORWARD] = wall[1] - wall[0];
	v[LAYER_BACKWARD] = wall[2] - wall[1];
	v[LAYER_STEP] = wall[2] - wall[0];
	v[LAYER_FORWARD_CPU] = cpu[1] - cpu[0];
	v[LAYER_BACKWARD_CPU] = cpu[2] - cpu[1];
	v[LAYER_IDLE_SHARE] = 1 - layer_watch_busy() / (info.workers * v[LAYER_STEP]);
	wall[2] = moe_now();
	if (b->o.rank) {
		MOE_TRY(moe_block_update(b->block, &adamw));
		MOE_TRY(moe_block_wait(b->block));
	} else {
		MOE_TRY(moe_block_zero_gradients(b->block));
	}
	wall[3] = moe_now();
	v[LAYER_UPDATE] = b->o.rank ? wall[3] - wall[2] : 0;
	return MOE_OK;
}

static enum moe_status run_bare(struct bench *b, struct layer_sample *s)
{
	struct layer_bare_times t = { 0 };
	double *v = s->value;

	MOE_TRY(bare_gemms(b->bare, &t));
	v[LAYER_BARE_FORWARD] = t.forward;
	v[LAYER_BARE_BACKWARD] = t.backward;
	v[LAYER_BARE] = t.forward + t.backward;
	v[LAYER_BARE_CPU] = t.cpu;
	v[LAYER_STEP_OVER_BARE] = v[LAYER_STEP] / v[LAYER_BARE];
	v[LAYER_STEP_OVER_BARE_CPU] =
		(v[LAYER_FORWARD_CPU] + v[LAYER_BACKWARD_CPU]) / v[LAYER_BARE_CPU];
	return MOE_OK;
}

static enum moe_status set_up(struct bench *b)
{
	const struct layer_options *o = &b->o;
	struct moe_engine_params ep = { .struct_size = sizeof ep,
					.workers = o->workers,
					.policy = o->policy };
	struct moe_block_params bp = { .struct_size = sizeof bp,
				       .hidden = o->shape.H,
				       .intermediate = o->shape.I,
				       .experts = o->shape.E,
				       .experts_per_token = o->shape.k,
				       .lora_rank = o->rank,
				       .lora_alpha = 2.0f * (float)o->rank,
				       .weight_dtype = o->dtype,
				       .weight_format = o->format ? o->format->name : NULL,
				       .weight_group = o->per_row ? MOE_MIN(o->shape.H, o->shape.I) : 0,
				       .expected_tokens = o->tokens,
				       .backward_weights = o->backward };
	struct moe_block_info info = { .struct_size = sizeof info };

	if (!layer_data_make(o, &b->data))
		return moe_fail(MOE_ERR_NOMEM, "no memory for the activations");
	MOE_TRY(moe_engine_open(&ep, &b->engine));
	MOE_TRY(layer_watch_start(b->engine));
	MOE_TRY(moe_block_create(b->engine, &bp, &b->block));
	MOE_TRY(moe_block_get_info(b->block, &info));
	b->o.backward_used = info.backward_weights;
	MOE_TRY(layer_bare_create(b->engine, o, b->data.rows, &b->bare));
	return layer_load(o, b->block, b->bare);
}

static enum moe_status tear_down(struct bench *b)
{
	moe_block_destroy(b->block);
	layer_bare_destroy(b->bare);
	layer_data_free(&b->data);
	return b->engine ? moe_engine_close(b->engine) : MOE_OK;
}

/* The first step, whose page faults nothing else pays, then the others. */
static enum moe_status warm_up(struct bench *b, struct layer_result *r)
{
	MOE_TRY(run_step(b, &b->last));
	r->first_step = b->last.value[LAYER_STEP];
	for (int i = 1; i < b->o.warm_up; i++)
		MOE_TRY(run_step(b, &b->last));
	if (b->o.warm_up > 1)
		MOE_TRY(run_bare(b, &b->last));
	return MOE_OK;
}

static enum moe_status serve(struct bench *b)
{
	char line[64];

	while (fgets(line, sizeof line, stdin)) {
		int n = 0;

		line[strcspn(line, "\n")] = 0;
		if (!strcmp(line, "quit"))
			break;
		if (!strcmp(line, "bare")) {
			MOE_TRY(run_bare(b, &b->last));
			layer_print_sample(&b->last, true);
		} else if (!strcmp(line, "go") || sscanf(line, "go %d", &n) == 1) {
			for (int i = 0; i <= n; i++)
				MOE_TRY(run_step(b, &b->last));
			layer_print_sample(&b->last, false);
		} else {
			return moe_fail(MOE_ERR_ARG, "unknown line \"%s\"", line);
		}
	}
	return MOE_OK;
}

static enum moe_status trace_begin(struct bench *b)
{
	const struct layer_shape *s = &b->o.shape;
	char *line = moe_format("shape=%s E=%d k=%d H=%d I=%d", s->name, s->E, s->k, s->H, s->I);
	char *tokens = moe_format("tokens=%d", b->o.tokens);
	const char *config[] = { "command=bench_layer", line, tokens };
	struct moe_trace_params p = { .struct_size = sizeof p,
				      .file = b->o.trace,
				      .config = config,
				      .n_config = MOE_COUNT(config) };
	enum moe_status st = line && tokens ? moe_trace_start(b->engine, &p)
					    : moe_fail(MOE_ERR_NOMEM, "no memory for a trace");

	moe_free(line);
	moe_free(tokens);
	return st;
}

static enum moe_status trace_end(struct bench *b, struct moe_trace_info *info)
{
	*info = (struct moe_trace_info){ .struct_size = sizeof *info };
	return moe_trace_stop(b->engine, info);
}

/* A step with marks around it, where a trace is written. */
static enum moe_status run_marked(struct bench *b, struct layer_sample *s, int64_t number)
{
	enum moe_status st;

	moe_trace_mark(b->engine, MOE_TRACE_STEP_BEGIN, number, b->o.tokens, -1);
	st = run_step(b, s);
	moe_trace_mark(b->engine, MOE_TRACE_STEP_END, number, b->o.tokens, -1);
	return st;
}

static double quantile(double *v, int n, double q)
{
	sort_values(v, n);
	return v[(int)(q * (n - 1) + .5)];
}

/* Pairs; the order changes so that neither gets the warmer caches. */
static enum moe_status measure_trace(struct bench *b)
{
	int n = b->o.repeat;
	double *off = moe_calloc((size_t)n * 3, sizeof *off), *on = off + n, *ratio = on + n;
	int64_t tasks = 0, bytes = 0, lost = 0;
	double writer = 0;
	struct layer_sample s;
	enum moe_status st = off ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "no memory for samples");

	for (int i = 0; i < 2 * n && st == MOE_OK; i++) {
		bool traced = (i & 1) != (i >> 1 & 1);
		struct moe_trace_info info = { 0 };
		double *v = s.value;

		st = traced ? trace_begin(b) : MOE_OK;
		st = st == MOE_OK ? run_marked(b, &s, i) : st;
		if (traced && st == MOE_OK)
			st = trace_end(b, &info);
		(traced ? on : off)[i / 2] = v[LAYER_STEP] + v[LAYER_UPDATE];
		tasks += info.tasks;
		bytes += info.bytes;
		lost += info.lost;
		writer += info.writer_seconds;
	}
	for (int i = 0; i < n && st == MOE_OK; i++)
		ratio[i] = 100 * (on[i] / off[i] - 1);
	if (st == MOE_OK) {
		double low = quantile(ratio, n, .25), mid = quantile(ratio, n, .5);
		double high = quantile(ratio, n, .75), off_mid = quantile(off, n, .5);

		printf("{\"pairs\": %d, \"tasks\": %.1f, \"bytes\": %.0f, \"lost\": %lld, "
		       "\"off_ms\": %.3f, \"on_ms\": %.3f, \"cost_percent\": %.2f, "
		       "\"quartiles\": [%.2f, %.2f], \"writer_ms\": %.3f}\n",
		       n, (double)tasks / n, (double)bytes / n, (long long)lost, 1e3 * off_mid,
		       1e3 * quantile(on, n, .5), mid, low, high, 1e3 * writer / n);
	}
	moe_free(off);
	return st;
}

static enum moe_status measure(struct bench *b, struct layer_result *r)
{
	struct layer_sample *samples = moe_calloc((size_t)b->o.repeat, sizeof *samples);
	struct moe_trace_info info;
	enum moe_status st = MOE_OK;

	if (!samples)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the samples");
	if (b->o.trace)
		st = trace_begin(b);
	for (int i = 0; i < b->o.repeat && st == MOE_OK; i++) {
		st = run_marked(b, &samples[i], i + 1);
		if (st == MOE_OK)
			st = run_bare(b, &samples[i]);
	}
	if (b->o.trace && st == MOE_OK)
		st = trace_end(b, &info);
	r->samples = samples;
	r->n = b->o.repeat;
	if (st == MOE_OK && b->o.json)
		layer_print_json(&b->o, b->engine, &b->data, r);
	else if (st == MOE_OK)
		layer_print_table(&b->o, b->engine, r);
	r->samples = NULL;
	moe_free(samples);
	return st;
}

static enum moe_status run(struct bench *b)
{
	struct layer_result r = { 0 };
	double start = moe_now();

	if (getloadavg(&r.load_at_start, 1) != 1)
		r.load_at_start = -1;
	MOE_TRY(set_up(b));
	r.setup = moe_now() - start;
	MOE_TRY(warm_up(b, &r));
	if (b->o.explain)
		layer_explain(b->o.json || b->o.serve ? stderr : stdout, &b->o, b->engine, b->block,
			      &b->data);
	if (b->o.trace_cost)
		return measure_trace(b);
	if (!b->o.serve)
		return measure(b, &r);
	layer_print_ready(&b->o, b->engine, &b->data, &r);
	return serve(b);
}

static const char usage[] =
	"usage: bench_layer [options]\n"
	"  --shape S     small, qwen3 (default), qwen3e16, dsv3\n"
	"  --tokens N    default 512\n"
	"  --workers W   default: one per core\n"
	"  --weights F   bf16 (default) or f32, the activations too; or experts in fp8, int8, int4, mxfp4, made from\n"
	"                bf16 (int4_row: one scale per row), beside bare GEMMs in bf16\n"
	"  --rank R      of LoRA, default 16; 0: none, and no update\n"
	"  --repeat N    timed repetitions, default 7\n"
	"  --warm-up N   steps before them, default 2\n"
	"  --skew S      added to the routing scores, falling with the expert's index; default 0\n"
	"  --policy P    StarPU's scheduling policy\n"
	"  --backward M  direct, shared:1, resident or auto (default): what the backward multiplies by\n"
	"  --json        one line of JSON\n"
	"  --explain     also print what was decided (on stderr with --json or --serve)\n"
	"  --trace FILE  record the timed steps\n"
	"  --trace-cost  only time pairs of steps, recorded (into FILE or nowhere) and not\n"
	"  --serve       steps on demand: go [N], bare, quit on stdin\n"
	"MOESAIC_ISA names the kernel table.\n";

static bool take_shape(const char *name, struct layer_shape *out)
{
	for (size_t i = 0; i < MOE_COUNT(shapes); i++)
		if (!strcmp(name, shapes[i].name)) {
			*out = shapes[i];
			return true;
		}
	return false;
}

static bool take_weights(const char *name, struct layer_options *o)
{
	bool plain = !strcmp(name, "f32") || !strcmp(name, "bf16");

	o->dtype = !strcmp(name, "f32") ? MOE_F32 : MOE_BF16;
	o->format = NULL;
	o->weights = plain ? moe_dtype_name(o->dtype) : name;
	return plain || layer_take_format(name, o);
}

static bool take_option(int c, const char *text, struct layer_options *o)
{
	char *end;

	switch (c) {
	case 's':
		return take_shape(text, &o->shape);
	case 't':
		return take_number(text, 1, &o->tokens);
	case 'w':
		return take_number(text, 0, &o->workers);
	case 'f':
		return take_weights(text, o);
	case 'r':
		return take_number(text, 0, &o->rank);
	case 'n':
		return take_number(text, 1, &o->repeat);
	case 'u':
		return take_number(text, 1, &o->warm_up);
	case 'k':
		o->skew = strtod(text, &end);
		return *text && !*end;
	case 'p':
		o->policy = text;
		return true;
	case 'b':
		o->backward = text;
		return true;
	case 'j':
		return o->json = true;
	case 'e':
		return o->explain = true;
	case 'c':
		o->trace = text;
		return true;
	case 'C':
		return o->trace_cost = true;
	case 'v':
		return o->serve = true;
	default:
		return false;
	}
}

static const struct option options[] = {
	{ "shape", required_argument, NULL, 's' },   { "tokens", required_argument, NULL, 't' },
	{ "workers", required_argument, NULL, 'w' }, { "weights", required_argument, NULL, 'f' },
	{ "rank", required_argument, NULL, 'r' },    { "repeat", required_argument, NULL, 'n' },
	{ "warm-up", required_argument, NULL, 'u' }, { "skew", required_argument, NULL, 'k' },
	{ "policy", required_argument, NULL, 'p' },  { "backward", required_argument, NULL, 'b' },
	{ "json", no_argument, NULL, 'j' },
	{ "explain", no_argument, NULL, 'e' },	     { "serve", no_argument, NULL, 'v' },
	{ "trace", required_argument, NULL, 'c' },   { "trace-cost", no_argument, NULL, 'C' },
	{ "help", no_argument, NULL, 'h' },	     { NULL, 0, NULL, 0 },
};

int main(int argc, char **argv)
{
	struct bench b = { .o = { .shape = shapes[1],
				  .tokens = 512,
				  .rank = 16,
				  .repeat = 7,
				  .warm_up = 2,
				  .weights = "BF16",
				  .dtype = MOE_BF16 } };
	enum moe_status st;
	int c, index = 0;

	while ((c = getopt_long(argc, argv, "", options, &index)) != -1) {
		if (c == 'h')
			return fputs(usage, stdout) < 0;
		if (c == '?')
			return 2;
		if (!take_option(c, optarg, &b.o)) {
			fprintf(stderr, "bench_layer: --%s: \"%s\" is not possible\n",
				options[index].name, optarg);
			return 2;
		}
	}
	if (optind < argc) {
		fputs(usage, stderr);
		return 2;
	}
	if (b.o.serve && (b.o.trace || b.o.trace_cost)) {
		fputs("bench_layer: --trace does not go with --serve\n", stderr);
		return 2;
	}
	if (b.o.trace_cost && !b.o.trace)
		b.o.trace = "/dev/null";
	st = run(&b);
	if (st != MOE_OK)
		fprintf(stderr, "bench_layer: %s\n", moe_last_error());
	if (tear_down(&b) != MOE_OK && st == MOE_OK) {
		fprintf(stderr, "bench_layer: %s\n", moe_last_error());
		st = MOE_ERR_RUNTIME;
	}
	return st != MOE_OK;
}
