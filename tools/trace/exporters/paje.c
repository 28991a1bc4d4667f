/* SPDX-License-Identifier: Apache-2.0 */
/* Paje, for ViTE, pajeng and StarVZ: states per worker, counters, links for arrows; in order of time. */
#include "tools/trace/exporter.h"
#include "tools/trace/output.h"

#include <stdlib.h>

/* In the order of the definitions that the file begins with. */
enum {
	DEFINE_CONTAINER,
	DEFINE_STATE,
	DEFINE_VARIABLE,
	DEFINE_LINK,
	DEFINE_VALUE,
	CREATE,
	DESTROY,
	SET_STATE,
	IDLE,
	SET_VARIABLE,
	START_LINK,
	END_LINK
};
static const char *const definition[] = {
	"PajeDefineContainerType %d\n% Alias string\n% Type string\n% Name string",
	"PajeDefineStateType %d\n% Alias string\n% Type string\n% Name string",
	"PajeDefineVariableType %d\n% Alias string\n% Type string\n% Name string\n% Color color",
	"PajeDefineLinkType %d\n% Alias string\n% Type string\n% StartContainerType string\n"
	"% EndContainerType string\n% Name string",
	"PajeDefineEntityValue %d\n% Alias string\n% Type string\n% Name string\n% Color color",
	"PajeCreateContainer %d\n% Time date\n% Alias string\n% Type string\n% Container string\n"
	"% Name string",
	"PajeDestroyContainer %d\n% Time date\n% Type string\n% Name string",
	"PajeSetState %d\n% Time date\n% Type string\n% Container string\n% Value string\n"
	"% Id string\n% Step string\n% Layer string\n% Group string\n% Micro string\n% Phase "
	"string\n"
	"% Rows string",
	"PajeSetState %d\n% Time date\n% Type string\n% Container string\n% Value string",
	"PajeSetVariable %d\n% Time date\n% Type string\n% Container string\n% Value double",
	"PajeStartLink %d\n% Time date\n% Type string\n% Container string\n% StartContainer "
	"string\n"
	"% Value string\n% Key string",
	"PajeEndLink %d\n% Time date\n% Type string\n% Container string\n% EndContainer string\n"
	"% Value string\n% Key string",
};

struct paje {
	FILE *out;
	const struct trace *trace;
	const uint8_t *track;
	int64_t from; /* Paje's time begins at 0 */
};

static void put_head(FILE *out)
{
	for (size_t i = 0; i < sizeof definition / sizeof *definition; i++) {
		fputs("%EventDef ", out);
		for (const char *s = definition[i]; *s; s++) {
			if (s[0] == '%' && s[1] == 'd') {
				fprintf(out, "%d", (int)i);
				s++;
			} else {
				putc(*s, out);
			}
		}
		fputs("\n%EndEventDef\n", out);
	}
}

/* Quotes end a text, and there is no way to escape one. */
static void put_text(FILE *out, const char *s)
{
	putc('"', out);
	for (; *s; s++)
		putc(*s == '"' || (unsigned char)*s < 32 ? '_' : *s, out);
	putc('"', out);
}

/* Seconds, to the nanosecond. */
static void put_event(struct paje *p, int event, int64_t time)
{
	uint64_t ns = time > p->from ? (uint64_t)(time - p->from) : 0;

	fprintf(p->out, "%d %llu.%09llu", event, (unsigned long long)(ns / 1000000000),
		(unsigned long long)(ns % 1000000000));
}

