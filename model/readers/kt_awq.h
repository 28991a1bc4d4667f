/* SPDX-License-Identifier: Apache-2.0 */
/*
 * AWQ weights as kt-kernel's converter leaves them in safetensors, whole for all NUMA parts. Of a
 * matrix [n, k]:
 *
 *   blk.N.ffn_gate_exps.E.weight   I32 [n, k / 8]: column 8 j + i of a row in bits 4 i of word j
 *   blk.N.ffn_gate_exps.E.scale    F16, n of the first group of columns, n of the second, ...
 *   blk.N.ffn_gate_exps.E.qzeros   I32 [groups, n / 8]: row 8 j + i in bits 4 i of word j
 *
 * Private to model/readers/.
 */
#ifndef MOE_MODEL_READERS_KT_AWQ_H
#define MOE_MODEL_READERS_KT_AWQ_H

#include "model/readers/safetensors.h"

/* A part of such a name. */
struct moe_kt_awq_name {
	int layer, expert;
	char which[8], kind[8]; /* gate, up, down; weight, scale, qzeros */
};
bool moe_kt_awq_parse(const char *name, struct moe_kt_awq_name *out);
bool moe_kt_awq_has_layer(const struct moe_safetensors *blk, int layer);
/*
 * The matrix [n, k] of blk as a tensor for st's table (codes of the format gptq); its memory is
 * st's, its name and file the caller's. MOE_ERR_FORMAT names the tensor that is missing or wrong.
 */
enum moe_status moe_kt_awq_tensor(const struct moe_safetensors *blk, struct moe_safetensors *st,
				  int layer, const char *which, int expert, int64_t n, int64_t k,
				  struct moe_st_codes **shared, struct moe_st_tensor *out);

#endif
