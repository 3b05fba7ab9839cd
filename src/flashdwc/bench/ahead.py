"""What a model or a shape will run, told ahead (``flashdwc explain``) or compiled ahead (``flashdwc warmup``)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..convert import convert
from ..core.backend import Explanation, explain
from ..ops import depthwise_conv2d
from .case import DTYPES, LAYOUTS, is_shape, parse
from .friendly import UserError
from .layers import Recorded, build_model, in_layout, record_layers


@dataclass(frozen=True)
class Request:
    """How a model is to be called."""

    inputs: Sequence[tuple[int, ...]] | None  # (C, H, W); None: the model's own
    batches: Sequence[int]
    dtypes: Sequence[str]
    layout: str

    def calls(self, own_input: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str]]:
        """Every input shape with its batch, and dtype."""
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise UserError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}", code=2)
            for size in self.inputs or [own_input]:
                for batch in self.batches:
                    yield (batch, *size), dtype


def check(what: str) -> None:
    """``UserError`` if that is no shape and no model's name."""
    if is_shape(what):
        parse(what)
    else:
        with torch.device("meta"):
            build_model(what)


def explain_shape(text: str, device: torch.device) -> str:
    return str(explain(depthwise_conv2d, *arguments_of(text, device)))


def explain_model(name: str, request: Request, device: torch.device) -> str:
    """A table for each input: every depthwise layer, its backends forward and backward, the reason and the floor."""
    parts = []
    with torch.device("meta"):
        model, own_input = build_model(name)
    reports = {layer.name: layer for layer in convert(model).layers}
    for shape, dtype in request.calls(own_input):
        rows = [("layer", "input", "kernel", "stride", "forward", "input grad", "weight grad", "floor ms", "why")]
        for record in record_layers(*meta_call(name, model, shape, dtype, request.layout)):
            layer, x = record.layer, record.input
            start = (record.name, times(x.shape), times(layer.kernel_size), times(layer.stride))
            if not hasattr(layer, "explain"):  # convert left it alone
                rows.append((*start, "torch", "torch", "torch", "", reports[record.name].reason))
                continue
            with brought_to(device, record) as there:
                explanation = layer.explain(there)
            rows.append((*start, explanation.chosen, *_gradients(explanation), _floor(explanation), explanation.reason))
        if len(rows) == 1:
            raise UserError(f"{name} has no depthwise layer that its input reaches")
        parts.append(f"{name}, input {times(shape)}, {dtype}, {request.layout}, on {device}\n{_aligned(rows)}")
    return "\n\n".join(parts)


def warm_up(what: str, request: Request, device: torch.device) -> Iterator[str]:
    """Runs forward and backward once for each call; one line for each."""
    if is_shape(what):
        x, weight, *rest = arguments_of(what, device)
        x.requires_grad_()
        weight.requires_grad_()
        start = time.perf_counter()
        depthwise_conv2d(x, weight, *rest).sum().backward()
        yield f"{what}: {_seconds_since(start, device)}"
        return
    model, own_input = build_model(what)
    convert(model)
    model.to(device).train()
    for shape, dtype in request.calls(own_input):
        x = torch.randn(shape, device=device).to(DTYPES[dtype])
        x = x.contiguous(memory_format=LAYOUTS[request.layout])
        in_layout(model.to(DTYPES[dtype]), request.layout)
        start = time.perf_counter()
        try:
            _total(model(x)).backward()
        except (RuntimeError, ValueError) as error:
            raise _does_not_run(what, shape, error) from error
        yield f"{what}, input {times(shape)}, {dtype}, {request.layout}: {_seconds_since(start, device)}"


def arguments_of(shape: str, device: torch.device) -> tuple[Any, ...]:
    """Of ``depthwise_conv2d``; the tensors hold nothing yet."""
    case, dtype, layout = parse(shape)
    x = torch.empty(case.input_shape, dtype=DTYPES[dtype], device=device, memory_format=LAYOUTS[layout])
    weight = torch.empty(case.weight_shape, dtype=DTYPES[dtype], device=device)
    return x, weight, None, case.stride, case.pads, case.dilation


@contextmanager
def brought_to(device: torch.device, recorded: Recorded) -> Iterator[Tensor]:
    """The layer, which has no memory behind it, on a device, and an input like the recorded one; both hold nothing yet."""
    layer, x = recorded.layer, recorded.input
    layer.to_empty(device=device)
    yield torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    layer.to("meta")


def meta_call(name: str, model: nn.Module, shape: tuple[int, ...], dtype: str, layout: str) -> tuple[nn.Module, Tensor]:
    """The model and its input, both without memory behind them."""
    x = torch.empty(shape, dtype=DTYPES[dtype], device="meta")
    if len(shape) == 4:
        x = x.contiguous(memory_format=LAYOUTS[layout])
        in_layout(model, layout)
    model.to(dtype=DTYPES[dtype]).eval()
    try:
        with torch.no_grad():
            model(x)
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise _does_not_run(name, shape, error) from error
    return model, x


def _does_not_run(name: str, shape: tuple[int, ...], error: Exception) -> UserError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(f"{name} does not run on an input of {times(shape)}: {reason}")


def _gradients(explanation: Explanation) -> tuple[str, str]:
    chosen = {gradient.operator: gradient.chosen for gradient in explanation.gradients}
    return tuple(  # type: ignore[return-value]
        next((backend for operator, backend in chosen.items() if operator.endswith(kind)), "")
        for kind in ("input_grad", "weight_grad")
    )


def _floor(explanation: Explanation) -> str:
    return "-" if explanation.floor_ms is None else f"{explanation.floor_ms:.4f}"


def _total(output: object) -> Tensor:
    """A scalar that depends on every output."""
    if isinstance(output, Tensor):
        return output.float().sum()
    values = output.values() if isinstance(output, dict) else output
    return torch.stack([_total(value) for value in values]).sum()  # type: ignore[attr-defined]


def _seconds_since(start: float, device: torch.device) -> str:
    torch.cuda.synchronize(device)
    return f"{time.perf_counter() - start:.2f} s"


def times(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
