"""The cost of `isograd.prove`: the step of a transformer of 40 million parameters under DDP, and the runs that any proof has
to make, which plain PyTorch makes here: the step itself, and the whole batch on one process in fp64 and in fp32.

    python bench/peers/prove_step.py [--ranks 2 --layers 12 --width 512 --length 128 --samples 4 --turns 3 --threads 1]

by a Python with the package in it (./dev wheel && pip install dist/isograd-*.whl). Prints one line of JSON: seconds, the
least of all turns, each turn after the other.
"""
import json
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F

import isograd
import turns

VOCABULARY = 8192


class Block(torch.nn.Module):
    def __init__(self, width, activation):
        super().__init__()
        self.heads = max(1, width // 64)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.activation = activation

    def forward(self, x):
        heads = self.qkv(self.norms[0](x)).view(x.size(0), 3, self.heads, -1).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(0, 1).reshape(x.shape))
        return x + self.down(self.activation(self.up(self.norms[1](x))))


class Transformer(torch.nn.Module):
    """The head is the embedding's own matrix."""

    def __init__(self, layers, width, activation):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = torch.nn.Sequential(*(Block(width, activation) for _ in range(layers)))
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, tokens):
        return F.linear(self.norm(self.blocks(self.embedding(tokens))), self.embedding.weight)


def losses(model, document):
    return F.cross_entropy(model(document[:-1]), document[1:], reduction="none")


def one_device(model, documents):
    """The whole batch, document after document, each backward as it comes."""
    model.zero_grad(set_to_none=True)
    targets = sum(len(document) - 1 for document in documents)
    for document in documents:
        (losses(model, document).sum() / targets).backward()


def on_rank(rank, options, store):
    torch.set_num_threads(options.threads)
    dist.init_process_group("isograd", init_method=f"file://{store}/store", rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    activation = {"gelu": F.gelu, "relu": F.relu}[options.activation]
    model = Transformer(options.layers, options.width, activation)
    everything = [[torch.randint(VOCABULARY, (options.length + 1 - 7 * ((i + 3 * of) % 5),)) for i in range(options.samples)]
                  for of in range(options.ranks)]
    mine = everything[rank]
    trained = isograd.sum_gradients(torch.nn.parallel.DistributedDataParallel(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(model, optimizer, micro_batches):
        optimizer.zero_grad()
        documents = [document for micro in micro_batches for document in micro]
        counted = isograd.TokenMean().count([sum(len(document) - 1 for document in documents)])
        loss = counted.scale(sum(losses(model, document).sum() for document in documents))
        loss.backward()
        optimizer.step()
        return counted.loss()

    taken = {name: [] for name in ("step", "fp64", "fp32", "prove")}
    verdict = None
    for _ in range(options.turns):
        step(trained, optimizer, [mine])
        dist.barrier()
        taken["step"].append(turns.timed(lambda: step(trained, optimizer, [mine]))[0])
        if rank == 0:  # the others wait, as they do while rank 0 proves
            whole = [document for some in everything for document in some]
            for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32)):
                alone = Transformer(options.layers, options.width, activation).to(dtype)
                taken[name].append(turns.timed(lambda: one_device(alone, whole))[0])
                del alone
        dist.barrier()
        spent, verdict = turns.timed(lambda: isograd.prove(step, trained, optimizer, micro_batches=[mine], loss=losses))
        taken["prove"].append(spent)
    if rank == 0:
        least = {name: min(values) for name, values in taken.items()}
        limit = least["step"] + least["fp64"] + least["fp32"]
        print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "ranks": options.ranks,
                          "threads": options.threads, "targets": sum(len(d) - 1 for some in everything for d in some),
                          **{name: round(value, 2) for name, value in least.items()}, "limit": round(limit, 2),
                          "turns": [round(value, 2) for value in taken["prove"]], "passed": verdict.passed,
                          "said": verdict.findings}), flush=True)
        if not verdict.passed:
            print(verdict, flush=True)
    dist.destroy_process_group()


def main():
    parser = turns.arguments(__doc__, ranks=2, layers=12, width=512, length=128, samples=4, turns=3, threads=1)
    parser.add_argument("--activation", choices=["gelu", "relu"], default="gelu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="isograd-") as store:
        torch.multiprocessing.spawn(on_rank, (options, store), nprocs=options.ranks)


if __name__ == "__main__":
    main()
