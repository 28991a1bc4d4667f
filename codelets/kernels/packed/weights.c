/* SPDX-License-Identifier: Apache-2.0 */
/* Packing of weights and LoRA matrices into panels of 16 rows, and back. */
#include "codelets/kernels/packed/coded.h"
#include "codelets/kernels/packed/packed.h"
#include "codelets/kernels/packed/requantise.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define STRIP 256	    /* columns converted at a time; a multiple of MOE_PACK_K */
#define STREAM_LINE 64	    /* columns streamed at a time */
#define STREAM_AHEAD 128    /* columns between a read and its prefetch */
#define STREAM_BYTES 524288 /* smaller weights stay in the caches */

static int64_t lora_width(const struct moe_tiles *t, enum moe_lora_side side, int64_t k)
{
	return moe_round_up(k, side == MOE_LORA_A ? MOE_PACK_K : t->lora_pad);
}

/* `line` columns from k0 of each row into one or more blocks; both constants after inlining */
static inline void pack_line(const int block, const int line, const uint16_t *const *row, int rows,
			     int64_t k0, uint16_t *dst)
{
	for (int n = 0; n < rows; n++)
		for (int b = 0; b < line; b += block)
			memcpy(dst + b * MOE_PACK_N + n * block, row[n] + k0 + b,
			       (size_t)block * sizeof *dst);
}

/* The same of PAIRS16 */
static inline void pack_pairs(const int line, const uint16_t *const *row, int rows, int64_t k0,
			      uint16_t *dst)
{
	for (int n = 0; n < rows; n += 2)
		for (int b = 0; b < line; b += 8) {
			moe_run8 pair[2] = { { 0 } };

			memcpy(&pair[0], row[n] + k0 + b, sizeof *pair);
			if (n + 1 < rows)
				memcpy(&pair[1], row[n + 1] + k0 + b, sizeof *pair);
			moe_pair(pair, pair + 1);
			memcpy(dst + moe_panel_at(MOE_LAYOUT_PAIRS16, n, b), pair, sizeof pair);
		}
}

static inline void pack_columns(enum moe_layout layout, const int width, const uint16_t *const *row,
				int rows, int64_t k0, uint16_t *dst)
{
	if (layout == MOE_LAYOUT_PAIRS16)
		pack_pairs(width, row, rows, k0, dst);
	else if (layout == MOE_LAYOUT_BLOCKS32)
		pack_line(32, width, row, rows, k0, dst);
	else
		pack_line(8, width, row, rows, k0, dst);
}

/*
 * Rows of k columns into one panel's blocks; k a multiple of MOE_PACK_K or, for blocks of 8, of 16.
 * Reads whole cache lines of each row.
 */
static void pack_panel(enum moe_layout layout, const uint16_t *const *row, int rows, int64_t k,
		       uint16_t *dst)
{
	int64_t k0 = 0;

	if (rows < MOE_PACK_N)
		memset(dst, 0, (size_t)(MOE_PACK_N * k) * sizeof *dst);
	for (; k0 + 32 <= k; k0 += 32, dst += MOE_PACK_N * 32)
		pack_columns(layout, 32, row, rows, k0, dst);
	if (k0 < k)
		pack_columns(layout, 16, row, rows, k0, dst);
}

#ifdef __SSE2__
/* n elements, whole cache lines, past the caches */
static inline void stream_out(const uint16_t *line, int64_t n, uint16_t *dst)
{
	for (int64_t i = 0; i < n; i += 8)
		_mm_stream_si128((__m128i *)(void *)(dst + i),
				 _mm_load_si128((const __m128i *)(const void *)(line + i)));
}

/* `width` columns of 16 rows, past the caches */
static inline void stream_line(enum moe_layout layout, const int width, const uint16_t *const *row,
			       int64_t k0, uint16_t *dst)
{
	_Alignas(64) uint16_t line[MOE_PACK_N * STREAM_LINE];

	pack_columns(layout, width, row, MOE_PACK_N, k0, line);
	stream_out(line, MOE_PACK_N * width, dst);
}

/*
 * pack_panel for weights that will not be read soon: without reading the lines that are written,
 * memory moves a third less. What is read next, in the end of the next panel, has to be told.
 */
static void stream_panel(enum moe_layout layout, const uint16_t *const row[MOE_PACK_N], int64_t ld,
			 int64_t k, uint16_t *dst)
{
	int64_t k0 = 0;

	for (; k0 + STREAM_LINE <= k; k0 += STREAM_LINE, dst += MOE_PACK_N * STREAM_LINE) {
		int64_t ahead = k0 + STREAM_AHEAD;

		ahead += ahead < k ? 0 : MOE_PACK_N * ld - k;
		for (int n = 0; n < MOE_PACK_N; n++)
			for (int i = 0; i < STREAM_LINE; i += 32)
				__builtin_prefetch(row[n] + ahead + i);
		stream_line(layout, STREAM_LINE, row, k0, dst);
	}
	for (; k0 < k; k0 += 32, dst += MOE_PACK_N * 32)
		stream_line(layout, 32, row, k0, dst);
}

