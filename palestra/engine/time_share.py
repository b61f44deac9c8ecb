"""Decides whose turn it is: sampling and training share the time while both have work.

Owns: the account of the two. Never touches: the work itself.
"""

from __future__ import annotations

from enum import StrEnum

MIN_SHARE = 0.02  # neither side is ever shut out


class Work(StrEnum):
    TRAIN = "train"
    SAMPLE = "sample"


class TimeShare:
    def __init__(self, sample_share: float):
        share = min(max(sample_share, MIN_SHARE), 1 - MIN_SHARE)
        self._shares = {Work.TRAIN: 1 - share, Work.SAMPLE: share}
        self._spent = dict.fromkeys(Work, 0.0)

    def next(self, *, train: bool, sample: bool) -> Work | None:
        """Sampling goes first while neither side is owed time: clients wait for it."""
        if train and sample:
            due = {w: self._spent[w] / self._shares[w] for w in Work}
            return Work.TRAIN if due[Work.TRAIN] < due[Work.SAMPLE] else Work.SAMPLE
        self._spent = dict.fromkeys(Work, 0.0)  # idle time is no credit
        return Work.TRAIN if train else Work.SAMPLE if sample else None

    def charge(self, work: Work, seconds: float) -> None:
        self._spent[work] += seconds
