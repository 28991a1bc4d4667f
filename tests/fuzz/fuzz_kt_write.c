/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Experts written as kt-kernel's files and read again: the first byte says which bits, how many parts and whether
 * backward weights come with them, the rest is a model.safetensors. What is written can be read, and is finite.
 */
#include "tests/fuzz/fuzz.h"

#include "model/convert.h"
#include "model/file.h"
#include "model/quantised.h"

#include <math.h>
#include <stdio.h>

#define MOST 96

static volatile float sum;

static void read_matrix(const struct moe_st_tensor *t)
{
	struct moe_quantised q = moe_st_quantised_own(t);
	float row[MOST];

	if (moe_check_scales(&q, t->name) != MOE_OK)
		__builtin_trap();
	for (int64_t n = 0; n < q.n; n++)
		for (int64_t k = 0; k < q.k; k += MOST) {
			moe_dequantise_row(&q, n, k, MOE_MIN(MOST, q.k - k), row);
			if (!isfinite(row[0]))
				__builtin_trap();
			sum += row[0];
		}
}

static size_t read_folder(const char *dir)
{
	struct moe_safetensors *st;
	size_t n = 0;

	if (moe_safetensors_open(dir, &st) != MOE_OK)
		__builtin_trap();
	for (size_t i = 0; i < moe_safetensors_count(st); i++)
		if (moe_safetensors_at(st, i)->codes) {
			read_matrix(moe_safetensors_at(st, i));
			n++;
		}
	moe_safetensors_close(st);
	return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char in[160], out[200], partial[220];
	struct moe_convert_model_params p = { .struct_size = sizeof p, .threads = 1 };
	struct moe_convert_model_result r = { .struct_size = sizeof r };
	uint8_t kind = size ? data[0] : 0;

	fuzz_file((const uint8_t *)"{}", 2, "config.json");
	snprintf(in, sizeof in, "%s", fuzz_file(data + (size > 0), size - (size > 0), "model.safetensors"));
	*strrchr(in, '/') = 0;
	snprintf(out, sizeof out, "%s-out", in);
	snprintf(partial, sizeof partial, "%s.partial", out);
	p.in = in;
	p.out = out;
	p.weights = kind & 1 ? "kt-int4" : "kt-int8";
	p.kt_parts = 1 + (kind >> 1 & 3) % 3;
	p.kt_backward = kind >> 3 & 1;
	if (moe_convert_model_run(&p, NULL, NULL, &r) == MOE_OK && read_folder(out) % 3)
		__builtin_trap();
	moe_tree_remove(out);
	moe_tree_remove(partial);
	return 0;
}
