"""The same step on one device: python one_device.py --ranks 3 --dump dumps/one. What the others are compared with."""
import argparse

import torch
from isograd_dump import write_dump
from model_and_data import PRECISION, cross_entropy, make_model, num_targets, pack_of


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True, help="whose packs make up the batch")
    parser.add_argument("--dump", required=True)
    parser.add_argument("--dtype", default="float64")
    options = parser.parse_args()

    model = make_model(getattr(torch, options.dtype))
    packs = [pack_of(rank) for rank in range(options.ranks)]
    total = sum(num_targets(targets) for _, targets, _ in packs)
    loss, shares = 0.0, {}
    for rank, (tokens, targets, _) in enumerate(packs):
        model.zero_grad()
        share = cross_entropy(model, tokens, targets, "sum") / total
        share.backward()
        loss += share.item()
        shares[rank, 0] = {name: p.grad.clone() for name, p in model.named_parameters()}
    gradients = {name: sum(share[name] for share in shares.values()) for name in shares[0, 0]}
    write_dump(options.dump, gradients, shares, loss=loss, targets=total,
               tokens=sum(len(tokens) for tokens, _, _ in packs),
               norm=float(torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()),
               samples=[i for *_, ids in packs for i in ids], counts=[[num_targets(t)] for _, t, _ in packs],
               precision=PRECISION[options.dtype])


if __name__ == "__main__":
    main()
