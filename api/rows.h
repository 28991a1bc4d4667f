/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays whose order the engine keeps: found by their data pointer. */
#ifndef MOE_API_ROWS_H
#define MOE_API_ROWS_H

#include "engine/engine.h"

/* The tensor of rows block * MOE_TOKEN_BLOCK ... of an array, or NULL: the caller's alone. */
struct moe_tensor *moe_rows_tensor(const struct moe_array *a, int block);
/* An array of that data has no more rows than were given to moe_rows_create. */
enum moe_status moe_rows_check(const char *name, const struct moe_array *a);

#endif