/* The same of rows that were converted. */
static void stream_strip(enum moe_layout layout, const uint16_t *const row[MOE_PACK_N], int64_t width,
			 uint16_t *dst)
{
	int64_t k0 = 0;

	for (; k0 + STREAM_LINE <= width; k0 += STREAM_LINE)
		stream_line(layout, STREAM_LINE, row, k0, dst + MOE_PACK_N * k0);
	for (; k0 + 32 <= width; k0 += 32)
		stream_line(layout, 32, row, k0, dst + MOE_PACK_N * k0);
	if (k0 < width) {
		const uint16_t *rest[MOE_PACK_N];

		for (int n = 0; n < MOE_PACK_N; n++)
			rest[n] = row[n] + k0;
		pack_panel(layout, rest, MOE_PACK_N, width - k0, dst + MOE_PACK_N * k0);
	}
}

static void stream_fence(void)
{
	_mm_sfence();
}
#else
static void stream_strip(enum moe_layout layout, const uint16_t *const row[MOE_PACK_N], int64_t width,
			 uint16_t *dst)
{
	pack_panel(layout, row, MOE_PACK_N, width, dst);
}

static void stream_panel(enum moe_layout layout, const uint16_t *const row[MOE_PACK_N], int64_t ld,
			 int64_t k, uint16_t *dst)
{
	(void)ld;
	pack_panel(layout, row, MOE_PACK_N, k, dst);
}

static void stream_out(const uint16_t *line, int64_t n, uint16_t *dst)
{
	memcpy(dst, line, (size_t)n * sizeof *dst);
}

static void stream_fence(void)
{
}
#endif

/* Columns k0..k0+width of `rows` rows as bf16, zero beyond k; one line per row of STRIP elements.
 */
static void convert_strip(moe_to_bf16 *to_bf16, const char *src, enum moe_dtype dtype, int rows,
			  int64_t k, int64_t ld, int64_t k0, int64_t width,
			  uint16_t strip[MOE_PACK_N][STRIP])
{
	size_t size = moe_dtype_size(dtype);
	int64_t inside = MOE_MIN(width, k - k0);
	float wide[STRIP];

	for (int n = 0; n < rows; n++) {
		const char *from = src + (size_t)(n * ld + k0) * size;

		if (dtype == MOE_BF16) {
			memcpy(strip[n], from, (size_t)inside * sizeof **strip);
		} else if (dtype == MOE_F32 && ((uintptr_t)from & 3) == 0) {
			/* the next strip, or the next panel's: rows lie pages apart */
			const char *next = from + (k0 + width < k ? (int64_t)STRIP : MOE_PACK_N * ld - k0) *
							  (int64_t)sizeof(float);

			for (int64_t i = 0; i < inside; i += 16)
				__builtin_prefetch(next + i * (int64_t)sizeof(float));
			to_bf16(1, inside, (const float *)(const void *)from, ld, strip[n], inside);
		} else {
			moe_to_f32(wide, from, dtype, (size_t)inside);
			moe_from_f32(strip[n], MOE_BF16, wide, (size_t)inside);
		}
		memset(strip[n] + inside, 0, (size_t)(width - inside) * sizeof **strip);
	}
}

/* One panel: rows first..first+16 of src (those below n), columns padded to kp. */
static void pack_rows(enum moe_layout layout, moe_to_bf16 *to_bf16, const char *src, enum moe_dtype dtype,
		      int64_t n, int64_t k, int64_t ld, int64_t first, int64_t kp, bool stream,
		      uint16_t *dst)
{
	uint16_t strip[MOE_PACK_N][STRIP];
	const uint16_t *row[MOE_PACK_N];
	int rows = (int)MOE_MIN(MOE_PACK_N, n - first);
	int64_t whole = 0; /* columns copied straight from the source */

	src += (size_t)(first * ld) * moe_dtype_size(dtype);
	if (dtype == MOE_BF16 && ((uintptr_t)src & 1) == 0) {
		whole = k / MOE_PACK_K * MOE_PACK_K;
		for (int i = 0; i < rows; i++)
			row[i] = (const uint16_t *)(const void *)src + i * ld;
		if (stream && rows == MOE_PACK_N)
			stream_panel(layout, row, ld, whole, dst);
		else
			pack_panel(layout, row, rows, whole, dst);
	}
	for (int i = 0; i < rows; i++)
		row[i] = strip[i];
	for (int64_t k0 = whole; k0 < kp; k0 += STRIP) {
		int64_t width = MOE_MIN(STRIP, kp - k0);

		convert_strip(to_bf16, src, dtype, rows, k, ld, k0, width, strip);
		if (stream && rows == MOE_PACK_N)
			stream_strip(layout, row, width, dst + MOE_PACK_N * k0);
		else
			pack_panel(layout, row, rows, width, dst + MOE_PACK_N * k0);
	}
}

