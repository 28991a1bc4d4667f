/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parts on fake machines (HWLOC_SYNTHETIC): which workers and which NUMA node a part gets, and that
 * its tasks and memory go there. Each machine is a child with its own folder for StarPU.
 */
#include "api/block.h"
#include "engine/internal.h"
#include "tests/block_check.h"
#include "tests/graph_check.h"

#include <sched.h>

const char moe_suite_name[] = "topology";

struct machine {
	const char *name, *synthetic;
	int nodes;
};

static const struct machine machines[] = {
	{ "two", "numa:2 core:2 pu:1", 2 },
	{ "four", "numa:4 core:1 pu:1", 4 },
	{ "eight", "package:2 numa:4 core:2 pu:1", 8 },
	{ "one", "core:4 pu:2", 1 },
};

static void enter_machine(const struct machine *m)
{
	use_starpu_home(m->name);
	setenv("HWLOC_SYNTHETIC", m->synthetic, 1);
	unsetenv("HWLOC_THISSYSTEM");
}

/* Tasks that ran on a worker outside of their part, as the observer sees it. */
static atomic_int seen_remote, seen_tasks;

static void executed(const struct moe_task_event *event, void *user)
{
	atomic_fetch_add(&seen_tasks, 1);
	if (event->tag.part >= 0 &&
	    !moe_engine_part_has_worker(user, event->tag.part, event->worker))
		atomic_fetch_add(&seen_remote, 1);
}

static void run_parts(struct moe_engine *e, int parts)
{
	struct moe_observer observer = { .executed = executed, .user = e };
	/* few: each hand-over between workers that share a processor takes a time slice */
	int tasks = moe_test_full() ? 100 : 20;
	struct graph g;

	seen_remote = seen_tasks = 0;
	CHECK_OK(moe_engine_wait(e));
	CHECK_OK(moe_engine_observe(e, &observer));
	graph_make(&g, 6, tasks, parts);
	graph_register(&g, e);
	graph_submit(&g, e, NULL);
	CHECK_OK(moe_engine_wait(e));
	graph_verify(&g, 1);
	graph_free(&g);
	CHECK(seen_tasks == tasks);
	CHECK_OK(moe_engine_observe(e, NULL));
}

/* Weights, LoRA and activations of each part are asked for on the part's node. */
static void check_memory(struct moe_engine *e)
{
	struct block_case c = { .E = 4, .k = 2, .H = 24, .I = 20, .r = 2, .T = 6, .router = true };
	struct block_data d;
	struct moe_block *b;

	block_data_make(&d, &c);
	b = block_make(e, &c, &d, NULL);
	if (!b)
		return;
	block_step(b, &d, 1);
	CHECK(b->layer.P == moe_engine_parts(e));
	for (int p = 0; p < b->layer.P; p++) {
		const struct moe_experts_part *part = &b->layer.part[p];
		int node = moe_engine_part_node(e, p);

		CHECK(moe_memory_node(e, part->gate[0].data) == node);
		if (part->I)
			CHECK(moe_memory_node(e, part->down[c.E - 1].data) == node);
		CHECK(moe_memory_node(e, part->gate_b.value) == node);
		CHECK(moe_memory_node(e, part->down_a.m) == node);
		CHECK(moe_memory_node(e, b->state.part[p].panel) == node);
		CHECK(moe_memory_bytes(e, "weights", p) > 0 || !part->I);
	}
	CHECK(moe_memory_node(e, b->stream[0].data) == -1); /* anywhere */
	CHECK(moe_memory_node(e, &d) == -1);
	moe_block_destroy(b);
	block_data_free(&d);
	CHECK(moe_memory_bytes(e, NULL, -1) == 0);
}

static void check_masks(struct moe_engine *e, int workers, int nodes)
{
	int P = moe_engine_parts(e), used_nodes = 0;
	unsigned all = 0, node_set = 0;

	for (int p = 0; p < P; p++) {
		int n = 0, node = moe_engine_part_node(e, p);

		for (int w = 0; w < STARPU_NMAXWORKERS; w++)
			if (moe_engine_part_has_worker(e, p, w)) {
				CHECK(w < workers);
				all |= 1u << w;
				n++;
			}
		CHECK(n > 0);
		CHECK(node >= 0 && node < nodes);
		used_nodes += !(node_set >> node & 1);
		node_set |= 1u << node;
	}
	CHECK(all == (1u << workers) - 1); /* no worker is left out */
	if (P <= nodes)
		CHECK(used_nodes == P); /* a node each */
	CHECK(!moe_engine_part_has_worker(e, P, 0) && !moe_engine_part_has_worker(e, -1, 0));
	CHECK(!moe_engine_part_has_worker(e, 0, -1) &&
	      !moe_engine_part_has_worker(e, 0, STARPU_NMAXWORKERS));
}

