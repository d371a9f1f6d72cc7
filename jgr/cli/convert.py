# SPDX-License-Identifier: Apache-2.0
"""`jgr convert`: turns a published generator and its table of items into a folder that `jgr serve` takes.

It reads a Hugging Face folder (decoder weights and tokenizer.json), on this machine or on the hub, and the items'
semantic ids, resolves every token by its name through the tokenizer file, and writes weights, tokenizer, catalog, and
serving.json with the family's prompt.

For the family hstu it turns Meta's research checkpoint (see jgr/models/hstu_import.py for its form) and the catalog of
its items into a model that `jgr serve`, `jgr retrieve` and `jgr evaluate --baseline` take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from jgr import extras
from jgr.cli import console
from jgr.config import BeamConfig, Config, ModelConfig, ProfilesConfig, PromptConfig, UserError
from jgr.files import refuse_overwriting

if TYPE_CHECKING:
    from jgr.catalog.catalog import Catalog
    from jgr.models.decoder import DecoderConfig

HELP = "turn a MiniOneRec, LC-Rec, OpenOneRec or HSTU checkpoint into a model folder"
HSTU = "hstu"

_TASK = "Below is an instruction that describes a task"
_ASK = "The user has interacted with items {history} in chronological order. "
_PREDICT = "Can you predict the next possible item that the user may expect?"
PROMPTS = {
    "minionerec": PromptConfig(
        template=f"{_TASK}, paired with an input that provides further context. Write a response that appropriately "
        f"completes the request. \n\n### Instruction:\n{_PREDICT}\n\n### User Input: \n{_ASK}{_PREDICT}\n\n"
        "### Response:\n",
        separator=", ",
        max_items=10,
    ),
    "lcrec": PromptConfig(
        template=f"{_TASK}. Write a response that appropriately completes the request.\n\n### Instruction:\n"
        f"{_ASK}{_PREDICT}\n\n### Response:",
        separator=", ",
        max_items=20,
    ),
    "openonerec": PromptConfig(
        template="{history}<|sid_begin|>", item="<|sid_begin|>{sid}<|sid_end|>", max_items=100
    ),
}
BEAM_WIDTH = 50
TOKENS_STEP = 64  # the compiled prompt length is a multiple of it


@dataclass(frozen=True)
class Fitted:
    """The sizes that serving.json gets. tokens: the longest prompt's, rounded up to TOKENS_STEP."""

    tokens: int
    beam_width: int


def define_flags() -> None:
    flags.DEFINE_string(
        "checkpoint",
        None,
        "Hugging Face folder: config.json, *.safetensors, tokenizer.json, or its name on the hub, "
        "hf://org/name[@revision]; for hstu a .npz or .safetensors file; --checkpoint= may be left out",
    )
    flags.DEFINE_string(
        "items", None, "the items' ids: *.index.json[.gz], *.jsonl[.gz], or OpenOneRec's sid2pid *.json"
    )
    flags.DEFINE_enum("family", None, (*PROMPTS, HSTU), "the family, which fixes the prompt of the training")
    flags.DEFINE_integer("heads", 1, "attention heads of an hstu checkpoint", lower_bound=1)
    flags.DEFINE_enum(
        "tables",
        "none",
        ("none", "float32", "float16", "bfloat16"),
        "type of the rows of an hstu checkpoint's items in a table of their own, for embeddings.tables=paged",
    )
    flags.DEFINE_string("remote", "", "Redis server that gets the rows of --tables too, redis://host:port/db")
    flags.DEFINE_integer(
        "local_rows",
        None,
        "how many of the first rows the folder has; the others are --remote's alone",
        lower_bound=0,
    )
    flags.DEFINE_string("out", None, "folder to write")
    console.define_overwrite()


def main(argv: Sequence[str]) -> int:
    values = flags.FLAGS
    if argv and not values.checkpoint and console.names_folder(argv[0]):
        values["checkpoint"].value, argv = argv[0], argv[1:]
    console.refuse_arguments(argv)
    extras.require("train", "jgr convert")
    for name in ("checkpoint", "items", "family", "out"):
        if not getattr(values, name):
            raise UserError(f"--{name} is not set")
    console.refuse_unused(
        values.family == HSTU, ("heads", "tables", "remote", "local_rows"), f"--family={HSTU}"
    )
    out = Path(values.out)
    from jgr.models import hub

    if (out / "params").is_dir():
        refuse_overwriting(out, values.overwrite, "--out", "a model")
    if values.family == HSTU:
        held = (values.tables, values.local_rows, values.remote)
        return convert_hstu(Path(values.checkpoint), Path(values.items), out, values.heads, *held)
    source = hub.local(values.checkpoint, "--checkpoint")
    _refuse_what_is_not_whole(source)
    from jgr.catalog.catalog import save_catalog
    from jgr.models import checkpoint, hf, manifest
    from jgr.prompt.tokens import Tokenizer

    checkpoint.require_writable(out)
    catalog = _catalog(Path(values.items))
    cfg = hf.read_config(source / "config.json")
    tokenizer = Tokenizer.from_file(source / "tokenizer.json")
    fitted = _fit(PROMPTS[values.family], cfg, tokenizer, catalog)
    cfg, params = hf.load(source)

    def write_beside(folder: Path) -> None:
        tokenizer.save(folder / "tokenizer.json")
        save_catalog(catalog, folder / "catalog.jsonl")
        manifest.write(folder, _config(values.family, out.name, fitted), catalog)

    checkpoint.save(out, cfg, params, write_beside)
    ids = len(set(map(tuple, catalog.codes.tolist())))
    print(f"{cfg.family}: {cfg.layers} layers, hidden {cfg.hidden}, vocabulary {cfg.vocab_size}")
    print(
        f"{catalog.n_items} items behind {ids} semantic ids of {catalog.depth} levels; version {catalog.version}"
    )
    print(f"prompts of up to {fitted.tokens} tokens; serve it: jgr serve {out}")
    print(out)
    return 0


