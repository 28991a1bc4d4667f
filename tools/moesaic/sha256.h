/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOESAIC_TOOL_SHA256_H
#define MOESAIC_TOOL_SHA256_H

#include <stdbool.h>
#include <stddef.h>

#define SHA256_HEX 65

/* In lower-case hexadecimal digits. */
void sha256_text(const void *data, size_t bytes, char out[SHA256_HEX]);
/* false: the file cannot be read. */
bool sha256_file(const char *path, char out[SHA256_HEX]);

#endif
