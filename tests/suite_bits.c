/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The same bits for every worker count, policy, slicing, grouping and run; the same numbers to
 * rounding for every number of parts.
 */
#include "tests/block_check.h"
#include "tests/golden.h"
#include "tests/tables.h"

#include <math.h>

const char moe_suite_name[] = "bits";

static const char *const fixtures[] = { "experts_T0", "experts_duplicate_ids", "mixtral",
					"peft_target_parameters" };

/* Chunks of I: 256, 256, 88; of H: 256, 64. */
static struct block_case large_case(void)
{
	return (struct block_case){ .E = 16,
				    .k = 4,
				    .H = 320,
				    .I = 600,
				    .T = 200,
				    .r = 5,
				    .shared = 72,
				    .sigmoid = true,
				    .router = true,
				    .normalise = true,
				    .aux = .01f };
}

struct setting {
	const char *name;
	int workers, parts;
	const char *policy;
	int group_size, slices_i, slices_h;
};

static const struct setting settings[] = {
	{ "1 worker", 1, 1, NULL, 0, 0, 0 },
	{ "2 workers", 2, 1, NULL, 0, 0, 0 },
	{ "again", 2, 1, NULL, 0, 0, 0 },
	{ "3 workers", 3, 1, NULL, 0, 0, 0 },
	{ "4 workers", 4, 1, NULL, 0, 0, 0 },
	{ "eager", 2, 1, "eager", 0, 0, 0 },
	{ "prio", 2, 1, "prio", 0, 0, 0 },
	{ "ws", 2, 1, "ws", 0, 0, 0 },
	{ "dmda", 2, 1, "dmda", 0, 0, 0 },
	{ "dmdas", 2, 1, "dmdas", 0, 0, 0 },
	{ "1 slice", 2, 1, NULL, 0, 1, 1 },
	{ "2 slices", 2, 1, NULL, 0, 2, 1 },
	{ "3 slices", 2, 1, NULL, 0, 3, 2 },
	{ "groups of 1", 2, 1, NULL, 1, 0, 0 },
	{ "groups of 5, 2 slices", 4, 1, NULL, 5, 2, 2 },
};

static struct moe_engine *open_setting(const struct setting *s)
{
	struct moe_engine_params p = { .struct_size = sizeof p,
				       .workers = s->workers,
				       .parts = s->parts,
				       .policy = s->policy,
				       .idle_spin_us = 200,
				       .isa = table_isa() };
	struct moe_engine *e = NULL;

	CHECK_OK(moe_engine_open(&p, &e));
	return e;
}

/* ---- fixtures ---- */

static const char *fixture_path(const char *name)
{
	static char text[200];

	snprintf(text, sizeof text, "tests/fixtures/golden/%s.safetensors", name);
	return access(moe_test_path(text), R_OK) ? NULL : moe_test_path(text);
}

static void fixture_bits(void)
{
	uint64_t want[MOE_COUNT(fixtures)] = { 0 };

	for (size_t i = 0; i < MOE_COUNT(settings); i++) {
		const struct setting *s = &settings[i];

		if (!best_table_takes(i, 7))
			continue;
		struct golden_options o = { .group_size = s->group_size,
					    .slices_i = s->slices_i,
					    .slices_h = s->slices_h };
		struct moe_engine *e = open_setting(s);

		for (size_t f = 0; e && f < MOE_COUNT(fixtures); f++) {
			const char *path = fixture_path(fixtures[f]);
			struct golden_result r;

			if (!CHECK(path != NULL))
				continue;
			CHECK(golden_run(e, path, &o, &r));
			CHECK(r.compared > 0);
			if (!i)
				want[f] = r.bits;
			if (!CHECK(r.bits == want[f]))
				printf("  %s: other bits with %s\n", fixtures[f], s->name);
			golden_free(&r);
		}
		CHECK_OK(moe_engine_close(e));
	}
}

/* ---- a larger block ---- */

/* A growing list of values, and their hash. */
struct values {
	double *v;
	int64_t n;
};

static void keep(struct values *to, const double *v, int64_t n)
{
	to->v = realloc(to->v, (size_t)(to->n + n + 1) * sizeof *v);
	memcpy(to->v + to->n, v, (size_t)n * sizeof *v);
	to->n += n;
}

static void keep_floats(struct values *to, const float *v, int64_t n)
{
	double *d = malloc((size_t)(n + 1) * sizeof *d);

	for (int64_t i = 0; i < n; i++)
		d[i] = v[i];
	keep(to, d, n);
	free(d);
}

static void keep_arrays(struct values *to, struct moe_block *b, const struct block_data *d,
			bool gradient)
{
	for (int i = 0; i < BLOCK_WEIGHTS; i++) {
		double *v;

		if (!d->w[i] || (i < MOE_BLOCK_GATE_LORA_A && (!gradient || !d->c.base_grads)))
			continue;
		v = block_get(b, &d->c, (enum moe_block_array)i, gradient);
		keep(to, v, d->n[i]);
		free(v);
	}
}

