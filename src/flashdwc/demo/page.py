"""The demo's outcome, as a page and as a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..bench.friendly import require
from ..bench.page import Cell, Page, environment_table
from ..bench.plots import INK, MUTED, OURS, THEIRS, figure, plain_ticks, svg
from ..bench.results import device_name, environment
from .digits import KERNEL, SIDE, Digits
from .photos import LayerGain, NetworkGain, encode, false_colours


def build_page(
    device: torch.device, photos: Sequence[tuple[str, Any]], networks: Sequence[NetworkGain], digits: Digits
) -> str:
    """The whole report as HTML."""
    page = Page(
        "Depthwise convolution, faster",
        "flashdwc.convert swaps a model's depthwise layers in place: the same weights, the same outputs, less time. "
        f"Measured here on {device_name(device)}.",
    )
    page.cards(_cards(networks, digits))
    for index, network in enumerate(networks):
        _network_section(page, network, photos if index == 0 else ())
    _digits_section(page, digits)
    page.section(
        "How it was measured",
        "All times are medians. The two sides ran in one process and took turns, so that a busy machine slows both. "
        "The weights of the photograph networks are random: the point is that the same numbers come out, sooner.",
    )
    environment_table(page, environment(device))
    return page.html()


def print_table(networks: Sequence[NetworkGain], digits: Digits, path: Path) -> None:
    table_module, console_module = require("rich.table"), require("rich.console")
    table = table_module.Table(title="flashdwc demo")
    table.add_column("what")
    for column in ("PyTorch", "flashdwc", "speed-up", "difference"):
        table.add_column(column, justify="right")
    for network in networks:
        for mode, difference in (("inference", f"{network.relative_difference:.0e}"), ("training step", "")):
            pair = network.pairs[mode, "contiguous"]
            name = f"{network.name}, {mode}"
            times, best = (_ms(pair.stock.median), _ms(pair.ours.median)), network.speedup_over_best(mode)
            table.add_row(name, *times, f"{pair.speedup:.2f}x ({best:.2f}x)", difference)
    table.add_row(
        "digits, training step",
        _ms(digits.stock.median_step_ms),
        _ms(digits.ours.median_step_ms),
        f"{digits.speedup:.2f}x",
        f"{digits.largest_loss_difference:.0e}",
    )
    table.add_row("digits, test accuracy", f"{digits.stock.accuracy:.1%}", f"{digits.ours.accuracy:.1%}", "", "")
    console = console_module.Console()
    console.print(table)
    console.print("contiguous; in brackets the faster layout of each side")
    console.print(f"report: {path}", soft_wrap=True, highlight=False)


def _cards(networks: Sequence[NetworkGain], digits: Digits) -> list[tuple[str | Cell, str, str]]:
    cards: list[tuple[str | Cell, str, str]] = []
    for network in networks:
        for mode in ("inference", "training step"):
            pair = network.pairs[mode, "contiguous"]
            detail = (
                f"{_ms(pair.stock.median)} to {_ms(pair.ours.median)}; {network.speedup_over_best(mode):.2f}x if both "
                "take their better memory layout"
            )
            cards.append((_gain(pair.speedup), f"{network.name}, {mode}", detail))
    step = f"{_ms(digits.stock.median_step_ms)} to {_ms(digits.ours.median_step_ms)}"
    cards.append((_gain(digits.speedup), "digits, training step", step))
    theirs = f"{digits.stock.accuracy:.1%} with PyTorch's layers"
    cards.append((f"{digits.ours.accuracy:.1%}", "digits recognised", theirs))
    return cards


def _network_section(page: Page, network: NetworkGain, photos: Sequence[tuple[str, Any]]) -> None:
    size = " x ".join(map(str, network.input_shape))
    page.section(
        network.name,
        f"{network.parameters / 1e6:.1f} million parameters, {len(network.layers)} depthwise layers, input {size}. "
        + _agreement(network),
    )
    if network.features is not None:
        for index, (name, image) in enumerate(photos):
            page.pictures(_strip(network, index, name, image))
        page.note(
            "False colours: the three strongest components of the first stage's features. The last picture shows where "
            "the two differ, white for one millionth of the largest feature; black means the same."
        )
    page.svg(_layer_bars(network.layers), f"Time of each depthwise layer of {network.name}")
    page.table(
        ("whole network", "memory layout", "PyTorch", "flashdwc", "speed-up"),
        [
            (mode, layout.replace("_", " "), _ms(pair.stock.median), _ms(pair.ours.median), _gain(pair.speedup))
            for (mode, layout), pair in network.pairs.items()
        ],
        numbers=(2, 3, 4),
    )
    with page.fold("Every layer, and why its backend"):
        page.table(
            ("layer", "input", "kernel", "PyTorch", "flashdwc", "speed-up", "backend", "why"),
            [
                (
                    layer.name,
                    "x".join(map(str, layer.shape)),
                    "x".join(map(str, layer.kernel)),
                    _ms(layer.stock_ms),
                    _ms(layer.ours_ms),
                    _gain(layer.speedup),
                    layer.backend,
                    layer.reason,
                )
                for layer in network.layers
            ],
            numbers=(3, 4, 5),
        )


def _agreement(network: NetworkGain) -> str:
    if network.difference == 0:
        return "The outputs before and after are the same to the last bit."
    return (
        f"The outputs before and after differ by {network.difference:.1e} at most, "
        f"{network.relative_difference:.1e} of the largest output."
    )


def _strip(network: NetworkGain, index: int, name: str, image: Any) -> list[tuple[bytes, str]]:
    assert network.features is not None  # the caller asked
    before, after, difference = false_colours(network.features[0][index], network.features[1][index])
    return [
        (encode(image, 480), name),
        (before, "features, PyTorch"),
        (after, "features, flashdwc"),
        (difference, "difference, a million times"),
    ]


def _layer_bars(layers: Sequence[LayerGain]) -> str:
    fig, ax = figure(height=1.2 + 0.36 * len(layers))
    for index, layer in enumerate(layers):
        ax.barh(index - 0.18, layer.stock_ms, height=0.34, color=THEIRS)
        ax.barh(index + 0.18, layer.ours_ms, height=0.34, color=OURS)
        end = max(layer.stock_ms, layer.ours_ms)
        ax.text(end * 1.06, index, f"{layer.speedup:.1f}x", va="center", fontsize=8, color=INK)
    ax.set_xscale("log")
    ax.set_xlim(right=max(max(layer.stock_ms, layer.ours_ms) for layer in layers) * 2)
    labels = []
    for layer in layers:
        kernel, stride = "x".join(map(str, layer.kernel)), layer.stride[0]
        labels.append(f"{kernel}{'' if stride == 1 else f' /{stride}'} on {'x'.join(map(str, layer.shape[1:]))}")
    ax.set_yticks(range(len(layers)), labels)
    ax.set_ylim(len(layers) - 0.4, -0.6)
    ax.grid(False, axis="y")
    plain_ticks(ax.xaxis)
    ax.set_xlabel("milliseconds, logarithmic (shorter is better)")
    ax.set_title("Each depthwise layer", loc="left", fontsize=11, color=INK)
    _legend(fig)
    return svg(fig)


def _digits_section(page: Page, digits: Digits) -> None:
    page.section(
        "Training on handwritten digits",
        f"A small network with {KERNEL} x {KERNEL} depthwise kernels learns scikit-learn's digits (scaled to {SIDE} x "
        f"{SIDE}), twice from the same seed: {digits.train_images} images, {digits.epochs} epochs, "
        f"{len(digits.ours.losses)} steps. "
        f"It recognises {digits.ours.accuracy:.1%} of {digits.test_images} digits it never saw "
        f"({digits.stock.accuracy:.1%} with PyTorch's layers). The two losses never differ by more than "
        f"{digits.largest_loss_difference:.1e}.",
    )
    page.svg(_loss_curves(digits), "Loss of both trainings", "The two curves lie on each other.")
    page.svg(_step_times(digits), "Time of every training step")
    page.pictures(
        [
            (_digit_picture(picture), f"{label}, read as {prediction}")
            for picture, label, prediction in zip(digits.samples, digits.labels, digits.predictions, strict=True)
        ],
        narrow=True,
    )


def _loss_curves(digits: Digits) -> str:
    fig, ax = figure(height=3.2)
    ax.plot(digits.stock.losses, color=THEIRS, linewidth=4, label="PyTorch")
    ax.plot(digits.ours.losses, color=OURS, linewidth=1.3, label="flashdwc")
    ax.set_yscale("log")
    ax.set_xlabel("training step")
    ax.set_ylabel("cross-entropy")
    ax.set_title("Training loss", loc="left", fontsize=11, color=INK)
    fig.legend(loc="outside lower right", ncols=2, frameon=False, fontsize=8.5)
    return svg(fig)


def _step_times(digits: Digits) -> str:
    fig, ax = figure(height=1.9)
    both = (("PyTorch", digits.stock.median_step_ms, THEIRS), ("flashdwc", digits.ours.median_step_ms, OURS))
    for index, (_, milliseconds, color) in enumerate(both):
        ax.barh(index, milliseconds, height=0.6, color=color)
        ax.text(milliseconds, index, f" {milliseconds:.3g} ms", va="center", fontsize=9, color=INK)
    ax.set_yticks((0, 1), [name for name, _, _ in both])
    ax.set_ylim(1.6, -0.6)
    ax.set_xlim(0, max(milliseconds for _, milliseconds, _ in both) * 1.2)
    ax.grid(False, axis="y")
    ax.set_xlabel("milliseconds for one training step, median", color=MUTED)
    ax.set_title("Time per step", loc="left", fontsize=11, color=INK)
    return svg(fig)


def _digit_picture(
    pixels: torch.Tensor,  # [H, W] in -1..1
) -> bytes:
    shades = ((1 - pixels) * 127.5).clamp(0, 255).byte().numpy()
    return encode(require("PIL.Image").fromarray(shades), 96)


def _legend(fig: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=THEIRS, label="PyTorch"), Patch(color=OURS, label="flashdwc")]
    fig.legend(handles=handles, loc="outside lower right", ncols=2, frameon=False, fontsize=8.5)


def _gain(ratio: float) -> Cell:
    return Cell(f"{ratio:.2f}x", "good" if ratio >= 1.05 else "bad" if ratio < 0.95 else "")


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"
