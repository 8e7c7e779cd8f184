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

void write_serve(const fs::path& exchange, const ServeCase& of, int threads) {
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

constexpr double kAllowedOwn = 5, kAllowedPolls = 1;  // ms of a call or step; % of a core

// A side that ours is compared with, and how many times as fast ours is meant to be.
struct ServePeer {
  Side side;
  double wanted;
  bool starts_at_base = false;  // its adapter adds nothing at first, and its updates are others
};

std::string why_not_comparable(const SideResult& ours, const SideResult& other, const ServePeer& peer,
                               const fs::path& exchange, bool samples, double base_loss) {
  const std::string& title = peer.side.title;
  if (samples) {
    const auto tokens = [&](const SideResult& of) {
      return parse_json(read_file(exchange / (of.side.name + ".tokens"))).value;
    };
    const nlohmann::json found = tokens(ours);
    if (!found.is_object() || found.at("tokens").empty()) return "isograd serve sampled no tokens";
    return found == tokens(other) ? "" : "isograd serve samples other tokens than " + title;
  }
  if (peer.starts_at_base) {
    const double apart = relative_difference(other.first.losses, {base_loss});
    return apart <= Agreement{}.first_loss
               ? ""
               : fmt::format("the first loss of {} differs from the base's by {:.2g}", title, apart);
  }
  if (const std::string why = disagreement(ours, other); !why.empty()) return why;
  const double later = relative_difference(ours.losses, other.losses);
  return later <= 1e-3 ? ""
                       : fmt::format("losses of later steps differ from those of {} by {:.2g} (1e-3 allowed)",
                                     title, later);
}

void compare_server(Bench& bench, const ServeCase& of, const fs::path& exchange, const Side& our,
                    double base_loss) {
  const bool samples = of.kind == "sample";
  const auto plain = [&](const char* name, const char* title, const char* kind) {
    return peer_side(bench.options.python, "serve_peft.py", name, title, 1, {kind});
  };
  std::vector<ServePeer> peers;
  if (samples) {
    peers.push_back({plain("single", "generate(), one by one", "one-by-one"), 3});
    peers.push_back({plain("batched", "generate(), batched", "batched"), 1.5});
  } else {
    peers.push_back({plain("peft", "PEFT, a plain loop", "step"), 1.1});
    for (const std::string& python : bench.options.peers)
      peers.push_back({peer_side(python, "serve_skyrl.py", "skyrl", "skyrl-tx", 1), 1.5, true});
  }
  std::vector<Side> sides{our};
  for (const ServePeer& peer : peers) sides.push_back(peer.side);
  // A turn of these takes up to a minute.
  const bool slow = !of.standard || !bench.options.peers.empty();
  const auto results = take_turns(sides, exchange, bench.options.seconds, false, slow ? 1 : 3);
  bench.end();
  const SideResult& ours = results[0];
  const std::string work = samples ? fmt::format("{} prompts x {} new tokens", of.prompts, of.new_tokens)
                                   : fmt::format("a step of {} datums of {} to {} tokens, rank {}", of.datums,
                                                 of.shortest, of.longest, of.rank);
  TextRows rows{{fmt::format("{}: {}; threads of a side: {}", of.name, work, bench.options.threads), "ms",
                 "spread", "turns", "ours is faster (by round)", "wanted"}};
  const auto add = [&](const SideResult& side, const std::string& ratio, const std::string& wanted) {
    rows.push_back({side.side.title, fixed(side.median() * 1e3, 1), spread(side.seconds),
                    std::to_string(side.seconds.size()), ratio, wanted});
  };
  add(ours, "", "");
  for (std::size_t i = 0; i < peers.size(); ++i)
    add(results[i + 1], faster(ours, results[i + 1]).text() + " times",
        fmt::format("{:.1f} or more", peers[i].wanted));
  bench.say(rows);
  if (!ours.parts.empty()) {
    const double own = median(ours.parts[0]) * 1e3, client = median(ours.parts[1]) * 1e3,
                 step = ours.median() * 1e3;
    bench.say(
        fmt::format("  of our step, outside its engine: the server itself {:.1f} ms, {:.2f} % (wanted: {} ms "
                    "and 2 % or less); the client {:.1f} ms, {:.2f} %\n",
                    own, 100 * own / step, kAllowedOwn, client, 100 * client / step));
    bench.record_less(of.name + ", the server's own", own, std::min(kAllowedOwn, 0.02 * step),
                      "5 ms and 2 %, allowed", "ms");
  }
  for (std::size_t i = 0; i < peers.size(); ++i) {
    const SideResult& other = results[i + 1];
    const std::string why = why_not_comparable(ours, other, peers[i], exchange, samples, base_loss);
    if (!why.empty()) bench.refuse_comparison(why);
    bench.record(of.name, ours.median() * 1e3, other.median() * 1e3, other.side.title, "ms",
                 faster(ours, other).median);
  }
}

// The server takes this much of a call, or of a core while 950 polls wait; compared with a limit.
void measure_server(Bench& bench, const ServeCase& of, const fs::path& exchange, const Side& our) {
  Contestant server(our, exchange);
  server.turn();
  std::vector<double> found, parts;
  const auto more = until(bench.options.seconds / 6, 1);
  for (std::size_t round = 0; more(round); ++round) {
    const Turn turn = server.turn();
    found.push_back(turn.seconds.at(0)), parts.push_back(turn.parts.at(0));
  }
  bench.end();
  const bool calls = of.kind == "own";
  const double value = median(found) * (calls ? 1e3 : 100), limit = calls ? kAllowedOwn : kAllowedPolls;
  const std::string unit = calls ? "ms" : "%", turns = std::to_string(found.size());
  if (calls)
    bench.say({{"own: a call after the other, without the engine's time", "ms", "spread", "turns", "wanted"},
               {"the server: a request's last byte to its result", fixed(value, 3), spread(found), turns,
                fmt::format("{} or less", limit)},
               {"and the wire and the caller: POST to result", fixed(median(parts) * 1e3, 3), "", "", ""}});
  else
    bench.say(
        {{"polls: 950 connections wait for a result", "% of a core", "spread", "turns", "wanted", "MiB more"},
         {"isograd serve", fixed(value, 3), spread(found), turns, fmt::format("{} or less", limit),
          fixed(median(parts) / kMiB, 1)}});
  bench.record_less(of.name, value, limit, calls ? "5 ms, allowed" : "1 % of a core, allowed", unit);
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
    const Side our = side("ours", of.kind);
    if (of.kind == "step" || of.kind == "sample")
      compare_server(bench, of, exchange.path(), our, prepared.losses.at(0));
    else
      measure_server(bench, of, exchange.path(), our);
  }
}

}  // namespace

BenchVerb serve_bench_verb() {
  return verb(
      "serve", "The training server, compared with a loop over PEFT and with transformers' generate()",
      kSpeed + status("losses, gradients or tokens"), {.seconds = 60},
      {"torch", "transformers", "peft", "tinker"}, bench_serve,
      {cases("case to measure", names_of(serve_cases())),
       number("--threads", &BenchOptions::threads, "threads of each side", 1, 1024),
       file("--skyrl", &BenchOptions::peers,
            "Python that has skyrl-tx 0.3.0, to compare with its server too (bench/peers/serve_skyrl.py)")},
      ", for each case");
}

}  // namespace isograd
