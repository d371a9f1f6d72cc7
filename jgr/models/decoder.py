# SPDX-License-Identifier: Apache-2.0
"""Dense decoders: Qwen2, Qwen3 and Llama-3 (MODEL-1, MODEL-2) as pure functions.

    h = embed[tokens]
    per layer:  h += o(attention(rope(q), rope(k), v));  h += down(silu(gate) * up)      (each on an rmsnorm of h)
    logits = rmsnorm(h) head^T

`prefill` runs whole prompts and returns the ContextKV that all beams share; `decode` runs one token a beam against it
and the short BeamKV. The layers are a stack, or apart (jgr.models.params.over_layers). The last layer of a prompt is
computed for the tokens whose hidden states somebody reads; the others give it keys and values only. Weights are stored
[in, out]. What the beam search asks of a generator (jgr.models.generators) stands at the end.

Letters: B batch, T tokens, W beams, S decode steps so far, L layers, D hidden, H heads, K key/value heads,
d head size, F mlp, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.config import PromptConfig
from jgr.models import joined_layers
from jgr.models.joined_layers import JoinedLayer
from jgr.models.kv import BeamKV, CachedKV, ContextKV
from jgr.models.native_layers import native_weights
from jgr.models.params import Spec, over_layers
from jgr.models.rope import RopeScaling, rope, rope_frequencies
from jgr.models.words import as_bits, from_bits
from jgr.ops import split
from jgr.ops.beam_attention import beam_attention
from jgr.ops.decoder_layer import attention_inputs, layer_output
from jgr.ops.dense import dense
from jgr.ops.dispatch import target_platform
from jgr.ops.rms_norm import rms_norm
from jgr.ops.segment_attention import Causal, Context, segment_attention
from jgr.ops.segment_attention.visibility import spell_out
from jgr.ops.token_logits import token_logits
from jgr.prompt.layouts import CAUSAL, Layout, Tokens

ONE_BY_ONE_PROMPTS, ONE_BY_ONE_TOKENS = 4, 512
"""From so many prompts of so many tokens on, a CPU reads prompts in float32 one after the other: the activations of one
stay in the caches, those of a batch do not, and one such prompt keeps every core busy by itself. Those in bfloat16 are
half as large and read in half the time, of which what a call costs by itself is a tenth."""

Family = Literal["qwen2", "qwen3", "llama"]


@dataclass(frozen=True)
class DecoderConfig:
    """Architecture only. Qwen2 has biases on q, k, v; Qwen3 a norm on each head of q and k; Llama neither."""

    family: Family
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rope_theta: float
    norm_eps: float
    tied: bool
    max_position: int
    rope_scaling: RopeScaling | None = None

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerParams:
    """The weights of all layers, with leading axis L on every leaf. Those that a family lacks are None."""

    attention_norm: Any  # [L, D]: scale of the norm before attention
    wq: Any  # [L, D, H * d]: projection to queries
    wk: Any  # [L, D, K * d]: to keys
    wv: Any  # [L, D, K * d]: to values
    wo: Any  # [L, H * d, D]: output projection of attention
    mlp_norm: Any  # [L, D]: scale of the norm before the MLP
    gate: Any  # [L, D, F]: the MLP's gate, which passes through silu
    up: Any  # [L, D, F]: multiplied by the gate
    down: Any  # [L, F, D]: output of the MLP
    bq: Any = None  # [L, H * d]: bias of queries; None where the family has none
    bk: Any = None  # [L, K * d]: bias of keys
    bv: Any = None  # [L, K * d]: bias of values
    q_norm: Any = None  # [L, d]: scale of the norm of each query head; None: no such norm
    k_norm: Any = None  # [L, d]: the same for key heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecoderParams:
    embed: Any  # [V, D]: a row for each token
    layers: Any  # LayerParams; or for each layer one without the layer axis, or a JoinedLayer
    norm: Any  # [D]: scale of the last norm
    head: Any = None  # [V, D]: output rows; None where they are those of embed

    @property
    def output_rows(self) -> jax.Array:
        """The output matrix, [V, D]."""
        rows: jax.Array = self.embed if self.head is None else self.head
        return rows


def spec(cfg: DecoderConfig) -> DecoderParams:
    """The declaration of every parameter."""
    n, hidden, mlp = cfg.layers, cfg.hidden, cfg.mlp
    q, kv = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim

    def matrix(rows: int, columns: int, axes: tuple[str, str]) -> Spec:
        return Spec((n, rows, columns), ("layer", *axes), fan_in=rows)

    def vector(size: int, axis: str, init: Literal["ones", "zeros"]) -> Spec:
        return Spec((n, size), ("layer", axis), init)

    layers = LayerParams(
        attention_norm=vector(hidden, "embed", "ones"),
        wq=matrix(hidden, q, ("embed", "heads")),
        wk=matrix(hidden, kv, ("embed", "kv_heads")),
        wv=matrix(hidden, kv, ("embed", "kv_heads")),
        wo=matrix(q, hidden, ("heads", "embed")),
        mlp_norm=vector(hidden, "embed", "ones"),
        gate=matrix(hidden, mlp, ("embed", "mlp")),
        up=matrix(hidden, mlp, ("embed", "mlp")),
        down=matrix(mlp, hidden, ("mlp", "embed")),
        bq=vector(q, "heads", "zeros") if cfg.qkv_bias else None,
        bk=vector(kv, "kv_heads", "zeros") if cfg.qkv_bias else None,
        bv=vector(kv, "kv_heads", "zeros") if cfg.qkv_bias else None,
        q_norm=vector(cfg.head_dim, "head_dim", "ones") if cfg.qk_norm else None,
        k_norm=vector(cfg.head_dim, "head_dim", "ones") if cfg.qk_norm else None,
    )
    vocabulary = Spec((cfg.vocab_size, hidden), ("vocab", "embed"))
    head = None if cfg.tied else vocabulary
    return DecoderParams(vocabulary, layers, Spec((hidden,), ("embed",), "ones"), head)


Turn = tuple[jax.Array, jax.Array]


def rotations(cfg: DecoderConfig, positions: jax.Array) -> Turn:
    """The cosines and sines [..., 1, d / 2] float32 that `rope` turns by at positions [...]."""
    frequencies = rope_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _queries(
    cfg: DecoderConfig, layer: LayerParams, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> jax.Array:
    """Normed x [..., D] -> [..., H, d], rotated."""
    q = dense(x, layer.wq) + layer.bq if cfg.qkv_bias else dense(x, layer.wq)
    q = q.reshape(*q.shape[:-1], -1, cfg.head_dim)
    return rope(rms_norm(q, layer.q_norm, cfg.norm_eps) if cfg.qk_norm else q, cos, sin)


def _keys_values(
    cfg: DecoderConfig, layer: LayerParams, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Normed x [..., D] -> k and v [..., K, d], k rotated."""
    k, v = dense(x, layer.wk), dense(x, layer.wv)
    if cfg.qkv_bias:
        k, v = k + layer.bk, v + layer.bv
    k, v = (y.reshape(*y.shape[:-1], -1, cfg.head_dim) for y in (k, v))
    return rope(rms_norm(k, layer.k_norm, cfg.norm_eps) if cfg.qk_norm else k, cos, sin), v


