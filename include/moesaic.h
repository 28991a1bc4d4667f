/* SPDX-License-Identifier: Apache-2.0 */
/*
 * moesaic: fine-tuning of mixture-of-experts language models on CPUs.
 *
 * The only installed header. Conventions that hold for every function:
 *  - returns enum moe_status; the text of the last failure in the calling thread is
 * moe_last_error();
 *  - objects are opaque, made by *_create/_open and destroyed by *_destroy/_close (NULL is
 * accepted);
 *  - params structs start with struct_size = sizeof(struct ...); zero in any other field means its
 * default;
 *  - buffers belong to the caller and are described by struct moe_array;
 *  - nothing prints, exits or aborts.
 */
#ifndef MOESAIC_H
#define MOESAIC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MOE_VERSION_MAJOR 0
#define MOE_VERSION_MINOR 1
#define MOE_VERSION_PATCH 0
#define MOE_VERSION_STRING "0.1.0"

/* Marks what the shared library exports. */
#define MOE_API __attribute__((visibility("default")))

enum moe_status {
	MOE_OK = 0,
	MOE_ERR_ARG,	     /* an argument is invalid or does not fit the object */
	MOE_ERR_NOMEM,	     /* an allocation failed */
	MOE_ERR_NOFIT,	     /* the memory plan exceeds the limit; nothing was allocated */
	MOE_ERR_IO,	     /* a file cannot be read or written */
	MOE_ERR_FORMAT,	     /* a file's content is not what it claims to be */
	MOE_ERR_UNSUPPORTED, /* valid, but not implemented: architecture, dtype, option */
	MOE_ERR_CONFIG,	     /* engine settings that cannot be met (policy, workers, topology) */
	MOE_ERR_BUSY,	     /* the object is in use by another thread or a call is pending */
	MOE_ERR_STATE,	     /* the call is not allowed now (backward without forward, ...) */
	MOE_ERR_RUNTIME,     /* StarPU refused something */
	MOE_ERR_FORKED,	     /* called in a child process after fork() */
	MOE_ERR_DIVERGED,    /* non-finite loss or gradient */
	MOE_ERR_INTERRUPTED, /* stopped on request; state was saved */
	MOE_STATUS_COUNT
};

/* A short constant text for a status. */
MOE_API const char *moe_status_text(enum moe_status status);
/* Detail of the calling thread's last failure; "" if none. Valid until its next failing call. */
MOE_API const char *moe_last_error(void);
MOE_API const char *moe_version(void);

enum moe_dtype {
	MOE_F32 = 0,
	MOE_BF16,
	MOE_F16,
	MOE_F64,
	MOE_I64,
	MOE_I32,
	MOE_I16,
	MOE_I8,
	MOE_U8,
	MOE_BOOL,
	MOE_F8_E4M3,
	MOE_F8_E5M2,
	MOE_DTYPE_COUNT
};

#define MOE_MAX_NDIM 4

/* A caller-owned buffer. strides are in elements; all zero means row-major contiguous. */
struct moe_array {
	void *data;
	enum moe_dtype dtype;
	int ndim;
	int64_t shape[MOE_MAX_NDIM];
	int64_t strides[MOE_MAX_NDIM];
};

enum moe_log_level { MOE_LOG_DEBUG = 0, MOE_LOG_INFO, MOE_LOG_WARNING, MOE_LOG_ERROR };
typedef void (*moe_log_fn)(enum moe_log_level level, const char *text, void *user);
/* Where warnings and notes go; NULL drops them (the default). Process-wide; may be set at any time.
 */
MOE_API void moe_log_set(moe_log_fn fn, void *user);

/* ---------------------------------------------------------------- engine */

/*
 * One engine per process (StarPU is a singleton), reference counted: a second open with equal
 * parameters returns the same engine, with different ones MOE_ERR_CONFIG naming the difference.
 */
struct moe_engine;

/* The workers and the NUMA node of one part. */
struct moe_part_spec {
	int node;	    /* NUMA node, logical index */
	int n_workers;	    /* > 0 */
	const int *workers; /* worker indices, 0-based; copied */
};

enum moe_placement {
	MOE_PLACEMENT_STRICT =
		0, /* a part's tasks run on its workers only (policies known to obey masks) */
	MOE_PLACEMENT_SOFT, /* a part is a hint; remote runs are counted */
};

struct moe_engine_params {
	size_t struct_size;
	int workers;	    /* 0: one per core, at most what StarPU was built for */
	int parts;	    /* 0: one per NUMA node that has workers */
	const char *policy; /* StarPU scheduling policy; NULL: "lws" */
	const char *isa;    /* kernel table; NULL: MOESAIC_ISA or the best supported */
	enum moe_placement placement;
	int idle_spin_us;			/* idle workers spin this long, then sleep */
	const struct moe_part_spec *part_specs; /* NULL or `parts` entries, uneven allowed */
};

struct moe_engine_info {
	size_t struct_size;
	int workers, parts, nodes; /* nodes: NUMA nodes of the topology */
	int starpu_max_workers;	   /* of this StarPU build */
	int starpu_version[3];
	int fake_topology;	  /* the topology is not this machine's */
	const char *policy, *isa; /* live as long as the engine */
	int64_t handles;	  /* registered now */
	int64_t tasks;		  /* submitted since open */
	int64_t remote_tasks;	  /* run outside their part's workers */
	double busy_seconds;	  /* of all workers together, in tasks, since open */
	int pauses;		  /* times the idle workers were put to sleep */
};

MOE_API enum moe_status moe_engine_open(const struct moe_engine_params *params,
					struct moe_engine **out);
/* Waits for outstanding tasks. MOE_ERR_STATE while objects are left on the last reference. */
MOE_API enum moe_status moe_engine_close(struct moe_engine *engine);
MOE_API enum moe_status moe_engine_get_info(struct moe_engine *engine,
					    struct moe_engine_info *info);
/*
 * What opening would refuse before it starts anything: workers, policy, kernel table. Starts nothing and needs no
 * engine; parts are checked when it is open.
 */
MOE_API enum moe_status moe_engine_check_params(const struct moe_engine_params *params);
/* Policies of the installed StarPU by index, NULL past the end. masks: may run strict parts. */
MOE_API const char *moe_policy_name(int index, int *masks);

enum moe_phase {
	MOE_PHASE_OTHER = 0,
	MOE_PHASE_FORWARD,
	MOE_PHASE_BACKWARD, /* with what it computes again */
	MOE_PHASE_UPDATE,
};

/* What a task was, given to observers. Names of kinds: moe_kind_name(). */
struct moe_tag {
	int16_t kind;
	int16_t layer; /* -1: none */
	int16_t group; /* expert group or token block, -1: none */
	int16_t slice;
	int16_t part;  /* -1: any */
	int16_t micro; /* micro-batch of the step */
	int16_t phase; /* enum moe_phase */
	int32_t step;
	int64_t rows; /* tokens or token-slot pairs worked on; known when the task has run */
};

struct moe_task_event {
	uint64_t id; /* 1, 2, ... in submission order */
	struct moe_tag tag;
	const uint64_t
		*deps; /* at submission: ids this task waits for, transitively reduced per handle */
	int n_deps;
	int worker;	   /* after execution */
	double start, end; /* CLOCK_MONOTONIC seconds */
	double cpu; /* seconds of the worker's CPU in it: less than end - start where others took
		       the core */
};

/*
 * submitted: in the submitting thread, under the engine's lock, in order.
 * executed: in the worker that ran the task, concurrently with others.
 * Neither may call moesaic. Set while nothing is outstanding (MOE_ERR_BUSY otherwise).
 */
struct moe_observer {
	void (*submitted)(const struct moe_task_event *event, void *user);
	void (*executed)(const struct moe_task_event *event, void *user);
	void *user;
};
MOE_API enum moe_status moe_engine_observe(struct moe_engine *engine,
					   const struct moe_observer *observer);
