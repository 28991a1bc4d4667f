/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of MoE layers: weights, LoRA, gradients, moments. Activations: graphs/moe_activations.c. */
#include "graphs/moe_state.h"

#include "graphs/trained.h"

#include "codelets/kernels/packed/requantise.h"

static int64_t part_begin(int64_t I, int P, int p)
{
	return I * p / P;
}

/* Packed and packed transposed, of a piece. */
static void count_packed(struct moe_param *p, bool transposed)
{
	const struct moe_kernels *k = moe_kernels();
	enum moe_lora_side other = p->side == MOE_LORA_A ? MOE_LORA_B : MOE_LORA_A;
	size_t stack = (size_t)p->stack;

	if (!k->lora_bytes || !p->rows || !p->cols)
		return;
	p->packed_piece = stack * ((k->lora_bytes(p->side, p->rows, p->cols) + 63) & ~(size_t)63);
	if (transposed)
		p->packed_t_piece = stack * ((k->lora_bytes(other, p->cols, p->rows) + 63) & ~(size_t)63);
}

/* Pieces of `stack` matrices [rows, cols]; scale is what lora_pack multiplies by. */
static void param_alloc(struct moe_engine *e, struct moe_param *p, const struct moe_param *shape,
			const struct moe_experts_shape *s, int part, enum moe_status *st)
{
	size_t bytes, E = (size_t)s->E;

	*p = *shape;
	p->piece = p->stack * p->rows * p->cols;
	count_packed(p, s->backward != MOE_BACKWARD_DIRECT);
	bytes = E * (size_t)p->piece * sizeof(float);
	p->value = moe_memory_take(e, bytes, part, "lora", st);
	if (p->packed_piece)
		p->packed = moe_memory_take(e, E * p->packed_piece, part, "lora", st);
	if (p->packed_t_piece)
		p->packed_t = moe_memory_take(e, E * p->packed_t_piece, part, "lora", st);
	if (!s->trainable)
		return;
	p->grad = moe_memory_take(e, bytes, part, "gradients", st);
	p->m = moe_memory_take(e, bytes, part, "moments", st);
	p->v = moe_memory_take(e, bytes, part, "moments", st);
}

static void param_free(struct moe_engine *e, struct moe_param *p)
{
	moe_memory_free(e, p->value);
	moe_memory_free(e, p->packed);
	moe_memory_free(e, p->packed_t);
	moe_memory_free(e, p->grad);
	moe_memory_free(e, p->m);
	moe_memory_free(e, p->v);
	memset(p, 0, sizeof *p);
}

static struct moe_param shape_a(int stack, int64_t r, int64_t k)
{
	return (struct moe_param){ .side = MOE_LORA_A, .stack = stack, .rows = r, .cols = k, .pack_scale = 1 };
}

static struct moe_param shape_b(int64_t n, int64_t r, float scale)
{
	return (struct moe_param){ .side = MOE_LORA_B, .stack = 1, .rows = n, .cols = r, .pack_scale = scale };
}

static struct moe_param shape_base(int64_t n, int64_t k)
{
	return (struct moe_param){ .stack = 1, .rows = n, .cols = k, .piece = n * k };
}

/* Whether every part has whole blocks of all matrices. */
static enum moe_requantise requantise_of(const struct moe_experts_shape *s, int P)
{
	if (!s->coding || !s->train_base)
		return MOE_REQUANTISE_NOT;
	for (int p = 0; p < P; p++) {
		int64_t i0 = part_begin(s->I, P, p), I = part_begin(s->I, P, p + 1) - i0;

		if (!moe_requantise_whole_blocks(&s->coding[MOE_GATE], i0, I, s->I, 0, s->H, s->H) ||
		    !moe_requantise_whole_blocks(&s->coding[MOE_UP], i0, I, s->I, 0, s->H, s->H) ||
		    !moe_requantise_whole_blocks(&s->coding[MOE_DOWN], 0, s->H, s->H, i0, I, s->I))
			return MOE_REQUANTISE_WHOLE;
	}
	return MOE_REQUANTISE_PARTS;
}

static struct moe_weight *matrices_of(struct moe_experts_part *part, enum moe_expert_matrix which)
{
	return which == MOE_GATE ? part->gate : which == MOE_UP ? part->up : part->down;
}

