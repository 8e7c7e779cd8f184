"""python page.py SAID.json PAGE.md: puts what `run.py --json SAID.json` found between the page's two marks, as tables."""
import importlib.metadata
import json
import pathlib
import platform
import sys

from loops import LOOPS

BEGIN, END = "<!-- card -->\n", "<!-- end of the card -->\n"
COLUMNS = [(1, 1), (1, 4), (2, 1), (2, 4)]


def cell(said):
    """equal; or how far parameters' gradients are off, and what isograd calls it."""
    if "error" in said:
        return said["error"].replace("|", "/")
    if said["passed"]:
        return "equal"
    parameters = [one for one in said["json"]["parameters"] if isinstance(one["ratio"], float)]
    ratios = sorted(one["ratio"] for one in parameters)
    worst = max(one["error"] for one in parameters if isinstance(one["error"], float))
    far = f"{ratios[0]:.4f}" if ratios[-1] - ratios[0] < 1e-5 else f"{ratios[0]:.3f} to {ratios[-1]:.3f}, off by {worst:.1e}"
    return f"{far}: {', '.join(f'`{name}`' for name in said['findings'])}"


def tables(found):
    lines = [f"Python {platform.python_version()}, " + ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers", "trl", "accelerate", "lightning", "pytorch-ignite"))
        + f"; {len(found)} cells, {sum(bool(said.get('passed')) for said in found.values())} equal."]
    for trainer, loop in LOOPS.items():
        here = {tuple(name.removeprefix(trainer + "-").split("-")): said for name, said in found.items()
                if name.removeprefix(trainer + "-")[:1] in ("1", "2")}
        shown = [column for column in COLUMNS if any((int(r), int(a)) == column for r, a, _, _ in here)]
        lines += ["", f"### {trainer}", loop.__doc__, "",
                  "| documents | " + " | ".join(f"{r} rank{'s' * (r > 1)}, accumulation {a}" for r, a in shown) + " |",
                  "|---" * (1 + len(shown)) + "|"]
        for wrap in ("DDP", "FSDP2"):
            if not any(key[3] == wrap for key in here):
                continue
            for data in dict.fromkeys(key[2] for key in here):
                row = [here.get((str(r), str(a), data, "none" if r == 1 and wrap == "DDP" else wrap)) for r, a in shown]
                lines.append(f"| {data}{', FSDP2' if wrap == 'FSDP2' else ''} | "
                             + " | ".join("" if said is None else cell(said) for said in row) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = pathlib.Path(sys.argv[2])
    before, rest = page.read_text().split(BEGIN)
    page.write_text(before + BEGIN + tables(json.loads(pathlib.Path(sys.argv[1]).read_text())) + END + rest.split(END)[1])
