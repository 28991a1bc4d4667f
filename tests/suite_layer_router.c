/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The experts of one layer below a softmax router of the test, which gives ids and weights and
 * takes their gradients: grad_x with the router's path, five steps of full fine-tuning in which the
 * router moves too, and LoRA in PEFT's fused layout. In every activation policy, by sync and async
 * calls, one part and three.
 */
#include "tests/layer_ways.h"

#include <math.h>
#include <unistd.h>

const char moe_suite_name[] = "layer_router";

struct router {
	const struct file *f;
	double *w, *grad, *m, *v; /* [E, H] */
	double *p;		  /* [T, E] */
};

static void router_make(struct router *r, const struct file *f)
{
	const struct block_case *c = &f->d.c;
	size_t n = (size_t)(c->E * c->H) + 1;

	r->f = f;
	r->w = doubles(f->st, "router_weight");
	r->grad = calloc(n, sizeof(double)), r->m = calloc(n, sizeof(double)),
	r->v = calloc(n, sizeof(double));
	r->p = calloc((size_t)(c->T * c->E) + 1, sizeof(double));
}

static void router_free(struct router *r)
{
	free(r->w), free(r->grad), free(r->m), free(r->v), free(r->p);
}

/* Probabilities of one token. */
static void softmax(const struct router *r, const float *x, double *p)
{
	const struct block_case *c = &r->f->d.c;
	double most = -INFINITY, sum = 0;

	for (int e = 0; e < c->E; e++) {
		p[e] = 0;
		for (int i = 0; i < c->H; i++)
			p[e] += r->w[e * c->H + i] * (double)x[i];
		most = fmax(most, p[e]);
	}
	for (int e = 0; e < c->E; e++)
		sum += p[e] = exp(p[e] - most);
	for (int e = 0; e < c->E; e++)
		p[e] /= sum;
}

/* ids and weights of all tokens: the k largest, the lowest id of equal ones. */
static void router_choose(struct router *r, struct file *f)
{
	const struct block_case *c = &f->d.c;

	for (int t = 0; t < c->T; t++) {
		double *p = r->p + (int64_t)t * c->E, sum = 0;
		int32_t *ids = f->d.ids + (int64_t)t * c->k;
		bool taken[64] = { false };

		softmax(r, f->d.x + (int64_t)t * c->H, p);
		for (int j = 0; j < c->k; j++) {
			int best = -1;

			for (int e = 0; e < c->E; e++)
				if (!taken[e] && (best < 0 || p[e] > p[best]))
					best = e;
			ids[j] = best;
			taken[best] = true;
			sum += p[best];
		}
		for (int j = 0; j < c->k; j++)
			f->d.weights[t * c->k + j] = (float)(p[ids[j]] / (f->normalise ? sum : 1));
	}
}

/* From the gradients of the weights: grad, and what is added to grad_x [T, H]. */
static void router_backward(struct router *r, double *grad_x)
{
	const struct block_data *d = &r->f->d;
	const struct block_case *c = &d->c;

	memset(r->grad, 0, (size_t)(c->E * c->H) * sizeof(double));
	for (int t = 0; t < c->T; t++) {
		const double *p = r->p + (int64_t)t * c->E;
		double dp[64] = { 0 }, sum = 0, mean = 0, dot = 0;

		for (int j = t * c->k; j < (t + 1) * c->k; j++)
			sum += p[d->ids[j]];
		for (int j = t * c->k; j < (t + 1) * c->k; j++)
			mean += (double)d->grad_weights[j] * p[d->ids[j]] / sum;
		for (int j = t * c->k; j < (t + 1) * c->k; j++)
			dp[d->ids[j]] = r->f->normalise ? ((double)d->grad_weights[j] - mean) / sum
							: (double)d->grad_weights[j];
		for (int e = 0; e < c->E; e++)
			dot += dp[e] * p[e];
		for (int e = 0; e < c->E; e++)
			for (int i = 0; i < c->H; i++) {
				double g = p[e] * (dp[e] - dot);

				r->grad[e * c->H + i] += g * (double)d->x[(int64_t)t * c->H + i];
				if (grad_x)
					grad_x[(int64_t)t * c->H + i] += g * r->w[e * c->H + i];
			}
	}
}

