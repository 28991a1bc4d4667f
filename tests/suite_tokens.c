/* SPDX-License-Identifier: Apache-2.0 */
/* The token file: what is accepted, what is refused and why. */
#include "tests/harness.h"
#include "model/file.h"
#include "model/json.h"
#include "model/readers/safetensors_writer.h"
#include "model/tokens.h"

#include <stdio.h>

const char moe_suite_name[] = "tokens";

/* Three documents of 3, 2 and 1 tokens in two rows; what a test changes is refused. */
struct sample {
	int32_t ids[6], labels[6];
	int64_t docs[4], packs[3];
	int64_t n_ids, n_labels, n_docs, n_packs; /* lengths of the tensors */
	const char *format, *vocab, *cutoff;
	enum moe_dtype ids_dtype;
};

static const struct sample good = {
	.ids = { 5, 6, 7, 8, 9, 0 },
	.labels = { -100, 6, 7, 8, -100, 0 },
	.docs = { 0, 3, 5, 6 },
	.packs = { 0, 2, 3 },
	.n_ids = 6,
	.n_labels = 6,
	.n_docs = 4,
	.n_packs = 3,
	.format = MOE_TOKENS_FORMAT,
	.vocab = "10",
	.cutoff = "32",
	.ids_dtype = MOE_I32,
};

static const char *token_path(void)
{
	static char path[4096];

	snprintf(path, sizeof path, "%s/tokens.safetensors", moe_test_dir());
	return path;
}

static void write_sample(const struct sample *s)
{
	const struct moe_st_item items[] = {
		{ .name = "input_ids",
		  .dtype = s->ids_dtype,
		  .ndim = 1,
		  .shape = { s->n_ids },
		  .data = s->ids },
		{ .name = "labels",
		  .dtype = MOE_I32,
		  .ndim = 1,
		  .shape = { s->n_labels },
		  .data = s->labels },
		{ .name = "doc_offsets",
		  .dtype = MOE_I64,
		  .ndim = 1,
		  .shape = { s->n_docs },
		  .data = s->docs },
		{ .name = "pack_offsets",
		  .dtype = MOE_I64,
		  .ndim = 1,
		  .shape = { s->n_packs },
		  .data = s->packs },
	};
	const struct moe_st_meta meta[] = {
		{ "format", s->format },
		{ "hash", "abc" },
		{ "tokenizer_vocab_size", s->vocab },
		{ "source", "x.jsonl" },
		{ "template", "chatml" },
		{ "cutoff_len", s->cutoff },
	};

	CU_ASSERT_EQUAL_FATAL(
		moe_safetensors_write(token_path(), items, MOE_COUNT(items), meta, MOE_COUNT(meta)),
		MOE_OK);
}

static void check_good(const struct moe_tokens *t)
{
	CU_ASSERT(t->n_tokens == 6 && t->n_docs == 3 && t->n_rows == 2);
	/* the first token of a document is predicted by nothing */
	CU_ASSERT_EQUAL(t->n_trained, 2);
	CU_ASSERT(t->max_doc_tokens == 3 && t->max_row_tokens == 5 && t->vocab == 10);
	CU_ASSERT_EQUAL(t->cutoff_len, 32);
	CU_ASSERT(!memcmp(t->input_ids, good.ids, sizeof good.ids));
	CU_ASSERT(!memcmp(t->labels, good.labels, sizeof good.labels));
	CU_ASSERT(!memcmp(t->doc_offsets, good.docs, sizeof good.docs));
	CU_ASSERT(!memcmp(t->pack_offsets, good.packs, sizeof good.packs));
	CU_ASSERT_STRING_EQUAL(t->hash, "abc");
	CU_ASSERT_STRING_EQUAL(t->source, "x.jsonl");
	CU_ASSERT_STRING_EQUAL(t->chat_template, "chatml");
}

static void test_good(void)
{
	struct moe_tokens *t = NULL;

	write_sample(&good);
	CU_ASSERT_EQUAL_FATAL(moe_tokens_open(token_path(), 0, &t), MOE_OK);
	check_good(t);
	moe_tokens_close(t);
	CU_ASSERT_EQUAL_FATAL(moe_tokens_open(token_path(), 100, &t), MOE_OK);
	CU_ASSERT_EQUAL(t->vocab, 100);
	moe_tokens_close(t);
	/* the model's vocabulary counts, not the tokenizer's */
	CU_ASSERT_EQUAL(moe_tokens_open(token_path(), 9, &t), MOE_ERR_FORMAT);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), "input_ids[4] is 9"));
	CU_ASSERT_EQUAL(moe_tokens_open("/nonexistent", 0, &t), MOE_ERR_IO);
}

static void expect_refused(const struct sample *s, const char *says)
{
	struct moe_tokens *t = NULL;

	write_sample(s);
	CU_ASSERT_EQUAL(moe_tokens_open(token_path(), 0, &t), MOE_ERR_FORMAT);
	if (!strstr(moe_last_error(), says) || !strstr(moe_last_error(), "tokens.safetensors")) {
		printf("expected '%s' in: %s\n", says, moe_last_error());
		CU_FAIL("another error text");
	}
}

