/* SPDX-License-Identifier: Apache-2.0 */
/* training_loss.svg: loss by step, its running mean, evaluation losses. Light and dark. */
#ifndef MOE_TRAIN_PLOT_H
#define MOE_TRAIN_PLOT_H

#include "train/log.h"

enum moe_status moe_train_plot(const struct moe_train_log *log);

#endif
