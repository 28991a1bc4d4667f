/* SPDX-License-Identifier: Apache-2.0 */
/* The experts of one layer behind include/moesaic.h. Private to api/. */
#ifndef MOE_API_EXPERTS_H
#define MOE_API_EXPERTS_H

#include "api/pass.h"

#include <pthread.h>
#include <stdatomic.h>

#define MOE_BOUND_LORA MOE_LORA_ARRAYS
#define MOE_BOUND (MOE_LORA_ARRAYS + MOE_EXPERT_MATRICES)

/* Buffers of one pass at a time, and their order. */
struct moe_space_slot {
	struct moe_experts_scratch scratch;
	struct moe_slot_tensors tensors;
	struct moe_stream out, grad_out[2], grad_x;
};

/*
 * What the passes of layers of one shape share: scratch, streams, their order, copies of weights for the
 * backward. lock is held while a pass is submitted, so that all layers see one order, and while it grows.
 */
struct moe_space {
	struct moe_space *next;
	struct moe_space_key {
		struct moe_engine *engine;
		int E, k, H, I, r, P, G, slices_i, slices_h, ring, slots;
		enum moe_dtype dtype;
		bool recompute, base;
	} key;
	pthread_mutex_t lock;
	struct moe_expert_layer *layers; /* attached */
	int n_layers, numbers;		 /* numbers: given so far */
	int capacity;			 /* tokens; -1: no buffers */
	int64_t generation;		 /* changes with the buffers */
	struct moe_space_slot *slot;	 /* [key.slots] */
	struct moe_backward_ring ring;
	struct moe_ring_owner {
		const struct moe_expert_layer *layer; /* whose copies of all experts these are; NULL: nobody's */
		int64_t version;
	} *owner; /* [ring.n] */
};

/* A forward and its backward. Idle: all its tasks have run. */
struct moe_experts_pass {
	struct moe_ticket *ticket;
	struct moe_experts_state state;
	struct moe_stream x;
	struct moe_tensor *plan;
	int capacity, T, ring, slot; /* of the space's */
	int micro;	    /* of the step, from 0 */
	int64_t generation; /* of the space's buffers that state points to */
	int64_t used;	    /* order of forwards */
	int64_t values;	    /* of the layer, when it ran forward */
	struct moe_drop_pass drop;
	bool kept;
};

struct moe_st_tensor;

struct moe_expert_layer {
	struct moe_engine *engine;
	struct moe_experts_params params;
	atomic_flag busy;
	struct moe_experts layer;
	struct moe_cut cut;
	struct moe_backward_choice backward;
	char backward_text[32];
	struct moe_layer_tensors tensors;
	struct moe_ticket *ticket; /* of what is no pass: updates, copies */
	struct moe_space *space;
	struct moe_expert_layer *next; /* attached to the same space */
	int number;		       /* in it */
	struct moe_experts_pass *pass; /* [n_passes] */
	int n_passes, kept;
	struct moe_touched touched;
	bool moments_touched;
	int64_t forwards, steps;
	int micro; /* forwards since the last update */
	int64_t version, values; /* of the base weights; of all that a pass computes with */
	int64_t *map;			  /* NULL: the same */
	enum moe_dropout_mode dropout;
	int64_t dropout_step, dropout_position; /* step < 0: steps */
	bool loaded, lora_ready;
	struct moe_load_error { /* squares, summed over some rows */
		double wrong, all; /* of the differences to the source; of the source */
	} load_error;
	/* gradient window */
	struct moe_gradient *bound[MOE_BOUND]; /* the caller's; NULL: not bound */
	struct moe_array buffer[MOE_BOUND];    /* as they were bound */
	const void **source;		       /* [3 E] rows of the bound base params */
	bool open;			       /* gradients hold published sums */
	float window_scale;		       /* gradients are this times what the arrays hold */
	struct moe_pending {
		struct moe_experts_pass *pass; /* the latest one's; NULL: none */
		/* accumulate: the first of them found an open window; taken: an update has used the gradients */
		bool accumulate, taken;
	} pending;
	/* checkpoint */
	enum moe_checkpoint checkpoint;
	float *checkpoint_out;
	int checkpoint_T, checkpoint_capacity;
	char checkpoint_error[256];
};

