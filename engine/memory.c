/* SPDX-License-Identifier: Apache-2.0 */
/* Memory with a home: the one place that asks for NUMA nodes. */
#include "engine/available.h"
#include "engine/internal.h"
#include "engine/size.h"

#include <errno.h>
#include <numa.h>
#include <numaif.h>
#include <search.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)
#define SMALL_LIMIT (HUGE_PAGE / 2) /* below it a heap block wastes less than a mapping */

/* Binds a fresh mapping to a node. Failure is not an error: the pages are then simply elsewhere. */
static void bind_node(struct moe_engine *e, void *p, size_t bytes, int node)
{
	hwloc_obj_t obj;
	struct bitmask *mask;

	if (node < 0 || e->topology.fake || e->topology.nodes < 2 || numa_available() < 0)
		return;
	obj = hwloc_get_obj_by_type(e->topology.hwloc, HWLOC_OBJ_NUMANODE, (unsigned)node);
	mask = obj ? numa_allocate_nodemask() : NULL;
	if (!mask)
		return;
	numa_bitmask_setbit(mask, obj->os_index);
	if (mbind(p, bytes, MPOL_PREFERRED, mask->maskp, mask->size + 1, 0))
		moe_log(MOE_LOG_WARNING, "cannot place %zu bytes on NUMA node %d: %s", bytes, node,
			strerror(errno));
	numa_free_nodemask(mask);
}

