/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Order of a decoder's tasks: what each kind reads and writes is stated here a second time, by
 * buffer and token block; every two tasks that touch the same memory, one of them writing, must be
 * ordered by the handles. Several steps with fewer slots than micro-batches, so that every buffer
 * is used again.
 */
#include "tests/model_reference.h"
#include "tasks/task.h"

const char moe_suite_name[] = "order";

enum buffer {
	X,
	QKV,
	O,
	MID,
	HN,
	LOGITS,
	LSE,
	LOSS,
	GOUT,
	GMID,
	GO,
	GQ,
	GKV,
	LORA,
	LGRAD,
	MLP,  /* of dense MLPs and shared experts: gate, up, h */
	GMLP, /* gradients at gate and up, and at the sigmoid */
	COPY, /* ring of the backward's weights */
	BUFFERS
};
static const char *const buffer_names[] = {
	"x",	    "qkv",	"o",	  "x_mid",  "hn",      "logits", "lse",	     "row_loss",
	"grad_out", "grad_mid", "grad_o", "grad_q", "grad_kv", "lora",	 "lora grad",
	"mlp",	    "grad_mlp", "copies"
};

struct access {
	int task;  /* index */
	int slice; /* -1: all */
	bool write;
};

struct region {
	struct access *item;
	int n, cap;
};

struct task {
	struct moe_tag tag;
	uint64_t *deps;
	int n_deps;
};

#define MAX_INDEX 16
#define MAX_BLOCKS 72

static struct {
	struct run *run;
	struct task *task;
	int n, cap;
	uint64_t first; /* id of the first task */
	struct region region[BUFFERS][2][MAX_INDEX][MAX_BLOCKS];
	int cleared; /* loss_bwd tasks of this pass so far */
	int errors;
} g;

static void submitted(const struct moe_task_event *event, void *user)
{
	struct task *t;

	(void)user;
	if (!g.n)
		g.first = event->id;
	if (g.n == g.cap) {
		g.cap = g.cap ? 2 * g.cap : 1024;
		g.task = realloc(g.task, (size_t)g.cap * sizeof *g.task);
	}
	t = &g.task[g.n++];
	t->tag = event->tag;
	t->n_deps = event->n_deps;
	t->deps = malloc((size_t)event->n_deps * sizeof *t->deps + 1);
	memcpy(t->deps, event->deps, (size_t)event->n_deps * sizeof *t->deps);
}

static void touch_one(int task, enum buffer b, int slot, int index, int block, int slice,
		      bool write)
{
	struct region *r = &g.region[b][slot][index][block];

	if (r->n == r->cap) {
		r->cap = r->cap ? 2 * r->cap : 8;
		r->item = realloc(r->item, (size_t)r->cap * sizeof *r->item);
	}
	r->item[r->n++] = (struct access){ task, slice, write };
}

/* Blocks b0..b1 of a buffer. */
static void touch(int task, enum buffer b, int slot, int index, int b0, int b1, int slice,
		  bool write)
{
	for (int i = b0; i < b1; i++)
		touch_one(task, b, slot, index, i, slice, write);
}

/* Memory that stands for a layer's buffers. */
static int memory(int layer, bool mid)
{
	int lowest = g.run->m->tensors.lowest;

	return layer >= lowest ? layer + 2 : mid ? 0 : layer & 1;
}

static int first_block(const struct moe_batch *b, int block)
{
	return b->doc_start[block * MOE_TOKEN_BLOCK] / MOE_TOKEN_BLOCK;
}

static int end_block(const struct moe_batch *b, int block)
{
	int n = moe_token_blocks(b->T), end = MOE_MIN((block + 1) * MOE_TOKEN_BLOCK, b->T),
	    i = block + 1;

	while (i < n && b->doc_start[i * MOE_TOKEN_BLOCK] < end)
		i++;
	return i;
}

/* Token blocks of row block rb, 64 rows each. */
static void touch_rows(int task, enum buffer buffer, int slot, int index, const struct moe_batch *b,
		       int rb, bool write)
{
	int last = -1;

	for (int i = rb * 64; i < b->n_rows && i < rb * 64 + 64; i++)
		if (b->row[i] / MOE_TOKEN_BLOCK != last) {
			last = b->row[i] / MOE_TOKEN_BLOCK;
			touch_one(task, buffer, slot, index, last, -1, write);
		}
}

