/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routed experts in the fused target_parameters form of PEFT 0.21. gate_up: A [E*R, H], row e*R + j
 * (expert slowest); B [2I, R*E], column j*E + e (expert fastest). down: A [E*r, I], B [H, r*E],
 * indexed alike. PEFT has one A for gate and up. Where they have their own, the file has rank 2R
 * (alpha by rank_pattern and alpha_pattern so that the scaling stays), B is block-diagonal (gate
 * rows use the first R), and metadata says so, which PEFT does not read: trained further by PEFT
 * the zeros are zeros no longer, and gate and up share.
 */
#include "model/adapters/adapter_form.h"
#include "model/adapters/adapter_output.h"

#include <stdio.h>

#define GATE_UP "mlp.experts.gate_up_proj"
#define DOWN "mlp.experts.down_proj"
#define MARK_KEY "moesaic_gate_up"
#define MARK_VALUE "block_diagonal"

/* ---- reading ---- */

static bool has(const struct moe_adapter_input *in, int layer)
{
	return moe_adapter_has(&in->layer[layer].outer) || moe_adapter_has(&in->layer[layer].inner);
}

/* b[e, row, j] = fused[row, j * E + e]; fused has rank * E columns. */
static void gather_b(float *b, const float *fused, int64_t E, int64_t rank, int64_t rows)
{
	for (int64_t x = 0; x < E; x++)
		for (int64_t row = 0; row < rows; row++)
			for (int64_t j = 0; j < rank; j++)
				b[(x * rows + row) * rank + j] = fused[(row * rank + j) * E + x];
}

/*
 * Which pair is gate_up: PEFT nests the wrappers in the order of the module's parameters, which the
 * file does not tell, but the shapes do ([H -> 2I] and [I -> H] cannot both fit either way).
 */
static enum moe_status tell_apart(const struct moe_adapter_layer *l,
				  const struct moe_adapter_pair **gate_up,
				  const struct moe_adapter_pair **down)
{
	const struct moe_adapter_pair *pair[2] = { &l->inner, &l->outer };

	for (int i = 0; i < 2; i++) {
		const struct moe_adapter_pair *g = pair[i], *d = pair[1 - i];

		if (g->a->shape[1] == d->b->shape[0] && g->b->shape[0] == 2 * d->a->shape[1]) {
			*gate_up = g;
			*down = d;
			return MOE_OK;
		}
	}
	return moe_fail(MOE_ERR_FORMAT,
			"tensors '%.200s' and '%.200s' do not fit gate_up and down of the same "
			"experts",
			l->inner.a->name, l->outer.a->name);
}

/* One wrapper alone: only the configuration says of which parameter. */
static enum moe_status tell_one(const struct moe_adapter_input *in,
				const struct moe_adapter_pair *only,
				const struct moe_adapter_pair **gate_up,
				const struct moe_adapter_pair **down)
{
	bool g = moe_adapter_config_names(&in->config, "gate_up_proj");
	bool d = moe_adapter_config_names(&in->config, "down_proj");

	if (g == d)
		return moe_fail(
			MOE_ERR_FORMAT,
			"tensor '%.200s' is alone, and target_parameters %s: of gate_up_proj "
			"or of down_proj?",
			only->a->name, g ? "name both" : "name neither");
	if (g && only->b->shape[0] % 2)
		return moe_fail(MOE_ERR_FORMAT, "tensor '%.200s' has an odd number of rows, %lld",
				only->b->name, (long long)only->b->shape[0]);
	*(g ? gate_up : down) = only;
	return MOE_OK;
}

/* The experts that a pair is for, from its rows and the configured rank. */
static enum moe_status count_experts(const struct moe_adapter_pair *p, int64_t rank, int64_t *E)
{
	int64_t n = p->a->shape[0] / rank;

	if (!n || p->a->shape[0] % rank || (*E && *E != n))
		return moe_fail(MOE_ERR_FORMAT,
				"tensor '%.200s' has %lld rows: no %s of the configured rank %lld",
				p->a->name, (long long)p->a->shape[0],
				*E ? "match for the other's experts" : "number of experts",
				(long long)rank);
	*E = n;
	return MOE_OK;
}

