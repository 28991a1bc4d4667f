/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Misuse that StarPU answers with an abort, a hang or silence (docs/guards.md): here a status and a
 * text. Each case is a child of its own with a time limit.
 */
#include "engine/internal.h"
#include "tasks/moe_tasks.h"
#include "tasks/trained_tasks.h"
#include "tasks/update_tasks.h"
#include "tests/block_check.h"
#include "tests/graph_check.h"

const char moe_suite_name[] = "guards";

#define CASE(name) static void name(struct moe_engine *e)
struct guard {
	const char *name;
	void (*run)(struct moe_engine *e);
};

static void guard_child(const void *arg)
{
	const struct guard *g = arg;
	struct moe_engine *e = open_with(2, 2, NULL);

	g->run(e);
	/* whatever was refused, the engine still works and closes */
	if (moe_engine_check(e) == MOE_OK) {
		struct graph graph;

		graph_make(&graph, 4, 50, 2);
		graph_register(&graph, e);
		graph_submit(&graph, e, NULL);
		CHECK_OK(moe_engine_wait(e));
		graph_verify(&graph, 1);
		graph_free(&graph);
		CHECK_OK(moe_engine_close(e));
	}
}

/* A task of the graph codelet that names these tensors. */
static enum moe_status submit(struct moe_engine *e, const struct moe_access *access, int n)
{
	static struct graph_task task;
	static struct graph g = { .n_tasks = 1, .task = &task };
	struct graph_args args = { &g, 0 };
	struct moe_task_desc d = { .codelet = &moe_cl_graph,
				   .args = &args,
				   .args_size = sizeof args,
				   .access = access,
				   .n_access = n,
				   .tag = { .part = -1 } };
	enum moe_status st = moe_submit_begin(e);

	if (st != MOE_OK)
		return st;
	st = moe_submit(e, &d);
	moe_submit_end(e);
	return st;
}

CASE(uninitialised)
{
	struct moe_tensor *t;
	struct moe_access a;

	CHECK_OK(moe_tensor_create(e, "fresh", 8, 0, &t));
	a = (struct moe_access){ t, MOE_R };
	CHECK_ERROR(submit(e, &a, 1), MOE_ERR_STATE, "fresh");
	a.mode = MOE_RW;
	CHECK_ERROR(submit(e, &a, 1), MOE_ERR_STATE, "nothing has written");
	a.mode = MOE_W;
	CHECK_OK(submit(e, &a, 1));
	a.mode = MOE_R;
	CHECK_OK(submit(e, &a, 1));
	moe_tensor_destroy(t);
}

CASE(alias)
{
	static const enum moe_mode modes[] = { MOE_R, MOE_W, MOE_RW };
	struct moe_tensor *t;

	CHECK_OK(moe_tensor_create(e, "twice", 8, 0, &t));
	moe_tensor_set_initialised(t);
	for (int i = 0; i < 9; i++) {
		struct moe_access a[2] = { { t, modes[i % 3] }, { t, modes[i / 3] } };

		CHECK_ERROR(submit(e, a, 2), MOE_ERR_ARG, "twice");
	}
	moe_tensor_destroy(t);
}

CASE(bad_access)
{
	struct moe_tensor *t[MOE_MAX_TASK_HANDLES + 1];
	struct moe_access a[MOE_MAX_TASK_HANDLES + 1] = { { NULL, MOE_R } };
	int n = MOE_MAX_TASK_HANDLES;

	CHECK_ERROR(submit(e, a, 1), MOE_ERR_ARG, "tensor 0 is NULL");
	CHECK_ERROR(submit(e, NULL, 1), MOE_ERR_ARG, "NULL");
	for (int i = 0; i <= n; i++) {
		CHECK_OK(moe_tensor_create(e, "many", 8, -1, &t[i]));
		a[i] = (struct moe_access){ t[i], MOE_W };
	}
	CHECK_ERROR(submit(e, a, n + 1), MOE_ERR_ARG, "names 65 tensors; at most 64");
	CHECK_ERROR(submit(e, a, -1), MOE_ERR_ARG, "names -1");
	CHECK_OK(submit(e, a, n)); /* the limit itself runs */
	a[3].mode = (enum moe_mode)0;
	CHECK_ERROR(submit(e, a, 4), MOE_ERR_ARG, "mode 0");
	a[3].mode = (enum moe_mode)4;
	CHECK_ERROR(submit(e, a, 4), MOE_ERR_ARG, "mode 4");
	CHECK_ERROR(moe_tensor_create(e, "elsewhere", 8, 2, &t[n]), MOE_ERR_ARG, "part 2 of 2");
	moe_tensor_destroy(a[n].tensor);
	for (int i = 0; i < n; i++)
		moe_tensor_destroy(t[i]);
}

