// Requests become sequences, sequences give rows to passes, and rows become tokens.
#include "isograd/sampler.hpp"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>

#include "base/refuse.hpp"
#include "isograd/random.hpp"
#include "kernels/matmul/row_invariant.hpp"
#include "kernels/threads/parallel_for.hpp"
#include "model/decoder.hpp"
#include "sampler/attention.hpp"
#include "sampler/cache.hpp"
#include "sampler/draw.hpp"

namespace isograd {
namespace {

constexpr double kNoTop = -99999;        // the log-probability of an empty place among the likeliest
constexpr std::int64_t kLogitRows = 64;  // rows whose logits are in memory at a time
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

[[noreturn]] void refuse_request(const std::string& of, const std::string& found,
                                 const std::string& expected) {
  refuse("sampling: " + of, found, expected, "Change the request");
}

struct Request {
  std::string id;
  SampleRequest ask;
  Sampled result{};
  std::int64_t started = 0, finished = 0;  // samples
  std::int64_t first_row = 0;              // the first position of the prompt whose logits are wanted
  std::string failure{};
  bool alone = false;  // its keys turn with the length of the text: they are computed again and never shared

  std::int64_t length() const { return std::ssize(ask.prompt); }
  std::int64_t positions() const { return length() + std::max<std::int64_t>(ask.max_tokens - 1, 0); }
};

struct Drawn {
  std::int64_t token = 0;
  double log_probability = 0;
  std::vector<std::int64_t> top{};
  std::vector<double> top_log_probabilities{};
};

struct Sequence {
  std::shared_ptr<Request> of;
  std::int64_t sample = 0;
  std::vector<std::int64_t> tokens{};  // of the prompt and drawn
  std::int64_t done = 0;               // positions whose keys and values are in the cache
  std::vector<Page*> pages{};
  std::size_t owned = 0;  // pages from here on are its own; those before are others' too and not written to
  std::int64_t reserved = 0;  // pages that it may still take
  std::int64_t turned = 0;    // with Request::alone: the length that its keys were turned for
  bool gives_prompt = false;  // the answers about the prompt come from its rows
  bool served = false;        // has rows in this pass
  std::vector<Drawn> drawn{};

  std::int64_t left() const { return std::ssize(tokens) - done; }
};

// Consecutive positions of a sequence in a pass.
struct Section : PagedPiece {
  Sequence* of = nullptr;

  std::int64_t end() const { return begin + count; }
};

// A row whose logits are wanted.
struct Wanted {
  const Section* section = nullptr;
  std::int64_t position = 0;
  bool finite = true;
  std::vector<Drawn> drawn{};  // of its sample and, after a prompt, of those that have not started
};

// Runs of rows with one adapter, set for the model's next forward or head.
class AdapterRuns {
 public:
  void add(const Adapter* adapter, std::int64_t rows) {
    if (runs_.empty() || runs_.back().adapter != adapter) runs_.push_back({end_, end_, adapter});
    runs_.back().end = end_ += rows;
  }
  void set_for(DecoderLM& model) const {
    if (runs_.size() == 1)
      model.set_adapter(runs_[0].adapter);
    else
      model.set_adapters(runs_);
  }

 private:
  std::vector<AdaptedRows> runs_;
  std::int64_t end_ = 0;
};

Drawn drawn_of(const TokenDistribution& distribution, std::int64_t token,
               const std::vector<std::int64_t>& top) {
  Drawn drawn{.token = token, .log_probability = distribution.log_probability(token), .top = top};
  for (const auto one : top) drawn.top_log_probabilities.push_back(distribution.log_probability(one));
  return drawn;
}

at::Tensor matrix(const std::vector<Drawn>& drawn, std::int64_t k, at::ScalarType type) {
  const at::Tensor result = at::empty({std::ssize(drawn), k}, type);
  for (std::size_t i = 0; i < drawn.size(); ++i)
    result[static_cast<std::int64_t>(i)].copy_(type == at::kLong
                                                   ? at::tensor(drawn[i].top, type)
                                                   : at::tensor(drawn[i].top_log_probabilities, type));
  return result;
}

}  // namespace

struct TextSampler::Impl {
  Impl(DecoderLM& of, const TextSamplerOptions& given);

