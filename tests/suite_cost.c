/* SPDX-License-Identifier: Apache-2.0 */
/* Predictions, and what is decided by them: groups, slices, the backward's weights. */
#include "tests/machine_check.h"

#include "codelets/gate_up.h"
#include "codelets/join.h"
#include "engine/codelet.h"
#include "graphs/backward_mode.h"

#include <math.h>

const char moe_suite_name[] = "cost";

static bool near(double a, double b)
{
	return fabs(a - b) <= 1e-9 * fmax(fabs(a), fabs(b));
}

/* ---- predictions ---- */

static void gemms(void)
{
	struct moe_machine m = zen4(), one = m;
	double n = 1536, k = 2048, us = 0, last = 0;

	one.workers = 1;
	/* few rows: the bytes; both workers share 50 GB/s */
	CHECK(near(moe_cost_gemm_us(&one, MOE_GEMM_FORWARD, 1, n, k, 2), 2 * n * k / 30e3));
	CHECK(near(moe_cost_gemm_us(&m, MOE_GEMM_FORWARD, 1, n, k, 2), 2 * n * k / 25e3));
	/* many: the flops, the same for any number of workers; past the last point its rate */
	CHECK(near(moe_cost_gemm_us(&one, MOE_GEMM_FORWARD, 256, n, k, 2),
		   moe_cost_gemm_us(&m, MOE_GEMM_FORWARD, 256, n, k, 2)));
	CHECK(near(moe_cost_gemm_us(&m, MOE_GEMM_FORWARD, 1024, n, k, 2),
		   4 * moe_cost_gemm_us(&m, MOE_GEMM_FORWARD, 256, n, k, 2)));
	CHECK(moe_cost_gemm_us(&m, MOE_GEMM_BACKWARD, 64, n, k, 2) >
	      moe_cost_gemm_us(&m, MOE_GEMM_FORWARD, 64, n, k, 2));
	CHECK(moe_cost_gemm_us(&m, MOE_GEMM_FORWARD, 0, n, k, 2) == 0);
	for (int rows = 1; rows <= 600; rows++, last = us) {
		us = moe_cost_gemm_us(&m, MOE_GEMM_BACKWARD, rows, n, k, 2);
		CHECK(us >= last && isfinite(us));
	}
	/* between points: their geometric mean halfway */
	m.rates.gemm_gflops[MOE_GEMM_FORWARD][2] = 10;
	m.rates.gemm_gflops[MOE_GEMM_FORWARD][3] = 40;
	CHECK(near(moe_cost_rate(&m, MOE_GEMM_FORWARD, sqrt(32)), 20));
	CHECK(near(moe_cost_rate(&m, MOE_GEMM_FORWARD, 8), 40));
	CHECK(near(moe_cost_rate(&m, MOE_GEMM_FORWARD, 0.1),
		   m.rates.gemm_gflops[MOE_GEMM_FORWARD][0]));
}

static void bytes_and_cycles(void)
{
	struct moe_machine m = zen4(), one = m;

	one.workers = 1;
	CHECK(near(moe_cost_stream_us(&one, 15e9, 15e9), 1e6)); /* that is a copy */
	CHECK(near(moe_cost_stream_us(&one, 30e9, 0), 1e6));
	CHECK(near(moe_cost_stream_us(&m, 30e9, 0), 1e6 * 30 / 25));
	CHECK(moe_cost_stream_us(&m, 0, 0) == 0);
	one.rates.pack_gbps = 5;
	CHECK(near(moe_cost_pack_us(&one, 5e9), 1e6));
	one.rates.pack_gbps = 500; /* never faster than copying */
	CHECK(near(moe_cost_pack_us(&one, 15e9), 1e6));
	CHECK(near(moe_cost_cycles_us(&m, 3.66e9), 1e6));
	CHECK(moe_cost_task_us(&one) == m.task_us && moe_cost_task_us(&m) == m.task_all_us);
	one.copy_gbps = 100; /* faster than it reads: writing still costs something */
	CHECK(moe_cost_stream_us(&one, 0, 1e9) > 0);
}

