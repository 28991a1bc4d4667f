/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every layout of every format, of single experts and of all in one tensor, with one thing wrong in one matrix: a whole
 * model and a layer's object refuse it in a line that names the tensor. The registry gives the layouts: a format without
 * a row of `formats` fails.
 */
#include "tests/layer_check.h"
#include "tests/model_reference.h"

#include "codelets/format.h"

#include <sys/stat.h>
#include <unistd.h>

const char moe_suite_name[] = "format_faults";

#define N_EXPERTS 2
#define CONFIG                                                                                     \
	"{\"model_type\":\"qwen3_moe\",\"hidden_size\":128,\"num_attention_heads\":2,\"num_key_value_heads\":2,"   \
	"\"head_dim\":32,\"num_hidden_layers\":2,\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\","                   \
	"\"max_position_embeddings\":64,\"rope_theta\":10000.0,\"vocab_size\":64,\"intermediate_size\":64,"        \
	"\"moe_intermediate_size\":256,\"num_experts\":2,\"num_experts_per_tok\":2,\"decoder_sparse_step\":1,"     \
	"\"mlp_only_layers\":[],\"norm_topk_prob\":true,\"tie_word_embeddings\":false}"

/* What each format says of scales of three groups where it has one or several per row, and whether zeros must be there. */
static const struct row {
	const char *format, *groups;
	bool zeros;
} formats[] = {
	{ "fp8", "has shape", false },
	{ "gptq", "has 3 groups, which do not divide 256 columns", true },
	{ "int4", "has 3 groups, which do not divide 256 columns", false },
	{ "int8", "has 3 groups, which do not divide 256 columns", false },
	{ "mxfp4", "has shape", false },
};

/* ---- checkpoints ---- */

enum { CODES, SCALE, ZERO, MORE, TENSORS };

struct file {
	struct moe_st_item item[128];
	size_t n;
	void *owned[256];
	size_t n_owned;
	/* of the matrix that is looked at, the last one of layer 1; NULL: it has no such tensor */
	struct moe_st_item *of[TENSORS];
	struct moe_coding coding;
	char base[96]; /* its name without suffixes */
};

static void *own(struct file *f, void *memory)
{
	CU_ASSERT_FATAL(memory && f->n_owned < MOE_COUNT(f->owned));
	return f->owned[f->n_owned++] = memory;
}

static void file_free(struct file *f)
{
	for (size_t i = 0; i < f->n_owned; i++)
		free(f->owned[i]);
	memset(f, 0, sizeof *f);
}

/* Tensors of w [experts, n, k] (experts 0: one matrix), beginning with base. false: the layout cannot hold it. */
static bool put(struct file *f, const struct moe_format *format, const struct moe_format_layout *l, const char *base,
		int64_t experts, int64_t n, int64_t k, float *const *w)
{
	struct moe_coding coding = moe_format_coding(format, k);
	const char *suffix[TENSORS] = { l->codes, l->scale, l->zero, l->more };
	bool rows = l->name && strstr(l->name, "rows");

	coding.group = rows ? k : coding.group;
	coding.rows = rows ? 1 : coding.rows;
	snprintf(f->base, sizeof f->base, "%s", base);
	f->coding = coding;
	memset(f->of, 0, sizeof f->of);
	for (int64_t e = 0; e < MOE_MAX(experts, 1); e++) {
		struct moe_quantised q = { .coding = coding, .n = n, .k = k };
		struct moe_stored s = { .zero_name = "" };
		struct moe_array *a[TENSORS] = { &s.codes, &s.scale, &s.zero, &s.more };
		void *memory = NULL;

		if (l->writer->shapes(&q, &s) != MOE_OK || (experts && s.more.ndim))
			return false;
		CHECK_OK(moe_quantise_as(w[e], MOE_F32, k, &q, &memory));
		for (int i = 0; i < TENSORS; i++) {
			struct moe_st_item *it;
			size_t bytes = (size_t)moe_shape_count(a[i]->ndim, a[i]->shape) * moe_dtype_size(a[i]->dtype);

			if (!a[i]->ndim)
				continue;
			if (!f->of[i]) {
				char *name = own(f, malloc(strlen(base) + 32));

				sprintf(name, "%s%s", base, suffix[i]);
				it = f->of[i] = &f->item[f->n++];
				*it = (struct moe_st_item){ .name = name, .dtype = a[i]->dtype };
				if (experts)
					it->shape[it->ndim++] = experts;
				for (int j = 0; j < a[i]->ndim; j++)
					it->shape[it->ndim++] = a[i]->shape[j];
				/* room for what faults make of it */
				it->data = own(f, calloc(1, 8 * (bytes + 4096) * (size_t)MOE_MAX(experts, 1)));
			}
			a[i]->data = (char *)(uintptr_t)f->of[i]->data + (size_t)e * bytes;
		}
		CHECK_OK(l->writer->store(&q, &s));
		moe_free(memory);
	}
	return true;
}

