"""Files that are judged without running anything of Palestra: by linters and schemas."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from checks.base import DEPLOY, CheckFailed, Workplace, need, run, tool

OVERLAYS = ("base", "one-gpu", "eight-gpus", "ray")
MAX_EXPOSURE = 4.0
CRD = "KUBERAY_CRD"


def check_dockerfile(_work: Workplace) -> str:
    run(tool("hadolint"), DEPLOY / "Dockerfile")
    return "hadolint has nothing to say"


def check_compose(_work: Workplace) -> str:
    files = sorted(DEPLOY.glob("compose*.yaml"))
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *files)
    for path in _mounted(files):
        if not path.exists():
            raise CheckFailed(f"compose mounts {path}, which does not exist")
    return f"{len(files)} files follow the schema of compose, and what they mount exists"


def _mounted(files: list[Path]) -> Iterator[Path]:
    for file in files:
        for service in yaml.safe_load(file.read_text())["services"].values():
            sources = [volume.partition(":")[0] for volume in service.get("volumes", [])]
            yield from (DEPLOY / source for source in sources if source.startswith("./"))


def check_kubernetes(work: Workplace) -> str:
    kubectl = need("kubectl", "kubernetes-client")
    notes = ""
    for name in OVERLAYS:
        built = work.path(f"{name}.yaml")
        built.write_text(run(kubectl, "kustomize", DEPLOY / "k8s" / name))
        known, clusters = [], []
        for resource in yaml.safe_load_all(built.read_text()):
            (clusters if resource["kind"] == "RayCluster" else known).append(resource)
        known += [pod for cluster in clusters for pod in _pods(cluster)]
        built.write_text(yaml.safe_dump_all(known))
        run(tool("kubernetes-validate"), "--strict", "--no-warn", built)
        if clusters:
            notes = _judge_clusters(clusters, work)
    return f"{', '.join(OVERLAYS)} follow the schemas of Kubernetes; {notes}"


def _pods(cluster: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The templates in a RayCluster, as pods, which have a schema everywhere."""
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        template = group["template"]
        metadata = template["metadata"] | {"name": group.get("groupName", "head")}
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def _judge_clusters(clusters: list[dict[str, Any]], work: Workplace) -> str:
    if CRD not in os.environ:
        return f"of RayCluster only the pods were checked ({CRD}=FILE, with KubeRay's definition, checks all of it)"
    definition = yaml.safe_load(Path(os.environ[CRD]).read_text())
    (version,) = [version for version in definition["spec"]["versions"] if version["name"] == "v1"]
    schema, file = work.path("raycluster-schema.json"), work.path("raycluster.json")
    schema.write_text(json.dumps(_refuse_unknown(version["schema"]["openAPIV3Schema"])))
    for cluster in clusters:
        file.write_text(json.dumps(cluster))
        run(tool("check-jsonschema"), "--schemafile", schema, file)
    return "RayCluster follows KubeRay's"


def _refuse_unknown(schema: Any) -> Any:
    """A definition says nothing of fields that it does not know."""
    if isinstance(schema, list):
        return [_refuse_unknown(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _refuse_unknown(value) for key, value in schema.items()}
    if strict.get("type") == "object" and "properties" in strict and "additionalProperties" not in strict:
        strict["additionalProperties"] = False
    return strict


def check_prometheus(work: Workplace) -> str:
    promtool, folder = need("promtool", "prometheus"), work.fresh("prometheus")
    for file in (DEPLOY / "prometheus").glob("*.yml"):
        (folder / file.name).write_text(file.read_text())
    (folder / "prometheus.key").touch()
    run(promtool, "check", "config", folder / "prometheus.yml")
    run(promtool, "test", "rules", folder / "alerts_test.yml")
    queries = [target["expr"] for panel in _panels() for target in panel["targets"]]
    rules = [{"record": f"query:{number}", "expr": expr} for number, expr in enumerate(queries)]
    (folder / "board.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    run(promtool, "check", "rules", folder / "board.yml")
    return f"the config and the alerts work, and the board's {len(queries)} queries can be read"


def _panels() -> list[dict[str, Any]]:
    return json.loads((DEPLOY / "grafana" / "palestra.json").read_text())["panels"]


def check_nginx(work: Workplace) -> str:
    nginx, folder = need("nginx", "nginx-light"), work.fresh("nginx")
    arguments = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=test")
    run(need("openssl", "openssl"), *arguments, "-keyout", folder / "key.pem", "-out", folder / "cert.pem")
    config = (DEPLOY / "nginx.conf").read_text().replace("/etc/palestra/tls", str(folder))
    (folder / "nginx.conf").write_text(f"events {{}}\nhttp {{\naccess_log off;\n{config}}}\n")
    places = ("-p", folder, "-e", folder / "error.log", "-g", f"pid {folder}/pid;")
    run(nginx, "-t", "-q", *places, "-c", folder / "nginx.conf")
    return "nginx takes the file"


def check_unit(work: Workplace) -> str:
    analyze, unit = need("systemd-analyze", "systemd"), work.fresh("unit") / "palestra.service"
    unit.write_text((DEPLOY / unit.name).read_text().replace("/opt/palestra/bin/palestra", "/bin/true"))
    if output := run(analyze, "verify", "--man=no", unit).strip():
        raise CheckFailed(output)
    output = run(analyze, "security", "--offline=true", "--no-pager", unit)
    found = re.search(r"exposure level for \S+: ([\d.]+)", output)
    if found is None or float(found[1]) > MAX_EXPOSURE:
        raise CheckFailed(f"the unit is exposed more than {MAX_EXPOSURE}: {output.splitlines()[-1]}")
    return f"systemd-analyze takes it; its exposure is {found[1]} of 10"
