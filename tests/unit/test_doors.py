"""Doors: what somebody adds from a module of their own, without a change of this package.

The examples of docs/extending.md are those modules, run as they are written.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from blake3 import blake3

from echo_planes.cluster.clock import ManualClock, MonotonicClock
from echo_planes.config.extensions import extension
from echo_planes.config.fleet import FleetConfig, WorkerConfig
from echo_planes.config.schema import Config, ObjectiveConfig, SamplingConfig
from echo_planes.config.weights import WeightsConfig
from echo_planes.data.replay.dispatch import POLICIES, Workers, policy_named
from echo_planes.data.tasks.check import Setting, TaskCheck
from echo_planes.data.tasks.registry import load_tokenizer
from echo_planes.errors import ConfigError, WeightsError
from echo_planes.learning.objectives import OBJECTIVES, Objective, Tokens, policy_loss
from echo_planes.loop import price_watch
from echo_planes.loop.launch import ACTUATORS, make_actuator
from echo_planes.loop.loading import load_config
from echo_planes.loop.preflight import check_extensions
from echo_planes.loop.price_watch import PriceWatch
from echo_planes.loop.tracking import MAX_WAITING, Tracking, TrackingNews
from echo_planes.reporting.metrics import EVENTS_FILE, METRICS_FILE, read_events, read_metrics, read_summary
from echo_planes.run import main
from echo_planes.testing.simulation import tiny_config
from echo_planes.weights.chain.events import Event
from echo_planes.weights.codec.choice import CodecChoice
from echo_planes.weights.codec.codec import TensorCodec
from echo_planes.weights.codec.entry import Patcher, decode, encode
from echo_planes.weights.codec.table import BUNDLED, CODECS, take_codec
from echo_planes.weights.digest import BitArray, StateHasher
from echo_planes.weights.link import WeightLink
from echo_planes.weights.node.stager import Stager
from echo_planes.weights.store.replay import rebuild
from echo_planes.weights.wire import manifest as wire
from echo_planes.weights.wire.manifest import PublicationKey, parse_key, parse_key_text, parse_manifest
from echo_planes.weights.wire.messages import decode as read_message
from tests.unit import stored_states, test_receiver
from tests.unit.codec_states import copied, decoded_onto, model_state, same_bits, specs_of, updated
from tests.unit.test_budget import Job
from tests.unit.test_dispatcher import Plane
from tests.unit.test_reconcile_loop import Scene, kind, settings, until
from tests.unit.test_stager import Learner

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "extending.md").read_text()
EXAMPLES = {text.split()[1]: text for text in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
COMMANDS = re.findall(r"^python -m echo_planes\.run (.+)$", PAGE, re.MULTILINE)
MISTAKES = """
import time

NUMBER = 3


def failing(config, folder):
    raise OSError("the server is gone")


class Recorder:
    def __init__(self, config, folder):
        self.folder = folder

    def step(self, numbers):
        if numbers["step"] == 3:
            raise ValueError("no room for a third step")

    def event(self, record): ...
    def close(self): ...
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules outside the package: the page's examples, and one with mistakes."""
    folder = tmp_path / "own"
    folder.mkdir()
    for name, text in {**EXAMPLES, "mistakes.py": MISTAKES}.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    with patch.dict(CODECS), patch.dict(wire._CODES), patch.dict(wire._CODECS):
        yield folder
    for name in (*EXAMPLES, "mistakes.py"):
        sys.modules.pop(name.removesuffix(".py"), None)


def test_the_page_has_an_example_for_each_door() -> None:
    doors = ("task", "objectives", "dispatch", "cloud", "prices", "tracker", "codec")
    assert sorted(EXAMPLES) == sorted(f"my_{door}.py" for door in doors)
    assert len(COMMANDS) == len(EXAMPLES)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_s_commands_are_taken_as_they_are_written(command: str) -> None:
    """As far as their settings, and the places in them; nothing is started."""
    config = load_config(command.split())
    place = next(word.partition("=")[2] for word in command.split() if ":" in word)
    chosen = (
        config.task.adapter,
        config.objective.name,
        config.sampling.router,
        config.fleet.scale,
        config.fleet.prices,
        config.run.tracker,
        config.weights.codec,
    )
    assert chosen.count(place) == 1
    check_extensions(config)


