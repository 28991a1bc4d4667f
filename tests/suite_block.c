/* SPDX-License-Identifier: Apache-2.0 */
/* The block object against plain loops in double, with buffers that grow, dtypes, strides and NaN. */
#include "engine/engine.h"
#include "tests/block_check.h"
#include "tests/tables.h"

#include <math.h>

const char moe_suite_name[] = "block";

static const char *const weight_names[BLOCK_WEIGHTS] = {
	"gate_proj",   "up_proj",     "down_proj",     "router",      "shared_gate",
	"shared_up",   "shared_down", "shared_router", "gate_lora_a", "up_lora_a",
	"down_lora_a", "gate_lora_b", "up_lora_b",     "down_lora_b",
};

static void compare(const char *name, const double *got, const double *want, int64_t n, double tol)
{
	double err = relative_error(got, want, n);

	if (!CHECK(err <= tol))
		printf("  %s: relative error %.3g, %.1e allowed\n", name, err, tol);
}

static void compare_floats(const char *name, const float *got, const double *want, int64_t n,
			   double tol)
{
	double *d = malloc((size_t)(n + 1) * sizeof *d);

	for (int64_t i = 0; i < n; i++)
		d[i] = got[i];
	compare(name, d, want, n, tol);
	free(d);
}

/* ---- against the reference ---- */

/* With few numbers there is no mean: all may be rounded far. */
static struct table_tolerance tolerance(const struct block_data *d)
{
	struct table_tolerance t = *table_tolerance_held();

	double few = d->c.T * d->c.I == 1 ? 3e-2 : 1e-2;

	if (table_is_packed() && d->c.T * d->c.I < 500)
		t = (struct table_tolerance){ few, few, few, few, few };
	return t;
}

static void compare_gradients(struct moe_block *b, const struct block_data *d,
			      const struct block_reference *r)
{
	for (int i = 0; i < BLOCK_WEIGHTS; i++) {
		double *got;

		if (!d->w[i] || (i < MOE_BLOCK_GATE_LORA_A && !d->c.base_grads))
			continue;
		got = block_get(b, &d->c, (enum moe_block_array)i, true);
		compare(weight_names[i], got, r->grad[i], d->n[i], tolerance(d).grad);
		free(got);
	}
}

static void compare_router(struct moe_block *b, const struct block_data *d,
			   const struct block_reference *r)
{
	int64_t n = (int64_t)d->c.T * d->c.E;
	double *g = calloc((size_t)n + 1, sizeof *g), aux = 0, z = 0;
	struct moe_array a = matrix_of(g, MOE_F64, d->c.T, d->c.E);

	CHECK_OK(moe_block_get(b, MOE_BLOCK_GRAD_ROUTER_LOGITS, &a));
	compare("grad_router_logits", g, r->grad_logits, n, tolerance(d).grad);
	a = (struct moe_array){ .data = &aux, .dtype = MOE_F64, .ndim = 1, .shape = { 1 } };
	CHECK_OK(moe_block_get(b, MOE_BLOCK_AUX_LOSS, &a));
	CHECK(fabs(aux - r->aux) <= 1e-5 * r->aux);
	a.data = &z;
	CHECK_OK(moe_block_get(b, MOE_BLOCK_Z_LOSS, &a));
	if (d->c.z != 0)
		CHECK(fabs(z - r->z) <= 1e-5 * r->z);
	else
		CHECK(z == 0);
	free(g);
}