/* bf16 masters beside quantised weights: one allocation per matrix and part. */
static void masters_alloc(struct moe_engine *e, struct moe_experts_part *of, enum moe_expert_matrix which,
			  const struct moe_experts_shape *s, int part, enum moe_status *st)
{
	const struct moe_param *p = &of->base[which];
	size_t bytes = moe_matrix_bytes(MOE_BF16, p->rows, p->cols);
	struct moe_weight *master;
	char *data = moe_memory_take(e, (size_t)s->E * bytes, part, "weights", st);

	if (*st == MOE_OK && !of->masters)
		of->masters = moe_calloc((size_t)s->E * MOE_EXPERT_MATRICES, sizeof *of->masters);
	if (*st == MOE_OK && !of->masters)
		*st = moe_fail(MOE_ERR_NOMEM, "no memory for a layer");
	if (*st != MOE_OK) {
		moe_memory_free(e, data);
		return;
	}
	master = of->masters + (int)which * s->E;
	for (int i = 0; i < s->E; i++, data += bytes) {
		master[i].data = data;
		moe_kernels()->weight_pack(&master[i], NULL, MOE_BF16, p->rows, p->cols, p->cols, MOE_USE_GEMM);
	}
}

/* Masters are bf16 weights: those that are computed with, or others where these are quantised; where they are in the
 * layer's whole array. */
static void base_own(struct moe_engine *e, struct moe_experts_part *part, enum moe_expert_matrix which,
		     const struct moe_experts_shape *s, int index, enum moe_status *st)
{
	struct moe_param *p = &part->base[which];

	if (s->coding)
		masters_alloc(e, part, which, s, index, st);
	if (*st != MOE_OK)
		return;
	p->own = s->coding ? part->masters + (int)which * s->E : matrices_of(part, which);
	p->own_key = moe_mix(s->key + (uint64_t)which);
	p->own_piece = (int64_t)s->I * s->H;
	p->own_ld = which == MOE_DOWN ? s->I : s->H;
	p->own_at = which == MOE_DOWN ? part->i0 : part->i0 * s->H;
}

/* Base weights: gradients, and what training them takes. */
static void base_alloc(struct moe_engine *e, struct moe_experts_part *of, enum moe_expert_matrix which,
		       struct moe_param shape, const struct moe_experts_shape *s, int part,
		       enum moe_status *st)
{
	struct moe_param *p = &of->base[which];
	size_t bytes = (size_t)s->E * (size_t)shape.piece * sizeof(float);

	*p = shape;
	if (s->base_grads)
		p->grad = moe_memory_take(e, bytes, part, "gradients", st);
	if (!s->train_base)
		return;
	if (s->own_masters)
		base_own(e, of, which, s, part, st);
	else
		p->value = moe_memory_take(e, bytes, part, "weights", st);
	/* resident copies are made of whole packed matrices, and blocks may lie in several parts: repack's work */
	if (s->coding ? requantise_of(s, moe_engine_parts(e)) == MOE_REQUANTISE_PARTS
		      : !s->own_masters && s->backward != MOE_BACKWARD_RESIDENT)
		p->weight = matrices_of(of, which);
	p->m = moe_memory_take(e, bytes, part, "moments", st);
	p->v = moe_memory_take(e, bytes, part, "moments", st);
}

/* Bytes of a part's packed matrices of one expert, each 64-byte aligned. */
struct matrix_bytes {
	size_t gate, up, down, all;
};

static size_t one_matrix(const struct moe_experts_shape *s, enum moe_expert_matrix which,
			 enum moe_dtype dtype, int64_t n, int64_t k, int64_t k0)
{
	struct moe_coding c = s->coding ? s->coding[which] : (struct moe_coding){ 0 };

	if (!c.format)
		return moe_matrix_bytes(dtype, n, k);
	c.phase = k0 % c.group;
	return (moe_coded_bytes(&c, n, k) + 63) & ~(size_t)63;
}

static struct matrix_bytes matrix_bytes(const struct moe_experts_shape *s, enum moe_dtype dtype,
					int64_t i0, int64_t I)
{
	struct matrix_bytes b = { one_matrix(s, MOE_GATE, dtype, I, s->H, 0),
				  one_matrix(s, MOE_UP, dtype, I, s->H, 0),
				  one_matrix(s, MOE_DOWN, dtype, s->H, I, i0), 0 };

	b.all = b.gate + b.up + b.down;
	return b;
}

/* Matrices of experts, one after the other. */
static void place(struct moe_experts_part *part, int E, char *base, const struct matrix_bytes *b)
{
	for (int i = 0; base && i < E; i++, base += b->all) {
		part->gate[i].data = base;
		part->up[i].data = base + b->gate;
		part->down[i].data = base + b->gate + b->up;
	}
}

static void weights_alloc(struct moe_engine *e, struct moe_experts *l,
			  const struct moe_experts_shape *s, int p, enum moe_dtype dtype,
			  enum moe_status *st)
{
	struct moe_experts_part *part = &l->part[p];
	struct matrix_bytes b = matrix_bytes(s, dtype, part->i0, part->I);
	char *base;

