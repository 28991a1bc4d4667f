/* SPDX-License-Identifier: Apache-2.0 */
/* Keys and values of a GGUF file. */
#include "model/readers/gguf_file.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum value_type {
	VALUE_U8,
	VALUE_I8,
	VALUE_U16,
	VALUE_I16,
	VALUE_U32,
	VALUE_I32,
	VALUE_F32,
	VALUE_BOOL,
	VALUE_TEXT,
	VALUE_ARRAY,
	VALUE_U64,
	VALUE_I64,
	VALUE_F64,
	VALUE_TYPES
};

static const uint8_t value_bytes[VALUE_TYPES] = {
	[VALUE_U8] = 1,	 [VALUE_I8] = 1,  [VALUE_U16] = 2, [VALUE_I16] = 2,
	[VALUE_U32] = 4, [VALUE_I32] = 4, [VALUE_F32] = 4, [VALUE_BOOL] = 1,
	[VALUE_U64] = 8, [VALUE_I64] = 8, [VALUE_F64] = 8,
};

enum moe_status moe_gguf_cut(const struct gguf_cursor *c, const char *what)
{
	return moe_fail(MOE_ERR_FORMAT,
			"%s: ends at byte %zu inside %s: the file is truncated or damaged", c->path,
			(size_t)(c->end - c->begin), what);
}

enum moe_status moe_gguf_take(struct gguf_cursor *c, size_t bytes, const char *what, void *out)
{
	if ((size_t)(c->end - c->at) < bytes)
		return moe_gguf_cut(c, what);
	memcpy(out, c->at, bytes);
	c->at += bytes;
	return MOE_OK;
}

enum moe_status moe_gguf_take_text(struct gguf_cursor *c, const char *what, const char **text,
				   size_t *bytes)
{
	uint64_t n = 0;

	MOE_TRY(moe_gguf_take(c, 8, what, &n));
	if (n > (uint64_t)(c->end - c->at))
		return moe_fail(MOE_ERR_FORMAT,
				"%s: %s at byte %zu has %llu bytes, more than the file", c->path,
				what, (size_t)(c->at - c->begin), (unsigned long long)n);
	*text = (const char *)c->at;
	*bytes = (size_t)n;
	c->at += n;
	return MOE_OK;
}

static enum moe_status skip_array(struct gguf_cursor *c, const char *key, int key_bytes)
{
	uint32_t type = VALUE_TYPES;
	uint64_t n = 0;

	MOE_TRY(moe_gguf_take(c, 4, "an array", &type));
	MOE_TRY(moe_gguf_take(c, 8, "an array", &n));
	if (type >= VALUE_TYPES || type == VALUE_ARRAY)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: key '%.*s' is an array of type %u, which there is not",
				c->path, key_bytes, key, type);
	if (type == VALUE_TEXT) {
		const char *text;
		size_t bytes;

		for (uint64_t i = 0; i < n; i++)
			MOE_TRY(moe_gguf_take_text(c, "an array's string", &text, &bytes));
		return MOE_OK;
	}
	if (n > (uint64_t)(c->end - c->at) / value_bytes[type])
		return moe_fail(MOE_ERR_FORMAT,
				"%s: key '%.*s' has %llu values, more than the file", c->path,
				key_bytes, key, (unsigned long long)n);
	c->at += n * value_bytes[type];
	return MOE_OK;
}

enum moe_status moe_gguf_take_entry(struct gguf_cursor *c, struct gguf_entry *e)
{
	const char *text;
	int shown;

	MOE_TRY(moe_gguf_take_text(c, "a key", &e->key, &e->key_bytes));
	shown = (int)MOE_MIN(e->key_bytes, (size_t)100);
	MOE_TRY(moe_gguf_take(c, 4, "the type of a key's value", &e->type));
	e->value = c->at;
	if (e->type == VALUE_ARRAY)
		return skip_array(c, e->key, shown);
	if (e->type == VALUE_TEXT) {
		MOE_TRY(moe_gguf_take_text(c, "a string", &text, &e->bytes));
		e->value = (const unsigned char *)text;
		return MOE_OK;
	}
	if (e->type >= VALUE_TYPES)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: key '%.*s' has the value type %u, which there is not", c->path,
				shown, e->key, e->type);
	e->bytes = value_bytes[e->type];
	if (e->bytes > (size_t)(c->end - c->at))
		return moe_gguf_cut(c, "a key's value");
	c->at += e->bytes;
	return MOE_OK;
}

