/* SPDX-License-Identifier: Apache-2.0 */
#include "model/kt_experts.h"
#include "model/readers/kt.h"
#include "model/readers/safetensors_table.h"

#include <stdio.h>

static const enum moe_role roles[3] = { MOE_ROLE_EXPERT_GATE, MOE_ROLE_EXPERT_UP,
					MOE_ROLE_EXPERT_DOWN };

/* The name that the checkpoint has, so that it is replaced; else the first. */
struct naming {
	const struct moe_arch *arch;
	const struct moe_safetensors *st;
};

static bool name(void *user, int layer, int which, int expert, char *buf, size_t size)
{
	const struct naming *n = user;

	if (size < MOE_TENSOR_NAME_MAX)
		return false;
	for (int v = 0; moe_arch_tensor_name(n->arch, roles[which], layer, expert, v, buf); v++)
		if (moe_safetensors_find(n->st, buf))
			return true;
	return moe_arch_tensor_name(n->arch, roles[which], layer, expert, 0, buf);
}

/* What the model stored of these experts is gone: fused tensors, scales of other codes. */
static const char *drop_others(void *user, const struct moe_st_tensor *t, char *buf, size_t size)
{
	const struct moe_arch *arch = user;
	int layer;

	(void)buf, (void)size;
	if (t->stored || !strstr(t->name, ".experts.") || sscanf(t->name, "model.layers.%d.", &layer) != 1)
		return t->name;
	return layer >= 0 && layer < arch->n_layers && arch->layer_is_moe[layer] ? NULL : t->name;
}

enum moe_status moe_kt_put_experts(struct moe_safetensors *st, const char *dir, struct moe_arch *arch, uint64_t *stamp)
{
	const struct moe_kt_shape shape = { arch->n_experts, arch->hidden, arch->moe_intermediate };
	struct naming naming = { arch, st };
	struct moe_kt *kt;

	MOE_TRY(moe_kt_open(dir, st, &kt));
	for (int i = 0; i < arch->n_layers; i++)
		if (arch->layer_is_moe[i])
			MOE_TRY(moe_kt_add_layer(kt, &shape, i, name, &naming));
	if (stamp)
		*stamp = moe_kt_stamp(kt);
	return moe_st_table_rename(st, drop_others, arch);
}
