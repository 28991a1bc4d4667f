/* SPDX-License-Identifier: Apache-2.0 */
/* Every block fixture of the project, and of ../shared where present, through the public block object. */
#include "codelets/kernels/packed/tiles.h"
#include "tests/golden.h"
#include "tests/tables.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char moe_suite_name[] = "golden";

static bool excluded(const char *name)
{
	return !strncmp(name, "model_", 6);
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
	return strcmp((*a)->d_name, (*b)->d_name);
}

/* Runs every supported fixture of a folder; how many. */
static int run_folder(struct moe_engine *engine, const char *folder, const struct golden_options *o)
{
	struct dirent **list;
	int n = scandir(folder, &list, NULL, by_name), ran = 0;

	for (int i = 0; i < n; i++) {
		const char *name = list[i]->d_name;
		char path[PATH_MAX], kind[64];

		snprintf(path, sizeof path, "%s/%s", folder, name);
		if (strstr(name, ".safetensors") && !excluded(name) &&
		    golden_kind_supported(golden_kind(path, kind, sizeof kind))) {
			CU_ASSERT_TRUE(golden_run(engine, path, o, NULL));
			ran++;
		}
		free(list[i]);
	}
	if (n >= 0)
		free(list);
	return ran;
}

static void with_parts(int parts, int workers)
{
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = workers, .parts = parts,
				       .isa = table_isa() };
	const char *shared = moe_test_shared("oracle/golden");
	const struct golden_options o = { .group_size = 0 };
	struct moe_engine *engine;

	CU_ASSERT_EQUAL_FATAL(moe_engine_open(&p, &engine), MOE_OK);
	CU_ASSERT_TRUE(run_folder(engine, moe_test_path("tests/fixtures/golden"), &o) >= 10);
	if (shared) {
		CU_ASSERT_TRUE(run_folder(engine, shared, &o) >= 15);
	} else {
		moe_test_skip("the larger fixtures of ../shared/oracle/golden are not here");
	}
	CU_ASSERT_EQUAL(moe_engine_close(engine), MOE_OK);
}

static void one_part(void)
{
	with_parts(1, 2);
}

static void three_parts(void)
{
	with_parts(3, 2);
}

/* What the backward multiplies by, where a table knows more than one way. */
static void copies(void)
{
	static const char *const modes[] = { "direct", "shared:1", "resident" };
	struct moe_engine_params p = {
		.struct_size = sizeof p, .workers = 2, .parts = 1, .isa = table_isa()
	};
	struct moe_engine *engine;

	if (!table()->weight_transpose)
		return;
	CU_ASSERT_EQUAL_FATAL(moe_engine_open(&p, &engine), MOE_OK);
	for (int i = 0; i < 3; i++) {
		struct golden_options o = { .backward = modes[i] };

		CU_ASSERT_TRUE(run_folder(engine, moe_test_path("tests/fixtures/golden"), &o) >= 10);
	}
	CU_ASSERT_EQUAL(moe_engine_close(engine), MOE_OK);
}

/* gate and up computed again in the backward, sliced, and the calls by their _async forms */
static void recompute(void)
{
	for (int parts = 1; parts <= 3; parts += 2) {
		struct moe_engine_params p = { .struct_size = sizeof p, .workers = 2, .parts = parts,
					       .isa = table_isa() };
		struct golden_options o = { .activations = MOE_ACTIVATIONS_RECOMPUTE,
					    .async = true,
					    .slices_i = parts };
		struct moe_engine *engine;

		CU_ASSERT_EQUAL_FATAL(moe_engine_open(&p, &engine), MOE_OK);
		CU_ASSERT_TRUE(run_folder(engine, moe_test_path("tests/fixtures/golden"), &o) >= 10);
		CU_ASSERT_EQUAL(moe_engine_close(engine), MOE_OK);
	}
}

/* The full fine-tuning fixture, or NULL (skipped by name). */
static const char *full_ft(void)
{
	const char *path = moe_test_shared("oracle/golden/qwen3_moe_full_ft.safetensors");

	if (!path)
		moe_test_skip("qwen3_moe_full_ft of ../shared/oracle/golden is not here");
	return path;
}

/* Hash of all that a fixture gives. */
static uint64_t bits_of(struct moe_engine *engine, const char *path, const struct golden_options *o)
{
	struct golden_result r;

	CU_ASSERT_TRUE(golden_run(engine, path, o, &r));
	golden_free(&r);
	return r.bits;
}

