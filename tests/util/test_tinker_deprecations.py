"""What the SDK says of our own calls does not reach the user, what it says of the user's does."""

from __future__ import annotations

import warnings

import pytest

from palestra.util.tinker_deprecations import ignore_deprecations


@pytest.mark.parametrize(
    ("module", "count"), [("palestra.rollouts.tinker_sampler", 0), ("palestra.checkpoints.remote", 0), ("my_run", 1)]
)
def test_only_calls_of_others_warn(module, count):
    text = "DEPRECATED: SamplingClient.sample_async() is deprecated"
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        ignore_deprecations()
        warnings.warn_explicit(text, FutureWarning, "a.py", 1, module)
    assert [str(one.message) for one in shown if one.category is FutureWarning] == [text] * count
