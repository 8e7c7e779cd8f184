"""The command line: what is said about bad input, and with which status; every verb on something small.

Training itself is in test_train.py, stops, kills and full disks in test_train_ended.py. The binary comes from
ISOGRAD_BUILD_DIR (default build/release).
"""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import built_backends

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARY = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release")) / "bin/isograd"
LIMIT = 120  # seconds; what takes longer hangs

CONFIG = """
[run]
directory = "{folder}/run"
[data]
text = ["{folder}/text"]
cache = "{folder}/cache"
pack_length = 32
validation_fraction = 0.2
[batch]
packs_per_step = 4
packs_per_micro_batch = 2
[model]
hidden = 16
layers = 1
heads = 2
key_value_heads = 1
head_dim = 8
feed_forward = 24
max_positions = 64
[train]
steps = 3
evaluate_every = 2
evaluate_packs = 2
[parallel]
timeout_seconds = 30
[sample]
tokens = 8
"""


def isograd(*arguments, cwd=None, **environment):
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
             and not k.startswith(("OMPI_COMM_WORLD_", "PMIX_", "PMI_"))}
    return subprocess.run([str(BINARY), *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT, cwd=cwd,
                          env=dict(clean, **environment))


def refused(*arguments, status=2, **options):
    """What a refused call says; it must say it once, on standard error, in few lines."""
    done = isograd(*arguments, **options)
    assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    assert len(done.stderr.splitlines()) <= 4, done.stderr
    return done.stderr


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i:02}.txt").write_text(f"document {i}: " + "abc " * (3 + 7 * i % 23))
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


# What is not understood


def test_no_verb_and_unknown_verb_and_flag():
    assert "--help" in refused()
    assert "Did you mean train?" in refused("trian", "run.toml")
    assert "Did you mean --ranks?" in refused("train", "run.toml", "--rank", "2")
    assert "See isograd train --help." in refused("train")
    assert "See isograd data pack --help." in refused("data", "pack")
    assert "--ranks" in refused("train", "run.toml", "--ranks", "many")
    assert "--ranks" in refused("train", "run.toml", "--ranks", "0")
    assert "naive" in refused("verify", "run.toml", "--layout", "zero9")


def test_help_of_every_verb_is_there_and_fits_a_terminal():
    top = isograd("--help")
    assert top.returncode == 0
    for verb in ["train", "verify", "compare", "sample", "data", "bench", "config", "layout", "schedule", "launch"]:
        assert re.search(rf"^\s+{verb}\s", top.stdout, re.M), top.stdout
    assert "step-ours" not in isograd("bench", "--help").stdout
    for verb in [["train"], ["verify"], ["compare"], ["sample"], ["data"], ["data", "pack"], ["data", "show"], ["bench"],
                 ["bench", "step"], ["bench", "comm"], ["bench", "wrapped"], ["config"], ["layout"], ["schedule"],
                 ["launch"]]:
        done = isograd(*verb, "--help")
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 120, done.stdout
    assert re.match(r"isograd \d+\.\d+\.\d+, LibTorch 2\.13", isograd("--version").stdout)


# Configuration