/* What StarPU's models get is what the functions say, and follows the machine. */
static void codelets(void)
{
	struct moe_weight gate[2] = { { .dtype = MOE_BF16, .n = 512, .k = 1024 },
				      { .dtype = MOE_BF16, .n = 512, .k = 1024 } };
	int group_first[] = { 0, 2 };
	int32_t offset[] = { 0, 3, 19 };
	struct moe_experts l = {
		.E = 2, .k = 1, .H = 1024, .I = 512, .P = 1, .G = 1, .group_first = group_first
	};
	struct moe_experts_state s = { .plan = { .T = 19, .offset = offset } };
	struct moe_expert_args a = { .layer = &l, .state = &s, .c1 = 2 };
	struct moe_machine m = zen4();
	double us, want;

	l.part[0].I = 512;
	l.part[0].gate = gate;
	CHECK_OK(moe_machine_set(&m));
	CHECK(moe_machine() != &m && moe_machine()->read_gbps == 30);
	want = m.task_all_us + moe_cost_gemm_us(&m, MOE_GEMM_FORWARD, 3, 1024, 1024, 2) +
	       moe_cost_gemm_us(&m, MOE_GEMM_FORWARD, 16, 1024, 1024, 2);
	us = moe_cl_gate_up.cost_us(&a);
	CHECK(near(us, want));
	CHECK(moe_cl_join.cost_us(NULL) == m.task_all_us);
	for (int i = 0; i < MOE_RATE_POINTS; i++)
		m.rates.gemm_gflops[MOE_GEMM_FORWARD][i] /= 100;
	CHECK_OK(moe_machine_set(&m));
	CHECK(moe_cl_gate_up.cost_us(&a) > 10 * us);
	offset[1] = offset[2] = 0; /* no rows: the task alone */
	CHECK(moe_cl_gate_up.cost_us(&a) == m.task_all_us);
}

/* ---- groups and slices ---- */

static struct moe_load qwen3(int T, int workers)
{
	return (struct moe_load){ .E = 128,
				  .k = 8,
				  .H = 2048,
				  .I = 768,
				  .P = 1,
				  .T = T,
				  .workers = workers,
				  .weight_bytes = 2 };
}

static void expected_rows(void)
{
	struct moe_load l = qwen3(1, 2);

	CHECK(near(moe_load_active(&l), 8) && near(moe_load_rows(&l), 1));
	l = qwen3(4096, 2);
	CHECK(fabs(moe_load_active(&l) - 128) < 1e-6 && fabs(moe_load_rows(&l) - 256) < 1e-6);
	l.k = 200; /* the caller's ids may repeat */
	CHECK(near(moe_load_active(&l), 128));
	l.T = 0;
	CHECK(isfinite(moe_load_rows(&l)));
}

/* 4 experts at 8 rows and below, one from about 32: what was measured to pay. */
static void groups(void)
{
	struct moe_machine m = zen4(), slow = with_backward(m, 1e-3);
	struct moe_load l = qwen3(64, 2);
	int size = moe_group_size_choose(&l, &m);

	CHECK(size >= 3 && size <= 5);
	l = qwen3(128, 2);
	CHECK(moe_group_size_choose(&l, &m) >= 3);
	l = qwen3(512, 2);
	CHECK(moe_group_size_choose(&l, &m) == 1);
	l = qwen3(2048, 2);
	CHECK(moe_group_size_choose(&l, &m) == 1);
	/* another machine, another choice */
	l = qwen3(64, 2);
	CHECK(moe_group_size_choose(&l, &slow) == 1);
	/* every group's mean task is at least 0.5 ms where the choice was free */
	for (l.T = 8; l.T <= 4096; l.T *= 2) {
		size = moe_group_size_choose(&l, &m);
		CHECK(size * moe_load_expert_us(&l, &m) >= MOE_TASK_LEAST_US || size == 16);
		CHECK(size == 1 || size * moe_load_expert_us(&l, &m) <= 1.01 * MOE_TASK_BETTER_US);
	}
	/* many workers: they all get some, 4 each */
	l = qwen3(64, 64);
	CHECK(moe_group_size_choose(&l, &m) == 1);
	l = qwen3(8, 1);
	CHECK(moe_group_size_choose(&l, &m) <= 128 / 4);
	l.E = 3;
	l.k = 1;
	CHECK(moe_group_size_choose(&l, &m) == 1);
}

