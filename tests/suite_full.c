/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Full and hybrid fine-tuning of whole models: gradients of every kind of weight by central
 * differences of a decoder in double, the same bits for every worker count, part and policy,
 * weights in bf16 that are their own masters.
 */
#include "tests/full_check.h"

#include "codelets/rounding.h"

#include <sys/mman.h>
#include <unistd.h>

const char moe_suite_name[] = "full";

static double reference(struct ref_model *m, const struct data *d)
{
	double sum = 0;

	for (int i = 0; i < DOCS; i++)
		sum += ref_loss(m, d->ids[i], d->labels[i], doc_lengths[i]);
	return sum;
}

static struct moe_model *open_whole(struct moe_engine *e, const char *dir, enum moe_method method,
				    enum moe_masters masters)
{
	struct moe_model_params p = whole_params(dir, method, masters);
	struct moe_model *m = NULL;

	OK(moe_model_open(e, &p, &m));
	return m;
}

/* ---- against differences ---- */

struct differences {
	struct ref_model *ref;
	const struct data *data;
	double n_trained, worst;
	uint64_t seed;
	int n, zero;
	unsigned roles; /* that were compared */
};

static double difference(struct ref_model *m, const struct data *d, float *w)
{
	float keep = *w, high = keep + 1e-5f, low = keep - 1e-5f; /* the routing does not change */
	double up, down;

	*w = high;
	up = reference(m, d);
	*w = low;
	down = reference(m, d);
	*w = keep;
	return (up - down) / ((double)high - (double)low);
}

/* The largest element of the gradient, and one anywhere. */
static void compare(const struct moe_model *m, int role, int layer, int expert, void *user)
{
	struct differences *d = user;
	float *w = (float *)ref_get(d->ref, (enum moe_role)role, layer, expert);
	int64_t n = 0, at[2] = { 0, 0 };
	float *grad = get_tensor(m, role, layer, expert, MOE_GRAD, &n);

	if (!grad || (expert > 0 && expert != 2) || (moe_test_threads_only() && (d->roles & 1u << role)))
		goto out;
	CU_ASSERT_PTR_NOT_NULL_FATAL(w);
	for (int64_t i = 0; i < n; i++)
		if (fabsf(grad[i]) > fabsf(grad[at[0]]))
			at[0] = i;
	at[1] = (int64_t)((0.5f + 0.49f * ref_uniform(&d->seed)) * (float)n);
	for (int i = 0; i < 2; i++) {
		double want = difference(d->ref, d->data, w + at[i]);
		double got = (double)grad[at[i]] * d->n_trained;
		double off = fabs(got - want) / (fabs(want) + 0.1);

		if (!(off <= 1e-3))
			printf("%s of layer %d, expert %d: %.6g of %.6g\n",
			       moe_role_name((enum moe_role)role), layer, expert, got, want);
		d->worst = worst_of(d->worst, off);
		d->zero += got == 0;
		d->n++;
	}
	d->roles |= 1u << role;
out:
	free(grad);
}

static void check(struct moe_engine *e, const char *name, const char *config, unsigned roles)
{
	struct ref_model ref;
	struct run r = { .lr = 1e-3 };
	struct data d;
	struct differences at = { .ref = &ref, .data = &d, .seed = 3 };
	double want, got;

	ref_create(&ref, name, config, 7);
	r.m = open_whole(e, ref.dir, MOE_METHOD_FULL, MOE_MASTERS_F32);
	if (!r.m) {
		ref_free(&ref);
		return;
	}
	ref_take_lora(&ref, r.m, 5);
	make_data(&d, ref.arch.vocab, 11);
	add_data(&r, &d);
	want = reference(&ref, &d);
	got = step(&r, false) * trained(&r);
	/* again: slots, rings and gradients are used a second time */
	CU_ASSERT_EQUAL(step(&r, false) * trained(&r), got);
	CU_ASSERT_DOUBLE_EQUAL(got, want, 2e-6 * want);
	at.n_trained = trained(&r);
	each_tensor(r.m, compare, &at);
	printf("  %s: loss %.6f of %.6f; %d gradients of %d kinds, worst %.1e\n", name, got, want,
	       at.n, __builtin_popcount(at.roles), at.worst);
	CU_ASSERT(at.worst < 1e-3 && at.zero * 3 < at.n);
	CU_ASSERT_EQUAL(at.roles, roles);
	free_run(&r);
	moe_model_close(r.m);
	ref_free(&ref);
}

