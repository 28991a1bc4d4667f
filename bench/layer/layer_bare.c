/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bare GEMMs of a layer: three products per expert and direction on packed weights and packed
 * rows, the experts handed out by a counter to plain threads. Inputs stream from arenas as in the
 * layer; outputs stay in a buffer of the thread. The floor that a step is compared with: no
 * packing, no LoRA, no epilogue. Tables without tiles run their dense layers.
 */
#include "bench/layer/layer_bench.h"
#include "bench/measure.h"

#include "codelets/kernels/packed/layout.h"
#include "engine/engine.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define PURPOSE "bench" /* for the engine's counters: not the layer's memory */

struct bare_phase {
	double start, end, cpu;
};

struct bare_thread {
	struct layer_bare *bare;
	pthread_t thread;
	float *y, *dx; /* [rows_max, max(H, I)] */
	void *scratch;
	struct bare_phase phase[2];
};

struct layer_bare {
	struct moe_engine *engine;
	int E, H, I, workers;
	const int *rows;
	int64_t *first;			     /* [E] row in the arenas */
	struct moe_weight *gate, *up, *down; /* [E] */
	char *weights;
	size_t stride;	      /* bytes of one packed matrix */
	float *wide, *narrow; /* [R, H] x and grad_out; [R, I] h, dgate and dup */
	void *fwd_wide, *bwd_wide, *fwd_narrow, *bwd_narrow; /* the same packed, per expert */
	struct bare_thread *thread;
	pthread_barrier_t barrier;
	atomic_int next[2]; /* expert of the forward, of the backward */
};

/* y[m, n] by weight panels, as the layer's gate_up and down walk them */
static void fwd(struct bare_thread *t, int m, const void *panel, const struct moe_weight *w)
{
	const struct moe_tiles *k = moe_kernels()->tiles;
	int64_t kp = moe_round_up(w->k, MOE_PACK_K), stride = moe_packed_stride(kp);

	for (int64_t n = 0; n < w->n; n += MOE_PACK_N) {
		struct moe_fwd_seg seg = { panel, kp, 0, (int)kp,
					   (const uint16_t *)w->data + n / MOE_PACK_N * stride };

		k->fwd(m, &seg, 1, seg.w + stride, t->y, MOE_PACK_N, MOE_OUT_STORE);
	}
}

/* dx[m, k] from one or two weights, by column ranges as down_bwd and gate_up_bwd walk them */
static void bwd(struct bare_thread *t, int m, int64_t columns, const void *const *panel,
		const struct moe_weight *const *w, int count)
{
	const struct moe_tiles *k = moe_kernels()->tiles;
	int step = k->bwd_columns(m);

	for (int64_t c = 0; c < columns; c += step) {
		int width = (int)MOE_MIN(step, columns - c);
		struct moe_bwd_seg seg[2];

		for (int i = 0; i < count; i++) {
			const uint16_t *data = (const uint16_t *)w[i]->data + MOE_PACK_N * c;

			seg[i] = (struct moe_bwd_seg){ panel[i],
						       moe_round_up(w[i]->n, MOE_PACK_K),
						       0,
						       (int)moe_round_up(w[i]->n, MOE_PACK_N),
						       data,
						       moe_packed_stride(columns),
						       c + width < columns ? NULL : data,
						       NULL };
		}
		k->bwd(m, seg, count, width, t->dx, width, MOE_OUT_STORE, t->scratch);
	}
}

static const void *rows_at(const void *panels, int64_t row, int64_t width)
{
	return (const char *)panels + row * width * moe_kernels()->panel_bytes;
}

