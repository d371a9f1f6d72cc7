# SPDX-License-Identifier: Apache-2.0
"""OneRec-V2's lazy decoder (MODEL-22) as pure functions: no encoder, and no layer ever runs over the history.

    x_t = sum over levels embed[token of item t] + position[items after t]     one feature vector per history item
    c_t = x_t W_context, cut into C x S slices of G x d;   k = rmsnorm(slice)  C = L_kv, S = S_kv, G = G_kv
    v = k where S = 1, else rmsnorm(the second slice)                          layer l reads slice l C // layers
    h = [bos, embed[s_1], ..., embed[s_depth-1]]
    per layer:  h += o(attention(q, k, v));   h += causal self-attention;   h += mlp  (each on an rmsnorm of h)
    logits of level l = rmsnorm_l(h at place l) . the level's own output rows

The mlp is silu(gate) * up -> down. After the first blocks it is a mixture of such: `experts_active` of them, weighted
by the softmax of their router scores, and a shared one. Every expert is computed for every token and weighted by 0
where it was not chosen: exact, and no slower while all experts' weights have to be read for a batch of beams anyway.
What the paper leaves open is chosen here: the features (OneRec has watch times, authors and the like; ours are an
item's semantic id), positions that count from the newest item, and no rotary angles, since a token's level says where
it stands.

In generation the history is the shared stage of attention: keys and values that all beams of a request, and all layers,
read. The other stage is the self-attention over bos, which beams share too, and the beam's own tokens, at most
depth - 1. A prompt is items and nothing else, `depth` tokens each; an empty one attends to nothing.

Letters: B batch, T items, X places in a row or W beams, L layers, D hidden, H heads, K key/value heads of the
self-attention, G of the cross-attention, d head size, F mlp, E experts, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jgr.config import PromptConfig
from jgr.models.config_file import LARGEST
from jgr.models.decoder import Dropout
from jgr.models.kv import BeamKV, ContextKV
from jgr.models.params import CheckpointError, Spec, over_layers
from jgr.ops import split
from jgr.ops.beam_attention import beam_attention
from jgr.ops.dense import dense
from jgr.ops.rms_norm import rms_norm
from jgr.ops.segment_attention import Causal, segment_attention
from jgr.prompt.layouts import Tokens

MODEL_TYPE = "onerec_v2"


@dataclass(frozen=True)
class LazyConfig:
    """Architecture only. Level l's tokens are first_tokens[l] and the level_sizes[l] - 1 after it."""

    vocab_size: int
    first_tokens: tuple[int, ...]
    level_sizes: tuple[int, ...]
    max_items: int  # of a history; older ones all have the last position
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    norm_eps: float = 1e-6
    context_heads: int = 1  # G
    context_layers: int = 1  # C: how many different keys the layers share
    context_parts: int = 1  # S; 1: values are the keys, 2: they are not
    experts: int = 0  # routed ones; 0: every mlp is a plain one
    experts_active: int = 3
    expert_mlp: int = 0
    dense_layers: int = 2  # the first blocks, which have a plain mlp whatever `experts` says

    @property
    def family(self) -> str:
        return MODEL_TYPE

    @property
    def depth(self) -> int:
        return len(self.level_sizes)

    @property
    def max_position(self) -> int:
        """The most tokens of a prompt together with an item."""
        return (self.max_items + 1) * self.depth

    @property
    def plain_layers(self) -> int:
        return min(self.dense_layers, self.layers) if self.experts else self.layers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mlp:
    gate: Any  # [L, D, F]: gate, which passes through silu
    up: Any  # [L, D, F]: multiplied by the gate
    down: Any  # [L, F, D]: output


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Experts:
    router: Any  # [L, D, E]: scores of the experts
    gate: Any  # [L, E, D, F]: gate of each expert
    up: Any  # [L, E, D, F]: multiplied by the gate
    down: Any  # [L, E, F, D]: output of each expert
    shared: Mlp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """The weights of a stack of blocks, with the layers as the leading axis of every leaf."""

    cross_norm: Any  # [L, D]: norm before the attention to the history
    cross_q: Any  # [L, D, H * d]: queries to the history
    cross_o: Any  # [L, H * d, D]: its output projection
    self_norm: Any  # [L, D]: norm before the self-attention
    wq: Any  # [L, D, H * d]: projection to queries
    wk: Any  # [L, D, K * d]: to keys
    wv: Any  # [L, D, K * d]: to values
    wo: Any  # [L, H * d, D]: output projection of the self-attention
    mlp_norm: Any  # [L, D]: norm before the MLP
    mlp: Mlp | Experts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LazyParams:
    embed: Any  # [V, D]: a row for each token
    bos: Any  # [1, D]: the start token's vector
    position: Any  # [max_items, D]: a row for each place of an item, the newest item first
    context: Any  # [D, C * S * G * d]: W_context, from items to keys and values
    context_norm: Any  # [C * S, G * d]: norm of each slice of the context
    plain: Any  # Block, or a tuple of one for each layer, whose leaves have no layer axis
    norms: Any  # [depth, D]: the last norm of each level
    output: Any  # [V, D]: output rows, each level's own
    mixed: Any = None  # the blocks with experts, in the same form, if there are any

    @property
    def output_rows(self) -> jax.Array:
        """[V, D]; each level's rows are a matrix of its own."""
        rows: jax.Array = self.output
        return rows


