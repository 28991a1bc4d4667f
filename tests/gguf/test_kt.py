# SPDX-License-Identifier: Apache-2.0
"""kt-kernel's weight folders, written here in its order of bytes: beside the same codes in a plain quantised checkpoint."""

import json
import os
import shutil
import unittest

import numpy as np
from files import EXPERTS, HIDDEN, INNER, LAYERS, Q, VOCAB, Model
from support import read_tensors, save_tensors, save_tokens
from test_gguf import Case

COLUMN_BLOCK = 3584


def pack(codes, bits):
    """Bytes of codes [n, k] as kt has them: blocks of rows, of columns, of 32 rows, of a step; 16 rows of 4 bytes in turn."""
    n, k = codes.shape
    rows, step, out = (64, 64, []) if bits == 8 else (128, 128, [])
    for n0 in range(0, n, rows):
        for k0 in range(0, k, COLUMN_BLOCK):
            block = codes[n0 : n0 + rows, k0 : k0 + COLUMN_BLOCK]
            for r in range(0, block.shape[0], 32):
                for c in range(0, block.shape[1], step):
                    piece = block[r : r + 32, c : c + step]
                    data = piece.astype(np.uint8) if bits == 8 else piece[:, :64] & 15 | (piece[:, 64:] & 15) << 4
                    for tile in data.astype(np.uint8).reshape(2, 16, 16, 4):
                        out.append(np.ascontiguousarray(tile.swapaxes(0, 1)).tobytes())
    return b"".join(out)


