"""Frameworks as they are installed: a script for each, and what the puppet lets it do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from palestra.episodes import Episode
from palestra.testing.puppet import Cue
from tests.agents.programs import tool_call
from tests.agents.walled import INSTALLED, WalledRun, run_walled

SCRIPTS = Path(__file__).parent / "scripts"


def python(environment: str) -> Path:
    return INSTALLED / environment / "bin" / "python"


OPENAI_3 = python("frameworks")


@dataclass(frozen=True)
class Framework:
    name: str
    route: str = "chat"
    python: Path = OPENAI_3
    act: str = ""
    """What the model answers to use the tool; empty: a call."""
    end: str = ""
    """What the model answers once it has the result; empty: the answer."""
    last: str = ""
    """What it answers after that, for a framework that asks once more; `{name}-asks-again` is its cue."""

    @property
    def script(self) -> list[Cue]:
        act = self.act or tool_call("lookup", item=self.name)
        cues = [Cue(when=self.task, say=act), Cue(when=self.found, say=self.end or self.answer)]
        return cues + ([Cue(when=f"{self.name}-asks-again", say=self.last)] if self.last else [])

    @property
    def task(self) -> str:
        return f"goal-{self.name}"

    @property
    def found(self) -> str:
        return f"found-by-{self.name}"

    @property
    def answer(self) -> str:
        return f"Nice answer of {self.name}"

    def run(self, episode: Episode) -> WalledRun:
        given = {"MODEL": episode.model, "TASK": f"Please {self.task}", "FOUND": self.found}
        quiet = ("CREWAI_DISABLE_TELEMETRY", "OTEL_SDK_DISABLED", "LITELLM_LOCAL_MODEL_COST_MAP")
        script = f"{self.name.replace('-', '_')}_agent.py"
        files = {name: (SCRIPTS / name).read_text() for name in (script, "lookup.py")}
        return run_walled(self.python, [script], episode, given | dict.fromkeys(quiet, "true"), files)


def fields(**given: str) -> str:
    """An answer as DSPy reads it."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in {**given, "completed": ""}.items())


DSPY = Framework(
    "dspy",
    python=python("litellm"),
    act=fields(next_thought="I look", next_tool_name="lookup", next_tool_args='{"item": "dspy"}'),
    end=fields(next_thought="I have it, dspy-asks-again", next_tool_name="finish", next_tool_args="{}"),
    last=fields(reasoning="It was found", answer="Nice answer of dspy"),
)
FRAMEWORKS = [
    Framework("openai-agents", "responses"),
    Framework("langgraph"),
    Framework("pydantic-ai"),
    Framework("anthropic-pydantic-ai", "messages"),
    Framework("smolagents", end=tool_call("final_answer", answer="Nice answer of smolagents")),
    Framework("litellm", python=python("litellm")),
    DSPY,
    Framework("inspect", "responses"),
    Framework("autogen"),
    Framework("crewai", python=python("crewai")),
]
