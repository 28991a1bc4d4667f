/* SPDX-License-Identifier: Apache-2.0 */
/* Which machine this is, which rates it has, and who says so. */
#include "api/machine.h"

#include "codelets/kernels/kernels.h"
#include "model/file.h"

#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

struct lookup {
	char *path, *why; /* why: of OTHER and BAD */
	bool named;
	enum moe_machine_file state;
	enum moe_status bad; /* of BAD */
	struct moe_machine_rates_file file;
};

static void lookup_free(struct lookup *l)
{
	moe_free(l->path);
	moe_free(l->why);
}

/* Fails only without memory. */
static enum moe_status look_up(struct lookup *l)
{
	enum moe_status st;

	memset(l, 0, sizeof *l);
	MOE_TRY(moe_machine_file_path(&l->path, &l->named));
	if (!l->path || (!l->named && access(l->path, R_OK)))
		return MOE_OK;
	st = moe_machine_file_read(l->path, &l->file);
	if (st == MOE_ERR_NOMEM) {
		lookup_free(l);
		return st;
	}
	if (st != MOE_OK) {
		l->state = MOE_MACHINE_FILE_BAD;
		l->bad = st;
		l->why = moe_strdup(moe_last_error());
	} else if (moe_machine_file_fits(&l->file, &l->why)) {
		l->state = MOE_MACHINE_FILE_USED;
	} else {
		l->state = MOE_MACHINE_FILE_OTHER;
	}
	if (l->state != MOE_MACHINE_FILE_USED && !l->why) {
		lookup_free(l);
		return moe_fail(MOE_ERR_NOMEM, "no memory for a text");
	}
	return MOE_OK;
}

/* The rates for a table; what was not calibrated is guessed at the measured clock. */
static void rates_for(const struct lookup *l, const char *isa, struct moe_machine *out)
{
	const struct moe_rates *measured;

	if (l->state != MOE_MACHINE_FILE_USED) {
		moe_machine_defaults(isa, moe_machine_clock_guess(), moe_machine_cpus(), out);
		return;
	}
	*out = l->file.machine;
	measured = moe_machine_file_rates(&l->file, isa);
	if (measured)
		out->rates = *measured;
	else
		moe_rates_defaults(isa, out->clock_ghz, &out->rates);
}

/* Models and blocks may be opened often: the same text is said once. */
static void say(enum moe_log_level level, const char *text)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static char said[600];
	bool again;

	pthread_mutex_lock(&lock);
	again = !strncmp(said, text, sizeof said - 1);
	snprintf(said, sizeof said, "%s", text);
	pthread_mutex_unlock(&lock);
	if (!again)
		moe_log(level, "%s", text);
}

static void say_state(const struct lookup *l, const struct moe_machine *m)
{
	char text[600];

	switch (l->state) {
	case MOE_MACHINE_FILE_NONE:
		return;
	case MOE_MACHINE_FILE_BAD:
		snprintf(text, sizeof text,
			 "%s; guessed rates are used (moesaic doctor --calibrate)", l->why);
		say(MOE_LOG_WARNING, text);
		return;
	case MOE_MACHINE_FILE_OTHER:
		snprintf(text, sizeof text, "%s is not used: %s (moesaic doctor --calibrate)",
			 l->path, l->why);
		say(MOE_LOG_WARNING, text);
		return;
	case MOE_MACHINE_FILE_USED:
		snprintf(text, sizeof text, "%s, calibrated %s%s%s", l->path, m->date,
			 m->rates.measured ? "" : ", has no rates of table ",
			 m->rates.measured ? "" : m->rates.isa);
		say(MOE_LOG_INFO, text);
	}
}

enum moe_status moe_machine_use(const struct moe_engine *e)
{
	int workers = moe_engine_is_dry(e) ? moe_machine()->workers : moe_engine_workers(e);
	struct moe_machine m;
	struct lookup l;
	enum moe_status st;

	MOE_TRY(moe_compute_check());
	MOE_TRY(moe_kernels_select(moe_engine_isa(e)));
	if (!moe_engine_is_dry(e)) /* another table than at moe_engine_open where MOESAIC_ISA has changed */
		MOE_TRY(moe_kernels_enable(moe_kernels()));
	MOE_TRY(look_up(&l));
	if (l.state == MOE_MACHINE_FILE_BAD && l.named) {
		st = moe_fail(l.bad, "MOESAIC_MACHINE: %s", l.why);
	} else {
		rates_for(&l, moe_kernels()->name, &m);
		m.workers = MOE_MAX(workers, 1);
		say_state(&l, &m);
		st = moe_machine_set(&m);
	}
	lookup_free(&l);
	return st;
}