/* Three updates (two with reduced counts: the second reads moments) of two accumulated micro-batches each: everything that comes out. */
static struct values train(const struct setting *s, struct block_case c,
			   const struct block_data micro[2])
{
	struct moe_engine *e = open_setting(s);
	struct moe_adamw_params adamw = adamw_default();
	struct values v = { 0 };
	struct moe_block *b;
	int last = moe_test_full() ? 2 : 1;

	c.group_size = s->group_size;
	c.slices_i = s->slices_i;
	c.slices_h = s->slices_h;
	b = e ? block_make(e, &c, &micro[0], NULL) : NULL;
	for (int step = 0; b && step <= last; step++) {
		for (int m = 0; m < 2; m++) {
			struct block_data d = micro[m];

			CHECK_OK(block_forward(b, &d, true, d.out));
			CHECK_OK(block_backward(b, &d));
			keep_floats(&v, d.out, (int64_t)c.T * c.H);
			keep_floats(&v, d.grad_x, (int64_t)c.T * c.H);
			keep_floats(&v, d.grad_weights, (int64_t)c.T * c.k);
		}
		if (step == last)
			keep_arrays(&v, b, &micro[0], true);
		CHECK_OK(moe_block_update(b, &adamw));
		if (step == last)
			keep_arrays(&v, b, &micro[0], false);
	}
	moe_block_destroy(b);
	CHECK_OK(moe_engine_close(e));
	return v;
}

static void compare_settings(struct block_case c)
{
	struct block_data micro[2];
	struct values want, got;

	block_data_make(&micro[0], &c);
	c.seed++;
	block_data_make(&micro[1], &c);
	want = train(&settings[0], c, micro);
	for (int64_t i = 0; i < want.n; i++)
		if (!isfinite(want.v[i])) {
			CHECK(!"finite");
			break;
		}
	for (size_t i = 1; i < MOE_COUNT(settings); i++) {
		if (!best_table_takes(i, 7))
			continue;
		got = train(&settings[i], c, micro);
		if (!CHECK(got.n == want.n &&
			   !memcmp(got.v, want.v, (size_t)want.n * sizeof *want.v)))
			printf("  other bits with %s\n", settings[i].name);
		free(got.v);
	}
	for (int P = 2; P <= 8; P = P == 3 ? 8 : P + 1)
		for (int W = 1; W <= 2 && best_table_takes((size_t)P, 8); W++) {
			const struct setting s = { "parts", W, P, NULL, 0, 0, 0 };
			static struct values first;
			double err;

			got = train(&s, c, micro);
			err = got.n == want.n ? relative_error(got.v, want.v, want.n) : 1;
			if (!CHECK(err <= (table_is_packed() ? table_tolerance()->out : 1e-6)))
				printf("  %d parts: relative error %g\n", P, err);
			if (W == 1)
				first = got;
			else {
				CHECK(!memcmp(got.v, first.v, (size_t)want.n * sizeof *want.v));
				free(first.v);
				free(got.v);
			}
		}
	free(want.v);
	block_data_free(&micro[0]);
	block_data_free(&micro[1]);
}

static void large_block(void)
{
	if (best_table_takes(1, 2))
		compare_settings(large_case());
}

/* By transposed copies, which not every table has. */
static void large_block_copies(const char *mode)
{
	struct block_case c = large_case();

	if (!table()->weight_transpose || !table_takes(1, 2))
		return;
	c.T = 90;
	c.backward = mode;
	compare_settings(c);
}

static void large_block_resident(void)
{
	large_block_copies("resident");
}

static void large_block_shared(void)
{
	large_block_copies("shared:1");
}

/* Base gradients, a caller's ids, and I smaller than the number of parts. */
static void small_block(void)
{
	compare_settings((struct block_case){ .E = 7,
					      .k = 3,
					      .H = 33,
					      .I = 5,
					      .T = 70,
					      .r = 2,
					      .routing = 2,
					      .base_grads = true,
					      .share_a = true });
}

static void test_fixtures(void)
{
	each_table(fixture_bits);
}

static void test_large(void)
{
	each_table(large_block);
}

static void test_resident(void)
{
	each_table(large_block_resident);
}

static void test_shared(void)
{
	each_table(large_block_shared);
}

static void test_small(void)
{
	each_table(small_block);
}

const struct moe_test moe_suite_tests[] = {
	{ "fixtures", test_fixtures },
	{ "larger block", test_large },
	{ "larger block, resident copies", test_resident },
	{ "larger block, copies for each backward", test_shared },
	{ "odd block", test_small },
	{ NULL, NULL },
};
