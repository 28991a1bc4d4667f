/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 (FIPS 180-4): what Python's hashlib and sha256sum make of the same bytes. */
#include "model/file.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

#define READ_BYTES ((size_t)1 << 20)

struct sha256 {
	uint32_t state[8], k[64];
	uint64_t bytes;
	unsigned char block[64];
};

static inline uint32_t rotate(uint32_t x, int n)
{
	return x >> n | x << (32 - n);
}

/* The first 32 bits of the fraction of a prime's root; exact: double has 52. */
static uint32_t fraction(double root)
{
	return (uint32_t)((root - floor(root)) * 0x1p32);
}

static int next_prime(int n)
{
	for (;;) {
		bool prime = true;

		n++;
		for (int d = 2; d * d <= n && prime; d++)
			prime = n % d != 0;
		if (prime)
			return n;
	}
}

static void start(struct sha256 *h)
{
	int prime = 1;

	memset(h, 0, sizeof *h);
	for (int i = 0; i < 64; i++) {
		prime = next_prime(prime);
		h->k[i] = fraction(cbrt(prime));
		if (i < 8)
			h->state[i] = fraction(sqrt(prime));
	}
}

/* One round: the letters of the standard, which move by one place from round to round. */
#define ROUND(a, b, c, d, e, f, g, h, i)                                                           \
	do {                                                                                       \
		uint32_t t = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) +                  \
			     ((e & f) ^ (~e & g)) + k[i] + w[i];                                   \
		d += t;                                                                            \
		h = t + (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) +                           \
		    ((a & b) ^ (a & c) ^ (b & c));                                                 \
	} while (0)

static void compress(struct sha256 *sha, const unsigned char *at)
{
	const uint32_t *k = sha->k;
	uint32_t *s = sha->state, w[64];
	uint32_t a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5], g = s[6], h = s[7];

	for (int i = 0; i < 16; i++)
		w[i] = (uint32_t)at[4 * i] << 24 | (uint32_t)at[4 * i + 1] << 16 |
		       (uint32_t)at[4 * i + 2] << 8 | at[4 * i + 3];
	for (int i = 16; i < 64; i++)
		w[i] = w[i - 16] + w[i - 7] +
		       (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) +
		       (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
	for (int i = 0; i < 64; i += 8) {
		ROUND(a, b, c, d, e, f, g, h, i);
		ROUND(h, a, b, c, d, e, f, g, i + 1);
		ROUND(g, h, a, b, c, d, e, f, i + 2);
		ROUND(f, g, h, a, b, c, d, e, i + 3);
		ROUND(e, f, g, h, a, b, c, d, i + 4);
		ROUND(d, e, f, g, h, a, b, c, i + 5);
		ROUND(c, d, e, f, g, h, a, b, i + 6);
		ROUND(b, c, d, e, f, g, h, a, i + 7);
	}
	s[0] += a, s[1] += b, s[2] += c, s[3] += d;
	s[4] += e, s[5] += f, s[6] += g, s[7] += h;
}

static void feed(struct sha256 *h, const void *data, size_t bytes)
{
	const unsigned char *at = data;

	while (bytes) {
		size_t used = h->bytes % 64, n = bytes < 64 - used ? bytes : 64 - used;

		if (n == 64) {
			compress(h, at);
		} else {
			memcpy(h->block + used, at, n);
			if (used + n == 64)
				compress(h, h->block);
		}
		h->bytes += n;
		at += n;
		bytes -= n;
	}
}

static void finish(struct sha256 *h, char out[MOE_SHA256_TEXT])
{
	uint64_t bits = h->bytes * 8;
	unsigned char length[8];

	feed(h, "\x80", 1);
	while (h->bytes % 64 != 56)
		feed(h, "", 1);
	for (int i = 0; i < 8; i++)
		length[i] = (unsigned char)(bits >> (56 - 8 * i));
	feed(h, length, 8);
	for (int i = 0; i < 8; i++)
		snprintf(out + 8 * i, MOE_SHA256_TEXT - 8 * (size_t)i, "%08x", h->state[i]);
}

void moe_sha256(const void *data, size_t bytes, char out[MOE_SHA256_TEXT])
{
	struct sha256 h;

	start(&h);
	feed(&h, data, bytes);
	finish(&h, out);
}

enum moe_status moe_file_sha256(const char *path, char out[MOE_SHA256_TEXT])
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	unsigned char *buf = moe_alloc(READ_BYTES, 1);
	enum moe_status status = MOE_OK;
	struct sha256 h;
	ssize_t n = 1;

	if (fd < 0)
		status = moe_fail(MOE_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
	else if (!buf)
		status = moe_fail(MOE_ERR_NOMEM, "%s: out of memory", path);
	start(&h);
	while (status == MOE_OK && n > 0) {
		n = read(fd, buf, READ_BYTES);
		if (n > 0)
			feed(&h, buf, (size_t)n);
		else if (n < 0 && errno == EINTR)
			n = 1;
		else if (n < 0)
			status = moe_fail(MOE_ERR_IO, "%s: cannot read: %s", path, strerror(errno));
	}
	if (fd >= 0)
		close(fd);
	moe_free(buf);
	finish(&h, out);
	return status;
}
