"""`palestra serve`: how flags, files and overrides become one config, and one clear line if they cannot."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from palestra.cli import main
from palestra.config.serve import ServeConfig
from palestra.server import listeners

Serve = Callable[..., ServeConfig]
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def palestra(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="palestra")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for name in ("tiny", "other"):
        Path(name).mkdir()
        Path(name, "config.json").write_text("{}")


@pytest.fixture
def serve(monkeypatch) -> Serve:
    """Runs the command with a server that only remembers its config."""
    seen: list[ServeConfig] = []
    server = ModuleType("palestra.server.main")
    server.run = lambda config, listeners, *, with_parent: seen.append(config) or 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "palestra.server.main", server)
    monkeypatch.setattr(listeners, "open_listeners", lambda config: None)  # addresses of other machines

    def serve(*args: object) -> ServeConfig:
        result = palestra("serve", *args)
        assert result.exit_code == 7, result.output  # what the server returns
        return seen[-1]

    return serve


def refused(*args: object, code: int = 2) -> str:
    result = palestra("serve", *args)
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_without_a_model_the_bundled_one_is_served(serve):
    (model,) = serve("--device", "cuda").models
    assert model.name == ["ephebe"]
    assert (model.path / "model.safetensors").is_file()
    assert model.device == "cuda"


def test_the_example_in_the_help_works_without_a_model(serve):
    examples = re.findall(r"[a-z_0-9.]+=[0-9]+", palestra("serve", "--help").output)
    assert len(examples) == 2
    config = serve(*examples)
    (model,) = config.models
    assert model.replicas is not None
    assert (model.name, model.replicas.count, model.device) == (["ephebe"], 2, "auto")
    assert config.limits.max_models == 64


def test_a_file_or_an_override_that_names_models_is_all_that_is_served(serve):
    Path("a.yaml").write_text("models: [{path: tiny}]\n")
    assert [model.path.name for model in serve("-c", "a.yaml", "models.0.threads=1").models] == ["tiny"]
    assert [model.path.name for model in serve("models=[{path: other}]").models] == ["other"]


def test_flags_reach_the_server(serve, tmp_path):
    config = serve(
        *("--model", "tiny", "--host", "0.0.0.0", "--port", 0, "--state", "s", "--checkpoints", "c"),
        *("--database", "postgresql://db/x", "--device", "cuda:1"),
    )
    assert (config.host, config.port, config.database) == ("0.0.0.0", 0, "postgresql://db/x")
    assert (config.state, config.checkpoints) == (tmp_path / "s", tmp_path / "c")
    (model,) = config.models
    assert (model.path, model.name, model.device) == (tmp_path / "tiny", ["tiny"], "cuda:1")


def test_tinkerscript_is_a_flag_for_its_usual_port(serve):
    assert not serve().tinkerscript.enabled
    request = serve("--tinkerscript").tinkerscript
    assert (request.enabled, request.host, request.port) == (True, None, 10086)


def test_each_name_belongs_to_the_model_before_it(serve):
    config = serve("--model", "tiny", "--name", "a", "--port", 1, "--name=b", "--model=other", "--name", "c")
    assert [(model.path.name, model.name) for model in config.models] == [("tiny", ["a", "b"]), ("other", ["c"])]


def test_a_model_may_carry_its_name(serve):
    config = serve("--model", "Qwen/Qwen3-8B=tiny", "--name", "second", "--model", "other")
    assert [(model.path.name, model.name) for model in config.models] == [
        ("tiny", ["Qwen/Qwen3-8B", "second"]),
        ("other", ["other"]),
    ]


def test_a_folder_with_an_equals_sign_is_a_folder(serve):
    Path("a=b").mkdir()
    Path("a=b", "config.json").write_text("{}")
    (model,) = serve("--model", "a=b").models
    assert model.path.name == "a=b"


def test_a_hub_id_comes_from_the_cache(serve, tmp_path):
    folder = tmp_path / "hf/hub/models--Qwen--Qwen3-8B/snapshots/abc"
    folder.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        (folder / file).touch()
    (model,) = serve("--model", "Qwen/Qwen3-8B").models
    assert (model.path, model.name) == (folder, ["Qwen/Qwen3-8B"])


def test_files_then_overrides_then_flags(serve):
    Path("a.yaml").write_text(
        "port: 1\nlog_level: debug\nmodels: [{path: tiny, threads: 4}]\nlimits: {max_models: 5}\n"
    )
    Path("b.yaml").write_text("port: 2\n")
    config = serve("-c", "a.yaml", "-c", "b.yaml", "limits.max_models=6", "port=3", "--port", 4, "--device", "mps")
    assert (config.port, config.log_level, config.limits.max_models) == (4, "debug", 6)
    assert [(model.path.name, model.threads, model.device) for model in config.models] == [("tiny", 4, "mps")]


def test_a_server_with_a_public_address_is_not_a_loopback_server(serve):
    assert serve("--model", "tiny").is_loopback
    config = serve("--model", "tiny", "--public-url", "https://palestra.example/")
    assert (config.public_url, config.is_loopback) == ("https://palestra.example", False)


def test_overrides_tune_the_models_of_flags(serve):
    (model,) = serve("--model", "tiny", "models.0.threads=2", "models.*.max_rank=8").models
    assert (model.threads, model.max_rank) == (2, 8)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--name", "x", "--model", "tiny"], "--name x has no --model before it"),
        (
            ["--model", "/nowhere"],
            "no such folder: /nowhere; to make a small one to try: palestra model random /nowhere",
        ),
        (["--model", "Qwen/Qwen3-8B"], "to download it: palestra model pull Qwen/Qwen3-8B"),
        (["--model", "."], "is not a model folder: it has no config.json"),
        (["--model", "tiny", "--model", "tiny"], "two models are served as 'tiny'"),
        (["--model", "tiny", "prot=1"], "unknown key 'prot' (prot=1); did you mean port?"),
        (["--model", "tiny", "--port", "70000"], "port should be less than or equal to 65535, not 70000 (--port)"),
        (["--model", "tiny", "-c", "no.yaml"], "no.yaml: cannot be read as a config (No such file or directory)"),
        (["--model", "tiny", "--tls-key", "key.pem"], "tls_key is given without tls_cert"),
        (["--model", "tiny", "trusted_proxies=[proxy]"], "'proxy' is not an address or a network"),
        (["tiny"], "'tiny': settings are KEY=VALUE; a model is given as --model tiny"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(args, message):
    assert message in refused(*args)


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [("uvicorn", [], "server"), (EXPORTER, ["otlp_endpoint=http://localhost:4318"], "otel")],
)
def test_without_an_extra_the_line_says_what_to_install(monkeypatch, module, arguments, extra):
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("palestra.server.main", "palestra.server.core.telemetry.otlp", "palestra.net.serving"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    needed = refused("--model", "tiny", "--port", 0, *arguments, code=1)
    assert needed == f"error: this command needs {module}; to install it: pip install 'palestra[{extra}]'\n"


def test_serve_help_names_the_schema():
    shown = palestra("serve", "--help")
    assert shown.exit_code == 0
    assert "config schema serve" in " ".join(shown.output.split())


def test_config_show_and_schema(tmp_path):
    shown = palestra("config", "show", "serve", "port=3", "database=postgresql://me:hunter2@db/x")
    config = ServeConfig.model_validate_json(shown.stdout)
    assert (config.port, config.state) == (3, tmp_path / ".palestra")
    assert [(model.name, model.device) for model in config.models] == [(["ephebe"], "auto")]  # what would be served
    assert "hunter2" not in shown.output
    schema = palestra("config", "schema", "serve").stdout
    assert '"max_pending_samples"' in schema
    assert "A session ends after this time without a heartbeat" in schema
    wrong = palestra("config", "show", "serve", "prot=1")
    assert (wrong.exit_code, wrong.stderr) == (2, "error: unknown key 'prot' (prot=1); did you mean port?\n")
