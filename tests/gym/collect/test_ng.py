"""NeMo Gym's words for a collection are options of ours."""

from __future__ import annotations

import pytest

from palestra.cli.gym.ng.collecting import collect_arguments


def test_their_settings_are_our_options() -> None:
    theirs = [
        "+agent_name=a",
        "+input_jsonl_fpath=in.jsonl",
        "++output_jsonl_fpath=o.jsonl",
        "+num_repeats={a: 4, _default: 1}",
    ]
    theirs += ["+num_samples_in_parallel=8", "+num_repeats_add_seed=true", "+disable_aggregation=false"]
    assert collect_arguments(theirs) == [
        *("--agent", "a", "--input", "in.jsonl", "--output", "o.jsonl", "--repeats", "a=4,_default=1"),
        *("--concurrency", "8", "--seeds", "--overwrite"),
    ]


def test_sampling_goes_into_the_rows_and_a_resume_overwrites_nothing() -> None:
    theirs = [
        "+responses_create_params.temperature=0.5",
        "+responses_create_params={top_p: 0.9}",
        "+resume_from_cache=true",
    ]
    assert collect_arguments(theirs) == ["--resume", "--params", '{"temperature": 0.5, "top_p": 0.9}']


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        (["+agent_nam=x"], "did you mean agent_name?"),
        (["agent"], "an override is key=value"),
        (["+responses_create_params.a=1", "+responses_create_params.a.b=2"], "a already has a value"),
    ],
)
def test_a_mistake_is_one_line(theirs: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        collect_arguments(theirs)
    assert words in capsys.readouterr().err
