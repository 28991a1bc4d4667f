/* SPDX-License-Identifier: Apache-2.0 */
/* The background thread: empties the rings into tables, packs and writes them. */
#include "engine/available.h"
#include "engine/deadline.h"
#include "engine/recorder.h"

#define MS ((int64_t)1000000)
#define WAKE_NS (20 * MS)
#define FLUSH_ROWS 8192
#define FLUSH_NS (1000 * MS) /* what a crash loses at most */
#define COUNT_NS (1000 * MS)
#define SAMPLE_NS (100 * MS)
#define MAX_PURPOSES 64

static int64_t since(const struct moe_recorder *rec, int64_t ns)
{
	return ns ? ns - rec->origin : MOE_MXT_NA;
}

/* ---- records to rows ---- */

static void add_numa(struct moe_recorder *rec, struct moe_mxt_table *t,
		     const struct moe_traced_task *r)
{
	const struct moe_engine *e = rec->engine;
	int layer = MOE_MAX(r->tag.layer, 0), part = -1;
	double placed = r->weights;
	bool here;

	if (r->home == MOE_HOME_PART) {
		part = r->tag.part;
		placed += r->read + r->written;
	} else if (r->home == MOE_HOME_LAYER) {
		part = layer % e->n_parts;
	}
	if (part < 0)
		placed = 0;
	here = part >= 0 && e->parts[part].node == rec->worker[r->worker].node;
	moe_mxt_add(t, MOE_MXT_TASK_LOCAL, here ? (int64_t)placed : 0);
	moe_mxt_add(t, MOE_MXT_TASK_REMOTE, here ? 0 : (int64_t)placed);
}

static void add_work(struct moe_recorder *rec, struct moe_mxt_table *t,
		     const struct moe_traced_task *r)
{
	static const int columns[] = { MOE_MXT_TASK_FLOPS, MOE_MXT_TASK_READ, MOE_MXT_TASK_WRITTEN,
				       MOE_MXT_TASK_LOCAL, MOE_MXT_TASK_REMOTE };

	if (!r->modelled) {
		for (size_t i = 0; i < MOE_COUNT(columns); i++)
			moe_mxt_add(t, columns[i], MOE_MXT_NA);
		return;
	}
	moe_mxt_add(t, MOE_MXT_TASK_FLOPS, (int64_t)r->flops);
	moe_mxt_add(t, MOE_MXT_TASK_READ, (int64_t)(r->weights + r->read));
	moe_mxt_add(t, MOE_MXT_TASK_WRITTEN, (int64_t)r->written);
	add_numa(rec, t, r);
}

static void add_task(struct moe_recorder *rec, const struct moe_traced_task *r)
{
	struct moe_mxt_table *t = &rec->table[MOE_MXT_TASKS];
	const struct moe_tag *tag = &r->tag;

	moe_mxt_add(t, MOE_MXT_TASK_ID, (int64_t)r->id);
	moe_mxt_add(t, MOE_MXT_TASK_KIND, tag->kind);
	moe_mxt_add(t, MOE_MXT_TASK_PHASE, tag->phase);
	moe_mxt_add(t, MOE_MXT_TASK_LAYER, tag->layer);
	moe_mxt_add(t, MOE_MXT_TASK_GROUP, tag->group);
	moe_mxt_add(t, MOE_MXT_TASK_SLICE, tag->slice);
	moe_mxt_add(t, MOE_MXT_TASK_PART, tag->part);
	moe_mxt_add(t, MOE_MXT_TASK_MICRO, tag->micro);
	moe_mxt_add(t, MOE_MXT_TASK_STEP, tag->step);
	moe_mxt_add(t, MOE_MXT_TASK_WORKER, r->worker);
	moe_mxt_add(t, MOE_MXT_TASK_SUBMIT, since(rec, r->submit));
	moe_mxt_add(t, MOE_MXT_TASK_READY, since(rec, r->ready));
	moe_mxt_add(t, MOE_MXT_TASK_POP, since(rec, r->pop));
	moe_mxt_add(t, MOE_MXT_TASK_START, since(rec, r->start));
	moe_mxt_add(t, MOE_MXT_TASK_STOP, since(rec, r->stop));
	moe_mxt_add(t, MOE_MXT_TASK_CPU, r->cpu);
	moe_mxt_add(t, MOE_MXT_TASK_CORE, r->core);
	moe_mxt_add(t, MOE_MXT_TASK_ROWS, tag->rows);
	add_work(rec, t, r);
	for (int i = 0; rec->hardware && i < MOE_HARDWARE_COUNTERS; i++)
		moe_mxt_add(t, MOE_MXT_TASK_CYCLES + i, r->hardware[i]);
	moe_mxt_row(t, r->start - rec->origin, r->stop - rec->origin, (int64_t)r->id, tag->step,
		    tag->layer);
	rec->tasks++;
}

