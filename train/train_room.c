/* SPDX-License-Identifier: Apache-2.0 */
/* Room on the disk for checkpoints and results: a run that cannot end well is told so before it begins. */
#include "train/run.h"

#include "engine/size.h"
#include "model/file.h"
#include "model/state.h"

#include <sys/statvfs.h>

#define SMALL_FILES ((int64_t)1 << 20) /* headers, log, plot, card */

/* Values and moments in f32, and the adapter. */
static enum moe_status state_bytes(const struct moe_run *r, int64_t *bytes)
{
	struct moe_train_array *a;
	size_t n;

	*bytes = SMALL_FILES;
	MOE_TRY(moe_train_arrays(r->t->decoder, &a, &n));
	for (size_t i = 0; i < n; i++)
		*bytes += 3 * (int64_t)sizeof(float) * a[i].pieces * a[i].piece;
	moe_free(a);
	*bytes += r->t->whole ? 0 : r->t->adapter_bytes;
	return MOE_OK;
}

static enum moe_status result_bytes(const struct moe_run *r, int64_t *bytes)
{
	*bytes = SMALL_FILES + r->t->adapter_bytes;
	return r->t->whole ? r->t->model_bytes(r->t->user, bytes) : MOE_OK;
}

/* Checkpoints that are there at a time at most; the new one before the oldest goes. */
static int64_t most_checkpoints(const struct moe_run *r)
{
	const struct moe_trainer_params *p = r->p;
	int64_t left = r->total_steps - r->progress.step, every = r->save_every,
		n = every > 0 ? left / every + (p->save_steps < 0) : 0;

	if (moe_run_saves_best(r))
		n += left / r->eval_every;
	return MOE_MIN(n, (int64_t)moe_run_save_limit(r) + 1 + moe_run_saves_best(r));
}

/* Of the checkpoints that are there already: they go when the run begins, or as new ones come. */
static int64_t old_checkpoints(const struct moe_run *r)
{
	int64_t bytes;

	return moe_state_bytes(r->p->output_dir, &bytes) == MOE_OK ? bytes : 0;
}

enum moe_status moe_run_check_room(struct moe_run *r)
{
	int64_t state, result, n = most_checkpoints(r), need;
	struct statvfs fs;
	double room;

	MOE_TRY(state_bytes(r, &state));
	MOE_TRY(result_bytes(r, &result));
	if (r->p->continue_on_save_error)
		n = 0; /* those that have no room are left out */
	need = result + MOE_MAX(0, n * state - old_checkpoints(r));
	if (statvfs(r->p->output_dir, &fs) != 0)
		return MOE_OK; /* writing will tell */
	room = (double)fs.f_bavail * (double)fs.f_frsize;
	if (room >= (double)need)
		return MOE_OK;
	return moe_fail(
		MOE_ERR_NOFIT,
		"%s: the file system has %s left, this run needs %s: %s %s, %lld checkpoint%s of "
		"%s at a time. Make room, %sor name another --output-dir",
		r->p->output_dir, moe_size((int64_t)room).text, moe_size(need).text,
		r->t->whole ? "the model" : "the adapter", moe_size(result).text, (long long)n,
		n == 1 ? "" : "s", moe_size(state).text, n ? "keep fewer (--save-total-limit, --save-steps), " : "");
}

enum moe_status moe_run_check_state_room(struct moe_run *r)
{
	int64_t bytes;
	char name[48];

	MOE_TRY(state_bytes(r, &bytes));
	snprintf(name, sizeof name, "checkpoint-%lld", (long long)r->progress.step);
	return moe_folder_room(r->p->output_dir, bytes, name);
}

enum moe_status moe_run_check_result_room(struct moe_run *r)
{
	int64_t bytes;

	MOE_TRY(result_bytes(r, &bytes));
	return moe_folder_room(r->p->output_dir, bytes, r->t->whole ? "the model" : "the adapter");
}
