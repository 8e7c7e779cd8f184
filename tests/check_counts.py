"""Fails when the surface of isograd grows: keys, variables, findings, commands, options, headers, public functions.

Counts are recorded below. A change that needs a higher one raises it in the same commit and says why. The lines of each room are printed for comparison with the last change.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORDED = {
    "configuration keys": 163,  # run.on_signal.usr1 and usr2, checkpoint.every_seconds and keep_best; schedule.decay, schedule.decay_shape, loss.label_smoothing, loss.z_loss, optimizer.groups; model.lora.*: rank, alpha, targets, dropout, b_range; data: on_bad_line, train_on, drop_doubled_mark, packing
    "environment variables": 7,
    "findings": 87,  # other_loss, other_outputs, extra_rows_counted, other_backward, other_reduction, padding_seen, evaluation_mode; gradient_of_earlier_step, loss_over_own_samples, samples_weighted_differently, micro_batches_not_reduced, norm_before_reduction, values_clipped, other_denominator, other_mean
    "commands": 34,  # tensor, expert and pipeline of `bench` are three rows of its table, which were one call; export; serve, its status and key, and `bench serve`; calibrate, plan; help; report; completions; texts, hidden
    "options of commands": 141,  # verify: --server, --api-key-file, --base, --adapters; export: checkpoint, directory, --merge; serve: its bases, state, address, keys and limits; bench serve: --threads, --skyrl; serve: --ranks, --set; calibrate: --ranks, --output; plan: its model, cluster and work, what it writes, --try, --validate; every verb: --quiet, --verbose, --color; help: its verb; report: runs, --html; config: --schema; completions: its shell; help: --man; data pack: --train-on-all, --drop-doubled-mark; texts: its file
    "public headers": 27,  # lora.hpp, sampler.hpp, planner.hpp
    "public functions and types": 457,  # Requests, wishes of a rank for all ranks after a step; BatchInputs, whose missing element is named; ParameterGroup, check_groups; a user's own module: ModuleRef and its refusal, one_term, evaluate, LoaderSampler, write_weights, read_weights, load_checkpoint; adapters, the sampler, losses of log-probabilities, AdamW's options; the planner's plain data and functions
    "public names in Python": 21,  # Term, of a loss with several; all_gather_rows, which no version of torch deprecates
}


def files(*patterns):
    names = sorted({path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)})
    return [name for name in names if not re.search(r"_test(ing)?\.|test_support", name)]


def text(*patterns):
    return "\n".join((ROOT / name).read_text() for name in files(*patterns))


def counts():
    code, commands, headers = text("src/**/*.cpp", "src/**/*.hpp", "python/**/*.py", "python/**/*.cpp"), text("src/cli/*.cpp"), text("include/isograd/*.hpp")
    benches = text("src/bench/**/*.?pp")  # the table of `isograd bench`
    diagnoses = (ROOT / "docs/museum.md").read_text().partition("## All diagnoses")[2]
    exported = re.findall(r'"(\w+)"', (ROOT / "python/isograd/__init__.py").read_text().partition("__all__")[2])
    functions = re.findall(r"^(?!#|//|using|namespace|  |\}|return)[\w:<>,&*\[\] ]+?\b(\w+)\([^;{]*\)?[^;{]*[;{]", headers, re.M)
    types = re.findall(r"^(?:class|struct|enum class) (\w+)[^;]*\{", headers, re.M)
    return {
        "configuration keys": len(re.findall(r"\bKEY\(\s*\"?[a-z_]+\.|\bNAMED_KEY\(", text("src/**/*.cpp"))),
        "environment variables": len(set(re.findall(r'"(ISOGRAD_[A-Z_]+)"', code))),
        "findings": len(re.findall(r"^\| `\w+` \|", diagnoses, re.M)),
        "commands": len(re.findall(r"add_subcommand\(\s*\"", commands)) + len(re.findall(r"\b(?:verb|model_parallel)\(\s*\"", benches)),
        "options of commands": (commands.count("add_option(") + commands.count("add_flag(")
                                + len(re.findall(r"\b(?:flag|file|choice|number)\(\s*\"", benches))),
        "public headers": len(files("include/isograd/*.hpp")),
        "public functions and types": len(set(functions)) + len(set(types)),
        "public names in Python": len(set(exported)),
    }


def lines_by_room():
    lines = {}
    for name in files("src/**/*.cpp", "src/**/*.hpp", "src/**/*.cu", "include/isograd/*.hpp", "python/**/*.py", "python/**/*.cpp", "bench/**/*.py"):
        room = "/".join(name.split("/")[:2]) if name.startswith("src/") else name.split("/")[0]
        lines[room] = lines.get(room, 0) + len((ROOT / name).read_text().splitlines())
    return lines


def main():
    found, problems = counts(), 0
    for what, count in found.items():
        problems += count > RECORDED[what]
        verdict = {-1: ": record the lower number", 0: "", 1: ": more than recorded"}[(count > RECORDED[what]) - (count < RECORDED[what])]
        print(f"{count:5} of {RECORDED[what]} {what}{verdict}")
    print(", ".join(f"{room} {count}" for room, count in sorted(lines_by_room().items(), key=lambda one: -one[1])))
    print(f"{problems} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