  void check(const SampleRequest& ask) const;
  std::shared_ptr<Request> prepare(std::string id, SampleRequest ask) const;
  bool starts(const std::shared_ptr<Request>& request);
  std::int64_t readable(const Request& request) const;
  bool waits_for_prefix(const Request& request);
  std::vector<Section> plan();
  void take_pages(const Section& section);
  at::Tensor forward(const std::vector<Section>& sections);
  std::vector<Wanted> wanted(const std::vector<Section>& sections) const;
  void read_rows(const at::Tensor& hidden, std::vector<Wanted>& rows);
  template <typename T>
  void read_row(const T* logits, Wanted& row) const;
  void advance(const std::vector<Section>& sections);
  void share_prompt(Sequence& first, const std::vector<Drawn>& drawn);
  void give(Sequence& sequence, Drawn drawn);
  void finish(Sequence& sequence, bool stopped);
  void fail(const std::shared_ptr<Request>& request);
  void pass();

  DecoderLM& model;
  DecoderLM::Impl& decoder;
  const TextSamplerOptions options;
  PageCache cache;
  PagedAttention attention;
  std::deque<std::shared_ptr<Request>> waiting;  // some samples have not started
  std::deque<std::unique_ptr<Sequence>> running;
  std::vector<std::pair<std::string, Sampled>> complete;
};

namespace {

std::int64_t pages_in(const DecoderConfig& config, const TextSamplerOptions& options, at::ScalarType type) {
  if (options.most_rows < 1 || options.page < 1)
    refuse_request("options", fmt::format("{} rows, pages of {}", options.most_rows, options.page),
                   "at least 1");
  const auto bytes = static_cast<double>(2 * config.layers * config.key_value_heads * config.head_dim *
                                         options.page * static_cast<std::int64_t>(c10::elementSize(type)));
  return static_cast<std::int64_t>(static_cast<double>(options.cache_bytes) / bytes);
}

}  // namespace

TextSampler::Impl::Impl(DecoderLM& of, const TextSamplerOptions& given)
    : model(of),
      decoder(*of.impl_),
      options(given),
      cache(given.page, pages_in(of.config(), given, decoder.dtype)),
      attention(given.page, of.config(), of.hooks()) {}

void TextSampler::Impl::check(const SampleRequest& ask) const {
  const DecoderConfig& config = model.config();
  const auto within = [](const char* name, std::int64_t value, std::int64_t least, std::int64_t most) {
    if (value < least || value > most)
      refuse_request(name, std::to_string(value), fmt::format("{} to {}", least, most));
  };
  constexpr std::int64_t kMany = std::int64_t{1} << 40, kManySamples = 1 << 16;
  const auto length = std::ssize(ask.prompt);
  if (length == 0) refuse_request("prompt", "no token", "at least one, for example bos");
  for (const auto token : ask.prompt)
    if (token < 0 || token >= config.vocabulary)
      refuse_request("prompt", fmt::format("token {}", token),
                     fmt::format("a vocabulary of {}", config.vocabulary));
  if (!(ask.temperature >= 0) || !std::isfinite(ask.temperature))
    refuse_request("temperature", fmt::format("{}", ask.temperature), "0 or more");
  if (!(ask.top_p > 0 && ask.top_p <= 1))
    refuse_request("top_p", fmt::format("{}", ask.top_p), "above 0, at most 1");
  within("top_k", ask.top_k, 0, kMany);
  within("samples", ask.samples, 1, kManySamples);
  within("max_tokens", ask.max_tokens, 0, kMany);
  within("prompt_last", ask.prompt_last, -1, kMany);
  within("top_prompt", ask.top_prompt, 0, config.vocabulary);
  within("top_samples", ask.top_samples, 0, config.vocabulary);
  if (const at::Tensor& targets = ask.prompt_targets; targets.defined()) {
    if (targets.dim() != 2 || targets.scalar_type() != at::kLong || !targets.is_cpu() ||
        targets.size(0) != length - 1)
      refuse_request("prompt_targets", c10::str(targets.sizes(), " of ", targets.scalar_type()),
                     fmt::format("[{}, K] of int64: a row for each position from 1 on", length - 1));
    if (targets.numel() > 0) {
      within("prompt_targets", targets.min().item<std::int64_t>(), -1, config.vocabulary - 1);
      within("prompt_targets", targets.max().item<std::int64_t>(), -1, config.vocabulary - 1);
    }
  }
  const std::int64_t positions = length + std::max<std::int64_t>(ask.max_tokens - 1, 0);
  const auto fits = [&](std::int64_t most, const char* of) {
    if (positions > most)
      refuse_request("length", fmt::format("a prompt of {} tokens and {} more", length, ask.max_tokens),
                     fmt::format("at most {} positions, {}", most, of));
  };
  if (config.sliding_window > 0) fits(config.sliding_window, "the sliding window of the model");
  if (config.rope_scaling.kind != "dynamic") fits(config.max_positions, "those of the model");
  fits(cache.capacity() * options.page, "those of the sampler's cache");
}

std::shared_ptr<Request> TextSampler::Impl::prepare(std::string id, SampleRequest ask) const {
  auto request = std::make_shared<Request>(Request{.id = std::move(id), .ask = std::move(ask)});
  SampleRequest& of = request->ask;
  const std::int64_t length = request->length();
  Sampled& result = request->result;
  result.sequences.resize(static_cast<std::size_t>(of.samples));
  const std::int64_t last = of.prompt_last < 0 ? length : std::min(of.prompt_last, length);
  std::int64_t first_asked = length;
  if (of.prompt_log_probabilities || of.top_prompt > 0)
    first_asked = std::max<std::int64_t>(length - last, 1);
  if (of.prompt_log_probabilities) result.prompt_log_probabilities = at::full({length}, kNaN, at::kDouble);
  if (of.top_prompt > 0) {
    result.prompt_top_tokens = at::zeros({length, of.top_prompt}, at::kLong);
    result.prompt_top_log_probabilities = at::full({length, of.top_prompt}, kNoTop, at::kDouble);
  }
  if (of.prompt_targets.defined()) {
    of.prompt_targets = of.prompt_targets.contiguous();
    result.prompt_target_log_probabilities = at::zeros(of.prompt_targets.sizes(), at::kDouble);
    const auto* targets = of.prompt_targets.const_data_ptr<std::int64_t>();
    const auto count = of.prompt_targets.numel();
    const auto first =
        std::find_if(targets, targets + count, [](std::int64_t target) { return target >= 0; });
    if (first != targets + count)
      first_asked = std::min(first_asked, 1 + (first - targets) / of.prompt_targets.size(1));
  }
  request->first_row = first_asked - 1;  // the last position's where nothing is asked
  request->alone = decoder.rotary.depends_on_length(request->positions());
  return request;
}

// Positions of the prompt whose rows the next sample does not need.
std::int64_t TextSampler::Impl::readable(const Request& request) const {
  return request.alone ? 0 : request.started == 0 ? request.first_row : request.length() - 1;
}

// Whether a sequence of equal weights is computing a page that this prompt could read instead.
bool TextSampler::Impl::waits_for_prefix(const Request& request) {
  const std::vector<std::int64_t>& prompt = request.ask.prompt;
  const std::uint64_t weights = request.ask.weights;
  const auto prefix = std::span(prompt).first(static_cast<std::size_t>(readable(request)));
  const std::int64_t until = (std::ssize(cache.find(weights, prefix)) + 1) * cache.page();
  if (until > std::ssize(prefix)) return false;
  return std::ranges::any_of(running, [&](const auto& other) {
    return other->of->ask.weights == weights && !other->of->alone && other->done < until &&
           other->of->length() >= until &&
           std::equal(other->tokens.begin(), other->tokens.begin() + until, prompt.begin());
  });
}

// Starts the request's next sample unless the cache has no room now.
bool TextSampler::Impl::starts(const std::shared_ptr<Request>& request) {
  auto sequence = std::make_unique<Sequence>(Sequence{.of = request,
                                                      .sample = request->started,
                                                      .tokens = request->ask.prompt,
                                                      .turned = request->length(),
                                                      .gives_prompt = request->started == 0});
  sequence->pages =
      cache.find(request->ask.weights,
                 std::span(request->ask.prompt).first(static_cast<std::size_t>(readable(*request))));
  sequence->owned = sequence->pages.size();
  sequence->done = std::ssize(sequence->pages) * cache.page();
  sequence->reserved = cache.pages_of(request->positions()) - std::ssize(sequence->pages);
  if (!cache.reserve(sequence->reserved, sequence->pages)) return false;
  if (sequence->gives_prompt) request->result.cached_prompt_tokens = sequence->done;
  request->started = request->ask.max_tokens == 0 ? request->ask.samples : request->started + 1;
  running.push_back(std::move(sequence));
  return true;
}

// One row for each sequence that writes, then prompts as far as rows are left. Sequences that were left out
// are the first next time.
std::vector<Section> TextSampler::Impl::plan() {
  std::vector<Section> sections;
  std::int64_t rows = options.most_rows;
  const auto give_rows = [&](Sequence& sequence) {
    const std::int64_t count = std::min(rows, sequence.left());
    sequence.served = count > 0;
    if (count > 0)
      sections.push_back({{.begin = sequence.done, .count = count, .pages = &sequence.pages}, &sequence});
    rows -= count;
  };
  const auto writes = [](const Sequence& sequence) {
    return !sequence.drawn.empty() && sequence.left() == 1;
  };
  for (const auto& sequence : running) {
    if (!sequence->of->alone) continue;
    // All angles change with the length: cached keys are of no use.
    const auto length = std::ssize(sequence->tokens);
    if (decoder.rotary.depends_on_length(length) && std::exchange(sequence->turned, length) != length)
      sequence->done = 0;
  }
  for (const auto& sequence : running)
    if (writes(*sequence)) give_rows(*sequence);
  for (const auto& sequence : running)
    if (!writes(*sequence)) give_rows(*sequence);
  for (std::size_t i = 0; i < waiting.size() && rows > 0;) {
    const auto request = waiting[i];
    if (waits_for_prefix(*request)) {
      ++i;
      continue;
    }
    if (!starts(request)) break;  // those behind it wait too, so that a long one gets its turn
    give_rows(*running.back());
    const bool shares = request->started == 1 && !request->alone;  // see share_prompt()
    if (request->started == request->ask.samples || shares)
      waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(i));
  }
  std::ranges::stable_partition(running, [](const auto& sequence) { return !sequence->served; });
  // Rows of one adapter lie together, adapters in the order of their first rows.
  std::vector<const Adapter*> adapters;
  const auto place = [&](const Section& section) {
    const auto found = std::ranges::find(adapters, section.of->of->ask.adapter.get());
    return found - adapters.begin();
  };
  for (const Section& section : sections)
    if (place(section) == std::ssize(adapters)) adapters.push_back(section.of->of->ask.adapter.get());
  std::ranges::stable_sort(sections, {}, place);
  std::int64_t row = 0;
  for (Section& section : sections) section.row = std::exchange(row, row + section.count);
  return sections;
}

