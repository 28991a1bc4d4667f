/* SPDX-License-Identifier: Apache-2.0 */
/*
 * y = g W, 32 columns at a time. Up to BWD_SMALL rows bwd_small.c does it; up to BWD_DECODE the
 * tiles shuffle the raw panels in registers; with more rows the first tile does and leaves the
 * slice to the others, in L2. Quantised slices likewise (bwd_coded.h).
 * A long reduction is cut into blocks of n, so that the slice, its g and the next slice's lines fit
 * into L2 together; sums wait in `partial`, which changes no bit of them.
 */
#include "codelets/kernels/avx512_bf16/bwd_coded.h"

#define SLICE 32
#define BLOCK_PART 2176 /* longest part of one segment in a block */
#define BLOCK_MAX 2304	/* longest block: a part and the LoRA rows that follow */

/* n rows of one segment from row n0 */
struct piece {
	const struct moe_bwd_seg *seg;
	int n0, n;
	bool fused; /* quantised, of the block's kind */
};

struct block {
	struct piece piece[MOE_MAX_SEGS];
	int count;
	enum bwd_kind kind;
};

/* Where the next block begins. */
struct place {
	const struct moe_bwd_seg *seg, *end;
	int n0;
};

struct call {
	const struct moe_bwd_seg *seg;
	int m, nseg;
	struct tiles tiles;
	float *y;
	int64_t ldy;
	enum moe_out out;
	float *partial;	   /* [m, 32] */
	uint16_t *decoded; /* [n/2][32][2] of a block; NULL: shuffle in registers */
	bool coded, keeps; /* keeps: plain, decoded by the first tile */
	struct moe_bwd_seg after[MOE_MAX_SEGS]; /* what is read after the last columns */
	struct moe_coded_slice after_coded[MOE_MAX_SEGS];
};

static struct block next_block(struct place *at)
{
	struct block b = { .kind = BWD_PLAIN };
	int total = 0;

	while (at->seg < at->end && b.count < MOE_MAX_SEGS) {
		int n = at->seg->n, parts = (n + BLOCK_PART - 1) / BLOCK_PART;
		int part = parts ? (int)moe_round_up((n + parts - 1) / parts, 16) : 0;
		int take = MOE_MIN(part, n - at->n0);

		if (total && total + take > BLOCK_MAX)
			break;
		if (take)
			b.piece[b.count++] = (struct piece){ at->seg, at->n0, take, false };
		total += take;
		at->n0 += take;
		if (at->n0 == n) {
			at->seg++;
			at->n0 = 0;
		}
	}
	return b;
}

/* Elements between panels, of quantised ones too. */
static int64_t stride_of(const struct moe_bwd_seg *s)
{
	return s->coded ? (int64_t)(s->coded->stride / sizeof(uint16_t)) : s->stride;
}

static struct moe_coded_panel coded_panel(const struct piece *p, int64_t index)
{
	struct moe_coded_panel c = p->seg->coded->first;
	size_t bytes = (size_t)(p->n0 / 16 + index) * p->seg->coded->stride;

	c.scale += bytes;
	c.zero += bytes;
	c.codes += bytes;
	return c;
}

static const uint16_t *panel_of(const struct piece *p, int column)
{
	if (p->seg->coded) {
		const struct moe_coded_panel c = coded_panel(p, 0);

		return (const uint16_t *)(const void *)(c.codes + (p->seg->coded->col + column) * 2 *
								     c.coding->format->bits);
	}
	return p->seg->w + p->n0 / 16 * p->seg->stride + 16 * column;
}

static const uint32_t *words_of(const struct piece *p, int row, int rows)
{
	const struct moe_bwd_seg *s = p->seg;

	return (const uint32_t *)s->g + (row * s->width + (s->col + p->n0) * rows) / 2;
}

/* 32 columns of a plain panel, rows paired */
INLINE void decode_panel(const uint16_t *w, uint16_t *dst)
{
	__m512i order[2] = { _mm512_load_si512(avx512_bf16_rows01),
			     _mm512_load_si512(avx512_bf16_rows23) };

	for (int q = 0; q < 4; q++)
		for (int h = 0; h < 2; h++, dst += 64) {
			const uint16_t *d = w + 32 * q;

			_mm512_store_si512(dst, row_pair(d, order[h]));
			_mm512_store_si512(dst + 32, row_pair(d + 256, order[h]));
		}
}

static void decode_coded(const struct piece *p, int column, uint16_t *dst)
{
	int64_t k = p->seg->coded->col + column;
	_Alignas(64) uint16_t plain[SLICE * 16];

	for (int n = 0; n < p->n; n += 16, dst += 16 * SLICE) {
		struct moe_coded_panel c = coded_panel(p, n / 16);

		moe_coded_fetch(&c, FETCH_PANELS * p->seg->coded->stride, k, SLICE);
		avx512_bf16_decode(&c, k, SLICE, plain);
		decode_panel(plain, dst);
	}
}

