# SPDX-License-Identifier: Apache-2.0
"""`jgr ids` on a small prepared folder, what it writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jgr.catalog.catalog import load_catalog
from jgr.config import Config, ConfigError, DataConfig, override
from jgr.data.datasets import load_dataset
from jgr.data.interactions import DataError, leave_one_out
from jgr.data.prepared import Arrays, catalog_names, load_prepared, record
from jgr.models import manifest
from jgr.training.generator import train_generator
from tests.commands import run_here

N = 30
RUN = "import sys; from jgr.cli.main import run; sys.exit(run(['ids', *sys.argv[1:]]))"


def _ids(*argv: str) -> subprocess.CompletedProcess[str]:
    return run_here("ids", *argv)


def _elsewhere(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN, *argv], capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dataset of 30 items and 40 users, the last item never taken."""
    data = tmp_path / "data"
    data.mkdir()
    rng = np.random.default_rng(0)
    taken = leave_one_out([rng.integers(0, N - 1, 12) for _ in range(40)])
    items = [{"item_id": f"i{row}", "metadata": {"title": f"Item {row}"}} for row in range(N)]
    (data / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (data / "users.jsonl").write_text("".join(json.dumps(user) + "\n" for user in taken.user_ids))
    np.savez(data / "interactions.npz", **Arrays.of(taken).to_dict())
    _describe(data)
    return data


def _describe(data: Path) -> None:
    """Write the manifest of what lies there."""
    outputs = {path.name: record(path) for path in sorted(data.iterdir()) if path.name != "manifest.json"}
    (data / "manifest.json").write_text(json.dumps({"format": 1, "outputs": outputs}))


def _report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "ids_report.json").read_text())
    return found


