/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised experts of bench_layer: made from the random weights, handed over as a checkpoint has them. */
#include "bench/layer/layer_bench.h"

#include "codelets/kernels/kernels.h"

#define PER_ROW "_row"

bool layer_take_format(const char *name, struct layer_options *o)
{
	size_t n = strlen(name), suffix = strlen(PER_ROW);
	char base[16];

	o->per_row = n > suffix && !strcmp(name + n - suffix, PER_ROW);
	n -= o->per_row ? suffix : 0;
	if (n >= sizeof base)
		return false;
	memcpy(base, name, n);
	base[n] = 0;
	o->format = moe_format_find(base);
	/* one scale per row is what integers have; blocks of rows have no such form */
	return o->format && o->format->quantise &&
	       (!o->per_row || (o->format->rows == 1 && o->format->scale != MOE_SCALE_UE8M0));
}

static struct moe_quantised form_of(const struct layer_options *o, int64_t n, int64_t k)
{
	struct moe_quantised q = { .coding = moe_format_coding(o->format, k),
				   .n = n,
				   .k = k };

	if (o->per_row)
		q.coding.group = k;
	return q;
}

static size_t bytes_of(const struct moe_array *a)
{
	return a->ndim ? (size_t)moe_shape_count(a->ndim, a->shape) * moe_dtype_size(a->dtype) : 0;
}

/* Room for E of them; *a then is the array of all, experts first. */
static enum moe_status make_room(struct moe_array *a, int64_t E)
{
	a->data = moe_calloc((size_t)E, MOE_MAX(bytes_of(a), 1));
	if (!a->data)
		return moe_fail(MOE_ERR_NOMEM, "no memory for quantised weights");
	memmove(a->shape + 1, a->shape, (size_t)a->ndim * sizeof *a->shape);
	a->shape[0] = E;
	a->ndim++;
	return MOE_OK;
}

static enum moe_status store(const struct layer_options *o, const uint16_t *src,
			     const struct moe_stored *one, int64_t n, int64_t k,
			     struct moe_quantised_arrays *all)
{
	const struct moe_code_writer *writer = o->format->layout[0].writer;
	enum moe_status st = MOE_OK;

	for (int64_t e = 0; e < o->shape.E && st == MOE_OK; e++) {
		struct moe_quantised q = form_of(o, n, k);
		struct moe_stored s = *one;
		void *memory = NULL;

		s.codes.data = (char *)all->codes.data + (size_t)e * bytes_of(&one->codes);
		s.scale.data = (char *)all->scale.data + (size_t)e * bytes_of(&one->scale);
		s.more.data = NULL;
		st = moe_quantise_as(src + e * n * k, MOE_BF16, k, &q, &memory);
		if (st == MOE_OK)
			st = writer->store(&q, &s);
		moe_free(memory);
	}
	return st;
}

enum moe_status layer_set_coded(const struct layer_options *o, struct moe_block *block,
				enum moe_block_array which, const uint16_t *src)
{
	int64_t n = which == MOE_BLOCK_DOWN_PROJ ? o->shape.H : o->shape.I;
	int64_t k = which == MOE_BLOCK_DOWN_PROJ ? o->shape.I : o->shape.H;
	struct moe_quantised_arrays all = { .struct_size = sizeof all };
	struct moe_quantised form = form_of(o, n, k);
	struct moe_stored one = { .n = n, .k = k };
	enum moe_status st = o->format->layout[0].writer->shapes(&form, &one);

	all.codes = one.codes;
	all.scale = one.scale;
	if (st == MOE_OK)
		st = make_room(&all.codes, o->shape.E);
	if (st == MOE_OK)
		st = make_room(&all.scale, o->shape.E);
	if (st == MOE_OK)
		st = store(o, src, &one, n, k, &all);
	if (st == MOE_OK)
		st = moe_block_set_quantised(block, which, &all);
	moe_free(all.codes.data);
	moe_free(all.scale.data);
	return st;
}
