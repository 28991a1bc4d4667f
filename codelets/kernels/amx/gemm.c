/* SPDX-License-Identifier: Apache-2.0 */
/* Forward and backward; amx.h says what lies where. No speed was ever measured: there was no CPU.
 */
#include "codelets/kernels/amx/amx.h"
#include "codelets/kernels/amx/tile.h"

#define INLINE static inline __attribute__((always_inline))
#define TILE_BYTES (AMX_ROWS * AMX_ROW_BYTES)

/* Row tiles that share a walk over the weights: their sums are tiles 0..3. */
#define FWD_TILES 4

/* A run of columns of a forward panel, in bytes: bf16 and s8 differ in nothing else. */
struct run {
	const char *x, *w;
	int64_t width, at, bytes; /* of a row of the panel; first byte; multiple of 64 */
};

/*
 * Sums of `count` row tiles, beginning at row `row`, over one run. The last tile is number 0 and
 * its rows are operand 7, which have shapes of their own; the others alternate in 5 and 6.
 */
INLINE void fwd_run(const int count, const bool s8, const struct run *r, int row, int last,
		    const char *next)
{
	const int64_t full = AMX_ROWS * r->width;
	const char *x = r->x + row * r->width + r->at * AMX_ROWS;
	const char *x0 = r->x + (row + (count - 1) * AMX_ROWS) * r->width + r->at * last;

	for (int64_t k = 0; k < r->bytes; k += AMX_ROW_BYTES) {
		const char *xk = x + k * AMX_ROWS;

		amx_load(4, r->w + k * AMX_ROWS, AMX_ROW_BYTES);
		if (next)
			for (int line = 0; line < AMX_ROWS; line++)
				__builtin_prefetch(next + (k + line * 4) * AMX_ROWS, 0, 2);
#define STEP(c, b, from, stride)                                                                   \
	do {                                                                                       \
		amx_load(b, from, stride);                                                         \
		if (s8)                                                                            \
			amx_dp_s8(c, 4, b);                                                        \
		else                                                                               \
			amx_dp_bf16(c, 4, b);                                                      \
	} while (0)
		if (count > 1)
			STEP(1, 5, xk, AMX_ROW_BYTES);
		if (count > 2)
			STEP(2, 6, xk + full, AMX_ROW_BYTES);
		if (count > 3)
			STEP(3, 5, xk + 2 * full, AMX_ROW_BYTES);
		STEP(0, 7, x0 + k * last, last * 4);
#undef STEP
	}
}

/* y[rows, 16] from the transposed sums */
static void put_f32(int rows, uint32_t sum[16][16], float *y, int64_t ldy, enum moe_out out)
{
	OWN(transpose)(sum);
	for (int i = 0; i < rows; i++, y += ldy) {
		float value[16];

		memcpy(value, sum[i], sizeof value);
		if (out == MOE_OUT_ADD)
			for (int j = 0; j < 16; j++)
				value[j] += y[j];
#ifdef __AVX512F__
		if (out == MOE_OUT_STREAM && (uintptr_t)y % 64 == 0) {
			_mm512_stream_ps(y, _mm512_loadu_ps(value));
			continue;
		}
#endif
		memcpy(y, value, sizeof value);
	}
}

static void put_s32(int rows, uint32_t sum[16][16], int32_t *y, int64_t ldy)
{
	OWN(transpose)(sum);
	for (int i = 0; i < rows; i++)
		memcpy(y + i * ldy, sum[i], sizeof sum[i]);
}

/* Clears the sums of a group of row tiles, runs, and stores them in the order of their rows. */
INLINE void fwd_group(const int count, const bool s8, const struct run *run, int runs, int row,
		      int last, const char *next, uint32_t sum[FWD_TILES][16][16])
{
	amx_zero(0);
	if (count > 1)
		amx_zero(1);
	if (count > 2)
		amx_zero(2);
	if (count > 3)
		amx_zero(3);
	for (int i = 0; i < runs; i++)
		fwd_run(count, s8, run + i, row, last, i ? NULL : next);
	amx_store(0, sum[count - 1], AMX_ROW_BYTES);
	if (count > 1)
		amx_store(1, sum[0], AMX_ROW_BYTES);
	if (count > 2)
		amx_store(2, sum[1], AMX_ROW_BYTES);
	if (count > 3)
		amx_store(3, sum[2], AMX_ROW_BYTES);
}

