# SPDX-License-Identifier: Apache-2.0
"""Reading a buffer assignment, and that the keys and values in it are counted once, to the byte."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks import beam_memory as bench
from benchmarks import work
from benchmarks.beam_memory import Value
from jgr.models import decoder, params

# As XLA dumps it: a layer's keys and values of a prompt, which two parts of the program name, and of 512 beams.
DUMP = """BufferAssignment:
allocation 11: size 9216, parameter 11, shape |bf16[36,128]| at ShapeIndex {}:
 value: <4507 params_layers_k_norm.1 @0> (size=9216,offset=0): bf16[36,128]{1,0}
allocation 31: size 359190696, preallocated-temp:
 value: <1671 pallas_call.9{} @0> (size=24,offset=359190272): (bf16[1,16384,128]{2,1,0}, bf16[1,8192,128]{2,1,0})
 value: <4238 pallas_call.9{1} @0> (size=2097152,offset=2097152): bf16[1,8192,128]{2,1,0}
 value: <4242 pallas_call.9{2} @0> (size=2097152,offset=0): bf16[1,8192,128]{2,1,0}
 value: <4653 while.118{2} (phi) @0> (size=2097152,offset=0): bf16[1,8192,128]{2,1,0}
 value: <4276 pallas_call.8{1} @0> (size=1048576,offset=50609664): bf16[1,4096,128]{2,1,0}
 value: <4277 pallas_call.8{2} @0> (size=1048576,offset=88358400): bf16[1,4096,128]{2,1,0}
 value: <4279 pallas_call.8{0} @0> (size=2097152,offset=98358400): bf16[1,8192,128]{2,1,0}
 value: <4280 pallas_call.12 @0> (size=2097152,offset=108358400): bf16[1,8192,128]{2,1,0}
 value: <4278 slice.1 @0> (size=49807360,offset=150994944): bf16[9728,2560]{1,0}

Total bytes used: 8530328484 (7.94GiB)
allocation 99: said again
 value: <1 again @0> (size=2097152,offset=0): bf16[1,8192,128]{2,1,0}
"""


def test_values_are_read_with_their_places() -> None:
    values = bench.read_values(DUMP)
    assert len(values) == 10
    assert values[0] == Value(11, "params_layers_k_norm.1", 9216, 0, "bf16[36,128]")
    assert values[4] == Value(31, "while.118{2}", 2097152, 0, "bf16[1,8192,128]")


def test_a_place_counts_once() -> None:
    def value(allocation: int, size: int, offset: int) -> Value:
        return Value(allocation, "x", size, offset, "u8[1]")

    places = [
        value(1, 10, 0),
        value(1, 10, 0),
        value(1, 10, 5),
        value(1, 3, 2),
        value(1, 4, 20),
        value(2, 7, 0),
    ]
    assert bench.occupied(places) == 15 + 4 + 7
    assert bench.occupied([]) == 0


def test_the_formula_is_that_of_the_paper_and_a_row_holds_both() -> None:
    cfg = bench.qwen3()
    weights = 2 * params.count(decoder.spec(cfg))
    assert 8.1e9 < weights < 8.2e9
    assert work.kv_bytes(cfg, 1024, 2) == 150_994_944  # 151 MB in the paper
    assert work.kv_bytes(cfg, 512 * 3, 2) == 226_492_416  # 226 MB: three slots
    analysis = SimpleNamespace(
        argument_size_in_bytes=weights + 1000, temp_size_in_bytes=359190696, peak_memory_in_bytes=8530323336
    )
    row = bench.make_row(cfg, 1024, 512, analysis, bench.read_values(DUMP))
    assert row["found_kv_bytes"] == {"prompt_kv": 2 * 2_097_152, "beam_kv": 2 * 1_048_576}
    assert row["explained_bytes"]["prompt_kv"] == 150_994_944
    assert row["largest_others"] == ["bf16[9728,2560]: 49807360 bytes", "bf16[1,8192,128]: 2097152 bytes"]
    whole = {**row, "found_kv_bytes": {"prompt_kv": 150_994_944, "beam_kv": 0}}
    assert [(c.id, c.value, c.holds) for c in bench.claims([whole])] == [
        ("prompt-kv-bytes-beside-the-formula", 0, True),
        ("memory-unexplained", 100 * row["unexplained"], True),
        ("memory-of-a-4b-model-prompt-1024-beam-512", 8.53, True),
    ]
    for copies in (2, 512):
        copied = {**row, "found_kv_bytes": {"prompt_kv": copies * 150_994_944, "beam_kv": 75_497_472}}
        assert not bench.claims([copied])[0].holds
    assert not bench.claims([row])[0].holds
