/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantised weights in every kernel table: what is packed decodes to what was stored, and each op
 * gives the bits that it gives with the dequantised weights packed plainly.
 */
#include "codelets/kernels/packed/ints.h"
#include "tests/expert_check.h"
#include "tests/format_check.h"

const char moe_suite_name[] = "coded";

/* ---- packing and decoding ---- */

static void same_floats(const char *what, const float *got, const float *want, int64_t n)
{
	int64_t bad = 0;

	for (int64_t i = 0; i < n; i++)
		bad += memcmp(got + i, want + i, sizeof *got) &&
		       !(got[i] != got[i] && want[i] != want[i]);
	if (bad)
		printf("\n  %s: %lld of %lld differ\n", what, (long long)bad, (long long)n);
	CU_ASSERT_EQUAL(bad, 0);
}

/* The window that a part, or one half of a fused tensor, would take. */
static void exact_window(const struct moe_quantised *q, struct moe_coded_window w, enum moe_layout layout)
{
	int kept = block_count;
	float *want = dequantised(q, &w), *got = floats(w.n * w.k);
	struct moe_weight W = coded_weight(q, &w, layout);

	moe_coded_rows(&W, 0, w.n, 0, w.k, got, w.k);
	same_floats(q->coding.format->name, got, want, w.n * w.k);
	if (w.n > 2 && w.k > 40) { /* a part of it */
		moe_coded_rows(&W, 1, w.n, 33, w.k, got, w.k - 33);
		for (int64_t i = 1; i < w.n; i++)
			same_floats("part", got + (i - 1) * (w.k - 33), want + i * w.k + 33,
				    w.k - 33);
	}
	release_to(kept);
}

static const enum moe_layout layouts[] = { MOE_LAYOUT_BLOCKS8, MOE_LAYOUT_BLOCKS32, MOE_LAYOUT_PAIRS16 };

static void windows(const struct moe_quantised *q)
{
	for (size_t l = 0; l < MOE_COUNT(layouts); l++) {
		exact_window(q, (struct moe_coded_window){ 0, q->n, 0, q->k, 1 }, layouts[l]);
		exact_window(q, (struct moe_coded_window){ 5, q->n - 9, 0, q->k, 1 }, layouts[l]);
		exact_window(q, (struct moe_coded_window){ 1, q->n / 2, 0, q->k, 2 }, layouts[l]);
		exact_window(q, (struct moe_coded_window){ 0, q->n, 75, q->k - 75, 1 }, layouts[l]);
		exact_window(q, (struct moe_coded_window){ 16, 17, 32, 1, 1 }, layouts[l]);
		exact_window(q, (struct moe_coded_window){ 0, q->n, 40, 0, 1 }, layouts[l]);
	}
}

static void test_exact(void)
{
	random_state = moe_test_seed() | 1;
	each_quantised(150, 200, windows);
	each_quantised(33, 256, windows);
	release();
}

/* All 256 (16) codes under every scale's dtype, NaN included. */
static void test_all_codes(void)
{
	random_state = moe_test_seed() | 1;
	for (int i = 0; moe_format_list[i]; i++) {
		struct moe_quantised q =
			random_quantised(moe_format_list[i], 20, 320, 64, 1, MOE_F32, false);

		for (int j = 0; j < 20 * 320; j++)
			((uint8_t *)q.codes.data)[j] =
				(uint8_t)(j & ((1 << moe_format_list[i]->bits) - 1));
		for (size_t l = 0; l < MOE_COUNT(layouts); l++)
			exact_window(&q, (struct moe_coded_window){ 0, 20, 0, 320, 1 }, layouts[l]);
	}
	release();
}

static bool same_bf16(const uint16_t *a, const uint16_t *b, int64_t n)
{
	for (int64_t i = 0; i < n; i++)
		if (a[i] != b[i] && !(isnan(moe_bf16_to_f32(a[i])) && isnan(moe_bf16_to_f32(b[i]))))
			return false;
	return true;
}

