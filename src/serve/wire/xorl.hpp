// The dialect of xorl's client: JSON alone, over the same plain data. Its paths are those of tinker; a
// request without tinker's header X-API-Key is in this dialect.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "serve/wire/messages.hpp"
#include "serve/wire/tinker.hpp"

namespace isograd::serve::xorl {

// ---- requests; a sequence of 0 is none: operations run in the order they came. Paths are tinker's ----
NewModel create_model(std::string_view json);  // without lora_config: rank 0
// Also forward, which says so by forward_input.
Operation<ForwardBackward> forward_backward(std::string_view json);
Operation<AdamParams> optim_step(std::string_view json);
Operation<SaveWeights> save_weights(std::string_view json);
Operation<SaveWeights> save_weights_for_sampler(std::string_view json);
LoadWeights load_weights(std::string_view json);
std::string create_sampling_session(std::string_view json);                    // the path
std::string list_checkpoints(std::string_view json);                           // the model
std::pair<std::string, std::string> delete_checkpoint(std::string_view json);  // the model, "weights/<name>"
struct KillSession {
  std::string model;
  bool save = true;  // a checkpoint before its end
};
KillSession kill_session(std::string_view json);
std::string weights_info(std::string_view json);  // the path

std::string path_out(const std::string& path);  // "tinker://a/b/c" as "xorl://a/b/c"

// ---- results; those of optim_step, weights_info and list_checkpoints are tinker's ----
std::string create_model_reply(const std::string& model);
// `request` gives the targets, of which xorl reports losses.
std::string forward_backward_reply(const ForwardBackward& request, const ForwardBackwardResult& result);
std::string path_reply(const std::string& path);  // of save_weights*, load_weights
std::string sampling_session_reply(const std::string& path);
std::string aborted_reply(const std::string& model, std::int64_t steps);
std::string killed_reply(const std::string& path);  // of the checkpoint; empty: none was saved
std::string deleted_reply(const std::string& path);
struct OpenModel {
  std::string name;
  double last_request = 0;  // seconds since 1970
  bool adapter = false;
};
std::string session_info_reply(const std::vector<OpenModel>& models, std::int64_t most_models);

}  // namespace isograd::serve::xorl
