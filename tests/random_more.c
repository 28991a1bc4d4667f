/* SPDX-License-Identifier: Apache-2.0 */
/* Calls that are made now and then, and calls that no state allows. */
#include "tests/random_layers.h"

#include <math.h>

/* ---- the checkpoint cache ---- */

static void put_output(struct layer_model *m)
{
	struct block_data d = call_of(m, any(4));
	enum moe_dtype dtype = any(4) ? MOE_F32 : MOE_I32;
	struct moe_array out = matrix_of(d.x, dtype, d.c.T, d.c.H);
	enum moe_status want = m->checkpoint != MOE_CHECKPOINT_EMPTY ? MOE_ERR_STATE
			       : dtype == MOE_F32		     ? MOE_OK
								     : MOE_ERR_ARG;

	expect_status(moe_experts_checkpoint_put(m->l, &out), want, "checkpoint put");
	m->checkpoint = want == MOE_OK ? MOE_CHECKPOINT_READY : MOE_CHECKPOINT_POISONED;
	if (want == MOE_OK) {
		free(m->output);
		m->output = d.x, d.x = NULL;
		m->output_rows = d.c.T;
	}
	call_free(&d);
}

static void get_output(struct layer_model *m)
{
	bool ready = m->checkpoint == MOE_CHECKPOINT_READY, other = any(4) == 0,
	     narrow = any(6) == 0;
	struct block_data d = call_of(m, ready ? m->output_rows + other : 1);
	struct moe_array out = matrix_of(d.out, MOE_F32, d.c.T, d.c.H - narrow);
	enum moe_status want = other || narrow ? MOE_ERR_ARG : MOE_OK;

	expect_status(moe_experts_checkpoint_get(m->l, &out), ready ? want : MOE_ERR_STATE,
		      "checkpoint get");
	if (ready && want != MOE_OK)
		m->checkpoint = MOE_CHECKPOINT_POISONED;
	else if (ready)
		expect(!memcmp(d.out, m->output, (size_t)d.c.T * (size_t)d.c.H * sizeof(float)),
		       "the checkpoint's output");
	call_free(&d);
}

static void checkpoint_call(struct layer_model *m)
{
	switch (any(8)) {
	case 0:
	case 1:
		expect_status(moe_experts_checkpoint_begin(m->l),
			      m->checkpoint == MOE_CHECKPOINT_EMPTY ? MOE_OK : MOE_ERR_STATE,
			      "checkpoint begin");
		if (m->checkpoint == MOE_CHECKPOINT_READY)
			m->checkpoint = MOE_CHECKPOINT_POISONED;
		break;
	case 2:
	case 3:
		put_output(m);
		break;
	case 4:
	case 5:
		get_output(m);
		break;
	case 6:
		moe_experts_checkpoint_clear(m->l);
		if (m->checkpoint == MOE_CHECKPOINT_READY)
			m->checkpoint = MOE_CHECKPOINT_EMPTY;
		break;
	default:
		if (any(3))
			break;
		expect_status(
			moe_experts_checkpoint_poison(m->l, "the caller's recomputation failed"),
			MOE_OK, "poison");
		m->checkpoint = MOE_CHECKPOINT_POISONED;
		break;
	}
	expect(moe_experts_checkpoint_state(m->l) == m->checkpoint,
	       "state of the checkpoint cache");
}

/* Several: errors of this cache are of calls behind each other. */
void do_checkpoint(struct layer_model *m)
{
	for (int i = 1 + any(6); i > 0; i--)
		checkpoint_call(m);
}

/* ---- values ---- */

static void set_values(struct layer_model *m, int i)
{
	struct moe_array a = array_like(m, i, m->d.w[array_of(i)], MOE_F32);

	do_wait(m); /* the reference of what is in flight has been taken, its arrays are the model's
		     */
	for (int64_t j = 0; j < m->d.n[array_of(i)]; j++)
		m->d.w[array_of(i)][j] = moe_bf16_to_f32(moe_f32_to_bf16(.5f * unit())) / 1.5f;
	expect_status(moe_experts_set_array(m->l, array_of(i), &a), MOE_OK, "set_array");
	stale(m);
}

static void init_values(struct layer_model *m)
{
	do_wait(m);
	expect_status(moe_experts_init_lora(m->l, (uint64_t)any(1000)), MOE_OK, "init_lora");
	stale(m);
	for (int i = 0; i < 6; i++) {
		double *v = layer_get(m->l, &m->d.c, array_of(i), false);
		double most = i < 3 ? 1 / sqrt(i == 2 ? m->d.c.I : m->d.c.H) : 0;

		for (int64_t j = 0; j < m->d.n[array_of(i)]; j++) {
			expect(fabs(v[j]) <= most, "initial LoRA values");
			m->d.w[array_of(i)][j] = (float)v[j];
		}
		free(v);
	}
}

