# SPDX-License-Identifier: Apache-2.0
"""Damage model folders in seeded ways, and load what is left: each load works, or is refused in one line.

`attack` is for a test and for other benchmarks; `python -m benchmarks.damage` runs many more cases. A folder is as
`jgr train` writes it (`own`), the same without digests (`older`), a scorer's (`scorer`), or in Hugging Face's form, as
one file (`hf`) or in shards (`sharded`). A checkpoint of ours that loads has the weights that were written, to the bit.
The other forms carry no checksum, so there a damage that leaves the form whole may change numbers, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jgr.catalog.catalog import Catalog, save_catalog
from jgr.config import Config, UserError
from jgr.models import checkpoint, decoder, hf, manifest, params, sasrec, scorers
from jgr.models.decoder import DecoderConfig
from jgr.models.model_files import DIGESTS, INDEX, ModelFiles
from jgr.models.retrievers import items_digest
from jgr.models.sasrec import SasrecConfig
from jgr.prompt.tokens import Tokenizer, semantic_id_tokenizer
from jgr.serving.versions.loading import is_scorer

FORMS = ("own", "older", "scorer", "hf", "sharded")
PATIENCE_S = 10.0
"""A load of these small folders takes milliseconds; one that takes so long hangs."""
MOST_BYTES = 512 << 20
"""How much memory all cases together may add to the process at its peak."""
SPARSE_BYTES = 8 << 30
WEIRD: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 2**31 - 1, 10**30, 10**400, 1e300, float("inf"), float("nan"), "", "x", "\x00", [], {},
    [[]], {"a": {}}, [1] * 1000, "../../etc/passwd", "x" * 100_000,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What came of one damaged folder. problem: what is wrong with that; empty: nothing."""

    form: str
    damage: str
    outcome: str
    problem: str


def make_folders(at: Path) -> dict[str, Path]:
    """A small whole folder of each form, below `at`."""
    catalog = Catalog.build(
        [f"i{n}" for n in range(12)], [(f"<a_{n % 4}>", f"<b_{n // 4}>") for n in range(12)], [{}] * 12
    )
    tokenizer = semantic_id_tokenizer(catalog)
    cfg = DecoderConfig(
        family="qwen3", vocab_size=tokenizer.vocab_size, hidden=16, layers=2, heads=2, kv_heads=1, head_dim=8,
        mlp=32, rope_theta=1e4, norm_eps=1e-6, tied=False, max_position=64,
    )  # fmt: skip
    weights = params.initialize(decoder.spec(cfg), jax.random.key(0))
    folders = {form: at / form for form in FORMS}

    def write_beside(folder: Path) -> None:
        tokenizer.save(folder / "tokenizer.json")
        save_catalog(catalog, folder / manifest.CATALOG)
        manifest.write(folder, Config(), catalog)

    checkpoint.save(folders["own"], cfg, weights, write_beside)
    shutil.copytree(folders["own"], folders["older"])
    (folders["older"] / DIGESTS).unlink()
    ranker = SasrecConfig(12, 8, 16, 1, 1, 16, items_digest(catalog.item_ids))
    drawn = params.initialize(sasrec.spec(ranker), jax.random.key(1))
    scorers.save(folders["scorer"], ranker, drawn, write_beside)
    hf.export(folders["hf"], cfg, weights)
    shutil.copytree(folders["hf"], folders["sharded"])
    _split(folders["sharded"])
    for form in ("hf", "sharded"):
        write_beside(folders[form])
    return folders


def load(folder: Path) -> Any:
    """All that a start reads of a folder before it compiles; returns the weights. Raises UserError."""
    manifest.folder_config(folder)
    files = ModelFiles(folder)
    if is_scorer(folder):
        weights = scorers.load(folder, files)[1]
    else:
        weights = checkpoint.load(folder, files=files)[1]
        if (folder / "tokenizer.json").exists():
            Tokenizer.from_file(folder / "tokenizer.json")
    files.revision()
    manifest.own_catalog(folder)
    return weights


def attack(count: int, seed: int = 0, forms: tuple[str, ...] = FORMS) -> list[Case]:
    """Damage a fresh copy of a folder `count` times, and load each."""
    rng = np.random.default_rng(seed)
    cases = []
    with tempfile.TemporaryDirectory(prefix="jgr-damage-") as place:
        whole = make_folders(Path(place) / "whole")
        wanted = {form: jax.tree.map(np.asarray, load(whole[form])) for form in forms}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        for number in range(count):
            form = forms[number % len(forms)]
            folder = Path(place) / "damaged"
            shutil.copytree(whole[form], folder)
            damage = _damage(folder, rng)
            cases.append(_case(form, damage, folder, wanted[form]))
            shutil.rmtree(folder)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    if grown > MOST_BYTES:
        cases.append(Case("all", "memory", "", f"the loads took {grown >> 20} MB"))
    return cases


def _case(form: str, damage: str, folder: Path, wanted: Any) -> Case:
    began = time.monotonic()
    problem = ""
    try:
        weights = load(folder)
        outcome = "loaded"
        found, sound = params.by_name(weights), params.by_name(wanted)
        same = found.keys() == sound.keys() and all(
            np.array_equal(found[name], sound[name]) for name in sound
        )
        if not same and (form in ("own", "scorer") or not damage.startswith("bytes")):
            problem = "other weights were loaded"
    except UserError as error:
        outcome = str(error)
        if "\n" in outcome or len(outcome) > 1000:
            problem = "the refusal is no short line"
    except Exception as error:
        outcome, problem = repr(error)[:500], f"{type(error).__name__} is no refusal"
    took_s = time.monotonic() - began
    if took_s > PATIENCE_S:
        problem = f"it took {took_s:.1f} s"
    return Case(form, damage, outcome, problem)


