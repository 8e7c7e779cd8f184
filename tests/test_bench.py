"""`isograd bench` measures both sides, checks that they compute the same, and writes its records."""
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest

import processors
import warm_python
from conftest import BINARY, BUILD, ROOT, finished, full

COLD = dict(os.environ, PYTHON=sys.executable)


def bench(*arguments, of="step"):
    return finished(["bench", of, *map(str, arguments)], warm_python.for_peers(), ROOT, 300)


@pytest.mark.parametrize("of, packages", [("step", "torch==2.13.0"), ("optim", "torch==2.13.0"), ("comm", "torch==2.13.0"),
                                          ("wrapped", "torch==2.13.0"), ("tensor", "torch==2.13.0"),
                                          ("pipeline", "torch==2.13.0 numpy"), ("expert", "torch==2.13.0 transformers"),
                                          ("ranking", "torch==2.13.0 imbalanced-losses==0.6.0"), ("context", "torch==2.13.0"),
                                          ("serve", "torch==2.13.0 transformers peft==0.21.2 tinker==0.38.0")])
def test_what_a_peer_needs_is_said_before_anything_runs(tmp_path, of, packages):
    bare = tmp_path / "bare python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    more = ("--peer",) if of == "context" else ()
    for python in (bare, "/bin/false", "/nonexistent/python") if of == "step" else (bare,):
        done = bench(*more, "--python", python, of=of)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Traceback" not in done.stderr and len(done.stdout.splitlines()) == 1, done.stdout + done.stderr
        assert str(python) in done.stderr and f"bench {of}" in done.stderr
        assert (f"'{bare}' -m pip install {packages}`" in done.stderr) == (python == bare), done.stderr


def test_a_bench_says_how_far_it_is():
    done = bench("--case", "tiny", "--ranks", 1, "--seconds", 0.1)
    assert done.returncode == 0 and done.stderr.startswith("case 1 of 1: tiny, 1 rank, 0.0s, about 0.1s left\n"), done.stderr


RECORD = {"bench", "case", "ours", "peer", "peer_name", "unit", "ratio", "processor"}


def compared(tmp_path, *arguments, of="step", more=()):
    """The records of a comparison that ends well, and its output. `more`: fields that each record has besides."""
    done = bench(*arguments, "--json", tmp_path / "records.json", of=of)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT COMPARABLE" not in done.stdout
    records = json.loads((tmp_path / "records.json").read_text())
    for record in records:
        assert set(record) == RECORD | set(more) and record["bench"] == of
        ours, peer = record["ours"], record["peer"]
        larger_is_better = record["unit"] in ("tokens/s", "GB/s")
        assert record["ratio"] == pytest.approx(ours / peer if larger_is_better else peer / ours, rel=1e-9)
    return records, done.stdout


def not_compared(*arguments, of="step"):
    """The output of a comparison whose sides compute different things."""
    done = bench(*arguments, of=of)
    assert done.returncode == 1 and "NOT COMPARABLE" in done.stdout, done.stdout + done.stderr
    return done.stdout


def python_that(tmp_path, *lines):
    """A Python that runs these lines of a shell in place of a peer. What it is asked first, with -c, it answers: whether it has
    the peer's packages."""
    python = tmp_path / "python"
    python.write_text("\n".join(["#!/bin/sh", f'if [ "$3" = -c ]; then exec "{sys.executable}" "$@"; fi', *lines, ""]))
    python.chmod(0o755)
    return python


def broken_peer(tmp_path, name, right, wrong):
    """A Python that runs the named peer with a mistake, whatever script it is given."""
    script = (ROOT / "bench/peers" / name).read_text()
    assert script.replace(right, wrong) != script
    for sibling in (ROOT / "bench/peers").glob("*.py"):  # which it may import
        (tmp_path / sibling.name).write_text(sibling.read_text())
    (tmp_path / "broken.py").write_text(script.replace(right, wrong))
    warm = warm_python.for_peers()["PYTHON"]
    # The arguments before the script's own are -W ignore SCRIPT.
    return python_that(tmp_path, f'shift 3\nexec "{warm}" -W ignore "{tmp_path}/broken.py" "$@"')


def test_a_step_alone_is_compared_with_pytorch(tmp_path):
    """The peer starts from our weights through a Hugging Face directory: equal losses over several optimizer
    steps mean equal models, gradients, clipping and AdamW."""
    (record,), _ = compared(tmp_path, "--case", "tiny", "--ranks", 1, "--seconds", 0.1, more={"exposed_ms", "products_ms"})
    assert record["unit"] == "tokens/s" and record["products_ms"] > 0
    assert record["exposed_ms"] == 0  # nobody to wait for
    assert record["peer_name"] == "PyTorch eager"
    of_two = bench("--case", "tiny", "--ranks", 1, "--threads", 2, "--seconds", 0.1)
    assert of_two.returncode == 0 and "tiny, 1 rank of 2 threads" in of_two.stdout, of_two.stdout + of_two.stderr


