# SPDX-License-Identifier: Apache-2.0
"""`jgr evaluate`: recommendation quality through the serving path, beside popularity and item-kNN.

Without --url the configured model is loaded into an engine of this process; with --url a running server is asked
over HTTP. The last line of stdout is the table as one JSON document.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from absl import flags

from jgr.cli import console
from jgr.config import Config

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from jgr.data.datasets import Dataset
    from jgr.data.interactions import Examples

HELP = "measure a model's recommendations on a dataset"


def define_flags() -> None:
    flags.DEFINE_string("url", None, "ask this running server instead of loading the model")
    flags.DEFINE_enum("split", "test", ("valid", "test"), "which targets to predict")
    flags.DEFINE_integer("limit", None, "use only the first so many examples", lower_bound=1)
    flags.DEFINE_bool("exclude_history", False, "never recommend an item of the history")


def main(argv: Sequence[str]) -> int:
    console.refuse_arguments(argv)
    config = console.load(flags.FLAGS)
    from jgr.data.datasets import load_dataset
    from jgr.evaluation.report import format_table, score, score_baselines

    values = flags.FLAGS
    dataset = load_dataset(config.data)
    split: Examples = getattr(dataset.interactions, values.split)
    examples = split.select(slice(values.limit))
    with console.progress_bar("evaluating") as bar:
        answered = 0

        def on_answer() -> None:
            nonlocal answered
            answered += 1
            bar(answered, len(examples), "")

        ranked = _ranked(config, dataset, examples, on_answer)
    n_items = dataset.catalog.n_items
    rows = score_baselines(dataset.interactions, examples, n_items, values.exclude_history)
    rows[config.model.name] = score(ranked, examples)
    print(format_table(rows))
    print(
        json.dumps(
            {
                "dataset": config.data.kind,
                "split": values.split,
                "examples": len(examples),
                "exclude_history": values.exclude_history,
                "catalog_version": dataset.catalog.version,
                "returned": int((ranked >= 0).sum()),
                "rows": rows,
            }
        )
    )
    return 0


def _ranked(
    config: Config, dataset: Dataset, examples: Examples, on_answer: Callable[[], None]
) -> npt.NDArray[np.int32]:
    from jgr.evaluation import client, recommendations
    from jgr.evaluation.report import TOP_K
    from jgr.serving.loading import load_engine

    exclude = flags.FLAGS.exclude_history
    if flags.FLAGS.url:
        with client.Client(flags.FLAGS.url, config.server.api_key) as server:
            return client.recommend_all(
                server,
                dataset.catalog,
                examples,
                top_k=TOP_K,
                exclude_history=exclude,
                on_answer=on_answer,
            )

    async def through_engine() -> npt.NDArray[np.int32]:
        engine = load_engine(config)
        await engine.start()
        try:
            return await recommendations.recommend_all(
                engine, examples, top_k=TOP_K, exclude_history=exclude, on_answer=on_answer
            )
        finally:
            await engine.drain(config.server.drain_timeout_s)

    return asyncio.run(through_engine())
