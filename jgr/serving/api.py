# SPDX-License-Identifier: Apache-2.0
"""The wire contract: what a request may say, what an answer says, and how a refusal looks.

The one idea: the structs below both validate requests and describe them. `jgr.serving.http.decoding` checks a body
against them in one pass, `jgr.serving.http.openapi` prints the same types, so the documentation cannot drift from the
checks.

Item ids are text; an integer is read as its decimal text. What depends on the catalog or the configuration (known
items, list limits, beam widths) is checked by the model's engine: `jgr.serving.known_items` and the `translation`
modules.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from jgr.catalog.catalog import MAX_NAME_CHARS
from jgr.prompt.layouts import LayoutName
from jgr.serving.fleet_api import LastRollout, ReadyReplicas, ReloadState, Replicas, WantedReplicas
from jgr.serving.policies.jobs import Priority

MAX_DEADLINE_MS = 600_000
MAX_SEGMENTS = 16
MAX_SECONDS = 1 << 40
MAX_CODE = (1 << 31) - 1
MAX_NAMED = 256
"""The most slots of context, or tasks, that a request may name."""

Seconds = Annotated[int, Meta(ge=0, le=MAX_SECONDS)]
Code = Annotated[int, Meta(ge=0, le=MAX_CODE)]

UserId = Annotated[
    Annotated[str, Meta(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
    | Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    | None,
    Meta(
        description="Name of the user, without control characters. Cached work for the same user is found by it; "
        "null or an empty one means nobody. It changes the answer only where it changes the prompt's layout, which "
        "the answer names."
    ),
]
History = Annotated[
    list[str | int],
    Meta(
        min_length=1,
        description="Ids of the items that the user interacted with, oldest first.",
        examples=[["B00A", "B00B"]],
    ),
]
Deadline = Annotated[
    Annotated[float, Meta(gt=0, le=MAX_DEADLINE_MS)] | None,
    Meta(
        description="Milliseconds within which the answer is of use. A request that cannot be answered in time is "
        "refused at once with 429, and one that was accepted and is late ends with 504. null: the server's default."
    ),
]
ModelName = Annotated[
    Annotated[str, Meta(max_length=256)] | None,
    Meta(
        description="The model to ask: its id or its exact version. null: the first one that serves the endpoint."
    ),
]
PriorityField = Annotated[
    Priority,
    Meta(description="batch: gives way to all interactive requests, as evaluations and backfills should."),
]
Explain = Annotated[
    bool, Meta(description="Tell how many tokens of each part of the prompt came from the cache.")
]
HistoryTexts = Annotated[
    list[str] | None,
    Meta(
        description="The user's own words on each history item, such as a review, for servers whose prompts have a "
        "place for them (prompt.item with {review}); others refuse the field. As many as history has items; an empty "
        "text stands for none. Of a long text the first tokens are read (prompt.review_tokens).",
        examples=[["The tone is warm.", ""]],
    ),
]
HistoryTimes = Annotated[
    list[Seconds] | None,
    Meta(description="Time of each history item, in seconds, ascending; for models that read times."),
]
Time = Annotated[
    Seconds | None,
    Meta(description="Time of the request, in seconds; for models that read times. null: now."),
]
HistoryActions = Annotated[
    list[Code] | None,
    Meta(description="What the user did with each history item: a number whose bits stand for actions."),
]
Context = Annotated[
    Annotated[dict[str, Code], Meta(max_length=MAX_NAMED)] | None,
    Meta(description="Other features of the user by slot, such as slot0; slots left out are unknown."),
]
Scenario = Annotated[
    Code,
    Meta(description="Number of the scenario, such as a page of a shop, that the request comes from."),
]
IncludeMetadata = Annotated[bool, Meta(description="Add each item's catalog metadata to the answer.")]


class Filters(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Rules that every returned item meets, all at once. Item ids that the catalog lacks are ignored and counted."""

    exclude: Annotated[
        list[str | int],
        Meta(description="Item ids to leave out, such as items that were just shown.", examples=[["B00A"]]),
    ] = []
    deny: Annotated[
        list[str | int],
        Meta(description="More item ids to leave out, for callers that keep a list of banned items."),
    ] = []
    allow: Annotated[
        Annotated[list[str | int], Meta(min_length=1)] | None,
        Meta(description="The only item ids that may be returned. null: any item."),
    ] = None
    segments: Annotated[
        list[Annotated[str, Meta(max_length=MAX_NAME_CHARS)]],
        Meta(
            max_length=MAX_SEGMENTS,
            description="Names of catalog segments; an item must be in all of them.",
            examples=[["in_stock", "eu"]],
        ),
    ] = []


class RecommendRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Asks for the items of the catalog that are most likely to follow a history, found by beam search."""

    history: History
    model: ModelName = None
    user_id: UserId = None
    top_k: Annotated[
        int,
        Meta(ge=1, description="Number of items to return; at most the beam width and the catalog's size."),
    ] = 10
    beam_width: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Number of beams kept at each level of the ids. null: the server's default."),
    ] = None
    min_beam_width: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Where the search would take too long for the deadline, it may have as few beams as this; the "
            "answer's usage.beam_width says how many it had. null, or more than beam_width: nothing less "
            "than beam_width."
        ),
    ] = None
    rerank: Annotated[
        Annotated[str, Meta(max_length=256)] | None,
        Meta(
            description="Another model of this server, by its id or its exact version, that ranks the same items: what "
            "the beam finds comes in its order and with its scores. /v1/recommend alone takes it. null: in the beam's."
        ),
    ] = None
    exclude_history: Annotated[bool, Meta(description="Leave out the items of the history.")] = False
    filters: Annotated[Filters | None, Meta(description="Rules that all items meet. null: no rules.")] = None
    history_texts: HistoryTexts = None
    deadline_ms: Deadline = None
    priority: PriorityField = "interactive"
    include_metadata: IncludeMetadata = False
    explain: Explain = False


class RankRequest(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Asks for the given candidates to be scored after a history, and returned best first."""

    history: History
    candidates: Annotated[
        Annotated[list[str | int], Meta(min_length=1)] | Literal["all"],
        Meta(
            description='Ids of the items to score, each named once and in the catalog. "all": every item of the '
            "catalog, if these are no more than the limit on candidates.",
            examples=[["B00C"], "all"],
        ),
    ]
    model: ModelName = None
    user_id: UserId = None
    top_k: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="Number of candidates to return. null: all of them."),
    ] = None
    min_candidates: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Where scoring all candidates would take too long for the deadline, only the first ones may be "
            "scored, at least this many; put the likely ones first. usage.candidates says how many were. null, or more "
            'than there are: nothing less than all of them, and so with "all".'
        ),
    ] = None
    exclude_history: Annotated[
        bool,
        Meta(description="Leave out the candidates that are in the history; the answer may then be shorter."),
    ] = False
    layout: Annotated[
        Literal["user_prefix", "item_prefix", "causal"] | None,
        Meta(
            description="Order of the prompt, for servers that put the candidates into it (rank.method); others refuse "
            "the field. user_prefix: the user comes first; candidates do not see each other. item_prefix: the "
            "candidates come first. causal: plain order of a language model, in which a candidate sees the user and "
            "the candidates before it. Layouts give different scores. null: the server's cache policy chooses."
        ),
    ] = None
    reuse_budget: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        Meta(
            description="Share of the candidates' tokens that is computed anew, beside those at their ends that always "
            "are, and of the tokens of history_texts that a library has, for servers that reuse candidates wherever "
            "they stand in the prompt (cache.policy=blocks with cache.repair_share above 0); others refuse the field. "
            "1: all of them, so that the scores are those of a prompt that is computed whole. null: the server's own "
            "share."
        ),
    ] = None
    history_texts: HistoryTexts = None
    history_times: HistoryTimes = None
    time: Time = None
    history_actions: HistoryActions = None
    context: Context = None
    scenario: Scenario = 0
    task_weights: Annotated[
        Annotated[dict[str, float], Meta(max_length=MAX_NAMED)] | None,
        Meta(description="Weights of the tasks' scores in the sum to order by. null: the first score only."),
    ] = None
    deadline_ms: Deadline = None
    priority: PriorityField = "interactive"
    include_metadata: IncludeMetadata = False
    explain: Explain = False