static void read_values(struct layer_model *m, int i)
{
	enum moe_block_array which = array_of(i);
	double *v = calloc((size_t)m->d.n[which] + 1, sizeof *v);
	struct moe_array a = array_like(m, i, v, MOE_F64);
	bool frozen = i >= 6 && !m->d.c.base_grads;

	if (i < 6 && !m->d.c.r) {
		expect_status(moe_experts_get_array(m->l, which, &a), MOE_ERR_ARG,
			      "LoRA of a layer without");
	} else if (frozen) {
		expect_status(moe_experts_get_array(m->l, which, &a), MOE_ERR_STATE,
			      "frozen weights");
	} else {
		expect_status(moe_experts_get_array(m->l, which, &a), MOE_OK, "get_array");
		for (int64_t j = 0; j < m->d.n[which]; j++)
			expect(fabs(v[caller_index(m, i, j)] - m->d.w[which][j]) <= 1e-6 + m->drift,
			       "a value");
	}
	free(v);
}

void do_arrays(struct layer_model *m)
{
	int i = any(9);
	bool own = m->d.c.r && !m->bound;

	switch (any(4)) {
	case 0:
		if (own && i < 6)
			set_values(m, i);
		break;
	case 1:
		if (own && !any(3))
			init_values(m);
		break;
	default:
		read_values(m, i);
		break;
	}
}

/* Nothing happens, whatever the arrays hold. */
void do_load_again(struct layer_model *m)
{
	struct block_data other = { .c = m->d.c };

	for (int i = 0; i < 3; i++)
		other.w[i] = calloc((size_t)m->d.n[i] + 1, sizeof(float));
	expect_status(layer_load(m->l, &other, NULL, 0), MOE_OK, "a second load");
	expect_status(moe_experts_load_file(m->l, "/nonexistent", NULL, NULL, 0), MOE_OK,
		      "a second load, of a file");
	expect_status(moe_experts_load_quantised(m->l, NULL, NULL, NULL, 0, NULL, 0), MOE_OK,
		      "a second load, of codes");
	for (int i = 0; i < 3; i++)
		free(other.w[i]);
}

/* A mask is a function of step and position; forwards that are not saved have none unless they ask
 * for it. */
void do_dropout(struct layer_model *m)
{
	struct block_data d = call_of(m, 1 + any(T_MAX));
	struct layer_call a = layer_call(&d, d.c.T);
	size_t bytes = (size_t)d.c.T * (size_t)d.c.H * sizeof(float);
	float *plain = malloc(bytes);

	expect_status(moe_experts_forward(m->l, &a.x, &a.ids, &a.weights, 0, &a.out), MOE_OK,
		      "forward, dropout off");
	memcpy(plain, d.out, bytes);
	expect_status(moe_experts_set_dropout(m->l, MOE_DROPOUT_SAVED, -1, 0), MOE_OK,
		      "dropout of saved forwards");
	expect_status(moe_experts_forward(m->l, &a.x, &a.ids, &a.weights, 0, &a.out), MOE_OK,
		      "forward, not saved");
	expect(!memcmp(plain, d.out, bytes), "no mask without save");
	expect_status(moe_experts_set_dropout(m->l, MOE_DROPOUT_ON, any(5), any(100)), MOE_OK,
		      "dropout on");
	for (int i = 0; i < 2; i++) {
		expect_status(moe_experts_forward(m->l, &a.x, &a.ids, &a.weights, 0, &a.out),
			      MOE_OK, "forward");
		expect(!i || !memcmp(plain, d.out, bytes),
		       "the mask of a forward that is run again");
		memcpy(plain, d.out, bytes);
	}
	expect_status(moe_experts_set_dropout(m->l, MOE_DROPOUT_OFF, -1, 0), MOE_OK, "dropout off");
	free(plain);
	call_free(&d);
}

/* ---- misuse ---- */

void misuse_create(struct moe_engine *e, const struct moe_experts_params *good)
{
	struct moe_experts_params bad = *good;
	struct moe_expert_layer *l = (struct moe_expert_layer *)&bad;
	enum moe_status want = MOE_ERR_ARG;

	switch (any(8)) {
	case 0:
		bad.experts_per_token = 0;
		break;
	case 1:
		bad.hidden = -1;
		break;
	case 2:
		bad.lora_rank = 2, bad.lora_alpha = 0;
		break;
	case 3:
		bad.lora_dropout = 1;
		break;
	case 4:
		bad.micro_batches = bad.max_cache_depth + 2;
		break;
	case 5:
		bad.weight_format = "int9";
		break;
	case 6:
		bad.experts = 4096, bad.hidden = bad.intermediate = 1 << 30, want = MOE_ERR_NOFIT;
		break;
	default:
		bad.struct_size = 8;
		break;
	}
	expect_status(moe_experts_create(e, &bad, &l), want, "create with bad params");
	expect(l == NULL, "no layer of bad params");
}

