"""Fails when code outside the normaliser's one function divides by a number of ranks, tokens, targets, samples or
micro-batches.

The law: gradients and losses are summed everywhere and divided once, by factors_of(), of which Normalizer::scale is made.
A second division is the commonest mistake of distributed trainers, and Adam hides it. Divisions that are not means of
gradients or losses are listed in ALLOWED with their reason; an entry that matches nothing any more fails too.
Before the tree, the check runs on planted examples: it must find the wrong ones, in every file of src/loss as well, and
pass the right ones.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
THE_ONE_FILE, THE_ONE_FUNCTION = "src/loss/normalizer.cpp", "std::vector<std::optional<double>> factors_of("

# (file, the code of the line, why it is no second division)
ALLOWED = [
    ("src/plan/recipe.cpp", "samples / data_ranks", "the micro-batch that a plan proposes"),
    ("src/plan/work.cpp", "part = (ranks - 1) / ranks", "the part of a buffer that a rank sends"),
    ("src/plan/work.cpp", "double(n - n / before) / ranks", "the part of an exchange that leaves a host"),
    ("src/plan/work.cpp", "double(pairs.size())", "the average pairs of a sequence, for a predicted time"),
    ("src/plan/time.cpp", "std::int64_t(squares / tokens)", "the average length of a document, for a predicted time"),
    ("src/plan/published.cpp", "return (ranks - 1) / ranks", "the part of a buffer that a rank sends"),
    ("src/plan/laws.cpp", "at.value / now", "how far a law is from biting"),
    ("src/plan/laws.cpp", "batch / double(ranks)", "the tokens of a rank of a predicted layout"),
    ("src/plan/laws.cpp", "samples_ / c_.data_ranks()", "the samples of a rank of a predicted layout"),
    ("src/plan/laws.cpp", "most / size", "the micro-batches of a predicted layout"),
    ("src/plan/laws.cpp", "best_.step.bubble / best_.seconds.value", "the bubble's part of a predicted step"),
    ("src/plan/planner.cpp", "best.step.uneven / best.seconds.value", "a part of a predicted step"),
    ("src/plan/search.cpp", "tokens / seconds.value", "predicted tokens a second"),
    ("src/plan/search.cpp", "(made.seconds.value * peak * candidate.ranks)", "predicted FLOPs utilisation"),
    ("src/plan/search.cpp", "data / changed.replicas", "the shards of a layout"),
    ("src/plan/search.cpp", "*one.seconds / best.seconds.value", "how much longer a predicted step is"),
    ("src/plan/schedule.cpp", "/ period->micro_batches", "how often a pipeline's period is repeated"),
    ("src/serve/models/on_ranks.cpp", "static_cast<std::int64_t>(request.data[datum].tokens.size())", "columns of targets, from the size of a datum's list"),
    ("src/sampler/draw.cpp", "(value - largest) / divisor", "logits by the temperature, before a token is drawn"),
    ("src/sampler/sampler.cpp", "1 + (first - targets) / of.prompt_targets.size(1)", "the row of a place in a matrix"),
    ("src/layout/placement.cpp", "whole = blocks / size, rest = blocks % size",
     "cuts a bucket into whole blocks, one part per rank"),
    ("src/comm/shm/reductions.cpp", "(n + ranks * line - 1) / (ranks * line)",
     "cuts a buffer into slices of whole cache lines, one per rank"),
    ("src/comm/shm/operation.cpp", "engine.options().chunk_bytes / static_cast<std::uint64_t>(engine.size())",
     "cuts a staging buffer into parts, one per rank"),
    ("src/comm/shm/engine.cpp", "kAll / static_cast<std::uint64_t>(size) / 64 * 64",
     "shares a rank's memory for messages out to its peers"),
    ("src/comm/call.cpp", "splits.empty() ? total / size_", "cuts rows into equal parts, one per rank"),
    ("src/comm/call.cpp", "{c10d::ReduceOp::AVG,", "PyTorch asks the backend for it; Group refuses it"),
    ("src/comm/call.cpp", "{c10d::ReduceOp::PREMUL_SUM,",
     "PyTorch asks the backend for it; Group refuses it"),
    ("src/kernels/reduce.cpp", "value / static_cast<Value>(count)", "AVG, for PyTorch alone"),
    ("src/comm/mpi/mpi.cpp", "combined.div_(size", "the mean that PyTorch asked for"),
    ("src/loss/term_graph.cpp", "reduction == at::Reduction::Mean", "looks for such a mean in order to refuse it"),
    ("src/loss/term_graph.cpp", "step.mean() : term.mean", "the kind of mean, not a mean"),
    ("src/loss/normalizer.cpp", "Normalizer(checked(of).mean()", "which mean it is"),
    ("src/loss/normalizer.cpp", "1 / result.value", "a deferred mean: the same division, of the finished gradient"),
    ("src/loss/normalizer.cpp", "terms_[i].value += sum / divisor", "the logged loss: what was differentiated"),
    ("src/loss/normalizer.cpp", "weight * (sum / divisor)", "the logged loss: what was differentiated"),
    ("src/loss/own_loop.cpp", "sums[0] / divisor", "a loop of one's own, which has no normaliser: its one division"),
    ("src/loss/normalizer.cpp", "ranks = size / replicas", "ranks of each replica"),
    ("src/loss/normalizer.cpp", "step_counts.rank / ranks", "the replica of this rank"),
    ("src/loss/normalizer.cpp", "share[t] / t_b", "sample_mean: the weight of a token in its sample's mean"),
    ("src/loss/normalizer.cpp", "rows_by_rank.size()) / rule.replicas", "ranks of each replica"),
    ("src/loss/projection.cpp", "(shard.vocabulary + ranks - 1) / ranks", "each rank's columns"),
    ("src/loss/projection.cpp", "kMostBytes / element / (tiles.tokens", "the size of a tile"),
    ("src/loss/projection.cpp", "elements / count", "rows of a slice"),
    ("src/loss/token_losses.cpp", "prediction.numel() / tokens", "elements of a token, over which its loss is a mean"),
    ("src/loss/ranking/ranking.cpp", "slopes[c].slopes[i] / whole.mass", "ranking: a mean over the rows of all ranks"),
    ("src/loss/ranking/cores.cpp", "pool.weight(anchor_rows[k]) / whole", "ranking: a mean over the rows of all ranks"),
    ("src/loss/ranking/cores.cpp", "pool.weight(rows.back()) / whole", "ranking: a mean over the rows of all ranks"),
    ("src/loss/ranking/cores.cpp", "pool.weight(rows[i]) / whole", "ranking: a mean over the rows of all ranks"),
    ("src/loss/ranking/cores.cpp", "whole.weighted / whole.mass", "ranking: a mean over the rows of all ranks"),
    ("src/loss/ranking/cores.cpp", "own.slopes[i] / sums.mass", "ranking: a mean over the rows of all ranks"),
    ("src/loss/ranking/focal.cpp", "totals.sum / divisor", "ranking: a mean over the rows of all ranks"),
    ("src/loss/ranking/focal.cpp", "losses.sum() / divisor", "ranking: this rank's share of that mean"),
    ("src/loss/ranking/ranking.cpp", "above / static_cast<double>(divisor)", "ranking: a mean over classes"),
    ("src/verify/diagnose_gradient.cpp", "- target) / whole", "the diagnosis: what a fit leaves"),
    ("src/cli/train.cpp", "3 / samples + (4 + kForward) / micro_batches", "how long the proof takes, in steps"),
    ("src/serve/models/trained_model.cpp", "1 / divisor", "the server's one division, in the update of a step"),
    ("src/serve/verify/verify_server.cpp", ": 1) / denominator", "the reference that a server is compared with: one process"),
    ("src/serve/verify/verify_server.cpp", "ne(0)).mean()", "the reference that a server is compared with: gspo's mean over a sequence"),
    ("src/serve/verify/verify_server.cpp", "1 / one.counts[kWeights]", "what a server would have that divides each datum"),
    ("src/serve/verify/verify_server.cpp", "numbers.size() / datum.tokens.size()", "columns of an array"),
    ("src/serve/verify/verify_server.cpp", "1 / static_cast<double>(call.data.size())",
     "what a server would have that divides each call"),
    ("src/verify/oracle.cpp", "term.sum(batch) / divisor", "the outside oracle: one process, no code of the normaliser"),
    ("src/comm/group.cpp", "* (size - 1) / size", "bytes that a ring algorithm sends"),
    ("src/comm/grid/grid.cpp", "index /= axes[i].size", "the grid of ranks"),
    ("src/bench/cases/context.cpp", "best = alone / bench.options.ranks", "the time of work that is divided evenly"),
    ("src/parallel/pipeline/schedules.cpp", "shape.micro_batches / shape.ranks", "whole rounds of micro-batches"),
    ("src/parallel/pipeline/schedules.cpp", "step / shape.ranks", "which stage of a rank is next"),
    ("src/data/loader.cpp", "count * rank / size", "assigns packs to ranks"),
    ("src/data/store.cpp", "store.num_tokens()", "the average length of a document, for display"),
    ("src/train/text_task.cpp", "count[token]", "the unigram entropy of the corpus, for display"),
    ("src/model/attention/kernel.hpp", "return q.size(1) / k.size(1)", "query heads of each key head"),
    ("src/model/fused.cpp", "wide.pow(2).mean(-1", "RMSNorm: the mean square of a row, over its channels"),
    ("src/train/step.cpp", "options_.max_norm).div(norm + 1e-6)", "the clip coefficient, on a device"),
    ("src/verify/diagnosis.cpp", "cell.targets / targets_", "the diagnosis: a micro-batch's part of the reference"),
    ("src/train/video_task.cpp", ".pow(2).mean(1)", "a patch's loss for the oracle: the mean over its numbers"),
    ("src/train/router_losses.cpp", "sum / static_cast<double>(layers_.size())", "the mean of the layers' z-losses; the step divides by tokens"),
    ("src/train/text_task.cpp", "of_layer.mean() - of_layer", "not of a loss: which experts got less than the mean"),
    ("src/train/router_losses.cpp", "known->places.mean(0)", "the oracle: one process, plain code of the balance loss"),
    ("src/train/router_losses.cpp", "fraction.dot(mass) / known->tokens",
     "the oracle: one process, plain code of the balance loss"),
    ("src/train/router_losses.cpp", ".pow(2).sum() / static_cast<double>(logits.size())",
     "the oracle: one process, plain code of the z-loss"),
    ("src/verify/oracle.cpp", "/ static_cast<double>(part.size())", "the outside oracle: the mean over micro-batches"),
    ("src/verify/oracle.cpp", "logarithms.mean(1)", "the outside oracle: smoothed labels, a mean over the vocabulary"),
    ("src/verify/oracle.cpp", "factors / declared.denominator",
     "the outside oracle: one process that shares no code with the normaliser"),
]

# Names of the divisor of a mean of gradients or losses: as a whole word or as the last part of a name.
COUNTS = (r"(?:\w*_)?(?:world|world_size|size|ranks|num_ranks|nranks|W|G|targets|tokens|num_targets|num_tokens|"
          r"divisor|mass|whole|t_b|samples|num_samples|micro_batches|accumulation|grad_acc|replicas|denominator|count|counts|N|value)_?")
# An operand: an optional cast or parenthesis, then member accesses and calls, e.g. double(group_.size()).
OPERAND = (r"\(*\s*(?:static_cast\s*<[^>]*>\s*\(|double\s*\(|float\s*\()?\s*\(*"
           r"(?:\w+(?:\(\))?(?:\[[^\]]*\])?\s*(?:\.|->|::)\s*)*" + COUNTS + r"\b(?!\s*(?:\.|->|::))")
FORBIDDEN = [
    (re.compile(r"/=?\s*" + OPERAND), "a division by a number of ranks, tokens or samples"),
    (re.compile(r"\b(?:at|torch)::(?:div|true_divide|mean)\s*\(|(?:\.|->)(?:div_?|true_divide_?|divide_?|mean)\s*\("),
     "a tensor division or mean"),
    (re.compile(r"\bReduce(?:Op|Ops)?\w*::(?:k?AVG|kAvg|kMean|PREMUL_SUM|kPremulSum)\b|\bReduction::Mean\b"),
     "a mean as a reduction"),
]

WRONG = [
    "gradients.div_(group.size());",
    "bucket.gradients /= world_size;",
    "loss = sum / static_cast<double>(step_counts.targets);",
    "scale = 1.0 / group_.size();",
    "const double share = sum.item<double>() / (batch.num_targets());",
    "coefficient = max_norm / norm / ranks;",
    "auto loss = per_token.mean();",
    "loss = at::mean(per_token);",
    "loss / micro_batches.size()",
    "backend->allreduce(tensors, {c10d::ReduceOp::AVG});",
    "at::cross_entropy_loss(logits, targets, {}, at::Reduction::Mean)",
    "gradient *= 1.0f / float(W);",
    "factors.push_back(term.weight / divisor);",
]
RIGHT = [
    "#include \"isograd/world.hpp\"",
    "// divide by the number of ranks",
    "throw Error(\"tokens / targets\");",
    "tokens_per_second = tokens / seconds;",
    "const double step = learning_rate / (1 - std::pow(beta1, t));",
    "return max_norm / (norm + 1e-6);",
    "path = root / name;",
    "elements += sizeof(taylor) / sizeof(T);",
    "folder / size_text",
]


def code_lines(text):
    """The lines of a C++ text with comments and the contents of strings blanked out."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)

    def blank(match):
        found = match.group(0)
        return '""' + "\n" * found.count("\n") if found[0] in "\"R" else "\n" * found.count("\n") or " "

    return ["" if line.lstrip().startswith("#include") else line for line in pattern.sub(blank, text).split("\n")]


