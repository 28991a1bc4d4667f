/* SPDX-License-Identifier: Apache-2.0 */
/* Base weights of a layer by every way in: arrays, codes in memory, a file; plain, or quantised on
 * the way or before. */
#include "tests/random_layers.h"

#include "tests/quantised_check.h"

static const char *const matrices[] = { "gate_proj", "up_proj", "down_proj" };

static int64_t rows_of(const struct layer_model *m, int i)
{
	return i == 2 ? m->d.c.H : m->d.c.I;
}

static int64_t columns_of(const struct layer_model *m, int i)
{
	return i == 2 ? m->d.c.I : m->d.c.H;
}

/* Row `row` of the arrays of matrix i. */
static float *matrix_at(const struct layer_model *m, int i, int row)
{
	return m->d.w[i] + row * rows_of(m, i) * columns_of(m, i);
}

/* What a packed table multiplies by: a scale times a code, in bf16. */
static void as_multiplied(struct layer_model *m)
{
	for (int i = 0; i < 3; i++)
		for (int64_t j = 0; table_is_packed() && j < m->d.n[i]; j++)
			m->d.w[i][j] = moe_bf16_to_f32(moe_f32_to_bf16(m->d.w[i][j]));
}

/* Floats that the layer quantises itself. */
static void quantise_all(struct layer_model *m)
{
	for (int i = 0; i < 3; i++)
		for (int row = 0; row < N_EXPERTS; row++) {
			int64_t n = rows_of(m, i), k = columns_of(m, i);
			float *w = matrix_at(m, i, row);
			struct moe_quantised q;
			void *memory;

			CHECK_OK(moe_quantise(m->format, w, MOE_F32, n, k, k, &q, &memory));
			for (int64_t j = 0; j < n; j++)
				moe_dequantise_row(&q, j, 0, k, w + j * k);
			moe_free(memory);
		}
}

/* ---- tensors as checkpoints have them ---- */

/* A layout of the format, of which the sizes here allow one tensor per expert or all; NULL: none.
 */
static const struct quantised_kind *kind_of(const struct moe_format *f)
{
	for (size_t i = 0; f && i < MOE_COUNT(quantised_kinds); i++) {
		const struct quantised_kind *k = &quantised_kinds[i];
		bool shared_blocks = k->fused && !strcmp(k->format, "fp8"); /* of gate and up */

		if (!strcmp(k->name, "gptq") && any(2))
			continue; /* awq comes behind */
		if (!shared_blocks && !strcmp(k->zero ? "gptq" : k->format, f->name))
			return k;
	}
	return NULL;
}

static void tensor_of(const struct layer_model *m, struct made *made, int i, int row,
		      struct moe_st_tensor *t)
{
	char name[128];

	snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s.weight", m->p.layer, row,
		 matrices[i]);
	*t = (struct moe_st_tensor){ .name = own(made, strdup(name)),
				     .dtype = MOE_F32,
				     .ndim = 2,
				     .shape = { rows_of(m, i), columns_of(m, i) },
				     .data = matrix_at(m, i, row) };
}

static void make_fused(const struct layer_model *m, struct made *made)
{
	int64_t H = m->d.c.H, I = m->d.c.I, n = I * H;
	char name[128];
	float *to;

	snprintf(name, sizeof name, "model.layers.%d.mlp.experts.gate_up_proj", m->p.layer);
	to = put_item(made, MOE_F32, 3, (int64_t[]){ N_EXPERTS, 2 * I, H }, name);
	for (int row = 0; row < N_EXPERTS; row++)
		for (int i = 0; i < 2; i++, to += n)
			memcpy(to, matrix_at(m, i, row), (size_t)n * sizeof *to);
	snprintf(name, sizeof name, "model.layers.%d.mlp.experts.down_proj", m->p.layer);
	to = put_item(made, MOE_F32, 3, (int64_t[]){ N_EXPERTS, H, I }, name);
	memcpy(to, m->d.w[2], (size_t)(N_EXPERTS * n) * sizeof *to);
}

/* Plain tensors, one by one or fused. */
static struct made *make_plain(const struct layer_model *m)
{
	struct made *made = calloc(1, sizeof *made);
	struct moe_st_tensor t;

	if (any(2)) {
		make_fused(m, made);
		return made;
	}
	for (int row = 0; row < N_EXPERTS; row++)
		for (int i = 0; i < 3; i++) {
			tensor_of(m, made, i, row, &t);
			copy_plain(made, &t);
		}
	return made;
}

/* Codes and scales; the model's weights are then what they stand for. */
static struct made *make_coded(struct layer_model *m, const struct quantised_kind *kind)
{
	struct made *coded = calloc(1, sizeof *coded), *plain = calloc(1, sizeof *plain);
	struct moe_st_tensor t;

	for (int row = 0; row < N_EXPERTS; row++)
		for (int i = 0; i < 3; i++) {
			tensor_of(m, coded, i, row, &t);
			put_matrix(coded, plain, kind, &t, N_EXPERTS);
		}
	for (int row = 0; row < N_EXPERTS; row++)
		for (int i = 0; i < 3; i++)
			memcpy(matrix_at(m, i, row), plain->item[row * 3 + i].data,
			       (size_t)(rows_of(m, i) * columns_of(m, i)) * sizeof(float));
	free_made(plain);
	return coded;
}