@pytest.mark.parametrize("method", ["kmeans", "balanced"])
def test_ids_from_co_occurrence(folder: Path, method: str) -> None:
    done = _ids(f"--data={folder}", f"--method={method}", "--sizes=4,3", "--dims=8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].split() == ["level", "size", "used", "use", "%", "entropy", "(max)"]
    assert done.stdout.splitlines()[-1] == str(folder / "catalog.jsonl")
    catalog, prepared = load_catalog(folder / "catalog.jsonl"), load_prepared(folder)
    assert catalog.item_ids == prepared.item_ids and catalog.metadata == prepared.metadata
    assert catalog.symbols == (tuple(f"<a_{i}>" for i in range(4)), tuple(f"<b_{i}>" for i in range(3)))
    report = _report(folder)
    assert report["catalog_version"] == catalog.version
    assert report["vectors"] == {
        "computed": "co-occurrence", "dims": 8, "window": 5, "unplaced_items": 1
    }  # fmt: skip
    distinct = len(np.unique(catalog.codes, axis=0))
    assert (report["items"], report["ids"]) == (N, distinct)
    assert report["collision_rate"] == report["collision_rate_before"] == pytest.approx(1 - distinct / N)
    assert 0 < report["quantization_error"] < 1
    if method == "balanced":
        assert np.bincount(catalog.codes[:, 0]).max() <= 8
    # Again, in a process with other hashes: the same bytes. With another seed: other ones.
    written = [(folder / name).read_bytes() for name in ("catalog.jsonl", "ids_report.json")]
    for seed, same, run in ((0, True, _elsewhere), (1, False, _ids)):
        argv = f"--data={folder} --method={method} --sizes=4,3 --dims=8 --seed={seed} --overwrite".split()
        assert run(*argv).returncode == 0
        again = [(folder / name).read_bytes() for name in ("catalog.jsonl", "ids_report.json")]
        assert (again == written) is same


@pytest.mark.parametrize("collisions", ["extra", "reassign", "item"])
def test_given_vectors_and_no_collisions(folder: Path, tmp_path: Path, collisions: str) -> None:
    vectors = np.round(np.random.default_rng(1).standard_normal((N, 2)))
    np.save(tmp_path / "v.npy", vectors[:, :1])  # side by side
    np.save(tmp_path / "w.npy", vectors[:, 1:])
    files = f"{tmp_path}/v.npy,{tmp_path}/w.npy"
    done = _ids(f"--data={folder}", f"--vectors={files}", "--sizes=2,40", f"--collisions={collisions}")
    assert (done.returncode, done.stderr) == (0, "")
    report = _report(folder)
    assert report["vectors"] == {"file": "v.npy,w.npy", "normalized": False}
    assert report["collision_rate"] == 0 < report["collision_rate_before"]
    assert f"collision rate before {collisions}: " in done.stdout
    catalog = load_catalog(folder / "catalog.jsonl")
    assert len(np.unique(catalog.codes, axis=0)) == N
    assert catalog.depth == len(report["levels"]) == (2 if collisions == "reassign" else 3)
    assert report["levels"][-1]["used"] == catalog.level_sizes[-1]


def test_too_few_ids_to_reassign_are_warned_of(folder: Path) -> None:
    done = _ids(f"--data={folder}", "--sizes=2,3", "--dims=8", "--collisions=reassign")
    assert done.returncode == 0
    assert "items still share ids, since a prefix has more items than the last level has codes" in done.stderr
    assert _report(folder)["collision_rate"] == pytest.approx(1 - 6 / N)


def test_every_item_a_token_of_its_own(folder: Path) -> None:
    done = _ids(f"--data={folder}", "--method=item")
    assert done.returncode == 0, done.stderr
    catalog = load_catalog(folder / "catalog.jsonl")
    assert catalog.depth == 1
    assert [catalog.symbols[0][code] for (code,) in catalog.codes] == [
        f"<a_{i}>" for i in range(catalog.n_items)
    ]


def test_rqvae(folder: Path) -> None:
    done = _ids(f"--data={folder}", "--method=rqvae", "--sizes=4,4", "--steps=2", "--dims=8")
    assert (done.returncode, done.stderr) == (0, "")
    report = _report(folder)
    assert report["method"] == "rqvae" and np.isfinite(report["reconstruction_error"])
    assert load_catalog(folder / "catalog.jsonl").version == report["catalog_version"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--data: the folder"),
        (["--data=/no/such"], "/no/such"),
        (["--data={data}", "--sizes=4,x"], "--sizes: expected integers as in 256,256,256, found '4,x'"),
        (["--data={data}", "--sizes=4,0"], "a level has 1 to 65536 codes, not 0"),
        (["--data={data}", "--sizes=2,2,2,2,2,2,2,2,2"], "needs 1 to 8 levels, found 9"),
        (["--data={data}", "--sizes=2,2,2,2,2,2,2,2", "--collisions=extra"], "more than 8"),
        (["--data={data}", "--method=magic"], "kmeans|balanced|rqvae"),
        (["--data={data}", "--normalize"], "--normalize has no effect here: it is for --vectors; "),
        (["--data={data}", "--column=ours"], "--column has no effect here: it is for --table"),
        (["--data={data}", "--steps=9"], "--steps has no effect here: it is for --method=rqvae"),
        (["--data={data}", "--vectors=v.npy", "--dims=9"], "--dims has no effect here: it is for computed "),
        (
            ["--data={data}", "--vectors=v.npy", "--window=9"],
            "--window has no effect here: it is for computed ",
        ),
        *(
            (
                ["--data={data}", "--method=item", flag],
                f"{flag.partition('=')[0]} has no effect here: it is for {what}",
            )
            for flag, what in (
                ("--vectors=v.npy", "ids from vectors, without --table and --method=item"),
                ("--sizes=4,3", "ids from vectors"),
                ("--seed=1", "ids from vectors"),
                ("--normalize", "--vectors"),
                ("--dims=9", "computed vectors"),
                ("--window=9", "computed vectors"),
                ("--steps=9", "--method=rqvae"),
                ("--collisions=extra", "ids that items may share, which those of --method=item are not"),
                ("--column=ours", "--table"),
            )
        ),
        (["--data={data}", "--vectors={data}/../nan.npy"], "row 4 holds NaN"),
        (["--data={data}", "--vectors={data}/../few.npy"], "found [29, 2]"),
        (["--data={data}", "more"], "unexpected argument 'more'"),
    ],
)
def test_a_mistake_writes_nothing(folder: Path, argv: list[str], words: str) -> None:
    np.save(folder.parent / "few.npy", np.ones((N - 1, 2)))
    np.save(folder.parent / "nan.npy", np.where(np.arange(N)[:, None] == 4, np.nan, np.ones((N, 2))))
    done = _ids(*(word.format(data=folder) for word in argv))
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr and done.stderr.count("\n") == 1
    assert not (folder / "catalog.jsonl").exists() and not (folder / "ids_report.json").exists()


