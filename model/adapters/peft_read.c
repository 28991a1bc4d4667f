/* SPDX-License-Identifier: Apache-2.0 */
#include "model/adapters/peft.h"
#include "model/file.h"
#include "model/json.h"
#include "model/readers/safetensors.h"

#include <math.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>

#define PREFIX "base_model.model.model.layers."

/* The modules of a layer in file names; the two of experts are nested wrappers. */
enum { MODULE_INNER = MOE_ADAPTER_EXPERTS, MODULE_OUTER, MODULES };
static const char *const module_names[MODULES] = {
	"self_attn.q_proj", "self_attn.k_proj",	      "self_attn.v_proj",
	"self_attn.o_proj", "mlp.experts.base_layer", "mlp.experts",
};

struct pair {
	const struct moe_st_tensor *a, *b;
};

struct reading {
	struct moe_safetensors *file;
	cJSON *config;
	struct pair (*layers)[MODULES]; /* [MOE_ARCH_MAX_LAYERS] */
	struct moe_adapter *adapter;
};

/* What config says of one target. */
struct setting {
	int64_t rank;
	double alpha;
};

/* PEFT: re.match(rf"(.*\.)?({key})$", name); the first key of the pattern that matches counts. */
static bool key_matches(const char *key, const char *name)
{
	char *pattern = moe_format("^(.*\\.)?(%s)$", key);
	bool matches = false;
	regex_t re;

	if (pattern && regcomp(&re, pattern, REG_EXTENDED | REG_NOSUB) == 0) {
		matches = regexec(&re, name, 0, NULL, 0) == 0;
		regfree(&re);
	}
	moe_free(pattern);
	return matches;
}

static const cJSON *pattern_value(const cJSON *config, const char *pattern, const char *name)
{
	const cJSON *c;

	cJSON_ArrayForEach(
		c, moe_json_get(config, pattern)) if (c->string &&
						      key_matches(c->string, name)) return c;
	return NULL;
}

/* target as PEFT names it below the layer: self_attn.q_proj, mlp.experts.down_proj. */
static enum moe_status setting_of(const struct reading *rd, int layer, const char *target,
				  struct setting *out)
{
	const cJSON *rank, *alpha;
	char name[96];

	snprintf(name, sizeof name, "model.layers.%d.%s", layer, target);
	rank = pattern_value(rd->config, "rank_pattern", name);
	alpha = pattern_value(rd->config, "alpha_pattern", name);
	*out = (struct setting){ rd->adapter->rank, rd->adapter->alpha };
	if (rank)
		MOE_TRY(moe_json_as_int(rank, "rank_pattern", 1, INT32_MAX, &out->rank));
	if (alpha && !cJSON_IsNumber(alpha))
		return moe_fail(MOE_ERR_FORMAT, "alpha_pattern of %s is not a number", name);
	if (alpha)
		out->alpha = alpha->valuedouble;
	return MOE_OK;
}

static double scaling_of(const struct reading *rd, struct setting s)
{
	double rank = (double)s.rank;

	return s.alpha / (rd->adapter->rslora ? sqrt(rank) : rank);
}

static enum moe_status refuse_true(const cJSON *config, const char *key)
{
	bool set = false;

	MOE_TRY(moe_json_opt_bool(config, key, &set));
	return set ? moe_fail(MOE_ERR_UNSUPPORTED, "%s is not implemented", key) : MOE_OK;
}

/*
 * Keys are regular expressions from a file that somebody else wrote: repetition counts and back
 * references could make matching take for ever, and no adapter needs them.
 */
static enum moe_status check_patterns(const cJSON *config, const char *pattern)
{
	const cJSON *v = moe_json_get(config, pattern), *c;

	if (v && !cJSON_IsObject(v))
		return moe_fail(MOE_ERR_FORMAT, "%s is not an object", pattern);
	cJSON_ArrayForEach(c, v)
	{
		const char *backslash = strchr(c->string, '\\');

		while (backslash && backslash[1] == '.')
			backslash = strchr(backslash + 2, '\\');
		if (backslash || strpbrk(c->string, "{[+?") || strlen(c->string) > 512)
			return moe_fail(MOE_ERR_UNSUPPORTED,
					"%s has the key '%.100s': only names and "
					"simple expressions are",
					pattern, c->string);
	}
	return MOE_OK;
}

