/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a decoder looks like, as plain data, independent of whose config.json said so; and what its
 * tensors are called in a checkpoint and which shapes they have. Readers of architectures are the
 * files of model/archs/. Nothing here owns memory; thread-safe.
 */
#ifndef MOE_MODEL_ARCH_H
#define MOE_MODEL_ARCH_H

#include "engine/base.h"

#define MOE_ARCH_MAX_LAYERS 512
#define MOE_ARCH_MAX_EOS 8
#define MOE_TENSOR_NAME_MAX 160

enum moe_rope_type { MOE_ROPE_DEFAULT = 0, MOE_ROPE_LINEAR, MOE_ROPE_YARN };

/*
 * Rotary embedding over the whole head. Fields after type matter only for scaled types.
 * attention_factor, mscale and mscale_all_dim are 0 when the config does not give them.
 */
struct moe_rope {
	double theta;
	enum moe_rope_type type;
	double factor;
	int64_t original_max_positions;
	double beta_fast, beta_slow;
	double attention_factor, mscale, mscale_all_dim;
	bool truncate;
};

enum moe_qk_norm {
	MOE_QK_NORM_NONE = 0,
	MOE_QK_NORM_HEAD, /* RMS norm of each head, weight [head_dim] (Qwen3) */
	MOE_QK_NORM_FULL  /* RMS norm of the whole projection, weight [heads * head_dim] (OLMoE) */
};

struct moe_arch_reader;

struct moe_arch {
	const char *name; /* config.json's model_type */
	const struct moe_arch_reader *reader;
	int64_t vocab, hidden;
	int n_layers, n_heads, n_kv_heads, head_dim;
	int64_t max_positions;
	double rms_eps;
	bool tie_embeddings;	/* the checkpoint has no lm_head: embed_tokens serves for both */
	int64_t bos_id, pad_id; /* -1: none */
	int n_eos;
	int64_t eos_ids[MOE_ARCH_MAX_EOS]; /* generation_config.json's first, then config.json's */
	struct moe_rope rope;
	bool qkv_bias, o_bias;
	enum moe_qk_norm qk_norm;
	int64_t intermediate;			/* of dense layers; 0 if there are none */
	bool layer_is_moe[MOE_ARCH_MAX_LAYERS]; /* else the layer has a dense MLP */
	/* Mixture-of-experts layers, all alike; n_experts 0 if there are none. */
	int n_experts, top_k;
	int64_t moe_intermediate;
	double swiglu_limit; /* of experts and dense MLPs: gate at most, |up| at most this; 0: none */
	bool gate_up_alternate; /* fused tensors: row 2 i is gate's row i, row 2 i + 1 up's (gpt-oss) */
	const char *router;	     /* a name of codelets/routers/: "softmax_topk" */
	bool norm_topk_prob;	     /* the k weights are divided by their sum */
	int64_t shared_intermediate; /* shared expert; 0: none */
	bool shared_gate;	     /* with a sigmoid gate of its own */
	double aux_loss_coef;	     /* the config's router_aux_loss_coef; used only on request */
	/*
	 * Architectures that are estimated, not trained yet (reader->estimate_only): parameters that
	 * the shapes above miss, or have too many, of all layers together.
	 */
	int64_t attention_params_more, expert_params_more;
};

