# SPDX-License-Identifier: Apache-2.0
"""What each claim says in plain words, for tables and pictures.

A claim may bring its own title; those of results without one stand here, by the pattern of their ids. A word of an id
that is put into a title is looked up in WORDS first. A title says what was measured and of what; its unit, the target
and whether more or less is better stand beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

WORDS: Mapping[str, Mapping[str, str]] = {
    "measure": {
        "p50": "the median latency",
        "p99": "the 99th percentile of the latency",
        "rate": "the rate of answers",
    },
    "bat": {
        "abc": "the whole of BAT",
        "ab": "BAT without hotness",
        "ac": "BAT without replicating hot items",
        "a": "BAT's choice of the prefix alone",
        "none": "caching users only",
    },
    "cutby": {"metis": "METIS with a refinement", "numpy": "jgr's own partition"},
    "quantile": {"p50": "Median", "p99": "99th percentile"},
    "items": {"280k": "280,000", "1m": "a million"},
    "users": {"all": "all users", "returning": "users who come back"},
    "placed": {
        "hrcs": "hot items on all nodes and cold ones on one",
        "replicate": "all items on all nodes",
        "hash": "each item on one node",
    },
    "data": {
        "ml1m": "MovieLens 1M",
        "beauty": "Amazon Beauty",
        "industrial": "Amazon Industrial",
        "beauty_repeats": "Beauty, history weighted",
        "industrial_repeats": "Industrial with weights",
        "sports": "Amazon Sports",
        "sports_repeats": "Sports with weights",
        "sports_near": "Amazon Sports, and what was taken near them",
        "instruments": "Amazon Instruments",
        "instruments_repeats": "Instruments, weighted",
    },
    "shape": {"qwen3-0.6b": "Qwen3-0.6B", "qwen3-1.7b": "Qwen3-1.7B"},
    "model": {
        "beauty": "our generator on Amazon Beauty",
        "beauty-given-ids": "our generator on Amazon Beauty with published ids",
        "beauty-own-code": "our generator on Beauty, a code for each item",
        "beauty-text": "our generator on Amazon Beauty with texts",
        "industrial-own-code": "our generator on Industrial, a code an item",
        "industrial-text": "our generator on Amazon Industrial with texts",
        "sports-own-code": "our generator on Amazon Sports, a code an item",
        "industrial": "our generator on Amazon Industrial",
        "ml1m": "our generator on MovieLens 1M",
        "hstu-industrial": "HSTU on Amazon Industrial",
        "hstu-ml1m": "HSTU on MovieLens 1M",
        "hstu-ml1m-whole": "HSTU on all of MovieLens 1M",
        "hstu-large-ml1m-whole": "HSTU-large on all of MovieLens 1M",
        "hstu-large-long-ml1m-whole": "HSTU-large, trained longer, on all of MovieLens 1M",
        "hstu-wide-ml1m-whole": "a wider HSTU on all of MovieLens 1M",
        "hstu": "HSTU",
        "stu": "the STU",
        "decoder": "a dense decoder",
        "onerec": "OneRec's lazy decoder",
        "climber": "Climber",
        "sasrec": "SASRec",
        "lrurec": "LRURec",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "llama3": "Llama 3",
    },
    "served": {
        "industrial": "a generator",
        "sasrec_industrial": "a scorer (SASRec)",
        "hstu_industrial": "a scorer (HSTU)",
    },
    "metric": {
        "hr@10": "Share of users whose next item is among the ten best",
        "recall@10": "Share of users whose next item is among the ten best",
        "ndcg@10": "NDCG@10, which counts the next item the more the higher it stands",
    },
    "task": {"click": "clicks", "like": "likes", "long_view": "long views"},
    "peer": {
        "transformers": "Hugging Face transformers",
        "vllm": "vLLM",
        "pytorch": "PyTorch with a shared prompt",
        "compiled": "torch.compile with a shared prompt",
        "paged": "a baseline whose beams are sequences on shared pages",
        "copied": "a baseline whose beams are sequences with copies of the prompt",
    },
    "size": {"-51m": ", 51 M parameters"},
    "search": {
        "unconstrained": "a beam search without a constraint",
        "full": "a search held to the catalog, scores over the whole vocabulary",
        "valid": "a search held to the catalog, scores over what may follow",
    },
    "workload": {
        "base": "FLAME's base workload (512 events, 128 candidates)",
        "long": "FLAME's long workload (1,024 events, 512 candidates)",
    },
    "kind": {"int8": "8-bit integers", "fp8": "8-bit floats"},
    "held": {"unconstrained": "a free search", "valid": "a search held to the catalog"},
    "than": {"float32": "jgr in float32", "best-peer": "the fastest other engine in bfloat16"},
    "which": {"first-": ", where nothing was kept before"},
    "part": {
        "weights": "Memory of the weights",
        "load-peak": "Most memory while weights are read",
        "prompt-time": "Time of a prompt of 512 tokens",
        "step-time": "Time of a search's step with 128 beams",
    },
    "chooser": {"tree": "a decision tree", "heuristic": "jgr's rule"},
    "selection": {
        "top_k": "XLA's top-k",
        "torch": "PyTorch's top-k",
        "argpartition": "NumPy's argpartition",
    },
    "trained": {"sasrec": "SASRec", "hstu": "HSTU"},
    "trainer": {
        "pytorch": "the fastest plain PyTorch form",
        "recbole": "RecBole",
        "defaults": "jgr with the C library's memory as it is",
    },
    "what": {"steps": "by steps a second", "targets": "by learnt targets a second"},
    "endpoint": {"rank": "/v1/rank", "recommend": "/v1/recommend"},
}
"""Plain words for parts of ids, by the name of the pattern's group (without the digits at its end)."""

