/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/trace_format.h"

#include <string.h>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

static const char *const chunk_names[MOE_MXT_CHUNK_TYPES] = {
	[MOE_MXT_HEADER] = "header",   [MOE_MXT_TASKS] = "tasks",   [MOE_MXT_DEPS] = "deps",
	[MOE_MXT_ROUTING] = "routing", [MOE_MXT_MEMORY] = "memory", [MOE_MXT_COUNTERS] = "counters",
	[MOE_MXT_MARKS] = "marks",     [MOE_MXT_HOST] = "host",	    [MOE_MXT_END] = "end",
};
static const char *const phase_names[MOE_MXT_PHASES] = { "other", "forward", "backward", "update" };
static const char *const mark_names[MOE_MXT_STEP_MARKS] = { "begin", "submitted", "end" };
static const char *const host_names[MOE_MXT_HOST_KINDS] = { "submit", "wait", "sleep", "hold" };

static const char *name_of(const char *const *names, int n, int i)
{
	return i >= 0 && i < n ? names[i] : NULL;
}

const char *moe_mxt_chunk_name(int type)
{
	return name_of(chunk_names, MOE_MXT_CHUNK_TYPES, type);
}

const char *moe_mxt_phase_name(int phase)
{
	return name_of(phase_names, MOE_MXT_PHASES, phase);
}

const char *moe_mxt_mark_name(int mark)
{
	return name_of(mark_names, MOE_MXT_STEP_MARKS, mark);
}

const char *moe_mxt_host_name(int host)
{
	return name_of(host_names, MOE_MXT_HOST_KINDS, host);
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t crc_fast(uint32_t crc, const uint8_t *p,
							   size_t bytes)
{
	uint64_t state = crc, word;

	for (; bytes >= 8; bytes -= 8, p += 8) {
		memcpy(&word, p, 8);
		state = _mm_crc32_u64(state, word);
	}
	for (; bytes; bytes--)
		state = _mm_crc32_u8((uint32_t)state, *p++);
	return (uint32_t)state;
}
#endif

/* Four bits at a time: the table is small enough to need no setting up and no lock. */
static uint32_t crc_slow(uint32_t crc, const uint8_t *p, size_t bytes)
{
	static const uint32_t table[16] = {
		0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3,
		0x61c69362, 0x7198540d, 0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9,
		0xc38d26c4, 0xd3d3e1ab, 0xe330a81a, 0xf36e6f75,
	};

	for (size_t i = 0; i < bytes; i++) {
		crc ^= p[i];
		crc = crc >> 4 ^ table[crc & 15];
		crc = crc >> 4 ^ table[crc & 15];
	}
	return crc;
}

uint32_t moe_mxt_crc(uint32_t crc, const void *data, size_t bytes)
{
#if defined(__x86_64__)
	if (__builtin_cpu_supports("sse4.2"))
		return ~crc_fast(~crc, data, bytes);
#endif
	return ~crc_slow(~crc, data, bytes);
}

static uint8_t *put32(uint8_t *p, uint32_t v)
{
	for (int i = 0; i < 4; i++)
		*p++ = (uint8_t)(v >> 8 * i);
	return p;
}

static uint8_t *put_range(uint8_t *p, const int64_t range[2])
{
	for (int i = 0; i < 2; i++) {
		p = put32(p, (uint32_t)range[i]);
		p = put32(p, (uint32_t)((uint64_t)range[i] >> 32));
	}
	return p;
}

static uint32_t get32(const uint8_t **p)
{
	uint32_t v = 0;

	for (int i = 0; i < 4; i++)
		v |= (uint32_t) * (*p)++ << 8 * i;
	return v;
}

static void get_range(const uint8_t **p, int64_t range[2])
{
	for (int i = 0; i < 2; i++) {
		uint64_t low = get32(p);

		range[i] = (int64_t)(low | (uint64_t)get32(p) << 32);
	}
}

void moe_mxt_head_encode(const struct moe_mxt_head *h, uint8_t out[MOE_MXT_HEAD_BYTES])
{
	uint8_t *p = put32(out, MOE_MXT_CHUNK_MARK);

	p = put32(p, h->type);
	p = put32(p, h->rows);
	p = put32(p, h->length);
	p = put32(p, h->crc);
	p = put_range(p, h->time);
	p = put_range(p, h->id);
	p = put_range(p, h->step);
	p = put_range(p, h->layer);
	put32(p, moe_mxt_crc(0, out, (size_t)(p - out)));
}

bool moe_mxt_head_decode(const uint8_t in[MOE_MXT_HEAD_BYTES], struct moe_mxt_head *h)
{
	const uint8_t *p = in;

	if (get32(&p) != MOE_MXT_CHUNK_MARK)
		return false;
	h->type = get32(&p);
	h->rows = get32(&p);
	h->length = get32(&p);
	h->crc = get32(&p);
	get_range(&p, h->time);
	get_range(&p, h->id);
	get_range(&p, h->step);
	get_range(&p, h->layer);
	return moe_mxt_crc(0, in, (size_t)(p - in)) == get32(&p) &&
	       h->length <= MOE_MXT_MAX_PAYLOAD && h->rows <= MOE_MXT_MAX_ROWS;
}

size_t moe_mxt_put(uint8_t *out, uint64_t v)
{
	size_t n = 0;

	for (; v > 127; v >>= 7)
		out[n++] = (uint8_t)(v | 128);
	out[n++] = (uint8_t)v;
	return n;
}

size_t moe_mxt_get(const uint8_t *in, size_t available, uint64_t *v)
{
	uint64_t value = 0;

	for (size_t i = 0; i < available && i < MOE_MXT_VARINT_BYTES; i++) {
		if (i == 9 && in[i] > 1)
			return 0;
		value |= (uint64_t)(in[i] & 127) << 7 * i;
		if (!(in[i] & 128)) {
			*v = value;
			return i + 1;
		}
	}
	return 0;
}
