"""A model that ranks divide as they read it: the same weights, and no rank ever holds them all."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.integration.harness import ROOT
from tests.thorough import takes_minutes

LAYERS, HIDDEN, INNER, VOCABULARY = (
    24,
    512,
    2048,
    1024,
)  # 0.1 billion weights, of which no tensor has a share of note
RANKS = 2

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    words = [sys.executable, "-m", "tests.integration.test_model_files", "write", str(path)]
    subprocess.run(words, cwd=ROOT, check=True, timeout=120)
    return path


@takes_minutes
def test_no_rank_holds_a_whole_model(folder: Path, tmp_path: Path) -> None:
    told = [tmp_path / f"{rank}.json" for rank in range(RANKS)]
    module = [sys.executable, "-m", "tests.integration.test_model_files", "load"]
    common = [str(folder), str(tmp_path / "meeting")]
    ranks = [
        subprocess.Popen([*module, *common, str(rank), str(out)], cwd=ROOT) for rank, out in enumerate(told)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()
    for divided, whole in (json.loads(out.read_text()) for out in told):
        assert 0.45 < divided["peak_bytes"] / divided["model_bytes"] < 0.7
        assert whole["peak_bytes"] / whole["model_bytes"] > 0.95  # the control
        assert divided["sum"] == pytest.approx(whole["sum"], rel=1e-9)


def write(folder: Path) -> None:
    """Write a model in bf16, from a seed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=8, num_key_value_heads=8, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def loaded(folder: Path, zero_stage: int) -> dict[str, float]:
    """Load it as one rank, and return how much memory that took at most."""
    import deepspeed
    import torch

    from echo_planes.cluster.process import release_freed
    from echo_planes.config.schema import LearnerConfig
    from echo_planes.learning.deepspeed_engine import keeping_shares
    from echo_planes.learning.policy_model import load_policy

    place = keeping_shares(LearnerConfig(num_ranks=RANKS, zero_stage=zero_stage), torch.float32)
    gc.collect()
    release_freed()  # what an earlier model has left would hide as much of this one
    before, peak, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    model = load_policy(folder, torch.float32, 1.0, 1.0, place=place)
    done.set()
    thread.join()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=place is not None):
        total = sum(float(parameter.detach().double().abs().sum()) for parameter in model.parameters())
        size = sum(parameter.numel() for parameter in model.parameters())
    return {"peak_bytes": peak[0] - before, "model_bytes": 4.0 * size, "sum": total}


def load(folder: Path, meeting: str, rank: int, out: Path) -> None:
    """Load it divided and whole."""
    import torch

    from echo_planes.learning.deepspeed_engine import joined

    store = torch.distributed.FileStore(meeting, RANKS)
    with joined(torch.device("cpu"), rank, RANKS, store):
        out.write_text(json.dumps([loaded(folder, zero_stage) for zero_stage in (3, 1)]))
        torch.distributed.barrier()


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        load(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
