/* SPDX-License-Identifier: Apache-2.0 */
#include "model/machine_file.h"
#include "engine/points.h"
#include "model/file.h"
#include "model/json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define FORMAT "moesaic-machine-1"

enum moe_status moe_machine_file_path(char **path, bool *named)
{
	const char *name = getenv("MOESAIC_MACHINE"), *cache = getenv("XDG_CACHE_HOME");
	const char *home = getenv("HOME");

	*path = NULL;
	*named = name && *name;
	if (name && !*name)
		return MOE_OK;
	if (*named)
		*path = moe_strdup(name);
	else if (cache && *cache == '/') /* relative ones are to be ignored, says XDG */
		*path = moe_format("%s/moesaic/machine.json", cache);
	else if (home && *home)
		*path = moe_format("%s/.cache/moesaic/machine.json", home);
	else
		return MOE_OK;
	return *path ? MOE_OK : moe_fail(MOE_ERR_NOMEM, "no memory for a path");
}

/* The numbers beside the tables. */
static const struct {
	const char *key;
	size_t at;
} numbers[] = {
	{ "clock_ghz", offsetof(struct moe_machine, clock_ghz) },
	{ "read_gbps", offsetof(struct moe_machine, read_gbps) },
	{ "read_all_gbps", offsetof(struct moe_machine, read_all_gbps) },
	{ "copy_gbps", offsetof(struct moe_machine, copy_gbps) },
	{ "task_us", offsetof(struct moe_machine, task_us) },
	{ "task_all_us", offsetof(struct moe_machine, task_all_us) },
	{ "submit_us", offsetof(struct moe_machine, submit_us) },
};
static const char *const directions[MOE_GEMM_DIRECTIONS] = { "forward_gflops", "backward_gflops" };

static double *number_of(struct moe_machine *m, size_t i)
{
	return (double *)((char *)m + numbers[i].at);
}

/* ---- reading ---- */

static enum moe_status as_rate(const cJSON *v, const char *where, const char *key, double *out)
{
	if (!cJSON_IsNumber(v))
		return moe_fail(MOE_ERR_FORMAT, "%s%s is %s", where, key,
				v ? "not a number" : "missing");
	if (!isfinite(v->valuedouble) || !(v->valuedouble > 0))
		return moe_fail(MOE_ERR_FORMAT, "%s%s is %g; a rate is finite and above 0", where,
				key, v->valuedouble);
	*out = v->valuedouble;
	return MOE_OK;
}

static enum moe_status copy_text(const cJSON *obj, const char *key, char *out, size_t size)
{
	const cJSON *v = moe_json_get(obj, key);

	if (!cJSON_IsString(v) || !*v->valuestring || strlen(v->valuestring) >= size)
		return moe_fail(MOE_ERR_FORMAT, "%s is %s", key,
				v ? "not a text of the right length" : "missing");
	snprintf(out, size, "%s", v->valuestring);
	return MOE_OK;
}

static enum moe_status read_table(const cJSON *v, struct moe_rates *out)
{
	char where[MOE_MACHINE_NAME + 32];

	snprintf(where, sizeof where, "isa.%s.", out->isa);
	if (!cJSON_IsObject(v))
		return moe_fail(MOE_ERR_FORMAT, "isa.%s is not an object", out->isa);
	out->measured = true;
	if (moe_json_get(v, "peak_gflops"))
		MOE_TRY(as_rate(moe_json_get(v, "peak_gflops"), where, "peak_gflops",
				&out->peak_gflops));
	MOE_TRY(as_rate(moe_json_get(v, "pack_gbps"), where, "pack_gbps", &out->pack_gbps));
	for (int d = 0; d < MOE_GEMM_DIRECTIONS; d++) {
		const cJSON *list = moe_json_get(v, directions[d]);

		if (!cJSON_IsArray(list) || cJSON_GetArraySize(list) != MOE_RATE_POINTS)
			return moe_fail(MOE_ERR_FORMAT, "%s%s is not a list of %d rates", where,
					directions[d], MOE_RATE_POINTS);
		for (int i = 0; i < MOE_RATE_POINTS; i++) {
			char key[48];

			snprintf(key, sizeof key, "%s[%d]", directions[d], i);
			MOE_TRY(as_rate(cJSON_GetArrayItem(list, i), where, key,
					&out->gemm_gflops[d][i]));
		}
	}
	return MOE_OK;
}

static enum moe_status read_tables(const cJSON *root, struct moe_machine_rates_file *out)
{
	const cJSON *isa = moe_json_get(root, "isa"), *v;

	if (!cJSON_IsObject(isa))
		return moe_fail(MOE_ERR_FORMAT, "isa is %s", isa ? "not an object" : "missing");
	cJSON_ArrayForEach(v, isa)
	{
		struct moe_rates *r = &out->isa[out->n_isas];

		if (out->n_isas == MOE_MACHINE_ISAS || strlen(v->string) >= sizeof r->isa)
			return moe_fail(MOE_ERR_FORMAT, "isa has too many or too long names");
		snprintf(r->isa, sizeof r->isa, "%s", v->string);
		MOE_TRY(read_table(v, r));
		out->n_isas++;
	}
	return MOE_OK;
}

static enum moe_status read_root(const cJSON *root, struct moe_machine_rates_file *out)
{
	const cJSON *load = moe_json_get(root, "load");
	struct moe_machine *m = &out->machine;
	char format[MOE_MACHINE_NAME];
	int64_t cpus;