static void add_routing(struct moe_recorder *rec, const struct moe_traced_routing *r)
{
	struct moe_mxt_table *t = &rec->table[MOE_MXT_ROUTING];
	const struct moe_tag *tag = &r->tag;
	int64_t time = r->time - rec->origin;

	moe_mxt_add(t, MOE_MXT_ROUTING_TASK, (int64_t)r->id);
	moe_mxt_add(t, MOE_MXT_ROUTING_STEP, tag->step);
	moe_mxt_add(t, MOE_MXT_ROUTING_LAYER, tag->layer);
	moe_mxt_add(t, MOE_MXT_ROUTING_MICRO, tag->micro);
	moe_mxt_add(t, MOE_MXT_ROUTING_TIME, time);
	moe_mxt_add(t, MOE_MXT_ROUTING_TOKENS, tag->rows);
	moe_mxt_add(t, MOE_MXT_ROUTING_SLOTS, r->slots);
	moe_mxt_add(t, MOE_MXT_ROUTING_EXPERTS, r->n);
	for (int i = 0; i < r->n; i++)
		moe_mxt_add(t, MOE_MXT_ROUTING_LOADS, r->load[i]);
	moe_mxt_row(t, time, time, (int64_t)r->id, tag->step, tag->layer);
}

static void add_deps(struct moe_recorder *rec, const struct moe_traced_deps *r)
{
	struct moe_mxt_table *t = &rec->table[MOE_MXT_DEPS];
	const struct moe_tag *tag = &r->tag;
	int64_t time = r->submit - rec->origin;

	moe_mxt_add(t, MOE_MXT_DEP_ID, (int64_t)r->id);
	moe_mxt_add(t, MOE_MXT_DEP_KIND, tag->kind);
	moe_mxt_add(t, MOE_MXT_DEP_LAYER, tag->layer);
	moe_mxt_add(t, MOE_MXT_DEP_MICRO, tag->micro);
	moe_mxt_add(t, MOE_MXT_DEP_STEP, tag->step);
	moe_mxt_add(t, MOE_MXT_DEP_SUBMIT, time);
	moe_mxt_add(t, MOE_MXT_DEP_COUNT, r->n);
	for (int i = 0; i < r->n; i++)
		moe_mxt_add(t, MOE_MXT_DEP_BACK, r->back[i]);
	moe_mxt_row(t, time, time, (int64_t)r->id, tag->step, tag->layer);
}

static void add_host(struct moe_recorder *rec, const struct moe_traced_host *r)
{
	struct moe_mxt_table *t = &rec->table[MOE_MXT_HOST];

	moe_mxt_add(t, MOE_MXT_HOST_WHAT, r->kind);
	moe_mxt_add(t, MOE_MXT_HOST_THREAD, r->thread);
	moe_mxt_add(t, MOE_MXT_HOST_BEGIN, r->begin - rec->origin);
	moe_mxt_add(t, MOE_MXT_HOST_END, r->end - rec->origin);
	moe_mxt_row(t, r->begin - rec->origin, r->end - rec->origin, MOE_MXT_NA, MOE_MXT_NA, -1);
}

