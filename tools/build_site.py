"""`./dev docs [FOLDER]`: the pages as a site with search (mkdocs-material), and the API of the public headers (Doxygen).

    ./dev docs                # build/site/index.html: open it in a browser, no server is needed
    ./dev docs FOLDER

docs/README.md is the map: its sections are the site's. A link that leads nowhere is an error.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
SETTINGS = {
    "site_name": "isograd",
    "site_description": "Distributed training that computes the same gradient as one device",
    "theme": {"name": "material", "font": False, "features": ["navigation.sections", "navigation.indexes", "search.highlight", "content.code.copy"],
              "palette": [{"media": f"(prefers-color-scheme{scheme})", "scheme": name, "primary": "indigo",
                           "toggle": {"icon": f"material/{icon}", "name": f"Change to {other}"}}
                          for scheme, name, icon, other in (("", "default", "brightness-auto", "light"),  # the system's, whenever it changes
                                                            (": light", "default", "weather-night", "dark"),
                                                            (": dark", "slate", "weather-sunny", "the system's"))]},
    "extra_css": ["site.css"],
    "plugins": ["search", "offline"],
    "markdown_extensions": ["tables", "fenced_code", "pymdownx.highlight", "pymdownx.superfences", "md_in_html", {"toc": {"permalink": True}}],
    "validation": {"nav": {"not_found": "ignore", "omitted_files": "ignore"}, "links": {"unrecognized_links": "ignore", "anchors": "warn"}},
}
# Wide tables: less room around cells, a shadow where there is more, and the row's name stays in sight on a telephone.
SITE_CSS = """
[data-md-color-scheme=default]{--md-default-fg-color--light:#0009}
[data-md-color-scheme=slate]{--md-default-fg-color--light:#e2e4e9b0;--md-typeset-a-color:#82a5ea;--md-code-hl-number-color:#f08f8f}
.md-typeset pre>code{font-size:.75em}
.md-typeset td code{white-space:normal;overflow-wrap:anywhere}
.md-typeset table:not([class]){overflow:visible;background:none}
.md-typeset table:not([class]) :is(th,td){min-width:4.6em;padding:.5em}
.md-typeset__scrollwrap{background:linear-gradient(90deg,var(--md-default-bg-color) 40%,transparent) 0 0/48px 100% no-repeat local,
linear-gradient(270deg,var(--md-default-bg-color) 40%,transparent) 100% 0/48px 100% no-repeat local,
linear-gradient(90deg,#8888,transparent) 0 0/12px 100% no-repeat scroll,
linear-gradient(270deg,#8888,transparent) 100% 0/12px 100% no-repeat scroll}
@media screen and (max-width:45em){.md-typeset table:not([class]) :is(th,td):first-child:not(:last-child){position:sticky;left:0;
min-width:7em;max-width:40vw;background:var(--md-default-bg-color)}}
@media print{.md-typeset__scrollwrap{background:none}.md-typeset table:not([class]){font-size:7.5pt}.md-typeset table:not([class]) :is(th,td){padding:2px 4px}
.md-typeset pre>code{white-space:pre-wrap}}
"""
API_CSS = """
@media screen and (prefers-color-scheme:dark){html{background:#fff;filter:invert(.9) hue-rotate(180deg)}}
.arrow{color:#555}@media (max-width:45em){.memberdecls td:not(.memItemLeft),.memname td,.line{white-space:normal!important;overflow-wrap:anywhere}}
"""
DOXYGEN = """
PROJECT_NAME = isograd
INPUT = {root}/include/isograd {work}/api.dox
STRIP_FROM_PATH = {root}/include
OUTPUT_DIRECTORY = {folder}
HTML_OUTPUT = api
HTML_EXTRA_STYLESHEET = {work}/api.css
HTML_INDEX_NUM_ENTRIES = 200
GENERATE_LATEX = NO
EXTRACT_ALL = YES
HIDE_UNDOC_RELATIONS = YES
QUIET = YES
HAVE_DOT = NO
WARN_IF_UNDOCUMENTED = NO
MACRO_EXPANSION = YES
FILTER_PATTERNS = *.hpp="sed -E '/^\\/\\/ ----/d; 1s#^// #/// @file\\n/// #; s#^( *)// #\\1/// #; s#([;,{{)] +)// #\\1///< #'"
"""


def title(page):
    return re.search(r"^# (.+)$", page.read_text(), re.M)[1]


def sections():
    """{section of the map: [its pages, of docs/ or another folder of the repository]}"""
    found = {}
    for name, text in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (ROOT / "docs/README.md").read_text(), re.M | re.S):
        pages = [(ROOT / "docs" / link).resolve() for link, _ in LINK.findall(text)]
        found[name] = list(dict.fromkeys(page for page in pages if page.suffix == ".md"))
    return found


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [pathlib.Path(name) for name in listed.stdout.split("\0") if name]


def pages_into(folder):
    """The pages, with the files that they link to; a link to a folder leads to its README or its first file."""
    files = set(tracked())
    for path in [path for path in files if path.suffix == ".md" or path.parts[0] == "docs"]:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".md":
            shutil.copy(ROOT / path, folder / path)
            continue

        def led(found, page=path):
            link, anchor = found.groups()
            if "://" in link or link.startswith("mailto:"):
                return found[0]
            target = pathlib.Path(os.path.normpath(page.parent / link))
            if (ROOT / target).is_dir():
                inside = sorted(file for file in files if target in file.parents)
                link = os.path.relpath(next((file for file in inside if file.name == "README.md"), inside[0]), page.parent)
                target = pathlib.Path(os.path.normpath(page.parent / link))
            if target.suffix != ".md" and target in files:
                (folder / target).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / target, folder / target)
            return f"]({link}{anchor or ''})"

        (folder / path).write_text(LINK.sub(led, (ROOT / path).read_text()))


def api_page():
    """The first page of the API: each header with the first sentence of its comment."""
    lines = ["/** @mainpage The API in C++", "<a href=\"../index.html\">The documentation</a> has tutorials and guides. The public headers:"]
    for header in sorted((ROOT / "include/isograd").glob("*.hpp")):
        comment = " ".join(line[3:] for line in header.read_text().partition("#pragma once")[0].splitlines())
        first = re.split(r"\.(?: (?=[A-Z])|$)", comment)[0]
        lines.append(f'- @ref {header.name} "{header.name}": ' + re.sub(r"([@#\\<>&%*_])", r"\\\1", first) + ".")
    return "\n".join([*lines, "*/", ""])


def main():
    parser = argparse.ArgumentParser(usage="./dev docs [FOLDER]", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", default=ROOT / "build/site", type=pathlib.Path)
    folder = parser.parse_args().folder.resolve()
    work = ROOT / "build/docs"
    shutil.rmtree(work / "pages", ignore_errors=True)
    pages_into(work / "pages")
    (work / "pages/site.css").write_text(SITE_CSS)
    (work / "api.css").write_text(API_CSS)
    (work / "api.dox").write_text(api_page())
    rooms = sorted(path for path in tracked() if path.parts[0] == "src" and path.name == "README.md")
    nav = [{"isograd": "README.md"}, {"The map": "docs/README.md"}]
    nav += [{name: [{title(page): str(page.relative_to(ROOT))} for page in pages]} for name, pages in sections().items()]
    nav += [{"Rooms of the code": [{str(path.parent.relative_to("src")): str(path)} for path in rooms]}, {"API in C++": "api/index.html"}]
    (work / "mkdocs.yml").write_text(json.dumps({**SETTINGS, "nav": nav, "docs_dir": str(work / "pages"), "site_dir": str(folder)}))  # JSON is YAML
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", work / "mkdocs.yml"])
    if built.returncode:
        sys.exit("docs: mkdocs failed (above)")
    if shutil.which("doxygen") is None:
        sys.exit("docs: found no doxygen; expected it for the API. Install it: apt-get install doxygen")
    made = subprocess.run(["doxygen", "-"], input=DOXYGEN.format(root=ROOT, folder=folder, work=work), text=True)
    if made.returncode:
        sys.exit("docs: doxygen failed (above)")
    print(f"built {folder}/index.html")


if __name__ == "__main__":
    main()
