/* SPDX-License-Identifier: Apache-2.0 */
#include "model/arch_reader.h"

const struct moe_arch_reader moe_arch_reader_kimi_k2 = {
	.model_type = "kimi_k2",
	.estimate_only = "latent attention and the sigmoid router",
	.read = moe_arch_read_deepseek,
};
