from __future__ import annotations

import subprocess
import sys

import pytest

from palestra.environments import BaseTextEnv, BaseTextEnvStepOutput, Env, ToolGroup, tool


class Calculator(ToolGroup):
    def __init__(self, name="calculator"):
        super().__init__(name)

    @tool
    def add(self, a, b):
        """Two numbers as one."""
        return a + b

    @tool
    def name_of_group(self):
        return self.name

    def no_tool(self):
        return None


def test_tools_are_found_and_run_by_name():
    group = Calculator()
    assert group.get_name() == "calculator"
    assert sorted(group.get_tool_names()) == ["add", "name_of_group"]
    assert group.execute_tool("add", 2, b=3) == 5
    assert group.get_tool("name_of_group")() == "calculator"
    assert group.get_tool("no_tool") is None
    assert group.get_tool_to_group_mapping() == {"add": "calculator", "name_of_group": "calculator"}
    assert Calculator.add.name == "add"
    with pytest.raises(ValueError, match=r"no tool 'no_tool' in the group 'calculator' .it has add, name_of_group"):
        group.execute_tool("no_tool")


def test_an_environment_runs_tools_of_its_groups():
    env = BaseTextEnv()
    env.init_tool_groups([Calculator()])
    assert env.tool_to_toolgroup["add"] == "calculator"
    assert env._execute_tool("calculator", "add", (2, 3)) == 5
    with pytest.raises(ValueError, match=r"no tool group 'abacus' in BaseTextEnv .it has 'calculator'"):
        env._execute_tool("abacus", "add", (2, 3))
    with pytest.raises(ValueError, match="two tools are called 'add': in 'calculator' and 'other'"):
        env.init_tool_groups([Calculator(), Calculator("other")])


def test_the_defaults_are_those_of_skyrl_gym():
    env = BaseTextEnv()
    prompt = [{"role": "user", "content": "hello"}]
    assert (env.turns, env.max_turns, env.tool_groups, env.tool_to_toolgroup) == (0, 1, [], {})
    assert env.init(prompt) == (prompt, {})
    assert env.get_metrics() == {}
    assert isinstance(env, Env)
    assert str(env) == "Env(BaseTextEnv)"
    assert env.close() is None
    with pytest.raises(NotImplementedError, match="BaseTextEnv has no step"):
        env.step("x")
    output = BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={})
    assert output["reward"] == 1.0
    assert "postprocessed_action" not in output


def test_metrics_are_averaged_where_they_are_numbers():
    metrics = [{"turns": 2, "solved": True, "who": "a"}, {"turns": 4, "solved": False}, {"late": 1.0}]
    assert BaseTextEnv.aggregate_metrics(metrics) == {"turns": 3.0, "solved": 0.5, "late": 1.0}
    assert BaseTextEnv.aggregate_metrics([]) == {}


def test_a_with_block_closes_and_swallows_nothing():
    class Closing(BaseTextEnv):
        closed = 0

        def close(self):
            self.closed += 1

    env = Closing()
    with pytest.raises(KeyError), env as entered:
        entered.extras["nothing"]
    assert env.closed == 1


def test_a_class_says_its_own_turns_and_extras_overrule_them():
    class Long(BaseTextEnv):
        max_turns = 9

    assert Long().max_turns == 9
    assert Long({}, {"max_turns": 2}).max_turns == 2
    assert Long({}, {"answer": 4}).extras == {"answer": 4}


LIGHT = """
import sys
import palestra.environments
from palestra.environments.bundled import arithmetic, stockroom, stockroom_tasks
arithmetic.tasks("eval")[0], stockroom_tasks.solve(stockroom_tasks.tasks("train")[0])
heavy = {"pydantic", "jinja2", "tokenizers", "torch", "numpy", "rich"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""


def test_importing_environments_and_their_words_needs_nothing_but_msgspec():
    found = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout == "[]\n"
