/* SPDX-License-Identifier: Apache-2.0 */
#include "model/readers/kt.h"
#include "model/file.h"
#include "model/quantised.h"
#include "model/readers/kt_awq.h"
#include "model/readers/kt_files.h"
#include "model/readers/kt_layout.h"
#include "model/readers/safetensors_table.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>

#define MOST_PARTS MOE_KT_MOST_PARTS
#define NAME_BYTES 256

extern const struct moe_format moe_format_int4, moe_format_int8;

/* One part of a matrix: in files, or in a mapped checkpoint. */
struct part {
	const char *quant, *scale; /* paths, or NULL: */
	const void *quant_data, *scale_data;
};

/* What a tensor's data are. */
struct matrix {
	struct moe_kt_files *files;
	int64_t n, k; /* of a part */
	int bits, parts;
	bool down; /* parts are of its columns, as those of down */
	struct part part[];
};

struct moe_kt {
	char *dir;
	struct moe_safetensors *st;  /* that is filled */
	struct moe_safetensors *blk; /* opened when a layer needs it */
	struct moe_kt_files *files;
	struct moe_st_codes codes[MOST_PARTS + 1][2][2]; /* by parts, 8 bits, down */
	struct moe_st_codes *awq;
	int file;
	uint64_t stamp;
	bool backward_told, backward_listed;
};

static const void *hold(const struct matrix *m, const char *path, const void *data, size_t bytes)
{
	return path ? moe_kt_files_hold(m->files, path, bytes) : data;
}

static void let_go(const struct matrix *m, const char *path)
{
	if (path)
		moe_kt_files_release(m->files, path);
}

static void codes(const struct moe_quantised *q, int64_t row, int64_t k0, int64_t k, uint8_t *out)
{
	const struct matrix *m = q->codes.data;

	while (k > 0) {
		int64_t p = m->down ? k0 / m->k : row / m->n, at = m->down ? k0 % m->k : k0;
		int64_t n = m->down ? MOE_MIN(k, m->k - at) : k;
		const struct part *part = &m->part[p];
		const void *data =
			hold(m, part->quant, part->quant_data, moe_kt_code_bytes(m->bits, m->n, m->k));

		if (data) {
			moe_kt_read_codes(m->bits, m->n, m->k, data, m->down ? row : row % m->n, at, n, out);
			let_go(m, part->quant);
		} else {
			memset(out, 0, (size_t)n);
		}
		out += n;
		k0 += n;
		k -= n;
	}
}

/* NaN where a file is gone since it was looked at: moe_check_scales tells. */
static float scale(const struct moe_quantised *q, int64_t row, int64_t group)
{
	const struct matrix *m = q->codes.data;
	const struct part *part = &m->part[m->down ? group : row / m->n];
	const char *data = hold(m, part->scale, part->scale_data, (size_t)m->n * sizeof(float));
	float s = NAN;

	if (!data)
		return s;
	memcpy(&s, data + (m->down ? row : row % m->n) * (int64_t)sizeof s, sizeof s);
	let_go(m, part->scale);
	return m->bits == 8 ? s : MOE_KT_INT4_VALUE * s;
}

static const struct moe_code_reader reader = { codes, scale, NULL };

/* ---- opening ---- */

static bool is_kt_file(const char *name)
{
	size_t n = strlen(name);

	return n > 3 && !strcmp(name + n - 3, ".kt");
}

/* dir's first .kt file whose name begins with prefix; into name. */
static bool first_kt(const char *dir, const char *prefix, char *name, size_t size)
{
	DIR *d = opendir(dir);
	bool found = false;
	struct dirent *e;

	while (d && (e = readdir(d)))
		if (is_kt_file(e->d_name) && !strncmp(e->d_name, prefix, strlen(prefix)) &&
		    (!found || strcmp(e->d_name, name) < 0)) {
			snprintf(name, size, "%s", e->d_name);
			found = true;
		}
	if (d)
		closedir(d);
	return found;
}