static enum moe_status load_file(struct layer_model *m, const struct made *made, const int64_t *map,
				 int64_t n)
{
	char path[300];
	enum moe_status st;

	snprintf(path, sizeof path, "%s/experts.safetensors", moe_test_dir());
	expect_status(moe_safetensors_write(path, made->item, made->n, NULL, 0), MOE_OK,
		      "writing a file");
	if (!any(4)) {
		expect_status(moe_experts_load_file(m->l, path, "model.layers.77", NULL, 0),
			      MOE_ERR_FORMAT, "a file without the layer");
		expect_status(moe_experts_load_file(m->l, path, NULL, map, N_EXPERTS - 1),
			      MOE_ERR_ARG, "a file by a short map");
	}
	st = moe_experts_load_file(m->l, path, NULL, map, n);
	remove(path); /* what is loaded needs it no more */
	return st;
}

static struct moe_array array_of_item(const struct moe_st_item *i)
{
	struct moe_array a = { .data = (void *)i->data, .dtype = i->dtype, .ndim = i->ndim };

	memcpy(a.shape, i->shape, sizeof a.shape);
	return a;
}

/* Each expert's codes and scales by themselves. */
static enum moe_status load_codes(struct layer_model *m, const struct made *made,
				  const struct quantised_kind *kind, const int64_t *map, int64_t n)
{
	struct moe_quantised_arrays a[3][N_EXPERTS];
	size_t each = !kind->zero ? 2 : is_awq(kind) ? 3 : 4; /* codes, scales, and zeros and an order */

	for (int row = 0; row < N_EXPERTS; row++)
		for (int i = 0; i < 3; i++) {
			const struct moe_st_item *item = &made->item[(size_t)(row * 3 + i) * each];

			a[i][row] =
				(struct moe_quantised_arrays){ .struct_size = sizeof a[i][row],
							       .codes = array_of_item(item),
							       .scale = array_of_item(item + 1) };
			if (kind->zero)
				a[i][row].zero = array_of_item(item + 2);
		}
	if (!any(4)) {
		struct moe_array codes = a[1][2].codes;

		a[1][2].codes.data = NULL;
		expect_status(moe_experts_load_quantised(m->l, a[0], a[1], a[2], N_EXPERTS, map, n),
			      MOE_ERR_ARG, "no codes of an expert");
		a[1][2].codes = codes;
		a[1][2].codes.dtype = MOE_F64;
		expect_status(moe_experts_load_quantised(m->l, a[0], a[1], a[2], N_EXPERTS, map, n),
			      MOE_ERR_FORMAT, "codes of another type");
		a[1][2].codes = codes;
	}
	return moe_experts_load_quantised(m->l, a[0], a[1], a[2], N_EXPERTS, map, n);
}

/* Of floats, or codes of the layer's format. */
static enum moe_status load_tensors(struct layer_model *m, bool in_memory, const int64_t *map,
				    int64_t n)
{
	const struct quantised_kind *kind = any(3) ? kind_of(m->format) : NULL;
	struct made *made = kind ? make_coded(m, kind) : make_plain(m);
	enum moe_status st = kind && !kind->fused && in_memory ? load_codes(m, made, kind, map, n)
							       : load_file(m, made, map, n);

	free_made(made);
	if (m->format && !kind)
		quantise_all(m);
	return st;
}

/* From the order of the arrays to that of experts. */
static void by_expert(struct layer_model *m)
{
	for (int i = 6; i < 9; i++) {
		size_t n = (size_t)m->d.n[array_of(i)];
		float *w = m->d.w[array_of(i)], *loaded = malloc(n * sizeof *loaded);

		memcpy(loaded, w, n * sizeof *w);
		for (size_t j = 0; j < n; j++)
			w[j] = loaded[caller_index(m, i, (int64_t)j)];
		free(loaded);
	}
}

void model_load(struct layer_model *m)
{
	int64_t entries[N_EXPERTS + 1], n = N_EXPERTS + any(2);
	int way = any(m->format ? 3 : 6); /* plain arrays mostly: they are quickest */

	memcpy(entries, m->map, sizeof m->map);
	entries[N_EXPERTS] = -7; /* more than are needed: not looked at */
	if (way == 1 || way == 2) {
		expect_status(load_tensors(m, way == 1, entries, n), MOE_OK, "load tensors");
	} else {
		expect_status(layer_load(m->l, &m->d, entries, n), MOE_OK, "load");
		if (m->format)
			quantise_all(m);
	}
	if (m->format)
		as_multiplied(m);
	by_expert(m);
}

void misuse_quantised(struct layer_model *m)
{
	static const uint8_t codes[8];
	struct moe_quantised_arrays a = { .struct_size = sizeof a };
	struct moe_array one = {
		.data = (void *)codes, .dtype = MOE_U8, .ndim = 2, .shape = { 2, 4 }
	};

	if (!m->format) {
		expect_status(moe_experts_load_quantised(m->l, &a, &a, &a, 0, NULL, 0),
			      MOE_ERR_STATE, "codes without a weight_format");
		return;
	}
	expect_status(moe_experts_load_quantised(m->l, &a, &a, &a, 0, NULL, 0), MOE_ERR_ARG,
		      "no codes");
	a.codes = a.scale = one;
	expect_status(moe_experts_load_quantised(m->l, &a, &a, &a, 0, NULL, 0), MOE_ERR_ARG,
		      "codes of too few experts");
	expect_status(moe_experts_load_quantised(m->l, &a, &a, &a, 3, NULL, 0), MOE_ERR_ARG,
		      "three matrices of four");
	expect_status(moe_experts_load_quantised(m->l, NULL, &a, &a, 0, NULL, 0), MOE_ERR_ARG,
		      "codes that are NULL");
	a.struct_size = 8;
	expect_status(moe_experts_load_quantised(m->l, &a, &a, &a, 0, NULL, 0), MOE_ERR_ARG,
		      "codes without struct_size");
}