static void forward(struct bare_thread *t, int e)
{
	struct layer_bare *b = t->bare;
	const struct moe_kernels *k = moe_kernels();
	const float *x = b->wide + b->first[e] * b->H, *h = b->narrow + b->first[e] * b->I;
	int m = b->rows[e];

	if (k->tiles) {
		const void *wide = rows_at(b->fwd_wide, b->first[e], moe_width(b->H));

		fwd(t, m, wide, &b->gate[e]);
		fwd(t, m, wide, &b->up[e]);
		fwd(t, m, rows_at(b->fwd_narrow, b->first[e], moe_width(b->I)), &b->down[e]);
		return;
	}
	k->linear(m, &b->gate[e], 0, b->I, x, b->H, NULL, NULL, t->y, b->I, t->scratch);
	k->linear(m, &b->up[e], 0, b->I, x, b->H, NULL, NULL, t->y, b->I, t->scratch);
	k->linear(m, &b->down[e], 0, b->H, h, b->I, NULL, NULL, t->y, b->H, t->scratch);
}

static void backward(struct bare_thread *t, int e)
{
	struct layer_bare *b = t->bare;
	const struct moe_kernels *k = moe_kernels();
	const float *dy = b->wide + b->first[e] * b->H, *dh = b->narrow + b->first[e] * b->I;
	int m = b->rows[e];

	if (k->tiles) {
		const void *wide = rows_at(b->bwd_wide, b->first[e], moe_width(b->H));
		const void *narrow = rows_at(b->bwd_narrow, b->first[e], moe_width(b->I));
		const struct moe_weight *down = &b->down[e], *gu[2] = { &b->gate[e], &b->up[e] };

		bwd(t, m, moe_width(b->I), &wide, &down, 1);
		bwd(t, m, moe_width(b->H), (const void *[2]){ narrow, narrow }, gu, 2);
		return;
	}
	k->linear_bwd(m, &b->down[e], dy, b->H, NULL, t->dx, b->I, false, t->scratch);
	k->linear_bwd(m, &b->gate[e], dh, b->I, NULL, t->dx, b->H, false, t->scratch);
	k->linear_bwd(m, &b->up[e], dh, b->I, NULL, t->dx, b->H, true, t->scratch);
}

/* The thread's clock, not its parent's: with every core busy the parent wakes late. */
static void each_expert(struct bare_thread *t, struct bare_phase *phase, atomic_int *next,
			void (*run)(struct bare_thread *, int))
{
	struct layer_bare *b = t->bare;
	double cpu;
	int e;

	pthread_barrier_wait(&b->barrier);
	cpu = thread_seconds();
	phase->start = moe_now();
	while ((e = atomic_fetch_add_explicit(next, 1, memory_order_relaxed)) < b->E)
		if (b->rows[e])
			run(t, e);
	phase->end = moe_now();
	phase->cpu = thread_seconds() - cpu;
}

static void *thread_main(void *arg)
{
	struct bare_thread *t = arg;

	each_expert(t, &t->phase[0], &t->bare->next[0], forward);
	each_expert(t, &t->phase[1], &t->bare->next[1], backward);
	return NULL;
}

static void start_thread(struct layer_bare *b, int i)
{
	pthread_attr_t attr;
	cpu_set_t cpus;

	pthread_attr_init(&attr);
	if (layer_watch_cpus(i, &cpus))
		pthread_attr_setaffinity_np(&attr, sizeof cpus, &cpus);
	if (pthread_create(&b->thread[i].thread, &attr, thread_main, &b->thread[i])) {
		fprintf(stderr, "bench_layer: no thread for the bare GEMMs\n");
		exit(1); /* the others wait at the barrier */
	}
	pthread_attr_destroy(&attr);
}

/* From the first start to the last end. */
static double phase_time(const struct layer_bare *b, int p)
{
	double start = b->thread[0].phase[p].start, end = b->thread[0].phase[p].end;

	for (int i = 1; i < b->workers; i++) {
		start = MOE_MIN(start, b->thread[i].phase[p].start);
		end = MOE_MAX(end, b->thread[i].phase[p].end);
	}
	return end - start;
}

