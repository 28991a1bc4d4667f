/* SPDX-License-Identifier: Apache-2.0 */
/* Reading traces for analysis: what was written, slices of it, and files that nobody should write.
 */
#include "engine/trace_write.h"
#include "tests/trace_build.h"
#include "tests/trace_bytes.h"
#include "tests/trace_digest.h"

const char moe_suite_name[] = "trace_load";

static uint64_t state;

static uint64_t any(void)
{
	return trace_random(&state);
}

/* ---- writing a trace that is in memory ---- */

static const char header[] = "workers=2\nworker.0.node=0\nworker.0.cpu=0\nworker.1.node=1\n"
			     "worker.1.cpu=1\ntopology.nodes=2\nparts=2\npart.0.node=0\n"
			     "part.0.workers=0\npart.1.node=1\npart.1.workers=1,0\n"
			     "placement=strict\nkinds=11\nkind.0=a\nkind.1=b\nkind.2=repack_bwd\n"
			     "kind.3=update\nkind.4=plan\nkind.5=gate_up\nkind.6=down\n"
			     "kind.7=down_bwd\nkind.8=gate_up_bwd\nkind.9=combine\nkind.10=repack\n"
			     "host.load=1.25\n";

static void add_row(struct moe_mxt_table *t, const struct trace_task *k)
{
	const int64_t value[] = { k->id,    k->kind,  k->phase,	  k->layer,  k->group,	k->slice,
				  k->part,  k->micro, k->step,	  k->worker, k->submit, k->ready,
				  k->pop,   k->start, k->stop,	  k->cpu,    k->core,	k->rows,
				  k->flops, k->read,  k->written, k->local,  k->remote };

	for (int c = 0; c < (int)COUNT(value); c++)
		moe_mxt_add(t, MOE_MXT_TASK_ID + c, value[c]);
	moe_mxt_row(t, k->start, k->stop, k->id, k->step, k->layer);
}

static void add_deps(struct moe_mxt_table *t, const struct trace *from, const struct trace_task *k)
{
	moe_mxt_add(t, MOE_MXT_DEP_ID, k->id);
	moe_mxt_add(t, MOE_MXT_DEP_KIND, k->kind);
	moe_mxt_add(t, MOE_MXT_DEP_LAYER, k->layer);
	moe_mxt_add(t, MOE_MXT_DEP_MICRO, k->micro);
	moe_mxt_add(t, MOE_MXT_DEP_STEP, k->step);
	moe_mxt_add(t, MOE_MXT_DEP_SUBMIT, k->submit);
	moe_mxt_add(t, MOE_MXT_DEP_COUNT, k->n_pred);
	for (uint32_t p = 0; p < k->n_pred; p++)
		moe_mxt_add(t, MOE_MXT_DEP_BACK,
			    k->id - from->task[from->pred[k->first_pred + p]].id);
	moe_mxt_row(t, k->submit, k->submit, k->id, k->step, k->layer);
}

static void write_rest(struct moe_mxt_writer *w)
{
	static const enum moe_mxt_chunk type[] = { MOE_MXT_ROUTING, MOE_MXT_MEMORY, MOE_MXT_MARKS,
						   MOE_MXT_HOST, MOE_MXT_END };
	static const int64_t row[][9] = {
		{ 1, 1, 0, 0, 10, 4, 8, 2, 0 }, /* routing of task 1 */
		{ 20, 1, -1, 4096 },		/* memory at 20: rss */
		{ 0, MOE_MXT_STEP_BEGIN, 1, 4, NA },
		{ MOE_MXT_HOST_WAIT, 1, 5, 9 },
		{ 100, 0, 0 }, /* lost_executed */
	};
	static const int columns[] = { 8, 4, 5, 4, 3 };

	for (size_t i = 0; i < COUNT(type); i++) {
		struct moe_mxt_table t;
		bool names = type[i] == MOE_MXT_MEMORY || type[i] == MOE_MXT_END;

		moe_mxt_table_init(&t, type[i]);
		if (names) {
			moe_mxt_add_text(&t, 1, i == 1 ? "weights" : "lost_executed");
			moe_mxt_add_text(&t, 1, "rss");
		}
		for (int c = 0; c < columns[i]; c++)
			moe_mxt_add(&t, 1 + names + c, row[i][c]);
		if (type[i] == MOE_MXT_ROUTING) {
			moe_mxt_add(&t, MOE_MXT_ROUTING_LOADS, 5);
			moe_mxt_add(&t, MOE_MXT_ROUTING_LOADS, 3);
		}
		moe_mxt_row(&t, row[i][type[i] == MOE_MXT_ROUTING ? 4 : 0], 10, NA, 1, 0);
		CHECK(moe_mxt_write(w, &t));
		moe_mxt_table_free(&t);
	}
}

