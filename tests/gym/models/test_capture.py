"""Calls of a rollout as they are kept, and token ids joined again by their prefixes."""

from __future__ import annotations

import asyncio
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.gym.models.capture import CapturedRecords, CaptureFolder
from palestra.gym.models.capture_records import call_record, model_call_capture
from palestra.gym.models.prefix_merge import MergeFault, folded, rebuild
from tests.gym.models.scripted import Endpoint, Reply, always, completion, in_turn, model, posted
from tests.properties import examples

Json = dict[str, Any]
IDS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}


def kept(folder: Path, reply: Reply, path: str, body: Any, calls: int = 1, **of_server: Any) -> list[Any]:
    """Answers of a server that keeps everything below the folder."""
    gym = {
        "observability_enabled": True,
        "model_call_capture_dir": str(folder),
        "token_id_capture": {"enabled": True, "dir": str(folder)},
    }

    async def main() -> list[Any]:
        endpoint = Endpoint(reply)
        async with endpoint.serving() as url:
            server = model(gym, base_url=url, **of_server)
            answers = [await posted(server, path, body) for _ in range(calls)]
            await server.close()
            return answers

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body", "dialect"),
    [
        ("/v1/responses", {"input": "Hi", "stream": True}, "responses"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True}, "chat"),
        (
            "/v1/messages",
            {"max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}], "stream": True},
            "messages",
        ),
    ],
)
def test_calls_of_all_apis_are_kept_whole_with_their_ids(tmp_path: Path, path: str, body: Json, dialect: str) -> None:
    (answer,) = kept(
        tmp_path,
        always(completion("Yes.", **IDS)),
        f"/ng-rollout/3-1/training-token-capture{path}",
        body,
        return_token_id_information=True,
    )
    assert answer.content_type == "text/event-stream"
    (line,) = CaptureFolder(tmp_path, "capture").read("3-1").lines
    assert (line["dialect"], line["status_code"], line["error_category"]) == (dialect, 200, None)
    assert line["request"] == body
    assert "Yes." in str(line["response"])
    assert line["model_ref"] == {"type": "responses_api_models", "name": "policy_model"}
    (entry,) = CaptureFolder(tmp_path, "tokens").read("3-1").lines
    assert {key: entry[key] for key in IDS} == IDS
    assert entry["model_call_id"] == line["model_call_id"]
    assert entry["output_items"][entry["token_item_index"]]["content"][0]["text"] == "Yes."
    assert not IDS.keys() & entry["output_items"][0].keys()


def test_calls_without_a_rollout_are_not_kept_and_the_prefix_works_without_capture(tmp_path: Path) -> None:
    kept(tmp_path, always(completion()), "/v1/responses", {"input": "Hi"})
    assert list(tmp_path.iterdir()) == []

    async def main() -> int:
        async with Endpoint(always(completion())).serving() as url:
            server = model(base_url=url)
            answer = await posted(server, "/ng-rollout/3-1/v1/responses", {"input": "Hi"})
            await server.close()
            return answer.status

    assert asyncio.run(main()) == 200


@pytest.mark.parametrize(
    ("status", "category"), [(400, "client_error"), (401, "auth"), (404, "not_found"), (500, "upstream_error")]
)
def test_failed_calls_are_kept_with_their_reason(tmp_path: Path, status: int, category: str) -> None:
    reply = always({"error": "no"}, status)
    (answer,) = kept(tmp_path, reply, "/ng-rollout/0-0/v1/responses", {"input": "Hi"})
    assert answer.status == 500
    (line,) = CaptureFolder(tmp_path, "capture").read("0-0").lines
    assert (line["status_code"], line["error_category"], line["response"]) == (status, category, None)
    assert "no" in line["response_raw"]


def test_an_answer_without_ids_marks_the_rollout_and_a_full_context_does_not(tmp_path: Path) -> None:
    path = "/ng-rollout/0-0/training-token-capture/v1/responses"
    kept(tmp_path, in_turn((400, "context length")), path, {"input": "Hi"}, return_token_id_information=True)
    assert not CaptureFolder(tmp_path, "tokens").read("0-0").is_incomplete
    kept(tmp_path, always(completion()), path, {"input": "Hi"})
    assert CaptureFolder(tmp_path, "tokens").read("0-0").is_incomplete


