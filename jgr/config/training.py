# SPDX-License-Identifier: Apache-2.0
"""The sections that training reads: the dataset, the model and its training, and what users did with what they saw."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from jgr.fields import check, require

CATALOG_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
"""The names of catalogs that stand side by side in a prepared dataset."""


@dataclass(frozen=True)
class DataConfig:
    """The interactions to train and evaluate on."""

    # Where the interactions come from. shop: the synthetic shop; prepared: a folder that `jgr prepare` wrote;
    # minionerec: a folder in MiniOneRec's format.
    kind: Literal["shop", "prepared", "minionerec"] = "shop"
    path: str = ""  # the dataset's folder; the shop has none
    catalog: str = (
        ""  # which of a prepared dataset's catalogs, by jgr ids --name; empty: the one without a name
    )

    def __post_init__(self) -> None:
        check(self)
        require(
            not self.catalog
            or (self.kind == "prepared" and CATALOG_NAME.fullmatch(self.catalog) is not None),
            f"data.catalog: a name of letters, digits, _, . and -, for data.kind=prepared, not {self.catalog!r}",
        )


@dataclass(frozen=True)
class TrainConfig:
    """A small model and how it is trained."""

    # The model to train. generator: a decoder over semantic ids; onerec: OneRec-V2's lazy decoder over them; ranker: a
    # decoder that ranks the candidates in its prompt. The others are scorers: sasrec, lrurec and hstu (also called
    # retrievers) learn from sequences of items, climber and stu (DLRMv3's HSTU) from feedback. controller: what moves
    # the border in memory, from simulated pools: a step is an episode of train.batch of them, and needs no data.
    model: Literal[
        "generator", "onerec", "sasrec", "lrurec", "hstu", "ranker", "climber", "stu", "controller"
    ] = "generator"
    out: str = ""  # folder for the checkpoint
    # Folder of a decoder of the same sizes whose weights a ranker or a generator starts from; empty: random weights.
    start: str = ""
    seed: int = 0  # seed of all random numbers: weights, order of examples, dropout, negatives
    steps: int = 2000  # optimizer steps
    # Minutes after which a call of jgr train ends though steps are left; 0: it takes all steps. The learning rate
    # follows the share of the minutes that is gone, from the first steps on, or that of the steps if that is larger.
    minutes: float = 0.0
    batch: int = 256  # training examples per step
    micro_batches: int = 1  # parts of a step's batch, computed one after the other; only saves memory
    devices: int = 1  # devices that share a step's batch (data parallelism)
    learning_rate: float = 1e-3  # the highest learning rate, reached after the warm-up
    warmup_steps: int = 100  # steps in which the learning rate rises to its peak
    # How the learning rate goes on after the warm-up: down to 1 % of the peak as a cosine or a line, or not at all.
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = 0.01  # decoupled weight decay, as in AdamW
    adam_b2: float = 0.98  # decay of AdamW's second moment
    clip_norm: float = 1.0  # largest global norm of the gradient
    dropout: float = 0.1  # probability with which dropout leaves out a value
    # Share of a generator's target that is spread evenly over the codes of its level.
    label_smoothing: float = 0.0
    # Probability with which an event of a training window is left out, anew in each epoch: what follows an event later
    # is then learnt as its next one too. At least two events stay.
    skip_events: float = 0.0
    # Items besides the target: those that are drawn for a step of a retriever's softmax (0: all items), or the other
    # candidates in a ranker's prompt.
    negatives: int = 0
    # Share of the prompts from which a ranker learns letters whose instruction names the target itself ({last}): what
    # is asked of them is only its letter, which is learnt first and is the way to all other answers.
    lookups: float = 0.0
    # Whether a letter ranker's candidates are train.retriever's best ones in its order, as they are in service. Prompts
    # whose target is not among them name it (train.lookups).
    retrieved: bool = False
    # Whether the items that are drawn for a retriever are weighed so that they stand for all items (sampled softmax);
    # HSTU's recipe does not.
    weigh_negatives: bool = True
    # Number by which a retriever's scores, or a generator's cosines (train.cosines), are divided before the softmax.
    temperature: float = 1.0
    # Whether a generator's logits are cosines of the last hidden state and the code's row, as HSTU's scores are, in a
    # softmax over the codes of each level alone. What is served is an ordinary decoder: the cosines are in its weights.
    cosines: bool = False
    # Weight of a second loss of a generator with train.cosines: where an item begins, its last code is predicted too,
    # which must be its own (jgr ids --collisions=item), as a retriever learns to name the next item whole.
    item_loss: float = 0.0
    # Weight of an item's codes after the first in a generator's loss with train.cosines. Below 1 where the last code is
    # the item's own: what stands beside it in a small group is learnt by heart too soon.
    later_codes: float = 1.0
    # Type of the rows of a scorer's tables of embeddings in files of their own (embeddings/NAME.table), from which it
    # can be served with embeddings.tables=paged; none: they are among the other weights.
    tables: Literal["none", "float32", "float16", "bfloat16"] = "none"
    # Files of item vectors (.npy, as `jgr vectors` writes them), separated by commas, of which a retriever's item
    # embeddings, or those of a generator's codes, are made together with a row of their own; empty: of such rows alone.
    item_vectors: str = ""
    # Whether a retriever learns a weight for items of the history by how long ago they stand there: where people take
    # things again, or never do.
    repeats: bool = False
    times: bool = False  # whether hstu's attention bias depends on times too; the dataset must have them
    # Whether a retriever learns the validation targets as well, as in HSTU's recipe; then nothing can be validated, and
    # no command measures it on --split=valid.
    learn_valid: bool = False
    # Layouts of the prompts that a ranker learns from. both: user_prefix and item_prefix; causal: plain order, with the
    # history's items in their words, in prompts of at most the smallest of rank.tokens; what is learnt there goes by
    # rank.method, the candidates' own tokens (item_token) or the letters of their places (list_letter).
    layouts: Literal["both", "user_prefix", "item_prefix", "causal"] = "both"
    # Type of the arithmetic in a ranker's layers while it learns letters; weights, sums and logits stay float32.
    compute: Literal["float32", "bfloat16"] = "float32"
    # Folder of a retriever that names some of a ranker's negatives; empty: all are random.
    retriever: str = ""
    hard_negatives: float = 0.5  # the share of a ranker's negatives that train.retriever names, on average
    max_items: int = 20  # history items per training example
    checkpoint_every: int = 200  # steps between checkpoints; a killed run goes on from the last one
    evaluate_every: int = 0  # steps between validations; 0: none, and the last step's weights are kept
    # Validations without an improvement after which training stops; 0, or without train.evaluate_every: it never stops
    # early.
    patience: int = 0
    # Folder of event files for TensorBoard; empty: none are written. It needs jgr[tensorboard].
    tensorboard: str = ""
    validation_examples: int = 1000  # examples of the validation split that are used, drawn by the seed
    hidden: int = 64  # width of the residual stream
    layers: int = 2  # transformer layers, or the model's counterpart
    heads: int = 4  # query heads
    kv_heads: int = 2  # key-value heads; divides heads
    head_dim: int = 16  # width of one head
    mlp: int = 256  # inner width of the feed-forward block
    # Whether a decoder's output rows are its embeddings. A decoder of train.cosines has rows of its own once it is
    # served, and so must what begins from it (train.start).
    tied: bool = True

    def __post_init__(self) -> None:
        check(
            self, seed=0, learning_rate=0, warmup_steps=0, weight_decay=0, dropout=0, adam_b2=0, clip_norm=0
        )
        check(self, minutes=0, label_smoothing=0, skip_events=0, hard_negatives=0, item_loss=0, later_codes=0)
        check(self, lookups=0)
        check(self, steps=1, batch=1, micro_batches=1, devices=1, max_items=1, checkpoint_every=1)
        check(self, negatives=0, evaluate_every=0, patience=0, validation_examples=1)
        check(self, hidden=1, layers=1, heads=1, kv_heads=1, head_dim=2, mlp=1)
        for name in ("clip_norm", "temperature"):
            require(getattr(self, name) > 0, f"train.{name} must be above 0, not {getattr(self, name)}")
        require(self.seed < 1 << 32, f"train.seed must be below 2^32, not {self.seed}")
        for name in ("dropout", "adam_b2", "label_smoothing", "skip_events", "hard_negatives"):
            value = getattr(self, name)
            require(value < 1, f"train.{name} must be below 1, not {value}")
        validates = self.learn_valid and self.evaluate_every > 0
        require(
            not validates, "train.learn_valid leaves nothing to validate on: train.evaluate_every must be 0"
        )
        require(
            self.tables == "none" or self.model in ("sasrec", "hstu", "climber", "stu"),
            f"train.tables: the embeddings of train.model={self.model} are not in tables",
        )
        informed = self.model in ("sasrec", "lrurec", "hstu")
        for name in ("repeats", "learn_valid"):
            require(
                not getattr(self, name) or informed, f"train.{name}: train.model={self.model} is no retriever"
            )
        generates = self.model == "generator"
        require(
            not self.item_vectors or informed or generates,
            f"train.item_vectors: train.model={self.model} is neither a retriever nor a generator",
        )
        require(self.lookups <= 1, f"train.lookups must be at most 1, not {self.lookups}")
        require(not self.retrieved or bool(self.retriever), "train.retrieved: only with train.retriever")
        for name in ("retriever", "lookups", "retrieved", "layouts", "compute"):
            alone = self.model == "ranker" or getattr(self, name) == getattr(TrainConfig, name)
            require(alone, f"train.{name}: train.model={self.model} is no ranker")
        for name in ("label_smoothing", "cosines"):
            require(not getattr(self, name) or generates, f"train.{name}: train.model={self.model} has none")
        require(
            self.temperature == 1 or informed or self.cosines,
            "train.temperature: only of a retriever, or with train.cosines",
        )
        sequences = self.model not in ("climber", "stu", "controller")
        require(
            not self.skip_events or sequences,
            f"train.skip_events: train.model={self.model} does not learn from sequences of items",
        )
        require(not self.item_loss or self.cosines, "train.item_loss: only with train.cosines")
        require(self.later_codes == 1 or self.cosines, "train.later_codes: only with train.cosines")
        decodes = self.model in ("generator", "ranker")
        require(self.tied or decodes, f"train.tied: train.model={self.model} is no decoder")
        require(self.tied or not self.cosines, "train.tied: must be true with train.cosines")
        require(not self.times or self.model == "hstu", "train.times: only hstu's bias depends on times")
        require(
            not (self.start and (self.item_vectors or self.cosines)),
            "train.start: not with train.item_vectors or train.cosines, whose weights are others than those served",
        )
        require(not self.start or decodes, f"train.start: a decoder cannot begin train.model={self.model}")
        fits = self.heads % self.kv_heads == 0
        require(fits, f"train.heads ({self.heads}) must be a multiple of train.kv_heads ({self.kv_heads})")
        require(self.head_dim % 2 == 0, f"train.head_dim must be even (rotary pairs), not {self.head_dim}")
        parts = self.micro_batches * self.devices
        require(
            self.batch % parts == 0,
            f"train.batch ({self.batch}) must be a multiple of train.micro_batches x train.devices ({parts})",
        )


@dataclass(frozen=True)
class FeedbackConfig:
    """What a scorer that learns from feedback predicts, and what it reads besides the history's items."""

    # Actions of the dataset to predict; each gets a score.
    tasks: tuple[str, ...] = ("click", "like", "long_view")
    weights: tuple[float, ...] = ()  # weight of each task in the loss; empty: all 1
    # Impressions in one training window; a request that showed more becomes several windows.
    candidates: int = 8
    # Rows of each of climber's embedding tables of a category feature. The features are those of features.schema, read
    # from the catalog's metadata; whole numbers are categories.
    rows: int = 1024
    timed: bool = True  # whether climber's attention bias depends on times
    # Actions that select the events of each of climber's blocks, joined by +, or "" for all events. Without any, the
    # blocks are parts of the history by age.
    behaviours: tuple[str, ...] = ()
    blocks: int = 2  # parts of the history that climber encodes apart; divides train.max_items
    experts: int = 4  # experts of climber's mixture
    action_dim: int = 8  # width of an action's embedding in stu

    def __post_init__(self) -> None:
        check(self, candidates=1, rows=1, blocks=1, experts=1, action_dim=1)
        distinct = len(set(self.tasks)) == len(self.tasks) > 0
        require(distinct, f"feedback.tasks must be different names, at least one, not {self.tasks}")
        fits = not self.weights or len(self.weights) == len(self.tasks)
        require(fits, f"feedback.weights: {len(self.weights)} of them, feedback.tasks has {len(self.tasks)}")
        require(min(self.weights, default=1) > 0, "feedback.weights must be above 0")
        fits = not self.behaviours or len(self.behaviours) == self.blocks
        require(fits, f"feedback.behaviours: {len(self.behaviours)} of them for {self.blocks} blocks")