/*
 * Full fine-tuning: copies of weights follow every update (errors of stale ones are far above the tolerance),
 * and neither grouping, slicing, recomputing nor asynchronous calls change a bit.
 */
static void full_ft_child(void)
{
	static const char *const modes[] = { "direct", "shared:1", "resident" };
	const char *path = full_ft();

	for (int workers = 1; path && workers <= 2; workers++) {
		struct moe_engine_params p = { .struct_size = sizeof p, .workers = workers,
					       .parts = 1, .isa = table_isa() };
		struct moe_engine *engine;

		CU_ASSERT_EQUAL_FATAL(moe_engine_open(&p, &engine), MOE_OK);
		for (int i = 0; i < (table()->weight_transpose ? 3 : 1); i++) {
			struct golden_options plain = { .backward = modes[i], .group_size = 1 };
			struct golden_options other = { .backward = modes[i],
							.group_size = 3,
							.activations = MOE_ACTIVATIONS_RECOMPUTE,
							.async = true };

			CU_ASSERT_EQUAL(bits_of(engine, path, &plain), bits_of(engine, path, &other));
		}
		CU_ASSERT_EQUAL(moe_engine_close(engine), MOE_OK);
	}
}

static void test_full_ft(void)
{
	each_table(full_ft_child);
}

static void test_recompute(void)
{
	each_table(recompute);
}

static void test_copies(void)
{
	each_table(copies);
}

static void test_one_part(void)
{
	each_table(one_part);
}

static void test_three_parts(void)
{
	each_table(three_parts);
}

/*
 * Quantised weights in every way of multiplying them, in tables that know more than one: within the tolerances (8-bit
 * integers: 2.5 times as much, golden.c), and the same bits however the work is cut.
 */
static void computes(void)
{
	static const char *const names[] = { "bf16", "int16", "int8" };
	static const char *const files[] = { "quant_int8_row", "quant_int4_g32" };
	const struct golden_options cut = { .group_size = 3, .slices_i = 2, .slices_h = 2 };
	const struct golden_options whole = { .group_size = 1 };

	for (int i = 0; table()->tiles && table()->tiles->fwd_ints && i < 6; i++) {
		struct moe_engine_params p = { .struct_size = sizeof p, .workers = 2,
					       .parts = i % 2 ? 3 : 1, .isa = table_isa() };
		struct moe_engine *engine;

		setenv("MOESAIC_COMPUTE", names[i / 2], 1);
		CU_ASSERT_EQUAL_FATAL(moe_engine_open(&p, &engine), MOE_OK);
		for (size_t j = 0; j < MOE_COUNT(files); j++) {
			char path[PATH_MAX], name[64];

			snprintf(name, sizeof name, "tests/fixtures/golden/%s.safetensors", files[j]);
			snprintf(path, sizeof path, "%s", moe_test_path(name));
			CU_ASSERT_EQUAL(bits_of(engine, path, &whole), bits_of(engine, path, &cut));
		}
		CU_ASSERT_EQUAL(moe_engine_close(engine), MOE_OK);
	}
	unsetenv("MOESAIC_COMPUTE");
}

static void test_computes(void)
{
	each_table(computes);
}

/* A name that is none: what opening a model, a layer or a block asks first (moe_machine_use). */
static void test_unknown_compute(void)
{
	setenv("MOESAIC_COMPUTE", "int9", 1);
	CU_ASSERT_EQUAL(moe_compute_check(), MOE_ERR_CONFIG);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "MOESAIC_COMPUTE is \"int9\""));
	setenv("MOESAIC_COMPUTE", "int8", 1);
	CU_ASSERT_EQUAL(moe_compute_check(), MOE_OK);
	unsetenv("MOESAIC_COMPUTE");
	CU_ASSERT_EQUAL(moe_compute_check(), MOE_OK);
}

const struct moe_test moe_suite_tests[] = {
	{ "all block fixtures, one part", test_one_part },
	{ "all block fixtures, three parts", test_three_parts },
	{ "activations computed again, asynchronous calls", test_recompute },
	{ "full fine-tuning: modes, groups, policies", test_full_ft },
	{ "in every mode of the backward's weights", test_copies },
	{ "quantised weights in every way of multiplying", test_computes },
	{ "an unknown way of multiplying", test_unknown_compute },
	{ NULL, NULL },
};