/* lora_grad: groups together make a task worth its overhead, as far as workers and handles allow. */
static void lora_groups(void)
{
	struct moe_machine m = zen4();
	struct moe_load l = qwen3(512, 2);

	l.lora_rows = 48;
	CHECK(moe_cut_for(&l, &m, 128, 0, 0).lora_groups >= 3);
	CHECK(moe_cut_for(&l, &m, 128, 0, 0).lora_groups <= 16);
	CHECK(moe_cut_for(&l, &m, 128, 0, 0).last_groups == 5);
	l.T = 16384; /* long enough alone */
	CHECK(moe_cut_for(&l, &m, 128, 0, 0).lora_groups == 1);
	l.T = 1;
	CHECK(moe_cut_for(&l, &m, 128, 0, 0).lora_groups == 16); /* 8 tasks */
	l.workers = 64;
	CHECK(moe_cut_for(&l, &m, 128, 0, 0).lora_groups == 1);
	l.workers = 1;
	l.P = 8;
	l.I = 256 * 16;
	CHECK(moe_cut_for(&l, &m, 128, 2, 0).lora_groups == 3); /* 17 tensors a group */
	l.lora_rows = 0;
	CHECK(moe_cut_for(&l, &m, 128, 0, 0).lora_groups == 1);
	CHECK(moe_cut_for(&l, &m, 2, 0, 0).last_groups <= 2);
}

static void slices(void)
{
	struct moe_machine m = zen4();
	struct moe_load l = qwen3(2048, 2);
	struct moe_cut c = moe_cut_for(&l, &m, 128, 0, 0);

	CHECK(c.slices_i == 1 && c.slices_h == 1 && c.combine_blocks >= 1);
	/* few experts: 8 tasks per worker, as far as the chunks go */
	l.E = 4;
	l.k = 2;
	c = moe_cut_for(&l, &m, 4, 0, 0);
	CHECK(c.slices_i == 3 && c.slices_h == 4); /* I has 3 chunks, 16 tasks over 4 groups */
	/* never below half a millisecond */
	l.T = 16;
	c = moe_cut_for(&l, &m, 4, 0, 0);
	CHECK(c.slices_i == 1 && c.slices_h == 1);
	/* what is asked for is taken, within the chunks and the handles of a task */
	c = moe_cut_for(&l, &m, 4, 2, 5);
	CHECK(c.slices_i == 2 && c.slices_h == 5);
	c = moe_cut_for(&l, &m, 4, 99, 99);
	CHECK(c.slices_i == 3 && c.slices_h == 8);
	l.I = 256 * 1000;
	l.P = 8;
	c = moe_cut_for(&l, &m, 4, 999, 1);
	CHECK(c.slices_i * 8 + 8 <= 64);
	/* a machine that is slow enough slices what the fast one does not */
	l = qwen3(16, 2);
	l.E = 4;
	m = with_backward(m, 1e-3);
	CHECK(moe_cut_for(&l, &m, 4, 0, 0).slices_i > 1);
}

/* ---- the backward's weights ---- */

static struct moe_backward_choice choose(const struct moe_machine *m, int T, int ring,
					 int64_t memory)
{
	struct moe_backward_params p = {
		.load = qwen3(T, 2), .layers = 48, .ring = ring, .memory = memory
	};
	struct moe_backward_choice c;

	moe_backward_choose(&p, m, &c);
	return c;
}

