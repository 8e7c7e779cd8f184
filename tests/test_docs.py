"""Quotes, outputs, commands and links of the documents agree with the code and the program."""
import os
import re
import shutil
import subprocess
import sys

import pytest
import warm_python
from conftest import BINARY, FULL, PROGRAM, ROOT, finished, isograd, ran, run_python


def quoted_blocks(markdown):
    """[(path, text)] of code blocks introduced by `<!-- quote: path -->`."""
    return re.findall(r"<!-- quote: (\S+) -->\n```\w*\n(.*?)```", markdown, re.S)


def test_quotes_stand_in_their_source():
    seen = 0
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for path, text in quoted_blocks(document.read_text()):
            seen += 1
            assert text in (ROOT / path).read_text(), f"{document.name}: the block quoted from {path} does not stand there any more"
    assert seen >= 1


NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?")


def said(line):
    """A line without its numbers, and those: columns may be as wide as they like."""
    return " ".join(NUMBER.sub("#", line).split()), [float(number) for number in NUMBER.findall(line)]


def output_of(page):
    """The command and the lines of a page's `<!-- output: COMMAND -->`."""
    command, shown = re.search(r"<!-- output: (.*?) -->\n```\n(.*?)```", (ROOT / page).read_text(), re.S).groups()
    return command.split(), shown.splitlines()


@pytest.mark.parametrize("page", ["docs/hosts.md", "docs/layout.md", "docs/planning.md"])
def test_the_layout_that_is_documented(page):
    command, shown = output_of(page)
    printed = [said(line) for line in ran(*command, cwd=ROOT).stdout.splitlines()]
    for line in shown:
        assert line == "..." or said(line) in printed, f"not printed: {line}"


def test_the_output_that_the_readme_shows_is_what_the_program_prints(tmp_path):
    """Words are equal; numbers within 1 % of those shown: another processor rounds otherwise, by far less."""
    trainers = ROOT / "examples/other_trainers"
    for command in (["one_device.py", "--ranks", "3", "--dump", tmp_path / "dumps/one"],
                    ["-m", "torch.distributed.run", "--nproc-per-node", "3", "ddp.py", "--loss", "mean", "--dump",
                     tmp_path / "dumps/mean"]):
        run_python(warm_python.python(), *command, cwd=trainers)
    command, shown = output_of("README.md")
    done = isograd(*command, cwd=tmp_path, status=1)
    printed = [said(line) for line in done.stdout.splitlines()]
    for line in shown:
        words, numbers = said(line)
        found = [theirs for theirs_words, theirs in printed if theirs_words == words]
        assert found, f"not printed: {line}\n{done.stdout}"
        assert any(all(abs(a - b) <= 0.01 * abs(a) for a, b in zip(numbers, theirs)) for theirs in found), \
            f"other numbers: {line}\n{found}"


# A block of commands may need more than is at hand: `<!-- needs: WORD, ... -->` above it. `WORD (TEXT)`: only the lines with
# TEXT in them. Those are checked for their words alone; `minutes` runs with ISOGRAD_FULL_TESTS=1.
NEEDS = {"build": "sets up and builds a clone", "dumps": "gradient dumps of two trainers", "gpu": "a GPU",
         "hosts": "several hosts, or a file that names them", "mpi": "a build with MPI",
         "minutes": "more time than the default tests have", "packages": "packages from the network",
         "server": "a model, and a server that runs until it is ended",
         "table": "a table from the network", "videos": "videos from the network"}
COMMAND = re.compile(r"^(?:[A-Z_]+=\S+ +)*(?:isograd|\./dev|python3?|pip|mpirun|torchrun|git|cmake) ")
# Steps, packs and words, not what a command is about.
SHORT = ("--set train.steps=2 --set train.evaluate_packs=2 --set batch.packs_per_step=8 --set batch.packs_per_micro_batch=1 "
         "--set data.pack_length=32 --set sample.tokens=4 --set run.peak_tflops=1")


def command_blocks(document):
    """[(line number, [(word, text or None)], [command])] of the ```bash blocks of a document, lines that go on joined."""
    blocks = []
    text = document.read_text()
    for found in re.finditer(r"(?:<!-- needs: (.*?) -->\n)?```(\w*)\n(.*?)^```", text, re.M | re.S):
        needs, language, block = found.groups()
        lines = [re.sub(r"\s+#.*", "", line) for line in block.replace("\\\n", " ").splitlines()]
        if language == "bash":
            words = [re.fullmatch(r"(\w+)(?: \((.*)\))?", need).groups() for need in (needs or "").split(", ") if need]
            blocks.append((text[:found.start()].count("\n") + 1, words, [line for line in lines if line.strip()]))
        elif not language:
            stray = [line for line in lines if COMMAND.match(line)]
            assert not stray, f"{document.name}: commands that no test runs, write ```bash: {stray}"
    return blocks