# --- a task --------------------------------------------------------------------------------------


def test_a_task() -> None:
    config = load_config(["task=my_task:MyTask"])
    tokenizer = load_tokenizer(config.model.folder)
    setting = Setting(config.task, tokenizer, 1000, config.run.seed, 64, 500)
    check = TaskCheck(setting)
    found = [finding for probe in check.probes for finding in check.run(probe)]
    assert [finding for finding in found if finding.level == "error"] == []
    assert {"build", "held out", "reward: right answer"} <= {finding.probe for finding in found}


# --- an objective --------------------------------------------------------------------------------


def test_an_objective() -> None:
    config = ObjectiveConfig(name="my_objectives:SOFT")
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = Tokens(
        logprobs=logprobs,
        old_logprobs=torch.tensor([-1.5, -2.0]),
        sampler_logprobs=torch.tensor([-1.5, -2.0]),
        advantages=torch.tensor([1.0, -1.0]),
        weights=torch.tensor([1.0, 1.0]),
        trajectory=torch.tensor([0, 1]),
        num_trajectories=2,
    )
    ours = extension("objective.name", config.name, OBJECTIVES, Objective)
    policy_loss(tokens, config, ours).loss.backward()
    soft = logprobs.grad
    assert soft is not None
    # The slope of 1 + tanh(x) is 1 - tanh(x)^2, against e^x of the ratio itself.
    assert soft[0] / soft[1] == pytest.approx(-(1 - np.tanh(0.5) ** 2), rel=1e-5)


# --- a dispatch policy ---------------------------------------------------------------------------


def test_a_dispatch_policy() -> None:
    policy = policy_named(SamplingConfig(router="my_dispatch:FreshestFirst").router, 8)
    assert policy is not None
    workers = Workers.named("a", "b", "c")
    workers.version[:], workers.room[:] = [3, 4, -1], 5
    assert policy.assign(7, workers).counts.tolist() == [2, 5, 0]
    assert POLICIES["jsq"](8).assign(6, workers).counts.tolist() == [3, 3, 0]
    plane = Plane("my_dispatch:FreshestFirst", 12)
    plane.join("behind", slots=40, version=0)
    plane.buffer.publish(1, "d1")
    plane.join("newest", slots=40, version=1)
    first = plane.ask("behind", "newest")
    assert first["newest"] > 0 == first["behind"]


# --- an actuator ---------------------------------------------------------------------------------


def test_an_actuator_brings_a_fleet_s_machines() -> None:
    config = settings(kind(), scale="my_cloud:make")
    assert config.fleet.brings_nodes
    cloud: Any = asyncio.run(make_actuator(config, ManualClock()))
    scene = Scene(config, machines=cloud)

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        assert [one.worker_id for one in await cloud.nodes()] == ["w0"]
        await scene.publish_and_serve()
        scene.gone("w0")
        await until(lambda: "w1" in scene.wanted)  # another one, on another machine
        assert [(one.node_id, one.worker_id) for one in await cloud.nodes()] == [("node-2", "w1")]

    scene.play(act)
    assert cloud.machines == {}


# --- a price source ------------------------------------------------------------------------------


A, B = "a/on_demand", "b/on_demand"


