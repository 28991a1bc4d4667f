/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF files with hand-made blocks: what each type decodes to, how it is read, and what malformed
 * files are told. */
#include "tests/gguf_bytes.h"
#include "tests/harness.h"

#include "model/arch.h"
#include "model/file.h"
#include "model/quantised.h"

#include <math.h>
#include <stdio.h>

#define H 256
#define N_TENSORS 14

/* One layer of two experts, hidden 256, heads 1 x 2; the last matrix is of the type that is looked
 * at, [2, 1, 256]. */
static const struct {
	const char *name;
	int ndim;
	uint64_t dim[3]; /* as GGUF has them */
} tensors[N_TENSORS] = {
	{ "token_embd.weight", 2, { H, 4 } },
	{ "output_norm.weight", 1, { H } },
	{ "blk.0.attn_norm.weight", 1, { H } },
	{ "blk.0.ffn_norm.weight", 1, { H } },
	{ "blk.0.attn_q.weight", 2, { H, 2 } },
	{ "blk.0.attn_k.weight", 2, { H, 2 } },
	{ "blk.0.attn_v.weight", 2, { H, 2 } },
	{ "blk.0.attn_output.weight", 2, { 2, H } },
	{ "blk.0.attn_q_norm.weight", 1, { 2 } },
	{ "blk.0.attn_k_norm.weight", 1, { 2 } },
	{ "blk.0.ffn_gate_inp.weight", 2, { H, 2 } },
	{ "blk.0.ffn_up_exps.weight", 3, { H, 1, 2 } },
	{ "blk.0.ffn_down_exps.weight", 3, { 1, H, 2 } },
	{ "blk.0.ffn_gate_exps.weight", 3, { H, 1, 2 } },
};

struct plan {
	uint32_t version, type, ndim;
	uint64_t more_tensors, more_keys, offset;
	const char *name, *arch;
	const struct gguf_bytes *key, *tensor; /* one more of each, before those that are always there */
};

/* blocks: of the last matrix, all experts. The others are F16 zeros. */
static void make(struct gguf_bytes *f, const struct plan *p, const void *blocks, size_t bytes)
{
	static const char *const keys[] = { "block_count",	    "context_length",
					    "embedding_length",	    "attention.head_count",
					    "attention.key_length", "attention.value_length",
					    "expert_count",	    "expert_used_count" };
	static const uint32_t values[] = { 1, 64, H, 1, 2, 2, 2, 1 };
	uint64_t at = 0;
	char key[64];

	f->n = 0;
	put(f, "GGUF", 4);
	put32(f, p->version ? p->version : 3);
	put64(f, N_TENSORS + p->more_tensors + (p->tensor != NULL));
	put64(f, 2 + MOE_COUNT(keys) + p->more_keys + (p->key != NULL));
	if (p->key)
		put(f, p->key->bytes, p->key->n);
	put_key_text(f, "general.architecture", p->arch ? p->arch : "qwen3moe");
	for (size_t i = 0; i < MOE_COUNT(keys); i++) {
		snprintf(key, sizeof key, "qwen3moe.%s", keys[i]);
		put_key32(f, key, values[i]);
	}
	put_key_float(f, "qwen3moe.attention.layer_norm_rms_epsilon", 1e-6f);
	if (p->tensor)
		put(f, p->tensor->bytes, p->tensor->n);
	for (int i = 0; i < N_TENSORS; i++) {
		bool last = i == N_TENSORS - 1;
		uint64_t count = 2;

		put_text(f, last && p->name ? p->name : tensors[i].name);
		put32(f, last && p->ndim ? p->ndim : (uint32_t)tensors[i].ndim);
		for (int d = 0; d < tensors[i].ndim; d++) {
			put64(f, tensors[i].dim[d]);
			count *= tensors[i].dim[d];
		}
		put32(f, last ? p->type : 1);
		put64(f, last && p->offset ? p->offset : at);
		at += last ? 0 : (count + 31) / 32 * 32;
	}
	f->n = (f->n + 31) / 32 * 32;
	f->n += at;
	put(f, blocks, bytes);
}

static const char *dir;

static const char *write_file(const struct gguf_bytes *f, size_t n)
{
	static char path[512];

	snprintf(path, sizeof path, "%s/hand.gguf", dir ? dir : (dir = moe_test_dir()));
	CU_ASSERT_EQUAL(moe_file_write(path, f->bytes, n), MOE_OK);
	return path;
}

