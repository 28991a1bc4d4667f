/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a new adapter is put on, from names as PEFT's target_modules and target_parameters have
 * them. Lists match ends of module names, an expression a whole name, "all-linear" what PEFT 0.21
 * makes of it with transformers 5. "experts" is ours: all routed experts, gate and up with an A
 * each. "all" is LLaMA-Factory's: experts and attention.
 */
#ifndef MOE_MODEL_ADAPTERS_TARGETS_H
#define MOE_MODEL_ADAPTERS_TARGETS_H

#include "model/adapters/adapter.h"

struct moe_targets {
	bool on[MOE_ADAPTER_TARGETS][MOE_ARCH_MAX_LAYERS];
	bool any[MOE_ADAPTER_TARGETS];
	bool gate_up, down; /* of the experts */
	/*
	 * gate_proj and up_proj were named: PEFT fuses them, with one A of twice the rank. Or the
	 * parameter gate_up_proj was: one A of the rank.
	 */
	bool fused_twice, fused;
};

/*
 * MOE_ERR_ARG: a name that nothing has, naming what can be adapted; gate without up.
 * MOE_ERR_UNSUPPORTED, MOE_ERR_FORMAT: the expression (model/adapters/pattern.h).
 */
enum moe_status moe_targets_resolve(const char *text, const struct moe_arch *arch,
				    struct moe_targets *out);

#endif
