"""The gym's `token_id_capture`, for a model server that cannot do it."""

from typing import Any

from nemo_gym.global_config import TOKEN_ID_CAPTURE_BLOCK


def token_id_capture_config(global_config: Any) -> None:
    """Raises ValueError where the gym is to record tokens."""
    if (global_config.get(TOKEN_ID_CAPTURE_BLOCK) or {}).get("enabled"):
        raise ValueError(
            f"{TOKEN_ID_CAPTURE_BLOCK}: a model server of NeMo Gym cannot record tokens in a Palestra gym; "
            "use Palestra's: remove its name from gym.use_stock"
        )
