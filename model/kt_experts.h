/* SPDX-License-Identifier: Apache-2.0 */
/* kt's expert weights in place of a checkpoint's own. */
#ifndef MOE_MODEL_KT_EXPERTS_H
#define MOE_MODEL_KT_EXPERTS_H

#include "model/arch.h"
#include "model/readers/safetensors.h"

/*
 * All MoE layers' experts of st become those in dir (model/readers/kt.h). *stamp (or NULL): changes with sizes and
 * times of the files.
 */
enum moe_status moe_kt_put_experts(struct moe_safetensors *st, const char *dir, struct moe_arch *arch, uint64_t *stamp);

#endif
