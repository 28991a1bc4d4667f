/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A harness defines LLVMFuzzerTestOneInput. libFuzzer drives it in a build with -DMOESAIC_FUZZ=ON
 * (clang); in every other build replay.c runs the seeds through it, as a test.
 */
#ifndef MOE_TESTS_FUZZ_H
#define MOE_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A file with that content for readers that take a path; the same place every time. */
const char *fuzz_file(const uint8_t *data, size_t size, const char *suffix);

#endif
