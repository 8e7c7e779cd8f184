"""What the tests of `isograd serve` share: a tiny Qwen3 with a tokenizer, stand-ins for data sets, and servers that can
be killed and started again.

Everything lies under the names that programs of tinker-cookbook ask for, so that these find it in their working folder
in place of the hub: Qwen/Qwen3-8B, openai/gsm8k, ...
"""
import contextlib
import json
import os
import pathlib
import random
import site
import socket
import subprocess
import sys
import time

from conftest import BINARY, BUILD, ROOT

NAME = "Qwen/Qwen3-8B"
WORDS = "alpha beta gamma delta red blue green one two three four five six seven eight nine ten apples pears sum of is the".split()
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
           "<tool_response>", "</tool_response>"]
GUESS = "Guess: 512"  # a token, so that a random model says what guess_number understands
START_LIMIT = 60  # seconds


def write_tokenizer(folder):
    """A byte-level BPE of some 400 tokens in the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))], trainer)
    tokenizer.add_tokens([AddedToken(GUESS, normalized=False)])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    whole.save_pretrained(folder)
    return whole


def write_model(folder, plays=False, layers=2, hidden=64, family="Qwen3", tied=False):
    """A model with random weights, with the tokenizer. One that `plays` often says its end of text and GUESS: else no reward of
    the cookbook's games would differ from another."""
    import torch
    import transformers
    tokenizer = write_tokenizer(folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    torch.manual_seed(20)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=hidden // 4, intermediate_size=2 * hidden, max_position_embeddings=4096,
        initializer_range=0.1, tie_word_embeddings=tied, eos_token_id=end, bos_token_id=None, pad_token_id=None))
    if plays:
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 1  # in every hidden state, so that the next line is a bias
            model.lm_head.weight[[end, tokenizer.convert_tokens_to_ids(GUESS)], 0] = 3.5
    model.save_pretrained(folder)
    return model


FAMILIES = {NAME: ("Qwen3", False, 64), "org/qwen3-tied": ("Qwen3", True, 64), "org/qwen2": ("Qwen2", False, 64),
            "org/llama": ("Llama", False, 64), "org/mistral": ("Mistral", False, 96)}  # class, tied, hidden


def write_families(folder):
    """A model of each family, of whose vectors (norms, biases) none is of ones or zeros. The server's flags for all but NAME."""
    import torch
    for name, (family, tied, hidden) in FAMILIES.items():
        model = write_model(folder / name, family=family, tied=tied, hidden=hidden)
        with torch.no_grad():
            for value in model.parameters():
                if value.dim() == 1:
                    value.add_(0.1 * torch.randn(value.shape))
        model.save_pretrained(folder / name)
    return [flag for name in FAMILIES if name != NAME for flag in ("--model", f"{name}={folder / name}")]


def write_data(folder):
    """The data sets that programs of tinker-cookbook load."""
    rng = random.Random(7)

    def text(least, most, words=WORDS):
        return " ".join(rng.choices(words, k=rng.randint(least, most)))

    def chat(**more):
        return {"messages": [{"role": "user", "content": text(2, 9)}, {"role": "assistant", "content": text(1, 9)}], **more}

    def sum_question():
        a, b = rng.randint(1, 9), rng.randint(1, 9)
        return {"question": f"What is {a}+{b}?", "answer": f"sum #### {a + b}"}

    def comparison():
        asked = f"\n\nHuman: {text(2, 8)}\n\nAssistant: "
        return {"chosen": asked + text(2, 9, WORDS[:12]), "rejected": asked + text(2, 9, WORDS[12:])}  # can be learnt

    def put(name, configuration=None, **splits):
        (folder / name).mkdir(parents=True)
        for split, rows in splits.items():
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if configuration:
            files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
            (folder / name / "README.md").write_text(f"---\nconfigs:\n- config_name: {configuration}\n  data_files:\n{files}---\n")
    put("HuggingFaceH4/no_robots", train=[chat(prompt="x", prompt_id=str(i), category="c") for i in range(40)],
        test=[chat(prompt="x", prompt_id=str(i), category="c") for i in range(8)])
    put("openai/gsm8k", "main", train=[sum_question() for _ in range(16)], test=[sum_question() for _ in range(4)])
    put("Anthropic/hh-rlhf", train=[comparison() for _ in range(32)], test=[comparison() for _ in range(8)])
    put("zwhe99/DeepMath-103K", train=[{"question": text(3, 9), "final_answer": "1"} for _ in range(32)])
    put("Salesforce/wikitext", "wikitext-103-raw-v1", train=[{"text": text(20, 60)} for _ in range(3000)])


def environment(folder, *packages):
    """The interpreter of an environment that has these packages, without what they depend on, and sees those of this one. It is
    made once."""
    wanted = " ".join((sys.executable, *packages))
    stamp, python = folder / "made-of", folder / "bin/python"
    if not stamp.exists() or stamp.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True, timeout=60)
        (next(folder.glob("lib/python*/site-packages")) / "seen.pth").write_text(
            "".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()))
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "--ignore-installed", "--disable-pip-version-check", *packages],
                       check=True, timeout=300)
        stamp.write_text(wanted)
    return str(python)


def packages_of(name, *options):
    """The folder with the packages of requirements_{name}.txt, for PYTHONPATH: of such an environment."""
    lines = (ROOT / f"tests/requirements_{name}.txt").read_text().splitlines()
    python = environment(BUILD / name, *options, *(line for line in lines if line and not line.startswith("#")))
    return str(next(pathlib.Path(python).parent.parent.glob("lib/python*/site-packages")))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """`isograd serve` of the model in {folder}/Qwen/Qwen3-8B, on loopback. Its state and port outlive the process."""

    def __init__(self, folder, state, *options):
        self.folder, self.state, self.port = folder, state, free_port()
        self.command = [str(BINARY), "serve", "--model", f"{NAME}={folder / NAME}", "--state", str(state),
                        "--port", str(self.port), *map(str, options)]
        self.process = None
        self.said, self.errors = pathlib.Path(f"{state}.out"), pathlib.Path(f"{state}.log")

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def launch(self, *options, **environment):
        with open(self.said, "w") as output, open(self.errors, "a") as log:
            self.process = subprocess.Popen([*self.command, *options], stdout=output, stderr=log,
                                            env={**os.environ, "OMP_NUM_THREADS": "1", **environment})

    def serves(self):
        """False: it has ended."""
        end = time.monotonic() + START_LIMIT
        while self.url not in self.said.read_text():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < end, f"does not serve: {self.errors.read_text()[-2000:]}"
            time.sleep(0.02)
        return True

    def start(self, *options, **environment):
        self.launch(*options, **environment)
        assert self.serves(), f"does not serve: {self.errors.read_text()[-2000:]}"
        return self

    def kill(self):
        self.process.kill()
        self.process.wait(timeout=START_LIMIT)

    def restart(self):
        self.kill()
        return self.start()


@contextlib.contextmanager
def server(folder, state, *options):
    """A server that has said its address. It is killed at the end."""
    started = Server(folder, state, *options)
    try:
        yield started.start()
    finally:
        if started.process:
            started.kill()