def heads_of(
    cfg: DecoderConfig, layer: LayerParams | JoinedLayer, h: jax.Array, turn: Turn
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The queries [..., T, H, d], keys and values [..., T, K, d] of one layer, whose leaves have no layer axis, for its
    input h [..., T, D]."""
    if isinstance(layer, JoinedLayer):
        return joined_layers.heads_of(
            layer, h, turn, kv_heads=cfg.kv_heads, head=cfg.head_dim, eps=cfg.norm_eps
        )
    x = rms_norm(h, layer.attention_norm, cfg.norm_eps)
    return _queries(cfg, layer, x, *turn), *_keys_values(cfg, layer, x, *turn)


def values(cfg: DecoderConfig, layer: LayerParams | JoinedLayer, h: jax.Array) -> jax.Array:
    """The values [..., K * d] of one layer, whose leaves have no layer axis, for its input h [..., D]."""
    x = rms_norm(h, layer.attention_norm, cfg.norm_eps)
    if isinstance(layer, JoinedLayer):
        return joined_layers.values_of(layer, x, cfg.kv_heads * cfg.head_dim)
    return dense(x, layer.wv) + layer.bv if cfg.qkv_bias else dense(x, layer.wv)


def _mlp(cfg: DecoderConfig, layer: LayerParams, h: jax.Array) -> jax.Array:
    x = rms_norm(h, layer.mlp_norm, cfg.norm_eps)
    return dense(jax.nn.silu(dense(x, layer.gate)) * dense(x, layer.up), layer.down)


class Prefill(NamedTuple):
    """The result of a prefill.

    hidden: [B, T, D], or [B, P, D] where only some places are read, after the final norm. context: the ContextKV of all
    tokens. layers: every layer's output [L, B, T, D], or None.
    """

    hidden: jax.Array
    context: ContextKV
    layers: jax.Array | None


Dropout = Callable[[jax.Array, jax.Array], jax.Array]

Attention = Callable[[jax.Array, jax.Array, jax.Array, Tokens | Causal, Layout | jax.Array], jax.Array]
"""An attention (q, k, v, tokens, layout) -> [B, T, H, d] with the arguments of segment_attention."""


def prefill(
    params: DecoderParams,
    cfg: DecoderConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    *,
    positions: jax.Array | None = None,
    segments: Tokens | None = None,
    layout: Layout | jax.Array = CAUSAL,
    before: CachedKV | None = None,
    seen_by: jax.Array | None = None,
    hidden: jax.Array | None = None,
    layers: slice = slice(None),
    keep_layers: bool = False,
    read: jax.Array | None = None,
    dropout: Dropout | None = None,
    key: jax.Array | None = None,
    attention: str | Attention = "auto",
) -> Prefill:
    """Run a batch of prompts.

    Args:
        tokens: [B, T] int32; row b holds lengths[b] tokens, then padding of any valid token id.
        positions: [B, T] int32 for rope, default the segments' or 0..T-1. Plain prompts are causal by index.
        segments: what each token is part of, [B, T] each, and layout: which segments it sees; default plain causal
            prompts. Prompts made of segments have no gradients, except with attention="reference" or another form
            that has them.
        before: cached tokens of the same requests, which the new ones see as the layout says.
        seen_by: [B, T] int32, for each token a request that sees it besides its own; below 0 for none.
            Needs segments.
        layers: the layers to run, without gradients; default all. The result has these layers only.
        hidden: [B, T, D], the input of the first of them; default the tokens' embeddings.
        keep_layers: also return every layer's output (before the final norm), of all tokens.
        read: [B, P] int32, the places whose hidden states are returned; default all. Where they are fewer than the
            tokens, the last layer computes its queries, its mlp and all that follows for these places only. This
            excludes gradients, keep_layers and an attention of the caller's own.
        dropout: (x, key) -> x on the embedding and on each block's output, for training; needs key.
        attention: an implementation of segment_attention, or another form of it, for prompts without cached tokens.
    """
    if positions is None and segments is not None:
        positions = segments.position
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    cos, sin = rotations(cfg, positions)
    described = Causal(lengths) if segments is None else segments
    seen = None
    if segments is not None and seen_by is not None:
        twice = zip(segments, segments._replace(request=seen_by), strict=True)
        seen = Tokens(*(jnp.concatenate(pair, 1) for pair in twice))
    keys = None if key is None else jax.random.split(key, (cfg.layers + 1, 2))
    is_everything = read is None or read.shape[1] >= tokens.shape[1]
    native = narrow = real = None
    if dropout is None and attention == "auto":
        native = native_weights(params.layers, tokens, cfg.head_dim)
    if native is not None:
        real = _real(described, seen_by, tokens.shape[1])
        narrow = None if read is None else native_weights(params.layers, read, cfg.head_dim)

    def drop(x: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        return x if dropout is None or dropout_key is None else dropout(x, dropout_key)

    def layer_step(h: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
        return narrowed(h, xs, whole, described, seen)

    def last_step(h: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
        spelt = spell_out(described, tokens.shape[1], 0)
        return narrowed(h, xs, of_read, jax.tree.map(of_read, spelt), spelt if seen is None else seen)

    def whole(x: Any) -> Any:
        return x

    def of_read(x: Any) -> Any:
        """[B, T, ...] -> [B, P, ...]; a Layout stays as it is."""
        return x if isinstance(x, Layout) else jax.vmap(lambda row, at: row[at])(x, read)

    def narrowed(
        h: jax.Array, xs: Any, asked: Callable[[Any], Any], queries: Tokens | Causal, of_keys: Tokens | None
    ) -> tuple[jax.Array, Any]:
        """A layer whose queries are those tokens of h that `asked` keeps. xs: the layer, its keys, its number."""
        layer, layer_keys, number = xs
        fused = native if asked is whole else narrow
        is_plain = fused is None and not isinstance(layer, JoinedLayer)
        context = None if before is None else Context(*before.of_layer(number), before.tokens)
        attention_key, mlp_key = (None, None) if layer_keys is None else (layer_keys[0], layer_keys[1])
        with jax.named_scope("attention"):
            h, (q, k, v) = asked(h), inputs(h, layer, number, asked)
            all_k, all_v = (x if seen is None else jnp.concatenate([x, x], 2) for x in (k, v))
            if isinstance(attention, str):
                given: Any = q, all_k, all_v, queries, asked(layout)
                out = segment_attention(*given, keys=of_keys, context=context, implementation=attention)
            else:
                out = attention(q, k, v, queries, layout)
            out = out.reshape(*h.shape[:-1], -1)
            if is_plain:
                h = h + drop(dense(out, layer.wo), attention_key)
        with jax.named_scope("mlp"):
            if is_plain:
                h = h + drop(_mlp(cfg, layer, h), mlp_key)
            elif fused is not None:
                is_real = real if asked is whole else None
                h = layer_output(h, out, fused[1], number, eps=cfg.norm_eps, real=is_real)
            else:
                h = joined_layers.output(layer, h, out, cfg.norm_eps)
        left = k, v, h if keep_layers else None
        return h, left if native is None else jax.tree.map(as_bits, left)

    def inputs(
        h: jax.Array, layer: LayerParams | JoinedLayer, number: jax.Array, asked: Callable[[Any], Any]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The queries of those tokens of h that `asked` keeps, [B, P, H, d]; keys and values of all, [B, K, T, d]."""
        if native is not None:
            given = h, native[0], number, cos, sin
            sizes: Any = {"eps": cfg.norm_eps, "head": cfg.head_dim}
            q, k, v = attention_inputs(*given, **sizes, queries=asked is whole, real=real)
            if q is None and narrow is not None:
                q = attention_inputs(asked(h), narrow[0], number, asked(cos), asked(sin), **sizes)[0]
            if q is not None:
                return q, k, v
        if isinstance(layer, JoinedLayer):
            q, k, v = heads_of(cfg, layer, h, (cos, sin))
            # An attention that wants them token by token turns them back, and nothing is moved.
            return asked(q), k.swapaxes(1, 2), v.swapaxes(1, 2)
        x = rms_norm(h, layer.attention_norm, cfg.norm_eps)
        if native is None:
            k, v = (y.transpose(0, 2, 1, 3) for y in _keys_values(cfg, layer, x, cos, sin))
        return _queries(cfg, layer, asked(x), asked(cos), asked(sin)), k, v

    with jax.named_scope("prefill"):
        h = split.rows(params.embed, tokens) if hidden is None else hidden
        h = drop(h, None if keys is None else keys[-1, 0])
        h, (k, v, kept) = over_layers(
            layer_step,
            h,
            params.layers,
            None if keys is None else keys[:-1],
            jnp.arange(cfg.layers),
            which=layers,
            last=None if is_everything else last_step,
        )
        k, v, kept = jax.tree.map(lambda x: from_bits(x, h.dtype), (k, v, kept))
        h = of_read(h) if is_everything and read is not None else h
        return Prefill(rms_norm(h, params.norm, cfg.norm_eps), ContextKV(k, v), kept)


def _real(described: Tokens | Causal, seen_by: jax.Array | None, count: int) -> jax.Array:
    """Which of the `count` tokens of each row are no padding, [B, T]."""
    real: jax.Array = spell_out(described, count, 0).request >= 0
    return real if seen_by is None else real | (seen_by >= 0)


def decode(
    params: DecoderParams,
    cfg: DecoderConfig,
    tokens: jax.Array,
    context: ContextKV,
    lengths: jax.Array,
    beams: BeamKV,
    ancestors: jax.Array,
    *,
    start: jax.Array | None = None,
    attention: str | Callable[..., jax.Array] = "auto",
) -> tuple[jax.Array, BeamKV]:
    """One token for every beam.

    Args:
        tokens: [B, W] int32, the s-th generated token of each beam; its position is start + s for every beam.
        lengths: [B] int32, prompt lengths.
        start: [B] int32, the position that follows the prompt; default lengths.
        beams: the BeamKV of s steps.
        ancestors: [B, s + 1, W] int32, which row of each slot a beam descends from; the last one is the beam itself.
        attention: an implementation of beam_attention, or another form of it with its arguments.

    Returns:
        hidden [B, W, D] after the final norm, and the BeamKV of s + 1 steps.
    """
    start = lengths if start is None else start
    positions = jnp.broadcast_to((start + len(beams.k))[:, None], tokens.shape)
    turn = rotations(cfg, positions)
    native = native_weights(params.layers, tokens, cfg.head_dim)

    def layer_step(
        h: jax.Array, xs: tuple[LayerParams | JoinedLayer, ContextKV, BeamKV, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        layer, shared, own, number = xs
        with jax.named_scope("attention"):
            if native is None:
                q, k, v = heads_of(cfg, layer, h, turn)
            else:
                given = h, native[0], number, *turn
                asked, k, v = attention_inputs(*given, eps=cfg.norm_eps, head=cfg.head_dim)
                assert asked is not None
                q, k, v = asked, k.swapaxes(1, 2), v.swapaxes(1, 2)
            own_k, own_v = own.of_layer(k, v)
            call = q, shared.k, shared.v, lengths, own_k, own_v, ancestors
            if isinstance(attention, str):
                out = beam_attention(*call, implementation=attention)
            else:
                out = attention(*call)
            out = out.reshape(*h.shape[:-1], -1)
            if native is None and not isinstance(layer, JoinedLayer):
                h = h + dense(out, layer.wo)
        with jax.named_scope("mlp"):
            if native is not None:
                return layer_output(h, out, native[1], number, eps=cfg.norm_eps), (as_bits(k), as_bits(v))
            if isinstance(layer, JoinedLayer):
                return joined_layers.output(layer, h, out, cfg.norm_eps), (k, v)
            return h + _mlp(cfg, layer, h), (k, v)

    with jax.named_scope("decode"):
        given_layers = params.layers, context, beams, jnp.arange(cfg.layers)
        h, new = over_layers(layer_step, split.rows(params.embed, tokens), *given_layers)
        return rms_norm(h, params.norm, cfg.norm_eps), beams.plus(*(from_bits(x, h.dtype) for x in new))


def logits(params: DecoderParams, hidden: jax.Array) -> jax.Array:
    """[..., D] -> [..., V] float32."""
    return token_logits(hidden, params.output_rows)


class State(NamedTuple):
    """A prompt and what follows it: ContextKV, lengths [B], `decode`'s start, and the BeamKV of generated tokens."""

    context: ContextKV
    lengths: jax.Array
    start: jax.Array | None = None
    beams: BeamKV = BeamKV()


def begin(
    params: DecoderParams, cfg: DecoderConfig, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, State]:
    """See jgr.models.generators.Generator."""
    (batch, count), dtype = tokens.shape, params.embed.dtype
    few = batch < ONE_BY_ONE_PROMPTS or count < ONE_BY_ONE_TOKENS
    if target_platform() != "cpu" or few or dtype != jnp.float32:
        last, context = _prompt(params, cfg, tokens, lengths)
        return last, State(context, lengths)

    def read(context: ContextKV, row: jax.Array) -> tuple[ContextKV, jax.Array]:
        last, one = _prompt(params, cfg, tokens[row][None], lengths[row][None])
        return ContextKV(*(x.at[:, row].set(new[:, 0]) for x, new in zip(context, one, strict=True))), last[0]

    empty = jnp.zeros((cfg.layers, batch, cfg.kv_heads, count, cfg.head_dim), dtype)
    context, last = jax.lax.scan(read, ContextKV(empty, empty), jnp.arange(batch))
    return last, State(context, lengths)


def _prompt(
    params: DecoderParams, cfg: DecoderConfig, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, ContextKV]:
    """The last hidden states [B, 1, D] of prompts, and their keys and values."""
    out = prefill(params, cfg, tokens, lengths, read=jnp.maximum(lengths - 1, 0)[:, None])
    return out.hidden, out.context


def advance(
    params: DecoderParams, cfg: DecoderConfig, tokens: jax.Array, state: State, ancestors: jax.Array
) -> tuple[jax.Array, State]:
    """See jgr.models.generators.Generator."""
    context, lengths, start, beams = state
    hidden, beams = decode(params, cfg, tokens, context, lengths, beams, ancestors, start=start)
    return hidden, State(context, lengths, start, beams)


def next_logits(
    params: DecoderParams, cfg: DecoderConfig, hidden: jax.Array, level: int
) -> tuple[jax.Array, int]:
    """See jgr.models.generators.Generator."""
    return logits(params, hidden), 0


def misfit(cfg: DecoderConfig, prompt: PromptConfig, level_tokens: Sequence[npt.NDArray[np.int32]]) -> str:
    """See jgr.models.generators.Generator. A decoder reads whatever is made of its tokens."""
    return ""
