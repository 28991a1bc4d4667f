/* SPDX-License-Identifier: Apache-2.0 */
#include "model/json.h"
#include "model/file.h"

#include <math.h>

/* The largest JSON file read whole: an index of 40,000 tensors has 5 MB. */
#define JSON_FILE_LIMIT ((size_t)100 << 20)

/* Length of the UTF-8 sequence at p (n > 0 bytes are left), 0 if malformed. */
static size_t utf8_sequence(const unsigned char *p, size_t n)
{
	static const uint32_t smallest[5] = { 0, 0, 0x80, 0x800, 0x10000 };
	size_t len = p[0] < 0x80 ? 1 : (p[0] & 0xe0) == 0xc0 ? 2 : (p[0] & 0xf0) == 0xe0 ? 3 : 4;
	uint32_t v;

	if (len == 1)
		return 1;
	if (len > n || (len == 4 && (p[0] & 0xf8) != 0xf0))
		return 0;
	v = p[0] & (0xffu >> (len + 1));
	for (size_t i = 1; i < len; i++) {
		if ((p[i] & 0xc0) != 0x80)
			return 0;
		v = v << 6 | (p[i] & 0x3f);
	}
	if (v < smallest[len] || v > 0x10ffff || (v >= 0xd800 && v <= 0xdfff))
		return 0;
	return len;
}

bool moe_utf8_valid(const char *text, size_t bytes)
{
	const unsigned char *p = (const unsigned char *)text;

	while (bytes) {
		size_t len = utf8_sequence(p, bytes);

		if (!len)
			return false;
		p += len;
		bytes -= len;
	}
	return true;
}

static bool is_space(char c)
{
	return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

enum moe_status moe_json_parse(const char *text, size_t bytes, const char *what, cJSON **out)
{
	const char *end = NULL;
	char *copy;
	size_t at;
	cJSON *v;

	if (!moe_utf8_valid(text, bytes))
		return moe_fail(MOE_ERR_FORMAT, "%s: is not valid UTF-8", what);
	for (size_t i = 0; i < bytes; i++)
		if ((unsigned char)text[i] < 0x20 && !is_space(text[i]))
			return moe_fail(MOE_ERR_FORMAT, "%s: control byte 0x%02x at offset %zu",
					what, (unsigned char)text[i], i);
	if (memmem(text, bytes, "\\u0000", 6))
		return moe_fail(MOE_ERR_FORMAT, "%s: a string holds \\u0000", what);
	/* cJSON before 1.7.16 reads a byte past an object that ends in a comma: give it two NULs */
	copy = moe_alloc(bytes + 2, 1);
	if (!copy)
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", what);
	memcpy(copy, text, bytes);
	memset(copy + bytes, 0, 2);
	v = cJSON_ParseWithLengthOpts(copy, bytes, &end, 0);
	at = end ? (size_t)(end - copy) : 0;
	moe_free(copy);
	if (!v)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: is not valid JSON near offset %zu (or memory ran out)", what,
				at);
	for (; at < bytes; at++)
		if (!is_space(text[at])) {
			cJSON_Delete(v);
			return moe_fail(MOE_ERR_FORMAT,
					"%s: more follows the JSON value at offset %zu", what, at);
		}
	*out = v;
	return MOE_OK;
}

enum moe_status moe_json_read(const char *path, cJSON **out)
{
	enum moe_status status;
	size_t bytes, skip = 0;
	char *text;

	MOE_TRY(moe_file_read(path, JSON_FILE_LIMIT, &text, &bytes));
	if (bytes >= 3 && !memcmp(text, "\xef\xbb\xbf", 3))
		skip = 3; /* a byte order mark of a Windows editor */
	status = moe_json_parse(text + skip, bytes - skip, path, out);
	moe_free(text);
	if (status == MOE_OK && !cJSON_IsObject(*out)) {
		cJSON_Delete(*out);
		*out = NULL;
		status = moe_fail(MOE_ERR_FORMAT, "%s: is not a JSON object", path);
	}
	return status;
}

/* Paths may hold bytes that are no UTF-8, which no reader of JSON takes. */
static void repair_utf8(char *text)
{
	size_t n = strlen(text);

	for (size_t i = 0; i < n;) {
		size_t len = utf8_sequence((const unsigned char *)text + i, n - i);

		if (!len)
			text[i] = '?';
		i += len ? len : 1;
	}
}

enum moe_status moe_json_write(const char *path, const cJSON *v)
{
	char *text = cJSON_Print(v);
	enum moe_status status;
	size_t n;

	if (!text)
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
	repair_utf8(text);
	n = strlen(text);
	text[n] = '\n'; /* in place of the NUL: moe_file_write takes a length */
	status = moe_file_write(path, text, n + 1);
	cJSON_free(text);
	return status;
}

const cJSON *moe_json_get(const cJSON *obj, const char *key)
{
	const cJSON *v = cJSON_GetObjectItemCaseSensitive(obj, key);

	return cJSON_IsNull(v) ? NULL : v;
}

enum moe_status moe_json_as_int(const cJSON *v, const char *key, int64_t min, int64_t max,
				int64_t *out)
{
	double d;

	if (!cJSON_IsNumber(v))
		return moe_fail(MOE_ERR_FORMAT, "%s is not a number", key);
	d = v->valuedouble;
	if (d != floor(d) || fabs(d) > (double)MOE_JSON_INT_MAX)
		return moe_fail(MOE_ERR_FORMAT, "%s is %g, which is not an integer", key, d);
	if ((int64_t)d < min || (int64_t)d > max)
		return moe_fail(MOE_ERR_FORMAT, "%s is %lld, allowed are %lld to %lld", key,
				(long long)d, (long long)min, (long long)max);
	*out = (int64_t)d;
	return MOE_OK;
}

enum moe_status moe_json_int(const cJSON *obj, const char *key, int64_t min, int64_t max,
			     int64_t *out)
{
	const cJSON *v = moe_json_get(obj, key);

	if (!v)
		return moe_fail(MOE_ERR_FORMAT, "%s is missing", key);
	return moe_json_as_int(v, key, min, max, out);
}

enum moe_status moe_json_opt_int(const cJSON *obj, const char *key, int64_t min, int64_t max,
				 int64_t *out)
{
	const cJSON *v = moe_json_get(obj, key);

	return v ? moe_json_as_int(v, key, min, max, out) : MOE_OK;
}

enum moe_status moe_json_opt_real(const cJSON *obj, const char *key, double *out)
{
	const cJSON *v = moe_json_get(obj, key);

	if (!v)
		return MOE_OK;
	if (!cJSON_IsNumber(v) || !isfinite(v->valuedouble))
		return moe_fail(MOE_ERR_FORMAT, "%s is not a finite number", key);
	*out = v->valuedouble;
	return MOE_OK;
}

enum moe_status moe_json_opt_bool(const cJSON *obj, const char *key, bool *out)
{
	const cJSON *v = moe_json_get(obj, key);

	if (!v)
		return MOE_OK;
	if (!cJSON_IsBool(v))
		return moe_fail(MOE_ERR_FORMAT, "%s is not true or false", key);
	*out = cJSON_IsTrue(v);
	return MOE_OK;
}

enum moe_status moe_json_opt_text(const cJSON *obj, const char *key, const char **out)
{
	const cJSON *v = moe_json_get(obj, key);

	if (!v)
		return MOE_OK;
	if (!cJSON_IsString(v))
		return moe_fail(MOE_ERR_FORMAT, "%s is not a string", key);
	*out = v->valuestring;
	return MOE_OK;
}