/* ---- describing ---- */

static void describe_table(const struct lookup *l, const struct moe_kernels *k,
			   const struct moe_kernels *chosen, struct moe_machine_isa *out)
{
	struct moe_machine m;

	rates_for(l, k->name, &m);
	*out = (struct moe_machine_isa){
		.name = k->name,
		.supported = k->supported(),
		.chosen = k == chosen,
		.measured = m.rates.measured,
		.peak_gflops = m.rates.peak_gflops,
		.pack_gbps = m.rates.pack_gbps,
	};
	memcpy(out->forward_gflops, m.rates.gemm_gflops[MOE_GEMM_FORWARD],
	       sizeof out->forward_gflops);
	memcpy(out->backward_gflops, m.rates.gemm_gflops[MOE_GEMM_BACKWARD],
	       sizeof out->backward_gflops);
}

static void describe_rates(const struct lookup *l, struct moe_machine_info *out)
{
	const struct moe_kernels *chosen = NULL;
	struct moe_machine m;

	if (moe_kernels_choose(NULL, &chosen) != MOE_OK)
		snprintf(out->isa_error, sizeof out->isa_error, "%s", moe_last_error());
	rates_for(l, chosen ? chosen->name : "ref", &m);
	snprintf(out->date, sizeof out->date, "%s", m.date);
	out->load = m.load;
	out->clock_ghz = m.clock_ghz;
	out->read_gbps = m.read_gbps;
	out->read_all_gbps = m.read_all_gbps;
	out->copy_gbps = m.copy_gbps;
	out->task_us = m.task_us;
	out->task_all_us = m.task_all_us;
	out->submit_us = m.submit_us;
	for (int i = 0; moe_kernels_list[i] && out->n_isas < MOE_MACHINE_ISAS; i++) {
		const struct moe_kernels *k = moe_kernels_list[i];

		if (k->rank >= 0 || k == chosen) /* the others are for tests */
			describe_table(l, k, chosen, &out->isa[out->n_isas++]);
	}
}

static enum moe_status describe(const struct lookup *l, struct moe_machine_info *out)
{
	struct moe_host host;

	if (!out || out->struct_size < sizeof *out)
		return moe_fail(MOE_ERR_ARG, "machine info: struct_size is not set");
	*out = (struct moe_machine_info){ .struct_size = sizeof *out };
	MOE_TRY(moe_host_describe(&host));
	moe_machine_cpu(out->cpu, sizeof out->cpu);
	out->cpus = moe_machine_cpus();
	out->cores = host.cores;
	out->sockets = host.sockets;
	out->nodes = host.nodes;
	out->fake_topology = host.fake;
	memcpy(out->starpu_version, host.starpu_version, sizeof out->starpu_version);
	out->starpu_max_workers = host.starpu_max_workers;
	out->starpu_max_nodes = host.starpu_max_nodes;
	out->starpu_max_buffers = host.starpu_max_buffers;
	out->workers = MOE_MIN(host.cores, host.starpu_max_workers);
	snprintf(out->file, sizeof out->file, "%s", l->path ? l->path : "");
	out->file_state = l->state;
	out->file_named = l->named;
	if (l->why)
		snprintf(out->file_error, sizeof out->file_error, "%s", l->why);
	describe_rates(l, out);
	return MOE_OK;
}

enum moe_status moe_machine_describe(struct moe_machine_info *out)
{
	struct lookup l;
	enum moe_status st;

	MOE_TRY(look_up(&l));
	st = describe(&l, out);
	lookup_free(&l);
	return st;
}

enum moe_status moe_machine_describe_file(const struct moe_machine_rates_file *f, const char *path,
					  struct moe_machine_info *out)
{
	struct lookup l = { .state = MOE_MACHINE_FILE_USED, .file = *f };
	enum moe_status st;

	l.path = moe_strdup(path ? path : "");
	if (!l.path)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a path");
	st = describe(&l, out);
	lookup_free(&l);
	return st;
}