#define ROLE(x) (1u << MOE_ROLE_##x)
#define QKVO (ROLE(Q) | ROLE(K) | ROLE(V) | ROLE(O))
#define BASE                                                                                       \
	(ROLE(EMBED) | ROLE(FINAL_NORM) | ROLE(ATTN_NORM) | ROLE(FFN_NORM) | QKVO | ROLE(ROUTER) | \
	 ROLE(EXPERT_GATE) | ROLE(EXPERT_UP) | ROLE(EXPERT_DOWN))
#define DENSE (ROLE(DENSE_GATE) | ROLE(DENSE_UP) | ROLE(DENSE_DOWN))
#define SHARED (ROLE(SHARED_GATE) | ROLE(SHARED_UP) | ROLE(SHARED_DOWN) | ROLE(SHARED_ROUTER))
#define QKV_BIAS (ROLE(Q_BIAS) | ROLE(K_BIAS) | ROLE(V_BIAS))
#define QK_NORM (ROLE(Q_NORM) | ROLE(K_NORM))

static void check_gradients(void)
{
	struct moe_engine *e = open_engine(2, 2, NULL);

	check(e, "qwen2_moe", qwen2_moe, BASE | DENSE | SHARED | QKV_BIAS);
	check(e, "qwen3_moe", qwen3_moe,
	      BASE | ROLE(LM_HEAD) | DENSE | QKV_BIAS | ROLE(O_BIAS) | QK_NORM);
	check(e, "olmoe", olmoe, BASE | ROLE(LM_HEAD) | QK_NORM);
	check(e, "mixtral", mixtral, BASE | ROLE(LM_HEAD));
	OK(moe_engine_close(e));
}

static void test_gradients(void)
{
	exact_table(check_gradients);
}

/* ---- against PyTorch ---- */

#define STEPS 5

struct fixture {
	struct moe_safetensors *st;
	int32_t *ids, *labels;
	double losses[STEPS + 1], norms[STEPS];
	int n;
};

static void take(struct fixture *f, const char *name, void *to, size_t bytes)
{
	const struct moe_st_tensor *t = moe_safetensors_find(f->st, name);

	CU_ASSERT_FATAL(t && t->bytes == bytes);
	memcpy(to, t->data, bytes);
}

static void open_fixture(struct fixture *f, const char *name)
{
	char path[128];
	const struct moe_st_tensor *t;

	snprintf(path, sizeof path, "tests/fixtures/full/%s.safetensors", name);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(moe_test_path(path), &f->st), MOE_OK);
	t = moe_safetensors_find(f->st, "ids");
	f->n = (int)t->shape[1];
	f->ids = calloc((size_t)f->n * 4, sizeof *f->ids);
	f->labels = f->ids + 2 * f->n;
	take(f, "ids", f->ids, 2 * (size_t)f->n * sizeof *f->ids);
	take(f, "labels", f->labels, 2 * (size_t)f->n * sizeof *f->ids);
	take(f, "losses", f->losses, sizeof f->losses);
	take(f, "norms", f->norms, sizeof f->norms);
}

static void close_fixture(struct fixture *f)
{
	moe_safetensors_close(f->st);
	free(f->ids);
}

/* How far all weights are from PyTorch's, in relation to the way that they went. */
struct distances {
	struct fixture *f;
	struct moe_safetensors *before;
	double off, way;
	int n;
};

static void add_distance(const struct moe_model *m, int role, int layer, int expert, void *user)
{
	struct distances *d = user;
	char name[MOE_TENSOR_NAME_MAX], after[MOE_TENSOR_NAME_MAX + 8];
	const struct moe_st_tensor *want, *from;
	int64_t n = 0;
	float *got = get_tensor(m, role, layer, expert, MOE_VALUE, &n);

	if (!got || !moe_arch_tensor_name(&m->arch, (enum moe_role)role, layer, expert, 0, name))
		goto out;
	snprintf(after, sizeof after, "step5.%s", name);
	want = moe_safetensors_find(d->f->st, after);
	from = moe_safetensors_find(d->before, name);
	CU_ASSERT_FATAL(want && from && want->dtype == MOE_F32 && from->dtype == MOE_BF16);
	for (int64_t i = 0; i < n; i++) {
		float ref, old;

		memcpy(&ref, (const char *)want->data + (size_t)i * sizeof ref, sizeof ref);
		moe_to_f32(&old, (const char *)from->data + 2 * (size_t)i, MOE_BF16, 1);
		d->off += ((double)got[i] - (double)ref) * ((double)got[i] - (double)ref);
		d->way += ((double)old - (double)ref) * ((double)old - (double)ref);
	}
	d->n++;
out:
	free(got);
}

