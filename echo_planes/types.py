"""Messages that cross process boundaries: frozen dataclasses, with the standard library and numpy only.

Each field's comment has its unit and shape. Token positions count from 0 within a trajectory's response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]

# failed: the rollout, or its group. The others: the reward took too long, raised an error, or was not finite.
Status = Literal["ok", "failed", "reward_timeout", "reward_error", "reward_invalid"]
Market = Literal["on_demand", "spot"]  # a provider may take spot machines away
Codec = str  # name of a codec: "full", or that of a patch codec (weights/codec/table.py)


# --- prompts and samples -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question put to the policy."""

    index: int  # position in the task's stream; the stream is a pure function of (seed, index)
    token_ids: tuple[int, ...]
    answer: str = ""  # data for the task's reward, as text (JSON for several values)
    text: str = ""  # readable form, for reports and logs


@dataclass(frozen=True, slots=True)
class Span:
    """A run of response tokens `[start, stop)` sampled alike, under one published (version, digest)."""

    start: int
    stop: int
    version: int
    digest: str
    schedule: int = -1  # number of the `sparsity.Schedule` they were decoded by; -1: dense attention


@dataclass(frozen=True, slots=True)
class Draw:
    """Rule for drawing tokens from the policy."""

    temperature: float  # divides the logits; 0: always the likeliest token
    top_p: float  # nucleus: only tokens within this probability mass
    dense: bool = False  # whatever the engine's schedule of KV budgets: for evaluations


@dataclass(frozen=True, slots=True)
class Sample:
    """Answer of the policy to one call of `Policy.generate`, or a piece of it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # of each token, after temperature and top-p
    spans: tuple[Span, ...]  # cover token_ids exactly, in order
    finish_reason: Literal["stop", "length", "abort", ""]  # "": further pieces follow
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()  # per token, k pairs (token id, logprob)


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished answer: single-turn, or several turns joined with the environment's tokens between.

    `response_mask[i]` is True where the policy sampled token i, False where the environment wrote it. The
    latter has logprob 0.0, and belongs to the span of the token after it.
    """

    response_ids: tuple[int, ...]
    response_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    spans: tuple[Span, ...]  # cover response_ids exactly, in order
    finish_reason: str
    text: str = ""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    num_turns: int = 1
    turn_rewards: tuple[float, ...] = ()  # of each turn, if the task gives rewards by turn
    notes: str = ""  # findings of an environment, as text (JSON), for the task's reward and for people


@dataclass(frozen=True, slots=True)
class Reward:
    """Scalar reward of an answer, whether the answer is exactly right, and the parts of the reward."""

    value: float
    correct: bool
    parts: Mapping[str, float] = field(default_factory=dict)
    notes: str = ""  # findings, as text (JSON), for people; if not "", they replace the episode's notes


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """Placeholder for a failed reward. Its group is never trained, and always counted."""

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
        """Oldest version that a token was sampled under, from which staleness counts; -1: no tokens."""
        return min([span.version for span in self.episode.spans], default=-1)


@dataclass(frozen=True, slots=True)
class Group:
    """The n samples of one prompt. Trained whole or not at all."""

    group_id: str
    trajectories: tuple[Trajectory, ...]

    @property
    def version(self) -> int:
        """Oldest version that a token of the group was sampled under; -1: a sample has no tokens."""
        parts = [t.episode.spans for t in self.trajectories]
        return min([span.version for spans in parts for span in spans]) if all(parts) else -1


def joined(pieces: Sequence[Sample]) -> Sample:
    """Join pieces of a sample, in order. The spans of each piece count from its own first token."""
    spans: list[Span] = []
    start = 0
    for piece in pieces:
        for span in piece.spans:
            moved = replace(span, start=start + span.start, stop=start + span.stop)
            if spans and replace(spans[-1], stop=moved.stop) == replace(moved, start=spans[-1].start):
                moved = replace(moved, start=spans.pop().start)
            spans.append(moved)
        start += len(piece.token_ids)
    return Sample(
        token_ids=tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        logprobs=tuple(chain.from_iterable(piece.logprobs for piece in pieces)),
        spans=tuple(spans),
        finish_reason=pieces[-1].finish_reason if pieces else "",
        top_logprobs=tuple(chain.from_iterable(piece.top_logprobs for piece in pieces)),
    )


def is_whole(sample: Sample) -> bool:
    """Return whether every token has a logprob, and belongs to exactly one span, in order."""
    length = len(sample.token_ids)
    return length == len(sample.logprobs) and cover(sample.spans, length)


def sampled_tokens(group: Group) -> int:
    """Return how many tokens of a group the policy sampled."""
    # JSON and the claims do not take the numbers that a mask of numpy's booleans sums to.
    return int(sum(sum(trajectory.episode.response_mask) for trajectory in group.trajectories))


