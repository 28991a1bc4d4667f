/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors reader: hostile files, shards, many tensors; failing allocations, of the writer too. */
#include "tests/small_file.h"
#include "tests/harness.h"
#include "model/file.h"
#include "model/json.h"
#include "model/readers/safetensors.h"
#include "model/readers/safetensors_writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

const char moe_suite_name[] = "safetensors";

/* A file of the given header text and data_bytes bytes 0, 1, 2 ... */
static const char *craft(const char *header, uint64_t length, size_t header_bytes,
			 size_t data_bytes)
{
	const char *path = temp_path("crafted.safetensors");
	char *buf = malloc(8 + header_bytes + data_bytes);

	memcpy(buf, &length, 8);
	memcpy(buf + 8, header, header_bytes);
	for (size_t i = 0; i < data_bytes; i++)
		buf[8 + header_bytes + i] = (char)i;
	CU_ASSERT_EQUAL(moe_file_write(path, buf, 8 + header_bytes + data_bytes), MOE_OK);
	free(buf);
	return path;
}

static const char *craft_text(const char *header, size_t data_bytes)
{
	return craft(header, strlen(header), strlen(header), data_bytes);
}

/* Opening must fail with FORMAT and a text that holds `says` and the file's name. */
static void expect_refused(const char *path, const char *says)
{
	struct moe_safetensors *st = NULL;
	enum moe_status status = moe_safetensors_open(path, &st);

	CU_ASSERT_EQUAL(status, MOE_ERR_FORMAT);
	CU_ASSERT_PTR_NULL(st);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "crafted"));
	if (!strstr(moe_last_error(), says)) {
		printf("expected '%s' in: %s\n", says, moe_last_error());
		CU_FAIL("another error text");
	}
	if (status == MOE_OK)
		moe_safetensors_close(st);
}

#define T(dtype, shape, offsets)                                                                   \
	"{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":" offsets "}"

static void test_hostile_headers(void)
{
	static const struct {
		const char *header, *says;
	} cases[] = {
		{ "", "does not start" },
		{ "[]", "does not start" },
		{ "   {}", "does not start" },
		{ "{", "not valid JSON" },
		{ "{\"a\":1,", "not valid JSON" },
		{ "{}x", "more follows" },
		{ "{\"a\":" T("F32", "[2]", "[0,8]") "}\x01", "control byte" },
		{ "{\"\xff\":" T("F32", "[2]", "[0,8]") "}", "UTF-8" },
		{ "{\"\xc0\x80\":" T("F32", "[2]", "[0,8]") "}", "UTF-8" },
		{ "{\"\xed\xa0\x80\":" T("F32", "[2]", "[0,8]") "}", "UTF-8" },
		{ "{\"a\\u0000b\":" T("F32", "[2]", "[0,8]") "}", "u0000" },
		{ "{\"a\":3}", "not an object" },
		{ "{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", "data_offsets is missing" },
		{ "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", "shape is missing" },
		{ "{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", "dtype is missing" },
		{ "{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]"
		  "}}",
		  "dtype is given twice" },
		{ "{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", "dtype is not" },
		{ "{\"a\":" T("F32", "2", "[0,8]") "}", "shape is not a list" },
		{ "{\"a\":" T("F32", "[-2]", "[0,8]") "}", "a dimension of shape is -2" },
		{ "{\"a\":" T("F32", "[2.5]", "[0,8]") "}", "not an integer" },
		{ "{\"a\":" T("F32", "[\"2\"]", "[0,8]") "}", "not a number" },
		{ "{\"a\":" T("F32", "[1e300]", "[0,8]") "}", "not an integer" },
		{ "{\"a\":" T("F32", "[1e999]", "[0,8]") "}", "not an integer" },
		{ "{\"a\":" T("F32", "[4294967296,4294967296]", "[0,8]") "}", "overflows" },
		{ "{\"a\":" T("F64", "[4503599627370496,512]", "[0,8]") "}", "overflows" },
		{ "{\"a\":" T("F32", "[2]", "8") "}", "not a list of two" },
		{ "{\"a\":" T("F32", "[2]", "[0]") "}", "not a list of two" },
		{ "{\"a\":" T("F32", "[2]", "[0,8,9]") "}", "not a list of two" },
		{ "{\"a\":" T("F32", "[2]", "[8,0]") "}", "backwards" },
		{ "{\"a\":" T("F32", "[2]", "[-8,0]") "}", "data_offsets[0] is -8" },
		{ "{\"a\":" T("F32", "[2]", "[0,1e18]") "}", "not an integer" },
		{ "{\"a\":" T("F32", "[2]", "[64,72]") "}", "truncated" },
		{ "{\"a\":" T("F32", "[2]", "[60,68]") "}", "truncated" },
		{ "{\"a\":" T("F32", "[3]", "[0,8]") "}", "make 12 bytes" },
		{ "{\"a\":" T("U64", "[3]", "[0,800]") "}", "truncated" },
		{ "{\"a\":" T("F32", "[2]", "[0,8]") ",\"b\":" T("F32", "[2]", "[4,12]") "}",
		  "overlap" },
		{ "{\"a\":" T("F32", "[2]", "[0,8]") ",\"b\":" T("U16", "[1]", "[2,4]") "}",
		  "overlap" },
		{ "{\"a\":" T("F32", "[2]", "[0,8]") ",\"a\":" T("F32", "[2]", "[8,16]") "}",
		  "given twice" },
		{ "{\"__metadata__\":3}", "__metadata__ is not an object" },
		{ "{\"__metadata__\":{\"a\":3}}", "is not a string" },
		{ "{\"__metadata__\":{},\"__metadata__\":{}}", "given twice" },
	};
	char *deep = malloc(100001);

	for (size_t i = 0; i < MOE_COUNT(cases); i++)
		expect_refused(craft_text(cases[i].header, 64), cases[i].says);
	/* nesting must not overflow the stack */
	memset(deep, '[', 100000);
	memcpy(deep, "{\"a\":", 5);
	deep[100000] = 0;
	expect_refused(craft_text(deep, 0), "not valid JSON");
	free(deep);
}

