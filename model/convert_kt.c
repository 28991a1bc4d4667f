/* SPDX-License-Identifier: Apache-2.0 */
#include "model/convert_kt.h"
#include "model/expert_names.h"
#include "model/file.h"
#include "model/json.h"
#include "model/readers/kt_layout.h"

#include <stdio.h>
#include <stdlib.h>

static enum moe_status no_memory(void)
{
	return moe_fail(MOE_ERR_NOMEM, "out of memory");
}

void moe_convert_kt_free(struct moe_convert_kt *kt)
{
	if (!kt)
		return;
	moe_free(kt->layer);
	moe_free(kt->sum);
	moe_free(kt);
}

/* ---- files of a layer ---- */

static int matrices_of(const struct moe_convert_kt *kt)
{
	return kt->p.backward ? 2 * MOE_KT_FORWARD : MOE_KT_FORWARD;
}

size_t moe_convert_kt_files(const struct moe_convert_kt *kt)
{
	return (size_t)kt->experts * (size_t)matrices_of(kt) * (size_t)kt->p.parts * 2;
}

void moe_convert_kt_part(const struct moe_convert_kt *kt, int which, int64_t *n, int64_t *k)
{
	bool columns = moe_kt_cuts_columns(which);

	*n = columns ? kt->hidden : kt->inner / kt->p.parts;
	*k = columns ? kt->inner / kt->p.parts : kt->hidden;
}

size_t moe_convert_kt_bytes(const struct moe_convert_kt *kt, int which, bool scale)
{
	int64_t n, k;

	moe_convert_kt_part(kt, which, &n, &k);
	return scale ? (size_t)n * sizeof(float) : moe_kt_code_bytes(kt->bits, n, k);
}

size_t moe_convert_kt_index(const struct moe_convert_kt *kt, int expert, int which, int part,
			    bool scale)
{
	return (((size_t)expert * (size_t)matrices_of(kt) + (size_t)which) * (size_t)kt->p.parts +
		(size_t)part) *
		       2 +
	       scale;
}

size_t moe_convert_kt_file(const struct moe_convert_kt *kt, int layer, size_t index,
			   char buf[MOE_CONVERT_KT_NAME])
{
	bool scale = index % 2;
	int part = (int)(index / 2 % (size_t)kt->p.parts);
	size_t matrix = index / 2 / (size_t)kt->p.parts;
	int which = (int)(matrix % (size_t)matrices_of(kt)),
	    expert = (int)(matrix / (size_t)matrices_of(kt));
	size_t bytes = moe_convert_kt_bytes(kt, which, scale);

	moe_kt_file_name(buf, MOE_CONVERT_KT_NAME, layer, part, kt->bits, which, expert, bytes,
			 scale);
	return bytes;
}

size_t moe_convert_kt_layer_bytes(const struct moe_convert_kt *kt)
{
	size_t all = 0;

	for (int which = 0; which < matrices_of(kt); which++)
		all += moe_convert_kt_bytes(kt, which, false) +
		       moe_convert_kt_bytes(kt, which, true);
	return all * (size_t)kt->experts * (size_t)kt->p.parts;
}

/* ---- the plan ---- */

struct item {
	int layer, expert, which;
	struct moe_convert_piece piece;
};

static int by_place(const void *a, const void *b)
{
	const struct item *x = a, *y = b;

	if (x->layer != y->layer)
		return x->layer < y->layer ? -1 : 1;
	if (x->expert != y->expert)
		return x->expert < y->expert ? -1 : 1;
	return (x->which > y->which) - (x->which < y->which);
}

/* The matrices of a source, into items; how many. */
static enum moe_status add_items(const struct moe_convert_plan *p, size_t source,
				 struct item *items, size_t *count)
{
	const struct moe_convert_source *s = &p->source[source];
	const char *layer = strstr(s->name, "layers."), *experts = strstr(s->name, ".experts.");
	struct item item = { .which = moe_expert_which(s->name) };
	bool both = item.which == 3;

