/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised weights: packing, decoding in plain C, and what the drivers multiply by. */
#include "codelets/kernels/packed/coded.h"
#include "codelets/kernels/packed/ints.h"

#define RUN_ROWS 2	   /* rows of a run of panels, by integers */
#define STEP 8		   /* columns decoded at a time: never split by a group or a block */
#define PANEL_GAP 128	   /* bytes between panels whose stride is a multiple of 2 KB (layout.h) */
#define FETCH_PANELS 12	   /* from a panel to what is prefetched of a slice */
#define SLICE_BYTES 262144 /* of decoded columns: a part of the L2 cache */

static size_t line(size_t bytes)
{
	return (bytes + 63) & ~(size_t)63;
}

struct moe_coded_layout moe_coded_layout(const struct moe_coding *c, int64_t k)
{
	size_t rows = (size_t)moe_groups(c, k) * MOE_PACK_N;
	size_t kp = (size_t)moe_round_up(k, MOE_PACK_K);
	struct moe_coded_layout l;

	l.zero = line(rows * moe_dtype_size(c->scale));
	l.codes = l.zero + (c->zero ? line(rows) : 0);
	l.stride = l.codes + line(MOE_PACK_N * kp * (size_t)c->format->bits / 8);
	l.stride += l.stride % 2048 ? 0 : PANEL_GAP;
	return l;
}

struct moe_coding moe_coding_of(const struct moe_quantised *q, const struct moe_coded_window *w)
{
	struct moe_coding c = q->coding;

	c.phase = w->k0 % c.group;
	if (!c.compute)
		c.compute = moe_format_compute(c.format);
	return c;
}

size_t moe_coded_bytes(const struct moe_coding *c, int64_t n, int64_t k)
{
	return (size_t)moe_packed_panels(n) * moe_coded_layout(c, k).stride;
}

enum moe_layout moe_coded_order(const struct moe_kernels *table)
{
	return table->tiles ? table->tiles->layout : MOE_LAYOUT_BLOCKS8;
}

/* ---- packing ---- */

static void put_codes(int bits, int64_t n, int64_t k0, int64_t k, const uint8_t *code,
		      uint8_t *codes)
{
	for (int64_t i = 0; i < k; i++) {
		int64_t at;
		int shift;

		if (bits == 8) {
			codes[moe_code_byte8(n, k0 + i)] = code[i];
			continue;
		}
		at = moe_code_byte4(n, k0 + i, &shift);
		codes[at] = (uint8_t)(codes[at] | code[i] << shift);
	}
}

uint8_t moe_zero_code(const struct moe_format *f, float zero)
{
	int best = 0;

	for (int i = 1; i < 1 << f->bits; i++) {
		float d = f->values[i] - zero, b = f->values[best] - zero;

		if (d * d < b * b)
			best = i;
	}
	return (uint8_t)best;
}

static int64_t count_nan(const struct moe_format *f, const uint8_t *code, int64_t k)
{
	int64_t count = 0;

	for (int64_t i = 0; i < k; i++)
		count += f->values[code[i]] != f->values[code[i]];
	return count;
}

/* Row `row` of q as row n of a panel; how many codes are NaN. */
static int64_t pack_row(const struct moe_coding *c, const struct moe_quantised *q,
			const struct moe_coded_window *w, int64_t row, int64_t n, uint8_t *panel)
{
	struct moe_coded_layout l = moe_coded_layout(c, w->k);
	int64_t first = w->k0 / c->group, groups = moe_groups(c, w->k);
	int64_t nan = 0, kp = moe_round_up(w->k, MOE_PACK_K);
	uint8_t buffer[256];
	int zero = 0;

	for (int64_t g = 0; g < groups; g++) {
		moe_scale_put(panel, c->scale, g * MOE_PACK_N + n,
			      q->reader->scale(q, row, first + g));
		if (!c->zero)
			continue;
		zero = q->reader->zero(q, row, first + g);
		panel[l.zero + (size_t)(g * MOE_PACK_N + n)] = (uint8_t)(int8_t)zero;
	}
	for (int64_t k = 0; k < w->k; k += (int64_t)sizeof buffer) {
		int64_t count = MOE_MIN((int64_t)sizeof buffer, w->k - k);

		q->reader->codes(q, row, w->k0 + k, count, buffer);
		if (c->format->codes == MOE_CODES_SIGN_MAGNITUDE)
			nan += count_nan(c->format, buffer, count);
		put_codes(c->format->bits, n, k, count, buffer, panel + l.codes);
	}
	if (w->k == kp)
		return nan;
	memset(buffer, moe_zero_code(c->format, (float)zero), MOE_PACK_K);
	put_codes(c->format->bits, n, w->k, kp - w->k, buffer, panel + l.codes);
	return nan;
}