static void test_hostile_lengths(void)
{
	static const uint64_t lengths[] = { 3,		1000,	       100000000,
					    100000001,	UINT32_MAX,    (uint64_t)1 << 63,
					    UINT64_MAX, UINT64_MAX - 7 };
	const char header[] = "{\"a\":" T("F32", "[2]", "[0,8]") "}";
	struct moe_safetensors *st = NULL;

	for (size_t i = 0; i < MOE_COUNT(lengths); i++)
		expect_refused(craft(header, lengths[i], strlen(header), 8), "");
	for (size_t n = 0; n < 8; n++) {
		const char *path = temp_path("crafted.safetensors");

		CU_ASSERT_EQUAL(moe_file_write(path, "\1\0\0\0\0\0\0", n), MOE_OK);
		expect_refused(path, "truncated");
	}
	CU_ASSERT_EQUAL(moe_safetensors_open(temp_path("absent"), &st), MOE_ERR_IO);
	CU_ASSERT_EQUAL(moe_safetensors_open("/dev/null", &st), MOE_ERR_IO);
	CU_ASSERT_EQUAL(mkfifo(temp_path("fifo"), 0600), 0);
	CU_ASSERT_EQUAL(moe_safetensors_open(temp_path("fifo"), &st), MOE_ERR_IO);
}

/* Every proper prefix of a valid file is refused and touches no memory outside it (ASan). */
static void test_truncations(void)
{
	const char *path = temp_path("small.safetensors"), *cut = temp_path("crafted.safetensors");
	char *text;
	size_t n;

	CU_ASSERT_EQUAL_FATAL(write_small(path), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_file_read(path, 1 << 20, &text, &n), MOE_OK);
	for (size_t i = 0; i < n; i++) {
		/* plain writes: n times fsync is slow */
		FILE *f = fopen(cut, "wb");

		fwrite(text, 1, i, f);
		fclose(f);
		expect_refused(cut, "");
	}
	moe_free(text);
}

