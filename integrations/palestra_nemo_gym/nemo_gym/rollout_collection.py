"""Fields of an agent's result that say where the row goes. Collecting itself is `palestra gym collect`."""

import os

NG_FAILURE_CLASS_KEY = "_ng_failure_class"
NG_TERMINAL_KEY = "_ng_failure_terminal"
NG_NO_PERSIST_KEY = "_ng_no_persist"
DEFAULT_ATTEMPTS = 3


def _get_max_rollout_attempts() -> int:
    return int(os.environ.get("NEMO_GYM_MAX_ROLLOUT_ATTEMPTS", DEFAULT_ATTEMPTS))