enum moe_status bare_gemms(struct layer_bare *b, struct layer_bare_times *out)
{
	MOE_TRY(moe_engine_hold(b->engine)); /* the workers sleep meanwhile */
	atomic_store(&b->next[0], 0);
	atomic_store(&b->next[1], 0);
	for (int i = 0; i < b->workers; i++)
		start_thread(b, i);
	out->cpu = 0;
	for (int i = 0; i < b->workers; i++) {
		pthread_join(b->thread[i].thread, NULL);
		out->cpu += b->thread[i].phase[0].cpu + b->thread[i].phase[1].cpu;
	}
	out->forward = phase_time(b, 0);
	out->backward = phase_time(b, 1);
	return moe_engine_release(b->engine);
}

static void *take(struct layer_bare *b, size_t bytes)
{
	return moe_memory_alloc(b->engine, MOE_MAX(bytes, (size_t)64), -1, PURPOSE);
}

static enum moe_status alloc_threads(struct layer_bare *b, int rows_max)
{
	const struct moe_kernels *k = moe_kernels();
	size_t y = (size_t)rows_max * (size_t)MOE_MAX(b->H, b->I) * sizeof(float);
	size_t scratch = MOE_MAX(k->linear_scratch(rows_max, b->I, b->H, 0),
				 k->linear_scratch(rows_max, b->H, b->I, 0));

	if (k->tiles)
		scratch = MOE_MAX(scratch, k->tiles->bwd_scratch(rows_max,
								 moe_width(MOE_MAX(b->H, 2 * b->I)),
								 moe_width(MOE_MAX(b->H, b->I))));

	for (int i = 0; i < b->workers; i++) {
		struct bare_thread *t = &b->thread[i];

		t->bare = b;
		t->y = take(b, y);
		t->dx = take(b, y);
		t->scratch = take(b, scratch);
		if (!t->y || !t->dx || !t->scratch)
			return MOE_ERR_NOMEM;
	}
	return MOE_OK;
}

/* Each expert's rows as panels of their own, as gather and scatter leave them. */
static enum moe_status pack_rows(struct layer_bare *b, int64_t R)
{
	const struct moe_tiles *t = moe_kernels()->tiles;
	int64_t H = moe_width(b->H), I = moe_width(b->I);

	if (!t)
		return MOE_OK;
	b->fwd_wide = take(b, (size_t)(R * H * t->panel_bytes));
	b->bwd_wide = take(b, (size_t)(R * H * t->panel_bytes));
	b->fwd_narrow = take(b, (size_t)(R * I * t->panel_bytes));
	b->bwd_narrow = take(b, (size_t)(R * I * t->panel_bytes));
	if (!b->fwd_wide || !b->bwd_wide || !b->fwd_narrow || !b->bwd_narrow)
		return MOE_ERR_NOMEM;
	for (int e = 0; e < b->E; e++) {
		const float *wide = b->wide + b->first[e] * b->H;
		const float *narrow = b->narrow + b->first[e] * b->I;
		int m = b->rows[e];

		t->pack_fwd(m, wide, b->H, NULL, b->H, H,
			    (void *)rows_at(b->fwd_wide, b->first[e], H), H, 0);
		t->pack_bwd(m, wide, b->H, NULL, b->H, H,
			    (void *)rows_at(b->bwd_wide, b->first[e], H), H, 0);
		t->pack_fwd(m, narrow, b->I, NULL, b->I, I,
			    (void *)rows_at(b->fwd_narrow, b->first[e], I), I, 0);
		t->pack_bwd(m, narrow, b->I, NULL, b->I, I,
			    (void *)rows_at(b->bwd_narrow, b->first[e], I), I, 0);
	}
	return MOE_OK;
}

static enum moe_status alloc_all(struct layer_bare *b, const struct layer_options *o)
{
	const struct moe_kernels *k = moe_kernels();
	size_t E = (size_t)b->E;
	int64_t R = 0;
	int rows_max = 0;