def _split(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    where = {name: f"model-{n % 2}.safetensors" for n, name in enumerate(sorted(tensors))}
    for shard in set(where.values()):
        save_file({name: x for name, x in tensors.items() if where[name] == shard}, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def _damage(folder: Path, rng: np.random.Generator) -> str:
    """Spoil one file of a folder; what was done. It begins with "bytes" where some bytes of it were overwritten."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = files[rng.integers(len(files))]
    ways: list[tuple[str, Callable[[Path, np.random.Generator], None]]] = [*_WAYS]
    if path.suffix == ".json":
        ways += [("a value of", _spoil_value)] * 8
    if path.suffix == ".safetensors":
        ways += [("the header of", _spoil_header)] * 6
    name, way = ways[rng.integers(len(ways))]
    way(path, rng)
    return f"{name} {path.relative_to(folder)}"


def _cut(path: Path, rng: np.random.Generator) -> None:
    os.truncate(path, int(rng.integers(path.stat().st_size)))


def _flip(path: Path, rng: np.random.Generator) -> None:
    content = bytearray(path.read_bytes())
    for at in rng.integers(len(content), size=rng.choice([1, 1, 3, 100])):
        content[at] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def _blank(path: Path, rng: np.random.Generator) -> None:
    content = bytearray(path.read_bytes())
    start = int(rng.integers(len(content)))
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    path.write_bytes(content)


def _replace_by_folder(path: Path, rng: np.random.Generator) -> None:
    path.unlink()
    path.mkdir()


def _replace_by_pipe(path: Path, rng: np.random.Generator) -> None:
    path.unlink()
    os.mkfifo(path)


def _replace_by_link(path: Path, rng: np.random.Generator) -> None:
    path.unlink()
    path.symlink_to(path.name if rng.integers(2) else "nothing")


def _replace_by_another(path: Path, rng: np.random.Generator) -> None:
    others = [other for other in path.parent.iterdir() if other.is_file() and other != path]
    if others:
        shutil.copy(others[rng.integers(len(others))], path)
    else:
        path.unlink()


def _replace_by_text(path: Path, rng: np.random.Generator) -> None:
    texts = ("", "{", "[]", "{}", "null", "[" * 100_000, '{"a":' * 50_000, "\ufeff{}", "1e400", '"\\ud800"')
    path.write_text(texts[rng.integers(len(texts))])


def _grow(path: Path, rng: np.random.Generator) -> None:
    os.truncate(path, SPARSE_BYTES)


_WAYS: tuple[tuple[str, Callable[[Path, np.random.Generator], None]], ...] = (
    ("cut", _cut), ("cut", _cut), ("bytes flipped in", _flip), ("bytes flipped in", _flip),
    ("bytes blanked in", _blank), ("deleted", lambda path, rng: path.unlink()), ("a folder for", _replace_by_folder),
    ("a pipe for", _replace_by_pipe), ("a link for", _replace_by_link), ("another file for", _replace_by_another),
    ("text for", _replace_by_text), ("8 GB of", _grow),
)  # fmt: skip


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _spoil_value(path: Path, rng: np.random.Generator) -> None:
    raw = json.loads(path.read_bytes())
    places = list(_places(raw))
    holder, key = places[rng.integers(len(places))]
    holder[key] = WEIRD[rng.integers(len(WEIRD))]
    path.write_text(json.dumps(raw))


def _spoil_header(path: Path, rng: np.random.Generator) -> None:
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
    kind = rng.integers(4)
    if kind == 0:
        new = content[8 : 8 + size]
        size = int(rng.choice([0, 1, size - 1, size + 1, 2**31, 2**62]))
    elif kind == 1:
        new = b"[" * 100_000
        size = len(new)
    else:
        name = sorted(header.keys() - {"__metadata__"})[rng.integers(len(header) - 1)]
        changes: tuple[tuple[str, Any], ...] = (
            ("shape", [2**40, 2**40]), ("shape", []), ("shape", [-1]), ("dtype", "I32"), ("dtype", "F8_E4M3"),
            ("dtype", "X"), ("data_offsets", [0, 2**62]), ("data_offsets", [8, 4]), ("data_offsets", [0, 4]),
            ("shape", "x"),
        )  # fmt: skip
        field, value = changes[rng.integers(len(changes))]
        header[name][field] = value
        new = json.dumps(header).encode()
        size = len(new)
    path.write_bytes(struct.pack("<Q", size) + new + data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=2000, help="how many folders to damage")
    parser.add_argument("--seed", type=int, default=0, help="of the damages")
    parser.add_argument("--show", action="store_true", help="print every case")
    given = parser.parse_args()
    cases = attack(given.count, given.seed)
    for case in cases:
        if case.problem or given.show:
            print(f"{case.form}: {case.damage}: {case.problem or 'well'}: {case.outcome[:200]}")
    wrong = sum(bool(case.problem) for case in cases)
    loaded = sum(case.outcome == "loaded" for case in cases)
    print(
        f"{len(cases)} damaged folders: {loaded} loaded, {len(cases) - loaded - wrong} refused, {wrong} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
