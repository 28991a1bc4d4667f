/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters of made-up sizes and random values, for the suites of their forms and files. */
#ifndef MOE_TESTS_ADAPTER_CHECK_H
#define MOE_TESTS_ADAPTER_CHECK_H

#include "tests/harness.h"
#include "model/adapters/adapter_form.h"
#include "model/file.h"
#include "model/json.h"
#include "model/readers/safetensors.h"
#include "model/readers/safetensors_writer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { E = 3, H = 6, I = 5, LAYERS = 3 };

static inline const char *folder(const char *name)
{
	static char ring[4][4096];
	static unsigned next;
	char *buf = ring[next++ % 4];

	snprintf(buf, sizeof ring[0], "%s/%s", moe_test_dir(), name);
	return buf;
}

struct kind {
	const char *name;
	bool share_a, rslora, uneven; /* uneven: scalings differ */
	int gate_up_rank, down_rank;
	int gates; /* 1: LoRA of the routers, 2: their weights */
	bool attention, partial;
};

struct sample {
	struct moe_adapter adapter;
	struct moe_adapter_entry entries[4 * LAYERS];
	float values[LAYERS][1000];
};

static inline float *take(float **p, int64_t n)
{
	float *at = *p;

	*p += n;
	return at;
}

static inline void add_matrix(struct sample *s, int layer, enum moe_adapter_target t, int64_t rank,
			      int64_t in, int64_t out, double alpha, float **p)
{
	s->entries[s->adapter.n_entries++] = (struct moe_adapter_entry){ .layer = layer,
									 .target = t,
									 .rank = rank,
									 .alpha = alpha,
									 .in = in,
									 .out = out,
									 .a = take(p, rank * in),
									 .b = take(p, out * rank) };
}

static inline void add_experts(struct sample *s, int layer, const struct kind *k, float **p)
{
	int64_t R = k->gate_up_rank, r = k->down_rank;
	double s0 = 1.5;
	struct moe_adapter_entry *e = &s->entries[s->adapter.n_entries++];

	*e = (struct moe_adapter_entry){ .layer = layer,
					 .target = MOE_ADAPTER_EXPERTS,
					 .rank = r,
					 .gate_up_rank = R,
					 .n_experts = E,
					 .hidden = H,
					 .intermediate = I };
	e->alpha = r ? moe_lora_alpha(k->rslora, r, k->uneven ? 2 * s0 : s0) : 0;
	e->gate_up_alpha = R ? moe_lora_alpha(k->rslora, R, s0) : 0;
	if (R) {
		e->gate_a = take(p, E * R * H);
		e->up_a = k->share_a ? NULL : take(p, E * R * H);
		e->gate_b = take(p, E * I * R);
		e->up_b = take(p, E * I * R);
	}
	if (r) {
		e->down_a = take(p, E * r * I);
		e->down_b = take(p, E * H * r);
	}
}

/* Of the first `layers` layers. */
static inline void make_sample(struct sample *s, const struct kind *k, int layers)
{
	unsigned seed = (unsigned)moe_test_seed();

	memset(s, 0, sizeof *s);
	s->adapter = (struct moe_adapter){ .rank = k->attention ? 3 : MOE_MAX(k->down_rank, 1),
					   .alpha = k->attention ? 4.5 : 3,
					   .rslora = k->rslora,
					   .share_a = k->share_a,
					   .base_model = (char *)"base/model",
					   .entries = s->entries };
	for (int l = 0; l < layers; l++) {
		float *p = s->values[l];

		for (size_t i = 0; i < MOE_COUNT(s->values[l]); i++)
			p[i] = (float)(rand_r(&seed) % 1999 - 999) / 512 + 1e-3f;
		if (k->partial && l == 1)
			continue;
		if (k->attention) {
			add_matrix(s, l, MOE_ADAPTER_Q, 3, H, 8, 4.5, &p);
			add_matrix(s, l, MOE_ADAPTER_O, 3, 8, H, 4.5, &p);
		}
		add_experts(s, l, k, &p);
		if (k->gates == 2)
			s->entries[s->adapter.n_entries++] =
				(struct moe_adapter_entry){ .layer = l,
							    .target = MOE_ADAPTER_ROUTER,
							    .in = H,
							    .out = E,
							    .weight = take(&p, E * H) };
		else if (k->gates)
			add_matrix(s, l, MOE_ADAPTER_ROUTER, 3, H, E, 4.5, &p);
	}
	for (int t = 0; t < MOE_ADAPTER_TARGETS; t++)
		s->adapter.partial[t] = k->partial;
}

/* Two layers with experts of rank 2, and q_proj and o_proj of rank 3. */
static inline void make_two_layers(struct sample *s, bool share_a, bool rslora)
{
	const struct kind k = { .share_a = share_a,
				.rslora = rslora,
				.gate_up_rank = 2,
				.down_rank = 2,
				.attention = true };

	make_sample(s, &k, 2);
}

#endif
