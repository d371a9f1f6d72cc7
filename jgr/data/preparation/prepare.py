# SPDX-License-Identifier: Apache-2.0
"""`jgr prepare`: turns a raw dataset into a prepared one (jgr/data/prepared.py says what that is).

The one idea: there are two stages, read and split, and each leaves a marker with the hashes of all its inputs and
outputs. A run that was interrupted goes on after the last finished stage. The manifest is written last.

- read: the raw files, once; ids become integers (jgr/data/preparation/reading.py). Errors in a line are reported here.
- split: filter, order, cut into train, valid and test, renumber (jgr/data/preparation/splitting.py).

A folder that was already prepared from the same files with the same parameters is left as it is; one prepared from
others is refused, unless it may be overwritten.

Peak memory: about 150 bytes for each event, plus the ids and metadata of the items that occur. A raw file is never
in memory as a whole.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers

import jgr
from jgr.catalog.catalog import save_catalog
from jgr.data.interactions import DataError
from jgr.data.preparation import reading
from jgr.data.preparation.reading import EVENTS, FACTS, Facts, item_line, write_lines
from jgr.data.preparation.splitting import Split, split_events
from jgr.data.prepared import (
    CATALOG,
    FORMAT,
    INTERACTIONS,
    ITEMS,
    MANIFEST,
    SPLITS,
    TITLES,
    USERS,
    Arrays,
    first_difference,
    load_manifest,
    load_npz,
    read_items,
    record,
)
from jgr.data.sources.records import Counts, Raw, ReadyDataset, Source, SplitName, TableOptions, Tabular
from jgr.data.sources.registry import SOURCES
from jgr.files import refuse_overwriting, writing
from jgr.prompt.tokens import Tokenizer

MIN_BPE_VOCAB = 300  # 256 bytes, our three special tokens, and some merges
_WORK = ".work"
AS_FOUND = TableOptions()
_ENCODER = msgspec.json.Encoder(order="deterministic")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What to prepare and how.

    source: a name of SOURCES. split: None takes the source's usual one. min_user, min_item: users and items with fewer
    events are removed, again and again until none has fewer; min_item None takes the source's. bpe_vocab: tokens of the
    title tokenizer; 0: none is made. allow_counts: only warn if the counts differ from those known for the source.
    tables: how the source `generic` reads its files. overwrite: replace a dataset of other files or parameters.
    """

    source: str
    raw: Path
    out: Path
    split: SplitName | None = None
    min_user: int = 0
    min_item: int | None = None
    bpe_vocab: int = 0
    allow_counts: bool = False
    tables: TableOptions = AS_FOUND
    overwrite: bool = False


def prepare(options: Options) -> tuple[dict[str, Any], bool]:
    """Prepare a dataset; returns its manifest, and whether anything had to be done.

    Raises DataError (CatalogError for semantic ids), naming the file and line, the user, or the option.
    """
    source, parameters = _resolve(options)
    raw = source.open(options.raw)
    if options.tables != AS_FOUND and not isinstance(raw, Tabular):
        raise DataError(f"--time_unit, --actions: are for --source=generic, not {options.source}")
    paths = _paths(raw)
    _refuse_replacing(options.out, paths)
    inputs = {path.relative_to(options.raw).as_posix(): record(path) for path in paths}
    identity = {"format": FORMAT, "parameters": parameters, "inputs": inputs}
    if (options.out / MANIFEST).exists():
        manifest = load_manifest(options.out)
        if {name: manifest.get(name) for name in identity} != identity:
            refuse_overwriting(
                options.out, options.overwrite, "--out", "a dataset of other files or other parameters"
            )
        elif first_difference(options.out, manifest["outputs"], 2**62) is None:
            return manifest, False
    work = options.out / _WORK
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise DataError(f"{options.out}: cannot be made: {cause.strerror}") from cause
    counts, outputs, facts = _build(options, source, parameters, raw, inputs)
    if options.bpe_vocab:
        train_title_tokenizer(options.out / ITEMS, options.bpe_vocab, options.out / TITLES)
        outputs.append(TITLES)
    else:
        (options.out / TITLES).unlink(missing_ok=True)  # that of what was here before
    manifest = {
        **identity,
        "jgr": jgr.__version__,
        "counts": counts,
        **{name: value for name, value in msgspec.json.decode(msgspec.json.encode(facts)).items() if value},
        "outputs": {name: record(options.out / name) for name in outputs},
    }
    with writing(options.out / MANIFEST, DataError) as stream:
        stream.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    shutil.rmtree(work, ignore_errors=True)
    for left in options.out.glob(".*.partial"):  # left by a run that was killed
        left.unlink(missing_ok=True)
    return manifest, True


