"""Modules over :mod:`flashdwc.ops`; each is a subclass of the PyTorch layer that it replaces."""

from .depthwise import (
    DepthwiseConv1d,
    DepthwiseConv2d,
    DepthWiseConv2dImplicitGEMM,
    DepthwiseConv2dSame,
    DepthwiseConv3d,
)

__all__ = [
    "DepthWiseConv2dImplicitGEMM",
    "DepthwiseConv1d",
    "DepthwiseConv2d",
    "DepthwiseConv2dSame",
    "DepthwiseConv3d",
]