static void put_types(struct paje *p)
{
	static const char *const color[] = { "0.30 0.47 0.65", "0.95 0.56 0.17", "0.88 0.34 0.35",
					     "0.46 0.72 0.70", "0.35 0.63 0.31", "0.93 0.79 0.28",
					     "0.69 0.48 0.63", "1.00 0.62 0.65", "0.61 0.46 0.37" };
	FILE *out = p->out;

	fprintf(out, "%d MT 0 \"machine\"\n%d WT MT \"worker\"\n", DEFINE_CONTAINER,
		DEFINE_CONTAINER);
	fprintf(out, "%d ST WT \"task\"\n", DEFINE_STATE);
	fprintf(out, "%d VR MT \"ready tasks\" \"0 0 0\"\n", DEFINE_VARIABLE);
	for (int i = 0; i < p->trace->n_purposes; i++) {
		fprintf(out, "%d VM%d MT ", DEFINE_VARIABLE, i);
		put_text(out, p->trace->purpose[i]);
		fputs(" \"0 0 0\"\n", out);
	}
	fprintf(out, "%d L MT WT WT \"dependency\"\n", DEFINE_LINK);
	fprintf(out, "%d I ST \"idle\" \"0.90 0.90 0.90\"\n", DEFINE_VALUE);
	for (int i = 0; i < p->trace->n_kinds; i++) {
		fprintf(out, "%d K%d ST ", DEFINE_VALUE, i);
		put_text(out, p->trace->kind[i]);
		fprintf(out, " \"%s\"\n", color[(size_t)i % (sizeof color / sizeof *color)]);
	}
}

static void put_containers(struct paje *p, const int *tracks)
{
	put_event(p, CREATE, p->from);
	fputs(" M MT 0 \"machine\"\n", p->out);
	for (int w = 0; w < p->trace->n_workers; w++)
		for (int i = 0; i < tracks[w]; i++) {
			put_event(p, CREATE, p->from);
			fprintf(p->out, " W%d_%d WT M \"worker %d", w, i, w);
			fprintf(p->out, i ? ", overlapping (%d)\"\n" : "\"\n", i);
			put_event(p, IDLE, p->from);
			fprintf(p->out, " ST W%d_%d I\n", w, i);
		}
}

/* What happens, so that events can be sorted: `what` of the thing with this index. */
enum { AT_BEGIN, AT_END, AT_READY, AT_MEMORY, AT_LINK_FROM, AT_LINK_TO, AT_KINDS };

struct events {
	struct trace_key *key;
	uint32_t n;
};

static uint32_t pack(uint32_t index, int what)
{
	return index * AT_KINDS + (uint32_t)what;
}

static void add(struct events *e, int64_t time, uint32_t index, int what)
{
	e->key[e->n++] = (struct trace_key){ time, pack(index, what) };
}

static void put_begin(struct paje *p, uint32_t task)
{
	const struct trace_task *k = p->trace->task + task;

	put_event(p, SET_STATE, k->start);
	fprintf(p->out, " ST W%d_%d K%d %lld %d %d %d %d \"%s\" %lld\n", k->worker, p->track[task],
		k->kind, (long long)k->id, k->step, k->layer, k->group, k->micro,
		trace_named(moe_mxt_phase_name(k->phase)),
		(long long)(k->rows == MOE_MXT_NA ? -1 : k->rows));
}

static void put_link(struct paje *p, uint32_t edge, uint32_t task, bool from)
{
	const struct trace_task *k = p->trace->task + task;

	put_event(p, from ? START_LINK : END_LINK, from ? k->stop : k->start);
	fprintf(p->out, " L M W%d_%d dependency %u\n", k->worker, p->track[task], edge);
}

struct sources {
	struct trace_change *ready, *memory;
	uint32_t n_ready, n_memory;
	uint32_t *owner; /* task of a dependency */
};

static void put_one(struct paje *p, const struct sources *s, const struct trace_key *event)
{
	const struct trace *t = p->trace;
	uint32_t i = event->value / AT_KINDS;

	switch (event->value % AT_KINDS) {
	case AT_BEGIN:
		put_begin(p, i);
		break;
	case AT_END:
		put_event(p, IDLE, event->key);
		fprintf(p->out, " ST W%d_%d I\n", t->task[i].worker, p->track[i]);
		break;
	case AT_READY:
		put_event(p, SET_VARIABLE, event->key);
		fprintf(p->out, " VR M %lld\n", (long long)s->ready[i].value);
		break;
	case AT_MEMORY:
		put_event(p, SET_VARIABLE, event->key);
		fprintf(p->out, " VM%d M %lld\n", s->memory[i].what, (long long)s->memory[i].value);
		break;
	case AT_LINK_FROM:
		put_link(p, i, t->pred[i], true);
		break;
	case AT_LINK_TO:
		put_link(p, i, s->owner[i], false);
		break;
	}
}

