/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel table: all arithmetic of a training step, one table of function pointers per
 * instruction set (codelets/kernels/<isa>/kernels.c defines `const struct moe_kernels
 * moe_kernels_<isa>`).
 *
 * Kernels know neither StarPU nor the engine. They are called by one worker at a time on disjoint
 * outputs, allocate nothing, return void and may only assert. Temporary memory comes from the
 * caller: `scratch` has at least the bytes that the op's *_scratch function returns for the same
 * sizes.
 *
 * Matrices are row-major; "[m, n]" is m rows of n. Activations are float. Weights are opaque to the
 * caller (struct moe_weight) and packed once by the same table.
 *
 * Determinism: a GEMM over the rows of a weight (or over its columns in the backward) is always
 * issued in chunks of MOE_CHUNK, so that slicing the work differently never changes the shape of a
 * call nor a bit.
 */
#ifndef MOE_CODELETS_KERNELS_H
#define MOE_CODELETS_KERNELS_H

#include "codelets/format.h"
#include "codelets/kernels/dropout.h"
#include "engine/base.h"

/* Fixed widths that results depend on; never derived from worker counts. */
#define MOE_CHUNK 256	     /* columns of one GEMM call and of one partial sum */
#define MOE_TOKEN_BLOCK 64   /* tokens of one dense task */
#define MOE_VOCAB_CHUNK 4096 /* vocabulary rows of one LM head task */

/* Order of a packed weight's elements. Files on disk hold the plain form only. */
enum moe_layout {
	MOE_LAYOUT_ROWS,     /* [n, k] in the source's dtype */
	MOE_LAYOUT_BLOCKS8,  /* bf16, 16 n x 8 k blocks (packed/tiles.h) */
	MOE_LAYOUT_BLOCKS32, /* bf16, 16 n x 32 k blocks */
	MOE_LAYOUT_PAIRS16,  /* blocks of 16 k, two rows n side by side */
};

/* What a weight is used for: GEMM may round to bf16, EXACT (routers) keeps the source's precision.
 */
enum moe_weight_use { MOE_USE_GEMM, MOE_USE_EXACT };

/* Which of the two thin matrices: their packed forms are padded differently. */
enum moe_lora_side { MOE_LORA_A, MOE_LORA_B };

/*
 * A packed [n, k] weight, y = W x. Memory belongs to whoever called pack. Quantised ones (coding.format) are
 * packed by moe_coded_pack (packed/coded.h) and read by linear, linear_bwd and the expert ops of every table
 * as plain ones are; nothing trains or transposes them.
 */
struct moe_weight {
	void *data;
	enum moe_layout layout;	  /* of a quantised weight: what its codes decode to */
	enum moe_dtype dtype;	  /* of the packed elements */
	struct moe_coding coding; /* format NULL: plain */
	int64_t n, k;
};

/*
 * Low-rank pair of a dense layer, y += scale B (A x); rank 0 = none. a [r, k], b [n, r]. drop: A multiplies masked
 * rows of x, of which the first is the micro-batch's row `token`; its first key counts. NULL: none.
 */
struct moe_lora {
	const float *a, *b;
	int r;
	float scale;
	const struct moe_dropout *drop;
	int64_t token;
};

/*
 * How gate and up make h: h = (u + shift) g sigmoid(alpha g), with g = min(gate, limit) and u = up cut to
 * -limit..limit; where a value was cut its gradient is 0. limit may be infinite. limit 0: silu(gate) up, and alpha and
 * shift are not looked at.
 */
struct moe_glu {
	float limit, alpha, shift;
};

static inline bool moe_glu_plain(const struct moe_glu *f)
{
	return !(f->limit > 0);
}

/*
 * One expert's share in one part: intermediate columns [0, I) of the part.
 * LoRA (r = 0: none): a_gu [ra, H] holds gate's A, then up's A unless they are shared (ra = r or
 * 2r); gate_b, up_b [I, r]; down_a [r, I]; down_b [H, r].
 */
