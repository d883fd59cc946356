"""The manifests of examples/kubernetes: schemas of Kubernetes, and what they say to us."""

import importlib
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from pyllama_raw.serve.deployment import Deployment

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "kubernetes"
VERSION = "1.30"
FILES = sorted(FOLDER.glob("*.yaml"))


def manifests(path: Path) -> list[dict]:
    return list(yaml.safe_load_all(path.read_text()))


def known(path: Path) -> list[dict]:
    """Manifests of kinds that Kubernetes has, and pods of the one that Ray adds."""
    found = []
    for each in manifests(path):
        if each["kind"] != "RayService":
            found.append(each)
            continue
        cluster = each["spec"]["rayClusterConfig"]
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}}
            found.append(pod | group["template"])
    return found


def _templates(manifest: dict) -> list[dict]:
    template = manifest.get("spec", {}).get("template")
    return [template["spec"]] if template else []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kubernetes_knows_every_field(path):
    """
    Strictly: a field that is misspelt is an error.
    """
    for each in known(path):
        kubernetes_validate.validate(each, VERSION, strict=True)


def test_the_linter_finds_a_field_that_is_misspelt():
    """
    Otherwise the test above would say nothing.
    """
    (service,) = (
        each
        for each in known(FOLDER / "replicas.yaml")
        if each["kind"] == "StatefulSet"
    )
    service["spec"]["template"]["spec"]["containers"][0]["port"] = []

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, VERSION, strict=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_options_are_ours(path):
    """
    What the config map has is what `serve --config` takes; pods have time to drain.
    """
    (config,) = (each for each in manifests(path) if each["kind"] == "ConfigMap")
    deployment = Deployment.of(tomllib.loads(config["data"]["service.toml"]))
    spans = [
        spec["terminationGracePeriodSeconds"]
        for each in known(path)
        for spec in (each.get("spec", {}), *_templates(each))
        if "terminationGracePeriodSeconds" in spec
    ]

    assert list(deployment.models) == ["assistant"]
    assert min(spans) > deployment.service.drain_s


def test_ray_is_told_options_that_there_are():
    """
    The import path leads to a function, and its arguments are known.
    """
    (service,) = (
        each
        for each in manifests(FOLDER / "rayservice.yaml")
        if each["kind"] == "RayService"
    )
    (app,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    pytest.importorskip("ray.serve", reason="needs the extra ray")
    module, _, name = app["import_path"].partition(":")
    cluster = importlib.import_module(module)

    assert callable(getattr(cluster, name))
    assert {*app["args"]} <= {"config", *cluster.KINDS}