static void backward_modes(void)
{
	struct moe_machine m = with_backward(zen4(), 0.93), slow = with_backward(m, 0.3);
	struct moe_machine slower = with_backward(m, 0.85);
	int64_t layer = 3ll * 128 * 768 * 2048 * 2;
	struct moe_backward_choice c = choose(&m, 512, 2, layer * 2);

	/* 7 % of the GEMMs are less than a repack */
	CHECK(c.mode == MOE_BACKWARD_DIRECT && c.cost[MOE_BACKWARD_DIRECT].bytes == 0);
	CHECK(c.cost[MOE_BACKWARD_SHARED].bytes == 2 * layer);
	CHECK(c.cost[MOE_BACKWARD_RESIDENT].bytes == 48 * layer);
	CHECK(!c.cost[MOE_BACKWARD_RESIDENT].fits && c.cost[MOE_BACKWARD_SHARED].fits);
	/* twice the weights must gain more than that */
	CHECK(choose(&m, 512, 2, -1).mode == MOE_BACKWARD_DIRECT);
	CHECK(choose(&slower, 512, 2, -1).mode == MOE_BACKWARD_RESIDENT);
	CHECK(choose(&m, 512, 2, 0).mode == MOE_BACKWARD_DIRECT);
	/* a machine whose two-way backward is slow: the ring, or a copy where it fits */
	CHECK(choose(&slow, 2048, 2, layer * 2).mode == MOE_BACKWARD_SHARED);
	CHECK(choose(&slow, 2048, 2, layer * 48).mode == MOE_BACKWARD_RESIDENT);
	CHECK(choose(&slow, 2048, 2, layer).mode == MOE_BACKWARD_DIRECT);
	/* few rows: bytes decide, every mode reads the same, so the least memory */
	CHECK(choose(&slow, 8, 2, -1).mode == MOE_BACKWARD_DIRECT ||
	      choose(&slow, 8, 2, -1).mode == MOE_BACKWARD_RESIDENT);
	CHECK(choose(&m, 8, 2, -1).mode == MOE_BACKWARD_DIRECT);
	/* slow packing makes the ring useless */
	slow.rates.pack_gbps = 0.01;
	CHECK(choose(&slow, 2048, 2, layer * 2).mode == MOE_BACKWARD_DIRECT);
	/* one buffer hides nothing, as many as layers need one repack ever */
	CHECK(choose(&m, 512, 1, -1).cost[MOE_BACKWARD_SHARED].hidden_us == 0);
	CHECK(choose(&m, 512, 2, -1).cost[MOE_BACKWARD_SHARED].hidden_us > 0);
	CHECK(choose(&m, 512, 48, -1).cost[MOE_BACKWARD_SHARED].repack_us == 0);
	CHECK(choose(&m, 512, 0, -1).ring == 2);
	/* few rows: only the experts that are reached are repacked */
	CHECK(choose(&m, 8, 2, -1).cost[MOE_BACKWARD_SHARED].repack_us <
	      0.5 * choose(&m, 512, 2, -1).cost[MOE_BACKWARD_SHARED].repack_us);
}

static struct moe_backward_params one_layer(bool refilled, int layers, int64_t memory)
{
	return (struct moe_backward_params){
		.load = qwen3(512, 2), .layers = layers, .refilled = refilled, .memory = memory
	};
}

