# SPDX-License-Identifier: Apache-2.0
"""convert, merge, inspect: every error a user can reach, what is written, what a kill or a full disk leaves. No Python package is needed."""

import array
import json
import math
import os
import shutil
import signal
import struct
import subprocess
import time
import unittest

from support import MODEL, ROOT, TOOL, Case, environment, read_tensors, save_tensors

FAULT = os.environ.get("MOESAIC_FAULT")
FORMS = ("peft", "per-expert", "kt")


class Adapters(Case):
    def setUp(self):
        super().setUp()
        self.adapter = self.path("out")
        self.good(*self.train_arguments("--max-steps", 2, "--warmup-ratio", 0, "--learning-rate", 1e-2))
        self.arguments = {"m": MODEL, "a": self.adapter, "d": self.path()}

    def words(self, text):
        return [word.format(**self.arguments) for word in text.split()]

    def files_of(self, folder):
        return sorted(os.path.join(root, name) for root, _, names in os.walk(folder) for name in names)

    # ---- errors

    def spoil(self, name, **changes):
        """A copy of the adapter with other keys in its configuration."""
        shutil.copytree(self.adapter, self.path(name))
        path = self.path(name, "adapter_config.json")
        with open(path, encoding="utf-8") as file:
            config = {**json.load(file), **changes}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file)

    def other_model(self, name, **changes):
        shutil.copytree(MODEL, self.path(name))
        path = self.path(name, "config.json")
        with open(path, encoding="utf-8") as file:
            config = {**json.load(file), **changes}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file)

    def router_adapter(self, name, module="mlp.gate"):
        """What PEFT's all-linear also adapts: the router, of one layer here."""
        os.makedirs(self.path(name))
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 40, "target_modules": [], "target_parameters": ["layers.1.mlp.gate.weight"]}
        self.write(f"{name}/adapter_config.json", json.dumps(config))
        key = f"base_model.model.model.layers.1.{module}.lora_"
        a, b = (array.array("f", [(7 * i % 11 - 5) / 10 for i in range(n)]).tobytes() for n in (2 * 128, 8 * 2))
        tensors = {f"{key}A.weight": ("F32", [2, 128], a), f"{key}B.weight": ("F32", [8, 2], b)}
        save_tensors(self.path(name, "adapter_model.safetensors"), tensors, {"format": "pt"})

    def test_router(self):
        self.router_adapter("router")
        flags = ["eval", "--data", self.path("train.safetensors"), "--json", "--threads", 2, "--model"]
        base = json.loads(self.good(*flags, MODEL).stdout)["loss"]
        want = json.loads(self.good(*flags, MODEL, "--adapter", self.path("router")).stdout)["loss"]
        self.assertGreater(abs(want - base), 1e-4)
        self.good("merge", "--model", MODEL, "--adapter", self.path("router"), "--output-dir", self.path("merged"), "--quiet")
        before, after = read_tensors(MODEL), read_tensors(self.path("merged"))
        self.assertEqual({k for k in before if before[k] != after[k]}, {"model.layers.1.mlp.gate.weight"})
        for form in FORMS:
            self.good("convert", self.path("router"), self.path(form), "--adapter-format", form)
            got = json.loads(self.good(*flags, MODEL, "--adapter", self.path(form)).stdout)["loss"]
            self.assertEqual(got, want)
        self.out = self.path("continued")
        self.good(*self.train_arguments("--adapter", self.path("router"), "--max-steps", 2, "--warmup-ratio", 0,
                                        "--lora-rank", 2, "--learning-rate", 1e-2))  # fmt: skip
        found = json.loads(self.good("inspect", self.out, "--json").stdout)["targets"]
        self.assertEqual([(t["target"], t["layers"], t["rank"]) for t in found], [("gate", 1, 2)])
        before, after = read_tensors(self.path("router")), read_tensors(self.out)
        self.assertEqual(before.keys(), after.keys())
        for name in before:
            self.assertNotEqual(before[name][3], after[name][3])

    def test_trained_router(self):
        """Saved as PEFT's modules_to_save, used, merged, continued, resumed with the same bits."""
        self.out = self.path("whole")
        flags = ["--lora-target", "q_proj", "--warmup-ratio", 0, "--learning-rate", 1e-2]
        self.good(*self.train_arguments("--train-router", "--save-steps", 2, "--max-steps", 4, *flags))
        found = json.loads(self.good("inspect", self.out, "--json").stdout)
        self.assertEqual([(t["target"], t["layers"], t.get("weight"), t["params"]) for t in found["targets"]],
                         [("q_proj", 4, None, 4 * 4 * 256), ("gate", 4, True, 4 * 8 * 128)])  # fmt: skip
        self.assertEqual(json.loads(self.read("whole", "adapter_config.json"))["modules_to_save"], ["mlp.gate"])
        names = {f"model.layers.{i}.mlp.gate.weight" for i in range(4)}
        self.assertLessEqual({"base_model.model." + n for n in names}, read_tensors(self.out).keys())
        shutil.copytree(self.out, self.path("again"))
        shutil.rmtree(self.path("again", "checkpoint-4"))
        bits = self.read("whole", "adapter_model.safetensors")
        self.good("train", "--config", self.path("whole", "run.yaml"), "--output-dir", self.path("again"), "--resume", "--quiet")
        self.assertEqual(self.read("again", "adapter_model.safetensors"), bits)
        for form in FORMS:
            self.good("convert", self.out, self.path(form), "--adapter-format", form)
        eval_flags = ["eval", "--data", self.path("train.safetensors"), "--json", "--threads", 2, "--model", MODEL, "--adapter"]
        want = json.loads(self.good(*eval_flags, self.out).stdout)["loss"]
        for form in FORMS:
            self.assertEqual(json.loads(self.good(*eval_flags, self.path(form)).stdout)["loss"], want)
        self.good("merge", "--model", MODEL, "--adapter", self.out, "--output-dir", self.path("merged"), "--quiet")
        before, after = read_tensors(MODEL), read_tensors(self.path("merged"))
        changed = {k for k in before if before[k] != after[k]}
        self.assertEqual({k for k in changed if "gate" in k}, names)
        self.out = self.path("continued")
        result = self.good(*self.train_arguments("--adapter", self.path("whole"), "--max-steps", 2, "--warmup-ratio", 0, "--learning-rate", 1e-2))
        self.assertNotIn("frozen", result.stdout + result.stderr)
        first, then = read_tensors(self.path("whole")), read_tensors(self.out)
        self.assertEqual(first.keys(), then.keys())
        self.assertTrue(all(first[n][3] != then[n][3] for n in first))

    def test_all_linear(self):
        self.out = self.path("all")
        self.good(*self.train_arguments("--lora-target", "all-linear", "--max-steps", 2))
        found = {t["target"]: t for t in json.loads(self.good("inspect", self.out, "--json").stdout)["targets"]}
        self.assertEqual(set(found), {"q_proj", "k_proj", "v_proj", "o_proj", "experts", "gate"})
        self.assertEqual([found["experts"]["gate_up_rank"], found["experts"]["rank"]], [8, 4])

    def test_errors(self):
        self.router_adapter("shared", "mlp.shared_expert.up_proj")
        self.spoil("dora", use_dora=True)
        self.spoil("ranks", r=8)
        self.spoil("prefix", peft_type="PREFIX_TUNING")
        self.spoil("pattern", rank_pattern={"(?=q)": 3})
        self.other_model("wide", moe_intermediate_size=96)
        self.other_model("short", num_hidden_layers=2)
        self.other_model("strange", model_type="llama9")
        self.other_model("quantised")
        shard = self.path("quantised", "model-00001-of-00002.safetensors")
        with open(shard, "rb") as file:
            data = file.read()
        with open(shard, "wb") as file:  # of the same size, and of a dtype that cannot be merged into
            file.write(data.replace(b'"dtype":"BF16"', b'"dtype":"I16" '))
        os.makedirs(self.path("full"))
        self.write("full/mine", "")
        self.write("file", "")
        os.makedirs(self.path("nothing"))
        shutil.copytree(self.adapter, self.path("cut"))
        with open(self.path("cut", "adapter_model.safetensors"), "r+b") as file:
            file.truncate(3000)
        for command, parts in (
            ("convert", ["IN and OUT are expected, 0 given"]),
            ("convert {a}", ["IN and OUT", "1 given"]),
            ("convert {a} {d}/new", ["--adapter-format peft|per-expert|kt is missing"]),
            ("convert {a} {d}/new --adapter-format vllm", ["expected peft|per-expert|kt"]),
            ("convert {a} {d}/new --weights int8", ["is an adapter", "--adapter-format F for adapters"]),
            ("convert {d}/absent {d}/new --adapter-format kt", ["absent: no such folder"]),
            ("convert {d}/nothing {d}/new --adapter-format kt", ["nothing", "no adapter_config.json and no config.json"]),
            ("convert {m} {d}/new --adapter-format kt", ["is a model", "--weights F for models"]),
            ("convert {m} {d}/new", ["--weights int8|int4", "is missing"]),
            ("convert {m} {d}/new --weights int5", ["expected nearest|int8|int4"]),
            ("convert {m} {d}/full --weights int8", ["full: exists and is not empty"]),
            ("convert {m} {m}/new --weights int8", ["lies in the input's folder"]),
            ("convert {d}/dora {d}/new --adapter-format kt", ["dora", "use_dora is not implemented"]),
            ("convert {d}/ranks {d}/new --adapter-format kt", ["ranks", "rank 4", "configuration 8"]),
            ("convert {d}/prefix {d}/new --adapter-format kt", ["peft_type 'PREFIX_TUNING'"]),
            ("convert {d}/pattern {d}/new --adapter-format kt", ["rank_pattern", "'(?'"]),
            ("convert {d}/cut {d}/new --adapter-format kt", ["cut/adapter_model.safetensors", "truncated"]),
            ("convert {a} {d}/full --adapter-format kt", ["full: exists and is not empty", "another folder"]),
            ("convert {a} {d}/file --adapter-format kt", ["file: exists and is not a folder"]),
            ("convert {a} {d}/file/new --adapter-format kt", ["file", "Not a directory"]),
            ("convert {a} /proc/moesaic/new --adapter-format kt", ["/proc/moesaic"]),
            ("convert {a} {d}/new --adapter-format kt --model {d}/wide", ["wide", "8 of [96, 128]", "8 experts of gate and up [128, 128]"]),
            ("merge --adapter {a} --output-dir {d}/new", ["--model DIR is missing"]),
            ("merge --model {m} --output-dir {d}/new", ["--adapter DIR is missing"]),
            ("merge --model {m} --adapter {a}", ["--output-dir DIR is missing"]),
            ("merge --model {d}/absent --adapter {a} --output-dir {d}/new", ["absent: no such folder"]),
            ("merge --model {d}/nothing --adapter {a} --output-dir {d}/new", ["nothing/config.json"]),
            ("merge --model {d}/strange --adapter {a} --output-dir {d}/new", ["llama9"]),
            ("merge --model {m} --adapter {d}/absent --output-dir {d}/new", ["absent/adapter_config.json", "No such file"]),
            ("merge --model {d}/wide --adapter {a} --output-dir {d}/new", ["wide", "mlp.experts", "another base model", "qwen3moe"]),
            ("merge --model {d}/short --adapter {a} --output-dir {d}/new", ["layers.2", "2 layers", "another base model"]),
            ("merge --model {d}/quantised --adapter {a} --output-dir {d}/new", ["is I16", "can be merged", "bf16"]),
            ("merge --model {m} --adapter {a} --output-dir {d}/full", ["full: exists and is not empty"]),
            ("merge --model {m} --adapter {a} --output-dir {m}", ["the base model's folder"]),
            ("merge --model {m} --adapter {a} --output-dir {m}/a/b", ["the base model's folder"]),
            ("merge --model {m} --adapter {a} --output-dir {d}/new --weights int5", ["expected keep|bf16|int8"]),
            ("merge --model {m} --adapter {a} --output-dir {d}/new --max-shard-size much", ["is not a size"]),
            ("inspect", ["one FILE or DIR is expected, 0 given"]),
            ("inspect {a} {m}", ["2 given"]),
            ("inspect {d}/absent", ["absent: no such file or folder"]),
            ("inspect {d}/nothing", ["nothing: no model (config.json), adapter"]),
            ("inspect {d}/file", ["file", "neither a model, an adapter, a token file"]),
            ("inspect {d}/dora", ["use_dora"]),
            ("train --model {m} --data {d}/train.safetensors --adapter {d}/shared --output-dir {d}/new",
             ["shared_expert.up_proj", "no such matrix", "another base model"]),
            ("eval --model {d}/wide --adapter {a} --data {d}/train.safetensors", ["another base model"]),
            ("eval --model {m} --adapter {d}/cut --data {d}/train.safetensors", ["cut/adapter_model.safetensors"]),
        ):  # fmt: skip
            with self.subTest(command):
                line = self.bad(2, *self.words(command))
                for part in parts:
                    self.assertIn(part, line)
                self.assertFalse(os.path.exists(self.path("new")))
        self.assertEqual([n for n in os.listdir(self.path()) if "partial" in n], [])

    # ---- convert

    def test_every_form_gives_the_same_loss(self):
        data = self.path("train.safetensors")
        flags = ["eval", "--model", MODEL, "--data", data, "--json", "--threads", 2, "--adapter"]
        want = json.loads(self.good(*flags, self.adapter).stdout)["loss"]
        base = json.loads(self.good(*flags[:-1]).stdout)["loss"]
        self.assertGreater(abs(want - base), 1e-3)
        for form in FORMS:
            out = self.path(form)
            self.assertEqual(self.good("convert", self.adapter, out, "--adapter-format", form).stdout,
                             f"peft -> {form}: {out}\n")  # fmt: skip
            self.assertEqual(json.loads(self.good(*flags, out).stdout)["loss"], want)
            back = self.path(f"{form}-back")
            result = self.good("convert", out, back, "--adapter-format", "peft", "--model", MODEL, "--json")
            self.assertEqual(json.loads(result.stdout)["from"], form)
            self.assertEqual(read_tensors(back), read_tensors(self.adapter))

    def test_training_writes_every_form(self):
        for form in FORMS[1:]:
            self.out = self.path(f"trained-{form}")
            flags = ("--max-steps", 2, "--warmup-ratio", 0, "--learning-rate", 1e-2, "--adapter-format", form)
            self.good(*self.train_arguments(*flags))
            self.good("convert", self.out, self.path(f"{form}-peft"), "--adapter-format", "peft", "--quiet")
            self.assertEqual(read_tensors(self.path(f"{form}-peft")), read_tensors(self.adapter))
            self.assertEqual(json.loads(self.good("inspect", self.out, "--json").stdout)["form"], form)

    def test_targets_and_ranks(self):
        for flags, want in (
            (["--lora-target", "q_proj", "v_proj"], {"q_proj": 4, "v_proj": 4}),
            (["--lora-target", r".*layers\.[01]\.self_attn\.(k|o)_proj"], {"k_proj": 2, "o_proj": 2}),
            (["--lora-target", "experts", "--expert-lora-rank", 2], {"experts": 4}),
            (["--lora-target", "layers.3.mlp.experts.down_proj"], {"experts": 1}),
        ):
            with self.subTest(flags):
                self.out = self.path("targets")
                shutil.rmtree(self.out, ignore_errors=True)
                self.good(*self.train_arguments("--max-steps", 1, *flags))
                found = json.loads(self.good("inspect", self.out, "--json").stdout)["targets"]
                self.assertEqual({t["target"]: t["layers"] for t in found}, want)
                if "--expert-lora-rank" in flags:
                    self.assertEqual([found[0]["rank"], found[0]["gate_up_rank"]], [2, 2])

    # ---- merge

    def merge(self, *more, **options):
        return self.good("merge", "--model", MODEL, "--adapter", self.adapter, "--output-dir", self.path("merged"),
                         *more, **options)  # fmt: skip

    def test_bytes(self):
        result = json.loads(self.merge("--json").stdout)
        base, merged = read_tensors(MODEL), read_tensors(self.path("merged"))
        self.assertEqual({k: v[:3] for k, v in base.items()}, {k: v[:3] for k, v in merged.items()})
        adapted = {k for k in base if "_proj.weight" in k}
        differ = {k for k in base if base[k][3] != merged[k][3]}
        self.assertLessEqual(differ, adapted)
        self.assertGreater(len(differ), len(adapted) * 3 // 4)  # experts without a token have B = 0
        self.assertEqual(result["merged"], len(adapted))
        self.assertEqual(sorted(os.listdir(MODEL)), sorted(os.listdir(self.path("merged"))))
        for name in os.listdir(MODEL):
            if not name.endswith(".safetensors"):
                with open(os.path.join(MODEL, name), "rb") as file:
                    self.assertEqual(file.read(), self.read("merged", name))

    def test_merged_model_has_the_adapters_loss(self):
        self.merge("--quiet")
        flags = ["eval", "--data", self.path("train.safetensors"), "--json", "--threads", 2, "--model"]
        want = json.loads(self.good(*flags, MODEL, "--adapter", self.adapter).stdout)["loss"]
        base = json.loads(self.good(*flags, MODEL).stdout)["loss"]
        got = json.loads(self.good(*flags, self.path("merged")).stdout)["loss"]
        self.assertGreater(base - want, 0.5)
        # weights in bf16: how much of an update that loses differs with the bits of the training before
        self.assertLess(abs(got - want), 0.015 * (base - want))

    def test_other_files_and_links(self):
        model = self.model()
        os.makedirs(os.path.join(model, "extra"))
        self.write("model/extra/notes.txt", "hello")
        os.symlink(os.path.join(model, "extra", "notes.txt"), os.path.join(model, "link.txt"))
        os.symlink("nowhere", os.path.join(model, "dangling"))
        os.makedirs(os.path.join(model, ".git"))
        self.write("model/.git/config", "")
        self.good("merge", "--model", model, "--adapter", self.adapter, "--output-dir", self.path("merged"), "--quiet")
        self.assertEqual(self.read("merged", "extra", "notes.txt"), b"hello")
        self.assertEqual(self.read("merged", "link.txt"), b"hello")
        self.assertFalse(os.path.lexists(self.path("merged", ".git")))

    def test_shards(self):
        self.merge("--max-shard-size", "1MB", "--quiet")
        base, merged = read_tensors(MODEL), read_tensors(self.path("merged"))
        self.assertEqual({k: v[1:3] for k, v in base.items()}, {k: v[1:3] for k, v in merged.items()})
        index = json.loads(self.read("merged", "model.safetensors.index.json"))
        self.assertEqual(index["weight_map"], {k: v[0] for k, v in merged.items()})
        self.assertEqual(index["metadata"]["total_size"], sum(len(v[3]) for v in merged.values()))
        for name in set(index["weight_map"].values()):
            self.assertLess(os.path.getsize(self.path("merged", name)), 1_100_000)

    def big_model(self, vocab):
        """Zeros, sparse on disk: half of it embeddings, half experts of one fused tensor."""
        with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        config.update(vocab_size=vocab, num_hidden_layers=1, hidden_size=512, moe_intermediate_size=512, head_dim=32,
                      num_attention_heads=4, num_key_value_heads=2, num_experts=64)  # fmt: skip
        shapes = {"model.embed_tokens.weight": [vocab, 512], "lm_head.weight": [vocab, 512], "model.norm.weight": [512]}
        layer = {"self_attn.q_proj.weight": [128, 512], "self_attn.k_proj.weight": [64, 512], "self_attn.v_proj.weight": [64, 512],
                 "self_attn.o_proj.weight": [512, 128], "self_attn.q_norm.weight": [32], "self_attn.k_norm.weight": [32],
                 "mlp.gate.weight": [64, 512], "mlp.experts.gate_up_proj": [64, 1024, 512],
                 "mlp.experts.down_proj": [64, 512, 512], "input_layernorm.weight": [512],
                 "post_attention_layernorm.weight": [512]}  # fmt: skip
        shapes.update({f"model.layers.0.{name}": shape for name, shape in layer.items()})
        header, at = {}, 0
        for name, shape in shapes.items():
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * math.prod(shape)]}
            at += 2 * math.prod(shape)
        text = json.dumps(header).encode()
        os.makedirs(self.path("big"))
        self.write("big/config.json", json.dumps(config))
        with open(self.path("big", "model.safetensors"), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + at)
        return at

    def big_adapter(self):
        """An adapter of one layer's experts for it: zeros too."""
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [],
                  "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}  # fmt: skip
        shapes = {"base_layer.lora_A": [128, 512], "base_layer.lora_B": [1024, 128], "lora_A": [128, 512], "lora_B": [512, 128]}
        header, at = {}, 0
        for name, shape in shapes.items():
            key = f"base_model.model.model.layers.0.mlp.experts.{name}.weight"
            header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * math.prod(shape)]}
            at += 4 * math.prod(shape)
        text = json.dumps(header).encode()
        os.makedirs(self.path("small"))
        self.write("small/adapter_config.json", json.dumps(config))
        with open(self.path("small", "adapter_model.safetensors"), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + bytes(at))

    def start_big(self, vocab=60000):
        self.big_model(vocab)
        self.big_adapter()
        return [TOOL, "merge", "--model", self.path("big"), "--adapter", self.path("small"), "--output-dir", self.path("merged")]

    def test_memory_is_bounded(self):
        command = self.start_big()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(process.returncode, 0)
        size = os.path.getsize(self.path("big", "model.safetensors"))
        self.assertGreater(size, 200 << 20)
        self.assertLess(usage.ru_maxrss, 80 << 10)  # KiB; with StarPU's library in it

    def test_kill_leaves_nothing_under_a_final_name(self):
        command = self.start_big()
        for delay in (0.05, 0.15, 0.4):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment())
            end = time.monotonic() + 30
            while time.monotonic() < end and not any("partial" in n for n in os.listdir(self.path())):
                time.sleep(0.005)
            time.sleep(delay)
            process.kill()
            finished = process.wait() == 0
            self.assertEqual(os.path.exists(self.path("merged")), finished)
            shutil.rmtree(self.path("merged"), ignore_errors=True)
        self.assertEqual(subprocess.run(command, stdout=subprocess.DEVNULL, env=environment()).returncode, 0)
        self.assertEqual([n for n in os.listdir(self.path()) if "partial" in n], [])  # of killed ones too

    def test_signal_stops_and_removes(self):
        command = self.start_big(120000)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
        end = time.monotonic() + 30
        while time.monotonic() < end and not any("partial" in n for n in os.listdir(self.path())):
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
        if process.returncode == 0:
            self.skipTest("it was done before the signal came")
        self.assertEqual(process.returncode, 130, error)
        self.assertIn("interrupted", error)
        self.assertEqual([n for n in os.listdir(self.path()) if "partial" in n or n == "merged"], [])

    @unittest.skipUnless(FAULT, "no MOESAIC_FAULT")
    def test_faults(self):
        """A write, open, rename or allocation that fails: one line, nothing under a final name, nothing left beside it."""
        for command, out in (
            (self.words("merge --model {m} --adapter {a} --output-dir {d}/merged --max-shard-size 2MB --quiet"), "merged"),
            (self.words("convert {a} {d}/converted --adapter-format per-expert --quiet"), "converted"),
        ):
            for kind in ("write", "rename", "alloc", "open"):
                for n in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233):
                    with self.subTest(f"{out} {kind}:{n}"):
                        shutil.rmtree(self.path(out), ignore_errors=True)
                        env = {**environment(), "FAULT": f"{kind}:{n}", "FAULT_REPORT": self.path("reached")}
                        result = subprocess.run([FAULT, *command], capture_output=True, text=True, env=env, timeout=120)
                        self.assertIn(result.returncode, (0, 2, 3), result.stderr)
                        if result.returncode:
                            self.assertEqual(len(result.stderr.strip().split("\n")), 1, result.stderr)
                            self.assertFalse(os.path.exists(self.path(out)), result.stderr)
                        self.assertEqual([x for x in os.listdir(self.path()) if "partial" in x], [])

    # ---- inspect

    def inspect(self, path):
        text = self.good("inspect", path).stdout
        values = json.loads(self.good("inspect", path, "--json").stdout)
        self.assertIn(values["kind"], text)
        return values

    def test_inspect(self):
        values = self.inspect(MODEL)
        self.assertEqual([values[k] for k in ("kind", "arch", "layers", "experts", "tensors", "experts_stored")],
                         ["model", "qwen3_moe", 4, 8, 135, "one by one"])  # fmt: skip
        self.assertEqual(values["params"], 2299264)
        self.assertEqual(values["bytes"], 2 * values["params"])
        values = self.inspect(os.path.join(ROOT, "tests", "fixtures", "configs", "qwen3-30b-a3b"))
        self.assertEqual([values["kind"], values["files"]], ["model", 0])
        values = self.inspect(os.path.join(MODEL, "config.json"))
        self.assertEqual(values["arch"], "qwen3_moe")
        values = self.inspect(self.path("train.safetensors"))
        self.assertEqual([values[k] for k in ("kind", "documents", "tokens")], ["tokens", 16, 16 * 24])
        values = self.inspect(os.path.join(MODEL, "model-00001-of-00002.safetensors"))
        self.assertEqual(values["kind"], "tensors")
        self.assertEqual(len(values["list"]), values["tensors"])

    def test_inspect_what_training_writes(self):
        self.out = self.path("run")
        self.good(*self.train_arguments("--max-steps", 2, "--save-steps", 1, "--trace", self.path("t.mxt")))
        values = self.inspect(self.out)
        self.assertEqual([values[k] for k in ("kind", "form", "rank", "base_model")], ["adapter", "peft", 4, MODEL])
        self.assertEqual(sorted(values["checkpoints"]), [1, 2])
        self.assertEqual({t["target"] for t in values["targets"]}, {"q_proj", "k_proj", "v_proj", "o_proj", "experts"})
        self.assertEqual(sum(t["params"] for t in values["targets"]), values["params"])
        values = self.inspect(os.path.join(self.out, "checkpoint-2"))
        self.assertEqual([values[k] for k in ("kind", "step", "adapter")], ["state", 2, True])
        values = self.inspect(self.path("t.mxt"))
        self.assertEqual([values["kind"], values["ended_in_order"], values["workers"]], ["trace", True, "2"])
        self.assertEqual(values["run"]["command"], "train")
        self.assertGreater(values["tasks"], 100)


if __name__ == "__main__":
    unittest.main()