/* Two micro-batches with accumulated gradients. */
static void against_reference(struct moe_engine *e, const struct block_case *c)
{
	struct block_reference r = { 0 };
	struct block_data d;
	struct moe_block *b;
	int32_t *ids;

	block_data_make(&d, c);
	if (c->limit != 0)
		block_settle_limit(&d);
	b = block_make(e, &d.c, &d, NULL);
	ids = calloc((size_t)(c->T * c->k) + 1, sizeof *ids);
	for (int micro = 0; b && micro < 2; micro++) {
		struct moe_array a = matrix_of(ids, MOE_I32, c->T, c->k);

		if (micro)
			block_second(&d);
		CHECK_OK(block_forward(b, &d, true, d.out));
		CHECK_OK(moe_block_get(b, MOE_BLOCK_TOPK_IDS, &a));
		if (!c->router)
			CHECK(!memcmp(ids, d.ids, (size_t)(c->T * c->k) * sizeof *ids));
		CHECK_OK(block_backward(b, &d));
		block_reference(&r, &d, ids);
		compare_floats("out", d.out, r.out, (int64_t)c->T * c->H, tolerance(&d).out);
		compare_floats("grad_x", d.grad_x, r.grad_x, (int64_t)c->T * c->H,
			       tolerance(&d).grad_x);
		compare_floats("grad_weights", d.grad_weights, r.grad_weights, (int64_t)c->T * c->k,
			       tolerance(&d).grad_weights);
		if (c->router)
			compare_router(b, &d, &r);
		compare_gradients(b, &d, &r);
	}
	moe_block_destroy(b);
	free(ids);
	block_reference_free(&r);
	block_data_free(&d);
}

static const struct {
	const char *name;
	struct block_case c;
} cases[] = {
	{ "several chunks, caller's ids",
	  { .E = 6, .k = 2, .H = 272, .I = 528, .T = 40, .r = 5, .base_grads = true } },
	{ "router, shared A, shared expert",
	  { .E = 8,
	    .k = 3,
	    .H = 72,
	    .I = 300,
	    .T = 90,
	    .r = 4,
	    .router = true,
	    .normalise = true,
	    .share_a = true,
	    .shared = 40,
	    .sigmoid = true,
	    .base_grads = true } },
	{ "no LoRA, plain shared expert",
	  { .E = 5,
	    .k = 2,
	    .H = 64,
	    .I = 96,
	    .T = 70,
	    .router = true,
	    .shared = 33,
	    .base_grads = true } },
	{ "auxiliary loss",
	  { .E = 8,
	    .k = 2,
	    .H = 40,
	    .I = 24,
	    .T = 100,
	    .r = 2,
	    .router = true,
	    .normalise = true,
	    .aux = .05f,
	    .base_grads = true } },
	{ "z-loss",
	  { .E = 8,
	    .k = 2,
	    .H = 40,
	    .I = 24,
	    .T = 100,
	    .r = 2,
	    .router = true,
	    .normalise = true,
	    .aux = .02f,
	    .z = .03f,
	    .base_grads = true } },
	{ "k = E",
	  { .E = 4,
	    .k = 4,
	    .H = 48,
	    .I = 56,
	    .T = 30,
	    .r = 3,
	    .router = true,
	    .normalise = true,
	    .base_grads = true } },
	{ "k = 1",
	  { .E = 4,
	    .k = 1,
	    .H = 48,
	    .I = 56,
	    .T = 30,
	    .r = 3,
	    .router = true,
	    .normalise = true,
	    .base_grads = true } },
	{ "all tokens to one expert",
	  { .E = 6,
	    .k = 2,
	    .H = 48,
	    .I = 270,
	    .T = 300,
	    .r = 3,
	    .routing = 1,
	    .base_grads = true } },
	{ "-1, duplicates, zero and negative weights",
	  { .E = 5, .k = 4, .H = 48, .I = 70, .T = 66, .r = 3, .routing = 2, .base_grads = true } },
	{ "rank above H",
	  { .E = 2, .k = 1, .H = 6, .I = 10, .T = 9, .r = 12, .base_grads = true } },
	{ "ones", { .E = 1, .k = 1, .H = 1, .I = 1, .T = 1, .r = 1, .base_grads = true } },
	{ "one token",
	  { .E = 64,
	    .k = 8,
	    .H = 17,
	    .I = 13,
	    .T = 1,
	    .r = 2,
	    .router = true,
	    .normalise = true,
	    .shared = 1,
	    .base_grads = true } },
	{ "clamped",
	  { .E = 5, .k = 2, .H = 72, .I = 300, .T = 40, .shared = 40, .sigmoid = true,
	    .base_grads = true, .limit = .4f } },
	{ "clamped, another slope, a shift",
	  { .E = 4, .k = 2, .H = 80, .I = 270, .T = 33, .base_grads = true, .limit = .3f, .alpha = 1.702f,
	    .shift = 1 } },
	{ "not clamped, another slope",
	  { .E = 4, .k = 2, .H = 80, .I = 70, .T = 33, .r = 3, .alpha = .5f, .shift = -2, .slices_i = 2 } },
	{ "forced slices, odd groups",
	  { .E = 7,
	    .k = 2,
	    .H = 520,
	    .I = 520,
	    .T = 20,
	    .r = 2,
	    .group_size = 3,
	    .slices_i = 3,
	    .slices_h = 2,
	    .base_grads = true } },
};

