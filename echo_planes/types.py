"""Every message that crosses a process boundary: frozen dataclasses, standard library and numpy only.

Units and shapes stand beside each field. Token positions count from 0 within a trajectory's response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]

# Of a trajectory. failed: its rollout, or its group, came to nothing; the others: of its reward, which took
# too long, raised, or was no reward.
Status = Literal["ok", "failed", "reward_timeout", "reward_error", "reward_invalid"]
Market = Literal["on_demand", "spot"]  # how a machine was bought; spot ones may be taken away
Codec = Literal["compact", "fast", "overwrite", "full"]  # see weights/codec/entry.py


# --- prompts and samples -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question put to the policy."""

    index: int  # position in the task's stream; the stream is a pure function of (seed, index)
    token_ids: tuple[int, ...]
    answer: str = ""  # whatever the task's reward needs, as text (JSON where it is more than one thing)
    text: str = ""  # for people: reports and logs


@dataclass(frozen=True, slots=True)
class Span:
    """A run of response tokens `[start, stop)` sampled under one published (version, digest)."""

    start: int
    stop: int
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Draw:
    """Rule by which tokens are drawn from the policy's logits."""

    temperature: float  # divides the logits; 0: always the likeliest token
    top_p: float  # nucleus: only tokens within this probability mass


@dataclass(frozen=True, slots=True)
class Sample:
    """Answer of the policy to one call of `Policy.generate`, or a piece of it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of each token, after temperature and top-p
    spans: tuple[Span, ...]  # cover token_ids exactly, in order
    finish_reason: Literal["stop", "length", "abort", ""]  # "": more is to come
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()  # per token, k pairs (token id, logprob)


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished answer: single-turn, or several turns joined with the environment's tokens between.

    `response_mask[i]` is True where token i was sampled by the policy, False where the environment wrote
    it (its logprob is then 0.0 and it belongs to the span of the token after it).
    """

    response_ids: tuple[int, ...]
    response_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]  # cover response_ids exactly, in order
    finish_reason: str
    text: str = ""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    num_turns: int = 1
    turn_rewards: tuple[float, ...] = ()  # of each turn, where the task tells them apart
    notes: str = ""  # what an environment found, as text (JSON): for the task's reward, and for people


@dataclass(frozen=True, slots=True)
class Reward:
    """The scalar that is trained on, whether the answer was exactly right, and the parts it was made of."""

    value: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    notes: str = ""  # what was found, as text (JSON), for people: takes the place of the episode's notes


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Stand-in for a reward that failed. Never trained, always counted."""

    status: Literal["failed", "reward_timeout", "reward_error", "reward_invalid"]
    error: str


@dataclass(frozen=True, slots=True)
class Trajectory:
    """tau = (x, y, r, v, Omega), the record of ECHO-2 section 4.1 and appendix F."""

    trajectory_id: str  # "<group_id>/<sample number>"
    group_id: str
    prompt: Prompt
    episode: Episode
    reward: Reward
    worker_id: str
    lineage: str
    status: Status = "ok"
    error: str = ""  # why status is not "ok"

    @property
    def version(self) -> int:
        """The oldest version any token was sampled under (the one staleness counts from)."""
        return min([span.version for span in self.episode.spans], default=-1)


@dataclass(frozen=True, slots=True)
class Group:
    """The n samples of one prompt. Trained whole or not at all."""

    group_id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def version(self) -> int:
        """The oldest version any sample of the group was made under."""
        parts = [t.episode.spans for t in self.trajectories]
        return min([span.version for spans in parts for span in spans]) if all(parts) else -1


def joined(pieces: Sequence[Sample]) -> Sample:
    """One sample of its pieces, in order. Each counts its spans from its own first token."""
    spans: list[Span] = []
    start = 0
    for piece in pieces:
        for span in piece.spans:
            if spans and (spans[-1].version, spans[-1].digest) == (span.version, span.digest):
                spans[-1] = Span(spans[-1].start, start + span.stop, span.version, span.digest)
            else:
                spans.append(Span(start + span.start, start + span.stop, span.version, span.digest))
        start += len(piece.token_ids)
    return Sample(
        token_ids=tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        logprobs=tuple(chain.from_iterable(piece.logprobs for piece in pieces)),
        spans=tuple(spans),
        finish_reason=pieces[-1].finish_reason if pieces else "",
        top_logprobs=tuple(chain.from_iterable(piece.top_logprobs for piece in pieces)),
    )


def is_whole(sample: Sample) -> bool:
    """Whether every token has its logprob, and belongs to exactly one span, in order."""
    length = len(sample.token_ids)
    return length == len(sample.logprobs) and cover(sample.spans, length)


def sampled_tokens(group: Group) -> int:
    """Tokens of a group that the policy sampled."""
    return sum(sum(trajectory.episode.response_mask) for trajectory in group.trajectories)


def cover(spans: Sequence[Span], length: int) -> bool:
    """Whether spans cover [0, length) exactly, in order."""
    end = 0
    for span in spans:
        if span.start != end or span.stop <= span.start:
            return False
        end = span.stop
    return end == length


# --- leases --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """One call of the policy as far as it has come: another worker can go on from its last token."""

    context: tuple[int, ...]  # what the policy was asked
    sample: Sample
    first: int = 0  # of a piece: where in the answer it begins


@dataclass(frozen=True, slots=True)
class LeaseTokens:
    """The tokens of one lease since its last message.

    Calls are numbered within the lease: first its `partials`, in order, then new ones as they begin. A piece
    carries its call's context where it is the first of a new call, () otherwise.
    """

    lease_id: str
    pieces: tuple[tuple[int, PartialRollout], ...]


@dataclass(frozen=True, slots=True)
class Lease:
    """A worker's time-bounded claim on one prompt (all n samples of it)."""

    lease_id: str
    group_id: str
    epoch: int  # the worker's incarnation; results of an older incarnation are refused
    worker_id: str
    prompt: Prompt
    num_samples: int
    version: int  # oldest its tokens can be of: the worker's snapshot when it was issued, or of `partials`
    expires_s: float
    partials: tuple[PartialRollout, ...] = ()  # what other workers had made of it


