/* SPDX-License-Identifier: Apache-2.0 */
/* Looks up a role's tensor in a checkpoint, plain or quantised, whichever of its names it has. */
#include "api/model.h"

#include "model/quantised.h"

bool moe_model_has(const struct moe_model *m, const struct moe_safetensors *st, enum moe_role role,
		   int layer, int expert)
{
	char name[MOE_TENSOR_NAME_MAX];

	for (int v = 0; moe_arch_tensor_name(&m->arch, role, layer, expert, v, name); v++)
		if (moe_safetensors_find(st, name))
			return true;
	return false;
}

enum moe_status moe_model_find_quantised(const struct moe_model *m,
					 const struct moe_safetensors *st, enum moe_role role,
					 int layer, int expert, struct moe_st_quantised *out,
					 bool *found)
{
	char name[MOE_TENSOR_NAME_MAX];
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(&m->arch, role, layer, shape);

	*found = false;
	for (int v = 0; moe_arch_tensor_name(&m->arch, role, layer, expert, v, name); v++) {
		const struct moe_st_tensor *plain = moe_safetensors_find(st, name);

		if (plain && plain->dtype <= MOE_F64)
			return MOE_OK;
	}
	for (int v = 0; moe_arch_tensor_name(&m->arch, role, layer, expert, v, name) && !*found;
	     v++)
		MOE_TRY(moe_st_quantised_find(st, name, ndim == 3 ? shape[0] : 0, shape[ndim - 2],
					      shape[ndim - 1], out, found));
	return MOE_OK;
}

enum moe_status moe_model_find(const struct moe_model *m, const struct moe_safetensors *st,
			       enum moe_role role, int layer, int expert,
			       const struct moe_st_tensor **out)
{
	char name[MOE_TENSOR_NAME_MAX];
	int64_t shape[MOE_MAX_NDIM];
	int ndim = moe_arch_tensor_shape(&m->arch, role, layer, shape);

	for (int v = 0; moe_arch_tensor_name(&m->arch, role, layer, expert, v, name); v++)
		if (moe_safetensors_find(st, name))
			break;
		else if (!moe_arch_tensor_name(&m->arch, role, layer, expert, v + 1, name)) {
			/* none: the error names the first variant */
			moe_arch_tensor_name(&m->arch, role, layer, expert, 0, name);
			break;
		}
	MOE_TRY(moe_safetensors_get(st, name, ndim, shape, out));
	if ((*out)->dtype > MOE_F64)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s has dtype %s; F32, BF16, F16 and F64 can be "
				"loaded",
				name, (*out)->dtype_text);
	return MOE_OK;
}