static void reference_with(int parts)
{
	struct moe_engine *e = open_with(2, parts, NULL);

	for (size_t i = 0; e && i < MOE_COUNT(cases); i++) {
		if (!table_takes(i + (size_t)parts, 4))
			continue;
		unsigned before = CU_get_number_of_failures();

		against_reference(e, &cases[i].c);
		if (CU_get_number_of_failures() > before)
			printf("  in case \"%s\", %d parts, %s\n", cases[i].name, parts,
			       table()->name);
	}
	CHECK(info_of(e).handles == 0 && moe_memory_bytes(e, NULL, -1) == 0);
	CHECK_OK(moe_engine_close(e));
}

static void reference_cases(void)
{
	reference_with(1);
	reference_with(3);
	if (moe_test_full())
		reference_with(32);
}

static void reference(void)
{
	each_table(reference_cases);
}

/* ---- buffers that grow ---- */

static struct block_case plain_case(void)
{
	return (struct block_case){ .E = 6,
				    .k = 2,
				    .H = 40,
				    .I = 24,
				    .T = 300,
				    .r = 3,
				    .router = true,
				    .normalise = true,
				    .shared = 16,
				    .base_grads = true };
}

static void growing(void)
{
	static const int lengths[] = { 5, 300, 1, 64, 65, 0, 128, 300 };
	struct block_case c = plain_case();
	struct moe_engine *e = open_with(2, 2, NULL);
	struct block_data d;

	block_data_make(&d, &c);
	for (int router = 0; router < 2; router++) {
		struct moe_block *b;

		d.c.router = c.router = router;
		if (!router)
			d.w[MOE_BLOCK_ROUTER] = (free(d.w[MOE_BLOCK_ROUTER]), NULL);
		else
			block_data_free(&d), block_data_make(&d, &c);
		c.r = 0; /* no update between the lengths */
		d.c.r = 0;
		for (int i = MOE_BLOCK_GATE_LORA_A; i < BLOCK_WEIGHTS; i++)
			free(d.w[i]), d.w[i] = NULL;
		b = block_make(e, &d.c, &d, NULL);
		for (size_t i = 0; i < MOE_COUNT(lengths); i++) {
			struct moe_block *fresh = block_make(e, &d.c, &d, NULL);
			uint64_t want;

			d.c.T = lengths[i];
			want = block_step(fresh, &d, 1);
			CHECK(block_step(b, &d, 1) == want);
			CHECK_OK(moe_block_zero_gradients(b));
			moe_block_destroy(fresh);
			d.c.T = c.T;
		}
		moe_block_destroy(b);
		c.r = 3;
	}
	block_data_free(&d);
	CHECK(moe_memory_bytes(e, NULL, -1) == 0);
	CHECK_OK(moe_engine_close(e));
}

/* ---- dtypes and strides ---- */

/* A matrix in some dtype and layout, from floats. layout: 0 contiguous, 1 padded rows, 2 by
 * columns. */
static struct moe_array layout(const float *src, enum moe_dtype dtype, int how, int64_t rows,
			       int64_t cols, void **memory)
{
	struct moe_array a = matrix_of(NULL, dtype, rows, cols);
	size_t size = moe_dtype_size(dtype);
	int64_t s0 = how == 2 ? 1 : how == 1 ? cols + 3 : cols, s1 = how == 2 ? rows + 1 : 1;

	*memory = calloc((size_t)((rows + 1) * (cols + 4)), size);
	a.data = *memory;
	if (how) {
		a.strides[0] = s0;
		a.strides[1] = s1;
	}
	for (int64_t i = 0; src && i < rows; i++)
		for (int64_t j = 0; j < cols; j++)
			moe_from_f32((char *)a.data + (size_t)(i * s0 + j * s1) * size, dtype,
				     src + i * cols + j, 1);
	return a;
}

