/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One GGUF file: its config, and every weight of every matrix that is listed, as meant and as read; of a whole model and
 * of experts alone.
 */
#include "tests/fuzz/fuzz.h"

#include "model/arch.h"
#include "model/quantised.h"

#define MOST 512

static volatile float sum;

static void read_matrix(const struct moe_safetensors *st, const struct moe_st_tensor *t)
{
	struct moe_st_quantised q;
	float row[MOST];
	bool found;

	if (moe_st_quantised_find(st, t->name, 0, t->shape[0], t->shape[1], &q, &found) != MOE_OK ||
	    !found)
		__builtin_trap();
	for (int64_t n = 0; n < t->shape[0]; n++)
		for (int64_t k = 0; k < t->shape[1]; k += MOST) {
			int64_t count = MOE_MIN(t->shape[1] - k, MOST);

			moe_st_quantised_row(t, &q.q, n, k, count, row);
			sum += row[0] + row[count - 1];
			moe_dequantise_row(&q.q, n, k, count, row);
			sum += row[0] + row[count - 1];
		}
}

static void read_all(struct moe_safetensors *st)
{
	for (size_t i = 0; i < moe_safetensors_count(st); i++) {
		const struct moe_st_tensor *t = moe_safetensors_at(st, i);
		const unsigned char *bytes = t->data;

		if (moe_safetensors_find(st, t->name) != t)
			__builtin_trap();
		for (size_t j = 0; j < t->bytes; j++)
			sum += bytes[j];
		if (t->codes)
			read_matrix(st, t);
	}
	moe_safetensors_close(st);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const char *path = fuzz_file(data, size, "one.gguf");
	static struct moe_arch arch;
	struct moe_safetensors *st;

	moe_arch_load(path, &arch);
	if (moe_safetensors_open(path, &st) == MOE_OK)
		read_all(st);
	if (moe_safetensors_open_experts(path, &st) == MOE_OK)
		read_all(st);
	return 0;
}
