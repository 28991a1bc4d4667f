/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every allocation of the process while quantised experts are trained, in every format: StarPU's and the other
 * libraries' too. No decoded copy of a weight outlives the task that made it:
 *
 *	what is there beyond the format's bytes, worker scratch and what is trained is less than one matrix in bf16;
 *	no step has, at any instant, a quarter of a matrix more than there was before it;
 *	a worker's scratch is too small for a matrix as the table decodes it, and nothing reads what an earlier call
 *	left in it.
 */
#include "tests/layer_check.h"

#include "codelets/format.h"
#include "engine/internal.h"

#include <malloc.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>

const char moe_suite_name[] = "allocations";

#define STEPS 3

/* ---- heap and anonymous mappings ---- */

static atomic_llong live, peak, changes;

static void add(long long bytes)
{
	long long now = atomic_fetch_add(&live, bytes) + bytes, most = atomic_load(&peak);

	atomic_fetch_add(&changes, 1);
	while (now > most && !atomic_compare_exchange_weak(&peak, &most, now))
		;
}

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__

#define WATCHED false /* the heap is the sanitizer's */

#else

#define WATCHED true
#define MAPPINGS 4096

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *p);

static struct {
	char *at;
	size_t bytes;
} mapping[MAPPINGS];
static atomic_flag mapping_lock = ATOMIC_FLAG_INIT;

static void *count(void *p)
{
	if (p)
		add((long long)malloc_usable_size(p));
	return p;
}

void *malloc(size_t bytes)
{
	return count(__libc_malloc(bytes));
}

void *calloc(size_t n, size_t bytes)
{
	return count(__libc_calloc(n, bytes));
}

void free(void *p)
{
	if (p)
		add(-(long long)malloc_usable_size(p));
	__libc_free(p);
}

void *realloc(void *p, size_t bytes)
{
	long long before = p ? (long long)malloc_usable_size(p) : 0;
	void *q = __libc_realloc(p, bytes);

	if (q || (p && !bytes))
		add((q ? (long long)malloc_usable_size(q) : 0) - before);
	return q;
}

void *memalign(size_t alignment, size_t bytes)
{
	return count(__libc_memalign(alignment, bytes));
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
	return memalign(alignment, bytes);
}

int posix_memalign(void **p, size_t alignment, size_t bytes)
{
	*p = memalign(alignment, bytes);
	return *p ? 0 : ENOMEM;
}

/* bytes < 0: of the mapping at p, which is forgotten; 0 where there is none. */
static size_t mapped(void *p, ssize_t bytes)
{
	size_t found = 0;
	int i = 0;

	while (atomic_flag_test_and_set(&mapping_lock))
		;
	while (i < MAPPINGS && mapping[i].at != (bytes < 0 ? p : NULL))
		i++;
	if (i == MAPPINGS && bytes >= 0)
		abort();
	if (i < MAPPINGS) {
		found = bytes < 0 ? mapping[i].bytes : (size_t)bytes;
		mapping[i].at = bytes < 0 ? NULL : p;
		mapping[i].bytes = found;
	}
	atomic_flag_clear(&mapping_lock);
	return found;
}

void *mmap(void *at, size_t bytes, int access, int flags, int fd, off_t offset)
{
	void *p = (void *)syscall(SYS_mmap, at, bytes, access, flags, fd, offset);

	if (p != MAP_FAILED && flags & MAP_ANONYMOUS)
		add((long long)mapped(p, (ssize_t)bytes));
	return p;
}

void *mmap64(void *at, size_t bytes, int access, int flags, int fd, off_t offset)
{
	return mmap(at, bytes, access, flags, fd, offset);
}

int munmap(void *p, size_t bytes)
{
	int rc = (int)syscall(SYS_munmap, p, bytes);

	if (!rc)
		add(-(long long)mapped(p, -1));
	return rc;
}

#endif

/* ---- one layer ---- */

/* A matrix in bf16 has 2 MiB: large beside all else that 8 tokens need. */
static const struct block_case large = { .E = 2, .k = 2, .H = 1024, .I = 1024, .T = 8, .r = 2, .seed = 7 };

#define MATRIX ((long long)1024 * 1024 * 2)