static void router_step(struct router *r, int step)
{
	const struct file *f = r->f;

	for (int64_t i = 0; i < f->d.c.E * f->d.c.H; i++) {
		double g = r->grad[i];

		r->m[i] = f->beta1 * r->m[i] + (1 - f->beta1) * g;
		r->v[i] = f->beta2 * r->v[i] + (1 - f->beta2) * g * g;
		r->w[i] *= 1 - f->lr * f->decay;
		r->w[i] -= f->lr * (r->m[i] / (1 - pow(f->beta1, step))) /
			   (sqrt(r->v[i] / (1 - pow(f->beta2, step))) + f->eps);
	}
}

static struct moe_expert_layer *make(struct moe_engine *e, const struct file *f, struct way w,
				     bool lora, bool train_base)
{
	struct moe_expert_layer *l = way_create(e, f, w, lora, train_base);

	if (l && CHECK_OK(layer_load(l, &f->d, NULL, 0)) && lora)
		layer_set_lora(l, &f->d);
	return l;
}

/* ---- grad_x with the router's path ---- */

/* A forward and a backward of l and of the file's router, which *r becomes; out is the key of the output. */
static void compare_path(struct moe_expert_layer *l, struct file *f, struct way w, const char *out, struct router *r)
{
	const struct table_tolerance *tolerance = table_tolerance_held();
	int64_t n = (int64_t)f->d.c.T * f->d.c.H;
	double *grad_x = calloc((size_t)n + 1, sizeof *grad_x);

	router_make(r, f);
	router_choose(r, f);
	way_forward(l, f, w, true);
	compare_floats(f, out, f->d.out, NULL, n, tolerance->out);
	way_backward(l, f, w);
	router_backward(r, grad_x);
	compare_floats(f, "grad_x", f->d.grad_x, grad_x, n, tolerance->grad_x);
	free(grad_x);
}

static void check_path(struct moe_engine *e, struct file *f, struct way w)
{
	const struct table_tolerance *tolerance = table_tolerance_held();
	const struct block_case *c = &f->d.c;
	struct moe_expert_layer *l = make(e, f, w, true, false);
	struct router r;

	compare_path(l, f, w, "out", &r);
	if (c->k > 1 || !f->normalise)
		compare(f, "grad_router_weight", r.grad, (int64_t)c->E * c->H, tolerance->grad);
	else /* the weight is always 1 */
		for (int i = 0; i < c->E * c->H; i++)
			CHECK(fabs(r.grad[i]) < 1e-12);
	router_free(&r);
	moe_experts_destroy(l);
}

/* ---- full fine-tuning ---- */

static void check_full(struct moe_engine *e, struct file *f, struct way w)
{
	double losses[6] = { 0 }, *target = doubles(f->st, "target"),
	       bound = table_is_packed() ? .05 : 1e-4;
	struct moe_expert_layer *l = make(e, f, w, false, true);
	struct moe_adamw_params p = way_adamw(f);
	const struct block_case *c = &f->d.c;
	float *start = floats(f->st, "router_weight", (int64_t)c->E * c->H);
	struct router r;

	router_make(&r, f);
	for (int step = 0; step < 6; step++) {
		router_choose(&r, f);
		way_forward(l, f, w, step < 5);
		losses[step] = way_loss(f, target);
		if (step == 5)
			break;
		way_backward(l, f, w);
		router_backward(&r, NULL);
		CHECK_OK(moe_experts_update(l, &p));
		router_step(&r, step + 1);
	}
	compare(f, "train_losses", losses, 6, table_is_packed() ? 1e-3 : 1e-5);
	for (int i = 0; i < 3; i++) {
		double *got = layer_get(l, c, (enum moe_block_array)i, false);

		compare_way(f, names[i], got, f->d.w[i], f->d.n[i], (struct widening){ 0 }, bound);
		free(got);
	}
	compare_way(f, "router_weight", r.w, start, (int64_t)c->E * c->H, (struct widening){ 0 },
		    bound);
	router_free(&r);
	moe_experts_destroy(l);
	free(start), free(target);
}

