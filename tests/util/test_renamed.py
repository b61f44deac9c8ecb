"""Public names that changed still work, and say what they are called now (`palestra.util.renamed`)."""

from __future__ import annotations

from importlib import import_module

import pytest

PLATFORM, FLEET = "palestra.environments.platform", "palestra.environments.fleet"
PROGRAMS, FORMATS = "palestra.gym.grading.programs", "palestra.chat.tool_formats"
OLD = [
    *((PLATFORM, old, PLATFORM, new) for old, new in {
        "Answer": "ExpectedAnswer", "App": "TaskApp", "Call": "SolutionCall", "Calls": "RequiredCalls",
        "Deleted": "DeletedRow", "Inserted": "InsertedRow", "Size": "SeedSize", "Text": "FreeText",
        "Tool": "PlatformTool", "Updated": "UpdatedRow", "Verdict": "TaskVerdict",
    }.items()),
    *((FLEET, old, FLEET, f"Fleet{old}") for old in ("Attempt", "Backend", "Grade")),
    (f"{PLATFORM}.pool", "Pool", f"{PLATFORM}.pool", "InstancePool"),
    (PROGRAMS, "Outcome", PROGRAMS, "ProgramOutcome"),
    (PROGRAMS, "Sandbox", PROGRAMS, "ProgramSandbox"),
    (PROGRAMS, "Jail", PROGRAMS, "JailSandbox"),
    (FORMATS, "ToolFormat", "palestra.chat.tool_parsers", "ToolParser"),
    (FORMATS, "register", "palestra.chat.tool_parsers", "register"),
    ("palestra.sandbox", "ModelDoor", "palestra.sandbox", "EndpointProxy"),
    ("palestra.gym.testing", "said", "palestra.gym.testing", "model_response"),
    ("palestra.gym.bridge", "GymBridge", "palestra.gym.nemo_rl", "NemoRlGym"),
    ("palestra.gym.grading.answers", "last_boxed", "palestra.environments.answer_text", "last_boxed"),
    ("palestra.gym.bridge_order", "in_order", "palestra.gym.nemo_rl.result_order", "in_order"),
]  # fmt: skip


@pytest.mark.parametrize(("module", "old", "home", "new"), OLD, ids=[f"{one[0]}.{one[1]}" for one in OLD])
def test_an_old_public_name_works_with_a_warning(module: str, old: str, home: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now {home}.{new}"):
        found = getattr(import_module(module), old)
    assert found is getattr(import_module(home), new)


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = import_module(PLATFORM).Nothing
