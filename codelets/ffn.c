/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/moe.h"

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

const float *moe_ffn_sigmoid(const struct moe_ffn *f, float *scratch)
{
	const struct moe_matrix_lora *l = &f->lora[MOE_FFN_SIGMOID];

	if (!l->r)
		return f->sigmoid_weight;
	memcpy(scratch, f->sigmoid_weight, (size_t)f->H * sizeof *scratch);
	for (int64_t j = 0; j < l->r; j++) {
		float b = l->scale * l->b.value[j];

		for (int64_t c = 0; c < f->H; c++)
			scratch[c] += b * l->a.value[j * f->H + c];
	}
	return scratch;
}