def spec(cfg: LazyConfig) -> LazyParams:
    """The declaration of every parameter."""
    hidden, parts = cfg.hidden, cfg.context_layers * cfg.context_parts
    width = cfg.context_heads * cfg.head_dim
    vocabulary = Spec((cfg.vocab_size, hidden), ("vocab", "embed"))
    mixed = cfg.layers - cfg.plain_layers
    return LazyParams(
        embed=vocabulary,
        bos=Spec((1, hidden), ("bos", "embed")),
        position=Spec((cfg.max_items, hidden), ("item", "embed")),
        context=Spec((hidden, parts * width), ("embed", "slices"), fan_in=hidden),
        context_norm=Spec((parts, width), ("slice", "context"), "ones"),
        plain=_block_spec(cfg, cfg.plain_layers, _mlp_spec(cfg.plain_layers, hidden, cfg.mlp)),
        norms=Spec((cfg.depth, hidden), ("level", "embed"), "ones"),
        output=vocabulary,
        mixed=_block_spec(cfg, mixed, _experts_spec(cfg, mixed)) if mixed else None,
    )


def _matrix(*shape: int, axes: tuple[str, ...]) -> Spec:
    return Spec(shape, ("layer", *axes), fan_in=shape[-2])


def _mlp_spec(n: int, hidden: int, mlp: int) -> Mlp:
    wide = _matrix(n, hidden, mlp, axes=("embed", "mlp"))
    return Mlp(wide, wide, _matrix(n, mlp, hidden, axes=("mlp", "embed")))


def _experts_spec(cfg: LazyConfig, n: int) -> Experts:
    wide = _matrix(n, cfg.experts, cfg.hidden, cfg.expert_mlp, axes=("expert", "embed", "mlp"))
    return Experts(
        router=_matrix(n, cfg.hidden, cfg.experts, axes=("embed", "expert")),
        gate=wide,
        up=wide,
        down=_matrix(n, cfg.experts, cfg.expert_mlp, cfg.hidden, axes=("expert", "mlp", "embed")),
        shared=_mlp_spec(n, cfg.hidden, cfg.expert_mlp),
    )


def _block_spec(cfg: LazyConfig, n: int, mlp: Mlp | Experts) -> Block:
    hidden, q, kv = cfg.hidden, cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    norm = Spec((n, hidden), ("layer", "embed"), "ones")
    read = _matrix(n, hidden, q, axes=("embed", "heads"))
    short = _matrix(n, hidden, kv, axes=("embed", "kv_heads"))
    write = _matrix(n, q, hidden, axes=("heads", "embed"))
    return Block(norm, read, write, norm, read, short, short, write, norm, mlp)