/* Ranks and sizes from shapes and configuration. */
static enum moe_status size_experts(const struct moe_adapter_input *in,
				    const struct moe_adapter_pair *gate_up,
				    const struct moe_adapter_pair *down,
				    struct moe_adapter_entry *e)
{
	char name[96];

	if (gate_up) {
		snprintf(name, sizeof name, "model.layers.%d." GATE_UP, e->layer);
		MOE_TRY(moe_adapter_config_setting(&in->config, name, &e->gate_up_rank,
						   &e->gate_up_alpha));
		MOE_TRY(count_experts(gate_up, e->gate_up_rank, &e->n_experts));
		e->hidden = gate_up->a->shape[1];
		e->intermediate = gate_up->b->shape[0] / 2;
	}
	if (down) {
		snprintf(name, sizeof name, "model.layers.%d." DOWN, e->layer);
		MOE_TRY(moe_adapter_config_setting(&in->config, name, &e->rank, &e->alpha));
		MOE_TRY(count_experts(down, e->rank, &e->n_experts));
		e->hidden = down->b->shape[0];
		e->intermediate = down->a->shape[1];
	}
	return MOE_OK;
}

/* Undoes the fused layout; scratch has room for the largest B. */
static enum moe_status unpack(const struct moe_adapter_pair *gate_up,
			      const struct moe_adapter_pair *down, struct moe_adapter_entry *e,
			      float *scratch)
{
	int64_t R = e->gate_up_rank, E = e->n_experts, I = e->intermediate;

	if (gate_up) {
		MOE_TRY(moe_adapter_to_f32(gate_up->a, e->gate_a));
		MOE_TRY(moe_adapter_to_f32(gate_up->b, scratch));
		gather_b(e->gate_b, scratch, E, R, I);
		gather_b(e->up_b, scratch + I * R * E, E, R, I);
	}
	if (down) {
		MOE_TRY(moe_adapter_to_f32(down->a, e->down_a));
		MOE_TRY(moe_adapter_to_f32(down->b, scratch));
		gather_b(e->down_b, scratch, E, e->rank, e->hidden);
	}
	return MOE_OK;
}

static size_t elements(const struct moe_adapter_pair *p)
{
	return p ? (size_t)(p->b->shape[0] * p->b->shape[1]) : 0;
}

/* With one A for gate and up; finish tells whether they have their own. */
static enum moe_status read_fused(struct moe_adapter_input *in, struct moe_adapter_entry *e)
{
	const struct moe_adapter_layer *l = &in->layer[e->layer];
	const struct moe_adapter_pair *gate_up = NULL, *down = NULL;
	bool inner = moe_adapter_has(&l->inner), outer = moe_adapter_has(&l->outer);
	enum moe_status status;
	float *scratch;

	if (inner)
		MOE_TRY(moe_adapter_check_pair(&l->inner));
	if (outer)
		MOE_TRY(moe_adapter_check_pair(&l->outer));
	if (inner && outer)
		MOE_TRY(tell_apart(l, &gate_up, &down));
	else
		MOE_TRY(tell_one(in, inner ? &l->inner : &l->outer, &gate_up, &down));
	MOE_TRY(size_experts(in, gate_up, down, e));
	in->adapter->share_a = true;
	MOE_TRY(moe_adapter_alloc_experts(e, true));
	scratch = moe_alloc(MOE_MAX(elements(gate_up), elements(down)), sizeof *scratch);
	if (!scratch)
		return moe_fail(MOE_ERR_NOMEM, "out of memory");
	status = unpack(gate_up, down, e, scratch);
	moe_free(scratch);
	return status;
}

/* true if gate uses only the first half of the rank, up only the second. */
static bool is_block_diagonal(const struct moe_adapter_entry *e)
{
	int64_t R = e->gate_up_rank, rows = e->n_experts * e->intermediate;

	if (R % 2)
		return false;
	for (int64_t row = 0; row < rows; row++)
		for (int64_t j = 0; j < R / 2; j++)
			if (e->gate_b[row * R + R / 2 + j] != 0 || e->up_b[row * R + j] != 0)
				return false;
	return true;
}

