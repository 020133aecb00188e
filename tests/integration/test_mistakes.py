"""A person's mistakes: each ends at once with one line that says what, which value, why and what to do."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from echo_planes.config.schema import BUILTIN_MODELS
from tests.integration.harness import Answer, program, several
from tests.thorough import takes_minutes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Mistake:
    """`@` in words and in what the line must say stands for the folder of `mistake_files`, `#` for a port."""

    words: tuple[str, ...]
    says: tuple[str, ...]


MISTAKES = {
    "missing model": Mistake(("model.path=@nowhere",), ("model.path=@nowhere", "no such folder", "give a")),
    "model without weights": Mistake(
        ("model.path=@no-weights",), ("model.path=@no-weights", "no *.safetensors")
    ),
    "model group": Mistake(("model=@nowhere",), ("model=@nowhere", "unknown", "tiny")),
    "no end token": Mistake(
        ("model.path=@no-end",), ("model.path=@no-end", "no end token", "never stop", "set 'eos_token'")
    ),
    "negative staleness": Mistake(
        ("staleness.max_staleness=-1",), ("staleness.max_staleness=-1", "greater than or equal to 0")
    ),
    "kappa too large": Mistake(
        ("staleness.max_staleness=1", "staleness.publish_every=3"),
        ("publish_every=3", "max_staleness + 1 = 2", "lower publish_every or raise max_staleness"),
    ),
    "zero workers": Mistake(
        ("fleet.workers.0.count=0", "fleet.workers.1.count=0"),
        ("fleet.workers", "zero workers", "at least 1"),
    ),
    "no room for a prompt": Mistake(
        ("sampling.max_new_tokens=512",),
        ("sampling.max_new_tokens=512", "model.max_model_len=512", "lower the one or raise the other"),
    ),
    "missing data": Mistake(
        ("task.dataset=gsm8k", "task.data=@nowhere"), ("@nowhere", "No such file", "set task.data=PATH")
    ),
    "no data named": Mistake(("task.dataset=gsm8k",), ("task.dataset=gsm8k", "set task.data=PATH")),
    "corrupt data": Mistake(
        ("task.dataset=gsm8k", "task.data=@corrupt.jsonl.gz"),
        ("@corrupt.jsonl.gz", "cannot be read", "set task.data=PATH"),
    ),
    "other data": Mistake(
        ("task.dataset=gsm8k", "task.data=@other.jsonl"),
        ("@other.jsonl", "row 1 is not a gsm8k row", "set task.data=PATH"),
    ),
    "learner port in use": Mistake(
        ("learner.num_ranks=2", "learner.master_port=#"),
        ("learner.master_port=#", "in use", "choose another"),
    ),
    "metrics port in use": Mistake(
        ("run.metrics_port=#",), ("run.metrics_port=#", "in use", "choose another")
    ),
    "weights port in use": Mistake(("weights.port=#",), ("weights.port=#", "in use", "choose another")),
    "no signing key": Mistake(
        ("weights.key_file=@nowhere",), ("@nowhere", "cannot be read", "openssl genpkey")
    ),
    "a signing key that is none": Mistake(
        ("weights.key_file=@corrupt.jsonl.gz",), ("@corrupt.jsonl.gz", "key file")
    ),
    "half a TLS": Mistake(
        ("weights.tls_cert=cert.pem",), ("tls_cert, tls_key and tls_ca", "all three or none")
    ),
    "a store that is a file": Mistake(
        ("weights.store=@other.jsonl",), ("weights.store=@other.jsonl", "is a file", "give a folder")
    ),
    "a store nobody answers for": Mistake(
        ("weights.store=s3://bucket/run?endpoint_override=http://127.0.0.1:1",),
        ("weights.store=s3://bucket/run", "check"),
    ),
    "port out of range": Mistake(("learner.master_port=80",), ("learner.master_port=80", "1024")),
    "unknown section": Mistake(("stalenes.policy=wait",), ("stalenes", "unknown key", "'staleness'")),
    "unknown key": Mistake(
        ("staleness.max_stalenes=2",), ("staleness.max_stalenes=2", "unknown key", "'max_staleness'")
    ),
    "unknown task option": Mistake(("task.max_operands=50",), ("task.max_operands=50", "'max_operand'")),
    "unknown group": Mistake(("fleet=labtop",), ("fleet=labtop", "single", "'laptop'")),
    "unknown value": Mistake(("staleness.policy=wiat",), ("staleness.policy='wiat'", "'drop' or 'wait'")),
    "wrong type": Mistake(("run.steps=many",), ("run.steps='many'", "valid integer")),
    "wrong type of a task option": Mistake(("task.max_operand=x",), ("task.max_operand='x'", "integer")),
    "unknown task class": Mistake(
        ("task=echo_planes.nothing:Here",), ("echo_planes.nothing:Here", "no module", "check the spelling")
    ),
    "not key=value": Mistake(("steps",), ("'steps'", "key=value", "--help")),
    "resume nowhere": Mistake(("run.resume=@nowhere",), ("run.resume=@nowhere", "no config.yaml", "give")),
    "resume without a checkpoint": Mistake(
        ("run.resume=@no-checkpoint",), ("run.resume=@no-checkpoint", "no checkpoint", "start anew")
    ),
    "resume with another seed": Mistake(
        ("run.resume=@no-checkpoint", "run.seed=3"),
        ("run.resume=@no-checkpoint", "run.seed was 0 and is now 3", "start a new run"),
    ),
    "resume with another model": Mistake(
        ("run.resume=@no-checkpoint", "model=tiny_code"),
        ("model.path was builtin:tiny-math and is now builtin:tiny-code", "the same model"),
    ),
    "folder of another run": Mistake(
        ("run.dir=@another",), ("run.dir=@another", "another run", "run.resume=@another")
    ),
    "an unset variable": Mistake(("run.resume=",), ("run.resume=", "no value", "run.resume=null")),
    "a date": Mistake(("run.steps=2026-02-30",), ("run.steps='2026-02-30'", "valid integer")),
    "octal": Mistake(("run.seed=010",), ("run.seed='010'", "valid integer")),
    "minutes": Mistake(("run.steps=12:30",), ("run.steps='12:30'", "valid integer")),
    "5,000 digits": Mistake(("run.steps=" + "9" * 5000,), ("run.steps=", "is not YAML", "limit")),
    "deep brackets": Mistake(("run.dir=" + "[" * 5000,), ("run.dir=", "nested more than")),
    "a task that exits": Mistake(
        ("task=tests.integration.exits:Task",), ("exits.py:3", "SystemExit: an accident", "correct it")
    ),
    "a tokenizer that is a list": Mistake(
        ("model.path=@list-tokenizer",), ("list-tokenizer", "cannot be loaded", "save the tokenizer again")
    ),
    "a pipe as data": Mistake(
        ("task.dataset=gsm8k", "task.data=@pipe.jsonl"), ("@pipe.jsonl", "a named pipe", "set task.data=PATH")
    ),
    "a bomb as data": Mistake(
        ("task.dataset=gsm8k", "task.data=@bomb.jsonl.gz"), ("@bomb.jsonl.gz", "unpacks to", "unpacked")
    ),
    "a pipe as a configuration": Mistake(("fleet=@pipe.yaml",), ("@pipe.yaml", "a named pipe")),
    "folder is a file": Mistake(("run.dir=/dev/full",), ("run.dir=/dev/full", "Not a directory", "choose")),
}
BOMB = (b'{"question": "' + b"x" * 1000 + b'", "answer": "#### 2"}\n') * 50_000
SAYS = {"print": ("--print",), "help": ("--help",)}  # no mistakes, but they start nothing either


@pytest.fixture(scope="module")
def mistake_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of things that cannot be used."""
    folder = tmp_path_factory.mktemp("mistakes")
    model = BUILTIN_MODELS["builtin:tiny-math"]
    shutil.copytree(model, folder / "no-end")
    settings = folder / "no-end" / "tokenizer_config.json"
    tokenizer = json.loads(settings.read_text())
    del tokenizer["eos_token"]
    settings.write_text(json.dumps(tokenizer))
    shutil.copytree(model, folder / "no-weights", ignore=shutil.ignore_patterns("*.safetensors"))
    whole = gzip.compress(b'{"question": "1 + 1?", "answer": "#### 2"}\n' * 1000)
    (folder / "corrupt.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (folder / "other.jsonl").write_text('{"problem": "1 + 1?", "answer": "2"}\n')
    (folder / "bomb.jsonl.gz").write_bytes(gzip.compress(BOMB))
    for name in ("pipe.jsonl", "pipe.yaml"):
        os.mkfifo(folder / name)
    shutil.copytree(model, folder / "list-tokenizer")
    (folder / "list-tokenizer" / "tokenizer.json").write_text("[]")
    (folder / "no-checkpoint").mkdir()
    (folder / "no-checkpoint" / "config.yaml").write_text("run: {steps: 20}\n")
    (folder / "another").mkdir()
    (folder / "another" / "metrics.jsonl").write_text('{"step": 1}\n')
    return folder


@pytest.fixture(scope="module")
def used_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cwd") / "work"


@pytest.fixture(scope="module")
def answers(mistake_files: Path, used_port: int, work_dir: Path) -> dict[str, Answer]:
    """Answers of the program to each mistake; all are made in one process, in the same order."""
    cases = {
        name: [fill(word, mistake_files, used_port) for word in mistake.words]
        for name, mistake in MISTAKES.items()
    }
    return several({**SAYS, **cases}, work_dir)


def fill(text: str, folder: Path, port: int) -> str:
    return text.replace("@", f"{folder}/").replace("#", str(port))


def one_line(answer: Answer) -> str:
    """The line of a refusal."""
    assert answer.status == 2
    (line,) = answer.stderr.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in answer.stdout
    return line


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_that_helps(
    name: str, answers: dict[str, Answer], mistake_files: Path, used_port: int
) -> None:
    line = one_line(answers[name])
    for part in MISTAKES[name].says:
        assert fill(part, mistake_files, used_port) in line


def test_mistakes_print_and_help_leave_nothing_behind(
    answers: dict[str, Answer], work_dir: Path, mistake_files: Path
) -> None:
    assert set(answers) == {*SAYS, *MISTAKES}
    assert list(work_dir.iterdir()) == []
    assert sorted(path.name for path in (mistake_files / "another").iterdir()) == ["metrics.jsonl"]
    assert sorted(path.name for path in (mistake_files / "no-checkpoint").iterdir()) == ["config.yaml"]


def test_print_shows_the_configuration(answers: dict[str, Answer]) -> None:
    answer = answers["print"]
    assert (answer.status, answer.stderr) == (0, "")
    assert "max_staleness: 3" in answer.stdout
    assert "sku: cpu-large" in answer.stdout


def test_help_lists_every_section_and_the_tasks_options(answers: dict[str, Answer]) -> None:
    answer = answers["help"]
    assert (answer.status, answer.stderr) == (0, "")
    for key in ("run.resume", "staleness.max_staleness=3", "learner.lr", "checkpoint.keep", "task.dataset"):
        assert key in answer.stdout


def test_the_shell_sees_one_line_and_a_failure(tmp_path: Path) -> None:
    with program(tmp_path / "work", tmp_path / "run", "run.steps=0") as run:
        status = run.wait()
    assert "run.steps=0" in one_line(Answer(status, run.stdout, run.stderr))
    assert not run.run_dir.exists()


def test_a_fleet_that_does_not_fit_the_cluster(tmp_path: Path) -> None:
    words = ("fleet=single", "fleet.workers.0.resources={CPU: 1000}")
    with program(tmp_path / "work", tmp_path / "run", *words) as run:
        status = run.wait()
        assert run.left_behind() == []
    line = one_line(Answer(status, run.stdout, run.stderr))
    assert "1001 CPU" in line
    assert "smaller fleet" in line
    assert not run.run_dir.exists()


@takes_minutes
def test_an_address_that_is_not_this_machines_ends_the_run_by_its_name(tmp_path: Path) -> None:
    """Only the learner's machine can tell, so its node finds it, before the model is loaded."""
    with program(tmp_path / "work", tmp_path / "run", "weights.host=203.0.113.1", "run.steps=1") as run:
        status = run.wait()
        assert run.left_behind() == []
    assert status == 2
    line = run.stderr.splitlines()[-1]  # Ray may have said something before
    assert line.startswith("error: a weight node cannot listen on 203.0.113.1")
    assert "set weights.port or weights.host" in line
    assert "learner ... ready" not in run.stdout


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of 8 MiB."""
    folder = tmp_path_factory.mktemp("disk")
    with ExitStack() as stack:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        if mounted.returncode:
            pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
        stack.callback(subprocess.run, ["umount", str(folder)], check=True)
        yield folder


def test_a_disk_that_is_too_small_or_full(small_disk: Path, tmp_path: Path) -> None:
    where = small_disk / "runs" / "mine"
    almost = several({"small": [f"run.dir={where}"]}, tmp_path / "small")["small"]
    line = one_line(almost)
    assert f"run.dir={where}: only 8 MiB are free" in line
    assert "free some space" in line
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(b"\0" * 9 * 1024**2)
    full = several({"full": [f"run.dir={where}"]}, tmp_path / "full")["full"]
    line = one_line(full)
    assert f"run.dir={where}: cannot be written (No space left on device)" in line
    assert "free some space" in line
    assert not where.exists()
