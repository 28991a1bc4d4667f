/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantised experts of a layer's object from files: fused tensors in every layout that formats
 * write, and kt-kernel's folders. In bf16 they have the bits of plain weights of the same values.
 */
#include "tests/layer_check.h"

#include "codelets/format.h"
#include "model/file.h"
#include "model/readers/safetensors_writer.h"

#include <math.h>
#include <sys/stat.h>

const char moe_suite_name[] = "layer_files";

/* 96 rows of gate and 96 of up: fp8's blocks of 128 rows serve both. */
static const struct block_case ragged = {
	.E = 3, .k = 2, .H = 160, .I = 96, .T = 20, .r = 0, .seed = 6
};
static const struct block_case whole = {
	.E = 3, .k = 2, .H = 128, .I = 256, .T = 20, .r = 0, .seed = 7
};

static const char *path(void)
{
	static char buf[512];

	snprintf(buf, sizeof buf, "%s/experts.safetensors", moe_test_dir());
	return buf;
}

static struct moe_expert_layer *make(struct moe_engine *e, const struct block_case *c,
				     const char *format, bool train)
{
	struct moe_experts_params p = layer_params(c);
	struct moe_expert_layer *l = NULL;

	p.weight_format = format;
	p.train_base = train;
	p.layer = 3;
	CHECK_OK(moe_experts_create(e, &p, &l));
	return l;
}

/* ---- fused ---- */

/* Tensors of one fused weight: codes, scale. */
struct fused {
	char name[2][96];
	struct moe_st_item item[2];
	void *data[2];
};

static void set_item(struct fused *f, int i, const char *base, const char *suffix,
		     const struct moe_array *a, int64_t E)
{
	struct moe_st_item *it = &f->item[i];

	snprintf(f->name[i], sizeof f->name[i], "%s%s", base, suffix);
	*it = (struct moe_st_item){
		.name = f->name[i], .dtype = a->dtype, .ndim = a->ndim + 1, .shape = { E }
	};
	memcpy(it->shape + 1, a->shape, (size_t)a->ndim * sizeof *a->shape);
	f->data[i] = calloc((size_t)moe_shape_count(it->ndim, it->shape), moe_dtype_size(a->dtype));
	it->data = f->data[i];
}

static void at_expert(struct moe_array *a, const struct fused *f, int i, int64_t e)
{
	a->data = (char *)f->data[i] +
		  (size_t)(e * moe_shape_count(a->ndim, a->shape)) * moe_dtype_size(a->dtype);
}

/* [E, n, k] of w: codes into f, what they stand for into w. false: the layout cannot hold it. */
static bool store(const struct moe_format *format, const struct moe_format_layout *l,
		  const char *base, int64_t E, int64_t n, int64_t k, float *w, struct fused *f)
{
	for (int64_t e = 0; e < E; e++) {
		struct moe_coding coding = moe_format_coding(format, k);
		bool rows = l->name && strstr(l->name, "rows");
		struct moe_quantised q = { .coding = coding,
					   .n = n,
					   .k = k };
		struct moe_stored s = { .zero_name = "" };
		void *memory;
		bool good;

		q.coding.group = rows ? k : coding.group;
		q.coding.rows = rows ? 1 : coding.rows;
		CHECK_OK(moe_quantise_as(w + e * n * k, MOE_F32, k, &q, &memory));
		good = l->writer->shapes(&q, &s) == MOE_OK && !s.zero.ndim;
		if (good && !e) {
			set_item(f, 0, base, l->codes, &s.codes, E);
			set_item(f, 1, base, l->scale, &s.scale, E);
		}
		if (good) {
			at_expert(&s.codes, f, 0, e);
			at_expert(&s.scale, f, 1, e);
			CHECK_OK(l->writer->store(&q, &s));
		}
		for (int64_t i = 0; good && i < n; i++)
			moe_dequantise_row(&q, i, 0, k, w + (e * n + i) * k);
		moe_free(memory);
		if (!good)
			return false;
	}
	return true;
}