def _resolve(options: Options) -> tuple[Source, dict[str, Any]]:
    """The source, and the parameters that the outputs depend on."""
    source = SOURCES.get(options.source)
    if source is None:
        raise DataError(f"--source: there is no {options.source!r}; known: {', '.join(SOURCES)}")
    split = options.split or source.splits[0]
    if split not in source.splits:
        raise DataError(f"--split={split}: {options.source} has {' or '.join(source.splits)}")
    if options.bpe_vocab and options.bpe_vocab < MIN_BPE_VOCAB:
        raise DataError(f"--bpe_vocab must be 0 or at least {MIN_BPE_VOCAB}, not {options.bpe_vocab}")
    parameters = {
        "source": options.source,
        "split": split,
        "min_user": options.min_user,
        "min_item": source.min_item if options.min_item is None else options.min_item,
        "bpe_vocab": options.bpe_vocab,
        **({"time_unit": options.tables.time_unit} if options.tables.time_unit else {}),
        **({"actions": list(options.tables.actions)} if options.tables.actions else {}),
        **({"columns": True} if options.source == "generic" else {}),  # it once read no feedback
    }
    return source, parameters


def _paths(raw: Raw | Tabular | ReadyDataset) -> list[Path]:
    """All files that are read."""
    if isinstance(raw, ReadyDataset):
        return list(raw.files)
    events = raw.files if isinstance(raw, Tabular) else [path for path, _ in raw.events]
    return [*events, *([raw.items[0]] if raw.items else [])]


def _refuse_replacing(out: Path, raw: list[Path]) -> None:
    """Raise DataError where a file that is written, or removed, is one of those that are read."""
    read = set(map(os.path.realpath, raw))  # Path.resolve raises at a link to itself
    for path in (out / name for name in (MANIFEST, ITEMS, USERS, INTERACTIONS, TITLES, CATALOG)):
        if os.path.realpath(path) in read:
            raise DataError(f"--out: {path} is a raw file that would be replaced: give another folder")


def _build(
    options: Options,
    source: Source,
    parameters: dict[str, Any],
    raw: Raw | Tabular | ReadyDataset,
    inputs: dict[str, Any],
) -> tuple[dict[str, Any], list[str], Facts]:
    """Write all files of the dataset except the manifest; returns the counts, the names of the files, and the facts."""
    out, work = options.out, options.out / _WORK
    if isinstance(raw, ReadyDataset):
        if parameters["min_user"] or parameters["min_item"]:
            raise DataError(f"--min_user, --min_item: {options.source} comes with its examples cut out")
        return _copy_whole(options, source, raw), [ITEMS, USERS, INTERACTIONS, CATALOG], Facts()
    read_key = _key(FORMAT, options.source, inputs, options.tables)
    parts = [work / name for name in (EVENTS, USERS, ITEMS, FACTS)]
    _stage(work, "read", read_key, parts, lambda: reading.read(raw, work, source.actions, options.tables))
    events, facts = reading.load(work)
    counts = Counts(len(events.user_ids), len(events.item_ids), len(events.user))
    _verify(options, "the raw files", counts, source.raw)
    shape = {name: value for name, value in parameters.items() if name != "bpe_vocab"}
    outputs = [ITEMS, USERS, INTERACTIONS]
    paths = [out / name for name in outputs]

    def split() -> None:
        result = split_events(events, source, parameters)
        unusual = any(parameters[name] != default for name, default in _defaults(source).items())
        _verify(options, "the filtered events", result.counts(), None if unusual else source.kept)
        (out / MANIFEST).unlink(missing_ok=True)  # what it describes is replaced from here on
        _write(out, result)

    _stage(work, "split", _key(read_key, shape), paths, split)
    arrays = load_npz(out / INTERACTIONS)
    kept = Counts(len(arrays["offsets"]) - 1, int(arrays["rows"].max()) + 1, len(arrays["rows"]))
    if kept.interactions < counts.interactions:
        left = counts.interactions - kept.interactions
        note = f"interactions: left out, {left} of {counts.interactions}: by --min_user and --min_item, or as repeats"
        facts = msgspec.structs.replace(facts, notes=(*facts.notes, note))
    return _counts(counts, kept, arrays), outputs, facts


