"""Mathematics: answers are compared as texts, then as expressions, then, if configured, by a judge."""

from __future__ import annotations

from enum import StrEnum

from msgspec import field

from palestra.environments.answer_text import after_label, last_boxed, last_number, unwrapped
from palestra.environments.grading.grader_processes import ChildError, GraderProcesses
from palestra.gym.metrics import highest_k, pass_metrics
from palestra.gym.records import ServerInstance
from palestra.gym.servers.base import Peers
from palestra.gym.servers.resources import ResourcesServer, ResourcesSettings, ReverifyMode
from palestra.gym.servers.responses import output_text
from palestra.gym.servers.settings import ServerReference
from palestra.util.json_types import JsonMapping, JsonObject, JsonPayload

CHILD = "palestra.environments.grading.math_child"
SAME, DIFFERENT = "[[SAME]]", "[[DIFFERENT]]"
JUDGE = f"""You compare two answers to a problem. Only their mathematical value counts, not how they are written.
End with {SAME} if they are equal, with {DIFFERENT} if they are not.

Problem: {{question}}

First answer: {{first}}

Second answer: {{second}}"""


class AnswerFrom(StrEnum):
    """Where the answer is in the model's text."""

    BOXED = "boxed"
    LABEL = "label"
    """After `Answer:`."""
    LAST_NUMBER = "last_number"


class MathSettings(ResourcesSettings, frozen=True, kw_only=True):
    answer_from: AnswerFrom = AnswerFrom.BOXED
    symbolic: bool = True
    """Compare as expressions if the texts differ; needs math-verify."""
    library_verifier_timeout_seconds: float = 10.0
    library_verifier_max_concurrency: int | None = None
    should_use_judge: bool = False
    judge_model_server: ServerReference | None = None
    judge_responses_create_params: JsonObject = field(default_factory=dict)


class Math(ResourcesServer[MathSettings]):
    reverify_mode = ReverifyMode.STATELESS

    def __init__(self, instance: ServerInstance, peers: Peers) -> None:
        super().__init__(instance, peers)
        self._children = GraderProcesses(CHILD, self.settings.library_verifier_max_concurrency)

    async def close(self) -> None:
        await self._children.close()
        await super().close()

    async def verify(self, response: JsonObject, expected_answer: str, question: str = "") -> JsonMapping:
        text = output_text(response)
        answer = self._extracted(text)
        is_right = answer is not None and canonical(answer) == canonical(expected_answer)
        extra: JsonObject = {"extracted_answer": answer}
        if not is_right and self.settings.symbolic and text.strip():
            is_right = await self._is_equal(expected_answer, answer or text, extra)
        extra["library_reward"] = float(is_right)
        if not is_right and self.settings.should_use_judge and text.strip():
            is_right = await self._is_judged_equal(question, expected_answer, answer or text)
            extra["judge_reward"] = float(is_right)
        return {"reward": float(is_right), **extra}

    def compute_metrics(self, tasks: list[list[JsonMapping]]) -> JsonPayload:
        def scores(rollout: JsonMapping) -> dict[str, float]:
            symbolic = {"symbolic_accuracy": rollout["library_reward"]} if "library_reward" in rollout else {}
            return symbolic | ({"judge_accuracy": rollout["reward"]} if "judge_reward" in rollout else {})

        return pass_metrics(tasks, scores, answer_key="extracted_answer")

    def key_metrics(self, metrics: JsonObject) -> JsonPayload:
        kinds = ("pass@1[avg-of-{k}]", "pass@{k}", "majority@{k}")
        found = {name: value for kind in kinds for name, value in highest_k(metrics, kind, None, ["no_answer"]).items()}
        return found | {"mean/reward": metrics.get("mean/reward")}

    def _extracted(self, text: str) -> str | None:
        match self.settings.answer_from:
            case AnswerFrom.BOXED:
                return last_boxed(text)
            case AnswerFrom.LABEL:
                return after_label(text)
            case AnswerFrom.LAST_NUMBER:
                return last_number(text)

    async def _is_equal(self, expected: str, answer: str, extra: JsonObject) -> bool:
        boxed = answer if self.settings.answer_from is not AnswerFrom.BOXED else f"\\boxed{{{answer}}}"
        try:
            found = await self._children.request(
                {"expected": unwrapped(expected), "answer": boxed}, self.settings.library_verifier_timeout_seconds
            )
        except ChildError as error:
            extra["library_error"] = str(error)
            return False
        extra["extracted_answer"] = extra["extracted_answer"] or found["extracted"]
        return found["is_right"]

    async def _is_judged_equal(self, question: str, expected: str, answer: str) -> bool:
        """Asks the judge in both orders, because judges prefer a position."""
        for first, second in ((expected, answer), (answer, expected)):
            prompt = JUDGE.format(question=question, first=first, second=second)
            body = {**self.settings.judge_responses_create_params, "input": [{"role": "user", "content": prompt}]}
            assert self.settings.judge_model_server is not None
            verdict = output_text(await self.ask_judge(self.settings.judge_model_server.name, body))
            if verdict.rfind(SAME) <= verdict.rfind(DIFFERENT):
                return False
        return True


def canonical(text: str) -> str:
    """Removes what does not change a value: wrappers, spaces, a full stop at the end."""
    return "".join(unwrapped(text).rstrip(".").replace("\\!", "").replace("\\,", "").replace("{,}", "").split())