/* Holds the workers (nested) and lets them go: whole steps can be submitted in between. */
MOE_API enum moe_status moe_engine_hold(struct moe_engine *engine);
MOE_API enum moe_status moe_engine_release(struct moe_engine *engine);
/* Waits until no task is outstanding. MOE_ERR_STATE while the engine is held, or in a task. */
MOE_API enum moe_status moe_engine_wait(struct moe_engine *engine);
MOE_API const char *moe_kind_name(int kind); /* NULL past the last */

/* What an idle worker lacks: tasks that are submitted, tasks that are ready, or the runtime's speed. */
enum moe_idle_cause {
	MOE_IDLE_SUBMISSION = 0,
	MOE_IDLE_DEPENDENCY,
	MOE_IDLE_RUNTIME,
	MOE_IDLE_CAUSES
};
MOE_API const char *moe_idle_cause_name(int cause); /* NULL past the last */

/* ---------------------------------------------------------------- traces */

/*
 * Everything the engine does, into a file for `moesaic trace` (docs/trace-format.md). One trace at a
 * time. Writing never holds the work up: what a full buffer or a full disk loses is counted and told.
 */
struct moe_trace_params {
	size_t struct_size;
	const char *file;	   /* replaced if there is one */
	const char *const *config; /* [n_config] "key=value": what the trace is of; "config." comes before */
	int n_config;
	int no_hardware;   /* leave the processor's counters alone */
	size_t ring_bytes; /* buffer of each worker; 0: 512 KiB */
};

struct moe_trace_info {
	size_t struct_size;
	int64_t bytes, tasks, lost; /* written; recorded; records that a full buffer lost */
	double writer_seconds;	    /* CPU time of the thread that packs and writes */
	char error[256];	    /* "": the file is whole */
};

enum moe_trace_mark {
	MOE_TRACE_STEP_BEGIN = 0, /* before its first task is submitted */
	MOE_TRACE_STEP_SUBMITTED, /* after its last one was */
	MOE_TRACE_STEP_END,	  /* its tasks have run */
};

/* MOE_ERR_BUSY while tasks are outstanding, MOE_ERR_STATE while a trace is being written. */
MOE_API enum moe_status moe_trace_start(struct moe_engine *engine,
					const struct moe_trace_params *params);
/*
 * Waits for outstanding tasks. MOE_ERR_IO: the file ends early (info->error), MOE_ERR_STATE: no trace. info
 * may be NULL. Closing the engine stops a trace too.
 */
MOE_API enum moe_status moe_trace_stop(struct moe_engine *engine, struct moe_trace_info *info);
/* For callers that have steps: moe_train does this itself. tokens, trained: -1 if not known. */
MOE_API void moe_trace_mark(struct moe_engine *engine, enum moe_trace_mark mark, int64_t step,
			    int64_t tokens, int64_t trained);

/* ---------------------------------------------------------------- one MoE block */

/*
 * Router (or the caller's ids and weights), shared experts and routed experts of one layer, with
 * LoRA on the routed experts. Names and layouts are those of Hugging Face and PEFT; y = W x. Calls
 * on one block are ordered by the caller: two threads in it at once get MOE_ERR_BUSY.
 */
struct moe_block;

/* What a forward with save keeps for the backward. The same bits either way. */
enum moe_activations {
	MOE_ACTIVATIONS_RETAIN = 0, /* x, gate and up: 2 H + 4 k I bytes per token with 16-bit kernels */
	MOE_ACTIVATIONS_RECOMPUTE,  /* x; the backward computes gate and up again */
};

struct moe_block_params {
	size_t struct_size;
	int hidden, intermediate, experts, experts_per_token;
	const char *router; /* "softmax_topk", ...; NULL: ids and weights come with each forward */
	int router_normalise;	     /* the k weights of a token are divided by their sum */
	float aux_loss_coef, z_loss_coef; /* add coef x load-balancing loss, coef x z-loss to the router's gradient */
	int shared_intermediate;     /* 0: no shared expert */
	int shared_sigmoid;	     /* the shared expert is scaled by sigmoid(x . shared_router) */
	int lora_rank;		     /* 0: none */
	float lora_alpha;	     /* scale = alpha / rank */
	int lora_share_a;	     /* gate and up have one A (PEFT's fused form) */
	int base_gradients;	     /* gradients of base, router and shared weights too */
	/*
	 * Base, router and shared weights are trained: f32 masters and moments, base_gradients, weights packed anew
	 * after each update. Weights can then be read back.
	 */
	int train_base;
	enum moe_activations activations;
	enum moe_dtype weight_dtype; /* widest dtype that weights will be set from */
	int expected_tokens;	/* per forward; sizes the groups. 0: 512. Buffers grow on demand */
	int group_size;		/* experts per task; 0: from expected_tokens. Changes no result */
	int slices_i, slices_h; /* tasks per group over intermediate, hidden; 0: automatic. Changes
				   no result */
	/*
	 * What the backward of the experts multiplies by: "direct" (the weights), "resident" (a transposed
	 * copy), "shared:N" (a copy made anew for each backward, as in a model whose layers share N of them; a
	 * block has one, whatever N). NULL, "auto": the cheapest by the machine's rates. Results differ
	 * by rounding. The kernels "ref" know "direct" only.
	 */
	const char *backward_weights;
	/*
	 * Frozen experts in a weight format ("fp8", "int8", "int4", "mxfp4", "gptq"; docs/formats.md): gate_proj,
	 * up_proj and down_proj come by moe_block_set_quantised. The backward is then "direct", and nothing trains
	 * or differentiates these weights. NULL: plain. weight_group: fewest columns that share a scale; 0: the format's usual.
	 */
	const char *weight_format;
	int weight_group;
	/*
	 * What is between gate and up of experts and shared experts: h = (u + shift) g sigmoid(alpha g) with g = min(gate,
	 * limit) and u = up cut to -limit..limit, LoRA's shares included. Where a value was cut its gradient is 0; a value
	 * that is the limit passes. limit: 0 (nothing is cut) or 1e-6 to 1e6; alpha: 0 (1) to 1000; shift: -1000 to 1000.
	 * All 0: h = silu(gate) up. DeepSeek-V4: its swiglu_limit alone; gpt-oss: 7, 1.702, 1.
	 */
	float swiglu_limit, swiglu_alpha, swiglu_shift;
};

struct moe_block_info {
	size_t struct_size;
	/* texts live as long as the block */
	const char *backward_weights; /* "direct", "shared:1" or "resident" */
	const char *backward_costs;   /* a line per choice, "*" at the one in use: predicted time, memory */
	int groups, slices_i, slices_h;
	/* pages of gradients and moments that all cores mapped ahead of the first step, and how long they took */
	int64_t touched_bytes;
	double touch_seconds;
};

enum moe_block_array {
	MOE_BLOCK_GATE_PROJ = 0,      /* [E, I, H] */
	MOE_BLOCK_UP_PROJ,	      /* [E, I, H] */
	MOE_BLOCK_DOWN_PROJ,	      /* [E, H, I] */
	MOE_BLOCK_ROUTER,	      /* [E, H] */
	MOE_BLOCK_SHARED_GATE,	      /* [S, H], S = shared_intermediate */
	MOE_BLOCK_SHARED_UP,	      /* [S, H] */
	MOE_BLOCK_SHARED_DOWN,	      /* [H, S] */
	MOE_BLOCK_SHARED_ROUTER,      /* [1, H] */
	MOE_BLOCK_GATE_LORA_A,	      /* [E, r, H]; the same array as UP_LORA_A with lora_share_a */
	MOE_BLOCK_UP_LORA_A,	      /* [E, r, H] */
	MOE_BLOCK_DOWN_LORA_A,	      /* [E, r, I] */
	MOE_BLOCK_GATE_LORA_B,	      /* [E, I, r] */
	MOE_BLOCK_UP_LORA_B,	      /* [E, I, r] */
	MOE_BLOCK_DOWN_LORA_B,	      /* [E, H, r] */
	MOE_BLOCK_TOPK_IDS,	      /* [T, k] I32, of the last forward; read only from here on */
	MOE_BLOCK_TOPK_WEIGHTS,	      /* [T, k] */
	MOE_BLOCK_ROUTER_LOGITS,      /* [T, E] */
	MOE_BLOCK_AUX_LOSS,	      /* [1]; without its coefficient */
	MOE_BLOCK_GRAD_ROUTER_LOGITS, /* [T, E] of the last backward */
	MOE_BLOCK_Z_LOSS,	      /* [1]; without its coefficient; 0 where that is 0 */
	MOE_BLOCK_ARRAYS
};