static bool map_pages(struct moe_engine *e, struct moe_block_header *b)
{
	int access = e->dry ? PROT_NONE : PROT_READ | PROT_WRITE;
	size_t rounded = (b->bytes + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1), whole;
	char *p;

	b->mapped = rounded + HUGE_PAGE; /* room to align */
	p = mmap(NULL, b->mapped, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return false;
	b->base = p;
	b->data = (void *)(((uintptr_t)p + HUGE_PAGE - 1) & ~(uintptr_t)(HUGE_PAGE - 1));
	if (e->dry)
		return true;
	/* whole huge pages: of the last one, which is used in part, no more than that shall be resident */
	whole = b->bytes & ~(HUGE_PAGE - 1);
	if (whole)
		madvise(b->data, whole, MADV_HUGEPAGE);
	if (whole < rounded)
		madvise((char *)b->data + whole, rounded - whole, MADV_NOHUGEPAGE);
	bind_node(e, b->data, rounded, b->node);
	return true;
}

/* By address; a key within a block is equal to it, as blocks do not overlap. */
static int compare(const void *key, const void *block)
{
	const struct moe_block_header *k = key, *b = block;
	const char *at = k->data, *begin = b->data;

	return at < begin ? -1 : at >= begin + MOE_MAX(b->bytes, (size_t)1);
}

static struct moe_block_header *find(struct moe_engine *e, const void *p)
{
	const struct moe_block_header key = { .data = (void *)p };
	struct moe_block_header **found = tfind(&key, &e->memory_tree, compare);

	return found ? *found : NULL;
}

static void keep_node(void *block)
{
	(void)block; /* it is in the list */
}

static void release(struct moe_block_header *b)
{
	if (b->mapped)
		munmap(b->base, b->mapped);
	else
		moe_free(b->base);
	moe_free(b);
}

/* Into list and tree, whose nodes are small heap blocks; false: no memory. */
static bool enter(struct moe_engine *e, struct moe_block_header *b)
{
	bool entered;

	pthread_mutex_lock(&e->memory_lock);
	entered = tsearch(b, &e->memory_tree, compare) != NULL;
	if (entered) {
		b->next = e->memory;
		b->link = &e->memory;
		if (b->next)
			b->next->link = &b->next;
		e->memory = b;
		e->memory_total += b->bytes;
		atomic_fetch_add_explicit(&e->memory_changes, 1, memory_order_relaxed);
	}
	pthread_mutex_unlock(&e->memory_lock);
	return entered;
}

void *moe_memory_alloc(struct moe_engine *e, size_t bytes, int part, const char *purpose)
{
	struct moe_block_header *b = moe_calloc(1, sizeof *b);

	MOE_ASSERT(part < e->n_parts);
	if (!b)
		return NULL;
	b->bytes = bytes;
	b->part = part;
	b->node = part < 0 ? -1 : e->parts[part].node;
	b->purpose = purpose;
	if (bytes < SMALL_LIMIT && !e->dry) {
		b->base = moe_calloc(bytes + 64, 1);
		b->data = (void *)(((uintptr_t)b->base + 63) & ~(uintptr_t)63);
	} else {
		void *probe = moe_alloc(1, 1); /* lets fault injection reach mappings too */

		if (!probe || !map_pages(e, b))
			b->base = NULL;
		moe_free(probe);
	}
	if (!b->base) {
		moe_free(b);
		return NULL;
	}
	if (!enter(e, b)) {
		release(b);
		return NULL;
	}
	return b->data;
}

void *moe_memory_take(struct moe_engine *e, size_t bytes, int part, const char *purpose, enum moe_status *st)
{
	void *p;

	if (*st != MOE_OK)
		return NULL;
	p = moe_memory_alloc(e, bytes, part, purpose);
	if (!p)
		*st = moe_fail(MOE_ERR_NOMEM, "no memory for %zu bytes of %s", bytes, purpose);
	return p;
}

enum moe_status moe_memory_check(struct moe_engine *e, const char *what)
{
	size_t left = moe_memory_available(""), resident = moe_memory_resident(), total;

	pthread_mutex_lock(&e->memory_lock);
	total = e->memory_total;
	pthread_mutex_unlock(&e->memory_lock);
	if (e->dry || left == SIZE_MAX || total <= resident || total - resident <= left)
		return MOE_OK;
	return moe_fail(MOE_ERR_NOFIT, "%s: %s are needed, with what there is on this engine already; %s are available", what,
			moe_size((int64_t)total).text, moe_size((int64_t)(left + resident)).text);
}

void moe_memory_free(struct moe_engine *e, void *p)
{
	struct moe_block_header *b;

	if (!p)
		return;
	pthread_mutex_lock(&e->memory_lock);
	b = find(e, p);
	MOE_ASSERT(b && b->data == p);
	tdelete(b, &e->memory_tree, compare);
	*b->link = b->next;
	if (b->next)
		b->next->link = b->link;
	e->memory_total -= b->bytes;
	atomic_fetch_add_explicit(&e->memory_changes, 1, memory_order_relaxed);
	pthread_mutex_unlock(&e->memory_lock);
	release(b);
}

void moe_memory_free_all(struct moe_engine *e)
{
	struct moe_block_header *b = e->memory, *next;

	tdestroy(e->memory_tree, keep_node);
	e->memory_tree = NULL;
	for (; b; b = next) {
		next = b->next;
		release(b);
	}
	e->memory = NULL;
	e->memory_total = 0;
}

int moe_memory_node(struct moe_engine *e, const void *p)
{
	struct moe_block_header *b;
	int node;

	pthread_mutex_lock(&e->memory_lock);
	b = find(e, p);
	node = b ? b->node : -1;
	pthread_mutex_unlock(&e->memory_lock);
	return node;
}

size_t moe_memory_bytes(struct moe_engine *e, const char *purpose, int part)
{
	size_t total = 0;

	pthread_mutex_lock(&e->memory_lock);
	for (struct moe_block_header *b = e->memory; b; b = b->next)
		if ((!purpose || !strcmp(purpose, b->purpose)) && (part < 0 || part == b->part))
			total += b->bytes;
	pthread_mutex_unlock(&e->memory_lock);
	return total;
}

void moe_memory_visit(struct moe_engine *e,
		      void (*fn)(const char *purpose, int part, size_t bytes, void *user),
		      void *user)
{
	pthread_mutex_lock(&e->memory_lock);
	for (struct moe_block_header *b = e->memory; b; b = b->next)
		fn(b->purpose, b->part, b->bytes, user);
	pthread_mutex_unlock(&e->memory_lock);
}

size_t moe_memory_largest(struct moe_engine *e)
{
	size_t largest = 0;

	pthread_mutex_lock(&e->memory_lock);
	for (struct moe_block_header *b = e->memory; b; b = b->next)
		largest = MOE_MAX(largest, b->bytes);
	pthread_mutex_unlock(&e->memory_lock);
	return largest;
}
