# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, adapters and folders that are wrong in one place: each is refused in a line that names the file or the tensor, and
says what is expected. No Python package is needed."""

import fcntl
import json
import os
import shutil
import struct
import unittest

from support import MODEL, ROOT, Case, documents, read_tensors, save_tensors, save_tokens
from test_refused_formats import CONFIG, EXPERT, Fused, OneScale, Writer

UP = EXPERT.format(1, 2, "up_proj") + ".weight"
ATTENTION = "model.layers.1.self_attn.q_proj.weight"
HALVES = {"F32": struct.pack("<f", 0.01), "BF16": b"\x40\x3c", "F16": b"\x1f\x21"}


def values(dtype, *shape):
    count = 1
    for n in shape:
        count *= n
    return (dtype, list(shape), HALVES[dtype] * count)


class Tensors(Case):
    def setUp(self):
        super().setUp()
        self.data = self.path("train.safetensors")
        save_tokens(self.data, documents(8, 24, 256), tokenizer_vocab_size="256")
        self.m = self.path("m")

    def checkpoint(self, change=None, kind=Writer, hidden=128, intermediate=64, config=None):
        """A small one with one thing changed in its tensors, or in config.json."""
        shutil.rmtree(self.m, ignore_errors=True)
        kind(hidden, intermediate).write(self.m)
        if change:
            arrays = {name: tensor[1:] for name, tensor in read_tensors(self.m).items()}
            change(arrays)
            save_tensors(os.path.join(self.m, "model.safetensors"), arrays, {})
        if config:
            with open(os.path.join(self.m, "config.json"), "w", encoding="utf-8") as file:
                json.dump({**CONFIG, "hidden_size": hidden, "moe_intermediate_size": intermediate, **config}, file)

    def train(self, *more):
        return ["train", "--model", self.m, "--data", self.data, "--output-dir", self.out, "--overwrite", "--threads", 2, "--quiet",
                "--max-steps", 1, *more]  # fmt: skip

    def refuse(self, arguments, *parts, code=2, **options):
        line = self.bad(code, *arguments, **options)
        for part in parts:
            self.assertIn(part, line)

    def convert(self, weights, *parts, **options):
        self.refuse(["convert", self.m, self.path("new"), "--weights", weights, "--quiet"], *parts, **options)
        self.assertFalse(os.path.exists(self.path("new")))

    def test_dtypes_of_experts(self):
        self.checkpoint(lambda a: a.update({UP: values("F32", 64, 128)}))
        self.refuse(self.train(), UP + " is F32", "one dtype is expected")
        gate = UP.replace("up_proj", "gate_proj")
        self.checkpoint(lambda a: a.update({n: values("F32", *(a[n][1])) for n in list(a) if ".experts.2." in n and ".1." in n}))
        self.refuse(self.train(), gate + " is F32, the layer's first expert BF16", "one dtype is expected")
        fused = {}
        for layer in range(2):
            fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = values("BF16", 4, 128, 128)
            fused[f"model.layers.{layer}.mlp.experts.down_proj"] = values("F32", 4, 128, 64)
        self.checkpoint(lambda a: [a.pop(n) for n in list(a) if ".experts." in n] and a.update(fused))
        self.refuse(self.train(), "gate_up_proj is BF16", "down_proj is F32", "one dtype is expected")
        self.checkpoint(lambda a: a.update({ATTENTION: ("I64", [64, 128], bytes(8 * 64 * 128))}))
        self.refuse(self.train(), ATTENTION + " has dtype I64", "can be loaded")

    def test_masters(self):
        self.checkpoint(lambda a: a.update({ATTENTION: values("F32", 64, 128)}))
        self.refuse(self.train("--method", "full", "--masters", "bf16"), ATTENTION + " is F32", "masters f32 takes any")

    def test_a_model_without_routers(self):
        self.checkpoint(config={"mlp_only_layers": [0, 1]})
        self.refuse(["estimate", "--model", self.m, "--train-router", "--lora-target", "q_proj"], "train_router: this qwen3_moe model has no routers")

    def test_converting(self):
        self.checkpoint(lambda a: a.update({"extra.tensor": ("BF16", [1, 1, 1, 1, 1, 1, 1, 1, 1, 2], bytes(4))}))
        self.convert("int8", "tensor 'extra.tensor' has 10 dimensions")
        self.checkpoint(lambda a: a.update({"model." + "x" * 300 + ".mlp.experts.0.up_proj.weight": values("BF16", 64, 128)}))
        self.convert("int8", "is too long")
        odd = {f"model.layers.0.mlp.experts.gate_up_proj{end}": value for end, value in
               (("", ("F8_E4M3", [4, 127, 128], bytes(4 * 127 * 128))), ("_scale_inv", values("F32", 4, 1, 1)))}  # fmt: skip
        self.checkpoint(lambda a: a.update(odd), Fused)
        self.convert("int8", "gate_up_proj has 127 rows per expert")
        name = "model.layers.0.mlp.experts.0.up_proj.weight"
        self.checkpoint(lambda a: a.update({name + "_packed": ("I32", [64, 16], bytes(4 * 64 * 16))}), OneScale)
        self.convert("bf16", name, "in two formats")
        self.checkpoint(intermediate=60)
        self.convert("gptq", "60", "gptq takes rows by")

    def test_what_can_only_be_estimated(self):
        self.m = os.path.join(ROOT, "tests", "fixtures", "configs", "gpt-oss-120b")
        self.refuse(self.train(), "model_type 'gpt_oss' can be estimated, not opened")

    def test_scales(self):
        name = "model.layers.0.mlp.experts.0.up_proj.weight"
        self.checkpoint(lambda a: a.update({name + "_scale": ("F4", [1], bytes(4))}), OneScale)
        self.refuse(self.train(), name + "_scale has dtype F4, which no weight format has")

    def test_gptq(self):
        self.checkpoint(intermediate=128)
        self.good("convert", self.m, self.path("gptq"), "--weights", "gptq", "--quiet")
        path = self.path("gptq", "model.safetensors")
        arrays = {name: tensor[1:] for name, tensor in read_tensors(self.path("gptq")).items()}
        codes = next(name for name in arrays if name.endswith("up_proj.qweight"))
        index = codes.replace("qweight", "g_idx")
        save_tensors(path, {**arrays, index: ("I64", [128], bytes(8 * 128))}, {})
        self.m = self.path("gptq")
        self.refuse(self.train(), index + ": [128] of I32 is expected")

    def test_a_zero_point_that_gptq_lacks(self):
        self.checkpoint(intermediate=128)
        self.good("convert", self.m, self.path("awq"), "--weights", "awq", "--quiet")
        arrays = {name: tensor[1:] for name, tensor in read_tensors(self.path("awq")).items()}
        for name in arrays:
            if name.endswith("qzeros"):
                arrays[name] = (*arrays[name][:2], bytes(len(arrays[name][2])))
        save_tensors(self.path("awq", "model.safetensors"), arrays, {})
        self.m = self.path("awq")
        self.convert("gptq", "has the zero point 0; 1 to 16 can be stored")

    def test_what_formats_cannot_hold(self):
        """A zero point of GPTQ's that 4 bits cannot say; a weight whose scale F16 cannot."""
        self.checkpoint(intermediate=128)
        self.good("convert", self.m, self.path("gptq"), "--weights", "gptq", "--quiet")
        arrays = {name: tensor[1:] for name, tensor in read_tensors(self.path("gptq")).items()}
        for name in arrays:
            if name.endswith("qzeros"):
                arrays[name] = (*arrays[name][:2], bytes([0xFF]) * len(arrays[name][2]))
        save_tensors(self.path("gptq", "model.safetensors"), arrays, {})
        self.checkpoint(lambda a: a.update({UP: ("BF16", [128, 128], bytes([0x7F, 0x7F]) * 128 * 128)}), intermediate=128)
        self.convert("gptq", UP, "beyond F16")
        self.m = self.path("gptq")
        self.convert("int4", "has the zero point 16, beyond 4 bits")

    def test_values_beyond_a_dtype(self):
        """Finite ones that would become infinity: in another dtype, and by an adapter."""
        large = ("BF16", [64, 128], bytes([0x7F, 0x47]) * 64 * 128)  # 65280
        self.checkpoint(lambda a: a.update({UP: ("BF16", [64, 128], bytes([0x80, 0x47]) * 64 * 128)}))
        self.convert("f16", UP, "row 0, column 0 is 65536, beyond F16")
        self.checkpoint(lambda a: a.update({UP: ("F32", [64, 128], struct.pack("<f", -3.4e38) * 64 * 128)}))
        self.convert("bf16", UP, "row 0, column 0 is -3.4e+38, beyond BF16")
        self.checkpoint(lambda a: a.update({UP: large}))
        self.good("convert", self.m, self.path("f16"), "--weights", "f16", "--quiet")
        self.good(*self.train("--learning-rate", "10", "--warmup-ratio", 0, "--lora-alpha", "4000000"))
        self.m = self.path("f16")
        self.refuse(["merge", "--model", self.m, "--adapter", self.out, "--output-dir", self.path("new")], "gets the value", "beyond F16")
        self.assertFalse(os.path.exists(self.path("new")))

    def test_int8_with_zero_points(self):
        """compressed-tensors' asymmetric codes; zero points that are all 0 say nothing."""
        self.checkpoint()
        self.good("convert", self.m, self.path("int8"), "--weights", "int8", "--quiet")
        arrays = {name: tensor[1:] for name, tensor in read_tensors(self.path("int8")).items()}
        zero, rows = UP + "_zero_point", arrays[UP][1][0]
        self.m = self.path("int8")
        for last, good in ((0, True), (1, False)):
            save_tensors(self.path("int8", "model.safetensors"), {**arrays, zero: ("I8", [rows, 1], bytes(rows - 1) + bytes([last]))}, {})
            if good:
                self.good(*self.train())
            else:
                self.refuse(self.train(), zero, "int8 with zero points cannot be read")
                self.convert("bf16", zero, "int8 with zero points cannot be read")

    def test_packings_by_another_name(self):
        """Their tensors have the names and shapes of the known ones: config.json alone tells."""
        self.checkpoint(intermediate=128)
        plain = self.m
        for weights, key, packing in (("gptq", "checkpoint_format", "gptq_v2"), ("awq", "version", "gemv")):
            self.m = plain
            self.good("convert", self.m, self.path(weights), "--weights", weights, "--quiet")
            config = json.loads(self.read(weights, "config.json"))
            config["quantization_config"][key] = packing
            self.write(f"{weights}/config.json", json.dumps(config))
            self.m = self.path(weights)
            self.refuse(self.train(), f"{key} '{packing}' of {weights} cannot be read")
            self.convert("bf16", f"{key} '{packing}' of {weights} cannot be read")

    def test_too_many_experts(self):
        self.checkpoint(config={"num_experts": 60000})
        self.refuse(["estimate", "--model", self.m], "60000 experts; 1 to")

    def kt(self, change, *parts, flags=()):
        self.checkpoint(change)
        self.refuse(["convert", self.m, self.path("kt"), "--weights", "kt-int8", "--quiet", *flags], *parts)
        self.assertFalse(os.path.exists(self.path("kt")))

    def test_what_kt_files_cannot_hold(self):
        name, down = EXPERT.format(0, 1, "up_proj") + ".weight", EXPERT.format(1, 3, "down_proj") + ".weight"
        self.kt(None, "experts of 64 rows of gate cannot be cut into 3 parts", flags=["--kt-parts", 3])
        self.kt(None, "a part of gate would be [16, 128]; kt packs rows by 32", "fewer parts", flags=["--kt-parts", 4])
        self.kt(lambda a: a.pop(name), "layer 0: expert 1 has no up, or two")
        self.kt(lambda a: a.update({name: values("BF16", 32, 128)}), name, "kt's experts are of one size")
        self.kt(lambda a: [a.pop(EXPERT.format(1, 3, w) + ".weight") for w in ("gate_proj", "up_proj", "down_proj")], "layer 1 has fewer experts")
        self.kt(lambda a: a.update({down.replace("down_proj", "side_proj"): a[down]}), "is not gate, up or down of a layer's experts")
        self.kt(lambda a: a.update({name: ("BF16", [64, 128], bytes([0xC0, 0x7F]) * 64 * 128)}), "a weight is not finite")

    def test_folders_of_conversions(self):
        self.checkpoint()
        os.mkdir(self.path("here"))
        self.refuse(["convert", self.m, ".", "--weights", "int8"], "'.' is not the name of a folder to make", cwd=self.path("here"))
        partial = self.path("new.partial")
        os.mkdir(partial)
        held = os.open(partial, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        self.convert("int8", "new.partial: another process is converting into it")
        os.close(held)
        self.write("new.partial/convert.json", "{")
        self.convert("int8", f"remove {partial}", "convert.json")

    def test_tensors_twice(self):
        self.checkpoint()
        shutil.copy(os.path.join(self.m, "model.safetensors"), os.path.join(self.m, "model-2.safetensors"))
        os.rename(os.path.join(self.m, "model.safetensors"), os.path.join(self.m, "model-1.safetensors"))
        self.refuse(self.train(), "no model.safetensors.index.json")
        names = {f"name.{i}": f"model-{i}.safetensors" for i in range(20000)}
        self.write("m/model.safetensors.index.json", json.dumps({"weight_map": names}))
        self.refuse(self.train(), "model.safetensors.index.json: more than")

    def test_adapters(self):
        """Ranks that differ between layers, routers that an adapter lacks, and a base without what it changes."""
        self.checkpoint()
        arguments = ["--lora-rank", 4, "--learning-rate", "1e-3"]
        self.good(*self.train(*arguments, "--train-router", "--lora-target", "q_proj"))
        path = os.path.join(self.out, "adapter_model.safetensors")
        whole = {name: tensor[1:] for name, tensor in read_tensors(self.out).items() if tensor[0] == "adapter_model.safetensors"}
        router = next(name for name in whole if name.endswith("layers.1.mlp.gate.weight"))
        shutil.move(self.out, self.path("adapter"))
        path = self.path("adapter", "adapter_model.safetensors")
        save_tensors(path, {name: tensor for name, tensor in whole.items() if name != router}, {"format": "pt"})
        self.refuse(self.train("--adapter", self.path("adapter")), "the adapter has the weights of 1 routers, the model 2")
        thin = dict(whole)
        for name in whole:
            if "layers.1.self_attn.q_proj" in name:
                dtype, shape, data = whole[name]
                keep = [2, shape[1]] if "lora_A" in name else [shape[0], 2]
                thin[name] = (dtype, keep, data[: 4 * keep[0] * keep[1]])
        save_tensors(path, thin, {"format": "pt"})
        with open(self.path("adapter", "adapter_config.json"), encoding="utf-8") as file:
            config = json.load(file)
        config["rank_pattern"] = {"layers.1.self_attn.q_proj": 2}
        self.write("adapter/adapter_config.json", json.dumps(config))
        self.refuse(self.train("--adapter", self.path("adapter")), "the adapter's q_proj has rank 2 in layer 1", "one rank and alpha")

    def test_merging_into_less(self):
        self.checkpoint(kind=OneScale)
        self.good(*self.train("--lora-rank", 4))
        self.checkpoint(lambda a: [a.pop(UP + end) for end in ("", "_scale")], OneScale)
        self.refuse(["merge", "--model", self.m, "--adapter", self.out, "--output-dir", self.path("new")], UP, "the adapter changes it")

    def test_long_documents_and_large_batches(self):
        long = self.path("long.safetensors")
        save_tokens(long, documents(2, 600), cutoff_len="600")
        for flags, part in ((["--data", long], "a document has 600 tokens, the model has 512 positions"),
                            (["--data", self.tokens(), "--batch-size", 2000000000], "tokens are too large, at most"),):  # fmt: skip
            self.refuse(["train", "--model", MODEL, "--output-dir", self.out, "--quiet", "--threads", 2, *flags], part)

    def test_formats_that_keep_their_backward(self):
        self.checkpoint()
        self.refuse(self.train("--weights", "int8", "--backward-weights", "resident"), "the experts are int8", '"direct" is possible')
        self.refuse(self.train("--backward-weights", "resident"), "the ref kernels have no transposed copies", MOESAIC_ISA="ref")

    def test_settings_of_the_machine(self):
        self.checkpoint(kind=OneScale)
        self.refuse(self.train(), 'MOESAIC_COMPUTE is "fp4"; bf16, int16 or int8', MOESAIC_COMPUTE="fp4")
        result = self.run_tool("doctor", "--calibrate", "--quick", HOME="", XDG_CACHE_HOME="", MOESAIC_MACHINE="")  # it may warn of load
        self.assertEqual(result.returncode, 2)
        self.assertIn("set HOME, XDG_CACHE_HOME or MOESAIC_MACHINE", result.stderr)

    def test_resuming_with_other_data(self):
        self.good(*self.train_arguments("--max-steps", 3, "--save-steps", 1))
        other = self.tokens("other.safetensors", hash="1" * 64)
        arguments = [*self.train_arguments("--resume", "--max-steps", 4, data=other)]
        self.refuse(arguments, "made with other data (hash 0000000000000000...)", "--overwrite")
        self.refuse(self.train_arguments("--resume", "--max-steps", 1), "the checkpoint is of step 3, this run ends at step 1", "max_steps")


if __name__ == "__main__":
    unittest.main()
