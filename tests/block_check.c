/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/block_check.h"
#include "tests/tables.h"

#include <math.h>

static uint64_t state;

static double uniform(void) /* [-1, 1) */
{
	return uniform_of(&state);
}

static float *randoms(int64_t n, double scale)
{
	float *p = malloc((size_t)(n + 1) * sizeof *p);

	for (int64_t i = 0; i < n; i++)
		p[i] = (float)(uniform() * scale);
	return p;
}

int block_shape(const struct block_case *c, enum moe_block_array which, int64_t *s)
{
	int64_t E = c->E, H = c->H, I = c->I, S = c->shared, r = c->r;
	int64_t shapes[BLOCK_WEIGHTS][3] = {
		[MOE_BLOCK_GATE_PROJ] = { E, I, H },   [MOE_BLOCK_UP_PROJ] = { E, I, H },
		[MOE_BLOCK_DOWN_PROJ] = { E, H, I },   [MOE_BLOCK_ROUTER] = { E, H },
		[MOE_BLOCK_SHARED_GATE] = { S, H },    [MOE_BLOCK_SHARED_UP] = { S, H },
		[MOE_BLOCK_SHARED_DOWN] = { H, S },    [MOE_BLOCK_SHARED_ROUTER] = { 1, H },
		[MOE_BLOCK_GATE_LORA_A] = { E, r, H }, [MOE_BLOCK_UP_LORA_A] = { E, r, H },
		[MOE_BLOCK_DOWN_LORA_A] = { E, r, I }, [MOE_BLOCK_GATE_LORA_B] = { E, I, r },
		[MOE_BLOCK_UP_LORA_B] = { E, I, r },   [MOE_BLOCK_DOWN_LORA_B] = { E, H, r },
	};

	if ((which >= MOE_BLOCK_GATE_LORA_A && !r) || (which == MOE_BLOCK_ROUTER && !c->router) ||
	    (which >= MOE_BLOCK_SHARED_GATE && which <= MOE_BLOCK_SHARED_ROUTER && !S) ||
	    (which == MOE_BLOCK_SHARED_ROUTER && !c->sigmoid))
		return 0;
	memcpy(s, shapes[which], sizeof shapes[which]);
	return which <= MOE_BLOCK_DOWN_PROJ || which >= MOE_BLOCK_GATE_LORA_A ? 3 : 2;
}

static void make_routing(struct block_data *d)
{
	const struct block_case *c = &d->c;

	d->ids = malloc((size_t)(c->T * c->k + 1) * sizeof *d->ids);
	d->weights = randoms((int64_t)c->T * c->k, 1);
	for (int t = 0; t < c->T; t++)
		for (int j = 0; j < c->k; j++) {
			int32_t *id = &d->ids[t * c->k + j];
			float *w = &d->weights[t * c->k + j];
			int n = (int)((uniform() + 1) * 1e6);

			if (c->routing == 1)
				*id = j ? -1 : c->E / 2;
			else if (c->routing == 2)
				*id = n % (c->E + 1) - 1;
			else
				*id = (n % c->E + j * (c->k == c->E ? 1 : c->E / c->k)) % c->E;
			if (c->routing == 2 && n % 5 == 0)
				*w = 0;
			else if (c->routing != 2)
				*w = fabsf(*w);
		}
}

/* scale v becomes representable in bf16 */
static void round_operand(float *v, int64_t n, float scale)
{
	for (int64_t i = 0; v && i < n; i++) {
		float scaled = scale * v[i];
		uint16_t bits;

		moe_from_f32(&bits, MOE_BF16, &scaled, 1);
		v[i] = moe_bf16_to_f32(bits) / scale;
	}
}

void block_data_round(struct block_data *d)
{
	for (int i = 0; i < BLOCK_WEIGHTS; i++)
		if (i != MOE_BLOCK_ROUTER && i != MOE_BLOCK_SHARED_ROUTER)
			round_operand(d->w[i], d->n[i], i >= MOE_BLOCK_GATE_LORA_B ? 1.5f : 1);
	round_operand(d->x, (int64_t)d->c.T * d->c.H, 1);
	round_operand(d->grad_out, (int64_t)d->c.T * d->c.H, 1);
}

