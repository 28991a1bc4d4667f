/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary positions of every supported kernel table, and the angles of the tables that they take. */
#include "codelets/rope_table.h"
#include "tests/kernel_check.h"

const char moe_suite_name[] = "kernels_rope";

static void rope_case(int m, int heads, int dim)
{
	int positions = 50, half = dim / 2;
	int64_t n = (int64_t)heads * dim, ld = n + 4;
	float *cs = mem((size_t)(positions * dim) * sizeof *cs), *x = randoms(m * ld, 1.0);
	float *y = copy(x, m * ld);
	int32_t *position = mem((size_t)m * sizeof *position);
	struct moe_rope_angles cfg = { .theta = 1e4,
				.type = MOE_ANGLES_YARN,
				.factor = 4,
				.original_max_positions = 16,
				.truncate = true };
	double *want = doubles(m * n), *back = doubles(m * n), f = 0.1 * log(4.0) + 1;

	moe_rope_table(&cfg, dim, positions, cs);
	for (int i = 0; i < m; i++) {
		position[i] = (i * 7 + 3) % positions;
		for (int64_t j = 0; j < n; j++) {
			int pair = (int)(j % dim) % half;
			double angle = position[i] * moe_rope_frequency(&cfg, dim, pair);
			double other = j % dim < half ? -(double)x[i * ld + j + half]
						      : (double)x[i * ld + j - half];

			want[i * n + j] =
				f * ((double)x[i * ld + j] * cos(angle) + other * sin(angle));
			back[i * n + j] = f * f * (double)x[i * ld + j];
		}
	}
	K->rope(m, heads, dim, y, ld, position, cs, 1);
	check_rows("rope", m, n, y, ld, want, 3e-7);
	/* the transpose of f times a rotation: together f^2 */
	K->rope(m, heads, dim, y, ld, position, cs, -1);
	check_rows("rope and back", m, n, y, ld, back, 3e-7);
	release();
}

static void rope_cases(void)
{
	rope_case(0, 2, 4);
	rope_case(1, 1, 2);
	rope_case(9, 3, 64);
	rope_case(5, 2, 22);
}

static void test_rope(void)
{
	check_tables(rope_cases);
}

/* Expected: transformers 5.24's functions run in double (numpy in torch's place). */
static void test_rope_table(void)
{
	static const struct {
		struct moe_rope_angles cfg;
		int dim, pair[8];
		double attention, frequency[8];
	} cases[] = {
		{ { .theta = 1e6,
		    .type = MOE_ANGLES_YARN,
		    .factor = 4,
		    .original_max_positions = 32768,
		    .truncate = true },
		  128,
		  { 0, 9, 18, 27, 36, 45, 54, 63 },
		  1.138629436111989,
		  { 1, 0.143301257023696, 0.0205352502645715, 0.00242342238040764,
		    0.000179841155873954, 1.51074097559533e-05, 2.16491080840016e-06,
		    3.1023444018793e-07 } },
		{ { .theta = 1e4,
		    .type = MOE_ANGLES_YARN,
		    .factor = 40,
		    .original_max_positions = 4096,
		    .beta_fast = 32,
		    .beta_slow = 1,
		    .mscale = 1,
		    .mscale_all_dim = 0.707,
		    .truncate = true },
		  64,
		  { 0, 4, 9, 13, 18, 22, 27, 31 },
		  1.0857263992561355,
		  { 1, 0.316227766016838, 0.0749894209332456, 0.0183781462188778,
		    0.0022493653007614, 0.000177827941003892, 1.05424125857146e-05,
		    3.33380358040831e-06 } },
		{ { .theta = 150000,
		    .type = MOE_ANGLES_YARN,
		    .factor = 32,
		    .original_max_positions = 4096,
		    .beta_fast = 32,
		    .beta_slow = 1 },
		  64,
		  { 0, 4, 9, 13, 18, 22, 27, 31 },
		  1.3465735902799727,
		  { 1, 0.225418000202871, 0.0317056961846638, 0.00386035931719207,
		    3.83088123737534e-05, 8.63549587543848e-06, 1.34129103505404e-06,
		    3.02351142811921e-07 } },
		{ { .theta = 1e4, .type = MOE_ANGLES_LINEAR, .factor = 8 },
		  64,
		  { 0, 4, 9, 13, 18, 22, 27, 31 },
		  1,
		  { 0.125, 0.0395284707521047, 0.0093736776166557, 0.00296421713207707,
		    0.000702926656487936, 0.000222284926254865, 5.27120629285728e-05,
		    1.66690179020415e-05 } },
		{ { .theta = 1e4 },
		  64,
		  { 0, 8, 16, 24, 0, 0, 0, 0 },
		  1,
		  { 1, 0.1, 0.01, 0.001, 1, 1, 1, 1 } },
	};

	for (size_t c = 0; c < MOE_COUNT(cases); c++) {
		const struct moe_rope_angles *cfg = &cases[c].cfg;
		int dim = cases[c].dim, p = 777;
		float *cs = mem((size_t)((p + 1) * dim) * sizeof *cs), *row = cs + p * dim;

		CU_ASSERT_DOUBLE_EQUAL(moe_rope_attention_factor(cfg), cases[c].attention, 1e-14);
		moe_rope_table(cfg, dim, p + 1, cs);
		for (int i = 0; i < 8; i++) {
			double f = cases[c].frequency[i], a = cases[c].attention;
			int pair = cases[c].pair[i];

			CU_ASSERT_DOUBLE_EQUAL(moe_rope_frequency(cfg, dim, pair) / f, 1, 1e-13);
			CU_ASSERT_DOUBLE_EQUAL((double)row[pair], a * cos(p * f), 1e-7);
			CU_ASSERT_DOUBLE_EQUAL((double)row[dim / 2 + pair], a * sin(p * f), 1e-7);
		}
		release();
	}
	struct moe_rope_angles given = { .type = MOE_ANGLES_YARN, .factor = 8, .attention_factor = 1.5 };

	CU_ASSERT_EQUAL(moe_rope_attention_factor(&given), 1.5);
	given.attention_factor = 0;
	given.factor = 0.5; /* no extension: no correction */
	CU_ASSERT_EQUAL(moe_rope_attention_factor(&given), 1.0);
}

const struct moe_test moe_suite_tests[] = {
	{ "rope and its transpose", test_rope },
	{ "rope tables: default, linear, yarn", test_rope_table },
	{ NULL, NULL },
};
