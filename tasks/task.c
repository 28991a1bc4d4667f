/* SPDX-License-Identifier: Apache-2.0 */
#include "tasks/task.h"

static const char *const kind_names[MOE_KIND_COUNT] = {
#define MOE_KIND(name) #name,
#include "tasks/kinds.def"
#undef MOE_KIND
};

const char *moe_kind_name(int kind)
{
	return kind >= 0 && kind < MOE_KIND_COUNT ? kind_names[kind] : NULL;
}

enum moe_status moe_task_submit(const struct moe_context *c, enum moe_kind kind,
				struct moe_codelet *codelet, const void *args, size_t args_size,
				const struct moe_access_list *access, struct moe_where where,
				int priority)
{
	struct moe_task_desc d = {
		.codelet = codelet,
		.args = args,
		.args_size = args_size,
		.access = access->item,
		.n_access = access->n,
		.priority = priority,
		.ticket = c->ticket,
		.streams = c->streams,
		.tag = { .kind = (int16_t)kind,
			 .layer = (int16_t)c->layer,
			 .group = (int16_t)where.group,
			 .slice = (int16_t)where.slice,
			 .part = (int16_t)where.part,
			 .micro = (int16_t)c->micro,
			 .phase = (int16_t)c->phase,
			 .step = c->step },
	};

	return moe_submit(c->engine, &d);
}
