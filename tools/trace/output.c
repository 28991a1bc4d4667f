/* SPDX-License-Identifier: Apache-2.0 */
#include "tools/trace/output.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

char *trace_output_join(const char *folder, const char *name)
{
	size_t n = strlen(folder) + strlen(name) + 2;
	char *path = malloc(n);

	if (path)
		snprintf(path, n, "%s/%s", folder, name);
	return path;
}

static int failed(const char *path, const char *why, char *error, size_t size)
{
	snprintf(error, size, "%s: %s", path, why);
	return -1;
}

int trace_output_open(struct trace_output *o, const char *path, char *error, size_t size)
{
	size_t n = strlen(path) + 32;

	memset(o, 0, sizeof *o);
	o->path = strdup(path);
	o->temporary = malloc(n);
	if (!o->path || !o->temporary) {
		free(o->path);
		free(o->temporary);
		return failed(path, "out of memory", error, size);
	}
	snprintf(o->temporary, n, "%s.part-%ld", path, (long)getpid());
	o->file = fopen(o->temporary, "wb");
	if (!o->file) {
		failed(path, strerror(errno), error, size);
		free(o->path);
		free(o->temporary);
		return -1;
	}
	setvbuf(o->file, NULL, _IOFBF, 1 << 20);
	return 0;
}

int trace_output_open_in(struct trace_output *o, const char *folder, const char *name, char *error, size_t size)
{
	char *path = trace_output_join(folder, name);
	int rc = path ? trace_output_open(o, path, error, size) : failed(name, "out of memory", error, size);

	free(path);
	return rc;
}

int trace_output_close(struct trace_output *o, bool keep, char *error, size_t size)
{
	int why = 0, rc = 0;

	if (keep && (fflush(o->file) || ferror(o->file) || fsync(fileno(o->file))))
		why = errno ? errno : EIO;
	if (fclose(o->file) && keep && !why)
		why = errno;
	if (keep && !why && rename(o->temporary, o->path))
		why = errno;
	if (!keep || why)
		remove(o->temporary);
	if (why)
		rc = failed(o->path, strerror(why), error, size);
	free(o->path);
	free(o->temporary);
	return rc;
}

int trace_output_folder(const char *path, char *error, size_t size)
{
	char *copy = strdup(path);
	struct stat st;
	int rc = 0;

	if (!copy)
		return failed(path, "out of memory", error, size);
	for (char *p = copy + 1; rc == 0; p++) {
		char c = *p;

		if (c != '/' && c)
			continue;
		*p = '\0';
		if (mkdir(copy, 0777) && errno != EEXIST)
			rc = failed(copy, strerror(errno), error, size);
		*p = c;
		if (!c)
			break;
	}
	if (rc == 0 && (stat(path, &st) || !S_ISDIR(st.st_mode)))
		rc = failed(path, "is a file, but a folder is to be written", error, size);
	free(copy);
	return rc;
}

void trace_output_base64(FILE *out, const uint8_t *data, size_t n)
{
	static const char digit[] =
		"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
	char text[4096];
	size_t at = 0;

	for (size_t i = 0; i < n; i += 3) {
		uint32_t v = (uint32_t)data[i] << 16;

		if (i + 1 < n)
			v |= (uint32_t)data[i + 1] << 8;
		if (i + 2 < n)
			v |= data[i + 2];
		text[at++] = digit[v >> 18];
		text[at++] = digit[v >> 12 & 63];
		text[at++] = i + 1 < n ? digit[v >> 6 & 63] : '=';
		text[at++] = i + 2 < n ? digit[v & 63] : '=';
		if (at == sizeof text) {
			fwrite(text, 1, at, out);
			at = 0;
		}
	}
	fwrite(text, 1, at, out);
}
