"""The policy behind a Tinker API: our server's, or any other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypedDict

import httpx
import msgspec
import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types

from palestra.config.api_key import api_key
from palestra.endpoints.aliases import RunAlias
from palestra.rollouts.continued_samples import ContinuedSamples
from palestra.rollouts.policy_sampler import PolicyError, PolicySampler
from palestra.rollouts.tinker_sampler import TinkerSampler, model_input, translated
from palestra.training.custom_functions import CustomLoss
from palestra.training.divergences import DivergenceLoss
from palestra.training.policy import PolicyStart, PolicyUpdate
from palestra.types import AdamParams, SamplingParams
from palestra.types.pictures import PromptPicture
from palestra.types.rollouts import SequenceSource, TrainSequence
from palestra.util.tinker_deprecations import ignore_deprecations

os.environ.setdefault("TINKER_TELEMETRY", "0")  # a run on one's own machine reports nothing
ignore_deprecations()

GOODBYE_S = 5.0
SETTLE_S = 60.0
ADDRESS, SAMPLER_WEIGHTS = "tinker://", "/sampler_weights/"
FINAL = "final"
"""Name of the weights that a run ends with, saved for sampling."""


class TinkerServer(TypedDict):
    """The arguments that every client of the SDK is opened with."""

    base_url: str | None
    api_key: str


class TinkerPolicy:
    """One LoRA model in training; `open` makes it."""

    def __init__(
        self,
        service: tinker.ServiceClient,
        model: tinker.TrainingClient,
        base_model: str,
        server: TinkerServer,
        alias: RunAlias | None,
        *,
        replay_routing: bool,
        continued: ContinuedSamples | None = None,
    ):
        self._service, self._model, self._base_model, self._server = service, model, base_model, server
        self._alias, self._replay_routing, self._continued = alias, replay_routing, continued
        self._selected: str | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: str | None,
        base_model: str,
        start: PolicyStart,
        alias: RunAlias | None = None,
        *,
        replay_routing: bool = False,
        continued: ContinuedSamples | None = None,
    ) -> AsyncIterator[TinkerPolicy]:
        """`url`: None means hosted Tinker, or the address in TINKER_BASE_URL. `alias` is moved to each published
        version. `replay_routing`: train with the experts that the server recorded while sampling. `continued`: samples
        may go on with weights that are published later."""
        server = TinkerServer(base_url=url, api_key=api_key())
        with translated(PolicyError, f"{base_model} cannot be trained at {url or 'Tinker'}"):
            service = tinker.ServiceClient(user_metadata={"client": "palestra"}, **server)
            model = await create_model(service, base_model, start)
        status = "errored"
        policy = cls(service, model, base_model, server, alias, replay_routing=replay_routing, continued=continued)
        try:
            try:
                if replay_routing:
                    await policy._try_replay()
                yield policy
                status = "success"
            finally:
                await policy._settle(SETTLE_S if status == "success" else GOODBYE_S)
        finally:
            with suppress(tinker.TinkerError, TimeoutError):  # a server that is gone needs no message
                async with asyncio.timeout(GOODBYE_S):
                    await service.close(status)

    async def update(
        self,
        batch: Sequence[TrainSequence],
        loss: str | CustomLoss | DivergenceLoss,
        loss_config: dict[str, float],
        adam: AdamParams | None,
    ) -> PolicyUpdate:
        if isinstance(loss, DivergenceLoss):
            return await self._diverge(batch, loss, adam)
        own_metrics: dict[str, float] = {}
        custom: dict[str, float] = {}
        if isinstance(loss, CustomLoss):
            # The engine's cross entropy is the sum of -weight * logprob: with the negative gradient as weights it has
            # the gradient of any loss. (The SDK's forward_backward_custom does the same, but after an error in the
            # function its client refuses every further call, and the last weights could not be saved.)
            scored = await self.forward(batch)
            found = await asyncio.to_thread(loss.differentiate, batch, scored.logprobs)
            batch = [weighted(one, gradient) for one, gradient in zip(batch, found.gradients, strict=True)]
            own_metrics, custom = {"loss:sum": found.loss}, found.metrics
            loss, loss_config = "cross_entropy", {}
        data = [self._datum(sequence, loss) for sequence in batch]
        output, metrics = await self._pass(data, loss, loss_config, adam, pictures_of(batch))
        logprobs, entropies = logprobs_of(output), entropies_of(output)
        return PolicyUpdate(metrics=metrics | own_metrics, logprobs=logprobs, entropies=entropies, custom=custom)

    async def _diverge(
        self, batch: Sequence[TrainSequence], loss: DivergenceLoss, adam: AdamParams | None
    ) -> PolicyUpdate:
        """Makes a step on a divergence. Cross entropy on the teacher's tokens, with its negative derivatives as
        weights, has its gradient."""
        with translated(PolicyError, "the forward pass failed", pictures_of(batch)):
            asked = [wide_datum(sequence) for sequence in batch]
            scored = await (await self._model.forward_async(asked, "cross_entropy")).result_async()
        rows = [one["logprobs"].to_numpy() for one in scored.loss_fn_outputs]
        students = [own[sampled_places(sequence)][:, 1:] for own, sequence in zip(rows, batch, strict=True)]
        found = await asyncio.to_thread(loss.differentiate, batch, [one.tolist() for one in students])
        data = [wide_datum(sequence, own) for sequence, own in zip(batch, found.gradients, strict=True)]
        _, metrics = await self._pass(data, "cross_entropy", {}, adam, pictures_of(batch))
        logprobs = [own[:, 0].tolist() for own in rows]
        return PolicyUpdate(metrics=metrics | {"loss:sum": found.loss, "divergence": found.mean}, logprobs=logprobs)

    async def _pass(
        self,
        data: list[types.Datum],
        loss: str,
        loss_config: dict[str, float],
        adam: AdamParams | None,
        pictures: Sequence[PromptPicture],
    ) -> tuple[types.ForwardBackwardOutput, dict[str, float]]:
        with translated(PolicyError, "the training step failed", pictures):
            # Both are sent before either is awaited: the engine continues with the second without waiting for us.
            passed = await self._model.forward_backward_async(data, loss, loss_config or None)  # pyright: ignore[reportArgumentType]
            stepped = None if adam is None else await self._model.optim_step_async(to_adam(adam))
            output = await passed.result_async()
            step = None if stepped is None else await stepped.result_async()
        return output, {**output.metrics, **((step and step.metrics) or {})}

    def _datum(self, sequence: TrainSequence, loss: str) -> types.Datum:
        datum = to_datum(sequence, loss)
        return with_provenance(datum, sequence) if self._replay_routing else datum

    async def _try_replay(self) -> None:
        """Trains nothing on one sampled token. Raises PolicyError unless its experts were replayed."""
        sampler = await self._sampler(0)
        (answer,) = await sampler.sample([0], SamplingParams(max_tokens=1))
        tokens, source = [0, *answer.tokens], SequenceSource(answer.sequence_id, 1, 2)
        sequence = TrainSequence(
            tokens=tokens, mask=[False, True], logprobs=[0.0, 0.0], advantages=[0.0, 0.0], sources=[source]
        )
        if not (await self.forward([sequence])).metrics.get("routing_replayed:sum"):
            raise PolicyError(
                f"algorithm.replay_routing: the server replays no routing for {self._base_model}; it needs a model "
                "with experts that Palestra itself samples"
            )

    async def forward(self, batch: Sequence[TrainSequence]) -> PolicyUpdate:
        data = [self._datum(sequence, "cross_entropy") for sequence in batch]
        with translated(PolicyError, "the forward pass failed", pictures_of(batch)):
            output = await (await self._model.forward_async(data, "cross_entropy")).result_async()
        return PolicyUpdate(metrics=dict(output.metrics), logprobs=logprobs_of(output))

    async def publish(self, version: int) -> TinkerSampler:
        with translated(PolicyError, "the new weights could not be published"):
            sampler = await self._sampler(version)
        if self._alias is not None:
            await self._alias.move(sampler.model)
        return sampler

    async def _sampler(self, version: int) -> TinkerSampler:
        save = self._model.save_weights_and_get_sampling_client_async
        return TinkerSampler(await save(record_stability_info=self._replay_routing), version, self._continued)

    async def go_on(self, sampler: PolicySampler) -> None:
        if self._continued is not None:
            await self._continued.go_on(sampler.model)

    def select(self, address: str | None) -> None:
        """Chooses the saved state that the run ends with; None: the weights as they are at the end."""
        self._selected = address

    async def _settle(self, patience_s: float) -> None:
        """Moves the alias to a checkpoint, which stays; sampling sessions end with the run."""
        if self._alias is None:
            return
        try:
            async with asyncio.timeout(patience_s):
                model = self._model
                if self._selected is not None:  # loaded into a model of its own, which is never trained
                    model = await self._service.create_training_client_from_state_async(self._selected)
                saved = await (await model.save_weights_for_sampler_async(FINAL)).result_async()
                await self._alias.settle(saved.path)
        except TimeoutError:
            self._alias.complain(
                f"the server is busy and did not save the final weights within {patience_s:g} s; "
                "checkpoints are kept, and a resumed run goes on from the newest"
            )
        except tinker.TinkerError as error:
            self._alias.complain(f"the final weights could not be saved: {str(error) or type(error).__name__}")

    async def base(self) -> TinkerSampler:
        return await self.sampler_of(self._base_model)

    async def sampler_of(self, model: str) -> TinkerSampler:
        return await create_sampler(self._service, model)

    async def save(self, name: str, *, ttl_s: int | None = None) -> str:
        with translated(PolicyError, f"the checkpoint {name} could not be written"):
            saved = await self._model.save_state_async(name, ttl_seconds=ttl_s, overwrite=ttl_s is not None)
            return (await saved.result_async()).path

    async def restore(self, address: str) -> None:
        with translated(PolicyError, f"the weights could not be returned to {address}"):
            old = self._model.model_id
            self._model = await self._service.create_training_client_from_state_with_optimizer_async(address)
        await self._unload(old)

    async def _unload(self, model_id: str) -> None:
        """Frees a model that is not used any more; its samplers stay. The SDK has no call for it: at hosted Tinker the
        model stays until the session ends."""
        if (url := self._server["base_url"]) is None:
            return
        with suppress(httpx.HTTPError):
            async with httpx.AsyncClient(base_url=url, headers={"x-api-key": self._server["api_key"]}) as http:
                await http.post("/api/v1/unload_model", json={"model_id": model_id})

    async def delete(self, address: str) -> None:
        with translated(PolicyError, f"{address} could not be deleted"):
            await tinker.RestClient(**self._server).delete_checkpoint_from_tinker_path_async(address)


async def create_model(service: tinker.ServiceClient, base_model: str, start: PolicyStart) -> tinker.TrainingClient:
    if start.address is None:
        return await service.create_lora_training_client_async(
            base_model=base_model, rank=start.rank, seed=start.seed, train_unembed=start.train_unembed
        )
    if start.with_optimizer:
        return await service.create_training_client_from_state_with_optimizer_async(start.address)
    return await service.create_training_client_from_state_async(start.address)


async def create_sampler(service: tinker.ServiceClient, model: str) -> TinkerSampler:
    """Opens saved weights, or a base model by its name. Raises PolicyError."""
    with translated(PolicyError, f"{model} cannot be sampled"):
        if not model.startswith(ADDRESS):
            return TinkerSampler(await service.create_sampling_client_async(base_model=model), 0)
        if SAMPLER_WEIGHTS in model:
            return TinkerSampler(await service.create_sampling_client_async(model_path=model), 0)
        # Saved states can be trained but not sampled: load one into a model that is never trained, and publish that.
        trained = await service.create_training_client_from_state_async(model)
        return TinkerSampler(await trained.save_weights_and_get_sampling_client_async(), 0)


@asynccontextmanager
async def sampler_at(url: str, model: str) -> AsyncIterator[TinkerSampler]:
    """Opens weights at a server, beside those of a run. Raises PolicyError."""
    with translated(PolicyError, f"{model} cannot be sampled at {url}"):
        service = tinker.ServiceClient(user_metadata={"client": "palestra"}, base_url=url, api_key=api_key())
    try:
        yield await create_sampler(service, model)
    finally:
        with suppress(tinker.TinkerError, TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await service.close("success")


def to_datum(sequence: TrainSequence, loss: str) -> types.Datum:
    """Converts a sequence. Position i of a datum is about predicting token i + 1."""
    inputs: dict[str, list[int] | list[float]] = {"target_tokens": sequence.tokens[1:]}
    if loss == "cross_entropy":
        inputs["weights"] = sequence.advantages[1:]
    else:
        inputs |= {"logprobs": sequence.logprobs[1:], "advantages": sequence.advantages[1:]}
    return types.Datum(model_input=model_input(sequence.tokens[:-1], sequence.pictures), loss_fn_inputs=inputs)  # pyright: ignore[reportArgumentType]


def pictures_of(batch: Sequence[TrainSequence]) -> list[PromptPicture]:
    return [picture for sequence in batch for picture in sequence.pictures]


def sampled_places(sequence: TrainSequence) -> list[int]:
    """The positions of a datum that are about a sampled token."""
    return [place for place, sampled in enumerate(sequence.mask[1:]) if sampled]


def wide_datum(sequence: TrainSequence, gradient: Sequence[Sequence[float]] | None = None) -> types.Datum:
    """Returns a datum with several targets at each position, [positions, 1 + k]: the token that follows, and at sampled
    ones the teacher's likeliest tokens. `gradient`: the derivatives by their logprobs; otherwise nothing is learned."""
    width = 1 + len(sequence.teacher_top[0].token_ids) if sequence.teacher_top else 1
    targets = np.zeros((len(sequence.tokens) - 1, width), np.int64)
    targets[:, 0] = sequence.tokens[1:]
    places = sampled_places(sequence)
    if places:
        targets[places, 1:] = [top.token_ids for top in sequence.teacher_top]
    inputs = {"target_tokens": tensor_of(targets)}
    if gradient is not None:
        weights = np.zeros(targets.shape, np.float32)
        if places:
            weights[places, 1:] = -np.asarray(gradient, np.float32)
        inputs["weights"] = tensor_of(weights)
    return types.Datum(model_input=model_input(sequence.tokens[:-1], sequence.pictures), loss_fn_inputs=inputs)