def test_every_product_of_a_step_is_timed_by_every_library(tmp_path):
    """The fastest of each cannot be slower than the rule, which names the library of each."""
    (record,), said = compared(tmp_path, "--case", "tiny", of="product")
    assert record["unit"] == "ms" and 0 < record["peer"] <= record["ours"]
    has_brgemm = not processors.missing("avx2") and os.environ.get("ISOGRAD_PROCESSOR") != "scalar"
    for name in ("of weights", "scores"):
        assert re.search(f"{name} .* {'brgemm' if has_brgemm else 'blas'}", said), said


@pytest.mark.full
def test_compiled_pytorch_takes_part(tmp_path):
    """One process, compiled whole; its losses and norms agree as the others' do."""
    records, _ = compared(tmp_path, "--case", "tiny", "--ranks", 1, "--seconds", 0.1, "--compiled",
                          more={"exposed_ms", "products_ms"})
    assert [record["peer_name"] for record in records] == ["PyTorch eager", "PyTorch compiled"]


@pytest.mark.parametrize("level", [level if level == "avx2" else full(level) for level in sorted(processors.LEVELS)])
def test_every_side_is_held_to_a_lesser_processor(tmp_path, level):
    """--as: the libraries' own variables, also of the peer's process; said in each record."""
    python = python_that(tmp_path, f'env >> {tmp_path}/environment\nexec {sys.executable} "$@"')
    arguments = ["--case", "tiny", "--ranks", 1, "--seconds", 0.1, "--as", level, "--python", python]
    if processors.missing(level):
        done = bench(*arguments)
        assert done.returncode == 2 and "a level that the processor has" in done.stderr
        return
    (record,), said = compared(tmp_path, *arguments, more={"exposed_ms", "products_ms"})
    variables = processors.LEVELS[level]
    seen = (tmp_path / "environment").read_text().splitlines()
    assert {f"{name}={value}" for name, value in variables.items()} <= set(seen)
    assert record["processor"] in said.splitlines()[0]
    for part in (f"isograd {level}", f"oneDNN {variables['ONEDNN_MAX_CPU_ISA']}",
                 f"MKL {variables['MKL_ENABLE_INSTRUCTIONS']}"):
        assert part in record["processor"]


def test_every_strategy_is_compared_with_ddp_and_fsdp2(tmp_path):
    """All of them take part in one run and agree in losses and gradient norms."""
    records, _ = compared(tmp_path, "--case", "tiny", "--ranks", 2, "--seconds", 0.1, more={"exposed_ms", "products_ms"})
    strategies = {record["case"] for record in records}
    assert {"tiny, 2 ranks, bucketed", "tiny, 2 ranks, ZeRO-1", "tiny, 2 ranks, ZeRO-2",
            "tiny, 2 ranks, ZeRO-3", "tiny, 2 ranks, shared parameters",
            "tiny, 2 ranks, ZeRO-3, shared parameters"} <= strategies
    peers = {"PyTorch DDP over Gloo": "tokens/s", "PyTorch FSDP2 over Gloo": "tokens/s", "one PyTorch process": "ms"}
    assert len(records) == len(strategies) * len(peers)
    assert all(record["exposed_ms"] > 0 and record["unit"] == peers[record["peer_name"]] for record in records)


# A model on several ranks: the peers of the tiny case. Equal losses and norms over several optimizer steps.
@pytest.mark.parametrize("of, peers", [
    ("tensor", {"isograd, one rank", "PyTorch tensor parallel over Gloo", "one PyTorch process"}),
    ("pipeline", {"isograd, one rank", "PyTorch pipelining, 1F1B over Gloo", "one PyTorch process"}),
    ("expert", {"transformers' Mixtral", "transformers' Mixtral, looping", "PyTorch, all-to-all over Gloo, FSDP2",
                "isograd, all experts on each rank", "experts sharded over ranks, in halves"})])
def test_a_model_on_several_ranks_is_compared_with_pytorchs(tmp_path, of, peers):
    records, _ = compared(tmp_path, "--case", "tiny", "--seconds", 0.1, of=of)
    assert {record["peer_name"] for record in records} == peers and {record["unit"] for record in records} == {"ms"}
    assert of != "tensor" or len(records) == 8


