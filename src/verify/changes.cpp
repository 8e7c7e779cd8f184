// Keyed by finding: the line that says what to change in a training loop of PyTorch, with code between
// backticks.
#include <fmt/core.h>

#include <map>
#include <string_view>

#include "verify/present.hpp"

namespace isograd {
namespace {

constexpr std::string_view kScale = "`counted.scale(loss_sum).backward()`";
constexpr std::string_view kSum = "`isograd.sum_gradients(model)`";
constexpr std::string_view kClip = "`norm = isograd.clip_grad_norm_(model, max_norm)`";
constexpr std::string_view kSync = "`with contextlib.nullcontext() if last else model.no_sync():`";
constexpr std::string_view kDataGroup = "mesh[\"dp\"]";  // where other ranks see the same samples

// How a loop counts over the whole step, by the mean that its loss is. group: of the ranks; empty: of all.
std::string counted(const std::string& mean, std::string_view group) {
  std::string count = fmt::format("`counted = isograd.TokenMean({}).count(targets)` with the targets", group);
  std::string_view scale = kScale, sum = "the sum of its losses";
  if (mean == "sample") {
    count = fmt::format(
        "`counted = isograd.SampleMean({}).count(samples, targets)` with each token's sample id and target",
        group);
    scale = "`counted.scale((losses * counted.weights(j)).sum()).backward()`", sum = "its number j";
  } else if (mean == "weighted") {
    count = fmt::format("`counted = isograd.WeightedMean({}).count(weights)` with the weights", group);
    sum = "the sum of its weighted losses";
  } else if (mean != "token" && mean != "batch") {
    count =
        fmt::format("`counted = isograd.FixedDenominator(denominator{}{}).count(micro_batches)` with those",
                    group.empty() ? "" : ", ", group);
  }
  return fmt::format(
      "{} of each micro-batch of this rank, before the first backward; {} of each micro-batch with {}; {} "
      "once, for DDP and FSDP2, where under DDP the forwards and backwards of all but the last micro-batch stand in {}",
      count, scale, sum, kSum, kSync);
}

// Keyed by finding, and by `which` where an id has several.
std::map<std::string_view, std::string> changes(const std::string& mean, bool peers) {
  const std::string_view group = peers ? kDataGroup : "";
  const std::string whole_count = counted(mean, group);
  const std::string reduce =
      fmt::format("`isograd.all_reduce_gradients(model{}{})`", peers ? ", " : "", group);
  const auto in_place_of = [&](std::string_view what) {
    return fmt::format("in place of {}: {}", what, whole_count);
  };
  const std::string norm = fmt::format(
      "{}, which counts each element once, on whatever rank it is, and returns the norm before clipping",
      kClip);
  const std::string takes_part = fmt::format(
      "every rank puts its own gradient into each reduction, over the group of all: of a plain model {} "
      "after the last backward, under DDP no `register_comm_hook` of your own; a rank without data makes a "
      "forward and backward of an empty batch there",
      reduce);
  return {
      {"averaged_over_axis",
       fmt::format("sum gradients, for the loss is divided by the count of all ranks: {}; "
                   "or take out what divides by the ranks once more",
                   kSum)},
      {"averaged_over_holders", in_place_of("the average over ranks")},
      {"counted_on_peers",
       "count on the ranks alone that see different targets: "
       "`counted = isograd.TokenMean(mesh[\"dp\"]).count(targets)`"},
      {"multiplied_by_axis",
       "leave out `* dist.get_world_size()`, by whatever name, for gradients are summed: differentiate "
       "`counted.scale(loss_sum)` alone; or average gradients, where each rank has a mean of its own"},
      {"summed_over_micro_batches", in_place_of("each micro-batch's mean")},
      {"unscaled_sum", fmt::format("divide by the count of the whole step: {}", whole_count)},
      {"gradient_scaled_by_count", fmt::format("differentiate what is logged: {}", kScale)},
      {"loss_scaled",
       "log the loss of the whole step: `step.log(loss=counted.loss())`, once, not its sum over "
       "ranks or micro-batches"},
      {"loss_differs",
       "log the loss of the whole step: `step.log(loss=counted.loss())`, in place of one rank's "
       "or of a mean of means"},
      {"count_not_reduced", fmt::format("divide by the count of all ranks: {}", whole_count)},
      {"mean_of_rank_means", in_place_of("each rank's mean")},
      {"mean_of_micro_batch_means", in_place_of("each micro-batch's mean")},
      {"mean_of_micro_batch_means_by_rank", in_place_of("each micro-batch's mean")},
      {"accumulation_rescaled",
       fmt::format("leave gradients as they are between micro-batches, and divide the "
                   "loss: {}",
                   kScale)},
      {"averaged_over_micro_batches",
       "leave out `/ len(micro_batches)`, for the loss is divided by the count of the whole step already"},
      {"reduced_while_accumulating",
       fmt::format("reduce once, after the last backward, and not in a hook or in the loop: {}, a sum, for "
                   "which the loss has no factor of the ranks; under DDP the other backwards stand in {}",
                   reduce, kSync)},
      {"clipped_before_reduction",
       fmt::format("clip once, after the last backward and the reduction: {}", kClip)},
      {"not_finite_empty_micro_batch",
       fmt::format(
           "sum the losses and divide by the count of the whole step, for a mean over no target is 0 / 0: {}",
           whole_count)},
      {"not_finite figures",
       "log what is made of sums and the count of the whole step: `step.log(loss=counted.loss())`; a mean "
       "over no target, as one rank may have it, is 0 / 0"},
      {"not_finite", "find the operation: `with torch.autograd.detect_anomaly():` around the step names it"},
      {"replicas_differ",
       fmt::format(
           "reduce every gradient once on every rank, and change none on one rank alone afterwards "
           "(`p.grad.mul_(factor)`): of a plain model {} after the last backward, in place of a reduction of "
           "your own; under DDP all but the last backward in {}, all parameters unfrozen before DDP is made",
           reduce, kSync)},
      {"not_summed_over_axis",
       fmt::format(
           "sum every gradient once over the ranks that see different samples: of a plain model {} after the "
           "last backward, in place of a reduction of your own; DDP does it with the last backward: {}",
           reduce, kSync)},
      {"not_summed_over_axis some",
       fmt::format("sum these as the others: under DDP `requires_grad_(True)` before it is made, and none in "
                   "`_set_params_and_buffers_to_ignore_for_model`; of a plain model these alone after the "
                   "last backward: `isograd.all_reduce_gradients(parameters{}{})`",
                   peers ? ", " : "", group)},
      {"not_summed_over_axis peers",
       "sum these gradients over that axis after the last backward: "
       "`isograd.all_reduce_gradients(parameters, mesh[\"tp\"])`"},
      {"micro_batches_not_reduced", fmt::format("make the last backward of each rank, and its forward, "
                                                "outside no_sync: {}; of a plain model {} once, after it",
                                                kSync, reduce)},
      {"other_reduction",
       fmt::format("add gradients up: `dist.all_reduce(gradient, op=dist.ReduceOp.SUM)` of each; of a plain "
                   "model {} after the last backward",
                   reduce)},
      {"norm_counts_replicas", norm},
      {"norm_of_own_shard", norm},
      {"norm_before_reduction",
       fmt::format("take the norm after the last backward, which reduces, {}: {}", kSync, norm)},
      {"norms_averaged", norm},
      {"norm_of_largest_part", norm},
      {"norm_misses_elements", norm},
      {"norm_differs", norm},
      {"clip_not_applied", fmt::format("multiply the gradients before `optimizer.step()`: {} does", kClip)},
      {"clip_differs",
       fmt::format("clip by the norm of the whole gradient, once, just before `optimizer.step()`: "
                   "{}",
                   kClip)},
      {"values_clipped",
       fmt::format("clip by the norm, which leaves the direction: {}; where elements are to be clipped say "
                   "where that begins: `step.before_clipping()`",
                   kClip)},
      {"groups_clipped_apart", fmt::format("clip all parameters in one call: {}", kClip)},
      {"optimizer_differs",
       fmt::format(
           "make one `optimizer.step()` an update, with the decay of the reference (`\"weight_decay\": 0.0` "
           "in the group of those without one), and change gradients by nothing but {} before it; where you "
           "clip with your own code, say where: `step.before_clipping()` and `max_norm=`",
           kClip)},
      {"term_scaled",
       "take the factor out of that term, or divide it by a count of its own: "
       "`counted.scale(term_sum).backward()`"},
      {"some_parameters_scaled",
       "reduce these once, as the others: look for a hook on them (`register_hook`, "
       "`register_post_accumulate_grad_hook`), an all_reduce of their own, a weight of two names that is "
       "added up for each (`model.named_parameters()` has it once)"},
      {"some_parameters_scaled applied",
       "take out what multiplies these gradients between the clip and `optimizer.step()`, such as `p.grad *= "
       "factor`: a learning rate of their own is one of the optimizer's groups, `{\"params\": parameters, "
       "\"lr\": rate}`"},
      {"cut_parameters_scaled",
       fmt::format("take out what multiplies or divides these: the sum over the axis "
                   "that cuts them is whole; {} treats all modules of FSDP2 alike",
                   kSum)},
      {"scaled_by_factor",
       fmt::format("take out the factor: of GradScaler `scaler.unscale_(optimizer)` before a clip and "
                   "`scaler.step(optimizer)` in place of `optimizer.step()`; of a loss scale of your own "
                   "`p.grad /= scale` before both; of gradients `p.grad *= factor`; of a loss divided by "
                   "anything but the count of the whole step {}",
                   whole_count)},
      {"other_denominator",
       fmt::format("divide by the number of targets that carry loss, over all ranks: {}", whole_count)},
      {"other_mean",
       fmt::format("weight losses as `loss` was declared, or declare the other mean (mean=): {}",
                   whole_count)},
      {"gradient_lost",
       "compute with the parameter itself: no `.detach()`, `.data` or `torch.no_grad()` between it and the "
       "loss, no `optimizer.zero_grad()` between backward and `optimizer.step()`, checkpoints with "
       "`use_reentrant=False`"},
      {"cut_in_forward",
       "compute the branch with its gradient: no `.detach()`, `.data` or `torch.no_grad()` at that place, "
       "and no backward of your own that is wrong"},
      {"weight_decay_in_gradient",
       "take the decay out of the gradient, no `p.square().sum()` in the loss and no `p.grad += decay * p`, "
       "and let the optimizer decay: `torch.optim.AdamW(model.parameters(), weight_decay=decay)`; or add the "
       "term to `loss` too, by `terms=`"},
      {"gradient_of_earlier_step",
       "begin with an empty gradient: `optimizer.zero_grad()` before the first backward of each step, and so "
       "of buffers of its own (Megatron's `model.zero_grad_buffer()`)"},
      {"loss_over_own_samples",
       "gather the features of all ranks with their gradient before the loss: "
       "`isograd.all_gather_rows(features)`"},
      {"samples_weighted_differently",
       "take what samples are compared by (rewards, scores) over all members of a sample's group and no "
       "others, on whatever rank: gather without gradient, `dist.all_gather_object(everyone, (rewards, "
       "groups))`, then `rewards[groups == group].mean()`"},
      {"micro_batches_lost",
       "add all micro-batches up before the update: `optimizer.zero_grad()` once, before the first, and "
       "`optimizer.step()` once, after the last"},
      {"missing_rank_part", "let " + takes_part},
      {"missing_data_part",
       "differentiate every micro-batch on every rank, `loss.backward()`: none left out (`drop_last=True`) "
       "and none with a weight of 0; " +
           takes_part},
      {"sample_twice",
       "let each sample come once: `DistributedSampler(dataset, drop_last=True)`; leave out ids= "
       "where it is to count twice"},
      {"other_batch",
       "let each rank read samples of its own, `DistributedSampler(dataset)`, the same in both steps; under "
       "isograd.watch name those that the step computes with: `step.add(samples)` before each backward"},
      {"other_targets",
       fmt::format(
           "take the same targets in the step as in `loss`: `F.cross_entropy(model(tokens[:-1]), tokens[1:], "
           "reduction=\"none\")` of each document by itself, with ignore_index where there is padding; and "
           "count these alone: `counted = isograd.TokenMean({}).count(targets)`",
           group)},
      {"other_loss",
       "compute in the step what `loss` computes of the model's outputs, sample by sample, and divide the "
       "sum by the count of the whole step: `sum(loss(model, sample).sum() for sample in samples) / count`"},
      {"other_outputs",
       "give the model the same inputs, masks and positions as `loss` does, such as `model(tokens[:-1])` of "
       "each document by itself"},
      {"extra_rows_counted",
       "leave rows that belong to no sample out of the loss and out of its counts: `losses[real].sum()`"},
      {"other_backward",
       "let the gradient pass through the model as it is: no `register_hook`, `.detach()` or backward of "
       "your own in it; and sum it once over ranks: " +
           reduce},
      {"initial_parameters_differ",
       "begin alike: `torch.manual_seed(0)` before the model is made, or "
       "`dist.broadcast(parameter.data, 0)` of each"},
      {"evaluation_mode",
       "`model.train()` before the step; to watch it without dropout, or with statistics that are frozen, switch "
       "those modules alone to evaluation: `module.eval()` for them, after `model.train()`"},
      {"padding_seen",
       "give the model the mask of what is no padding: `model(tokens, attention_mask=real)`, and positions "
       "that begin at each row's first token"},
      {"not_in_optimizer",
       "make it of the parameters of this very model, "
       "`optimizer = torch.optim.AdamW(model.parameters())`, after fully_shard and every other "
       "thing that replaces them; freeze with `requires_grad_(False)` what is to stay"},
      {"not_updated",
       "look for what writes parameters after `optimizer.step()`, or for tensors that the model no "
       "longer computes with"},
      {"updates_differ",
       "let every rank make the same update: `optimizer.step()` on each, with the same groups, learning "
       "rate, weight decay and state (`optimizer.load_state_dict(state)`)"},
      {"parameters_missing",
       "train the same parameters in both steps: `parameter.requires_grad_(False)` of those that are to be "
       "frozen"},
      {"frozen_otherwise",
       "correct `requires_grad_(...)` in the run, or set it in make_model too where that is "
       "meant"},
      {"reduction_not_proven",
       "give each rank samples of its own, `DistributedSampler(dataset)`, and `data` the "
       "axes along which they differ"},
      {"no_gradient",
       "watch a step whose loss depends on the parameters: `loss.requires_grad` is true, and some "
       "target carries loss"},
      {"rounding",
       "sum gradients in fp32: of FSDP2 `MixedPrecisionPolicy(reduce_dtype=torch.float32)`, of DDP no "
       "`bf16_compress_hook`, by hand no `gradient.bfloat16()` before `dist.all_reduce`"},
      {"unresolved",
       "watch the step in fp64, `model.double()` and its samples too, where nothing hides in "
       "rounding"},
      {"undecided",
       "tell the causes apart: `isograd.prove(train_step, model, optimizer, "
       "micro_batches=micro_batches, loss=losses)` makes the step with other batches"},
      {"unknown",
       "make the step smaller until it passes: one micro-batch, one layer, `model.double()`; the part "
       "that was taken last is the one to look at"},
  };
}

}  // namespace

std::string change_of(const std::string& id, const std::string& mean, bool peers) {
  const auto all = changes(mean, peers);
  const auto found = all.find(id);
  return found == all.end() ? std::string() : found->second;
}

}  // namespace isograd
