/* SPDX-License-Identifier: Apache-2.0 */
/*
 * JSON as model files need it: strict parsing, and typed look-ups whose errors name the key.
 * A key whose value is null counts as absent. No state; thread-safe.
 */
#ifndef MOE_MODEL_JSON_H
#define MOE_MODEL_JSON_H

#include "engine/base.h"

#include <cjson/cJSON.h>

/* Integers above this are not exact in cJSON's doubles. */
#define MOE_JSON_INT_MAX ((int64_t)1 << 53)

/* true if n bytes are UTF-8 without overlong forms, surrogates or values above U+10FFFF. */
bool moe_utf8_valid(const char *text, size_t bytes);

/*
 * Parses one JSON value; nothing but white space may follow. Refuses invalid UTF-8, control bytes
 * and \u0000 (names would be cut there). MOE_ERR_FORMAT prefixed by what. cJSON_Delete the result.
 */
enum moe_status moe_json_parse(const char *text, size_t bytes, const char *what, cJSON **out);
/* The same for a file that must hold an object. MOE_ERR_IO, MOE_ERR_FORMAT. */
enum moe_status moe_json_read(const char *path, cJSON **out);
/* Writes v, indented, with moe_file_write. */
enum moe_status moe_json_write(const char *path, const cJSON *v); /* texts that are no UTF-8 get question marks */

/* The value of key, NULL when absent or null. */
const cJSON *moe_json_get(const cJSON *obj, const char *key);
/* v as an integer in [min, max]: MOE_ERR_FORMAT naming key otherwise. */
enum moe_status moe_json_as_int(const cJSON *v, const char *key, int64_t min, int64_t max,
				int64_t *out);

/* Required: absent, of another type or out of [min, max] is MOE_ERR_FORMAT naming key. */
enum moe_status moe_json_int(const cJSON *obj, const char *key, int64_t min, int64_t max,
			     int64_t *out);
/* Optional: *out keeps its value when key is absent; of another type is MOE_ERR_FORMAT. */
enum moe_status moe_json_opt_int(const cJSON *obj, const char *key, int64_t min, int64_t max,
				 int64_t *out);
enum moe_status moe_json_opt_real(const cJSON *obj, const char *key, double *out);
enum moe_status moe_json_opt_bool(const cJSON *obj, const char *key, bool *out);
/* *out points into obj. */
enum moe_status moe_json_opt_text(const cJSON *obj, const char *key, const char **out);

#endif