def test_unknown_key_names_line_and_nearest_key(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("[data]\n\npack_lenght = 3\n")
    for verb in [["train"], ["verify"], ["config"], ["train", "--ranks", "3"]]:
        said = refused(*verb, path)
        assert f"{path}:3" in said and 'Did you mean "data.pack_length"?' in said, said


@pytest.mark.parametrize("text, parts", [
    ("[data]\npack_length = \"long\"\n", [":2", "the text \"long\"", "integer, at least 1"]),
    ("[data]\npack_length = 0\n", [":2", "found 0", "at least 1"]),
    ("[optimizer]\nkind = \"adam\"\n", [":2", "one of \"adamw\", \"sgd\"", "Did you mean \"adamw\"?"]),
    ("[train\nsteps = 3\n", [":1", "TOML"]),
    ("[model]\nheads = 3\nkey_value_heads = 2\n", ["model.key_value_heads"]),
    ("[optimizer]\nmomentum = 0.5\n", ["no effect"]),
])
def test_bad_configuration(tmp_path, text, parts):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    said = refused("config", path)
    for part in [str(path), *parts]:
        assert part in said, said


def test_missing_files_and_folders(tmp_path):
    assert "none.toml" in refused("train", tmp_path / "none.toml")
    assert str(tmp_path) in refused("train", tmp_path)


def test_bad_override_names_the_flag(config):
    assert "--set train.setps=3" in refused("train", config, "--set", "train.setps=3")
    assert 'Did you mean "train.steps"?' in refused("train", config, "--set", "train.setps=3")
    assert "--set train.steps=few" in refused("train", config, "--set", "train.steps=few")
    assert "section.key=value" in refused("train", config, "--set", "train.steps")
    assert "parallel.backend" in refused("train", config, "--backend", "carrier-pigeon")


def test_overrides_and_files_give_what_config_prints(config):
    done = isograd("config", config, "--set", "train.steps=77", "--set", "data.text=[\"a\", \"b c\"]", "--set",
                   "sample.prompt=[x]")
    assert done.returncode == 0, done.stderr
    assert "steps = 77" in done.stdout and 'text = ["a", "b c"]' in done.stdout and 'prompt = "[x]"' in done.stdout
    again = config.parent / "again.toml"
    again.write_text(done.stdout)
    assert isograd("config", again).stdout == done.stdout


def test_documentation_is_generated_from_the_table():
    done = isograd("config", "--markdown")
    assert done.returncode == 0
    assert done.stdout == (ROOT / "docs/configuration.md").read_text(), \
        "run: isograd config --markdown > docs/configuration.md"


def test_every_key_is_read_somewhere():
    """A key that nobody reads would be a promise that is not kept."""
    table = (ROOT / "src/train/config_table.cpp").read_text()
    fields = re.findall(r'KEY\(\s*"[\w.]+",\s*([\w.]+)', table)
    assert len(fields) > 40
    read = "".join(p.read_text() for p in [*ROOT.glob("src/train/*.cpp"), *ROOT.glob("src/verify/*.cpp"),
                                           *ROOT.glob("src/cli/*.cpp")]
                   if not p.name.startswith("config") and not p.name.endswith("_test.cpp"))
    # Handed over as a whole to the model and the optimizer, which test their own options.
    whole = {"model.shape": "model.shape", "optimizer.adamw": "optimizer.adamw", "schedule": "config.schedule"}
    # Asked through a function; what other trainers call the reduction only has to agree with the axes.
    asked = {"loss.normalise_over": "normalises_by_replica", "loss.dp_replicate_reduction": "normalises_by_replica"}
    for field in fields:
        name = next((used for prefix, used in whole.items() if field.startswith(prefix + ".")), asked.get(field, field))
        assert re.search(rf"\b{re.escape(name)}\b", read), f"{field} is read by nobody"


def test_example_configurations_are_valid():
    examples = list(ROOT.glob("examples/*.toml"))
    assert examples
    for example in examples:
        assert isograd("config", example).returncode == 0, example


# Ranks


def test_more_ranks_than_packs_is_said_once(config):
    said = refused("train", config, "--ranks", 5)
    assert "more ranks than packs" in said and "--set batch.packs_per_step=5" in said
    assert said.count("ConfigError") == 1


def test_bad_input_found_by_the_ranks_is_said_once(config, backend):
    done = isograd("train", config, "--ranks", 2, "--backend", backend, "--set",
                   f"data.text={config.parent}/nothing-here")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("ConfigError") == 1, done.stderr


def test_ranks_flag_against_a_launcher(config):
    # Alone, but told by the environment that it is one of one.
    said = refused("train", config, "--ranks", 2, RANK="0", WORLD_SIZE="1")
    assert "WORLD_SIZE=1" in said


def test_launch_gives_ranks_and_passes_the_status_on():
    script = "import os, sys; e = os.environ; sys.stdout.write(f\"{e['RANK']} {e['WORLD_SIZE']} {sys.argv[1:]}\\n\")"
    done = isograd("launch", "-n", 3, "--", sys.executable, "-c", script, "--x", "[a,b]", "--", "-n")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{r} 3 ['--x', '[a,b]', '--', '-n']" for r in range(3)]
    assert isograd("launch", "-n", 2, "--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    kill = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)"
    done = isograd("launch", "-n", 2, "--grace", "0.2", "--", sys.executable, "-c", kill)
    assert done.returncode == 3 and "rank 1" in done.stderr, done.stderr
    assert "carrier-pigeon" in refused("launch", "-n", 2, "--backend", "carrier-pigeon", "--", "true")
    assert "no command" in refused("launch", "-n", 2)
    assert "--ranks" in refused("launch", "--", "true")
    assert isograd("launch", "-n", 1, "--", "/no/such/program").returncode != 0


@pytest.mark.both_backends
def test_launch_through_mpirun(backend):
    """What mpirun's ranks see, their output with the rank in front, and what becomes of their status."""
    name = {"shm": "RANK", "mpi": "OMPI_COMM_WORLD_RANK"}[backend]
    launch = ["launch", "-n", 2, "--backend", backend, "--prefix", "--", sys.executable, "-c"]
    done = isograd(*launch, f"import os, sys; print('I am', os.environ['{name}'], sys.argv[1:])", "--x", "[a,b]")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}] I am {r} ['--x', '[a,b]']" for r in range(2)]
    assert isograd(*launch, "raise SystemExit(7)").returncode == 7
    done = isograd(*launch, f"import os, time\nif os.environ['{name}'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert done.returncode == 3 and "signal 9" in done.stderr, done.stderr


def test_mpi_is_there_or_the_build_says_how_to_get_it(config):
    if "mpi" in built_backends():
        assert isograd("launch", "-n", 2, "--backend", "mpi", "--", "true").returncode == 0
        return
    for command in (["launch", "-n", 2, "--backend", "mpi", "--", "true"], ["train", config, "--backend", "mpi"]):
        said = refused(*command)
        assert "libopenmpi-dev" in said and "--backend shm" in said


@pytest.mark.both_backends
def test_mpirun_by_hand(config, backend):
    """Ranks that mpirun starts find one another over either backend, without a MASTER_ADDR."""
    if "mpi" not in built_backends():
        pytest.skip("needs mpirun (openmpi-bin), as this build was configured without MPI")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.getuid() == 0 else {}
    done = subprocess.run(["mpirun", "-n", "2", "--oversubscribe", str(BINARY), "train", str(config), "--backend",
                           backend], capture_output=True, text=True, timeout=LIMIT, env={**os.environ, **root})
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"parity\s+.*PASS", done.stdout), done.stdout
    assert done.stdout.count("PASS") == 1, done.stdout


