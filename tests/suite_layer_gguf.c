/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Experts of a layer's object from GGUF files that hold nothing else of a model, in every type that the reader has:
 * blocks are made here of random weights, so that what is loaded can be compared with these too.
 */
#define GGUF_BYTES (4 << 20)
#include "tests/gguf_bytes.h"
#include "tests/layer_check.h"

#include "codelets/format.h"
#include "model/file.h"
#include "model/quantised.h"
#include "model/readers/gguf.h"
#include "model/readers/safetensors.h"

const char moe_suite_name[] = "layer_gguf";

#define SUPER 256

/* Rows of whole K blocks. */
static const struct block_case shape = { .E = 2, .k = 2, .H = SUPER, .I = SUPER, .T = 20, .r = 0, .seed = 8 };

/* ---- blocks ---- */

static float put_half(uint8_t *b, float v)
{
	uint16_t half = moe_f32_to_f16(v);

	memcpy(b, &half, 2);
	return moe_f16_to_f32(half);
}

static int rounded(float v, float scale, int least, int most)
{
	int code = scale != 0 ? (int)nearbyintf(v / scale) : 0;

	return MOE_MAX(MOE_MIN(code, most), least);
}

static float largest(const float *w, int n)
{
	float most = 0;

	for (int i = 0; i < n; i++)
		most = MOE_MAX(most, fabsf(w[i]));
	return most;
}

/* The least value, at most 0, and the step of 15 from it to the largest. */
static float range(const float *w, float *step)
{
	float least = 0, most = 0;

	for (int i = 0; i < 32; i++) {
		least = MOE_MIN(least, w[i]);
		most = MOE_MAX(most, w[i]);
	}
	*step = (most - least) / 15;
	return least;
}

static void q8_0(const float *w, uint8_t *b)
{
	float d = put_half(b, largest(w, 32) / 127);

	for (int i = 0; i < 32; i++)
		b[2 + i] = (uint8_t)rounded(w[i], d, -127, 127);
}

static void q4_0(const float *w, uint8_t *b)
{
	float d = put_half(b, largest(w, 32) / 7);

	for (int i = 0; i < 16; i++)
		b[2 + i] = (uint8_t)((rounded(w[i], d, -8, 7) + 8) | (rounded(w[16 + i], d, -8, 7) + 8) << 4);
}

static void q4_1(const float *w, uint8_t *b)
{
	float step, m = range(w, &step), d = put_half(b, step);

	m = put_half(b + 2, m);
	for (int i = 0; i < 16; i++)
		b[4 + i] = (uint8_t)(rounded(w[i] - m, d, 0, 15) | rounded(w[16 + i] - m, d, 0, 15) << 4);
}

/* Six bits of group g's scale and offset. */
static void put_six(uint8_t *s, int g, int scale, int offset)
{
	if (g < 4) {
		s[g] |= (uint8_t)scale;
		s[g + 4] |= (uint8_t)offset;
		return;
	}
	s[g + 4] |= (uint8_t)((scale & 15) | (offset & 15) << 4);
	s[g - 4] |= (uint8_t)(scale >> 4 << 6);
	s[g] |= (uint8_t)(offset >> 4 << 6);
}

static void q4_k(const float *w, uint8_t *b)
{
	float step[8], least[8], d = 0, dmin = 0;

	memset(b, 0, 144);
	for (int g = 0; g < 8; g++) {
		least[g] = range(w + 32 * g, &step[g]);
		d = MOE_MAX(d, step[g]);
		dmin = MOE_MAX(dmin, -least[g]);
	}
	d = put_half(b, d / 63);
	dmin = put_half(b + 2, dmin / 63);
	for (int g = 0; g < 8; g++) {
		int scale = rounded(step[g], d, 0, 63), offset = rounded(-least[g], dmin, 0, 63);

		put_six(b + 4, g, scale, offset);
		for (int i = 0; i < 32; i++)
			b[16 + g / 2 * 32 + i] |=
				(uint8_t)(rounded(w[32 * g + i] + dmin * (float)offset, d * (float)scale, 0, 15)
					  << g % 2 * 4);
	}
}

