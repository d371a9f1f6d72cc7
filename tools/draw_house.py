# SPDX-License-Identifier: Apache-2.0
"""Draws jgr's house from its imports: floors as bands, rooms as boxes, and the way of two requests through them.

    python -m tools.draw_house [--out=docs/house.svg]

A room is a package of jgr/, or what stands beside packages (`plain`: config.py and its like; `serving`: api.py and its
like). The floors are those that tests/test_layering.py enforces. A grey arrow is an import; it is left out where a
longer way of arrows says as much. Coloured lines are the moves between rooms of one warm recommend and one warm cached
rank, either way, as tools/trace_request.py counts them.

The SVG holds the data that it was drawn from, so that a test can tell whether the imports are still these.
"""

from __future__ import annotations

import ast
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

from tools.trace_request import Trace, trace_all

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "house.svg"
BEGIN, END = "<!-- house: ", " -->"
NAMES = ("plain data", "ops", "models", "memory", "policies", "drivers", "commands")
"""What the floors are called, the lowest first."""
COLOURS = {"recommend": "#0b62c4", "rank": "#d9480f"}

WIDTH, LEFT, ROW, GAP, BOX = 10.1, 1.7, 0.85, 0.2, (1.5, 0.46)
"""Inches: the picture without its left margin, that margin, a row, the room between floors, and a box."""
DRIVERS = 5
COLUMNS = {
    "cli": 0.56, "serving/http": 0.3, "serving/versions": 0.3, "serving/decoders": 0.04, "serving/scorers": 0.56,
    "serving/engine": 0.3, "serving": 0.3, "serving/cluster": 0.04, "serving/policies": 0.56,
    "evaluation": 0.76, "traffic": 0.88, "simulation": 1.0, "features": 0.52, "placement": 0.98, "cache": 0.75,
    "embeddings": 0.3, "training": 0.98, "models": 0.75, "ops": 0.95, "plain": 0.06, "catalog": 0.29, "prompt": 0.52,
    "data": 0.75,
}  # fmt: skip
"""Where a room stands between the left (0) and the right end (1) of its row, so that few lines cross; others: 0.9."""

Edge = tuple[str, str]


class House(NamedTuple):
    """The data of the picture. floors: the lowest first, for each its rooms by name with their numbers of lines.

    imports: from a room to another. ways: for each kind of request, the number of moves from a room to another."""

    floors: tuple[Mapping[str, int], ...]
    imports: tuple[Edge, ...]
    ways: Mapping[str, tuple[tuple[Edge, int], ...]]

    def to_json(self) -> str:
        """Without the numbers of lines, which change with every commit."""
        floors = [sorted(floor) for floor in self.floors]
        ways = {kind: [edge for edge, _ in moves] for kind, moves in self.ways.items()}
        return json.dumps({"floors": floors, "imports": self.imports, "ways": ways})


def room_of(file: str) -> str:
    """The room of a file, by its path below jgr/."""
    folders = file.split("/")[:-1]
    if not folders:
        return "plain"
    return "/".join(folders[: 2 if folders[0] == "serving" else 1])


def read_house(traces: Mapping[str, Trace]) -> House:
    """The house as the files are now, with the ways of these requests."""
    rooms, imports = Counter[str](), set[Edge]()
    floor_of: dict[str, int] = {}
    places = _floors()
    for path in sorted((ROOT / "jgr").rglob("*.py")):
        file = path.relative_to(ROOT / "jgr").as_posix()
        if path.name == "__init__.py" and room_of(file) in ("plain", "serving"):
            continue
        text = path.read_text()
        room = room_of(file)
        rooms[room] += text.count("\n")
        module = "jgr." + file.removesuffix(".py").replace("/", ".") + "."
        floor_of[room] = places[max((place for place in places if module.startswith(f"{place}.")), key=len)]
        imports |= {(room, other) for other in _imported_rooms(text) if other != room}
    floors = tuple(
        {room: rooms[room] for room in rooms if floor_of[room] == n} for n in range(max(places.values()) + 1)
    )
    return House(floors, tuple(sorted(imports)), {kind: _moves(trace) for kind, trace in traces.items()})