bool moe_kt_has_layer(const char *dir, int layer)
{
	char *path = moe_format("%s/_layer_%d/_numa_0", dir, layer), name[NAME_BYTES];
	bool has = path && first_kt(path, "", name, sizeof name);

	moe_free(path);
	return has;
}

uint64_t moe_kt_stamp(const struct moe_kt *kt)
{
	return kt->stamp;
}

void moe_kt_set_file(struct moe_kt *kt, int file)
{
	kt->file = file;
}

bool moe_kt_is(const char *dir)
{
	DIR *d = opendir(dir);
	bool is = false;
	struct dirent *e;
	int layer, end;

	while (d && !is && (e = readdir(d))) {
		end = 0;
		is = sscanf(e->d_name, "_layer_%d%n", &layer, &end) == 1 && !e->d_name[end] &&
		     moe_kt_has_layer(dir, layer);
	}
	if (d)
		closedir(d);
	return is;
}

static void close_kt(void *owned)
{
	struct moe_kt *kt = owned;

	moe_safetensors_close(kt->blk);
	moe_kt_files_destroy(kt->files);
	moe_free(kt->dir);
	moe_free(kt);
}

enum moe_status moe_kt_open(const char *dir, struct moe_safetensors *st, struct moe_kt **out)
{
	struct moe_kt *kt;

	*out = NULL;
	MOE_TRY(moe_dir_check(dir));
	kt = moe_calloc(1, sizeof *kt);
	if (kt) {
		kt->dir = moe_strdup(dir);
		kt->files = moe_kt_files_create();
		kt->st = st;
	}
	if (!kt || !kt->dir || !kt->files) {
		if (kt)
			close_kt(kt);
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", dir);
	}
	MOE_TRY(moe_st_table_own(st, kt, close_kt));
	*out = kt;
	return MOE_OK;
}

/* What a layer consists of. */
struct layer {
	struct moe_kt *kt;
	const struct moe_kt_shape *shape;
	int index, parts;
	int bits; /* of the files; in safetensors each matrix says */
	bool backward; /* prepared weights are there */
	bool awq;      /* tensors without parts */
};

static enum moe_status check_parts(const struct layer *l, const char *what)
{
	if (l->parts <= MOST_PARTS && l->shape->inner % l->parts == 0)
		return MOE_OK;
	return moe_fail(MOE_ERR_FORMAT,
			"%s: layer %d has %d NUMA parts, which do not divide the %lld rows of gate",
			what, l->index, l->parts, (long long)l->shape->inner);
}

/* Rows and columns of a part, as the packing of kt needs them. */
static enum moe_status size_part(const struct layer *l, const char *what, int which,
				 struct matrix *m)
{
	int64_t step = moe_kt_columns(m->bits);

	m->down = moe_kt_cuts_columns(which);
	m->parts = l->parts;
	m->files = l->kt->files;
	m->n = m->down ? l->shape->hidden : l->shape->inner / l->parts;
	m->k = m->down ? l->shape->inner / l->parts : l->shape->hidden;
	if (m->n % MOE_KT_ROWS == 0 && m->k % step == 0)
		return MOE_OK;
	return moe_fail(MOE_ERR_FORMAT,
			"%s: a part of %s is [%lld, %lld]; kt packs rows by %d and columns by %lld",
			what, moe_kt_names[which], (long long)m->n, (long long)m->k, MOE_KT_ROWS,
			(long long)step);
}

static const struct moe_st_codes *codes_of(struct moe_kt *kt, const struct matrix *m)
{
	struct moe_st_codes *c = &kt->codes[m->parts][m->bits == 8][m->down];

	c->q.coding =
		(struct moe_coding){ .format = m->bits == 8 ? &moe_format_int8 : &moe_format_int4,
				     .scale = MOE_F32,
				     .group = m->k,
				     .rows = 1 };
	c->q.reader = &reader;
	c->whole = true;
	return c;
}

