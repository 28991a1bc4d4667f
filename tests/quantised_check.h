/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised checkpoints made from a plain one, in the layouts in which people have them, and what
 * they stand for. */
#ifndef MOE_TESTS_QUANTISED_CHECK_H
#define MOE_TESTS_QUANTISED_CHECK_H

#include "codelets/format.h"
#include "model/file.h"
#include "model/readers/safetensors.h"
#include "model/readers/safetensors_writer.h"
#include "tests/child.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#define EXPERTS 8 /* of the tiny checkpoints, per layer */

/* One document of the models that are compared. */
#define IDS 40

static inline void ids_of(int32_t *ids)
{
	for (int i = 0; i < IDS; i++)
		ids[i] = (i * 37 + 11) % 2000;
}

struct quantised_kind {
	const char *name, *format;
	bool attention;			  /* its projections too */
	bool fused;			  /* one tensor of all experts: gate rows, then up rows */
	const char *codes, *scale, *zero; /* suffixes */
};

static const struct quantised_kind quantised_kinds[] = {
	{ "fp8", "fp8", true, false, ".weight", ".weight_scale_inv", NULL },
	{ "fp8_fused", "fp8", false, true, "", "_scale_inv", NULL },
	{ "int8", "int8", true, false, ".weight", ".weight_scale", NULL },
	{ "int4", "int4", false, false, ".weight_packed", ".weight_scale", NULL },
	{ "mxfp4", "mxfp4", false, true, "_blocks", "_scales", NULL },
	{ "gptq", "int4", true, false, ".qweight", ".scales", ".qzeros" },
	{ "awq", "int4", true, false, ".qweight", ".scales", ".qzeros" },
};

/* Its names are gptq's: only the shapes and the order of the bits differ. */
static inline bool is_awq(const struct quantised_kind *kind)
{
	return !strcmp(kind->name, "awq");
}

/* Items of a file being made. Tests move and drop items, so memory is listed apart. */
struct made {
	struct moe_st_item item[2000];
	size_t n;
	void *owned[8000];
	size_t n_owned;
	void *fused[8][2][2]; /* [layer][gate_up, down][codes, scales] */
};

static inline void *own(struct made *m, void *memory)
{
	CU_ASSERT_FATAL(memory && m->n_owned < MOE_COUNT(m->owned));
	return m->owned[m->n_owned++] = memory;
}

static inline void free_made(struct made *m)
{
	for (size_t i = 0; i < m->n_owned; i++)
		free(m->owned[i]);
	free(m);
}

static inline void *put_item(struct made *m, enum moe_dtype dtype, int ndim, const int64_t *shape,
			     const char *name)
{
	struct moe_st_item *i = &m->item[m->n++];
	int64_t count = moe_shape_count(ndim, shape);
	void *data = own(m, calloc((size_t)count + 8, MOE_MAX(moe_dtype_size(dtype), 1)));

	*i = (struct moe_st_item){
		.name = own(m, strdup(name)), .dtype = dtype, .ndim = ndim, .data = data
	};
	memcpy(i->shape, shape, (size_t)ndim * sizeof *shape);
	return data;
}

static inline uint8_t code_of(const struct moe_quantised *q, int64_t n, int64_t k)
{
	return ((const uint8_t *)q->codes.data)[n * q->k + k];
}

/* Codes of one matrix as the kind stores them, at an array of all experts. */
static inline void store_codes(const struct quantised_kind *kind, const struct moe_quantised *q,
			       int64_t n0, void *to)
{
	static const int awq[8] = { 0, 4, 1, 5, 2, 6, 3, 7 }; /* the nibble of each of 8 rows */
	uint8_t *bytes = to;
	uint32_t *words = to;

	for (int64_t n = 0; n < q->n; n++)
		for (int64_t k = 0; k < q->k; k++) {
			uint8_t c = code_of(q, n, k);

			if (is_awq(kind))
				words[k * (q->n / 8) + n / 8] |= (uint32_t)c << 4 * awq[n % 8];
			else if (kind->zero)
				words[k / 8 * q->n + n] |= (uint32_t)c << 4 * (k % 8);
			else if (!strcmp(kind->format, "int4"))
				words[(n0 + n) * (q->k / 8) + k / 8] |= (uint32_t)c << 4 * (k % 8);
			else if (!strcmp(kind->format, "mxfp4"))
				bytes[((n0 + n) * q->k + k) / 2] |= (uint8_t)(c << 4 * (k % 2));
			else
				bytes[(n0 + n) * q->k + k] = c;
		}
}

