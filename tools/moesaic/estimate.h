/* SPDX-License-Identifier: Apache-2.0 */
/* What moesaic estimate found out, for printing. */
#ifndef MOESAIC_TOOL_ESTIMATE_H
#define MOESAIC_TOOL_ESTIMATE_H

#include "tools/moesaic/cli.h"

#define ESTIMATE_LEAST_TOKENS 256 /* of a micro-batch that is worth proposing */

struct estimate_result {
	struct moe_estimate_params params;
	struct moe_estimate found;
	int64_t limit; /* bytes that a run may take */
	int cpus;      /* of this machine */

	/* with --data; 0 without */
	int64_t data_tokens;
	double epochs, hours;

	/* What would make it fit: flags and what they need; "" where it fits. Flags "": a larger
	 * machine. */
	char change[128];
	char least_with[32]; /* flags of the least that was tried, beside the smallest micro-batch */
	int64_t change_total;
};

bool estimate_fits(const struct estimate_result *r);
void estimate_print_text(const struct settings *s, const struct estimate_result *r);
void estimate_print_json(const struct estimate_result *r);

#endif