size_t moe_packed_weight_bytes(const struct moe_tiles *t, enum moe_dtype src, int64_t n, int64_t k,
			       enum moe_weight_use use)
{
	(void)t;
	if (use == MOE_USE_EXACT)
		return ref_weight_bytes(src, n, k, use);
	return moe_packed_bytes(n, moe_round_up(k, MOE_PACK_K));
}

void moe_packed_weight_pack(const struct moe_tiles *t, moe_to_bf16 *to_bf16, struct moe_weight *W,
			    const void *src, enum moe_dtype dtype, int64_t n, int64_t k, int64_t ld,
			    enum moe_weight_use use)
{
	int64_t kp = moe_round_up(k, MOE_PACK_K);
	bool stream = moe_packed_bytes(n, kp) >= STREAM_BYTES;
	uint16_t *dst = W->data;

	if (use == MOE_USE_EXACT) {
		ref_weight_pack(W, src, dtype, n, k, ld, use);
		return;
	}
	W->layout = t->layout;
	W->dtype = MOE_BF16;
	W->n = n;
	W->k = k;
	if (!src)
		return;
	for (int64_t first = 0; first < n; first += MOE_PACK_N) {
		pack_rows(t->layout, to_bf16, src, dtype, n, k, ld, first, kp, stream, dst);
		dst += moe_packed_stride(kp);
	}
	if (stream)
		stream_fence();
}

/* A panel of f32 rows that are in the cache; what is written is not read soon. */
static void stream_rows(enum moe_layout layout, moe_pack_rows *pack, const float *src, int64_t k, int64_t kp,
			uint16_t *dst)
{
	_Alignas(64) uint16_t line[MOE_PACK_N * STREAM_LINE];

	for (int64_t k0 = 0; k0 < kp; k0 += STREAM_LINE) {
		int64_t width = MOE_MIN(STREAM_LINE, kp - k0);

		pack(layout, MOE_PACK_N, MOE_MIN(k - k0, width), width, src + k0, k, 1, line);
		stream_out(line, MOE_PACK_N * width, dst + MOE_PACK_N * k0);
	}
}

void moe_packed_weight_repack(const struct moe_tiles *t, moe_pack_rows *pack,
			      const struct moe_weight *W, const float *src, int64_t n0, int64_t n1)
{
	int64_t k = W->k, kp = moe_round_up(k, MOE_PACK_K), stride = moe_packed_stride(kp);
	bool stream = moe_packed_bytes(W->n, kp) >= STREAM_BYTES && kp % 32 == 0;

	MOE_ASSERT(n0 % MOE_PACK_N == 0 && W->layout == t->layout);
	for (int64_t n = n0; n < n1; n += MOE_PACK_N, src += MOE_PACK_N * k) {
		int rows = (int)MOE_MIN(MOE_PACK_N, n1 - n);
		uint16_t *dst = (uint16_t *)W->data + n / MOE_PACK_N * stride;

		if (stream && rows == MOE_PACK_N && t->stream_panel && k == kp)
			t->stream_panel(src, k, dst);
		else if (stream && rows == MOE_PACK_N)
			stream_rows(t->layout, pack, src, k, kp, dst);
		else
			pack(t->layout, rows, k, kp, src, k, 1, dst);
	}
	if (stream)
		stream_fence();
}

void moe_packed_weight_unpack(const struct moe_tiles *t, const struct moe_weight *W, int64_t n0,
			      int64_t n1, float *dst)
{
	if (moe_is_coded(W)) {
		moe_coded_rows(W, n0, n1, 0, W->k, dst, W->k);
		return;
	}
	(void)t;
	moe_plain_values(W, n0, n1 - n0, 0, W->k, dst, W->k);
}

size_t moe_packed_lora_bytes(const struct moe_tiles *t, enum moe_lora_side side, int64_t n,
			     int64_t k)
{
	return moe_packed_bytes(n, lora_width(t, side, k));
}

void moe_packed_lora_pack(const struct moe_tiles *t, moe_pack_rows *pack, enum moe_lora_side side,
			  const float *src, int64_t n, int64_t k, int64_t n0, int64_t n1,
			  float scale, void *dst)
{
	int64_t kp = lora_width(t, side, k), end = MOE_MIN(n1, n);

	MOE_ASSERT(n0 % MOE_PACK_N == 0);
	for (int64_t first = n0; first < end; first += MOE_PACK_N)
		pack(t->layout, (int)MOE_MIN(MOE_PACK_N, n - first), k, kp, src + first * k, k,
		     scale, (uint16_t *)dst + first / MOE_PACK_N * moe_packed_stride(kp));
}
