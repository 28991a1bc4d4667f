/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model's experts as a folder of kt-kernel's files (model/readers/kt_layout.h): _layer_N for
 * every layer that has experts, for a number of NUMA parts, on request with prepared backward
 * weights; and kt-weight-manifest.json (INT8 without backward weights: what kt-kernel asks for) or
 * SHA256SUMS. Private to model/convert*.c.
 */
#ifndef MOE_MODEL_CONVERT_KT_H
#define MOE_MODEL_CONVERT_KT_H

#include "model/convert_work.h"

struct moe_convert_kt_params {
	int parts;
	bool backward;
	int n_layers; /* of the model: later ones are left out; 0: all */
};

#define MOE_CONVERT_KT_NAME 160

struct moe_convert_kt {
	struct moe_convert_kt_params p;
	int bits, experts, n_layers;
	int64_t hidden, inner;
	int *layer; /* their numbers, ascending; the plan's pieces are [layer][expert][gate, up,
		       down] */
	char (*sum)[MOE_SHA256_TEXT]; /* [layer][file] */
};

/*
 * p->target.kt_bits and p->st are set; st is the plan's, also on failure. A shard is a layer.
 * MOE_ERR_FORMAT, MOE_ERR_UNSUPPORTED: an expert that is missing, or sizes that kt's files cannot
 * have.
 */
enum moe_status moe_convert_kt_plan(struct moe_convert_plan *p,
				    const struct moe_convert_kt_params *params);
void moe_convert_kt_free(struct moe_convert_kt *kt);
/* Rows and columns of a part; which: as moe_kt_names. */
void moe_convert_kt_part(const struct moe_convert_kt *kt, int which, int64_t *n, int64_t *k);
/* Of a layer: its files, their bytes; one file's place and bytes, and its name, which begins with
 * the layer's folder. */
size_t moe_convert_kt_files(const struct moe_convert_kt *kt);
size_t moe_convert_kt_layer_bytes(const struct moe_convert_kt *kt);
size_t moe_convert_kt_index(const struct moe_convert_kt *kt, int expert, int which, int part,
			    bool scale);
size_t moe_convert_kt_bytes(const struct moe_convert_kt *kt, int which, bool scale);
size_t moe_convert_kt_file(const struct moe_convert_kt *kt, int layer, size_t index,
			   char buf[MOE_CONVERT_KT_NAME]);

/* A layer's folder below `folder` (convert_kt_work.c). */
enum moe_status moe_convert_kt_write(struct moe_convert_run *r, int shard, const char *folder);
/* shard->sha256: of the checksums of all its files, as they are known; or read from them, "": a
 * file is missing. */
void moe_convert_kt_sum_files(struct moe_convert_plan *p, int shard);
enum moe_status moe_convert_kt_sum(struct moe_convert_plan *p, int shard, const char *folder);
/* The manifest or the sums, when all layers are there. */
enum moe_status moe_convert_kt_finish(const struct moe_convert_plan *p, const char *folder);

#endif
