// Engine: the models of a training server and what is computed with them. Called by one thread, one call at a
// time. The service (serve/service) orders the calls; what an engine is told, in order, determines every bit
// it answers.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "serve/wire/messages.hpp"

namespace isograd::serve {

struct BaseModel {
  std::string name;                 // "Qwen/Qwen3-8B", as clients call it
  std::filesystem::path directory;  // of Hugging Face's files
  std::filesystem::path tokenizer;  // directory or file; empty: none
  std::string architecture;         // "qwen3"
  std::int64_t context = 0, vocabulary = 0;
  std::string digest{};  // of configuration and weights: an adapter is of these
};

// ConfigError from any call is a user's mistake: nothing was changed. Any other exception is the server's.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual const std::vector<BaseModel>& bases() const = 0;

  // ---- models that are trained, by the service's names ----
  virtual void create(const std::string& model, const CreateModel& request) = 0;
  virtual ForwardBackwardResult forward_backward(const std::string& model,
                                                 const ForwardBackward& request) = 0;
  // ConfigError, with nothing changed: no gradient since the last step, a denominator of 0. Also a gradient
  // that is not finite: no weight or moment changes, but the sums since the last step are dropped.
  virtual Metrics optim_step(const std::string& model, const AdamParams& params) = 0;
  virtual void drop_gradient(const std::string& model) = 0;  // the sums since the last step, if there are any
  virtual void remove(const std::string& model) = 0;

  // ---- files ----
  enum class Save {
    kTraining,  // weights, moments, step, the open accumulator: the model goes on with the same bits
    kSampler,   // weights alone
    kExternal,  // as kSampler: a directory that peft (or transformers) loads, with nothing of isograd's
  };
  // Fills an existing empty directory and fsyncs nothing. Returns bytes written.
  virtual std::int64_t save(const std::string& model, Save which, const std::filesystem::path& directory) = 0;
  // Writes what save(kTraining) would now, or the sampler: called once, later, on any thread, while other
  // calls are made. Those that change what it writes wait until it has returned, or is destroyed. Null: only
  // save() can.
  using Write = std::function<void(const std::filesystem::path& directory)>;
  virtual Write saving(const std::string& /*model*/) { return {}; }
  virtual Write saving_sampler(const std::string& sampler) = 0;
  // A new model from a directory of kTraining. `optimizer`: with moments, step and accumulator; else with new
  // ones.
  virtual void load(const std::string& model, const std::filesystem::path& directory, bool optimizer,
                    const std::map<std::string, std::string>& metadata) = 0;

  // ---- samplers: weights that do not change any more ----
  virtual void open_sampler(const std::string& sampler, const std::string& base) = 0;
  virtual void open_sampler_of(const std::string& sampler, const std::string& model) = 0;  // as they are now
  virtual void load_sampler(const std::string& sampler, const std::filesystem::path& directory) = 0;
  virtual void close_sampler(const std::string& sampler) = 0;
  // ConfigError: what can never be answered. Else `id` is answered by a later sample_pass(). `seed` is used
  // where the request gives none.
  virtual void submit(const std::string& id, const std::string& sampler, const Sample& request,
                      std::uint64_t seed) = 0;
  // One pass over the model for some of the requests that wait. Returns the ids that are complete, with
  // results or with an error's text.
  struct Sampled {
    std::string id, error;
    bool of_server = false;  // the error is no mistake of the user
    SampleResult result;
  };
  virtual std::vector<Sampled> sample_pass() = 0;
  virtual bool sampling() const = 0;  // some requests are not complete
};

}  // namespace isograd::serve
