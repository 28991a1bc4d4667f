/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/trace_table.h"

#include <stdlib.h>
#include <string.h>

/* Columns that are packed as bytes; elsewhere the smallest encoding is chosen. */
static bool is_bytes(uint32_t type, int column)
{
	return (type == MOE_MXT_MEMORY && column == MOE_MXT_MEMORY_NAMES) ||
	       ((type == MOE_MXT_COUNTERS || type == MOE_MXT_END) &&
		column == MOE_MXT_COUNTER_NAMES);
}

static void reset_head(struct moe_mxt_head *h)
{
	int64_t *ranges[] = { h->time, h->id, h->step, h->layer };

	h->rows = h->length = h->crc = 0;
	for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
		ranges[i][0] = INT64_MAX;
		ranges[i][1] = INT64_MIN;
	}
}

void moe_mxt_table_init(struct moe_mxt_table *t, enum moe_mxt_chunk type)
{
	memset(t, 0, sizeof *t);
	t->head.type = (uint32_t)type;
	reset_head(&t->head);
}

void moe_mxt_table_clear(struct moe_mxt_table *t)
{
	for (int c = 0; c < MOE_MXT_MAX_COLUMNS; c++)
		t->column[c].n = 0;
	t->failed = false;
	reset_head(&t->head);
}

void moe_mxt_table_free(struct moe_mxt_table *t)
{
	for (int c = 0; c < MOE_MXT_MAX_COLUMNS; c++)
		free(t->column[c].value);
	memset(t->column, 0, sizeof t->column);
}

static bool reserve(struct moe_mxt_column *c, size_t n)
{
	size_t cap = c->cap ? c->cap : 64;
	int64_t *grown;

	if (n <= c->cap)
		return true;
	while (cap < n)
		cap *= 2;
	grown = realloc(c->value, cap * sizeof *grown);
	if (!grown)
		return false;
	c->value = grown;
	c->cap = cap;
	return true;
}

void moe_mxt_add(struct moe_mxt_table *t, int column, int64_t value)
{
	struct moe_mxt_column *c = &t->column[column];

	if (c->n == c->cap && !reserve(c, c->n + 1)) {
		t->failed = true;
		return;
	}
	c->value[c->n++] = value;
}

void moe_mxt_add_text(struct moe_mxt_table *t, int column, const char *text)
{
	do
		moe_mxt_add(t, column, (uint8_t)*text);
	while (*text++);
}

static void widen(int64_t range[2], int64_t first, int64_t last)
{
	if (first < range[0])
		range[0] = first;
	if (last > range[1])
		range[1] = last;
}

void moe_mxt_row(struct moe_mxt_table *t, int64_t first, int64_t last, int64_t id, int64_t step,
		 int64_t layer)
{
	struct moe_mxt_head *h = &t->head;

	h->rows++;
	widen(h->time, first, last);
	if (id != MOE_MXT_NA)
		widen(h->id, id, id);
	if (step != MOE_MXT_NA)
		widen(h->step, step, step);
	if (layer >= 0)
		widen(h->layer, layer, layer);
}

/* ---- packing ---- */

static size_t varint_bytes(uint64_t v)
{
	size_t n = 1;

	for (; v > 127; v >>= 7)
		n++;
	return n;
}

static int64_t difference(int64_t a, int64_t b)
{
	return (int64_t)((uint64_t)a - (uint64_t)b);
}

static enum moe_mxt_encoding choose(const struct moe_mxt_column *c, bool bytes)
{
	size_t plain = 0, delta = 0;
	bool same = true;

	if (bytes)
		return MOE_MXT_BYTES;
	for (size_t i = 0; i < c->n; i++) {
		plain += varint_bytes(moe_mxt_zigzag(c->value[i]));
		delta += varint_bytes(
			moe_mxt_zigzag(difference(c->value[i], i ? c->value[i - 1] : 0)));
		same = same && c->value[i] == c->value[0];
	}
	if (same)
		return MOE_MXT_CONSTANT;
	return delta < plain ? MOE_MXT_DELTA : MOE_MXT_PLAIN;
}

static size_t pack_values(uint8_t *out, const struct moe_mxt_column *c,
			  enum moe_mxt_encoding encoding)
{
	size_t at = 0;

	if (encoding == MOE_MXT_CONSTANT)
		return moe_mxt_put(out, moe_mxt_zigzag(c->value[0]));
	for (size_t i = 0; i < c->n; i++)
		if (encoding == MOE_MXT_BYTES)
			out[at++] = (uint8_t)c->value[i];
		else if (encoding == MOE_MXT_DELTA)
			at += moe_mxt_put(out + at, moe_mxt_zigzag(difference(
							    c->value[i], i ? c->value[i - 1] : 0)));
		else
			at += moe_mxt_put(out + at, moe_mxt_zigzag(c->value[i]));
	return at;
}