	if (!layer || sscanf(layer, "layers.%d.", &item.layer) != 1 || item.which < 0 ||
	    (both && s->n % 2) ||
	    (!s->experts && (!experts || sscanf(experts, ".experts.%d.", &item.expert) != 1)))
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"%s: is not gate, up or down of a layer's experts", s->name);
	if (p->kt->p.n_layers && item.layer >= p->kt->p.n_layers)
		return MOE_OK;
	item.piece = (struct moe_convert_piece){
		.source = source, .n = both ? s->n / 2 : s->n, .k = s->k, .matrices = 1
	};
	for (int64_t e = 0; e < MOE_MAX(s->experts, 1); e++)
		for (int half = 0; half <= both; half++) {
			struct item *to = items ? &items[*count] : NULL;

			++*count;
			if (!to)
				continue;
			*to = item;
			to->expert = s->experts ? (int)e : item.expert;
			to->which = both ? half : item.which;
			to->piece.expert = e;
			to->piece.row0 = half * to->piece.n;
		}
	return MOE_OK;
}

static enum moe_status list_items(const struct moe_convert_plan *p, struct item *items,
				  size_t *count)
{
	*count = 0;
	for (size_t i = 0; i < p->n_sources; i++)
		if (p->source[i].expert)
			MOE_TRY(add_items(p, i, items, count));
	return MOE_OK;
}

static enum moe_status check_sizes(const struct moe_convert_kt *kt)
{
	if (kt->inner % kt->p.parts)
		return moe_fail(MOE_ERR_ARG,
				"experts of %lld rows of gate cannot be cut into %d parts",
				(long long)kt->inner, kt->p.parts);
	for (int which = 0; which < matrices_of(kt); which++) {
		int64_t n, k;

		moe_convert_kt_part(kt, which, &n, &k);
		if (n % MOE_KT_ROWS || k % moe_kt_columns(kt->bits))
			return moe_fail(MOE_ERR_UNSUPPORTED,
					"a part of %s would be [%lld, %lld]; kt packs rows by %d "
					"and columns by %lld: take "
					"fewer parts%s",
					moe_kt_names[which], (long long)n, (long long)k,
					MOE_KT_ROWS, (long long)moe_kt_columns(kt->bits),
					kt->bits == 4 ? ", or kt-int8" : "");
	}
	return MOE_OK;
}

/* Every layer has all experts, each its three matrices of the one size. */
static enum moe_status check_items(struct moe_convert_kt *kt, const struct item *items,
				   size_t count, const struct moe_convert_plan *p)
{
	size_t in_layer = (size_t)kt->experts * MOE_KT_FORWARD;

	for (size_t i = 0; i < count; i++) {
		const struct item *t = &items[i];
		bool down = t->which == 2;
		int expert = (int)(i % in_layer / MOE_KT_FORWARD),
		    which = (int)(i % MOE_KT_FORWARD);

		if (i % in_layer == 0)
			kt->layer[kt->n_layers++] = t->layer;
		if (t->layer != kt->layer[kt->n_layers - 1] || t->expert != expert ||
		    t->which != which)
			return moe_fail(MOE_ERR_FORMAT,
					"layer %d: expert %d has no %s, or two; layers of kt's "
					"files have equally many "
					"experts",
					kt->layer[kt->n_layers - 1], expert, moe_kt_names[which]);
		if (t->piece.n != (down ? kt->hidden : kt->inner) ||
		    t->piece.k != (down ? kt->inner : kt->hidden))
			return moe_fail(MOE_ERR_UNSUPPORTED,
					"%s is [%lld, %lld]; kt's experts are of one size: [%lld, "
					"%lld] here",
					p->source[t->piece.source].name, (long long)t->piece.n,
					(long long)t->piece.k,
					(long long)(down ? kt->hidden : kt->inner),
					(long long)(down ? kt->inner : kt->hidden));
	}
	if (count % in_layer)
		return moe_fail(MOE_ERR_FORMAT, "layer %d has fewer experts than others",
				kt->layer[kt->n_layers - 1]);
	return MOE_OK;
}

static enum moe_status make_shards(struct moe_convert_plan *p)
{
	const struct moe_convert_kt *kt = p->kt;

	p->shard = moe_calloc((size_t)kt->n_layers, sizeof *p->shard);
	if (!p->shard)
		return no_memory();
	p->n_shards = kt->n_layers;
	for (int i = 0; i < p->n_shards; i++) {
		p->shard[i].name = moe_format("_layer_%d", kt->layer[i]);
		p->shard[i].bytes = moe_convert_kt_layer_bytes(kt);
		p->bytes += (int64_t)p->shard[i].bytes;
		if (!p->shard[i].name)
			return no_memory();
	}
	return MOE_OK;
}