CASE(bad_description)
{
	struct moe_task_desc d = { .tag = { .part = -1 } };

	CHECK_OK(moe_submit_begin(e));
	CHECK_ERROR(moe_submit(e, &d), MOE_ERR_ARG, "codelet");
	d.codelet = &moe_cl_graph;
	d.args_size = 8;
	CHECK_ERROR(moe_submit(e, &d), MOE_ERR_ARG, "args");
	d.args_size = 0;
	d.tag.part = 2;
	CHECK_ERROR(moe_submit(e, &d), MOE_ERR_ARG, "part 2 of 2");
	moe_submit_end(e);
}

CASE(outside_of_begin)
{
	struct moe_task_desc d = { .codelet = &moe_cl_graph, .tag = { .part = -1 } };
	struct moe_tensor *t;
	struct moe_engine_info info = { .struct_size = sizeof info };

	CHECK_ERROR(moe_submit(e, &d), MOE_ERR_STATE, "moe_submit_begin");
	CHECK_OK(moe_submit_begin(e));
	CHECK_ERROR(moe_submit_begin(e), MOE_ERR_STATE, "this thread is submitting");
	CHECK_ERROR(moe_tensor_create(e, "inside", 8, -1, &t), MOE_ERR_STATE, "this thread");
	CHECK_ERROR(moe_engine_get_info(e, &info), MOE_ERR_STATE, "this thread");
	CHECK_ERROR(moe_engine_observe(e, NULL), MOE_ERR_STATE, "this thread");
	CHECK_ERROR(moe_engine_reserve_scratch(e, 1 << 20), MOE_ERR_STATE, "this thread");
	moe_submit_end(e);
}

CASE(priority_range)
{
	static const int priorities[] = { INT32_MIN, -100000, 0, 100000, INT32_MAX };
	struct graph g;

	graph_make(&g, 4, 5, 0);
	graph_register(&g, e);
	for (int i = 0; i < 5; i++)
		g.task[i].priority = priorities[i];
	graph_submit(&g, e, NULL);
	CHECK_OK(moe_engine_wait(e));
	graph_verify(&g, 1);
	graph_free(&g);
}

/* ---- from inside a task ---- */

struct inside {
	struct moe_engine *engine;
	struct moe_tensor *tensor;
	struct moe_ticket *ticket;
	struct moe_block *block;
	struct block_data *data;
};

static void inside_run(const void *args, struct moe_worker *worker)
{
	const struct inside *in = *(const struct inside *const *)args;
	struct moe_engine *e = in->engine, *f;
	struct moe_access a = { in->tensor, MOE_R };
	struct moe_engine_params p = { .struct_size = sizeof p };

	(void)worker;
	CHECK_ERROR(submit(e, &a, 1), MOE_ERR_STATE, "in a task");
	CHECK_ERROR(moe_engine_wait(e), MOE_ERR_STATE, "in a task");
	CHECK_ERROR(moe_ticket_wait(in->ticket), MOE_ERR_STATE, "in a task");
	CHECK_ERROR(moe_engine_close(e), MOE_ERR_STATE, "in a task");
	CHECK_ERROR(moe_engine_open(&p, &f), MOE_ERR_STATE, "in a task");
	CHECK_ERROR(block_forward(in->block, in->data, false, in->data->out), MOE_ERR_STATE,
		    "in a task");
	moe_tensor_destroy(in->tensor); /* nothing happens */
	moe_block_destroy(in->block);
	moe_ticket_drain(in->ticket);
}

static MOE_CODELET(inside, inside_run, graph_cost);

