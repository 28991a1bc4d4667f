# SPDX-License-Identifier: Apache-2.0
"""Every error line of the command in one table: its exit code, where it is (file, key, flag), and what to do. Each text in
tools/moesaic that can fail a command must be met by a row, or stand in BEYOND with a reason."""

import glob
import json
import os
import re
import shutil
import unittest

from support import MODEL, ROOT, TOOL, Case, environment, save_tensors, subprocess

# {d}: a folder of the test's own with the files below; {m}: the tiny checkpoint; {t}: a token file.
FILES = {
    "empty": "",
    "rows.jsonl": '{"text": "a hack"}\n',
    "broken.jsonl": '{"text": "a"}\n{"text": \n',
    "odd.jsonl": '{"question": "a"}\n',
    "chat.jsonl": '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n',
    "unknown.yaml": "lora_rnak: 3\n",
    "strange.yaml": "qqqqqqqqqqqqqqqqqqqqqqqq: 3\n",
    "syntax.yaml": "a: [\n",
    "deep.yaml": "data: {a: {b: {c: {d: {e: 1}}}}}\n",
    "nested.yaml": "data: [[a]]\n",
    "twice.yaml": "lora_rank: 1\nlora_rank: 2\n",
    "list.yaml": "- a\n",
    "two.yaml": "lora_rank: 1\n---\nlora_rank: 2\n",
    "broken.yaml": "lora_rank: 1\n--- [\n",
    "many.yaml": "lora_rank: [1, 2]\n",
    "none.yaml": "data: []\n",
    "both.yaml": "batch_size: 2\nbatch_tokens: 64\n",
    "dpo.yaml": "stage: dpo\n",
    "syntax.json": '{"lora_rank": 3',
    "dataset_info.json": json.dumps(
        {
            "identity": {"file_name": "rows.jsonl"},
            "remote": {"hf_hub_url": "x/y"},
            "pairs": {"file_name": "rows.jsonl", "ranking": True},
            "tagged": {"file_name": "rows.jsonl", "tags": {"role_tag": "speaker"}},
            "sampled": {"file_name": "rows.jsonl", "num_samples": 3},
        }
    ),
    "bad/dataset_info.json": "[]",
    "tool/config.json": "{",
    "nothing/readme.txt": "",
    "done/adapter_config.json": "{}",
    "quantised.yaml": "lora_rank: 4\n\nquantization_bit: 4\n",
    "split.yaml": "val_size: -1\n",
    "wrong/config.json": '{"model_type": "llama9"}',
}
TRAIN = "train --model {m} --data {t} --output-dir {d}/out"
EARLY = "train --model {m} --data {d}/absent.jsonl --output-dir {d}/out"
DATA = "data --model {m} --data"