/*
 * Relative errors: of the first step's loss and gradient norm, of any later one's, of the way the weights went in all.
 * With rounded operands the later ones only say that both runs go the same way: at this learning rate AdamW turns a
 * gradient of the wrong sign, however small, into a whole step, and that grows from step to step: mixtral's norms by .23
 * and weights by .18 of their way on avx2, where weights that learnt nothing would be 1 of it away.
 */
struct step_limits {
	double first_loss, first_norm, loss, norm, weights;
};
static const struct step_limits exact_steps = { 1e-6, 1e-5, 1e-5, 1e-4, 1e-3 },
				rounded_steps = { 1e-3, 1.5e-2, 4e-2, 0.5, 0.35 };

/* micro: documents in one micro-batch, or one each. */
static void check_steps(struct moe_engine *e, const char *name, int micro)
{
	struct fixture f;
	struct run r = { .lr = 1e-2, .weight_decay = 0.1, .max_norm = 1 };
	char path[128];
	struct distances d = { .f = &f };
	double loss[STEPS + 1], worst = 0, worst_norm = 0, first_norm = 0, weights;
	const struct step_limits *limit = table_is_packed() ? &rounded_steps : &exact_steps;

	open_fixture(&f, name);
	snprintf(path, sizeof path, "tests/fixtures/full/%s", name);
	r.m = open_whole(e, moe_test_path(path), MOE_METHOD_FULL, MOE_MASTERS_F32);
	CU_ASSERT_PTR_NOT_NULL_FATAL(r.m);
	for (int i = 0; i < micro; i++)
		add_batch(&r, 2 * f.n);
	for (int i = 0; i < 2; i++)
		moe_model_batch_add(&r.batch[i % micro], f.ids + i * f.n, f.labels + i * f.n, f.n);
	for (int i = 0; i <= STEPS; i++) {
		loss[i] = step(&r, i < STEPS);
		worst = worst_of(worst, fabs(loss[i] - f.losses[i]) / f.losses[i]);
		if (i < STEPS)
			worst_norm = worst_of(worst_norm, fabs(r.norm.norm - f.norms[i]) / f.norms[i]);
		if (i == 0)
			first_norm = worst_norm;
	}
	OK(moe_safetensors_open(moe_test_path(path), &d.before));
	each_tensor(r.m, add_distance, &d);
	weights = sqrt(d.off / d.way);
	printf("  %s, %s, %d micro-batches: losses off by %.1e, norms %.1e (first %.1e), %d tensors after "
	       "%d steps %.1e\n",
	       table()->name, name, micro, worst, worst_norm, first_norm, d.n, STEPS, weights);
	CU_ASSERT_EQUAL((size_t)d.n, moe_safetensors_count(d.before));
	CU_ASSERT(fabs(loss[0] - f.losses[0]) / f.losses[0] < limit->first_loss);
	CU_ASSERT(first_norm < limit->first_norm);
	CU_ASSERT(worst < limit->loss && worst_norm < limit->norm && weights < limit->weights);
	moe_safetensors_close(d.before);
	free_run(&r);
	moe_model_close(r.m);
	close_fixture(&f);
}

static void check_fixtures(void)
{
	static const char *const names[] = { "qwen2_moe", "qwen3_moe", "olmoe", "mixtral" };
	struct moe_engine *e = open_engine(2, 2, NULL);

	for (size_t i = 0; i < MOE_COUNT(names); i++)
		if (table_takes(i, MOE_COUNT(names)))
			check_steps(e, names[i], 1 + i % 2);
	OK(moe_engine_close(e));
}

static void test_fixtures(void)
{
	each_table(check_fixtures);
}

/* ---- the shared expert of a block ---- */

#define H 24
#define S 28
#define T 40

static struct moe_array matrix(float *data, int64_t rows, int64_t cols)
{
	return (struct moe_array){
		.data = data, .dtype = MOE_F32, .ndim = 2, .shape = { rows, cols }
	};
}

