/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/roof.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define HUGE_PAGE ((size_t)2 << 20)
#define LINE 64
#define LEAST_TOTAL ((size_t)256 << 20)
#define LEAST_EACH ((size_t)32 << 20)
#define LEAST_REPEATS 5
#define MAX_REPEATS 64

/* ---- pinning, time, medians ---- */

/* The n-th allowed CPU, modulo their number. */
static int allowed_cpu(const cpu_set_t *set, int n)
{
	int count = CPU_COUNT(set), at = count ? n % count : 0;

	for (int cpu = 0; count && cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, set) && at-- == 0)
			return cpu;
	return -1;
}

static bool pin_to(const cpu_set_t *set, int n)
{
	int cpu = allowed_cpu(set, n);
	cpu_set_t one;

	if (cpu < 0)
		return false;
	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	return sched_setaffinity(0, sizeof one, &one) == 0;
}

void moe_pin_thread(struct moe_pin *p)
{
	p->pinned = sched_getaffinity(0, sizeof p->before, &p->before) == 0 &&
		    pin_to(&p->before, CPU_COUNT(&p->before) - 1);
}

void moe_unpin_thread(struct moe_pin *p)
{
	if (p->pinned)
		sched_setaffinity(0, sizeof p->before, &p->before);
	p->pinned = false;
}