static void q6_k(const float *w, uint8_t *b)
{
	float most = largest(w, SUPER), d;

	memset(b, 0, 210);
	d = put_half(b + 208, most / 31 / 127);
	for (int i = 0; i < SUPER; i++) {
		int scale = rounded(largest(w + i / 16 * 16, 16) / 31, d, 0, 127), half = i / 128, quarter = i % 128 / 32;
		int code = rounded(w[i], d * (float)scale, -32, 31) + 32;

		b[half * 64 + quarter % 2 * 32 + i % 32] |= (uint8_t)((code & 15) << quarter / 2 * 4);
		b[128 + half * 32 + i % 32] |= (uint8_t)(code >> 4 << quarter * 2);
		b[192 + i / 16] = (uint8_t)scale;
	}
}

static void f32(const float *w, uint8_t *b)
{
	memcpy(b, w, 4);
}

static void f16(const float *w, uint8_t *b)
{
	put_half(b, *w);
}

static void bf16(const float *w, uint8_t *b)
{
	moe_from_f32(b, MOE_BF16, w, 1);
}

static void f64(const float *w, uint8_t *b)
{
	double v = *w;

	memcpy(b, &v, 8);
}

/* By the reader's names. far: of the file from the weights; lost: of what is loaded from the file, relative L2. */
static const struct kind {
	const char *name, *format; /* NULL: plain */
	void (*encode)(const float *w, uint8_t *block);
	double far, lost;
} kinds[] = {
	{ "F32", NULL, f32, 0, 0 },	    { "F16", NULL, f16, 4e-4, 0 },	 { "BF16", NULL, bf16, 3e-3, 0 },
	{ "F64", NULL, f64, 0, 0 },	    { "Q8_0", "int8", q8_0, 6e-3, 0 },	 { "Q4_0", "int4", q4_0, .1, 0 },
	{ "Q4_1", "int4", q4_1, .1, .1 }, { "Q4_K", "int4", q4_k, .1, .1 }, { "Q6_K", "int8", q6_k, .03, 0 },
};

static const struct kind *kind_of(const char *name)
{
	for (size_t i = 0; i < MOE_COUNT(kinds); i++)
		if (!strcmp(kinds[i].name, name))
			return &kinds[i];
	return NULL;
}

static uint32_t number_of(const char *name)
{
	uint32_t n = 0;

	while (n < 100 && strcmp(moe_gguf_type_name(n), name))
		n++;
	return n;
}

/* ---- files ---- */

static const char *path(void)
{
	static char buf[512];

	snprintf(buf, sizeof buf, "%s/experts.gguf", moe_test_dir());
	return buf;
}

static void put_header(struct gguf_bytes *f, const struct block_case *c, int tensors)
{
	f->n = 0;
	put(f, "GGUF", 4);
	put32(f, 3);
	put64(f, (uint64_t)tensors);
	put64(f, 3);
	put_key_text(f, "general.architecture", "qwen3moe");
	put_key32(f, "qwen3moe.block_count", 4);
	put_key32(f, "qwen3moe.expert_count", (uint32_t)c->E);
}

static struct gguf_bytes f; /* the file */

/* Gate, up and down of layer 3 in a type each (NULL: not in the file), and a matrix of no use to an object, of a
 * type that cannot be read. */
static void write_gguf(const struct block_data *d, const char *const types[3])
{
	static const char *const names[3] = { "gate", "up", "down" };
	uint64_t from = 0;
	int count = 1;

	for (int i = 0; i < 3; i++)
		count += types[i] != NULL;
	put_header(&f, &d->c, count);
	for (int i = 0; i < 3; i++) {
		uint64_t n = (uint64_t)(i == 2 ? d->c.H : d->c.I), k = (uint64_t)(i == 2 ? d->c.I : d->c.H);
		const struct moe_gguf_type *t = types[i] ? moe_gguf_type(number_of(types[i])) : NULL;
		char name[64];

		if (!t)
			continue;
		snprintf(name, sizeof name, "blk.3.ffn_%s_exps.weight", names[i]);
		put_tensor(&f, name, 3, (uint64_t[]){ k, n, (uint64_t)d->c.E }, number_of(types[i]), from);
		from += (uint64_t)(d->n[i] / t->values * t->bytes);
		from = (from + 31) / 32 * 32;
	}
	put_tensor(&f, "blk.0.attn_q.weight", 2, (uint64_t[]){ 256, 1 }, number_of("Q5_K"), from);
	put_padding(&f);
	for (int i = 0; i < 3; i++) {
		const struct moe_gguf_type *t = types[i] ? moe_gguf_type(number_of(types[i])) : NULL;

		for (int64_t j = 0; t && j < d->n[i]; j += t->values) {
			kind_of(types[i])->encode(d->w[i] + j, f.bytes + f.n);
			f.n += (size_t)t->bytes;
		}
		put_padding(&f);
	}
	for (int i = 0; i < 8; i++)
		put32(&f, 0);
	CHECK_OK(moe_file_write(path(), f.bytes, f.n));
}