/* Chunks of `rows` tasks, backwards in each, and their dependencies. */
static void write_trace(const struct trace *t, const char *path, uint32_t rows)
{
	struct moe_mxt_table tasks, deps;
	struct moe_mxt_writer w;

	moe_mxt_table_init(&tasks, MOE_MXT_TASKS);
	moe_mxt_table_init(&deps, MOE_MXT_DEPS);
	CHECK(moe_mxt_create(&w, path) && moe_mxt_write_header(&w, header));
	for (uint32_t i = 0; i < t->n_tasks; i += rows) {
		uint32_t n = t->n_tasks - i < rows ? t->n_tasks - i : rows;

		for (uint32_t k = 0; k < n; k++) {
			add_deps(&deps, t, &t->task[i + k]);
			add_row(&tasks, &t->task[i + n - 1 - k]);
		}
		CHECK(moe_mxt_write(&w, &deps) && moe_mxt_write(&w, &tasks));
	}
	write_rest(&w);
	CHECK(moe_mxt_finish(&w));
	moe_mxt_table_free(&tasks);
	moe_mxt_table_free(&deps);
}

/* Three steps of 20 tasks on two workers. */
static bool some_trace(struct trace *t)
{
	struct made m[60] = { 0 };
	int64_t end[2] = { 0, 0 };

	for (int i = 0; i < 60; i++) {
		int w = i % 2;
		int64_t ready = i;

		m[i] = (struct made){ .kind = i % 11,
				      .worker = w,
				      .submit = i,
				      .step = 1 + i / 20,
				      .layer = 1 + i % 3,
				      .group = i % 4,
				      .phase = i % 4,
				      .rows = i,
				      .part = 1 + w,
				      .flops = 1000 * i,
				      .read = 100,
				      .written = 7 };
		for (int p = 0; p < 3 && i > 3 * p; p++) {
			m[i].pred[p] = i - 3 * p;
			ready = m[i - 3 * p - 1].stop > ready ? m[i - 3 * p - 1].stop : ready;
		}
		m[i].ready = ready;
		m[i].pop = m[i].start = ready > end[w] ? ready : end[w];
		end[w] = m[i].stop = m[i].start + 5 + i % 7;
	}
	return made_trace(t, m, 60, 2, 2, NULL);
}

/* ---- what was written ---- */

static void same_tasks(const struct trace *a, const struct trace *b)
{
	CHECK(a->n_tasks == b->n_tasks && a->n_preds == b->n_preds && a->n_steps == b->n_steps);
	for (uint32_t i = 0; i < a->n_tasks && i < b->n_tasks; i++) {
		struct trace_task x = a->task[i], y = b->task[i];

		CHECK(x.n_pred == y.n_pred);
		for (uint32_t p = 0; p < x.n_pred;
		     p++) /* descending in one, as given in the other */
			CHECK(a->pred[x.first_pred + p] == b->pred[y.first_pred + p]);
		x.first_pred = y.first_pred = 0;
		CHECK(!memcmp(&x, &y, offsetof(struct trace_task, phase)) && x.phase == y.phase);
		CHECK(x.n_succ == y.n_succ && x.prev == y.prev);
	}
}