class _Told:
    """A journal that keeps what it is told, and a follower of prices."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []
        self.prices: list[dict[str, float]] = []

    def on_event(self, kind: str, text: str, *, worker: str = "", version: int | None = None) -> None:
        self.events.append((kind, text))

    def follow(self, usd_per_hour: Mapping[str, float]) -> None:
        self.prices.append(dict(usd_per_hour))


def a_watch(place: str, *skus: str) -> tuple[PriceWatch, _Told]:
    told = _Told()
    config = settings(*(kind(sku) for sku in skus), prices=place)
    return PriceWatch(config, ManualClock(), told, [told.follow]), told  # type: ignore[arg-type]


def answering(monkeypatch: pytest.MonkeyPatch, source: Any) -> str:
    """The place of a source that is made here."""
    monkeypatch.setattr(sys.modules[__name__], "MAKE", lambda config, clock: source, raising=False)
    return f"{__name__}:MAKE"


def test_a_price_source_says_what_is_paid_from_now_on(own: Path) -> None:
    watch, told = a_watch("my_prices:make", "a", "b")
    (own / "prices.json").write_text(json.dumps({A: 0.5, B: 1.0, "another": 7.0}))

    async def looks() -> None:
        await watch.look()
        await watch.look()  # nothing new
        (own / "prices.json").write_text(json.dumps({A: 0.25, B: 3.0}))
        await watch.look()

    asyncio.run(looks())
    assert told.prices == [{A: 0.5}, {A: 0.25, B: 3.0}]
    assert told.events == [
        ("price", f"{A} $1 -> $0.5/h"),
        ("price", f"{A} $0.5 -> $0.25/h, {B} $1 -> $3/h"),
    ]


def test_a_source_may_be_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    async def prices() -> dict[str, float]:
        return {A: 2.0}

    watch, told = a_watch(answering(monkeypatch, prices), "a")
    asyncio.run(watch.look())
    assert told.prices == [{A: 2.0}]


@pytest.mark.parametrize("price", [float("nan"), float("inf"), -1.0, 0.0, 1e6, "1.0", True, None])
def test_a_price_that_is_none_is_refused_by_name_and_the_last_one_stays(
    monkeypatch: pytest.MonkeyPatch, price: object
) -> None:
    answers: Iterator[dict[str, object]] = iter(
        [{A: 2.0, B: 2.0}, {A: price, B: 3.0}, {A: price, B: 3.0}, {B: 3.0}, {A: 4.0, B: 3.0}]
    )
    watch, told = a_watch(answering(monkeypatch, lambda: next(answers)), "a", "b")

    async def looks() -> None:
        for _ in range(5):
            await watch.look()

    asyncio.run(looks())
    assert told.prices == [{A: 2.0, B: 2.0}, {B: 3.0}, {A: 4.0}]
    troubles = [text for kind, text in told.events if kind == "prices"]
    assert len(troubles) == 2  # said once, and when it was over
    assert f"{A}: {price} is no number of dollars an hour above 0" in troubles[0]
    assert B not in troubles[0]
    assert "are there again" in troubles[1]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: [1.0], "it gave a list, not a mapping"),
        (lambda: {}, "a/on_demand: no price was given"),
    ],
)
def test_a_source_that_fails_keeps_the_last_prices_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, source: Any, said: str
) -> None:
    watch, told = a_watch(answering(monkeypatch, source), "a")

    async def looks() -> None:
        await watch.look()
        await watch.look()

    asyncio.run(looks())
    assert told.prices == []
    [(_, text)] = told.events
    assert said in text
    assert text.endswith("the last prices stay")


def test_a_source_that_blocks_holds_nothing_up_and_is_not_asked_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on, asked = threading.Event(), []

    def blocks() -> dict[str, float]:
        asked.append(1)
        assert go_on.wait(60.0)
        return {A: 5.0}

    monkeypatch.setattr(price_watch, "ANSWER_LIMIT_S", 0.05)
    watch, told = a_watch(answering(monkeypatch, blocks), "a")

    async def looks() -> None:
        await watch.look()
        await watch.look()
        assert len(asked) == 1
        go_on.set()
        async with asyncio.timeout(60.0):
            while watch._is_asked:
                await asyncio.sleep(0)
        monkeypatch.setattr(price_watch, "ANSWER_LIMIT_S", 60.0)
        await watch.look()  # asked anew, and answered

    asyncio.run(looks())
    assert told.prices == [{A: 5.0}]
    assert [text.partition(": ")[2] for _, text in told.events] == [
        "no answer within 0.05 s; the last prices stay",
        "the prices are there again",
        "",
    ]


def test_a_new_price_moves_the_fleet_to_the_cheaper_instance_type() -> None:
    scene = Scene(settings(kind("a"), kind("b", count=0, usd_per_hour=1.5), sustain_s=1.0))

    async def act(scene: Scene) -> None:
        await until(lambda: "w0" in scene.wanted)
        scene.keeper.on_prices({A: 9.0})
        instance_types = {
            instance_type.name: instance_type.usd_per_hour
            for instance_type in scene.keeper.fleet.instance_types(0.0)
        }
        assert instance_types == {A: 9.0, B: 1.5}
        await scene.publish_and_serve()
        for _ in range(3):
            scene.step()
        await until(lambda: any(info.sku == "b" for info in scene.wanted.values()))

    scene.play(act)


class _Inline:
    """A thread that has run when it is started: for virtual time."""

    def __init__(self, target: Any, **_: object) -> None:
        self.start = target

    def is_alive(self) -> bool:
        return False


def test_a_run_pays_the_prices_that_its_source_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price_watch.threading, "Thread", _Inline)
    fast, slow = "fast/on_demand", "slow/on_demand"
    prices = iter([{fast: 3600.0, slow: 7200.0}] + [{fast: 7200.0, slow: 7200.0}] * 100_000)
    place = answering(monkeypatch, lambda: next(prices))
    kinds = [WorkerConfig(sku="fast", usd_per_hour=1800.0), WorkerConfig(sku="slow")]
    job = _Job(tmp_path / "run", fleet={"prices": place, "prices_every_s": 8.0, "workers": kinds})
    assert job.run(None).status == "done"
    told = [event["text"] for event in read_events(job.folder) if event["kind"] == "price"]
    assert told == [f"{fast} $1800 -> $3600/h, {slow} $0 -> $7200/h", f"{fast} $3600 -> $7200/h"]
    summary = read_summary(job.folder)
    usd = summary["usd_by_sku"]
    run_s = usd["learner on_demand"]  # at a dollar a second
    assert run_s > 16.0
    # From the start, 1 $/s for 8 s and 2 $/s from then on; and 2 $/s all the time.
    assert usd["fast on_demand"] == pytest.approx(8.0 + 2 * (run_s - 8.0))
    assert usd["slow on_demand"] == pytest.approx(2 * run_s)
    assert sum(summary["usd_by_part"].values()) == pytest.approx(summary["usd_total"])
    assert [worker["usd_per_hour"] for worker in summary["workers"]] == [7200.0, 7200.0]


# --- a tracker -----------------------------------------------------------------------------------


def changed(config: Config, **sections: Mapping[str, Any]) -> Config:
    """The same settings but for these."""
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    )


class _Job(Job):
    """A simulated run with settings of its own."""

    def __init__(self, folder: Path, **sections: Mapping[str, Any]) -> None:
        super().__init__(folder)
        folder.mkdir()
        self.sections = sections

    async def _job(self, loop: Any, config: Config, *more: Any) -> Any:
        return await super()._job(loop, changed(config, **self.sections), *more)


def test_a_tracker_is_told_every_step_of_a_run(tmp_path: Path) -> None:
    job = _Job(tmp_path / "run", run={"tracker": "my_tracker:make"})
    assert job.run(None).status == "done"
    header, *rows = (job.folder / "steps.csv").read_text().splitlines()
    assert header == "step,reward_mean,loss,tokens_per_s,usd"
    steps = read_metrics(job.folder)
    assert [row.split(",")[:2] for row in rows] == [[str(s["step"]), str(s["reward_mean"])] for s in steps]
    assert len(rows) == 20
    assert not [event for event in read_events(job.folder) if event["kind"] == "tracker"]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("mistakes:failing", "OSError: the server is gone"),
        ("mistakes:Recorder", "ValueError: no room for a third step"),
    ],
)
def test_a_tracker_that_raises_is_off_and_the_run_goes_on(tmp_path: Path, place: str, said: str) -> None:
    job = _Job(tmp_path / "run", run={"tracker": place})
    assert job.run(None).status == "done"
    [told] = [event["text"] for event in read_events(job.folder) if event["kind"] == "tracker"]
    assert told == f"run.tracker={place} is off: {said}"
    assert len(read_metrics(job.folder)) == 20


class _Slow:
    """A tracker that stands still at its first event until it may go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.steps: list[int] = []
        self.closed = False

    def step(self, numbers: Mapping[str, Any]) -> None:
        self.steps.append(numbers["step"])

    def event(self, record: Mapping[str, Any]) -> None:
        self.reached.set()
        assert self.go_on.wait(60.0)

    def close(self) -> None:
        self.closed = True


