"""What a person sees of a run."""

from __future__ import annotations

import io
import json
import re
import threading

import pytest
from rich.console import Console

from palestra.cli.progress_display import QUIET_S, LiveDisplay, open_display, sparkline
from palestra.config.train import GrpoConfig
from palestra.runs.advisories import Advisory
from palestra.runs.advisory_guidance import AdvisoryKind
from palestra.runs.listener import Stage
from tests.waiting import until

CONFIG = GrpoConfig.model_validate({"environments": [{"name": "stockroom"}], "steps": 10})
STEP = {
    "reward/mean": 0.5,
    "reward/p10": 0.0,
    "reward/p90": 1.0,
    "time/total_s": 2.0,
    "time/collect_s": 1.5,
    "throughput/total_tokens_per_s": 1234.0,
}


ADVISORY = Advisory(
    kind=AdvisoryKind.TRUNCATED,
    metric="rollouts/truncated_share",
    value=0.5,
    step=4,
    text="Many answers are cut",
    cause="they are long",
    remedy="raise rollout.max_tokens (now 8)",
    settings=["rollout.max_tokens"],
)
WARNING = (
    "warning after step 4: Many answers are cut (rollouts/truncated_share 0.5). Usual cause: they are long. "
    "Try: raise rollout.max_tokens (now 8)."
)


def open_board(name: str) -> LiveDisplay:
    return LiveDisplay(name, CONFIG, Console(file=io.StringIO(), width=200))


def shown(board: LiveDisplay) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(board)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_board_shows_reward_with_spread_phases_speed_and_what_is_left():
    board = open_board("mine [bold]")
    board.stage(Stage.COLLECT, 8, 16)
    board.step(4, STEP)
    board.evaluated(4, {"eval/success": 0.75})
    board.note("[red]careful")
    said = shown(board)
    for text in ("mine [bold]", "step 4 of 10", "left", "collect", "1.5 s last time", "0.500", "p10 0.00", "p90 1.00"):
        assert text in said
    assert "0.750 @4" in said
    assert "tokens/s 1,234" in said
    assert "[red]careful" in said  # notes are text, not markup


def test_a_resumed_run_counts_only_its_own_steps_for_what_is_left():
    board = open_board("mine")
    board.step(9, STEP)
    assert "about 0:02 left" in shown(board)


def test_lines_tell_the_first_beginning_of_each_stage(capsys):
    with open_display("lines", "mine", CONFIG) as listener:
        for _ in range(2):
            for done in (0, 1, 8):
                listener.stage(Stage.EVAL, done, 8)
        listener.stage(Stage.SYNC, 0, 0)  # nothing to count
    assert capsys.readouterr().out.splitlines() == ["eval: 0 of 8"]


def test_lines_go_on_while_a_stage_reports_nothing(capsys):
    lines: list[str] = []

    def said(pattern: str) -> bool:
        lines.extend(capsys.readouterr().out.splitlines())
        return any(re.fullmatch(pattern, line) for line in lines)

    since = r"since \d\d:\d\d:\d\d \(\d+:\d\d\)"
    with open_display("lines", "mine", CONFIG, quiet_s=0.001) as listener:
        until(lambda: said(f"start: {since}"))
        listener.stage(Stage.UPDATE, 1, 3)
        until(lambda: said(f"update: 1 of 3, {since}"))
        listener.stage(Stage.SYNC, 0, 0)
        until(lambda: said(f"sync: {since}"))
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_ten_seconds_pass_between_two_lines_at_most():
    assert QUIET_S < 10


def test_the_board_tells_how_far_the_stage_is_and_since_when():
    board = open_board("mine")
    assert re.search(r"start .* since \d\d:\d\d:\d\d \(0:\d\d\)", shown(board))
    board.stage(Stage.SCORE, 3, 16)
    said = shown(board)
    assert re.search(r"score .* 3 of 16, since \d\d:\d\d:\d\d \(0:\d\d\)", said)
    assert "start" not in said


def test_lines_and_json_where_there_is_no_terminal(capsys):
    with open_display("auto", "mine", CONFIG) as listener:
        listener.step(1, STEP)
        listener.evaluated(1, {"eval/success": 0.75})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 1/10  reward 0.500")
    assert lines[1] == "eval after step 1  eval 0.750"
    with open_display("json", "mine", CONFIG) as listener:
        listener.step(1, STEP)
    assert json.loads(capsys.readouterr().out) == {"step": 1, **STEP}


def test_an_advisory_is_a_line_a_record_or_stays_above_the_board(capsys):
    with open_display("lines", "mine", CONFIG) as listener:
        listener.advise(ADVISORY)
    assert capsys.readouterr().out == f"{WARNING}\n"
    with open_display("json", "mine", CONFIG) as listener:
        listener.advise(ADVISORY)
    said = json.loads(capsys.readouterr().out)
    assert (said["step"], said["advisory"]["kind"], said["advisory"]["value"]) == (4, "truncated", 0.5)
    console = Console(file=io.StringIO(), width=200)
    board = LiveDisplay("mine", CONFIG, console)
    board.advise(ADVISORY)
    board.stage(Stage.COLLECT, 1, 2)  # clears notes
    assert console.file.getvalue() == f"{WARNING}\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(("values", "drawn"), [((0.0, 0.5, 1.0), "▁▅█"), ((2.0,), "█"), ((-1.0, 1.0), "▁█")])
def test_a_sparkline_spans_zero_to_one_or_more(values, drawn):
    assert sparkline(values) == drawn
