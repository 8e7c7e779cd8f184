// In which order the micro-batches of a step run, and the rules that any such schedule is held to.
#include "isograd/error.hpp"
#include "isograd/pipeline_parallel.hpp"
#include "isograd/step.hpp"
#include "train/step_work.hpp"

namespace isograd {

void StepWork::run(const MicroBatchSchedule& schedule) {
  shares_.assign(size() * parts_, {}), left_ = size() * parts_;
  try {
    schedule(*this);
    check(left_ == 0, left_, "a forward and a backward of each micro-batch");
  } catch (...) {
    shares_.clear();  // and with them what the forwards kept
    throw;
  }
}

// A rank with several stages has none of them for its turn outside of a step, and says so
// (Pipeline::stage()).
void StepWork::look() {
  shares_.assign(size(), {});
  for (std::size_t i = 0; i < size(); ++i) {
    forward(i);
    log(share_of(i, 0));
  }
}

void StepWork::check(bool holds, std::size_t i, const char* expected) const {
  if (holds) return;
  throw ConfigError({.where = "StepOptions::schedule",
                     .found = fmt::format("{} of {} micro-batches", i, size()),
                     .expected = expected,
                     .action = "Mend the schedule: one_after_another() is one that is right"});
}

void one_after_another(MicroBatchWork& work) {
  for (std::size_t i = 0; i < work.size(); ++i) {
    work.forward(i);
    work.backward(i, i + 1 == work.size());
  }
}

StepOptions through(const Pipeline& pipeline, StepOptions others) {
  others.schedule = [&pipeline](MicroBatchWork& work) {
    pipeline.run(
        work.size(), [&](std::size_t i, std::size_t part) { work.forward(i, part); },
        [&](std::size_t i, bool last, std::size_t part) { work.backward(i, last, part); });
  };
  others.parts = pipeline.own_stages().size();
  others.micro_batches_of = pipeline.micro_batches_of();
  return others;
}

}  // namespace isograd
