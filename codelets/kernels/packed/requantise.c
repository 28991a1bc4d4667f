/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/kernels/packed/requantise.h"

enum moe_status moe_requantise_check(const struct moe_coding *c, int64_t n, int64_t k)
{
	int64_t rows = MOE_MIN(c->rows, n), columns = MOE_MIN(c->group, k);

	if (c->zero ? !c->format->quantise_zero : !c->format->quantise)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s weights cannot be made from floats: method lora trains an adapter on them",
				c->format->name);
	if (rows * columns > MOE_REQUANTISE_BLOCK)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s with one scale for %lld x %lld weights: at most %d can be "
				"quantised again after "
				"an update. Method lora trains an adapter on them, or moesaic convert makes "
				"blocks or groups of them",
				c->format->name, (long long)rows, (long long)columns,
				MOE_REQUANTISE_BLOCK);
	return MOE_OK;
}

bool moe_requantise_whole_blocks(const struct moe_coding *c, int64_t n0, int64_t n, int64_t N,
				 int64_t k0, int64_t k, int64_t K)
{
	int64_t rows = c->rows;

	return n0 % rows == 0 && k0 % c->group == 0 && ((n0 + n) % rows == 0 || n0 + n == N) &&
	       ((k0 + k) % c->group == 0 || k0 + k == K);
}

/* Codes of one scale, k apart, at [n0, k0] of a weight or a whole matrix. */
struct block {
	int64_t n0, n, k0, k;
	const uint8_t *codes;
	float scale;
	int8_t zero;
};

/* 4 or 8 codes at once where the panel has them beside each other. */
static void put_row(uint8_t *codes, int bits, int64_t row, int64_t k0, int64_t k,
		    const uint8_t *code)
{
	int64_t i = 0, step = bits == 8 ? 4 : 8;

	for (; k0 % step == 0 && i + step <= k; i += step) {
		uint32_t low, high = 0;

		memcpy(&low, code + i, sizeof low);
		if (bits == 4)
			memcpy(&high, code + i + 4, sizeof high);
		low |= high << 4;
		memcpy(codes + (k0 + i) / step * 64 + row * 4, &low, sizeof low);
	}
	for (; i < k; i++) {
		int shift = 0;
		int64_t at = bits == 8 ? moe_code_byte8(row, k0 + i)
				       : moe_code_byte4(row, k0 + i, &shift);
		int keep = bits == 8 ? 0 : codes[at] & 0xf0 >> shift;

		codes[at] = (uint8_t)(keep | code[i] << shift);
	}
}

/* Columns beyond k have the value 0. */
static void put_padding(const struct moe_weight *W, uint8_t *codes, int64_t row, int8_t zero)
{
	int64_t kp = moe_round_up(W->k, MOE_PACK_K);
	uint8_t code[MOE_PACK_K];

	memset(code, moe_zero_code(W->coding.format, (float)zero), sizeof code);
	put_row(codes, W->coding.format->bits, row, W->k, kp - W->k, code);
}

/* What of the block lies in W, whose first element is [n0, k0] of what the block is in. */
static void put_block(const struct moe_weight *W, int64_t n0, int64_t k0, const struct block *b)
{
	const struct moe_coding *c = &W->coding;
	struct moe_coded_layout l = moe_coded_layout(c, W->k);
	int64_t first = MOE_MAX(b->n0 - n0, 0), last = MOE_MIN(b->n0 + b->n - n0, W->n);
	int64_t from = MOE_MAX(b->k0 - k0, 0), to = MOE_MIN(b->k0 + b->k - k0, W->k);
	int64_t group = (c->phase + from) / c->group;

	if (from >= to)
		return;
	for (int64_t i = first; i < last; i++) {
		uint8_t *panel = (uint8_t *)W->data + (size_t)(i / MOE_PACK_N) * l.stride;
		int64_t row = i % MOE_PACK_N;

		moe_scale_put(panel, c->scale, group * MOE_PACK_N + row, b->scale);
		if (c->zero)
			panel[l.zero + (size_t)(group * MOE_PACK_N + row)] = (uint8_t)b->zero;
		put_row(panel + l.codes, c->format->bits, row, from, to - from,
			b->codes + (n0 + i - b->n0) * b->k + (k0 + from - b->k0));
		if (to == W->k && W->k % MOE_PACK_K)
			put_padding(W, panel + l.codes, row, c->zero ? b->zero : 0);
	}
}

/* Rows of an array that begins at row n0. */
struct rows {
	const float *src;
	int64_t n0, ld;
};

static const float *rows_source(const void *user, int64_t n0, int64_t n, int64_t k0, int64_t k,
				float *buffer, int64_t *ld)
{
	const struct rows *r = user;

	(void)n, (void)k, (void)buffer;
	*ld = r->ld;
	return r->src + (n0 - r->n0) * r->ld + k0;
}

void moe_requantise_rows(const struct moe_weight *W, int64_t n0, int64_t n1, const float *src,
			 int64_t ld)
{
	struct moe_coded_matrix m = {
		.n = W->n, .k = W->k, .windows = 1, .window = { { W, 0, 0 } }
	};
	struct rows r = { src, n0, ld };

	moe_requantise_matrix(&m, n0, n1, rows_source, &r);
}

