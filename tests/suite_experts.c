/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The expert ops of every kernel table against block_check.h's loops in double: one expert, any sizes,
 * slices, a second micro-batch, and values that are not finite. Memory begins as NaN, and the expert's
 * rows follow one row of another's, as they do in a group.
 */
#include "tests/block_check.h"
#include "tests/expert_check.h"

const char moe_suite_name[] = "experts";

/* ---- numbers ---- */

/*
 * Inputs need no rounding (block_check.h): tables of f32 panels round what they keep for the backward,
 * the others each operand; LoRA's share is large here. suite_bars has the bars.
 */
static struct table_tolerance tolerance(void)
{
	if (operands_rounded)
		return (struct table_tolerance){ 8e-3, 1e-2, 1e-2, 1e-2, 0 };
	if (table_is_packed())
		return (struct table_tolerance){ 2e-6, 2e-3, 3e-3, 5e-3, 0 };
	return *table_tolerance();
}

/* Few numbers have no mean, and sums of few terms, each of about 1, may cancel. */
static void compare_array(const struct block_case *c, const char *what, int64_t n, const float *got,
			  const double *want, double t)
{
	int width = MOE_MIN(c->H, c->I);
	double few = width == 1 ? 40 * t : n < 50 || width < 16 ? 8 * t : 0;

	double before = noise;

	noise += few;
	check(what, n, got, want, t * (1 + 6 / sqrt((double)n + 1)));
	noise = before;
}

static void compare_micro(const struct expert_run *e, const struct block_reference *r)
{
	const struct block_data *d = e->d;
	struct table_tolerance t = tolerance();
	int64_t n = (int64_t)d->c.T * d->c.H;

	compare_array(&d->c, "out", n, e->out, r->out, t.out);
	compare_array(&d->c, "grad_x", n, e->grad_x, r->grad_x, t.grad_x);
	compare_array(&d->c, "grad_weights", d->c.T, e->grad_weights, r->grad_weights,
		      t.grad_weights);
	for (int i = 0; i < BLOCK_WEIGHTS; i++)
		if (e->grad[i])
			compare_array(&d->c, expert_names[i], d->n[i], e->grad[i], r->grad[i],
				      t.grad);
}

/* Two micro-batches, the second one's gradients on top of the first one's; then the same in single chunks. */
static void expert_case(const struct block_case *c)
{
	struct block_reference r = { 0 };
	struct block_data d;
	struct expert_run e, sliced;

	block_data_make(&d, c);
	for (int i = 0; i < c->T; i++) /* two of three tokens */
		d.ids[i] = i % 3 == 1 && c->T > 1 ? -1 : 0;
	expert_begin(&e, &d);
	expert_begin(&sliced, &d);
	for (int micro = 0; micro < 2; micro++) {
		for (int i = 0; micro && i < c->T * c->H; i++)
			d.x[i] *= i % 3 ? 0.5f : -1, d.grad_out[i] *= -0.5f;
		expert_pass(&e, micro == 0, 1000);
		expert_pass(&sliced, micro == 0, 1);
		block_reference(&r, &d, d.ids);
		compare_micro(&e, &r);
		check_same("out of slices", e.out, sliced.out, (size_t)(c->T * c->H) * 4);
		check_same("grad_x of slices", e.grad_x, sliced.grad_x, (size_t)(c->T * c->H) * 4);
		for (int i = 0; i < BLOCK_WEIGHTS; i++)
			if (e.grad[i])
				check_same("gradient of slices", e.grad[i], sliced.grad[i],
					   (size_t)d.n[i] * 4);
	}
	release();
	block_reference_free(&r);
	block_data_free(&d);
}

static void shape_cases(void)
{
	static const int sizes[] = { 1, 4, 7, 16, 17, 33 };
	static const int tokens[] = { 1, 2, 3, 4, 6, 7, 9, 10, 13, 18, 19, 24, 25, 46, 50, 97, 193, 300 };
	size_t n = MOE_COUNT(sizes), at = 0;

	for (size_t h = 0; h < n; h++)
		for (size_t i = 0; i < n; i++)
			for (size_t r = 0; r <= n; r++, at++) {
				struct block_case c = { .E = 1,
							.k = 1,
							.H = sizes[h],
							.I = sizes[i],
							.T = tokens[at % MOE_COUNT(tokens)],
							.r = r ? sizes[r - 1] : 0,
							.share_a = at % 2,
							.base_grads = true,
							.seed = (int)at };

				if (table_takes(at, 5))
					expert_case(&c);
			}
}

