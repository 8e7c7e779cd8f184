"""Makes the steps of trainers.py, right and with one mistake each, under isograd.watch, and writes a table.

    run.py [NAME ...] [--file FILE] [--part I/N] [--json FILE] [--verdicts] [--changed]

Only these; of another file; every Nth from the Ith; with what was printed; mistakes once more, changed as it says.
"""
import argparse
import dataclasses
import json
import pathlib
import re
import sys
import traceback
import warnings

import torch

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path += [str(FOLDER), str(FOLDER.parent / "python_package")]
import names  # noqa: E402
from changes import CHANGES, printed  # noqa: E402
import ranks as processes  # noqa: E402
import world  # noqa: E402

MARK = re.compile(r"\s*#([!=]) (\w+)( \d+)? \| ?(.*)")  # docs: README.md


@dataclasses.dataclass
class Trial:
    name: str
    kind: str
    said: str
    trainer: str
    edits: list = dataclasses.field(default_factory=list)  # where, how many lines, others in their place


def read(text):
    """(the lines of the right trainers, {name: Trial})"""
    lines, trials, trainer, edit = [], {}, None, None
    for line in text.splitlines():
        if found := MARK.match(line):
            kind, name, count, said = found.groups()
            trial = trials.setdefault(name, Trial(name, {"!": "mistake", "=": "right"}[kind], said, trainer))
            edit = (len(lines), int(count or 1), [])
            trial.edits.append(edit)
        elif found := re.match(r"(\s*)#- ?(.*)", line):
            place, count, instead = edit
            indent = re.match(r"\s*", lines[place - count])[0] if count else found[1]
            instead.append(indent + found[2])
        else:
            lines.append(line)
            if found := re.match(r"def (\w+)\(w\):", line):
                trainer = found[1]
                trials[trainer] = Trial(trainer, "right", "", trainer)
            elif trainer in trials and (found := re.match(r'    """(.*?)"""', line)):
                trials[trainer].said = found[1]
    return lines, trials


def source(lines, trial):
    lines = list(lines)
    for place, count, instead in sorted(trial.edits, key=lambda edit: -edit[0]):
        lines[place - count:place] = instead
    return "\n".join(lines)


def change(lines, trial):
    """The lines of the mistake, and those of the right trainer."""
    return [(instead, lines[place - count:place]) for place, count, instead in trial.edits]


LINES, TRIALS = [], {}


def taken(names, part):
    trials = list(TRIALS.values())
    if names:
        trials = [trial for trial in trials if trial.name in names]
    return trials[part[0]::part[1]]


def result(trial, text):
    """Makes the trial on ranks of its own, because a step that goes wrong may leave ranks waiting for each other. text: the program."""
    space = {"__name__": trial.name}
    exec(compile(text, trial.name, "exec"), space)
    program = space[trial.trainer]
    try:
        return processes.on_ranks(program.ranks, lambda rank: on_one(program, program.ranks), seconds=60)[0]
    except SystemExit as end:
        return {"error": f"{end}"}


def on_one(program, size):
    torch.manual_seed(0)
    torch.set_default_dtype(program.dtype)
    here = world.World(size, program.dtype)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program(here)
    except Exception:
        here.result = {"error": traceback.format_exc(limit=-3)}
    finally:
        torch.set_default_dtype(torch.float32)
    return here.result


def followed(trial, said):
    """What comes of the step that the verdict's change is made in. said: the changes that it prints."""
    wrong, change = source(LINES, trial), CHANGES[trial.name]
    program = change.apply(LINES, TRIALS, trial, source)
    of_verdict = [code for text in said.values() for code in printed(text)]
    return {**result(trial, program), "trainer": trial.trainer, "not printed": [code for code in change.codes if code not in of_verdict],
            "not written": change.written(wrong, program)}


def outcome(trial, result):
    """named, half named (with one that is false), undecided, misnamed, passed; right, alarm; refused; said, if no names are recorded"""
    if "passed" not in result:
        return "refused"
    if result["passed"] or trial.kind == "right":
        return {("mistake", True): "passed", ("right", True): "right"}.get((trial.kind, result["passed"]), "alarm")
    known, said = (names.TRUE | names.SECOND | names.THIRD).get(trial.name), set(result["findings"])
    if said <= {"undecided", "unknown", "unresolved"}:
        return "undecided"
    if known is None:
        return "said"
    true = set(known.split())
    return "named" if said <= true else "half named" if said & true else "misnamed"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--json")
    parser.add_argument("--distances", action="store_true", help="without what isograd says")
    parser.add_argument("--verdicts", action="store_true")
    parser.add_argument("--changed", action="store_true", help="makes each mistake again with the change that its verdict says")
    parser.add_argument("--file", default="trainers.py")
    options = parser.parse_args()
    lines, trials = read((FOLDER / options.file).read_text())
    LINES.extend(lines)
    TRIALS.update(trials)
    trials = taken(options.names, [int(number) for number in options.part.split("/")])
    found = {}
    for trial in trials:
        here = found[trial.name] = result(trial, source(LINES, trial))
        far = f"{here['gradient']:8.1e} {here['update']:8.1e}" if "gradient" in here else " " * 17
        said = "PASS" if here.get("passed") else ", ".join(here.get("findings", ())) or here.get("error", "nothing")
        here["outcome"] = outcome(trial, here)
        shown = "" if options.distances else f"{here['outcome']:11}{said}"
        print(f"{trial.kind:8}{trial.trainer:12}{trial.name:28}{far}  {shown}", flush=True)
        if options.changed and trial.name in CHANGES:
            again = here["changed"] = followed(trial, here.get("changes", {}))
            print(" " * 20, "changed as it says:", "PASS" if again.get("passed") else again.get("findings") or again.get("error"),
                  *(f"{key} {again[key]}" for key in ("not printed", "not written") if again[key]), flush=True)
        if options.distances and "gradient" not in here:
            print(here["error"][-200:], flush=True)
        if options.verdicts and not options.distances:
            print("   ", trial.said, *(f"\n    wrong: {a}\n    right: {b}" for a, b in change(LINES, trial)))
            print("   ", here.get("text", "").replace("\n", "\n    "))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