CASE(inside_task)
{
	struct block_case c = { .E = 2, .k = 1, .H = 8, .I = 8, .T = 4 };
	struct block_data data;
	struct inside in = { .engine = e, .data = &data }, *pointer = &in;
	struct moe_task_desc d = { .codelet = &moe_cl_inside,
				   .args = &pointer,
				   .args_size = sizeof pointer,
				   .tag = { .part = -1 } };

	block_data_make(&data, &c);
	in.block = block_make(e, &c, &data, NULL);
	CHECK_OK(moe_tensor_create(e, "t", 8, -1, &in.tensor));
	moe_tensor_set_initialised(in.tensor);
	CHECK_OK(moe_ticket_create(e, &in.ticket));
	d.ticket = in.ticket;
	CHECK_OK(moe_submit_begin(e));
	CHECK_OK(moe_submit(e, &d));
	moe_submit_end(e);
	CHECK_OK(moe_ticket_wait(in.ticket));
	CHECK_OK(block_forward(in.block, &data, false, data.out)); /* still there */
	moe_ticket_destroy(in.ticket);
	moe_tensor_destroy(in.tensor);
	moe_block_destroy(in.block);
	block_data_free(&data);
}

/* ---- the end of things ---- */

CASE(close_with_tensors)
{
	struct moe_tensor *t;

	CHECK_OK(moe_tensor_create(e, "left", 8, -1, &t));
	CHECK_ERROR(moe_engine_close(e), MOE_ERR_STATE, "1 tensors are still registered");
	CHECK_OK(submit(e, &(struct moe_access){ t, MOE_W }, 1)); /* alive */
	CHECK_OK(moe_engine_wait(e));
	moe_tensor_destroy(t);
	moe_tensor_destroy(NULL);
}

CASE(close_while_held)
{
	CHECK_OK(moe_engine_hold(e));
	CHECK_OK(submit(e, NULL, 0));
	CHECK_OK(moe_engine_close(e));
}

CASE(close_while_asleep)
{
	for (int i = 0; i < 300 * SLOW && !info_of(e).pauses; i++)
		usleep(10000);
	CHECK(info_of(e).pauses == 1);
	CHECK_OK(moe_engine_close(e));
}

CASE(close_with_pending_tasks)
{
	struct graph g;

	graph_make(&g, 4, 500, 2);
	g.spin = 10000;
	graph_register(&g, e);
	graph_submit(&g, e, NULL);
	CHECK_ERROR(moe_engine_close(e), MOE_ERR_STATE, "4 tensors");
	for (int i = 0; i < g.n_tensors; i++)
		moe_tensor_destroy(g.tensor[i]);
	CHECK_OK(moe_engine_close(e));
	graph_verify(&g, 1);
	g.n_tensors = 0;
	graph_free(&g);
}

CASE(after_close)
{
	struct moe_engine_info info = { .struct_size = sizeof info };
	struct block_case c = { .E = 2, .k = 1, .H = 8, .I = 8 };
	struct moe_block_params p = block_params_of(&c);
	struct moe_tensor *t;
	struct moe_block *b;

	CHECK_OK(moe_engine_close(e));
	CHECK_ERROR(moe_engine_close(e), MOE_ERR_ARG, "not open");
	CHECK_ERROR(moe_engine_get_info(e, &info), MOE_ERR_ARG, "not open");
	CHECK_ERROR(moe_engine_wait(e), MOE_ERR_ARG, "not open");
	CHECK_ERROR(moe_engine_hold(e), MOE_ERR_ARG, "not open");
	CHECK_ERROR(moe_tensor_create(e, "late", 8, -1, &t), MOE_ERR_ARG, "not open");
	CHECK_ERROR(moe_submit_begin(e), MOE_ERR_ARG, "not open");
	CHECK_ERROR(moe_block_create(e, &p, &b), MOE_ERR_ARG, "not open");
	CHECK_ERROR(moe_block_create(NULL, &p, &b), MOE_ERR_ARG, "NULL");
}

CASE(destroy_pending)
{
	struct graph g;

	for (int held = 0; held < 2; held++) {
		graph_make(&g, 4, 500, 2);
		g.spin = 5000;
		graph_register(&g, e);
		if (held)
			CHECK_OK(moe_engine_hold(e));
		graph_submit(&g, e, NULL);
		for (int i = 0; i < g.n_tensors; i++)
			moe_tensor_destroy(g.tensor[i]); /* waits for its tasks */
		if (held)
			CHECK_OK(moe_engine_release(e));
		CHECK_OK(moe_engine_wait(e));
		graph_verify(&g, 1);
		g.n_tensors = 0;
		graph_free(&g);
	}
}