def tensor_of(array: NDArray[Any]) -> types.TensorData:
    """Returns a matrix on the wire, row by row without its zeros: most positions have one target."""
    rows, columns = array.nonzero()
    kind = "int64" if array.dtype == np.int64 else "float32"
    starts = np.concatenate([[0], np.bincount(rows, minlength=len(array)).cumsum()])
    return types.TensorData(
        data=array[rows, columns],
        dtype=kind,
        shape=list(array.shape),
        sparse_crow_indices=starts.tolist(),
        sparse_col_indices=columns.tolist(),
    )


def weighted(sequence: TrainSequence, gradient: Sequence[float]) -> TrainSequence:
    """Returns a sequence by which cross entropy has this gradient by the logprobs of `tokens[1:]`."""
    return msgspec.structs.replace(sequence, advantages=[0.0, *(-one for one in gradient)])


def with_provenance(datum: types.Datum, sequence: TrainSequence) -> types.Datum:
    """Says which sampled sequences its tokens come from, if all are known. Experts are not recorded for prompts with
    pictures."""
    if not sequence.sources or sequence.pictures:
        return datum
    last = len(sequence.tokens) - 1
    return datum.with_provenance(
        # The last token of a turn became an input only when the next turn was sampled, as part of its prompt.
        provenance([SequenceSource(s.sequence_id, s.start, s.end - 1) for s in sequence.sources], 0, last),
        provenance(sequence.sources, 1, last + 1),
    )


def provenance(sources: Sequence[SequenceSource], first: int, end: int) -> types.ProvenanceSpans:
    """Returns where tokens `first` to `end` (exclusive) of a row come from."""
    spans: types.ProvenanceSpans = []
    for source in sources:
        start, stop = min(source.start, end), min(source.end, end)
        if start > first:
            spans.append(types.PromptProvenanceSpan(sequence_id=source.sequence_id, offset=first, length=start - first))
        if stop > max(start, first):
            offset = max(start, first) - source.start
            length = stop - max(start, first)
            spans.append(types.SampledProvenanceSpan(sequence_id=source.sequence_id, offset=offset, length=length))
        first = max(first, start, stop)
    return spans


def logprobs_of(output: types.ForwardBackwardOutput) -> list[list[float]]:
    return [one["logprobs"].tolist() for one in output.loss_fn_outputs]


def entropies_of(output: types.ForwardBackwardOutput) -> list[list[float]]:
    """A field of our own server's."""
    found = [one.get("entropies") for one in output.loss_fn_outputs]
    return [one.tolist() for one in found if one is not None]


def to_adam(adam: AdamParams) -> types.AdamParams:
    return types.AdamParams(
        learning_rate=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        grad_clip_norm=adam.grad_clip_norm,
    )
