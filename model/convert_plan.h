/* SPDX-License-Identifier: Apache-2.0 */
/* What a conversion reads and what it will write. Private to model/convert*.c. */
#ifndef MOE_MODEL_CONVERT_PLAN_H
#define MOE_MODEL_CONVERT_PLAN_H

#include "model/quantised.h"

#define MOE_CONVERT_NAME 192
#define MOE_CONVERT_TENSORS 4 /* of a matrix: codes or values, scale, zero, more */

/* A format as convert knows it. */
struct moe_convert_target {
	const char *name;
	const struct moe_format *format;	/* NULL: plain values */
	bool nearest; /* a GGUF's blocks become what they are read as: format and single are each weight's own */
	const struct moe_format_layout *single; /* names of a matrix */
	const struct moe_format_layout *fused; /* of all experts' in one tensor; NULL: one by one */
	enum moe_dtype dtype;		       /* of plain values, also where codes become values */
	bool linear; /* all projections are quantised, not the experts alone */
	bool keep;   /* everything stays as it is but for what is changed */
	int kt_bits; /* experts alone, as a folder of kt-kernel's INT8 or INT4 files: 8, 4; 0: a checkpoint */
};

/* A weight of the input: a matrix, or those of all experts in one tensor. */
struct moe_convert_source {
	char name[MOE_CONVERT_NAME];	   /* plain: with ".weight" where the model has it so */
	const struct moe_st_tensor *plain; /* or NULL: */
	struct moe_st_quantised coded;
	const struct moe_format_layout *layout; /* of coded; NULL: the file's own (moe_st_codes) */
	int64_t experts, n, k;			/* experts 0: one matrix */
	int file;
	const void *change;  /* what is done to its values; NULL: nothing */
	bool expert, linear; /* of a routed expert; a projection, experts' included */
};

/* A matrix of the output, or those of all experts. */
struct moe_convert_piece {
	size_t source;
	int64_t expert;		/* the source's; -1: all of them, one after the other */
	int64_t row0, n, k;	/* rows row0..row0 + n of each */
	int64_t matrices;	/* 1, or the experts of a fused tensor */
	bool keep;		/* codes are taken over */
	struct moe_quantised q; /* coding, n, k, rows; format NULL: plain */
	enum moe_dtype dtype;	/* then */
	const struct moe_format *format;
	const struct moe_format_layout *layout; /* whose names the tensors get */
	const struct moe_code_writer *writer;
	struct moe_stored stored;	     /* shapes of one matrix */
	int64_t tensor[MOE_CONVERT_TENSORS]; /* -1: none */
};

/* A tensor of the output. */
struct moe_convert_tensor {
	char *name;
	const char *dtype;
	size_t dtype_bytes; /* 1 where it is not known */
	int ndim;
	int64_t shape[MOE_MAX_NDIM];
	size_t bytes, at;		  /* at: behind its file's header */
	const struct moe_st_tensor *copy; /* as it is; or NULL: */
	size_t piece;
	int slot; /* of the piece's tensors */
	int shard;
};

struct moe_convert_shard {
	char *name;
	size_t first, n; /* tensors */
	size_t bytes;	 /* of data */
	char *header;	 /* length and text */
	size_t header_bytes;
	bool done;
	char sha256[MOE_SHA256_TEXT];
};

/* What a merge adds to weights. */
struct moe_convert_change {
	/* What is done to the weight of this plain name; NULL: nothing. */
	const void *(*find)(void *user, const char *name);
	/* Rows row0, row0 + 1, ... [n, k] of its matrix, or of an expert's. Any thread. MOE_ERR_NOMEM. */
	enum moe_status (*apply)(const void *change, int64_t expert, int64_t row0, int64_t n, int64_t k,
				 float *x);
	void *user;
};

struct moe_convert_plan {
	struct moe_convert_target target;
	const struct moe_convert_change *change; /* or NULL; borrowed */
	struct moe_safetensors *st;		 /* owned, as all below */
	struct moe_convert_source *source;
	size_t n_sources;
	struct moe_convert_piece *piece;
	size_t n_pieces;
	struct moe_convert_tensor *tensor; /* by shard, then by dtype size and name */
	size_t n_tensors;
	struct moe_convert_shard *shard; /* of kt's: folders of layers */
	int n_shards;
	struct moe_convert_kt *kt;	 /* convert_kt.c; NULL: a checkpoint */
	int64_t bytes_in, bytes; /* of all tensors */
};

/* MOE_ERR_ARG lists the names. layers: "experts", "linear" or NULL. */
enum moe_status moe_convert_target_find(const char *name, const char *layers,
					struct moe_convert_target *out);
/* Of st, which the plan takes over, also on failure. MOE_ERR_FORMAT, MOE_ERR_UNSUPPORTED: a tensor.
 */
enum moe_status moe_convert_plan_make(struct moe_convert_plan *p, struct moe_safetensors *st,
				      int64_t max_shard_bytes);
void moe_convert_plan_free(struct moe_convert_plan *p);

/* convert_scan.c: the sources of st; tensors that belong to none stay free in used. */
enum moe_status moe_convert_scan(struct moe_convert_plan *p, bool *used);
/* convert_cut.c: tensors into shards, with headers. */
enum moe_status moe_convert_cut(struct moe_convert_plan *p, int64_t max_shard_bytes);

#endif
