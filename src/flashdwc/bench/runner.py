"""Runs suites: for each layer, dtype and direction, both layouts and every baseline are timed against each other."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .case import DIRECTIONS, DTYPES, LAYOUTS, Case
from .friendly import UserError
from .results import Row, Writer, available_memory, environment
from .sides import Operands, Run, calls, ours, torchs
from .suites import SUITES, Suite
from .timers import Ceilings, Timing, compare, graphed, measure_ceilings, tf32_allowed

QUICK_FLOPS = 2_000_000_000  # per forward pass, on a CPU; a GPU takes 100 times as much
BYTES_OF_SLACK = 256 << 20


@dataclass(frozen=True)
class Options:
    suites: Sequence[str]
    device: torch.device
    dtypes: Sequence[str] = ("fp32", "fp16", "bf16")
    layouts: Sequence[str] = ("channels_last", "contiguous")
    directions: Sequence[str] | None = None  # None: those of the suite
    batches: Sequence[int] | None = None  # None: those of the suite
    filter: str = ""  # a part of the case's name or shape
    limit: int | None = None  # cases per suite
    compile: bool = False
    cuda_graph: bool = False
    quick: bool = False  # batch 1, short timings, nothing large
    out: Path = Path("flashdwc-bench")


@dataclass(frozen=True)
class Job:
    suite: str
    case: Case
    dtype: str
    direction: str


def plan(options: Options) -> list[Job]:
    """Every measurement of a run. ``UserError`` where the filters leave nothing."""
    jobs = [
        Job(name, case, dtype, direction)
        for name in options.suites
        for case in _cases(SUITES[name], options)
        for dtype in options.dtypes
        for direction in options.directions or SUITES[name].directions
    ]
    if not jobs:
        raise UserError(f"no case of {', '.join(options.suites)} matches --filter {options.filter!r}", code=2)
    return jobs


def _cases(suite: Suite, options: Options) -> tuple[Case, ...]:
    batches = options.batches or ((1,) if options.quick else None)
    cases = suite.with_batches(batches) if batches else suite.cases
    wanted = options.filter.lower()
    kept = [case for case in cases if wanted in case.name.lower() or wanted in case.spec]
    return tuple(kept[: options.limit])


def open_run(options: Options, folder: Path) -> tuple[Writer, Ceilings]:
    """Measures the machine's ceilings and opens the result files."""
    ceilings = measure_ceilings(options.device, {name: DTYPES[name] for name in options.dtypes}, quick=options.quick)
    settings = {
        "suites": list(options.suites),
        "quick": options.quick,
        "cuda_graph": options.cuda_graph,
        "compile": options.compile,
        "tf32_convolutions": tf32_allowed(options.device),
        "cudnn_benchmark": True,
        "l2_cold": options.device.type == "cuda",
    }
    return Writer(folder, {**environment(options.device), **settings}, ceilings), ceilings


def prepare(jobs: Sequence[Job], options: Options) -> Iterator[str]:
    """Compiles our kernels for all jobs side by side, as one after the other they take longer than the measurements.

    Yields the specification of each layer when its kernels are ready. What fails here fails again, and is told, in ``measure``.
    """
    if options.device.type != "cuda":
        return
    wanted = dict.fromkeys((job.case, job.dtype, job.direction) for job in jobs if _too_large(job, options) is None)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tasks = {pool.submit(_prepare, *key, options): key[0].spec for key in wanted}
        try:
            for task in as_completed(tasks):
                yield tasks[task]
        finally:  # interrupted, it leaves the rest
            pool.shutdown(wait=False, cancel_futures=True)


def _prepare(case: Case, dtype: str, direction: str, options: Options) -> None:
    for layout in options.layouts:
        with suppress(Exception):
            operands = Operands.hollow(case, DTYPES[dtype], options.device, layout)
            for operator, arguments in calls(case, direction, operands):
                operator.prepare(*arguments)


def measure(job: Job, options: Options, ceilings: Ceilings) -> list[Row]:
    """The rows of one job, one per layout. A case that does not fit or fails says so in its rows; it never raises."""
    rows = {layout: _blank(job, layout) for layout in options.layouts}
    reason = _too_large(job, options)
    try:
        if reason is None:
            if options.compile:
                torch._dynamo.reset()  # all cases compile the same functions, which it does a few times only
            with _fastest_cudnn():
                _fill(rows, job, options, ceilings)
    except (MemoryError, torch.OutOfMemoryError) as error:
        reason = f"out of memory: {_first_line(error)}"
    except RuntimeError as error:  # PyTorch's CPU allocator raises a plain one
        if "not enough memory" not in str(error):
            raise
        reason = f"out of memory: {_first_line(error)}"
    if reason is not None:
        for row in rows.values():
            row.status, row.reason = "skipped", reason
    _tidy(job, options.device)
    return list(rows.values())


def _tidy(job: Job, device: torch.device) -> None:
    """Gives memory back after cases that take much of it; after others that would cost more time than the measurement."""
    if job.case.memory(DTYPES[job.dtype]) < available_memory(device) // 16:
        return
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _blank(job: Job, layout: str) -> Row:
    case = job.case
    return Row(
        job.suite, case.name, case.spec, *case.input_shape, *case.kernel,
        case.stride, case.dilation, case.multiplier, job.dtype, layout, job.direction,
    )  # fmt: skip


def _too_large(job: Job, options: Options) -> str | None:
    limit = QUICK_FLOPS * (100 if options.device.type == "cuda" else 1)
    if options.quick and job.case.flops("forward") > limit:
        return f"over {limit / 1e9:.0f} GFLOP, left out by --quick"
    needed, free = job.case.memory(DTYPES[job.dtype]) + BYTES_OF_SLACK, available_memory(options.device)
    if needed > free:
        return f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
    return None