def _defaults(source: Source) -> dict[str, int]:
    return {"min_user": 0, "min_item": source.min_item}


def _counts(raw: Counts, kept: Counts, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, Any]:
    return {"raw": raw._asdict(), **kept._asdict(), **{split: arrays[split].shape[1] for split in SPLITS}}


def _copy_whole(options: Options, source: Source, whole: ReadyDataset) -> dict[str, Any]:
    catalog, interactions = whole.load()
    arrays = Arrays.of(interactions)
    arrays.check(catalog.n_items, interactions.user_ids)
    counts = Counts(len(interactions.user_ids), catalog.n_items, len(arrays.rows))
    _verify(options, "the raw files", counts, source.raw)
    (options.out / MANIFEST).unlink(missing_ok=True)
    save_catalog(catalog, options.out / CATALOG)
    lines = map(item_line, catalog.item_ids, catalog.metadata)
    _write(options.out, Split(arrays, list(interactions.user_ids), list(lines)))
    return _counts(counts, counts, arrays.to_dict())


def _verify(options: Options, what: str, found: Counts, expected: Counts | None) -> None:
    if expected is None or found == expected:
        return
    message = f"{options.raw}: {what} hold {found}, known for {options.source} are {expected}"
    if not options.allow_counts:
        raise DataError(f"{message}; --allow_counts takes them as they are")
    _log.warning(message)


def _key(*parts: object) -> str:
    return hashlib.sha256(_ENCODER.encode(parts)).hexdigest()


def _stage(work: Path, name: str, key: str, outputs: list[Path], make: Callable[[], None]) -> None:
    """Run `make`, which writes `outputs`, unless an earlier run wrote them from the inputs that `key` is a hash of."""
    marker = work / f"{name}.json"

    def state() -> bytes:
        return _ENCODER.encode({"key": key, "outputs": {path.name: record(path) for path in outputs}})

    if marker.exists() and all(path.exists() for path in outputs) and marker.read_bytes() == state():
        _log.info("%s: done by an earlier run", name)
        return
    make()
    with writing(marker, DataError) as stream:
        stream.write(state())
    _log.info("%s: done", name)


def _write(out: Path, result: Split) -> None:
    write_lines(out / ITEMS, result.item_lines)
    write_lines(out / USERS, map(_ENCODER.encode, result.user_ids))
    with writing(out / INTERACTIONS, DataError) as stream:
        np.savez_compressed(stream, **result.arrays.to_dict())


def train_title_tokenizer(items: Path, vocab: int, path: Path) -> None:
    """Train a byte-level BPE of at most `vocab` tokens on the items' titles. Its first tokens: <pad>, <bos>, <sid>."""
    titles = [fields["title"] for fields in read_items(items)[1] if isinstance(fields.get("title"), str)]
    if not titles:
        raise DataError("--bpe_vocab: no item has a title")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<pad>", "<bos>", "<sid>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(titles, trainer)
    Tokenizer(inner).save(path)
