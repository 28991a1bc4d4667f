/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/small_file.h"
#include "tests/harness.h"
#include "model/readers/safetensors.h"
#include "model/readers/safetensors_sum.h"
#include "model/readers/safetensors_writer.h"

#include <stdio.h>

const char *temp_path(const char *name)
{
	static char ring[4][4096];
	static unsigned next;
	char *buf = ring[next++ % 4];

	snprintf(buf, sizeof ring[0], "%s/%s", moe_test_dir(), name);
	return buf;
}

const float small_values[6] = { 1, -2, 3.5f, 0, 1e-30f, 6 };

enum moe_status write_small(const char *path)
{
	const uint16_t bf16[2] = { 0x3f80, 0xc000 };
	const int64_t i64[1] = { -7 };
	const struct moe_st_item items[] = {
		{ .name = "weight",
		  .dtype = MOE_F32,
		  .ndim = 2,
		  .shape = { 2, 3 },
		  .data = small_values },
		{ .name = "b\"\\\n\u00e9",
		  .dtype = MOE_BF16,
		  .ndim = 1,
		  .shape = { 2 },
		  .data = bf16 },
		{ .name = "n", .dtype = MOE_I64, .ndim = 0, .data = i64 },
		{ .name = "none", .dtype = MOE_F32, .ndim = 2, .shape = { 0, 3 } },
	};
	const struct moe_st_meta meta[] = { { "format", "pt" }, { "k\"", "v\t" } };

	return moe_safetensors_write(path, items, MOE_COUNT(items), meta, MOE_COUNT(meta));
}

void check_small(const char *path)
{
	struct moe_safetensors *st = NULL;
	const struct moe_st_tensor *t;
	const char *key, *value;
	float f[6];
	int64_t n;

	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(path, &st), MOE_OK);
	CU_ASSERT_EQUAL(moe_safetensors_count(st), 4);
	CU_ASSERT_EQUAL(moe_safetensors_read_f32(st, "weight", 2, (int64_t[]){ 2, 3 }, f), MOE_OK);
	CU_ASSERT_EQUAL(memcmp(f, small_values, sizeof f), 0);
	CU_ASSERT_EQUAL(moe_safetensors_read_f32(st, "b\"\\\n\u00e9", 1, (int64_t[]){ 2 }, f),
			MOE_OK);
	CU_ASSERT_EQUAL(f[0], 1);
	CU_ASSERT_EQUAL(f[1], -2);
	CU_ASSERT_EQUAL(moe_safetensors_get_typed(st, "n", MOE_I64, 0, NULL, &t), MOE_OK);
	memcpy(&n, t->data, sizeof n);
	CU_ASSERT_EQUAL(n, -7);
	CU_ASSERT_EQUAL(moe_safetensors_get(st, "none", 2, (int64_t[]){ 0, 3 }, &t), MOE_OK);
	CU_ASSERT_STRING_EQUAL(moe_safetensors_metadata(st, "format"), "pt");
	CU_ASSERT_STRING_EQUAL(moe_safetensors_metadata(st, "k\""), "v\t");
	CU_ASSERT_PTR_NULL(moe_safetensors_metadata(st, "absent"));
	CU_ASSERT(moe_safetensors_metadata_at(st, 0, 0, &key, &value));
	CU_ASSERT_STRING_EQUAL(key, MOE_ST_SUM_KEY);
	CU_ASSERT(moe_safetensors_metadata_at(st, 0, 2, &key, &value));
	CU_ASSERT_STRING_EQUAL(key, "k\"");
	CU_ASSERT(!moe_safetensors_metadata_at(st, 0, 3, &key, &value));
	CU_ASSERT_PTR_NULL(moe_safetensors_find(st, "absent"));
	moe_safetensors_close(st);
}
