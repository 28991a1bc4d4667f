/* SPDX-License-Identifier: Apache-2.0 */
/* Copies of folders. */
#include "engine/size.h"
#include "model/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define COPY_BYTES ((size_t)4 << 20)

/* The nearest folder that exists on the way to path; moe_free it. */
static char *existing(const char *path)
{
	char *at = moe_strdup(*path ? path : ".");

	while (at && access(at, F_OK) != 0) {
		char *slash = strrchr(at, '/');

		if (!slash) {
			moe_free(at);
			return moe_strdup(".");
		}
		slash[slash == at] = 0;
	}
	return at;
}

bool moe_path_inside(const char *path, const char *dir)
{
	char *near = existing(path), *real = near ? realpath(near, NULL) : NULL;
	char *outer = realpath(dir, NULL);
	size_t n = outer ? strlen(outer) : 0;
	bool inside = real && outer && !strncmp(real, outer, n) && (!real[n] || real[n] == '/');

	moe_free(near);
	free(real);
	free(outer);
	return inside;
}

static enum moe_status copy_bytes(const struct moe_folder_copy *c, int fd, const char *from,
				  struct moe_file_writer *w)
{
	char *buf = moe_alloc(COPY_BYTES, 1);
	enum moe_status status = MOE_OK;
	ssize_t n = 1;

	if (!buf)
		return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", from);
	while (status == MOE_OK && n > 0) {
		n = read(fd, buf, COPY_BYTES);
		if (n < 0 && errno == EINTR) {
			n = 1;
			continue;
		}
		if (n < 0)
			status = moe_fail(MOE_ERR_IO, "%s: cannot read: %s", from, strerror(errno));
		else
			status = moe_file_append(w, buf, (size_t)n);
		if (status == MOE_OK && n > 0)
			status = c->advance(from, n, c->user);
	}
	moe_free(buf);
	return status;
}

static enum moe_status copy_file(const struct moe_folder_copy *c, const char *from, const char *to)
{
	struct moe_file_writer w;
	enum moe_status status;
	struct stat st;
	int fd = open(from, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return moe_fail(MOE_ERR_IO, "%s: cannot open: %s", from, strerror(errno));
	status = moe_file_begin(&w, to);
	if (status == MOE_OK)
		status = copy_bytes(c, fd, from, &w);
	if (status == MOE_OK && fstat(fd, &st) == 0)
		fchmod(w.fd, st.st_mode & 0777);
	if (status == MOE_OK)
		status = moe_file_commit(&w);
	moe_file_abort(&w);
	close(fd);
	return status;
}

/* bytes: counted only. */
static enum moe_status walk(const struct moe_folder_copy *c, const char *dir, const char *to,
			    int64_t *bytes)
{
	enum moe_status status = MOE_OK;
	struct dirent *e;
	DIR *d = opendir(dir);

	if (!d)
		return moe_fail(MOE_ERR_IO, "%s: cannot list the folder: %s", dir, strerror(errno));
	if (!bytes)
		status = moe_dir_make(to);
	while (status == MOE_OK && (e = readdir(d))) {
		char *from = moe_path_join(dir, e->d_name), *into = moe_path_join(to, e->d_name);
		struct stat st;

		if (!from || !into)
			status = moe_fail(MOE_ERR_NOMEM, "%s: out of memory", dir);
		else if (e->d_name[0] == '.' || stat(from, &st) != 0 ||
			 (c->skip && c->skip(from, c->user)))
			; /* a link to nothing is no file */
		else if (S_ISDIR(st.st_mode))
			status = walk(c, from, into, bytes);
		else if (S_ISREG(st.st_mode) && bytes)
			*bytes += st.st_size;
		else if (S_ISREG(st.st_mode))
			status = copy_file(c, from, into);
		moe_free(from);
		moe_free(into);
	}
	closedir(d);
	return status;
}

enum moe_status moe_folder_copy(const struct moe_folder_copy *c, const char *from, const char *to)
{
	return walk(c, from, to, NULL);
}

enum moe_status moe_folder_bytes(const struct moe_folder_copy *c, const char *from, int64_t *bytes)
{
	return walk(c, from, "", bytes);
}

enum moe_status moe_folder_room(const char *path, int64_t bytes, const char *what)
{
	struct statvfs fs;
	double room;

	if (statvfs(path, &fs) != 0)
		return MOE_OK; /* writing will tell */
	room = (double)fs.f_bavail * (double)fs.f_frsize;
	if (room >= (double)bytes)
		return MOE_OK;
	return moe_fail(MOE_ERR_NOFIT,
			"%s: %s takes %s, the file system has %s left: make room, or name another output folder",
			path, what, moe_size(bytes).text, moe_size((int64_t)room).text);
}
