/* SPDX-License-Identifier: Apache-2.0 */
#include "model/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Linux writes at most 2 GiB - 4 KiB per call. */
#define WRITE_CHUNK ((size_t)1 << 30)

static enum moe_status no_memory(const char *path)
{
	return moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
}

static enum moe_status io_error(const char *path, const char *doing)
{
	return moe_fail(MOE_ERR_IO, "%s: cannot %s: %s", path, doing, strerror(errno));
}

char *moe_path_join(const char *dir, const char *name)
{
	size_t n = strlen(dir);

	if (n == 0 || name[0] == '/')
		return moe_strdup(name);
	return moe_format("%s%s%s", dir, dir[n - 1] == '/' ? "" : "/", name);
}

bool moe_path_exists(const char *path)
{
	struct stat st;

	return stat(path, &st) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

enum moe_status moe_dir_check(const char *path)
{
	struct stat st;
	int failed = stat(path, &st) ? errno : 0;

	if (!failed && S_ISDIR(st.st_mode))
		return access(path, R_OK | X_OK) == 0 ? MOE_OK : moe_fail(MOE_ERR_IO, "%s: %s", path, strerror(errno));
	return moe_fail(MOE_ERR_IO, "%s: %s", path, failed && failed != ENOENT && failed != ENOTDIR ? strerror(failed) : "no such folder");
}

bool moe_path_is_dir(const char *path)
{
	struct stat st;

	return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool moe_dir_is_empty(const char *path)
{
	DIR *d = opendir(path);
	struct dirent *e;
	bool empty = d != NULL;

	while (d && empty && (e = readdir(d)))
		empty = !strcmp(e->d_name, ".") || !strcmp(e->d_name, "..");
	if (d)
		closedir(d);
	return empty;
}

enum moe_status moe_dir_check_new(const char *path)
{
	struct stat st;

	if (stat(path, &st))
		return errno == ENOENT || errno == ENOTDIR ? MOE_OK : moe_fail(MOE_ERR_IO, "%s: %s", path, strerror(errno));
	if (!S_ISDIR(st.st_mode))
		return moe_fail(MOE_ERR_ARG, "%s: exists and is not a folder", path);
	if (!moe_dir_is_empty(path))
		return moe_fail(MOE_ERR_ARG, "%s: exists and is not empty: name another folder, or remove it", path);
	return MOE_OK;
}

static enum moe_status open_regular(const char *path, int *fd, size_t *bytes)
{
	struct stat st;

	/* O_NONBLOCK: a FIFO in place of a file must be refused, not waited for */
	*fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (*fd < 0)
		return io_error(path, "open");
	if (fstat(*fd, &st) != 0) {
		io_error(path, "stat");
		close(*fd);
		return MOE_ERR_IO;
	}
	if (!S_ISREG(st.st_mode)) {
		close(*fd);
		return moe_fail(MOE_ERR_IO, "%s: is not a regular file", path);
	}
	*bytes = (size_t)st.st_size;
	return MOE_OK;
}

enum moe_status moe_file_read(const char *path, size_t limit, char **out, size_t *bytes)
{
	enum moe_status status = MOE_OK;
	size_t size, at = 0;
	char *text = NULL;
	int fd;

	MOE_TRY(open_regular(path, &fd, &size));
	if (size > limit) {
		status = moe_fail(MOE_ERR_FORMAT, "%s: %zu bytes, at most %zu expected", path, size,
				  limit);
		goto done;
	}
	text = moe_alloc(size + 1, 1);
	if (!text) {
		status = no_memory(path);
		goto done;
	}
	while (at < size) {
		ssize_t n = read(fd, text + at, size - at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0) {
			status = io_error(path, "read");
			goto done;
		}
		if (n == 0)
			break; /* shrunk since fstat */
		at += (size_t)n;
	}
	text[at] = 0;
	*out = text;
	*bytes = at;
	text = NULL;
done:
	moe_free(text);
	close(fd);
	return status;
}

enum moe_status moe_file_map(const char *path, struct moe_mapping *out)
{
	enum moe_status status = MOE_OK;
	size_t size;
	void *p = NULL;
	int fd;

	MOE_TRY(open_regular(path, &fd, &size));
	if (size) {
		p = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
		if (p == MAP_FAILED) {
			status = io_error(path, "map");
			p = NULL;
			size = 0;
		}
	}
	if (status != MOE_OK)
		close(fd);
	out->data = p;
	out->bytes = size;
	out->opened = status == MOE_OK ? fd + 1 : 0;
	return status;
}

enum moe_status moe_mapping_read(const struct moe_mapping *m, const char *path, size_t from, size_t bytes, void *out)
{
	char *to = out;

	while (bytes) {
		ssize_t n = pread(m->opened - 1, to, MOE_MIN(bytes, WRITE_CHUNK), (off_t)from);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return moe_fail(MOE_ERR_IO, "%s: cannot read at byte %zu: %s", path, from, strerror(errno));
		if (n == 0)
			return moe_fail(MOE_ERR_IO, "%s: ends at byte %zu, %zu more are expected: it was cut since it "
						    "was opened",
					path, from, bytes);
		to += n;
		from += (size_t)n;
		bytes -= (size_t)n;
	}
	return MOE_OK;
}

void moe_file_unmap(struct moe_mapping *m)
{
	if (m->data)
		munmap((void *)(uintptr_t)m->data, m->bytes);
	if (m->opened)
		close(m->opened - 1);
	*m = (struct moe_mapping){ 0 };
}

void moe_mapping_forget(const void *data, size_t bytes)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	uintptr_t from = ((uintptr_t)data + page - 1) & ~(page - 1);
	uintptr_t to = ((uintptr_t)data + bytes) & ~(page - 1);

	if (to > from)
		madvise((void *)from, to - from, MADV_DONTNEED);
}

enum moe_status moe_file_begin(struct moe_file_writer *w, const char *path)
{
	static atomic_uint serial;
	struct stat st;

	*w = (struct moe_file_writer){ .fd = -1 };
	if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
		return moe_fail(MOE_ERR_IO, "%s: exists and is not a regular file", path);
	w->path = moe_strdup(path);
	w->temp = moe_format("%s.tmp-%ld-%u", path, (long)getpid(), atomic_fetch_add(&serial, 1));
	if (!w->path || !w->temp) {
		moe_free(w->path);
		moe_free(w->temp);
		*w = (struct moe_file_writer){ .fd = -1 };
		return no_memory(path);
	}
	w->fd = open(w->temp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	if (w->fd < 0) {
		io_error(w->temp, "create");
		moe_free(w->path);
		moe_free(w->temp);
		*w = (struct moe_file_writer){ .fd = -1 };
		return MOE_ERR_IO;
	}
	return MOE_OK;
}

enum moe_status moe_file_append(struct moe_file_writer *w, const void *data, size_t bytes)
{
	const char *p = data;

	while (bytes) {
		ssize_t n = write(w->fd, p, MOE_MIN(bytes, WRITE_CHUNK));

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return io_error(w->path, "write");
		p += n;
		bytes -= (size_t)n;
	}
	return MOE_OK;
}

enum moe_status moe_file_append_sum(struct moe_file_writer *w, const char *digest, const char *name)
{
	char *line = moe_format("%s  %s\n", digest, name);
	enum moe_status status = line ? moe_file_append(w, line, strlen(line)) : moe_fail(MOE_ERR_NOMEM, "out of memory");

	moe_free(line);
	return status;
}

enum moe_status moe_file_put(struct moe_file_writer *w, int64_t at, const void *data, size_t bytes)
{
	const char *p = data;

	while (bytes) {
		ssize_t n = pwrite(w->fd, p, MOE_MIN(bytes, WRITE_CHUNK), at);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return io_error(w->path, "write");
		p += n;
		at += n;
		bytes -= (size_t)n;
	}
	return MOE_OK;
}

enum moe_status moe_file_make(const char *path, const void *data, size_t bytes)
{
	struct moe_file_writer w = { .fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666),
				     .path = (char *)(uintptr_t)path };
	enum moe_status status = w.fd < 0 ? io_error(path, "create") : moe_file_append(&w, data, bytes);

	if (w.fd >= 0 && close(w.fd) != 0 && status == MOE_OK)
		status = io_error(path, "close");
	return status;
}

/* The directory that holds path, as a new string. */
static char *parent_of(const char *path)
{
	const char *slash = strrchr(path, '/');
	char *dir;

	if (!slash)
		return moe_strdup(".");
	dir = moe_strdup(path);
	if (dir)
		dir[slash == path ? 1 : slash - path] = 0;
	return dir;
}

enum moe_status moe_file_commit(struct moe_file_writer *w)
{
	enum moe_status status = MOE_OK;
	char *dir = parent_of(w->path);
	int fd = w->fd;

	if (!dir) {
		status = no_memory(w->path);
		goto done;
	}
	if (fsync(fd) != 0) {
		status = io_error(w->path, "sync");
		goto done;
	}
	w->fd = -1;
	if (close(fd) != 0) {
		status = io_error(w->path, "close");
		goto done;
	}
	if (rename(w->temp, w->path) != 0) {
		status = io_error(w->path, "replace");
		goto done;
	}
	moe_free(w->temp);
	w->temp = NULL;
	status = moe_dir_sync(dir);
done:
	moe_free(dir);
	moe_file_abort(w);
	return status;
}

void moe_file_abort(struct moe_file_writer *w)
{
	if (w->path && w->fd >= 0)
		close(w->fd);
	if (w->temp)
		unlink(w->temp);
	moe_free(w->temp);
	moe_free(w->path);
	*w = (struct moe_file_writer){ .fd = -1 };
}

enum moe_status moe_file_write(const char *path, const void *data, size_t bytes)
{
	struct moe_file_writer w;
	enum moe_status status;

	MOE_TRY(moe_file_begin(&w, path));
	MOE_TRY_GOTO(moe_file_append(&w, data, bytes), status, done);
	status = moe_file_commit(&w);
done:
	moe_file_abort(&w);
	return status;
}

enum moe_status moe_dir_make(const char *path)
{
	char *copy = moe_strdup(path);
	enum moe_status status = MOE_OK;

	if (!copy)
		return no_memory(path);
	for (char *p = copy + 1; copy[0] && status == MOE_OK; p++) {
		char c = *p;

		if (c != '/' && c != 0)
			continue;
		*p = 0;
		if (mkdir(copy, 0777) != 0 && (errno != EEXIST || !moe_path_is_dir(copy))) {
			if (errno == EEXIST)
				errno = ENOTDIR;
			status = io_error(copy, "create the directory");
		}
		*p = c;
		if (!c)
			break;
	}
	moe_free(copy);
	return status;
}

enum moe_status moe_dir_sync(const char *path)
{
	int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0)
		return io_error(path, "open the directory");
	/* some file systems refuse fsync on directories: nothing to do about it */
	if (fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP) {
		io_error(path, "sync the directory");
		close(fd);
		return MOE_ERR_IO;
	}
	close(fd);
	return MOE_OK;
}