static void add_mark(struct moe_recorder *rec, const struct moe_traced_mark *r)
{
	struct moe_mxt_table *t = &rec->table[MOE_MXT_MARKS];
	int64_t time = r->time - rec->origin;

	moe_mxt_add(t, MOE_MXT_MARK_TIME, time);
	moe_mxt_add(t, MOE_MXT_MARK_WHAT, r->mark);
	moe_mxt_add(t, MOE_MXT_MARK_STEP, r->step);
	moe_mxt_add(t, MOE_MXT_MARK_TOKENS, r->tokens < 0 ? MOE_MXT_NA : r->tokens);
	moe_mxt_add(t, MOE_MXT_MARK_TRAINED, r->trained < 0 ? MOE_MXT_NA : r->trained);
	moe_mxt_row(t, time, time, MOE_MXT_NA, r->step, -1);
}

/* ---- writing ---- */

static void flush(struct moe_recorder *rec, enum moe_mxt_chunk type)
{
	rec->oldest[type] = 0;
	if (moe_mxt_write(&rec->writer, &rec->table[type]) || rec->warned)
		return;
	rec->warned = true;
	moe_log(MOE_LOG_WARNING, "the trace ends here, the work goes on: %s", rec->writer.error);
}

static void flush_due(struct moe_recorder *rec, int64_t now)
{
	for (int i = MOE_MXT_TASKS; i < MOE_MXT_END; i++) {
		if (!rec->table[i].head.rows)
			continue;
		if (!rec->oldest[i])
			rec->oldest[i] = now;
		if (rec->table[i].head.rows >= FLUSH_ROWS || now - rec->oldest[i] >= FLUSH_NS)
			flush(rec, (enum moe_mxt_chunk)i);
	}
}

/* ---- memory ---- */

struct samples {
	int n;
	struct {
		const char *purpose;
		int part;
		size_t bytes;
	} item[MAX_PURPOSES * 8]; /* purposes x parts */
};

/* The last item takes what has no room. */
static void sample(const char *purpose, int part, size_t bytes, void *user)
{
	struct samples *s = user;
	int i = 0;

	while (i < s->n && i < (int)MOE_COUNT(s->item) - 1 &&
	       (s->item[i].part != part || strcmp(s->item[i].purpose, purpose)))
		i++;
	if (i == s->n) {
		s->item[i].purpose = purpose;
		s->item[i].part = part;
		s->item[i].bytes = 0;
		s->n++;
	}
	s->item[i].bytes += bytes;
}

/* Index of a name in the chunk's list, which is small: each once. */
static int64_t name_index(struct moe_mxt_table *t, int column, const char *name)
{
	const struct moe_mxt_column *c = &t->column[column];
	int64_t index = 0;
	size_t at = 0;

	if (t->failed) /* it may lack a zero byte */
		return 0;
	while (at < c->n) {
		size_t i = 0;

		while (c->value[at + i] && c->value[at + i] == (uint8_t)name[i])
			i++;
		if (!c->value[at + i] && !name[i])
			return index;
		while (c->value[at])
			at++;
		at++;
		index++;
	}
	moe_mxt_add_text(t, column, name);
	return index;
}

static void sample_memory(struct moe_recorder *rec, int64_t now)
{
	struct moe_mxt_table *t = &rec->table[MOE_MXT_MEMORY];
	struct samples s = { 0 };
	uint64_t changes = atomic_load(&rec->engine->memory_changes);

	sample("rss", -1, moe_memory_resident(), &s);
	if (changes != rec->memory_changes || !rec->sampled)
		moe_memory_visit(rec->engine, sample, &s);
	rec->memory_changes = changes;
	rec->sampled = now;
	for (int i = 0; i < s.n && !t->failed; i++) {
		moe_mxt_add(t, MOE_MXT_MEMORY_TIME, now - rec->origin);
		moe_mxt_add(t, MOE_MXT_MEMORY_PURPOSE,
			    name_index(t, MOE_MXT_MEMORY_NAMES, s.item[i].purpose));
		moe_mxt_add(t, MOE_MXT_MEMORY_PART, s.item[i].part);
		moe_mxt_add(t, MOE_MXT_MEMORY_BYTES, (int64_t)s.item[i].bytes);
		moe_mxt_row(t, now - rec->origin, now - rec->origin, MOE_MXT_NA, MOE_MXT_NA, -1);
	}
}

/* ---- counters ---- */

