/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Activations of whole models: kept, computed again, or some of each give the same losses,
 * gradients and LoRA after updates, bit by bit, in every architecture, table and number of parts.
 */
#include "codelets/router_lora.h"
#include "tests/model_configs.h"

const char moe_suite_name[] = "recompute";

static uint64_t mix(uint64_t h, const void *data, size_t bytes)
{
	const unsigned char *p = data;

	for (size_t i = 0; i < bytes; i++)
		h = (h ^ p[i]) * 1099511628211u;
	return h;
}

static uint64_t mix_param(uint64_t h, const struct moe_param *p, int E)
{
	size_t bytes = (size_t)E * (size_t)p->piece * sizeof(float);

	h = p->value ? mix(h, p->value, bytes) : h;
	return p->grad ? mix(h, p->grad, bytes) : h;
}

/* Values and gradients of all that trains. */
static uint64_t digest(const struct moe_model *m)
{
	uint64_t h = 1;

	for (int i = 0; i < m->decoder.n_layers; i++) {
		const struct moe_decoder_layer *l = &m->decoder.layers[i];
		const struct moe_experts *e = l->experts;

		for (int j = 0; j < MOE_ATTN_LINEARS; j++) {
			h = mix_param(h, &l->linear[j].lora_a, 1);
			h = mix_param(h, &l->linear[j].lora_b, 1);
		}
		if (!e)
			continue;
		if (e->router_lora)
			h = mix_param(mix_param(h, &e->router_lora->a, 1), &e->router_lora->b, 1);
		h = mix_param(mix_param(h, &e->a_gu, e->E), &e->down_b, e->E);
		for (int p = 0; p < e->P; p++) {
			h = mix_param(h, &e->part[p].gate_b, e->E);
			h = mix_param(h, &e->part[p].up_b, e->E);
			h = mix_param(h, &e->part[p].down_a, e->E);
		}
	}
	return h;
}

/* Micro-batches of different lengths, more of them than slots. */
static void fill(struct run *r, int64_t vocab)
{
	static const int lengths[3][3] = { { 70, 1, 40 }, { 90, 5, 0 }, { 3, 100, 20 } };
	uint64_t seed = 17;
	int32_t ids[128];

	for (int i = 0; i < 3; i++) {
		add_batch(r, 128);
		for (int d = 0; d < 3 && lengths[i][d]; d++) {
			for (int t = 0; t < lengths[i][d]; t++)
				ids[t] =
					(int32_t)((.5f + .49f * ref_uniform(&seed)) * (float)vocab);
			moe_model_batch_add(&r->batch[i], ids, NULL, lengths[i][d]);
		}
	}
}

struct setting {
	enum moe_recompute recompute;
	int layers; /* >= 0: that many instead */
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
	fill(&r, r.m->decoder.V);
	loss[0] = step(&r, true);
	loss[1] = step(&r, true);
	h = mix(digest(r.m), loss, sizeof loss);
	free_run(&r);
	moe_model_close(r.m);
	return h;
}

static void check_targets(struct moe_engine *e, const char *name, const char *dir,
			  const char *targets)
{
	static const struct setting settings[] = {
		{ MOE_RECOMPUTE_ALWAYS, -1, 2 },
		{ MOE_RECOMPUTE_ALWAYS, -1, 1 },
		{ MOE_RECOMPUTE_NEVER, -1, 1 },
	};
	const struct setting never = { MOE_RECOMPUTE_NEVER, -1, 2 };
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

			ref_create(&ref, model_configs[i].name, model_configs[i].config, 7);
			check_targets(e, model_configs[i].name, ref.dir,
				      "experts,q_proj,k_proj,v_proj,o_proj");
			if (parts == 1)
				check_targets(e, model_configs[i].name, ref.dir,
					      i % 2 ? "experts" : "v_proj");
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

		if (dir)
			check_targets(e, dirs[i], dir, "experts,q_proj,k_proj,v_proj,o_proj");
	}
	OK(moe_engine_close(e));
}

static void configs(void)
{
	each_table(check_configs);
}

static void fixtures(void)
{
	each_table(check_fixtures);
}

const struct moe_test moe_suite_tests[] = {
	{ "every architecture", configs },
	{ "fixtures", fixtures },
	{ NULL, NULL },
};