@pytest.mark.full
def test_what_is_computed_while_tokens_travel_is_compared_without_a_peer(tmp_path):
    records, _ = compared(tmp_path, "--case", "shared-tiny", "--seconds", 0.1, of="expert")
    assert {record["case"] for record in records} == {
        "shared-tiny, 2 ranks, experts sharded, the shared one meanwhile",
        "shared-tiny, 2 ranks, experts sharded over ranks, in halves"}


LEARNING_RATE = 'lr=c["learning_rate"]'


@pytest.mark.parametrize("of, script, right, wrong, arguments, whose", [
    pytest.param("step", "llama_step.py", "torch.cat((-b, a), dim=-1)", "torch.cat((b, a), dim=-1)", ("--ranks", 1), "",
                 id="rotary embedding"),
    pytest.param("step", "llama_step.py", LEARNING_RATE, 'lr=2 * c["learning_rate"]', ("--ranks", 1), "", id="optimizer"),
    pytest.param("step", "llama_step.py", "losses=(total / ranks).tolist()", "losses=(total / ranks).tolist()[:1]",
                 ("--ranks", 1), "", id="one of three losses"),
    # AdamW hides the factor from the losses; the norm tells it.
    full("step", "llama_step.py", "set_force_sum_reduction_for_comms(True)",
         "set_force_sum_reduction_for_comms(True), module.set_gradient_divide_factor(1.0)",
         ("--ranks", 2, "--strategy", "bucketed"), "", id="fsdp2 divides by another number"),
    # The line names the peer, or the side of ours that it is compared with, and the peer.
    full("tensor", "llama_step.py", LEARNING_RATE, 'lr=c["learning_rate"] * (2 if mode == "tp" else 1)', (),
         "PyTorch tensor parallel over Gloo", id="learning rate of tensor parallelism"),
    full("pipeline", "pipeline_step.py", "    dist.all_reduce(square)\n", "", (), "PyTorch pipelining",
         id="a stage clipped by its own norm"),
    full("expert", "experts_step.py", "torch._foreach_div_(own, dist.get_world_size())", "pass", (), "PyTorch, all-to-all",
         id="experts' gradients not divided by the ranks"),
    full("optim", "optim_step.py", LEARNING_RATE, 'lr=1.01 * c["learning_rate"]', ("--ranks", 2), "",
         id="learning rate of updates"),
    full("optim", "optim_step.py", '"weight_decay": c["weight_decay"]', '"weight_decay": 0.0', ("--ranks", 2), "",
         id="weight decay"),
    pytest.param("optim", "optim_step.py", 'for r in range(c["ranks"])', "for r in range(1)", ("--ranks", 2), "",
                 id="one rank's gradient"),
    full("context", "context_parallel.py", "targets = (tokens * 31 + 1)", "targets = (tokens * 29 + 1)", ("--peer",), "",
         id="other targets")])
def test_a_peer_that_computes_something_else_is_not_compared(tmp_path, of, script, right, wrong, arguments, whose):
    python = broken_peer(tmp_path, script, right, wrong)
    case = "tiny one" if of == "context" else "tiny"
    said = not_compared("--case", case, *arguments, "--seconds", 0.1, "--python", python, of=of)
    assert re.search(f"NOT COMPARABLE: (.* differs from )?{re.escape(whose)}", said), said


def test_experts_that_the_peer_cannot_split_evenly_are_refused():
    result = bench("--ranks", 3, of="expert")
    assert result.returncode == 2 and "expected 2, 4 or 8" in result.stderr, result.stderr


def test_updates_are_compared_with_clip_and_fused_adamw(tmp_path):
    records, _ = compared(tmp_path, "--case", "tiny", "--seconds", 0.1, of="optim")
    assert [record["case"] for record in records[::2]] == [
        "tiny, 1 rank, one rank", "tiny, 2 ranks, shared parameters", "tiny, 2 ranks, ZeRO-1", "tiny, 2 ranks, bucketed"]
    for record in records:
        assert record["unit"] == ("GB/s" if record["peer_name"] == "triad" else "ms")