/* Its elements, contiguous, as they are: must have the bits of `want` rounded to its dtype. */
static void check_layout(const struct moe_array *a, int how, const float *want)
{
	int64_t rows = a->shape[0], cols = a->shape[1];
	int64_t s0 = how ? a->strides[0] : cols, s1 = how ? a->strides[1] : 1;
	size_t size = moe_dtype_size(a->dtype);
	int wrong = 0;

	for (int64_t i = 0; i < rows; i++)
		for (int64_t j = 0; j < cols; j++) {
			char bits[8];

			moe_from_f32(bits, a->dtype, want + i * cols + j, 1);
			wrong += memcmp(bits, (char *)a->data + (size_t)(i * s0 + j * s1) * size,
					size) != 0;
		}
	CHECK(wrong == 0);
}

static void round_to(float *v, int64_t n, enum moe_dtype dtype)
{
	char bits[8];

	for (int64_t i = 0; i < n; i++) {
		moe_from_f32(bits, dtype, v + i, 1);
		moe_to_f32(v + i, bits, dtype, 1);
	}
}

static void layouts(void)
{
	static const enum moe_dtype dtypes[] = { MOE_F32, MOE_BF16, MOE_F16, MOE_F64 };
	struct block_case c = { .E = 4, .k = 2, .H = 20, .I = 12, .T = 70, .r = 2 };
	struct moe_engine *e = open_with(2, 1, NULL);
	int64_t n = (int64_t)c.T * c.H;

	for (int i = 0; i < (int)MOE_COUNT(dtypes) * 3; i++) {
		enum moe_dtype type = dtypes[i / 3];
		int how = i % 3;
		struct moe_array x, out, ids, w, go, gx, gw;
		void *memory[7];
		struct block_data d;
		struct moe_block *b;

		block_data_make(&d, &c);
		round_to(d.x, n, type);
		round_to(d.grad_out, n, type);
		round_to(d.weights, (int64_t)c.T * c.k, type);
		b = block_make(e, &c, &d, NULL);
		CHECK_OK(block_forward(b, &d, true, d.out));
		CHECK_OK(block_backward(b, &d));
		x = layout(d.x, type, how, c.T, c.H, &memory[0]);
		out = layout(NULL, type, how, c.T, c.H, &memory[1]);
		w = layout(d.weights, type, how, c.T, c.k, &memory[2]);
		go = layout(d.grad_out, type, how, c.T, c.H, &memory[3]);
		gx = layout(NULL, type, how, c.T, c.H, &memory[4]);
		gw = layout(NULL, type, how, c.T, c.k, &memory[5]);
		memory[6] = calloc((size_t)(c.T * c.k), 8);
		ids = matrix_of(memory[6], MOE_I64, c.T, c.k);
		if (how) { /* by columns */
			ids.strides[0] = 1;
			ids.strides[1] = c.T;
		}
		for (int64_t t = 0; t < c.T; t++)
			for (int64_t j = 0; j < c.k; j++)
				((int64_t *)memory[6])[how ? j * c.T + t : t * c.k + j] =
					d.ids[t * c.k + j];
		CHECK_OK(moe_block_forward(b, &x, &ids, &w, 1, &out));
		check_layout(&out, how, d.out);
		CHECK_OK(moe_block_backward(b, &go, &gx, &gw));
		check_layout(&gx, how, d.grad_x);
		check_layout(&gw, how, d.grad_weights);
		CHECK_OK(moe_block_forward(b, &x, &ids, &w, 0, &x)); /* in place */
		check_layout(&x, how, d.out);
		moe_block_destroy(b);
		for (int j = 0; j < 7; j++)
			free(memory[j]);
		block_data_free(&d);
	}
	CHECK_OK(moe_engine_close(e));
}

