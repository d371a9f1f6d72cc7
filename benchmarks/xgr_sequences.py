# SPDX-License-Identifier: Apache-2.0
"""xGR's baseline in jgr's engine: each beam is a sequence of its own (XGR-5, "beams as sequences").

A generator that differs from jgr's decoder in the attention of its decode steps alone: the executor, its programs (one
for each profile, with the prompt, all steps and the constraint in it), the batcher and the HTTP server are jgr's own.
There are two forms:

- copied: a fork copies the prompt's keys and values for each beam, once, and each sequence reads its own copy.
- paged: sequences share the prompt's pages, as paged attention has it: nothing is copied, and each sequence reads the
  prompt by itself.

In both a fork after that gathers the few tokens that were generated. Beams and scores are those of jgr.

    python -m benchmarks.xgr_sequences FOLDER FORM SETTING...

serves a model's folder by jgr ("staged") or by one of the forms on a free port, until stdin ends; see peers/lines.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp

from benchmarks.peers.lines import Message, serve
from jgr.config import Config, override
from jgr.models import decoder, generators, hf
from jgr.models.decoder import DecoderConfig, DecoderParams, State
from jgr.models.kv import ContextKV
from jgr.serving.decoders.loading import load_engine
from jgr.serving.decoders.paged_executor import DecoderExecutors
from jgr.serving.decoders.row_executor import RowExecutor
from jgr.serving.decoders.serve import ServedDecoder
from jgr.serving.engine.engine import Engine
from jgr.serving.http.listener import Listener
from jgr.serving.policies.jobs import Profile

Form = Literal["copied", "paged"]
MASKED = -1e30
MAX_COPIES_BYTES = 5 << 28
"""The most bytes of a batch's copies. Two batches are in flight, and a program needs as much again for its work."""


@dataclass(frozen=True)
class CopiedConfig(DecoderConfig):
    """A decoder whose beams are sequences with copies of the prompt."""


@dataclass(frozen=True)
class PagedConfig(DecoderConfig):
    """A decoder whose beams are sequences that share the prompt's pages."""


CONFIGS: dict[Form, type[DecoderConfig]] = {"copied": CopiedConfig, "paged": PagedConfig}


class Sequences:
    """See jgr.models.generators.Generator; all but `advance` is the decoder's."""

    spec = staticmethod(decoder.spec)
    begin = staticmethod(decoder.begin)
    next_logits = staticmethod(decoder.next_logits)
    misfit = staticmethod(decoder.misfit)

    def __init__(self, form: Form) -> None:
        self._form = form

    def advance(
        self, params: DecoderParams, cfg: DecoderConfig, tokens: jax.Array, state: State, ancestors: jax.Array
    ) -> tuple[jax.Array, State]:
        context, lengths, start, beams = state
        if self._form == "copied" and not beams.k:  # the fork, after the first token
            width = tokens.shape[1]
            context = ContextKV(*(jnp.repeat(x, width, axis=1) for x in context))
        attention = of_copies if self._form == "copied" else of_pages
        hidden, beams = decoder.decode(
            params, cfg, tokens, context, lengths, beams, ancestors, start=start, attention=attention
        )
        return hidden, State(context, lengths, start, beams)


def of_copies(
    q: jax.Array,
    prompt_k: jax.Array,
    prompt_v: jax.Array,
    lengths: jax.Array,
    own_k: jax.Array,
    own_v: jax.Array,
    ancestors: jax.Array,
) -> jax.Array:
    """Attention [B, W, H, d] of B * W sequences. prompt_k, prompt_v: [B * W, K, T, d]; others as of beam_attention."""
    batch, width, heads, dim = q.shape
    rows = (batch * width, prompt_k.shape[1])
    own_k, own_v = (
        x.transpose(0, 2, 3, 1, 4).reshape(*rows, -1, dim) for x in _forked(own_k, own_v, ancestors)
    )
    out = _attend(q.reshape(*rows, -1, dim), prompt_k, prompt_v, jnp.repeat(lengths, width), own_k, own_v)
    return out.reshape(batch, width, heads, dim).astype(q.dtype)