def test_a_peer_that_ends_is_named(tmp_path):
    python = python_that(tmp_path, "exit 1")
    result = bench("--case", "tiny", "--ranks", 1, "--python", python)
    assert result.returncode == 2
    assert f"side 'eager' ({python})" in result.stderr and "PYTHON" in result.stderr


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_bench_that_is_ended_leaves_no_side_behind(tmp_path, by):
    """Sides that still start wait for nobody: two of ours and one of PyTorch's, in process groups of their own."""
    def sides():
        found = 0
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                found += str(tmp_path).encode() in path.read_bytes()
        return found

    bench = subprocess.Popen([BINARY, "bench", "step", "--case", "tiny", "--ranks", "2"], cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=dict(COLD, TMPDIR=str(tmp_path)))
    until = time.monotonic() + 60
    while (started := sides()) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert started >= 2, bench.poll()
    bench.send_signal(by)
    bench.communicate(timeout=60)
    assert bench.returncode == -by
    while sides() > 0 and time.monotonic() < until:
        time.sleep(0.02)
    assert sides() == 0


def test_an_unknown_case_is_refused():
    result = bench("--case", "huge")
    assert result.returncode == 2 and "small" in result.stderr


without_module = pytest.mark.skipif((BUILD / "python/isograd_comm.missing").exists(), reason="isograd_comm was not built")


@without_module
def test_collectives_are_compared_with_gloo_and_memcpy(tmp_path):
    """Each contestant's first result is checked against the closed form; the figures are written twice."""
    records, said = compared(tmp_path, "--quick", "--patience", "0.01", "--operation", "barrier", "--operation", "reduce_scatter",
                             "--operation", "round_trip", "--svg", tmp_path / "comm.svg", of="comm")
    assert {record["unit"] for record in records} == {"us"}
    cases = {record["case"] for record in records}
    assert "reduce_scatter fp32 64 KB, 2 ranks, ordinary tensors" in cases
    assert "barrier, 2 ranks, shared memory" in cases
    assert {record["peer_name"] for record in records} - {"MPI"} == {"Gloo", "memcpy", "its c10d backend"}
    assert "reduce_scatter fp32 4 MB" in said and " ns " in said
    picture = ElementTree.fromstring((tmp_path / "comm.svg").read_text())
    assert "reduce_scatter, fp32, 2 ranks, µs" in {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}


@without_module
@pytest.mark.parametrize("wrapper", ["ddp", full("fsdp2")])
def test_wrapped_steps_differ_in_the_backends_name_alone(tmp_path, wrapper):
    (record,), said = compared(tmp_path, "--case", wrapper, "--size", "tiny", "--seconds", 0.1, of="wrapped",
                               more={"floor"})  # equal losses, bit by bit
    assert record["peer_name"] == "Gloo" and record["unit"] == "ms" and record["floor"] > 0 and " limit" in said


def wrapped_stub(tmp_path, losses):
    """A Python whose sides compute nothing and report `losses`; each appends its name to the file turns."""
    (tmp_path / "stub.py").write_text(f"""import json, pathlib, sys
exchange, ranks, name = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
go = [open(exchange / f"{{name}}.go.{{rank}}", "rb", buffering=0) for rank in range(ranks)]
done = open(exchange / f"{{name}}.done", "w")
while all([pipe.read(1) for pipe in go]):
    with open({str(tmp_path / "turns")!r}, "a") as turns:
        print(name, file=turns)
    print(json.dumps({{"seconds": [1e-3], "losses": {losses!r}[name]}}), file=done, flush=True)
""")
    python = python_that(tmp_path, f'shift 3\nexec "{sys.executable}" -S "{tmp_path}/stub.py" "$@"')
    return ["--case", "ddp", "--size", "tiny", "--seconds", 0.1, "--python", python]


@without_module
def test_no_side_of_the_wrapped_steps_always_comes_last(tmp_path):
    compared(tmp_path, *wrapped_stub(tmp_path, {"ours": [1.0], "peer": [1.0], "floor": []}), of="wrapped", more={"floor"})
    turns = (tmp_path / "turns").read_text().split()
    rounds = [turns[i:i + 3] for i in range(3, len(turns), 3)]  # the first warms up
    assert len(rounds) >= 3 and all(sorted(each) == ["floor", "ours", "peer"] for each in rounds)
    for side in ("ours", "peer", "floor"):
        assert len({each.index(side) for each in rounds}) > 1, (side, rounds)


@without_module
@pytest.mark.parametrize("theirs", [[1.0], [], [1.0] * 9 + [2.0], [1.0] * 11])
def test_a_side_that_reports_some_of_the_losses_is_not_compared(tmp_path, theirs):
    not_compared(*wrapped_stub(tmp_path, {"ours": [1.0] * 10, "peer": theirs, "floor": []}), of="wrapped")