def cover(spans: Sequence[Span], length: int) -> bool:
    """Return whether spans cover [0, length) exactly, in order."""
    ends = [0, *(span.stop for span in spans)]
    follow = all(span.start == end < span.stop for span, end in zip(spans, ends, strict=False))
    return follow and ends[-1] == length


# --- leases --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartialRollout:
    """Unfinished call of the policy, which another worker can continue from its last token."""

    context: tuple[int, ...]  # token ids that the policy continues
    sample: Sample
    first: int = 0  # position in the answer at which a piece begins


@dataclass(frozen=True, slots=True)
class LeaseTokens:
    """New tokens of one lease since its last message, as (call number, piece) pairs.

    Calls are numbered within the lease: first its `partials`, in order, then new ones as they begin. The
    first piece of a new call carries the call's context, every other piece ().
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
    version: int  # oldest possible version of its tokens: the worker's at issue, or that of `partials`
    expires_s: float
    partials: tuple[PartialRollout, ...] = ()  # unfinished calls of other workers, to continue


@dataclass(frozen=True, slots=True)
class Receipt:
    """The data plane's answer to a submitted group."""

    lease_id: str
    accepted: bool
    # Reason of a refusal: "unknown", "fenced", "expired" or "duplicate" lease, or a `claims.Reason`.
    reason: str = ""
    detail: str = ""  # the reason for people, in a line


@dataclass(frozen=True, slots=True)
class Complaint:
    """Malformed messages of one incarnation of a worker, which the data plane has refused."""

    worker_id: str
    epoch: int
    count: int  # messages
    reason: str  # of the last message
    detail: str
    is_fenced: bool  # too many in a row: the data plane refuses this incarnation from now on


# --- learning ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Omega:
    """Training metadata of a trajectory, made by the task adapter (ECHO-2 appendix F.5)."""

    loss_mask: tuple[bool, ...]  # per response token
    advantage_group: str  # trajectories with equal tags are normalised together
    advantage: float | None = None  # set by the task, or None: the objective computes it


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """R trajectories as flat columns, in whole groups. N: trajectories; T: all tokens, prompt + response.

    Trajectory i owns tokens `[offsets[i], offsets[i + 1])`: first its prompt, then its response.

    A synchronous step may come in parts (RLBoost section 4.1), each with some of its groups. All of them make
    one update, which is that of the batch joined.
    """

    step: int  # t: updates completed when the batch was formed
    trajectory_ids: tuple[str, ...]  # N
    token_ids: IntArray  # (T,)
    offsets: IntArray  # (N + 1,)
    loss_mask: BoolArray  # (T,) True on trained tokens
    sampler_logprobs: FloatArray  # (T,) 0 outside the response
    rewards: FloatArray  # (N,) for training: penalties for long answers included
    advantage_groups: IntArray  # (N,) equal numbers are normalised together
    advantages: FloatArray  # (N,) NaN where the objective computes it
    versions: IntArray  # (N,) oldest version per trajectory
    correct: BoolArray  # (N,)
    token_versions: IntArray  # (T,) version that sampled the token; -1 outside the response
    cut_off: BoolArray  # (N,) the answer ended at its token limit
    # (N,) rewards as the task gave them; empty: equal to `rewards`.
    scores: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    longest_answer: int = 0  # most tokens of an answer of the task; 0: sampling.max_new_tokens
    # (name, mean over the answers with it, number of these), by name
    reward_parts: tuple[tuple[str, float, int], ...] = ()
    step_trajectories: int = 0  # trajectories of the whole step, if this is one of its parts; 0: it is whole
    last: bool = True  # no part of this step follows
    waited_s: float = 0.0  # since the youngest of its groups was accepted, seconds
    # Of all A answers accepted for the step, those that a refill set aside too; empty: the batch's own, of
    # one level.
    accepted_scores: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    accepted_cut_off: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    accepted_levels: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def num_trajectories(self) -> int:
        return len(self.trajectory_ids)

    @property
    def task_rewards(self) -> FloatArray:
        """Rewards as the task gave them, without the penalties in `rewards`; shape (N,)."""
        return self.scores if len(self.scores) else self.rewards

    @property
    def num_tokens(self) -> int:
        """Number of trained tokens."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class LagStats:
    """Measurements of the scored tokens of one lag t - v, v their version; w: pi_learner / pi_sampler."""

    lag: int
    tokens: int
    drift: float  # mean |log w|, nats
    k3: float  # mean of w - 1 - log w, nats
    truncated: float  # share with an importance weight cut at its cap
    masked: float  # share left out by a mask
    clipped: float  # share without a gradient because of the clip


@dataclass(frozen=True, slots=True)
class Noise:
    """Difference of engine and learner on equal weights, from tokens since whose sampling no update was made.

    The same figures as of a step's tokens (`StepStats`), which are movement of the policy plus this.
    """

    drift: float  # mean |log w|, nats
    k3: float  # nats
    effective_samples: float  # share of the tokens
    truncated: float  # share of the tokens
    log_weight: float  # 99.9th percentile of |log w|, nats


@dataclass(frozen=True, slots=True)
class StepStats:
    """Measurements of one learner step, over its scored tokens unless said otherwise; None: there were none.

    Scored tokens are the trained tokens of groups with a gradient, or of all with `objective.score_skipped`.
    """

    step: int  # t before the step; the step made version t + 1
    loss: float | None  # mean over the updates; None: no update was made
    grad_norm: float | None  # mean over the updates, before clipping; None: no update was made
    learning_rate: float | None  # of the last update
    t_train_s: float
    tokens: int  # trained tokens
    tokens_forward: int  # tokens put through the model, prompts included, padding excluded
    mismatch_mean: float | None  # |log w| at the start of the step, w = pi_learner / pi_sampler; nats
    mismatch_p99: float | None
    clip_fraction: float | None
    tis_mean: float | None  # mean truncated importance weight of the updates made; 1: the loss has none
    entropy: float | None
    kl_reference: float | None  # None without a reference
    groups_skipped: int  # groups whose advantages are all zero (no gradient)
    num_updates: int  # optimizer updates so far
    tokens_scored: int = 0
    rate_factor: float = 1.0  # f of drift control, a factor of the step's learning rate
    masked_fraction: float | None = None  # of the trained tokens
    truncated_fraction: float | None = None
    effective_samples: float | None = None  # (sum w)^2 / (M sum w^2) of M tokens; 1: equal weights
    log_weight: tuple[float, float, float, float] | None = None  # |log w|: 50, 99, 99.9 %, largest
    k3: float | None = None  # mean of w - 1 - log w
    lags: tuple[LagStats, ...] = ()  # ascending
    noise: Noise | None = None  # slow mean so far; None: not measured yet
    updates_skipped: int = 0  # updates of this step left out for a non-finite gradient


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Adjustment of the learner by the guard, from the next step on."""

    rate_scale: float = 1.0  # multiplies the learning rate
    mask_outliers: bool = False  # leave out tokens with a ratio outside the guard's limits


