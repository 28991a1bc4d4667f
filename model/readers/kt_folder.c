/* SPDX-License-Identifier: Apache-2.0 */
/* A folder of kt-kernel's as a checkpoint of its own: layers, experts and sizes by the names and
 * sizes of its files. */
#include "model/file.h"
#include "model/readers/kt.h"
#include "model/readers/kt_awq.h"
#include "model/readers/kt_layout.h"
#include "model/readers/safetensors_table.h"

#include <dirent.h>
#include <stdio.h>

#define MOST_LAYERS 4096
#define MOST_EXPERTS 65536
#define MOST_PARTS MOE_KT_MOST_PARTS
#define MOST_BYTES ((size_t)1 << 30) /* of scales */
#define NAME_BYTES 256

/* What is known of a layer before it is read. */
struct layer {
	bool files, tensors;
	int experts, parts, file;
	size_t gate_scale, down_scale; /* bytes of one part */
	int64_t inner, hidden;	       /* of AWQ weights, else 0 */
};

struct folder {
	const char *dir;
	struct moe_safetensors *st;
	struct layer layer[MOST_LAYERS];
};

/* blk.N.ffn_gate_exps.E.numa.P.weight */
struct blk {
	int layer, expert, part;
	char which[8], kind[8];
};

static bool parse_blk(const char *name, struct blk *b)
{
	int end = 0;

	return sscanf(name, "blk.%d.ffn_%4[a-z]_exps.%d.numa.%d.%6[a-z]%n", &b->layer, b->which,
		      &b->expert, &b->part, b->kind, &end) == 5 &&
	       !name[end] && b->layer >= 0 && b->expert >= 0 && b->part >= 0;
}

bool moe_kt_is_merged(const struct moe_safetensors *st)
{
	struct moe_kt_awq_name awq;
	struct blk b;

	for (size_t i = 0; i < moe_safetensors_count(st); i++)
		if (parse_blk(moe_safetensors_at(st, i)->name, &b) ||
		    moe_kt_awq_parse(moe_safetensors_at(st, i)->name, &awq))
			return true;
	return false;
}

/* ---- what is there ---- */

static enum moe_status too_many(const struct folder *f, const char *name)
{
	return moe_fail(MOE_ERR_FORMAT,
			"%s: %s: at most %d layers, %d experts and %d NUMA parts are possible",
			f->dir, name, MOST_LAYERS, MOST_EXPERTS, MOST_PARTS);
}

static enum moe_status look_at_awq(struct folder *f, const struct moe_st_tensor *t, const struct moe_kt_awq_name *a)
{
	struct layer *l;

	if (a->layer >= MOST_LAYERS || a->expert >= MOST_EXPERTS)
		return too_many(f, t->name);
	l = &f->layer[a->layer];
	l->tensors = true;
	l->parts = MOE_MAX(l->parts, 1);
	l->experts = MOE_MAX(l->experts, a->expert + 1);
	if (a->expert || strcmp(a->kind, "weight") || t->ndim != 2)
		return MOE_OK;
	l->file = t->file;
	if (!strcmp(a->which, "gate"))
		l->inner = t->shape[0];
	if (!strcmp(a->which, "down"))
		l->hidden = t->shape[0];
	return MOE_OK;
}

static enum moe_status look_at_tensors(struct folder *f)
{
	for (size_t i = 0; i < moe_safetensors_count(f->st); i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(f->st, i);
		struct moe_kt_awq_name awq;
		struct layer *l;
		struct blk b;

		if (moe_kt_awq_parse(t->name, &awq))
			MOE_TRY(look_at_awq(f, t, &awq));
		if (!parse_blk(t->name, &b))
			continue;
		if (b.layer >= MOST_LAYERS || b.expert >= MOST_EXPERTS || b.part >= MOST_PARTS)
			return too_many(f, t->name);
		l = &f->layer[b.layer];
		l->tensors = true;
		l->experts = MOE_MAX(l->experts, b.expert + 1);
		l->parts = MOE_MAX(l->parts, b.part + 1);
		if (b.expert || b.part)
			continue;
		l->file = t->file;
		if (!strcmp(b.kind, "scale") && !strcmp(b.which, "gate"))
			l->gate_scale = t->bytes;
		if (!strcmp(b.kind, "scale") && !strcmp(b.which, "down"))
			l->down_scale = t->bytes;
	}
	return MOE_OK;
}

/* Files of a layer's first part; INT8 where there are both, as the reader has it. */
static void look_at_files(struct layer *l, DIR *d)
{
	struct dirent *e;
	int chosen = 0;

	while ((e = readdir(d))) {
		char which[8], kind[8];
		int bits, expert, end = 0;
		size_t bytes;

		if (sscanf(e->d_name, "INT%1d_%4[a-z]_%d_%zuByte_%5[a-z]_.kt%n", &bits, which,
			   &expert, &bytes, kind, &end) != 5 ||
		    !end || e->d_name[end] || expert < 0 || expert >= MOST_EXPERTS ||
		    bytes > MOST_BYTES || (bits != 8 && bits != 4) || bits < chosen)
			continue;
		if (bits > chosen)
			l->experts = 0;
		chosen = bits;
		l->experts = MOE_MAX(l->experts, expert + 1);
		if (expert || strcmp(kind, "scale"))
			continue;
		if (!strcmp(which, "gate"))
			l->gate_scale = bytes;
		if (!strcmp(which, "down"))
			l->down_scale = bytes;
	}
}

