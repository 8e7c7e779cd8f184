"""The peers of `isograd bench serve` (turns.py): a plain loop with PEFT, and transformers' generate().

    python serve_peft.py EXCHANGE 1 SIDE step | one-by-one | batched

case.json has
    model, adapter    folders of the base and of the initial adapter, as PEFT writes it
    threads
    rows_per_batch    of step: datums that are padded to one length, in the order of their lengths
    datums            [{"tokens", "targets", "weights"}]
    adam              {"learning_rate", "beta1", "beta2", "epsilon", "weight_decay"}
    prompts, new_tokens

A step is forward and backward of all datums, whose losses are summed, and an update. Sampled tokens, the likeliest ones,
are written to SIDE.tokens: {"tokens": [[one of each prompt, ...], ...]}.
"""
import json
import sys

import torch
from torch.nn.functional import cross_entropy

import turns

try:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
except ModuleNotFoundError as error:
    sys.exit(f"this Python has no {error.name}: run {sys.executable} -m pip install transformers peft==0.21.2")


def padded(rows, value, left=False):
    """Rows of one length, and where they are not padding."""
    longest = max(map(len, rows))
    padding = [[value] * (longest - len(row)) for row in rows]
    whole = [fill + row if left else row + fill for fill, row in zip(padding, rows)]
    ours = [[0] * len(fill) + [1] * len(row) if left else [1] * len(row) + [0] * len(fill) for fill, row in zip(padding, rows)]
    return torch.tensor(whole), torch.tensor(ours)


def steps(case, model):
    """A function that makes one step and returns its loss and the gradient's norm."""
    datums = sorted(case["datums"], key=lambda datum: len(datum["tokens"]))
    groups = [datums[i:i + case["rows_per_batch"]] for i in range(0, len(datums), case["rows_per_batch"])]
    batches = [(*padded([datum["tokens"] for datum in group], 0), padded([datum["targets"] for datum in group], 0)[0],
                padded([datum["weights"] for datum in group], 0.0)[0]) for group in groups]
    adam = case["adam"]
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=adam["learning_rate"], betas=(adam["beta1"], adam["beta2"]), eps=adam["epsilon"],
                                  weight_decay=adam["weight_decay"], fused=True)

    def step():
        total = 0.0
        for tokens, ours, targets, weights in batches:
            logits = model(tokens, attention_mask=ours, use_cache=False).logits
            loss = (cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none") * weights.flatten()).sum()
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]).item()
        optimizer.step()
        optimizer.zero_grad()
        return total, norm
    return step


def generating(case, model, batched):
    """A function that returns the new tokens of each prompt."""
    options = dict(do_sample=False, min_new_tokens=case["new_tokens"], max_new_tokens=case["new_tokens"], pad_token_id=0)
    groups = [case["prompts"]] if batched else [[prompt] for prompt in case["prompts"]]

    @torch.inference_mode()
    def generate():
        found = []
        for group in groups:
            tokens, ours = padded(group, 0, left=True)
            found += model.generate(input_ids=tokens, attention_mask=ours, **options)[:, tokens.shape[1]:].tolist()
        return found
    return generate


def run(rank, kind):
    case = rank.case()
    torch.set_num_threads(case["threads"])
    base = AutoModelForCausalLM.from_pretrained(case["model"], dtype=torch.float32)
    model = PeftModel.from_pretrained(base, case["adapter"], is_trainable=kind == "step")
    if kind == "step":
        model.train()
        step = steps(case, model)
        for _ in rank.turns():
            seconds, (loss, norm) = turns.timed(step)
            rank.answer(seconds=[seconds], losses=[loss], norms=[norm])
        return
    model.eval()
    generate = generating(case, model, kind == "batched")
    for _ in rank.turns():
        seconds, tokens = turns.timed(generate)
        (rank.exchange / f"{rank.side}.tokens").write_text(json.dumps({"tokens": tokens}))
        rank.answer(seconds=[seconds], losses=[], norms=[])


if __name__ == "__main__":
    turns.main(run)
