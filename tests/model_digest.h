/* SPDX-License-Identifier: Apache-2.0 */
/* Models that should be the same to the last bit. */
#ifndef MOE_TESTS_MODEL_DIGEST_H
#define MOE_TESTS_MODEL_DIGEST_H

#include "codelets/router_lora.h"
#include "tests/model_configs.h"

static inline uint64_t digest_bytes(uint64_t h, const void *data, size_t bytes)
{
	const unsigned char *p = data;

	for (size_t i = 0; i < bytes; i++)
		h = (h ^ p[i]) * 1099511628211u;
	return h;
}

static inline uint64_t digest_param(uint64_t h, const struct moe_param *p, int E)
{
	size_t bytes = (size_t)E * (size_t)p->piece * sizeof(float);

	h = p->value ? digest_bytes(h, p->value, bytes) : h;
	return p->grad ? digest_bytes(h, p->grad, bytes) : h;
}

/* Values and gradients of all that trains. */
static inline uint64_t digest_model(const struct moe_model *m)
{
	uint64_t h = 1;

	for (int i = 0; i < m->decoder.n_layers; i++) {
		const struct moe_decoder_layer *l = &m->decoder.layers[i];
		const struct moe_experts *e = l->experts;

		for (int j = 0; j < MOE_ATTN_LINEARS; j++) {
			h = digest_param(h, &l->linear[j].lora_a, 1);
			h = digest_param(h, &l->linear[j].lora_b, 1);
		}
		for (int j = 0; l->ffn && j < MOE_FFN_MATRICES; j++)
			h = digest_param(digest_param(h, &l->ffn->lora[j].a, 1), &l->ffn->lora[j].b, 1);
		if (!e)
			continue;
		if (e->router_lora)
			h = digest_param(digest_param(h, &e->router_lora->a, 1), &e->router_lora->b,
					 1);
		h = digest_param(digest_param(h, &e->a_gu, e->E), &e->down_b, e->E);
		for (int p = 0; p < e->P; p++) {
			h = digest_param(h, &e->part[p].gate_b, e->E);
			h = digest_param(h, &e->part[p].up_b, e->E);
			h = digest_param(h, &e->part[p].down_a, e->E);
		}
	}
	return h;
}

/* Micro-batches of different lengths, more of them than slots. */
static inline void fill_run(struct run *r, int64_t vocab)
{
	static const int lengths[3][3] = { { 70, 1, 40 }, { 90, 5, 0 }, { 3, 100, 20 } };
	uint64_t seed = 17;
	int32_t ids[128];

	for (int i = 0; i < 3; i++) {
		add_batch(r, 128);
		for (int d = 0; d < 3 && lengths[i][d]; d++) {
			for (int t = 0; t < lengths[i][d]; t++)
				ids[t] =
					(int32_t)((.5f + .49f * ref_uniform(&seed)) * (float)vocab);
			moe_model_batch_add(&r->batch[i], ids, NULL, lengths[i][d]);
		}
	}
}

#endif
