/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one layer may cost in accuracy and memory: relative L2 errors against loops in double at realistic
 * sizes, and the bytes of a Qwen3-30B layer in training, from the engine's counters.
 */
#include "engine/engine.h"
#include "graphs/moe_state.h"
#include "tests/block_check.h"
#include "tests/tables.h"

#include <math.h>

const char moe_suite_name[] = "bars";

/* ---- errors ---- */

#define OUT 0.0024
#define GRAD_X 0.0031
#define GRAD_WEIGHTS 0.0032
#define GRAD_LORA 0.0036
#define GRAD_DOWN_A 0.0039

static const struct block_case sizes[] = {
	{ .E = 8, .k = 1, .H = 256, .I = 192, .T = 320, .r = 16 },
	{ .E = 8, .k = 2, .H = 256, .I = 192, .T = 160, .r = 16 },
	{ .E = 8, .k = 4, .H = 256, .I = 192, .T = 80, .r = 16, .share_a = true },
	{ .E = 8, .k = 8, .H = 256, .I = 192, .T = 40, .r = 16 },
	{ .E = 2, .k = 2, .H = 2048, .I = 768, .T = 40, .r = 16 },
};

/* Made once, for all tables. */
static struct {
	struct block_data d;
	struct block_reference r;
} cases[MOE_COUNT(sizes)];

/* LoRA B of a trained adapter's size: its share of a result is about half of the base weights'. */
static void make_case(size_t i)
{
	struct block_data *d = &cases[i].d;

	block_data_make(d, &sizes[i]);
	for (int b = MOE_BLOCK_GATE_LORA_B; b <= MOE_BLOCK_DOWN_LORA_B; b++)
		for (int64_t j = 0; j < d->n[b]; j++)
			d->w[b][j] *= 0.25f;
	block_data_round(d);
	block_reference(&cases[i].r, d, d->ids);
}

/* The largest of the five LoRA gradients that share a bar, and down A's. */
static void lora_errors(struct moe_block *b, size_t i, double *most, double *down_a)
{
	const struct block_data *d = &cases[i].d;

	*most = *down_a = 0;
	for (int a = MOE_BLOCK_GATE_LORA_A; a <= MOE_BLOCK_DOWN_LORA_B; a++) {
		double *got = block_get(b, &d->c, (enum moe_block_array)a, true);
		double error = relative_error(got, cases[i].r.grad[a], d->n[a]);

		if (a == MOE_BLOCK_DOWN_LORA_A)
			*down_a = error;
		else
			*most = worst_of(*most, error);
		free(got);
	}
}

static void measure(struct moe_engine *e, size_t i)
{
	struct block_data *d = &cases[i].d;
	const struct block_reference *r = &cases[i].r;
	const struct block_case *c = &sizes[i];
	int64_t n = (int64_t)c->T * c->H;
	struct moe_block *b = block_make(e, c, d, NULL);
	double out, grad_x, grad_weights, lora, down_a;

	CHECK_OK(block_forward(b, d, true, d->out));
	CHECK_OK(block_backward(b, d));
	out = relative_error_of_floats(d->out, r->out, n);
	grad_x = relative_error_of_floats(d->grad_x, r->grad_x, n);
	grad_weights = relative_error_of_floats(d->grad_weights, r->grad_weights, (int64_t)c->T * c->k);
	lora_errors(b, i, &lora, &down_a);
	printf("\n  %-12s H %d I %d k %d: out %.5f, grad_x %.5f, routing %.5f, LoRA %.5f, down A %.5f",
	       table()->name, c->H, c->I, c->k, out, grad_x, grad_weights, lora, down_a);
	CHECK(out <= OUT && grad_x <= GRAD_X && grad_weights <= GRAD_WEIGHTS);
	CHECK(lora <= GRAD_LORA && down_a <= GRAD_DOWN_A);
	moe_block_destroy(b);
}

static void error_cases(void)
{
	struct moe_engine *e = open_with(2, 1, NULL);

	for (size_t i = 0; e && i < MOE_COUNT(sizes); i++)
		if (table_takes(i, 2))
			measure(e, i);
	CHECK_OK(moe_engine_close(e));
}

static void errors(void)
{
	for (size_t i = 0; i < MOE_COUNT(sizes); i++)
		make_case(i);
	each_table(error_cases);
	printf("\n ");
	for (size_t i = 0; i < MOE_COUNT(sizes); i++) {
		block_data_free(&cases[i].d);
		block_reference_free(&cases[i].r);
	}
}

/* ---- memory ---- */

static void qwen3_layer(void)
{
	const struct moe_experts_shape s = { .E = 128,
					     .k = 8,
					     .H = 2048,
					     .I = 768,
					     .r = 16,
					     .group_size = 1,
					     .scale = 2,
					     .trainable = true };
	const size_t base = (size_t)128 * 3 * 2048 * 768 * 2;
	const int T = 2048;
	struct moe_experts l = { .router = moe_router_find("softmax_topk") };
	struct moe_experts_state state;
	struct moe_experts_scratch scratch;
	struct moe_engine *e;
	double kept;
	size_t weights, all;

	CHECK_OK(moe_engine_open_dry(1, 2, &e));
	CHECK_OK(moe_kernels_select(table()->name));
	CHECK_OK(moe_experts_alloc(e, &s, MOE_BF16, &l));
	weights = moe_memory_bytes(e, "weights", -1);
	CHECK_OK(moe_experts_state_alloc(e, &l, T, &state));
	kept = (double)moe_memory_bytes(e, "activations", -1) / T;
	CHECK_OK(moe_experts_scratch_alloc(e, &l, T, true, &scratch));
	all = moe_memory_bytes(e, "activations", -1);
	printf("\n  %-12s weights %.1f MiB, kept %.0f bytes per token, scratch of all layers %.0f",
	       table()->name, (double)weights / 0x1p20, kept, (double)all / T - kept);
	CHECK((double)weights <= 1.01 * (double)base);
	CHECK(moe_experts_state_bytes(&l, T) + moe_experts_scratch_bytes(&l, T, true) == all);
	if (table_is_packed()) /* AMX pads ranks to 32 */
		CHECK(kept <= (table()->rank_pad > 16 ? 31 : 30) * 1024);
	moe_experts_scratch_free(e, &scratch, l.P);
	moe_experts_state_free(e, &state, l.P);
	moe_experts_free(e, &l);
	CHECK(moe_memory_bytes(e, NULL, -1) == 0);
	CHECK_OK(moe_engine_close(e));
}

static void memory(void)
{
	each_table(qwen3_layer);
	printf("\n ");
}

const struct moe_test moe_suite_tests[] = {
	{ "errors of one layer", errors },
	{ "memory of a Qwen3-30B layer", memory },
	{ NULL, NULL },
};
