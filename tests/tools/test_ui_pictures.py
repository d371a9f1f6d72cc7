# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/ui.md keep the colours of the page."""

from __future__ import annotations

import numpy as np
from PIL import Image

from tools.ui_pictures import few_colours

GREEN = (26, 127, 75)


def test_a_small_thing_keeps_its_colour_among_many_greys_and_blues() -> None:
    """A page has thousands of shades at the edges of its letters, and an arrow that is better has few pixels."""
    rng = np.random.default_rng(0)
    shot = np.full((400, 400, 3), 255, np.uint8)
    shot[:300] = rng.integers(0, 256, (300, 400, 1), dtype=np.uint8)
    shot[:100, :, 2] = rng.integers(120, 256, (100, 400))
    shot[350:356, 20:30] = GREEN
    kept = np.asarray(few_colours(Image.fromarray(shot)).convert("RGB")).astype(int)
    assert np.abs(kept[350:356, 20:30] - GREEN).max() <= 12
