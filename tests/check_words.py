"""Fails when a word that docs/glossary.md retires comes back, in code, comments, messages or pages.

The glossary's table names the words and what stands for each. ALLOWED has how often a word may still occur; a change that
replaces some lowers it. Names of tests and of planted mistakes are looked at as well.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ALLOWED = {
    "beside": 12,
    "mend\\w*": 0,
    "torn": 3,
    "living": 6,
    "speaks": 0,
    "seams?": 9,
    "held_together": 0,
    "census": 0,
    "ledger": 0,
    "tally": 0,
    "so many": 9,
    "but for": 19,
    "// What ": 0,
    "// Of ": 0,
    "// The same of ": 0,
}
PLACES = ["src/**/*.[ch]pp", "src/**/*.cu", "include/isograd/*.hpp", "python/**/*.py", "python/**/*.cpp", "bench/**/*.py", "examples/**/*.*pp",
          "tests/**/*.[ch]pp", "tests/**/*.py", "tools/*.py", "docs/*.md", "src/**/README.md", "*.md", "dev"]
EXEMPT = {"docs/glossary.md", "tests/check_words.py"}


def retired():
    table = (ROOT / "docs/glossary.md").read_text().partition("## Retired words")[2]
    return re.findall(r"^\| `([^`]+)` \| ", table, re.M)


def main():
    texts = {}
    for pattern in PLACES:
        for path in ROOT.glob(pattern):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and name not in EXEMPT:
                texts[name] = path.read_text()
    words = retired()
    problems = [f"docs/glossary.md retires no {word}" for word in ALLOWED if word not in words]
    for word in words:
        pattern = re.compile(word if word.startswith("//") else rf"(?<![a-zA-Z]){word}(?![a-zA-Z])", re.I if word.islower() else 0)
        found = {name: len(pattern.findall(text)) for name, text in texts.items()}
        count, allowed = sum(found.values()), ALLOWED.get(word, 0)
        if count > allowed:
            most = sorted(found, key=lambda name: -found[name])[:3]
            problems.append(f"'{word}': {count} times, at most {allowed} (tests/check_words.py); most in {', '.join(most)}. "
                            f"docs/glossary.md has the word to use")
        elif count < allowed:
            print(f"'{word}': {count} times, record it (tests/check_words.py says {allowed})")
    for problem in problems:
        print(problem)
    print(f"{len(texts)} files, {len(words)} retired words, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