# Every verb on something small


def test_train_verify_and_sample(config, backend):
    log = config.parent / "log.jsonl"
    done = isograd("train", config, "--ranks", 2, "--backend", backend, "--json-log", log)
    assert done.returncode == 0, done.stderr
    assert re.search(r"parity\s+.*PASS", done.stdout), done.stdout
    assert done.stderr.count("proving the gradient") == 1, done.stderr  # before it: no signal ends it
    run = config.parent / "run"
    assert (run / "report.html").exists() and (run / "config.toml").exists()
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == [1, 2, 3]
    assert [row["step"] for row in steps if "validation_loss" in row] == [2, 3]

    first = isograd("sample", run, "--prompt", "document", "--tokens", 12, "--seed", 4)
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("document")
    assert isograd("sample", run, "--prompt", "document", "--tokens", 12, "--seed", 4).stdout == first.stdout
    checkpoint = max((run / "checkpoints").glob("step-*"))
    assert isograd("sample", checkpoint, "--prompt", "document", "--tokens", 12, "--seed", 4).stdout == first.stdout

    verdict, page = config.parent / "verdict.json", config.parent / "verdict.html"
    done = isograd("verify", config, "--ranks", 2, "--backend", backend, "--layout", "naive", "--layout", "bucketed",
                   "--json", verdict, "--report", page)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
    told = json.loads(verdict.read_text())
    assert told["verdict"] == "pass" and told["parameters"] and set(told["grades"]) == {"naive", "bucketed"}
    assert "<!doctype html>" in page.read_text()


def test_what_is_printed_must_arrive(config):
    """A full disk, here the device that is always full, is no success."""
    for arguments in (["--help"], ["--version"], ["config", config], ["train", "--help"],
                      ["launch", "-n", 2, "--prefix", "--", "echo", "said"],
                      ["train", config, "--ranks", 2, "--set", "train.steps=1"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([str(BINARY), *map(str, arguments)], stdout=full, stderr=subprocess.PIPE, text=True,
                                  timeout=LIMIT)
        assert done.returncode == 2, (arguments, done.returncode, done.stderr)
        assert done.stderr.count("ConfigError") == 1 and "output" in done.stderr, done.stderr


def test_a_single_host_needs_no_network(config):
    """Without a single interface, loopback included, ranks still find one another: no name server is asked."""
    alone = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("needs a kernel that lets this user make a network namespace (unshare --net)")
    done = subprocess.run([*alone, str(BINARY), "train", str(config), "--ranks", "2"], capture_output=True, text=True,
                          timeout=LIMIT)
    assert done.returncode == 0, done.stderr
