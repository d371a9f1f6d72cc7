# SPDX-License-Identifier: Apache-2.0
"""Builds a library: prototypes of a corpus of reviews, and their keys and values, each from its own review (RCLLM-4).

The paper does not say in which context these are computed. Here it is the prompt's text before the history, then the
review up to the prototype, as if it were the first one of the history. Keys are kept as at position 0, so that one
rotation brings them to any place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.fields import UserError
from jgr.library.clusters import cluster, coverage
from jgr.library.corpus import Corpus
from jgr.library.embeddings import TokenEmbeddings, keys_of
from jgr.library.folder import (
    FORMAT,
    About,
    bits,
    create_kv,
    identity,
    write_about,
    write_records,
    writing_library,
)
from jgr.library.index import tuned
from jgr.library.prototypes import Prototypes, Settings
from jgr.models import decoder
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.rope import rope

Int32 = npt.NDArray[np.int32]
Show = Callable[[int, int, str], None]

REUSED_FROM = 0.9
"""The cosine from which a search must find what brute force finds: the least at which a prototype is reused."""
_ROWS = 4
"""Reviews that are computed at once."""
_SMALLEST = 32
"""The shortest row; longer ones are twice, four times and so on as long."""


class Report(dict[str, Any]):
    """What a build found, as JSON has it."""


def pool_sizes(prototypes: int) -> list[int]:
    """The sizes of the pool that coverage is told for: all of it, the half, the quarter and so on."""
    return sorted({max(1, prototypes >> halvings) for halvings in range(8)}) if prototypes else []


def build(
    out: Path,
    params: DecoderParams,
    cfg: DecoderConfig,
    revision: str,
    prefix: Int32,
    corpus: Corpus,
    show: Show,
    *,
    most: int,
    cosine: float = 0.95,
    model: str = "",
    texts: str = "",
) -> Report:
    """Write a library. prefix: [t], the prompt's tokens before the history. most: of prototypes. cosine: the least
    within a cluster. model, texts: names, for people. Raises UserError as `writing_library`, and where nothing is
    there to make prototypes of.
    """
    dtype = np.dtype(params.embed.dtype).name
    embeddings = TokenEmbeddings(np.asarray(params.embed), cfg.rope_theta)
    found = cluster(corpus.reviews, embeddings, cosine, most)
    if not len(found.keys):
        raise UserError(f"{texts or 'the texts'}: there is no token to make a prototype of")
    covers = coverage(found, embeddings, corpus.held_out, pool_sizes(len(found.keys)))
    search, share = search_for(found, embeddings, corpus.held_out)
    with writing_library(out) as folder:
        write_records(folder, found)
        kv = create_kv(folder, (len(found.keys), cfg.layers, 2, cfg.kv_heads, cfg.head_dim), dtype)
        done = 0
        show(0, len(found.keys), "")
        for numbers, values in keys_values(params, cfg, prefix, corpus.reviews, found):
            kv[numbers] = values.view(bits(dtype))
            done += len(numbers)
            show(done, len(found.keys), "")
        kv.flush()  # type: ignore[attr-defined]
        of = identity(revision, dtype, (cfg.layers, cfg.kv_heads, cfg.head_dim), prefix)
        shares = [{name: float(value) for name, value in cover._asdict().items()} for cover in covers]
        write_about(folder, About(FORMAT, of, dtype, len(found.keys), search, share, shares, model, texts))
    return Report(
        prototypes=len(found.keys),
        tokens=sum(map(len, corpus.reviews)),
        held_out_tokens=sum(map(len, corpus.held_out)),
        megabytes=round(kv.nbytes / 2**20, 3),
        recall=share,
        tables=search.tables,
        bits=search.bits,
        flips=search.flips,
        coverage=[cover._asdict() for cover in covers],
    )


def search_for(
    found: Prototypes, embeddings: TokenEmbeddings, held_out: Sequence[Int32], most: int = 8192
) -> tuple[Settings, float]:
    """The settings of the search for these prototypes, and their recall on held-out tokens: at most so many keys."""
    keys = np.concatenate([keys_of(review) for review in held_out]) if len(held_out) else found.keys
    unique, counts = np.unique(keys, return_counts=True)
    kept = np.argsort(-counts, kind="stable")[:most]
    return tuned(embeddings.of(found.keys), embeddings.of(unique[kept]), REUSED_FROM, counts[kept])


def keys_values(
    params: DecoderParams, cfg: DecoderConfig, prefix: Int32, reviews: Sequence[Int32], found: Prototypes
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
    """Numbers [m] of prototypes, and their keys before rope and values [m, L, 2, K, d], some at a time."""
    starts = np.flatnonzero(np.diff(found.reviews, prepend=-1))
    groups = np.split(np.arange(len(found.reviews)), starts[1:])
    longest = [len(prefix) + int(found.places[group[-1]]) + 1 for group in groups]  # what follows is not seen
    order = np.argsort(longest, kind="stable").tolist()
    for at in range(0, len(order), _ROWS):
        some = order[at : at + _ROWS]
        width = _SMALLEST
        while width < max(longest[each] for each in some):
            width *= 2
        tokens, lengths = np.zeros((_ROWS, width), np.int32), np.ones(_ROWS, np.int32)
        for row, each in enumerate(some):
            whole = np.concatenate([prefix, reviews[int(found.reviews[groups[each][0]])]])
            lengths[row] = longest[each]
            tokens[row, : longest[each]] = whole[: longest[each]]
        kv = np.asarray(_row_kv(params, cfg, tokens, lengths))
        rows = np.concatenate([np.full(len(groups[each]), row) for row, each in enumerate(some)])
        numbers = np.concatenate([groups[each] for each in some])
        yield numbers, np.ascontiguousarray(kv[rows, len(prefix) + found.places[numbers]])


@functools.partial(jax.jit, static_argnames="cfg")
def _row_kv(params: DecoderParams, cfg: DecoderConfig, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """[B, T, L, 2, K, d] of prompts [B, T]: keys as at position 0, and values."""
    k, v = decoder.prefill(params, cfg, tokens, lengths).context
    back = decoder.rotations(cfg, -jnp.arange(tokens.shape[1]))
    k = rope(k.swapaxes(2, 3), *back)
    return jnp.stack([k, v.swapaxes(2, 3)], 3).transpose(1, 2, 0, 3, 4, 5)  # [L, B, T, 2, K, d] before
