/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/decoder.h"
#include "codelets/cost.h"
#include "codelets/dense_grad.h"
#include "codelets/update.h"

static size_t trained_scratch(const struct moe_trained *a)
{
	return MOE_MAX(moe_dense_grad_scratch(a), a->param.own ? moe_update_scratch(a->param.cols, NULL) : 0);
}

/* Of its arrays that are trained whole. */
static size_t layer_scratch(const struct moe_decoder_layer *l)
{
	size_t most = 0;

	for (int i = 0; l->trained && i < MOE_LAYER_ARRAYS; i++)
		most = MOE_MAX(most, trained_scratch(&l->trained[i]));
	for (int i = 0; l->ffn && l->ffn->trained && i < MOE_FFN_MATRICES; i++)
		most = MOE_MAX(most, trained_scratch(&l->ffn->trained[i]));
	return most;
}

size_t moe_decoder_scratch(const struct moe_decoder *d)
{
	const struct moe_kernels *k = moe_kernels();
	size_t block = MOE_TOKEN_BLOCK * sizeof(float), most = k->attention_scratch(d->dim);
	int64_t chunk = MOE_MIN((int64_t)MOE_VOCAB_CHUNK, d->V);
	size_t heads = (size_t)d->heads * (size_t)d->dim;

	most = MOE_MAX(most, k->linear_scratch(MOE_TOKEN_BLOCK, chunk, d->H, 0));
	for (int i = 0; i < d->n_layers; i++)
		for (int j = 0; j < MOE_ATTN_LINEARS; j++) {
			const struct moe_linear *l = &d->layers[i].linear[j];

			most = MOE_MAX(most, k->linear_scratch(MOE_TOKEN_BLOCK, l->weight.n,
							       l->weight.k, l->r));
		}
	for (int i = 0; d->embed.trained && i < d->embed.n_chunks; i++)
		most = MOE_MAX(most, trained_scratch(&d->embed.trained[i]));
	for (int i = 0; d->head.trained && i < d->head.n_chunks; i++)
		most = MOE_MAX(most, trained_scratch(&d->head.trained[i]));
	for (int i = 0; i < d->n_layers; i++)
		most = MOE_MAX(most, layer_scratch(&d->layers[i]));
	return most + block * ((size_t)d->H + heads);
}

double moe_attention_us(int m, int64_t n, double dim)
{
	/* keys, then values; both f32 */
	return moe_f32_gemm_us(MOE_GEMM_FORWARD, m, (double)n, 2 * dim);
}

const struct moe_dropout *moe_linear_dropout(const struct moe_decoder *d, const struct moe_drop_pass *pass,
					     int projection, struct moe_dropout *out)
{
	if (!pass->on || !(d->dropout > 0))
		return NULL;
	*out = (struct moe_dropout){ .p = d->dropout,
				     .key[0] = moe_drop_key(pass, MOE_DROPPED + projection, 0),
				     .position = pass->position };
	return out;
}

void moe_linear_apply(const struct moe_linear *l, int m, const float *x, float *y,
		      const struct moe_dropout *drop, int64_t token, void *scratch)
{
	struct moe_lora lora = moe_linear_lora(l);

	lora.drop = drop;
	lora.token = token;
	moe_kernels()->linear(m, &l->weight, 0, l->weight.n, x, l->weight.k, l->bias,
			      l->r ? &lora : NULL, y, l->weight.n, scratch);
}

void moe_linear_back(const struct moe_linear *l, int m, const float *dy, float *dx, bool accumulate,
		     const struct moe_dropout *drop, int64_t token, void *scratch)
{
	struct moe_lora lora = moe_linear_lora(l);

	lora.drop = drop;
	lora.token = token;
	moe_kernels()->linear_bwd(m, &l->weight, dy, l->weight.n, l->r ? &lora : NULL, dx,
				  l->weight.k, accumulate, scratch);
}

struct moe_attention moe_attention_of(const struct moe_attn_args *a)
{
	const struct moe_decoder *d = a->decoder;

	return (struct moe_attention){
		.T = a->batch.T,
		.heads = d->heads,
		.kv_heads = d->kv_heads,
		.dim = d->dim,
		.scale = (float)(1.0 / __builtin_sqrt((double)d->dim)),
		.past = a->batch.past,
		.doc_start = a->batch.doc_start,
		.q = a->state->q,
		.k = a->state->k,
		.v = a->state->v,
		.o = a->state->o,
		.lse = a->state->lse,
		.grad_o = a->grad ? a->grad->grad_o : NULL,
		.centre = a->grad ? a->grad->centre : NULL,
		.grad_q = a->grad ? a->grad->grad_q : NULL,
		.grad_k = a->grad ? a->grad->grad_k : NULL,
		.grad_v = a->grad ? a->grad->grad_v : NULL,
	};
}
