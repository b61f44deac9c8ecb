"""The resources servers we ship: what they grade as right, and what they do not fall for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from palestra.gym.errors import PeerFailed
from palestra.gym.search_folders import SHIPPED
from palestra.gym.shipped.resources_servers.code_gen.app import CodeGen
from palestra.gym.shipped.resources_servers.instruction_following.app import InstructionFollowing
from palestra.gym.shipped.resources_servers.math_with_judge.app import Math
from palestra.gym.shipped.resources_servers.mcqa.app import Mcqa
from palestra.gym.shipped.resources_servers.structured_outputs.app import StructuredOutputs
from palestra.gym.testing import model_response, opened
from palestra.sandbox import SandboxError, lean_python
from palestra.types.gym import PARAMS
from tests.sandbox.needs import needs_local

OPTIONS = [{"A": "red"}, {"B": "blue sky"}, {"C": "green"}]


def examples(name: str) -> list[dict[str, Any]]:
    path = SHIPPED / "resources_servers" / name / "data/example.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def graded(server: Any, text: str, row: dict[str, Any]) -> float:
    fields = {name: value for name, value in row.items() if name != "responses_create_params"}
    return server.caller().verify(model_response(text), **fields)["reward"]


@pytest.mark.parametrize(
    ("mode", "text", "letter"),
    [
        ("strict_single_letter_boxed", r"so \boxed{B}", "B"),
        ("strict_single_letter_boxed", r"first \boxed{A}, no: \boxed{\text{(b)}}", "B"),
        ("strict_single_letter_boxed", r"\boxed{B: blue sky}", "B"),
        ("strict_single_letter_boxed", r"\boxed{blue sky}", None),
        ("strict_single_letter_boxed", r"\boxed{D}", None),
        ("strict_single_letter_boxed", r"B", None),
        ("strict_single_letter_boxed", r"\boxed{B", None),
        ("lenient_boxed", r"\boxed{a Blue  sky}", "B"),
        ("lenient_boxed", r"\boxed{red or green}", None),
        ("lenient_answer_colon", "Answer: b because", "B"),
        ("lenient_answer_colon", "**Answer:** (C)", "C"),
        ("lenient_answer_colon", "Answer: A or B", None),
        ("lenient_answer_colon", "Answer: blue", None),
    ],
)
def test_a_letter_is_read_as_strictly_as_asked(mode: str, text: str, letter: str | None) -> None:
    with opened(Mcqa) as mcqa:
        response = mcqa.caller().verify(model_response(text), options=OPTIONS, expected_answer="B", grading_mode=mode)
        assert response["extracted_answer"] == letter
        assert response["reward"] == float(letter == "B")


def test_a_rows_own_pattern_finds_the_letter() -> None:
    with opened(Mcqa) as mcqa:
        patterns = {"output_regex": ["(", r"choose:\s*(\w)"]}
        response = mcqa.caller().verify(
            model_response("I choose: A. No, I choose: b"), expected_answer="B", template_metadata=patterns
        )
        assert response["extracted_answer"] == "B"


def test_a_pattern_that_takes_for_ever_is_given_up_and_the_next_row_is_graded() -> None:
    with opened(Mcqa, regex_timeout_seconds=0.5) as mcqa:
        slow = {"output_regex": r"(a|a)*b$"}
        response = mcqa.caller().verify(model_response("a" * 60), expected_answer="B", template_metadata=slow)
        assert (response["reward"], response["extracted_answer"]) == (0.0, None)
        assert "no answer within 0.5 s" in response["regex_error"]
        large = {"output_regex": [r"(?s)(.*x)"] * 20}
        response = mcqa.caller().verify(model_response("x" * 2**20), expected_answer="B", template_metadata=large)
        assert (response["reward"], response["extracted_answer"]) == (0.0, None)
        quick = {"output_regex": r"choose:\s*(\w)"}
        response = mcqa.caller().verify(model_response("choose: B"), expected_answer="B", template_metadata=quick)
        assert response["reward"] == 1.0


@pytest.mark.parametrize(
    "response",
    [
        3,
        {},
        {"output": 3},
        {"output": [3]},
        {"output": [{"role": "assistant"}]},
        {"output": [{"type": "message", "content": 3}]},
        {"output": [{"type": "message", "content": [3]}]},
        {"output": [{"type": "message", "content": [{"type": "output_text"}]}]},
        {"output": [{"type": "message", "content": [{"type": "output_text", "text": 3}]}]},
    ],
)
def test_what_is_no_response_is_refused(response: Any) -> None:
    with opened(Mcqa) as mcqa:
        answer = mcqa.caller().post("/verify", {PARAMS: {"input": "x"}, "response": response, "expected_answer": "B"})
        assert answer.status == 422
        assert answer.value()["detail"][0]["loc"] == ["body", "response"]


@pytest.mark.parametrize(
    ("expected", "text", "reward"),
    [
        ("102", r"\boxed{102}", 1.0),
        ("102", "102", 1.0),
        (r"\(\frac{5}{6}\)", r"\boxed{\frac{10}{12}}", 1.0),
        ("x + 1", r"\boxed{1+x}", 1.0),
        ("3x^2", r"\boxed{3x^3}", 0.0),
        ("5", "", 0.0),
        ("5", r"\boxed{}", 0.0),
    ],
)
def test_equal_expressions_are_right_however_they_are_written(
    math: Any, expected: str, text: str, reward: float
) -> None:
    assert graded(math, text, {"expected_answer": expected}) == reward


@pytest.fixture(scope="module")
def math() -> Any:
    with opened(Math) as server:
        yield server


@pytest.mark.slow
def test_an_expression_that_takes_for_ever_is_given_up() -> None:
    with opened(Math, library_verifier_timeout_seconds=1) as server:
        caller = server.caller()
        response = caller.verify(model_response(r"\boxed{(((9^{9})^{9})^{9})^{9^{9}}!}"), expected_answer="7")
        assert response["reward"] == 0.0
        assert caller.verify(model_response(r"\boxed{\frac{14}{2}}"), expected_answer="7")["reward"] == 1.0, (
            "and the next one is read"
        )


def test_a_judge_is_asked_in_both_orders_and_may_fail() -> None:
    request: list[str] = []

    def judge(verdicts: list[str]) -> Callable[[Any], Any]:
        def answered(call: Any) -> Any:
            request.append(call.body["input"][0]["content"])
            return model_response(verdicts.pop(0))

        return answered

    settings = {"should_use_judge": True, "symbolic": False, "judge_model_server": {"name": "judge"}}
    for verdicts, reward in (["yes [[SAME]]", "[[SAME]]"], 1.0), (["[[SAME]]", "no: [[DIFFERENT]]"], 0.0):
        with opened(Math, peers={"judge": judge(verdicts)}, **settings) as server:
            assert graded(server, r"\boxed{two}", {"expected_answer": "2", "question": "1+1?"}) == reward
    assert "First answer: 2\n\nSecond answer: two" in request[0]
    assert "First answer: two\n\nSecond answer: 2" in request[1]

    def broken(call: Any) -> Any:
        raise RuntimeError("no model")

    with opened(Math, peers={"judge": broken}, **settings) as server:
        response = server.caller().verify(model_response(r"\boxed{two}"), expected_answer="2")
        assert response["_ng_failure_class"] == "judge_failed"


INSTRUCTIONS = [
    ("The sea is wide. It is deep. I like it.", "no commas, so: here, one", 0),
    ("HELLO YOU", "Hello", 1),
    ("* apple\n* pear\n* plum", "* apple\n* pear", 2),
    ('```json\n{"colour": "blue"}\n```', "blue {", 3),
    ("A bee in the shade. And so it grows.", "A bee. And so it grows.", 4),
]


@pytest.mark.parametrize(("good", "bad", "example"), INSTRUCTIONS)
def test_instructions_are_checked(good: str, bad: str, example: int) -> None:
    row = examples("instruction_following")[example]
    with opened(InstructionFollowing) as server:
        assert graded(server, good, row) == 1.0
        assert graded(server, bad, row) == 0.0
        assert graded(server, "", row) == 0.0


@pytest.mark.parametrize(
    ("name", "arguments", "good", "bad"),
    [
        ("keywords:frequency", {"keyword": "ha", "frequency": 2, "relation": "at least"}, "ha Ha", "ha"),
        ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "category", "a cat"),
        ("keywords:letter_frequency", {"letter": "q", "let_frequency": 1, "let_relation": "less than"}, "abc", "Q"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
        (
            "length_constraints:number_sentences",
            {"num_sentences": 2, "relation": "less than"},
            "Mr. Fox ran.",
            "I. Ran! So.",
        ),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
            "First.\n\nThen more.",
            "First.\n\nMore then.",
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. more", "Bye."),
        ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a*"),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "SECTION", "num_sections": 2},
            "SECTION 1\na\nSECTION 2\nb",
            "SECTION 1 a",
        ),
        ("detectable_format:title", {}, "<<My day>>\nIt was.", "<< >>"),
        ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi"}, "say hi: hi", "hi"),
        ("startend:quotation", {}, '"all of it"', '"a" and b'),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 2, "capital_relation": "at least"},
            "A BIG dog",
            "A dog",
        ),
        ("change_case:english_lowercase", {}, "quiet", "Quiet"),
        ("last_word:last_word_answer", {"last_word": "Contest"}, "It was a contest.", "contest it was"),
        ("first_word:first_word_answer", {"first_word": "yes"}, "Yes, sir", "No, yes"),
    ],
)
def test_every_kind_of_instruction(name: str, arguments: dict[str, Any], good: str, bad: str) -> None:
    row = {"verifier_metadata": {"instruction_id_list": [name], "kwargs": [arguments]}}
    with opened(InstructionFollowing) as server:
        assert (graded(server, good, row), graded(server, bad, row)) == (1.0, 0.0)


def test_an_instruction_nobody_can_check_is_refused_with_the_nearest() -> None:
    row = {"instruction_id_list": ["punctuation:no_commas"], "kwargs": [{}]}
    with opened(InstructionFollowing) as server, pytest.raises(PeerFailed, match="did you mean punctuation:no_comma"):
        graded(server, "x", row)


def test_a_share_of_the_instructions_where_asked() -> None:
    names = ["change_case:english_lowercase", "punctuation:no_comma"]
    row = {"instruction_id_list": names, "kwargs": [None, None], "grading_mode": "fraction"}
    with opened(InstructionFollowing) as server:
        assert graded(server, "a, b", row) == 0.5


@pytest.mark.parametrize(
    ("example", "good", "bad"),
    [
        (0, '{"name": "Ada", "age": 36}', '{"name": "Ada", "age": "36"}'),
        (1, '```json\n["a", "b", "c"]\n```', '["a", "b"]'),
        (2, "title: Emma\nyear: 1815", "title: Emma\nyear: [1815"),
        (3, 'host = "a"\nport = 80', "host = a"),
        (4, "fruit,price\napple,1.5\npear,2", "fruit,price\napple"),
    ],
)
def test_structured_answers_are_held_against_their_schema(example: int, good: str, bad: str) -> None:
    row = examples("structured_outputs")[example]
    with opened(StructuredOutputs) as server:
        assert (graded(server, good, row), graded(server, bad, row)) == (1.0, 0.0)


def test_the_arguments_of_a_call_are_held_against_the_schema() -> None:
    row = {"schema_str": '{"type": "object", "required": ["x"]}', "response_mode": "tool_call", "tool_name": "give"}
    with opened(StructuredOutputs) as server:
        caller = server.caller()
        assert caller.verify(model_response("", ("give", {"x": 1})), **row)["reward"] == 1.0
        for wrong, kind in (
            (model_response("", ("take", {"x": 1})), "wrong_tool_name"),
            (model_response("", ("give", {})), "validation_error"),
            (model_response('{"x": 1}'), "missing_tool_call"),
        ):
            assert caller.verify(wrong, **row)["error_type"] == kind
        with pytest.raises(PeerFailed, match="no JSON Schema"):
            graded(server, "{}", {"schema_str": "{"})


PROGRAMS = [
    "print(sum(map(int, input().split())))",
    "print(input()[::-1])",
    "n = int(input())\nprint(max(map(int, input().split())))",
    "def is_even(n):\n    return n % 2 == 0",
    "class Solution:\n    def pairs(self, a, t):\n        return sum(a[i] + b == t for i in range(len(a)) for b in a[:i])",  # noqa: E501
]


@pytest.mark.parametrize(("example", "program"), list(enumerate(PROGRAMS)))
def test_programs_are_judged_by_their_outputs(code: Any, example: int, program: str) -> None:
    row = examples("code_gen")[example]
    assert graded(code, f"Here:\n```python\n{program}\n```", row) == 1.0


@pytest.fixture(scope="module", params=[None, pytest.param("local", marks=[pytest.mark.slow, needs_local])])
def code(request: pytest.FixtureRequest) -> Any:
    with opened(CodeGen, unit_test_timeout_secs=1, debug=True, sandbox=request.param) as server:
        yield server


@needs_local
def test_programs_are_graded_in_a_sandbox_of_the_named_backend() -> None:
    row = {"verifier_metadata": {"unit_tests": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}}
    with opened(CodeGen, debug=True, sandbox="local") as server:
        assert graded(server, f"```python\n{PROGRAMS[0]}\n```", row) == 1.0
        response = server.caller().verify(model_response("```python\nprint(open('/etc/passwd').read())\n```"), **row)
    assert "PermissionError" in response["errors"][0]


def test_an_unknown_sandbox_is_refused_at_start() -> None:
    with pytest.raises(SandboxError, match="did you mean local"), opened(CodeGen, sandbox="locl"):
        pass


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("print(open('/etc/passwd').read())", "PermissionError"),
        ("import socket; socket.socket()", "Error"),
        ("import os; os.system('true')", "Error"),
        ("while True: pass", "did not end within 1 s"),
        ("x = bytearray(4 * 10**9)", "MemoryError"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("import os\nos._exit(0)", "not reached"),
        ("raise SystemExit(3)", None),
        ("def (", "SyntaxError"),
    ],
)
def test_a_program_that_breaks_or_breaks_out_is_wrong_and_nothing_else_happens(
    code: Any, program: str, words: str | None
) -> None:
    row = {"verifier_metadata": {"unit_tests": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}}
    response = code.caller().verify(model_response(f"```python\n{program}\n```"), **row)
    assert response["reward"] == 0.0
    assert words is None or words in response["errors"][0]


def test_a_program_may_run_its_main_in_a_thread(code: Any) -> None:
    program = "import threading\nt = threading.Thread(target=lambda: print(input()))\nt.start()\nt.join()"
    row = {"verifier_metadata": {"unit_tests": {"inputs": ["a\n"], "outputs": ["a\n"]}}}
    assert graded(code, f"```\n{program}\n```", row) == 1.0


def test_where_the_kernel_holds_no_walls_nothing_is_run_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    loose = "import platform; platform.machine = lambda: 'none'\n"
    monkeypatch.setattr(lean_python, "BOOT", loose + lean_python.BOOT)
    row = {"verifier_metadata": {"unit_tests": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}}
    answer = f"```\n{PROGRAMS[0]}\n```"
    with opened(CodeGen) as server, pytest.raises(PeerFailed, match="trust_programs: true"):
        graded(server, answer, row)
    with opened(CodeGen, trust_programs=True) as server:
        assert graded(server, answer, row) == 1.0


def test_the_next_input_gets_a_fresh_program(code: Any) -> None:
    program = "try:\n    seen\nexcept NameError:\n    seen = 1\n    print(input())"
    row = {"verifier_metadata": {"unit_tests": {"inputs": ["a\n", "b\n"], "outputs": ["a\n", "b\n"]}}}
    assert graded(code, f"```\n{program}\n```", row) == 1.0


@pytest.mark.parametrize(
    ("program", "given", "expected"),
    [
        ("import sys\nsys.stdout.buffer.write(b'5')", "", "5"),
        ("print(sum(map(int, open(0))))", "1\n2\n", "3"),
        (
            "total = 0\nwhile True:\n    try: total += int(input())\n    except EOFError: break\nprint(total)",
            "1\n2\n",
            "3",
        ),
        ("print(5)\nexit()", "", "5"),
        ("print(10**18 + 1)", "", str(10**18 + 1)),
        ("print(0.1 + 0.2, 1)", "", "0.3 1.0"),
    ],
)
def test_the_ways_in_which_programs_read_print_and_end(code: Any, program: str, given: str, expected: str) -> None:
    row = {"verifier_metadata": {"unit_tests": {"inputs": [given], "outputs": [expected]}}}
    assert graded(code, f"```python\n{program}\n```", row) == 1.0


def test_whole_numbers_are_not_rounded_until_they_are_equal(code: Any) -> None:
    row = {"verifier_metadata": {"unit_tests": {"inputs": [""], "outputs": [str(10**18)]}}}
    assert graded(code, "```python\nprint(10**18 + 1)\n```", row) == 0.0


def test_after_an_input_without_an_end_the_others_are_not_tried(code: Any) -> None:
    tests = {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]}
    program = "n = input()\nwhile n == '1': pass\nprint(n)"
    response = code.caller().verify(
        model_response(f"```python\n{program}\n```"), verifier_metadata={"unit_tests": tests}
    )
    assert response["result"] == [False] * 3
    assert "not reached" in response["errors"][1]


def test_tests_without_as_many_outputs_are_the_rows_fault(code: Any) -> None:
    row = {"verifier_metadata": {"unit_tests": {"inputs": ["1", "2"], "outputs": ["1"]}}}
    answer = code.caller().post("/verify", {"response": model_response("```\nprint(1)\n```"), **row})
    assert answer.status == 422


def test_a_comparison_that_cannot_be_made_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.gym.shipped.resources_servers.math_with_judge.app.CHILD", "palestra.no_such_module")
    with opened(Math) as server:
        answer = server.caller().post(
            "/verify", {"response": model_response(r"\boxed{\frac{4}{2}}"), "expected_answer": "2"}
        )
        assert answer.status == 500
        assert "does not start" in answer.value()


MANY = 40_000
"""Enough to take minutes where the work grows with the square of it."""


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * MANY,
        "\\boxed{" + "$" * MANY + "A" + "$" * MANY + "}",
        "\\boxed{" + "\\text{" * 99 + "A" + "}" * 100,
    ],
)
def test_an_answer_that_repeats_itself_without_end_is_just_wrong(text: str) -> None:
    with opened(Mcqa) as mcqa:
        assert graded(mcqa, text, {"expected_answer": "B"}) == 0.0


def test_an_option_without_a_text_is_not_chosen_by_saying_nothing() -> None:
    with opened(Mcqa) as mcqa:
        row = {"expected_answer": "B", "options": [{"A": "red"}, {"B": " "}], "grading_mode": "lenient_boxed"}
        assert graded(mcqa, r"\boxed{}", row) == 0.0


@pytest.mark.parametrize(
    ("name", "text", "given"),
    [
        ("detectable_format:json_format", "[" * MANY, {}),
        ("detectable_format:title", "<" * MANY, {}),
        ("detectable_format:number_bullet_lists", "\n" * MANY + "x", {"num_bullets": 1}),
        ("detectable_content:postscript", "\n" * MANY + "x", {}),
        ("detectable_content:number_placeholders", "[" * MANY, {"num_placeholders": 1}),
    ],
)
def test_checks_get_through_any_text(name: str, text: str, given: dict[str, Any]) -> None:
    with opened(InstructionFollowing) as server:
        assert graded(server, text, {"instruction_id_list": [name], "kwargs": [given]}) == 0.0


@pytest.mark.parametrize(
    "metadata",
    [
        {"instruction_id_list": [{"a": 1}], "kwargs": [{}]},
        {"instruction_id_list": ["keywords:letter_frequency"], "kwargs": [{"letter": 5, "let_frequency": 1}]},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "grading_mode": "some"},
    ],
)
def test_instructions_that_are_none_are_the_rows_fault(metadata: dict[str, Any]) -> None:
    with opened(InstructionFollowing) as server:
        answer = server.caller().post("/verify", {"response": model_response("x"), "verifier_metadata": metadata})
        assert answer.status == 422


NESTED = '{"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}'
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("schema", "kind", "text"),
    [
        (NESTED, "json", "[" * 900 + "]" * 900),
        ('{"properties": {"a": {"type": "number"}}}', "json", '{"a": NaN}'),
        ('{"type": "array"}', "yaml", LAUGHS),
        ('{"patternProperties": {"^x": {}}}', "yaml", "1: 2"),
    ],
)
def test_structures_made_to_break_the_check_are_just_wrong(schema: str, kind: str, text: str) -> None:
    with opened(StructuredOutputs) as server:
        assert graded(server, text, {"schema_str": schema, "schema_type": kind}) == 0.0


@pytest.mark.parametrize("target", ["#/$defs/none", "http://127.0.0.1:1/x.json"])
def test_a_schema_that_refers_elsewhere_is_the_rows_fault_and_nothing_is_fetched(target: str) -> None:
    with opened(StructuredOutputs) as server:
        body = {"response": model_response("{}"), "schema_str": json.dumps({"$ref": target})}
        answer = server.caller().post("/verify", body)
        assert answer.status == 422
        assert "refers to what is not in it" in answer.value()["detail"]


def test_every_server_we_ship_has_a_config_data_and_a_page() -> None:
    folders = [folder for folder in (SHIPPED / "resources_servers").iterdir() if (folder / "app.py").exists()]
    assert len(folders) >= 7
    for folder in folders:
        assert (folder / "configs" / f"{folder.name}.yaml").exists(), folder
        assert (folder / "README.md").exists(), folder
        assert len((folder / "data/example.jsonl").read_text().splitlines()) >= 5, folder
