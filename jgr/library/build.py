# SPDX-License-Identifier: Apache-2.0
"""Builds a library: prototypes of a corpus of reviews, and their keys and values, each from its own review (RCLLM-4).

The paper does not say in which context these are computed. Here it is the prompt's text before the history, then the
review up to the prototype, as if it were the first one of the history. Keys are kept as at position 0, so that one
rotation brings them to any place.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.fields import UserError
from jgr.library.building import Unfinished, building
from jgr.library.clusters import cluster, coverage
from jgr.library.corpus import Corpus
from jgr.library.embeddings import TokenEmbeddings, keys_of
from jgr.library.folder import (
    FORMAT,
    About,
    bits,
    identity,
    read_about,
    read_records,
    write_about,
    write_records,
    write_sums,
)
from jgr.library.index import tuned
from jgr.library.prototypes import Prototypes, Settings
from jgr.models import decoder
from jgr.models.decoder import DecoderConfig, DecoderParams
from jgr.models.rope import rope

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Show = Callable[[int, int, str], None]

REUSED_FROM = 0.9
"""The cosine from which a search must find what brute force finds: the least at which a prototype is reused."""
_ROWS = 4
"""Reviews that are computed at once."""
_KEPT = 16
"""Batches after which those so far are put on the disk."""
_SMALLEST = 32
"""The shortest row; longer ones are twice, four times and so on as long."""


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
) -> dict[str, Any]:
    """Write a library, or go on with one that was ended. prefix: [t], the prompt's tokens before the history. most: of
    prototypes. cosine: the least within a cluster. model, texts: names, for people. Returns what it found, as JSON
    has it. Raises UserError as `building`, and where nothing is there to make prototypes of.
    """
    if not any(map(len, corpus.reviews)):
        raise UserError(f"{texts or 'the texts'}: there is no token to make a prototype of")
    dtype = np.dtype(params.embed.dtype).name
    of = identity(revision, dtype, (cfg.layers, cfg.kv_heads, cfg.head_dim), prefix)
    settings = {"format": FORMAT, "of": of, "cosine": cosine, "most": most, "model": model, "texts": texts}
    with building(out, _hash(settings, corpus)) as unfinished:
        if not unfinished.is_clustered:
            embeddings = TokenEmbeddings(np.asarray(params.embed), cfg.rope_theta)
            found = cluster(corpus.reviews, embeddings, cosine, most)
            covers = coverage(found, embeddings, corpus.held_out, pool_sizes(len(found.keys)))
            search, share = search_for(found, embeddings, corpus.held_out)
            shares = [{name: float(value) for name, value in cover._asdict().items()} for cover in covers]
            write_records(unfinished.path, found)
            about = About(FORMAT, of, dtype, len(found.keys), search, share, shares, model, texts)
            write_about(unfinished.path, about)
        about, found = read_about(unfinished.path), read_records(unfinished.path)
        new, nbytes = _fill(unfinished, params, cfg, prefix, corpus.reviews, found, show)
        write_sums(unfinished.path)
    return {
        "prototypes": about.prototypes,
        "new": new,
        "tokens": sum(map(len, corpus.reviews)),
        "held_out_tokens": sum(map(len, corpus.held_out)),
        "megabytes": round(nbytes / 2**20, 3),
        "recall": about.recall,
        "tables": about.search.tables,
        "bits": about.search.bits,
        "flips": about.search.flips,
        "coverage": about.coverage,
    }


def _fill(
    unfinished: Unfinished,
    params: DecoderParams,
    cfg: DecoderConfig,
    prefix: Int32,
    reviews: Sequence[Int32],
    found: Prototypes,
    show: Show,
) -> tuple[int, int]:
    """Write the keys and values that are not there yet; of how many prototypes, and the bytes of all."""
    dtype = np.dtype(params.embed.dtype).name
    kv = unfinished.kv((len(found.keys), cfg.layers, 2, cfg.kv_heads, cfg.head_dim), dtype)
    batches, begun, total = list(_batches(len(prefix), found)), unfinished.done, len(found.keys)
    there = done = sum(len(numbers) for batch in batches[:begun] for numbers in batch)
    show(done, total, "")
    for count, batch in enumerate(batches[begun:], start=begun + 1):
        numbers, values = _batch_kv(params, cfg, prefix, reviews, found, batch)
        kv[numbers] = values.view(bits(dtype))
        done += len(numbers)
        if count % _KEPT == 0 or count == len(batches):
            kv.flush()
            unfinished.set_done(count)
        show(done, total, "")
    return total - there, kv.nbytes


def _hash(settings: dict[str, Any], corpus: Corpus) -> str:
    """The digest of all that a library's bytes follow from."""
    found = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for reviews in corpus:
        lengths = np.array([len(reviews), *map(len, reviews)], np.int64)
        found.update(lengths.tobytes())
        for review in reviews:
            found.update(review.tobytes())
    return found.hexdigest()


