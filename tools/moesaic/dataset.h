/* SPDX-License-Identifier: Apache-2.0 */
/* LLaMA-Factory's dataset names. */
#ifndef MOESAIC_TOOL_DATASET_H
#define MOESAIC_TOOL_DATASET_H

#include "tools/moesaic/cli.h"

/*
 * --dataset and --eval-dataset, names in dataset-dir/dataset_info.json, become --data and
 * --eval-data, their columns --columns OURS=THEIRS@FILE. Names may be separated by commas.
 */
int dataset_resolve(struct settings *s);

#endif
