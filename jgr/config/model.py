# SPDX-License-Identifier: Apache-2.0
"""The sections on what is served: the model and its devices, the catalog, prompts, and the two kinds of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jgr.fields import check, require, sizes

MAX_DEVICES = 64
"""The most devices of one process. No machine has more."""


@dataclass(frozen=True)
class ModelConfig:
    """The model to serve."""

    name: str = "jgr"  # name of the model in requests, answers and /v1/models
    # Folder of the weights: one that `jgr train` wrote, a Hugging Face checkpoint, or the name of one on the hub,
    # hf://org/name[@revision].
    path: str = ""
    # Type of weights and activations; scores are float32 in either case. Empty: float32, but on a GPU bfloat16 for a
    # generator whose folder has weights of 16 bits; bfloat16 halves memory, and saves time on GPUs and, for decoders by
    # jgr-native, on CPUs with AMX.
    dtype: Literal["", "float32", "bfloat16"] = ""
    # How a generator's layers hold their matrices: in 8 bits, as int8 or fp8 with a factor for each output channel, or
    # as the folder has them where it is empty. All else stays in model.dtype.
    quantize: Literal["", "int8", "fp8"] = ""
    # Devices that share the model's weights and each of its batches, for a model too large for one of them: heads and
    # MLPs are divided over them. A decoder's heads and the MLP's width must be multiples of it.
    tensor_parallel: int = 1
    # Whether the kernels of jgr-native may compute on a CPU, where that package is installed. False for one model of a
    # server is False for all.
    native: bool = True
    # Folder that keeps compiled programs, so that the next start is fast; empty: nothing is kept.
    compilation_cache: str = "~/.cache/jgr"

    def __post_init__(self) -> None:
        check(self, tensor_parallel=1)
        require(bool(self.name), "model.name must not be empty")
        count = self.tensor_parallel
        require(count <= MAX_DEVICES, f"model.tensor_parallel must be at most {MAX_DEVICES}, not {count}")


@dataclass(frozen=True)
class DataParallelConfig:
    """Devices of one process that have the same weights and part each batch, for more traffic than one can serve."""

    # Devices that each have all of the weights, a row of every batch, and a cache of cache.device_mb. For decoders
    # whose prompts are packed: with a cache.policy, and candidates in the prompt where they rank. 1: one device.
    devices: int = 1
    # How a batch gets cached items that another device has. copies: from device to device, as many as are missed;
    # all_to_all: by one collective program, which moves equally much between all pairs; compute: not at all, each
    # device computes and keeps its own. Neither of the first two goes before they have been measured on several GPUs.
    reads: Literal["copies", "all_to_all", "compute"] = "copies"
    # Share of a device's pages for items that may hold copies of what other devices have: of the items that are asked
    # for most. All others stay on one device (hot replicated, cold sharded).
    hot_share: float = 0.5

    def __post_init__(self) -> None:
        check(self, devices=1, hot_share=0)
        require(
            self.devices <= MAX_DEVICES,
            f"data_parallel.devices must be at most {MAX_DEVICES}, not {self.devices}",
        )
        require(self.hot_share <= 1, f"data_parallel.hot_share must be at most 1, not {self.hot_share}")


@dataclass(frozen=True)
class CatalogConfig:
    """The items that may be recommended."""

    # File of the items: .jsonl[.gz], .index.json[.gz] with its .item.json[.gz] in the same folder, or .catalog; empty:
    # the one in the model's folder.
    path: str = ""
    segments: str = "segments"  # metadata field that holds an item's segments: one name or a list of names
    segment_rows: int = 32  # combinations of segments whose bitmaps stay on the device
    max_versions: int = 4  # catalogs that the server keeps: the active one, the one before it, and uploads
    max_upload_bytes: int = 256 << 20  # largest body of POST /v1/catalogs, in bytes

    def __post_init__(self) -> None:
        check(self, segment_rows=1, max_versions=3, max_upload_bytes=1)


@dataclass(frozen=True)
class PromptConfig:
    """How a history becomes tokens."""

    template: str = "<bos>{history}"  # text of the whole prompt; {history} stands for the items
    # Text of one history item; may name metadata fields, as in "{title}: {sid}". {review} stands for the event's own
    # text, of a request's history_texts.
    item: str = "{sid}"
    max_items: int = 50  # how many of a history's last items are kept
    # Items by which a history above prompt.max_items is cut at a time: between two cuts its first tokens stay the same,
    # so that their cached keys and values can be reused. Up to stride - 1 items fewer are kept; 1: none fewer.
    stride: int = 1
    separator: str = ""  # text between two items
    review_tokens: int = 128  # most tokens of an event's own text; what follows is cut

    def __post_init__(self) -> None:
        check(self, max_items=1, stride=1, review_tokens=1)
        fits = self.stride <= self.max_items
        require(fits, f"prompt.stride ({self.stride}) must be at most prompt.max_items ({self.max_items})")
        require(self.template.count("{history}") == 1, "prompt.template must hold {history} exactly once")


@dataclass(frozen=True)
class BeamConfig:
    """The beam search over semantic ids."""

    width: int = 32  # beam width of a request that names none
    # What a step's log-softmax runs over. valid: the legal continuations only; full: the whole vocabulary.
    normalize: Literal["valid", "full"] = "valid"
    approximate: int = 0  # most continuations of one beam that a step keeps; 0: all of them, the exact search
    items_per_id: int = 50  # most items of an answer that share a semantic id: the catalog's first ones

    def __post_init__(self) -> None:
        check(self, width=1, approximate=0, items_per_id=1)


@dataclass(frozen=True)
class RankConfig:
    """How a decoder ranks candidates. All fields but `method` are for the methods with candidates in the prompt."""

    # What a candidate's score is. likelihood: that of its semantic id after the history's prompt; the others put all
    # candidates into the prompt, and read the score off its own token (item_token, for one-level catalogs), the answer
    # to a question about it (item_probe), or the letter of its place in the list (list_letter). list_generation: the
    # model writes the letters of all candidates one after the other, the best first, each read before the next.
    method: Literal["likelihood", "item_token", "item_probe", "list_letter", "list_generation"] = "likelihood"
    item: str = "{title}{sid}"  # text of one candidate, as in prompt.item; item_token needs {sid} at its end
    # Text before each candidate in plain order (layout=causal), which is computed in every request; empty: none. {n} is
    # the candidate's number from 0 on, so that <l_{n}> is its letter.
    label: str = ""
    # Text after the history and the candidates. {last} is the semantic id of the history's last item: recency-focused
    # prompting, which a small model needs (arXiv 2305.08845).
    instruction: str = "<sid>"
    probe: str = "<sid>"  # the question about one candidate, for item_probe
    # The token that says yes, for item_probe: the score is its logit minus that of rank.negative.
    positive: str = "<yes>"
    negative: str = "<no>"  # the token that says no, for item_probe
    letters: str = "<l_{n}>"  # the token of the n-th candidate, for list_letter and list_generation
    item_span: int = 32  # most tokens of one candidate, and the positions that the candidates share
    requests: int = 8  # most requests in a batch of prompts with candidates
    tokens: tuple[int, ...] = (512, 2048)  # compiled shapes: tokens that a batch with candidates computes
    context: tuple[int, ...] = (2048,)  # compiled shapes: tokens of a batch whose keys and values are cached
    candidates: int = 256  # most candidates in a batch, all its requests together

    def __post_init__(self) -> None:
        check(self, item_span=1, requests=1, candidates=1)
        sizes("rank.tokens", self.tokens)
        sizes("rank.context", self.context)