static bool put_layer(struct file *f, const struct ref_model *ref, int layer, const struct moe_format *format,
		      const struct moe_format_layout *l, bool fused)
{
	static const char *const names[3] = { "gate", "up", "down" };
	int64_t H = ref->arch.hidden, I = ref->arch.moe_intermediate;
	float *w[3][N_EXPERTS], *both[N_EXPERTS];
	char base[96];
	bool good = true;

	for (int i = 0; i < 3; i++)
		for (int e = 0; e < N_EXPERTS; e++)
			w[i][e] = (float *)(uintptr_t)ref_get(ref, (enum moe_role)(MOE_ROLE_EXPERT_GATE + i), layer, e);
	for (int e = 0; !fused && e < N_EXPERTS; e++)
		for (int i = 0; good && i < 3; i++) {
			snprintf(base, sizeof base, "model.layers.%d.mlp.experts.%d.%s_proj", layer, e, names[i]);
			good = put(f, format, l, base, 0, i == 2 ? H : I, i == 2 ? I : H, &w[i][e]);
		}
	if (!fused)
		return good;
	for (int e = 0; e < N_EXPERTS; e++) {
		both[e] = own(f, malloc((size_t)(2 * I * H) * sizeof(float)));
		memcpy(both[e], w[0][e], (size_t)(I * H) * sizeof(float));
		memcpy(both[e] + I * H, w[1][e], (size_t)(I * H) * sizeof(float));
	}
	snprintf(base, sizeof base, "model.layers.%d.mlp.experts.gate_up_proj", layer);
	good = put(f, format, l, base, N_EXPERTS, 2 * I, H, both);
	snprintf(base, sizeof base, "model.layers.%d.mlp.experts.down_proj", layer);
	return good && put(f, format, l, base, N_EXPERTS, H, I, w[2]);
}

static bool make(struct file *f, const struct ref_model *ref, const struct moe_format *format,
		 const struct moe_format_layout *l, bool fused)
{
	memset(f, 0, sizeof *f);
	for (size_t i = 0; i < ref->n_items; i++) {
		const struct ref_item *it = &ref->item[i];

		if (strstr(it->name, ".experts."))
			continue;
		f->item[f->n] = (struct moe_st_item){
			.name = it->name, .dtype = MOE_F32, .ndim = it->ndim, .data = it->data
		};
		memcpy(f->item[f->n++].shape, it->shape, sizeof it->shape);
	}
	return put_layer(f, ref, 0, format, l, fused) && put_layer(f, ref, 1, format, l, fused);
}

/* ---- faults ---- */

/* The matrix's first scale (or that of its second expert, where it is of all). */
static void set_scale(struct file *f, float v)
{
	struct moe_st_item *s = f->of[SCALE];
	bool fused = strstr(f->base, "experts.down_proj") != NULL;
	int64_t at = fused ? moe_shape_count(s->ndim, s->shape) / N_EXPERTS : 0;

	moe_scale_put((void *)(uintptr_t)s->data, s->dtype, at, v);
}

static void drop(struct file *f, int which)
{
	for (int i = 0; f->of[which] && i < TENSORS; i++)
		if (i != which && f->of[i] > f->of[which])
			f->of[i]--;
	if (!f->of[which])
		return;
	memmove(f->of[which], f->of[which] + 1, (size_t)(f->item + f->n - 1 - f->of[which]) * sizeof *f->item);
	f->n--;
	f->of[which] = NULL;
}

static bool no_scale(struct file *f)
{
	drop(f, SCALE);
	return true;
}

static bool no_matrix(struct file *f)
{
	for (int i = TENSORS - 1; i >= 0; i--)
		drop(f, i);
	return true;
}

static bool scale_dtype(struct file *f)
{
	f->of[SCALE]->dtype = MOE_I64;
	return true;
}

static bool codes_dtype(struct file *f)
{
	f->of[CODES]->dtype = MOE_I16;
	return true;
}

static bool codes_rows(struct file *f)
{
	f->of[CODES]->shape[f->of[CODES]->ndim - 2]++;
	return true;
}

static bool codes_columns(struct file *f)
{
	f->of[CODES]->shape[f->of[CODES]->ndim - 1]++;
	return true;
}

