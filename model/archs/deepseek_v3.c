/* SPDX-License-Identifier: Apache-2.0 */
#include "model/arch_reader.h"

const struct moe_arch_reader moe_arch_reader_deepseek_v3 = {
	.model_type = "deepseek_v3",
	.estimate_only = "latent attention and the sigmoid router with groups",
	.read = moe_arch_read_deepseek,
};
