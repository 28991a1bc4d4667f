/* SPDX-License-Identifier: Apache-2.0 */
/* The experts of one layer: several layers and calls in flight, threads, and faults of the peer that apply. */
#include "tests/layer_check.h"
#include "tests/trace_good.h"

#include <limits.h>
#include <math.h>
#include <pthread.h>

const char moe_suite_name[] = "layer_flight";

/* ---- several layers and calls in flight ---- */

enum { LAYERS = 3 };

/* A step of three layers submitted whole while the engine is held, against the same step call by call. */
static void in_flight_for(bool async, uint64_t *hash)
{
	struct moe_adamw_params adamw = adamw_default();
	struct moe_engine *e = layer_engine(2, 1);
	struct moe_expert_layer *l[LAYERS];
	struct block_data d[LAYERS];
	struct moe_trace_params trace = { .struct_size = sizeof trace };
	struct moe_trace_info traced = { .struct_size = sizeof traced };
	char file[PATH_MAX];
	uint64_t h = 1;

	snprintf(file, sizeof file, "%s/in_flight.mxt", moe_test_dir());
	trace.file = file;
	for (int i = 0; i < LAYERS; i++) {
		struct block_case c = layer_small();
		struct moe_experts_params p;

		c.seed += i;
		c.base_grads = true;
		c.backward = table()->weight_transpose ? "shared:2" : "direct";
		block_data_make(&d[i], &c);
		p = layer_params(&d[i].c);
		p.layer = i; /* the trace tells them apart */
		l[i] = layer_make(e, &d[i], &p);
		CHECK_OK(layer_forward(l[i], &d[i], false)); /* buffers */
	}
	CHECK_OK(moe_trace_start(e, &trace)); /* of whole steps */
	for (int step = 0; step < 2; step++) {
		if (async)
			CHECK_OK(moe_engine_hold(e));
		for (int i = 0; i < LAYERS; i++) {
			struct layer_call a = layer_call(&d[i], d[i].c.T);

			if (i) /* the layer below's output */
				a.x = matrix_of(d[i - 1].out, MOE_F32, d[i].c.T, d[i].c.H);
			CHECK_OK((async ? moe_experts_forward_async : moe_experts_forward)(
				l[i], &a.x, &a.ids, &a.weights, 1, &a.out));
			if (async && i == LAYERS - 1)
				CHECK_ERROR(layer_forward(l[i], &d[i], true), MOE_ERR_STATE, "held");
			if (async && i < LAYERS - 1) { /* x is the caller's memory: data the engine cannot order */
				CHECK_OK(moe_engine_release(e));
				CHECK_OK(moe_experts_wait(l[i]));
				CHECK_OK(moe_engine_hold(e));
			}
		}
		for (int i = LAYERS - 1; i >= 0; i--) {
			struct layer_call a = layer_call(&d[i], d[i].c.T);

			CHECK_OK((async ? moe_experts_backward_async : moe_experts_backward)(
				l[i], &a.grad_out, 1, &a.grad_x, &a.grad_weights));
			if (async)
				CHECK_ERROR(moe_experts_wait(l[i]), MOE_ERR_STATE, "held");
			CHECK_OK(moe_experts_update(l[i], &adamw)); /* ordered after it by its data */
		}
		if (async)
			CHECK_OK(moe_engine_release(e));
		for (int i = 0; i < LAYERS; i++) {
			CHECK_OK(moe_experts_wait(l[i]));
			CHECK(layer_window(l[i]) == MOE_WINDOW_CLOSED);
			h = hash_of(h, d[i].out, sizeof(float) * (size_t)(d[i].c.T * d[i].c.H));
			h = hash_of(h, d[i].grad_x, sizeof(float) * (size_t)(d[i].c.T * d[i].c.H));
		}
	}
	for (int i = 0; i < LAYERS; i++) {
		double *v = layer_get(l[i], &d[i].c, MOE_BLOCK_DOWN_PROJ, false);

		h = hash_of(h, v, sizeof *v * (size_t)d[i].n[MOE_BLOCK_DOWN_PROJ]);
		free(v);
		moe_experts_destroy(l[i]);
		block_data_free(&d[i]);
	}
	CHECK_OK(moe_trace_stop(e, &traced));
	CHECK(trace_is_good(file, false, true)); /* dependencies, order, repacks before their readers */
	CHECK_OK(moe_engine_close(e));
	*hash = h;
}

static void in_flight_one(void)
{
	uint64_t sync, async;

	in_flight_for(false, &sync);
	in_flight_for(true, &async);
	CHECK(sync == async);
}