static enum moe_status add(const struct layer *l, const char *name, bool backward, struct matrix *m)
{
	static const char *const texts[2][2] = { { "kt INT4", "kt INT4, backward" }, { "kt INT8", "kt INT8, backward" } };
	struct moe_st_tensor t = { .name = name,
				   .dtype_text = texts[m->bits == 8][backward],
				   .dtype = MOE_DTYPE_COUNT,
				   .ndim = 2,
				   .data = m,
				   .file = l->kt->file,
				   .bytes = sizeof *m + (size_t)m->parts * sizeof *m->part };

	t.stored = (size_t)m->parts * (moe_kt_code_bytes(m->bits, m->n, m->k) + (size_t)m->n * sizeof(float));
	t.shape[0] = m->down ? m->n : m->n * m->parts;
	t.shape[1] = m->down ? m->k * m->parts : m->k;
	t.codes = codes_of(l->kt, m);
	return backward ? moe_st_table_tensor(l->kt->st, &t) : moe_st_table_replace(l->kt->st, &t);
}

static enum moe_status no_memory(const struct layer *l)
{
	return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", l->kt->dir);
}

static struct matrix *new_matrix(const struct layer *l)
{
	return moe_st_table_memory(l->kt->st,
				   sizeof(struct matrix) + (size_t)l->parts * sizeof(struct part));
}

/* ---- .kt files ---- */

static void tell_backward(struct layer *l, bool there)
{
	l->backward = there;
	if (there && !l->kt->backward_told)
		moe_log(MOE_LOG_INFO,
			"%s: prepared backward weights are not used: a backward multiplies by the codes of the "
			"forward (direct)",
			l->kt->dir);
	l->kt->backward_told = l->kt->backward_told || there;
}

/* INT8 or INT4, by the files of the first part; how many parts there are. */
static enum moe_status look_at_layer(struct layer *l)
{
	char *first = moe_format("%s/_layer_%d/_numa_0", l->kt->dir, l->index),
	     name[NAME_BYTES] = "";
	enum moe_status st = MOE_OK;

	if (!first)
		return no_memory(l);
	l->bits = first_kt(first, "INT8_", name, sizeof name) ? 8 : 4;
	if (l->bits == 4 &&
	    (!first_kt(first, "INT4_", name, sizeof name) || !strncmp(name, "INT4_1", 6))) {
		first_kt(first, "", name, sizeof name);
		st = moe_fail(MOE_ERR_UNSUPPORTED,
			      "%s/%s: only files INT8_... and INT4_... can be read", first, name);
	}
	tell_backward(l, first_kt(first, l->bits == 8 ? "INT8_gate_bwd_" : "INT4_gate_bwd_", name,
				  sizeof name));
	moe_free(first);
	for (l->parts = 0; st == MOE_OK; l->parts++) {
		char *part = moe_format("%s/_layer_%d/_numa_%d", l->kt->dir, l->index, l->parts);
		bool there = part && moe_path_is_dir(part);

		if (!part)
			st = no_memory(l);
		moe_free(part);
		if (!there)
			break;
	}
	return st == MOE_OK ? check_parts(l, l->kt->dir) : st;
}

/* The path of a file, in memory of the table; it must have this many bytes. */
static enum moe_status find_file(const struct layer *l, int part, int which, int expert, bool scale, size_t bytes,
				 const char **out)
{
	char name[NAME_BYTES], *path;
	enum moe_status st;
	char *kept;

	moe_kt_file_name(name, sizeof name, l->index, part, l->bits, which, expert, bytes, scale);
	path = moe_path_join(l->kt->dir, name);
	st = path ? moe_kt_files_check(path, bytes, &l->kt->stamp) : no_memory(l);
	kept = st == MOE_OK ? moe_st_table_memory(l->kt->st, strlen(path) + 1) : NULL;
	if (st == MOE_OK && !kept)
		st = no_memory(l);
	if (kept)
		*out = strcpy(kept, path);
	moe_free(path);
	return st;
}