class Context(NamedTuple):
    """The history as the layers attend to it.

    k, v: [C, B, G, T, d], one array where values are keys; lengths: [B] items.
    """

    k: jax.Array
    v: jax.Array
    lengths: jax.Array


class State(NamedTuple):
    """The state of a search: the history, the keys and values of bos, which all beams share, and the beams' own."""

    context: Context
    bos: ContextKV  # [L, B, K, 1, d]
    beams: BeamKV = BeamKV()


def read_history(params: LazyParams, cfg: LazyConfig, tokens: jax.Array, lengths: jax.Array) -> Context:
    """Turn prompts [B, depth * T] int32, right padded, of lengths [B] tokens, into what the layers attend to.

    Tokens beyond the last whole item are not read.
    """
    batch, items, depth = tokens.shape[0], tokens.shape[1] // cfg.depth, cfg.depth
    counts = lengths // depth
    with jax.named_scope("prefill"):
        x = split.everywhere(
            params.embed[tokens[:, : items * depth].reshape(batch, items, depth)].sum(axis=2)
        )
        age = jnp.clip(counts[:, None] - 1 - jnp.arange(items), 0, cfg.max_items - 1)
        slices = dense(x + params.position[age], params.context)
        slices = slices.reshape(batch, items, *params.context_norm.shape)
        slices = rms_norm(slices, params.context_norm, cfg.norm_eps)
        slices = slices.reshape(batch, items, cfg.context_layers, cfg.context_parts, -1, cfg.head_dim)
        slices = slices.transpose(3, 2, 0, 4, 1, 5)
        return Context(slices[0], slices[-1], counts)


def _mlp(mlp: Mlp, x: jax.Array) -> jax.Array:
    return dense(jax.nn.silu(dense(x, mlp.gate)) * dense(x, mlp.up), mlp.down)


def _mixture(experts: Experts, active: int, x: jax.Array) -> jax.Array:
    """The chosen experts' weighted sum and the shared one, for x [B, X, D]: [B, X, D]."""
    scores = jnp.einsum("bxd,de->bxe", x, experts.router, preferred_element_type=jnp.float32)
    best, chosen = jax.lax.top_k(scores, active)
    shares = jax.nn.one_hot(chosen, scores.shape[-1]) * jax.nn.softmax(best)[..., None]
    share = shares.sum(axis=-2).astype(x.dtype)
    inner = jax.nn.silu(jnp.einsum("bxd,edf->bxef", x, experts.gate))
    inner = inner * jnp.einsum("bxd,edf->bxef", x, experts.up) * share[..., None]
    return jnp.einsum("bxef,efd->bxd", inner, experts.down) + _mlp(experts.shared, x)


Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""A self-attention of one layer: (q [B, X, H, d], k and v [B, X, K, d] of the new places, given) -> (out, left).

