/* SPDX-License-Identifier: Apache-2.0 */
/* Public traces: what the engine does not know goes into the header here. */
#include "codelets/kernels/kernels.h"
#include "engine/engine.h"

#define MAX_RING ((size_t)1 << 30)

/* "config.": what callers say cannot be taken for what we say. */
static enum moe_status add_config(const struct moe_trace_params *p, char **lines, int *n)
{
	for (int i = 0; i < p->n_config; i++) {
		if (!p->config[i] || !strchr(p->config[i], '='))
			return moe_fail(MOE_ERR_ARG, "trace: config[%d] is not \"key=value\"", i);
		lines[*n] = moe_format("config.%s", p->config[i]);
		if (!lines[(*n)++])
			return moe_fail(MOE_ERR_NOMEM, "no memory for a trace");
	}
	return MOE_OK;
}

/* isa NULL: the engine's default. The table is chosen when the first object is made: perhaps later. */
static enum moe_status add_kinds(int kinds, const char *isa, char **lines, int *n)
{
	const struct moe_kernels *table = NULL;

	moe_kernels_choose(isa, &table);
	lines[(*n)++] = moe_format("kinds=%d", kinds);
	for (int i = 0; i < kinds; i++)
		lines[(*n)++] = moe_format("kind.%d=%s", i, moe_kind_name(i));
	lines[(*n)++] = moe_format("isa=%s", table ? table->name : "unknown");
	for (int i = 0; i < *n; i++)
		if (!lines[i])
			return moe_fail(MOE_ERR_NOMEM, "no memory for a trace");
	return MOE_OK;
}

enum moe_status moe_trace_start(struct moe_engine *engine, const struct moe_trace_params *p)
{
	struct moe_recorder_params rp = { 0 };
	enum moe_status st = MOE_OK;
	int kinds = 0;
	char **lines;

	if (!p || p->struct_size < sizeof *p || !p->file || p->n_config < 0 ||
	    (p->n_config && !p->config))
		return moe_fail(MOE_ERR_ARG, "trace params: struct_size and file are needed");
	if (p->ring_bytes > MAX_RING)
		return moe_fail(MOE_ERR_ARG, "trace: ring_bytes is %zu; at most %zu are possible",
				p->ring_bytes, MAX_RING);
	MOE_TRY(moe_engine_check(engine));
	while (moe_kind_name(kinds))
		kinds++;
	lines = moe_calloc((size_t)(kinds + 2 + p->n_config), sizeof *lines);
	if (!lines)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a trace");
	rp.file = p->file;
	rp.header = lines;
	rp.ring_bytes = p->ring_bytes;
	rp.no_hardware = p->no_hardware;
	MOE_TRY_GOTO(add_kinds(kinds, moe_engine_isa(engine), lines, &rp.n_header), st, out);
	MOE_TRY_GOTO(add_config(p, lines, &rp.n_header), st, out);
	st = moe_recorder_start(engine, &rp);
out:
	for (int i = 0; i < rp.n_header; i++)
		moe_free(lines[i]);
	moe_free(lines);
	return st;
}

enum moe_status moe_trace_stop(struct moe_engine *engine, struct moe_trace_info *info)
{
	if (info && info->struct_size < sizeof *info)
		return moe_fail(MOE_ERR_ARG, "trace info: struct_size is not set");
	return moe_recorder_stop(engine, info);
}

void moe_trace_mark(struct moe_engine *engine, enum moe_trace_mark mark, int64_t step,
		    int64_t tokens, int64_t trained)
{
	if (moe_engine_check(engine) == MOE_OK && (unsigned)mark <= MOE_TRACE_STEP_END)
		moe_recorder_mark(engine, mark, step, tokens, trained);
}
