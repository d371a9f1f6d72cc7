# SPDX-License-Identifier: Apache-2.0
"""bfloat16 on a processor with AMX (model.dtype=bfloat16, with jgr-native): jgr beside its own float32, and beside
PyTorch by hand, PyTorch through torch.compile and OpenVINO GenAI, which compute in bfloat16 too.

Time, of the random Qwen3 of 16 M parameters that prefill_vs_peers.py and beam_vs_peers.py have: the first token of
prompts of 512, 1,024 and 2,048 tokens, in batches of 1 and 8, and searches for three tokens with 8 to 256 beams, over
all tokens and over a catalog of 12,000 items. All run in turns, call by call.

Answers: in 16 bits everyone rounds otherwise, so that nobody's answers are another's. They are compared with those of
float32: the share of first tokens, and of the beams, that are the same. The model's logits spread as those of a trained
one do.

Quality: the generator of configs/industrial.py, trained, asked for every test target by the engine that serves, in
bfloat16 and in float32: how many of the ten best items are the same, and NDCG@10. runs/industrial is used as it is, or
trained where it is not.

    JGR_DATA=FOLDER JGR_PEERS_TORCH=PYTHON JGR_PEERS_OPENVINO=PYTHON python -m benchmarks.bfloat16 [--quick]

FOLDER holds amazon-industrial-minionerec; each PYTHON is that of a virtual environment with
benchmarks/peers/requirements-*.txt. `make native` installs the kernels.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks import beam_vs_peers, harness, prefill_vs_peers, quantized_weights
from benchmarks.beam_vs_peers import of_rounds, two_cores
from benchmarks.harness import Benchmark, Claim, Measured, Missing, Quiet, Row
from benchmarks.peers import client, workload
from benchmarks.peers.client import COMPILED, OPENVINO, PYTORCH, Present
from benchmarks.peers.workload import Int32
from jgr.models import hf
from jgr.models.generators import laid_out
from jgr.ops import native

THREADS = 2
HALF, WHOLE = "bfloat16", "float32"
KINDS = (PYTORCH, COMPILED, OPENVINO)
PROMPTS, BATCHES = (512, 1024, 2048), (1, 8)
SHAPES = tuple((tokens, width) for tokens in (512, 1024) for width in (8, 32, 128, 256))
"""Prompt tokens and beams of the searches."""
MODES = ("unconstrained", "valid")
ROUNDS = 5
AHEAD = {8: 1.0, 32: 1.0, 128: 1.5, 256: 1.5}
"""The least that a peer's constrained search may take, over jgr's time, by beams."""
OVERLAP, NDCG = 0.95, 0.99


# ---- time --------------------------------------------------------------------------------------------------------


def prompt_rows(
    folder: Path,
    catalog: workload.Catalog,
    present: Present,
    lengths: Sequence[int],
    rounds: int,
    quiet: Quiet,
) -> list[Row]:
    rng = np.random.default_rng(1)
    loaded: dict[str, tuple[Any, Any]] = {}
    for name in (HALF, WHOLE):
        cfg, weights = hf.load(folder, jnp.dtype(name))
        loaded[name] = cfg, laid_out(weights)
    rows = []
    for tokens in lengths:
        for batch in BATCHES:
            prompts = np.stack([workload.draw_prompt(catalog, tokens, rng) for _ in range(batch)])
            variants: dict[str, Callable[[], prefill_vs_peers.Found]] = {
                f"jgr {name}": functools.partial(_first, prefill_vs_peers.Ours(*loaded[name], prompts))
                for name in (HALF, WHOLE)
            }
            for name, peer in present.peers.items():
                variants[name] = functools.partial(prefill_vs_peers.ask, peer, prompts)
            done = harness.interleave(variants, rounds, quiet)
            row = {"prompt_tokens": tokens, "batch": batch, **compared(done, lambda f: f.ms)}
            whole = np.array(done[f"jgr {WHOLE}"][0].tokens)
            same = {name: float((np.array(f[0].tokens) == whole).mean()) for name, f in done.items()}
            rows.append({**row, "same_first_tokens": same})
    return rows


def _first(program: prefill_vs_peers.Ours) -> prefill_vs_peers.Found:
    return prefill_vs_peers.Found(*harness.timed(program.first, prefill_vs_peers.AT_LEAST_S))


def search_rows(
    folder: Path,
    catalog: workload.Catalog,
    present: Present,
    shapes: Sequence[tuple[int, int]],
    rounds: int,
    quiet: Quiet,
) -> list[Row]:
    rng = np.random.default_rng(2)
    ours = {name: beam_vs_peers.Ours(folder, catalog, shapes, jnp.dtype(name)) for name in (HALF, WHOLE)}
    rows = []
    for tokens, width in shapes:
        prompt = workload.draw_prompt(catalog, tokens, rng)
        for mode in MODES:
            variants: dict[str, Callable[[], beam_vs_peers.Found]] = {
                f"jgr {name}": functools.partial(program.run, mode, prompt, width)
                for name, program in ours.items()
            }
            for name, peer in present.peers.items():
                if name != OPENVINO.name:
                    variants[name] = functools.partial(beam_vs_peers.ask, peer, mode, prompt, width)
            done = harness.interleave(variants, rounds, quiet)
            row = {"search": mode, "prompt_tokens": tokens, "beams": width, **compared(done, lambda f: f.ms)}
            whole = done[f"jgr {WHOLE}"][0].beams.sequences
            found = {name: f[0].beams.sequences for name, f in done.items()}
            rows.append(
                {
                    **row,
                    "beams_of_float32": {name: _share(x, whole) for name, x in found.items()},
                    "best_ten_of_float32": {name: _share(x[:10], whole[:10]) for name, x in found.items()},
                }
            )
    return rows


def _share(found: Int32, whole: Int32) -> float:
    """The share of float32's sequences [n, depth] that are found."""
    names = {tuple(sequence) for sequence in found.tolist()}
    return harness.rounded(float(np.mean([tuple(sequence) in names for sequence in whole.tolist()])))


