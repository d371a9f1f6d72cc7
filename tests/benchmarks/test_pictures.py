# SPDX-License-Identifier: Apache-2.0
"""Every result has a picture that was drawn from it, and the general picture shows each claim against its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from benchmarks import pictures
from benchmarks.harness import RESULTS, Claim, Row
from tools.pictures import PAGE, page, stale


def result(*claims: Claim) -> dict[str, Any]:
    return {"benchmark": "some", "claims": [claim.to_json() for claim in claims], "rows": [{"a": 1}]}


def test_every_result_has_a_picture_that_is_up_to_date() -> None:
    assert [path.name for path in stale()] == [], "run: python -m tools.pictures"
    assert PAGE.read_text() == page(PAGE.read_text()), "run: python -m tools.pictures"
    for path in RESULTS.glob("*.json"):
        assert f"results/{path.stem}.png)" in PAGE.read_text()
    large = {path.name: path.stat().st_size for path in RESULTS.glob("*.png")}
    assert {name: size for name, size in large.items() if size > pictures.MOST_BYTES} == {}
    assert {path.stem for path in RESULTS.glob("*.png")} == {path.stem for path in RESULTS.glob("*.json")}


def test_a_picture_of_another_result_is_stale(tmp_path: Path) -> None:
    name = "streams.cpu.json"
    content = (RESULTS / name).read_text()
    (tmp_path / name).write_text(content)
    assert stale(tmp_path) == [tmp_path / name]
    picture = tmp_path / "streams.cpu.png"
    picture.write_bytes((RESULTS / "streams.cpu.png").read_bytes())
    assert stale(tmp_path) == []
    (tmp_path / name).write_text(content.replace('"per_s_1": ', '"per_s_1": 1', 1))
    assert stale(tmp_path) == [tmp_path / name]
    Image.new("RGB", (2, 2)).save(picture)
    (tmp_path / name).write_text(content)
    assert stale(tmp_path) == [tmp_path / name]


def test_new_words_for_a_claim_make_its_picture_stale() -> None:
    plain, titled = Claim("x", 1.0, "", "higher", 1.0), Claim("x", 1.0, "", "higher", 1.0, title="Words")
    assert pictures.digest(result(plain)) != pictures.digest(result(titled))
    assert pictures.digest(result(plain)) == pictures.digest(result(plain))


@pytest.mark.parametrize(
    ("value", "target", "better", "expected"),
    [
        (3.0, 1.5, "higher", 2.0),
        (0.75, 1.5, "higher", 0.5),
        (0.75, 1.5, "lower", 2.0),
        (1220.0, 2.0, "higher", 10.0),
        (0.0, 3.5, "higher", 0.1),
        (0.0, 0.02, "lower", 10.0),
        (0.0, 0.0, "lower", 1.0),
        (3.0, 0.0, "lower", 0.1),
        (-0.0199, 0.05, "lower", 10.0),
        (-0.02, -0.01, "higher", 0.5),
        (-0.005, -0.01, "higher", 2.0),
    ],
)
def test_how_many_times_better_than_its_target(
    value: float, target: float, better: str, expected: float
) -> None:
    assert pictures.advantage(value, target, better) == pytest.approx(expected)


def colours(picture: Path) -> list[tuple[int, int]]:
    """The numbers of greenish and of orange pixels, left and right of the target's line."""
    with Image.open(picture) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    red, green, blue = np.moveaxis(pixels, -1, 0)
    marks = ((green > red + 40) & (green > blue + 40), (red > blue + 100) & (red > green + 40))
    dark = (pixels.sum(axis=-1) < 150).mean(axis=0)
    (frames,) = np.nonzero(dark > 0.5)  # the axes' left, the line of the target, the axes' right
    line = frames[np.argmin(np.abs(frames - frames.mean()))]
    return [(int(of[:, :line].sum()), int(of[:, line:].sum())) for of in marks]


def test_what_holds_is_right_of_the_line_and_what_was_missed_left(tmp_path: Path) -> None:
    holds, missed = Claim("a", 4.0, "x", "higher", 2.0), Claim("b", 9.0, "ms", "lower", 3.0)
    for claim, (green, orange) in ((holds, ("right", None)), (missed, (None, "left"))):
        picture = tmp_path / f"{claim.id}.png"
        pictures.draw(result(claim), picture, None)
        for (left, right), side in zip(colours(picture), (green, orange), strict=True):
            assert (left > 200, right > 200) == (side == "left", side == "right")


def test_a_near_miss_is_orange_and_an_interval_leaves_the_figures_free(tmp_path: Path) -> None:
    """Few pixels of a colour among many of others; and figures that begin where the interval ends."""
    kept = [Claim(f"c{at}", 4.0, "x", "higher", 2.0) for at in range(8)]
    pictures.draw(result(*kept, Claim("m", 1.02, "ms", "lower", 1.0)), tmp_path / "near.png", None)
    assert sum(colours(tmp_path / "near.png")[1]) > 30
    whole = Claim("i", 0.75, "", "higher", 0.8)
    wide = Claim("i", 0.75, "", "higher", 0.8, interval=(0.6, 1.2))
    places = []
    for claim in (whole, wide):
        axes = Figure().add_subplot()
        pictures._claim_bar(axes, 0, claim.to_json())
        places.append(axes.texts[0].xy[0])
    assert places == [1.0, 1.2 / 0.8]


def test_equal_results_give_equal_pictures_with_their_digest(tmp_path: Path) -> None:
    drawn = result(Claim("a", 4.0, "x", "higher", 2.0, interval=(3.0, 5.0)))
    for name in ("1.png", "2.png"):
        pictures.draw(drawn, tmp_path / name, None)
    assert (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes()
    assert pictures.drawn_from(tmp_path / "1.png") == pictures.digest(drawn)


def test_a_benchmarks_own_drawing_gets_the_rows_and_the_digest(tmp_path: Path) -> None:
    given: list[Any] = []

    def plot(rows: Any, path: Path) -> None:
        given.append(rows)
        Image.new("RGB", (40, 30), "red").save(path)

    rows: list[Row] = [{"a": 1}]
    pictures.draw(result(), tmp_path / "own.png", plot)
    assert given == [rows]
    assert pictures.drawn_from(tmp_path / "own.png") == pictures.digest(result())
    with Image.open(tmp_path / "own.png") as image:
        assert image.size == (40, 30)
    assert [path.name for path in tmp_path.iterdir()] == ["own.png"]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("streams", None),
        ("catalog_scaling", "benchmarks.catalog_scaling"),
        ("quality_ml1m", "benchmarks.quality"),
        ("quality_hstu_ml1m", "benchmarks.quality"),
        ("quality_rules", None),
    ],
)
def test_which_drawing_a_benchmark_has(name: str, module: str | None) -> None:
    plot = pictures.own_plot(name)
    assert (None if plot is None else plot.__module__) == module
