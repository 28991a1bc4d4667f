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
static double format_bytes(const struct moe_format *f, int64_t n, int64_t k)
{
	struct moe_coding c = moe_format_coding(f, k);
	int64_t groups = (k + c.group - 1) / c.group;

	return (double)(n * k * f->bits / 8 + n * groups * (int64_t)moe_scale_bytes(&c));
}

static double layer_bytes(const struct moe_format *f, const struct block_case *c)
{
	return c->E * (2 * format_bytes(f, c->I, c->H) + format_bytes(f, c->H, c->I));
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

const struct moe_test moe_suite_tests[] = {
	{ "LoRA on frozen codes, every format and table", test_frozen },
	{ "masters and codes made of them, one part and three", test_trained },
	{ NULL, NULL },
};
