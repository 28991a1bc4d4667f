/* SPDX-License-Identifier: Apache-2.0 */
/* What a trace says about the machine and the engine; docs/trace-format.md lists the keys. */
#include "engine/machine.h"
#include "engine/points.h"
#include "engine/recorder.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#ifndef MOESAIC_REVISION
#define MOESAIC_REVISION "unknown"
#endif

static void put_host(struct moe_mxt_text *t)
{
	char cpu[MOE_MACHINE_TEXT], governor[64] = "";
	double load;
	struct utsname u;
	FILE *f = fopen("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "r");

	if (uname(&u) == 0) {
		moe_mxt_put_text(t, "host.name", u.nodename);
		moe_mxt_put_format(t, "host.kernel", "%s %s %s", u.sysname, u.release, u.machine);
	}
	moe_mxt_put_text(t, "host.cpu", moe_machine_cpu(cpu, sizeof cpu));
	moe_mxt_put_format(t, "host.cpus", "%d", moe_machine_cpus());
	if (f && fscanf(f, "%63s", governor) == 1)
		moe_mxt_put_text(t, "host.governor", governor);
	if (f)
		fclose(f);
	if (getloadavg(&load, 1) == 1)
		moe_mxt_put_format(t, "host.load", "%.2f", load);
	moe_mxt_put_format(t, "pid", "%ld", (long)getpid());
}

static void put_workers(const struct moe_engine *e, struct moe_mxt_text *t)
{
	char key[40];

	moe_mxt_put_format(t, "workers", "%d", e->n_workers);
	for (int w = 0; w < e->n_workers; w++) {
		snprintf(key, sizeof key, "worker.%d.node", w);
		moe_mxt_put_format(t, key, "%d", moe_engine_worker_node(e, w));
		snprintf(key, sizeof key, "worker.%d.cpu", w);
		moe_mxt_put_format(t, key, "%d",
				   e->topology.fake ? -1 : moe_engine_worker_cpu(e, w));
	}
}

static void put_parts(const struct moe_engine *e, struct moe_mxt_text *t)
{
	char key[40], list[8 * STARPU_NMAXWORKERS + 1];

	moe_mxt_put_format(t, "parts", "%d", e->n_parts);
	for (int p = 0; p < e->n_parts; p++) {
		size_t at = 0;

		list[0] = 0;
		for (int w = 0; w < e->n_workers; w++)
			if (moe_engine_part_has_worker(e, p, w))
				at += (size_t)snprintf(list + at, sizeof list - at, "%s%d",
						       at ? "," : "", w);
		snprintf(key, sizeof key, "part.%d.node", p);
		moe_mxt_put_format(t, key, "%d", e->parts[p].node);
		snprintf(key, sizeof key, "part.%d.workers", p);
		moe_mxt_put_text(t, key, list);
	}
}

static void put_rates(struct moe_mxt_text *t)
{
	const struct moe_machine *m = moe_machine();

	moe_mxt_put_format(t, "rates.measured", "%d", m->date[0] != 0);
	moe_mxt_put_text(t, "rates.isa", m->rates.isa);
	moe_mxt_put_format(t, "rates.read_gbps", "%g", m->read_gbps);
	moe_mxt_put_format(t, "rates.read_all_gbps", "%g", m->read_all_gbps);
	if (m->rates.peak_gflops > 0)
		moe_mxt_put_format(t, "rates.peak_gflops", "%g", m->rates.peak_gflops);
	moe_mxt_put_format(t, "rates.task_us", "%g", m->task_us);
	moe_mxt_put_format(t, "rates.submit_us", "%g", m->submit_us);
}

void moe_recorder_header(const struct moe_recorder *rec, struct moe_mxt_text *t)
{
	const struct moe_engine *e = rec->engine;
	void *before = moe_points_enter();
	struct timespec real;
	int version[3];

	clock_gettime(CLOCK_REALTIME, &real);
	starpu_get_version(&version[0], &version[1], &version[2]);
	moe_mxt_put_text(t, "moesaic.version", MOE_VERSION_STRING);
	moe_mxt_put_text(t, "moesaic.revision", MOESAIC_REVISION);
	moe_mxt_put_format(t, "starpu.version", "%d.%d.%d", version[0], version[1], version[2]);
	moe_mxt_put_format(t, "origin.monotonic_ns", "%lld", (long long)rec->origin);
	moe_mxt_put_format(t, "origin.realtime_ns", "%lld",
			   (long long)real.tv_sec * 1000000000 + real.tv_nsec -
				   (long long)(moe_now_ns() - rec->origin));
	put_host(t);
	moe_mxt_put_format(t, "topology.nodes", "%d", e->topology.nodes);
	moe_mxt_put_format(t, "topology.cores", "%d", e->topology.cpus);
	moe_mxt_put_format(t, "topology.fake", "%d", e->topology.fake);
	put_workers(e, t);
	put_parts(e, t);
	moe_mxt_put_text(t, "policy", e->policy);
	moe_mxt_put_text(t, "placement",
			 e->params.placement == MOE_PLACEMENT_STRICT ? "strict" : "soft");
	put_rates(t);
	moe_mxt_put_text(t, "hardware", rec->hardware_text);
	moe_points_leave(before);
}
