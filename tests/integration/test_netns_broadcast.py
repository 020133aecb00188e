"""Real nodes on shaped links in network namespaces: the chain against the star, and forwarders that fail.

The bars themselves are held by `bench.broadcast` on a quiet machine; here the times only have to be of the
right kind, since other tests may run beside.
"""

from __future__ import annotations

import asyncio
import functools
import http.client

import pytest
from blake3 import blake3

from bench.broadcast import BAR, DETECTION_BAR_S, Case, Fault, Fleet, faulted, unfaulted
from echo_planes.weights.wire.manifest import key_text
from tests.integration.netns import missing
from tests.integration.weight_nodes import Signed, as_node
from tests.thorough import takes_minutes

SIZE_BYTES = 30_000_000
SLACK = 4.0  # times the bar: this is no quiet machine, and perhaps a slow one
B0_MBIT, BW_MBIT = 300.0, 100.0

pytestmark = [
    pytest.mark.integration,
    takes_minutes,
    pytest.mark.skipif(bool(missing()), reason=f"not shown: {missing()}"),
]


def check_bytes(fleet: Fleet, signed: Signed, workers: list[int]) -> None:
    """Ask each of these workers for the whole payload, over the network, and compare its BLAKE3."""
    for number in workers:
        host = number + 1
        address = fleet.workers[number].address.removeprefix("http://")
        with fleet.net.inside(host):
            connection = http.client.HTTPConnection(address, timeout=30)
            connection.request(
                "GET",
                f"/v1/publications/{key_text(signed.key)}/payload",
                headers=as_node("reader", at=f"w{number:02d}"),
            )
            payload = connection.getresponse().read()
            connection.close()
        assert f"b3:{blake3(payload).hexdigest()}" == signed.payload_digest, f"worker {number}"


@functools.cache
def broken(fault: Fault) -> Case:
    """A broadcast whose chain was not disturbed, and then one in which a forwarder fails, on one fleet."""
    return asyncio.run(faulted(fault, 8, B0_MBIT, BW_MBIT, SIZE_BYTES, check=check_bytes))


FAULTS: tuple[Fault, ...] = ("killed", "partitioned", "slowed")


def test_a_chain_beats_the_star_and_comes_near_the_ideal() -> None:
    """The best of the chains: a machine that is busy elsewhere delays those who forward most."""
    chains = [broken(fault) for fault in FAULTS]
    [star] = asyncio.run(unfaulted(8, B0_MBIT, BW_MBIT, "star", [SIZE_BYTES], check=check_bytes))
    assert {chain.hops for chain in chains} == {3}
    assert star.hops == 1
    seconds = [chain.unfaulted_s for chain in chains if chain.unfaulted_s is not None]
    assert len(seconds) == len(FAULTS)
    assert min(seconds) < star.seconds
    assert min(seconds) <= SLACK * BAR * chains[0].ideal_s


@pytest.mark.parametrize("fault", FAULTS)
def test_a_forwarder_that_fails_in_mid_broadcast_is_repaired(fault: Fault) -> None:
    case = broken(fault)
    if case.detection_s is not None:  # a slow forwarder may have nothing left to forward by then
        assert case.detection_s <= SLACK * DETECTION_BAR_S
    else:
        assert fault == "slowed"
    assert case.seconds <= SLACK * case.bar_s
