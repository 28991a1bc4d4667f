# SPDX-License-Identifier: Apache-2.0
"""What a run does on its way: learning rate, losses of the router, statistics of experts, evaluations and the best of them, steps
left out."""

import json
import os
import unittest

from support import MODEL, Case, save_tokens

LAYERS, EXPERTS, PER_TOKEN = 4, 8, 2  # of the tiny checkpoint


class Course(Case):
    def setUp(self):
        super().setUp()
        self.data = self.tokens()

    def train(self, *more, model=MODEL):
        result = self.good(*self.train_arguments("--json", *more, model=model, data=self.data))
        return json.loads(result.stdout)

    def log(self):
        with open(os.path.join(self.out, "trainer_log.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        return [e for e in lines if "loss" in e], [e for e in lines if "eval_loss" in e]

    def state(self, *folder):
        with open(os.path.join(self.out, *folder, "trainer_state.json")) as file:
            return json.load(file)

    def test_learning_rates(self):
        for flags, want in (
            (["--lr-scheduler-type", "linear", "--warmup-steps", 2], [0, 0.5, 1, 0.75, 0.5, 0.25]),
            (["--lr-scheduler-type", "linear", "--warmup-steps", 0], [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
            (["--lr-scheduler-type", "linear", "--warmup-steps", 0.3, "--warmup-ratio", 0.9], [0, 0.5, 1, 0.75, 0.5, 0.25]),
            (["--lr-scheduler-type", "constant_with_warmup", "--warmup-ratio", 0.5], [0, 1 / 3, 2 / 3, 1, 1, 1]),
            (["--lr-scheduler-type", "polynomial", "--warmup-steps", 0, "--lr-scheduler-kwargs", "power=2", "lr_end=0"],
             [1, 25 / 36, 16 / 36, 9 / 36, 4 / 36, 1 / 36]),
        ):  # fmt: skip
            self.train("--max-steps", 6, "--overwrite", *flags)
            for line, factor in zip(self.log()[0], want):
                self.assertAlmostEqual(line["lr"], 1e-3 * factor, delta=1e-12, msg=flags)

    def test_trainer_state(self):
        """The keys of transformers' TrainerState (5.24), no others: its loader takes no others."""
        self.train("--max-steps", 6, "--eval-split", 0.25, "--save-steps", 3)
        keys = """epoch global_step max_steps logging_steps eval_steps save_steps train_batch_size num_train_epochs total_flos
        num_input_tokens_seen log_history best_metric best_global_step best_model_checkpoint is_local_process_zero
        is_world_process_zero is_hyper_param_search trial_name trial_params stateful_callbacks""".split()
        for folder in ((), ("checkpoint-3",)):
            state = self.state(*folder)
            self.assertEqual(sorted(state), sorted(keys))
        want = {"global_step": 3, "max_steps": 6, "num_train_epochs": 1, "train_batch_size": 2, "save_steps": 3, "logging_steps": 1}
        self.assertEqual({key: state[key] for key in want}, want)
        self.assertGreater(state["num_input_tokens_seen"], 0)
        losses = [entry for entry in state["log_history"] if "loss" in entry]
        self.assertEqual([entry["step"] for entry in losses], [1, 2, 3])
        self.assertEqual(set(losses[0]), {"epoch", "step", "loss", "learning_rate", "grad_norm"})

    def test_yaml_of_llamafactory(self):
        config = self.write("lf.yaml", "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.5}\n"
                            "warmup_steps: 1\nload_best_model_at_end: true\nmetric_for_best_model: eval_loss\n"
                            "greater_is_better: false\nval_size: 0.25\nmoe_aux_loss_coef: 0.01\n")  # fmt: skip
        self.train("--config", config, "--max-steps", 4)
        steps, evaluations = self.log()
        self.assertEqual([line["lr"] for line in steps[:2]], [0, 1e-3])
        self.assertGreater(steps[3]["lr"], 0.5e-3)
        self.assertTrue(evaluations)
        self.assertIn("aux_loss", steps[0])
        wrong = self.write("wrong.yaml", "metric_for_best_model: accuracy\n")
        self.assertIn("eval_loss", self.bad(2, *self.train_arguments("--config", wrong)))

    def checkpoints(self):
        return sorted(int(name.split("-")[1]) for name in os.listdir(self.out) if name.startswith("checkpoint-"))

    def test_strategies(self):
        """transformers' words for when to log, evaluate and save. 12 rows of 2 are 6 steps an epoch, 4 are kept."""
        held = ["--eval-split", 4]
        for flags, evaluated, saved in (
            ([], [6, 8], []),
            (["--eval-strategy", "no"], [], []),
            (["--eval-strategy", "epoch"], [6, 8], []),
            (["--eval-strategy", "steps", "--eval-steps", 3], [3, 6, 8], []),
            (["--eval-strategy", "steps", "--logging-steps", 5], [5, 8], []),
            (["--eval-steps", 2, "--eval-delay", 5, "--eval-on-start"], [0, 6, 8], []),
            (["--eval-delay", 2], [8], []),
            (["--save-strategy", "no"], [6, 8], []),
            (["--save-strategy", "steps", "--save-steps", 4], [6, 8], [4, 8]),
            (["--save-strategy", "epoch"], [6, 8], [6, 8]),
            (["--save-strategy", "best", "--eval-steps", 4, "--save-total-limit", 9], [4, 8], None),
            (["--save-steps", 0.5, "--eval-steps", 0.3], [3, 6, 8], [4, 8]),
            (["--save-steps", 0.001, "--eval-strategy", "steps", "--logging-steps", 0.55], [5, 8], [7, 8]),
        ):
            with self.subTest(flags):
                values = self.train("--max-steps", 8, "--overwrite", *held, *flags)
                steps, evaluations = self.log()
                self.assertEqual([e["step"] for e in evaluations], evaluated)
                if saved is None:
                    best = [e["step"] for i, e in enumerate(evaluations) if e["eval_loss"] < min([9e9, *(x["eval_loss"] for x in evaluations[:i])])]
                    saved = best
                self.assertEqual(self.checkpoints(), saved)
                self.assertEqual("eval_loss" in values, bool(evaluated))
                self.assertEqual("eval_batch_tokens" in values, bool(evaluated))
                self.assertTrue(os.path.exists(os.path.join(self.out, "adapter_model.safetensors")))
        self.train("--max-steps", 8, "--overwrite", "--logging-steps", 5, "--logging-first-step")
        self.assertEqual([e["step"] for e in self.log()[0]], [1, 5, 8])

    def test_when_lines_are_logged(self):
        """A line's loss is the mean of the steps since the line before. 8 steps an epoch."""
        self.train("--max-steps", 12)
        each = [e["loss"] for e in self.log()[0]]
        for flags, steps in (
            (["--logging-steps", 5], [5, 10, 12]),
            (["--logging-steps", 0.4], [5, 10, 12]),
            (["--logging-strategy", "epoch"], [8, 12]),
            (["--logging-strategy", "no"], []),
            (["--logging-strategy", "no", "--logging-first-step"], [1]),
        ):
            with self.subTest(flags):
                result = self.good(*(a for a in self.train_arguments("--max-steps", 12, "--overwrite", *flags, data=self.data) if a != "--quiet"))
                self.assertEqual([e["step"] for e in self.log()[0]], steps)
                for first, e in zip([0, *steps], self.log()[0]):
                    part = each[first : e["step"]]
                    self.assertAlmostEqual(e["loss"], sum(part) / len(part), delta=1e-9)
                self.assertEqual(sum(line.startswith("step ") for line in result.stdout.split("\n")), len(steps))

    def test_order_by_a_seed_of_its_own(self):
        """Losses before an update tell the order: data_seed takes seed's place in it, and in nothing else."""
        kept = {}
        for name, flags in (("1", ["--seed", 1]), ("2", ["--seed", 2]), ("21", ["--seed", 2, "--data-seed", 1]),
                            ("22", ["--seed", 2, "--data-seed", 2])):  # fmt: skip
            self.train("--max-steps", 4, "--overwrite", "--learning-rate", 1e-12, "--save-steps", 2, *flags)
            kept[name] = [(e["tokens"], e["loss"]) for e in self.log()[0]]
        for name in ("21", "22"):
            for a, b in zip(kept[name], kept[name[1]]):
                self.assertAlmostEqual(a[1], b[1], delta=1e-6)
        self.assertGreater(max(abs(a[1] - b[1]) for a, b in zip(kept["1"], kept["2"])), 1e-4)
        line = self.bad(2, *self.train_arguments("--max-steps", 6, "--resume", "--seed", 2, "--data-seed", 3, data=self.data))
        self.assertIn("made with order_seed 2, this run has 3", line)
        self.good(*self.train_arguments("--max-steps", 6, "--resume", "--seed", 2, data=self.data))

    def test_without_an_epoch_s_rest(self):
        """16 rows by 3: six micro-batches with the last row, five without; a step of two holds what there is, as in transformers."""
        for flags, steps, tokens in ((["--batch-size", 3], 6, 16 * 24), (["--batch-size", 3, "--drop-last"], 5, 15 * 24),
                                     (["--batch-size", 3, "--drop-last", "--gradient-accumulation-steps", 2], 3, 15 * 24),
                                     (["--batch-size", 4, "--drop-last"], 4, 16 * 24)):  # fmt: skip
            with self.subTest(flags):
                values = self.train("--epochs", 1, "--overwrite", *flags)
                self.assertEqual((values["steps"], values["tokens"]), (steps, tokens))
        two = self.train("--epochs", 2, "--overwrite", "--batch-size", 3, "--drop-last", "--save-steps", 4)
        self.assertEqual((two["steps"], two["tokens"]), (10, 30 * 24))
        line = self.bad(2, *self.train_arguments("--epochs", 3, "--batch-size", 3, "--resume", data=self.data))
        self.assertIn("made with drop_last 1, this run has 0", line)
        config = self.write("lf.yaml", "dataloader_drop_last: true\nbatch_tokens: 64\n")
        arguments = ["train", "--model", MODEL, "--data", self.data, "--output-dir", self.path("by-tokens"), "--max-steps", 1]
        self.assertIn("ignored from --config: drop_last", self.good(*arguments, "--config", config).stderr)

    def test_the_evaluation_at_the_start_is_of_the_base(self):
        """Of the untrained adapter, whose B is zero; it is logged, and never the best."""
        values = self.train("--max-steps", 2, "--eval-split", 4, "--eval-on-start", "--eval-steps", 1, "--learning-rate", "1e-9",
                            "--load-best")  # fmt: skip
        evaluations = self.log()[1]
        self.assertEqual([e["step"] for e in evaluations], [0, 1, 2])
        self.assertAlmostEqual(evaluations[0]["eval_loss"], evaluations[1]["eval_loss"], places=3)
        self.assertIn(values["best_step"], (1, 2))
        self.assertEqual(self.state()["log_history"][0]["step"], 0)

    def test_checkpoints_of_another_run(self):
        """None that a run begun anew, or gone on from an earlier step, could take for its own."""
        self.train("--max-steps", 8, "--save-steps", 2)
        self.assertEqual(self.checkpoints(), [6, 8])
        old = os.path.join(self.out, "checkpoint-8")
        self.assertIn("--overwrite removes", self.bad(2, *self.train_arguments("--overwrite", "--adapter", old, data=self.data)))
        self.assertEqual(self.checkpoints(), [6, 8])
        self.train("--max-steps", 5, "--save-steps", 2, "--overwrite", "--learning-rate", "2e-3")
        self.assertEqual(self.checkpoints(), [2, 4])
        self.train("--max-steps", 5, "--save-steps", 3, "--resume", os.path.join(self.out, "checkpoint-2"))
        self.assertEqual(self.checkpoints(), [2, 3])

    def test_strategies_against_numbers(self):
        """Flags win over a file, two flags are a mistake, and in a file the strategy holds, with a note."""
        for flags, line in (
            (["--eval-strategy", "no", "--eval-steps", 2], "--eval-steps has no meaning with --eval-strategy no"),
            (["--eval-strategy", "epoch", "--eval-steps", 2], "--eval-steps has no meaning with --eval-strategy epoch"),
            (["--save-strategy", "no", "--save-steps", 2], "--save-steps has no meaning with --save-strategy no"),
            (["--save-strategy", "best"], "the best checkpoint is found by evaluation: give evaluation data"),
            (["--load-best", "--eval-split", 4, "--eval-strategy", "no"], "and an eval_strategy other than no"),
            (["--save-strategy", "never"], "expected no|steps|epoch|best"),
            (["--logging-strategy", "epoch", "--logging-steps", 2], "--logging-steps has no meaning with --logging-strategy epoch"),
            (["--save-steps", 2.5], "save_steps is 2.5; a whole number of steps, or a share of all steps below 1"),
            (["--eval-steps", 1.5], "eval_steps is 1.5; "),
            (["--logging-steps", 1.25], "logging_steps is 1.25; "),
            (["--drop-last", "--batch-size", 17], "has 16 rows, fewer than batch_size 17"),
        ):
            self.assertIn(line, self.bad_training(2, *flags))
        for no in ("no", '"no"', "false"):
            config = self.write("lf.yaml", f"eval_strategy: {no}\nsave_strategy: {no}\neval_steps: 2\nsave_steps: 2\nval_size: 4\n")
            result = self.good(*[a for a in self.train_arguments("--config", config, "--max-steps", 4, "--overwrite") if a != "--quiet"])
            self.assertIn("eval-strategy no: ignored from --config: eval-steps\n", result.stderr)
            self.assertIn("save-strategy no: ignored from --config: save-steps\n", result.stderr)
            self.assertEqual((self.log()[1], self.checkpoints()), ([], []))
            self.assertIn('eval_strategy: "no"', self.read("out", "run.yaml").decode())
        again = self.good("train", "--config", self.path("out", "run.yaml"), "--overwrite", "--quiet")
        self.assertEqual(again.stderr, "")
        self.train("--config", config, "--max-steps", 4, "--overwrite", "--eval-steps", 3, "--save-steps", 4)
        self.assertEqual(([e["step"] for e in self.log()[1]], self.checkpoints()), ([3, 4], [4]))

    def test_losses_of_the_router(self):
        self.train("--max-steps", 2)
        plain = self.log()[0]
        self.assertNotIn("z_loss", plain[0])
        self.train("--max-steps", 2, "--overwrite", "--aux-loss", 0.1, "--z-loss", 0.01)
        both = self.log()[0]
        self.assertEqual(both[0]["loss"], plain[0]["loss"])  # not part of it
        self.assertEqual(both[0]["aux_loss"], plain[0]["aux_loss"])
        self.assertGreater(both[0]["aux_loss"], 0.9 * PER_TOKEN)
        self.assertLess(both[0]["aux_loss"], EXPERTS)
        self.assertGreater(both[0]["z_loss"], 0)
        self.assertNotEqual(both[0]["grad_norm"], plain[0]["grad_norm"])

    def test_cutting_a_step_otherwise(self):
        """The same rows in one micro-batch and in four of two lengths: the same losses of the router where routing is."""
        kept = []
        for size, accumulation in ((4, 1), (1, 4)):
            self.train("--max-steps", 1, "--overwrite", "--batch-size", size, "--gradient-accumulation-steps", accumulation,
                       "--z-loss", 0.01, "--shuffle", "off")  # fmt: skip
            kept.append(self.log()[0][0])
        self.assertAlmostEqual(kept[0]["z_loss"], kept[1]["z_loss"], delta=1e-3 * kept[0]["z_loss"])
        self.assertEqual(kept[0]["tokens"], kept[1]["tokens"])

    def test_experts_in_the_log(self):
        values = self.train("--max-steps", 3)
        tokens = 0
        for line in self.log()[0]:
            self.assertEqual(len(line["expert_load"]), LAYERS)
            self.assertEqual(len(line["unused_experts"]), LAYERS)
            for load, unused in zip(line["expert_load"], line["unused_experts"]):
                self.assertGreaterEqual(load, 1)
                self.assertLessEqual(load, EXPERTS / PER_TOKEN)
                self.assertTrue(0 <= unused <= EXPERTS - PER_TOKEN)
            tokens += line["tokens"]
        for counts in values["expert_tokens"].values():
            self.assertEqual(sum(counts), PER_TOKEN * tokens)
        self.assertEqual(len(values["expert_tokens"]), LAYERS)
        unused = sum(count == 0 for counts in values["expert_tokens"].values() for count in counts)
        self.assertEqual(values["experts_without_gradient"], unused)
        # resumed parts count
        self.train("--max-steps", 2, "--save-steps", 2, "--overwrite", "--lr-scheduler-type", "constant")
        resumed = self.train("--max-steps", 3, "--resume", "--lr-scheduler-type", "constant")
        self.assertEqual(sum(resumed["expert_tokens"]["0"]), PER_TOKEN * tokens)
        said = self.good(*[a for a in self.train_arguments("--max-steps", 1, "--overwrite", data=self.data) if a != "--quiet"])
        self.assertRegex(said.stdout, r"experts: \d+ of 32 had no token; busiest: layer \d expert \d, \d\.\d x the mean")

    def test_best_checkpoint(self):
        """What is held out uses other tokens than what is trained on: an early evaluation is the best one."""
        held_out = self.path("held.safetensors")
        save_tokens(held_out, [[100 + i, 140 + i, 100 + i, 120 - i] for i in range(4)])
        save_tokens(self.data, [[10 + i, 40 + i, 10 + i, 30 - i] for i in range(16)])
        flags = ["--max-steps", 8, "--learning-rate", 0.01, "--lr-scheduler-type", "constant", "--warmup-ratio", 0,
                 "--eval-data", held_out, "--eval-steps", 1, "--save-steps", 3, "--save-total-limit", 1]  # fmt: skip
        values = self.train(*flags, "--load-best")
        losses = {e["step"]: e["eval_loss"] for e in self.log()[1]}
        best = min(losses, key=lambda step: (losses[step], step))
        self.assertEqual(len(losses), 8)
        self.assertLess(best, 8, losses)
        self.assertEqual(values["best_step"], best)
        self.assertAlmostEqual(values["best_loss"], losses[best])
        state = self.state()
        self.assertEqual(state["best_global_step"], best)
        self.assertAlmostEqual(state["best_metric"], losses[best])
        self.assertEqual(os.path.basename(state["best_model_checkpoint"]), f"checkpoint-{best}")
        self.assertEqual(self.state(f"checkpoint-{best}")["best_global_step"], best)
        left = {name for name in os.listdir(self.out) if name.startswith("checkpoint-")}
        self.assertIn(f"checkpoint-{best}", left)
        self.assertLessEqual(len(left), 2)
        name = "adapter_model.safetensors"
        self.assertEqual(self.read("out", name), self.read("out", f"checkpoint-{best}", name))
        after = json.loads(self.good("eval", "--model", MODEL, "--adapter", self.out, "--data", held_out, "--json", "--threads", 2).stdout)
        self.assertAlmostEqual(after["loss"], losses[best], places=3)
        with open(os.path.join(self.out, "README.md")) as file:
            self.assertIn(f"adapter of step {best}, the best", file.read())
        # without it the last step's, and the best is still written down
        self.train(*flags, "--overwrite")
        self.assertEqual(self.state()["best_global_step"], best)
        self.assertNotEqual(self.read("out", name), b"")
        self.assertIn("evaluation", self.bad(2, *self.train_arguments("--load-best", "--overwrite", data=self.data)))

    def test_on_nan(self):
        flags = ["--max-steps", 12, "--learning-rate", 1e30, "--lr-scheduler-type", "constant", "--warmup-ratio", 0, "--max-grad-norm", 0]
        line = self.bad(4, *self.train_arguments(*flags, data=self.data))
        self.assertRegex(line, r"step \d+: .*(gradient|value) of layers\.\d+\.")
        self.assertFalse(os.path.exists(os.path.join(self.out, "adapter_model.safetensors")))
        result = self.run_tool(*self.train_arguments(*flags, "--on-nan", "skip", "--overwrite", data=self.data))
        skipped = self.log()[0][-1]["skipped_steps"]
        self.assertEqual(result.stderr.count("update was skipped"), skipped)
        self.assertGreater(skipped, 0)
        line = self.bad(4, "eval", "--model", MODEL, "--adapter", self.out, "--data", self.data)
        self.assertIn("the loss is not finite", line)


if __name__ == "__main__":
    unittest.main()
