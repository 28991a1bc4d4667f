/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Quantised checkpoints: the first byte says what they become, the rest is model.safetensors. What
 * converts must be complete and readable.
 */
#include "tests/fuzz/fuzz.h"

#include "model/convert.h"
#include "model/file.h"

#include <stdio.h>
#include <string.h>

static const char *const targets[] = { "int8", "int4", "fp8", "mxfp4", "gptq", "awq", "bf16", "f32" };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char in[160], out[200], partial[220];
	struct moe_convert_model_params p = { .struct_size = sizeof p, .threads = 1 };
	struct moe_convert_model_result r = { .struct_size = sizeof r };
	struct moe_safetensors *st = NULL;
	uint8_t kind = size ? data[0] : 0;

	fuzz_file((const uint8_t *)"{}", 2, "config.json");
	snprintf(in, sizeof in, "%s",
		 fuzz_file(data + (size > 0), size - (size > 0), "model.safetensors"));
	*strrchr(in, '/') = 0;
	snprintf(out, sizeof out, "%s-out", in);
	snprintf(partial, sizeof partial, "%s.partial", out);
	p.in = in;
	p.out = out;
	p.weights = targets[kind % 8];
	p.layers = kind & 8 ? "linear" : NULL;
	p.max_shard_bytes = kind & 16 ? 300 : 0;
	if (moe_convert_model_run(&p, NULL, NULL, &r) == MOE_OK) {
		if (moe_safetensors_open(out, &st) != MOE_OK ||
		    (int64_t)moe_safetensors_count(st) != r.tensors)
			__builtin_trap();
		moe_safetensors_close(st);
	}
	moe_tree_remove(out);
	moe_tree_remove(partial);
	return 0;
}
