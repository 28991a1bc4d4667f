/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantised weights as kernels read them. [n, k] lies in panels of 16 rows; a panel is scales [groups][16] in the
 * coding's dtype, zeros [groups][16] bytes where there are zeros, codes of the 16 kp elements, each part padded to 64
 * bytes. Codes lie as integer dot products take them, whatever the table: 64 bytes are [16 rows][4 columns] (8 bits),
 * or [16 rows][4 bytes] with column c of 8 in the low nibble of byte c and column 4 + c in the high one (4 bits).
 * Columns beyond k hold zeros (codes of value 0); rows beyond n have the scale 0.
 *
 * Compute in bf16 decodes a panel (forward) or a slice of all panels (backward) into scratch, as bf16 elements of the
 * plain layout (tiles.h), and multiplies by that: it lives as long as the op. Integer compute: ints.h.
 */
#ifndef MOE_CODELETS_KERNELS_PACKED_CODED_H
#define MOE_CODELETS_KERNELS_PACKED_CODED_H

#include "codelets/kernels/packed/layout.h"

/* A window of a stored matrix: rows n0, n0 + step, ... and columns k0.. */
struct moe_coded_window {
	int64_t n0, n, k0, k;
	int64_t step; /* 1; 2 where gate's and up's rows alternate */
};

/* Where a panel's parts begin, and how long it is; bytes. */
struct moe_coded_layout {
	size_t zero, codes, stride;
};
struct moe_coded_layout moe_coded_layout(const struct moe_coding *c, int64_t k);

/* Of a window of q: the phase is set. */
struct moe_coding moe_coding_of(const struct moe_quantised *q, const struct moe_coded_window *w);
size_t moe_coded_bytes(const struct moe_coding *c, int64_t n, int64_t k);
/* The layout that a table's weights decode to. */
enum moe_layout moe_coded_order(const struct moe_kernels *table);
/*
 * W->data has moe_coded_bytes. q without codes.data: the description only. Returns how many codes have no finite
 * value.
 */
int64_t moe_coded_pack(enum moe_layout layout, struct moe_weight *W, const struct moe_quantised *q,
		    const struct moe_coded_window *w);

/* Where a panel's codes have the element of row n and column k: a byte, or 4 bits of one. */
static inline int64_t moe_code_byte8(int64_t n, int64_t k)
{
	return k / 4 * 64 + n * 4 + k % 4;
}
static inline int64_t moe_code_byte4(int64_t n, int64_t k, int *shift)
{
	*shift = k % 8 < 4 ? 0 : 4;
	return k / 8 * 64 + n * 4 + k % 4;
}
static inline uint8_t moe_code_at(const uint8_t *codes, int bits, int64_t n, int64_t k)
{
	int shift;
	int64_t at;

	if (bits == 8)
		return codes[moe_code_byte8(n, k)];
	at = moe_code_byte4(n, k, &shift);
	return codes[at] >> shift & 15;
}
/* The code whose value is nearest to `zero`: what columns beyond k hold. */
uint8_t moe_zero_code(const struct moe_format *f, float zero);

/* A panel of W, ready for decoders. */
struct moe_coded_panel {
	const struct moe_coding *coding;
	enum moe_layout layout; /* of what it decodes to */
	int64_t k, groups;
	const uint8_t *scale, *zero, *codes;
};
struct moe_coded_panel moe_coded_panel(const struct moe_weight *W, int64_t index);
/* Every group begins at a multiple of `columns`. */
static inline bool moe_groups_at(const struct moe_coded_panel *p, int64_t columns)
{
	return p->groups == 1 || (p->coding->group % columns == 0 && p->coding->phase % columns == 0);
}
/* Columns from col on of panels `stride` bytes apart. */
struct moe_coded_slice {
	struct moe_coded_panel first;
	size_t stride;
	int64_t col;
};
/* Prefetches columns k0..k0+k of the panel `far` bytes on: codes and scales, each a short run of its own. */
void moe_coded_fetch(const struct moe_coded_panel *p, size_t far, int64_t k0, int64_t k);
/* Scales (or zeros) of a group's 16 rows as f32. */
void moe_coded_scales(const struct moe_coded_panel *p, int64_t group, float scale[MOE_PACK_N]);
void moe_coded_zeros(const struct moe_coded_panel *p, int64_t group, float zero[MOE_PACK_N]);

/*
 * Columns k0..k0+k of a panel (multiples of 8 and of the layout's block) as bf16 elements of the plain
 * layout: the f32 value rounded to nearest even, results below the smallest normal number 0. Every
 * table's decode has the same bits (struct moe_tiles).
 */
void moe_coded_decode(const struct moe_coded_panel *p, int64_t k0, int64_t k, uint16_t *dst);
/* Rows n0..n1, columns k0..k1 as f32: exact. ld between rows of dst. */
void moe_coded_rows(const struct moe_weight *W, int64_t n0, int64_t n1, int64_t k0, int64_t k1,
		    float *dst, int64_t ld);

static inline bool moe_is_coded(const struct moe_weight *W)
{
	return W->coding.format != NULL;
}

/*
 * fwd of `count` panels from `index` on, y's `step` floats apart; next: what is read then, or NULL. seg[0].w is set
 * here; nseg 2: seg[1].w is that of the first panel, those of others lie `stride` elements apart. ints: x of seg[0] as
 * moe_int_operand left it, or NULL.
 */
void moe_forward_panels(const struct moe_tiles *t, int m, const struct moe_weight *W, int64_t index, int64_t count,
			const struct moe_int_rows *ints, const struct moe_fwd_seg *seg, int nseg, int64_t stride,
			const uint16_t *next, float *y, int64_t step, int64_t ldy, enum moe_out out, uint16_t *buffer);
/* What a forward reads after panel `index - 1`: an address to prefetch from. */
const uint16_t *moe_panel_address(const struct moe_weight *W, int64_t index);
/*
 * A backward's segment of columns col..col+width of all panels from `first` on (n rows, m of the activations): w and
 * stride are set. Quantised weights are decoded into buffer (moe_packed_bytes of [n, width]), or described by *slice
 * where the table decodes them itself.
 */
void moe_backward_slice(const struct moe_tiles *t, int m, const struct moe_weight *W, int64_t first,
			int64_t n, int64_t col, int64_t width, uint16_t *buffer,
			struct moe_coded_slice *slice, struct moe_bwd_seg *seg);
/* Columns of W, whose rows share the scratch with others to be n, that a backward of m rows takes at a time. */
int moe_backward_columns(const struct moe_tiles *t, int m, const struct moe_weight *W, int64_t n);
/*
 * How many columns a backward decodes at a time, where `n` rows of weights share the scratch; and
 * the scratch of up to n rows, a multiple of MOE_PACK_N.
 */
int moe_coded_columns(int64_t n);
size_t moe_coded_slice_bytes(int64_t n);

#endif