static void head(int i, const struct moe_tag *t, int s, const struct moe_batch *b)
{
	int L = g.run->m->decoder.n_layers, ring = t->group & 1, top = (L - 1) & 1;
	int n = moe_token_blocks(b->T);

	switch (t->kind) {
	case MOE_KIND_final_norm:
		touch_rows(i, X, s, memory(L, false), b, t->group, false);
		touch(i, HN, s, ring, 0, 1, -1, true);
		break;
	case MOE_KIND_logits:
		touch(i, HN, s, ring, 0, 1, -1, false);
		touch(i, LOGITS, s, ring, 0, 1, t->slice, true);
		break;
	case MOE_KIND_loss:
		if (t->group < 0) {
			touch(i, LOSS, s, 0, 0, (b->n_rows + 63) / 64, -1, false);
			break;
		}
		touch(i, LOGITS, s, ring, 0, 1, -1, false);
		touch(i, LSE, s, ring, 0, 1, -1, true);
		touch(i, LOSS, s, 0, t->group, t->group + 1, -1, true);
		break;
	case MOE_KIND_logits_bwd:
		touch(i, LOGITS, s, ring, 0, 1, t->slice, true);
		touch(i, LSE, s, ring, 0, 1, -1, false);
		break;
	default: /* loss_bwd: first one clearing task per block */
		if (g.cleared++ < n) {
			touch(i, GOUT, s, top, t->group, t->group + 1, -1, true);
			break;
		}
		touch_rows(i, GOUT, s, top, b, t->group, true);
		touch_rows(i, X, s, memory(L, false), b, t->group, false);
		touch(i, LOGITS, s, ring, 0, 1, -1, false);
	}
}

static void lora(int i, int layer, int from, int to, bool write)
{
	for (int j = from; j <= to; j++)
		touch_one(i, LORA, 0, layer, j, -1, write);
}

/* Memory of a layer's MLP; frozen layers have one for dense and one for shared. */
static int mlp_memory(int layer)
{
	bool moe = g.run->m->decoder.layers[layer].experts != NULL;

	return layer >= g.run->m->tensors.lowest ? layer + 2 : moe;
}

static void forward(int i, const struct moe_tag *t, int s, const struct moe_batch *b)
{
	int l = t->layer, block = t->group, mine = memory(l, false), mid = memory(l, true);
	bool moe = g.run->m->decoder.layers[l].experts != NULL;

	switch (t->kind) {
	case MOE_KIND_qkv:
		touch(i, X, s, mine, block, block + 1, -1, false);
		touch(i, QKV, s, mine, block, block + 1, -1, true);
		lora(i, l, 0, 2, false);
		break;
	case MOE_KIND_attention:
		touch(i, QKV, s, mine, first_block(b, block), block + 1, -1, false);
		touch(i, O, s, mine, block, block + 1, t->slice, true);
		break;
	case MOE_KIND_attn_out:
		touch(i, O, s, mine, block, block + 1, -1, false);
		touch(i, X, s, mine, block, block + 1, -1, false);
		touch(i, MID, s, mid, block, block + 1, -1, true);
		lora(i, l, 3, 3, false);
		break;
	case MOE_KIND_gate_up:
	case MOE_KIND_gather:
		touch(i, MID, s, mid, 0, moe_token_blocks(b->T), -1, false);
		break;
	case MOE_KIND_ffn_up:
		touch(i, MLP, s, mlp_memory(l), block, block + 1, -1, true);
		lora(i, l, MOE_FFN_TAG + MOE_FFN_GATE, MOE_FFN_TAG + MOE_FFN_UP, false);
		lora(i, l, MOE_FFN_TAG + MOE_FFN_SIGMOID, MOE_FFN_TAG + MOE_FFN_SIGMOID, false);
		touch(i, MID, s, mid, block, block + 1, -1, false);
		break;
	case MOE_KIND_route:
		touch(i, MID, s, mid, block, block + 1, -1, false);
		break;
	default: /* ffn_down, combine */
		if (t->kind == MOE_KIND_ffn_down) {
			touch(i, MLP, s, mlp_memory(l), block, block + 1, -1, false);
			lora(i, l, MOE_FFN_TAG + MOE_FFN_DOWN, MOE_FFN_TAG + MOE_FFN_DOWN, false);
		}
		if (t->kind == MOE_KIND_ffn_down && moe)
			break;
		touch(i, MID, s, mid, block, block + 1, -1, false);
		touch(i, X, s, memory(l + 1, false), block, block + 1, -1, true);
	}
}