def test_a_full_disk_costs_the_record_and_not_the_answer(tmp_path: Path) -> None:
    """Files of this process cannot grow beyond a few bytes for a while."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = "/ng-rollout/0-0/v1/responses"
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        (answer,) = kept(tmp_path, always(completion()), path, {"input": "Hi"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert answer.status == 200
    response = model_call_capture("0-0", CaptureFolder(tmp_path, "capture").read("0-0"))
    assert {"code": "model_call_capture_incomplete"} in response["gaps"]


def test_a_damaged_line_hides_no_other_and_old_files_can_be_cleared(tmp_path: Path) -> None:
    folder = CaptureFolder(tmp_path, "capture")
    folder.append("1-0", {"a": 1})
    with (tmp_path / "1-0.capture.jsonl").open("ab") as file:
        file.write(b'{"half\n')
    folder.append("1-0", {"a": 2})
    found = folder.read("1-0")
    assert ([line["a"] for line in found.lines], found.damaged) == ([1, 2], 1)
    assert model_call_capture("1-0", found)["gaps"][0]["detail"] == "count=1"
    folder.clear(["1-0", "2-0"])
    assert folder.read("1-0").lines == []
    for bad in ("../x", "", "a/b"):
        with pytest.raises(ValueError, match="not a rollout id"):
            folder.read(bad)


def test_calls_are_summed_whatever_their_api() -> None:
    responses = {"usage": {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}, "output": []}
    anthropic = {"usage": {"input_tokens": 1, "cache_read_input_tokens": 9, "output_tokens": 4}, "content": []}
    lines = [{"response": one, "latency_ms": 2.0} for one in (responses, completion(), anthropic, None)]
    response = model_call_capture("r", CapturedRecords(lines, 0, False))
    assert response["metrics"] == {
        "tokens_in": 20,
        "tokens_out": 8,
        "tokens_reasoning": None,
        "tokens_total": 28,
        "latency_total_ms": 8.0,
        "num_calls": 4,
    }
    assert call_record({"response": anthropic}, 0)["cache_hit"] is True


# Prefixes


def entry(prompt: list[int], generation: list[int], at: float) -> Json:
    item = {"type": "message", "id": f"m{at}"}
    return {
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-1.0] * len(generation),
        "output_items": [{"type": "reasoning"}, item],
        "token_item_index": 1,
        "created_at": at,
    }


def delivered(entries: list[Json], **more: Any) -> tuple[list[list[int]], MergeFault | None]:
    """Generations of the calls that are trained on."""
    found = rebuild(entries, **more)
    seen: list[int] = []
    generations: list[list[int]] = []
    for item in found.output:
        if "generation_token_ids" in item:
            assert item["prompt_token_ids"][: len(seen)] == seen, "not contiguous"
            seen = item["prompt_token_ids"] + item["generation_token_ids"]
            generations.append(item["generation_token_ids"])
    return generations, found.fault


ids = st.lists(st.integers(0, 3), min_size=1, max_size=3)
unused = st.lists(st.integers(10, 12), min_size=1, max_size=2)
turn = st.tuples(ids, ids, st.lists(unused, max_size=2))
"""What comes before an answer, the answer, and answers to the same prompt that nobody used."""


@examples(40)
@given(st.lists(turn, min_size=1, max_size=6), st.lists(ids, max_size=3), st.randoms())
def test_the_conversation_is_found_among_retries_and_others(
    turns: list[tuple[list[int], list[int], list[list[int]]]], others: list[list[int]], random: Any
) -> None:
    entries: list[Json] = []
    history: list[int] = []
    for before, generation, retries in turns:
        prompt = [*history, *before]
        entries += [entry(prompt, one, len(entries)) for one in [*retries, generation]]
        history = prompt + generation
    entries += [entry([99, *other], [5], len(entries) + at) for at, other in enumerate(others)]
    random.shuffle(entries)
    truth = [generation for _, generation, _ in turns]
    if turns[-1][2]:  # nothing came after the last answer: nobody knows which it was
        assert delivered(entries) == (truth[:-1], MergeFault.RETRIES)
    else:
        assert delivered(entries) == (truth, None)


bits = st.lists(st.integers(0, 1), max_size=5)


@examples(60)
@given(st.lists(st.tuples(bits, bits), max_size=8))
def test_whatever_was_kept_what_is_delivered_is_contiguous(calls: list[tuple[list[int], list[int]]]) -> None:
    entries = [entry(prompt, generation, at) for at, (prompt, generation) in enumerate(calls)]
    generations, fault = delivered(entries)
    assert len(generations) <= len(calls)
    assert generations or fault is not None


def test_retries_are_told_by_the_one_that_went_on() -> None:
    retried = [entry([1], [2], 0), entry([1], [3], 1)]
    assert delivered(retried) == ([], MergeFault.RETRIES)
    assert delivered([*retried, entry([1, 3, 9], [4], 2)]) == ([[3], [4]], None)
    assert delivered([entry([1], [2], 0), entry([1], [2], 1)]) == ([[2]], None)
    both = [*retried, entry([1, 3, 9], [4], 2), entry([1, 2, 9], [4], 3)]
    assert delivered(both) == ([], MergeFault.RETRIES)


def test_two_conversations_from_one_answer_are_ambiguous_and_the_first_of_several_is_delivered() -> None:
    assert delivered([entry([1], [2], 0), entry([1, 2, 8], [3], 1), entry([1, 2, 9], [3], 2)])[1] is MergeFault.FORK
    assert delivered([entry([7], [8], 1), entry([1], [2], 0)]) == ([[2]], None)


def test_rows_get_their_ids_or_are_masked_and_those_that_have_ids_are_left_alone() -> None:
    whole = rebuild([entry([1], [2], 0)])
    row: Json = {"reward": 1.0, "response": {"id": "r", "output": [{"type": "message"}]}}
    found = folded(row, whole)
    assert found["response"]["output"][-1]["generation_token_ids"] == [2]
    assert found["response"]["id"] == "r"
    assert "mask_sample" not in found
    assert folded(row, whole, rebuild_response=False)["response"] == row["response"]
    masked = folded(row, rebuild([entry([1], [2], 0)], is_incomplete=True))
    assert masked["mask_sample"] is True
    assert masked["response"] == row["response"]
    assert masked["_ng_token_capture"]["fault"] == "missing"
    has_ids = {"response": {"output": [{"generation_token_ids": [1]}]}}
    assert folded(has_ids, whole) is has_ids
