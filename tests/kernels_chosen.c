/* SPDX-License-Identifier: Apache-2.0 */
/* Prints the kernel table that this CPU gets, or that MOESAIC_ISA asks for. */
#include "codelets/kernels/kernels.h"

#include <stdio.h>

int main(void)
{
	if (moe_kernels_select(NULL) != MOE_OK) {
		fprintf(stderr, "%s\n", moe_last_error());
		return 1;
	}
	puts(moe_kernels()->name);
	return 0;
}
