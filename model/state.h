/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Training state: OUTPUT/checkpoint-N/, complete or absent. A directory is filled under a temporary
 * name, synced and renamed; a kill at any instant leaves the previous state as the latest. In it,
 * state.safetensors holds arrays and state.json scalars; other parts of the program add their
 * files. One process at a time writes below an output directory.
 */
#ifndef MOE_MODEL_STATE_H
#define MOE_MODEL_STATE_H

#include "model/readers/safetensors.h"
#include "model/readers/safetensors_writer.h"

#define MOE_STATE_FORMAT "moesaic-state-2" /* 1 had no checksums */

/* A directory being written; zero it before begin. */
struct moe_state_dir {
	int64_t step;
	char *output;
	char *path;  /* the temporary directory: write into it */
	char *final; /* OUTPUT/checkpoint-STEP */
};

/* Creates the temporary directory for step >= 0 (output too, if missing). */
enum moe_status moe_state_begin(const char *output, int64_t step, struct moe_state_dir *dir);
/*
 * Syncs all that was written and gives the directory its final name, in place of an existing one.
 * dir is finished afterwards, also on failure (nothing remains of it then).
 */
enum moe_status moe_state_commit(struct moe_state_dir *dir);
/* Removes it; allowed (does nothing) on a finished or zeroed dir. */
void moe_state_abort(struct moe_state_dir *dir);

/*
 * MOE_OK: dir holds the state of step (< 0: any), and its scalars and every *.safetensors in it, the adapter's too,
 * are what was written, by their checksums. Reads them all. MOE_ERR_FORMAT, MOE_ERR_IO name the file.
 */
enum moe_status moe_state_check(const char *dir, int64_t step);
/*
 * The checkpoint of the highest step that passes moe_state_check; *path is the caller's (moe_free), NULL if there is
 * none (then MOE_OK too). The log has a warning for each that is passed over, saying why.
 */
enum moe_status moe_state_latest(const char *output, int64_t *step, char **path);
/*
 * To be called before training starts: removes what a killed process left half-written, and puts a
 * checkpoint back that was being replaced, with the temporary files of moe_file_begin. Other files are not touched.
 */
enum moe_status moe_state_clean(const char *output);
/*
 * Removes the oldest checkpoints until `keep` are left (0: keeps all). That of step `best` (negative: none) is among
 * those that stay, and so is the newest, with keep 1 too.
 */
enum moe_status moe_state_prune(const char *output, int keep, int64_t best);
/* Removes the checkpoints beyond a step: of a run that is begun anew, or gone on from an earlier step, they are another's. */
enum moe_status moe_state_drop_after(const char *output, int64_t step);
/* Bytes of all checkpoints. */
enum moe_status moe_state_bytes(const char *output, int64_t *bytes);

enum moe_scalar_kind { MOE_SCALAR_INT, MOE_SCALAR_REAL, MOE_SCALAR_TEXT };
struct moe_scalar {
	const char *key;
	enum moe_scalar_kind kind;
	int64_t i;
	double r; /* any double, infinities and NaN too */
	const char *text;
};

/*
 * Writes state.safetensors (items as in moe_safetensors_write) and state.json into dir, a plain
 * directory or moe_state_dir.path. Scalars must not be named "format" or "sum"; "step" must be among them
 * for moe_state_latest. Both int64 and double come back exactly.
 */
enum moe_status moe_state_write(const char *dir, const struct moe_st_item *items, size_t n_items,
				const struct moe_scalar *scalars, size_t n_scalars);

struct moe_state;
/* Opens what moe_state_write wrote. MOE_ERR_IO, MOE_ERR_FORMAT (of another version too). */
enum moe_status moe_state_open(const char *dir, struct moe_state **out);
void moe_state_close(struct moe_state *s);
/* Arrays by name, with moe_safetensors_get/_read_f32; lives until close. */
const struct moe_safetensors *moe_state_arrays(const struct moe_state *s);
bool moe_state_has(const struct moe_state *s, const char *key); /* a scalar */
/* Scalars: MOE_ERR_FORMAT if absent or of another kind. Texts live until close. */
enum moe_status moe_state_int(const struct moe_state *s, const char *key, int64_t *out);
enum moe_status moe_state_real(const struct moe_state *s, const char *key, double *out);
enum moe_status moe_state_text(const struct moe_state *s, const char *key, const char **out);

#endif