/* The dimension of a matrix's scales that counts rows is the model's hidden size, the other one that of groups. */
static int group_dimension(const struct file *f)
{
	const struct moe_st_item *s = f->of[SCALE];

	return s->shape[s->ndim - 1] == 128 ? s->ndim - 2 : s->ndim - 1;
}

static bool scale_rows(struct file *f)
{
	const struct moe_st_item *s = f->of[SCALE];

	f->of[SCALE]->shape[group_dimension(f) == s->ndim - 1 ? s->ndim - 2 : s->ndim - 1] += 3;
	return true;
}

static bool three_groups(struct file *f)
{
	f->of[SCALE]->shape[group_dimension(f)] = 3;
	return true;
}

static bool nan_scale(struct file *f)
{
	set_scale(f, NAN);
	return true;
}

static bool infinite_scale(struct file *f)
{
	set_scale(f, -INFINITY);
	return f->of[SCALE]->dtype != MOE_SCALE_UE8M0; /* which has none */
}

static bool no_zeros(struct file *f)
{
	if (!f->of[ZERO])
		return false;
	drop(f, ZERO);
	return true;
}

static bool zero_dtype(struct file *f)
{
	if (f->of[ZERO])
		f->of[ZERO]->dtype = MOE_F32;
	return f->of[ZERO] != NULL;
}

static bool zero_shape(struct file *f)
{
	if (f->of[ZERO])
		f->of[ZERO]->shape[f->of[ZERO]->ndim - 1]++;
	return f->of[ZERO] != NULL;
}

static bool truncated(struct file *f)
{
	(void)f;
	return true;
}

#define CUT "a truncated file"

/* text: beside the tensor's name, said by both; NULL: any. A fault that a file cannot have returns false. */
static const struct fault {
	const char *name;
	bool (*make)(struct file *f);
	const char *text;
} faults[] = {
	{ "missing scales", no_scale, "is missing" },
	{ "a missing matrix", no_matrix, "no codes" },
	{ "dtype of scales", scale_dtype, "has dtype I64" },
	{ "dtype of codes", codes_dtype, NULL },
	{ "rows of codes", codes_rows, "has shape" },
	{ "columns of codes", codes_columns, "has shape" },
	{ "rows of scales", scale_rows, NULL },
	{ "groups that do not divide", three_groups, NULL }, /* formats[].groups */
	{ "a scale that is NaN", nan_scale, "is NaN" },
	{ "an infinite scale", infinite_scale, "is infinite" },
	{ "missing zeros", no_zeros, "is missing" },
	{ "dtype of zeros", zero_dtype, "has dtype F32" },
	{ "shape of zeros", zero_shape, "has shape" },
	{ CUT, truncated, "truncated" },
};

/* ---- both ways to load ---- */

static const char *dir(void)
{
	static char buf[512];

	snprintf(buf, sizeof buf, "%s/faulty", moe_test_dir());
	return buf;
}

static void save(const struct file *f, int64_t cut)
{
	char path[600];
	struct stat s;

	snprintf(path, sizeof path, "%s/model.safetensors", dir());
	CHECK_OK(moe_safetensors_write(path, f->item, f->n, NULL, 0));
	CHECK(!cut || (stat(path, &s) == 0 && truncate(path, s.st_size - cut) == 0));
}

static enum moe_status load_model(struct moe_engine *e)
{
	struct moe_model_params p = { .struct_size = sizeof p, .dir = dir(), .max_tokens = 16, .inference_only = 1 };
	struct moe_model *m = NULL;
	enum moe_status st = moe_model_open(e, &p, &m);

	moe_model_close(m);
	return st;
}

static const struct block_case shape = { .E = N_EXPERTS, .k = 2, .H = 128, .I = 256, .T = 4, .r = 0, .seed = 3 };

static struct moe_expert_layer *object(struct moe_engine *e, const char *format)
{
	struct moe_experts_params p = layer_params(&shape);
	struct moe_expert_layer *l = NULL;

	p.weight_format = format;
	p.layer = 1;
	CHECK_OK(moe_experts_create(e, &p, &l));
	return l;
}

static enum moe_status load_object(struct moe_engine *e, const char *format)
{
	struct moe_expert_layer *l = object(e, format);
	enum moe_status st = moe_experts_load_file(l, dir(), NULL, NULL, 0);

	moe_experts_destroy(l);
	return st;
}

/* A file that ends early names the tensor that it lacks, which may be another one. */
static void check_line(const struct file *f, enum moe_status st, const char *text, const char *what)
{
	const char *tensor = !strcmp(what, CUT) ? "tensor 'model.layers." : f->base;
	const char *line = moe_last_error();
	bool good = st == MOE_ERR_FORMAT || st == MOE_ERR_UNSUPPORTED;

	good = good && strstr(line, tensor) && (!text || strstr(line, text)) && !strchr(line, '\n');
	if (!CHECK(good))
		printf("  %s, %s: status %d, \"%s\"\n", f->base, what, (int)st, st ? line : "");
}