static enum moe_status place(struct moe_convert_plan *p, struct item *items, size_t count)
{
	struct moe_convert_kt *kt = p->kt;
	size_t last = count;

	MOE_TRY(list_items(p, items, &count));
	qsort(items, count, sizeof *items, by_place);
	for (size_t i = 0; i < count && items[i].layer == items[0].layer; i++)
		last = i;
	kt->experts = items[last].expert + 1;
	kt->inner = items[0].piece.n;
	kt->hidden = items[0].piece.k;
	kt->layer = moe_calloc(count, sizeof *kt->layer);
	if (!kt->layer)
		return no_memory();
	MOE_TRY(check_items(kt, items, count, p));
	MOE_TRY(check_sizes(kt));
	p->piece = moe_alloc(count, sizeof *p->piece);
	kt->sum = moe_calloc((size_t)kt->n_layers * moe_convert_kt_files(kt), sizeof *kt->sum);
	if (!p->piece || !kt->sum)
		return no_memory();
	for (size_t i = 0; i < count; i++)
		p->piece[p->n_pieces++] = items[i].piece;
	p->n_tensors = (size_t)kt->n_layers * moe_convert_kt_files(kt);
	return make_shards(p);
}

static enum moe_status scan(struct moe_convert_plan *p)
{
	size_t count = moe_safetensors_count(p->st);
	bool *used = moe_calloc(count, sizeof *used);
	enum moe_status status;

	p->source = moe_calloc(count, sizeof *p->source);
	status = used && p->source ? moe_convert_scan(p, used) : no_memory();
	for (size_t i = 0; status == MOE_OK && i < p->n_sources; i++) {
		const struct moe_convert_source *s = &p->source[i];

		if (s->expert)
			p->bytes_in += moe_st_tensor_bytes(s->plain ? s->plain : s->coded.codes);
		if (s->expert && !s->plain && s->coded.scale != s->coded.codes)
			p->bytes_in += (int64_t)s->coded.scale->bytes +
				       (s->coded.zero ? (int64_t)s->coded.zero->bytes : 0);
	}
	moe_free(used);
	return status;
}

enum moe_status moe_convert_kt_plan(struct moe_convert_plan *p,
				    const struct moe_convert_kt_params *params)
{
	struct item *items;
	enum moe_status status;
	size_t count;

	p->kt = moe_calloc(1, sizeof *p->kt);
	if (!p->kt)
		return no_memory();
	p->kt->p = *params;
	p->kt->bits = p->target.kt_bits;
	MOE_TRY(scan(p));
	MOE_TRY(list_items(p, NULL, &count));
	if (!count)
		return MOE_OK; /* the caller says so */
	items = moe_alloc(count, sizeof *items);
	status = items ? place(p, items, count) : no_memory();
	moe_free(items);
	return status;
}

/* ---- checksums ---- */

void moe_convert_kt_sum_files(struct moe_convert_plan *p, int shard)
{
	const struct moe_convert_kt *kt = p->kt;

	moe_sha256(kt->sum[(size_t)shard * moe_convert_kt_files(kt)],
		   moe_convert_kt_files(kt) * sizeof *kt->sum, p->shard[shard].sha256);
}

enum moe_status moe_convert_kt_sum(struct moe_convert_plan *p, int shard, const char *folder)
{
	const struct moe_convert_kt *kt = p->kt;

	*p->shard[shard].sha256 = 0;
	for (size_t i = 0; i < moe_convert_kt_files(kt); i++) {
		char name[MOE_CONVERT_KT_NAME], *path;
		enum moe_status status = MOE_OK;
		bool there;

		moe_convert_kt_file(kt, kt->layer[shard], i, name);
		path = moe_path_join(folder, name);
		if (!path)
			return no_memory();
		there = moe_path_exists(path);
		if (there)
			status = moe_file_sha256(
				path, kt->sum[(size_t)shard * moe_convert_kt_files(kt) + i]);
		moe_free(path);
		MOE_TRY(status);
		if (!there)
			return MOE_OK;
	}
	moe_convert_kt_sum_files(p, shard);
	return MOE_OK;
}