/* dst [n][half] = columns first..first + half of src [n][2 half] */
static void take_half(float *dst, const float *src, int64_t n, int64_t half, int64_t first)
{
	for (int64_t i = 0; i < n; i++)
		memcpy(dst + i * half, src + 2 * i * half + first, (size_t)half * sizeof *dst);
}

/* An A each of half the rank. */
static enum moe_status split(const struct moe_adapter *adapter, struct moe_adapter_entry *e)
{
	struct moe_adapter_entry n = *e;
	int64_t E = e->n_experts, H = e->hidden, I = e->intermediate, half = e->gate_up_rank / 2;

	n.gate_up_rank = half;
	n.gate_up_alpha =
		moe_lora_alpha(adapter->rslora, half, moe_adapter_gate_up_scaling(adapter, e));
	MOE_TRY(moe_adapter_alloc_experts(&n, false));
	take_half(n.gate_a, e->gate_a, E, half * H, 0);
	take_half(n.up_a, e->gate_a, E, half * H, half * H);
	take_half(n.gate_b, e->gate_b, E * I, half, 0);
	take_half(n.up_b, e->up_b, E * I, half, half);
	if (e->rank) {
		memcpy(n.down_a, e->down_a, (size_t)(E * e->rank * I) * sizeof(float));
		memcpy(n.down_b, e->down_b, (size_t)(E * e->rank * H) * sizeof(float));
	}
	moe_free(e->block);
	*e = n;
	return MOE_OK;
}

/* Own A for gate and up where the file says so and every layer's B bears it out. */
static enum moe_status finish(struct moe_adapter_input *in)
{
	const char *mark = moe_safetensors_metadata(in->file, MARK_KEY);
	struct moe_adapter *adapter = in->adapter;

	if (!mark || strcmp(mark, MARK_VALUE) != 0)
		return MOE_OK;
	for (size_t i = 0; i < adapter->n_entries; i++)
		if (adapter->entries[i].gate_up_rank && !is_block_diagonal(&adapter->entries[i]))
			return MOE_OK;
	for (size_t i = 0; i < adapter->n_entries; i++)
		if (adapter->entries[i].gate_up_rank)
			MOE_TRY(split(adapter, &adapter->entries[i]));
	adapter->share_a = false;
	return MOE_OK;
}

/* ---- writing ---- */

static enum moe_status fill_gate_up_a(void *user, void *out)
{
	const struct moe_adapter_fill *f = user;
	const struct moe_adapter_entry *e = f->entry;
	size_t n = (size_t)(e->gate_up_rank * e->hidden);
	float *a = out;

	for (int64_t x = 0; x < e->n_experts; x++, a += 2 * n) {
		memcpy(a, e->gate_a + (size_t)x * n, n * sizeof *a);
		memcpy(a + n, e->up_a + (size_t)x * n, n * sizeof *a);
	}
	return MOE_OK;
}

/* out[row, (first + j) * E + e] = b[e, row, j] for rows rows; out has columns columns. */
static void scatter_b(float *out, int64_t columns, int64_t first, const float *b, int64_t E,
		      int64_t rank, int64_t rows)
{
	for (int64_t x = 0; x < E; x++)
		for (int64_t row = 0; row < rows; row++)
			for (int64_t j = 0; j < rank; j++)
				out[row * columns + (first + j) * E + x] =
					b[(x * rows + row) * rank + j];
}

static enum moe_status fill_gate_up_b(void *user, void *out)
{
	const struct moe_adapter_fill *f = user;
	const struct moe_adapter_entry *e = f->entry;
	int64_t R = e->gate_up_rank, E = e->n_experts, I = e->intermediate;
	int64_t columns = (f->adapter->share_a ? 1 : 2) * R * E;
	float *up = (float *)out + I * columns;

	memset(out, 0, (size_t)(2 * I * columns) * sizeof *up);
	scatter_b(out, columns, 0, e->gate_b, E, R, I);
	scatter_b(up, columns, f->adapter->share_a ? 0 : R, e->up_b, E, R, I);
	return MOE_OK;
}

static enum moe_status fill_down_b(void *user, void *out)
{
	const struct moe_adapter_fill *f = user;
	const struct moe_adapter_entry *e = f->entry;

