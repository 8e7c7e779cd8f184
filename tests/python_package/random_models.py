"""python random_models.py [SETTING ...]: the verdicts of isograd.watch and isograd.prove on two ranks of models that draw random numbers, each right
and with a gradient thrown away; as JSON, by setting, of rank 0, and whether the generators of both ranks went on as they were."""
import json
import os
import pickle
import random
import sys

import numpy
import torch
import torch.nn as nn
import torch.nn.functional as F
from ranks import on_ranks
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import isograd

WORDS, WIDTH = 30, 8


class Body(nn.Module):
    """A layer of its own, and what `draw` makes of its outcome [n, WIDTH]."""

    def __init__(self, draw):
        super().__init__()
        self.up, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x):
        return self.draw(self, torch.tanh(self.up(x)))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, num_layers=2, dropout=0.3)

    def forward(self, x):
        return self.cell(x)[0]


class Attention(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.a = nn.MultiheadAttention(WIDTH, 2, dropout=p)

    def forward(self, x):
        return self.a(x, x, x)[0]


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.e, self.body, self.h = nn.Embedding(WORDS, WIDTH), body, nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        x = self.e(tokens)
        return self.h(x + self.body(x))


def sample_loss(model, sample):
    tokens, _ = sample
    return F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="none")


def keyed_loss(model, sample):
    torch.manual_seed(sample[1])
    return sample_loss(model, sample)


