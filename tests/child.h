/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Code that may hang, abort or change the process (environment, engine) runs in a forked child with
 * a time limit. The child is forked while no engine is open; its checks count as the parent's.
 */
#ifndef MOE_TESTS_CHILD_H
#define MOE_TESTS_CHILD_H

#include "moesaic.h"
#include "tests/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOW 10 /* sanitizers */
#else
#define SLOW 1
#endif

bool check_at(bool good, const char *what, const char *file, int line);
bool check_error_at(enum moe_status got, enum moe_status want, const char *text, const char *what,
		    const char *file, int line);
int check_failures(void); /* of this process, if it is a child */

#define CHECK(cond) check_at((cond), #cond, __FILE__, __LINE__)
#define CHECK_OK(call) check_at((call) == MOE_OK, #call, __FILE__, __LINE__)

/* A failing call: its status, and what its text must say. */
#define CHECK_ERROR(call, want, text)                                                              \
	check_error_at((call), (want), (text), #call, __FILE__, __LINE__)

/* Waits for a child, with exit status 0 as success. */
bool child_ended(pid_t pid, const char *name);
/* Runs run(arg) in a child; true when it returned within the limit and no check failed. */
bool in_child(const char *name, void (*run)(const void *arg), const void *arg);
/* A folder below the test's own for StarPU's files; one per topology. */
void use_starpu_home(const char *name);
double cpu_seconds(void); /* of this process */
struct moe_engine *open_with(int workers, int parts, const char *policy); /* with the table under test */
struct moe_engine *open_isa(const char *isa, int workers, int parts);
struct moe_engine_info info_of(struct moe_engine *e);

#endif