double moe_thread_seconds(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
	return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

double moe_median(double *value, int n)
{
	qsort(value, (size_t)n, sizeof *value, compare);
	return n % 2 ? value[n / 2] : 0.5 * (value[n / 2 - 1] + value[n / 2]);
}

double moe_quartile(double *value, int n, int quarter)
{
	qsort(value, (size_t)n, sizeof *value, compare);
	return value[quarter * (n - 1) / 4];
}

bool moe_huge_map(struct moe_huge *h, size_t bytes, int fill)
{
	/* room to align, and for what prefetching reaches past the end */
	h->mapped = bytes + 2 * HUGE_PAGE;
	h->map = mmap(NULL, h->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (h->map == MAP_FAILED) {
		h->map = NULL;
		return false;
	}
	h->data = (char *)(((uintptr_t)h->map + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
	madvise(h->data, bytes, MADV_HUGEPAGE);
	memset(h->data, fill, bytes);
	return true;
}

void moe_huge_unmap(struct moe_huge *h)
{
	if (h->map)
		munmap(h->map, h->mapped);
	h->map = NULL;
}

/* ---- read loops ---- */

/* One cache line; the compiler makes plain vector loads of it. */
typedef uint64_t line __attribute__((vector_size(LINE)));

static uint64_t fold(line v)
{
	uint64_t sum = 0;

	for (int i = 0; i < LINE / 8; i++)
		sum += v[i];
	return sum;
}

/* `streams` equal runs side by side; ahead: lines of prefetch, 0: none. Inlined with constants. */
static inline __attribute__((always_inline)) uint64_t
read_lines(const line *p, size_t lines, size_t streams, size_t ahead, int locality)
{
	size_t run = lines / streams;
	line a = { 0 }, b = { 0 };

	for (size_t i = 0; i + 2 <= run; i += 2)
		for (size_t s = 0; s < streams; s++) {
			const line *at = p + s * run + i;

			if (ahead && locality == 0) {
				__builtin_prefetch(at + ahead, 0, 0);
				__builtin_prefetch(at + ahead + 1, 0, 0);
			} else if (ahead) {
				__builtin_prefetch(at + ahead, 0, 2);
				__builtin_prefetch(at + ahead + 1, 0, 2);
			}
			a ^= at[0];
			b ^= at[1];
		}
	return fold(a ^ b);
}

static uint64_t read_plain(const line *p, size_t n)
{
	return read_lines(p, n, 1, 0, 0);
}

static uint64_t read_four(const line *p, size_t n)
{
	return read_lines(p, n, 4, 0, 0);
}

static uint64_t read_ahead(const line *p, size_t n)
{
	return read_lines(p, n, 1, 128, 2); /* 8 KiB ahead into L2 */
}

static uint64_t read_ahead_far(const line *p, size_t n)
{
	return read_lines(p, n, 2, 512, 2);
}

static uint64_t read_ahead_once(const line *p, size_t n)
{
	return read_lines(p, n, 1, 64, 0); /* 4 KiB ahead, past the outer caches */
}

typedef uint64_t (*read_loop)(const line *p, size_t lines);
static const read_loop loops[] = { read_plain, read_four, read_ahead, read_ahead_far,
				   read_ahead_once };

/* ---- threads ---- */

struct team {
	pthread_mutex_t gate; /* held until all threads are there */
	pthread_barrier_t start;
	cpu_set_t cpus;
	size_t bytes; /* of each thread */
	int threads;
	double deadline;
	bool called_off, failed, over;
};

struct reader {
	struct team *team;
	pthread_t thread;
	int index;
	struct moe_huge buffer; /* touched by the thread that reads it */
	uint64_t sum;		/* so that nothing is optimised away */
	int repeats;
	double from[MOE_COUNT(loops)][MAX_REPEATS], to[MOE_COUNT(loops)][MAX_REPEATS];
	double cpu[MOE_COUNT(loops)][MAX_REPEATS];
};

static void read_once(struct reader *r, size_t l)
{
	double cpu;

	pthread_barrier_wait(&r->team->start);
	cpu = moe_thread_seconds();
	r->from[l][r->repeats] = moe_now();
	r->sum += loops[l]((const line *)r->buffer.data, r->team->bytes / LINE);
	r->to[l][r->repeats] = moe_now();
	r->cpu[l][r->repeats] = moe_thread_seconds() - cpu;
}

static void *reader_main(void *arg)
{
	struct reader *r = arg;
	struct team *t = r->team;

	pthread_mutex_lock(&t->gate);
	pthread_mutex_unlock(&t->gate);
	if (t->called_off)
		return NULL;
	pin_to(&t->cpus, t->threads - 1 - r->index);
	if (!moe_huge_map(&r->buffer, t->bytes, 1 + r->index))
		__atomic_store_n(&t->failed, true, __ATOMIC_RELAXED);
	for (; r->repeats < MAX_REPEATS; r->repeats++) {
		pthread_barrier_wait(&t->start);
		if (r->index == 0 && r->repeats >= LEAST_REPEATS && moe_now() > t->deadline)
			t->over = true;
		pthread_barrier_wait(&t->start);
		if (t->over || __atomic_load_n(&t->failed, __ATOMIC_RELAXED))
			break;
		for (size_t l = 0; l < MOE_COUNT(loops); l++) /* in turn: drift hits all alike */
			read_once(r, l);
	}
	moe_huge_unmap(&r->buffer);
	return NULL;
}

/* Seconds that a repeat took the team; alone, without other processes' time slices. */
static double repeat_seconds(const struct team *t, const struct reader *r, size_t l, int i,
			     bool *disturbed)
{
	double from = r[0].from[l][i], to = r[0].to[l][i];

	*disturbed = false;
	if (t->threads == 1)
		return r[0].cpu[l][i];
	for (int n = 0; n < t->threads; n++) {
		from = MOE_MIN(from, r[n].from[l][i]);
		to = MOE_MAX(to, r[n].to[l][i]);
	}
	for (int n = 0; n < t->threads; n++)
		*disturbed |= r[n].cpu[l][i] < 0.9 * (to - from);
	return to - from;
}

/* GB/s of all threads together in the best loop; of undisturbed repeats, where there are some. */
static double best_loop(const struct team *t, const struct reader *r)
{
	double best = 0;

	for (size_t l = 0; l < MOE_COUNT(loops); l++) {
		double all[MAX_REPEATS], clean[MAX_REPEATS], rate;
		int n_all = r[0].repeats, n_clean = 0;

		for (int i = 0; i < n_all; i++) {
			bool disturbed;
			double seconds = repeat_seconds(t, r, l, i, &disturbed);

			all[i] = (double)t->bytes * t->threads / seconds * 1e-9;
			if (!disturbed)
				clean[n_clean++] = all[i];
		}
		rate = n_clean > 2 ? moe_quartile(clean, n_clean, 3) : moe_quartile(all, n_all, 3);
		best = MOE_MAX(best, rate);
	}
	return best;
}

/* At least 256 MB and four times the last level's caches, where memory allows. */
static size_t bytes_each(int threads)
{
	long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE), pages = sysconf(_SC_AVPHYS_PAGES);
	size_t total = MOE_MAX(LEAST_TOTAL, 4 * (size_t)MOE_MAX(l3, 0L));
	size_t each = MOE_MAX(total / (size_t)threads, LEAST_EACH);
	size_t free_each =
		(size_t)MOE_MAX(pages, 0L) * (size_t)sysconf(_SC_PAGESIZE) / 2 / (size_t)threads;

	each = MOE_MIN(each, MOE_MAX(free_each, HUGE_PAGE));
	return each & ~(HUGE_PAGE - 1);
}

static enum moe_status run_team(struct team *t, struct reader *r)
{
	int started = 0;

	pthread_mutex_init(&t->gate, NULL);
	pthread_mutex_lock(&t->gate);
	for (; started < t->threads; started++) {
		r[started].team = t;
		r[started].index = started;
		if (pthread_create(&r[started].thread, NULL, reader_main, &r[started]))
			break;
	}
	t->called_off = started < t->threads;
	pthread_mutex_unlock(&t->gate);
	for (int i = 0; i < started; i++)
		pthread_join(r[i].thread, NULL);
	pthread_mutex_destroy(&t->gate);
	if (t->called_off)
		return moe_fail(MOE_ERR_RUNTIME, "cannot start %d threads", t->threads);
	if (t->failed)
		return moe_fail(MOE_ERR_NOMEM, "no memory for %d buffers of %zu MiB", t->threads,
				t->bytes >> 20);
	return MOE_OK;
}

enum moe_status moe_roof_read(int threads, double seconds, double *gbps)
{
	struct team t = { .failed = false };
	struct reader *r;
	enum moe_status st;

	if (sched_getaffinity(0, sizeof t.cpus, &t.cpus))
		CPU_ZERO(&t.cpus);
	t.threads = threads > 0 ? threads : MOE_MAX(CPU_COUNT(&t.cpus), 1);
	t.bytes = bytes_each(t.threads);
	t.deadline = moe_now() + seconds;
	r = moe_calloc((size_t)t.threads, sizeof *r);
	if (!r)
		return moe_fail(MOE_ERR_NOMEM, "no memory for %d threads", t.threads);
	pthread_barrier_init(&t.start, NULL, (unsigned)t.threads);
	st = run_team(&t, r);
	if (st == MOE_OK)
		*gbps = best_loop(&t, r);
	pthread_barrier_destroy(&t.start);
	moe_free(r);
	return st;
}

/* ---- copy, clock ---- */

enum moe_status moe_roof_copy(double seconds, double *gbps)
{
	struct moe_huge buffer;
	size_t half = bytes_each(1) / 2;
	double rate[MAX_REPEATS], end = moe_now() + seconds;
	struct moe_pin pin;
	int n = 0;

	moe_pin_thread(&pin);
	if (!moe_huge_map(&buffer, 2 * half, 1)) {
		moe_unpin_thread(&pin);
		return moe_fail(MOE_ERR_NOMEM, "no memory for %zu MiB", half >> 19);
	}
	while (n < LEAST_REPEATS || (n < MAX_REPEATS && moe_now() < end)) {
		char *data = buffer.data;
		double start = moe_thread_seconds();

		memcpy(data + (n % 2 ? 0 : half), data + (n % 2 ? half : 0), half);
		__asm__ volatile("" ::"r"(data) : "memory");
		rate[n++] = (double)half / (moe_thread_seconds() - start) * 1e-9;
	}
	moe_huge_unmap(&buffer);
	moe_unpin_thread(&pin);
	*gbps = moe_median(rate, n);
	return MOE_OK;
}

double moe_roof_clock_ghz(double seconds)
{
	double rate[MAX_REPEATS], end;
	struct moe_pin pin;
	int n = 0, steps = 1 << 20;

	moe_pin_thread(&pin);
	end = moe_now() + seconds;
	while (n < LEAST_REPEATS || (n < MAX_REPEATS && moe_now() < end)) {
		double start = moe_thread_seconds();
		uint64_t x = 1;

		/* each addition needs the one before; the barrier keeps them apart */
		for (int i = 0; i < steps; i += 8)
			for (int j = 0; j < 8; j++) {
				x += (uint64_t)n;
				__asm__ volatile("" : "+r"(x));
			}
		rate[n++] = steps / (moe_thread_seconds() - start) * 1e-9;
	}
	moe_unpin_thread(&pin);
	return moe_median(rate, n);
}