	part->gate = moe_calloc((size_t)l->E * 3, sizeof *part->gate);
	if (!part->gate) {
		*st = moe_fail(MOE_ERR_NOMEM, "no memory for a layer");
		return;
	}
	part->up = part->gate + l->E;
	part->down = part->up + l->E;
	if (s->coded_later)
		return;
	base = moe_memory_take(e, (size_t)l->E * b.all, p, "weights", st);
	place(part, l->E, base, &b);
}

static void describe_matrix(struct moe_experts *l, enum moe_expert_matrix which, const struct moe_coding *coding)
{
	struct moe_quantised q = { .coding = *coding };

	q.n = which == MOE_DOWN ? l->H : l->I;
	q.k = which == MOE_DOWN ? l->I : l->H;
	for (int i = 0; i < l->E; i++)
		for (int p = 0; p < l->P; p++)
			moe_experts_pack_coded(l, which, i, p, &q, 0, 1);
}

static void describe_coded(struct moe_experts *l, const struct moe_coding *coding)
{
	for (int i = 0; i < MOE_EXPERT_MATRICES; i++)
		describe_matrix(l, (enum moe_expert_matrix)i, &coding[i]);
}

enum moe_status moe_experts_take_coded(struct moe_engine *e, struct moe_experts *l, const struct moe_coding *coding)
{
	const struct moe_experts_shape s = { .E = l->E, .H = l->H, .I = l->I, .coding = coding,
					     .train_base = l->part[0].base[MOE_GATE].m != NULL };
	enum moe_status st = MOE_OK;

	l->requantise = requantise_of(&s, l->P);
	for (int p = 0; st == MOE_OK && p < l->P; p++) {
		struct moe_experts_part *part = &l->part[p];
		struct matrix_bytes b = matrix_bytes(&s, MOE_U8, part->i0, part->I);

		moe_memory_free(e, part->gate[0].data); /* of a load that failed */
		part->gate[0].data = NULL;
		place(part, l->E, moe_memory_take(e, (size_t)l->E * b.all, p, "weights", &st), &b);
		for (int i = 0; i < MOE_EXPERT_MATRICES; i++)
			part->base[i].weight = l->requantise == MOE_REQUANTISE_PARTS
						       ? matrices_of(part, (enum moe_expert_matrix)i)
						       : NULL;
	}
	if (st == MOE_OK)
		describe_coded(l, coding);
	return st;
}

enum moe_status moe_experts_take_matrix(struct moe_engine *e, struct moe_experts *l, enum moe_expert_matrix which,
					const struct moe_coding *coding)
{
	struct moe_coding all[MOE_EXPERT_MATRICES] = { [MOE_GATE] = { .format = NULL } };
	const struct moe_experts_shape s = { .E = l->E, .H = l->H, .I = l->I, .coding = all };
	enum moe_status st = MOE_OK;

	all[which] = *coding;
	for (int p = 0; p < l->P; p++) {
		struct moe_experts_part *part = &l->part[p];
		struct moe_weight *w = matrices_of(part, which);
		size_t bytes = one_matrix(&s, which, MOE_U8, which == MOE_DOWN ? l->H : part->I,
					  which == MOE_DOWN ? part->I : l->H, which == MOE_DOWN ? part->i0 : 0);
		char *base;

		moe_memory_free(e, w[0].data);
		base = moe_memory_take(e, (size_t)l->E * bytes, p, "weights", &st);
		for (int i = 0; i < l->E; i++)
			w[i].data = base ? base + (size_t)i * bytes : NULL;
	}
	if (st == MOE_OK)
		describe_matrix(l, which, coding);
	return st;
}

void moe_experts_drop_matrices(struct moe_engine *e, struct moe_experts *l)
{
	for (int i = 0; i < MOE_EXPERT_MATRICES * l->P; i++) {
		struct moe_weight *w = matrices_of(&l->part[i / MOE_EXPERT_MATRICES],
						   (enum moe_expert_matrix)(i % MOE_EXPERT_MATRICES));

		moe_memory_free(e, w[0].data);
		w[0].data = NULL;
	}
}

static void part_alloc(struct moe_engine *e, struct moe_experts *l,
		       const struct moe_experts_shape *s, int p, enum moe_dtype dtype,
		       enum moe_status *st)
{
	struct moe_experts_part *part = &l->part[p];
	struct moe_param a, b;

	part->i0 = part_begin(s->I, l->P, p);
	part->I = part_begin(s->I, l->P, p + 1) - part->i0;
	weights_alloc(e, l, s, p, dtype, st);
	b = shape_b(part->I, l->r, l->scale);
	a = shape_a(1, l->r, part->I);
	param_alloc(e, &part->gate_b, &b, s, p, st);
	param_alloc(e, &part->up_b, &b, s, p, st);
	param_alloc(e, &part->down_a, &a, s, p, st);
	base_alloc(e, part, MOE_GATE, shape_base(part->I, l->H), s, p, st);
	base_alloc(e, part, MOE_UP, shape_base(part->I, l->H), s, p, st);
	base_alloc(e, part, MOE_DOWN, shape_base(l->H, part->I), s, p, st);
}