static void free_fused(struct fused *f)
{
	free(f->data[0]), free(f->data[1]);
	memset(f, 0, sizeof *f);
}

/* Writes the layer's experts so, and leaves in d what they stand for. */
static bool write_fused(struct block_data *d, const struct moe_format *format,
			const struct moe_format_layout *l)
{
	int64_t E = d->c.E, half = (int64_t)d->c.I * d->c.H;
	float *w = malloc((size_t)(2 * E * half) * sizeof *w);
	struct fused f[2] = { 0 };
	bool good;

	for (int64_t e = 0; e < E; e++)
		for (int i = 0; i < 2; i++)
			memcpy(w + (2 * e + i) * half, d->w[i] + e * half,
			       (size_t)half * sizeof *w);
	good = store(format, l, "model.layers.3.mlp.experts.gate_up_proj", E, 2 * d->c.I, d->c.H, w,
		     &f[0]) &&
	       store(format, l, "model.layers.3.mlp.experts.down_proj", E, d->c.H, d->c.I, d->w[2],
		     &f[1]);
	for (int64_t e = 0; e < E; e++)
		for (int i = 0; i < 2; i++)
			memcpy(d->w[i] + e * half, w + (2 * e + i) * half,
			       (size_t)half * sizeof *w);
	if (good) {
		struct moe_st_item items[4] = { f[0].item[0], f[0].item[1], f[1].item[0],
						f[1].item[1] };

		CHECK_OK(moe_safetensors_write(path(), items, 4, NULL, 0));
	}
	free_fused(&f[0]), free_fused(&f[1]);
	free(w);
	return good;
}

/* Trained ones begin with what the codes stand for. */
static void masters(struct moe_engine *e, const struct block_data *d, const char *format)
{
	struct block_case c = d->c;
	struct moe_expert_layer *l;

	c.base_grads = true;
	l = make(e, &c, format, true);
	CHECK_OK(moe_experts_load_file(l, path(), NULL, NULL, 0));
	for (int i = 0; i < 3; i++) {
		double *got = layer_get(l, &c, (enum moe_block_array)i, false);
		int64_t wrong = 0;

		for (int64_t j = 0; j < d->n[i]; j++)
			wrong += (float)got[j] != d->w[i][j];
		CHECK(wrong == 0);
		free(got);
	}
	moe_experts_destroy(l);
}

static int fused_layouts;

static void one_layout(struct moe_engine *e, const struct block_case *c, const struct moe_format *f,
		       const struct moe_format_layout *layout)
{
	const int64_t map[3] = { 2, 0, 1 };
	struct moe_expert_layer *a, *b;
	struct block_data d;

	block_data_make(&d, c);
	if (write_fused(&d, f, layout)) {
		fused_layouts++;
		for (int mapped = 0; mapped < 2; mapped++) {
			a = make(e, c, f->name, false);
			b = make(e, c, NULL, false);
			if (!CHECK_OK(
				    moe_experts_load_file(a, path(), NULL, mapped ? map : NULL, 3)))
				printf("  %s: %s\n", f->name, moe_last_error());
			CHECK_OK(layer_load(b, &d, mapped ? map : NULL, 3));
			layer_same_bits(a, b, &d);
			moe_experts_destroy(a), moe_experts_destroy(b);
		}
		if (c->I % 128 == 0)
			masters(e, &d, f->name);
	}
	block_data_free(&d);
}

static void fused(void)
{
	for (int parts = 1; parts <= 3; parts += 2) {
		struct moe_engine *e = layer_engine(2, parts);

		for (int i = 0; moe_format_list[i]; i++)
			for (int j = 0;
			     j < MOE_FORMAT_LAYOUTS && moe_format_list[i]->layout[j].codes; j++) {
				const struct moe_format_layout *l = &moe_format_list[i]->layout[j];

				if (*l->codes == '.' || !l->writer)
					continue;
				one_layout(e, &ragged, moe_format_list[i], l);
				one_layout(e, &whole, moe_format_list[i], l);
			}
		CHECK_OK(moe_engine_close(e));
	}
}

