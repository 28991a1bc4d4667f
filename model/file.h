/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files and directories: whole-file reads, read-only mappings, writes that replace a file only when
 * they are complete. Every failure names the path and the system's reason. No state; thread-safe.
 */
#ifndef MOE_MODEL_FILE_H
#define MOE_MODEL_FILE_H

#include "engine/base.h"

/* "dir/name" (just name when dir is "" or name is absolute); moe_free it; NULL without memory. */
char *moe_path_join(const char *dir, const char *name);
/* Also where a folder above may not be entered: opening says so then. */
bool moe_path_exists(const char *path);
/* MOE_ERR_IO: no such folder, or why it cannot be read. */
enum moe_status moe_dir_check(const char *path);
/* It is not there yet, or an empty folder; MOE_ERR_ARG, MOE_ERR_IO. */
enum moe_status moe_dir_check_new(const char *path);
bool moe_path_is_dir(const char *path);
/* A directory that can be read and holds nothing. */
bool moe_dir_is_empty(const char *path);
/* path, which need not exist, is dir or lies in it; links are followed. */
bool moe_path_inside(const char *path, const char *dir);

/*
 * The whole of a regular file, with a NUL byte behind it that bytes does not count.
 * MOE_ERR_IO: cannot be read. MOE_ERR_FORMAT: larger than limit. out is the caller's (moe_free).
 */
enum moe_status moe_file_read(const char *path, size_t limit, char **out, size_t *bytes);

/* A regular file mapped read-only; data is NULL for an empty one. Zero it before the first use. */
struct moe_mapping {
	const unsigned char *data;
	size_t bytes;
	int opened; /* the descriptor + 1, for moe_mapping_read; 0: none */
};
enum moe_status moe_file_map(const char *path, struct moe_mapping *out);
void moe_file_unmap(struct moe_mapping *m);
/*
 * Copies bytes from..from+bytes of the mapping by reading the file: the mapping's pages stay untouched, and a disk that
 * fails or a file that was cut since is an error instead of SIGBUS. Any thread. MOE_ERR_IO names path and place.
 */
enum moe_status moe_mapping_read(const struct moe_mapping *m, const char *path, size_t from, size_t bytes, void *out);
/* Gives the pages that lie wholly in a mapped range back: what is read once need not stay. */
void moe_mapping_forget(const void *data, size_t bytes);

/*
 * Replacement of a file: begin opens a temporary file beside path, append adds to it, commit syncs
 * and renames it over path and syncs the directory. Until commit succeeds path is untouched.
 * abort removes the temporary file; it is allowed (and does nothing) after commit, also a failed
 * one, and on a zeroed writer.
 */
struct moe_file_writer {
	int fd;
	char *path, *temp;
};
enum moe_status moe_file_begin(struct moe_file_writer *w, const char *path);
enum moe_status moe_file_append(struct moe_file_writer *w, const void *data, size_t bytes);
/* A line of sha256sum, in a file of this name. */
#define MOE_SUMS_NAME "SHA256SUMS"
enum moe_status moe_file_append_sum(struct moe_file_writer *w, const char *digest, const char *name);
/* Bytes at a place of their own; any thread. */
enum moe_status moe_file_put(struct moe_file_writer *w, int64_t at, const void *data, size_t bytes);
enum moe_status moe_file_commit(struct moe_file_writer *w);
void moe_file_abort(struct moe_file_writer *w);

/* begin, append, commit. */
enum moe_status moe_file_write(const char *path, const void *data, size_t bytes);

/* A new file, neither synced nor hidden while it is written: for folders that are incomplete until they get their name. */
enum moe_status moe_file_make(const char *path, const void *data, size_t bytes);

/* mkdir -p: an existing directory is fine, an existing file is MOE_ERR_IO. */
enum moe_status moe_dir_make(const char *path);
/* Makes renames and creations inside a directory durable. */
enum moe_status moe_dir_sync(const char *path);
/* Syncs every regular file and directory below path, path included. */
enum moe_status moe_tree_sync(const char *path);
/*
 * Copies every file of a folder and its folders, hidden ones excepted; links are followed.
 * skip: files that are left out. advance is told of every piece; its failure ends the copying.
 */
struct moe_folder_copy {
	bool (*skip)(const char *path, void *user); /* or NULL */
	enum moe_status (*advance)(const char *path, int64_t bytes, void *user);
	void *user;
};
enum moe_status moe_folder_copy(const struct moe_folder_copy *c, const char *from, const char *to);
/* The bytes that it would copy are added to *bytes. */
enum moe_status moe_folder_bytes(const struct moe_folder_copy *c, const char *from, int64_t *bytes);
/* MOE_ERR_NOFIT where the file system of path has less than bytes left; what: "the merged model". */
enum moe_status moe_folder_room(const char *path, int64_t bytes, const char *what);

/* rm -r: symbolic links are removed, not followed; a missing path is fine. */
enum moe_status moe_tree_remove(const char *path);

#endif
