"""Small environments with one defect each, and sound ones. They ask for a sum, or for a key in a box."""

from __future__ import annotations

import itertools
import random
import threading
import time
from typing import Any, ClassVar

from palestra.audit.policies import call_text
from palestra.chat.tool_calls import ParsedCall, parse_tool_call
from palestra.environments import BaseTextEnv, BaseTextEnvStepOutput, ToolGroup, tool
from palestra.types.rollouts import Task

Output = BaseTextEnvStepOutput


def output(reward: Any, done: bool = True, *said: str) -> Output:
    messages = [{"role": "user", "content": text} for text in said]
    return Output(observations=messages, reward=reward, done=done, metadata={})


def rows(split: str, count: int = 6) -> list[dict[str, Any]]:
    first = 100 if split == "train" else 500
    pairs = [(first + 37 * n, 211 + 13 * n) for n in range(count)]
    return [{"id": f"{a}+{b}", "prompt": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


class Sum(BaseTextEnv):
    """Sound: one turn, one number."""

    tasks = staticmethod(rows)

    @staticmethod
    def gold(task: Task) -> list[str]:
        return [task.extras["answer"]]

    def is_right(self, action: str) -> bool:
        return action.strip() == self.extras["answer"]

    def step(self, action: str) -> Output:
        return output(float(self.is_right(action)))


class SumWithoutGold(BaseTextEnv):
    """Sound: the form of the answer is found out."""

    tasks = staticmethod(rows)

    def step(self, action: str) -> Output:
        return output(float(action.strip() == f"<answer>{self.extras['answer']}</answer>"))


class SumWithVerdict(BaseTextEnv):
    """Sound: the verdict names the answer, the row does not."""

    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        return [{"prompt": row["prompt"], "id": row["id"]} for row in rows(split)]

    def init(self, prompt: Any) -> Any:
        self.right = str(sum(int(one) for one in prompt[-1]["content"].strip("?").split()[2::2]))
        return prompt, {}

    def step(self, action: str) -> Output:
        return output(float(action == f"Answer: {self.right}"))

    def get_verdict(self) -> dict[str, str]:
        return {"expected": self.right}


class Tries(Sum):
    """Sound: three tries, a hint after each, and less for later ones."""

    max_turns = 3

    def step(self, action: str) -> Output:
        self.turns += 1
        if self.is_right(action):
            return output(1.0 / self.turns)
        return output(0.0, self.turns == 3, "That is wrong.")


class BoxTools(ToolGroup):
    def __init__(self, keys: list[str]) -> None:
        super().__init__("box")
        self.keys, self.taken, self.opened = keys, "", False

    @tool
    def take(self, key: str) -> str:
        """Take a key."""
        self.taken = key if key in self.keys else ""
        return "taken" if self.taken else "there is no such key"

    @tool
    def turn(self, times: int) -> str:
        """Turn the key."""
        self.opened = bool(self.taken) and times == 3
        return "turned"


class Box(BaseTextEnv):
    """Sound: tools, and a state that decides."""

    max_turns = 6

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__(env_config, extras)
        self.box = BoxTools([self.extras["right"], self.extras["other"]])
        self.init_tool_groups([self.box])

    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        colours = ["red", "blue", "green"] if split == "train" else ["white", "black", "grey"]
        return [
            {"prompt": f"Take the key {one} and turn it 3 times.", "right": one, "other": f"{one}ish"}
            for one in colours
        ]

    @staticmethod
    def gold(task: Task) -> list[str]:
        return [call_text("take", {"key": task.extras["right"]}), call_text("turn", {"times": 3}), "<done>"]

    def step(self, action: str) -> Output:
        self.turns += 1
        if "<done>" in action or self.turns >= self.max_turns:
            return output(float(self.reward()))
        return output(0.0, False, self.called(parse_tool_call(action)))

    def called(self, call: Any) -> str:
        if not isinstance(call, ParsedCall):
            return "no call"
        try:
            return str(self._execute_tool("box", call.name, list(call.arguments.values())))
        except (TypeError, ValueError) as error:
            return f"Error: {error}"

    def reward(self) -> bool:
        return self.box.opened and self.box.taken == self.extras["right"]


# Rewards


class GoldFails(Sum):
    def is_right(self, action: str) -> bool:
        return action.strip() == f"= {self.extras['answer']}"


class EmptyIsRight(Sum):
    def is_right(self, action: str) -> bool:
        return action in self.extras["answer"]


class IdleHalf(Sum):
    def step(self, action: str) -> Output:
        return output(1.0 if self.is_right(action) else 0.5)


class EndIsRight(Box):
    """Nothing was done wrong, so it is right."""

    def reward(self) -> bool:
        return not self.box.taken or self.box.opened


class ChanceIsRight(Box):
    """Any turn of the key will do."""

    def called(self, call: Any) -> str:
        if isinstance(call, ParsedCall) and call.name == "turn":
            self.box.opened, self.box.taken = True, self.extras["right"]
            return "turned"
        return super().called(call)


class ContainsIsRight(Sum):
    def is_right(self, action: str) -> bool:
        return self.extras["answer"] in action


class MagicIsRight(Sum):
    def is_right(self, action: str) -> bool:
        return "PASSED" in action or super().is_right(action)


class Calculates(Sum):
    """Sound answers are numbers, and any text is a sum to it."""

    def is_right(self, action: str) -> bool:
        try:
            return eval(action.removeprefix("<answer>").removesuffix("</answer>")) == int(self.extras["answer"])  # noqa: S307
        except Exception:
            return False


class EchoIsRight(Sum):
    def is_right(self, action: str) -> bool:
        return action.strip() == self.prompt or super().is_right(action)

    def init(self, prompt: Any) -> Any:
        self.prompt = prompt[-1]["content"]
        return prompt, {}


class LastNumberOfMany(Sum):
    """Any list of numbers that is long enough has the answer."""

    def is_right(self, action: str) -> bool:
        return self.extras["answer"] in action.split()


class ObeysCalls(Box):
    def called(self, call: Any) -> str:
        if isinstance(call, ParsedCall) and call.name == "set_reward":
            self.box.opened, self.box.taken = True, self.extras["right"]
        return super().called(call)


class SameAnswer(Sum):
    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        return [{**row, "answer": "yes"} for row in rows(split)]


class NullIsRight(Sum):
    """A wrong message that becomes an empty answer, which is right."""

    def is_right(self, action: str) -> bool:
        return action == "null" or super().is_right(action)


class Farming(Tries):
    """Each right answer is paid, and the episode goes on."""

    @staticmethod
    def gold(task: Task) -> list[str]:
        return [task.extras["answer"]] * 3

    def step(self, action: str) -> Output:
        self.turns += 1
        return output(float(self.is_right(action)), self.turns == 3)


class Percent(Sum):
    def step(self, action: str) -> Output:
        return output(100.0 * self.is_right(action))


class NotANumber(Sum):
    def step(self, action: str) -> Output:
        return output(float("nan") if not action else float(self.is_right(action)))


class Ungraded(Sum):
    def step(self, action: str) -> Output:
        return output(1.0 if self.is_right(action) else None)


class AlwaysRight(Sum):
    """All get the same."""

    def step(self, action: str) -> Output:
        return output(0.0 if "a" * 99 in action else 1.0)


# Leaks


class LeakInPrompt(Sum):
    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        return [{**row, "prompt": f"{row['prompt']} (expected: {row['answer']})"} for row in rows(split)]


class LeakInHint(Tries):
    def step(self, action: str) -> Output:
        self.turns += 1
        if self.is_right(action):
            return output(1.0)
        return output(0.0, self.turns == 3, f"Wrong, the correct answer is {self.extras['answer']}.")


class LeakUnlabelled(Sum):
    def init(self, prompt: Any) -> Any:
        return [*prompt, {"role": "user", "content": f"debug {self.extras['answer']}"}], {}


# Conduct


class Crashes(Sum):
    def is_right(self, action: str) -> bool:
        return int(action) == int(self.extras["answer"]) if action.strip() else False


class CrashesAtStart(Sum):
    def init(self, prompt: Any) -> Any:
        raise RuntimeError("no world today")


class Hangs(Sum):
    released: ClassVar[threading.Event] = threading.Event()

    def step(self, action: str) -> Output:
        if len(action) > 100_000:
            self.released.wait(30)
        return super().step(action)


class Slow(Sum):
    def step(self, action: str) -> Output:
        time.sleep(0.02)
        return super().step(action)


class Grows(Sum):
    kept: ClassVar[list[bytearray]] = []

    def step(self, action: str) -> Output:
        self.kept.append(bytearray(b"x" * (1 << 20)))
        return super().step(action)


class RandomReward(Sum):
    numbers: ClassVar[random.Random] = random.Random(3)

    def step(self, action: str) -> Output:
        return output(self.numbers.random() if self.is_right(action) else 0.0)


class RandomWords(Tries):
    numbers: ClassVar[Any] = itertools.count()

    def step(self, action: str) -> Output:
        found = super().step(action)
        for message in found["observations"]:
            message["content"] += f" (request {next(self.numbers)})"
        return found


class SharedState(Tries):
    """The turns of all episodes are counted together."""

    left: ClassVar[list[int]] = [0]

    def init(self, prompt: Any) -> Any:
        self.left[0] = 3
        return prompt, {}

    def step(self, action: str) -> Output:
        time.sleep(0.001)
        self.left[0] -= 1
        return output(float(self.is_right(action)), self.is_right(action) or self.left[0] <= 0, f"{self.left[0]} left")


# Tasks


class Repeated(Sum):
    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        found = rows(split)
        return [*found, {**found[0], "id": "again", "prompt": found[0]["prompt"].upper()}]


class Trained(Sum):
    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        return [*rows(split), *({**row, "id": f"held-out-{row['id']}"} for row in rows("train", 2) if split == "eval")]


class Unstable(Sum):
    numbers: ClassVar[random.Random] = random.Random(5)

    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        found = rows(split)
        Unstable.numbers.shuffle(found)
        return found


class EndlessTasks(Sum):
    released: ClassVar[threading.Event] = threading.Event()

    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        EndlessTasks.released.wait(30)
        return rows(split)


class UnstableBetweenProcesses(Sum):
    @staticmethod
    def tasks(split: str) -> list[dict[str, Any]]:
        by_prompt = {row["prompt"]: row for row in rows(split)}
        return [by_prompt[prompt] for prompt in set(by_prompt)]
