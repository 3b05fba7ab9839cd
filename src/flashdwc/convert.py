"""Puts flashdwc under an existing model: :func:`convert`, :func:`restore` and :func:`patch`.

A depthwise layer is converted by changing the class of the instance. Nothing is built or copied: parameters, buffers, hooks,
device, dtype, training flag, ``state_dict`` keys and whatever an optimiser holds stay the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ContextDecorator, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import ops
from .core.backend import Explanation
from .nn import DepthwiseConv1d, DepthwiseConv2d, DepthwiseConv2dSame, DepthwiseConv3d
from .nn.depthwise import _Depthwise
from .ops.depthwise_operators import DTYPES

REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: DepthwiseConv1d,
    nn.Conv2d: DepthwiseConv2d,
    nn.Conv3d: DepthwiseConv3d,
}
OPERATORS: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    torch.conv1d: ops.depthwise_conv1d,
    torch.conv2d: ops.depthwise_conv2d,
    torch.conv3d: ops.depthwise_conv3d,
}
HEADER = ("layer", "type", "input", "C", "kernel", "stride", "dilation", "mult", "converted", "backend", "reason")

# kept on the instance, so that a copy, a pickle or a checkpoint of a converted model can be restored too
_ORIGINAL_CLASS = "_class_before_convert"


@dataclass(frozen=True)
class LayerReport:
    """One depthwise layer. ``explanation`` is there if an example input reached the layer."""

    name: str
    type: str
    channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    multiplier: int
    converted: bool
    reason: str  # why it was left alone; of a converted layer, why this backend
    input_shape: tuple[int, ...] | None = None
    explanation: Explanation | None = None

    @property
    def backend(self) -> str:
        return self.explanation.chosen if self.explanation else "-"


@dataclass(frozen=True)
class Report:
    """The depthwise layers that :func:`convert` found, in the model's order; ``str`` of it is a table."""

    layers: list[LayerReport]

    @property
    def converted(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.converted]

    @property
    def left_alone(self) -> list[LayerReport]:
        return [layer for layer in self.layers if not layer.converted]

    def __iter__(self) -> Iterator[LayerReport]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __str__(self) -> str:
        rows = [HEADER, *map(_row, self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, f"{len(self.converted)} of {len(self)} depthwise layers converted"])


def _row(layer: LayerReport) -> tuple[str, ...]:
    sizes = (layer.input_shape or (), (layer.channels,), layer.kernel_size, layer.stride, layer.dilation)
    shapes = ["x".join(map(str, size)) or "-" for size in sizes]
    converted = "yes" if layer.converted else "no"
    return (layer.name or "(model)", layer.type, *shapes, str(layer.multiplier), converted, layer.backend, layer.reason)


def convert(model: nn.Module, example_input: Any = None) -> Report:
    """Makes every depthwise ``nn.Conv1d/2d/3d`` of ``model`` run on flashdwc, in place.

    Only layers of exactly these types, and timm's ``Conv2dSame``, are touched: a subclass may compute something else
    (quantised, parametrised, weight-standardised), so it is left alone and the report says so. A model converted before is
    unchanged. Copies, pickles and checkpoints of a converted model work, and :func:`restore` undoes the conversion.

    ``example_input`` (a tensor, a tuple of positional or a mapping of keyword arguments) is run through the model once,
    without gradients and in evaluation mode, to fill in the input shape, the backend and the reason of each layer. If the
    model raises, the conversion is undone.

    Raises ``TypeError`` if ``model`` is not a module.
    """
    _check_module(model)
    layers = {name: layer for name, layer in model.named_modules() if _is_depthwise_layer(layer)}
    reports = [_convert_layer(name, layer) for name, layer in layers.items()]
    if example_input is None:
        return Report(reports)
    try:
        calls = _explain_calls(model, example_input, layers)
    except BaseException:
        for report in reports:
            if report.converted:
                _restore_layer(layers[report.name])
        raise
    return Report([_with_call(report, layers[report.name], calls.get(report.name)) for report in reports])


def restore(model: nn.Module) -> int:
    """Gives every layer that :func:`convert` changed its former class back; returns how many there were.

    Layers that were built as ``flashdwc.nn`` layers stay what they are. Raises ``TypeError`` if ``model`` is not a module.
    """
    _check_module(model)
    return sum(_restore_layer(layer) for layer in model.modules())


def patch() -> _Patch:
    """Routes depthwise ``F.conv1d/2d/3d`` calls to flashdwc inside a ``with`` block or a decorated function.

    The model stays as it is, and so does every other call: convolutions that are not depthwise, tensor subclasses with
    their own behaviour, dtypes that flashdwc has not. It holds in the current thread only, and may be nested.
    """
    return _Patch()


