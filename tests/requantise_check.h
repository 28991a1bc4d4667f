/* SPDX-License-Identifier: Apache-2.0 */
/* Models whose quantised weights are trained: opened, stepped, their codes compared with what the
 * masters make. */
#ifndef MOE_TESTS_REQUANTISE_CHECK_H
#define MOE_TESTS_REQUANTISE_CHECK_H

#include "tests/model_check.h"
#include "tests/quantised_check.h"

#include "codelets/kernels/packed/requantise.h"

/* Plain models too: their gradients are compared with those of quantised ones. */
static __attribute__((constructor)) void multiply_in_bf16(void)
{
	setenv("MOESAIC_COMPUTE", "bf16", 1);
}

/* What is packed against what moe_quantise_as makes of x. */
static inline void compare_codes(const struct moe_coded_matrix *m, const struct moe_coding *coding,
				 const float *x, const char *what)
{
	struct moe_quantised got = moe_coded_read(m), want = {
		.coding = *coding, .n = m->n, .k = m->k
	};
	int64_t groups = moe_groups(coding, m->k), wrong = 0;
	uint8_t *a = malloc((size_t)m->k), *b = malloc((size_t)m->k);
	float *row = malloc((size_t)m->k * sizeof *row),
	      *packed = malloc((size_t)m->k * sizeof *row);
	void *memory;

	OK(moe_quantise_as(x, MOE_F32, m->k, &want, &memory));
	for (int64_t n = 0; n < m->n; n++) {
		got.reader->codes(&got, n, 0, m->k, a);
		want.reader->codes(&want, n, 0, m->k, b);
		wrong += memcmp(a, b, (size_t)m->k) != 0;
		for (int64_t g = 0; g < groups; g++) {
			wrong += got.reader->scale(&got, n, g) != want.reader->scale(&want, n, g);
			if (coding->zero)
				wrong += got.reader->zero(&got, n, g) !=
					 want.reader->zero(&want, n, g);
		}
		moe_dequantise_row(&want, n, 0, m->k, row);
		for (int i = 0; i < m->windows; i++) {
			const struct moe_coded_part *w = &m->window[i];

			if (n < w->n0 || n >= w->n0 + w->weight->n)
				continue;
			moe_kernels()->weight_unpack(w->weight, n - w->n0, n - w->n0 + 1, packed);
			wrong += memcmp(packed, row + w->k0, (size_t)w->weight->k * sizeof *row) !=
				 0;
		}
	}
	if (!CHECK(wrong == 0))
		printf("  %s [%lld, %lld]: %lld rows differ\n", what, (long long)m->n,
		       (long long)m->k, (long long)wrong);
	moe_free(memory);
	free(a), free(b), free(row), free(packed);
}

static char coded_dir[300], plain_dir[300], out_dir[300], state_dir[300];

static inline void dirs(void)
{
	snprintf(coded_dir, sizeof coded_dir, "%s/coded", moe_test_dir());
	snprintf(plain_dir, sizeof plain_dir, "%s/plain", moe_test_dir());
	snprintf(out_dir, sizeof out_dir, "%s/out", moe_test_dir());
	snprintf(state_dir, sizeof state_dir, "%s/state", moe_test_dir());
}

static inline struct moe_model *open_trained(struct moe_engine *e, const char *dir,
					     const char *weights, enum moe_method method,
					     enum moe_masters masters)
{
	struct moe_model_params p = { .struct_size = sizeof p,
				      .dir = dir,
				      .max_tokens = 64,
				      .lora_rank = 4,
				      .seed = 3,
				      .weights = weights,
				      .method = method,
				      .masters = masters,
				      .inference_only = method == MOE_METHOD_LORA,
				      .backward_weights = "direct" };
	struct moe_model *m = NULL;

	OK(moe_model_open(e, &p, &m));
	CU_ASSERT_PTR_NOT_NULL_FATAL(m);
	return m;
}

static inline void begin(struct run *r, struct moe_model *m)
{
	int32_t ids[IDS];

	*r = (struct run){ .m = m, .lr = 1e-2, .weight_decay = .1, .max_norm = 1 };
	ids_of(ids);
	add_batch(r, 64);
	moe_model_batch_add(&r->batch[0], ids, NULL, IDS);
}

/* A field of every expert's matrix, one after the other. */
static inline float *fields(const struct moe_model *m, enum moe_param_field f, int64_t *count)
{
	const struct moe_decoder *d = &m->decoder;
	int64_t n = 0, each;
	float *out = NULL;

	for (int l = 0; l < d->n_layers; l++) {
		const struct moe_experts *x = d->layers[l].experts;

		if (!x)
			continue;
		each = (int64_t)x->I * x->H;
		out = realloc(out, (size_t)(n + 3 * x->E * each) * sizeof *out);
		for (int i = 0; i < 3 * x->E; i++, n += each)
			moe_experts_get_base(x, (enum moe_expert_matrix)(i % 3), f, i / 3, out + n);
	}
	*count = n;
	return out;
}

/* All that is quantised and trained is what its masters make. */
static inline int check_codes(const struct moe_model *m)
{
	const struct moe_decoder *d = &m->decoder;
	int n = 0;

	for (int l = 0; l < d->n_layers; l++) {
		const struct moe_experts *x = d->layers[l].experts;
		const struct moe_decoder_layer *layer = &d->layers[l];
		struct moe_coded_matrix c;
		float *v;

		for (int i = 0; x && x->requantise && i < 3 * x->E; i += 5) {
			enum moe_expert_matrix which = (enum moe_expert_matrix)(i % 3);
			struct moe_coding coding;

			v = malloc((size_t)x->I * (size_t)x->H * sizeof *v);
			moe_experts_get_base(x, which, MOE_VALUE, i / 3, v);
			moe_experts_coded(x, which, i / 3, &c);
			coding = c.window[0].weight->coding;
			coding.phase = 0;
			compare_codes(&c, &coding, v, "expert");
			free(v);
			n++;
		}
		for (int i = 0; layer->trained && i < MOE_ATTN_LINEARS; i++) {
			const struct moe_trained *t = &layer->trained[MOE_ARRAY_LINEAR + i];

			if (!t->weight || !moe_is_coded(t->weight))
				continue;
			v = malloc((size_t)t->param.piece * sizeof *v);
			moe_trained_get(t, 0, t->param.rows, v);
			c = (struct moe_coded_matrix){ .n = t->param.rows,
						       .k = t->param.cols,
						       .windows = 1,
						       .window = { { t->weight, 0, 0 } } };
			compare_codes(&c, &t->weight->coding, v, "projection");
			free(v);
			n++;
		}
	}
	return n;
}

#endif
