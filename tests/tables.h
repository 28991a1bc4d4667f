/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernel tables under test, one after the other. Suites that check numbers run once per table that
 * this CPU supports; engines that they open (child.h, model_check.h) ask for that table by name, so what
 * MOESAIC_ISA says does not matter.
 */
#ifndef MOE_TESTS_TABLES_H
#define MOE_TESTS_TABLES_H

#include "codelets/kernels/kernels.h"
#include "tests/harness.h"

/* Relative L2 errors against f64: f32 for ref, else what bf16 operands allow. */
struct table_tolerance {
	double out, grad_x, grad_weights, grad, loss;
};

/* Runs `run` under every supported table, or those that MOESAIC_TEST_TABLES names (ThreadSanitizer: the exact and the best one). Outside of it: the table that an engine takes by itself. */
void each_table(void (*run)(void));
/*
 * The same for whole models; under AddressSanitizer too, the exact and the best table alone: what the others do with memory,
 * suites of kernels, layers and blocks see.
 */
void each_model_table(void (*run)(void));
bool is_model_table(const struct moe_kernels *k);
/* Under the exact table alone: for checks finer than bf16. */
void exact_table(void (*run)(void));

const struct moe_kernels *table(void);
/* For moe_engine_params.isa; NULL outside of each_table. */
const char *table_isa(void);
const struct table_tolerance *table_tolerance(void);
/* The same where bf16 holds the weights and inputs: tables of f32 panels round nothing in such a forward. */
const struct table_tolerance *table_tolerance_held(void);
/* Weights and kept activations have 16 bits. */
bool table_is_packed(void);
/*
 * Long lists of cases run whole under the exact and the best table, and everywhere in full tests; the
 * others take every n-th.
 */
bool table_takes(size_t i, size_t n);
/* The same, but whole under the best table alone: for runs that differ in time, not in arithmetic. */
bool best_table_takes(size_t i, size_t n);

#endif
