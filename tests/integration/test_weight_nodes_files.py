"""A worker's node that has the model's files is not sent the first version; one with other files is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from echo_planes.types import Manifest
from echo_planes.weights.codec.entry import full_payload
from echo_planes.weights.digest import BitTensor
from echo_planes.weights.node.client import WorkerNode
from echo_planes.weights.node.shelf import KEPT_PATCHES
from echo_planes.weights.publisher import Publisher
from tests.integration.weight_nodes import LIMIT_S, Fleet, until_true

Bits = dict[str, BitTensor]
KIND = "bfloat16", (900, 1000)


def model(seed: int) -> Bits:
    random = np.random.default_rng(seed)
    return {
        "embed.weight": BitTensor(
            random.integers(0, 2**15, 900_000, dtype=np.uint16), "bfloat16", (900, 1000)
        ),
        "norm.weight": BitTensor(random.integers(0, 2**15, 1000, dtype=np.uint16), "bfloat16", (1000,)),
    }


def files_of(tensors: Bits, folder: Path) -> str:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    full_payload(tensors).tofile(folder / "model.safetensors")
    return str(folder)


class _Fast:
    """As `CodecChoice`: always the same."""

    def codec(self, *states: object) -> str:
        return "fast"


async def installed(worker: WorkerNode, manifest: Manifest) -> tuple[int, int]:
    """Take a version as an engine does; return the bytes received and made so far."""
    staged, _ = await worker.staged("run", manifest.version, LIMIT_S)
    assert staged.digest == manifest.digest
    await worker.settled(manifest.version, True)
    status = await worker.status()
    return status["bytes_received"], status["bytes_made"]


@pytest.mark.parametrize("late", [False, True])
def test_the_first_version_goes_only_to_nodes_without_the_model_s_files(late: bool, tmp_path: Path) -> None:
    first = model(1)
    same, other = files_of(first, tmp_path / "same"), files_of(model(2), tmp_path / "other")

    async def run() -> None:
        async with Fleet() as fleet:
            publisher = Publisher("run", fleet.signer, fleet.sender, choice=_Fast())  # type: ignore[arg-type]

            async def publish(version: int, tensors: Bits) -> Manifest:
                manifest = await asyncio.to_thread(publisher.publish, version, version, tensors)
                await asyncio.to_thread(publisher.commit)
                return manifest

            async def begin() -> None:
                for number, folder in enumerate((same, other, ""), start=1):
                    await fleet.add(f"w{number}", staging=True, model_folder=folder)
                    await fleet.until_obeyed(number, LIMIT_S)

            if not late:
                await begin()
            zero = await publish(0, first)
            if late:
                await begin()
            size = zero.payload_bytes
            figures = [await installed(worker, zero) for worker in fleet.workers.values()]
            assert figures == [(0, size), (size, 0), (size, 0)]
            nodes = [await fleet.status(), *[await worker.status() for worker in fleet.workers.values()]]
            assert 2 * size <= sum(node["bytes_sent"] for node in nodes) < 2.5 * size  # over all links

            bits = first["embed.weight"].bits.copy()
            bits[::100] ^= 1
            one = await publish(1, first | {"embed.weight": BitTensor(bits, *KIND)})
            figures = [await installed(worker, one) for worker in fleet.workers.values()]
            patch = one.payload_bytes
            assert figures == [(patch, size), (size + patch, 0), (size + patch, 0)]

    asyncio.run(asyncio.wait_for(run(), 90))


def test_a_late_node_makes_the_first_version_and_fetches_the_patches(tmp_path: Path) -> None:
    state = model(1)
    folder = files_of(state, tmp_path / "same")

    async def run() -> None:
        nonlocal state
        async with Fleet(store=str(tmp_path / "store")) as fleet:
            publisher = Publisher("run", fleet.signer, fleet.sender, choice=_Fast())  # type: ignore[arg-type]
            for version in range(KEPT_PATCHES + 3):  # the sender's node itself keeps no way from the start
                bits = state["embed.weight"].bits.copy()
                bits[version * 1000 : (version + 1) * 1000] ^= 1
                state = state if version == 0 else state | {"embed.weight": BitTensor(bits, *KIND)}
                for _ in range(2 if version == 1 else 1):  # the second time in full: the way has a choice
                    newest = await asyncio.to_thread(publisher.publish, version, version, state)
                    await asyncio.to_thread(publisher.commit)

            async def stored() -> bool:
                return bool((await fleet.status())["store"]["waiting"] == 0)

            await until_true(stored, LIMIT_S, "the store to have everything")
            worker = await fleet.add("w", staging=True, model_folder=folder)
            received, made = await installed(worker, newest)
            assert made == full_payload(state).size
            assert received < 0.1 * made  # patches, manifests and headers

    asyncio.run(asyncio.wait_for(run(), 90))