def documents():
    paths = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("src/**/README.md"))]
    return [path for path in paths if not path.name.startswith("tutorial_") and command_blocks(path)]  # those: test_tutorials.py


def test_what_commands_of_the_documents_need_is_said_in_known_words():
    for document in documents():
        for line, needs, commands in command_blocks(document):
            for word, text in needs:
                where = f"{document.name}:{line}: {word}"
                assert word in NEEDS, f"{where}: not one of {sorted(NEEDS)}"
                assert text is None or any(text in command for command in commands), f"{where}: no line has {text!r}"


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder as it is after a `./dev run` of few steps, with examples of smaller models."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "examples", folder / "examples")
    for example in (folder / "examples").glob("*.toml"):
        text = re.sub(r"^(hidden|feed_forward|expert_feed_forward) = .*$", r"\1 = 48", example.read_text(), flags=re.M)
        example.write_text(re.sub(r"^head_dim = .*$", "head_dim = 8", text, flags=re.M))
    run = (folder / "examples/first_light.toml").read_text()  # to "run.toml", the reader's own; heads that cp_ulysses = 2 can split
    for old, new in [("runs/first_light", "runs/own"), ("\nheads = 6", "\nheads = 4"), ("key_value_heads = 3", "key_value_heads = 2")]:
        assert old in run
        run = run.replace(old, new)
    (folder / "run.toml").write_text(run)
    done = in_shell(f"isograd train examples/first_light.toml --ranks 2 {SHORT}", folder)
    assert done.returncode == 0, done.stderr
    return folder


def in_shell(command, folder):
    """What the shell would only take apart goes to a process that has LibTorch (tests/warm_isograd.cpp)."""
    environment = dict(os.environ, PATH=f"{BINARY.parent}:{os.environ['PATH']}", OMP_NUM_THREADS="1", PYTHON=sys.executable)
    if re.fullmatch(r"isograd [\w ./=:,+-]*", command):
        return finished(command.split()[1:], environment, folder, 600)
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_document_run_as_pasted(document, reader, tmp_path):
    """One after the other in a folder where `./dev run` has been, with fewer steps and shorter packs."""
    at_hand = {"minutes"} if FULL else set()
    shutil.copytree(reader, tmp_path / "reader", symlinks=True)
    for line, needs, commands in command_blocks(document):
        for command in commands:
            if any(word not in at_hand and (text is None or text in command) for word, text in needs):
                continue
            short = SHORT if re.search(r"isograd (train|verify) ", re.sub(" +", " ", command)) else ""
            done = in_shell(f"{command} {short}", tmp_path / "reader")
            assert done.returncode == 0, f"{document.name}:{line}: {command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_the_readme_counts_the_mistakes_that_the_museum_shows():
    rows = re.findall(r"^\| B\w+ \| .* \| (.*) \|$", (ROOT / "docs/museum.md").read_text(), re.M)
    count, = re.findall(r"`\./dev museum` shows (\d+) such mistakes", (ROOT / "README.md").read_text())
    assert rows and int(count) == len(rows), f"README.md: {count}; docs/museum.md: {len(rows)}"


