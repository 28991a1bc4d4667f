/* SPDX-License-Identifier: Apache-2.0 */
/* What commands print with --json. */
#ifndef MOESAIC_TOOL_JSON_LINE_H
#define MOESAIC_TOOL_JSON_LINE_H

#include <cjson/cJSON.h>
#include <stdio.h>

/* o on a line of stdout; deletes it. */
static inline void json_line(cJSON *o)
{
	char *text = cJSON_PrintUnformatted(o);

	puts(text ? text : "{}");
	cJSON_free(text);
	cJSON_Delete(o);
}

#endif