CASE(destroy_block_while_held)
{
	struct block_case c = { .E = 4, .k = 2, .H = 16, .I = 8, .r = 2, .T = 8, .router = true };
	struct block_data d;
	struct moe_block *b;
	struct moe_array x, o;

	block_data_make(&d, &c);
	b = block_make(e, &c, &d, NULL);
	x = matrix_of(d.x, MOE_F32, c.T, c.H);
	o = matrix_of(d.out, MOE_F32, c.T, c.H);
	CHECK_OK(moe_engine_hold(e));
	/* what waits is refused before it has submitted anything */
	CHECK_ERROR(moe_block_forward(b, &x, NULL, NULL, 1, &o), MOE_ERR_STATE, "held");
	CHECK(moe_engine_outstanding(e) == 0);
	CHECK_OK(moe_block_forward_async(b, &x, NULL, NULL, 1, &o));
	CHECK_ERROR(moe_block_wait(b), MOE_ERR_STATE, "held");
	CHECK_ERROR(moe_block_backward(b, &x, &o, NULL), MOE_ERR_STATE, "held");
	moe_block_destroy(b);
	CHECK_OK(moe_engine_release(e));
	block_data_free(&d);
}

CASE(limits_in_the_environment)
{
	struct graph g;

	/* StarPU's throttle would make a held submission wait for ever */
	CHECK_OK(moe_engine_close(e));
	setenv("STARPU_LIMIT_MAX_SUBMITTED_TASKS", "10", 1);
	setenv("STARPU_LIMIT_MIN_SUBMITTED_TASKS", "5", 1);
	setenv("STARPU_LIMIT_CPU_MEM", "1", 1);
	e = open_with(2, 2, NULL);
	CHECK(!strcmp(getenv("STARPU_LIMIT_MAX_SUBMITTED_TASKS"), "10"));
	graph_make(&g, 4, 200, 2);
	graph_register(&g, e);
	CHECK_OK(moe_engine_hold(e));
	graph_submit(&g, e, NULL);
	CHECK_OK(moe_engine_release(e));
	CHECK_OK(moe_engine_wait(e));
	graph_verify(&g, 1);
	graph_free(&g);
	CHECK_OK(moe_engine_close(e));
}

CASE(no_workers_in_the_environment)
{
	struct moe_engine *f;
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = 2 };

	CHECK_OK(moe_engine_close(e));
	setenv("STARPU_NCPU", "0", 1);
	CHECK_OK(moe_engine_open(&p, &f));
	CHECK_OK(moe_engine_close(f));
	/* more than 2 cores are then wanted: StarPU starts fewer workers than asked for */
	setenv("STARPU_RESERVE_NCPU", "1", 1);
	p.workers = 4;
	if (moe_engine_open(&p, &f) == MOE_OK)
		CHECK_OK(moe_engine_close(f));
	else
		CHECK(strstr(moe_last_error(), "workers") != NULL);
}

CASE(somebody_elses_starpu)
{
	struct moe_engine *f;
	struct moe_engine_params p = { .struct_size = sizeof p };

	CHECK_OK(moe_engine_close(e));
	CHECK(starpu_init(NULL) == 0);
	CHECK_ERROR(moe_engine_open(&p, &f), MOE_ERR_CONFIG, "somebody else");
	starpu_shutdown();
	CHECK_OK(moe_engine_open(&p, &f));
	CHECK_OK(moe_engine_close(f));
}

CASE(observer_while_busy)
{
	struct moe_observer o = { 0 };

	CHECK_OK(moe_engine_hold(e));
	CHECK_OK(submit(e, NULL, 0));
	CHECK_ERROR(moe_engine_observe(e, &o), MOE_ERR_BUSY, "outstanding");
	CHECK_OK(moe_engine_release(e));
	CHECK_OK(moe_engine_wait(e));
	CHECK_OK(moe_engine_observe(e, &o));
}

static const struct guard guards[] = {
	{ "read of what nothing wrote", uninitialised },
	{ "one tensor twice in a task", alias },
	{ "NULL tensors, too many, wrong modes", bad_access },
	{ "codelet, args, part", bad_description },
	{ "outside of begin and end, or begun twice", outside_of_begin },
	{ "priorities out of range", priority_range },
	{ "submit, wait, close, destroy in a task", inside_task },
	{ "close with tensors left", close_with_tensors },
	{ "close while held", close_while_held },
	{ "close while asleep", close_while_asleep },
	{ "close with tasks pending", close_with_pending_tasks },
	{ "use after close", after_close },
	{ "destroy tensors with tasks pending", destroy_pending },
	{ "destroy a block while held", destroy_block_while_held },
	{ "StarPU's limits in the environment", limits_in_the_environment },
	{ "StarPU's worker counts in the environment", no_workers_in_the_environment },
	{ "StarPU started by somebody else", somebody_elses_starpu },
	{ "observer while busy", observer_while_busy },
};

