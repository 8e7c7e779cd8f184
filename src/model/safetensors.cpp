#include "model/safetensors.hpp"

#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "base/json.hpp"
#include "base/refuse.hpp"

namespace isograd {

const FloatType& float_type(at::ScalarType type) {
  if (const FloatType* row = float_type(type, &FloatType::type)) return *row;
  refuse("dtype", c10::toString(type), "float64, float32, float16 or bfloat16", "Convert the tensors");
}

namespace {

static_assert(std::endian::native == std::endian::little, "safetensors stores little-endian values");

constexpr std::uint64_t kMaxHeader = 100'000'000;  // the limit of the reference implementation
constexpr std::uint64_t kMostBits = std::uint64_t{1} << 60;
constexpr std::size_t kMostExtents = 64;  // of a tensor that LibTorch can copy
constexpr const char* kMetadataKey = "__metadata__";

struct Dtype {
  const char* name;
  at::ScalarType type;
  int bits;    // of an element as the format counts it
  int packed;  // the format's elements in one of LibTorch's
};
constexpr Dtype kDtypes[] = {
    {"BOOL", at::kBool, 8, 1},
    {"U8", at::kByte, 8, 1},
    {"I8", at::kChar, 8, 1},
    {"U16", at::kUInt16, 16, 1},
    {"I16", at::kShort, 16, 1},
    {"U32", at::kUInt32, 32, 1},
    {"I32", at::kInt, 32, 1},
    {"U64", at::kUInt64, 64, 1},
    {"I64", at::kLong, 64, 1},
    {"F16", at::kHalf, 16, 1},
    {"BF16", at::kBFloat16, 16, 1},
    {"F32", at::kFloat, 32, 1},
    {"F64", at::kDouble, 64, 1},
    {"C64", at::kComplexFloat, 64, 1},
    {"F8_E4M3", at::kFloat8_e4m3fn, 8, 1},
    {"F8_E5M2", at::kFloat8_e5m2, 8, 1},
    {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz, 8, 1},
    {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz, 8, 1},
    {"F8_E8M0", at::kFloat8_e8m0fnu, 8, 1},
    {"F4", at::kFloat4_e2m1fn_x2, 4, 2},
};

// Where one tensor lies, checked against itself but not yet against the others.
struct Entry {
  std::string name;
  const Dtype* dtype = nullptr;
  std::vector<std::int64_t> shape;   // in the format's elements
  std::uint64_t begin = 0, end = 0;  // bytes from the end of the header
};

class Reader {
 public:
  explicit Reader(const fs::path& path) : file_(std::make_shared<MappedFile>(path)) {}

  std::map<std::string, at::Tensor> read(Metadata* metadata) {
    const auto header = parse_header();
    std::vector<Entry> entries;
    for (const auto& [name, value] : header.items()) {
      if (name == kMetadataKey)
        read_metadata(value, metadata);
      else
        entries.push_back(parse_entry(name, value));
    }
    check_layout(entries);
    std::map<std::string, at::Tensor> tensors;
    for (const Entry& entry : entries) tensors.emplace(entry.name, view(entry));
    return tensors;
  }

 private:
  [[noreturn]] void bad(const std::string& tensor, const std::string& found,
                        const std::string& expected) const {
    refuse(file_->path().string() + (tensor.empty() ? "" : ": tensor " + tensor), found, expected,
           "The file is damaged or no safetensors file: restore or write it again");
  }

  nlohmann::json parse_header() {
    if (file_->size() < 8)
      bad("", fmt::format("{} bytes", file_->size()), "8 bytes that give the header's length");
    std::uint64_t length = 0;
    std::memcpy(&length, file_->data(), 8);
    if (length > kMaxHeader || length > file_->size() - 8)
      bad("", fmt::format("a header of {} bytes in a file of {}", length, file_->size()),
          fmt::format("at most {}, and within the file", kMaxHeader));
    data_ = file_->data() + 8 + length;
    data_bytes_ = file_->size() - 8 - length;

    auto [header, problem] = parse_json({reinterpret_cast<const char*>(file_->data() + 8), length});
    if (!problem.empty()) bad("", "a header with " + problem, "a JSON object");
    return std::move(header);
  }