/* The table's decoder against the plain one, any run of columns. */
static void decode_panels(const struct moe_quantised *q)
{
	enum moe_layout layout = moe_coded_order(K);
	int64_t step = moe_layout_k(layout);

	for (int64_t cut = 0; cut < 3; cut++) {
		struct moe_coded_window w = { 3 * cut, q->n - 3 * cut, 16 * cut, q->k - 16 * cut, 1 };
		struct moe_weight W = coded_weight(q, &w, layout);
		int64_t kp = moe_round_up(w.k, MOE_PACK_K);
		uint16_t *want = mem((size_t)(16 * kp) * 2), *got = mem((size_t)(16 * kp) * 2);

		for (int64_t i = 0; i < moe_packed_panels(w.n); i++) {
			struct moe_coded_panel p = moe_coded_panel(&W, i);

			for (int64_t k0 = 0; k0 < kp; k0 += 7 * step)
				for (int64_t k = step; k <= kp - k0; k += 3 * step) {
					moe_coded_decode(&p, k0, k, want);
					memset(got, 0xaa, (size_t)(16 * kp) * 2);
					K->tiles->decode(&p, k0, k, got);
					CU_ASSERT_TRUE(same_bf16(got, want, 16 * k));
					CU_ASSERT_TRUE(k == kp || got[16 * k] == 0xaaaa);
				}
		}
	}
}

static void decode_cases(void)
{
	if (!K->tiles)
		return;
	each_quantised(40, 320, decode_panels);
	each_quantised(150, 200, decode_panels);
}

static void test_decode(void)
{
	check_tables(decode_cases);
}

/* NaN, zero and tiny results in each table's decoder. */
static void decode_special(void)
{
	struct moe_quantised q =
		random_quantised(moe_format_find("fp8"), 32, 256, 128, 1, MOE_F32, false);
	float *scale = q.scale.data;

	if (!K->tiles)
		return;
	for (int i = 0; i < 32 * 256; i++)
		((uint8_t *)q.codes.data)[i] = (uint8_t)i;
	for (int i = 0; i < 64; i++)
		scale[i] = i % 4 == 0 ? 0 : i % 4 == 1 ? 0x1p-130f : i % 4 == 2 ? 0x1p120f : -1.5f;
	decode_panels(&q);
	for (int i = 0; i < 64; i++)
		scale[i] = 0x1p-123f;
	decode_panels(&q);
	for (int i = 0; i < 64; i++)
		scale[i] = i % 2 ? -1.5f : .003f;
	decode_panels(&q);
}

static void test_special(void)
{
	check_tables(decode_special);
}

/* ---- dense layers ---- */

static struct moe_weight plain_weight(const float *src, int64_t n, int64_t k)
{
	struct moe_weight W = { .data = mem(K->weight_bytes(MOE_F32, n, k, MOE_USE_GEMM)) };

	K->weight_pack(&W, src, MOE_F32, n, k, k, MOE_USE_GEMM);
	return W;
}

static void linear_of(const struct moe_quantised *q, int m, int r)
{
	struct moe_coded_window w = { 0, q->n, 0, q->k, 1 };
	int64_t n = q->n, k = q->k;
	struct moe_weight coded = coded_weight(q, &w, moe_coded_order(K));
	struct moe_weight plain = plain_weight(dequantised(q, &w), n, k);
	float *x = randoms(m * k, 1), *dy = randoms(m * n, 1), *y[2], *dx[2];
	struct moe_lora lora = { .a = randoms(r * k, .1), .b = randoms(n * r, .1), .r = r, .scale = 1.5f };
	void *scratch = mem(K->linear_scratch(m, n, k, r));

	for (int i = 0; i < 2; i++) {
		const struct moe_weight *W = i ? &coded : &plain;

		y[i] = floats(m * n);
		dx[i] = floats(m * k);
		K->linear(m, W, 0, n, x, k, NULL, r ? &lora : NULL, y[i], n, scratch);
		K->linear_bwd(m, W, dy, n, r ? &lora : NULL, dx[i], k, false, scratch);
	}
	check_same("linear", y[0], y[1], (size_t)(m * n) * sizeof(float));
	check_same("linear_bwd", dx[0], dx[1], (size_t)(m * k) * sizeof(float));
}

