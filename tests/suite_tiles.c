/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Panels and GEMMs of every table of tiles against plain loops in double. Weights are packed here,
 * from the description in packed/tiles.h.
 */
#include "tests/tile_check.h"

const char moe_suite_name[] = "tiles";

#define NAN_WITH_LOW_BITS 0x7f800001u /* cutting off 16 bits would make it infinite */

static float float_of(uint32_t bits)
{
	float f;

	memcpy(&f, &bits, sizeof f);
	return f;
}

/* ---- panels ---- */

enum source { FROM_F32, FROM_BF16, FROM_F32_BACKWARD };

static void pack_columns(enum source from, int m, const void *src, int64_t ld, const int32_t *token,
			 int64_t begin, int64_t k, int64_t kp, void *panel, int64_t width)
{
	if (from == FROM_BF16)
		T->pack_fwd_bf16(m, (const uint16_t *)src + begin, ld, token, k, kp, panel, width,
				 begin);
	else if (from == FROM_F32)
		T->pack_fwd(m, (const float *)src + begin, ld, token, k, kp, panel, width, begin);
	else
		T->pack_bwd(m, (const float *)src + begin, ld, token, k, kp, panel, width, begin);
}

/* Special values in the first columns of every row. */
static void plant(float *x, int64_t rows, int64_t ld, int64_t k)
{
	const float special[] = { INFINITY,  -INFINITY,	    float_of(NAN_WITH_LOW_BITS),
				  -0.0f,     3.4028235e38f, 0x1.01p0f,
				  0x1.03p0f, 0x1.010001p0f, 1e-39f };

	for (int64_t i = 0; i < rows; i++)
		for (int64_t j = 0; j < MOE_MIN(k, (int64_t)MOE_COUNT(special)); j++)
			x[i * ld + j] = special[(i + j) % (int64_t)MOE_COUNT(special)];
}

/* Rounded to nearest even; NaN is any NaN; a subnormal may be zero. */
static bool stored_as(float got, float value, int bytes)
{
	float want = (float)operand(value, bytes);

	if (isnan(value))
		return isnan(got);
	return got == want || (fabsf(want) < 0x1p-126f && got == 0);
}

static void panel_case(enum source from, int m, int64_t k, int64_t width)
{
	int rows = m + 3;
	int64_t ld = k + 1, kp = moe_round_up(k, unit());
	size_t bytes = (size_t)(m * width) * (size_t)T->panel_bytes;
	char *raw = mem((size_t)(rows * ld) * sizeof(float) + 2);
	float *x = randoms(rows * ld, 1.0), *out = mem((size_t)(m * width) * sizeof *out);
	int32_t *token = m % 2 ? random_tokens(m, rows) : NULL;
	void *panel = mem(bytes), *again = mem(bytes);
	int wrong = 0;

	plant(x, rows, ld, k);
	if (from == FROM_BF16) { /* aligned to 2 bytes only */
		for (int64_t i = 0; i < rows * ld; i++) {
			uint16_t half = moe_f32_to_bf16(x[i]);

			memcpy(raw + 2 + 2 * i, &half, sizeof half);
			x[i] = moe_bf16_to_f32(half);
		}
		pack_columns(from, m, raw + 2, ld, token, 0, k, kp, panel, width);
		pack_columns(from, m, raw + 2, ld, token, 0, unit(), unit(), again, width);
		pack_columns(from, m, raw + 2, ld, token, unit(), k - unit(), kp - unit(), again,
			     width);
	} else {
		pack_columns(from, m, x, ld, token, 0, k, kp, panel, width);
		pack_columns(from, m, x, ld, token, 0, unit(), unit(), again, width);
		pack_columns(from, m, x, ld, token, unit(), k - unit(), kp - unit(), again, width);
	}
	check_same("panel in two parts", panel, again, bytes);
	(from == FROM_F32_BACKWARD ? T->unpack_bwd : T->unpack_fwd)(m, panel, width, 0, kp, out,
								    width);
	for (int i = 0; i < m; i++)
		for (int64_t j = 0; j < kp; j++) {
			float v = j < k ? x[(token ? token[i] : i) * ld + j] : 0;

			wrong += !stored_as(out[i * width + j], v, T->panel_bytes);
		}
	CU_ASSERT_EQUAL(wrong, 0);
	release();
}