@dataclass(frozen=True, slots=True)
class Receipt:
    """The data plane's answer to a submitted group."""

    lease_id: str
    accepted: bool
    # Why not: of the lease "unknown", "fenced", "expired", "duplicate"; of the group: see `claims.Reason`.
    reason: str = ""
    detail: str = ""  # the same for people, in a line


@dataclass(frozen=True, slots=True)
class Complaint:
    """Messages of a worker that were refused, because no worker that keeps the contract sends such things."""

    worker_id: str
    epoch: int
    count: int  # messages
    reason: str  # of the last one
    detail: str
    is_fenced: bool  # it sent too many in a row: nothing is taken of this incarnation any more


# --- learning ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Omega:
    """A trajectory's training metadata, made by the task adapter (ECHO-2 appendix F.5)."""

    loss_mask: tuple[bool, ...]  # per response token
    advantage_group: str  # trajectories with equal tags are normalised together
    advantage: float | None = None  # set by the task, or None: the objective computes it


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """R trajectories as flat columns, in whole groups. N: trajectories; T: all tokens, prompt + response.

    Trajectory i owns tokens `[offsets[i], offsets[i + 1])`: first its prompt, then its response.
    """

    step: int  # t: updates completed when the batch was formed
    trajectory_ids: tuple[str, ...]  # N
    token_ids: IntArray  # (T,)
    offsets: IntArray  # (N + 1,)
    loss_mask: BoolArray  # (T,) True on tokens that are trained
    sampler_logprobs: FloatArray  # (T,) 0 outside the response
    rewards: FloatArray  # (N,) that are trained on
    advantage_groups: IntArray  # (N,) equal numbers are normalised together
    advantages: FloatArray  # (N,) NaN where the objective computes it
    versions: IntArray  # (N,) oldest version per trajectory
    correct: BoolArray  # (N,)
    token_versions: IntArray  # (T,) version that sampled the token; -1 outside the response
    cut_off: BoolArray  # (N,) the answer ended at its token limit
    # (N,) rewards as the task gave them; empty: as in `rewards`.
    scores: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    longest_answer: int = 0  # most tokens that an answer of the task may have; 0: sampling.max_new_tokens

    @property
    def num_trajectories(self) -> int:
        return len(self.trajectory_ids)

    @property
    def task_rewards(self) -> FloatArray:
        """Rewards that the task gave, before anything that `rewards` has beside it; shape (N,)."""
        return self.scores if len(self.scores) else self.rewards

    @property
    def num_tokens(self) -> int:
        """Tokens that are trained."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class LagStats:
    """The scored tokens of one lag: t - v, where version v sampled the token. w: pi_learner / pi_sampler."""

    lag: int
    tokens: int
    drift: float  # mean |log w|, nats
    k3: float  # mean of w - 1 - log w, nats
    truncated: float  # share whose importance weight was cut at its cap
    masked: float  # share that a mask left out
    clipped: float  # share that the clip left without a gradient


@dataclass(frozen=True, slots=True)
class StepStats:
    """Measurements of one learner step, over the tokens it scored unless said. None: there were none.

    Scored are the trained tokens of groups with a gradient; with `objective.score_skipped` those of all.
    """

    step: int  # t before the step; the step made version t + 1
    loss: float | None  # mean over the updates; None: no update was made
    grad_norm: float | None  # likewise, before clipping
    learning_rate: float | None  # of the last update
    t_train_s: float
    tokens: int  # trained tokens
    tokens_forward: int  # tokens put through the model, prompts included, padding excluded
    mismatch_mean: float | None  # |log w| at the start of the step, w = pi_learner / pi_sampler; nats
    mismatch_p99: float | None
    clip_fraction: float | None
    tis_mean: float | None  # mean truncated importance weight
    entropy: float | None
    kl_reference: float | None  # None without a reference
    groups_skipped: int  # groups whose advantages are all zero (no gradient)
    num_updates: int  # optimizer updates so far
    tokens_scored: int = 0
    rate_factor: float = 1.0  # f of drift control, which the step's learning rate was multiplied by
    masked_fraction: float | None = None  # of the tokens trained
    truncated_fraction: float | None = None
    effective_samples: float | None = None  # (sum w)^2 / (M sum w^2), 1: all tokens weigh alike
    log_weight: tuple[float, float, float, float] | None = None  # |log w|: 50, 99, 99.9 %, largest
    k3: float | None = None  # mean of w - 1 - log w
    lags: tuple[LagStats, ...] = ()  # ascending
    updates_skipped: int = 0  # of this step: without a finite gradient, left out


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Adjustment that the guard asks of the learner from its next step on."""

    rate_scale: float = 1.0  # multiplies the learning rate
    mask_outliers: bool = False  # leave out tokens whose ratio lies outside the guard's ends


