/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Linked into a copy of the command (--wrap, see CMakeLists.txt): FAULT=KIND:N makes the N-th call
 *of that kind fail, from 1. The file that FAULT_REPORT names then exists. Only calls of our own
 *objects are counted.
 *
 *	alloc	an allocation of the library
 *	write	a write, or a flush of a stream: no space left
 *	half	a write that takes only half; the next ones go on: not an error
 *	short	a read that brings only half; the next ones go on: not an error
 *	read	a read: input/output error
 *	open	opening for writing or making a folder: read-only file system
 *	sync	fsync, rename: input/output error
 *	full	four writes from the N-th on: no space left
 *	kill	SIGKILL at tick N of a clock that ticks before each write (which is then half done),
 *fsync, rename and sync of a directory, and before and after what a run does between two steps
 *	slow	four seconds before the N-th time between two steps
 *	room	the N-th question for room on a disk is answered with 1 MB
 *
 * FAULT_TICKS names a file that gets a letter per tick: w, f, r, d, s.
 */
#include "engine/base.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static const char *kind = "";
static long at;
static atomic_long calls;
static int ticks = -1; /* FAULT_TICKS */

ssize_t __real_write(int fd, const void *data, size_t n);
ssize_t __real_read(int fd, void *data, size_t n);
ssize_t __real_pread(int fd, void *data, size_t n, off_t offset);
size_t __real_fread(void *data, size_t size, size_t n, FILE *f);
int __real_open(const char *path, int flags, ...);
FILE *__real_fopen(const char *path, const char *mode);
int __real_mkdir(const char *path, mode_t mode);
int __real_fflush(FILE *f);
int __real_fclose(FILE *f);
int __real_fsync(int fd);
int __real_rename(const char *from, const char *to);

ssize_t __wrap_write(int fd, const void *data, size_t n);
ssize_t __wrap_read(int fd, void *data, size_t n);
ssize_t __wrap_pread(int fd, void *data, size_t n, off_t offset);
size_t __wrap_fread(void *data, size_t size, size_t n, FILE *f);
int __wrap_open(const char *path, int flags, ...);
FILE *__wrap_fopen(const char *path, const char *mode);
int __wrap_mkdir(const char *path, mode_t mode);
int __wrap_fflush(FILE *f);
int __wrap_fclose(FILE *f);
int __wrap_fsync(int fd);
int __wrap_rename(const char *from, const char *to);

int __real_statvfs(const char *path, struct statvfs *fs);
int __wrap_statvfs(const char *path, struct statvfs *fs);

struct moe_run;
enum moe_status __real_moe_run_between(struct moe_run *r, int64_t step);
enum moe_status __wrap_moe_run_between(struct moe_run *r, int64_t step);

static void report(void)
{
	const char *path = getenv("FAULT_REPORT");
	int fd = path ? __real_open(path, O_WRONLY | O_CREAT, 0600) : -1;

	if (fd >= 0)
		close(fd);
}

__attribute__((constructor)) static void begin(void)
{
	static char text[32];
	const char *fault = getenv("FAULT"), *path = getenv("FAULT_TICKS");
	char *colon;

	if (path)
		ticks = __real_open(path, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC,
				    0600);
	unsetenv("FAULT_TICKS");
	if (!fault)
		return;
	snprintf(text, sizeof text, "%s", fault);
	colon = strchr(text, ':');
	if (!colon)
		abort();
	*colon = 0;
	kind = text;
	at = strtol(colon + 1, NULL, 10);
	unsetenv("FAULT"); /* not for children */
	if (!strcmp(kind, "alloc"))
		moe_alloc_fail_after(at - 1);
}

/* The turn of this call has come; error: what errno says then. */
static bool fails(const char *what, int error)
{
	if (strcmp(kind, what) || atomic_fetch_add(&calls, 1) + 1 != at)
		return false;
	report();
	if (error)
		errno = error;
	return true;
}

/* The clock of "kill"; true: this is the instant. */
static bool tick(char letter)
{
	if (ticks >= 0 && __real_write(ticks, &letter, 1) != 1)
		abort();
	return fails("kill", 0);
}