struct moe_adamw_params {
	size_t struct_size;
	double learning_rate, beta1, beta2, eps, weight_decay; /* decoupled decay */
	int64_t step;	      /* 1 for the first update; 0: the object counts */
	double max_grad_norm; /* 0: no clipping */
};

MOE_API enum moe_status moe_block_create(struct moe_engine *engine,
					 const struct moe_block_params *params,
					 struct moe_block **out);
MOE_API void moe_block_destroy(struct moe_block *block);
MOE_API enum moe_status moe_block_get_info(struct moe_block *block, struct moe_block_info *info);
/* Copies in; shape must match exactly; floats of any dtype up to weight_dtype's size (LoRA: any).
 */
MOE_API enum moe_status moe_block_set(struct moe_block *block, enum moe_block_array which,
				      const struct moe_array *src);
/*
 * An expert matrix as checkpoints of the block's weight_format store it, experts first ([E, I, H] of codes or
 * what packs them, scales, zeros where there are some), contiguous. MOE_ERR_FORMAT says what a tensor should be.
 */
struct moe_quantised_arrays {
	size_t struct_size;
	struct moe_array codes, scale, zero; /* zero.data NULL: none */
};
MOE_API enum moe_status moe_block_set_quantised(struct moe_block *block, enum moe_block_array which,
						const struct moe_quantised_arrays *src);
/* Copies out, contiguous, as F32, F64 (or I32 for ids). Weights that nothing trains cannot be read back. */
MOE_API enum moe_status moe_block_get(struct moe_block *block, enum moe_block_array which,
				      const struct moe_array *dst);
/* The gradient of a trainable array, same shape. */
MOE_API enum moe_status moe_block_get_gradient(struct moe_block *block, enum moe_block_array which,
					       const struct moe_array *dst);
/*
 * x, out [T, H] float dtypes, any strides. ids [T, k] I32 or I64 (-1: slot skipped; duplicates add
 * up) and weights [T, k] only without a router. save: keep what backward needs (one forward deep).
 * _async returns after submission; buffers must live until moe_block_wait.
 */
MOE_API enum moe_status moe_block_forward(struct moe_block *block, const struct moe_array *x,
					  const struct moe_array *ids,
					  const struct moe_array *weights, int save,
					  const struct moe_array *out);
MOE_API enum moe_status moe_block_forward_async(struct moe_block *block, const struct moe_array *x,
						const struct moe_array *ids,
						const struct moe_array *weights, int save,
						const struct moe_array *out);
/* grad_x [T, H]; grad_weights [T, k] or NULL. Gradients add up until moe_block_update or
 * _zero_gradients. */
MOE_API enum moe_status moe_block_backward(struct moe_block *block,
					   const struct moe_array *grad_out,
					   const struct moe_array *grad_x,
					   const struct moe_array *grad_weights);
MOE_API enum moe_status moe_block_backward_async(struct moe_block *block,
						 const struct moe_array *grad_out,
						 const struct moe_array *grad_x,
						 const struct moe_array *grad_weights);
/* AdamW on the LoRA arrays and, with train_base, on base, router and shared weights; asynchronous, ordered before the
 * next forward by the task graph. */
MOE_API enum moe_status moe_block_update(struct moe_block *block,
					 const struct moe_adamw_params *params);
MOE_API enum moe_status moe_block_zero_gradients(struct moe_block *block);
MOE_API enum moe_status moe_block_wait(struct moe_block *block);

/* ---------------------------------------------------------------- experts of one layer */

/*
 * The routed experts of one layer, without a router: what embeds in other programs. Their LoRA and, if wanted,
 * their base weights are trained by moesaic's AdamW or by the caller's optimizer.
 *
 * Threads: calls on one object are ordered by the caller (two at once: MOE_ERR_BUSY); different objects may be
 * used by different threads. Objects of equal shape on one engine share the memory of their passes; only what a
 * forward keeps for its backward is an object's own.
 *
 * Async: a call named _async returns when its tasks are submitted; the arrays that it was given must live, and
 * results are there, when moe_experts_wait has returned. Tasks are ordered by their data, arrays of the caller only
 * where moe_rows_create was told of them: several layers, and several calls on one, may be in flight. moe_experts_forward_async waits inside only for buffers: where more
 * calls than max_cache_depth + 1 are in flight, or a forward has more tokens than any before it.
 *
 * Arrays are those of enum moe_block_array up to DOWN_PROJ (base weights) and GATE_LORA_A to DOWN_LORA_B.
 */
struct moe_expert_layer;

struct moe_experts_params {
	size_t struct_size;
	int experts, experts_per_token, hidden, intermediate;
	int layer;	     /* its number, in names of tensors, errors and traces */
	int max_tokens;	     /* a forward with more is refused; 0: no limit */
	int max_cache_depth; /* forwards kept for a backward at a time; 0: 1 */
	int lora_rank;	     /* 0: no LoRA */
	float lora_alpha;    /* > 0 with a rank; scale = alpha / rank */
	float lora_dropout;  /* of LoRA's inputs, in [0, 1); see moe_experts_set_dropout */
	uint64_t seed;	     /* of dropout */
	int train_base;	     /* gradients, masters and moments of the base weights */
	enum moe_activations activations;
	enum moe_dtype weight_dtype; /* widest dtype that weights are loaded from; with train_base F32 */
	int expected_tokens, group_size, slices_i, slices_h; /* as in struct moe_block_params */
	const char *backward_weights; /* likewise; layers of equal shape share the N copies of shared:N */
	/*
	 * Micro-batches whose passes may run beside each other, at most max_cache_depth + 1; 0: 1. Each has buffers of
	 * its own, which layers of equal shape share: forwards take turns in them. With more than one, several
	 * backwards may be pending (where no gradient buffers are bound).
	 */
	int micro_batches;
	/*
	 * Quantised weights ("fp8", "int8", "int4", "mxfp4", "gptq"; docs/formats.md), whose memory is taken when they are
	 * loaded; the backward is then "direct". With train_base updates change f32 masters and quantise these again.
	 * NULL: plain ones.
	 */
	const char *weight_format;
	float swiglu_limit, swiglu_alpha, swiglu_shift; /* as in struct moe_block_params */
};

struct moe_experts_info {
	size_t struct_size;
	const char *backward_weights; /* lives as long as the object */
	int groups, slices_i, slices_h;
	int loaded, lora_ready; /* weights; LoRA values */
	int kept;		/* forwards that wait for their backward */
	int capacity;		/* tokens that the shared buffers hold */
	int pending;		/* a backward's gradients are not published yet */
	float scale;		/* alpha / rank */
	/*
	 * Pages that all cores mapped ahead of the work that writes them first, and how long they took: gradients in
	 * moe_experts_create; moments in moe_optimizer_create, or in the first moe_experts_update (not at all where
	 * only the caller's optimizer updates).
	 */
	int64_t touched_bytes;
	double touch_seconds;
	/*
	 * How far the loaded weights are from their source, relative L2, over up to 16 rows of each matrix: of floats that
	 * became codes (moe_experts_load, and _load_file of a plain file, with a weight_format), and of a file's codes that
	 * weight_format only comes near (GGUF's Q4_1 and Q4_K; docs/formats.md). 0: they are the source's.
	 */
	double load_error;
};