/* Another type in the entry of a tensor that has three dimensions. */
static void change_type(const char *name, const char *type)
{
	uint8_t *at = memmem(f.bytes, f.n, name, strlen(name));
	uint32_t number = number_of(type);

	CU_ASSERT_PTR_NOT_NULL_FATAL(at);
	memcpy(at + strlen(name) + 4 + 3 * 8, &number, sizeof number);
	CHECK_OK(moe_file_write(path(), f.bytes, f.n));
}

/* ---- values ---- */

struct distance {
	double far, lost, far_all, lost_all; /* sums of squares */
};

/* One row: what is loaded into w, its distances into *s. */
static void read_row(const struct moe_st_tensor *t, const struct moe_st_quantised *q, int64_t row, int64_t k, float *w,
		     struct distance *s)
{
	float *exact = malloc((size_t)k * sizeof *exact), *used = malloc((size_t)k * sizeof *used);

	if (q) {
		moe_dequantise_row(&q->q, row, 0, k, used);
		moe_st_quantised_row(t, &q->q, row, 0, k, exact);
	} else {
		moe_to_f32(used, (const char *)t->data + (size_t)(row * k) * moe_dtype_size(t->dtype), t->dtype, (size_t)k);
		memcpy(exact, used, (size_t)k * sizeof *exact);
	}
	for (int64_t j = 0; j < k; j++) {
		s->far += ((double)exact[j] - w[j]) * ((double)exact[j] - w[j]);
		s->lost += ((double)used[j] - exact[j]) * ((double)used[j] - exact[j]);
		s->far_all += (double)w[j] * w[j];
		s->lost_all += (double)exact[j] * exact[j];
	}
	memcpy(w, used, (size_t)k * sizeof *w);
	free(exact), free(used);
}

/* The weights of d become those that the file's conversion gives; its relative error. */
static double convert(struct block_data *d, const char *const types[3])
{
	static const char *const names[3] = { "gate", "up", "down" };
	struct moe_safetensors *st = NULL;
	double lost = 0, all = 0;

	if (!CHECK_OK(moe_safetensors_open_experts(path(), &st)))
		return 0;
	CHECK((int)moe_safetensors_count(st) == 3 * d->c.E); /* and nothing else of the file */
	for (int i = 0; i < 3; i++) {
		int64_t n = i == 2 ? d->c.H : d->c.I, k = i == 2 ? d->c.I : d->c.H;
		const struct kind *kind = kind_of(types[i]);
		struct distance s = { 0 };

		for (int64_t e = 0; e < d->c.E; e++) {
			struct moe_st_quantised q;
			const struct moe_st_tensor *t;
			bool coded = false;
			char name[96];

			snprintf(name, sizeof name, "model.layers.3.mlp.experts.%d.%s_proj.weight", (int)e, names[i]);
			t = moe_safetensors_find(st, name);
			CHECK_OK(moe_st_quantised_find(st, name, 0, n, k, &q, &coded));
			CHECK(coded == (kind->format != NULL));
			for (int64_t row = 0; t && row < n; row++)
				read_row(t, coded ? &q : NULL, row, k, d->w[i] + (e * n + row) * k, &s);
		}
		lost += s.lost;
		all += kind->lost > 0 ? s.lost_all : 0; /* what is exact is not measured */
		s.far = sqrt(s.far / s.far_all);
		s.lost = sqrt(s.lost / s.lost_all);
		if (!i)
			printf("  %s: %.4f from the weights, as %s %.4f from the file\n", kind->name, s.far,
			       kind->format ? kind->format : "it is", s.lost);
		CHECK(s.far <= kind->far);
		CHECK(s.lost <= kind->lost);
	}
	moe_safetensors_close(st);
	return lost > 0 ? sqrt(lost / all) : 0;
}

static struct moe_expert_layer *make(struct moe_engine *e, const char *format)
{
	struct moe_experts_params p = layer_params(&shape);
	struct moe_expert_layer *l = NULL;

	p.weight_format = format;
	p.weight_dtype = MOE_F64;
	p.layer = 3;
	CHECK_OK(moe_experts_create(e, &p, &l));
	return l;
}

static int notes;

static void count_notes(enum moe_log_level level, const char *text, void *user)
{
	(void)user;
	notes += level == MOE_LOG_INFO && strstr(text, "experts.gguf: the offsets of 'blk.3.ffn_") != NULL;
}