static void test_fused(void)
{
	setenv("MOESAIC_COMPUTE", "bf16", 1);
	fused_layouts = 0;
	each_table(fused);
	CHECK(fused_layouts >= 4 * 2 * 2); /* blocks and rows of fp8, int8, int4, mxfp4 */
}

/* ---- kt-kernel's folders ---- */

#define COLUMN_BLOCK 3584

/* kt's order of codes, written down once more: rows by 32, columns by a step, 16 rows of 4 bytes in
 * turn. */
static void pack_kt(const int8_t *codes, int bits, int64_t n, int64_t k, uint8_t *to)
{
	int64_t rows = bits == 8 ? 64 : 128, step = rows;

	for (int64_t n0 = 0; n0 < n; n0 += rows)
		for (int64_t k0 = 0; k0 < k; k0 += COLUMN_BLOCK)
			for (int64_t r = n0; r < MOE_MIN(n0 + rows, n); r += 32)
				for (int64_t c = k0; c < MOE_MIN(k0 + COLUMN_BLOCK, k); c += step)
					for (int tile = 0; tile < 2; tile++)
						for (int i = 0; i < 16 * 64; i++) {
							int64_t row = r + 16 * tile + i / 4 % 16,
								col = c + i / 64 * 4 + i % 4;
							int64_t at = row * k + col;
							int low = codes[at], high = bits == 8 ? 0 : codes[at + 64];

							*to++ = (uint8_t)(bits == 8 ? low : (low & 15) | (high & 15) << 4);
						}
}

static void put_kt(const char *which, int expert, int part, int bits, const char *kind,
		   const void *data, size_t bytes)
{
	char at[512];

	snprintf(at, sizeof at, "%s/kt/_layer_3/_numa_%d/INT%d_%s_%d_%zuByte_%s_.kt",
		 moe_test_dir(), part, bits, which, expert, bytes, kind);
	CHECK_OK(moe_file_write(at, data, bytes));
}

/* Part p of a matrix [n, k] of integers and a scale per row; w: its values, rows ld apart. */
static void write_part(const char *which, int expert, int p, int bits, int64_t n, int64_t k,
		       float *w, int64_t ld)
{
	int8_t *codes = malloc((size_t)(n * k));
	uint8_t *packed = malloc((size_t)(n * k));
	float *scale = malloc((size_t)n * sizeof *scale);

	for (int64_t i = 0; i < n; i++) {
		scale[i] = (float)(1 + (i + expert) % 7) * 0x1p-9f * (bits == 8 ? 1 : 16);
		for (int64_t j = 0; j < k; j++) {
			int code =
				(int)((i * 31 + j * 17 + expert * 5 + p) % (bits == 8 ? 255 : 15)) -
				(bits == 8 ? 127 : 7);

			codes[i * k + j] = (int8_t)code;
			w[i * ld + j] = (float)code * scale[i];
		}
		scale[i] /= bits == 8 ? 1 : 16; /* kt's INT4 stands for 16 times the code */
	}
	pack_kt(codes, bits, n, k, packed);
	put_kt(which, expert, p, bits, "quant", packed, (size_t)(n * k * bits / 8));
	put_kt(which, expert, p, bits, "scale", scale, (size_t)n * sizeof *scale);
	free(codes), free(packed), free(scale);
}

static void write_kt(struct block_data *d, int bits, int parts)
{
	static const char *const names[3] = { "gate", "up", "down" };
	int64_t H = d->c.H, I = d->c.I, part = I / parts;
	char dir[512];

	snprintf(dir, sizeof dir, "%s/kt", moe_test_dir());
	moe_tree_remove(dir);
	for (int p = 0; p < parts; p++) {
		char command[600];

		snprintf(command, sizeof command, "mkdir -p %s/_layer_3/_numa_%d", dir, p);
		CHECK(system(command) == 0);
		for (int e = 0; e < d->c.E; e++) {
			for (int i = 0; i < 2; i++)
				write_part(names[i], e, p, bits, part, H,
					   d->w[i] + (e * I + p * part) * H, H);
			write_part(names[2], e, p, bits, H, part, d->w[2] + e * H * I + p * part,
				   I);
		}
	}
}