static void panel_cases(void)
{
	for (int i = 0; i < m_count(); i++)
		for (int from = FROM_F32; from <= FROM_F32_BACKWARD; from++) {
			int64_t k = unit() + 1 + (i * 7 + from) % 60;

			panel_case((enum source)from, m_at(i), k,
				   moe_round_up(k, MOE_PACK_K) + (i % 2) * MOE_PACK_K);
		}
}

static void test_panels(void)
{
	each_tiles(panel_cases);
}

/* ---- forward ---- */

/* Operands of one segment: x [m, width] of which columns col.. meet w's columns w_col.. */
struct operands {
	struct packed w;
	float *x;
	void *panel;
	int64_t width;
	int col, w_col, k;
};

static struct operands random_operands(int m, int64_t n, int k, int col, bool forward)
{
	struct operands o = { .col = col, .k = k, .w_col = forward ? unit() : 0 };

	o.width = moe_round_up(col + k + 32, MOE_PACK_K);
	o.w = forward ? random_packed(n, moe_round_up(k + o.w_col, MOE_PACK_K))
		      : random_packed(k, n);
	o.x = randoms(m * o.width, 1.0);
	o.panel = mem((size_t)(m * o.width) * (size_t)T->panel_bytes);
	(forward ? T->pack_fwd : T->pack_bwd)(m, o.x, o.width, NULL, o.width, o.width, o.panel,
					      o.width, 0);
	return o;
}

static void add_forward(int m, const struct operands *o, double *want)
{
	for (int i = 0; i < m; i++)
		for (int n = 0; n < MOE_PACK_N; n++)
			for (int k = 0; k < o->k; k++)
				want[i * MOE_PACK_N + n] +=
					operand(o->x[i * o->width + o->col + k], T->panel_bytes) *
					o->w.w[n * o->w.k + o->w_col + k];
}

/* How y lies in memory: rows that can be streamed, and others. */
static const struct {
	int offset, gap;
} places[] = { { 0, 0 }, { 0, 16 }, { 1, 3 }, { 4, 0 }, { 0, 5 } };

struct output {
	float *base, *y, *before;
	int64_t ld, count;
};

static struct output random_output(int m, int64_t n, int place)
{
	struct output o = { .ld = n + places[place].gap };

	o.count = m * o.ld + places[place].offset;
	o.base = randoms(o.count, 1.0);
	o.before = copy(o.base, o.count);
	o.y = o.base + places[place].offset;
	return o;
}

/* y as wanted (with ADD: on top of what was there), and nothing else touched */
static void check_output(const char *what, int m, int64_t n, const struct output *o,
			 const double *sum, enum moe_out out)
{
	double *want = doubles(m * n);
	const float *before = o->before + (o->y - o->base);
	int touched = 0;

	for (int64_t i = 0; i < m * n; i++)
		want[i] = sum[i] + (out == MOE_OUT_ADD ? (double)before[i / n * o->ld + i % n] : 0);
	check_rows(what, m, n, o->y, o->ld, want, gemm_tolerance);
	for (int64_t i = 0; i < o->count; i++) {
		int64_t at = i - (o->y - o->base);

		if (at < 0 || at % o->ld >= n)
			touched += memcmp(o->base + i, o->before + i, sizeof(float)) != 0;
	}
	CU_ASSERT_EQUAL(touched, 0);
}

static const int forward_k[][MOE_MAX_SEGS] = { { 64 },	    { 32, 32 },
					       { 256, 64 }, { 1056, 32, 64, 32 },
					       { 2080 },    { 32, 0, 96 } };

