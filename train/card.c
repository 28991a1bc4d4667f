/* SPDX-License-Identifier: Apache-2.0 */
#include "train/card.h"
#include "engine/points.h"

#include "model/file.h"

#include <math.h>
#include <stdio.h>

/* What is in the folder, as tags and as a title. */
static const char *tags(const struct moe_train_card *c)
{
	return c->adapter ? "library_name: peft\ntags:\n- lora\n- mixture-of-experts\n- moesaic\n"
			  : "library_name: transformers\ntags:\n- mixture-of-experts\n- moesaic\n";
}

static const char *title(const struct moe_train_card *c)
{
	return !c->whole    ? "LoRA adapter for"
	       : c->adapter ? "Trained experts, and a LoRA adapter for them, of"
			    : "All weights trained, from";
}

enum moe_status moe_train_card_write(const char *dir, const struct moe_train_card *c)
{
	char eval[64] = "not measured", taken[64] = "";
	char *path = moe_path_join(dir, "README.md"), *text;
	void *before = moe_points_enter();
	enum moe_status st;

	if (isfinite(c->eval_loss))
		snprintf(eval, sizeof eval, "%.4f", c->eval_loss);
	if (c->best_step)
		snprintf(taken, sizeof taken, " (%s of step %lld, the best)",
			 c->whole ? "weights" : "adapter", (long long)c->best_step);
	text = moe_format("---\nbase_model: %s\n%s---\n"
			  "# %s %s\n\n%s"
			  "Trained with moesaic " MOE_VERSION_STRING
			  ". The settings are in `run.yaml`, every step in "
			  "`trainer_log.jsonl`.\n\n"
			  "| | |\n|---|---|\n| steps | %lld%s |\n| trained tokens | %lld |\n| "
			  "learning rate | %g |\n"
			  "| loss, first to last step | %.4f -> %.4f |\n| held-out loss | %s |\n"
			  "| data | %lld documents, hash `%s` |\n",
			  c->whole && c->adapter ? c->output : c->base, tags(c), title(c), c->base,
			  c->whole && c->adapter ? "The adapter belongs to the model in this folder, whose experts were trained with "
						   "it: load both from here.\n\n"
						 : "",
			  (long long)c->steps, taken,
			  (long long)c->trained_tokens, c->learning_rate, c->first_loss,
			  c->last_loss, eval, (long long)c->tokens->n_docs, c->tokens->hash);
	moe_points_leave(before);
	st = path && text ? moe_file_write(path, text, strlen(text))
			  : moe_fail(MOE_ERR_NOMEM, "no memory for the model card");
	moe_free(path);
	moe_free(text);
	return st;
}
