/* SPDX-License-Identifier: Apache-2.0 */
#include "model/readers/kt_awq.h"
#include "model/quantised.h"
#include "model/readers/safetensors_table.h"

#include <stdio.h>

#define NAME_BYTES 160

extern const struct moe_format moe_format_gptq;

struct matrix {
	struct moe_array codes, scale, zero; /* borrowed */
	int64_t n, k;
};

/* ---- reading ---- */

static void codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k, uint8_t *out)
{
	const struct matrix *m = q->codes.data;

	for (int64_t i = k0; i < k0 + k; i++)
		*out++ = moe_stored_u32(&m->codes, row * (m->k / 8) + i / 8) >> i % 8 * 4 & 15;
}

static float scale(const struct moe_quantised *q, int64_t row, int64_t group)
{
	const struct matrix *m = q->codes.data;

	return moe_scale_at(m->scale.data, m->scale.dtype, group * m->n + row);
}

static int zero(const struct moe_quantised *q, int64_t row, int64_t group)
{
	const struct matrix *m = q->codes.data;

	return (int)(moe_stored_u32(&m->zero, group * (m->n / 8) + row / 8) >> row % 8 * 4 & 15) -
	       8;
}

static const struct moe_code_reader reader = { codes, scale, zero };

/* ---- finding ---- */

bool moe_kt_awq_parse(const char *name, struct moe_kt_awq_name *out)
{
	int end = 0;

	return sscanf(name, "blk.%d.ffn_%4[a-z]_exps.%d.%6[a-z]%n", &out->layer, out->which,
		      &out->expert, out->kind, &end) == 4 &&
	       !name[end] && out->layer >= 0 && out->expert >= 0 &&
	       (!strcmp(out->kind, "weight") || !strcmp(out->kind, "scale") ||
		!strcmp(out->kind, "qzeros"));
}

static const struct moe_st_tensor *find(const struct moe_safetensors *blk, int layer,
					const char *which, int expert, const char *kind,
					char name[NAME_BYTES])
{
	snprintf(name, NAME_BYTES, "blk.%d.ffn_%s_exps.%d.%s", layer, which, expert, kind);
	return moe_safetensors_find(blk, name);
}

bool moe_kt_awq_has_layer(const struct moe_safetensors *blk, int layer)
{
	char name[NAME_BYTES];

	return find(blk, layer, "gate", 0, "weight", name) != NULL;
}

static enum moe_status take(const struct moe_safetensors *blk, int layer, const char *which,
			    int expert, const char *kind, enum moe_dtype dtype,
			    struct moe_array *out)
{
	char name[NAME_BYTES];
	const struct moe_st_tensor *t = find(blk, layer, which, expert, kind, name);

	if (!t)
		return moe_fail(MOE_ERR_FORMAT, "tensor '%s' is missing", name);
	if (t->dtype != dtype || t->ndim < 1 || t->ndim > 2)
		return moe_fail(MOE_ERR_FORMAT,
				"tensor '%s' is %s with %d dimensions; kt's AWQ has %s, one or two",
				name, t->dtype_text, t->ndim, moe_dtype_name(dtype));
	*out = (struct moe_array){ .data = (void *)(uintptr_t)t->data,
				   .dtype = t->dtype,
				   .ndim = t->ndim };
	memcpy(out->shape, t->shape, sizeof out->shape);
	return MOE_OK;
}

static enum moe_status wrong(int layer, const char *which, int expert, const char *kind,
			     int64_t has, const char *text, int64_t n, int64_t k)
{
	return moe_fail(
		MOE_ERR_FORMAT,
		"tensor 'blk.%d.ffn_%s_exps.%d.%s' has %lld values; %s of a [%lld, %lld] matrix",
		layer, which, expert, kind, (long long)has, text, (long long)n, (long long)k);
}

static enum moe_status open(const struct moe_safetensors *blk, int layer, const char *which,
			    int expert, struct matrix *m, int64_t *group)
{
	int64_t words, zeros, scales, groups;

	MOE_TRY(take(blk, layer, which, expert, "weight", MOE_I32, &m->codes));
	MOE_TRY(take(blk, layer, which, expert, "scale", MOE_F16, &m->scale));
	MOE_TRY(take(blk, layer, which, expert, "qzeros", MOE_I32, &m->zero));
	words = moe_shape_count(m->codes.ndim, m->codes.shape);
	zeros = moe_shape_count(m->zero.ndim, m->zero.shape);
	scales = moe_shape_count(m->scale.ndim, m->scale.shape);
	groups = scales / m->n;
	if (m->n % 8 || m->k % 8 || words != m->n * (m->k / 8))
		return wrong(layer, which, expert, "weight", words, "eight codes in each", m->n,
			     m->k);
	if (scales % m->n || groups < 1 || m->k % groups)
		return wrong(layer, which, expert, "scale", scales,
			     "one for each row and group of columns", m->n, m->k);
	if (zeros != groups * (m->n / 8))
		return wrong(layer, which, expert, "qzeros", zeros, "one for eight scales", m->n,
			     m->k);
	*group = m->k / groups;
	return MOE_OK;
}

enum moe_status moe_kt_awq_tensor(const struct moe_safetensors *blk, struct moe_safetensors *st,
				  int layer, const char *which, int expert, int64_t n, int64_t k,
				  struct moe_st_codes **shared, struct moe_st_tensor *out)
{
	struct matrix *m = moe_st_table_memory(st, sizeof *m);
	struct moe_st_codes *c = *shared;
	int64_t group = 0;

	if (!m)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	m->n = n;
	m->k = k;
	MOE_TRY(open(blk, layer, which, expert, m, &group));
	if (!c || c->q.coding.group != group)
		c = *shared = moe_st_table_memory(st, sizeof *c);
	if (!c)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	c->q.coding = (struct moe_coding){
		.format = &moe_format_gptq, .scale = MOE_F16, .group = group, .zero = true, .rows = 1
	};
	c->q.reader = &reader;
	c->whole = true;
	*out = (struct moe_st_tensor){ .dtype_text = "kt AWQ",
				       .dtype = MOE_DTYPE_COUNT,
				       .ndim = 2,
				       .shape = { n, k },
				       .data = m,
				       .bytes = sizeof *m,
				       .codes = c };
	out->stored = (size_t)(n * k / 2 + n * (k / group) * 5 / 2);
	return MOE_OK;
}