/* Columns of a block, rows paired, but of the pieces that a tile decodes: what the raw tiles do, once for all rows */
static void decode(const struct block *b, int column, uint16_t *dst)
{
	for (int i = 0; i < b->count; dst += b->piece[i++].n * SLICE) {
		const struct piece *p = &b->piece[i];
		int64_t stride = p->seg->stride;
		const uint16_t *w = panel_of(p, column);

		if (p->fused)
			continue;
		if (p->seg->coded) {
			decode_coded(p, column, dst);
			continue;
		}
		for (int n = 0; n < p->n; n += 16, w += stride) {
			for (int l = 0; l < 16; l++)
				_mm_prefetch((const char *)(w + 4 * stride) + 64 * l, _MM_HINT_T0);
			decode_panel(w, dst + n * SLICE);
		}
	}
}

/* Chooses the pieces that a tile decodes: those of the first kind. */
static void fuse(struct block *b, int column)
{
	for (int i = 0; i < b->count; i++) {
		struct piece *p = &b->piece[i];
		const struct moe_coded_slice *s = p->seg->coded;
		enum bwd_kind kind = BWD_PLAIN;

		if (s)
			kind = avx512_bf16_bwd_kind(s, p->n0 / 16, p->n / 16, s->col + column, SLICE);
		if (b->kind == BWD_PLAIN)
			b->kind = kind;
		p->fused = kind != BWD_PLAIN && kind == b->kind;
	}
}

static enum bwd_ahead ahead_of(const struct call *c, bool fused, int t)
{
	if (c->coded) /* few bytes: the first tile that doesn't decode fetches them */
		return t == fused ? BWD_HALF : BWD_NOTHING;
	if (c->tiles.count == 1)
		return c->decoded ? BWD_HALF : BWD_WHOLE;
	return t < 2 ? BWD_HALF : BWD_NOTHING;
}

/* Scales and zeros of the block's panels */
struct groups {
	_Alignas(64) float scale[BLOCK_MAX / 16][16], zero[BLOCK_MAX / 16][16];
};

static void codes_of(const struct call *c, const struct block *b, int column, struct groups *g,
		     struct bwd_codes codes[MOE_MAX_SEGS])
{
	uint16_t *slice = c->decoded;
	int panel = 0;

	for (int i = 0; i < b->count; i++) {
		const struct piece *p = &b->piece[i];
		const struct moe_coded_slice *s = p->seg->coded;

		if (p->fused) {
			const struct moe_coding *coding = s->first.coding;

			avx512_bf16_bwd_group(s, p->n0 / 16, p->n / 16, s->col + column, g->scale[panel],
					      g->zero[panel]);
			codes[i] = (struct bwd_codes){ (const uint8_t *)panel_of(p, column),
						       (ptrdiff_t)s->stride,
						       coding->format->values,
						       g->scale[panel],
						       coding->zero ? g->zero[panel] : NULL,
						       slice,
						       c->tiles.count > 1 };
		}
		slice += p->n * SLICE;
		panel += p->n / 16;
	}
}

/* One tile; `follow` at column `next` is read after the block. skip: bytes of its panels; codes: decoded by the tile */
static void run_tile(const struct call *c, const struct block *b, int column, const struct block *follow,
		     int next, int row, int rows, enum bwd_ahead ahead, int skip, bwd_tile_fn fused,
		     const struct bwd_codes *codes, const struct bwd_target *to)
{
	bool keeps = c->keeps && !row;
	struct bwd_run run[MOE_MAX_SEGS];
	uint16_t *slice = c->decoded;

	for (int i = 0; i < b->count; i++) {
		const struct piece *p = &b->piece[i];
		const uint16_t *w = panel_of(p, column);
		const uint16_t *after = i < follow->count ? panel_of(&follow->piece[i], next) : w;

		run[i] = (struct bwd_run){ words_of(p, row, rows), c->decoded && !keeps ? slice : w,
					   stride_of(p->seg), p->n, (const char *)after + skip,
					   fused && p->fused ? &codes[i] : NULL, slice };
		slice += c->decoded ? p->n * SLICE : 0;
	}
	if (fused)
		fused(run, b->count, to);
	else if (keeps)
		avx512_bf16_bwd_keep[rows](run, b->count, to);
	else if (c->decoded)
		avx512_bf16_bwd_decoded[ahead][rows](run, b->count, to);
	else
		avx512_bf16_bwd_raw[ahead][rows](run, b->count, to);
}