void TextSampler::Impl::take_pages(const Section& section) {
  Sequence& of = *section.of;
  const auto take = [&] {
    --of.reserved;
    return cache.take();
  };
  const auto first = static_cast<std::size_t>(section.begin / cache.page()),
             end = static_cast<std::size_t>(cache.pages_of(section.end()));
  if (first < of.owned && first < of.pages.size()) {
    // The last page of a prompt that several samples read.
    Page* own = take();
    own->memory = of.pages[first]->memory.clone();
    cache.release({of.pages[first]}, 0);
    of.pages[first] = own;
    of.owned = first;
  }
  while (of.pages.size() < end) of.pages.push_back(take());
}

at::Tensor TextSampler::Impl::forward(const std::vector<Section>& sections) {
  std::vector<std::int64_t> tokens, positions, cu_seqlens{0}, lengths;
  std::vector<PagedPiece> paged;
  AdapterRuns adapters;
  for (const Section& section : sections) {
    const Sequence& of = *section.of;
    tokens.insert(tokens.end(), of.tokens.begin() + section.begin, of.tokens.begin() + section.end());
    for (std::int64_t p = section.begin; p < section.end(); ++p) positions.push_back(p);
    cu_seqlens.push_back(std::ssize(tokens));
    lengths.push_back(of.of->alone ? std::ssize(of.tokens) : section.end());
    paged.push_back(section);
    adapters.add(of.of->ask.adapter.get(), section.count);
  }
  const auto device = decoder.embedding.device();
  const auto [cos, sin] = decoder.rotary.at(at::tensor(positions, at::kLong), cu_seqlens, lengths);
  adapters.set_for(model);
  return decoder
      .outputs(at::tensor(tokens, at::kLong).to(device),
               {.cos = cos.to(device),
                .sin = sin.to(device),
                .attend = [&](std::int64_t layer, const at::Tensor& q, const at::Tensor& k,
                              const at::Tensor& v) { return attention.attend(paged, layer, q, k, v); }})
      .hidden;
}