static void machine_child(const void *arg)
{
	static const int parts[] = { 0, 1, 2, 3, 8 };
	const struct machine *m = arg;

	enter_machine(m);
	for (int workers = 1; workers <= MOE_MIN(4, MOE_STARPU_MAX_CPUS); workers++)
		for (size_t i = 0; i < MOE_COUNT(parts); i++) {
			struct moe_engine *e = open_with(workers, parts[i], NULL);
			struct moe_engine_info info;

			if (!e)
				continue;
			info = info_of(e);
			CHECK(info.nodes == m->nodes && info.fake_topology &&
			      info.workers == workers);
			CHECK(parts[i] ? info.parts == parts[i]
				       : info.parts >= 1 && info.parts <= m->nodes);
			check_masks(e, workers, m->nodes);
			check_memory(e);
			if (parts[i] == 2 || parts[i] == 8 || moe_test_full())
				run_parts(e, info.parts);
			CHECK(seen_remote == 0 && info_of(e).remote_tasks == 0);
			CHECK_OK(moe_engine_close(e));
		}
}

static void fake_machines(void)
{
	for (size_t i = 0; i < MOE_COUNT(machines); i++)
		in_child(machines[i].name, machine_child, &machines[i]);
}

/* ---- part_specs ---- */

static const int w0[] = { 0 }, w01[] = { 0, 1 }, w123[] = { 1, 2, 3 }, w11[] = { 1, 1 },
		 w4[] = { 4 }, w_1[] = { -1 };

static enum moe_status open_specs(struct moe_part_spec a, struct moe_part_spec b,
				  struct moe_engine **e)
{
	struct moe_part_spec specs[2] = { a, b };
	struct moe_engine_params p = {
		.struct_size = sizeof p, .workers = 4, .parts = 2, .part_specs = specs
	};

	return moe_engine_open(&p, e);
}

static void specs_child(const void *arg)
{
	struct moe_part_spec few = { 1, 1, w0 }, many = { 0, 3, w123 }, both = { 1, 2, w01 };
	struct moe_engine_params p = { .struct_size = sizeof p, .part_specs = &few };
	struct moe_engine *e;

	(void)arg;
	enter_machine(&machines[0]);
#define BAD(spec, text)                                                                            \
	CHECK_ERROR(open_specs(many, (struct moe_part_spec)spec, &e), MOE_ERR_CONFIG, text);       \
	CHECK(e == NULL)
#define SPEC(...) { __VA_ARGS__ }
	BAD(SPEC(-1, 1, w0), "NUMA node -1; there are 2");
	BAD(SPEC(2, 1, w0), "NUMA node 2; there are 2");
	BAD(SPEC(0, 1, w4), "part 1 names worker 4; there are 4");
	BAD(SPEC(0, 1, w_1), "worker -1");
	BAD(SPEC(0, 0, w0), "part 1 has no workers");
	BAD(SPEC(0, -1, w0), "no workers");
	BAD(SPEC(0, 1, NULL), "no workers");
	BAD(SPEC(0, 2, w11), "worker 1 twice");
#undef BAD
	CHECK_ERROR(moe_engine_open(&p, &e), MOE_ERR_ARG, "part_specs needs parts");
	/* uneven; memory and tasks follow */
	CHECK_OK(open_specs(few, many, &e));
	CHECK(moe_engine_part_node(e, 0) == 1 && moe_engine_part_node(e, 1) == 0);
	for (int w = 0; w < 4; w++)
		CHECK(moe_engine_part_has_worker(e, 0, w) == (w == 0) &&
		      moe_engine_part_has_worker(e, 1, w) == (w > 0));
	check_memory(e);
	run_parts(e, 2);
	CHECK(seen_remote == 0 && info_of(e).remote_tasks == 0);
	CHECK_OK(moe_engine_close(e));
	/* parts may share a worker */
	CHECK_OK(open_specs(both, many, &e));
	run_parts(e, 2);
	CHECK(seen_remote == 0 && info_of(e).remote_tasks == 0);
	CHECK_OK(moe_engine_close(e));
}

static void part_specs(void)
{
	in_child("part_specs", specs_child, NULL);
}

/* ---- strict and soft ---- */

static void placement_child(const void *arg)
{
	const char *policy = arg;
	struct moe_engine_params p = {
		.struct_size = sizeof p, .workers = 4, .parts = 4, .policy = policy
	};
	struct moe_engine *e;

	enter_machine(&machines[1]);
	if (moe_engine_policy_obeys_masks(policy)) {
		CHECK_OK(moe_engine_open(&p, &e));
		for (int i = 0; i < (moe_test_full() ? 20 : 1); i++)
			run_parts(e, 4);
		CHECK(seen_remote == 0 && info_of(e).remote_tasks == 0);
		CHECK_OK(moe_engine_close(e));
	} else {
		CHECK_ERROR(moe_engine_open(&p, &e), MOE_ERR_CONFIG, "soft placement");
		CHECK(strstr(moe_last_error(), policy) && strstr(moe_last_error(), "lws"));
		p.parts = 1; /* one part needs no mask */
		CHECK_OK(moe_engine_open(&p, &e));
		CHECK_OK(moe_engine_close(e));
		p.parts = 4;
	}
	p.placement = MOE_PLACEMENT_SOFT;
	CHECK_OK(moe_engine_open(&p, &e));
	run_parts(e, 4);
	CHECK(info_of(e).remote_tasks == seen_remote);
	check_memory(e);
	CHECK_OK(moe_engine_close(e));
}

