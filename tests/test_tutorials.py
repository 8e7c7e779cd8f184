"""The tutorials run as they are pasted, from the first line to the last, in an empty folder.

Marks of a page: `<!-- file: NAME -->` above a block that the reader saves, `<!-- change: NAME -->` above one whose lines stand for
others (`# in place of: LINE`), `<!-- fails -->` above commands with status 1 or 2, `<!-- says -->` above lines that the last command
printed, with other figures (`says: as before`: with those of the command before, to 1e-4), and `<!-- needs: ... -->` above commands that
this machine has run already."""
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from conftest import BINARY, BUILD, ROOT, on_loopback
from test_python_prove import corrected

PAGES = sorted(ROOT.glob("docs/tutorial_*.md"))
BLOCK = re.compile(r"(?:<!-- (file|change|fails|says|needs)(?:: (.*?))? -->\n)?```(\S*)\n(.*?)^```", re.M | re.S)
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]\d+)?k?")


def words(text):
    return " ".join(NUMBER.sub("#", text).split())


def follow(page, folder, environment):
    """Does in the folder what the page says; the number of commands that ran."""
    before, printed, count = "", "", 0
    for mark, name, language, text in BLOCK.findall(page.read_text()):
        if mark == "file":
            (folder / name).write_text(text)
        elif mark == "change":
            (folder / name).write_text(corrected((folder / name).read_text(), text))
        elif mark == "says":
            for line in text.splitlines():
                assert words(line) in words(printed), f"{page.name} shows a line that was not printed: {line}\n{printed}"
                if name == "as before":  # a line is known by what stands before its first two blanks
                    now, then = ([float(number[0]) for same in text.splitlines() if same.split("  ")[0] == line.split("  ")[0]
                                  for number in NUMBER.finditer(same)] for text in (printed, before))
                    assert now and now == pytest.approx(then, rel=1e-4), f"{page.name}: {line}\n{before}\n{printed}"
        elif language == "bash" and mark != "needs":
            for command in text.splitlines():
                done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
                expected = (1, 2) if mark == "fails" else (0,)
                assert done.returncode in expected, f"{page.name}: {command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
                before, printed, count = printed, done.stdout + done.stderr, count + 1
        else:
            assert mark == "needs", f"{page.name}: a block that nobody runs: {text}"
    return count


@pytest.fixture
def reader(request, tmp_path):
    """(an empty folder, the variables of a reader whose PATH has isograd, and python and torchrun of an environment with the package;
    for C++ isograd is installed in ~/.local)"""
    tools, folder = tmp_path / "tools", tmp_path / "reader"
    tools.mkdir(), folder.mkdir()
    python = request.getfixturevalue("warm") if "pytorch" in request.param else sys.executable
    if "cpp" in request.param:
        subprocess.run(["cmake", "--install", BUILD, "--prefix", tmp_path / ".local"], check=True, capture_output=True, timeout=300)
    for name, line in {"python": "", "torchrun": "-m torch.distributed.run"}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {python} -W ignore {line} "$@"\n')
        (tools / name).chmod(0o755)
    compiler = shutil.which("clang++-19") or shutil.which("c++")
    return folder, on_loopback(PATH=f"{tools}:{BINARY.parent}:{os.environ['PATH']}", PYTHON=sys.executable, HOME=str(tmp_path), CXX=compiler)


@pytest.mark.parametrize("reader", [page.stem for page in PAGES], indirect=True)
def test_a_tutorial_runs_as_it_is_pasted(reader, request):
    assert follow(ROOT / f"docs/{request.node.callspec.params['reader']}.md", *reader) >= 4


@pytest.mark.parametrize("fault, message", [("```bash\nfalse\n```\n", "false"), ("<!-- says -->\n```\nno such line\n```\n", "not printed"),
                                            ("```bash\necho 1\n```\n\n<!-- says -->\n```\n2 lines\n```\n", "not printed"),
                                            ("```bash\necho 'step 1  loss 1'\necho 'step 1  loss 2'\n```\n\n<!-- says: as before -->\n```\nstep 1  loss 1\n```\n", "loss 2"),
                                            ("```c++\nint x;\n```\n", "nobody runs")])
def test_a_page_that_does_not_hold_fails(fault, message, tmp_path):
    page = pathlib.Path(tmp_path / "tutorial.md")
    page.write_text(fault)
    with pytest.raises(AssertionError, match=message):
        follow(page, tmp_path, dict(os.environ))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_is_short(page):
    """At most 1,500 words, and 35 in a sentence."""
    prose = re.sub(r"^```.*?^```|<!--.*?-->|^\|.*?$", "", page.read_text(), flags=re.M | re.S)
    assert len(prose.split()) <= 1500
    for sentence in re.split(r"(?<=[.:;?!])\s+|\n\n|\n- |\n#+ |^#+ .*$", prose, flags=re.M):
        assert len(sentence.split()) <= 35, sentence