static enum moe_status look_at_layer(struct folder *f, int layer)
{
	struct layer *l = &f->layer[layer];
	char *first = moe_format("%s/_layer_%d/_numa_0", f->dir, layer);
	DIR *d = first ? opendir(first) : NULL;

	*l = (struct layer){ .files = true, .file = l->file };
	if (d) {
		look_at_files(l, d);
		closedir(d);
	}
	moe_free(first);
	for (bool there = true; there && l->parts <= MOST_PARTS; l->parts += there) {
		char *part = moe_format("%s/_layer_%d/_numa_%d", f->dir, layer, l->parts);

		there = part && moe_path_is_dir(part);
		moe_free(part);
	}
	if (l->experts && l->gate_scale && l->down_scale)
		return MOE_OK;
	return moe_fail(MOE_ERR_UNSUPPORTED,
			"%s/_layer_%d/_numa_0: only files INT8_... and INT4_..., each with its "
			"scales, can be read",
			f->dir, layer);
}

static enum moe_status look_at_folders(struct folder *f)
{
	DIR *d = opendir(f->dir);
	enum moe_status status = MOE_OK;
	struct dirent *e;

	while (d && status == MOE_OK && (e = readdir(d))) {
		int layer, end = 0;

		if (sscanf(e->d_name, "_layer_%d%n", &layer, &end) != 1 || e->d_name[end] ||
		    layer < 0 || !moe_kt_has_layer(f->dir, layer))
			continue;
		status = layer < MOST_LAYERS ? look_at_layer(f, layer) : too_many(f, e->d_name);
	}
	if (d)
		closedir(d);
	return status;
}

/* ---- filling ---- */

/* kt-kernel's converter wrote blk.N. for model.layers.N., and dropped "model." elsewhere. */
static const char *rename_tensor(void *user, const struct moe_st_tensor *t, char *buf, size_t size)
{
	static const char *const of_model[] = { "embed_tokens.", "norm." };
	struct moe_kt_awq_name awq;

	(void)user;
	if (moe_kt_awq_parse(t->name, &awq))
		return NULL;
	if (!strncmp(t->name, "blk.", 4)) {
		if (strstr(t->name, "_exps.") && strstr(t->name, ".numa."))
			return NULL;
		snprintf(buf, size, "model.layers.%s", t->name + 4);
		return buf;
	}
	for (size_t i = 0; i < MOE_COUNT(of_model); i++)
		if (!strncmp(t->name, of_model[i], strlen(of_model[i]))) {
			snprintf(buf, size, "model.%s", t->name);
			return buf;
		}
	return t->name;
}

static bool expert_name(void *user, int layer, int which, int expert, char *buf, size_t size)
{
	static const char *const names[3] = { "gate", "up", "down" };

	(void)user;
	snprintf(buf, size, "model.layers.%d.mlp.experts.%d.%s_proj.weight", layer, expert,
		 names[which]);
	return true;
}

static enum moe_status add_layer(const struct folder *f, struct moe_kt *kt, int i)
{
	const struct layer *l = &f->layer[i];
	const struct moe_kt_shape shape = { .experts = l->experts,
					    .hidden = l->hidden ? l->hidden : (int64_t)(l->down_scale / sizeof(float)),
					    .inner = l->inner ? l->inner
							      : (int64_t)(l->gate_scale / sizeof(float)) * l->parts };

	if (shape.hidden < 1 || shape.inner < 1)
		return moe_fail(MOE_ERR_FORMAT,
				"%s: layer %d has no sizes of gate and down of its first expert",
				f->dir, i);
	if (l->files) {
		char *path = moe_format("%s/_layer_%d", f->dir, i);
		enum moe_status status =
			path ? moe_st_table_file(f->st, path, (struct moe_mapping){ 0 })
			     : moe_fail(MOE_ERR_NOMEM, "%s: out of memory", f->dir);

		moe_free(path);
		MOE_TRY(status);
	}
	moe_kt_set_file(kt, l->files ? moe_safetensors_file_count(f->st) - 1 : l->file);
	return moe_kt_add_layer(kt, &shape, i, expert_name, NULL);
}

static enum moe_status fill(struct folder *f)
{
	struct moe_kt *kt;

	MOE_TRY(look_at_tensors(f));
	MOE_TRY(look_at_folders(f));
	MOE_TRY(moe_st_table_rename(f->st, rename_tensor, NULL));
	MOE_TRY(moe_kt_open(f->dir, f->st, &kt));
	moe_kt_list_backward(kt);
	for (int i = 0; i < MOST_LAYERS; i++)
		if (f->layer[i].files || f->layer[i].tensors)
			MOE_TRY(add_layer(f, kt, i));
	return MOE_OK;
}

enum moe_status moe_kt_fill(const char *dir, struct moe_safetensors *st)
{
	struct folder *f = moe_calloc(1, sizeof *f);
	enum moe_status status;

	if (!f)
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", dir);
	f->dir = dir;
	f->st = st;
	status = fill(f);
	moe_free(f);
	return status;
}
