/* SPDX-License-Identifier: Apache-2.0 */
/* Engine and model as the flags say. */
#ifndef MOESAIC_TOOL_MODEL_H
#define MOESAIC_TOOL_MODEL_H

#include "tools/moesaic/cli.h"

struct tool_model {
	struct moe_engine *engine;
	struct moe_model *model;
	struct moe_model_info info;
	/* the progress of loading: seconds of its first and its latest line; bytes then */
	bool loading_shown, terminal;
	double load_start, load_shown;
	int64_t load_first;
};

/* What can be refused without opening anything: --model, --adapter, --numa. */
int tool_model_check(const struct settings *s);
/* max_tokens 0: the library's default. Prints its own errors. */
int tool_model_open_inference(struct tool_model *m, const struct settings *s, int64_t max_tokens, bool text);
/* With the method's flags; writes what the adapter decided back into them. */
int tool_model_open_training(struct tool_model *m, struct settings *s, const char *token_file);
/* The parameters that the method's flags mean, and the text that lora_targets points to: free it.
 */
char *tool_model_params(const struct settings *s, struct moe_model_params *p);
/* --numa: 0 for auto, -1 for no valid value. */
int tool_model_parts(const struct settings *s);
void tool_model_close(struct tool_model *m);
/* Trainable parameters by group, PEFT's line, memory. */
void tool_model_describe(const struct tool_model *m, const struct settings *s, FILE *to);
int64_t tool_model_planned(const struct tool_model *m); /* bytes */

#endif