void moe_requantise_matrix(const struct moe_coded_matrix *m, int64_t n0, int64_t n1,
			   moe_block_source *source, const void *user)
{
	const struct moe_coding *c = &m->window[0].weight->coding;
	uint8_t codes[MOE_REQUANTISE_BLOCK];
	float buffer[MOE_REQUANTISE_BLOCK];
	int64_t rows = c->rows;

	MOE_ASSERT(n0 % rows == 0);
	for (int64_t n = n0; n < n1; n += rows)
		for (int64_t k = 0; k < m->k; k += c->group) {
			struct block b = { .n0 = n,
					   .n = MOE_MIN(rows, n1 - n),
					   .k0 = k,
					   .k = MOE_MIN(c->group, m->k - k),
					   .codes = codes };
			int64_t ld;
			const float *x = source(user, n, b.n, k, b.k, buffer, &ld);

			b.scale = moe_quantise_block(c, b.n, b.k, x, ld, codes, b.k, &b.zero);
			for (int i = 0; i < m->windows; i++)
				put_block(m->window[i].weight, m->window[i].n0, m->window[i].k0,
					  &b);
		}
}

void moe_plain_values(const struct moe_weight *W, int64_t n0, int64_t n, int64_t k0, int64_t k,
		      float *dst, int64_t ld)
{
	int64_t block = moe_layout_k(W->layout);
	int64_t stride = moe_packed_stride(moe_round_up(W->k, MOE_PACK_K));
	size_t size = moe_dtype_size(W->dtype);

	for (int64_t i = n0; i < n0 + n; i++, dst += ld) {
		const char *panel = (const char *)W->data + (size_t)(i / MOE_PACK_N * stride) * size;

		if (W->layout == MOE_LAYOUT_ROWS) {
			moe_to_f32(dst, (const char *)W->data + (size_t)(i * W->k + k0) * size,
				   W->dtype, (size_t)k);
			continue;
		}
		for (int64_t j = k0, next; j < k0 + k; j = next) {
			const char *from = panel + (size_t)moe_panel_at(W->layout, i % MOE_PACK_N, j) * size;
			uint16_t run[16];

			next = MOE_MIN(k0 + k, (j / block + 1) * block);
			if (W->layout == MOE_LAYOUT_PAIRS16) {
				for (int64_t l = 0; l < next - j; l++)
					memcpy(run + l, from + 2 * l * (int64_t)sizeof *run, sizeof *run);
				from = (const char *)run;
			}
			moe_to_f32(dst + j - k0, from, W->dtype, (size_t)(next - j));
		}
	}
}

/* ---- reading ---- */

/* The window that has an element. */
static const struct moe_coded_part *window_at(const struct moe_coded_matrix *m, int64_t n,
					      int64_t k)
{
	for (int i = 0; i < m->windows; i++) {
		const struct moe_coded_part *w = &m->window[i];

		if (n >= w->n0 && n < w->n0 + w->weight->n && k >= w->k0 &&
		    k < w->k0 + w->weight->k)
			return w;
	}
	return NULL;
}

static const struct moe_coded_matrix *matrix_of(const struct moe_quantised *q)
{
	return q->codes.data;
}

static void codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k, uint8_t *out)
{
	while (k > 0) {
		const struct moe_coded_part *w = window_at(matrix_of(q), row, k0);
		struct moe_coded_panel p = moe_coded_panel(w->weight, (row - w->n0) / MOE_PACK_N);
		int64_t n = MOE_MIN(k, w->k0 + w->weight->k - k0), at = k0 - w->k0;
		int64_t inside = (row - w->n0) % MOE_PACK_N;

		for (int64_t i = 0; i < n; i++)
			*out++ = moe_code_at(p.codes, q->coding.format->bits, inside, at + i);
		k0 += n;
		k -= n;
	}
}

/* Of the group's first column, in whichever window that is. */
static const struct moe_coded_part *group_at(const struct moe_quantised *q, int64_t row,
					     int64_t group, int64_t *at)
{
	const struct moe_coded_part *w = window_at(matrix_of(q), row, group * q->coding.group);
	const struct moe_coding *c = &w->weight->coding;

	*at = (c->phase + group * q->coding.group - w->k0) / c->group * MOE_PACK_N +
	      (row - w->n0) % MOE_PACK_N;
	return w;
}

static float scale(const struct moe_quantised *q, int64_t row, int64_t group)
{
	int64_t at;
	const struct moe_coded_part *w = group_at(q, row, group, &at);

	return moe_scale_at(moe_coded_panel(w->weight, (row - w->n0) / MOE_PACK_N).scale,
			    q->coding.scale, at);
}

static int zero(const struct moe_quantised *q, int64_t row, int64_t group)
{
	int64_t at;
	const struct moe_coded_part *w = group_at(q, row, group, &at);

	return ((const int8_t *)moe_coded_panel(w->weight, (row - w->n0) / MOE_PACK_N).zero)[at];
}

struct moe_quantised moe_coded_read(const struct moe_coded_matrix *m)
{
	static const struct moe_code_reader reader = { codes, scale, zero };
	struct moe_quantised q = { .coding = m->window[0].weight->coding,
				   .reader = &reader,
				   .n = m->n,
				   .k = m->k,
				   .codes.data = (void *)m };

	q.coding.phase = 0;
	return q;
}
