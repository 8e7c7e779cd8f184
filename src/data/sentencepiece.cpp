// SentencePiece models through libsentencepiece.
#include <fmt/format.h>
#include <sentencepiece_processor.h>
#include <utf8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <protozero/pbf_reader.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.hpp"
#include "base/refuse.hpp"
#include "data/companions.hpp"
#include "isograd/data.hpp"

namespace isograd {
namespace {

struct CheckedModel {
  std::string bytes;    // for LoadFromSerializedProto, without the model's own test sentences
  std::string problem;  // empty: loading and encoding stay within their memory
};

constexpr std::size_t kMostRules = 32, kMostSymbols = 64;     // of libsentencepiece's arrays
constexpr std::size_t kLargestTable = std::size_t{16} << 20;  // spm_train's own has 0.2 MiB
constexpr std::size_t kLongestReplacement = 1024;  // bytes for one match, or a text could grow without bound

// A normaliser table: u32 bytes of a trie, the trie as a double array of u32 units, replacements that end in
// 0. Darts-clone's format of a unit: bits 0 to 7 and 31 are its label, bit 8 marks a value at its target, and
// the other bits are the offset of the target.
class NormalizerTable {
 public:
  // Empty if every walk over the table stays inside it.
  std::string problem(std::string_view blob) {
    std::uint32_t bytes = 0;
    if (blob.size() < sizeof bytes || blob.size() > kLargestTable)
      return fmt::format("a normaliser table of {} bytes", blob.size());
    std::memcpy(&bytes, blob.data(), sizeof bytes);
    blob.remove_prefix(sizeof bytes);
    if (bytes < sizeof bytes || bytes % sizeof bytes != 0 || bytes > blob.size())
      return fmt::format("a normaliser's trie of {} bytes in {}", bytes, blob.size());
    units_.resize(bytes / sizeof bytes);
    std::memcpy(units_.data(), blob.data(), bytes);
    const std::string_view texts = blob.substr(bytes);
    if (!utf8::is_valid(texts.begin(), texts.end()) || (!texts.empty() && texts.back() != 0))
      return "a normaliser whose replacements are cut off or no UTF-8";
    for (std::size_t at = 0; at < texts.size();) {
      const std::size_t end = texts.find('\0', at);
      if (end - at > kLongestReplacement)
        return fmt::format("a normaliser's replacement of {} bytes", end - at);
      at = end + 1;
    }
    texts_ = texts.size();
    return walk();
  }

 private:
  enum class State : std::uint8_t { kUnseen, kOpen, kDone };
  struct Frame {
    std::size_t place;
    std::size_t byte = 0;  // the next byte to follow
    std::uint8_t rules = 0;
  };

  static std::size_t offset(std::uint32_t unit) { return (unit >> 10) << ((unit & (1u << 9)) >> 6); }

  // Depth first, each place once: the most rules that one text can match, from each place on.
  std::string walk() {
    std::vector<State> states(units_.size(), State::kUnseen);
    std::vector<std::uint8_t> rules(units_.size(), 0);
    std::vector<Frame> open;
    const auto enter = [&](std::size_t place) {  // any byte may follow
      if ((place | 0xFF) >= units_.size()) return false;
      states[place] = State::kOpen;
      open.push_back({place});
      return true;
    };
    if (!enter(offset(units_[0]))) return kOutside;
    while (!open.empty()) {
      Frame& frame = open.back();
      if (frame.byte > 0xFF) {
        states[frame.place] = State::kDone;
        rules[frame.place] = frame.rules;
        open.pop_back();
        continue;
      }
      const std::size_t from = frame.place ^ frame.byte;
      const std::uint32_t unit = units_[from];
      if ((unit & ((1u << 31) | 0xFF)) != frame.byte) {
        ++frame.byte;
        continue;
      }
      const std::size_t to = from ^ offset(unit);
      if (to >= units_.size()) return kOutside;
      if (states[to] == State::kOpen) return "a normaliser's trie that leads back to where it came from";
      if (states[to] == State::kUnseen) {
        if (!enter(to)) return kOutside;
        continue;  // this byte is tried again when that place is done
      }
      const bool value = (unit >> 8 & 1) != 0;
      if (value && (units_[to] & 0x7FFFFFFF) >= texts_) return kOutside;
      const std::size_t count = rules[to] + std::size_t{value};
      if (count > kMostRules) return fmt::format("more than {} rules for one text", kMostRules);
      frame.rules = std::max(frame.rules, static_cast<std::uint8_t>(count));
      ++frame.byte;
    }
    return {};
  }

