/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An adapter's folder. The input is three files one after the other, each with its length before it
 * (u32, little-endian): adapter_config.json, adapter_model.safetensors and, unless it is empty,
 * fused_expert_lora.safetensors. What is read must be complete, and come back from every form.
 */
#include "tests/fuzz/fuzz.h"

#include "model/adapters/adapter_form.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MOST_PARAMS (1 << 20) /* what a hostile file may make us write */

static size_t part(const uint8_t **data, size_t *size, const char *name)
{
	uint32_t n = 0;

	if (*size >= 4)
		memcpy(&n, *data, 4);
	*data += *size >= 4 ? 4 : *size;
	*size -= *size >= 4 ? 4 : *size;
	n = n > *size ? (uint32_t)*size : n;
	fuzz_file(*data, n, name);
	*data += n;
	*size -= n;
	return n;
}

static void write_all(const struct moe_adapter *a, const char *folder)
{
	char out[200];

	snprintf(out, sizeof out, "%s/written", folder);
	for (int i = 0; moe_adapter_form_list[i]; i++) {
		struct moe_adapter *back = NULL;
		enum moe_status st = moe_adapter_write(out, a, moe_adapter_form_list[i]->name);

		if (st == MOE_OK) {
			st = moe_adapter_read(out, &back);
			if (st != MOE_OK || back->n_entries != a->n_entries)
				__builtin_trap();
			moe_adapter_free(back);
		}
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct moe_adapter *a = NULL;
	char folder[160];

	part(&data, &size, "adapter_config.json");
	part(&data, &size, "adapter_model.safetensors");
	snprintf(folder, sizeof folder, "%s", fuzz_file(data, 0, "fused_expert_lora.safetensors"));
	if (!part(&data, &size, "fused_expert_lora.safetensors"))
		unlink(folder);
	*strrchr(folder, '/') = 0;
	if (moe_adapter_read(folder, &a) != MOE_OK)
		return 0;
	if (moe_adapter_validate(a) == MOE_OK && moe_adapter_count_params(a) < MOST_PARAMS)
		write_all(a, folder);
	moe_adapter_free(a);
	return 0;
}