static void forward_case(int m, int shape, int place, enum moe_out out)
{
	struct operands o[MOE_MAX_SEGS];
	struct moe_fwd_seg seg[MOE_MAX_SEGS];
	struct output y = random_output(m, MOE_PACK_N, place);
	double *want = doubles(m * MOE_PACK_N);
	int nseg = 0;

	for (; nseg < MOE_MAX_SEGS && (!nseg || forward_k[shape][nseg] || nseg == 1); nseg++) {
		o[nseg] =
			random_operands(m, MOE_PACK_N, forward_k[shape][nseg], nseg * unit(), true);
		seg[nseg] =
			(struct moe_fwd_seg){ o[nseg].panel, o[nseg].width, o[nseg].col, o[nseg].k,
					      o[nseg].w.data + MOE_PACK_N * o[nseg].w_col };
		add_forward(m, &o[nseg], want);
	}
	T->fwd(m, seg, nseg, m % 3 ? o[0].w.data : NULL, y.y, y.ld, out);
	T->fence();
	check_output("fwd", m, MOE_PACK_N, &y, want, out);
	release();
}

static void forward_cases(void)
{
	for (int i = 0; i < m_count(); i++)
		for (int shape = 0; shape < (int)MOE_COUNT(forward_k); shape++)
			forward_case(m_at(i), shape, (i + shape) % (int)MOE_COUNT(places),
				     (enum moe_out)((i + shape) % 3));
}

static void test_forward(void)
{
	each_tiles(forward_cases);
}

/* ---- backward ---- */

static void call_bwd(int m, const struct moe_bwd_seg *seg, int nseg, int begin, int columns,
		     float *y, int64_t ldy, enum moe_out out)
{
	int kept = block_count;
	struct moe_bwd_seg at[MOE_MAX_SEGS];
	int64_t n = 0;
	void *scratch;

	for (int s = 0; s < nseg; s++) {
		at[s] = seg[s];
		at[s].w += MOE_PACK_N * begin;
		n += seg[s].n;
	}
	scratch = mem(T->bwd_scratch(m, n, columns));
	T->bwd(m, at, nseg, columns, y + begin, ldy, out, scratch);
	release_to(kept);
}

static const int backward_n[][MOE_MAX_SEGS] = {
	{ 48 }, { 16, 16 }, { 256, 240, 16, 16 }, { 16, 0, 96 }
};
static const int long_n[][MOE_MAX_SEGS] = {
	{ 2208 }, { 2048, 2048, 32, 16 }, { 7168, 16 }, { 1152, 1152 }
};

/* Columns 0..columns of W in one call, and in calls of `part`: the same bits */
static void backward_case(int m, const int n[MOE_MAX_SEGS], int columns, int part, int place,
			  enum moe_out out)
{
	struct operands o[MOE_MAX_SEGS];
	struct moe_bwd_seg seg[MOE_MAX_SEGS];
	int64_t k = columns + (columns % 64 ? unit() : 0); /* parts of panels, and whole ones */
	struct output y = random_output(m, columns, place);
	float *parts = copy(y.base, y.count);
	double *want = doubles(m * columns);
	int nseg = 0;

	for (; nseg < MOE_MAX_SEGS && (!nseg || n[nseg] || nseg == 1); nseg++) {
		struct operands *q = &o[nseg];

		*q = random_operands(m, moe_round_up(k, MOE_PACK_K), n[nseg], 16 * nseg, false);
		seg[nseg] = (struct moe_bwd_seg){ q->panel, q->width,  q->col,
						  q->k,	    q->w.data, q->w.stride,
						  m % 2 ? q->w.data : NULL, NULL };
		for (int i = 0; i < m; i++)
			for (int r = 0; r < q->k; r++) {
				double g = operand(q->x[i * q->width + q->col + r], T->panel_bytes);

				for (int c = 0; c < columns; c++)
					want[i * columns + c] += g * q->w.w[r * q->w.k + c];
			}
	}
	call_bwd(m, seg, nseg, 0, columns, y.y, y.ld, out);
	T->fence();
	check_output("bwd", m, columns, &y, want, out);
	for (int c = 0; c < columns; c += part)
		call_bwd(m, seg, nseg, c, MOE_MIN(part, columns - c), parts + (y.y - y.base), y.ld,
			 out);
	T->fence();
	check_same("bwd in parts", y.base, parts, (size_t)y.count * sizeof *parts);
	release();
}

