# SPDX-License-Identifier: Apache-2.0
"""`jgr tune`: searches for fields of a training that validate best, trial by trial, and goes on where it was stopped.

    jgr tune --config=hstu_text --vary=train.dropout=0.2:0.6 --vary=train.learning_rate=3e-4:3e-3:log --trials=20 \\
      --out=runs/study

The folder then holds study.db, trials.png, best.toml for `jgr train --config`, and the best trial's model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.config import Config, UserError
from jgr.files import writing

HELP = "search for the hyper-parameters of a training, on the validation split"


def define_flags() -> None:
    flags.DEFINE_multi_string(
        "vary",
        [],
        "a field of train.* and what to try: field=a,b,c or field=low:high, with :log for even logarithms",
    )
    flags.DEFINE_integer("trials", 20, "how many trials to have finished in the end", lower_bound=1)
    flags.DEFINE_string("out", None, "folder of the study; one that is there goes on")


def main(argv: Sequence[str]) -> int:
    console.refuse_arguments(argv)
    values = flags.FLAGS
    if not values.out:
        raise UserError("--out: the folder of the study is not set")
    extras.require("train", "jgr tune", "tune")
    config = console.load(values)
    from jgr.cli.train import fit, keep_compiled
    from jgr.config.formats import dump
    from jgr.config.tree import without_secrets
    from jgr.data.datasets import load_dataset
    from jgr.training import study as studies

    keep_compiled(config)
    ranges = [studies.Range.parse(text) for text in values.vary]
    studies.check(config, ranges)
    dataset = load_dataset(config.data)
    study = studies.Study(Path(values.out), config, ranges, dataset.digest())

    def trial(chosen: Config, report: studies.Report) -> None:
        fit(chosen, dataset, lambda done, total, status: None, report)

    with console.progress_bar("trials") as bar:
        study.run(values.trials, trial, bar)
    best, value, number = study.best()
    print("\n".join(studies.told(study.rows())))
    path = Path(values.out) / studies.BEST
    head = f"# Trial {number} of a study of {study.finished}: validation {value:.4f}.\n"
    with writing(path, UserError) as stream:
        stream.write((head + dump(without_secrets(best), "toml")).encode())
    print(f"its model: {study.folder_of(number)}, which jgr serve takes")
    out = "" if best.train.out else " --set train.out=FOLDER"
    print(f"train it anew: jgr train --config={path}{out}")
    return 0
