"""Opens the teachers that a config names, and refuses those that cannot teach before the first step."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from palestra.chat import ChatTokenizer
from palestra.config.distillation import SELF, TeacherConfig, teacher_by_environment
from palestra.config.train import DistillConfig, TrainModel
from palestra.endpoints.model_folders import SetupError, check_model, model_folder, tokenizer_of
from palestra.endpoints.own_server import own_server
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.runs.reader import RunReader, RunStatus
from palestra.runs.saved_checkpoints import ADDRESS, SavedCheckpoint, find_checkpoint, split_name
from palestra.training.row_scores import Teachers, TeacherView, TokenScorer
from palestra.training.session import TrainingSession
from palestra.training.teacher_endpoint import EndpointTeacher
from palestra.training.teacher_views import OtherTokenizerTeacher, PlainTeacher, PrivilegedTeacher
from palestra.training.teacher_vocabulary import check_by_scores, check_vocabulary
from palestra.training.tinker_policy import sampler_at


def check_teachers(config: DistillConfig, student: ChatTokenizer) -> None:
    """Checks what needs no server: that there are such runs and models, and that their tokenizers are the student's.
    Raises ValueError or CheckpointError."""
    for index, teacher in enumerate(config.teachers):
        if teacher.endpoint is not None or teacher.model.startswith(ADDRESS):
            continue
        if teacher.model == SELF:
            continue
        saved = find_saved(config, teacher.model)
        if saved is None and not is_served(config, teacher):
            check_model(model_folder(TrainModel(name=teacher.model)))
        base = base_of(saved) if saved is not None else TrainModel(name=teacher.model)
        check_tokenizer(f"teachers[{index}]", teacher, base, config, student)


@asynccontextmanager
async def open_teachers(config: DistillConfig, session: TrainingSession) -> AsyncIterator[Teachers]:
    """Opens all of them. Raises SetupError, PolicyError or CheckpointError if one cannot teach."""
    async with AsyncExitStack() as stack:
        opening = TeacherOpening(config, session, stack)
        views = [await opening.view(index, teacher) for index, teacher in enumerate(config.teachers)]
        chosen = teacher_by_environment(config.teachers, config.environments)
        yield Teachers({name: views[index] for name, index in chosen.items()})


class TeacherOpening:
    """Opens one teacher after the other; teachers with the same files share a server."""

    def __init__(self, config: DistillConfig, session: TrainingSession, stack: AsyncExitStack) -> None:
        self._config, self._session, self._stack = config, session, stack
        self._servers: dict[Path, str] = {}
        """Addresses of servers that were started, by their folder of state."""
        self._folders: dict[int, Path] = {}
        """Folders with the tokenizers of teachers that have their own, by the teacher's index."""

    async def view(self, index: int, teacher: TeacherConfig) -> TeacherView:
        """Opens a teacher, and says how it reads what the student has said."""
        student = self._session.tokenizer
        if teacher.model == SELF and teacher.endpoint is None:
            plain = PlainTeacher(None, self._top_k)
        else:
            scorer = await self._open(index, teacher)
            if teacher.own_tokenizer:
                return OtherTokenizerTeacher(scorer, ChatTokenizer.load(self._folders[index]), student)
            plain = PlainTeacher(scorer, self._top_k)
        return plain if teacher.context is None else PrivilegedTeacher(plain, student, teacher.context)

    @property
    def _top_k(self) -> int:
        settings = self._config.distillation
        if settings.is_sampled:
            return 0
        return len(self._session.tokenizer.vocabulary) if settings.top_k == "all" else settings.top_k

    async def _open(self, index: int, teacher: TeacherConfig) -> TokenScorer:
        where, student = f"teachers[{index}]", self._session.tokenizer
        if teacher.endpoint is not None:
            scorer = await self._stack.enter_async_context(EndpointTeacher.open(teacher, self._config.distillation))
            if teacher.own_tokenizer:
                self._folders[index] = teacher.tokenizer or Path()
                await check_by_scores(where, scorer, ChatTokenizer.load(self._folders[index]))
            else:
                await check_by_scores(where, scorer, student)
            return scorer
        if teacher.model.startswith(ADDRESS) or is_served(self._config, teacher):
            sampler = await self._session.policy.sampler_of(teacher.model)
            base = TrainModel(name=await sampler.base_model())
        else:
            base, sampler = await self._elsewhere(teacher)
        check_tokenizer(where, teacher, base, self._config, student)
        self._folders[index] = teacher.tokenizer or tokenizer_of(base)
        return sampler

    async def _elsewhere(self, teacher: TeacherConfig) -> tuple[TrainModel, PolicySampler]:
        """Opens a model that the student's server does not have: at the server of its run, or at one that is started
        for it."""
        saved = find_saved(self._config, self._session.state.teachers.get(teacher.model, teacher.model))
        if saved is None:
            base = TrainModel(name=teacher.model)
            state = self._session.run.path / "teachers" / f"{len(self._servers)}"
            return base, await self._sampler(await self._server(base, state), teacher.model)
        # A run that is resumed must learn from the same weights, even if its teacher has become better meanwhile.
        self._session.state.teachers[teacher.model] = f"{saved.run}@{saved.step}"
        if not teacher.model.endswith(f"@{saved.step}"):
            self._session.listener.note(f"the teacher {teacher.model} is {saved.name}")
        base, reader = base_of(saved), RunReader(saved.run)
        if saved.server is None and reader.status() is RunStatus.RUNNING:
            raise SetupError(f"{reader.name} is still going, and its server is its own; wait for its end, or export it")
        url = saved.server or await self._server(base, saved.run / "engine")
        return base, await self._sampler(url, saved.address)

    async def _server(self, base: TrainModel, state: Path) -> str:
        if state not in self._servers:
            log = self._session.run.path / "logs" / f"teacher-{len(self._servers)}.log"
            server = own_server(
                *(str(model_folder(base)), base.name, state, log, self._session.listener.note),
                device=self._config.model.device,
                weights=base.weights,
            )
            self._servers[state] = await self._stack.enter_async_context(server)
        return self._servers[state]

    async def _sampler(self, url: str, model: str) -> PolicySampler:
        return await self._stack.enter_async_context(sampler_at(url, model))


