// `isograd bench serve`: the training server, driven by the tinker client, compared with a plain loop in PEFT
// and with transformers' generate(), and what the server itself takes of a call.
#include <random>

#include "base/files.hpp"
#include "base/json.hpp"
#include "bench/runner.hpp"

namespace isograd {
namespace {

struct ServeCase {
  std::string name, kind;  // what our side does: step, sample, own, polls
  nlohmann::ordered_json shape;
  std::int64_t rank, datums, shortest, longest, prompts, new_tokens;
  bool standard = true;
};

nlohmann::ordered_json qwen3(int vocabulary, int hidden, int layers, int heads, int key_heads, int head,
                             int intermediate) {
  return {{"vocab_size", vocabulary},          {"hidden_size", hidden},
          {"num_hidden_layers", layers},       {"num_attention_heads", heads},
          {"num_key_value_heads", key_heads},  {"head_dim", head},
          {"intermediate_size", intermediate}, {"max_position_embeddings", 4096},
          {"tie_word_embeddings", true}};
}

const std::vector<ServeCase>& serve_cases() {
  static const auto kSmall = qwen3(8192, 384, 10, 6, 2, 64, 1152);       // 20 M parameters
  static const auto kLarge = qwen3(151936, 1024, 28, 16, 8, 128, 3072);  // those of Qwen3-0.6B
  static const auto kTiny = qwen3(256, 32, 2, 2, 1, 16, 48);
  static const std::vector<ServeCase> cases = {
      {"train", "step", kSmall, 32, 16, 64, 512, 1, 1},
      {"sample", "sample", kSmall, 32, 1, 64, 64, 16, 128},
      {"own", "own", kTiny, 4, 1, 8, 8, 1, 1},
      {"polls", "polls", kTiny, 4, 1, 8, 8, 1, 1},
      {"train 0.6B", "step", kLarge, 32, 16, 64, 512, 1, 1, false},
      {"sample 0.6B", "sample", kLarge, 32, 1, 64, 64, 16, 128, false},
      {"tiny train", "step", kTiny, 4, 6, 4, 16, 1, 1, false},
      {"tiny sample", "sample", kTiny, 4, 1, 8, 8, 4, 6, false}};
  return cases;
}

void write_serve(const std::filesystem::path& exchange, const ServeCase& of, int threads) {
  std::mt19937_64 random(48);
  const auto vocabulary = of.shape.at("vocab_size").get<std::uint64_t>();
  const auto tokens = [&](std::int64_t count) {
    std::vector<std::uint64_t> all(static_cast<std::size_t>(count));
    for (auto& token : all) token = random() % vocabulary;
    return all;
  };
  // Lengths from the shortest to the longest in equal steps, in an order of their own.
  std::vector<std::int64_t> lengths;
  for (std::int64_t i = 0; i < of.datums; ++i)
    lengths.push_back(of.shortest +
                      (of.longest - of.shortest) * i / std::max<std::int64_t>(of.datums - 1, 1));
  for (std::size_t i = lengths.size(); i > 1; --i) std::swap(lengths[i - 1], lengths[random() % i]);
  auto datums = nlohmann::ordered_json::array(), prompts = nlohmann::ordered_json::array();
  for (const std::int64_t length : lengths) {
    std::vector<double> weights(static_cast<std::size_t>(length), 1.0);  // of a prompt's third none
    std::fill_n(weights.begin(), length / 3, 0.0);
    auto drawn = tokens(length + 1);
    const std::vector<std::uint64_t> targets(drawn.begin() + 1, drawn.end());
    drawn.pop_back();
    datums.push_back({{"tokens", drawn}, {"targets", targets}, {"weights", weights}});
  }
  // 16 to 31 tokens each.
  for (std::int64_t i = 0; i < of.prompts; ++i) prompts.push_back(tokens(16 + i % 16));
  write_case(
      exchange,
      {{"program", bench_self()},
       {"model", (exchange / "model").string()},
       {"adapter", (exchange / "adapter").string()},
       {"shape", of.shape},
       {"rank", of.rank},
       {"seed", 48},
       {"threads", threads},
       {"rows_per_batch", 2},
       {"datums", datums},
       {"adam",
        {{"learning_rate", 1e-4}, {"beta1", 0.9}, {"beta2", 0.95}, {"epsilon", 1e-8}, {"weight_decay", 0.0}}},
       {"prompts", prompts},
       {"new_tokens", of.new_tokens}});
}

constexpr double kAllowedOwn = 5e-3;
constexpr const char* kSkyrl = "skyrl";

std::string server_disagreement(const SideResult& ours, const SideResult& peer,
                                const std::filesystem::path& exchange, bool samples) {
  if (samples) {
    const auto tokens = [&](const SideResult& of) {
      return parse_json(read_file(exchange / (of.side.name + ".tokens"))).value;
    };
    const nlohmann::json found = tokens(ours);
    if (!found.is_object() || found.at("tokens").empty()) return "isograd serve sampled no tokens";
    return found == tokens(peer) ? "" : "isograd serve samples other tokens than " + peer.side.title;
  }
  const std::string why = disagreement(ours, peer);
  if (!why.empty()) return why;
  const double later = relative_difference(ours.losses, peer.losses);
  return later <= 1e-3 ? ""
                       : fmt::format("losses of later steps differ from those of {} by {:.2g} (1e-3 allowed)",
                                     peer.side.title, later);
}

// For a side whose adapter adds nothing at first, and whose updates are others.
std::string base_disagreement(const SideResult& side, double base_loss) {
  const double apart =
      side.first.losses.empty() ? HUGE_VAL : relative_difference(side.first.losses.front(), base_loss);
  return apart <= Agreement{}.first_loss
             ? ""
             : fmt::format("the first loss of {} differs from the base's by {:.2g}", side.side.title, apart);
}

void compare_server(Bench& bench, const ServeCase& of, const std::filesystem::path& exchange, const Side& our,
                    double base_loss) {
  const bool samples = of.kind == "sample";
  const auto peer = [&](const std::string& name, const std::string& title, const std::string& kind) {
    return peer_side(bench.options.python, "serve_peft.py", name, title, 1, {kind});
  };
  std::vector<Side> sides{our};
  if (samples) {
    sides.push_back(peer("single", "generate(), one by one", "one-by-one"));
    sides.push_back(peer("batched", "generate(), batched", "batched"));
  } else {
    sides.push_back(peer("peft", "PEFT, a plain loop", "step"));
    for (const std::string& python : bench.options.peers)
      sides.push_back(peer_side(python, "serve_skyrl.py", kSkyrl, "skyrl-tx", 1));
  }
  // A turn of these takes up to a minute.
  const bool slow = !of.standard || !bench.options.peers.empty();
  const auto results = take_turns(sides, exchange, bench.options.seconds, false, slow ? 1 : 3);
  bench.end();
  TextRows rows{{fmt::format("{} ({}; threads: {})", of.name,
                             samples ? fmt::format("{} prompts x {} tokens", of.prompts, of.new_tokens)
                                     : fmt::format("{} datums of {} to {} tokens, rank {}", of.datums,
                                                   of.shortest, of.longest, of.rank),
                             bench.options.threads),
                 "ms", "spread", "turns", "times ours"}};
  for (const SideResult& side : results)
    rows.push_back({side.side.title, fixed(side.median() * 1e3, 1), spread(side.seconds),
                    std::to_string(side.seconds.size()),
                    &side == &results[0] ? "" : faster(results[0], side).text()});
  bench.say(rows);
  if (const auto& parts = results[0].parts; !parts.empty()) {
    const auto share = [&](std::size_t part) {
      return fmt::format("{:.1f} ms, {:.2f} %", median(parts[part]) * 1e3,
                         100 * median(parts[part]) / results[0].median());
    };
    bench.say(fmt::format("  of the step the server's own, outside its engine: {}; the client's: {}\n",
                          share(0), share(1)));
    bench.record_less(of.name + ", the server's own", median(parts[0]) * 1e3,
                      std::min(kAllowedOwn * 1e3, 20 * results[0].median()), "5 ms and 2 %, allowed", "ms");
  }
  for (std::size_t i = 1; i < results.size(); ++i) {
    const bool starts_at_base = results[i].side.name == kSkyrl;
    if (const std::string why = starts_at_base
                                    ? base_disagreement(results[i], base_loss)
                                    : server_disagreement(results[0], results[i], exchange, samples);
        !why.empty())
      bench.refuse_comparison(why);
    bench.record(of.name, results[0].median() * 1e3, results[i].median() * 1e3, results[i].side.title, "ms",
                 faster(results[0], results[i]).median);
  }
}

// The medians of what a side's turns say, which compares itself with a limit.
struct Measured {
  double seconds = 0, parts = 0;
  std::string spread_of_seconds;
  std::size_t turns = 0;
};
Measured measure(const Bench& bench, const std::filesystem::path& exchange, const Side& our) {
  Contestant server(our, exchange);
  server.turn();
  std::vector<double> seconds, parts;
  const auto more = until(bench.options.seconds / 6, 1);
  for (std::size_t round = 0; more(round); ++round) {
    const Turn turn = server.turn();
    seconds.push_back(turn.seconds.at(0)), parts.push_back(turn.parts.at(0));
  }
  return {median(seconds), median(parts), spread(seconds), seconds.size()};
}

// The server's own share of a call.
void measure_own(Bench& bench, const ServeCase& of, const std::filesystem::path& exchange, const Side& our) {
  const Measured found = measure(bench, exchange, our);
  bench.end();
  bench.say({{"own (a call after the other, outside the engine)", "ms", "spread", "turns"},
             {"server: a request's last byte to its result", fixed(found.seconds * 1e3, 3),
              found.spread_of_seconds, std::to_string(found.turns)},
             {"with the wire and the caller: POST to result", fixed(found.parts * 1e3, 3), "", ""}});
  bench.record_less(of.name, found.seconds * 1e3, kAllowedOwn * 1e3, "5 ms, allowed", "ms");
}

// A core's share that 950 waiting polls take, and what they add to the server's memory.
void measure_polls(Bench& bench, const ServeCase& of, const std::filesystem::path& exchange,
                   const Side& our) {
  const Measured found = measure(bench, exchange, our);
  bench.end();
  bench.say({{"950 long polls", "% of a core", "spread", "turns", "MiB more"},
             {"isograd serve", fixed(found.seconds * 100, 3), found.spread_of_seconds,
              std::to_string(found.turns), fixed(found.parts / kMiB, 1)}});
  bench.record_less(of.name, found.seconds * 100, 1, "1 % of a core, allowed", "%");
}

void bench_serve(Bench& bench) {
  const auto cases = chosen(serve_cases(), bench.options.cases);
  bench.expect(std::ssize(cases), bench.options.seconds);
  for (const ServeCase& of : cases) {
    bench.begin(of.name);
    const ExchangeFolder exchange;
    write_serve(exchange.path(), of, bench.options.threads);
    const auto side = [&](const std::string& name, const std::string& kind) {
      return peer_side(bench.options.python, "serve_isograd.py", name, "isograd serve", 1, {kind});
    };
    const Turn prepared = Contestant(side("prepare", "prepare"), exchange.path()).turn();
    if (of.kind == "own")
      measure_own(bench, of, exchange.path(), side("ours", of.kind));
    else if (of.kind == "polls")
      measure_polls(bench, of, exchange.path(), side("ours", of.kind));
    else
      compare_server(bench, of, exchange.path(), side("ours", of.kind), prepared.losses.at(0));
  }
}

}  // namespace

BenchVerb serve_bench_verb() {
  return verb("serve",
              "The training server and the tinker client: a loop with PEFT, and transformers' generate()",
              kSpeed + status("losses, gradients or tokens"), {.seconds = 60},
              {"torch", "transformers", "peft", "tinker"}, bench_serve,
              {cases("which", names_of(serve_cases())),
               number("--threads", &BenchOptions::threads, "of each side", 1, 1024),
               file("--skyrl", &BenchOptions::peers,
                    "has skyrl-tx 0.3.0 (bench/peers/serve_skyrl.py): its server trains too")},
              ", for each case");
}

}  // namespace isograd