def test_a_tracker_that_blocks_loses_records_which_are_counted_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, told = _Slow(), _Told()
    place = answering(monkeypatch, slow)
    tracking = Tracking(changed(tiny_config(), run={"tracker": place}), tmp_path)
    news = TrackingNews(tracking, told)  # type: ignore[arg-type]
    tracking.offer(EVENTS_FILE, {"kind": "start", "text": ""})
    assert slow.reached.wait(60.0)
    for step in range(MAX_WAITING + 5):
        tracking.offer(METRICS_FILE, {"step": step})
    for _ in range(2):
        news.on_step(None, None, 0.0, None)  # type: ignore[arg-type]
    assert told.events == [
        ("tracker", f"run.tracker={place} is behind by 1000 records: newer ones are dropped meanwhile")
    ]
    assert tracking.close(0.0) == [
        f"run.tracker={place} did not close within its limit: its newest records may be missing",
        f"run.tracker={place}: 6 records were dropped in all",
    ]
    slow.go_on.set()
    tracking._thread.join(60.0)
    assert slow.closed
    assert slow.steps == list(range(1, MAX_WAITING))  # the oldest made room for the end
    assert tracking.close() == []  # told already


def test_a_tracker_takes_what_waits_before_it_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow()
    slow.go_on.set()
    place = answering(monkeypatch, slow)
    tracking = Tracking(changed(tiny_config(), run={"tracker": place}), tmp_path)
    for step in range(100):
        tracking.offer(METRICS_FILE, {"step": step})
    assert tracking.close(60.0) == []
    assert slow.steps == list(range(100))
    assert slow.closed
    tracking.offer(METRICS_FILE, {"step": 100})  # after the end: nobody takes it