def is_served(config: DistillConfig, teacher: TeacherConfig) -> bool:
    """Whether it is a base model of the student's server: a server that the run starts has the student's only."""
    if teacher.model == config.model.name:
        return True
    return config.server is not None and find_saved(config, teacher.model) is None


def find_saved(config: DistillConfig, name: str) -> SavedCheckpoint | None:
    """The checkpoint that a teacher's name means; None if it names no run. Raises CheckpointError."""
    run, which = split_name(name)
    for path in (config.runs / run, Path(run)):
        if (path / "config.json").is_file() and (path / "checkpoints").is_dir():
            return find_checkpoint(RunReader(path.absolute()), which)
    return None


def base_of(saved: SavedCheckpoint) -> TrainModel:
    return TrainModel.model_validate(RunReader(saved.run).read_about()["config"]["model"])


def check_tokenizer(
    where: str, teacher: TeacherConfig, base: TrainModel, config: DistillConfig, student: ChatTokenizer
) -> None:
    """Raises SetupError unless the teacher has the student's tokenizer, or one of its own."""
    if teacher.own_tokenizer or (teacher.tokenizer is None and base.name == config.model.name):
        return
    try:
        folder = teacher.tokenizer or tokenizer_of(base)
    except SetupError as error:
        raise SetupError(f"{where}: {str(error).replace('model.tokenizer', f'{where}.tokenizer')}") from None
    if not (folder / "tokenizer.json").is_file():
        raise SetupError(f"{where}: no tokenizer.json in {folder}; name its folder: {where}.tokenizer=DIR")
    check_vocabulary(f"{where} ({teacher.model})", folder, student)
