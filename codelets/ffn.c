/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/token_args.h"

bool moe_ffn_adapted(const struct moe_ffn *f)
{
	for (int i = 0; i < MOE_FFN_MATRICES; i++)
		if (f->lora[i].r)
			return true;
	return false;
}

bool moe_ffn_trained(const struct moe_ffn *f)
{
	for (int i = 0; i < MOE_FFN_MATRICES; i++)
		if (moe_ffn_trains(f, i))
			return true;
	return false;
}

void moe_ffn_shape(const struct moe_ffn *f, int which, int64_t *n, int64_t *k)
{
	*n = which == MOE_FFN_SIGMOID ? 1 : which == MOE_FFN_DOWN ? f->H : f->I;
	*k = which == MOE_FFN_DOWN ? f->I : f->H;
}

void moe_ffn_hidden(const struct moe_ffn *f, const struct moe_ffn_state *s, int t0, int t1)
{
	const struct moe_kernels *k = moe_kernels();
	int64_t n = (int64_t)(t1 - t0) * f->I, at = (int64_t)t0 * f->I;

	if (moe_glu_plain(&f->glu))
		k->swiglu(n, s->gate + at, s->up + at, s->h + at);
	else
		k->glu(&f->glu, n, s->gate + at, s->up + at, s->h + at);
}

void moe_ffn_hidden_bwd(const struct moe_ffn *f, const struct moe_ffn_state *s, int t0, int t1)
{
	const struct moe_kernels *k = moe_kernels();
	int64_t n = (int64_t)(t1 - t0) * f->I, at = (int64_t)t0 * f->I;
	float *dgate = s->dgate + at, *dup = s->dup + at;

	if (moe_glu_plain(&f->glu))
		k->swiglu_bwd(n, s->gate + at, s->up + at, dgate, dgate, dup);
	else
		k->glu_bwd(&f->glu, n, s->gate + at, s->up + at, dgate, dgate, dup);
}

bool moe_ffn_sigmoid_lora(const struct moe_ffn *f, float *out)
{
	const struct moe_matrix_lora *l = &f->lora[MOE_FFN_SIGMOID];

	if (!l->r)
		return false;
	memset(out, 0, (size_t)f->H * sizeof *out);
	for (int64_t j = 0; j < l->r; j++) {
		float b = l->scale * l->b.value[j];

		for (int64_t c = 0; c < f->H; c++)
			out[c] += b * l->a.value[j * f->H + c];
	}
	return true;
}

/* Projections after the experts' and attention's. */
const struct moe_dropout *moe_ffn_dropout(const struct moe_token_args *a, enum moe_ffn_matrix which,
					  struct moe_dropout *d)
{
	if (!a->drop.on || !(a->ffn->dropout > 0))
		return NULL;
	*d = (struct moe_dropout){ .p = a->ffn->dropout,
				   .key[0] = moe_drop_key(&a->drop, MOE_DROPPED + MOE_FFN_TAG + (int)which, 0),
				   .position = a->drop.position };
	return d;
}

const struct moe_lora *moe_ffn_lora(const struct moe_token_args *a, enum moe_ffn_matrix which, int64_t token,
				    struct moe_ffn_lora *out)
{
	const struct moe_matrix_lora *l = &a->ffn->lora[which];

	out->lora = (struct moe_lora){ .a = l->a.value,
				       .b = l->b.value,
				       .r = l->r,
				       .scale = l->scale,
				       .drop = moe_ffn_dropout(a, which, &out->drop),
				       .token = token };
	return l->r ? &out->lora : NULL;
}