  void read_metadata(const nlohmann::json& value, Metadata* metadata) const {
    if (!value.is_object()) bad("", std::string(kMetadataKey) + " is no object", "texts by name");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) bad("", fmt::format("{} {} is no text", kMetadataKey, key), "a text");
      if (metadata) (*metadata)[key] = text.get<std::string>();
    }
  }

  std::uint64_t integer(const std::string& name, const char* what, const nlohmann::json& value) const {
    if (!value.is_number_unsigned())
      bad(name, fmt::format("{} holds {}", what, brief(value)), "whole numbers, 0 or more");
    return value.get<std::uint64_t>();
  }

  Entry parse_entry(const std::string& name, const nlohmann::json& value) const {
    if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
        !value.contains("data_offsets"))
      bad(name, brief(value), "an object of dtype, shape and data_offsets");
    Entry entry;
    entry.name = name;
    for (const Dtype& dtype : kDtypes)
      if (value["dtype"] == dtype.name) entry.dtype = &dtype;
    if (!entry.dtype) bad(name, "dtype " + brief(value["dtype"]), "a dtype that LibTorch has");
    const auto& shape = value["shape"];
    const auto& offsets = value["data_offsets"];
    if (!shape.is_array()) bad(name, "shape " + brief(shape), "a list");
    if (!offsets.is_array() || offsets.size() != 2)
      bad(name, "data_offsets " + brief(offsets), "[begin, end]");

    // The strides of an empty tensor are products too: an extent of 0 counts as 1 among them.
    if (shape.size() > kMostExtents) bad(name, fmt::format("{} extents", shape.size()), "at most 64");
    std::uint64_t bits = static_cast<std::uint64_t>(entry.dtype->bits), reach = bits;
    for (const auto& item : shape) {
      const std::uint64_t extent = integer(name, "shape", item);
      if (extent > kMostBits || __builtin_mul_overflow(reach, std::max<std::uint64_t>(extent, 1), &reach) ||
          reach > kMostBits)
        bad(name, "shape " + brief(shape), "a number of elements that fits in memory");
      bits *= extent;
      entry.shape.push_back(static_cast<std::int64_t>(extent));
    }
    if (bits % 8 != 0 || (entry.dtype->packed > 1 && (entry.shape.empty() || entry.shape.back() % 2 != 0)))
      bad(name, "shape " + brief(shape), "whole bytes: an even last dimension");
    entry.begin = integer(name, "data_offsets", offsets[0]);
    entry.end = integer(name, "data_offsets", offsets[1]);
    if (entry.begin > entry.end || entry.end > data_bytes_)
      bad(name, fmt::format("bytes {} to {}", entry.begin, entry.end),
          fmt::format("within {} bytes of data (is the file truncated?)", data_bytes_));
    if (entry.end - entry.begin != bits / 8)
      bad(name, fmt::format("{} bytes", entry.end - entry.begin),
          fmt::format("{} bytes for {} {}", bits / 8, entry.dtype->name, shape.dump()));
    return entry;
  }

  // Together the tensors cover the data exactly: no byte is shared, none is hidden.
  void check_layout(std::vector<Entry>& entries) const {
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    std::uint64_t covered = 0;
    for (const Entry& entry : entries) {
      if (entry.begin != covered)
        bad(entry.name, fmt::format("begins at byte {}", entry.begin),
            fmt::format("byte {}, where the one before ends (tensors overlap or leave a gap)", covered));
      covered = entry.end;
    }
    if (covered != data_bytes_)
      bad("", fmt::format("{} bytes of data", data_bytes_),
          fmt::format("{}, as the header describes", covered));
  }

  at::Tensor view(const Entry& entry) const {
    auto shape = entry.shape;
    if (entry.dtype->packed > 1) shape.back() /= entry.dtype->packed;
    const auto options = at::TensorOptions().dtype(entry.dtype->type);
    if (entry.begin == entry.end) return at::empty(shape, options);
    auto* data = const_cast<std::uint8_t*>(data_ + entry.begin);
    const std::size_t alignment = static_cast<std::size_t>(entry.dtype->bits) / 8;
    if (alignment > 1 && reinterpret_cast<std::uintptr_t>(data) % alignment != 0) {
      at::Tensor copy = at::empty(shape, options);
      std::memcpy(copy.mutable_data_ptr(), data, entry.end - entry.begin);
      return copy;
    }
    return at::from_blob(
        data, shape, [file = file_](void*) {}, options);
  }

  std::shared_ptr<MappedFile> file_;
  const std::uint8_t* data_ = nullptr;
  std::uint64_t data_bytes_ = 0;
};