/* What docs/formats.md says of a matrix: codes, and scales (with zeros) per row and group. */
static double bytes_of(const struct moe_coding *c, int64_t n, int64_t k)
{
	return (double)(n * k * c->format->bits / 8 + n * moe_groups(c, k) * (int64_t)moe_scale_bytes(c));
}

static double layer_bytes(const struct moe_format *f, const struct block_case *c)
{
	struct moe_coding wide = moe_format_coding(f, c->H), down = moe_format_coding(f, c->I);

	return c->E * (2 * bytes_of(&wide, c->I, c->H) + bytes_of(&down, c->H, c->I));
}

/* Of the engine's mappings: room to begin at a huge page, which is never touched. */
static long long alignment_bytes(struct moe_engine *e)
{
	long long bytes = 0;

	for (const struct moe_block_header *b = e->memory; b; b = b->next)
		bytes += b->mapped ? (long long)(b->mapped - b->bytes) : 0;
	return bytes;
}

static long long scratch_bytes(const struct moe_engine *e)
{
	return (long long)e->scratch_bytes * e->n_workers;
}

/* What there is but worker scratch, which stays with the engine. */
static long long live_bytes(struct moe_engine *e)
{
	return atomic_load(&live) - alignment_bytes(e) - scratch_bytes(e);
}

/* NaN wherever a task left something. */
static void spoil_scratch(struct moe_engine *e)
{
	for (int i = 0; i < e->n_workers; i++)
		if (e->workers[i].scratch)
			memset(e->workers[i].scratch, 0xff, e->scratch_bytes);
}

/* Forward, backward and update; a hash of what they gave. spoil: all of the scratch in between. */
static uint64_t train_a_step(struct moe_engine *e, struct moe_expert_layer *l, struct block_data *d, bool spoil)
{
	struct moe_adamw_params p = { .struct_size = sizeof p, .learning_rate = 1e-3, .beta1 = .9, .beta2 = .999,
				      .eps = 1e-8 };
	size_t bytes = (size_t)(d->c.T * d->c.H) * sizeof(float);

	if (spoil)
		spoil_scratch(e);
	CHECK_OK(layer_forward(l, d, true));
	if (spoil)
		spoil_scratch(e);
	CHECK_OK(layer_backward(l, d, 1));
	if (spoil)
		spoil_scratch(e);
	CHECK_OK(moe_experts_update(l, &p));
	return hash_of(hash_of(0, d->out, bytes), d->grad_x, bytes);
}

static struct moe_expert_layer *make(struct moe_engine *e, const struct moe_format *f, const struct block_data *d)
{
	struct moe_experts_params p = layer_params(&d->c);

	p.weight_format = f->name;
	return layer_make(e, d, &p);
}

/* What the engine, StarPU and libraries make once. */
static void warm_up(struct moe_engine *e, bool base)
{
	const struct block_case c = { .E = 2, .k = 2, .H = 64, .I = 64, .T = 8, .r = base ? 0 : 2, .seed = 1,
				      .base_grads = base };
	struct moe_expert_layer *l;
	struct block_data d;

	block_data_make(&d, &c);
	l = make(e, moe_format_list[0], &d);
	train_a_step(e, l, &d, false);
	moe_experts_destroy(l);
	block_data_free(&d);
}

