/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/tables.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct moe_kernels *current;

static const struct table_tolerance exact = { 2e-6, 1e-5, 1e-5, 1e-5, 2e-6 };
/* f32 panels: a forward of what bf16 holds rounds nothing; a backward reads activations that were kept in bf16. */
static const struct table_tolerance kept_rounded = { 2e-6, 2.5e-3, 3e-3, 5e-3, 1e-3 };
static const struct table_tolerance rounded = { 4e-3, 5e-3, 3e-3, 5e-3, 1e-3 };

/* The supported table of the highest rank, or the one that MOESAIC_ISA names. */
static const struct moe_kernels *best(bool environment)
{
	const char *name = environment ? getenv("MOESAIC_ISA") : NULL;
	const struct moe_kernels *b = NULL;

	for (int i = 0; moe_kernels_list[i]; i++) {
		const struct moe_kernels *k = moe_kernels_list[i];

		if (k->supported() && (!name || !strcmp(name, k->name)) && (!b || k->rank > b->rank))
			b = k;
	}
	return b;
}

static void run_table(const struct moe_kernels *k, void (*run)(void))
{
	unsigned before = CU_get_number_of_failures();

	if (k->enable && !k->enable()) {
		moe_test_skip("the operating system refuses %s", k->name);
		return;
	}
	current = k;
	run();
	current = NULL;
	if (CU_get_number_of_failures() > before)
		printf("\n  with table %s\n", k->name);
}

static bool is_exact_or_best(const struct moe_kernels *k)
{
	return !k->tiles || k == best(false);
}

bool is_model_table(const struct moe_kernels *k)
{
	return !moe_test_sanitized() || is_exact_or_best(k);
}

/* MOESAIC_TEST_TABLES=avx2,amx: these alone, where a CPU is emulated and the others' results are known. */
static bool is_wanted(const struct moe_kernels *k)
{
	const char *wanted = getenv("MOESAIC_TEST_TABLES");
	size_t n = strlen(k->name);

	for (const char *at = wanted; at && *at; at += strspn(at, ",")) {
		size_t length = strcspn(at, ",");

		if (length == n && !memcmp(at, k->name, n))
			return true;
		at += length;
	}
	return !wanted;
}

static void run_tables(bool few, void (*run)(void))
{
	for (int i = 0; moe_kernels_list[i]; i++) {
		const struct moe_kernels *k = moe_kernels_list[i];

		if (k->supported() && is_wanted(k) && (!few || is_exact_or_best(k)))
			run_table(k, run);
	}
}

/* Kernels know no threads: the exact table and the best one are enough to see those. */
void each_table(void (*run)(void))
{
	run_tables(moe_test_threads_only(), run);
}

void each_model_table(void (*run)(void))
{
	run_tables(moe_test_sanitized(), run);
}

void exact_table(void (*run)(void))
{
	for (int i = 0; moe_kernels_list[i]; i++)
		if (!moe_kernels_list[i]->tiles)
			run_table(moe_kernels_list[i], run);
}

const struct moe_kernels *table(void)
{
	return current ? current : best(true);
}

const char *table_isa(void)
{
	return current ? current->name : NULL;
}

bool table_is_packed(void)
{
	return table()->tiles != NULL;
}

const struct table_tolerance *table_tolerance(void)
{
	return table_is_packed() ? &rounded : &exact;
}

const struct table_tolerance *table_tolerance_held(void)
{
	return table_is_packed() && table()->panel_bytes == sizeof(float) ? &kept_rounded : table_tolerance();
}

bool best_table_takes(size_t i, size_t n)
{
	return moe_test_full() || table() == best(false) || i % n == 0;
}

bool table_takes(size_t i, size_t n)
{
	return !table_is_packed() || best_table_takes(i, n);
}
