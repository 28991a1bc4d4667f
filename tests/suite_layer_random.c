/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random sequences of calls on two layers that share buffers (plain or quantised, with LoRA or
 * whole, clamped or not), against a plain single-threaded model of them: each call gives the right
 * numbers or the documented error. A failing sequence is printed by its seed; MOESAIC_TEST_SEED
 * repeats it as the first one.
 */
#include "tests/random_layers.h"

const char moe_suite_name[] = "layer_random";

enum { CALLS = 48, SEQUENCES_PER_ENGINE = 40 };

static void remake(struct layer_model *m, struct moe_engine *e)
{
	if (any(6))
		return;
	model_free(m);
	model_make(m, e);
}

/* Calls on both layers. */
static void step_of_all(struct layer_model m[LAYERS], struct moe_engine *e)
{
	switch (any(4)) {
	case 0:
		do_held(m, e);
		break;
	case 1:
		do_steps(m, e);
		break;
	default:
		do_optimizer(m, e);
		break;
	}
}

/* Calls beside passes. */
static void step_beside(struct layer_model *m, struct moe_engine *e)
{
	switch (any(8)) {
	case 0:
		do_repack(m);
		break;
	case 1:
		do_memory(m);
		break;
	case 2:
		do_drop(m);
		break;
	case 3:
		do_checkpoint(m);
		break;
	case 4:
		do_arrays(m);
		break;
	case 5:
		do_load_again(m);
		break;
	case 6:
		do_dropout(m);
		break;
	default:
		remake(m, e);
		break;
	}
}

static void step(struct layer_model all[LAYERS], struct moe_engine *e)
{
	struct layer_model *m = &all[any(LAYERS)];
	int which = any(21);

	if (which < 5)
		do_forward(m);
	else if (which < 9)
		do_backward(m);
	else if (which < 10)
		do_wait(m);
	else if (which < 11)
		do_update(m, e);
	else if (which < 12)
		do_external(m);
	else if (which < 13)
		do_window(m);
	else if (which < 14)
		do_gradient(m);
	else if (which < 15)
		do_misuse(m);
	else if (which < 16)
		step_of_all(all, e);
	else if (which < 17)
		do_bad_token(m, e);
	else
		step_beside(m, e);
}

static void run_sequence(struct moe_engine *e, unsigned long seed)
{
	struct layer_model m[LAYERS];

	random_seed(seed, seed);
	for (int i = 0; i < LAYERS; i++)
		model_make(&m[i], e);
	for (int i = 0; i < CALLS && !random_failed(); i++)
		step(m, e);
	for (int i = 0; i < LAYERS; i++)
		model_free(&m[i]);
}

/* One to three parts, on one worker or two: by the seed, so that it alone repeats a sequence. */
static struct moe_engine *engine_of(unsigned long seed)
{
	unsigned long n = seed / SEQUENCES_PER_ENGINE;

	return layer_engine(1 + (int)(n / 3 % 2), 1 + (int)(n % 3));
}

static void sequences(void)
{
	unsigned long first = moe_test_seed(), n = moe_test_full()     ? 1000
						   : table_is_packed() ? 24
								       : 60;
	struct moe_engine *e = engine_of(first);

	for (unsigned long seed = first; seed < first + n; seed++) {
		if (seed > first && seed % SEQUENCES_PER_ENGINE == 0) {
			CHECK_OK(moe_engine_close(e));
			e = engine_of(seed);
		}
		run_sequence(e, seed);
	}
	CHECK_OK(moe_engine_close(e));
}

static void exact(void)
{
	exact_table(sequences);
}

static void best(void)
{
	sequences(); /* the table that an engine takes by itself */
}

const struct moe_test moe_suite_tests[] = {
	{ "sequences, exact kernels", exact },
	{ "sequences, the CPU's kernels", best },
	{ NULL, NULL },
};
