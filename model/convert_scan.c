/* SPDX-License-Identifier: Apache-2.0 */
/* Which tensors of a checkpoint are weights: quantised ones by their names and dtypes, plain ones by their names. */
#include "model/convert_plan.h"

#include <stdio.h>

#define PLAIN_SUFFIX ".weight"

static bool is_fused_name(const char *name)
{
	static const char *const ends[] = { ".experts.gate_up_proj", ".experts.down_proj" };
	char stem[MOE_CONVERT_NAME];
	size_t n = strlen(name);

	if (moe_ends_with(name, PLAIN_SUFFIX))
		n -= strlen(PLAIN_SUFFIX);
	snprintf(stem, sizeof stem, "%.*s", (int)n, name);
	return moe_ends_with(stem, ends[0]) || moe_ends_with(stem, ends[1]);
}

/* A routed expert's matrix, or all of them. */
static bool is_expert(const char *name, int ndim)
{
	if (ndim == 3)
		return is_fused_name(name);
	return ndim == 2 && strstr(name, ".experts.") && moe_ends_with(name, PLAIN_SUFFIX);
}

/* A projection of a layer: q_proj, kv_a_proj_with_mqa, gate_proj, ... */
static bool is_linear(const char *name, int ndim)
{
	char module[MOE_CONVERT_NAME];
	const char *dot;

	if (is_expert(name, ndim))
		return true;
	if (ndim != 2 || !moe_ends_with(name, PLAIN_SUFFIX) || !strstr(name, "layers."))
		return false;
	snprintf(module, sizeof module, "%.*s", (int)(strlen(name) - strlen(PLAIN_SUFFIX)), name);
	dot = strrchr(module, '.');
	return dot && strstr(dot, "_proj");
}

static const void *change_of(const struct moe_convert_plan *p, const char *name)
{
	return p->change ? p->change->find(p->change->user, name) : NULL;
}

/* A plain weight that becomes another. */
static bool takes(const struct moe_convert_plan *p, const struct moe_convert_source *s)
{
	const struct moe_convert_target *t = &p->target;

	if (s->change)
		return true;
	if (t->keep || t->nearest || !(t->linear ? s->linear : s->expert))
		return false;
	return t->format || s->plain->dtype != t->dtype;
}

static enum moe_status add(struct moe_convert_plan *p, const struct moe_convert_source *s)
{
	if (strlen(s->name) + 24 > MOE_CONVERT_NAME)
		return moe_fail(MOE_ERR_UNSUPPORTED, "tensor name '%.60s...' is too long", s->name);
	p->source[p->n_sources++] = *s;
	return MOE_OK;
}

/* What belongs to a weight's codes, beside its scales and zeros. */
static void use_others(const struct moe_convert_plan *p, const char *stem, bool *used)
{
	static const char *const ends[] = { ".weight_shape", ".g_idx", ".weight_g_idx" };
	char name[MOE_CONVERT_NAME + 16];

	for (size_t i = 0; i < MOE_COUNT(ends); i++) {
		const struct moe_st_tensor *t;

		snprintf(name, sizeof name, "%s%s", stem, ends[i]);
		t = moe_safetensors_find(p->st, name);
		if (t)
			used[t - moe_safetensors_at(p->st, 0)] = true;
	}
}

/* The columns that weight_shape gives, where the codes cannot tell. */
static void read_shape(const struct moe_convert_plan *p, const char *stem, int64_t *n, int64_t *k)
{
	char name[MOE_CONVERT_NAME + 16];
	const struct moe_st_tensor *t;
	int64_t wide[2];
	int32_t narrow[2];

	snprintf(name, sizeof name, "%s.weight_shape", stem);
	t = moe_safetensors_find(p->st, name);
	if (!t || t->ndim != 1 || t->shape[0] != 2 || (t->dtype != MOE_I64 && t->dtype != MOE_I32))
		return;
	if (t->dtype == MOE_I64) {
		memcpy(wide, t->data, sizeof wide);
	} else {
		memcpy(narrow, t->data, sizeof narrow);
		wide[0] = narrow[0];
		wide[1] = narrow[1];
	}
	if (wide[0] == *n && wide[1] <= *k && wide[1] > *k - 8)
		*k = wide[1];
}

static struct moe_array view(const struct moe_st_tensor *t, int skip)
{
	struct moe_array a = { .dtype = t->dtype, .ndim = t->ndim - skip };

	for (int i = 0; i < a.ndim && i + skip < MOE_MAX_NDIM; i++)
		a.shape[i] = t->shape[i + skip];
	return a;
}

/* A layout whose codes t may be; stem without its suffix. */
static bool matches(const struct moe_st_tensor *t, const struct moe_format_layout *l, char *stem)
{
	size_t n = strlen(t->name);

	if (t->dtype != l->codes_dtype || !moe_ends_with(t->name, l->codes) ||
	    n - strlen(l->codes) + 1 > MOE_CONVERT_NAME - 24)
		return false;
	snprintf(stem, MOE_CONVERT_NAME, "%.*s", (int)(n - strlen(l->codes)), t->name);
	if (*l->codes != '.')
		return t->ndim >= 3 && is_fused_name(stem);
	return t->ndim == 2;
}

