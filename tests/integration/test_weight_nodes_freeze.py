"""Relays that keep their children from new versions, each in its own way: real nodes on loopback."""

from __future__ import annotations

import contextlib

import pytest

from echo_planes.weights.node.process import Node
from echo_planes.weights.wire.signing import Signer
from tests.integration.hostile_relay import FREEZES, HostileRelay
from tests.integration.weight_nodes import (
    LIMIT_S,
    Signed,
    hand_over,
    held,
    publication,
    run,
    running,
    settings,
    until,
)

STARVED_S = 1.0
CHUNK_BYTES = 16 * 1024


def parent_of(sender: Node, name: str) -> str | None:
    parent: str | None = sender.role.dispatch.peers().get(name)
    return parent


async def published(sender: Node, signer: Signer, version: int, relays: list[HostileRelay]) -> Signed:
    """A version that the relays say at once that they have."""
    signed = publication(signer, version, 200_000, chunk_bytes=CHUNK_BYTES)
    for relay in relays:
        relay.old, relay.offered = relay.offered, signed
    await hand_over(sender, signed)
    return signed


@pytest.mark.parametrize("way", FREEZES)
def test_a_child_of_a_freezing_relay_gets_every_version(way: str) -> None:
    async def story() -> None:
        async with contextlib.AsyncExitStack() as stack:
            signer = Signer.generate()
            sender = await stack.enter_async_context(running(settings(signer, "sender", starved_s=STARVED_S)))
            worker = await stack.enter_async_context(running(settings(signer, "w0", sender.address)))
            await until(lambda: parent_of(sender, "w0") == "sender", LIMIT_S, "w0 to join")
            relay = HostileRelay(sender.address, "relay", FREEZES[way])  # the newest is first in the chain
            await stack.enter_async_context(relay)
            await until(lambda: relay.num_feeds > 0, LIMIT_S, "w0 to pull from the relay")
            assert parent_of(sender, "w0") == "relay"
            for version in (1, 2, 3):
                signed = await published(sender, signer, version, [relay])
                what = f"version {version} at w0"
                await until(lambda signed=signed: held(worker, signed) is not None, LIMIT_S, what)  # type: ignore[misc]
            assert parent_of(sender, "relay") == "w0"  # a leaf of its former child
            assert "relay" in sender.role.dispatch.peers()  # it is watched, not expelled: nothing is proven

    run(story)


def test_five_freezing_relays_keep_nothing_from_honest_workers() -> None:
    async def story() -> None:
        async with contextlib.AsyncExitStack() as stack:
            signer = Signer.generate()
            sender = await stack.enter_async_context(running(settings(signer, "sender", starved_s=STARVED_S)))
            workers = [
                await stack.enter_async_context(running(settings(signer, f"w{number}", sender.address)))
                for number in range(3)
            ]
            await until(lambda: len(sender.role.dispatch.peers()) == 3, LIMIT_S, "the workers to join")
            relays = []
            for number, serves in enumerate(FREEZES.values()):
                relays.append(HostileRelay(sender.address, f"relay{number}", serves))
                await stack.enter_async_context(relays[-1])
            await until(lambda: any(relay.num_feeds for relay in relays), LIMIT_S, "a relay to be asked")
            for version in (1, 2, 3):
                signed = await published(sender, signer, version, relays)
                for worker in workers:
                    await until(
                        lambda worker=worker, signed=signed: held(worker, signed) is not None,  # type: ignore[misc]
                        LIMIT_S,
                        f"version {version} at {worker.settings.node_id}",
                    )

    run(story)