def search_for(
    found: Prototypes, embeddings: TokenEmbeddings, held_out: Sequence[Int32], most: int = 8192
) -> tuple[Settings, float]:
    """The settings of the search for these prototypes, and their recall on held-out tokens of which none is a
    prototype, since those are found without a search: at most so many keys."""
    keys = np.concatenate([*map(keys_of, held_out), np.zeros(0, np.int64)])
    unique, counts = np.unique(keys[~np.isin(keys, found.keys)], return_counts=True)
    kept = np.argsort(-counts, kind="stable")[:most]
    return tuned(embeddings.of(found.keys), embeddings.of(unique[kept]), REUSED_FROM, counts[kept])


def _batches(lead: int, found: Prototypes) -> Iterator[list[Int64]]:
    """The numbers of prototypes that one run computes: for each of its reviews those that stand there, [m] each.
    lead: how many tokens stand before a review."""
    starts = np.flatnonzero(np.diff(found.reviews, prepend=-1))
    groups = np.split(np.arange(len(found.reviews)), starts[1:])
    longest = [_length(lead, found, group) for group in groups]
    order = np.argsort(longest, kind="stable").tolist()
    for at in range(0, len(order), _ROWS):
        yield [groups[each] for each in order[at : at + _ROWS]]


def _length(lead: int, found: Prototypes, group: Int64) -> int:
    """The tokens up to the last prototype: what follows is not seen."""
    return lead + int(found.places[group[-1]]) + 1


def _batch_kv(
    params: DecoderParams,
    cfg: DecoderConfig,
    prefix: Int32,
    reviews: Sequence[Int32],
    found: Prototypes,
    batch: Sequence[Int64],
) -> tuple[Int64, npt.NDArray[Any]]:
    longest = [_length(len(prefix), found, group) for group in batch]
    width = _SMALLEST
    while width < max(longest):
        width *= 2
    tokens, lengths = np.zeros((_ROWS, width), np.int32), np.ones(_ROWS, np.int32)
    for row, (group, length) in enumerate(zip(batch, longest, strict=True)):
        whole = np.concatenate([prefix, reviews[int(found.reviews[group[0]])]])
        lengths[row] = length
        tokens[row, :length] = whole[:length]
    kv = np.asarray(_row_kv(params, cfg, tokens, lengths))
    rows = np.concatenate([np.full(len(group), row) for row, group in enumerate(batch)])
    numbers = np.concatenate(batch)
    return numbers, np.ascontiguousarray(kv[rows, len(prefix) + found.places[numbers]])


@functools.partial(jax.jit, static_argnames="cfg")
def _row_kv(params: DecoderParams, cfg: DecoderConfig, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """[B, T, L, 2, K, d] of prompts [B, T]: keys as at position 0, and values."""
    k, v = decoder.prefill(params, cfg, tokens, lengths).context
    back = decoder.rotations(cfg, -jnp.arange(tokens.shape[1]))
    k = rope(k.swapaxes(2, 3), *back)
    return jnp.stack([k, v.swapaxes(2, 3)], 3).transpose(1, 2, 0, 3, 4, 5)  # [L, B, T, 2, K, d] before