# --- a codec -------------------------------------------------------------------------------------

# BLAKE3 of model_state() to updated(model_state(), 1): each segment's length (8 bytes) and bytes.
BYTES = {
    ("compact", 1000): "d20b33a420a741d58caaea8764bbd2bf",
    ("compact", 1 << 25): "d989ae8760dbe79838e4602e4be8c4e3",
    ("fast", 1000): "5a674cc8cc170d0838a384b351c6178c",
    ("fast", 1 << 25): "b762ec6be5e32ba68f402cddbe73d5b6",
    ("overwrite", 1000): "0c6174831f4853a06aa5eed4bdad3b2f",
    ("overwrite", 1 << 25): "66834de7a2464c14ae1efc6f164774cb",
    ("full", 1000): "8a838c954dc9966e517b71f487a891ef",
    ("full", 1 << 25): "1fe89974fa6f1fd9b006c97fb7b1c89d",
}


@pytest.mark.parametrize(("codec", "segment_bytes"), BYTES)
def test_bundled_codecs_write_the_bytes_that_stores_hold(codec: str, segment_bytes: int) -> None:
    old = model_state()
    whole = blake3()
    for segment in encode(codec, old, updated(old, 1), segment_bytes=segment_bytes):
        whole.update(len(segment.payload).to_bytes(8, "little"))
        whole.update(segment.payload.data)
    assert whole.hexdigest()[:32] == BYTES[codec, segment_bytes]