static const char *text_of(const struct fault *fault, const struct row *row)
{
	return fault->make == three_groups ? row->groups : fault->text;
}

static int made, refused;

static void one_layout(struct moe_engine *e, const struct ref_model *ref, const struct moe_format *format,
		       const struct moe_format_layout *l, const struct row *row, bool fused)
{
	static struct file f;

	for (size_t i = 0; i < MOE_COUNT(faults); i++) {
		bool apply = make(&f, ref, format, l, fused) && faults[i].make(&f) &&
			     (faults[i].make != no_zeros || row->zeros);
		bool cut = faults[i].make == truncated;

		if (apply) {
			save(&f, cut ? 5 : 0);
			check_line(&f, load_model(e), text_of(&faults[i], row), faults[i].name);
			check_line(&f, load_object(e, format->name), text_of(&faults[i], row), faults[i].name);
			refused++;
		}
		file_free(&f);
	}
}

/* Nothing wrong; and a scale of 0 or below it, which a value can have: what comes out is finite. */
static void sound(struct moe_engine *e, const struct ref_model *ref, const struct moe_format *format,
		  const struct moe_format_layout *l, bool fused)
{
	const float scale[] = { 1, 0, -.01f };
	static struct file f;

	for (size_t i = 0; i < MOE_COUNT(scale); i++) {
		struct moe_expert_layer *object_of;
		struct block_data d;
		int64_t bad = 0;

		if (!make(&f, ref, format, l, fused) || (i && f.of[SCALE]->dtype == MOE_SCALE_UE8M0)) {
			file_free(&f);
			return;
		}
		made += !i;
		if (i)
			set_scale(&f, scale[i]);
		save(&f, 0);
		if (!CHECK_OK(load_model(e)))
			printf("  %s: %s\n", f.base, moe_last_error());
		object_of = object(e, format->name);
		block_data_make(&d, &shape);
		if (!CHECK_OK(moe_experts_load_file(object_of, dir(), NULL, NULL, 0)))
			printf("  %s: %s\n", f.base, moe_last_error());
		CHECK_OK(layer_forward(object_of, &d, true));
		CHECK_OK(layer_backward(object_of, &d, 1));
		for (int j = 0; j < shape.T * shape.H; j++)
			bad += !isfinite(d.out[j]) || !isfinite(d.grad_x[j]);
		CHECK(bad == 0 && d.out[0] != 0);
		moe_experts_destroy(object_of);
		block_data_free(&d);
		file_free(&f);
	}
}

static void each_layout(bool faulty)
{
	struct moe_engine *e = open_engine(2, 2, NULL);
	struct ref_model ref;
	char path[600];

	ref_create(&ref, "plain", CONFIG, 1);
	OK(moe_dir_make(dir()));
	snprintf(path, sizeof path, "%s/config.json", dir());
	OK(moe_file_write(path, CONFIG, strlen(CONFIG)));
	made = refused = 0;
	for (int i = 0; moe_format_list[i]; i++) {
		const struct moe_format *f = moe_format_list[i];
		const struct row *row = NULL;

		for (size_t j = 0; j < MOE_COUNT(formats); j++)
			if (!strcmp(formats[j].format, f->name))
				row = &formats[j];
		if (!CHECK(row != NULL))
			printf("  %s has no row here\n", f->name);
		for (int j = 0; row && j < MOE_FORMAT_LAYOUTS && f->layout[j].codes; j++)
			for (int fused = 0; fused < 2; fused++) {
				if (!CHECK(f->layout[j].writer != NULL))
					printf("  %s: a layout that cannot be written\n", f->name);
				else if (faulty)
					one_layout(e, &ref, f, &f->layout[j], row, fused);
				else
					sound(e, &ref, f, &f->layout[j], fused);
			}
	}
	printf("  %d layouts, %d files refused twice\n", made, refused);
	ref_free(&ref);
	OK(moe_engine_close(e));
}

static void test_sound(void)
{
	each_layout(false);
	CHECK(made >= 20);
}

static void test_faults(void)
{
	each_layout(true);
	CHECK(refused >= 200);
}

const struct moe_test moe_suite_tests[] = {
	{ "every layout loads; scales of 0 and below are values", test_sound },
	{ "format x layout x fault: a line that names the tensor", test_faults },
	{ NULL, NULL },
};
