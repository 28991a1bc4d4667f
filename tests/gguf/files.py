# SPDX-License-Identifier: Apache-2.0
"""Writes small models as GGUF with the gguf package; K blocks from random bytes, which it cannot quantise to."""

import gguf
import numpy as np

HEADS, KV_HEADS, DIM, HIDDEN, INNER, EXPERTS, VOCAB, LAYERS = 4, 2, 64, 256, 512, 4, 96, 2
Q = gguf.GGMLQuantizationType
# d at these places of a block of that many bytes, and how large
HALVES = {Q.Q4_K: (144, ((0, 2e-3), (2, 1e-2))), Q.Q6_K: (210, ((208, 5e-5),))}


def random_blocks(rng, kind, shape):
    """Bytes [*shape without the last, row bytes] of blocks whose scales are finite and whose weights are small."""
    size, halves = HALVES[kind]
    data = rng.integers(0, 256, size=(*shape[:-1], shape[-1] // 256, size), dtype=np.uint8)
    for at, largest in halves:
        value = (rng.random(data.shape[:-1]) * largest).astype(np.float16)
        data[..., at : at + 2] = value[..., None].view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def encode(rng, kind, shape, scale=0.05):
    """(what add_tensor takes, float32 values as the gguf package reads them)"""
    if kind in HALVES:
        data = random_blocks(rng, kind, shape)
    else:
        data = gguf.quantize(rng.normal(size=shape).astype(np.float32) * scale, kind)
    return data, gguf.dequantize(data, kind).reshape(shape)


def permute(rows, heads):
    """llama.cpp's order of the rows of q and k, from transformers'."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


class Model:
    """values: name in the file -> float32, in the file's order of rows."""

    def __init__(self, arch, kinds, seed=1, tied=False):
        self.arch, self.kinds, self.rng = arch, kinds, np.random.default_rng(seed)
        self.values, self.data = {}, {}
        self.tensor("token_embd.weight", (VOCAB, HIDDEN), kinds.get("embed", Q.Q8_0))
        self.tensor("output_norm.weight", (HIDDEN,), Q.F32, ones=True)
        if not tied:
            self.tensor("output.weight", (VOCAB, HIDDEN), kinds.get("embed", Q.Q8_0))
        for layer in range(LAYERS):
            self.layer(f"blk.{layer}.")

    def tensor(self, name, shape, kind, ones=False):
        if kind == Q.F32:
            values = self.rng.normal(size=shape).astype(np.float32) * np.float32(0.05)
            values = values + np.float32(1) if ones else values
            self.data[name], self.values[name] = (values, None), values
        else:
            data, values = encode(self.rng, kind, shape)
            self.data[name], self.values[name] = (data, kind), values

    def layer(self, at):
        attention = self.kinds.get("attention", Q.Q8_0)
        for name, rows in (("attn_q", HEADS * DIM), ("attn_k", KV_HEADS * DIM), ("attn_v", KV_HEADS * DIM)):
            self.tensor(at + name + ".weight", (rows, HIDDEN), attention)
            if self.arch == "qwen2moe":
                self.tensor(at + name + ".bias", (rows,), Q.F32)
        self.tensor(at + "attn_output.weight", (HIDDEN, HEADS * DIM), attention)
        for name in ("attn_norm", "ffn_norm"):
            self.tensor(at + name + ".weight", (HIDDEN,), Q.F32, ones=True)
        if self.arch == "qwen3moe":
            for name in ("attn_q_norm", "attn_k_norm"):
                self.tensor(at + name + ".weight", (DIM,), Q.F32, ones=True)
        self.tensor(at + "ffn_gate_inp.weight", (EXPERTS, HIDDEN), Q.F32)
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            self.tensor(f"{at}ffn_{name}_exps.weight", (EXPERTS, *shape), self.kinds[name])
            if self.arch == "qwen2moe":
                self.tensor(f"{at}ffn_{name}_shexp.weight", shape, attention)
        if self.arch == "qwen2moe":
            self.tensor(at + "ffn_gate_inp_shexp.weight", (HIDDEN,), Q.F32)

    def write(self, path, split=0, without=(), more=()):
        writer = gguf.GGUFWriter(path, self.arch, split_max_tensors=split)
        writer.add_block_count(LAYERS)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        if self.arch != "llama":
            writer.add_expert_feed_forward_length(INNER)
        writer.add_token_list(["t%d" % i for i in range(VOCAB)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for key, value in more:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
        for name, (data, kind) in self.data.items():
            if name not in without:
                writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def checkpoint(self):
        """name of transformers -> float32, experts one by one"""
        found = {}
        for name, values in self.values.items():
            for key, value in self.renamed(name, values):
                found[key] = value
        return found

    def renamed(self, name, values):
        whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
                 "output.weight": "lm_head.weight"}
        if name in whole:
            yield whole[name], values
            return
        _, layer, rest = name.split(".", 2)
        at, mixtral = f"model.layers.{layer}.", self.arch == "llama"
        mlp = "block_sparse_moe" if mixtral else "mlp"
        projections = {"gate": "w1", "up": "w3", "down": "w2"}
        if rest.endswith("_exps.weight"):
            which = rest[4:-12]
            which = projections[which] if mixtral else which + "_proj"
            for expert in range(EXPERTS):
                yield f"{at}{mlp}.experts.{expert}.{which}.weight", values[expert]
            return
        if mixtral and rest in ("attn_q.weight", "attn_k.weight"):
            values = unpermute(values, HEADS if rest == "attn_q.weight" else KV_HEADS)
        if rest == "ffn_gate_inp_shexp.weight":
            values = values[None]
        for old, new in (("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm"),
                         ("attn_output", "self_attn.o_proj"), ("attn_norm", "input_layernorm"),
                         ("ffn_norm", "post_attention_layernorm"), ("attn_q", "self_attn.q_proj"),
                         ("attn_k", "self_attn.k_proj"), ("attn_v", "self_attn.v_proj"),
                         ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"), ("ffn_gate_inp", mlp + ".gate"),
                         ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"), ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
                         ("ffn_down_shexp", "mlp.shared_expert.down_proj")):
            if rest.split(".")[0] == old:
                yield f"{at}{new}.{rest.split('.')[1]}", values
                return
        raise KeyError(name)


def unpermute(rows, heads):
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
