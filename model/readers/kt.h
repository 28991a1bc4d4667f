/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kt-kernel's converted expert weights: INT8 and INT4 with a scale per output row of a NUMA part,
 * in one folder.
 *
 *   _layer_N/_numa_P/INT8_gate_E_<bytes>Byte_quant_.kt, ..._scale_.kt     (also INT4; up, down)
 *   safetensors with blk.N.ffn_gate_exps.E.numa.P.weight and .scale        (only where a layer has
 * no .kt files), or with AWQ's codes (kt_awq.h)
 *
 * Part P of gate and up has rows P I/parts.., of down columns. Here a matrix is whole again, down
 * with a group of I / parts columns, so any number of our parts can have it. Prepared backward
 * weights (gate_bwd, ...: the transposed part, quantised by its own rows) must have their sizes and
 * are not used: a backward here multiplies by the forward's codes. model/convert_kt.c writes such folders.
 */
#ifndef MOE_MODEL_READERS_KT_H
#define MOE_MODEL_READERS_KT_H

#include "model/readers/safetensors.h"

struct moe_kt_shape {
	int experts;
	int64_t hidden, inner; /* H, I */
};

/* dir has layers of .kt files. */
bool moe_kt_is(const char *dir);
bool moe_kt_has_layer(const char *dir, int layer);
/*
 * The experts of a layer, under these names (which: 0 gate, 1 up, 2 down), in place of those that
 * st has. st keeps what it needs of dir until it is closed; a call for another dir is
 * MOE_ERR_STATE. MOE_ERR_IO, MOE_ERR_FORMAT, MOE_ERR_UNSUPPORTED name the file or tensor and what
 * is expected.
 */
typedef bool (*moe_kt_name_fn)(void *user, int layer, int which, int expert, char *buf,
			       size_t size);
struct moe_kt;
enum moe_status moe_kt_open(const char *dir, struct moe_safetensors *st, struct moe_kt **out);
enum moe_status moe_kt_add_layer(struct moe_kt *kt, const struct moe_kt_shape *shape, int layer,
				 moe_kt_name_fn name, void *user);
/* Of sizes and times of all files that were looked at. */
uint64_t moe_kt_stamp(const struct moe_kt *kt);
/* Prepared backward weights of layers added from now on become tensors too: NAME.weight_backward, transposed, whole. */
void moe_kt_list_backward(struct moe_kt *kt);
/* The file (moe_st_tensor.file) that tensors added from now on are said to lie in. */
void moe_kt_set_file(struct moe_kt *kt, int file);

/*
 * kt_folder.c: a folder alone, as a checkpoint. st holds what its safetensors hold, under their names, or nothing.
 * Experts are model.layers.N.mlp.experts.E.gate_proj.weight, ..., of sizes that the files' tell; the other tensors of
 * merged folders get the names that kt-kernel's converter took from them.
 */
bool moe_kt_is_merged(const struct moe_safetensors *st);
enum moe_status moe_kt_fill(const char *dir, struct moe_safetensors *st);

#endif