/* More than one chunk, and every number of rows that a table treats in its own way. */
static void row_cases(void)
{
	for (int T = 1; T <= 300; T += T < 40 ? 1 : T < 100 ? 7 : 50) {
		struct block_case c = { .E = 1,
					.k = 1,
					.H = T % 2 ? 80 : 300,
					.I = T % 4 < 2 ? 528 : 70,
					.T = T,
					.r = T % 5 ? 16 : 0,
					.share_a = T % 3 == 0,
					.base_grads = T % 7 == 0 };

		if (table_takes((size_t)T, 4))
			expert_case(&c);
	}
}

static void test_shapes(void)
{
	check_tables(shape_cases);
}

static void test_rows(void)
{
	check_tables(row_cases);
}

/* ---- values ---- */

static const struct block_case special = {
	.E = 1, .k = 1, .H = 40, .I = 300, .T = 30, .r = 5, .base_grads = true
};

static void special_begin(struct block_data *d)
{
	block_data_make(d, &special);
	for (int i = 0; i < special.T; i++)
		d->ids[i] = i % 4 == 3 ? -1 : 0;
}

static void special_end(struct block_data *d, struct block_reference *r)
{
	release();
	block_reference_free(r);
	block_data_free(d);
}

/* Gates of some hundred: sigmoids of 0 and 1, and what is between them. */
static void large_gates(void)
{
	struct block_reference r = { 0 };
	struct block_data d;
	struct expert_run e;

	special_begin(&d);
	for (int64_t i = 0; i < d.n[MOE_BLOCK_GATE_PROJ]; i++)
		d.w[MOE_BLOCK_GATE_PROJ][i] *= 256;
	expert_begin(&e, &d);
	expert_pass(&e, true, 1000);
	block_reference(&r, &d, d.ids);
	compare_micro(&e, &r);
	special_end(&d, &r);
}

/* Gates of exactly 300, -300: one column of x decides. */
static void equal_gates(void)
{
	struct block_reference r = { 0 };
	struct block_data d;
	struct expert_run e;

	special_begin(&d);
	memset(d.w[MOE_BLOCK_GATE_LORA_B], 0, (size_t)d.n[MOE_BLOCK_GATE_LORA_B] * sizeof(float));
	for (int64_t i = 0; i < d.n[MOE_BLOCK_GATE_PROJ]; i++)
		d.w[MOE_BLOCK_GATE_PROJ][i] = i % special.H ? 0 : i / special.H % 2 ? 300 : -300;
	for (int t = 0; t < special.T; t++)
		d.x[t * special.H] = t % 2 ? 1 : -1;
	expert_begin(&e, &d);
	expert_pass(&e, true, 1000);
	block_reference(&r, &d, d.ids);
	compare_micro(&e, &r);
	special_end(&d, &r);
}

/* Results below what bf16 operands can tell from 0: nothing but numbers of that size come out. */
static void subnormals(void)
{
	struct block_reference r = { 0 };
	struct block_data d;
	struct expert_run e;

	special_begin(&d);
	for (int64_t i = 0; i < special.T * special.H; i++)
		d.x[i] *= 0x1p-127f;
	for (int64_t i = 0; i < d.n[MOE_BLOCK_DOWN_PROJ]; i += 3)
		d.w[MOE_BLOCK_DOWN_PROJ][i] *= 0x1p-127f;
	expert_begin(&e, &d);
	expert_pass(&e, true, 1000);
	block_reference(&r, &d, d.ids);
	noise = 0x1p-120;
	compare_micro(&e, &r);
	noise = 0;
	special_end(&d, &r);
}

static void number_cases(void)
{
	large_gates();
	equal_gates();
	subnormals();
}

/*
 * NaN where double has NaN, finite where it is finite. With an infinity among the inputs the order of
 * operations says which of the results are NaN: what is not finite in double is not here.
 */