/* All rows of one block; `follow` at column `next` is read next. */
static void block_tiles(const struct call *c, const struct block *b, int column,
			const struct block *follow, int next, bool first, bool last)
{
	bwd_tile_fn fused = avx512_bf16_bwd_fused(b->kind, tile_rows(&c->tiles, 0));
	struct bwd_codes codes[MOE_MAX_SEGS];
	struct coded_tables tables;
	struct groups groups;

	if (b->kind != BWD_PLAIN)
		codes_of(c, b, column, &groups, codes);
	if (b->kind != BWD_PLAIN && !fused)
		run_tile(c, b, column, follow, next, 0, 0, BWD_NOTHING, 0, avx512_bf16_bwd_fused(b->kind, 0),
			 codes, &(struct bwd_target){ .tables = &tables });
	for (int t = 0, row = 0, rows; t < c->tiles.count; t++, row += rows) {
		struct bwd_target to = { first ? NULL : c->partial + row * SLICE,
					 c->partial + row * SLICE, SLICE, MOE_OUT_STORE, &tables };
		enum bwd_ahead ahead = ahead_of(c, fused != NULL, t);

		rows = tile_rows(&c->tiles, t);
		if (last)
			to = (struct bwd_target){ to.from, c->y + row * c->ldy + column, c->ldy,
						  c->out, &tables };
		run_tile(c, b, column, follow, next, row, rows, ahead,
			 c->coded ? 0 : (ahead == BWD_HALF) * t * 512, t ? NULL : fused, codes, &to);
	}
}

static struct place begin(const struct moe_bwd_seg *seg, int nseg)
{
	return (struct place){ seg, seg + nseg, 0 };
}

/* `end`: no slice of the call follows */
static void slice_of(const struct call *c, int column, bool end)
{
	struct place at = begin(c->seg, c->nseg);
	struct place after = begin(end ? c->after : c->seg, c->nseg);
	struct block now = next_block(&at), head = next_block(&after);

	for (bool first = true, last = false; !last; first = false) {
		struct block next = next_block(&at);

		last = next.count == 0;
		if (c->coded)
			fuse(&now, column);
		if (c->decoded && !c->keeps)
			decode(&now, column, c->decoded);
		if (last)
			block_tiles(c, &now, column, &head, end ? 0 : column + SLICE, first, last);
		else
			block_tiles(c, &now, column, &next, column, first, last);
		now = next;
	}
}

/* 16 columns of a quantised segment as plain panels */
static struct moe_bwd_seg plain_columns(const struct moe_bwd_seg *s, int column, uint16_t *dst)
{
	struct moe_bwd_seg plain = *s;
	struct piece p = { s, 0, s->n, false };

	for (int n = 0; n < s->n; n += 16) {
		struct moe_coded_panel c = coded_panel(&p, n / 16);

		avx512_bf16_decode(&c, s->coded->col + column, 16, dst + 16 * n);
	}
	plain.coded = NULL;
	plain.w = dst - 16 * column;
	plain.stride = 256;
	return plain;
}

/* The last 16 columns, or the only ones */
static void thin_slice(const struct call *c, int column)
{
	struct moe_bwd_seg seg[MOE_MAX_SEGS];
	uint16_t *decoded = c->decoded;

	for (int i = 0; i < c->nseg; i++) {
		seg[i] = c->seg[i];
		if (seg[i].coded) {
			seg[i] = plain_columns(c->seg + i, column, decoded);
			decoded += 16 * seg[i].n;
		}
	}
	for (int t = 0, row = 0, rows; t < c->tiles.count; t++, row += rows) {
		struct bwd_target to = { NULL, c->y + row * c->ldy + column, c->ldy, c->out, NULL };
		struct bwd_run run[MOE_MAX_SEGS];

		rows = tile_rows(&c->tiles, t);
		for (int i = 0; i < c->nseg; i++) {
			struct piece p = { seg + i, 0, seg[i].n, false };

			run[i] = (struct bwd_run){ words_of(&p, row, rows), panel_of(&p, column),
						   p.seg->stride, p.n, NULL, NULL, NULL };
		}
		avx512_bf16_bwd_thin[rows](run, c->nseg, &to);
	}
}

int avx512_bf16_bwd_columns(int m)
{
	if (m <= MOE_LONG_ROWS)
		return MOE_ALL_COLUMNS;
	if (m <= BWD_SMALL)
		return MOE_CHUNK;
	return bwd_tiles(m).count == 1 ? 2 * SLICE : SLICE;
}

/* Bytes of `partial`, in front of `decoded` */
static size_t partial_bytes(int m, int64_t n)
{
	return n > BLOCK_PART ? (size_t)m * SLICE * sizeof(float) : 0;
}

