"""After a resume, prompts that were unfinished go on from the last token that the checkpoint has of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from echo_planes.config.schema import Config
from echo_planes.data.replay.checkpoint_state import STATE_NAME, load_checkpoint_state
from echo_planes.data.replay.lineage import Lineage
from echo_planes.data.store.snapshot import StoreSnapshot
from echo_planes.errors import LeaseError
from echo_planes.testing.simulation import tiny_config
from echo_planes.types import BufferCounts, Lease, LeaseTokens, PartialRollout, TrainBatch
from tests.unit.test_buffer import answer
from tests.unit.test_checkpoint import Plane, of_lineage
from tests.unit.test_partial_rollouts import CONTEXT, message, piece


async def stream(plane: Plane, lease: Lease, *tokens: int, version: int = 0) -> None:
    sent = message(lease.lease_id, (0, CONTEXT, piece(*tokens, version=version), 0))
    assert await plane.data.stream("w0", 0, [sent]) == ()


async def a_life(folder: Path, config: Config | None = None) -> list[Lease]:
    """Three prompts: one of whose lease lives, one that waits, one nobody has streamed of. Then a cut."""
    plane = Plane(folder, "L0", config=config)
    await plane.serve(0)
    leases = await plane.pull(3)
    await stream(plane, leases[0], 5, 6)
    await stream(plane, leases[1], 7, 8, 9)
    await plane.data.hand_over("w0", 0, [LeaseTokens(leases[1].lease_id, ())])
    await plane.data.save(folder / "saved")
    await stream(plane, leases[2], 10)  # after the cut: lost
    await plane.data.close()
    return leases


def given(leases: list[Lease]) -> list[tuple[int, ...]]:
    return [one.partials[0].sample.token_ids if one.partials else () for one in leases]


async def resumed(folder: Path, digest: str = "d0") -> tuple[list[Lease], BufferCounts, Plane]:
    plane = Plane(folder, "L1", folder / "saved")
    await plane.data.ready()
    await plane.data.publish(0, digest)
    await plane.data.register("w0", 0)
    await plane.data.installed("w0", 0)
    leases = await plane.pull(3)
    return leases, await plane.data.counts(), plane


def test_prompts_go_on_from_their_last_token_and_are_accepted(tmp_path: Path) -> None:
    async def main() -> None:
        before = await a_life(tmp_path)
        leases, counts, plane = await resumed(tmp_path)
        assert [one.prompt for one in leases] == [one.prompt for one in before]
        assert leases[0].partials == (PartialRollout(CONTEXT, piece(5, 6)),)
        assert given(leases) == [(5, 6), (7, 8, 9), ()]
        assert (counts.continued, counts.continued_tokens) == (2, 5)
        assert (counts.discarded_tokens, counts.unreadable_tokens) == (0, 0)
        await plane.submit(leases)  # of version 0, which the lineage before has made
        await plane.data.close()

    asyncio.run(main())


def test_the_second_resume_has_what_the_first_one_began_with(tmp_path: Path) -> None:
    async def main() -> None:
        await a_life(tmp_path)
        leases, _, plane = await resumed(tmp_path)
        await plane.data.save(tmp_path / "again")
        await plane.data.close()
        plane = Plane(tmp_path, "L2", tmp_path / "again")
        await plane.serve(0)
        assert [one.partials for one in await plane.pull(3)] == [one.partials for one in leases]
        await plane.data.close()

    asyncio.run(main())


def test_a_prompt_that_was_finished_after_the_cut_is_not_gone_on_with(tmp_path: Path) -> None:
    async def main() -> None:
        plane = Plane(tmp_path, "L0")
        await plane.serve(0)
        done, unfinished = await plane.pull(2)
        await stream(plane, done, 5)
        await stream(plane, unfinished, 6)
        await plane.data.save(tmp_path / "saved")
        await plane.submit([done])
        await plane.data.close()
        leases, counts, plane = await resumed(tmp_path)
        assert leases[0].prompt == unfinished.prompt
        assert given(leases[:1]) == [(6,)]
        assert done.prompt not in [one.prompt for one in leases]
        assert (counts.continued, counts.buffered) == (1, 2)
        await plane.data.save(tmp_path / "again")
        cut, _ = load_checkpoint_state(tmp_path / "again" / STATE_NAME)
        assert list(cut.partials) == [unfinished.prompt.index]
        await plane.data.close()

    asyncio.run(main())


def test_another_digest_of_the_version_means_other_weights_and_nothing_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        await a_life(tmp_path)
        leases, counts, plane = await resumed(tmp_path, digest="another")
        assert given(leases) == [(), (), ()]
        assert (counts.continued, counts.discarded_tokens) == (0, 5)
        await plane.data.close()

    asyncio.run(main())


def test_what_is_too_old_or_unpublished_stays_out_of_the_cut_and_is_counted(tmp_path: Path) -> None:
    async def main() -> None:
        config = tiny_config(max_staleness=0, policy="drop", publish_every=1)
        plane = Plane(tmp_path, "L0", config=config)
        await plane.serve(0)
        old, *others = await plane.pull(4)
        await stream(plane, old, 5, 6)
        await plane.submit(others)
        assert await plane.data.lose("w0") == 1
        await plane.serve(0)
        (another,) = await plane.pull(1)  # the same prompt, gone on with
        assert given([another]) == [(5, 6)]
        await plane.submit([another])
        assert isinstance(await plane.data.next_batch(0, 0.0), TrainBatch)
        await plane.data.publish(1, "d1")
        await plane.data.installed("w0", 1)
        one, two, three, _ = await plane.pull(4)
        await stream(plane, one, 7, version=0)  # nothing of version 0 is trained any more
        await stream(plane, two, 8, 9, version=5)  # never published
        await stream(plane, three, 10, version=1)
        await plane.data.save(tmp_path / "saved")
        assert (await plane.data.counts()).discarded_tokens == 0  # their leases live
        cut, _ = load_checkpoint_state(tmp_path / "saved" / STATE_NAME)
        assert list(cut.partials) == [three.prompt.index]
        await plane.data.close()
        plane = Plane(tmp_path, "L1", tmp_path / "saved", config=config)
        assert await plane.data.ready() == 1
        await plane.serve(1)
        assert given(await plane.pull(4)) == [(), (), (10,), ()]
        counts = await plane.data.counts()
        assert (counts.discarded_tokens, counts.continued_tokens) == (3, 3)
        await plane.data.close()

    asyncio.run(main())


@pytest.mark.parametrize("harm", ["flip", "remove", "cut", "of a newer format"])
def test_partials_that_cannot_be_read_are_counted_and_the_run_goes_on(tmp_path: Path, harm: str) -> None:
    async def main() -> None:
        before = await a_life(tmp_path)
        path, cut = tmp_path / "saved" / "drafts.arrows", tmp_path / "saved" / "state.json"
        content = bytearray(path.read_bytes())
        if harm == "of a newer format":
            cut.write_text(cut.read_text().replace('"format": 2', '"format": 3'))
        elif harm == "remove":
            path.unlink()
        else:
            content[-100] ^= 1
            path.write_bytes(content[: -10 if harm == "cut" else None])
        leases, counts, plane = await resumed(tmp_path)
        assert [one.prompt for one in leases] == [one.prompt for one in before]
        assert given(leases) == [(), (), ()]
        assert (counts.unreadable_tokens, counts.discarded_tokens, counts.continued) == (5, 5, 0)
        await plane.submit(leases)
        await plane.data.close()

    asyncio.run(main())


@pytest.mark.parametrize("of", ["no partial rollouts", "an older program"])
def test_a_cut_without_partials_is_resumed(tmp_path: Path, of: str) -> None:
    async def main() -> None:
        cut = tmp_path / "saved" / "state.json"
        if of == "no partial rollouts":
            plane = Plane(tmp_path, "L0")
            await plane.serve(0)
            await plane.pull(3)
            await plane.data.save(tmp_path / "saved")
            await plane.data.close()
            assert json.loads(cut.read_text())["drafts"] is None
            assert [path.name for path in cut.parent.iterdir()] == ["state.json"]
        else:
            await a_life(tmp_path)
            record = json.loads(cut.read_text())
            del record["drafts"], record["counts"]["unreadable_tokens"], record["replaced"]
            cut.write_text(json.dumps(record))
            assert load_checkpoint_state(cut)[0].replaced == 0
        leases, counts, plane = await resumed(tmp_path)
        assert [one.prompt.index for one in leases] == [0, 1, 2]
        assert (given(leases), counts.unreadable_tokens) == ([(), (), ()], 0)
        await plane.data.close()

    asyncio.run(main())


def test_unreadable_tokens_of_several_resumes_add_up(tmp_path: Path) -> None:
    asyncio.run(a_life(tmp_path))
    saved = tmp_path / "saved"
    (saved / "drafts.arrows").unlink()
    text = (saved / STATE_NAME).read_text().replace('"unreadable_tokens": 0', '"unreadable_tokens": 3')
    (saved / STATE_NAME).write_text(text)
    state, _ = load_checkpoint_state(saved / STATE_NAME)
    assert (state.counts.unreadable_tokens, state.counts.discarded_tokens) == (3 + 5, 5)


def test_an_answer_of_two_lineages_is_in_the_store_with_all_its_versions(tmp_path: Path) -> None:
    async def main() -> None:
        await a_life(tmp_path)
        (lease, *_), _, plane = await resumed(tmp_path)
        await plane.data.publish(1, "d1")
        group = of_lineage("L1", answer(lease, (0, "d0"), (1, "d1")))
        (receipt,) = await plane.data.submit("w0", 0, [(lease.lease_id, group)])
        assert receipt.accepted
        await plane.data.close()

    asyncio.run(main())
    row = StoreSnapshot(tmp_path / "replay").table().to_pylist()[0]
    assert (row["span_versions"], row["lineage"], row["version"]) == ([0, 1], "L1", 0)


def test_a_version_beyond_the_checkpoint_is_of_the_old_line_only() -> None:
    old = Lineage("L0")
    for version in range(5):
        old.publish(version, f"d{version}")
    new = Lineage("L1", old.published, 2)
    assert dict(new.digests) == {0: "d0", 1: "d1", 2: "d2"}
    new.publish(2, "e2")
    new.publish(3, "e3")
    assert dict(new.digests) == {0: "d0", 1: "d1", 2: "e2", 3: "e3"}
    # What the first one went on to is not of the third one's past either, whatever the number.
    third = Lineage("L2", new.published, 4)
    assert dict(third.digests) == dict(new.digests)
    with pytest.raises(LeaseError, match="twice"):
        new.publish(3, "d3")


def test_a_lineage_forgets_versions_that_may_no_longer_be_trained() -> None:
    old = Lineage("L0", kept=3)
    for version in range(5):
        old.publish(version, f"d{version}")
    assert dict(old.digests) == {2: "d2", 3: "d3", 4: "d4"}
    new = Lineage("L1", old.published, 3, kept=3)
    new.publish(3, "e3")  # is known twice, and stays known once the first is forgotten
    new.publish(4, "e4")
    assert new.published == (("L0", 3, "d3"), ("L1", 3, "e3"), ("L1", 4, "e4"))
    new.publish(5, "e5")
    assert dict(new.digests) == {3: "e3", 4: "e4", 5: "e5"}


def test_a_result_of_another_lineage_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        await a_life(tmp_path)
        (lease, *_), _, plane = await resumed(tmp_path)
        group = of_lineage("L0", answer(lease))
        (receipt,) = await plane.data.submit("w0", 0, [(lease.lease_id, group)])
        assert (receipt.accepted, receipt.reason) == (False, "unpublished")
        await plane.data.close()

    asyncio.run(main())