  static constexpr const char* kOutside = "a normaliser's trie that leads out of its table";
  std::vector<std::uint32_t> units_;
  std::size_t texts_ = 0;
};

struct VocabularyEntry {
  std::string_view text;
  bool symbol = false;  // user-defined symbol
};

using protozero::pbf_wire_type;

// Reads as protobuf does: the last of a repeated field counts, and unknown types are skipped.
std::string problem_of_piece(protozero::pbf_reader message, VocabularyEntry& piece) {
  constexpr std::int64_t kNormal = 1, kUserDefined = 4, kLast = 6;
  while (message.next()) switch (message.tag_and_type()) {
      case protozero::tag_and_type(1, pbf_wire_type::length_delimited): {
        const auto view = message.get_view();
        piece.text = {view.data(), view.size()};
        break;
      }
      case protozero::tag_and_type(2, pbf_wire_type::fixed32):
        if (std::isnan(message.get_float())) return "a piece whose score is no number";
        break;
      case protozero::tag_and_type(3, pbf_wire_type::varint):
        if (const std::int64_t type = message.get_int32(); type >= kNormal && type <= kLast)
          piece.symbol = type == kUserDefined;
        break;
      default: message.skip();
    }
  if (piece.text.find('\0') != std::string_view::npos) return "a piece with a zero in it";
  return {};
}

std::string problem_of_normaliser(protozero::pbf_reader message) {
  while (message.next()) {
    if (message.tag_and_type() != protozero::tag_and_type(2, pbf_wire_type::length_delimited)) {
      message.skip();
      continue;
    }
    const auto table = message.get_view();
    if (table.empty()) continue;
    if (std::string problem = NormalizerTable().problem({table.data(), table.size()}); !problem.empty())
      return problem;
  }
  return {};
}

// libsentencepiece looks for user symbols at every place of a text, all matches at once.
std::string problem_of_symbols(std::vector<std::string_view> symbols) {
  std::sort(symbols.begin(), symbols.end());
  std::vector<std::string_view> alike;  // each is a prefix of the next
  for (const auto symbol : symbols) {
    while (!alike.empty() && !symbol.starts_with(alike.back())) alike.pop_back();
    alike.push_back(symbol);
    if (alike.size() > kMostSymbols)
      return fmt::format("more than {} symbols that begin alike", kMostSymbols);
  }
  return {};
}

// libsentencepiece 0.1.97 walks the table unchecked, keeps 32 rules and 64 symbols with a common prefix on
// its stack, treats pieces as C strings, and prints failing test sentences unescaped.
CheckedModel check_sentencepiece(std::string_view model) {
  CheckedModel result;
  std::vector<std::string_view> symbols;
  const auto fail = [&](std::string problem) { return CheckedModel{{}, std::move(problem)}; };
  try {
    protozero::pbf_reader message(model.data(), model.size());
    for (;;) {
      const char* begin = message.data().data();
      if (!message.next()) break;
      bool keep = true;
      std::string problem;
      switch (message.tag_and_type()) {
        case protozero::tag_and_type(1, pbf_wire_type::length_delimited): {
          VocabularyEntry piece;
          problem = problem_of_piece(message.get_message(), piece);
          if (piece.symbol) symbols.push_back(piece.text);
          break;
        }
        case protozero::tag_and_type(3, pbf_wire_type::length_delimited):
        case protozero::tag_and_type(5, pbf_wire_type::length_delimited):
          problem = problem_of_normaliser(message.get_message());
          break;
        case protozero::tag_and_type(4, pbf_wire_type::length_delimited):  // test sentences
          keep = false;
          [[fallthrough]];
        default: message.skip();
      }
      if (!problem.empty()) return fail(std::move(problem));
      if (keep) result.bytes.append(begin, message.data().data());
    }
  } catch (const protozero::exception& error) {
    return fail(fmt::format("no protocol buffer ({})", error.what()));
  }
  result.problem = problem_of_symbols(std::move(symbols));
  return result;
}

class SentencePieceTokenizer final : public Tokenizer {
 public:
  explicit SentencePieceTokenizer(const fs::path& path)
      : path_(path), companions_(path.parent_path(), {"tokenizer_config.json"}) {
    const MappedFile file(path);
    const std::string_view model(reinterpret_cast<const char*>(file.data()), file.size());
    if (const std::string problem = load(model); !problem.empty())
      refuse("SentencePiece model " + path.string(), problem, "a model written by spm_train",
             "Check data.tokenizer");
    name_ = "sentencepiece:" + checksum(file.data(), file.size());
  }