static void linear_rows(const struct moe_quantised *q)
{
	static const int rows[] = { 1, 3, 5, 7, 16, 61 };

	for (size_t i = 0; i < MOE_COUNT(rows); i++) {
		int kept = block_count;

		linear_of(q, rows[i], i % 2 ? 5 : 0);
		release_to(kept);
	}
}

static void linear_cases(void)
{
	each_quantised(90, 160, linear_rows);
	each_quantised(300, 72, linear_rows);
}

/* FP8 in blocks of rows: panels of 16 rows that have one scale each, and some that are in two blocks. */
static void linear_blocks(void)
{
	static const int64_t rows[] = { 128, 40, 24 };

	for (size_t i = 0; i < MOE_COUNT(rows); i++)
		for (int m = 1; m <= 6; m++) {
			int kept = block_count;
			struct moe_quantised q =
				random_quantised(moe_format_find("fp8"), 264, 288, 128, rows[i], MOE_F32, false);

			linear_of(&q, m, m % 2 ? 5 : 0);
			linear_of(&q, m, m % 2 ? 0 : 20);
			release_to(kept);
		}
}

/*
 * MXFP4 with scales around the ends of the range in which exponents can be added. Of 0 and 1 some weights are
 * subnormal, which not all tables' plain products take as 0.
 */
static void linear_powers(void)
{
	static const uint8_t scales[] = { 0, 1, 2, 7, 8, 9, 120, 245, 246, 247 };
	static const int rows[] = { 5, 6, 17 };
	size_t first = K->tiles && K->tiles->fwd_coded ? 0 : 2;

	for (size_t i = first; i < MOE_COUNT(scales); i++)
		for (size_t j = 0; j < MOE_COUNT(rows); j++) {
			int kept = block_count;
			struct moe_quantised q =
				random_quantised(moe_format_find("mxfp4"), 48, 96, 32, 1, MOE_SCALE_UE8M0, false);
			uint8_t *scale = (uint8_t *)(uintptr_t)q.scale.data;

			for (int64_t s = 0; s < q.scale.shape[0] * q.scale.shape[1]; s++)
				scale[s] = s % 7 ? (uint8_t)(120 + s % 7) : scales[i];
			linear_of(&q, rows[j], j == 1 ? 5 : 0);
			release_to(kept);
		}
}

static void test_linear(void)
{
	check_tables(linear_cases);
	check_tables(linear_blocks);
	check_tables(linear_powers);
}

/* ---- integer products ---- */

static double relative_l2(const float *got, const double *want, int64_t n)
{
	double error = 0, size = 0;

	for (int64_t i = 0; i < n; i++) {
		error += (got[i] - want[i]) * (got[i] - want[i]);
		size += want[i] * want[i];
	}
	return sqrt(error / size);
}

/* x W^T in double, of exact weights */
static double *product(int m, int64_t n, int64_t k, const float *x, const float *w)
{
	double *y = mem((size_t)(m * n) * sizeof *y);

	memset(y, 0, (size_t)(m * n) * sizeof *y);
	for (int64_t i = 0; i < m; i++)
		for (int64_t j = 0; j < n; j++)
			for (int64_t c = 0; c < k; c++)
				y[i * n + j] += (double)x[i * k + c] * w[j * k + c];
	return y;
}

/* Errors of rounding x and LoRA to bf16, or x to 8 bits; of few values. Twice that of a single row, whose sums may cancel */
static const double int_error[] = { [MOE_COMPUTE_INT16] = 4e-3, [MOE_COMPUTE_INT8] = 9e-3 };

