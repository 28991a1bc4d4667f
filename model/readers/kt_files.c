/* SPDX-License-Identifier: Apache-2.0 */
#include "model/readers/kt_files.h"
#include "model/file.h"

#include <errno.h>
#include <pthread.h>
#include <sys/stat.h>

/* Threads hold one at a time; more sets than threads keep what several use. */
#define SETS 128
#define WAYS 4

struct slot {
	const char *path; /* by address: NULL is free */
	struct moe_mapping map;
	int users;
	uint64_t used;
};

struct moe_kt_files {
	pthread_mutex_t lock;
	pthread_cond_t freed;
	uint64_t now;
	struct slot slot[SETS][WAYS];
};

struct moe_kt_files *moe_kt_files_create(void)
{
	struct moe_kt_files *f = moe_calloc(1, sizeof *f);

	if (f) {
		pthread_mutex_init(&f->lock, NULL);
		pthread_cond_init(&f->freed, NULL);
	}
	return f;
}

void moe_kt_files_destroy(struct moe_kt_files *f)
{
	if (!f)
		return;
	for (int i = 0; i < SETS; i++)
		for (int j = 0; j < WAYS; j++)
			moe_file_unmap(&f->slot[i][j].map);
	pthread_mutex_destroy(&f->lock);
	pthread_cond_destroy(&f->freed);
	moe_free(f);
}

enum moe_status moe_kt_files_check(const char *path, size_t bytes, uint64_t *stamp)
{
	struct stat st;

	if (stat(path, &st) != 0)
		return moe_fail(MOE_ERR_IO, "%s: %s", path, errno == ENOENT ? "is missing" : strerror(errno));
	if (!S_ISREG(st.st_mode))
		return moe_fail(MOE_ERR_FORMAT, "%s: is not a regular file", path);
	if ((size_t)st.st_size != bytes)
		return moe_fail(MOE_ERR_FORMAT, "%s: has %lld bytes; %zu are expected", path,
				(long long)st.st_size, bytes);
	*stamp = moe_mix(*stamp ^ moe_mix((uint64_t)st.st_mtim.tv_sec * 1000000000u + (uint64_t)st.st_mtim.tv_nsec));
	return MOE_OK;
}

static struct slot *set_of(struct moe_kt_files *f, const char *path)
{
	return f->slot[moe_mix((uintptr_t)path) % SETS];
}

/* The slot that has the path, or one that can have it; NULL: all are held. */
static struct slot *choose(struct slot *set, const char *path)
{
	struct slot *best = NULL;

	for (int i = 0; i < WAYS; i++) {
		if (set[i].path == path)
			return &set[i];
		if (!set[i].users && (!best || set[i].used < best->used))
			best = &set[i];
	}
	return best;
}

const void *moe_kt_files_hold(struct moe_kt_files *f, const char *path, size_t bytes)
{
	const void *data = NULL;
	struct slot *s;

	pthread_mutex_lock(&f->lock);
	while (!(s = choose(set_of(f, path), path)))
		pthread_cond_wait(&f->freed, &f->lock);
	if (s->path != path) {
		moe_file_unmap(&s->map);
		s->path = moe_file_map(path, &s->map) == MOE_OK ? path : NULL;
	}
	if (s->path && s->map.bytes == bytes) {
		s->users++;
		s->used = ++f->now;
		data = s->map.data;
	}
	pthread_mutex_unlock(&f->lock);
	return data;
}

void moe_kt_files_release(struct moe_kt_files *f, const char *path)
{
	struct slot *s;

	pthread_mutex_lock(&f->lock);
	s = choose(set_of(f, path), path);
	if (s && s->path == path && --s->users == 0)
		pthread_cond_broadcast(&f->freed);
	pthread_mutex_unlock(&f->lock);
}