static enum moe_status read_config(struct reading *rd)
{
	const char *type = NULL, *bias = "none", *base = NULL;
	static const char *const flags[] = { "use_dora", "lora_bias", "fan_in_fan_out",
					     "use_qalora" };
	const cJSON *c = rd->config, *saved = moe_json_get(c, "modules_to_save");
	struct moe_adapter *adapter = rd->adapter;

	MOE_TRY(moe_json_opt_text(c, "peft_type", &type));
	if (!type || strcmp(type, "LORA") != 0)
		return moe_fail(MOE_ERR_UNSUPPORTED, "peft_type '%.64s' is not LORA",
				type ? type : "");
	MOE_TRY(moe_json_int(c, "r", 1, INT32_MAX, &adapter->rank));
	if (!moe_json_get(c, "lora_alpha"))
		return moe_fail(MOE_ERR_FORMAT, "lora_alpha is missing");
	MOE_TRY(moe_json_opt_real(c, "lora_alpha", &adapter->alpha));
	MOE_TRY(moe_json_opt_bool(c, "use_rslora", &adapter->rslora));
	MOE_TRY(check_patterns(c, "rank_pattern"));
	MOE_TRY(check_patterns(c, "alpha_pattern"));
	MOE_TRY(moe_json_opt_text(c, "bias", &bias));
	if (strcmp(bias, "none") != 0)
		return moe_fail(MOE_ERR_UNSUPPORTED, "bias '%.64s' is not implemented", bias);
	for (size_t i = 0; i < MOE_COUNT(flags); i++)
		MOE_TRY(refuse_true(c, flags[i]));
	if (cJSON_GetArraySize(saved) || cJSON_IsString(saved))
		return moe_fail(MOE_ERR_UNSUPPORTED, "modules_to_save is not implemented");
	if (moe_json_get(c, "layer_replication"))
		return moe_fail(MOE_ERR_UNSUPPORTED, "layer_replication is not implemented");
	MOE_TRY(moe_json_opt_text(c, "base_model_name_or_path", &base));
	adapter->base_model = base ? moe_strdup(base) : NULL;
	if (base && !adapter->base_model)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	return MOE_OK;
}

/* Sorts one tensor into rd->layers by its name. */
static enum moe_status place_tensor(struct reading *rd, const struct moe_st_tensor *t)
{
	static const char *const suffixes[2] = { ".lora_A.weight", ".lora_B.weight" };
	const char *p = t->name;
	size_t n = strlen(p), len = strlen(suffixes[0]);
	long layer;
	char *rest;

	if (strncmp(p, PREFIX, sizeof PREFIX - 1) != 0)
		goto unknown;
	p += sizeof PREFIX - 1;
	layer = *p >= '0' && *p <= '9' ? strtol(p, &rest, 10) : -1;
	if (layer < 0 || layer >= MOE_ARCH_MAX_LAYERS || *rest++ != '.')
		goto unknown;
	n -= (size_t)(rest - t->name);
	for (int ab = 0; n > len && ab < 2; ab++) {
		if (strcmp(rest + n - len, suffixes[ab]) != 0)
			continue;
		for (int m = 0; m < MODULES; m++) {
			struct pair *pair = &rd->layers[layer][m];
			const struct moe_st_tensor **slot = ab ? &pair->b : &pair->a;

			if (strlen(module_names[m]) != n - len ||
			    strncmp(rest, module_names[m], n - len) != 0)
				continue;
			if (*slot) /* "01" and "1" are one layer */
				return moe_fail(MOE_ERR_FORMAT,
						"tensors '%.200s' and '%.200s' are "
						"the same",
						t->name, (*slot)->name);
			*slot = t;
			return MOE_OK;
		}
	}
unknown:
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"tensor '%.200s' is not of an adapter of attention "
			"projections or fused experts",
			t->name);
}

/* Both matrices of a pair, with A's rows equal to B's columns. */
static enum moe_status check_pair(const struct pair *pair)
{
	const struct moe_st_tensor *a = pair->a, *b = pair->b;

