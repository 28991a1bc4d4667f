/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trace: all that moesaic-trace computes from it. Checksums are made right first, wherever a
 * chunk may begin, so that changes reach what reads the values; a refusal has a text.
 */
#include "tests/fuzz/fuzz.h"
#include "tests/trace_digest.h"

#include <stdlib.h>
#include <string.h>

static const uint8_t mark[4] = { 'M', 'X', 'T', 'C' };

/* mark, type, rows, length, crc (u32 each), 64 bytes of ranges, crc */
static void repair(uint8_t *data, size_t size)
{
	for (size_t at = MOE_MXT_FILE_BYTES; at + MOE_MXT_HEAD_BYTES <= size; at++) {
		uint8_t *head = data + at, *payload = head + MOE_MXT_HEAD_BYTES;
		uint32_t length, crc;

		if (memcmp(head, mark, 4))
			continue;
		memcpy(&length, head + 12, 4);
		if (length > size - at - MOE_MXT_HEAD_BYTES)
			continue;
		crc = moe_mxt_crc(0, payload, length);
		memcpy(head + 16, &crc, 4);
		crc = moe_mxt_crc(0, head, MOE_MXT_HEAD_BYTES - 4);
		memcpy(head + MOE_MXT_HEAD_BYTES - 4, &crc, 4);
		at += MOE_MXT_HEAD_BYTES + length - 1;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	FILE *out = fopen("/dev/null", "w");
	uint8_t *copy = malloc(size + 1);
	char error[300] = "";

	if (out && copy) {
		memcpy(copy, data, size);
		repair(copy, size);
		if (trace_digest(fuzz_file(copy, size, "t.mxt"), out, error, sizeof error) == -1 &&
		    !error[0])
			__builtin_trap();
	}
	free(copy);
	if (out)
		fclose(out);
	return 0;
}