static void die(void)
{
	kill(getpid(), SIGKILL);
	for (;;)
		pause();
}

static bool is_full(void)
{
	long n;

	if (strcmp(kind, "full") != 0)
		return false;
	n = atomic_fetch_add(&calls, 1) + 1;
	if (n < at || n >= at + 4)
		return false;
	report();
	errno = ENOSPC;
	return true;
}

static bool is_terminal(int fd)
{
	return fd <= 2; /* the report of a run is not under test here */
}

ssize_t __wrap_write(int fd, const void *data, size_t n)
{
	if (!is_terminal(fd) && (fails("write", ENOSPC) || is_full()))
		return -1;
	if (!is_terminal(fd) && tick('w')) {
		if (n > 1 && __real_write(fd, data, n / 2) < 0)
			abort();
		die();
	}
	if (!is_terminal(fd) && n > 1 && fails("half", 0))
		n /= 2;
	return __real_write(fd, data, n);
}

ssize_t __wrap_read(int fd, void *data, size_t n)
{
	if (fails("read", EIO))
		return -1;
	if (n > 1 && fails("short", 0))
		n /= 2;
	return __real_read(fd, data, n);
}

ssize_t __wrap_pread(int fd, void *data, size_t n, off_t offset)
{
	if (fails("read", EIO))
		return -1;
	if (n > 1 && fails("short", 0))
		n /= 2;
	return __real_pread(fd, data, n, offset);
}

size_t __wrap_fread(void *data, size_t size, size_t n, FILE *f)
{
	if (fails("read", EIO))
		return 0;
	return __real_fread(data, size, n, f);
}

int __wrap_open(const char *path, int flags, ...)
{
	mode_t mode = 0;
	va_list ap;

	va_start(ap, flags);
	if (flags & O_CREAT)
		mode = va_arg(ap, mode_t);
	va_end(ap);
	if ((flags & O_ACCMODE) != O_RDONLY && fails("open", EROFS))
		return -1;
	return __real_open(path, flags, mode);
}

FILE *__wrap_fopen(const char *path, const char *mode)
{
	if (*mode != 'r' && fails("open", EROFS))
		return NULL;
	return __real_fopen(path, mode);
}

int __wrap_mkdir(const char *path, mode_t mode)
{
	return fails("open", EROFS) ? -1 : __real_mkdir(path, mode);
}

int __wrap_fflush(FILE *f)
{
	if (f && !is_terminal(fileno(f)) && fails("write", ENOSPC))
		return EOF;
	return __real_fflush(f);
}

int __wrap_fclose(FILE *f)
{
	bool fail = f && (fcntl(fileno(f), F_GETFL) & O_ACCMODE) != O_RDONLY &&
		    !is_terminal(fileno(f)) && fails("write", ENOSPC);
	int rc = __real_fclose(f);

	if (fail)
		errno = ENOSPC;
	return fail ? EOF : rc;
}

int __wrap_fsync(int fd)
{
	struct stat st;

	if (tick(fstat(fd, &st) == 0 && S_ISDIR(st.st_mode) ? 'd' : 'f'))
		die();
	return fails("sync", EIO) ? -1 : __real_fsync(fd);
}

int __wrap_rename(const char *from, const char *to)
{
	if (tick('r'))
		die();
	return fails("sync", EIO) ? -1 : __real_rename(from, to);
}

/* A signal does not end it. */
static void wait_4s(void)
{
	struct timespec end, now;

	clock_gettime(CLOCK_MONOTONIC, &end);
	end.tv_sec += 4;
	do {
		usleep(50000);
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec < end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec < end.tv_nsec));
}

int __wrap_statvfs(const char *path, struct statvfs *fs)
{
	int rc = __real_statvfs(path, fs);

	if (fails("room", 0))
		fs->f_bavail = 1000000 / fs->f_frsize;
	return rc;
}

enum moe_status __wrap_moe_run_between(struct moe_run *r, int64_t step)
{
	enum moe_status st;

	if (fails("slow", 0))
		wait_4s();
	if (tick('s'))
		die();
	st = __real_moe_run_between(r, step);
	if (tick('s'))
		die();
	return st;
}