def convert_hstu(
    source: Path,
    items: Path,
    out: Path,
    heads: int,
    tables: str = "none",
    local_rows: int | None = None,
    remote: str = "",
) -> int:
    """Convert a checkpoint of HSTU, a scorer. tables: see train.tables; local_rows: how many of its rows the folder
    has; remote: the server that has all of them. Raises UserError if the checkpoint cannot be read."""
    if (remote or local_rows is not None) and tables == "none":
        raise UserError(
            "--remote and --local_rows are for rows of a table: name their type, --tables=float32"
        )
    if local_rows is not None and not remote:
        raise UserError(
            "--local_rows leaves rows out: name the server that has them, --remote=redis://host:port/db"
        )
    from jgr.catalog.catalog import save_catalog
    from jgr.models import checkpoint, hstu_import, manifest, retrievers

    checkpoint.require_writable(out)
    catalog = _catalog(items)
    digest = retrievers.items_digest(catalog.item_ids)
    cfg, params = hstu_import.research(hstu_import.read_state(source), catalog.item_ids, digest, heads=heads)

    def write_beside(folder: Path) -> None:
        save_catalog(catalog, folder / "catalog.jsonl")
        manifest.write(folder, Config(model=ModelConfig(name=out.name)), catalog)

    retrievers.save(out, cfg, params, write_beside, tables, local_rows)
    if remote:
        _upload(out, tables, params.embed, remote)
    print(f"HSTU: {cfg.layers} layers, hidden {cfg.hidden}, {cfg.n_items} items, bias of {cfg.bias}")
    print(out)
    return 0


def _upload(folder: Path, dtype: str, embed: object, remote: str) -> None:
    """Put all rows of a converted model into a server."""
    import msgspec
    import numpy as np

    from jgr.embeddings.redis_shard import upload
    from jgr.models.table_file import TableFile
    from jgr.models.tables import ITEMS, path_of

    header = TableFile(folder / path_of(ITEMS)).header
    rows = np.asarray(embed).astype(header.numpy_dtype)
    upload(remote, msgspec.structs.replace(header, first=0, held=header.rows), rows, timeout_s=30.0)
    print(f"{header.rows} rows of {header.row_bytes} bytes are in the server of --remote")


def _refuse_what_is_not_whole(source: Path) -> None:
    """Raise UserError for folders that look like a checkpoint but cannot be converted as they are."""
    if not source.is_dir():
        from jgr.models import hub

        raise UserError(f"--checkpoint: {source} is not a folder{hub.hint(source)}")
    if (source / "adapter_config.json").exists():
        raise UserError(
            f"--checkpoint: {source} holds a LoRA adapter; merge it into its base model first "
            "(peft: model.merge_and_unload(), then save_pretrained)"
        )
    if not (source / "tokenizer.json").exists():
        raise UserError(
            f"--checkpoint: {source} has no tokenizer.json; transformers writes one: "
            "AutoTokenizer.from_pretrained(folder, use_fast=True).save_pretrained(folder)"
        )


def _catalog(path: Path) -> Catalog:
    from jgr.catalog.catalog import load_catalog
    from jgr.data.sid2pid import load_sid2pid

    name = path.name.removesuffix(".gz")
    own = name.endswith((".jsonl", ".index.json")) or name == "index.json"
    return load_catalog(path) if own else load_sid2pid(path)


def _fit(prompt: PromptConfig, cfg: DecoderConfig, tokenizer: object, catalog: Catalog) -> Fitted:
    """Check that model, tokenizer, items and prompt fit together. Raises UserError, naming what does not."""
    from jgr.prompt.tokens import PromptBuilder, Tokenizer, level_tokens

    assert isinstance(tokenizer, Tokenizer)
    level_tokens(catalog, tokenizer, cfg.vocab_size)
    prompts = PromptBuilder(prompt, tokenizer, catalog)
    if prompts.largest_token >= cfg.vocab_size:
        raise UserError(
            f"token {prompts.largest_token} of the prompt is not in the vocabulary of {cfg.vocab_size}"
        )
    tokens = -(-prompts.max_tokens // TOKENS_STEP) * TOKENS_STEP
    if prompts.max_tokens + catalog.depth > cfg.max_position:
        raise UserError(
            f"a prompt of {prompt.max_items} items and an item need {prompts.max_tokens + catalog.depth} positions, "
            f"the model was made for {cfg.max_position}"
        )
    return Fitted(tokens, min(BEAM_WIDTH, catalog.n_items))


def _config(family: str, name: str, fitted: Fitted) -> Config:
    """What serves the model: the prompt is the one that the checkpoint was trained with, to the letter."""
    width = (fitted.beam_width,)
    return Config(
        model=ModelConfig(name=name),
        prompt=PROMPTS[family],
        beam=BeamConfig(width=fitted.beam_width),
        profiles=ProfilesConfig(batch=(1, 8), tokens=(fitted.tokens,), widths=width, candidates=(128,)),
    )
