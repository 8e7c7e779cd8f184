"""What the comparison says of a step, on every rank."""
from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
from typing import Any

import _isograd_command

SECONDS = 600


@dataclasses.dataclass
class Verdict:
    """passed: the gradient is that of one device, and nothing recorded beside it is wrong.

    text:     what the command `isograd compare` prints.
    json:     the same for programs (docs/verify.md).
    findings: names of the diagnoses, as docs/museum.md has them: "mean_of_rank_means".
    notes:    what was not compared, or seen beside it.
    folder:   the dumps, where they were to be kept.
    update:   what is proven of the optimizer's update, in a sentence.
    bounded:  the step of one process in the run's precision was a bound, or was not asked to be one.
    """

    passed: bool
    text: str
    json: dict[str, Any]
    notes: list[str] = dataclasses.field(default_factory=list)
    folder: str | None = None
    bounded: bool = True
    update: str = "not looked at"

    @property
    def findings(self) -> list[str]:
        return list(dict.fromkeys(finding["id"] for finding in self.json.get("findings", [])))

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return self.text.rstrip("\n") + f"\nupdate: {self.update}" + "".join(f"\nnote: {note}" for note in self.notes)


def compare(folder: pathlib.Path, alone: bool, report: str | None, threads: int = 1) -> Verdict:
    """The dumps `run`, `one_process` and perhaps `alone` of that folder, by the program. RuntimeError: it refuses them."""
    program, environment = _isograd_command.command()
    words = ["compare", "run", "one_process", "--json", "verdict.json", *(["--alone", "alone"] if alone else []),
             *(["--report", str(pathlib.Path(report).resolve())] if report else [])]
    # Beside ranks that compute, threads that spin while they wait for one another take twenty times as long.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **environment, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([*program, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode == 2 and alone:  # rounding of one process that the command cannot use: the wider bound holds
        verdict = compare(folder, False, report, threads)
        verdict.bounded = False
        verdict.notes.append("the step of one process in the run's precision is no bound: " + done.stderr.strip())
        return verdict
    if done.returncode not in (0, 1):
        raise RuntimeError(f"isograd compare ended with status {done.returncode}: {done.stdout}{done.stderr}")
    return Verdict(done.returncode == 0, done.stdout, json.loads((folder / "verdict.json").read_text()))