/* ---- PEFT's fused layout ---- */

/* An array of gate's or up's rows of one that has both; rows: of each expert's part. */
static float *half_of(const struct moe_safetensors *st, const char *name, int up,
		      const struct block_case *c, int64_t columns)
{
	int64_t n = (int64_t)c->I * columns;
	float *both = floats(st, name, 2 * c->E * n),
	      *half = malloc((size_t)(c->E * n) * sizeof *half);

	for (int64_t e = 0; e < c->E; e++)
		memcpy(half + e * n, both + (2 * e + up) * n, (size_t)n * sizeof *half);
	free(both);
	return half;
}

/* Gate and up have one A there, and one B of both. */
static void peft_arrays(struct file *f)
{
	struct block_data *d = &f->d;
	struct block_case *c = &d->c;
	int64_t n = (int64_t)c->T * c->H, s[3];

	for (int i = 0; i < BLOCK_WEIGHTS; i++)
		d->n[i] = moe_shape_count(block_shape(c, (enum moe_block_array)i, s), s);
	for (int up = 0; up < 2; up++) {
		d->w[MOE_BLOCK_GATE_PROJ + up] = half_of(f->st, "gate_up_proj", up, c, c->H);
		d->w[MOE_BLOCK_GATE_LORA_A + up] =
			floats(f->st, "per_expert.gate_up_proj.a", d->n[MOE_BLOCK_GATE_LORA_A]);
		d->w[MOE_BLOCK_GATE_LORA_B + up] =
			half_of(f->st, "per_expert.gate_up_proj.b", up, c, c->r);
	}
	d->w[MOE_BLOCK_DOWN_PROJ] = floats(f->st, "down_proj", d->n[MOE_BLOCK_DOWN_PROJ]);
	d->w[MOE_BLOCK_DOWN_LORA_A] =
		floats(f->st, "per_expert.down_proj.a", d->n[MOE_BLOCK_DOWN_LORA_A]);
	d->w[MOE_BLOCK_DOWN_LORA_B] =
		floats(f->st, "per_expert.down_proj.b", d->n[MOE_BLOCK_DOWN_LORA_B]);
	d->x = floats(f->st, "x", n), d->grad_out = floats(f->st, "grad_out", n);
	d->out = calloc((size_t)n + 1, sizeof(float)),
	d->grad_x = calloc((size_t)n + 1, sizeof(float));
	n = (int64_t)c->T * c->k;
	d->weights = calloc((size_t)n + 1, sizeof(float)),
	d->grad_weights = calloc((size_t)n + 1, sizeof(float));
	d->ids = calloc((size_t)n + 1, sizeof *d->ids);
}

static bool peft_open(struct file *f, const char *path)
{
	memset(f, 0, sizeof *f);
	f->name = strrchr(path, '/') + 1;
	if (!CHECK_OK(moe_safetensors_open(path, &f->st)))
		return false;
	read_config(f); /* false: it has other names */
	peft_arrays(f);
	return CHECK(f->d.c.E > 0 && f->d.c.r > 0);
}

/* Rows of B's gradient [E, rows, r] into PEFT's [out, r E], expert fastest, from row `first` on. */
static void put_peft_b(const struct block_case *c, const double *b, int64_t rows, int64_t first,
		       double *to)
{
	for (int64_t i = 0; i < c->E * rows * c->r; i++) {
		int64_t e = i / (rows * c->r), o = i / c->r % rows, j = i % c->r;

		to[(first + o) * c->r * c->E + j * c->E + e] = b[i];
	}
}

