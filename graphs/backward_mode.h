/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the backward of the experts finds its weights (grad_x needs W transposed): which mode is
 * the cheapest for a layer is predicted from the machine's rates. Only the decision; pure.
 */
#ifndef MOE_GRAPHS_BACKWARD_MODE_H
#define MOE_GRAPHS_BACKWARD_MODE_H

#include "graphs/cut.h"

enum moe_backward_mode {
	MOE_BACKWARD_DIRECT = 0, /* the one packed layout serves both directions */
	MOE_BACKWARD_SHARED,	 /* a ring of N layers of backward panels, repacked ahead */
	MOE_BACKWARD_RESIDENT,	 /* a second copy */
	MOE_BACKWARD_MODES
};

struct moe_backward_params {
	struct moe_load load;
	int layers;	/* with experts that have a backward */
	int ring;	/* N of shared; 0: 2 */
	bool refilled;	/* a ring is filled for every backward, even one that holds all layers (a block) */
	int64_t memory; /* bytes that the mode may take; < 0: any */
};

struct moe_backward_cost {
	double us; /* of one layer's backward GEMMs and repack, all workers at it */
	double repack_us, hidden_us; /* of them: repacking, and what fits into idle time instead */
	int64_t bytes;		     /* of weights beside the one copy */
	bool fits;
};

struct moe_backward_choice {
	enum moe_backward_mode mode;
	int ring;
	int64_t memory;
	bool only_direct; /* the kernels have no other */
	struct moe_backward_cost cost[MOE_BACKWARD_MODES];
};

/* "direct", "shared:2", "resident"; *ring only of shared (without a number: 2). MOE_ERR_CONFIG. */
enum moe_status moe_backward_mode_parse(const char *text, enum moe_backward_mode *mode, int *ring);

/*
 * The cheapest that fits; a mode must be at least 2 % faster than one with less memory, and 10 % more where it
 * doubles the weights (in proportion for parts of them). direct always fits.
 */
void moe_backward_choose(const struct moe_backward_params *p, const struct moe_machine *m,
			 struct moe_backward_choice *out);
/*
 * What to do where the user says text: NULL or "auto" is moe_backward_choose. Another one that fails or
 * is impossible is an error that names it: MOE_ERR_CONFIG, MOE_ERR_NOFIT, MOE_ERR_UNSUPPORTED (the
 * process's kernel table has no transposed copies). A ring with room for all layers is filled once: resident.
 */
enum moe_status moe_backward_select(const char *text, const struct moe_backward_params *p,
				    const struct moe_machine *m, struct moe_backward_choice *out);
/* "direct", "shared:2", "resident"; returns buf. */
char *moe_backward_text(const struct moe_backward_choice *c, char *buf, size_t size);
/* One line per mode, the chosen one marked with "*"; returns buf. */
char *moe_backward_explain(const struct moe_backward_choice *c, char *buf, size_t size);

#endif