std::vector<Wanted> TextSampler::Impl::wanted(const std::vector<Section>& sections) const {
  std::vector<Wanted> rows;
  for (const Section& section : sections) {
    const Request& request = *section.of->of;
    for (std::int64_t p = section.begin; p < section.end(); ++p) {
      // With Request::alone the prompt is computed again, for other lengths, after it was answered about.
      const bool answers = section.of->gives_prompt && section.of->drawn.empty() && p >= request.first_row &&
                           p + 1 < request.length(),
                 draws = p + 1 == std::ssize(section.of->tokens) && request.ask.max_tokens > 0;
      if (answers || draws) rows.push_back({&section, p});
    }
  }
  return rows;
}

template <typename T>
void TextSampler::Impl::read_row(const T* logits, Wanted& row) const {
  const Sequence& of = *row.section->of;
  Request& request = *of.of;
  const SampleRequest& ask = request.ask;
  const bool draws = row.position + 1 == std::ssize(of.tokens);
  const TokenDistribution distribution(logits, model.config().vocabulary, draws ? ask.temperature : 1);
  row.finite = distribution.finite();
  if (!row.finite) return;
  if (draws) {
    const auto top =
        ask.top_samples > 0 ? distribution.likeliest(ask.top_samples) : std::vector<std::int64_t>();
    const bool of_prompt = of.drawn.empty() && of.gives_prompt && !request.alone;
    for (std::int64_t sample = of.sample; sample < (of_prompt ? ask.samples : of.sample + 1); ++sample) {
      const RandomKey key{
          .seed = ask.seed, .sample = static_cast<std::uint64_t>(sample), .layer = hash_name("sampler")};
      const double uniform = random_uniform(key, static_cast<std::uint64_t>(row.position) + 1);
      row.drawn.push_back(
          drawn_of(distribution, distribution.draw({ask.temperature, ask.top_k, ask.top_p}, uniform), top));
    }
    return;
  }
  const std::int64_t next = row.position + 1;
  Sampled& result = request.result;
  const bool asked = next >= (ask.prompt_last < 0 ? 1 : request.length() - ask.prompt_last);
  if (ask.prompt_log_probabilities && asked)
    result.prompt_log_probabilities.mutable_data_ptr<double>()[next] =
        distribution.log_probability(ask.prompt[static_cast<std::size_t>(next)]);
  if (ask.top_prompt > 0 && asked) {
    const auto top = distribution.likeliest(ask.top_prompt);
    for (std::int64_t i = 0; i < ask.top_prompt; ++i) {
      const auto token = top[static_cast<std::size_t>(i)];
      const std::int64_t at = next * ask.top_prompt + i;
      result.prompt_top_tokens.mutable_data_ptr<std::int64_t>()[at] = token;
      result.prompt_top_log_probabilities.mutable_data_ptr<double>()[at] =
          distribution.log_probability(token);
    }
  }
  if (ask.prompt_targets.defined())
    for (std::int64_t i = 0, k = ask.prompt_targets.size(1); i < k; ++i) {
      const std::int64_t at = row.position * k + i,
                         token = ask.prompt_targets.const_data_ptr<std::int64_t>()[at];
      if (token >= 0)
        result.prompt_target_log_probabilities.mutable_data_ptr<double>()[at] =
            distribution.log_probability(token);
    }
}

