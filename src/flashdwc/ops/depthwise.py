"""Depthwise convolution: the public functions. They bring the arguments into one form and call the operators declared in
:mod:`flashdwc.ops.depthwise_operators`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from ..core.op import autocast
from ..kernels.native import output_format, pad
from .depthwise_operators import check_tensors, forward, input_grad, is_dense, weight_grad

__all__ = [
    "depthwise_conv1d",
    "depthwise_conv2d",
    "depthwise_conv3d",
    "depthwise_conv_transpose2d",
    "forward",
    "input_grad",
    "weight_grad",
]

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


def _number(value: Any) -> Any:
    """The value as an int or a symbolic one, also if it is NumPy's; None if it is no whole number."""
    if isinstance(value, (bool, Tensor)):
        return None
    if isinstance(value, (int, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def _numbers(name: str, value: int | Sequence[int], n: int) -> tuple[int, ...]:
    if (number := _number(value)) is not None:
        return (number,) * n
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name}: expected an int or {n} of them, got {value!r}")
    values = tuple(map(_number, value))
    if len(values) not in (1, n) or any(v is None for v in values):
        raise ValueError(f"{name}: expected an int or {n} of them, got {value!r}")
    return values * n if len(values) == 1 else values


def _resolve_padding(
    padding: str | int | Sequence[int], stride: Sequence[int], dilation: Sequence[int], kernel: Sequence[int]
) -> tuple[int, ...]:
    """(low, high) of each dimension."""
    n = len(kernel)
    if isinstance(padding, str):
        if padding == "valid":
            return (0,) * (2 * n)
        if padding != "same":
            raise ValueError(f"padding: expected 'same', 'valid' or numbers, got {padding!r}")
        if any(s != 1 for s in stride):
            raise ValueError(f"padding: expected stride 1 with 'same', got stride {tuple(stride)}")
        totals = [d * (k - 1) for d, k in zip(dilation, kernel)]
        return tuple(p for total in totals for p in (total // 2, total - total // 2))
    if n == 2 and isinstance(padding, (tuple, list)) and len(padding) == 4:
        left, right, top, bottom = _numbers("padding", padding, 4)
        return top, bottom, left, right
    return tuple(p for low in _numbers("padding", padding, n) for p in (low, low))


def _steps(n: int, stride, dilation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    stride, dilation = _numbers("stride", stride, n), _numbers("dilation", dilation, n)
    if any(s < 1 for s in stride) or any(d < 1 for d in dilation):
        raise ValueError(f"stride, dilation: expected positive numbers, got stride {stride}, dilation {dilation}")
    return stride, dilation


def _geometry(n: int, stride, padding, dilation, kernel: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    stride, dilation = _steps(n, stride, dilation)
    return stride, _resolve_padding(padding, stride, dilation, kernel), dilation


_cached_geometry = lru_cache(maxsize=1024, typed=True)(_geometry)


def _explicit_padding(x: Tensor, padding: tuple[int, ...], mode: str) -> Tensor:
    if mode not in PADDING_MODES:
        raise ValueError(f"padding_mode: expected one of {', '.join(PADDING_MODES)}, got {mode!r}")
    if min(padding) < 0:
        raise ValueError(f"padding: expected non-negative numbers, got {padding}")
    pairs = [(padding[2 * i], padding[2 * i + 1]) for i in range(len(padding) // 2)]
    sizes = x.shape[2:]
    for i, (n, pair) in enumerate(zip(sizes, pairs)):
        limit = {"reflect": n - 1, "circular": n}.get(mode, 0 if n == 0 else max(pair))
        if max(pair) > limit:
            raise ValueError(
                f"padding: expected at most {limit} with padding_mode {mode!r} for size {n} (dim {i}), got {pair}"
            )
    return pad(x, padding, mode)


def _check_ranks(n: int, input: Any, weight: Any, bias: Any) -> None:
    if isinstance(input, Tensor) and isinstance(weight, Tensor) and weight.dim() == n + 2:
        if input.dim() in (n + 1, n + 2) and (bias is None or isinstance(bias, Tensor)):
            return
    for name, t in (("input", input), ("weight", weight), ("bias", bias)):
        if not (isinstance(t, Tensor) or (t is None and name == "bias")):
            raise TypeError(f"{name}: expected a Tensor, got {type(t).__name__}")
    sizes = {1: "L", 2: "H, W", 3: "D, H, W"}[n]
    if weight.dim() != n + 2:
        raise ValueError(f"weight: expected {n + 2} dimensions, channels and kernel, got shape {tuple(weight.shape)}")
    expected = f"{n + 1} or {n + 2} dimensions, [C, {sizes}] or [N, C, {sizes}]"
    raise ValueError(f"input: expected {expected}, got shape {tuple(input.shape)}")


def _convolve(input: Tensor, weight: Tensor, bias: Tensor | None, options: tuple, key: tuple | None = None) -> Tensor:
    """``options``: dimensions, stride, padding, dilation, padding mode, precision, impl; ``key``: to remember the call by."""
    n, stride, padding, dilation, mode, precision, impl = options
    if not isinstance(input, Tensor) and has_torch_function((input,)):  # a proxy of torch.fx
        function = {1: depthwise_conv1d, 2: depthwise_conv2d, 3: depthwise_conv3d}[n]
        keywords = {"padding_mode": mode, "precision": precision, "impl": impl}
        return handle_torch_function(function, (input,), input, weight, bias, stride, padding, dilation, **keywords)
    eager, as_it_came = not torch.compiler.is_compiling(), input
    _check_ranks(n, input, weight, bias)
    if eager and not (is_dense(input) and is_dense(weight) and (bias is None or is_dense(bias))):
        check_tensors("input", input, weight=weight, bias=bias)
    unbatched = input.dim() == n + 1
    if unbatched:
        input = input.unsqueeze(0)
    kernel = _sizes(weight, 2)
    if not eager:
        stride, padding, dilation = _geometry(n, stride, padding, dilation, kernel)
    else:
        try:
            stride, padding, dilation = _cached_geometry(n, stride, padding, dilation, kernel)
        except TypeError:  # lists have no hash
            stride, padding, dilation = _geometry(n, stride, padding, dilation, kernel)
    if mode != "zeros":
        input = _explicit_padding(input, padding, mode)
        padding = (0,) * len(padding)
    if n == 1:
        input, weight = _as_image(input), weight.unsqueeze(2)
        stride, padding, dilation = (1, *stride), (0, 0, *padding), (1, *dilation)
    constants = (stride, padding, dilation, precision or "auto", impl)
    y = forward(input, weight, bias, *constants)
    if key is not None and eager and input is as_it_came:
        forward.remember(key, (input, weight, bias), constants)
    if n == 1:
        y = _without_dimension(y, 2)
    return _without_dimension(y, 0) if unbatched else y


def _as_image(x: Tensor) -> Tensor:
    """``[N, C, L]`` as ``[N, C, 1, L]``, contiguous as PyTorch has it: strides of a transposed sequence would look like channels_last."""
    return x.contiguous().unsqueeze(2)


def _without_dimension(y: Tensor, dim: int) -> Tensor:
    """``squeeze``, but no view made under no_grad, as those may not be changed in place."""
    y = y.squeeze(dim)
    plain = not torch.compiler.is_compiling() and not torch.is_grad_enabled() and forward_ad._current_level < 0
    seen = torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None
    return y.detach() if plain and not seen else y


def _sizes(t: Tensor, first: int = 0) -> tuple[int, ...]:
    """Sizes of the dimensions from the first on, as numbers also where ``torch.jit.trace`` makes tensors of them."""
    sizes: tuple[int, ...] = t.shape[first:]
    if not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None:
        sizes = tuple(int(n) for n in sizes)
    return sizes


def depthwise_conv2d(
    input: Tensor,  # [N, C, H, W] or [C, H, W]
    weight: Tensor,  # [C * m, 1, kH, kW]
    bias: Tensor | None = None,  # [C * m]
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    *,
    padding_mode: str = "zeros",
    precision: str | None = None,
    impl: str = "auto",
) -> Tensor:  # [N, C * m, H', W']
    """``F.conv2d(input, weight, bias, stride, padding, dilation, groups=C)``, with the same memory format.

    Output channel ``c * m + i`` is input channel ``c`` filtered with ``weight[c * m + i]``:
    ``y[n, o, p, q] = bias[o] + sum_{k, l} weight[o, 0, k, l] input[n, o // m, p * s + k * d - top, q * s + l * d - left]``.
    Taps that fall on the zero padding do not take part, so a non-finite weight there leaves the result finite.

    Args:
        input: float16, bfloat16, float32 or float64, with any strides, on any device; the batch may be empty.
        weight: of the input's dtype and device; ``m`` is the channel multiplier.
        bias: added to each output channel.
        stride: steps in pixels, one for both dimensions or (vertical, horizontal).
        padding: pixels at each side: an int, (vertical, horizontal), (left, right, top, bottom), ``"valid"`` (none) or
            ``"same"`` (output size = input size, stride 1; an odd total puts the extra pixel at the end).
        dilation: distance of the taps in pixels.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        precision: float32 on CUDA: ``"ieee"``, ``"tf32"``, or None for what PyTorch's switches say.
        impl: ``"auto"``, ``"cuda"``, ``"cpu"`` or ``"torch"``; an explicit choice never falls back.

    Gradients of any order for input, weight and bias; forward-mode AD; ``vmap``; sums are kept in float32 or wider.

    Raises:
        TypeError, ValueError: an argument is off; the message names it, what was expected and what came.
        UnsupportedError: the explicit ``impl`` does not cover the call.

    Source: depthwise convolution as in Howard et al., MobileNets (2017); large kernels on GPUs after Flash-DWC (ACM TACO).
    """
    key = (2, stride, padding, dilation, padding_mode, precision, impl, id(weight), id(bias))
    y = forward.recall(key, input, weight, bias)
    return _convolve(input, weight, bias, key[:7], key) if y is None else y


def depthwise_conv1d(
    input: Tensor,  # [N, C, L] or [C, L]
    weight: Tensor,  # [C * m, 1, kL]
    bias: Tensor | None = None,  # [C * m]
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    *,
    causal: bool = False,
    padding_mode: str = "zeros",
    precision: str | None = None,
    impl: str = "auto",
) -> Tensor:  # [N, C * m, L']
    """As :func:`depthwise_conv2d`, along one dimension: ``F.conv1d(..., groups=C)``.

    With ``causal=True`` the input is padded with ``dilation * (kL - 1)`` zeros on the left only, so that position ``p``
    sees nothing after ``p``; ``padding`` must then be left at 0.
    """
    if not causal:
        return _convolve(input, weight, bias, (1, stride, padding, dilation, padding_mode, precision, impl))
    _check_ranks(1, input, weight, bias)
    if isinstance(padding, str) or _numbers("padding", padding, 1) != (0,) or padding_mode != "zeros":
        raise ValueError(f"padding: expected 0 and mode 'zeros' with causal=True, got {padding!r} and {padding_mode!r}")
    (step,), (gap,) = _numbers("stride", stride, 1), _numbers("dilation", dilation, 1)
    left = gap * (_sizes(weight)[-1] - 1)
    options = (2, (1, step), (left, 0, 0, 0), (1, gap), "zeros", precision, impl)
    unbatched = input.dim() == 2
    y = _convolve(_as_image(input.unsqueeze(0) if unbatched else input), weight.unsqueeze(-2), bias, options)
    y = _without_dimension(y, -2)
    return _without_dimension(y, 0) if unbatched else y


def depthwise_conv3d(
    input: Tensor,  # [N, C, D, H, W] or [C, D, H, W]
    weight: Tensor,  # [C * m, 1, kD, kH, kW]
    bias: Tensor | None = None,  # [C * m]
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    *,
    padding_mode: str = "zeros",
    precision: str | None = None,
    impl: str = "auto",
) -> Tensor:  # [N, C * m, D', H', W']
    """As :func:`depthwise_conv2d`, in three dimensions: ``F.conv3d(..., groups=C)``."""
    key = (3, stride, padding, dilation, padding_mode, precision, impl, id(weight), id(bias))
    y = forward.recall(key, input, weight, bias)
    return _convolve(input, weight, bias, key[:7], key) if y is None else y


def depthwise_conv_transpose2d(
    input: Tensor,  # [N, C, H, W] or [C, H, W]
    weight: Tensor,  # [C, m, kH, kW]
    bias: Tensor | None = None,  # [C * m]
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    output_padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    *,
    precision: str | None = None,
    impl: str = "auto",
) -> Tensor:  # [N, C * m, H', W'], H' = (H - 1) stride - 2 padding + dilation (kH - 1) + output_padding + 1
    """``F.conv_transpose2d(input, weight, bias, stride, padding, output_padding, C, dilation)``: the adjoint of
    :func:`depthwise_conv2d` in its input. Arguments, dtypes and errors as there."""
    _check_ranks(2, input, weight, bias)
    input, weight, bias = autocast((input, weight, bias))  # type: ignore[assignment]
    unbatched = input.dim() == 3
    x = input.unsqueeze(0) if unbatched else input
    check_tensors("input", x, weight=weight, bias=bias)
    channels, multiplier, *kernel = _sizes(weight)
    if x.shape[1] != channels or 0 in (channels, multiplier):
        raise ValueError(f"weight: expected [{x.shape[1]}, m, kH, kW] for that input, got {tuple(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (channels * multiplier,):
        raise ValueError(f"bias: expected shape ({channels * multiplier},), got {tuple(bias.shape)}")
    stride, dilation = _steps(2, stride, dilation)
    padding = _numbers("padding", padding, 2)
    if min(padding) < 0:
        raise ValueError(f"padding: expected non-negative numbers, got {padding}")
    extra = _numbers("output_padding", output_padding, 2)
    if any(e < 0 or e >= max(s, d) for e, s, d in zip(extra, stride, dilation)):
        raise ValueError(f"output_padding: expected 0 to max(stride, dilation) - 1, got {extra}")
    # rows beyond those that the high padding gives back see no input: they are zeros appended at the end
    inside = [min(e, p + s - 1) for e, p, s in zip(extra, padding, stride)]
    high = [p - max(0, e - (s - 1)) for p, e, s in zip(padding, inside, stride)]
    size = [
        (n - 1) * s - 2 * p + d * (k - 1) + e + 1
        for n, s, p, d, k, e in zip(_sizes(x, 2), stride, padding, dilation, kernel, inside)
    ]
    whole = [n + e - i for n, e, i in zip(size, extra, inside)]
    if any(n < 0 for n in whole):
        raise ValueError(f"input: expected an output of no negative size, got output size {tuple(whole)}")
    if any(n < 1 for n in size):
        # at most appended zeros are left, which depend on nothing; the sums keep autograd's graph
        nothing = x[..., :0].sum() + weight[..., :0].sum()
        y = nothing.expand(x.shape[0], channels * multiplier, *whole).contiguous(memory_format=output_format(x, weight))
        y = y if bias is None else y + bias.view(-1, 1, 1)
        return _without_dimension(y, 0) if unbatched else y
    if multiplier > 1:
        memory_format = output_format(x, weight)
        x = x.repeat_interleave(multiplier, 1).contiguous(memory_format=memory_format)
    y = input_grad(
        x,
        weight.reshape(channels * multiplier, 1, *kernel),
        (_sizes(x)[0], channels * multiplier, *size),
        stride,
        (padding[0], high[0], padding[1], high[1]),
        dilation,
        precision or "auto",
        impl,
    )
    if inside != list(extra):
        y = F.pad(y, [0, extra[1] - inside[1], 0, extra[0] - inside[0]])
    if bias is not None:
        y = y + bias.to(y.device).view(-1, 1, 1)  # explaining, y is on meta
    return _without_dimension(y, 0) if unbatched else y
