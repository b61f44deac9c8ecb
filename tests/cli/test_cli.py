"""The command line: quick to start, clear about what is wrong, never a traceback for the user's mistakes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from palestra import __version__
from palestra.cli import main
from palestra.config.bundled import bundled_configs
from palestra.util import programs

REPOSITORY = Path(__file__).parents[2]


def palestra(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="palestra")


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["model", "--help"]])
def test_help_loads_nothing_heavy(arguments):
    script = (
        "import sys\nfrom palestra.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as e: assert e.code == 0\n"
        "heavy = {'torch', 'numpy', 'transformers', 'pydantic', 'palestra.model', 'palestra.cli.doctor'}\n"
        "print('loaded:', sorted(heavy & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "loaded: []"


def test_help_lists_every_command_with_its_summary():
    shown = palestra("--help")
    assert shown.exit_code == 0
    for text in ("doctor", "Show what works on this machine", "model", "Make random models"):
        assert text in shown.output


def test_module_and_version_agree():
    shown = subprocess.run([sys.executable, "-m", "palestra", "--version"], capture_output=True, text=True, check=True)
    assert __version__ in shown.stdout


def test_mistyped_command_gets_the_nearest_name():
    shown = palestra("docter")
    assert shown.exit_code == 2
    assert "Did you mean 'doctor'?" in shown.output


def test_doctor_tells_a_verdict():
    shown = palestra("doctor")
    assert shown.exit_code == 0
    assert "sampling and training on CPU: yes" in shown.output
    assert "torch" in shown.output


def test_doctor_says_what_is_missing_for_sandboxes_and_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "ADMIN_FOLDERS", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    said = palestra("doctor").output
    assert "bubblewrap missing, for sandboxes of this machine" in said
    assert "agents and verifiers in sandboxes: no  (bubblewrap is not installed (apt-get install bubblewrap))" in said


def test_skipped_tests_are_listed_at_the_end_with_what_doctor_says_is_missing(tmp_path):
    skipped = "tests/episodes/client/test_examples.py::test_the_one_with_curl_plays_as_a_worker"
    arguments = ["-q", "-p", "no:cacheprovider", "-n", "0", skipped]
    code = f"from palestra.util import programs; programs.ADMIN_FOLDERS = ''; import pytest; pytest.main({arguments})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env=os.environ | {"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "    1  curl is not installed (apt-get install curl)" in done.stdout.splitlines()
    assert programs.PROGRAMS["curl"].install == "apt-get install curl"


def test_doctor_json_has_every_extra_with_its_command():
    report = json.loads(palestra("doctor", "--json").stdout)
    assert report["extras"]["engine"]["complete"]
    assert report["torch"]["threads"] >= 1
    assert report["machine"]["cores"] >= 1
    for name, extra in report["extras"].items():
        assert extra["complete"] == (extra["install"] is None)
        assert extra["install"] in (None, f"pip install 'palestra[{name}]'")
    assert {one["name"] for one in report["missing"]} == {name for name, path in report["tools"].items() if not path}
    assert report["verdict"][0] == {"what": "sampling and training on CPU", "works": True, "why": ""}


def test_random_model_then_info(tmp_path):
    folder = tmp_path / "m"
    made = palestra(
        "model", "random", folder, "--shape=micro", "--family=llama", "--shards=2", "--context=999", "--json"
    )
    assert made.exit_code == 0, made.output
    assert json.loads(made.stdout)["folder"] == str(folder)

    facts = json.loads(palestra("model", "info", folder, "--json").stdout)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["parameters"] == 139_584  # what transformers counts
    assert (facts["heads"], facts["kv_heads"], facts["head_dim"]) == (4, 2, 16)
    assert facts["tokenizer_vocab"] == facts["vocab_size"] == 512
    assert facts["has_chat_template"]
    assert facts["max_positions"] == 999
    assert len(facts["eos_token_ids"]) == 2
    assert facts["kv_bytes_per_token"] == 2 * 2 * 32 * 4
    assert facts["lora_training_bytes"] == 4 * facts["lora_bytes"]

    shown = palestra("model", "info", folder)
    assert shown.exit_code == 0
    assert "LlamaForCausalLM" in shown.output
    assert "LoRA rank 32" in shown.output


def test_info_tells_the_experts_of_a_mixture(tmp_path):
    assert palestra("model", "random", tmp_path / "m", "--shape", "micro", "--family", "qwen3_moe").exit_code == 0
    facts = json.loads(palestra("model", "info", tmp_path / "m", "--json").stdout)
    assert facts["experts"] == {"layers": 2, "experts": 8, "per_token": 2, "size": 48, "shared_size": 0}
    assert facts["parameters"] - facts["active_parameters"] == 2 * 6 * 3 * 48 * 64
    shown = palestra("model", "info", tmp_path / "m").output
    assert "8 of width 48 in 2 layers, 2 for a token" in shown
    assert "of them active for a token" in shown


def test_info_tells_the_layers_and_states_of_a_hybrid_model(tmp_path):
    assert palestra("model", "random", tmp_path / "m", "--shape", "micro", "--family", "qwen3_5").exit_code == 0
    facts = json.loads(palestra("model", "info", tmp_path / "m", "--json").stdout)
    assert (facts["family"], facts["layer_kinds"]) == ("qwen3_5", {"attention": 1, "gated delta net": 1})
    assert facts["kv_bytes_per_token"] == 2 * 1 * 32 * 4
    assert facts["state_bytes_per_sequence"] == 4 * (8 * 8 * 8 + 3 * (2 * 4 * 8 + 8 * 8))
    shown = palestra("model", "info", tmp_path / "m").output
    assert "1 attention, 1 gated delta net" in shown
    assert "per further sequence" in shown


def test_lora_size_is_what_peft_would_make(micro_model):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    facts = json.loads(palestra("model", "info", micro_model, "--json").stdout)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    config = LoraConfig(r=32, target_modules=names)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(micro_model), config)
    assert facts["lora_parameters"] == model.get_nb_trainable_parameters()[0]


def test_random_model_does_not_overwrite_unless_forced(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    refused = palestra("model", "random", tmp_path, "--shape", "micro")
    assert refused.exit_code == 1
    words = "is not empty; choose another folder, or add --overwrite to write into it"
    assert refused.stderr == f"error: {tmp_path} {words}\n"
    assert palestra("model", "random", tmp_path, "--shape", "micro", "--overwrite").exit_code == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--family", "gpt2", "unknown family 'gpt2'; known: qwen3"), ("--shards", "0", "shards must be at least 1")],
)
def test_random_model_names_the_choices(tmp_path, option, value, message):
    refused = palestra("model", "random", tmp_path / "m", option, value)
    assert_one_line(refused, message, code=2)


def test_info_of_nothing_says_so(tmp_path):
    assert_one_line(palestra("model", "info", tmp_path / "nowhere"), "no such folder", code=2)
    assert_one_line(palestra("model", "info", tmp_path), "config.json: no such file")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", b"{", "config.json: not valid JSON"),
        ("config.json", b'{"architectures": ["GPT2LMHeadModel"]}', "GPT2LMHeadModel"),
        ("model.safetensors", None, "model.safetensors: no such file"),
        ("model.safetensors", b"\xff" * 4, "model.safetensors: cut short"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0[)", "model.safetensors: not a safetensors file"),
        ("tokenizer.json", b"no", "tokenizer.json: not valid JSON"),
    ],
)
def test_info_of_a_broken_folder_is_one_clear_line(micro_model, tmp_path, file, content, message):
    folder = shutil.copytree(micro_model, tmp_path / "broken")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    assert_one_line(palestra("model", "info", folder), message)


def assert_one_line(result: Result, message: str, code: int = 1) -> None:
    assert result.exit_code == code, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_puppet_is_made_of_a_script(tmp_path):
    script = tmp_path / "script.json"
    script.write_text('[{"when": "make a file", "say": "I make it."}]')
    made = palestra("model", "puppet", tmp_path / "m", script, "--context", 5000, "--json")
    assert (json.loads(made.stdout)["cues"], json.loads(made.stdout)["context"]) == (1, 5000)
    assert json.loads(palestra("model", "info", tmp_path / "m", "--json").stdout)["max_positions"] == 5000
    script.write_text("no script")
    refused = palestra("model", "puppet", tmp_path / "n", script)
    assert (refused.exit_code, "JSON list" in refused.stderr) == (2, True)
    assert not (tmp_path / "n").exists()


def test_config_show_takes_what_train_takes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(main, ["config", "show", "demo", "steps=3"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["steps"] == 3
    (tmp_path / "mine.yaml").write_text("environments: [{name: arithmetic}]\n")
    assert json.loads(CliRunner().invoke(main, ["config", "show", "mine.yaml"]).stdout)["kind"] == "grpo"
    unknown = CliRunner().invoke(main, ["config", "show", "dmo"])
    assert (unknown.exit_code, "did you mean demo?" in unknown.stderr) == (2, True)


def test_the_help_of_train_names_every_bundled_config():
    said = " ".join(CliRunner().invoke(main, ["train", "--help"]).stdout.replace("│", " ").split())
    assert f"bundled config: {', '.join(bundled_configs())}." in said


def test_a_command_that_has_loaded_triton_ends_without_noise():
    """Triton's library reports what is not freed at the end of the process."""
    script = "import sys, triton; from palestra.cli.__main__ import run; sys.argv[1:] = ['--version']; run()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