Request = RecommendRequest | RankRequest


# Thousands in an answer would set off the garbage collector, on the event loop; they are in no cycle.
class Item(Struct, kw_only=True, repr_omit_defaults=True, gc=False):
    """One recommended or ranked item."""

    item_id: Annotated[str, Meta(description="The catalog's id of the item.")]
    score: Annotated[
        float,
        Meta(
            description="The score that items are ordered by, highest first. For a generator: the log-likelihood of "
            "the item's semantic id."
        ),
    ]
    rank: Annotated[int, Meta(ge=1, description="Place of the item in this answer: 1 for the best one.")]
    scores: Annotated[
        dict[str, float] | UnsetType, Meta(description="Each task's score, if the model has several.")
    ] = UNSET
    metadata: Annotated[
        dict[str, Any] | UnsetType,
        Meta(description="The item's metadata in the catalog; only if include_metadata is true."),
    ] = UNSET


class Usage(Struct, kw_only=True, repr_omit_defaults=True):
    """What the request cost, and which of its items were left out."""

    prompt_tokens: Annotated[int, Meta(description="Number of tokens in the prompt, without padding.")]
    cached_tokens: Annotated[int, Meta(description="Prompt tokens with keys and values from the cache.")] = 0
    computed_tokens: Annotated[
        int, Meta(description="Prompt tokens that were computed; a repaired one counts again.")
    ] = 0
    repaired_tokens: Annotated[
        int | UnsetType,
        Meta(
            description="Number of candidates' tokens that were computed again, so that they see the candidates before "
            "their own. Scores then approximate those of a prompt that is computed whole. Only if the server repairs "
            "tokens (cache.repair_tokens, cache.repair_share) and the candidates come first in the prompt, or are "
            "reused wherever they stand in it (cache.policy=blocks). Tokens of history_texts count too that a library "
            "has and that were computed all the same (cache.library)."
        ),
    ] = UNSET
    approximate_tokens: Annotated[
        int | UnsetType,
        Meta(
            description="Number of candidates' tokens that were taken as they are where the candidate stands alone, "
            "without what stands before it, and of tokens of history_texts that were taken as a library has like ones "
            "(cache.library). Only if the server reuses candidates wherever they stand in the prompt "
            "(cache.policy=blocks)."
        ),
    ] = UNSET
    full_recompute: Annotated[
        bool | UnsetType,
        Meta(description="true: computed whole, since approximate answers drifted (cache.max_drift)."),
    ] = UNSET
    exact_tokens: Annotated[
        int | UnsetType,
        Meta(
            description="Number of prompt tokens that are neither in repaired_tokens nor in approximate_tokens. Only "
            "beside approximate_tokens."
        ),
    ] = UNSET
    layout: Annotated[
        LayoutName,
        Meta(
            description="Layout of the prompt that was computed; scores of different layouts cannot be compared. "
            "causal: each token saw all before it. user_prefix: the user came first. item_prefix: the items came "
            "first. single_user_multi_item: each candidate saw the user alone (models that score in one pass)."
        ),
    ]
    history_items: Annotated[int, Meta(description="Number of the history's items that are in the prompt.")]
    unknown_items: Annotated[int, Meta(description="Items of the history that the catalog does not have.")]
    unknown_item_ids: Annotated[
        list[str], Meta(description="The first ten unknown items of the history, each cut to 80 characters.")
    ]
    beam_width: Annotated[int | UnsetType, Meta(description="Beams kept per level (recommend).")] = UNSET
    dead_beams: Annotated[
        int | UnsetType,
        Meta(description="Beams without an item, as fewer than beam_width ids were allowed (recommend)."),
    ] = UNSET
    unknown_filter_items: Annotated[
        int | UnsetType, Meta(description="Number of item ids in the filters that the catalog does not have.")
    ] = UNSET
    candidates: Annotated[int | UnsetType, Meta(description="Candidates scored (rank).")] = UNSET
    parts: Annotated[
        int | UnsetType, Meta(description="Parts in which a scorer computed the candidates (rank).")
    ] = UNSET
    feature_missing: Annotated[
        int | UnsetType,
        Meta(description="Candidates scored without their features; only if the server has a feature store."),
    ] = UNSET
    feature_stale: Annotated[
        int | UnsetType,
        Meta(description="Candidates scored with old features; only if the server has a feature store."),
    ] = UNSET