static void copies_alloc(struct moe_engine *e, struct moe_experts *l, enum moe_dtype dtype,
			 enum moe_status *st)
{
	if (*st != MOE_OK)
		return;
	l->transposed = moe_calloc(1, sizeof *l->transposed);
	*st = l->transposed ? moe_transposed_alloc(e, l, dtype, l->transposed)
			    : moe_fail(MOE_ERR_NOMEM, "no memory for a layer");
}

static bool wants_router_grad(const struct moe_experts_shape *s)
{
	return s->train_router || (s->base_grads && !s->frozen_router);
}

static void router_train_alloc(struct moe_engine *e, struct moe_experts *l, enum moe_status *st)
{
	struct moe_param *p = &l->router_param;
	size_t bytes = (size_t)l->E * (size_t)l->H * sizeof(float);

	*p = shape_base(l->E, l->H);
	p->value = l->router_weight.data;
	p->grad = l->grad_router;
	p->m = moe_memory_take(e, bytes, -1, "moments", st);
	p->v = moe_memory_take(e, bytes, -1, "moments", st);
}

enum moe_status moe_experts_alloc(struct moe_engine *e, const struct moe_experts_shape *s,
				  enum moe_dtype weight_dtype, struct moe_experts *l)
{
	enum moe_status st = MOE_OK;
	int size = MOE_MAX(1, s->group_size);
	struct moe_param a, b;

	l->E = s->E;
	l->k = s->k;
	l->H = s->H;
	l->I = s->I;
	l->P = moe_engine_parts(e);
	l->r = s->r;
	l->ra = s->share_a ? s->r : 2 * s->r;
	l->scale = s->scale;
	l->glu = s->glu;
	l->recompute = s->recompute;
	l->requantise = requantise_of(s, l->P);
	l->G = (s->E + size - 1) / size;
	l->group_first = moe_calloc((size_t)l->G + 1, sizeof *l->group_first);
	if (!l->group_first)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a layer");
	for (int g = 0; g <= l->G; g++)
		l->group_first[g] = MOE_MIN(g * size, s->E);
	for (int p = 0; p < l->P; p++)
		part_alloc(e, l, s, p, weight_dtype, &st);
	if (s->backward == MOE_BACKWARD_RESIDENT)
		copies_alloc(e, l, weight_dtype, &st);
	a = shape_a(s->share_a ? 1 : 2, l->r, l->H);
	b = shape_b(l->H, l->r, l->scale);
	param_alloc(e, &l->a_gu, &a, s, 0, &st);
	param_alloc(e, &l->down_b, &b, s, 0, &st);
	if (l->router && wants_router_grad(s))
		l->grad_router =
			moe_memory_take(e, (size_t)l->E * (size_t)l->H * sizeof(float), -1, "gradients", &st);
	if (l->router)
		l->router_weight.data =
			moe_memory_take(e, moe_kernels()->weight_bytes(MOE_F32, l->E, l->H, MOE_USE_EXACT), -1,
			     "weights", &st);
	if (l->router && (s->train_router || (s->train_base && !s->frozen_router)))
		router_train_alloc(e, l, &st);
	if (st != MOE_OK)
		moe_experts_free(e, l);
	return st;
}

void moe_experts_free(struct moe_engine *e, struct moe_experts *l)
{
	for (int p = 0; p < l->P; p++) {
		struct moe_experts_part *part = &l->part[p];

		if (part->gate)
			moe_memory_free(e, part->gate[0].data);
		moe_free(part->gate);
		param_free(e, &part->gate_b);
		param_free(e, &part->up_b);
		param_free(e, &part->down_a);
		for (int i = 0; i < MOE_EXPERT_MATRICES; i++) {
			param_free(e, &part->base[i]);
			if (part->masters)
				moe_memory_free(e, part->masters[i * l->E].data);
		}
		moe_free(part->masters);
	}
	if (l->transposed)
		moe_transposed_free(e, l->transposed);
	moe_free(l->transposed);
	param_free(e, &l->a_gu);
	param_free(e, &l->down_b);
	moe_memory_free(e, l->grad_router);
	moe_memory_free(e, l->router_param.m);
	moe_memory_free(e, l->router_param.v);
	moe_memory_free(e, l->router_weight.data);
	moe_free(l->group_first);
	moe_free(l->tokens_seen);
	memset(l, 0, sizeof *l);
}
