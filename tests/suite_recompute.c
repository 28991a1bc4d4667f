/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Activations of whole models: kept or computed again they give the same losses, gradients and LoRA
 * after updates, bit by bit, in every architecture and number of parts, and some of them in every table.
 * Some of each, and whole weights: suite_full_recompute.
 */
#include "tests/model_digest.h"

const char moe_suite_name[] = "recompute";

struct setting {
	enum moe_recompute recompute;
	int slots;
};

/* Two steps that update; what is then there. */
static uint64_t run_model(struct moe_engine *e, const char *dir, const char *targets,
			  const struct setting *s, int64_t *bytes)
{
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = dir,
				      .max_tokens = 128,
				      .slots = s->slots,
				      .lora_targets = targets,
				      .lora_rank = 4,
				      .aux_coef = .1,
				      .seed = 3,
				      .recompute = s->recompute };
	struct run r = { .lr = 1e-3, .max_norm = 1 };
	double loss[2];
	uint64_t h;

	struct moe_model_info info = { .struct_size = sizeof info };

	OK(moe_model_open(e, &p, &r.m));
	if (!r.m)
		return 0;
	OK(moe_model_get_info(r.m, &info));
	*bytes = info.activation_bytes / s->slots;
	fill_run(&r, r.m->decoder.V);
	loss[0] = step(&r, true);
	loss[1] = step(&r, true);
	h = digest_bytes(digest_model(r.m), loss, sizeof loss);
	free_run(&r);
	moe_model_close(r.m);
	return h;
}

static void check_targets(struct moe_engine *e, const char *name, const char *dir,
			  const char *targets)
{
	static const struct setting settings[] = {
		{ MOE_RECOMPUTE_ALWAYS, 2 },
		{ MOE_RECOMPUTE_ALWAYS, 1 },
		{ MOE_RECOMPUTE_NEVER, 1 },
	};
	const struct setting never = { MOE_RECOMPUTE_NEVER, 2 };
	int64_t kept, bytes;
	uint64_t want = run_model(e, dir, targets, &never, &kept);

	for (size_t i = 0; i < MOE_COUNT(settings); i++) {
		if (run_model(e, dir, targets, &settings[i], &bytes) != want) {
			CU_FAIL("other bits");
			printf("  %s, %s, %s: setting %zu differs\n", table()->name, name, targets,
			       i);
		} else if (settings[i].recompute == MOE_RECOMPUTE_ALWAYS) {
			CU_ASSERT(bytes < kept);
		}
	}
}

static void check_configs(void)
{
	for (int parts = 1; parts <= 3; parts += 2) {
		struct moe_engine *e = open_engine(2, parts, NULL);

		for (size_t i = 0; i < MOE_COUNT(model_configs); i++) {
			struct ref_model ref;

			if (!best_table_takes(i + (size_t)parts, 3))
				continue;
			ref_create(&ref, model_configs[i].name, model_configs[i].config, 7);
			check_targets(e, model_configs[i].name, ref.dir,
				      "experts,q_proj,k_proj,v_proj,o_proj");
			if (parts == 1)
				check_targets(e, model_configs[i].name, ref.dir,
					      i % 2 ? "experts" : "v_proj,gate_proj,up_proj,down_proj");
			ref_free(&ref);
		}
		OK(moe_engine_close(e));
	}
}

static void check_fixtures(void)
{
	static const char *const dirs[] = { "ckpt/qwen3moe", "ckpt/qwen3moe_fused",
					    "ckpt/mixtral_random" };
	struct moe_engine *e = open_engine(2, 2, NULL);

	for (size_t i = 0; i < MOE_COUNT(dirs); i++) {
		const char *dir = fixture(dirs[i]);

		if (dir && best_table_takes(i, MOE_COUNT(dirs)))
			check_targets(e, dirs[i], dir, "experts,q_proj,k_proj,v_proj,o_proj");
	}
	OK(moe_engine_close(e));
}

static void configs(void)
{
	each_model_table(check_configs);
}

static void fixtures(void)
{
	each_model_table(check_fixtures);
}

const struct moe_test moe_suite_tests[] = {
	{ "every architecture", configs },
	{ "fixtures", fixtures },
	{ NULL, NULL },
};
