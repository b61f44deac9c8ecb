"""Opponents of TextArena's games, without the games."""

from __future__ import annotations

import random

import pytest

from palestra.environments.held_out import is_held_out
from palestra.environments.textarena_opponents import EndpointOpponent, random_move
from tests.scripted_endpoint import scripted_endpoint

BOARD = "[GAME] Available Moves: '[0]', '[4]', '[8]'"


def test_a_random_move_is_one_that_the_game_has_listed_last():
    history = ["[GAME] For example, '[2]'", "[Player 0] [1]", BOARD, "[GAME] nothing is listed here"]
    assert {random_move(history, random.Random(seed)) for seed in range(40)} == {"[0]", "[4]", "[8]"}
    assert random_move(history, random.Random(3)) == random_move(history, random.Random(3))


def test_a_game_without_listed_moves_needs_another_opponent():
    with pytest.raises(ValueError, match=r"config\.opponent=package\.module:function"):
        random_move(["[GAME] Say what you like.", "[Player 1] hello"], random.Random(0))


def test_a_model_reads_all_and_answers():
    with scripted_endpoint(lambda messages: messages[0]["content"].splitlines()[-1]) as url:
        move = EndpointOpponent(base_url=url, model="any")(["first", "[4]"], random.Random(0))
    assert move == "[4]"


def test_one_task_in_eight_is_held_out_by_its_text():
    texts = [f"What is {i} + 1?" for i in range(4000)]
    held_out = [text for text in texts if is_held_out(text)]
    assert 400 < len(held_out) < 600
    assert held_out == [text for text in texts if is_held_out(text)]