def _floors() -> dict[str, int]:
    """The floor of every place that tests/test_layering.py names."""
    for node in ast.parse((ROOT / "tests" / "test_layering.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOORS":
            floors: Sequence[Sequence[str]] = ast.literal_eval(node.value)
            return {place: floor for floor, row in enumerate(floors) for place in row}
    raise ValueError("tests/test_layering.py has no FLOORS")


def _imported_rooms(text: str) -> set[str]:
    names = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    found = set()
    for name in names:
        parts = name.split(".")
        while parts[1:] and parts[0] == "jgr":
            path = ROOT.joinpath(*parts)
            if path.is_dir() or path.with_suffix(".py").is_file():
                found.add(room_of("/".join([*parts[1:], ""]) if path.is_dir() else "/".join(parts[1:])))
                break
            parts.pop()
    return found


def _moves(trace: Trace) -> tuple[tuple[Edge, int], ...]:
    counted = Counter[Edge]()
    for before, after in trace.moves:
        edge = room_of(before.file), room_of(after.file)
        if edge[0] != edge[1]:
            counted[edge] += 1
    return tuple(sorted(counted.items()))


def committed(path: Path = PICTURE) -> str:
    """The data that a picture was drawn from, as `House.to_json` gives it."""
    _, _, rest = path.read_text().partition(BEGIN)
    return rest.partition(END)[0]


def longest_only(edges: Iterable[Edge]) -> list[Edge]:
    """The edges that no longer way of other edges says; there is no circle."""
    onward: dict[str, set[str]] = {}
    for start, end in edges:
        onward.setdefault(start, set()).add(end)

    def reached(start: str) -> set[str]:
        direct = onward.get(start, set())
        return direct.union(*map(reached, direct)) if direct else set()

    return [
        (start, end)
        for start, ends in sorted(onward.items())
        for end in sorted(ends)
        if not any(end in reached(other) for other in ends)
    ]


def rows_of(house: House) -> list[tuple[int, list[str]]]:
    """Rows of rooms from the lowest up, each with its floor.

    A floor is one row; the drivers', which has most rooms, has a row for each step of imports in it.
    """
    rows: list[tuple[int, list[str]]] = []
    for number, floor in enumerate(house.floors):
        steps, left = list[list[str]](), set(floor)
        while left:
            step = sorted(
                room for room in left if not any(a == room and b in left - {a} for a, b in house.imports)
            )
            steps.append(step)
            left -= set(step)
        if number == DRIVERS:
            rows += [(number, step) for step in steps]
        else:
            rows.append((number, sorted(floor)))
    return rows


def arrange(house: House) -> dict[str, tuple[float, float]]:
    """Where the middle of every room stands, as (x, y) in inches."""
    places, y, floor = dict[str, tuple[float, float]](), 0.1, 0
    for number, row in rows_of(house):
        y += ROW if number == floor else ROW + GAP
        floor = number
        places |= {room: (COLUMNS.get(room, 0.9) * (WIDTH - BOX[0]) + BOX[0] / 2, y) for room in row}
    return places


def draw(house: House, path: Path) -> None:
    """The picture as a file, SVG or PNG by its ending; an SVG holds the data, too."""
    import matplotlib
    from matplotlib.figure import Figure

    places = arrange(house)
    top = max(y for _, y in places.values()) + ROW + 0.35
    figure = Figure(figsize=(WIDTH + 0.1 + LEFT, top))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-LEFT, WIDTH + 0.1), ylim=(0, top))
    axes.axis("off")
    for number, rooms in enumerate(house.floors):
        if not rooms:
            continue
        heights = [places[room][1] for room in rooms]
        low, high = min(heights) - ROW / 2 - GAP / 4, max(heights) + ROW / 2 + GAP / 4
        axes.axhspan(low, high, color="#f4f1ea" if number % 2 else "#faf8f4", zorder=0)
        axes.text(
            0.1 - LEFT,
            (low + high) / 2,
            f"{number}  {NAMES[number]}",
            va="center",
            color="#6b6457",
            fontsize=11,
        )
    for start, end in longest_only(house.imports):
        _line(axes, places[start], places[end], "#a49c8d", 1.0, "-|>")
    for side, (kind, moves) in zip((-0.3, 0.3), house.ways.items(), strict=False):
        both = Counter[Edge]()
        for (start, end), count in moves:
            both[min(start, end), max(start, end)] += count
        for (start, end), count in both.items():
            _line(axes, places[start], places[end], COLOURS[kind], 0.8 + 0.2 * count, "-", side, str(count))
        text = f"moves of one warm {kind}: {sum(both.values())}"
        axes.text(
            0.1 - LEFT, top - (0.2 if side < 0 else 0.45), text, color=COLOURS[kind], va="center", fontsize=11
        )
    axes.text(0.1 - LEFT, top - 0.7, "imports", color="#8d8676", va="center", fontsize=11)
    for rooms in house.floors:
        for room, lines in rooms.items():
            _box(axes, *places[room], room, f"{lines:,} lines")
    # Text stays text, and the same data give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "house"}):
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)
    if path.suffix == ".svg":
        text = path.read_text()
        path.write_text(text.replace("<svg ", f"{BEGIN}{house.to_json()}{END}\n<svg ", 1))


def _box(axes: Any, x: float, y: float, room: str, size: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    colour = "#e7f0e4" if room.startswith("serving") else "white"
    style = "round,pad=0,rounding_size=0.08"
    corner = x - BOX[0] / 2, y - BOX[1] / 2
    axes.add_patch(
        FancyBboxPatch(corner, *BOX, boxstyle=style, facecolor=colour, edgecolor="#57534a", zorder=3)
    )
    axes.text(x, y + 0.09, room, ha="center", va="center", fontsize=10, weight="bold", zorder=4)
    axes.text(x, y - 0.12, size, ha="center", va="center", fontsize=8, color="#6b6457", zorder=4)


def _line(
    axes: Any,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    width: float,
    head: str,
    side: float = 0.0,
    label: str = "",
) -> None:
    """From one box to another; side: inches to the right of their middles."""
    from matplotlib.patches import FancyArrowPatch

    (x, y), (to_x, to_y) = start, end
    if y == to_y:
        across = BOX[0] / 2 if to_x > x else -BOX[0] / 2
        begin, stop = (x + across, y), (to_x - across, y)
    else:
        down = BOX[1] / 2 if to_y < y else -BOX[1] / 2
        begin, stop = (x + side, y - down), (to_x + side, to_y + down)
    axes.add_patch(
        FancyArrowPatch(
            begin, stop, arrowstyle=head, mutation_scale=10, shrinkA=0, shrinkB=0, color=colour, linewidth=width,
            zorder=2 if label else 1,
        )
    )  # fmt: skip
    if label:
        middle = (begin[0] + stop[0]) / 2, (begin[1] + stop[1]) / 2
        axes.text(*middle, label, color=colour, fontsize=8, ha="center", va="center", zorder=5, bbox=_LABEL)


_LABEL = {"boxstyle": "round,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}


def main(argv: Sequence[str]) -> None:
    del argv
    with tempfile.TemporaryDirectory() as folder:
        house = read_house(trace_all(Path(folder)))
    draw(house, Path(flags.FLAGS.out))


if __name__ == "__main__":
    flags.DEFINE_string("out", str(PICTURE), "the picture to write: .svg or .png")
    app.run(main)
