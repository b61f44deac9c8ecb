"""With the real TextArena, where it is installed: games as it plays them, against each kind of opponent."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest

from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments import EnvironmentFailure, EnvironmentSet, UnknownEnvironment
from tests.scripted_endpoint import scripted_endpoint

textarena = pytest.importorskip("textarena", reason="needs TextArena: make clients")

EXAMPLES = Path(__file__).parents[2] / "examples"
GUESS = {"textarena": "GuessTheNumber-v0"}
FREE = [f"[{square}]" for square in range(9)]


def first_free(history, rng):
    """An opponent: the first square that is free."""
    return next(one for one in FREE if f"'{one}'" in history[-1])


def opened(entry):
    return EnvironmentSet([EnvironmentEntry.model_validate(entry)], env_threads=4, env_timeout_s=20)


async def played(envs, task, policy):
    session = envs.open(task)
    try:
        messages, read = await session.init(task.prompt), []
        for turn in range(session.max_turns):
            read += messages
            step = await session.step(policy(messages, turn))
            messages = step.observations
            if step.done:
                return step.reward, read, await session.verdict()
        raise AssertionError("it has no end")
    finally:
        await session.close()


def play(entry, policy, places=(0,), split="train"):
    async def all_of(envs):
        ((_, tasks),) = envs.tasks(split)
        return await asyncio.gather(*(played(envs, tasks[place], policy) for place in places))

    with opened(entry) as envs:
        return asyncio.run(all_of(envs))


def last_free(messages, turn):
    return next(one for one in reversed(FREE) if f"'{one}'" in messages[-1]["content"].split("Board")[-1])


def count_up(messages, turn):
    return f"[{2 * turn + 1}]"


def test_a_game_for_one_ends_as_textarena_ends_it():
    ours = play(GUESS, count_up, range(8))
    for seed, (reward, _, verdict) in enumerate(ours):
        random.seed(seed)
        game = textarena.make("GuessTheNumber-v0-raw")
        game.reset(num_players=1, seed=seed)
        for turn in range(50):
            done, _ = game.step(action=count_up([], turn))
            if done:
                break
        assert reward == game.state.rewards[0]
        assert verdict["reason"] == game.state.game_info[0]["reason"]
    assert len({reward for reward, _, _ in ours}) > 1


def test_only_wins_may_count():
    partly = [reward for reward, _, _ in play(GUESS, count_up, range(12))]
    wins = [reward for reward, _, _ in play({**GUESS, "config": {"only_wins": True}}, count_up, range(12))]
    assert wins == [float(reward == 1) for reward in partly]
    assert set(partly) - {0.0, 1.0}


def test_a_task_is_the_same_game_however_many_are_played_at_once():
    entry = {"textarena": "TicTacToe-v0"}
    together = play(entry, last_free, range(12))
    assert [play(entry, last_free, [place])[0] for place in range(12)] == together
    assert {verdict["seat"] for _, _, verdict in together} == {0, 1}
    assert len({reward for reward, _, _ in together}) > 1


def test_the_policy_reads_each_message_once():
    ((_, read, _),) = play({"textarena": "TicTacToe-v0", "config": {"seat": 1}}, last_free)
    texts = [one["content"] for one in read]
    assert "You are Player 1" in texts[0]
    assert not any("You are Player 1" in text for text in texts[1:])
    assert not any("You are Player 0" in text for text in texts)


def test_an_opponent_may_be_a_function_or_a_model():
    entry = {"textarena": "TicTacToe-v0", "config": {"seat": 0, "opponent": f"{__name__}:first_free"}}
    ((by_function, _, _),) = play(entry, last_free)

    def model(messages):
        return first_free(messages[-1]["content"].split("\n[GAME] Current Board"), None)

    with scripted_endpoint(model) as url:
        opponent = {"base_url": url, "model": "any"}
        ((by_model, _, _),) = play({**entry, "config": {"seat": 0, "opponent": opponent}}, last_free)
    assert by_model == by_function


def test_an_opponent_that_breaks_the_rules_says_nothing_about_the_policy():
    entry = {"textarena": "Nim-v0", "config": {"seat": 0}}
    with pytest.raises(EnvironmentFailure, match="cannot play Nim-v0"):
        play(entry, lambda messages, turn: "[0 1]")


def test_a_model_that_breaks_the_rules_loses():
    with scripted_endpoint(lambda messages: "I do not know") as url:
        config = {"seat": 0, "opponent": {"base_url": url, "model": "any"}}
        ((reward, _, _),) = play({"textarena": "TicTacToe-v0", "config": config}, last_free)
    assert reward == 1.0


def test_a_game_without_an_end_is_a_draw():
    ((reward, read, _),) = play({**GUESS, "max_turns": 1}, count_up, [3])
    assert reward == 0.0
    assert len(read) == 1


@pytest.mark.parametrize("game", ["Golf-v0", "GermanWhist-v0", "TwoDollar-v0"])
def test_a_game_for_two_begins_however_it_refuses_one_player(game):
    async def first_messages(envs):
        ((_, tasks),) = envs.tasks("train")
        session = envs.open(tasks[0])
        messages = await session.init(tasks[0].prompt)
        await session.close()
        return messages

    with opened({"textarena": game, "config": {"seat": 0}}) as envs:
        assert asyncio.run(first_messages(envs))[0]["content"]


def test_a_game_for_three_is_refused_with_its_own_words():
    with pytest.raises(EnvironmentFailure, match=r"one player or two .*three players"):
        play({"textarena": "ThreePlayerIPD-v0"}, count_up)


def test_the_games_that_the_example_imitates_are_made_by_the_script_that_it_names():
    arguments = ["GuessTheNumber-v0", "--args", '{"max_number": 7, "max_turns": 3}', "--moves", *"1234567"]
    command = [sys.executable, str(EXAMPLES / "random_games.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == (EXAMPLES / "data" / "guesses.jsonl").read_text()


def test_what_does_not_exist_is_named():
    with pytest.raises(UnknownEnvironment, match="did you mean TicTacToe-v0"):
        opened({"textarena": "TicTacToe-v1"})
    with opened({**GUESS, "config": {"oponent": "random"}}) as envs, pytest.raises(ValueError, match="oponent"):
        envs.tasks("train")
