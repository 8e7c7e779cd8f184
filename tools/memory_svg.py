"""Draws docs/memory.svg: what a rank keeps under each strategy, measured by `isograd train --memory`.

    python tools/memory_svg.py build/release/bin/isograd docs/memory.svg

Runs three steps of a small model on four ranks for each strategy, takes rank 0's line of the table, and draws it as
bars; the line across each bar is the formula's total.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

STRATEGIES = [
    ("stage 0", ["parallel.strategy=bucketed", "parallel.share_parameters=off"]),
    ("ZeRO-1", ["parallel.strategy=zero1", "parallel.share_parameters=off"]),
    ("ZeRO-2", ["parallel.strategy=zero2", "parallel.share_parameters=off"]),
    ("ZeRO-3", ["parallel.strategy=zero3", "parallel.share_parameters=off"]),
    ("one copy", ["parallel.strategy=bucketed", "parallel.share_parameters=on"]),
    ("one copy, ZeRO-2", ["parallel.strategy=zero2", "parallel.share_parameters=on"]),
]
MODEL = ["train.steps=3", "train.dtype=bfloat16", "train.evaluate_every=0", "verify.at_end=false", "sample.tokens=0",
         "batch.packs_per_step=8", "batch.packs_per_micro_batch=1", "checkpoint.every=0"]
COLUMNS = ["parameters", "gradients", "masters", "state", "total", "other", "in passing", "sent"]
PARTS = [("parameters", "#4c78a8"), ("gradients", "#f58518"), ("masters", "#54a24b"), ("state", "#b79a20"),
         ("other", "#bab0ac")]
RANKS = 4


def measure(program, settings, folder):
    """Rank 0's bytes by column name, and the formula's total, in MB; None where the strategy is not known."""
    command = [program, "train", "examples/first_light.toml", "--ranks", str(RANKS), "--memory", "--overwrite"]
    for setting in [*MODEL, f"run.directory={folder}/run", *settings]:
        command += ["--set", setting]
    result = subprocess.run(command, text=True, capture_output=True, timeout=600)
    if result.returncode == 2 and "parallel.strategy" in result.stderr:
        return None
    if result.returncode != 0:
        sys.exit(result.stdout + result.stderr)
    lines = result.stderr.splitlines()
    header = next(line for line in lines if re.match(r"\s*MB\s+parameters", line))
    rank = next(line for line in lines if line.strip().startswith("rank 0")).split()[2:]
    formula = next(line for line in lines if line.strip().startswith("formula")).split()[1:]
    measured = dict(zip(COLUMNS, map(float, rank)))
    print(*lines[lines.index(header):lines.index(header) + RANKS + 3], sep="\n")
    return measured, float(formula[4])


def draw(results):
    width, height, left, top, bottom, bar = 900, 430, 60, 50, 70, 90
    most = max(max(sum(m[p] for p, _ in PARTS), f) for _, m, f in results) * 1.05
    scale = (height - top - bottom) / most
    gap = (width - left - 20 - bar * len(results)) / len(results)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
           f'font-size="13"><rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="{left}" y="22" font-size="15">MB that one of {RANKS} ranks keeps (bf16, AdamW)</text>']
    x = width - 20
    for name, color in reversed(PARTS):
        x -= 95
        out.append(f'<rect x="{x}" y="12" width="11" height="11" fill="{color}"/><text x="{x + 15}" y="22">{name}</text>')
    for i, (title, measured, formula) in enumerate(results):
        x, y = left + gap / 2 + i * (bar + gap), height - bottom
        for name, color in PARTS:
            h = max(measured[name], 0) * scale
            y -= h
            out.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{bar}" height="{h:.1f}" fill="{color}"/>')
            if h > 16:
                out.append(f'<text x="{x + bar / 2:.1f}" y="{y + h / 2 + 4:.1f}" text-anchor="middle" fill="white">'
                           f"{measured[name]:.1f}</text>")
        line = height - bottom - formula * scale
        out.append(f'<line x1="{x - 8:.1f}" x2="{x + bar + 8:.1f}" y1="{line:.1f}" y2="{line:.1f}" stroke="black" '
                   f'stroke-width="1.5" stroke-dasharray="4 2"/>')
        out.append(f'<text x="{x + bar / 2:.1f}" y="{height - bottom + 20}" text-anchor="middle">{title}</text>')
        out.append(f'<text x="{x + bar / 2:.1f}" y="{height - bottom + 38}" text-anchor="middle" fill="#555">'
                   f"formula {formula:.1f}</text>")
        out.append(f'<text x="{x + bar / 2:.1f}" y="{height - bottom + 55}" text-anchor="middle" fill="#555">'
                   f'sends {measured["sent"]:.1f} a step</text>')
    out.append(f'<line x1="{left}" x2="{width - 10}" y1="{height - bottom}" y2="{height - bottom}" stroke="black"/></svg>')
    return "\n".join(out) + "\n"


def main():
    program, target = sys.argv[1:3]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for i, (title, settings) in enumerate(STRATEGIES):
            print(title)
            found = measure(program, settings, f"{folder}/{i}")
            if found:
                results.append((title, *found))
    pathlib.Path(target).write_text(draw(results))


if __name__ == "__main__":
    main()