int64_t moe_coded_pack(enum moe_layout layout, struct moe_weight *W, const struct moe_quantised *q,
		       const struct moe_coded_window *w)
{
	struct moe_coding c = moe_coding_of(q, w);
	size_t stride = moe_coded_layout(&c, w->k).stride;
	uint8_t *panel = W->data;
	int64_t nan = 0;

	W->layout = layout;
	W->dtype = MOE_U8;
	W->coding = c;
	W->n = w->n;
	W->k = w->k;
	if (!q->codes.data)
		return 0;
	for (int64_t n = 0; n < w->n; n += MOE_PACK_N, panel += stride) {
		memset(panel, 0, stride); /* no scale: rows beyond n are 0 */
		for (int64_t i = 0; i < MOE_MIN(MOE_PACK_N, w->n - n); i++)
			nan += pack_row(&c, q, w, w->n0 + (n + i) * w->step, i,
					panel);
	}
	return nan;
}

/* ---- decoding ---- */

struct moe_coded_panel moe_coded_panel(const struct moe_weight *W, int64_t index)
{
	struct moe_coded_layout l = moe_coded_layout(&W->coding, W->k);
	const uint8_t *base = (const uint8_t *)W->data + (size_t)index * l.stride;

	return (struct moe_coded_panel){ &W->coding,	W->layout,
					 W->k,		moe_groups(&W->coding, W->k),
					 base,		base + l.zero,
					 base + l.codes };
}

void moe_coded_scales(const struct moe_coded_panel *p, int64_t group, float scale[MOE_PACK_N])
{
	for (int n = 0; n < MOE_PACK_N; n++)
		scale[n] = moe_scale_at(p->scale, p->coding->scale, group * MOE_PACK_N + n);
}

void moe_coded_zeros(const struct moe_coded_panel *p, int64_t group, float zero[MOE_PACK_N])
{
	for (int n = 0; n < MOE_PACK_N; n++)
		zero[n] = p->coding->zero ? (float)((const int8_t *)p->zero)[group * MOE_PACK_N + n]
					  : 0.0f;
}

/* The group of a column; those of the padding belong to the last. */
static int64_t group_of(const struct moe_coded_panel *p, int64_t k)
{
	return MOE_MIN((p->coding->phase + k) / p->coding->group, p->groups - 1);
}

static void fetch(const uint8_t *from, const uint8_t *to)
{
	for (from -= (uintptr_t)from % 64; from < to; from += 64)
		__builtin_prefetch(from);
}

void moe_coded_fetch(const struct moe_coded_panel *p, size_t far, int64_t k0, int64_t k)
{
	const struct moe_coding *c = p->coding;
	int64_t first = group_of(p, k0) * MOE_PACK_N, end = (group_of(p, k0 + k - 1) + 1) * MOE_PACK_N;
	int64_t bytes = (int64_t)moe_dtype_size(c->scale), bits = c->format->bits;

	fetch(p->codes + far + MOE_PACK_N * k0 * bits / 8,
	      p->codes + far + MOE_PACK_N * (k0 + k) * bits / 8);
	fetch(p->scale + far + first * bytes, p->scale + far + end * bytes);
	if (c->zero)
		fetch(p->zero + far + first, p->zero + far + end);
}

/* Past the last column of k's group. */
static int64_t group_end(const struct moe_coded_panel *p, int64_t k)
{
	int64_t g = group_of(p, k);

	return g == p->groups - 1 ? INT64_MAX : (g + 1) * p->coding->group - p->coding->phase;
}

