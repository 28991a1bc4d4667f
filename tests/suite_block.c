/* SPDX-License-Identifier: Apache-2.0 */
/* The block object against plain loops in double, and what it does with buffers, dtypes and misuse.
 */
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
	struct table_tolerance t = *table_tolerance();

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
			if (fabsf(want[j] - d.out[j]) > 1e-5f) {
				CHECK(!"the same output");
				break;
			}
		moe_block_destroy(b);
		moe_block_destroy(r);
		free(want);
		block_data_free(&d);
	}
	CHECK_OK(moe_engine_close(e));
}

/* ---- order of calls ---- */

static void order(void)
{
	struct block_case c = {
		.E = 4, .k = 2, .H = 20, .I = 12, .T = 30, .r = 2, .base_grads = true
	};
	struct moe_adamw_params adamw = adamw_default();
	struct moe_engine *e = open_with(2, 2, NULL);
	struct block_data d;
	struct moe_block *b, *fresh;
	double *once, *twice;
	struct moe_block_params p = block_params_of(&c);

	block_data_make(&d, &c);
	CHECK_OK(moe_block_create(e, &p, &b));
	CHECK_ERROR(block_forward(b, &d, true, d.out), MOE_ERR_STATE, "gate_proj was never set");
	CHECK_OK(block_fill(b, &d));
	CHECK_ERROR(block_backward(b, &d), MOE_ERR_STATE, "backward needs a forward");
	CHECK_ERROR(moe_block_update(b, &adamw), MOE_ERR_STATE, "update needs a backward");
	CHECK_OK(block_forward(b, &d, false, d.out));
	CHECK_ERROR(block_backward(b, &d), MOE_ERR_STATE, "forward with save");
	CHECK_ERROR(moe_block_get_gradient(b, MOE_BLOCK_GATE_LORA_A,
					   &(struct moe_array){ .data = d.w[MOE_BLOCK_GATE_LORA_A],
								.ndim = 3,
								.shape = { c.E, c.r, c.H } }),
		    MOE_ERR_STATE, "no gradients");
	/* the second of two forwards counts */
	d.x[0] += 1;
	CHECK_OK(block_forward(b, &d, true, d.out));
	d.x[0] -= 1;
	CHECK_OK(block_forward(b, &d, true, d.out));
	CHECK_OK(block_backward(b, &d));
	CHECK_ERROR(block_backward(b, &d), MOE_ERR_STATE, "backward needs a forward");
	once = block_get(b, &c, MOE_BLOCK_DOWN_LORA_A, true);
	CHECK_OK(block_forward(b, &d, true, d.out));
	CHECK_OK(block_backward(b, &d));
	twice = block_get(b, &c, MOE_BLOCK_DOWN_LORA_A, true);
	for (int64_t i = 0; i < d.n[MOE_BLOCK_DOWN_LORA_A]; i++)
		once[i] *= 2;
	compare("accumulated", twice, once, d.n[MOE_BLOCK_DOWN_LORA_A], 1e-6);
	/* zeroed gradients start again */
	CHECK_OK(moe_block_zero_gradients(b));
	CHECK_ERROR(moe_block_update(b, &adamw), MOE_ERR_STATE, "update needs a backward");
	fresh = block_make(e, &c, &d, NULL);
	CHECK(block_step(b, &d, 1) == block_step(fresh, &d, 1));
	CHECK_ERROR(moe_block_update(b, &adamw), MOE_ERR_STATE, "update needs a backward");
	free(once), free(twice);
	moe_block_destroy(b);
	moe_block_destroy(fresh);
	moe_block_destroy(NULL);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* ---- what is refused, and that it changes nothing ---- */

struct refusal {
	struct moe_block *b;
	struct moe_array x, ids, w, out;
};

static enum moe_status try_forward(struct refusal r)
{
	return moe_block_forward(r.b, &r.x, &r.ids, &r.w, 1, &r.out);
}

static void refused_forwards(struct moe_block *b, struct block_data *d)
{
	const struct block_case *c = &d->c;
	int32_t *bad = malloc((size_t)(c->T * c->k) * sizeof *bad);
	struct refusal good = { b, matrix_of(d->x, MOE_F32, c->T, c->H),
				matrix_of(d->ids, MOE_I32, c->T, c->k),
				matrix_of(d->weights, MOE_F32, c->T, c->k),
				matrix_of(d->out, MOE_F32, c->T, c->H) },
		       r;

#define REFUSED(change, text)                                                                      \
	r = good;                                                                                  \
	change;                                                                                    \
	CHECK_ERROR(try_forward(r), MOE_ERR_ARG, text)
	REFUSED(r.x.shape[1]++, "x has shape [30, 21]; [30, 20]");
	REFUSED(r.x.ndim = 1, "x has shape");
	REFUSED(r.x.ndim = 9, "9 dimensions");
	REFUSED(r.x.ndim = -1, "-1 dimensions");
	REFUSED(r.x.shape[0] = -1, "x has shape [-1");
	REFUSED(r.x.data = NULL, "x has no data");
	REFUSED(r.x.dtype = MOE_I32, "x has dtype I32");
	REFUSED(r.x.dtype = (enum moe_dtype)99, "x has dtype ?");
	REFUSED(r.x.dtype = (enum moe_dtype) - 1, "x has dtype ?");
	REFUSED(r.out.shape[0]--, "out has shape");
	REFUSED(r.out.dtype = MOE_F8_E4M3, "out has dtype");
	REFUSED(r.out.data = NULL, "out has no data");
	REFUSED(r.ids.shape[1]++, "ids has shape");
	REFUSED(r.ids.dtype = MOE_F32, "ids have dtype F32");
	REFUSED(r.w.dtype = MOE_I64, "weights has dtype I64");
	REFUSED(r.w.shape[0]++, "weights has shape");
	for (int at = 0; at < c->T * c->k; at += 7) {
		memcpy(bad, d->ids, (size_t)(c->T * c->k) * sizeof *bad);
		bad[at] = at % 2 ? c->E : -2;
		REFUSED(r.ids.data = bad, "there are 4 experts");
	}
#undef REFUSED
	CHECK_ERROR(moe_block_forward(b, NULL, &good.ids, &good.w, 1, &good.out), MOE_ERR_ARG,
		    "x is NULL");
	CHECK_ERROR(moe_block_forward(b, &good.x, NULL, &good.w, 1, &good.out), MOE_ERR_ARG,
		    "ids is NULL");
	CHECK_ERROR(moe_block_forward(b, &good.x, &good.ids, NULL, 1, &good.out), MOE_ERR_ARG,
		    "weights is NULL");
	CHECK_ERROR(moe_block_forward(b, &good.x, &good.ids, &good.w, 1, NULL), MOE_ERR_ARG,
		    "out is NULL");
	CHECK_ERROR(moe_block_forward(NULL, &good.x, &good.ids, &good.w, 1, &good.out), MOE_ERR_ARG,
		    "block is NULL");
	r = good; /* sizes that cannot be */
	r.x.shape[0] = r.out.shape[0] = r.ids.shape[0] = r.w.shape[0] = INT64_MAX / 64;
	CHECK_ERROR(try_forward(r), MOE_ERR_ARG, "at most");
	free(bad);
}

static void refused_backwards(struct moe_block *b, struct block_data *d)
{
	const struct block_case *c = &d->c;
	struct moe_array go = matrix_of(d->grad_out, MOE_F32, c->T, c->H), gx = go;
	struct moe_array gw = matrix_of(d->grad_weights, MOE_F32, c->T, c->k), a;

	gx.data = d->grad_x;
	a = go, a.shape[0]++;
	CHECK_ERROR(moe_block_backward(b, &a, &gx, &gw), MOE_ERR_ARG, "grad_out has shape");
	a = go, a.dtype = MOE_U8;
	CHECK_ERROR(moe_block_backward(b, &a, &gx, &gw), MOE_ERR_ARG, "grad_out has dtype");
	CHECK_ERROR(moe_block_backward(b, NULL, &gx, &gw), MOE_ERR_ARG, "grad_out is NULL");
	a = gx, a.shape[1]--;
	CHECK_ERROR(moe_block_backward(b, &go, &a, &gw), MOE_ERR_ARG, "grad_x has shape");
	CHECK_ERROR(moe_block_backward(b, &go, NULL, &gw), MOE_ERR_ARG, "grad_x is NULL");
	a = gw, a.ndim = 3;
	CHECK_ERROR(moe_block_backward(b, &go, &gx, &a), MOE_ERR_ARG, "grad_weights has shape");
}

static void refused_arrays(struct moe_block *b, const struct block_case *c)
{
	float data[4] = { 0 };
	struct moe_array a = { .data = data, .ndim = 3, .shape = { c->E, c->I, c->H } }, s;

	s = a, s.shape[0]++;
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &s), MOE_ERR_ARG,
		    "gate_proj has shape [5, 12, 20]");
	s = a, s.ndim = 2;
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &s), MOE_ERR_ARG,
		    "[4, 12, 20] is expected");
	s = a, s.ndim = 77;
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &s), MOE_ERR_ARG, "has shape");
	s = a, s.data = NULL;
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &s), MOE_ERR_ARG, "no data");
	s = a, s.dtype = MOE_I8;
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &s), MOE_ERR_ARG, "dtype I8");
	s = a, s.strides[2] = 2, s.strides[1] = 40, s.strides[0] = 480;
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, &s), MOE_ERR_ARG, "contiguous");
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_GATE_PROJ, NULL), MOE_ERR_ARG, "NULL");
	CHECK_ERROR(moe_block_set(NULL, MOE_BLOCK_GATE_PROJ, &a), MOE_ERR_ARG, "NULL");
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_ARRAYS, &a), MOE_ERR_ARG, "unknown");
	CHECK_ERROR(moe_block_set(b, (enum moe_block_array) - 1, &a), MOE_ERR_ARG, "unknown");
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_ROUTER, &a), MOE_ERR_ARG, "no router");
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_SHARED_UP, &a), MOE_ERR_ARG, "no shared_up");
	CHECK_ERROR(moe_block_get(b, MOE_BLOCK_ROUTER_LOGITS, &a), MOE_ERR_ARG, "no router_logits");
	CHECK_ERROR(moe_block_get(b, MOE_BLOCK_GATE_PROJ, &a), MOE_ERR_UNSUPPORTED, "read back");
	s = matrix_of(data, MOE_F32, 30, c->k);
	CHECK_ERROR(moe_block_set(b, MOE_BLOCK_TOPK_WEIGHTS, &s), MOE_ERR_ARG, "only be read");
	s.dtype = MOE_BF16;
	CHECK_ERROR(moe_block_get(b, MOE_BLOCK_TOPK_WEIGHTS, &s), MOE_ERR_ARG, "dtype BF16");
}