def test_every_page_is_on_the_map():
    named = set(re.findall(r"\]\((\w[\w-]*\.md)", (ROOT / "docs/README.md").read_text()))
    assert {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"} == named


def count_of_words(markdown):
    """Outside code and comments; those of tables count, and what has no letter or digit does not."""
    prose = re.sub(r"^ *```.*?^ *```|<!--.*?-->", "", markdown, flags=re.M | re.S)
    return sum(re.search(r"\w", word) is not None for word in prose.split())


def pages_outside_reference():
    """The pages of docs/ that a section of the map other than Reference names, and the map."""
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/README.md").read_text(), re.M | re.S))
    assert "Reference" in sections and len(sections) >= 4
    others = "".join(text for name, text in sections.items() if name != "Reference")
    return ["README.md", *sorted(set(re.findall(r"\]\((\w[\w-]*\.md)", others)))]


@pytest.mark.parametrize("page", pages_outside_reference())
def test_a_page_outside_reference_is_short(page):
    count = count_of_words((ROOT / "docs" / page).read_text())
    assert count <= 1500, f"docs/{page}: {count} words, at most 1,500. Cut, or move tables to a page under Reference of docs/README.md"


def test_words_are_those_outside_code():
    assert count_of_words("# One two\n<!-- no: no -->\n```bash\nno no\n```\n| three | 4 |\n|---|---|\n- five · six\n") == 6
    assert count_of_words("word " * 1501) == 1501


def sentences(markdown):
    """Those outside code and comments. A row of a list and a cell of a table begin new ones."""
    prose = re.sub(r"^ *```.*?^ *```|<!--.*?-->|^#.*?$", "", markdown, flags=re.M | re.S)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    prose = re.sub(r"^\|.*", lambda row: row[0].replace("|", "\n\n"), prose, flags=re.M)
    rows = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", prose, flags=re.M)
    return [part for row in rows for part in re.split(r"(?<=[.!?])[\"')]*\s+(?=[A-Z`\"(*\d])", " ".join(row.split())) if part]


def sentences_of_help(said):
    """Each option with its description, and those of the remarks. Lists of values and facts in parentheses are left out."""
    rows = re.split(r"\n\n|\n(?=  \S)", said)
    return [part for row in rows for part in re.split(r"(?<=[.!?:;])\s+", " ".join(re.sub(r"\([^()]*\)", "", row).split()))]


def too_long(found):
    """Of more than 35 words, or begun by words that let the reader wait for the subject."""
    return [one for one in found if sum(re.search(r"\w", word) is not None for word in one.split()) > 35
            or (re.match(r"(What|Of) ", one) and not one.endswith("?"))]


def test_sentences_are_short():
    """In what a newcomer reads: the README, the tutorials and the help of every verb."""
    told = {page: sentences(page.read_text()) for page in [ROOT / "README.md", *ROOT.glob("docs/tutorial_*.md")]}
    for record in PROGRAM.with_suffix(".texts").read_text().split("\0>")[1:]:
        words, said = record.split("\0\0")
        if words.endswith("--help"):
            told[words] = sentences_of_help(said)
    assert len(told) > 35 and all(len(found) > 3 for found in told.values())
    bad = {place: long for place, found in told.items() if (long := too_long(found))}
    assert not bad


def test_a_long_sentence_is_found():
    long = "It is " + "very " * 33 + "long."
    for text in (f"Short. {long} Short.", f"- a\n- {long}\n", f"| a |\n|---|\n| {long} | b |\n", f"[Short]({long}).\n\n{long}"):
        assert too_long(sentences(text)) == [long], text
    assert too_long(sentences(f"```\n{long}\n```\n{long.replace('very', '', 1)} What is it?")) == []
    assert too_long(sentences("What is read is short. It is.")) == ["What is read is short."]
    assert too_long(sentences_of_help(f"Options:\n  --a N     short\n  --b       {long}\n")) == [f"--b {long}"]


@pytest.mark.full
def test_the_site_is_built_and_can_be_searched(tmp_path):
    done = subprocess.run([ROOT / "dev", "docs", tmp_path / "site"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mean_of_micro_batch_means" in (tmp_path / "site/search/search_index.json").read_text()
    for page in ("docs/tutorial_pytorch.html", "src/comm/README.html", "api/annotated.html"):
        assert any((tmp_path / "site" / name).exists() for name in (page, page.replace("README", "index"))), page


def test_relative_links_lead_somewhere():
    broken = []
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/README.md")]:
        prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)  # code has brackets of its own
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
            if "://" not in target and not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)} -> {target}")
    assert not broken, broken


def test_the_walk_of_a_micro_batch_has_at_most_twelve_stations_each_a_function_of_its_file():
    walk = (ROOT / "DESIGN.md").read_text().partition("## One micro-batch, from file to update")[2].partition("\n## ")[0]
    stations = re.findall(r"^\| (\d+) \| `([\w:]+)` \(`(src/[\w/.]+)`", walk, re.M)
    assert [int(number) for number, *_ in stations] == list(range(1, len(stations) + 1)) and 8 <= len(stations) <= 12
    assert len({name for _, name, _ in stations}) == len(stations), "a station is visited twice"
    for _, name, place in stations:
        text = "\n".join(source.read_text() for source in
                         ([ROOT / place] if place.endswith(".cpp") else sorted((ROOT / place).glob("*.cpp"))))
        function = name if place.endswith(".cpp") else name.partition("::")[2]  # a strategy's, an optimizer's
        assert re.search(rf"\b{function}\([^;]*?\{{", text), f"DESIGN.md: {place} has no {name}"


def test_the_step_does_only_the_step():
    text = (ROOT / "src/train/step.cpp").read_text()
    for word in ["fopen", "ofstream", "printf", "std::cout", "std::cerr", "getenv", "chrono"]:
        assert word not in text, f"step.cpp must not have files, flags, timers or printing in it: {word}"


def test_every_room_explains_itself():
    for line in (ROOT / "src/rooms.txt").read_text().splitlines():
        room = line.split(":")[0]
        if room and not room.startswith("#"):
            assert (ROOT / "src" / room / "README.md").exists(), f"src/{room}/README.md is missing"
