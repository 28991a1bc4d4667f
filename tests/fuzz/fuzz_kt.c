/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A folder of kt's weights for one layer of one expert, [64, 64] and two NUMA parts or one: records
 * of a path, a newline, two bytes of length, a byte that says how many bytes follow, and these,
 * which are repeated to the length.
 */
#include "tests/fuzz/fuzz.h"

#include "model/file.h"
#include "model/quantised.h"
#include "model/readers/kt.h"

#include <stdio.h>

#define MOST_FILES 32

static volatile float sum;

static bool name(void *user, int layer, int which, int expert, char *buf, size_t size)
{
	(void)user;
	snprintf(buf, size, "%d.%d.%d", layer, which, expert);
	return true;
}

static bool is_plain(const char *path, size_t n)
{
	for (size_t i = 0; i < n; i++)
		if (!strchr("_./", path[i]) && !(path[i] >= '0' && path[i] <= '9') &&
		    !(path[i] >= 'A' && path[i] <= 'Z') && !(path[i] >= 'a' && path[i] <= 'z'))
			return false;
	return n > 0 && n < 200 && path[0] != '/' && path[0] != '.' && !strstr(path, "..");
}

static void write_file(const char *dir, const char *path, size_t length, const uint8_t *pattern,
		       size_t n)
{
	char *full = moe_format("%s/%s", dir, path), *slash = full ? strrchr(full, '/') : NULL;
	uint8_t *data = moe_alloc(length + 1, 1);

	for (size_t i = 0; data && i < length; i++)
		data[i] = n ? pattern[i % n] : 0;
	if (slash && data) {
		*slash = 0;
		if (moe_dir_make(full) == MOE_OK) {
			FILE *f;

			*slash = '/';
			f = fopen(full, "wb");
			if (f) {
				fwrite(data, 1, length, f);
				fclose(f);
			}
		}
	}
	moe_free(data);
	moe_free(full);
}

static void make_folder(const char *dir, const uint8_t *at, size_t left)
{
	char path[200];

	for (int i = 0; i < MOST_FILES; i++) {
		const uint8_t *end = left ? memchr(at, '\n', left) : NULL;
		size_t n = end ? (size_t)(end - at) : 0, length, count;

		if (!end || left < n + 4 || n >= sizeof path)
			return;
		memcpy(path, at, n);
		path[n] = 0;
		length = (size_t)end[1] | (size_t)end[2] << 8;
		count = MOE_MIN((size_t)end[3], left - n - 4);
		if (is_plain(path, n))
			write_file(dir, path, length, end + 4, count);
		at = end + 4 + count;
		left -= n + 4 + count;
	}
}

static void read_matrix(const struct moe_st_tensor *t)
{
	struct moe_quantised q = moe_st_quantised_own(t);
	float row[256];

	moe_check_scales(&q, t->name);
	for (int64_t n = 0; n < q.n; n++)
		for (int64_t k = 0; k < q.k; k += 96) {
			moe_dequantise_row(&q, n, k, MOE_MIN(96, q.k - k), row);
			sum += row[0];
		}
}

/* The same folder as a checkpoint of its own, with the sizes that it claims. */
static void read_folder(const char *dir)
{
	struct moe_safetensors *st;

	if (moe_safetensors_open(dir, &st) != MOE_OK)
		return;
	for (size_t i = 0; i < moe_safetensors_count(st); i++)
		if (moe_safetensors_at(st, i)->stored)
			read_matrix(moe_safetensors_at(st, i));
	moe_safetensors_close(st);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static const char empty[] = "\2\0\0\0\0\0\0\0{}";
	struct moe_kt_shape shape = { .experts = 1,
				      .hidden = 64,
				      .inner = size && data[0] & 1 ? 128 : 64 };
	char dir[200];
	struct moe_safetensors *st;
	struct moe_kt *kt;

	snprintf(dir, sizeof dir, "%s-kt",
		 fuzz_file((const uint8_t *)empty, sizeof empty - 1, "empty.safetensors"));
	if (size && data[0] & 2) { /* blk.N: the rest is the checkpoint */
		moe_dir_make(dir);
		strcat(dir, "/model.safetensors");
		moe_file_write(dir, data + 1, size - 1);
		*strrchr(dir, '/') = 0;
	} else if (size) {
		make_folder(dir, data + 1, size - 1);
	}
	if (moe_safetensors_open(
		    fuzz_file((const uint8_t *)empty, sizeof empty - 1, "empty.safetensors"),
		    &st) != MOE_OK)
		__builtin_trap();
	moe_kt_is(dir);
	if (moe_kt_open(dir, st, &kt) == MOE_OK &&
	    moe_kt_add_layer(kt, &shape, 0, name, NULL) == MOE_OK) {
		if (moe_safetensors_count(st) != 3)
			__builtin_trap();
		for (size_t i = 0; i < 3; i++)
			read_matrix(moe_safetensors_at(st, i));
	}
	moe_safetensors_close(st);
	read_folder(dir);
	moe_tree_remove(dir);
	return 0;
}