/* t as the codes of one layout. *found: it was taken, or refused. */
static enum moe_status try_layout(struct moe_convert_plan *p, const struct moe_st_tensor *t,
				  const struct moe_format_layout *l, bool *used, bool *found)
{
	struct moe_convert_source s = { .file = t->file };
	const struct moe_st_tensor *scale, *first = moe_safetensors_at(p->st, 0);
	char stem[MOE_CONVERT_NAME], scale_name[MOE_CONVERT_NAME + 32];
	bool fused = *l->codes != '.';
	struct moe_array codes, scales;

	if (!matches(t, l, stem))
		return MOE_OK;
	snprintf(scale_name, sizeof scale_name, "%s%s", stem, l->scale);
	scale = moe_safetensors_find(p->st, scale_name);
	if (!scale)
		return MOE_OK;
	s.experts = fused ? t->shape[0] : 0;
	codes = view(t, fused);
	scales = view(scale, fused);
	if (!l->size(&codes, &scales, &s.n, &s.k))
		return moe_fail(MOE_ERR_FORMAT, "%s and %s have %d and %d dimensions", t->name,
				scale->name, t->ndim, scale->ndim);
	read_shape(p, stem, &s.n, &s.k);
	snprintf(s.name, sizeof s.name, "%.*s%s", MOE_CONVERT_NAME - 24, stem,
		 fused ? "" : PLAIN_SUFFIX);
	s.expert = fused || is_expert(s.name, 2);
	s.linear = is_linear(s.name, fused ? 3 : 2);
	s.layout = l;
	s.change = change_of(p, s.name);
	MOE_TRY(moe_st_quantised_find(p->st, s.name, s.experts, s.n, s.k, &s.coded, found));
	if (!*found || s.coded.codes != t)
		return moe_fail(MOE_ERR_FORMAT, "%s is there in two formats", s.name);
	if (p->target.keep && !s.change)
		return MOE_OK;
	used[t - first] = used[scale - first] = true;
	if (s.coded.zero)
		used[s.coded.zero - first] = true;
	if (!p->target.keep) /* they stay true */
		use_others(p, stem, used);
	return add(p, &s);
}

/* Codes without scales: only names and dtypes that nothing else has. */
static enum moe_status check_lonely(const struct moe_st_tensor *t)
{
	static const char *const ends[] = { ".weight_packed", ".qweight", "_blocks" };
	bool codes = t->dtype == MOE_F8_E4M3;

	for (size_t i = 0; i < MOE_COUNT(ends); i++)
		codes = codes || moe_ends_with(t->name, ends[i]);
	if (!codes)
		return MOE_OK;
	return moe_fail(MOE_ERR_FORMAT, "%s holds quantised codes, but its scales are missing",
			t->name);
}

/* A matrix in a way of its file's own. */
static enum moe_status scan_own(struct moe_convert_plan *p, size_t i, bool *used)
{
	const struct moe_st_tensor *t = moe_safetensors_at(p->st, i);
	struct moe_convert_source s = { .file = t->file, .n = t->shape[0], .k = t->shape[1] };
	bool found;

	snprintf(s.name, sizeof s.name, "%s", t->name);
	s.expert = is_expert(t->name, 2);
	s.linear = is_linear(t->name, 2);
	s.change = change_of(p, s.name);
	MOE_TRY(moe_st_quantised_find(p->st, t->name, 0, s.n, s.k, &s.coded, &found));
	if (p->target.keep && !s.change)
		return MOE_OK;
	used[i] = true;
	return add(p, &s);
}

static enum moe_status scan_coded(struct moe_convert_plan *p, size_t i, bool *used)
{
	const struct moe_st_tensor *t = moe_safetensors_at(p->st, i);
	bool found = false;

	if (t->codes)
		return scan_own(p, i, used);

	for (int f = 0; moe_format_list[f] && !found; f++)
		for (int j = 0;
		     j < MOE_FORMAT_LAYOUTS && moe_format_list[f]->layout[j].codes && !found; j++)
			MOE_TRY(try_layout(p, t, &moe_format_list[f]->layout[j], used, &found));
	return found ? MOE_OK : check_lonely(t);
}

enum moe_status moe_convert_scan(struct moe_convert_plan *p, bool *used)
{
	size_t count = moe_safetensors_count(p->st);

	for (size_t i = 0; i < count; i++)
		if (moe_safetensors_at(p->st, i)->dtype > MOE_F64)
			MOE_TRY(scan_coded(p, i, used));
	for (size_t i = 0; i < count; i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(p->st, i);
		struct moe_convert_source s = { .plain = t, .file = t->file };
		bool fused = t->ndim == 3;

		if (used[i] || t->dtype > MOE_F64)
			continue;
		s.expert = is_expert(t->name, t->ndim);
		s.linear = is_linear(t->name, t->ndim);
		s.change = t->ndim == 2 || fused ? change_of(p, t->name) : NULL;
		if (!takes(p, &s))
			continue;
		s.experts = fused ? t->shape[0] : 0;
		s.n = t->shape[fused];
		s.k = t->shape[fused + 1];
		if (s.n < 1 || s.k < 1)
			continue;
		used[i] = true;
		snprintf(s.name, sizeof s.name, "%s", t->name);
		MOE_TRY(add(p, &s));
	}
	return MOE_OK;
}