# arguments; exit code; parts of the line (environment variables stand in front as NAME=VALUE)
ROWS = [
    # flags
    ("trian", 2, "unknown command 'trian'", "did you mean 'train'?"),
    ("chat", 2, "unknown command 'chat'", "did you mean 'generate'?"),
    ("export", 2, "did you mean 'merge'?"),
    ("train --model Qwen/Qwen3-30B-A3B --data {t} --output-dir {d}/out", 2, "no such folder", "hf download"),
    ("estimate --model Qwen3-30B-A3B", 2, "no such folder or config.json", "hf download"),
    ("train --model {m} --data {d}/absent.jsonl --output-dir {m}", 2, "is the base model's folder"),
    ("qqqqqqqqqqqq", 2, "unknown command", "moesaic --help"),
    ("--frobnicate", 2, "unknown flag --frobnicate", "moesaic --help"),
    ("--completion tcsh", 2, "--completion tcsh", "bash or zsh"),
    ("train --lora-rnak 3", 2, "--lora-rnak", "did you mean --lora-rank?"),
    ("train --qqqqqqqqqqqqqqqqqqqq", 2, "--help-all lists them"),
    ("train --lora-rank", 2, "--lora-rank needs a value", "(N)"),
    ("train stray", 2, "unexpected argument 'stray'"),
    ("train", 2, "--model DIR is missing"),
    ("train --model {m} --data {t}", 2, "--output-dir DIR is missing"),
    ("train --model {m} --output-dir {d}/out", 2, "--data FILE... is missing"),
    ("train --lora-rank 0", 2, "--lora-rank 0: must be at least 1"),
    ("train --warmup-ratio 2", 2, "--warmup-ratio 2: must be at most 1"),
    (TRAIN + " --lr-scheduler-kwargs power=2", 2, "cosine takes key=value of: num_cycles"),
    (TRAIN + " --lr-scheduler-type warmup_stable_decay", 2, "needs an argument of: num_decay_steps"),
    ("train --learning-rate 0", 2, "--learning-rate 0: must be above 0"),
    ("train --learning-rate fast", 2, "--learning-rate fast is not a number"),
    ("train --max-steps few", 2, "--max-steps few is not a whole number"),
    ("train --memory-limit lots", 2, "--memory-limit lots is not a size such as 12GB"),
    ("train --packing maybe", 2, "--packing maybe: expected on or off"),
    ("train --train-on user", 2, "--train-on user: expected assistant|last|all"),
    ("train --model {m} --data {t} --output-dir {d}/out --train-router --lora-target q_proj,gate", 2, "train_router", "(gate)",
     "one of both"),
    ("train --method freeze", 2, "--method freeze is not in this version yet (it has lora|full|hybrid)"),
    # --config
    ("train --config {d}/absent.yaml", 2, "absent.yaml", "No such file"),
    ("train --config {d}", 2, "--config", "Is a directory"),
    ("train --config {d}/unknown.yaml", 2, "unknown.yaml", "'lora_rnak'", "did you mean 'lora_rank'?"),
    ("train --config {d}/strange.yaml", 2, "strange.yaml", "unknown key 'qqqqqqqqqqqqqqqqqqqqqqqq'"),
    ("train --config {d}/syntax.yaml", 2, "syntax.yaml", "line 2"),
    ("train --config {d}/syntax.json", 2, "syntax.json", "line 1", "not JSON"),
    ("train --config {d}/deep.yaml", 2, "deep.yaml", "nested deeper"),
    ("train --config {d}/nested.yaml", 2, "nested.yaml", "data", "a list of texts is expected"),
    ("train --config {d}/twice.yaml", 2, "twice.yaml", "'lora_rank' appears twice"),
    ("train --config {d}/list.yaml", 2, "list.yaml", "'key: value'"),
    ("train --config {d}/two.yaml", 2, "two.yaml: line 2: another document begins"),
    ("train --config {d}/broken.yaml", 2, "broken.yaml: line 3: another document begins"),
    ("train --config {d}/many.yaml", 2, "--lora-rank takes one value"),
    ("train --config {d}/none.yaml", 2, "--data: an empty list"),
    ("train --config {d}/dpo.yaml", 2, "stage: dpo", "supervised"),
    ("train --config {d}/quantised.yaml", 2, "quantised.yaml:3: quantization_bit: 4: ", "weights: int4"),
    ("train --config {d}/split.yaml", 2, "split.yaml:1: val_size: --eval-split -1: must be at least 0"),
    ("train --config {d}/twice.yaml", 2, "twice.yaml:2: "),
    ("data --model {m}", 2, "--data FILE... is missing"),
    ("eval --model {m}", 2, "--data FILE... is missing"),
    # what has no meaning together
    (TRAIN + " --method full --lora-rank 8", 2, "--lora-rank has no meaning with --method full", "--method hybrid"),
    (TRAIN + " --method full --train-router", 2, "--train-router has no meaning with --method full"),
    (TRAIN + " --masters bf16", 2, "--masters bf16 has no meaning with --method lora"),
    (TRAIN + " --drop-last", 2, "--drop-last goes with --batch-size"),
    (TRAIN + " --eval-split 100", 2, "eval_split 100 takes all 16 packs (16 documents)", "packing off"),
    (TRAIN + " --eval-split 1.5", 2, "eval_split is 1.5", "whole number of documents"),
    # before anything is tokenised: the data do not exist
    (EARLY + " --cutoff-len 513", 2, "--cutoff-len 513: the model has 512 positions"),
    (EARLY + " --lora-target w_proj", 2, "w_proj"),
    (EARLY + " --lora-rank 8 --adapter {d}/nothing", 2, "it has no adapter_config.json"),
    (EARLY + " --threads 60000", 2, "60000", "scripts/build-starpu"),
    (EARLY + " --policy lwss", 2, "lwss", "lws "),
    (EARLY + " --resume", 2, "has no checkpoint to go on from", "starts anew"),
    (EARLY + " --resume {d}/nothing", 2, "nothing: it has no state.json"),
    (EARLY + " --lora-dropout 1", 2, "lora_dropout is 1"),
    ("MOESAIC_ISA=sse9 " + EARLY, 2, "sse9"),
    (EARLY.replace("{m}", "{d}/wrong"), 2, "llama9"),
    (TRAIN + " --config {d}/both.yaml", 2, "--batch-size and --batch-tokens exclude each other"),
    (TRAIN + " --batch-size 2 --batch-tokens 64", 2, "--batch-size and --batch-tokens exclude each other"),
    # datasets by name
    ("train --model {m} --output-dir {d}/out --dataset x --dataset-dir {d}/none", 2, "dataset_info.json", "No such file"),
    ("train --model {m} --output-dir {d}/out --dataset x --dataset-dir {d}/bad", 2, "dataset_info.json", "JSON object"),
    ("train --model {m} --output-dir {d}/out --dataset identty --dataset-dir {d}", 2, "did you mean 'identity'?"),
    ("train --model {m} --output-dir {d}/out --dataset remote --dataset-dir {d}", 2, "'remote' has no file_name"),
    ("train --model {m} --output-dir {d}/out --dataset pairs --dataset-dir {d}", 2, "'pairs' is a preference dataset"),
    ("data --model {m} --dataset tagged --dataset-dir {d}", 2, "dataset_info.json: 'tagged' has role_tag", "from role"),
    ("eval --model {m} --dataset sampled --dataset-dir {d}", 2, "'sampled' has num_samples", "--max-samples"),
    (f"train --model {{m}} --output-dir {{d}}/out --dataset-dir {{d}} --dataset {' '.join(['identity'] * 65)}", 2, "more than 64"),
    # the model
    ("eval --model {d}/absent --data {t}", 2, "--model", "absent: no such folder"),
    ("eval --model {d}/nothing --data {t}", 2, "nothing: it has no config.json"),
    ("eval --model {d}/tool --data {t}", 2, "tool/config.json"),
    ("eval --model {d}/wrong --data {t}", 2, "llama9", "known: "),
    ("eval --model {m} --data {t} --numa x", 2, "--numa x: expected auto, off or a number"),
    ("eval --model {m} --data {t} --adapter {d}/nothing", 2, "--adapter", "it has no adapter_config.json"),
    ("eval --model {m} --data {t} --policy lwss", 2, "lwss"),
    ("eval --model {m} --data {t} --threads 60000", 2, "60000"),
    ("eval --model {m} --data {t} --memory-limit 1MB", 3, "KiB are allowed", "need less"),
    ("MOESAIC_ISA=sse9 eval --model {m} --data {t}", 2, "sse9"),
    # data
    ("eval --model {m} --data {d}/absent.safetensors", 2, "--data", "absent.safetensors", "No such file"),
    ("eval --model {m} --data {d}/rows.jsonl {t}", 2, "one token file, or any number of json files"),
    ("eval --model {m} --data {t} --train-on all", 2, "--train-on has no effect on --data", "tokens already"),
    ("eval --model {m} --data {d}/foreign.safetensors", 2, "another tokenizer.json", "run moesaic data"),
    ("eval --model {m} --data {d}/foreign.safetensors --config {d}/last.yaml", 2, "train_on assistant, last is asked"),
    ("estimate --model {m} --data {d}/absent.jsonl", 2, "absent.jsonl", "No such file"),
    ("estimate --model {m} --data {d}/empty.safetensors", 2, "empty.safetensors: no token file"),
    ("MOESAIC_PYTHON=/bin/true estimate --model {m} --data {d}/rows.jsonl", 2, "--data: it could not be counted"),
    ("estimate --model {m} --numa x", 2, "--numa x: expected auto, off or a number"),
    ("estimate --model {m} --memory-limit 1MB", 3, "MiB are needed, --memory-limit 1MB"),
    ("MOESAIC_PYTHON=/bin/false " + TRAIN.replace("{t}", "{d}/rows.jsonl"), 2, "/bin/false -m moesaic.data failed"),
    ("MOESAIC_PYTHON=/absent/python data --model {m} --data {d}/rows.jsonl", 2, "/absent/python", "MOESAIC_PYTHON"),
    ("MOESAIC_PYTHON=/bin/true generate --model {m} --raw x", 2, "the tokenizer process ended"),
    # train
    (TRAIN + " --lora-target up_proj", 2, "up_proj", "name both, or neither"),
    (TRAIN + " --lora-target w_proj", 2, "w_proj"),
    ("train --model {m} --data {t} --output-dir {d}/empty", 2, "empty is not a folder"),
    ("train --model {m} --data {t} --output-dir {d}/empty/out", 2, "--output-dir", "Not a directory"),
    ("train --model {m} --data {t} --output-dir /proc/moesaic", 2, "--output-dir /proc/moesaic"),
    ("train --model {m} --data {t} --output-dir {d}/done", 2, "has results of a run", "--overwrite starts anew"),
    (TRAIN + " --trace {d}/none/t.mxt", 2, "--trace", "No such file"),
    (TRAIN + " --save-strategy epoch --save-steps 2", 2, "--save-steps has no meaning with --save-strategy epoch", "leave one out"),
    (TRAIN + " --eval-strategy no --eval-data {t}", 2, "--eval-data has no meaning with --eval-strategy no"),
    (TRAIN + " --method full --lora-rank 3", 2, "--lora-rank has no meaning with --method full", "--method hybrid"),
    (TRAIN + " --masters bf16", 2, "--masters bf16 has no meaning with --method lora", "full and hybrid"),
    (TRAIN + " --resume {d}/nothing", 2, "nothing"),
    # generate, doctor
    ("generate --model {m} two words", 2, "one prompt, in quotes; 2 arguments"),
    ("generate --model {m} --raw --system s x", 2, "--raw and --system exclude each other"),
    ("generate --model {m} --no-system --system s x", 2, "--no-system and --system exclude each other"),
    ("bench lyaer", 2, "unknown bench 'lyaer'", "did you mean 'layer'?"),
    ("doctor --quick", 2, "--quick goes with --calibrate"),
    ("MOESAIC_ISA=sse9 doctor", 1, "of this machine must be solved first"),
]
# With Python's packages
PYTHON_ROWS = [
    (DATA + " {d}/absent.jsonl", 2, "absent.jsonl: no such file"),
    (DATA + " {d}/empty", 2, "empty: the file is empty"),
    (DATA + " {d}/broken.jsonl", 2, "broken.jsonl:2: not valid JSON"),
    (DATA + " {d}/odd.jsonl", 2, "odd.jsonl:1: unknown shape", "--columns"),
    (DATA + " {d}/chat.jsonl", 2, "has no chat template", "--chat-template FILE"),
    (DATA + " {d}/rows.jsonl --columns text", 2, "--columns text: expected NAME=VALUE"),
    (DATA + " {d}/rows.jsonl --output {d}/rows.jsonl", 2, "rows.jsonl is the data itself"),
    (DATA + " {d}/rows.jsonl --cutoff-len 2 --on-long error", 2, "rows.jsonl:1", "--on-long truncate"),
    ("data --model {d}/absent --data {d}/rows.jsonl", 2, "absent: no such folder"),
    ("data --model {d}/nothing --data {d}/rows.jsonl", 2, "no tokenizer.json"),
    ("generate --model {m} x", 2, "has no chat template: --raw, or --chat-template FILE"),
    ("generate --model {m} --raw " + "x" * 4000, 2, "the prompt has", "more than"),
    ("generate --model {m} --raw ''", 2, "the prompt is empty"),
    ("generate --model {m} --raw \udcff", 2, "the text is not UTF-8"),
]
BEYOND = {
    "%s": "the library's text, or Python's",
    "out of memory": "test_faults.py",
    "out of memory (%zu bytes)": "test_faults.py",
    "fork: %s": "no process can be made",
    "pipe: %s": "no file can be opened",
    "fdopen: %s": "no memory",
    "--%s %lld, but the adapter in %s has rank %d": "needs a trained adapter: test_run.py",
    "--adapter %s is a checkpoint that --overwrite removes: copy it elsewhere, or name another --output-dir": "needs a trained adapter: test_course.py",
    "--output-dir %s: another process is training into it": "needs two processes: test_newcomer.py",
    "the loss is not finite: the adapter or the weights have NaN or Inf, or overflow": "needs a trained adapter: test_course.py",
    "standard output cannot be written: %s": "test_full_standard_output",
    "bench %s needs a checkout of moesaic with its Python": "test_without_its_other_programs",
    "%s is not beside moesaic: in a checkout, cmake --build build/release --target %s": "test_without_its_other_programs",
    "%s needs moesaic-trace, which is neither beside moesaic nor in PATH": "test_without_its_other_programs",
}
# Files whose texts must all be met; those of merge, convert and inspect have tests of their own.
COVERED = """bench cli completion config dataset doctor estimate eval foreign generate main model option_values options python token_check
token_file tokenizer train train_settings""".split()