@dataclass(frozen=True, slots=True)
class GuardReport:
    """State of the guard, and its actions in the whole run."""

    rung: int  # of its ladder, in force: 0 nothing, 1 outliers masked, 2 S lowered too, 3 rate halved too
    max_staleness: int  # the S in force
    rate_scale: float  # on the learning rate
    alarms: tuple[tuple[str, int], ...] = ()  # of each signal that had one
    actions: tuple[tuple[str, int], ...] = ()  # how often each was taken
    rollbacks: int = 0
    good_step: int = -1  # of the newest checkpoint that is known to be good; -1: none


# --- weights -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor of the model, in Hugging Face names."""

    name: str
    dtype: str  # "bfloat16", "float16", "float32"
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of a publication: its sizes, the base that it needs and the digest to end with."""

    lineage: str
    version: int
    num_updates: int  # optimizer updates made so far; differs from version when updates_per_step > 1
    codec: Codec
    base_version: int  # -1 for full
    base_digest: str  # "" for full
    digest: str  # of the whole state after applying; its prefix names the algorithm
    payload_digest: str  # BLAKE3 of the payload's bytes, "b3:" + hex
    payload_bytes: int
    dense_bytes: int
    changed_elements: int
    total_elements: int
    num_segments: int = 1  # pieces the payload was signed in; their bytes in order are the payload


@dataclass(frozen=True, slots=True)
class Publication:
    """A manifest with its payload, shape (payload_bytes,)."""

    manifest: Manifest
    payload: ByteArray
    replaced_digest: str = ""  # of the base's bits that an `overwrite` payload replaces; "": not said


@dataclass(frozen=True, slots=True)
class BroadcastStats:
    """Statistics of a publication's broadcast, as its sender's tracker saw it."""

    version: int
    codec: Codec
    payload_bytes: int
    num_peers: int  # that take part now
    num_complete: int  # of them, that have it whole
    seconds: float | None  # until the fraction 1/gamma of them had it whole; None: not yet
    repairs: int  # times a peer was given another parent meanwhile
    hop_bytes_per_s: tuple[float, ...]  # receiving rate of every peer, as last reported


@dataclass(frozen=True, slots=True)
class InstallReport:
    """Report of an install by a worker, from the live tensors of its engine."""

    worker_id: str
    version: int
    digest: str  # of the live tensors
    ok: bool
    seconds: float
    digest_mismatches: int = 0  # times this install found the live tensors not to be what they should
    error: str = ""
    pause_s: float = 0.0  # how long generation stood still
    caught_up: str = ""  # the publications that led there, in words, where it was more than one


# --- fleet ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Identity of a worker, and its price."""

    worker_id: str
    sku: str
    usd_per_hour: float
    epoch: int
    market: Market = "on_demand"
    offer: str = ""  # its kind, where fleets are chosen


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Counters of one incarnation of a worker."""

    worker_id: str
    version: int
    digest: str
    groups_in_flight: int
    trajectories: int
    tokens: int  # sampled tokens
    busy_s: float  # seconds with at least one request in flight
    full_s: float = 0.0  # without a free place: only then it shows how fast it is
    full_tokens: int = 0  # sampled in that time
    leaves_in_s: float | None = None  # its machine announced that it will be taken by then
    slots: int = 1  # groups it samples at once
    scoring: int = 0  # of its groups, those that are sampled: they take no slot
    plateau: int = 0  # groups at which its throughput levels off; 0: not known


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Results of an evaluation on the held-out prompts, n answers to each."""

    step: int
    version: int  # that all tokens were sampled under, or the oldest where `newest_version` says so
    num_prompts: int
    samples_per_prompt: int  # n
    accuracy: float  # avg@n: fraction of the scored samples that are exactly right
    reward_mean: float  # of the scored samples
    num_unscored: int = 0  # samples whose reward failed
    prompt_rewards: tuple[tuple[int, float], ...] = ()  # held-out prompt, mean reward of its scored samples
    trajectories: tuple[Trajectory, ...] = ()
    newest_version: int | None = None  # None: all tokens are of `version`
    pass_at: tuple[float, ...] = ()  # pass@k for k = 1, 2, ..., n: see `evaluation.pass_at`


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """The data plane's ledger, in trajectories.

    accepted = trained + dropped_stale + removed + uninformative + buffered, at every moment.
    """

    accepted: int = 0
    trained: int = 0
    dropped_stale: int = 0
    dropped_hard: int = 0  # of the dropped: no sample of the group was right
    dropped_middling: int = 0  # some were
    dropped_easy: int = 0  # all were
    removed: int = 0  # let go by retention before they were trained, or lost on disk
    uninformative: int = 0  # taken out by `sampling.refill`: others took their place in the batch
    accepted_tokens: int = 0  # sampled, of the accepted
    uninformative_tokens: int = 0  # of them, of the uninformative
    reused: int = 0  # trained again
    buffered: int = 0
    leased: int = 0
    refused: int = 0  # submissions turned away: expired, fenced, duplicate, unpublished, stale
    malformed: int = 0  # messages of workers that were no such thing: groups (refused, too), tokens, counters
    failed: int = 0  # groups a task or an engine failed on; their prompts went back to the pool
    reward_timeout: int = 0  # of the failed: answers whose reward took too long
    reward_error: int = 0  # raised
    reward_invalid: int = 0  # was no reward: another type, not finite
    expired: int = 0  # leases that ran out
    continued: int = 0  # leases that went on from the tokens of another worker
    continued_tokens: int = 0  # those tokens
    discarded_tokens: int = 0  # of leases that ended without a result, and that no worker could go on from
    unreadable_tokens: int = 0  # of the discarded: were in a checkpoint, and could not be read on a resume
    damaged: int = 0  # places in the replay store that are not what was written

    @property
    def lost(self) -> int:
        """Accepted trajectories that are nowhere. Always 0, or the run stops."""
        gone = self.trained + self.dropped_stale + self.removed + self.uninformative
        return self.accepted - gone - self.buffered