static void refusals(void)
{
	struct block_case c = { .E = 4, .k = 2, .H = 20, .I = 12, .T = 30, .r = 2 };
	struct moe_engine *e = open_with(2, 2, NULL);
	struct moe_adamw_params adamw = adamw_default(), bad;
	struct block_data d;
	struct moe_block *b, *other;
	uint64_t want;

	block_data_make(&d, &c);
	other = block_make(e, &c, &d, NULL);
	want = block_step(other, &d, 1);
	want = block_step(other, &d, want);
	b = block_make(e, &c, &d, NULL);
	CHECK(block_step(b, &d, 1) != 0);
	CHECK_OK(block_forward(b, &d, true, d.out));
	/* all of these in between change neither the saved forward nor the weights */
	refused_forwards(b, &d);
	refused_backwards(b, &d);
	refused_arrays(b, &c);
#define BAD(change, text)                                                                          \
	bad = adamw;                                                                               \
	change;                                                                                    \
	CHECK_ERROR(moe_block_update(b, &bad), MOE_ERR_ARG, text)
	BAD(bad.struct_size = 8, "struct_size");
	BAD(bad.learning_rate = NAN, "learning_rate nan");
	BAD(bad.learning_rate = -1, "learning_rate -1");
	BAD(bad.beta1 = 1, "beta1 1");
	BAD(bad.beta2 = -.1, "beta2 -0.1");
	BAD(bad.eps = INFINITY, "eps inf");
	BAD(bad.step = -3, "step -3");
#undef BAD
	CHECK_ERROR(moe_block_update(b, NULL), MOE_ERR_ARG, "struct_size");
	CHECK_OK(block_backward(b, &d));
	moe_block_destroy(b);
	b = block_make(e, &c, &d, NULL);
	CHECK(block_step(b, &d, block_step(b, &d, 1)) == want);
	moe_block_destroy(b);
	moe_block_destroy(other);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

static void bad_params(void)
{
	struct block_case c = { .E = 4, .k = 2, .H = 20, .I = 12, .r = 2, .router = true };
	struct moe_engine *e = open_with(1, 1, NULL);
	struct moe_block_params good = block_params_of(&c), p;
	struct moe_block *b;

#define BAD(change, status, text)                                                                  \
	p = good;                                                                                  \
	change;                                                                                    \
	CHECK_ERROR(moe_block_create(e, &p, &b), status, text);                                    \
	CHECK(b == NULL)
	BAD(p.struct_size = 8, MOE_ERR_ARG, "struct_size");
	BAD(p.hidden = 0, MOE_ERR_ARG, "hidden 0");
	BAD(p.intermediate = -4, MOE_ERR_ARG, "intermediate -4");
	BAD(p.experts = 0, MOE_ERR_ARG, "0 experts");
	BAD(p.experts = 100000, MOE_ERR_ARG, "at most");
	BAD(p.experts_per_token = 0, MOE_ERR_ARG, "experts_per_token is 0");
	BAD(p.experts_per_token = 5, MOE_ERR_ARG, "5 experts per token of 4");
	BAD(p.router = "oracle", MOE_ERR_ARG, "unknown router \"oracle\"");
	BAD(p.lora_rank = -1, MOE_ERR_ARG, "negative");
	BAD(p.shared_intermediate = -1, MOE_ERR_ARG, "negative");
	BAD(p.slices_i = -1, MOE_ERR_ARG, "negative");
	BAD(p.swiglu_limit = -1, MOE_ERR_ARG, "swiglu_limit is -1");
	BAD(p.swiglu_limit = INFINITY, MOE_ERR_ARG, "swiglu_limit is inf");
	BAD(p.swiglu_alpha = NAN, MOE_ERR_ARG, "swiglu_alpha");
	BAD(p.swiglu_shift = 1e9f, MOE_ERR_ARG, "swiglu_shift");
	BAD(p.weight_dtype = MOE_I8, MOE_ERR_ARG, "weight_dtype I8");
	BAD(p.weight_dtype = (enum moe_dtype)77, MOE_ERR_ARG, "weight_dtype");
	BAD((p.hidden = INT32_MAX, p.intermediate = INT32_MAX), MOE_ERR_NOFIT, "too large");
	BAD((p.lora_rank = INT32_MAX, p.hidden = 1 << 24), MOE_ERR_NOFIT, "too large");
	BAD((p.shared_intermediate = INT32_MAX, p.hidden = 1 << 20), MOE_ERR_NOFIT, "too large");
#undef BAD
	CHECK_ERROR(moe_block_create(e, NULL, &b), MOE_ERR_ARG, "struct_size");
	CHECK_ERROR(moe_block_create(e, &good, NULL), MOE_ERR_ARG, "out");
	CHECK(info_of(e).handles == 0 && moe_memory_bytes(e, NULL, -1) == 0);
	CHECK_OK(moe_engine_close(e));
}

/* ---- asynchronous chains ---- */

enum { STEPS = 4 };

struct chain {
	struct block_data d[STEPS]; /* inputs and outputs of each step */
	uint64_t bits;
};

static void chain_make(struct chain *h, const struct block_case *c)
{
	for (int i = 0; i < STEPS; i++) {
		struct block_case own = *c;

		own.seed = i ? 100 + i : 0;
		block_data_make(&h->d[i], &own);
	}
}

static void chain_free(struct chain *h)
{
	for (int i = 0; i < STEPS; i++)
		block_data_free(&h->d[i]);
}

/* forward, backward, update of every step (a forward alone first); submitted at once or waited for
 */
static void chain_run(struct chain *h, struct moe_engine *e, bool wait, bool hold)
{
	const struct block_case *c = &h->d[0].c;
	struct moe_adamw_params adamw = adamw_default();
	struct moe_block *b = block_make(e, c, &h->d[0], NULL);

	if (hold)
		CHECK_OK(moe_engine_hold(e));
	for (int i = 0; i < STEPS; i++) {
		struct block_data *d = &h->d[i];
		struct moe_array x = matrix_of(d->x, MOE_F32, c->T, c->H), out = x, go = x, gx = x;
		struct moe_array gw = matrix_of(d->grad_weights, MOE_F32, c->T, c->k);
		struct moe_array ids = matrix_of(d->ids, MOE_I32, c->T, c->k), w = gw;

		out.data = d->out;
		go.data = d->grad_out;
		gx.data = d->grad_x;
		w.data = d->weights;
		memset(d->out, 0, (size_t)(c->T * c->H) * sizeof(float));
		CHECK_OK(moe_block_forward_async(b, &x, c->router ? NULL : &ids,
						 c->router ? NULL : &w, 1, &out));
		if (wait)
			CHECK_OK(moe_block_wait(b));
		CHECK_OK(moe_block_backward_async(b, &go, &gx, &gw));
		if (wait)
			CHECK_OK(moe_block_wait(b));
		if (i % 2 && c->r) /* two micro-batches each */
			CHECK_OK(moe_block_update(b, &adamw));
		if (wait)
			CHECK_OK(moe_block_wait(b));
	}
	if (hold)
		CHECK_OK(moe_engine_release(e));
	CHECK_OK(moe_block_wait(b));
	h->bits = 1;
	for (int i = 0; i < STEPS; i++) {
		struct block_data *d = &h->d[i];
		size_t n = (size_t)(c->T * c->H) * sizeof(float);

		h->bits = hash_of(h->bits, d->out, n);
		h->bits = hash_of(h->bits, d->grad_x, n);
		h->bits = hash_of(h->bits, d->grad_weights, (size_t)(c->T * c->k) * sizeof(float));
	}
	h->bits = block_step(b, &h->d[0], h->bits);
	moe_block_destroy(b);
}

static void asynchronous(void)
{
	static const struct block_case list[] = {
		{ .E = 8,
		  .k = 2,
		  .H = 64,
		  .I = 300,
		  .T = 150,
		  .r = 3,
		  .router = true,
		  .normalise = true,
		  .shared = 64,
		  .sigmoid = true,
		  .base_grads = true },
		{ .E = 8,
		  .k = 2,
		  .H = 64,
		  .I = 300,
		  .T = 150,
		  .r = 3,
		  .router = true,
		  .slices_i = 2 },
		{ .E = 8, .k = 2, .H = 64, .I = 100, .T = 150, .r = 3 },
		{ .E = 8,
		  .k = 2,
		  .H = 64,
		  .I = 100,
		  .T = 150,
		  .router = true,
		  .shared = 200,
		  .base_grads = true },
	};
	static const char *const policies[] = { "lws", "prio", "eager" };

	for (size_t i = 0; i < MOE_COUNT(list); i++)
		for (size_t p = 0; p < MOE_COUNT(policies); p++) {
			if (!best_table_takes(i + p, 6))
				continue;
			struct moe_engine *e = open_with(2, 2, policies[p]);
			struct chain h;
			uint64_t want;

			chain_make(&h, &list[i]);
			chain_run(&h, e, true, false);
			want = h.bits;
			for (int round = 0; round < (moe_test_full() ? 20 : 3); round++) {
				chain_run(&h, e, false, false);
				CHECK(h.bits == want);
				if (!list[i].router)
					continue; /* the caller's ids wait for the pass before */
				chain_run(&h, e, false, true);
				CHECK(h.bits == want);
			}
			chain_free(&h);
			CHECK_OK(moe_engine_close(e));
		}
}

/* Many forwards without a backward, each with its own input. */
static void forwards(void)
{
	struct block_case c = {
		.E = 8, .k = 4, .H = 64, .I = 300, .T = 150, .r = 3, .router = true, .shared = 32
	};
	struct moe_engine *e = open_with(2, 2, NULL);
	struct chain h;
	struct moe_block *b;
	float *want[STEPS];
	size_t n = (size_t)(c.T * c.H) * sizeof(float);

	chain_make(&h, &c);
	b = block_make(e, &c, &h.d[0], NULL);
	for (int i = 0; i < STEPS; i++) {
		want[i] = malloc(n);
		CHECK_OK(block_forward(b, &h.d[i], false, want[i]));
	}
	for (int round = 0; round < (moe_test_full() ? 100 : 10); round++) {
		if (round % 2)
			CHECK_OK(moe_engine_hold(e));
		for (int i = 0; i < STEPS; i++) {
			struct moe_array x = matrix_of(h.d[i].x, MOE_F32, c.T, c.H), out = x;

			out.data = memset(h.d[i].out, 0, n);
			CHECK_OK(moe_block_forward_async(b, &x, NULL, NULL, 0, &out));
		}
		if (round % 2)
			CHECK_OK(moe_engine_release(e));
		CHECK_OK(moe_block_wait(b));
		for (int i = 0; i < STEPS; i++)
			CHECK(!memcmp(want[i], h.d[i].out, n));
	}
	moe_block_destroy(b);
	for (int i = 0; i < STEPS; i++)
		free(want[i]);
	chain_free(&h);
	CHECK_OK(moe_engine_close(e));
}

/* One step with the caller's ids, submitted whole while held; a second forward says why it cannot
 * be. */
static void held_step(void)
{
	struct block_case c = { .E = 8, .k = 2, .H = 24, .I = 20, .T = 70, .r = 3 };
	struct moe_engine *e = open_with(2, 1, NULL);
	struct moe_adamw_params adamw = adamw_default();
	struct block_data d;
	struct moe_block *b, *sync;
	struct moe_array x, out, go, gx, ids, w;
	float *want;

	block_data_make(&d, &c);
	sync = block_make(e, &c, &d, NULL);
	b = block_make(e, &c, &d, NULL);
	CHECK(block_step(sync, &d, 1) != 0);
	want = malloc((size_t)(c.T * c.H) * sizeof *want);
	memcpy(want, d.grad_x, (size_t)(c.T * c.H) * sizeof *want);
	x = matrix_of(d.x, MOE_F32, c.T, c.H), out = x, go = x, gx = x;
	out.data = d.out, go.data = d.grad_out, gx.data = d.grad_x;
	ids = matrix_of(d.ids, MOE_I32, c.T, c.k);
	w = matrix_of(d.weights, MOE_F32, c.T, c.k);
	CHECK_OK(moe_engine_hold(e));
	CHECK_OK(moe_block_forward_async(b, &x, &ids, &w, 1, &out));
	CHECK_OK(moe_block_backward_async(b, &go, &gx, NULL));
	CHECK_OK(moe_block_update(b, &adamw));
	CHECK(moe_engine_outstanding(e) > 20);
	CHECK_ERROR(moe_block_forward_async(b, &x, &ids, &w, 1, &out), MOE_ERR_STATE, "held");
	CHECK_OK(moe_engine_release(e));
	CHECK_OK(moe_block_wait(b));
	CHECK(!memcmp(want, d.grad_x, (size_t)(c.T * c.H) * sizeof *want));
	CHECK(block_step(b, &d, 1) == block_step(sync, &d, 1));
	free(want);
	moe_block_destroy(b);
	moe_block_destroy(sync);
	block_data_free(&d);
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

static void asynchronous_chains(void)
{
	each_table(asynchronous);
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
	{ "order of calls", order },
	{ "refused calls change nothing", refusals },
	{ "bad parameters", bad_params },
	{ "asynchronous chains", asynchronous_chains },
	{ "forwards in a row", forwards },
	{ "a step while held", held_step },
	{ "NaN", not_numbers },
	{ NULL, NULL },
};