void block_data_make(struct block_data *d, const struct block_case *c)
{
	int64_t n = (int64_t)c->T * c->H, s[3];

	memset(d, 0, sizeof *d);
	d->c = *c;
	state = (moe_test_seed() + (uint64_t)c->seed * 7919 + 1) * 0x9e3779b97f4a7c15u | 1;
	for (int i = 0; i < BLOCK_WEIGHTS; i++) {
		int ndim = block_shape(c, (enum moe_block_array)i, s);

		if (!ndim)
			continue;
		d->n[i] = moe_shape_count(ndim, s);
		d->w[i] = randoms(d->n[i], 1.7 / sqrt((double)s[ndim - 1]));
	}
	if (c->share_a && c->r)
		memcpy(d->w[MOE_BLOCK_UP_LORA_A], d->w[MOE_BLOCK_GATE_LORA_A],
		       (size_t)d->n[MOE_BLOCK_UP_LORA_A] * sizeof(float));
	d->x = randoms(n, 1.5);
	d->grad_out = randoms(n, 1);
	d->out = calloc((size_t)n + 1, sizeof(float));
	d->grad_x = calloc((size_t)n + 1, sizeof(float));
	d->grad_weights = calloc((size_t)(c->T * c->k) + 1, sizeof(float));
	make_routing(d);
	if (table_is_packed())
		block_data_round(d);
}

void block_data_free(struct block_data *d)
{
	for (int i = 0; i < BLOCK_WEIGHTS; i++)
		free(d->w[i]);
	free(d->x), free(d->grad_out), free(d->weights), free(d->out);
	free(d->grad_x), free(d->grad_weights), free(d->ids);
}

struct moe_array matrix_of(void *data, enum moe_dtype dtype, int64_t rows, int64_t cols)
{
	return (struct moe_array){
		.data = data, .dtype = dtype, .ndim = 2, .shape = { rows, cols }
	};
}

struct moe_adamw_params adamw_default(void)
{
	return (struct moe_adamw_params){ .struct_size = sizeof(struct moe_adamw_params),
					  .learning_rate = 1e-2,
					  .beta1 = .9,
					  .beta2 = .99,
					  .eps = 1e-8,
					  .weight_decay = .01 };
}

struct moe_block_params block_params_of(const struct block_case *c)
{
	return (struct moe_block_params){
		.struct_size = sizeof(struct moe_block_params),
		.hidden = c->H,
		.intermediate = c->I,
		.experts = c->E,
		.experts_per_token = c->k,
		.router = c->router ? "softmax_topk" : NULL,
		.router_normalise = c->normalise,
		.aux_loss_coef = c->aux,
		.z_loss_coef = c->z,
		.shared_intermediate = c->shared,
		.shared_sigmoid = c->sigmoid,
		.lora_rank = c->r,
		.lora_alpha = 1.5f * (float)c->r,
		.lora_share_a = c->share_a,
		.swiglu_limit = c->limit,
		.swiglu_alpha = c->alpha,
		.swiglu_shift = c->shift,
		.base_gradients = c->base_grads,
		.weight_dtype = MOE_F32,
		.expected_tokens = c->T,
		.backward_weights = c->backward,
		.group_size = c->group_size,
		.slices_i = c->slices_i,
		.slices_h = c->slices_h,
	};
}

enum moe_status block_fill(struct moe_block *b, const struct block_data *d)
{
	for (int i = 0; i < BLOCK_WEIGHTS; i++) {
		struct moe_array a = { .data = d->w[i], .dtype = MOE_F32 };

		a.ndim = block_shape(&d->c, (enum moe_block_array)i, a.shape);
		if (a.ndim)
			MOE_TRY(moe_block_set(b, (enum moe_block_array)i, &a));
	}
	return MOE_OK;
}

struct moe_block *block_make(struct moe_engine *e, const struct block_case *c,
			     const struct block_data *d, const struct moe_block_params *p)
{
	struct moe_block_params own = block_params_of(c);
	struct moe_block *b = NULL;

	if (CHECK_OK(moe_block_create(e, p ? p : &own, &b)))
		CHECK_OK(block_fill(b, d));
	return b;
}

