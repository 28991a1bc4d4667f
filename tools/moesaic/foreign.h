/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of LLaMA-Factory and ktransformers files that are no aliases of a flag of ours. */
#ifndef MOESAIC_TOOL_FOREIGN_H
#define MOESAIC_TOOL_FOREIGN_H

#include "tools/moesaic/options.h"

bool foreign_known(const char *key);
const char *foreign_name(int index); /* NULL past the last */
/* Maps or ignores one key. 0, an exit code, or -1: not a known key. */
int foreign_set(struct settings *s, const char *key, const char *text);
/* Another command's key: named in the note. */
void foreign_ignore(const char *key);
/* After the last key: one note that names what was ignored. */
int foreign_finish(struct settings *s, const char *path);

#endif
