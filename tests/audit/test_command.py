"""`palestra env audit`: targets, what is printed, the page and the exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from palestra.audit.targets import targets_named
from palestra.cli.env import env
from palestra.config.errors import ConfigError
from palestra.gym.search_folders import SHIPPED
from tests.audit import planted

SUM = f"{planted.__name__}:Sum"
PERCENT = f"{planted.__name__}:Percent"


def run(*args: str) -> Result:
    return CliRunner().invoke(env, ["audit", *args, "--no-fresh-process"], catch_exceptions=False)


def test_findings_are_printed_shown_on_a_page_and_end_with_their_own_code(tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    result = run(SUM, PERCENT, "--limit", "2", "--page", str(page))
    assert result.exit_code == 6
    assert f"{SUM}: no findings" in result.stdout
    assert "error: reward-range: gold, task" in result.stdout
    assert re.search(r"seen: An episode gets reward 100, outside 0 to 1\.", result.stdout)
    assert "do:   Clip or rescale" in result.stdout
    text = page.read_text()
    assert "reward-range" in text
    assert PERCENT in text
    assert not re.search(r"<script|https?://|src=|url\(", text)


def test_json_has_all_and_ignored_kinds_do_not_count() -> None:
    result = run(PERCENT, "--limit", "2", "--json", "--ignore", "reward-range")
    assert result.exit_code == 0
    (report,) = json.loads(result.stdout)
    assert (report["target"], report["tasks"], report["ignored"], report["findings"]) == (PERCENT, 2, 1, [])
    assert {"probe": "gold", "episodes": 2, "solved": 2}.items() <= report["probes"][0].items()
    assert run(PERCENT, "--limit", "2", "--reward-range", "0:100", "--success", "100").exit_code == 0


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["stockrom"], 3, "did you mean: stockroom?"),
        (["prompts"], 1, "brings no tasks of its own; name a JSONL file"),
        ([SUM, "--ignore", "answer-leaks"], 2, "no kind of findings 'answer-leaks'; did you mean answer-leak?"),
        ([SUM, "--reward-range", "1"], 2, "is no range; write it as -1:1"),
        (["none.yaml"], 2, "none.yaml"),
        (["http://127.0.0.1:9/"], 4, "no server answers at http://127.0.0.1:9/"),
    ],
)
def test_what_cannot_be_audited_is_said_in_a_line(args: list[str], code: int, message: str) -> None:
    result = run(*args)
    assert (result.exit_code, message in result.stderr) == (code, True), result.stderr


def test_targets_are_named_in_many_ways(tmp_path: Path) -> None:
    def entry(name: str) -> tuple[str, str]:
        (found,) = targets_named(name, tmp_path)
        assert found.entry is not None
        return found.entry.name, str(found.entry.config.get("tasks_file") or found.entry.config.get("agent"))

    assert entry("stockroom")[0] == "stockroom"
    assert entry("mail") == ("fleet_task", "platform:mail")
    assert entry("mail-move_only") == ("fleet_task", "platform:mail?template=move_only")
    assert entry("platform") == ("fleet_task", "platform:")
    assert entry("gym:mcqa") == ("gym:mcqa", "mcqa_simple_agent")
    shipped = Path(__file__).parents[2] / "palestra" / "gym" / "shipped" / "resources_servers" / "mcqa"
    assert entry(str(shipped)) == ("gym:mcqa", "mcqa_simple_agent")
    assert entry(str(shipped / "configs" / "mcqa.yaml")) == ("gym:mcqa", "mcqa_simple_agent")
    assert len(targets_named("coding", tmp_path)[0].coding) == 40
    assert [task.id for task in targets_named("1-fix-typo", tmp_path)[0].coding] == ["1-fix-typo"]
    config = tmp_path / "run.yaml"
    config.write_text("environments:\n  - name: arithmetic\n  - name: coding\n")
    names = [one.name for one in targets_named(str(config), tmp_path)]
    assert names == [f"{config}: arithmetic (environments.0)", f"{config}: coding (environments.1)"]
    config.write_text("environments:\n  - nam: arithmetic\n")
    with pytest.raises(ConfigError, match=r"environments\.0\.name"):
        targets_named(str(config), tmp_path)


def test_the_config_of_a_gym_says_which_findings_are_meant(tmp_path: Path) -> None:
    (target,) = targets_named("gym:instruction_following", tmp_path)
    assert set(target.accepted) == {"cheat-pays"}
    shipped = SHIPPED / "resources_servers" / "mcqa" / "configs" / "mcqa.yaml"
    config = tmp_path / "resources_servers" / "mcqa" / "configs" / "mcqa.yaml"
    config.parent.mkdir(parents=True)
    for accepted, refusal in {"{cheats-pay: yes it does}": "cheat-pays", "{cheat-pays: }": "in a sentence"}.items():
        own = shipped.read_text().replace("domain:", f"accepted_findings: {accepted}\n      domain:", 1)
        config.write_text(own)
        with pytest.raises(ConfigError, match=refusal):
            targets_named(str(config), tmp_path)