MOE_API enum moe_status moe_experts_create(struct moe_engine *engine,
					   const struct moe_experts_params *params,
					   struct moe_expert_layer **out);
/* Waits for its tasks. */
MOE_API void moe_experts_destroy(struct moe_expert_layer *layer);
MOE_API enum moe_status moe_experts_get_info(struct moe_expert_layer *layer,
					     struct moe_experts_info *info);

/*
 * gate, up [E, I, H], down [E, H, I], contiguous, floats up to weight_dtype; copied. map [n_map >= E] or NULL: the
 * expert that ids call e computes with row map[e] of the arrays; base gradients and updates keep the map (LoRA
 * arrays are by id). With train_base each row is used once. A second load does nothing and returns MOE_OK.
 */
MOE_API enum moe_status moe_experts_load(struct moe_expert_layer *layer, const struct moe_array *gate,
					 const struct moe_array *up, const struct moe_array *down,
					 const int64_t *map, int64_t n_map);
/*
 * The same of quantised weights, as checkpoints of weight_format store them (codes, scales, zeros; any size, ragged
 * last blocks too). n 0: each of gate, up and down is one, experts first; n = experts: arrays of so many single
 * matrices. With train_base masters are the dequantised weights. Into an object with a weight_format,
 * moe_experts_load quantises floats.
 * MOE_ERR_FORMAT says which tensor of which expert should be what.
 */
MOE_API enum moe_status moe_experts_load_quantised(struct moe_expert_layer *layer,
						   const struct moe_quantised_arrays *gate,
						   const struct moe_quantised_arrays *up,
						   const struct moe_quantised_arrays *down, int64_t n,
						   const int64_t *map, int64_t n_map);
/*
 * The same from safetensors (a file or a checkpoint directory), a GGUF file or a folder of kt-kernel's. prefix: of the layer's tensors, NULL:
 * "model.layers.<layer>". Per expert (mlp.experts.E.gate_proj.weight, block_sparse_moe.experts.E.w1.weight, ...)
 * or fused (mlp.experts.gate_up_proj); quantised ones into an object of their weight_format. Of every expert exactly
 * the shape above. moe_experts_info.load_error says what the conversion lost.
 */
MOE_API enum moe_status moe_experts_load_file(struct moe_expert_layer *layer, const char *path,
					      const char *prefix, const int64_t *map, int64_t n_map);

/*
 * LoRA that the object owns: A uniform in +-1/sqrt(in), B zero, from the seed. Values: moe_experts_set_array, _get_array.
 * Needed (or moe_experts_bind_lora) before the first forward of an object with a rank.
 */
MOE_API enum moe_status moe_experts_init_lora(struct moe_expert_layer *layer, uint64_t seed);
MOE_API enum moe_status moe_experts_set_array(struct moe_expert_layer *layer, enum moe_block_array which,
					const struct moe_array *src);
/* F32 or F64, contiguous. Base weights only with train_base (the f32 masters). Waits. */
MOE_API enum moe_status moe_experts_get_array(struct moe_expert_layer *layer, enum moe_block_array which,
					const struct moe_array *dst);
/* f32 gradients of an open window, with their scale. Waits. */
MOE_API enum moe_status moe_experts_get_gradient(struct moe_expert_layer *layer,
						 enum moe_block_array which,
						 const struct moe_array *dst);

/*
 * A parameter of the caller's optimizer. The struct is the caller's and must stay where it is until the object is
 * destroyed. param and buffer: F32 or BF16, the same dtype, contiguous, of the array's shape. buffer.data NULL (in
 * all of a binding's): gradients stay inside. grad says what the optimizer sees: NULL: nothing; buffer.data: the
 * published gradient. moesaic sets it; the optimizer may set it to NULL to close the window.
 */
struct moe_gradient {
	const char *name; /* for errors; may be NULL */
	struct moe_array param, buffer;
	void *grad;
};

/*
 * Gradients collect in windows. A backward into a closed window overwrites, into an open one adds (f32 inside; a
 * caller's buffers get each sum rounded once). Its gradients are published, and the window is open, when the sync
 * call or moe_experts_wait returns; if it fails, the window is closed. One backward may be pending at a time, but
 * see micro_batches.
 */
enum moe_window {
	MOE_WINDOW_EMPTY = 0, /* nothing is trained */
	MOE_WINDOW_CLOSED,
	MOE_WINDOW_OPEN,
};

/*
 * gate_a, up_a, down_a, gate_b, up_b, down_b: the order of enum moe_block_array. Values are copied in. Once per
 * object, with the window closed.
 */
MOE_API enum moe_status moe_experts_bind_lora(struct moe_expert_layer *layer,
					      struct moe_gradient six[6]);
/* gate, up, down; only with train_base. Values are read by moe_experts_update_base. */
MOE_API enum moe_status moe_experts_bind_base(struct moe_expert_layer *layer,
					      struct moe_gradient three[3]);
/*
 * MOE_ERR_STATE: some grads are set and some are not, one is another pointer, or a bound buffer was replaced or
 * resized; the text names it.
 */
MOE_API enum moe_status moe_experts_get_window(struct moe_expert_layer *layer, enum moe_window *out);
/* Closes the window: the next backward overwrites. MOE_ERR_STATE while a backward is pending. */
MOE_API enum moe_status moe_experts_release_gradients(struct moe_expert_layer *layer);

/*
 * x, out [T, H] float dtypes, any strides; ids [T, k] I32 or I64 (-1: skipped; duplicates add up); weights [T, k].
 * save: keep what the backward needs, at most max_cache_depth times (above: MOE_ERR_STATE).
 */
MOE_API enum moe_status moe_experts_forward(struct moe_expert_layer *layer, const struct moe_array *x,
					    const struct moe_array *ids,
					    const struct moe_array *weights, int save,
					    const struct moe_array *out);
MOE_API enum moe_status moe_experts_forward_async(struct moe_expert_layer *layer,
						  const struct moe_array *x,
						  const struct moe_array *ids,
						  const struct moe_array *weights, int save,
						  const struct moe_array *out);
/*
 * Of the latest forward that is kept: grad_out, grad_x [T, H], grad_weights [T, k] or NULL, T as in that forward.
 * Parameter gradients are multiplied by scale (finite, > 0). Refused arguments leave the forward kept; any later
 * failure uses it up, and the text says so; so does a change of weights or LoRA after the forward.
 */
MOE_API enum moe_status moe_experts_backward(struct moe_expert_layer *layer,
					     const struct moe_array *grad_out, double scale,
					     const struct moe_array *grad_x,
					     const struct moe_array *grad_weights);
MOE_API enum moe_status moe_experts_backward_async(struct moe_expert_layer *layer,
						   const struct moe_array *grad_out, double scale,
						   const struct moe_array *grad_x,
						   const struct moe_array *grad_weights);
enum moe_dropout_mode {
	MOE_DROPOUT_SAVED = 0, /* forwards with save (the default) */
	MOE_DROPOUT_ON,	       /* all, as for a forward that will be run again with save */
	MOE_DROPOUT_OFF,       /* none */
};
/*
 * For the forwards from here on (and their backwards). A mask depends on (seed, layer, step, projection, expert,
 * position of the token, column) and on nothing else: a forward that is run again with the same step and position
 * has the same one. step < 0: the updates so far. position: of x's first row in the global batch.
 */
MOE_API enum moe_status moe_experts_set_dropout(struct moe_expert_layer *layer, enum moe_dropout_mode mode,
						int64_t step, int64_t position);
/* Forgets the latest forward that is kept. */
MOE_API enum moe_status moe_experts_drop(struct moe_expert_layer *layer);
/* Until all calls on the object have ended; publishes what is pending. */
MOE_API enum moe_status moe_experts_wait(struct moe_expert_layer *layer);

