/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The routed experts of one layer in a program of its own (docs/experts.md): creates them, loads their weights,
 * and trains their LoRA towards a target until the error has fallen. The routing is the program's.
 *
 *     cc -O2 experts.c -o experts $(pkg-config --cflags --libs moesaic) -lm
 *     ./experts                                  # weights made up here
 *     ./experts /path/to/checkpoint 0 128 2048 768 8    # layer, experts, hidden, intermediate, experts per token
 */
#include <math.h>
#include <moesaic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define TOKENS 64
#define STEPS 30

struct sizes {
	int layer, experts, hidden, intermediate, top;
};

static void check(enum moe_status status, const char *what)
{
	if (status == MOE_OK)
		return;
	fprintf(stderr, "experts: %s: %s\n", what, moe_last_error());
	exit(1);
}

/* Uniform in -1..1 x scale, the same in every run. */
static float *numbers(int64_t n, float scale)
{
	static uint64_t state = 1;
	float *v = malloc((size_t)n * sizeof *v);

	if (!v) {
		fprintf(stderr, "experts: no memory for %lld numbers\n", (long long)n);
		exit(1);
	}
	for (int64_t i = 0; i < n; i++) {
		state = state * 6364136223846793005u + 1442695040888963407u;
		v[i] = scale * ((float)(state >> 40) / (float)(1 << 23) - 1);
	}
	return v;
}

static struct moe_array matrix(void *data, enum moe_dtype dtype, int64_t rows, int64_t columns)
{
	return (struct moe_array){ .data = data, .dtype = dtype, .ndim = 2, .shape = { rows, columns }, .strides = { columns, 1 } };
}

static struct moe_array stack(float *data, int64_t experts, int64_t rows, int64_t columns)
{
	return (struct moe_array){ .data = data,
				   .dtype = MOE_F32,
				   .ndim = 3,
				   .shape = { experts, rows, columns },
				   .strides = { rows * columns, columns, 1 } };
}

static void load(struct moe_expert_layer *layer, const struct sizes *s, const char *checkpoint)
{
	int64_t n = (int64_t)s->experts * s->intermediate * s->hidden;
	float scale = 1 / sqrtf((float)s->hidden);
	float *values[3];
	struct moe_array gate, up, down;

	if (checkpoint) {
		check(moe_experts_load_file(layer, checkpoint, NULL, NULL, 0), "loading");
		return;
	}
	for (int i = 0; i < 3; i++)
		values[i] = numbers(n, scale);
	gate = stack(values[0], s->experts, s->intermediate, s->hidden);
	up = stack(values[1], s->experts, s->intermediate, s->hidden);
	down = stack(values[2], s->experts, s->hidden, s->intermediate);
	check(moe_experts_load(layer, &gate, &up, &down, NULL, 0), "loading"); /* copies */
	for (int i = 0; i < 3; i++)
		free(values[i]);
}

static struct moe_expert_layer *create(struct moe_engine *engine, const struct sizes *s)
{
	struct moe_experts_params params = {
		.struct_size = sizeof params,
		.experts = s->experts,
		.experts_per_token = s->top,
		.hidden = s->hidden,
		.intermediate = s->intermediate,
		.layer = s->layer,
		.lora_rank = 8,
		.lora_alpha = 16,
		.weight_dtype = MOE_F32,
	};
	struct moe_expert_layer *layer;

	check(moe_experts_create(engine, &params, &layer), "creating");
	return layer;
}

/* Mean squared distance of out to target, and its gradient. */
static double distance(const float *out, const float *target, float *grad, int64_t n)
{
	double sum = 0;

	for (int64_t i = 0; i < n; i++) {
		float d = out[i] - target[i];

		sum += (double)d * d;
		grad[i] = 2 * d / (float)n;
	}
	return sum / (double)n;
}

/* Returns the error before the first and after the last update. */
static void train(struct moe_expert_layer *layer, const struct sizes *s, double *first, double *last)
{
	int64_t n = (int64_t)TOKENS * s->hidden, slots = (int64_t)TOKENS * s->top;
	float *x = numbers(n, 1), *y = numbers(n, 0), *target = numbers(n, 1), *grad = numbers(n, 0), *grad_x = numbers(n, 0);
	float *weight = numbers(slots, 0), *grad_weight = numbers(slots, 0);
	int32_t *id = malloc((size_t)slots * sizeof *id);
	struct moe_array ax = matrix(x, MOE_F32, TOKENS, s->hidden), ay = matrix(y, MOE_F32, TOKENS, s->hidden),
			 ag = matrix(grad, MOE_F32, TOKENS, s->hidden), agx = matrix(grad_x, MOE_F32, TOKENS, s->hidden),
			 aid = matrix(id, MOE_I32, TOKENS, s->top), aw = matrix(weight, MOE_F32, TOKENS, s->top),
			 agw = matrix(grad_weight, MOE_F32, TOKENS, s->top);
	struct moe_adamw_params adamw = {
		.struct_size = sizeof adamw, .learning_rate = 1e-2, .beta1 = .9, .beta2 = .999, .eps = 1e-8
	};

	for (int64_t i = 0; id && i < slots; i++) { /* a router would choose these */
		id[i] = (int32_t)(i % s->experts);
		weight[i] = 1.0f / (float)s->top;
	}
	for (int step = 0; step < STEPS; step++) {
		check(moe_experts_forward(layer, &ax, &aid, &aw, 1, &ay), "forward");
		*last = distance(y, target, grad, n);
		if (!step)
			*first = *last;
		/* grad_x goes to the layer below, grad_weight to the router */
		check(moe_experts_backward(layer, &ag, 1, &agx, &agw), "backward");
		check(moe_experts_update(layer, &adamw), "update");
	}
	check(moe_experts_forward(layer, &ax, &aid, &aw, 0, &ay), "forward");
	*last = distance(y, target, grad, n);
	free(x), free(y), free(target), free(grad), free(grad_x), free(weight), free(grad_weight), free(id);
}

int main(int argc, char **argv)
{
	struct sizes s = { .experts = 8, .hidden = 64, .intermediate = 96, .top = 2 };
	struct moe_engine_params engine_params = { .struct_size = sizeof engine_params };
	struct moe_engine *engine;
	struct moe_expert_layer *layer;
	double first, last;

	if (argc != 1 && argc != 7) {
		fprintf(stderr, "usage: experts [CHECKPOINT LAYER EXPERTS HIDDEN INTERMEDIATE TOP]\n");
		return 2;
	}
	if (argc == 7)
		s = (struct sizes){ atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]), atoi(argv[6]) };
	check(moe_engine_open(&engine_params, &engine), "engine");
	layer = create(engine, &s);
	load(layer, &s, argc == 7 ? argv[1] : NULL);
	check(moe_experts_init_lora(layer, 42), "LoRA");
	train(layer, &s, &first, &last);
	moe_experts_destroy(layer);
	check(moe_engine_close(engine), "engine");
	printf("%d experts, %d tokens, %d steps: error %.4f -> %.4f\n", s.experts, TOKENS, STEPS, first, last);
	return last < first ? 0 : 1;
}