	scatter_b(out, e->rank * e->n_experts, 0, e->down_b, e->n_experts, e->rank, e->hidden);
	return MOE_OK;
}

/* The matrix base_model.model.model.layers.N.<module>.lora_<ab>.weight. */
static enum moe_status add(struct moe_adapter_output *out, const struct moe_adapter_entry *e,
			   const char *module, char ab, int64_t rows, int64_t columns,
			   const float *data, enum moe_status (*fill)(void *user, void *out))
{
	struct moe_st_item *it;

	MOE_TRY(moe_adapter_add(&out->tensors, &it,
				"base_model.model.model.layers.%d.%s.lora_%c.weight", e->layer,
				module, ab));
	it->ndim = 2;
	it->shape[0] = rows;
	it->shape[1] = columns;
	it->data = data;
	it->fill = fill;
	out->tensors.fill[out->tensors.n - 1] =
		(struct moe_adapter_fill){ .adapter = out->adapter, .entry = e };
	return MOE_OK;
}

/* gate_up is wrapped first, so PEFT calls it base_layer of the wrapper of down. */
static enum moe_status add_layer(struct moe_adapter_output *out, const struct moe_adapter_entry *e)
{
	bool share = out->adapter->share_a;
	int64_t E = e->n_experts, n = (share ? 1 : 2) * e->gate_up_rank * E;
	const char *module = e->rank ? "mlp.experts.base_layer" : "mlp.experts";

	if (n) {
		MOE_TRY(add(out, e, module, 'A', n, e->hidden, share ? e->gate_a : NULL,
			    share ? NULL : fill_gate_up_a));
		MOE_TRY(add(out, e, module, 'B', 2 * e->intermediate, n, NULL, fill_gate_up_b));
	}
	if (!e->rank)
		return MOE_OK;
	MOE_TRY(add(out, e, "mlp.experts", 'A', e->rank * E, e->intermediate, e->down_a, NULL));
	return add(out, e, "mlp.experts", 'B', e->hidden, e->rank * E, NULL, fill_down_b);
}

static bool gate_up_setting(const struct moe_adapter_output *out, const struct moe_adapter_entry *e,
			    int64_t *rank, double *alpha)
{
	const struct moe_adapter *a = out->adapter;

	*rank = (a->share_a ? 1 : 2) * e->gate_up_rank;
	if (!*rank)
		return false;
	*alpha = a->share_a ? e->gate_up_alpha
			    : moe_lora_alpha(a->rslora, *rank, moe_adapter_gate_up_scaling(a, e));
	return true;
}

static bool down_setting(const struct moe_adapter_output *out, const struct moe_adapter_entry *e,
			 int64_t *rank, double *alpha)
{
	(void)out;
	*rank = e->rank;
	*alpha = e->alpha;
	return e->rank != 0;
}

static enum moe_status write_fused(struct moe_adapter_output *out)
{
	const struct moe_adapter *a = out->adapter;
	bool own_a = false;

	MOE_TRY(moe_adapter_begin(out, a->rank, a->alpha, a->rslora));
	for (size_t i = 0; i < a->n_entries; i++) {
		const struct moe_adapter_entry *e = &a->entries[i];

		if (e->target != MOE_ADAPTER_EXPERTS)
			continue;
		own_a |= e->gate_up_rank && !a->share_a;
		MOE_TRY(add_layer(out, e));
	}
	MOE_TRY(moe_adapter_add_module(out, MOE_ADAPTER_EXPERTS, "target_parameters", GATE_UP,
				       gate_up_setting));
	MOE_TRY(moe_adapter_add_module(out, MOE_ADAPTER_EXPERTS, "target_parameters", DOWN,
				       down_setting));
	if (own_a) {
		out->mark_key = MARK_KEY;
		out->mark_value = MARK_VALUE;
	}
	return MOE_OK;
}

const struct moe_adapter_form moe_adapter_form_peft = {
	.name = "peft",
	.summary = "PEFT 0.21 with transformers 5: experts fused",
	.has = has,
	.read = read_fused,
	.finish = finish,
	.write = write_fused,
};