static void in_flight(void)
{
	each_table(in_flight_one);
}

/* ---- faults of the peer that apply ---- */

/* F4: two layers of the same number share one buffer of backward weights, in turns. */
static void same_number_one(void)
{
	struct moe_engine *e = layer_engine(2, 1);
	struct moe_expert_layer *l[2];
	struct block_data d[2];

	if (table()->weight_transpose) {
		for (int i = 0; i < 2; i++) {
			struct block_case c = layer_small();

			c.seed += 10 * i;
			c.backward = "shared:1";
			block_data_make(&d[i], &c);
			l[i] = layer_make(e, &d[i], NULL);
		}
		for (int turn = 0; turn < 4; turn++) {
			int i = turn % 2;

			CHECK_OK(layer_forward(l[i], &d[i], true));
			if (turn < 2)
				CHECK_OK(moe_experts_repack_async(l[1 - i])); /* the other's, in between */
			CHECK_OK(layer_backward(l[i], &d[i], 1));
			if (turn < 2) {
				struct block_reference r = { 0 };

				block_reference(&r, &d[i], d[i].ids);
				layer_compare(l[i], &d[i], &r, 1);
				block_reference_free(&r);
			}
		}
		moe_experts_destroy(l[0]), moe_experts_destroy(l[1]);
		block_data_free(&d[0]), block_data_free(&d[1]);
	}
	CHECK_OK(moe_engine_close(e));
}

static void same_number(void)
{
	each_table(same_number_one);
}

static bool all_finite(const double *v, int64_t n)
{
	bool good = true;

	for (int64_t i = 0; i < n; i++)
		good &= isfinite(v[i]);
	return good;
}

static bool any_nan(const double *v, int64_t n)
{
	bool found = false;

	for (int64_t i = 0; i < n; i++)
		found |= isnan(v[i]);
	return found;
}

/* F9: gates of +-300 have finite gradients; F10: a NaN token reaches all six LoRA gradients. */
static void extremes_one(void)
{
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = layer_small();
	struct block_reference r = { 0 };
	struct moe_expert_layer *l;
	struct block_data d;

	c.routing = 0;
	block_data_make(&d, &c);
	for (int64_t i = 0; i < (int64_t)c.T * c.H; i++)
		d.x[i] *= 256;
	l = layer_make(e, &d, NULL);
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, 1));
	block_reference(&r, &d, d.ids);
	CHECK(relative_error_of_floats(d.out, r.out, (int64_t)c.T * c.H) <= table_tolerance_held()->out);
	/* u = x A^T as an operand of bf16 moves a gate of 300 by .5 */
	layer_within("grad_x", d.grad_x, r.grad_x, (int64_t)c.T * c.H, table_is_packed() ? 3e-2 : 1e-5);
	for (int i = 0; i < LAYER_LORA; i++) {
		double *g = layer_get(l, &c, layer_lora[i], true);

		CHECK(all_finite(g, d.n[layer_lora[i]]));
		free(g);
	}
	d.x[3 * c.H + 1] = NAN;
	CHECK_OK(moe_experts_release_gradients(l));
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, 1));
	for (int i = 0; i < LAYER_LORA; i++) {
		double *g = layer_get(l, &c, layer_lora[i], true);

		CHECK(any_nan(g, d.n[layer_lora[i]]));
		free(g);
	}
	CHECK(isnan(d.out[3 * c.H]) && isnan(d.grad_weights[3 * c.k]) && !isnan(d.out[0]));
	block_reference_free(&r);
	moe_experts_destroy(l);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

static void extremes(void)
{
	each_table(extremes_one);
}

/* F13: the same bits in every run, for many rows of one expert, with any number of workers. */
static void determinism_one(void)
{
	uint64_t hash[4];

	for (int i = 0; i < 4; i++) {
		struct moe_engine *e = layer_engine(1 + i % 2, 1);
		struct block_case c = { .E = 3, .k = 2, .H = 64, .I = 300, .T = 150, .r = 4, .seed = 9,
					.group_size = 1 + i / 2, .slices_i = 1 + i % 2,
					.backward = "direct" };
		struct moe_expert_layer *l;
		struct block_data d;
		uint64_t h = 1;

		block_data_make(&d, &c);
		l = layer_make(e, &d, NULL);
		CHECK_OK(layer_forward(l, &d, true));
		CHECK_OK(layer_backward(l, &d, 1));
		for (int j = 0; j < LAYER_LORA; j++) {
			double *g = layer_get(l, &c, layer_lora[j], true);

			h = hash_of(h, g, sizeof *g * (size_t)d.n[layer_lora[j]]);
			free(g);
		}
		hash[i] = hash_of(h, d.grad_x, sizeof(float) * (size_t)(c.T * c.H));
		CHECK(hash[i] == hash[0]);
		moe_experts_destroy(l);
		block_data_free(&d);
		CHECK_OK(moe_engine_close(e));
	}
}