/* Forward and backward have the bits of the converted values; it is said where these only come near the file's. */
static void one_file(struct moe_engine *e, const char *const types[3])
{
	struct moe_expert_layer *a = make(e, kind_of(types[0])->format), *b = make(e, NULL);
	struct moe_experts_info info = { .struct_size = sizeof info };
	struct block_data d;
	bool near = false;
	double lost;

	for (int i = 0; i < 3; i++)
		near = near || kind_of(types[i])->lost > 0;
	block_data_make(&d, &shape);
	write_gguf(&d, types);
	lost = convert(&d, types);
	notes = 0;
	moe_log_set(count_notes, NULL);
	if (!CHECK_OK(moe_experts_load_file(a, path(), NULL, NULL, 0)))
		printf("  %s, %s: %s\n", types[0], types[2], moe_last_error());
	moe_log_set(NULL, NULL);
	CHECK(notes == near);
	CHECK_OK(moe_experts_get_info(a, &info));
	if (!CHECK(fabs(info.load_error - lost) <= .15 * lost && (lost > 0) == near)) /* of some rows, of all */
		printf("  %s, %s: load_error %.5f, %.5f expected\n", types[0], types[2], info.load_error, lost);
	CHECK_OK(layer_load(b, &d, NULL, 0));
	layer_same_bits(a, b, &d);
	moe_experts_destroy(a), moe_experts_destroy(b);
	block_data_free(&d);
}

static void files(void)
{
	struct moe_engine *e = layer_engine(2, 2);
	int known = 0;

	for (uint32_t n = 0; n < 100; n++) {
		const char *name = moe_gguf_type_name(n);

		if (!moe_gguf_type(n))
			continue;
		known++;
		if (!CHECK(kind_of(name) != NULL))
			printf("  %s has no row here\n", name);
		else
			one_file(e, (const char *const[3]){ name, name, name });
	}
	CHECK(known == (int)MOE_COUNT(kinds));
	one_file(e, (const char *const[3]){ "Q4_K", "Q4_K", "Q6_K" }); /* as "Q4_K_M" files have them */
	one_file(e, (const char *const[3]){ "Q4_0", "Q4_1", "Q8_0" });
	CHECK_OK(moe_engine_close(e));
}

static void test_files(void)
{
	setenv("MOESAIC_COMPUTE", "bf16", 1);
	each_table(files);
}

static void refused(struct moe_engine *e, const char *format, const char *prefix, enum moe_status want, const char *text)
{
	struct moe_expert_layer *l = make(e, format);

	CHECK_ERROR(moe_experts_load_file(l, path(), prefix, NULL, 0), want, text);
	moe_experts_destroy(l);
}

static void test_errors(void)
{
	struct moe_engine *e = layer_engine(1, 1);
	struct block_data d;

	block_data_make(&d, &shape);
	write_gguf(&d, (const char *const[3]){ "Q8_0", "Q8_0", "Q8_0" });
	refused(e, "int4", NULL, MOE_ERR_FORMAT, "gate_proj.weight is int8; the layer's weight_format is int4");
	refused(e, NULL, NULL, MOE_ERR_STATE, "gate_proj.weight is int8: create layer 3 with weight_format \"int8\"");
	refused(e, "int8", "model.layers.2", MOE_ERR_FORMAT, "no experts below \"model.layers.2\"");
	change_type("blk.3.ffn_up_exps.weight", "Q5_K");
	refused(e, "int8", NULL, MOE_ERR_UNSUPPORTED, "tensor 'blk.3.ffn_up_exps.weight' has type Q5_K (13), which cannot be read");
	write_gguf(&d, (const char *const[3]){ "Q8_0", "Q8_0", NULL });
	refused(e, "int8", NULL, MOE_ERR_FORMAT, "tensor 'blk.3.ffn_down_exps.weight' is missing");
	d.c.E = 1; /* the object has two */
	for (int i = 0; i < 3; i++)
		d.n[i] /= 2;
	write_gguf(&d, (const char *const[3]){ "Q8_0", "Q8_0", "Q8_0" });
	refused(e, "int8", NULL, MOE_ERR_FORMAT, "experts.1.gate_proj.weight: other experts are quantised");
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

const struct moe_test moe_suite_tests[] = {
	{ "every type, from a file of experts alone", test_files },
	{ "what is refused, by name", test_errors },
	{ NULL, NULL },
};
