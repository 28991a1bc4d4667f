/* SPDX-License-Identifier: Apache-2.0 */
#include "model/sum.h"

#define FACTOR 0x9e3779b97f4a7c15ull /* odd: no two lanes become one */

void moe_sum_begin(struct moe_sum *s)
{
	*s = (struct moe_sum){ .bytes = 0 };
	for (int i = 0; i < MOE_SUM_LANES; i++)
		s->lane[i] = moe_mix((uint64_t)i + 1);
}

/* Both steps can be undone, so one other word is another lane; the turn brings high bits down. */
static uint64_t step(uint64_t lane, const unsigned char *word)
{
	uint64_t v;

	memcpy(&v, word, sizeof v);
	lane = (lane ^ v) * FACTOR;
	return lane << 29 | lane >> 35;
}

/* Whole blocks of all lanes; what is left is not looked at. */
static size_t blocks(struct moe_sum *s, const unsigned char *data, size_t bytes)
{
	uint64_t a = s->lane[0], b = s->lane[1], c = s->lane[2], d = s->lane[3];
	size_t at = 0;

	for (; at + sizeof s->rest <= bytes; at += sizeof s->rest) {
		a = step(a, data + at);
		b = step(b, data + at + 8);
		c = step(c, data + at + 16);
		d = step(d, data + at + 24);
	}
	s->lane[0] = a, s->lane[1] = b, s->lane[2] = c, s->lane[3] = d;
	return at;
}

void moe_sum_add(struct moe_sum *s, const void *data, size_t bytes)
{
	const unsigned char *from = data;
	size_t held = s->bytes % sizeof s->rest,
	       fill = held ? MOE_MIN(bytes, sizeof s->rest - held) : 0, done;

	s->bytes += bytes;
	if (fill) {
		memcpy(s->rest + held, from, fill);
		from += fill;
		bytes -= fill;
		if (held + fill < sizeof s->rest)
			return;
		blocks(s, s->rest, sizeof s->rest);
	}
	done = blocks(s, from, bytes);
	if (bytes > done)
		memcpy(s->rest, from + done, bytes - done);
}

uint64_t moe_sum_end(struct moe_sum *s)
{
	size_t held = s->bytes % sizeof s->rest;
	uint64_t sum = moe_mix(s->bytes);

	if (held) {
		memset(s->rest + held, 0, sizeof s->rest - held);
		blocks(s, s->rest, sizeof s->rest);
	}
	for (int i = 0; i < MOE_SUM_LANES; i++)
		sum = moe_mix(sum ^ s->lane[i]);
	return sum;
}
