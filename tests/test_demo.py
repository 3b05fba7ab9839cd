"""The demo from end to end, on real photographs and digits."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from flashdwc import demo
from flashdwc.cli import main
from flashdwc.demo import digits, page, photos

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Runs the demo once and keeps what it handed to the page."""
    seen = {}
    build = page.build_page

    def spy(device, pictures, networks, trained):
        seen.update(pictures=pictures, networks=networks, digits=trained)
        return build(device, pictures, networks, trained)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "build_page", spy)
        seen["path"] = demo.run(demo.Options(CPU, tmp_path_factory.mktemp("demo"), quick=True))
    return seen


def test_outputs_agree_before_and_after(outcome):
    assert [name for name, _ in outcome["pictures"]] == ["china.jpg", "flower.jpg"]
    assert [network.name for network in outcome["networks"]] == ["RepLKNet-31", "ConvNeXt"]
    for network in outcome["networks"]:
        assert network.relative_difference < 1e-5
    before, after = outcome["networks"][0].features
    assert before.std() > 0.1, "the features are alive"
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_every_layer_is_timed(outcome):
    replknet, convnext = outcome["networks"]
    assert {layer.kernel for layer in replknet.layers} >= {(31, 31), (29, 29), (27, 27), (13, 13), (5, 5)}
    assert {layer.kernel for layer in convnext.layers} == {(7, 7)}
    for layer in [*replknet.layers, *convnext.layers]:
        assert layer.stock_ms > 0
        assert layer.ours_ms > 0
        assert layer.backend in ("cpu", "torch")
    assert set(replknet.pairs) == {
        (mode, layout) for mode in ("inference", "training step") for layout in ("contiguous", "channels_last")
    }


def test_both_trainings_learn_the_same(outcome):
    trained = outcome["digits"]
    assert trained.ours.accuracy > 0.95
    assert abs(trained.ours.accuracy - trained.stock.accuracy) < 0.01
    assert len(trained.ours.losses) == digits.total_steps(trained.epochs)
    assert trained.ours.losses[-1] < 0.2 * trained.ours.losses[0]
    assert trained.largest_loss_difference < 1e-2
    assert trained.train_images + trained.test_images == 1797


def test_the_page_stands_alone(outcome):
    html = outcome["path"].read_text(encoding="utf-8")
    assert outcome["path"].name == "report.html"
    assert html.count("data:image/png;base64,") == 2 * 4 + 8
    assert html.count("data:image/svg+xml;base64,") == 4
    for link in ("http:", "https:", "<script", "<link"):
        assert link not in html
    for words in ("RepLKNet-31", "ConvNeXt", "Training on handwritten digits", "china.jpg", torch.__version__):
        assert words in html


def test_the_table_is_short(outcome, capsys):
    page.print_table(outcome["networks"], outcome["digits"], outcome["path"])
    text = capsys.readouterr().out
    for words in ("RepLKNet-31", "ConvNeXt", "test accuracy", "speed-up", "report.html"):
        assert words in text
    assert len(text.splitlines()) < 20


def test_a_picture_of_ones_own(tmp_path):
    Image.new("RGBA", (50, 200), (200, 30, 30, 128)).save(tmp_path / "mine.webp")
    (picture,) = photos.load_photos(str(tmp_path / "mine.webp"))
    assert picture[0] == "mine.webp"
    batch = photos.to_batch([picture], 128)
    assert batch.shape == (1, 3, 128, 32)
    assert batch.isfinite().all()


def test_a_failure_comes_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(photos, "measure_network", lambda *_, **__: pytest.fail("worked before checking"))
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file"), "--device", "cpu"]) == 1
