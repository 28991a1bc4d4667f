/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Records of any size from one producer to one consumer, without a lock. A full ring loses what
 * does not fit and counts it. Pieces are multiples of 8 bytes.
 */
#ifndef MOE_ENGINE_RING_H
#define MOE_ENGINE_RING_H

#include "engine/base.h"

#include <stdatomic.h>

struct moe_ring {
	uint64_t *data; /* [size / 8]; size is a power of two */
	size_t size;
	char apart[64]; /* each side writes to cache lines of its own */
	/* the producer's: bytes ever committed, what it last saw of tail, records */
	atomic_size_t head;
	size_t seen_tail, reserved;
	atomic_llong committed, lost;
	char apart_too[64];
	atomic_size_t tail; /* the consumer's: bytes ever released */
	char apart_again[64];
};

/* Size is rounded up to a power of two of at least 4 KiB. */
enum moe_status moe_ring_create(struct moe_ring *r, size_t size);
void moe_ring_destroy(struct moe_ring *r);

/* Room for a record of that many bytes; NULL: full, and counted. */
void *moe_ring_reserve(struct moe_ring *r, size_t bytes);
void moe_ring_commit(struct moe_ring *r); /* of what was reserved last */

/* The oldest record, NULL: none. Valid until released. */
const void *moe_ring_peek(struct moe_ring *r);
void moe_ring_release(struct moe_ring *r);

#endif