static void kt_folder(void)
{
	char dir[512];

	snprintf(dir, sizeof dir, "%s/kt", moe_test_dir());
	for (int parts = 1; parts <= 3; parts += 2) {
		struct moe_engine *e = layer_engine(2, parts);

		for (int bits = 4; bits <= 8; bits += 4)
			for (int theirs = 1; theirs <= 2; theirs++) {
				struct moe_expert_layer *a, *b;
				struct block_data d;

				block_data_make(&d, &whole);
				write_kt(&d, bits, theirs);
				a = make(e, &whole, bits == 8 ? "int8" : "int4", false);
				b = make(e, &whole, NULL, false);
				if (!CHECK_OK(moe_experts_load_file(a, dir, NULL, NULL, 0)))
					printf("  %s\n", moe_last_error());
				CHECK_OK(layer_load(b, &d, NULL, 0));
				layer_same_bits(a, b, &d);
				moe_experts_destroy(a), moe_experts_destroy(b);
				block_data_free(&d);
			}
		CHECK_OK(moe_engine_close(e));
	}
}

static void test_kt(void)
{
	setenv("MOESAIC_COMPUTE", "bf16", 1);
	each_table(kt_folder);
}

static int notes;

static void count_notes(enum moe_log_level level, const char *text, void *user)
{
	(void)user;
	notes += level == MOE_LOG_INFO && strstr(text, "prepared backward weights are not used") != NULL;
}