given: the layer's part of `brought`, see `_blocks`. left: the layer's part of what `_blocks` returns beside h.
"""


def _blocks(
    params: LazyParams,
    cfg: LazyConfig,
    h: jax.Array,
    context: Context,
    attend: Attend,
    brought: Any = None,
    *,
    drop: Callable[[jax.Array, jax.Array | None], jax.Array] = lambda x, key: x,
    keys: jax.Array | None = None,
    attention: str = "auto",
) -> tuple[jax.Array, Any]:
    """Run every block on h [B, X, D]. brought, and what is returned beside h: a part for each layer, leading axis L."""
    batch, places, _ = h.shape
    items = context.k.shape[3]
    # One segment in which every query comes after every key.
    query = Tokens(*[jnp.zeros((batch, places), jnp.int32)] * 5)
    nothing = jnp.zeros((batch, items), jnp.int32)
    key = Tokens(jnp.where(jnp.arange(items) < context.lengths[:, None], 0, -1), *[nothing] * 4)

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(batch, places, -1, cfg.head_dim)

    def block_step(h: jax.Array, xs: tuple[Block, jax.Array, Any, jax.Array | None]) -> tuple[jax.Array, Any]:
        block, at, own, layer_keys = xs
        k1, k2, k3 = (None, None, None) if layer_keys is None else layer_keys
        with jax.named_scope("attention"):
            q = heads(dense(rms_norm(h, block.cross_norm, cfg.norm_eps), block.cross_q))
            out = segment_attention(
                q, context.k[at], context.v[at], query, keys=key, implementation=attention
            )
            h = h + drop(dense(out.reshape(batch, places, -1), block.cross_o), k1)
        with jax.named_scope("attention"):
            x = rms_norm(h, block.self_norm, cfg.norm_eps)
            q, k, v = (heads(dense(x, w)) for w in (block.wq, block.wk, block.wv))
            out, left = attend(q, k, v, own)
            h = h + drop(dense(out.reshape(batch, places, -1), block.wo), k2)
        with jax.named_scope("mlp"):
            x = rms_norm(h, block.mlp_norm, cfg.norm_eps)
            mlp, active = block.mlp, cfg.experts_active
            out = _mixture(mlp, active, x) if isinstance(mlp, Experts) else _mlp(mlp, x)
            return h + drop(out, k3), left

    at = np.arange(cfg.layers, dtype=np.int32) * cfg.context_layers // cfg.layers
    parts = []
    for block, layers in (
        (params.plain, slice(0, cfg.plain_layers)),
        (params.mixed, slice(cfg.plain_layers, None)),
    ):
        if block is not None:
            of_layers = jax.tree.map(lambda x, layers=layers: x[layers], (at, brought, keys))
            h, left = over_layers(block_step, h, block, *of_layers)
            parts.append(left)
    return h, jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def begin(
    params: LazyParams, cfg: LazyConfig, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, State]:
    """See jgr.models.generators.Generator: the history is read, and bos run."""
    context = read_history(params, cfg, tokens, lengths)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, own: None) -> tuple[jax.Array, ContextKV]:
        out = jnp.repeat(v, cfg.heads // cfg.kv_heads, axis=2)  # attention over a single key is its value
        return out, ContextKV(k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3))

    with jax.named_scope("decode"):
        h = jnp.broadcast_to(params.bos, (tokens.shape[0], 1, cfg.hidden))
        h, bos = _blocks(params, cfg, h, context, attend)
        return rms_norm(h, params.norms[0], cfg.norm_eps), State(context, bos)


def advance(
    params: LazyParams, cfg: LazyConfig, tokens: jax.Array, state: State, ancestors: jax.Array
) -> tuple[jax.Array, State]:
    """See jgr.models.generators.Generator."""
    one = jnp.ones(tokens.shape[0], jnp.int32)

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, own: tuple[ContextKV, BeamKV]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        bos, earlier = own
        return beam_attention(q, bos.k, bos.v, one, *earlier.of_layer(k, v), ancestors), (k, v)

    with jax.named_scope("decode"):
        own = (state.bos, state.beams)
        h, new = _blocks(params, cfg, split.rows(params.embed, tokens), state.context, attend, own)
        beams = state.beams.plus(*new)
        return rms_norm(h, params.norms[len(beams.k)], cfg.norm_eps), state._replace(beams=beams)


def forward(
    params: LazyParams,
    cfg: LazyConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    targets: jax.Array,
    *,
    dropout: Dropout | None = None,
    key: jax.Array | None = None,
    attention: str = "reference",
) -> jax.Array:
    """For training: the hidden states [B, depth, D] of all levels of targets, items [B, depth] int32 after prompts.

    dropout: (x, key) -> x on the embeddings and on what each part of a block adds; needs key. attention: the default
    is the form with gradients.
    """
    context = read_history(params, cfg, tokens, lengths)
    batch = tokens.shape[0]
    keys = None if key is None else jax.random.split(key, (cfg.layers + 1, 3))

    def drop(x: jax.Array, dropout_key: jax.Array | None) -> jax.Array:
        return x if dropout is None or dropout_key is None else dropout(x, dropout_key)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, own: None) -> tuple[jax.Array, None]:
        k, v, whole = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), jnp.full(batch, cfg.depth, jnp.int32)
        return segment_attention(q, k, v, Causal(whole), implementation=attention), None

    bos = jnp.broadcast_to(params.bos, (batch, 1, cfg.hidden))
    h = jnp.concatenate([bos, params.embed[targets[:, :-1]]], axis=1)
    h, _ = _blocks(
        params, cfg, drop(h, None if keys is None else keys[-1, 0]), context, attend,
        drop=drop, keys=None if keys is None else keys[:-1], attention=attention,
    )  # fmt: skip
    return rms_norm(h, params.norms, cfg.norm_eps)


def next_logits(params: LazyParams, cfg: LazyConfig, hidden: jax.Array, level: int) -> tuple[jax.Array, int]:
    """See jgr.models.generators.Generator: the level's own tokens."""
    first = cfg.first_tokens[level]
    rows = params.output[first : first + cfg.level_sizes[level]]
    return jnp.einsum("...d,vd->...v", hidden, rows, preferred_element_type=jnp.float32), first


