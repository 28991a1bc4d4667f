/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/ring.h"

#define SKIP ((uint64_t)1 << 63) /* the length word of what fills the end up */
#define LEAST 4096

enum moe_status moe_ring_create(struct moe_ring *r, size_t size)
{
	memset(r, 0, sizeof *r);
	r->size = LEAST;
	while (r->size < size)
		r->size *= 2;
	r->data = moe_alloc(r->size / 8, 8);
	return r->data ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "no memory for a trace's buffers");
}

void moe_ring_destroy(struct moe_ring *r)
{
	moe_free(r->data);
	r->data = NULL;
}

static uint64_t *word_at(const struct moe_ring *r, size_t position)
{
	return r->data + (position & (r->size - 1)) / 8;
}

/* A record is a word with its length, itself included, then its bytes, never across the end. */
void *moe_ring_reserve(struct moe_ring *r, size_t bytes)
{
	size_t need = 8 + ((bytes + 7) & ~(size_t)7), skip = 0;
	size_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
	size_t to_end = r->size - (head & (r->size - 1));

	if (need > to_end)
		skip = to_end;
	if (head + skip + need - r->seen_tail > r->size)
		r->seen_tail = atomic_load_explicit(&r->tail, memory_order_acquire);
	if (need > r->size || head + skip + need - r->seen_tail > r->size) {
		long long lost = atomic_load_explicit(&r->lost, memory_order_relaxed);

		atomic_store_explicit(&r->lost, lost + 1, memory_order_relaxed);
		return NULL;
	}
	if (skip)
		*word_at(r, head) = SKIP | skip;
	*word_at(r, head + skip) = need;
	r->reserved = skip + need;
	return word_at(r, head + skip) + 1;
}

void moe_ring_commit(struct moe_ring *r)
{
	size_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
	long long n = atomic_load_explicit(&r->committed, memory_order_relaxed);

	atomic_store_explicit(&r->committed, n + 1, memory_order_relaxed);
	atomic_store_explicit(&r->head, head + r->reserved, memory_order_release);
}

const void *moe_ring_peek(struct moe_ring *r)
{
	size_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
	size_t head = atomic_load_explicit(&r->head, memory_order_acquire);

	if (head == tail)
		return NULL;
	if (*word_at(r, tail) & SKIP) { /* never the last: a record follows it */
		tail += *word_at(r, tail) & ~SKIP;
		atomic_store_explicit(&r->tail, tail, memory_order_release);
	}
	return word_at(r, tail) + 1;
}

void moe_ring_release(struct moe_ring *r)
{
	size_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);

	atomic_store_explicit(&r->tail, tail + *word_at(r, tail), memory_order_release);
}