static void round_trip(void)
{
	static const uint32_t sizes[] = { 1, 7, 1000 };
	const char *path = trace_file("good.mxt");
	struct trace t, back;
	char error[300] = "", buf[20];

	if (!some_trace(&t))
		return;
	for (size_t i = 0; i < COUNT(sizes); i++) {
		write_trace(&t, path, sizes[i]);
		if (!check_at(trace_read(&back, path, NULL, error, sizeof error) == 0, error,
			      __FILE__, __LINE__))
			break;
		same_tasks(&t, &back);
		CHECK(back.ended && back.lost_bytes == 0 && back.bad_rows == 0 &&
		      back.not_run == 0);
		CHECK(back.n_kinds == 11 && !strcmp(back.kind[5], "gate_up") && back.strict);
		CHECK(back.n_workers == 2 && back.worker[1].node == 1 && back.n_nodes == 2);
		CHECK(back.n_parts == 2 && back.part_first[2] == 3 && back.part_worker[2] == 0);
		CHECK(back.n_routing == 1 && back.n_loads == 2 && back.load[1] == 3);
		CHECK(back.routing[0].slots == 8 && back.routing[0].experts == 2);
		CHECK(back.n_memory == 1 && !strcmp(back.purpose[back.memory[0].purpose], "rss"));
		CHECK(back.memory[0].bytes == 4096 && back.n_marks == 1 && back.n_hosts == 1);
		CHECK(back.step[0].tokens == 4 && back.step[1].tokens == NA);
		CHECK(back.n_counters == 1 && back.counter[0].value == 0);
		CHECK(!strcmp(trace_value(&back, "host.load", buf, sizeof buf), "1.25"));
		CHECK(trace_number(&back, "host.load", 0) == 1.25);
		CHECK(trace_number(&back, "placement", 7) == 7 && !trace_value(&back, "x", buf, 9));
		trace_free(&back);
	}
	trace_free(&t);
}

static void slices(void)
{
	struct trace_slice step = { .steps = true, .step = { 2, 2 } };
	struct trace_slice layer = { .layers = true, .layer = { 1, 1 } };
	struct trace_slice time = { .times = true, .time = { 50, 60 } };
	const char *path = trace_file("slices.mxt");
	struct trace t, part;
	char error[300];
	uint32_t n = 0;

	if (!some_trace(&t))
		return;
	write_trace(&t, path, 8); /* chunks that hold two steps */
	CHECK(trace_read(&part, path, &step, error, sizeof error) == 0);
	CHECK(part.n_tasks == 20 && part.task[0].id == 21 && part.n_steps == 1);
	CHECK(part.not_run == 0 && part.task[19].n_pred == 3 && part.task[0].n_pred == 0);
	trace_free(&part);
	CHECK(trace_read(&part, path, &layer, error, sizeof error) == 0 && part.n_tasks == 20);
	CHECK(part.task[0].layer == 1 && part.n_routing == 0);
	trace_free(&part);
	CHECK(trace_read(&part, path, &time, error, sizeof error) == 0);
	for (uint32_t i = 0; i < t.n_tasks; i++)
		n += t.task[i].start <= 60 && t.task[i].stop >= 50;
	CHECK(n > 0 && n < 60 && part.n_tasks == n);
	trace_free(&part);
	trace_free(&t);
}

static void refused(void)
{
	const char *path = trace_file("text.mxt");
	struct trace t;
	char error[300];
	FILE *f = fopen(path, "w");

	CHECK(f && fputs("this is a text and no trace at all", f) > 0 && !fclose(f));
	CHECK(trace_read(&t, path, NULL, error, sizeof error) == -1);
	CHECK(strstr(error, "text.mxt") && strstr(error, "not a trace"));
	CHECK(trace_read(&t, trace_file("absent"), NULL, error, sizeof error) == -1);
	CHECK(strstr(error, "No such file"));
	CHECK(trace_read(&t, "/", NULL, error, sizeof error) == -1 && strstr(error, "regular"));
}