def of_pages(
    q: jax.Array,
    prompt_k: jax.Array,
    prompt_v: jax.Array,
    lengths: jax.Array,
    own_k: jax.Array,
    own_v: jax.Array,
    ancestors: jax.Array,
) -> jax.Array:
    """Attention [B, W, H, d], a sequence of each request after the other. prompt_k, prompt_v: [B, K, T, d]."""
    batch, width, heads, dim = q.shape
    kv_heads = prompt_k.shape[1]

    def one(x: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return _attend(x[0], prompt_k, prompt_v, lengths, x[1], x[2])

    own = (x.transpose(2, 0, 3, 1, 4) for x in _forked(own_k, own_v, ancestors))
    queries = q.reshape(batch, width, kv_heads, -1, dim).swapaxes(0, 1)
    out: jax.Array = jax.lax.map(one, (queries, *own))
    return out.swapaxes(0, 1).reshape(batch, width, heads, dim).astype(q.dtype)


def _forked(own_k: jax.Array, own_v: jax.Array, ancestors: jax.Array) -> list[jax.Array]:
    """The generated tokens' rows of each sequence, [B, S, W, K, d] each."""
    return [jnp.take_along_axis(x, ancestors[..., None, None], axis=2) for x in (own_k, own_v)]


def _attend(
    q: jax.Array,
    prompt_k: jax.Array,
    prompt_v: jax.Array,
    lengths: jax.Array,
    own_k: jax.Array,
    own_v: jax.Array,
) -> jax.Array:
    """Attention [N, K, G, d] float32 of N sequences. q: [N, K, G, d]; prompts: [N, K, T, d]; own: [N, K, S, d]."""
    tokens = prompt_k.shape[2]
    q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)

    def dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32)

    to_prompt = dot("nkgd,nktd->nkgt", q, prompt_k)
    real = jnp.arange(tokens) < lengths[:, None]
    to_prompt = jnp.where(real[:, None, None], to_prompt, MASKED)
    scores = jnp.concatenate([to_prompt, dot("nkgd,nksd->nkgs", q, own_k)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(prompt_v.dtype)
    out = dot("nkgt,nktd->nkgd", weights[..., :tokens], prompt_v)
    return out + dot("nkgs,nksd->nkgd", weights[..., tokens:], own_v)


def as_sequences(cfg: DecoderConfig, form: Form) -> DecoderConfig:
    """The same model for this form; jgr.models.generators finds the form by its type."""
    generators._GENERATORS[CONFIGS[form]] = Sequences(form)
    return CONFIGS[form](**{field.name: getattr(cfg, field.name) for field in fields(DecoderConfig)})


def copies_fit(cfg: DecoderConfig, profile: Profile) -> bool:
    """Whether the copies of a full batch, in float32, are given memory. One request alone always is."""
    numbers = 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * profile.tokens
    return profile.batch == 1 or 4 * numbers * profile.batch * profile.width <= MAX_COPIES_BYTES


def executor(
    plain: RowExecutor, params: DecoderParams, form: Form, profiles: Sequence[Profile], listed: int
) -> RowExecutor:
    """A form's executor of the profiles over what `plain` searches. listed: see DeviceFilters."""
    cfg, tables, normalize = plain.model
    assert isinstance(cfg, DecoderConfig)
    return RowExecutor(as_sequences(cfg, form), params, tables, tuple(profiles), normalize, listed=listed)


def as_baseline(engine: Engine[ServedDecoder], form: Form) -> Engine[ServedDecoder]:
    """The same engine with executors whose beams are sequences, not yet started; it has no profiles to rank, nor those
    whose copies do not fit."""
    served, config = engine.served, engine.served.config
    given = served.executors
    assert isinstance(given, DecoderExecutors) and given.paged is None
    cfg, params = hf.load(Path(config.model.path))
    profiles = [
        profile
        for profile in given.plain.profiles
        if profile.kind == "recommend" and (form == "paged" or copies_fit(cfg, profile))
    ]
    listed = config.server.max_history + config.server.max_filter_items
    plain = executor(given.plain, params, form, profiles, listed)
    executors = DecoderExecutors(plain, None, lanes=given.lanes, in_flight=given.in_flight)
    return Engine(replace(served, executors=executors), config.server.default_deadline_ms)


class Server:
    """A server on a free port, ready once it is made."""

    def __init__(self, folder: str, form: str, settings: list[str]) -> None:
        config = override(
            Config(), f"model.path={folder}", "model.compilation_cache=", "server.port=0", *settings
        )
        engine = load_engine(config)
        if form != "staged":
            assert form in CONFIGS
            engine = as_baseline(engine, form)
        ready = threading.Event()
        listener = Listener(engine, config, on_ready=lambda url: ready.set())
        threading.Thread(target=self._serve, args=(listener, ready), daemon=True).start()
        ready.wait()
        if listener.exit_code:
            raise SystemExit("the warm-up failed")
        self._port = urlsplit(listener.url).port

    def _serve(self, listener: Listener, ready: threading.Event) -> None:
        listener.serve_until_stopped()
        ready.set()  # where it failed

    def answer(self, request: Message) -> Message:
        return {"port": self._port}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    _, _, form, *settings = sys.argv
    serve(lambda folder: Server(folder, form, settings).answer, ("jax", "jaxlib"))