/* What is asked for, by a table that has transposed copies and by one that has not. */
static void selected(void)
{
	struct moe_machine m = with_backward(zen4(), 0.5);
	struct moe_backward_params p = one_layer(false, 48, -1), few = one_layer(false, 3, -1);
	struct moe_backward_params block = one_layer(true, 1, -1), none = one_layer(false, 48, 1 << 20);
	struct moe_backward_choice c;
	char text[32], lines[600];

	CHECK_OK(moe_kernels_select("c"));
	CHECK_OK(moe_backward_select(NULL, &p, &m, &c));
	CHECK(c.mode == MOE_BACKWARD_RESIDENT);
	CHECK_OK(moe_backward_select("auto", &none, &m, &c));
	CHECK(c.mode == MOE_BACKWARD_DIRECT);
	CHECK_OK(moe_backward_select("shared:3", &p, &m, &c));
	CHECK(c.mode == MOE_BACKWARD_SHARED && c.ring == 3);
	CHECK(!strcmp(moe_backward_text(&c, text, sizeof text), "shared:3"));
	/* a ring of all layers is a resident copy, but not in a block, which has one for any number */
	CHECK_OK(moe_backward_select("shared:3", &few, &m, &c));
	CHECK(c.mode == MOE_BACKWARD_RESIDENT);
	CHECK(!strcmp(moe_backward_text(&c, text, sizeof text), "resident"));
	CHECK_OK(moe_backward_select("shared:3", &block, &m, &c));
	CHECK(c.mode == MOE_BACKWARD_SHARED && c.ring == 1);
	CHECK(c.cost[MOE_BACKWARD_SHARED].repack_us > 0);
	CHECK_ERROR(moe_backward_select("resident", &none, &m, &c), MOE_ERR_NOFIT, "resident");
	CHECK_ERROR(moe_backward_select("shared:2", &none, &m, &c), MOE_ERR_NOFIT, "shared:2");
	CHECK_ERROR(moe_backward_select("twice", &p, &m, &c), MOE_ERR_CONFIG, "twice");
	CHECK_OK(moe_kernels_select("ref"));
	CHECK_OK(moe_backward_select(NULL, &p, &m, &c));
	CHECK(c.mode == MOE_BACKWARD_DIRECT);
	CHECK(strstr(moe_backward_explain(&c, lines, sizeof lines), "not with these kernels") != NULL);
	CHECK_OK(moe_backward_select("direct", &p, &m, &c));
	CHECK_ERROR(moe_backward_select("resident", &p, &m, &c), MOE_ERR_UNSUPPORTED, "ref");
}

static void explanation(void)
{
	struct moe_machine m = with_backward(zen4(), 0.93);
	struct moe_backward_choice c = choose(&m, 512, 3, 1 << 20);
	char text[600], small[10];
	const char *at = moe_backward_explain(&c, text, sizeof text);
	int lines = 0;

	CHECK(at == text && text[0] == '*');
	CHECK(strstr(text, "* direct") && strstr(text, "\n  shared:3") &&
	      strstr(text, "\n  resident"));
	CHECK(strstr(text, "repack") && strstr(text, "hidden") && strstr(text, "does not fit"));
	for (; *at; at++)
		lines += *at == '\n';
	CHECK(lines == 3);
	moe_backward_explain(&c, small, sizeof small);
	CHECK(strlen(small) < sizeof small);
}

static void mode_names(void)
{
	static const char *const bad[] = { "",		"shared:",    "shared:0",
					   "shared:-1", "shared:2x",  "share",
					   "direct:1",	"resident:2", "shared:99999",
					   "directly" };
	enum moe_backward_mode mode;
	int ring;

	CHECK_OK(moe_backward_mode_parse("direct", &mode, &ring));
	CHECK(mode == MOE_BACKWARD_DIRECT);
	CHECK_OK(moe_backward_mode_parse("shared:7", &mode, &ring));
	CHECK(mode == MOE_BACKWARD_SHARED && ring == 7);
	CHECK_OK(moe_backward_mode_parse("shared", &mode, &ring));
	CHECK(mode == MOE_BACKWARD_SHARED && ring == 2);
	CHECK_OK(moe_backward_mode_parse("resident", &mode, &ring));
	CHECK(mode == MOE_BACKWARD_RESIDENT);
	for (size_t i = 0; i < MOE_COUNT(bad); i++)
		CHECK_ERROR(moe_backward_mode_parse(bad[i], &mode, &ring), MOE_ERR_CONFIG, bad[i]);
}

const struct moe_test moe_suite_tests[] = {
	{ "GEMMs", gemms },
	{ "bytes and cycles", bytes_and_cycles },
	{ "cost_us of codelets", codelets },
	{ "expected rows", expected_rows },
	{ "experts per group", groups },
	{ "groups of a lora_grad", lora_groups },
	{ "slices", slices },
	{ "weights of the backward", backward_modes },
	{ "weights of the backward as asked for", selected },
	{ "the explanation", explanation },
	{ "names of the modes", mode_names },
	{ NULL, NULL },
};
