/* SPDX-License-Identifier: Apache-2.0 */
#include "model/convert_kt.h"
#include "model/expert_names.h"

#include <stdio.h>

#define PLAIN_SUFFIX ".weight"

/* ---- targets ---- */

static const struct {
	const char *name;
	enum moe_dtype dtype;
} plain_targets[] = { { "bf16", MOE_BF16 }, { "f16", MOE_F16 }, { "f32", MOE_F32 } };

static void find_layouts(const char *name, const struct moe_format *f, struct moe_convert_target *t)
{
	for (int i = 0; i < MOE_FORMAT_LAYOUTS && f->layout[i].codes; i++) {
		const struct moe_format_layout *l = &f->layout[i];

		/* a name of two words: merge writes it where it was read */
		if (!l->writer || strchr(name, ' ') || strcmp(l->name ? l->name : f->name, name))
			continue;
		if (*l->codes == '.' && !t->single)
			t->single = l;
		if (*l->codes == '_' && !t->fused) /* gpt-oss's; elsewhere experts are one by one */
			t->fused = l;
	}
	if (t->single || t->fused)
		t->format = f;
}

/* The layout in which a format's matrices are stored one by one. */
static const struct moe_format_layout *single_layout(const struct moe_format *f)
{
	struct moe_convert_target t = { 0 };

	find_layouts(f->name, f, &t);
	return t.single;
}

enum moe_status moe_convert_target_find(const char *name, const char *layers,
					struct moe_convert_target *out)
{
	char made[MOE_FORMATS_TEXT];

	*out = (struct moe_convert_target){ .name = name, .dtype = MOE_BF16, .linear = true };
	if (!strcmp(name, "keep")) {
		out->keep = true;
		out->linear = false;
		return MOE_OK;
	}
	if (layers && strcmp(layers, "experts") && strcmp(layers, "linear"))
		return moe_fail(MOE_ERR_ARG, "layers \"%s\": experts and linear are possible",
				layers);
	if (!strcmp(name, "nearest")) {
		out->nearest = true;
		out->linear = !layers || !strcmp(layers, "linear");
		return MOE_OK;
	}
	out->kt_bits = !strcmp(name, "kt-int8") ? 8 : !strcmp(name, "kt-int4") ? 4 : 0;
	if (out->kt_bits) {
		if (layers && strcmp(layers, "experts"))
			return moe_fail(MOE_ERR_ARG, "weights \"%s\" are experts: layers \"%s\" is not possible", name, layers);
		out->format = moe_format_find(out->kt_bits == 8 ? "int8" : "int4");
		out->linear = false;
		return MOE_OK;
	}
	for (size_t i = 0; i < MOE_COUNT(plain_targets); i++)
		if (!strcmp(plain_targets[i].name, name)) {
			out->dtype = plain_targets[i].dtype;
			return MOE_OK;
		}
	for (int i = 0; moe_format_list[i] && !out->format; i++)
		find_layouts(name, moe_format_list[i], out);
	if (!out->format)
		return moe_fail(MOE_ERR_ARG,
				"weights \"%s\": %s, bf16, f16, f32, kt-int8 and kt-int4 are possible, nearest for GGUF",
				name, moe_formats_text(true, made));
	out->linear = layers ? !strcmp(layers, "linear") : !strcmp(name, "fp8");
	return MOE_OK;
}

/* ---- pieces ---- */

static bool is_power_scale(enum moe_dtype d)
{
	return d == MOE_SCALE_UE8M0;
}

/* The codes of a source can be those of the target. */
static bool keeps(const struct moe_format *f, const struct moe_convert_source *s, int64_t row0)
{
	const struct moe_quantised *q = &s->coded.q;

	if (s->plain || q->coding.format->values != f->values || row0 % q->coding.rows)
		return false;
	if (f->rows > 1)
		return q->coding.rows == f->rows && q->coding.group == f->group;
	return q->coding.rows == 1;
}

/* How the piece's codes will be: the source's coding where it is kept. */
static struct moe_quantised coding_of(const struct moe_convert_source *s,
				      const struct moe_convert_piece *c)
{
	struct moe_quantised q = { .coding = moe_format_coding(c->format, c->k),
				   .n = c->n,
				   .k = c->k };

	if (!c->keep)
		return q;
	q.coding.group = s->coded.q.coding.group;
	q.coding.zero = s->coded.q.coding.zero;
	if (c->format->scale != MOE_F16) { /* GPTQ and AWQ have F16 alone */
		q.coding.scale = s->coded.q.coding.scale;
		if (is_power_scale(q.coding.scale) && !is_power_scale(c->format->scale))
			q.coding.scale = MOE_F32;
	}
	return q;
}

static struct moe_array shape_of(const struct moe_st_tensor *t, int skip)
{
	struct moe_array a = { .dtype = t->dtype, .ndim = t->ndim - skip };

