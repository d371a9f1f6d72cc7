# SPDX-License-Identifier: Apache-2.0
"""The parity runners on golden sets of other sizes, made here in numpy; and what they do not let pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jgr.models import decoder, hf, params
from jgr.models.decoder import DecoderConfig
from tools import golden_parity, hstu_golden, hstu_parity
from tools.golden_parity import GoldenError, comparisons

CFG = DecoderConfig(
    family="qwen3", vocab_size=24, hidden=20, layers=2, heads=6, kv_heads=3, head_dim=8, mlp=28,
    rope_theta=1e4, norm_eps=1e-6, tied=False, max_position=64,
)  # fmt: skip
ITEMS = np.array([[8, 16], [8, 19], [9, 16], [11, 17], [11, 18], [11, 22], [13, 23], [15, 20]])
PROMPTS = [[1, 2, 3, 4, 5], [7, 6, 2]]
WIDTHS = (2, 5)
RNG = np.random.default_rng(0)
Array = Any


class Dense:
    """The decoder by its formulas, in float64: one prompt, any mask."""

    def __init__(self, weights: decoder.DecoderParams) -> None:
        self.w = jax.tree.map(lambda x: np.asarray(x, np.float64), weights)

    def run(self, ids: Array, position: Array, mask: Array) -> dict[str, Array]:
        w, h = self.w.layers, self.w.embed[ids]
        found: dict[str, list[Array]] = {"layers": [], "k": [], "v": []}
        for i in range(CFG.layers):
            x = norm(h, w.attention_norm[i])
            q, k, v = ((x @ m[i]).reshape(len(ids), -1, CFG.head_dim) for m in (w.wq, w.wk, w.wv))
            q, k = rotate(norm(q, w.q_norm[i]), position), rotate(norm(k, w.k_norm[i]), position)
            found["k"].append(k.swapaxes(0, 1))
            found["v"].append(v.swapaxes(0, 1))
            k, v = (np.repeat(y, CFG.heads // CFG.kv_heads, 1) for y in (k, v))
            scores = np.where(mask, np.einsum("thd,shd->hts", q, k) / CFG.head_dim**0.5, -np.inf)
            share = np.exp(scores - scores.max(-1, keepdims=True))
            out = np.einsum("hts,shd->thd", share / share.sum(-1, keepdims=True), v)
            h = h + out.reshape(len(ids), -1) @ w.wo[i]
            x = norm(h, w.mlp_norm[i])
            gate = x @ w.gate[i]
            h = h + (gate / (1 + np.exp(-gate)) * (x @ w.up[i])) @ w.down[i]
            found["layers"].append(h)
        final = norm(h, self.w.norm)
        return {
            "embeds": self.w.embed[ids], "final": final, "logits": final @ self.w.head.T,
            **{name: np.stack(x) for name, x in found.items()},
        }  # fmt: skip

    def after(self, prompt: Array, position: Array, mask: Array, path: list[int]) -> Array:
        """Log-probabilities of every token after a prompt and tokens that see all of it and each other causally."""
        n, more = len(prompt), len(path)
        whole = np.tril(np.ones((n + more, n + more), bool))
        whole[:n, :n] = mask
        places = np.concatenate([position, position[-1] + 1 + np.arange(more)])
        return log_softmax(self.run(np.array([*prompt, *path]), places, whole)["logits"][-1])


def norm(x: Array, weight: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CFG.norm_eps) * weight


def rotate(x: Array, position: Array) -> Array:
    half = CFG.head_dim // 2
    angle = np.asarray(position)[:, None, None] * CFG.rope_theta ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def log_softmax(x: Array) -> Array:
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def forward(dense: Dense) -> Iterator[tuple[str, Array]]:
    ends, count = np.array([6, 4]), 6
    real = np.arange(count) < ends[:, None]
    packed = np.array([[0, 0, 0, 1, 1, 1, 1]])
    cases: dict[str, tuple[Array, Array | None]] = {
        "full": (np.arange(5)[None].repeat(2, 0), None),
        "rpad": (np.arange(count)[None].repeat(2, 0), real),
        "lpad": (np.maximum(real[:, ::-1].cumsum(1) - 1, 0), real[:, ::-1]),
        "custom": (np.array([[0, 0, 3, 7], [1, 2, 0, 1]]), np.ones((2, 4), bool)),
        "packed": (np.array([[0, 1, 2, 0, 1, 2, 3]]), None),
    }
    for case, (positions, keep) in cases.items():
        ids, n = RNG.integers(0, 24, positions.shape), positions.shape[1]
        rows = []
        for row, position in enumerate(positions):
            mask = np.tril(np.ones((n, n), bool))
            mask &= True if keep is None else keep[row] | np.eye(n, dtype=bool)
            mask &= packed[0][:, None] == packed[0] if case == "packed" else True
            rows.append(dense.run(ids[row], position, mask))
        yield from ((f"{case}_input_ids", ids), (f"{case}_position_ids", positions))
        if keep is not None:
            yield f"{case}_attention_mask", keep.astype(np.int64)
        if case == "packed":
            yield "packed_segment_ids", packed
        for name in rows[0].keys() - ({"k", "v"} if case == "packed" else set()):
            axis = 1 if name in ("layers", "k", "v") else 0
            yield f"{case}_{name}", np.stack([row[name] for row in rows], axis).astype(np.float32)


def bipartite(dense: Dense) -> Iterator[tuple[str, Array]]:
    """A prompt with two items, and one with three."""
    yield "items", ITEMS
    for prompt, lengths in enumerate([(2, 3), (1, 2, 2)]):
        parts = {0: 4, **{at + 1: n for at, n in enumerate(lengths)}, len(lengths) + 1: 3}
        last, longest = len(lengths) + 1, max(lengths)
        for which, order in (("up", [*parts]), ("ip", [*range(1, last), 0, last])):
            segment = np.concatenate([[part] * parts[part] for part in order])
            first = {part: (4 if which == "up" else 0) for part in parts}
            first |= {0: 0 if which == "up" else longest, last: 4 + longest}
            position = np.concatenate([first[part] + np.arange(parts[part]) for part in order])
            mask = (segment[:, None] == segment) & np.tril(np.ones((len(segment),) * 2, bool))
            item = (segment > 0) & (segment < last)
            sees, seen = (item, segment == 0) if which == "up" else (segment == 0, item)
            mask |= sees[:, None] & seen | (segment == last)[:, None] & (segment < last)
            ids, start = RNG.integers(0, 8, len(segment)), f"p{prompt}_{which}_"
            yield from ((start + "input_ids", ids), (start + "position_ids", position))
            yield from ((start + "segment_ids", segment), (start + "mask", mask))
            yield from (
                (start + name, x.astype(np.float32)) for name, x in dense.run(ids, position, mask).items()
            )
            for tag in ("", "_renorm"):
                scores = [score(dense, (ids, position, mask), [*item], ITEMS, tag) for item in ITEMS]
                yield f"{start}items_sum_logprob{tag}", np.array(scores, np.float32)


Prompt = tuple[Array, Array, Array]


def step(dense: Dense, prompt: Prompt, path: list[int], items: Array | None, tag: str) -> Array:
    """Log-probabilities of the next token, -inf where no item goes on so."""
    found = dense.after(*prompt, path)
    if items is None:
        return found
    legal = {int(item[len(path)]) for item in items if [*item[: len(path)]] == path}
    found = np.where(np.isin(np.arange(24), [*legal]), found, -np.inf)
    return found - np.log(np.exp(found).sum()) if tag else found


def score(dense: Dense, prompt: Prompt, item: list[int], items: Array, tag: str) -> float:
    return sum(float(step(dense, prompt, item[:at], items, tag)[token]) for at, token in enumerate(item))


def search(dense: Dense, prompt: Prompt, items: Array | None, width: int, tag: str) -> tuple[Array, Array]:
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(2):
        grown = [
            (total + float(x), [*path, token])
            for total, path in beams
            for token, x in enumerate(step(dense, prompt, path, items, tag))
            if np.isfinite(x)
        ]
        beams = sorted(grown, key=lambda one: -one[0])[:width]
    return np.array([path for _, path in beams]), np.array([total for total, _ in beams], np.float32)


def beam(dense: Dense) -> Iterator[tuple[str, Array]]:
    prompts: list[Prompt] = [
        (np.array(p), np.arange(len(p)), np.tril(np.ones((len(p),) * 2, bool))) for p in PROMPTS
    ]
    padded = np.full((2, 5), -1)
    for row, prompt in enumerate(PROMPTS):
        padded[row, : len(prompt)] = prompt
    yield from (("items", ITEMS), ("prompts", padded), ("prompt_lengths", np.array([5, 3])))

    def searches(start: str, items: Array | None, width: int, tag: str = "") -> Iterator[tuple[str, Array]]:
        found = [search(dense, prompt, items, width, tag) for prompt in prompts]
        sequences, totals = (np.stack(x) for x in zip(*found, strict=True))
        yield from ((start + "sequences", sequences), (start + "sum_logprob", totals))
        if start.startswith("w"):
            yield start + "hf_scores", totals / 2

    for tag in ("", "_renorm"):
        for width in WIDTHS:
            yield from searches(f"w{width}{tag}_", ITEMS, width, tag)
        scores = [[score(dense, prompt, [*item], ITEMS, tag) for item in ITEMS] for prompt in prompts]
        yield f"items_sum_logprob{tag}", np.array(scores, np.float32)
    yield from (("free_width", np.array(3)), ("short_items", ITEMS[:3]), ("short_width", np.array(4)))
    yield from searches("free_", None, 3)
    yield from searches("short_", ITEMS[:3], 4)
    yield from searches("short_hf_raw_", ITEMS[:3], 4)


@pytest.fixture(scope="module")
def other_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, six heads, two prompts of two and three items, widths 2 and 5, items of two tokens."""
    folder = tmp_path_factory.mktemp("golden")
    weights = params.initialize(decoder.spec(CFG), jax.random.key(0))
    weights = jax.tree.map(lambda x: x * (20 if x.shape == (24, 20) else 1), weights)
    hf.export(folder / "tiny", CFG, weights)
    made: dict[str, Callable[[Dense], Iterator[tuple[str, Array]]]]
    made = {"forward": forward, "bipartite": bipartite, "beam": beam}
    for file, make in made.items():
        np.savez(folder / "tiny" / f"golden_{file}.npz", **dict(make(Dense(weights))))
    return folder