class Reuse(Struct, kw_only=True):
    """How much of one part of the prompt came from the cache."""

    segment: Annotated[Literal["user", "item"], Meta(description="user: the history; item: a candidate.")]
    item_id: Annotated[str | UnsetType, Meta(description="The candidate's item id.")] = UNSET
    tokens: Annotated[int, Meta(description="Number of tokens in this part.")]
    cached_tokens: Annotated[int, Meta(description="Number of this part's tokens that came from the cache.")]
    repaired_tokens: Annotated[
        int | UnsetType,
        Meta(
            description="Number of this part's first tokens that were computed again (cache.repair_tokens); see Usage."
        ),
    ] = UNSET
    approximate_tokens: Annotated[
        int | UnsetType,
        Meta(
            description="Number of the history's tokens that came from a library (cache.library); see Usage."
        ),
    ] = UNSET
    kept: Annotated[bool, Meta(description="Whether the part's computed tokens were put into the cache.")]


class Timing(Struct, kw_only=True):
    """The time that the answer took, by stage, in milliseconds. total is more than the sum of the other three."""

    queue: Annotated[float, Meta(description="Time in the queue, until the request's batch started.")]
    prepare: Annotated[float, Meta(description="Time in which the request was read and the prompt built.")]
    device: Annotated[float, Meta(description="Time in which the executor ran the request's batch.")]
    total: Annotated[float, Meta(description="Time from the request's headers until the answer was made.")]


class Answer(Struct, kw_only=True, repr_omit_defaults=True):
    """The items, best first, with the model and catalog that they come from."""

    id: Annotated[str, Meta(description="The request's id: X-Request-Id, or one that the server made.")]
    model: Annotated[str, Meta(description="Version of the model that computed the scores.")]
    reranked_by: Annotated[
        str | UnsetType,
        Meta(
            description="Version of the model whose order and scores these are; only if the request has rerank."
        ),
    ] = UNSET
    catalog_version: Annotated[str, Meta(description="Content hash of the catalog that the items are from.")]
    normalize: Annotated[
        Literal["valid", "full"] | UnsetType,
        Meta(
            description="How scores are normalised. valid: over the legal tokens of each level. full: over the whole "
            "vocabulary. Absent for scorers, whose scores are no likelihoods."
        ),
    ] = UNSET
    items: Annotated[
        list[Item], Meta(description="The items, best first. Fewer than top_k if the search finds no more.")
    ]
    usage: Annotated[Usage, Meta(description="What the request cost, and which of its items were left out.")]
    timing_ms: Annotated[Timing, Meta(description="Where the time went, in milliseconds.")]
    explain: Annotated[
        list[Reuse] | UnsetType,
        Meta(
            description="Reuse of each part of the prompt, in its order; only if the request has explain=true."
        ),
    ] = UNSET


class Erased(Struct, kw_only=True):
    """How much of a user was erased."""

    entries: Annotated[
        int, Meta(description="Number of entries erased; one that a batch reads goes when that batch ends.")
    ]