struct moe_expert {
	struct moe_weight gate, up, down; /* [I, H], [I, H], [H, I] */
	const float *a_gu, *gate_b, *up_b, *down_a, *down_b;
	/* the same as lora_pack left them (B times scale); NULL where the table has no lora_pack.
	 * up_a_packed = gate_a_packed where they are shared */
	const void *gate_a_packed, *up_a_packed, *gate_b_packed, *up_b_packed, *down_a_packed,
		*down_b_packed;
	/*
	 * For a backward that multiplies by transposed copies with the forward's kernels: W^T [H, I], [H, I],
	 * [I, H] of weight_transpose, and the LoRA matrices as lora_pack_t left them. gate_t.data NULL: it
	 * multiplies by the weights themselves. All backward ops of a pass see the same.
	 */
	struct moe_weight gate_t, up_t, down_t;
	const void *gate_a_t, *up_a_t, *gate_b_t, *up_b_t, *down_a_t, *down_b_t;
	int r, ra;
	float scale;
	struct moe_glu glu;
	/* whose weights the same op reads next, to be prefetched; NULL: not known. Nothing but its
	 * weights is looked at. */
	const struct moe_expert *next;
};

/* What x may be made into: DEFAULT for plain weights. */
static inline enum moe_compute moe_expert_compute(const struct moe_expert *e)
{
	return MOE_MAX(MOE_MAX(e->gate.coding.compute, e->up.coding.compute), e->down.coding.compute);
}

/*
 * The rows (token, slot pairs) of one expert in one micro-batch: everything the ops below read and
 * write, with m = rows. Pointers are to the expert's first row.
 *
 * H', I', r', ra' are the widths padded as the table says (moe_width, moe_rank_width). Arrays of
 * void are the table's own: elements of panel_bytes (panel, u_panel, h, dgate, dup) or kept_bytes
 * (u, gate, up).
 */
struct moe_expert_rows {
	int m, T, H, I;
	const int32_t *token;  /* [m] row of x and grad_out */
	const float *weight;   /* [m] routing weight */
	const float *x;	       /* [T, H] of the whole micro-batch; tables with x16 don't read it */
	const uint16_t *x16;   /* [T, H'] the same in bf16; NULL for tables without x16 */
	const float *grad_out; /* [T, H] */
	void *panel;	       /* [m, H'] gathered x (forward) or grad_out (backward) */
	void *u, *u_panel;     /* [m, ra'] x A_gu^T: kept, and as operand of gate_up */
	void *gate, *up;       /* [m, I'] kept for the backward */
	void *h;	       /* [m, I'] */
	float *v_part;	       /* [chunks of I][part_rows][r'] partial h A_down^T */
	float *v;	       /* [m, r'] their sum, kept: written by expert_down where c0 = 0 */
	float *z;	       /* [m, r'] grad_out B_down (without the routing weight) */
	void *dgate, *dup;     /* [m, I'] */
	float *dgw_part;       /* [chunks of I][part_rows] partial routing-weight gradients */
	float *w_part,
		*wg; /* [chunks of I][part_rows][2r'] partial dgate B_gate | dup B_up; [m, 2r'] */
	float *y;    /* [m, H'] output rows, later grad_x rows */
	size_t part_rows; /* rows between two chunks' partial sums */
	struct moe_dropout drop; /* of LoRA's inputs: then y is scratch of gather, and masters are read */
};

/*
 * Gradients of one expert, same shapes as struct moe_expert. `first`: they are overwritten, else
 * they hold earlier micro-batches and are added to. NULL: not wanted.
 */
struct moe_expert_grad {
	bool first;
	float *a_gu, *gate_b, *up_b, *down_a, *down_b;
	float *gate, *up, *down; /* base weights of the part: [I, H], [I, H], [H, I] */
};