static void ints_of(const struct moe_quantised *q, enum moe_compute compute, int m, int r)
{
	struct moe_coded_window w = { 0, q->n, 0, q->k, 1 };
	int64_t n = q->n, k = q->k, kp = moe_round_up(k, MOE_PACK_K);
	struct moe_quantised copy = *q;
	struct moe_tiles plain = *K->tiles;
	struct moe_weight W;
	float *x = randoms(m * k, 1), *y = floats(m * n), *part[2] = { floats(m * 16), floats(m * 16) };
	float *exact = dequantised(q, &w), *a = randoms(r * k, .1), *b = randoms(n * r, .1);
	struct moe_lora lora = { .a = a, .b = b, .r = r, .scale = 1.5f };
	void *panel = mem((size_t)((m + m % 2) * kp) * (size_t)K->panel_bytes);
	const struct moe_int_rows *ints[2];

	copy.coding.compute = compute;
	W = coded_weight(&copy, &w, moe_coded_order(K));
	if (moe_coded_compute(K->tiles, &W, m) != compute)
		return;
	plain.int_block = moe_int_block_plain;
	K->tiles->pack_fwd(m, x, k, NULL, k, kp, panel, kp, 0);
	ints[0] = moe_int_operand(&plain, m, &W, panel, kp, mem(moe_int_bytes(&plain, W.coding.compute, m, k)));
	ints[1] = moe_int_operand(K->tiles, m, &W, panel, kp, mem(moe_int_bytes(&plain, W.coding.compute, m, k)));
	check_same("operand", ints[0]->q, ints[1]->q, (size_t)(m * ints[0]->planes * kp));
	for (int64_t i = 0; i < moe_packed_panels(n); i++) {
		struct moe_coded_panel p = moe_coded_panel(&W, i);

		moe_int_forward_plain(ints[0], &p, NULL, part[0], 16, MOE_OUT_STORE);
		K->tiles->fwd_ints(ints[1], &p, i ? (const char *)p.codes : NULL, part[1], 16,
				   MOE_OUT_STORE);
		check_same("panel", part[0], part[1], (size_t)m * 16 * sizeof(float));
	}
	K->linear(m, &W, 0, n, x, k, NULL, r ? &lora : NULL, y, n,
		  mem(K->linear_scratch(m, n, k, r)));
	for (int64_t i = 0; i < n; i++) /* LoRA is part of the weight */
		for (int64_t j = 0; j < k; j++)
			for (int c = 0; c < r; c++)
				exact[i * k + j] += 1.5f * b[i * r + c] * a[c * k + j];
	CU_ASSERT_TRUE(relative_l2(y, product(m, n, k, x, exact), m * n) <
		       int_error[compute] * (m == 1 ? 2 : 1));
}

static void ints_rows(const struct moe_quantised *q)
{
	static const int rows[] = { 1, 2, 5, 7, 12, 16, 31, 61 };

	for (size_t i = 0; i < MOE_COUNT(rows); i++)
		for (enum moe_compute c = MOE_COMPUTE_INT16; c <= MOE_COMPUTE_INT8; c++) {
			int kept = block_count;

			if (table_takes(i, 3))
				ints_of(q, c, rows[i], i % 2 ? 5 : 0);
			release_to(kept);
		}
}

static void ints_cases(void)
{
	if (!K->tiles)
		return;
	random_state = moe_test_seed() | 1;
	each_quantised(90, 160, ints_rows);
	each_quantised(40, 328, ints_rows);
}

static void test_ints(void)
{
	check_tables(ints_cases);
}

/* What is not finite in a row of x is not finite in its products, and in no other's. */
static void ints_special(void)
{
	static const float value[] = { NAN, INFINITY, -INFINITY, 0x1p-120f, 1e30f };
	struct moe_quantised q = random_quantised(moe_format_find("int8"), 32, 96, 96, 1, MOE_F32, false);
	struct moe_coded_window w = { 0, 32, 0, 96, 1 };
	struct moe_weight W;
	void *scratch;

	q.coding.compute = MOE_COMPUTE_INT8;
	W = coded_weight(&q, &w, moe_coded_order(K));
	scratch = mem(K->linear_scratch(3, 32, 96, 0));
	for (size_t i = 0; K->tiles && i < MOE_COUNT(value); i++) {
		float *x = randoms(3 * 96, 1), *y = floats(3 * 32);

		for (int k = 64; i == 3 && k < 96; k++)
			x[96 + k] = 0;
		x[96 + 70] = value[i];
		K->linear(3, &W, 0, 32, x, 96, NULL, NULL, y, 32, scratch);
		for (int j = 0; j < 32; j++) {
			CU_ASSERT_TRUE(isfinite(y[j]) && isfinite(y[64 + j]));
			CU_ASSERT_TRUE(i < 3 ? !isfinite(y[32 + j]) : isfinite(y[32 + j]));
		}
	}
	release();
}