/* Random corruption of the header: any result but a crash; then every tensor is read in full. */
static void test_corruptions(void)
{
	const char *path = temp_path("small.safetensors"), *bad = temp_path("crafted.safetensors");
	int rounds = moe_test_full() ? 200000 : 3000, opened = 0;
	unsigned seed = (unsigned)moe_test_seed();
	unsigned long sum = 0;
	char *text, *copy;
	uint64_t length;
	size_t n;

	CU_ASSERT_EQUAL_FATAL(write_small(path), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_file_read(path, 1 << 20, &text, &n), MOE_OK);
	memcpy(&length, text, 8);
	copy = malloc(n);
	for (int i = 0; i < rounds; i++) {
		struct moe_safetensors *st = NULL;
		FILE *f = fopen(bad, "wb");

		memcpy(copy, text, n);
		for (int k = 0; k < 1 + i % 3; k++)
			copy[(size_t)rand_r(&seed) % (8 + length)] =
				i & 4 ? (char)rand_r(&seed)
				      : "0123456789,:[]{}\""[rand_r(&seed) % 17];
		fwrite(copy, 1, n, f);
		fclose(f);
		if (moe_safetensors_open(bad, &st) != MOE_OK)
			continue;
		opened++;
		for (size_t k = 0; k < moe_safetensors_count(st); k++) {
			const struct moe_st_tensor *t = moe_safetensors_at(st, k);

			for (size_t b = 0; b < t->bytes; b++)
				sum += ((const unsigned char *)t->data)[b];
		}
		moe_safetensors_close(st);
	}
	printf("%d of %d still open (sum %lu) ", opened, rounds, sum);
	free(copy);
	moe_free(text);
}

static void test_unaligned_and_unsupported(void)
{
	const char *path = craft_text(
		"{\"i8\":" T("I8", "[1]", "[0,1]") ",\"f\":" T("F32", "[2]", "[1,9]") ",\"e8\":" T(
			"F8_E8M0", "[4]", "[12,16]") ",\"five\":" T("BF16", "[1,1,1,1,2]",
								    "[16,20]") "}",
		24);
	struct moe_safetensors *st = NULL;
	const struct moe_st_tensor *t;
	const unsigned char raw[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
	float f[2];

	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(path, &st), MOE_OK);
	CU_ASSERT_EQUAL(moe_safetensors_read_f32(st, "f", 1, (int64_t[]){ 2 }, f), MOE_OK);
	CU_ASSERT_EQUAL(memcmp(f, raw, 8), 0);
	/* dtypes of others do not stop anyone; using them does */
	t = moe_safetensors_find(st, "e8");
	CU_ASSERT_PTR_NOT_NULL_FATAL(t);
	CU_ASSERT_EQUAL(t->dtype, MOE_DTYPE_COUNT);
	CU_ASSERT_STRING_EQUAL(t->dtype_text, "F8_E8M0");
	CU_ASSERT_EQUAL(t->bytes, 4);
	CU_ASSERT_EQUAL(moe_safetensors_get(st, "e8", 1, (int64_t[]){ 4 }, &t),
			MOE_ERR_UNSUPPORTED);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "'e8'"));
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "F8_E8M0"));
	CU_ASSERT_EQUAL(moe_safetensors_find(st, "five")->ndim, 5);
	CU_ASSERT_EQUAL(moe_safetensors_find(st, "five")->bytes, 4);
	moe_safetensors_close(st);
}

static void write_index(const char *dir, const char *text)
{
	char path[4200];

	snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
	CU_ASSERT_EQUAL(moe_file_write(path, text, strlen(text)), MOE_OK);
}

static void write_shard(const char *dir, const char *file, const char *name, float value)
{
	const struct moe_st_item item = {
		.name = name, .dtype = MOE_F32, .ndim = 1, .shape = { 1 }, .data = &value
	};
	char path[4200];

	snprintf(path, sizeof path, "%s/%s", dir, file);
	CU_ASSERT_EQUAL(moe_safetensors_write(path, &item, 1, NULL, 0), MOE_OK);
}