def test_the_settings_and_the_wire_know_the_bundled_codecs() -> None:
    assert list(wire._CODES) == [*BUNDLED, "full"]
    for name in ("auto", *BUNDLED):
        assert WeightsConfig(codec=name).codec == name
    with pytest.raises(ValueError, match="'auto', 'compact', 'fast', 'overwrite'"):
        WeightsConfig(codec="full")
    with pytest.raises(ValueError, match="'fixed', 'static', 'ray'"):
        FleetConfig(scale="none")
    assert set(ACTUATORS) == {"static", "ray"}


@pytest.mark.parametrize("segment_bytes", [1, 1000, 1 << 25])
def test_a_codec_of_one_s_own_carries_every_bit(segment_bytes: int) -> None:
    assert take_codec("my_codec:CODEC") == "xor_zlib"
    old = model_state()
    for new in (updated(old, 1), updated(old, 2, 1.0), copied(old)):
        hasher = StateHasher()
        segments = list(encode("xor_zlib", old, new, hasher=hasher, segment_bytes=segment_bytes))
        assert same_bits(decoded_onto("xor_zlib", old, segments), new)
        state, patched = copied(old), StateHasher()
        patcher = Patcher("xor_zlib", state, patched)
        for segment in segments:
            patcher.apply(segment.payload)
        assert same_bits(state, new)
        assert patcher.digest("xxh3") == hasher.digest()
        patcher.undo()
        assert same_bits(state, old)
        for name, tensor in new.items():
            counted = sum(segment.changed.get(name, 0) for segment in segments)
            assert counted == np.count_nonzero(tensor.bits != old[name].bits)


def test_damaged_segments_of_it_are_refused_and_leave_the_state_as_it_was() -> None:
    take_codec("my_codec:CODEC")
    old, new = model_state(), updated(model_state(), 1)
    [segment] = encode("xor_zlib", old, new)
    rng = np.random.default_rng(0)
    num_refused = 0
    for _ in range(300):
        damaged = segment.payload.copy()
        damaged[rng.integers(damaged.size)] ^= np.uint8(1 << rng.integers(8))
        state = copied(old)
        patcher = Patcher("xor_zlib", state)
        try:
            patcher.apply(damaged[: rng.integers(damaged.size + 1)] if rng.random() < 0.3 else damaged)
        except WeightsError:
            num_refused += 1
            assert same_bits(state, old)
        else:  # a zlib stream that stands for other weights: the state's digest tells
            assert state.keys() == old.keys()
    assert num_refused > 250


class _Lying(TensorCodec):
    """Gives back whatever it is told to."""

    name = "lying"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def pack(self, old: BitArray, new: BitArray) -> bytes:
        return b"x"

    def unpack(self, data: bytes, old: BitArray) -> BitArray:
        return self.answer(old)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda old: old, "0 changes were read"),
        (lambda old: old[:-1], "no array of"),
        (lambda old: old.astype(np.uint64), "no array of"),
        (lambda old: None, "no array of"),
        (lambda old: bytearray(1 << 62), "MemoryError"),
        (lambda old: old.sort(), "read-only"),
    ],
)
def test_what_a_codec_makes_of_a_segment_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, answer: Any, said: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LYING", _Lying(answer), raising=False)
    take_codec(f"{__name__}:LYING")
    old = model_state()
    [segment] = encode("lying", old, updated(old, 1))
    state = copied(old)
    with pytest.raises(WeightsError, match=said):
        Patcher("lying", state).apply(segment.payload)
    with pytest.raises(WeightsError, match=said):
        decode("lying", segment.payload, 0, specs_of(old), lambda name: old[name].bits)
    assert same_bits(state, old)


