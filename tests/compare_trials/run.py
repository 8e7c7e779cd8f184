"""Dumps each trial's step and the same step on one device, runs `isograd compare`, and counts what it made of them.

python run.py [NAME ...] [--seed N] [--binary FILE] [--keep FOLDER] [--json FILE] [--changed]. Status 0: no mistake passed that is
larger than the resolution, no right trainer failed, none was named wrongly, enough were named rightly, and where a change was made as
the verdict says (--changed) the step is right.
"""
import argparse
import dataclasses
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "examples/other_trainers"), str(ROOT / "tests/python_package")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch.distributed as dist  # noqa: E402

import mistakes  # noqa: E402
import right  # noqa: E402
from isograd_dump import write_dump  # noqa: E402
from ranks import on_ranks  # noqa: E402
from reference import one_device  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from trainers import Groups  # noqa: E402

WORLD = 4  # processes
NAMED_RIGHTLY = 0.85  # of all mistakes; an expected `undecided` does not count
NO_NAME = ("undecided", "unknown", "unresolved", "norm_differs")  # say that no name is known: not wrong, right where expected
PLANTED = 1e-5  # of the right value: more in fp64 is a mistake, less is rounding and the parameters' own digits


def write(folder, result):
    step = {key: str(value) if value in (math.inf, -math.inf) else value for key, value in result["step"].items()}
    write_dump(folder, result["gradients"], result.get("shares", {}), **step)
    if result["applied"] is not None:
        save_file({name: value.contiguous() for name, value in result["applied"].items()},
                  f"{folder}/applied.safetensors")


def run_trainer(trial, folder, groups=None):
    """The trainer's dump in its own precision, and in fp64 to measure the mistake by."""
    for side, precision in (("mine", None), ("mine64", "fp64")):
        result = trial.trainer(trial.problem, precision).step(groups)
        if groups is None or dist.get_rank() == 0:
            write(folder / side, result)


def run_processes(trials, folder):
    """Processes of one group go through all trials that want some; a trial of fewer ranks takes the first."""
    def run(rank):
        groups = Groups()
        for trial in trials:
            if rank < trial.problem.ranks:
                run_trainer(trial, folder / trial.name, groups)

    if trials:
        on_ranks(WORLD, run, seconds=600)


def distance(mine, one):
    """Relative difference of two dictionaries of tensors over all elements, and the largest of a single tensor."""
    names = [name for name in one if name in mine]
    apart = {name: float((mine[name].double() - one[name].double()).norm()) for name in names}
    sizes = {name: float(one[name].double().norm()) for name in names}
    together = (sum(a * a for a in apart.values()) ** 0.5) / max(sum(s * s for s in sizes.values()) ** 0.5, 1e-300)
    return together, max((apart[name] / sizes[name] for name in names if sizes[name] > 0), default=0.0)


def effect_of(folder):
    """The effect of the mistake in fp64, relative to the right value: of the gradient, of one parameter, of the rest."""
    mine, one = folder / "mine64", folder / "one"
    total, single = distance(*(
        {name.removeprefix("module."): g for name, g in load_file(side / "gradients.safetensors").items()}
        for side in (mine, one)))
    effect = {"gradient": total, "parameter": single}
    steps = [json.loads((side / "step.json").read_text()) for side in (mine, one)]
    for key in ("loss", "norm", "targets"):
        a, b = (float(step[key]) for step in steps)
        effect[key] = abs(a - b) / abs(b)
    if (mine / "applied.safetensors").exists():
        effect["applied"] = distance(load_file(mine / "applied.safetensors"), load_file(one / "applied.safetensors"))[0]
    effect["ranks"] = float(len({json.dumps(rank.get("gradients")) for rank in steps[0].get("ranks", [])}) > 1)
    return effect