def texts():
    """Format strings of cli_fail in the sources."""
    found = set()
    for path in glob.glob(os.path.join(ROOT, "tools", "moesaic", "*.c")):
        if os.path.basename(path)[:-2] not in COVERED:
            continue
        with open(path, encoding="utf-8") as file:
            source = file.read()
        for call in re.finditer(r'cli_fail\(\s*\w+,\s*((?:"(?:[^"\\]|\\.)*"\s*)+)', source):
            found.add("".join(re.findall(r'"((?:[^"\\]|\\.)*)"', call[1])))
    return found


def pattern(text):
    return re.compile(".*".join(map(re.escape, re.split(r"%(?:\.\d+)?(?:ll|z)?[a-z]", text))) + r"$", re.DOTALL)


class Errors(Case):
    def setUp(self):
        super().setUp()
        for name, text in FILES.items():
            os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
            self.write(name, text)
        self.write("empty.safetensors", "")
        self.write("last.yaml", "train_on: last\n")
        save_tensors(self.path("foreign.safetensors"), {}, {"tokenizer": "0" * 64, "train_on": "assistant"})
        self.tokens("t.safetensors")

    def line(self, row):
        arguments, code, *parts = row
        words = [w.format(d=self.path(), m=MODEL, t=self.path("t.safetensors")) for w in arguments.split(" ")]
        words = ["" if word == "''" else word for word in words]
        variables = {}
        while "=" in words[0] and words[0].split("=")[0].isupper():
            name, _, variables[name] = words.pop(0).partition("=")
        env = {**environment(), **variables}
        result = subprocess.run([TOOL, *words], capture_output=True, text=True, env=env, timeout=120, input="")
        self.assertEqual(result.returncode, code, result.stderr)
        lines = [line for line in result.stderr.split("\n") if line]
        self.assertEqual(len(lines), 1, result.stderr)
        for part in parts:
            self.assertIn(part, lines[0])
        self.assertRegex(lines[0], r"^moesaic( [a-z]+)?: ")
        self.assertFalse(os.path.exists(self.path("out")), "an output folder was left")
        return re.sub(r"^moesaic( [a-z]+)?: (--config \S+: )?", "", lines[0])

    def test_the_table_and_that_it_is_complete(self):
        rows = ROWS + (PYTHON_ROWS if "venv" in environment()["MOESAIC_PYTHON"] else [])
        met = set()
        for row in rows:
            with self.subTest(row[0]):
                met.add(self.line(row))
        if len(rows) == len(ROWS):
            return  # without the Python side some texts cannot be met
        missing = [
            text for text in texts() - BEYOND.keys() if not any(pattern(text).match(line) for line in met)
        ]
        self.assertEqual(missing, [], "no row of the table meets these texts")

    def test_full_standard_output(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            result = subprocess.run([TOOL, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(result.returncode, 2)
        self.assertIn("standard output cannot be written: No space left on device", result.stderr)

    def test_without_its_other_programs(self):
        os.mkdir(self.path("bin"))
        shutil.copy(TOOL, self.path("bin", "moesaic"))
        for arguments, part in ((["trace", "x"], "needs moesaic-trace"), (["bench", "layer"], "--target bench_layer"),
                                (["bench", "peers"], "needs a checkout")):  # fmt: skip
            result = subprocess.run([self.path("bin", "moesaic"), *arguments], capture_output=True, text=True,
                                    env={"PATH": "/nowhere"})  # fmt: skip
            self.assertEqual(result.returncode, 2)
            self.assertIn(part, result.stderr)


if __name__ == "__main__":
    unittest.main()
