/* SPDX-License-Identifier: Apache-2.0 */
/* A calibration: rates of one that is accepted are finite and above 0. */
#include "tests/fuzz/fuzz.h"

#include "model/machine_file.h"

#include <math.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct moe_machine_rates_file f;

	if (moe_machine_file_read(fuzz_file(data, size, "machine.json"), &f) != MOE_OK)
		return 0;
	for (int i = 0; i < f.n_isas; i++)
		if (!(f.isa[i].gemm_gflops[0][0] > 0) || !isfinite(f.isa[i].gemm_gflops[0][0]))
			__builtin_trap();
	return 0;
}
