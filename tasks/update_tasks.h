/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tasks around an update of parameters: gradient norms, AdamW, exchange with the caller's arrays, packing. params and
 * grads are [n]; norm NULL without clipping.
 */
#ifndef MOE_TASKS_UPDATE_TASKS_H
#define MOE_TASKS_UPDATE_TASKS_H

#include "codelets/exchange.h"
#include "codelets/repack.h"
#include "codelets/update.h"
#include "tasks/task.h"

enum moe_status moe_task_grad_norm(const struct moe_context *c, const struct moe_update_args *a, int group,
				   int part, struct moe_tensor *const *grads, int n,
				   struct moe_tensor *out);
enum moe_status moe_task_grad_total(const struct moe_context *c, const struct moe_grad_total_args *a,
				    struct moe_tensor *in, struct moe_tensor *out);
enum moe_status moe_task_update(const struct moe_context *c, const struct moe_update_args *a, int group,
				int part, struct moe_tensor *const *grads, int n_grads,
				struct moe_tensor *norm, struct moe_tensor *const *params, int n_params);
/* publish: grads are read; give: params are read; take: params are written. Either list may be empty. */
enum moe_status moe_task_exchange(const struct moe_context *c, const struct moe_exchange_args *a,
				  struct moe_tensor *const *grads, int n_grads,
				  struct moe_tensor *const *params, int n_params);
/* a->adamw.grad_scale times the gradients of a's ranges. */
enum moe_status moe_task_rescale(const struct moe_context *c, const struct moe_update_args *a, int group,
				 int part, struct moe_tensor *const *grads, int n);
/* Packs masters that an update has changed, or a source; weights: those of the (part, group), with resident
 * copies. */
enum moe_status moe_task_repack(const struct moe_context *c, const struct moe_repack_args *a,
				struct moe_tensor *masters, struct moe_tensor *weights);
/* The same of quantised weights that are trained, of all parts of a group (a->part -1). */
enum moe_status moe_task_requantise(const struct moe_context *c, const struct moe_repack_args *a,
				    struct moe_tensor *const *masters, struct moe_tensor *const *weights, int n);

#endif