/* Hashes of the steps. before: what was there without the layer. */
static void watch(struct moe_engine *e, const struct moe_format *f, struct block_data *d, bool spoil, uint64_t *hash)
{
	const struct block_case *c = &d->c;
	long long decoded = table_is_packed() ? MATRIX : 2 * MATRIX; /* f32 in the reference */
	long long before = live_bytes(e), trained, rest, most = 0, calls = 0;
	struct moe_expert_layer *l = make(e, f, d);

	for (int i = 0; l && i < STEPS; i++) {
		long long begin = atomic_load(&live);

		atomic_store(&peak, begin);
		calls -= atomic_load(&changes);
		hash[i] = train_a_step(e, l, d, spoil);
		calls += atomic_load(&changes);
		if (i) /* the first one's buffers stay */
			most = MOE_MAX(most, atomic_load(&peak) - begin);
	}
	trained = c->base_grads ? 16LL * 3 * c->E * c->I * c->H : 0; /* f32: master, gradient, two moments */
	rest = live_bytes(e) - before - trained - (long long)layer_bytes(f, c);
	CHECK(calls > 0);
	if (!CHECK(rest < MATRIX))
		printf("  %s: %lld bytes beyond the plan, a matrix in bf16 has %lld\n", f->name, rest, MATRIX);
	if (!CHECK(most < MATRIX / 4))
		printf("  %s: a step has %lld bytes more at times\n", f->name, most);
	if (!CHECK((long long)e->scratch_bytes < decoded))
		printf("  %s: %zu bytes of scratch per worker\n", f->name, e->scratch_bytes);
	if (!spoil)
		printf("  %s, %s%s, parts %d: rest %.2f MiB, steps +%.3f MiB, scratch %.2f MiB each\n", table()->name, f->name,
		       c->base_grads ? " trained" : "", e->n_parts, (double)rest / 0x1p20, (double)most / 0x1p20,
		       (double)e->scratch_bytes / 0x1p20);
	moe_experts_destroy(l);
}

