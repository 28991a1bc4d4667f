/* SPDX-License-Identifier: Apache-2.0 */
/* First touch of memory ahead of the work that would otherwise pay for it, by the threads of its node. */
#include "engine/internal.h"

#include <stdatomic.h>
#include <unistd.h>

#define PIECE ((size_t)64 << 20)

struct piece {
	char *at;
	size_t bytes;
	int part;
};

struct touching {
	struct piece *piece;
	size_t n;
	int parts;
	atomic_size_t *next; /* [parts] */
};

/* Reading would map the zero page only: what is there is written back. */
static void touch(const struct piece *p, size_t page)
{
	for (size_t i = 0; i < p->bytes; i += page) {
		volatile char *c = p->at + i;

		*c = *c;
	}
}

/* The part's own pieces, then what is left of others. */
static void work(void *arg, int part)
{
	struct touching *t = arg;
	size_t page = (size_t)sysconf(_SC_PAGESIZE);

	for (int i = 0; i < t->parts; i++) {
		int of = (part + i) % t->parts;
		size_t at;

		while ((at = t->next[of]++) < t->n)
			if (MOE_MAX(t->piece[at].part, 0) % t->parts == of)
				touch(&t->piece[at], page);
	}
}

static void nothing(void *arg)
{
	(void)arg;
}

/* All allocations of a purpose; without one, those of data [n]. */
struct wanted {
	const char *purpose;
	const void *const *data;
	int n;
};

static bool is_wanted(const struct moe_block_header *b, const struct wanted *w)
{
	if (!b->mapped)
		return false;
	if (w->purpose)
		return !strcmp(b->purpose, w->purpose);
	for (int i = 0; i < w->n; i++)
		if (b->data == w->data[i])
			return true;
	return false;
}

static size_t list(struct moe_engine *e, const struct wanted *w, struct piece *out, size_t room)
{
	size_t n = 0;

	for (struct moe_block_header *b = e->memory; b; b = b->next)
		for (size_t at = 0; at < b->bytes && is_wanted(b, w); at += PIECE) {
			if (n < room)
				out[n] = (struct piece){ (char *)b->data + at,
							 MOE_MIN(PIECE, b->bytes - at), b->part };
			n++;
		}
	return n;
}

static size_t touch_wanted(struct moe_engine *e, const struct wanted *w)
{
	struct touching t = { .parts = moe_engine_parts(e) };
	size_t bytes = 0;

	if (e->dry)
		return 0;
	pthread_mutex_lock(&e->memory_lock);
	t.n = list(e, w, NULL, 0);
	t.piece = moe_calloc(MOE_MAX(t.n, (size_t)1), sizeof *t.piece);
	if (t.piece)
		list(e, w, t.piece, t.n);
	pthread_mutex_unlock(&e->memory_lock);
	t.next = moe_calloc((size_t)t.parts, sizeof *t.next);
	if (t.piece && t.next && t.n) /* without: the first task that writes there pays */
		moe_engine_parallel(e, work, nothing, &t);
	for (size_t i = 0; t.piece && i < t.n; i++)
		bytes += t.piece[i].bytes;
	moe_free(t.piece);
	moe_free(t.next);
	return bytes;
}

size_t moe_memory_touch(struct moe_engine *e, const char *purpose)
{
	return touch_wanted(e, &(struct wanted){ .purpose = purpose });
}

size_t moe_memory_touch_these(struct moe_engine *e, const void *const *data, int n)
{
	return touch_wanted(e, &(struct wanted){ .data = data, .n = n });
}
