/* SPDX-License-Identifier: Apache-2.0 */
/* What checkpoints call gate, up and down of an expert, and the two tensors of all experts. */
#ifndef MOE_MODEL_EXPERT_NAMES_H
#define MOE_MODEL_EXPERT_NAMES_H

#include "engine/base.h"

enum { MOE_NAMES_USUAL, MOE_NAMES_MIXTRAL, MOE_EXPERT_NAMINGS };
extern const char *const moe_expert_names[MOE_EXPERT_NAMINGS][3];
#define MOE_NAME_GATE_UP "gate_up_proj" /* gate rows, then up rows; down's has the usual name */

/* A tensor's last part, without ".weight": 0 gate, 1 up, 2 down, 3 gate and up, -1 none of them. */
int moe_expert_which(const char *name);
/* Those of single experts beside a tensor of all of that name. */
const char *const *moe_expert_names_beside(const char *name);

#endif