@dataclass(frozen=True, slots=True)
class GuardReport:
    """State of the guard, and its actions in the whole run."""

    rung: int  # of its ladder, in force: 0 nothing, 1 outliers masked, 2 S lowered too, 3 rate halved too
    max_staleness: int  # the S in force
    rate_scale: float  # factor on the learning rate
    alarms: tuple[tuple[str, int], ...] = ()  # (signal, alarms) of each signal with an alarm
    actions: tuple[tuple[str, int], ...] = ()  # (action, times)
    rollbacks: int = 0
    good_step: int = -1  # step of the newest checkpoint known to be good; -1: none


# --- weights -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interval:
    """A part of a step's time, in seconds since the step began."""

    what: str  # "seed": seeders sampled; "train": the learner trained
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class SeedReport:
    """Seeding of one step (RLBoost section 4.1)."""

    t_seed_s: float  # T_seed, the planned window, seconds
    train_wait_s: float  # t_train_wait: the learner waited for answers while the window was closed
    remote_wait_s: float  # t_remote_wait: from the last answer to the end of the step
    remote_s: float  # from the beginning of the step to the last answer
    mean_remote: float  # remote workers, mean over the step
    num_reserved: int  # N_resv, seeders
    intervals: tuple[Interval, ...]

    @property
    def seeded_s(self) -> float:
        """Time in which the seeders sampled, seconds: more than T_seed where they were alone."""
        return sum(one.stop_s - one.start_s for one in self.intervals if one.what == "seed")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor of the model, in Hugging Face names."""

    name: str
    dtype: str  # "bfloat16", "float16", "float32"
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of a publication: its sizes, its base, and the digest of the weights that it leads to."""

    lineage: str
    version: int
    num_updates: int  # optimizer updates made so far; differs from version when updates_per_step > 1
    codec: Codec
    base_version: int  # -1 for full
    base_digest: str  # "" for full
    digest: str  # of all weights after applying; its prefix names the algorithm
    payload_digest: str  # BLAKE3 of the payload's bytes, "b3:" + hex
    payload_bytes: int
    dense_bytes: int
    changed_elements: int
    total_elements: int
    num_segments: int = 1  # their bytes, in order, are the payload


@dataclass(frozen=True, slots=True)
class Publication:
    """A manifest with its payload, shape (payload_bytes,)."""

    manifest: Manifest
    payload: ByteArray
    replaced_digest: str = ""  # of the base's bits that an `overwrite` payload replaces; "": not known


