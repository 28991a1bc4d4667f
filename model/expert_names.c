/* SPDX-License-Identifier: Apache-2.0 */
#include "model/expert_names.h"

const char *const moe_expert_names[MOE_EXPERT_NAMINGS][3] = {
	[MOE_NAMES_USUAL] = { "gate_proj", "up_proj", "down_proj" },
	[MOE_NAMES_MIXTRAL] = { "w1", "w3", "w2" },
};

/* The n characters of a are b. */
static bool is(const char *a, size_t n, const char *b)
{
	return strlen(b) == n && !memcmp(a, b, n);
}

int moe_expert_which(const char *name)
{
	size_t n = strlen(name), cut = strlen(".weight");
	const char *last, *end;

	if (n > cut && !strcmp(name + n - cut, ".weight"))
		n -= cut;
	end = name + n;
	for (last = end; last > name && last[-1] != '.'; last--)
		;
	if (last == name) /* nothing above it */
		return -1;
	if (is(last, (size_t)(end - last), MOE_NAME_GATE_UP))
		return 3;
	for (int i = 0; i < MOE_EXPERT_NAMINGS; i++)
		for (int j = 0; j < 3; j++)
			if (is(last, (size_t)(end - last), moe_expert_names[i][j]))
				return j;
	return -1;
}

const char *const *moe_expert_names_beside(const char *name)
{
	return moe_expert_names[strstr(name, ".block_sparse_moe.") ? MOE_NAMES_MIXTRAL : MOE_NAMES_USUAL];
}
