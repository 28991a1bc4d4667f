# SPDX-License-Identifier: Apache-2.0
"""--config: YAML and JSON, LLaMA-Factory's and ktransformers' files, run.yaml as input."""

import json
import os
import unittest

from support import MODEL, QUICK_TEMPLATE, VENV_PYTHON, Case

KT = """
### model
model_name_or_path: {model}
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 4
lora_target: all
dataset: mine
dataset_dir: {folder}
template: deepseek
cutoff_len: 64
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: {folder}/out
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
report_to: none
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1.0e-4
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
resume_from_checkpoint: null
use_kt: true
kt_cpu_activation: retain
kt_config: {{kt_expert_weight_format: bf16, kt_backend: AMXBF16, kt_num_threads: 2, kt_tp_enabled: true,
             kt_threadpool_count: 2, kt_max_cache_depth: 2, kt_share_backward_bb: true}}
"""


# What kt-kernel's users have; the model and the data come from the command line as there.
USERS = """
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
bf16: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
cutoff_len: 2048
learning_rate: 1.0e-4
logging_steps: 10
save_steps: 500
plot_loss: true
resume_from_checkpoint: null
use_kt: true
kt_cpu_activation: retain            # or recompute
kt_config: {kt_expert_weight_format: bf16, kt_backend: AMXBF16, kt_num_threads: 96, kt_tp_enabled: true, kt_threadpool_count: 2,
            kt_max_cache_depth: 2, kt_model_max_length: 2176, kt_share_backward_bb: true}
"""
KT_KEYS = """kt_backend kt_num_threads kt_tp_enabled kt_threadpool_count kt_non_expert_weight_path kt_expert_weight_format
kt_weight_lifecycle kt_expert_checkpoint_path kt_num_gpu_experts kt_skip_expert_loading kt_share_backward_bb kt_share_cache_pool
kt_force_fused_expert_lora kt_max_cache_depth kt_model_max_length kt_activation_policy kt_lora_rank kt_lora_alpha kt_lora_dropout
kt_train_mode kt_full_weight_grad kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size kt_checkpoint_files""".split()


