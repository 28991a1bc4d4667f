/* SPDX-License-Identifier: Apache-2.0 */
/* Chooses the kernel table of the process. */
#include "codelets/format.h"
#include "codelets/kernels/kernels.h"

#include "engine/engine.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static const struct moe_kernels *_Atomic selected;

const struct moe_kernels *moe_kernels(void)
{
	MOE_ASSERT(selected);
	return selected;
}

static enum moe_status unknown(const char *name)
{
	char text[256];
	size_t at = 0;

	text[0] = 0;
	for (int i = 0; moe_kernels_list[i] && at < sizeof text; i++)
		at += (size_t)snprintf(text + at, sizeof text - at, " %s%s", moe_kernels_list[i]->name,
				       moe_kernels_list[i]->supported() ? "" : " (not on this CPU)");
	return moe_fail(MOE_ERR_CONFIG, "no kernels \"%s\" for this CPU; built:%s", name, text);
}

enum moe_status moe_kernels_choose(const char *name, const struct moe_kernels **out)
{
	const struct moe_kernels *best = NULL;

	if (!name)
		name = getenv("MOESAIC_ISA");
	if (name && !*name) /* as other empty variables: not set */
		name = NULL;
	for (int i = 0; moe_kernels_list[i]; i++) {
		const struct moe_kernels *k = moe_kernels_list[i];

		if (!k->supported() || (name && strcmp(name, k->name)))
			continue;
		if (!best || k->rank > best->rank)
			best = k;
	}
	if (!best)
		return unknown(name ? name : "");
	*out = best;
	return MOE_OK;
}

enum moe_status moe_kernels_select(const char *name)
{
	const struct moe_kernels *best;

	MOE_TRY(moe_kernels_choose(name, &best));
	selected = best;
	moe_coders_use(best->coders);
	return MOE_OK;
}

enum moe_status moe_kernels_enable(const struct moe_kernels *k)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static const struct moe_kernels *enabled[32];
	bool granted = !k->enable;
	size_t n = 0;

	pthread_mutex_lock(&lock);
	while (!granted && n < MOE_COUNT(enabled) && enabled[n])
		granted = enabled[n++] == k;
	if (!granted && k->enable()) {
		granted = true;
		if (n < MOE_COUNT(enabled))
			enabled[n] = k;
	}
	pthread_mutex_unlock(&lock);
	return granted ? MOE_OK
		       : moe_fail(MOE_ERR_CONFIG,
				  "the operating system refuses what the %s kernels need; MOESAIC_ISA names "
				  "others (moesaic doctor lists them)", k->name);
}

enum moe_status moe_engine_prepare(const char *isa)
{
	const struct moe_kernels *k;

	MOE_TRY(moe_compute_check());
	MOE_TRY(moe_kernels_choose(isa, &k));
	return moe_kernels_enable(k);
}
