# SPDX-License-Identifier: Apache-2.0
"""The benchmarks' harness: order of runs, waiting for a quiet machine, and what a result file says."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import harness, pictures
from benchmarks.harness import Claim, Measured, Missing
from jgr.evaluation.machine import CpuTimes, Quiet

KEYS = {
    "benchmark",
    "command",
    "measured_commit",
    "dirty",
    "source_hash",
    "sources",
    "seconds",
    "date",
    "machine",
    "versions",
    "claims",
    "rows",
}


@pytest.mark.parametrize(
    ("better", "value", "holds"),
    [("higher", 4.0, True), ("higher", 3.9, False), ("lower", 4.0, True), ("lower", 4.1, False)],
)
def test_a_claim_holds_where_it_reaches_its_target(better: str, value: float, holds: bool) -> None:
    claim = Claim("x", value, "ms", better, 4.0)  # type: ignore[arg-type]
    assert claim.to_json() == {
        "id": "x",
        "value": value,
        "unit": "ms",
        "better": better,
        "target": 4.0,
        "holds": holds,
    }


def test_a_claim_with_an_interval_holds_where_all_of_it_does() -> None:
    for better, holds in (("higher", (4.0, 9.0)), ("lower", (1.0, 4.0))):
        claims = [Claim("x", 4.5, "", better, 4.0, interval=of) for of in (holds, (3.9, 4.1))]  # type: ignore[arg-type]
        assert [claim.holds for claim in claims] == [True, False]


class FakeQuiet(Quiet):
    """Quiet, apart from the rounds that it is told of."""

    def __init__(self, disturbed: set[int], log: list[str]) -> None:
        super().__init__(0.0)
        self.disturbed, self.log, self.round = disturbed, log, -1

    def wait(self) -> CpuTimes:
        self.round += 1
        self.log.append("wait")
        return CpuTimes(0.0, 0.0, float(self.round))

    def was_quiet_since(self, start: CpuTimes) -> bool:
        assert start.at_s == self.round
        return self.round not in self.disturbed


def test_runs_are_interleaved_and_first_and_disturbed_rounds_are_not_kept() -> None:
    log: list[str] = []

    def variant(name: str) -> Callable[[], int]:
        def run() -> int:
            log.append(name)
            return log.count(name)

        return run

    variants = {"a": variant("a"), "b": variant("b")}
    quiet = FakeQuiet({1}, log)
    results = harness.interleave(variants, 3, quiet, lambda s: log.append("settle"))
    assert log == ["a", "b", *(["wait", "settle", "a", "settle", "b"] * 4)]
    assert results == {"a": [2, 4, 5], "b": [2, 4, 5]}


def test_timed_gives_the_median_of_calls_that_fill_the_time() -> None:
    clock = iter([10.0, 10.5, 20.0, 20.125, 30.0, 30.25, 40.0, 40.25])
    results = iter("abcd")
    assert harness.timed(lambda: next(results), 0.8, lambda: next(clock)) == (250.0, "c")
    assert harness.timed(lambda: next(results), 0.25, lambda: next(clock)) == (250.0, "d")


def test_spread_is_median_and_quartiles() -> None:
    # Quartiles of 1, 2, 3, 4 by linear interpolation: at positions .75, 1.5 and 2.25 of 0..3.
    assert harness.spread([4, 1, 3, 2]) == {"median": 2.5, "q1": 1.75, "q3": 3.25, "runs": 4}
    assert harness.spread([7.0]) == {"median": 7.0, "q1": 7.0, "q3": 7.0, "runs": 1}


@given(st.floats(1e-12, 1e12), st.integers(1, 8))
def test_rounding_keeps_the_significant_digits(value: float, digits: int) -> None:
    assert abs(harness.rounded(value, digits) - value) <= 0.5000001 * value * 10.0 ** (1 - digits)
    assert harness.rounded(-value, digits) == -harness.rounded(value, digits)


def test_a_missing_package_and_a_wrong_version_say_how_to_install_it() -> None:
    with pytest.raises(
        Missing, match=r"needs no-such-package==1\.0, which is not there: pip install no-such"
    ):
        harness.require("no-such-package", "1.0")
    with pytest.raises(Missing, match=r"needs absl-py==0\.0, which is \d.*: pip install absl-py==0\.0"):
        harness.require("absl-py", "0.0")


def test_source_hash_covers_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "jgr").mkdir()
    (tmp_path / "jgr" / "a.py").write_text("A")
    (tmp_path / "jgr" / "a.txt").write_text("not a source")
    bench = tmp_path / "bench.py"
    bench.write_text("BB")
    expected = hashlib.sha256(b"bench.py 2\nBBjgr/a.py 1\nA").hexdigest()[:16]
    assert harness.source_hash([bench], tmp_path) == expected
    (tmp_path / "jgr" / "a.txt").write_text("changed")
    assert harness.source_hash([bench, bench], tmp_path) == expected
    (tmp_path / "jgr" / "a.py").write_text("B")
    assert harness.source_hash([bench], tmp_path) != expected


def test_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "--quiet")
    assert harness.commit(tmp_path)[0] is None
    (tmp_path / "a.py").write_text("A")
    git("add", "a.py")
    git("commit", "--quiet", "--no-verify", "--message=first")
    assert harness.commit(tmp_path) == (git("rev-parse", "HEAD"), False)
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    (results / "x.cpu.json").write_text("{}")
    assert harness.commit(tmp_path) == (git("rev-parse", "HEAD"), False)
    (tmp_path / "a.py").write_text("B")
    assert harness.commit(tmp_path) == (git("rev-parse", "HEAD"), True)


SCRIPT = """
from pathlib import Path
from benchmarks import harness
harness.RESULTS = Path({results!r})
def measure(quick, quiet):
    {body}
    return harness.Measured([harness.Claim("c", 2.0, "x", "higher", 1.0)], [{{"quick": quick}}])
