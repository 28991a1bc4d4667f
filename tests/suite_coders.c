/* SPDX-License-Identifier: Apache-2.0 */
/* Quantisers in vectors: the codes, scales and zeros of the plain ones bit by bit, in every table
 * of this CPU. */
#include "codelets/format.h"
#include "tests/child.h"
#include "tests/kernel_check.h"

#include <math.h>

const char moe_suite_name[] = "coders";

#define MOST_N 128
#define MOST_K 160

static float x[MOST_N * (MOST_K + 3)];

/* Ties and neighbours of ties, of integers, quarters and powers of two; what is tiny, huge, zero;
 * both signs. */
static float hard(int i)
{
	float v = (float)(i % 17 - 8) + (float)(i / 17 % 5) * .25f;

	switch (i / 85 % 8) {
	case 0:
		return v;
	case 1:
		return nextafterf(v, 1000);
	case 2:
		return nextafterf(v, -1000);
	case 3:
		return ldexpf(v, -i % 140);
	case 4:
		return ldexpf(v, -12);
	case 5:
		return i % 2 ? 0.0f : -0.0f;
	case 6:
		return v * 0x1p-149f;
	default:
		return v * .0625f;
	}
}

static void fill(int kind, int64_t count)
{
	for (int64_t i = 0; i < count; i++)
		switch (kind) {
		case 0:
			x[i] = (float)uniform() * .05f;
			break;
		case 1:
			x[i] = hard((int)(i * 7 + 3));
			break;
		case 2:
			x[i] = (float)uniform() *
			       ldexpf(1, (int)(uniform() * 60)); /* scales from tiny to huge */
			break;
		case 3:
			x[i] = 0;
			break;
		case 4:
			x[i] = (float)uniform() * 0x1p-140f;
			break;
		default:
			x[i] = (float)uniform() * 0x1p126f;
		}
}

struct made {
	uint8_t codes[MOST_N * MOST_K];
	float scale;
	int8_t zero;
};

static void make(struct made *m, const struct moe_coding *c, int64_t n, int64_t k)
{
	memset(m, 0, sizeof *m);
	m->scale = moe_quantise_block(c, n, k, x, k + 3, m->codes, MOST_K, &m->zero);
}

static void one_coding(const struct moe_kernels *t, const struct moe_coding *c, int64_t n,
		       int64_t k)
{
	static struct made plain, vector;

	for (int kind = 0; kind < 6; kind++) {
		fill(kind, n * (k + 3));
		moe_coders_use(NULL);
		make(&plain, c, n, k);
		moe_coders_use(t->coders);
		make(&vector, c, n, k);
		if (!CHECK(!memcmp(plain.codes, vector.codes, sizeof plain.codes) &&
			   !memcmp(&plain.scale, &vector.scale, sizeof plain.scale) &&
			   plain.zero == vector.zero))
			printf("  %s, %s, kind %d, [%d, %d]\n", t->name, c->format->name, kind,
			       (int)n, (int)k);
	}
}

static void test_blocks(void)
{
	static const int64_t widths[] = { 1, 7, 16, 32, 33, 128, 160 };
	static const enum moe_dtype scales[] = { MOE_F32, MOE_BF16, MOE_F16 };
	int tables = 0;

	for (int i = 0; moe_kernels_list[i]; i++) {
		const struct moe_kernels *t = moe_kernels_list[i];

		if (!t->supported() || !t->coders || moe_kernels_enable(t) != MOE_OK)
			continue;
		tables++;
		for (int f = 0; moe_format_list[f]; f++)
			for (size_t w = 0; w < MOE_COUNT(widths); w++)
				for (size_t s = 0; s < MOE_COUNT(scales) + 1; s++) {
					struct moe_coding c =
						moe_format_coding(moe_format_list[f], widths[w]);

					if (s < MOE_COUNT(scales)) /* another dtype: codes are made
								      again at its scale */
						c.scale = scales[s];
					one_coding(t, &c, c.zero ? 1 : MOE_MIN(c.rows, 5),
						   widths[w]);
					if (c.format->quantise_zero) {
						c.zero = true;
						one_coding(t, &c, 1, widths[w]);
					}
				}
	}
	CHECK(tables >= 1);
	moe_coders_use(NULL);
}

/* Values that are not finite make a scale that is not, whichever way they are found. */
static void test_not_finite(void)
{
	const struct moe_coding c = moe_format_coding(moe_format_find("int8"), 40);
	uint8_t codes[40];
	int8_t zero;

	for (int i = 0; moe_kernels_list[i]; i++) {
		const struct moe_kernels *t = moe_kernels_list[i];

		if (!t->supported() || !t->coders || moe_kernels_enable(t) != MOE_OK)
			continue;
		moe_coders_use(t->coders);
		for (int at = 0; at < 40; at++)
			for (int kind = 0; kind < 3; kind++) {
				fill(0, 40);
				x[at] = kind == 0 ? NAN : kind == 1 ? INFINITY : -INFINITY;
				CHECK(isnan(
					moe_quantise_block(&c, 1, 40, x, 40, codes, 40, &zero)));
			}
	}
	moe_coders_use(NULL);
}

const struct moe_test moe_suite_tests[] = {
	{ "blocks of every format, width and dtype of scales", test_blocks },
	{ "values that are not finite", test_not_finite },
	{ NULL, NULL },
};