/* Calls visit for every entry of path; visit sees its type through lstat. */
static enum moe_status each_entry(const char *path, enum moe_status (*visit)(const char *))
{
	enum moe_status status = MOE_OK;
	struct dirent *e;
	DIR *dir = opendir(path);

	if (!dir)
		return io_error(path, "list the directory");
	while (status == MOE_OK && (e = readdir(dir))) {
		char *child;

		if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
			continue;
		child = moe_path_join(path, e->d_name);
		status = child ? visit(child) : no_memory(path);
		moe_free(child);
	}
	closedir(dir);
	return status;
}

static enum moe_status sync_file(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return io_error(path, "open");
	if (fsync(fd) != 0) {
		io_error(path, "sync");
		close(fd);
		return MOE_ERR_IO;
	}
	close(fd);
	return MOE_OK;
}

enum moe_status moe_tree_sync(const char *path)
{
	struct stat st;

	if (lstat(path, &st) != 0)
		return io_error(path, "stat");
	if (S_ISREG(st.st_mode))
		return sync_file(path);
	if (!S_ISDIR(st.st_mode))
		return MOE_OK;
	MOE_TRY(each_entry(path, moe_tree_sync));
	return moe_dir_sync(path);
}

enum moe_status moe_tree_remove(const char *path)
{
	struct stat st;

	if (lstat(path, &st) != 0)
		return errno == ENOENT ? MOE_OK : io_error(path, "stat");
	if (!S_ISDIR(st.st_mode))
		return unlink(path) == 0 || errno == ENOENT ? MOE_OK : io_error(path, "remove");
	MOE_TRY(each_entry(path, moe_tree_remove));
	return rmdir(path) == 0 || errno == ENOENT ? MOE_OK : io_error(path, "remove");
}
