# SPDX-License-Identifier: Apache-2.0
"""Medians with intervals, and what a run says about the bars that the project set itself."""

import dataclasses

# (shape, tokens) -> how many times faster than kt-kernel on one core; "kt_default" with its repack and recompute
ONE_CORE = {
    ("qwen3", 64, "kt"): 2.0,
    ("qwen3", 512, "kt"): 1.6,
    ("qwen3", 2048, "kt"): 1.25,
    ("qwen3", 512, "kt_default"): 3.4,
    ("dsv3", 512, "kt"): 1.08,
}
# (shape, tokens) -> two workers: times faster than the better of kt and PyTorch; at most so many times the bare GEMMs
TWO_WORKERS = {("qwen3", 64): (2.5, 1.15), ("qwen3", 512): (2.0, 1.16), ("qwen3", 2048): (1.75, 1.12)}
# experts' format -> how many times faster than kt-kernel's same format on one core, T = 256 of qwen3e16
FORMATS = {"int8": 2.0, "int4": 2.0, "int4_row": 2.0, "fp8": 2.7, "mxfp4": 3.5}
FORMAT_SHAPE = ("qwen3e16", 256)
IDLE_AT_MOST = 0.03
BUSY_AT_MOST = 2.6  # times the quiet time with two busy processes beside it
OTHERS_AT_MOST = 0.1  # cores; wall times beside more say how spinning threads suffer, not what a library can do
BETTER_OF = ("kt", "torch_loop", "torch_grouped")

# kt's backward also runs on the thread that feeds its pool, and that thread spins: what its own profiler attributes to it, as a
# share of the pool's time (one core, Zen 4). Tokens up to -> share.
KT_FEEDER = ((1, 0.16), (64, 0.11), (512, 0.05))
KT_FEEDER_BEYOND = 0.02


KT_FEEDER_SHAPES = ("dsv3", "qwen3e16")  # few experts and many rows of each: the last share, whatever the tokens


def quantile(values, q):
    values, at = sorted(values), q * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (at - low) * (values[high] - values[low])


@dataclasses.dataclass
class Interval:
    median: float
    low: float  # 10th percentile
    high: float  # 90th
    quartiles: tuple[float, float]

    @classmethod
    def of(cls, values):
        return cls(*(quantile(values, q) for q in (0.5, 0.1, 0.9)), (quantile(values, 0.25), quantile(values, 0.75)))

    def __format__(self, spec):
        return f"{self.median:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def ratios(above, below):
    """Round by round: a change of the machine's speed between rounds cancels."""
    return Interval.of([a / b for a, b in zip(above, below, strict=True)])


def feeder_share(shape, tokens):
    if shape in KT_FEEDER_SHAPES:
        return KT_FEEDER_BEYOND
    return next((share for limit, share in KT_FEEDER if tokens <= limit), KT_FEEDER_BEYOND)


def step_cpu_ms(name, sample, shape, tokens):
    """CPU time of a step: everything that computes or submits."""
    total = sum(value for key, value in sample.items() if key.endswith("_cpu_ms") and not key.startswith("bare"))
    if name.startswith("kt"):
        total += feeder_share(shape, tokens) * sample["backward_cpu_ms"]
    return total


def verdict(interval, bar, at_least=True):
    """The interval decides only where it lies on one side of the bar."""
    low, high = (interval.low >= bar, interval.high < bar) if at_least else (interval.high <= bar, interval.low > bar)
    return "holds" if low else "fails" if high else "not decided"


def _line(text, interval, bar, at_least=True):
    return {
        "bar": f"{text} {'>=' if at_least else '<='} {bar:g}",
        "measured": dataclasses.asdict(interval),
        "verdict": verdict(interval, bar, at_least),
    }


def _one_core(case, peers):
    if case["weights"] != "bf16":
        bar = FORMATS[case["weights"]] if (case["shape"], case["tokens"]) == FORMAT_SHAPE else None
        if bar and "kt" in peers:
            yield _line(f"{case['weights']}, one core, CPU time: kt / ours", peers["kt"]["cpu_ratio"], bar)
        return
    for (shape, tokens, name), bar in ONE_CORE.items():
        if (shape, tokens) == (case["shape"], case["tokens"]) and name in peers:
            yield _line(f"one core, CPU time: {name} / ours", peers[name]["cpu_ratio"], bar)


def _two_workers(case, peers, ours):
    bars = TWO_WORKERS.get((case["shape"], case["tokens"]))
    candidates = [name for name in BETTER_OF if name in peers]
    if bars and candidates:
        best = min(candidates, key=lambda name: peers[name]["step_ms"].median)
        note = "" if len(candidates) == len(BETTER_OF) else f" (of {', '.join(candidates)} only)"
        yield _line(f"better peer ({best}{note}) / ours", peers[best]["wall_ratio"], bars[0])
    if bars:
        yield _line("step / bare", ours["step_over_bare"], bars[1], False)
        yield _line("idle share", ours["idle_share"], IDLE_AT_MOST, False)


def _busy(case, peers, ours):
    if not ours.get("busy_factor"):
        return
    if case["busy"] == 2:
        yield _line("busy / quiet", ours["busy_factor"], BUSY_AT_MOST, False)
    if "kt" in peers:
        kt = peers["kt"]["busy_factor"]
        yield _line("busy / quiet, against kt's median", ours["busy_factor"], kt.median, False)


def verdicts(case, peers, ours, others_cores):
    """case: shape, tokens, weights, workers, busy; peers and ours: name of a figure -> Interval. One core is judged by CPU time, which
    others on the machine hardly change."""
    if case["workers"] == 1:
        return list(_one_core(case, peers))
    if case["workers"] != 2 or case["weights"] != "bf16":
        return []
    lines = [*_two_workers(case, peers, ours), *_busy(case, peers, ours)]
    if others_cores > OTHERS_AT_MOST:
        for line in lines:
            line["verdict"], line["reason"] = "not decided", f"others used {others_cores:.2f} cores"
    return lines