[[noreturn]] void cannot_write(const fs::path& path, const std::string& name, const std::string& found,
                               const std::string& expected) {
  refuse(path.string() + ": tensor " + name, found, expected,
         "Write tensors that the safetensors format can hold");
}

const Dtype& dtype_of(const fs::path& path, const TensorStream::Entry& entry) {
  for (const Dtype& dtype : kDtypes)
    if (dtype.type == entry.dtype && (dtype.packed == 1 || !entry.shape.empty())) return dtype;
  cannot_write(path, entry.name, c10::toString(entry.dtype), "a dtype of the format");
}

}  // namespace

std::map<std::string, at::Tensor> read_safetensors(const fs::path& path, Metadata* metadata) {
  return Reader(path).read(metadata);
}

TensorStream stream_of(NamedTensors tensors) {
  const auto bytes = [](const auto& named) {
    return named.second.defined() ? named.second.element_size() : 0;
  };
  std::stable_sort(tensors.begin(), tensors.end(),
                   [&](const auto& a, const auto& b) { return bytes(a) > bytes(b); });
  TensorStream stream;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined() || tensor.layout() != at::kStrided)
      cannot_write("a file of tensors", name, "no dense tensor", "a dense tensor");
    stream.entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  stream.each = [tensors = std::move(tensors)](const TensorStream::Take& take) {
    for (const auto& [name, tensor] : tensors) take(tensor);
  };
  return stream;
}

std::int64_t bytes_of(const TensorStream::Entry& entry) {
  return c10::multiply_integers(entry.shape) * static_cast<std::int64_t>(c10::elementSize(entry.dtype));
}

void write_safetensors(const fs::path& path, const NamedTensors& tensors, const Metadata& metadata) {
  write_safetensors(path, stream_of(tensors), metadata);
}

SafetensorsFile::SafetensorsFile(const fs::path& path, std::vector<TensorStream::Entry> entries,
                                 const Metadata& metadata)
    : entries_(std::move(entries)), file_(path) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[kMetadataKey] = metadata;
  std::uint64_t offset = 0;
  std::set<std::string> names{kMetadataKey};
  for (const TensorStream::Entry& entry : entries_) {
    if (!names.insert(entry.name).second)
      cannot_write(path, entry.name, "this name twice, or reserved", "a name of its own");
    const Dtype& dtype = dtype_of(path, entry);
    std::vector<std::int64_t> shape = entry.shape;
    if (dtype.packed > 1) shape.back() *= dtype.packed;
    const std::uint64_t end = offset + static_cast<std::uint64_t>(bytes_of(entry));
    // Its names differ, so none needs to be looked for among those before it.
    header.get_ref<nlohmann::ordered_json::object_t&>().emplace_back(
        entry.name,
        nlohmann::ordered_json{{"dtype", dtype.name}, {"shape", shape}, {"data_offsets", {offset, end}}});
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const nlohmann::json::type_error&) {
    cannot_write(path, "(some name)", "a name or metadata that is not UTF-8", "UTF-8");
  }
  text.append((8 - text.size() % 8) % 8, ' ');  // so that the data begin aligned
  const std::uint64_t length = text.size();
  file_.write(&length, sizeof length);
  file_.write(text);
}

void SafetensorsFile::add(const at::Tensor& tensor) {
  const TensorStream::Entry& entry = entries_.at(written_++);
  ISOGRAD_INVARIANT(tensor.sizes() == at::IntArrayRef(entry.shape) && tensor.scalar_type() == entry.dtype,
                    fmt::format("'{}' is not what its entry says", entry.name));
  const at::Tensor dense = tensor.detach().to(at::kCPU).contiguous().resolve_conj().resolve_neg();
  file_.write(dense.const_data_ptr(), dense.nbytes());
}

void SafetensorsFile::commit() {
  ISOGRAD_INVARIANT(is_whole(), "fewer tensors than entries");
  file_.commit();
}

void write_safetensors(const fs::path& path, const TensorStream& tensors, const Metadata& metadata) {
  SafetensorsFile file(path, tensors.entries, metadata);
  tensors.each([&](const at::Tensor& tensor) { file.add(tensor); });
  file.commit();
}

}  // namespace isograd
