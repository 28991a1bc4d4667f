/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What suite_tiles can't see of AMX: the 8-bit micro-kernel, and that the emulated tiles refuse
 * what the CPU would refuse.
 */
#define MOE_ISA amx_emulated
#define MOE_AMX_EMULATED
#include "codelets/kernels/amx/amx.h"
#include "codelets/kernels/amx/tile.h"
#include "tests/harness.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

const char moe_suite_name[] = "amx";

/* ---- 8 bits ---- */

static int8_t *bytes(int64_t n)
{
	int8_t *p = malloc((size_t)n);

	if (!p)
		abort();
	for (int64_t i = 0; i < n; i++)
		p[i] = (int8_t)(rand() % 256 - 128); /* -128 included */
	return p;
}

static void s8_case(int m, int k)
{
	enum { LDY = 19 };
	int8_t *x = bytes(m * (int64_t)(k + 1)), *w = bytes(16 * (int64_t)k);
	int8_t *panel = bytes((int64_t)m * k), *blocks = aligned_alloc(64, (size_t)k * 16);
	int32_t *y = calloc((size_t)m * LDY, sizeof *y);
	int wrong = 0;

	if (!blocks || !y)
		abort();
	for (int n = 0; n < 16; n++)
		for (int i = 0; i < k; i++)
			blocks[i / 64 * 1024 + n * 64 + i % 64] = w[n * k + i];
	OWN(pack_s8)(m, x, k + 1, k, panel);
	OWN(tile_fwd_s8)(m, k, panel, blocks, y, LDY);
	for (int i = 0; i < m; i++)
		for (int n = 0; n < LDY; n++) {
			int32_t want = 0;

			for (int j = 0; n < 16 && j < k; j++)
				want += x[i * (int64_t)(k + 1) + j] * w[n * k + j];
			wrong += y[i * LDY + n] != want;
		}
	CU_ASSERT_EQUAL(wrong, 0);
	free(x);
	free(w);
	free(panel);
	free(blocks);
	free(y);
}

static void test_s8(void)
{
	static const int rows[] = { 1, 2, 15, 16, 17, 32, 40, 48, 63, 64, 65, 100, 129 };

	for (size_t i = 0; i < MOE_COUNT(rows); i++) {
		s8_case(rows[i], 64);
		s8_case(rows[i], 704);
	}
}

/* ---- emulated tiles ---- */

static char memory[16 * 64];

static void configure(int rows, int row_bytes)
{
	struct amx_config config = { .palette = 1 };

	for (int i = 0; i < 3; i++)
		amx_shape(&config, i, AMX_ROWS, AMX_ROW_BYTES);
	amx_shape(&config, 3, rows, row_bytes);
	amx_load_config(&config);
}

static void good(void)
{
	configure(4, 32);
	amx_load(3, memory, 32);
	amx_store(3, memory, 64);
	amx_zero(0);
	amx_dp_bf16(0, 1, 2);
	amx_release();
	configure(16, 64);
	amx_release();
}

static void unconfigured(void)
{
	amx_zero(0);
}

static void released(void)
{
	good();
	amx_load(0, memory, 64);
}

static void never_shaped(void)
{
	configure(16, 64);
	amx_zero(4);
}

static void too_wide(void)
{
	configure(16, 68);
}

static void too_many_rows(void)
{
	configure(17, 64);
}

static void odd_bytes(void)
{
	configure(16, 30);
}

static void left_behind(void)
{
	configure(16, 64);
	configure(16, 64);
}

static void other_palette(void)
{
	struct amx_config config = { 0 };

	amx_load_config(&config);
}

static void overlapping_rows(void)
{
	configure(16, 64);
	amx_store(3, memory, 60);
}

static void sums_of_other_rows(void)
{
	configure(8, 64);
	amx_dp_bf16(3, 1, 2);
}

static void sums_of_other_columns(void)
{
	configure(16, 32);
	amx_dp_s8(3, 1, 2);
}

static void other_depth(void)
{
	configure(16, 32);
	amx_dp_bf16(0, 3, 2);
}

static void one_tile_twice(void)
{
	configure(16, 64);
	amx_dp_bf16(0, 1, 1);
}

/* Whether run() ends in a failed assertion. */
static bool refused(void (*run)(void))
{
	int status;
	pid_t pid = fork();

	if (pid == 0) {
		if (!freopen("/dev/null", "w", stderr))
			_exit(1);
		signal(SIGABRT, SIG_DFL);
		run();
		_exit(0);
	}
	return waitpid(pid, &status, 0) == pid && WIFSIGNALED(status) &&
	       WTERMSIG(status) == SIGABRT;
}

static void test_refusals(void)
{
	good();
	CU_ASSERT(!refused(good));
#ifndef NDEBUG
	CU_ASSERT(refused(unconfigured));
	CU_ASSERT(refused(released));
	CU_ASSERT(refused(never_shaped));
	CU_ASSERT(refused(too_wide));
	CU_ASSERT(refused(too_many_rows));
	CU_ASSERT(refused(odd_bytes));
	CU_ASSERT(refused(left_behind));
	CU_ASSERT(refused(other_palette));
	CU_ASSERT(refused(overlapping_rows));
	CU_ASSERT(refused(sums_of_other_rows));
	CU_ASSERT(refused(sums_of_other_columns));
	CU_ASSERT(refused(other_depth));
	CU_ASSERT(refused(one_tile_twice));
#endif
}

const struct moe_test moe_suite_tests[] = {
	{ "8-bit forward", test_s8 },
	{ "what emulated tiles refuse", test_refusals },
	{ NULL, NULL },
};