static void placement(void)
{
	static const char *const policies[] = { "eager",       "prio",		"lws",
						"ws",	       "random",	"dmda",
						"dmdas",       "modular-eager", "modular-prio",
						"modular-heft" };

	for (size_t i = 0; i < MOE_COUNT(policies); i++)
		in_child(policies[i], placement_child, policies[i]);
}

/* ---- the start of a graph ---- */

static struct {
	uint64_t base;
	atomic_int worker[64]; /* of each task, plus one */
} ran;

static void note_worker(const struct moe_task_event *event, void *user)
{
	(void)user;
	if (event->id - ran.base < MOE_COUNT(ran.worker))
		ran.worker[event->id - ran.base] = event->worker + 1;
}

static void note_first(const struct moe_task_event *event, void *user)
{
	(void)user;
	if (!ran.base)
		ran.base = event->id;
}

/* Nothing runs before all is submitted; the first tasks then keep away from worker `mine`. */
static void start_once(struct moe_engine *e, int mine, bool busy)
{
	struct moe_observer observer = { .submitted = note_first, .executed = note_worker };
	struct graph before, g;

	CHECK_OK(moe_engine_wait(e));
	memset(&ran, 0, sizeof ran);
	CHECK_OK(moe_engine_observe(e, &observer));
	CHECK_OK(moe_engine_hold(e));
	graph_make(&before, 6, 2, moe_engine_parts(e));
	graph_register(&before, e);
	graph_make(&g, 6, 40, moe_engine_parts(e));
	graph_register(&g, e);
	if (busy)
		graph_submit(&before, e, NULL);
	ran.base = 0;
	graph_submit(&g, e, NULL);
	CHECK_OK(moe_engine_release(e));
	CHECK_OK(moe_engine_wait(e));
	graph_verify(&g, 1);
	for (int i = 0; i < g.n_tasks; i++)
		CHECK(ran.worker[i] > 0);
	for (int i = 0; i < MOE_FIRST_TASKS && !busy; i++)
		CHECK(ran.worker[i] != mine + 1);
	CHECK_OK(moe_engine_observe(e, NULL));
	graph_free(&before);
	graph_free(&g);
}

static void start_child(const void *arg)
{
	const char *policy = arg;
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = 4, .parts = 2, .policy = policy };
	struct moe_engine *e;
	cpu_set_t here;
	int mine = -1;

	enter_machine(&machines[0]); /* two nodes of two cores; its CPU 0 is the machine's, too */
	CPU_ZERO(&here);
	CPU_SET(sched_getcpu(), &here);
	CHECK_OK(moe_engine_open(&p, &e));
	CHECK(!sched_setaffinity(0, sizeof here, &here));
	for (int w = 0; w < 4; w++)
		if (CPU_ISSET(MOE_MAX(moe_engine_worker_cpu(e, w), 0), &here))
			mine = w;
	for (int i = 0; i < 3; i++)
		start_once(e, mine, i == 1);
	CHECK(info_of(e).remote_tasks == 0);
	CHECK_OK(moe_engine_close(e));
	/* any worker will do in one part; a single worker is left alone */
	p.parts = 1;
	for (p.workers = 2; p.workers >= 1; p.workers--) {
		CHECK_OK(moe_engine_open(&p, &e));
		start_once(e, p.workers > 1 ? mine : -1, false);
		CHECK_OK(moe_engine_close(e));
	}
}

static void starts(void)
{
	static const char *const policies[] = { "eager", "prio", "lws", "ws", "dmda", "dmdas" };

	for (size_t i = 0; i < MOE_COUNT(policies); i++)
		in_child(policies[i], start_child, policies[i]);
}

static void bad_machine_child(const void *arg)
{
	struct moe_engine_params p = { .struct_size = sizeof p };
	struct moe_engine *e;

	setenv("HWLOC_XMLFILE", arg, 1);
	/* hwloc falls back to the real machine, or says that it cannot read the file: never a crash
	 */
	if (moe_engine_open(&p, &e) == MOE_OK)
		CHECK_OK(moe_engine_close(e));
	else
		CHECK(strstr(moe_last_error(), "HWLOC_XMLFILE") != NULL);
}

static void bad_machine(void)
{
	in_child("no such XML file", bad_machine_child, "/nonexistent.xml");
}

const struct moe_test moe_suite_tests[] = {
	{ "workers, nodes and memory of parts", fake_machines },
	{ "part_specs", part_specs },
	{ "strict and soft placement", placement },
	{ "the start of a graph", starts },
	{ "unreadable topology", bad_machine },
	{ NULL, NULL },
};