static int ring_entry(const struct moe_tag *t)
{
	int index = 0;

	for (int l = 0; l < t->layer; l++)
		index += g.run->m->decoder.layers[l].experts != NULL;
	return index % g.run->m->tensors.ring.n;
}

/* Entry of the ring that a task of a layer touches, by group. */
static void copies(int i, const struct moe_tag *t, bool write)
{
	if (g.run->m->tensors.ring.n)
		touch_one(i, COPY, 0, ring_entry(t), t->group, -1, write);
}

static void backward(int i, const struct moe_tag *t, int s, const struct moe_batch *b)
{
	int l = t->layer, block = t->group, ring = l & 1, n = moe_token_blocks(b->T);
	int mine = memory(l, false), end;
	bool moe = g.run->m->decoder.layers[l].experts != NULL;

	switch (t->kind) {
	case MOE_KIND_repack_bwd:
		copies(i, t, true);
		break;
	case MOE_KIND_gate_up_bwd:
		copies(i, t, false);
		break;
	case MOE_KIND_scatter:
	case MOE_KIND_down_bwd:
		if (t->kind == MOE_KIND_down_bwd)
			copies(i, t, false);
		touch(i, GOUT, s, ring, 0, n, -1, false);
		break;
	case MOE_KIND_lora_grad:
		touch(i, GOUT, s, ring, 0, n, -1, false);
		touch(i, MID, s, mine, 0, n, -1, false);
		break;
	case MOE_KIND_ffn_bwd:
	case MOE_KIND_combine_bwd:
		touch(i, GOUT, s, ring, block, block + 1, -1, false);
		if (t->kind == MOE_KIND_ffn_bwd) {
			touch(i, MLP, s, mlp_memory(l), block, block + 1, -1, true);
			touch(i, GMLP, s, mlp_memory(l), block, block + 1, -1, true);
			lora(i, l, MOE_FFN_TAG, MOE_DENSE_TAGS - 1, false);
		}
		if (t->kind == MOE_KIND_ffn_bwd && moe)
			break;
		touch(i, MID, s, mine, block, block + 1, -1, false);
		touch(i, GMID, s, ring, block, block + 1, -1, true);
		break;
	case MOE_KIND_attn_out_bwd:
		touch(i, GMID, s, ring, block, block + 1, -1, false);
		touch(i, GO, s, ring, block, block + 1, -1, true);
		lora(i, l, 3, 3, false);
		break;
	case MOE_KIND_attention_bwd_q:
		touch(i, QKV, s, mine, first_block(b, block), block + 1, -1, false);
		touch(i, O, s, mine, block, block + 1, -1, false);
		touch(i, GO, s, ring, block, block + 1, -1, false);
		touch(i, GQ, s, ring, block, block + 1, t->slice, true);
		break;
	case MOE_KIND_attention_bwd_kv:
		end = end_block(b, block);
		touch(i, QKV, s, mine, block, end, -1, false);
		touch(i, O, s, mine, block, end, -1, false);
		touch(i, GO, s, ring, block, end, -1, false);
		touch(i, GKV, s, ring, block, block + 1, t->slice, true);
		break;
	case MOE_KIND_qkv_bwd:
		touch(i, GQ, s, ring, block, block + 1, -1, true);
		touch(i, GKV, s, ring, block, block + 1, -1, true);
		touch(i, GMID, s, ring, block, block + 1, -1, false);
		touch(i, X, s, mine, block, block + 1, -1, false);
		touch(i, QKV, s, mine, block, block + 1, -1, false);
		lora(i, l, 0, 2, false);
		if (l > g.run->m->tensors.lowest)
			touch(i, GOUT, s, !ring, block, block + 1, -1, true);
		break;
	case MOE_KIND_ffn_lora_grad:
		if (block == MOE_FFN_TAG + MOE_FFN_DOWN) {
			touch(i, MLP, s, mlp_memory(l), 0, n, -1, false);
			touch(i, GOUT, s, ring, 0, n, -1, false);
		} else {
			touch(i, MID, s, mine, 0, n, -1, false);
		}
		touch(i, GMLP, s, mlp_memory(l), 0, n, -1, false);
		touch_one(i, LGRAD, 0, l, block, -1, true);
		lora(i, l, block, block, false);
		break;
	default: /* linear_grad */
		touch(i, t->group == 3 ? O : X, s, mine, 0, n, -1, false);
		touch(i, t->group == 3 ? GMID : t->group ? GKV : GQ, s, ring, 0, n, -1, false);
		touch_one(i, LGRAD, 0, l, t->group, -1, true);
		lora(i, l, t->group, t->group, false);
	}
}