static enum moe_status plain_forward(struct layer_model *m, bool save)
{
	struct block_data d = call_of(m, 2);
	enum moe_status st = layer_forward(m->l, &d, save);

	call_free(&d);
	return st;
}

void misuse_unloaded(struct layer_model *m)
{
	int64_t map[N_EXPERTS] = { 0, 1, 2, 4 };
	struct block_data small = m->d;

	expect_status(plain_forward(m, true), MOE_ERR_STATE, "forward without weights");
	expect_status(moe_experts_repack_async(m->l), MOE_ERR_STATE, "repack without weights");
	expect_status(moe_experts_update_base(m->l), MOE_ERR_STATE, "update_base without weights");
	expect_status(moe_experts_bind_base(m->l, m->g + 6), MOE_ERR_STATE,
		      "bind_base without weights");
	expect_status(layer_load(m->l, &m->d, map, N_EXPERTS), MOE_ERR_ARG,
		      "a row beyond the arrays");
	expect_status(layer_load(m->l, &m->d, map, N_EXPERTS - 1), MOE_ERR_ARG, "a short map");
	small.c.I--;
	expect_status(layer_load(m->l, &small, NULL, 0), MOE_ERR_ARG, "arrays of another shape");
	expect_status(moe_experts_load_file(m->l, "/nonexistent", NULL, NULL, 0), MOE_ERR_IO,
		      "no file");
	misuse_quantised(m);
}

void misuse_without_lora(struct layer_model *m)
{
	struct moe_gradient bad[6];

	if (!m->d.c.r) {
		expect_status(moe_experts_init_lora(m->l, 1), MOE_ERR_STATE, "init_lora of rank 0");
		expect_status(moe_experts_bind_lora(m->l, m->g), MOE_ERR_STATE,
			      "bind_lora of rank 0");
		return;
	}
	expect_status(plain_forward(m, true), MOE_ERR_STATE, "forward without LoRA values");
	expect_status(moe_experts_update_lora(m->l), MOE_ERR_STATE, "update_lora without LoRA");
	memcpy(bad, m->g, sizeof bad);
	bad[1].param.shape[2]++;
	expect_status(moe_experts_bind_lora(m->l, bad), MOE_ERR_ARG, "bind_lora of another shape");
	memcpy(bad, m->g, sizeof bad);
	bad[3].param.data = bad[4].param.data;
	expect_status(moe_experts_bind_lora(m->l, bad), MOE_ERR_ARG,
		      "bind_lora of a parameter twice");
	memcpy(bad, m->g, sizeof bad);
	bad[2].buffer.data = m->with_buffers ? NULL : m->buffer[2];
	expect_status(moe_experts_bind_lora(m->l, bad), MOE_ERR_ARG,
		      "bind_lora with a buffer too few or many");
	memcpy(bad, m->g, sizeof bad);
	bad[5].param.dtype = MOE_F16;
	expect_status(moe_experts_bind_lora(m->l, bad), MOE_ERR_ARG, "bind_lora of F16");
}

static void bad_forward(struct layer_model *m)
{
	struct block_data d = call_of(m, 2);
	struct layer_call a = layer_call(&d, 2);

	switch (any(7)) {
	case 0:
		a.x.shape[0] = a.out.shape[0] = a.ids.shape[0] = a.weights.shape[0] = T_MAX + 1;
		break;
	case 1:
		d.ids[1] = m->d.c.E;
		break;
	case 2:
		d.ids[1] = -2;
		break;
	case 3:
		a.x.dtype = MOE_I32;
		break;
	case 4:
		a.out.shape[1]--;
		break;
	case 5:
		a.ids.data = NULL;
		break;
	default:
		a.weights.shape[1]++;
		break;
	}
	expect_status(moe_experts_forward(m->l, &a.x, &a.ids, &a.weights, 1, &a.out), MOE_ERR_ARG,
		      "a bad forward");
	call_free(&d);
}

/* Arrays that the latest kept forward's backward refuses, which stays kept. */
static void bad_backward(struct layer_model *m)
{
	struct block_data *d;
	struct layer_call a;

	if (!m->n_kept || (m->pending && !several(m)))
		return;
	d = &m->kept[m->n_kept - 1].d;
	a = layer_call(d, d->c.T);
	switch (any(4)) {
	case 0:
		a.grad_x.shape[1]++;
		break;
	case 1:
		a.grad_weights.shape[0]++;
		break;
	case 2:
		a.grad_out.dtype = MOE_U8;
		break;
	default:
		a.grad_out.ndim = 1;
		break;
	}
	expect_status(moe_experts_backward(m->l, &a.grad_out, 1, &a.grad_x, &a.grad_weights),
		      MOE_ERR_ARG, "a bad backward");
}

