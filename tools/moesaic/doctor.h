/* SPDX-License-Identifier: Apache-2.0 */
/* What moesaic doctor knows: the library's part and what the operating system says. */
#ifndef MOESAIC_TOOL_DOCTOR_H
#define MOESAIC_TOOL_DOCTOR_H

#include "tools/moesaic/cli.h"

#define DOCTOR_NODES 64

/* -1 and "": unknown. */
struct doctor_system {
	int64_t memory, available, memory_limit; /* bytes; limit of the control group, -1: none */
	double cpu_limit;			 /* CPUs of the control group, -1: none */
	int allowed_cpus;			 /* of this process */
	char huge_pages[32];			 /* always, madvise or never */
	char governor[32];
	double load;		       /* of the last minute */
	int64_t address_space, locked; /* ulimit -v and -l in bytes, -1: unlimited */
	int64_t open_files;	       /* ulimit -n */
	int numa_balancing;	       /* of the kernel: 1 on, -1 unknown */
	int n_nodes;		       /* entries below: nodes with memory */
	int64_t node_memory[DOCTOR_NODES], node_free[DOCTOR_NODES];
};

enum doctor_level { DOCTOR_NOTE = 0, DOCTOR_WARNING, DOCTOR_ERROR };

struct doctor_problem {
	enum doctor_level level;
	char *text, *type; /* type: what to type about it; both owned */
};

#define DOCTOR_PROBLEMS 24

struct doctor {
	struct moe_machine_info machine;
	struct doctor_system system;
	char *python;	    /* that reads text and chats; owned */
	bool python_ready;  /* with its packages */
	int workers, parts; /* that an engine starts here; 0: none */
	struct doctor_problem problem[DOCTOR_PROBLEMS];
	int n_problems;
};

void doctor_look(struct doctor_system *s);
void doctor_diagnose(struct doctor *d);
/* Adds a problem; both texts are taken over. */
void doctor_add(struct doctor *d, enum doctor_level level, char *text, char *type);
const char *doctor_level_name(enum doctor_level level);

void doctor_print_text(const struct doctor *d, bool rates);
void doctor_print_json(const struct doctor *d);

#endif
