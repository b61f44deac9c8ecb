"""Who learns what from the head."""

from __future__ import annotations

import urllib.error
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from omegaconf import OmegaConf

from palestra.gym.config import from_yaml, to_yaml
from tests.gym.supervisor.conftest import RunningGym
from tests.net.attacks import check_bounds

CONFIG = "/global_config_dict_yaml"


def test_config_is_a_json_string_with_yaml(gym: RunningGym) -> None:
    text = gym.get(CONFIG)
    config = OmegaConf.create(text)
    assert config.policy_model.responses_api_models.vllm_model.api_key == "sk-quite-secret"
    assert config.lone.resources_servers.counter.port == gym.instance("lone")["port"]
    assert f"http://{config.head_server.host}:{config.head_server.port}" == gym.head


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"X-Forwarded-For": "10.0.0.1"}])
def test_whole_config_needs_the_key_from_elsewhere(gym: RunningGym, headers: dict[str, str]) -> None:
    for wrong in ({}, {"Authorization": "Bearer tml-guessed"}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            gym.get(CONFIG, **headers, **wrong)
        assert refused.value.code == 401
        assert b"secret" not in refused.value.read()
    assert "sk-quite-secret" in gym.get(CONFIG, **headers, Authorization="Bearer tml-of-the-tests")


def test_heads_and_bodies_are_bounded_at_the_head_and_at_servers(gym: RunningGym) -> None:
    for url in (gym.head, gym.instance("counter")["url"]):
        check_bounds(urlsplit(url).port or 0)


@pytest.mark.parametrize("path", ["/", "/health", "/healthz", "/livez"])
def test_health(gym: RunningGym, path: str) -> None:
    assert gym.get(path) == {"status": "ok"}


def test_instances_have_the_fields_that_clients_of_nemo_gym_read(gym: RunningGym, gym_root: Path) -> None:
    found = gym.instance("counter")
    assert found["url"] == f"http://127.0.0.1:{found['port']}"
    assert found["dir_path"] == str(gym_root / "resources_servers/counter")
    assert found["uptime_seconds"] > 0
    names = {"process_name", "config_path", "server_type", "name", "dir_path", "entrypoint", "host", "port", "url"}
    assert names | {"pid", "start_time", "status", "uptime_seconds"} <= set(found)


def test_text_that_looks_like_an_interpolation_survives() -> None:
    settings = {"prompt": "say ${word}", "deep": [{"a": 1.5, "b": None}]}
    assert from_yaml(to_yaml(settings)) == settings
    assert OmegaConf.to_container(OmegaConf.create(yaml.safe_load(to_yaml(settings))), resolve=True) == settings