/*
 * moesaic's AdamW on all that is trained, with the gradients of the open window, which closes; bound params
 * receive the new values. Asynchronous, ordered before the next forward by its data. After a backward that is
 * still pending it is possible where no buffers are bound.
 */
MOE_API enum moe_status moe_experts_update(struct moe_expert_layer *layer,
					   const struct moe_adamw_params *params);
/* The caller's optimizer has changed the bound params: reads them. _base does nothing without train_base. */
MOE_API enum moe_status moe_experts_update_lora(struct moe_expert_layer *layer);
MOE_API enum moe_status moe_experts_update_lora_async(struct moe_expert_layer *layer);
MOE_API enum moe_status moe_experts_update_base(struct moe_expert_layer *layer);
MOE_API enum moe_status moe_experts_update_base_async(struct moe_expert_layer *layer);
/*
 * With shared:N: makes the copies of the next backward now. Without them there is nothing to do. The backward
 * makes them itself where another layer or an update came between.
 */
MOE_API enum moe_status moe_experts_repack_async(struct moe_expert_layer *layer);
/* Gives activations back; the next forward takes them again. MOE_ERR_STATE while a forward is kept. */
MOE_API enum moe_status moe_experts_release_memory(struct moe_expert_layer *layer);

/*
 * Rows that calls hand to each other: where the output of one layer is the input of the next, the engine can keep
 * their order, block of tokens by block, and a step is submitted whole. data: as in the arrays of later calls on any
 * layer, which are recognised by this pointer; tokens: the most rows that any of them has. The memory stays the
 * caller's, who touches it only where nothing that uses it is in flight. Destroy before the memory is freed.
 */
struct moe_rows;
MOE_API enum moe_status moe_rows_create(struct moe_engine *engine, const void *data, int64_t tokens,
					struct moe_rows **out);
/* Waits for the calls that use it. */
MOE_API void moe_rows_destroy(struct moe_rows *rows);

/*
 * moe_experts_update of several layers as one step. max_grad_norm > 0: the gradients of all of them together are clipped
 * to it (torch's clip_grad_norm_), and where one is not finite nothing is updated. Destroy it before its layers.
 */
struct moe_optimizer;
MOE_API enum moe_status moe_optimizer_create(struct moe_engine *engine,
					     struct moe_expert_layer *const *layers, int n_layers,
					     struct moe_optimizer **out);
MOE_API void moe_optimizer_destroy(struct moe_optimizer *optimizer);
/*
 * Asynchronous: a layer's next forward is ordered after its own update by its data. Two steps are in flight at most;
 * the third waits for the first.
 */
MOE_API enum moe_status moe_optimizer_step(struct moe_optimizer *optimizer,
					   const struct moe_adamw_params *params);
/*
 * Until `step` has ended (1: the first moe_optimizer_step; 0: the last). norm: NULL, or that step's gradient norm
 * before clipping; NaN where there was no clipping, and of steps before the last two.
 */
MOE_API enum moe_status moe_optimizer_wait(struct moe_optimizer *optimizer, int64_t step,
					   double *norm);

/*
 * For callers that run a forward twice (checkpointing): the first one's output, reused by the second. A poisoned
 * cache stays so: an error in the caller's recomputation must not pass as a result.
 */
enum moe_checkpoint { MOE_CHECKPOINT_EMPTY = 0, MOE_CHECKPOINT_READY, MOE_CHECKPOINT_POISONED };
MOE_API enum moe_checkpoint moe_experts_checkpoint_state(const struct moe_expert_layer *layer);
/* Before a first forward: MOE_ERR_STATE, and poisoned, where one is still cached. */
MOE_API enum moe_status moe_experts_checkpoint_begin(struct moe_expert_layer *layer);
/* Copies out [T, H] in. Poisons where one is cached already, or the array is refused. */
MOE_API enum moe_status moe_experts_checkpoint_put(struct moe_expert_layer *layer,
						   const struct moe_array *out);
/* Copies out again; another T, or an array that is refused, poisons. It stays cached. */
MOE_API enum moe_status moe_experts_checkpoint_get(struct moe_expert_layer *layer,
						   const struct moe_array *out);
MOE_API enum moe_status moe_experts_checkpoint_poison(struct moe_expert_layer *layer, const char *why);
/* READY becomes EMPTY; POISONED stays. */
MOE_API void moe_experts_checkpoint_clear(struct moe_expert_layer *layer);

/* ---------------------------------------------------------------- model */

/*
 * A decoder from a checkpoint directory (config.json, safetensors) with a LoRA adapter on top.
 * Calls on one model are ordered by the caller; two threads in one model: MOE_ERR_BUSY.
 */
struct moe_model;

/* Called while a model loads, in the thread that opens it: bytes that were read, of all. */
typedef void (*moe_progress_fn)(const char *what, int64_t done, int64_t total, void *user);

/* Activations of the layers that train: what the backward computes again, from each layer's input. The same bits. */
enum moe_recompute {
	MOE_RECOMPUTE_AUTO = 0, /* in as many layers as memory asks for */
	MOE_RECOMPUTE_NEVER,
	MOE_RECOMPUTE_ALWAYS,
};

/* What of a model is trained. */
enum moe_method {
	MOE_METHOD_LORA = 0, /* the adapter */
	MOE_METHOD_FULL,     /* every weight; there is no adapter */
	MOE_METHOD_HYBRID,   /* the adapter, and the weights of the routed experts */
};

/* Where weights that are trained keep their exact values. Norms, biases and routers: always f32. */
enum moe_masters {
	MOE_MASTERS_F32 = 0, /* beside the bf16 weights that are computed with */
	MOE_MASTERS_BF16,    /* nowhere else: each update is rounded stochastically, a function of (seed, step,
				array, element). 4 bytes less per parameter; the checkpoint must be in BF16 */
};

struct moe_model_params {
	size_t struct_size;
	const char *dir;     /* required */
	const char *adapter; /* directory to start from, in any form: gives targets, ranks and
				alphas, or NULL */
	int max_tokens;	     /* of a micro-batch; 0: 512 */
	int slots;	     /* micro-batches in flight; 0: 2 where they fit, 1 for inference */
	int inference_only;  /* no gradients, no moments, activations of two layers */
	int lora_rank;	     /* of attention; 0: 16, without an adapter no LoRA for inference */
	int expert_rank;     /* 0: lora_rank */
	double lora_alpha;   /* 0: 2 lora_rank, and 2 expert_rank for experts */
	/*
	 * Names with commas between, an expression over whole module names, "all-linear" (as PEFT
	 * resolves it), "all"; NULL: "experts,q_proj,k_proj,v_proj,o_proj" (docs/adapters.md)
	 */
	const char *lora_targets;
	int share_a;		  /* gate and up of an expert share their A */
	int rslora;		  /* scale is alpha / sqrt(rank) */
	uint64_t seed;		  /* of the initial A: uniform in +-1/sqrt(in) as in PEFT; B is 0 */
	/*
	 * Of the load-balancing loss (Switch Transformer) and the z-loss (ST-MoE) of the router: means over the MoE
	 * layers and, by tokens, over the micro-batches of a step. 0: none. Not part of the printed loss.
	 */
	double aux_coef, z_coef;
	int64_t memory_limit; /* bytes; 0: what the machine has available */
	/* as in struct moe_block_params, but the layers share the N copies; where nothing is trained there is no
	 * backward, and no copy */
	const char *backward_weights;
	const char *adapter_format; /* of saved adapters: "peft" (NULL), "per-expert", "kt" */
	int skip_value_check;	    /* do not look for NaN and Inf in the weights */
	enum moe_recompute recompute;
	/* Of LoRA's inputs in training, in [0, 1). Masks follow from the trainer's seed, the step, and the place in the
	 * step's batch and in the model. Not for a router's LoRA. */
	double lora_dropout;
	/* Experts that the checkpoint has in F32, F16 or BF16 become codes of this format ("int8", "int4", "fp8",
	 * "mxfp4"); NULL, "keep": all weights stay as they are stored, quantised or not (docs/formats.md). */
	const char *weights;
	/* With inference_only: room for the keys and values of a text of max_tokens, for moe_model_next. */
	int keep_text;
	moe_progress_fn progress;
	void *user;
	/* LORA and HYBRID: the routers' weights are trained too and saved with the adapter, which may be none of the
	 * routers then. An adapter that has them is trained on with them. */
	int train_router;
	/* FULL and HYBRID: not with weights, quantised checkpoints or inference_only; FULL: nor with an adapter */
	enum moe_method method;
	const char *kt_weights; /* folder of kt-kernel's INT8 or INT4 files: its experts are loaded, not dir's; or NULL */
	enum moe_masters masters;
};

