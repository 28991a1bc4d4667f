/* SPDX-License-Identifier: Apache-2.0 */
/* --config FILE: YAML, or JSON where the first byte is an opening brace; with all flags of train.
 */
#include "tests/fuzz/fuzz.h"

#include "tools/moesaic/commands.h"

static const struct option_group groups[] = {
	TRAIN_GROUPS,
	{ NULL, NULL },
};
static const struct command command = { .name = "fuzz", .groups = groups };
const struct command *const cli_commands[] = { &command, NULL };
const struct cli_program cli_programs[] = { { NULL, NULL, NULL } };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const char *name = size && data[0] == '{' ? "a.json" : "a.yaml";
	char *path = (char *)(uintptr_t)fuzz_file(data, size, name);
	char *argv[] = { "--model", "m", "--quiet", "--config", path };
	struct settings s;

	settings_parse(&s, &command, 5, argv);
	settings_free(&s);
	return 0;
}