@without_module
def test_a_collective_with_a_wrong_result_ends_the_comparison(tmp_path):
    """The script that makes the groups is replaced by one whose Gloo has its ranks in reverse."""
    reverse = 'dist.ProcessGroupGloo(dist.PrefixStore("reverse", store), size - 1 - rank, size, TIMEOUT)'
    python = broken_peer(tmp_path, "collectives.py", "dist.group.WORLD._get_backend(CPU)", reverse)
    result = bench("--quick", "--patience", "0.01", "--operation", "all_to_all", "--python", python, of="comm")
    assert result.returncode == 2, result.stdout
    assert "gave a wrong result" in result.stderr


def test_the_fused_loss_is_compared_in_time_and_memory(tmp_path):
    records, _ = compared(tmp_path, "--case", "tiny", "--seconds", 0.1, of="loss")
    assert [(r["unit"], r["peer_name"].split()[0]) for r in records] == [
        ("tokens/s", "LibTorch"), ("MiB", "LibTorch"), ("tokens/s", "isograd"), ("MiB", "isograd")]
    assert {record["case"] for record in records} == {"tiny"}


def test_a_python_without_imbalanced_losses_is_told_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "imbalanced_losses.py").write_text("raise ModuleNotFoundError('as if it were not there')\n")
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(tmp_path))
    result = bench("--case", "tiny", of="ranking")
    assert result.returncode == 2 and "-m pip install imbalanced-losses" in result.stderr


def test_a_served_model_is_compared_with_peft(tmp_path):
    """Both start from one adapter, whose matrices are not zero: equal losses of several steps mean equal gradients and AdamW."""
    records, said = compared(tmp_path, "--case", "tiny train", "--seconds", 0.1, of="serve")
    assert [record["peer_name"] for record in records] == ["5 ms and 2 %, allowed", "PEFT, a plain loop"]
    assert "outside its engine" in said
    records, _ = compared(tmp_path, "--case", "tiny sample", "--seconds", 0.1, of="serve")
    assert [record["peer_name"] for record in records] == ["generate(), one by one", "generate(), batched"]


def test_a_served_step_that_differs_is_not_compared(tmp_path, monkeypatch):
    """The losses stay equal; the peer divides each gradient by the number of its rows."""
    script = (ROOT / "bench/peers/serve_peft.py").read_text()
    right = "loss.backward()"
    assert right in script
    for sibling in (ROOT / "bench/peers").glob("*.py"):
        (tmp_path / sibling.name).write_text(sibling.read_text())
    (tmp_path / "serve_peft.py").write_text(script.replace(right, "(loss / len(tokens)).backward()"))
    monkeypatch.setitem(os.environ, "ISOGRAD_PEERS", str(tmp_path))
    assert "first norm" in not_compared("--case", "tiny train", "--seconds", 0.1, of="serve")


def test_the_servers_own_share_of_a_call(tmp_path):
    (record,), _ = compared(tmp_path, "--case", "own", "--seconds", 0.1, of="serve")
    assert 0 < record["ours"] < 100 and record["unit"] == "ms"


def test_a_ring_is_compared_with_pytorchs(tmp_path):
    """The same document, weights and chunks: equal losses and gradient norms."""
    records, _ = compared(tmp_path, "--case", "tiny one", "--seconds", 0.1, "--ranks", 2, "--peer", of="context")
    assert [record["case"] for record in records if record["peer_name"] == "PyTorch's ring attention over Gloo"] == [
        "tiny one", "tiny one, least"]
    result = bench("--case", "tiny one", "--ranks", 3, "--peer", of="context")
    assert result.returncode == 2 and "twice which divides the tokens" in result.stderr


def test_context_ranks_are_compared_with_one(tmp_path):
    records, said = compared(tmp_path, "--case", "tiny", "--seconds", 0.1, "--ranks", 4, "--ulysses", 2, of="context")
    assert "cut over 2 ring ranks" in said
    assert {record["unit"] for record in records} == {"ms", "ms of the busiest processor", "MiB"}


def test_packs_are_compared_with_their_sum_of_squares_and_the_best_cut(tmp_path):
    """One number of tokens, different sums of squared lengths: the share, the time of each unit of it, and all of
    one rank's time divided evenly."""
    records, said = compared(tmp_path, "--case", "tiny pack 2", "--case", "tiny pack 3", "--seconds", 0.1, of="context")
    shares = re.findall(r"sum len\^2 ([\d.]+) of one document's", said)
    assert shares == ["0.5000", "0.3750"]
    best = [record for record in records if record["case"].endswith(", best cut")]
    assert [record["case"] for record in best] == ["tiny pack 2, best cut", "tiny pack 3, best cut"]
    for record in best:
        alone = next(r["peer"] for r in records if r["case"] == record["case"][:11] and r["unit"] == "ms")
        assert record["peer"] == pytest.approx(alone / 2)