struct moe_attention {
	int T, heads, kv_heads, dim; /* q, o [T, heads, dim]; k, v [T, kv_heads, dim] */
	float scale;		     /* of q k^T */
	int past; /* keys before the first row's own: k and v have past + T rows. 0 in a backward */
	const int32_t *doc_start; /* [T] first key of the row's document: row i sees doc_start[i]..past + i */
	const float *q, *k, *v;
	float *o, *lse;	     /* lse [heads, T]: log-sum-exp of the scaled scores */
	const float *grad_o; /* [T, heads, dim] */
	float *centre;	     /* [heads, T]: sums of grad_o o, which centre the softmax's gradient */
	float *grad_q, *grad_k, *grad_v;
};

struct moe_adamw {
	double lr, beta1, beta2, eps, weight_decay; /* decoupled decay */
	int64_t step;				    /* 1 for the first update */
	float grad_scale;			    /* multiplies the gradient (clipping) */
};

struct moe_tiles;
struct moe_coders;

struct moe_kernels {
	const char *name;
	int rank;		 /* the supported table with the highest rank is the default */
	bool (*supported)(void); /* CPUID and what the operating system permits */
	/* Asks the operating system for what supported() found, once, before threads start
	 * (moe_kernels_enable); NULL: nothing to ask. */
	bool (*enable)(void);
	const struct moe_tiles *tiles; /* packed/tiles.h; NULL: the table has its own ways */
	const struct moe_coders *coders; /* codelets/format.h; NULL: the plain ones */

	/* ---- what the rows of an expert look like ---- */
	int width_pad, rank_pad; /* H, I and r are padded to multiples of these */
	int panel_bytes, kept_bytes;
	bool x16; /* x is read as bf16 rows of the padded width */

	/* ---- weights ---- */
	size_t (*weight_bytes)(enum moe_dtype src, int64_t n, int64_t k, enum moe_weight_use use);
	/* src rows may be unaligned; ld in elements. W is filled in, W->data is set by the caller
	 * before. src NULL: the description only (estimates). */
	void (*weight_pack)(struct moe_weight *W, const void *src, enum moe_dtype src_dtype,
			    int64_t n, int64_t k, int64_t ld, enum moe_weight_use use);
	/* Rows n0..n1 (n0 a multiple of 16) of a weight that was packed from F32, anew; the others stay. */
	void (*weight_repack)(const struct moe_weight *W, const float *src, int64_t n0, int64_t n1);
	/* dst [n1-n0, k] f32 of rows n0..n1 */
	void (*weight_unpack)(const struct moe_weight *W, int64_t n0, int64_t n1, float *dst);
	/* Bytes of a packed A [n = r, k] or B [n, k = r]; both functions NULL: masters are operands
	 * themselves. */
	size_t (*lora_bytes)(enum moe_lora_side side, int64_t n, int64_t k);
	/* Rows n0..n1 of scale * src [n, k] into dst, whose other rows stay; n0 a multiple of 16 */
	void (*lora_pack)(enum moe_lora_side side, const float *src, int64_t n, int64_t k, int64_t n0,
			  int64_t n1, float scale, void *dst);
	/* dst = W^T, packed: weight_bytes of [k, n]. NULL: the backward takes no transposed copies. */
	void (*weight_transpose)(const struct moe_weight *W, void *dst);
	/* lora_pack of src^T: dst, zero at first, has lora_bytes of the other side, [k, n]. NULL where
	 * weight_transpose is. */
	void (*lora_pack_t)(enum moe_lora_side side, const float *src, int64_t n, int64_t k, int64_t n0,
			    int64_t n1, float scale, void *dst);