static void describe(int i)
{
	const struct moe_tag *t = &g.task[i].tag;
	const struct moe_batch *b = &g.run->batch[t->micro].batch;
	int s = t->micro % g.run->m->n_slots;

	if (t->kind == MOE_KIND_embed) {
		g.cleared = 0;
		touch(i, X, s, memory(0, false), t->group, t->group + 1, -1, true);
	} else if (t->kind == MOE_KIND_join || t->kind == MOE_KIND_plan ||
		   t->kind == MOE_KIND_down || t->kind == MOE_KIND_combine_part ||
		   t->kind == MOE_KIND_combine_bwd_part || t->kind == MOE_KIND_route_bwd ||
		   t->kind == MOE_KIND_grad_total) {
		return;
	} else if (t->kind == MOE_KIND_update || t->kind == MOE_KIND_grad_norm) {
		if (t->part >= 0)
			return; /* of experts */
		touch_one(i, LGRAD, 0, t->layer, t->group, -1, false);
		if (t->kind == MOE_KIND_update)
			lora(i, t->layer, t->group, t->group, true);
	} else if (t->kind >= MOE_KIND_final_norm && t->kind <= MOE_KIND_loss_bwd) {
		head(i, t, s, b);
	} else if (t->kind < MOE_KIND_final_norm) {
		forward(i, t, s, b);
	} else {
		backward(i, t, s, b);
	}
}

static void report(int from, int to, enum buffer b, int block)
{
	const struct moe_tag *p = &g.task[from].tag, *q = &g.task[to].tag;

	if (g.errors++ < 20)
		printf("not ordered: %s layer %d block %d micro %d of step %d, then %s layer %d "
		       "block %d "
		       "micro %d of step %d (%s block %d)\n",
		       moe_kind_name(p->kind), p->layer, p->group, p->micro, p->step,
		       moe_kind_name(q->kind), q->layer, q->group, q->micro, q->step,
		       buffer_names[b], block);
}

static void check_region(struct region *r, uint64_t *const *before, enum buffer b, int block)
{
	for (int j = 1; j < r->n; j++)
		for (int i = 0; i < j; i++) {
			const struct access *p = &r->item[i], *q = &r->item[j];

			if (p->task == q->task || (!p->write && !q->write) ||
			    (p->slice >= 0 && q->slice >= 0 && p->slice != q->slice))
				continue;
			if (!(before[q->task][p->task / 64] >> (p->task % 64) & 1))
				report(p->task, q->task, b, block);
		}
	free(r->item);
	memset(r, 0, sizeof *r);
}

/* The ring's last filling before every down_bwd and gate_up_bwd is of its own layer, and precedes it. */
static void check_filled(uint64_t *const *before)
{
	int fills = 0;

	for (int i = 0; i < g.n && g.run->m->tensors.ring.n; i++) {
		const struct moe_tag *t = &g.task[i].tag, *f = NULL;
		int j = i - 1;

		fills += t->kind == MOE_KIND_repack_bwd;
		if (t->kind != MOE_KIND_down_bwd && t->kind != MOE_KIND_gate_up_bwd)
			continue;
		for (; j >= 0; j--) {
			f = &g.task[j].tag;
			if (f->kind == MOE_KIND_repack_bwd && f->group == t->group &&
			    f->part == t->part && ring_entry(f) == ring_entry(t))
				break;
		}
		CU_ASSERT(j >= 0 && f->layer == t->layer && f->micro == t->micro &&
			  (before[i][j / 64] >> (j % 64) & 1));
	}
	CU_ASSERT(!fills == !g.run->m->tensors.ring.n);
}

