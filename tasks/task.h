/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Task functions: one per kind (tasks/kinds.def). Each checks its arguments, names its tensors with
 * their modes, sets priority and tag, and submits. Called between moe_submit_begin and _end.
 */
#ifndef MOE_TASKS_TASK_H
#define MOE_TASKS_TASK_H

#include "engine/engine.h"

enum moe_kind {
#define MOE_KIND(name) MOE_KIND_##name,
#include "tasks/kinds.def"
#undef MOE_KIND
	MOE_KIND_COUNT
};

/* What a graph says about the tasks it is submitting. */
struct moe_context {
	struct moe_engine *engine;
	struct moe_ticket *ticket; /* may be NULL */
	int layer, micro, step;	   /* for the tag; layer -1: none */
	enum moe_phase phase;
	int priority;		   /* of the main chain here: deeper is higher */
	bool streams;		   /* as in struct moe_task_desc; set by the functions of such kinds */
};

/* Between the main chains of neighbouring layers. */
#define MOE_PRIORITY_LAYER 8
/* Below every main-chain task: fills bubbles. */
#define MOE_PRIORITY_FILL (-100000)
/* An update that the next step waits for: above fill, by layer. */
#define MOE_PRIORITY_UPDATE (-50000)

/* Collects accesses; too many are an error of the submission, not of the list. */
struct moe_access_list {
	struct moe_access item[MOE_MAX_TASK_HANDLES + 1];
	int n;
};

/* NULL tensors are skipped: an absent handle means an absent dependency. */
static inline void moe_access_add(struct moe_access_list *l, struct moe_tensor *t, enum moe_mode mode)
{
	if (!t || l->n > MOE_MAX_TASK_HANDLES)
		return;
	l->item[l->n].tensor = t;
	l->item[l->n].mode = mode;
	l->n++;
}

static inline void moe_access_add_all(struct moe_access_list *l, struct moe_tensor *const *t, int n, enum moe_mode mode)
{
	for (int i = 0; i < n; i++)
		moe_access_add(l, t[i], mode);
}

struct moe_where {
	int group, slice, part; /* -1: none, any */
};

enum moe_status moe_task_submit(const struct moe_context *c, enum moe_kind kind,
				struct moe_codelet *codelet, const void *args, size_t args_size,
				const struct moe_access_list *access, struct moe_where where,
				int priority);

#endif
