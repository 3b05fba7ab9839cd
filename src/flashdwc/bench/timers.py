"""Timing that compares: every candidate runs in each round, in one process, so that drift and load hit all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

MIN_ROUNDS = 5
MATTER_OF_CACHES = 20.0  # milliseconds: longer runs do not feel what the caches held


@dataclass(frozen=True)
class Timing:
    median: float  # milliseconds
    p20: float
    p80: float
    samples: int

    @classmethod
    def of(cls, milliseconds: list[float]) -> Timing:
        ordered = sorted(milliseconds)

        def quantile(q: float) -> float:
            position = q * (len(ordered) - 1)
            low = int(position)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (position - low) * (ordered[high] - ordered[low])

        return cls(quantile(0.5), quantile(0.2), quantile(0.8), len(ordered))


def compare(
    candidates: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    seconds: float = 0.5,  # to spend on all candidates together, after one warm-up each
    max_rounds: int = 60,
    cold: bool = True,  # CUDA: the L2 cache is emptied before each run
) -> dict[str, Timing]:
    """Times callables against each other. They must be ready: compiled, and run once without an error."""
    if device.type == "cuda":
        return _compare_cuda(candidates, device, seconds, max_rounds, cold)
    return _compare_cpu(candidates, seconds, max_rounds)


def _compare_cpu(candidates: Mapping[str, Callable[[], object]], seconds: float, max_rounds: int) -> dict[str, Timing]:
    def once(run: Callable[[], object], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats * 1e3

    first = {name: once(run, 1) for name, run in candidates.items()}
    repeats = {name: max(1, round(1.0 / max(ms, 1e-3))) for name, ms in first.items()}  # a sample lasts 1 ms or more
    warmed = {name for name, ms in first.items() if ms < MATTER_OF_CACHES}
    round_ms = sum(first[name] * (repeats[name] + (name in warmed)) for name in candidates)
    rounds = _rounds(round_ms, seconds, max_rounds)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(rounds):
        for name in _rotated(list(candidates), index):
            if name in warmed:  # else one would find there what the one before has left, another not
                candidates[name]()
            samples[name].append(once(candidates[name], repeats[name]))
    return {name: Timing.of(values) for name, values in samples.items()}


def _compare_cuda(
    candidates: Mapping[str, Callable[[], object]],
    device: torch.device,
    seconds: float,
    max_rounds: int,
    cold: bool,
) -> dict[str, Timing]:
    with torch.cuda.device(device):
        flush = torch.empty(_flush_bytes(device) if cold else 1, dtype=torch.uint8, device=device)

        def once(run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if cold:
                flush.zero_()
            start.record()
            run()
            end.record()
            return start, end

        def elapsed(events: tuple[torch.cuda.Event, torch.cuda.Event]) -> float:
            return events[0].elapsed_time(events[1])

        first = [once(run) for run in candidates.values()]
        torch.cuda.synchronize()
        rounds = _rounds(sum(map(elapsed, first)) + 0.1 * len(first), seconds, max_rounds)
        pending: dict[str, list] = {name: [] for name in candidates}
        for index in range(rounds):
            for name in _rotated(list(candidates), index):
                pending[name].append(once(candidates[name]))
            torch.cuda.synchronize()  # keeps the queue short: a full one would make launches wait
        return {name: Timing.of([elapsed(events) for events in runs]) for name, runs in pending.items()}


def graphed(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Captures a callable in a CUDA graph: replaying it costs the GPU time alone, without the host's."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches at best, measured in this run."""

    copy_gbytes: float  # GB/s, reads and writes of a large copy together
    gemm_tflops: dict[str, float]  # by dtype name; "tf32" where convolutions may use it

    def rate(self, dtype: str) -> float:
        """TFLOP/s for a convolution in ``dtype``. Half precision may be computed in float32, where that is faster."""
        allowed = {"fp64": ("fp64",), "fp32": ("fp32", "tf32")}.get(dtype, (dtype, "fp32"))
        return max(self.gemm_tflops.get(name, 0.0) for name in allowed)

    def floor_ms(self, flops: int, bytes_moved: int, dtype: str) -> tuple[float, str]:
        """The least time for so much work, and whether ``memory`` or ``compute`` sets it."""
        memory, compute = bytes_moved / self.copy_gbytes / 1e6, flops / self.rate(dtype) / 1e9
        return max(memory, compute), "memory" if memory >= compute else "compute"


def measure_ceilings(device: torch.device, dtypes: Mapping[str, torch.dtype], *, quick: bool = False) -> Ceilings:
    """Measures copy bandwidth and matrix-product rates: ``dtypes``, float32, and TF32 where convolutions may use it."""
    on_cuda = device.type == "cuda"
    size = (1 << 30 if on_cuda else 1 << 27) >> (2 if quick else 0)
    source = torch.empty(size, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    seconds = 0.1 if quick else 0.4
    copy = _best(lambda: target.copy_(source), device, seconds)
    rates = {}
    for name, dtype in {"fp32": torch.float32, **dtypes}.items():
        if on_cuda:
            edge = 4096 if dtype.itemsize >= 4 else 8192
        else:
            edge = 1024 if dtype.itemsize >= 4 and not quick else 512  # half precision may be very slow on a CPU
        with _matmul_precision("ieee"):
            rates[name] = _gemm_tflops(edge, dtype, device, seconds)
        if name == "fp32" and tf32_allowed(device):
            with _matmul_precision("tf32"):
                rates["tf32"] = _gemm_tflops(edge, dtype, device, seconds)
    return Ceilings(2 * size / copy / 1e6, rates)


def tf32_allowed(device: torch.device) -> bool:
    """Whether PyTorch's switches let float32 convolutions on this device round their operands to TF32."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return torch.backends.cudnn.allow_tf32


class _matmul_precision:
    def __init__(self, precision: str) -> None:
        self.precision = precision

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.before


def _gemm_tflops(edge: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    a = torch.randn(edge, edge, device=device).to(dtype)
    b = torch.randn(edge, edge, device=device).to(dtype)
    return 2 * edge**3 / _best(lambda: a @ b, device, seconds) / 1e9


def _best(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    run()
    timing = compare({"run": run}, device, seconds=seconds, max_rounds=20, cold=False)["run"]
    return timing.p20


def _rounds(round_ms: float, seconds: float, max_rounds: int) -> int:
    affordable = int(seconds * 1e3 / max(round_ms, 1e-3))
    if round_ms > 2e3:  # a case of seconds: the warm-up has shown enough of its spread
        return max(1, min(affordable, max_rounds))
    return max(min(MIN_ROUNDS, max_rounds), min(affordable, max_rounds))


def _rotated(names: list[str], index: int) -> list[str]:
    start = index % len(names)
    return names[start:] + names[:start]


def _flush_bytes(device: torch.device) -> int:
    """Enough to empty the L2 cache, and to take longer than the host needs to put the next launches into the queue."""
    return max(4 * torch.cuda.get_device_properties(device).L2_cache_size, 64 << 20)