	/* ---- dense layers ---- */
	size_t (*linear_scratch)(int m, int64_t n, int64_t k, int r);
	/* y[m, n1-n0] = x[m, k] W[n0:n1]^T + bias[n0:n1] + LoRA; ldx, ldy in elements; bias may be
	 * NULL; n0 is a multiple of MOE_CHUNK */
	void (*linear)(int m, const struct moe_weight *W, int64_t n0, int64_t n1, const float *x,
		       int64_t ldx, const float *bias, const struct moe_lora *lora, float *y,
		       int64_t ldy, void *scratch);
	/* dx[m, k] (+)= dy[m, n] W + LoRA's path; accumulate says whether dx is added to */
	void (*linear_bwd)(int m, const struct moe_weight *W, const float *dy, int64_t lddy,
			   const struct moe_lora *lora, float *dx, int64_t lddx, bool accumulate,
			   void *scratch);
	/* ga[r, k] += scale (dy B)^T x; gb[n, r] += scale dy^T (x A^T), over m rows */
	void (*linear_lora_grad)(int m, int64_t n, int64_t k, const float *x, int64_t ldx,
				 const float *dy, int64_t lddy, const struct moe_lora *lora,
				 float *ga, float *gb, void *scratch);
	size_t (*linear_grad_scratch)(int m, int64_t n, int64_t k);
	/* g[n, k] += dy^T x; use: whether the operands may be rounded */
	void (*linear_weight_grad)(int m, int64_t n, int64_t k, const float *x, int64_t ldx,
				   const float *dy, int64_t lddy, float *g, enum moe_weight_use use,
				   void *scratch);

	/* y = x / sqrt(mean(x^2) + eps) * w per row of n; rows of x (y) are ldx (ldy) apart */
	void (*rmsnorm)(int m, int n, const float *x, int64_t ldx, const float *w, float eps,
			float *y, int64_t ldy);
	/* dx (+)= gradient through rmsnorm at x */
	void (*rmsnorm_bwd)(int m, int n, const float *x, int64_t ldx, const float *w, float eps,
			    const float *dy, int64_t lddy, float *dx, int64_t lddx,
			    bool accumulate);
	/* In place on [m, heads, dim], rows ld apart; cs [positions, dim]: cos then sin of dim/2
	 * angles, pairs (i, i + dim/2); direction +1 forward, -1 backward (the transpose) */
	void (*rope)(int m, int heads, int dim, float *x, int64_t ld, const int32_t *position,
		     const float *cs, int direction);
	/* h = silu(gate) * up, n contiguous elements */
	void (*swiglu)(int64_t n, const float *gate, const float *up, float *h);
	/* dgate, dup from dh (may alias dh) */
	void (*swiglu_bwd)(int64_t n, const float *gate, const float *up, const float *dh,
			   float *dgate, float *dup);
	/* The same with h as f says, which is not plain. */
	void (*glu)(const struct moe_glu *f, int64_t n, const float *gate, const float *up, float *h);
	void (*glu_bwd)(const struct moe_glu *f, int64_t n, const float *gate, const float *up,
			const float *dh, float *dgate, float *dup);

	/* ---- attention, by blocks, running softmax ---- */
	size_t (*attention_scratch)(int dim);
	/* rows q0..q1 (at most MOE_TOKEN_BLOCK) of heads h0..h1 */
	void (*attention)(const struct moe_attention *a, int q0, int q1, int h0, int h1,
			  void *scratch);
	/* centre of rows q0..q1, all heads: before the two below */
	void (*attention_centre)(const struct moe_attention *a, int q0, int q1);
	void (*attention_bwd_q)(const struct moe_attention *a, int q0, int q1, int h0, int h1,
				void *scratch);
	/* key rows k0..k1 of kv heads g0..g1, summed over their query heads */
	void (*attention_bwd_kv)(const struct moe_attention *a, int k0, int k1, int g0, int g1,
				 void *scratch);

	/* ---- LM head and cross-entropy over one block of m trained tokens ---- */
	/* logits[m, v1-v0] (rows ld apart) are already computed for vocabulary rows v0..v1:
	 * max[m], sum[m] (sum of exp(logit - max)) of this chunk; target logit into tgt[m] where
	 * label is inside */
	void (*ce_partial)(int m, int64_t v0, int64_t v1, const float *logits, int64_t ld,
			   const int32_t *label, float *max, float *sum, float *tgt);
	/* in place: logits -> scale * (softmax - onehot), from the row's whole-vocabulary lse[m] */
	void (*ce_bwd)(int m, int64_t v0, int64_t v1, float *logits, int64_t ld,
		       const int32_t *label, const float *lse, float scale);