/* What a tensor is for. Layer roles need a layer, EXPERT_* an expert too. */
enum moe_role {
	MOE_ROLE_EMBED = 0,  /* [vocab, hidden] */
	MOE_ROLE_FINAL_NORM, /* [hidden] */
	MOE_ROLE_LM_HEAD,    /* [vocab, hidden]; absent when tied */
	MOE_ROLE_ATTN_NORM,  /* [hidden] */
	MOE_ROLE_Q,	     /* [heads * head_dim, hidden] */
	MOE_ROLE_K,	     /* [kv_heads * head_dim, hidden] */
	MOE_ROLE_V,
	MOE_ROLE_O, /* [hidden, heads * head_dim] */
	MOE_ROLE_Q_BIAS,
	MOE_ROLE_K_BIAS,
	MOE_ROLE_V_BIAS,
	MOE_ROLE_O_BIAS,
	MOE_ROLE_Q_NORM,
	MOE_ROLE_K_NORM,
	MOE_ROLE_FFN_NORM,   /* [hidden] */
	MOE_ROLE_DENSE_GATE, /* [intermediate, hidden] */
	MOE_ROLE_DENSE_UP,
	MOE_ROLE_DENSE_DOWN,  /* [hidden, intermediate] */
	MOE_ROLE_ROUTER,      /* [experts, hidden] */
	MOE_ROLE_EXPERT_GATE, /* [moe_intermediate, hidden], one expert */
	MOE_ROLE_EXPERT_UP,
	MOE_ROLE_EXPERT_DOWN,	  /* [hidden, moe_intermediate], one expert */
	MOE_ROLE_EXPERTS_GATE_UP, /* [experts, 2 * moe_intermediate, hidden]: gate rows, then up */
	MOE_ROLE_EXPERTS_DOWN,	  /* [experts, hidden, moe_intermediate] */
	MOE_ROLE_SHARED_GATE,	  /* [shared_intermediate, hidden] */
	MOE_ROLE_SHARED_UP,
	MOE_ROLE_SHARED_DOWN,	/* [hidden, shared_intermediate] */
	MOE_ROLE_SHARED_ROUTER, /* [1, hidden]: logit of the shared expert's sigmoid */
	MOE_ROLE_COUNT
};

enum moe_param_group {
	MOE_PARAMS_EMBED = 0, /* embedding, and the head unless tied */
	MOE_PARAMS_NORM,      /* all norms, q and k norms included */
	MOE_PARAMS_ATTENTION, /* projections and biases */
	MOE_PARAMS_DENSE,     /* dense MLPs */
	MOE_PARAMS_ROUTER,
	MOE_PARAMS_SHARED, /* shared experts and their gate */
	MOE_PARAMS_EXPERTS,
	MOE_PARAMS_COUNT
};

struct moe_param_count {
	int64_t total;
	int64_t active; /* per token: top_k of the experts */
	int64_t groups[MOE_PARAMS_COUNT];
};

/*
 * Reads config.json (and generation_config.json if present) of a checkpoint directory; dir may also
 * be the path of a config.json alone, or of a GGUF file.
 * MOE_ERR_IO; MOE_ERR_FORMAT: malformed, a missing or absurd value (the text names the key);
 * MOE_ERR_UNSUPPORTED: an architecture or feature that is not implemented (the text names it).
 */
enum moe_status moe_arch_load(const char *dir, struct moe_arch *out);
/* The same from the text of config.json; generation may be NULL. */
enum moe_status moe_arch_parse(const char *config, const char *generation, struct moe_arch *out);

/*
 * The tensor's shape into shape; returns its rank, 0 if this model has no such tensor (for example
 * a bias it does not use, an expert of a dense layer). layer is ignored for roles outside layers.
 */
int moe_arch_tensor_shape(const struct moe_arch *arch, enum moe_role role, int layer,
			  int64_t shape[MOE_MAX_NDIM]);

/*
 * The variant-th name (0, 1, ...) under which checkpoints store the tensor, into buf of
 * MOE_TENSOR_NAME_MAX bytes. false: no such variant, or the model has no such tensor.
 * Expert weights exist per expert (EXPERT_*) or fused (EXPERTS_*): try both.
 */
bool moe_arch_tensor_name(const struct moe_arch *arch, enum moe_role role, int layer, int expert,
			  int variant, char *buf);

int moe_arch_moe_layers(const struct moe_arch *arch);
void moe_arch_count_params(const struct moe_arch *arch, struct moe_param_count *out);
const char *moe_role_name(enum moe_role role);
/* One expert's matrix; the fused tensors of all experts (EXPERTS_*) are none. */
static inline bool moe_role_is_expert(enum moe_role role)
{
	return role >= MOE_ROLE_EXPERT_GATE && role <= MOE_ROLE_EXPERT_DOWN;
}
const char *moe_param_group_name(enum moe_param_group group);

#endif