static void bad_settings(struct layer_model *m)
{
	struct moe_adamw_params p = adamw_default();
	float one[1];
	struct moe_array a = matrix_of(one, MOE_I32, 1, 1);
	struct moe_experts_info info = { 0 };

	p.max_grad_norm = 1;
	expect_status(moe_experts_update(m->l, &p), MOE_ERR_UNSUPPORTED, "clipping of one layer");
	p.max_grad_norm = 0, p.beta2 = -1;
	expect_status(moe_experts_update(m->l, &p), MOE_ERR_ARG, "beta2 of -1");
	expect_status(moe_experts_update(NULL, &p), MOE_ERR_ARG, "update of NULL");
	expect_status(moe_experts_set_dropout(m->l, (enum moe_dropout_mode)3, 0, 0), MOE_ERR_ARG,
		      "dropout mode 3");
	expect_status(moe_experts_set_dropout(m->l, MOE_DROPOUT_ON, 0, -1), MOE_ERR_ARG,
		      "position -1");
	expect_status(moe_experts_get_array(m->l, MOE_BLOCK_ROUTER, &a), MOE_ERR_ARG,
		      "the router of experts");
	expect_status(moe_experts_set_array(m->l, MOE_BLOCK_UP_PROJ, &a), MOE_ERR_ARG,
		      "setting base weights");
	expect_status(moe_experts_get_info(m->l, &info), MOE_ERR_ARG, "info without struct_size");
	expect_status(moe_experts_get_window(m->l, NULL), MOE_ERR_ARG, "window to NULL");
}

static void bad_binding(struct layer_model *m)
{
	if (m->bound)
		expect_status(moe_experts_bind_lora(m->l, m->g), MOE_ERR_STATE, "bind_lora again");
	else if (m->d.c.r && (m->open || m->pending))
		expect_status(moe_experts_bind_lora(m->l, m->g), MOE_ERR_STATE,
			      "bind_lora into an open window");
	if (m->bound_base)
		expect_status(moe_experts_bind_base(m->l, m->g + 6), MOE_ERR_STATE,
			      "bind_base again");
	else if (!m->d.c.base_grads)
		expect_status(moe_experts_bind_base(m->l, m->g + 6), MOE_ERR_STATE,
			      "bind_base of frozen weights");
}

void do_misuse(struct layer_model *m)
{
	switch (any(5)) {
	case 0:
	case 1:
		bad_forward(m);
		break;
	case 2:
		bad_backward(m);
		break;
	case 3:
		bad_settings(m);
		break;
	default:
		bad_binding(m);
		break;
	}
}

/* While the engine is held nothing that would wait begins, and what is submitted runs afterwards.
 */
void do_held(struct layer_model all[LAYERS], struct moe_engine *e)
{
	struct layer_model *m = &all[any(LAYERS)];
	struct block_data d = call_of(m, 1 + any(T_MAX));
	struct layer_call a = layer_call(&d, d.c.T);
	struct moe_array w = array_like(m, 0, m->d.w[array_of(0)], MOE_F32);
	struct block_reference r = { 0 };

	for (int i = 0; i < LAYERS; i++)
		do_wait(&all[i]); /* buffers that must grow wait for both */
	expect_status(moe_engine_hold(e), MOE_OK, "hold");
	expect_status(moe_experts_forward(m->l, &a.x, &a.ids, &a.weights, 0, &a.out), MOE_ERR_STATE,
		      "forward, held");
	expect_status(moe_experts_backward(m->l, &a.grad_out, 1, &a.grad_x, NULL), MOE_ERR_STATE,
		      "backward, held");
	expect_status(moe_experts_release_memory(m->l), MOE_ERR_STATE, "release_memory, held");
	expect_status(moe_experts_update_lora(m->l), MOE_ERR_STATE, "update_lora, held");
	if (m->d.c.r)
		expect_status(moe_experts_set_array(m->l, array_of(0), &w), MOE_ERR_STATE,
			      "set_array, held");
	expect_status(moe_experts_forward_async(m->l, &a.x, &a.ids, &a.weights, 0, &a.out), MOE_OK,
		      "submitted, held");
	expect_status(moe_experts_wait(m->l), MOE_ERR_STATE, "wait, held");
	expect_status(moe_engine_release(e), MOE_OK, "release");
	block_reference(&r, &d, d.ids);
	remember(m, &d, d.out, r.out, (int64_t)d.c.T * d.c.H, 0, true);
	block_reference_free(&r);
	if (any(2))
		do_wait(m);
}
