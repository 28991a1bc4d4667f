/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/cost.h"

#include <math.h>

static _Thread_local struct moe_work *counting; /* NULL: predicting */

void moe_work_begin(struct moe_work *w)
{
	*w = (struct moe_work){ 0 };
	counting = w;
}

void moe_work_end(void)
{
	counting = NULL;
}

double moe_cost_rate(const struct moe_machine *m, enum moe_gemm direction, double rows)
{
	const double *rate = m->rates.gemm_gflops[direction];
	double x = log2(MOE_MAX(rows, 1.0));
	int i = MOE_MIN((int)x, MOE_RATE_POINTS - 1);

	if (i == MOE_RATE_POINTS - 1)
		return rate[i];
	return rate[i] * pow(rate[i + 1] / rate[i], x - i);
}

/* That one worker reads. */
static double read_gbps(const struct moe_machine *m)
{
	return MOE_MIN(m->read_gbps, m->read_all_gbps / MOE_MAX(m->workers, 1));
}

double moe_cost_gemm_us(const struct moe_machine *m, enum moe_gemm direction, double rows, double n,
			double k, double bytes_per_weight)
{
	double compute, memory;

	if (!(rows > 0))
		return 0;
	if (counting) {
		counting->flops += 2 * rows * n * k;
		counting->weights += n * k * bytes_per_weight;
		return 0;
	}
	compute = 2 * rows * n * k / (moe_cost_rate(m, direction, rows) * 1e3);
	memory = n * k * bytes_per_weight / (read_gbps(m) * 1e3);
	return MOE_MAX(compute, memory);
}

/* Of what a worker has alone. */
static double memory_share(const struct moe_machine *m)
{
	return read_gbps(m) / m->read_gbps;
}

double moe_cost_stream_us(const struct moe_machine *m, double read, double written)
{
	/* a copy reads and writes: what remains beside the reading is the writing */
	double write_ns = MOE_MAX(1 / m->copy_gbps - 1 / m->read_gbps, 0.5 / m->copy_gbps);

	if (counting) {
		counting->read += read;
		counting->written += written;
		return 0;
	}
	return (read / m->read_gbps + written * write_ns) / (memory_share(m) * 1e3);
}

double moe_cost_pack_us(const struct moe_machine *m, double bytes)
{
	double memory = m->copy_gbps * memory_share(m);

	if (counting) {
		counting->read += bytes;
		counting->written += bytes;
		return 0;
	}
	return bytes / (MOE_MIN(m->rates.pack_gbps, memory) * 1e3);
}

double moe_cost_cycles_us(const struct moe_machine *m, double cycles)
{
	return cycles / (m->clock_ghz * 1e3);
}

double moe_cost_task_us(const struct moe_machine *m)
{
	return m->workers > 1 ? m->task_all_us : m->task_us;
}
