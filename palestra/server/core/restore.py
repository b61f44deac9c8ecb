"""Restores a server after a restart: first the database's sessions, models and samplers, then the journal's requests.

Owns: that order. Never touches: the journal's records (`journal_replay`).
"""

from __future__ import annotations

import structlog

from palestra.server.core.core import Core
from palestra.server.core.samples.numbers import stored_blocks
from palestra.server.core.samples.requests import SamplingSession, weights_of
from palestra.server.core.sessions import TinkerSession
from palestra.server.core.training.journal_replay import Recovery
from palestra.server.core.training.models import TrackedModel
from palestra.store.queries import models as model_rows
from palestra.store.queries import samplers as sampler_rows
from palestra.store.queries import sessions as session_rows
from palestra.store.records import LOADED
from palestra.types.engine import SavedAdapter

log = structlog.get_logger()


async def restore(core: Core) -> None:
    await core.quotas.read()
    await core.keys.read()
    rows = await core.store.read(lambda c: model_rows.models_in(c, LOADED))
    await core.usage.restore({row.model_id: row.usage_seq for row in rows})
    core.training.lost.restore(await core.store.read(model_rows.corrupted_models))
    for row in await core.store.read(session_rows.active_sessions):
        core.sessions.active[row.session_id] = TinkerSession(row.session_id, row.owner)
    await _restore_models(core)
    await _restore_samplers(core)
    Recovery(core.training).run()
    opened = {s.weights.folder for s in core.sampling.samplers.values() if isinstance(s.weights, SavedAdapter)}
    await core.checkpoints.fetch_for_replay(opened | core.training.folders_to_load())
    live = {f.request_id for m in core.training.models.values() for f in m.futures.values()}
    await core.checkpoints.settle_after_restart(live, core.training.absent)


async def _restore_models(core: Core) -> None:
    for row in await core.store.read(lambda c: model_rows.models_in(c, LOADED)):
        worker = core.base(row.base_model)
        if worker is None:
            log.warning(
                "the base model of a stored model is not served now", model=row.model_id, base_model=row.base_model
            )
            core.training.absent.add(row.model_id)
            continue
        core.training.models[row.model_id] = TrackedModel(
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


async def _restore_samplers(core: Core) -> None:
    blocks = await stored_blocks(core.store)
    for row in await core.store.read(sampler_rows.live_samplers):
        worker = core.base(row.base_model)
        if worker is not None:
            core.sampling.samplers[row.sampler_id] = SamplingSession(
                row.sampler_id,
                row.session_id,
                row.owner,
                row.base_model,
                weights_of(
                    row.sampler_id, row.model_id, row.seq_id, row.folder and core.checkpoints.locate(row.folder)
                ),
                worker,
                row.model_path,
                blocks=blocks.get(row.sampler_id, {}),
                is_restored=True,
            )
