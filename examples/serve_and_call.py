# SPDX-License-Identifier: Apache-2.0
"""Starts a server of a model, and asks it in three ways: by jgr.Client, by plain HTTP, and by KServe's protocol.

    python examples/serve_and_call.py                     # a small checkpoint with random weights, made for this
    python examples/serve_and_call.py runs/shop           # the folder that `make demo` trained
    python examples/serve_and_call.py models/industrial   # one that `jgr convert` wrote

It takes half a minute on two cores, most of it for compiling. The server listens on 127.0.0.1, on any free port, and is
stopped at the end.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import small_checkpoint

import jgr

# The command `jgr` of this Python, wherever its script lies.
JGR = [sys.executable, "-c", "import sys; from jgr.cli.main import run; sys.exit(run())"]


def convert(folder: Path) -> Path:
    """Make a small checkpoint, and turn it into a model folder. Yours is converted by the same command."""
    items = small_checkpoint.write(folder / "checkpoint")
    command = ["convert", f"--checkpoint={items.parent}", "--family=minionerec", f"--items={items}"]
    subprocess.run([*JGR, *command, f"--out={folder / 'toys'}"], check=True)
    return folder / "toys"


@contextmanager
def server(model: Path, settings: list[str]) -> Iterator[str]:
    """`jgr serve MODEL` in a process of its own. Yields its URL, and stops it at the end."""
    # --port=0 is any free port. The URL is all that the server prints to stdout, once it answers.
    command = [*JGR, "serve", str(model), "--port=0", *(f"--set={setting}" for setting in settings)]
    # A script that is told to end would end at once, and leave the server running. This way it comes to the `finally`.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            if not url:
                raise SystemExit("the server did not start; the lines above say why")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)  # it finishes what it accepted, and ends with 0
            if process.wait() != 0:
                raise SystemExit("the server did not end well")


def by_client(url: str, history: list[str]) -> list[str]:
    """jgr.Client: answers and refusals are Python objects. Returns the recommended items."""
    # retries: how often to ask again where the server is overloaded or not there, after the time that it names.
    with jgr.Client(url, retries=2) as client:
        info = client.info
        print(
            f"\n{info.id} serves {info.catalog_items} items, {info.beam_width} beams, version {info.version}"
        )
        answer = client.recommend(history, top_k=3, include_metadata=True)
        for item in answer.items:
            print(f"  {item.rank}. {item.item_id:>6}  {item.score:7.3f}  {item.metadata.get('title', '')}")
        # An answer says what it cost: tokens of the prompt, and milliseconds by stage.
        print(f"  {answer.usage.prompt_tokens} tokens, {answer.timing_ms.total:.1f} ms")
        found = [item.item_id for item in answer.items]
        # Ranking given items gives each the score that recommending it would.
        ranked = client.rank(history, found)
        print("  ranked again:", ", ".join(f"{item.item_id} {item.score:.3f}" for item in ranked.items))
        # Several histories in one call are answered in their order, and share batches in the server.
        both = client.recommend([history, history[:1]], top_k=1)
        print("  two users:", [each.items[0].item_id for each in both])
        # A mistake is an exception that names the field; jgr.Overloaded and jgr.DeadlineExceeded are others.
        try:
            client.recommend(history, top_k=0)
        except jgr.InvalidRequest as error:
            print(f"  refused: {error.field}: {error.message}")
    return found


def ask(url: str, path: str, body: object) -> dict:
    """POST a body as JSON, as `curl -d` does, and return the answer's JSON; of a refusal too."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as refusal:
        return json.load(refusal)


def by_http(url: str, history: list[str]) -> list[str]:
    """Plain HTTP, from any language. Returns the recommended items."""
    body = {"history": history, "top_k": 3}
    print(f"\ncurl -s {url}/v1/recommend -d '{json.dumps(body)}'")
    answer = ask(url, "/v1/recommend", body)
    print(json.dumps(answer["items"]))
    # An unknown field is refused, not ignored, and the message names the nearest one.
    refused = ask(url, "/v1/recommend", {"history": history, "topk": 3})
    print(json.dumps(refused["error"]))
    return [item["item_id"] for item in answer["items"]]


def by_kserve(url: str, history: list[str]) -> list[str]:
    """KServe's Open Inference Protocol v2: the same request as tensors. Returns the recommended items."""
    # There are two KServe models, `recommend` and `rank`; their inputs are the fields of the endpoints above.
    inputs = [
        {"name": "history", "datatype": "BYTES", "shape": [len(history)], "data": history},
        {"name": "top_k", "datatype": "INT32", "shape": [1], "data": [3]},
    ]
    answer = ask(url, "/v2/models/recommend/infer", {"inputs": inputs})
    outputs = {output["name"]: output["data"] for output in answer["outputs"]}
    print(f"\nKServe, {answer['model_version']}: {outputs['item_ids']} {outputs['scores']}")
    return outputs["item_ids"]


def first_items(model: Path, count: int) -> list[str]:
    """The first items of the model's catalog, as somebody's history; yours come from your users."""
    with open(model / "catalog.jsonl") as lines:
        return [json.loads(next(lines))["item_id"] for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model, and ask it in three ways.")
    parser.add_argument("model", type=Path, nargs="?", help="a folder of jgr train or jgr convert")
    parser.add_argument(
        "--set", action="append", default=[], help="overrides for jgr serve: section.field=value"
    )
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        model = options.model or convert(Path(temporary))
        with server(model, options.set) as url:
            history = first_items(model, 3)
            answers = [by_client(url, history), by_http(url, history), by_kserve(url, history)]
    # One engine answered all three.
    assert answers[0] == answers[1] == answers[2], answers
    print("\nall three gave the same items")


if __name__ == "__main__":
    main()
