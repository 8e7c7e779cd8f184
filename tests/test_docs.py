"""What the documents quote is what the code says."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent


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


def test_relative_links_lead_somewhere():
    broken = []
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/**/README.md")]:
        prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)  # code has brackets of its own
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
            if "://" not in target and not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)} -> {target}")
    assert not broken, broken


def test_the_step_is_short_and_does_only_the_step():
    text = (ROOT / "src/train/step.cpp").read_text()
    assert len(text.splitlines()) < 150
    for word in ["fopen", "ofstream", "printf", "std::cout", "std::cerr", "getenv", "chrono"]:
        assert word not in text, f"step.cpp must not have files, flags, timers or printing in it: {word}"


def test_every_room_explains_itself():
    for line in (ROOT / "src/rooms.txt").read_text().splitlines():
        room = line.split(":")[0]
        if room and not room.startswith("#"):
            assert (ROOT / "src" / room / "README.md").exists(), f"src/{room}/README.md is missing"
