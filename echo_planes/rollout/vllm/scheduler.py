"""vLLM's scheduler with a prefix cache that serves what the present weights have computed, and nothing older.

An install pauses generation and leaves the cache as it is, so that running requests keep their keys and
values, and nothing is computed twice. But blocks of older weights must not serve requests that start later.
vLLM finds a block by a hash of its tokens and of all before it, which begins with the request's salt. Here
the salt is the number of pauses so far: the present one for a request that has computed nothing yet; for a
running request the one under which it started, also for the blocks that it fills later. So a request that
starts after a pause finds only blocks of requests that started after it, too.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class _SaltedByPause(Scheduler):  # type: ignore[misc]
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.pauses = 0

    def add_request(self, request: Request) -> None:
        self._salt(request)
        super().add_request(request)

    def set_pause_state(self, pause_state: PauseState) -> None:
        if self.pause_state != PauseState.UNPAUSED and pause_state == PauseState.UNPAUSED:
            self.pauses += 1
            for request in self.waiting:
                self._salt(request)
        super().set_pause_state(pause_state)

    def _preempt_request(self, request: Request, *args: Any, **named: Any) -> None:
        super()._preempt_request(request, *args, **named)
        self._salt(request)  # it starts anew: blocks that it has left behind may be of older weights

    def _salt(self, request: Request) -> None:
        request.cache_salt = str(self.pauses)
        request.block_hashes.clear()
        request.update_block_hashes()


class SyncScheduler(_SaltedByPause):
    """Scheduler of engines that schedule a step when the one before it has ended."""


class AheadScheduler(_SaltedByPause, AsyncScheduler):  # type: ignore[misc]
    """Scheduler of engines that schedule a step while the one before it runs."""
