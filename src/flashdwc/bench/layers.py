"""Models by name, and the depthwise layers inside a model with the inputs that reach them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .case import LAYOUTS
from .friendly import INSTALL, UserError, closest, require

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Model = TypeVar("Model", bound=nn.Module)


def in_layout(model: Model, layout: str) -> Model:
    """The model itself, its parameters in this memory format."""
    move: Any = model.to  # releases of torch before 2.14 take memory_format but do not declare it
    return move(memory_format=LAYOUTS[layout])


def build_model(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A model with random weights and its input size ``(C, H, W)``, from flashdwc.models, timm or torchvision.

    A prefix as in ``timm:convnext_atto`` chooses the collection. ``UserError`` names the closest names where none fits.
    """
    prefix, _, bare = name.rpartition(":")
    if prefix not in ("", *_COLLECTIONS):
        raise UserError(f"unknown collection {prefix!r}: expected {', '.join(_COLLECTIONS)}", code=2)
    if prefix in _PACKAGES:
        require(prefix)
    known: list[str] = []
    for collection, (names, build) in _COLLECTIONS.items():
        if prefix in ("", collection):
            available = names()
            if bare in available:
                return build(bare)
            known += available
    missing = [package for package in _PACKAGES if find_spec(package) is None]
    hint = f"; not installed: {', '.join(missing)} ({INSTALL})" if missing else ""
    raise UserError(f"unknown model {name!r}{closest(bare, known)}{hint}", code=2)


def _our_names() -> list[str]:
    import flashdwc.models

    return [name for name in flashdwc.models.__all__ if name.islower()]


def _build_ours(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    import flashdwc.models

    return getattr(flashdwc.models, name)(), (3, 224, 224)


def _timm_names() -> list[str]:
    if find_spec("timm") is None:
        return []
    import timm

    return timm.list_models()


def _build_timm(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    import timm

    model: Any = timm.create_model(name)
    return model, tuple(model.default_cfg.get("input_size", (3, 224, 224)))


def _torchvision_names() -> list[str]:
    if find_spec("torchvision") is None:
        return []
    models = import_module("torchvision.models")
    return models.list_models(module=models)


def _build_torchvision(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    return import_module("torchvision.models").get_model(name, weights=None), (3, 224, 224)


_PACKAGES = "timm", "torchvision"  # that have models and may be missing
Build = Callable[[str], tuple[nn.Module, tuple[int, ...]]]
_COLLECTIONS: dict[str, tuple[Callable[[], list[str]], Build]] = {
    "flashdwc": (_our_names, _build_ours),
    "timm": (_timm_names, _build_timm),
    "torchvision": (_torchvision_names, _build_torchvision),
}


def depthwise_layers(model: nn.Module) -> dict[str, Any]:
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, CONVOLUTIONS) and layer.groups == layer.in_channels > 1
    }


@dataclass(frozen=True)
class Recorded:
    name: str
    layer: Any  # an nn.Conv1d, 2d or 3d
    input: Tensor  # of its first call


def record_layers(model: nn.Module, *inputs: Tensor) -> list[Recorded]:
    """Runs the model once without gradients; its depthwise layers in the order of their first calls."""
    seen: dict[str, Recorded] = {}

    def recorder(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            seen.setdefault(name, Recorded(name, layer, args[0].detach()))

        return hook

    handles = [layer.register_forward_pre_hook(recorder(name)) for name, layer in depthwise_layers(model).items()]
    try:
        with torch.no_grad(), evaluating(model):
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return list(seen.values())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