/* The sort is stable: on a worker, the order of adding is kept where times are equal. */
static void gather(const struct trace_export *x, const struct sources *s, struct events *e)
{
	const struct trace *t = x->trace;

	for (uint32_t i = 0; i < t->n_tasks; i++)
		for (uint32_t d = t->task[i].first_pred;
		     d < t->task[i].first_pred + t->task[i].n_pred; d++)
			if (x->arrow[d]) {
				s->owner[d] = i;
				add(e, t->task[t->pred[d]].stop, d, AT_LINK_FROM);
				add(e, t->task[i].start, d, AT_LINK_TO);
			}
	for (uint32_t i = 0; i < t->n_tasks; i++) {
		add(e, t->task[t->by_worker[i]].start, t->by_worker[i], AT_BEGIN);
		add(e, t->task[t->by_worker[i]].stop, t->by_worker[i], AT_END);
	}
	for (uint32_t i = 0; i < s->n_ready; i++)
		add(e, s->ready[i].time, i, AT_READY);
	for (uint32_t i = 0; i < s->n_memory; i++)
		add(e, s->memory[i].time, i, AT_MEMORY);
}

static int put_events(struct paje *p, const struct trace_export *x, const int *tracks)
{
	const struct trace *t = x->trace;
	struct sources s = { .n_ready = 0 };
	struct events e = { .n = 0 };
	int rc = -1;

	s.ready = trace_ready_changes(t, &s.n_ready);
	s.memory = trace_memory_changes(t, &s.n_memory);
	s.owner = malloc(((size_t)t->n_preds + 1) * sizeof *s.owner);
	e.key = malloc(
		((size_t)t->n_tasks * 2 + s.n_ready + s.n_memory + 2 * (size_t)x->n_arrows + 1) *
		sizeof *e.key);
	if (!s.ready || !s.memory || !s.owner || !e.key)
		goto fail;
	gather(x, &s, &e);
	if (!trace_sort(e.key, e.n))
		goto fail;
	if (e.n)
		p->from = e.key[0].key;
	put_containers(p, tracks);
	for (uint32_t i = 0; i < e.n; i++)
		put_one(p, &s, e.key + i);
	put_event(p, DESTROY, e.n ? e.key[e.n - 1].key : p->from);
	fputs(" MT M\n", p->out);
	rc = 0;
fail:
	free(s.ready);
	free(s.memory);
	free(s.owner);
	free(e.key);
	return rc;
}

static int write_paje(const struct trace_export *x, const char *path, char *error, size_t size)
{
	struct paje p = { .trace = x->trace };
	struct trace_output o;
	int *tracks = NULL, rc = -1;
	uint8_t *track;

	if (x->trace->n_preds >= UINT32_MAX / AT_KINDS ||
	    x->trace->n_tasks >= UINT32_MAX / AT_KINDS / 2) {
		snprintf(error, size,
			 "too many tasks or dependencies for paje; use --step or --time");
		return -1;
	}
	if (trace_output_open(&o, path, error, size))
		return -1;
	track = trace_tracks(x->trace, &tracks);
	p.out = o.file;
	p.track = track;
	put_head(p.out);
	put_types(&p);
	if (track)
		rc = put_events(&p, x, tracks);
	if (rc)
		snprintf(error, size, "out of memory");
	free(track);
	free(tracks);
	if (trace_output_close(&o, rc == 0, error, size))
		rc = -1;
	return rc;
}

const struct trace_exporter trace_exporter_paje = {
	.name = "paje",
	.summary = "for ViTE, pajeng (pj_dump) and StarVZ",
	.suffix = ".paje",
	.arrows = TRACE_ARROWS_NONE,
	.write = write_paje,
};
