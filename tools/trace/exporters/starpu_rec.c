/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What starpu_replay reads: FOLDER/tasks.rec, and in FOLDER/sampling a performance model per kind
 * in which every task has a footprint of its own, so that a simulated task takes as long as the
 * recorded one. STARPU_PERF_MODEL_DIR=FOLDER/sampling STARPU_HOSTNAME=moesaic starpu_replay
 * FOLDER/tasks.rec
 */
#include "tools/trace/exporter.h"
#include "tools/trace/output.h"

#include <stdlib.h>
#include <string.h>

#define HOST "moesaic"
#define MODEL_VERSION "45" /* of StarPU 1.3's files */
#define SAMPLES 20	   /* StarPU trusts an entry from 10 on */

static void put_task(FILE *out, const struct trace *t, uint32_t i)
{
	const struct trace_task *k = t->task + i;
	const char *kind = t->kind[k->kind];

	fprintf(out, "Name: %s\nModel: %s\nJobId: %u\nSubmitOrder: %u\nPriority: 0\n", kind, kind,
		i + 1, i + 1);
	if (k->n_pred)
		fputs("DependsOn:", out);
	for (uint32_t e = k->first_pred; e < k->first_pred + k->n_pred; e++)
		fprintf(out, " %u", t->pred[e] + 1);
	if (k->n_pred)
		putc('\n', out);
	fprintf(out, "Tag: 0\nWorkerId: %d\nMemoryNode: 0\n", k->worker);
	fprintf(out, "SubmitTime: %.6f\nStartTime: %.6f\nEndTime: %.6f\nFootprint: %x\n",
		(double)trace_submit(t, i) / 1e6, (double)k->start / 1e6, (double)k->stop / 1e6,
		i + 1);
	if (k->flops != MOE_MXT_NA)
		fprintf(out, "GFlop: %.6f\n", (double)k->flops / 1e9);
	if (k->step > 0)
		fprintf(out, "Iteration: %d\n", k->step);
	fprintf(out, "Parameters: layer %d group %d micro %d rows %lld\n", k->layer, k->group,
		k->micro, (long long)(k->rows == MOE_MXT_NA ? -1 : k->rows));
	/* A handle of its own, so that the dependencies are those listed and no others. */
	fprintf(out, "Handles: %x\nModes: RW\nSizes: 4096\nMPIRank: -1\n\n", 0x1000 + i);
}

static int write_tasks(const struct trace *t, const char *folder, char *error, size_t size)
{
	struct trace_output o;

	if (trace_output_open_in(&o, folder, "tasks.rec", error, size))
		return -1;
	for (uint32_t i = 0; i < t->n_tasks; i++)
		put_task(o.file, t, i);
	return trace_output_close(&o, true, error, size);
}

/* One device, one implementation; entries by footprint. */
static void put_model(FILE *out, const struct trace *t, int kind, uint32_t entries)
{
	fprintf(out,
		"##################\n# Performance Model Version\n%s\n\n####################\n"
		"# COMBs\n# number of combinations\n1\n####################\n# COMB_0\n"
		"# number of types devices\n1\n####################\n# DEV_0\n"
		"# device type (CPU - 0, CUDA - 1, OPENCL - 2, MIC - 3, MPI_MS - 5)\n0\n"
		"####################\n# DEV_0\n# device id \n0\n####################\n# DEV_0\n"
		"# number of cores \n1\n##########\n# number of implementations\n1\n#####\n"
		"# Model for cpu0_impl0 (Comb0)\n# number of entries\n%u\n",
		MODEL_VERSION, entries);
	fputs("# sumlnx\tsumlnx2\t\tsumlny\t\tsumlnxlny\talpha\t\tbeta\t\tn\tminx\t\tmaxx\n"
	      "0 0 0 0 nan nan 0 0 0\n# a\t\tb\t\tc\nnan nan nan\n# not "
	      "multiple-regression-base\n0\n"
	      "# hash\t\tsize\t\tflops\t\tmean (us)\tdev (us)\tsum\t\tsum2\t\tn\n",
	      out);
	for (uint32_t i = 0; i < t->n_tasks; i++) {
		double us = (double)trace_duration(t, i) / 1e3;

		if (t->task[i].kind == kind)
			fprintf(out, "%08x\t4096\t%e\t%e\t0.0\t%e\t%e\t%d\n", i + 1,
				t->task[i].flops == MOE_MXT_NA ? 0.0 : (double)t->task[i].flops, us,
				us * SAMPLES, us * us * SAMPLES, SAMPLES);
	}
	putc('\n', out);
}

static int write_model(const struct trace *t, int kind, uint32_t entries, const char *folder,
		       char *error, size_t size)
{
	char name[160];
	struct trace_output o;

	snprintf(name, sizeof name, "%s." HOST, t->kind[kind]);
	for (char *p = name; *p; p++)
		if (*p == '/')
			*p = '_';
	if (trace_output_open_in(&o, folder, name, error, size))
		return -1;
	put_model(o.file, t, kind, entries);
	return trace_output_close(&o, true, error, size);
}

static int write_models(const struct trace *t, const char *folder, char *error, size_t size)
{
	uint32_t *entries = calloc((size_t)t->n_kinds + 1, sizeof *entries);
	int rc = entries ? 0 : -1;

	if (rc)
		snprintf(error, size, "out of memory");
	for (uint32_t i = 0; rc == 0 && i < t->n_tasks; i++)
		entries[t->task[i].kind]++;
	for (int k = 0; rc == 0 && k < t->n_kinds; k++)
		if (entries[k])
			rc = write_model(t, k, entries[k], folder, error, size);
	free(entries);
	return rc;
}

static int write_rec(const struct trace_export *x, const char *path, char *error, size_t size)
{
	char *models = trace_output_join(path, "sampling/codelets/" MODEL_VERSION);
	int rc = -1;

	if (!models)
		snprintf(error, size, "out of memory");
	else
		rc = trace_output_folder(models, error, size);
	if (rc == 0)
		rc = write_tasks(x->trace, path, error, size);
	if (rc == 0)
		rc = write_models(x->trace, models, error, size);
	free(models);
	return rc;
}

const struct trace_exporter trace_exporter_starpu_rec = {
	.name = "starpu-rec",
	.summary = "a folder with tasks.rec and performance models for starpu_replay",
	.suffix = "-starpu",
	.arrows = TRACE_ARROWS_NONE,
	.write = write_rec,
};