@dataclass(frozen=True, slots=True)
class Uploads:
    """State of the uploads to the store, from the sender's node."""

    unstored: tuple[int, ...] = ()  # published versions that have never been in the store, ascending
    is_over: bool = True  # nothing is left to store or to try again
    seen: str = ""  # how far they are, as a text that changes as they advance
    error: str = ""  # the newest failure


@dataclass(frozen=True, slots=True)
class BroadcastStats:
    """Statistics of a publication's broadcast, from the tracker in the sender's node."""

    version: int
    codec: Codec
    payload_bytes: int
    num_peers: int  # live peers that have not given it up
    num_complete: int  # those among them that have it whole
    seconds: float | None  # until the fraction 1/gamma of them had it whole; None: not yet
    repairs: int  # changes of a peer's parent meanwhile
    hop_bytes_per_s: tuple[float, ...]  # mean receiving rate of each peer, where measurable
    at_fault: tuple[str, ...] = ()  # peers that were moved out of the way, each with the reason


@dataclass(frozen=True, slots=True)
class InstallReport:
    """Report of a worker on an install, from the live tensors of its engine."""

    worker_id: str
    version: int
    digest: str  # of the live tensors
    ok: bool
    seconds: float
    digest_mismatches: int = 0  # times the live tensors had another digest than expected
    error: str = ""
    pause_s: float = 0.0  # pause of generation
    caught_up: str = ""  # the publications that led there, in words, if there was more than one


# --- fleet ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Identity of a worker, and its price."""

    worker_id: str
    sku: str
    usd_per_hour: float
    epoch: int
    market: Market = "on_demand"
    instance_type: str = ""  # "sku/region/market", as `WorkerConfig.instance_type`


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
    full_s: float = 0.0  # seconds without a free slot; only these show its full speed
    full_tokens: int = 0  # sampled in that time
    leaves_in_s: float | None = None  # until the announced preemption of its machine; None: none announced
    slots: int = 1  # groups that it samples at once, at most
    scoring: int = 0  # groups in flight that are sampled and wait for rewards; they take no slot
    plateau: int = 0  # groups at which its throughput levels off; 0: not known


@dataclass(frozen=True, slots=True)
class EvalReport:
    """Results of an evaluation on the held-out prompts, n answers to each."""

    step: int
    version: int  # oldest version that a token was sampled under
    num_prompts: int
    samples_per_prompt: int  # n
    accuracy: float  # avg@n: fraction of the scored samples that are exactly right
    reward_mean: float  # of the scored samples
    num_unscored: int = 0  # samples whose rollout or reward failed
    unscored_error: str = ""  # of the first of them
    prompt_rewards: tuple[tuple[int, float], ...] = ()  # held-out prompt, mean reward of its scored samples
    trajectories: tuple[Trajectory, ...] = ()
    newest_version: int | None = None  # newest such version; None: all tokens are of `version`
    pass_at: tuple[float, ...] = ()  # pass@k for k = 1, 2, ..., n: see `evaluation.pass_at`


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """The data plane's ledger, in trajectories unless said otherwise.

    accepted = trained + dropped_stale + removed + uninformative + buffered, at every moment.
    """

    accepted: int = 0
    trained: int = 0
    dropped_stale: int = 0
    dropped_hard: int = 0  # of the dropped: no sample of the group was right
    dropped_middling: int = 0  # some were
    dropped_easy: int = 0  # all were
    removed: int = 0  # removed by the limits of the replay store before training, or lost on disk
    uninformative: int = 0  # set aside by `sampling.refill`
    accepted_tokens: int = 0  # sampled tokens of the accepted
    uninformative_tokens: int = 0  # sampled tokens of the uninformative
    reused: int = 0  # trained again
    buffered: int = 0
    leased: int = 0
    refused: int = 0  # submitted, but refused: the lease has ended, or the group is malformed or failed
    malformed: int = 0  # malformed messages of workers: groups (refused, too), tokens, counters
    failed: int = 0  # refused because a task or an engine failed on the group
    reward_timeout: int = 0  # of the failed: the reward took too long
    reward_error: int = 0  # of the failed: the reward raised an error
    reward_invalid: int = 0  # of the failed: the reward had another type, or was not finite
    expired: int = 0  # leases that ran out
    continued: int = 0  # leases that continued tokens of another worker
    continued_tokens: int = 0  # those tokens
    discarded_tokens: int = 0  # sampled under leases without a result, and not continued by any worker
    unreadable_tokens: int = 0  # of the discarded: in a checkpoint that a resume could not read
    damaged: int = 0  # places in the replay store that differ from what was written

    @property
    def lost(self) -> int:
        """Accepted trajectories without a fate or a place in the buffer. A number other than 0 is a bug."""
        gone = self.trained + self.dropped_stale + self.removed + self.uninformative
        return self.accepted - gone - self.buffered