/* Rows row..row+rows, at most 64; leaves y^T by tiles in sum. */
INLINE void fwd_rows(const bool s8, const struct run *run, int runs, int row, int rows,
		     const char *next, uint32_t sum[FWD_TILES][16][16])
{
	int count = (rows + AMX_ROWS - 1) / AMX_ROWS, last = rows - (count - 1) * AMX_ROWS;
	struct amx_config config = { .palette = 1 };

	amx_shape(&config, 0, AMX_ROWS, last * 4);
	amx_shape(&config, 7, AMX_ROWS, last * 4);
	for (int i = 1; i < 7; i++)
		amx_shape(&config, i, AMX_ROWS, AMX_ROW_BYTES);
	amx_load_config(&config);
	switch (count) {
	case 1:
		fwd_group(1, s8, run, runs, row, last, NULL, sum);
		break;
	case 2:
		fwd_group(2, s8, run, runs, row, last, next, sum);
		break;
	case 3:
		fwd_group(3, s8, run, runs, row, last, next, sum);
		break;
	default:
		fwd_group(4, s8, run, runs, row, last, next, sum);
		break;
	}
	amx_release();
}

void OWN(tile_fwd)(int m, const struct moe_fwd_seg *seg, int nseg, const uint16_t *next, float *y,
		   int64_t ldy, enum moe_out out)
{
	uint32_t sum[FWD_TILES][16][16] __attribute__((aligned(64)));
	struct run run[MOE_MAX_SEGS];

	MOE_ASSERT(nseg <= MOE_MAX_SEGS);
	for (int i = 0; i < nseg; i++) {
		MOE_ASSERT(seg[i].k % 32 == 0);
		run[i] = (struct run){ seg[i].x, (const char *)seg[i].w, seg[i].width * 2,
				       seg[i].col * 2, seg[i].k * 2 };
	}
	for (int row = 0; row < m; row += FWD_TILES * AMX_ROWS) {
		int rows = MOE_MIN(FWD_TILES * AMX_ROWS, m - row);

		/* the next weights arrive while the first rows are computed */
		fwd_rows(false, run, nseg, row, rows, row ? NULL : (const char *)next, sum);
		for (int i = 0; i < rows; i += AMX_ROWS)
			put_f32(MOE_MIN(AMX_ROWS, rows - i), sum[i / AMX_ROWS], y + (row + i) * ldy,
				ldy, out);
	}
}

void OWN(tile_fwd_s8)(int m, int64_t k, const int8_t *panel, const int8_t *w, int32_t *y,
		      int64_t ldy)
{
	uint32_t sum[FWD_TILES][16][16] __attribute__((aligned(64)));
	struct run run = { (const char *)panel, (const char *)w, k, 0, k };

	MOE_ASSERT(k % 64 == 0);
	for (int row = 0; row < m; row += FWD_TILES * AMX_ROWS) {
		int rows = MOE_MIN(FWD_TILES * AMX_ROWS, m - row);

		fwd_rows(true, &run, 1, row, rows, NULL, sum);
		for (int i = 0; i < rows; i += AMX_ROWS)
			put_s32(MOE_MIN(AMX_ROWS, rows - i), sum[i / AMX_ROWS], y + (row + i) * ldy,
				ldy);
	}
}

/* ---- backward ---- */

#define SLICE 32 /* columns: two tiles */

/* 32 rows of a weight (or 16, then zeros) by 32 columns: two right operands [n/2][16 k][2]. */
typedef uint16_t slice_step[2][16][32];

/* One step of 32 rows of a segment, or of 16 where a panel of 32 columns of g would be crossed. */
INLINE int bwd_step(const struct moe_bwd_seg *s, int n)
{
	return MOE_MIN(32 - (s->col + n) % 32, s->n - n);
}

static void interleave(const uint16_t *restrict w, uint16_t (*restrict lo)[32],
		       uint16_t (*restrict hi)[32])
{
	for (int p = 0; p < 8; p++, w += 64)
		for (int j = 0; j < 16; j++) {
			lo[p][2 * j] = w[j];
			lo[p][2 * j + 1] = w[32 + j];
			hi[p][2 * j] = w[16 + j];
			hi[p][2 * j + 1] = w[48 + j];
		}
}

/* Columns c..c+32 of all segments. */
static void bwd_slice(const struct moe_bwd_seg *seg, int nseg, int c, slice_step *to)
{
	int steps = 0;

	for (int s = 0; s < nseg; s++)
		for (int n = 0, rows; n < seg[s].n; n += rows, steps++) {
			const uint16_t *w = seg[s].w + n / 16 * seg[s].stride + (int64_t)c * 16;

			rows = bwd_step(&seg[s], n);
			interleave(w, to[steps][0], to[steps][1]);
			if (rows == 32) {
				interleave(w + seg[s].stride, to[steps][0] + 8, to[steps][1] + 8);
			} else {
				memset(to[steps][0] + 8, 0, sizeof to[steps][0] / 2);
				memset(to[steps][1] + 8, 0, sizeof to[steps][1] / 2);
			}
		}
}

size_t OWN(bwd_scratch)(int m, int64_t n, int columns)
{
	(void)m;
	(void)columns;
	/* each segment may begin and end with a half step */
	return (size_t)((n + 31) / 32 + 2 * MOE_MAX_SEGS) * sizeof(slice_step);
}

/* Left operand: columns n..n+count of g. Half of one is copied, zeros behind it: the other half of
 * its block need not be the segment's, nor exist. */
