/* SPDX-License-Identifier: Apache-2.0 */
/* A small safetensors file of several dtypes, written, and what must be read from it. */
#ifndef MOE_TESTS_SMALL_FILE_H
#define MOE_TESTS_SMALL_FILE_H

#include "moesaic.h"

/* A path in the test's folder; the text lives for three calls more. */
const char *temp_path(const char *name);

/* The tensor 'weight' [2, 3]. */
extern const float small_values[6];
enum moe_status write_small(const char *path);
/* What write_small wrote. */
void check_small(const char *path);

#endif