harness.main(harness.Benchmark("toy", measure, ("numpy",), (Path({source!r}),)))
"""


def _run(tmp_path: Path, *argv: str, body: str = "pass") -> subprocess.CompletedProcess[str]:
    source = str(Path(harness.__file__))
    code = SCRIPT.format(results=str(tmp_path / "results"), body=body, source=source)
    return subprocess.run(
        [sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False, cwd=harness.ROOT
    )


def test_a_full_run_writes_its_result_and_plot(tmp_path: Path) -> None:
    done = _run(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    claim, last = done.stdout.splitlines()
    assert claim == "c: 2 x (target ≥ 1: holds)"
    result = json.loads((tmp_path / "results" / "toy.cpu.json").read_text())
    assert result == json.loads(last)
    assert result.keys() == KEYS
    assert result["command"] == "python -m benchmarks.toy"
    assert result["rows"] == [{"quick": False}]
    assert result["versions"].keys() == {"python", "jgr", "numpy"}
    assert datetime.fromisoformat(result["date"]).tzinfo == UTC
    assert pictures.drawn_from(tmp_path / "results" / "toy.cpu.png") == pictures.digest(result)


def test_a_quick_run_writes_only_where_it_is_told(tmp_path: Path) -> None:
    done = _run(tmp_path, "--quick")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout.splitlines()[-1])["command"] == "python -m benchmarks.toy --quick"
    assert list(tmp_path.iterdir()) == []
    out = tmp_path / "aside" / "x.json"
    assert _run(tmp_path, "--quick", f"--out={out}").returncode == 0
    assert {p.name for p in out.parent.iterdir()} == {"x.json", "x.png"}
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(("error", "code"), [("BusyMachine", 3), ("Missing", 2)])
def test_refusals_are_one_line_and_write_nothing(tmp_path: Path, error: str, code: int) -> None:
    done = _run(tmp_path, body=f"raise harness.{error}('because')")
    assert (done.returncode, done.stderr) == (code, "toy: because\n")
    assert list(tmp_path.iterdir()) == []


def test_committed_results_are_whole_and_agree_with_their_claims() -> None:
    for path in harness.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert KEYS - {"sources", "seconds"} <= result.keys() <= KEYS, path  # older ones have not both
        assert path.name in {f"{result['benchmark']}.{device}.json" for device in ("cpu", "h200", "compiled")}
        assert result["command"] == f"python -m benchmarks.{result['benchmark']}", "a quick run is no result"
        assert (harness.ROOT / "benchmarks" / f"{result['benchmark']}.py").is_file()
        for claim in result["claims"]:
            fields = {name: claim[name] for name in claim if name != "holds"}
            told = Claim(**fields).to_json()
            assert told | {"holds": claim["holds"]} == claim
            assert told["holds"] == claim["holds"] or ("interval" in claim and "sources" not in result)
        assert Measured(result["claims"], result["rows"]).rows, path
