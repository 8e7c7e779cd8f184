"""Completions by bash, zsh and fish themselves, each asked for all words that could stand at the end of a line; and the man page."""
import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest
from conftest import ran, refused

# How a shell is started, and what gives it a key, C-x a, that puts all matches into the line.
ON_A_TERMINAL = {
    "bash": ("bash --norc --noprofile -i", r"""bind '"\C-xa": insert-completions'"""),
    "zsh": ("zsh -f -i", "autoload -U compinit; compinit -u -D; zle -C all complete-word _generic; bindkey '^Xa' all; "
            "zstyle ':completion:all:*' completer _all_matches _complete; zstyle ':completion:all:*' insert yes"),
}


class Terminal:
    """bash or zsh on a terminal, where `isograd` prints its words."""

    def __init__(self, shell, folder):
        command, key = ON_A_TERMINAL[shell]
        self.process, self.terminal = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            os.environ.update(TERM="dumb", HOME=str(folder.parent), LC_ALL="C.UTF-8")
            os.execvp(command.split()[0], command.split())
        self.said(f"{key}; source ../completions.{shell}; isograd() {{ printf '<%s>' \"$@\"; echo '</e''nd>'; }}; isograd\n")

    def said(self, line):
        os.write(self.terminal, line.encode())
        text, until = "", time.monotonic() + 60
        while "</end>" not in text:
            assert select.select([self.terminal], [], [], until - time.monotonic())[0], text
            text += os.read(self.terminal, 65536).decode(errors="replace")
        return re.findall(r"<([^<>]*)>", text[:text.index("</end>")].splitlines()[-1])

    def completed(self, line):
        words, given = self.said(f"isograd {line}\x18a\n"), line.split()
        before = given if line[-1:] in ("", " ") else given[:-1]
        assert words[:len(before)] == before, words
        return [] if words == given else words[len(before):]

    def close(self):
        os.write(self.terminal, b"exit\n")
        os.close(self.terminal)
        os.waitpid(self.process, 0)


