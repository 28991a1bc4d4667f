/* SPDX-License-Identifier: Apache-2.0 */
/* The flags of cli.md that several commands share; aliases are LLaMA-Factory's and ktransformers'
 * names. */
#include "tools/moesaic/commands.h"

#define BIG 2147483647.0

static const struct option what[] = {
	{ "model", OPTION_TEXT, OPTION_COMMON | OPTION_REQUIRED, "DIR", NULL,
	  "Hugging Face checkpoint folder", 0, 0, "model-name-or-path", NULL },
	{ "data", OPTION_LIST, OPTION_COMMON, "FILE...", NULL,
	  "json or jsonl (alpaca, sharegpt, messages, text), or one token file", 0, 0, "", NULL },
	{ "eval-data", OPTION_LIST, OPTION_COMMON, "FILE...", NULL, "the same, for evaluation", 0,
	  0, "", NULL },
	{ "eval-split", OPTION_REAL, 0, "X", "0", "share of the data kept for evaluation", 0, 0,
	  "val-size", "0" },
	{ "dataset", OPTION_LIST, 0, "NAME...", NULL, "names in dataset-dir/dataset_info.json", 0,
	  0, "", NULL },
	{ "eval-dataset", OPTION_LIST, 0, "NAME...", NULL, "the same, for evaluation", 0, 0, "",
	  NULL },
	{ "dataset-dir", OPTION_TEXT, OPTION_TRANSIENT, "DIR", "data", "folder of --dataset", 0, 0,
	  "", NULL },
	{ "output-dir", OPTION_TEXT, OPTION_COMMON, "DIR", NULL, "where the adapter and logs go", 0,
	  0, "", NULL },
	{ "overwrite", OPTION_FLAG, OPTION_COMMON | OPTION_TRANSIENT, NULL, NULL,
	  "use an output folder that has results", 0, 0, "overwrite-output-dir", NULL },
	{ "adapter", OPTION_TEXT, OPTION_COMMON, "DIR", NULL,
	  "continue from this PEFT adapter: its targets, ranks and alpha", 0, 0,
	  "adapter-name-or-path", NULL },
	{ "resume", OPTION_TEXT, OPTION_COMMON | OPTION_VALUE_OPTIONAL | OPTION_TRANSIENT, "DIR",
	  NULL, "go on from a checkpoint (the newest)", 0, 0, "resume-from-checkpoint", NULL },
	{ .name = NULL },
};

const struct option options_data[] = {
	{ "cutoff-len", OPTION_INT, OPTION_COMMON, "N", "4096",
	  "longest document, and size of a pack", 2, BIG, "", NULL },
	{ "packing", OPTION_SWITCH, 0, NULL, "on", "several documents a row, apart from each other",
	  0, 0, "", NULL },
	{ "train-on", OPTION_CHOICE, 0, "assistant|last|all", "assistant",
	  "which turns are trained", 0, 0, "", NULL },
	{ "on-long", OPTION_CHOICE, 0, "truncate|drop|error", "truncate",
	  "documents above --cutoff-len", 0, 0, "", NULL },
	{ "chat-template", OPTION_TEXT, 0, "FILE", NULL, "in place of the checkpoint's template", 0,
	  0, "", NULL },
	{ "template-vars", OPTION_LIST, 0, "K=V...", NULL, "such as enable_thinking=false", 0, 0,
	  "", NULL },
	{ "no-system", OPTION_FLAG, 0, NULL, NULL, "no system turn at all", 0, 0, "", NULL },
	{ "columns", OPTION_LIST, 0, "OURS=THEIRS...", NULL, "names of columns", 0, 0, "", NULL },
	{ "max-samples", OPTION_INT, 0, "N", NULL, "use the first N rows", 1, BIG, "", NULL },
	{ .name = NULL },
};

static const struct option method[] = {
	{ "method", OPTION_CHOICE, 0, "lora|full|hybrid|freeze", "lora", "what is trained", 0, 0,
	  "finetuning-type", "lora" },
	{ "lora-rank", OPTION_INT, OPTION_COMMON, "N", "16", "rank of the adapter", 1, 65536,
	  "kt-lora-rank", NULL },
	{ "expert-lora-rank", OPTION_INT, 0, "N", NULL, "rank on experts (lora-rank)", 1, 65536, "",
	  NULL },
	{ "lora-alpha", OPTION_REAL, OPTION_COMMON | OPTION_ABOVE_ZERO, "X", NULL,
	  "scale is alpha / rank (2 x rank)", 0, 0, "", NULL },
	{ "lora-dropout", OPTION_REAL, 0, "X", "0", "dropout on the adapter's input", 0, 1, "",
	  "0" },
	{ "lora-target", OPTION_LIST, OPTION_COMMON, "NAME...",
	  "experts,q_proj,k_proj,v_proj,o_proj", "what the adapter is on", 0, 0, "", NULL },
	{ "share-a", OPTION_FLAG, 0, NULL, NULL, "one A for gate and up (PEFT's fused form)", 0, 0,
	  "", NULL },
	{ "rslora", OPTION_FLAG, 0, NULL, NULL, "scale is alpha / sqrt(rank)", 0, 0, "use-rslora",
	  NULL },
	{ "train-router", OPTION_FLAG, 0, NULL, NULL, "train the router too", 0, 0, "", "" },
	{ "aux-loss", OPTION_REAL, 0, "X", "0", "coefficient of the load-balancing loss", 0, 1e6,
	  "moe-aux-loss-coef", NULL },
	{ "z-loss", OPTION_REAL, 0, "X", "0", "coefficient of the router's z-loss", 0, 0, "", "0" },
	{ .name = NULL },
};