enum moe_status block_forward(struct moe_block *b, struct block_data *d, bool save, float *out)
{
	const struct block_case *c = &d->c;
	struct moe_array x = matrix_of(d->x, MOE_F32, c->T, c->H);
	struct moe_array o = matrix_of(out, MOE_F32, c->T, c->H);
	struct moe_array ids = matrix_of(d->ids, MOE_I32, c->T, c->k);
	struct moe_array w = matrix_of(d->weights, MOE_F32, c->T, c->k);

	return moe_block_forward(b, &x, c->router ? NULL : &ids, c->router ? NULL : &w, save, &o);
}

enum moe_status block_backward(struct moe_block *b, struct block_data *d)
{
	const struct block_case *c = &d->c;
	struct moe_array go = matrix_of(d->grad_out, MOE_F32, c->T, c->H);
	struct moe_array gx = matrix_of(d->grad_x, MOE_F32, c->T, c->H);
	struct moe_array gw = matrix_of(d->grad_weights, MOE_F32, c->T, c->k);

	return moe_block_backward(b, &go, &gx, &gw);
}

uint64_t hash_of(uint64_t h, const void *data, size_t bytes)
{
	const unsigned char *p = data;

	for (size_t i = 0; i < bytes; i++)
		h = (h ^ p[i]) * 0x100000001b3ull;
	return h;
}

double *block_get(struct moe_block *b, const struct block_case *c, enum moe_block_array which,
		  bool gradient)
{
	struct moe_array a = { .dtype = MOE_F64 };
	int64_t n;

	a.ndim = block_shape(c, which, a.shape);
	n = moe_shape_count(a.ndim, a.shape);
	a.data = calloc((size_t)n + 1, sizeof(double));
	CHECK_OK(gradient ? moe_block_get_gradient(b, which, &a) : moe_block_get(b, which, &a));
	return a.data;
}

static uint64_t hash_arrays(struct moe_block *b, const struct block_data *d, bool gradient,
			    uint64_t h)
{
	int first = gradient && d->c.base_grads ? 0 : MOE_BLOCK_GATE_LORA_A;

	for (int i = first; i < BLOCK_WEIGHTS; i++) {
		double *v;

		if (!d->w[i])
			continue;
		v = block_get(b, &d->c, (enum moe_block_array)i, gradient);
		h = hash_of(h, v, (size_t)d->n[i] * sizeof *v);
		free(v);
	}
	return h;
}

uint64_t block_step(struct moe_block *b, struct block_data *d, uint64_t h)
{
	struct moe_adamw_params adamw = adamw_default();
	size_t n = (size_t)d->c.T * (size_t)d->c.H * sizeof(float);

	CHECK_OK(block_forward(b, d, true, d->out));
	h = hash_of(h, d->out, n);
	CHECK_OK(block_backward(b, d));
	h = hash_of(h, d->grad_x, n);
	h = hash_of(h, d->grad_weights, (size_t)(d->c.T * d->c.k) * sizeof(float));
	h = hash_arrays(b, d, true, h);
	if (!d->c.r)
		return h;
	CHECK_OK(moe_block_update(b, &adamw));
	return hash_arrays(b, d, false, h);
}

double relative_error(const double *got, const double *want, int64_t n)
{
	double diff = 0, base = 0;

	for (int64_t i = 0; i < n; i++) {
		diff += (got[i] - want[i]) * (got[i] - want[i]);
		base += want[i] * want[i];
	}
	return base > 0 ? sqrt(diff / base) : sqrt(diff);
}

double *doubles_of(const float *v, int64_t n)
{
	double *d = malloc((size_t)(n + 1) * sizeof *d);

	for (int64_t i = 0; i < n; i++)
		d[i] = v[i];
	return d;
}

double relative_error_of_floats(const float *got, const double *want, int64_t n)
{
	double *g = doubles_of(got, n), e = relative_error(g, want, n);

	free(g);
	return e;
}
