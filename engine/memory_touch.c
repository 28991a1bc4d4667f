/* SPDX-License-Identifier: Apache-2.0 */
/* First touch of memory ahead of the work that would otherwise pay for it, by the threads of its
 * node. */
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

static size_t list(struct moe_engine *e, const char *purpose, struct piece *out, size_t room)
{
	size_t n = 0;

	for (struct moe_block_header *b = e->memory; b; b = b->next)
		for (size_t at = 0; b->mapped && !strcmp(b->purpose, purpose) && at < b->bytes;
		     at += PIECE) {
			if (n < room)
				out[n] = (struct piece){ (char *)b->data + at,
							 MOE_MIN(PIECE, b->bytes - at), b->part };
			n++;
		}
	return n;
}

size_t moe_memory_touch(struct moe_engine *e, const char *purpose)
{
	struct touching t = { .parts = moe_engine_parts(e) };
	size_t bytes = 0;

	if (e->dry)
		return 0;
	pthread_mutex_lock(&e->memory_lock);
	t.n = list(e, purpose, NULL, 0);
	t.piece = moe_calloc(MOE_MAX(t.n, (size_t)1), sizeof *t.piece);
	if (t.piece)
		list(e, purpose, t.piece, t.n);
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
