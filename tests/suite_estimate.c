/* SPDX-License-Identifier: Apache-2.0 */
/* Estimates from config.json alone: limits of the graph, and agreement with a model that is really opened. */
#include "tests/tables.h"

#include "moesaic.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char moe_suite_name[] = "estimate";

static void qwen3_30b(void)
{
	struct moe_model_params mp = { .struct_size = sizeof mp,
				       .dir = moe_test_path("tests/fixtures/configs/qwen3-30b-a3b/config.json"),
				       .slots = 4,
				       .backward_weights = "direct" };
	struct moe_estimate_params p = { .struct_size = sizeof p, .model = &mp, .parts = 8, .workers = 96,
					 .tokens = 8192, .micro_batches = 4 };
	struct moe_estimate e = { .struct_size = sizeof e };
	double layer = 2.0 * 3 * 128 * 768 * 2048; /* bytes of its experts */
	int64_t direct;

	setenv("MOESAIC_ISA", table()->name, 1);
	if (moe_estimate(&p, &e) != MOE_OK) {
		CU_FAIL_FATAL("estimate");
		return;
	}
	printf("\n  %s: %lld handles, %lld tasks, at most %d handles per task, submission %.2f s of %.1f s (%.1f %%), "
	       "%.1f GiB\n ",
	       table()->name, (long long)e.handles, (long long)e.tasks, e.max_task_handles, e.submission_s, e.step_s,
	       100 * e.submission_share, (double)e.total / 0x1p30);
	CU_ASSERT_EQUAL(e.params, 30532122624);
	CU_ASSERT_TRUE(e.handles <= 50000);
	CU_ASSERT_TRUE(e.max_task_handles <= 64);
	CU_ASSERT_TRUE(e.submission_share < 0.5);
	CU_ASSERT_TRUE(e.weights >= 2 * e.params);
	CU_ASSERT_TRUE((double)e.weights < 1.01 * 2 * (double)e.params);
	for (int i = 0; i < 8; i++)
		CU_ASSERT_TRUE(e.part[i] > e.weights / 10);
	direct = e.weights;
	if (!table()->weight_transpose)
		return; /* knows one way only */
	mp.backward_weights = "shared:3";
	if (!table_is_packed()) { /* has one form of a weight */
		CU_ASSERT_EQUAL(moe_estimate(&p, &e), MOE_ERR_UNSUPPORTED);
		printf("%s\n", moe_last_error());
		return;
	}
	CU_ASSERT_EQUAL(moe_estimate(&p, &e), MOE_OK);
	CU_ASSERT_STRING_EQUAL(e.backward_weights, "shared:3");
	CU_ASSERT_DOUBLE_EQUAL((double)(e.weights - direct), 3 * layer, .05 * 3 * layer);
	CU_ASSERT_TRUE(e.handles <= 50000);
	mp.backward_weights = "resident";
	CU_ASSERT_EQUAL(moe_estimate(&p, &e), MOE_OK);
	CU_ASSERT_DOUBLE_EQUAL((double)(e.weights - direct), 48 * layer, .05 * 48 * layer);
}

static void agrees_with_opening(void)
{
	const char *dir = moe_test_path("tests/fixtures/ckpt/qwen3moe");
	struct moe_engine_params ep = { .struct_size = sizeof ep, .workers = 2, .parts = 2,
					.isa = table_isa() };
	struct moe_model_params mp = { .struct_size = sizeof mp, .dir = dir, .max_tokens = 200 };
	struct moe_estimate_params p = { .struct_size = sizeof p, .model = &mp, .parts = 2, .workers = 2,
					 .tokens = 200 };
	struct moe_estimate e = { .struct_size = sizeof e };
	struct moe_engine_info info = { .struct_size = sizeof info };
	struct moe_model_info mi = { .struct_size = sizeof mi };
	struct moe_engine *engine;
	struct moe_model *model;

	CU_ASSERT_EQUAL_FATAL(moe_engine_open(&ep, &engine), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_model_open(engine, &mp, &model), MOE_OK);
	CU_ASSERT_EQUAL(moe_engine_get_info(engine, &info), MOE_OK);
	CU_ASSERT_EQUAL(moe_model_get_info(model, &mi), MOE_OK);
	CU_ASSERT_EQUAL(moe_estimate(&p, &e), MOE_OK);
	CU_ASSERT_EQUAL(e.handles, info.handles);
	CU_ASSERT_EQUAL(e.weights, mi.weight_bytes);
	CU_ASSERT_EQUAL(e.lora + e.gradients + e.moments, mi.lora_bytes);
	CU_ASSERT_EQUAL(e.activations, mi.activation_bytes);
	CU_ASSERT_EQUAL(e.trainable_params, mi.trainable_params);
	moe_model_close(model);
	CU_ASSERT_EQUAL(moe_engine_close(engine), MOE_OK);
}

static void bad_input(void)
{
	struct moe_model_params mp = { .struct_size = sizeof mp, .dir = "/nowhere" };
	struct moe_estimate_params p = { .struct_size = sizeof p, .model = &mp };
	struct moe_estimate e = { .struct_size = sizeof e };

	CU_ASSERT_EQUAL(moe_estimate(&p, &e), MOE_ERR_IO);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "/nowhere"));
	p.parts = 1000;
	CU_ASSERT_EQUAL(moe_estimate(&p, &e), MOE_ERR_ARG);
	p.parts = 1;
	e.struct_size = 1;
	CU_ASSERT_EQUAL(moe_estimate(&p, &e), MOE_ERR_ARG);
}

/* The one test that asks by the environment. */
static void test_qwen3_30b(void)
{
	const char *isa = getenv("MOESAIC_ISA");
	char before[64] = "";

	if (isa)
		snprintf(before, sizeof before, "%s", isa);
	each_table(qwen3_30b);
	if (isa)
		setenv("MOESAIC_ISA", before, 1);
	else
		unsetenv("MOESAIC_ISA");
}

static void test_agrees_with_opening(void)
{
	each_table(agrees_with_opening);
}

const struct moe_test moe_suite_tests[] = {
	{ "Qwen3-30B, 8 parts, 4 micro-batches", test_qwen3_30b },
	{ "agrees with opening the model", test_agrees_with_opening },
	{ "bad input", bad_input },
	{ NULL, NULL },
};