def test_a_set_of_other_sizes_is_reproduced(other_set: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert golden_parity.main([str(other_set)]) == 0
    told = capsys.readouterr().out
    for array in ("packed_logits", "p1_ip_layers", "w5_renorm_sequences", "short_hf_raw_sum_logprob"):
        assert f"| {array} |" in told
    assert "all within 1e-04" in told and "NOT" not in told


def changed(path: Path, folder: Path, change: Callable[[dict[str, Array]], Any]) -> None:
    """A copy of a golden file, and of the model beside it, with its arrays changed."""
    for beside in (*path.parent.glob("*.json"), *path.parent.glob("*.safetensors")):
        (folder / beside.name).write_bytes(beside.read_bytes())
    arrays = dict(np.load(path))
    change(arrays)
    np.savez(folder / path.name, **arrays)


def spoil(name: str, value: float) -> Callable[[dict[str, Array]], Any]:
    def change(arrays: dict[str, Array]) -> None:
        arrays[name] = arrays[name].copy()
        arrays[name].flat[-1] = value

    return change


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("forward", lambda z: z.pop("full_k"), "golden_forward: there is no array full_k"),
        ("forward", lambda z: z.pop("rpad_attention_mask"), "there is no array rpad_attention_mask"),
        (
            "forward",
            lambda z: [z.pop(name) for name in [*z] if name.startswith("lpad")],
            "no array lpad_input_ids",
        ),
        ("forward", lambda z: z.update(extra_logits=z["full_logits"]), "nothing reproduces extra_logits"),
        ("forward", spoil("custom_v", np.nan), "custom_v holds what is no finite number"),
        ("forward", spoil("packed_final", np.inf), "packed_final holds what is no finite number"),
        ("bipartite", lambda z: z.pop("p1_ip_v"), "there is no array p1_ip_v"),
        ("beam", lambda z: z.pop("w5_sequences"), "there is no array w5_sequences"),
        ("beam", lambda z: [z.pop(name) for name in [*z] if name[0] == "w"], r"there is no array w\(\\d\+\)"),
    ],
)
def test_what_is_missing_or_no_number_is_an_error(
    other_set: Path, tmp_path: Path, file: str, change: Callable[[dict[str, Array]], Any], words: str
) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    changed(other_set / "tiny" / f"golden_{file}.npz", folder, change)
    with pytest.raises(GoldenError, match=words):
        list(comparisons("tiny", [file], tmp_path))