void TextSampler::Impl::read_rows(const at::Tensor& hidden, std::vector<Wanted>& rows) {
  const auto type = decoder.dtype == at::kDouble ? at::kDouble : at::kFloat;
  const auto& hooks = model.hooks();
  for (std::int64_t begin = 0; begin < std::ssize(rows); begin += kLogitRows) {
    const std::int64_t count = std::min(kLogitRows, std::ssize(rows) - begin);
    const std::span<Wanted> own(rows.data() + begin, static_cast<std::size_t>(count));
    at::Tensor logits;
    if (!hidden.defined()) {
      logits = at::zeros({count, model.config().vocabulary}, type);
    } else {
      std::vector<std::int64_t> places;
      AdapterRuns adapters;
      for (const Wanted& row : own) {
        places.push_back(row.section->row + row.position - row.section->begin);
        adapters.add(row.section->of->of->ask.adapter.get(), 1);
      }
      adapters.set_for(model);
      logits = decoder.logits(hidden.index_select(0, at::tensor(places, at::kLong).to(hidden.device())));
      if (hooks.tensor.whole_logits) logits = hooks.tensor.whole_logits(logits);
      logits = logits.to(at::kCPU, type).contiguous();
    }
    if (hooks.pipeline.of_last_stage) logits = hooks.pipeline.of_last_stage(logits);
    const std::int64_t size = logits.size(1);
    parallel_for(0, count, 1, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) {
        Wanted& row = own[static_cast<std::size_t>(i)];
        if (type == at::kDouble)
          read_row(logits.const_data_ptr<double>() + i * size, row);
        else
          read_row(logits.const_data_ptr<float>() + i * size, row);
      }
    });
  }
}

