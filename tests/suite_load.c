/* SPDX-License-Identifier: Apache-2.0 */
/* Loading streams: each byte of a checkpoint is read once, and little more than the weights is in
 * memory meanwhile. */
#include "tests/child.h"
#include "tests/model_reference.h"

#include "model/file.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

const char moe_suite_name[] = "load";

#define CONFIG(H, I, E, L)                                                                         \
	"{\"model_type\":\"qwen3_moe\",\"hidden_size\":" #H                                        \
	",\"num_attention_heads\":4,\"num_key_value_heads\":2,"                                    \
	"\"head_dim\":32,\"num_hidden_layers\":" #L                                                \
	",\"rms_norm_eps\":1e-5,\"hidden_act\":\"silu\","                                          \
	"\"max_position_embeddings\":256,\"rope_theta\":10000.0,\"vocab_size\":1000,"              \
	"\"intermediate_size\":64,"                                                                \
	"\"moe_intermediate_size\":" #I ",\"num_experts\":" #E                                     \
	",\"num_experts_per_tok\":2,\"decoder_sparse_step\":1,"                                    \
	"\"mlp_only_layers\":[],\"norm_topk_prob\":true,\"tie_word_embeddings\":false}"

/* A number behind a key in a file of /proc/self. */
static int64_t proc(const char *file, const char *key)
{
	FILE *f = fopen(file, "r");
	char line[256];
	long long v = -1;

	while (f && fgets(line, sizeof line, f))
		if (!strncmp(line, key, strlen(key)))
			sscanf(line + strlen(key), "%lld", &v);
	if (f)
		fclose(f);
	return v;
}

/* VmHWM begins at what is resident now. */
static bool reset_peak(void)
{
	int fd = open("/proc/self/clear_refs", O_WRONLY);
	bool good = fd >= 0 && write(fd, "5", 1) == 1;

	if (fd >= 0)
		close(fd);
	return good;
}

/* Of what weights are made of: other readers want shapes and orders of columns beside codes, the latter in *orders. */
static int64_t tensor_bytes(const char *dir, int64_t *orders)
{
	struct moe_safetensors *st = NULL;
	int64_t n = 0;

	*orders = 0;
	CHECK_OK(moe_safetensors_open(dir, &st));
	for (size_t i = 0; i < moe_safetensors_count(st); i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(st, i);

		if (strstr(t->name, "g_idx"))
			*orders += (int64_t)t->bytes;
		else if (!strstr(t->name, "weight_shape"))
			n += (int64_t)t->bytes;
	}
	moe_safetensors_close(st);
	return n;
}

static void convert(const char *in, const char *out, const char *weights)
{
	struct moe_convert_model_params p = {
		.struct_size = sizeof p, .in = in, .out = out, .weights = weights, .threads = 2
	};
	struct moe_convert_model_result r = { .struct_size = sizeof r };

	OK(moe_convert_model(&p, &r));
}

/* The experts of a layer in two tensors, as transformers 5 saves them. */
static void write_fused(const struct ref_model *ref, const char *dir)
{
	struct moe_st_item *items = calloc(ref->n_items + 1, sizeof *items);
	const struct moe_arch *a = &ref->arch;
	size_t n = 0, one = (size_t)(a->moe_intermediate * a->hidden);
	static char names[16][MOE_TENSOR_NAME_MAX];
	float *all[16] = { NULL };
	char path[700];

	for (size_t i = 0; i < ref->n_items; i++) {
		const struct ref_item *it = &ref->item[i];

		if (strstr(it->name, ".experts."))
			continue;
		items[n] = (struct moe_st_item){
			.name = it->name, .dtype = MOE_F32, .ndim = it->ndim, .data = it->data
		};
		memcpy(items[n++].shape, it->shape, sizeof it->shape);
	}
	for (int l = 0; l < a->n_layers; l++)
		for (int down = 0; down < 2; down++) {
			enum moe_role role =
				down ? MOE_ROLE_EXPERTS_DOWN : MOE_ROLE_EXPERTS_GATE_UP;
			int at = 2 * l + down, mats = down ? 1 : 2;

			all[at] = malloc((size_t)a->n_experts * (size_t)mats * one * sizeof(float));
			for (int e = 0; e < a->n_experts; e++)
				for (int j = 0; j < mats; j++)
					memcpy(all[at] +
						       ((size_t)e * (size_t)mats + (size_t)j) * one,
					       ref_get(ref,
						       down ? MOE_ROLE_EXPERT_DOWN
							    : MOE_ROLE_EXPERT_GATE + j,
						       l, e),
					       one * sizeof(float));
			moe_arch_tensor_name(a, role, l, -1, 0, names[at]);
			items[n] = (struct moe_st_item){ .name = names[at],
							 .dtype = MOE_F32,
							 .data = all[at] };
			items[n].ndim = moe_arch_tensor_shape(a, role, l, items[n].shape);
			n++;
		}
	snprintf(path, sizeof path, "%s/model.safetensors", dir);
	OK(moe_safetensors_write(path, items, n, NULL, 0));
	for (int i = 0; i < 16; i++)
		free(all[i]);
	free(items);
}

struct loading {
	const char *dir, *weights; /* as params.weights, or NULL */
	int parts;
	enum moe_method method;
	bool peak; /* what is in memory, else how much was read */
};

static int64_t shown;

static void progress(const char *what, int64_t done, int64_t total, void *user)
{
	(void)user;
	CHECK(what && done >= shown && done <= total);
	shown = done;
}