	if (!a || !b)
		return moe_fail(MOE_ERR_FORMAT, "tensor '%.200s' has no partner lora_%c",
				a ? a->name : b->name, a ? 'B' : 'A');
	for (int i = 0; i < 2; i++, a = b)
		if (a->ndim != 2 || a->shape[0] < 1 || a->shape[1] < 1)
			return moe_fail(MOE_ERR_FORMAT, "tensor '%.200s' is not a matrix", a->name);
	if (pair->a->shape[0] != b->shape[1])
		return moe_fail(MOE_ERR_FORMAT,
				"tensor '%.200s' has %lld rows, its lora_B %lld "
				"columns",
				pair->a->name, (long long)pair->a->shape[0],
				(long long)b->shape[1]);
	return MOE_OK;
}

static enum moe_status convert(const struct moe_st_tensor *t, float *out)
{
	if (t->dtype == MOE_DTYPE_COUNT ||
	    !moe_to_f32(out, t->data, t->dtype, (size_t)(t->shape[0] * t->shape[1])))
		return moe_fail(MOE_ERR_UNSUPPORTED, "tensor '%.200s' has dtype %.32s", t->name,
				t->dtype_text);
	return MOE_OK;
}

static enum moe_status alloc_floats(size_t n, float **out)
{
	*out = moe_alloc(n, sizeof **out);
	return *out ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "out of memory for %zu values", n);
}

static size_t elements(const struct moe_st_tensor *t)
{
	return (size_t)(t->shape[0] * t->shape[1]);
}

static enum moe_status read_attention(const struct reading *rd, const struct pair *pair,
				      struct moe_adapter_entry *e)
{
	struct setting s;

	MOE_TRY(check_pair(pair));
	MOE_TRY(setting_of(rd, e->layer, module_names[e->target], &s));
	e->rank = pair->a->shape[0];
	e->alpha = s.alpha;
	e->in = pair->a->shape[1];
	e->out = pair->b->shape[0];
	if (e->rank != s.rank)
		return moe_fail(MOE_ERR_FORMAT,
				"tensor '%.200s' has rank %lld, the configuration %lld",
				pair->a->name, (long long)e->rank, (long long)s.rank);
	MOE_TRY(alloc_floats(elements(pair->a) + elements(pair->b), &e->a));
	e->block = e->a;
	e->b = e->a + elements(pair->a);
	MOE_TRY(convert(pair->a, e->a));
	return convert(pair->b, e->b);
}

/* b[e, row, j] = fused[row, (first + j) * E + e]: the inverse of PEFT's B. */
static void gather_b(float *b, const float *fused, int64_t columns, int64_t first,
		     const struct moe_adapter_entry *e, int64_t rows)
{
	for (int64_t x = 0; x < e->n_experts; x++)
		for (int64_t row = 0; row < rows; row++)
			for (int64_t j = 0; j < e->rank; j++)
				b[(x * rows + row) * e->rank + j] =
					fused[row * columns + (first + j) * e->n_experts + x];
}

/* true if gate rows use only the first half of fused gate_up's columns, up rows only the second. */
static bool is_block_diagonal(const float *fused, int64_t inter, int64_t columns)
{
	for (int64_t row = 0; row < 2 * inter; row++) {
		const float *zeros = fused + row * columns + (row < inter ? columns / 2 : 0);

		for (int64_t c = 0; c < columns / 2; c++)
			if (zeros[c] != 0)
				return false;
	}
	return true;
}

/*
 * Which pair is gate_up: PEFT nests the wrappers in the order of the module's parameters, which the
 * file does not tell, but the shapes do ([H -> 2I] and [I -> H] cannot both fit either way).
 */
static enum moe_status tell_apart(const struct pair *module, const struct pair **gate_up,
				  const struct pair **down)
{
	for (int i = 0; i < 2; i++) {
		const struct pair *g = &module[i], *d = &module[1 - i];

		if (g->a->shape[1] == d->b->shape[0] && g->b->shape[0] == 2 * d->a->shape[1]) {
			*gate_up = g;
			*down = d;
			return MOE_OK;
		}
	}
	return moe_fail(MOE_ERR_FORMAT,
			"tensors '%.200s' and '%.200s' do not fit gate_up and down "
			"of the same experts",
			module[0].a->name, module[1].a->name);
}