_SKEW = r"-at-(?P<skew>\d+)-percent-skew"
_SKEWED = "{skew} % of accesses go to a tenth of the items"

TITLES: tuple[tuple[str, str], ...] = (
    # aiperf_check
    (
        r"difference-of-(?P<measure>p50|p99|rate)-from-aiperf-at-(?P<rate>\d+)-per-s",
        "Distance of jgr's load client from NVIDIA AIPerf in {measure}, at {rate} requests a second (share)",
    ),
    # bat_ablation, bat_accuracy, bat_throughput
    (
        r"(?P<bat1>abc|a)-over-(?P<bat2>ab|ac|a|none)-books-(?P<items>280k|1m)-(?P<users>all|returning)-users"
        r"-paper-(?P<paper>[\d.]+)",
        "Requests per second of {bat1} over {bat2} (paper: {paper}); {items} books, {users}",
    ),
    (
        r"ratios-below-one-of-the-ablation-(?P<users>all|returning)-users" + _SKEW,
        "How many of the ten speed-ups by BAT's parts are below 1; {users}, " + _SKEWED,
    ),
    (
        r"(?P<data>\w+)-recall@10-of-the-item-prefix-less-that-of-the-user-prefix",
        "Change of Recall@10 where candidates stand before the user and not behind; {data}",
    ),
    (
        r"library-coverage-of-held-out-reviews-(?P<count>\d+)-words",
        "Share of held-out reviews' tokens with a prototype at a cosine of .99; random weights, a tokenizer of {count}",
    ),
    (
        r"library-search-finds-of-held-out-tokens-(?P<count>\d+)-words",
        "Share of the near prototypes of held-out tokens that the search finds; a tokenizer of {count}",
    ),
    (
        r"library-search-finds-of-noisy-tokens-(?P<count>\d+)-words",
        "Share of the near prototypes of noisy embeddings that the search finds; a tokenizer of {count}",
    ),
    (
        r"bat-over-up-on-the-best-workload" + _SKEW,
        "Requests per second of BAT over always the user first, where it gains most; " + _SKEWED,
    ),
    (
        r"bat-over-re-on-the-best-workload" + _SKEW,
        "Requests per second of BAT over caching nothing, where it gains most; " + _SKEWED,
    ),
    (
        r"bat-share-of-tokens-reused-on-the-best-workload" + _SKEW,
        "Share of prompt tokens that BAT takes from its cache, where that is most; " + _SKEWED,
    ),
    (
        r"bat-computed-tokens-over-the-better-of-up-and-ip" + _SKEW,
        "Tokens BAT computes over those of the better fixed order, where it is worst; " + _SKEWED,
    ),
    (
        r"workloads-on-which-bat-is-slower-than-the-better" + _SKEW,
        "Workloads on which BAT is slower than the better fixed order; " + _SKEWED,
    ),
    # rcllm_ttft
    (
        r"rcllm-of-what-its-plan-allows-(?P<layers>\d+)-layers-(?P<tokens>\d+)-tokens",
        "RcLLM's gain over full recompute at r = .3, over what its plan allows; {layers} layers, {tokens} tokens",
    ),
    (
        r"rcllm-p99-faster-at-(?P<share>\d)-of-prefix-capacity",
        "P99 of the prefix cache over that of RcLLM at r = .3, at {share} tenths of the prefix cache's capacity",
    ),
    (
        r"rcllm-with-all-computed-anew-from-the-whole-prompt",
        "Largest difference of a score of RcLLM at r = 1 from the prompt computed whole",
    ),
    # beam_attention, beam_memory, beam_vs_peers, beam_width, early_termination
    (r"beam-attention-forms-differ-by", "Largest difference between the results of all forms of beam attention"),
    (
        r"time-of-beams-as-sequences-over-staged-beam-(?P<beams>\d+)-prompt-(?P<tokens>\d+)",
        "Time of attention with a copy of the prompt for each beam, over jgr's; {beams} beams, {tokens} tokens",
    ),
    (
        r"time-of-tree-mask-over-staged-beam-(?P<beams>\d+)-prompt-(?P<tokens>\d+)",
        "Time of attention with all beams in one masked sequence, over jgr's; {beams} beams, {tokens} tokens",
    ),
    (
        r"prompt-kv-bytes-beside-the-formula",
        "Bytes of keys and values that differ from the formula, in a compiled 4B generator",
    ),
    (r"memory-unexplained", "Largest share of a compiled 4B generator's device memory that nothing explains"),
    (
        r"memory-of-a-4b-model-prompt-(?P<tokens>\d+)-beam-(?P<beams>\d+)",
        "Device memory of a 4B generator, compiled for an H200 and not run (target: xGR under load); {tokens} tokens, "
        "{beams} beams",
    ),
    (r"beam-search-peers-missing(-51m)?", "Engines to compare with that could not be run (beam search)"),
    (r"beam-searches-that-differ-from-a-peer(-51m)?", "Beam searches that find other items than another engine's"),
    (
        r"score-difference-from-a-peer(-51m)?",
        "Largest difference of a score from another engine's for the same model",
    ),
    (
        r"least-time-of-any-peer-over-jgr(?P<size>(-51m)?)",
        "Time of the fastest other engine over jgr's, in the beam search where it comes nearest{size}",
    ),
    (
        r"least-time-between-profiles(?P<size>(-51m)?)",
        "The same for a prompt of 700 tokens, which lies between the shapes of 512 and 1,024 that jgr compiled{size}",
    ),
    (
        r"time-of-(?P<peer>\w+)-over-jgr-(?P<search>\w+)-prompt-(?P<tokens>\d+)-beam-(?P<beams>\d+)"
        r"(?P<size>(-51m)?)",
        "Time of {peer} over jgr's for {search}; {tokens} tokens, {beams} beams{size}",
    ),
    (r"latency-of-beam-400-over-beam-10", "Latency of a search with 400 beams over that with 10"),
    (r"early-termination-equals-the-sort", "Whether the early end of the search finds what a full sort finds (1: yes)"),
    (
        r"share-of-candidates-visited-by-the-heap",
        "Share of the candidates of a beam step that the paper's heap looks at",
    ),
    (
        r"time-of-a-full-sort-over-early-termination-on-the-device",
        "Time of sorting all candidates of a beam step, over jgr's choice of the best",
    ),
    (
        r"time-of-top-k-over-early-termination-on-the-device",
        "Time of the compiler's own top-k over a beam step's candidates, over jgr's",
    ),
    (r"selections-agree", "Whether all ways to choose a beam step's best candidates choose the same (1: yes)"),
    (
        r"share-of-candidates-ranked-on-the-device",
        "Share of the candidates of a beam step that jgr ranks on the device",
    ),
    (
        r"time-of-the-fastest-other-selection-over-jgrs",
        "Time of the fastest other top-k (XLA, PyTorch, NumPy) over a beam step's candidates, over jgr's; worst case",
    ),
    (
        r"time-of-(?P<selection>\w+)-over-jgrs-selection",
        "Time of {selection} over a beam step's candidates, over jgr's; worst case",
    ),
    # cached_recommend, catalog_scaling, cost_model, device_busy
    (
        r"cached-recommend-speedup",
        "Time of a recommendation without a cache over that with a cached history of 128 tokens or more",
    ),
    (
        r"cached-recommend-short-speedup",
        "Time of a recommendation without a cache over that with a cached history of 54 tokens",
    ),
    (
        r"time-constrained-over-unconstrained-at-every-catalog-size",
        "Time of a search held to the catalog over a free one, worst of 10,000 to 10 million items",
    ),
    (
        r"time-constrained-over-unconstrained-one-prefix-with-all-children",
        "Time of a search held to the catalog over a free one, where one prefix has all items",
    ),
    (
        r"load-and-tree-of-(?P<n>[\d.]+)-million-items",
        "Time to load a catalog of {n} million items and build its prefix tree",
    ),
    (
        r"cost-model-(?P<model>\w+)-held-out-error",
        "Mean error of predicted run times for shapes that were not measured; {model}",
    ),
    (
        r"device-busy-at-(?P<ms>\d+)-ms-a-batch",
        "Share of the time that a saturated device is busy, where a batch takes {ms} ms",
    ),
    (
        r"real-over-padded-tokens-in-a-mixed-queue",
        "Share of computed tokens that were asked for, where long and short requests mix",
    ),
    # flame_dso, flame_fke, flame_pda
    (
        r"dso-throughput-over-power-of-two-uniform-mix",
        "Pairs scored per second by executors of fixed sizes over padding to powers of two; any size",
    ),
    (
        r"dso-p99-to-power-of-two-worse-mix",
        "99th percentile of latency of executors of fixed sizes over padding to powers of two",
    ),
    (
        r"dso-throughput-with-cached-users-over-power-of-two-uniform-mix",
        "Pairs scored per second by executors that keep users over padding to powers of two; any size",
    ),
    (
        r"dso-throughput-over-power-of-two-four-sizes",
        "Pairs scored per second by executors of fixed sizes over padding to powers of two; four sizes",
    ),
    (
        r"dso-mean-latency-of-power-of-two-over-dso-four-sizes",
        "Mean latency of padding to powers of two over executors of fixed sizes; four sizes",
    ),
    (r"climber-builds-differ-by", "Largest difference between the scores of Climber's three builds"),
    (
        r"fused-over-op-by-op-throughput-(?P<workload>base|long)",
        "Pairs scored per second by one fused program over one operation at a time; {workload}",
    ),
    (
        r"fused-climber-share-of-matmul-peak-(?P<workload>base|long)",
        "Share of the machine's matrix-product rate that served Climber reaches; {workload}",
    ),
    (
        r"share-of-roofline-of-(?P<stage>.+)-(?P<workload>base|long)",
        "Share of the device's limit that the stage {stage} reaches; {workload}",
    ),
    (r"fused-pairs-per-s-long", "Pairs scored per second by the fused Climber on FLAME's long workload"),
    (
        r"pda-throughput-over-no-cache-at-equal-cpu-load",
        "Pairs scored per second with the feature cache over those without, at equal CPU load",
    ),
    (
        r"pda-mean-latency-of-no-cache-over-full",
        "Mean latency without the feature cache over that with it and packed transfers",
    ),
    # golden_parity, goodput
    (
        r"hstu-largest-error-of-(?P<n>\d+)-golden-arrays",
        "Largest difference of our HSTU from its authors' code over {n} arrays",
    ),
    (
        r"(?P<model>\w+)-largest-error-of-(?P<n>\d+)-golden-arrays",
        "Largest difference of our {model} from Hugging Face transformers over {n} arrays",
    ),
    (
        r"goodput-share-in-virtual-time",
        "Answers in time over what the server can do, worst of loads from half to three times; simulated",
    ),
    (
        r"goodput-share-of-two-lengths-in-virtual-time",
        "Answers in time over what the server can do, with short and long prompts mixed; simulated",
    ),
    (
        r"goodput-share-when-runs-are-disturbed",
        "Answers in time over what the server can do, where one run in a hundred takes three times as long; simulated",
    ),
    (
        r"bursts-over-the-clairvoyant-planner",
        "Answers in time under bursts over those of a planner that knows all arrivals; simulated",
    ),
    (r"wasted-device-time", "Largest share of the device's time spent on answers that came too late; simulated"),
    (r"accepted-and-late", "Largest share of accepted requests that were answered too late; simulated"),
    (
        r"refused-share-of-a-length-over-the-mean",
        "How much more often the worst-treated length of prompts is refused than the mean; simulated",
    ),
    (
        r"goodput-share-of-(?P<served>\w+)-over-http",
        "Answers in time over what the server can do, worst of all loads, over HTTP; {served}",
    ),
    (
        r"wasted-device-time-of-(?P<served>\w+)-over-http",
        "Largest share of the device's time that no answer came of, over HTTP; {served}",
    ),
    (
        r"answers-of-(?P<served>\w+)-that-are-in-time",
        "Share of the answers to accepted requests that come in time, over HTTP; {served}",
    ),
    (
        r"goodput-share-of-(?P<served>\w+)-over-http-with-a-core-for-the-host",
        "Answers in time over what the server can do, worst of loads, over HTTP, a core left to the server; {served}",
    ),
    (
        r"wasted-device-time-of-(?P<served>\w+)-over-http-with-a-core-for-the-host",
        "Largest share of the device's time that no answer came of, over HTTP, a core left to the server; {served}",
    ),
    (
        r"answers-of-(?P<served>\w+)-that-are-in-time-with-a-core-for-the-host",
        "Share of the answers to accepted requests that come in time, over HTTP, a core left to the server; {served}",
    ),
    # first_answer
    (
        r"seconds-to-the-first-answer-cold-(?P<model>\w+)",
        "Seconds from the start of the server's process to its first answer, nothing compiled before; {model}",
    ),
    (
        r"seconds-to-the-first-answer-warm-(?P<model>\w+)",
        "Seconds from the start of the server's process to its first answer, programs read from disk; {model}",
    ),
    (r"first-answer-after-ready", "Time from ready to the first answer"),
    (r"serving-install-beside-jax", "Size of an install that serves, beside jax and what jax needs"),
    # large_models
    (
        r"large-catalog-over-small-(?P<shape>[\w.-]+?)-(?P<tokens>\d+)-tokens-(?P<beams>\d+)-beams",
        "Latency with 10 million items over that with 12,000; random {shape} on a CPU, {tokens} tokens, {beams} beams",
    ),
    (
        r"filter-exclude-over-none-(?P<shape>[\w.-]+?)-(?P<tokens>\d+)-tokens-(?P<beams>\d+)-beams",
        "Latency with 1,000 items excluded over that with no filter; 10 million items, random {shape}, "
        "{tokens} tokens, {beams} beams",
    ),
    (
        r"filter-segment-over-none-(?P<shape>[\w.-]+?)-(?P<tokens>\d+)-tokens-(?P<beams>\d+)-beams",
        "Latency with a tenth of the catalog allowed over that with no filter; 10 million items, random {shape}, "
        "{tokens} tokens, {beams} beams",
    ),
    (
        r"unexplained-memory-share-(?P<shape>[\w.-]+)",
        "Memory of a server of 10 million items that nothing explains, over weights and catalog; random {shape}",
    ),
    (
        r"peak-memory-(?P<shape>[\w.-]+)",
        "Most memory of a server of 10 million items until it is ready; random {shape} in float32",
    ),
    (
        r"memory-growth-share-8-in-flight-(?P<shape>[\w.-]+)",
        "Memory that 8 requests in flight take, over weights and catalog of 10 million items; random {shape}",
    ),
    (
        r"first-answer-large-model-cold-(?P<shape>[\w.-]+)",
        "Seconds from a server's start to its first answer, 10 million items, nothing compiled before; random {shape}",
    ),
    (
        r"first-answer-large-model-warm-(?P<shape>[\w.-]+)",
        "Seconds from a server's start to its first answer, 10 million items, programs read from disk; random {shape}",
    ),
    (
        r"large-model-score-difference-from-rank-(?P<shape>[\w.-]+)",
        "Largest difference of a search's scores from those of ranking its items, over HTTP; random {shape}",
    ),
    (r"large-model-points-left-out", "Points of the large models that were left out for want of time"),
    # h200_serving, hostile, hstu_attention, kernel_configuration
    (r"h200-score-difference-from-rank", "Largest difference of a search's score from ranking the same item; H200"),
    (r"h200-kernels-checked", "Cases of ops that were compared with their plain form in float32 on an H200"),
    (r"h200-kernels-largest-distance-over-limit", "Largest distance of an op from its plain form over the limit; H200"),
    (r"h200-kernels-slowest-over-xla", "Time of the slowest kernel over that of XLA's form of the same op; H200"),
    (r"h200-items-shared-with-pytorch", "Least share of 256 items that PyTorch's search finds too; H200, bfloat16"),
    (
        r"h200-http-score-difference-from-rank",
        "Largest difference of a search's score from ranking the same item, over HTTP; H200, bfloat16",
    ),
    (
        r"h200-http-one-request-in-flight",
        "Time of a request over HTTP on an H200, one in flight; Qwen3-1.7B, 1,000 tokens, 256 beams",
    ),
    (
        r"h200-http-answers-a-second",
        "Answers a second over HTTP on one H200; Qwen3-1.7B, 1,000 tokens, 256 beams",
    ),
    (
        r"h200-http-goodput-share",
        "Answers in time over what the server can do, worst of loads of .9 to 3 times it, over HTTP; H200",
    ),
    (
        r"h200-http-in-time",
        "Least share of accepted requests that were answered within their deadline, over HTTP; H200",
    ),
    (
        r"h200-time-over-least-beam-(?P<beams>\d+)-prompt-(?P<tokens>\d+)-batch-(?P<batch>\d+)",
        "A constrained search's time on an H200 over the least that its work takes there; {beams} beams, "
        "{tokens} tokens, batch of {batch}",
    ),
    (
        r"h200-pytorch-time-over-jgr-beam-(?P<beams>\d+)-prompt-(?P<tokens>\d+)-batch-(?P<batch>\d+)",
        "Time of the same search in PyTorch (plain or compiled, the faster), in one CUDA graph, over jgr's on an H200; "
        "{beams} beams, {tokens} tokens, batch of {batch}",
    ),
    (
        r"h200-constrained-beam-(?P<beams>\d+)-prompt-(?P<tokens>\d+)-batch-(?P<batch>\d+)",
        "Time of a constrained search on an H200 (target: another engine's, unconstrained, on an H100); {beams} beams, "
        "{tokens} tokens, batch of {batch}",
    ),
    (
        r"hostile-unasked-5xx-or-hang-ups",
        "Server errors and broken connections under hostile requests, beyond those that were asked for",
    ),
    (r"hostile-doors-requests", "Mutated requests over every endpoint, HTTP and gRPC"),
    (
        r"hostile-doors-unasked-5xx-internal-or-hang-ups",
        "Server errors, gRPC's INTERNAL and broken connections under mutated requests, beyond those asked for",
    ),
    (
        r"hostile-doors-answers-that-the-document-has-not",
        "Answers to mutated requests with a status that /openapi.json does not name",
    ),
    (
        r"hostile-doors-answers-without-the-right-key-or-origin",
        "Mutated requests that were answered without the key, role or origin that they need",
    ),
    (
        r"hostile-doors-keys-in-answers-log-metrics-or-ps",
        "Places in answers, log, metrics and process list where a key was seen under mutated requests",
    ),
    (
        r"hostile-doors-wrong-scores",
        "Known requests that were answered with other scores between mutated ones",
    ),
    (
        r"hostile-doors-longest-wait-of-a-health-probe",
        "Longest wait of a health probe from a connection of its own, under mutated and large requests",
    ),
    (r"hostile-doors-tracebacks-in-the-log", "Tracebacks in the server's log after mutated requests"),
    (
        r"hostile-doors-memory-growth-after-the-first-tenth",
        "Growth of the server's memory under mutated requests after their first tenth",
    ),
    (r"hostile-tracebacks-in-the-log", "Tracebacks in the server's log after hostile requests"),
    (r"hostile-wrong-scores", "Known requests that were answered with other scores between hostile ones"),
    (
        r"hostile-memory-growth-after-the-first-tenth",
        "Growth of the server's memory under hostile requests after their first tenth",
    ),
    (
        r"hostile-journals-ended-by-a-full-disk",
        "Journals that a full disk ended while the server went on serving",
    ),
    (r"hstu-attention-forms-differ-by", "Largest difference between the results of all forms of HSTU's attention"),
    (
        r"time-of-plain-attention-over-ours-(?P<tokens>\d+)-tokens",
        "Time of HSTU's attention in plain jax.numpy over jgr's; {tokens} tokens of history",
    ),
    (
        r"temporary-bytes-a-pair-(?P<tokens>\d+)-tokens",
        "Temporary bytes of HSTU's attention for each pair of tokens; {tokens} tokens of history",
    ),
    (
        r"gradient-temporary-bytes-a-pair-(?P<tokens>\d+)-tokens",
        "Temporary bytes of the gradient of HSTU's attention for each pair of tokens; {tokens} tokens of history",
    ),
    (
        r"regret-of-the-(?P<chooser>tree|heuristic)-on-held-out-shapes",
        "Time lost by choosing attention's block size by {chooser} and not by trial (share)",
    ),
    (
        r"largest-regret-of-the-(?P<chooser>tree|heuristic)",
        "Time lost by choosing attention's block size by {chooser} and not by trial, where it is most (share)",
    ),
    # prefill_vs_peers
    (r"prefill-peers-missing(-51m)?", "Engines to compare with that could not be run (first token of a prompt)"),
    (
        r"first-tokens-that-differ-from-a-peer(-51m)?",
        "Prompts whose first output token differs from another engine's",
    ),
    (
        r"prefill-time-over-best-peer-prompt-(?P<tokens>\d+)-batch-(?P<batch>\d+)(?P<size>(-51m)?)",
        "Time to the first token over the fastest other engine's, with the kernels of `make native`; {tokens} tokens, "
        "batch of {batch}{size}",
    ),
    # bfloat16
    (r"bfloat16-peers-missing", "Other engines that the comparison in bfloat16 lacks"),
    (
        r"overlap@10-of-bfloat16-with-float32",
        "Share of the ten best items in bfloat16 on a CPU that are float32's ten best; Amazon Industrial",
    ),
    (
        r"ndcg@10-of-bfloat16-over-float32",
        "NDCG@10 in bfloat16 on a CPU over that in float32; Amazon Industrial",
    ),
    (
        r"bfloat16-time-of-(?P<than>float32|best-peer)-over-jgr-prompt-(?P<tokens>\d+)-batch-(?P<batch>\d+)",
        "Time to the first token of {than} over jgr's in bfloat16, on a CPU with AMX; {tokens} tokens, batch of "
        "{batch}",
    ),
    (
        r"bfloat16-time-of-(?P<than>float32|best-peer)-over-jgr-(?P<held>unconstrained|valid)-search-(?P<tokens>\d+)"
        r"-beams-(?P<width>\d+)",
        "Time of {held} of {than} over jgr's in bfloat16, on a CPU with AMX; {tokens} tokens, {width} beams",
    ),
    # quantized_weights
    (
        r"overlap@10-of-(?P<kind>int8|fp8)-with-float32",
        "Share of the ten best items with weights in {kind} that are float32's ten best; Amazon Industrial",
    ),
    (
        r"ndcg@10-of-(?P<kind>int8|fp8)-over-float32",
        "NDCG@10 with weights in {kind} over that with float32; Amazon Industrial",
    ),
    (
        r"(?P<part>weights|load-peak|prompt-time|step-time)-of-(?P<kind>int8|fp8)-over-float32-(?P<size>\d+)m",
        "{part}: weights in {kind} over float32, {size} M parameters",
    ),
    # quantized_kv
    (
        r"(?P<which>(first-)?)overlap@10-of-kept-(?P<kind>int8|fp8)-with-float32",
        "Share of the ten best items with keys and values kept in {kind} that are float32's ten best{which}; Amazon "
        "Industrial",
    ),
    (
        r"ndcg@10-of-kept-(?P<kind>int8|fp8)-over-float32",
        "NDCG@10 of answers that read keys and values kept in {kind} over that with float32; Amazon Industrial",
    ),
    (
        r"bytes-of-kept-(?P<kind>int8|fp8)-over-float32",
        "Bytes of a kept token in {kind} over float32, heads of 32 numbers",
    ),
    (
        r"hit-time-of-kept-(?P<kind>int8|fp8)-over-float32-(?P<tokens>\d+)-tokens",
        "Time of a recommendation, all but one of whose tokens are cached: {kind} over float32; {tokens} cached tokens",
    ),
    (
        r"reused-tokens-of-kept-int8-over-float32-kuairand",
        "Share of the prompts' tokens that are reused with users kept in 8 bits over float32, in equal memory; "
        "KuaiRand-Pure's users",
    ),
    # rcllm_accuracy
    (
        r"rcllm-prefix-cache-keeps-of-full-(?P<data>\w+)",
        "NDCG@10 of ranking with a prefix cache as a share of that without, on {data}",
    ),
    (
        r"rcllm-keeps-of-full-ndcg10-items-(?P<data>\w+)",
        "NDCG@10 of RcLLM over full recompute's, on {data}; .3 of the candidates' tokens and both ends of each are "
        "computed",
    ),
    (
        r"rcllm-keeps-of-full-ndcg10-items-and-texts-(?P<data>\w+)",
        "NDCG@10 of RcLLM over full recompute's, on {data}; .3 of the candidates, their ends and .3 of the history are "
        "computed",
    ),
    (
        r"rcllm-ndcg10-less-(?P<method>epic|cacheblend)-(?P<data>\w+)",
        "Lowest NDCG@10 of RcLLM less that of {method} at equal token-layers, within the interval, on {data}",
    ),
    # rcllm_placement
    (
        r"rcllm-placement-cut-below-random-(?P<cutby>metis|numpy)",
        "Edges between 40 nodes that a hash of the item cuts, over those that {cutby} cuts; planted communities",
    ),
    (
        r"rcllm-placement-cut-over-planted-(?P<cutby>metis|numpy)",
        "Edges between 40 nodes that {cutby} cuts, over those between the planted communities",
    ),
    (
        r"rcllm-placement-imbalance-planted",
        "What the fullest of 40 nodes has more than the mean one, of accesses or of tokens; planted communities",
    ),
    (
        r"rcllm-placement-hit-share-planted-(?P<cutby>metis|numpy)",
        "Share of a request's 20 candidates on the best of 40 nodes, parted by {cutby}; planted communities",
    ),
    (
        r"rcllm-placement-hit-share-(?P<data>\w+)-(?P<cutby>metis|numpy)-over-hash",
        "Share of a request's 20 candidates on the best of 40 nodes, parted by {cutby}, over a hash; {data}",
    ),
    # quality_*
    (r"(?P<data>\w+)-test-(?P<metric>hr@10|ndcg@10)-of-sequential-rules", "{metric}; sequential rules on {data}"),
    (
        r"hstu-counting-(?P<data>\w+)-test-(?P<metric>hr@10|ndcg@10)-above-sequential-rules",
        "{metric}: lower end of what HSTU is above sequential rules; {data}",
    ),
    (
        r"hstu-counting-(?P<data>\w+)-test-(?P<metric>hr@10|ndcg@10)-of-the-fusion-above-rules",
        "{metric}: lower end of what HSTU fused with rules is above the rules; {data}",
    ),
    (
        r"hstu-counting-(?P<data>\w+)-test-(?P<metric>hr@10|ndcg@10)-of-the-fusion-above-the-model",
        "{metric}: lower end of what HSTU fused with rules is above HSTU; {data}",
    ),
    (
        r"hstu-counting-(?P<data>\w+)-fused-with-rules-test-(?P<metric>hr@10|ndcg@10)-over-http",
        "{metric}; HSTU fused with sequential rules on {data}",
    ),
    (
        r"hstu-counting-(?P<data>\w+)-test-(?P<metric>hr@10|ndcg@10)-over-http",
        "{metric}; HSTU by one recipe on {data}",
    ),
    (
        r"informed-(?P<data>\w+)-test-(?P<metric>hr@10|ndcg@10)-above-sequential-rules",
        "{metric}: lower end of HSTU with texts minus sequential rules; {data}",
    ),
    (
        r"informed-(?P<data>\w+)-test-(?P<metric>hr@10|ndcg@10)-of-the-fusion-above-rules",
        "{metric}: lower end of HSTU with texts and rules minus rules; {data}",
    ),
    (
        r"informed-(?P<data>\w+)-test-(?P<metric>hr@10|ndcg@10)-of-the-fusion-above-the-model",
        "{metric}: lower end of HSTU with texts and rules minus HSTU; {data}",
    ),
    (
        r"informed-(?P<data>\w+)-fused-with-rules-test-(?P<metric>hr@10|ndcg@10)-over-http",
        "{metric}; HSTU with the items' texts, fused with sequential rules, on {data}",
    ),
    (
        r"informed-(?P<data>\w+)-test-(?P<metric>hr@10|ndcg@10)-over-http",
        "{metric}; HSTU with the items' texts on {data}",
    ),
    (
        r"(?P<model>(?!hstu-counting-|informed-)[\w-]+)-test-(?P<metric>hr@10|ndcg@10)-above-sequential-rules",
        "{metric}: lower end of {model} minus sequential rules",
    ),
    (
        r"(?P<model>(?!hstu-counting-|informed-)[\w-]+)-test-(?P<metric>hr@10|recall@10|ndcg@10)-over-http",
        "{metric}; {model}",
    ),
    (
        r"(?P<model>[\w-]+)-invalid-items-with-the-constraint",
        "Share of the recommended ids that name no item; {model}",
    ),
    (
        r"kuairand-(?P<task>\w+)-test-auc-over-http-against-logistic",
        "AUC of Climber's prediction of {task} on KuaiRand (target: a logistic regression)",
    ),
    # routing_decision, routing_simulated
    (
        r"routing-decision-(?P<quantile>p50|p99)",
        "{quantile} of the time in which a router chooses among 100 nodes for a request of 100 candidates",
    ),
    # hlem_controller
    (
        r"hlem-controller-ordered-regimes",
        "Regimes of traffic in which the gaps to the best split are ordered as in HLEM's paper, in a model of epochs",
    ),
    (
        r"hlem-controller-gap-(?P<regime>steady|trend|burst)",
        "Distance of the whole controller's split from the best one, {regime} traffic, in a model of epochs",
    ),
    (
        r"hlem-controller-p99-over-best-static-(?P<regime>steady|trend|burst)",
        "P99 with the whole memory controller over that of the best static split, {regime} traffic, modelled",
    ),
    (
        r"hlem-controller-p99-over-worst-static-(?P<regime>steady|trend|burst)",
        "P99 with the whole memory controller over that of the worst static split, {regime} traffic, modelled",
    ),
    (
        r"hlem-controller-seeds-above-half",
        "Trainings in which PPO beats the split .5 within 100 rounds of 16 pools, in a model of epochs",
    ),
    (
        r"hlem-controller-false-alarms",
        "Share of the epochs of steady traffic in which the memory controller takes noise for a burst",
    ),
    (r"hlem-controller-decision-us", "Median CPU time of one decision of the whole memory controller, in NumPy"),
    (r"hlem-controller-epochs", "Epochs of the memory model in a second of CPU time, 256 pools side by side"),
    # hlem_border
    (
        r"hlem-border-to-rows-us-a-page",
        "Time to move a page of memory from kept users to embedding rows, both full; median of moves of 4 %",
    ),
    (
        r"hlem-border-to-users-us-a-page",
        "Time to move a page of memory from embedding rows to kept users, both full; median of moves of 4 %",
    ),
    (r"hlem-border-copies", "Programs that ran for moves of the border between embedding rows and kept users"),
    (
        r"hlem-border-p99-moving",
        "P99 of requests while the border of the memory moves by 4 % every 10 ms, over that of requests without moves",
    ),
    (
        r"hlem-border-p99-(?P<how>throttled|unthrottled)-refill",
        "P99 of requests while new pages are filled over an emulated link, {how}, over that without filling them",
    ),
    # hlem_table
    (r"hlem-table-gb", "Size of the table of embeddings that is served from its file"),
    (r"hlem-table-device-mb", "Device memory for the rows of a table of embeddings that is served from its file"),
    (r"hlem-table-wrong-answers", "Answers whose scores differ from those of embeddings computed anew, of 400"),
    # hlem_split
    (
        r"hlem-split-from-the-ends-(?P<link>slow|fast)",
        "Distance of the best split of the memory from the nearer end that was tried, {link} emulated link",
    ),
    (
        r"hlem-split-wrong-over-best-(?P<link>slow|fast)",
        "P99 with the worst split of the memory over that with the best one, steady traffic, {link} emulated link",
    ),
    (
        r"hlem-split-full-over-worst-third-(?P<regime>steady|trend|burst)",
        "P99 with the whole memory controller over that of the worst third of fixed ones, {regime}, virtual time",
    ),
    (
        r"hlem-split-full-over-best-static-(?P<regime>steady|trend|burst)",
        "P99 with the whole memory controller over that of the best fixed split, {regime} traffic, virtual time",
    ),
    (
        r"hlem-split-modelled-over-best",
        "P99 at the split that the model of epochs calls best over that at the best one that was served, virtual time",
    ),
    (
        r"hlem-split-separate-over-fused",
        "P99 with 24 tables of embeddings apart over that with all fused into one, split .5, virtual time",
    ),
    # hlem_routing
    (
        r"hlem-routing-p99-over-(?P<rule>kv-only|emb-only|least|random)-(?P<regime>steady|burst)",
        "P99 with users and rows in a router's score over that of {rule} routing, {regime} traffic, virtual time",
    ),
    (
        r"routing-simulated-tokens-over-hit-only",
        "Tokens computed for an answer, with load in a router's score over those without it; worst case, simulated",
    ),
    (
        r"routing-simulated-p99-over-load-only",
        "99th percentile of latency by a router's whole score over that by load alone; worst case, simulated",
    ),
    (
        r"routing-simulated-imbalance",
        "The most over the mean of the work in flight at eight nodes, averaged over time; worst case, simulated",
    ),
    # fleet_items, fleet_faults, fleet_equality, fleet_scaling, fleet_overload
    (
        r"fleet-items-bytes-against-prediction",
        "The largest share by which a link's bytes differ from what the placement predicts",
    ),
    (
        r"fleet-items-(?P<placed1>hrcs|replicate)-over-(?P<placed2>replicate|hash)-(?P<gbit>\d+)-gbit"
        r"-(?P<memory>large|small)",
        "Requests a second with {placed1}, over {placed2}; {gbit} Gb/s emulated, {memory} memory",
    ),
    (
        r"fleet-items-computed-(?P<placed1>replicate)-over-(?P<placed2>hrcs)-(?P<gbit>\d+)-gbit"
        r"-(?P<memory>large|small)",
        "Computed tokens with {placed1}, over {placed2}; {gbit} Gb/s emulated, {memory} memory",
    ),
    (r"fleet-scaling-grown", "Seconds of load until a fleet has one replica more"),
    (
        r"fleet-(?P<of>faults|equality|scaling|overload)-wrong",
        "Answers of a fleet that are not those of one engine; {of}",
    ),
    (r"fleet-(?P<of>faults|equality|scaling|overload)-lost", "Requests that a fleet has lost; {of}"),
    (
        r"fleet-overload-in-time",
        "Answers in time a second of a fleet asked by 40 callers at once, over those that 4 callers get",
    ),
    (r"fleet-overload-late", "Share of a fleet's answers that come after their deadline, asked by 40 callers at once"),
    (r"fleet-faults-not-whole", "Faults after which a fleet was not whole again within a minute"),
    (r"fleet-faults-missed", "Requests later than 2 s after a replica was killed that were not answered in time"),
    (r"fleet-faults-whole", "Seconds until a replica that was killed is replaced"),
    # server_overhead, soak, streams
    (
        r"null-engine-rank-throughput-16-connections",
        "Requests per second of the whole server around a model that computes nothing; 16 connections",
    ),
    (
        r"null-engine-rank-p50-overhead-1-connection",
        "Median latency of the whole server around a model that computes nothing; one connection",
    ),
    (
        r"(?P<endpoint>rank|recommend)-rate-over-other-commit-16-connections",
        "Requests per second of the server alone over those of an earlier commit; {endpoint}, 16 connections",
    ),
    (
        r"(?P<endpoint>rank|recommend)-p50-over-other-commit-1-connection",
        "Median latency of the server alone over that of an earlier commit; {endpoint}, one connection",
    ),
    (
        r"soak-memory-growth-upper-end",
        "Growth of a server's memory in an hour of traffic, upper end of its 95 % interval",
    ),
    (r"soak-wrong-answers", "Answers of an hour of traffic that differ when they are asked again alone"),
    (r"soak-answers-compared", "Answers of an hour of traffic that were asked again alone and compared"),
    (r"soak-unasked-refusals", "Requests of an hour of traffic that were refused without a reason"),
    (r"soak-pages-lost", "Pages of the cache that were lost in an hour of traffic"),
    (r"soak-programs-compiled-for-requests", "Programs compiled while a request waited, in an hour of traffic"),
    (
        r"soak-programs-compiled-without-a-change",
        "Programs compiled without a new model or catalog, in an hour of traffic",
    ),
    (r"soak-tracebacks-in-the-log", "Tracebacks in the server's log after an hour of traffic"),
    (
        r"second-stream-of-(?P<served>\w+)",
        "Answers per second with two programs at a time over one at a time; {served}",
    ),
    # training_speed
    (r"training-peers-missing", "Trainings to compare with that could not be run"),
    (
        r"training-loss-of-(?P<trained>sasrec|hstu)-less-that-of-pytorch",
        "Largest difference of {trained}'s first losses from PyTorch's with the same weights and batches",
    ),
    (r"training-loss-of-recbole-falls-by", "How far the loss of RecBole's training falls while it is timed"),
    (
        r"training-(?P<what>steps|targets)-per-s-of-(?P<trained>sasrec|hstu)-over-(?P<trainer>\w+)",
        "Speed of {trained}'s training by jgr over that by {trainer}, {what}",
    ),
    # xgr_throughput
    (r"xgr-throughput-peers-missing", "Engines to compare with that could not be run (rate under a limit)"),
    (
        r"xgr-throughput-rows-with-inexact-beams",
        "Systems that returned other items than jgr in the comparison of rates",
    ),
    (
        r"rate-over-(?P<peer>\w+)-at-least-common-p99-limit-beam-(?P<beams>\d+)",
        "jgr's highest rate in time over that of {peer}; {beams} beams (0: never shown to hold)",
    ),
)  # fmt: skip

_COMPILED = tuple((re.compile(pattern), text) for pattern, text in TITLES)


def title(claim: Mapping[str, Any]) -> str | None:
    """The plain words of a claim of a result file: its own title, else that of its id; None where there is none."""
    own = claim.get("title")
    if own:
        return str(own)
    for pattern, text in _COMPILED:
        found = pattern.fullmatch(claim["id"])
        if found:
            return text.format(**{name: _word(name, part) for name, part in found.groupdict().items()})
    return None


def shown(claim: Mapping[str, Any]) -> str:
    """The title of a claim, or the words of its id where it has none."""
    return title(claim) or str(claim["id"]).replace("-", " ")


def unit(claim: Mapping[str, Any]) -> str:
    """The unit of a claim's value, as it is shown: "times" for a ratio, "" for a share or a number."""
    return "times" if claim["unit"] == "x" else str(claim["unit"])


def _word(group: str, part: str) -> str:
    known = WORDS.get(group.rstrip("0123456789"), {})
    return known.get(part) or (f"{int(part):,}" if part.isdecimal() else part)
