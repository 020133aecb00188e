"""configs/cluster: what is handed to `ray up` and to Kubernetes says the same as the fleet asks for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from bench.chaos.recovery import RECOMMENDED
from echo_planes.cluster.gpu_driver import OLDEST_DRIVER
from echo_planes.config.fleet import WorkerConfig
from echo_planes.fleet.actuators.actuator import node_type
from echo_planes.fleet.sku_facts import SKU_FACTS
from echo_planes.learning.footprint import GIB
from tests.unit.test_gpu_docs import SHAPES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "cluster"
LAUNCHER_FILES = ("aws_spot", "gcp_spot")
ALL_FILES = (*LAUNCHER_FILES, "kuberay")
BUILT_IN = ("CPU", "GPU", "memory")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHON = "3.11"  # of the lock file

# What wheels of the pinned versions want: CUDA's major version, and glibc. (vLLM's own wants 2.28, but
# llguidance, which it asks for, 2.31.)
WHEELS = {"torch==2.13.0": (13, (2, 28)), "vllm==0.32.0": (13, (2, 31))}
GLIBC = {"1804": (2, 27), "2004": (2, 31), "2204": (2, 35), "2404": (2, 39)}  # of Ubuntu's releases
# Names of machine images, with Ubuntu's release and the driver. AWS does not name the driver:
# this is the oldest since December 2025.
AWS_IMAGE = (
    r"resolve:ssm:/aws/service/deeplearning/ami/x86_64/"
    r"base-oss-nvidia-driver-gpu-ubuntu-(24\.04)/latest/ami-id"
)
AWS_DRIVER = 580
GOOGLE_IMAGE = (
    r"projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-(\d{4})-nvidia-(\d+)"
)
MEMORY_GIB = {"g6e.2xlarge": 64, "g6e.4xlarge": 128, "p5.4xlarge": 256} | {
    "g2-standard-8": 32,
    "g2-standard-12": 48,
    "a3-highgpu-1g": 234,
}
INSTALL_COPIES = 4  # of the weights, in a worker's host memory at its first install
PROGRAMS_GIB = 4  # engine, weight node, scorer and Ray
RAY_KILLS_AT = 0.95  # of the memory

# The part of KubeRay's RayCluster (v1, as of 1.5.1) that our file uses, by hand: nothing else may be in it.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITIES = {
    "type": "object",
    "additionalProperties": {"type": "string", "pattern": r"^[0-9]+(Ki|Mi|Gi|Ti)?$"},
}
CONTAINER = {
    "type": "object",
    "required": ["name", "image", "resources"],
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "image": {"type": "string"},
        "env": {
            "type": "array",
            "items": {
                "required": ["name", "value"],
                "additionalProperties": False,
                "properties": {"name": {"type": "string"}, "value": {"type": "string"}},
            },
        },
        "ports": {"type": "array", "items": {"required": ["containerPort", "name"]}},
        "resources": {
            "type": "object",
            "required": ["limits", "requests"],
            "additionalProperties": False,
            "properties": {"limits": QUANTITIES, "requests": QUANTITIES},
        },
    },
}
TEMPLATE = {
    "type": "object",
    "required": ["spec"],
    "additionalProperties": False,
    "properties": {
        "spec": {
            "type": "object",
            "required": ["containers"],
            "additionalProperties": False,
            "properties": {
                # Autoscaler v2 needs it: a pod that starts again would be another node under the same name.
                "restartPolicy": {"const": "Never"},
                "nodeSelector": TEXTS,
                "containers": {"type": "array", "minItems": 1, "items": CONTAINER},
            },
        }
    },
}
HEAD_GROUP = {
    "type": "object",
    "required": ["rayStartParams", "template"],
    "additionalProperties": False,
    "properties": {"rayStartParams": TEXTS, "resources": TEXTS, "template": TEMPLATE},
}
WORKER_GROUP = {
    "type": "object",
    "required": ["groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"],
    "additionalProperties": False,
    "properties": {
        "groupName": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        **{key: {"type": "integer", "minimum": 0} for key in ("replicas", "minReplicas", "maxReplicas")},
        "labels": TEXTS,
        "resources": TEXTS,
        "rayStartParams": TEXTS,
        "template": TEMPLATE,
    },
}
RAY_CLUSTER = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {"type": "object", "required": ["name", "namespace"]},
        "spec": {
            "type": "object",
            "required": ["headGroupSpec", "workerGroupSpecs"],
            "additionalProperties": False,
            "properties": {
                "rayVersion": {"type": "string"},
                "enableInTreeAutoscaling": {"const": True},
                "authOptions": {"const": {"mode": "token"}},
                "autoscalerOptions": {
                    "type": "object",
                    "required": ["version"],
                    "additionalProperties": False,
                    "properties": {
                        "version": {"const": "v2"},
                        "upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]},
                        "idleTimeoutSeconds": {"type": "integer", "minimum": 1},
                    },
                },
                "headGroupSpec": HEAD_GROUP,
                "workerGroupSpecs": {"type": "array", "items": WORKER_GROUP},
            },
        },
    },
}


def read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return loaded


def worker_types(name: str) -> dict[str, dict[str, Any]]:
    """Every kind of worker machine: its resources (numbers), labels and most."""
    loaded = read(name)
    if name == "kuberay":
        return {
            group["groupName"]: {
                "resources": {key: float(amount) for key, amount in group["resources"].items()},
                "labels": group["labels"],
                "max_workers": group["maxReplicas"],
            }
            for group in loaded["spec"]["workerGroupSpecs"]
        }
    kinds: dict[str, dict[str, Any]] = loaded["available_node_types"]
    return {key: kind for key, kind in kinds.items() if key != loaded["head_node_type"]}


def test_these_are_all_the_files() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*(f"{name}.yaml" for name in ALL_FILES), "Dockerfile"}


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_the_launchers_files_fit_rays_own_schema(name: str) -> None:
    schema = distribution("ray").locate_file("ray/autoscaler/ray-schema.json")
    jsonschema.validate(read(name), json.loads(Path(str(schema)).read_text()))


def test_kuberays_file_fits_the_part_of_its_definition_that_it_uses() -> None:
    jsonschema.validate(read("kuberay"), RAY_CLUSTER)


@pytest.mark.parametrize("name", ALL_FILES)
def test_every_machine_is_the_instance_type_that_a_fleet_would_ask_for(name: str) -> None:
    kinds = worker_types(name)
    assert len(kinds) >= 2
    for type_name, kind in kinds.items():
        (instance_type,) = set(kind["resources"]) - set(BUILT_IN)
        assert kind["resources"][instance_type] == 1, type_name
        assert node_type(instance_type) == type_name
        assert (
            WorkerConfig(**kind["labels"]).instance_type == instance_type
        )  # labels: sku, market and, on clouds, region
        assert kind["resources"]["CPU"] >= 1
        assert kind["resources"]["GPU"] >= 1
    assert {kind["labels"]["market"] for kind in kinds.values()} == {"spot", "on_demand"}
    assert len({kind["labels"]["sku"] for kind in kinds.values()}) >= 2


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_a_spot_machine_is_bought_as_one(name: str) -> None:
    for type_name, kind in worker_types(name).items():
        bought = json.dumps(kind["node_config"]).upper()
        assert ("SPOT" in bought) == (kind["labels"]["market"] == "spot"), type_name


def test_a_spot_pod_asks_for_a_spot_machine() -> None:
    for group in read("kuberay")["spec"]["workerGroupSpecs"]:
        chosen = group["template"]["spec"]["nodeSelector"].get("cloud.google.com/gke-spot") == "true"
        assert chosen == (group["labels"]["market"] == "spot"), group["groupName"]


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_the_autoscaler_heeds_labels_and_may_start_all_that_is_offered(name: str) -> None:
    loaded = read(name)
    (head_start,) = [line for line in loaded["head_start_ray_commands"] if "ray start" in line]
    (worker_start,) = [line for line in loaded["worker_start_ray_commands"] if "ray start" in line]
    assert "RAY_enable_autoscaler_v2=1" in head_start
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head_start
    assert "dashboard-host" not in head_start  # it stays on loopback
    for line in (head_start, worker_start):
        assert "RAY_AUTH_MODE=token" in line
    assert any(target.endswith("/.ray/auth_token") for target in loaded["file_mounts"])
    assert loaded["max_workers"] >= sum(kind["max_workers"] for kind in worker_types(name).values())
    assert 0 < loaded["idle_timeout_minutes"] <= 15  # what nobody asks for costs no longer than that
    assert loaded["available_node_types"][loaded["head_node_type"]]["max_workers"] == 0


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_a_head_is_started_with_the_settings_that_the_campaign_measures(name: str) -> None:
    (start,) = [line for line in read(name)["head_start_ray_commands"] if "ray start" in line]
    given = dict(word.split("=", 1) for word in start.split() if word.startswith("RAY_health_check"))
    assert given == RECOMMENDED
    assert all(f"{key}={value}" in (ROOT / "docs" / "fleet.md").read_text() for key, value in given.items())


def test_so_does_a_heads_pod() -> None:
    (container,) = read("kuberay")["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {one["name"]: one["value"] for one in container["env"]} == RECOMMENDED


def test_a_pod_has_what_ray_is_told_that_it_has() -> None:
    spec = read("kuberay")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        limits, requests = (container["resources"][key] for key in ("limits", "requests"))
        assert limits == requests
        assert (limits["cpu"], limits["nvidia.com/gpu"]) == (
            group["resources"]["CPU"],
            group["resources"]["GPU"],
        )


def test_the_version_of_ray_is_the_one_that_is_pinned() -> None:
    assert ray_pin() == read("kuberay")["spec"]["rayVersion"]


def ray_pin() -> str:
    (pin,) = [line for line in PROJECT["dependencies"] if line.startswith("ray[")]
    return re.sub(r".*==", "", pin)


def needs() -> tuple[int, tuple[int, int]]:
    """Oldest driver and glibc for the pinned torch and vLLM; a new pin needs its line in `WHEELS`."""
    pins = [pin for pin in PROJECT["optional-dependencies"]["gpu"] if re.match("(torch|vllm)==", pin)]
    assert len(pins) == 2
    majors, glibcs = zip(*(WHEELS[pin] for pin in pins), strict=True)
    return max(OLDEST_DRIVER[major] for major in majors), max(glibcs)


def image_of(kind: dict[str, Any]) -> str:
    """The machine image of a node type of AWS or Google; "": Ray would choose."""
    config = kind["node_config"]
    (disk,) = config.get("disks", [{}])
    return str(config.get("ImageId") or disk.get("initializeParams", {}).get("sourceImage", ""))


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_every_machines_image_has_a_driver_and_a_glibc_for_the_pinned_torch_and_vllm(name: str) -> None:
    oldest_driver, oldest_glibc = needs()
    for type_name, kind in read(name)["available_node_types"].items():
        image = image_of(kind)
        match = re.fullmatch(AWS_IMAGE, image) or re.fullmatch(GOOGLE_IMAGE, image)
        assert match, f"{type_name}: no known image: {image!r}"
        release, driver = (*match.groups(), AWS_DRIVER)[:2]
        assert int(driver) >= oldest_driver, type_name
        assert GLIBC[release.replace(".", "")] >= oldest_glibc, type_name
        if name == "gcp_spot":  # such an image installs its driver only if it is told to
            assert kind["node_config"]["metadata"]["items"] == [
                {"key": "install-nvidia-driver", "value": "True"}
            ]


def test_pods_run_rays_image_with_this_python_on_nodes_with_the_driver() -> None:
    oldest_driver, oldest_glibc = needs()
    text = (FOLDER / "kuberay.yaml").read_text()
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert f"FROM rayproject/ray:{ray_pin()}-py{PYTHON.replace('.', '')}\n" in dockerfile
    assert GLIBC["2204"] >= oldest_glibc  # of that image
    assert 'pip install --no-cache-dir "./echo_planes_source[gpu]"' in dockerfile
    spec = read("kuberay")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["nodeSelector"]["cloud.google.com/gke-gpu-driver-version"] == "latest"
        (container,) = pod["containers"]
        assert f"-t {container['image']} ." in text  # built as the file says
    assert f"driver is the node's: {oldest_driver} or later" in text


def test_what_the_image_of_pods_copies_is_there_and_is_all_of_the_package() -> None:
    copied = re.findall(r"^COPY --chown=ray (.*) \S+$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    sources = " ".join(copied).split()
    assert all((ROOT / one).exists() for one in sources)
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {tool["package-dir"].get(one, one.replace(".", "/")) for one in tool["packages"]}
    assert {folder.split("/")[0] for folder in folders} <= set(sources)


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_workers_machine_holds_the_first_install_of_a_model_of_half_its_card(name: str) -> None:
    if name == "kuberay":
        groups = read(name)["spec"]["workerGroupSpecs"]
        limits = [group["template"]["spec"]["containers"][0]["resources"]["limits"] for group in groups]
        memory = [float(limit["memory"].removesuffix("Gi")) for limit in limits]
    else:
        configs = [kind["node_config"] for kind in worker_types(name).values()]
        memory = [MEMORY_GIB[config.get("InstanceType") or config["machineType"]] for config in configs]
    for (type_name, kind), gib in zip(worker_types(name).items(), memory, strict=True):
        card_gib = SKU_FACTS[kind["labels"]["sku"]].memory_gib
        weights_gib = [2 * shape.weights / GIB for shape in SHAPES.values()]  # bf16
        largest = max(size for size in weights_gib if size <= card_gib / 2)
        assert INSTALL_COPIES * largest + PROGRAMS_GIB <= RAY_KILLS_AT * gib, type_name


def test_the_docs_name_the_driver_and_the_glibc() -> None:
    driver, glibc = needs()
    text = " ".join((ROOT / "docs" / "gpus.md").read_text().split())
    assert f"driver {driver} or later" in text
    assert f"glibc {glibc[0]}.{glibc[1]}" in text
    for page in ("running", "fleet-operations"):
        found = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
        assert f"driver {driver} or later" in found


def test_the_image_of_aws_is_looked_up_by_a_right_that_the_file_names() -> None:
    text = (FOLDER / "aws_spot.yaml").read_text()
    (right,) = re.findall(r'"Resource": "arn:aws:ssm:\*::parameter(\S+)\*"', text)
    assert "ssm:GetParameters" in text
    for kind in read("aws_spot")["available_node_types"].values():
        assert image_of(kind).removeprefix("resolve:ssm:").startswith(right)


TELLS = '#!/bin/sh\necho "$0 $*" >> "$HOME/told"\n'


def stand_ins(folder: Path) -> None:
    """Programs of a new machine: `curl` brings a `uv` that makes an environment; its own Python fails."""
    makes = f"""mkdir -p ~/env/bin; echo 'PATH="$HOME/env/bin:$PATH"' > ~/env/bin/activate
