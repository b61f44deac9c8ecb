"""The old name of `palestra.environments.answer_text`, for one version."""

from __future__ import annotations

from palestra.util.renamed import renamed

__getattr__ = renamed(
    __name__,
    after_label="palestra.environments.answer_text:after_label",
    last_boxed="palestra.environments.answer_text:last_boxed",
    last_number="palestra.environments.answer_text:last_number",
    unwrapped="palestra.environments.answer_text:unwrapped",
)
