"""Backends of an operator: which one runs, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .config import IMPLEMENTATIONS, config
from .errors import UnsupportedError
from .tune import Alternatives

# Takes the operator's tensor arguments; returns no view, as autograd forbids in-place changes of a custom function's.
Plan = Callable[..., Tensor]


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator.

    ``why_not`` and ``prefer_not`` are cheap and pure and take the operator's arguments: ``why_not`` says why the call
    is not covered, ``prefer_not`` why ``impl="auto"`` had better take a later backend (it is covered, but slower).
    ``plan`` specialises the backend to the arguments' metadata: the callable it returns serves every later call with the
    same metadata. ``describe`` names that specialisation; ``alternatives`` are all that could be tried in its place.
    ``plan_for_autograd`` is a plan that autograd had better follow than our own function, as it and its gradients are
    PyTorch's own anyway; None where there is none. It serves calls all of whose tensors ask for gradients.
    """

    name: str
    why_not: Callable[..., str | None]
    plan: Callable[..., Plan]
    prefer_not: Callable[..., str | None] = lambda *args: None
    describe: Callable[..., str] = lambda *args: ""
    alternatives: Callable[..., Alternatives | None] = lambda *args: None
    plan_for_autograd: Callable[..., Plan | None] = lambda *args: None


@dataclass(frozen=True)
class Cost:
    bytes: int  # each input read once, each output written once
    flops: int


@dataclass
class Explanation:
    """What :func:`flashdwc.explain` found: every backend with the reason against it, the choice, the roofline time."""

    operator: str
    chosen: str
    backends: list[tuple[str, str | None]]
    detail: str
    bytes: int
    flops: int
    floor_ms: float | None
    gradients: list[Explanation] = field(default_factory=list)

    @property
    def reason(self) -> str:
        against = [f"{name}: {why}" for name, why in self.backends if why is not None and name != self.chosen]
        return "; ".join(against) if against else "first choice"

    def __str__(self) -> str:
        floor = "" if self.floor_ms is None else f", floor {self.floor_ms:.4f} ms"
        lines = [f"{self.operator}: {self.chosen} ({self.bytes / 1e6:.1f} MB, {self.flops / 1e9:.2f} GFLOP{floor})"]
        for name, why in self.backends:
            note = why or (self.detail if name == self.chosen else "available")
            lines.append(f"  {'->' if name == self.chosen else '  '} {name:<6} {note}")
        return "\n".join(lines + [str(g) for g in self.gradients])


class Recorder:
    """Passed as ``impl`` to a public function, it collects the explanation instead of running the operator, and the calls of the
    operator and of its gradients: operator, arguments."""

    def __init__(self, impl: str) -> None:
        self.impl = impl
        self.explanations: list[Explanation] = []
        self.calls: list[tuple[Any, tuple]] = []


def check_impl(impl: str) -> str:
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}")
    return config.impl if impl == "auto" else impl


def choose(operator: str, backends: Sequence[Backend], args: tuple, impl: str) -> Backend:
    """The backend that runs ``args``. An explicit ``impl`` never falls back."""
    impl = "auto" if impl == "auto" and args[0].device.type == "meta" else check_impl(impl)  # where nothing runs
    if impl == "auto":
        covered = [b for b in backends if b.why_not(*args) is None]
        return next((b for b in covered if b.prefer_not(*args) is None), covered[-1])
    backend = next((b for b in backends if b.name == impl), None)
    if backend is None:
        raise UnsupportedError(f"{operator}: there is no {impl!r} implementation")
    if (why := backend.why_not(*args)) is not None:
        raise UnsupportedError(f"{operator}: impl={impl!r} does not cover this call: {why}")
    return backend


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Tells which backend ``function(*args, **kwargs)`` would run, and why, without running it.

    ``function`` is a public function of :mod:`flashdwc.ops`; tensors may live on any device, ``meta`` included.
    """
    return record(function, *args, **kwargs).explanations[0]


def record(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Recorder:
    if not getattr(function, "__module__", "").startswith("flashdwc.ops"):
        raise TypeError(
            f"function: expected a function of flashdwc.ops, got {getattr(function, '__name__', type(function).__name__)} "
            "(a layer has .explain(input); for a whole model: flashdwc.convert(model, input), or `flashdwc explain MODEL`)"
        )
    recorder = Recorder(kwargs.pop("impl", "auto"))
    function(*args, **kwargs, impl=recorder)
    return recorder


@lru_cache(maxsize=64)
def ceilings(device: torch.device) -> tuple[float, dict[torch.dtype, float]] | None:
    """Copy bandwidth in byte/s and arithmetic rates in FLOP/s of a device; None where they are unknown."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    half, single, double = torch.float16, torch.float32, torch.float64
    if properties.name == "NVIDIA H200":  # measured: large copy, cuBLAS products of 8192^3
        return 4.25e12, {half: 671e12, torch.bfloat16: 671e12, single: 51e12, double: 51e12}
    # datasheet arithmetic at 80%: tensor-core FMAs and FP32 lanes of one multiprocessor and cycle
    tensor_fma, lanes = {8: (1024, 64), 9: (2048, 128), 10: (4096, 128)}.get(properties.major, (512, 128))
    if (properties.major, properties.minor) in ((8, 6), (8, 9)):
        tensor_fma, lanes = 512, 128
    cycles = 0.8 * properties.multi_processor_count * properties.clock_rate * 1e3
    bandwidth = 0.85 * 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8
    rates = {half: 2 * tensor_fma * cycles, single: 2 * lanes * cycles, double: lanes * cycles}
    return bandwidth, {**rates, torch.bfloat16: rates[half]}


def floor_ms(cost: Cost, device: torch.device, dtype: torch.dtype) -> float | None:
    limits = ceilings(device)
    if limits is None:
        return None
    bandwidth, rates = limits
    return 1e3 * max(cost.bytes / bandwidth, cost.flops / rates[dtype])
