"""What a verdict says to change, followed: by mistake the code that it prints, with the user's names, and the edit of the wrong program."""
import dataclasses
import difflib
import re

TRAINER = "the trainer's own lines"


@dataclasses.dataclass
class Change:
    """codes:  as printed between backticks: as they stand in the lines that are written, or are taken out.
    edit:   the lines of the wrong program, and what is put in their place; or the name of a right variant of trainers.py, whose lines
            are put into the wrong program; or TRAINER."""

    codes: dict
    edit: "dict | str" = TRAINER

    def apply(self, lines, trials, trial, source):
        """The program of the mistake with the change made. source(lines, trial): the program."""
        if isinstance(self.edit, dict):
            program = source(lines, trial)
            for old, new in self.edit.items():
                old, new = (text.strip("\n") for text in (old, new))
                start = program.index(f"def {trial.trainer}(w):")
                assert program[start:].split("\n@trainer")[0].count(old) == 1, (trial.name, old)
                program = program[:start] + program[start:].replace(old, new, 1)
            return program
        edits = [] if self.edit == TRAINER else trials[self.edit].edits
        kept = [] if self.edit == TRAINER else [(place, count, instead) for place, count, instead in trial.edits if not any(
            place - count < other and other - size < place for other, size, _ in edits)]
        return source(lines, dataclasses.replace(trial, edits=[*kept, *edits]))

    def written(self, wrong, program):
        """Of the codes those that stand in no line which was changed."""
        lines = [line[2:] for line in difflib.ndiff(wrong.splitlines(), program.splitlines()) if line[:2] in ("+ ", "- ")]
        return [code for code, own in self.codes.items() if not any(own in line for line in lines)]


def printed(text):
    return re.findall("`([^`]+)`", text)


SCALE, SUM, REDUCE = "counted.scale(loss_sum).backward()", "isograd.sum_gradients(model)", "isograd.all_reduce_gradients(model)"
TOKENS = "counted = isograd.TokenMean().count(targets)"
CLIP = "norm = isograd.clip_grad_norm_(model, max_norm)"
ADAMW = "optimizer = torch.optim.AdamW(model.parameters())"
ENTROPY = 'F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="none")'
GATHER = "isograd.all_gather_rows(features)"
OBJECTS = "dist.all_gather_object(everyone, values)"
UPDATE = "optimizer.step()"


def of(*codes):
    return {code: code for code in codes}


token_mean = Change({TOKENS: "counted = isograd.TokenMean().count([torch.cat([document[1:]", SCALE: "counted.scale(each.sum())",
                     SUM: "isograd.sum_gradients(DDP(Decoder()))"}, "token_mean_of_isograd")


def token_mean_of_answers(old):
    return Change({TOKENS: "counted = isograd.TokenMean().count([labels[:, 1:]])", SCALE: "counted.scale(loss).backward()",
                   SUM: "isograd.sum_gradients(DDP(Decoder(tied=True)))"},
                  {"model = DDP(Decoder(tied=True))": "model = isograd.sum_gradients(DDP(Decoder(tied=True)))",
                   "        optimizer.zero_grad()": "        counted = isograd.TokenMean().count([labels[:, 1:]])\n        optimizer.zero_grad()",
                   old: "counted.scale(loss).backward()"})


def summed_alone(parameters):
    line = f"isograd.all_reduce_gradients({parameters})"
    return Change({"isograd.all_reduce_gradients(parameters)": line},
                  {"        optimizer.step()\n": f"        {line}\n        optimizer.step()\n"})


def second_term(old):
    return Change(of("2 * term", "soft(model, sample)"), {
        old: "2 * term", "        loss = F": "        term = sum(soft(model, sample) for sample in samples)\n        loss = F"})