static struct moe_block *open_block(struct moe_engine *e)
{
	struct moe_block_params p = { .struct_size = sizeof p,
				      .hidden = H,
				      .intermediate = 20,
				      .experts = 4,
				      .experts_per_token = 2,
				      .router = "softmax_topk",
				      .shared_intermediate = S,
				      .shared_sigmoid = 1,
				      .train_base = 1,
				      .expected_tokens = T };
	struct moe_block *b = NULL;

	OK(moe_block_create(e, &p, &b));
	return b;
}

static const int64_t block_shape[][3] = {
	[MOE_BLOCK_GATE_PROJ] = { 4, 20, H }, [MOE_BLOCK_UP_PROJ] = { 4, 20, H },
	[MOE_BLOCK_DOWN_PROJ] = { 4, H, 20 }, [MOE_BLOCK_ROUTER] = { 4, H },
	[MOE_BLOCK_SHARED_GATE] = { S, H },   [MOE_BLOCK_SHARED_UP] = { S, H },
	[MOE_BLOCK_SHARED_DOWN] = { H, S },   [MOE_BLOCK_SHARED_ROUTER] = { 1, H }
};

static struct moe_array block_array(int which, float *data)
{
	struct moe_array a = matrix(data, block_shape[which][0], block_shape[which][1]);

	a.ndim = block_shape[which][2] ? 3 : 2;
	a.shape[2] = block_shape[which][2];
	return a;
}

static int64_t block_count(int which)
{
	struct moe_array a = block_array(which, NULL);

	return moe_shape_count(a.ndim, a.shape);
}

/* One AdamW step in double, from zero moments. */
static double adamw_once(double p, double g, double lr, double decay)
{
	return p * (1 - lr * decay) - lr * g / (fabs(g) + 1e-8);
}

static void check_shared(void)
{
	struct moe_engine *e = open_engine(2, 2, NULL);
	struct moe_block *a = open_block(e), *b = open_block(e);
	struct moe_adamw_params adamw = { .struct_size = sizeof adamw,
					  .learning_rate = 1e-2,
					  .beta1 = 0.9,
					  .beta2 = 0.999,
					  .eps = 1e-8,
					  .weight_decay = 0.1 };
	float x[T * H], dy[T * H], y[T * H], y2[T * H], before[8][4 * 20 * H], grad[4 * 20 * H],
		after[4 * 20 * H];
	struct moe_array in = matrix(x, T, H), gradient = matrix(dy, T, H), out = matrix(y, T, H);
	struct moe_array out2 = matrix(y2, T, H);
	double worst = 0;
	uint64_t seed = 5;

	for (int i = 0; i < T * H; i++) {
		x[i] = ref_uniform(&seed);
		dy[i] = ref_uniform(&seed);
	}
	for (int w = 0; w <= MOE_BLOCK_SHARED_ROUTER; w++) {
		struct moe_array v = block_array(w, before[w]);

		for (int64_t i = 0; i < block_count(w); i++)
			before[w][i] = 0.3f * ref_uniform(&seed);
		OK(moe_block_set(a, (enum moe_block_array)w, &v));
	}
	OK(moe_block_forward(a, &in, NULL, NULL, 1, &out));
	OK(moe_block_backward(a, &gradient, &out2, NULL));
	for (int w = 0; w <= MOE_BLOCK_SHARED_ROUTER; w++) {
		struct moe_array g = block_array(w, grad);

		OK(moe_block_get_gradient(a, (enum moe_block_array)w, &g));
		for (int64_t i = 0; i < block_count(w); i++)
			before[w][i] =
				(float)adamw_once((double)before[w][i], (double)grad[i], 1e-2, 0.1);
	}
	OK(moe_block_update(a, &adamw));
	for (int w = 0; w <= MOE_BLOCK_SHARED_ROUTER; w++) {
		struct moe_array v = block_array(w, after);

		OK(moe_block_get(a, (enum moe_block_array)w, &v));
		for (int64_t i = 0; i < block_count(w); i++)
			worst = worst_of(worst, fabs((double)after[i] - (double)before[w][i]));
		OK(moe_block_set(b, (enum moe_block_array)w,
				 &v)); /* what is computed with is what is read */
	}
	OK(moe_block_forward(a, &in, NULL, NULL, 0, &out));
	OK(moe_block_forward(b, &in, NULL, NULL, 0, &out2));
	printf("  %s: updated weights off by at most %.1e\n", table()->name, worst);
	CU_ASSERT(worst < 1e-6);
	CU_ASSERT_EQUAL(memcmp(y, y2, sizeof y), 0);
	moe_block_destroy(a);
	moe_block_destroy(b);
	OK(moe_engine_close(e));
}