def misfit(cfg: LazyConfig, prompt: PromptConfig, level_tokens: Sequence[npt.NDArray[np.int32]]) -> str:
    """See jgr.models.generators.Generator."""
    if (prompt.template, prompt.item, prompt.separator) != ("{history}", "{sid}", ""):
        return "prompt: this model reads items only: template={history}, item={sid} and no separator"
    if len(level_tokens) != cfg.depth:
        return f"the catalog's semantic ids have {len(level_tokens)} levels, the model's {cfg.depth}"
    for level, (tokens, first, size) in enumerate(
        zip(level_tokens, cfg.first_tokens, cfg.level_sizes, strict=True)
    ):
        if len(tokens) and not first <= tokens.min() <= tokens.max() < first + size:
            return f"catalog level {level}: the model's tokens there are {first} to {first + size - 1}"
    return ""


def to_config(cfg: LazyConfig) -> dict[str, Any]:
    """The content of config.json for an architecture."""
    return {"model_type": MODEL_TYPE, **dataclasses.asdict(cfg)}


def parse_config(raw: Mapping[str, Any]) -> LazyConfig:
    """The architecture that `to_config` wrote. CheckpointError names the field that is missing or wrong."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(LazyConfig):
        value = raw.get(field.name)
        if field.type == "tuple[int, ...]":
            good = isinstance(value, list) and bool(value) and all(_is_count(x) for x in value)
        elif field.type == "float":
            good = isinstance(value, float) and 0 < value < 1e15
        else:
            good = _is_count(value)
        if not good:
            raise CheckpointError(f"{field.name} is {value!r}")
        values[field.name] = tuple(value) if isinstance(value, list) else value
    cfg = LazyConfig(**values)
    _check(cfg)
    return cfg


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _check(cfg: LazyConfig) -> None:
    positive: tuple[Literal["hidden", "layers", "heads", "head_dim", "mlp", "max_items"], ...]
    positive = ("hidden", "layers", "heads", "head_dim", "mlp", "max_items")
    problems = [f"{name} is 0" for name in positive if getattr(cfg, name) == 0]
    for name in ("kv_heads", "context_heads"):
        if not getattr(cfg, name) or cfg.heads % getattr(cfg, name):
            problems.append(f"heads {cfg.heads} is not a multiple of {name} {getattr(cfg, name)}")
    if not 1 <= cfg.context_layers <= cfg.layers or cfg.context_parts not in (1, 2):
        problems.append("context_layers must be 1 to layers, and context_parts 1 or 2")
    if cfg.experts and not (1 <= cfg.experts_active <= cfg.experts and cfg.expert_mlp and cfg.dense_layers):
        problems.append("experts need expert_mlp, dense_layers and 1 to experts experts_active")
    ends = [first + size for first, size in zip(cfg.first_tokens, cfg.level_sizes, strict=False)]
    if len(cfg.first_tokens) != cfg.depth or max(ends) > cfg.vocab_size:
        problems.append("first_tokens and level_sizes must be of equal length, and within vocab_size")
    elif any(end > after for end, after in zip(ends, cfg.first_tokens[1:], strict=False)):
        problems.append("the level_sizes from first_tokens on must not overlap")
    if problems:
        raise CheckpointError("; ".join(problems))