/* ---- arguments of tasks ---- */

/* Each kind that takes arguments, with none set: no layer, no rows, no place for a result. */
static void refuse_empty_arguments(const struct moe_context *c)
{
	const struct moe_attn_args attn = { 0 };
	const struct moe_head_args head = { 0 };
	const struct moe_loss_args loss = { 0 };
	const struct moe_copy_args copy = { 0 };
	const struct moe_token_args token = { 0 };
	const struct moe_expert_args expert = { 0 };
	const struct moe_update_args update = { 0 };
	const struct moe_grad_total_args total = { 0 };
	const struct moe_exchange_args exchange = { 0 };
	const struct moe_repack_args repack = { 0 };
	const struct moe_dense_grad_args dense = { 0 };
	const struct moe_vector_grad_args vector = { 0 };
	const struct moe_embed_grad_args embed = { 0 };
	const struct moe_renew_args renew = { 0 };
	const struct moe_tensor_list none = { 0 };
	struct moe_tensor *const lora[MOE_ATTN_LINEARS] = { NULL };
	const enum moe_status got[] = {
		moe_task_embed(c, &attn, 0, NULL, NULL, NULL),
		moe_task_qkv(c, &attn, 0, NULL, lora, NULL, NULL),
		moe_task_attention(c, &attn, 0, 0, none, NULL, NULL),
		moe_task_attn_out(c, &attn, 0, none, NULL, NULL, NULL, NULL),
		moe_task_final_norm(c, &head, 0, none, NULL, NULL, NULL),
		moe_task_logits(c, &head, 0, NULL, NULL, NULL),
		moe_task_loss(c, &head, 0, none, NULL),
		moe_task_loss_total(c, &loss, none),
		moe_task_logits_bwd(c, &head, 0, NULL, NULL),
		moe_task_loss_bwd(c, &head, 0, none, NULL, NULL, none),
		moe_task_attn_out_bwd(c, &attn, 0, NULL, NULL, NULL, NULL, NULL),
		moe_task_attention_bwd_q(c, &attn, 0, 0, NULL, NULL, NULL, NULL),
		moe_task_attention_bwd_kv(c, &attn, 0, 0, none, NULL, NULL, NULL),
		moe_task_qkv_bwd(c, &attn, 0, none, NULL, lora, NULL, NULL, NULL, NULL),
		moe_task_linear_grad(c, &attn, NULL, NULL, NULL, NULL, NULL),
		moe_task_load(c, &copy, 0, NULL, NULL, NULL),
		moe_task_store(c, &copy, 0, NULL, NULL),
		moe_task_route(c, &token, 0, NULL, NULL, NULL, NULL),
		moe_task_plan(c, &token, NULL, 0, NULL, NULL),
		moe_task_gather(c, &expert, NULL, NULL, NULL, NULL),
		moe_task_gate_up(c, &expert, 0, NULL, NULL, NULL, NULL, NULL, NULL),
		moe_task_down(c, &expert, 0, NULL, 0, NULL, NULL, NULL),
		moe_task_combine_part(c, &token, 0, NULL, NULL, NULL, NULL),
		moe_task_combine(c, &token, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
		moe_task_ffn_up(c, &token, 0, NULL, NULL, NULL),
		moe_task_ffn_down(c, &token, 0, NULL, NULL, NULL, NULL, NULL),
		moe_task_repack_bwd(c, &expert, 1, NULL, NULL, NULL),
		moe_task_scatter(c, &expert, NULL, NULL, NULL, NULL),
		moe_task_down_bwd(c, &expert, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
		moe_task_gate_up_bwd(c, &expert, 0, NULL, 0, NULL, NULL, NULL),
		moe_task_lora_grad(c, &expert, NULL, 0, NULL, NULL, NULL, NULL),
		moe_task_weight_grad(c, &expert, NULL, 0, NULL, NULL, NULL),
		moe_task_route_bwd(c, &token, 0, NULL, NULL, NULL, NULL),
		moe_task_combine_bwd(c, &token, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
		moe_task_router_grad(c, &token, NULL, NULL, NULL, NULL, NULL),
		moe_task_router_lora_grad(c, NULL, NULL, NULL, NULL),
		moe_task_router_fold(c, NULL, NULL),
		moe_task_ffn_bwd(c, &token, 0, NULL, NULL, NULL, NULL, NULL, NULL),
		moe_task_ffn_lora_grad(c, &token, NULL, NULL, NULL, NULL, NULL),
		moe_task_grad_norm(c, &update, 0, 0, NULL, 0, NULL),
		moe_task_grad_total(c, &total, NULL, NULL),
		moe_task_update(c, &update, 0, 0, NULL, 0, NULL, NULL, 0),
		moe_task_exchange(c, &exchange, NULL, 0, NULL, 0),
		moe_task_rescale(c, &update, 0, 0, NULL, 0),
		moe_task_repack(c, &repack, NULL, NULL),
		moe_task_requantise(c, &repack, NULL, NULL, 0),
		moe_task_dense_grad(c, &dense, &none, 0, NULL),
		moe_task_vector_grad(c, &vector, &none, 0, NULL),
		moe_task_embed_grad(c, &embed, &none, NULL),
		moe_task_renew(c, &renew, none, NULL),
	};

	for (size_t i = 0; i < MOE_COUNT(got); i++)
		if (!CHECK(got[i] == MOE_ERR_ARG))
			printf("  call %zu: %s\n", i, moe_status_text(got[i]));
}

/* What one kind of a pair refuses, the other does too; counts of 0 as well as NULL. */
static void refuse_halves(const struct moe_context *c)
{
	const struct moe_experts layer = { .P = 1, .G = 2 };
	struct moe_experts_state state = { 0 };
	const struct moe_tensor_list none = { 0 };
	struct moe_expert_args expert = { .layer = &layer, .state = &state };
	struct moe_token_args token = { .layer = &layer, .t1 = 1 };
	const struct moe_decoder_layer attention = { 0 };
	struct moe_attn_args attn = { .layer = &attention, .t1 = 1, .h1 = 1, .batch.T = 1 };
	float row;
	struct moe_copy_args copy = { .rows = &row, .t1 = 1 };

	CHECK_ERROR(moe_task_lora_grad(c, &expert, NULL, 0, NULL, NULL, NULL, NULL), MOE_ERR_ARG, "0 groups");
	expert.groups = 3;
	CHECK_ERROR(moe_task_lora_grad(c, &expert, NULL, 0, NULL, NULL, NULL, NULL), MOE_ERR_ARG, "3 groups");
	CHECK_ERROR(moe_task_ffn_up(c, &token, 0, NULL, NULL, NULL), MOE_ERR_ARG, "ffn_up");
	CHECK_ERROR(moe_task_ffn_bwd(c, &token, 0, NULL, NULL, NULL, NULL, NULL, NULL), MOE_ERR_ARG, "ffn_bwd");
	CHECK_ERROR(moe_task_attention(c, &attn, 0, 0, none, NULL, NULL), MOE_ERR_ARG, "tokens 0..1");
	CHECK_ERROR(moe_task_attention_bwd_kv(c, &attn, 0, 0, none, NULL, NULL, NULL), MOE_ERR_ARG, "tokens 0..1");
	CHECK_ERROR(moe_task_load(c, &copy, 0, NULL, NULL, NULL), MOE_ERR_ARG, "of 0 numbers");
	CHECK_ERROR(moe_task_store(c, &copy, 0, NULL, NULL), MOE_ERR_ARG, "of 0 numbers");
}

static void task_arguments(void)
{
	struct moe_context c = { .layer = -1 };

	CHECK_OK(moe_engine_open_dry(1, 1, &c.engine));
	refuse_empty_arguments(&c);
	refuse_halves(&c);
	CHECK_OK(moe_engine_close(c.engine));
}

static void all(void)
{
	for (size_t i = 0; i < MOE_COUNT(guards); i++)
		in_child(guards[i].name, guard_child, &guards[i]);
}

const struct moe_test moe_suite_tests[] = {
	{ "every guard", all },
	{ "arguments of tasks", task_arguments },
	{ NULL, NULL },
};
