"""Warm-up tasks, the level below those that ship: one short command of the shell each, made from templates by number.

A task is a function of its number alone; those held out are about files that no other task names. Tests look at what is
in the folder afterwards, so that any command that does what was asked is as good as the solution. A change of words
here changes tasks that have a number already.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_STEMS = """
apples bags balls baskets beads bells belts boats bolts books boots bottles bowls boxes bricks brooms brushes buckets
buttons candles caps cards chairs clocks coats coins combs cups desks dishes doors drums eggs envelopes files flags
forks frames gloves hammers hats hooks jars kettles keys kites knives ladders lamps lemons locks magnets maps marbles
masks mats mirrors mugs nails needles nets onions paddles pans pears pencils pens pillows pins pipes plates plugs pots
radios ribbons rings robes ropes rulers sacks saddles scarves screws shells shirts shoes shovels skates socks spades
sponges spoons stamps stones stools straps tables tents tickets tiles towels toys trays tubes umbrellas vases watches
wheels whistles wires office kitchen garden cellar attic garage library market harbour station school workshop bakery
museum theatre hall tower bridge farm hotel report message letter invoice plan photo draft poem recipe song story
summary review page
"""
_WORDS = """
red blue green yellow black white brown grey orange purple pink golden silver ada alan anna bruno carla chen clara
dana david elena emil farid felix gita grace hana hugo ines ivan jana jonas kira lina luca mara nadia nils nora omar
otto pablo paula rosa ruth sami sara sofia tara theo viktor yara yuki zoe
"""
STEMS, WORDS = _STEMS.split(), _WORDS.split()
"""Words that are single tokens of the bundled models. No word of the second list is part of another."""
ENDINGS = ("txt", "md", "log", "csv")
KEPT = "keep.txt"
"""A file beside, which every task leaves as it is."""


@dataclass(frozen=True, slots=True)
class WarmUpTask:
    """One task, before it is a folder."""

    kind: str
    instruction: str
    slots: tuple[str, ...]
    """The file that it is about, and the words that a command needs beside it."""
    files: Mapping[str, Sequence[str]]
    """Lines of each file in the folder."""
    solution: str
    cases: Sequence[tuple[str, Sequence[str]]]
    """Commands and the lines that each prints when the task is solved."""


@dataclass(frozen=True, slots=True)
class _Draw:
    """What a template draws from."""

    rng: random.Random
    held_out: bool
    names: list[str] = field(default_factory=list)

    def file(self, endings: Sequence[str] = ENDINGS) -> str:
        """A name that this task does not have yet, of those that are held out or of the others."""
        while True:
            number = self.rng.choice(["", "", "", *"123456789"])
            name = f"{self.rng.choice(STEMS)}{number}.{self.rng.choice(endings)}"
            if name not in self.names and is_held_out(name) == self.held_out:
                self.names.append(name)
                return name

    def words(self, count: int) -> list[str]:
        return self.rng.sample(WORDS, count)

    def lines(self) -> list[str]:
        """Three to six lines, all of them different."""
        return [f"{one} {self.rng.choice(WORDS)}" for one in self.words(self.rng.randint(3, 6))]

    def say(self, *ways: str) -> str:
        return self.rng.choice(ways)


def _shows(name: str, lines: Sequence[str]) -> tuple[str, Sequence[str]]:
    return f"cat {name}", lines


def _gone(name: str) -> tuple[str, Sequence[str]]:
    return f"test -e {name} || echo gone", ["gone"]


def delete(draw: _Draw) -> WarmUpTask:
    name = draw.file()
    prompt = draw.say(f"Delete {name}.", f"Delete the file {name}.", f"We do not need {name} any more: delete it.")
    return WarmUpTask("delete", prompt, (name,), {name: draw.lines()}, f"rm {name}", [_gone(name)])


def executable(draw: _Draw) -> WarmUpTask:
    name, (word,) = draw.file(["sh"]), draw.words(1)
    prompt = draw.say(f"Make {name} executable.", f"The script {name} should be executable.")
    lines = ["#!/bin/sh", f"echo {word} $1"]
    return WarmUpTask(
        "executable",
        prompt,
        (name,),
        {name: lines},
        f"chmod +x {name}",
        [(f"./{name} a", [f"{word} a"]), _shows(name, lines)],
    )


def sort(draw: _Draw) -> WarmUpTask:
    name, lines = draw.file(), draw.lines()
    while lines == sorted(lines):
        draw.rng.shuffle(lines)
    prompt = draw.say(f"Sort the lines of {name}.", f"Sort {name} in place.", f"The lines of {name} should be sorted.")
    return WarmUpTask("sort", prompt, (name,), {name: lines}, f"sort -o {name} {name}", [_shows(name, sorted(lines))])


def clear(draw: _Draw) -> WarmUpTask:
    name = draw.file()
    prompt = draw.say(f"Clear {name}, but keep the file.", f"Clear the file {name}: nothing should be left in it.")
    cases = [(f"test -f {name} && wc -c < {name}", ["0"])]
    return WarmUpTask("clear", prompt, (name,), {name: draw.lines()}, f"truncate -s 0 {name}", cases)


def rename(draw: _Draw) -> WarmUpTask:
    old, new, lines = draw.file(), draw.file(), draw.lines()
    prompt = draw.say(f"Rename {old} to {new}.", f"Rename the file {old}: it should be called {new}.")
    return WarmUpTask("rename", prompt, (old, new), {old: lines}, f"mv {old} {new}", [_shows(new, lines), _gone(old)])


def copy(draw: _Draw) -> WarmUpTask:
    old, new, lines = draw.file(), draw.file(), draw.lines()
    prompt = draw.say(f"Copy {old} to {new}.", f"Make a copy of {old} and call it {new}.")
    cases = [_shows(new, lines), _shows(old, lines), (f"test -L {new} || echo file", ["file"])]
    return WarmUpTask("copy", prompt, (old, new), {old: lines}, f"cp {old} {new}", cases)


def link(draw: _Draw) -> WarmUpTask:
    old, new, lines = draw.file(), draw.file(), draw.lines()
    prompt = draw.say(f"Link {old} to {new} by a symbolic link.", f"Make a symbolic link to {old}, called {new}.")
    cases = [(f"readlink {new}", [old]), _shows(old, lines)]
    return WarmUpTask("link", prompt, (old, new), {old: lines}, f"ln -s {old} {new}", cases)


def count(draw: _Draw) -> WarmUpTask:
    old, new, lines = draw.file(), draw.file(), draw.lines()
    prompt = draw.say(
        f"Count the lines of {old} and write the number to {new}.", f"Write the line count of {old} to {new}."
    )
    cases = [_shows(new, [str(len(lines))]), _shows(old, lines)]
    return WarmUpTask("count", prompt, (old, new), {old: lines}, f"wc -l < {old} > {new}", cases)


def create(draw: _Draw) -> WarmUpTask:
    name, (word,) = draw.file(), draw.words(1)
    prompt = draw.say(f"Create {name} with the line {word} in it.", f"Create a new file {name} that says {word}.")
    return WarmUpTask("create", prompt, (name, word), {}, f"echo {word} > {name}", [_shows(name, [word])])


def append(draw: _Draw) -> WarmUpTask:
    name, lines, (word,) = draw.file(), draw.lines(), draw.words(1)
    prompt = draw.say(f"Append the line {word} to {name}.", f"Append {word} to {name}, as its last line.")
    return WarmUpTask(
        "append", prompt, (name, word), {name: lines}, f"echo {word} >> {name}", [_shows(name, [*lines, word])]
    )


def remove(draw: _Draw) -> WarmUpTask:
    name, (word, *others) = draw.file(), draw.words(5)
    lines = [f"{one} {draw.rng.choice(others)}" for one in others] + [
        f"{word} {one}" for one in draw.rng.sample(others, 2)
    ]
    draw.rng.shuffle(lines)
    prompt = draw.say(
        f"Remove every line with {word} from {name}.", f"Remove the lines of {name} that have {word} in them."
    )
    kept = [line for line in lines if word not in line.split()]
    return WarmUpTask("remove", prompt, (name, word), {name: lines}, f"sed -i /{word}/d {name}", [_shows(name, kept)])


def replace(draw: _Draw) -> WarmUpTask:
    name, (old, new, *others) = draw.file(), draw.words(6)
    lines = [f"{one} {old}" for one in others[:2]] + [f"{old} {others[2]} {old}", f"{others[3]} {others[0]}"]
    draw.rng.shuffle(lines)
    prompt = draw.say(f"Replace {old} by {new} everywhere in {name}.", f"Replace each {old} in {name} by {new}.")
    changed = [" ".join(new if word == old else word for word in line.split()) for line in lines]
    return WarmUpTask(
        "replace", prompt, (name, old, new), {name: lines}, f"sed -i s/{old}/{new}/g {name}", [_shows(name, changed)]
    )


KINDS: Sequence[Callable[[_Draw], WarmUpTask]] = (
    delete, executable, sort, clear, rename, copy, link, count, create, append, remove, replace,
)  # fmt: skip


def is_held_out(name: str) -> bool:
    """Every fifth name of a file is in held-out tasks, and in no others."""
    return zlib.crc32(name.encode()) % 5 == 0


def warm_up_task(number: int, held_out: bool = False) -> WarmUpTask:
    """Returns the task of this number; twelve in a row are of twelve kinds."""
    rng = random.Random(f"warm-up {number}{' held out' if held_out else ''}")
    return KINDS[number % len(KINDS)](_Draw(rng, held_out))


def write_warm_up(folder: Path, count: int, first: int = 0, *, held_out: bool = False) -> list[Path]:
    """Writes the tasks of these numbers, as folders in Harbor's format, whose names have the same order. Returns the
    folders."""
    return [_write(folder, number, held_out) for number in range(first, first + count)]


def _write(folder: Path, number: int, held_out: bool) -> Path:
    task = warm_up_task(number, held_out)
    kept = [f"number {number}"]
    cases = [*task.cases, _shows(KEPT, kept)]
    texts = {
        "task.toml": [f'metadata = {{ level = 0, tags = ["shell", "{task.kind}"] }}'],
        "instruction.md": [task.instruction],
        "tests/cases.txt": [line for command, printed in cases for line in (f"$ {command}", *printed)],
        "solution/solve.sh": [task.solution],
        f"environment/{KEPT}": kept,
        **{f"environment/{name}": lines for name, lines in task.files.items()},
    }
    made = folder / f"0-{'held-out-' if held_out else ''}{number:05d}-{task.kind}"
    for name, lines in texts.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return made