static inline uint16_t to_bf16(float v)
{
	uint32_t bits;

	memcpy(&bits, &v, sizeof bits);
	return (bits & 0x7fffffffu) < 0x00800000u ? (uint16_t)(bits >> 16 & 0x8000u)
						  : moe_f32_to_bf16(v);
}

/* One step, 8 columns, of 4 bits: the bf16 values of each row's 16 codes are looked up. */
static inline void nibbles(const uint16_t table[MOE_PACK_N][16], int64_t block,
			   const uint8_t *restrict codes, uint16_t *restrict dst)
{
	for (int n = 0; n < MOE_PACK_N; n++, codes += 4, dst += block)
		for (int i = 0; i < 4; i++) {
			dst[i] = table[n][codes[i] & 15];
			dst[4 + i] = table[n][codes[i] >> 4];
		}
}

/* The same of 8 bits */
static inline void bytes(const float *values, const float *scale, const float *zero, int64_t block,
			 const uint8_t *restrict codes, uint16_t *restrict dst)
{
	for (int n = 0; n < MOE_PACK_N; n++, codes += 4, dst += block)
		for (int i = 0; i < 4; i++) {
			dst[i] = to_bf16((values[codes[i]] - zero[n]) * scale[n]);
			dst[4 + i] = to_bf16((values[codes[64 + i]] - zero[n]) * scale[n]);
		}
}

/* A step of two rows, one after the other, side by side */
static inline void put_pair(const uint16_t *rows, uint16_t *to)
{
	moe_run8 pair[2];

	memcpy(pair, rows, sizeof pair);
	moe_pair(pair, pair + 1);
	memcpy(to, pair, sizeof pair);
}

/* Whole steps of one group; dst: the block of the first one. */
static void decode_steps(const struct moe_coded_panel *p, int64_t k0, int64_t next,
			 const float *scale, const float *zero, uint16_t *dst)
{
	const struct moe_format *f = p->coding->format;
	const uint8_t *codes = p->codes + MOE_PACK_N * k0 * f->bits / 8;
	int64_t block = moe_layout_k(p->layout);
	bool pairs = p->layout == MOE_LAYOUT_PAIRS16;
	uint16_t table[MOE_PACK_N][16];

	for (int n = 0; n < MOE_PACK_N && f->bits == 4; n++)
		for (int c = 0; c < 16; c++)
			table[n][c] = to_bf16((f->values[c] - zero[n]) * scale[n]);
	for (int64_t k = k0, start = k0 / block * block; k < next; k += STEP) {
		uint16_t *to = dst + (k / block * block - start) * MOE_PACK_N;
		uint16_t rows[MOE_PACK_N * STEP], *step = pairs ? rows : to + k % block;
		int64_t ld = pairs ? STEP : block;

		if (f->bits == 4)
			nibbles(table, ld, codes, step);
		else
			bytes(f->values, scale, zero, ld, codes, step);
		for (int n = 0; n < MOE_PACK_N && pairs; n += 2)
			put_pair(rows + n * STEP, to + moe_panel_at(p->layout, n, k % block));
		codes += STEP * MOE_PACK_N * f->bits / 8;
	}
}

/* Columns k0..next, of one group */
static void decode_group(const struct moe_coded_panel *p, int64_t k0, int64_t next, uint16_t *dst)
{
	const struct moe_format *f = p->coding->format;
	int64_t block = moe_layout_k(p->layout);
	float scale[MOE_PACK_N], zero[MOE_PACK_N];

	moe_coded_scales(p, group_of(p, k0), scale);
	moe_coded_zeros(p, group_of(p, k0), zero);
	if (k0 % STEP == 0 && next % STEP == 0) {
		decode_steps(p, k0, next, scale, zero, dst);
		return;
	}
	for (int n = 0; n < MOE_PACK_N; n++)
		for (int64_t i = k0; i < next; i++)
			dst[moe_panel_at(p->layout, n, i) - k0 / block * block * MOE_PACK_N] =
				to_bf16((f->values[moe_code_at(p->codes, f->bits, n, i)] - zero[n]) *
					scale[n]);
}