def masked_loss(model, sample):
    """Some targets, another choice each time."""
    losses = sample_loss(model, sample)
    return losses[random.sample(range(len(losses)), len(losses) // 2)]


def noisy_tokens_loss(model, sample):
    tokens, number = sample
    noise = torch.rand(len(tokens)) < 0.3
    return sample_loss(model, (torch.where(noise, 0, tokens), number))


def drop_path(body, x):
    return x * x.new_empty(len(x), 1).bernoulli_(0.9) / 0.9


def keyed(body, x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(x))
        return F.dropout(x, 0.2)


def keyed_by_its_own(body, x):
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(len(x)), dtype=torch.float64) < 0.8
    return x * kept


class Held(Body):
    """Draws from a generator of its own, which goes on from one call to the next."""

    def __init__(self, generator, draw):
        super().__init__(draw)
        self.generator = generator


class Weights(nn.Module):
    """Dropout of a weight."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.linear(x, F.dropout(self.up.weight, 0.2), self.up.bias)


def with_hook(body):
    body.up.weight.register_hook(lambda grad: grad + 0.1 * torch.randn_like(grad))
    return body


def neftune(hook):
    """NEFTune as transformers has it: noise on what the embedding gives, while it is trained."""
    def made():
        from transformers.integrations.neftune import neftune_post_forward_hook
        model = Model(Body(lambda _, x: x))
        model.e.neftune_noise_alpha = 5.0
        if hook:
            model.e.register_forward_hook(lambda module, args, out: neftune_post_forward_hook(module, args, out[None])[0])
        return model
    return made


def llama(p):
    def made():
        from transformers import LlamaConfig, LlamaForCausalLM
        config = LlamaConfig(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=1,
                             num_attention_heads=2, attention_dropout=p, attn_implementation="eager")
        return LlamaForCausalLM(config)
    return made


def llama_loss(model, sample):
    tokens, _ = sample
    return F.cross_entropy(model(tokens[None, :-1]).logits[0], tokens[1:], reduction="none")


def in_evaluation(model, of):
    of(model).eval()
    return model


def plain(draw):
    return lambda: Model(Body(draw))


def attended(body, x):
    return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.2)[0]


def pooled(body, x):
    return x + nn.FractionalMaxPool2d((1, 2), output_size=(len(x), 5))(x[None])[0].mean(1, keepdim=True)


def seldom(body, x):
    return x * 0 if random.random() < 0.05 else x


def seldom_torch(body, x):
    return x if torch.rand([]) > 0.05 else x * 0


# name: (model, loss)
SETTINGS = {
    "functional_dropout": (plain(lambda _, x: F.dropout(x, 0.2)), sample_loss),
    "alpha_dropout": (plain(lambda _, x: F.alpha_dropout(x, 0.2, True)), sample_loss),
    "feature_dropout": (plain(lambda _, x: F.dropout1d(x, 0.2)), sample_loss),
    "dropout_module": (lambda: Model(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))), sample_loss),
    "encoder_layer": (lambda: Model(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1)), sample_loss),
    "attention": (lambda: Model(Attention(0.2)), sample_loss),
    "scaled_dot_product": (plain(attended), sample_loss),
    "attention_dropout_of_llama": (llama(0.2), llama_loss),
    "neftune": (neftune(True), sample_loss),
    "neftune_while_trained_alone": (neftune(True), sample_loss),
    "lstm": (lambda: Model(Recurrent(nn.LSTM)), sample_loss),
    "gru": (lambda: Model(Recurrent(nn.GRU)), sample_loss),
    "weight_dropout": (lambda: Model(Weights()), sample_loss),
    "drop_path": (plain(drop_path), sample_loss),
    "layer_left_out_seldom": (plain(seldom), sample_loss),
    "layer_left_out_seldom_by_torch": (plain(seldom_torch), sample_loss),
    "of_longer_samples_alone": (plain(lambda _, x: F.dropout(x, 0.2) if len(x) > 7 else x), sample_loss),
    "numpy_noise": (plain(lambda _, x: x + torch.from_numpy(numpy.random.randn(*x.shape)).to(x)), sample_loss),
    "sampled": (plain(lambda _, x: x + torch.randn_like(x)), sample_loss),
    "gumbel": (plain(lambda _, x: F.gumbel_softmax(x)), sample_loss),
    "router_jitter": (plain(lambda _, x: x * torch.empty_like(x).uniform_(0.98, 1.02)), sample_loss),
    "shuffled": (plain(lambda _, x: x[torch.randperm(len(x))]), sample_loss),
    "rounded_at_random": (plain(lambda _, x: x + (torch.floor(64 * x + torch.rand_like(x)) / 64 - x).detach()), sample_loss),
    "leaky_at_random": (plain(lambda _, x: F.rrelu(x, training=True)), sample_loss),
    "pooled_at_random": (plain(pooled), sample_loss),
    "checkpointed": (plain(lambda _, x: checkpoint(F.dropout, x, use_reentrant=True)), sample_loss),
    "targets_chosen": (plain(lambda _, x: x), masked_loss),
    "tokens_replaced": (plain(lambda _, x: x), noisy_tokens_loss),
    "gradient_noise": (lambda: Model(with_hook(Body(lambda _, x: x))), sample_loss),
    "own_generator": (lambda: Model(Held(torch.Generator(), lambda b, x: x * (torch.rand(len(x), 1, generator=b.generator) < 0.8))),
                      sample_loss),
    "own_numpy_generator": (lambda: Model(Held(numpy.random.default_rng(1), lambda b, x: x * b.generator.uniform())), sample_loss),
    "system_noise": (plain(lambda _, x: x * (1 + int.from_bytes(os.urandom(6), "little") / 2**48)), sample_loss),
    "sharded": (plain(lambda _, x: F.dropout(x, 0.2)), sample_loss),
    "in_fp64": (plain(lambda _, x: F.dropout(x, 0.2)), sample_loss),
    "proved": (plain(lambda _, x: F.dropout(x, 0.2)), sample_loss),
    # Right ones: the same is drawn for a sample wherever it is, or it has no effect, or nothing is drawn.
    "keyed_by_sample": (plain(lambda _, x: F.dropout(x, 0.2)), keyed_loss),
    "keyed_in_the_model": (plain(keyed), sample_loss),
    "keyed_by_its_own_generator": (plain(keyed_by_its_own), sample_loss),
    "module_in_evaluation": (lambda: in_evaluation(Model(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2))), lambda m: m.body[1]),
                             sample_loss),
    "attention_in_evaluation": (lambda: in_evaluation(Model(Attention(0.2)), lambda m: m.body), sample_loss),
    "no_dropout_in_attention": (lambda: Model(Attention(0.0)), sample_loss),
    "no_attention_dropout_in_llama": (llama(0.0), llama_loss),
    "drawn_without_effect": (plain(lambda _, x: x if torch.rand([]) >= 0 and random.random() >= 0 else x * 0), sample_loss),
    "proved_keyed_by_sample": (plain(lambda _, x: F.dropout(x, 0.2)), keyed_loss),
}


def states():
    return pickle.dumps((torch.get_rng_state().numpy().tobytes(), random.getstate(), numpy.random.get_state()))


def documents(rank):
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randint(WORDS, (n,), generator=generator), 10 * rank + i) for i, n in enumerate(((6, 8), (12, 9, 4))[rank])]


def judged(rank, name, planted):
    """[passed or None, what the verdict or the refusal says, whether the generators are what the step left]."""
    make, loss = SETTINGS[name]

    def made():
        torch.manual_seed(0)
        return make().to(torch.float64 if name == "in_fp64" else torch.float32)

    model, samples, left = made(), documents(rank), []
    options = {}
    if name == "neftune_while_trained_alone":
        options["make_model"] = lambda: neftune(False)()
    if name == "gradient_noise":  # a copy of a parameter has no hooks
        options["make_model"] = made
    if name == "sharded":
        isograd.sum_gradients(fully_shard(model))
        samples = samples[:2]  # each forward is collective
        options["make_model"] = made
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, draw in enumerate((torch.manual_seed, random.seed, numpy.random.seed)):
        draw(100 * rank + number)

    def step(model, optimizer, micro_batches):
        optimizer.zero_grad()
        everything = [sample for micro in micro_batches for sample in micro]
        found = torch.cat([loss(model, sample) for sample in everything])
        counted = isograd.TokenMean().count([torch.zeros(len(found), dtype=torch.int64)])
        counted.scale(found.sum()).backward()
        if name != "sharded":
            isograd.all_reduce_gradients(model)
        if planted:
            list(model.parameters())[-3].grad.zero_()
        optimizer.step()
        left[:] = [states()]

    try:
        if name.startswith("proved"):
            before = states()
            verdict = isograd.prove(step, model, optimizer, micro_batches=[samples], loss=loss, experiments=False)
            left[:] = [before]
        else:
            with isograd.watch(model, optimizer, micro_batches=[samples], loss=loss, **options) as watched:
                step(model, optimizer, [samples])
            verdict = watched.verdict
        passed, said = verdict.passed, str(verdict)
    except isograd.ConfigError as error:
        passed, said = None, str(error)
        if name.startswith("proved"):
            left[:] = [before]
    return passed, said, not left or left[0] == states()


def main():
    names = sys.argv[1:] or list(SETTINGS)
    found = on_ranks(2, lambda rank: {name: [judged(rank, name, planted) for planted in (False, True)] for name in names})
    json.dump({name: {"right": found[0][name][0], "mistaken": found[0][name][1],
                      "kept": all(one[2] for of_rank in found for one in of_rank[name])} for name in names}, sys.stdout)


if __name__ == "__main__":
    main()
