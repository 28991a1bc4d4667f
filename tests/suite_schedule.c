/* SPDX-License-Identifier: Apache-2.0 */
/* Learning-rate schedules beside transformers' (tests/peft/test_schedules.py stored its values). */
#include "tests/harness.h"

#include "model/json.h"
#include "train/schedule.h"

#include <math.h>
#include <stdio.h>

const char moe_suite_name[] = "schedule";

static void check_case(const cJSON *c, double peak)
{
	const cJSON *rates = moe_json_get(c, "learning_rate");
	int64_t total = (int64_t)moe_json_get(c, "total")->valuedouble;
	int64_t warmup = (int64_t)moe_json_get(c, "warmup")->valuedouble;
	const char *name = moe_json_get(c, "name")->valuestring;
	struct moe_schedule s;

	CU_ASSERT_EQUAL_FATAL(moe_schedule_create(name, moe_json_get(c, "args")->valuestring, peak,
						  total, warmup, &s),
			      MOE_OK);
	CU_ASSERT_EQUAL_FATAL(cJSON_GetArraySize(rates), (int)total);
	for (int64_t i = 0; i < total; i++) {
		double want = cJSON_GetArrayItem(rates, (int)i)->valuedouble;
		double got = peak * moe_schedule_factor(&s, i + 1);

		if (!(fabs(got - want) <= 1e-12 * peak))
			printf("%s (%s) step %lld: %.17g, transformers %.17g\n", name,
			       moe_json_get(c, "args")->valuestring, (long long)i + 1, got, want);
		CU_ASSERT_DOUBLE_EQUAL(got, want, 1e-12 * peak);
	}
}

static void as_transformers(void)
{
	const cJSON *c;
	cJSON *file;
	int n = 0;

	CU_ASSERT_EQUAL_FATAL(moe_json_read(moe_test_path("tests/fixtures/schedules.json"), &file),
			      MOE_OK);
	cJSON_ArrayForEach(c, moe_json_get(file, "cases"))
	{
		check_case(c, moe_json_get(file, "peak")->valuedouble);
		n++;
	}
	CU_ASSERT_TRUE(n >= 20);
	cJSON_Delete(file);
}

static void refused(const char *name, const char *args, const char *part)
{
	struct moe_schedule s;

	CU_ASSERT_EQUAL(moe_schedule_create(name, args, 1e-4, 20, 3, &s), MOE_ERR_ARG);
	CU_ASSERT_PTR_NOT_NULL(strstr(moe_last_error(), part));
}

static void errors(void)
{
	struct moe_schedule s;

	refused("cosin", NULL, "warmup_stable_decay");
	refused("reduce_lr_on_plateau", NULL, "measured loss");
	refused("linear", "power=2", "takes key=value of: none");
	refused("cosine", "num_cycle=2", "num_cycles");
	refused("cosine", "num_cycles", "num_cycles");
	refused("cosine", "num_cycles=fast", "not a number");
	refused("cosine", "num_cycles=-1", "not a number");
	refused("cosine_with_min_lr", NULL, "min_lr min_lr_rate");
	refused("cosine_with_min_lr", "min_lr=1e-5,min_lr_rate=.1", "one of them");
	refused("cosine_with_min_lr", "min_lr=1e-3", "above the learning rate");
	refused("polynomial", "lr_end=1e-4", "above the learning rate");
	refused("inverse_sqrt", "timescale=0", "timescale");
	refused("warmup_stable_decay", NULL, "num_decay_steps");
	refused("warmup_stable_decay", "num_decay_steps=18", "more than all 20");
	refused("warmup_stable_decay", "num_decay_steps=2,decay_type=odd", "1-sqrt");
	CU_ASSERT_EQUAL(moe_schedule_create(NULL, NULL, 1e-4, 20, 3, &s), MOE_OK);
	CU_ASSERT_DOUBLE_EQUAL(moe_schedule_factor(&s, 4), 1, 0);
	CU_ASSERT_EQUAL(moe_schedule_create("polynomial", " power=2 , lr_end=0 ", 1e-4, 20, 0, &s),
			MOE_OK);
	CU_ASSERT_DOUBLE_EQUAL(moe_schedule_factor(&s, 11), .25, 1e-12);
}

/* Finite and from 0 to 1 wherever a run may be, also with more warm-up than steps. */
static void bounded(void)
{
	static const char *const args[][2] = { { "cosine", NULL },
					       { "linear", NULL },
					       { "constant", NULL },
					       { "constant_with_warmup", NULL },
					       { "cosine_with_restarts", "num_cycles=2" },
					       { "polynomial", "power=.5" },
					       { "inverse_sqrt", NULL },
					       { "cosine_with_min_lr", "min_lr_rate=.1" },
					       { "cosine_warmup_with_min_lr", "min_lr_rate=.1" } };

	for (size_t i = 0; i < MOE_COUNT(args); i++)
		for (int64_t total = 1; total < 6; total++)
			for (int64_t warmup = 0; warmup < 8; warmup++)
				for (int64_t step = 1; step <= total; step++) {
					struct moe_schedule s;
					double f;

					CU_ASSERT_EQUAL_FATAL(
						moe_schedule_create(args[i][0], args[i][1], 1e-4,
								    total, warmup, &s),
						MOE_OK);
					f = moe_schedule_factor(&s, step);
					CU_ASSERT_TRUE(f >= 0 && f <= 1);
				}
}

static void warm_up(void)
{
	CU_ASSERT_EQUAL(moe_schedule_warmup(.03, 0, 100), 3);
	CU_ASSERT_EQUAL(moe_schedule_warmup(.03, 0, 101), 4);
	CU_ASSERT_EQUAL(moe_schedule_warmup(.03, 7, 101), 7);
	CU_ASSERT_EQUAL(moe_schedule_warmup(0, 0, 101), 0);
}

const struct moe_test moe_suite_tests[] = {
	{ "values of transformers", as_transformers },
	{ "errors", errors },
	{ "between 0 and 1", bounded },
	{ "warm-up", warm_up },
	{ NULL, NULL },
};