static size_t pack_column(uint8_t *out, uint8_t *spare, uint32_t type, int id,
			  const struct moe_mxt_column *c)
{
	enum moe_mxt_encoding encoding = choose(c, is_bytes(type, id));
	size_t bytes = pack_values(spare, c, encoding), at = moe_mxt_put(out, (uint64_t)id);

	out[at++] = (uint8_t)encoding;
	at += moe_mxt_put(out + at, c->n);
	at += moe_mxt_put(out + at, bytes);
	memcpy(out + at, spare, bytes);
	return at + bytes;
}

uint8_t *moe_mxt_pack(struct moe_mxt_table *t, size_t *bytes)
{
	size_t most = 0, longest = 0, at = 0;
	uint8_t *out;

	for (int c = 1; c < MOE_MXT_MAX_COLUMNS; c++) {
		size_t n = t->column[c].n * MOE_MXT_VARINT_BYTES;

		most += n ? n + 3 * MOE_MXT_VARINT_BYTES + 1 : 0;
		longest = n > longest ? n : longest;
	}
	out = t->failed ? NULL : malloc(most + longest + 1);
	if (!out)
		return NULL;
	for (int c = 1; c < MOE_MXT_MAX_COLUMNS; c++)
		if (t->column[c].n)
			at += pack_column(out + at, out + most, t->head.type, c, &t->column[c]);
	t->head.length = (uint32_t)at;
	t->head.crc = moe_mxt_crc(0, out, at);
	*bytes = at;
	return out;
}

/* ---- unpacking ---- */

static const char *unpack_values(struct moe_mxt_column *c, const uint8_t *in, size_t bytes,
				 enum moe_mxt_encoding encoding)
{
	uint64_t v = 0, last = 0;
	size_t at = 0;

	for (size_t i = 0; i < c->n; i++) {
		if (encoding == MOE_MXT_BYTES) {
			c->value[i] = in[at++];
			continue;
		}
		if (encoding != MOE_MXT_CONSTANT || !i) {
			size_t n = moe_mxt_get(in + at, bytes - at, &v);

			if (!n)
				return "a value is cut off";
			at += n;
			v = (uint64_t)moe_mxt_unzigzag(v);
		}
		last = encoding == MOE_MXT_DELTA ? last + v : v;
		c->value[i] = (int64_t)last;
	}
	return at == bytes ? NULL : "a column is longer than its values";
}

/* How many values may be in that many bytes: keeps a lie from asking for memory. */
static bool count_fits(uint64_t n, uint64_t bytes, unsigned encoding)
{
	if (!n)
		return false;
	if (encoding == MOE_MXT_CONSTANT)
		return n <= MOE_MXT_MAX_ROWS;
	return encoding == MOE_MXT_BYTES ? n == bytes : n <= bytes;
}

const char *moe_mxt_unpack(struct moe_mxt_table *t, const uint8_t *payload, size_t bytes)
{
	size_t at = 0;

	for (int c = 0; c < MOE_MXT_MAX_COLUMNS; c++)
		t->column[c].n = 0;
	while (at < bytes) {
		struct moe_mxt_column skipped = { 0 }, *c;
		uint64_t word[3]; /* id, count, bytes */
		unsigned encoding = 0;
		const char *wrong;

		for (int i = 0; i < 3; i++) {
			size_t n = moe_mxt_get(payload + at, bytes - at, &word[i]);

			if (!n || at + n == bytes)
				return "a column's head is cut off";
			at += n;
			if (i == 0)
				encoding = payload[at++];
		}
		if (word[2] > bytes - at)
			return "a column is cut off";
		if (encoding < MOE_MXT_CONSTANT || encoding > MOE_MXT_BYTES)
			return "a column has an unknown encoding";
		if (!count_fits(word[1], word[2], encoding))
			return "a column claims impossibly many values";
		c = word[0] && word[0] < MOE_MXT_MAX_COLUMNS ? &t->column[word[0]] : &skipped;
		if (c->n)
			return "a column is there twice";
		if (c != &skipped) {
			if (!reserve(c, word[1]))
				return "no memory for a chunk";
			c->n = word[1];
			wrong = unpack_values(c, payload + at, word[2], encoding);
			if (wrong)
				return wrong;
		}
		at += word[2];
	}
	return NULL;
}