def compared(done: Mapping[str, Sequence[Any]], ms: Callable[[Any], float]) -> Row:
    """Times, and those of float32 and of the best peer over jgr's in bfloat16, with the least and the largest ratio of
    a round."""
    times = {name: harness.spread(ms(f) for f in runs) for name, runs in done.items()}
    peers = [name for name in done if not name.startswith("jgr ")]
    best = min(peers, key=lambda name: times[name]["median"])
    row: Row = {"time_ms": times, "best_peer": best}
    for what, name in (("float32", f"jgr {WHOLE}"), ("best_peer", best)):
        ratio = times[name]["median"] / times[f"jgr {HALF}"]["median"]
        row[f"time_of_{what}_over_jgr"] = harness.rounded(ratio, 3)
        row[f"interval_of_{what}"] = of_rounds(
            [ms(f) for f in done[name]], [ms(f) for f in done[f"jgr {HALF}"]]
        )
    return row


# ---- all of it ---------------------------------------------------------------------------------------------------


def measure(quick: bool, quiet: Quiet) -> Measured:
    if HALF not in native.library().types:
        raise Missing("needs a processor with AMX, and jgr-native (make native)")
    lengths, shapes, rounds = (PROMPTS[:1], SHAPES[:1], 1) if quick else (PROMPTS, SHAPES, ROUNDS)
    rows = quantized_weights.quality_rows(
        {name: f"model.dtype={name}" for name in (WHOLE, HALF)}, 100 if quick else None
    )
    catalog = workload.make_catalog(np.random.default_rng(0))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workload.export(folder, catalog)
        present = client.start_all(KINDS, folder, THREADS, stack, HALF)
        rows += prompt_rows(folder, catalog, present, lengths, rounds, quiet)
        rows += search_rows(folder, catalog, present, shapes, rounds, quiet)
    rows.append({"kernels": native.describe()})
    rows += [{"peer": name, "versions": peer.versions} for name, peer in present.peers.items()]
    rows += [{"peer": name, "missing": why} for name, why in present.missing.items()]
    return Measured(claims(rows), rows)


def claims(rows: Sequence[Row]) -> list[Claim]:
    whole, half = (next(row for row in rows if row.get("quality") == name) for name in (WHOLE, HALF))
    found = [
        Claim("bfloat16-peers-missing", sum("missing" in row for row in rows), "", "lower", 0),
        Claim("overlap@10-of-bfloat16-with-float32", half["overlap@10"], "", "higher", OVERLAP),
        Claim(
            "ndcg@10-of-bfloat16-over-float32",
            harness.rounded(half["ndcg@10"] / whole["ndcg@10"]),
            "x",
            "higher",
            NDCG,
        ),
    ]
    for row in rows:
        if "batch" in row:
            found.append(_claim(row, "float32", f"prompt-{row['prompt_tokens']}-batch-{row['batch']}", 1.0))
            found.append(_claim(row, "best_peer", f"prompt-{row['prompt_tokens']}-batch-{row['batch']}", 1.0))
        if "search" in row:
            target = AHEAD[row["beams"]] if row["search"] == "valid" else 1.0
            place = f"{row['search']}-search-{row['prompt_tokens']}-beams-{row['beams']}"
            found.append(_claim(row, "float32", place, 1.0))
            found.append(_claim(row, "best_peer", place, target))
    return found


def _claim(row: Row, what: str, place: str, target: float) -> Claim:
    value, interval = row[f"time_of_{what}_over_jgr"], row[f"interval_of_{what}"]
    name = f"bfloat16-time-of-{what.replace('_', '-')}-over-jgr-{place}"
    return Claim(name, value, "x", "higher", target, interval=interval)


def plot(rows: Sequence[Row], path: Path) -> None:
    """How many times jgr's time in bfloat16 its float32 and the best peer take: a bar for each prompt and search."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    timed = [row for row in rows if "best_peer" in row]
    names = [
        f"prompt {row['prompt_tokens']} x {row['batch']}"
        if "batch" in row
        else f"{row['search']} {row['prompt_tokens']}, {row['beams']} beams"
        for row in timed
    ]
    figure, axis = pyplot.subplots(figsize=(7, 5.5))
    places = np.arange(len(timed))
    for shift, what in ((-0.2, "float32"), (0.2, "best_peer")):
        values = [row[f"time_of_{what}_over_jgr"] for row in timed]
        axis.barh(
            places + shift, values, 0.4, label=f"time of {what.replace('_', ' ')} over jgr's in bfloat16"
        )
    axis.axvline(1, color="k", linewidth=1)
    axis.set_yticks(places, names, fontsize=7)
    axis.invert_yaxis()
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    two_cores()
    harness.main(
        Benchmark(
            name="bfloat16",
            measure=measure,
            packages=("jax", "jaxlib", "numpy"),
            sources=(
                Path(__file__),
                Path(quantized_weights.__file__),
                *prefill_vs_peers.SOURCES,
            ),
            plot=plot,
        )
    )