void TextSampler::Impl::advance(const std::vector<Section>& sections) {
  for (const Section& section : sections) {
    Sequence& of = *section.of;
    of.done = section.end();
    if (!of.of->alone && section.end() / cache.page() > section.begin / cache.page())
      cache.keep(of.of->ask.weights, std::span(of.tokens).first(static_cast<std::size_t>(of.done)), of.pages);
  }
}

// The other samples start behind the prompt of the first, as far as the cache has room. The rest start later.
void TextSampler::Impl::share_prompt(Sequence& first, const std::vector<Drawn>& drawn) {
  const auto& request = first.of;
  const std::int64_t whole = request->length() / cache.page(), most = cache.pages_of(request->positions());
  while (request->started < request->ask.samples && cache.reserve(most - whole, first.pages)) {
    running.push_back(std::make_unique<Sequence>(Sequence{.of = request,
                                                          .sample = request->started++,
                                                          .tokens = request->ask.prompt,
                                                          .done = first.done,
                                                          .pages = first.pages,
                                                          .owned = first.pages.size(),
                                                          .reserved = most - whole}));
    give(*running.back(), drawn[static_cast<std::size_t>(running.back()->sample - first.sample)]);
  }
  if (request->started < request->ask.samples) waiting.push_front(request);
}

void TextSampler::Impl::give(Sequence& sequence, Drawn drawn) {
  const SampleRequest& ask = sequence.of->ask;
  const std::int64_t token = drawn.token;
  sequence.tokens.push_back(token);
  sequence.drawn.push_back(std::move(drawn));
  bool stopped = std::ranges::find(ask.stop_tokens, token) != ask.stop_tokens.end();
  if (!stopped && ask.stops) try {
      const auto begin = sequence.tokens.begin() + sequence.of->length();
      stopped = ask.stops({begin, sequence.tokens.end()});
    } catch (const std::exception& error) {  // the request's own: pass() ends it, the others go on
      sequence.of->failure = error.what();
      return;
    }
  if (stopped || std::ssize(sequence.drawn) == ask.max_tokens) finish(sequence, stopped);
}

