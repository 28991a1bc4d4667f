/* SPDX-License-Identifier: Apache-2.0 */
#include "graphs/backward_mode.h"

#include "engine/size.h"

#include <stdio.h>
#include <stdlib.h>

#define DEFAULT_RING 2
#define MAX_RING 1024
#define WORTH_MEMORY 0.98
/* What a second copy of all weights must gain; a smaller one in proportion. */
#define PRICE_OF_WEIGHTS 0.10
/* Idle share of a pipelined backward that late work can fill (measured: 2-3 %). */
#define IDLE_SHARE 0.02

static const char *const names[MOE_BACKWARD_MODES] = { "direct", "shared", "resident" };

enum moe_status moe_backward_mode_parse(const char *text, enum moe_backward_mode *mode, int *ring)
{
	size_t n = strcspn(text, ":");

	for (int i = 0; i < MOE_BACKWARD_MODES; i++) {
		char *end = NULL;
		long v = DEFAULT_RING;

		if (strlen(names[i]) != n || strncmp(text, names[i], n))
			continue;
		if (text[n] && i == MOE_BACKWARD_SHARED)
			v = strtol(text + n + 1, &end, 10);
		if ((text[n] && i != MOE_BACKWARD_SHARED) ||
		    (end && (*end || end == text + n + 1)) || v < 1 || v > MAX_RING)
			break;
		*mode = (enum moe_backward_mode)i;
		*ring = (int)v;
		return MOE_OK;
	}
	return moe_fail(
		MOE_ERR_CONFIG,
		"backward weights \"%s\"; possible are direct, shared:N (N layers) and resident",
		text);
}

/* All experts' backward GEMMs of a layer at the rates of a direction, dealt out to the workers. */
static double gemms_us(const struct moe_load *l, const struct moe_machine *m, enum moe_gemm rate)
{
	double rows = moe_load_rows(l), I = (double)l->I / l->P, us;

	us = moe_cost_gemm_us(m, rate, rows, l->H, I, l->weight_bytes) +
	     moe_cost_gemm_us(m, rate, rows, 2 * I, l->H, l->weight_bytes);
	return us * moe_load_active(l) * l->P / m->workers;
}

static void predict(const struct moe_backward_params *p, const struct moe_load *l,
		    const struct moe_machine *m, struct moe_backward_choice *c)
{
	struct moe_backward_cost *direct = &c->cost[MOE_BACKWARD_DIRECT];
	struct moe_backward_cost *shared = &c->cost[MOE_BACKWARD_SHARED];
	struct moe_backward_cost *resident = &c->cost[MOE_BACKWARD_RESIDENT];
	double bytes = 3.0 * l->E * (double)l->I * l->H * l->weight_bytes;
	int layers = MOE_MAX(p->layers, 1);

	direct->us = gemms_us(l, m, MOE_GEMM_BACKWARD);
	resident->us = shared->us = gemms_us(l, m, MOE_GEMM_FORWARD);
	resident->bytes = (int64_t)(bytes * layers);
	shared->bytes = (int64_t)(bytes * MOE_MIN(c->ring, layers));
	/* a ring that holds every layer is filled once for good: frozen weights stay as they are */
	if (c->ring < layers || p->refilled)
		shared->repack_us =
			moe_cost_pack_us(m, bytes * moe_load_active(l) / l->E) / m->workers;
	/* with one buffer the next repack waits for its last reader: nothing is hidden */
	if (c->ring > 1)
		shared->hidden_us = MOE_MIN(shared->repack_us, IDLE_SHARE * shared->us);
	shared->us += shared->repack_us - shared->hidden_us;
}

/* Predicted time with what its memory should gain. */
static double priced(const struct moe_backward_choice *c, int mode)
{
	double all = (double)c->cost[MOE_BACKWARD_RESIDENT].bytes;

	return c->cost[mode].us * (1 + PRICE_OF_WEIGHTS * (double)c->cost[mode].bytes / all);
}

void moe_backward_choose(const struct moe_backward_params *p, const struct moe_machine *m,
			 struct moe_backward_choice *out)
{
	struct moe_load l = p->load;
	struct moe_machine own = *m;

