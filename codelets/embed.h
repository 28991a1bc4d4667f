/* SPDX-License-Identifier: Apache-2.0 */
/* embed: rows of the embedding for tokens t0..t1, into x. */
#ifndef MOE_CODELETS_EMBED_H
#define MOE_CODELETS_EMBED_H

#include "codelets/decoder.h"

extern struct moe_codelet moe_cl_embed;

#endif