static void test_shards(void)
{
	const char *dir = temp_path("crafted-shards");
	static const struct {
		const char *index;
		enum moe_status status;
		const char *says;
	} bad[] = {
		{ "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"gone.safetensors\"}}",
		  MOE_ERR_IO, "gone.safetensors" },
		{ "{\"weight_map\":{\"a\":\"1.safetensors\",\"c\":\"2.safetensors\"}}",
		  MOE_ERR_FORMAT, "'c' of the index is not in it" },
		{ "{\"weight_map\":{\"a\":\"../1.safetensors\"}}", MOE_ERR_FORMAT,
		  "plain file name" },
		{ "{\"weight_map\":{\"a\":\"/etc/passwd\"}}", MOE_ERR_FORMAT, "plain file name" },
		{ "{\"weight_map\":{\"a\":3}}", MOE_ERR_FORMAT, "not a string" },
		{ "{\"weight_map\":{\"a\":\"1.safetensors\",\"a\":\"2.safetensors\"}}",
		  MOE_ERR_FORMAT, "given twice" },
		{ "{\"weight_map\":{}}", MOE_ERR_FORMAT, "weight_map" },
		{ "{}", MOE_ERR_FORMAT, "weight_map" },
		{ "[]", MOE_ERR_FORMAT, "not a JSON object" },
		{ "{", MOE_ERR_FORMAT, "not valid JSON" },
	};
	struct moe_safetensors *st = NULL;
	float v = 0;

	CU_ASSERT_EQUAL_FATAL(moe_dir_make(dir), MOE_OK);
	CU_ASSERT_EQUAL(moe_safetensors_open(dir, &st), MOE_ERR_IO);
	write_shard(dir, "1.safetensors", "a", 1);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(dir, &st), MOE_OK); /* a lone file */
	moe_safetensors_close(st);
	write_shard(dir, "2.safetensors", "b", 2);
	CU_ASSERT_EQUAL(moe_safetensors_open(dir, &st), MOE_ERR_FORMAT);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "2 *.safetensors"));
	for (size_t i = 0; i < MOE_COUNT(bad); i++) {
		write_index(dir, bad[i].index);
		CU_ASSERT_EQUAL(moe_safetensors_open(dir, &st), bad[i].status);
		CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), bad[i].says));
	}
	write_index(dir, "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(dir, &st), MOE_OK);
	CU_ASSERT_EQUAL(moe_safetensors_file_count(st), 2);
	CU_ASSERT_EQUAL(moe_safetensors_read_f32(st, "b", 1, (int64_t[]){ 1 }, &v), MOE_OK);
	CU_ASSERT_EQUAL(v, 2);
	moe_safetensors_close(st);
	/* the index decides between two copies; a trailing slash is fine */
	write_shard(dir, "2.safetensors", "a", 3);
	write_index(dir, "{\"weight_map\":{\"a\":\"2.safetensors\"}}");
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(temp_path("crafted-shards///"), &st), MOE_OK);
	CU_ASSERT_EQUAL(moe_safetensors_read_f32(st, "a", 1, (int64_t[]){ 1 }, &v), MOE_OK);
	CU_ASSERT_EQUAL(v, 3);
	moe_safetensors_close(st);
}

static void test_many_tensors(void)
{
	enum { COUNT = 40000 };
	struct moe_st_item *items = calloc(COUNT, sizeof *items);
	char(*names)[80] = calloc(COUNT, sizeof *names);
	const char *path = temp_path("many.safetensors");
	struct moe_safetensors *st = NULL;
	double seconds; /* of CPU time: quadratic look-up takes minutes, other programs nothing */
	clock_t start;

	for (int i = 0; i < COUNT; i++) {
		snprintf(names[i], sizeof names[i],
			 "model.layers.%d.mlp.experts.%d.gate_proj.weight", i / 400, i % 400);
		items[i] = (struct moe_st_item){ .name = names[i],
						 .dtype = MOE_F32,
						 .ndim = 1,
						 .shape = { 1 },
						 .data = small_values };
	}
	start = clock();
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_write(path, items, COUNT, NULL, 0), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(path, &st), MOE_OK);
	for (int i = 0; i < COUNT; i++)
		if (!moe_safetensors_find(st, names[i]))
			CU_FAIL("a tensor is lost");
	seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
	printf("%.2f s ", seconds);
	CU_ASSERT(seconds < 10);
	moe_safetensors_close(st);
	free(items);
	free(names);
}

static void *hook_alloc(size_t n)
{
	return moe_alloc(n, 1);
}

/* Runs op with the 1st, 2nd, ... allocation failing, cJSON's included, until it succeeds. */
static void inject(enum moe_status (*op)(void))
{
	cJSON_Hooks hooks = { hook_alloc, moe_free };
	int n = 0;

	cJSON_InitHooks(&hooks);
	for (;; n++) {
		enum moe_status status;

		moe_alloc_fail_after(n);
		status = op();
		moe_alloc_fail_after(-1);
		if (status == MOE_OK)
			break;
		/* cJSON cannot tell a failed allocation from bad JSON */
		CU_ASSERT(status == MOE_ERR_NOMEM || status == MOE_ERR_FORMAT);
		if (n > 100000) {
			CU_FAIL("never succeeds");
			break;
		}
	}
	cJSON_InitHooks(NULL);
	printf("%d allocations ", n);
	CU_ASSERT(n > 3);
}