	b->first = moe_calloc(E, sizeof *b->first);
	b->gate = moe_calloc(3 * E, sizeof *b->gate);
	b->thread = moe_calloc((size_t)b->workers, sizeof *b->thread);
	if (!b->first || !b->gate || !b->thread)
		return MOE_ERR_NOMEM;
	b->up = b->gate + E;
	b->down = b->up + E;
	for (int e = 0; e < b->E; e++) {
		b->first[e] = R;
		R += b->rows[e];
		rows_max = MOE_MAX(rows_max, b->rows[e]);
	}
	b->stride = MOE_MAX(k->weight_bytes(o->dtype, b->I, b->H, MOE_USE_GEMM),
			    k->weight_bytes(o->dtype, b->H, b->I, MOE_USE_GEMM));
	b->stride = (b->stride + 63) & ~(size_t)63;
	b->weights = take(b, 3 * E * b->stride);
	b->wide = take(b, (size_t)R * (size_t)b->H * sizeof(float));
	b->narrow = take(b, (size_t)R * (size_t)b->I * sizeof(float));
	if (!b->weights || !b->wide || !b->narrow)
		return MOE_ERR_NOMEM;
	for (size_t i = 0; i < 3 * E; i++)
		b->gate[i].data = b->weights + i * b->stride;
	for (int64_t i = 0; i < R * b->H; i++)
		b->wide[i] = (float)(i % 251 - 125) / 72;
	for (int64_t i = 0; i < R * b->I; i++)
		b->narrow[i] = (float)(i % 241 - 120) / 70;
	MOE_TRY(pack_rows(b, R));
	return alloc_threads(b, rows_max);
}

enum moe_status layer_bare_create(struct moe_engine *engine, const struct layer_options *o,
				  const int *rows, struct layer_bare **out)
{
	struct layer_bare *b = moe_calloc(1, sizeof *b);

	if (!b)
		return moe_fail(MOE_ERR_NOMEM, "no memory for the bare GEMMs");
	b->engine = engine;
	b->E = o->shape.E;
	b->H = o->shape.H;
	b->I = o->shape.I;
	b->workers = moe_engine_workers(engine);
	b->rows = rows;
	pthread_barrier_init(&b->barrier, NULL, (unsigned)b->workers);
	if (alloc_all(b, o) != MOE_OK) {
		layer_bare_destroy(b);
		return moe_fail(MOE_ERR_NOMEM, "no memory for the bare GEMMs");
	}
	*out = b;
	return MOE_OK;
}

void layer_bare_set(struct layer_bare *b, enum moe_block_array which, int expert, const void *src,
		    enum moe_dtype dtype)
{
	bool down = which == MOE_BLOCK_DOWN_PROJ;
	struct moe_weight *w = down			      ? &b->down[expert]
			       : which == MOE_BLOCK_GATE_PROJ ? &b->gate[expert]
							      : &b->up[expert];

	moe_kernels()->weight_pack(w, src, dtype, down ? b->H : b->I, down ? b->I : b->H,
				   down ? b->I : b->H, MOE_USE_GEMM);
}

void layer_bare_destroy(struct layer_bare *b)
{
	if (!b)
		return;
	for (int i = 0; b->thread && i < b->workers; i++) {
		moe_memory_free(b->engine, b->thread[i].y);
		moe_memory_free(b->engine, b->thread[i].dx);
		moe_memory_free(b->engine, b->thread[i].scratch);
	}
	moe_memory_free(b->engine, b->weights);
	moe_memory_free(b->engine, b->wide);
	moe_memory_free(b->engine, b->narrow);
	moe_memory_free(b->engine, b->fwd_wide);
	moe_memory_free(b->engine, b->bwd_wide);
	moe_memory_free(b->engine, b->fwd_narrow);
	moe_memory_free(b->engine, b->bwd_narrow);
	pthread_barrier_destroy(&b->barrier);
	moe_free(b->thread);
	moe_free(b->gate);
	moe_free(b->first);
	moe_free(b);
}
