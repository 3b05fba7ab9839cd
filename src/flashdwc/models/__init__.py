"""Large-kernel networks that no package ships, built of :mod:`flashdwc.nn` layers."""

from .replknet import (
    RepLKNet,
    create_RepLKNet31B,
    create_RepLKNet31L,
    create_RepLKNetXL,
    replknet_31b,
    replknet_31l,
    replknet_xl,
)
from .slak import (
    SLaK,
    SLaK_base,
    SLaK_small,
    SLaK_tiny,
    slak_base,
    slak_small,
    slak_tiny,
)

__all__ = [
    "RepLKNet",
    "SLaK",
    "SLaK_base",
    "SLaK_small",
    "SLaK_tiny",
    "create_RepLKNet31B",
    "create_RepLKNet31L",
    "create_RepLKNetXL",
    "replknet_31b",
    "replknet_31l",
    "replknet_xl",
    "slak_base",
    "slak_small",
    "slak_tiny",
]