static void determinism(void)
{
	each_table(determinism_one);
}

static int64_t tasks_seen;

static void count_task(const struct moe_task_event *event, void *user)
{
	(void)event, (void)user;
	tasks_seen++;
}

/* F17: a backward after an update does what any other does; F15: experts elsewhere are ids of -1. */
static void no_hidden_work(void)
{
	struct moe_observer observer = { .submitted = count_task };
	struct moe_adamw_params adamw = adamw_default();
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = layer_small();
	struct moe_expert_layer *l;
	struct block_data d;
	int64_t usual;

	block_data_make(&d, &c);
	l = layer_make(e, &d, NULL);
	CHECK_OK(moe_engine_observe(e, &observer));
	CHECK_OK(layer_forward(l, &d, true));
	tasks_seen = 0;
	CHECK_OK(layer_backward(l, &d, 1));
	usual = tasks_seen;
	CHECK_OK(moe_experts_update(l, &adamw));
	CHECK_OK(layer_forward(l, &d, true));
	tasks_seen = 0;
	CHECK_OK(layer_backward(l, &d, 1));
	CHECK(usual > 0 && tasks_seen == usual);
	for (int i = 0; i < c.T * c.k; i++) /* experts 0..2 run elsewhere */
		d.ids[i] = d.ids[i] < 3 ? -1 : d.ids[i];
	CHECK_OK(layer_forward(l, &d, true));
	CHECK_OK(layer_backward(l, &d, 1));
	for (int i = 0; i < LAYER_LORA; i++) {
		double *g;

		CHECK_OK(moe_experts_release_gradients(l));
		CHECK_OK(layer_forward(l, &d, true));
		CHECK_OK(layer_backward(l, &d, 1));
		g = layer_get(l, &c, layer_lora[i], true);
		for (int64_t j = 0; j < 3 * d.n[layer_lora[i]] / c.E; j++)
			CHECK(g[j] == 0);
		free(g);
	}
	moe_experts_destroy(l);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* F16: every allocation that fails is an error that leaves the object usable. */
static void allocations(void)
{
	struct moe_adamw_params adamw = adamw_default();
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = layer_small();
	struct moe_experts_params p;
	struct moe_expert_layer *l;
	struct block_data d;
	int n, used_up = 0;

	c.base_grads = true;
	c.backward = table()->weight_transpose ? "shared:1" : "direct";
	block_data_make(&d, &c);
	p = layer_params(&c);
	for (n = 1; n < 20000; n++) {
		enum moe_status st;

		moe_alloc_fail_after(n);
		st = moe_experts_create(e, &p, &l);
		moe_alloc_fail_after(-1);
		if (st == MOE_OK)
			break;
		CHECK(st == MOE_ERR_NOMEM && l == NULL);
	}
	CHECK(n > 10 && n < 20000);
	CHECK_OK(layer_load(l, &d, NULL, 0));
	layer_set_lora(l, &d);
	for (n = 1; n < 20000; n += n < 40 ? 1 : 7) {
		enum moe_status st;

		moe_alloc_fail_after(n);
		st = layer_forward(l, &d, true);
		moe_alloc_fail_after(-1);
		if (st == MOE_OK)
			break;
		CHECK(st == MOE_ERR_NOMEM);
	}
	CHECK(n > 10 && n < 20000);
	for (n = 1; n < 20000; n += n < 40 ? 1 : 7) {
		enum moe_status st;

		moe_alloc_fail_after(n);
		st = layer_backward(l, &d, 1);
		moe_alloc_fail_after(-1);
		if (st == MOE_OK)
			break;
		CHECK(st == MOE_ERR_NOMEM);
		CHECK(strstr(moe_last_error(), "its forward is used up") != NULL);
		CHECK_ERROR(layer_backward(l, &d, 1), MOE_ERR_STATE, "no forward is kept");
		CHECK(layer_window(l) == MOE_WINDOW_CLOSED);
		CHECK_OK(layer_forward(l, &d, true));
		used_up++;
	}
	CHECK(used_up > 10);
	for (n = 1; n < 2000; n += 3) {
		enum moe_status st;

		moe_alloc_fail_after(n);
		st = moe_experts_update(l, &adamw);
		moe_alloc_fail_after(-1);
		if (st == MOE_OK)
			break;
		CHECK_ERROR(st, MOE_ERR_NOMEM, "applied in part");
		CHECK_OK(layer_forward(l, &d, true));
		CHECK_OK(layer_backward(l, &d, 1));
	}
	moe_experts_destroy(l);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* ---- threads ---- */

struct thread {
	pthread_t id;
	struct moe_expert_layer *l;
	struct block_data *d;
	int steps, busy;
	uint64_t hash;
};

static void *work(void *arg)
{
	struct thread *t = arg;
	struct moe_adamw_params adamw = adamw_default();

	for (int i = 0; i < t->steps; i++) {
		struct layer_call a = layer_call(t->d, 1 + (i * 13) % t->d->c.T);

		CHECK_OK(moe_experts_forward_async(t->l, &a.x, &a.ids, &a.weights, 1, &a.out));
		CHECK_OK(moe_experts_backward_async(t->l, &a.grad_out, 1, &a.grad_x, &a.grad_weights));
		CHECK_OK(moe_experts_update(t->l, &adamw));
		CHECK_OK(moe_experts_wait(t->l));
		t->hash = hash_of(t->hash, t->d->grad_x, sizeof(float) * (size_t)(a.grad_x.shape[0] * t->d->c.H));
	}
	return NULL;
}

/* Layers that share buffers, each in a thread of its own, give what they give alone; then they close together. */
static void threads(void)
{
	enum { N = 3 };
	struct moe_engine *e = layer_engine(2, 1);
	struct block_data d[N];
	uint64_t alone[N] = { 0 };

	for (int round = 0; round < 2; round++) {
		struct thread t[N];

		for (int i = 0; i < N; i++) {
			struct block_case c = layer_small();

			c.seed += i;
			c.T = 80;
			c.base_grads = i == 0;
			c.backward = table()->weight_transpose ? "shared:2" : "direct";
			if (!round)
				block_data_make(&d[i], &c);
			t[i] = (struct thread){ .l = layer_make(e, &d[i], NULL), .d = &d[i], .steps = 8, .hash = 1 };
			if (round)
				CHECK(!pthread_create(&t[i].id, NULL, work, &t[i]));
			else
				work(&t[i]);
		}
		for (int i = 0; i < N; i++) {
			if (round)
				pthread_join(t[i].id, NULL);
			else
				alone[i] = t[i].hash;
			CHECK(t[i].hash == alone[i]);
			moe_experts_destroy(t[i].l);
		}
	}
	for (int i = 0; i < N; i++)
		block_data_free(&d[i]);
	CHECK_OK(moe_engine_close(e));
}

static void *intrude(void *arg)
{
	struct thread *t = arg;

	for (int i = 0; i < 20000 && !t->busy; i++) {
		struct moe_experts_info info = { .struct_size = sizeof info };
		enum moe_status st = moe_experts_get_info(t->l, &info);

		t->busy += st == MOE_ERR_BUSY;
		CHECK(st == MOE_OK || st == MOE_ERR_BUSY);
		usleep(50);
	}
	return NULL;
}

/* Two threads in one object: an error for one of them, results for the other. */
static void busy(void)
{
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case c = layer_small();
	struct block_data d;
	struct thread t;
	int tries = 0;

	c.T = 200;
	block_data_make(&d, &c);
	t = (struct thread){ .l = layer_make(e, &d, NULL), .d = &d };
	while (!t.busy && tries++ < 50) {
		CHECK(!pthread_create(&t.id, NULL, intrude, &t));
		for (int i = 0; i < 20; i++) {
			enum moe_status st = layer_forward(t.l, &d, false);

			CHECK(st == MOE_OK || st == MOE_ERR_BUSY);
		}
		pthread_join(t.id, NULL);
		t.busy += tries == 50; /* a machine where they never met */
	}
	moe_experts_destroy(t.l);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

const struct moe_test moe_suite_tests[] = {
	{ "layers in flight", in_flight },
	{ "layers of one number", same_number },
	{ "large and NaN inputs", extremes },
	{ "determinism", determinism },
	{ "no hidden work", no_hidden_work },
	{ "failing allocations", allocations },
	{ "layers in threads", threads },
	{ "two threads in one layer", busy },
	{ NULL, NULL },
};
