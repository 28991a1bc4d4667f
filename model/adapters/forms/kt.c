/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routed experts as ktransformers' trainer (kt-kernel) keeps them: a file of their own with
 * layers.N.experts.gate_lora_a [E, r, H], gate_lora_b [E, I, r] and so on. It knows one rank for
 * gate, up and down, and alpha / rank as the scaling, both the configuration's.
 */
#include "model/adapters/adapter_form.h"
#include "model/adapters/adapter_output.h"

#include <stdio.h>

static const char *const names[MOE_ADAPTER_PROJECTIONS][2] = {
	{ "gate_lora_a", "gate_lora_b" },
	{ "up_lora_a", "up_lora_b" },
	{ "down_lora_a", "down_lora_b" },
};

/* ---- reading ---- */

static const struct moe_st_tensor *find(const struct moe_adapter_input *in, int layer,
					int projection, bool b)
{
	char name[96];

	snprintf(name, sizeof name, "layers.%d.experts.%s", layer, names[projection][b]);
	return moe_safetensors_find(in->kt, name);
}

static bool has(const struct moe_adapter_input *in, int layer)
{
	for (int i = 0; in->kt && i < 2 * MOE_ADAPTER_PROJECTIONS; i++)
		if (find(in, layer, i / 2, i % 2))
			return true;
	return false;
}

static enum moe_status get(const struct moe_adapter_input *in, const struct moe_adapter_entry *e,
			   int projection, bool b, const int64_t shape[3], float *out)
{
	const struct moe_st_tensor *t;
	char name[96];

	snprintf(name, sizeof name, "layers.%d.experts.%s", e->layer, names[projection][b]);
	MOE_TRY(moe_safetensors_get(in->kt, name, 3, shape, &t));
	return moe_adapter_to_f32(t, out);
}

static enum moe_status read_experts(struct moe_adapter_input *in, struct moe_adapter_entry *e)
{
	const struct moe_st_tensor *a = find(in, e->layer, MOE_ADAPTER_GATE, false);
	const struct moe_st_tensor *d = find(in, e->layer, MOE_ADAPTER_DOWN, false);
	const struct moe_adapter *adapter = in->adapter;
	int64_t E, r, H, I;

	if (!a || !d || a->ndim != 3 || d->ndim != 3 || a->shape[0] < 1 || a->shape[1] < 1 ||
	    a->shape[2] < 1 || d->shape[2] < 1)
		return moe_fail(MOE_ERR_FORMAT,
				MOE_ADAPTER_KT_FILE ": layers.%d.experts: gate_lora_a and "
						    "down_lora_a of three dimensions are expected",
				e->layer);
	E = a->shape[0], r = a->shape[1], H = a->shape[2], I = d->shape[2];
	if (r != adapter->rank)
		return moe_fail(MOE_ERR_FORMAT,
				MOE_ADAPTER_KT_FILE ": layers.%d.experts have rank %lld, the "
						    "configuration %lld",
				e->layer, (long long)r, (long long)adapter->rank);
	e->n_experts = E;
	e->hidden = H;
	e->intermediate = I;
	e->rank = e->gate_up_rank = r;
	/* alpha / rank, whatever use_rslora says of the other modules */
	e->alpha = e->gate_up_alpha =
		moe_lora_alpha(adapter->rslora, r, adapter->alpha / (double)r);
	MOE_TRY(moe_adapter_alloc_experts(e, false));
	MOE_TRY(get(in, e, MOE_ADAPTER_GATE, false, (int64_t[]){ E, r, H }, e->gate_a));
	MOE_TRY(get(in, e, MOE_ADAPTER_UP, false, (int64_t[]){ E, r, H }, e->up_a));
	MOE_TRY(get(in, e, MOE_ADAPTER_DOWN, false, (int64_t[]){ E, r, I }, e->down_a));
	MOE_TRY(get(in, e, MOE_ADAPTER_GATE, true, (int64_t[]){ E, I, r }, e->gate_b));
	MOE_TRY(get(in, e, MOE_ADAPTER_UP, true, (int64_t[]){ E, I, r }, e->up_b));
	return get(in, e, MOE_ADAPTER_DOWN, true, (int64_t[]){ E, H, r }, e->down_b);
}

/* Six tensors of each layer were read; there may be no others. */
static enum moe_status finish(struct moe_adapter_input *in)
{
	size_t n = 0;