/* good with one field changed. */
#define REFUSED(field, value, says)                                                                \
	do {                                                                                       \
		struct sample changed = good;                                                      \
		changed.field = value;                                                             \
		expect_refused(&changed, says);                                                    \
	} while (0)

static void test_refusals(void)
{
	struct sample s = good;

	REFUSED(format, "moesaic-tokens-2", "moesaic-tokens-2");
	REFUSED(vocab, "", "tokenizer_vocab_size");
	REFUSED(vocab, "ten", "tokenizer_vocab_size");
	REFUSED(cutoff, "-3", "cutoff_len");
	REFUSED(ids_dtype, MOE_F32, "expected I32");
	REFUSED(ids[2], 10, "input_ids[2] is 10");
	REFUSED(ids[2], -1, "input_ids[2] is -1");
	REFUSED(labels[2], -1, "labels[2] is -1");
	REFUSED(labels[2], 10, "labels[2] is 10");
	REFUSED(n_labels, 5, "labels has 5");
	REFUSED(docs[0], 1, "doc_offsets starts at 1");
	REFUSED(docs[1], 0, "doc_offsets[1] is 0");
	REFUSED(docs[1], -5, "doc_offsets[1] is -5");
	REFUSED(docs[1], INT64_MAX, "doc_offsets[1]");
	REFUSED(docs[3], 5, "doc_offsets[3] is 5");
	REFUSED(docs[3], 7, "doc_offsets[3] is 7");
	REFUSED(n_docs, 3, "doc_offsets ends at 5");
	REFUSED(n_docs, 1, "no documents");
	REFUSED(n_docs, 0, "no documents");
	REFUSED(n_packs, 1, "no documents");
	REFUSED(packs[0], 1, "pack_offsets starts");
	REFUSED(packs[1], 3, "pack_offsets[2]");
	REFUSED(packs[2], 2, "pack_offsets[2]");
	for (int i = 0; i < 6; i++)
		s.labels[i] = -100;
	expect_refused(&s, "no token is trained");
	s.labels[0] = s.labels[3] = 5; /* first tokens only: nothing predicts them */
	expect_refused(&s, "no token is trained");
}

/* The same tensors at odd offsets, as the format allows. */
static void test_unaligned(void)
{
	static const char header[] =
		"{\"__metadata__\":{\"format\":\"moesaic-tokens-1\",\"tokenizer_vocab_size\":"
		"\"10\","
		"\"hash\":\"abc\",\"source\":\"x.jsonl\",\"template\":\"chatml\",\"cutoff_len\":"
		"\"32\"},"
		"\"input_ids\":{\"dtype\":\"I32\",\"shape\":[6],\"data_offsets\":[1,25]},"
		"\"labels\":{\"dtype\":\"I32\",\"shape\":[6],\"data_offsets\":[25,49]},"
		"\"doc_offsets\":{\"dtype\":\"I64\",\"shape\":[4],\"data_offsets\":[49,81]},"
		"\"pack_offsets\":{\"dtype\":\"I64\",\"shape\":[3],\"data_offsets\":[81,105]}}";
	char file[8 + sizeof header + 128] = { 0 }, *p = file + 8 + strlen(header) + 1;
	uint64_t length = strlen(header);
	struct moe_tokens *t = NULL;

	memcpy(file, &length, 8);
	memcpy(file + 8, header, length);
	memcpy(p, good.ids, 24);
	memcpy(p + 24, good.labels, 24);
	memcpy(p + 48, good.docs, 32);
	memcpy(p + 80, good.packs, 24);
	CU_ASSERT_EQUAL(moe_file_write(token_path(), file, 8 + length + 105), MOE_OK);
	CU_ASSERT_EQUAL_FATAL(moe_tokens_open(token_path(), 0, &t), MOE_OK);
	check_good(t);
	CU_ASSERT_EQUAL((uintptr_t)t->doc_offsets % 8, 0);
	moe_tokens_close(t);
}

static void *hook_alloc(size_t n)
{
	return moe_alloc(n, 1);
}

static void test_failing_allocations(void)
{
	cJSON_Hooks hooks = { hook_alloc, moe_free };
	enum moe_status status = MOE_ERR_NOMEM;

	test_unaligned(); /* leaves the file that needs copies */
	cJSON_InitHooks(&hooks);
	for (int n = 0; status != MOE_OK && n < 10000; n++) {
		struct moe_tokens *t = NULL;

		moe_alloc_fail_after(n);
		status = moe_tokens_open(token_path(), 0, &t);
		moe_alloc_fail_after(-1);
		CU_ASSERT(status == MOE_OK || status == MOE_ERR_NOMEM || status == MOE_ERR_FORMAT);
		moe_tokens_close(t);
	}
	cJSON_InitHooks(NULL);
	CU_ASSERT_EQUAL(status, MOE_OK);
}

const struct moe_test moe_suite_tests[] = {
	{ "a good file", test_good },
	{ "refusals", test_refusals },
	{ "unaligned tensors", test_unaligned },
	{ "failing allocations", test_failing_allocations },
	{ NULL, NULL },
};