class _Patch(TorchFunctionMode, ContextDecorator):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = OPERATORS.get(func)
        call = _depthwise_call(*args, **kwargs) if operator is not None and not types else None
        return func(*args, **kwargs) if operator is None or call is None else operator(*call)


def _depthwise_call(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Any, ...] | None:
    """The operator's arguments if the convolution is depthwise, else None."""
    rank = weight.dim() - 2
    if any(t is not None and not _is_plain(t) for t in (input, weight, bias)):
        return None
    if groups == 1 or rank < 1 or input.dim() <= rank or input.dtype not in DTYPES:
        return None
    if weight.shape[1] != 1 or input.shape[-rank - 1] != groups:
        return None
    return input, weight, bias, stride, padding, dilation


def _is_plain(t: Tensor) -> bool:
    return t.layout is torch.strided and not is_traceable_wrapper_subclass(t)


def _check_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")


def _is_depthwise_layer(layer: nn.Module) -> bool:
    if not isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    # one group of one channel is an ordinary convolution
    return isinstance(layer, _Depthwise) or (layer.groups == layer.in_channels and layer.groups > 1)


def _convert_layer(name: str, layer: Any) -> LayerReport:
    original = type(layer)
    reason = _why_not(layer)
    if reason is None:
        layer.__dict__[_ORIGINAL_CLASS] = original
        layer.__class__ = _replacement(original)
    return LayerReport(
        name=name,
        type=original.__name__,
        channels=layer.in_channels,
        kernel_size=layer.kernel_size,
        stride=layer.stride,
        dilation=layer.dilation,
        multiplier=layer.out_channels // layer.in_channels,
        converted=reason is None,
        reason=reason or "",
    )


def _restore_layer(layer: nn.Module) -> bool:
    original = layer.__dict__.get(_ORIGINAL_CLASS)
    # a class made on top since then (a parametrisation) must be taken off first
    if original is None or type(layer) is not _replacement(original):
        return False
    layer.__class__ = original
    del layer.__dict__[_ORIGINAL_CLASS]
    return True


def _replacement(cls: type[nn.Module]) -> type[nn.Module] | None:
    # by name: an instance exists only where timm is imported, and timm need not be
    if cls.__name__ == "Conv2dSame" and cls.__module__.startswith("timm."):
        return DepthwiseConv2dSame
    return REPLACEMENTS.get(cls)


def _why_not(layer: Any) -> str | None:
    cls = type(layer)
    if isinstance(layer, _Depthwise):
        return "is a flashdwc layer already"
    if _replacement(cls) is None:
        return f"{cls.__name__} is a subclass that may compute something else"
    if "_conv_forward" in layer.__dict__:
        return "the instance has its own _conv_forward"
    if is_traceable_wrapper_subclass(layer.weight):
        return f"its weight is a {type(layer.weight).__name__}; convert before wrapping"
    if layer.weight.dtype not in DTYPES:
        return f"its weight is {str(layer.weight.dtype).removeprefix('torch.')}"
    return None


def _explain_calls(
    model: nn.Module, example_input: Any, layers: Mapping[str, nn.Module]
) -> dict[str, tuple[tuple[int, ...], Explanation]]:
    """Runs the model once; the input shape and the explanation of each layer's first call."""
    calls: dict[str, tuple[tuple[int, ...], Explanation]] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in calls:
                input = args[0] if args else kwargs["input"]
                calls[name] = tuple(input.shape), layer.explain(input)

        return hook

    ours = {name: layer for name, layer in layers.items() if isinstance(layer, _Depthwise)}
    handles = [layer.register_forward_pre_hook(record(name), with_kwargs=True) for name, layer in ours.items()]
    try:
        with torch.no_grad(), _evaluating(model):
            if isinstance(example_input, Mapping):
                model(**example_input)
            elif isinstance(example_input, (tuple, list)):
                model(*example_input)
            else:
                model(example_input)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    # flags are set directly: `train` and `eval` may be overridden, and layers may be in different modes
    flags = {module: module.training for module in model.modules()}
    for module in flags:
        module.training = False
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def _with_call(report: LayerReport, layer: Any, call: tuple[tuple[int, ...], Explanation] | None) -> LayerReport:
    if call is None:
        not_reached = "not reached by the example input" if isinstance(layer, _Depthwise) else report.reason
        return replace(report, reason=not_reached)
    input_shape, explanation = call
    return replace(report, input_shape=input_shape, explanation=explanation, reason=explanation.reason)
