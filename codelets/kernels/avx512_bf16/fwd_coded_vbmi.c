/* SPDX-License-Identifier: Apache-2.0 */
/* FP8 whose 16 rows of a panel share their scales: blocks of 128 rows, or one scale. The CPU's own prefetcher is best
 * here: m = 1 with weights in DRAM, Zen 4, 1.8 against 1.5 of bf16's speed. */
#pragma GCC target("avx512vbmi")
#include "codelets/kernels/avx512_bf16/decode_vbmi.h"
#include "codelets/kernels/avx512_bf16/fwd_coded.h"

/* Codes of 16 rows x 4 columns: rows 4 L, 4 L + 1 in lane L of one vector, 4 L + 2, 4 L + 3 of the other */
INLINE void look_up_block(const struct tables *t, const uint8_t *codes, __m512i out[2])
{
	__m512i b = _mm512_load_si512(codes), low, high;

	__asm__("" : "+v"(b)); /* lookups overwrite their index: a copy of the register, not another load */
	low = _mm512_permutex2var_epi8(t->low[0], b, t->low[1]);
	high = _mm512_permutex2var_epi8(t->high[0], b, t->high[1]);
	high = _mm512_ternarylogic_epi64(high, b, _mm512_set1_epi8((char)0x80), 0x78); /* high ^ (b & sign) */
	out[0] = _mm512_unpacklo_epi8(low, high);
	out[1] = _mm512_unpackhi_epi8(low, high);
}