const struct gguf_entry *moe_gguf_find_entry(const struct gguf_entry *list, size_t n,
					     const char *key)
{
	for (size_t i = 0; i < n; i++)
		if (list[i].key_bytes == strlen(key) &&
		    !memcmp(list[i].key, key, list[i].key_bytes))
			return &list[i];
	return NULL;
}

enum moe_status moe_gguf_entry_int(const char *path, const struct gguf_entry *e, int64_t *out)
{
	uint64_t wide = 0;
	unsigned shift;

	if (e->type == VALUE_F32 || e->type == VALUE_F64 || e->type == VALUE_TEXT ||
	    e->type == VALUE_ARRAY)
		return moe_fail(MOE_ERR_FORMAT, "%s: key '%.*s' is not an integer", path,
				(int)e->key_bytes, e->key);
	memcpy(&wide, e->value, e->bytes);
	shift = 64 - 8 * (unsigned)e->bytes;
	*out = (int64_t)wide;
	if (e->type == VALUE_I8 || e->type == VALUE_I16 || e->type == VALUE_I32)
		*out = (int64_t)(wide << shift) >> shift;
	if (e->type == VALUE_U64 && wide > INT64_MAX)
		return moe_fail(MOE_ERR_FORMAT, "%s: key '%.*s' is %llu, beyond what can be", path,
				(int)e->key_bytes, e->key, (unsigned long long)wide);
	return MOE_OK;
}

enum moe_status moe_gguf_int(const struct moe_gguf *g, const char *key, int64_t *out, bool *found)
{
	const struct gguf_entry *e = moe_gguf_find_entry(g->entry, g->n_entries, key);

	*found = e != NULL;
	return e ? moe_gguf_entry_int(g->path, e, out) : MOE_OK;
}

enum moe_status moe_gguf_real(const struct moe_gguf *g, const char *key, double *out, bool *found)
{
	const struct gguf_entry *e = moe_gguf_find_entry(g->entry, g->n_entries, key);
	char text[32];
	int64_t whole;
	float narrow;

	*found = e != NULL;
	if (!e)
		return MOE_OK;
	if (e->type == VALUE_F64) {
		memcpy(out, e->value, sizeof *out);
	} else if (e->type == VALUE_F32) {
		memcpy(&narrow, e->value, sizeof narrow);
		*out = (double)narrow;
		/* the decimal number that was meant: 1e-6, not 9.99999997e-7 */
		for (int digits = 1; digits < 9 && isfinite(narrow); digits++) {
			snprintf(text, sizeof text, "%.*g", digits, (double)narrow);
			if (strtof(text, NULL) == narrow) {
				*out = strtod(text, NULL);
				break;
			}
		}
	} else {
		MOE_TRY(moe_gguf_entry_int(g->path, e, &whole));
		*out = (double)whole;
	}
	return isfinite(*out)
		       ? MOE_OK
		       : moe_fail(MOE_ERR_FORMAT, "%s: key '%s' is not finite", g->path, key);
}

enum moe_status moe_gguf_text(const struct moe_gguf *g, const char *key, char *out, size_t size,
			      bool *found)
{
	const struct gguf_entry *e = moe_gguf_find_entry(g->entry, g->n_entries, key);

	*found = e != NULL;
	if (!e)
		return MOE_OK;
	if (e->type != VALUE_TEXT || e->bytes >= size || memchr(e->value, 0, e->bytes) ||
	    !moe_utf8_valid((const char *)e->value, e->bytes))
		return moe_fail(MOE_ERR_FORMAT, "%s: key '%s' is not a text of less than %zu bytes",
				g->path, key, size);
	memcpy(out, e->value, e->bytes);
	out[e->bytes] = 0;
	return MOE_OK;
}