def _fill(rows: dict[str, Row], job: Job, options: Options, ceilings: Ceilings) -> None:
    case, direction = job.case, job.direction
    made = Operands.make(case, DTYPES[job.dtype], options.device)
    operands = {layout: made.to(layout, sliced=case.sliced) for layout in LAYOUTS}
    candidates: dict[str, Run] = {}
    errors: dict[str, str] = {}
    expected: object = None
    for layout in LAYOUTS:
        kinds = (("torch", False), ("compile", True)) if options.compile else (("torch", False),)
        for kind, compiled in kinds:
            run = torchs(case, direction, operands[layout], compile=compiled, graphs=not options.cuda_graph)
            result, error = _try(run)
            if error is not None:
                errors[f"{kind}_{layout}"] = error
                continue
            candidates[f"{kind}_{layout}"] = run
            expected = result if expected is None and not compiled else expected
    for layout, row in rows.items():
        row.baseline_errors = errors
        _explain(row, case, direction, operands[layout])
        run = ours(case, direction, operands[layout])
        result, error = _try(run)
        if error is not None:
            row.status, row.reason = "failed", error
            continue
        candidates[f"ours_{layout}"] = run
        row.max_difference = None if expected is None else _difference(result, expected)
        del result
    del expected
    mode = "eager"
    if options.cuda_graph and options.device.type == "cuda":
        try:
            candidates = {name: graphed(run, options.device) for name, run in candidates.items()}
            mode = "cuda_graph"
        except RuntimeError as error:  # one cannot be captured: time them all alike
            errors["cuda_graph"] = _first_line(error)
    budget = 0.1 if options.quick else 0.5
    timings = compare(candidates, options.device, seconds=budget, max_rounds=10 if options.quick else 60)
    for layout, row in rows.items():
        if row.status == "ok":
            row.timing = mode
            _score(row, job, timings, timings[f"ours_{layout}"], ceilings)


def _score(row: Row, job: Job, timings: dict[str, Timing], mine: Timing, ceilings: Ceilings) -> None:
    row.ms, row.p20, row.p80, row.samples = mine.median, mine.p20, mine.p80, mine.samples
    flops, moved = job.case.flops(job.direction), job.case.bytes(job.direction, DTYPES[job.dtype])
    row.tflops, row.gbytes = flops / mine.median / 1e9, moved / mine.median / 1e6
    row.floor_ms, row.floor_bound = ceilings.floor_ms(flops, moved, job.dtype)
    row.floor_fraction = row.floor_ms / mine.median
    baselines = {name: timing for name, timing in timings.items() if not name.startswith("ours_")}
    row.baselines = {name: asdict(timing) for name, timing in baselines.items()}
    if baselines:
        row.best_baseline = min(baselines, key=lambda name: baselines[name].median)
        row.best_baseline_ms = baselines[row.best_baseline].median
        row.ratio = row.best_baseline_ms / mine.median
    alike = [timing.median for name, timing in baselines.items() if name.endswith(row.layout)]
    row.ratio_same_layout = min(alike) / mine.median if alike else None


def _explain(row: Row, case: Case, direction: str, t: Operands) -> None:
    import flashdwc

    whole = flashdwc.explain(flashdwc.ops.depthwise_conv2d, t.x, t.weight, None, case.stride, case.pads, case.dilation)
    parts = [whole] if direction in ("forward", "train") else []
    parts += [part for part in whole.gradients if direction == "train" or part.operator.endswith(direction)]
    row.backend = "+".join(part.chosen for part in parts)
    row.backend_detail = "; ".join(dict.fromkeys(part.detail for part in parts if part.detail))
    row.backend_reason = "; ".join(dict.fromkeys(part.reason for part in parts))


def _try(run: Run) -> tuple[object, str | None]:
    """Runs once, as a warm-up: the result, or the first line of the error. Lack of memory is raised: it is no error."""
    try:
        return run(), None
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if "not enough memory" in str(error):
            raise
        return None, f"{type(error).__name__}: {_first_line(error)}"


def _difference(result: object, expected: object) -> float:
    """The largest difference over the largest expected value, taken in slices to spare memory."""
    if isinstance(result, tuple) and isinstance(expected, tuple):
        return max(_difference(a, b) for a, b in zip(result, expected, strict=True))
    if not isinstance(result, Tensor) or not isinstance(expected, Tensor):
        raise TypeError(f"expected tensors, got {type(result).__name__} and {type(expected).__name__}")
    if expected.numel() == 0:
        return 0.0
    chunk = max(1, (1 << 26) * expected.shape[0] // expected.numel())
    difference = largest = 0.0
    for a, b in zip(result.split(chunk), expected.split(chunk), strict=True):
        difference = max(difference, (a.float() - b.float()).abs().max().item())
        largest = max(largest, b.float().abs().max().item())
    return difference / largest if largest else difference


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _fastest_cudnn() -> Iterator[None]:
    """Lets cuDNN try its algorithms and keep the fastest, so that the baseline is PyTorch at its best."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def check(options: Options) -> None:
    """Raises ``UserError`` for an unknown dtype, layout or direction."""
    for name, values, known in (
        ("dtype", options.dtypes, DTYPES),
        ("layout", options.layouts, LAYOUTS),
        ("direction", options.directions or (), DIRECTIONS),
    ):
        for value in values:
            if value not in known:
                raise UserError(f"--{name} {value}: expected one of {', '.join(known)}", code=2)