static void count(struct moe_recorder *rec, enum moe_mxt_chunk type, const char *name,
		  int64_t value, int64_t now)
{
	struct moe_mxt_table *t = &rec->table[type];

	moe_mxt_add(t, MOE_MXT_COUNTER_TIME, now - rec->origin);
	moe_mxt_add(t, MOE_MXT_COUNTER_NAME, name_index(t, MOE_MXT_COUNTER_NAMES, name));
	moe_mxt_add(t, MOE_MXT_COUNTER_VALUE, value);
	moe_mxt_row(t, now - rec->origin, now - rec->origin, MOE_MXT_NA, MOE_MXT_NA, -1);
}

static void count_all(struct moe_recorder *rec, enum moe_mxt_chunk type, int64_t now)
{
	int64_t executed = 0, lost = 0;

	if (rec->table[type].failed)
		return;
	for (int w = 0; w < rec->n_workers; w++) {
		executed += atomic_load(&rec->worker[w].executed);
		lost += atomic_load(&rec->worker[w].ring.lost);
	}
	count(rec, type, "submitted",
	      atomic_load(&rec->submission.committed) + atomic_load(&rec->submission.lost), now);
	count(rec, type, "executed", executed, now);
	count(rec, type, "lost_executed", lost, now);
	count(rec, type, "lost_submitted", atomic_load(&rec->submission.lost), now);
	count(rec, type, "lost_host", atomic_load(&rec->host.lost), now);
	count(rec, type, "remote", atomic_load(&rec->engine->remote_tasks) - rec->remote_before,
	      now);
	rec->counted = now;
}

/* ---- the thread ---- */

static void take(struct moe_recorder *rec, const int32_t *what)
{
	switch ((enum moe_traced) * what) {
	case MOE_TRACED_TASK:
		add_task(rec, (const void *)what);
		break;
	case MOE_TRACED_ROUTING:
		add_routing(rec, (const void *)what);
		break;
	case MOE_TRACED_DEPS:
		add_deps(rec, (const void *)what);
		break;
	case MOE_TRACED_HOST:
		add_host(rec, (const void *)what);
		break;
	case MOE_TRACED_MARK:
		add_mark(rec, (const void *)what);
		break;
	}
}

/* As much as is there now: a producer that is faster than us must not keep us here. */
static void drain(struct moe_recorder *rec, struct moe_ring *ring, int64_t now)
{
	size_t until = atomic_load_explicit(&ring->head, memory_order_acquire);
	const void *record;

	while (atomic_load_explicit(&ring->tail, memory_order_relaxed) != until &&
	       (record = moe_ring_peek(ring))) {
		take(rec, record);
		moe_ring_release(ring);
		flush_due(rec, now);
	}
}

static void drain_all(struct moe_recorder *rec)
{
	int64_t now = moe_now_ns();

	drain(rec, &rec->host, now);
	drain(rec, &rec->submission, now);
	for (int w = 0; w < rec->n_workers; w++)
		drain(rec, &rec->worker[w].ring, now);
	if (now - rec->sampled >= SAMPLE_NS)
		sample_memory(rec, now);
	if (now - rec->counted >= COUNT_NS)
		count_all(rec, MOE_MXT_COUNTERS, now);
	flush_due(rec, now);
}

/* false: the trace is over. */
static bool nap(struct moe_recorder *rec)
{
	struct timespec until = moe_deadline(WAKE_NS);
	bool stop;

	pthread_mutex_lock(&rec->lock);
	if (!rec->stop)
		pthread_cond_timedwait(&rec->wake, &rec->lock, &until);
	stop = rec->stop;
	pthread_mutex_unlock(&rec->lock);
	return !stop;
}

void *moe_recorder_main(void *recorder)
{
	struct moe_recorder *rec = recorder;

	while (nap(rec))
		drain_all(rec);
	drain_all(rec);
	sample_memory(rec, moe_now_ns());
	count_all(rec, MOE_MXT_END, moe_now_ns());
	for (int i = MOE_MXT_TASKS; i <= MOE_MXT_END; i++)
		flush(rec, (enum moe_mxt_chunk)i);
	if (!moe_mxt_finish(&rec->writer) && !rec->warned)
		moe_log(MOE_LOG_WARNING, "the trace may be cut off: %s", rec->writer.error);
	rec->cpu = moe_thread_cpu_ns();
	return NULL;
}