def findings(text):
    """[(line number, code, why)] of a C++ text. A division broken over two lines is seen too."""
    lines, found = code_lines(text), []
    for number, line in enumerate(lines, 1):
        if line.rstrip().endswith("/") and number < len(lines):
            line = line.rstrip() + " " + lines[number].lstrip()
        for pattern, why in FORBIDDEN:
            if pattern.search(line):
                found.append((number, line.strip(), why))
                break
    return found


def outside(name, text):
    """The text without the one function that may divide: its lines are blank."""
    if name != THE_ONE_FILE:
        return text
    begin = text.index("\n" + THE_ONE_FUNCTION)
    end = text.index("\n}\n", begin)
    return text[:begin] + "\n" * text.count("\n", begin, end) + text[end:]


def is_test(name):
    return re.search(r"_(test|testing|cases)\.[hc]pp$|/test_\w+\.[hc]pp$", name)


def self_test():
    problems = [f"planted mistake not found: {code}" for code in WRONG if not findings(code)]
    for path in ROOT.glob("src/loss/**/*.[hc]pp"):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        known = len(findings(outside(name, text)))
        for planted in (f"{WRONG[0]}\n{text}", f"{text}\nvoid planted() {{\n  {WRONG[-1]}\n}}\n"):
            if len(findings(outside(name, planted))) != known + 1:
                problems.append(f"planted mistake not found in {name}")
    text = (ROOT / THE_ONE_FILE).read_text()
    if len(findings(text)) != len(findings(outside(THE_ONE_FILE, text))) + 1:
        problems.append(f"{THE_ONE_FILE}: expected one division in {THE_ONE_FUNCTION}...), of a term's weight")
    problems += [f"false alarm: {code}" for code in RIGHT if findings(code)]
    return problems


def main():
    problems, used, files = self_test(), set(), 0
    for path in sorted([*ROOT.glob("src/**/*.[hc]pp"), *ROOT.glob("include/**/*.hpp")]):
        name = path.relative_to(ROOT).as_posix()
        if is_test(name):
            continue
        files += 1
        for number, code, why in findings(outside(name, path.read_text())):
            allowed = next((i for i, (file, text, _) in enumerate(ALLOWED) if file == name and text in code), None)
            if allowed is None:
                problems.append(f"{name}:{number}: {why} outside {THE_ONE_FILE}, {THE_ONE_FUNCTION}...): {code}")
            else:
                used.add(allowed)
    for i, (file, text, _) in enumerate(ALLOWED):
        if i not in used:
            problems.append(f"ALLOWED names '{text}' in {file}, which is not there any more: remove the entry")
    for problem in problems:
        print(problem)
    print(f"{files} files, {len(WRONG)} planted mistakes, {len(ALLOWED)} allowed divisions, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