struct moe_model_info {
	size_t struct_size;
	const char *arch; /* config.json's model_type; lives as long as the model */
	int64_t vocab, hidden, max_positions;
	int layers, moe_layers, experts, experts_per_token, moe_intermediate;
	int max_tokens, slots, lowest_trained_layer; /* = layers: nothing is trained */
	int64_t params, active_params, trainable_params;
	/* by group */
	int64_t embed_params, norm_params, attention_params, dense_params, router_params,
		shared_params, expert_params;
	/* of the adapter; router_weights: the routers' own weights, not LoRA */
	int64_t attention_lora_params, router_lora_params, dense_lora_params;
	int router_weights;
	int64_t shared_lora_params; /* of shared experts and their gate */
	int64_t expert_lora_params;
	int lora_rank, expert_rank;
	int64_t eos_ids[8];
	int n_eos;
	int64_t non_finite; /* NaN and Inf among the weights */
	int64_t weight_bytes, lora_bytes,
		activation_bytes; /* allocated; lora: with gradients and moments */
	int64_t handles;	  /* of the runtime, in use by the engine */
	double load_seconds;
	const char *backward_weights; /* "direct", "shared:N", "resident"; lives as long as the model */
	const char *expert_format;    /* "fp8", ...; NULL: plain. Static */
	enum moe_method method;
	enum moe_masters masters;
	int64_t whole_params; /* trained themselves, not by an adapter */
	/* gradients and moments, touched by the workers of their NUMA nodes when the model was opened */
	int64_t touched_bytes;
	double touch_seconds;
	/*
	 * The memory plan, made before anything was allocated: bytes of the whole process at its peak, what it would
	 * be with two micro-batches in flight and all activations kept, and what there is for it.
	 */
	int64_t planned_bytes, wanted_bytes, allowed_bytes;
	int trained_layers, recomputed_layers; /* from the lowest trained one on; others keep activations */
};

MOE_API enum moe_status moe_model_open(struct moe_engine *engine,
				       const struct moe_model_params *params,
				       struct moe_model **out);
/*
 * What opening would refuse for config.json and the adapter alone: architecture, targets, ranks, shapes of the
 * adapter. Reads no weights and needs no engine. info may be NULL; arch (static), vocab, hidden, max_positions,
 * layers, moe_layers, experts, experts_per_token and moe_intermediate are filled, the rest is 0.
 */
MOE_API enum moe_status moe_model_check(const struct moe_model_params *params, struct moe_model_info *info);
/* Waits for its tasks. */
MOE_API void moe_model_close(struct moe_model *model);
MOE_API enum moe_status moe_model_get_info(struct moe_model *model, struct moe_model_info *info);
/* Replaces the LoRA's values; targets and ranks must be the model's. Moments are cleared. */
MOE_API enum moe_status moe_model_load_adapter(struct moe_model *model, const char *dir);
/*
 * The model's weights as a checkpoint into dir, which is made: names, dtypes and shards of the one that was opened,
 * and all its other files but what training leaves (logs, adapters, checkpoints). Files appear complete, config.json last.
 * With an adapter: without what that adds. MOE_ERR_NOFIT: too little disk. Only FULL and HYBRID. Waits.
 */
MOE_API enum moe_status moe_model_save(struct moe_model *model, const char *dir);
/* Writes the model's adapter_format into dir. */
MOE_API enum moe_status moe_model_save_adapter(struct moe_model *model, const char *dir);
/*
 * One document of n ids: logits of tokens row[0..n_rows) (ascending; NULL: the last token, n_rows
 * 1) into out [n_rows, vocab] F32, contiguous.
 */
MOE_API enum moe_status moe_model_logits(struct moe_model *model, const int32_t *ids, int64_t n,
					 const int32_t *row, int64_t n_rows,
					 const struct moe_array *out);
/*
 * A text in pieces, as in generation: ids[0..n) follow the first `past` tokens of the text that earlier calls gave
 * (past 0: a new text; fewer than there are: the others are forgotten), whose keys and values are kept. Logits of
 * the last of them into out [1, vocab] F32; they may differ by rounding from those of the text at once. past + n is at
 * most max_tokens. After an error the text is forgotten. MOE_ERR_STATE: opened without keep_text, or past is more
 * than there is.
 */
MOE_API enum moe_status moe_model_next(struct moe_model *model, const int32_t *ids, int64_t n, int64_t past,
				       const struct moe_array *out);
/*
 * Losses of documents ids[offsets[d]..offsets[d + 1]) with labels as in token files: labels[i] is
 * for token i, negative: not trained; NULL: every token but a document's first. loss [n_docs]: sums
 * of -log p; count [n_docs]: predictions (or NULL). Documents are packed; they do not see each
 * other.
 */
MOE_API enum moe_status moe_model_loss(struct moe_model *model, const int32_t *ids,
				       const int32_t *labels, const int64_t *offsets,
				       int64_t n_docs, double *loss, int64_t *count);

/* ---------------------------------------------------------------- trainer */

/*
 * Fine-tunes what a model's method says on token files (made by python -m moesaic.data) and keeps the output
 * directory: trainer_log.jsonl, trainer_state.json, training_loss.svg, checkpoint-N/, and at the
 * end the adapter, or the model (moe_model_save). A step is submitted whole; the next one is submitted while it runs.
 */
struct moe_trainer_params {
	size_t struct_size;
	const char *data;	/* token file; required */
	const char *eval_data;	/* token file or NULL */
	/* without eval_data: share of the packs that is kept for evaluation, the last ones; from 1 on: the packs
	 * that hold the last so many documents */
	double eval_split;
	const char *output_dir; /* created; required */
	const char *resume; /* a checkpoint directory, "" = the newest in output_dir, NULL = none */
	int overwrite;	    /* an output directory that already has results may be used */
	double learning_rate; /* 0: 1e-4 */
	/* transformers' names: "cosine" (default), "linear", "constant", "constant_with_warmup", "polynomial",
	 * "inverse_sqrt", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr",
	 * "warmup_stable_decay"; args: lr_scheduler_kwargs as "key=value,..." or NULL */
	const char *schedule, *schedule_args;
	int64_t warmup_steps; /* 0: warmup_ratio of all steps */
	double warmup_ratio, weight_decay, beta1, beta2, eps; /* betas and eps 0: .9, .999, 1e-8 */
	double max_grad_norm;				      /* 0: no clipping */
	int batch_size;	   /* packs per micro-batch; 0: as many as fit batch_tokens */
	int batch_tokens;  /* 0: the model's max_tokens */
	int accumulation;  /* micro-batches per step; 0: 1 */
	double epochs;	   /* 0: 3 */
	int64_t max_steps; /* 0: by epochs */
	int keep_order;	   /* packs in file order instead of shuffled by seed and epoch */
	uint64_t seed;
	/*
	 * Every so many steps; between 0 and 1: every so large a share of all steps, rounded up. 0: each step, each epoch,
	 * never. -1: logged each epoch, no evaluation at all, saved each epoch. logging_steps -2: no line but of evaluations.
	 */
	double logging_steps, eval_steps, save_steps;
	int save_total_limit; /* 0: 2 */
	double max_hours;	  /* 0: no limit */
	int skip_non_finite;	  /* skip the update instead of stopping with MOE_ERR_DIVERGED */
	/* a checkpoint or a line of the log that cannot be written is a warning; the results at the end are not */
	int continue_on_save_error;
	/*
	 * The adapter at the end is that of the least evaluation loss; each evaluation that is the best so far is
	 * saved as a checkpoint. Without it the last step's. The best checkpoint is never pruned.
	 */
	int load_best;
	int sequential;		  /* wait for each micro-batch and each step before submitting what comes next */
	int save_best;	   /* a checkpoint of each evaluation that is the best so far, as with load_best */
	int log_first;	   /* step 1 is logged whatever logging_steps */
	int eval_at_start; /* evaluated before the first step too: logged as step 0, never the best */
	double eval_delay; /* no evaluation before so many steps, or epochs where eval_steps is 0; the last is done */
	int drop_last;	   /* with batch_size: without the last micro-batch of an epoch, where it has fewer packs */
	int order_seeded;  /* the order of the packs follows order_seed instead of seed */
	uint64_t order_seed;
};

