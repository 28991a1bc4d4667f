/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Debian 13's StarPU (1.4.7) says at every start, whatever STARPU_SILENT is, that a folder of its package
 * does not exist. Between begin and end stderr is kept aside; end prints it without that line, and
 * an abort in between prints all of it.
 */
#ifndef MOESAIC_TOOL_START_NOISE_H
#define MOESAIC_TOOL_START_NOISE_H

void start_noise_begin(void);
void start_noise_end(void);

#endif
