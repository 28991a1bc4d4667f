/* SPDX-License-Identifier: Apache-2.0 */
/* A GGUF file that is put together by hand. */
#ifndef MOE_TESTS_GGUF_BYTES_H
#define MOE_TESTS_GGUF_BYTES_H

#include <stdint.h>
#include <string.h>

#ifndef GGUF_BYTES
#define GGUF_BYTES (2 << 20)
#endif

struct gguf_bytes {
	uint8_t bytes[GGUF_BYTES];
	size_t n;
};

static inline void put(struct gguf_bytes *f, const void *data, size_t n)
{
	memcpy(f->bytes + f->n, data, n);
	f->n += n;
}

static inline void put32(struct gguf_bytes *f, uint32_t v)
{
	put(f, &v, 4);
}

static inline void put64(struct gguf_bytes *f, uint64_t v)
{
	put(f, &v, 8);
}

static inline void put_text(struct gguf_bytes *f, const char *text)
{
	put64(f, strlen(text));
	put(f, text, strlen(text));
}

static inline void put_key_text(struct gguf_bytes *f, const char *key, const char *value)
{
	put_text(f, key);
	put32(f, 8);
	put_text(f, value);
}

static inline void put_key32(struct gguf_bytes *f, const char *key, uint32_t v)
{
	put_text(f, key);
	put32(f, 4);
	put32(f, v);
}

static inline void put_key_float(struct gguf_bytes *f, const char *key, float v)
{
	put_text(f, key);
	put32(f, 6);
	put(f, &v, 4);
}

/* A tensor whose data begin at this place behind the header. */
static inline void put_tensor(struct gguf_bytes *f, const char *name, int ndim, const uint64_t *dim,
			      uint32_t type, uint64_t at)
{
	put_text(f, name);
	put32(f, (uint32_t)ndim);
	for (int i = 0; i < ndim; i++)
		put64(f, dim[i]);
	put32(f, type);
	put64(f, at);
}

static inline void put_padding(struct gguf_bytes *f)
{
	for (; f->n % 32; f->n++)
		f->bytes[f->n] = 0;
}

#endif
