/* SPDX-License-Identifier: Apache-2.0 */
/* What packages install beside the program, written from the same option tables as the help. */
#ifndef MOESAIC_TOOL_GENERATE_TEXT_H
#define MOESAIC_TOOL_GENERATE_TEXT_H

#include "tools/moesaic/cli.h"

/* shell: bash or zsh. An exit code. */
int cli_completion(const char *shell);
/* moesaic(1) as troff. */
void cli_man(void);
/* What stands for the value in usage lines; "" for a flag. */
const char *cli_placeholder(const struct option *o);

#endif