/* Weights in every dtype that weight_dtype holds give what their rounded f32 values give. */
static void weight_dtypes(void)
{
	static const enum moe_dtype dtypes[] = { MOE_BF16, MOE_F16, MOE_F64, MOE_F32 };
	struct block_case c = { .E = 3,
				.k = 2,
				.H = 20,
				.I = 30,
				.T = 20,
				.r = 2,
				.shared = 8,
				.router = true,
				.sigmoid = true };
	struct moe_engine *e = open_with(2, 2, NULL);

	for (size_t i = 0; i < MOE_COUNT(dtypes); i++) {
		struct block_data d;
		struct moe_block_params p = block_params_of(&c);
		struct moe_block *b, *r;
		float *want;

		block_data_make(&d, &c);
		for (int j = 0; j < BLOCK_WEIGHTS; j++)
			if (d.w[j])
				round_to(d.w[j], d.n[j], dtypes[i]);
		r = block_make(e, &c, &d, NULL);
		p.weight_dtype = dtypes[i];
		CHECK_OK(moe_block_create(e, &p, &b));
		for (int j = 0; j < BLOCK_WEIGHTS; j++) {
			struct moe_array a = { .dtype = dtypes[i] };

			a.ndim = block_shape(&c, (enum moe_block_array)j, a.shape);
			if (!a.ndim)
				continue;
			a.data = malloc((size_t)d.n[j] * 8);
			moe_from_f32(a.data, a.dtype, d.w[j], (size_t)d.n[j]);
			CHECK_OK(moe_block_set(b, (enum moe_block_array)j, &a));
			free(a.data);
		}
		want = calloc((size_t)(c.T * c.H), sizeof *want);
		CHECK_OK(block_forward(r, &d, false, want));
		CHECK_OK(block_forward(b, &d, false, d.out));
		for (int j = 0; j < c.T * c.H; j++)
			if (!CHECK(fabsf(want[j] - d.out[j]) <= 1e-5f))
				break;
		moe_block_destroy(b);
		moe_block_destroy(r);
		free(want);
		block_data_free(&d);
	}
	CHECK_OK(moe_engine_close(e));
}


/* A failed NaN input comes out as NaN and goes no further than its token. */
static void not_a_number(void)
{
	struct block_case c = { .E = 4,
				.k = 2,
				.H = 20,
				.I = 12,
				.T = 30,
				.r = 2,
				.router = true,
				.shared = 8,
				.normalise = true };
	struct moe_engine *e = open_with(2, 2, NULL);
	struct block_data d;
	struct moe_block *b;
	float *want;
	int64_t at = 7 * c.H;

	block_data_make(&d, &c);
	b = block_make(e, &c, &d, NULL);
	want = malloc((size_t)(c.T * c.H) * sizeof *want);
	CHECK_OK(block_forward(b, &d, true, want));
	d.x[at + 3] = NAN;
	CHECK_OK(block_forward(b, &d, true, d.out));
	for (int64_t i = 0; i < c.T * c.H; i++)
		if (i < at || i >= at + c.H) {
			if (!CHECK(fabsf(d.out[i] - want[i]) <= 1e-5f))
				break;
		} else if (!CHECK(isnan(d.out[i])))
			break;
	CHECK_OK(block_backward(b, &d));
	CHECK(isnan(d.grad_x[at]) && isfinite(d.grad_x[0]));
	moe_block_destroy(b);
	free(want);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

static void growing_buffers(void)
{
	each_table(growing);
}

static void dtypes_and_strides(void)
{
	each_table(layouts);
}

static void dtypes_of_weights(void)
{
	each_table(weight_dtypes);
}

static void not_numbers(void)
{
	each_table(not_a_number);
}

const struct moe_test moe_suite_tests[] = {
	{ "against loops in double", reference },
	{ "buffers that grow", growing_buffers },
	{ "dtypes and strides", dtypes_and_strides },
	{ "dtypes of weights", dtypes_of_weights },
	{ "NaN", not_numbers },
	{ NULL, NULL },
};