enum moe_train_event_type { MOE_TRAIN_STEP, MOE_TRAIN_EVAL, MOE_TRAIN_SAVED, MOE_TRAIN_WARNING };

struct moe_train_event {
	enum moe_train_event_type type;
	int64_t step, total_steps; /* 1-based */
	double epoch, loss, eval_loss, learning_rate, grad_norm, grad_norm_experts;
	double aux_loss, z_loss; /* without coefficients; z_loss 0 where it has none */
	int64_t tokens, trained_tokens; /* of the step */
	int64_t skipped; /* steps of the run without an update, up to this one */
	double tokens_per_s, rss_gib, eta_s, idle_share;
	/* of this step, per MoE layer; valid during the call */
	int moe_layers;
	const double *expert_load;	/* tokens of the busiest expert over the mean */
	const int32_t *unused_experts;	/* experts without a token */
	enum moe_idle_cause idle_cause; /* the largest, and its share of the workers' time */
	double idle_cause_share;
	const char *text; /* path of what was saved, or a warning */
	int logged;	  /* of a step: trainer_log.jsonl has a line of it */
};
/* Called in the training thread. Nonzero: save and stop with MOE_ERR_INTERRUPTED. */
typedef int (*moe_train_fn)(const struct moe_train_event *event, void *user);

struct moe_train_result {
	size_t struct_size;
	int64_t steps, tokens, trained_tokens;
	double seconds;				 /* in steps, without evaluation and saving */
	double first_loss, last_loss, eval_loss; /* eval_loss NaN without evaluation */
	double peak_rss_gib;
	int64_t adapted_experts, experts_without_gradient; /* over all layers */
	int64_t skipped; /* steps without an update */
	double best_loss; /* least evaluation loss, NaN without evaluation, and its step */
	int64_t best_step;
	/* of a micro-batch of the evaluations: moe_evaluate of a model with this max_tokens makes
	 * the same ones, and so the same bits; 0 without evaluation */
	int eval_batch_tokens;
};

/* The part of moe_train's checks that needs neither model nor data. */
MOE_API enum moe_status moe_train_check(const struct moe_trainer_params *params);
MOE_API enum moe_status moe_train(struct moe_model *model, const struct moe_trainer_params *params,
				  moe_train_fn fn, void *user, struct moe_train_result *result);
/* Tokens that each expert of a layer saw in the last moe_train, with what it resumed from; counts [E]. MOE_ERR_ARG:
 * no MoE layer. */
MOE_API enum moe_status moe_train_expert_tokens(struct moe_model *model, int layer, int64_t *counts,
						int n);

/* What a token file holds; max_tokens of a model that trains on it follows from this. */
struct moe_token_file_info {
	size_t struct_size;
	int64_t tokens, trained_tokens, documents, packs, longest_document, longest_pack;
};
MOE_API enum moe_status moe_token_file_info(const char *token_file,
					    struct moe_token_file_info *info);

/* Mean loss over a token file: sum of -log p over its trained tokens. */
struct moe_eval_result {
	size_t struct_size;
	double loss;
	int64_t tokens;
	/* per document in file order; freed by moe_eval_result_free */
	double *doc_loss;
	int64_t *doc_tokens;
	int64_t n_docs;
};
MOE_API enum moe_status moe_evaluate(struct moe_model *model, const char *token_file,
				     struct moe_eval_result *result);
MOE_API void moe_eval_result_free(struct moe_eval_result *result);

/* ---------------------------------------------------------------- estimate */

/*
 * What opening and training a model would take, from its config.json alone: the same code that
 * opens and submits runs on an engine that only counts.
 */
struct moe_estimate_params {
	size_t struct_size;
	const struct moe_model_params
		*model;	     /* dir: a checkpoint directory or a config.json; weights as BF16 */
	int parts, workers;  /* 0: 1, one per part */
	int tokens;	     /* per micro-batch; 0: the model's max_tokens */
	int document_tokens; /* length of the documents in it; 0: as long as positions allow */
	int micro_batches;   /* per step; 0: 1 */
	double gflops_per_worker; /* of all work; 0: the machine's rates, calibrated or guessed */
};

#define MOE_ESTIMATE_PARTS 64
#define MOE_ESTIMATE_KINDS 128

struct moe_estimate {
	size_t struct_size;
	int64_t params, active_params, trainable_params;
	/* bytes */
	int64_t weights, lora, gradients, moments, activations, scratch;
	int64_t runtime;	/* handles at 4 KiB, live tasks at 2 KiB: Debian's StarPU */
	int64_t total, largest; /* largest single allocation */
	int parts;
	int64_t part[MOE_ESTIMATE_PARTS]; /* placed on each part; the rest is anywhere */
	/* graph of one step */
	int64_t handles, tasks;
	int max_task_handles;
	int64_t kind[MOE_ESTIMATE_KINDS]; /* tasks by kind */
	double submission_s;		  /* tasks x 6 us */
	double step_s;		 /* predicted work over the workers, or the submission if that is longer */
	double submission_share; /* of step_s */
	double tokens_per_s;
	char backward_weights[32]; /* chosen, or as asked for; their copies count as weights */
	char isa[32];		   /* kernel table that the prediction is for */
	int calibrated;		   /* from measured rates (moe_machine_calibrate), not guessed ones */
	const char *lacks; /* what training this architecture lacks; NULL: it is trained. Static */
	/* what opening would choose for the model's memory_limit, or what this machine has */
	int slots, trained_layers, recomputed_layers;
	int64_t process; /* code and the runtime's own memory */
	int64_t staging; /* of saving, or of loading where that is more than what comes after it */
	int64_t wanted;	 /* total with two micro-batches in flight and all activations kept */
};
MOE_API enum moe_status moe_estimate(const struct moe_estimate_params *params,
				     struct moe_estimate *out);

/* ---------------------------------------------------------------- files */

/* Called while files are written, in the caller's thread. Nonzero: stop; MOE_ERR_INTERRUPTED. */
typedef int (*moe_work_fn)(const char *what, int64_t done, int64_t total, void *user);

/* An adapter folded into its base model's weights: a new checkpoint folder. */
struct moe_merge_params {
	size_t struct_size;
	const char *model, *adapter; /* folders; the adapter in any form */
	const char *output_dir;	     /* must not exist, or be empty; complete or absent */
	const char *weights;	     /* "keep" (NULL): names, shards, dtypes and formats of the base; or a
					format of moe_convert_model_params for the experts */
	int64_t max_shard_bytes;     /* larger shards are split; 0: none */
	moe_work_fn progress;
	void *user;
};
struct moe_merge_result {
	size_t struct_size;
	int64_t tensors, merged, shards, bytes;
	double seconds;
	/* Where weights were quantised: ||stored - (W + scaling B A)|| / ||W + scaling B A||; else 0. */
	double error, worst_error;
};
/* MOE_ERR_FORMAT: the adapter was made for another model; MOE_ERR_NOFIT: too little disk. */
MOE_API enum moe_status moe_merge(const struct moe_merge_params *params,
				  struct moe_merge_result *result);