class Config(Case):
    def test_errors(self):
        for name, text, part in (
            ("a.yaml", "lora_rnak: 3", "unknown key 'lora_rnak'; did you mean 'lora_rank'?"),
            ("a.yaml", "lora_rank: [1, 2]", "takes one value"),
            ("a.yaml", "lora_rank: x", "not a whole number"),
            ("a.yaml", "lora_rank: 0", "must be at least 1"),
            ("a.yaml", "lora_rank: 1\nlora_rank: 2", "appears twice"),
            ("a.yaml", "method: freeze", "not in this version yet"),
            ("a.yaml", "stage: dpo", "only supervised fine-tuning"),
            ("a.yaml", "a: [", "line 2"),
            ("a.yaml", "- a", "not a list of"),
            ("a.yaml", "a: &x {b: *x}", "nested deeper"),
            ("a.json", '{"lora_rank": "x"}', "not a whole number"),
            ("a.json", '{"lora_rank": 3', "not JSON"),
        ):
            with self.subTest(text):
                self.assertIn(part, self.bad(2, "train", "--config", self.write(name, text)))
        self.assertIn("No such file", self.bad(2, "train", "--config", self.path("absent.yaml")))

    def test_flags_override_files(self):
        config = self.write("a.yaml", f"model: {MODEL}\nlora_rank: 3\nbatch_tokens: 64\nthreads: 2\n")
        self.good("train", "--config", config, "--data", self.tokens(), "--output-dir", self.out,
                  "--lora-rank", "2", "--batch-size", "2", "--max-steps", "1", "--quiet")  # fmt: skip
        text = self.read("out", "run.yaml").decode()
        self.assertIn("\nlora_rank: 2\n", text)
        self.assertIn("\nlora_alpha: 4\n", text)
        self.assertIn("\nbatch_size: 2\n", text)
        self.assertNotIn("batch_tokens", text)
        self.assertIn("# command line:", text)
        self.assertRegex(text, r"^# moesaic \d")

    def test_a_kt_file_runs(self):
        self.write("dataset_info.json", json.dumps({"mine": {"file_name": "train.safetensors"}}))
        self.tokens()
        config = self.write("kt.yaml", KT.format(model=MODEL, folder=self.path()))
        result = self.good("train", "--config", config, "--max-steps", "2", "--json")
        self.assertEqual(json.loads(result.stdout)["steps"], 2)
        ignored = [line for line in result.stderr.split("\n") if "ignored" in line]
        self.assertEqual(len(ignored), 1)
        for key in ("template", "kt_backend", "bf16", "ddp_timeout"):
            self.assertIn(key, ignored[0])

    def test_the_yaml_of_kt_users(self):
        config = self.write("kt.yaml", USERS)
        result = self.good("train", "--config", config, "--model", MODEL, "--data", self.tokens(), "--output-dir",
                           self.out, "--max-steps", "1")  # fmt: skip
        text = self.read("out", "run.yaml").decode()
        for line in ("lora_rank: 8", "gradient_accumulation_steps: 8", "batch_size: 1", "learning_rate: 1.0e-4",
                     f"threads: {os.cpu_count()}"):  # fmt: skip
            self.assertIn(f"\n{line}\n", text)
        self.assertIn(f"kt_num_threads: 96: this machine has {os.cpu_count()} CPUs", result.stderr)
        (ignored,) = [line for line in result.stderr.split("\n") if "ignored" in line]
        self.assertEqual(
            ignored.partition("here: ")[2],
            "bf16, use_kt, kt_backend, kt_tp_enabled, kt_threadpool_count, kt_max_cache_depth, kt_model_max_length, kt_share_backward_bb",
        )

    def test_one_file_for_several_commands(self):
        config = self.write("a.yaml", f"model: {MODEL}\nlora_rank: 3\nlearning_rate: 1e-3\nthreads: 2\nlora_alhpa: 3\n")
        self.assertIn("unknown key 'lora_alhpa'", self.bad(2, "eval", "--config", config, "--data", self.tokens()))
        config = self.write("a.yaml", f"model: {MODEL}\nlora_rank: 3\nlearning_rate: 1e-3\nthreads: 2\n")
        result = self.good("eval", "--config", config, "--data", self.tokens())
        self.assertNotIn("ignored", result.stderr)
        config = self.write("b.yaml", f"model: {MODEL}\nper_device_train_batch_size: 2\nkt_lora_rank: 3\ntemplate: qwen3\n")
        result = self.good("eval", "--config", config, "--data", self.tokens())
        (ignored,) = [line for line in result.stderr.split("\n") if "ignored" in line]
        self.assertEqual(ignored.partition("here: ")[2], "template")  # the others train uses
        values = json.loads(self.good("estimate", "--config", config, "--json").stdout)
        self.assertGreater(values["trainable"], 0)

    def test_every_key_of_kt_is_known(self):
        values = {"kt_expert_weight_format": "bf16", "kt_lora_rank": 8, "kt_lora_alpha": 16, "kt_lora_dropout": 0,
                  "kt_train_mode": "lora", "kt_num_threads": 2, "kt_full_weight_grad": False, "kt_use_lora_experts": None,
                  "kt_activation_policy": {"cpu": "retain", "gpu": "recompute"}}  # fmt: skip
        config = self.write("kt.json", json.dumps({"kt_config": {key: values.get(key, "x") for key in KT_KEYS}}))
        line = self.bad_line("train", "--config", config)
        self.assertIn("--model DIR is missing", line)
        self.write("kt.json", json.dumps({"kt_weight_path": "/kt"}))
        self.assertIn("--model DIR is missing", self.bad(2, "train", "--config", config))

    def bad_line(self, *arguments):
        """The last line of an error that notes come before."""
        result = self.run_tool(*arguments)
        self.assertEqual(result.returncode, 2)
        return result.stderr.strip().split("\n")[-1]

    def test_data_and_eval_take_a_training_file(self):
        """dataset, eval_dataset and cutoff_len of a LLaMA-Factory yaml, as train does; flags go first."""
        entries = {name: {"file_name": f"{name}.safetensors"} for name in ("mine", "held")}
        self.write("dataset_info.json", json.dumps(entries))
        self.tokens("mine.safetensors", count=3)
        self.tokens("held.safetensors", count=2)
        text = f"model_name_or_path: {MODEL}\ndataset: mine\ndataset_dir: {self.path()}\nuse_dora: false\n"
        for more, flags, count in (("", [], 3), ("eval_dataset: held\n", [], 2), ("eval_dataset: held\n", ["--dataset", "mine"], 3),
                                   (f"eval_data: {self.path('held.safetensors')}\nval_size: 0.1\n", [], 2),
                                   ("eval_dataset: held\n", ["--data", self.path("mine.safetensors")], 3)):  # fmt: skip
            with self.subTest(more + " ".join(flags)):
                config = self.write("lf.yaml", text + more)
                result = json.loads(self.good("eval", "--config", config, "--json", "--threads", 2, *flags).stdout)
                self.assertEqual(len(result["documents"]), count)
        self.assertIn("--data FILE... is missing", self.bad(2, "eval", "--model", MODEL))
        self.assertIn("--data FILE... is missing", self.bad(2, "data", "--model", MODEL))

    @unittest.skipUnless(os.path.exists(VENV_PYTHON), "no build/venv (./run setup makes it)")
    def test_datasets_are_tokenised(self):
        rows = "".join(json.dumps({"q": f"word {i}", "a": f"text {i} " * 90}) + "\n" for i in range(4))
        self.write("mine.jsonl", rows)
        self.write("dataset_info.json", json.dumps({"mine": {"file_name": "mine.jsonl", "columns": {"prompt": "q", "response": "a"}}}))
        config = self.write("lf.yaml", f"model_name_or_path: {MODEL}\ndataset: mine\ndataset_dir: {self.path()}\ntemplate: qwen\n"
                            f"chat_template: {QUICK_TEMPLATE}\ncutoff_len: 40\nmax_samples: 3\n")  # fmt: skip
        found = json.loads(self.good("data", "--config", config, "--json").stdout)
        self.assertEqual((found["rows"], found["truncated"], found["tokens"]), (3, 3, 120))
        self.write("lf.yaml", f"model_name_or_path: {MODEL}\ndataset: mine\ndataset_dir: {self.path()}\ncutoff_len: 4000\n")
        result = self.good("eval", "--config", config, "--chat-template", QUICK_TEMPLATE, "--threads", 2)
        self.assertIn("cutoff_len: 4000: the model has 512 positions", result.stderr)
        self.assertIn("4 documents", result.stdout)

    @unittest.skipUnless(os.path.exists(VENV_PYTHON), "no build/venv (./run setup makes it)")
    def test_columns_of_several_datasets(self):
        """Each dataset's own, for training and for evaluation; run.yaml has them by file."""
        names = {"one": ("q", "a"), "two": ("question", "answer"), "held": ("ask", "say")}
        info = {}
        for name, (ask, say) in names.items():
            self.write(f"{name}.jsonl", "".join(json.dumps({ask: f"word {i}", say: f"text {i}", "input": 3 * "x "}) + "\n" for i in range(3)))
            info[name] = {"file_name": f"{name}.jsonl", "columns": {"prompt": ask, "response": say}}
        self.write("dataset_info.json", json.dumps(info))
        config = self.write("lf.yaml", f"model_name_or_path: {MODEL}\ndataset: one,two\neval_dataset: held\ndataset_dir: {self.path()}\n"
                            f"chat_template: {QUICK_TEMPLATE}\noutput_dir: {self.out}\nmax_steps: 1\npacking: false\n")  # fmt: skip
        result = self.good("train", "--config", config, "--json", "--threads", 2)
        self.assertEqual(result.stderr.count("3 read, 3 used"), 1)
        self.assertEqual(result.stderr.count("6 read, 6 used"), 1)
        text = self.read("out", "run.yaml").decode()
        for name, (ask, say) in names.items():
            self.assertIn(f'"instruction={ask}@{self.path()}/{name}.jsonl"', text)
            self.assertIn(f'"output={say}@{self.path()}/{name}.jsonl"', text)
        found = json.loads(self.good("eval", "--config", config, "--json", "--threads", 2).stdout)
        self.assertEqual(len(found["documents"]), 3)
        self.good("train", "--config", self.path("out", "run.yaml"), "--output-dir", self.path("again"), "--quiet")

    def test_unknown_dataset(self):
        self.write("dataset_info.json", json.dumps({"identity": {"file_name": "x.json"}}))
        line = self.bad(2, "train", "--model", MODEL, "--dataset", "identty", "--dataset-dir", self.path(),
                        "--output-dir", self.out)  # fmt: skip
        self.assertIn("did you mean 'identity'?", line)

    def test_run_yaml_gives_the_same_run(self):
        self.good(*self.train_arguments("--max-steps", 3, "--lora-target", "experts", "q_proj", "--seed", 7,
                                        "--gradient-accumulation-steps", 2))  # fmt: skip
        self.good("train", "--config", self.path("out", "run.yaml"), "--output-dir", self.path("again"), "--quiet")
        adapters = [self.read(folder, "adapter_model.safetensors") for folder in ("out", "again")]
        self.assertEqual(*adapters)
        texts = [self.read(folder, "run.yaml").decode().split("\n")[2:] for folder in ("out", "again")]
        differing = [pair for pair in zip(*texts) if pair[0] != pair[1]]
        self.assertEqual(len(differing), 1)
        self.assertTrue(differing[0][0].startswith("output_dir:"))
        self.assertFalse(os.path.exists(self.path("again", "run.yaml.tmp")))


if __name__ == "__main__":
    unittest.main()