	if (!strcmp(t->dtype_text, "F8_E8M0"))
		a.dtype = MOE_SCALE_UE8M0;
	for (int i = 0; i < a.ndim; i++)
		a.shape[i] = t->shape[i + skip];
	return a;
}

/* The coding and the tensors that the source has. */
static void as_stored(const struct moe_convert_source *s, struct moe_convert_piece *c)
{
	int skip = s->experts > 0;

	c->q = (struct moe_quantised){
		.coding = s->coded.q.coding, .n = c->n, .k = c->k
	};
	c->stored.codes = shape_of(s->coded.codes, skip);
	c->stored.scale = shape_of(s->coded.scale, skip);
	if (s->coded.zero)
		c->stored.zero = shape_of(s->coded.zero, skip);
}

static enum moe_status add_tensor(struct moe_convert_plan *p, struct moe_convert_tensor *t)
{
	int64_t count = moe_shape_count(t->ndim, t->shape);

	if (!t->name)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	if (!t->copy)
		t->bytes = (size_t)count * t->dtype_bytes;
	p->tensor[p->n_tensors++] = *t;
	return MOE_OK;
}

/* A tensor of a piece; stem: its name without the plain suffix. */
static enum moe_status add_part(struct moe_convert_plan *p, struct moe_convert_piece *c, int slot,
				const char *stem, const char *suffix, const struct moe_array *a)
{
	const struct moe_convert_source *s = &p->source[c->source];
	bool fused = s->experts && c->expert < 0;
	struct moe_convert_tensor t = { .dtype = moe_dtype_name(a->dtype),
					.dtype_bytes = moe_dtype_size(a->dtype),
					.piece = (size_t)(c - p->piece),
					.slot = slot,
					.shard = s->file };

	if (!a->ndim)
		return MOE_OK;
	if (a->ndim + fused > MOE_MAX_NDIM)
		return moe_fail(MOE_ERR_UNSUPPORTED, "%s has too many dimensions", stem);
	t.name = moe_format("%s%s", stem, suffix);
	t.ndim = a->ndim + fused;
	t.shape[0] = c->matrices;
	for (int i = 0; i < a->ndim; i++)
		t.shape[i + fused] = a->shape[i];
	c->tensor[slot] = (int64_t)p->n_tensors;
	return add_tensor(p, &t);
}

static enum moe_status add_piece(struct moe_convert_plan *p, const struct moe_convert_piece *piece,
				 const char *stem, const char *suffix)
{
	struct moe_convert_piece *c = &p->piece[p->n_pieces++];
	const struct moe_convert_source *s = &p->source[piece->source];
	enum moe_status status;

	*c = *piece;
	for (int i = 0; i < MOE_CONVERT_TENSORS; i++)
		c->tensor[i] = -1;
	if (!c->layout) {
		moe_stored_set(&c->stored.codes, c->dtype, c->n, c->k);
		return add_part(p, c, 0, stem, suffix, &c->stored.codes);
	}
	if (p->target.keep) {
		as_stored(s, c);
		c->writer = s->coded.q.writer;
		status = MOE_OK;
	} else {
		c->keep = keeps(c->format, s, c->row0) && !s->change;
		c->q = coding_of(s, c);
		c->writer = c->layout->writer;
		status = c->writer->shapes(&c->q, &c->stored);
	}
	if (status != MOE_OK)
		return moe_fail_in(status, "%s", s->name);
	MOE_TRY(add_part(p, c, 0, stem, c->layout->codes, &c->stored.codes));
	MOE_TRY(add_part(p, c, 1, stem, c->layout->scale, &c->stored.scale));
	if (c->layout->zero)
		MOE_TRY(add_part(p, c, 2, stem, c->layout->zero, &c->stored.zero));
	if (c->layout->more && !p->target.keep)
		return add_part(p, c, 3, stem, c->layout->more, &c->stored.more);
	return MOE_OK;
}

/* Without ".weight"; what was cut. */
static const char *stem_of(const char *name, char *stem)
{
	size_t n = strlen(name), m = strlen(PLAIN_SUFFIX);
	bool cut = n > m && !strcmp(name + n - m, PLAIN_SUFFIX);

	snprintf(stem, MOE_CONVERT_NAME, "%.*s", (int)(n - (cut ? m : 0)), name);
	return cut ? PLAIN_SUFFIX : "";
}