void TextSampler::Impl::finish(Sequence& sequence, bool stopped) {
  Request& request = *sequence.of;
  Sampled::Sequence& result = request.result.sequences[static_cast<std::size_t>(sequence.sample)];
  result.stopped = stopped;
  result.tokens.assign(sequence.tokens.begin() + request.length(), sequence.tokens.end());
  for (const Drawn& drawn : sequence.drawn) result.log_probabilities.push_back(drawn.log_probability);
  if (const std::int64_t k = request.ask.top_samples; k > 0) {
    result.top_tokens = matrix(sequence.drawn, k, at::kLong);
    result.top_log_probabilities = matrix(sequence.drawn, k, at::kDouble);
  }
  cache.release(sequence.pages, sequence.reserved);
  sequence.pages.clear(), sequence.reserved = 0;
  request.finished += request.ask.max_tokens == 0 ? request.ask.samples : 1;
  if (request.finished == request.ask.samples) complete.emplace_back(request.id, std::move(request.result));
  std::erase_if(running, [&](const auto& one) { return one.get() == &sequence; });
}

// Its other samples would read the same weights.
void TextSampler::Impl::fail(const std::shared_ptr<Request>& request) {
  for (const auto& sequence : running)
    if (sequence->of == request) cache.release(sequence->pages, sequence->reserved);
  std::erase_if(running, [&](const auto& sequence) { return sequence->of == request; });
  std::erase(waiting, request);
  Sampled failed;
  failed.error = request->failure;
  complete.emplace_back(request->id, std::move(failed));
}

void TextSampler::Impl::pass() {
  const std::vector<Section> sections = plan();
  ISOGRAD_INVARIANT(!sections.empty(), "a pass without rows while requests wait");
  for (const Section& section : sections) take_pages(section);
  std::vector<Wanted> rows = wanted(sections);
  read_rows(forward(sections), rows);
  advance(sections);
  const auto failed = [](const Section& section) { return !section.of->of->failure.empty(); };
  for (const Wanted& row : rows)
    if (!row.finite)
      row.section->of->of->failure = "logits that are not finite: the weights or the adapter have diverged";
  std::erase_if(rows, [&](const Wanted& row) { return row.drawn.empty() || failed(*row.section); });
  std::vector<Sequence*> read;  // prompts that were only asked about
  for (const Section& section : sections)
    if (section.of->of->ask.max_tokens == 0 && section.of->left() == 0 && !failed(section))
      read.push_back(section.of);
  for (Sequence* sequence : read) finish(*sequence, false);
  for (Wanted& row : rows) {
    Sequence& of = *row.section->of;
    if (row.drawn.size() > 1) share_prompt(of, row.drawn);
    give(of, std::move(row.drawn.front()));
  }
  std::vector<std::shared_ptr<Request>> ended;
  for (const auto& sequence : running)
    if (!sequence->of->failure.empty() && std::ranges::find(ended, sequence->of) == ended.end())
      ended.push_back(sequence->of);
  for (const auto& request : ended) fail(request);
}

TextSampler::TextSampler(DecoderLM& model, TextSamplerOptions options)
    : impl_(std::make_unique<Impl>(model, options)) {}

TextSampler::~TextSampler() = default;

void TextSampler::submit(std::string id, SampleRequest request) {
  impl_->check(request);
  impl_->waiting.push_back(impl_->prepare(std::move(id), std::move(request)));
}

std::vector<std::pair<std::string, Sampled>> TextSampler::pass() {
  if (!busy()) return {};
  const at::NoGradGuard no_grad;
  const RowInvariantProducts products;
  const auto after =
      c10::make_scope_exit([&model = impl_->model, own = impl_->model.adapter()] { model.set_adapter(own); });
  impl_->pass();
  return std::exchange(impl_->complete, {});
}

void TextSampler::abandon() {
  for (const auto& sequence : impl_->running) impl_->cache.release(sequence->pages, sequence->reserved);
  impl_->running.clear(), impl_->waiting.clear(), impl_->complete.clear();
}

bool TextSampler::busy() const { return !impl_->running.empty() || !impl_->waiting.empty(); }

void TextSampler::forget(std::uint64_t weights) { impl_->cache.forget(weights); }

}  // namespace isograd
