/* SPDX-License-Identifier: Apache-2.0 */
/* Weights that are trained themselves, in the list of what is trained (routers: params.c). */
#include "train/params.h"

#include <stdarg.h>
#include <stdio.h>

static const char *const layer_names[MOE_LAYER_ARRAYS] = {
	[MOE_ARRAY_LINEAR + MOE_ATTN_Q] = "q_proj.weight",
	[MOE_ARRAY_LINEAR + MOE_ATTN_K] = "k_proj.weight",
	[MOE_ARRAY_LINEAR + MOE_ATTN_V] = "v_proj.weight",
	[MOE_ARRAY_LINEAR + MOE_ATTN_O] = "o_proj.weight",
	[MOE_ARRAY_BIAS + MOE_ATTN_Q] = "q_proj.bias",
	[MOE_ARRAY_BIAS + MOE_ATTN_K] = "k_proj.bias",
	[MOE_ARRAY_BIAS + MOE_ATTN_V] = "v_proj.bias",
	[MOE_ARRAY_BIAS + MOE_ATTN_O] = "o_proj.bias",
	[MOE_ARRAY_ATTN_NORM] = "attn_norm",
	[MOE_ARRAY_FFN_NORM] = "ffn_norm",
	[MOE_ARRAY_Q_NORM] = "q_norm",
	[MOE_ARRAY_K_NORM] = "k_norm",
};
static const char *const ffn_names[MOE_FFN_MATRICES] = { "gate_proj.weight", "up_proj.weight",
							 "down_proj.weight", "shared_gate.weight" };
static const char *const expert_names[MOE_EXPERT_MATRICES] = { "gate_proj", "up_proj",
							       "down_proj" };

/* Where the next array goes; out NULL: only counted. */
struct list {
	struct moe_train_array *out;
	size_t n;
};

__attribute__((format(printf, 3, 4))) static void add(struct list *l, struct moe_train_array a,
						      const char *format, ...)
{
	va_list args;

	if (l->out) {
		va_start(args, format);
		vsnprintf(a.name, sizeof a.name, format, args);
		va_end(args);
		l->out[l->n] = a;
	}
	l->n++;
}

static bool has(const struct moe_trained *a)
{
	return a && a->param.m;
}

static struct moe_train_array whole(const struct moe_trained *a)
{
	return (struct moe_train_array){ .whole = a, .pieces = 1, .piece = a->param.piece };
}

/* Another name where masters are bf16: neither kind of state is the other's. */
static const char *suffix(const struct moe_param *p)
{
	return p->own ? ".bf16" : "";
}

size_t moe_train_whole_layer(const struct moe_decoder_layer *layer, int l,
			     struct moe_train_array *out)
{
	struct moe_experts *e = layer->experts;
	struct list at = { .out = out };

	for (int i = 0; layer->trained && i < MOE_LAYER_ARRAYS; i++)
		if (has(&layer->trained[i]))
			add(&at, whole(&layer->trained[i]), "layers.%d.%s%s", l, layer_names[i],
			    suffix(&layer->trained[i].param));
	for (int i = 0; layer->ffn && layer->ffn->trained && i < MOE_FFN_MATRICES; i++)
		if (has(&layer->ffn->trained[i]))
			add(&at, whole(&layer->ffn->trained[i]), "layers.%d.mlp.%s%s", l,
			    ffn_names[i], suffix(&layer->ffn->trained[i].param));
	for (int i = 0; e && e->part[0].base[MOE_GATE].m && i < MOE_EXPERT_MATRICES; i++)
		add(&at,
		    (struct moe_train_array){ .experts = e,
					      .base = true,
					      .matrix = (enum moe_expert_matrix)i,
					      .pieces = e->E,
					      .piece = (int64_t)e->I * e->H },
		    "layers.%d.experts.%s%s", l, expert_names[i], suffix(&e->part[0].base[i]));
	return at.n;
}

size_t moe_train_whole_ends(const struct moe_decoder *d, struct moe_train_array *out)
{
	bool tied = d->embed.trained == d->head.trained;
	struct list at = { .out = out };

	for (int i = 0; d->embed.trained && i < d->embed.n_chunks; i++)
		add(&at, whole(&d->embed.trained[i]), "embed_tokens.%d%s", i,
		    suffix(&d->embed.trained[i].param));
	for (int i = 0; d->head.trained && !tied && i < d->head.n_chunks; i++)
		add(&at, whole(&d->head.trained[i]), "lm_head.%d%s", i,
		    suffix(&d->head.trained[i].param));
	if (has(d->final_trained))
		add(&at, whole(d->final_trained), "final_norm");
	return at.n;
}

static float *field_of(const struct moe_param *p, enum moe_param_field f)
{
	return f == MOE_VALUE ? p->value : f == MOE_GRAD ? p->grad : f == MOE_MOMENT1 ? p->m : p->v;
}

void moe_train_whole_get(const struct moe_train_array *a, enum moe_param_field f, int piece,
			 float *dst)
{
	if (a->base)
		moe_experts_get_base(a->experts, a->matrix, f, piece, dst);
	else if (f == MOE_VALUE)
		moe_trained_get(a->whole, 0, a->whole->param.rows, dst);
	else
		memcpy(dst, field_of(&a->whole->param, f), (size_t)a->piece * sizeof *dst);
}

void moe_train_whole_set(const struct moe_train_array *a, enum moe_param_field f, int piece,
			 const float *src)
{
	const struct moe_param *p = a->whole ? &a->whole->param : NULL;

	if (a->base) {
		moe_experts_set_base(a->experts, a->matrix, f, piece, src);
	} else if (f == MOE_VALUE && p->own) {
		moe_weight_store(p->own, p->rows, p->cols, src, MOE_F32, p->cols);
		moe_trained_renew(a->whole);
	} else {
		memcpy(field_of(p, f), src, (size_t)a->piece * sizeof *src);
		if (f == MOE_VALUE)
			moe_trained_renew(a->whole);
	}
}