/* Expert e's gate: what it means, and what it is read as. */
static void read_gate(const struct gguf_bytes *f, int e, float *meant, float *as,
		      struct moe_coding *coding)
{
	struct moe_safetensors *st = NULL;
	struct moe_st_quantised t;
	char name[96];
	bool found = false;

	CU_ASSERT_EQUAL_FATAL(moe_safetensors_open(write_file(f, f->n), &st), MOE_OK);
	snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.gate_proj.weight", e);
	CU_ASSERT_EQUAL(moe_st_quantised_find(st, name, 0, 1, H, &t, &found), MOE_OK);
	CU_ASSERT_FATAL(found);
	moe_st_quantised_row(t.codes, &t.q, 0, 0, H, meant);
	for (int64_t k = 0; k < H; k += 24) /* pieces that are no blocks */
		moe_dequantise_row(&t.q, 0, k, MOE_MIN(24, H - k), as + k);
	*coding = t.q.coding;
	moe_safetensors_close(st);
}

static void put_half(uint8_t *at, float v)
{
	uint16_t h = moe_f32_to_f16(v);

	memcpy(at, &h, 2);
}

static void check_exact(const struct plan *p, const uint8_t *blocks, size_t bytes,
			const float *want, int bits, int64_t group)
{
	static struct gguf_bytes f;
	struct moe_coding coding;
	float meant[H], as[H];

	make(&f, p, blocks, bytes);
	read_gate(&f, 1, meant, as, &coding);
	CU_ASSERT_EQUAL(coding.format->bits, bits);
	CU_ASSERT_EQUAL(coding.group, group);
	for (int i = 0; i < H; i++) {
		CU_ASSERT_EQUAL(meant[i], want[i]);
		CU_ASSERT_EQUAL(as[i], want[i]);
	}
}

static void test_q8_0_and_q4_0(void)
{
	uint8_t b8[16 * 34] = { 0 }, b4[16 * 18] = { 0 };
	float want8[H], want4[H];

	for (int g = 0; g < 8; g++) { /* the second expert */
		float d = ldexpf(1 + g, -8);

		put_half(b8 + (8 + g) * 34, d);
		put_half(b4 + (8 + g) * 18, -d);
		for (int i = 0; i < 32; i++) {
			int code = (g * 37 + i * 11) % 256 - 128, nibble = (g + 3 * i) % 16;

			b8[(8 + g) * 34 + 2 + i] = (uint8_t)code;
			want8[g * 32 + i] = d * (float)code;
			b4[(8 + g) * 18 + 2 + i % 16] |= (uint8_t)(nibble << (i < 16 ? 0 : 4));
			want4[g * 32 + i] = -d * (float)(nibble - 8);
		}
	}
	check_exact(&(struct plan){ .type = 8 }, b8, sizeof b8, want8, 8, 32);
	check_exact(&(struct plan){ .type = 2 }, b4, sizeof b4, want4, 4, 32);
}

static void test_q6_k(void)
{
	uint8_t b[2 * 210] = { 0 }, *at = b + 210;
	float want[H], d = 0x1p-10f;

	put_half(at + 208, d);
	for (int g = 0; g < 16; g++)
		at[192 + g] = (uint8_t)(int8_t)(g * 9 - 70);
	for (int i = 0; i < H; i++) {
		int value = (i * 29 + i / 7) % 64, half = i / 128, in = i % 128, l = in % 32,
		    row = in / 32;

		at[half * 64 + row % 2 * 32 + l] |= (uint8_t)((value & 15) << (row < 2 ? 0 : 4));
		at[128 + half * 32 + l] |= (uint8_t)(value >> 4 << 2 * row);
		want[i] = d * (float)(i / 16 * 9 - 70) * (float)(value - 32);
	}
	check_exact(&(struct plan){ .type = 14 }, b, sizeof b, want, 8, 16);
}

/* Weights d q + m: meant exactly, read with a shift of half a step at most. */
static void check_near(const struct plan *p, const uint8_t *blocks, size_t bytes, const float *want,
		       const float *d)
{
	static struct gguf_bytes f;
	struct moe_coding coding;
	float meant[H], as[H];

	make(&f, p, blocks, bytes);
	read_gate(&f, 1, meant, as, &coding);
	CU_ASSERT(coding.zero && coding.format->bits == 4 && coding.group == 32);
	for (int i = 0; i < H; i++) {
		CU_ASSERT_EQUAL(meant[i], want[i]);
		CU_ASSERT(fabsf(as[i] - want[i]) <= 1.1f * d[i / 32]);
	}
}