static enum moe_status open_files(const struct layer *l, int which, int expert, struct matrix *m)
{
	m->bits = l->bits;
	MOE_TRY(size_part(l, l->kt->dir, which, m));
	for (int p = 0; p < l->parts; p++) {
		MOE_TRY(find_file(l, p, which, expert, false, moe_kt_code_bytes(m->bits, m->n, m->k),
				  &m->part[p].quant));
		MOE_TRY(find_file(l, p, which, expert, true, (size_t)m->n * sizeof(float),
				  &m->part[p].scale));
	}
	return MOE_OK;
}

/* ---- safetensors ---- */

static void blk_name(const struct layer *l, int which, int expert, int part, const char *kind,
		     char *buf)
{
	snprintf(buf, NAME_BYTES, "blk.%d.ffn_%s_exps.%d.numa.%d.%s", l->index, moe_kt_names[which],
		 expert, part, kind);
}

static const struct moe_st_tensor *find_blk(const struct layer *l, int which, int expert, int part,
					    const char *kind)
{
	char name[NAME_BYTES];

	blk_name(l, which, expert, part, kind, name);
	return moe_safetensors_find(l->kt->blk, name);
}

static enum moe_status open_blk(struct moe_kt *kt)
{
	MOE_TRY(moe_st_table_open(kt->dir, &kt->blk));
	for (int i = 0; i < moe_safetensors_file_count(kt->blk); i++) {
		const void *data;
		size_t bytes;

		moe_safetensors_file_data(kt->blk, i, &data, &bytes);
		MOE_TRY(moe_kt_files_check(moe_safetensors_file_path(kt->blk, i), bytes, &kt->stamp));
	}
	return MOE_OK;
}

static enum moe_status look_at_blk(struct layer *l)
{
	struct moe_kt *kt = l->kt;
	char name[NAME_BYTES];

	if (!kt->blk && open_blk(kt) != MOE_OK)
		return moe_fail_in(
			MOE_ERR_IO,
			"%s: it has no _layer_%d/_numa_0/*.kt, and no safetensors with blk.%d",
			kt->dir, l->index, l->index);
	while (l->parts < MOST_PARTS && find_blk(l, 1, 0, l->parts, "weight"))
		l->parts++;
	l->awq = !l->parts && moe_kt_awq_has_layer(kt->blk, l->index);
	if (l->awq)
		return MOE_OK;
	if (!l->parts) {
		blk_name(l, 1, 0, 0, "weight", name);
		return moe_fail(MOE_ERR_FORMAT,
				"%s: it has no _layer_%d/_numa_0/*.kt, and its safetensors no %s",
				kt->dir, l->index, name);
	}
	snprintf(name, sizeof name, "blk.%d.ffn_gate_bwd_exps.0.numa.0.weight", l->index);
	tell_backward(l, moe_safetensors_find(kt->blk, name) != NULL);
	return check_parts(l, kt->dir);
}

static enum moe_status wrong_bytes(const struct layer *l, const struct moe_st_tensor *t,
				   int64_t want, const char *what)
{
	return moe_fail(MOE_ERR_FORMAT,
			"%s: tensor '%s' has %zu bytes of %s; %lld bytes of %s are expected",
			l->kt->dir, t->name, t->bytes, t->dtype_text, (long long)want, what);
}

