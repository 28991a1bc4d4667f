/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/kernels/kernels_bench.h"

#include <stdio.h>
#include <stdlib.h>

#define BF16_FLOPS_PER_CLOCK 64 /* one vdpbf16ps of 512 bits per cycle */
#define QUIET 0.95		/* of them that the register loop must reach */

double quantile(const struct samples *s, double q)
{
	struct samples sorted = *s;
	double at = q * (s->n - 1);
	int i = (int)at;

	if (!s->n)
		return 0;
	sort_values(sorted.value, s->n);
	return i + 1 < s->n ? sorted.value[i] + (at - i) * (sorted.value[i + 1] - sorted.value[i])
			    : sorted.value[i];
}

static double best(const struct samples *s)
{
	return quantile(s, 1);
}

/* The machine is too busy, or throttled, for a verdict. */
static bool is_void(const struct roofs *r, const char *isa)
{
	double expected = BF16_FLOPS_PER_CLOCK * quantile(&r->clock, 0.5);

	return !strcmp(isa, "avx512_bf16") && quantile(&r->peak, 0.5) < QUIET * expected;
}

/* What a point must reach: a share of the flop roof, or of the DRAM roof; 0: no bar. */
struct bar {
	double flops, read;
};

static struct bar bar_of(const struct point *p)
{
	bool forward = p->direction == FORWARD;

	if (!strcmp(p->isa, "avx2") || !strcmp(p->isa, "avx512f"))
		return (struct bar){ p->m >= 16 ? 0.88 : 0, 0 };
	if (strcmp(p->isa, "avx512_bf16"))
		return (struct bar){ 0, 0 };
	if (!strcmp(p->shape.model, "qwen3")) {
		if (p->m <= 2)
			return (struct bar){ 0, forward ? 0.90 : 0.80 };
		return (struct bar){ p->m < 8 ? 0 : forward ? 0.92 : 0.87, 0 };
	}
	return (struct bar){ p->m < 16 ? 0 : forward ? 0.90 : 0.85, 0 };
}

/* Flop/s that are possible when every weight comes from DRAM once. */
static double cold_roof(const struct point *p, const struct roofs *r)
{
	return MOE_MIN(quantile(&r->peak, 0.5), best(&r->read) * p->flops / p->bytes);
}

struct shares {
	double warm, cold, read;
};

static struct shares shares_of(const struct point *p, const struct roofs *r)
{
	double cold = quantile(&p->cold, 0.5);

	return (struct shares){ quantile(&p->warm, 0.5) / quantile(&r->peak, 0.5),
				cold / cold_roof(p, r),
				cold * p->bytes / p->flops / best(&r->read) };
}

static const char *verdict_of(const struct point *p, const struct roofs *r)
{
	struct shares s = shares_of(p, r);
	struct bar bar = bar_of(p);

	if (is_void(r, p->isa))
		return "void";
	if (!bar.flops && !bar.read)
		return "-";
	if (bar.read)
		return s.read >= bar.read ? "holds" : "misses";
	if (s.warm < bar.flops)
		return "misses";
	return s.cold >= bar.flops ? "holds" : "misses cold";
}

static void json_interval(const char *name, const struct samples *s)
{
	printf("\"%s\": [%.2f, %.2f, %.2f]", name, quantile(s, 0.1) / 1e9, quantile(s, 0.5) / 1e9,
	       quantile(s, 0.9) / 1e9);
}

void report_header(const struct roofs *r, const struct moe_tiles *t, bool json)
{
	double clock = quantile(&r->clock, 0.5), peak = quantile(&r->peak, 0.5);

	if (json)
		return;
	printf("\n%s: %.1f GFLOP/s from registers (10..90 %%: %.1f..%.1f) at %.2f GHz = %.1f flop "
	       "per cycle; DRAM %.1f GB/s (best of %d, median %.1f)%s\n",
	       t->name, peak / 1e9, quantile(&r->peak, 0.1) / 1e9, quantile(&r->peak, 0.9) / 1e9,
	       clock / 1e9, peak / clock, best(&r->read) / 1e9, r->read.n,
	       quantile(&r->read, 0.5) / 1e9,
	       is_void(r, t->name) ? "; void: the register loop is too slow" : "");
	printf("%-9s %-3s %4s  %24s %5s  %24s %5s  %6s %5s  %s\n", "n x k", "", "m",
	       "warm GFLOP/s (10..90 %)", "roof", "cold GFLOP/s (10..90 %)", "roof", "GB/s", "DRAM",
	       "bar");
}

static void print_text(const struct point *p, const struct roofs *r, const char *verdict)
{
	struct shares s = shares_of(p, r);
	const struct samples *c = &p->cold, *w = &p->warm;
	struct bar bar = bar_of(p);

	printf("%4dx%-4d %-3s %4d  %8.1f (%5.1f..%5.1f) %4.0f%%  %8.1f (%5.1f..%5.1f) %4.0f%%  "
	       "%6.1f "
	       "%4.0f%%  ",
	       p->shape.n, p->shape.k, p->direction == FORWARD ? "fwd" : "bwd", p->m,
	       quantile(w, 0.5) / 1e9, quantile(w, 0.1) / 1e9, quantile(w, 0.9) / 1e9, 100 * s.warm,
	       quantile(c, 0.5) / 1e9, quantile(c, 0.1) / 1e9, quantile(c, 0.9) / 1e9, 100 * s.cold,
	       quantile(c, 0.5) * p->bytes / p->flops / 1e9, 100 * s.read);
	if (bar.flops || bar.read)
		printf("%.0f%% of %s: %s\n", 100 * (bar.read ? bar.read : bar.flops),
		       bar.read ? "DRAM" : "the roof", verdict);
	else
		printf("%s\n", verdict);
	fflush(stdout);
}

bool report_point(const struct point *p, const struct roofs *r, bool json)
{
	const char *verdict = verdict_of(p, r);

	if (!json) {
		print_text(p, r, verdict);
		return strncmp(verdict, "misses", 6) != 0;
	}
	printf("{\"isa\": \"%s\", \"n\": %d, \"k\": %d, \"direction\": \"%s\", \"m\": %d, ", p->isa,
	       p->shape.n, p->shape.k, p->direction == FORWARD ? "fwd" : "bwd", p->m);
	json_interval("warm_gflops", &p->warm);
	printf(", ");
	json_interval("cold_gflops", &p->cold);
	printf(", \"cold_gbs\": %.2f, \"peak_gflops\": %.2f, \"dram_gbs\": %.2f, \"clock_ghz\": "
	       "%.3f, "
	       "\"verdict\": \"%s\"}\n",
	       quantile(&p->cold, 0.5) * p->bytes / p->flops / 1e9, quantile(&r->peak, 0.5) / 1e9,
	       best(&r->read) / 1e9, quantile(&r->clock, 0.5) / 1e9, verdict);
	fflush(stdout);
	return strncmp(verdict, "misses", 6) != 0;
}