static void test_q4_1_and_q4_k(void)
{
	uint8_t b1[16 * 20] = { 0 }, bk[2 * 144] = { 0 }, *k = bk + 144;
	float want1[H], wantk[H], d1[8], dk[8];
	static const int sc[8] = { 1, 63, 17, 40, 2, 33, 62, 48 },
			 mn[8] = { 7, 60, 9, 33, 10, 45, 63, 50 };

	put_half(k, 0x1p-9f);
	put_half(k + 2, 0x1p-8f);
	for (int g = 0; g < 8; g++) {
		float m =
			g == 7 ? 3
			       : -ldexpf(3.3f + (float)g,
					 -6); /* the last one has no zero inside: quantised anew */

		put_half(b1 + (8 + g) * 20, ldexpf(1, -7));
		put_half(b1 + (8 + g) * 20 + 2, m);
		m = moe_f16_to_f32(moe_f32_to_f16(m));
		d1[g] = g == 7 ? .25f : ldexpf(1, -7);
		if (g < 4) {
			k[4 + g] |= (uint8_t)sc[g];
			k[8 + g] |= (uint8_t)mn[g];
		} else {
			k[4 + g + 4] = (uint8_t)((sc[g] & 15) | (mn[g] & 15) << 4);
			k[g] |= (uint8_t)(sc[g] >> 4 << 6);
			k[4 + g] |= (uint8_t)(mn[g] >> 4 << 6);
		}
		dk[g] = 0x1p-9f * (float)sc[g];
		for (int i = 0; i < 32; i++) {
			int q = (5 * i + g) % 16;

			b1[(8 + g) * 20 + 4 + i % 16] |= (uint8_t)(q << (i < 16 ? 0 : 4));
			want1[g * 32 + i] = ldexpf(1, -7) * (float)q + m;
			k[16 + g / 2 * 32 + i] |= (uint8_t)(q << (g % 2 ? 4 : 0));
			wantk[g * 32 + i] = dk[g] * (float)q - 0x1p-8f * (float)mn[g];
		}
		if (0x1p-8f * (float)mn[g] > 15.5f * dk[g]) /* all weights below 0 */
			dk[g] = 0x1p-8f * (float)mn[g] / 15;
	}
	check_near(&(struct plan){ .type = 3 }, b1, sizeof b1, want1, d1);
	check_near(&(struct plan){ .type = 12 }, bk, sizeof bk, wantk, dk);
}

/* ---- malformed ---- */

static void check_refused(const struct gguf_bytes *f, size_t n, enum moe_status want, const char *text)
{
	struct moe_safetensors *st = NULL;
	enum moe_status got = moe_safetensors_open(write_file(f, n), &st);

	CU_ASSERT_EQUAL(got, want);
	CU_ASSERT(strstr(moe_last_error(), "hand.gguf") != NULL);
	if (!strstr(moe_last_error(), text))
		printf("\n  \"%s\" without \"%s\"\n", moe_last_error(), text);
	CU_ASSERT(strstr(moe_last_error(), text) != NULL);
	if (got == MOE_OK)
		moe_safetensors_close(st);
}

static void test_malformed(void)
{
	static struct gguf_bytes f;
	static const uint8_t blocks[16 * 34];
	static const struct {
		struct plan plan;
		enum moe_status status;
		const char *text;
	} bad[] = {
		{ { .version = 1 }, MOE_ERR_UNSUPPORTED, "version 1" },
		{ { .version = 3u << 24 }, MOE_ERR_UNSUPPORTED, "big-endian" },
		{ { .type = 8, .more_tensors = 1ull << 60 }, MOE_ERR_FORMAT, "more than a file" },
		{ { .type = 8, .more_keys = 1ull << 60 }, MOE_ERR_FORMAT, "more than a file" },
		{ { .type = 8, .ndim = 9 },
		  MOE_ERR_FORMAT,
		  "'blk.0.ffn_gate_exps.weight' has 9 dimensions" },
		{ { .type = 8, .offset = 1 << 20 },
		  MOE_ERR_FORMAT,
		  "'blk.0.ffn_gate_exps.weight' lies at" },
		{ { .type = 8, .offset = 33 }, MOE_ERR_FORMAT, "no multiple of the alignment" },
		{ { .type = 8, .offset = UINT64_MAX - 31 },
		  MOE_ERR_FORMAT,
		  "'blk.0.ffn_gate_exps.weight' lies at" },
		{ { .type = 13 },
		  MOE_ERR_UNSUPPORTED,
		  "'blk.0.ffn_gate_exps.weight' has type Q5_K" },
		{ { .type = 777 }, MOE_ERR_UNSUPPORTED, "type ? (777)" },
		{ { .type = 8, .name = "blk.0.sinks.weight" },
		  MOE_ERR_FORMAT,
		  "'blk.0.ffn_gate_exps.weight' is missing" },
		{ { .type = 8, .name = "blk.0.attn_q.weight" },
		  MOE_ERR_FORMAT,
		  "'blk.0.attn_q.weight' is given twice" },
		{ { .type = 8, .name = "a b" }, MOE_ERR_FORMAT, "printable" },
		{ { .type = 8, .arch = "bert" }, MOE_ERR_UNSUPPORTED, "architecture 'bert'" },
	};

	for (size_t i = 0; i < MOE_COUNT(bad); i++) {
		make(&f, &bad[i].plan, blocks, sizeof blocks);
		check_refused(&f, f.n, bad[i].status, bad[i].text);
	}
	make(&f, &(struct plan){ .type = 8 }, blocks, sizeof blocks);
	check_refused(&f, f.n - 1, MOE_ERR_FORMAT, "truncated");
	check_refused(&f, 3, MOE_ERR_FORMAT, "truncated");
	for (size_t n = 4; n < 1200; n += 7) /* inside the header */
		check_refused(&f, n, MOE_ERR_FORMAT, "");
	f.bytes[0] = 'X';
	check_refused(&f, f.n, MOE_ERR_FORMAT, "no GGUF file");
}

