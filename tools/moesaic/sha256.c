/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 (FIPS 180-4): what Python's hashlib wrote into a token file is compared with the files of
 * today. */
#include "tools/moesaic/sha256.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct sha256 {
	uint32_t state[8];
	uint64_t bytes;
	unsigned char block[64];
};

static uint32_t rotate(uint32_t x, int n)
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
	for (int i = 0; i < 8; i++) {
		prime = next_prime(prime);
		h->state[i] = fraction(sqrt(prime));
	}
}

static void compress(struct sha256 *h)
{
	uint32_t w[64], s[8];
	int prime = 1;

	for (int i = 0; i < 16; i++)
		w[i] = (uint32_t)h->block[4 * i] << 24 | (uint32_t)h->block[4 * i + 1] << 16 |
		       (uint32_t)h->block[4 * i + 2] << 8 | h->block[4 * i + 3];
	for (int i = 16; i < 64; i++)
		w[i] = w[i - 16] + w[i - 7] +
		       (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) +
		       (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
	memcpy(s, h->state, sizeof s);
	for (int i = 0; i < 64; i++) {
		static uint32_t k[64];
		uint32_t t, u;

		prime = k[63] ? prime : next_prime(prime);
		if (!k[i])
			k[i] = fraction(cbrt(prime));
		t = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) +
		    ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
		u = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) +
		    ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
		memmove(s + 1, s, 7 * sizeof *s);
		s[4] += t;
		s[0] = t + u;
	}
	for (int i = 0; i < 8; i++)
		h->state[i] += s[i];
}

static void feed(struct sha256 *h, const void *data, size_t bytes)
{
	const unsigned char *at = data;

	while (bytes) {
		size_t used = h->bytes % 64, n = bytes < 64 - used ? bytes : 64 - used;

		memcpy(h->block + used, at, n);
		h->bytes += n;
		at += n;
		bytes -= n;
		if (h->bytes % 64 == 0)
			compress(h);
	}
}

static void finish(struct sha256 *h, char out[SHA256_HEX])
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
		sprintf(out + 8 * i, "%08x", h->state[i]);
}

void sha256_text(const void *data, size_t bytes, char out[SHA256_HEX])
{
	struct sha256 h;

	start(&h);
	feed(&h, data, bytes);
	finish(&h, out);
}

bool sha256_file(const char *path, char out[SHA256_HEX])
{
	FILE *f = fopen(path, "rb");
	struct sha256 h;
	char buf[1 << 16];
	size_t n;
	bool ok;

	if (!f)
		return false;
	start(&h);
	while ((n = fread(buf, 1, sizeof buf, f)) > 0)
		feed(&h, buf, n);
	ok = !ferror(f);
	fclose(f);
	finish(&h, out);
	return ok;
}
