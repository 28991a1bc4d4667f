/* SPDX-License-Identifier: Apache-2.0 */
#include "graphs/decoder_span.h"

#include "graphs/stream.h"

#define FAN 8

enum moe_status moe_span_create(struct moe_engine *e, const char *name, int max_blocks,
				struct moe_span *s)
{
	memset(s, 0, sizeof *s);
	s->max_blocks = max_blocks;
	if (max_blocks <= MOE_SPAN_MAX)
		return MOE_OK;
	for (int n = max_blocks / FAN; n && s->levels < MOE_SPAN_LEVELS; n /= FAN) {
		enum moe_status st = moe_tensors_create(e, name, n, false, &s->level[s->levels]);

		if (st != MOE_OK) {
			moe_span_destroy(s);
			return st;
		}
		s->levels++;
	}
	return MOE_OK;
}

void moe_span_destroy(struct moe_span *s)
{
	int n = s->max_blocks / FAN;

	for (int i = 0; i < s->levels; i++, n /= FAN)
		moe_tensors_destroy(s->level[i], n);
	memset(s, 0, sizeof *s);
}

enum moe_status moe_span_submit(const struct moe_context *c, struct moe_span *s,
				struct moe_tensor *const *block, int n)
{
	MOE_ASSERT(n <= s->max_blocks);
	s->n = n;
	if (n <= MOE_SPAN_MAX)
		return MOE_OK;
	for (int i = 0; i < s->levels; i++) {
		n /= FAN;
		for (int g = 0; g < n; g++)
			MOE_TRY(moe_task_join(c, block + g * FAN, FAN, NULL, s->level[i][g]));
		block = s->level[i];
	}
	return MOE_OK;
}

int moe_span_collect(const struct moe_span *s, struct moe_tensor *const *block, int b0, int b1,
		     struct moe_tensor **out)
{
	int n = 0;

	while (b0 < b1) {
		int level = 0, width = 1;

		while (s->n > MOE_SPAN_MAX && level < s->levels && b0 % (width * FAN) == 0 &&
		       b0 + width * FAN <= b1) {
			width *= FAN;
			level++;
		}
		MOE_ASSERT(n < MOE_SPAN_MAX);
		out[n++] = level ? s->level[level - 1][b0 / width] : block[b0];
		b0 += width;
	}
	return n;
}