/* From sums of columns 0..3 (vectors 0, 1) and 4..7 (2, 3) of a step to those of fwd.c: 4 sums of a row in each lane */
INLINE void order_sums(__m512 sum[4])
{
	__m512 row[4], half[4];

#pragma GCC unroll 2
	for (int h = 0; h < 2; h++) {
		__m512d a = _mm512_castps_pd(sum[h]), b = _mm512_castps_pd(sum[2 + h]);

		row[2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
		row[2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
	}
#pragma GCC unroll 2
	for (int h = 0; h < 2; h++) { /* lane L of row[r] is row 4 L + r: lanes are transposed */
		half[h] = _mm512_shuffle_f32x4(row[2 * h], row[2 * h + 1], 0x44);
		half[2 + h] = _mm512_shuffle_f32x4(row[2 * h], row[2 * h + 1], 0xee);
	}
#pragma GCC unroll 2
	for (int h = 0; h < 2; h++) {
		sum[2 * h] = _mm512_shuffle_f32x4(half[2 * h], half[2 * h + 1], 0x88);
		sum[2 * h + 1] = _mm512_shuffle_f32x4(half[2 * h], half[2 * h + 1], 0xdd);
	}
}

INLINE __m512i columns4(const uint16_t *x)
{
	__m512i v;

	__asm__("vpbroadcastq %1, %0" : "=v"(v) : "m"(*(const uint64_t *)(const void *)x));
	return v;
}

static inline bool same_scales(const struct moe_coded_panel *p)
{
	const float *s = (const float *)(const void *)p->scale;

	for (int64_t g = 0; g < p->groups; g++, s += 16)
		if (_mm512_cmp_ps_mask(_mm512_load_ps(s), _mm512_set1_ps(*s), _CMP_EQ_OQ) != 0xffff)
			return false;
	return true;
}

/*
 * A panel, block by block of 4 columns, in the order of the codes: no shuffle brings 8 columns of a row together.
 * elements, y: coded_finish
 */
INLINE void few_panel(const int rows, const int sets, const struct moe_coded_panel *p, const struct coded_call *c,
		      int64_t elements, float *y)
{
	const float *values = p->coding->format->values,
		    *scale = (const float *)(const void *)p->scale;
	int64_t kp = c->seg->k;
	const uint8_t *codes = p->codes;
	const uint16_t *x = (const uint16_t *)c->seg->x + c->seg->col * rows;
	__m512 sum[2][FWD_ROWS][4];

	coded_begin(rows, sets, sum);
	for (int64_t group = 0, k = 0; k < kp; group++) {
		int64_t end = coded_end(p, group, kp);
		struct tables t = tables_of(values, _mm512_set1_ps(scale[group * 16]));

		for (; k < end; k += 8 * sets)
#pragma GCC unroll 2
			for (int s = 0; s < sets; s++, x += 8 * rows)
#pragma GCC unroll 2
				for (int b = 0; b < 2; b++, codes += 64) {
					__m512i w[2];

					look_up_block(&t, codes, w);
#pragma GCC unroll 4
					for (int i = 0; i < rows; i++) {
						__m512i v = columns4(x + 8 * i + 4 * b);
						__m512 *to = sum[s][i] + 2 * b;

						to[0] = dot_bf16(to[0], w[0], v);
						to[1] = dot_bf16(to[1], w[1], v);
					}
				}
	}
#pragma GCC unroll 2
	for (int s = 0; s < sets; s++)
#pragma GCC unroll 4
		for (int i = 0; i < rows; i++)
			order_sums(sum[s][i]);
	coded_finish(rows, sets, sum, c, elements, y);
}

/*
 * A run of panels. What waits for DRAM fills the CPU's queues, so each instruction between two panels is a piece of the
 * next one that is not asked for yet: calls per panel cost 7 to 10 % at one row, and so does anything kept in memory, as
 * a panel pushes it out of L1.
 */
INLINE int64_t few_run(const int rows, const int sets, const struct coded_call *c, int64_t count,
		       const struct moe_panel_run *run)
{
	struct moe_coded_panel p = *c->p;
	int64_t i = 0;

	for (; i < count && same_scales(&p); i++) {
		few_panel(rows, sets, &p, c, i * run->lora_stride, c->y + i * run->step);
		p.scale += run->stride;
		p.codes += run->stride;
	}
	return i;
}

/* look_up */
INLINE void memory_look_up(const struct tables *t, const struct fwd_orders *o, const uint8_t *codes, const int h,
			   __m512i out[2])
{
	__m512i b = _mm512_permutex2var_epi32(_mm512_load_si512(codes), _mm512_load_si512(o->blocks[h]),
					      _mm512_load_si512(codes + 64));
	__m512i low = _mm512_permutex2var_epi8(t->low[0], b, t->low[1]);
	__m512i high = _mm512_permutex2var_epi8(t->high[0], b, t->high[1]);

	high = _mm512_ternarylogic_epi64(high, b, _mm512_load_si512(o->sign), 0x78); /* high ^ (b & sign) */
	out[0] = _mm512_unpacklo_epi8(low, high);
	out[1] = _mm512_unpackhi_epi8(low, high);
}

/* With tables in memory */
INLINE void more(const int rows, const bool keep, const struct coded_call *c)
{
	const struct moe_coded_panel *p = c->p;
	const float *values = p->coding->format->values,
		    *scale = (const float *)(const void *)p->scale;
	int64_t kp = c->seg->k;
	const uint8_t *codes = p->codes;
	const uint16_t *x = (const uint16_t *)c->seg->x + c->seg->col * rows;
	struct tables *t = (struct tables *)(void *)c->tables->table;
	const struct fwd_orders *o = fwd_orders();
	__m512 sum[2][FWD_ROWS][4];
	uint16_t *kept = c->keep;

	coded_begin(rows, 1, sum);
	for (int64_t group = 0, k = 0; k < kp; group++) {
		int64_t end = coded_end(p, group, kp);

		*t = tables_of(values, _mm512_set1_ps(scale[group * 16]));
		for (; k < end; k += 8, codes += 128, x += 8 * rows) {
			__m512i w[4];

#pragma GCC unroll 2
			for (int h = 0; h < 2; h++)
				memory_look_up(t, o, codes, h, w + 2 * h);
			coded_step(rows, sum[0], w, x, keep, kept);
			kept += keep ? 128 : 0;
		}
	}
	coded_finish(rows, 1, sum, c, 0, c->y);
}

#define FEW(rows, sets)                                                                            \
	NOINLINE int64_t run_##rows(const struct coded_call *c, int64_t count, const struct moe_panel_run *run) \
	{                                                                                          \
		return few_run(rows, sets, c, count, run);                                         \
	}
#define MORE(rows, keep)                                                                           \
	NOINLINE void more_##rows##_##keep(const struct coded_call *c)                             \
	{                                                                                          \
		more(rows, keep, c);                                                               \
	}
FEW(1, 2)
FEW(2, 1)
FEW(3, 1)
FEW(4, 1)
MORE(4, 1)
MORE(5, 0)
MORE(5, 1)
MORE(6, 0)
MORE(6, 1)

coded_fn avx512_bf16_fwd_magnitudes(int rows, bool keep, const struct moe_coded_panel *p)
{
	static const coded_fn of[2][FWD_ROWS + 1] = {
		{ NULL, NULL, NULL, NULL, NULL, more_5_0, more_6_0 },
		{ NULL, NULL, NULL, NULL, more_4_1, more_5_1, more_6_1 },
	};

	return p->coding->scale == MOE_F32 && same_scales(p) ? of[keep][rows] : NULL;
}

int64_t avx512_bf16_fwd_magnitudes_run(int rows, const struct coded_call *c, int64_t count, const struct moe_panel_run *run)
{
	return rows == 1   ? run_1(c, count, run)
	       : rows == 2 ? run_2(c, count, run)
	       : rows == 3 ? run_3(c, count, run)
			   : run_4(c, count, run);
}
