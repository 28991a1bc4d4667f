/* SPDX-License-Identifier: Apache-2.0 */
/* join: does nothing; turns many handles into one. */
#ifndef MOE_CODELETS_JOIN_H
#define MOE_CODELETS_JOIN_H

struct moe_codelet;
extern struct moe_codelet moe_cl_join;

#endif
