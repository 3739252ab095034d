"""Every metric and span name, with unit, labels and buckets. Label values come from bounded sets."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class MetricKind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric. Counters end in _total; the unit is in the name."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    #: Upper bounds, in the name's unit; histograms only.
    buckets: tuple[float, ...] = ()


#: OpenTelemetry's gen_ai.server buckets.
_REQUEST_S = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 1, 2.5)
_STAGE_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_OVERHEAD_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.05, 0.25)


def _counter(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name=name, kind=MetricKind.COUNTER, help=help_text, labels=labels)


def _gauge(name: str, help_text: str, *labels: str) -> Metric:
    return Metric(name=name, kind=MetricKind.GAUGE, help=help_text, labels=labels)


def _histogram(name: str, help_text: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(
        name=name, kind=MetricKind.HISTOGRAM, help=help_text, labels=labels, buckets=buckets
    )


# -- every process --

BUILD_INFO = _gauge("moonpool_build_info", "1; the labels say what runs.", "version", "process")
EVENT_LOOP_LAG = _histogram(
    "moonpool_event_loop_lag_seconds", "How late the event loop wakes a sleeper.", _LAG_S
)
NATS_CONNECTED = _gauge("moonpool_nats_connected", "1 while the control bus is connected.")

BUS_LOST = _counter(
    "moonpool_bus_lost_messages_total",
    "Messages of the control bus that were lost here: unsent (it was away), dropped (they came faster than they were "
    "read), unreadable (announcements that are none).",
    "reason",
)

# -- router --

REQUESTS = _counter(
    "moonpool_requests_total",
    "Requests that ended, by HTTP or gRPC status and error code (empty if none).",
    "model", "endpoint", "status", "error_code",
)  # fmt: skip
QUEUE_REQUESTS = _gauge("moonpool_queue_requests", "Requests that wait for a worker.", "priority")
INFLIGHT_REQUESTS = _gauge("moonpool_inflight_requests", "Requests placed and not ended.")
TTFT = _histogram("moonpool_ttft_seconds", "Arrival to first token.", _TTFT_S, "model")
ITL = _histogram("moonpool_itl_seconds", "Gap between tokens of one answer.", _GAP_S, "model")
E2E = _histogram("moonpool_e2e_seconds", "Arrival to last token.", _REQUEST_S, "model")
STAGE = _histogram(
    "moonpool_stage_seconds",
    "The parts of the time to first token: tokenize, queue, worker_queue, prefill, deliver.",
    _STAGE_S, "stage",
)  # fmt: skip
PROMPT_TOKENS = _counter(
    "moonpool_prompt_tokens_total",
    "Prompt tokens of requests that drew a token and ended.",
    "model",
)
GENERATION_TOKENS = _counter("moonpool_generation_tokens_total", "Tokens sent to clients.", "model")
CACHED_TOKENS = _counter(
    "moonpool_actual_hit_tokens_total",
    "Prompt tokens that no worker had to compute, by where their KV lay: device, peer, store.",
    "model", "source",
)  # fmt: skip
PREDICTED_HIT_TOKENS = _counter(
    "moonpool_predicted_hit_tokens_total", "Prompt tokens that placement expected to find.", "model"
)
MISSED_TOKENS = _counter(
    "moonpool_missed_tokens_total",
    "Prompt tokens in full blocks that were computed: cold (never asked before), evicted (nobody held them any "
    "more), routed_away (who held them was not read from), too_slow (a peer held them, computing was sooner).",
    "model", "reason",
)  # fmt: skip
RECOMPUTED_HELD_TOKENS = _counter(
    "moonpool_recomputed_held_tokens_total",
    "Of the missed ones, those that a worker held all the while: routed_away, too_slow.",
    "model", "reason",
)  # fmt: skip
CEILING_HIT_TOKENS = _counter(
    "moonpool_ceiling_hit_tokens_total",
    "Prompt tokens that a cache that never forgets would have found.",
    "model",
)
ROUTE_DECISIONS = _counter(
    "moonpool_route_decisions_total", "Placements: local or remote prefill, and why.", "reason"
)
MIGRATIONS = _counter(
    "moonpool_migrations_total", "Requests that went on elsewhere after their first token.", "kind"
)
RETRIES = _counter(
    "moonpool_retries_total", "Attempts after the first, by what ended the last.", "reason"
)
CANCELLED = _counter("moonpool_cancelled_total", "Requests whose client went away.", "phase")
REJECTED = _counter("moonpool_rejected_total", "Requests refused at the door.", "reason")
WORKER_STATE = _gauge("moonpool_worker_state", "Workers known, by state.", "role", "state")
INDEX_BATCHES = _counter(
    "moonpool_index_batches_total",
    "Changes of workers' published blocks that came over the bus: read, unreadable.",
    "outcome",
)
INDEX_GAPS = _counter(
    "moonpool_index_gaps_total", "Times that a change of a worker's blocks was missing."
)
INDEX_MISMATCHES = _counter(
    "moonpool_index_mismatches_total",
    "Times that a worker's blocks differed from what the index had of them.",
)
INDEX_SNAPSHOTS = _counter(
    "moonpool_index_snapshots_total",
    "Snapshots asked of workers, by what came of it: loaded, failed.",
    "outcome",
)
INDEX_BLOCKS = _gauge(
    "moonpool_index_blocks", "Blocks that the index has of each worker.", "worker"
)

# -- workers --

KV_BLOCKS = _gauge(
    "moonpool_kv_blocks",
    "Blocks of the pool, by state: free, cached, active.",
    "tier",
    "state",
)
KV_PUBLISHED_BLOCKS = _gauge(
    "moonpool_kv_published_blocks", "Blocks that the worker has told of over the bus."
)
KV_EVENT_BATCHES = _counter(
    "moonpool_kv_event_batches_total",
    "Changes of the published blocks, by what became of them: sent, unsent.",
    "outcome",
)
KV_TRANSFER = _histogram(
    "moonpool_kv_transfer_seconds", "One read of KV from a peer.", _STAGE_S, "backend"
)
KV_TRANSFER_BYTES = _counter(
    "moonpool_kv_transfer_bytes_total", "KV bytes read from peers.", "backend"
)
KV_CHECKSUM_MISMATCH = _counter(
    "moonpool_kv_checksum_mismatch_total", "Blocks whose copy did not match its digest.", "backend"
)
KV_FETCHES = _counter(
    "moonpool_kv_fetches_total",
    "Prefixes that a peer was believed to hold, by what became of them: recompute (not asked), whole, "
    "short, absent, slow, damaged, refused, lost, cancelled.",
    "outcome",
)
KV_FETCH = _histogram(
    "moonpool_kv_fetch_seconds", "Reading a prefix from a peer, from the decision.", _STAGE_S
)
KV_FETCH_BLOCKS = _counter(
    "moonpool_kv_fetch_blocks_total", "Blocks read from peers instead of being computed."
)
KV_FETCH_BYTES = _counter("moonpool_kv_fetch_bytes_total", "KV of those blocks.")
KV_PREFIX_LOCKS = _gauge("moonpool_kv_prefix_locks", "Prefixes that are locked for readers.")
KV_OFFLOADS = _counter(
    "moonpool_kv_offloads_total",
    "Chains of blocks offered to stores, by what came of it: taken, held, refused, busy, failed.",
    "outcome",
)
KV_OFFLOAD_BLOCKS = _counter(
    "moonpool_kv_offload_blocks_total",
    "Blocks that stores took on reading (taken), and blocks that left the cache before a store was "
    "known to hold them (missed).",
    "outcome",
)
KV_OFFLOAD_CHAINS = _gauge(
    "moonpool_kv_offload_chains", "Chains that wait to be offered, or are: waiting, put.", "state"
)
KV_OFFLOAD_BREAKER = _gauge(
    "moonpool_kv_offload_breaker_open",
    "1 while a store is left alone since puts to it failed.",
    "store",
)
STEP = _histogram(
    "moonpool_step_seconds",
    "Engine step, by part: forward, logits, sample, other.",
    _STEP_S,
    "part",
)
STEP_OVERHEAD = _histogram(
    "moonpool_step_overhead_seconds",
    "From one step's tokens to the next one's, less forward, logits and sampler, by decodes in the step:"
    " 1-8, 9-64, 65-; chunks: steps with prompts.",
    _OVERHEAD_S,
    "batch",
)
STEP_TOKENS = _counter("moonpool_step_tokens_total", "Tokens computed by the engine.")
WORKER_REQUESTS = _gauge(
    "moonpool_worker_requests",
    "Attempts by state: running, waiting, reserved, prefill, quarantined.",
    "state",
)
QUEUED_TOKENS = _gauge("moonpool_queued_tokens", "Uncached tokens that wait to be computed.")
HANDOFFS = _gauge("moonpool_handoffs", "Handoffs under way, either side.")
HANDOFF_STREAMS = _gauge("moonpool_handoff_streams", "Open handoff streams, either side.")
PREEMPTIONS = _counter("moonpool_preemptions_total", "Requests whose blocks went to older ones.")
REFUSED_ATTEMPTS = _counter(
    "moonpool_refused_attempts_total", "Attempts that a worker refused.", "reason"
)
HANDED_BACK = _counter("moonpool_handed_back_total", "Attempts that a worker gave back.", "reason")

# -- stores --

STORE_BLOCKS = _gauge("moonpool_store_blocks", "Blocks that a store holds.", "tier")
STORE_BYTES = _gauge(
    "moonpool_store_bytes", "What a tier of a store holds (disk: its files), in bytes.", "tier"
)
STORE_CAPACITY = _gauge("moonpool_store_capacity_bytes", "What a tier may hold.", "tier")
STORE_PINNED_BLOCKS = _gauge("moonpool_store_pinned_blocks", "Blocks that are pinned.")
STORE_UNWRITTEN_BLOCKS = _gauge(
    "moonpool_store_unwritten_blocks", "Blocks that wait for the disk or are being written."
)
STORE_PUTS = _counter(
    "moonpool_store_puts_total",
    "Offers of chains, by what became of them: taken, known (all is there or on its way), draining, "
    "too_many_puts, no_room, over_quota.",
    "outcome",
)
STORE_EXPIRED_PUTS = _counter(
    "moonpool_store_expired_puts_total", "Offers that were taken and not read in time."
)
STORE_PUT_BLOCKS = _counter(
    "moonpool_store_put_blocks_total", "Blocks that were read from those who offered them."
)
STORE_LEAVING_BLOCKS = _counter(
    "moonpool_store_leaving_blocks_total",
    "Blocks that a store held when it left its ring: handed_over (other stores told that they have them), left "
    "(they did not in time, or never; some may lie elsewhere all the same).",
    "outcome",
)
STORE_GETS = _counter(
    "moonpool_store_gets_total",
    "Prefixes that readers asked for, by what they were lent: found, short (the disk was late, failed or "
    "there was no room), missed.",
    "outcome",
)
STORE_HIT_BLOCKS = _counter(
    "moonpool_store_hit_blocks_total",
    "Blocks that readers were lent, by the tier in which they lay.",
    "tier",
)
STORE_EVICTED_BLOCKS = _counter(
    "moonpool_store_evicted_blocks_total",
    "Blocks that left a tier for want of room: demoted (from memory, they lie on disk), lost (from memory, "
    "they lie nowhere), reclaimed (from disk).",
    "kind",
)
STORE_LOADED_BLOCKS = _counter(
    "moonpool_store_loaded_blocks_total",
    "Blocks read from disk into memory: ok, failed, bad.",
    "outcome",
)
STORE_WRITTEN_BLOCKS = _counter(
    "moonpool_store_written_blocks_total",
    "Blocks for the disk: ok, failed, unadmitted (seen too rarely for what is left of the budget).",
    "outcome",
)
STORE_DISK_BYTES = _counter(
    "moonpool_store_disk_bytes_total", "Bytes that went to and came from the disk.", "direction"
)
STORE_WRITE_BUDGET = _gauge(
    "moonpool_store_write_budget_bytes",
    "What may be written to the disk now; absent without a budget.",
)
STORE_BREAKER = _gauge(
    "moonpool_store_breaker",
    "Whether the disk is asked, for reads and writes: 0 closed (it is), 1 half open, 2 open.",
    "access",
)
STORE_DIRECTORY_FAILURES = _counter(
    "moonpool_store_directory_failures_total",
    "What went wrong with the directory in which store nodes find each other: call (not answered, or not in time), "
    "record (one that cannot be read).",
    "kind",
)
STORE_DISK_UP = _gauge(
    "moonpool_store_disk_up", "1 while the disk takes writes, 0 while it does not or is not there."
)

METRICS: tuple[Metric, ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Metric)
)

# -- spans: one trace per request --

#: The root: `chat <model>` or `text_completion <model>`.
SPAN_CHAT = "chat"
SPAN_COMPLETION = "text_completion"
SPAN_TOKENIZE = "tokenize"
SPAN_QUEUE = "queue"
SPAN_ATTEMPT = "attempt"
SPAN_PREFILL = "prefill"
SPAN_KV_TRANSFER = "kv.transfer"
SPAN_KV_FETCH = "kv.fetch"
SPAN_DECODE = "decode"

EVENT_FIRST_TOKEN = "first_token"
EVENT_LAYERS_VERIFIED = "layers_verified"
EVENT_PREEMPTED = "preempted"
EVENT_MIGRATED = "migrated"

ATTR_PROCESS = "moonpool.process"
ATTR_REQUEST_ID = "moonpool.request_id"
ATTR_ATTEMPT = "moonpool.attempt"
ATTR_WORKER = "moonpool.worker"
ATTR_BYTES = "moonpool.kv.bytes"
ATTR_BACKEND = "moonpool.kv.backend"
ATTR_REASON = "moonpool.reason"
#: JSON, of an attempt: every term of the candidates of each leg (moonpool_router/placement_facts.py).
ATTR_DECODE_CANDIDATES = "moonpool.decode_candidates"
ATTR_PREFILL_CANDIDATES = "moonpool.prefill_candidates"
ATTR_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ATTR_PEER_TOKENS = "moonpool.usage.peer_tokens"
ATTR_STORE_TOKENS = "moonpool.usage.store_tokens"
ATTR_INPUT_TOKENS = "gen_ai.usage.input_tokens"
ATTR_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ATTR_MODEL = "gen_ai.request.model"
ATTR_OPERATION = "gen_ai.operation.name"
ATTR_PROVIDER = "gen_ai.provider.name"
ATTR_ERROR = "error.type"