static void compare_peft_gradients(const struct file *f, struct moe_expert_layer *l)
{
	const struct block_case *c = &f->d.c;
	double bound = table_tolerance_held()->grad, *g[LAYER_LORA];
	double *b = calloc((size_t)(MOE_MAX(2 * c->I, c->H) * c->r * c->E) + 1, sizeof *b);

	for (int i = 0; i < LAYER_LORA; i++)
		g[i] = layer_get(l, c, layer_lora[i], true);
	for (int64_t i = 0; i < f->d.n[MOE_BLOCK_GATE_LORA_A]; i++)
		g[0][i] += g[1][i];
	compare(f, "peft.gate_up_proj.grad_lora_A", g[0], f->d.n[MOE_BLOCK_GATE_LORA_A], bound);
	compare(f, "peft.down_proj.grad_lora_A", g[2], f->d.n[MOE_BLOCK_DOWN_LORA_A], bound);
	put_peft_b(c, g[3], c->I, 0, b);
	put_peft_b(c, g[4], c->I, c->I, b);
	compare(f, "peft.gate_up_proj.grad_lora_B", b, 2 * f->d.n[MOE_BLOCK_GATE_LORA_B], bound);
	put_peft_b(c, g[5], c->H, 0, b);
	compare(f, "peft.down_proj.grad_lora_B", b, f->d.n[MOE_BLOCK_DOWN_LORA_B], bound);
	for (int i = 0; i < LAYER_LORA; i++)
		free(g[i]);
	free(b);
}

static void check_peft(struct moe_engine *e, struct file *f, struct way w)
{
	struct moe_expert_layer *l = make(e, f, w, true, false);
	struct router r;

	compare_path(l, f, w, "out_f64", &r);
	compare_peft_gradients(f, l);
	router_free(&r);
	moe_experts_destroy(l);
}

/* ---- every way ---- */

struct check {
	const char *file;
	bool (*open)(struct file *f, const char *path);
	void (*run)(struct moe_engine *e, struct file *f, struct way w);
};

static const struct check checks[] = {
	{ "qwen3_moe_norm", file_open, check_path },
	{ "qwen3_moe_nonorm", file_open, check_path },
	{ "qwen3_moe_k1", file_open, check_path },
	{ "qwen3_moe_odd_dims", file_open, check_path },
	{ "mixtral", file_open, check_path },
	{ "qwen3_moe_full_ft", file_open, check_path },
	{ "qwen3_moe_full_ft", file_open, check_full },
	{ "peft_target_parameters", peft_open, check_peft },
};

static void run_check(struct moe_engine *e, const struct check *c, struct way w)
{
	char shared[128], own[128];
	const char *path;
	struct file f;

	snprintf(own, sizeof own, "tests/fixtures/golden/%s.safetensors", c->file);
	snprintf(shared, sizeof shared, "oracle/golden/%s.safetensors", c->file);
	path = moe_test_shared(shared);
	if (!path) {
		path = moe_test_path(own);
		if (access(path, R_OK)) {
			moe_test_skip("%s of ../shared/oracle/golden is not here", c->file);
			return;
		}
	}
	if (CHECK(c->open(&f, path))) {
		c->run(e, &f, w);
		file_close(&f);
	}
}

static void all(void)
{
	for (int parts = 1; parts <= 3; parts += 2) {
		struct moe_engine *e = layer_engine(2, parts);

		for (int i = 0; i < 4; i++)
			for (size_t j = 0; j < MOE_COUNT(checks); j++)
				run_check(e, &checks[j], way_at(i));
		CHECK_OK(moe_engine_close(e));
	}
}

static void test_all(void)
{
	each_table(all);
}

const struct moe_test moe_suite_tests[] = {
	{ "grad_x, full fine-tuning, PEFT's layout; every policy and form of call, one part and "
	  "three",
	  test_all },
	{ NULL, NULL },
};
