"""Checks and small tools of the tests."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import flashdwc
from flashdwc.kernels import reference
from flashdwc.ops import depthwise_operators

# what a good operator may be off by, relative to the largest result
SMALL = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-12}
# what ours may be off by where PyTorch's happens to be exact: the rounding of the result, or of a few partial sums
FLOOR = {dtype: (1 if dtype.itemsize == 2 else 4) * torch.finfo(dtype).eps for dtype in SMALL}

CHOOSY_FAMILIES = (
    "few",
    "images",
    "octets",
    "transposed",
    "warps",
    "maps",
)  # CUDA kernels that run on some of the problems they cover


@contextmanager
def preferring(family: str) -> Iterator[None]:
    """This of the choosy families takes all that it covers, the others nothing."""
    with ExitStack() as stack:
        for name in CHOOSY_FAMILIES:
            module = import_module(f"flashdwc.kernels.cuda.depthwise_{name}")
            for kind in ("conv", "weight_grad") if hasattr(module, f"weight_grad_{name}") else ("conv",):
                layouts = getattr(module, f"{kind}_layouts") if name == family else lambda *_: ()
                choose = lambda *args, layouts=layouts: next(iter(layouts(*args)), None)  # noqa: E731
                stack.enter_context(patch.object(module, f"{kind}_{name}", choose))
        _forget_plans()
        yield
    _forget_plans()


def _forget_plans() -> None:
    operators = (depthwise_operators.forward, depthwise_operators.input_grad, depthwise_operators.weight_grad)
    for operator in operators:
        operator._plans.clear()
        operator._calls.clear()


# --- values ----------------------------------------------------------------------------------------------------------


def assert_as_accurate(ours: Tensor, theirs: Tensor, oracle: Tensor) -> None:
    """Our largest error is at most twice that of PyTorch's own operator, or of a good one's, plus a rounding."""
    assert ours.shape == theirs.shape == oracle.shape
    assert ours.dtype == theirs.dtype
    if oracle.numel() == 0:
        return
    scale = oracle.abs().max().item()
    error, their_error = ((t.detach().cpu().double() - oracle).abs().max().item() for t in (ours, theirs))
    allowed = min(their_error, SMALL[ours.dtype] * scale)  # on some processors PyTorch sums half precision in itself
    assert error <= 2 * allowed + FLOOR[ours.dtype] * scale, f"off by {error} of {scale}, PyTorch by {their_error}"


def assert_rounded(actual: Tensor, oracle: Tensor, magnitude: Tensor, terms: int) -> None:
    """``actual`` is a sum of ``terms`` products kept in float32 or wider and rounded once to its own type.

    ``magnitude`` is the sum of their absolute values.
    """
    assert actual.shape == oracle.shape
    wide = torch.promote_types(actual.dtype, torch.float32)
    rounding = torch.finfo(actual.dtype).eps * oracle.abs() if wide != actual.dtype else 0
    bound = (
        0.51 * rounding + (terms + 2) * torch.finfo(wide).eps * magnitude + torch.finfo(actual.dtype).smallest_normal
    )
    excess = (actual.detach().double() - oracle).abs() - bound
    assert (excess <= 0).all(), f"off by {excess.nan_to_num(nan=torch.inf).max().item()} more than rounding explains"


def poison(*sizes: Sequence[int], like: Tensor) -> None:
    """Leaves NaN in the memory that the allocator will hand out next for tensors of these sizes."""
    for_reuse = [like.new_full(tuple(size), torch.nan) for size in sizes for _ in range(2)]
    del for_reuse


def geometry(
    x: Tensor, w: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Stride, (low, high) padding and dilation of each dimension, as the reference wants them."""
    n = x.dim() - 2
    stride, dilation = (v if isinstance(v, tuple) else (v,) * n for v in (stride, dilation))
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(w.shape[2:], dilation)]
        return stride, tuple(p for t in totals for p in (t // 2, t - t // 2)), dilation
    if isinstance(padding, tuple) and n == 2 and len(padding) == 4:
        left, right, top, bottom = padding
        return stride, (top, bottom, left, right), dilation
    low = padding if isinstance(padding, tuple) else (padding,) * n
    return stride, tuple(p for side in low for p in (side, side)), dilation


def convolve(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    functions = {3: flashdwc.depthwise_conv1d, 4: flashdwc.depthwise_conv2d, 5: flashdwc.depthwise_conv3d}
    return functions[x.dim()](x, *args, **kwargs)


def check_convolution(
    x: Tensor,  # [N, C, *spatial]
    w: Tensor,  # [C * m, 1, *kernel]
    b: Tensor | None = None,
    g: Tensor | None = None,  # gradient of the output; random where None
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    impl: str = "auto",
) -> Tensor:
    """Result and all gradients against the definition in float64; returns the result."""
    stride_, padding_, dilation_ = geometry(x, w, stride, padding, dilation)
    size = reference.conv_output_size(x.shape[2:], w.shape[2:], stride_, padding_, dilation_)
    x, w, b = (None if t is None else t.detach().requires_grad_() for t in (x, w, b))
    assert x is not None and w is not None
    poison((x.shape[0], w.shape[0], *size), x.shape, w.shape, like=x)
    y = convolve(x, w, b, stride, padding, dilation, impl=impl)
    g = torch.randn(y.shape, device=y.device, dtype=y.dtype) if g is None else g
    leaves = [t for t in (x, w, b) if t is not None]
    check_values(x, w, b, g, y, torch.autograd.grad(y, leaves, g), stride_, padding_, dilation_)
    return y.detach()


def check_values(x, w, b, g, y: Tensor, gradients: Sequence[Tensor], stride, padding, dilation) -> None:
    x, w, b, g = (None if t is None else t.detach().double() for t in (x, w, b, g))
    taps, positions = w[0].numel(), g[:, 0].numel()
    geometry_ = (stride, padding, dilation)
    absolute = (x.abs(), w.abs(), None if b is None else b.abs())
    assert_rounded(
        y, reference.depthwise_conv(x, w, b, *geometry_), reference.depthwise_conv(*absolute, *geometry_), taps
    )
    dx, dw, *db = gradients
    adjoint = reference.depthwise_conv_input_grad
    terms = taps * w.shape[0] // x.shape[1]
    assert_rounded(dx, adjoint(g, w, x.shape, *geometry_), adjoint(g.abs(), w.abs(), x.shape, *geometry_), terms)
    adjoint = reference.depthwise_conv_weight_grad
    shape = (w.shape, w.stride())
    assert_rounded(dw, adjoint(g, x, *shape, *geometry_), adjoint(g.abs(), x.abs(), *shape, *geometry_), positions)
    if db:
        over = [0, *range(2, g.dim())]
        assert_rounded(db[0], g.sum(over), g.abs().sum(over), positions)


def check_non_finite_values(x, w, b, y: Tensor, stride, padding, dilation) -> None:
    """inf and NaN where the definition has them, and nowhere else."""
    x, w, b = (t.detach().double() for t in (x, w, b))
    definition = reference.depthwise_conv(x, w, b, stride, padding, dilation)
    magnitude = reference.depthwise_conv(x.abs(), w.abs(), b.abs(), stride, padding, dilation)
    finite = definition.isfinite()
    torch.testing.assert_close(y[~finite].double(), definition[~finite], rtol=0, atol=0, equal_nan=True)
    assert_rounded(y[finite], definition[finite], magnitude[finite], w[0].numel())


# --- memory layouts --------------------------------------------------------------------------------------------------


def hidden(t: Tensor, offset: int = 1) -> Tensor:
    """The same values at an odd address, with NaN on both sides."""
    memory = t.new_full((t.numel() + offset + 64,), torch.nan)
    view = memory[offset : offset + t.numel()].view(t.shape)
    return view.copy_(t)


def every_second(t: Tensor) -> Tensor:
    memory = t.new_full((t.shape[0], 2 * t.shape[1], *t.shape[2:]), torch.nan)
    return memory[:, ::2].copy_(t)


def channels_last(t: Tensor) -> Tensor:
    return t.contiguous(
        memory_format={4: torch.channels_last, 5: torch.channels_last_3d}.get(t.dim(), torch.contiguous_format)
    )


LAYOUTS = {
    "contiguous": torch.Tensor.contiguous,
    "channels_last": channels_last,
    "hidden": hidden,
    "every_second_channel": every_second,
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "batch_innermost": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
}


# --- time ------------------------------------------------------------------------------------------------------------


def milliseconds(*functions: Callable[[], object], rounds: int = 15, calls: int = 10) -> list[float]:
    """Median time on the GPU of each function, measured in turns."""
    times: list[list[float]] = [[] for _ in functions]
    for round_ in range(rounds + 3):
        for function, seen in zip(functions, times):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
            if round_ >= 3:  # the first ones warm up
                seen.append(start.elapsed_time(end) / calls)
    return [statistics.median(seen) for seen in times]


# --- processes -------------------------------------------------------------------------------------------------------


def run_python(
    code: str, *, timeout: float = 120, check: bool = True, **environment: str
) -> subprocess.CompletedProcess:
    """Runs code in a fresh interpreter that finds the package under test."""
    home = str(Path(flashdwc.__file__).parents[1])
    path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert not check or result.returncode == 0, result.stderr[-2000:]
    return result
