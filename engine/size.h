/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers of bytes as text, the same in every message. Needs nothing; the command may include it
 * too. */
#ifndef MOE_ENGINE_SIZE_H
#define MOE_ENGINE_SIZE_H

#include <stdint.h>
#include <stdio.h>

struct moe_size {
	char text[32];
};

/* "1.50 GiB", "12.00 MiB", "3.0 KiB", "17 bytes": in the largest unit of which there is one.
 * printf("%s", moe_size(n).text) */
static inline struct moe_size moe_size(int64_t bytes)
{
	double n = (double)(bytes < 0 ? -bytes : bytes), signed_n = (double)bytes;
	struct moe_size s;

	if (n >= 0x1p30)
		snprintf(s.text, sizeof s.text, "%.2f GiB", signed_n / 0x1p30);
	else if (n >= 0x1p20)
		snprintf(s.text, sizeof s.text, "%.2f MiB", signed_n / 0x1p20);
	else if (n >= 0x1p10)
		snprintf(s.text, sizeof s.text, "%.1f KiB", signed_n / 0x1p10);
	else
		snprintf(s.text, sizeof s.text, "%lld bytes", (long long)bytes);
	return s;
}

#endif
