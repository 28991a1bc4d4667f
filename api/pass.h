/* SPDX-License-Identifier: Apache-2.0 */
/* What a block and the experts of a layer share, some of it with models: defaults, checks of a call's arrays, copies
 * in and out. */
#ifndef MOE_API_PASS_H
#define MOE_API_PASS_H

#include "graphs/moe_graph.h"
#include "graphs/moe_state.h"

#define MOE_MAX_EXPERTS 32767 /* a tag's group is 16 bits wide */
#define MOE_MAX_BYTES 0x1p46  /* of one array: sizes in bytes never overflow */
/* Of a forward or a micro-batch, where the caller gives none: what moesaic.h says 0 stands for. */
#define MOE_DEFAULT_TOKENS 512

/* ndim 2, [rows, cols], of floats; rows -1: any. */
enum moe_status moe_check_float_matrix(const char *name, const struct moe_array *a, int64_t rows,
				       int64_t cols);
/* The same of one that is written: no two elements in one place. */
enum moe_status moe_check_written_matrix(const char *name, const struct moe_array *a, int64_t rows,
					 int64_t cols);
/* x [T, H] and out; T is small enough for the layer's activations. */
enum moe_status moe_check_tokens(const struct moe_experts *l, const struct moe_array *x,
				 const struct moe_array *out);
/* ids [T, k] of I32 or I64 in -1..E-1, weights [T, k] */
enum moe_status moe_check_routing(const struct moe_experts *l, int64_t T, const struct moe_array *ids,
				  const struct moe_array *weights);
/* The caller's ids and weights into the plan; they are small and needed before the graph is cut. */
void moe_take_routing(const struct moe_experts *l, struct moe_plan *plan, const struct moe_array *ids,
		      const struct moe_array *weights, int T);
/* rows16: where load leaves the rows in bf16 too, or NULL */
enum moe_status moe_submit_copy(const struct moe_context *c, struct moe_stream *s,
				const struct moe_array *a, bool load, uint16_t *rows16);
/* The store of the routing weights' gradients, after submitting the backward. */
enum moe_status moe_submit_grad_weights(const struct moe_context *c, const struct moe_experts *l,
					const struct moe_plan *plan, struct moe_slot_tensors *slot, int T,
					const struct moe_array *a);
/* Expert e of an array that has experts first. */
struct moe_array moe_array_of_expert(const struct moe_array *a, int64_t e);
/* Weights packed from `from` take more memory than those from `room`. */
bool moe_packed_wider(enum moe_dtype from, enum moe_dtype room);
/* Opens one matrix's tensors in the layout of the format that takes them. */
enum moe_status moe_open_stored(const struct moe_format *f, const struct moe_stored *s, struct moe_quantised *q);
/* Exactly this shape, contiguous, with data. */
enum moe_status moe_check_shape(const char *name, const struct moe_array *a, int ndim,
				const int64_t *shape);
/* Between a LoRA array's field of all experts and a contiguous float array. */
enum moe_status moe_copy_lora(struct moe_experts *l, enum moe_lora_array which, enum moe_param_field f,
			      const struct moe_array *a, bool set, float scale);
/* A base matrix's field out, whole; map: row of each expert, or NULL. */
enum moe_status moe_copy_base(const struct moe_experts *l, enum moe_expert_matrix which,
			      enum moe_param_field f, const int64_t *map, const struct moe_array *dst,
			      float scale);
/* The params' swiglu_limit, swiglu_alpha and swiglu_shift. */
enum moe_status moe_check_glu(float limit, float alpha, float shift);
struct moe_glu moe_glu_of(float limit, float alpha, float shift);
enum moe_status moe_check_adamw(const struct moe_adamw_params *p);
/* steps: updates so far. */
struct moe_adamw moe_adamw_of(const struct moe_adamw_params *p, int64_t steps);

#endif