	for (int l = 0; l < MOE_ARCH_MAX_LAYERS; l++)
		n += has(in, l) ? 2 * MOE_ADAPTER_PROJECTIONS : 0;
	if (n == moe_safetensors_count(in->kt))
		return MOE_OK;
	for (size_t i = 0; i < moe_safetensors_count(in->kt); i++) {
		const char *name = moe_safetensors_at(in->kt, i)->name;
		char want[96], kind[32] = "";
		int layer = -1;
		bool known = false;

		if (sscanf(name, "layers.%d.experts.%31s", &layer, kind) == 2) {
			snprintf(want, sizeof want, "layers.%d.experts.%s", layer, kind);
			for (int k = 0; k < 2 * MOE_ADAPTER_PROJECTIONS; k++)
				known |= !strcmp(kind, names[k / 2][k % 2]) &&
					 !strcmp(name, want) && layer >= 0 &&
					 layer < MOE_ARCH_MAX_LAYERS;
		}
		if (!known)
			return moe_fail(MOE_ERR_UNSUPPORTED,
					MOE_ADAPTER_KT_FILE ": tensor '%.200s' cannot be used",
					name);
	}
	return moe_fail(MOE_ERR_FORMAT, MOE_ADAPTER_KT_FILE ": a layer lacks some of its six tensors");
}

/* ---- writing ---- */

/* One array of all experts with the file's rank: zeros beyond the entry's, B with the scaling. */
static enum moe_status fill(void *user, void *to)
{
	const struct moe_adapter_fill *f = user;
	const struct moe_adapter_entry *e = f->entry;
	bool down = f->projection == MOE_ADAPTER_DOWN, gate = f->projection == MOE_ADAPTER_GATE;
	int64_t own = down ? e->rank : e->gate_up_rank;
	int64_t cols = down ? e->intermediate : e->hidden,
		rows = down ? e->hidden : e->intermediate;
	const float *a = down ? e->down_a : gate || f->adapter->share_a ? e->gate_a : e->up_a;
	const float *b = down ? e->down_b : gate ? e->gate_b : e->up_b;
	float *out = to;

	memset(out, 0, (size_t)(e->n_experts * f->rank * (f->b ? rows : cols)) * sizeof *out);
	if (!own)
		return MOE_OK;
	for (int64_t x = 0; !f->b && x < e->n_experts; x++)
		memcpy(out + x * f->rank * cols, a + x * own * cols,
		       (size_t)(own * cols) * sizeof *out);
	for (int64_t row = 0; f->b && row < e->n_experts * rows; row++)
		for (int64_t j = 0; j < own; j++)
			out[row * f->rank + j] = (float)(b[row * own + j] * f->grow);
	return MOE_OK;
}

static enum moe_status add(struct moe_adapter_output *out, const struct moe_adapter_entry *e,
			   int projection, bool b, int64_t rank)
{
	const struct moe_adapter *a = out->adapter;
	bool down = projection == MOE_ADAPTER_DOWN;
	int64_t rows = down ? e->hidden : e->intermediate;
	int64_t cols = down ? e->intermediate : e->hidden;
	double own = 0;
	struct moe_st_item *it;

	if (down && e->rank)
		own = moe_adapter_scaling(a, e);
	else if (!down && e->gate_up_rank)
		own = moe_adapter_gate_up_scaling(a, e);
	MOE_TRY(moe_adapter_add(&out->kt, &it, "layers.%d.experts.%s", e->layer,
				names[projection][b]));
	it->ndim = 3;
	it->shape[0] = e->n_experts;
	it->shape[1] = b ? rows : rank;
	it->shape[2] = b ? rank : cols;
	it->fill = fill;
	out->kt.fill[out->kt.n - 1] = (struct moe_adapter_fill){ .adapter = a,
								 .entry = e,
								 .rank = rank,
								 .grow = own / out->uniform,
								 .projection = projection,
								 .b = b };
	return MOE_OK;
}

/* The largest rank of any projection, with the scaling of the first that has one. */
static int64_t choose(struct moe_adapter_output *out)
{
	const struct moe_adapter *a = out->adapter;
	int64_t rank = 0;

	for (size_t i = 0; i < a->n_entries; i++) {
		const struct moe_adapter_entry *e = &a->entries[i];

		if (e->target != MOE_ADAPTER_EXPERTS)
			continue;
		rank = MOE_MAX(rank, MOE_MAX(e->rank, e->gate_up_rank));
		if (!out->uniform)
			out->uniform = e->gate_up_rank ? moe_adapter_gate_up_scaling(a, e)
						       : moe_adapter_scaling(a, e);
	}
	return rank;
}

static enum moe_status write_experts(struct moe_adapter_output *out)
{
	const struct moe_adapter *a = out->adapter;
	int64_t rank = choose(out);

	MOE_TRY(moe_adapter_begin_uniform(out, rank));
	for (size_t i = 0; i < a->n_entries; i++)
		for (int k = 0;
		     a->entries[i].target == MOE_ADAPTER_EXPERTS && k < 2 * MOE_ADAPTER_PROJECTIONS;
		     k++)
			MOE_TRY(add(out, &a->entries[i], k / 2, k % 2, rank));
	return MOE_OK;
}

const struct moe_adapter_form moe_adapter_form_kt = {
	.name = "kt",
	.summary = "ktransformers: experts in a file of their own",
	.has = has,
	.read = read_experts,
	.finish = finish,
	.write = write_experts,
};