/* Prepared backward weights beside the others are told of once and not used: here they are other weights. */
static void test_backward_weights(void)
{
	static const char *const names[3] = { "gate_bwd", "up_bwd", "down_bwd" };
	struct moe_engine *e = layer_engine(2, 2);
	struct moe_expert_layer *a, *b;
	float *other;
	struct block_data d;
	char dir[512];

	block_data_make(&d, &whole);
	other = calloc((size_t)(whole.H * whole.I), sizeof *other);
	write_kt(&d, 8, 2);
	for (int i = 0; i < 2 * whole.E * 3; i++) {
		int64_t n = i % 3 == 2 ? whole.I / 2 : whole.H, k = i % 3 == 2 ? whole.H : whole.I / 2;

		write_part(names[i % 3], i / 3 % whole.E, i / 3 / whole.E, 8, n, k, other, k);
	}
	free(other);
	snprintf(dir, sizeof dir, "%s/kt", moe_test_dir());
	a = make(e, &whole, "int8", false);
	b = make(e, &whole, "int8", false);
	notes = 0;
	moe_log_set(count_notes, NULL);
	CHECK_OK(moe_experts_load_file(a, dir, NULL, NULL, 0));
	CHECK(notes == 1);
	write_kt(&d, 8, 2); /* without them */
	CHECK_OK(moe_experts_load_file(b, dir, NULL, NULL, 0));
	CHECK(notes == 1);
	moe_log_set(NULL, NULL);
	layer_same_bits(a, b, &d);
	moe_experts_destroy(a), moe_experts_destroy(b);
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

/* ---- refused, by name ---- */

static void refused(struct moe_engine *e, const struct block_case *c, const char *format,
		    bool train, const char *from, enum moe_status want, const char *text)
{
	struct moe_expert_layer *l = make(e, c, format, train);

	CHECK_ERROR(moe_experts_load_file(l, from, NULL, NULL, 0), want, text);
	moe_experts_destroy(l);
}

static void test_errors(void)
{
	const struct moe_format *fp8 = moe_format_find("fp8");
	struct moe_engine *e = layer_engine(2, 1);
	struct block_case other = whole;
	struct moe_expert_layer *l;
	struct moe_st_item items[3];
	struct block_data d;
	char dir[512], gone[1200];

	block_data_make(&d, &ragged);
	CHECK(write_fused(&d, fp8, &fp8->layout[2]));
	refused(e, &ragged, NULL, false, path(), MOE_ERR_STATE,
		"gate_up_proj is fp8: create layer 3 with weight_format \"fp8\"");
	refused(e, &ragged, "int8", false, path(), MOE_ERR_FORMAT,
		"gate_up_proj is fp8; the layer's weight_format is int8");
	refused(e, &ragged, "fp8", true, path(), MOE_ERR_UNSUPPORTED,
		"one scale for 128 rows serves both");
	other = ragged;
	other.I = 128;
	refused(e, &other, "fp8", false, path(), MOE_ERR_FORMAT, "gate_up_proj");
	items[0] = (struct moe_st_item){ .name = "model.layers.3.mlp.experts.gate_up_proj",
					 .dtype = MOE_F32,
					 .ndim = 3,
					 .shape = { ragged.E, 2 * ragged.I, ragged.H } };
	items[0].data = calloc((size_t)(ragged.E * 2 * ragged.I * ragged.H), sizeof(float));
	items[1] = items[0];
	items[1].name = "model.layers.3.mlp.experts.gate_up_proj_bias";
	items[1].ndim = 2;
	CHECK_OK(moe_safetensors_write(path(), items, 2, NULL, 0));
	refused(e, &ragged, NULL, false, path(), MOE_ERR_UNSUPPORTED,
		"gate_up_proj_bias: experts with biases");
	free((void *)(uintptr_t)items[0].data);
	block_data_free(&d);

	block_data_make(&d, &whole);
	write_kt(&d, 8, 2);
	snprintf(dir, sizeof dir, "%s/kt", moe_test_dir());
	refused(e, &whole, NULL, false, dir, MOE_ERR_STATE, "weight_format \"int8\"");
	refused(e, &whole, "int4", false, dir, MOE_ERR_FORMAT,
		"is int8; the layer's weight_format is int4");
	other = whole;
	other.H = 256;
	refused(e, &other, "int8", false, dir, MOE_ERR_FORMAT, "has another shape than [256, 256]");
	other = whole;
	other.E = 4;
	refused(e, &other, "int8", false, dir, MOE_ERR_FORMAT,
		"model.layers.3.mlp.experts.3.gate_proj.weight: other experts are quantised");
	other.E = 2;
	refused(e, &other, "int8", false, dir, MOE_ERR_FORMAT,
		"experts.2.gate_proj.weight: the layer was created with 2 experts, the file has more");
	other = (struct block_case){ .E = 2, .k = 1, .H = 128, .I = 128, .T = 4, .seed = 8 };
	l = make(e, &other, NULL, false);
	CHECK_ERROR(moe_experts_load_file(l, moe_test_path("tests/fixtures/ckpt/qwen3moe"), "model.layers.0", NULL, 0),
		    MOE_ERR_FORMAT, "experts.2.gate_proj.weight: the layer was created with 2 experts");
	moe_experts_destroy(l);
	snprintf(gone, sizeof gone, "%s/_layer_3/_numa_1/INT8_up_2_%dByte_scale_.kt", dir,
		 whole.I / 2 * 4);
	CHECK(remove(gone) == 0);
	refused(e, &whole, "int8", false, dir, MOE_ERR_IO, "INT8_up_2");
	write_kt(&d, 8, 2); /* backward weights of one expert alone */
	put_kt("gate_bwd", 0, 0, 8, "quant", "none", 4);
	refused(e, &whole, "int8", false, dir, MOE_ERR_FORMAT, "INT8_gate_bwd_0_");
	snprintf(gone, sizeof gone, "mv %s/_layer_3 %s/_layer_4", dir, dir);
	write_kt(&d, 8, 2);
	CHECK(system(gone) == 0);
	refused(e, &whole, "int8", false, dir, MOE_ERR_FORMAT,
		"no experts below \"model.layers.3\"");
	block_data_free(&d);
	CHECK_OK(moe_engine_close(e));
}

const struct moe_test moe_suite_tests[] = {
	{ "fused tensors in every layout", test_fused },
	{ "kt-kernel's folders, one part and two", test_kt },
	{ "kt-kernel's backward weights are not used", test_backward_weights },
	{ "what is refused, by name", test_errors },
	{ NULL, NULL },
};
