"""RepLKNet: "Scaling Up Your Kernels to 31x31: Revisiting Large Kernel Design in CNNs", https://arxiv.org/abs/2203.06717.

Four stages of blocks in pairs: a ``RepLKBlock`` (1x1, depthwise KxK, 1x1) that mixes space and a ``ConvFFN`` (1x1, 1x1) that
mixes channels, each a residual branch behind a BatchNorm. The large kernel is trained together with a small one on the
same input; :meth:`RepLKNet.structural_reparam` merges them for inference. Parameter names are those of the published
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flashdwc.nn import DepthwiseConv2d

from .blocks import DropPath, centred, check_kernels, conv_norm, drop_rates, merge


def _pointwise(inputs: int, outputs: int, *, activation: bool = False) -> nn.Sequential:
    return conv_norm(nn.Conv2d(inputs, outputs, 1, bias=False), activation=activation)


class ReparamLargeKernelConv(nn.Module):
    """Depthwise ``kernel_size`` and ``small_kernel`` convolutions of one input, each with its BatchNorm, summed.

    ``small_kernel=None`` leaves the large one alone. ``small_kernel_merged`` builds the merged form at once. Raises
    ``ValueError`` for even kernels and a small one above the large.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        small_kernel: int | None = 5,
        *,
        small_kernel_merged: bool = False,
        depthwise: type[nn.Conv2d] = DepthwiseConv2d,
    ) -> None:
        super().__init__()
        check_kernels(kernel_size, small_kernel)
        self.lkb_reparam: nn.Conv2d | None = None
        self.lkb_origin: nn.Sequential | None = None
        self.small_conv: nn.Sequential | None = None
        if small_kernel_merged:
            self.lkb_reparam = centred(depthwise, channels, kernel_size, bias=True)
            return
        self.lkb_origin = conv_norm(centred(depthwise, channels, kernel_size))
        if small_kernel is not None:
            self.small_conv = conv_norm(centred(depthwise, channels, small_kernel))

    def forward(
        self,
        x: Tensor,  # [N, C, H, W]
    ) -> Tensor:  # [N, C, H, W]
        if self.lkb_origin is None:
            assert self.lkb_reparam is not None
            return self.lkb_reparam(x)
        y = self.lkb_origin(x)
        return y if self.small_conv is None else y + self.small_conv(x)

    def merge_kernel(self) -> None:
        """Folds both branches and their BatchNorms into one convolution with bias; what is merged stays as it is."""
        if self.lkb_origin is None:
            return
        branches = [self.lkb_origin] if self.small_conv is None else [self.lkb_origin, self.small_conv]
        self.lkb_reparam = merge(branches)
        self.lkb_origin = self.small_conv = None


class RepLKBlock(nn.Module):
    """``x + drop_path(1x1(relu(large_kernel(1x1(bn(x))))))`` with ``dw_channels`` channels inside."""

    def __init__(
        self,
        channels: int,
        dw_channels: int,
        drop_path: float,
        large_kernel: ReparamLargeKernelConv,
    ) -> None:
        super().__init__()
        self.prelkb_bn = nn.BatchNorm2d(channels)
        self.pw1 = _pointwise(channels, dw_channels, activation=True)
        self.large_kernel = large_kernel
        self.lk_nonlinear = nn.ReLU()
        self.pw2 = _pointwise(dw_channels, channels)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.large_kernel(self.pw1(self.prelkb_bn(x)))
        return x + self.drop_path(self.pw2(self.lk_nonlinear(y)))


class ConvFFN(nn.Module):
    """``x + drop_path(1x1(gelu(1x1(bn(x)))))`` with ``internal_channels`` channels inside."""

    def __init__(self, channels: int, internal_channels: int, drop_path: float) -> None:
        super().__init__()
        self.preffn_bn = nn.BatchNorm2d(channels)
        self.pw1 = _pointwise(channels, internal_channels)
        self.nonlinear = nn.GELU()
        self.pw2 = _pointwise(internal_channels, channels)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.pw2(self.nonlinear(self.pw1(self.preffn_bn(x)))))


