"""What the tests of training have."""

from tests.training.conftest import ephebe_url, run_training

__all__ = ["ephebe_url", "run_training"]
