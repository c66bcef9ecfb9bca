"""Four tasks of reasoning-gym with their verifiers, in a short notation that a tiny model can read.

| source | prompt | a good response |
|---|---|---|
| spell | ``rev loop=`` | ``pool`` |
| sort | ``asc 5207=`` | ``0257`` |
| gcd | ``gcd 18 24=`` | ``6`` |
| count | ``cnt o loop=`` | ``l0o1o2p2:2`` (a running tally, then the answer: the long, slow source) |

The reward is exact: 1 when reasoning-gym's own verifier gives full marks, the answer is the very one, and the
policy ended the response itself; else 0. (The verifiers give partial credit, and that of number_sorting takes
sorted numbers that are off by one.) ``split: heldout`` and ``split: train`` share no prompt; both are the same
for every seed of a run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from knit.config.schema import SourceConf
from knit.errors import ConfigError
from knit.recipes.quickstart.tokenizer import encodable
from knit.rollout.prompts import EpochOrder
from knit.rollout.rewards import RewardSample
from knit.rollout.tokenizer import Tokenizer
from knit.types import Prompt

Entry = dict[str, Any]

TRAIN_SEED, TRAIN_ENTRIES = 1, 4000
HELDOUT_SEED, HELDOUT_ENTRIES, HELDOUT_PROMPTS = 20_000_001, 1000, 200
MAX_DEMO_CHARACTERS = 29  # with the end token within the quickstart's 32 response tokens
FULL_MARKS = 0.999


@dataclass(frozen=True)
class Task:
    """How entries of a reasoning-gym data set are written down, demonstrated and read back."""

    name: str
    dataset: str
    options: dict[str, Any]
    prompt: Callable[[Entry], str]
    demo: Callable[[Entry], str]
    answer: Callable[[str], str]
    """The answer in a response, as reasoning-gym's verifier expects it."""


def _digits(numbers: list[str]) -> str:
    return "".join(numbers).replace(".0", "")  # number_sorting prints integers as "5.0"


def _tally(entry: Entry) -> str:
    word, letter = _word(entry), entry["metadata"]["target_letter"]
    count, steps = 0, []
    for character in word:
        count += character == letter
        steps.append(f"{character}{count}")
    return f"{''.join(steps)}:{count}"


def _word(entry: Entry) -> str:
    return str(entry["metadata"]["span"][0]).lower()


TASKS = {
    task.name: task
    for task in (
        Task(
            "spell",
            "spell_backward",
            {"min_word_len": 3, "max_word_len": 4},
            prompt=lambda e: f"rev {e['metadata']['word'].lower()}=",
            demo=lambda e: str(e["answer"]).lower(),
            answer=lambda text: text,
        ),
        Task(
            "sort",
            "number_sorting",
            {"min_numbers": 3, "max_numbers": 4, "min_decimals": 0, "max_decimals": 0, "min_value": 0, "max_value": 9},
            prompt=lambda e: f"{e['metadata']['direction'][:3]} {_digits(e['metadata']['original_numbers'])}=",
            demo=lambda e: _digits(e["metadata"]["sorted_numbers"]),
            answer=lambda text: str(list(text)),
        ),
        Task(
            "gcd",
            "gcd",
            {"max_value": 24},
            prompt=lambda e: "gcd {} {}=".format(*e["metadata"]["numbers"]),
            demo=lambda e: str(e["answer"]),
            answer=lambda text: text,
        ),
        Task(
            "count",
            "letter_counting",
            {"min_words": 1, "max_words": 1},
            prompt=lambda e: f"cnt {e['metadata']['target_letter']} {_word(e)}=",
            demo=_tally,
            answer=lambda text: text.rpartition(":")[2],
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Item:
    task: str
    text: str
    demo: str
    entry: Entry


@cache
def items(task: str, split: str) -> tuple[Item, ...]:
    """The distinct prompts of one split, in a fixed order."""
    heldout = _distinct(TASKS[task], HELDOUT_SEED, HELDOUT_ENTRIES, frozenset())[:HELDOUT_PROMPTS]
    if split == "heldout":
        return heldout
    return _distinct(TASKS[task], TRAIN_SEED, TRAIN_ENTRIES, frozenset(item.text for item in heldout))


def _distinct(task: Task, seed: int, entries: int, excluded: frozenset[str]) -> tuple[Item, ...]:
    found: dict[str, Item] = {}
    for entry in _create(task, seed, entries):
        item = Item(task.name, task.prompt(entry), task.demo(entry), entry)
        usable = encodable(item.text + item.demo) and len(item.demo) <= MAX_DEMO_CHARACTERS
        if usable and item.text not in excluded:
            found.setdefault(item.text, item)
    return tuple(found.values())


def _create(task: Task, seed: int, size: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(task.dataset, seed=seed, size=size, **task.options)


@cache
def _verifier(task: str) -> Any:
    return _create(TASKS[task], 0, 1)


class GymSource:
    """Prompt source over one task. Options: ``task`` (spell | sort | gcd | count), ``split`` (train | heldout)."""

    def __init__(self, conf: SourceConf, tokenizer: Tokenizer, seed: int) -> None:
        self.validate(conf)
        self.conf, self.tokenizer = conf, tokenizer
        self.items = items(conf.options["task"], conf.options.get("split", "train"))
        self.order = EpochOrder(len(self.items), seed, conf.name, conf.shuffle)

    @staticmethod
    def validate(conf: SourceConf) -> None:
        where = f"sources.{conf.name}.options"
        unknown = set(conf.options) - {"task", "split"}
        if unknown:
            raise ConfigError(f"{where} has the unknown key {sorted(unknown)[0]!r}; it may hold task and split")
        task, split = conf.options.get("task"), conf.options.get("split", "train")
        if task not in TASKS:
            raise ConfigError(f"{where}.task={task} is not known; choose one of {', '.join(TASKS)}")
        if split not in ("train", "heldout"):
            raise ConfigError(f"{where}.split={split} is not known; choose train or heldout")

    def __len__(self) -> int:
        return len(self.items)

    def prompt(self, index: int) -> Prompt:
        item = self.items[self.order[index]]
        return Prompt(
            source=self.conf.name,
            index=index,
            input_ids=tuple(self.tokenizer.encode(item.text)),
            text=item.text,
            label=TASKS[item.task].answer(item.demo),
            metadata={"task": item.task, "entry": item.entry},
        )


def verify(sample: RewardSample) -> float:
    """1 for the exact answer and a proper end, else 0."""
    task, entry = sample.prompt.metadata["task"], sample.prompt.metadata["entry"]
    answer = TASKS[task].answer(sample.response)
    if not sample.finished or answer != sample.prompt.label:
        return 0.0
    return float(_verifier(task).score_answer(answer, entry) >= FULL_MARKS)


def sample_items(rng: random.Random, count: int) -> list[Item]:
    """``count`` training items, the tasks in turn."""
    names = list(TASKS)
    return [rng.choice(items(names[i % len(names)], "train")) for i in range(count)]
