"""Fast spatial operators for PyTorch: depthwise convolution of any size and its relatives.

Most names are loaded when they are first used, so that ``import flashdwc`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .convert import convert, patch, restore  # at once: loaded later, the submodule would take the function's name

__version__ = "0.1.0"

_HOMES = {
    "ops": "ops",
    "nn": "nn",
    "models": "models",
    "depthwise_conv1d": "ops.depthwise",
    "depthwise_conv2d": "ops.depthwise",
    "depthwise_conv3d": "ops.depthwise",
    "depthwise_conv_transpose2d": "ops.depthwise",
    "explain": "core.backend",
    "CaptureError": "core.errors",
    "CompileError": "core.errors",
    "LaunchError": "core.errors",
    "UnsupportedError": "core.errors",
}

__all__ = ["__version__", "convert", "patch", "restore", *_HOMES]  # noqa: PLE0604

if TYPE_CHECKING:
    from . import models as models
    from . import nn as nn
    from . import ops as ops
    from .core.backend import explain as explain
    from .core.errors import CaptureError as CaptureError
    from .core.errors import CompileError as CompileError
    from .core.errors import LaunchError as LaunchError
    from .core.errors import UnsupportedError as UnsupportedError
    from .ops.depthwise import depthwise_conv1d as depthwise_conv1d
    from .ops.depthwise import depthwise_conv2d as depthwise_conv2d
    from .ops.depthwise import depthwise_conv3d as depthwise_conv3d
    from .ops.depthwise import depthwise_conv_transpose2d as depthwise_conv_transpose2d


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f".{_HOMES[name]}", __name__)
    value = home if name == _HOMES[name] else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
