/* SPDX-License-Identifier: Apache-2.0 */
/* config.json: what is accepted has shapes and names for every role, and a count of parameters. */
#include "tests/fuzz/fuzz.h"

#include "model/arch.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *text = malloc(size + 1), name[MOE_TENSOR_NAME_MAX];
	struct moe_param_count count;
	static struct moe_arch arch;
	int64_t shape[MOE_MAX_NDIM];

	if (!text)
		return 0;
	memcpy(text, data, size);
	text[size] = 0;
	if (moe_arch_parse(text, NULL, &arch) == MOE_OK) {
		int last = arch.n_layers - 1;

		for (int role = 0; role < MOE_ROLE_COUNT; role++) {
			moe_arch_tensor_shape(&arch, (enum moe_role)role, last, shape);
			for (int v = 0; v < 4; v++)
				moe_arch_tensor_name(&arch, (enum moe_role)role, last, 0, v, name);
		}
		moe_arch_count_params(&arch, &count);
	}
	free(text);
	return 0;
}
