"""The peer skyrl-tx of `isograd bench serve` (turns.py): its server on loopback, driven by the tinker client of its environment.

    python serve_skyrl.py EXCHANGE 1 SIDE [MICRO_BATCH]

It runs in a Python of its own, since skyrl-tx 0.3.0 wants transformers below 5:

    python3 -m venv skyrl && skyrl/bin/pip install skyrl-tx==0.3.0 'jax<1' flax optax 'fastapi[standard]' sqlmodel \\
        'sqlalchemy[asyncio]' aiosqlite asyncpg psycopg2-binary tinker==0.12.0

(its extra `jax` would add a GB for CUDA; 0.12.0 is the client that was current at its release, and its extra `tinker` asks
for 0.3.0 or later.) A step is forward_backward and optim_step of the same datums as isograd's and PEFT's, which it pads to
one length, MICRO_BATCH at a time (0: all at once; 4 was the fastest for 20 M). Its adapter starts with B of zeros and its gradients are
means, so that only the first loss is comparable, with that of the base.
"""
import contextlib
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import urllib.request

os.environ.update(TINKER_TELEMETRY="0", TINKER_API_KEY="tml-local", JAX_PLATFORMS="cpu")

import turns

try:
    import jax
    import tinker
    import tx  # noqa: F401
    from tinker import types
except ModuleNotFoundError as error:
    sys.exit(f"this Python has no {error.name}: serve_skyrl.py says what it needs")

LIMIT = 600  # seconds that any call may take
# skyrl-tx starts its engine by `uv run --extra tinker --extra jax -m tx.tinker.engine ...`: this stands in for uv, and ends with it.
UV = """#!/bin/sh
while [ "$1" != -m ]; do shift; done
exec setpriv --pdeathsig KILL taskset -c 0-{last} {python} "$@"
"""


def write_base(case, folder):
    """The base as skyrl-tx reads it: with a tokenizer, and rope_theta where transformers below 5 has it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    for file in pathlib.Path(case["model"]).glob("*.safetensors"):
        (folder / file.name).symlink_to(file)
    config = json.loads(pathlib.Path(case["model"], "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": config["rope_parameters"]["rope_theta"]}))
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", eos_token="a").save_pretrained(folder)


@contextlib.contextmanager
def served(case, micro_batch):
    """The address of a server that ends with this side, and the name of its model."""
    with tempfile.TemporaryDirectory() as temporary:
        state = pathlib.Path(temporary)
        (state / "bin").mkdir()
        (state / "base").mkdir()
        write_base(case, state / "base")
        (state / "bin" / "uv").write_text(UV.format(last=case["threads"] - 1, python=sys.executable))
        (state / "bin" / "uv").chmod(0o755)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        backend = {"max_lora_adapters": 2, "max_lora_rank": case["rank"], "train_micro_batch_size": micro_batch}
        command = [sys.executable, "-m", "tx.tinker.api", "--base-model", str(state / "base"), "--host", "127.0.0.1", "--port", str(port),
                   "--database-url", f"sqlite:///{state}/tinker.db", "--checkpoints-base", str(state), "--backend-config", json.dumps(backend)]
        server = subprocess.Popen(command, env=dict(os.environ, PATH=f"{state}/bin:{os.environ['PATH']}"),
                                  preexec_fn=functools.partial(turns.end_with, os.getpid()))
        try:
            url = f"http://127.0.0.1:{port}"
            while True:
                with contextlib.suppress(OSError), urllib.request.urlopen(url + "/api/v1/get_server_capabilities", timeout=LIMIT):
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    sys.exit(f"skyrl-tx ended with status {server.wait(timeout=0.1)}")
            yield url, str(state / "base")
        finally:
            turns.stop(server)


def run(rank, micro_batch="4"):
    case = rank.case()
    data = [types.Datum(model_input=types.ModelInput.from_ints(datum["tokens"]),
                        loss_fn_inputs={"target_tokens": datum["targets"], "weights": datum["weights"]}) for datum in case["datums"]]
    adam = case["adam"]
    adam = types.AdamParams(learning_rate=adam["learning_rate"], beta1=adam["beta1"], beta2=adam["beta2"], eps=adam["epsilon"])
    with served(case, int(micro_batch)) as (url, base):
        service = tinker.ServiceClient(base_url=url)
        model = service.create_lora_training_client(base, rank=case["rank"], seed=case["seed"])

        def step():
            loss, made = model.forward_backward(data, "cross_entropy"), model.optim_step(adam)
            made.result(LIMIT)
            return sum(sum(each["elementwise_loss"].data) for each in loss.result(LIMIT).loss_fn_outputs)
        print("tinker", tinker.__version__, "jax", jax.__version__, flush=True)
        for _ in rank.turns():
            seconds, loss = turns.timed(step)
            rank.answer(seconds=[seconds], losses=[loss], norms=[])


if __name__ == "__main__":
    turns.main(run)
