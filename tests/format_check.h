/* SPDX-License-Identifier: Apache-2.0 */
/* Random quantised matrices of every format and shape of scales. */
#ifndef MOE_TESTS_FORMAT_CHECK_H
#define MOE_TESTS_FORMAT_CHECK_H

#include "codelets/kernels/packed/coded.h"
#include "tests/kernel_check.h"

/* Codes one byte each, scales in their own dtype: what a test fills in. */
static inline void bytes_codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k,
			       uint8_t *out)
{
	memcpy(out, (const uint8_t *)q->codes.data + row * q->k + k0, (size_t)k);
}

static inline int bytes_zero(const struct moe_quantised *q, int64_t row, int64_t group)
{
	return ((const int8_t *)q->zero.data)[row * moe_groups(&q->coding, q->k) + group];
}

static const struct moe_code_reader bytes_reader = { bytes_codes, moe_stored_scale_at, bytes_zero };

/* Every code but NaN is as likely. scale: about the size of a trained weight's, a fifth of them below 0. */
static inline struct moe_quantised random_quantised(const struct moe_format *f, int64_t n,
						    int64_t k, int64_t group, int64_t rows,
						    enum moe_dtype scale, bool zero)
{
	struct moe_quantised q = { .coding = { f, scale, zero, group, 0, MOE_COMPUTE_BF16, rows },
				   .reader = &bytes_reader,
				   .n = n,
				   .k = k };
	int64_t groups = moe_groups(&q.coding, k), count = (n + rows - 1) / rows * groups;
	uint8_t *codes = mem((size_t)(n * k));
	void *scales = mem((size_t)count * moe_dtype_size(scale));
	int8_t *zeros = mem((size_t)(n * groups));
	double largest = 0;

	for (int i = 0; i < 1 << f->bits; i++)
		largest = MOE_MAX(fabs((double)f->values[i]), largest); /* of a NaN and it, it */
	for (int64_t i = 0; i < n * k; i++)
		do
			codes[i] = (uint8_t)((int)(uniform() * 0x1p20) & ((1 << f->bits) - 1));
		while (f->values[codes[i]] != f->values[codes[i]]);
	for (int64_t i = 0; i < count; i++)
		moe_scale_put(scales, scale, i,
			      (float)((.5 + fabs(uniform())) * (i % 5 == 4 ? -1 : 1) * 0x1p-6 / largest));
	for (int64_t i = 0; i < n * groups; i++)
		zeros[i] = (int8_t)(uniform() * 8);
	q.codes =
		(struct moe_array){ .data = codes, .dtype = MOE_U8, .ndim = 2, .shape = { n, k } };
	q.scale = (struct moe_array){
		.data = scales, .dtype = scale, .ndim = 2, .shape = { count / groups, groups }
	};
	q.zero = (struct moe_array){
		.data = zeros, .dtype = MOE_I8, .ndim = 2, .shape = { n, groups }
	};
	return q;
}

/* Every format with the scales that it can have; n and k as wanted. */
static inline void each_quantised(int64_t n, int64_t k, void (*run)(const struct moe_quantised *q))
{
	static const int64_t groups[] = { 32, 64, 128, 0 };
	static const enum moe_dtype scales[] = { MOE_F32, MOE_BF16, MOE_F16, MOE_SCALE_UE8M0 };

	for (int i = 0; moe_format_list[i]; i++)
		for (size_t g = 0; g < MOE_COUNT(groups); g++) {
			const struct moe_format *f = moe_format_list[i];
			int64_t group = groups[g] ? groups[g] : k,
				rows = group == 128 && f->bits == 8 ? 128 : 1;
			int kept = block_count;
			struct moe_quantised q =
				random_quantised(f, n, k, group, rows, scales[(g + (size_t)i) % 4],
						 f->bits == 4 && g % 2);

			run(&q);
			release_to(kept);
		}
}

/* All rows of a window as f32. */
static inline float *dequantised(const struct moe_quantised *q, const struct moe_coded_window *w)
{
	float *p = floats(w->n * w->k);

	for (int64_t i = 0; i < w->n; i++)
		moe_dequantise_row(q, w->n0 + i * w->step, w->k0, w->k, p + i * w->k);
	return p;
}

static inline struct moe_weight coded_weight(const struct moe_quantised *q,
					     const struct moe_coded_window *w, enum moe_layout layout)
{
	struct moe_coding c = moe_coding_of(q, w);
	struct moe_weight W = { .data = mem(moe_coded_bytes(&c, w->n, w->k)) };

	moe_coded_pack(layout, &W, q, w);
	return W;
}

#endif
