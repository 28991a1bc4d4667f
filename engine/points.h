/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers in files have decimal points, whatever locale the program that the library is in has set. */
#ifndef MOE_ENGINE_POINTS_H
#define MOE_ENGINE_POINTS_H

/* Between these two printf and strtod of the calling thread have a point. leave takes what enter returned. */
void *moe_points_enter(void);
void moe_points_leave(void *before);
/* strtod with a point. */
double moe_strtod(const char *text, char **end);

#endif