/* experts.c */
enum moe_status moe_experts_enter(struct moe_expert_layer *l);
void moe_experts_leave(struct moe_expert_layer *l);
struct moe_context moe_experts_context(struct moe_expert_layer *l, struct moe_ticket *ticket,
				       enum moe_phase phase, int priority);
/* Before the first update by moesaic's AdamW: its moments' pages. Nothing after that. */
void moe_experts_touch_moments(struct moe_expert_layer *l);
/* Shape of an array; 0 dimensions if this object has none. Names: "gate_proj", ... */
int moe_experts_shape(const struct moe_expert_layer *l, enum moe_block_array which, int64_t *shape);
const char *moe_experts_array_name(enum moe_block_array which);

/* experts_load.c: what all ways share */
enum moe_status moe_experts_check_map(const struct moe_expert_layer *l, const int64_t *map, int64_t n);
enum moe_status moe_experts_loaded(struct moe_expert_layer *l, const int64_t *map);
/* Packed weights of this dtype fit where memory was taken for weight_dtype. */
enum moe_status moe_experts_check_width(const struct moe_expert_layer *l, const char *name, enum moe_dtype dtype);
/* rows [3 E]: where each expert's matrix begins, in the order of the arrays; waits, and has loaded. */
enum moe_status moe_experts_load_rows(struct moe_expert_layer *l, const void *const *rows, enum moe_dtype dtype,
				      const int64_t *map);
/*
 * experts_coded.c: into a layer with a weight_format; q, rows [3 E] in the order of the arrays. fused: gate and up of an
 * expert are the same matrix [2 I, H], gate rows first. names [3 E]: of the tensors of scales, or NULL. Waits.
 */
enum moe_status moe_experts_pack_quantised(struct moe_expert_layer *l, const struct moe_quantised *q, bool fused,
					   const char *const *names, const int64_t *map);
enum moe_status moe_experts_pack_floats(struct moe_expert_layer *l, const void *const *rows, enum moe_dtype dtype,
					const int64_t *map);
/* Adds some rows of q's to l->load_error: their source is the file's tensor, or floats [n, k]. MOE_ERR_NOMEM. */
enum moe_status moe_experts_add_error(struct moe_expert_layer *l, const struct moe_quantised *q,
				      const struct moe_st_tensor *file, const void *floats, enum moe_dtype dtype);

/* experts_space.c */
enum moe_status moe_space_attach(struct moe_expert_layer *l);
void moe_space_detach(struct moe_expert_layer *l);
/* Under its lock: buffers for T tokens; waits for all its layers where they must grow. */
enum moe_status moe_space_reserve(struct moe_space *s, const struct moe_expert_layer *l, int T);
void moe_space_release(struct moe_space *s);

/* The pass's buffers, under the space's lock. */
static inline struct moe_space_slot *moe_space_slot(const struct moe_expert_layer *l,
						    const struct moe_experts_pass *p)
{
	return &l->space->slot[p->slot];
}

/* ---- experts_window.c ---- */
/* Whether a backward may follow one that is pending. */
bool moe_window_takes_several(const struct moe_expert_layer *l);
/* moe_experts_update, of which o->norm is the caller's; between moe_submit_begin and _end. */
enum moe_status moe_window_check_update(struct moe_expert_layer *l);
enum moe_status moe_window_submit_update(struct moe_expert_layer *l, struct moe_ticket *ticket,
					 const struct moe_optimizer_step *o);
/* After all of it was submitted (or, st, in part). */
void moe_window_updated(struct moe_expert_layer *l, int64_t step);
enum moe_status moe_window_state(struct moe_expert_layer *l, enum moe_window *out);
/* Ends the pending backward: published, or an error and closed. */
enum moe_status moe_window_publish(struct moe_expert_layer *l);
void moe_window_close(struct moe_expert_layer *l);
/* The caller's arrays as tasks see them. */
enum moe_status moe_window_submit_exchange(const struct moe_context *c, struct moe_expert_layer *l,
					   enum moe_exchange what, bool lora, bool base);

#endif
