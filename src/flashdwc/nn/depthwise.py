"""Depthwise layers that stand wherever ``nn.Conv1d/2d/3d(groups=in_channels)`` stands.

They add nothing to the layer's state: attributes, ``repr``, initial values and ``state_dict`` are those of PyTorch's layer,
so an instance of one may become the other by changing its class, which is what :func:`flashdwc.convert` does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from flashdwc.core.backend import Explanation, Recorder, record
from flashdwc.ops import depthwise_conv1d, depthwise_conv2d, depthwise_conv3d

Size = int | tuple[int, ...] | list[int]


class _Depthwise:
    """What the three ranks share; comes before ``nn.Conv*d`` among the bases."""

    _operator: ClassVar[Callable[..., Tensor]]

    weight: Tensor
    bias: Tensor | None
    in_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if groups != in_channels:
            raise ValueError(f"groups: a depthwise layer needs groups == in_channels ({in_channels}), got {groups}")
        if in_channels < 1 or out_channels < 1 or out_channels % in_channels:
            raise ValueError(
                f"out_channels: expected a positive multiple of in_channels ({in_channels}), got {out_channels}"
            )
        super().__init__(  # type: ignore[call-arg]
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device,
            dtype,
        )

    # `forward` stays PyTorch's: it calls `_conv_forward(input, self.weight, self.bias)`, and so do the wrappers that
    # compute their own weight (weight standardisation, LoRA).
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        spatial = len(self.kernel_size)
        if isinstance(input, Tensor) and input.dim() > spatial and input.shape[-1 - spatial] != self.in_channels:
            # the operator would take the quotient for a channel multiplier
            expected = f"{self.in_channels} channels"
            raise ValueError(f"input: expected {expected}, got {input.shape[-1 - spatial]} in {tuple(input.shape)}")
        return self._operator(
            input, weight, bias, self.stride, self._padding(input), self.dilation, padding_mode=self.padding_mode
        )

    def _padding(self, input: Tensor) -> Any:
        return self.padding

    def explain(self, input: Tensor) -> Explanation:
        """Tells which backend would run this layer on ``input``, and why, without running it."""
        return self.record(input).explanations[0]

    def record(self, input: Tensor) -> Recorder:
        """The explanation, and the operators' calls that this layer and its gradients would make."""
        geometry = self.stride, self._padding(input), self.dilation
        return record(self._operator, input, self.weight, self.bias, *geometry, padding_mode=self.padding_mode)


class DepthwiseConv1d(_Depthwise, nn.Conv1d):
    """``nn.Conv1d`` with ``groups == in_channels``: ``[N, C, L]`` or ``[C, L]`` to ``[N, C * multiplier, L']``.

    Constructor, attributes, initial values and ``state_dict`` are PyTorch's. Raises ``ValueError`` if ``groups`` is not
    ``in_channels`` or ``out_channels`` not a multiple of it; the call raises what :func:`flashdwc.ops.depthwise_conv1d`
    raises.
    """

    _operator = staticmethod(depthwise_conv1d)


class DepthwiseConv2d(_Depthwise, nn.Conv2d):
    """``nn.Conv2d`` with ``groups == in_channels``: ``[N, C, H, W]`` or ``[C, H, W]`` to ``[N, C * multiplier, H', W']``.

    Constructor, attributes, initial values and ``state_dict`` are PyTorch's. Raises ``ValueError`` if ``groups`` is not
    ``in_channels`` or ``out_channels`` not a multiple of it; the call raises what :func:`flashdwc.ops.depthwise_conv2d`
    raises.
    """

    _operator = staticmethod(depthwise_conv2d)


class DepthwiseConv3d(_Depthwise, nn.Conv3d):
    """``nn.Conv3d`` with ``groups == in_channels``: ``[N, C, D, H, W]`` or ``[C, D, H, W]``, likewise out.

    Constructor, attributes, initial values and ``state_dict`` are PyTorch's. Raises ``ValueError`` if ``groups`` is not
    ``in_channels`` or ``out_channels`` not a multiple of it; the call raises what :func:`flashdwc.ops.depthwise_conv3d`
    raises.
    """

    _operator = staticmethod(depthwise_conv3d)


class DepthWiseConv2dImplicitGEMM(DepthwiseConv2d):
    """Stands in for the layer of the same name that RepLKNet, SLaK, UniRepLKNet and OverLoCK import.

    ``[N, channels, H, W]`` to the same shape for an odd ``kernel`` (int or pair): stride 1, padding ``kernel // 2``, no
    bias unless asked. Every attribute is the real one, so code that reads ``conv.padding`` to build an equivalent layer
    (re-parametrisation) gets the right one. To serve code that imports the extension::

        sys.modules["depthwise_conv2d_implicit_gemm"] = flashdwc.nn

    Source: https://github.com/DingXiaoH/RepLKNet-pytorch
    """

    def __init__(self, channels: int, kernel: Size, bias: bool = False) -> None:
        try:
            kernel_size = tuple(map(operator.index, kernel if isinstance(kernel, (tuple, list)) else (kernel, kernel)))
        except TypeError:
            raise TypeError(f"kernel: expected an int or a pair, got {kernel!r}") from None
        if len(kernel_size) != 2 or min(kernel_size) < 1:
            raise ValueError(f"kernel: expected an int or a pair, positive, got {kernel!r}")
        padding = tuple(k // 2 for k in kernel_size)
        super().__init__(channels, channels, kernel_size, padding=padding, groups=channels, bias=bias)


class DepthwiseConv2dSame(DepthwiseConv2d):
    """Padding chosen at each call so that ``[N, C, H, W]`` gives ``[N, C * multiplier, ceil(H / sh), ceil(W / sw)]``.

    This is TensorFlow's "SAME" (the odd element goes to the bottom and the right) and the depthwise form of timm's
    ``Conv2dSame``, whose constructor it has: ``padding`` is accepted and ignored. The padding is an argument of the
    operator; no padded copy of the input is made.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: str | Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, 0, dilation, groups, bias, device=device, dtype=dtype
        )

    def _padding(self, input: Tensor) -> tuple[Any, Any, Any, Any]:
        height, width = input.shape[-2:]
        if torch.jit.is_tracing():  # there sizes are tensors
            height, width = int(height), int(width)
        top, bottom = _same(height, self.kernel_size[0], self.stride[0], self.dilation[0])
        left, right = _same(width, self.kernel_size[1], self.stride[1], self.dilation[1])
        return left, right, top, bottom


def _same(size: int, kernel: int, stride: int, dilation: int) -> tuple[Any, Any]:
    """Padding before and after, so that a side of ``size`` gives ``ceil(size / stride)`` outputs."""
    outputs = (size + stride - 1) // stride
    total = torch.sym_max((outputs - 1) * stride + dilation * (kernel - 1) + 1 - size, 0)
    return total // 2, total - total // 2