bool avx512_bf16_bwd_takes(int m, const struct moe_coded_panel *p)
{
	return p->layout == MOE_LAYOUT_BLOCKS8 && (m > BWD_SMALL || avx512_bf16_bwd_small_takes(p));
}

/* Never less for more rows. */
size_t avx512_bf16_bwd_scratch(int m, int64_t n, int columns)
{
	size_t small = (size_t)MOE_MIN(m, BWD_SMALL) * (size_t)columns * sizeof(float);
	size_t tiles = partial_bytes(m, n);

	if (m > BWD_SMALL) /* a block, or 16 columns of all */
		tiles += (size_t)MOE_MAX(moe_round_up(MOE_MIN(n, BLOCK_MAX), 16) * SLICE,
					 moe_round_up(n, 16) * 16) *
			 sizeof(uint16_t);
	return MOE_MAX(small, tiles);
}

/*
 * Plain weights, up to BWD_DECODE rows, all of n in one block: a slice, or the two of a call for one
 * tile. What slice_of would do, without its set-up, which takes 2 % of a slice of 8 rows. false: not
 * such a call.
 */
static bool quick_slices(int m, const struct moe_bwd_seg *seg, int nseg, int columns, float *y,
			 int64_t ldy, enum moe_out out)
{
	struct tiles tiles = bwd_tiles(m);
	bool pair = tiles.count == 1 && columns == 2 * SLICE;
	enum bwd_ahead ahead = pair ? BWD_PAIR : tiles.count == 1 ? BWD_WHOLE : BWD_HALF;
	int n = 0;

	if (m >= BWD_DECODE || (columns != SLICE && !pair))
		return false;
	for (int s = 0; s < nseg; s++) {
		n += seg[s].n;
		if (seg[s].coded)
			return false;
	}
	if (n > BLOCK_PART)
		return false;
	for (int c = 0; c < columns; c += SLICE)
		for (int t = 0, row = 0, rows; t < tiles.count; t++, row += rows) {
			struct bwd_target to = { NULL, y + row * ldy + c, ldy, out, NULL };
			struct bwd_run run[MOE_MAX_SEGS];

			rows = tile_rows(&tiles, t);
			for (int s = 0; s < nseg; s++) {
				struct piece p = { seg + s, 0, seg[s].n, false };
				const uint16_t *far =
					seg[s].after ? seg[s].after : seg[s].w + 16 * columns;

				if (c)
					far += seg[s].n / 32 * seg[s].stride;
				run[s] = (struct bwd_run){ words_of(&p, row, rows), seg[s].w + 16 * c,
							   seg[s].stride, seg[s].n,
							   (const char *)far +
								   (ahead == BWD_HALF) * t * 512,
						   NULL, NULL };
			}
			avx512_bf16_bwd_raw[t < 2 ? ahead : BWD_NOTHING][rows](run, nseg, &to);
		}
	return true;
}

void avx512_bf16_bwd(int m, const struct moe_bwd_seg *seg, int nseg, int columns, float *y,
		     int64_t ldy, enum moe_out out, void *scratch)
{
	struct call c;
	int64_t n = 0;
	int column = 0;

	MOE_ASSERT(nseg > 0 && nseg <= MOE_MAX_SEGS);
	out = out_mode(out, y, ldy);
	if (m <= BWD_SMALL) {
		avx512_bf16_bwd_small(m, seg, nseg, columns, y, ldy, out, scratch);
		return;
	}
	if (quick_slices(m, seg, nseg, columns, y, ldy, out))
		return;
	c = (struct call){ .seg = seg,
			  .m = m,
			  .nseg = nseg,
			  .tiles = bwd_tiles(m),
			  .y = y,
			  .ldy = ldy,
			  .out = out,
			  .partial = scratch };
	for (int s = 0; s < nseg; s++) {
		n += seg[s].n;
		c.after[s] = seg[s];
		c.coded |= seg[s].coded != NULL;
		if (seg[s].coded) {
			c.after_coded[s] = *seg[s].coded;
			c.after_coded[s].col += columns;
			c.after[s].coded = &c.after_coded[s];
			continue;
		}
		c.after[s].w = seg[s].after ? seg[s].after : seg[s].w + 16 * columns;
	}
	if (m >= BWD_DECODE || c.coded)
		c.decoded = (uint16_t *)((char *)scratch + partial_bytes(m, n));
	c.keeps = c.decoded && !c.coded && tile_rows(&c.tiles, 0) <= FUSED_ROWS;
	for (; column + SLICE <= columns; column += SLICE)
		slice_of(&c, column, column + 2 * SLICE > columns);
	if (column < columns)
		thin_slice(&c, column);
}
