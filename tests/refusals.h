/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of what the C interface refuses: the call's status, and what its text says of the value and of what is possible. Rows
 * change one thing in parameters that are good.
 */
#ifndef MOE_TESTS_REFUSALS_H
#define MOE_TESTS_REFUSALS_H

#include "moesaic.h"
#include "tests/harness.h"

#include <stdio.h>
#include <string.h>

/* What the calls of all rows use; a row spoils a copy. */
struct refusal {
	struct moe_engine *engine;
	struct moe_model *model;
	struct moe_model_params m;
	struct moe_trainer_params t;
	struct moe_experts_params e;
	struct moe_block_params b;
	struct moe_estimate_params s;
	struct moe_merge_params g;
	struct moe_convert_params a;
	struct moe_convert_model_params w;
};

struct row {
	enum moe_status (*call)(struct refusal *r);
	enum moe_status status;
	const char *says;
};

#define CALL(name) static enum moe_status name(__attribute__((unused)) struct refusal *r)

/* ref: F32 stays F32, so that widths differ */
static inline struct moe_engine *refusals_engine(void)
{
	struct moe_engine_params p = { .struct_size = sizeof p, .workers = 2, .isa = "ref" };
	struct moe_engine *e = NULL;

	CU_ASSERT_EQUAL_FATAL(moe_engine_open(&p, &e), MOE_OK);
	return e;
}

static inline void fill(struct refusal *r)
{
	const char *dir = moe_test_path("tests/fixtures/ckpt/qwen3moe");

	r->m = (struct moe_model_params){ .struct_size = sizeof r->m, .dir = dir, .max_tokens = 32 };
	r->t = (struct moe_trainer_params){ .struct_size = sizeof r->t, .data = "none", .output_dir = "none" };
	r->e = (struct moe_experts_params){ .struct_size = sizeof r->e, .experts = 2, .experts_per_token = 1, .hidden = 16,
					    .intermediate = 16, .lora_rank = 2, .lora_alpha = 2, .weight_dtype = MOE_F32 };
	r->b = (struct moe_block_params){ .struct_size = sizeof r->b, .experts = 2, .experts_per_token = 1, .hidden = 16,
					  .intermediate = 16, .weight_dtype = MOE_F32 };
	r->s = (struct moe_estimate_params){ .struct_size = sizeof r->s, .model = &r->m };
	r->g = (struct moe_merge_params){ .struct_size = sizeof r->g, .model = dir, .adapter = "none", .output_dir = "none" };
	r->a = (struct moe_convert_params){ .struct_size = sizeof r->a, .in = "none", .out = "none", .adapter_format = "kt" };
	r->w = (struct moe_convert_model_params){ .struct_size = sizeof r->w, .in = dir, .out = "none", .weights = "int8" };
}

static inline void check(struct refusal *r, const struct row *row, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		enum moe_status st;

		fill(r);
		st = row[i].call(r);
		if (st != row[i].status || !strstr(moe_last_error(), row[i].says))
			printf("row %zu: %s: %s; expected \"%s\"\n", i, moe_status_text(st), moe_last_error(), row[i].says);
		CU_ASSERT_EQUAL(st, row[i].status);
		CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), row[i].says));
	}
}

#define CHECK(r, rows) check(r, rows, sizeof(rows) / sizeof *(rows))

#endif