class _Stage(nn.Module):
    def __init__(self, blocks: list[nn.Module], norm: nn.Module, use_checkpoint: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm  # for intermediate features only
        self.use_checkpoint = use_checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            recompute = self.use_checkpoint and torch.is_grad_enabled()
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x


class RepLKNet(nn.Module):
    """RepLKNet of any width and depth: ``[N, in_channels, H, W]`` to logits ``[N, num_classes]``.

    ``large_kernel_sizes``, ``layers`` and ``channels`` hold one number for each stage (any number of stages; stage ``i``
    works at 1/2**(i+2) of the input's resolution). ``num_classes=None`` gives the pooled features ``[N, channels[-1]]``, and
    ``out_indices`` a list of the feature maps of these stages instead, each behind a BatchNorm if
    ``norm_intermediate_features``. ``use_checkpoint`` recomputes the blocks in the backward pass to save memory.
    ``depthwise`` is the class of the depthwise layers; pass ``nn.Conv2d`` for a network of PyTorch's own.

    Raises ``ValueError`` if the stages do not match, or for kernels that are even or do not nest.
    """

    def __init__(
        self,
        large_kernel_sizes: Sequence[int],
        layers: Sequence[int],
        channels: Sequence[int],
        drop_path_rate: float = 0.0,
        small_kernel: int | None = 5,
        dw_ratio: float = 1,
        ffn_ratio: float = 4,
        in_channels: int = 3,
        num_classes: int | None = 1000,
        out_indices: Sequence[int] | None = None,
        use_checkpoint: bool = False,
        small_kernel_merged: bool = False,
        norm_intermediate_features: bool = False,
        *,
        depthwise: type[nn.Conv2d] = DepthwiseConv2d,
    ) -> None:
        super().__init__()
        if not len(large_kernel_sizes) == len(layers) == len(channels) > 0:
            raise ValueError(
                "large_kernel_sizes, layers, channels: expected one number for each stage, got "
                f"{len(large_kernel_sizes)}, {len(layers)} and {len(channels)}"
            )
        if out_indices is not None and not all(0 <= i < len(layers) for i in out_indices):
            raise ValueError(f"out_indices: expected numbers from 0 to {len(layers) - 1}, got {list(out_indices)}")
        self.out_indices = None if out_indices is None else tuple(out_indices)

        def spatial(width: int, stride: int) -> nn.Sequential:
            return conv_norm(centred(depthwise, width, 3, stride), activation=True)

        first = channels[0]
        self.stem = nn.ModuleList(
            [
                conv_norm(nn.Conv2d(in_channels, first, 3, 2, 1, bias=False), activation=True),
                spatial(first, stride=1),
                _pointwise(first, first, activation=True),
                spatial(first, stride=2),
            ]
        )
        self.stages = nn.ModuleList()
        for kernel, width, rates in zip(large_kernel_sizes, channels, drop_rates(drop_path_rate, layers)):
            inner = int(width * dw_ratio)
            large = partial(
                ReparamLargeKernelConv,
                inner,
                kernel,
                small_kernel,
                small_kernel_merged=small_kernel_merged,
                depthwise=depthwise,
            )
            blocks: list[nn.Module] = []
            for rate in rates:
                blocks += [
                    RepLKBlock(width, inner, rate, large()),
                    ConvFFN(width, int(width * ffn_ratio), rate),
                ]
            norm = nn.BatchNorm2d(width) if norm_intermediate_features else nn.Identity()
            self.stages.append(_Stage(blocks, norm, use_checkpoint))
        self.transitions = nn.ModuleList(
            nn.Sequential(_pointwise(narrow, wide, activation=True), spatial(wide, stride=2))
            for narrow, wide in pairwise(channels)
        )
        if self.out_indices is None:
            self.norm = nn.BatchNorm2d(channels[-1])
            self.head = nn.Linear(channels[-1], num_classes) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> list[Tensor]:
        """The output of every stage: ``[N, channels[i], H / 2**(i+2), W / 2**(i+2)]``."""
        for layer in self.stem:
            x = layer(x)
        features = []
        for index, stage in enumerate(self.stages):
            x = stage(x if index == 0 else self.transitions[index - 1](x))
            features.append(x)
        return features

    def forward(
        self,
        x: Tensor,  # [N, in_channels, H, W]
    ) -> Tensor | list[Tensor]:
        features = self.forward_features(x)
        if self.out_indices is not None:
            return [self.stages[i].norm(features[i]) for i in self.out_indices]  # type: ignore[operator]
        return self.head(self.norm(features[-1]).mean((2, 3)))

    def structural_reparam(self) -> None:
        """Merges the small kernels and BatchNorms into the large kernels, in place; evaluation gives the same output."""
        for module in list(self.modules()):
            if isinstance(module, ReparamLargeKernelConv):
                module.merge_kernel()


_KERNELS_31, _LAYERS = (31, 29, 27, 13), (2, 2, 18, 2)


def replknet_31b(drop_path_rate: float = 0.3, num_classes: int | None = 1000, **options: Any) -> RepLKNet:
    """RepLKNet-31B, 79 million parameters; ``options`` are those of :class:`RepLKNet`."""
    return RepLKNet(
        _KERNELS_31,
        _LAYERS,
        (128, 256, 512, 1024),
        drop_path_rate,
        num_classes=num_classes,
        **options,
    )


def replknet_31l(drop_path_rate: float = 0.3, num_classes: int | None = 1000, **options: Any) -> RepLKNet:
    """RepLKNet-31L, 172 million parameters; ``options`` are those of :class:`RepLKNet`."""
    return RepLKNet(
        _KERNELS_31,
        _LAYERS,
        (192, 384, 768, 1536),
        drop_path_rate,
        num_classes=num_classes,
        **options,
    )


def replknet_xl(drop_path_rate: float = 0.3, num_classes: int | None = 1000, **options: Any) -> RepLKNet:
    """RepLKNet-XL, 335 million parameters: no small kernel, wider depthwise layers; ``options`` as for the others."""
    options = {"small_kernel": None, "dw_ratio": 1.5, **options}
    channels = (256, 512, 1024, 2048)
    return RepLKNet(
        (27, 27, 27, 13),
        _LAYERS,
        channels,
        drop_path_rate,
        num_classes=num_classes,
        **options,
    )


# the names in the authors' code
create_RepLKNet31B, create_RepLKNet31L, create_RepLKNetXL = (
    replknet_31b,
    replknet_31l,
    replknet_xl,
)
