/* SPDX-License-Identifier: Apache-2.0 */
/* Every block fixture of the project, and of ../shared where present, through the public block object. */
#include "tests/golden.h"
#include "tests/tables.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char moe_suite_name[] = "golden";

/* Full fine-tuning comes with the training engine. */
static bool excluded(const char *name)
{
	return strstr(name, "_full_ft") || !strncmp(name, "model_", 6) || !strncmp(name, "quant_", 6);
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
	return strcmp((*a)->d_name, (*b)->d_name);
}

/* Runs every supported fixture of a folder; how many. */
static int run_folder(struct moe_engine *engine, const char *folder, const char *backward)
{
	struct golden_options o = { .backward = backward };
	struct dirent **list;
	int n = scandir(folder, &list, NULL, by_name), ran = 0;

	for (int i = 0; i < n; i++) {
		const char *name = list[i]->d_name;
		char path[PATH_MAX], kind[64];

		snprintf(path, sizeof path, "%s/%s", folder, name);
		if (strstr(name, ".safetensors") && !excluded(name) &&
		    golden_kind_supported(golden_kind(path, kind, sizeof kind))) {
			CU_ASSERT_TRUE(golden_run(engine, path, &o, NULL));
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
	struct moe_engine *engine;

	CU_ASSERT_EQUAL_FATAL(moe_engine_open(&p, &engine), MOE_OK);
	CU_ASSERT_TRUE(run_folder(engine, moe_test_path("tests/fixtures/golden"), NULL) >= 10);
	if (shared) {
		CU_ASSERT_TRUE(run_folder(engine, shared, NULL) >= 15);
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
	for (int i = 0; i < 3; i++)
		CU_ASSERT_TRUE(run_folder(engine, moe_test_path("tests/fixtures/golden"), modes[i]) >=
			       10);
	CU_ASSERT_EQUAL(moe_engine_close(engine), MOE_OK);
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

const struct moe_test moe_suite_tests[] = {
	{ "all block fixtures, one part", test_one_part },
	{ "all block fixtures, three parts", test_three_parts },
	{ "in every mode of the backward's weights", test_copies },
	{ NULL, NULL },
};