def test_a_learner_publishes_in_it_and_a_worker_stages_it_for_the_engine(tmp_path: Path) -> None:
    wanted = take_codec(WeightsConfig(codec="my_codec:CODEC").codec)
    learner = Learner(test_receiver.model_state())
    stager = Stager(specs_of(learner.state), tmp_path)
    stager.stage(*learner.publish("full"))
    stager.settled(0, True)
    choice = CodecChoice(wanted, MonotonicClock())
    for seed in (1, 2):
        new = learner.step(np.random.default_rng(seed), 0.02)
        codec = choice.codec(learner.state, new)
        assert codec == "xor_zlib"
        staged = stager.stage(*learner.publish(codec, new))
        assert staged.manifest.codec == "overwrite"  # engines never see another
        assert same_bits(stager.bits(), new)
        stager.settled(seed, True)


def test_a_store_holds_it_and_rebuilds_it(tmp_path: Path) -> None:
    take_codec("my_codec:CODEC")
    writer, states = stored_states.writer_at(tmp_path), [stored_states.first_state()]
    stored_states.store_state(writer, 0, states[0])
    states.append(stored_states.stepped(states[0], {"model.norm.weight": [3, 4]}))
    stored_states.store_state(writer, 1, states[1], (0, states[0]), "xor_zlib")
    assert same_bits(rebuild(stored_states.reader_at(tmp_path), "L0", 1), states[1])


def a_manifest(codec: str) -> bytes:
    """The canonical bytes of a patch's manifest that names this codec, whether or not there is one."""
    learner = Learner(test_receiver.model_state())
    learner.publish("full")
    made, _ = learner.publish("fast", learner.step(np.random.default_rng(1), 0.02))
    return wire.manifest_bytes(made).replace(b'"codec":"fast"', b'"codec":' + json.dumps(codec).encode())


@pytest.mark.parametrize("codec", ["planted:CODEC", "xor_zlib", "planted", "my_codec:CODEC", ""])
def test_a_manifest_that_names_another_codec_is_refused_unimported(own: Path, codec: str) -> None:
    (own / "planted.py").write_text("raise SystemExit('it was imported')")
    before = set(sys.modules)
    for parse, message in (
        (parse_manifest, a_manifest(codec)),
        (lambda text: parse_key_text(text), f"L0.2.{codec}.1"),
        (lambda data: parse_key(data), wire._KEY.pack(2, 1, 5, 2) + b"L0"),
        (
            lambda data: read_message(data, Event, "an event"),
            json.dumps(
                {
                    "kind": "PublicationOpened",
                    "key": {"lineage": "L0", "version": 2, "codec": codec, "base_version": 1},
                    "est_bytes": 1,
                }
            ),
        ),
    ):
        with pytest.raises(WeightsError, match=r"unknown codec|no name of a publication"):
            parse(message)  # type: ignore[operator]
    with pytest.raises(WeightsError, match="unknown codec"):
        decode(codec, np.zeros(9, np.uint8), 0, specs_of(model_state()), lambda name: np.zeros(0, np.uint16))
    assert not {"planted", "my_codec"} & (set(sys.modules) - before)


def test_with_its_own_codec_a_process_still_refuses_others() -> None:
    take_codec("my_codec:CODEC")
    key = PublicationKey("L0", 2, "xor_zlib", 1)
    assert parse_key(wire.key_bytes(key)) == (key, len(wire.key_bytes(key)))
    assert parse_key_text(wire.key_text(key)) == key
    assert parse_manifest(a_manifest("xor_zlib")).codec == "xor_zlib"
    with pytest.raises(WeightsError, match=r"unknown codec 'other'; known are .*xor_zlib"):
        parse_manifest(a_manifest("other"))