static inline void store_scales(const struct quantised_kind *kind, const struct moe_quantised *q,
				int64_t n0, enum moe_dtype dtype, void *to)
{
	int64_t groups = moe_groups(&q->coding, q->k), rows = (q->n + q->coding.rows - 1) / q->coding.rows;

	for (int64_t n = 0; n < rows; n++)
		for (int64_t g = 0; g < groups; g++)
			moe_scale_put(to, dtype,
				      kind->zero ? g * q->n + n : (n0 / q->coding.rows + n) * groups + g,
				      q->reader->scale(q, n * q->coding.rows, g));
}

/* Tensors of `experts` (0: one) matrices of rows x k; returns their codes and scales. */
static inline void put_tensors(struct made *m, const struct quantised_kind *kind, const char *base,
			       int64_t experts, int64_t rows, const struct moe_quantised *q,
			       void **codes, void **scales)
{
	int64_t groups = moe_groups(&q->coding, q->k), blocks = (rows + q->coding.rows - 1) / q->coding.rows;
	int64_t c[4] = { experts, rows, q->k, 0 }, s[3] = { experts, blocks, groups };
	enum moe_dtype dtype = MOE_U8, scale = MOE_F32;
	int skip = experts == 0, ndim = 3;
	char name[280]; /* a base and the longest suffix */

	if (kind->zero) {
		c[1] = is_awq(kind) ? q->k : q->k / 8, c[2] = is_awq(kind) ? rows / 8 : rows;
		s[1] = groups, s[2] = rows, dtype = MOE_I32, scale = MOE_F16;
	} else if (!strcmp(kind->format, "int4")) {
		c[2] = q->k / 8, dtype = MOE_I32, scale = MOE_BF16;
	} else if (!strcmp(kind->format, "mxfp4")) {
		c[2] = q->k / 32, c[3] = 16, ndim = 4, scale = MOE_U8;
	} else {
		dtype = strcmp(kind->format, "fp8") ? MOE_I8 : MOE_F8_E4M3;
	}
	snprintf(name, sizeof name, "%s%s", base, kind->codes);
	*codes = put_item(m, dtype, ndim - skip, c + skip, name);
	snprintf(name, sizeof name, "%s%s", base, kind->scale);
	*scales = put_item(m, scale, 3 - skip, s + skip, name);
	if (!kind->zero)
		return;
	snprintf(name, sizeof name, "%s%s", base, kind->zero);
	s[2] = rows / 8; /* 8 is the zero of all; gptq stores it less one */
	memset(put_item(m, MOE_I32, 2, s + 1, name), is_awq(kind) ? 0x88 : 0x77, (size_t)(groups * rows / 8) * 4);
	if (is_awq(kind))
		return;
	snprintf(name, sizeof name, "%s.g_idx", base);
	int32_t *order = put_item(m, MOE_I32, 1, &q->k, name);

	for (int64_t k = 0; k < q->k; k++)
		order[k] = (int32_t)(k / q->coding.group);
}

static inline void put_plain(struct made *m, const char *name, const struct moe_quantised *q)
{
	float *row = put_item(m, MOE_F32, 2, (int64_t[]){ q->n, q->k }, name);

	for (int64_t n = 0; n < q->n; n++, row += q->k)
		moe_dequantise_row(q, n, 0, q->k, row);
}

/* Which expert and matrix a name is of; false: none. */
static inline bool expert_name(const char *name, int *layer, int *expert, char matrix[16])
{
	return sscanf(name, "model.layers.%d.mlp.experts.%d.%15[a-z_].weight", layer, expert,
		      matrix) == 3;
}