static enum moe_status open_tensors(const struct layer *l, int which, int expert, struct matrix *m)
{
	for (int p = 0; p < l->parts; p++) {
		const struct moe_st_tensor *w = find_blk(l, which, expert, p, "weight"),
					   *s = find_blk(l, which, expert, p, "scale");
		char name[NAME_BYTES];

		blk_name(l, which, expert, p, w ? "scale" : "weight", name);
		if (!w || !s)
			return moe_fail(MOE_ERR_FORMAT, "%s: tensor '%s' is missing", l->kt->dir,
					name);
		if (p == 0)
			m->bits =
				w->bytes == (size_t)(l->shape->inner / l->parts * l->shape->hidden)
					? 8
					: 4;
		if (p == 0)
			MOE_TRY(size_part(l, w->name, which, m));
		if (w->bytes != moe_kt_code_bytes(m->bits, m->n, m->k) ||
		    moe_dtype_size(w->dtype) != 1)
			return wrong_bytes(l, w, m->n * m->k, "INT8, or half as many of INT4,");
		if (s->bytes != (size_t)m->n * sizeof(float) || s->dtype != MOE_F32)
			return wrong_bytes(l, s, m->n * (int64_t)sizeof(float), "F32");
		m->part[p] = (struct part){ .quant_data = w->data, .scale_data = s->data };
	}
	return MOE_OK;
}

/* ---- a layer ---- */

static enum moe_status open_matrix(const struct layer *l, bool files, int which, int expert, struct matrix **out)
{
	*out = new_matrix(l);
	if (!*out)
		return no_memory(l);
	return files ? open_files(l, which, expert, *out) : open_tensors(l, which, expert, *out);
}

/* Prepared backward weights of an expert: not used, but a folder of which they are damaged is not what was written. */
static enum moe_status look_at_backward(const struct layer *l, bool files, int expert)
{
	for (int which = MOE_KT_FORWARD; which < 2 * MOE_KT_FORWARD; which++) {
		struct matrix *m;
		char name[NAME_BYTES];

		if (open_matrix(l, files, which, expert, &m) != MOE_OK)
			return moe_fail_in(MOE_ERR_FORMAT,
					   "prepared backward weights (write them again, or remove them: they are not used)");
		snprintf(name, sizeof name, "model.layers.%d.mlp.experts.%d.%s_proj.weight_backward", l->index, expert,
			 moe_kt_names[which - MOE_KT_FORWARD]);
		if (l->kt->backward_listed)
			MOE_TRY(add(l, name, true, m));
	}
	return MOE_OK;
}

static enum moe_status add_awq(const struct layer *l, const char *name, int which, int expert)
{
	bool down = which == 2;
	struct moe_st_tensor t;
	enum moe_status st = moe_kt_awq_tensor(l->kt->blk, l->kt->st, l->index, moe_kt_names[which], expert,
					       down ? l->shape->hidden : l->shape->inner,
					       down ? l->shape->inner : l->shape->hidden, &l->kt->awq, &t);

	if (st != MOE_OK)
		return moe_fail_in(st, "%s", l->kt->dir);
	t.name = name;
	t.file = l->kt->file;
	return moe_st_table_replace(l->kt->st, &t);
}

enum moe_status moe_kt_add_layer(struct moe_kt *kt, const struct moe_kt_shape *shape, int layer,
				 moe_kt_name_fn name, void *user)
{
	struct layer l = { .kt = kt, .shape = shape, .index = layer };
	bool files = moe_kt_has_layer(kt->dir, layer);
	char buf[NAME_BYTES];

	MOE_TRY(files ? look_at_layer(&l) : look_at_blk(&l));
	for (int e = 0; e < shape->experts; e++) {
		for (int which = 0; which < MOE_KT_FORWARD; which++) {
			struct matrix *m;

			if (!name(user, layer, which, e, buf, sizeof buf))
				return moe_fail(MOE_ERR_FORMAT,
						"%s: layer %d has no experts in this model",
						kt->dir, layer);
			if (l.awq) {
				MOE_TRY(add_awq(&l, buf, which, e));
				continue;
			}
			MOE_TRY(open_matrix(&l, files, which, e, &m));
			MOE_TRY(add(&l, buf, false, m));
		}
		if (l.backward)
			MOE_TRY(look_at_backward(&l, files, e));
	}
	return MOE_OK;
}

void moe_kt_list_backward(struct moe_kt *kt)
{
	kt->backward_listed = true;
}