static bool add_files(const struct moe_convert_kt *kt, int shard, cJSON *files)
{
	for (size_t i = 0; files && i < moe_convert_kt_files(kt); i++) {
		cJSON *file = cJSON_CreateObject();
		char name[MOE_CONVERT_KT_NAME];
		size_t bytes = moe_convert_kt_file(kt, kt->layer[shard], i, name);

		if (!cJSON_AddItemToArray(files, file) ||
		    !cJSON_AddStringToObject(file, "path", name) ||
		    !cJSON_AddNumberToObject(file, "size_bytes", (double)bytes) ||
		    !cJSON_AddStringToObject(file, "sha256",
					     kt->sum[(size_t)shard * moe_convert_kt_files(kt) + i]))
			return false;
	}
	return files != NULL;
}

static bool add_layers(const struct moe_convert_kt *kt, cJSON *o)
{
	cJSON *layers = cJSON_AddArrayToObject(o, "layers");

	for (int i = 0; layers && i < kt->n_layers; i++) {
		cJSON *l = cJSON_CreateObject();

		if (!cJSON_AddItemToArray(layers, l) ||
		    !cJSON_AddNumberToObject(l, "index", kt->layer[i]) ||
		    !cJSON_AddStringToObject(l, "state", "ready") ||
		    !cJSON_AddNumberToObject(l, "numa_count", kt->p.parts) ||
		    !cJSON_AddNumberToObject(l, "bytes", (double)moe_convert_kt_layer_bytes(kt)) ||
		    !add_files(kt, i, cJSON_AddArrayToObject(l, "files")))
			return false;
	}
	return layers != NULL;
}

static enum moe_status write_manifest(const struct moe_convert_plan *p, const char *path)
{
	const struct moe_convert_kt *kt = p->kt;
	cJSON *o = cJSON_CreateObject();
	enum moe_status status = MOE_OK;

	if (!o || !cJSON_AddNumberToObject(o, "schema_version", 2) ||
	    !cJSON_AddStringToObject(o, "state", "ready") ||
	    !cJSON_AddStringToObject(o, "expert_weight_format", "int8") ||
	    !cJSON_AddStringToObject(o, "layout", "kt-int8-n32-k64-vnni-v1") ||
	    !cJSON_AddNumberToObject(o, "threadpool_count", kt->p.parts) ||
	    !cJSON_AddNumberToObject(o, "expert_num", kt->experts) ||
	    !cJSON_AddNumberToObject(o, "hidden_size", (double)kt->hidden) ||
	    !cJSON_AddNumberToObject(o, "intermediate_size", (double)kt->inner) ||
	    !cJSON_AddNumberToObject(o, "bytes", (double)p->bytes) || !add_layers(kt, o))
		status = no_memory();
	if (status == MOE_OK)
		status = moe_json_write(path, o);
	cJSON_Delete(o);
	return status;
}

static enum moe_status write_sums(const struct moe_convert_plan *p, const char *path)
{
	const struct moe_convert_kt *kt = p->kt;
	struct moe_file_writer w = { .fd = -1 };
	enum moe_status status = moe_file_begin(&w, path);

	for (size_t i = 0; status == MOE_OK && i < (size_t)kt->n_layers * moe_convert_kt_files(kt);
	     i++) {
		char name[MOE_CONVERT_KT_NAME];

		moe_convert_kt_file(kt, kt->layer[i / moe_convert_kt_files(kt)],
				    i % moe_convert_kt_files(kt), name);
		status = moe_file_append_sum(&w, kt->sum[i], name);
	}
	if (status == MOE_OK)
		status = moe_file_commit(&w);
	moe_file_abort(&w);
	return status;
}

enum moe_status moe_convert_kt_finish(const struct moe_convert_plan *p, const char *folder)
{
	bool manifest =
		p->kt->bits == 8 && !p->kt->p.backward; /* kt-kernel knows none for others */
	char *path = moe_path_join(folder, manifest ? "kt-weight-manifest.json" : MOE_SUMS_NAME);
	enum moe_status status =
		path ? manifest ? write_manifest(p, path) : write_sums(p, path) : no_memory();

	moe_free(path);
	return status;
}