/* One matrix into the quantised and the plain checkpoint. */
static inline void put_matrix(struct made *coded, struct made *plain,
			      const struct quantised_kind *kind, const struct moe_st_tensor *t,
			      int64_t E)
{
	char matrix[16] = "", base[256], fused_name[256];
	int layer = 0, expert = 0, down, up;
	int64_t n = t->shape[0], k = t->shape[1];
	struct moe_quantised q;
	void *memory, *codes, *scales, **at;

	CHECK_OK(moe_quantise(moe_format_find(kind->format), t->data, t->dtype, n, k, k, &q,
			      &memory));
	own(coded, memory);
	put_plain(plain, t->name, &q);
	snprintf(base, sizeof base, "%.*s", (int)(strlen(t->name) - strlen(".weight")), t->name);
	if (!kind->fused || !expert_name(t->name, &layer, &expert, matrix)) {
		const struct moe_st_item *scale = &coded->item[coded->n + 1];

		put_tensors(coded, kind, base, 0, n, &q, &codes, &scales);
		store_codes(kind, &q, 0, codes);
		store_scales(kind, &q, 0, scale->dtype, scales);
		return;
	}
	down = !strcmp(matrix, "down_proj");
	up = !strcmp(matrix, "up_proj");
	at = coded->fused[layer][down];
	snprintf(fused_name, sizeof fused_name, "model.layers.%d.mlp.experts.%s", layer,
		 down ? "down_proj" : "gate_up_proj");
	if (!at[0])
		put_tensors(coded, kind, fused_name, E, down ? n : 2 * n, &q, &at[0], &at[1]);
	int64_t row = expert * (down ? n : 2 * n) + up * n;

	store_codes(kind, &q, row, at[0]);
	store_scales(kind, &q, row, !strcmp(kind->format, "mxfp4") ? MOE_U8 : MOE_F32, at[1]);
}

static inline void copy_plain(struct made *m, const struct moe_st_tensor *t)
{
	m->item[m->n++] = (struct moe_st_item){ .name = t->name,
						.dtype = t->dtype,
						.ndim = t->ndim,
						.data = t->data,
						.shape = { t->shape[0], t->shape[1], t->shape[2],
							   t->shape[3] } };
}

static inline void write_checkpoint(const struct made *m, const char *from, const char *dir)
{
	char command[1024], path[512];

	mkdir(dir, 0777);
	snprintf(command, sizeof command,
		 "cp %s/*.json %s/ && rm -f %s/model.safetensors.index.json", from, dir, dir);
	CHECK(system(command) == 0);
	snprintf(path, sizeof path, "%s/model.safetensors", dir);
	CHECK_OK(moe_safetensors_write(path, m->item, m->n, NULL, 0));
}

/* `coded` and `plain` from the checkpoint at `from`, whose experts are E per layer. */
static inline void make_quantised(const char *from, int64_t E, const struct quantised_kind *kind,
				  const char *coded_dir, const char *plain_dir,
				  void (*change)(struct made *coded))
{
	struct moe_safetensors *st;
	struct made *coded = calloc(1, sizeof *coded), *plain = calloc(1, sizeof *plain);

	CHECK_OK(moe_safetensors_open(from, &st));
	for (size_t i = 0; i < moe_safetensors_count(st); i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(st, i);
		bool expert = strstr(t->name, ".mlp.experts.") != NULL;
		bool projection = strstr(t->name, ".self_attn.") && t->ndim == 2;

		if (expert || (projection && kind->attention)) {
			put_matrix(coded, plain, kind, t, E);
			continue;
		}
		copy_plain(coded, t);
		copy_plain(plain, t);
	}
	if (change)
		change(coded);
	write_checkpoint(coded, from, coded_dir);
	if (plain_dir)
		write_checkpoint(plain, from, plain_dir);
	moe_safetensors_close(st);
	free_made(coded);
	free_made(plain);
}

/* ---- damage to a checkpoint ---- */

#define EXPERT "model.layers.2.mlp.experts.5.up_proj"

static inline struct moe_st_item *item(struct made *m, const char *name)
{
	for (size_t i = 0; i < m->n; i++)
		if (!strcmp(m->item[i].name, name))
			return &m->item[i];
	CHECK(!"there is such an item");
	return &m->item[0];
}

static inline void no_scale(struct made *m)
{
	*item(m, EXPERT ".weight_scale_inv") = m->item[m->n - 1];
	m->n--;
}

#endif
