/* SPDX-License-Identifier: Apache-2.0 */
/* Pages of what training writes first in its first step. */
#include "graphs/moe_state.h"

#include "codelets/trained.h"

#define MAX_PARAMS (MOE_MAX_LAYER_PARTS * (3 + MOE_EXPERT_MATRICES) + 3 + MOE_FFN_MATRICES)

static int list_params(const struct moe_experts *l, const struct moe_ffn *ffn, const struct moe_param **out)
{
	int n = 0;

	for (int p = 0; p < l->P; p++) {
		const struct moe_experts_part *part = &l->part[p];

		for (int i = 0; i < MOE_EXPERT_MATRICES; i++)
			out[n++] = &part->base[i];
		out[n++] = &part->gate_b;
		out[n++] = &part->up_b;
		out[n++] = &part->down_a;
	}
	out[n++] = &l->a_gu;
	out[n++] = &l->down_b;
	out[n++] = &l->router_param;
	for (int i = 0; ffn && ffn->trained && i < MOE_FFN_MATRICES; i++)
		out[n++] = &ffn->trained[i].param;
	return n;
}

void moe_experts_touch(struct moe_engine *e, const struct moe_experts *l, const struct moe_ffn *ffn, bool moments,
		       struct moe_touched *sum)
{
	const struct moe_param *param[MAX_PARAMS];
	const void *data[2 * MAX_PARAMS];
	int n = list_params(l, ffn, param), wanted = 0;
	double start = moe_now();
	size_t bytes;

	for (int i = 0; i < n; i++)
		if (moments) {
			data[wanted++] = param[i]->m;
			data[wanted++] = param[i]->v;
		} else {
			data[wanted++] = param[i]->grad;
		}
	bytes = moe_memory_touch_these(e, data, wanted);
	sum->bytes += (int64_t)bytes;
	sum->seconds += bytes ? moe_now() - start : 0;
}
