/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ops in plain C that the compiler vectorises: compiled once per kernel folder with its flags
 * (MOE_ISA is the folder's name), so each table has its own. Contracts: codelets/kernels/kernels.h.
 */
#ifndef MOE_CODELETS_KERNELS_ELEMENTWISE_H
#define MOE_CODELETS_KERNELS_ELEMENTWISE_H

#include "codelets/kernels/kernels.h"

#define MOE_OWN_NAME(isa, name) isa##_##name
#define MOE_OWN_EXPAND(isa, name) MOE_OWN_NAME(isa, name)
/* OWN(rope) is avx2_rope when compiled for avx2. */
#define OWN(name) MOE_OWN_EXPAND(MOE_ISA, name)

/* norm.c */
void OWN(rmsnorm)(int m, int n, const float *x, int64_t ldx, const float *w, float eps, float *y,
		  int64_t ldy);
void OWN(rmsnorm_bwd)(int m, int n, const float *x, int64_t ldx, const float *w, float eps,
		      const float *dy, int64_t lddy, float *dx, int64_t lddx, bool accumulate);

/* rope.c */
void OWN(rope)(int m, int heads, int dim, float *x, int64_t ld, const int32_t *position,
	       const float *cs, int direction);

/* swiglu.c */
void OWN(swiglu)(int64_t n, const float *gate, const float *up, float *h);
void OWN(swiglu_bwd)(int64_t n, const float *gate, const float *up, const float *dh, float *dgate,
		     float *dup);

/* swiglu_rows.c: for tables of tiles (packed/tiles.h) */
struct moe_swiglu_rows;
void OWN(swiglu_rows)(const struct moe_swiglu_rows *r, float *g, const float *u);
void OWN(swiglu_rows_bwd)(const struct moe_swiglu_rows *r, const float *dh, int64_t ld_dh,
			  float *dgate, float *dup, float *h, float *dgw);

/* glu.c, and for tables of tiles glu_rows.c */
void OWN(glu)(const struct moe_glu *f, int64_t n, const float *gate, const float *up, float *h);
void OWN(glu_bwd)(const struct moe_glu *f, int64_t n, const float *gate, const float *up,
		  const float *dh, float *dgate, float *dup);
void OWN(glu_rows)(const struct moe_swiglu_rows *r, float *g, const float *u);
void OWN(glu_rows_bwd)(const struct moe_swiglu_rows *r, const float *dh, int64_t ld_dh,
		       float *dgate, float *dup, float *h, float *dgw);

/* The fields of struct moe_tiles that are filled in from here. */
#define MOE_ELEMENTWISE_TILES .glu = OWN(glu_rows), .glu_bwd = OWN(glu_rows_bwd)

/* softmax.c: for tables of tiles (packed/softmax.h) */
struct moe_score_tile;
struct moe_softmax_state;
void OWN(softmax_weights)(const struct moe_score_tile *t, bool first, float *s,
			  struct moe_softmax_state *state);
void OWN(softmax_finish)(int m, const struct moe_softmax_state *state, float *out, int64_t ld,
			 float *lse);
float OWN(softmax_dot)(int n, const float *a, const float *b);
void OWN(softmax_backward)(const struct moe_score_tile *t, bool by_column, const float *lse,
			   const float *centre, float *p, float *d);

/* loss.c */
void OWN(ce_partial)(int m, int64_t v0, int64_t v1, const float *logits, int64_t ld,
		     const int32_t *label, float *max, float *sum, float *tgt);
void OWN(ce_bwd)(int m, int64_t v0, int64_t v1, float *logits, int64_t ld, const int32_t *label,
		 const float *lse, float scale);

/* rows.c */
void OWN(sum_rows)(int64_t n, int count, const float *const *row, const float *w, float *out);
void OWN(to_bf16)(int m, int64_t n, const float *x, int64_t ldx, uint16_t *dst, int64_t ld16);

/* One panel of 16 rows (those from `rows` on are zero) of scale * src, in a layout of blocks. */
void OWN(pack_rows)(enum moe_layout layout, int rows, int64_t k, int64_t kp, const float *src, int64_t ld,
		    float scale, uint16_t *dst);

/* codes.c (moe_coders of codelets/format.h) */
uint32_t OWN(largest)(int64_t n, int64_t k, const float *x, int64_t ld);
void OWN(range)(int64_t k, const float *x, float *least, float *largest);
void OWN(integers)(int64_t k, const float *x, float scale, int least, int most, int add, uint8_t *codes);
void OWN(e4m3)(int64_t k, const float *x, float scale, uint8_t *codes);
void OWN(e2m1)(int64_t k, const float *x, float scale, uint8_t *codes);

/* optimizer.c */
double OWN(sum_squares)(int64_t n, const float *g);
void OWN(adamw)(int64_t n, float *p, const float *g, float *m, float *v, const struct moe_adamw *o);

/* The table's fields that are filled in from here. */
#define MOE_ELEMENTWISE_KERNELS                                                                    \
	.rmsnorm = OWN(rmsnorm), .rmsnorm_bwd = OWN(rmsnorm_bwd), .rope = OWN(rope),               \
	.swiglu = OWN(swiglu), .swiglu_bwd = OWN(swiglu_bwd),                                      \
	.glu = OWN(glu), .glu_bwd = OWN(glu_bwd),                                                  \
	.ce_partial = OWN(ce_partial), .ce_bwd = OWN(ce_bwd), .sum_rows = OWN(sum_rows),           \
	.to_bf16 = OWN(to_bf16), .sum_squares = OWN(sum_squares), .adamw = OWN(adamw)

#endif