def compare(binary, folder, alone):
    verdict = folder / "verdict.json"
    command = [str(binary), "compare", str(folder / "mine"), str(folder / "one"), "--json", str(verdict)]
    if alone:
        command += ["--alone", str(folder / "alone")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    (folder / "printed.txt").write_text(done.stdout + done.stderr)
    return done.returncode, json.loads(verdict.read_text()) if verdict.exists() else {}


def run(trials, folder, binary):
    for trial in trials:
        (folder / trial.name).mkdir(parents=True)
    run_processes([trial for trial in trials if trial.trainer.processes], folder)
    rows = []
    for trial in trials:
        here = folder / trial.name
        if not trial.trainer.processes:
            run_trainer(trial, here)
        assignment = trial.reference_assignment(trial.problem) if trial.reference_assignment else None
        write(here / "one", one_device(trial.problem, assignment))
        if trial.alone:
            write(here / "alone", one_device(trial.problem, assignment, trial.problem.precision))
        status, verdict = compare(binary, here, trial.alone)
        rows.append(judged(trial, status, verdict, effect_of(here)))
    return rows


def changed_rows(rows, trials, folder, options):
    """Of each mistake that has a change the trial with it, and its codes that the verdict does not print or the change does not have."""
    from changes import CHANGES  # which needs isograd
    printed = {row["name"]: "\n".join(row["changes"].values()) for row in rows}
    made = [(trial, *CHANGES[trial.name].apply(trial)) for trial in seeded(trials, options.seed) if trial.name in CHANGES]
    return [(row, [*(code for code in CHANGES[trial.name].codes if f"`{code}`" not in printed[trial.name]), *missing])
            for row, (trial, _, missing) in zip(run([trial for _, trial, _ in made], folder, options.binary), made)]


def seeded(trials, seed):
    return [dataclasses.replace(trial, problem=dataclasses.replace(trial.problem, seed=trial.problem.seed + seed))
            for trial in trials]


def outcome(trial, status, said, effect):
    """right, or what is wrong: of a mistake the verdict, then each name that compare gave."""
    if status not in (0, 1):
        return "error"
    if trial.mistaken == all(value <= PLANTED for value in effect.values()):
        return "misplanted"
    if not trial.mistaken:
        return "right" if status == 0 and not said else "alarm"
    if status == 0:
        return "passed"
    if any(name not in (*trial.names, *NO_NAME) for name in said):
        return "named wrongly"
    return "right" if any(name in trial.names for name in said) else "not named"


def resolution_of(verdict):
    """The smallest errors that the verdict says it finds: of the whole gradient, of one parameter.

    `finds` of the grade in force (E1 for fp64, E2 else); a verdict without it allows one error for both.
    """
    for grade in (verdict.get("grades", {}).get(name, {}) for name in ("E1", "E2")):
        if numbers := [value for value in grade.get("finds", {}).values() if isinstance(value, float)]:
            return min(numbers), max(numbers)
        if "allowed" in grade:
            return grade["allowed"], grade["allowed"]
    return 0.0, 0.0


def above(row):
    """Whether the mistake is larger than the resolution; NaN is."""
    whole, single = row["resolution"]
    limits = {"gradient": whole, "parameter": single}
    return not all(value <= limits.get(key, PLANTED) for key, value in row["effect"].items())


def judged(trial, status, verdict, effect):
    said = list(dict.fromkeys(finding["id"] for finding in verdict.get("findings", [])))
    return dict(name=trial.name, about=trial.about, mistaken=trial.mistaken, trainer=trial.trainer.__name__,
                precision=trial.problem.precision, ranks=trial.problem.ranks, alone=trial.alone, status=status,
                said=said, changes={finding["id"]: finding.get("change", "") for finding in verdict.get("findings", [])},
                names=list(trial.names), outcome=outcome(trial, status, said, effect), effect=effect,
                resolution=resolution_of(verdict))


def by_name(row):
    """Whether the mistake was named, where `undecided` and its like may be the right answer."""
    return any(name in row["names"] and name not in NO_NAME for name in row["said"])


def figures(rows):
    planted = [row for row in rows if row["mistaken"]]
    passed = [row for row in planted if row["outcome"] == "passed"]
    return {"mistakes": len(planted), "right": len(rows) - len(planted),
            "passed": len(passed), "passed_above_resolution": sum(above(row) for row in passed),
            "alarms": sum(not row["mistaken"] and row["outcome"] != "right" for row in rows),
            "errors": sum(row["outcome"] in ("error", "misplanted") for row in rows),
            "named_rightly": sum(row["outcome"] == "right" and by_name(row) for row in planted),
            "undecided": sum(row["outcome"] == "right" and not by_name(row) for row in planted),
            "named_wrongly": sum(row["outcome"] == "named wrongly" for row in planted)}


def table(rows):
    lines = [f"{'trial':28} {'precision':16} {'gradient':>8} {'largest':>8} {'other':>16} exit  {'outcome':13} "
             "compare said; true would be"]
    for row in rows:
        effect = dict(row["effect"])
        gradient, largest = effect.pop("gradient"), effect.pop("parameter")
        key, other = max(effect.items(), key=lambda item: (item[1] != item[1], item[1]))
        also = f"{key} {other:.1e}" if not other <= PLANTED else ""
        expected = "; " + " or ".join(row["names"]) if row["names"] and row["outcome"] != "right" else ""
        lines.append(f"{row['name']:28} {row['precision'] + ('+' if row['alone'] else ''):16} {gradient:8.1e} "
                     f"{largest:8.1e} {also:>16} {row['status']:4}  {row['outcome']:13} "
                     f"{', '.join(row['said']) or '-'}{expected}")
    return "\n".join(lines) + "\n" + (
        "gradient, largest: the effect in fp64, relative to the right gradient and to a parameter's own; other: to\n"
        "the loss, norm, targets or update. precision +: with --alone.")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="trials; all unless given")
    parser.add_argument("--binary", default=str(
        pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release")) / "bin/isograd"))
    parser.add_argument("--seed", type=int, default=0, help="other samples and weights")
    parser.add_argument("--keep", metavar="FOLDER", help="dumps, verdicts and what was printed stay here")
    parser.add_argument("--json", metavar="FILE", help="all rows and figures")
    parser.add_argument("--changed", action="store_true", help="each mistake once more, with the change that its verdict says (needs isograd)")
    return parser.parse_args()


def main():
    options = arguments()
    trials = right.TRIALS + mistakes.TRIALS
    if unknown := set(options.names) - {trial.name for trial in trials}:
        sys.exit(f"trials: found {sorted(unknown)}; expected names of trials: {', '.join(t.name for t in trials)}")
    trials = [trial for trial in trials if not options.names or trial.name in options.names]
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(options.keep or scratch) / f"seed-{options.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        rows = run(seeded(trials, options.seed), folder, options.binary)
        followed = changed_rows(rows, trials, folder, options) if options.changed else []
    found = figures(rows)
    print(table(rows + [row for row, _ in followed]))
    wrong = [f"{row['name']}: {row['outcome']}, {', '.join(row['said'])}; not printed or not in the change: {missing}"
             for row, missing in followed if row["outcome"] != "right" or missing]
    print("\n".join(wrong))
    print(f"\nseed {options.seed}: of {found['mistakes']} mistakes {found['passed']} passed, of them "
          f"{found['passed_above_resolution']} above the resolution; {found['alarms']} alarms for {found['right']} "
          f"right trainers; {found['named_rightly']} mistakes named rightly, {found['undecided']} undecided with "
          f"the experiment that would tell, {found['named_wrongly']} named wrongly")
    if options.json:
        report = {"seed": options.seed, "figures": found, "trials": rows, "changed": len(followed), "changed_wrong": wrong}
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1))
    enough = found["named_rightly"] >= NAMED_RIGHTLY * found["mistakes"]
    bad = found["passed_above_resolution"] + found["alarms"] + found["errors"] + found["named_wrongly"]
    sys.exit(1 if bad or wrong or not enough else 0)


if __name__ == "__main__":
    main()