class Fish:
    def __init__(self, shell, folder):
        self.folder = folder

    def completed(self, line):
        done = subprocess.run(["fish", "-N", "-c", "source ../completions.fish; complete -C $argv[1]", f"isograd {line}"], cwd=self.folder,
                              env={**os.environ, "HOME": str(self.folder.parent)}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return [row.split("\t")[0].rstrip("/") for row in done.stdout.splitlines()]

    def close(self):
        pass


@pytest.fixture(scope="module", params=["bash", "zsh", "fish"])
def shell(request, tmp_path_factory):
    """A shell in a folder with two files and two folders."""
    if not shutil.which(request.param):
        pytest.skip(f"needs {request.param}, which is not installed (a package of this name)")
    folder = tmp_path_factory.mktemp(request.param) / "here"
    for name in ("runs", "dumps"):
        (folder / name).mkdir(parents=True)
    for name in ("run one.toml", "rest.txt"):
        (folder / name).touch()
    (folder.parent / f"completions.{request.param}").write_text(ran("completions", request.param).stdout)
    opened = (Fish if request.param == "fish" else Terminal)(request.param, folder)
    yield opened
    opened.close()


STRATEGIES = {"naive", "overlapped", "bucketed", "zero1", "zero2", "zero3"}
LINES = [  # the words that could stand where the line's last one does; without what is before an "="
    ("s", {"sample", "schedule", "serve"}), ("data ", {"pack", "show"}), ("data p", {"pack"}), ("--color never serve st", {"status"}),
    ("train --re", set()), ("train --ra", {"--ranks"}), ("verify --re", {"--report"}), ("data pack --o", {"--out", "--overwrite"}),
    ("verify run.toml --layout ", STRATEGIES | {"all", "meshes"}), ("verify --layout zero2 --layout zero9", set()),
    ("train --device ", {"cpu", "cuda", "auto"}), ("train --backend s", {"shm", "shm+mpi"}), ("train --backend=s", {"shm", "shm+mpi"}),
    ("compare --color a", {"auto", "always"}), ("compare --color red", set()), ("compare --color=n", {"never"}),
    ("plan --cluster he", {"here"}), ("plan --cluster zz", set()), ("plan --dtype float", {"float64", "float32", "float8"}),
    ("schedule --kind z", {"zb-h1", "zb-v"}), ("bench step --case s", {"small"}), ("bench --as sc", {"scalar"}),
    ("train --set parallel.str", {"parallel.strategy="}), ("train --set parallel.strategy=z", {"zero1", "zero2", "zero3"}),
    ("train --set parallel.strategy=", STRATEGIES | {"ddp", "fsdp"}), ("train --set nothing.of", set()), ("train --set train.dtype=int", set()),
    ("serve --set train.", set()), ("serve --set parallel.devi", {"parallel.device="}), ("train --set verify.at_end=", {"true", "false"}),
    ("train --set data.text=re", {"rest.txt"}), ("train --set data.text=r", {"run one.toml", "rest.txt", "runs"}),
    ("train r", {"run one.toml", "rest.txt", "runs"}), ("report ", {"runs", "dumps"}), ("report re", set()), ("compare d", {"dumps"}),
    ("verify --report re", {"rest.txt"}), ("sample --tokenizer b", {"bytes"}), ("sample --tokenizer r", {"run one.toml", "rest.txt", "runs"}),
    ("train --ranks ", set()), ("completions ", {"bash", "zsh", "fish"}), ("help sc", {"schedule"}), ("nothing --d", set()),
    ("launch -n 2 -- re", {"rest.txt"}),
]


@pytest.mark.parametrize("line, words", LINES, ids=[line for line, _ in LINES])
def test_a_line_is_completed_with_what_can_follow(shell, line, words):
    found = shell.completed(line)
    assert {re.sub(r"^.*=(?=.)", "", word) for word in found} == words and len(found) == len(words), found


@pytest.fixture(scope="module")
def helped():
    """What help says of the program, "", and of each verb."""
    top = ran("--help").stdout
    return {"": top, **{verb: ran(verb, "--help").stdout for verb in verbs_in(top)}}


def verbs_in(said):
    return set(re.findall(r"^  ([a-z]+) ", said.partition("Subcommands:")[2].partition("\n\n")[0], re.M))


def options_in(said):
    names = re.findall(r"^  (--?[a-zA-Z-]+(?:,--[a-z-]+)*)", said, re.M)  # "-n,--ranks", "--key-value-heads,--key-heads"
    return {name for row in names for name in row.split(",") if name.startswith("--")}


def test_every_verb_and_option_of_the_help_is_in_each_shell(shell, helped):
    """And no verb that it hides."""
    assert len(helped) > 10
    for verb, said in helped.items():
        assert set(shell.completed(f"{verb} --")) == options_in(said) != set(), verb
        if verbs := verbs_in(said):
            assert set(shell.completed(f"{verb} ".lstrip())) == verbs, verb


def test_a_shell_that_has_none_is_refused():
    said = refused("completions", "tcsh")
    assert "tcsh" in said and "bash" in said


READERS = {"groff": ["-man", "-ww", "-Tutf8"], "mandoc": ["-Tlint", "-Wwarning"]}


@pytest.mark.parametrize("program", READERS)
def test_the_man_page_is_read_without_warnings(program, tmp_path):
    if not shutil.which(program):
        pytest.skip(f"needs {program}, which is not installed")
    page, text = tmp_path / "isograd.1", ran("help", "--man").stdout
    for content, wrong in [(text, False), (text + ".nonsense\n", True)]:  # of which the program says something
        page.write_text(content)
        done = subprocess.run([program, *READERS[program], page], capture_output=True, text=True, timeout=60)
        said = (done.stdout if program == "mandoc" else done.stderr).splitlines()
        assert any("missing date" not in row for row in said) == wrong, said  # a date would make two builds differ


def test_the_man_page_has_every_verb_and_its_options(helped):
    sections = dict(re.findall(r"^\.SS \\fB([a-z ]+)\\fR.*\n((?:(?!\.S[SH]).*\n)+)", ran("help", "--man").stdout.replace("\\-", "-"), re.M))
    said = {verb: text for verb, text in helped.items() if verb} | {verb: ran(*verb.split(), "--help").stdout for verb in ("data pack", "bench step")}
    for verb, text in said.items():
        options = options_in(text.partition("\nOutput:")[0]) - {"--help"}
        assert set(re.findall(r"\\fB(--[a-z-]+)", sections[f"isograd {verb}"])) == options, verb
    assert not any(name.startswith("isograd bench step-") for name in sections)
