// Race: one collective, carried out by several contestants in turn and timed in C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "isograd/group.hpp"
#include "isograd_comm/meeting.hpp"

namespace isograd::python {

// What every contestant does. `bytes` is that of the largest buffer of a rank: the tensor of all_reduce,
// broadcast and round_trip, the input of reduce_scatter and all_to_all, the output of all_gather.
struct Case {
  std::string operation;
  std::int64_t bytes = 0;
  at::ScalarType dtype = at::kFloat;

  std::int64_t input_numel(int ranks) const;
  std::int64_t output_numel(int ranks) const;  // 0: in place
};

// The same memory may serve several contestants: it is rewritten before each call.
struct Buffers {
  at::Tensor input, output;
};

class Race {
 public:
  Race(std::shared_ptr<Meeting> meeting, Case what) : meeting_(std::move(meeting)), case_(std::move(what)) {}

  std::int64_t input_numel() const { return case_.input_numel(meeting_->size()); }
  std::int64_t output_numel() const { return case_.output_numel(meeting_->size()); }

  void add_backend(const std::string& name, c10::intrusive_ptr<c10d::Backend> backend, Buffers buffers);
  void add_group(const std::string& name, Group group, Buffers buffers);
  void add_memcpy(const std::string& name, Buffers buffers);  // input to output

  // Rounds of one call of each, A B C, C B A, ..., until `seconds` have passed; at least `fewest` rounds and
  // at most `most`. Before them a round that is not timed, whose results are compared with what they must be
  // (std::runtime_error otherwise). The seconds that the slowest rank took, by contestant.
  std::map<std::string, std::vector<double>> run(double seconds, int fewest, int most);

 private:
  struct Contestant {
    std::string name;
    Buffers buffers;
    std::function<void()> call;
    bool checked = true;
  };
  void rewrite(const Contestant& contestant, int round) const;
  void check(const Contestant& contestant) const;
  double time(const Contestant& contestant, int round);

  std::shared_ptr<Meeting> meeting_;
  Case case_;
  std::vector<Contestant> contestants_;
};

}  // namespace isograd::python