def test_learner_and_workers_are_told_the_run_s_codec() -> None:
    link = WeightLink(
        "L0", "secret", "0" * 64, "", 1, WeightsConfig(codec="my_codec:CODEC"), sender="http://x:1"
    )
    assert link.sender_settings("127.0.0.1", b"1" * 32).codec == "my_codec:CODEC"
    assert link.of_worker("w0", 0).worker_settings("w0", 0, "127.0.0.1", "").codec == "my_codec:CODEC"


@pytest.mark.parametrize("name", ["fast", "full", "auto", "", "Xor", "a.b", "a" * 33, "a/b", None])
def test_a_codec_s_name_must_be_one(monkeypatch: pytest.MonkeyPatch, name: Any) -> None:
    codec = _Lying(None)
    codec.name = name
    monkeypatch.setattr(sys.modules[__name__], "LYING", codec, raising=False)
    with pytest.raises(ConfigError, match="cannot be used; give it 1 to 32"):
        take_codec(f"{__name__}:LYING")
    assert tuple(CODECS) == BUNDLED


def test_a_run_has_one_codec_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_codec("my_codec:CODEC") == take_codec("my_codec:CODEC") == "xor_zlib"
    monkeypatch.setattr(sys.modules[__name__], "LYING", _Lying(None), raising=False)
    with pytest.raises(ConfigError, match="this process has the codec xor_zlib already"):
        take_codec(f"{__name__}:LYING")


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("objective.name=grppo", "'grppo' is none of 'grpo', 'dapo', 'dr_grpo', 'rloo', 'gspo', 'cispo'"),
        ("sampling.router=jqs", "'jqs' is none of 'pull', 'jsq', 'proportional'"),
        ("fleet.scale=rays", "'rays' is none of 'fixed', 'static', 'ray'"),
        ("weights.codec=compct", "'compct' is none of 'auto', 'compact', 'fast', 'overwrite'"),
        ("fleet.prices=fixd", "'fixd' is none of 'fixed'"),
        ("run.tracker=non", "'non' is none of 'none'"),
    ],
)
def test_a_name_that_is_none_is_one_line_with_the_nearest(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as told:
        load_config([word])
    assert said in str(told.value)
    assert "did you mean" in str(told.value)
    assert "\n" not in str(told.value)


KEYS = {
    "objective.name": "int, not an instance of Objective",
    "sampling.router": "int, not a function or a class",
    "fleet.scale": "int, not a function or a class",
    "fleet.prices": "int, not a function or a class",
    "run.tracker": "int, not a function or a class",
    "weights.codec": "int, not an instance of PatchCodec",
}


@pytest.mark.parametrize("key", [*KEYS, "task.adapter"])
@pytest.mark.parametrize("place", ["mistakes:MISSING", "mistakes:NUMBER", "nowhere_at_all:X"])
def test_a_place_that_holds_nothing_of_use_is_told_before_anything_starts(
    key: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"{key}={place}", f"run.dir={tmp_path / 'run'}"]) == 2
    captured = capsys.readouterr()
    name = place.partition(":")[2]
    if place == "nowhere_at_all:X":
        said = "no module named 'nowhere_at_all'; check the spelling and that it can be imported from the "
        said += "current folder"
    elif key == "task.adapter" and name != "MISSING":
        said = f"'{name}' is not a TaskAdapter in mistakes"
    else:
        said = f"it is a {KEYS[key]}" if name == "NUMBER" else "there is no 'MISSING' in mistakes"
    assert captured.out == ""
    line = f"error: {key}='{place}': {said}"
    assert captured.err in (f"{line}\n", f"{line}; did you mean 'failing'?\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["mistakes:", ":X", "a b:X", "mistakes"])
def test_a_place_that_is_none_is_one_line(place: str) -> None:
    with pytest.raises(ConfigError, match=r"^run\.tracker='.*' is not of the form package\.module:NAME$"):
        extension("run.tracker", place, {})
