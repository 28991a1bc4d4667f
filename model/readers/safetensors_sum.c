/* SPDX-License-Identifier: Apache-2.0 */
#include "model/readers/safetensors_sum.h"
#include "model/file.h"
#include "model/sum.h"

#include <stdlib.h>

#define PIECE ((size_t)4 << 20)

/* The digits in the first bytes of a file, as a number; they become zeros. */
static bool take_digits(char *head, size_t bytes, uint64_t *sum)
{
	char digits[MOE_ST_SUM_DIGITS + 1] = "", *end;

	if (bytes < (size_t)MOE_ST_SUM_AT + MOE_ST_SUM_DIGITS ||
	    memcmp(head + 8, MOE_ST_SUM_BEFORE, sizeof MOE_ST_SUM_BEFORE - 1) != 0)
		return false;
	memcpy(digits, head + MOE_ST_SUM_AT, MOE_ST_SUM_DIGITS);
	memset(head + MOE_ST_SUM_AT, '0', MOE_ST_SUM_DIGITS);
	*sum = strtoull(digits, &end, 16);
	return !*end && strspn(digits, "0123456789abcdef") == MOE_ST_SUM_DIGITS;
}

static enum moe_status compare(const char *path, const struct moe_mapping *m, char *buf)
{
	struct moe_sum sum;
	uint64_t want = 0, found;

	moe_sum_begin(&sum);
	for (size_t at = 0; at < m->bytes; at += PIECE) {
		size_t n = MOE_MIN(PIECE, m->bytes - at);

		MOE_TRY(moe_mapping_read(m, path, at, n, buf));
		if (!at && !take_digits(buf, n, &want))
			return moe_fail(MOE_ERR_FORMAT,
					"%s: is damaged: its header has no checksum", path);
		moe_sum_add(&sum, buf, n);
	}
	found = moe_sum_end(&sum);
	if (!m->bytes || found != want)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: is damaged: the checksum of its %zu bytes is %016llx, %016llx "
				"was written",
				path, m->bytes, (unsigned long long)found,
				(unsigned long long)want);
	return MOE_OK;
}

enum moe_status moe_safetensors_verify(const char *path)
{
	struct moe_mapping m = { 0 };
	char *buf = moe_alloc(PIECE, 1);
	enum moe_status st;

	if (!buf)
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
	st = moe_file_map(path, &m);
	if (st == MOE_OK)
		st = compare(path, &m, buf);
	moe_file_unmap(&m);
	moe_free(buf);
	return st;
}
