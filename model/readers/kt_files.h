/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Mapped files of which there may be more than a process can map: those that were used last stay.
 * Private to model/readers/. Any number of threads may hold files.
 */
#ifndef MOE_MODEL_READERS_KT_FILES_H
#define MOE_MODEL_READERS_KT_FILES_H

#include "engine/base.h"

struct moe_kt_files;
struct moe_kt_files *moe_kt_files_create(void); /* NULL: no memory */
void moe_kt_files_destroy(struct moe_kt_files *f);
/* A regular file of so many bytes: MOE_ERR_IO, MOE_ERR_FORMAT name it and what it has. */
enum moe_status moe_kt_files_check(const char *path, size_t bytes, uint64_t *stamp);
/* Its bytes, good until release; NULL: it cannot be read, or has others than `bytes`. path lives as
 * long as f. */
const void *moe_kt_files_hold(struct moe_kt_files *f, const char *path, size_t bytes);
void moe_kt_files_release(struct moe_kt_files *f, const char *path);

#endif
