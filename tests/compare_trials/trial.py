"""A trial: a trainer, a step, and the verdict that `isograd compare` should give."""
import dataclasses
from typing import Callable

from problem import Problem


@dataclasses.dataclass(frozen=True)
class Trial:
    trainer: type
    problem: Problem
    about: str  # what the trainer does, in words
    names: tuple = ()  # diagnoses of docs/museum.md that are true of a mistake; empty for a right variant
    alone: bool = False  # whether compare is also given one process in the trainer's precision
    reference_assignment: Callable | None = None  # problem -> [rank][micro-batch] -> samples, where shares are cut otherwise
    title: str = ""

    @property
    def name(self):
        return self.title or self.trainer.__name__

    @property
    def mistaken(self):
        return bool(self.names)


def planted(name, base, problem, about, names=(), alone=False, reference_assignment=None, **changes):
    """A trial of `base` with some of its methods and attributes replaced."""
    return Trial(type(name, (base,), changes), problem, about, names, alone, reference_assignment)


def one_by_one(problem):
    """Each sample a micro-batch of one rank."""
    return [[[sample] for sample in problem.samples()]]


def all_at_once(problem):
    """Each rank's samples as one micro-batch."""
    return [[[sample for micro in micros for sample in micro]] for micros in problem.assigned()]