  std::string name() const override { return name_; }
  std::int64_t vocabulary() const override { return processor_.GetPieceSize(); }
  std::int64_t bos() const override { return processor_.bos_id(); }
  std::int64_t eos() const override { return processor_.eos_id(); }

  std::vector<std::uint32_t> encode(std::string_view text) const override {
    std::vector<int> pieces;
    check(processor_.Encode(text, &pieces), "encode");
    std::vector<std::uint32_t> tokens;
    tokens.reserve(pieces.size() + 2);
    if (bos() >= 0) tokens.push_back(static_cast<std::uint32_t>(bos()));
    for (int piece : pieces) tokens.push_back(static_cast<std::uint32_t>(piece));
    if (eos() >= 0) tokens.push_back(static_cast<std::uint32_t>(eos()));
    return tokens;
  }

  std::string decode(std::span<const std::uint32_t> tokens) const override {
    std::vector<int> pieces;
    for (std::uint32_t token : tokens) {
      if (token >= static_cast<std::uint64_t>(vocabulary())) continue;
      const int piece = static_cast<int>(token);
      if (!processor_.IsControl(piece)) pieces.push_back(piece);
    }
    std::string bytes, text;
    check(processor_.Decode(pieces, &bytes), "decode");
    utf8::replace_invalid(bytes.begin(), bytes.end(), std::back_inserter(text));
    return text;
  }

  void write(const fs::path& directory) const override {
    write_file(directory / "tokenizer.model", read_file(path_));
    companions_.write(directory);
  }

 private:
  // Loads the model. Returns the problem; empty: none.
  std::string load(std::string_view model) {
    if (model.empty()) return "an empty file";  // LoadFromSerializedProto() calls it a model without pieces
    const CheckedModel checked = check_sentencepiece(model);
    if (!checked.problem.empty()) return checked.problem;
    try {
      const auto status = processor_.LoadFromSerializedProto(checked.bytes);
      if (!status.ok()) return status.ToString();
    } catch (const std::exception& error) {  // thrown by Darts-clone
      return error.what();
    }
    return processor_.GetPieceSize() == 0 ? "a model without pieces" : std::string();
  }

  void check(const sentencepiece::util::Status& status, const char* operation) const {
    if (!status.ok())
      refuse(std::string(operation) + " with " + name_, status.ToString(), "success",
             "Check that the SentencePiece model is whole");
  }

  sentencepiece::SentencePieceProcessor processor_;
  fs::path path_;
  Companions companions_;
  std::string name_;
};

}  // namespace

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(const fs::path& model) {
  return std::make_unique<SentencePieceTokenizer>(model);
}

}  // namespace isograd