CHANGES = {
    "schedule_of_rank_0": Change({"scheduler.step()": "schedule.step()"}),
    "never_zeroed": Change(of("optimizer.zero_grad()")),
    "counted_before_shift": token_mean,
    "counted_in_bf16": token_mean,
    "counts_at_most": token_mean,
    "world_size_forgotten": Change({SUM: "isograd.sum_gradients(DDP(Decoder()))"},
                                   {"model = DDP(Decoder())": "model = isograd.sum_gradients(DDP(Decoder()))"}),
    "divided_twice": Change({"/ len(micro_batches)": "/ len(batches)"}),
    "decay_in_loss": Change(of("p.square().sum()")),
    "steps_each_micro_batch": Change(of(UPDATE)),
    "clips_each": Change({CLIP: "norm = isograd.clip_grad_norm_(model, 0.05)"}, {
        """
        for p in model.parameters():
            clip_grad_norm_(p, 0.05)""": "        norm = isograd.clip_grad_norm_(model, 0.05)"}),
    "zeroed_before_step": Change(of("optimizer.zero_grad()")),
    "layer_rates": Change({"p.grad *= factor": "embedding.weight.grad *= 0.5"}),
    "prompts_trained": Change({"labels.masked_fill(ignored, -100)": "tokens.masked_fill(labels == IGNORED, -100)"}, {
        "collate(w, [(tokens, tokens) for tokens, _ in samples])":
        "collate(w, [(tokens, tokens.masked_fill(labels == IGNORED, -100)) for tokens, labels in samples])"}),
    "padding_seen": Change({"sees = sees & real[:, None] | torch.eye(length, dtype=torch.bool)":
                            ".tril() & real[:, None] | torch.eye(tokens.shape[1], dtype=torch.bool)"},
                           {".tril()": ".tril() & real[:, None] | torch.eye(tokens.shape[1], dtype=torch.bool)"}),
    "tie_computed_apart": Change(of(".data")),
    "cast_early": Change(of(".bfloat16()")),
    "padding_counted": token_mean_of_answers("(loss * w.size / targets).backward()"),
    "not_smoothed": Change({"F.cross_entropy(logits, labels, label_smoothing=0.1)":
                            'F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.1)'}),
    "not_shifted": Change(of("logits[:, :-1]", "labels[:, 1:]")),
    "last_target_dropped": Change({ENTROPY: 'F.cross_entropy(a[:-1], b[1:], reduction="none", label_smoothing=0.1)'}, {
        'F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 1:-1].flatten(), reduction="sum", label_smoothing=0.1)':
        'sum(F.cross_entropy(a[:-1], b[1:], reduction="none", label_smoothing=0.1).sum() for a, b in zip(logits, labels))'}),
    "mean_over_answers": token_mean_of_answers(
        "F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1).backward()"),
    "at_least_one": token_mean_of_answers("(loss / (labels[:, 1:] != IGNORED).sum().clamp(min=1)).backward()"),
    "average_left_in": Change({"model.load_state_dict(averaged)": "model.load_state_dict(averaged.state_dict())"}),
    "decays_before_backward": Change({"p.data.mul_(factor)": "p.data.mul_(0.9)"}),
    "biases_not_reduced": summed_alone("[p for p in model.parameters() if p.ndim == 1]"),
    "last_bucket_lost": summed_alone("[model.blocks[1].down.bias, *model.norm.parameters()]"),
    "group_of_two": Change(of(REDUCE), "reduced_by_isograd"),
    "summed_in_bf16": Change(of("gradient.bfloat16()")),
    "largest_of_ranks": Change({"dist.all_reduce(gradient, op=dist.ReduceOp.SUM)": "dist.all_reduce(flat, op=dist.ReduceOp.SUM)"}, {
        "op=dist.ReduceOp.MAX": "op=dist.ReduceOp.SUM"}),
    "rank_1_averages_in_place": Change({"model.load_state_dict(averaged)": "model.load_state_dict(averaged.state_dict())"}),
    "hook_sums": Change(of(REDUCE), {
        "        p.register_post_accumulate_grad_hook(average)": "        pass", "each.sum() * w.size / 16": "each.sum() / 16",
        "        optimizer.step()": "        isograd.all_reduce_gradients(model)\n        optimizer.step()"}),
    "blocks_in_no_group": Change({ADAMW: "optimizer = AdamW(model.parameters(), lr=1e-2)"}),
    "frozen_in_the_loop": Change(of("requires_grad_(False)")),
    "first_synced": Change({"model.set_requires_gradient_sync(last)": "model.set_requires_gradient_sync(i + 1 == len(batches))"}),
    "average_of_shards": Change(of(SUM), {"    optimizer = AdamW": "    isograd.sum_gradients(model)\n    optimizer = AdamW"}),
    "norm_of_own_shards": Change({CLIP: "norm = isograd.clip_grad_norm_(model, 0.3)"}, {
        """
        square = sum(p.grad.to_local().square().sum() for p in held)
        for p in held:
            p.grad *= min(1.0, 0.3 / square.sqrt().item())""": "        norm = isograd.clip_grad_norm_(model, 0.3)",
        "norm=square.sqrt().item()": "norm=norm"}),
    "replicas_forgotten": Change({"fully_shard(model, mesh=mesh)": "fully_shard(Classifier(), mesh=mesh)"}),
    "sees_other_documents": Change({"sees = (document[:, None] == document) & torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()":
                                    "sees = (number[:, None] == number) & torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()"}),
    "positions_run_on": Change(of("positions = torch.cat([torch.arange(len(document)) for document in pack])"), {
        "positions = torch.arange(len(tokens))": "positions = torch.cat([torch.arange(len(document)) for document in pack])"}),
    "first_target_dropped": Change({ENTROPY: 'F.cross_entropy(model(document[:-1]), document[1:], reduction="none")'}, {
        "F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction=\"sum\")":
        'sum(F.cross_entropy(model(document[:-1]), document[1:], reduction="none").sum() for document in pack)'}),
    "pack_dropped": Change(of("loss.backward()")),
    "own_rows_alone": Change({GATHER: "torch.cat(dnn.all_gather(part))"}),
    "one_direction": Change({"(F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2":
                             "pair_loss((images, all_images), (texts, all_texts), scale, 4 * w.rank)"}),
    "own_pairs": Change(of(GATHER), {
        "        loss = pair_loss(": """
        images, texts = (isograd.all_gather_rows(features) for features in (images, texts))
        loss = pair_loss("""}),
    "balance_of_rank": Change({OBJECTS: "dist.all_gather_object(everyone, F.one_hot(routed.argmax(-1), 3))"}, {
        "        chosen = F.one_hot(routed.argmax(-1), 3).sum(0) / len(routed)": """
        everyone = [None] * w.size
        dist.all_gather_object(everyone, F.one_hot(routed.argmax(-1), 3))
        chosen = torch.cat(everyone).sum(0) / tokens"""}),
    "balance_not_scaled": Change(of("0.1 * term", "term * dist.get_world_size()"), {
        "        loss = loss + 0.1 * 3 * (chosen * routed.sum(0)).sum() / tokens": """
        term = 3 * (chosen * routed.sum(0)).sum() / tokens
        loss = loss + 0.1 * term * dist.get_world_size()"""}),
    "balance_forgotten": Change(of("0.1 * term"), {
        "        loss = loss + 0 * routed.sum()": """
        term = 3 * (chosen * routed.sum(0)).sum() * w.size / tokens
        loss = loss + 0.1 * term"""}),
    "divergence_mean": second_term("0.5 * 2**2 * divergence"),
    "temperature_not_squared": second_term("0.5 * divergence"),
    "in_training_mode": Change({"norm.eval().train = lambda mode=True: norm": "normal.eval().train = lambda mode=True: normal"}, {
        "    model.module.normal.eval()": "    normal = model.module.normal\n    normal.eval().train = lambda mode=True: normal"}),
    "divided_by_count": Change({"counted = isograd.WeightedMean().count(weights)": "counted = isograd.WeightedMean().count([weight[y]])"},
                               "weighted_mean_of_isograd"),
    "weighted_rank_means": Change({"counted = isograd.WeightedMean().count(weights)": "counted = isograd.WeightedMean().count([weight[y]])",
                                   SCALE: "counted.scale(F.cross_entropy(model(x), y, weight=weight, reduction=\"sum\"))",
                                   SUM: "isograd.sum_gradients(DDP(Classifier(statistics=True)))"}, "weighted_mean_of_isograd"),
    "steps_past_scaler": Change(of("scaler.step(optimizer)")),
    "rows_count_alike": Change({
        "counted = isograd.SampleMean().count(samples, targets)": "counted = isograd.SampleMean().count([ids], [targets])",
        "counted.scale((losses * counted.weights(j)).sum()).backward()": "counted.scale((losses * counted.weights(0)).sum())",
        SUM: "isograd.sum_gradients(model)"}, {
        "    optimizer = AdamW": "    isograd.sum_gradients(model)\n    optimizer = AdamW",
        "        loss = torch.cat([rows(model, sample) for sample in samples]).sum() * w.size / w.sum(sum(len(s[1]) for s in samples))": """
        ids = torch.cat([torch.full((len(s[1]),), s[0]) for s in samples])
        targets = torch.cat([s[2] for s in samples])
        counted = isograd.SampleMean().count([ids], [targets])
        losses = torch.cat([rows(model, sample) for sample in samples])
        loss = counted.scale((losses * counted.weights(0)).sum())"""}),
    "seeded_by_rank": Change({"torch.manual_seed(sample.id)": "torch.manual_seed(s[0])"}, {
        "        torch.manual_seed(w.rank)": "        means = []", """
        loss = sum(F.cross_entropy(model(s[1]), s[2]) for s in samples) *""": """
        for s in samples:
            torch.manual_seed(s[0])
            means.append(F.cross_entropy(model(s[1]), s[2]))
        loss = sum(means) *"""}),
    "dropout_off": Change(of("model.train()"), {"model.eval()": "model.train()"}),
    "head_made_later": Change({ADAMW: "head = AdamW(model.head.parameters(), lr=1e-3)"}, {
        "    model = DDP(": "    head = AdamW(model.head.parameters(), lr=1e-3)\n    model = DDP("}),
    "reentrant": Change({"use_reentrant=False": "model.module.recompute = False"}, {"recompute = True": "recompute = False"}),
    "blocks_without_grad": Change(of("torch.no_grad()")),
    "branch_detached": Change(of(".detach()")),
    "cut_before_second_block": Change(of(".detach()")),
    "row_without_gradient": Change(of("register_hook")),
    "head_not_stepped": Change({UPDATE: "head.step()"}),
    "low_rank_means": Change({TOKENS: "counted = isograd.TokenMean().count([torch.cat([document[1:] for document in documents])])",
                              SCALE: "counted.scale(each.float().sum())", SUM: "isograd.sum_gradients(DDP(Decoder()))"}, {
        "model = DDP(Decoder())": "model = isograd.sum_gradients(DDP(Decoder()))",
        "        loss = each.mean()": """
        counted = isograd.TokenMean().count([torch.cat([document[1:] for document in documents])])
        loss = counted.scale(each.float().sum())"""}),
    "mixed_targets_dropped": Change({ENTROPY: 'F.cross_entropy(model(document[:-1]), document[1:], reduction="none")'}, {
        "next_token(model, document[:-1])": 'F.cross_entropy(model(document[:-1]), document[1:], reduction="none")'}),
    "baseline_of_rank": Change({OBJECTS: "dist.all_gather_object(everyone, (rewards, groups))"}, {
        "        advantage = relative(rewards, groups)": """
        dist.all_gather_object(everyone, (rewards, groups))
        advantage = relative(*(torch.cat(part) for part in zip(*everyone)))[first:first + len(logs)]"""}),
    "baseline_of_batch": Change({"dist.all_gather_object(everyone, (rewards, groups))": "dist.all_gather_object(everyone, (rewards, groups))",
                                 "rewards[groups == group].mean()": "all_rewards[all_groups == group].mean()"}, {
        "        advantage = rewards - torch.cat([r for r, _ in everyone]).mean()": """
        dist.all_gather_object(everyone, (rewards, groups))
        all_rewards, all_groups = (torch.cat(part) for part in zip(*everyone))
        advantage = rewards - torch.stack([all_rewards[all_groups == group].mean() for group in groups])"""}),
}
