"""``flashdwc warmup --tune``: times every way to compute a layer's three operators and keeps the fastest as this machine's choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..convert import convert
from ..core import tune
from ..core.backend import Backend, choose, record
from ..core.op import Operator
from ..ops import depthwise_conv2d
from .ahead import Request, arguments_of, brought_to, meta_call, times
from .case import is_shape
from .friendly import os_error
from .layers import build_model, record_layers
from .timers import Timing, compare

SECONDS = 0.3  # for the ways of one call
WORTH_KEEPING = 0.98  # of the present way's time: a smaller gain is noise
SAME = 0.02  # difference that the ways' results may have, of their largest value

Call = tuple[Operator, tuple]


@dataclass(frozen=True)
class Tuned:
    operator: str
    problem: str
    before: str  # names of ways
    best: str
    timings: dict[str, Timing]

    @property
    def worth_keeping(self) -> bool:
        return self.timings[self.best].median < WORTH_KEEPING * self.timings[self.before].median

    def __str__(self) -> str:
        before, best = (self.timings[way].median for way in (self.before, self.best))
        found = (
            f"{self.best}: {best:.4f} ms, before {before:.4f}"
            if self.worth_keeping
            else f"stays with {self.before}, {before:.4f} ms"
        )
        return f"  {self.operator}: {found} ({len(self.timings)} ways)"


def tune_all(what: str, request: Request, device: torch.device) -> Iterator[str]:
    """Tunes a shape, or each different layer of a model for each of its inputs. Yields what it does, line by line."""
    done: set[str] = set()
    for title, calls in _layers(what, request, device):
        yield title
        for operator, args in calls:
            _fill(args[0])  # an output gradient holds nothing yet
            tuned = tune_call(operator, args, device, done)
            if tuned is None:
                continue
            yield str(tuned)
            if tuned.worth_keeping:
                try:
                    tune.keep(device, {tuned.problem: tuned.best})
                except OSError as error:
                    raise os_error("keep a choice in", error) from error


def tune_call(operator: Operator, args: tuple, device: torch.device, done: set[str]) -> Tuned | None:
    """The timings of all ways; None where there is but one, or the problem is among those ``done``."""
    backend: Backend = choose(operator.name, operator.backends, args, "auto")
    alternatives = backend.alternatives(*args)
    if alternatives is None or len(alternatives.ways) < 2 or alternatives.problem in done:
        return None
    done.add(alternatives.problem)
    tensors = args[: operator.tensors]
    expected: Tensor | None = None
    runs: dict[str, Callable[[], object]] = {}
    for way in alternatives.ways:  # the present one first
        try:
            plan = way.plan()
            result = plan(*tensors).float()
        except RuntimeError:  # does not compile or launch on this device
            if way.name == alternatives.chosen:
                raise
            continue
        expected = result if expected is None else expected
        if (result - expected).abs().max() <= SAME * expected.abs().max():
            runs[way.name] = partial(plan, *tensors)
    timings = compare(runs, device, seconds=SECONDS)
    best = min(timings, key=lambda way: timings[way].median)
    return Tuned(operator.name, alternatives.problem, alternatives.chosen, best, timings)


def _layers(what: str, request: Request, device: torch.device) -> Iterator[tuple[str, list[Call]]]:
    """Titles, and the calls of each layer's three operators, on random numbers."""
    if is_shape(what):
        x, weight, *rest = arguments_of(what, device)
        _fill(x, weight)
        yield what, record(depthwise_conv2d, x, weight, *rest).calls
        return
    with torch.device("meta"):
        model, own_input = build_model(what)
    convert(model)
    for shape, dtype in request.calls(own_input):
        for recorded in record_layers(*meta_call(what, model, shape, dtype, request.layout)):
            layer = recorded.layer
            if not hasattr(layer, "record"):  # convert left it alone
                continue
            with brought_to(device, recorded) as x:
                _fill(x, *layer.parameters())
                yield f"{recorded.name}, input {times(x.shape)}, {dtype}", layer.record(x).calls


def _fill(*tensors: Tensor) -> None:
    for t in tensors:
        t.data.normal_()
