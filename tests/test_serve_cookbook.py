"""Programs of tinker-cookbook, unmodified and offline, against `isograd serve` of a tiny model.

They find a tokenizer and data sets in their working folder (serve_files.py), under the names that they would ask the hub
for. They run in an environment of their own: ISOGRAD_COOKBOOK_VENV, or one that is made once in the build folder. What
they send passes through a proxy that counts it. PROGRAMS is the table of what each must do.
"""
import asyncio
import collections
import contextlib
import json
import os
import re
import subprocess
import threading
import types

import pytest
from conftest import BUILD, ROOT
from serve_files import NAME, environment, server, write_data, write_model

PROGRAM_LIMIT = 120  # seconds


class Proxy:
    """Passes on to the server what comes to its own port, and counts the requests."""

    def __init__(self, port):
        self.target, self.counts, self.loop = port, collections.Counter(), asyncio.new_event_loop()
        self.listener = self.loop.run_until_complete(asyncio.start_server(self.connected, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.sockets[0].getsockname()[1]}"
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    async def connected(self, reader, writer):
        try:
            to_server = await asyncio.open_connection("127.0.0.1", self.target)
            await asyncio.gather(self.passed(reader, to_server[1], self.count), self.passed(to_server[0], writer))
        except (OSError, asyncio.CancelledError):
            writer.close()

    async def passed(self, reader, writer, look=lambda text: b""):
        rest = b""
        try:
            while data := await reader.read(1 << 16):
                rest = look(rest + data)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    def count(self, text):
        """Returns what may be the beginning of a request's line."""
        end = 0
        for line in re.finditer(rb"(GET|POST|PUT|DELETE) /api/v1/(\w+)\S* HTTP/1\.1\r\n", text):
            verb, name, end = line[1].decode(), line[2].decode(), line.end()
            self.counts[name if verb == "POST" else f"{verb} {name}"] += 1
        return text[max(end, len(text) - 1000):]

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.listener.close()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@pytest.fixture(scope="session")
def python():
    """The interpreter with tinker-cookbook, which sees the packages of this one."""
    if given := os.environ.get("ISOGRAD_COOKBOOK_VENV"):
        return f"{given}/bin/python"
    lines = (ROOT / "tests/requirements_cookbook.txt").read_text().splitlines()
    return environment(BUILD / "cookbook", *(line for line in lines if line and not line.startswith("#")))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cookbook")
    write_model(folder / NAME, plays=True)
    write_data(folder)
    with server(folder, folder / "state", "--client-config", json.dumps({"use_pyqwest_transport": True})) as running:
        yield running


# ---- what is asserted ----

def falls(key, by):
    """From the first quarter of the steps to the last."""
    def check(rows):
        values = [row[key] for row in rows if key in row]
        some = len(values) // 4
        assert sum(values[-some:]) <= sum(values[:some]) * (1 - by), values
    return check


def rewards_vary(rows):
    """Some group had rewards that differ, and so a gradient."""
    mixed = [row["env/all/by_group/frac_mixed"] for row in rows if "env/all/by_group/frac_mixed" in row]
    norms = [row["grad_norm"] for row in rows if "grad_norm" in row]
    assert max(mixed) > 0 and max(norms) > 0, (mixed, norms)


def sampler_is_trainer(rows):
    found = [abs(row["optim/kl_sample_train_v1"]) for row in rows if "optim/kl_sample_train_v1" in row]
    assert max(found) <= 1e-5, found


def rewards_are_equal(rows):
    assert {row["reward/total"] for row in rows} == {0.0}


def teacher_is_student(rows):
    assert abs(rows[0]["teacher_kl"]) <= 1e-5


def program(module, *arguments, counts, checks=()):
    return types.SimpleNamespace(module=module, arguments=arguments, counts=counts, checks=checks)


# Requests that train, sample or save; the others depend on time. A row has none of a kind that it does not name, and any number where
# it says None: games may end early.
KINDS = ("create_model", "load_weights", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler",
         "create_sampling_session", "asample", "DELETE training_runs")


def steps(calls, updates, samples=0, samplers=1, save_weights=1, create_model=1, **more):
    return {"forward_backward": calls, "optim_step": updates, "asample": samples, "save_weights_for_sampler": samplers,
            "save_weights": save_weights, "create_model": create_model, **more}


ARITHMETIC = ("env=arithmetic", "group_size=4", "groups_per_batch=4", "max_tokens=5", "max_steps=3", "learning_rate=1e-3")
CHAT = ("batch_size=4", "rolling_save_every=1", "learning_rate=1e-2")
# What each is, the requests it must send, and what its log must show. The programs of `./dev test` come first.
PROGRAMS = {
    "sl_loop": program("sl_loop", "batch_size=2", "max_steps=20", "save_every=10", "learning_rate=1e-2",
                       counts=steps(20, 20, save_weights=2), checks=[falls("train_mean_nll", 0.2)]),
    "dpo": program("preference.dpo.train", "batch_size=4", "max_steps=8", "learning_rate=1e-2",
                   counts=steps(16, 8, 96, 4), checks=[falls("dpo_loss", 0.05)]),
    "math_rl": program("math_rl.train", *ARITHMETIC, "loss_fn=importance_sampling", "compute_post_kl=True",
                       counts=steps(3, 3, 96, 5), checks=[rewards_vary, sampler_is_trainer]),
    "math_rl asynchronous": program("math_rl.train", *ARITHMETIC, "loss_fn=ppo", "max_steps_off_policy=2",
                                    counts=steps(3, 3, 48, 2, save_weights=2, create_sampling_session=1), checks=[rewards_vary]),
    "math_rl streamed": program("math_rl.train", *ARITHMETIC, "loss_fn=cispo", "stream_minibatch_config.groups_per_batch=4",
                                "stream_minibatch_config.num_minibatches=2", counts=steps(6, 3, 48, 5), checks=[rewards_vary]),
    "rl_loop": program("rl_loop", "loss_fn=importance_sampling", "batch_size=4", "group_size=4", "max_tokens=8", "max_steps=2",
                       counts=steps(0, 0, 8, 3), checks=[rewards_are_equal]),
    "chat_sl": program("chat_sl.train", *CHAT, "max_steps=10", "save_every=5", "eval_every=5",
                       counts=steps(10, 10, 16, 4, save_weights=10, **{"DELETE training_runs": 8}), checks=[falls("train_mean_nll", 0.1)]),
    "chat_sl resumed": program("chat_sl.train", *CHAT, "num_epochs=2", "max_steps=14", "behavior_if_log_dir_exists=resume",
                               counts=steps(4, 4, save_weights=5, create_model=0, load_weights=1, **{"DELETE training_runs": 4}),
                               checks=[falls("train_mean_nll", 0.2)]),
    "guess_number": program("multiplayer_rl.guess_number.train", "renderer_name=qwen3_disable_thinking", "group_size=4", "batch_size=4",
                            "max_tokens=8", "max_steps=2", "eval_every=0", counts=steps(2, 2, None, 4), checks=[rewards_vary]),
    "rl_numerics_check": program("rl_numerics_check.train", "group_size=4", "groups_per_batch=2", "max_tokens=16", "max_steps=2",
                                 counts=steps(2, 2, 16, 4), checks=[sampler_is_trainer]),
    "on_policy_distillation": program("distillation.on_policy_distillation", f"teacher_model={NAME}", "dataset=deepmath", "group_size=2",
                                      "groups_per_batch=4", "max_tokens=8", "max_steps=2", counts=steps(2, 2, 32, 4, create_sampling_session=1),
                                      checks=[teacher_is_student, sampler_is_trainer]),
}
DEFAULT = ("sl_loop", "dpo", "math_rl")
BEFORE = {"chat_sl resumed": "chat_sl"}


def run(name, python, served, log):
    row = PROGRAMS[name]
    with contextlib.closing(Proxy(served.port)) as proxy:
        variables = {**os.environ, "TINKER_API_KEY": "tml-local", "TINKER_BASE_URL": proxy.url, "TINKER_TELEMETRY": "0",
                       "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(served.folder / "hub"), "OMP_NUM_THREADS": "1"}
        command = [python, "-m", f"tinker_cookbook.recipes.{row.module}", f"model_name={NAME}", f"log_path={log}", *row.arguments]
        done = subprocess.run(command, env=variables, cwd=served.folder, capture_output=True, text=True, timeout=PROGRAM_LIMIT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return proxy.counts, [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.full) for name in PROGRAMS])
def test_program(name, python, served, tmp_path):
    if name in BEFORE:
        run(BEFORE[name], python, served, tmp_path / "log")
        served.restart()
    counts, rows = run(name, python, served, tmp_path / "log")
    expected = {kind: PROGRAMS[name].counts.get(kind, 0) for kind in KINDS}
    assert {kind: None if number is None else counts[kind] for kind, number in expected.items()} == expected
    for check in PROGRAMS[name].checks:
        check(rows)
