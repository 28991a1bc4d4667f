/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PEFT's adapter directory: adapter_config.json and adapter_model.safetensors, routed experts in
 * the fused target_parameters form of PEFT 0.21: gate_up: A [E*R, H], row e*R + j (expert slowest);
 * B [2I, R*E], column j*E + e (expert fastest) down:    A [E*r, I], B [H, r*E], indexed alike. PEFT
 * has one A for gate and up: with share_a R = r, else R = 2r (alpha by rank_pattern and
 * alpha_pattern so that the scaling stays) and B is block-diagonal: gate rows use the first r.
 */
#ifndef MOE_MODEL_ADAPTERS_PEFT_H
#define MOE_MODEL_ADAPTERS_PEFT_H

#include "model/adapters/adapter.h"

/*
 * Reads dir; *out is the caller's (moe_adapter_free). MOE_ERR_IO: a file is missing;
 * MOE_ERR_FORMAT: malformed, a partner tensor missing, shapes or ranks that contradict each other
 * or the config; MOE_ERR_UNSUPPORTED: DoRA, biases, other target modules, other ranks of gate_up
 * and down.
 */
enum moe_status moe_peft_read(const char *dir, struct moe_adapter **out);

/*
 * Writes both files into dir (made if missing), each atomically, the configuration last. Entries of
 * one target must agree in rank and alpha over the layers (MOE_ERR_ARG otherwise).
 */
enum moe_status moe_peft_write(const char *dir, const struct moe_adapter *adapter);

#endif