static void test_shared(void)
{
	each_table(check_shared);
}

/* ---- first touch ---- */

static size_t resident(const void *p, size_t bytes)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE), n = 0;
	unsigned char *in = calloc(bytes / page, 1);

	CU_ASSERT_EQUAL(mincore((void *)(uintptr_t)p, bytes, in), 0);
	for (size_t i = 0; i < bytes / page; i++)
		n += in[i] & 1;
	free(in);
	return n * page;
}

/* Pages of a purpose are there before the first task, whatever part they belong to, and keep what
 * they hold. */
static void test_touch(void)
{
	struct moe_engine *e = open_engine(2, 2, NULL);
	const size_t bytes = (size_t)70 << 20; /* more than a piece */
	char *a = moe_memory_alloc(e, bytes, 1, "moments"),
	     *b = moe_memory_alloc(e, bytes, 0, "activations");

	CU_ASSERT_FATAL(a && b);
	a[5] = 7;
	CU_ASSERT(resident(a, bytes) < bytes / 2);
	CU_ASSERT_EQUAL(moe_memory_touch(e, "moments"), bytes);
	CU_ASSERT_EQUAL(resident(a, bytes), bytes);
	CU_ASSERT(resident(b, bytes) < bytes / 2);
	CU_ASSERT_EQUAL(a[5], 7);
	moe_memory_free(e, a);
	moe_memory_free(e, b);
	a = moe_memory_alloc(e, bytes, 1, "moments");
	b = moe_memory_alloc(e, bytes, 0, "moments");
	CU_ASSERT_FATAL(a && b);
	CU_ASSERT_EQUAL(moe_memory_touch_these(e, (const void *[]){ NULL, a }, 2), bytes);
	CU_ASSERT_EQUAL(resident(a, bytes), bytes);
	CU_ASSERT(resident(b, bytes) < bytes / 2);
	moe_memory_free(e, a);
	moe_memory_free(e, b);
	OK(moe_engine_close(e));
}

/* ---- rounding ---- */

/* The mean is right, the neighbours are the only results, and exact values and Inf stay. */
static void test_rounding(void)
{
	enum { N = 20000 };
	float v[N], special[3] = { 1.5f, INFINITY, -3 };
	uint16_t r[N], s[3];
	double sum = 0;
	int up = 0;

	for (int i = 0; i < N; i++)
		v[i] = 1 + 0x1p-7f * 0.25f; /* a quarter of the way between two bf16 values */
	moe_round_bf16(moe_rounding_key(7, 3), 100, N, v, r);
	for (int i = 0; i < N; i++) {
		CU_ASSERT_FATAL(r[i] == 0x3f80 || r[i] == 0x3f81);
		up += r[i] == 0x3f81;
		sum += (double)moe_bf16_to_f32(r[i]);
	}
	CU_ASSERT(up > N / 4 - 400 && up < N / 4 + 400);
	CU_ASSERT_DOUBLE_EQUAL(sum / N, (double)v[0], 2e-4);
	moe_round_bf16(moe_rounding_key(7, 3), 100 + N / 2, N / 2, v,
		       r + N / 2); /* by place alone */
	for (int i = N / 2; i < N; i++) {
		uint16_t one;

		moe_round_bf16(moe_rounding_key(7, 3), 100 + i, 1, v, &one);
		CU_ASSERT_FATAL(one == r[i]);
	}
	moe_round_bf16(1, 0, 3, special, s);
	CU_ASSERT(s[0] == 0x3fc0 && s[1] == 0x7f80 && s[2] == 0xc040);
}

const struct moe_test moe_suite_tests[] = {
	{ "gradients of every weight against differences", test_gradients },
	{ "five steps beside PyTorch", test_fixtures },
	{ "a block's shared expert", test_shared },
	{ "stochastic rounding", test_rounding },
	{ "first touch of gradients and moments", test_touch },
	{ NULL, NULL },
};
