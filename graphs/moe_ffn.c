/* SPDX-License-Identifier: Apache-2.0 */
/* Memory of dense MLPs and shared experts. */
#include "graphs/moe_state.h"

#include "graphs/trained.h"

/* Of one of an MLP's matrices, an enum moe_ffn_matrix; the gate of its sigmoid is a vector. */
static enum moe_status ffn_train_one(struct moe_engine *e, struct moe_ffn *f, int which,
				     const struct moe_ffn_training *t)
{
	struct moe_weight *const weights[] = { &f->gate, &f->up, &f->down, NULL };
	struct moe_trained_shape s = { .weight = weights[which],
				       .vector = weights[which] ? NULL : f->sigmoid_weight,
				       .decay = true,
				       .update = t->update,
				       .own = t->own,
				       .key = moe_mix(t->key + (uint64_t)which),
				       .slice_elements = t->slice_elements,
				       .part = t->part };

	if (!s.weight && !s.vector)
		return MOE_OK;
	moe_ffn_shape(f, which, &s.rows, &s.cols);
	return moe_trained_alloc(e, &s, &f->trained[which]);
}

enum moe_status moe_ffn_train(struct moe_engine *e, struct moe_ffn *f, const struct moe_ffn_training *t)
{
	f->trained = moe_calloc(MOE_FFN_MATRICES, sizeof *f->trained);
	if (!f->trained)
		return moe_fail(MOE_ERR_NOMEM, "no memory for an MLP");
	for (int i = 0; i < MOE_FFN_MATRICES; i++)
		MOE_TRY(ffn_train_one(e, f, i, t));
	return MOE_OK;
}

enum moe_status moe_ffn_alloc(struct moe_engine *e, int H, int I, enum moe_dtype dtype,
			      bool sigmoid, struct moe_ffn *f)
{
	enum moe_status st = MOE_OK;

	memset(f, 0, sizeof *f);
	f->H = H;
	f->I = I;
	f->gate.data = moe_memory_take(e, moe_matrix_bytes(dtype, I, H), -1, "weights", &st);
	f->up.data = moe_memory_take(e, moe_matrix_bytes(dtype, I, H), -1, "weights", &st);
	f->down.data = moe_memory_take(e, moe_matrix_bytes(dtype, H, I), -1, "weights", &st);
	if (sigmoid)
		f->sigmoid_weight = moe_memory_take(e, (size_t)H * sizeof(float), -1, "weights", &st);
	if (st != MOE_OK)
		moe_ffn_free(e, f);
	return st;
}

void moe_ffn_free(struct moe_engine *e, struct moe_ffn *f)
{
	moe_memory_free(e, f->gate.data);
	moe_memory_free(e, f->up.data);
	moe_memory_free(e, f->down.data);
	moe_memory_free(e, f->sigmoid_weight);
	for (int i = 0; f->trained && i < MOE_FFN_MATRICES; i++)
		moe_trained_free(e, &f->trained[i]);
	moe_free(f->trained);
	for (int i = 0; i < MOE_FFN_MATRICES; i++) {
		struct moe_param *const both[] = { &f->lora[i].a, &f->lora[i].b };

		for (int j = 0; j < 2; j++) {
			moe_memory_free(e, both[j]->value);
			moe_memory_free(e, both[j]->grad);
			moe_memory_free(e, both[j]->m);
			moe_memory_free(e, both[j]->v);
		}
	}
	memset(f, 0, sizeof *f);
}