static void check_kinds(const char *what, const char *where, int64_t n, const float *got,
			const double *want, bool strict)
{
	int64_t wrong = 0, first = -1;

	for (int64_t i = 0; i < n; i++) {
		bool good = isnan(want[i]) && strict ? isnan(got[i])
						     : !isfinite(want[i]) == !isfinite(got[i]);

		if (!good && wrong++ == 0)
			first = i;
	}
	if (wrong)
		printf("\n  %s, %s: %s is wrong in %lld of %lld places, [%lld] is %g instead of %g\n",
		       K->name, where, what, (long long)wrong, (long long)n, (long long)first,
		       (double)got[first], want[first]);
	CU_ASSERT_EQUAL(wrong, 0);
}

static void special_value(const char *where, float *(*place)(struct block_data *d), float value)
{
	struct block_reference r = { 0 };
	struct block_data d;
	struct expert_run e;
	int64_t n = special.T * special.H;

	special_begin(&d);
	*place(&d) = value;
	expert_begin(&e, &d);
	expert_pass(&e, true, 1000);
	block_reference(&r, &d, d.ids);
	check_kinds("out", where, n, e.out, r.out, isnan(value));
	check_kinds("grad_x", where, n, e.grad_x, r.grad_x, isnan(value));
	check_kinds("grad_weights", where, special.T, e.grad_weights, r.grad_weights,
		    isnan(value));
	for (int i = 0; i < BLOCK_WEIGHTS; i++)
		if (e.grad[i])
			check_kinds(expert_names[i], where, d.n[i], e.grad[i], r.grad[i],
				    isnan(value));
	special_end(&d, &r);
}

static float *in_x(struct block_data *d)
{
	return &d->x[5 * special.H + 17];
}

static float *in_unrouted_x(struct block_data *d)
{
	return &d->x[7 * special.H + 17];
}

static float *in_grad_out(struct block_data *d)
{
	return &d->grad_out[6 * special.H + 39];
}

static float *in_weight(struct block_data *d)
{
	return &d->weights[8];
}

static float *in_gate(struct block_data *d)
{
	return &d->w[MOE_BLOCK_GATE_PROJ][290 * special.H + 3];
}

static float *in_up(struct block_data *d)
{
	return &d->w[MOE_BLOCK_UP_PROJ][17 * special.H];
}

static float *in_down(struct block_data *d)
{
	return &d->w[MOE_BLOCK_DOWN_PROJ][39 * special.I + 299];
}

static float *in_up_a(struct block_data *d)
{
	return &d->w[MOE_BLOCK_UP_LORA_A][4 * special.H + 39];
}

static float *in_gate_b(struct block_data *d)
{
	return &d->w[MOE_BLOCK_GATE_LORA_B][200 * special.r + 1];
}

static float *in_down_a(struct block_data *d)
{
	return &d->w[MOE_BLOCK_DOWN_LORA_A][2 * special.I + 260];
}

static float *in_down_b(struct block_data *d)
{
	return &d->w[MOE_BLOCK_DOWN_LORA_B][11 * special.r];
}

static void special_cases(void)
{
	static const struct {
		const char *name;
		float *(*place)(struct block_data *d);
	} places[] = { { "x", in_x },	      { "x of no row", in_unrouted_x },
		       { "grad_out", in_grad_out }, { "routing weight", in_weight },
		       { "gate", in_gate },   { "up", in_up },
		       { "down", in_down },   { "up A", in_up_a },
		       { "gate B", in_gate_b },	    { "down A", in_down_a },
		       { "down B", in_down_b } };
	static const float values[] = { NAN, INFINITY, -INFINITY };
	char where[64];

	for (size_t p = 0; p < MOE_COUNT(places); p++)
		for (size_t v = 0; v < MOE_COUNT(values); v++) {
			snprintf(where, sizeof where, "%g in %s", (double)values[v], places[p].name);
			special_value(where, places[p].place, values[v]);
		}
}

static void test_numbers(void)
{
	check_tables(number_cases);
}

static void test_special(void)
{
	check_tables(special_cases);
}

const struct moe_test moe_suite_tests[] = {
	{ "odd sizes and ranks", test_shapes },
	{ "numbers of rows", test_rows },
	{ "large gates, subnormals", test_numbers },
	{ "NaN and infinities reach what they must", test_special },
	{ NULL, NULL },
};