/* Transitive dependencies, then every region. */
static void check_order(void)
{
	size_t words = (size_t)g.n / 64 + 1;
	uint64_t **before = calloc((size_t)g.n, sizeof(uint64_t *));
	int64_t pairs = 0;

	for (int i = 0; i < g.n; i++) {
		before[i] = calloc(words, sizeof **before);
		for (int j = 0; j < g.task[i].n_deps; j++) {
			size_t d = (size_t)(g.task[i].deps[j] - g.first);

			if (g.task[i].deps[j] < g.first)
				continue;
			before[i][d / 64] |= 1ull << d % 64;
			for (size_t w = 0; w < words; w++)
				before[i][w] |= before[d][w];
		}
		describe(i);
	}
	check_filled(before);
	for (int b = 0; b < BUFFERS; b++)
		for (int s = 0; s < 2; s++)
			for (int x = 0; x < MAX_INDEX; x++)
				for (int block = 0; block < MAX_BLOCKS; block++) {
					pairs += (int64_t)g.region[b][s][x][block].n;
					check_region(&g.region[b][s][x][block], before,
						     (enum buffer)b, block);
				}
	printf("  %d tasks, %lld accesses, %d not ordered\n", g.n, (long long)pairs, g.errors);
	CU_ASSERT_EQUAL(g.errors, 0);
	for (int i = 0; i < g.n; i++) {
		free(before[i]);
		free(g.task[i].deps);
	}
	free(before);
	free(g.task);
	memset(&g, 0, sizeof g);
}

/* Forward and loss only, as evaluation does. */
static enum moe_status evaluate(struct run *r, struct moe_ticket *ticket)
{
	struct moe_context c = {
		.engine = r->m->engine, .ticket = ticket, .layer = -1, .step = 99
	};

	for (c.micro = 0; c.micro < r->n_micro; c.micro++) {
		struct moe_decoder_pass pass =
			moe_model_pass(r->m, c.micro % r->m->n_slots, &r->batch[c.micro].batch);

		MOE_TRY(moe_graph_decoder_forward(&c, &pass));
		MOE_TRY(moe_graph_decoder_loss(&c, &pass, false, 0, &r->loss[c.micro]));
	}
	return MOE_OK;
}

/* What the models' backward multiplies by; NULL: their choice. */
static const char *ring;

/* With kernels that have transposed copies, whatever the environment says. */
static struct moe_engine *open_copying(void)
{
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = 2, .parts = 1, .isa = "c" };
	struct moe_engine *e = NULL;

	OK(moe_engine_open(&p, &e));
	return e;
}

static struct moe_model *open_ring(struct moe_engine *e, const char *dir, const char *targets, int tokens)
{
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = dir,
				      .max_tokens = tokens,
				      .slots = 2,
				      .lora_targets = targets,
				      .lora_rank = 4,
				      .backward_weights = ring };
	struct moe_model *m = NULL;

	OK(moe_model_open(e, &p, &m));
	return m;
}

static void check(const char *config, const char *targets, int tokens, const int *lengths, int n,
		  int steps)
{
	struct moe_engine *e = ring ? open_copying() : open_engine(2, 1, NULL);
	struct moe_observer observer = { .submitted = submitted };
	struct ref_model ref;
	struct run r = { .lr = 1e-3, .max_norm = 1 };
	struct moe_ticket *ticket = NULL;
	int32_t *ids = calloc((size_t)tokens, sizeof *ids),
		*none = malloc((size_t)tokens * sizeof *none);

	memset(none, 0xff, (size_t)tokens * sizeof *none);
	ref_create(&ref, "order", config, 7);
	r.m = ring ? open_ring(e, ref.dir, targets, tokens) : open_model(e, ref.dir, targets, tokens, 2);
	for (int i = 0; i < 3; i++) {
		add_batch(&r, tokens);
		for (int d = 0; d < n;
		     d++) /* one micro-batch ends in a document that is not trained */
			if (i < 2 || d % 2 == 0)
				moe_model_batch_add(&r.batch[i], ids,
						    i == 1 && n > 1 && d == n - 1 ? none : NULL,
						    lengths[d]);
	}
	g.run = &r;
	OK(moe_engine_observe(e, &observer));
	OK(moe_ticket_create(e, &ticket));
	OK(moe_submit_begin(e));
	for (int i = 0; i < steps; i++, r.step++) {
		if (targets)
			OK(submit(&r, ticket, true));
		OK(evaluate(&r, ticket));
	}
	moe_submit_end(e);
	OK(moe_ticket_wait(ticket));
	moe_ticket_destroy(ticket);
	OK(moe_engine_wait(e));
	OK(moe_engine_observe(e, NULL));
	check_order();
	free_run(&r);
	moe_model_close(r.m);
	OK(moe_engine_close(e));
	ref_free(&ref);
	free(ids);
	free(none);
}