/* ---- keys and tensors that cannot be ---- */

enum { U32 = 4, F32 = 6, ARRAY = 9, U64 = 10 }; /* of values */

/* Puts `with` of the same length in the place of a name, or changes 4 bytes that far behind it. */
static void spoil(struct gguf_bytes *f, const char *name, const char *with, size_t behind, uint32_t value)
{
	size_t n = strlen(name);

	for (size_t i = 0; i + n <= f->n; i++) {
		if (memcmp(f->bytes + i, name, n))
			continue;
		if (with)
			memcpy(f->bytes + i, with, n);
		else
			memcpy(f->bytes + i + n + behind, &value, 4);
		return;
	}
	CU_FAIL("no such name");
}

static void test_spoilt(void)
{
	static struct gguf_bytes f;
	static const uint8_t blocks[16 * 34];
	static const struct {
		const char *name, *with; /* or, with NULL: */
		size_t behind;
		uint32_t value;
		const char *text;
	} bad[] = {
		{ "general.architecture", "general.architectura", 0, 0, "general.architecture is missing" },
		{ "qwen3moe.block_count", "qwen3moe.block_cound", 0, 0, "key 'qwen3moe.block_count' is missing" },
		{ "norm_rms_epsilon", "norm_rms_epsilom", 0, 0, "layer_norm_rms_epsilon' is missing" },
		{ "qwen3moe.expert_count", NULL, 4, 0, "a dense 'qwen3moe' (qwen3moe.expert_count is 0)" },
		{ "qwen3moe.block_count", NULL, 4, 0, "key 'qwen3moe.block_count' is 0; 1 to" },
		{ "value_length", NULL, 4, 4, "heads have 2 columns of keys, 4 of values" },
		{ "norm_rms_epsilon", NULL, 4, 0x7f800000, "layer_norm_rms_epsilon' is not finite" },
		{ "qwen3moe.block_count", NULL, 0, F32, "'qwen3moe.block_count' is not an integer" },
		{ "qwen3moe.block_count", NULL, 0, 99, "'qwen3moe.block_count' has the value type 99" },
		{ "blk.0.ffn_gate_exps.weight", NULL, 4, 0, "has the size 0 in dimension 0" },
		{ "blk.0.ffn_gate_exps.weight", NULL, 8, 0x7fffffff, "the shape of tensor 'blk.0.ffn_gate_exps.weight'" },
		{ "blk.0.ffn_gate_exps.weight", NULL, 4, 250, "rows of 250 weights; Q8_0 needs a multiple of 32" },
		{ "blk.0.attn_q_norm.weight", "blk.0.attn_z_norm.weight", 0, 0, "'blk.0.attn_z_norm.weight' has no place" },
		{ "blk.0.attn_q_norm.weight", "blk.7.attn_q_norm.weight", 0, 0, "is of layer 7; there are 1" },
		{ "blk.0.ffn_norm.weight", "blk.000.attn_q.weight", 0, 0, "q_proj.weight is there already" },
		{ "blk.0.attn_norm.weight", NULL, 12, 8, "quantised tensors are matrices" },
	};

	for (size_t i = 0; i < MOE_COUNT(bad); i++) {
		enum moe_status st = strstr(bad[i].text, "dense") || strstr(bad[i].text, "heads") || strstr(bad[i].text, "no place")
					     ? MOE_ERR_UNSUPPORTED
					     : MOE_ERR_FORMAT;

		make(&f, &(struct plan){ .type = 8 }, blocks, sizeof blocks);
		spoil(&f, bad[i].name, bad[i].with, bad[i].behind, bad[i].value);
		check_refused(&f, f.n, st, bad[i].text);
	}
}

