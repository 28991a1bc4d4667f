/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MOE_ENGINE_AVAILABLE_H
#define MOE_ENGINE_AVAILABLE_H

#include "engine/base.h"

/*
 * Bytes that this process may still take: what /proc/meminfo calls available, and no more than its
 * control group and those around it leave (page cache that can be dropped counts as free).
 * root: "" or, for tests, a folder with proc/ and sys/ in it. SIZE_MAX: unknown.
 */
size_t moe_memory_available(const char *root);
/* Bytes that this process has resident; 0: unknown. */
size_t moe_memory_resident(void);
struct moe_engine;
/*
 * MOE_ERR_NOFIT, beginning with what: the engine has asked for more than this machine can make resident. Memory is
 * mapped when it is first written, so asking for it never fails, and writing would end the process.
 */
enum moe_status moe_memory_check(struct moe_engine *e, const char *what);

#endif