static const struct option optimisation[] = {
	{ "learning-rate", OPTION_REAL, OPTION_COMMON | OPTION_ABOVE_ZERO, "X", "1e-4",
	  "highest learning rate", 0, 0, "", NULL },
	{ "lr-scheduler-type", OPTION_CHOICE, 0, "cosine|linear|constant|constant_with_warmup",
	  "cosine", "its course", 0, 0, "", NULL },
	{ "warmup-ratio", OPTION_REAL, 0, "X", "0.03", "share of the steps that warm up", 0, 1, "",
	  NULL },
	{ "weight-decay", OPTION_REAL, 0, "X", "0", "AdamW's, decoupled", 0, 1e6, "", NULL },
	{ "adam-beta1", OPTION_REAL, OPTION_ABOVE_ZERO, "X", "0.9", "AdamW's", 0, 0.99999999, "",
	  NULL },
	{ "adam-beta2", OPTION_REAL, OPTION_ABOVE_ZERO, "X", "0.999", "AdamW's", 0, 0.99999999, "",
	  NULL },
	{ "adam-epsilon", OPTION_REAL, OPTION_ABOVE_ZERO, "X", "1e-8", "AdamW's", 0, 1, "", NULL },
	{ "max-grad-norm", OPTION_REAL, 0, "X", "1.0", "clip the gradient; 0: never", 0, 1e30, "",
	  NULL },
	{ "batch-tokens", OPTION_INT, OPTION_COMMON, "N", "8192", "tokens of a micro-batch", 2, BIG,
	  "", NULL },
	{ "batch-size", OPTION_INT, 0, "N", NULL, "rows of a micro-batch, instead", 1, BIG,
	  "per-device-train-batch-size", NULL },
	{ "gradient-accumulation-steps", OPTION_INT, 0, "N", "1", "micro-batches of a step", 1,
	  65536, "", NULL },
	{ "epochs", OPTION_REAL, OPTION_COMMON | OPTION_ABOVE_ZERO, "X", "3",
	  "passes over the data", 0, 0, "num-train-epochs", NULL },
	{ "max-steps", OPTION_INT, OPTION_COMMON, "N", NULL, "stop after N steps", -1, BIG, "",
	  NULL },
	{ "shuffle", OPTION_SWITCH, 0, NULL, "on", "new order of the rows in each epoch", 0, 0, "",
	  NULL },
	{ "seed", OPTION_INT, OPTION_COMMON, "N", "42", "of the order and the new adapter", 0, 9e15,
	  "", NULL },
	{ .name = NULL },
};

static const struct option course[] = {
	{ "logging-steps", OPTION_INT, 0, "N", "1", "a log line every N steps", 1, BIG, "", NULL },
	{ "eval-steps", OPTION_INT, 0, "N", NULL, "evaluate every N steps (each epoch)", 1, BIG, "",
	  NULL },
	{ "save-steps", OPTION_INT, OPTION_COMMON, "N", "200", "checkpoint every N steps", 1, BIG,
	  "", NULL },
	{ "save-total-limit", OPTION_INT, 0, "N", "2", "checkpoints to keep", 1, BIG, "", NULL },
	{ "max-hours", OPTION_REAL, OPTION_ABOVE_ZERO, "X", NULL, "save and stop after X hours", 0,
	  0, "", NULL },
	{ "on-nan", OPTION_CHOICE, 0, "stop|skip", "stop", "at a non-finite loss or gradient", 0, 0,
	  "", NULL },
	{ "adapter-format", OPTION_CHOICE, 0, "peft|per-expert|kt", "peft", "form of the files", 0,
	  0, "", "peft" },
	{ "trace", OPTION_TEXT, 0, "FILE", NULL, "record the task graph", 0, 0, "", "" },
	{ .name = NULL },
};

const struct option options_machine[] = {
	{ "threads", OPTION_INT, OPTION_COMMON, "N", NULL, "workers (all cores)", 1, 65536,
	  "workers kt-num-threads cpu-infer", NULL },
	{ "numa", OPTION_TEXT, 0, "auto|off|N", "auto", "parts that the experts are split into", 0,
	  0, "parts", NULL },
	{ "memory-limit", OPTION_SIZE, OPTION_COMMON, "SIZE", NULL,
	  "refuse to plan for more (what is free)", 0, 0, "", NULL },
	{ "weights", OPTION_CHOICE, 0, "keep|bf16|int8|int4|fp8", "keep", "format of the weights",
	  0, 0, "", "keep" },
	{ "policy", OPTION_TEXT, 0, "NAME", "lws", "StarPU's scheduling policy", 0, 0, "", NULL },
	{ .name = NULL },
};

const struct option options_general[] = {
	{ "config", OPTION_TEXT, OPTION_COMMON | OPTION_TRANSIENT, "FILE", NULL,
	  "YAML or JSON; flags override it", 0, 0, "", NULL },
	{ "quiet", OPTION_FLAG, OPTION_TRANSIENT, NULL, NULL, "only errors and warnings", 0, 0, "",
	  NULL },
	{ "json", OPTION_FLAG, OPTION_TRANSIENT, NULL, NULL, "the result as JSON on stdout", 0, 0,
	  "", NULL },
	{ .name = NULL },
};

static const struct option machine_training[] = {
	{ "recompute", OPTION_CHOICE, 0, "auto|never|always", "auto", "of activations", 0, 0, "",
	  "auto" },
	{ "pipeline", OPTION_CHOICE, 0, "overlap|sequential", "overlap", "of steps", 0, 0, "",
	  NULL },
	{ .name = NULL },
};

const struct option_group train_groups[] = {
	{ "What", what },
	{ "Data", options_data },
	{ "Method", method },
	{ "Optimisation", optimisation },
	{ "Run", course },
	{ "Machine", options_machine },
	{ "Schedule", machine_training },
	{ "General", options_general },
	{ NULL, NULL },
};