/* Sizes, rank and whether gate and up could have their own A, from shapes and configuration. */
static enum moe_status size_experts(const struct reading *rd, const struct pair *gate_up,
				    const struct pair *down, struct moe_adapter_entry *e,
				    bool *own_a)
{
	struct setting g, d;

	MOE_TRY(setting_of(rd, e->layer, "mlp.experts.gate_up_proj", &g));
	MOE_TRY(setting_of(rd, e->layer, "mlp.experts.down_proj", &d));
	e->rank = d.rank;
	e->alpha = d.alpha;
	e->hidden = gate_up->a->shape[1];
	e->intermediate = down->a->shape[1];
	e->n_experts = down->a->shape[0] / d.rank;
	if (!e->n_experts || down->a->shape[0] % d.rank || gate_up->a->shape[0] % g.rank ||
	    gate_up->a->shape[0] / g.rank != e->n_experts)
		return moe_fail(MOE_ERR_FORMAT,
				"tensors '%.200s' (%lld rows) and '%.200s' (%lld rows) "
				"do not fit the configured ranks %lld and %lld",
				gate_up->a->name, (long long)gate_up->a->shape[0], down->a->name,
				(long long)down->a->shape[0], (long long)g.rank, (long long)d.rank);
	*own_a = g.rank == 2 * d.rank;
	if ((!*own_a && g.rank != d.rank) ||
	    fabs(scaling_of(rd, g) - scaling_of(rd, d)) > 1e-6 * fabs(scaling_of(rd, d)))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"layer %d: gate_up has rank %lld alpha %g, down "
				"rank %lld alpha %g: not implemented",
				e->layer, (long long)g.rank, g.alpha, (long long)d.rank, d.alpha);
	return MOE_OK;
}

static enum moe_status alloc_experts(struct moe_adapter_entry *e, bool share_a)
{
	size_t x = (size_t)(e->n_experts * e->rank), h = x * (size_t)e->hidden;
	size_t i = x * (size_t)e->intermediate;

	MOE_TRY(alloc_floats((share_a ? 2 : 3) * h + 3 * i, &e->gate_a));
	e->block = e->gate_a;
	e->up_a = share_a ? e->gate_a : e->gate_a + h;
	e->down_a = e->up_a + h;
	e->gate_b = e->down_a + i;
	e->up_b = e->gate_b + i;
	e->down_b = e->up_b + i;
	return MOE_OK;
}

/* Undoes the fused layout; scratch has room for the largest of the four tensors. */
static enum moe_status unpack_experts(const struct pair *gate_up, const struct pair *down,
				      struct moe_adapter_entry *e, bool own_a, float *scratch)
{
	int64_t columns = gate_up->b->shape[1], inter = e->intermediate;
	size_t n = (size_t)(e->rank * e->hidden);

	MOE_TRY(convert(gate_up->b, scratch));
	if (own_a && !is_block_diagonal(scratch, inter, columns))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"tensor '%.200s' has twice the rank of down but "
				"gate and up share it: not implemented",
				gate_up->b->name);
	gather_b(e->gate_b, scratch, columns, 0, e, inter);
	gather_b(e->up_b, scratch + inter * columns, columns, own_a ? e->rank : 0, e, inter);
	MOE_TRY(convert(down->b, scratch));
	gather_b(e->down_b, scratch, down->b->shape[1], 0, e, e->hidden);
	MOE_TRY(convert(down->a, e->down_a));
	if (!own_a)
		return convert(gate_up->a, e->gate_a);
	MOE_TRY(convert(gate_up->a, scratch));
	for (int64_t x = 0; x < e->n_experts; x++) {
		memcpy(e->gate_a + (size_t)x * n, scratch + 2 * (size_t)x * n, n * sizeof *scratch);
		memcpy(e->up_a + (size_t)x * n, scratch + (2 * (size_t)x + 1) * n,
		       n * sizeof *scratch);
	}
	return MOE_OK;
}

static enum moe_status read_experts(struct reading *rd, const struct pair *module,
				    struct moe_adapter_entry *e, bool first)
{
	const struct pair *gate_up = NULL, *down = NULL;
	enum moe_status status;
	float *scratch;
	bool own_a = false;

