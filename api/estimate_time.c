/* SPDX-License-Identifier: Apache-2.0 */
#include "api/estimate_time.h"

#include "graphs/cut.h"

struct step {
	const struct moe_model *model;
	const struct moe_step_load *load;
	struct moe_machine machine; /* for the workers of the load */
	struct moe_param_count count;
	double blocks, rows; /* token blocks of a micro-batch, and their tokens */
};

/* A matrix of that many weights, read once for each block of tokens. */
static double linear_us(const struct step *s, enum moe_gemm direction, double weights)
{
	double k = (double)s->model->arch.hidden;

	return s->blocks *
	       moe_cost_gemm_us(&s->machine, direction, s->rows, weights / k, k, sizeof(uint16_t));
}

/* Forward in every layer, the input's gradient from the lowest trained one on. */
static double dense_us(const struct step *s, double weights, double backward)
{
	return linear_us(s, MOE_GEMM_FORWARD, weights) +
	       backward * linear_us(s, MOE_GEMM_BACKWARD, weights);
}

/* Scores and their sum over values are 4 flops per head column and pair of tokens; backward 2.5 times as many. */
static double attention_us(const struct step *s, double backward)
{
	const struct moe_arch *a = &s->model->arch;
	double n = s->load->document_tokens, pairs = s->load->tokens * (n + 1) / 2;
	double columns = (double)a->n_heads * a->head_dim;

	return (1 + 2.5 * backward) * 2 *
	       moe_cost_gemm_us(&s->machine, MOE_GEMM_FORWARD, s->rows, columns, pairs / s->rows,
				0) *
	       a->n_layers;
}

/* Routed experts of one layer. */
static double experts_us(const struct step *s, bool backward)
{
	const struct moe_arch *a = &s->model->arch;
	const struct moe_machine *m = &s->machine;
	struct moe_load l = { .E = a->n_experts, .k = a->top_k, .T = s->load->tokens };
	double H = (double)a->hidden, I = (double)a->moe_intermediate;
	double reached = moe_load_active(&l), rows = moe_load_rows(&l), us;
	int r = s->model->lora.rank[MOE_ADAPTER_EXPERTS];
	int d = backward ? MOE_GEMM_DIRECTIONS : 1;

	us = 0;
	for (int i = 0; i < d; i++)
		us += moe_cost_gemm_us(m, (enum moe_gemm)i, rows, 2 * I, H + r, sizeof(uint16_t)) +
		      moe_cost_gemm_us(m, (enum moe_gemm)i, rows, H, I + r, sizeof(uint16_t));
	if (backward && r) /* gradients of A and B: added to in memory */
		us += moe_cost_gemm_us(m, MOE_GEMM_FORWARD, rows, 3.0 * r, H + I,
				       2 * sizeof(float));
	if (backward && moe_model_trains(s->model, MOE_ROLE_EXPERT_GATE))
		us += moe_cost_gemm_us(m, MOE_GEMM_FORWARD, rows, 3 * I, H, 2 * sizeof(float));
	return us * reached;
}

/* Residual stream, norms, gather, combine: bytes per token and layer in f32. */
static double streams_us(const struct step *s, double backward)
{
	const struct moe_arch *a = &s->model->arch;
	double row = (double)a->hidden * sizeof(float) * s->load->tokens;
	double read = (4 + a->top_k) * row, written = (3 + a->top_k) * row;

	return a->n_layers * (1 + backward) * moe_cost_stream_us(&s->machine, read, written);
}

static double micro_batch_us(const struct step *s)
{
	const struct moe_arch *a = &s->model->arch;
	const int64_t *n = s->count.groups;
	int lowest = MOE_MIN(s->load->lowest_trained_layer, a->n_layers);
	double layers = a->n_layers, trained = (layers - lowest) / layers, us = 0;
	double in_layers = (double)(n[MOE_PARAMS_ATTENTION] + n[MOE_PARAMS_DENSE] +
				    n[MOE_PARAMS_ROUTER] + n[MOE_PARAMS_SHARED]);

	us += dense_us(s, in_layers, trained);
	us += dense_us(s, (double)a->vocab * (double)a->hidden, 1);
	if (moe_model_trains(s->model, MOE_ROLE_Q)) /* gradients of weights, added to in memory */
		us += s->blocks * moe_cost_gemm_us(&s->machine, MOE_GEMM_FORWARD, s->rows,
						   in_layers / (double)a->hidden + (double)a->vocab,
						   (double)a->hidden, 2 * sizeof(float));
	us += attention_us(s, trained) + streams_us(s, trained);
	for (int i = 0; i < a->n_layers; i++)
		if (a->layer_is_moe[i])
			us += experts_us(s, i >= lowest);
	return us;
}

double moe_step_work_us(const struct moe_model *m, const struct moe_step_load *l)
{
	struct step s = { .model = m, .load = l, .machine = *moe_machine() };
	double blocks = moe_token_blocks(l->tokens), trained = (double)l->trainable_params;

	s.machine.workers = MOE_MAX(l->workers, 1);
	if (s.machine.workers > s.machine.cpus) /* a larger machine of the same kind */
		s.machine.read_all_gbps *= (double)s.machine.workers / MOE_MAX(s.machine.cpus, 1);
	s.blocks = blocks;
	s.rows = l->tokens / blocks;
	moe_arch_count_params(&m->arch, &s.count);
	/* the update: value, gradient and moments come, all but the gradient go back; the norm reads the gradient */
	return l->micro_batches * micro_batch_us(&s) +
	       moe_cost_stream_us(&s.machine, 5 * trained * sizeof(float),
				  3 * trained * sizeof(float)) +
	       (double)l->tasks * moe_cost_task_us(&s.machine);
}
