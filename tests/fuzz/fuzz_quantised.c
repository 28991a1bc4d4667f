/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantised tensors of a model.safetensors in every layout, GPTQ's and AWQ's too: three bytes say the size that a model
 * expects (rows and columns by eights, experts), the rest is the file. Each weight that is found is read to its end, and
 * a size that its tensors tell is one that opens.
 */
#include "tests/fuzz/fuzz.h"

#include "model/quantised.h"

#include <stdio.h>

#define MOST 96

static volatile float sum;

static void read_matrix(const struct moe_quantised *q)
{
	float row[MOST];

	moe_check_scales(q, "scale");
	for (int64_t n = 0; n < q->n; n++)
		for (int64_t k = 0; k < q->k; k += MOST) {
			moe_dequantise_row(q, n, k, MOE_MIN(MOST, q->k - k), row);
			sum += row[0];
		}
}

static void find(const struct moe_safetensors *st, const char *name, int64_t experts, int64_t n, int64_t k)
{
	struct moe_st_quantised t;
	bool found;

	if (moe_st_quantised_find(st, name, experts, n, k, &t, &found) != MOE_OK || !found)
		return;
	if (t.q.n != n || t.q.k != k || t.q.coding.group < 1 || t.q.coding.rows < 1)
		__builtin_trap();
	for (int64_t e = 0; e < MOE_MAX(experts, 1); e++) {
		struct moe_quantised q = experts ? moe_st_quantised_expert(&t, e) : t.q;

		read_matrix(&q);
	}
}

/* The name that has these codes, in each layout; and by the size that its tensors tell. */
static void each_layout(const struct moe_safetensors *st, const struct moe_st_tensor *t, const uint8_t *size)
{
	size_t length = strlen(t->name);

	for (int i = 0; moe_format_list[i]; i++)
		for (int j = 0; j < MOE_FORMAT_LAYOUTS && moe_format_list[i]->layout[j].codes; j++) {
			const struct moe_format_layout *l = &moe_format_list[i]->layout[j];
			size_t cut = strlen(l->codes);
			const struct moe_st_tensor *scale;
			struct moe_array a[2] = { { .ndim = 0 } };
			char name[128], other[160];
			int64_t n, k;

			if (length < cut || length >= 100 || strcmp(t->name + length - cut, l->codes))
				continue;
			snprintf(name, sizeof name, "%.*s", (int)(length - cut), t->name);
			snprintf(other, sizeof other, "%s%s", name, l->scale);
			find(st, name, size[2] % 4, 8 * (1 + size[0] % 16), 8 * (1 + size[1] % 16));
			scale = moe_safetensors_find(st, other);
			if (!scale || t->dtype != l->codes_dtype || t->ndim > MOE_MAX_NDIM || scale->ndim > MOE_MAX_NDIM)
				continue;
			a[0] = (struct moe_array){ .ndim = t->ndim, .dtype = t->dtype };
			a[1] = (struct moe_array){ .ndim = scale->ndim, .dtype = scale->dtype };
			memcpy(a[0].shape, t->shape, sizeof t->shape);
			memcpy(a[1].shape, scale->shape, sizeof scale->shape);
			if (l->size(&a[0], &a[1], &n, &k) && n > 0 && k > 0 && n < 1 << 20 && k < 1 << 20 && n * k < 1 << 20)
				find(st, name, 0, n, k);
		}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct moe_safetensors *st;

	if (size < 3 || moe_safetensors_open(fuzz_file(data + 3, size - 3, "model.safetensors"), &st) != MOE_OK)
		return 0;
	for (size_t i = 0; i < moe_safetensors_count(st); i++)
		each_layout(st, moe_safetensors_at(st, i), data);
	moe_safetensors_close(st);
	return 0;
}
