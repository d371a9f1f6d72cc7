# SPDX-License-Identifier: Apache-2.0
"""Arrival times of logs: each format by lines that were written by hand, a journal of a server's own writing."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from jgr.traffic.arrival_files import read_arrivals
from jgr.traffic.schedule import LoadError
from tests.serving.fakes import LiveServer

KUAIRAND = (
    "user_id,video_id,time_ms,is_click\n1,9,1650812741436,1\n2,9,1650812741500,0\n1,9,1650812741436,1\n"
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319600,3180,8\r\n"
    "2024-02-29 00:00:00+00:00,1,1\r\n"
)
MOONCAKE = '{"timestamp": 3000, "input_length": 1, "hash_ids": [0]}\n{"timestamp": 0}\n{"timestamp": 27.5}\n'
JOURNAL = (
    '{"policy":0,"now_ns":5,"event":{"type":"open","name":"m"},"result":null}\n'
    '{"policy":0,"now_ns":1000000000,"event":{"type":"submit","job":{"anything":1}},"result":null}\n'
    '{"policy":1,"now_ns":1250000000,"event":{"type":"submit","job":{}},"result":"queue_full"}\n'
    '{"policy":0,"now_ns":1260000000,"event":{"type":"refuses","job":{}},"result":{"reason":"too_late"}}\n'
    '{"policy":0,"now_ns":1300000000,"event":{"type":"plan"},"result":[]}\n'
)


def _written(folder: Path, text: str, name: str = "arrivals") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["arrivals", "arrivals.gz"])
@pytest.mark.parametrize(
    ("text", "format_", "seconds"),
    [
        (KUAIRAND, "kuairand", [0.0, 0.064]),
        (AZURE, "azure", [0.0, 0.052, 104 * 86400 + 20576.02004]),  # 2024 is a leap year
        (MOONCAKE, "mooncake", [0.0, 0.0275, 3.0]),
        (JOURNAL, "journal", [0.0, 0.25, 0.26]),
        (JOURNAL + '{"policy":0,"now_ns":13', "journal", [0.0, 0.25, 0.26]),  # the server was killed
    ],
)
def test_formats_are_recognised(
    tmp_path: Path, text: str, format_: str, seconds: list[float], name: str
) -> None:
    found, times = read_arrivals(_written(tmp_path, text, name))
    assert found == format_
    np.testing.assert_allclose(times, seconds, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "arrivals: holds no arrivals"),
        (KUAIRAND.splitlines()[0], "holds no arrivals"),
        ("a,b\n1,2\n", "arrivals:1: the format is not known"),
        ('{"a": 1}\n', "arrivals:1: the format is not known"),
        ("{", "arrivals:1: the format is not known"),
        (KUAIRAND + "1,2\n", "arrivals:5: has 2 columns, the first line has 4"),
        (KUAIRAND + "1,2,now,0\n", "arrivals:5: time_ms"),
        (KUAIRAND + "1,2,-5,0\n", "arrivals:5: time_ms"),
        (AZURE + "yesterday,1,1\n", "arrivals:5: TIMESTAMP must look like"),
        (AZURE + "2023-13-16 18:17:03,1,1\n", "arrivals:5: "),
        (MOONCAKE + "{}\n", "arrivals:4: .*timestamp"),
        (MOONCAKE + '{"timestamp": 1e300}\n', "arrivals:4: "),
        ('{"timestamp": -9e12}\n{"timestamp": 9e12}\n', "arrivals: its times span more than 292 years"),
        (JOURNAL + '{"policy":0,"now_ns":13\n', "arrivals:6: "),
        (JOURNAL + '{"policy":0,"now_ns":99999999999999999999,"event":{"type":"submit"}}\n', "arrivals:6: "),
    ],
)
def test_what_holds_no_times_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(LoadError, match=words):
        read_arrivals(_written(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be read"):
        read_arrivals(tmp_path / "nowhere")


def test_the_journal_of_a_server_has_an_arrival_for_each_request(tmp_path: Path) -> None:
    journal = tmp_path / "journal.jsonl"
    with LiveServer(f"server.journal={journal}") as server:
        for _ in range(3):
            assert server.call("/v1/recommend", {"history": ["a"], "top_k": 1}).status == 200
    found, times = read_arrivals(journal)
    assert (found, len(times), times[0]) == ("journal", 3, 0.0)
    assert (np.diff(times) > 0).all()


@pytest.mark.data("kuairand-pure")
def test_kuairands_log_without_its_duplicates(
    dataset: Path,
) -> None:
    found, times = read_arrivals(dataset / "events_20220425_20220508.csv.gz")
    assert (found, len(times)) == ("kuairand", 222_444)
    assert times[-1] == pytest.approx((1652025130564 - 1650812741436) / 1e3)


@pytest.mark.data("llm-serving-traces")
@pytest.mark.parametrize(
    ("name", "format_", "count", "rate"),
    [
        ("AzureLLMInferenceTrace_code.csv.gz", "azure", 8819, 2.57),
        ("AzureLLMInferenceTrace_conv.csv.gz", "azure", 19366, 5.53),
        ("mooncake_conversation_trace.jsonl.gz", "mooncake", 12031, 3.40),
    ],
)
def test_traces_of_llm_services(dataset: Path, name: str, format_: str, count: int, rate: float) -> None:
    found, times = read_arrivals(dataset / name)
    assert (found, len(times)) == (format_, count)
    assert len(times) / times[-1] == pytest.approx(rate, abs=0.01)
