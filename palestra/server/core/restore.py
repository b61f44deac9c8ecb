"""Restores a server after a restart: first the database's sessions, models and samplers, then the journal's requests.

Owns: that order. Never touches: the journal's records (`journal_replay`).
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from palestra.server.core.checkpoints.files import CheckpointFiles
from palestra.server.core.owners.usage import UsageAccount
from palestra.server.core.samples.polling import stored_blocks
from palestra.server.core.samples.requests import SamplingRequests, SamplingSession, weights_of
from palestra.server.core.sessions import TinkerSession, TinkerSessions
from palestra.server.core.training.journal_replay import Recovery
from palestra.server.core.training.models import TrackedModel
from palestra.server.core.training.requests import TrainingRequests
from palestra.server.core.workers.served_models import ServedModels
from palestra.store import Store
from palestra.store.queries import models as model_rows
from palestra.store.queries import samplers as sampler_rows
from palestra.store.queries import sessions as session_rows
from palestra.store.records import LOADED, ModelRow
from palestra.types.engine import SavedAdapter

log = structlog.get_logger()


async def restore(
    store: Store,
    served: ServedModels,
    sessions: TinkerSessions,
    training: TrainingRequests,
    sampling: SamplingRequests,
    checkpoints: CheckpointFiles,
    usage: UsageAccount,
) -> None:
    rows = await store.read(lambda c: model_rows.models_in(c, LOADED))
    await usage.restore({row.model_id: row.usage_seq for row in rows})
    training.lost.restore(await store.read(model_rows.corrupted_models))
    for row in await store.read(session_rows.active_sessions):
        sessions.active[row.session_id] = TinkerSession(row.session_id, row.owner)
    _restore_models(rows, served, training)
    await _restore_samplers(store, served, sampling, checkpoints)
    Recovery(training).run()
    opened = {s.weights.folder for s in sampling.samplers.values() if isinstance(s.weights, SavedAdapter)}
    await checkpoints.fetch_for_replay(opened | training.folders_to_load())
    live = {f.request_id for m in training.models.values() for f in m.futures.values()}
    await checkpoints.settle_after_restart(live, training.absent)


def _restore_models(rows: Iterable[ModelRow], served: ServedModels, training: TrainingRequests) -> None:
    for row in rows:
        worker = served.find(row.base_model)
        if worker is None:
            log.warning(
                "the base model of a stored model is not served now", model=row.model_id, base_model=row.base_model
            )
            training.absent.add(row.model_id)
            continue
        training.models[row.model_id] = TrackedModel(
            row.model_id,
            row.session_id,
            row.owner,
            row.base_model,
            row.lora,
            worker,
            snapshot_seq=row.snapshot_seq,
            next_seq=row.snapshot_seq + 1,
            last_request_at=row.last_request_at,
        )


async def _restore_samplers(
    store: Store, served: ServedModels, sampling: SamplingRequests, checkpoints: CheckpointFiles
) -> None:
    blocks = await stored_blocks(store)
    for row in await store.read(sampler_rows.live_samplers):
        worker = served.find(row.base_model)
        if worker is not None:
            sampling.samplers[row.sampler_id] = SamplingSession(
                row.sampler_id,
                row.session_id,
                row.owner,
                row.base_model,
                weights_of(row.sampler_id, row.model_id, row.seq_id, row.folder and checkpoints.locate(row.folder)),
                worker,
                row.model_path,
                blocks=blocks.get(row.sampler_id, {}),
                is_restored=True,
            )