void moe_coded_decode(const struct moe_coded_panel *p, int64_t k0, int64_t k, uint16_t *dst)
{
	int64_t block = moe_layout_k(p->layout);

	for (int64_t first = k0, end = k0 + k, next; k0 < end; k0 = next) {
		next = MOE_MIN(end, group_end(p, k0));
		/* a block that a group begins in the middle of is addressed from its start */
		decode_group(p, k0, next, dst + (k0 / block * block - first) * MOE_PACK_N);
	}
}

void moe_coded_rows(const struct moe_weight *W, int64_t n0, int64_t n1, int64_t k0, int64_t k1,
		    float *dst, int64_t ld)
{
	const float *values = W->coding.format->values;
	int bits = W->coding.format->bits;
	float scale[MOE_PACK_N], zero[MOE_PACK_N];

	for (int64_t n = n0; n < n1;) {
		struct moe_coded_panel p = moe_coded_panel(W, n / MOE_PACK_N);
		int64_t last = MOE_MIN(n1, moe_round_up(n + 1, MOE_PACK_N));

		for (int64_t k = k0, next; k < k1; k = next) {
			next = MOE_MIN(k1, group_end(&p, k));
			moe_coded_scales(&p, group_of(&p, k), scale);
			moe_coded_zeros(&p, group_of(&p, k), zero);
			for (int64_t i = n; i < last; i++)
				for (int64_t j = k; j < next; j++) {
					int64_t r = i % MOE_PACK_N;

					dst[(i - n0) * ld + j - k0] =
						(values[moe_code_at(p.codes, bits, r, j)] - zero[r]) *
						scale[r];
				}
		}
		n = last;
	}
}

/* ---- for the drivers ---- */

const uint16_t *moe_panel_address(const struct moe_weight *W, int64_t index)
{
	if (moe_is_coded(W))
		return (const uint16_t *)(const void *)moe_coded_panel(W, index).scale;
	return (const uint16_t *)W->data +
	       index * moe_packed_stride(moe_round_up(W->k, MOE_PACK_K));
}

/* One panel; coded: of quantised weights */
static void forward_panel(const struct moe_tiles *t, int m, const struct moe_coded_panel *coded, const uint16_t *plain,
			  const struct moe_int_rows *ints, struct moe_fwd_seg *seg, int nseg, const uint16_t *next,
			  float *y, int64_t ldy, enum moe_out out, uint16_t *buffer)
{
	if (ints) {
		if (nseg > 1) { /* LoRA first */
			t->fwd(m, seg + 1, nseg - 1, NULL, y, ldy, MOE_OUT_STORE);
			out = MOE_OUT_ADD;
		}
		t->fwd_ints(ints, coded, (const char *)next, y, ldy, out);
		return;
	}
	if (coded && t->fwd_coded && t->fwd_coded(m, coded, seg, nseg, next, y, ldy, out, buffer))
		return;
	if (coded)
		t->decode(coded, 0, moe_round_up(coded->k, MOE_PACK_K), buffer);
	seg->w = coded ? buffer : plain;
	t->fwd(m, seg, nseg, next, y, ldy, out);
}

/* Up to `count` panels in one call, where the table has a way for them; how many are done. */
static int64_t forward_run(const struct moe_tiles *t, int m, const struct moe_coded_panel *p,
			   const struct moe_int_rows *ints, const struct moe_fwd_seg *seg, int nseg, int64_t count,
			   struct moe_panel_run *run)
{
	if (!ints)
		return t->fwd_coded_run ? t->fwd_coded_run(m, p, seg, nseg, count, run) : 0;
	if (!t->fwd_ints_run || m > RUN_ROWS || count < MOE_RUN)
		return 0;
	for (int i = 0; i < MOE_RUN && nseg > 1; i++) { /* LoRA first */
		struct moe_fwd_seg lora = seg[1];

		lora.w += i * run->lora_stride;
		t->fwd(m, &lora, 1, NULL, run->y + i * run->step, run->ldy, MOE_OUT_STORE);
		run->out = MOE_OUT_ADD;
	}
	return t->fwd_ints_run(ints, p, run) ? MOE_RUN : 0;
}