static void formats(const struct block_case *c, int parts)
{
	struct moe_engine *e = layer_engine(2, parts);
	struct block_data d;

	block_data_make(&d, c);
	warm_up(e, c->base_grads);
	for (int i = 0; moe_format_list[i]; i++) {
		uint64_t hash[2][STEPS] = { { 0 } };

		if (!moe_format_list[i]->quantise && !moe_format_list[i]->quantise_zero)
			continue;
		if (!best_table_takes((size_t)(i + parts), 5))
			continue;
		watch(e, moe_format_list[i], &d, false, hash[0]);
		watch(e, moe_format_list[i], &d, true, hash[1]);
		CHECK(!memcmp(hash[0], hash[1], sizeof hash[0]));
		CHECK(hash[0][0] != hash[0][1]); /* it was trained */
	}
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

static bool watched(void)
{
	if (!WATCHED)
		moe_test_skip("a sanitizer has the heap");
	return WATCHED;
}

static void frozen(void)
{
	formats(&large, 1);
}

static void test_frozen(void)
{
	if (watched())
		each_table(frozen);
}

static void test_trained(void)
{
	struct block_case c = large;

	c.r = 0;
	c.base_grads = true;
	for (int parts = 1; watched() && parts <= 3; parts += 2)
		formats(&c, parts);
}

/* ---- one block ---- */

/* As a checkpoint stores them: [E, ...] of codes, scales and zeros of w [E, n, k]. */
static void store(const struct moe_coding *c, int64_t E, int64_t n, int64_t k, const float *w,
		  struct moe_quantised_arrays *out)
{
	const struct moe_code_writer *writer = c->format->layout[0].writer;
	struct moe_array *to[3] = { &out->codes, &out->scale, &out->zero };

	*out = (struct moe_quantised_arrays){ .struct_size = sizeof *out };
	for (int64_t e = 0; e < E; e++) {
		struct moe_quantised q = { .coding = *c, .n = n, .k = k };
		struct moe_stored s = { .zero_name = "" };
		struct moe_array *of[3] = { &s.codes, &s.scale, &s.zero };
		void *memory = NULL;

		CHECK_OK(moe_quantise_as(w + e * n * k, MOE_F32, k, &q, &memory));
		CHECK_OK(writer->shapes(&q, &s));
		for (int i = 0; i < 3; i++) {
			size_t bytes = (size_t)moe_shape_count(of[i]->ndim, of[i]->shape) * moe_dtype_size(of[i]->dtype);

			if (!of[i]->ndim)
				continue;
			if (!e) {
				*to[i] = *of[i];
				to[i]->ndim++;
				to[i]->shape[0] = E;
				memcpy(to[i]->shape + 1, of[i]->shape, (size_t)of[i]->ndim * sizeof *of[i]->shape);
				to[i]->data = malloc((size_t)E * bytes);
			}
			of[i]->data = (char *)to[i]->data + (size_t)e * bytes;
		}
		CHECK_OK(writer->store(&q, &s));
		moe_free(memory);
	}
}

/* Codes for the experts' matrices, the others as they are. */
static struct moe_block *make_block(struct moe_engine *e, const struct moe_coding *c, const struct block_data *d)
{
	struct moe_block_params p = block_params_of(&d->c);
	struct moe_quantised_arrays q;
	struct moe_block *b = NULL;

	p.weight_format = c->format->name;
	CHECK_OK(moe_block_create(e, &p, &b));
	for (int i = 0; b && i < BLOCK_WEIGHTS; i++) {
		struct moe_array a = { .data = d->w[i], .dtype = MOE_F32 };

		a.ndim = block_shape(&d->c, (enum moe_block_array)i, a.shape);
		if (i > MOE_BLOCK_DOWN_PROJ && a.ndim)
			CHECK_OK(moe_block_set(b, (enum moe_block_array)i, &a));
		if (i > MOE_BLOCK_DOWN_PROJ)
			continue;
		store(c, a.shape[0], a.shape[1], a.shape[2], d->w[i], &q);
		CHECK_OK(moe_block_set_quantised(b, (enum moe_block_array)i, &q));
		CHECK_OK(moe_block_set_quantised(b, (enum moe_block_array)i, &q)); /* in place */
		free(q.codes.data), free(q.scale.data), free(q.zero.data);
	}
	return b;
}

/* Weights take what their scales need, and all of it in training a tenth more at most, beside LoRA. */
static void watch_block(struct moe_engine *e, const struct moe_coding *c, struct block_data *d)
{
	static const char *const trained[] = { "lora", "gradients", "moments" };
	struct moe_adamw_params adamw = adamw_default();
	double weights = 3 * d->c.E * bytes_of(c, d->c.I, d->c.H); /* I is H */
	long long before = live_bytes(e), most;
	struct moe_block *b = make_block(e, c, d);
	size_t plan = moe_memory_bytes(e, "weights", -1);

	atomic_store(&peak, 0);
	for (int i = 0; b && i < STEPS; i++) {
		CHECK_OK(block_forward(b, d, true, d->out));
		CHECK_OK(block_backward(b, d));
		CHECK_OK(moe_block_update(b, &adamw));
	}
	most = atomic_load(&peak) - alignment_bytes(e) - scratch_bytes(e) - before;
	for (size_t i = 0; i < MOE_COUNT(trained); i++)
		most -= (long long)moe_memory_bytes(e, trained[i], -1);
	CHECK((double)plan >= weights && (double)plan < 1.02 * weights);
	CHECK((double)most >= weights && (double)most < 1.1 * weights);
	printf("  block in %s, scales %s%s: plan %+.1f %%, peak %+.1f %% of %.1f MiB\n", c->format->name,
	       c->scale == MOE_SCALE_UE8M0 ? "UE8M0" : moe_dtype_name(c->scale), c->zero ? " with zeros" : "",
	       100 * ((double)plan / weights - 1), 100 * ((double)most / weights - 1), weights / 0x1p20);
	moe_block_destroy(b);
	CHECK(moe_memory_bytes(e, "weights", -1) == 0);
}

/* Each format with all scales and zeros that its first layout stores. */
static void test_blocks(void)
{
	struct block_case c = large;
	struct block_data d;
	struct moe_engine *e;

	if (!watched())
		return;
	c.E = 8;
	e = layer_engine(2, 2);
	block_data_make(&d, &c);
	warm_up(e, false);
	for (int i = 0; moe_format_list[i]; i++) {
		const struct moe_format *f = moe_format_list[i];
		struct moe_coding coding = moe_format_coding(f, c.H);

		if (!f->layout[0].writer)
			continue;
		watch_block(e, &coding, &d);
		coding.scale = f->scale == MOE_BF16 ? MOE_F32 : MOE_BF16;
		if (f->scale != MOE_SCALE_UE8M0 && f->encode)
			watch_block(e, &coding, &d);
		coding.zero = true;
		if (f->quantise && f->quantise_zero)
			watch_block(e, &coding, &d);
	}
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

const struct moe_test moe_suite_tests[] = {
	{ "LoRA on frozen codes, every format and table", test_frozen },
	{ "masters and codes made of them, one part and three", test_trained },
	{ "a block's weights take what their scales need, every format", test_blocks },
	{ NULL, NULL },
};
