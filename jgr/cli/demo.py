# SPDX-License-Identifier: Apache-2.0
"""`jgr demo`: shows all of jgr on the synthetic shop. Train, serve, ask over HTTP, compare with the baselines.

On a terminal the server stays up until Ctrl-C; otherwise it is stopped at the end.
"""

from __future__ import annotations

import dataclasses
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.config import Config, UserError, load_config

if TYPE_CHECKING:
    from jgr.client.remote import Client
    from jgr.data.datasets import Dataset
    from jgr.data.shop import Shop

HELP = "train a small generator on a synthetic shop, serve it and show its recommendations"

CONFIG = "shop"
USERS_SHOWN = 3
ITEMS_SHOWN = 5
HISTORY_SHOWN = 4


def define_flags() -> None:
    flags.DEFINE_bool("stay", None, "keep serving until Ctrl-C; by default only where stdout is a terminal")
    console.define_overwrite()


def main(argv: Sequence[str]) -> int:
    console.refuse_arguments(argv)
    extras.require("train", "jgr demo")
    config = console.load(flags.FLAGS, load_config(CONFIG))
    from jgr.data.datasets import Dataset
    from jgr.data.interactions import leave_one_out
    from jgr.data.shop import make_shop
    from jgr.serving.http.ports import hold_ports
    from jgr.training.generator import train_generator
    from jgr.training.run import making_way

    held = hold_ports(config.server)  # fail now if the port is taken, not after the training
    shop = make_shop()
    dataset = Dataset(shop.catalog, leave_one_out(shop.sequences, shop.names))
    print(f"The shop: {shop.catalog.n_items} items, {len(shop.names)} users.", flush=True)
    print(f"Training a decoder for {config.train.steps} steps ...", flush=True)
    overwriting = making_way(config.train.out, fresh=False, overwrite=True)
    with overwriting if flags.FLAGS.overwrite else nullcontext(), console.progress_bar("training") as bar:
        folder = train_generator(config, dataset, bar)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder)))
    print(f"Serving {folder} ...", flush=True)
    with _server(config, held) as (url, stopped):
        _show(url, config, shop, dataset)
        stay = sys.stdout.isatty() if flags.FLAGS.stay is None else flags.FLAGS.stay
        print(f"\nThe server: {url} (a page to look at: {url}/ui, its API: {url}/docs)", flush=True)
        if stay:
            print("Ctrl-C stops it.", flush=True)
            stopped.wait()
        else:
            print(f"It stops now; again with: jgr serve {folder}", flush=True)
    return 0


@contextmanager
def _server(config: Config, held: socket.socket) -> Iterator[tuple[str, threading.Event]]:
    """Run a server in a thread. Yields its URL, and an event that is set when it has stopped. held: see Listener."""
    from jgr.serving.decoders.loading import load_engine
    from jgr.serving.http.listener import Listener

    served, stopped = threading.Event(), threading.Event()
    with console.progress_bar("compiling") as bar:
        listener = Listener(
            load_engine(config), config, on_progress=bar, on_ready=lambda url: served.set(), held=held
        )

        def run() -> None:
            listener.serve_until_stopped()
            stopped.set()
            served.set()

        thread = threading.Thread(target=run, name="server")
        thread.start()
        served.wait()
    try:
        if stopped.is_set():
            raise UserError("the server did not start; its log says why")
        yield listener.url, stopped
    finally:
        listener.stop()
        thread.join()


def _show(url: str, config: Config, shop: Shop, dataset: Dataset) -> None:
    from jgr.client.remote import Client
    from jgr.evaluation.client import recommend_all
    from jgr.evaluation.report import METRICS, TOP_K, format_table, score, score_baselines

    examples = dataset.interactions.test
    with Client(url, config.server.api_key) as client, console.progress_bar("evaluating") as bar:
        for user in range(USERS_SHOWN):
            _show_user(client, shop, dataset, user)
        answered = 0

        def on_answer() -> None:
            nonlocal answered
            answered += 1
            bar(answered, len(examples), "")

        ranked = recommend_all(
            client, shop.catalog, examples, top_k=TOP_K, exclude_history=True, on_answer=on_answer
        )
    rows = score_baselines(dataset.interactions, examples, shop.catalog.n_items, exclude_history=True)
    rows["jgr"] = score(ranked, examples)
    rows["best possible"] = score(shop.oracle_top_k(examples, TOP_K), examples)
    print(f"\nThe next purchase of {len(examples)} users, predicted through the server:")
    print(format_table(rows, METRICS))


def _show_user(client: Client, shop: Shop, dataset: Dataset, user: int) -> None:
    example = dataset.interactions.test
    rows = example.histories[user]
    name = shop.names[int(example.users[user])]

    def title(row: int) -> str:
        return str(shop.catalog.metadata[row]["title"])

    answer = client.recommend(
        [shop.catalog.item_ids[row] for row in rows],
        top_k=ITEMS_SHOWN,
        user_id=name,
        exclude_history=True,
        include_metadata=True,
    )
    print(f"\n{name} bought {len(rows)} items, the last ones:")
    print("   ...", "; ".join(title(int(row)) for row in rows[-HISTORY_SHOWN:]))
    print(f"  jgr recommends ({answer.timing_ms.total:.1f} ms):")
    target = shop.catalog.item_ids[int(example.targets[user])]
    for item in answer.items:
        mark = "  <- bought next" if item.item_id == target else ""
        named = (item.metadata or {}).get("title", "")
        print(f"   {item.rank}. {named:<40} {item.score:7.2f}{mark}")
