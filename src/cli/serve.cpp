// isograd serve: the training server, its state, its keys.
#include <c10/util/ScopeExit.h>
#include <fmt/ranges.h>
#include <pthread.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <ranges>
#include <thread>

#include "base/json.hpp"
#include "base/memory.hpp"
#include "base/number_ranges.hpp"
#include "base/print.hpp"
#include "base/refuse.hpp"
#include "cli/verbs.hpp"
#include "serve/http/client.hpp"
#include "serve/http/http.hpp"
#include "serve/http/keys.hpp"
#include "serve/models/model_engine.hpp"
#include "serve/models/ranked_engine.hpp"
#include "serve/models/trained_model.hpp"
#include "serve/service/service.hpp"
#include "train/build.hpp"

namespace isograd {
namespace {

struct ServeFlags {
  std::vector<std::string> models, limits;
  std::string state, keys, dtype = "float32", client_config, url, tenant;
  serve::HttpOptions http{.host = "127.0.0.1", .port = 8000};
  std::int64_t micro_batch_tokens = 2048, cache_megabytes = 1024;
  bool insecure = false, sync = false;
  RunFlags run{};  // --ranks and --set alone
};

// ---- serving ----

serve::ModelEngineOptions engine_options(const ServeFlags& flags) {
  serve::ModelEngineOptions options;
  for (const std::string& model : flags.models) {
    const auto at = model.find('=');
    if (at == std::string::npos || at == 0 || at + 1 == model.size())
      refuse("--model " + model, "no name and directory", "NAME=DIR, as in Qwen/Qwen3-8B=/models/qwen3-8b",
             "Give both");
    options.bases.emplace_back(model.substr(0, at), model.substr(at + 1));
  }
  if (options.bases.empty())
    refuse("isograd serve", "no --model", "a base to train and sample on", "Add --model NAME=DIR");
  if (flags.state.empty())
    refuse("isograd serve", "no --state", "a folder for checkpoints and what was accepted",
           "Add --state DIR");
  options.dtype = scalar_type(flags.dtype);
  options.micro_batch_tokens = flags.micro_batch_tokens;
  options.dumps = fs::path(flags.state) / "dumps";
  options.sampler.cache_bytes = flags.cache_megabytes << 20;
  return options;
}

// The ranks' configuration: parallel.* of --set, and this base. ConfigError: another key.
RunConfig run_config(const ServeFlags& flags, const serve::ModelEngineOptions& options, std::size_t base,
                     int ranks) {
  std::vector<std::string> sets = {"model.load=" + options.bases[base].second.string(),
                                   "train.dtype=" + flags.dtype,
                                   fmt::format("batch.packs_per_step={}", ranks)};
  for (const std::string& set : flags.run.sets) {
    if (!set.starts_with("parallel."))
      refuse("--set " + set, "a key of a run's data, model or training", "parallel.KEY=VALUE",
             "Leave it out: clients say what is trained, and how");
    sets.push_back(set);
  }
  RunConfig config = load_config({}, sets);
  if (config.parallel.device != "cpu")
    refuse("parallel.device", config.parallel.device, "cpu: a server computes on CPUs", "Leave it out");
  return config;
}

serve::Limits limits_of(const ServeFlags& flags) {
  serve::Limits limits = serve::kLimits;
  for (const std::string& flag : flags.limits) {
    const std::size_t at = std::min(flag.find('='), flag.size());
    const auto found = limits.find(flag.substr(0, at));
    const auto number = whole_number(std::string_view(flag).substr(std::min(at + 1, flag.size())));
    if (found == limits.end() || !number)
      refuse("--limit " + flag, found == limits.end() ? "no name of a limit" : "no whole number of 0 or more",
             fmt::format("NAME=N, NAME one of {}", fmt::join(std::views::keys(limits), ", ")),
             "Correct it; 0 is no limit");
    found->second = *number;
  }
  return limits;
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// Whose request it is. Nothing: a key is missing or wrong.
std::optional<std::string> tenant_of(const serve::HttpRequest& request, const serve::ApiKeys* keys) {
  if (!keys) return "";
  constexpr std::string_view kBearer = "Bearer ";
  const auto header = [&](const char* name) -> std::string_view {
    const auto found = request.headers.find(name);
    return found == request.headers.end() ? std::string_view() : found->second;
  };
  std::string_view key = header("x-api-key"), bearer = header("authorization");
  if (key.empty() && bearer.starts_with(kBearer)) key = bearer.substr(kBearer.size());
  return keys->tenant_of(key);
}

// SIGINT and SIGTERM end the program, once there is a service by its stop(). Made before any other thread, so
// that all of them leave these signals to this one.
class StopSignals {
 public:
  StopSignals() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGINT), sigaddset(&signals_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
    thread_ = std::thread([this] {
      constexpr timespec kPause{.tv_sec = 0, .tv_nsec = 100'000'000};
      while (!done_) {
        const int signal = sigtimedwait(&signals_, nullptr, &kPause);
        if (signal <= 0) continue;
        if (ignored_) continue;
        serve::Service* const service = service_;
        if (!service) std::_Exit(128 + signal);
        return service->stop();
      }
    });
  }
  ~StopSignals() { end(); }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;
  void end() {
    done_ = true;
    if (thread_.joinable()) thread_.join();
  }
  // From now on signals do nothing.
  void ignore() { ignored_ = true; }
  // From now on, until end(), signals stop the service.
  void stop(serve::Service& service) { service_ = &service; }

 private:
  sigset_t signals_{};
  std::atomic<bool> done_ = false, ignored_ = false;
  std::atomic<serve::Service*> service_ = nullptr;
  std::thread thread_{};
};

// Refuses flags that do not go together.
void check(const ServeFlags& flags) {
  const std::string& host = flags.http.host;
  if (!is_loopback(host) && flags.keys.empty() && !flags.insecure)
    refuse("--host " + host, "an address that others reach, and no --keys",
           "keys, or --insecure to serve everyone without a key",
           "Make a key with `isograd serve key TENANT >> keys.txt`, and add --keys keys.txt");
  limits_of(flags);
}

// Serves until a signal, on this rank where there are several.
int serve_clients(const ServeFlags& flags, const serve::ModelEngineOptions& options, StopSignals& signals) {
  const std::string& host = flags.http.host;
  std::optional<serve::ApiKeys> keys;
  if (!flags.keys.empty()) keys.emplace(flags.keys);
  const serve::ApiKeys* known = keys ? &*keys : nullptr;

  const auto lost = [](const PeerError& error) {
    print(stderr, fmt::format("isograd: {}\n", printable(error.what())));
    std::_Exit(3);  // before anything is answered: the next start makes the call again
  };
  const auto engine = options.ranks ? std::make_unique<serve::RankedEngine>(options, lost)
                                    : std::make_unique<serve::ModelEngine>(options);
  serve::ServiceOptions service_options;
  service_options.state = flags.state, service_options.sync = flags.sync;
  service_options.limits = limits_of(flags);
  if (!flags.client_config.empty()) {
    if (const auto [config, problem] = parse_json(flags.client_config); !problem.empty())
      refuse("--client-config", problem, "a JSON object of the client's own options",
             R"(Give {"use_pyqwest_transport": true}, for instance)");
    service_options.client_config = flags.client_config;
  }
  serve::Service service(service_options, *engine);
  const auto admit = [&service,
                      known](const serve::HttpRequest& request) -> std::unique_ptr<serve::HttpReply> {
    if (const auto tenant = tenant_of(request, known))
      return request.too_large > 0 ? service.unread(request, *tenant) : nullptr;
    return std::make_unique<serve::HttpReply>(
        serve::HttpReply{.status = 401, .body = R"({"detail": "a missing or unknown API key"})"});
  };
  const auto handle = [&service, known](const serve::HttpRequest& request, serve::Respond respond) {
    if (const auto tenant = tenant_of(request, known)) service.handle(request, *tenant, std::move(respond));
  };
  const serve::HttpServer server(flags.http, admit, handle);
  const std::string shown =
      host.find(':') == std::string::npos ? printable(host) : "[" + printable(host) + "]";
  const std::string address = fmt::format("http://{}:{}", shown, server.port());
  std::string names;
  for (const auto& base : engine->bases()) names += (names.empty() ? "" : ", ") + printable(base.name);
  print(stdout,
        fmt::format("serving {} on {}\n"
                    "  export TINKER_BASE_URL={} TINKER_API_KEY={}\n"
                    "  python -c 'import tinker; print(tinker.ServiceClient().get_server_capabilities())'\n",
                    names, address, address, keys ? "tml-..." : "tml-local"));
  std::fflush(stdout);
  signals.stop(service);
  const auto ended = c10::make_scope_exit([&signals] { signals.end(); });
  service.run();
  return 0;
}

int run(const ServeFlags& flags, const Invocation& invocation) {
  std::signal(SIGPIPE, SIG_IGN);  // a server goes on when its output is closed
  keep_freed_memory();
  serve::ModelEngineOptions options = engine_options(flags);
  check(flags);
  if (!flags.run.ranks && !rank_of_several() && !flags.run.sets.empty())
    refuse("--set", "parallel.* of one rank", "several ranks", "Add --ranks N");
  if (flags.run.ranks.value_or(1) == 1 && !rank_of_several()) {
    StopSignals signals;
    return serve_clients(flags, options, signals);
  }
  const int ranks = flags.run.ranks.value_or(1);
  RunConfig config = run_config(flags, options, 0, ranks);
  return on_ranks(invocation, flags.run, config, [&](World& world) {
    StopSignals signals;
    for (std::size_t base = 0; base < options.bases.size(); ++base)
      isograd::check(run_config(flags, options, base, world.size), world.size);
    options.ranks = std::make_shared<const serve::Ranks>(world, config);
    if (world.rank == 0) return serve_clients(flags, options, signals);
    signals.ignore();  // rank 0 gets them too, and ends this one
    serve::ModelEngine engine(options);
    serve::follow(engine, world);
    return 0;
  });
}

// ---- asking a server ----

int show_status(const std::string& server) {
  std::string url = server;
  while (url.ends_with('/')) url.pop_back();
  const char* key = std::getenv("TINKER_API_KEY");
  const serve::HttpReply reply = serve::http_call({.url = url + "/isograd/status", .key = key ? key : ""});
  if (reply.status == 401) refuse(url, "status 401", "a key that the server knows", "Set TINKER_API_KEY");
  const auto [status, problem] = parse_json(reply.body);
  if (reply.status != 200 || !problem.empty())
    refuse(url, reply.status == 200 ? problem : fmt::format("status {}", reply.status),
           "the status of a server", "Give the address of `isograd serve`");
  std::string text;
  for (const auto& [name, value] : status.items())
    if (!value.is_structured()) text += fmt::format("{} {}\n", printable(name), brief(value));
  for (const auto& model : status.value("models", nlohmann::json::array())) {
    text += "model";
    for (const auto& [name, value] : model.items())
      if (!value.is_structured() &&
          !(value.is_string() && value.template get_ref<const std::string&>().empty()))
        text += fmt::format("  {} {}", printable(name), brief(value));
    text += "\n";
  }
  print(stdout, text);
  return 0;
}

int make_key(const std::string& tenant) {
  const serve::NewKey made(tenant);
  print(stderr, fmt::format("The key, shown once: {}\n", made.key));
  print(stdout, made.line + "\n");
  return 0;
}

}  // namespace

Verb serve_verb(CLI::App& program, const Invocation& invocation) {
  CLI::App* verb =
      program.add_subcommand("serve", "Start a server that trains and samples for clients of the tinker SDK");
  auto flags = std::make_shared<ServeFlags>();
  constexpr double kMany = 0x1p40;
  add_option(*verb, "--model", flags->models,
             "a base model: the name that clients use for it, and its Hugging Face directory", "NAME=DIR");
  add_option(*verb, "--state", flags->state,
             "folder for the checkpoints and the accepted requests of this server", "DIR");
  add_option(*verb, "--host", flags->http.host,
             "address to listen on; one that other machines reach needs --keys or --insecure", "HOST");
  add_option(*verb, "--port", flags->http.port, "port to listen on; 0 takes any free one", "N", 0, 65535);
  add_option(*verb, "--keys", flags->keys, "file of API keys, one line each from isograd serve key", "FILE");
  verb->add_flag("--insecure", flags->insecure,
                 "run without API keys: everyone who can connect to --host may use the server");
  is_one_of(
      add_option(*verb, "--dtype", flags->dtype, "data type of the weights and of the computation", "TYPE"),
      {"float32", "float64", "bfloat16"});
  verb->add_flag("--sync", flags->sync,
                 "write each request to disk before it is answered, so that it also survives a power cut");
  add_option(*verb, "--micro-batch-tokens", flags->micro_batch_tokens,
             "largest number of tokens in one forward and backward", "N", 1, kMany);
  add_option(*verb, "--cache-megabytes", flags->cache_megabytes,
             "memory for the keys and values of each sampler", "N", 1, kMany);
  std::vector<std::string> limits;
  for (const auto& [name, most] : serve::kLimits) limits.push_back(name + "=");
  offers(add_option(*verb, "--limit", flags->limits, "limit for each tenant, as in models=8; 0 is no limit",
                    "NAME=N"),
         limits);
  add_option(*verb, "--client-config", flags->client_config,
             "settings that the server sends to tinker clients, as JSON", "JSON");
  add_option(*verb, "--ranks", flags->run.ranks,
             "number of ranks that train together, which are processes on this host", "N", 1, 4096)
      ->default_str("1");
  add_option(*verb, "--set", flags->run.sets,
             "how the ranks share a model, by keys of a run's configuration: strategy, cp_ring, tp, pp, ...",
             "parallel.KEY=VALUE");
  CLI::App* status =
      verb->add_subcommand("status", "Show the models of a server (API key in TINKER_API_KEY)");
  status->add_option("URL", flags->url, "address of the server, as in http://127.0.0.1:8000")->required();
  CLI::App* key = verb->add_subcommand("key", "Make an API key and print its line for the file of --keys");
  key->add_option("TENANT", flags->tenant, "name of the tenant that the key belongs to")->required();
  verb->footer(
      "  isograd serve --model Qwen/Qwen3-8B=models/qwen3-8b --state server\n"
      "  isograd serve status http://127.0.0.1:8000\n"
      "  isograd serve key alice >> keys.txt\n\n"
      "Ctrl-C and SIGTERM stop the server. It continues when it is started with the same --state again\n"
      "(docs/server.md).\n"
      "Exit status: 0 done; 2 bad input; 3 a rank was lost; 4 a defect of isograd.");
  return {verb, [flags, status, key, &invocation] {
            if (status->parsed()) return show_status(flags->url);
            return key->parsed() ? make_key(flags->tenant) : run(*flags, invocation);
          }};
}

}  // namespace isograd
