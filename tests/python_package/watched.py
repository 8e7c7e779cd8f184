"""python watched.py [NAME ...]: trainers of tests/compare_trials, right and mistaken, with isograd.watch around their step.

Nothing but the step and what it logs is theirs here: no dump of their own. What the verdict said of each, as JSON.
"""
import json
import pathlib
import sys

import torch
import torch.distributed as dist

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "compare_trials")]

import mistakes  # noqa: E402
import right  # noqa: E402
import loops  # noqa: E402
import steps  # noqa: E402
from ranks import on_ranks  # noqa: E402
from reference import nll_of  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from trainers import Trainer, gathered, gradients_of, held_norm  # noqa: E402

import isograd  # noqa: E402

# The optimizer is the one that is watched.
Trainer.make_optimizer = lambda self, model: torch.optim.SGD(self.parameter_groups(model), lr=1.0)
Trainer.update = lambda self, model: self.optimizer.step()
Trainer.watch_options = {}
PRECISION = {torch.float64: "fp64", torch.bfloat16: "bf16_parameters", torch.float32: "fp32"}


class Groups:
    def __init__(self, size):
        self.first = {n: dist.new_group(list(range(n))) if n < size else dist.group.WORLD for n in range(1, size + 1)}
        if size == 4:
            self.hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def watched(trial, groups):
    trainer, problem = trial.trainer(trial.problem), trial.problem
    trainer.groups, group, rank = groups, groups.first[problem.ranks], dist.get_rank()

    def loss(model, sample):
        return nll_of(model, sample, problem, PRECISION[next(model.parameters()).dtype])

    model = trainer.wrap(trainer.make_model(rank), group)
    trainer.optimizer = trainer.make_optimizer(model)
    options = {"ids": lambda sample: sample.id, **trainer.watch_options}
    with isograd.watch(model, trainer.optimizer, micro_batches=trainer.assigned[rank], loss=loss, mean=problem.mean,
                       max_norm=problem.max_norm or None, make_model=lambda: problem.make_model(problem.precision),
                       **options) as step:
        record = trainer.work(model, rank)
        trainer.reduce_gradients(model, group)
        trainer.after_reduction(model, rank)
        records = gathered({**record, "held_norm": held_norm(model)}, group)
        if problem.max_norm:
            trainer.clip(model, 1.0)
        trainer.update(model)
        if trainer.tells_ranks:
            step.log(norm=trainer.norm_on(rank, gradients_of(model), records))
        step.log(loss=trainer.logged(records), targets=trainer.targets_logged(records))
    verdict = step.verdict
    return {"passed": verdict.passed, "said": verdict.findings, "update": verdict.update, "text": str(verdict)}


def main():
    trials = {trial.name: trial for trial in right.TRIALS + mistakes.TRIALS + steps.TRIALS + loops.TRIALS if trial.trainer.processes}
    names = sys.argv[1:] or list(trials)
    found = {}
    for size in sorted({trials[name].problem.ranks for name in names}):
        here = [name for name in names if trials[name].problem.ranks == size]

        def run(rank):
            groups = Groups(size)
            return {name: watched(trials[name], groups) for name in here}

        every = on_ranks(size, run)
        assert all(one == every[0] for one in every), "ranks have other verdicts"
        found.update(every[0])
    json.dump({name: {**verdict, "names": trials[name].names, "about": trials[name].about}
               for name, verdict in found.items()}, sys.stdout)


if __name__ == "__main__":
    main()
