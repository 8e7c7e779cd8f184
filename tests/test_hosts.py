"""Several hosts on one machine, under mpirun: runs, proofs, bytes across, and what is refused."""
import json
import math
import re

import pytest
from conftest import built_backends, full, isograd, rows_of
from run_files import counting, text_tables, write_documents, write_run

TABLES = text_tables(8, 2, 48, (48, 2, 6, 3, 8, 48), train={"steps": 3, "dtype": "float64"}, optimizer={"kind": "sgd"},
                     schedule={"kind": "constant", "peak": 0.1, "warmup": 0}, verify={"at_end": False})


def written(folder):
    """The configuration and its text in a folder."""
    write_documents(folder, 16, counting)
    return write_run(folder / "run.toml", TABLES)


@pytest.fixture
def config(tmp_path):
    if "mpi" not in built_backends():
        pytest.skip("needs an MPI (libopenmpi-dev and openmpi-bin), which this build was configured without")
    return written(tmp_path)


def on(hosts, verb, config, *arguments, status=0):
    return isograd(verb, config, "--ranks", len(hosts.split(",")), "--backend", "shm+mpi", *arguments, status=status,
                   ISOGRAD_HOST=hosts)


def test_a_run_is_that_of_one_process_and_counts_what_leaves_hosts(config, tmp_path):
    """Two hosts of two: replicas across, tp within; then the same ranks assigned in turns, which puts tp across."""
    isograd("train", config, f"run.directory={tmp_path}/one", status=0)
    alone = rows_of(tmp_path / "one")
    assert all("bytes_across_hosts" not in row for row in alone)
    across = {}
    for hosts in ("a,a,b,b", "a,b,a,b"):
        done = on(hosts, "train", config, "--memory", "parallel.tp=2", f"run.directory={tmp_path}/{hosts}")
        rows = rows_of(tmp_path / hosts)
        assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in alone], rel=1e-10)
        assert [row["norm"] for row in rows] == pytest.approx([row["norm"] for row in alone], rel=1e-10)
        across[hosts] = [row["bytes_across_hosts"] for row in rows]
        by_rank = [tuple(map(int, one)) for one in re.findall(r"rank \d: (\d+) bytes across hosts, (\d+) within", done.stderr)]
        assert len(by_rank) == 4 and sum(bytes_ for bytes_, _ in by_rank) == across[hosts][-1]
        told = re.search(r"2 hosts \((.*)\), across: (.*), within: (.*)", done.stderr)
        assert told[1] == ("a: ranks 0-1; b: ranks 2-3" if hosts == "a,a,b,b" else "a: ranks 0, 2; b: ranks 1, 3")
        assert (told[2], told[3]) == (("dp_replicate", "tp") if hosts == "a,a,b,b" else ("tp", "dp_replicate"))
        assert ("tp crosses hosts (rank 0 on a, rank 1 on b)" in done.stderr) == (hosts == "a,b,a,b")
    # Each element of the gradient crosses there and back, 8 bytes each time: once for both tp ranks where it is cut or
    # summed over them, else for each. A few KB of counts, losses and norms come on top.
    told = json.loads(isograd("layout", config, "--ranks", 4, "parallel.tp=2", "--json").stdout)
    formula = sum(2 * 8 * math.prod(one["whole_shape"]) * (1 if one["cuts"] or "tp" in one["summed_along"] else 2)
                  for one in told["parameters"])
    assert formula <= across["a,a,b,b"][-1] < formula + 8192
    assert across["a,b,a,b"][-1] != across["a,a,b,b"][-1]


@pytest.mark.parametrize("hosts, sets", [
    ("a,a,a,b,b,b", ["parallel.pp=2"]),  # stages across
    # A host ends between ranks along tp: copies of norms are sums over data ranks that lie on hosts otherwise.
    ("a,a,a,b,b,b", ["parallel.tp=2", "parallel.sequence_parallel=false"]),
    full("a,a,a,b,b,b", ["parallel.tp=3"]),  # replicas across
    full("a,a,a,b", ["parallel.pp=2", "parallel.tp=2"])])  # a stage on two hosts
def test_verify_proves_steps_on_several_hosts(config, hosts, sets):
    done = on(hosts, "verify", config, *sets, "batch.packs_per_step=7")
    assert f"parity PASS: {len(hosts.split(','))} ranks" in done.stdout


@pytest.mark.full
def test_verify_proves_every_layout_on_two_hosts(config, tmp_path):
    on("a,a,b,b", "verify", config, "--layout", "all", "--json", tmp_path / "v.json", "train.dtype=float32")
    grades = json.loads((tmp_path / "v.json").read_text())["grades"]
    assert len(grades) > 8
    assert all(grade["E1"]["state"] == grade["E3"]["state"] == "pass" for grade in grades.values())


def test_layout_shows_hosts(config):
    arguments = ["--ranks", 8, "--hosts", 2, "parallel.backend=shm+mpi", "parallel.tp=2", "parallel.strategy=zero1"]
    text = isograd("layout", config, *arguments, "parallel.replicas=2").stdout
    assert re.search(r"^dp_replicate .* across ", text, re.M) and re.search(r"^tp .* within ", text, re.M)
    assert "2 hosts (host0: ranks 0-3; host1: ranks 4-7), across: dp_replicate, within: dp_shard, tp." in text
    assert "crosses hosts" not in text
    text = " ".join(isograd("layout", config, *arguments).stdout.split())  # the sentence goes over lines
    assert "dp_shard crosses hosts (rank 0 on host0, rank 4 on host1)" in text
    mesh = json.loads(isograd("layout", config, *arguments, "--json").stdout)["mesh"]
    assert mesh["host_of_rank"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert {axis["name"]: axis["across_hosts"] for axis in mesh["axes"]}["dp_shard"] is True


@pytest.mark.parametrize("arguments, said", [
    (["--ranks", 2, "--hosts", 3], "a rank for each"), (["--ranks", 2, "--hosts", 0], "at least one host"),
    (["--ranks", 4, "--hosts", 2], "parallel.backend = \"shm+mpi\"")])
def test_hosts_that_cannot_be_are_refused(config, arguments, said):
    assert said in isograd("layout", config, *arguments, status=2).stderr


def test_what_one_host_alone_can_do_is_refused(config):
    assert "share" in on("a,b", "train", config, "parallel.strategy=zero1", "parallel.share_parameters=on", status=2).stderr