class Weights:
    """codes, scales: (layer, expert, which) -> int [n, k], float32 [n, parts of the columns]"""

    def __init__(self, bits, parts, seed=3):
        rng = np.random.default_rng(seed)
        self.bits, self.parts, self.codes, self.scales = bits, parts, {}, {}
        largest = 127 if bits == 8 else 7
        for key in [(i, e, w) for i in range(LAYERS) for e in range(EXPERTS) for w in ("gate", "up", "down")]:
            n, k, groups = (HIDDEN, INNER, parts) if key[2] == "down" else (INNER, HIDDEN, 1)
            self.codes[key] = rng.integers(-largest, largest + 1, (n, k))
            self.scales[key] = (rng.random((n, groups)) * 0.1 / largest).astype(np.float32)

    def part(self, key, p):
        codes, scales = self.codes[key], self.scales[key]
        if key[2] == "down":
            width = INNER // self.parts
            return codes[:, p * width : (p + 1) * width], scales[:, p]
        height = INNER // self.parts
        return codes[p * height : (p + 1) * height], scales[p * height : (p + 1) * height, 0]

    def stored_scale(self, scale):
        return (scale if self.bits == 8 else scale / np.float32(16)).astype(np.float32).tobytes()

    def each_part(self):
        for key in self.codes:
            for p in range(self.parts):
                codes, scale = self.part(key, p)
                yield key, p, pack(codes, self.bits), self.stored_scale(scale)

    def write_files(self, folder, name=None):
        for (layer, expert, which), p, codes, scale in self.each_part():
            at = os.path.join(folder, f"_layer_{layer}", f"_numa_{p}")
            os.makedirs(at, exist_ok=True)
            for kind, data in (("quant", codes), ("scale", scale)):
                file = f"{name or f'INT{self.bits}'}_{which}_{expert}_{len(data)}Byte_{kind}_.kt"
                with open(os.path.join(at, file), "wb") as out:
                    out.write(data)

    def write_tensors(self, folder, without=(), backward=False, plain=None):
        """plain: the other tensors of that checkpoint too, under kt-kernel's names, in files without an index."""
        os.makedirs(folder)
        arrays = {}
        for name, tensor in read_tensors(plain).items() if plain else ():
            if ".experts." not in name:
                arrays[name.replace("model.layers.", "blk.").replace("model.", "")] = tensor[1:]
        for (layer, expert, which), p, codes, scale in self.each_part():
            at = f"blk.{layer}.ffn_{which}_exps.{expert}.numa.{p}."
            arrays[at + "weight"] = ("I8", [len(codes)], codes)
            arrays[at + "scale"] = ("F32", [len(scale) // 4], scale)
            if backward:
                arrays[at.replace("_exps", "_bwd_exps") + "weight"] = ("I8", [64], bytes(64))
        for name in without:
            del arrays[name]
        if not plain:
            save_tensors(os.path.join(folder, "model.safetensors"), arrays, {})
            return
        shutil.copy(os.path.join(plain, "config.json"), folder)
        names = list(arrays)
        for i in range(2):
            save_tensors(os.path.join(folder, f"model-{i + 1:05d}.safetensors"), {n: arrays[n] for n in names[i::2]}, {})

    def checkpoint(self, plain, folder):
        """A folder like `plain` whose experts are these codes, as compressed-tensors has them."""
        arrays = {n: t[1:] for n, t in read_tensors(plain).items() if ".experts." not in n}
        for (layer, expert, which), codes in self.codes.items():
            at = f"model.layers.{layer}.mlp.experts.{expert}.{which}_proj."
            scale = self.scales[layer, expert, which]
            if self.bits == 8:
                arrays[at + "weight"] = ("I8", list(codes.shape), codes.astype(np.int8).tobytes())
            else:
                words = ((codes + 8).astype(np.uint32).reshape(codes.shape[0], -1, 8) << 4 * np.arange(8, dtype=np.uint32)).sum(2)
                arrays[at + "weight_packed"] = ("I32", list(words.shape), words.astype(np.uint32).tobytes())
            arrays[at + "weight_scale"] = ("F32", list(scale.shape), scale.tobytes())
        os.makedirs(folder)
        shutil.copy(os.path.join(plain, "config.json"), folder)
        save_tensors(os.path.join(folder, "model.safetensors"), arrays, {"format": "pt"})


class KtCase(Case):
    def setUp(self):
        super().setUp()
        kinds = {"embed": Q.BF16, "attention": Q.BF16, "gate": Q.BF16, "up": Q.BF16, "down": Q.BF16}
        Model("qwen3moe", kinds).write(self.path("m.gguf"))
        self.run_tool("convert", self.path("m.gguf"), self.path("plain"), "--weights", "f32", "--quiet")
        save_tokens(self.path("t.safetensors"), [[(i * i + s) % VOCAB for i in range(40)] for s in range(4)],
                    tokenizer_vocab_size=str(VOCAB))  # fmt: skip

    def loss(self, model, *args, code=0):
        said = self.run_tool("eval", "--model", self.path(model), "--data", self.path("t.safetensors"), "--json", *args,
                             code=code)
        return json.loads(said)["loss"] if code == 0 else said


class Load(KtCase):
    def check(self, bits, parts, write):
        weights = Weights(bits, parts)
        weights.checkpoint(self.path("plain"), self.path("same"))
        write(weights, self.path("kt"))
        plain, same = self.loss("plain"), self.loss("same")
        self.assertNotEqual(plain, same)
        for numa in ("1", "2", "3"):  # kt's parts are not ours
            self.assertEqual(self.loss("plain", "--kt-weights", self.path("kt"), "--numa", numa),
                             self.loss("same", "--numa", numa), (bits, parts, numa))  # fmt: skip
        shutil.rmtree(self.path("kt"))
        shutil.rmtree(self.path("same"))

    def test_files(self):
        for bits, parts in ((8, 1), (8, 2), (8, 4), (4, 1), (4, 2)):
            self.check(bits, parts, Weights.write_files)

    def test_tensors(self):
        for bits, parts in ((8, 2), (4, 2)):
            self.check(bits, parts, Weights.write_tensors)

    def test_files_are_looked_for_first(self):
        files, tensors = Weights(8, 2, seed=1), Weights(8, 2, seed=2)
        tensors.write_tensors(self.path("kt"), backward=True)
        files.checkpoint(self.path("plain"), self.path("same"))
        files.write_files(self.path("kt"))
        self.assertEqual(self.loss("plain", "--kt-weights", self.path("kt")), self.loss("same"))

    def test_training_and_the_name_in_configs(self):
        Weights(8, 2).write_files(self.path("kt"))
        with open(self.path("run.yaml"), "w", encoding="utf-8") as file:
            file.write(f"model: {self.path('plain')}\nkt_config: {{kt_weight_path: {self.path('kt')}}}\n"
                       f"output_dir: {self.path('out')}\ndata: [{self.path('t.safetensors')}]\nmax_steps: 3\n")  # fmt: skip
        self.run_tool("train", "--config", self.path("run.yaml"), "--quiet")
        self.assertTrue(os.path.exists(self.path("out/adapter_model.safetensors")))


class Converting(KtCase):
    def convert(self, *args, code=0):
        said = self.run_tool("convert", *args, "--json", code=code)
        return json.loads(said) if code == 0 else said

    def test_what_training_reads_is_written(self):
        for bits, parts in ((8, 2), (4, 2), (8, 1)):
            weights = Weights(bits, parts)
            weights.write_files(self.path("kt"))
            said = self.convert(self.path("plain"), self.path("out"), "--kt-weights", self.path("kt"))
            self.assertEqual((said["weights"], said["error"], said["kept"]), ("nearest", 0, 3 * LAYERS * EXPERTS))
            self.assertEqual(self.loss("out"), self.loss("plain", "--kt-weights", self.path("kt")))
            said = self.convert(self.path("plain"), self.path("bf16"), "--kt-weights", self.path("kt"), "--weights", "bf16")
            self.assertGreater(said["error"], 0)
            self.assertLess(said["error"], 3e-3)
            for folder in ("kt", "out", "bf16"):
                shutil.rmtree(self.path(folder))

    def test_experts_of_the_model_are_left_out(self):
        """Quantised ones have scales, fused ones other names: nothing of them may stay."""
        Weights(8, 2).write_files(self.path("kt"))
        want = self.loss("plain", "--kt-weights", self.path("kt"))
        for kind in ("fp8", "mxfp4"):
            self.run_tool("convert", self.path("plain"), self.path(kind), "--weights", kind, "--layers", "experts", "--quiet")
            self.convert(self.path(kind), self.path("out"), "--kt-weights", self.path("kt"))
            names = [n for n in read_tensors(self.path("out")) if ".experts." in n]
            self.assertEqual(len(names), 2 * 3 * LAYERS * EXPERTS)
            self.assertEqual(self.loss("out"), want)
            self.assertEqual(self.loss(kind, "--kt-weights", self.path("kt")), want)
            shutil.rmtree(self.path("out"))

    def test_merged_folder_is_a_checkpoint(self):
        for bits in (8, 4):
            weights = Weights(bits, 2)
            weights.write_tensors(self.path("kt"), plain=self.path("plain"))
            want = self.loss("plain", "--kt-weights", self.path("kt"))
            self.assertEqual(self.loss("kt"), want)
            self.convert(self.path("kt"), self.path("out"), "--weights", "nearest")
            self.assertEqual(self.loss("out"), want)
            for folder in ("kt", "out"):
                shutil.rmtree(self.path(folder))

    def test_other_files_start_anew(self):
        """A part of another folder's conversion is not gone on with."""
        weights = Weights(8, 2)
        weights.write_files(self.path("kt"))
        os.makedirs(self.path("out.partial"))
        with open(self.path("out.partial/convert.json"), "w", encoding="utf-8") as file:
            json.dump({"format": "moesaic-convert-1", "weights": "nearest", "note": "experts of elsewhere"}, file)
        self.assertIn("out.partial", self.convert(self.path("plain"), self.path("out"), "--kt-weights", self.path("kt"), code=2))

    def test_refused(self):
        Weights(8, 2).write_files(self.path("kt"))
        said = self.convert(self.path("kt"), self.path("out"), "--weights", "int8", code=2)
        self.assertIn("--kt-weights", said)
        shutil.copy(self.path("plain/config.json"), self.path("kt"))
        said = self.convert(self.path("kt"), self.path("out"), "--weights", "int8", code=2)
        self.assertIn("has no model in it", said)
        said = self.convert(self.path("plain"), self.path("out"), "--weights", "nearest", code=2)
        self.assertIn("GGUF and kt's files", said)
        os.remove(self.path(f"kt/_layer_0/_numa_1/INT8_up_2_{INNER * 2}Byte_scale_.kt"))
        said = self.convert(self.path("plain"), self.path("out"), "--kt-weights", self.path("kt"), code=2)
        self.assertIn("INT8_up_2", said)
        self.assertFalse(os.path.exists(self.path("out")))


class Inspecting(KtCase):
    def inspect(self, folder, *args):
        return json.loads(self.run_tool("inspect", self.path(folder), "--json", *args))

    def check(self, said, weights, base_error):
        bits, parts = weights.bits, weights.parts
        rows = said["quantised"]
        self.assertEqual(sum(r["matrices"] for r in rows), 3 * LAYERS * EXPERTS)
        for row in rows:
            self.assertEqual((row["format"], row["of"], row["scale"]), (f"int{bits}", "experts", "F32"))
        codes = 3 * LAYERS * EXPERTS * HIDDEN * INNER * bits // 8
        scales = 4 * LAYERS * EXPERTS * (2 * INNER + HIDDEN * parts)
        self.assertEqual(sum(r["bytes"] for r in rows), codes + scales)
        values = np.concatenate([(weights.codes[k] * np.repeat(s, weights.codes[k].shape[1] // s.shape[1], 1)).ravel()
                                 for k, s in weights.scales.items()])  # fmt: skip
        self.assertAlmostEqual(max(r["largest"] for r in rows), values.max(), places=5)
        self.assertAlmostEqual(min(r["least"] for r in rows), values.min(), places=5)
        for row in rows:
            self.assertEqual(row["compared"], row["matrices"])
            self.assertLess(abs(row["error"] - base_error), 1e-6)

    def test_files(self):
        for bits, parts in ((8, 2), (4, 1)):
            weights = Weights(bits, parts)
            weights.write_files(self.path("kt"))
            self.run_tool("convert", self.path("plain"), self.path("f32"), "--kt-weights", self.path("kt"), "--weights", "f32",
                          "--quiet")  # fmt: skip
            said = self.inspect("kt", "--values", "--base", self.path("f32"))
            self.assertEqual((said["kind"], said["files"]), ("tensors", LAYERS))
            self.check(said, weights, 0)
            self.assertEqual(said["bytes"], sum(r["bytes"] for r in said["quantised"]))
            on_disk = sum(os.path.getsize(os.path.join(at, f)) for at, _, names in os.walk(self.path("kt")) for f in names)
            self.assertEqual(said["bytes"], on_disk)
            self.assertIn("int", self.run_tool("inspect", self.path("kt")))
            for folder in ("kt", "f32"):
                shutil.rmtree(self.path(folder))

    def test_merged(self):
        weights = Weights(8, 2)
        weights.write_tensors(self.path("kt"), plain=self.path("plain"))
        self.run_tool("convert", self.path("kt"), self.path("f32"), "--weights", "f32", "--quiet")
        said = self.inspect("kt", "--values", "--base", self.path("f32"))
        self.assertEqual((said["kind"], said["experts_stored"]), ("model", "one by one"))
        self.check(said, weights, 0)

    def test_damaged(self):
        Weights(8, 2).write_files(self.path("kt"))
        os.remove(self.path(f"kt/_layer_1/_numa_0/INT8_gate_0_{INNER * 2}Byte_scale_.kt"))
        self.assertIn("_layer_1", self.run_tool("inspect", self.path("kt"), code=2))


class Refused(KtCase):
    def refuse(self, *texts):
        said = self.loss("plain", "--kt-weights", self.path("kt"), code=2)
        for text in texts:
            self.assertIn(text, said)

    def test_what_is_wrong_with_files(self):
        Weights(8, 2).write_files(self.path("kt"))
        at = self.path("kt/_layer_1/_numa_1")
        scale = os.path.join(at, f"INT8_down_3_{HIDDEN * 4}Byte_scale_.kt")
        with open(scale, "rb") as file:
            kept = file.read()
        with open(scale, "wb") as file:
            file.write(kept[:-4])
        self.refuse(scale, f"has {HIDDEN * 4 - 4} bytes; {HIDDEN * 4} are expected")
        os.remove(scale)
        self.refuse(scale, "is missing")
        with open(scale, "wb") as file:
            file.write(b"\xff" * len(kept))
        self.refuse("model.layers.1.mlp.experts.3.down_proj.weight")
        shutil.rmtree(at)
        self.refuse("is missing")  # files of half the size
        shutil.rmtree(self.path("kt/_layer_1"))
        self.refuse("no _layer_1/_numa_0/*.kt")
        shutil.rmtree(self.path("kt"))
        self.refuse("no such folder")
        Weights(4, 2).write_files(self.path("kt"), name="INT4_1")
        self.refuse("only files INT8_... and INT4_... can be read")

    def test_what_is_wrong_with_tensors(self):
        name = "blk.1.ffn_up_exps.2.numa.1.scale"
        Weights(8, 2).write_tensors(self.path("kt"), without=[name])
        self.refuse(name, "is missing")
        shutil.rmtree(self.path("kt"))
        Weights(8, 2).write_tensors(self.path("kt"))
        path = self.path("kt/model.safetensors")
        with open(path, "rb") as file:
            data = file.read()
        with open(path, "wb") as file:
            file.write(data.replace(b'"F32"', b'"I32"', 1))
        self.refuse("bytes of F32 are expected")

    def test_parts_that_do_not_fit(self):
        Weights(8, 2).write_files(self.path("kt"))
        shutil.copytree(self.path("kt/_layer_1/_numa_1"), self.path("kt/_layer_1/_numa_2"))
        self.refuse("layer 1 has 3 NUMA parts, which do not divide the 512 rows of gate")
        for part in range(3, 32):
            shutil.copytree(self.path("kt/_layer_1/_numa_1"), self.path(f"kt/_layer_1/_numa_{part}"))
        self.refuse("a part of gate is [16, 256]; kt packs rows by 32")

    def test_a_layer_without_tensors(self):
        Weights(8, 2).write_tensors(self.path("kt"), without=["blk.1.ffn_up_exps.0.numa.0.weight"])
        self.refuse("and its safetensors no blk.1.ffn_up_exps.0.numa.0.weight")

    def test_a_tensor_in_two_files(self):
        Weights(8, 2).write_tensors(self.path("kt"), plain=self.path("plain"))
        shutil.copy(self.path("kt/model-00001.safetensors"), self.path("kt/model-00003.safetensors"))
        self.assertIn("is also in " + self.path("kt/model-00001.safetensors"), self.run_tool("inspect", self.path("kt"), code=2))
        arrays = {"model.norm.weight": ("F32", [4], bytes(16))}
        save_tensors(self.path("kt/model-00003.safetensors"), arrays, {})
        self.assertIn("two tensors would be 'model.norm.weight'", self.run_tool("inspect", self.path("kt"), code=2))

    def test_inspecting(self):
        names = {"blk.99999.ffn_gate_exps.0.numa.0.weight": "blk.99999.ffn_gate_exps.0.numa.0.weight: at most",
                 "blk.0.ffn_gate_exps.0.numa.0.weight": "layer 0 has no sizes of gate and down of its first expert"}  # fmt: skip
        for name, said in names.items():
            os.makedirs(self.path("kt"), exist_ok=True)
            save_tensors(self.path("kt/model.safetensors"), {name: ("I8", [64], bytes(64))}, {})
            self.assertIn(said, self.run_tool("inspect", self.path("kt"), code=2))


if __name__ == "__main__":
    unittest.main()
