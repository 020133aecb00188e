"""configs/cluster: what is handed to `ray up` and to Kubernetes says the same as the fleet asks for."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from bench.chaos.recovery import RECOMMENDED
from echo_planes.config.fleet import WorkerConfig
from echo_planes.fleet.actuators.actuator import node_type

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "cluster"
LAUNCHER_FILES = ("aws_spot", "gcp_spot")
ALL_FILES = (*LAUNCHER_FILES, "kuberay")
BUILT_IN = ("CPU", "GPU", "memory")

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
    assert {path.stem for path in FOLDER.iterdir()} == set(ALL_FILES)


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pin,) = [line for line in project["dependencies"] if line.startswith("ray[")]
    assert re.sub(r".*==", "", pin) == read("kuberay")["spec"]["rayVersion"]