/* Calls in steps of lora_pad columns, which all tables take. */
static void backward_cases(void)
{
	int step = T->lora_pad;

	for (int i = 0; i < m_count(); i++) {
		int place = i % (int)MOE_COUNT(places);

		for (int s = 0; s < (int)MOE_COUNT(backward_n); s++)
			backward_case(m_at(i), backward_n[s], 32 + (i + s) % 4 * step,
				      (i + s) % 3 ? step : 32, place, (enum moe_out)((i + s) % 3));
		if (i % 7 == 0 || m_at(i) < 8)
			backward_case(m_at(i), long_n[i % 4], 64, step, place,
				      (enum moe_out)(i % 3));
	}
	for (int m = 1; m <= 8; m++) {
		int wanted = T->bwd_columns(m);

		CU_ASSERT(MOE_CHUNK % wanted == 0 ||
			  (m <= MOE_LONG_ROWS && wanted == MOE_ALL_COLUMNS));
		backward_case(m, backward_n[2], MOE_CHUNK, 32, 0, MOE_OUT_STREAM);
	}
}

static void test_backward(void)
{
	each_tiles(backward_cases);
}

/* ---- values that are not numbers ---- */

/* One special element of x reaches row 0 of y and no other; tiny ones stay tiny. */
static void special_case(int m, float value, bool forward)
{
	struct operands o = random_operands(m, 32, 64, 0, forward);
	float *y = mem((size_t)(m * 32) * sizeof *y);
	int64_t rows = forward ? MOE_PACK_N : 32;
	int wrong = 0;

	for (int64_t i = 0; i < o.width; i++)
		o.x[i] = 0;
	o.x[5] = value;
	(forward ? T->pack_fwd : T->pack_bwd)(m, o.x, o.width, NULL, o.width, o.width, o.panel,
					      o.width, 0);
	if (forward) {
		struct moe_fwd_seg seg = { o.panel, o.width, 0, 64,
					   o.w.data + MOE_PACK_N * o.w_col };

		T->fwd(m, &seg, 1, NULL, y, rows, MOE_OUT_STORE);
	} else {
		struct moe_bwd_seg seg = { o.panel, o.width, 0, 64, o.w.data, o.w.stride, NULL, NULL };

		call_bwd(m, &seg, 1, 0, 32, y, rows, MOE_OUT_STORE);
	}
	for (int64_t i = 0; i < m * rows; i++)
		if (i >= rows)
			wrong += !isfinite(y[i]);
		else if (isnan(value))
			wrong += !isnan(y[i]);
		else if (isinf(value))
			wrong += isfinite(y[i]);
		else
			wrong += !(fabsf(y[i]) <= fabsf(value));
	CU_ASSERT_EQUAL(wrong, 0);
	release();
}

static void special_cases(void)
{
	static const int rows[] = { 1, 2, 5, 6, 13, 49, 64 };

	for (size_t i = 0; i < MOE_COUNT(rows); i++)
		for (int forward = 0; forward < 2; forward++) {
			special_case(rows[i], float_of(NAN_WITH_LOW_BITS), forward);
			special_case(rows[i], -INFINITY, forward);
			special_case(rows[i], 1e-40f, forward);
		}
}

static void test_special(void)
{
	each_tiles(special_cases);
}

static void peak_cases(void)
{
	if (T->peak)
		CU_ASSERT(T->peak(10) > 0);
}

static void test_peak(void)
{
	each_tiles(peak_cases);
}

const struct moe_test moe_suite_tests[] = {
	{ "panels: round trip, columns apart, tails", test_panels },
	{ "forward: all row counts, segments, outputs", test_forward },
	{ "backward: the same bits whatever columns a call takes", test_backward },
	{ "NaN, infinity and subnormals", test_special },
	{ "peak counts its flops", test_peak },
	{ NULL, NULL },
};