void moe_forward_panels(const struct moe_tiles *t, int m, const struct moe_weight *W, int64_t index, int64_t count,
			const struct moe_int_rows *ints, const struct moe_fwd_seg *seg, int nseg, int64_t stride,
			const uint16_t *next, float *y, int64_t step, int64_t ldy, enum moe_out out, uint16_t *buffer)
{
	const bool coded = moe_is_coded(W);
	bool runs = coded;
	struct moe_coded_panel p;
	const uint16_t *plain = NULL;
	int64_t bytes;

	if (coded) {
		p = moe_coded_panel(W, index);
		bytes = (int64_t)moe_coded_layout(&W->coding, W->k).stride;
	} else {
		plain = moe_panel_address(W, index);
		bytes = 2 * moe_packed_stride(moe_round_up(W->k, MOE_PACK_K));
	}
	for (int64_t i = 0, done; i < count; i += done) {
		const uint8_t *at = coded ? p.scale : (const uint8_t *)plain;
		struct moe_fwd_seg own[2] = { seg[0] }; /* w is set anew */
		struct moe_panel_run run = { bytes, stride, NULL, y + i * step, step, ldy, out };

		if (nseg > 1) {
			own[1] = seg[1];
			own[1].w += i * stride;
		}
		run.next = i + MOE_RUN < count ? (const char *)at + MOE_RUN * bytes : (const char *)next;
		done = runs ? forward_run(t, m, &p, ints, own, nseg, count - i, &run) : 0;
		runs = runs && (done || !ints);
		if (!done) {
			done = 1;
			forward_panel(t, m, coded ? &p : NULL, plain, ints, own, nseg,
				      i + 1 < count ? (const uint16_t *)(const void *)(at + bytes) : next, y + i * step,
				      ldy, out, buffer);
		}
		if (coded) {
			p.scale += done * bytes;
			p.zero += done * bytes;
			p.codes += done * bytes;
		} else {
			plain += done * bytes / 2;
		}
	}
}

void moe_backward_slice(const struct moe_tiles *t, int m, const struct moe_weight *W, int64_t first,
			int64_t n, int64_t col, int64_t width, uint16_t *buffer,
			struct moe_coded_slice *slice, struct moe_bwd_seg *seg)
{
	struct moe_coded_panel p;
	size_t stride;

	if (!moe_is_coded(W)) {
		seg->w = moe_panel_address(W, first) + MOE_PACK_N * col;
		seg->stride = moe_packed_stride(moe_round_up(W->k, MOE_PACK_K));
		return;
	}
	p = moe_coded_panel(W, first);
	stride = moe_coded_layout(&W->coding, W->k).stride;
	if (n && t->bwd_takes && t->bwd_takes(m, &p)) {
		*slice = (struct moe_coded_slice){ p, stride, col };
		seg->coded = slice;
		return;
	}
	width = moe_round_up(width, MOE_PACK_K);
	seg->w = buffer;
	seg->stride = moe_packed_stride(width);
	seg->after = buffer;
	for (; n > 0; n -= MOE_PACK_N, buffer += seg->stride) {
		moe_coded_fetch(&p, FETCH_PANELS * stride, col, width);
		t->decode(&p, col, width, buffer);
		p.scale += stride;
		p.zero += stride;
		p.codes += stride;
	}
}

int moe_backward_columns(const struct moe_tiles *t, int m, const struct moe_weight *W, int64_t n)
{
	struct moe_coded_panel p;

	if (!moe_is_coded(W))
		return t->bwd_columns(m);
	p = moe_coded_panel(W, 0);
	return t->bwd_takes && t->bwd_takes(m, &p) ? t->bwd_columns(m) : moe_coded_columns(n);
}

int moe_coded_columns(int64_t n)
{
	int columns = 128; /* divides MOE_CHUNK */

	while (columns > MOE_PACK_K && 2 * n * columns > SLICE_BYTES)
		columns /= 2;
	return columns;
}

size_t moe_coded_slice_bytes(int64_t n)
{
	size_t most = 0;

	/* fewer rows may take wider slices */
	for (int64_t rows = MOE_PACK_N; rows <= MOE_MIN(n, 4096); rows += MOE_PACK_N)
		most = MOE_MAX(most, moe_packed_bytes(rows, moe_coded_columns(rows)));
	return MOE_MAX(most, moe_packed_bytes(n, moe_coded_columns(n)));
}