/* An adapter in another form. */
struct moe_convert_params {
	size_t struct_size;
	const char *in, *out;	    /* out must not exist, or be empty; complete or absent */
	const char *adapter_format; /* "peft", "per-expert", "kt" */
	const char *model;	    /* base model: shapes are checked, names are its own; or NULL */
};
struct moe_convert_result {
	size_t struct_size;
	const char *from, *to; /* forms; constant */
	int64_t params;	       /* values of A and B in the input */
};
MOE_API enum moe_status moe_convert_adapter(const struct moe_convert_params *params,
					    struct moe_convert_result *result);

/*
 * A checkpoint whose weights are in another format: a new folder with the other files of the old
 * one, SHA256SUMS of the weights, and a config.json that says what they are. It is filled as
 * OUT.partial, and a later call with the same params goes on with what a killed one left there.
 */
struct moe_convert_model_params {
	size_t struct_size;
	const char *in, *out;	 /* folders, in also a GGUF file; out must not exist, or be empty */
	/* "int8", "int4", "fp8", "mxfp4", "gptq", "awq", "bf16", "f16", "f32"; of GGUF and kt_weights also "nearest".
	   "kt-int8", "kt-int4": the experts alone, as kt-kernel's files */
	const char *weights;
	const char *layers;	 /* what is quantised: "experts", "linear" (all projections); NULL: what
				    checkpoints of the format have (fp8: linear, others: experts) */
	int64_t max_shard_bytes; /* larger files are split; 0: none */
	int threads;		 /* 0: all CPUs that the process may use */
	moe_work_fn progress;
	void *user;
	const char *kt_weights; /* folder of kt-kernel's INT8 or INT4 files: its experts are converted, not in's; or NULL */
	int kt_parts;		/* of "kt-int8", "kt-int4": the NUMA parts that kt-kernel will run with, 0: 1 */
	int kt_backward;	/* nonzero: also the backward weights (each matrix transposed, quantised again) */
};
struct moe_convert_model_result {
	size_t struct_size;
	int64_t tensors, converted; /* matrices, those of fused experts one by one */
	int64_t kept;		    /* of these: whose codes were taken over as they were */
	int64_t shards, resumed;    /* files (kt: layers); those that an earlier call had finished */
	int64_t bytes_in, bytes;    /* of all tensors, before and after */
	/* ||new - old|| / ||old||, of what this call converted: all of it, and the worst matrix */
	double error, worst_error;
	char worst[192];
	double seconds;
	double largest_error; /* |new - old| of a weight */
};
/* MOE_ERR_FORMAT, MOE_ERR_UNSUPPORTED name the tensor; MOE_ERR_NOFIT: too little disk. */
MOE_API enum moe_status moe_convert_model(const struct moe_convert_model_params *params,
					  struct moe_convert_model_result *result);

/* SHA-256 in lower-case hexadecimal digits. MOE_ERR_IO: the file cannot be read. */
#define MOE_SHA256_TEXT 65
MOE_API void moe_sha256(const void *data, size_t bytes, char out[MOE_SHA256_TEXT]);
MOE_API enum moe_status moe_file_sha256(const char *path, char out[MOE_SHA256_TEXT]);

/*
 * What path holds (a model, an adapter, a token file, a training state, a trace, any safetensors
 * file) as JSON text with the key "kind"; moe_text_free it. MOE_ERR_FORMAT: none of these.
 */
MOE_API enum moe_status moe_inspect(const char *path, char **json);
/* The same; of quantised weights also their values. */
struct moe_inspect_params {
	size_t struct_size;
	int values;	  /* nonzero: ranges of values and scales: reads all of them */
	const char *base; /* a plain checkpoint, or NULL: errors against it, for those of equal names */
};
MOE_API enum moe_status moe_inspect_with(const char *path, const struct moe_inspect_params *params,
					 char **json);
MOE_API void moe_text_free(char *text);

/* ---------------------------------------------------------------- machine */

/*
 * What the library found out about this machine, and the rates that its cost models use. They are
 * guesses until moe_machine_calibrate has written a file; it is read when a block or a model is
 * opened. The file is the one that MOESAIC_MACHINE names ("": none), else
 * $XDG_CACHE_HOME/moesaic/machine.json (~/.cache). A file of another CPU is not used.
 */
#define MOE_MACHINE_TEXT 128
#define MOE_MACHINE_NAME 32
#define MOE_MACHINE_POINTS 9 /* rows 1, 2, 4, ... 256 */
#define MOE_MACHINE_ISAS 16

/* A kernel table. Rates in GFLOP/s of one core with weights in cache. */
struct moe_machine_isa {
	const char *name;
	int supported; /* by this CPU and operating system */
	int chosen;    /* what MOESAIC_ISA names, or the best supported one */
	int measured;  /* the rates are: else guessed */
	double peak_gflops; /* of its multiply-add loop; 0: unknown */
	double forward_gflops[MOE_MACHINE_POINTS], backward_gflops[MOE_MACHINE_POINTS];
	double pack_gbps; /* bytes of source that are packed */
};

enum moe_machine_file {
	MOE_MACHINE_FILE_NONE = 0, /* never calibrated */
	MOE_MACHINE_FILE_USED,
	MOE_MACHINE_FILE_OTHER, /* of another CPU */
	MOE_MACHINE_FILE_BAD,	/* cannot be read or is damaged */
};

struct moe_machine_info {
	size_t struct_size;
	char cpu[MOE_MACHINE_TEXT];
	int cpus, cores, sockets, nodes; /* online CPUs; hwloc's cores, packages, NUMA nodes */
	int fake_topology;
	int starpu_version[3], starpu_max_workers, starpu_max_nodes, starpu_max_buffers;
	int workers; /* that an engine starts by default */
	char isa_error[256]; /* why no table can be chosen, or "" */
	/* the file */
	char file[4096]; /* "": there is no place for one */
	int file_named;	 /* by MOESAIC_MACHINE: BAD is then an error of opening */
	enum moe_machine_file file_state;
	char file_error[512];	     /* of OTHER and BAD */
	char date[MOE_MACHINE_NAME]; /* of calibration, or "" */
	double load;		     /* of the machine meanwhile */
	/* rates; GB/s from DRAM by one core and by all together, us of overhead per task */
	double clock_ghz, read_gbps, read_all_gbps, copy_gbps;
	double task_us, task_all_us; /* one worker; each of all */
	double submit_us;
	int n_isas;
	struct moe_machine_isa isa[MOE_MACHINE_ISAS];
};
/* Fails only where out is wrong or the topology cannot be read. Starts nothing. */
MOE_API enum moe_status moe_machine_describe(struct moe_machine_info *out);

struct moe_calibrate_params {
	size_t struct_size;
	const char *file; /* to write; NULL: where it is looked for */
	int no_file;	  /* only measure */
	int quick;	  /* a tenth of the time, less exact */
	/* done and total are milliseconds of the plan; in the calling thread */
	void (*progress)(const char *what, int64_t done, int64_t total, void *user);
	void *user;
};
/*
 * Measures this machine, about 20 s, and writes the file. Starts engines of its own: MOE_ERR_STATE
 * while one is open. The calling thread is pinned meanwhile. out may be NULL; else what the file
 * says now, as moe_machine_describe.
 */
MOE_API enum moe_status moe_machine_calibrate(const struct moe_calibrate_params *params,
					      struct moe_machine_info *out);
/*
 * The honest roof: GB/s read from DRAM by n pinned threads (0: one per CPU) over at least 256 MB in
 * 2 MiB pages, the best of five read loops, each the upper quartile of its repeats.
 */
MOE_API enum moe_status moe_machine_read_roof(int threads, double *gbps);

#ifdef __cplusplus
}
#endif
#endif