	if (!(module[0].a || module[0].b) || !(module[1].a || module[1].b))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"layer %d adapts only one of gate_up_proj and "
				"down_proj: not implemented",
				e->layer);
	MOE_TRY(check_pair(&module[0]));
	MOE_TRY(check_pair(&module[1]));
	MOE_TRY(tell_apart(module, &gate_up, &down));
	MOE_TRY(size_experts(rd, gate_up, down, e, &own_a));
	if (!first && rd->adapter->share_a == own_a)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"layer %d: gate_up's rank differs from the layers "
				"before: not implemented",
				e->layer);
	rd->adapter->share_a = !own_a;
	MOE_TRY(alloc_experts(e, !own_a));
	MOE_TRY(alloc_floats(MOE_MAX(MOE_MAX(elements(gate_up->a), elements(gate_up->b)),
				     MOE_MAX(elements(down->a), elements(down->b))),
			     &scratch));
	status = unpack_experts(gate_up, down, e, own_a, scratch);
	moe_free(scratch);
	return status;
}

static size_t count_entries(const struct reading *rd)
{
	size_t n = 0;

	for (int i = 0; i < MOE_ARCH_MAX_LAYERS; i++)
		for (int m = 0; m < MODULES; m++)
			n += rd->layers[i][m].a || rd->layers[i][m].b;
	return n;
}

static enum moe_status read_layers(struct reading *rd)
{
	struct moe_adapter *adapter = rd->adapter;
	bool first = true;

	adapter->entries = moe_calloc(count_entries(rd), sizeof *adapter->entries);
	if (!adapter->entries)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	for (int i = 0; i < MOE_ARCH_MAX_LAYERS; i++) {
		const struct pair *p = rd->layers[i];

		for (int t = 0; t < MOE_ADAPTER_TARGETS; t++) {
			struct moe_adapter_entry *e = &adapter->entries[adapter->n_entries];
			bool experts = t == MOE_ADAPTER_EXPERTS;

			if (!p[t].a && !p[t].b &&
			    (!experts || (!p[MODULE_OUTER].a && !p[MODULE_OUTER].b)))
				continue;
			adapter->n_entries++; /* before reading: its block must be freed */
			e->layer = i;
			e->target = (enum moe_adapter_target)t;
			if (!experts) {
				MOE_TRY(read_attention(rd, &p[t], e));
				continue;
			}
			MOE_TRY(read_experts(rd, &p[MODULE_INNER], e, first));
			first = false;
		}
	}
	return MOE_OK;
}

static enum moe_status read_all(struct reading *rd, const char *dir)
{
	char *tensors = moe_path_join(dir, "adapter_model.safetensors");
	char *config = moe_path_join(dir, "adapter_config.json");
	enum moe_status status;

	rd->adapter = moe_calloc(1, sizeof *rd->adapter);
	rd->layers = moe_calloc(MOE_ARCH_MAX_LAYERS, sizeof *rd->layers);
	if (!tensors || !config || !rd->adapter || !rd->layers) {
		status = moe_fail(MOE_ERR_NOMEM, "out of memory");
		goto done;
	}
	MOE_TRY_GOTO(moe_json_read(config, &rd->config), status, done);
	MOE_TRY_GOTO(read_config(rd), status, done);
	MOE_TRY_GOTO(moe_safetensors_open(tensors, &rd->file), status, done);
	if (!moe_safetensors_count(rd->file)) {
		status = moe_fail(MOE_ERR_FORMAT, "holds no tensors");
		goto done;
	}
	for (size_t i = 0; i < moe_safetensors_count(rd->file); i++)
		MOE_TRY_GOTO(place_tensor(rd, moe_safetensors_at(rd->file, i)), status, done);
	status = read_layers(rd);
done:
	moe_free(tensors);
	moe_free(config);
	return status;
}

enum moe_status moe_peft_read(const char *dir, struct moe_adapter **out)
{
	struct reading rd = { 0 };
	enum moe_status status = read_all(&rd, dir);

	if (status != MOE_OK) {
		moe_fail_in(status, "adapter %s", dir);
		moe_adapter_free(rd.adapter);
	} else {
		*out = rd.adapter;
	}
	moe_safetensors_close(rd.file);
	cJSON_Delete(rd.config);
	moe_free(rd.layers);
	return status;
}