/* ---- rows that cannot be ---- */

static void bad_rows(void)
{
	const char *path = trace_file("rows.mxt");
	struct trace t, back;
	char error[300];

	if (!some_trace(&t))
		return;
	t.task[3].stop = t.task[3].start - 1;
	t.task[4].kind = 11;  /* the header has 11 */
	t.task[5].worker = 2; /* and two workers */
	t.task[6].id = t.task[7].id;
	t.task[8].start = INT64_MAX;
	t.task[9].layer = 1 << 20;
	t.task[10].id = -4;
	write_trace(&t, path, 1000);
	CHECK(trace_read(&back, path, NULL, error, sizeof error) == 0);
	/* two of the dependency lists go with their ids: 6 has that of 7, 10 has none */
	CHECK(back.n_tasks == 53 && back.bad_rows >= 7 && back.bad_row[0]);
	CHECK(back.task[3].id == 8 && back.task[4].id == 12);
	trace_free(&back);
	trace_free(&t);
}

/* ---- anything ---- */

/* Changes bytes of a chunk's head or payload and makes both checksums right. */
static void corrupt(uint8_t *data, size_t n)
{
	size_t at = MOE_MXT_FILE_BYTES, chunks[64], count = 0;
	struct moe_mxt_head h;
	uint8_t *chunk;

	while (at + MOE_MXT_HEAD_BYTES <= n && count < 64 && moe_mxt_head_decode(data + at, &h)) {
		chunks[count++] = at;
		at += MOE_MXT_HEAD_BYTES + h.length;
	}
	chunk = data + chunks[any() % count];
	moe_mxt_head_decode(chunk, &h);
	for (uint64_t i = any() % 4; h.length; i--) {
		uint8_t *byte = chunk + MOE_MXT_HEAD_BYTES + any() % h.length;

		*byte = any() % 3 ? (uint8_t)(*byte ^ 1 << any() % 8) : (uint8_t)any();
		if (!i)
			break;
	}
	if (any() % 4 == 0)
		h.rows = (uint32_t)any() % 300;
	if (any() % 8 == 0)
		h.type = 1 + (uint32_t)any() % MOE_MXT_CHUNK_TYPES;
	if (any() % 8 == 0)
		h.id[any() % 2] = (int64_t)any();
	h.crc = moe_mxt_crc(0, chunk + MOE_MXT_HEAD_BYTES, h.length);
	moe_mxt_head_encode(&h, chunk);
}

static void anything(void)
{
	int rounds = moe_test_full() ? 20000 : 1500, read = 0;
	const char *good = trace_file("seed.mxt"), *bad = trace_file("bad.mxt");
	FILE *null = fopen("/dev/null", "w");
	struct trace t;
	uint8_t *data;
	char error[300];
	size_t n;

	state = moe_test_seed();
	printf("mutations from seed %lu ", moe_test_seed());
	if (!some_trace(&t))
		return;
	write_trace(&t, good, 25);
	trace_free(&t);
	for (int i = 0; i < rounds; i++) {
		int64_t tasks;

		data = trace_contents(good, &n);
		for (uint64_t k = any() % 3 + 1; k; k--)
			corrupt(data, n);
		if (any() % 8 == 0)
			n = any() % n;
		trace_put(bad, data, n);
		error[0] = 0;
		tasks = trace_digest(bad, null, error, sizeof error);
		if (!CHECK(tasks >= -1 && (tasks >= 0 || error[0])))
			printf("round %d ", i);
		read += tasks > 0;
		free(data);
	}
	CHECK(read > rounds / 2);
	fclose(null);
}

const struct moe_test moe_suite_tests[] = {
	{ "what was written", round_trip },
	{ "slices by step, layer, time", slices },
	{ "no traces", refused },
	{ "rows that cannot be", bad_rows },
	{ "mutated files with right checksums", anything },
	{ NULL, NULL },
};
