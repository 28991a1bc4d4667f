/* SPDX-License-Identifier: Apache-2.0 */
/* Standard input, output and error that a shell closed (`>&-`), for the programs here. */
#ifndef MOE_TOOLS_STANDARD_FILES_H
#define MOE_TOOLS_STANDARD_FILES_H

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/*
 * Takes the numbers of those that are closed, before anything is opened: else the next file that is, a trace for
 * one, gets the number of standard output, and what is printed lands in it. Opened for the other direction, so that
 * reading from or writing to one still fails as it does where it is closed (EBADF).
 */
static inline void standard_files_take(void)
{
	for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
		if (fcntl(fd, F_GETFD) < 0 && errno == EBADF &&
		    open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) < 0)
			return;
}

#endif