def test_the_exit_code_says_so(other_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert golden_parity.main([str(tmp_path)]) == 1
    folder = tmp_path / "tiny"
    folder.mkdir()
    changed(other_set / "tiny" / "golden_forward.npz", folder, lambda z: z["full_final"].__iadd__(0.01))
    assert golden_parity.main([str(tmp_path)]) == 1  # the other files are missing
    assert "golden_bipartite.npz: there is no such file" in capsys.readouterr().err
    off = [c for c in comparisons("tiny", ["forward"], tmp_path) if not c.is_within(golden_parity.ATOL)]
    assert [c.array for c in off] == ["full_final"] and off[0].error == pytest.approx(0.01, rel=0.05)
    assert golden_parity.show([("tiny", off[0])], golden_parity.ATOL) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda z: z.pop("log_out"), "positional_encoder: there is no array log_out"),
        (lambda z: z.pop("max_seq_len"), "there is no array max_seq_len"),
        (lambda z: z.update(variants=z["variants"][:-1]), "nothing reproduces interleaved_out"),
        (spoil("sqrt_out", np.nan), "sqrt_out holds what is no finite number"),
    ],
)
def test_hstu_arrays_are_all_there_and_numbers(
    tmp_path: Path, change: Callable[[dict[str, Array]], Any], words: str
) -> None:
    changed(hstu_golden.GOLDEN / "positional_encoder.npz", tmp_path, change)
    with pytest.raises(GoldenError, match=words):
        list(hstu_parity.comparisons("positional_encoder", tmp_path))