static void test_ints_special(void)
{
	check_tables(ints_special);
}

/* ---- experts ---- */

/* Gives an expert quantised weights, and the block's data what they stand for. */
static struct moe_weight code_matrix(struct block_data *d, enum moe_block_array which,
				     const struct moe_format *f, int64_t group, bool zero)
{
	int64_t H = d->c.H, I = d->c.I, n = which == MOE_BLOCK_DOWN_PROJ ? H : I,
		k = n == H ? I : H;
	struct moe_quantised q;
	struct moe_coded_window w = { 0, which == MOE_BLOCK_DOWN_PROJ ? H : I, 0,
				which == MOE_BLOCK_DOWN_PROJ ? I : H, 1 };

	n = w.n, k = w.k;
	q = random_quantised(f, n, k, group ? group : k, f->bits == 8 && group == 128 ? 128 : 1,
			     f->scale, zero);
	memcpy(d->w[which], dequantised(&q, &w), (size_t)(n * k) * sizeof(float));
	return coded_weight(&q, &w, moe_coded_order(K));
}

static void expert_of(const struct moe_format *f, int H, int I, int T, int r, int64_t group)
{
	struct block_case c = { .E = 1, .k = 1, .H = H, .I = I, .T = T, .r = r, .seed = 5 };
	struct expert_run plain, coded;
	struct block_data d;
	struct moe_weight W[3];

	block_data_make(&d, &c);
	for (int i = 0; i < T; i++)
		d.ids[i] = 0;
	for (int i = 0; i < 3; i++)
		W[i] = code_matrix(&d, (enum moe_block_array)(MOE_BLOCK_GATE_PROJ + i), f, group,
				   f->bits == 4 && T % 2);
	expert_begin(&plain, &d);
	expert_begin(&coded, &d);
	coded.e.gate = W[0];
	coded.e.up = W[1];
	coded.e.down = W[2];
	for (int micro = 0; micro < 2; micro++) {
		expert_pass(&plain, micro == 0, 1000);
		expert_pass(&coded, micro == 0, 1);
		check_same("out", plain.out, coded.out, (size_t)(T * H) * 4);
		check_same("grad_x", plain.grad_x, coded.grad_x, (size_t)(T * H) * 4);
		check_same("grad_weights", plain.grad_weights, coded.grad_weights, (size_t)T * 4);
		for (int i = 0; i < BLOCK_WEIGHTS; i++)
			if (plain.grad[i])
				check_same(expert_names[i], plain.grad[i], coded.grad[i],
					   (size_t)d.n[i] * 4);
	}
	block_data_free(&d);
	release();
}

static void expert_cases(void)
{
	static const int rows[] = { 1, 2, 4, 6, 20, 50, 130 };

	for (int i = 0; moe_format_list[i]; i++)
		for (size_t j = 0; j < MOE_COUNT(rows); j++)
			if (table_takes(j, 2)) {
				expert_of(moe_format_list[i], 128, 320, rows[j], 4,
					  j % 2 ? 128 : 32);
				expert_of(moe_format_list[i], 72, 40, rows[j], j % 3 ? 3 : 0,
					  j % 2 ? 8 : 0);
			}
}

static void test_experts(void)
{
	check_tables(expert_cases);
}

const struct moe_test moe_suite_tests[] = {
	{ "what is packed is what was stored", test_exact },
	{ "every code, in all layouts", test_all_codes },
	{ "each table's decoder has the bits of the plain one", test_decode },
	{ "zero, tiny, huge, negative scales and NaN", test_special },
	{ "linear and linear_bwd: bits of the dequantised weights", test_linear },
	{ "integer products: bits of the plain ones, and errors", test_ints },
	{ "integer products of NaN, infinities, tiny and huge values", test_ints_special },
	{ "experts, forward and all gradients: bits of the dequantised weights", test_experts },
	{ NULL, NULL },
};