/* A fused tensor's experts one by one, as most quantised checkpoints have them. */
static enum moe_status split(struct moe_convert_plan *p, const struct moe_convert_piece *whole,
			     const char *stem)
{
	const char *const *names = moe_expert_names_beside(stem), *dot = strrchr(stem, '.');
	bool down = moe_expert_which(stem) == 2;
	int64_t E = p->source[whole->source].experts;

	if (!down && whole->n % 2)
		return moe_fail(MOE_ERR_FORMAT,
				"%s has %lld rows per expert: gate and up rows are "
				"equally many",
				p->source[whole->source].name, (long long)whole->n);
	for (int64_t e = 0; e < E; e++)
		for (int half = down ? 2 : 0; half < (down ? 3 : 2); half++) {
			struct moe_convert_piece c = *whole;
			char own[MOE_CONVERT_NAME];

			c.expert = e;
			c.matrices = 1;
			c.n = down ? whole->n : whole->n / 2;
			c.row0 = half == 1 ? c.n : 0;
			c.layout = p->target.single;
			snprintf(own, sizeof own, "%.*s.%lld.%s", (int)(dot - stem), stem,
				 (long long)e, names[half]);
			MOE_TRY(add_piece(p, &c, own, PLAIN_SUFFIX));
		}
	return MOE_OK;
}

static enum moe_status make_pieces(struct moe_convert_plan *p, size_t i)
{
	const struct moe_convert_source *s = &p->source[i];
	const struct moe_convert_target *t = &p->target;
	struct moe_convert_piece c = { .source = i,
				       .expert = -1,
				       .n = s->n,
				       .k = s->k,
				       .matrices = MOE_MAX(s->experts, 1),
				       .dtype = t->dtype };
	bool own = t->nearest && !s->plain; /* its own format stays */
	bool quantised = (t->format || own) && (s->expert || (t->linear && s->linear));
	char stem[MOE_CONVERT_NAME];
	const char *suffix = stem_of(s->name, stem);

	if (s->plain && (t->keep || t->format || t->nearest)) /* changed only */
		c.dtype = s->plain->dtype;
	if (t->keep) {
		c.layout = s->layout;
		return add_piece(p, &c, stem, suffix);
	}

	c.format = own ? s->coded.q.coding.format : t->format;
	if (quantised && s->experts && !t->fused)
		return split(p, &c, stem);
	if (quantised)
		c.layout = own ? single_layout(c.format) : s->experts ? t->fused : t->single;
	return add_piece(p, &c, stem, suffix);
}

/* ---- all of it ---- */

static enum moe_status add_copy(struct moe_convert_plan *p, const struct moe_st_tensor *s)
{
	struct moe_convert_tensor t = { .name = moe_strdup(s->name),
					.dtype = s->dtype_text,
					.dtype_bytes = MOE_MAX(moe_dtype_size(s->dtype), 1),
					.ndim = s->ndim,
					.bytes = s->bytes,
					.copy = s,
					.shard = s->file };

	if (s->ndim > MOE_MAX_NDIM) {
		moe_free(t.name);
		return moe_fail(MOE_ERR_UNSUPPORTED, "tensor '%s' has %d dimensions; %d at most",
				s->name, s->ndim, MOE_MAX_NDIM);
	}
	memcpy(t.shape, s->shape, sizeof t.shape);
	return add_tensor(p, &t);
}

static enum moe_status make(struct moe_convert_plan *p, bool *used)
{
	size_t count = moe_safetensors_count(p->st), pieces = 0;

	MOE_TRY(moe_convert_scan(p, used));
	for (size_t i = 0; i < p->n_sources; i++)
		pieces += 2 * (size_t)MOE_MAX(p->source[i].experts, 1);
	p->piece = moe_calloc(pieces, sizeof *p->piece);
	p->tensor = moe_calloc(count + pieces * MOE_CONVERT_TENSORS, sizeof *p->tensor);
	if (!p->piece || !p->tensor)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	for (size_t i = 0; i < p->n_sources; i++)
		MOE_TRY(make_pieces(p, i));
	for (size_t i = 0; i < count; i++) {
		p->bytes_in += moe_st_tensor_bytes(moe_safetensors_at(p->st, i));
		if (!used[i])
			MOE_TRY(add_copy(p, moe_safetensors_at(p->st, i)));
	}
	return MOE_OK;
}

enum moe_status moe_convert_plan_make(struct moe_convert_plan *p, struct moe_safetensors *st,
				      int64_t max_shard_bytes)
{
	size_t count = moe_safetensors_count(st);
	bool *used = moe_calloc(count, sizeof *used);
	enum moe_status status;

	p->st = st;
	p->source = moe_calloc(count, sizeof *p->source);
	status = used && p->source ? make(p, used) : moe_fail(MOE_ERR_NOMEM, "out of memory");
	moe_free(used);
	return status == MOE_OK ? moe_convert_cut(p, max_shard_bytes) : status;
}

void moe_convert_plan_free(struct moe_convert_plan *p)
{
	for (size_t i = 0; p->tensor && i < p->n_tensors; i++) /* else they are kt's files */
		moe_free(p->tensor[i].name);
	for (int i = 0; p->shard && i < p->n_shards; i++) {
		moe_free(p->shard[i].name);
		moe_free(p->shard[i].header);
	}
	moe_convert_kt_free(p->kt);
	moe_free(p->source);
	moe_free(p->piece);
	moe_free(p->tensor);
	moe_free(p->shard);
	moe_safetensors_close(p->st);
}
