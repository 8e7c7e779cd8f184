"""Fails when JSON is parsed, text is printed or a loop is shared among threads past the one function made for it.

`parse_json` (src/base/json.hpp) has the limits that keep a hostile file from ending the program; `print` and
`printable` (src/base/print.hpp) keep escape sequences and forged lines off the terminal; `at::parallel_for` outside
LibTorch is a plain loop (src/kernels/threads). Programs that only test or measure, and print nothing but their own numbers,
are listed with their reason.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from check_one_division import code_lines  # noqa: E402

PARSING = re.compile(r"\b[Jj]son::(?:sax_)?parse\s*\(|\b[Jj]son::(?:from_\w+|accept)\s*\(")
PRINTING = re.compile(r"\bfmt::print\s*\(|\bstd::(?:cout|cerr|clog)\s*<<|\b(?:f?puts|f?printf|putc(?:har)?|perror)\s*\(|"
                      r"\bfwrite\s*\([^;]*std(?:out|err)\s*\)")
SHARING = re.compile(r"\bat::parallel_(?:for|reduce)\b|#\s*pragma\s+omp\b")
ONE = {PARSING: "parse_json (base/json.hpp)", PRINTING: "print (base/print.hpp)",
       SHARING: "parallel_for (threads/parallel_for.hpp)"}

# (path or folder, rule, why)
ALLOWED = [
    ("src/base/json.cpp", PARSING, "it is the one"),
    ("src/base/waiting.cpp", PRINTING, "the sequence that clears its own line"),
    ("src/bench/runner.cpp", PRINTING, "a line of JSON for a pipe"),
    ("src/cli/sample.cpp", PRINTING, "a sample goes as it is where no terminal is"),
]
WRONG = ['const auto j = nlohmann::json::parse(text);', 'auto o = json::parse(t, nullptr, false);', 'fmt::print("x");',
         'std::puts(name.c_str());', 'std::cerr << name;', 'std::fprintf(stderr, "%s", s);',
         'std::fwrite(t.data(), 1, t.size(), stdout);', 'at::parallel_for(0, n, 1, f);']
RIGHT = ['print(stdout, text);', 'const auto [value, problem] = parse_json(text);', 'std::fwrite(p, 1, n, file_);',
         'fields.inputs(1);', '// std::cout',
         'parallel_for(0, n, 1, f);']


def findings(text):
    return [(number, line.strip(), rule) for number, line in enumerate(code_lines(text), 1)
            for rule in ONE if rule.search(line)]


def main():
    problems = [f"planted mistake not found: {code}" for code in WRONG if not findings(code)]
    problems += [f"false alarm: {code}" for code in RIGHT if findings(code)]
    used, files = set(), 0
    for path in sorted([*ROOT.glob("src/**/*.[hc]pp"), *ROOT.glob("include/**/*.hpp")]):
        name = path.relative_to(ROOT).as_posix()
        if re.search(r"_(test|testing|probe)\.[hc]pp$", name):
            continue
        files += 1
        for number, code, rule in findings(path.read_text()):
            allowed = next((i for i, (place, of, _) in enumerate(ALLOWED) if name.startswith(place) and of is rule), None)
            if allowed is None:
                problems.append(f"{name}:{number}: past {ONE[rule]}: {code}")
            else:
                used.add(allowed)
    problems += [f"ALLOWED names {place}, where nothing is found any more: remove the entry"
                 for i, (place, _, _) in enumerate(ALLOWED) if i not in used]
    for problem in problems:
        print(problem)
    print(f"{files} files, {len(WRONG)} planted mistakes, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