INLINE const uint16_t *bwd_left(const struct moe_bwd_seg *s, int row, int rows, int n, int count,
				uint16_t (*half)[32])
{
	const uint16_t *g = (const uint16_t *)s->g + amx_bwd_at(row, rows, s->width, s->col + n);
	int64_t ld = amx_bwd_ld(s->width, s->col + n);

	if (count == 32)
		return g;
	memset(half, 0, AMX_ROWS * sizeof *half);
	for (int i = 0; i < rows; i++)
		memcpy(half[i], g + i * ld, 16 * sizeof *g);
	return &half[0][0];
}

/* One or two row tiles by one or two tiles of columns; y holds the first sums if add. */
INLINE void bwd_group(const bool rows2, const bool cols2, const struct moe_bwd_seg *seg, int nseg,
		      int row, int last, const slice_step *w, float *y, int64_t ldy, bool add)
{
	uint16_t half[2][AMX_ROWS][32] __attribute__((aligned(64)));
	const int64_t stride = ldy * 4;
	float *y2 = y + AMX_ROWS * ldy;
	int first = rows2 ? AMX_ROWS : last;

#define BEGIN(tile, at)                                                                            \
	do {                                                                                       \
		if (add)                                                                           \
			amx_load(tile, at, stride);                                                \
		else                                                                               \
			amx_zero(tile);                                                            \
	} while (0)
	BEGIN(0, y);
	if (cols2)
		BEGIN(1, y + 16);
	if (rows2)
		BEGIN(2, y2);
	if (rows2 && cols2)
		BEGIN(3, y2 + 16);
#undef BEGIN
	for (int s = 0; s < nseg; s++)
		for (int n = 0, count; n < seg[s].n; n += count, w++) {
			count = bwd_step(&seg[s], n);
			amx_load(4, bwd_left(&seg[s], row, first, n, count, half[0]),
				 AMX_ROW_BYTES);
			amx_load(6, (*w)[0], AMX_ROW_BYTES);
			amx_dp_bf16(0, 4, 6);
			if (cols2) {
				amx_load(7, (*w)[1], AMX_ROW_BYTES);
				amx_dp_bf16(1, 4, 7);
			}
			if (rows2) {
				amx_load(5,
					 bwd_left(&seg[s], row + AMX_ROWS, last, n, count, half[1]),
					 AMX_ROW_BYTES);
				amx_dp_bf16(2, 5, 6);
			}
			if (rows2 && cols2)
				amx_dp_bf16(3, 5, 7);
		}
	amx_store(0, y, stride);
	if (cols2)
		amx_store(1, y + 16, stride);
	if (rows2)
		amx_store(2, y2, stride);
	if (rows2 && cols2)
		amx_store(3, y2 + 16, stride);
}

static void bwd_rows(const struct moe_bwd_seg *seg, int nseg, int row, int rows, bool cols2,
		     const slice_step *w, float *y, int64_t ldy, bool add)
{
	struct amx_config config = { .palette = 1 };
	bool rows2 = rows > AMX_ROWS;
	int first = MOE_MIN(rows, AMX_ROWS), last = rows2 ? rows - AMX_ROWS : rows;

	amx_shape(&config, 0, first, AMX_ROW_BYTES);
	amx_shape(&config, 1, first, AMX_ROW_BYTES);
	amx_shape(&config, 4, first, AMX_ROW_BYTES);
	amx_shape(&config, 2, last, AMX_ROW_BYTES);
	amx_shape(&config, 3, last, AMX_ROW_BYTES);
	amx_shape(&config, 5, last, AMX_ROW_BYTES);
	amx_shape(&config, 6, AMX_ROWS, AMX_ROW_BYTES);
	amx_shape(&config, 7, AMX_ROWS, AMX_ROW_BYTES);
	amx_load_config(&config);
	if (rows2 && cols2)
		bwd_group(true, true, seg, nseg, row, last, w, y, ldy, add);
	else if (rows2)
		bwd_group(true, false, seg, nseg, row, last, w, y, ldy, add);
	else if (cols2)
		bwd_group(false, true, seg, nseg, row, last, w, y, ldy, add);
	else
		bwd_group(false, false, seg, nseg, row, last, w, y, ldy, add);
	amx_release();
}

/* STREAM is STORE: what a tile stores is read again soon by whoever takes 32 columns at a time. */
void OWN(tile_bwd)(int m, const struct moe_bwd_seg *seg, int nseg, int columns, float *y,
		   int64_t ldy, enum moe_out out, void *scratch)
{
	slice_step *w = scratch;

	for (int c = 0; c < columns; c += SLICE) {
		bwd_slice(seg, nseg, c, w);
		for (int row = 0; row < m; row += 2 * AMX_ROWS)
			bwd_rows(seg, nseg, row, MOE_MIN(2 * AMX_ROWS, m - row),
				 columns - c > SLICE / 2, w, y + row * ldy + c, ldy,
				 out == MOE_OUT_ADD);
	}
}
