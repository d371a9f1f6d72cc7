# SPDX-License-Identifier: Apache-2.0
"""The files of tests/golden/hstu in our terms: architectures, weights and times.

Letters: B histories, N places.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jgr.models.hstu import HstuConfig, HstuLayer
from jgr.models.stu import StuConfig, StuLayer
from tools.golden_parity import Arrays, load

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "hstu"
ATOL = 5e-5  # what the golden set states

Array = Any  # numpy's, to be given to functions that ask for jax's
INPUTS = re.compile(
    r"x|cached_x_old|delta_positions|past_ids|timestamps|q|k|v|delta_q|seq_embeddings|seq_offsets|lengths|num_targets"
    r"|num_heads|attention_dim|linear_dim|num_buckets|eps|alpha|concat_ua|silu_uvqk|group_norm|delta_size"
    r"|max_seq_len|contextual_seq_len|max_attn_len|min_full_attn_seq_len|variants|\w+_uses|\w+_max_seq_len"
    r"|item_embedding|position_embedding|time_embedding"
    r"|layer\d+_(uvqk|o_weight|o_bias|pos_w|ts_w|uvqk_weight|uvqk_beta|(input|output)_norm_(weight|bias)|output_weight)"
)
"""Arrays that are fed to a model or that describe the others, and weights; all the rest must be reproduced."""
Layers = TypeVar("Layers", HstuLayer, StuLayer)


def golden(file: str, folder: Path = GOLDEN) -> Arrays:
    """The arrays of a file by their names. Raises GoldenError."""
    return load(folder / f"{file}.npz")


def golden_config(z: Arrays, n_items: int = 1) -> HstuConfig:
    """The config that a golden file of the research form was made with."""
    length = int(z["max_seq_len"])
    return HstuConfig(
        n_items=n_items, max_items=length, hidden=len(z["layer0_uvqk"]), layers=_depth(z),
        heads=int(z["num_heads"]), qk_dim=int(z["attention_dim"]), v_dim=int(z["linear_dim"]), length=length, items="v",
        bias="times" if "timestamps" in z else "none", concat_ua=bool(z.get("concat_ua", False)),
        activated=bool(z.get("silu_uvqk", True)),
    )  # fmt: skip


def next_times(z: Arrays) -> Array | None:
    """[B, N + 1] seconds from each row's first event, and of the event after the last place: the last one's."""
    if "timestamps" not in z:
        return None
    stamps = z["timestamps"]
    extended = np.concatenate([stamps, stamps[:, -1:]], axis=1)
    return (extended - extended[:, :1]).astype(np.int32)


def research_layers(z: Arrays) -> HstuLayer:
    """The weights of a golden file of the research form.

    A file without times has no tables, and then the logits have no bias at all.
    """

    def of(name: str) -> Array:
        return np.stack([z[f"layer{i}_{name}"] for i in range(_depth(z))])

    tables = [of(name)[:, None] for name in ("pos_w", "ts_w")] if "timestamps" in z else [None, None]
    return HstuLayer(of("uvqk"), of("o_weight").transpose(0, 2, 1), of("o_bias")[:, None], *tables)


def golden_stack(z: Arrays) -> tuple[StuConfig, StuLayer]:
    """The config and the weights of a golden file of the STU."""
    depth = _depth(z)
    cfg = StuConfig(
        hidden=z["x"].shape[2], layers=depth, heads=int(z["num_heads"]), qk_dim=int(z["attention_dim"]),
        v_dim=int(z["linear_dim"]), length=int(z["max_seq_len"]), contextual=int(z["contextual_seq_len"]),
        max_attention=int(z["max_attn_len"]), group_norm=bool(z["group_norm"]),
    )  # fmt: skip

    def of(name: str) -> Array:
        return np.stack([z[f"layer{i}_{name}"] for i in range(depth)])

    def norm(name: str) -> Array:
        return np.stack([of(f"{name}_weight") - 1, of(f"{name}_bias")], axis=1)

    inputs, outputs = norm("input_norm"), norm("output_norm")
    return cfg, StuLayer(inputs, of("uvqk_weight"), of("uvqk_beta")[:, None], outputs, of("output_weight"))


def only(layers: Layers, count: int) -> Layers:
    """The first `count` layers count, in the program of all: the others add nothing."""
    on = (np.arange(len(layers.out)) < count)[:, None, None]
    adds = {field.name for field in dataclasses.fields(layers)} & {"out", "out_bias"}
    return dataclasses.replace(layers, **{name: getattr(layers, name) * on for name in adds})


def masked_by(z: Arrays, variant: str) -> tuple[StuConfig, Array]:
    """The mask arguments of a variant of the operator, which say who sees whom, and [B] where its histories end."""
    targets, window, context, full = [*z[f"{variant}_uses"].tolist(), 0][:4]
    cfg = StuConfig(1, 1, 1, 1, 1, 1, contextual=context, max_attention=window, full_rows=full)
    return cfg, int32(z["lengths"] - z["num_targets"] * targets)


def padded(x: Array, offsets: Array, rows: int) -> Array:
    """Jagged rows [S, ...] as [B, rows, ...]; what follows a row's end may be anything."""
    return x[np.minimum(offsets[:-1, None] + np.arange(rows), len(x) - 1)]


def int32(x: Array) -> Array:
    """Whole numbers in the type that our functions take."""
    return x.astype(np.int32)


def _depth(z: Arrays) -> int:
    return 1 + z.numbers(r"layer(\d+)_\w+")[-1]