class ModelInfo(Struct, kw_only=True, frozen=True):
    """A model that is served, and the limits on its requests."""

    id: Annotated[str, Meta(description="The model's name.")]
    version: Annotated[
        str,
        Meta(
            description="The version, as answers name it: id@hash of the weights, config and tokenizer; then the "
            "commit, where the model is from the Hugging Face hub."
        ),
    ]
    settings: Annotated[
        str,
        Meta(
            description="Hash of the settings that make answers what they are, from the model's folder, --config and "
            "--set; the version does not name them."
        ),
    ] = ""
    state: Annotated[
        Literal["starting", "ready", "draining", "failed"],
        Meta(description="Whether the model serves requests, which it does in the state ready."),
    ] = "starting"
    loaded_at: Annotated[
        str | None, Meta(description="Time when this version became ready; UTC, RFC 3339. null: not yet.")
    ] = None
    reload: Annotated[
        ReloadState,
        Meta(
            description="State of the last reload or rollback. running: until the new version is ready and the old one "
            "has finished its requests. failed, cancelled: the old version still serves."
        ),
    ] = "never"
    reload_error: Annotated[
        str | None,
        Meta(
            description="Why the last reload failed, or what a cancelled one left that has not ended. null: neither."
        ),
    ] = None
    previous: Annotated[
        str | None, Meta(description="The version before, to which a rollback goes. null: there was none.")
    ] = None
    catalog_version: Annotated[str, Meta(description="Content hash of the catalog.")]
    catalog_items: Annotated[int, Meta(description="Number of items in the catalog.")]
    depth: Annotated[int, Meta(description="Number of levels in a semantic id.")]
    normalize: Annotated[Literal["valid", "full"], Meta(description="How scores are normalised; see Answer.")]
    beam_width: Annotated[int, Meta(description="Beam width of a request that names none.")]
    max_beam_width: Annotated[int, Meta(description="Largest beam_width; 0: recommend is not served.")]
    max_candidates: Annotated[int, Meta(description="Most candidates in a request; 0: rank is not served.")]
    kernels: Annotated[
        str,
        Meta(
            description="What computes a generator's prompts where jgr-native could: native- and the processor's "
            "instruction set, as in native-avx512, or xla."
        ),
    ] = "xla"
    quantize: Annotated[
        Literal["", "int8", "fp8"],
        Meta(description="How the weights of matrices are held, see model.quantize. Empty: in model.dtype."),
    ] = ""
    timed: Annotated[bool, Meta(description="Whether the model reads times: it needs history_times.")] = False
    tasks: Annotated[
        list[str], Meta(description="Names of the tasks that are scored; empty: there is one score.")
    ] = field(default_factory=list)
    scenarios: Annotated[int, Meta(description="Number of scenarios, which count from 0.")] = 1
    context: Annotated[
        dict[str, int], Meta(description="Number of values, from 0, of each slot of context.")
    ] = field(default_factory=dict)
    action_bits: Annotated[
        int, Meta(description="Bits that a number in history_actions may have; 0: actions are not read.")
    ] = 0
    max_history: Annotated[int, Meta(description="Most items that a request's history may have.")]
    max_filter_items: Annotated[
        int, Meta(description="Most item ids that a request's filters may have, all lists together.")
    ]
    segments: Annotated[list[str], Meta(description="Names that filters.segments may hold.")]
    max_history_in_prompt: Annotated[
        int, Meta(description="Number of a history's last items that the model reads.")
    ]


class ModelList(Struct, kw_only=True):
    """The models of this server."""

    data: Annotated[list[ModelInfo], Meta(description="The models, in the order of their configurations.")]
    replicas: Replicas = UNSET
    of: WantedReplicas = UNSET
    rollout: LastRollout = UNSET


class Health(Struct, kw_only=True):
    """The state of a server that is well; another answers with an error."""

    status: Annotated[
        Literal["live", "ready"], Meta(description="live: the process answers. ready: all models serve.")
    ]
    replicas: ReadyReplicas = UNSET
    of: WantedReplicas = UNSET