	/* all of the machine, whatever this engine has: bits depend on the mode, and not on worker counts */
	own.workers = MOE_MAX(m->cpus, 1);
	if (!(l.weight_bytes > 0))
		l.weight_bytes = 2;
	memset(out, 0, sizeof *out);
	out->ring = p->ring > 0 ? p->ring : DEFAULT_RING;
	if (p->refilled) /* more buffers than layers are of no use */
		out->ring = MOE_MIN(out->ring, MOE_MAX(p->layers, 1));
	out->memory = p->memory;
	predict(p, &l, &own, out);
	for (int i = 0; i < MOE_BACKWARD_MODES; i++) {
		struct moe_backward_cost *c = &out->cost[i], *best = &out->cost[out->mode];
		double worth = c->bytes > best->bytes ? WORTH_MEMORY : 1;

		c->fits = p->memory < 0 || c->bytes <= p->memory;
		if (c->fits && priced(out, i) < worth * priced(out, (int)out->mode))
			out->mode = (enum moe_backward_mode)i;
	}
}

static enum moe_status check_choice(const struct moe_backward_choice *c, const char *text)
{
	const struct moe_backward_cost *cost = &c->cost[c->mode];

	if (c->mode != MOE_BACKWARD_DIRECT && c->only_direct)
		return moe_fail(MOE_ERR_UNSUPPORTED,
				"backward weights \"%s\": the %s kernels have no transposed copies, only direct is "
				"possible", text, moe_kernels()->name);
	if (!cost->fits)
		return moe_fail(MOE_ERR_NOFIT,
				"backward weights \"%s\" take %s more, %s are left; direct takes none",
				text, moe_size(cost->bytes).text, moe_size(c->memory).text);
	return MOE_OK;
}

enum moe_status moe_backward_select(const char *text, const struct moe_backward_params *p,
				    const struct moe_machine *m, struct moe_backward_choice *out)
{
	bool automatic = !text || !strcmp(text, "auto"), only_direct = !moe_kernels()->weight_transpose;
	struct moe_backward_params params = *p;
	enum moe_backward_mode mode = MOE_BACKWARD_DIRECT;

	if (!automatic)
		MOE_TRY(moe_backward_mode_parse(text, &mode, &params.ring));
	moe_backward_choose(&params, m, out);
	out->only_direct = only_direct;
	if (!automatic)
		out->mode = mode;
	else if (only_direct)
		out->mode = MOE_BACKWARD_DIRECT;
	MOE_TRY(check_choice(out, text));
	if (out->mode == MOE_BACKWARD_SHARED && out->ring >= p->layers && !p->refilled)
		out->mode = MOE_BACKWARD_RESIDENT;
	return MOE_OK;
}

char *moe_backward_text(const struct moe_backward_choice *c, char *buf, size_t size)
{
	snprintf(buf, size, c->mode == MOE_BACKWARD_SHARED ? "%s:%d" : "%s", names[c->mode], c->ring);
	return buf;
}

char *moe_backward_explain(const struct moe_backward_choice *c, char *buf, size_t size)
{
	size_t at = 0;

	for (int i = 0; i < MOE_BACKWARD_MODES && at < size; i++) {
		const struct moe_backward_cost *cost = &c->cost[i];
		char name[24], more[96] = "";

		snprintf(name, sizeof name, i == MOE_BACKWARD_SHARED ? "%s:%d" : "%s", names[i],
			 c->ring);
		if (i == MOE_BACKWARD_SHARED)
			snprintf(more, sizeof more, ", repack %.0f us, of it %.0f us hidden",
				 cost->repack_us, cost->hidden_us);
		at += (size_t)snprintf(
			buf + at, size - at, "%c %-10s %10.0f us %10.0f MiB more%s%s\n",
			i == (int)c->mode ? '*' : ' ', name, cost->us, (double)cost->bytes / 0x1p20,
			more,
			i && c->only_direct ? ", not with these kernels"
			: cost->fits	    ? ""
					    : ", does not fit");
	}
	return buf;
}
