"""``flashdwc demo``: what the package does, on real input, in a few minutes on a CPU.

Two networks see photographs before and after ``flashdwc.convert``; a third is trained on handwritten digits with
PyTorch's layers and with flashdwc's. The outcome is one HTML page and a short table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..bench.friendly import output_folder, require, write_text


@dataclass(frozen=True)
class Options:
    device: torch.device
    out: Path = Path("flashdwc-demo")
    image: str | None = None  # a picture of the user's own in place of the two photographs
    quick: bool = False


def run(options: Options) -> Path:
    """Runs the demo, prints its table, and returns the path of the page. ``UserError`` for what the user can mend."""
    from .digits import total_steps, train_both
    from .page import build_page, print_table
    from .photos import convnext, load_photos, measure_network, replknet, to_batch

    for module in ("matplotlib", "numpy", "sklearn", "timm"):  # before the first minute is spent
        require(module)
    progress_module = require("rich.progress")
    folder = output_folder(options.out)
    photos = load_photos(options.image)
    batch = to_batch(photos, 192 if options.quick else 384).to(options.device)
    seconds = 1.0 if options.quick else 8.0
    epochs, width = (5, 16) if options.quick else (6, 24)

    columns = ("{task.description}", progress_module.BarColumn(), "{task.percentage:>3.0f}%")
    with progress_module.Progress(*columns, progress_module.TimeElapsedColumn(), transient=True) as progress:
        networks = []
        looking = progress.add_task("networks on photographs", total=2)
        for name, model in (("RepLKNet-31", replknet(options.quick)), ("ConvNeXt", convnext())):
            networks.append(measure_network(name, model.to(options.device), batch, seconds=seconds))
            progress.advance(looking)
        training = progress.add_task("training on handwritten digits", total=total_steps(epochs))
        digits = train_both(epochs, width, options.device, lambda: progress.advance(training))
        page = build_page(options.device, photos, networks, digits)
    path = write_text(folder / "report.html", page)
    print_table(networks, digits, path)
    return path
