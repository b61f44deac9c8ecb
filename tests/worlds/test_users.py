"""Users who must be asked: what they say and when, and what the verdict makes of an agent that did not ask, did not
wait for a yes, told another amount, or broke the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from palestra.environments.fleet import FleetTaskEnv
from palestra.environments.fleet.errors import BackendError
from palestra.environments.fleet.platform_tasks import fleet_row, gold_messages
from palestra.environments.platform import APPS, Instance, PlatformTask, SolutionCall, TaskKey, make_task, verify
from palestra.environments.platform.api.stdio import open_world
from palestra.environments.platform.golden import play_golden
from palestra.environments.platform.scripted_user import CALLER, TALK
from palestra.environments.platform.task_records import FIRST_EVAL
from palestra.environments.platform.verdicts import TaskVerdict
from palestra.environments.platform.verifiers import run_verifier
from palestra.net.mcp import ToolResult
from palestra.view.tasks.task_plays import TaskChoice, TaskPlays
from tests.scripted_endpoint import scripted_endpoint
from tests.worlds.families import opened

DOMAINS = [app.key for app in APPS.values() if app.has_users]
CASES = [(app, template.name) for app in DOMAINS for template in APPS[app].templates]
RETURN, CHANGE = "returns-return_item-2-0", "flights-change_flight-2-0"
domains = pytest.mark.parametrize("app", DOMAINS)


def keys_of(app: str, count: int, first: int = 0) -> list[TaskKey]:
    templates = APPS[app].templates
    chosen = [(templates[n % len(templates)], first + n // len(templates)) for n in range(count)]
    return [TaskKey(app, template.name, template.difficulty, number) for template, number in chosen]


def gold_calls(task: PlatformTask) -> list[SolutionCall]:
    with opened(task) as instance:
        return [call for call, _ in play_golden(task, instance).steps]


def left_by(task: PlatformTask, calls: list[SolutionCall]) -> Instance:
    instance = Instance(task.seed, variables=task.variables)
    for call in calls:
        instance.call(call.tool, call.arguments)
    return instance


def score(task: PlatformTask, calls: list[SolutionCall]) -> float | None:
    instance = left_by(task, calls)
    try:
        return verify(task, instance).score
    finally:
        instance.close()


def say(message: str) -> SolutionCall:
    return SolutionCall(TALK, {"message": message})


def talk(instance: Instance, message: str) -> ToolResult:
    return instance.call(TALK, {"message": message})


# What a user says


@domains
def test_a_user_tells_what_is_asked_and_nothing_else(app: str):
    task = make_task(keys_of(app, 1)[0])
    facts = task.params["facts"]
    questions = {
        "email": "What is your e-mail address?",
        "postcode": "And your postcode?",
        "item": "Which item is it?",
        "reason": "What is the reason?",
        "refund_to": "To your card, or a voucher?",
        "code": "May I have your booking code?",
        "last_name": "Your last name, please?",
        "day": "On which day?",
        "from_time": "From what time on?",
    }
    with opened(task) as instance:
        assert not any(value in talk(instance, "Hello! Nice weather today.").text for value in facts.values())
        for name, value in facts.items():
            said = talk(instance, questions[name]).text
            assert value in said, (name, said)
            assert not any(other in said for other_name, other in facts.items() if other_name != name), said
        assert set(instance.hidden_facts()["told"]) == set(facts)


@domains
def test_the_same_words_get_the_same_answers_and_other_tasks_other_ones(app: str):
    first = keys_of(app, 1)[0]
    question = "Could you tell me your e-mail address, your booking code and your last name?"

    def answer(task: PlatformTask) -> str:
        with opened(task) as instance:
            return talk(instance, question).text

    assert answer(make_task(first)) == answer(make_task(first))
    assert len({answer(make_task(key)) for key in keys_of(app, 8)}) > 4


@domains
def test_a_user_whose_patience_is_over_leaves(app: str):
    task = make_task(keys_of(app, 1)[0])
    with opened(task) as instance:
        answers = [talk(instance, "Well.") for _ in range(20)]
    assert '"left":true' in next(one.text for one in answers if '"left"' in one.text)
    assert answers[-1].is_error
    assert "user_left" in answers[-1].text


@pytest.mark.slow
@domains
def test_a_hundred_tasks_are_a_hundred_cases_and_none_is_in_both_splits(app: str):
    def cases(first: int) -> set[tuple[str, str]]:
        tasks = [make_task(key) for key in keys_of(app, 100, first)]
        return {(task.seed.digest, task.variables[CALLER]) for task in tasks}

    train, held_out = cases(0), cases(FIRST_EVAL)
    assert len(train) == len(held_out) == 100
    assert not {world for world, _ in train} & {world for world, _ in held_out}


# What is judged


def without(calls: list[SolutionCall], position: int) -> list[SolutionCall]:
    return calls[:position] + calls[position + 1 :]


def wrong_plays(calls: list[SolutionCall]) -> Iterator[tuple[str, list[SolutionCall]]]:
    """Ways to end a case with a change wrongly; the last call is the change, the one before it the proposal."""
    proposal, change = calls[-2], calls[-1]
    yield "without a yes", [*calls[:-2], change]
    yield "asked for nothing", [proposal, change]
    yield "before the yes", [*calls[:-2], change, proposal]
    yield "no change", calls[:-1]
    yield (
        "for another amount",
        [
            *calls[:-2],
            say("It would be $1.23. Shall I go ahead?"),
            change,
        ],
    )
    yield "one of several amounts", [*calls[:-2], say(f"$1.00, $2.00? {proposal.arguments['message']}"), change]
    name = next(name for name in change.arguments if name.endswith("_cents"))
    other = change.arguments | {name: change.arguments[name] + 1}
    yield "with other cents", [*calls[:-1], SolutionCall(change.tool, other)]
    yield "and refused as well", [*calls, say("Sorry, I cannot do it, see rule R3.")]
    yield "only the database", [change]


@pytest.mark.parametrize("key", [RETURN, CHANGE, "flights-cancel_flight-2-0"])
def test_a_change_counts_only_as_the_policy_wants_it(key: str):
    task = make_task(key)
    calls = gold_calls(task)
    assert score(task, calls) == 1.0
    for name, wrong in wrong_plays(calls):
        assert score(task, wrong) == 0.0, name


@pytest.mark.parametrize(("app", "template"), [(a, t) for a, t in CASES if t.startswith("refuse")])
def test_a_refusal_names_one_rule_and_changes_nothing(app: str, template: str):
    task = make_task(f"{app}-{template}-2-1")
    calls = gold_calls(task)
    rules = ["R1", "R2", "R3", "R4", "R5", "R6", "R7"]
    assert sum(score(task, [*calls[:-1], say(f"Sorry, I cannot: {rule}.")]) == 1.0 for rule in rules) == 1
    assert score(task, [*calls[:-1], say(f"Sorry, I cannot: {', '.join(rules)}.")]) == 0.0
    assert score(task, calls[:-1]) == 0.0
    assert score(task, [*calls[:-1], say("Sorry, I cannot do that.")]) == 0.0


@domains
def test_a_no_of_the_user_counts(app: str):
    task = make_task(f"{app}-accept_a_no-3-0")
    calls = gold_calls(task)
    case = task.params["case"]
    change = (
        SolutionCall("change_flight", {"code": case["code"], "flight_id": case["new"], "charge_cents": case["cents"]})
        if app == "flights"
        else SolutionCall(
            "start_return",
            {"item_id": case["id"], "reason": case["reason"], "refund_to": "card", "refund_cents": case["refund"]},
        )
    )
    assert score(task, calls) == 1.0
    assert score(task, [*calls, change]) == 0.0


@pytest.mark.parametrize(
    ("app", "template", "count"),
    [
        *[(app, APPS[app].templates[0].name, 1) for app in DOMAINS],
        *[pytest.param(*case, 30, marks=pytest.mark.slow) for case in CASES],
    ],
)
def test_the_policy_is_kept_by_solutions_and_exported_verifiers_agree(app: str, template: str, count: int):
    difficulty = next(one.difficulty for one in APPS[app].templates if one.name == template)
    for number in [*range(count - count // 2), *range(FIRST_EVAL, FIRST_EVAL + count // 2)]:
        task = make_task(TaskKey(app, template, difficulty, number))
        calls = gold_calls(task)
        source = fleet_row(task)["verifier_func"]
        for played, expected in ((calls, 1.0), (without(calls, 0), 0.0), ([], 0.0)):
            instance = left_by(task, played)
            assert verify(task, instance).score == expected, (task.key, played)
            if number % 10 == 0:
                done = asyncio.run(run_verifier(source, task.seed.data, instance.snapshot()))
                assert done.score == expected
            instance.close()


# By which ways


def test_a_text_environment_takes_plain_messages_as_said_to_the_user():
    env = FleetTaskEnv({"tasks_file": "platform:returns"}, extras={"task_key": RETURN})
    history, _ = env.init([])
    assert "Every response is one tool call, or a message to the user" in history[0]["content"]
    assert "R1." in history[1]["content"]
    assert "_CALLER" not in history[0]["content"]
    answer = env.step("<think>Who is it?</think>What is your e-mail address?")
    assert "@" in answer["observations"][0]["content"]
    rewards = [env.step(message)["reward"] for message in gold_messages(RETURN)]
    verdict = asyncio.run(env.get_verdict_async())
    env.close()
    assert rewards[-1] == 1.0
    assert verdict["user"]["facts"]["email"] in answer["observations"][0]["content"]
    assert [one["who"] for one in verdict["user"]["talk"][:2]] == ["agent", "user"]


def test_an_agent_of_mcp_talks_to_the_user_too():
    verdicts: list[TaskVerdict] = []
    task = make_task(CHANGE)
    world = open_world(CHANGE, None, verdicts.append)
    for call in gold_calls(task):
        assert not world.call(call.tool, call.arguments).is_error
    world.finish()
    world.instance.close()
    assert [one.score for one in verdicts] == [1.0]


def test_a_model_may_play_the_user_and_the_task_stays_exact():
    asked: list[str] = []

    def policy(messages: list[dict[str, str]]) -> str:
        asked.append(messages[-1]["content"])
        answer = messages[-1]["content"].rpartition("You say next: ")[2]
        return f"Well, well: {answer}" if len(asked) % 2 else "I forgot what I wanted to say."

    with scripted_endpoint(policy) as url:
        config = {"tasks_file": "platform:returns", "user": {"base_url": url, "model": "somebody"}}
        env = FleetTaskEnv(config, extras={"task_key": RETURN})
        env.init([])
        said = [env.step(message) for message in gold_messages(RETURN)]
        talk = asyncio.run(env.get_verdict_async())["user"]["talk"]
        env.close()
    assert said[-1]["reward"] == 1.0
    assert said[0]["observations"][0]["content"].startswith("Well, well: ")
    assert talk[1]["text"] == said[0]["observations"][0]["content"]
    assert "I forgot" not in talk[3]["text"]  # the model left the facts out, so the script's words were used


def test_a_model_that_cannot_be_reached_fails_the_rollout():
    config = {
        "tasks_file": "platform:returns",
        "user": {"base_url": "http://127.0.0.1:9/v1", "model": "x", "timeout_s": 0.01},
    }
    env = FleetTaskEnv(config, extras={"task_key": RETURN})
    env.init([])
    with pytest.raises(BackendError, match="plays the user"):
        env.step("What is your e-mail address?")
    env.close()
    with pytest.raises(ValueError, match=r"env_config.user.*modle"):
        FleetTaskEnv({**config, "user": {"base_url": "x", "modle": "y"}}, extras={"task_key": RETURN})


def test_a_player_by_hand_sees_both_sides_and_the_hidden_facts():
    plays = TaskPlays()
    begun = plays.begin("me", TaskChoice(task=CHANGE))
    state = plays.call("me", begun.id, TALK, {"message": "What is your booking code?"})
    plays.close("me", begun.id)
    assert CALLER not in state.variables
    assert state.user["facts"]["code"] in state.calls[0].result
    assert [one["who"] for one in state.user["talk"]] == ["agent", "user"]
