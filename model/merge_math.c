/* SPDX-License-Identifier: Apache-2.0 */
#include "model/merge_math.h"

#define BLOCK_ELEMENTS ((int64_t)1 << 18)

void moe_merge_job_set(struct moe_merge_job *job, const struct moe_adapter *adapter,
		       const struct moe_adapter_entry *entry, enum moe_role role, int expert)
{
	*job = (struct moe_merge_job){ .adapter = adapter, .entry = entry, .role = role, .expert = expert };
}

/* The LoRA of one matrix of a tensor. */
struct lora {
	const float *a, *b; /* [rank, cols], [rows, rank] */
	int64_t rank;
	float scale;
};

/* Of gate, up and down by number. */
static struct lora of_expert(const struct moe_merge_job *job, int64_t expert, int projection)
{
	const struct moe_adapter_entry *e = job->entry;
	int64_t R = e->gate_up_rank, H = e->hidden, I = e->intermediate;
	bool share = job->adapter->share_a;

	if (projection == 2)
		return (struct lora){ e->down_a + expert * e->rank * I,
				      e->down_b + expert * e->rank * H, e->rank,
				      (float)moe_adapter_scaling(job->adapter, e) };
	return (struct lora){ (projection && !share ? e->up_a : e->gate_a) + expert * R * H,
			      (projection ? e->up_b : e->gate_b) + expert * R * I, R,
			      (float)moe_adapter_gate_up_scaling(job->adapter, e) };
}

static struct lora lora_of(const struct moe_merge_job *job, int64_t piece)
{
	const struct moe_adapter_entry *e = job->entry;

	switch (job->role) {
	case MOE_ROLE_EXPERTS_GATE_UP: /* gate and up of each expert in turn */
		return of_expert(job, piece / 2, piece % 2);
	case MOE_ROLE_EXPERTS_DOWN:
		return of_expert(job, piece, 2);
	case MOE_ROLE_EXPERT_GATE:
	case MOE_ROLE_EXPERT_UP:
	case MOE_ROLE_EXPERT_DOWN:
		return of_expert(job, job->expert, (int)(job->role - MOE_ROLE_EXPERT_GATE));
	default:
		return (struct lora){ e->a, e->b, e->rank,
				      (float)moe_adapter_scaling(job->adapter, e) };
	}
}

struct moe_merge_block *moe_merge_block_new(const struct moe_merge_job *job,
					    const struct moe_st_tensor *t)
{
	bool fused = t->ndim == 3, halves = job->role == MOE_ROLE_EXPERTS_GATE_UP;
	int64_t cols = t->shape[t->ndim - 1], lines = MOE_MAX(1, BLOCK_ELEMENTS / cols);
	size_t floats = (size_t)(lines * cols + cols);
	struct moe_merge_block *b =
		moe_alloc(1, sizeof *b + floats * sizeof(float) + (size_t)(lines * cols) * 8);

	if (!b)
		return NULL;
	*b = (struct moe_merge_block){
		.job = job,
		.tensor = t,
		.pieces = (fused ? t->shape[0] : 1) * (halves ? 2 : 1),
		.rows = t->shape[t->ndim - 2] / (halves ? 2 : 1),
		.cols = cols,
		.lines = lines,
	};
	b->out = b + 1;
	b->wide = (float *)((char *)b->out + lines * cols * 8);
	b->delta = b->wide + lines * cols;
	return b;
}

/* w += scale * b A, b one row of B */
static void add_row(float *restrict w, float *restrict delta, const struct lora *l, const float *b,
		    int64_t cols)
{
	int64_t j = 0;

	memset(delta, 0, (size_t)cols * sizeof *delta);
	for (; j + 4 <= l->rank; j += 4) {
		const float *a0 = l->a + j * cols, *a1 = a0 + cols, *a2 = a1 + cols,
			    *a3 = a2 + cols;
		float b0 = b[j], b1 = b[j + 1], b2 = b[j + 2], b3 = b[j + 3];

		for (int64_t c = 0; c < cols; c++)
			delta[c] += b0 * a0[c] + b1 * a1[c] + b2 * a2[c] + b3 * a3[c];
	}
	for (; j < l->rank; j++)
		for (int64_t c = 0; c < cols; c++)
			delta[c] += b[j] * l->a[j * cols + c];
	for (int64_t c = 0; c < cols; c++)
		w[c] += l->scale * delta[c];
}

enum moe_status moe_merge_check(const struct moe_st_tensor *t, const float *x, size_t n)
{
	int64_t i = moe_first_beyond(t->dtype, x, n);

	return i < 0 ? MOE_OK
		     : moe_fail(MOE_ERR_UNSUPPORTED, "tensor '%s' gets the value %g, beyond %s: convert the base to bf16 or f32",
				t->name, (double)x[i], moe_dtype_name(t->dtype));
}

bool moe_merge_block_next(struct moe_merge_block *b)
{
	size_t size = moe_dtype_size(b->tensor->dtype);
	int64_t n = MOE_MIN(b->lines, b->rows - b->row);
	struct lora l;

	if (b->piece == b->pieces || !b->rows || !b->cols)
		return false;
	l = lora_of(b->job, b->piece);
	b->from = (const char *)b->tensor->data +
		  (size_t)((b->piece * b->rows + b->row) * b->cols) * size;
	b->bytes = (size_t)(n * b->cols) * size;
	moe_to_f32(b->wide, b->from, b->tensor->dtype, (size_t)(n * b->cols));
	if (b->job->entry->weight) /* a router's, whole */
		memcpy(b->wide, b->job->entry->weight + b->row * b->cols,
		       (size_t)(n * b->cols) * sizeof *b->wide);
	for (int64_t i = 0; i < n && !b->job->entry->weight; i++)
		add_row(b->wide + i * b->cols, b->delta, &l, l.b + (b->row + i) * l.rank, b->cols);
	moe_from_f32(b->out, b->tensor->dtype, b->wide, (size_t)(n * b->cols));
	b->row += n;
	if (b->row == b->rows) {
		b->row = 0;
		b->piece++;
	}
	return true;
}

void moe_merge_add(const struct moe_merge_job *job, int64_t expert, int64_t row0, int64_t n,
		   int64_t k, float *x, float *delta)
{
	int64_t half = job->entry->intermediate;

	for (int64_t i = 0; i < n; i++) {
		int64_t row = row0 + i, piece = expert;
		struct lora l;

		if (job->role == MOE_ROLE_EXPERTS_GATE_UP) {
			piece = 2 * expert + (row >= half);
			row -= row >= half ? half : 0;
		}
		l = lora_of(job, piece);
		add_row(x + i * k, delta, &l, l.b + row * l.rank, k);
	}
}
