"""Results of `verify`, and the rows made from them."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct, field

from palestra.gym.errors import JudgeError
from palestra.types.gym import PARAMS
from palestra.types.gym_failures import FailureClass, RowFailure
from palestra.util.json_types import JsonMapping, JsonObject

REWARD, COMPONENTS = "reward", "reward_components"
JUDGE_WORDS = "_ng_failure_judge_error"
TOLERANCE = 1e-5  # NeMo RL's, between a reward and the sum of its components


class Verdict(Struct, frozen=True):
    reward: float
    extra: JsonMapping = field(default_factory=dict)
    """Further fields of the row; numbers and booleans are included in the metrics."""
    components: Mapping[str, float] | None = None
    """Several rewards by name, the same names for every task; `reward` is their sum."""

    @classmethod
    def of(cls, components: Mapping[str, float], **extra: object) -> Verdict:
        return cls(float(sum(components.values())), extra, components)

    @classmethod
    def from_result(cls, result: object) -> Verdict:
        """A verdict made from a Verdict, a number, a boolean, or a mapping with a `reward`."""
        if isinstance(result, Verdict):
            return result
        if isinstance(result, bool | int | float):
            return cls(float(result))
        if isinstance(result, Mapping) and isinstance(result.get(REWARD), bool | int | float):
            extra = {name: value for name, value in result.items() if name not in (REWARD, COMPONENTS)}
            return cls(float(result[REWARD]), extra, result.get(COMPONENTS))
        raise TypeError(
            f"verify must return a reward, a Verdict or a mapping with a reward, found {type(result).__name__}"
        )

    def fields(self) -> JsonObject:
        """The verdict as fields of the row. Raises ValueError if a trainer could not use it."""
        if not math.isfinite(self.reward):
            raise ValueError(f"a reward must be a finite number, found {self.reward}")
        found = {**self.extra, REWARD: self.reward}
        if self.components is not None:
            total = math.fsum(self.components.values())
            if not math.isclose(total, self.reward, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                raise ValueError(f"the reward {self.reward} is not the sum of its components, {total}")
            found[COMPONENTS] = dict(self.components)
        return found


def verified(row: JsonMapping, names: list[str], verdict: Verdict) -> JsonObject:
    """Returns the judged row: the fields that `verify` takes, and the verdict."""
    kept = {name: row[name] for name in (PARAMS, "response", *names) if name in row}
    return kept | verdict.fields()


def unjudged(row: JsonMapping, error: JudgeError) -> JsonObject:
    failure = RowFailure.of(FailureClass.JUDGE_FAILED, str(error))
    return {**row, REWARD: 0.0, **failure.fields(), JUDGE_WORDS: str(error)}
