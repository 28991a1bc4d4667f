/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/trace_read.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SCAN_BYTES (1 << 16)

static bool fail(struct moe_mxt_reader *r, const char *what)
{
	snprintf(r->error, sizeof r->error, "%s", what);
	return false;
}

/* Whether all of it could be read; else errno says why. */
static bool read_at(const struct moe_mxt_reader *r, void *to, size_t bytes, int64_t at)
{
	char *p = to;

	while (bytes) {
		ssize_t n = pread(r->fd, p, bytes, at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return false;
		if (!n) { /* cut since its size was asked for */
			errno = ENODATA;
			return false;
		}
		p += n;
		at += n;
		bytes -= (size_t)n;
	}
	return true;
}

static bool read_head(const struct moe_mxt_reader *r, int64_t at, struct moe_mxt_head *h)
{
	uint8_t raw[MOE_MXT_HEAD_BYTES];

	return r->bytes - at >= MOE_MXT_HEAD_BYTES && read_at(r, raw, sizeof raw, at) &&
	       moe_mxt_head_decode(raw, h) && h->length <= r->bytes - at - MOE_MXT_HEAD_BYTES;
}

/* The next good head from `at` on; the file's end where there is none. */
static int64_t scan(const struct moe_mxt_reader *r, int64_t at, struct moe_mxt_head *h)
{
	static const uint8_t mark[4] = { 'M', 'X', 'T', 'C' };
	uint8_t buf[SCAN_BYTES];

	while (r->bytes - at >= MOE_MXT_HEAD_BYTES) {
		int64_t left = r->bytes - at;
		size_t n = left < SCAN_BYTES ? (size_t)left : SCAN_BYTES;

		if (!read_at(r, buf, n, at))
			break;
		for (const uint8_t *p = buf; (p = memchr(p, mark[0], n - (size_t)(p - buf))); p++)
			if ((size_t)(p - buf) + 4 <= n && !memcmp(p, mark, 4) &&
			    read_head(r, at + (p - buf), h))
				return at + (p - buf);
		at += (int64_t)n - 3; /* a mark may lie across the border */
	}
	return r->bytes;
}

static bool keep(struct moe_mxt_reader *r, const struct moe_mxt_head *h, int64_t at)
{
	if (r->n == r->cap) {
		size_t cap = r->cap ? 2 * r->cap : 64;
		struct moe_mxt_place *grown = realloc(r->chunk, cap * sizeof *grown);

		if (!grown)
			return fail(r, "no memory for the list of chunks");
		r->chunk = grown;
		r->cap = cap;
	}
	r->chunk[r->n++] = (struct moe_mxt_place){ *h, at };
	return true;
}

static bool keep_header(struct moe_mxt_reader *r, const struct moe_mxt_head *h, int64_t at)
{
	char *text = malloc((size_t)h->length + 1);

	if (!text)
		return fail(r, "no memory for the header");
	if (!read_at(r, text, h->length, at) || moe_mxt_crc(0, text, h->length) != h->crc ||
	    memchr(text, 0, h->length)) {
		free(text);
		r->lost_bytes += h->length;
		return true;
	}
	text[h->length] = 0;
	free(r->header);
	r->header = text;
	return true;
}

static bool read_heads(struct moe_mxt_reader *r)
{
	int64_t at = MOE_MXT_FILE_BYTES;

	while (at < r->bytes) {
		struct moe_mxt_head h;
		int64_t found = read_head(r, at, &h) ? at : scan(r, at, &h), payload;

		r->lost_bytes += found - at;
		if (found == r->bytes)
			break;
		payload = found + MOE_MXT_HEAD_BYTES;
		if (h.type == MOE_MXT_HEADER ? !keep_header(r, &h, payload) : !keep(r, &h, payload))
			return false;
		r->ended = h.type == MOE_MXT_END;
		at = payload + h.length;
	}
	return true;
}

static bool start(struct moe_mxt_reader *r)
{
	uint8_t first[MOE_MXT_FILE_BYTES];
	struct stat st;

	if (r->fd < 0 || fstat(r->fd, &st))
		return fail(r, strerror(errno));
	if (!S_ISREG(st.st_mode))
		return fail(r, "not a regular file");
	r->bytes = st.st_size;
	if (r->bytes >= MOE_MXT_FILE_BYTES && !read_at(r, first, sizeof first, 0))
		return fail(r, strerror(errno));
	if (r->bytes < MOE_MXT_FILE_BYTES || memcmp(first, MOE_MXT_MARK, 8))
		return fail(r, "not a trace of moesaic (.mxt)");
	if (first[8] != MOE_MXT_VERSION || first[9] || first[10] || first[11]) {
		snprintf(r->error, sizeof r->error,
			 "a trace of format version %u; version %d is known",
			 (unsigned)first[8] | (unsigned)first[9] << 8, MOE_MXT_VERSION);
		return false;
	}
	r->header = calloc(1, 1);
	if (!r->header)
		return fail(r, "no memory for the header");
	return read_heads(r);
}

bool moe_mxt_open(struct moe_mxt_reader *r, const char *path)
{
	bool good;

	memset(r, 0, sizeof *r);
	r->fd = open(path, O_RDONLY | O_CLOEXEC);
	good = start(r);
	if (!good)
		moe_mxt_close(r);
	return good;
}

void moe_mxt_close(struct moe_mxt_reader *r)
{
	if (r->fd >= 0)
		close(r->fd);
	r->fd = -1;
	free(r->header);
	free(r->chunk);
	r->header = NULL;
	r->chunk = NULL;
	r->n = r->cap = 0;
}

/* ---- chunks ---- */

/* Lists and texts have as many values as other columns say. */
struct list {
	uint32_t type;
	int column, count; /* count 0: any number */
};
static const struct list lists[] = {
	{ MOE_MXT_DEPS, MOE_MXT_DEP_BACK, MOE_MXT_DEP_COUNT },
	{ MOE_MXT_ROUTING, MOE_MXT_ROUTING_LOADS, MOE_MXT_ROUTING_EXPERTS },
	{ MOE_MXT_MEMORY, MOE_MXT_MEMORY_NAMES, 0 },
	{ MOE_MXT_COUNTERS, MOE_MXT_COUNTER_NAMES, 0 },
	{ MOE_MXT_END, MOE_MXT_COUNTER_NAMES, 0 },
};

static const struct list *list_of(uint32_t type, int column)
{
	for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
		if (lists[i].type == type && lists[i].column == column)
			return &lists[i];
	return NULL;
}

static bool counts_add_up(const struct moe_mxt_table *t, const struct list *l)
{
	const struct moe_mxt_column *c = &t->column[l->count];
	size_t sum = 0, n = t->column[l->column].n;

	if (!l->count)
		return true;
	for (size_t i = 0; i < c->n; i++) {
		if (c->value[i] < 0 || (uint64_t)c->value[i] > n - sum)
			return false;
		sum += (size_t)c->value[i];
	}
	return sum == n;
}

static const char *check_columns(const struct moe_mxt_table *t)
{
	for (int c = 1; c < MOE_MXT_MAX_COLUMNS; c++) {
		const struct list *l = list_of(t->head.type, c);

		if (l && !counts_add_up(t, l))
			return "a list is not as long as its counts say";
		if (!l && t->column[c].n && t->column[c].n != t->head.rows)
			return "a column does not have a value per row";
	}
	return NULL;
}

bool moe_mxt_load(struct moe_mxt_reader *r, size_t i, struct moe_mxt_table *t)
{
	const struct moe_mxt_place *p = &r->chunk[i];
	uint8_t *payload = malloc((size_t)p->head.length + 1);
	const char *wrong = NULL;

	t->head = p->head;
	if (!payload)
		wrong = "no memory for a chunk";
	else if (!read_at(r, payload, p->head.length, p->at))
		wrong = strerror(errno);
	else if (moe_mxt_crc(0, payload, p->head.length) != p->head.crc)
		wrong = "its checksum is wrong";
	if (!wrong)
		wrong = moe_mxt_unpack(t, payload, p->head.length);
	if (!wrong)
		wrong = check_columns(t);
	free(payload);
	if (!wrong)
		return true;
	moe_mxt_table_clear(t);
	snprintf(r->error, sizeof r->error, "chunk %zu (%s) at byte %lld: %s", i,
		 moe_mxt_chunk_name((int)p->head.type) ? moe_mxt_chunk_name((int)p->head.type)
						       : "unknown",
		 (long long)p->at, wrong);
	return false;
}

/* ---- header ---- */

const char *moe_mxt_value(const struct moe_mxt_reader *r, const char *key, char *buf, size_t size)
{
	size_t n = strlen(key);

	for (const char *line = r->header; line && *line;) {
		const char *end = strchr(line, '\n');
		size_t length = end ? (size_t)(end - line) : strlen(line);

		if (length > n && line[n] == '=' && !memcmp(line, key, n)) {
			snprintf(buf, size, "%.*s", (int)(length - n - 1), line + n + 1);
			return buf;
		}
		line = end ? end + 1 : NULL;
	}
	return NULL;
}

int64_t moe_mxt_number(const struct moe_mxt_reader *r, const char *key, int64_t otherwise)
{
	char buf[32], *end;
	const char *text = moe_mxt_value(r, key, buf, sizeof buf);
	long long v;

	if (!text)
		return otherwise;
	errno = 0;
	v = strtoll(text, &end, 10);
	return end == text || *end || errno ? otherwise : v;
}
