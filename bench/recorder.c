/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench recorder: what recording a task costs, in CPU time, which other programs on the machine
 * cannot inflate. One worker, steps of a block of 128 tiny groups, submitted while held, then run:
 * the worker never looks for work. Steps recorded and not alternate. bench_recorder [pairs];
 * medians of us per task.
 */
#include "moesaic.h"

#include "bench/measure.h"

#include <stdio.h>

enum { E = 128, K = 8, H = 16, I = 16, T = 64, R = 4 };

struct sample {
	double submit, run; /* s; run: the whole process without the calling thread */
	double tasks;
};

static float x[T * H], out[T * H], grad[T * H];
static struct moe_engine *engine;
static struct moe_block *block;

static double process_cpu(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
	return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

#define TRY(call)                                                                                  \
	do {                                                                                       \
		if ((call) != MOE_OK) {                                                            \
			fprintf(stderr, "bench_recorder: %s\n", moe_last_error());                 \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

static void step(struct sample *s)
{
	struct moe_array ax = { x, MOE_F32, 2, { T, H }, { 0 } }, ao = ax, ag = ax;
	struct moe_adamw_params adamw = { .struct_size = sizeof adamw,
					  .learning_rate = 1e-5,
					  .beta1 = .9,
					  .beta2 = .999,
					  .eps = 1e-8 };
	struct moe_engine_info before = { .struct_size = sizeof before }, after = before;
	double mine, all;

	ao.data = out;
	ag.data = grad;
	TRY(moe_engine_get_info(engine, &before));
	TRY(moe_engine_hold(engine));
	mine = thread_seconds();
	TRY(moe_block_forward_async(block, &ax, NULL, NULL, 1, &ao));
	TRY(moe_block_backward_async(block, &ao, &ag, NULL));
	TRY(moe_block_update(block, &adamw));
	s->submit = thread_seconds() - mine;
	mine = thread_seconds();
	all = process_cpu();
	TRY(moe_engine_release(engine));
	TRY(moe_block_wait(block));
	s->run = process_cpu() - all - (thread_seconds() - mine);
	TRY(moe_engine_get_info(engine, &after));
	s->tasks = (double)(after.tasks - before.tasks);
}

static void set(enum moe_block_array which, int64_t a, int64_t b, int64_t c)
{
	static float zero[E * H * I];
	struct moe_array array = { zero, MOE_F32, 3, { a, b, c }, { 0 } };

	if (a == 1) {
		array.ndim = 2;
		array.shape[0] = b;
		array.shape[1] = c;
	}
	TRY(moe_block_set(block, which, &array));
}

static void set_up(void)
{
	struct moe_engine_params ep = { .struct_size = sizeof ep, .workers = 1 };
	struct moe_block_params bp = { .struct_size = sizeof bp,
				       .hidden = H,
				       .intermediate = I,
				       .experts = E,
				       .experts_per_token = K,
				       .router = "softmax_topk",
				       .lora_rank = R,
				       .lora_alpha = 2 * R,
				       .group_size = 1 };

	for (int i = 0; i < T * H; i++)
		x[i] = (float)(i % 17) * .1f;
	TRY(moe_engine_open(&ep, &engine));
	TRY(moe_block_create(engine, &bp, &block));
	set(MOE_BLOCK_GATE_PROJ, E, I, H);
	set(MOE_BLOCK_UP_PROJ, E, I, H);
	set(MOE_BLOCK_DOWN_PROJ, E, H, I);
	set(MOE_BLOCK_ROUTER, 1, E, H);
	set(MOE_BLOCK_GATE_LORA_A, E, R, H);
	set(MOE_BLOCK_UP_LORA_A, E, R, H);
	set(MOE_BLOCK_DOWN_LORA_A, E, R, I);
	set(MOE_BLOCK_GATE_LORA_B, E, I, R);
	set(MOE_BLOCK_UP_LORA_B, E, I, R);
	set(MOE_BLOCK_DOWN_LORA_B, E, H, R);
}

int main(int argc, char **argv)
{
	int n = argc > 1 ? atoi(argv[1]) : 50;
	double *v[4], writer = 0, tasks = 0;
	struct sample s;

	if (n < 1)
		return 2;
	for (int i = 0; i < 4; i++)
		v[i] = calloc((size_t)n, sizeof **v);
	set_up();
	step(&s);
	for (int i = 0; i < 2 * n; i++) {
		int traced = (i & 1) != (i >> 1 & 1);
		struct moe_trace_params p = { .struct_size = sizeof p, .file = "/dev/null" };
		struct moe_trace_info info = { .struct_size = sizeof info };

		if (traced)
			TRY(moe_trace_start(engine, &p));
		step(&s);
		if (traced)
			TRY(moe_trace_stop(engine, &info));
		v[2 * traced][i / 2] = 1e6 * s.submit / s.tasks;
		v[2 * traced + 1][i / 2] = 1e6 * s.run / s.tasks;
		writer += info.writer_seconds;
		tasks += (double)info.tasks;
		if (traced && info.lost)
			fprintf(stderr, "bench_recorder: %lld records lost\n",
				(long long)info.lost);
	}
	for (int i = 0; i < 4; i++)
		v[i][0] = median(v[i], n);
	printf("us of CPU per task: submission %.2f, recorded %.2f; worker %.2f, recorded %.2f "
	       "with "
	       "part of the writer's %.2f\n",
	       v[0][0], v[2][0], v[1][0], v[3][0], 1e6 * writer / tasks);
	printf("recording: at most %.2f us per task\n",
	       v[2][0] - v[0][0] + v[3][0] - v[1][0] + 1e6 * writer / tasks);
	moe_block_destroy(block);
	TRY(moe_engine_close(engine));
	return 0;
}
