"""A hostile worker with a valid credential: each attack is refused by name and changes nothing."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.integration.hostile_attacks import ATTACKS, run_attacks
from tests.integration.hostile_field import Field

LIMIT_S = 180.0
LEAST_ATTACKS = 60


def test_every_attack_is_refused_and_changes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    async def story() -> None:
        async with Field() as field:
            verdicts = await run_attacks(field)
            assert len(verdicts) >= LEAST_ATTACKS
            lost = {name: verdict for name, verdict in verdicts.items() if not verdict.held}
            assert lost == {}
            await field.publish()  # and all go on

    asyncio.run(asyncio.wait_for(story(), LIMIT_S))
    assert "Traceback" not in capfd.readouterr().err


def test_the_attacks_can_succeed() -> None:
    """Each check of a verdict fails where it should: the state follows what nodes hold, and so on."""

    async def story() -> None:
        async with Field() as field:
            before = field.state()
            await field.publish()
            assert field.state() != before
            assert await field.serves()
            await field.workers["w1"].close()
            with pytest.raises(aiohttp.ClientError):
                await field.serves()

    asyncio.run(asyncio.wait_for(story(), LIMIT_S))
    assert len({attack.act for attack in ATTACKS.values()}) == len(ATTACKS)