def test_ids_that_came_with_the_source_stay(folder: Path) -> None:
    (folder / "catalog.jsonl").write_text('{"item_id": "i0", "semantic_id": ["<a_0>"]}\n')
    _describe(folder)
    done = _ids(f"--data={folder}", "--sizes=4")
    assert done.returncode == 2 and "its source brought semantic ids" in done.stderr
    assert load_catalog(folder / "catalog.jsonl").n_items == 1


def _table(path: Path, *lines: str) -> Path:
    path.write_text("item_id\tours\ttheirs\n" + "".join(line + "\n" for line in lines))
    return path


def test_ids_from_a_table(folder: Path, tmp_path: Path) -> None:
    lines = [f"i{row}\t0-0\t{row // 10}-{row % 10 // 2}" for row in reversed(range(N))]
    table = _table(tmp_path / "table.tsv", *lines, "other\t1-1\t1-1")
    done = _ids(f"--data={folder}", f"--table={table}", "--column=theirs", "--collisions=extra")
    assert (done.returncode, done.stderr) == (0, "")
    catalog = load_catalog(folder / "catalog.jsonl")
    assert catalog.codes.tolist() == [[row // 10, row % 10 // 2, row % 2] for row in range(N)]
    report = _report(folder)
    assert (report["collision_rate_before"], report["collision_rate"]) == (0.5, 0.0)
    assert [level["size"] for level in report["levels"]] == [3, 5, 2]


@pytest.mark.parametrize(
    ("argv", "lines", "message"),
    [
        ((), (), "--column: the column of --table is not set"),
        (("--column=ours", "--method=item"), (), "--method has no effect here: it is for ids that no --table brings"),
        (("--column=ours", "--vectors=v.npy"), (), "--vectors has no effect here: it is for ids from vectors"),
        (("--column=ours", "--sizes=4"), (), "--sizes has no effect here: it is for ids from vectors"),
        (("--column=mine",), (), "has no column 'mine'; it has ours, theirs"),
        (("--column=ours", "--collisions=reassign"), (), "--table brings ids, no vectors"),
        (("--column=ours",), ("i0\t1-2",), ":2: has 2 fields, the header has 3"),
        (("--column=ours",), ("i0\t1-2\t1", "i1\t1-2-3\t1"), ":3: ours must be 2 codes as in 12-7-200, found '1-2-3'"),
        (("--column=ours",), ("i0\t\t1",), ":2: ours must be some codes as in 12-7-200, found ''"),
        (("--column=ours",), ("i0\t1\t1", "i0\t1\t1"), ":3: item 'i0' stands there twice"),
        (("--column=ours",), ("i0\t1\t1",), "has no id for 29 items of the dataset, 'i1' among them"),
        (("--column=ours",), ("i0\t99999999\t1",), "found '99999999'"),
    ],
)  # fmt: skip
def test_tables_that_are_refused(
    folder: Path, tmp_path: Path, argv: tuple[str, ...], lines: tuple[str, ...], message: str
) -> None:
    done = _ids(f"--data={folder}", f"--table={_table(tmp_path / 't.tsv', *lines)}", *argv)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (folder / "catalog.jsonl").exists()


def test_levels_that_tell_nothing_apart_are_warned_of(folder: Path) -> None:
    done = _ids(f"--data={folder}", "--sizes=64,64,64", "--dims=8")
    assert done.returncode == 0
    ids = _report(folder)["ids"]
    assert 16 < ids <= N
    (line,) = done.stderr.splitlines()
    assert line.endswith(
        "--sizes: levels 1, 2 tell nothing apart that the others do not: "
        f"they give {N} items {ids} ids; sizes that fit are 4,4,4"
    )
    fitting = _ids(f"--data={folder}", "--sizes=4,4,4", "--dims=8", "--overwrite")
    assert (fitting.returncode, fitting.stderr) == (0, "")


def test_catalogs_stand_side_by_side_and_none_is_replaced_unasked(folder: Path) -> None:
    plain = _ids(f"--data={folder}", "--method=item")
    named = _ids(f"--data={folder}", "--name=tree", "--sizes=4,3", "--dims=8")
    assert plain.returncode == named.returncode == 0, named.stderr
    assert named.stdout.splitlines()[-2:] == [
        "train on them with --set data.catalog=tree", str(folder / "tree.catalog.jsonl")
    ]  # fmt: skip
    config = DataConfig(kind="prepared", path=str(folder))
    found = load_dataset(config).catalog, load_dataset(replace(config, catalog="tree")).catalog
    assert [catalog.depth for catalog in found] == [1, 2]
    report = json.loads((folder / "tree.ids_report.json").read_text())
    assert (report["catalog_version"], _report(folder)["method"]) == (found[1].version, "item")
    for name, path in (("", "catalog.jsonl"), ("tree", "tree.catalog.jsonl")):
        before = (folder / path).read_bytes()
        done = _ids(f"--data={folder}", f"--name={name}", "--sizes=3")
        assert done.returncode == 2 and (folder / path).read_bytes() == before
        assert done.stderr == (
            f"jgr: {folder / path} holds semantic ids: --overwrite replaces it, or give another --name\n"
        )
    with pytest.raises(
        DataError, match=r"has no catalog named bush \(data\.catalog\); it has one without a name, tree"
    ):
        load_dataset(replace(config, catalog="bush"))
    (folder / "catalog.jsonl").unlink()
    with pytest.raises(DataError, match=r"has no catalog without a name \(data\.catalog\); it has tree"):
        load_dataset(config)


def test_names_of_catalogs_are_checked(folder: Path) -> None:
    done = _ids(f"--data={folder}", "--name=../x")
    assert done.returncode == 2 and "--name: a name of letters, digits" in done.stderr
    for kind, name in (("prepared", "a/b"), ("shop", "tree")):
        with pytest.raises(ConfigError, match=r"data\.catalog: a name of letters"):
            DataConfig(kind=kind, catalog=name)  # type: ignore[arg-type]


def test_a_source_with_ids_takes_others_by_name(folder: Path) -> None:
    items = [{"item_id": f"i{row}", "semantic_id": [f"<a_{row}>"]} for row in range(N)]
    (folder / "catalog.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    _describe(folder)
    done = _ids(f"--data={folder}", "--name=mine", "--method=item")
    assert done.returncode == 0, done.stderr
    assert catalog_names(folder) == ["", "mine"]


def test_new_ids_leave_a_trained_model_its_own(folder: Path, tmp_path: Path) -> None:
    """The dataset's catalog is replaced; the model is evaluated on the one that it learnt on."""
    assert _ids(f"--data={folder}", "--name=tree", "--sizes=4,3", "--dims=8").returncode == 0
    config = override(
        Config(), "model.name=mine", "data.kind=prepared", f"data.path={folder}", "data.catalog=tree", "beam.width=8",
        f"train.out={tmp_path / 'model'}", "train.steps=1", "train.batch=4", "train.hidden=16", "train.layers=1",
        "prompt.max_items=6", "train.max_items=6",
    )  # fmt: skip
    learnt = load_dataset(config.data).catalog
    train_generator(config, load_dataset(config.data))
    served = manifest.folder_config(tmp_path / "model")
    assert served.data == replace(config.data, path=str(folder))
    changed = _ids(f"--data={folder}", "--name=tree", "--sizes=6,5", "--dims=8", "--overwrite")
    assert changed.returncode == 0, changed.stderr
    assert load_dataset(served.data).catalog.version != learnt.version
    own = manifest.learnt_catalog(served)
    assert own is not None and load_dataset(served.data, own).catalog.version == learnt.version
    assert manifest.learnt_catalog(replace(served, data=replace(served.data, catalog=""))) is None