cp {folder}/nvidia-smi ~/env/bin/python3; cp {folder}/nvidia-smi ~/env/bin/ray"""
    programs = {
        "curl": f"#!/bin/sh\necho 'mkdir -p ~/.local/bin; cp {folder}/uv ~/.local/bin'\n",
        "uv": TELLS + makes,
        "nvidia-smi": TELLS,
        "python3": "#!/bin/sh\nexit 9\n",
        "ray": "#!/bin/sh\nexit 9\n",
    }
    folder.mkdir()
    for name, code in programs.items():
        (folder / name).write_text(code)
        (folder / name).chmod(0o755)


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_setting_up_twice_leaves_a_machine_whose_commands_run_in_this_python(
    tmp_path: Path, name: str
) -> None:
    stand_ins(programs := tmp_path / "programs")
    (home := tmp_path / "home").mkdir()
    (home / ".bashrc").write_text(f"PATH={programs}:$PATH\n")
    loaded = read(name)
    first = [*loaded["setup_commands"], *loaded["head_setup_commands"]]
    for command in (
        *first,
        *first,
        *loaded["head_start_ray_commands"],
        *loaded["worker_start_ray_commands"],
    ):
        # As Ray's launcher runs it.
        shell = ["bash", "--login", "-c", "-i", f"source ~/.bashrc; ({command})"]
        environment = {"HOME": str(home), "PATH": os.environ["PATH"], "RAY_HEAD_IP": "10.0.0.1"}
        subprocess.run(shell, env=environment, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    told = (home / "told").read_text().splitlines()
    made = [line for line in told if line.startswith(f"{home}/.local/bin/uv venv ")]
    assert len(made) == 2
    assert all(f"--python {PYTHON} {home}/env" in line for line in made)
    assert told.count(f"{home}/env/bin/python3 -m pip install {home}/echo_planes[gpu]") == 2
    assert sum(line.startswith(f"{home}/env/bin/ray start ") for line in told) == 2
    assert sum(line.startswith(f"{programs}/nvidia-smi") for line in told) == 2
    assert (home / ".bashrc").read_text().count("activate") == 1


def test_both_clouds_set_machines_up_alike() -> None:
    aws, gcp = (read(name)["setup_commands"] for name in LAUNCHER_FILES)
    assert aws == gcp