#define COMMON                                                                                     \
	"\"hidden_size\":8,\"num_attention_heads\":2,\"rms_norm_eps\":1e-5,\"hidden_act\":"        \
	"\"silu\","                                                                                \
	"\"max_position_embeddings\":8192,\"rope_theta\":500.0,\"vocab_size\":50,"                 \
	"\"num_key_value_heads\":1,\"intermediate_size\":12,\"moe_intermediate_size\":8,"          \
	"\"num_experts\":4,\"num_experts_per_tok\":2,\"decoder_sparse_step\":1,"                   \
	"\"norm_topk_prob\":true,\"tie_word_embeddings\":false,"
#define SHARED "\"model_type\":\"qwen2_moe\",\"shared_expert_intermediate_size\":8,"
#define PLAIN "\"model_type\":\"qwen3_moe\",\"head_dim\":4,"
#define ALL "experts,q_proj,k_proj,v_proj,o_proj"

static const int mixed[] = { 70, 1, 130, 64, 3, 200 };

static void test_moe(void)
{
	check("{" SHARED COMMON "\"num_hidden_layers\":5,\"mlp_only_layers\":[]}", ALL, 512, mixed,
	      6, 3);
}

static void test_mlps(void)
{
	check("{" SHARED COMMON "\"num_hidden_layers\":5,\"mlp_only_layers\":[1,2]}", "all-linear", 512,
	      mixed, 6, 3);
	check("{" SHARED COMMON "\"num_hidden_layers\":5,\"mlp_only_layers\":[0,3]}",
	      "experts,mlp.down_proj,layers.1.mlp.shared_expert.gate_proj,shared_expert_gate", 512, mixed,
	      6, 3);
	check("{" SHARED COMMON "\"num_hidden_layers\":4,\"mlp_only_layers\":[2]}",
	      "layers.2.mlp.up_proj,layers.3.mlp.shared_expert.down_proj", 512, mixed, 6, 3);
}

static void test_dense_between(void)
{
	check("{" PLAIN COMMON "\"num_hidden_layers\":6,\"mlp_only_layers\":[1,2,3]}", ALL, 512,
	      mixed, 6, 3);
}

static void test_frozen_below(void)
{
	check("{" PLAIN COMMON "\"num_hidden_layers\":6,\"mlp_only_layers\":[0,1,2,4]}", "experts",
	      512, mixed, 6, 3);
	check("{" SHARED COMMON "\"num_hidden_layers\":4,\"mlp_only_layers\":[]}", "experts", 512,
	      mixed, 6, 3);
	check("{" PLAIN COMMON "\"num_hidden_layers\":3,\"mlp_only_layers\":[]}", "experts,o_proj",
	      512, mixed, 6, 3);
}

static void test_rings(void)
{
	static const char *const rings[] = { "shared:1", "shared:2", "shared:3" };

	for (int i = 0; i < 3; i++) {
		ring = rings[i];
		check("{" SHARED COMMON "\"num_hidden_layers\":5,\"mlp_only_layers\":[]}", ALL, 512,
		      mixed, 6, 2);
		check("{" PLAIN COMMON "\"num_hidden_layers\":6,\"mlp_only_layers\":[0,3]}", "experts",
		      512, mixed, 6, 2);
	}
	ring = NULL;
}

static void test_inference(void)
{
	check("{" SHARED COMMON "\"num_hidden_layers\":5,\"mlp_only_layers\":[]}", NULL, 512, mixed,
	      6, 3);
	check("{" PLAIN COMMON "\"num_hidden_layers\":4,\"mlp_only_layers\":[0,1,3]}", NULL, 512,
	      mixed, 6, 3);
	check("{" PLAIN COMMON "\"num_hidden_layers\":1,\"mlp_only_layers\":[]}", NULL, 512, mixed,
	      6, 3);
}

static void test_long_documents(void)
{
	static const int length = 60 * 64 + 5;

	check("{" PLAIN COMMON "\"num_hidden_layers\":3,\"mlp_only_layers\":[1]}", ALL, 4096,
	      &length, 1, 2);
}

const struct moe_test moe_suite_tests[] = {
	{ "MoE layers with shared experts", test_moe },
	{ "LoRA of MLPs and shared experts", test_mlps },
	{ "dense layers between", test_dense_between },
	{ "frozen layers below", test_frozen_below },
	{ "rings of the backward's weights", test_rings },
	{ "inference", test_inference },
	{ "a document of more blocks than handles", test_long_documents },
	{ NULL, NULL },
};