def research(timed: bool) -> dict[str, Array]:
    """A file of HSTU's research form by its formulas in float64: three layers, two users, seven places."""
    rng = np.random.default_rng(4)
    layers, batch, n, hidden, heads, a, b = 3, 2, 7, 10, 2, 5, 3
    lengths, dims = np.array([7, 4]), (("u", b), ("v", b), ("q", a), ("k", a))
    real = np.arange(n) < lengths[:, None]
    z: dict[str, Array] = {
        "x": rng.normal(size=(batch, n, hidden)) * real[..., None], "lengths": lengths, "max_seq_len": np.array(n),
        "num_heads": np.array(heads), "attention_dim": np.array(a), "linear_dim": np.array(b),
        "mask": np.tril(np.ones((n, n), bool)), "delta_positions": lengths - 1, "concat_ua": np.array(False),
        "silu_uvqk": np.array(True),
    }  # fmt: skip
    stamps = 1_600_000_000 + rng.integers(1, 10**5, (batch, n)).cumsum(1)
    if timed:
        z["timestamps"] = stamps
    for i in range(layers):
        z[f"layer{i}_uvqk"] = rng.normal(size=(hidden, 2 * heads * (a + b))) / 3
        z[f"layer{i}_o_weight"] = rng.normal(size=(hidden, heads * b))
        z[f"layer{i}_o_bias"] = rng.normal(size=hidden)
        z[f"layer{i}_ts_w"], z[f"layer{i}_pos_w"] = rng.normal(size=129), rng.normal(size=2 * n - 1)
    later = np.concatenate([stamps, stamps[:, -1:]], 1)[:, 1:]
    apart = np.abs(later[:, :, None] - stamps[:, None])
    bucket = np.minimum(np.log(np.maximum(apart, 1)) / 0.301, 128).astype(int)

    def standard(x: Array) -> Array:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)

    def run(h: Array) -> Iterator[dict[str, Array]]:
        for i in range(layers):
            one = standard(h) @ z[f"layer{i}_uvqk"]
            one = one / (1 + np.exp(-one)) * real[..., None]
            cuts = np.cumsum([heads * dim for _, dim in dims])[:-1]
            parts = dict(zip("uvqk", np.split(one, cuts, axis=-1), strict=True))
            q, k, v = (parts[name].reshape(batch, n, heads, -1) for name in "qkv")
            bias = (
                z[f"layer{i}_pos_w"][n - 1 + np.arange(n) - np.arange(n)[:, None]]
                + z[f"layer{i}_ts_w"][bucket]
            )
            s = np.einsum("bihd,bjhd->bhij", q, k) + (bias[:, None] if timed else 0)
            o = np.einsum("bhij,bjhd->bihd", s / (1 + np.exp(-s)) / n * z["mask"], v).reshape(batch, n, -1)
            h = (h + (parts["u"] * standard(o)) @ z[f"layer{i}_o_weight"].T + z[f"layer{i}_o_bias"]) * real[
                ..., None
            ]
            yield {"q": q, "k": k, "v": v, "attn": o, "y": h, **({"rel_bias": bias} if timed else {})}

    for i, found in enumerate(run(z["x"])):
        z |= {f"layer{i}_{name}": x for name, x in found.items()}
    z["y"] = z["delta_y"] = h = z[f"layer{layers - 1}_y"]
    old = z["x"].copy()
    old[np.arange(batch), lengths - 1] = rng.normal(size=(batch, hidden))
    *_, last = run(old)
    z |= {"cached_x_old": old, "cached_y_old": last["y"]}
    assert np.abs(last["y"] - h).max() > 0.01
    return {name: x.astype(np.float32) if x.dtype.kind == "f" else x for name, x in z.items()}


@pytest.mark.parametrize(
    ("file", "timed"), [("research_stack", True), ("research_stack_no_timestamps", False)]
)
def test_an_hstu_of_other_sizes_is_reproduced(file: str, timed: bool, tmp_path: Path) -> None:
    np.savez(tmp_path / f"{file}.npz", **research(timed))
    compared = list(hstu_parity.comparisons(file, tmp_path))
    assert {"y", "layer2_attn", "delta_y", "mask"} <= {c.array for c in compared}
    assert [(c.array, c.error) for c in compared if not c.is_within(hstu_golden.ATOL)] == []