static enum moe_status op_write(void)
{
	return write_small(temp_path("injected.safetensors"));
}

static enum moe_status op_open_small(void)
{
	struct moe_safetensors *st = NULL;

	MOE_TRY(moe_safetensors_open(temp_path("small.safetensors"), &st));
	moe_safetensors_close(st);
	return MOE_OK;
}

static enum moe_status op_open_shards(void)
{
	struct moe_safetensors *st = NULL;

	MOE_TRY(moe_safetensors_open(temp_path("crafted-shards"), &st));
	moe_safetensors_close(st);
	return MOE_OK;
}

static void test_failing_allocations(void)
{
	const char *old = temp_path("injected.safetensors");

	CU_ASSERT_EQUAL_FATAL(write_small(old), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(write_small(temp_path("small.safetensors")), MOE_OK);
	inject(op_write);
	check_small(temp_path("injected.safetensors"));
	inject(op_open_small);
	inject(op_open_shards);
}

/* A file that is cut while it is read is an error, not a signal. */
static void test_fetch(void)
{
	const char *path = temp_path("cut.safetensors");
	struct moe_safetensors *st = NULL;
	const struct moe_st_tensor *t;
	char out[24];

	CU_ASSERT_EQUAL_FATAL(write_small(path), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(path, &st), MOE_OK);
	t = moe_safetensors_find(st, "weight");
	CU_ASSERT_EQUAL(moe_safetensors_fetch(st, t->data, 24, out), MOE_OK);
	CU_ASSERT_EQUAL(memcmp(out, small_values, 24), 0);
	CU_ASSERT_EQUAL(moe_safetensors_fetch(st, (const char *)t->data + 4, 8, out), MOE_OK);
	CU_ASSERT_EQUAL(memcmp(out, small_values + 1, 8), 0);
	CU_ASSERT_EQUAL(moe_safetensors_fetch(st, small_values, 24, out), MOE_OK); /* in no file */
	CU_ASSERT_EQUAL(truncate(path, 100), 0);
	CU_ASSERT_EQUAL(moe_safetensors_fetch(st, t->data, 24, out), MOE_ERR_IO);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "cut.safetensors: ends at byte"));
	moe_safetensors_close(st);
}

/* Every checkpoint of the shared folder opens, and all of its tensors can be read. */
static void test_shared_checkpoints(void)
{
	static const char *const names[] = {
		"qwen3moe",	     "qwen3moe_fused",
		"mixtral_random",    "deepseek_v3",
		"deepseek_v3_fused", "glm4_moe",
		"glm4_moe_fused",    "adapter_kt/adapter_model.safetensors"
	};

	for (size_t i = 0; i < MOE_COUNT(names); i++) {
		char relative[128];
		struct moe_safetensors *st = NULL;
		const char *path;

		snprintf(relative, sizeof relative, "oracle/ckpt/%s", names[i]);
		path = moe_test_shared(relative);
		if (!path) {
			moe_test_skip("../shared/%s is absent", relative);
			continue;
		}
		CU_ASSERT_EQUAL(moe_safetensors_open(path, &st), MOE_OK);
		if (!st)
			continue;
		CU_ASSERT(moe_safetensors_count(st) > 5);
		for (size_t k = 0; k < moe_safetensors_count(st); k++) {
			const struct moe_st_tensor *t = moe_safetensors_at(st, k);
			float *f = malloc(t->bytes * 4);

			CU_ASSERT_PTR_EQUAL(moe_safetensors_find(st, t->name), t);
			CU_ASSERT_EQUAL(moe_safetensors_read_f32(st, t->name, t->ndim, t->shape, f),
					MOE_OK);
			free(f);
		}
		moe_safetensors_close(st);
	}
}

const struct moe_test moe_suite_tests[] = {
	{ "hostile headers", test_hostile_headers },
	{ "hostile lengths and files", test_hostile_lengths },
	{ "truncation at every byte", test_truncations },
	{ "random corruption", test_corruptions },
	{ "unaligned and unsupported tensors", test_unaligned_and_unsupported },
	{ "shards and index", test_shards },
	{ "40,000 tensors", test_many_tensors },
	{ "failing allocations", test_failing_allocations },
	{ "reading without the mapping", test_fetch },
	{ "shared checkpoints", test_shared_checkpoints },
	{ NULL, NULL },
};
