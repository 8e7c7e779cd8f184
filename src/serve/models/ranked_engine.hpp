// The engine of a server on several ranks: what the first one is told, all do.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "isograd/world.hpp"
#include "serve/models/model_engine.hpp"

namespace isograd::serve {

// On rank 0. Sends each collective call to the other ranks, which follow(), and makes it too. While there are
// no calls a thread tells the others that it lives.
class RankedEngine : public ModelEngine {
 public:
  // `lost`: called where another rank is lost, by the thread that finds it, before any call fails: a server
  // ends there, as by a kill, so that its next start makes the call again.
  using Lost = std::function<void(const PeerError&)>;
  explicit RankedEngine(ModelEngineOptions options, Lost when_lost = {});  // with ranks
  ~RankedEngine() override;                                                // lets the others end
  RankedEngine(const RankedEngine&) = delete;
  RankedEngine& operator=(const RankedEngine&) = delete;

  void create(const std::string& model, const CreateModel& request) override;
  ForwardBackwardResult forward_backward(const std::string& model, const ForwardBackward& request) override;
  Metrics optim_step(const std::string& model, const AdamParams& params) override;
  void drop_gradient(const std::string& model) override;
  void remove(const std::string& model) override;
  std::int64_t save(const std::string& model, Save which, const std::filesystem::path& directory) override;
  void load(const std::string& model, const std::filesystem::path& directory, bool optimizer,
            const std::map<std::string, std::string>& metadata) override;
  void open_sampler_of(const std::string& sampler, const std::string& model) override;

 private:
  // Sends the name and the arguments, and makes the `own` call.
  template <class Arguments, class Own>
  auto together(const char* call, const Arguments& arguments, Own own);

  Group group_;
  std::mutex mutex_{};  // of the group
  std::condition_variable changed_{};
  bool ended_ = false;
  Lost when_lost_;
  std::exception_ptr lost_{};  // why a rank does not answer any more
  std::thread beat_{};
};

// On the other ranks: makes the calls of rank 0 on `own` until it ends. A user's mistake is refused on all
// ranks alike, and answered by rank 0. Throws PeerError where rank 0 is lost.
void follow(ModelEngine& own, World& world);

}  // namespace isograd::serve