static void test_spoilt_keys(void)
{
	static struct gguf_bytes f, key;
	static const uint8_t blocks[16 * 34];
	static const struct {
		const char *name;
		uint32_t type, inner; /* inner: of an array's values */
		uint64_t value;	      /* or how many */
		const char *text;
	} bad[] = {
		{ "general.alignment", U32, 0, 24, "general.alignment is 24; a power of two" },
		{ "general.alignment", U64, 0, 1ull << 63, "'general.alignment' is 9223372036854775808, beyond" },
		{ "split.count", U32, 0, 3, "one of 3 files, 1 found" },
		{ "split.tensors.count", U32, 0, 99, "the files have 14 tensors, split.tensors.count is 99" },
		{ "x.y", ARRAY, 99, 0, "'x.y' is an array of type 99" },
		{ "x.y", ARRAY, U32, 1ull << 40, "'x.y' has 1099511627776 values, more than the file" },
		{ "qwen3moe.rope.scaling.type", U32, 0, 1, "'qwen3moe.rope.scaling.type' is not a text" },
	};

	for (size_t i = 0; i < MOE_COUNT(bad); i++) {
		key.n = 0;
		put_text(&key, bad[i].name);
		put32(&key, bad[i].type);
		if (bad[i].type == ARRAY)
			put32(&key, bad[i].inner);
		if (bad[i].type == U32)
			put32(&key, (uint32_t)bad[i].value);
		else
			put64(&key, bad[i].value);
		make(&f, &(struct plan){ .type = 8, .key = &key }, blocks, sizeof blocks);
		check_refused(&f, f.n, MOE_ERR_FORMAT, bad[i].text);
	}
}

static void test_spoilt_tensors(void)
{
	static struct gguf_bytes f, tensor;
	static const uint8_t blocks[16 * 34];
	static const struct {
		const char *name;
		enum moe_status status;
		const char *text;
	} bad[] = {
		{ "rope_freqs.weight", MOE_ERR_UNSUPPORTED, "'rope_freqs.weight' scales rotary frequencies" },
		{ "blk.0.ffn_gate_shexp.weight", MOE_ERR_FORMAT, "'blk.0.ffn_gate_exps.weight' and its like have wrong shapes" },
	};

	for (size_t i = 0; i < MOE_COUNT(bad); i++) {
		tensor.n = 0;
		put_text(&tensor, bad[i].name);
		put32(&tensor, 1);
		put64(&tensor, 16);
		put32(&tensor, 1);
		put64(&tensor, 0);
		make(&f, &(struct plan){ .type = 8, .tensor = &tensor }, blocks, sizeof blocks);
		check_refused(&f, f.n, bad[i].status, bad[i].text);
	}
}

static void test_config(void)
{
	static struct gguf_bytes f;
	static const uint8_t blocks[16 * 34];
	static struct moe_arch arch;

	make(&f, &(struct plan){ .type = 8 }, blocks, sizeof blocks);
	CU_ASSERT_EQUAL_FATAL(moe_arch_load(write_file(&f, f.n), &arch), MOE_OK);
	CU_ASSERT_STRING_EQUAL(arch.name, "qwen3_moe");
	CU_ASSERT(arch.hidden == H && arch.vocab == 4 && arch.n_layers == 1 &&
		  arch.n_experts == 2 && arch.top_k == 1);
	CU_ASSERT(arch.moe_intermediate == 1 && arch.head_dim == 2 && arch.max_positions == 64);
	CU_ASSERT(arch.norm_topk_prob && arch.tie_embeddings && arch.rms_eps == 1e-6);
}

const char moe_suite_name[] = "gguf";

const struct moe_test moe_suite_tests[] = {
	{ "Q8_0 and Q4_0 are exact", test_q8_0_and_q4_0 },
	{ "Q6_K is exact", test_q6_k },
	{ "Q4_1 and Q4_K come near", test_q4_1_and_q4_k },
	{ "malformed files are refused by name", test_malformed },
	{ "spoilt names, types and sizes", test_spoilt },
	{ "keys that cannot be", test_spoilt_keys },
	{ "tensors that cannot be", test_spoilt_tensors },
	{ "config", test_config },
	{ NULL, NULL },
};
