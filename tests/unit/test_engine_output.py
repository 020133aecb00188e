"""Why an engine did not start: found in what its processes print, kept in bounds, and judged."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from echo_planes.errors import EngineStartError
from echo_planes.rollout.vllm.output import KEPT_BYTES, EngineOutput, root_cause, would_fail_again
from echo_planes.rollout.vllm.work_counter import WorkCounter

FRAMES = """\
Traceback (most recent call last):
  File "core.py", line 1482, in run_engine_core
    engine_core = EngineCoreProc(*args, **kwargs)
                  ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^"""
ENDED = "Process EngineCore:\n" + FRAMES + "\n{}\n"


def record(process: str, *lines: str) -> list[str]:
    """The lines of a record as vLLM prints them."""
    text = "\n".join(lines)
    return [f"({process}) ERROR 11-28 10:25:25 [core.py:1510] {line}" for line in text.splitlines()]


def engine(*lines: str) -> str:
    return "\n".join(record("EngineCore pid=6083", "EngineCore failed to start.", *lines))


PAGES = "ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])."
NOISE = "W1128 10:25:20.546000 6083 torch/_library/triton.py:53] Triton not available\n"
DIRECT = "\nThe above exception was the direct cause of the following exception:\n"
CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n"


def test_the_cause_is_the_exception_in_the_record_of_the_failed_start() -> None:
    assert root_cause(NOISE + engine(FRAMES, PAGES) + "\n" + ENDED.format("Exception: later")) == PAGES


def test_an_earlier_traceback_that_ended_nothing_is_not_the_cause() -> None:
    harmless = "\n".join(record("EngineCore pid=6083", "could not tell usage", FRAMES, "OSError: no network"))
    assert root_cause(f"{harmless}\n{engine(FRAMES, PAGES)}") == PAGES


def test_of_an_exception_raised_from_another_the_other_is_the_cause() -> None:
    text = engine(FRAMES, "KeyError: 'q_proj'", DIRECT, FRAMES, "RuntimeError: loading failed")
    assert root_cause(text) == "KeyError: 'q_proj'"


def test_of_an_exception_raised_while_another_was_handled_the_last_is_the_cause() -> None:
    text = engine(FRAMES, "KeyError: 'foo'", CONTEXT, FRAMES, "ValueError: model type foo is unknown")
    assert root_cause(text) == "ValueError: model type foo is unknown"


def test_the_cause_of_an_engine_of_several_ranks_is_that_of_the_rank_that_failed_first() -> None:
    first = record("Worker_TP1 pid=12", "WorkerProc failed to start.", FRAMES, "AssertionError: 3 heads")
    other = record("Worker_TP0 pid=11", "WorkerProc failed to start.", FRAMES, "RuntimeError: peer is gone")
    mixed = [line for pair in zip(first, other, strict=True) for line in pair]
    behind = engine(FRAMES, "Exception: WorkerProc initialization failed, see the stack trace.")
    assert root_cause("\n".join(mixed) + "\n" + behind) == "AssertionError: 3 heads"


def test_a_message_of_several_lines_is_one_line() -> None:
    text = engine(FRAMES, "ValidationError: 1 error for X", "  Input should be valid", "", "[next record]")
    assert root_cause(text) == "ValidationError: 1 error for X Input should be valid"


def test_a_process_that_failed_before_it_logs_is_read_too() -> None:
    assert root_cause(NOISE + FRAMES + "\nModuleNotFoundError: No module named 'x'\n").endswith("'x'")


@pytest.mark.parametrize("text", ["", NOISE, "terminate called after throwing std::bad_alloc\n"])
def test_a_killed_process_leaves_no_cause(text: str) -> None:
    assert root_cause(text) == ""


@pytest.mark.parametrize(
    ("cause", "again"),
    [
        (PAGES, True),
        ("AssertionError", True),
        ("pydantic_core._pydantic_core.ValidationError: 1 validation error", True),
        ("NotImplementedError: FP8 KV cache requires head_size divisible by 32 on CPU.", True),
        ("ValueError: No available memory for the cache blocks.", True),
        ("echo_planes.errors.WeightsError: parameter x cannot be mapped", True),
        ("", False),
        ("torch.OutOfMemoryError: CUDA out of memory.", False),
        ("RuntimeError: Gloo connectFullMesh failed", False),
        ("OSError: [Errno 28] No space left on device", False),
        ("ValueError: Free memory on device (3.1/79 GiB) on startup is less than desired", False),
        ("AssertionError: Error in memory profiling. Initial free memory 10 GiB", False),
    ],
)
def test_what_an_engine_refuses_would_fail_again_and_what_others_did_would_not(
    cause: str, again: bool
) -> None:
    assert would_fail_again(cause) is again


def child(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_output_of_both_streams_is_kept_and_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    output = EngineOutput()
    usual = [os.readlink(f"/proc/self/fd/{one}") for one in (1, 2)]
    with output.taken():
        child("import sys; print('said', flush=True); print('cried', file=sys.stderr)")
    assert output.text(60.0) == "said\ncried\n"
    assert capfd.readouterr().err == "said\ncried\n"
    assert [os.readlink(f"/proc/self/fd/{one}") for one in (1, 2)] == usual


def test_of_long_output_begin_and_end_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    output = EngineOutput()
    with output.taken():
        child("print('begin'); print('x' * 1_000_000); print('end')")
    text = output.text(60.0)
    assert text.startswith("begin\n")
    assert text.endswith("x\nend\n")
    assert "bytes left out]" in text
    assert len(text) < 2 * KEPT_BYTES + 100
    assert len(capfd.readouterr().err) > 1_000_000


def test_the_error_travels_with_its_output() -> None:
    sent = pickle.loads(pickle.dumps(EngineStartError("it did not start", "text", is_final=True)))
    assert (str(sent), sent.output, sent.is_final) == ("it did not start", "text", True)


def test_a_counter_is_read_while_another_process_raises_it(tmp_path: Path) -> None:
    counter = WorkCounter(tmp_path / "computed", create=True)
    assert str(counter) == "0 tokens and 0 layers computed"
    child(
        "from echo_planes.rollout.vllm.work_counter import WorkCounter; from pathlib import Path\n"
        f"other = WorkCounter(Path({str(tmp_path / 'computed')!r}), create=False)\n"
        "other.add_tokens(2048); other.add_layer()"
    )
    assert str(counter) == "2048 tokens and 1 layers computed"