static void load(const void *arg)
{
	const struct loading *c = arg;
	struct moe_engine *e = open_with(2, c->parts, NULL);
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = c->dir,
				      .weights = c->weights,
				      .method = c->method,
				      .max_tokens = 16,
				      .inference_only = c->method == MOE_METHOD_LORA,
				      .progress = progress };
	struct moe_model_info info = { .struct_size = sizeof info };
	int64_t orders, bytes = tensor_bytes(c->dir, &orders), read, resident;
	struct moe_model *m = NULL;
	bool peak = !c->peak || reset_peak();

	resident = proc("/proc/self/status", "VmRSS:") << 10;
	read = proc("/proc/self/io", "rchar:");
	if (!CHECK_OK(moe_model_open(e, &p, &m)))
		return;
	read = proc("/proc/self/io", "rchar:") - read;
	CHECK_OK(moe_model_get_info(m, &info));
	CHECK(shown == bytes);
	if (c->peak && peak) {
		int64_t high = (proc("/proc/self/status", "VmHWM:") << 10) - resident;
		/* two layers, of what the weights take */
		int64_t most = info.weight_bytes + 2 * info.weight_bytes / info.layers;

		printf("  %s: %.1f MB of weights, at most %.1f MB more than before, bound %.1f\n",
		       c->dir + strlen(moe_test_dir()), 1e-6 * (double)info.weight_bytes,
		       1e-6 * (double)high, 1e-6 * (double)most);
		CHECK(high <= most || moe_test_sanitized()); /* whose heap keeps what was freed */
	} else {
		printf("  %s, %d parts: %lld bytes of tensors, %lld read\n",
		       c->dir + strlen(moe_test_dir()), c->parts, (long long)bytes,
		       (long long)read);
		/* the rest: config.json, a few numbers of the kernel's, orders of first experts again */
		CHECK(read >= bytes + orders && read < bytes + orders + (64 << 10));
	}
	moe_model_close(m);
	CHECK_OK(moe_engine_close(e));
}

#define MOST_FORMATS 16

/* bf16, and what convert calls the layouts of all formats; each once. */
static size_t formats_of(const char *out[MOST_FORMATS])
{
	size_t n = 0, j;

	out[n++] = "bf16";
	for (int i = 0; moe_format_list[i]; i++) {
		const struct moe_format *f = moe_format_list[i];

		for (int l = 0; l < MOE_FORMAT_LAYOUTS && f->layout[l].codes; l++) {
			const char *name = f->layout[l].name ? f->layout[l].name : f->name;

			if (strchr(name, ' ')) /* rows of fp8: read, and written by merge alone */
				continue;
			for (j = 0; j < n && strcmp(out[j], name); j++)
				;
			if (j == n && CHECK(n < MOST_FORMATS))
				out[n++] = name;
		}
	}
	return n;
}

static void test_read_once(void)
{
	const char *formats[MOST_FORMATS];
	size_t n_formats = formats_of(formats);
	static const struct loading more[] = { { .weights = "int8", .parts = 3 },
					       { .method = MOE_METHOD_FULL, .parts = 3 },
					       { .method = MOE_METHOD_HYBRID, .parts = 1 } };
	struct ref_model ref;
	char dir[600], fused[600];

	ref_create(&ref, "small", CONFIG(256, 384, 6, 2), 1);
	for (size_t i = 0; i < n_formats; i++) {
		snprintf(dir, sizeof dir, "%s/small-%s", moe_test_dir(), formats[i]);
		convert(ref.dir, dir, formats[i]);
		for (int parts = 1; parts <= 3; parts += 2) {
			const struct loading c = { .dir = dir, .parts = parts };

			CU_ASSERT(in_child(formats[i], load, &c));
		}
	}
	snprintf(dir, sizeof dir, "%s/small-bf16", moe_test_dir());
	for (size_t i = 0; i < MOE_COUNT(more); i++) {
		struct loading c = more[i];

		c.dir = dir;
		CU_ASSERT(in_child("small", load, &c));
	}
	snprintf(fused, sizeof fused, "%s/fused", moe_test_dir());
	OK(moe_dir_make(fused));
	snprintf(dir, sizeof dir, "%s/fused/config.json", moe_test_dir());
	OK(moe_file_write(dir, CONFIG(256, 384, 6, 2), strlen(CONFIG(256, 384, 6, 2))));
	write_fused(&ref, fused);
	for (int parts = 1; parts <= 3; parts += 2) {
		const struct loading c = { .dir = fused, .parts = parts };

		CU_ASSERT(in_child("fused", load, &c));
	}
	ref_free(&ref);
}

static void test_peak(void)
{
	const char *formats[MOST_FORMATS];
	size_t n_formats = formats_of(formats);
	struct ref_model ref;
	char dir[600];

	ref_create(&ref, "large", CONFIG(512, 512, 12, 8), 1);
	for (size_t i = 0; i < n_formats; i++) {
		struct loading c = { .dir = dir, .parts = 1, .peak = true };

		snprintf(dir, sizeof dir, "%s/large-%s", moe_test_dir(), formats[i]);
		convert(ref.dir, dir, formats[i]);
		CU_ASSERT(in_child(formats[i], load, &c));
		c.parts = 3;
		CU_ASSERT(in_child(formats[i], load, &c));
		if (i)
			continue;
		c.weights = "int8";
		CU_ASSERT(in_child("quantised while it is loaded", load, &c));
	}
	ref_free(&ref);
}

const struct moe_test moe_suite_tests[] = {
	{ "each byte is read once", test_read_once },
	{ "what is in memory while loading", test_peak },
	{ NULL, NULL },
};
