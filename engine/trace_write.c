/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/trace_write.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static bool fail(struct moe_mxt_writer *w, const char *what)
{
	if (!w->error[0])
		snprintf(w->error, sizeof w->error, "%s", what);
	return false;
}

static bool write_all(struct moe_mxt_writer *w, const void *data, size_t bytes)
{
	const char *p = data;

	while (bytes) {
		ssize_t n = write(w->fd, p, bytes);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return fail(w, n ? strerror(errno) : "nothing can be written");
		p += n;
		bytes -= (size_t)n;
	}
	return true;
}

bool moe_mxt_create(struct moe_mxt_writer *w, const char *path)
{
	static const uint8_t start[MOE_MXT_FILE_BYTES] = { 0x89, 'M',  'X',
							   'T',	 '\r', '\n',
							   0x1a, '\n', MOE_MXT_VERSION };

	memset(w, 0, sizeof *w);
	w->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	if (w->fd < 0)
		return fail(w, strerror(errno));
	if (!write_all(w, start, sizeof start)) {
		close(w->fd);
		w->fd = -1;
		return false;
	}
	w->bytes = sizeof start;
	return true;
}

/* Head and payload in one buffer and one write: a crash leaves a whole chunk or a tail that is cut off. */
static bool write_chunk(struct moe_mxt_writer *w, const struct moe_mxt_head *h,
			const uint8_t *payload)
{
	size_t bytes = MOE_MXT_HEAD_BYTES + h->length;
	uint8_t *out = w->error[0] ? NULL : malloc(bytes);
	bool good;

	if (w->error[0])
		return false;
	if (!out)
		return fail(w, "no memory for a chunk");
	moe_mxt_head_encode(h, out);
	memcpy(out + MOE_MXT_HEAD_BYTES, payload, h->length);
	good = write_all(w, out, bytes);
	free(out);
	if (good)
		w->bytes += (int64_t)bytes;
	else if (ftruncate(w->fd, w->bytes))
		errno = 0; /* no regular file: readers find the end themselves */
	return good;
}

bool moe_mxt_write_header(struct moe_mxt_writer *w, const char *text)
{
	struct moe_mxt_table t;
	size_t n = strlen(text);

	if (n > MOE_MXT_MAX_PAYLOAD)
		return fail(w, "the header is too long");
	moe_mxt_table_init(&t, MOE_MXT_HEADER);
	t.head.length = (uint32_t)n;
	t.head.crc = moe_mxt_crc(0, text, n);
	return write_chunk(w, &t.head, (const uint8_t *)text);
}

bool moe_mxt_write(struct moe_mxt_writer *w, struct moe_mxt_table *t)
{
	uint8_t *payload;
	size_t bytes;
	bool good;

	if (!t->head.rows)
		return !w->error[0];
	payload = moe_mxt_pack(t, &bytes);
	if (!payload)
		good = fail(w, "no memory for a chunk");
	else if (bytes > MOE_MXT_MAX_PAYLOAD || t->head.rows > MOE_MXT_MAX_ROWS)
		good = fail(w, "a chunk is too large");
	else
		good = write_chunk(w, &t->head, payload);
	free(payload);
	moe_mxt_table_clear(t);
	return good;
}

bool moe_mxt_finish(struct moe_mxt_writer *w)
{
	if (w->fd >= 0 && close(w->fd))
		fail(w, strerror(errno));
	w->fd = -1;
	return !w->error[0];
}

/* ---- header text ---- */

static void append(struct moe_mxt_text *t, const char *s, size_t n)
{
	if (t->n + n + 1 > t->cap) {
		size_t cap = 2 * (t->n + n + 1);
		char *grown = t->failed ? NULL : realloc(t->text, cap);

		if (!grown) {
			t->failed = true;
			return;
		}
		t->text = grown;
		t->cap = cap;
	}
	memcpy(t->text + t->n, s, n);
	t->n += n;
	t->text[t->n] = 0;
}

static void append_clean(struct moe_mxt_text *t, const char *s)
{
	size_t at = t->n;

	append(t, s, strlen(s));
	for (; !t->failed && at < t->n; at++)
		if (t->text[at] == '\n' || t->text[at] == '\r')
			t->text[at] = ' ';
}

void moe_mxt_put_line(struct moe_mxt_text *t, const char *line)
{
	append_clean(t, line);
	append(t, "\n", 1);
}

void moe_mxt_put_text(struct moe_mxt_text *t, const char *key, const char *value)
{
	append(t, key, strlen(key));
	append(t, "=", 1);
	append_clean(t, value);
	append(t, "\n", 1);
}

void moe_mxt_put_format(struct moe_mxt_text *t, const char *key, const char *format, ...)
{
	char buf[512];
	va_list ap;

	va_start(ap, format);
	vsnprintf(buf, sizeof buf, format, ap);
	va_end(ap);
	moe_mxt_put_text(t, key, buf);
}