	/* ---- experts; chunks c0..c1 are of MOE_CHUNK columns of I (gate_up, down_bwd) or of H
	 * ---- */
	/* compute: the widest of the expert's weights' (moe_expert_compute) */
	size_t (*expert_scratch)(int m, int64_t H, int64_t I, int r, enum moe_compute compute);
	void (*expert_gather)(const struct moe_expert *e, struct moe_expert_rows *w, void *scratch);
	void (*expert_gate_up)(const struct moe_expert *e, struct moe_expert_rows *w, int c0,
			       int c1, void *scratch);
	void (*expert_down)(const struct moe_expert *e, struct moe_expert_rows *w, int c0, int c1,
			    void *scratch);
	void (*expert_scatter)(const struct moe_expert *e, struct moe_expert_rows *w,
			       void *scratch);
	void (*expert_down_bwd)(const struct moe_expert *e, struct moe_expert_rows *w,
				const struct moe_expert_grad *g, int c0, int c1, void *scratch);
	void (*expert_gate_up_bwd)(const struct moe_expert *e, struct moe_expert_rows *w, int c0,
				   int c1, void *scratch);
	/* a_gu and down_b from w->u/v and the summed thin gradients w->wg, w->z */
	void (*expert_lora_grad)(const struct moe_expert *e, struct moe_expert_rows *w,
				 const struct moe_expert_grad *g, void *scratch);
	/* gradients of those base weights whose array in g is not NULL */
	void (*expert_weight_grad)(const struct moe_expert *e, struct moe_expert_rows *w,
				   const struct moe_expert_grad *g, void *scratch);

	/* out[n] = sum over j of w[j] row[j][n], in order of j; w NULL: 1; count 0: zeros */
	void (*sum_rows)(int64_t n, int count, const float *const *row, const float *w, float *out);
	/* bf16 rows [m, ld16] of x [m, n], zero from n to ld16 */
	void (*to_bf16)(int m, int64_t n, const float *x, int64_t ldx, uint16_t *dst, int64_t ld16);

	/* ---- optimizer ---- */
	/* sum of squares of n gradients, in double */
	double (*sum_squares)(int64_t n, const float *g);
	/* p, m, v updated in place from g over n elements; g is left as it is */
	void (*adamw)(int64_t n, float *p, const float *g, float *m, float *v,
		      const struct moe_adamw *o);
};

/* Row widths of the table's arrays. */
static inline int64_t moe_pad(int64_t n, int to)
{
	return (n + to - 1) / to * to;
}

/* All tables, alphabetical (generated). */
extern const struct moe_kernels *const moe_kernels_list[];
/* The table in use: the best supported one, or the one MOESAIC_ISA names. Set once by
 * moe_kernels_select. */
const struct moe_kernels *moe_kernels(void);
/* Widths of rows of H or I columns, and of rank r, in the table in use. */
static inline int64_t moe_width(int64_t n)
{
	return moe_pad(n, moe_kernels()->width_pad);
}
static inline int64_t moe_rank_width(int64_t r)
{
	return moe_pad(r, moe_kernels()->rank_pad);
}
/* name NULL: MOESAIC_ISA or the best. MOE_ERR_CONFIG names the known and supported ones. */
enum moe_status moe_kernels_select(const char *name);
/* The same without using it. */
enum moe_status moe_kernels_choose(const char *name, const struct moe_kernels **out);
/*
 * Calls enable until it has succeeded once. Before anything runs on a table: moe_engine_open does it before
 * StarPU starts its threads. MOE_ERR_CONFIG: the operating system refuses.
 */
enum moe_status moe_kernels_enable(const struct moe_kernels *k);

#endif
