/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/points.h"

#include <locale.h>
#include <stdlib.h>

void *moe_points_enter(void)
{
	/* all categories of "C" are the C library's own object: nothing to allocate or to free */
	locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);

	return c ? uselocale(c) : NULL;
}

void moe_points_leave(void *before)
{
	if (before)
		uselocale(before);
}

double moe_strtod(const char *text, char **end)
{
	void *before = moe_points_enter();
	double v = strtod(text, end);

	moe_points_leave(before);
	return v;
}