	MOE_TRY(copy_text(root, "format", format, sizeof format));
	if (strcmp(format, FORMAT))
		return moe_fail(MOE_ERR_FORMAT, "format is \"%s\", not \"" FORMAT "\"", format);
	MOE_TRY(copy_text(root, "cpu", m->cpu, sizeof m->cpu));
	MOE_TRY(copy_text(root, "date", m->date, sizeof m->date));
	MOE_TRY(moe_json_int(root, "cpus", 1, 1 << 20, &cpus));
	m->cpus = m->workers = (int)cpus;
	if (cJSON_IsNumber(load) && isfinite(load->valuedouble))
		m->load = load->valuedouble;
	for (size_t i = 0; i < MOE_COUNT(numbers); i++)
		MOE_TRY(as_rate(moe_json_get(root, numbers[i].key), "", numbers[i].key,
				number_of(m, i)));
	return read_tables(root, out);
}

enum moe_status moe_machine_file_read(const char *path, struct moe_machine_rates_file *out)
{
	enum moe_status st;
	cJSON *root;

	memset(out, 0, sizeof *out);
	MOE_TRY(moe_json_read(path, &root));
	st = read_root(root, out);
	cJSON_Delete(root);
	return st == MOE_OK ? MOE_OK : moe_fail_in(st, "%s", path);
}

/* ---- writing ---- */

/* Five digits are more than a measurement has. */
static cJSON *rounded(double v)
{
	char text[32];
	void *before = moe_points_enter();

	snprintf(text, sizeof text, "%.5g", v);
	moe_points_leave(before);
	return cJSON_CreateRaw(text);
}

static void add_rate(cJSON *to, const char *key, double v)
{
	cJSON_AddItemToObject(to, key, rounded(v));
}

static void add_table(cJSON *to, const struct moe_rates *r)
{
	cJSON *o = cJSON_AddObjectToObject(to, r->isa);

	if (r->peak_gflops > 0)
		add_rate(o, "peak_gflops", r->peak_gflops);
	add_rate(o, "pack_gbps", r->pack_gbps);
	for (int d = 0; d < MOE_GEMM_DIRECTIONS; d++) {
		cJSON *list = cJSON_AddArrayToObject(o, directions[d]);

		for (int i = 0; i < MOE_RATE_POINTS; i++)
			cJSON_AddItemToArray(list, rounded(r->gemm_gflops[d][i]));
	}
}

static enum moe_status make_folder(const char *path)
{
	const char *slash = strrchr(path, '/');
	enum moe_status st;
	char *dir;

	if (!slash || slash == path)
		return MOE_OK;
	dir = moe_format("%.*s", (int)(slash - path), path);
	if (!dir)
		return moe_fail(MOE_ERR_NOMEM, "no memory for a path");
	st = moe_dir_make(dir);
	moe_free(dir);
	return st;
}

enum moe_status moe_machine_file_try(const char *path)
{
	struct moe_file_writer w = { .fd = -1 };
	enum moe_status st;

	MOE_TRY(make_folder(path));
	st = moe_file_begin(&w, path);
	moe_file_abort(&w);
	return st;
}

enum moe_status moe_machine_file_write(const char *path, const struct moe_machine_rates_file *f)
{
	struct moe_machine m = f->machine;
	cJSON *root, *isa, *rows;
	enum moe_status st;

	MOE_TRY(make_folder(path));
	root = cJSON_CreateObject();
	cJSON_AddStringToObject(root, "format", FORMAT);
	cJSON_AddStringToObject(root, "cpu", m.cpu);
	cJSON_AddNumberToObject(root, "cpus", m.cpus);
	cJSON_AddStringToObject(root, "date", m.date);
	add_rate(root, "load", m.load);
	for (size_t i = 0; i < MOE_COUNT(numbers); i++)
		add_rate(root, numbers[i].key, *number_of(&m, i));
	rows = cJSON_AddArrayToObject(root, "rows"); /* for the reader: they are fixed */
	for (int i = 0; i < MOE_RATE_POINTS; i++)
		cJSON_AddItemToArray(rows, cJSON_CreateNumber(moe_rate_rows(i)));
	isa = cJSON_AddObjectToObject(root, "isa");
	for (int i = 0; i < f->n_isas; i++)
		add_table(isa, &f->isa[i]);
	st = moe_json_write(path, root);
	cJSON_Delete(root);
	return st;
}

/* ---- use ---- */

bool moe_machine_file_fits(const struct moe_machine_rates_file *f, char **why)
{
	char cpu[MOE_MACHINE_TEXT];
	int cpus = moe_machine_cpus();

	*why = NULL;
	moe_machine_cpu(cpu, sizeof cpu);
	if (f->machine.cpus == cpus && !strcmp(f->machine.cpu, cpu))
		return true;
	*why = moe_format("it is of %d x %s, this is %d x %s", f->machine.cpus, f->machine.cpu,
			  cpus, cpu);
	return false;
}

const struct moe_rates *moe_machine_file_rates(const struct moe_machine_rates_file *f,
					       const char *isa)
{
	for (int i = 0; i < f->n_isas; i++)
		if (!strcmp(f->isa[i].isa, isa))
			return &f->isa[i];
	return NULL;
}
